//! The device of engines whose KV lies in host memory: two threads that copy, one a direction.

mod copy;
mod import;
mod memory;
mod peer;
mod process;

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use ringbuf::traits::{Consumer, Producer, Split};
use ringbuf::{HeapCons, HeapProd, HeapRb};

use super::{COMMANDS_MAX, CopyCommand, CopyEnd, Device, Notify};
use crate::core::Direction;
use crate::image::ImageMemory;

pub use import::ImportError;
pub use memory::{HostMemory, MemoryWay};
pub use peer::PeerHandle;

/// Commands that one thread works on in turns, so that a long one does not hold up a short one.
const ACTIVE_MAX: usize = 8;
/// Longest sleep of an idle thread. Nothing depends on it: a submit wakes the thread.
const PARK_MAX: Duration = Duration::from_secs(1);
/// How long a thread that ran out of work looks for more before it sleeps: about twice what a
/// wake-up costs on a virtual machine.
const SPIN: Duration = Duration::from_micros(50);
/// Spins that found nothing after which a thread sleeps at once, except every
/// [`SPIN_PROBE`]-th time.
const SPIN_MISSES_MAX: u32 = 8;
const SPIN_PROBE: u32 = 64;

const RUN: u8 = 0;
const DRAIN: u8 = 1;
const ABANDON: u8 = 2;

/// Copies between host memory of engines and the pool. Not `Sync`: the reactor owns it.
///
/// Dropping it ends both threads after the step they are in (a few MiB); commands that were not
/// finished then are forgotten. [`Device::stop`] finishes them.
pub struct HostDevice {
    save: Lane,
    restore: Lane,
    polled_last: Direction,
}

impl HostDevice {
    /// Starts both threads.
    ///
    /// # Errors
    ///
    /// The system refused a thread.
    pub fn start(images: Arc<dyn ImageMemory>, notify: Notify) -> std::io::Result<Self> {
        Ok(Self {
            save: Lane::start("orbitkv-save", Arc::clone(&images), Arc::clone(&notify))?,
            restore: Lane::start("orbitkv-restore", images, notify)?,
            polled_last: Direction::Restore,
        })
    }
}

impl Device for HostDevice {
    fn submit(&mut self, command: CopyCommand) -> Result<(), CopyCommand> {
        match command.direction {
            Direction::Save => self.save.submit(command),
            Direction::Restore => self.restore.submit(command),
        }
    }

    fn poll(&mut self) -> Option<CopyEnd> {
        // The direction that was not served last goes first: neither starves the other.
        let (first, second) = match self.polled_last {
            Direction::Save => (&mut self.restore, &mut self.save),
            Direction::Restore => (&mut self.save, &mut self.restore),
        };
        let end = first.poll().or_else(|| second.poll())?;
        self.polled_last = end.direction;
        Some(end)
    }

    fn outstanding(&self) -> usize {
        self.save.outstanding + self.restore.outstanding
    }

    fn stop(&mut self) {
        self.save.signal(DRAIN);
        self.restore.signal(DRAIN);
        self.save.join();
        self.restore.join();
    }
}

/// One direction: its thread, the queue to it and the queue back.
struct Lane {
    commands: HeapProd<CopyCommand>,
    ends: HeapCons<CopyEnd>,
    /// `RUN`, `DRAIN` or `ABANDON`; only ever raised.
    state: Arc<AtomicU8>,
    outstanding: usize,
    thread: Option<JoinHandle<()>>,
}

impl Lane {
    fn start(
        name: &'static str,
        images: Arc<dyn ImageMemory>,
        notify: Notify,
    ) -> std::io::Result<Self> {
        let (commands, taken) = HeapRb::new(COMMANDS_MAX).split();
        // As long as the command queue, and `outstanding` counts both: an end always has room.
        let (ended, ends) = HeapRb::new(COMMANDS_MAX).split();
        let state = Arc::new(AtomicU8::new(RUN));
        let worker_state = Arc::clone(&state);
        let thread = thread::Builder::new().name(name.to_owned()).spawn(move || {
            let queues = Queues { commands: taken, ends: ended, notify };
            work(queues, &worker_state, images.as_ref());
        })?;
        Ok(Self { commands, ends, state, outstanding: 0, thread: Some(thread) })
    }

    fn submit(&mut self, command: CopyCommand) -> Result<(), CopyCommand> {
        let Some(thread) = &self.thread else { return Err(command) };
        if self.outstanding >= COMMANDS_MAX {
            return Err(command);
        }
        self.commands.try_push(command)?;
        self.outstanding += 1;
        // Costs a system call only when the thread sleeps.
        thread.thread().unpark();
        Ok(())
    }

    fn poll(&mut self) -> Option<CopyEnd> {
        let end = self.ends.try_pop()?;
        self.outstanding -= 1;
        Some(end)
    }

    fn signal(&self, state: u8) {
        self.state.fetch_max(state, Ordering::Release);
        if let Some(thread) = &self.thread {
            thread.thread().unpark();
        }
    }

    fn join(&mut self) {
        if let Some(thread) = self.thread.take()
            && let Err(panic) = thread.join()
            && !thread::panicking()
        {
            std::panic::resume_unwind(panic);
        }
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        self.signal(ABANDON);
        self.join();
    }
}

struct Queues {
    commands: HeapCons<CopyCommand>,
    ends: HeapProd<CopyEnd>,
    notify: Notify,
}

/// Body of a device thread: takes commands, gives each active one a step in turn, reports ends.
fn work(mut queues: Queues, state: &AtomicU8, images: &dyn ImageMemory) {
    let mut active = copy::Active::with_capacity(ACTIVE_MAX);
    let mut scratch = copy::Scratch::default();
    let mut idle = Idle::new();
    loop {
        // Read before the queue: what was submitted before `stop` is then seen below.
        let state_now = state.load(Ordering::Acquire);
        if state_now == ABANDON {
            return;
        }
        while active.len() < ACTIVE_MAX
            && let Some(command) = queues.commands.try_pop()
        {
            active.push_back(copy::Running::new(command));
        }
        let Some(mut running) = active.pop_front() else {
            if state_now == DRAIN {
                return;
            }
            idle.wait(|| {
                use ringbuf::traits::Observer;
                !queues.commands.is_empty() || state.load(Ordering::Relaxed) != RUN
            });
            continue;
        };
        match running.step(images, &mut scratch) {
            copy::Step::More => active.push_back(running),
            copy::Step::Ended(error) => {
                // Cannot be full, see `Lane::start`.
                let pushed = queues.ends.try_push(running.finish(error));
                debug_assert!(pushed.is_ok(), "no room for the end of a copy");
                (queues.notify)();
            }
        }
    }
}

/// Waits for work: spins while that has been paying off and there is a core to spare, then parks.
struct Idle {
    may_spin: bool,
    misses: u32,
    waits: u32,
}

impl Idle {
    fn new() -> Self {
        let cores = thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Self { may_spin: cores > 1, misses: 0, waits: 0 }
    }

    fn wait(&mut self, ready: impl Fn() -> bool) {
        self.waits = self.waits.wrapping_add(1);
        let probe = self.waits.is_multiple_of(SPIN_PROBE);
        if self.may_spin && (self.misses < SPIN_MISSES_MAX || probe) {
            let start = Instant::now();
            while start.elapsed() < SPIN {
                if ready() {
                    self.misses = 0;
                    return;
                }
                std::hint::spin_loop();
            }
            self.misses = self.misses.saturating_add(1);
        }
        // A submit since the last look at the queue left a token that makes this return at once.
        thread::park_timeout(PARK_MAX);
    }
}
