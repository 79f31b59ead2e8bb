//! Every raw access to bytes that another process may change.
//!
//! The laws of this module, on which the rest of the crate is built without `unsafe`:
//!
//! 1. Shared bytes are never behind a reference or a slice. They are read and written as aligned
//!    32- and 64-bit atomic words; larger values are assembled word by word in private memory.
//! 2. A value read twice may differ. Callers copy once, check the copy and use only the copy.
//! 3. Handles check offset, alignment and write permission once, when they are made, against a
//!    length that is private to this process. After that no peer can move an access.
//! 4. A mapping is sealed against shrinking before it is used (see [`crate::segment`]), so that a
//!    peer cannot turn an access into a SIGBUS.
//!
//! There are two twins: mapped memory, which two processes share, and heap memory, with which the
//! same rings and doorbells run inside one process.

#![allow(unsafe_code, reason = "shared memory is reached through raw pointers, and only here")]

use std::fmt;
use std::marker::PhantomData;
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::time::Duration;

use bytemuck::Pod;
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};
use rustix::thread::futex;
use rustix::time::{ClockId, Timespec, clock_gettime};

use crate::layout::{SECTION_ALIGN, WORD_BLOCK};

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
    /// Start of the range; aligned to [`WORD_BLOCK`] at least.
    base: NonNull<u8>,
    bytes: usize,
    access: Access,
    backing: Arc<Backing>,
}

// SAFETY: `base` points into `backing`, which every clone keeps alive and which no thread owns;
// all accesses go through atomics.
unsafe impl Send for SharedMemory {}
// SAFETY: as above: `&SharedMemory` only gives atomic access.
unsafe impl Sync for SharedMemory {}

