//! `bench device`: saves and restores beside raw copies of the same bytes.

use std::time::Duration;

use clap::{Args, ValueEnum};
use orbitkv_benches::BenchError;
use orbitkv_benches::device::{self, Kind, Options, SHAPES};
use orbitkv_manager::units::parse_duration;

use super::publish::{FileArgs, Files};
use super::{RUNS_MAX, command_line};
use crate::exit::{Exit, ToolError};
use crate::replay::within;
use crate::signal;

/// Flags of `bench device`.
#[derive(Clone, PartialEq, Eq, Debug, Args)]
pub(super) struct DeviceArgs {
    /// Where the engine's pages are
    #[arg(long, value_name = "DEVICE", default_value = "host")]
    device: DeviceArg,
    /// Shape to measure; may be repeated [default: all]
    #[arg(long, value_name = "NAME", value_parser = shape)]
    shape: Vec<usize>,
    /// Rounds of each shape; every number is the median over them
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = within(1, RUNS_MAX))]
    runs: u64,
    /// Measure again while another process keeps the GPU busy
    #[arg(long)]
    beside_busy: bool,
    /// Length of a measurement beside the busy process
    #[arg(long, value_name = "DUR", default_value = "1s", value_parser = parse_duration)]
    slice: Duration,
    #[command(flatten)]
    files: FileArgs,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum DeviceArg {
    Host,
    Cuda,
}

fn shape(name: &str) -> Result<usize, String> {
    let known = SHAPES.iter().position(|shape| shape.name == name);
    known.ok_or_else(|| {
        let names: Vec<_> = SHAPES.iter().map(|shape| shape.name).collect();
        format!("must be one of {}", names.join(", "))
    })
}

/// Runs the benchmark.
pub(super) fn run(args: DeviceArgs) -> Result<Exit, ToolError> {
    let kind = match args.device {
        DeviceArg::Host => Kind::Host,
        DeviceArg::Cuda => Kind::Cuda,
    };
    if args.beside_busy && kind == Kind::Host {
        return Err(BenchError::NotOnGpu.into());
    }
    let files = Files::open(args.files)?;
    let all = || (0..SHAPES.len()).collect();
    let options = Options {
        kind,
        shapes: if args.shape.is_empty() { all() } else { args.shape },
        runs: args.runs as u32,
        beside_busy: args.beside_busy.then_some(args.slice),
        command: command_line(),
        interrupted: || signal::check().is_err(),
    };
    files.fill("rounds", options.steps(), |progress| device::run(options, progress))
}
