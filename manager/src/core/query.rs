//! Queries and hints: the longest restorable prefix, leased under the budgets, SSD parts read in.

use orbitkv_shm_protocol::bootstrap::message::DependencySpec;
use orbitkv_shm_protocol::ids::{LeaseId, PageHash, ScopeId, SessionId};
use orbitkv_shm_protocol::record::{
    Code, Completion, PageEntry, PageOutcome, PageResult, QueryMode, RequestKind, Status, Tier,
};

use super::effect::Effects;
use super::event::Nanos;
use super::extents::UNIT_BYTES;
use super::index::PageId;
use super::job::{Entry, EntryState, FillPage, Job, JobRef, Stage};
use super::lease::{LeasePart, LeasedPage};
use super::namespace::NamespaceId;
use super::stats::PrepareOutcome;
use super::{Core, Taken};

/// A namespace of the scope, as a lookup sees it.
#[derive(Clone, Copy, Debug)]
struct Member {
    namespace: NamespaceId,
    dependency: DependencySpec,
    image_bytes: u32,
}

impl Member {
    /// Leased positions of a hit of `len` pages: what a restore that ends there needs.
    fn needed(&self, len: u32) -> std::ops::Range<u32> {
        match self.dependency {
            DependencySpec::Chain => 0..len,
            DependencySpec::Window(pages) => len.saturating_sub(pages)..len,
            DependencySpec::State => len.saturating_sub(1)..len,
        }
    }

    fn bytes(&self, len: u32) -> u64 {
        let needed = self.needed(len);
        u64::from(needed.end - needed.start) * charge(self.image_bytes)
    }
}

/// Bytes that a leased page counts: its extent, wherever the image is now.
pub(super) fn charge(image_bytes: u32) -> u64 {
    u64::from(image_bytes).next_multiple_of(UNIT_BYTES)
}

/// What a lookup found: page-major, one page a member, `None` where it is in no tier that answers.
#[derive(Debug, Default)]
pub(super) struct Found {
    members: Vec<Member>,
    pages: Vec<Option<PageId>>,
    /// Unless every member is a chain: whether a restore may end after so many pages.
    ends: Vec<bool>,
    /// Pages of each member that are there without a gap, up to the position looked at.
    runs: Vec<u32>,
    /// Longest restorable length.
    len: u32,
    /// Pages that were left out because their device reads nothing at the moment.
    unreadable: u32,
    /// Every member is a chain.
    chains: bool,
}

impl Found {
    fn at(&self, position: u32, member: usize) -> Option<PageId> {
        self.pages[position as usize * self.members.len() + member]
    }

    /// Whether a restore may end after `len` pages.
    fn restorable(&self, len: u32) -> bool {
        if self.chains { len <= self.len } else { self.ends.get(len as usize) == Some(&true) }
    }

    /// Finds every restorable length in one pass, whatever the windows are.
    fn find_ends(&mut self, positions: u32) {
        self.ends.clear();
        self.ends.push(true);
        self.runs.clear();
        self.runs.resize(self.members.len(), 0);
        for position in 0..positions {
            let mut ends = true;
            for number in 0..self.members.len() {
                let run =
                    if self.at(position, number).is_some() { self.runs[number] + 1 } else { 0 };
                self.runs[number] = run;
                let needed = self.members[number].needed(position + 1);
                ends &= run >= needed.end - needed.start;
            }
            self.ends.push(ends);
        }
    }

    fn bytes(&self, len: u32) -> u64 {
        self.members.iter().map(|member| member.bytes(len)).sum()
    }

    /// The longest restorable length up to `len` whose bytes fit.
    fn cut_to(&self, len: u32, bytes: u64) -> u32 {
        let mut len = len;
        if let [only] = self.members.as_slice()
            && self.chains
        {
            let fits = bytes / charge(only.image_bytes);
            return len.min(u32::try_from(fits).unwrap_or(u32::MAX));
        }
        while len > 0 && (self.bytes(len) > bytes || !self.restorable(len)) {
            len -= 1;
        }
        len
    }
}

