//! One attached client as the reactor sees it: rings, regions, credits.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use orbitkv_shm_protocol::ids::{EngineId, OperationId, RegionId, SessionId};
use orbitkv_shm_protocol::layout::PAGES_PER_REQUEST_MAX;
use orbitkv_shm_protocol::record::{
    BadField, Completion, PageEntry, PageResult, Request, RequestBody, RequestKind,
};
use orbitkv_shm_protocol::ring::{PushError, RingViolation};
use orbitkv_shm_protocol::segment::ManagerSide;
use orbitkv_shm_protocol::telemetry::SessionState;

use super::{PAGES_PER_TURN, REQUESTS_PER_TURN, RegionHandle, stores_done_word};
use crate::core::{Event, Nanos, RegionKind, SessionView};
use crate::device::{CopyError, DeviceEvent};
use crate::endpoint::SessionReady;
use crate::telemetry::SessionSlot;
use crate::telemetry::mirror::{RingsMirror, SessionMirror};

/// One client.
pub(super) struct Client {
    pub(super) session: SessionId,
    pub(super) segments: ManagerSide,
    /// What the doorbell held when the sleep that is announced to this client began.
    pub(super) doorbell_seen: Option<u32>,
    pub(super) engine: EngineId,
    pid: u32,
    uid: u32,
    regions: Vec<Option<RegionHandle>>,
    events: Vec<Arc<SessionEvent>>,
    /// Nothing more is taken from it.
    pub(super) closed: bool,
    pub(super) slot: Option<SessionSlot>,
    taken: u64,
    completed: u64,
    last_progress_ns: Nanos,
    dirty: bool,
    /// An index of its rings moved since telemetry was told.
    moved: bool,
    /// A query of it has found pages since the reactor last looked.
    pub(super) has_hit: bool,
    /// What it was found to have done while nobody could be told.
    pub(super) violation: Option<RingViolation>,
}

/// An event of the pool. A device that waits for one whose engine has died would wait for ever: it
/// learns here that it need not.
#[derive(Debug)]
struct SessionEvent {
    event: Arc<dyn DeviceEvent>,
    given_up: AtomicBool,
}

impl DeviceEvent for SessionEvent {
    fn has_passed(&self) -> Result<bool, CopyError> {
        if self.given_up.load(Ordering::Relaxed) {
            return Err(CopyError::FenceGivenUp { fence: 0 });
        }
        self.event.has_passed()
    }
}

/// What goes back to the endpoint.
pub(super) struct Parts {
    pub(super) segments: ManagerSide,
    pub(super) regions: Vec<RegionHandle>,
    pub(super) events: Vec<Arc<dyn DeviceEvent>>,
}

/// What the peer did.
#[derive(Debug, thiserror::Error)]
pub(super) enum ClientFault {
    #[error(transparent)]
    Ring(#[from] RingViolation),
    #[error("submitted a request with all {credits} credits in use")]
    NoCredit { credits: u32 },
    #[error("wrote a record for session {session} of epoch {epoch}")]
    WrongAddress { session: u32, epoch: u32 },
}

impl Client {
    pub(super) fn new(ready: SessionReady, now: Nanos) -> Self {
        Self {
            engine: ready.engine,
            pid: ready.peer.pid,
            uid: ready.peer.uid,
            session: ready.session,
            segments: ready.segments,
            doorbell_seen: None,
            regions: Vec::new(),
            events: Vec::new(),
            closed: false,
            slot: None,
            taken: 0,
            completed: 0,
            last_progress_ns: now,
            dirty: false,
            moved: false,
            has_hit: false,
            violation: None,
        }
    }

    /// Process and user, as they were when it attached.
    pub(super) fn peer(&self) -> (u32, u32) {
        (self.pid, self.uid)
    }

    /// Operations taken and not yet completed.
    pub(super) fn outstanding(&self) -> u64 {
        self.taken - self.completed
    }

    pub(super) fn set_region(&mut self, id: RegionId, region: RegionHandle) {
        let index = id.0 as usize;
        if self.regions.len() <= index {
            self.regions.resize_with(index + 1, || None);
        }
        self.regions[index] = Some(region);
    }

