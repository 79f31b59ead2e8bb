//! What a worker asks of the kernel: chunks of reads and writes, and when a chunk is good.
//!
//! An [`Engine`] takes a [`Chunk`] by value and gives it back with its result, so nothing that the
//! kernel may touch is owned by anyone else meanwhile. Engines only carry; [`Attempts::judge`] is
//! the one place that decides what a result means.

use std::fmt;
use std::time::Duration;

use rustix::io::Errno;

use crate::core::{Extent, IoFault};

use super::format::{BLOCK_BYTES, Block};

/// Image bytes of one chunk at most: the unit of retry. Kernels before 6.x answered larger ones
/// with EAGAIN after moving a part.
pub(crate) const CHUNK_IMAGE_BYTES_MAX: u32 = 1 << 20;

/// Parts of one chunk at most: the kernel takes no more (`IOV_MAX`).
pub(crate) const CHUNK_PARTS_MAX: usize = 1024;

/// Times that a chunk is sent again after EAGAIN or EINTR.
const AGAIN_MAX: u8 = 3;
/// Times that a chunk is sent again after a short transfer.
const SHORT_MAX: u8 = 1;

/// Which way a chunk goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Transfer {
    /// SSD → memory.
    Read,
    /// Memory → SSD.
    Write,
}

/// One piece of memory of a chunk.
#[derive(Debug)]
pub(crate) enum Part {
    /// A part of a page image in the DRAM pool.
    Image(Extent),
    /// A block of our own: a footer, or the bytes between two images.
    Block(Box<Block>),
}

impl Part {
    /// Length in bytes.
    pub(crate) fn bytes(&self) -> u32 {
        match self {
            Self::Image(extent) => extent.bytes,
            Self::Block(_) => BLOCK_BYTES as u32,
        }
    }
}

/// Whose parts these are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Member {
    /// The worker's number for the page.
    pub page: u32,
    /// How many of the chunk's parts, in order.
    pub parts: u32,
}

/// A run of bytes of the file and the memory it goes to or comes from.
#[derive(Debug)]
pub(crate) struct Chunk {
    /// Which way.
    pub transfer: Transfer,
    /// First byte in the file, a multiple of 4 KiB.
    pub offset: u64,
    /// Memory, in file order; at most [`CHUNK_PARTS_MAX`].
    pub parts: Vec<Part>,
    /// The pages that the parts belong to, in order.
    pub members: Vec<Member>,
    /// How often it was tried.
    pub attempts: Attempts,
    /// The worker's number for it while it is out.
    pub number: usize,
    bytes: u32,
    image_bytes: u32,
}

impl Chunk {
    /// An empty chunk that uses the given (empty) vectors.
    pub(crate) fn new(
        transfer: Transfer,
        offset: u64,
        parts: Vec<Part>,
        members: Vec<Member>,
    ) -> Self {
        debug_assert!(parts.is_empty() && members.is_empty());
        let attempts = Attempts::default();
        Self { transfer, offset, parts, members, attempts, number: 0, bytes: 0, image_bytes: 0 }
    }

    /// Appends a part of `page`.
    pub(crate) fn push(&mut self, page: u32, part: Part) {
        self.bytes += part.bytes();
        if let Part::Image(extent) = part {
            self.image_bytes += extent.bytes;
        }
        self.parts.push(part);
        match self.members.last_mut() {
            Some(member) if member.page == page => member.parts += 1,
            _ => self.members.push(Member { page, parts: 1 }),
        }
    }

    /// Bytes that it moves.
    pub(crate) fn bytes(&self) -> u32 {
        self.bytes
    }

    /// Bytes of page images among them: what the limits count.
    pub(crate) fn image_bytes(&self) -> u32 {
        self.image_bytes
    }

    /// One chunk for each page, so that a page that fails does not take its neighbours along.
    pub(crate) fn split(self) -> impl Iterator<Item = Self> {
        let (transfer, mut offset) = (self.transfer, self.offset);
        let mut parts = self.parts.into_iter();
        self.members.into_iter().map(move |member| {
            let mut single = Self::new(transfer, offset, Vec::new(), Vec::new());
            for part in parts.by_ref().take(member.parts as usize) {
                single.push(member.page, part);
            }
            offset += u64::from(single.bytes);
            single
        })
    }
}

