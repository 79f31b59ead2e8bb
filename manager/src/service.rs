//! The reactor: one thread that drains rings, asks `core`, and pumps what follows between rings,
//! device, SSD tier and endpoint.
//!
//! A turn takes a bounded amount from every source, so that nobody holds anybody else, and then
//! executes all effects. Without work the thread spins while that has been paying off and then
//! sleeps on every session's doorbell and its own control word together.

mod client;
mod report;
mod storage;
mod waiting;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use orbitkv_shm_protocol::doorbell::{ControlBell, WAIT_WORDS_MAX, wait_many};
use orbitkv_shm_protocol::ids::{OperationId, RegionId, SessionId};
use orbitkv_shm_protocol::record::{Completion, PageEntry, RequestKind, SessionState, Status};
use orbitkv_shm_protocol::telemetry::{CloseReason, CopyMethod, ManagerState, Metric};

use crate::clock::{Clock, nanos_of};
use crate::config::WaitMode;
use crate::core::{
    CopyFault, CopyPage, Core, CoreRefusal, Direction, Effect, Effects, Event, Eviction, FenceWait,
    Nanos, SessionView, Ticket,
};
use crate::device::{CopyCommand, CopyError, Device, DeviceRegion, DoneWord, Fence};
use crate::endpoint::{
    Answer, CloseCause, Endpoint, EndpointCounters, EndpointEvent, EndpointReply, Limiter,
    ListenError, QuestionId,
};
use crate::telemetry::Telemetry;
use client::{Client, ClientFault};
use waiting::Waiting;

pub use storage::Storage;

/// Requests taken from one ring in one turn.
const REQUESTS_PER_TURN: u32 = 64;
/// Turns that look at requests only, one after the other, before everything else is looked at.
const QUICK_TURNS_MAX: u32 = 8;
/// No such turn begins later than this after the first: long queries of many clients must not hold
/// up copies and the heartbeat.
const QUICK_TIME_MAX_NS: Nanos = 200_000;
/// Page entries after which no further request is taken from one ring in one turn: full requests
/// of 16,384 pages by the dozen must not hold the other sessions.
const PAGES_PER_TURN: u32 = 16_384;
/// Ends of copies and of SSD work, and endpoint events, taken in one turn.
const ENDS_PER_TURN: u32 = 256;
/// Longest sleep: bounds a lost wake and keeps the heartbeat young.
const PARK_MAX: Duration = Duration::from_millis(50);
/// Looks at the rings between two looks at everything else while spinning.
const LOOKS_PER_SPIN: u32 = 16;
/// How often tables that cost a walk are shown.
const TABLES_INTERVAL_NS: Nanos = 20_000_000;
/// See [`TABLES_INTERVAL_NS`]: at the latest, however long the walk takes.
const TABLES_INTERVAL_NS_MAX: Nanos = 200_000_000;
/// How long the last SSD orders may take at a stop.
const STORAGE_STOP_MAX: Duration = Duration::from_secs(2);
/// When the last of them and their workers must have ended, whatever the kernel keeps, counted from the begin of the stop: early enough for the 10 s that a
/// stop may take in all.
const STORAGE_STOP_BY: Duration = Duration::from_millis(9_200);
/// What they have all the same, to write the superblocks.
const STORAGE_STOP_MIN: Duration = Duration::from_millis(500);
/// How long a stop waits for operations under way before it closes the sessions, and for the first
/// sign of when the search for what is on SSD, before which nothing can be written, will end.
const STOP_GRACE: Duration = Duration::from_secs(2);

/// What the reactor is made of.
pub struct ServiceParts {
    /// Decisions.
    pub core: Core,
    /// Copies.
    pub device: Box<dyn Device>,
    /// SSD work; `None` is DRAM only.
    pub storage: Option<Storage>,
    /// Sessions.
    pub endpoint: Endpoint<DeviceRegion>,
    /// Numbers.
    pub telemetry: Telemetry,
    /// What the other threads ring.
    pub bell: ControlBell,
    /// Time.
    pub clock: Clock,
    /// How to wait.
    pub wait: WaitMode,
    /// How long to spin before a sleep; zero on one processor.
    pub spin_window: Duration,
    /// Longest drain at a stop.
    pub stop_timeout: Duration,
}

/// An administrative eviction that waits for the spill set.
struct PendingEviction {
    question: QuestionId,
    deadline: Nanos,
    /// Once it has begun, with whether the spill set was empty then.
    running: Option<(Eviction, bool)>,
}

