//! The loom twin of the words: one loom atomic for each word, and fences that a model can omit to
//! show that they are needed.

#![allow(unsafe_code, reason = "keeps the signatures of the real words")]

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicU8;

use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use loom::sync::{Condvar, Mutex};

/// Loom atomics in place of memory. A location must be used with one width only.
#[derive(Clone)]
pub(super) struct Words {
    cells: Arc<Cells>,
}

struct Cells {
    words64: Vec<AtomicU64>,
    words32: Vec<AtomicU32>,
    /// What the kernel's futex queue is: the word is compared and the waiter queued under it.
    queue: Mutex<()>,
    woken: Condvar,
}

impl Words {
    pub(super) fn heap(bytes: usize) -> (Self, usize) {
        let bytes = bytes.next_multiple_of(8);
        let cells = Cells {
            words64: (0..bytes / 8).map(|_| AtomicU64::new(0)).collect(),
            words32: (0..bytes / 4).map(|_| AtomicU32::new(0)).collect(),
            queue: Mutex::new(()),
            woken: Condvar::new(),
        };
        (Self { cells: Arc::new(cells) }, bytes)
    }

    pub(super) fn mapped(_base: NonNull<u8>) -> Self {
        unreachable!("a model shares memory between threads only");
    }

    pub(super) unsafe fn address(&self, _offset: usize) -> *mut u8 {
        unreachable!("loom's words have no address");
    }

    pub(super) unsafe fn word64(&self, offset: usize) -> &AtomicU64 {
        &self.cells.words64[offset / 8]
    }

    pub(super) unsafe fn word32(&self, offset: usize) -> &AtomicU32 {
        &self.cells.words32[offset / 4]
    }

    pub(super) unsafe fn at(&self, offset: usize) -> At {
        At(offset)
    }

    pub(super) unsafe fn at64(&self, at: At) -> &AtomicU64 {
        &self.cells.words64[at.0 / 8]
    }

    pub(super) unsafe fn at32(&self, at: At) -> &AtomicU32 {
        &self.cells.words32[at.0 / 4]
    }

    /// Sleeps while the word holds `seen`, with no timeout: a lost wake is a deadlock, which loom
    /// reports.
    pub(super) fn futex_wait(&self, offset: usize, seen: u32) {
        let queue = self.cells.queue.lock().unwrap();
        if self.cells.words32[offset / 4].load(Ordering::Relaxed) == seen {
            drop(self.cells.woken.wait(queue).unwrap());
        }
    }

    pub(super) fn futex_wake(&self) {
        let queue = self.cells.queue.lock().unwrap();
        self.cells.woken.notify_all();
        drop(queue);
    }
}

/// The place of a word.
#[derive(Clone, Copy, Debug)]
pub struct At(usize);

impl At {
    pub(super) fn prefetch(self) {}
}

/// Which of the two ends of `wake-fence` a fence is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FenceSide {
    /// Between announcing a sleep and looking at the ring again.
    Waiter,
    /// Between publishing and looking whether the waiter sleeps.
    Publisher,
}

/// Bits of the fences that models omit; not part of a model, so a plain atomic.
static OMITTED: AtomicU8 = AtomicU8::new(0);

/// Leaves a fence out of, or puts it back into, every model that runs from now on.
pub fn omit_fence(side: FenceSide, omit: bool) {
    let bit = 1 << side as u8;
    if omit {
        OMITTED.fetch_or(bit, std::sync::atomic::Ordering::SeqCst);
    } else {
        OMITTED.fetch_and(!bit, std::sync::atomic::Ordering::SeqCst);
    }
}

/// The full fence between a store and a later load (`wake-fence` in the ordering table).
pub fn full_fence(side: FenceSide) {
    if OMITTED.load(std::sync::atomic::Ordering::SeqCst) & (1 << side as u8) == 0 {
        fence(Ordering::SeqCst);
    }
}
