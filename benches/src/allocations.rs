//! An allocator that can count, to prove that a path allocates nothing.
//!
//! A program makes [`CountingAllocator`] its global allocator. Until `Count::begin` it costs one
//! relaxed load of a shared, never written cache line an allocation.
#![allow(unsafe_code, reason = "a global allocator is an unsafe impl")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

static COUNTING: AtomicBool = AtomicBool::new(false);
static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

/// The system's allocator, counted while a `Count` runs.
#[derive(Debug)]
pub struct CountingAllocator;

#[inline]
fn note() {
    if COUNTING.load(Ordering::Relaxed) {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
    }
}

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note();
        // SAFETY: by the caller's contract, which is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        note();
        // SAFETY: by the caller's contract, which is the same.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: by the caller's contract, which is the same.
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        note();
        // SAFETY: by the caller's contract, which is the same.
        unsafe { System.realloc(memory, layout, size) }
    }
}

/// A count of the allocations of this process, all threads, from [`begin`](Self::begin) on.
#[derive(Debug)]
pub(crate) struct Count {
    before: u64,
}

impl Count {
    /// Begins to count; `None` when this program's allocator is not [`CountingAllocator`], which
    /// one allocation shows.
    pub(crate) fn begin() -> Option<Self> {
        COUNTING.store(true, Ordering::SeqCst);
        let before = ALLOCATIONS.load(Ordering::SeqCst);
        drop(std::hint::black_box(Box::new(before)));
        let counted = ALLOCATIONS.load(Ordering::SeqCst);
        (counted > before).then_some(Self { before: counted })
    }

    /// Allocations since the begin.
    pub(crate) fn so_far(&self) -> u64 {
        ALLOCATIONS.load(Ordering::SeqCst) - self.before
    }
}
