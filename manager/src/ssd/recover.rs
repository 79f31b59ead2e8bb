//! What a start finds: which of the footers that were read still count.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use super::format::{Footer, Forgotten, Superblock};
use crate::core::{IoFault, RecoveredPage, Slot};

/// How many slots were found in which state. They sum to `slots`.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct SlotCounts {
    /// Slots of all regions that have a slot length.
    pub slots: u64,
    /// The newest of their page, in one piece as far as was looked at.
    pub valid: u64,
    /// Footer or image torn, or unreadable.
    pub torn: u64,
    /// Older than another slot of the same page, forgotten, retired, or written for another
    /// place.
    pub stale: u64,
    /// Never written.
    pub empty: u64,
}

/// What was found in one slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Found {
    Footer(Footer),
    Empty,
    Torn,
    /// The device did not give the footer.
    Unread(IoFault),
    /// Retired earlier: not looked at.
    Retired,
}

/// Gathers what the devices hold and decides what counts.
#[derive(Default, Debug)]
pub(crate) struct Census {
    newest: HashMap<([u8; 32], [u8; 32]), RecoveredPage>,
    /// Namespaces with slots that may be older than a forget: (namespace, lowest generation).
    oldest: HashMap<[u8; 32], u64>,
    /// Slots whose footer the device did not give.
    unread: Vec<Slot>,
    pub(crate) counts: SlotCounts,
    pub(crate) highest_generation: u64,
}

impl Census {
    /// Takes what was found in one slot of a file in `state`. `forgotten` are the forgotten
    /// namespaces of all files.
    pub(crate) fn take(
        &mut self,
        state: &Superblock,
        forgotten: &[Forgotten],
        slot: Slot,
        found: Found,
    ) {
        self.counts.slots += 1;
        let footer = match found {
            Found::Empty => return self.counts.empty += 1,
            Found::Torn => return self.counts.torn += 1,
            Found::Retired => return self.counts.stale += 1,
            Found::Unread(_) => {
                self.unread.push(slot);
                return self.counts.torn += 1;
            }
            Found::Footer(footer) => footer,
        };
        if !footer.belongs_to(state.file, slot) {
            self.counts.stale += 1;
            return;
        }
        let image = footer.image;
        self.highest_generation = self.highest_generation.max(image.generation);
        let oldest = self.oldest.entry(image.namespace).or_insert(image.generation);
        *oldest = image.generation.min(*oldest);
        let is_forgotten = state.is_forgotten(&image.namespace, image.generation)
            || forgotten.iter().any(|entry| {
                entry.namespace == image.namespace && image.generation < entry.generation
            });
        if is_forgotten || state.is_retired(slot.offset) {
            self.counts.stale += 1;
            return;
        }
        self.take_page(RecoveredPage { slot, image });
    }

    fn take_page(&mut self, page: RecoveredPage) {
        let image = &page.image;
        match self.newest.entry((image.namespace, image.hash.0)) {
            Entry::Vacant(place) => {
                place.insert(page);
                self.counts.valid += 1;
            }
            Entry::Occupied(mut place) => {
                self.counts.stale += 1;
                if rank(place.get()) < rank(&page) {
                    place.insert(page);
                }
            }
        }
    }

    /// Joins what another file holds.
    pub(crate) fn merge(&mut self, other: Self) {
        self.counts.slots += other.counts.slots;
        self.counts.torn += other.counts.torn;
        self.counts.stale += other.counts.stale;
        self.counts.empty += other.counts.empty;
        self.unread.extend(other.unread);
        self.highest_generation = self.highest_generation.max(other.highest_generation);
        for (namespace, generation) in other.oldest {
            let oldest = self.oldest.entry(namespace).or_insert(generation);
            *oldest = generation.min(*oldest);
        }
        if self.newest.is_empty() {
            self.newest = other.newest;
            self.counts.valid = other.counts.valid;
            return;
        }
        for page in other.newest.into_values() {
            self.take_page(page);
        }
    }

    /// Whether the device did not give some footer.
    pub(crate) fn has_unread(&self) -> bool {
        !self.unread.is_empty()
    }

    /// True when some slot may hold a page that `entry` forgets, so that it must be kept.
    pub(crate) fn still_needs(&self, entry: &Forgotten) -> bool {
        self.has_unread()
            || self.oldest.get(&entry.namespace).is_some_and(|oldest| *oldest < entry.generation)
    }

    /// The slots whose footer the device did not give, and the pages that count, by device and
    /// place. Which of them hang on a page that is nowhere is
    /// decided by `core`, which knows the rules of chains.
    pub(crate) fn into_parts(self) -> (Vec<Slot>, Vec<RecoveredPage>) {
        let mut pages: Vec<_> = self.newest.into_values().collect();
        pages.sort_unstable_by_key(|page| (page.slot.device, page.slot.offset));
        (self.unread, pages)
    }
}

/// The higher one wins; the place only makes it the same slot on every start.
fn rank(page: &RecoveredPage) -> (u64, u16, u64) {
    (page.image.generation, page.slot.device, page.slot.offset)
}

/// The forgotten namespaces of all files: a file that was away while another forgot follows it.
pub(crate) fn all_forgotten<'a>(states: impl Iterator<Item = &'a Superblock>) -> Vec<Forgotten> {
    let mut all: Vec<Forgotten> = Vec::new();
    for entry in states.flat_map(|state| &state.forgotten) {
        match all.iter_mut().find(|known| known.namespace == entry.namespace) {
            Some(known) => known.generation = known.generation.max(entry.generation),
            None => all.push(*entry),
        }
    }
    all
}
