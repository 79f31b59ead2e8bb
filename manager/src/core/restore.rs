//! Restores: DRAM → device copies of leased pages, SSD pages streamed through a window.

use orbitkv_shm_protocol::ids::{EngineId, LeaseId, PageHash, RegionId, SessionId};
use orbitkv_shm_protocol::record::{Code, Completion, PageEntry, PageOutcome, Tier};

use super::effect::Effects;
use super::event::{IoFault, Nanos};
use super::flow::{ReadStart, ReadTurn};
use super::in_flight::Urgency;
use super::job::{Entry, EntryState, JobRef, Stage};
use super::query::charge;
use super::stats::LeaseEnd;
use super::{Core, Taken};

/// The arguments of a restore.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ask {
    pub(super) region: RegionId,
    pub(super) lease: LeaseId,
    pub(super) offset: u32,
    pub(super) fence: Option<u32>,
    pub(super) keep: bool,
    pub(super) by_layer: bool,
}

impl Core {
    pub(super) fn begin_restore(
        &mut self,
        ctx: &Taken,
        ended: Completion,
        ask: &Ask,
        pages: &[PageEntry],
        out: &mut Effects,
    ) {
        let Some(session) = self.sessions.get(ctx.session) else { return };
        let Some(region) = session.region(ask.region) else {
            return self.fail(ctx, ended, Code::UnknownRegion, out);
        };
        if ask.fence.is_some_and(|index| !session.event_is_free(index)) {
            return self.fail(ctx, ended, Code::BadFence, out);
        }
        let (namespace, device_pages) = (region.namespace, region.device_pages);
        let engine = session.engine;
        let well_formed = |entry: &PageEntry| {
            entry.flags == 0 && entry.reserved == 0 && entry.device_page < device_pages
        };
        if !pages.iter().all(well_formed) {
            return self.refuse_entries(ctx, ended, out);
        }
        let lease = self.leases.get(ask.lease);
        let Some(lease) = lease.filter(|lease| lease.group == Some(engine) && lease.granted) else {
            return self.fail(ctx, ended, self.absent_lease(ask.lease, engine), out);
        };
        let expired = lease.end == LeaseEnd::Expired || lease.expires <= ctx.now;
        if lease.closed || expired {
            let code = if expired { Code::ExpiredLease } else { Code::UnknownLease };
            return self.fail(ctx, ended, code, out);
        }
        let Some(part) = lease.part(namespace) else {
            return self.fail(ctx, ended, Code::BadRequest, out);
        };
        let first = ask.offset.checked_sub(part.first).map(u64::from);
        let fits = first.is_some_and(|first| first + pages.len() as u64 <= u64::from(part.len));
        let Some(first) = first.filter(|_| fits) else {
            return self.fail(ctx, ended, Code::BadRequest, out);
        };
        let start = part.start as usize + first as usize;
        let leased = &lease.pages[start..start + pages.len()];
        let same = |(entry, leased): (&PageEntry, &super::lease::LeasedPage)| {
            !leased.ended && self.pages[leased.page].hash == PageHash(entry.hash)
        };
        if !pages.iter().zip(leased).all(same) {
            return self.fail(ctx, ended, Code::BadRequest, out);
        }
        if pages.is_empty() {
            return self.complete(ctx, Completion { prepared_ns: ctx.now, ..ended }, out);
        }
        self.start_restore(ctx, &ended, ask, pages, start);
    }

    /// Why a lease is not there.
    pub(super) fn absent_lease(&self, lease: LeaseId, group: EngineId) -> Code {
        let expired = self.leases.has_expired(lease, group);
        if expired { Code::ExpiredLease } else { Code::UnknownLease }
    }