/// A stop under way.
#[derive(Clone, Copy)]
struct Stopping {
    began: Nanos,
    close_sessions_at: Nanos,
    give_up_at: Nanos,
    sessions_closed: bool,
}

/// The reactor's state.
pub struct Service {
    core: Core,
    device: Box<dyn Device>,
    storage: Option<Storage>,
    telemetry: Telemetry,
    bell: ControlBell,
    clock: Clock,
    waiting: Waiting,
    stop_timeout: Duration,
    /// In the order of their session ids, which is that of their attachment.
    clients: Vec<Client>,
    /// What is to be executed.
    effects: Effects,
    /// What is being executed; what follows from that goes to `effects`.
    executing: Effects,
    entries: Vec<PageEntry>,
    /// Whose the copies in flight are.
    copying: Vec<(Ticket, SessionId)>,
    /// Sessions to end in this turn, and why.
    failing: Vec<(SessionId, CopyError)>,
    /// Commands that a full queue gave back; first in the next turn.
    refused: VecDeque<CopyCommand>,
    /// Replies that a full queue gave back.
    replies: VecDeque<EndpointReply<DeviceRegion>>,
    evictions: Vec<PendingEviction>,
    /// Completions that were published and are yet to be counted.
    ended: Vec<Completion>,
    page_buffers: Vec<Vec<CopyPage>>,
    checksum_buffers: Vec<Vec<u64>>,
    cut_off_log: Limiter,
    /// Totals of the endpoint thread.
    counters: Arc<EndpointCounters>,
    stopping: Option<Stopping>,
    /// Since when what is on SSD is being found again.
    recovering_since: Option<Nanos>,
    tables_shown_ns: Nanos,
    tables_interval_ns: Nanos,
    /// Something happened since the tables were shown.
    tables_stale: bool,
    /// Something happened since the numbers were published.
    numbers_stale: bool,
    /// Requests were answered since the rings' positions were mirrored.
    rings_stale: bool,
    /// Pages in DRAM and on SSD of each namespace, as last shown.
    namespaces_shown: Vec<(u64, u64)>,
    /// Buffer of a table turn.
    session_views: Vec<SessionView>,
    turns: u64,
    /// Dropped last: it holds the lock that makes the telemetry segment ours to remove.
    endpoint: Endpoint<DeviceRegion>,
}

impl Service {
    /// A reactor that serves nobody yet; its numbers can be inspected.
    pub fn new(parts: ServiceParts) -> Self {
        let mut service = Self {
            core: parts.core,
            device: parts.device,
            storage: parts.storage,
            counters: parts.endpoint.counters(),
            endpoint: parts.endpoint,
            telemetry: parts.telemetry,
            bell: parts.bell,
            clock: parts.clock,
            waiting: Waiting::new(parts.wait, parts.spin_window),
            stop_timeout: parts.stop_timeout,
            clients: Vec::new(),
            effects: Effects::default(),
            executing: Effects::default(),
            entries: Vec::new(),
            copying: Vec::new(),
            failing: Vec::new(),
            cut_off_log: Limiter::default(),
            refused: VecDeque::new(),
            replies: VecDeque::new(),
            evictions: Vec::new(),
            ended: Vec::new(),
            page_buffers: Vec::new(),
            checksum_buffers: Vec::new(),
            stopping: None,
            recovering_since: None,
            tables_shown_ns: 0,
            tables_interval_ns: TABLES_INTERVAL_NS,
            tables_stale: true,
            numbers_stale: true,
            rings_stale: true,
            namespaces_shown: Vec::new(),
            session_views: Vec::new(),
            turns: 0,
        };
        let now = service.clock.now();
        service.recovering_since = service.core.is_recovering().then_some(now);
        service.report(now);
        service
    }

    /// Lets clients find the socket. Returns whether a stale one was replaced.
    ///
    /// # Errors
    /// See [`Endpoint::publish`].
    pub fn let_clients_in(&mut self) -> Result<bool, ListenError> {
        let replaced = self.endpoint.publish()?;
        self.telemetry.set_state(ManagerState::Ready);
        Ok(replaced)
    }

    /// Serves until a stop has drained. Returns whether everything was written and ended in time.
    pub fn run(mut self) -> bool {
        loop {
            let quick = self.answer_requests();
            let progress = self.turn() | quick;
            if self.has_stopped() {
                return self.finish();
            }
            if progress {
                self.waiting.worked();
            } else {
                self.rest();
            }
        }
    }

