//! One attached client as the reactor sees it: rings, regions, credits.

use orbitkv_shm_protocol::ids::{EngineId, RegionId};
use orbitkv_shm_protocol::layout::PAGES_PER_REQUEST_MAX;
use orbitkv_shm_protocol::record::{BadField, Completion, PageEntry, PageResult, Request};
use orbitkv_shm_protocol::ring::RingViolation;
use orbitkv_shm_protocol::segment::ManagerSide;
use orbitkv_shm_protocol::telemetry::SessionState;

use super::{RegionHandle, stores_done_word};
use crate::core::{Event, Nanos, SessionView};
use crate::endpoint::SessionReady;
use crate::telemetry::SessionSlot;
use crate::telemetry::mirror::SessionMirror;

/// One client.
pub(super) struct Client {
    pub(super) segments: ManagerSide,
    engine: EngineId,
    pid: u32,
    uid: u32,
    regions: Vec<Option<RegionHandle>>,
    /// Nothing more is taken from it.
    pub(super) closed: bool,
    pub(super) slot: Option<SessionSlot>,
    taken: u64,
    completed: u64,
    last_progress_ns: Nanos,
    dirty: bool,
}

/// How a bounded drain of a request ring ended.
pub(super) enum TakeEnd {
    /// Empty, or the bound is reached.
    Done,
    /// The peer broke the protocol.
    Fault(ClientFault),
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
            segments: ready.segments,
            regions: Vec::new(),
            closed: false,
            slot: None,
            taken: 0,
            completed: 0,
            last_progress_ns: now,
            dirty: false,
        }
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

    pub(super) fn region(&self, id: RegionId) -> Option<RegionHandle> {
        self.regions.get(id.0 as usize)?.clone()
    }

    pub(super) fn end_region(&mut self, id: RegionId) -> Option<RegionHandle> {
        self.regions.get_mut(id.0 as usize)?.take()
    }

    pub(super) fn into_parts(self) -> (ManagerSide, Vec<RegionHandle>) {
        (self.segments, self.regions.into_iter().flatten().collect())
    }

    /// Takes up to `limit` requests and hands each over. Every byte is copied once, then judged.
    pub(super) fn take(
        &mut self,
        now: Nanos,
        limit: u32,
        entries: &mut Vec<PageEntry>,
        mut hand_over: impl FnMut(Event<'_>),
    ) -> TakeEnd {
        let session = self.segments.session();
        let epoch = self.segments.epoch();
        let credits = self.segments.geometry().credits();
        for _ in 0..limit {
            let record = match self.segments.requests.pop() {
                Ok(Some(record)) => record,
                Ok(None) => break,
                Err(violation) => return TakeEnd::Fault(violation.into()),
            };
            // A credit is back when its completion record is consumed: what is outstanding and
            // what lies unconsumed fit into the ring together, so publishing never blocks.
            let free = match self.segments.completions.free() {
                Ok(free) => u64::from(free),
                Err(violation) => return TakeEnd::Fault(violation.into()),
            };
            if self.outstanding() >= free {
                return TakeEnd::Fault(ClientFault::NoCredit { credits });
            }
            if record.session != session.0 || record.epoch != epoch.0 {
                let (session, epoch) = (record.session, record.epoch);
                return TakeEnd::Fault(ClientFault::WrongAddress { session, epoch });
            }
            self.taken += 1;
            self.last_progress_ns = now;
            match Request::decode(&record) {
                Ok(request) => {
                    entries.clear();
                    if request.range.len > 0 && request.range.len <= PAGES_PER_REQUEST_MAX {
                        // A range outside of the table leaves `entries` empty, which `core` refuses.
                        let _ = self.segments.pages.read_range(request.range, entries);
                    }
                    hand_over(Event::Requested { session, request, pages: entries });
                }
                Err(BadField { field, value }) => {
                    tracing::debug!(session = session.0, field, value, "malformed request");
                    let operation = orbitkv_shm_protocol::ids::OperationId {
                        index: record.operation_index,
                        generation: record.operation_generation,
                    };
                    hand_over(Event::Malformed { session, operation });
                }
            }
        }
        self.segments.requests.release();
        TakeEnd::Done
    }

    /// Stages a completion: results, then the done word, then the record.
    pub(super) fn complete(
        &mut self,
        completion: &Completion,
        results: &[PageResult],
        results_start: u32,
    ) {
        self.completed += 1;
        if self.closed {
            return;
        }
        for (offset, result) in results.iter().enumerate() {
            self.segments.results.write(results_start + offset as u32, *result);
        }
        let credits = self.segments.geometry().credits();
        if let Some(word) = stores_done_word(completion)
            && completion.operation.index < credits
        {
            self.segments.done.store(completion.operation.index, 0, word);
        }
        let (session, epoch) = (self.segments.session(), self.segments.epoch());
        let pushed =
            self.segments.completions.push(|sequence| completion.encode(session, epoch, sequence));
        // Room was checked when the request was taken; a consumer index that jumped since then
        // shows at the next request.
        if let Err(error) = pushed {
            tracing::debug!(session = session.0, %error, "completion not published");
        }
        self.dirty = true;
        self.last_progress_ns = completion.published_ns;
    }

    /// Publishes the batch and wakes the client once if it sleeps.
    pub(super) fn flush(&mut self) {
        if !std::mem::replace(&mut self.dirty, false) {
            return;
        }
        self.segments.completions.publish();
        self.segments.ringer.ring();
    }

    /// What telemetry shows of it.
    pub(super) fn mirror(&mut self, view: Option<&SessionView>) -> SessionMirror {
        let published = self.segments.completions.published();
        let capacity = u64::from(self.segments.completions.capacity());
        let free = self.segments.completions.free().map_or(0, u64::from);
        let staged = self.segments.completions.position();
        SessionMirror {
            id: self.segments.session(),
            pid: self.pid,
            uid: self.uid,
            state: if self.closed { SessionState::Closing } else { SessionState::Attached },
            engine: self.engine,
            requests_submitted: self.segments.requests.seen(),
            requests_taken: self.segments.requests.position(),
            completions_published: published,
            completions_consumed: (staged + free).saturating_sub(capacity),
            outstanding: self.outstanding(),
            credits: self.segments.geometry().credits(),
            leased_bytes: view.map_or(0, |view| view.leased_bytes),
            regions: view.map_or(0, |view| view.regions),
            last_progress_ns: self.last_progress_ns,
        }
    }
}
