//! The laws of `core`'s state, checked by walking all of it. Used by the simulator and by tests
//! after every event; far too slow for a running Manager.
//!
//! Each check panics with the law that is broken. The laws, in the order of the functions below:
//! every byte of DRAM and every slot has one owner; a list holds exactly the pages that its
//! definition names, parents hotter than their children; a page of a chain stands on a parent that
//! some tier holds; pins, copies, reads and writes are what leases, operations and tickets say;
//! budgets are the sum of the leases; credits, ranges and regions are what operations hold; each
//! page offered to SSD has one outcome or is still on its way.

use std::collections::{HashMap, HashSet};

use orbitkv_shm_protocol::ids::{PageHash, SessionId};
use orbitkv_shm_protocol::record::PageOutcome;

use super::Core;
use super::effect::{Direction, Extent, Slot};
use super::extents::UNIT_BYTES;
use super::flow::Work;
use super::in_flight::InFlight;
use super::index::PageId;
use super::job::{EntryState, Job, JobRef, Stage};
use super::limits::LONG_COPIES_PER_SESSION_MAX;
use super::namespace::{NamespaceFingerprint, NamespaceId};
use super::query::charge;
use super::session::{Scope, Session};
use super::slots::slot_bytes;

/// A page as a test sees it.
#[doc(hidden)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "fields carry the names of the page's own")]
pub struct PageView {
    pub namespace: NamespaceFingerprint,
    pub hash: PageHash,
    pub parent: Option<PageHash>,
    pub image_bytes: u32,
    /// Its whole image in DRAM.
    pub resident: Option<Extent>,
    pub slot: Option<Slot>,
    pub pins: u32,
    /// A lookup finds it.
    pub indexed: bool,
    pub unwritten: bool,
}

impl Core {
    /// Every page, findable or still held by something.
    #[doc(hidden)]
    pub fn page_views(&self) -> impl Iterator<Item = PageView> {
        self.pages.iter().map(|(id, page)| {
            let namespace = self.namespaces.get(page.namespace);
            PageView {
                namespace: namespace.fingerprint,
                hash: page.hash,
                parent: self.pages.parent(id).map(|parent| self.pages[parent].hash),
                image_bytes: namespace.image_bytes,
                resident: page.extent.filter(|_| page.is_resident()),
                slot: page.slot,
                pins: page.pins,
                indexed: page.indexed && !self.is_gone(id),
                unwritten: self.spill.contains(&self.pages, id),
            }
        })
    }

    /// Findable pages in DRAM that nothing pins, coldest first.
    #[doc(hidden)]
    pub fn eviction_order(&self) -> Vec<PageHash> {
        let order = self.dram.walk(&self.pages);
        order.into_iter().map(|page| self.pages[page].hash).collect()
    }

    /// Walks the whole state.
    ///
    /// # Panics
    /// When a law is broken.
    #[doc(hidden)]
    pub fn check_laws(&self) {
        self.check_extents();
        self.check_slots();
        self.check_lists();
        self.check_tree();
        self.check_holds();
        self.check_waiters();
        self.check_leases();
        self.check_sessions();
        self.check_spill();
    }

    /// After a [`pump`](Self::pump) nobody waits for a device that has room, or for a page that is in
    /// DRAM, or for memory to read from a device that reads nothing.
    ///
    /// # Panics
    /// When somebody does.
    #[doc(hidden)]
    pub fn check_pumped(&self) {
        let is_here = |page: PageId| self.pages[page].is_resident();
        self.flow.ssd.check_awake(
            |job| self.jobs.get(job).is_some(),
            |job| self.jobs.get(job).and_then(Job::next_page).is_some_and(is_here),
        );
        for (_, job) in self.jobs.iter() {
            let Stage::Restore { waits_for_memory: true, .. } = job.stage else { continue };
            let slot = job.next_page().and_then(|page| self.pages[page].slot);
            let reads = slot.is_none_or(|slot| self.flow.ssd.is_readable(slot.device));
            assert!(reads, "waits for memory to read what cannot be read: {job:?}");
        }
    }

