//! Raw copies of an engine's pages by another process, as the Manager is another process: what a GPU
//! takes to go from one to the other is in them, and nothing of ours.

use std::rc::Rc;
use std::time::Duration;

use orbitkv_shm_protocol::bootstrap::message::MemorySpec;
use serde::{Deserialize, Serialize};

use super::cuda::RawCopies;
use super::field::Raw;
use super::shape::{SHAPES, Shape};
use crate::clock;
use crate::crew::Crew;
use crate::error::BenchError;
use crate::gpu::{Device, Imported};
use crate::part::{Answer, Job, Work};
use crate::process;

/// How long the process runs before it begins: its core is awake then, and its time that of a process
/// that polls.
const AWAKE: Duration = Duration::from_micros(200);

/// One copy, or both ways at once.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub(crate) struct Visit {
    save: Option<Raw>,
    restore: Option<Raw>,
}

/// The engine's end: a process with a context of its own.
#[derive(Debug)]
pub(super) struct Elsewhere(Crew);

impl Elsewhere {
    /// Starts it over the memory of a shape and waits until it has opened that.
    pub(super) fn start(shape: &Shape, memory: Vec<MemorySpec>) -> Result<Self, BenchError> {
        let cpus = process::cpus().map_err(BenchError::system("read CPU affinity"))?;
        let shape = SHAPES.iter().position(|known| known == shape).expect("a shape of the list");
        let job = Job { cpus, work: Work::Elsewhere { shape, memory } };
        Crew::start("elsewhere", 1, &job, || false).map(Self)
    }

    /// Has it copy while this process waits: nanoseconds from its first call to its first sight of
    /// the flag.
    pub(super) fn copy(
        &mut self,
        save: Option<Raw>,
        restore: Option<Raw>,
    ) -> Result<u64, BenchError> {
        let visit = serde_json::to_string(&Visit { save, restore }).unwrap_or_default();
        match self.0.ask(&visit)?.pop() {
            Some(Answer::Took { ns }) => Ok(ns),
            _ => Err(BenchError::Part { part: "elsewhere", cause: "no time in its answer" }),
        }
    }
}

/// The other end.
pub(crate) struct Visitor {
    // Dropped in this order: copies end before the memory is closed.
    raw: RawCopies,
    _memory: Vec<Imported>,
}

impl Visitor {
    /// Opens the memory of a shape.
    pub(crate) fn open(shape: usize, memory: &[MemorySpec]) -> Result<Self, BenchError> {
        let device = Rc::new(Device::open(0)?);
        let memory = memory.iter().map(Imported::open).collect::<Result<Vec<_>, _>>()?;
        let addresses: Vec<_> = memory.iter().map(Imported::address).collect();
        let raw = RawCopies::new(&SHAPES[shape], &device, &addresses, 1)?;
        Ok(Self { raw, _memory: memory })
    }

    /// Copies as `text`, a [`Visit`], says.
    pub(crate) fn follow(&mut self, text: &str) -> Result<u64, BenchError> {
        let Ok(Visit { save, restore }) = serde_json::from_str(text) else {
            return Err(BenchError::Part { part: "elsewhere", cause: "a line without a copy" });
        };
        let begin = clock::now_ns() + AWAKE.as_nanos() as u64;
        while clock::now_ns() < begin {
            std::hint::spin_loop();
        }
        self.raw.copy(save, restore)
    }
}
