//! The words themselves: hardware atomics behind one raw pointer.

#![allow(unsafe_code, reason = "turns offsets into addresses")]

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use crate::layout::WORD_BLOCK;

/// Where the bytes of a [`super::SharedMemory`] start.
#[derive(Clone)]
pub(super) struct Words {
    /// Aligned to [`WORD_BLOCK`].
    base: NonNull<u8>,
    /// Keeps heap blocks; a mapping is kept by the owner of `self`.
    _heap: Option<Arc<[Block]>>,
}

// SAFETY: `base` points into memory that no thread owns and that the owner of `self` keeps; it is
// accessed by atomics only.
unsafe impl Send for Words {}
// SAFETY: as above.
unsafe impl Sync for Words {}

/// One word block of the heap twin: words that lie in different blocks of a mapping do so here.
#[repr(align(128))]
struct Block(#[expect(dead_code, reason = "reached through `base`")] [AtomicU64; WORD_BLOCK / 8]);

const _: () = assert!(size_of::<Block>() == WORD_BLOCK && align_of::<Block>() == WORD_BLOCK);

impl Words {
    /// Zeroed blocks for at least `bytes`, and their length.
    pub(super) fn heap(bytes: usize) -> (Self, usize) {
        let blocks: Arc<[Block]> = (0..bytes.div_ceil(WORD_BLOCK).max(1))
            .map(|_| Block([const { AtomicU64::new(0) }; WORD_BLOCK / 8]))
            .collect();
        let bytes = blocks.len() * WORD_BLOCK;
        (Self { base: NonNull::from(&*blocks).cast(), _heap: Some(blocks) }, bytes)
    }

    /// The words of a mapping that starts at `base` and outlives every use of the result.
    pub(super) fn mapped(base: NonNull<u8>) -> Self {
        Self { base, _heap: None }
    }

    /// # Safety
    /// `offset` is not beyond the end of the memory.
    pub(super) unsafe fn address(&self, offset: usize) -> *mut u8 {
        // SAFETY: inside or one past the end of the one allocation, by contract.
        unsafe { self.base.as_ptr().add(offset) }
    }

    /// # Safety
    /// `offset + 8` is not beyond the end of the memory, and `offset` is a multiple of 8.
    #[inline]
    pub(super) unsafe fn word64(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: inside the allocation, by contract.
        let word = unsafe { self.base.as_ptr().add(offset) }.cast::<u64>();
        // SAFETY: aligned, because `base` and `offset` are; valid while the owner of `self` keeps
        // the memory; this process accesses it by atomics only. Another process is outside the
        // memory model: the hardware keeps aligned words whole.
        unsafe { AtomicU64::from_ptr(word) }
    }

    /// # Safety
    /// `offset + 4` is not beyond the end of the memory, and `offset` is a multiple of 4.
    #[inline]
    pub(super) unsafe fn word32(&self, offset: usize) -> &AtomicU32 {
        // SAFETY: inside the allocation, by contract.
        let word = unsafe { self.base.as_ptr().add(offset) }.cast::<u32>();
        // SAFETY: as in `word64`, for 4 bytes.
        unsafe { AtomicU32::from_ptr(word) }
    }

    /// Where a byte is, computed once for an access that is made often.
    ///
    /// # Safety
    /// `offset` is not beyond the end of the memory.
    pub(super) unsafe fn at(&self, offset: usize) -> At {
        // SAFETY: inside or one past the end of the one allocation, by contract.
        At(unsafe { self.base.add(offset) })
    }

    /// # Safety
    /// `at` comes from [`at`](Self::at) of `self` or a clone, for an offset that
    /// [`word64`](Self::word64) allows.
    #[inline]
    pub(super) unsafe fn at64(&self, at: At) -> &AtomicU64 {
        // SAFETY: as in `word64`.
        unsafe { AtomicU64::from_ptr(at.0.as_ptr().cast()) }
    }

    /// # Safety
    /// As [`at64`](Self::at64), for [`word32`](Self::word32).
    #[inline]
    pub(super) unsafe fn at32(&self, at: At) -> &AtomicU32 {
        // SAFETY: as in `word32`.
        unsafe { AtomicU32::from_ptr(at.0.as_ptr().cast()) }
    }
}

/// The place of a word or record. Says nothing about whether it is still mapped.
#[derive(Clone, Copy, Debug)]
pub struct At(NonNull<u8>);

// SAFETY: an address; whoever follows it holds the memory.
unsafe impl Send for At {}
// SAFETY: as above.
unsafe impl Sync for At {}

impl At {
    /// Asks the cache for its line; nothing else happens.
    #[inline]
    pub(super) fn prefetch(self) {
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            // SAFETY: a prefetch reads nothing and never faults, at any address.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(self.0.as_ptr().cast()) }
        }
    }
}

/// Which of the two ends of `wake-fence` a fence is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FenceSide {
    /// Between announcing a sleep and looking at the ring again.
    Waiter,
    /// Between publishing and looking whether the waiter sleeps.
    Publisher,
}

/// The full fence between a store and a later load (`wake-fence` in the ordering table).
#[inline]
pub fn full_fence(_side: FenceSide) {
    fence(Ordering::SeqCst);
}
