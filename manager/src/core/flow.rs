//! What is copied and read next: fair turns between operations, bounded work in flight.
//!
//! Operations with work to hand out stand in a queue; each gets one bounded command a turn, so a
//! large restore never convoys a small one.

use std::collections::VecDeque;

use orbitkv_shm_protocol::ids::SessionId;
use orbitkv_shm_protocol::record::{Code, Completion, PageOutcome, Status};

use super::effect::{CopyPage, Direction, Effect, Effects, Extent, FenceWait, ImageIdentity, Slot};
use super::event::{CopyFault, IoFault, Nanos, Ticket};
use super::in_flight::{Devices, InFlight, Urgency};
use super::index::{Page, PageId};
use super::job::{Entry, EntryState, Fence, Job, JobRef, Stage};
use super::life::EvictionCursor;
use super::limits::{COPIES_IN_FLIGHT_MAX, LONG_COPIES_PER_SESSION_MAX};
use super::query::charge;
use super::registration::RegionKind;
use super::stats::SpillOutcome;
use super::{Core, CoreConfig};

/// Copy commands in flight of one operation.
const COPIES_PER_JOB_MAX: u32 = 2;
const NIL: u32 = u32::MAX;

/// See [`super::Event::Copied`].
pub(super) struct CopyEnded<'a> {
    pub(super) ticket: Ticket,
    pub(super) pages_done: u32,
    pub(super) fault: Option<CopyFault>,
    pub(super) ended_ns: Nanos,
    pub(super) checksums: &'a [u64],
}

/// Work that was ordered and has not ended.
#[derive(Debug)]
pub(super) enum Work {
    Free,
    Copy {
        job: JobRef,
        session: SessionId,
        direction: Direction,
        first: u32,
        len: u32,
        /// Its session counts it, see [`LONG_COPIES_PER_SESSION_MAX`].
        long: bool,
    },
    Read {
        page: PageId,
        slot: Slot,
        bytes: u64,
        /// What it fills, when that is the page's no more: see [`Page::overtaken`].
        left: Option<Extent>,
        /// Bytes of hints that are over but for this read.
        hint_bytes: u64,
    },
    Write {
        page: PageId,
        slot: Slot,
        image: ImageIdentity,
        bytes: u64,
    },
    Forget {
        job: Option<JobRef>,
    },
}

impl Work {
    /// Bytes of memory that it alone holds.
    pub(super) fn left_bytes(&self) -> u64 {
        match self {
            Self::Read { left: Some(extent), .. } => extent.bytes.into(),
            _ => 0,
        }
    }
}

/// An operation that waits for a page to be read.
#[derive(Clone, Copy, Debug)]
struct Waiter {
    job: JobRef,
    /// Query position, or entry of a restore.
    position: u32,
    next: u32,
}

/// Queues, tickets and counts of everything in flight.
#[derive(Debug)]
pub(super) struct Flow {
    work: Vec<(u32, Work)>,
    free: Vec<u32>,
    waiters: Vec<Waiter>,
    free_waiters: Vec<u32>,
    saves: VecDeque<JobRef>,
    restores: VecDeque<JobRef>,
    /// Restores without memory for their next read.
    pub(super) starved: VecDeque<JobRef>,
    /// Memory was freed or let go of since they last tried, or they need none any more.
    pub(super) memory_moved: bool,
    /// Without the long ones, which their sessions count.
    copies_in_flight: [u32; 2],
    long_copies_in_flight: u32,
    /// Records of forgets that are not on SSD yet.
    forgets: usize,
    pub(super) ssd: Devices,
}

impl Flow {
    pub(super) fn new(config: &CoreConfig) -> Self {
        Self {
            work: Vec::new(),
            free: Vec::new(),
            waiters: Vec::new(),
            free_waiters: Vec::new(),
            saves: VecDeque::new(),
            restores: VecDeque::new(),
            starved: VecDeque::new(),
            memory_moved: false,
            copies_in_flight: [0; 2],
            long_copies_in_flight: 0,
            forgets: 0,
            ssd: Devices::new(config),
        }
    }

