//! Every raw access to bytes that another process may change.
//!
//! The laws of this module, on which the rest of the crate is built without `unsafe`:
//!
//! 1. Shared bytes are never behind a slice or a plain reference. They are read and written as
//!    aligned 32- and 64-bit atomic words; larger values are assembled word by word in private
//!    memory.
//! 2. A value read twice may differ. Callers copy once, check the copy and use only the copy.
//! 3. Handles check offset, alignment and write permission once, when they are made, against a
//!    length that is private to this process. After that no peer can move an access.
//! 4. A mapping is sealed against shrinking before it is used (see [`crate::segment`]), so that a
//!    peer cannot turn an access into a SIGBUS.
//!
//! There are three twins. Mapped memory is shared by two processes; heap memory runs the same
//! rings and doorbells inside one process; and with `--cfg loom` the heap twin consists of loom's
//! atomics, and its futex of loom's condition variable, so that loom can try every interleaving
//! and every stale load.

#![allow(unsafe_code, reason = "shared memory is reached through raw pointers, and only here")]

use std::fmt;
use std::marker::PhantomData;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytemuck::Pod;
use rustix::io::Errno;

use crate::layout::SECTION_ALIGN;
use mapping::Mapping;

pub(crate) use futex::wait_many as futex_wait_many;
pub use futex::{NAP_MAX, WAIT_WORDS_MAX, WaitEnd};
pub use mapping::ForkGuard;

mod futex;
mod mapping;
#[cfg_attr(loom, path = "memory/words_loom.rs")]
mod words;

use words::At;
#[cfg(loom)]
pub use words::omit_fence;
pub use words::{FenceSide, full_fence};

/// Whether this process may write a range of shared memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    /// Loads only; the pages are mapped read-only.
    Read,
    /// Loads and stores.
    ReadWrite,
}

/// A range of memory that another process (or thread) may read and write at the same time.
///
/// Cloning makes another handle on the same bytes; they are unmapped or freed with the last one.
#[derive(Clone)]
pub struct SharedMemory {
    words: words::Words,
    bytes: usize,
    access: Access,
    fork: ForkGuard,
    /// Keeps the mapping that `words` points into; heap words keep themselves.
    mapping: Option<Arc<Mapping>>,
}

impl SharedMemory {
    /// Zeroed memory of this process alone: the twin for tests and in-process doorbells.
    /// `bytes` is rounded up to a whole number of [`crate::layout::WORD_BLOCK`]s, and aligned so.
    pub fn heap(bytes: usize) -> Self {
        let (words, bytes) = words::Words::heap(bytes);
        let fork = ForkGuard::unguarded();
        Self { words, bytes, access: Access::ReadWrite, fork, mapping: None }
    }

    /// Maps the first `bytes` of a descriptor, shared with every other mapping of it. A forked
    /// child does not inherit the mapping (`MADV_DONTFORK`); `fork` tells it so.
    ///
    /// The page tables are filled at once where the kernel can (5.14), so that a ring thread takes
    /// no page faults later.
    ///
    /// # Errors
    /// What `mmap` or `madvise` said: `EPERM` when the descriptor is sealed against `access`.
    ///
    /// # Panics
    /// When `bytes` is zero or not a multiple of [`SECTION_ALIGN`].
    pub(crate) fn map(
        descriptor: BorrowedFd<'_>,
        bytes: usize,
        access: Access,
        fork: &ForkGuard,
    ) -> Result<Self, Errno> {
        assert!(bytes > 0 && bytes.is_multiple_of(SECTION_ALIGN));
        let mapping = Mapping::new(descriptor, bytes, access, fork)?;
        let words = words::Words::mapped(mapping.base());
        let fork = fork.clone();
        Ok(Self { words, bytes, access, fork, mapping: Some(Arc::new(mapping)) })
    }

    /// Another handle on the same bytes that refuses to make writers.
    pub fn read_only(&self) -> Self {
        Self { access: Access::Read, ..self.clone() }
    }

    /// Length in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether writers can be made from this handle.
    pub fn is_writable(&self) -> bool {
        self.access == Access::ReadWrite
    }

