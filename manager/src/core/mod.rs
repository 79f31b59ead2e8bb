//! Pure decisions: who may save, what is hit, who waits, which page goes, what is written where.
//!
//! No threads, clocks, system calls or `unsafe`. [`Event`]s with a timestamp go in, [`Effect`]s come
//! out; the same code runs in the Manager, under the seeded simulator and in `orbitkv simulate`.
//!
//! | file | decides |
//! | --- | --- |
//! | `index`, `replacement` | which pages exist, how they are found, who was used last |
//! | `life` | how a page gains and loses replicas, pins and its place in the tree |
//! | `extents`, `slots` | which bytes of DRAM and SSD a page has |
//! | `namespace`, `session`, `lease` | whose pages, who is attached, who holds what |
//! | `admission`, `query` | what a query may lease and what it waits for |
//! | `save`, `restore`, `flow` | what is copied and read next, in fair turns |
//! | `in_flight` | how much each SSD device has in hand, and who waits for it |
//! | `spill`, `history`, `write_budget` | what is written to SSD and how much, and what was here before |
//! | `recover` | what is found on SSD again |
//! | `limits` | the bounds of all of these |
//! | `control` | release, cancel, forget, unregister, drain, closed sessions, deadlines |

mod admission;
mod control;
mod effect;
mod event;
mod extents;
mod flow;
mod geometry;
mod history;
mod in_flight;
mod index;
mod job;
mod laws;
mod lease;
mod life;
pub mod limits;
mod namespace;
mod query;
mod recover;
mod registration;
mod replacement;
mod restore;
mod save;
mod session;
mod slots;
mod spill;
mod stats;
mod view;
mod write_budget;

use orbitkv_shm_protocol::ids::{OperationId, SessionId};
use orbitkv_shm_protocol::layout::PAGES_PER_REQUEST_MAX;
use orbitkv_shm_protocol::record::{
    Code, Completion, PageEntry, PageResult, Request, RequestBody, RequestKind, Status,
};

use admission::Budget;
use flow::{CopyEnded, Flow};
use history::History;
use index::{Index, PageId, PageSlab};
use job::{JobRef, Jobs};
use lease::Leases;
use namespace::{NamespaceId, Namespaces};
use recover::Recovery;
use replacement::{ListKind, Recency};
use session::{Session, Sessions};
use slots::Slots;
use write_budget::WriteBudget;

pub use effect::{
    CopyPage, Direction, Effect, Effects, Extent, FenceWait, GENERATIONS_END, ImageIdentity,
    PeerFault, Slot,
};
pub use event::{CopyFault, Event, IoFault, Nanos, Ticket};
pub use extents::{Extents, UNIT_BYTES};
pub use geometry::{FOOTER_BYTES, RegionGeometry};
#[doc(hidden)]
pub use laws::PageView;
pub use namespace::{NamespaceFingerprint, namespace_fingerprint};
pub use recover::{Recovered, RecoveredPage};
pub use registration::{CoreRefusal, RegionKind};
pub use slots::{DeviceLayout, Intake, slot_bytes};
pub use spill::SpillPolicy;
pub use stats::{Gauges, LeaseEnd, PrepareOutcome, SpillOutcome, Stats};
pub use view::{Evicted, Eviction, LeaseView, NamespaceView, OperationView, SessionView};

