//! The engine for hosts that forbid io_uring: a few threads that call `preadv` and `pwritev`.
#![allow(unsafe_code, reason = "hands addresses of buffers to the kernel")]

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use super::file::SsdFile;
use super::io::{Chunk, Done, Engine, EngineKind, EngineMode, Part, Transfer};
use super::wake::Wake;
use crate::image::ImageMemory;

/// Threads of one engine: as fast as a ring with 1 MiB chunks, with more CPU for small ones.
pub(crate) const BLOCKING_THREADS: u16 = 8;

/// Threads and what they share.
pub(crate) struct BlockingEngine {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    depth: usize,
    in_flight: usize,
}

struct Shared {
    queues: Mutex<Queues>,
    work: Condvar,
    wake: Arc<Wake>,
    file: Arc<SsdFile>,
    memory: Arc<dyn ImageMemory>,
}

#[derive(Default)]
struct Queues {
    submitted: VecDeque<Chunk>,
    done: Vec<Done>,
    stop: bool,
}

impl Shared {
    /// A poisoned lock only says that a thread died between two complete states.
    fn queues(&self) -> MutexGuard<'_, Queues> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl BlockingEngine {
    /// Starts `threads` threads for at most `depth` chunks in flight.
    ///
    /// # Errors
    ///
    /// When a thread cannot be started.
    pub(crate) fn new(
        file: Arc<SsdFile>,
        memory: Arc<dyn ImageMemory>,
        wake: Arc<Wake>,
        depth: u16,
        threads: u16,
    ) -> io::Result<Self> {
        let queues = Mutex::new(Queues::default());
        let shared = Arc::new(Shared { queues, work: Condvar::new(), wake, file, memory });
        let mut engine = Self {
            shared: shared.clone(),
            threads: Vec::new(),
            depth: usize::from(depth),
            in_flight: 0,
        };
        for _ in 0..threads.max(1) {
            let shared = shared.clone();
            let name = String::from("ssd-io");
            engine
                .threads
                .push(std::thread::Builder::new().name(name).spawn(move || serve(&shared))?);
        }
        Ok(engine)
    }
}

impl Engine for BlockingEngine {
    fn mode(&self) -> EngineMode {
        let kind = EngineKind::Blocking(self.threads.len() as u16);
        EngineMode { kind, ..EngineMode::UNREGISTERED }
    }

    fn depth(&self) -> usize {
        self.depth
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn submit(&mut self, chunk: Chunk) -> Result<(), Chunk> {
        if self.in_flight >= self.depth {
            return Err(chunk);
        }
        self.in_flight += 1;
        self.shared.queues().submitted.push_back(chunk);
        self.shared.work.notify_one();
        Ok(())
    }

    fn wait(
        &mut self,
        ready: &mut dyn FnMut() -> bool,
        timeout: Option<Duration>,
        done: &mut Vec<Done>,
    ) {
        let before = done.len();
        self.shared.wake.doze();
        done.append(&mut self.shared.queues().done);
        if done.len() == before && !ready() {
            self.shared.wake.block(timeout);
            done.append(&mut self.shared.queues().done);
        }
        self.shared.wake.rise();
        self.in_flight -= done.len() - before;
    }
}

impl Drop for BlockingEngine {
    fn drop(&mut self) {
        let mut queues = self.shared.queues();
        queues.stop = true;
        // Never started, so not the kernel's.
        queues.submitted.clear();
        drop(queues);
        self.shared.work.notify_all();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn serve(shared: &Shared) {
    let mut vector = Vec::new();
    let mut queues = shared.queues();
    loop {
        if let Some(mut chunk) = queues.submitted.pop_front() {
            drop(queues);
            let result = transfer(shared, &mut chunk, &mut vector);
            queues = shared.queues();
            queues.done.push(Done { chunk, result });
            drop(queues);
            shared.wake.ring();
            queues = shared.queues();
        } else if queues.stop {
            return;
        } else {
            queues = shared.work.wait(queues).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Does the I/O of one chunk; the result has the form of a ring's.
fn transfer(shared: &Shared, chunk: &mut Chunk, vector: &mut Vec<libc::iovec>) -> i32 {
    vector.clear();
    for part in &mut chunk.parts {
        let (start, bytes) = match part {
            Part::Image(extent) => match shared.memory.slice(*extent) {
                Some(slice) => (slice.as_ptr(), slice.bytes()),
                None => return -libc::EFAULT,
            },
            Part::Block(block) => (block.0.as_mut_ptr(), block.0.len()),
        };
        vector.push(libc::iovec { iov_base: start.cast(), iov_len: bytes });
    }
    let file = shared.file.descriptor().as_raw_fd();
    let (count, offset) = (vector.len() as libc::c_int, chunk.offset as libc::off_t);
    let moved = match chunk.transfer {
        // SAFETY: every entry is memory of the pool, which `shared` keeps mapped and which only
        // this operation may touch, or a block that `chunk` owns; both outlive the call.
        Transfer::Read => unsafe { libc::preadv(file, vector.as_ptr(), count, offset) },
        // SAFETY: as above; the kernel only reads.
        Transfer::Write => unsafe { libc::pwritev(file, vector.as_ptr(), count, offset) },
    };
    if moved >= 0 {
        return i32::try_from(moved).unwrap_or(i32::MAX);
    }
    -io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
}
