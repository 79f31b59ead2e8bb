//! How a page gains and loses replicas, pins and its place in the tree.
//!
//! Laws kept here: an extent or slot has exactly one owner; a page is in a recency list only while
//! nothing pins it; a page without a restorable replica is in no index; a page of a chain is never
//! kept when its parent is gone from every tier.

use orbitkv_shm_protocol::ids::PageHash;

use super::Core;
use super::effect::{Effect, Effects, Extent, ImageIdentity, Slot};
use super::index::PageId;
use super::namespace::NamespaceId;
use super::slots::slot_bytes;
use super::stats::SpillOutcome;

/// Colder pages passed over in search of one that is on SSD already, before an unwritten page is
/// given up.
const CLEAN_PROBES_MAX: usize = 64;

impl Core {
    pub(super) fn find(&self, namespace: NamespaceId, hash: &PageHash) -> Option<PageId> {
        let era = self.namespaces.get(namespace).forgets;
        self.index.find(&self.pages, namespace, era, hash, |page| !self.is_cut_off(page))
    }

    /// Whether a page hangs on one that was dropped and only waits to be dropped itself.
    pub(super) fn is_cut_off(&self, page: PageId) -> bool {
        !self.unsettled.is_empty() && self.pages.is_cut_off(page, self.cuts)
    }

    /// Whether a page only waits to be dropped: nobody finds it, nothing is written of it.
    pub(super) fn is_gone(&self, page: PageId) -> bool {
        self.is_doomed(page) || self.is_cut_off(page)
    }

    /// Whether a page was forgotten and only waits to be dropped.
    pub(super) fn is_doomed(&self, page: PageId) -> bool {
        let found = &self.pages[page];
        found.era != self.namespaces.get(found.namespace).forgets
    }

    /// Adds a page without replicas under `parent`.
    pub(super) fn insert_page(
        &mut self,
        namespace: NamespaceId,
        hash: PageHash,
        parent: Option<PageId>,
    ) -> PageId {
        debug_assert!(self.find(namespace, &hash).is_none());
        let era = self.namespaces.get(namespace).forgets;
        let page = self.index.insert(&mut self.pages, namespace, era, hash);
        if let Some(parent) = parent {
            self.pages.adopt(parent, page);
        }
        self.namespaces.get_mut(namespace).pages.touch(&mut self.pages, page);
        page
    }

    /// Gives the page its DRAM replica (or the memory for one that is being read).
    pub(super) fn attach_extent(&mut self, page: PageId, extent: Extent) {
        debug_assert!(self.pages[page].extent.is_none());
        self.pages[page].extent = Some(extent);
        let namespace = self.pages[page].namespace;
        self.namespaces.get_mut(namespace).dram_pages += 1;
        self.dram_pages += 1;
        if self.pages[page].pins > 0 {
            self.pinned_bytes += u64::from(extent.bytes);
        }
    }

    /// Gives a page that is being read a replica of its own; the read keeps the memory it fills.
    pub(super) fn replace_extent(&mut self, page: PageId, extent: Extent) {
        let found = &mut self.pages[page];
        debug_assert!(found.reading && found.indexed);
        (found.reading, found.overtaken) = (false, true);
        if let Some(filled) = found.extent.replace(extent) {
            debug_assert_eq!(filled.bytes, extent.bytes, "images of one page");
            self.draining_bytes += u64::from(filled.bytes);
            self.flow.leave_to_read(page, filled);
        }
    }

    /// A page came to DRAM: whoever waits for room to read it need not.
    pub(super) fn wake_wanting(&mut self, page: PageId) {
        let found = &mut self.pages[page];
        if std::mem::take(&mut found.wanted)
            && let Some(slot) = found.slot
        {
            self.flow.ssd.stir(slot.device);
            self.flow.memory_moved = true;
        }
    }

    /// Frees the page's DRAM replica. Nothing may touch it.
    pub(super) fn detach_extent(&mut self, page: PageId) {
        let Some(extent) = self.pages[page].extent.take() else { return };
        debug_assert_eq!(self.pages[page].io, 0);
        if !self.pages[page].indexed {
            self.draining_bytes -= u64::from(extent.bytes);
        }
        let namespace = self.pages[page].namespace;
        self.namespaces.get_mut(namespace).dram_pages -= 1;
        self.dram_pages -= 1;
        if self.pages[page].pins > 0 {
            self.pinned_bytes -= u64::from(extent.bytes);
        }
        self.free_memory(extent);
    }