impl Core {
    pub(super) fn begin_query(
        &mut self,
        ctx: &Taken,
        ended: Completion,
        scope: ScopeId,
        mode: QueryMode,
        pages: &[PageEntry],
        out: &mut Effects,
    ) {
        let skip = usize::from(pages.first().is_some_and(PageEntry::is_anchor));
        if pages[skip..].iter().any(PageEntry::is_anchor) {
            return self.refuse_entries(ctx, ended, out);
        }
        let Some(found) = self.lookup(ctx.session, scope, &pages[skip..]) else {
            return self.fail(ctx, ended, Code::UnknownScope, out);
        };
        self.count_lookup(&found, pages.len() - skip);
        let Some(session) = self.sessions.get(ctx.session) else { return };
        let speculative = mode == QueryMode::Speculative;
        let queued_behind = !session.waiting.is_empty() || self.sessions.total_is_short;
        let available = self.budget.available(session.leased_bytes, speculative);
        let ceiling = found.cut_to(found.len, self.budget.ceiling(speculative));
        let now_fits = found.bytes(ceiling) <= available && !self.leases.is_full();
        let len = match mode {
            QueryMode::Candidate if self.leases.is_full() => 0,
            QueryMode::Candidate => found.cut_to(ceiling, available),
            QueryMode::Speculative if !now_fits => {
                self.stats.queries_skipped += 1;
                self.recycle(found);
                return self.fail(ctx, ended, Code::OverBudget, out);
            }
            QueryMode::Demand if ceiling > 0 && (!now_fits || queued_behind) => {
                let bytes = found.bytes(ceiling);
                self.recycle(found);
                return self.wait_for_budget(ctx, &ended, scope, pages, bytes, out);
            }
            _ => ceiling,
        };
        self.admit(ctx, ended, found, len, mode, skip, out);
    }

    /// Leases `len` pages of what was found and either answers or starts to read.
    #[allow(clippy::too_many_arguments, reason = "one admission, seen from two callers")]
    fn admit(
        &mut self,
        ctx: &Taken,
        ended: Completion,
        found: Found,
        len: u32,
        mode: QueryMode,
        skip: usize,
        out: &mut Effects,
    ) {
        if len < found.len {
            self.stats.queries_cut_by_budget += 1;
        }
        let ended = Completion { pages: len, ..ended };
        let cut = len < found.len;
        if len == 0 {
            let (status, code) =
                if cut { (Status::Partial, Code::OverBudget) } else { (Status::Ok, Code::None) };
            let start = out.results.len();
            self.push_results(&found, 0, ctx, &ended, skip, out);
            self.recycle(found);
            let results = start..out.results.len();
            let ended = Completion { status, code, prepared_ns: ctx.now, ..ended };
            return self.complete_with(ctx, ended, results, out);
        }
        let start = out.results.len();
        let (pages_dram, pages_ssd) = self.push_results(&found, len, ctx, &ended, skip, out);
        let lease = self.take_lease(ctx.session, &found, len, mode);
        let (status, code) =
            if cut { (Status::Partial, Code::OverBudget) } else { (Status::Ok, Code::None) };
        let ended = Completion { status, code, pages_dram, pages_ssd, ..ended };
        let needs_reads = mode != QueryMode::Candidate && self.lease_needs_reads(lease);
        if !needs_reads {
            self.recycle(found);
            let ended = self.grant(ctx.now, lease, ended);
            let results = start..out.results.len();
            return self.complete_with(ctx, ended, results, out);
        }
        // The answer comes later: the entries remember what the results said.
        let stage =
            Stage::Fill { lease: Some(lease), next_issue: 0, pending: 0, cut: len, hint_bytes: 0 };
        let job = self.open_job(ctx, &ended, stage);
        self.note_entries(job, &out.results[start..], found.len);
        out.results.truncate(start);
        self.note_fill(job, &found, len);
        if let Some(job) = self.jobs.get_mut(job) {
            job.mode = mode;
            job.pages_dram = pages_dram;
            job.pages_ssd = pages_ssd;
            if cut {
                job.stop_at(Code::OverBudget, None);
            }
        }
        self.recycle(found);
        self.queue_read(job);
    }