/// What the kernel answered.
#[derive(Debug)]
pub(crate) struct Done {
    /// The chunk, no longer the kernel's.
    pub chunk: Chunk,
    /// Bytes moved, or a negative errno.
    pub result: i32,
}

/// How often a chunk was sent again, by reason.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct Attempts {
    again: u8,
    short: u8,
}

/// What a result means.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Verdict {
    /// Every byte is where it belongs.
    Good,
    /// Send the whole chunk once more.
    Again,
    /// It will not get better.
    Failed(IoFault),
}

impl Attempts {
    /// Judges the result of a chunk of `expected` bytes. Good is only `result == expected`.
    pub(crate) fn judge(&mut self, expected: u32, result: i32) -> Verdict {
        let errno = result.wrapping_neg();
        if result >= 0 && result.unsigned_abs() == expected {
            Verdict::Good
        } else if result >= 0 {
            if self.short < SHORT_MAX {
                self.short += 1;
                return Verdict::Again;
            }
            Verdict::Failed(IoFault::Short)
        } else {
            if matches!(errno, libc::EAGAIN | libc::EINTR) && self.again < AGAIN_MAX {
                self.again += 1;
                return Verdict::Again;
            }
            Verdict::Failed(fault_of_errno(errno))
        }
    }
}

/// What a (positive) errno means. Without space, nothing is wrong with the place.
pub(crate) fn fault_of_errno(errno: i32) -> IoFault {
    match errno {
        libc::ENOSPC | libc::EDQUOT => IoFault::NoSpace,
        errno => IoFault::Errno(errno),
    }
}

/// How the kernel runs the completions of a ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TaskRun {
    /// `SINGLE_ISSUER` and `DEFER_TASKRUN`: only when the worker asks (Linux 6.1).
    Deferred,
    /// `COOP_TASKRUN`: no interrupts for it (Linux 5.19).
    Cooperative,
    /// Neither.
    Plain,
}

/// How I/O is done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EngineKind {
    /// io_uring.
    Uring(TaskRun),
    /// `preadv` and `pwritev` on this many threads.
    Blocking(u16),
    /// Memory; tests only.
    Fake,
}

/// The mode that an engine obtained.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct EngineMode {
    /// How I/O is done.
    pub kind: EngineKind,
    /// DRAM registered with the ring as fixed buffers, in bytes; zero where memlock forbids it.
    pub registered_bytes: u64,
    /// What the kernel said when it did not register them.
    pub register_errno: Option<Errno>,
    /// The file is registered with the ring as well.
    pub file_registered: bool,
}

impl EngineMode {
    /// An engine that registers nothing.
    pub(crate) const UNREGISTERED: Self = Self {
        kind: EngineKind::Fake,
        registered_bytes: 0,
        register_errno: None,
        file_registered: false,
    };

    /// One word for tools: `uring` or `blocking`.
    pub const fn label(self) -> &'static str {
        match self.kind {
            EngineKind::Uring(_) => "uring",
            EngineKind::Blocking(_) => "blocking",
            EngineKind::Fake => "fake",
        }
    }
}

impl fmt::Display for EngineMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            EngineKind::Uring(TaskRun::Deferred) => f.write_str("io_uring, deferred task run")?,
            EngineKind::Uring(TaskRun::Cooperative) => {
                f.write_str("io_uring, cooperative task run")?;
            }
            EngineKind::Uring(TaskRun::Plain) => f.write_str("io_uring, plain")?,
            EngineKind::Blocking(threads) => write!(f, "{threads} preadv/pwritev threads")?,
            EngineKind::Fake => f.write_str("memory")?,
        }
        match self.registered_bytes {
            0 => {}
            bytes => write!(f, ", {} MiB of DRAM registered", bytes >> 20)?,
        }
        f.write_str(if self.file_registered { ", file registered" } else { "" })
    }
}