/// Everything that `core` is told once.
#[derive(Clone, Debug)]
pub struct CoreConfig {
    /// Bytes of each DRAM arena.
    pub arena_bytes: Vec<u64>,
    /// SSD devices in configuration order, empty for DRAM only.
    pub devices: Vec<DeviceLayout>,
    /// Bytes of leases of all sessions.
    pub query_budget_bytes: u64,
    /// Bytes of speculative leases and hints.
    pub speculative_budget_bytes: u64,
    /// Bytes of leases of one session.
    pub session_budget_bytes: u64,
    /// Life of a lease.
    pub lease_ttl_ns: Nanos,
    /// Deadline of an operation that names none.
    pub operation_timeout_ns: Nanos,
    /// Largest page image.
    pub page_bytes_max: u64,
    /// Malformed requests after which a session is closed.
    pub bad_requests_max: u32,
    /// Bytes that one copy command moves, at least one page.
    pub copy_quantum_bytes: u64,
    /// The same of regions on GPUs.
    pub gpu_copy_quantum_bytes: u64,
    /// Bytes that one operation may have read ahead of its copies or its answer, at least one page.
    pub read_window_bytes: u64,
    /// Bytes of reads in flight of one SSD device, at least one page.
    pub reads_in_flight_bytes: u64,
    /// Read commands in flight of one SSD device.
    pub reads_in_flight_max: u32,
    /// Bytes of writes handed to one SSD device, at least one page.
    pub writes_in_flight_bytes: u64,
    /// Write commands handed to one SSD device.
    pub writes_in_flight_max: u32,
    /// What enters the spill set.
    pub spill_policy: SpillPolicy,
    /// Bytes of slots that may be written a day; `None` for no bound.
    pub write_budget_bytes_a_day: Option<u64>,
    /// Keeps clients from choosing hash collisions: random in the Manager, fixed in tests.
    pub hash_seed: u64,
    /// Most namespaces of an epoch.
    pub namespaces_max: usize,
    /// Most namespaces and sets that one session may define.
    pub scopes_per_session_max: usize,
    /// Most regions of one session at a time.
    pub regions_per_session_max: usize,
    /// Most events of one session.
    pub events_per_session_max: usize,
    /// Most pages that one turn drops for a forget or behind a lost page, or looks at for an eviction of everything.
    pub pages_dropped_per_turn: u32,
    /// Most pages found on SSD that one turn takes over.
    pub pages_recovered_per_turn: u32,
    /// Emit [`Effect::Dropped`].
    pub report_drops: bool,
}

impl CoreConfig {
    /// Defaults for a pool of `dram_bytes` and at most one SSD device: query budget half of it, speculative a
    /// quarter of that, sessions up to the query budget.
    pub fn with_dram(dram_bytes: u64) -> Self {
        let query_budget_bytes = limits::query_budget_bytes(dram_bytes);
        Self {
            arena_bytes: vec![dram_bytes],
            devices: Vec::new(),
            query_budget_bytes,
            speculative_budget_bytes: limits::speculative_budget_bytes(query_budget_bytes),
            session_budget_bytes: query_budget_bytes,
            lease_ttl_ns: limits::LEASE_TTL_NS,
            operation_timeout_ns: limits::OPERATION_TIMEOUT_NS,
            page_bytes_max: limits::PAGE_BYTES_MAX,
            bad_requests_max: limits::BAD_REQUESTS_MAX,
            copy_quantum_bytes: limits::COPY_QUANTUM_BYTES,
            gpu_copy_quantum_bytes: limits::GPU_COPY_QUANTUM_BYTES,
            read_window_bytes: limits::READ_WINDOW_BYTES,
            reads_in_flight_bytes: limits::READS_IN_FLIGHT_BYTES,
            reads_in_flight_max: limits::READS_IN_FLIGHT_MAX,
            writes_in_flight_bytes: limits::writes_in_flight_bytes(dram_bytes, 1),
            writes_in_flight_max: limits::WRITES_IN_FLIGHT_MAX,
            spill_policy: SpillPolicy::All,
            write_budget_bytes_a_day: None,
            hash_seed: 0x6f72_6269_746b_7600,
            namespaces_max: limits::NAMESPACES_MAX,
            scopes_per_session_max: limits::SCOPES_PER_SESSION_MAX as usize,
            regions_per_session_max: limits::REGIONS_PER_SESSION_MAX as usize,
            events_per_session_max: limits::EVENTS_PER_SESSION_MAX as usize,
            pages_dropped_per_turn: limits::PAGES_DROPPED_PER_TURN,
            pages_recovered_per_turn: limits::PAGES_RECOVERED_PER_TURN,
            report_drops: false,
        }
    }
}