    /// Answers requests that end at once, without a look at anything else, for as long as there are
    /// no others, but only so often: who asks whether its pages are there waits for nobody's copy.
    /// True when anything happened.
    fn answer_requests(&mut self) -> bool {
        let mut answered = false;
        let mut end = Nanos::MAX;
        for _ in 0..QUICK_TURNS_MAX {
            let asks = |client: &Client| !client.closed && client.segments.requests.ready();
            if self.stopping.is_some() || !self.clients.iter().any(asks) {
                break;
            }
            let now = self.clock.now();
            if now > end {
                break;
            }
            end = end.min(now.saturating_add(QUICK_TIME_MAX_NS));
            answered = true;
            self.turns += 1;
            let jobs = self.core.jobs();
            self.take_requests(now);
            self.execute(now);
            if self.core.jobs() != jobs {
                break;
            }
        }
        self.tables_stale |= answered;
        self.numbers_stale |= answered;
        self.rings_stale |= answered;
        answered
    }

    /// One pass over every source. True when anything happened.
    fn turn(&mut self) -> bool {
        let now = self.clock.now();
        self.turns += 1;
        let mut progress = self.retry_refused();
        progress |= self.take_endpoint_events(now);
        progress |= self.take_copy_ends(now);
        progress |= self.take_storage_ends(now);
        progress |= self.take_census();
        progress |= self.take_requests(now);
        if self.core.next_deadline().is_some_and(|deadline| deadline <= now) {
            self.core.handle(now, Event::Tick, &mut self.effects);
            // A lease may have expired, of which nobody is told.
            self.tables_stale = true;
        }
        self.core.pump(now, &mut self.effects);
        progress |= self.execute(now) | self.core.has_forgotten_pages();
        self.cut_off_failing(now);
        progress |= self.advance_recovery(now);
        progress |= self.advance_eviction(now);
        progress |= self.advance_stop(now);
        self.tables_stale |= progress;
        self.numbers_stale |= progress;
        if progress || std::mem::take(&mut self.rings_stale) {
            self.mirror_rings();
        }
        if self.telemetry.due(now) {
            self.report(now);
        }
        // Who waits for a device that does not read is told by whoever looks after it.
        progress | !self.effects.list.is_empty()
    }

    /// Nothing to do: spin a little, then sleep until somebody rings or time is up.
    fn rest(&mut self) {
        let now = self.clock.now();
        if self.waiting.may_spin(now, self.device.outstanding() > 0) {
            return self.look_at_rings();
        }
        if self.telemetry.due(now) {
            self.report(now);
        }
        let timeout = self.longest_sleep(now);
        for client in self.clients.iter_mut().filter(|client| !client.closed) {
            client.doorbell_seen = Some(client.segments.sleeper.begin());
        }
        let control_seen = self.bell.sleeper().begin();
        // Every ring is looked at once more between the announcement and the sleep.
        if !self.turn() && !self.has_stopped() {
            let mut words = [(self.bell.sleeper(), control_seen); WAIT_WORDS_MAX];
            let mut count = 1;
            for client in &self.clients {
                let Some(seen) = client.doorbell_seen else { continue };
                words[count] = (&client.segments.sleeper, seen);
                count += 1;
            }
            wait_many(&words[..count], timeout);
            self.expect_copies(|client| client.segments.requests.ready());
        }
        for client in &mut self.clients {
            if client.doorbell_seen.take().is_some() {
                client.segments.sleeper.end();
            }
        }
        self.bell.sleeper().end();
        self.waiting.slept();
    }

    /// Looks for requests a few times, at the cost of one load a client: what else may have come is
    /// looked at by the next turn.
    fn look_at_rings(&self) {
        for _ in 0..LOOKS_PER_SPIN {
            let asking = |client: &Client| !client.closed && !client.segments.requests.is_idle();
            if self.clients.iter().any(asking) {
                return;
            }
            std::hint::spin_loop();
        }
    }

    fn longest_sleep(&self, now: Nanos) -> Duration {
        let mut timeout = PARK_MAX;
        if let Some(deadline) = self.core.next_deadline() {
            timeout = timeout.min(Duration::from_nanos(deadline.saturating_sub(now)));
        }
        if self.numbers_stale || self.tables_stale {
            // What inspection shows lags behind by two of them at most. Never what is left of one:
            // a timeout below the scheduler's tick sets the processor's timer, which costs more
            // than all the rest of a sleep in a virtual machine.
            timeout = timeout.min(Duration::from_nanos(self.tables_interval_ns));
        }
        // Nobody rings when a queue that was full has room again, or when a stop is to advance.
        let behind = !self.refused.is_empty() || !self.replies.is_empty();
        if behind || !self.evictions.is_empty() || self.stopping.is_some() {
            timeout = timeout.min(Duration::from_millis(1));
        }
        timeout
    }

