//! `bench`: what the library of benchmarks measures, as a table and as JSON.

mod control;
mod device;
mod publish;
mod ssd;

use clap::{Args, Subcommand};
use orbitkv_benches::BenchError;

use crate::exit::{Exit, ToolError};

/// Most rounds.
const RUNS_MAX: u64 = 100;

/// Flags of `bench`.
#[derive(Clone, PartialEq, Eq, Debug, Args)]
pub(crate) struct BenchVerb {
    #[command(subcommand)]
    kind: Kind,
}

#[derive(Clone, PartialEq, Eq, Debug, Subcommand)]
enum Kind {
    /// Round trips that move no bytes, beside the floors of this machine
    Control(control::ControlArgs),
    /// Copies between an engine's pages and DRAM, beside raw copies of the same bytes
    Device(device::DeviceArgs),
    /// Reads and writes of the SSD tier, beside a plain `io_uring` loop on the same file
    Ssd(ssd::SsdArgs),
}

/// Runs the verb.
pub(crate) fn run(verb: BenchVerb) -> Result<Exit, ToolError> {
    match verb.kind {
        Kind::Control(args) => control::run(args),
        Kind::Device(args) => device::run(args),
        Kind::Ssd(args) => ssd::run(args),
    }
}

/// One process of a benchmark.
pub(crate) fn run_part() -> Exit {
    if orbitkv_benches::part::run() { Exit::Ok } else { Exit::Failed }
}

/// The command line without the folder of the program.
fn command_line() -> String {
    let arguments = std::env::args_os().skip(1);
    let words = arguments.map(|word| word.to_string_lossy().into_owned());
    std::iter::once("orbitkv".to_owned()).chain(words).collect::<Vec<_>>().join(" ")
}

impl From<BenchError> for ToolError {
    fn from(error: BenchError) -> Self {
        match error {
            BenchError::Interrupted => Self::Interrupted,
            BenchError::System { operation, source } => Self::System { operation, source },
            other => Self::Bench(other),
        }
    }
}