    fn start_restore(
        &mut self,
        ctx: &Taken,
        ended: &Completion,
        ask: &Ask,
        pages: &[PageEntry],
        start: usize,
    ) {
        let reference = self.open_job(ctx, ended, Stage::Drain);
        self.take_fence(reference, ask.fence);
        let mut streaming = false;
        let mut unit_bytes = 0;
        if let (Some(job), Some(lease)) =
            (self.jobs.get_mut(reference), self.leases.get_mut(ask.lease))
        {
            lease.users += 1;
            for (entry, leased) in pages.iter().zip(&mut lease.pages[start..]) {
                // This operation has a pin of its own: the lease's, or one more.
                if ask.keep {
                    self.pages[leased.page].pins += 1;
                } else {
                    leased.ended = true;
                    lease.live_pages -= 1;
                }
                let mut made =
                    Entry::new(PageHash(entry.hash), entry.device_page, EntryState::Pending);
                made.page = Some(leased.page);
                let page = &self.pages[leased.page];
                unit_bytes = charge(self.namespaces.get(page.namespace).image_bytes);
                let resident = page.is_resident();
                made.tier = if resident { Tier::Dram } else { Tier::Ssd };
                streaming |= !resident;
                job.entries.push(made);
            }
            job.stage = Stage::Restore {
                region: ask.region,
                lease: ask.lease,
                keep: ask.keep,
                next_read: 0,
                next_issue: 0,
                reading: 0,
                window_bytes: 0,
                streaming,
                by_layer: ask.by_layer,
                waits_for_memory: false,
                unit_bytes,
            };
        }
        if let Some(region) =
            self.sessions.get_mut(ctx.session).and_then(|session| session.region_mut(ask.region))
        {
            region.users += 1;
        }
        if streaming {
            self.queue_read(reference);
        }
        self.queue_copy(reference);
    }

    /// Orders the next read of a restore.
    pub(super) fn issue_restore_read(
        &mut self,
        now: Nanos,
        reference: JobRef,
        urgency: Urgency,
        out: &mut Effects,
    ) -> ReadTurn {
        let window = self.config.read_window_bytes;
        let Some(job) = self.jobs.get_mut(reference) else { return ReadTurn::Over };
        let Stage::Restore { next_read, window_bytes, .. } = &mut job.stage else {
            return ReadTurn::Over;
        };
        let before = *next_read;
        while job
            .entries
            .get(*next_read as usize)
            .is_some_and(|entry| entry.page.is_none_or(|page| self.pages[page].is_resident()))
        {
            *next_read += 1;
        }
        let (position, window_bytes) = (*next_read, *window_bytes);
        let page = job.entries.get(position as usize).and_then(|entry| entry.page);
        if position > before {
            // Somebody else brought pages in that were on SSD only.
            self.queue_copy(reference);
        }
        let Some(page) = page else { return ReadTurn::Over };
        let bytes = charge(self.namespaces.get(self.pages[page].namespace).image_bytes);
        if window_bytes > 0 && window_bytes + bytes > window {
            return ReadTurn::Over;
        }
        let started = self.read_page(page, urgency, out);
        let Some(job) = self.jobs.get_mut(reference) else { return ReadTurn::Over };
        let Stage::Restore { next_read, reading, window_bytes, waits_for_memory, .. } =
            &mut job.stage
        else {
            return ReadTurn::Over;
        };
        match started {
            ReadStart::Resident => ReadTurn::More,
            ReadStart::Waits => {
                *next_read += 1;
                *reading += 1;
                *window_bytes += bytes;
                self.wait_for_page(page, reference, position);
                ReadTurn::More
            }
            ReadStart::NoMemory => {
                *waits_for_memory = true;
                self.pages[page].wanted = true;
                self.flow.starved.push_back(reference);
                ReadTurn::Over
            }
            ReadStart::Gone | ReadStart::Unreadable => {
                self.cut_restore(reference, position);
                self.restore_may_end(now, reference, out);
                ReadTurn::Over
            }
            ReadStart::NoRoom(device) => {
                self.pages[page].wanted = true;
                ReadTurn::NoRoom(device)
            }
        }
    }

    /// A page could not be read: it and what comes behind it is refused. What comes before it is
    /// still copied.
    fn cut_restore(&mut self, reference: JobRef, position: u32) {
        let Some(job) = self.jobs.get_mut(reference) else { return };
        let total = job.entries.len() as u32;
        if let Stage::Restore { next_read, .. } = &mut job.stage {
            *next_read = total;
        }
        let behind = job.entries[position as usize..].iter_mut();
        for entry in behind.filter(|entry| entry.state == EntryState::Pending) {
            entry.end(PageOutcome::Refused, Code::IoError);
        }
    }