    fn retry_refused(&mut self) -> bool {
        let mut progress = false;
        while let Some(command) = self.refused.pop_front() {
            if let Err(command) = self.device.submit(command) {
                self.refused.push_front(command);
                break;
            }
            progress = true;
        }
        while let Some(reply) = self.replies.pop_front() {
            if let Err(reply) = self.endpoint.reply(reply) {
                self.replies.push_front(reply);
                break;
            }
            progress = true;
        }
        if let Some(storage) = &mut self.storage {
            progress |= storage.retry_refused();
        }
        progress
    }

    fn take_endpoint_events(&mut self, now: Nanos) -> bool {
        let mut taken = 0;
        while taken < ENDS_PER_TURN {
            let Some(event) = self.endpoint.poll() else { break };
            taken += 1;
            self.endpoint_event(now, event);
        }
        taken > 0
    }

    fn endpoint_event(&mut self, now: Nanos, event: EndpointEvent<DeviceRegion>) {
        match event {
            EndpointEvent::SessionReady(ready) => {
                let geometry = ready.segments.geometry();
                let opened = Event::SessionOpened {
                    session: ready.session,
                    engine: ready.engine,
                    uid: ready.peer.uid,
                    credits: geometry.credits(),
                    page_entries: geometry.page_entries,
                };
                self.core.handle(now, opened, &mut self.effects);
                let mut client = Client::new(*ready, now);
                client.slot = self.telemetry.open_session(&client.mirror(now, None));
                debug_assert!(self.clients.last().is_none_or(|last| last.session < client.session));
                self.clients.push(client);
            }
            EndpointEvent::DefineNamespace { question, session, spec } => {
                let defined = self.core.define_namespace(session, &spec);
                self.answer_scope(question, defined);
            }
            EndpointEvent::DefineSet { question, session, members } => {
                let defined = self.core.define_set(session, &members);
                self.answer_scope(question, defined);
            }
            EndpointEvent::RegisterRegion { question, session, scope, pages, region } => {
                let kind = region.kind();
                let answer = match self.core.register_region(session, scope, pages, kind) {
                    Ok(id) => {
                        if let Some(client) = self.client_mut(session) {
                            client.set_region(id, region);
                        }
                        Answer::Region { region: id }
                    }
                    Err(refusal) => refused(&refusal),
                };
                self.reply(EndpointReply::Answer { question, answer });
            }
            EndpointEvent::RegisterEvents { question, session, events } => {
                let answer = match self.core.register_events(session, events.len()) {
                    Ok(first) => {
                        if let Some(client) = self.client_mut(session) {
                            client.add_events(events);
                        }
                        Answer::Events { first }
                    }
                    Err(refusal) => refused(&refusal),
                };
                self.reply(EndpointReply::Answer { question, answer });
            }
            EndpointEvent::Evict { question, timeout } => {
                let deadline = now.saturating_add(nanos_of(timeout));
                self.evictions.push(PendingEviction { question, deadline, running: None });
            }
            EndpointEvent::Closed { session, cause } => {
                self.close(now, session, close_reason(cause));
            }
            EndpointEvent::Stop => self.begin_stop(now),
        }
    }

    fn answer_scope(
        &mut self,
        question: QuestionId,
        defined: Result<(orbitkv_shm_protocol::ids::ScopeId, u64), CoreRefusal>,
    ) {
        let answer = match defined {
            Ok((scope, page_bytes)) => Answer::Scope { scope, page_bytes },
            Err(refusal) => refused(&refusal),
        };
        self.reply(EndpointReply::Answer { question, answer });
    }

    fn reply(&mut self, reply: EndpointReply<DeviceRegion>) {
        if !self.replies.is_empty() {
            self.replies.push_back(reply);
        } else if let Err(reply) = self.endpoint.reply(reply) {
            self.replies.push_back(reply);
        }
    }