    fn note_entries(&mut self, job: JobRef, results: &[PageResult], found: u32) {
        let Some(job) = self.jobs.get_mut(job) else { return };
        job.found = found;
        job.entries.clear();
        for result in results {
            let mut entry = Entry::new(PageHash::default(), 0, EntryState::Ended);
            entry.outcome = PageOutcome::from_raw(result.outcome).unwrap_or(PageOutcome::None);
            entry.tier = Tier::from_raw(result.tier).unwrap_or(Tier::None);
            entry.code = Code::from_raw(result.code).unwrap_or(Code::None);
            entry.restorable = result.restorable != 0;
            job.entries.push(entry);
        }
    }

    /// Lists the pages that are not in DRAM, in the order in which a restore wants them.
    fn note_fill(&mut self, job: JobRef, found: &Found, len: u32) {
        let Some(job) = self.jobs.get_mut(job) else { return };
        for position in 0..len {
            for (number, member) in found.members.iter().enumerate() {
                if let Some(page) = found.at(position, number)
                    && member.needed(len).contains(&position)
                    && !self.pages[page].is_resident()
                {
                    job.fill.push(FillPage { page, position });
                }
            }
        }
    }

    /// Parks a demand query until budget is released or its deadline passes.
    fn wait_for_budget(
        &mut self,
        ctx: &Taken,
        ended: &Completion,
        scope: ScopeId,
        pages: &[PageEntry],
        bytes: u64,
        out: &mut Effects,
    ) {
        let reference = self.open_job(ctx, ended, Stage::Wait { scope });
        if let Some(job) = self.jobs.get_mut(reference) {
            job.bytes = bytes;
            job.entries.extend(pages.iter().map(|entry| {
                let state =
                    if entry.is_anchor() { EntryState::Anchor } else { EntryState::Pending };
                Entry::new(PageHash(entry.hash), 0, state)
            }));
        }
        let Some(session) = self.sessions.get_mut(ctx.session) else { return };
        session.waiting.push_back(reference);
        if session.waiting.len() == 1 {
            self.sessions.turn.push_back(ctx.session);
        }
        // The first that waits finds out what for.
        if !self.sessions.total_is_short {
            self.admit_waiting(ctx.now, out);
        }
    }

    /// Queries that wait for budget may find less than when they began to: what they needed then says
    /// nothing any more.
    pub(super) fn look_up_waiting_again(&mut self) {
        let waits = |job: &Job| matches!(job.stage, Stage::Wait { .. });
        let waiting = self.jobs.iter().filter(|(_, job)| waits(job));
        for reference in waiting.map(|(reference, _)| reference).collect::<Vec<_>>() {
            if let Some(job) = self.jobs.get_mut(reference) {
                job.bytes = 0;
            }
        }
    }

    /// Serves waiting queries, one a session in turn, until the next one does not fit the total.
    pub(super) fn admit_waiting(&mut self, now: Nanos, out: &mut Effects) {
        let mut blocked_sessions = 0;
        self.sessions.total_is_short = false;
        while blocked_sessions < self.sessions.turn.len() {
            let Some(&id) = self.sessions.turn.front() else { return };
            match self.admit_next_of(now, id, out) {
                Turn::Served => {
                    blocked_sessions = 0;
                    self.sessions.turn.pop_front();
                    self.requeue_turn(id);
                }
                Turn::SessionFull => {
                    blocked_sessions += 1;
                    self.sessions.turn.rotate_left(1);
                }
                Turn::TotalFull => {
                    self.sessions.total_is_short = true;
                    return;
                }
                Turn::Nothing => {
                    self.sessions.turn.pop_front();
                }
            }
        }
    }

    fn requeue_turn(&mut self, id: SessionId) {
        if self.sessions.get(id).is_some_and(|session| !session.waiting.is_empty()) {
            self.sessions.turn.push_back(id);
        }
    }