/// The state of every page, lease, budget and operation of one Manager.
#[derive(Debug)]
pub struct Core {
    config: CoreConfig,
    pages: PageSlab,
    index: Index,
    extents: Extents,
    slots: Slots,
    /// While the slots are not all known.
    recovery: Option<Recovery>,
    /// See [`take_used_up`](Self::take_used_up).
    used_up: Option<Recovered>,
    namespaces: Namespaces,
    sessions: Sessions,
    leases: Leases,
    jobs: Jobs,
    flow: Flow,
    budget: Budget,
    /// Unpinned pages with a DRAM replica, coldest first.
    dram: Recency,
    /// Resident pages that wait to be written, coldest first.
    spill: Recency,
    spill_bytes: u64,
    /// Keys of pages that left every tier, for the `reuse` policy.
    history: History,
    /// What may still be written, when that is bounded.
    write_budget: Option<WriteBudget>,
    pinned_bytes: u64,
    draining_bytes: u64,
    /// Pages with a replica in DRAM or one on its way there, over all namespaces.
    dram_pages: u64,
    /// Pages with a slot, over all namespaces.
    ssd_pages: u64,
    /// Counts touches: the only notion of age that pages of different sizes share.
    touches: u64,
    /// No region is looked at for another slot size before so many touches.
    reclaim_after: u64,
    /// Numbers the allocations whose own pages must not be evicted for them.
    guard: u64,
    /// Namespaces with forgotten pages that wait to be dropped.
    doomed: Vec<NamespaceId>,
    /// Buffer of a save.
    extents_of_save: Vec<Extent>,
    /// Pages whose children wait to be dropped or to lose their place on SSD, with what is counted
    /// of those that wait to be written.
    unsettled: Vec<(PageId, SpillOutcome)>,
    /// Counts dropped pages with children, from 1.
    cuts: u64,
    /// Sessions whose last lease ended through somebody else: their drains may end.
    rested: Vec<SessionId>,
    /// Earliest deadline of any job; may be too early, never too late.
    next_deadline: Nanos,
    /// Buffers of the last lookup.
    found: query::Found,
    stats: Stats,
}

impl Core {
    /// An empty Manager.
    pub fn new(config: CoreConfig) -> Self {
        let budget = Budget::new(
            config.query_budget_bytes,
            config.speculative_budget_bytes,
            config.session_budget_bytes,
        );
        let slots = Slots::new(&config.devices);
        let remembers = config.spill_policy == SpillPolicy::Reuse;
        let history_bytes = if remembers { slots.data_bytes() } else { 0 };
        Self {
            pages: PageSlab::default(),
            index: Index::new(config.hash_seed),
            extents: Extents::new(&config.arena_bytes),
            slots,
            recovery: None,
            used_up: None,
            history: History::new(history_bytes, config.hash_seed),
            namespaces: Namespaces::default(),
            sessions: Sessions::default(),
            leases: Leases::new(),
            jobs: Jobs::default(),
            flow: Flow::new(&config),
            budget,
            dram: Recency::new(ListKind::Dram),
            spill: Recency::new(ListKind::Spill),
            spill_bytes: 0,
            write_budget: config.write_budget_bytes_a_day.map(WriteBudget::new),
            pinned_bytes: 0,
            draining_bytes: 0,
            dram_pages: 0,
            ssd_pages: 0,
            touches: 0,
            reclaim_after: 0,
            guard: 0,
            doomed: Vec::new(),
            extents_of_save: Vec::new(),
            unsettled: Vec::new(),
            cuts: 1,
            rested: Vec::new(),
            next_deadline: Nanos::MAX,
            found: query::Found::default(),
            stats: Stats::default(),
            config,
        }
    }

