//! Warm restart: what a census of the SSD tier finds becomes pages again, while DRAM is served.
//!
//! A slot says what it holds only when its footer was read, and a footer counts only when every
//! other was: the highest generation of a key wins. So until the census is complete no slot is
//! given out, none is found, and a forget waits for its generation, which must be above all that
//! it forgets. Then the pages are taken over in bounded turns, parents first. Engines have saved
//! meanwhile: a page that is in DRAM already gets its slot, and what was forgotten since the start
//! is left out.

use std::collections::{HashMap, HashSet};

use super::Core;
use super::effect::{Effect, Effects, ImageIdentity, Slot};
use super::event::Ticket;
use super::job::JobRef;
use super::limits::namespaces_kept;
use super::namespace::{NamespaceFingerprint, NamespaceId};
use super::slots::slot_bytes;
use super::stats::SpillOutcome;

/// Slots that one turn lists as free, one region at least.
const SLOTS_SETTLED_PER_TURN: usize = 1 << 16;
/// Touches set aside at the start of a recovery: what is found is older than all that is saved.
const TOUCHES_OF_RECOVERED: u64 = 1 << 40;

/// One slot whose footer was whole; the highest generation of its key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RecoveredPage {
    /// Where it is.
    pub slot: Slot,
    /// What its footer says.
    pub image: ImageIdentity,
}

/// What a complete census found, in the order in which it is taken over: parents before their
/// children, the hottest chains first. Making one sorts everything: not for the reactor's thread.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Recovered {
    pages: Vec<RecoveredPage>,
    by_namespace: HashMap<NamespaceFingerprint, u64>,
    last_generation: u64,
    lost: Vec<u16>,
    unread: Vec<Slot>,
}

impl Recovered {
    /// `last_generation` is the highest that was seen or recorded anywhere. The slots of the `lost`
    /// devices stay unknown: they are neither read nor written.
    pub fn new(pages: Vec<RecoveredPage>, last_generation: u64, lost: Vec<u16>) -> Self {
        let (pages, winners) = in_order(pages);
        let mut by_namespace: HashMap<_, u64> = HashMap::new();
        for page in &pages[..winners] {
            *by_namespace.entry(page.image.namespace).or_default() += 1;
        }
        let unread = Vec::new();
        Self { pages, by_namespace, last_generation, lost, unread }
    }

    /// The slots whose footers could not be read: they are retired, so that the next start need not
    /// fail to read them again.
    #[must_use]
    pub fn with_unread(self, unread: Vec<Slot>) -> Self {
        Self { unread, ..self }
    }

    /// The pages, in order.
    pub fn pages(&self) -> &[RecoveredPage] {
        &self.pages
    }

    /// Generations go on above this.
    pub fn last_generation(&self) -> u64 {
        self.last_generation
    }
}

/// Hottest chain first, each from its root, each page once: recency built from its hot end. The
/// generation of its deepest page is a chain's age. Behind so many that stand for their keys come
/// older slots of the same keys.
fn in_order(mut pages: Vec<RecoveredPage>) -> (Vec<RecoveredPage>, usize) {
    pages.sort_unstable_by_key(|page| std::cmp::Reverse(page.image.generation));
    let mut places = HashMap::with_capacity(pages.len());
    let mut wins = Vec::with_capacity(pages.len());
    for (at, page) in pages.iter().enumerate() {
        // Of two slots with one key the younger: it comes first.
        let place = places.entry((page.image.namespace, page.image.hash.0)).or_insert(at);
        wins.push(*place == at);
    }
    let parent_of = |page: &RecoveredPage| {
        let parent = page.image.parent?;
        places.get(&(page.image.namespace, parent.0)).copied()
    };
    let mut has_child = vec![false; pages.len()];
    for (at, page) in pages.iter().enumerate() {
        if let Some(parent) = parent_of(page).filter(|_| wins[at]) {
            has_child[parent] = true;
        }
    }
    let mut order = Vec::with_capacity(pages.len());
    let mut placed = vec![false; pages.len()];
    let winners = || (0..pages.len()).filter(|&at| wins[at]);
    let leaves = winners().filter(|&at| !has_child[at]);
    // What is left of the winners after the leaves are cycles: no chains, but counted like all else.
    for first in leaves.chain(winners()).chain(0..pages.len()) {
        let start = order.len();
        let mut next = Some(first);
        while let Some(at) = next.filter(|&at| !placed[at]) {
            placed[at] = true;
            order.push(pages[at]);
            next = parent_of(&pages[at]);
        }
        order[start..].reverse();
    }
    (order, places.len())
}

