//! Saves: memory first, then the copy, then the commit in chain order.
//!
//! A page is in no index before its bytes are complete, so nobody can hit a half-made page; two
//! saves of one page copy side by side and the second commit finds the first. A page that is just
//! being read from SSD is not present yet: its read may fail, or never end. Its commit overtakes the
//! read: the saved image is the page's, and the read keeps the memory that it fills until it ends.

use orbitkv_shm_protocol::bootstrap::message::DependencySpec;
use orbitkv_shm_protocol::ids::{PageHash, RegionId};
use orbitkv_shm_protocol::record::{Code, Completion, PageEntry, PageOutcome, Status, Tier, flags};

use super::effect::Effects;
use super::event::Nanos;
use super::index::PageId;
use super::job::{Entry, EntryState, JobRef, Stage};
use super::life::EvictionCursor;
use super::namespace::NamespaceId;
use super::query::charge;
use super::{Core, Taken};

impl Core {
    pub(super) fn begin_save(
        &mut self,
        ctx: &Taken,
        ended: Completion,
        region: RegionId,
        fence: Option<u32>,
        pages: &[PageEntry],
        out: &mut Effects,
    ) {
        let Some(session) = self.sessions.get_mut(ctx.session) else { return };
        let Some(found) = session.region(region) else {
            return self.fail(ctx, ended, Code::UnknownRegion, out);
        };
        let (namespace, device_pages) = (found.namespace, found.device_pages);
        let fenced = found.kind.needs_fence();
        let known = flags::ENTRY_ANCHOR | flags::ENTRY_ROOT;
        let in_range = |entry: &PageEntry| entry.is_anchor() || entry.device_page < device_pages;
        let well_formed = |entry: &PageEntry| entry.flags & !known == 0 && entry.reserved == 0;
        let ends_in_anchor = pages.last().is_some_and(PageEntry::is_anchor);
        if ends_in_anchor || !pages.iter().all(|entry| in_range(entry) && well_formed(entry)) {
            return self.refuse_entries(ctx, ended, out);
        }
        let good = match fence {
            Some(index) => session.event_is_free(index),
            None => !fenced,
        };
        if !good {
            return self.fail(ctx, ended, Code::BadFence, out);
        }
        if pages.is_empty() {
            return self.complete(ctx, Completion { prepared_ns: ctx.now, ..ended }, out);
        }
        if let Some(found) = session.region_mut(region) {
            found.users += 1;
        }
        let forgets = self.namespaces.get(namespace).forgets;
        let stage = Stage::Save { region, namespace, forgets, next_issue: 0, next_commit: 0 };
        let reference = self.open_job(ctx, &ended, stage);
        self.take_fence(reference, fence);
        let mut entries = match self.jobs.get_mut(reference) {
            Some(job) => std::mem::take(&mut job.entries),
            None => return,
        };
        entries.extend(pages.iter().enumerate().map(|(at, entry)| {
            let state = if entry.is_anchor() { EntryState::Anchor } else { EntryState::Pending };
            let mut made = Entry::new(PageHash(entry.hash), entry.device_page, state);
            made.root = at == 0 || entry.is_root();
            made
        }));
        self.reserve_save(namespace, &mut entries, reference, out);
        if let Some(job) = self.jobs.get_mut(reference) {
            job.entries = entries;
        }
        self.queue_copy(reference);
        self.save_advanced(ctx.now, reference, out);
    }

    /// Decides for each page whether it is present, gets memory, or is refused with its chain.
    fn reserve_save(
        &mut self,
        namespace: NamespaceId,
        entries: &mut [Entry],
        reference: JobRef,
        out: &mut Effects,
    ) {
        let bytes = charge(self.namespaces.get(namespace).image_bytes);
        let chained = self.namespaces.get(namespace).dependency == Some(DependencySpec::Chain);
        let guard = self.next_guard();
        // The chain's own pages become the hottest first, so that they go last of all.
        self.guard_chain(namespace, entries, guard, reference);
        let mut cursor = EvictionCursor::default();
        let mut broken = false;
        for at in 0..entries.len() {
            if entries[at].state == EntryState::Anchor {
                broken = chained && self.find(namespace, &entries[at].hash).is_none();
                continue;
            }
            if entries[at].root && (at == 0 || entries[at - 1].state != EntryState::Anchor) {
                broken = false;
            }
            if broken && chained {
                entries[at].end(PageOutcome::Refused, Code::ParentAbsent);
                continue;
            }
            let present = self.find(namespace, &entries[at].hash);
            if let Some(page) = present.filter(|&page| self.pages[page].is_resident()) {
                entries[at].end(PageOutcome::Present, Code::None);
                entries[at].tier = Tier::Dram;
                self.pages[page].guard = guard;
                continue;
            }
            match self.allocate(bytes, guard, &mut cursor, out) {
                Some(extent) => entries[at].extent = Some(extent),
                None => {
                    entries[at].end(PageOutcome::Refused, Code::NoMemory);
                    broken = true;
                }
            }
        }
        self.align_extents(entries);
    }

