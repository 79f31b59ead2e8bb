//! The two segments of a session: created and sealed by the Manager, checked and attached by the
//! engine, unmapped on drop.
//!
//! A segment has one writer. The Manager maps the submission segment read-only; the completion
//! segment is sealed with `F_SEAL_FUTURE_WRITE` after the Manager mapped it, so that nobody else
//! can ever map it writable. Both are sealed against shrinking (a peer cannot raise SIGBUS),
//! growing and further sealing, and their space is reserved before first use.

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use bytemuck::{Pod, Zeroable};
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::io::Errno;

use crate::ids::{Epoch, SessionId};
use crate::layout::{
    ABI_VERSION, COMPLETION_MAGIC, Geometry, HEADER_BYTES, HEADER_OFFSET, HEADER_STATE,
    HEADER_VERSION, LAYOUT_FINGERPRINT, SUBMISSION_MAGIC,
};
use crate::memory::{Access, ForkGuard, SharedMemory};
use crate::record::SessionState;

pub use side::{EngineSide, ManagerSide};
pub use tables::{
    DoneWords, DoneWordsReader, PageTable, PageTableWriter, ResultReader, ResultTable,
};

mod side;
mod tables;

/// First [`HEADER_BYTES`] of both segments. Written once by the Manager, apart from `state`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct SegmentHeader {
    /// [`SUBMISSION_MAGIC`] or [`COMPLETION_MAGIC`].
    pub magic: u64,
    /// [`ABI_VERSION`]; zero while the segment is being made.
    pub version: u32,
    /// [`SessionState`] as a number; only the completion segment's changes.
    pub state: u32,
    /// [`LAYOUT_FINGERPRINT`].
    pub layout_fingerprint: u64,
    /// Size of the segment, in bytes.
    pub total_bytes: u64,
    /// Epoch of the Manager that made it.
    pub epoch: u32,
    /// Session that it belongs to.
    pub session: u32,
    /// [`Geometry::ring_capacity`].
    pub ring_capacity: u32,
    /// [`Geometry::page_entries`].
    pub page_entries: u32,
    /// [`Geometry::done_words`].
    pub done_words: u32,
    /// Zero.
    pub reserved: [u32; 3],
}

const _: () = {
    assert!(size_of::<SegmentHeader>() == HEADER_BYTES);
    assert!(std::mem::offset_of!(SegmentHeader, version) == HEADER_VERSION - HEADER_OFFSET);
    assert!(std::mem::offset_of!(SegmentHeader, state) == HEADER_STATE - HEADER_OFFSET);
    assert!(std::mem::offset_of!(SegmentHeader, layout_fingerprint) == 16);
    assert!(std::mem::offset_of!(SegmentHeader, total_bytes) == 24);
    assert!(std::mem::offset_of!(SegmentHeader, epoch) == 32);
    assert!(std::mem::offset_of!(SegmentHeader, session) == 36);
    assert!(std::mem::offset_of!(SegmentHeader, ring_capacity) == 40);
    assert!(std::mem::offset_of!(SegmentHeader, page_entries) == 44);
    assert!(std::mem::offset_of!(SegmentHeader, done_words) == 48);
};

/// Which of the two segments.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum SegmentKind {
    /// Written by the engine.
    Submission,
    /// Written by the Manager.
    Completion,
}

impl SegmentKind {
    /// First eight bytes of such a segment.
    pub const fn magic(self) -> u64 {
        match self {
            Self::Submission => SUBMISSION_MAGIC,
            Self::Completion => COMPLETION_MAGIC,
        }
    }

    /// Size of such a segment, in bytes.
    pub const fn bytes(self, geometry: &Geometry) -> usize {
        match self {
            Self::Submission => geometry.submission_bytes(),
            Self::Completion => geometry.completion_bytes(),
        }
    }

    /// Seals that such a segment carries once it is made.
    pub(crate) fn seals(self) -> SealFlags {
        let both = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        match self {
            Self::Submission => both,
            Self::Completion => both | SealFlags::FUTURE_WRITE,
        }
    }
}

impl fmt::Display for SegmentKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Submission => "submission segment",
            Self::Completion => "completion segment",
        })
    }
}

/// What was being done to a segment when the system refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// `memfd_create`.
    Create,
    /// `ftruncate` or `fallocate`.
    Reserve,
    /// `mmap` or `madvise`.
    Map,
    /// `fcntl(F_ADD_SEALS)`.
    Seal,
    /// `fstat` or `pread`.
    Inspect,
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Create => "create",
            Self::Reserve => "reserve",
            Self::Map => "map",
            Self::Seal => "seal",
            Self::Inspect => "inspect",
        })
    }
}

