//! The control path: how long an engine waits for an answer that moves no bytes, beside what two
//! processes of the same machine can do at best.
//!
//! Two Managers run, each started by `orbitkv serve` with its default settings: one that may use
//! two cores, one that may use one. Every number is measured once a round, floors and ours in
//! turn, and the medians of the rounds are reported.

mod bars;
mod pinned;
mod rounds;

use std::time::Duration;

use serde_json::json;

use crate::error::BenchError;
use crate::report::{self, Report};
use crate::series;
use crate::{pages, process};
use pinned::Pinned;
use rounds::Rounds;

/// Clients of the measurements with several.
pub const CLIENTS: usize = 8;
/// Chains of 1,024 pages that are saved unless [`Options::chains`] says otherwise.
pub const CHAINS: u32 = pages::CHAINS;

/// What to measure and for how long.
#[derive(Clone, Debug)]
pub struct Options {
    /// Rounds; medians need at least five.
    pub runs: u32,
    /// Length of one measurement in one round.
    pub slice: Duration,
    /// How long the idle Manager is watched.
    pub idle: Duration,
    /// Chains of 1,024 pages to save.
    pub chains: u32,
    /// The command line, as it is reported.
    pub command: String,
    /// Asked again and again; once true the benchmark ends.
    pub interrupted: fn() -> bool,
}

impl Options {
    /// How often [`run`] reports progress.
    pub fn steps(&self) -> u64 {
        rounds::STEPS_A_ROUND * u64::from(self.runs) + rounds::STEPS_BESIDE
    }
}

/// Runs the benchmark. Calls `progress` with the number of steps done, after each.
///
/// # Errors
/// See [`BenchError`]; [`BenchError::Wrong`] when any answer was not what it must be. Both Managers
/// are stopped and nothing is left behind.
pub fn run(options: Options, progress: &mut dyn FnMut(u64)) -> Result<Report, BenchError> {
    let cpus = process::cpus().map_err(BenchError::system("read CPU affinity"))?;
    let [ours, peer] = match cpus[..] {
        [ours, peer, ..] => [ours, peer],
        _ => return Err(BenchError::TooFewCpus { cpus: cpus.len() }),
    };
    let two = Pinned::start(&[ours, peer], options.interrupted)?;
    let one = Pinned::start(&[ours], options.interrupted)?;
    let series = Rounds::new(&options, [ours, peer], &two, &one, progress).run()?;
    two.stop()?;
    one.stop()?;
    let (rows, bars) = (series.rows(), bars::compare(&series));
    let mut object = report::summary(rows.iter().map(|row| (row.name.as_str(), row)));
    for (name, value) in [
        ("runs", json!(options.runs)),
        ("slice_ms", json!(options.slice.as_millis() as u64)),
        ("idle_seconds", series::number(options.idle.as_secs_f64())),
        ("pages_resident", json!(options.chains * pages::CHAIN_PAGES)),
    ] {
        object.insert(name.to_owned(), value);
    }
    Ok(Report::new(rows, bars, cpus.len(), options.command, object))
}