    /// Pages and saves own every byte of the arenas that no free run has.
    fn check_extents(&self) {
        let mut spans: Vec<(u16, u64, u64)> = Vec::new();
        let mut held = 0;
        let mut own = |extent: &Extent, bytes: u64| {
            assert_eq!(u64::from(extent.bytes), bytes, "extent of another length than its page");
            spans.push((extent.arena, extent.offset, bytes));
            held += bytes;
        };
        for (_, page) in self.pages.iter() {
            if let Some(extent) = &page.extent {
                own(extent, charge(self.namespaces.get(page.namespace).image_bytes));
            }
        }
        for work in self.flow.under_way() {
            if let Work::Read { page, left: Some(extent), .. } = work {
                own(extent, charge(self.namespaces.get(self.pages[*page].namespace).image_bytes));
            }
        }
        for (_, job) in self.jobs.iter() {
            for entry in &job.entries {
                if let Some(extent) = &entry.extent {
                    let save = matches!(job.stage, Stage::Save { .. });
                    assert!(save && entry.outcome != PageOutcome::Stored, "{entry:?}");
                    own(extent, u64::from(extent.bytes));
                }
            }
        }
        assert_eq!(held, self.extents.capacity_bytes() - self.extents.free_bytes(), "DRAM leaks");
        spans.extend(self.extents.free_runs().map(|(arena, start, len)| {
            (arena, u64::from(start) * UNIT_BYTES, u64::from(len) * UNIT_BYTES)
        }));
        spans.sort_unstable();
        let (mut arena, mut at) = (0, 0);
        for (of, start, bytes) in spans {
            if of != arena {
                (arena, at) = (of, 0);
            }
            assert_eq!(start, at, "arena {arena}: hole or overlap at byte {at}");
            at = start + bytes;
        }
    }

    fn check_slots(&self) {
        let mut writing: Vec<Slot> = Vec::new();
        for work in self.flow.under_way() {
            if let Work::Write { slot, .. } = work {
                writing.push(*slot);
            }
        }
        let mut owned = 0;
        self.slots.check(|slot, owner| match owner {
            Some(page) => {
                owned += 1;
                assert_eq!(self.pages[page].slot, Some(slot), "slot of a page that has another");
                assert!(self.pages.is_live(page), "slot of a page that is gone");
            }
            None => {
                let at = writing.iter().position(|other| *other == slot);
                let at = at.unwrap_or_else(|| panic!("{slot:?} is taken by nobody"));
                writing.swap_remove(at);
            }
        });
        assert_eq!(writing, [], "writes into slots that are free");
        let with_slot = self.pages.iter().filter(|(_, page)| page.slot.is_some()).count();
        assert_eq!(owned, with_slot, "pages with slots that are not theirs");
        for (_, page) in self.pages.iter() {
            if let Some(slot) = page.slot {
                let image = self.namespaces.get(page.namespace).image_bytes;
                assert_eq!(slot.bytes, slot_bytes(image), "slot of another size than its page");
            }
        }
    }

