//! Ends of things: release, cancel, forget, unregister, drain, closed sessions, deadlines.

use orbitkv_shm_protocol::ids::{LeaseId, OperationId, RegionId, ScopeId, SessionId};
use orbitkv_shm_protocol::record::{Code, Completion, Status};

use super::effect::{Effect, Effects};
use super::event::{IoFault, Nanos, Ticket};
use super::flow::Work;
use super::job::{Job, JobRef, Stage};
use super::limits::FORGETS_UNDER_WAY_MAX;
use super::namespace::NamespaceId;
use super::replacement::{ListKind, Recency};
use super::session::Scope;
use super::stats::{LeaseEnd, SpillOutcome};
use super::{Core, Taken};

impl Core {
    pub(super) fn release(
        &mut self,
        ctx: &Taken,
        ended: Completion,
        reference: LeaseId,
        out: &mut Effects,
    ) {
        let Some(engine) = self.sessions.get(ctx.session).map(|session| session.engine) else {
            return;
        };
        let lease = self.leases.get_mut(reference);
        let Some(lease) = lease.filter(|lease| lease.group == Some(engine) && lease.granted) else {
            return self.fail(ctx, ended, self.absent_lease(reference, engine), out);
        };
        if lease.closed {
            let expired = lease.end == LeaseEnd::Expired;
            let code = if expired { Code::ExpiredLease } else { Code::UnknownLease };
            return self.fail(ctx, ended, code, out);
        }
        lease.end = LeaseEnd::Released;
        let pages = lease.live_pages;
        if lease.users > 0 {
            // Its running copies end it.
            lease.closed = true;
            self.leases.stop_clock(reference);
        } else {
            self.end_lease(reference, out);
        }
        self.complete(ctx, Completion { pages, ..ended }, out);
        self.admit_waiting(ctx.now, out);
    }

    pub(super) fn cancel(
        &mut self,
        ctx: &Taken,
        ended: Completion,
        target: OperationId,
        out: &mut Effects,
    ) {
        let session = self.sessions.get(ctx.session);
        let credit = session.and_then(|session| session.credit(target)).and_then(|c| c.job);
        let reference = credit.filter(|&reference| {
            self.jobs.get(reference).is_some_and(|job| {
                // A `Cancel` that still waits ends with the job, before those that name it.
                job.operation == target || job.cancels.iter().any(|&(other, _)| other == target)
            })
        });
        let Some(reference) = reference else {
            // It has ended already: its terminal record precedes this one.
            return self.complete(ctx, ended, out);
        };
        if let Some(session) = self.sessions.get_mut(ctx.session) {
            session.credits[ended.operation.index as usize].job = Some(reference);
        }
        if let Some(job) = self.jobs.get_mut(reference) {
            job.cancels.push((ended.operation, ctx.now));
        }
        self.stop_job(ctx.now, reference, Code::Cancelled, out);
    }