/// A recovery that is under way.
#[derive(Debug, Default)]
pub(super) struct Recovery {
    /// `None` until the census is complete.
    found: Option<Recovered>,
    /// How many of its pages were dealt with.
    next: usize,
    /// Forgotten since the start: everything that was found of them is older.
    forgotten: HashSet<NamespaceId>,
    /// Forgets that wait for their generation.
    waiting: Vec<WaitingForget>,
    /// How many of the unread slots are retired.
    retired: usize,
    /// The next region whose free slots are to be listed.
    settled: (usize, usize),
    /// The last touch that was given to a page.
    touched: u64,
}

#[derive(Clone, Copy, Debug)]
struct WaitingForget {
    ticket: Ticket,
    job: Option<JobRef>,
    namespace: NamespaceId,
}

impl Core {
    /// From here on the slots of the devices are unknown, until [`census_taken`](Self::census_taken)
    /// tells what they hold and [`pump`](Self::pump) has taken that over. Call before the first
    /// session.
    pub fn begin_recovery(&mut self) {
        if self.slots.is_empty() {
            return;
        }
        let slots = self.slots.begin_census();
        // Now, while there is nothing to move: a turn has no time for that.
        self.index.reserve(&mut self.pages, slots);
        self.touches += TOUCHES_OF_RECOVERED;
        let touched = self.touches;
        self.recovery = Some(Recovery { touched, ..Recovery::default() });
    }

    /// Whether the SSD tier takes no writes yet, because not all of it is known.
    pub fn is_recovering(&self) -> bool {
        self.recovery.is_some()
    }

    /// Whether it is not known yet what is on SSD.
    pub(super) fn is_in_census(&self) -> bool {
        self.recovery.as_ref().is_some_and(|recovery| recovery.found.is_none())
    }

    /// Whether found pages wait for another [`pump`](Self::pump) to be taken over.
    pub fn has_recovered_pages(&self) -> bool {
        self.recovery.as_ref().is_some_and(|recovery| recovery.found.is_some())
    }

    /// The census is complete. Forgets that waited for it are recorded now.
    pub fn census_taken(&mut self, found: Recovered, out: &mut Effects) {
        let Some(recovery) = &mut self.recovery else { return };
        debug_assert!(recovery.found.is_none(), "one census a start");
        self.slots.end_census(found.last_generation, &found.lost);
        let waiting = std::mem::take(&mut recovery.waiting);
        recovery.found = Some(found);
        for WaitingForget { ticket, job, namespace } in waiting {
            let (pages, bytes) = self.found_of(namespace);
            self.stats.pages_forgotten += pages;
            if let Some(job) = job.and_then(|job| self.jobs.get_mut(job)) {
                job.found = job.found.saturating_add(u32::try_from(pages).unwrap_or(u32::MAX));
                job.bytes += bytes;
            }
            self.order_forget(ticket, namespace, out);
        }
    }

    /// Makes a forget durable, as soon as it is known which generations are older. Returns pages
    /// and bytes of what was found on SSD and is forgotten before it was taken over.
    pub(super) fn record_forget(
        &mut self,
        job: Option<JobRef>,
        ticket: Ticket,
        namespace: NamespaceId,
        out: &mut Effects,
    ) -> (u64, u64) {
        let left = self.found_of(namespace);
        if let Some(recovery) = &mut self.recovery {
            recovery.forgotten.insert(namespace);
            if recovery.found.is_none() {
                recovery.waiting.push(WaitingForget { ticket, job, namespace });
                return (0, 0);
            }
        }
        self.order_forget(ticket, namespace, out);
        left
    }

    fn order_forget(&mut self, ticket: Ticket, namespace: NamespaceId, out: &mut Effects) {
        let namespace = self.namespaces.get(namespace).fingerprint;
        let generation = self.slots.take_generation();
        out.list.push(Effect::RecordForget { ticket, namespace, generation });
    }