    /// Takes one event and appends what follows from it. Call [`pump`](Self::pump) after the last
    /// event of a turn.
    pub fn handle(&mut self, now: Nanos, event: Event<'_>, out: &mut Effects) {
        match event {
            Event::SessionOpened { session, engine, uid, credits, page_entries } => {
                self.stats.sessions_opened += 1;
                self.sessions.open(session, Session::new(engine, uid, credits, page_entries));
            }
            Event::SessionClosed { session } => self.close_session(now, session, out),
            Event::Requested { session, request, pages } => {
                self.request(now, session, &request, pages, out);
            }
            Event::Malformed { session, operation } => {
                if self.sessions.get(session).is_some_and(|s| !s.closing) {
                    let ended = Completion::ok(operation, RequestKind::Ping);
                    self.refuse_request(now, session, ended, Code::BadRequest, out);
                }
            }
            Event::Copied { ticket, pages_done, fault, ended_ns, checksums } => {
                let end = CopyEnded { ticket, pages_done, fault, ended_ns, checksums };
                self.copied(now, &end, out);
            }
            Event::ReadEnded { ticket, fault } => self.read_ended(now, ticket, fault, out),
            Event::WriteEnded { ticket, fault, checksum } => {
                self.write_ended(ticket, fault, checksum, out);
            }
            Event::ForgetRecorded { ticket, fault } => {
                self.forget_recorded(now, ticket, fault, out);
            }
            Event::Tick => self.tick(now, out),
        }
        self.end_drains(now, out);
    }

    /// Orders as many copies, reads and writes as may be in flight.
    pub fn pump(&mut self, now: Nanos, out: &mut Effects) {
        self.drop_forgotten(out);
        self.advance_recovery(out);
        self.pump_reads(now, out);
        self.pump_copies(now, out);
        self.pump_writes(now, out);
        self.end_drains(now, out);
    }

    /// Whether forgotten pages, or such as hang on a lost one, wait for another
    /// [`pump`](Self::pump) to be dropped.
    pub fn has_forgotten_pages(&self) -> bool {
        !self.doomed.is_empty() || !self.unsettled.is_empty()
    }

    fn request(
        &mut self,
        now: Nanos,
        session: SessionId,
        request: &Request,
        pages: &[PageEntry],
        out: &mut Effects,
    ) {
        let ended =
            Completion { queued_ns: now, ..Completion::ok(request.operation, request.kind()) };
        match self.check_request(session, request, pages) {
            Check::Closed => return,
            Check::NoCredit => {
                let fault = PeerFault::NoCredit { operation: request.operation };
                out.list.push(Effect::CloseSession { session, fault });
                self.close_session(now, session, out);
                return;
            }
            Check::Bad(code) => {
                self.refuse_request(now, session, ended, code, out);
                return;
            }
            Check::Good => {}
        }
        let Some(found) = self.sessions.get_mut(session) else { return };
        found.outstanding += 1;
        found.credits[request.operation.index as usize].last_generation =
            request.operation.generation;
        found.take_range(request.range);
        let ctx =
            Taken { now, session, range: request.range, deadline: self.deadline(now, request) };
        match request.body {
            RequestBody::Save { region, fence } => {
                self.begin_save(&ctx, ended, region, fence, pages, out);
            }
            RequestBody::Query { scope, mode } => {
                self.begin_query(&ctx, ended, scope, mode, pages, out);
            }
            RequestBody::Restore { region, lease, offset, fence, keep, by_layer } => {
                let ask = restore::Ask { region, lease, offset, fence, keep, by_layer };
                self.begin_restore(&ctx, ended, &ask, pages, out);
            }
            RequestBody::Release { lease } => self.release(&ctx, ended, lease, out),
            RequestBody::Cancel { operation } => self.cancel(&ctx, ended, operation, out),
            RequestBody::Prepare { scope } => self.begin_prepare(&ctx, ended, scope, pages, out),
            RequestBody::Forget { scope } => self.begin_forget(&ctx, ended, scope, out),
            RequestBody::Unregister { region } => self.unregister(&ctx, ended, region, out),
            RequestBody::Ping => self.complete(&ctx, ended, out),
            RequestBody::Drain => self.begin_drain(&ctx, ended, out),
        }
    }