    /// False in a forked child, which has no such mapping: touching it would be SIGSEGV. Always
    /// true for heap memory, which a fork copies. One private load.
    #[inline]
    pub fn is_mapped_here(&self) -> bool {
        self.fork.is_owner()
    }

    /// Address of a byte, for registration with a device driver. Valid while a clone of this
    /// handle lives; the bytes behind it change at any time.
    ///
    /// # Panics
    /// When `offset` lies beyond the end.
    pub fn address(&self, offset: usize) -> *mut u8 {
        assert!(offset <= self.bytes);
        // SAFETY: at most one past the end, as checked just above.
        unsafe { self.words.address(offset) }
    }

    /// Copies a value out, word by word (relaxed). The copy may mix bytes of several writes; the
    /// caller orders itself by a word that was published after them.
    ///
    /// # Panics
    /// When the value does not lie inside the range or `offset` is not a multiple of its word.
    #[inline]
    pub fn read<T: Pod>(&self, offset: usize) -> T {
        self.check::<T>(offset, 1);
        // SAFETY: checked just above.
        unsafe { self.read_unchecked(offset) }
    }

    /// Copies a value in, word by word (relaxed). Not visible in any order before a word is
    /// published after it.
    ///
    /// # Panics
    /// As [`read`](Self::read), and when the memory is read-only.
    #[inline]
    pub fn write<T: Pod>(&self, offset: usize, value: T) {
        self.check::<T>(offset, 1);
        self.check_writable();
        // SAFETY: checked just above.
        unsafe { self.write_unchecked(offset, value) }
    }

    /// Loads a word; what its writer wrote before releasing it is visible afterwards.
    ///
    /// # Panics
    /// When the word does not lie inside the range or is not aligned.
    #[inline]
    pub fn load_acquire<W: Word>(&self, offset: usize) -> W {
        self.check::<W>(offset, 1);
        // SAFETY: checked just above.
        let at = unsafe { self.words.at(offset) };
        // SAFETY: checked just above.
        unsafe { W::load(self, at, Ordering::Acquire) }
    }

    /// Stores a word; whoever acquires it sees everything written before.
    ///
    /// # Panics
    /// As [`load_acquire`](Self::load_acquire), and when the memory is read-only.
    #[inline]
    pub fn store_release<W: Word>(&self, offset: usize, value: W) {
        self.check::<W>(offset, 1);
        self.check_writable();
        // SAFETY: checked just above.
        let at = unsafe { self.words.at(offset) };
        // SAFETY: checked just above.
        unsafe { W::store(self, at, value, Ordering::Release) }
    }

    /// The reading end of one word that another process writes.
    ///
    /// # Panics
    /// When the word does not lie inside the range or is not aligned.
    pub fn word_reader<W: Word>(&self, offset: usize) -> WordReader<W> {
        self.check::<W>(offset, 1);
        // SAFETY: checked just above.
        let at = unsafe { self.words.at(offset) };
        WordReader { memory: self.clone(), offset, at, word: PhantomData }
    }

    /// The writing end of one word; this process is its only writer.
    ///
    /// # Panics
    /// As [`word_reader`](Self::word_reader), and when the memory is read-only.
    pub fn word_writer<W: Word>(&self, offset: usize) -> WordWriter<W> {
        self.check::<W>(offset, 1);
        self.check_writable();
        // SAFETY: checked just above.
        let at = unsafe { self.words.at(offset) };
        WordWriter { memory: self.clone(), offset, at, word: PhantomData }
    }

    /// The reading end of a ring's `capacity` slots from `offset` on.
    ///
    /// # Panics
    /// When the slots do not lie inside the range, or `capacity` is not a power of two.
    pub fn slot_reader<R: Pod>(&self, offset: usize, capacity: u32) -> SlotReader<R> {
        assert!(capacity.is_power_of_two(), "ring capacity must be a power of two");
        self.check::<R>(offset, capacity as usize);
        SlotReader { memory: self.clone(), offset, mask: capacity - 1, record: PhantomData }
    }

    /// The writing end of a ring's `capacity` slots from `offset` on.
    ///
    /// # Panics
    /// As [`slot_reader`](Self::slot_reader), and when the memory is read-only.
    pub fn slot_writer<R: Pod>(&self, offset: usize, capacity: u32) -> SlotWriter<R> {
        assert!(capacity.is_power_of_two(), "ring capacity must be a power of two");
        self.check::<R>(offset, capacity as usize);
        self.check_writable();
        SlotWriter { memory: self.clone(), offset, mask: capacity - 1, record: PhantomData }
    }