    fn admit_next_of(&mut self, now: Nanos, id: SessionId, out: &mut Effects) -> Turn {
        let Some(session) = self.sessions.get(id) else { return Turn::Nothing };
        let Some(&reference) = session.waiting.front() else { return Turn::Nothing };
        let leased = session.leased_bytes;
        let Some(job) = self.jobs.get(reference) else {
            if let Some(session) = self.sessions.get_mut(id) {
                session.waiting.pop_front();
            }
            return Turn::Served;
        };
        let Stage::Wait { scope } = job.stage else { return Turn::Nothing };
        // What it needed last time has to be there before its pages are looked up again.
        let room = self.budget.session_limit.saturating_sub(leased);
        if job.bytes > room {
            return Turn::SessionFull;
        }
        if job.bytes > self.budget.total.available() {
            return Turn::TotalFull;
        }
        let skip = usize::from(job.entries.first().is_some_and(|e| e.state == EntryState::Anchor));
        let hashes: Vec<PageEntry> =
            job.entries.iter().map(|entry| PageEntry::page(entry.hash, 0)).collect();
        let Some(found) = self.lookup(id, scope, &hashes[skip..]) else { return Turn::Nothing };
        let len = found.cut_to(found.len, self.budget.ceiling(false));
        let bytes = found.bytes(len);
        if let Some(job) = self.jobs.get_mut(reference) {
            job.bytes = bytes;
        }
        if bytes > room {
            self.recycle(found);
            return Turn::SessionFull;
        }
        if bytes > self.budget.total.available() || (self.leases.is_full() && len > 0) {
            self.recycle(found);
            return Turn::TotalFull;
        }
        // From here on the operation goes on as if it had just been taken.
        let Some(job) = self.jobs.get(reference) else { return Turn::Nothing };
        let ctx = Taken { now, session: id, range: job.range, deadline: job.deadline };
        let ended = Completion {
            queued_ns: job.queued_ns,
            ..Completion::ok(job.operation, RequestKind::Query)
        };
        let (operation, cancels) = (job.operation, job.cancels.is_empty());
        debug_assert!(cancels, "a cancelled query does not wait");
        self.jobs.close(reference);
        if let Some(session) = self.sessions.get_mut(id) {
            session.waiting.pop_front();
            session.credits[operation.index as usize].job = None;
        }
        self.admit(&ctx, ended, found, len, QueryMode::Demand, skip, out);
        Turn::Served
    }

    pub(super) fn begin_prepare(
        &mut self,
        ctx: &Taken,
        ended: Completion,
        scope: ScopeId,
        pages: &[PageEntry],
        out: &mut Effects,
    ) {
        let skip = usize::from(pages.first().is_some_and(PageEntry::is_anchor));
        if pages[skip..].iter().any(PageEntry::is_anchor) {
            return self.refuse_entries(ctx, ended, out);
        }
        let Some(found) = self.lookup(ctx.session, scope, &pages[skip..]) else {
            return self.fail(ctx, ended, Code::UnknownScope, out);
        };
        let mut room = self.budget.speculative.available();
        let reference = self.jobs.open();
        // One page of every rank is one page of the prompt.
        let (mut bytes, mut accepted, mut counted, mut full) = (0, 0, None, false);
        let named = ((pages.len() - skip) * found.members.len()) as u64;
        let mut known = 0;
        for position in 0..found.len {
            for (number, member) in found.members.iter().enumerate() {
                let Some(page) = found.at(position, number) else { continue };
                known += 1;
                if self.pages[page].extent.is_some() {
                    self.stats.prepared(PrepareOutcome::AlreadyThere, 1);
                    continue;
                }
                let cost = charge(member.image_bytes);
                full |= cost > room;
                if full || !member.needed(found.len).contains(&position) {
                    self.stats.prepared(PrepareOutcome::Skipped, 1);
                    continue;
                }
                room -= cost;
                bytes += cost;
                if counted.replace(position) != Some(position) {
                    accepted += 1;
                }
                self.pin(page);
                if let Some(job) = self.jobs.get_mut(reference) {
                    job.fill.push(FillPage { page, position });
                    job.pinned.push(page);
                }
            }
        }
        let unreadable = u64::from(found.unreadable);
        self.stats.prepared(PrepareOutcome::Failed, unreadable);
        self.stats.prepared(PrepareOutcome::Absent, named - known - unreadable);
        self.recycle(found);
        if accepted == 0 {
            self.jobs.close(reference);
        } else {
            self.budget.take_hint(bytes);
            self.note_peaks();
            if let Some(job) = self.jobs.get_mut(reference) {
                job.session = ctx.session;
                job.operation = ended.operation;
                job.kind = RequestKind::Prepare;
                job.silent = true;
                job.deadline = Nanos::MAX;
                job.queued_ns = ctx.now;
                job.stage = Stage::Fill {
                    lease: None,
                    next_issue: 0,
                    pending: 0,
                    cut: u32::MAX,
                    hint_bytes: bytes,
                };
            }
            self.queue_read(reference);
        }
        let ended = Completion { pages: accepted, bytes, prepared_ns: ctx.now, ..ended };
        self.complete(ctx, ended, out);
    }