    fn take_copy_ends(&mut self, now: Nanos) -> bool {
        let mut taken = 0;
        while taken < ENDS_PER_TURN {
            let Some(end) = self.device.poll() else { break };
            taken += 1;
            let owner = self.copying.iter().position(|(ticket, _)| *ticket == end.ticket);
            let owner = owner.map(|at| self.copying.swap_remove(at).1);
            for method in CopyMethod::ALL {
                let (copies, bytes) = end.moved.of(*method);
                self.telemetry.counters.add(Metric::DeviceMethodCopies(*method), copies);
                self.telemetry.counters.add(Metric::DeviceMethodBytes(*method), bytes);
            }
            if let Some(error) = end.error {
                // Whoever gave up on a fence had no fault.
                if !matches!(error, CopyError::FenceGivenUp { .. }) {
                    self.telemetry.counters.add(Metric::DeviceFaults(error.fault().into()), 1);
                }
                tracing::debug!(%error, "a copy stopped");
                let died = matches!(error, CopyError::PeerExited { .. });
                if let Some(session) = owner.filter(|_| error.ends_session()) {
                    if died {
                        self.mourn(now, session);
                    } else if self.failing.iter().all(|(known, _)| *known != session) {
                        self.failing.push((session, error));
                    }
                }
            }
            let copied = Event::Copied {
                ticket: end.ticket,
                pages_done: end.pages_done,
                fault: end.fault(),
                ended_ns: end.ended_ns,
                checksums: &end.checksums,
            };
            self.core.handle(now, copied, &mut self.effects);
            self.page_buffers.push(end.pages);
            self.checksum_buffers.push(end.checksums);
        }
        taken > 0
    }

    fn take_storage_ends(&mut self, now: Nanos) -> bool {
        let Some(storage) = &mut self.storage else { return false };
        let mut taken = 0;
        while taken < ENDS_PER_TURN {
            let Some(event) = storage.poll() else { break };
            taken += 1;
            self.core.handle(now, event, &mut self.effects);
        }
        taken > 0
    }

    /// Everything on SSD is known: it is taken over in the turns that follow.
    fn take_census(&mut self) -> bool {
        let storage = self.storage.as_mut();
        let Some(found) = storage.and_then(Storage::poll_recovery) else { return false };
        self.core.census_taken(found, &mut self.effects);
        true
    }

    /// True while pages are being taken over; says so when that is done.
    fn advance_recovery(&mut self, now: Nanos) -> bool {
        if self.core.is_recovering() {
            return self.core.has_recovered_pages();
        }
        let Some(began) = self.recovering_since.take() else { return false };
        if let Some(found) = self.core.take_used_up() {
            // A gigabyte of it: to give that back takes longer than a turn may.
            let aside = std::thread::Builder::new().name("ssd-forget".to_owned());
            // Without a thread it is dropped here.
            let _ = aside.spawn(move || drop(found));
        }
        let (pages, left_out) = {
            let stats = self.core.stats();
            (stats.recovered_pages, stats.recovered_dropped)
        };
        let elapsed = Duration::from_nanos(now.saturating_sub(began));
        tracing::info!(pages, left_out, ?elapsed, "pages on ssd were taken over");
        true
    }

    fn take_requests(&mut self, now: Nanos) -> bool {
        if self.stopping.is_some() {
            return false;
        }
        let mut progress = false;
        for at in 0..self.clients.len() {
            let client = &mut self.clients[at];
            if client.closed || !client.segments.requests.ready() {
                continue;
            }
            progress = true;
            let taken = client.take(now, &mut self.entries, |event| {
                self.core.handle(now, event, &mut self.effects)
            });
            if let Err(fault) = taken {
                let session = client.session;
                self.cut_off(now, session, &fault);
            }
        }
        progress
    }

    /// Nothing more is taken from a peer that broke the protocol.
    fn cut_off(&mut self, now: Nanos, session: SessionId, fault: &dyn std::fmt::Display) {
        let Some(client) = self.close(now, session, CloseReason::PeerFault) else { return };
        let (pid, uid) = client.peer();
        if let Some(suppressed) = self.cut_off_log.admit(now) {
            let session = session.0;
            tracing::warn!(session, pid, uid, suppressed, "cut off a session: {fault}");
        }
        self.reply(EndpointReply::Close { session, cause: CloseCause::RingFault });
    }

    /// A copy saw that a client's process has ended before the endpoint did.
    fn mourn(&mut self, now: Nanos, session: SessionId) {
        if self.close(now, session, CloseReason::PeerDied).is_some() {
            self.reply(EndpointReply::Close { session, cause: CloseCause::PeerDied });
        }
    }

    /// Takes nothing more from a client; counted once, whoever closes it first. `None` when it was
    /// closed before.
    fn close(
        &mut self,
        now: Nanos,
        session: SessionId,
        reason: CloseReason,
    ) -> Option<&mut Client> {
        let at = self.position(session)?;
        let client = &mut self.clients[at];
        if std::mem::replace(&mut client.closed, true) {
            return None;
        }
        // What it was owed comes before the word that nothing more does.
        client.flush();
        client.segments.set_state(SessionState::Closed);
        client.segments.ringer.ring();
        self.telemetry.counters.add(Metric::SessionsClosed(reason), 1);
        self.core.handle(now, Event::SessionClosed { session }, &mut self.effects);
        Some(&mut self.clients[at])
    }