    fn deadline(&self, now: Nanos, request: &Request) -> Nanos {
        let is_forget = request.kind() == RequestKind::Forget;
        let wait = match request.deadline_ms {
            // Not before it is known what is on SSD can it be recorded: that takes as long as it takes.
            0 if is_forget && self.is_in_census() => return Nanos::MAX,
            0 => self.config.operation_timeout_ns,
            ms => u64::from(ms) * 1_000_000,
        };
        now.saturating_add(wait)
    }

    fn check_request(&self, id: SessionId, request: &Request, pages: &[PageEntry]) -> Check {
        let Some(session) = self.sessions.get(id).filter(|session| !session.closing) else {
            return Check::Closed;
        };
        if session.outstanding as usize >= session.credits.len() {
            return Check::NoCredit;
        }
        let Some(credit) = session.credit(request.operation) else {
            return Check::Bad(Code::BadRequest);
        };
        if credit.job.is_some() {
            return Check::Bad(Code::OperationInUse);
        }
        let generation = request.operation.generation;
        if !OperationId::generation_follows(credit.last_generation, generation) {
            return Check::Bad(Code::BadRequest);
        }
        let with_pages = matches!(
            request.kind(),
            RequestKind::Save | RequestKind::Query | RequestKind::Restore | RequestKind::Prepare
        );
        let range = request.range;
        let end = u64::from(range.start) + u64::from(range.len);
        let fits = end <= u64::from(session.page_entries)
            && range.len <= PAGES_PER_REQUEST_MAX
            && pages.len() == range.len as usize;
        if (!with_pages && range.len != 0) || !fits {
            return Check::Bad(Code::BadRequest);
        }
        if range.len > 0 && !session.range_is_free(range) {
            return Check::Bad(Code::RangeInUse);
        }
        Check::Good
    }

    /// Answers a request that no correct client sends. The sixteenth closes the session.
    fn refuse_request(
        &mut self,
        now: Nanos,
        session: SessionId,
        ended: Completion,
        code: Code,
        out: &mut Effects,
    ) {
        self.stats.bad_requests += 1;
        self.stats.operations[ended.kind as usize][Status::Error as usize] += 1;
        let completion = Completion { status: Status::Error, code, queued_ns: now, ..ended };
        out.list.push(Effect::Complete { session, completion, results: 0..0, results_start: 0 });
        self.count_bad_request(now, session, out);
    }

    /// [`refuse_request`](Self::refuse_request) for one whose page entries no correct client writes.
    fn refuse_entries(&mut self, ctx: &Taken, ended: Completion, out: &mut Effects) {
        self.stats.bad_requests += 1;
        self.fail(ctx, ended, Code::BadRequest, out);
        self.count_bad_request(ctx.now, ctx.session, out);
    }

    fn count_bad_request(&mut self, now: Nanos, session: SessionId, out: &mut Effects) {
        let Some(found) = self.sessions.get_mut(session) else { return };
        found.bad_requests += 1;
        if found.bad_requests >= self.config.bad_requests_max {
            let fault = PeerFault::TooManyBadRequests { count: found.bad_requests };
            out.list.push(Effect::CloseSession { session, fault });
            self.close_session(now, session, out);
        }
    }

    /// Ends an operation that has no job, without page results.
    fn complete(&mut self, ctx: &Taken, ended: Completion, out: &mut Effects) {
        self.complete_with(ctx, ended, 0..0, out);
    }

    /// Ends an operation that has no job with the results at `results`.
    fn complete_with(
        &mut self,
        ctx: &Taken,
        ended: Completion,
        results: std::ops::Range<usize>,
        out: &mut Effects,
    ) {
        let Some(session) = self.sessions.get_mut(ctx.session) else { return };
        session.outstanding -= 1;
        session.give_range(ctx.range);
        self.stats.operations[ended.kind as usize][ended.status as usize] += 1;
        out.list.push(Effect::Complete {
            session: ctx.session,
            completion: ended,
            results,
            results_start: ctx.range.start,
        });
        self.session_may_rest(ctx.now, ctx.session, out);
    }