    /// Looks the hashes up in every namespace of the scope. `None`: no such scope.
    fn lookup(&mut self, session: SessionId, scope: ScopeId, pages: &[PageEntry]) -> Option<Found> {
        let members = self.sessions.get(session)?.scope(scope)?.members();
        let mut found = std::mem::take(&mut self.found);
        found.members.clear();
        found.pages.clear();
        found.len = 0;
        found.unreadable = 0;
        found.chains = true;
        for &namespace in members {
            let known = self.namespaces.get(namespace);
            let dependency = known.dependency.unwrap_or_default();
            found.chains &= dependency == DependencySpec::Chain;
            let image_bytes = known.image_bytes;
            found.members.push(Member { namespace, dependency, image_bytes });
        }
        for entry in pages {
            let hash = PageHash(entry.hash);
            let before = found.pages.len();
            for member in &found.members {
                let page = self.find(member.namespace, &hash);
                let page = page.filter(|&page| self.pages[page].is_restorable());
                let at_hand = page.filter(|&page| self.is_at_hand(page));
                found.unreadable += u32::from(page != at_hand);
                found.pages.push(at_hand);
            }
            if found.chains && found.pages[before..].contains(&None) {
                found.pages.truncate(before);
                break;
            }
        }
        let positions = found.pages.len() / found.members.len().max(1);
        found.len = positions as u32;
        if !found.chains {
            found.find_ends(found.len);
            while found.len > 0 && !found.restorable(found.len) {
                found.len -= 1;
            }
        }
        Some(found)
    }

    /// Keeps the lookup's buffers for the next one.
    fn recycle(&mut self, found: Found) {
        self.found = found;
    }

    fn count_lookup(&mut self, found: &Found, pages: usize) {
        let members = found.members.len();
        self.stats.lookup_pages += (pages * members) as u64;
        self.stats.lookup_unreadable += u64::from(found.unreadable);
        for position in 0..found.len {
            for (number, member) in found.members.iter().enumerate() {
                if !member.needed(found.len).contains(&position) {
                    continue;
                }
                let Some(page) = found.at(position, number) else { continue };
                if self.pages[page].is_resident() {
                    self.stats.lookup_hits_dram += 1;
                } else {
                    self.stats.lookup_hits_ssd += 1;
                }
            }
        }
    }

    /// Appends one result an entry and counts `len` hit pages by the slower tier of their ranks.
    fn push_results(
        &mut self,
        found: &Found,
        len: u32,
        ctx: &Taken,
        ended: &Completion,
        skip: usize,
        out: &mut Effects,
    ) -> (u32, u32) {
        let operation = ended.operation;
        let (mut dram, mut ssd) = (0, 0);
        let none = PageResult::new(operation, PageOutcome::None, Tier::None, Code::None);
        out.results.extend(std::iter::repeat_n(none, skip));
        let positions = ctx.range.len as usize - skip;
        for position in 0..positions as u32 {
            let result = if position < len {
                let resident = found.members.iter().enumerate().all(|(number, member)| {
                    !member.needed(len).contains(&position)
                        || found.at(position, number).is_some_and(|p| self.pages[p].is_resident())
                });
                let tier = if resident { Tier::Dram } else { Tier::Ssd };
                if resident {
                    dram += 1
                } else {
                    ssd += 1
                }
                PageResult::new(operation, PageOutcome::Hit, tier, Code::None)
            } else {
                let code = if position < found.len { Code::OverBudget } else { Code::Absent };
                PageResult::new(operation, PageOutcome::Miss, Tier::None, code)
            };
            let looked_up = (position as usize) * found.members.len().max(1) < found.pages.len();
            let ends_here = looked_up && position < len && found.restorable(position + 1);
            out.results.push(PageResult { restorable: u16::from(ends_here), ..result });
        }
        (dram, ssd)
    }

