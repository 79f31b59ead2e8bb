//! What a replayed engine needs of a Manager: the ring client, reduced to five calls.
//!
//! The real one is [`super::attach`]; tests use a cache in memory.

use std::hash::Hash;
use std::time::Duration;

use orbitkv_shm_protocol::ids::PageHash;
use orbitkv_shm_protocol::record::{Code, PageOutcome, RequestKind, Tier};

/// One page to copy: which, and where it is or goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Block {
    /// Hash of the page.
    pub(super) hash: PageHash,
    /// Page of the device region.
    pub(super) page: u32,
}

/// Why nothing was staged.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub(super) enum LinkError {
    /// Ring or page table are full until an operation ends.
    #[error("ring or page table are full")]
    Full,
    /// The session is over.
    #[error("the session with the Manager has ended")]
    Gone,
    /// The client refuses the call itself; repeating it cannot help.
    #[error("the ring client refuses the request: {0}")]
    Refused(&'static str),
}

/// What happened to one page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct PageEnd {
    /// What happened.
    pub(super) outcome: PageOutcome,
    /// Where it was found.
    pub(super) tier: Tier,
    /// Why it was refused.
    pub(super) code: Code,
}

/// How an operation ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Ended<O, L> {
    /// Which.
    pub(super) operation: O,
    /// Of which kind.
    pub(super) kind: RequestKind,
    /// Cause when it was not done in full.
    pub(super) code: Code,
    /// Query: pages of the leased prefix.
    pub(super) pages: u32,
    /// Query: hit pages that came from SSD.
    pub(super) pages_ssd: u32,
    /// Query: what was leased.
    pub(super) lease: Option<L>,
    /// Nanoseconds of CLOCK_MONOTONIC; zero where unknown.
    pub(super) times: Times,
}

/// How an operation of one kind of session ended.
pub(super) type EndedOf<L> = Ended<<L as Link>::Operation, <L as Link>::Lease>;

/// Stages of an operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Times {
    /// Taken from the ring.
    pub(super) queued_ns: u64,
    /// Pages resident and leased, or memory there.
    pub(super) prepared_ns: u64,
    /// Completion published.
    pub(super) published_ns: u64,
    /// Completion seen by the engine.
    pub(super) observed_ns: u64,
}

/// A session with a Manager: one namespace, one region, requests staged and then submitted at once.
pub(super) trait Link {
    /// Names an operation until its end was seen.
    type Operation: Copy + Eq + Hash;
    /// Pins the pages of a hit.
    type Lease: Copy;

    /// Longest prefix of `hashes`, which follow `parent`.
    fn query(
        &mut self,
        parent: Option<PageHash>,
        hashes: &[PageHash],
    ) -> Result<Self::Operation, LinkError>;

    /// Copies pages of a lease, from its page `offset` on, into the region.
    fn restore(
        &mut self,
        lease: Self::Lease,
        offset: u32,
        blocks: &[Block],
    ) -> Result<Self::Operation, LinkError>;

    /// Saves pages of the region, which follow `parent`.
    fn save(
        &mut self,
        parent: Option<PageHash>,
        blocks: &[Block],
    ) -> Result<Self::Operation, LinkError>;

    /// Ends what is left of a lease.
    fn release(&mut self, lease: Self::Lease) -> Result<Self::Operation, LinkError>;

    /// Publishes what was staged.
    fn submit(&mut self);

    /// The next completion, waiting at most `timeout`; `ends` then holds what happened to each of
    /// its pages.
    fn wait(
        &mut self,
        timeout: Duration,
        ends: &mut Vec<PageEnd>,
    ) -> Result<Option<EndedOf<Self>>, LinkError>;
}
