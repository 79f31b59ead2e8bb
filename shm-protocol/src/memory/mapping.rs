//! Mappings of descriptors, and what a forked child must know about them.

#![allow(unsafe_code, reason = "mmap and munmap change what addresses mean")]

use std::fmt;
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};

use super::Access;

/// A shared mapping of a descriptor, unmapped on drop by the process that made it.
pub(super) struct Mapping {
    base: NonNull<u8>,
    bytes: usize,
    fork: ForkGuard,
}

// SAFETY: a mapping belongs to the process, not to a thread; this type only unmaps it.
unsafe impl Send for Mapping {}
// SAFETY: `&Mapping` gives no access to the bytes.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the first `bytes` of `descriptor`; see [`super::SharedMemory::map`].
    pub(super) fn new(
        descriptor: BorrowedFd<'_>,
        bytes: usize,
        access: Access,
        fork: &ForkGuard,
    ) -> Result<Self, Errno> {
        let (protection, populate) = match access {
            Access::Read => (ProtFlags::READ, Advice::LinuxPopulateRead),
            Access::ReadWrite => (ProtFlags::READ | ProtFlags::WRITE, Advice::LinuxPopulateWrite),
        };
        // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
        let start = unsafe {
            rustix::mm::mmap(ptr::null_mut(), bytes, protection, MapFlags::SHARED, descriptor, 0)
        }?;
        let base = NonNull::new(start.cast::<u8>()).ok_or(Errno::NOMEM)?;
        let mapping = Self { base, bytes, fork: fork.clone() };
        // SAFETY: the range was mapped above and is owned by `mapping`; the advice changes what a
        // forked child inherits, not the contents.
        unsafe { rustix::mm::madvise(start, bytes, Advice::LinuxDontFork) }?;
        // SAFETY: as above; populating changes page tables, not contents. Best effort: an older
        // kernel answers EINVAL and the pages fault in one by one.
        let _ = unsafe { rustix::mm::madvise(start, bytes, populate) };
        Ok(mapping)
    }

    /// First byte; page-aligned.
    pub(super) fn base(&self) -> NonNull<u8> {
        self.base
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // A forked child does not have this mapping, and something else may lie at its address.
        if !self.fork.is_owner() {
            return;
        }
        // SAFETY: exactly the range that `new` mapped; every handle that could reach it held the
        // `Arc` whose last clone is being dropped.
        let result = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.bytes) };
        debug_assert!(result.is_ok(), "munmap: {result:?}");
    }
}

/// Knows whether the running process is the one that made it, for the price of one private load.
///
/// A forked child inherits handles, but not the mappings behind them, and must not use them:
/// rings have one producer and one consumer. The word lies in a page that the kernel zeroes in
/// the child (`MADV_WIPEONFORK`). Clones share the page.
#[derive(Clone)]
pub struct ForkGuard {
    /// Points into `page`, or at [`UNGUARDED`].
    word: NonNull<AtomicU32>,
    page: Option<Arc<ForkPage>>,
}

/// The word of guards that never object.
static UNGUARDED: AtomicU32 = AtomicU32::new(1);

// SAFETY: the word is an atomic that lives as long as `page`, or for ever.
unsafe impl Send for ForkGuard {}
// SAFETY: as above.
unsafe impl Sync for ForkGuard {}

impl ForkGuard {
    /// Makes a guard that this process owns.
    ///
    /// # Errors
    /// What `mmap` or `madvise` said; `EINVAL` before Linux 4.14.
    pub fn new() -> Result<Self, Errno> {
        let page = ForkPage::new()?;
        let guard = Self { word: page.start.cast(), page: Some(Arc::new(page)) };
        guard.word().store(1, Ordering::Relaxed);
        Ok(guard)
    }

    /// A guard that every process owns, for memory that a fork copies.
    pub fn unguarded() -> Self {
        Self { word: NonNull::from(&UNGUARDED), page: None }
    }

    /// Whether this is the process that made the guard, not a forked child of it.
    #[inline]
    pub fn is_owner(&self) -> bool {
        self.word().load(Ordering::Relaxed) != 0
    }

    #[inline]
    fn word(&self) -> &AtomicU32 {
        // SAFETY: aligned and alive: a static, or the start of a page that `self.page` keeps
        // mapped (in a forked child too); accessed by atomics only.
        unsafe { self.word.as_ref() }
    }
}

impl fmt::Debug for ForkGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ForkGuard")
            .field("guarded", &self.page.is_some())
            .field("is_owner", &self.is_owner())
            .finish()
    }
}

/// One private page that is zero in a forked child.
struct ForkPage {
    start: NonNull<u8>,
}

// SAFETY: a mapping belongs to the process, not to a thread; this type only unmaps it.
unsafe impl Send for ForkPage {}
// SAFETY: `&ForkPage` gives no access to the bytes.
unsafe impl Sync for ForkPage {}

impl ForkPage {
    /// Length that the kernel rounds up to its own page size, in bytes.
    const BYTES: usize = 4096;

    fn new() -> Result<Self, Errno> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
        let start = unsafe {
            rustix::mm::mmap_anonymous(ptr::null_mut(), Self::BYTES, protection, MapFlags::PRIVATE)
        }?;
        let page = Self { start: NonNull::new(start.cast()).ok_or(Errno::NOMEM)? };
        // SAFETY: the page was mapped above and holds nothing yet.
        unsafe { rustix::mm::madvise(start, Self::BYTES, Advice::LinuxWipeOnFork) }?;
        Ok(page)
    }
}

impl Drop for ForkPage {
    fn drop(&mut self) {
        // SAFETY: the page that `new` mapped, which a forked child has as well; no reference to
        // it outlives the guards that share `self`.
        let result = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), Self::BYTES) };
        debug_assert!(result.is_ok(), "munmap: {result:?}");
    }
}
