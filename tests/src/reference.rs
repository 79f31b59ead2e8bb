//! An independent model of the pool: pages of one size, one engine, one operation at a time, no
//! SSD. Written for clarity, not speed: a vector from coldest to hottest and a map of parents.

use std::collections::HashMap;

use orbitkv_shm_protocol::ids::PageHash;

/// What became of the pages of a save.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Saved {
    /// New pages.
    pub stored: u32,
    /// Pages that were there.
    pub present: u32,
    /// Pages without memory, and those behind them.
    pub refused: u32,
}

/// The pool.
#[derive(Clone, Debug, Default)]
pub struct Reference {
    capacity: usize,
    /// Coldest first.
    order: Vec<PageHash>,
    parents: HashMap<PageHash, Option<PageHash>>,
    dropped: Vec<PageHash>,
}

impl Reference {
    /// Room for `capacity` pages.
    pub fn new(capacity: usize) -> Self {
        Self { capacity, ..Self::default() }
    }

    /// Every page, coldest first.
    pub fn order(&self) -> &[PageHash] {
        &self.order
    }

    /// Pages that were evicted since the last call, in order.
    pub fn take_dropped(&mut self) -> Vec<PageHash> {
        std::mem::take(&mut self.dropped)
    }

    fn touch(&mut self, hash: PageHash) {
        let at = self.order.iter().position(|&other| other == hash).expect("a page of the pool");
        self.order.remove(at);
        self.order.push(hash);
    }

    /// Length of the prefix that is there.
    pub fn hits(&self, chain: &[PageHash]) -> usize {
        chain.iter().take_while(|hash| self.parents.contains_key(hash)).count()
    }

    /// A query whose hit is used and let go of.
    pub fn query(&mut self, chain: &[PageHash]) -> usize {
        let hits = self.hits(chain);
        for &hash in chain[..hits].iter().rev() {
            self.touch(hash);
        }
        hits
    }

    fn evict_one_for(&mut self, chain: &[PageHash]) -> bool {
        let is_parent = |hash: &PageHash| self.parents.values().any(|of| *of == Some(*hash));
        let victim = self.order.iter().find(|hash| !chain.contains(hash) && !is_parent(hash));
        let Some(&victim) = victim else { return false };
        self.order.retain(|&hash| hash != victim);
        self.parents.remove(&victim);
        self.dropped.push(victim);
        true
    }

    /// A save of the pages of `chain` from position `from` on; those before are its parents.
    pub fn save(&mut self, chain: &[PageHash], from: usize) -> Saved {
        let there = self.hits(chain);
        if there < from {
            return Saved { refused: (chain.len() - from) as u32, ..Saved::default() };
        }
        for &hash in chain[..there].iter().rev() {
            self.touch(hash);
        }
        let mut room = 0;
        for _ in there..chain.len() {
            let full = self.order.len() + room >= self.capacity;
            if full && !self.evict_one_for(chain) {
                break;
            }
            room += 1;
        }
        for at in there..there + room {
            self.parents.insert(chain[at], at.checked_sub(1).map(|before| chain[before]));
            self.order.push(chain[at]);
        }
        for &hash in chain[..there + room].iter().rev() {
            self.touch(hash);
        }
        Saved {
            stored: room as u32,
            present: (there - from) as u32,
            refused: (chain.len() - there - room) as u32,
        }
    }
}
