//! A disk in memory that fails as told. Fault model: each chunk, when it is served, may be answered
//! with an errno or moved in part (the rest of a read keeps its old bytes, the rest of a write never
//! reaches the disk); chunks are served oldest or newest first, and none while the gate is shut.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::format::BLOCK_BYTES;
use super::io::{Chunk, Done, Engine, EngineMode, Part, Transfer};
use super::wake::Wake;
use crate::image::ImageMemory;

/// What to do to a chunk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Fault {
    /// Answer with this errno, move nothing.
    Errno(i32),
    /// Move this many bytes only.
    Short(u32),
}

type Plan = Box<dyn FnMut(&Chunk) -> Option<Fault>>;

/// Open while it is true.
pub(crate) type Gate = Arc<AtomicBool>;

/// The bytes of a disk; shared by engines that are to see the same file.
pub(crate) type Disk = Arc<Mutex<Vec<u8>>>;

/// An engine over a [`Disk`].
pub(crate) struct FakeEngine {
    disk: Disk,
    memory: Arc<dyn ImageMemory>,
    wake: Arc<Wake>,
    depth: usize,
    queue: VecDeque<Chunk>,
    plan: Plan,
    newest_first: bool,
    gate: Option<Gate>,
    log: Log,
}

/// What an engine was asked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Served {
    pub(crate) offset: u64,
    pub(crate) bytes: u32,
    pub(crate) parts: usize,
    /// Image bytes in flight at that time, its own included.
    pub(crate) image_bytes_in_flight: u64,
}

/// Everything that was served, in order.
pub(crate) type Log = Arc<Mutex<Vec<Served>>>;

impl FakeEngine {
    pub(crate) fn new(
        disk: Disk,
        memory: Arc<dyn ImageMemory>,
        wake: Arc<Wake>,
        depth: u16,
    ) -> Self {
        Self {
            disk,
            memory,
            wake,
            depth: usize::from(depth),
            queue: VecDeque::new(),
            plan: Box::new(|_| None),
            newest_first: false,
            gate: None,
            log: Log::default(),
        }
    }

    /// Asks `plan` before each chunk is served.
    pub(crate) fn with_plan(mut self, plan: impl FnMut(&Chunk) -> Option<Fault> + 'static) -> Self {
        self.plan = Box::new(plan);
        self
    }

    /// Serves the newest chunk first instead of the oldest.
    pub(crate) fn newest_first(mut self) -> Self {
        self.newest_first = true;
        self
    }

    /// Keeps what it has while `gate` is false, as a disk that hangs. Whoever opens it wakes the
    /// engine.
    pub(crate) fn behind(mut self, gate: &Gate) -> Self {
        self.gate = Some(gate.clone());
        self
    }

    /// Where everything that is served is written down.
    pub(crate) fn log(&self) -> Log {
        self.log.clone()
    }

    fn serve(&mut self, chunk: &mut Chunk) -> i32 {
        let fault = (self.plan)(chunk);
        let mut left = chunk.bytes() as usize;
        match fault {
            Some(Fault::Errno(errno)) => return -errno,
            Some(Fault::Short(bytes)) => left = left.min(bytes as usize),
            _ => {}
        }
        let mut disk = self.disk.lock().unwrap();
        let mut at = chunk.offset as usize;
        let mut moved = 0;
        for part in &mut chunk.parts {
            let bytes =
                (part.bytes() as usize).min(left - moved).min(disk.len().saturating_sub(at));
            let range = at..at + bytes;
            match (chunk.transfer, part) {
                (Transfer::Read, Part::Image(extent)) => match self.memory.slice(*extent) {
                    Some(slice) => assert!(slice.fill_from(&disk[range])),
                    None => return -libc::EFAULT,
                },
                (Transfer::Write, Part::Image(extent)) => match self.memory.slice(*extent) {
                    Some(slice) => disk[range].copy_from_slice(&slice.to_vec()[..bytes]),
                    None => return -libc::EFAULT,
                },
                (Transfer::Read, Part::Block(block)) => {
                    block.0[..bytes].copy_from_slice(&disk[range]);
                }
                (Transfer::Write, Part::Block(block)) => {
                    disk[range].copy_from_slice(&block.0[..bytes]);
                }
            }
            at += bytes;
            moved += bytes;
        }
        moved as i32
    }
}

impl Engine for FakeEngine {
    fn mode(&self) -> EngineMode {
        EngineMode::UNREGISTERED
    }

    fn depth(&self) -> usize {
        self.depth
    }

    fn in_flight(&self) -> usize {
        self.queue.len()
    }

    fn submit(&mut self, chunk: Chunk) -> Result<(), Chunk> {
        assert!(
            chunk.offset.is_multiple_of(BLOCK_BYTES as u64),
            "direct I/O wants aligned offsets"
        );
        assert!(chunk.bytes().is_multiple_of(BLOCK_BYTES as u32) && chunk.bytes() > 0);
        if self.queue.len() >= self.depth {
            return Err(chunk);
        }
        self.queue.push_back(chunk);
        Ok(())
    }

    fn wait(
        &mut self,
        ready: &mut dyn FnMut() -> bool,
        timeout: Option<Duration>,
        done: &mut Vec<Done>,
    ) {
        let open = self.gate.as_ref().is_none_or(|gate| gate.load(Ordering::Acquire));
        let next = match (open, self.newest_first) {
            (false, _) => None,
            (true, true) => self.queue.pop_back(),
            (true, false) => self.queue.pop_front(),
        };
        if let Some(mut chunk) = next {
            let others: u64 = self.queue.iter().map(|other| u64::from(other.image_bytes())).sum();
            self.log.lock().unwrap().push(Served {
                offset: chunk.offset,
                bytes: chunk.bytes(),
                parts: chunk.parts.len(),
                image_bytes_in_flight: others + u64::from(chunk.image_bytes()),
            });
            let result = self.serve(&mut chunk);
            done.push(Done { chunk, result });
            return;
        }
        self.wake.doze();
        if !ready() {
            self.wake.block(timeout);
        }
        self.wake.rise();
    }
}