    /// The reading end of an array of `count` values from `offset` on.
    ///
    /// # Panics
    /// When the array does not lie inside the range.
    pub fn array_reader<T: Pod>(&self, offset: usize, count: u32) -> ArrayReader<T> {
        self.check::<T>(offset, count as usize);
        ArrayReader { memory: self.clone(), offset, count, value: PhantomData }
    }

    /// The writing end of an array of `count` values from `offset` on.
    ///
    /// # Panics
    /// As [`array_reader`](Self::array_reader), and when the memory is read-only.
    pub fn array_writer<T: Pod>(&self, offset: usize, count: u32) -> ArrayWriter<T> {
        self.check::<T>(offset, count as usize);
        self.check_writable();
        ArrayWriter { memory: self.clone(), offset, count, value: PhantomData }
    }

    /// Panics unless `count` values of `T` lie inside the range from `offset` on.
    #[inline]
    fn check<T: Pod>(&self, offset: usize, count: usize) {
        const { assert!(size_of::<T>() > 0 && size_of::<T>().is_multiple_of(4)) };
        assert!(offset.is_multiple_of(word_bytes::<T>()), "misaligned access to shared memory");
        assert!(
            offset <= self.bytes && count <= (self.bytes - offset) / size_of::<T>(),
            "access beyond the end of shared memory"
        );
    }

    #[inline]
    fn check_writable(&self) {
        assert!(self.is_writable(), "store to read-only shared memory");
    }

    /// # Safety
    /// As [`check`](Self::check) demands for one value.
    #[inline]
    unsafe fn read_unchecked<T: Pod>(&self, offset: usize) -> T {
        let mut value = T::zeroed();
        let bytes = bytemuck::bytes_of_mut(&mut value);
        if word_bytes::<T>() == 8 {
            for (i, chunk) in bytes.as_chunks_mut::<8>().0.iter_mut().enumerate() {
                // SAFETY: word i of a value that lies inside the range, by contract.
                let word = unsafe { self.words.word64(offset + 8 * i) };
                *chunk = word.load(Ordering::Relaxed).to_ne_bytes();
            }
        } else {
            for (i, chunk) in bytes.as_chunks_mut::<4>().0.iter_mut().enumerate() {
                // SAFETY: word i of a value that lies inside the range, by contract.
                let word = unsafe { self.words.word32(offset + 4 * i) };
                *chunk = word.load(Ordering::Relaxed).to_ne_bytes();
            }
        }
        value
    }

    /// # Safety
    /// As [`check`](Self::check) demands for one value, and the memory is writable.
    #[inline]
    unsafe fn write_unchecked<T: Pod>(&self, offset: usize, value: T) {
        let bytes = bytemuck::bytes_of(&value);
        if word_bytes::<T>() == 8 {
            for (i, chunk) in bytes.as_chunks::<8>().0.iter().enumerate() {
                // SAFETY: word i of a value that lies inside the range, by contract.
                let word = unsafe { self.words.word64(offset + 8 * i) };
                word.store(u64::from_ne_bytes(*chunk), Ordering::Relaxed);
            }
        } else {
            for (i, chunk) in bytes.as_chunks::<4>().0.iter().enumerate() {
                // SAFETY: word i of a value that lies inside the range, by contract.
                let word = unsafe { self.words.word32(offset + 4 * i) };
                word.store(u32::from_ne_bytes(*chunk), Ordering::Relaxed);
            }
        }
    }
}

/// Bytes of the atomic words that a `T` is copied by.
const fn word_bytes<T>() -> usize {
    if size_of::<T>().is_multiple_of(8) { 8 } else { 4 }
}

impl fmt::Debug for SharedMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedMemory")
            .field("bytes", &self.bytes)
            .field("access", &self.access)
            .field("mapped", &self.mapping.is_some())
            .finish()
    }
}

mod sealed {
    /// Closes [`super::Word`].
    pub trait Sealed {}
    impl Sealed for u32 {}
    impl Sealed for u64 {}
}

