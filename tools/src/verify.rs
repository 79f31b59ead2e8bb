//! `verify`: reads the SSD tier of a stopped Manager and checks every image. Changes nothing.

use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use orbitkv_manager::image::ImageMemory;
use orbitkv_manager::pool::{DramPool, HugePages, PoolConfig};
use orbitkv_manager::ssd::{self, SlotCounts};
use serde::Serialize;

use crate::exit::{Exit, ToolError};
use crate::output::{Output, print};
use crate::progress::{Progress, State};

/// Memory that images are read to, in bytes: that of the longest image there can be. In large
/// pages, since a drive fills small ones at half its speed.
const MEMORY_BYTES: u64 = 64 << 20;

/// Flags of `verify`.
#[derive(Clone, PartialEq, Eq, Debug, Args)]
pub(crate) struct VerifyArgs {
    /// File of the SSD tier; all files of the tier, in the order of its configuration
    #[arg(long, value_name = "PATH", required = true)]
    ssd: Vec<PathBuf>,
    /// Write the counts as JSON
    #[arg(long, value_name = "OUT")]
    json: Option<PathBuf>,
}

/// What was found; the last four sum to the first.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
struct Counts {
    /// Slots of every region in use.
    slots: u64,
    /// Images that a Manager would serve, and whose bytes match.
    valid: u64,
    /// Images that do not match their footer: writes that a crash cut short.
    torn: u64,
    /// Images that a newer one replaced, or whose namespace was forgotten.
    stale: u64,
    /// Slots without an image.
    empty: u64,
}

impl From<SlotCounts> for Counts {
    fn from(counts: SlotCounts) -> Self {
        Self {
            slots: counts.slots,
            valid: counts.valid,
            torn: counts.torn,
            stale: counts.stale,
            empty: counts.empty,
        }
    }
}

/// Runs the verb. Torn images are no failure: a Manager treats them as misses.
pub(crate) fn run(args: VerifyArgs) -> Result<Exit, ToolError> {
    let output = Output::open("json", args.json)?;
    let pool =
        PoolConfig { bytes: MEMORY_BYTES, huge_pages: HugePages::Prefer, prefault_threads: 0 };
    let memory: Arc<dyn ImageMemory> = Arc::new(DramPool::allocate(pool)?);
    let mut progress: Option<Progress> = None;
    let counts = ssd::verify(&args.ssd, &memory, |done, total| {
        let shown = progress.get_or_insert_with(|| Progress::new("slots", total));
        shown.advance(&State { done, ..State::default() });
    })?;
    if let Some(progress) = progress {
        progress.finish();
    }
    let counts = Counts::from(counts);
    print(format_args!(
        "{} slots: {} valid, {} torn, {} stale, {} empty\n",
        counts.slots, counts.valid, counts.torn, counts.stale, counts.empty
    ))?;
    if let Some(output) = output {
        output.json(&counts)?;
    }
    Ok(Exit::Ok)
}
