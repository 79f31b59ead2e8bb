//! The control path: how long an engine waits for an answer that moves no bytes, beside what two
//! processes of the same machine can do at best.
//!
//! Two Managers run, each started by `orbitkv serve` with its default settings: one that may use
//! two cores, one that may use one. Every number is measured once a round, floors and ours in
//! turn, and the medians of the rounds are reported.

mod bars;
mod crew;
mod rounds;

use std::time::Duration;

use serde_json::{Map, Value, json};

use crate::bar::Bar;
use crate::error::BenchError;
use crate::machine::{COMMIT, Machine};
use crate::manager::Manager;
use crate::series::{self, Row};
use crate::{pages, process};
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

/// Everything that was measured.
#[derive(Clone, Debug)]
pub struct Report {
    /// The numbers, in the order in which they are shown.
    pub rows: Vec<Row>,
    /// Numbers beside their bars.
    pub bars: Vec<Bar>,
    /// Where they were measured.
    pub machine: Machine,
    /// The commit that was measured.
    pub commit: &'static str,
    options: Options,
}

impl Report {
    /// The same as one JSON object.
    pub fn to_json(&self) -> Value {
        let (mut all, mut spread) = (Map::new(), Map::new());
        for row in &self.rows {
            series::put(&mut all, &row.name, series::number(row.median));
            let range = json!({
                "min": series::number(row.min),
                "max": series::number(row.max),
                "rounds": row.rounds,
            });
            series::put(&mut spread, &row.name, range);
        }
        let options = &self.options;
        for (name, value) in [
            ("spread", Value::Object(spread)),
            ("bars", json!(self.bars)),
            ("machine", json!(self.machine)),
            ("commit", json!(self.commit)),
            ("command", json!(options.command)),
            ("runs", json!(options.runs)),
            ("slice_ms", json!(options.slice.as_millis() as u64)),
            ("idle_seconds", series::number(options.idle.as_secs_f64())),
            ("pages_resident", json!(options.chains * pages::CHAIN_PAGES)),
        ] {
            all.insert(name.to_owned(), value);
        }
        Value::Object(all)
    }

    /// The same as lines of comma-separated values, after comments that say where they are from.
    pub fn to_csv(&self) -> String {
        let Machine { cpu, cpus, kernel, .. } = &self.machine;
        let mut text = format!(
            "# {cpu}, {cpus} CPUs, Linux {kernel}\n# commit {}\n# {}\n\
             number,median,min,max,rounds\n",
            self.commit, self.options.command
        );
        for Row { name, median, min, max, rounds } in &self.rows {
            let [median, min, max] = [*median, *min, *max].map(series::number);
            text.push_str(&format!("{name},{median},{min},{max},{rounds}\n"));
        }
        text
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
    let two = Manager::start(&[ours, peer], options.interrupted)?;
    let one = Manager::start(&[ours], options.interrupted)?;
    let series = Rounds::new(&options, [ours, peer], &two, &one, progress).run()?;
    two.stop()?;
    one.stop()?;
    let (rows, bars) = (series.rows(), bars::compare(&series));
    let machine = Machine::read(cpus.len());
    Ok(Report { rows, bars, machine, commit: COMMIT, options })
}
