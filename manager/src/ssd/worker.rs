//! The loop of a worker thread: take orders, send, sleep in the engine, report.

use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use ringbuf::HeapCons;
use ringbuf::traits::{Consumer, Observer};

/// What a worker does with its orders.
pub(crate) trait Duty {
    /// What it is told.
    type Command;

    /// Takes an order.
    fn accept(&mut self, command: Self::Command);

    /// Sends as much as there is room for.
    fn fill(&mut self);

    /// Sleeps until something is back, or it is woken, or `ready` says so.
    fn wait(&mut self, ready: &mut dyn FnMut() -> bool);

    /// Reports what has ended.
    fn deliver(&mut self);

    /// True when nothing is waiting, open or in the kernel's hands.
    fn is_idle(&self) -> bool;

    /// Ends everything that the kernel does not have yet.
    fn abandon(&mut self);

    /// Before the end of a clean stop, with nothing in flight.
    fn finish(&mut self);
}

const RUN: u8 = 0;
const DRAIN: u8 = 1;
const ABORT: u8 = 2;

/// How the owner ends the workers of a tier.
#[derive(Default, Debug)]
pub(crate) struct Control {
    state: AtomicU8,
    deadline: Mutex<Option<Instant>>,
}

impl Control {
    /// Ends the workers once everything that was ordered is done, or at `deadline` without what
    /// the kernel does not have by then. The caller wakes them.
    pub(crate) fn drain(&self, deadline: Instant) {
        *self.deadline.lock().unwrap_or_else(PoisonError::into_inner) = Some(deadline);
        self.state.store(DRAIN, Ordering::Release);
    }

    /// Ends the workers as soon as the kernel has let go. The caller wakes them.
    pub(crate) fn abort(&self) {
        self.state.store(ABORT, Ordering::Release);
    }

    /// Whether the tier ends, one way or the other.
    pub(crate) fn is_stopping(&self) -> bool {
        self.state.load(Ordering::Acquire) != RUN
    }

    fn is_over(&self) -> bool {
        let deadline = *self.deadline.lock().unwrap_or_else(PoisonError::into_inner);
        deadline.is_none_or(|deadline| Instant::now() >= deadline)
    }
}

/// Runs a worker until it is told to stop. Buffers are the kernel's until then, never longer.
pub(crate) fn run<D: Duty>(duty: &mut D, orders: &mut HeapCons<D::Command>, control: &Control) {
    loop {
        // Before the orders: what was ordered before the stop is then in the queue.
        let state = control.state.load(Ordering::Acquire);
        while let Some(order) = orders.try_pop() {
            duty.accept(order);
        }
        if state == ABORT || (state == DRAIN && control.is_over()) {
            duty.abandon();
        }
        duty.fill();
        duty.deliver();
        if state != RUN && duty.is_idle() {
            break;
        }
        duty.wait(&mut || !orders.is_empty() || control.state.load(Ordering::Acquire) != state);
        duty.deliver();
    }
    if control.state.load(Ordering::Acquire) == DRAIN {
        duty.finish();
    }
}