    fn position(&self, session: SessionId) -> Option<usize> {
        self.clients.binary_search_by_key(&session, |client| client.session).ok()
    }

    fn client_mut(&mut self, session: SessionId) -> Option<&mut Client> {
        let at = self.position(session)?;
        Some(&mut self.clients[at])
    }

    /// Executes every effect in order, in a turn that began at `now`, then wakes whoever has new
    /// completions.
    fn execute(&mut self, now: Nanos) -> bool {
        if self.effects.list.is_empty() {
            return false;
        }
        std::mem::swap(&mut self.effects, &mut self.executing);
        let mut tables = std::mem::take(&mut self.executing);
        let mut list = std::mem::take(&mut tables.list);
        let staged = |effect: &Effect| match effect {
            Effect::Complete { completion, .. } => completion.kind.has_stages(),
            _ => true,
        };
        let published_ns = if list.iter().any(staged) { self.clock.now() } else { now };
        for effect in list.drain(..) {
            self.effect(effect, &tables, published_ns);
        }
        tables.list = list;
        tables.clear();
        self.executing = tables;
        for client in &mut self.clients {
            client.flush();
        }
        self.expect_copies(|client| std::mem::take(&mut client.has_hit));
        // Nobody waits for these numbers.
        for completion in self.ended.drain(..) {
            self.telemetry.counters.completed(&completion);
        }
        self.cut_off_violators(published_ns);
        true
    }

    /// Who was told of a hit will restore it, and who wakes the reactor has often something to copy:
    /// lets a GPU's thread wake meanwhile.
    fn expect_copies(&mut self, likely: impl Fn(&mut Client) -> bool) {
        for client in self.clients.iter_mut().filter(|client| !client.closed) {
            if likely(client)
                && let Some(region) = client.gpu_region()
            {
                self.device.expect(region);
            }
        }
    }

    /// Ends the sessions whose completion ring showed a violation outside of a take.
    fn cut_off_violators(&mut self, now: Nanos) {
        for at in 0..self.clients.len() {
            if let Some(violation) = self.clients[at].violation.take() {
                let session = self.clients[at].session;
                self.cut_off(now, session, &ClientFault::from(violation));
            }
        }
    }

    /// Ends the sessions whose copies cannot go on, once the completions that say so are written.
    fn cut_off_failing(&mut self, now: Nanos) {
        while let Some((session, error)) = self.failing.pop() {
            if !matches!(error, CopyError::GpuLost { .. }) {
                self.cut_off(now, session, &error);
            } else if self.close(now, session, CloseReason::DeviceLost).is_some() {
                let session_id = session.0;
                tracing::warn!(session = session_id, "ended a session: {error}");
                self.reply(EndpointReply::Close { session, cause: CloseCause::DeviceLost });
            }
        }
    }

    fn effect(&mut self, effect: Effect, tables: &Effects, published_ns: Nanos) {
        match effect {
            Effect::Complete { session, completion, results, results_start } => {
                let completion = Completion { published_ns, ..completion };
                self.ended.push(completion);
                let Some(client) = self.client_mut(session) else { return };
                client.complete(&completion, &tables.results[results], results_start);
            }
            Effect::Copy { ticket, direction, session, region, pages, fence, done, by_layer } => {
                let pages = &tables.copies[pages];
                let order = CopyOrder { ticket, direction, session, region, fence, done, by_layer };
                if !self.copy(order, pages) {
                    // `core` waits for the end of whatever it orders.
                    tracing::error!(session = session.0, "bug: a copy for a region that is gone");
                    let copied = Event::Copied {
                        ticket,
                        pages_done: 0,
                        fault: Some(CopyFault::Peer),
                        ended_ns: published_ns,
                        checksums: &[],
                    };
                    self.core.handle(published_ns, copied, &mut self.effects);
                }
            }
            Effect::GiveUpFence { session, index } => {
                if let Some(client) = self.client_mut(session) {
                    client.give_up_fence(index);
                }
            }
            Effect::RestoreFailed { session, operation } => {
                if let Some(client) = self.client_mut(session) {
                    client.fail_done_word(operation);
                }
            }
            Effect::CloseSession { session, fault } => self.cut_off(published_ns, session, &fault),
            Effect::SessionEnded { session } => self.end_session(session),
            Effect::RegionEnded { session, region } => {
                let region = self.client_mut(session).and_then(|client| client.end_region(region));
                if let Some(region) = region {
                    self.reply(EndpointReply::RegionEnded { session, region });
                }
            }
            Effect::Dropped { .. } => {}
            other => {
                if let Some(storage) = &mut self.storage {
                    storage.order(other);
                }
            }
        }
    }