/// Carries chunks to the kernel and back. Used by one thread.
///
/// Dropping an engine waits until the kernel has let go of every chunk.
pub(crate) trait Engine {
    /// How it does I/O.
    fn mode(&self) -> EngineMode;

    /// Chunks that may be in flight.
    fn depth(&self) -> usize;

    /// Chunks that were submitted and not yet given back.
    fn in_flight(&self) -> usize;

    /// Takes a chunk, or gives it back at once when [`depth`](Self::depth) are in flight. A chunk
    /// whose image part is not in the pool comes back from [`wait`](Self::wait) with `-EFAULT`.
    fn submit(&mut self, chunk: Chunk) -> Result<(), Chunk>;

    /// Hands over what was submitted and sleeps until at least one chunk is back, the worker is
    /// woken or `timeout` is over; appends what is back to `done`. Calls `ready` after arming the
    /// wake: when it says true, or a chunk is back already, there is no sleep. May return with
    /// nothing.
    fn wait(
        &mut self,
        ready: &mut dyn FnMut() -> bool,
        timeout: Option<Duration>,
        done: &mut Vec<Done>,
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_is_good_only_when_every_byte_moved() {
        let mut attempts = Attempts::default();
        assert_eq!(attempts.judge(4096, 4096), Verdict::Good);
        assert_eq!(attempts, Attempts::default());
        assert_eq!(attempts.judge(4096, 4095), Verdict::Again);
        assert_eq!(attempts.judge(4096, 0), Verdict::Failed(IoFault::Short));
        assert_eq!(Attempts::default().judge(4096, 8192), Verdict::Again, "never more than asked");
    }

    #[test]
    fn interrupted_chunks_are_sent_again_three_times_then_fail_with_the_errno() {
        let mut attempts = Attempts::default();
        for _ in 0..3 {
            assert_eq!(attempts.judge(4096, -libc::EAGAIN), Verdict::Again);
        }
        assert_eq!(
            attempts.judge(4096, -libc::EINTR),
            Verdict::Failed(IoFault::Errno(libc::EINTR))
        );
        assert_eq!(attempts.judge(4096, 4096), Verdict::Good, "late success is success");
    }

    #[test]
    fn other_errors_fail_at_once_with_a_positive_errno() {
        for errno in [libc::EIO, libc::ENXIO, libc::EOPNOTSUPP] {
            assert_eq!(
                Attempts::default().judge(4096, -errno),
                Verdict::Failed(IoFault::Errno(errno))
            );
        }
        for errno in [libc::ENOSPC, libc::EDQUOT] {
            let verdict = Attempts::default().judge(4096, -errno);
            assert_eq!(verdict, Verdict::Failed(IoFault::NoSpace));
        }
        assert!(matches!(Attempts::default().judge(4096, i32::MIN), Verdict::Failed(_)));
    }

    #[test]
    fn a_chunk_of_several_pages_splits_into_their_own_parts_at_their_own_places() {
        let mut chunk = Chunk::new(Transfer::Write, 1 << 20, Vec::new(), Vec::new());
        for page in [4, 9] {
            let extent = Extent { arena: 0, offset: u64::from(page) << 20, bytes: 8192 };
            chunk.push(page, Part::Image(extent));
            chunk.push(page, Part::Block(Box::new(Block::ZERO)));
        }
        assert_eq!((chunk.bytes(), chunk.image_bytes()), (2 * 12288, 2 * 8192));
        chunk.attempts.judge(1, 0);
        let singles: Vec<Chunk> = chunk.split().collect();
        let offsets: Vec<u64> = singles.iter().map(|single| single.offset).collect();
        assert_eq!(offsets, [1 << 20, (1 << 20) + 12288]);
        for (single, page) in singles.iter().zip([4, 9]) {
            assert_eq!(single.members, [Member { page, parts: 2 }]);
            assert_eq!((single.bytes(), single.image_bytes()), (12288, 8192));
            assert_eq!(single.attempts, Attempts::default(), "each gets its own tries");
        }
    }
}
