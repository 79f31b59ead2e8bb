//! The SSD tier beside a plain io_uring loop on the same file and the same memory.
//!
//! The tier is the Manager's own code with its own threads; the thread of the benchmark orders and
//! polls as the reactor does, within the limits of `core`. Both sides move whole pages between the
//! same slots, in the same random order, and the same pool. They run in turn, in short slices, and
//! each slice is compared with its neighbour: the speed of a shared disk drifts.

mod bars;
mod field;
mod floor;
mod ours;
mod paced;
mod raw;
mod rounds;
mod slice;

use std::path::PathBuf;
use std::time::Duration;

use serde_json::{Map, Value, json};

use crate::error::BenchError;
use crate::process;
use crate::report::{self, Report};
use crate::series::{Row, Series};
use field::{Buffers, Field};
use ours::Ours;
use raw::Raw;
use rounds::Rounds;

/// Page sizes that are measured unless [`Options::page_bytes`] says otherwise.
pub const PAGE_BYTES: [u32; 3] = [128 << 10, 1 << 20, 9 << 20];
/// Bytes of all files together unless [`Options::size`] says otherwise.
pub const SIZE: u64 = 6 << 30;
/// Slices of each pair at most this long.
pub const SLICE_MAX: Duration = Duration::from_secs(2);

/// Slices of one round: two pairs, and reads alone and beside writes, of both sides.
const STEPS_A_ROUND: u64 = 8;
/// Steps of one page size beside the rounds: the fill and the choice of two floors.
const STEPS_BESIDE: u64 = 3;
/// Steps of a round over several devices: two pairs on one, two on all.
const STEPS_OF_SCALING: u64 = 8;

/// What to measure and for how long.
#[derive(Clone, Debug)]
pub struct Options {
    /// Files to make, each on a device of its own.
    pub paths: Vec<PathBuf>,
    /// Bytes of all files together.
    pub size: u64,
    /// Page sizes.
    pub page_bytes: Vec<u32>,
    /// Pairs of slices of each measurement.
    pub pairs: u32,
    /// Length of a slice.
    pub slice: Duration,
    /// The command line, as it is reported.
    pub command: String,
    /// Asked again and again; once true the benchmark ends.
    pub interrupted: fn() -> bool,
}

impl Options {
    /// How often [`run`] reports progress.
    pub fn steps(&self) -> u64 {
        let pairs = u64::from(self.pairs);
        let mut steps = STEPS_BESIDE + STEPS_A_ROUND * pairs;
        if self.paths.len() > 1 {
            steps += STEPS_BESIDE - 1 + STEPS_OF_SCALING * pairs;
        }
        steps * self.page_bytes.len() as u64
    }
}

/// Runs the benchmark. Calls `progress` with the number of steps done, after each.
///
/// # Errors
/// See [`BenchError`]; [`BenchError::Wrong`] when any page did not come back as it was written. The
/// files that were made are removed.
pub fn run(options: Options, progress: &mut dyn FnMut(u64)) -> Result<Report, BenchError> {
    let cpus = process::cpus().map_err(BenchError::system("read CPU affinity"))?;
    let longest = options.page_bytes.iter().copied().max().unwrap_or_default();
    let pool = field::pool()?;
    let mut ours = Ours::open(&options.paths, options.size, longest, &pool)?;
    let mut raw = Raw::open(&ours.devices, &pool)?;
    let mut series = Series::default();
    let mut steps = 0;
    let mut step = || {
        steps += 1;
        progress(steps);
    };
    let parts = options.page_bytes.len() as u32;
    for (part, &page_bytes) in (0..).zip(&options.page_bytes) {
        let field = Field::new(&ours.devices, page_bytes, (part, parts))?;
        let buffers = Buffers::cut(pool.clone(), page_bytes)?;
        let rounds = Rounds {
            options: &options,
            ours: &mut ours,
            raw: &mut raw,
            field,
            buffers,
            series: &mut series,
            step: &mut step,
        };
        rounds.run()?;
    }
    let mode = ours.devices.first().map(|info| info.read_mode);
    let compared = ours.compared + raw.compared;
    ours.stop();
    let rows = series.rows();
    let bars = options.page_bytes.iter().flat_map(|bytes| bars::compare(&series, *bytes)).collect();
    let results: Vec<_> = options.page_bytes.iter().map(|bytes| result(&rows, *bytes)).collect();
    let page_mode = pool.page_mode().label();
    let words = mode.map(|mode| mode.to_string()).unwrap_or_default();
    let mut object = Map::new();
    for (name, value) in [
        ("engine", json!(mode.map_or("", |mode| mode.label()))),
        ("engine_mode", json!(words)),
        ("page_mode", json!(page_mode)),
        ("results", json!(results)),
        ("pages_compared", json!(compared)),
        ("files", json!(options.paths.len())),
        ("size_bytes", json!(options.size)),
        ("pairs", json!(options.pairs)),
        ("slice_ms", json!(options.slice.as_millis() as u64)),
    ] {
        object.insert(name.to_owned(), value);
    }
    let mut report = Report::new(rows, bars, cpus.len(), options.command, object);
    report.setting = Some(format!("{words}; DRAM in {page_mode} pages"));
    Ok(report)
}

/// The numbers of one page size, whose bytes come first in each name.
fn result(rows: &[Row], page_bytes: u32) -> Map<String, Value> {
    let prefix = format!("{page_bytes}/");
    let named = rows.iter().filter_map(|row| Some((row.name.strip_prefix(&prefix)?, row)));
    let mut result = report::summary(named);
    result.insert("page_bytes".to_owned(), json!(page_bytes));
    result
}