    /// Gives memory back to the pool.
    pub(super) fn free_memory(&mut self, extent: Extent) {
        self.extents.free(extent);
        self.flow.memory_moved = true;
    }

    pub(super) fn attach_slot(&mut self, page: PageId, slot: Slot, image: &ImageIdentity) {
        debug_assert!(self.pages[page].slot.is_none());
        self.pages[page].slot = Some(slot);
        self.pages[page].generation = image.generation;
        // A footer that was written has one.
        self.pages[page].slot_checksum = image.checksum.unwrap_or_default();
        let namespace = self.pages[page].namespace;
        self.namespaces.get_mut(namespace).ssd_pages += 1;
        self.ssd_pages += 1;
        self.slots.assign(slot, page);
    }

    /// Gives the page's slot back, or takes it out of use for ever.
    pub(super) fn detach_slot(&mut self, page: PageId, retire: bool, out: &mut Effects) {
        let Some(slot) = self.pages[page].slot.take() else { return };
        let namespace = self.pages[page].namespace;
        self.namespaces.get_mut(namespace).ssd_pages -= 1;
        self.ssd_pages -= 1;
        self.end_slot(slot, retire, out);
    }

    pub(super) fn end_slot(&mut self, slot: Slot, retire: bool, out: &mut Effects) {
        if retire {
            self.stats.slots_retired += 1;
            self.slots.retire(slot);
            out.list.push(Effect::RetireSlot { slot });
        } else {
            self.slots.free(slot);
        }
    }

    pub(super) fn pin(&mut self, page: PageId) {
        let found = &mut self.pages[page];
        found.pins += 1;
        if found.pins > 1 {
            return;
        }
        if let Some(extent) = found.extent {
            self.pinned_bytes += u64::from(extent.bytes);
            self.dram.remove(&mut self.pages, page);
        }
        self.leave_class(page);
    }

    /// Lets go of a page, which becomes the hottest. Callers let go from tail to head, then touch
    /// the parents of what they let go of.
    pub(super) fn unpin(&mut self, page: PageId, out: &mut Effects) {
        if self.let_go(page, out) {
            self.touch(page);
        }
    }

    /// Lets go of a page in the middle of a chain whose other pages stay pinned for now.
    pub(super) fn unpin_in_place(&mut self, page: PageId, out: &mut Effects) {
        if self.let_go(page, out) {
            self.place(page);
        }
    }

    /// True when nothing pins the page any more and it can be found.
    fn let_go(&mut self, page: PageId, out: &mut Effects) -> bool {
        let found = &mut self.pages[page];
        debug_assert!(found.pins > 0);
        found.pins -= 1;
        if found.pins > 0 {
            return false;
        }
        self.flow.memory_moved = true;
        if let Some(extent) = found.extent {
            self.pinned_bytes -= u64::from(extent.bytes);
        }
        if !self.pages[page].indexed {
            self.bury(page, out);
            return false;
        }
        true
    }

    /// Touches pages that were let go of and all of their ancestors; the deepest come first.
    pub(super) fn refresh(&mut self, deepest_first: impl Iterator<Item = PageId>) {
        let guard = self.next_guard();
        for page in deepest_first {
            if self.pages[page].indexed && self.pages[page].guard != guard {
                self.touch_upwards(Some(page), guard);
            }
        }
    }

    /// Makes one page the hottest of every list that it belongs to.
    pub(super) fn touch(&mut self, page: PageId) {
        self.touches += 1;
        let found = &mut self.pages[page];
        found.touched = self.touches;
        // One that left may still be the parent of others.
        if found.pins > 0 || !found.indexed {
            return;
        }
        let (resident, namespace) = (found.is_resident(), found.namespace);
        if resident {
            self.dram.touch(&mut self.pages, page);
        }
        if !self.slots.is_empty() {
            let bytes = slot_bytes(self.namespaces.get(namespace).image_bytes);
            self.slots.recency(bytes).touch(&mut self.pages, page);
        }
        if self.spill.contains(&self.pages, page) {
            self.spill.touch(&mut self.pages, page);
        }
    }

