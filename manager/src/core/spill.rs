//! Spill: DRAM → SSD in the background, as write-back.
//!
//! Resident unwritten pages wait in a set ordered by time to eviction. The coldest goes first, but
//! never before its unwritten parents, so that eviction finds clean pages and what is lost under
//! pressure is the tail of a chain.

use super::Core;
use super::effect::{Effect, Effects, ImageIdentity, Slot};
use super::event::{IoFault, Nanos, Ticket};
use super::flow::{Work, is_slots_fault};
use super::index::PageId;
use super::query::charge;
use super::slots::{Intake, slot_bytes};
use super::stats::SpillOutcome;
use super::write_budget::WriteBudget;

/// What enters the spill set.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum SpillPolicy {
    /// Every saved page.
    #[default]
    All,
    /// Pages that a query has hit, as soon as it has, and pages that are saved again after they
    /// left: both were wanted twice. And whatever comes while slots are free and hardly anything
    /// waits to be written.
    Reuse,
}

/// Pages looked at in search of one whose write can begin, or whose slot may go.
const SPILL_PROBES_MAX: usize = 128;
/// Children looked at to see whether one of them needs its parent's slot.
const CHILDREN_PROBES_MAX: usize = 64;
/// Touches between two searches for a region that a full slot size could have.
const RECLAIM_RETRY_TOUCHES: u64 = 256;
/// Pages of a region and their descendants that may be given up for another slot size.
const RECLAIM_PAGES_MAX: usize = 1 << 16;

impl Core {
    /// Offers a page that was just saved; its fate is counted exactly once.
    pub(super) fn offer(&mut self, page: PageId) {
        if self.slots.is_empty() {
            return;
        }
        let found = &self.pages[page];
        if found.slot.is_some() || found.writing {
            self.stats.spill_offered += 1;
            self.stats.spilled(SpillOutcome::AlreadyThere);
        } else if self.config.spill_policy == SpillPolicy::Reuse && !self.is_wanted(page) {
            self.stats.spill_offered += 1;
            self.stats.spilled(SpillOutcome::SkippedByPolicy);
        } else {
            self.offer_chain(page);
        }
    }

    /// Whether the `reuse` policy writes a page that was just saved: it was hit, or it was here before
    /// and left, or writing it takes nothing from anybody.
    fn is_wanted(&mut self, page: PageId) -> bool {
        let found = &self.pages[page];
        let known = self.history.take(found.namespace, found.era, &found.hash);
        let bytes = slot_bytes(self.namespaces.get(found.namespace).image_bytes);
        let wanted = known || found.hits > 0;
        let hardly_any_waits = self.spill_bytes < self.config.writes_in_flight_bytes;
        // Which slots are free is not known before a restart has found everything again: the bound
        // on what waits is all that it can cost.
        wanted || (hardly_any_waits && (self.is_recovering() || self.slots.has_free(bytes)))
    }

    /// Offers a page that a query has hit, when the policy waited for that.
    pub(super) fn offer_reused(&mut self, page: PageId) {
        let found = &self.pages[page];
        let news = self.config.spill_policy == SpillPolicy::Reuse && !self.slots.is_empty();
        if news && found.indexed && found.is_resident() && !self.has_place_on_ssd(page) {
            self.offer_chain(page);
        }
    }

    /// Remembers a page that leaves every tier: whoever computes it again gives it a place on SSD.
    pub(super) fn remember(&mut self, page: PageId) {
        if self.config.spill_policy == SpillPolicy::Reuse && !self.slots.is_empty() {
            let found = &self.pages[page];
            let bytes = slot_bytes(self.namespaces.get(found.namespace).image_bytes);
            self.history.add(found.namespace, found.era, found.hash, bytes);
        }
    }

    /// Puts a page into the spill set, after those of its ancestors that have no place on SSD: a
    /// page whose parent is not there could never be found again.
    pub(super) fn offer_chain(&mut self, page: PageId) {
        let mut next = Some(page);
        while let Some(at) = next.filter(|&at| !self.has_place_on_ssd(at)) {
            debug_assert!(self.pages[at].is_resident());
            let bytes = self.pages[at].extent.map_or(0, |extent| u64::from(extent.bytes));
            self.spill_bytes += bytes;
            self.stats.spill_offered += 1;
            self.stats.spill_offered_bytes += bytes;
            self.spill.touch(&mut self.pages, at);
            next = self.pages.parent(at);
        }
    }

