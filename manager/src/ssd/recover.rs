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
}

/// Gathers what the devices hold and decides what counts.
#[derive(Default, Debug)]
pub(crate) struct Census {
    newest: HashMap<([u8; 32], [u8; 32]), RecoveredPage>,
    /// Namespaces with slots that may be older than a forget: (namespace, lowest generation).
    oldest: HashMap<[u8; 32], u64>,
    unread: bool,
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
            Found::Unread(_) => {
                self.unread = true;
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
        let page = RecoveredPage { slot, image };
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

    /// True when some slot may hold a page that `entry` forgets, so that it must be kept.
    pub(crate) fn still_needs(&self, entry: &Forgotten) -> bool {
        self.unread
            || self.oldest.get(&entry.namespace).is_some_and(|oldest| *oldest < entry.generation)
    }

    /// The pages that count, in no order.
    pub(crate) fn into_pages(self) -> Vec<RecoveredPage> {
        self.newest.into_values().collect()
    }
}

/// The higher one wins; the place only makes it the same slot on every start.
fn rank(page: &RecoveredPage) -> (u64, u16, u64) {
    (page.image.generation, page.slot.device, page.slot.offset)
}

/// Drops the pages that no query can reach, since some ancestor is in no slot, and sorts the others
/// so that a parent comes before its children. Returns how many were dropped.
pub(crate) fn drop_orphans(pages: &mut Vec<RecoveredPage>) -> u64 {
    #[derive(Clone, Copy, PartialEq)]
    enum Depth {
        Unknown,
        OnPath,
        Rooted(u32),
        Orphan,
    }
    let by_key: HashMap<([u8; 32], [u8; 32]), usize> = pages
        .iter()
        .enumerate()
        .map(|(index, page)| ((page.image.namespace, page.image.hash.0), index))
        .collect();
    let mut depths = vec![Depth::Unknown; pages.len()];
    let mut path = Vec::new();
    for start in 0..pages.len() {
        let mut at = start;
        // Up to something known, a root, a hole, or around a circle (which no chained hash makes).
        let mut depth = loop {
            match depths[at] {
                Depth::Unknown => {}
                Depth::OnPath => break Depth::Orphan,
                known => break known,
            }
            depths[at] = Depth::OnPath;
            path.push(at);
            let image = &pages[at].image;
            match image.parent {
                None => break Depth::Rooted(0),
                Some(parent) => match by_key.get(&(image.namespace, parent.0)) {
                    None => break Depth::Orphan,
                    Some(next) => at = *next,
                },
            }
        };
        while let Some(at) = path.pop() {
            if let Depth::Rooted(level) = &mut depth {
                *level += 1;
            }
            depths[at] = depth;
        }
    }
    let before = pages.len();
    let mut kept: Vec<(u32, RecoveredPage)> = depths
        .iter()
        .zip(pages.iter())
        .filter_map(|(depth, page)| match depth {
            Depth::Rooted(level) => Some((*level, *page)),
            _ => None,
        })
        .collect();
    kept.sort_unstable_by_key(|(level, page)| (*level, page.slot.device, page.slot.offset));
    pages.clear();
    pages.extend(kept.into_iter().map(|(_, page)| page));
    (before - pages.len()) as u64
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