    /// Pins the needed pages of every member and charges their bytes.
    fn take_lease(&mut self, id: SessionId, found: &Found, len: u32, mode: QueryMode) -> LeaseId {
        let speculative = mode == QueryMode::Speculative;
        let bytes = found.bytes(len);
        self.budget.take(bytes, speculative);
        self.note_peaks();
        let session = self.sessions.get_mut(id);
        let engine = session.map(|session| {
            session.leased_bytes += bytes;
            session.engine
        });
        let engine = engine.unwrap_or(orbitkv_shm_protocol::ids::EngineId([0; 16]));
        let reference = self.leases.open(engine, id, speculative);
        for (number, member) in found.members.iter().enumerate() {
            let needed = member.needed(len);
            // Parents that the range leaves out are refreshed with it.
            let first = found.at(needed.start, number);
            let outside = first.and_then(|page| self.pages.parent(page));
            self.touch_upwards(outside, 0);
            let start = self.leases.get(reference).map_or(0, |lease| lease.pages.len() as u32);
            for position in needed.clone() {
                let Some(page) = found.at(position, number) else { continue };
                self.pages[page].hits = self.pages[page].hits.saturating_add(1);
                self.offer_reused(page);
                self.pin(page);
                if let Some(lease) = self.leases.get_mut(reference) {
                    lease.pages.push(LeasedPage { page, ended: false });
                }
            }
            if let Some(lease) = self.leases.get_mut(reference) {
                let len = needed.end - needed.start;
                lease.bytes = bytes;
                lease.live_pages += len;
                lease.parts.push(LeasePart {
                    namespace: member.namespace,
                    image_bytes: member.image_bytes,
                    first: needed.start,
                    start,
                    len,
                });
            }
        }
        reference
    }

    fn lease_needs_reads(&self, lease: LeaseId) -> bool {
        let Some(lease) = self.leases.get(lease) else { return false };
        lease.pages.iter().any(|leased| !self.pages[leased.page].is_resident())
    }

    /// Starts the clock of a lease and puts it into the answer.
    fn grant(&mut self, now: Nanos, reference: LeaseId, ended: Completion) -> Completion {
        let expires = now.saturating_add(self.config.lease_ttl_ns);
        self.leases.start_clock(reference, expires);
        self.stats.leases_granted += 1;
        let bytes = self.leases.get(reference).map_or(0, |lease| lease.bytes);
        Completion {
            lease: Some(reference),
            lease_expires_ns: expires,
            bytes,
            prepared_ns: now,
            ..ended
        }
    }

    /// Leaves the bytes of what a hint ordered to the reads that have not ended: a device went off, or
    /// a save was faster. Returns how many bytes that is.
    fn leave_hint_to_reads(&mut self, reference: JobRef, ordered: u32) -> u64 {
        let Self { jobs, pages, namespaces, flow, .. } = self;
        let Some(job) = jobs.get(reference) else { return 0 };
        let held = job.fill.iter().take(ordered as usize).map(|fill| fill.page);
        if held.clone().any(|page| pages[page].reading || pages[page].overtaken) {
            flow.leave_hint(held, |page| charge(namespaces.get(pages[page].namespace).image_bytes))
        } else {
            0
        }
    }