    /// Pages of a namespace that were found and not yet dealt with, and their bytes; each is told
    /// once. One that was saved again meanwhile is among them too, as its other copy: which those
    /// are is known only when they are dealt with, and a forget does not wait for that.
    fn found_of(&mut self, namespace: NamespaceId) -> (u64, u64) {
        let of = self.namespaces.get(namespace);
        let found = self.recovery.as_mut().and_then(|recovery| recovery.found.as_mut());
        let pages = found.and_then(|found| found.by_namespace.remove(&of.fingerprint));
        let pages = pages.unwrap_or(0);
        (pages, pages * u64::from(of.image_bytes))
    }

    /// What was found, once all of it is taken over: large, and of no more use.
    pub fn take_used_up(&mut self) -> Option<Recovered> {
        self.used_up.take()
    }

    /// Takes over a bounded number of found pages; after the last the tier is in use.
    pub(super) fn advance_recovery(&mut self, out: &mut Effects) {
        if !self.has_recovered_pages() {
            return;
        }
        let Some(mut recovery) = self.recovery.take() else { return };
        let Some(mut found) = recovery.found.take() else { return };
        for _ in 0..self.config.pages_recovered_per_turn {
            if let Some(&slot) = found.unread.get(recovery.retired) {
                recovery.retired += 1;
                if self.slots.retire_unread(slot) {
                    self.stats.slots_retired += 1;
                    out.list.push(Effect::RetireSlot { slot });
                }
                continue;
            }
            let Some(page) = found.pages.get(recovery.next) else {
                if self.slots.settle(&mut recovery.settled, SLOTS_SETTLED_PER_TURN) {
                    self.used_up = Some(found);
                    return;
                }
                break;
            };
            recovery.next += 1;
            if let Some(left) = found.by_namespace.get_mut(&page.image.namespace) {
                *left = left.saturating_sub(1);
            }
            if self.take_over(page, &mut recovery) {
                self.stats.recovered_pages += 1;
            } else {
                self.stats.recovered_dropped += 1;
            }
        }
        recovery.found = Some(found);
        self.recovery = Some(recovery);
    }

    /// Makes a page of what is in a slot, or gives the slot to the page that is there. False when
    /// it cannot be used: forgotten, without its parent, in a slot that has an owner or is retired.
    fn take_over(&mut self, recovered: &RecoveredPage, recovery: &mut Recovery) -> bool {
        let RecoveredPage { slot, image } = recovered;
        if slot_bytes(image.image_bytes) != slot.bytes || !self.slots.is_unread(*slot) {
            return false;
        }
        let known = self.namespaces.find(&image.namespace);
        let fits = known.is_none_or(|id| {
            let same_size = self.namespaces.get(id).image_bytes == image.image_bytes;
            same_size && !recovery.forgotten.contains(&id)
        });
        // A namespace that nobody named yet holds nothing that could be a parent.
        let most = self.config.namespaces_max;
        let has_room = self.namespaces.len() < most - namespaces_kept(most);
        let new_root = image.parent.is_none() && has_room;
        if !fits || !(known.is_some() || new_root) {
            return false;
        }
        let namespace = known.unwrap_or_else(|| {
            let label = format!("{} (not attached yet)", short_hex(&image.namespace));
            self.namespaces.intern(image.namespace, None, image.image_bytes, label)
        });
        let resident = self.find(namespace, &image.hash);
        let parent = match (resident, &image.parent) {
            (Some(page), _) => self.pages.parent(page),
            (None, None) => None,
            (None, Some(parent)) => match self.find(namespace, parent) {
                Some(parent) => Some(parent),
                None => return false,
            },
        };
        if parent.is_some_and(|parent| !self.has_place_on_ssd(parent)) {
            return false;
        }
        let page = match resident {
            // Two slots claim the key.
            Some(page) if self.pages[page].slot.is_some() => return false,
            Some(page) => {
                if self.leave_spill(page) {
                    self.stats.spilled(SpillOutcome::AlreadyThere);
                }
                page
            }
            None => {
                let page = self.insert_page(namespace, image.hash, parent);
                recovery.touched -= 1;
                self.pages[page].touched = recovery.touched;
                let class = self.slots.recency(slot.bytes);
                class.place_coldest(&mut self.pages, page);
                page
            }
        };
        self.slots.occupy(*slot);
        self.attach_slot(page, *slot, image);
        true
    }
}

fn short_hex(bytes: &[u8]) -> String {
    bytes.iter().take(6).map(|byte| format!("{byte:02x}")).collect()
}
