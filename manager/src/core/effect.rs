//! What `core` decides: commands for the device and the SSD tier, and completions for engines.
//!
//! Variable-length parts live in the side tables of [`Effects`], so that a turn of the loop
//! allocates nothing once its buffers have grown.

use std::ops::Range;

use orbitkv_shm_protocol::ids::{OperationId, PageHash, RegionId, SessionId};
use orbitkv_shm_protocol::record::{Completion, PageResult};

use super::event::{Nanos, Ticket};

/// A run of bytes in the DRAM pool: 4 KiB aligned, owned by exactly one page or operation.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Extent {
    /// Arena number.
    pub arena: u16,
    /// Bytes from the start of the arena.
    pub offset: u64,
    /// Length in bytes, a multiple of 4 KiB; the image may be shorter.
    pub bytes: u32,
}

/// A place on SSD for one page image and its footer.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Slot {
    /// Device (file) number, in configuration order.
    pub device: u16,
    /// Byte offset of the image in the file.
    pub offset: u64,
    /// Length in bytes, footer included, a multiple of 4 KiB. The footer is the last 4 KiB.
    pub bytes: u32,
}

/// Which way a copy goes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Direction {
    /// Device → DRAM.
    Save,
    /// DRAM → device.
    Restore,
}

/// One page of a copy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CopyPage {
    /// Page of the region.
    pub device_page: u32,
    /// Its image in DRAM.
    pub extent: Extent,
}

/// Identity of a page image on SSD, as its footer records it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ImageIdentity {
    /// SHA-256 of the namespace's fields.
    pub namespace: [u8; 32],
    /// Hash of the page.
    pub hash: PageHash,
    /// Hash of its parent; `None` for the first page of a chain and where the namespace has no
    /// chains.
    pub parent: Option<PageHash>,
    /// Bytes of the image.
    pub image_bytes: u32,
    /// Orders slots that hold the same page: the highest wins. Below [`GENERATIONS_END`].
    pub generation: u64,
    /// xxh3-64 of the image. `None` when the device that filled it did not sum: then whoever writes
    /// the footer does.
    pub checksum: Option<u64>,
}

/// No slot with this generation or a higher one is ever found again. No drive lives to see it, but
/// what claims to be from there must not make the counter overflow.
pub const GENERATIONS_END: u64 = 1 << 62;

/// One decision.
#[derive(Clone, Debug)]
pub enum Effect {
    /// Publish a completion: first the results into the session's result table from entry
    /// `results_start`, then (where the device has not) the done word, then the record.
    Complete {
        /// To whom.
        session: SessionId,
        /// The record, without its `published_ns`.
        completion: Completion,
        /// Range of [`Effects::results`].
        results: Range<usize>,
        /// First entry of the result table.
        results_start: u32,
    },
    /// Store the odd done word of a restore whose client hears no more: it did not bring every
    /// page, and nothing of it runs any more.
    RestoreFailed {
        /// Whose; it is closed.
        session: SessionId,
        /// Which.
        operation: OperationId,
    },
    /// Copy pages between a region and DRAM. Ends with [`super::Event::Copied`].
    Copy {
        /// Names the work.
        ticket: Ticket,
        /// Which way.
        direction: Direction,
        /// Whose region.
        session: SessionId,
        /// Which region.
        region: RegionId,
        /// Range of [`Effects::copies`].
        pages: Range<usize>,
        /// What to wait for first.
        fence: Option<FenceWait>,
        /// Store this operation's done word after the last byte of this command.
        done: Option<OperationId>,
        /// Copy layer by layer, and store one done word a layer.
        by_layer: bool,
    },
    /// The operation whose copy waits for a fence has been stopped: the copy is to end without it.
    GiveUpFence {
        /// Whose.
        session: SessionId,
        /// Index of the event in the session's pool.
        index: u32,
    },
    /// Read a page image into DRAM and verify it. Ends with [`super::Event::ReadEnded`].
    Read {
        /// Names the work.
        ticket: Ticket,
        /// From where.
        slot: Slot,
        /// To where.
        extent: Extent,
        /// What must be there.
        image_bytes: u32,
        /// xxh3-64 that the image must have.
        checksum: u64,
    },
    /// Write a page image and its footer. Ends with [`super::Event::WriteEnded`].
    Write {
        /// Names the work.
        ticket: Ticket,
        /// From where.
        extent: Extent,
        /// To where.
        slot: Slot,
        /// What the footer says.
        image: ImageIdentity,
    },
    /// A region of a device gets its slot size: on SSD before any later write into it.
    RecordRegion {
        /// Device number.
        device: u16,
        /// Region number.
        region: u32,
        /// Slot length in bytes.
        slot_bytes: u32,
    },
    /// A slot is never used again: on SSD at the next superblock write.
    RetireSlot {
        /// The slot.
        slot: Slot,
    },
    /// Pages of a namespace with a generation below `generation` are forgotten: synced on every
    /// device before [`super::Event::ForgetRecorded`].
    RecordForget {
        /// Names the work.
        ticket: Ticket,
        /// SHA-256 of the namespace's fields.
        namespace: [u8; 32],
        /// First generation that is not forgotten.
        generation: u64,
    },
    /// The region is used by no copy any more and may be unmapped.
    RegionEnded {
        /// Whose.
        session: SessionId,
        /// Which.
        region: RegionId,
    },
    /// The peer broke the protocol: take nothing more from it, close its socket. `core` has
    /// already begun to end what it owned; `SessionEnded` follows.
    CloseSession {
        /// Whom.
        session: SessionId,
        /// What the peer did.
        fault: PeerFault,
    },
    /// Nothing of the session is in flight any more: unmap its segments and regions.
    SessionEnded {
        /// Which.
        session: SessionId,
    },
    /// A page left the last tier that held it. Only when `report_drops` is set in the configuration
    /// (the `simulate` driver uses it).
    Dropped {
        /// Hash of the page.
        hash: PageHash,
    },
}

/// An event that a copy waits for before it touches a byte.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FenceWait {
    /// Its index in the session's pool.
    pub index: u32,
    /// When it is not waited for any more: the copy ends with
    /// [`CopyFault::FenceTimeout`](super::CopyFault::FenceTimeout).
    pub until: Nanos,
}

/// What a peer did that no correct client does.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, thiserror::Error)]
pub enum PeerFault {
    /// More operations outstanding than its ring holds.
    #[error("submitted operation {operation} with no credit left")]
    NoCredit {
        /// The operation.
        operation: OperationId,
    },
    /// Sixteen requests with a bad field.
    #[error("sent {count} malformed requests")]
    TooManyBadRequests {
        /// How many.
        count: u32,
    },
}

/// The decisions of one turn, in order.
#[derive(Default, Debug)]
pub struct Effects {
    /// The decisions.
    pub list: Vec<Effect>,
    /// Side table of [`Effect::Complete`].
    pub results: Vec<PageResult>,
    /// Side table of [`Effect::Copy`].
    pub copies: Vec<CopyPage>,
}

impl Effects {
    /// Forgets everything, keeping the buffers.
    pub fn clear(&mut self) {
        self.list.clear();
        self.results.clear();
        self.copies.clear();
    }
}