    /// Makes a job end as soon as nothing of it is in flight.
    fn stop_job(&mut self, now: Nanos, reference: JobRef, code: Code, out: &mut Effects) {
        let Some(job) = self.jobs.get_mut(reference) else { return };
        let deadline = code == Code::Deadline;
        if let Some(index) = job.fence_ahead()
            && job.copies > 0
        {
            // Its engine may have died before it got to the event.
            out.list.push(Effect::GiveUpFence { session: job.session, index });
        }
        match job.stage {
            Stage::Idle | Stage::Unregister { .. } => {}
            // The records are made all the same.
            Stage::Forget { .. } if deadline || job.abandoned => {
                job.stop_at(code, None);
                self.end_forget(now, reference, out);
            }
            Stage::Forget { .. } => {}
            Stage::Wait { .. } => {
                let (id, operation, kind) = (job.session, job.operation, job.kind);
                for entry in &mut job.entries {
                    if entry.state != super::job::EntryState::Anchor {
                        entry.end(orbitkv_shm_protocol::record::PageOutcome::Miss, code);
                    }
                }
                if let Some(session) = self.sessions.get_mut(id) {
                    session.waiting.retain(|&waiting| waiting != reference);
                    if session.waiting.is_empty() {
                        self.sessions.turn.retain(|&other| other != id);
                    }
                }
                let ended = Completion::ok(operation, kind);
                self.end_job(now, reference, Self::stopped(code, 0, ended), out);
                self.admit_waiting(now, out);
            }
            Stage::Fill { lease, pending, .. } => {
                let over_budget = job.stop.is_some_and(|stop| stop.code == Code::OverBudget);
                if over_budget {
                    job.stop = None;
                }
                job.stop_at(code, None);
                if lease.is_some() && deadline {
                    // What is there is granted; reads in flight belong to their pages.
                    let resident = self.resident_prefix(reference);
                    if let Some(job) = self.jobs.get_mut(reference)
                        && let Stage::Fill { cut, .. } = &mut job.stage
                    {
                        *cut = resident.min(*cut);
                    }
                    self.finish_fill(now, reference, out);
                } else if pending == 0 {
                    self.finish_fill(now, reference, out);
                }
            }
            Stage::Save { .. } => {
                job.stop_at(code, None);
                self.save_advanced(now, reference, out);
            }
            Stage::Restore { .. } => {
                job.stop_at(code, None);
                self.restore_may_end(now, reference, out);
            }
            Stage::Drain => {
                let (id, operation, kind) = (job.session, job.operation, job.kind);
                if let Some(session) = self.sessions.get_mut(id) {
                    session.drains.retain(|&drain| drain != reference);
                }
                let ended = Completion::ok(operation, kind);
                self.end_job(now, reference, Self::stopped(code, 0, ended), out);
            }
        }
    }

    /// Query positions whose pages are all in DRAM, counted from the first.
    fn resident_prefix(&self, reference: JobRef) -> u32 {
        let Some(job) = self.jobs.get(reference) else { return 0 };
        let missing = job.fill.iter().find(|fill| !self.pages[fill.page].is_resident());
        missing.map_or(u32::MAX, |fill| fill.position)
    }

    pub(super) fn begin_forget(
        &mut self,
        ctx: &Taken,
        ended: Completion,
        scope: ScopeId,
        out: &mut Effects,
    ) {
        let session = self.sessions.get(ctx.session);
        let Some(members) = session.and_then(|s| s.scope(scope)).map(|s| s.members().to_vec())
        else {
            return self.fail(ctx, ended, Code::UnknownScope, out);
        };
        let (mut pages, mut bytes) = (0, 0);
        let durable = !self.slots.is_empty();
        if durable && self.flow.forgets() + members.len() > FORGETS_UNDER_WAY_MAX {
            return self.fail(ctx, ended, Code::OverBudget, out);
        }
        let reference = durable
            .then(|| self.open_job(ctx, &ended, Stage::Forget { pending: members.len() as u32 }));
        for namespace in members {
            let image = u64::from(self.namespaces.get(namespace).image_bytes);
            let forgotten = self.forget_namespace(namespace);
            pages += forgotten;
            bytes += forgotten * image;
            if durable {
                let ticket = self.flow.start(Work::Forget { job: reference });
                let left = self.record_forget(reference, ticket, namespace, out);
                (pages, bytes) = (pages + left.0, bytes + left.1);
            }
        }
        self.stats.pages_forgotten += pages;
        let pages = u32::try_from(pages).unwrap_or(u32::MAX);
        match reference.and_then(|reference| self.jobs.get_mut(reference)) {
            Some(job) => {
                job.bytes = bytes;
                job.found = pages;
            }
            None => self.complete(ctx, Completion { pages, bytes, ..ended }, out),
        }
    }

    /// Makes every page of a namespace unfindable at once; they are dropped in the turns that
    /// follow. Returns how many there were.
    fn forget_namespace(&mut self, namespace: NamespaceId) -> u64 {
        let of = self.namespaces.get_mut(namespace);
        of.forgets = of.forgets.wrapping_add(1);
        let pages = std::mem::replace(&mut of.pages, Recency::new(ListKind::Namespace));
        let forgotten = pages.len() as u64;
        if forgotten > 0 {
            of.doomed.append(&mut self.pages, pages);
            if !self.doomed.contains(&namespace) {
                self.doomed.push(namespace);
            }
        }
        forgotten
    }