    /// A region on a GPU, if it has one.
    pub(super) fn gpu_region(&self) -> Option<&RegionHandle> {
        let mut regions = self.regions.iter().flatten();
        regions.find(|region| region.kind() == RegionKind::Gpu)
    }

    pub(super) fn region(&self, id: RegionId) -> Option<RegionHandle> {
        self.regions.get(id.0 as usize)?.clone()
    }

    pub(super) fn end_region(&mut self, id: RegionId) -> Option<RegionHandle> {
        self.regions.get_mut(id.0 as usize)?.take()
    }

    pub(super) fn add_events(&mut self, events: Vec<Arc<dyn DeviceEvent>>) {
        let watched = |event| Arc::new(SessionEvent { event, given_up: AtomicBool::new(false) });
        self.events.extend(events.into_iter().map(watched));
    }

    /// An event as the fence of an operation that begins to wait for it.
    pub(super) fn fence(&self, index: u32) -> Option<Arc<dyn DeviceEvent>> {
        let event = self.events.get(index as usize)?;
        event.given_up.store(false, Ordering::Relaxed);
        Some(Arc::clone(event) as Arc<dyn DeviceEvent>)
    }

    /// The operation does not wait for it any more.
    pub(super) fn give_up_fence(&self, index: u32) {
        if let Some(event) = self.events.get(index as usize) {
            event.given_up.store(true, Ordering::Relaxed);
        }
    }

    pub(super) fn into_parts(self) -> Parts {
        let regions = self.regions.into_iter().flatten().collect();
        let event = |event| event as Arc<dyn DeviceEvent>;
        let events = self.events.into_iter().map(event).collect();
        Parts { segments: self.segments, regions, events }
    }