    /// Puts a page right below its nearest ancestor in every list that it belongs to: as hot as can
    /// be without a walk to the root. Callers touch the whole chain when they are done with it.
    pub(super) fn place(&mut self, page: PageId) {
        let found = &mut self.pages[page];
        found.touched = self.touches;
        if found.pins > 0 {
            return;
        }
        let (resident, namespace) = (found.is_resident(), found.namespace);
        if resident {
            match self.pages.ancestor(page, |above| self.dram.contains(&self.pages, above)) {
                Some(above) => self.dram.place_below(&mut self.pages, page, above),
                None => self.dram.touch(&mut self.pages, page),
            }
        }
        if !self.slots.is_empty() {
            let bytes = slot_bytes(self.namespaces.get(namespace).image_bytes);
            let class = self.slots.recency(bytes);
            match self.pages.ancestor(page, |above| class.contains(&self.pages, above)) {
                Some(above) => class.place_below(&mut self.pages, page, above),
                None => class.touch(&mut self.pages, page),
            }
        }
        if self.spill.contains(&self.pages, page) {
            self.spill.touch(&mut self.pages, page);
        }
    }

    /// Touches `page`, then its parent, and so on to the root: tail first.
    pub(super) fn touch_upwards(&mut self, page: Option<PageId>, guard: u64) {
        let mut next = page;
        while let Some(page) = next {
            self.touch(page);
            if guard != 0 {
                self.pages[page].guard = guard;
            }
            next = self.pages.parent(page);
        }
    }

    /// A number that marks pages as not to be evicted for the allocation at hand.
    pub(super) fn next_guard(&mut self) -> u64 {
        self.guard += 1;
        self.guard
    }

    /// Memory for `bytes`, evicting colder pages as needed, but none that is marked with `guard`.
    /// `cursor` remembers pages that cannot go, so that a batch looks at each only once.
    pub(super) fn allocate(
        &mut self,
        bytes: u64,
        guard: u64,
        cursor: &mut EvictionCursor,
        out: &mut Effects,
    ) -> Option<Extent> {
        loop {
            if let Some(extent) = self.extents.allocate(bytes) {
                return Some(extent);
            }
            let Some(victim) = self.victim(guard, cursor) else {
                self.stats.alloc_failures += 1;
                return None;
            };
            self.evict(victim, out);
        }
    }

    /// The coldest page that may leave DRAM, preferring a written one among the coldest few.
    fn victim(&self, guard: u64, cursor: &mut EvictionCursor) -> Option<PageId> {
        let mut unwritten = None;
        let mut probes = 0;
        let mut next = match cursor.passed {
            Some(passed) if self.dram.contains(&self.pages, passed) => {
                self.dram.hotter(&self.pages, passed)
            }
            _ => self.dram.coldest(),
        };
        let mut blocked = true;
        while let Some(page) = next {
            let found = &self.pages[page];
            let stays = found.io > 0 || found.guard == guard;
            if !stays && found.slot.is_some() {
                return Some(page);
            }
            if !stays && self.pages.first_child(page).is_none() {
                if !self.spill.contains(&self.pages, page) {
                    return Some(unwritten.unwrap_or(page));
                }
                unwritten = unwritten.or(Some(page));
                blocked = false;
            }
            // Only a run of pages that cannot go is skipped for good.
            if blocked {
                cursor.passed = Some(page);
            }
            probes += 1;
            if unwritten.is_some() && probes >= CLEAN_PROBES_MAX {
                break;
            }
            next = self.dram.hotter(&self.pages, page);
        }
        unwritten
    }

    /// Takes a page out of DRAM; it is gone when it is not on SSD.
    pub(super) fn evict(&mut self, page: PageId, out: &mut Effects) {
        self.stats.evictions += 1;
        if self.pages[page].slot.is_some() {
            self.dram.remove(&mut self.pages, page);
            self.detach_extent(page);
        } else {
            self.drop_page(page, self.outcome_of_eviction(), out);
        }
    }