    pub(super) fn start(&mut self, work: Work) -> Ticket {
        let index = self.free.pop().unwrap_or_else(|| {
            self.work.push((1, Work::Free));
            self.work.len() as u32 - 1
        });
        self.forgets += usize::from(matches!(work, Work::Forget { .. }));
        let slot = &mut self.work[index as usize];
        slot.1 = work;
        Ticket(u64::from(slot.0) << 32 | u64::from(index))
    }

    /// Ends a ticket. `Work::Free` when it names nothing in flight.
    pub(super) fn end(&mut self, ticket: Ticket) -> Work {
        let (serial, index) = ((ticket.0 >> 32) as u32, ticket.0 as u32);
        let Some(slot) = self.work.get_mut(index as usize) else { return Work::Free };
        if slot.0 != serial || matches!(slot.1, Work::Free) {
            return Work::Free;
        }
        slot.0 = slot.0.wrapping_add(1);
        self.free.push(index);
        let ended = std::mem::replace(&mut slot.1, Work::Free);
        self.forgets -= usize::from(matches!(ended, Work::Forget { .. }));
        ended
    }

    pub(super) fn forgets(&self) -> usize {
        self.forgets
    }

    pub(super) fn copies_in_flight(&self) -> u32 {
        self.copies_in_flight.iter().sum::<u32>() + self.long_copies_in_flight
    }

    /// Lets the read of a page keep the memory that it fills.
    pub(super) fn leave_to_read(&mut self, of: PageId, extent: Extent) {
        let reads = self.work.iter_mut().find_map(|(_, work)| match work {
            Work::Read { page, left, .. } if *page == of => Some(left),
            _ => None,
        });
        debug_assert!(reads.is_some(), "no read fills it");
        if let Some(left) = reads {
            *left = Some(extent);
        }
    }

    /// Leaves the bytes of a hint to the reads of its pages that have not ended, each page as often
    /// as the hint holds it; returns how many bytes those are.
    pub(super) fn leave_hint(
        &mut self,
        held: impl Iterator<Item = PageId> + Clone,
        image_bytes: impl Fn(PageId) -> u64,
    ) -> u64 {
        let mut left_bytes = 0;
        for (_, work) in &mut self.work {
            if let Work::Read { page, hint_bytes, .. } = work {
                let times = held.clone().filter(|held| held == page).count() as u64;
                let bytes = times * image_bytes(*page);
                *hint_bytes += bytes;
                left_bytes += bytes;
            }
        }
        left_bytes
    }

    /// Everything that was ordered and has not ended.
    pub(super) fn under_way(&self) -> impl Iterator<Item = &Work> {
        self.work.iter().map(|(_, work)| work).filter(|work| !matches!(work, Work::Free))
    }

    /// Operations that wait for the read of `page`. For checks.
    pub(super) fn waiters_of(&self, page: &Page) -> impl Iterator<Item = JobRef> {
        let waiter = |at: u32| (at != NIL).then(|| self.waiters[at as usize]);
        let first = waiter(page.waiters);
        std::iter::successors(first, move |found| waiter(found.next)).map(|found| found.job)
    }

    /// Panics unless the counters are what was counted. For tests.
    pub(super) fn check_counts(&self, counted: impl Fn(u16) -> InFlight) {
        self.ssd.check(counted);
        for direction in [Direction::Save, Direction::Restore] {
            let of = |work: &&Work| matches!(work, Work::Copy { direction: d, long: false, .. } if *d == direction);
            let counted = self.under_way().filter(of).count();
            assert_eq!(self.copies_in_flight[direction as usize] as usize, counted, "copies");
        }
        let long = |work: &&Work| matches!(work, Work::Copy { long: true, .. });
        let counted = self.under_way().filter(long).count();
        assert_eq!(self.long_copies_in_flight as usize, counted, "long copies");
        let forgets = self.under_way().filter(|work| matches!(work, Work::Forget { .. }));
        assert_eq!(self.forgets, forgets.count(), "forgets");
    }

