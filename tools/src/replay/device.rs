//! The KV pages of a replayed engine: a memfd that the Manager maps.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};

/// Device pages of one engine. Read and written through the descriptor, so that no byte that the
/// Manager may be writing is ever behind a reference.
#[derive(Debug)]
pub(super) struct DevicePages {
    memory: File,
    page_bytes: usize,
    pages: u32,
    free: Vec<u32>,
}

impl DevicePages {
    /// Reserves `pages` pages and seals them against shrinking.
    ///
    /// # Errors
    /// The kernel has no memory for them.
    pub(super) fn reserve(pages: u32, page_bytes: u64) -> io::Result<Self> {
        let bytes = u64::from(pages)
            .checked_mul(page_bytes)
            .ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?;
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let memory = rustix::fs::memfd_create("orbitkv-replay-pages", flags)?;
        rustix::fs::ftruncate(&memory, bytes)?;
        rustix::fs::fallocate(&memory, FallocateFlags::empty(), 0, bytes)?;
        rustix::fs::fcntl_add_seals(&memory, SealFlags::SHRINK | SealFlags::GROW)?;
        Ok(Self {
            memory: File::from(memory),
            page_bytes: page_bytes as usize,
            pages,
            free: (0..pages).rev().collect(),
        })
    }

    /// Pages of the region.
    pub(super) fn pages(&self) -> u32 {
        self.pages
    }

    /// Bytes of the region.
    pub(super) fn bytes(&self) -> u64 {
        u64::from(self.pages) * self.page_bytes as u64
    }

    /// Bytes of one page.
    pub(super) fn page_bytes(&self) -> usize {
        self.page_bytes
    }

    /// Pages that nobody uses.
    pub(super) fn free(&self) -> usize {
        self.free.len()
    }

    /// Takes a page, if one is free.
    pub(super) fn take(&mut self) -> Option<u32> {
        self.free.pop()
    }

    /// Gives a page back.
    pub(super) fn give(&mut self, page: u32) {
        debug_assert!(page < self.pages && self.free.len() < self.pages as usize);
        self.free.push(page);
    }

    /// Copies a page out.
    pub(super) fn read(&self, page: u32, bytes: &mut [u8]) -> io::Result<()> {
        self.memory.read_exact_at(bytes, u64::from(page) * self.page_bytes as u64)
    }

    /// Copies a page in.
    pub(super) fn write(&self, page: u32, bytes: &[u8]) -> io::Result<()> {
        self.memory.write_all_at(bytes, u64::from(page) * self.page_bytes as u64)
    }
}

impl AsFd for DevicePages {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }
}
