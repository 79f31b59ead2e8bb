//! `bench ssd`: the SSD tier beside a plain loop on the same file.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use orbitkv_benches::ssd::{self, Options, PAGE_BYTES, SIZE, SLICE_MAX};
use orbitkv_manager::core::limits::{PAGE_BYTES_MAX, PAGE_BYTES_MIN};
use orbitkv_manager::units::{Size, parse_duration, parse_size};

use super::publish::{FileArgs, Files};
use super::{RUNS_MAX, command_line};
use crate::exit::{Exit, ToolError};
use crate::replay::within;
use crate::signal;

/// Longest pages here: the pool holds some of each.
const LONGEST: u64 = if PAGE_BYTES_MAX < 16 << 20 { PAGE_BYTES_MAX } else { 16 << 20 };

/// Flags of `bench ssd`.
#[derive(Clone, PartialEq, Eq, Debug, Args)]
pub(super) struct SsdArgs {
    /// File to make, use and remove; may be repeated, each on a device of its own
    #[arg(long, value_name = "PATH", required = true)]
    ssd: Vec<PathBuf>,
    /// Bytes of all files together
    #[arg(long, value_name = "SIZE", default_value_t = Size(SIZE), value_parser = size)]
    size: Size,
    /// Page size to measure; may be repeated [default: 128KiB 1MiB 9MiB]
    #[arg(long, value_name = "SIZE", value_parser = page_bytes)]
    page_bytes: Vec<u32>,
    /// Pairs of slices; every number is the median over them
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = within(1, RUNS_MAX))]
    pairs: u64,
    /// Length of a slice
    #[arg(long, value_name = "DUR", default_value = "1s", value_parser = slice)]
    slice: Duration,
    #[command(flatten)]
    files: FileArgs,
}

fn size(text: &str) -> Result<Size, String> {
    parse_size(text).map(Size).map_err(|error| error.to_string())
}

fn page_bytes(text: &str) -> Result<u32, String> {
    let bytes = parse_size(text).map_err(|error| error.to_string())?;
    if !(PAGE_BYTES_MIN..=LONGEST).contains(&bytes) || !bytes.is_multiple_of(PAGE_BYTES_MIN) {
        let (min, max) = (Size(PAGE_BYTES_MIN), Size(LONGEST));
        return Err(format!("must be a multiple of {min}, at most {max}"));
    }
    Ok(bytes as u32)
}

fn slice(text: &str) -> Result<Duration, String> {
    let length = parse_duration(text).map_err(|error| error.to_string())?;
    if length.is_zero() || length > SLICE_MAX {
        return Err(format!("must be 1ms to {}s", SLICE_MAX.as_secs()));
    }
    Ok(length)
}

/// Runs the benchmark.
pub(super) fn run(args: SsdArgs) -> Result<Exit, ToolError> {
    let files = Files::open(args.files)?;
    let page_bytes = if args.page_bytes.is_empty() { PAGE_BYTES.to_vec() } else { args.page_bytes };
    let options = Options {
        paths: args.ssd,
        size: args.size.0,
        page_bytes,
        pairs: args.pairs as u32,
        slice: args.slice,
        command: command_line(),
        interrupted: || signal::check().is_err(),
    };
    files.fill("slices", options.steps(), |progress| ssd::run(options, progress))
}
