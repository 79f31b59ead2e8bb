//! The fake DRAM pool: words, and who touches which of them now.

use orbitkv_manager::core::{Extent, Ticket, UNIT_BYTES};

use crate::content::{POISON, Word};

/// How work in flight uses an extent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Use {
    /// Only reads it: others may read it too.
    Reads,
    /// Fills it: nobody else may touch it.
    Fills,
}

/// All arenas of the pool.
#[derive(Debug)]
pub struct Memory {
    arenas: Vec<Vec<Word>>,
    in_use: Vec<(Ticket, Extent, Use)>,
}

impl Memory {
    /// Arenas of the given sizes, in bytes, full of poison.
    pub fn new(arena_bytes: &[u64]) -> Self {
        let arena = |bytes: &u64| vec![POISON; (bytes / UNIT_BYTES) as usize];
        Self { arenas: arena_bytes.iter().map(arena).collect(), in_use: Vec::new() }
    }

    fn range(extent: &Extent) -> std::ops::Range<usize> {
        let start = (extent.offset / UNIT_BYTES) as usize;
        start..start + (u64::from(extent.bytes) / UNIT_BYTES) as usize
    }

    /// What the extent holds.
    pub fn words(&self, extent: &Extent) -> &[Word] {
        &self.arenas[usize::from(extent.arena)][Self::range(extent)]
    }

    /// Puts words into the extent, from its start.
    pub fn fill(&mut self, extent: &Extent, words: &[Word]) {
        let range = Self::range(extent);
        let target = &mut self.arenas[usize::from(extent.arena)][range];
        target[..words.len()].copy_from_slice(words);
    }

    /// Work begins to touch an extent. Panics when it may not.
    pub fn begin(&mut self, ticket: Ticket, extent: Extent, how: Use) {
        assert!(!self.words(&extent).is_empty());
        for (other, held, held_how) in &self.in_use {
            let apart = held.arena != extent.arena
                || held.offset + u64::from(held.bytes) <= extent.offset
                || extent.offset + u64::from(extent.bytes) <= held.offset;
            let shared = how == Use::Reads && *held_how == Use::Reads;
            assert!(apart || shared, "{ticket:?} {how:?} {extent:?} that {other:?} {held_how:?}");
        }
        self.in_use.push((ticket, extent, how));
    }

    /// Work no longer touches anything.
    pub fn end(&mut self, ticket: Ticket) {
        self.in_use.retain(|(other, _, _)| *other != ticket);
    }
}