/// Why the segments of a session could not be made.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SegmentError {
    /// A number of the geometry lies outside its documented range.
    #[error("{0:?} is out of range")]
    Geometry(Geometry),
    /// The system refused; nothing was kept.
    #[error("cannot {step} the {segment} of {bytes} bytes: {errno}")]
    System {
        /// What was attempted.
        step: Step,
        /// On which segment.
        segment: SegmentKind,
        /// Its size, in bytes.
        bytes: usize,
        /// What the system said.
        errno: Errno,
    },
}

/// Why an engine does not use a pair of segments. Nothing stays mapped.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum AttachError {
    /// A number of the geometry lies outside its documented range.
    #[error("{0:?} is out of range")]
    Geometry(Geometry),
    /// The Manager's message and the geometry disagree about the size.
    #[error("{segment} was announced with {announced} bytes, its geometry needs {needed} bytes")]
    Announced {
        /// Which segment.
        segment: SegmentKind,
        /// As announced, in bytes.
        announced: u64,
        /// As the geometry demands, in bytes.
        needed: u64,
    },
    /// The descriptor is no memfd that can carry seals.
    #[error("{segment} is no sealable memory: {errno}")]
    NotSealable {
        /// Which segment.
        segment: SegmentKind,
        /// What `F_GET_SEALS` said.
        errno: Errno,
    },
    /// A seal is missing: the peer could shrink it, or write where only it should read.
    #[error("{segment} lacks seals: has {found:#x}, needs {needed:#x}")]
    Unsealed {
        /// Which segment.
        segment: SegmentKind,
        /// Seals found (`F_SEAL_*`).
        found: u32,
        /// Seals needed (`F_SEAL_*`).
        needed: u32,
    },
    /// The descriptor has another size.
    #[error("{segment} has {found} bytes, needs {needed} bytes")]
    Size {
        /// Which segment.
        segment: SegmentKind,
        /// As found, in bytes.
        found: u64,
        /// As the geometry demands, in bytes.
        needed: u64,
    },
    /// The first bytes are not those of such a segment; perhaps the two were swapped.
    #[error("{segment} starts with {found:#018x}, not with its magic")]
    Magic {
        /// Which segment.
        segment: SegmentKind,
        /// First eight bytes.
        found: u64,
    },
    /// The segment is half made: its version was never stored.
    #[error("{segment} was never finished by its Manager")]
    Unfinished {
        /// Which segment.
        segment: SegmentKind,
    },
    /// The Manager speaks another version.
    #[error("{segment} has ABI version {theirs}, this client has {ours}: use matching releases")]
    Version {
        /// Which segment.
        segment: SegmentKind,
        /// [`ABI_VERSION`] of this build.
        ours: u32,
        /// As found.
        theirs: u32,
    },
    /// Same version, other layout: one of the two builds is modified.
    #[error(
        "{segment} has layout {theirs:#018x}, this client has {ours:#018x}: use matching builds"
    )]
    Fingerprint {
        /// Which segment.
        segment: SegmentKind,
        /// [`LAYOUT_FINGERPRINT`] of this build.
        ours: u64,
        /// As found.
        theirs: u64,
    },
    /// A number of the header is not the one that was agreed over the socket.
    #[error("{segment} says {field} {found}, agreed was {expected}")]
    Header {
        /// Which segment.
        segment: SegmentKind,
        /// Name of the field.
        field: &'static str,
        /// As found.
        found: u64,
        /// As agreed.
        expected: u64,
    },
    /// The system refused.
    #[error("cannot {step} the {segment}: {errno}")]
    System {
        /// What was attempted.
        step: Step,
        /// On which segment.
        segment: SegmentKind,
        /// What the system said.
        errno: Errno,
    },
}

/// What travels to the engine: one descriptor a segment.
#[derive(Debug)]
pub struct SegmentDescriptors {
    /// Mapped writable by the engine.
    pub submission: OwnedFd,
    /// Can only be mapped read-only.
    pub completion: OwnedFd,
}

/// What was agreed over the bootstrap socket, to be compared with what the segments say.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Expected {
    /// As asked for and granted.
    pub geometry: Geometry,
    /// As assigned.
    pub session: SessionId,
    /// As announced.
    pub epoch: Epoch,
    /// Size of the submission segment as announced, in bytes.
    pub submission_bytes: u64,
    /// Size of the completion segment as announced, in bytes.
    pub completion_bytes: u64,
}

impl Expected {
    /// What a Manager of this build announces for `geometry`.
    pub fn new(geometry: Geometry, session: SessionId, epoch: Epoch) -> Self {
        Self {
            geometry,
            session,
            epoch,
            submission_bytes: geometry.submission_bytes() as u64,
            completion_bytes: geometry.completion_bytes() as u64,
        }
    }
}