/// What the bytes live in, and what returns them.
enum Backing {
    Mapped(Mapping),
    Heap(#[expect(dead_code, reason = "reached through `base` only")] Box<[Block]>),
}

/// One word block of the heap twin; keeps the separation of words that a mapping has.
#[repr(align(128))]
struct Block(
    #[expect(dead_code, reason = "reached through `base` only")] [AtomicU64; WORD_BLOCK / 8],
);

const _: () = assert!(size_of::<Block>() == WORD_BLOCK && align_of::<Block>() == WORD_BLOCK);

impl SharedMemory {
    /// Zeroed memory of this process alone: the twin for tests and in-process doorbells.
    /// `bytes` is rounded up to a whole [`WORD_BLOCK`].
    pub fn heap(bytes: usize) -> Self {
        let blocks: Box<[Block]> = (0..bytes.div_ceil(WORD_BLOCK).max(1))
            .map(|_| Block([const { AtomicU64::new(0) }; WORD_BLOCK / 8]))
            .collect();
        Self {
            base: NonNull::from(&*blocks).cast(),
            bytes: blocks.len() * WORD_BLOCK,
            access: Access::ReadWrite,
            backing: Arc::new(Backing::Heap(blocks)),
        }
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
    pub fn map(
        descriptor: BorrowedFd<'_>,
        bytes: usize,
        access: Access,
        fork: &Arc<ForkGuard>,
    ) -> Result<Self, Errno> {
        assert!(bytes > 0 && bytes.is_multiple_of(SECTION_ALIGN));
        let (protection, populate) = match access {
            Access::Read => (ProtFlags::READ, Advice::LinuxPopulateRead),
            Access::ReadWrite => (ProtFlags::READ | ProtFlags::WRITE, Advice::LinuxPopulateWrite),
        };
        // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
        let start = unsafe {
            rustix::mm::mmap(ptr::null_mut(), bytes, protection, MapFlags::SHARED, descriptor, 0)
        }?;
        let base = NonNull::new(start.cast::<u8>()).ok_or(Errno::NOMEM)?;
        let mapping = Mapping { base, bytes, fork: Arc::clone(fork) };
        // SAFETY: the range was mapped above and is owned by `mapping`; the advice changes what a
        // forked child inherits, not the contents.
        unsafe { rustix::mm::madvise(start, bytes, Advice::LinuxDontFork) }?;
        // SAFETY: as above; populating changes page tables, not contents. Best effort: an older
        // kernel answers EINVAL and the pages fault in one by one.
        let _ = unsafe { rustix::mm::madvise(start, bytes, populate) };
        Ok(Self { base, bytes, access, backing: Arc::new(Backing::Mapped(mapping)) })
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

    /// False after a fork in the child, which has no such mapping: touching it would be SIGSEGV.
    /// Always true for heap memory.
    #[inline]
    pub fn is_mapped_here(&self) -> bool {
        match &*self.backing {
            Backing::Mapped(mapping) => mapping.fork.is_owner(),
            Backing::Heap(_) => true,
        }
    }

    /// Address of a byte, for registration with a device driver. Valid while a clone of this
    /// handle lives; the bytes behind it change at any time.
    ///
    /// # Panics
    /// When `offset` lies beyond the end.
    pub fn address(&self, offset: usize) -> *mut u8 {
        assert!(offset <= self.bytes);
        // SAFETY: at most one past the end of the one allocation that `base` points to.
        unsafe { self.base.as_ptr().add(offset) }
    }

    /// Copies a value out, word by word (relaxed). The copy may mix bytes of several writes; the
    /// caller orders itself by a word that was published after them.
    ///
    /// # Panics
    /// When the value does not lie inside the range or `offset` is not a multiple of its word.
    #[inline]
    pub fn read<T: Pod>(&self, offset: usize) -> T {
        self.check::<T>(offset);
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
        self.check::<T>(offset);
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
        self.check::<W>(offset);
        // SAFETY: checked just above.
        unsafe { W::load(self, offset, Ordering::Acquire) }
    }

    /// Stores a word; whoever acquires it sees everything written before.
    ///
    /// # Panics
    /// As [`load_acquire`](Self::load_acquire), and when the memory is read-only.
    #[inline]
    pub fn store_release<W: Word>(&self, offset: usize, value: W) {
        self.check::<W>(offset);
        self.check_writable();
        // SAFETY: checked just above.
        unsafe { W::store(self, offset, value, Ordering::Release) }
    }

    /// The reading end of one word that another process writes.
    ///
    /// # Panics
    /// When the word does not lie inside the range or is not aligned.
    pub fn word_reader<W: Word>(&self, offset: usize) -> WordReader<W> {
        self.check::<W>(offset);
        WordReader { memory: self.clone(), offset, word: PhantomData }
    }

    /// The writing end of one word; this process is its only writer.
    ///
    /// # Panics
    /// As [`word_reader`](Self::word_reader), and when the memory is read-only.
    pub fn word_writer<W: Word>(&self, offset: usize) -> WordWriter<W> {
        self.check::<W>(offset);
        self.check_writable();
        WordWriter { memory: self.clone(), offset, word: PhantomData }
    }

    /// The reading end of a ring's `capacity` slots from `offset` on.
    ///
    /// # Panics
    /// When the slots do not lie inside the range, or `capacity` is not a power of two.
    pub fn slot_reader<R: Pod>(&self, offset: usize, capacity: u32) -> SlotReader<R> {
        self.check_slots::<R>(offset, capacity);
        SlotReader { memory: self.clone(), offset, mask: capacity - 1, record: PhantomData }
    }

    /// The writing end of a ring's `capacity` slots from `offset` on.
    ///
    /// # Panics
    /// As [`slot_reader`](Self::slot_reader), and when the memory is read-only.
    pub fn slot_writer<R: Pod>(&self, offset: usize, capacity: u32) -> SlotWriter<R> {
        self.check_slots::<R>(offset, capacity);
        self.check_writable();
        SlotWriter { memory: self.clone(), offset, mask: capacity - 1, record: PhantomData }
    }

    #[inline]
    fn check<T: Pod>(&self, offset: usize) {
        const { assert!(size_of::<T>() > 0 && size_of::<T>().is_multiple_of(4)) };
        assert!(offset.is_multiple_of(word_bytes::<T>()), "misaligned access to shared memory");
        assert!(
            offset <= self.bytes && size_of::<T>() <= self.bytes - offset,
            "access beyond the end of shared memory"
        );
    }

    fn check_slots<R: Pod>(&self, offset: usize, capacity: u32) {
        const { assert!(size_of::<R>() > 0 && size_of::<R>().is_multiple_of(8)) };
        assert!(capacity.is_power_of_two(), "ring capacity must be a power of two");
        assert!(offset.is_multiple_of(8), "misaligned ring");
        let bytes = size_of::<R>().checked_mul(capacity as usize);
        assert!(
            offset <= self.bytes && bytes.is_some_and(|bytes| bytes <= self.bytes - offset),
            "ring beyond the end of shared memory"
        );
    }

    #[inline]
    fn check_writable(&self) {
        assert!(self.is_writable(), "store to read-only shared memory");
    }

    /// # Safety
    /// `offset + 8 <= self.bytes` and `offset` is a multiple of 8.
    #[inline]
    unsafe fn word64(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: inside the allocation, by the contract of this function.
        let word = unsafe { self.base.as_ptr().add(offset) }.cast::<u64>();
        // SAFETY: aligned, because `base` is aligned to 8 and `offset` by contract; valid while
        // `self` keeps the backing; this process accesses it by atomics only. Another process is
        // outside the memory model: the hardware keeps aligned words whole.
        unsafe { AtomicU64::from_ptr(word) }
    }

    /// # Safety
    /// `offset + 4 <= self.bytes` and `offset` is a multiple of 4.
    #[inline]
    unsafe fn word32(&self, offset: usize) -> &AtomicU32 {
        // SAFETY: inside the allocation, by the contract of this function.
        let word = unsafe { self.base.as_ptr().add(offset) }.cast::<u32>();
        // SAFETY: as in `word64`, for 4 bytes.
        unsafe { AtomicU32::from_ptr(word) }
    }

    /// # Safety
    /// As [`check`](Self::check) demands.
    #[inline]
    unsafe fn read_unchecked<T: Pod>(&self, offset: usize) -> T {
        let mut value = T::zeroed();
        let bytes = bytemuck::bytes_of_mut(&mut value);
        if word_bytes::<T>() == 8 {
            for (i, chunk) in bytes.chunks_exact_mut(8).enumerate() {
                // SAFETY: word i of a value that lies inside the range, by contract.
                let word = unsafe { self.word64(offset + 8 * i) };
                chunk.copy_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes());
            }
        } else {
            for (i, chunk) in bytes.chunks_exact_mut(4).enumerate() {
                // SAFETY: word i of a value that lies inside the range, by contract.
                let word = unsafe { self.word32(offset + 4 * i) };
                chunk.copy_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes());
            }
        }
        value
    }

