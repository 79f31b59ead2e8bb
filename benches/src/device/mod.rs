//! Copies between an engine's pages and DRAM, beside the fastest raw copy of the same bytes.
//!
//! The Manager is the process that `serve` starts; the engine is a process with the ring client on
//! host memory or a GPU. A round of a shape does every operation, ours and raw in turn; what comes
//! back is compared word by word, and one that differs ends the benchmark without a number.

mod bars;
mod busy;
mod cuda;
mod elsewhere;
mod engine;
mod field;
mod host;
mod pattern;
mod results;
mod shape;

use std::ffi::OsString;
use std::thread;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Map, json};

use crate::crew::Crew;
use crate::error::BenchError;
use crate::manager::Manager;
use crate::part::{Answer, Job, Work};
use crate::process;
use crate::report::Report;
pub(crate) use busy::Busy;
pub(crate) use elsewhere::Visitor;
pub(crate) use engine::{Copies, Engine, Op, Order};
use results::{Beside, Results};
pub use shape::{SHAPES, Shape};

/// Shapes that are copied beside a busy GPU: small, many parts, large.
const BESIDE_BUSY: [&str; 3] = ["4k", "18m_split", "576m_36x256k"];
/// Shapes that are restored again and again as well, without a look at the bytes in between: after
/// such a look every thread sleeps, and what is measured is how long it takes to wake.
const REPEATED: [&str; 1] = ["4k"];
/// Slices of such restores, ours and raw in turn, and how long one is.
const REPEATS: usize = 8;
const REPEAT_SLICE: Duration = Duration::from_millis(100);
/// DRAM of the Manager beside what pages need.
const DRAM_SPARE: u64 = 64 << 20;
/// Times the bytes of the largest shape: two saves of it, leases of at most half, and room.
const DRAM_TIMES: u64 = 4;

/// Where the engine's pages are.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// In host memory.
    Host,
    /// On a GPU.
    Cuda,
}

impl Kind {
    /// As `serve --device` takes it.
    pub fn label(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Cuda => "cuda",
        }
    }
}

/// What to measure and for how long.
#[derive(Clone, Debug)]
pub struct Options {
    /// Where the engine's pages are.
    pub kind: Kind,
    /// Positions in [`SHAPES`].
    pub shapes: Vec<usize>,
    /// Rounds of each shape.
    pub runs: u32,
    /// Measure again while another process keeps the GPU busy; each slice so long.
    pub beside_busy: Option<Duration>,
    /// The command line, as it is reported.
    pub command: String,
    /// Asked again and again; once true the benchmark ends.
    pub interrupted: fn() -> bool,
}

impl Options {
    /// How often [`run`] reports progress.
    pub fn steps(&self) -> u64 {
        let rounds = self.orders().len() as u64;
        let beside = self.beside_busy.map_or(0, |_| self.busy_orders().len() as u64);
        rounds + beside
    }

    fn orders(&self) -> Vec<Order> {
        let rounds = |&shape: &usize| {
            (0..self.runs).map(move |round| Order::Round { shape, ours_first: round % 2 == 0 })
        };
        let repeated = |&shape: &usize| {
            let slice_ns = REPEAT_SLICE.as_nanos() as u64;
            let wanted = REPEATED.contains(&SHAPES[shape].name);
            let runs = [true, false].map(|ours| Order::Run { ours, slice_ns });
            let begin = wanted.then_some(Order::Prepare { shape, op: Op::Restore });
            let runs = runs.into_iter().cycle().take(if wanted { 2 * REPEATS } else { 0 });
            begin.into_iter().chain(runs).chain(wanted.then_some(Order::Check))
        };
        let shapes = self.shapes.iter();
        shapes.clone().flat_map(rounds).chain(shapes.flat_map(repeated)).collect()
    }

    fn busy_orders(&self) -> Vec<Order> {
        let slice_ns = self.beside_busy.unwrap_or_default().as_nanos() as u64;
        let wanted = |shape: &&usize| BESIDE_BUSY.contains(&SHAPES[**shape].name);
        let runs = |shape: &usize| {
            let shape = *shape;
            [Op::Save, Op::Restore].into_iter().flat_map(move |op| {
                let run = |ours| Order::Run { ours, slice_ns };
                [Order::Prepare { shape, op }, run(true), run(false), Order::Check]
            })
        };
        self.shapes.iter().filter(wanted).flat_map(runs).collect()
    }

    fn dram_bytes(&self) -> u64 {
        let largest = self.shapes.iter().map(|shape| SHAPES[*shape].bytes()).max();
        DRAM_TIMES * largest.unwrap_or_default() + DRAM_SPARE
    }
}

