//! A thread that copies: the queue of commands to it and the queue of their ends back.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use orbitkv_shm_protocol::doorbell::ControlRinger;
use orbitkv_shm_protocol::spin::Spin;
use ringbuf::traits::{Consumer, Observer, Producer, Split};
use ringbuf::{HeapCons, HeapProd, HeapRb};

use super::{CopyCommand, CopyEnd};
use crate::clock::Clock;
use crate::core::Nanos;

/// Longest sleep of an idle thread. Nothing depends on it: a submit wakes the thread.
const PARK_MAX: Duration = Duration::from_secs(1);

/// How long a thread that was told to expect a command looks for it before it sleeps again.
const EXPECT_WINDOW: Duration = Duration::from_micros(200);

/// What a thread is told; only ever raised.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum State {
    /// Serve.
    Run,
    /// Finish what was taken and what is queued, then return.
    Drain,
    /// Return as soon as memory is safe; nobody reads the ends.
    Abandon,
}

/// The owner's end. Dropping it abandons the work and waits for the thread.
pub(super) struct Lane {
    commands: HeapProd<CopyCommand>,
    ends: HeapCons<CopyEnd>,
    state: Arc<AtomicU8>,
    sleep: Arc<Sleep>,
    capacity: usize,
    outstanding: usize,
    thread: Option<JoinHandle<()>>,
}

impl Lane {
    /// Starts a thread that runs `work`, for `capacity` commands at a time. `notify` is rung after
    /// each end.
    pub(super) fn start(
        name: &str,
        capacity: usize,
        notify: ControlRinger,
        work: impl FnOnce(Queues) + Send + 'static,
    ) -> std::io::Result<Self> {
        let (commands, taken) = HeapRb::new(capacity).split();
        // As long as the command queue, and `outstanding` counts both: an end always has room.
        let (ended, ends) = HeapRb::new(capacity).split();
        let state = Arc::new(AtomicU8::new(State::Run as u8));
        let sleep = Arc::new(Sleep::default());
        let queues = Queues {
            commands: taken,
            ends: ended,
            notify,
            state: Arc::clone(&state),
            sleep: Arc::clone(&sleep),
            clock: Clock::monotonic(),
        };
        let thread = thread::Builder::new().name(name.to_owned()).spawn(move || work(queues))?;
        let thread = Some(thread);
        Ok(Self { commands, ends, state, sleep, capacity, outstanding: 0, thread })
    }

    #[expect(clippy::result_large_err, reason = "a refused command comes back whole")]
    pub(super) fn submit(&mut self, command: CopyCommand) -> Result<(), CopyCommand> {
        let Some(thread) = &self.thread else { return Err(command) };
        if self.outstanding >= self.capacity {
            return Err(command);
        }
        self.commands.try_push(command)?;
        self.outstanding += 1;
        // Costs a system call only when the thread sleeps.
        thread.thread().unpark();
        Ok(())
    }

    pub(super) fn poll(&mut self) -> Option<CopyEnd> {
        let end = self.ends.try_pop()?;
        self.outstanding -= 1;
        Some(end)
    }

    /// Commands submitted whose end was not polled.
    pub(super) fn outstanding(&self) -> usize {
        self.outstanding
    }

    /// A command will probably come soon: the thread, if it sleeps, wakes and looks for it. So the time
    /// that a wake takes passes while the command is being decided on.
    pub(super) fn expect(&self) {
        if self.sleep.sleeping.load(Ordering::Relaxed)
            && !self.sleep.expected.swap(true, Ordering::Relaxed)
            && let Some(thread) = &self.thread
        {
            thread.thread().unpark();
        }
    }

    /// Lets the thread return once everything submitted has ended.
    pub(super) fn drain(&self) {
        self.signal(State::Drain);
    }

    /// Waits for the thread; a panic of it goes on here.
    pub(super) fn join(&mut self) {
        if let Some(thread) = self.thread.take()
            && let Err(panic) = thread.join()
            && !thread::panicking()
        {
            std::panic::resume_unwind(panic);
        }
    }

    fn signal(&self, state: State) {
        self.state.fetch_max(state as u8, Ordering::Release);
        if let Some(thread) = &self.thread {
            thread.thread().unpark();
        }
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        self.signal(State::Abandon);
        self.join();
    }
}

/// What both ends know of the thread's sleep. Hints: no order depends on them.
#[derive(Default)]
struct Sleep {
    sleeping: AtomicBool,
    expected: AtomicBool,
}

/// The thread's end.
pub(super) struct Queues {
    commands: HeapCons<CopyCommand>,
    ends: HeapProd<CopyEnd>,
    notify: ControlRinger,
    state: Arc<AtomicU8>,
    sleep: Arc<Sleep>,
    clock: Clock,
}

impl Queues {
    /// What the thread is told. Read before [`take`](Self::take): what was submitted before a drain
    /// began is then seen.
    pub(super) fn state(&self) -> State {
        match self.state.load(Ordering::Acquire) {
            0 => State::Run,
            1 => State::Drain,
            _ => State::Abandon,
        }
    }

    pub(super) fn take(&mut self) -> Option<CopyCommand> {
        self.commands.try_pop()
    }

    /// The time of an end.
    pub(super) fn now(&self) -> Nanos {
        self.clock.now()
    }

    /// Tells an end, stamped with the time if it has none.
    pub(super) fn end(&mut self, mut end: CopyEnd) {
        if end.ended_ns == 0 {
            end.ended_ns = self.clock.now();
        }
        // Cannot be full, see `Lane::start`.
        let pushed = self.ends.try_push(end);
        debug_assert!(pushed.is_ok(), "no room for the end of a copy");
        self.notify.ring();
    }

    /// Waits for a command or a change of state: spins while that has been paying off, then parks.
    pub(super) fn wait(&self, spin: &mut Spin) {
        if let Some(window) = spin.due() {
            let came = self.look_for(window);
            spin.note(came);
            if came {
                return;
            }
        }
        self.sleep.sleeping.store(true, Ordering::Relaxed);
        // A submit since the last look at the queue left a token that makes this return at once.
        thread::park_timeout(PARK_MAX);
        self.sleep.sleeping.store(false, Ordering::Relaxed);
        if self.sleep.expected.swap(false, Ordering::Relaxed) {
            self.look_for(EXPECT_WINDOW);
        }
    }

    /// Spins until there is a command or a change of state; false when neither came in time.
    fn look_for(&self, window: Duration) -> bool {
        let start = Instant::now();
        while start.elapsed() < window {
            if !self.commands.is_empty() || self.state() != State::Run {
                return true;
            }
            std::hint::spin_loop();
        }
        false
    }
}

/// Both ends without a thread.
#[cfg(test)]
pub(super) fn queues(
    state: State,
    notify: ControlRinger,
) -> (HeapProd<CopyCommand>, HeapCons<CopyEnd>, Queues) {
    let (commands, taken) = HeapRb::new(super::COMMANDS_MAX).split();
    let (ended, ends) = HeapRb::new(super::COMMANDS_MAX).split();
    let state = Arc::new(AtomicU8::new(state as u8));
    let sleep = Arc::new(Sleep::default());
    let clock = Clock::monotonic();
    (commands, ends, Queues { commands: taken, ends: ended, notify, state, sleep, clock })
}
