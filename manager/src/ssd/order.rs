//! What the tier is told to do and how it reports the end.

use crate::core::{Extent, ImageIdentity, IoFault, Slot, Ticket};

/// Read the image of a slot into DRAM and check it. Ends with [`SsdEnd::Read`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReadOrder {
    /// Names the work.
    pub ticket: Ticket,
    /// From where.
    pub slot: Slot,
    /// To where: the ring's until the end is reported. At least the padded image long.
    pub extent: Extent,
    /// Bytes of the image.
    pub image_bytes: u32,
    /// xxh3-64 that it must have.
    pub checksum: u64,
}

/// Ticket of work that nobody ordered: whether a device that failed can be read or written again.
const PROBE: Ticket = Ticket(u64::MAX);

impl ReadOrder {
    /// Reads one block at `offset` and throws it away.
    pub(crate) fn probe(offset: u64) -> Self {
        Self {
            ticket: PROBE,
            slot: Slot { device: 0, offset, bytes: 0 },
            extent: Extent { arena: 0, offset: 0, bytes: 0 },
            image_bytes: 0,
            checksum: 0,
        }
    }

    pub(crate) fn is_probe(&self) -> bool {
        self.ticket == PROBE
    }
}

impl SsdEnd {
    /// Of a [`WriterCommand::Probe`].
    pub(crate) const fn of_write_probe(fault: Option<IoFault>) -> Self {
        Self::Write { ticket: PROBE, fault, checksum: None }
    }

    /// The end of a probe is told to nobody.
    pub(crate) fn is_probe(&self) -> bool {
        let (Self::Read { ticket, .. } | Self::Write { ticket, .. } | Self::Forget { ticket, .. }) =
            self;
        *ticket == PROBE
    }
}

/// Write an image and its footer. Ends with [`SsdEnd::Write`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct WriteOrder {
    /// Names the work.
    pub ticket: Ticket,
    /// From where: not to be changed until the end is reported.
    pub extent: Extent,
    /// To where, in a region whose slot length was recorded before.
    pub slot: Slot,
    /// What the footer says; its checksum is computed where there is none.
    pub image: ImageIdentity,
}

/// The end of one order. The kernel no longer touches its memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SsdEnd {
    /// Of a [`ReadOrder`].
    Read {
        /// Its ticket.
        ticket: Ticket,
        /// `None` when every byte is in place and the checksum matched.
        fault: Option<IoFault>,
    },
    /// Of a [`WriteOrder`].
    Write {
        /// Its ticket.
        ticket: Ticket,
        /// `None` when image and footer were accepted in full.
        fault: Option<IoFault>,
        /// What the footer says of the image; `None` when it ended before that was known.
        checksum: Option<u64>,
    },
    /// Of [`SsdTier::record_forget`](super::SsdTier::record_forget).
    Forget {
        /// Its ticket.
        ticket: Ticket,
        /// `None` when every device has recorded and synced it.
        fault: Option<IoFault>,
    },
}

/// What the write worker is told, in order: a region is recorded before a later write into it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum WriterCommand {
    Write(WriteOrder),
    /// Write the superblock, to see whether anything can be written. Ends as a write does.
    Probe,
    Region {
        region: u32,
        slot_bytes: u32,
    },
    Retire {
        offset: u64,
    },
    Forget {
        ticket: Ticket,
        namespace: [u8; 32],
        generation: u64,
    },
    /// Generations go on above this: synced before any later write.
    Generation {
        base: u64,
    },
    /// No slot is left that this forgets: its record goes, with the next superblock.
    Unforget {
        namespace: [u8; 32],
        generation: u64,
    },
}