    /// Panics unless the marks of a job say in which queues it stands. For tests.
    pub(super) fn check_queued(&self, reference: JobRef, job: &Job) {
        let stands = |queue: &VecDeque<JobRef>| queue.iter().filter(|&&r| r == reference).count();
        let copies = stands(&self.saves) + stands(&self.restores);
        assert_eq!(copies, usize::from(job.queued_for_copy), "copy queue: {job:?}");
        let reads = self.ssd.stands(reference);
        assert_eq!(reads, usize::from(job.queued_for_read), "read queue: {job:?}");
        if let Stage::Restore { waits_for_memory: true, .. } = job.stage {
            assert!(stands(&self.starved) > 0, "nobody feeds {job:?}");
        }
    }
}

impl Core {
    /// Puts a job into the queue for its next copy, once.
    pub(super) fn queue_copy(&mut self, reference: JobRef) {
        let Some(job) = self.jobs.get_mut(reference) else { return };
        if job.queued_for_copy {
            return;
        }
        job.queued_for_copy = true;
        match job.stage {
            Stage::Save { .. } => self.flow.saves.push_back(reference),
            _ => self.flow.restores.push_back(reference),
        }
    }

    /// Keeps an event for the first copy of a job.
    pub(super) fn take_fence(&mut self, reference: JobRef, index: Option<u32>) {
        let (Some(index), Some(job)) = (index, self.jobs.get_mut(reference)) else { return };
        job.fence = Some(Fence { index, passed: false });
        if let Some(session) = self.sessions.get_mut(job.session) {
            session.events[index as usize] = true;
        }
    }

    /// Puts operations that waited for a long copy of their session to end back into their queues,
    /// as many as may have one now.
    pub(super) fn wake_held(&mut self, id: SessionId) {
        for direction in [Direction::Save, Direction::Restore] {
            let at = direction as usize;
            let Some(session) = self.sessions.get_mut(id) else { return };
            let room = LONG_COPIES_PER_SESSION_MAX - session.long_copies[at];
            for _ in 0..room {
                let held = self.sessions.get_mut(id).and_then(|s| s.held[at].pop_front());
                let Some(reference) = held else { break };
                if let Some(job) = self.jobs.get_mut(reference) {
                    job.held = false;
                }
                self.queue_copy(reference);
            }
        }
    }

    /// Puts a job into the queue for its next read, once.
    pub(super) fn queue_read(&mut self, reference: JobRef) {
        let Some(job) = self.jobs.get_mut(reference) else { return };
        if !job.queued_for_read {
            job.queued_for_read = true;
            let hint = match job.stage {
                Stage::Fill { lease: Some(lease), .. } => {
                    self.leases.get(lease).is_some_and(|lease| lease.speculative)
                }
                Stage::Fill { lease: None, .. } => true,
                _ => false,
            };
            let urgency = if hint { Urgency::Hint } else { Urgency::Demand };
            let lives = |job: JobRef| self.jobs.get(job).is_some();
            self.flow.ssd.queue(reference, urgency, lives);
        }
    }

    pub(super) fn pump_copies(&mut self, now: Nanos, out: &mut Effects) {
        for direction in [Direction::Save, Direction::Restore] {
            while self.flow.copies_in_flight[direction as usize] < COPIES_IN_FLIGHT_MAX {
                let queue = match direction {
                    Direction::Save => &mut self.flow.saves,
                    Direction::Restore => &mut self.flow.restores,
                };
                let Some(reference) = queue.pop_front() else { break };
                let Some(job) = self.jobs.get_mut(reference) else { continue };
                job.queued_for_copy = false;
                if job.stop.is_some() || job.copies >= COPIES_PER_JOB_MAX {
                    continue;
                }
                if self.issue_copy(now, reference, direction, out) {
                    self.queue_copy(reference);
                }
            }
        }
    }