    fn check_lists(&self) {
        let order = |list: Vec<PageId>| -> HashMap<PageId, usize> {
            list.into_iter().enumerate().map(|(at, page)| (page, at)).collect()
        };
        let dram = order(self.dram.walk(&self.pages));
        let spill = order(self.spill.walk(&self.pages));
        let mut classes = HashMap::new();
        for (bytes, class) in self.slots.recencies() {
            classes.insert(bytes, order(class.walk(&self.pages)));
        }
        let mut in_namespaces = 0;
        for (number, namespace) in self.namespaces.numbered() {
            for (list, doomed) in [(&namespace.pages, false), (&namespace.doomed, true)] {
                let mut older = HashSet::new();
                for id in list.walk(&self.pages) {
                    in_namespaces += 1;
                    let page = &self.pages[id];
                    assert!(page.indexed && page.namespace == number, "in a list: {page:?}");
                    assert_eq!(self.is_doomed(id), doomed, "found, or forgotten: {page:?}");
                    let parent = self.pages.parent(id);
                    let left = |above: PageId| !self.pages[above].indexed;
                    let in_order = |above| older.contains(&above) || left(above);
                    assert!(parent.is_none_or(in_order), "{page:?}");
                    older.insert(id);
                }
            }
            let waits = self.doomed.contains(&number);
            assert!(waits || namespace.doomed.is_empty(), "nobody drops {}", namespace.label);
        }
        let unsettled = self.unsettled.iter().filter(|(page, _)| self.pages[*page].unsettled);
        let marked = self.pages.iter().filter(|(_, page)| page.unsettled).count();
        assert_eq!((unsettled.count(), self.unsettled.len()), (marked, marked), "unsettled pages");
        let (mut indexed, mut spill_bytes, mut pinned, mut draining) = (0, 0, 0, 0);
        let (mut in_dram, mut in_class, mut in_spill) = (0, 0, 0);
        for (id, page) in self.pages.iter() {
            let bytes = page.extent.map_or(0, |extent| u64::from(extent.bytes));
            let free = page.indexed && page.pins == 0;
            assert_eq!(dram.contains_key(&id), free && page.is_resident(), "DRAM list: {page:?}");
            in_dram += usize::from(dram.contains_key(&id));
            let class = classes.get(&slot_bytes(self.namespaces.get(page.namespace).image_bytes));
            let member = class.is_some_and(|class| class.contains_key(&id));
            assert_eq!(member, free && !self.slots.is_empty(), "slot list: {page:?}");
            in_class += usize::from(member);
            if spill.contains_key(&id) {
                let unwritten = page.slot.is_none() && !page.writing;
                assert!(page.indexed && page.is_resident() && unwritten, "spill set: {page:?}");
                spill_bytes += bytes;
                in_spill += 1;
            }
            indexed += usize::from(page.indexed);
            pinned += if page.pins > 0 { bytes } else { 0 };
            draining += if page.indexed { 0 } else { bytes };
            assert!(!page.overtaken || page.is_resident(), "overtaken by nothing: {page:?}");
            let held = page.pins > 0 || page.io > 0 || page.unsettled;
            assert!(page.indexed || held, "held by nothing: {page:?}");
            let childless = self.pages.first_child(id).is_none();
            assert!(page.indexed || childless || page.unsettled, "nobody drops below {page:?}");
            if page.indexed {
                let found = self.find(page.namespace, &page.hash);
                let left = self.pages.ancestor(id, |above| !self.pages[above].indexed).is_some();
                assert_eq!(self.is_cut_off(id), left, "wrongly cut off, or not: {page:?}");
                assert_eq!(found == Some(id), !self.is_gone(id), "wrongly found: {page:?}");
                self.check_hotter(id, &dram, "DRAM");
                if let Some(class) = class {
                    self.check_hotter(id, class, "slot");
                }
            }
        }
        draining += self.flow.under_way().map(Work::left_bytes).sum::<u64>();
        let class_pages: usize = classes.values().map(HashMap::len).sum();
        assert_eq!((in_dram, in_class, in_spill), (dram.len(), class_pages, spill.len()));
        assert_eq!(indexed, in_namespaces, "indexed pages outside of their namespace");
        assert_eq!(indexed, self.index.len(), "index entries without pages");
        assert_eq!(spill_bytes, self.spill_bytes, "bytes of the spill set");
        assert_eq!(pinned, self.pinned_bytes, "bytes of pinned pages");
        assert_eq!(draining, self.draining_bytes, "bytes of draining pages");
    }

    /// The nearest ancestor that is in a list is hotter than the page.
    fn check_hotter(&self, id: PageId, list: &HashMap<PageId, usize>, name: &str) {
        let Some(place) = list.get(&id) else { return };
        let mut next = self.pages.parent(id);
        while let Some(ancestor) = next {
            if let Some(above) = list.get(&ancestor) {
                let (page, over) = (&self.pages[id], &self.pages[ancestor]);
                assert!(above > place, "{name} list: {page:?} is hotter than its {over:?}");
                return;
            }
            next = self.pages.parent(ancestor);
        }
    }