    /// # Safety
    /// As [`check`](Self::check) demands, and the memory is writable.
    #[inline]
    unsafe fn write_unchecked<T: Pod>(&self, offset: usize, value: T) {
        let bytes = bytemuck::bytes_of(&value);
        if word_bytes::<T>() == 8 {
            for (i, chunk) in bytes.as_chunks::<8>().0.iter().enumerate() {
                // SAFETY: word i of a value that lies inside the range, by contract.
                let word = unsafe { self.word64(offset + 8 * i) };
                word.store(u64::from_ne_bytes(*chunk), Ordering::Relaxed);
            }
        } else {
            for (i, chunk) in bytes.as_chunks::<4>().0.iter().enumerate() {
                // SAFETY: word i of a value that lies inside the range, by contract.
                let word = unsafe { self.word32(offset + 4 * i) };
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
            .field("heap", &matches!(&*self.backing, Backing::Heap(_)))
            .finish()
    }
}

/// A mapping, unmapped on drop by the process that made it.
struct Mapping {
    base: NonNull<u8>,
    bytes: usize,
    fork: Arc<ForkGuard>,
}

// SAFETY: a mapping belongs to the process, not to a thread; this type only unmaps it.
unsafe impl Send for Mapping {}
// SAFETY: `&Mapping` gives no access to the bytes.
unsafe impl Sync for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        // A forked child does not have this mapping, and something else may lie at its address.
        if !self.fork.is_owner() {
            return;
        }
        // SAFETY: exactly the range that `SharedMemory::map` mapped; every handle that could
        // reach it held the `Arc` whose last clone is being dropped.
        let result = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.bytes) };
        debug_assert!(result.is_ok(), "munmap: {result:?}");
    }
}

/// Knows whether the running process is the one that made it, for the price of one private load.
///
/// A forked child inherits handles, but not the mappings behind them, and must not use them:
/// rings have one producer and one consumer. The word lies in a page that the kernel zeroes in
/// the child (`MADV_WIPEONFORK`).
pub struct ForkGuard {
    page: NonNull<AtomicU32>,
}

// SAFETY: the page belongs to the process and is only read after `new`.
unsafe impl Send for ForkGuard {}
// SAFETY: as above.
unsafe impl Sync for ForkGuard {}

impl ForkGuard {
    const PAGE_BYTES: usize = 4096;

