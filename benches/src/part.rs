//! A process of a benchmark: told what to do by the coordinator, one measurement a line.
//!
//! Standard input brings one `Job` and then an empty line for every measurement to begin;
//! standard output answers `Ready`, and then one `Answer` a measurement. The end of standard
//! input ends the process.

use std::io::{self, BufRead, Write};
use std::path::PathBuf;
use std::time::Duration;

use orbitkv_shm_protocol::bootstrap::message::MemorySpec;
use rustix::process::{Signal, set_parent_process_death_signal};
use serde::{Deserialize, Serialize};

use crate::device::{Busy, Copies, Engine, Kind, Order, Visitor};
use crate::error::BenchError;
use crate::lookup::Lookup;
use crate::session::Session;
use crate::stats::{Samples, Summary};
use crate::{floors, poll, process, throughput};

/// The hidden verb that starts such a process.
pub const VERB: &str = "bench-part";

/// Everything that a part is to do.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub(crate) struct Job {
    /// CPUs that the process may use before it attaches.
    pub(crate) cpus: Vec<usize>,
    /// What to measure.
    pub(crate) work: Work,
}

/// What a part measures.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub(crate) enum Work {
    /// A floor of the machine, with a forked peer on `peer_cpu`.
    Floor { floor: Floor, peer_cpu: usize, slice_ns: u64 },
    /// The hash map, one measurement a walk.
    Lookup { chains: u32, walks: Vec<Walk>, slice_ns: u64 },
    /// The empty poll.
    Poll { socket: PathBuf, slice_ns: u64 },
    /// Saves all pages.
    Save { socket: PathBuf, chains: u32 },
    /// Round trips, one measurement an `ask`; without any the client stays attached and idle.
    RoundTrips { socket: PathBuf, chains: u32, asks: Vec<Ask>, wait: Wait, length: Length },
    /// Copies of an engine on its device, one measurement an order.
    Device { socket: PathBuf, kind: Kind, orders: Vec<Order> },
    /// Raw copies over the memory of an engine's shape, each as its line says.
    Elsewhere { shape: usize, memory: Vec<MemorySpec> },
    /// Keeps a GPU busy and says `rates` times how fast that goes.
    Busy { rates: usize },
    /// Queries of one page, each with its release, as many as possible.
    Throughput { socket: PathBuf, chains: u32, depth: u32, slice_ns: u64 },
}

/// Floors of the machine.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) enum Floor {
    /// Request and response on two cache lines, spinning.
    TwoLine,
    /// The same, sleeping on a futex.
    Futex,
    /// Messages over a socket.
    UnixSocket,
}

/// Keys that the hash map is asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct Walk {
    /// The first so many of a chain.
    pub(crate) pages: u32,
    /// The same chain again and again, or one after the other.
    pub(crate) one_chain: bool,
}

/// Kinds of round trips.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) enum Ask {
    /// Nothing but an answer.
    Ping,
    /// The first so many pages of a chain: the same chain again and again, or one after the other.
    Query { pages: u32, one_chain: bool },
}

/// How a client waits for an answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) enum Wait {
    /// Polls and does nothing else.
    Spin,
    /// `Client::wait`: spins while that pays, then sleeps.
    Park,
    /// The same, and a pause before each request so long that Manager and client are asleep.
    Asleep,
}

/// When a measurement ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct Length {
    pub(crate) slice_ns: u64,
    /// Requests after which it ends even earlier.
    pub(crate) count_max: Option<u64>,
}

impl Length {
    pub(crate) fn slice(self) -> Duration {
        Duration::from_nanos(self.slice_ns)
    }
}

/// What a part says.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub(crate) enum Answer {
    Ready,
    Times(Summary),
    Polled(Polled),
    Saved {
        pages: u64,
    },
    Rate(Rate),
    Copies(Vec<Copies>),
    Took {
        ns: u64,
    },
    Kernels {
        per_second: f64,
    },
    /// No numbers; the message says why.
    Failed {
        is_wrong: bool,
        message: String,
    },
}

/// What empty polls cost.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub(crate) struct Polled {
    /// Time of one, in nanoseconds.
    pub(crate) ns: f64,
    /// 0, or 1 when one was made (the first is the last).
    pub(crate) syscalls: u64,
    /// Of all polls together.
    pub(crate) allocations: u64,
}

