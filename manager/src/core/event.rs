//! What `core` is told: requests of engines and the ends of the work it ordered.

use orbitkv_shm_protocol::ids::{EngineId, OperationId, SessionId};
use orbitkv_shm_protocol::record::{PageEntry, Request};

/// Nanoseconds of CLOCK_MONOTONIC. `core` has no clock of its own.
pub type Nanos = u64;

/// Names one piece of work that `core` ordered, until its end is reported. Never reused.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Ticket(pub u64);

/// One thing that happened.
#[derive(Clone, Copy, Debug)]
pub enum Event<'a> {
    /// A client attached. Its id was never used before in this epoch.
    SessionOpened {
        /// The new session.
        session: SessionId,
        /// Its attachment group.
        engine: EngineId,
        /// User id of its process, as the kernel says it.
        uid: u32,
        /// Operations it may have outstanding (its ring capacity).
        credits: u32,
        /// Entries of its page table.
        page_entries: u32,
    },
    /// The client is gone, or misbehaved: nothing more is taken from it. `core` ends its
    /// operations and leases and answers with [`super::Effect::SessionEnded`] when the last copy
    /// has ended.
    SessionClosed {
        /// The session.
        session: SessionId,
    },
    /// A request was taken from a ring.
    Requested {
        /// Who asks.
        session: SessionId,
        /// What, already decoded; every number in it is still the client's word.
        request: Request,
        /// Private copy of the page table range; its length is `request.range.len` unless the
        /// range does not fit the table or is too long, in which case it is empty.
        pages: &'a [PageEntry],
    },
    /// A request whose fields no kind of request allows: answered with `bad_request`, counted
    /// against the session.
    Malformed {
        /// Who sent it.
        session: SessionId,
        /// The operation that it named.
        operation: OperationId,
    },
    /// A copy ended. The device no longer touches its pages or its DRAM.
    Copied {
        /// Of the [`super::Effect::Copy`].
        ticket: Ticket,
        /// Pages, counted from the first of the command, whose bytes are all in place.
        pages_done: u32,
        /// Why it stopped before the last page.
        fault: Option<CopyFault>,
        /// When the device saw its end: not later than it is told.
        ended_ns: Nanos,
        /// Save only: checksum of each image, in the order of the command; `pages_done` of them, or
        /// none of a device that does not sum.
        checksums: &'a [u64],
    },
    /// An SSD read ended. The ring no longer owns the DRAM.
    ReadEnded {
        /// Of the [`super::Effect::Read`].
        ticket: Ticket,
        /// `None` when every byte is in place and its checksum matched.
        fault: Option<IoFault>,
    },
    /// An SSD write ended. The ring no longer owns the DRAM.
    WriteEnded {
        /// Of the [`super::Effect::Write`].
        ticket: Ticket,
        /// `None` when image and footer were both accepted in full.
        fault: Option<IoFault>,
        /// What the footer says of the image; `None` when it ended before that was known.
        checksum: Option<u64>,
    },
    /// A forgotten namespace is recorded and synced on every device.
    ForgetRecorded {
        /// Of the [`super::Effect::RecordForget`].
        ticket: Ticket,
        /// Why it could not be made durable.
        fault: Option<IoFault>,
    },
    /// Time passed: deadlines and leases are looked at.
    Tick,
}

/// Why a copy stopped.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum CopyFault {
    /// The engine's memory is gone, shorter than registered, or no longer the engine's.
    Peer,
    /// The device or driver failed.
    Device,
    /// The fence is missing, unknown or invalid.
    Fence,
    /// The fence did not pass before the operation's deadline.
    FenceTimeout,
}

/// Why an SSD operation failed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum IoFault {
    /// The kernel answered with this errno (positive).
    Errno(i32),
    /// Fewer bytes than asked for, also on the second try.
    Short,
    /// The image does not match the checksum of its footer.
    Checksum,
    /// The file system had no space for it: the slot is as good as before.
    NoSpace,
    /// The kernel answered with this errno (positive) when the superblock was written, without which
    /// no page may be: the slot is as good as before.
    Superblock(i32),
    /// The tier does not take this kind of work any more (breaker, shutdown).
    Off,
}

impl IoFault {
    /// Every label, in the order of [`index`](Self::index).
    pub const LABELS: [&'static str; 5] = ["errno", "short", "checksum", "off", "no_space"];

    /// Position in [`LABELS`](Self::LABELS).
    pub const fn index(self) -> usize {
        match self {
            Self::Errno(_) | Self::Superblock(_) => 0,
            Self::Short => 1,
            Self::Checksum => 2,
            Self::Off => 3,
            Self::NoSpace => 4,
        }
    }
}