    /// Drops a bounded number of pages that were forgotten or hang on a lost one, so that millions
    /// of them hold nobody up.
    pub(super) fn drop_forgotten(&mut self, out: &mut Effects) {
        for _ in 0..self.config.pages_dropped_per_turn {
            if self.settle_one(out) {
                continue;
            }
            let Some(&namespace) = self.doomed.last() else { return };
            // The youngest: a page is older than its children.
            match self.namespaces.get(namespace).doomed.hottest() {
                Some(page) => self.drop_page(page, SpillOutcome::Superseded, out),
                None => {
                    self.doomed.pop();
                }
            }
        }
    }

    pub(super) fn forget_recorded(
        &mut self,
        now: Nanos,
        ticket: Ticket,
        fault: Option<IoFault>,
        out: &mut Effects,
    ) {
        let Work::Forget { job: Some(reference) } = self.flow.end(ticket) else { return };
        let Some(job) = self.jobs.get_mut(reference) else { return };
        if fault.is_some() {
            job.stop_at(Code::IoError, None);
        }
        let Stage::Forget { pending } = &mut job.stage else { return };
        *pending -= 1;
        if *pending > 0 {
            return;
        }
        self.end_forget(now, reference, out);
    }

    fn end_forget(&mut self, now: Nanos, reference: JobRef, out: &mut Effects) {
        let Some(job) = self.jobs.get(reference) else { return };
        let code = job.stop.map_or(Code::None, |stop| stop.code);
        let mut ended = Completion::ok(job.operation, job.kind);
        ended.pages = job.found;
        ended.bytes = job.bytes;
        // Without the record a restart could find the pages again: say so.
        if code != Code::None {
            (ended.status, ended.code) = (Status::Partial, code);
        }
        self.end_job(now, reference, ended, out);
    }

    pub(super) fn unregister(
        &mut self,
        ctx: &Taken,
        ended: Completion,
        region: RegionId,
        out: &mut Effects,
    ) {
        let session = self.sessions.get(ctx.session);
        let Some(users) = session.and_then(|s| s.region(region)).map(|region| region.users) else {
            return self.fail(ctx, ended, Code::UnknownRegion, out);
        };
        if users == 0 {
            self.end_region(ctx.session, region, out);
            return self.complete(ctx, ended, out);
        }
        let reference = self.open_job(ctx, &ended, Stage::Unregister { region });
        if let Some(found) =
            self.sessions.get_mut(ctx.session).and_then(|session| session.region_mut(region))
        {
            found.ending = Some(reference);
        }
    }

    /// A save or restore no longer uses the region.
    pub(super) fn leave_region(
        &mut self,
        now: Nanos,
        id: SessionId,
        region: RegionId,
        out: &mut Effects,
    ) {
        let Some(found) = self.sessions.get_mut(id).and_then(|s| s.region_mut(region)) else {
            return;
        };
        found.users -= 1;
        let Some(reference) = found.ending.filter(|_| found.users == 0) else { return };
        self.end_region(id, region, out);
        if let Some(job) = self.jobs.get(reference) {
            let ended = Completion::ok(job.operation, job.kind);
            self.end_job(now, reference, ended, out);
        }
    }

    fn end_region(&mut self, session: SessionId, region: RegionId, out: &mut Effects) {
        if let Some(found) = self.sessions.get_mut(session)
            && let Some(slot) = found.regions.get_mut(region.0 as usize)
        {
            *slot = None;
            out.list.push(Effect::RegionEnded { session, region });
        }
    }

    pub(super) fn begin_drain(&mut self, ctx: &Taken, ended: Completion, out: &mut Effects) {
        let reference = self.open_job(ctx, &ended, Stage::Drain);
        if let Some(session) = self.sessions.get_mut(ctx.session) {
            session.drains.push(reference);
        }
        self.session_may_rest(ctx.now, ctx.session, out);
    }