    /// Orders the next command of a job. True when it may have another.
    fn issue_copy(
        &mut self,
        now: Nanos,
        reference: JobRef,
        direction: Direction,
        out: &mut Effects,
    ) -> bool {
        let Some(job) = self.jobs.get_mut(reference) else { return false };
        let fence = job.fence_ahead().map(|index| FenceWait { index, until: job.deadline });
        let (region, by_layer, whole, next_issue) = match &mut job.stage {
            Stage::Save { region, next_issue, .. } => (*region, false, false, next_issue),
            // What is all there goes out as one: layers cannot be in order otherwise.
            Stage::Restore { region, next_issue, by_layer, streaming, .. } => {
                (*region, *by_layer, *by_layer && !*streaming, next_issue)
            }
            _ => return false,
        };
        if fence.is_some() && job.copies > 0 {
            return false;
        }
        let session = job.session;
        let kind = self.sessions.get(session).and_then(|found| Some(found.region(region)?.kind));
        let quantum = match kind {
            Some(RegionKind::Gpu) => self.config.gpu_copy_quantum_bytes,
            Some(RegionKind::Host) | None => self.config.copy_quantum_bytes,
        };
        let long = fence.is_some() || whole;
        if let Some(found) = self.sessions.get_mut(session)
            && long
            && found.long_copies[direction as usize] >= LONG_COPIES_PER_SESSION_MAX
        {
            if !job.held {
                job.held = true;
                found.held[direction as usize].push_back(reference);
            }
            return false;
        }
        let pages_start = out.copies.len();
        let total = job.entries.len() as u32;
        let (mut bytes, mut at) = (0_u64, *next_issue);
        let mut first = None;
        while at < total {
            let entry = &job.entries[at as usize];
            if entry.state != EntryState::Pending {
                if first.is_some() {
                    break;
                }
                at += 1;
                continue;
            }
            let extent = match direction {
                Direction::Save => entry.extent,
                Direction::Restore => {
                    let page = entry.page.map(|page| &self.pages[page]);
                    page.filter(|page| page.is_resident()).and_then(|page| page.extent)
                }
            };
            let Some(extent) = extent else { break };
            let len = u64::from(extent.bytes);
            if first.is_some() && !whole && bytes + len > quantum {
                break;
            }
            bytes += len;
            first = first.or(Some(at));
            out.copies.push(CopyPage { device_page: entry.device_page, extent });
            at += 1;
        }
        let Some(first) = first else {
            return false;
        };
        let last = !job.entries[at as usize..].iter().any(|e| e.state == EntryState::Pending);
        if direction == Direction::Restore && last && job.copies > 0 {
            // The command that carries the done word goes out alone, so that the word never
            // says "done" beside an earlier command that failed.
            out.copies.truncate(pages_start);
            return false;
        }
        *next_issue = at;
        for entry in &mut job.entries[first as usize..at as usize] {
            entry.state = EntryState::Copying;
            if direction == Direction::Restore
                && let Some(page) = entry.page
            {
                self.pages[page].io += 1;
            }
        }
        job.copies += 1;
        if job.prepared_ns == 0 {
            job.prepared_ns = now;
        }
        let refused = |entry: &Entry| entry.outcome == PageOutcome::Refused;
        let completes = direction == Direction::Restore && last && !job.entries.iter().any(refused);
        let done = completes.then_some(job.operation);
        let len = at - first;
        let work = Work::Copy { job: reference, session, direction, first, len, long };
        let ticket = self.flow.start(work);
        self.count_copy(session, direction, long);
        let pages = pages_start..out.copies.len();
        out.list.push(Effect::Copy {
            ticket,
            direction,
            session,
            region,
            pages,
            fence,
            done,
            by_layer,
        });
        !last
    }

    fn count_copy(&mut self, session: SessionId, direction: Direction, long: bool) {
        match long {
            true => self.flow.long_copies_in_flight += 1,
            false => self.flow.copies_in_flight[direction as usize] += 1,
        }
        if let Some(session) = self.sessions.get_mut(session) {
            session.copies += 1;
            session.long_copies[direction as usize] += u32::from(long);
        }
    }

    fn count_copy_end(&mut self, session: SessionId, direction: Direction, long: bool) {
        match long {
            true => self.flow.long_copies_in_flight -= 1,
            false => self.flow.copies_in_flight[direction as usize] -= 1,
        }
        if let Some(session) = self.sessions.get_mut(session) {
            session.copies -= 1;
            session.long_copies[direction as usize] -= u32::from(long);
        }
    }