    /// Makes a guard that this process owns.
    ///
    /// # Errors
    /// What `mmap` or `madvise` said; `EINVAL` before Linux 4.14.
    pub fn new() -> Result<Self, Errno> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
        let start = unsafe {
            rustix::mm::mmap_anonymous(
                ptr::null_mut(),
                Self::PAGE_BYTES,
                protection,
                MapFlags::PRIVATE,
            )
        }?;
        let guard = Self { page: NonNull::new(start.cast()).ok_or(Errno::NOMEM)? };
        // SAFETY: the page was mapped above and holds nothing yet.
        unsafe { rustix::mm::madvise(start, Self::PAGE_BYTES, Advice::LinuxWipeOnFork) }?;
        guard.word().store(1, Ordering::Relaxed);
        Ok(guard)
    }

    /// Whether this is the process that made the guard, not a forked child of it.
    #[inline]
    pub fn is_owner(&self) -> bool {
        self.word().load(Ordering::Relaxed) != 0
    }

    #[inline]
    fn word(&self) -> &AtomicU32 {
        // SAFETY: page-aligned, mapped until drop (in a forked child too), accessed by atomics.
        unsafe { self.page.as_ref() }
    }
}

impl Drop for ForkGuard {
    fn drop(&mut self) {
        // SAFETY: the page that `new` mapped, which a forked child has as well; no reference to
        // it outlives `self`.
        let _ = unsafe { rustix::mm::munmap(self.page.as_ptr().cast(), Self::PAGE_BYTES) };
    }
}

impl fmt::Debug for ForkGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ForkGuard").field("is_owner", &self.is_owner()).finish()
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
    /// The word at `offset` lies inside `memory` and is aligned.
    #[doc(hidden)]
    unsafe fn load(memory: &SharedMemory, offset: usize, ordering: Ordering) -> Self;
    /// # Safety
    /// As `load`, and the memory is writable.
    #[doc(hidden)]
    unsafe fn store(memory: &SharedMemory, offset: usize, value: Self, ordering: Ordering);
}

impl Word for u32 {
    #[inline]
    unsafe fn load(memory: &SharedMemory, offset: usize, ordering: Ordering) -> Self {
        // SAFETY: passed on to the caller.
        unsafe { memory.word32(offset) }.load(ordering)
    }
    #[inline]
    unsafe fn store(memory: &SharedMemory, offset: usize, value: Self, ordering: Ordering) {
        // SAFETY: passed on to the caller.
        unsafe { memory.word32(offset) }.store(value, ordering);
    }
}

impl Word for u64 {
    #[inline]
    unsafe fn load(memory: &SharedMemory, offset: usize, ordering: Ordering) -> Self {
        // SAFETY: passed on to the caller.
        unsafe { memory.word64(offset) }.load(ordering)
    }
    #[inline]
    unsafe fn store(memory: &SharedMemory, offset: usize, value: Self, ordering: Ordering) {
        // SAFETY: passed on to the caller.
        unsafe { memory.word64(offset) }.store(value, ordering);
    }
}

/// One word that another process writes.
#[derive(Clone, Debug)]
pub struct WordReader<W> {
    memory: SharedMemory,
    offset: usize,
    word: PhantomData<W>,
}

impl<W: Word> WordReader<W> {
    /// The value now, ordered with nothing.
    #[inline]
    pub fn load_relaxed(&self) -> W {
        // SAFETY: offset and alignment were checked when `self` was made.
        unsafe { W::load(&self.memory, self.offset, Ordering::Relaxed) }
    }

    /// The value now; what its writer wrote before releasing it is visible afterwards.
    #[inline]
    pub fn load_acquire(&self) -> W {
        // SAFETY: offset and alignment were checked when `self` was made.
        unsafe { W::load(&self.memory, self.offset, Ordering::Acquire) }
    }
}

/// One word that only this process writes.
#[derive(Clone, Debug)]
pub struct WordWriter<W> {
    memory: SharedMemory,
    offset: usize,
    word: PhantomData<W>,
}

impl<W: Word> WordWriter<W> {
    /// Stores a value, ordered with nothing.
    #[inline]
    pub fn store_relaxed(&self, value: W) {
        // SAFETY: offset, alignment and permission were checked when `self` was made.
        unsafe { W::store(&self.memory, self.offset, value, Ordering::Relaxed) }
    }