/// An integer that lies in shared memory as one atomic word: `u32` or `u64`.
pub trait Word: Pod + sealed::Sealed {
    /// # Safety
    /// A word of this type that lies inside `memory` and is aligned is at `at`.
    #[doc(hidden)]
    unsafe fn load(memory: &SharedMemory, at: At, ordering: Ordering) -> Self;
    /// # Safety
    /// As `load`, and the memory is writable.
    #[doc(hidden)]
    unsafe fn store(memory: &SharedMemory, at: At, value: Self, ordering: Ordering);
}

impl Word for u32 {
    #[inline]
    unsafe fn load(memory: &SharedMemory, at: At, ordering: Ordering) -> Self {
        // SAFETY: passed on to the caller.
        unsafe { memory.words.at32(at) }.load(ordering)
    }
    #[inline]
    unsafe fn store(memory: &SharedMemory, at: At, value: Self, ordering: Ordering) {
        // SAFETY: passed on to the caller.
        unsafe { memory.words.at32(at) }.store(value, ordering);
    }
}

impl Word for u64 {
    #[inline]
    unsafe fn load(memory: &SharedMemory, at: At, ordering: Ordering) -> Self {
        // SAFETY: passed on to the caller.
        unsafe { memory.words.at64(at) }.load(ordering)
    }
    #[inline]
    unsafe fn store(memory: &SharedMemory, at: At, value: Self, ordering: Ordering) {
        // SAFETY: passed on to the caller.
        unsafe { memory.words.at64(at) }.store(value, ordering);
    }
}

/// One word that another process writes.
#[derive(Clone, Debug)]
pub struct WordReader<W> {
    memory: SharedMemory,
    offset: usize,
    /// Where `offset` is: this load is the whole of an empty poll.
    at: At,
    word: PhantomData<W>,
}

impl<W: Word> WordReader<W> {
    /// The value now, ordered with nothing.
    #[inline]
    pub fn load_relaxed(&self) -> W {
        // SAFETY: offset and alignment were checked when `self` was made.
        unsafe { W::load(&self.memory, self.at, Ordering::Relaxed) }
    }

    /// The value now; what its writer wrote before releasing it is visible afterwards.
    #[inline]
    pub fn load_acquire(&self) -> W {
        // SAFETY: offset and alignment were checked when `self` was made.
        unsafe { W::load(&self.memory, self.at, Ordering::Acquire) }
    }
}

/// One word that only this process writes.
#[derive(Clone, Debug)]
pub struct WordWriter<W> {
    memory: SharedMemory,
    offset: usize,
    at: At,
    word: PhantomData<W>,
}

impl<W: Word> WordWriter<W> {
    /// Stores a value, ordered with nothing.
    #[inline]
    pub fn store_relaxed(&self, value: W) {
        // SAFETY: offset, alignment and permission were checked when `self` was made.
        unsafe { W::store(&self.memory, self.at, value, Ordering::Relaxed) }
    }

    /// Stores a value; whoever acquires it sees everything written before.
    #[inline]
    pub fn store_release(&self, value: W) {
        // SAFETY: offset, alignment and permission were checked when `self` was made.
        unsafe { W::store(&self.memory, self.at, value, Ordering::Release) }
    }
}

impl WordWriter<u32> {
    /// Stores a value and returns the one before, among several threads of this process that all
    /// may.
    #[inline]
    pub fn swap(&self, value: u32) -> u32 {
        // SAFETY: offset, alignment and permission were checked when `self` was made.
        let word = unsafe { self.memory.words.word32(self.offset) };
        word.swap(value, Ordering::AcqRel)
    }

    /// Adds one, wrapping, among several threads of this process that all may.
    #[inline]
    pub fn increment(&self) {
        // SAFETY: offset, alignment and permission were checked when `self` was made.
        let word = unsafe { self.memory.words.word32(self.offset) };
        word.fetch_add(1, Ordering::Release);
    }
}

/// The slots of a ring that another process fills.
#[derive(Debug)]
pub struct SlotReader<R> {
    memory: SharedMemory,
    offset: usize,
    mask: u32,
    record: PhantomData<fn() -> R>,
}

impl<R: Pod> SlotReader<R> {
    /// Records in the ring: a power of two.
    #[inline]
    pub fn capacity(&self) -> u32 {
        self.mask + 1
    }