    fn check_tree(&self) {
        let mut counts: HashMap<_, (u64, u64)> = HashMap::new();
        for (id, page) in self.pages.iter() {
            let (dram, ssd) = counts.entry(page.namespace).or_default();
            *dram += u64::from(page.extent.is_some());
            *ssd += u64::from(page.slot.is_some());
            assert!(!page.indexed || page.is_restorable(), "in no tier: {page:?}");
            let parent = self.pages.parent(id);
            assert!(page.indexed || parent.is_none(), "in the tree without index: {page:?}");
            if let Some(over) = parent {
                let parent = &self.pages[over];
                let stands = if parent.indexed { parent.is_restorable() } else { parent.unsettled };
                assert!(stands, "{page:?} lost its parent");
                assert_eq!(parent.namespace, page.namespace);
                let settled = !parent.unsettled;
                let place = page.slot.is_none() || self.has_place_on_ssd(over) || !settled;
                assert!(place, "{page:?} is on SSD, not so {parent:?}");
            }
            for child in self.pages.children(id) {
                assert_eq!(self.pages.parent(child), Some(id), "child of another: {page:?}");
            }
        }
        let all = counts.values().fold((0, 0), |all, of| (all.0 + of.0, all.1 + of.1));
        assert_eq!((self.dram_pages, self.ssd_pages), all, "pages of all namespaces");
        for (namespace, of) in self.namespaces.numbered() {
            let counted = counts.get(&namespace).copied().unwrap_or_default();
            assert_eq!((of.dram_pages, of.ssd_pages), counted, "pages of {}", of.label);
        }
    }

    /// Pins, I/O counts and counters of work in flight.
    fn check_holds(&self) {
        let mut pins: HashMap<PageId, u32> = HashMap::new();
        for (_, lease) in self.leases.iter() {
            for leased in lease.pages.iter().filter(|leased| !leased.ended) {
                *pins.entry(leased.page).or_default() += 1;
            }
        }
        for (_, job) in self.jobs.iter() {
            for &page in &job.pinned {
                *pins.entry(page).or_default() += 1;
            }
            if let Stage::Restore { .. } = job.stage {
                for page in job.entries.iter().filter_map(|entry| entry.page) {
                    *pins.entry(page).or_default() += 1;
                }
            }
        }
        let mut io: HashMap<PageId, (u32, bool, bool)> = HashMap::new();
        let mut in_flight: HashMap<u16, InFlight> = HashMap::new();
        let mut copies: HashMap<JobRef, u32> = HashMap::new();
        for work in self.flow.under_way() {
            match work {
                Work::Free | Work::Forget { .. } => {}
                Work::Read { page, slot, bytes, left, .. } => {
                    let on = in_flight.entry(slot.device).or_default();
                    (on.reads, on.read_bytes) = (on.reads + 1, on.read_bytes + bytes);
                    let of = io.entry(*page).or_default();
                    *of = (of.0 + 1, left.is_none(), of.2);
                    let found = &self.pages[*page];
                    assert_eq!(found.overtaken, left.is_some(), "memory of a read: {found:?}");
                    assert_eq!(found.slot, Some(*slot), "a slot that is being read was let go of");
                    let answers = self.flow.ssd.is_readable(slot.device);
                    let waits = self.flow.waiters_of(found).any(|job| self.jobs.get(job).is_some());
                    assert!(answers || !waits, "waits for a device that reads nothing: {found:?}");
                }
                Work::Write { page, slot, bytes, .. } => {
                    let on = in_flight.entry(slot.device).or_default();
                    (on.writes, on.write_bytes) = (on.writes + 1, on.write_bytes + bytes);
                    let of = io.entry(*page).or_default();
                    *of = (of.0 + 1, of.1, true);
                }
                Work::Copy { job, direction, first, len, .. } => {
                    *copies.entry(*job).or_default() += 1;
                    let Some(job) = self.jobs.get(*job) else { panic!("copy of no operation") };
                    for entry in &job.entries[*first as usize..(*first + *len) as usize] {
                        assert_eq!(entry.state, EntryState::Copying);
                        match (direction, entry.page) {
                            (Direction::Restore, Some(page)) => io.entry(page).or_default().0 += 1,
                            (Direction::Restore, None) => panic!("copied page was let go of"),
                            (Direction::Save, _) => assert!(entry.extent.is_some()),
                        }
                    }
                }
            }
        }
        for (_, job) in self.jobs.iter() {
            assert!(job.copies > 0 || !job.entries.iter().any(|e| e.state == EntryState::Copying));
        }
        for (reference, job) in self.jobs.iter() {
            assert_eq!(job.copies, copies.get(&reference).copied().unwrap_or(0), "copies of a job");
        }
        for (id, page) in self.pages.iter() {
            assert_eq!(page.pins, pins.remove(&id).unwrap_or(0), "pins: {page:?}");
            let found = (page.io, page.reading, page.writing);
            assert_eq!(found, io.remove(&id).unwrap_or_default(), "I/O: {page:?}");
        }
        assert!(pins.is_empty() && io.is_empty(), "pages that are gone are held");
        let counted = |device| in_flight.get(&device).copied().unwrap_or_default();
        self.flow.check_counts(counted);
    }

