//! Spill: DRAM → SSD in the background, as write-back.
//!
//! Resident unwritten pages wait in a set ordered by time to eviction. The coldest goes first, but
//! never before its unwritten parents, so that eviction finds clean pages and what is lost under
//! pressure is the tail of a chain.

use super::Core;
use super::effect::{Effect, Effects, ImageIdentity, Slot};
use super::event::{IoFault, Ticket};
use super::flow::Work;
use super::index::PageId;
use super::query::charge;
use super::slots::slot_bytes;
use super::stats::SpillOutcome;

/// What enters the spill set.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum SpillPolicy {
    /// Every saved page.
    #[default]
    All,
    /// Pages that a query has hit, as soon as it has.
    Reuse,
}

/// Pages looked at in search of one whose write can begin.
const SPILL_PROBES_MAX: usize = 32;

impl Core {
    /// Offers a page that was just saved; its fate is counted exactly once.
    pub(super) fn offer(&mut self, page: PageId) {
        if self.slots.is_empty() {
            return;
        }
        self.stats.spill_offered += 1;
        let found = &self.pages[page];
        if found.slot.is_some() || found.writing {
            self.stats.spilled(SpillOutcome::AlreadyThere);
            return;
        }
        if self.config.spill_policy == SpillPolicy::Reuse && found.hits == 0 {
            self.stats.spilled(SpillOutcome::SkippedByPolicy);
            return;
        }
        let bytes = found.extent.map_or(0, |extent| u64::from(extent.bytes));
        self.spill_bytes += bytes;
        self.stats.spill_offered_bytes += bytes;
        self.spill.touch(&mut self.pages, page);
    }

    pub(super) fn pump_writes(&mut self, out: &mut Effects) {
        while !self.spill.is_empty() && self.may_write() {
            let Some(page) = self.next_to_write() else { return };
            if !self.start_write(page, out) {
                return;
            }
        }
    }

    fn may_write(&self) -> bool {
        self.flow.writes_in_flight == 0
            || (self.flow.writes_in_flight < self.config.writes_in_flight_max
                && self.flow.writes_bytes < self.config.writes_in_flight_bytes)
    }

    /// The topmost unwritten ancestor of the coldest page of the set.
    fn next_to_write(&self) -> Option<PageId> {
        let mut next = self.spill.coldest();
        for _ in 0..SPILL_PROBES_MAX {
            let page = next?;
            let mut top = page;
            while let Some(parent) = self.pages.parent(top)
                && self.spill.contains(&self.pages, parent)
            {
                top = parent;
            }
            // A parent that was given up without a write takes its descendants with it: they
            // could never be found through SSD.
            let orphaned = self.pages.parent(top).is_some_and(|parent| {
                let parent = &self.pages[parent];
                parent.slot.is_none() && !parent.writing
            });
            if !orphaned {
                return Some(top);
            }
            next = self.spill.hotter(&self.pages, page);
        }
        None
    }

    /// Orders the write of a page. False when no slot can be had for it now.
    fn start_write(&mut self, page: PageId, out: &mut Effects) -> bool {
        let found = &self.pages[page];
        let Some(extent) = found.extent else { return false };
        let namespace = self.namespaces.get(found.namespace);
        let image_bytes = namespace.image_bytes;
        let (hash, checksum) = (found.hash, found.checksum);
        let fingerprint = namespace.fingerprint;
        let parent = self.pages.parent(page).map(|parent| self.pages[parent].hash);
        let Some(slot) = self.take_slot(page, slot_bytes(image_bytes), out) else {
            return false;
        };
        self.leave_spill(page);
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
        self.flow.writes_in_flight += 1;
        self.flow.writes_bytes += bytes;
        let ticket = self.flow.start(Work::Write { page, slot, image, bytes });
        out.list.push(Effect::Write { ticket, extent, slot, image });
        true
    }

    /// A slot for `page`: a free one, else that of the coldest page of its size, else a region of
    /// another size.
    fn take_slot(&mut self, page: PageId, bytes: u32, out: &mut Effects) -> Option<Slot> {
        loop {
            if let Some(allocation) = self.slots.allocate(bytes) {
                if let Some(region) = allocation.first_of_region {
                    let device = allocation.slot.device;
                    out.list.push(Effect::RecordRegion { device, region, slot_bytes: bytes });
                }
                return Some(allocation.slot);
            }
            if let Some(victim) = self.slot_victim(page, bytes) {
                self.evict_slot(victim, out);
                continue;
            }
            let evictable = |page: PageId| self.slot_may_go(page);
            let (device, region, residents) =
                self.slots.reclaimable_region(&self.pages, bytes, evictable)?;
            for resident in residents {
                if self.pages[resident].slot.is_some() {
                    self.evict_slot(resident, out);
                }
            }
            self.slots.release_region(device, region);
        }
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

    /// Whether a page has a slot to lose, one that another image could use: untouched, and either
    /// in DRAM too or without descendants.
    fn slot_may_go(&self, page: PageId) -> bool {
        let found = &self.pages[page];
        let useful = found.slot.is_some_and(|slot| self.slots.accepts_writes(slot.device));
        let idle = found.pins == 0 && found.io == 0;
        useful && idle && (found.is_resident() || self.pages.first_child(page).is_none())
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
        out: &mut Effects,
    ) {
        let Work::Write { page, slot, image, bytes } = self.flow.end(ticket) else { return };
        self.flow.writes_in_flight -= 1;
        self.flow.writes_bytes -= bytes;
        let found = &mut self.pages[page];
        found.writing = false;
        found.io -= 1;
        match fault {
            None => {
                self.stats.spilled(SpillOutcome::Written);
                self.stats.ssd_pages_written += 1;
                self.stats.ssd_bytes_written += bytes;
                self.attach_slot(page, slot, &image);
            }
            Some(fault) => {
                self.stats.spilled(SpillOutcome::Failed);
                self.stats.ssd_write_errors[fault.index()] += 1;
                let retire = matches!(fault, IoFault::Errno(_) | IoFault::Short);
                self.end_slot(slot, retire, out);
            }
        }
        if !self.pages[page].indexed {
            self.bury(page, out);
        }
        self.feed_starved();
    }
}