    /// Hands a copy to the device. False when its session or region is gone.
    fn copy(&mut self, order: CopyOrder, pages: &[CopyPage]) -> bool {
        let CopyOrder { ticket, direction, session, region, fence, done, by_layer } = order;
        let Some(at) = self.position(session) else { return false };
        let client = &self.clients[at];
        let Some(region) = client.region(region) else { return false };
        let mut buffer = self.page_buffers.pop().unwrap_or_default();
        buffer.clear();
        buffer.extend_from_slice(pages);
        let checksums = self.checksum_buffers.pop().unwrap_or_default();
        let done = done.map(|operation: OperationId| DoneWord {
            words: client.segments.done.clone(),
            operation_index: operation.index,
            count: if by_layer { region.layout().layers() } else { 1 },
            value: operation.done_word(),
        });
        let fence = match fence {
            None => None,
            Some(FenceWait { index, until }) => {
                let Some(event) = client.fence(index) else { return false };
                let left = Duration::from_nanos(until.saturating_sub(self.clock.now()));
                Some(Fence { event, index, until: Instant::now() + left })
            }
        };
        let image_bytes = region.layout().image_bytes();
        let command = CopyCommand {
            ticket,
            direction,
            region,
            pages: buffer,
            image_bytes,
            fence,
            done,
            checksums,
        };
        self.copying.push((ticket, session));
        if !self.refused.is_empty() {
            self.refused.push_back(command);
        } else if let Err(command) = self.device.submit(command) {
            self.refused.push_back(command);
        }
        true
    }

    fn end_session(&mut self, session: SessionId) {
        let Some(at) = self.position(session) else { return };
        let mut client = self.clients.remove(at);
        if let Some(slot) = client.slot.take() {
            self.telemetry.close_session(slot);
        }
        client.fail_untaken();
        // The answer to what the session was closed for is its last record.
        client.flush();
        let client::Parts { segments, regions, events } = client.into_parts();
        let segments = Box::new(segments);
        self.reply(EndpointReply::SessionEnded { session, segments, regions, events });
    }

    /// Goes on with one administrative eviction, a bounded number of pages a turn. True when it did.
    fn advance_eviction(&mut self, now: Nanos) -> bool {
        if self.evictions.is_empty() {
            return false;
        }
        let drained = self.core.spill_is_drained();
        let may_run = |pending: &PendingEviction| {
            pending.running.is_some() || drained || now >= pending.deadline
        };
        let Some(at) = self.evictions.iter().position(may_run) else { return false };
        let pending = &mut self.evictions[at];
        let begin = || (self.core.begin_eviction(), drained);
        let (mut eviction, spill_drained) = pending.running.unwrap_or_else(begin);
        let evicted = self.core.evict_some(&mut eviction, &mut self.effects);
        pending.running = Some((eviction, spill_drained));
        if let Some(evicted) = evicted {
            let PendingEviction { question, .. } = self.evictions.swap_remove(at);
            let answer = Answer::Evicted {
                pages: evicted.pages,
                bytes: evicted.bytes,
                pages_kept: evicted.pages_kept,
                spill_drained,
            };
            self.reply(EndpointReply::Answer { question, answer });
        }
        self.execute(now);
        true
    }

    fn begin_stop(&mut self, now: Nanos) {
        if self.stopping.is_some() {
            return;
        }
        tracing::info!("stopping: no new requests, draining what runs");
        self.telemetry.set_state(ManagerState::Draining);
        for client in self.clients.iter().filter(|client| !client.closed) {
            client.segments.set_state(SessionState::Draining);
        }
        self.stopping = Some(Stopping {
            began: now,
            close_sessions_at: now.saturating_add(nanos_of(STOP_GRACE)),
            give_up_at: now.saturating_add(nanos_of(self.stop_timeout)),
            sessions_closed: false,
        });
    }

    /// Closes the sessions once they are idle or their time is up. True when it did.
    fn advance_stop(&mut self, now: Nanos) -> bool {
        let Some(stopping) = &mut self.stopping else { return false };
        if stopping.sessions_closed {
            return false;
        }
        let open = |client: &&Client| !client.closed;
        let busy = self.clients.iter().filter(open).any(|client| client.outstanding() > 0);
        if busy && now < stopping.close_sessions_at {
            return false;
        }
        stopping.sessions_closed = true;
        for at in 0..self.clients.len() {
            let session = self.clients[at].session;
            if self.close(now, session, CloseReason::Draining).is_some() {
                self.reply(EndpointReply::Close { session, cause: CloseCause::Stopping });
            }
        }
        self.execute(now);
        true
    }