    /// Gives the memory that the pages of a save got to them in its order: a device moves pages that
    /// follow each other on both sides by few orders, and large extents are cut from the back.
    fn align_extents(&mut self, entries: &mut [Entry]) {
        let mut extents = std::mem::take(&mut self.extents_of_save);
        extents.extend(entries.iter().filter_map(|entry| entry.extent));
        extents.sort_unstable_by_key(|extent| (extent.arena, extent.offset));
        let holders = entries.iter_mut().filter_map(|entry| entry.extent.as_mut());
        holders.zip(extents.drain(..)).for_each(|(held, extent)| *held = extent);
        self.extents_of_save = extents;
    }

    /// Touches what exists of the chains, tail first, marks it, and pins the parents that the
    /// range starts from.
    fn guard_chain(
        &mut self,
        namespace: NamespaceId,
        entries: &[Entry],
        guard: u64,
        reference: JobRef,
    ) {
        for entry in entries.iter().rev() {
            let Some(page) = self.find(namespace, &entry.hash) else { continue };
            if entry.state == EntryState::Anchor {
                self.pin(page);
                if let Some(job) = self.jobs.get_mut(reference) {
                    job.pinned.push(page);
                }
            }
            // The first page found of a chain reaches all of its ancestors.
            if self.pages[page].guard != guard {
                self.touch_upwards(Some(page), guard);
            }
        }
    }

    /// Commits what has been copied, in chain order; ends the save when nothing is left.
    pub(super) fn save_advanced(&mut self, now: Nanos, reference: JobRef, out: &mut Effects) {
        let Some(job) = self.jobs.get_mut(reference) else { return };
        let Stage::Save { namespace, forgets, next_commit, .. } = job.stage else { return };
        let (copies, stopped, abandoned) = (job.copies, job.stop, job.abandoned);
        let mut entries = std::mem::take(&mut job.entries);
        let forgotten = self.namespaces.get(namespace).forgets != forgets;
        let mut at = next_commit as usize;
        let mut overtaken = Vec::new();
        while at < entries.len() {
            match entries[at].state {
                EntryState::Pending | EntryState::Copying => break,
                // Of an engine that is gone nobody knows whether it still wrote these bytes.
                EntryState::Copied if abandoned => {}
                EntryState::Copied if forgotten => {
                    entries[at].end(PageOutcome::Refused, Code::Forgotten);
                }
                EntryState::Copied => overtaken.extend(self.commit(namespace, &mut entries, at)),
                EntryState::Anchor | EntryState::Ended => {}
            }
            at += 1;
        }
        let all_done = at == entries.len();
        let more = entries[at..].iter().any(|entry| entry.state == EntryState::Pending);
        if let Some(job) = self.jobs.get_mut(reference) {
            job.entries = entries;
            if let Stage::Save { next_commit, .. } = &mut job.stage {
                *next_commit = at as u32;
            }
        }
        for page in overtaken {
            self.overtake(now, page, out);
        }
        if copies == 0 && (all_done || stopped.is_some()) {
            self.finish_save(now, reference, out);
        } else if more && stopped.is_none() {
            self.queue_copy(reference);
        }
    }

