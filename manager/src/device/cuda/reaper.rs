//! Unmaps what engines leave behind. A thread of its own, because the driver may let the caller wait
//! for every copy in flight on the GPU (58 ms were measured), for which neither the reactor nor the
//! endpoint has time.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use orbitkv_shm_protocol::segment::DoneWords;

use super::driver::{self, CudaError, OpenEvent};
use super::gpu::Gpu;

/// Longest wait for the driver: it waits for copies in flight, not for a GPU that hangs.
const WAIT_MAX: Duration = Duration::from_secs(1);

/// What is given back to the driver.
pub(super) enum Remains {
    /// Memory opened by IPC.
    Memory { gpu: Arc<Gpu>, base: u64 },
    /// An event opened by IPC.
    Event { gpu: Arc<Gpu>, event: OpenEvent },
    /// Registered done words; mapped for as long as this holds them.
    Words { gpu: Arc<Gpu>, words: DoneWords },
    /// Nothing: told when all before it was given back.
    Note(Sender<()>),
}

impl Remains {
    fn give_back(self) -> Result<(), CudaError> {
        match self {
            Self::Note(waiting) => {
                // Whoever waits may have given up.
                let _ = waiting.send(());
                Ok(())
            }
            Self::Memory { gpu, base } => {
                gpu.enter()?;
                driver::close_memory(base)
            }
            Self::Event { gpu, event } => {
                gpu.enter()?;
                event.close()
            }
            Self::Words { gpu, words } => {
                gpu.enter()?;
                match NonNull::new(words.region().0) {
                    Some(start) => driver::unregister(start),
                    None => Ok(()),
                }
            }
        }
    }
}

/// The thread. Dropping it waits until everything was given back.
#[derive(Debug)]
pub(super) struct Reaper {
    remains: Option<Sender<Remains>>,
    thread: Option<JoinHandle<()>>,
}

impl Reaper {
    pub(super) fn start() -> std::io::Result<Self> {
        // Bounded by what sessions may register in their lives.
        let (remains, taken) = channel();
        let thread = thread::Builder::new()
            .name("orbitkv-unmap".to_owned())
            .spawn(move || give_back_all(&taken))?;
        Ok(Self { remains: Some(remains), thread: Some(thread) })
    }

    /// Gives something back soon.
    pub(super) fn take(&self, remains: Remains) {
        // The thread ends when `self` does.
        let _ = self.remains.as_ref().map(|queue| queue.send(remains));
    }

    /// Waits until everything taken so far was given back, at most [`WAIT_MAX`].
    pub(super) fn wait(&self) {
        let (note, noted) = channel();
        self.take(Remains::Note(note));
        // Whoever waits finds out by trying whether it was.
        let _ = noted.recv_timeout(WAIT_MAX);
    }
}

impl Drop for Reaper {
    fn drop(&mut self) {
        self.remains = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn give_back_all(taken: &Receiver<Remains>) {
    for remains in taken {
        if let Err(error) = remains.give_back() {
            tracing::warn!(%error, "the CUDA driver did not take back what an engine had registered");
        }
    }
}
