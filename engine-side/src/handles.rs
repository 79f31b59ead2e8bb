//! What a client hands out: small copies of numbers, each bound to where it is valid.
//!
//! A handle used with another client, or after the Manager was restarted, is refused as stale
//! before anything reaches the ring.

use orbitkv_shm_protocol::ids::{
    EngineId, Epoch, LeaseId, OperationId, PageHash, RegionId, ScopeId, SessionId,
};

/// One session in one life of the Manager: what a private handle is bound to.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Tag {
    pub(crate) session: SessionId,
    pub(crate) epoch: Epoch,
}

/// A namespace, or an ordered set of them, as one client knows it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Scope {
    pub(crate) tag: Tag,
    pub(crate) id: ScopeId,
    pub(crate) page_bytes: u64,
}

impl Scope {
    /// Bytes of one page image; for a set the sum over its members.
    pub fn page_bytes(&self) -> u64 {
        self.page_bytes
    }
}

/// Memory of the engine that the Manager can reach.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Memory {
    pub(crate) tag: Tag,
    pub(crate) id: u32,
    pub(crate) bytes: u64,
}

impl Memory {
    /// Bytes offered, from offset 0.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// Device pages of one namespace: where a save reads and a restore writes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Region {
    pub(crate) tag: Tag,
    pub(crate) id: RegionId,
    pub(crate) pages: u32,
    pub(crate) page_bytes: u64,
    pub(crate) last_layer: u32,
}

impl Region {
    /// Device pages; a [`Block::page`] is below it.
    pub fn pages(&self) -> u32 {
        self.pages
    }

    /// Bytes of one page image, as the Manager added them up.
    pub fn page_bytes(&self) -> u64 {
        self.page_bytes
    }

    /// Layers: one more than the highest that a segment names.
    pub fn layers(&self) -> u32 {
        self.last_layer.saturating_add(1)
    }
}

/// Pages that stay restorable until every rank has restored or released them, or the lease expires.
///
/// Valid for every session of the attachment group: [`to_parts`](Self::to_parts) carries it to
/// another process of the engine.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Lease {
    parts: LeaseParts,
}

/// The numbers of a [`Lease`], to be sent between the processes of one engine in any encoding.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct LeaseParts {
    /// Name of the lease in its attachment group.
    pub lease: LeaseId,
    /// Life of the Manager that granted it.
    pub epoch: Epoch,
    /// Attachment group that owns it.
    pub engine: EngineId,
    /// Pages of the leased prefix.
    pub pages: u32,
    /// CLOCK_MONOTONIC nanoseconds at which it expires; the same clock in every process of a host.
    pub expires_ns: u64,
}

impl Lease {
    /// A lease that another process of this engine was granted.
    pub fn from_parts(parts: LeaseParts) -> Self {
        Self { parts }
    }

    /// The numbers that [`from_parts`](Self::from_parts) takes.
    pub fn to_parts(&self) -> LeaseParts {
        self.parts
    }

    /// Pages of the leased prefix.
    pub fn pages(&self) -> u32 {
        self.parts.pages
    }

    /// CLOCK_MONOTONIC nanoseconds at which the lease expires.
    pub fn expires_ns(&self) -> u64 {
        self.parts.expires_ns
    }
}

/// One request that was staged, until its one terminal [`Completion`](crate::Completion).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Operation {
    pub(crate) tag: Tag,
    pub(crate) id: OperationId,
}

impl Operation {
    /// The operation as the Manager's telemetry and the inspection tool name it.
    pub fn id(&self) -> OperationId {
        self.id
    }
}

/// One page of the engine: which bytes, and where.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Block {
    /// Chained hash: equal hash means equal whole prefix.
    pub hash: PageHash,
    /// Page of the region.
    pub page: u32,
}

/// Consecutive pages of one sequence, first to last.
///
/// Any slice converts into a chain that starts at the root of its sequence.
#[derive(Debug)]
pub struct Chain<'a, P> {
    /// Hash of the page before the first; `None` when the first page starts the sequence.
    pub parent: Option<PageHash>,
    /// The pages: [`Block`]s to save, [`PageHash`]es to look up.
    pub blocks: &'a [P],
}

impl<P> Clone for Chain<'_, P> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<P> Copy for Chain<'_, P> {}

impl<'a, P> From<&'a [P]> for Chain<'a, P> {
    fn from(blocks: &'a [P]) -> Self {
        Self { parent: None, blocks }
    }
}

impl<'a, P> From<&'a Vec<P>> for Chain<'a, P> {
    fn from(blocks: &'a Vec<P>) -> Self {
        Self { parent: None, blocks }
    }
}

impl<'a, P, const N: usize> From<&'a [P; N]> for Chain<'a, P> {
    fn from(blocks: &'a [P; N]) -> Self {
        Self { parent: None, blocks }
    }
}
