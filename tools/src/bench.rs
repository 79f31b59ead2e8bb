//! `bench`: what the library of benchmarks measures, as a table and as JSON.

mod ssd;

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};
use orbitkv_benches::control::{self, Options};
use orbitkv_benches::{Bar, BenchError, Machine, Row};
use orbitkv_manager::units::parse_duration;

use crate::exit::{Exit, ToolError};
use crate::output::{Output, print};
use crate::progress::{Progress, State};
use crate::replay::within;
use crate::signal;
use crate::table::Table;

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
    Control(ControlArgs),
    /// Reads and writes of the SSD tier, beside a plain `io_uring` loop on the same file
    Ssd(ssd::SsdArgs),
}

/// Flags of `bench control`.
#[derive(Clone, PartialEq, Eq, Debug, Args)]
struct ControlArgs {
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
    /// Write every number as JSON
    #[arg(long, value_name = "OUT")]
    json: Option<PathBuf>,
    /// Write every number as comma-separated values
    #[arg(long, value_name = "OUT")]
    csv: Option<PathBuf>,
}

/// Runs the verb.
pub(crate) fn run(verb: BenchVerb) -> Result<Exit, ToolError> {
    match verb.kind {
        Kind::Control(args) => run_control(args),
        Kind::Ssd(args) => ssd::run(args),
    }
}

fn run_control(args: ControlArgs) -> Result<Exit, ToolError> {
    let (json, csv) = (Output::open("json", args.json)?, Output::open("csv", args.csv)?);
    signal::install()?;
    let options = Options {
        runs: args.runs as u32,
        slice: args.slice,
        idle: args.idle,
        chains: args.chains as u32,
        command: command_line(),
        interrupted: || signal::check().is_err(),
    };
    let mut progress = Progress::new("measurements", options.steps());
    let report = control::run(options, &mut |done| {
        progress.advance(&State { done, note: String::new() });
    });
    progress.finish();
    let report = report?;
    print(table(&report.rows, &report.bars))?;
    print(origin(&report.machine, report.commit))?;
    if let Some(json) = json {
        json.json(&report.to_json())?;
    }
    if let Some(csv) = csv {
        csv.text(&report.to_csv())?;
    }
    Ok(Exit::Ok)
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

/// Numbers, then their bars.
fn table(rows: &[Row], bars: &[Bar]) -> String {
    let mut numbers = Table::new(&["number", "median", "min", "max", "rounds"]);
    for row in rows {
        let rounds = row.rounds.to_string();
        numbers.row([row.name.clone(), short(row.median), short(row.min), short(row.max), rounds]);
    }
    let mut verdicts = Table::new(&["bar", "value", "limit", "ratio", "", "rule"]);
    for bar in bars {
        let verdict = if bar.pass { "pass" } else { "MISS" };
        let (value, limit) = (short(bar.value), short(bar.limit));
        let ratio = bar.ratio.map(short).unwrap_or_default();
        let (name, verdict, rule) = (bar.name.clone(), verdict.to_owned(), bar.rule.clone());
        verdicts.row([name, value, limit, ratio, verdict, rule]);
    }
    format!("{numbers}\n{verdicts}\n")
}

/// Where the numbers are from.
fn origin(machine: &Machine, commit: &str) -> String {
    let Machine { cpu, cpus, kernel, .. } = machine;
    format!("{cpu} with {cpus} CPUs, Linux {kernel}; commit {commit}\n")
}

/// Three significant digits or so.
fn short(value: f64) -> String {
    match value {
        whole if whole.fract() == 0.0 => format!("{whole:.0}"),
        large if large.abs() >= 100.0 => format!("{large:.0}"),
        middle if middle.abs() >= 1.0 => format!("{middle:.1}"),
        small => format!("{small:.4}"),
    }
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