    pub(super) fn copied(&mut self, now: Nanos, end: &CopyEnded<'_>, out: &mut Effects) {
        let CopyEnded { ticket, pages_done, fault, ended_ns, checksums } = *end;
        let Work::Copy { job: reference, session, direction, first, len, long } =
            self.flow.end(ticket)
        else {
            return;
        };
        self.count_copy_end(session, direction, long);
        if long {
            self.wake_held(session);
        }
        let Some(job) = self.jobs.get_mut(reference) else { return };
        if fault.is_none()
            && let Some(fence) = &mut job.fence
        {
            fence.passed = true;
        }
        job.copies -= 1;
        job.copied_ns = ended_ns;
        let code = match fault {
            None => Code::None,
            Some(CopyFault::Fence) => Code::BadFence,
            Some(CopyFault::FenceTimeout) => job.stop.map_or(Code::Deadline, |stop| stop.code),
            Some(CopyFault::Peer | CopyFault::Device) => Code::DeviceError,
        };
        let done = if fault.is_none() { len } else { pages_done.min(len) };
        for offset in 0..len {
            let entry = &mut job.entries[(first + offset) as usize];
            let good = offset < done;
            match direction {
                Direction::Save if good => {
                    entry.state = EntryState::Copied;
                    entry.checksum = checksums.get(offset as usize).copied();
                }
                Direction::Restore if good => entry.end(PageOutcome::Restored, Code::None),
                _ => entry.end(PageOutcome::Refused, code),
            }
        }
        if fault.is_some() {
            job.stop_at(code, Some(first + done));
        }
        match direction {
            Direction::Save => self.save_advanced(now, reference, out),
            Direction::Restore => self.restore_advanced(now, reference, first, len, out),
        }
        self.session_may_rest(now, session, out);
    }

    pub(super) fn pump_reads(&mut self, now: Nanos, out: &mut Effects) {
        let Self { flow, jobs, pages, .. } = self;
        flow.ssd.look_again(|reader| {
            let next = jobs.get(reader).and_then(Job::next_page);
            next.is_none_or(|page| pages[page].is_resident())
        });
        loop {
            self.feed_starved();
            self.give_read_turns(now, out);
            // What ended meanwhile may have let go of memory that somebody waits for.
            if !self.flow.memory_moved || self.flow.starved.is_empty() {
                return;
            }
        }
    }

    fn give_read_turns(&mut self, now: Nanos, out: &mut Effects) {
        // Each job gets one page a turn; one that cannot go on leaves the queue.
        while let Some((reference, urgency)) = self.flow.ssd.next_reader() {
            let Some(job) = self.jobs.get_mut(reference) else { continue };
            job.queued_for_read = false;
            if job.stop.is_some_and(|stop| stop.code != Code::OverBudget) {
                continue;
            }
            let turn = match job.stage {
                Stage::Fill { .. } => self.issue_fill(now, reference, urgency, out),
                Stage::Restore { .. } => self.issue_restore_read(now, reference, urgency, out),
                _ => ReadTurn::Over,
            };
            match turn {
                ReadTurn::More => self.queue_read(reference),
                ReadTurn::NoRoom(device) => self.wait_for_room(device, reference, urgency),
                ReadTurn::Over => {}
            }
        }
    }

    /// A job gets its next turn to read when a device can take more.
    fn wait_for_room(&mut self, device: u16, reference: JobRef, urgency: Urgency) {
        let Some(job) = self.jobs.get_mut(reference) else { return };
        job.queued_for_read = true;
        let lives = |job: JobRef| self.jobs.get(job).is_some();
        self.flow.ssd.wait_for(device, reference, urgency, lives);
    }