    /// Takes a page out of every tier. What still touches it keeps its bytes until it ends. From
    /// here on nobody finds what is below it, which is dropped in the turns that follow.
    pub(super) fn drop_page(&mut self, page: PageId, unwritten: SpillOutcome, out: &mut Effects) {
        if !self.pages[page].indexed {
            return;
        }
        let (namespace, hash) = (self.pages[page].namespace, self.pages[page].hash);
        self.index.remove(&mut self.pages, page);
        self.pages.orphan(page);
        let doomed = self.is_doomed(page);
        let of = self.namespaces.get_mut(namespace);
        let list = if doomed { &mut of.doomed } else { &mut of.pages };
        list.remove(&mut self.pages, page);
        let unwritten = if doomed { SpillOutcome::Superseded } else { unwritten };
        if !doomed {
            self.remember(page);
        }
        self.dram.remove(&mut self.pages, page);
        self.leave_class(page);
        if self.leave_spill(page) {
            self.stats.spilled(unwritten);
        }
        if let Some(extent) = self.pages[page].extent {
            self.draining_bytes += u64::from(extent.bytes);
        }
        if self.config.report_drops {
            out.list.push(Effect::Dropped { hash });
        }
        if self.pages.first_child(page).is_some() {
            self.cuts += 1;
            self.unsettle(page, unwritten);
        }
        self.bury(page, out);
    }

    /// Drops `page` and everything that cannot be restored without it.
    pub(super) fn drop_subtree(
        &mut self,
        page: PageId,
        unwritten: SpillOutcome,
        out: &mut Effects,
    ) {
        self.stats.subtree_drops += 1;
        self.drop_page(page, unwritten, out);
    }

    /// Has the children of a page looked at in the turns that follow: it was dropped, or has no
    /// place on SSD any more.
    pub(super) fn unsettle(&mut self, page: PageId, unwritten: SpillOutcome) {
        if !self.pages[page].unsettled {
            self.unsettled.push((page, unwritten));
        }
        self.pages.unsettle(page);
    }

    /// Looks at one child of a page that has to do without its parent or without a place on SSD.
    /// False when there is none.
    pub(super) fn settle_one(&mut self, out: &mut Effects) -> bool {
        let Some(&(page, unwritten)) = self.unsettled.last() else { return false };
        let gone = !self.pages[page].indexed;
        let child = if gone {
            self.pages.first_child(page)
        } else if self.has_place_on_ssd(page) {
            // It was offered again.
            None
        } else {
            self.pages.next_unsettled(page)
        };
        match child {
            Some(child) if gone => self.drop_page(child, unwritten, out),
            Some(child) => self.give_up_place(child, out),
            None => {
                self.unsettled.pop();
                self.pages[page].unsettled = false;
                self.bury(page, out);
            }
        }
        true
    }

    /// Frees what an unfindable page still holds, once nothing pins or touches it.
    pub(super) fn bury(&mut self, page: PageId, out: &mut Effects) {
        let found = &self.pages[page];
        if found.indexed || found.pins > 0 || found.io > 0 {
            return;
        }
        self.detach_extent(page);
        self.detach_slot(page, false, out);
        if !self.pages[page].unsettled {
            self.pages.remove(page);
        }
    }

    /// Takes a page out of the recency list of its slot size.
    fn leave_class(&mut self, page: PageId) {
        if !self.slots.is_empty() {
            let namespace = self.pages[page].namespace;
            let bytes = slot_bytes(self.namespaces.get(namespace).image_bytes);
            self.slots.recency(bytes).remove(&mut self.pages, page);
        }
    }

    /// Takes a page out of the spill set. False when it was not in it.
    pub(super) fn leave_spill(&mut self, page: PageId) -> bool {
        if !self.spill.contains(&self.pages, page) {
            return false;
        }
        self.spill.remove(&mut self.pages, page);
        let extent = self.pages[page].extent;
        self.spill_bytes -= extent.map_or(0, |extent| u64::from(extent.bytes));
        debug_assert!(extent.is_some(), "only resident pages wait to be written");
        true
    }
}

/// How far a batch of allocations has looked through the cold end of the pool.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct EvictionCursor {
    passed: Option<PageId>,
}