    /// Ends drains of a session that owns nothing, and the session itself when it is closing.
    pub(super) fn session_may_rest(&mut self, now: Nanos, id: SessionId, out: &mut Effects) {
        let Some(session) = self.sessions.get_mut(id) else { return };
        if session.closing {
            if session.outstanding == 0 && session.copies == 0 {
                let scopes = std::mem::take(&mut session.scopes);
                self.sessions.close(id);
                for scope in &scopes {
                    if let Scope::One(namespace) = scope {
                        self.namespaces.get_mut(*namespace).scopes -= 1;
                    }
                }
                self.stats.sessions_ended += 1;
                out.list.push(Effect::SessionEnded { session: id });
            }
            return;
        }
        let drains = session.drains.len();
        if drains > 0 && session.outstanding as usize == drains && session.leased_bytes == 0 {
            for reference in std::mem::take(&mut session.drains) {
                if let Some(job) = self.jobs.get(reference) {
                    let ended = Completion::ok(job.operation, job.kind);
                    self.end_job(now, reference, ended, out);
                }
            }
        }
    }

    /// Looks at the drains of sessions whose leases ended in this turn.
    pub(super) fn end_drains(&mut self, now: Nanos, out: &mut Effects) {
        while let Some(session) = self.rested.pop() {
            self.session_may_rest(now, session, out);
        }
    }

    /// The client is gone. Its waiting work ends now, its copies when they end.
    pub(super) fn close_session(&mut self, now: Nanos, id: SessionId, out: &mut Effects) {
        let Some(session) = self.sessions.get_mut(id) else { return };
        if std::mem::replace(&mut session.closing, true) {
            return;
        }
        let engine = session.engine;
        // None of its queries may be admitted while others are being stopped.
        session.waiting.clear();
        // Held until its leases have ended too.
        session.outstanding += 1;
        let mut jobs: Vec<_> = session.credits.iter().filter_map(|credit| credit.job).collect();
        let silent = self.jobs.iter().filter(|(_, job)| job.session == id && job.silent);
        jobs.extend(silent.map(|(reference, _)| reference));
        self.sessions.turn.retain(|&other| other != id);
        for &reference in &jobs {
            if let Some(job) = self.jobs.get_mut(reference) {
                job.abandoned = true;
            }
        }
        for reference in jobs {
            self.stop_job(now, reference, Code::Cancelled, out);
        }
        let group_lives = self.sessions.group_lives(engine);
        self.end_group_leases(id, group_lives, out);
        if let Some(session) = self.sessions.get_mut(id) {
            session.outstanding -= 1;
        }
        self.session_may_rest(now, id, out);
        self.admit_waiting(now, out);
    }

    pub(super) fn tick(&mut self, now: Nanos, out: &mut Effects) {
        while let Some((expires, reference)) = self.leases.next_expiry().filter(|e| e.0 <= now) {
            debug_assert!(expires <= now);
            self.leases.stop_clock(reference);
            let Some(lease) = self.leases.get_mut(reference) else { break };
            lease.closed = true;
            lease.end = LeaseEnd::Expired;
            if lease.users == 0 {
                self.end_lease(reference, out);
            }
        }
        self.admit_waiting(now, out);
        if now < self.next_deadline {
            return;
        }
        let runs = |job: &Job| match job.stage {
            Stage::Unregister { .. } => false,
            // Whatever became of some of its records.
            Stage::Forget { .. } => true,
            _ => job.stop.is_none_or(|stop| stop.code == Code::OverBudget),
        };
        // Stopping one may start another whose deadline has passed too.
        loop {
            let late = self.jobs.iter().filter(|(_, job)| job.deadline <= now && runs(job));
            let late: Vec<_> = late.map(|(reference, _)| reference).collect();
            if late.is_empty() {
                break;
            }
            for reference in late {
                self.stop_job(now, reference, Code::Deadline, out);
            }
        }
        let next = self.jobs.iter().filter(|(_, job)| runs(job)).map(|(_, job)| job.deadline);
        self.next_deadline = next.min().unwrap_or(Nanos::MAX);
    }
}