    /// Orders the next read of a query or hint.
    fn issue_fill(
        &mut self,
        now: Nanos,
        reference: JobRef,
        urgency: Urgency,
        out: &mut Effects,
    ) -> ReadTurn {
        let Some(job) = self.jobs.get_mut(reference) else { return ReadTurn::Over };
        let window = self.config.read_window_bytes;
        let Stage::Fill { next_issue, pending, cut, .. } = &mut job.stage else {
            return ReadTurn::Over;
        };
        let at = job.fill.get(*next_issue as usize).copied().filter(|fill| fill.position < *cut);
        let Some(FillNext { page, position }) = at.map(FillNext::from) else {
            if *pending == 0 {
                self.finish_fill(now, reference, out);
            }
            return ReadTurn::Over;
        };
        let image = charge(self.namespaces.get(self.pages[page].namespace).image_bytes);
        if *pending > 0 && u64::from(*pending) * image >= window {
            return ReadTurn::Over;
        }
        let started = self.read_page(page, urgency, out);
        let Some(job) = self.jobs.get_mut(reference) else { return ReadTurn::Over };
        let Stage::Fill { next_issue, pending, cut, .. } = &mut job.stage else {
            return ReadTurn::Over;
        };
        if let ReadStart::NoRoom(device) = started {
            self.pages[page].wanted = true;
            return ReadTurn::NoRoom(device);
        }
        *next_issue += 1;
        match started {
            ReadStart::Resident => ReadTurn::More,
            ReadStart::Waits => {
                *pending += 1;
                self.wait_for_page(page, reference, position);
                ReadTurn::More
            }
            _ => {
                // Nothing waits while it holds a partial lease: cut here.
                *cut = position.min(*cut);
                let ended = *pending == 0;
                let full = started == ReadStart::NoMemory;
                let code = if full { Code::NoMemory } else { Code::IoError };
                job.stop = None;
                job.stop_at(code, None);
                if ended {
                    self.finish_fill(now, reference, out);
                }
                ReadTurn::Over
            }
        }
    }

    /// Starts to read a page into DRAM unless it is there or on its way.
    pub(super) fn read_page(
        &mut self,
        page: PageId,
        urgency: Urgency,
        out: &mut Effects,
    ) -> ReadStart {
        let found = &self.pages[page];
        if found.is_resident() {
            return ReadStart::Resident;
        }
        let (Some(slot), true) = (found.slot, found.indexed || found.pins > 0) else {
            return ReadStart::Gone;
        };
        if !self.flow.ssd.is_readable(slot.device) {
            self.stats.ssd_read_errors[IoFault::Off.index()] += 1;
            return ReadStart::Unreadable;
        }
        if found.reading {
            return ReadStart::Waits;
        }
        if !self.flow.ssd.has_read_room(slot.device, urgency) {
            return ReadStart::NoRoom(slot.device);
        }
        let (namespace, checksum) = (found.namespace, found.slot_checksum);
        let image_bytes = self.namespaces.get(namespace).image_bytes;
        let mut cursor = EvictionCursor::default();
        let Some(extent) = self.allocate(charge(image_bytes), u64::MAX, &mut cursor, out) else {
            return ReadStart::NoMemory;
        };
        self.attach_extent(page, extent);
        if !self.pages[page].indexed {
            self.draining_bytes += u64::from(extent.bytes);
        }
        let found = &mut self.pages[page];
        found.reading = true;
        found.io += 1;
        let bytes = u64::from(extent.bytes);
        let ticket = self.flow.start(Work::Read { page, slot, bytes, left: None, hint_bytes: 0 });
        self.flow.ssd.start_read(slot.device, bytes);
        out.list.push(Effect::Read { ticket, slot, extent, image_bytes, checksum });
        ReadStart::Waits
    }

    /// Tells `job` when the read of `page` has ended.
    pub(super) fn wait_for_page(&mut self, page: PageId, job: JobRef, position: u32) {
        let next = self.pages[page].waiters;
        let waiter = Waiter { job, position, next };
        let index = match self.flow.free_waiters.pop() {
            Some(index) => {
                self.flow.waiters[index as usize] = waiter;
                index
            }
            None => {
                self.flow.waiters.push(waiter);
                self.flow.waiters.len() as u32 - 1
            }
        };
        self.pages[page].waiters = index;
    }