    /// Makes a copied image a page that queries find. Returns one whose read others wait for, when
    /// that is overtaken by it.
    fn commit(
        &mut self,
        namespace: NamespaceId,
        entries: &mut [Entry],
        at: usize,
    ) -> Option<PageId> {
        let extent = entries[at].extent.take()?;
        let (hash, checksum) = (entries[at].hash, entries[at].checksum);
        let existing = self.find(namespace, &hash);
        let page = match existing {
            Some(page) if self.pages[page].is_resident() => {
                self.free_memory(extent);
                entries[at].end(PageOutcome::Present, Code::None);
                entries[at].tier = Tier::Dram;
                return None;
            }
            Some(page) => page,
            None => match self.parent_of(namespace, entries, at) {
                Ok(parent) => self.insert_page(namespace, hash, parent),
                Err(()) => {
                    self.free_memory(extent);
                    entries[at].end(PageOutcome::Refused, Code::ParentAbsent);
                    return None;
                }
            },
        };
        let overtakes = self.pages[page].reading;
        if overtakes {
            self.replace_extent(page, extent);
        } else {
            self.attach_extent(page, extent);
        }
        self.pages[page].checksum = checksum;
        self.wake_wanting(page);
        entries[at].end(PageOutcome::Stored, Code::None);
        entries[at].tier = Tier::Dram;
        self.stats.bytes_saved += u64::from(self.namespaces.get(namespace).image_bytes);
        // The end of the save makes the chain the hottest; until then no page may be hotter than
        // its parent.
        self.place(page);
        self.offer(page);
        overtakes.then_some(page)
    }

    /// The parent of an entry's page: none for a root or where the namespace has no chains.
    fn parent_of(
        &self,
        namespace: NamespaceId,
        entries: &[Entry],
        at: usize,
    ) -> Result<Option<PageId>, ()> {
        if self.namespaces.get(namespace).dependency != Some(DependencySpec::Chain) {
            return Ok(None);
        }
        let before = at.checked_sub(1).map(|before| &entries[before]);
        let after_anchor = before.is_some_and(|entry| entry.state == EntryState::Anchor);
        if entries[at].root && !after_anchor {
            return Ok(None);
        }
        let Some(before) = before else { return Ok(None) };
        self.find(namespace, &before.hash).map(Some).ok_or(())
    }

    fn finish_save(&mut self, now: Nanos, reference: JobRef, out: &mut Effects) {
        let Some(job) = self.jobs.get_mut(reference) else { return };
        let Stage::Save { region, namespace, .. } = job.stage else { return };
        let mut entries = std::mem::take(&mut job.entries);
        let mut pinned = std::mem::take(&mut job.pinned);
        let (id, operation, kind, stop) = (job.session, job.operation, job.kind, job.stop);
        let code = stop.map_or(Code::None, |stop| stop.code);
        let mut ended = Completion::ok(operation, kind);
        let mut first_refusal = Code::None;
        for entry in &mut entries {
            if let Some(extent) = entry.extent.take() {
                self.free_memory(extent);
            }
            if matches!(entry.state, EntryState::Pending | EntryState::Copied) {
                entry.end(PageOutcome::Refused, code);
            }
            match entry.outcome {
                PageOutcome::Stored => ended.pages += 1,
                PageOutcome::Present => ended.pages_present += 1,
                PageOutcome::Refused => {
                    ended.pages_refused += 1;
                    self.stats.refused(entry.code);
                    if first_refusal == Code::None {
                        first_refusal = entry.code;
                    }
                }
                _ => {}
            }
        }
        self.stats.pages_saved += u64::from(ended.pages);
        self.stats.pages_present += u64::from(ended.pages_present);
        for page in pinned.drain(..).rev() {
            self.unpin(page, out);
            // No lookup finds it below when it was forgotten meanwhile.
            if self.pages[page].indexed && self.is_gone(page) {
                self.touch_upwards(Some(page), 0);
            }
        }
        self.refresh_chains(namespace, &entries);
        let image = self.namespaces.get(namespace).image_bytes;
        ended.bytes = u64::from(ended.pages) * u64::from(image);
        let done = ended.pages + ended.pages_present;
        let code = if code == Code::None { first_refusal } else { code };
        let mut ended = Self::stopped(code, done, ended);
        if ended.pages_refused == 0 {
            (ended.status, ended.code) = (Status::Ok, Code::None);
        }
        if let Some(job) = self.jobs.get_mut(reference) {
            job.entries = entries;
            job.pinned = pinned;
        }
        self.end_job(now, reference, ended, out);
        self.leave_region(now, id, region, out);
    }

    /// Touches every chain of the range, tail first, parents outside of it included.
    fn refresh_chains(&mut self, namespace: NamespaceId, entries: &[Entry]) {
        let guard = self.next_guard();
        for entry in entries.iter().rev() {
            if let Some(page) = self.find(namespace, &entry.hash)
                && self.pages[page].guard != guard
            {
                self.touch_upwards(Some(page), guard);
            }
        }
    }
}