/// Makes, maps, fills and seals the two segments of a session.
///
/// # Errors
/// The geometry is out of range, or the system has no descriptor, memory or address space left.
pub fn create(
    geometry: Geometry,
    session: SessionId,
    epoch: Epoch,
) -> Result<(ManagerSide, SegmentDescriptors), SegmentError> {
    if !geometry.is_valid() {
        return Err(SegmentError::Geometry(geometry));
    }
    let fork = ForkGuard::new().map_err(|errno| SegmentError::System {
        step: Step::Map,
        segment: SegmentKind::Submission,
        bytes: 0,
        errno,
    })?;
    let (submission, submission_fd) =
        create_one(SegmentKind::Submission, &geometry, session, epoch, &fork)?;
    let (completion, completion_fd) =
        create_one(SegmentKind::Completion, &geometry, session, epoch, &fork)?;
    let mut side = ManagerSide::over(&submission, &completion, geometry, session, epoch);
    let kept = rustix::io::fcntl_dupfd_cloexec(&submission_fd, 0);
    side.keep(kept.map_err(|errno| SegmentError::System {
        step: Step::Create,
        segment: SegmentKind::Submission,
        bytes: 0,
        errno,
    })?);
    Ok((side, SegmentDescriptors { submission: submission_fd, completion: completion_fd }))
}

fn create_one(
    segment: SegmentKind,
    geometry: &Geometry,
    session: SessionId,
    epoch: Epoch,
    fork: &ForkGuard,
) -> Result<(SharedMemory, OwnedFd), SegmentError> {
    let bytes = segment.bytes(geometry);
    let refused = |step| move |errno| SegmentError::System { step, segment, bytes, errno };
    let descriptor = sealable_memfd(segment, session).map_err(refused(Step::Create))?;
    rustix::fs::ftruncate(&descriptor, bytes as u64).map_err(refused(Step::Reserve))?;
    // ENOSPC or ENOMEM here and now, instead of SIGBUS at some later touch.
    rustix::fs::fallocate(&descriptor, FallocateFlags::empty(), 0, bytes as u64)
        .map_err(refused(Step::Reserve))?;
    let memory = SharedMemory::map(descriptor.as_fd(), bytes, Access::ReadWrite, fork)
        .map_err(refused(Step::Map))?;
    write_header(&memory, segment, geometry, session, epoch);
    // The writable mapping comes first: FUTURE_WRITE forbids all later ones, our own too.
    rustix::fs::fcntl_add_seals(&descriptor, segment.seals()).map_err(refused(Step::Seal))?;
    let memory = match segment {
        SegmentKind::Completion => memory,
        // The engine's words are not ours to write: from here on not even by accident.
        SegmentKind::Submission => SharedMemory::map(descriptor.as_fd(), bytes, Access::Read, fork)
            .map_err(refused(Step::Map))?,
    };
    Ok((memory, descriptor))
}

fn sealable_memfd(segment: SegmentKind, session: SessionId) -> Result<OwnedFd, Errno> {
    let name = match segment {
        SegmentKind::Submission => submission_name(session),
        SegmentKind::Completion => "orbitkv-completion".to_owned(),
    };
    let name = name.as_str();
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    match rustix::fs::memfd_create(name, flags | MemfdFlags::NOEXEC_SEAL) {
        // Before 6.3 the flag is unknown; sealing is not negotiable.
        Err(Errno::INVAL) => rustix::fs::memfd_create(name, flags),
        other => other,
    }
}

/// Name under which /proc shows a submission segment. Given by the Manager and never changed.
pub(crate) fn submission_name(session: SessionId) -> String {
    format!("orbitkv-submission-{}", session.0)
}

fn write_header(
    memory: &SharedMemory,
    segment: SegmentKind,
    geometry: &Geometry,
    session: SessionId,
    epoch: Epoch,
) {
    memory.write(
        HEADER_OFFSET,
        SegmentHeader {
            magic: segment.magic(),
            version: 0,
            state: SessionState::Open as u32,
            layout_fingerprint: LAYOUT_FINGERPRINT,
            total_bytes: segment.bytes(geometry) as u64,
            epoch: epoch.0,
            session: session.0,
            ring_capacity: geometry.ring_capacity,
            page_entries: geometry.page_entries,
            done_words: geometry.done_words,
            reserved: [0; 3],
        },
    );
    // `header-version`: the receiver has the whole header if it has the version.
    memory.word_writer::<u32>(HEADER_VERSION).store_release(ABI_VERSION);
}