    pub(super) fn read_ended(
        &mut self,
        now: Nanos,
        ticket: Ticket,
        fault: Option<IoFault>,
        out: &mut Effects,
    ) {
        let Work::Read { page, slot, bytes, left, hint_bytes } = self.flow.end(ticket) else {
            return;
        };
        self.flow.ssd.end_read(slot.device, bytes);
        self.budget.give_hint(hint_bytes);
        self.flow.memory_moved = true;
        if let Some(extent) = left {
            return self.overtaken_read_ended(page, extent, bytes, fault, out);
        }
        // Held until everyone has been told.
        self.pin(page);
        let found = &mut self.pages[page];
        found.reading = false;
        found.io -= 1;
        let waiters = std::mem::replace(&mut found.waiters, NIL);
        match fault {
            None => {
                self.stats.ssd_pages_read += 1;
                self.stats.ssd_bytes_read += bytes;
                found.checksum = Some(found.slot_checksum);
                self.wake_wanting(page);
            }
            Some(fault) => {
                self.stats.ssd_read_errors[fault.index()] += 1;
                self.detach_extent(page);
                // A tier that takes no work now may still hold the image.
                let lost = fault != IoFault::Off;
                if lost {
                    self.detach_slot(page, is_slots_fault(fault), out);
                }
                // Without a replica it is gone, and everything behind it.
                if lost && self.pages[page].indexed {
                    self.drop_subtree(page, SpillOutcome::Failed, out);
                }
            }
        }
        self.tell(now, waiters, fault, out);
        let parent = self.pages.parent(page);
        let last = self.pages[page].pins == 1;
        self.unpin(page, out);
        // Whoever still holds it refreshes the chain when it lets go.
        if last {
            self.touch_upwards(parent, 0);
        }
    }

    /// Tells those who waited for a read what became of it.
    fn tell(&mut self, now: Nanos, waiters: u32, fault: Option<IoFault>, out: &mut Effects) {
        let mut waiter = waiters;
        while waiter != NIL {
            let Waiter { job, position, next } = self.flow.waiters[waiter as usize];
            self.flow.free_waiters.push(waiter);
            waiter = next;
            self.page_arrived(now, job, position, fault, out);
        }
    }

    /// Tells those who wait for the read of a page that they need not: a save brought the image.
    pub(super) fn overtake(&mut self, now: Nanos, page: PageId, out: &mut Effects) {
        let waiters = std::mem::replace(&mut self.pages[page].waiters, NIL);
        self.tell(now, waiters, None, out);
    }

    /// A read ended whose page has another image of a save by now: only what it says of the slot
    /// matters.
    fn overtaken_read_ended(
        &mut self,
        page: PageId,
        extent: Extent,
        bytes: u64,
        fault: Option<IoFault>,
        out: &mut Effects,
    ) {
        self.free_memory(extent);
        self.draining_bytes -= u64::from(extent.bytes);
        let found = &mut self.pages[page];
        found.overtaken = false;
        found.io -= 1;
        match fault {
            None => {
                self.stats.ssd_pages_read += 1;
                self.stats.ssd_bytes_read += bytes;
            }
            Some(fault) => {
                self.stats.ssd_read_errors[fault.index()] += 1;
                if fault != IoFault::Off {
                    self.detach_slot(page, is_slots_fault(fault), out);
                    if self.pages[page].indexed && !self.is_gone(page) {
                        // It was wanted there before.
                        self.offer_chain(page);
                    } else {
                        self.give_up_below(page);
                    }
                }
            }
        }
        self.bury(page, out);
    }

    /// Says whether pages can be read from an SSD device. Who waits for one that ceases to read is
    /// told at once, or in the [`pump`](Self::pump) that follows; the reads themselves keep their
    /// memory, and the budget of the hints that ordered them, until they end.
    pub fn set_device_readable(
        &mut self,
        now: Nanos,
        device: u16,
        readable: bool,
        out: &mut Effects,
    ) {
        if self.flow.ssd.is_readable(device) == readable {
            return;
        }
        self.flow.ssd.set_readable(device, readable);
        if readable {
            return;
        }
        let read_there = |work: &Work| match work {
            Work::Read { page, slot, left: None, .. } if slot.device == device => Some(*page),
            _ => None,
        };
        let pages: Vec<PageId> = self.flow.under_way().filter_map(read_there).collect();
        for page in pages {
            let waiters = std::mem::replace(&mut self.pages[page].waiters, NIL);
            self.tell(now, waiters, Some(IoFault::Off), out);
        }
        // Nor does anybody wait for memory to read from it, or for budget for what lies there.
        self.flow.memory_moved = true;
        self.look_up_waiting_again();
        self.admit_waiting(now, out);
        self.end_drains(now, out);
    }