    /// Stores a value; whoever acquires it sees everything written before.
    #[inline]
    pub fn store_release(&self, value: W) {
        // SAFETY: offset, alignment and permission were checked when `self` was made.
        unsafe { W::store(&self.memory, self.offset, value, Ordering::Release) }
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

#[inline]
fn slot_offset<R>(start: usize, mask: u32, position: u64) -> usize {
    start + (position & u64::from(mask)) as usize * size_of::<R>()
}

/// The full fence between a store and a later load (`wake-fence` in the ordering table).
#[inline]
pub fn full_fence() {
    fence(Ordering::SeqCst);
}

/// How a futex wait ended. None of them says anything about the ring: look at it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WaitEnd {
    /// The word differed from the value seen, or its writer woke this waiter.
    Rung,
    /// The time passed.
    TimedOut,
    /// A signal arrived.
    Interrupted,
    /// The kernel has no `futex_waitv` (before 5.16, or forbidden by a seccomp profile): this was
    /// a nap of at most [`NAP_MAX`] on the first word.
    Napped,
}

/// Longest sleep on the first word of several where the kernel cannot wait for all of them.
pub const NAP_MAX: Duration = Duration::from_millis(1);

/// Most words that one thread can wait for (`FUTEX_WAITV_MAX`).
pub const WAIT_WORDS_MAX: usize = 128;

impl WordReader<u32> {
    /// Sleeps while the word holds `seen`, at most `timeout`. Shared between processes.
    pub fn futex_wait(&self, seen: u32, timeout: Duration) -> WaitEnd {
        // SAFETY: offset and alignment were checked when `self` was made.
        let word = unsafe { self.memory.word32(self.offset) };
        // Never PRIVATE: the waker is another process, and private waits of a process that was
        // single-threaded when it went to sleep have been missed by later wakes.
        match futex::wait(word, futex::Flags::empty(), seen, Some(&timespec(timeout))) {
            Ok(()) | Err(Errno::AGAIN) => WaitEnd::Rung,
            Err(Errno::INTR) => WaitEnd::Interrupted,
            // Any other errno would be a bug of ours; treating it as a timeout keeps the ring
            // authoritative.
            Err(_) => WaitEnd::TimedOut,
        }
    }
}

impl WordWriter<u32> {
    /// Wakes every waiter on the word. Returns how many there were.
    pub fn futex_wake(&self) -> usize {
        // SAFETY: offset and alignment were checked when `self` was made.
        let word = unsafe { self.memory.word32(self.offset) };
        futex::wake(word, futex::Flags::empty(), i32::MAX as u32).unwrap_or(0)
    }

    /// Adds one, among several threads of this process that all may.
    #[inline]
    pub fn increment(&self) {
        // SAFETY: offset, alignment and permission were checked when `self` was made.
        let word = unsafe { self.memory.word32(self.offset) };
        word.fetch_add(1, Ordering::Release);
    }
}

/// Sleeps while every word still holds the value seen of it, at most `timeout`. One system call.
///
/// # Panics
/// When there are no words, or more than [`WAIT_WORDS_MAX`].
pub fn futex_wait_many<'a>(
    words: impl ExactSizeIterator<Item = (&'a WordReader<u32>, u32)>,
    timeout: Duration,
) -> WaitEnd {
    let count = words.len();
    assert!((1..=WAIT_WORDS_MAX).contains(&count), "{count} futex words to wait for");
    let mut waits = [futex::Wait::new(); WAIT_WORDS_MAX];
    let mut first = None;
    for (wait, (word, seen)) in waits.iter_mut().zip(words) {
        wait.val = seen.into();
        wait.uaddr = futex::WaitPtr::new(word.memory.address(word.offset).cast());
        wait.flags = futex::WaitFlags::SIZE_U32;
        first = first.or(Some((word, seen)));
    }
    let now = clock_gettime(ClockId::Monotonic);
    let until = now.checked_add(timespec(timeout));
    let flags = futex::WaitvFlags::empty();
    match futex::waitv(&waits[..count], flags, until.as_ref(), futex::ClockId::Monotonic) {
        Ok(_) | Err(Errno::AGAIN) => WaitEnd::Rung,
        Err(Errno::INTR) => WaitEnd::Interrupted,
        Err(Errno::NOSYS | Errno::PERM) => {
            if let Some((word, seen)) = first {
                word.futex_wait(seen, timeout.min(NAP_MAX));
            }
            WaitEnd::Napped
        }
        Err(_) => WaitEnd::TimedOut,
    }
}

fn timespec(duration: Duration) -> Timespec {
    Timespec {
        // A century is as good as for ever, and cannot overflow when added to a clock.
        tv_sec: duration.as_secs().min(100 * 365 * 86_400) as i64,
        tv_nsec: duration.subsec_nanos().into(),
    }
}