    /// Operations wait for exactly the reads that will tell them.
    fn check_waiters(&self) {
        let mut waits: HashMap<JobRef, u32> = HashMap::new();
        for (_, page) in self.pages.iter() {
            let waiters: Vec<JobRef> = self.flow.waiters_of(page).collect();
            assert!(waiters.is_empty() || page.reading, "waiters of no read: {page:?}");
            for job in waiters.into_iter().filter(|&job| self.jobs.get(job).is_some()) {
                *waits.entry(job).or_default() += 1;
            }
        }
        for (reference, job) in self.jobs.iter() {
            let counted = match job.stage {
                Stage::Fill { pending, .. } => pending,
                Stage::Restore { reading, .. } => reading,
                _ => 0,
            };
            let waits = waits.get(&reference).copied().unwrap_or(0);
            assert_eq!(counted, waits, "reads that an operation waits for: {job:?}");
            self.check_progress(reference);
        }
    }

    /// Every operation whose deadline ends it is looked at in time.
    fn check_deadline(&self, job: &Job) {
        let waits = job.stop.is_none() && !job.silent;
        let ends = !matches!(job.stage, Stage::Unregister { .. });
        if waits && ends {
            assert!(self.next_deadline <= job.deadline, "nobody sees the deadline of {job:?}");
        }
    }

    /// Every operation has something under way, or stands in the queue for it.
    fn check_progress(&self, reference: JobRef) {
        let Some(job) = self.jobs.get(reference) else { return };
        self.check_deadline(job);
        let queued = job.queued_for_copy || job.queued_for_read;
        let moving = match job.stage {
            Stage::Idle => false,
            Stage::Save { .. } => job.copies > 0 || queued || job.held,
            Stage::Fill { pending, .. } => pending > 0 || queued,
            Stage::Restore { reading, waits_for_memory, .. } => {
                job.copies > 0 || reading > 0 || queued || job.held || waits_for_memory
            }
            // Their sessions list them: see `check_sessions`.
            Stage::Wait { .. } | Stage::Drain | Stage::Unregister { .. } => true,
            Stage::Forget { pending } => pending > 0,
        };
        let pages = || job.entries.iter().filter_map(|e| e.page).map(|page| &self.pages[page]);
        assert!(moving, "nothing will end {job:?} {:?}", pages().collect::<Vec<_>>());
        self.flow.check_queued(reference, job);
    }

