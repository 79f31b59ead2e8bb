//! The exclusive second tier of `--replacement lru`: an LRU that takes what DRAM drops.

use std::collections::{BTreeMap, HashMap};

use orbitkv_shm_protocol::ids::PageHash;

/// Pages by the time they came, oldest first.
#[derive(Debug, Default)]
pub(super) struct SecondTier {
    capacity: usize,
    order: BTreeMap<u64, PageHash>,
    time_of: HashMap<PageHash, u64>,
    clock: u64,
    pub(super) demoted: u64,
    pub(super) promoted: u64,
    pub(super) dropped: u64,
}

impl SecondTier {
    /// An empty tier of `capacity` pages.
    pub(super) fn new(capacity: u64) -> Self {
        Self { capacity: usize::try_from(capacity).unwrap_or(usize::MAX), ..Self::default() }
    }

    /// Whether the page is here.
    pub(super) fn contains(&self, page: &PageHash) -> bool {
        self.time_of.contains_key(page)
    }

    /// Takes a page out because it is in DRAM again.
    pub(super) fn promote(&mut self, page: &PageHash) {
        if let Some(time) = self.time_of.remove(page) {
            self.order.remove(&time);
            self.promoted += 1;
        }
    }

    /// Takes the victims of one request, oldest first, then drops what does not fit.
    pub(super) fn demote(&mut self, victims: &[PageHash]) {
        for victim in victims {
            self.demoted += 1;
            self.clock += 1;
            if let Some(time) = self.time_of.insert(*victim, self.clock) {
                self.order.remove(&time);
            }
            self.order.insert(self.clock, *victim);
        }
        while self.order.len() > self.capacity {
            if let Some((_, page)) = self.order.pop_first() {
                self.time_of.remove(&page);
                self.dropped += 1;
            }
        }
    }
}