/// Runs the benchmark. Calls `progress` with the number of steps done, after each.
///
/// # Errors
/// See [`BenchError`]; [`BenchError::Wrong`] when any byte did not come back as it was saved. The
/// Manager is stopped and nothing is left behind.
pub fn run(options: Options, progress: &mut dyn FnMut(u64)) -> Result<Report, BenchError> {
    let cpus = process::cpus().map_err(BenchError::system("read CPU affinity"))?;
    if cpus.len() < 2 {
        return Err(BenchError::TooFewCpus { cpus: cpus.len() });
    }
    let folder = tempfile::Builder::new().prefix("orbitkv-bench-").tempdir();
    let folder = folder.map_err(BenchError::system("make a temporary folder"))?;
    let (socket, log) = (folder.path().join("socket"), folder.path().join("log"));
    let dram = options.dram_bytes().to_string();
    let arguments = ["--device", options.kind.label(), "--dram", &dram].map(OsString::from);
    let manager = Manager::spawn(&socket, &log, &arguments)?.until_ready(options.interrupted)?;
    let mut steps = 0;
    let mut step = || {
        steps += 1;
        progress(steps);
    };
    let job = |orders: &[Order]| Job {
        cpus: cpus.clone(),
        work: Work::Device { socket: socket.clone(), kind: options.kind, orders: orders.to_vec() },
    };
    let orders = options.orders();
    let mut results = Results::default();
    let mut crew = Crew::start("engine", 1, &job(&orders), options.interrupted)?;
    let (mut repeated, mut ours) = (&SHAPES[0], None);
    for order in &orders {
        let mut copies = copies_of(crew.measure()?)?;
        match *order {
            Order::Round { shape, .. } => results.add(&SHAPES[shape], copies),
            Order::Prepare { shape, .. } => repeated = &SHAPES[shape],
            Order::Run { ours: true, .. } => ours = copies.pop(),
            Order::Run { ours: false, .. } => {
                let (raw, ours) = copies.pop().zip(ours.take()).ok_or_else(strange)?;
                results.add(&repeated.again(), vec![Copies { raw_ns: raw.raw_ns, ..ours }]);
            }
            Order::Check => {}
        }
        step();
    }
    crew.end()?;
    let beside = match options.beside_busy {
        Some(slice) => {
            let orders = options.busy_orders();
            let busy = Job { cpus: cpus.clone(), work: Work::Busy { rates: 2 * orders.len() + 2 } };
            let mut busy = Crew::start("busy", 1, &busy, options.interrupted)?;
            let mut crew = Crew::start("engine", 1, &job(&orders), options.interrupted)?;
            let beside = beside_busy(&orders, slice, &mut busy, &mut crew, &mut step)?;
            crew.end()?;
            busy.end()?;
            Some(beside)
        }
        None => None,
    };
    manager.stop()?;
    let mut rows = results.rows();
    let mut object = Map::new();
    for (name, value) in [
        ("device", json!(options.kind.label())),
        ("results", results.to_json()),
        ("delivery_ns", results.delivery()),
        ("runs", json!(options.runs)),
        ("dram_bytes", json!(options.dram_bytes())),
    ] {
        object.insert(name.to_owned(), value);
    }
    if let Some(beside) = &beside {
        rows.extend(beside.rows());
        object.insert("beside_busy".to_owned(), beside.to_json());
    }
    let bars = match options.kind {
        // Its raw copies are no floor of the machine.
        Kind::Host => Vec::new(),
        Kind::Cuda => bars::compare(&rows, results.delivery_p99()),
    };
    let mut report = Report::new(rows, bars, cpus.len(), options.command, object);
    report.setting = Some(format!("device {}", options.kind.label()));
    Ok(report)
}

/// Every order once, while the GPU is kept busy; how busy it was during each run.
fn beside_busy(
    orders: &[Order],
    slice: Duration,
    busy: &mut Crew,
    crew: &mut Crew,
    step: &mut dyn FnMut(),
) -> Result<Beside, BenchError> {
    rate_of(busy.measure()?)?;
    thread::sleep(slice);
    let mut beside = Beside::new(rate_of(busy.measure()?)?);
    let mut shape = &SHAPES[0];
    for order in orders {
        rate_of(busy.measure()?)?;
        let mut copies = copies_of(crew.measure()?)?;
        let rate = rate_of(busy.measure()?)?;
        match *order {
            Order::Prepare { shape: at, .. } => shape = &SHAPES[at],
            Order::Run { .. } => {
                beside.add(shape, copies.pop().ok_or_else(strange)?, rate);
            }
            _ => {}
        }
        step();
    }
    Ok(beside)
}

fn copies_of(mut answers: Vec<Answer>) -> Result<Vec<Copies>, BenchError> {
    match answers.pop() {
        Some(Answer::Copies(copies)) => Ok(copies),
        _ => Err(strange()),
    }
}

fn rate_of(mut answers: Vec<Answer>) -> Result<f64, BenchError> {
    match answers.pop() {
        Some(Answer::Kernels { per_second }) => Ok(per_second),
        _ => Err(strange()),
    }
}

fn strange() -> BenchError {
    BenchError::Part { part: "engine", cause: "it answered another question" }
}