    fn check_leases(&self) {
        let mut fills = HashMap::new();
        let mut users: HashMap<_, (u32, u64)> = HashMap::new();
        let mut hints = 0;
        for (_, job) in self.jobs.iter() {
            match job.stage {
                Stage::Fill { lease: Some(lease), .. } => {
                    assert_eq!(fills.insert(lease, job.session), None, "one lease, two queries");
                }
                Stage::Fill { lease: None, hint_bytes, .. } => hints += hint_bytes,
                Stage::Restore { lease, keep, unit_bytes, .. } => {
                    let of = users.entry(lease).or_default();
                    of.0 += 1;
                    of.1 += if keep { 0 } else { job.entries.len() as u64 * unit_bytes };
                }
                _ => {}
            }
        }
        for work in self.flow.under_way() {
            if let Work::Read { hint_bytes, .. } = work {
                hints += hint_bytes;
            }
        }
        let (mut total, mut speculative) = (0, hints);
        let mut by_session: HashMap<_, u64> = HashMap::new();
        let clocked = self.leases.clocked();
        for (id, lease) in self.leases.iter() {
            total += lease.bytes;
            speculative += if lease.speculative { lease.bytes } else { 0 };
            if let Some(session) = lease.session {
                *by_session.entry(session).or_default() += lease.bytes;
            }
            let (restores, ending_bytes) = users.remove(&id).unwrap_or_default();
            assert_eq!(lease.users, restores, "users of {lease:?}");
            let (mut live, mut bytes) = (0, ending_bytes);
            for part in &lease.parts {
                let pages = &lease.pages[part.start as usize..(part.start + part.len) as usize];
                let live_here = pages.iter().filter(|leased| !leased.ended).count();
                live += live_here;
                bytes += live_here as u64 * charge(part.image_bytes);
            }
            assert_eq!(
                (lease.live_pages as usize, lease.bytes),
                (live, bytes),
                "sums of {lease:?}"
            );
            assert_eq!(live, lease.pages.iter().filter(|leased| !leased.ended).count());
            if lease.granted {
                let of_use = lease.users > 0 || (!lease.closed && live > 0);
                assert!(of_use, "ended and still there: {lease:?}");
                assert!(lease.closed || clocked.contains(&id), "lives for ever: {lease:?}");
                let group = lease.group.is_some_and(|engine| self.sessions.group_lives(engine));
                assert!(lease.users > 0 || group, "its group is gone: {lease:?}");
            } else {
                assert!(fills.remove(&id).is_some(), "lease of no query: {lease:?}");
                assert!(!clocked.contains(&id));
            }
        }
        assert!(fills.is_empty() && users.is_empty(), "operations use leases that are gone");
        let budget = &self.budget;
        assert_eq!(total, budget.total.used(), "query budget");
        assert_eq!(speculative, budget.speculative.used(), "speculative budget");
        assert!(total <= budget.total.limit() && speculative <= budget.speculative.limit());
        for (id, session) in self.sessions.iter() {
            let leased = by_session.remove(&id).unwrap_or(0);
            assert_eq!(session.leased_bytes, leased, "bytes leased by session {id}");
            assert!(leased <= budget.session_limit);
        }
        assert!(by_session.is_empty(), "leases of sessions that are gone");
    }

