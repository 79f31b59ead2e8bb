//! A few words that a process shares with the child it forks.
#![allow(unsafe_code, reason = "shared memory is mapped and read by pointer")]

use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicU32, AtomicU64};

use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

/// Bytes of a mapping.
const BYTES: usize = 64 << 10;
/// Bytes that no neighbour's access touches: two cache lines, since the second is prefetched with
/// the first.
const LINE: usize = 128;
/// Lines of a mapping.
pub(crate) const LINES: usize = BYTES / LINE;

/// An anonymous shared mapping of [`LINES`] lines, all zero at first. A forked child sees the same
/// memory.
#[derive(Debug)]
pub(crate) struct SharedLines {
    start: NonNull<u8>,
}

impl SharedLines {
    /// Maps new lines.
    pub(crate) fn new() -> Result<Self, Errno> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::POPULATE;
        // SAFETY: no address is asked for, so no existing mapping is touched.
        let start = unsafe { mmap_anonymous(null_mut(), BYTES, protection, flags) }?;
        NonNull::new(start.cast()).map(|start| Self { start }).ok_or(Errno::NOMEM)
    }

    /// The word at the begin of a line.
    ///
    /// # Panics
    /// `line` is not below [`LINES`].
    pub(crate) fn word(&self, line: usize) -> &AtomicU64 {
        let word = self.line(line).cast::<u64>();
        // SAFETY: mapped, writable, aligned to a page plus whole lines, for as long as `self`;
        // everybody accesses it atomically.
        unsafe { AtomicU64::from_ptr(word.as_ptr()) }
    }

    /// A futex word: the second eight bytes of a line, so that it is not part of [`word`](Self::word).
    ///
    /// # Panics
    /// `line` is not below [`LINES`].
    pub(crate) fn futex(&self, line: usize) -> &AtomicU32 {
        // SAFETY: the offset stays inside the line.
        let word = unsafe { self.line(line).add(8) }.cast::<u32>();
        // SAFETY: as in `word`.
        unsafe { AtomicU32::from_ptr(word.as_ptr()) }
    }

    fn line(&self, line: usize) -> NonNull<u8> {
        assert!(line < LINES, "line {line} of {LINES}");
        // SAFETY: the offset is inside the mapping.
        unsafe { self.start.add(line * LINE) }
    }
}

impl Drop for SharedLines {
    fn drop(&mut self) {
        // SAFETY: our own mapping, and every reference into it has ended with `self`.
        let _unmapped = unsafe { munmap(self.start.as_ptr().cast(), BYTES) };
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;

    #[test]
    fn words_and_futexes_do_not_overlap() {
        let lines = SharedLines::new().unwrap();
        for line in 0..LINES {
            lines.word(line).store(line as u64, Ordering::Relaxed);
            lines.futex(line).store(!(line as u32), Ordering::Relaxed);
        }
        for line in 0..LINES {
            assert_eq!(lines.word(line).load(Ordering::Relaxed), line as u64);
            assert_eq!(lines.futex(line).load(Ordering::Relaxed), !(line as u32));
        }
    }
}