    /// Takes a bounded number of requests and hands each over. Every byte is copied once, then
    /// judged.
    pub(super) fn take(
        &mut self,
        now: Nanos,
        entries: &mut Vec<PageEntry>,
        mut hand_over: impl FnMut(Event<'_>),
    ) -> Result<(), ClientFault> {
        let session = self.session;
        let epoch = self.segments.epoch();
        // A credit is back when its completion record is consumed: what is outstanding and what
        // lies unconsumed fit into the ring together, so publishing never blocks.
        // What was free when last looked at will do: the client's index is a line of another core.
        let free = u64::from(self.segments.completions.free_seen());
        let mut credits = free.saturating_sub(self.outstanding());
        let mut pages = 0;
        for _ in 0..REQUESTS_PER_TURN {
            if pages >= PAGES_PER_TURN {
                break;
            }
            let Some(record) = self.segments.requests.pop()? else { break };
            if record.session != session.0 || record.epoch != epoch.0 {
                let (session, epoch) = (record.session, record.epoch);
                return Err(ClientFault::WrongAddress { session, epoch });
            }
            if credits == 0 {
                // Those of completions that were consumed since.
                let free = u64::from(self.segments.completions.free()?);
                credits = free.saturating_sub(self.outstanding());
                if credits == 0 {
                    let credits = self.segments.geometry().credits();
                    return Err(ClientFault::NoCredit { credits });
                }
            }
            credits -= 1;
            self.taken += 1;
            self.moved = true;
            self.last_progress_ns = now;
            match Request::decode(&record) {
                Ok(request) => {
                    entries.clear();
                    if request.range.len > 0 && request.range.len <= PAGES_PER_REQUEST_MAX {
                        // A range outside of the table leaves `entries` empty, which `core` refuses.
                        let _ = self.segments.pages.read_range(request.range, entries);
                        pages += request.range.len;
                    }
                    hand_over(Event::Requested { session, request, pages: entries });
                }
                Err(BadField { field, value }) => {
                    tracing::debug!(session = session.0, field, value, "malformed request");
                    let operation = OperationId {
                        index: record.operation_index,
                        generation: record.operation_generation,
                    };
                    hand_over(Event::Malformed { session, operation });
                }
            }
        }
        self.segments.requests.release();
        Ok(())
    }

    /// Stages a completion: results, then the done word, then the record.
    pub(super) fn complete(
        &mut self,
        completion: &Completion,
        results: &[PageResult],
        results_start: u32,
    ) {
        self.completed += 1;
        self.moved = true;
        self.has_hit |= completion.kind == RequestKind::Query && completion.pages > 0;
        if self.closed {
            // Nobody takes the record any more, but a stream of the engine may wait for the word.
            return self.settle_done_word(completion);
        }
        for (offset, result) in results.iter().enumerate() {
            self.segments.results.write(results_start + offset as u32, *result);
        }
        self.settle_done_word(completion);
        let (session, epoch) = (self.session, self.segments.epoch());
        let pushed =
            self.segments.completions.push(|sequence| completion.encode(session, epoch, sequence));
        match pushed {
            Ok(()) => self.dirty = true,
            Err(PushError::Violation(violation)) => self.violation = Some(violation),
            // Room was checked when the request was taken.
            Err(PushError::Full) => {
                debug_assert!(false, "a completion ring without room for a credit");
                tracing::error!(session = session.0, "bug: a completion found its ring full");
            }
        }
        self.last_progress_ns = completion.published_ns;
    }

    /// Stores the done word of a restore that has ended, unless the device stored it.
    fn settle_done_word(&self, completion: &Completion) {
        if let Some(word) = stores_done_word(completion) {
            self.store_done_word(completion.operation, word);
        }
    }

    /// Stores the odd done word of a restore that did not bring every page.
    pub(super) fn fail_done_word(&self, operation: OperationId) {
        self.store_done_word(operation, operation.failed_word());
    }

    /// Stores every done word of an operation that the device has not stored, unless no client made
    /// that operation.
    fn store_done_word(&self, operation: OperationId, word: u32) {
        let geometry = self.segments.geometry();
        if operation.index >= geometry.credits() {
            return;
        }
        let done = &self.segments.done;
        for layer in 0..geometry.done_words {
            // A layer that is in place stays so.
            if done.load(operation.index, layer) != operation.done_word() {
                done.store(operation.index, layer, word);
            }
        }
    }

    /// Fails the restores that still lie in the ring of a session that has ended: a stream of the
    /// engine may wait for their done words.
    pub(super) fn fail_untaken(&mut self) {
        for _ in 0..self.segments.geometry().credits() {
            let Ok(Some(record)) = self.segments.requests.pop() else { return };
            if let Ok(Request { operation, body: RequestBody::Restore { .. }, .. }) =
                Request::decode(&record)
            {
                self.fail_done_word(operation);
            }
        }
    }

    /// Publishes the batch and wakes the client once if it sleeps.
    pub(super) fn flush(&mut self) {
        if std::mem::replace(&mut self.dirty, false) {
            self.segments.completions.publish();
            self.segments.ringer.ring();
        }
    }

    /// Where its rings are by what this side knows, if that changed: costs no look at the client's
    /// words, which would take a cache line from it.
    pub(super) fn moved_rings(&mut self) -> Option<RingsMirror> {
        std::mem::replace(&mut self.moved, false).then(|| self.rings())
    }

    /// What telemetry shows of it, with a look at what the client did since.
    pub(super) fn mirror(&mut self, now: Nanos, view: Option<&SessionView>) -> SessionMirror {
        let before = (self.segments.requests.seen(), self.segments.completions.consumed());
        let looked = match self.segments.completions.free() {
            Ok(_) => self.segments.requests.look(),
            Err(violation) => Err(violation),
        };
        if let Err(violation) = looked
            && !self.closed
        {
            // An idle client that breaks its index is found out here.
            self.violation = Some(violation);
        }
        let after = (self.segments.requests.seen(), self.segments.completions.consumed());
        if before != after {
            self.last_progress_ns = now;
        }
        SessionMirror {
            id: self.session,
            pid: self.pid,
            uid: self.uid,
            state: if self.closed { SessionState::Closing } else { SessionState::Attached },
            engine: self.engine,
            rings: self.rings(),
            credits: self.segments.geometry().credits(),
            leased_bytes: view.map_or(0, |view| view.leased_bytes),
            regions: view.map_or(0, |view| view.regions),
        }
    }

    fn rings(&self) -> RingsMirror {
        RingsMirror {
            requests_submitted: self.segments.requests.seen(),
            requests_taken: self.segments.requests.position(),
            completions_published: self.segments.completions.published(),
            completions_consumed: self.segments.completions.consumed(),
            outstanding: self.outstanding(),
            last_progress_ns: self.last_progress_ns,
        }
    }
}
