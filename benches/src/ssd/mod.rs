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
mod raw;
mod rounds;
mod slice;

use std::path::PathBuf;
use std::time::Duration;

use serde_json::{Map, Value, json};

use crate::bar::Bar;
use crate::error::BenchError;
use crate::machine::{COMMIT, Machine};
use crate::process;
use crate::series::{self, Row, Series};
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

/// Slices of one round: two pairs, and reads alone and beside writes.
const STEPS_A_ROUND: u64 = 6;
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

/// Everything that was measured.
#[derive(Clone, Debug)]
pub struct Report {
    /// The numbers, in the order in which they are shown; the page bytes come first in each name.
    pub rows: Vec<Row>,
    /// Numbers beside their bars.
    pub bars: Vec<Bar>,
    /// Where they were measured.
    pub machine: Machine,
    /// The commit that was measured.
    pub commit: &'static str,
    /// How the tier does I/O, in words.
    pub mode: String,
    /// Size of the pages that hold the DRAM pool.
    pub page_mode: &'static str,
    engine: &'static str,
    compared: u64,
    options: Options,
}

impl Report {
    /// The same as one JSON object.
    pub fn to_json(&self) -> Value {
        let results: Vec<Value> =
            self.options.page_bytes.iter().map(|bytes| self.result(*bytes)).collect();
        let options = &self.options;
        json!({
            "engine": self.engine,
            "engine_mode": self.mode,
            "page_mode": self.page_mode,
            "results": results,
            "bars": self.bars,
            "pages_compared": self.compared,
            "machine": self.machine,
            "commit": self.commit,
            "command": options.command,
            "files": options.paths.len(),
            "size_bytes": options.size,
            "pairs": options.pairs,
            "slice_ms": options.slice.as_millis() as u64,
        })
    }

    fn result(&self, page_bytes: u32) -> Value {
        let (mut result, mut spread) = (Map::new(), Map::new());
        result.insert("page_bytes".to_owned(), json!(page_bytes));
        let prefix = format!("{page_bytes}/");
        for row in &self.rows {
            let Some(name) = row.name.strip_prefix(&prefix) else { continue };
            series::put(&mut result, name, series::number(row.median));
            let range = json!({
                "min": series::number(row.min),
                "max": series::number(row.max),
                "rounds": row.rounds,
            });
            series::put(&mut spread, name, range);
        }
        result.insert("spread".to_owned(), Value::Object(spread));
        Value::Object(result)
    }

    /// The same as lines of comma-separated values, after comments that say where they are from.
    pub fn to_csv(&self) -> String {
        let Machine { cpu, cpus, kernel, .. } = &self.machine;
        let mut text = format!(
            "# {cpu}, {cpus} CPUs, Linux {kernel}; {}; DRAM in {} pages\n# commit {}\n# {}\n\
             number,median,min,max,rounds\n",
            self.mode, self.page_mode, self.commit, self.options.command
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
    let bars = options.page_bytes.iter().flat_map(|bytes| bars::compare(&series, *bytes));
    Ok(Report {
        rows: series.rows(),
        bars: bars.collect(),
        machine: Machine::read(cpus.len()),
        commit: COMMIT,
        mode: mode.map(|mode| mode.to_string()).unwrap_or_default(),
        page_mode: pool.page_mode().label(),
        engine: mode.map_or("", |mode| mode.label()),
        compared,
        options,
    })
}