    /// Whether a page can be brought into DRAM, or is there.
    pub(super) fn is_at_hand(&self, page: PageId) -> bool {
        let found = &self.pages[page];
        let readable = |slot: Slot| self.flow.ssd.is_readable(slot.device);
        found.is_resident() || found.slot.is_some_and(readable)
    }

    fn page_arrived(
        &mut self,
        now: Nanos,
        reference: JobRef,
        position: u32,
        fault: Option<IoFault>,
        out: &mut Effects,
    ) {
        let Some(job) = self.jobs.get_mut(reference) else { return };
        match &mut job.stage {
            Stage::Fill { pending, cut, .. } => {
                *pending -= 1;
                if fault.is_some() {
                    *cut = position.min(*cut);
                }
                if job.stop.is_some_and(|stop| stop.code == Code::Cancelled) || fault.is_some() {
                    if *pending == 0 {
                        self.finish_fill(now, reference, out);
                    }
                    return;
                }
                let all_issued = job.fill.len();
                let Stage::Fill { next_issue, pending, cut, .. } = job.stage else { return };
                let rest = job.fill[(next_issue as usize).min(all_issued)..].iter();
                let more = rest.clone().any(|fill| fill.position < cut);
                let stopped = job.stop.is_some_and(|stop| stop.code != Code::OverBudget);
                if pending == 0 && (!more || stopped) {
                    self.finish_fill(now, reference, out);
                } else if more && !stopped {
                    self.queue_read(reference);
                }
            }
            Stage::Restore { .. } => {
                self.restore_page_arrived(now, reference, position, fault, out)
            }
            _ => {}
        }
    }

    /// Lets restores that had no memory try again.
    fn feed_starved(&mut self) {
        if !std::mem::take(&mut self.flow.memory_moved) {
            return;
        }
        for _ in 0..self.flow.starved.len() {
            let Some(reference) = self.flow.starved.pop_front() else { return };
            if let Some(job) = self.jobs.get_mut(reference)
                && let Stage::Restore { waits_for_memory, .. } = &mut job.stage
            {
                *waits_for_memory = false;
                self.queue_read(reference);
            }
        }
    }

    /// An error completion of a job that stops with `code`, or a partial one when it did part of
    /// its work.
    pub(super) fn stopped(code: Code, pages: u32, ended: Completion) -> Completion {
        let status = match code {
            Code::None => Status::Ok,
            _ if pages > 0 => Status::Partial,
            _ => Status::Error,
        };
        Completion { status, code, ..ended }
    }
}

/// Whether the place on SSD is to blame.
pub(super) fn is_slots_fault(fault: IoFault) -> bool {
    matches!(fault, IoFault::Errno(_) | IoFault::Short)
}

/// How an order to read a page went.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ReadStart {
    /// It is in DRAM.
    Resident,
    /// A read is on its way.
    Waits,
    /// No page could be evicted for it.
    NoMemory,
    /// It is in no tier any more.
    Gone,
    /// Its device reads nothing at the moment.
    Unreadable,
    /// Its device has as many reads in flight as it may.
    NoRoom(u16),
}

/// What a job does after its turn to read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ReadTurn {
    /// It may have another.
    More,
    /// It waits for something else: memory, its own reads, or nothing.
    Over,
    /// Its next page lies on a device that may have no more reads now.
    NoRoom(u16),
}

struct FillNext {
    page: PageId,
    position: u32,
}

impl From<super::job::FillPage> for FillNext {
    fn from(fill: super::job::FillPage) -> Self {
        Self { page: fill.page, position: fill.position }
    }
}