    /// A private copy of the record at a free-running position.
    #[inline]
    pub fn read(&self, position: u64) -> R {
        let offset = slot_offset::<R>(self.offset, self.mask, position);
        // SAFETY: the masked index is below the capacity that was checked when `self` was made.
        unsafe { self.memory.read_unchecked(offset) }
    }

    /// Where the record at a position will be read from.
    #[inline]
    pub(crate) fn place(&self, position: u64) -> RecordPlace<R> {
        let offset = slot_offset::<R>(self.offset, self.mask, position);
        // SAFETY: the masked index is below the capacity that was checked when `self` was made.
        RecordPlace { at: unsafe { self.memory.words.at(offset) }, record: PhantomData }
    }
}

/// The place of one record.
#[derive(Debug)]
pub(crate) struct RecordPlace<R> {
    at: At,
    record: PhantomData<fn() -> R>,
}

impl<R> RecordPlace<R> {
    /// Asks the cache for the first line of the record; processors fetch the neighbour with it.
    /// Says nothing about what is there.
    #[inline]
    pub(crate) fn prefetch(&self) {
        self.at.prefetch();
    }
}

/// The slots of a ring that this process fills.
#[derive(Debug)]
pub struct SlotWriter<R> {
    memory: SharedMemory,
    offset: usize,
    mask: u32,
    record: PhantomData<fn(R)>,
}

impl<R: Pod> SlotWriter<R> {
    /// Records in the ring: a power of two.
    #[inline]
    pub fn capacity(&self) -> u32 {
        self.mask + 1
    }

    /// Stores a record at a free-running position.
    #[inline]
    pub fn write(&self, position: u64, record: R) {
        let offset = slot_offset::<R>(self.offset, self.mask, position);
        // SAFETY: the masked index is below the capacity that was checked when `self` was made,
        // and so was the permission to write.
        unsafe { self.memory.write_unchecked(offset, record) }
    }
}

/// Values that another process writes.
#[derive(Debug)]
pub struct ArrayReader<T> {
    memory: SharedMemory,
    offset: usize,
    count: u32,
    value: PhantomData<fn() -> T>,
}

impl<T: Pod> ArrayReader<T> {
    /// Values in the array.
    #[inline]
    pub fn count(&self) -> u32 {
        self.count
    }

    /// A private copy of one value.
    ///
    /// # Panics
    /// When `index` is not below the count.
    #[inline]
    pub fn read(&self, index: u32) -> T {
        assert!(index < self.count, "index {index} of an array of {}", self.count);
        // SAFETY: the array was checked when `self` was made, and the index is below its count.
        unsafe { self.memory.read_unchecked(self.offset + index as usize * size_of::<T>()) }
    }

    /// Replaces `values` by private copies of `len` values from `start` on. False, and `values`
    /// is empty, when they do not lie inside the array. Allocates only where the vector's
    /// capacity is too small.
    pub fn read_range(&self, start: u32, len: u32, values: &mut Vec<T>) -> bool {
        values.clear();
        if start.checked_add(len).is_none_or(|end| end > self.count) {
            return false;
        }
        let first = self.offset + start as usize * size_of::<T>();
        values.extend((0..len as usize).map(|i| -> T {
            // SAFETY: the array was checked when `self` was made, and the range lies inside it.
            unsafe { self.memory.read_unchecked(first + i * size_of::<T>()) }
        }));
        true
    }
}

/// Values that only this process writes.
#[derive(Debug)]
pub struct ArrayWriter<T> {
    memory: SharedMemory,
    offset: usize,
    count: u32,
    value: PhantomData<fn(T)>,
}

impl<T: Pod> ArrayWriter<T> {
    /// Values in the array.
    #[inline]
    pub fn count(&self) -> u32 {
        self.count
    }

    /// Stores one value.
    ///
    /// # Panics
    /// When `index` is not below the count.
    #[inline]
    pub fn write(&self, index: u32, value: T) {
        assert!(index < self.count, "index {index} of an array of {}", self.count);
        // SAFETY: the array and the permission to write were checked when `self` was made, and
        // the index is below the count.
        unsafe { self.memory.write_unchecked(self.offset + index as usize * size_of::<T>(), value) }
    }
}