    /// Whether a page is on SSD, on its way there, or waits to be.
    pub(super) fn has_place_on_ssd(&self, page: PageId) -> bool {
        let found = &self.pages[page];
        found.slot.is_some() || found.writing || self.spill.contains(&self.pages, page)
    }

    pub(super) fn pump_writes(&mut self, now: Nanos, out: &mut Effects) {
        if let Some(budget) = &mut self.write_budget {
            budget.refill(now);
        }
        if self.is_recovering() {
            // Which slots are free is not known.
            return;
        }
        // Slot sizes that have no slot to give now: pages of other sizes need not wait for them.
        let mut full: Vec<u32> = Vec::new();
        while !self.spill.is_empty() && self.may_write() {
            let Some((page, bytes)) = self.next_to_write(&full) else { break };
            if !self.start_write(page, bytes, out) {
                full.push(bytes);
            }
        }
        if !full.is_empty() && self.waits_for_nothing() {
            self.give_up_coldest();
        }
    }

    /// Whether nothing is under way that could make a slot free. Then every slot is kept by a page
    /// that waits: chains that are all written in part need their beginnings for the rest.
    fn waits_for_nothing(&self) -> bool {
        let total = self.flow.ssd.total();
        let devices_take = self.flow.ssd.numbers().all(|at| self.slots.accepts_writes(at));
        let idle = total.writes == 0 && total.reads == 0 && self.pinned_bytes == 0;
        devices_take && idle && !self.has_forgotten_pages() && !self.is_over_write_budget()
    }

    /// Gives up the end of the chain that would leave DRAM first, so that its slots serve others.
    fn give_up_coldest(&mut self) {
        let Some(mut last) = self.spill.coldest() else { return };
        let waits = |&child: &PageId| self.spill.contains(&self.pages, child);
        while let Some(below) = self.pages.children(last).find(waits) {
            last = below;
        }
        self.leave_spill(last);
        self.stats.spilled(SpillOutcome::EvictedUnwritten);
        // Another turn looks whether that was enough.
        self.unsettle(last, SpillOutcome::EvictedUnwritten);
    }

    /// Whether the write budget is used up.
    pub(super) fn is_over_write_budget(&self) -> bool {
        self.write_budget.as_ref().is_some_and(WriteBudget::is_held)
    }

    /// What is counted of a waiting page that has to leave DRAM.
    pub(super) fn outcome_of_eviction(&self) -> SpillOutcome {
        if self.is_over_write_budget() {
            SpillOutcome::SkippedByPolicy
        } else {
            SpillOutcome::EvictedUnwritten
        }
    }

    fn may_write(&self) -> bool {
        if self.is_over_write_budget() {
            return false;
        }
        let ssd = &self.flow.ssd;
        ssd.numbers().any(|at| self.slots.accepts_writes(at) && ssd.has_write_room(at))
    }

    /// The topmost waiting ancestor of the coldest page of the set, with its slot size.
    fn next_to_write(&self, full: &[u32]) -> Option<(PageId, u32)> {
        let mut next = self.spill.coldest();
        for _ in 0..SPILL_PROBES_MAX {
            let page = next?;
            let namespace = self.pages[page].namespace;
            let bytes = slot_bytes(self.namespaces.get(namespace).image_bytes);
            // What was forgotten or lost its parent is being dropped; a write would outlive that.
            if full.contains(&bytes) || self.is_gone(page) {
                next = self.spill.hotter(&self.pages, page);
                continue;
            }
            let mut top = page;
            while let Some(parent) = self.pages.parent(top)
                && self.spill.contains(&self.pages, parent)
            {
                top = parent;
            }
            // What is above it did not get to SSD: it waits for the same.
            if self.pages.parent(top).is_some_and(|parent| !self.has_place_on_ssd(parent)) {
                next = self.spill.hotter(&self.pages, page);
                continue;
            }
            return Some((top, bytes));
        }
        None
    }