    /// Ends the fill of a query or hint: grants what is there, lets go of the rest.
    pub(super) fn finish_fill(&mut self, now: Nanos, reference: JobRef, out: &mut Effects) {
        let Some(job) = self.jobs.get_mut(reference) else { return };
        let Stage::Fill { lease, cut, hint_bytes, next_issue, .. } = job.stage else { return };
        let (operation, kind, stop) = (job.operation, job.kind, job.stop);
        let Some(lease) = lease else {
            let left_bytes = self.leave_hint_to_reads(reference, next_issue);
            let Some(job) = self.jobs.get_mut(reference) else { return };
            let pinned = std::mem::take(&mut job.pinned);
            let resident = pinned.iter().filter(|&&page| self.pages[page].is_resident()).count();
            let short = stop.is_some_and(|stop| stop.code != Code::IoError);
            let rest = if short { PrepareOutcome::Skipped } else { PrepareOutcome::Failed };
            self.stats.prepared(PrepareOutcome::Prepared, resident as u64);
            self.stats.prepared(rest, (pinned.len() - resident) as u64);
            for &page in pinned.iter().rev() {
                self.unpin(page, out);
            }
            self.refresh(pinned.iter().rev().copied());
            if let Some(job) = self.jobs.get_mut(reference) {
                job.pinned = pinned;
            }
            self.budget.give_hint(hint_bytes - left_bytes);
            let ended = Completion::ok(operation, kind);
            self.end_job(now, reference, ended, out);
            return self.admit_waiting(now, out);
        };
        // Nobody would know of a lease that an abandoned query was given.
        let cancelled = job.abandoned || stop.is_some_and(|stop| stop.code == Code::Cancelled);
        let len = if cancelled { 0 } else { self.shorten_lease(lease, cut, out) };
        let (mut dram, mut ssd) = (0, 0);
        let Some(job) = self.jobs.get_mut(reference) else { return };
        job.prepared_ns = now;
        let asked = job.entries.iter().filter(|entry| entry.outcome == PageOutcome::Hit).count();
        let hits = job.entries.iter_mut().filter(|entry| entry.outcome == PageOutcome::Hit);
        for (position, entry) in hits.enumerate() {
            if position < len as usize {
                if entry.tier == Tier::Dram { dram += 1 } else { ssd += 1 }
            } else {
                entry.outcome = PageOutcome::Miss;
                entry.restorable = false;
                entry.tier = Tier::None;
                entry.code = stop.map_or(Code::Absent, |stop| stop.code);
            }
        }
        let mut ended = Completion::ok(operation, kind);
        ended.pages = len;
        ended.pages_dram = dram;
        ended.pages_ssd = ssd;
        if let Some(stop) = stop {
            ended.code = stop.code;
            ended.status = if cancelled { Status::Error } else { Status::Partial };
        } else if (len as usize) < asked {
            ended.status = Status::Partial;
            ended.code = Code::IoError;
        }
        if len > 0 {
            ended = self.grant(now, lease, ended);
        } else {
            self.end_lease(lease, out);
        }
        self.end_job(now, reference, ended, out);
        self.admit_waiting(now, out);
    }

    /// Cuts a lease that was not granted yet to `cut` positions. Returns the length that a
    /// restore may use.
    fn shorten_lease(&mut self, reference: LeaseId, cut: u32, out: &mut Effects) -> u32 {
        let Some(lease) = self.leases.get(reference) else { return 0 };
        let longest = lease.parts.iter().map(|part| part.first + part.len).max().unwrap_or(0);
        if cut >= longest {
            return longest;
        }
        let chains = lease.parts.iter().all(|part| part.first == 0 && part.len == longest);
        if !chains || cut == 0 {
            // A window or state part holds only what the full length needs.
            return 0;
        }
        let (mut freed, mut dropped) = (0, Vec::new());
        let Some(lease) = self.leases.get_mut(reference) else { return 0 };
        for part in &mut lease.parts {
            let pages = part.start + cut..part.start + part.len;
            dropped.extend(pages.clone());
            freed += u64::from(part.len - cut) * charge(part.image_bytes);
            lease.live_pages -= part.len - cut;
            part.len = cut;
        }
        lease.bytes -= freed;
        let (speculative, session) = (lease.speculative, lease.session);
        let mut pages = Vec::with_capacity(dropped.len());
        for index in dropped {
            lease.pages[index as usize].ended = true;
            pages.push(lease.pages[index as usize].page);
        }
        for &page in pages.iter().rev() {
            self.unpin(page, out);
        }
        self.refresh(pages.iter().rev().copied());
        self.give_budget(session, freed, speculative);
        cut
    }

    pub(super) fn give_budget(
        &mut self,
        session: Option<SessionId>,
        bytes: u64,
        speculative: bool,
    ) {
        self.budget.give(bytes, speculative);
        let Some(id) = session else { return };
        let Some(session) = self.sessions.get_mut(id) else { return };
        session.leased_bytes -= bytes;
        if session.leased_bytes == 0 && !session.drains.is_empty() {
            self.rested.push(id);
        }
    }

    fn note_peaks(&mut self) {
        self.stats.query_budget_peak_bytes = self.budget.total.peak();
        self.stats.speculative_budget_peak_bytes = self.budget.speculative.peak();
    }
}

enum Turn {
    Served,
    SessionFull,
    TotalFull,
    Nothing,
}
