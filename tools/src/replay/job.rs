//! One request while an engine works on it.

use std::collections::VecDeque;

use orbitkv_shm_protocol::ids::PageHash;
use orbitkv_shm_protocol::layout::PAGES_PER_REQUEST_MAX;
use orbitkv_shm_protocol::record::Tier;

use super::link::{Block, Link};
use super::tally::Tally;

/// Most pages of one operation: a request's entries less one for the anchor.
pub(super) const PART_PAGES_MAX: usize = PAGES_PER_REQUEST_MAX as usize - 1;

/// What the job does next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Step {
    /// Look up the pages from `next` on.
    Query,
    /// Restore the next leased pages.
    Restore,
    /// Give back the rest of a lease that a failed restore left.
    Release,
    /// Compute and save the pages from `next` on.
    Save,
    /// Nothing: everything is done.
    Finish,
}

/// A request, its pages in prompt order and how far it is. Pages before `next` are dealt with.
#[derive(Debug)]
pub(super) struct Job<L: Link> {
    /// Number in the trace.
    pub(super) index: u64,
    /// All full pages of the prompt.
    pub(super) hashes: Vec<PageHash>,
    /// First page that is not dealt with.
    pub(super) next: usize,
    /// What comes next.
    pub(super) step: Step,
    /// The lease on the pages from `next` on.
    pub(super) lease: Option<L::Lease>,
    /// Pages of the lease that were restored.
    pub(super) lease_offset: u32,
    /// Where each leased page that is not restored yet was found.
    pub(super) tiers: VecDeque<Tier>,
    /// Whether the query named the last page of the prompt.
    pub(super) queried_to_end: bool,
    /// Pages of the operation in flight, or ready for it.
    pub(super) blocks: Vec<Block>,
    /// When the operation in flight was staged.
    pub(super) staged_ns: u64,
    /// What it did so far; counts only once it is finished.
    pub(super) tally: Tally,
}

impl<L: Link> Job<L> {
    /// A request at its start.
    pub(super) fn new(index: u64, hashes: Vec<PageHash>) -> Self {
        let step = if hashes.is_empty() { Step::Finish } else { Step::Query };
        Self {
            index,
            hashes,
            next: 0,
            step,
            lease: None,
            lease_offset: 0,
            tiers: VecDeque::new(),
            queried_to_end: false,
            blocks: Vec::new(),
            staged_ns: 0,
            tally: Tally::default(),
        }
    }

    /// The request at its start again.
    pub(super) fn restarted(self) -> Self {
        Self::new(self.index, self.hashes)
    }

    /// The page before `next`.
    pub(super) fn parent(&self) -> Option<PageHash> {
        self.next.checked_sub(1).map(|index| self.hashes[index])
    }

    /// The pages that the next query names.
    pub(super) fn query_part(&self) -> &[PageHash] {
        let rest = &self.hashes[self.next..];
        &rest[..rest.len().min(PART_PAGES_MAX)]
    }

    /// Pages that the next restore or save would like to name.
    pub(super) fn wanted(&self) -> usize {
        let left = match self.step {
            Step::Restore => self.tiers.len(),
            _ => self.hashes.len() - self.next,
        };
        left.min(PART_PAGES_MAX)
    }

    /// What follows when no leased page is left.
    pub(super) fn after_lease(&self) -> Step {
        if self.next == self.hashes.len() {
            Step::Finish
        } else if self.queried_to_end {
            Step::Save
        } else {
            Step::Query
        }
    }
}