    /// Orders the write of a page. False when no slot can be had for it now.
    fn start_write(&mut self, page: PageId, slot_bytes: u32, out: &mut Effects) -> bool {
        let found = &self.pages[page];
        let Some(extent) = found.extent else { return false };
        let namespace = self.namespaces.get(found.namespace);
        let image_bytes = namespace.image_bytes;
        let (hash, checksum) = (found.hash, found.checksum);
        let fingerprint = namespace.fingerprint;
        let parent = self.pages.parent(page).map(|parent| self.pages[parent].hash);
        let Some(slot) = self.take_slot(page, slot_bytes, out) else {
            return false;
        };
        self.leave_spill(page);
        if let Some(budget) = &mut self.write_budget {
            budget.take(u64::from(slot_bytes));
        }
        let image = ImageIdentity {
            namespace: fingerprint,
            hash,
            parent,
            image_bytes,
            generation: self.slots.take_generation(),
            checksum,
        };
        let found = &mut self.pages[page];
        found.io += 1;
        found.writing = true;
        let bytes = charge(image_bytes);
        self.flow.ssd.start_write(slot.device, bytes);
        let ticket = self.flow.start(Work::Write { page, slot, image, bytes });
        out.list.push(Effect::Write { ticket, extent, slot, image });
        true
    }

    /// A slot for `page` on a device that may have another write: a free one, else one of a colder
    /// region of another size, else that of the coldest page of its size. Nothing is given up while
    /// there are free ones on a device that has enough to do.
    fn take_slot(&mut self, page: PageId, bytes: u32, out: &mut Effects) -> Option<Slot> {
        loop {
            let has_room = |device| self.flow.ssd.has_write_room(device);
            if let Some(allocation) = self.slots.allocate(bytes, has_room) {
                if let Some(region) = allocation.first_of_region {
                    let device = allocation.slot.device;
                    out.list.push(Effect::RecordRegion { device, region, slot_bytes: bytes });
                }
                return Some(allocation.slot);
            }
            if self.slots.has_free(bytes) {
                return None;
            }
            let victim = self.slot_victim(page, bytes);
            if self.reclaim_colder(page, victim, bytes, out) {
                continue;
            }
            self.evict_slot(victim?, out);
        }
    }

    /// Gives a region of another slot size up, when all of it has been cold for longer than the
    /// page that wants a slot and than the one that would lose its own. True when it did.
    fn reclaim_colder(
        &mut self,
        page: PageId,
        victim: Option<PageId>,
        bytes: u32,
        out: &mut Effects,
    ) -> bool {
        if victim.is_some() && self.touches < self.reclaim_after {
            return false;
        }
        self.reclaim_after = self.touches + RECLAIM_RETRY_TOUCHES;
        let of_victim = victim.map_or(u64::MAX, |victim| self.pages[victim].touched);
        let before = of_victim.min(self.pages[page].touched);
        let mut looks = RECLAIM_PAGES_MAX;
        let evictable = |page: PageId| {
            let found = &self.pages[page];
            found.slot.is_some_and(|slot| self.flow.ssd.has_write_room(slot.device))
                && found.touched < before
                && self.subtree_may_go(page, &mut looks)
        };
        let found = self.slots.reclaimable_region(&self.pages, bytes, evictable);
        let Some((device, region, residents)) = found else { return false };
        for resident in residents {
            if self.slot_may_go(resident) {
                self.evict_slot(resident, out);
            } else if self.pages[resident].slot.is_some() {
                self.drop_subtree(resident, SpillOutcome::EvictedUnwritten, out);
            }
        }
        self.slots.release_region(device, region);
        self.reclaim_after = self.touches;
        true
    }

    /// The coldest page whose slot may go: never an ancestor of the page to be written.
    fn slot_victim(&mut self, page: PageId, bytes: u32) -> Option<PageId> {
        let guard = self.next_guard();
        let mut ancestor = Some(page);
        while let Some(at) = ancestor {
            self.pages[at].guard = guard;
            ancestor = self.pages.parent(at);
        }
        let mut next = self.slots.recency(bytes).coldest();
        let mut resident = None;
        for _ in 0..SPILL_PROBES_MAX {
            let Some(at) = next else { break };
            if self.pages[at].guard != guard && self.slot_may_go(at) {
                if !self.pages[at].is_resident() {
                    return Some(at);
                }
                resident = resident.or(Some(at));
            }
            next = self.slots.recency(bytes).hotter(&self.pages, at);
        }
        resident
    }

    /// Whether a page has a slot to lose, one that another image could use now: untouched, and either
    /// without descendants or in DRAM too and without any that need it on SSD.
    fn slot_may_go(&self, page: PageId) -> bool {
        let found = &self.pages[page];
        let useful = found.slot.is_some_and(|slot| {
            self.slots.accepts_writes(slot.device) && self.flow.ssd.has_write_room(slot.device)
        });
        if !useful || found.pins > 0 || found.io > 0 {
            return false;
        }
        let mut children = self.pages.children(page);
        if !found.is_resident() {
            return children.next().is_none();
        }
        for _ in 0..CHILDREN_PROBES_MAX {
            match children.next() {
                None => return true,
                Some(child) if self.has_place_on_ssd(child) => return false,
                Some(_) => {}
            }
        }
        false
    }