    /// Ends an operation that has no job with an error.
    fn fail(&mut self, ctx: &Taken, ended: Completion, code: Code, out: &mut Effects) {
        self.complete(ctx, Completion { status: Status::Error, code, ..ended }, out);
    }

    /// Makes a job for an operation that cannot end at once.
    fn open_job(&mut self, ctx: &Taken, ended: &Completion, stage: job::Stage) -> JobRef {
        let reference = self.jobs.open();
        if let Some(job) = self.jobs.get_mut(reference) {
            job.session = ctx.session;
            job.operation = ended.operation;
            job.kind = ended.kind;
            job.range = ctx.range;
            job.deadline = ctx.deadline;
            job.queued_ns = ctx.now;
            job.stage = stage;
        }
        if let Some(session) = self.sessions.get_mut(ctx.session) {
            session.credits[ended.operation.index as usize].job = Some(reference);
        }
        self.next_deadline = self.next_deadline.min(ctx.deadline);
        reference
    }

    /// Ends a job: results of its entries, its record, then the `Cancel`s that wait for it.
    fn end_job(&mut self, now: Nanos, reference: JobRef, ended: Completion, out: &mut Effects) {
        let Some(job) = self.jobs.get_mut(reference) else { return };
        let (id, silent, abandoned) = (job.session, job.silent, job.abandoned);
        let (range, operation, fence) = (job.range, job.operation, job.fence);
        let held = std::mem::replace(&mut job.held, false);
        let cancels = std::mem::take(&mut job.cancels);
        let completion = Completion {
            operation,
            kind: job.kind,
            queued_ns: job.queued_ns,
            prepared_ns: job.prepared_ns,
            copied_ns: job.copied_ns,
            ..ended
        };
        let start = out.results.len();
        if !silent && !abandoned {
            let results = job.entries.iter().map(|entry| {
                let (outcome, tier, code) = (entry.outcome, entry.tier, entry.code);
                let result = PageResult::new(operation, outcome, tier, code);
                PageResult { restorable: entry.restorable.into(), ..result }
            });
            out.results.extend(results);
        }
        let results = start..out.results.len();
        self.jobs.close(reference);
        if silent {
            self.session_may_rest(now, id, out);
            return;
        }
        let Some(session) = self.sessions.get_mut(id) else { return };
        session.outstanding -= 1;
        session.give_range(range);
        session.credits[operation.index as usize].job = None;
        if let Some(fence) = fence {
            session.events[fence.index as usize] = false;
        }
        if held {
            session.held.iter_mut().for_each(|held| held.retain(|&other| other != reference));
        }
        if session.held.iter().any(|held| !held.is_empty()) {
            // It may have been woken and have ended before it used its turn.
            self.wake_held(id);
        }
        let Some(session) = self.sessions.get_mut(id) else { return };
        if abandoned {
            if ended.kind == RequestKind::Restore && ended.status != Status::Ok {
                out.list.push(Effect::RestoreFailed { session: id, operation });
            }
            self.stats.operations_abandoned += 1 + cancels.len() as u64;
            session.outstanding -= cancels.len() as u32;
        } else {
            self.stats.operations[completion.kind as usize][completion.status as usize] += 1;
            let results_start = range.start;
            out.list.push(Effect::Complete { session: id, completion, results, results_start });
            for &(operation, queued_ns) in &cancels {
                if let Some(session) = self.sessions.get_mut(id) {
                    session.credits[operation.index as usize].job = None;
                }
                let ended =
                    Completion { queued_ns, ..Completion::ok(operation, RequestKind::Cancel) };
                let ctx =
                    Taken { now, session: id, range: Default::default(), deadline: Nanos::MAX };
                self.complete(&ctx, ended, out);
            }
        }
        self.session_may_rest(now, id, out);
    }
}

/// What every operation needs to know of its request.
#[derive(Clone, Copy, Debug)]
struct Taken {
    now: Nanos,
    session: SessionId,
    range: orbitkv_shm_protocol::record::PageRange,
    deadline: Nanos,
}

enum Check {
    Good,
    Closed,
    NoCredit,
    Bad(Code),
}