    pub(super) fn restore_page_arrived(
        &mut self,
        now: Nanos,
        reference: JobRef,
        position: u32,
        fault: Option<IoFault>,
        out: &mut Effects,
    ) {
        let Some(job) = self.jobs.get_mut(reference) else { return };
        let Stage::Restore { reading, .. } = &mut job.stage else { return };
        *reading -= 1;
        let stopped = job.stop.is_some();
        if fault.is_some() {
            self.cut_restore(reference, position);
        }
        if !stopped {
            self.queue_copy(reference);
            self.queue_read(reference);
        }
        self.restore_may_end(now, reference, out);
    }

    /// A copy command of a restore ended: entries `first..first + len`.
    pub(super) fn restore_advanced(
        &mut self,
        now: Nanos,
        reference: JobRef,
        first: u32,
        len: u32,
        out: &mut Effects,
    ) {
        let Some(job) = self.jobs.get_mut(reference) else { return };
        let Stage::Restore { keep, streaming, window_bytes, .. } = &mut job.stage else { return };
        let (keep, streaming) = (*keep, *streaming);
        for at in first..first + len {
            let entry = &mut job.entries[at as usize];
            let Some(page) = entry.page else { continue };
            let found = &mut self.pages[page];
            found.io -= 1;
            if entry.outcome == PageOutcome::Restored {
                self.stats.pages_restored += 1;
                self.stats.pages_restored_dram += u64::from(entry.tier == Tier::Dram);
                let image_bytes = self.namespaces.get(found.namespace).image_bytes;
                self.stats.bytes_restored += u64::from(image_bytes);
            }
            if entry.tier == Tier::Ssd {
                let bytes = found.extent.map_or(0, |extent| u64::from(extent.bytes));
                *window_bytes = window_bytes.saturating_sub(bytes);
            }
        }
        if streaming && !keep {
            // Copied pages make room for those still on SSD.
            for at in first..first + len {
                let page = self
                    .jobs
                    .get_mut(reference)
                    .and_then(|job| job.entries[at as usize].page.take());
                if let Some(page) = page {
                    self.unpin_in_place(page, out);
                }
            }
        }
        let Some(job) = self.jobs.get(reference) else { return };
        if job.stop.is_none() {
            self.queue_copy(reference);
            if streaming {
                self.queue_read(reference);
            }
        }
        self.restore_may_end(now, reference, out);
    }

    /// Ends a restore that has nothing in flight and nothing left, or that has to stop.
    pub(super) fn restore_may_end(&mut self, now: Nanos, reference: JobRef, out: &mut Effects) {
        let Some(job) = self.jobs.get_mut(reference) else { return };
        let Stage::Restore { region, lease, keep, reading, streaming, unit_bytes, .. } = job.stage
        else {
            return;
        };
        if job.copies > 0 || reading > 0 {
            return;
        }
        let pending = |entry: &Entry| entry.state != EntryState::Ended;
        if job.stop.is_none() && job.entries.iter().any(pending) {
            return;
        }
        // One that was stopped too late has done all that was asked, as its done word says.
        let restored = |entry: &Entry| entry.outcome == PageOutcome::Restored;
        let stop = job.stop.filter(|_| !job.entries.iter().all(restored));
        let refused = job.entries.iter().find(|entry| entry.outcome == PageOutcome::Refused);
        let cause = refused.map_or(Code::None, |entry| entry.code);
        let code = stop.map_or(cause, |stop| stop.code);
        let (id, operation, kind) = (job.session, job.operation, job.kind);
        let mut entries = std::mem::take(&mut job.entries);
        let mut ended = Completion::ok(operation, kind);
        for (at, entry) in entries.iter_mut().enumerate() {
            if entry.state != EntryState::Ended {
                entry.end(PageOutcome::Refused, code);
            }
            match entry.outcome {
                PageOutcome::Restored => {
                    ended.pages += 1;
                    if entry.tier == Tier::Dram {
                        ended.pages_dram += 1;
                    } else {
                        ended.pages_ssd += 1;
                    }
                }
                _ => {
                    ended.pages_refused += 1;
                    ended.first_failed = ended.first_failed.or(Some(at as u32));
                    self.stats.pages_restore_failed[entry.code as usize] += 1;
                }
            }
        }
        let namespace = entries.first().and_then(|_| {
            let session = self.sessions.get(id)?;
            session.regions.get(region.0 as usize)?.as_ref().map(|region| region.namespace)
        });
        if let Some(namespace) = namespace {
            let image = self.namespaces.get(namespace).image_bytes;
            ended.bytes = u64::from(ended.pages) * u64::from(image);
        }
        let mut head = None;
        for entry in entries.iter_mut().rev() {
            if let Some(page) = entry.page.take() {
                self.unpin(page, out);
                // No lookup would find it when it was forgotten meanwhile.
                head = Some(page).filter(|&page| self.pages[page].indexed);
            }
        }
        // Streamed pages were let go of from the head: put the whole chain in order.
        // Else only the parents outside of the range are missing.
        let found = |entry: &Entry| namespace.and_then(|of| self.find(of, &entry.hash));
        let deepest = if streaming { entries.iter().rev().find_map(found) } else { None };
        self.touch_upwards(deepest, 0);
        if deepest.is_none() || head.is_some_and(|head| self.is_gone(head)) {
            self.touch_upwards(head, 0);
        }
        let named_bytes = if keep { 0 } else { entries.len() as u64 * unit_bytes };
        if let Some(job) = self.jobs.get_mut(reference) {
            job.entries = entries;
        }
        self.leave_lease(lease, named_bytes, out);
        let ended = Self::stopped(code, ended.pages, ended);
        self.end_job(now, reference, ended, out);
        self.leave_region(now, id, region, out);
        self.admit_waiting(now, out);
    }