    /// Whether nothing holds a page or any of its descendants. `looks` bounds the search.
    fn subtree_may_go(&self, page: PageId, looks: &mut usize) -> bool {
        let mut at = page;
        loop {
            let found = &self.pages[at];
            if found.pins > 0 || found.io > 0 || *looks == 0 {
                return false;
            }
            *looks -= 1;
            match self.pages.next_below(at, page) {
                Some(next) => at = next,
                None => return true,
            }
        }
    }

    fn evict_slot(&mut self, page: PageId, out: &mut Effects) {
        self.stats.ssd_evictions += 1;
        self.detach_slot(page, false, out);
        if !self.pages[page].is_resident() {
            self.drop_page(page, SpillOutcome::EvictedUnwritten, out);
        }
    }

    pub(super) fn write_ended(
        &mut self,
        ticket: Ticket,
        fault: Option<IoFault>,
        checksum: Option<u64>,
        out: &mut Effects,
    ) {
        let Work::Write { page, slot, image, bytes } = self.flow.end(ticket) else { return };
        self.flow.ssd.end_write(slot.device, bytes);
        self.flow.memory_moved = true;
        let found = &mut self.pages[page];
        found.writing = false;
        found.io -= 1;
        let image = ImageIdentity { checksum: image.checksum.or(checksum), ..image };
        // It need not be summed again for another slot.
        found.checksum = image.checksum;
        // Its parent's write may have failed meanwhile.
        let parent = self.pages.parent(page);
        let found_again = parent.is_none_or(|parent| self.has_place_on_ssd(parent));
        match fault {
            None if found_again => {
                self.stats.spilled(SpillOutcome::Written);
                self.stats.ssd_pages_written += 1;
                self.stats.ssd_bytes_written += bytes;
                self.attach_slot(page, slot, &image);
            }
            None => {
                self.stats.spilled(SpillOutcome::Failed);
                self.stats.ssd_bytes_written += bytes;
                self.end_slot(slot, false, out);
                self.give_up_below(page);
            }
            Some(IoFault::Off) => {
                self.stats.ssd_write_errors[IoFault::Off.index()] += 1;
                // Whoever looks after the device says when it takes images again.
                self.slots.set_intake(slot.device, Intake::Nothing);
                self.end_slot(slot, false, out);
                if !self.pages[page].indexed {
                    self.stats.spilled(SpillOutcome::Superseded);
                } else if found_again {
                    self.wait_again(page);
                } else {
                    self.stats.spilled(SpillOutcome::Failed);
                    self.give_up_below(page);
                }
            }
            Some(fault) => {
                self.stats.spilled(SpillOutcome::Failed);
                self.stats.ssd_write_errors[fault.index()] += 1;
                self.end_slot(slot, is_slots_fault(fault), out);
                self.give_up_below(page);
            }
        }
        if !self.pages[page].indexed {
            self.bury(page, out);
        }
    }

    /// Puts a page whose write was not done back into the spill set, as the next to be written: it
    /// is still the same offer. What hangs on it stays where it is.
    fn wait_again(&mut self, page: PageId) {
        debug_assert!(self.pages[page].is_resident());
        self.spill_bytes += self.pages[page].extent.map_or(0, |extent| u64::from(extent.bytes));
        self.spill.place_coldest(&mut self.pages, page);
    }

    /// Takes what is below a page that did not get to SSD away from there, in the turns that follow.
    pub(super) fn give_up_below(&mut self, page: PageId) {
        if self.pages.first_child(page).is_some() {
            self.unsettle(page, SpillOutcome::Failed);
        }
    }

    /// Takes a page whose parent did not get to SSD away from there.
    pub(super) fn give_up_place(&mut self, page: PageId, out: &mut Effects) {
        let waited = self.leave_spill(page);
        if waited {
            self.stats.spilled(SpillOutcome::Failed);
        }
        let has_slot = self.pages[page].slot.is_some();
        // A slot that is being read stays with its page.
        let held = !self.pages[page].is_resident() || self.pages[page].overtaken;
        if has_slot && held {
            return self.drop_subtree(page, SpillOutcome::Failed, out);
        }
        self.detach_slot(page, false, out);
        // What is being written is looked at when its write ends.
        if waited || has_slot {
            self.give_up_below(page);
        }
    }
}