#[inline]
fn slot_offset<R>(start: usize, mask: u32, position: u64) -> usize {
    start + (position & u64::from(mask)) as usize * size_of::<R>()
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;

    #[test]
    fn heap_words_keep_the_alignment_of_mapped_ones() {
        for bytes in [0, 1, 128, 129, 5000] {
            let memory = SharedMemory::heap(bytes);
            assert!(memory.bytes() >= bytes && memory.bytes().is_multiple_of(128));
            assert_eq!(memory.address(0).addr() % 128, 0);
        }
    }

    #[test]
    fn values_are_copied_by_the_widest_word_that_fits() {
        let memory = SharedMemory::heap(256);
        memory.write(8, [1_u64, 2, 3]);
        assert_eq!(memory.read::<[u64; 3]>(8), [1, 2, 3]);
        assert_eq!(memory.read::<u32>(8), 1);
        memory.write(36, [7_u32, 8, 9]);
        assert_eq!(memory.read::<[u32; 3]>(36), [7, 8, 9]);
    }

    #[test]
    fn accesses_outside_misaligned_or_forbidden_are_bugs() {
        let memory = SharedMemory::heap(128);
        fn panics<T>(access: impl FnOnce() -> T) -> bool {
            catch_unwind(AssertUnwindSafe(access)).is_err()
        }
        assert!(!panics(|| memory.read::<u64>(120)));
        assert!(panics(|| memory.read::<u64>(121)));
        assert!(panics(|| memory.read::<u64>(124)));
        assert!(panics(|| memory.read::<u64>(128)));
        assert!(panics(|| memory.read::<u64>(usize::MAX - 7)));
        assert!(panics(|| memory.read::<[u64; 17]>(0)));
        assert!(panics(|| memory.slot_reader::<[u64; 8]>(0, 4)));
        assert!(panics(|| memory.slot_reader::<u64>(0, 3)));
        assert!(panics(|| memory.slot_reader::<u64>(0, 0)));
        assert!(panics(|| memory.word_reader::<u64>(128)));
        assert!(panics(|| memory.array_reader::<u64>(8, 16)));
        assert!(panics(|| memory.array_reader::<u64>(0, u32::MAX)));
        assert!(panics(|| memory.array_reader::<u64>(0, 16).read(16)));
        assert!(panics(|| memory.array_writer::<u64>(0, 16).write(16, 0)));
        assert!(!panics(|| memory.array_writer::<u64>(0, 16).write(15, 0)));
        let read_only = memory.read_only();
        assert!(panics(|| read_only.write(0, 1_u64)));
        assert!(panics(|| read_only.store_release(0, 1_u32)));
        assert!(panics(|| read_only.word_writer::<u64>(0)));
        assert!(panics(|| read_only.array_writer::<u64>(0, 4)));
        assert!(panics(|| read_only.slot_writer::<u64>(0, 4)));
        assert_eq!(memory.read::<u64>(0), 0);
    }

    #[test]
    fn ranges_are_copied_whole_or_not_at_all() {
        let memory = SharedMemory::heap(128);
        let writer = memory.array_writer::<u64>(64, 8);
        (0..8).for_each(|i| writer.write(i, u64::from(i)));
        let reader = memory.array_reader::<u64>(64, 8);
        assert_eq!((reader.count(), reader.read(3)), (8, 3));
        let mut values = vec![9];
        assert!(reader.read_range(5, 3, &mut values));
        assert_eq!(values, [5, 6, 7]);
        for (start, len) in [(5, 4), (9, 0), (u32::MAX, 1), (1, u32::MAX)] {
            assert!(!reader.read_range(start, len, &mut values));
            assert!(values.is_empty());
        }
    }

    #[test]
    fn slots_wrap_by_position() {
        let memory = SharedMemory::heap(128);
        let slots = memory.slot_writer::<u64>(64, 4);
        for position in [0, 1, 2, 3, u64::MAX] {
            slots.write(position, position);
        }
        assert_eq!(memory.read::<[u64; 4]>(64), [0, 1, 2, u64::MAX]);
        assert_eq!(memory.slot_reader::<u64>(64, 4).read(7), u64::MAX);
    }
}