/// What a client got done in a closed loop.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub(crate) struct Rate {
    /// Queries a second, each a checked hit whose lease was released.
    pub(crate) per_second: f64,
    /// From staging a query to seeing its answer.
    pub(crate) latency: Summary,
}

/// Runs a part of a benchmark until standard input ends. Returns whether all went well.
pub fn run() -> bool {
    // A coordinator that was killed leaves nobody behind.
    let _asked = set_parent_process_death_signal(Some(Signal::KILL));
    let mut input = io::stdin().lock().lines().map_while(Result::ok);
    let Some(job) = input.next().and_then(|line| serde_json::from_str::<Job>(&line).ok()) else {
        return false;
    };
    match work(&job, &mut input) {
        Ok(()) => true,
        Err(error) => {
            let is_wrong = matches!(error, BenchError::Wrong(_));
            let message = match error {
                BenchError::Wrong(text) => text.into(),
                other => other.to_string(),
            };
            say(&Answer::Failed { is_wrong, message });
            false
        }
    }
}

fn work(job: &Job, begin: &mut impl Iterator<Item = String>) -> Result<(), BenchError> {
    process::pin(&job.cpus).map_err(BenchError::system("set CPU affinity"))?;
    let mut samples = Samples::new();
    match &job.work {
        Work::Floor { floor, peer_cpu, slice_ns } => each(begin, &[()], |()| {
            floors::measure(*floor, *peer_cpu, nanos(*slice_ns), &mut samples).map(Answer::Times)
        }),
        Work::Lookup { chains, walks, slice_ns } => {
            let lookup = Lookup::new(*chains);
            each(begin, walks, |walk| {
                lookup.measure(walk, nanos(*slice_ns), &mut samples).map(Answer::Times)
            })
        }
        Work::Poll { socket, slice_ns } => {
            each(begin, &[()], |()| poll::measure(socket, nanos(*slice_ns)).map(Answer::Polled))
        }
        Work::Save { socket, chains } => {
            let mut session = Session::attach(socket, *chains)?;
            each(begin, &[()], |()| session.save_all().map(|pages| Answer::Saved { pages }))?;
            session.end()
        }
        Work::RoundTrips { socket, chains, asks, wait, length } => {
            let mut session = Session::attach(socket, *chains)?;
            each(begin, asks, |ask| {
                session.round_trips(ask, *wait, *length, &mut samples).map(Answer::Times)
            })?;
            session.end()
        }
        Work::Device { socket, kind, orders } => {
            let mut engine = Engine::new(socket, *kind)?;
            each(begin, orders, |order| engine.follow(order).map(Answer::Copies))?;
            engine.end()
        }
        Work::Elsewhere { shape, memory } => {
            let mut visitor = Visitor::open(*shape, memory)?;
            say(&Answer::Ready);
            for line in begin {
                say(&Answer::Took { ns: visitor.follow(&line)? });
            }
            Ok(())
        }
        Work::Busy { rates } => {
            let mut busy = Busy::start()?;
            each(begin, &vec![(); *rates], |()| {
                busy.rate().map(|per_second| Answer::Kernels { per_second })
            })
        }
        Work::Throughput { socket, chains, depth, slice_ns } => {
            let mut session = Session::attach(socket, *chains)?;
            each(begin, &[()], |()| {
                let slice = nanos(*slice_ns);
                throughput::measure(&mut session, *depth, slice, &mut samples).map(Answer::Rate)
            })?;
            session.end()
        }
    }
}

/// Says `Ready`, then makes one measurement for each line until the coordinator hangs up.
fn each<T: Copy>(
    begin: &mut impl Iterator<Item = String>,
    what: &[T],
    mut measure: impl FnMut(T) -> Result<Answer, BenchError>,
) -> Result<(), BenchError> {
    say(&Answer::Ready);
    let mut what = what.iter();
    while begin.next().is_some() {
        let Some(next) = what.next() else { break };
        say(&measure(*next)?);
    }
    Ok(())
}

fn nanos(ns: u64) -> Duration {
    Duration::from_nanos(ns)
}

/// One line to the coordinator; when it is gone, so is this process soon.
fn say(answer: &Answer) {
    let mut out = io::stdout().lock();
    if let Ok(line) = serde_json::to_string(answer) {
        let _closed = writeln!(out, "{line}").and_then(|()| out.flush());
    }
}