    /// A restore no longer uses the lease; the pages that ended with it no longer count.
    fn leave_lease(&mut self, reference: LeaseId, ended_bytes: u64, out: &mut Effects) {
        let Some(lease) = self.leases.get_mut(reference) else { return };
        lease.users -= 1;
        if lease.users == 0 && (lease.live_pages == 0 || lease.closed) {
            return self.end_lease(reference, out);
        }
        debug_assert!(ended_bytes <= lease.bytes);
        lease.bytes -= ended_bytes;
        let (session, speculative) = (lease.session, lease.speculative);
        self.give_budget(session, ended_bytes, speculative);
    }

    /// Ends a lease nobody uses: unpins what is left, gives the budget back.
    pub(super) fn end_lease(&mut self, reference: LeaseId, out: &mut Effects) {
        let Some(lease) = self.leases.get_mut(reference) else { return };
        debug_assert_eq!(lease.users, 0);
        let pages = std::mem::take(&mut lease.pages);
        let parts = std::mem::take(&mut lease.parts);
        let (bytes, speculative, session) = (lease.bytes, lease.speculative, lease.session);
        if lease.granted {
            self.stats.leases_ended[lease.end as usize] += 1;
        }
        for part in &parts {
            let range = part.start as usize..(part.start + part.len) as usize;
            let live = || pages[range.clone()].iter().rev().filter(|leased| !leased.ended);
            for leased in live() {
                self.unpin(leased.page, out);
            }
            // Parents that the lease does not hold, or not any more, stay hotter than its pages.
            self.refresh(live().map(|leased| leased.page));
        }
        if let Some(lease) = self.leases.get_mut(reference) {
            lease.pages = pages;
            lease.parts = parts;
        }
        self.leases.close(reference);
        self.give_budget(session, bytes, speculative);
    }

    /// Ends every lease that counts against a session or, without other sessions, its group.
    pub(super) fn end_group_leases(&mut self, id: SessionId, group_lives: bool, out: &mut Effects) {
        let Some(engine) = self.sessions.get(id).map(|session| session.engine) else { return };
        let of_group: Vec<_> = self
            .leases
            .iter()
            .filter(|(_, lease)| lease.group == Some(engine) && lease.granted)
            .map(|(reference, lease)| (reference, lease.users))
            .collect();
        for (reference, users) in of_group {
            let Some(lease) = self.leases.get_mut(reference) else { continue };
            if !group_lives {
                lease.closed = true;
                lease.end = LeaseEnd::Orphaned;
            }
            if users == 0 && !group_lives {
                self.end_lease(reference, out);
                continue;
            }
            if lease.session == Some(id) {
                // Still counted in the total; the session that took it is no more.
                lease.session = None;
                let bytes = lease.bytes;
                if let Some(session) = self.sessions.get_mut(id) {
                    session.leased_bytes -= bytes;
                }
            }
        }
    }
}
