//! `bench control`: the control path beside the floors of this machine.

use std::time::Duration;

use clap::Args;
use orbitkv_benches::control::{self, Options};
use orbitkv_manager::units::parse_duration;

use super::publish::{FileArgs, Files};
use super::{RUNS_MAX, command_line};
use crate::exit::{Exit, ToolError};
use crate::replay::within;
use crate::signal;

/// Flags of `bench control`.
#[derive(Clone, PartialEq, Eq, Debug, Args)]
pub(super) struct ControlArgs {
    /// Rounds; every number is the median over them
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = within(1, RUNS_MAX))]
    runs: u64,
    /// Length of one measurement in one round
    #[arg(long, value_name = "DUR", default_value = "100ms", value_parser = parse_duration)]
    slice: Duration,
    /// How long the idle Manager is watched
    #[arg(long, value_name = "DUR", default_value = "30s", value_parser = parse_duration)]
    idle: Duration,
    /// Chains of 1024 pages that are saved first
    #[arg(long, value_name = "N", default_value_t = u64::from(control::CHAINS), value_parser = within(1, 10_000))]
    chains: u64,
    #[command(flatten)]
    files: FileArgs,
}

/// Runs the benchmark.
pub(super) fn run(args: ControlArgs) -> Result<Exit, ToolError> {
    let files = Files::open(args.files)?;
    let options = Options {
        runs: args.runs as u32,
        slice: args.slice,
        idle: args.idle,
        chains: args.chains as u32,
        command: command_line(),
        interrupted: || signal::check().is_err(),
    };
    files.fill("measurements", options.steps(), |progress| control::run(options, progress))
}
