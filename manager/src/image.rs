//! Image memory as its users see it: an extent goes in, the address of its bytes comes out.
//!
//! The pool owns the memory; device and SSD workers copy from and to it. They meet here, so that
//! neither has to know the other. Laws:
//!
//! 1. Only whoever holds an [`Extent`] touches its bytes. `core` gives an extent to one operation
//!    at a time, and no peer can reach this memory, so a holder may read it as a plain slice.
//! 2. A [`DramSlice`] cannot outlive the borrow of the memory that gave it.
#![allow(unsafe_code, reason = "gives out addresses of the pool's memory")]

use std::marker::PhantomData;
use std::ptr::NonNull;

use twox_hash::XxHash3_64;

use crate::core::Extent;

/// Memory that holds page images.
pub trait ImageMemory: Send + Sync {
    /// The bytes of `extent`, or `None` when it does not lie within an arena. Any part of an
    /// extent is an extent too: only bounds are checked here, not ownership.
    fn slice(&self, extent: Extent) -> Option<DramSlice<'_>>;
}

/// Bytes of image memory, borrowed from their [`ImageMemory`] but without a reference to them.
#[derive(Clone, Copy, Debug)]
pub struct DramSlice<'memory> {
    start: NonNull<u8>,
    bytes: usize,
    memory: PhantomData<&'memory ()>,
}

// SAFETY: the bytes belong to no thread; law 1 gives them to one holder at a time.
unsafe impl Send for DramSlice<'_> {}

impl<'memory> DramSlice<'memory> {
    /// # Safety
    ///
    /// `bytes` bytes from `start` are initialised, readable and writable for `'memory`, unknown to
    /// every other process, and reached through nothing but a `DramSlice` during that time.
    pub unsafe fn new(start: NonNull<u8>, bytes: usize) -> Self {
        Self { start, bytes, memory: PhantomData }
    }

    /// First byte. Valid for [`bytes`](Self::bytes) bytes as long as the memory is borrowed.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Length in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Its first `bytes` bytes; `None` when it is shorter.
    pub fn prefix(&self, bytes: usize) -> Option<Self> {
        (bytes <= self.bytes).then_some(Self { bytes, ..*self })
    }

    /// xxh3-64 of the bytes, as a footer records it. Only the holder of the extent calls this.
    pub fn checksum(&self) -> u64 {
        // SAFETY: `new` was promised valid, initialised bytes; nobody writes them meanwhile (law 1).
        let image = unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.bytes) };
        XxHash3_64::oneshot(image)
    }

    /// Copies the bytes out. Only the holder of the extent calls this.
    pub fn to_vec(&self) -> Vec<u8> {
        // SAFETY: as in `checksum`.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.bytes) }.to_vec()
    }

    /// Copies the bytes to `target`, or does nothing and returns false when the lengths differ. Only
    /// the holder of the extent calls this.
    pub fn copy_to(&self, target: &mut [u8]) -> bool {
        if target.len() != self.bytes {
            return false;
        }
        // SAFETY: the source is valid and initialised for `bytes` (`new`), held by the caller
        // (law 1), and `target`, a live exclusive reference, cannot overlap it.
        unsafe { target.as_mut_ptr().copy_from_nonoverlapping(self.start.as_ptr(), self.bytes) };
        true
    }

    /// Overwrites the first `source.len()` bytes, or does nothing and returns false when they do
    /// not fit. Only the holder of the extent calls this.
    pub fn fill_from(&self, source: &[u8]) -> bool {
        if source.len() > self.bytes {
            return false;
        }
        // SAFETY: the destination has room (checked), is valid (`new`) and held by the caller
        // (law 1), and `source`, a live reference, cannot overlap it.
        unsafe { self.start.as_ptr().copy_from_nonoverlapping(source.as_ptr(), source.len()) };
        true
    }
}

/// Alignment of memory that `O_DIRECT` reads into.
#[repr(C, align(4096))]
struct Block([u8; 4096]);

/// Image memory on the heap: one arena, aligned for direct I/O, for whoever must not use the pool.
pub(crate) struct HeapImages {
    /// `UnsafeCell`, because slices write through `&self`.
    blocks: Box<[std::cell::UnsafeCell<Block>]>,
}

// SAFETY: the bytes are reached through slices only, whose holders keep law 1.
unsafe impl Sync for HeapImages {}

impl HeapImages {
    /// Zeroed memory of at least `bytes` bytes as arena 0.
    pub(crate) fn new(bytes: usize) -> Self {
        let blocks = 0..bytes.div_ceil(size_of::<Block>());
        Self { blocks: blocks.map(|_| std::cell::UnsafeCell::new(Block([0; 4096]))).collect() }
    }
}

impl ImageMemory for HeapImages {
    fn slice(&self, extent: Extent) -> Option<DramSlice<'_>> {
        let offset = usize::try_from(extent.offset).ok()?;
        let bytes = extent.bytes as usize;
        if extent.arena != 0 || offset.checked_add(bytes)? > size_of_val(&*self.blocks) {
            return None;
        }
        let base = NonNull::from(&*self.blocks).cast::<u8>();
        // SAFETY: offset + bytes is at most the length of the allocation (checked just above).
        let start = unsafe { base.add(offset) };
        // SAFETY: initialised, writable behind `UnsafeCell`, and borrowed with `self`.
        Some(unsafe { DramSlice::new(start, bytes) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_check_bounds_and_carry_bytes() {
        let images = HeapImages::new(8192);
        let extent = |arena, offset, bytes| Extent { arena, offset, bytes };
        for outside in [extent(1, 0, 1), extent(0, 8192, 1), extent(0, u64::MAX, 2)] {
            assert!(images.slice(outside).is_none(), "{outside:?}");
        }
        let whole = images.slice(extent(0, 0, 8192)).expect("whole");
        let half = images.slice(extent(0, 4096, 4096)).expect("half");
        assert!(half.fill_from(&[3; 4096]));
        assert!(!half.fill_from(&[3; 4097]));
        assert_eq!(whole.to_vec(), [[0; 4096], [3; 4096]].concat());
        assert_eq!(half.prefix(5).expect("shorter").to_vec(), [3; 5]);
        assert!(half.prefix(4097).is_none());
        let mut copy = [0; 4096];
        assert!(half.copy_to(&mut copy) && copy == [3; 4096]);
        assert!(!half.copy_to(&mut copy[1..]));
        assert_eq!(half.checksum(), XxHash3_64::oneshot(&[3; 4096]));
    }
}