    fn check_sessions(&self) {
        let mut scopes: HashMap<NamespaceId, u32> = HashMap::new();
        for scope in self.sessions.iter().flat_map(|(_, session)| &session.scopes) {
            if let Scope::One(namespace) = scope {
                *scopes.entry(*namespace).or_default() += 1;
            }
        }
        let mut pages: HashMap<NamespaceId, u32> = HashMap::new();
        for (_, page) in self.pages.iter() {
            *pages.entry(page.namespace).or_default() += 1;
        }
        for (id, namespace) in self.namespaces.numbered() {
            let counted = (scopes.get(&id).copied(), pages.get(&id).copied());
            let counted = (counted.0.unwrap_or(0), counted.1.unwrap_or(0));
            assert_eq!(
                (namespace.scopes, self.pages.len_of(id)),
                counted,
                "uses of {}",
                namespace.label
            );
        }
        for (id, session) in self.sessions.iter() {
            let of_session = || self.jobs.iter().filter(|(_, job)| job.session == id);
            let (mut outstanding, mut ranges) = (0, session.ranges.clone());
            let mut users = vec![0; session.regions.len()];
            for (reference, job) in of_session().filter(|(_, job)| !job.silent) {
                outstanding += 1 + job.cancels.len();
                let credit = &session.credits[job.operation.index as usize];
                assert_eq!(credit.job, Some(reference), "credit of {job:?}");
                assert_eq!(credit.last_generation, job.operation.generation);
                if job.range.len > 0 {
                    let at = ranges.iter().position(|range| *range == job.range);
                    ranges.swap_remove(at.expect("an operation holds its range"));
                }
                let waits = session.waiting.iter().filter(|&&other| other == reference).count();
                let drains = session.drains.iter().filter(|&&other| other == reference).count();
                let expected = match job.stage {
                    Stage::Wait { .. } => (1, 0),
                    Stage::Drain => (0, 1),
                    _ => (0, 0),
                };
                assert_eq!((waits, drains), expected, "queues of {job:?}");
                match job.stage {
                    Stage::Save { region, .. } | Stage::Restore { region, .. } => {
                        users[region.0 as usize] += 1;
                    }
                    Stage::Unregister { region } => {
                        let ending = session.regions[region.0 as usize].as_ref();
                        assert_eq!(ending.and_then(|region| region.ending), Some(reference));
                    }
                    _ => {}
                }
            }
            assert_eq!(session.outstanding as usize, outstanding, "outstanding of session {id}");
            assert_eq!(ranges, [], "ranges of session {id} that no operation holds");
            for (region, users) in session.regions.iter().zip(users) {
                assert_eq!(region.as_ref().map_or(0, |region| region.users), users);
            }
            self.check_copies_of(id, session);
            assert!(!session.closing || outstanding > 0 || session.copies > 0, "{id} has ended");
            let turns = self.sessions.turn.iter().filter(|&&other| other == id).count();
            let waits = usize::from(!session.waiting.is_empty());
            assert_eq!(turns, waits, "turns of session {id}");
            let waiting = session.waiting.iter().chain(&session.drains);
            assert!(waiting.into_iter().all(|&job| self.jobs.get(job).is_some()));
        }
    }

    /// Counts of copies, who waits for one of the long ones to end, and whose the events are.
    fn check_copies_of(&self, id: SessionId, session: &Session) {
        let (mut copies, mut long) = (0, [0; 2]);
        for work in self.flow.under_way() {
            if let Work::Copy { session, direction, long: is_long, .. } = work
                && *session == id
            {
                copies += 1;
                long[*direction as usize] += u32::from(*is_long);
            }
        }
        assert_eq!((session.copies, session.long_copies), (copies, long), "copies of session {id}");
        assert!(long.iter().all(|&long| long <= LONG_COPIES_PER_SESSION_MAX));
        let mut held: Vec<_> = session.held.iter().flatten().copied().collect();
        let mut taken = vec![false; session.events.len()];
        for (reference, job) in self.jobs.iter().filter(|(_, job)| job.session == id) {
            if job.held {
                let at = held.iter().position(|&other| other == reference);
                held.swap_remove(at.expect("nobody wakes a held operation"));
            }
            if let Some(fence) = job.fence {
                let before = std::mem::replace(&mut taken[fence.index as usize], true);
                assert!(!before, "two operations have one event");
                assert!(fence.passed || job.copies <= 1, "copies beside one that waits: {job:?}");
            }
        }
        assert_eq!(held, [], "operations that are not held wait in session {id}");
        assert_eq!(session.events, taken, "events of session {id}");
    }

    /// Each offer has one outcome, waits, or is being written.
    fn check_spill(&self) {
        let stats = self.stats();
        let ended: u64 = stats.spill.iter().sum();
        let on_its_way = self.spill.len() as u64 + u64::from(self.flow.ssd.total().writes);
        assert_eq!(stats.spill_offered, ended + on_its_way, "offers to SSD");
        for page in self.spill.walk(&self.pages) {
            let Some(parent) = self.pages.parent(page) else { continue };
            let goes = self.has_place_on_ssd(parent) || self.pages[parent].unsettled;
            assert!(goes, "waits for a write that cannot come: {:?}", self.pages[page]);
        }
    }
}