/// Checks and maps the two segments that came over the bootstrap socket. The descriptors are
/// closed in any case; mappings do not need them.
///
/// # Errors
/// The first thing that is not as agreed; nothing stays mapped.
pub fn attach(
    submission: OwnedFd,
    completion: OwnedFd,
    expected: Expected,
) -> Result<EngineSide, AttachError> {
    let geometry = expected.geometry;
    if !geometry.is_valid() {
        return Err(AttachError::Geometry(geometry));
    }
    inspect(SegmentKind::Submission, submission.as_fd(), &expected)?;
    inspect(SegmentKind::Completion, completion.as_fd(), &expected)?;
    let refused = |segment| move |errno| AttachError::System { step: Step::Map, segment, errno };
    let fork = ForkGuard::new().map_err(refused(SegmentKind::Submission))?;
    let submission = SharedMemory::map(
        submission.as_fd(),
        geometry.submission_bytes(),
        Access::ReadWrite,
        &fork,
    )
    .map_err(refused(SegmentKind::Submission))?;
    let completion =
        SharedMemory::map(completion.as_fd(), geometry.completion_bytes(), Access::Read, &fork)
            .map_err(refused(SegmentKind::Completion))?;
    Ok(EngineSide::over(&submission, &completion, geometry, expected.session, expected.epoch))
}

/// Everything that must hold before a segment is mapped, in the order in which it can be trusted.
fn inspect(
    segment: SegmentKind,
    descriptor: BorrowedFd<'_>,
    expected: &Expected,
) -> Result<(), AttachError> {
    let needed = segment.bytes(&expected.geometry) as u64;
    let announced = match segment {
        SegmentKind::Submission => expected.submission_bytes,
        SegmentKind::Completion => expected.completion_bytes,
    };
    if announced != needed {
        return Err(AttachError::Announced { segment, announced, needed });
    }
    let seals = rustix::fs::fcntl_get_seals(descriptor)
        .map_err(|errno| AttachError::NotSealable { segment, errno })?;
    if !seals.contains(segment.seals()) {
        let (found, needed) = (seals.bits(), segment.seals().bits());
        return Err(AttachError::Unsealed { segment, found, needed });
    }
    let refused = |errno| AttachError::System { step: Step::Inspect, segment, errno };
    let stat = rustix::fs::fstat(descriptor).map_err(refused)?;
    let found = stat.st_size as u64;
    if found != needed {
        return Err(AttachError::Size { segment, found, needed });
    }
    let mut header = SegmentHeader::zeroed();
    // `header-version`, through the kernel: the descriptor came after the store.
    let read = rustix::io::retry_on_intr(|| {
        rustix::io::pread(descriptor, bytemuck::bytes_of_mut(&mut header), HEADER_OFFSET as u64)
    })
    .map_err(refused)?;
    if read != HEADER_BYTES {
        return Err(refused(Errno::IO));
    }
    check_header(segment, &header, expected)
}

fn check_header(
    segment: SegmentKind,
    header: &SegmentHeader,
    expected: &Expected,
) -> Result<(), AttachError> {
    if header.magic != segment.magic() {
        return Err(AttachError::Magic { segment, found: header.magic });
    }
    if header.version == 0 {
        return Err(AttachError::Unfinished { segment });
    }
    if header.version != ABI_VERSION {
        let (ours, theirs) = (ABI_VERSION, header.version);
        return Err(AttachError::Version { segment, ours, theirs });
    }
    if header.layout_fingerprint != LAYOUT_FINGERPRINT {
        let (ours, theirs) = (LAYOUT_FINGERPRINT, header.layout_fingerprint);
        return Err(AttachError::Fingerprint { segment, ours, theirs });
    }
    let geometry = &expected.geometry;
    for (field, found, expected) in [
        ("total_bytes", header.total_bytes, segment.bytes(geometry) as u64),
        ("epoch", header.epoch.into(), expected.epoch.0.into()),
        ("session", header.session.into(), expected.session.0.into()),
        ("ring_capacity", header.ring_capacity.into(), geometry.ring_capacity.into()),
        ("page_entries", header.page_entries.into(), geometry.page_entries.into()),
        ("done_words", header.done_words.into(), geometry.done_words.into()),
    ] {
        if found != expected {
            return Err(AttachError::Header { segment, field, found, expected });
        }
    }
    Ok(())
}

/// Both sides over heap memory of one process: the same rings, tables and doorbells without
/// descriptors, for tests and simulations.
///
/// # Panics
/// When the geometry is out of range.
pub fn heap_pair(
    geometry: Geometry,
    session: SessionId,
    epoch: Epoch,
) -> (ManagerSide, EngineSide) {
    assert!(geometry.is_valid(), "{geometry:?} is out of range");
    let submission = SharedMemory::heap(geometry.submission_bytes());
    let completion = SharedMemory::heap(geometry.completion_bytes());
    write_header(&submission, SegmentKind::Submission, &geometry, session, epoch);
    write_header(&completion, SegmentKind::Completion, &geometry, session, epoch);
    (
        ManagerSide::over(&submission.read_only(), &completion, geometry, session, epoch),
        EngineSide::over(&submission, &completion.read_only(), geometry, session, epoch),
    )
}