    fn has_stopped(&self) -> bool {
        let Some(stopping) = &self.stopping else { return false };
        let now = self.clock.now();
        // What cannot be written now is not waited for.
        let may_come = self.core.is_recovering()
            && !self.core.spill_is_drained()
            && self.census_may_end(now, stopping);
        let quiet = self.core.is_quiet() && !self.core.spill_can_go_on() && !may_come;
        let ended = stopping.sessions_closed && self.clients.is_empty() && quiet;
        ended || now >= stopping.give_up_at
    }

    /// Whether the search for what is on SSD ends before a stop must, if it goes on as it has.
    fn census_may_end(&self, now: Nanos, stopping: &Stopping) -> bool {
        let (Some(began), Some(storage)) = (self.recovering_since, &self.storage) else {
            return false;
        };
        match storage.scan_left(now.saturating_sub(began)) {
            Some(left) => now.saturating_add(left) < stopping.give_up_at,
            None => now < stopping.close_sessions_at,
        }
    }

    /// Ends the workers. Everything in flight comes back before memory is given up.
    fn finish(mut self) -> bool {
        let drained = self.core.spill_is_drained();
        if !drained {
            let left = self.core.gauges();
            tracing::warn!(
                pages = left.spill_pages,
                bytes = left.spill_bytes,
                "stopped before every page was written to SSD; raise stop_timeout to keep them"
            );
        }
        self.device.stop();
        let began = self.stopping.map_or(0, |stopping| stopping.began);
        let elapsed = Duration::from_nanos(self.clock.now().saturating_sub(began));
        if let Some(storage) = &mut self.storage {
            let (orders, all) = storage_stop(elapsed);
            storage.stop(orders, all);
        }
        let now = self.clock.now();
        while self.take_copy_ends(now) {}
        while self.take_storage_ends(now) {}
        self.effects.clear();
        self.report(now);
        drained
    }
}

/// How long the SSD orders, and with them what the kernel keeps, may take `elapsed` after the begin of
/// a stop: half at least is for the superblocks and what the kernel has by then.
fn storage_stop(elapsed: Duration) -> (Duration, Duration) {
    let all = STORAGE_STOP_BY.saturating_sub(elapsed).max(STORAGE_STOP_MIN);
    (STORAGE_STOP_MAX.min(all / 2), all)
}

/// One copy as `core` orders it.
struct CopyOrder {
    ticket: Ticket,
    direction: Direction,
    session: SessionId,
    region: RegionId,
    fence: Option<FenceWait>,
    done: Option<OperationId>,
    by_layer: bool,
}

fn refused(refusal: &CoreRefusal) -> Answer {
    Answer::Refused { refusal: refusal.refusal(), message: refusal.to_string() }
}

/// Whether the Manager, not the device, stores the done word of this completion.
fn stores_done_word(completion: &Completion) -> Option<u32> {
    if completion.kind != RequestKind::Restore {
        return None;
    }
    match (completion.status, completion.pages) {
        // Nothing was to be copied: vacuously in place.
        (Status::Ok, 0) => Some(completion.operation.done_word()),
        (Status::Ok, _) => None,
        _ => Some(completion.operation.failed_word()),
    }
}

const fn close_reason(cause: CloseCause) -> CloseReason {
    match cause {
        CloseCause::Disconnected | CloseCause::Silent => CloseReason::Detached,
        CloseCause::PeerDied => CloseReason::PeerDied,
        CloseCause::Stopping => CloseReason::Draining,
        CloseCause::DeviceLost => CloseReason::DeviceLost,
        _ => CloseReason::PeerFault,
    }
}

type RegionHandle = Arc<DeviceRegion>;

#[cfg(test)]
mod tests {
    use super::*;

    /// Whenever the drain of everything else is over, which takes 9 s at most, and whatever the
    /// kernel keeps.
    #[test]
    fn a_stop_with_an_ssd_device_that_hangs_takes_ten_seconds_at_most() {
        for elapsed in (0..=9_000).step_by(100).map(Duration::from_millis) {
            let (orders, all) = storage_stop(elapsed);
            assert!(elapsed + all <= Duration::from_secs(10), "{all:?} after {elapsed:?}");
            assert!(orders <= all / 2 && orders >= STORAGE_STOP_MIN / 2);
        }
        assert_eq!(storage_stop(Duration::ZERO).0, STORAGE_STOP_MAX);
    }
}
