//! Answers that come later: by time, or when the fault that they wait for is healed.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::HANG_MAX;

/// What gives an answer.
pub(super) type Answer = Box<dyn FnOnce() + Send>;

/// Answers that are not given yet.
#[derive(Default)]
pub(super) struct Later {
    waiting: Mutex<Waiting>,
    change: Condvar,
}

#[derive(Default)]
struct Waiting {
    answers: Vec<Entry>,
    is_over: bool,
}

struct Entry {
    due: Instant,
    /// Fault that holds it.
    hangs: Option<u64>,
    answer: Answer,
}

impl Later {
    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives an answer at `due`, or when the fault `hangs` is healed.
    pub(super) fn give(&self, due: Instant, hangs: Option<u64>, answer: Answer) {
        let due = if hangs.is_some() { due + HANG_MAX } else { due };
        self.waiting().answers.push(Entry { due, hangs, answer });
        self.change.notify_all();
    }

    /// Answers that wait.
    pub(super) fn len(&self) -> usize {
        self.waiting().answers.len()
    }

    /// A fault is healed.
    pub(super) fn release(&self, fault: u64) {
        for entry in &mut self.waiting().answers {
            if entry.hangs == Some(fault) {
                (entry.due, entry.hangs) = (Instant::now(), None);
            }
        }
        self.change.notify_all();
    }

    /// Drops what waits, and ends [`run`](Self::run).
    pub(super) fn end(&self) {
        let mut waiting = self.waiting();
        waiting.is_over = true;
        let dropped = std::mem::take(&mut waiting.answers);
        drop(waiting);
        drop(dropped);
        self.change.notify_all();
    }

    /// Gives answers until the end.
    pub(super) fn run(&self) {
        let mut waiting = self.waiting();
        while !waiting.is_over {
            let now = Instant::now();
            if let Some(at) = waiting.answers.iter().position(|entry| entry.due <= now) {
                // In the order in which they came.
                let entry = waiting.answers.remove(at);
                drop(waiting);
                (entry.answer)();
                waiting = self.waiting();
                continue;
            }
            let next = waiting.answers.iter().map(|entry| entry.due).min();
            waiting = match next {
                None => self.change.wait(waiting).unwrap_or_else(PoisonError::into_inner),
                Some(due) => {
                    let waited = self.change.wait_timeout(waiting, due - now);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }
}

impl std::fmt::Debug for Later {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Later").field("waiting", &self.len()).finish()
    }
}
