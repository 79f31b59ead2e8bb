//! The engine's side of one session: everything that touches its two segments.
//!
//! Single-threaded. Reached only through [`ProcessBound`](crate::process::ProcessBound). Staging
//! and polling make no system call and allocate nothing.

use std::cell::Cell;
use std::time::Duration;

use orbitkv_shm_protocol::doorbell::Sleeper;
use orbitkv_shm_protocol::ids::{EngineId, OperationId};
use orbitkv_shm_protocol::layout::{Geometry, PAGES_PER_REQUEST_MAX};
use orbitkv_shm_protocol::record::{
    self, BadField, Code, CompletionRecord, PageEntry, PageRange, Request, RequestBody,
    RequestKind, SessionState, flags,
};
use orbitkv_shm_protocol::ring::PushError;
#[cfg(feature = "cuda")]
use orbitkv_shm_protocol::segment::DoneWordsReader;
use orbitkv_shm_protocol::segment::EngineSide;

use crate::completion::{Completion, StageTimes, Status};
use crate::error::{Gone, ProtocolFault, SubmitError};
use crate::handles::{Block, Chain, Lease, LeaseParts, Operation, Tag};
use crate::pending::{Issued, Pending, may_use_reserve};
use crate::ranges::RangeAllocator;
use crate::results::{Anchors, Readable, Results, Source};

/// What a chain is made of, as the page table spells it.
pub(crate) trait Page {
    fn entry(&self) -> PageEntry;
}

impl Page for Block {
    fn entry(&self) -> PageEntry {
        PageEntry::page(self.hash, self.page)
    }
}

impl Page for orbitkv_shm_protocol::ids::PageHash {
    fn entry(&self) -> PageEntry {
        PageEntry::page(*self, 0)
    }
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Session {
    tag: Tag,
    engine: EngineId,
    side: EngineSide,
    pending: Pending,
    ranges: RangeAllocator,
    anchors: Anchors,
    entries_max: u32,
    /// The done word that an operation stores last, by its index.
    last_words: Vec<u32>,
    readable: Option<Readable>,
    /// Found while results were read, acted upon by the next poll.
    result_fault: Cell<Option<ProtocolFault>>,
    gone: Option<Gone>,
    /// Results are readable or the session is over: a poll has something to do whatever the ring
    /// says. A result fault is only found while results are readable.
    attention: bool,
}

impl Session {
    /// A session with nothing outstanding.
    pub(crate) fn new(tag: Tag, engine: EngineId, geometry: Geometry, side: EngineSide) -> Self {
        // The first reading looks for the vDSO, with system calls; later ones make none.
        monotonic_ns();
        Self {
            tag,
            engine,
            side,
            pending: Pending::new(geometry.credits()),
            ranges: RangeAllocator::new(geometry.page_entries, geometry.credits() + 1),
            anchors: Anchors::new(geometry.page_entries),
            entries_max: geometry.page_entries.min(PAGES_PER_REQUEST_MAX),
            last_words: vec![0; geometry.credits() as usize],
            readable: None,
            result_fault: Cell::new(None),
            gone: None,
            attention: false,
        }
    }

    /// Operations without a completion that was handed out.
    pub(crate) fn outstanding(&self) -> u32 {
        self.pending.outstanding()
    }

    /// Ends the session for `gone`. A broken protocol outweighs a death that was noticed first:
    /// what is left in the ring is then not read any more.
    pub(crate) fn lose(&mut self, gone: Gone) {
        if self.gone.is_none() || matches!(gone, Gone::Protocol(_)) {
            self.gone = Some(gone);
            self.attention = true;
        }
    }

    /// Why the session is over, if it is.
    pub(crate) fn gone(&self) -> Option<Gone> {
        self.gone
    }

    /// Stages a request without pages.
    pub(crate) fn stage(
        &mut self,
        body: RequestBody,
        deadline_ms: u32,
    ) -> Result<Operation, SubmitError> {
        self.stage_pages::<Block>(body, deadline_ms, &[])
    }

    /// Stages a request about `chains`, in order. Nothing of it remains when it is refused.
    pub(crate) fn stage_pages<P: Page>(
        &mut self,
        body: RequestBody,
        deadline_ms: u32,
        chains: &[Chain<'_, P>],
    ) -> Result<Operation, SubmitError> {
        if let Some(gone) = self.gone {
            return Err(gone.into());
        }
        let pages: usize = chains.iter().map(|chain| chain.blocks.len()).sum();
        let entries = chains.iter().map(|chain| chain_entries(chain)).sum();
        if entries > self.entries_max as usize {
            return Err(SubmitError::TooManyPages { entries, entries_max: self.entries_max });
        }
        let mut request = Request {
            operation: OperationId { index: 0, generation: 0 },
            deadline_ms,
            range: PageRange::default(),
            body,
        };
        // What gives something back may still be said.
        let draining = !self.side.is_open() && self.state() == SessionState::Draining;
        if draining && !may_use_reserve(request.kind()) {
            return Err(SubmitError::Draining);
        }
        if !self.pending.has_credit(request.kind()) {
            return Err(SubmitError::WouldBlock);
        }
        let Some(range) = self.ranges.allocate(entries as u32) else {
            return Err(SubmitError::WouldBlock);
        };
        let issued = Issued {
            kind: request.kind(),
            range,
            pages: pages as u32,
            sequence: self.side.requests.position(),
            cancels: match body {
                RequestBody::Cancel { operation } => Some(operation),
                _ => None,
            },
        };
        let Some(operation) = self.pending.begin(issued) else {
            self.ranges.release(range);
            return Err(SubmitError::WouldBlock);
        };
        request.operation = operation;
        request.range = range;
        self.write_entries(range, chains);
        let Tag { session, epoch } = self.tag;
        match self.side.requests.push(|sequence| request.encode(session, epoch, sequence)) {
            Ok(()) => Ok(Operation { tag: self.tag, id: operation }),
            Err(error) => {
                self.pending.end(operation);
                self.ranges.release(range);
                Err(match error {
                    PushError::Full => SubmitError::WouldBlock,
                    PushError::Violation(violation) => {
                        self.lose(Gone::Protocol(violation.into()));
                        SubmitError::ManagerGone(Gone::Protocol(violation.into()))
                    }
                })
            }
        }
    }

    fn write_entries<P: Page>(&mut self, range: PageRange, chains: &[Chain<'_, P>]) {
        let mut next = range.start;
        for chain in chains.iter().filter(|chain| !chain.blocks.is_empty()) {
            if let Some(parent) = chain.parent {
                self.side.pages.write(next, PageEntry::anchor(parent));
                self.anchors.set(next, true);
                next += 1;
            }
            let starts_another = chain.parent.is_none() && next > range.start;
            for (i, page) in chain.blocks.iter().enumerate() {
                let mut entry = page.entry();
                if i == 0 && starts_another {
                    entry.flags |= flags::ENTRY_ROOT;
                }
                self.side.pages.write(next, entry);
                self.anchors.set(next, false);
                next += 1;
            }
        }
        debug_assert_eq!(next, range.start + range.len);
    }

    /// Publishes what was staged and wakes the Manager if it sleeps. Returns the requests that
    /// were published.
    pub(crate) fn publish(&mut self) -> u32 {
        let published = self.side.requests.position().wrapping_sub(self.side.requests.published());
        if self.side.requests.publish() {
            self.side.ringer.ring();
        }
        published as u32
    }

    /// Whether the next [`poll`](Self::poll) has something to say.
    #[inline]
    pub(crate) fn ready(&self) -> bool {
        self.side.completions.ready()
            || self.gone.is_some()
            || self.result_fault.get().is_some()
            || self.state() == SessionState::Closed
    }

    /// Whether a [`poll`](Self::poll) would find nothing and do nothing: a few loads.
    #[inline]
    pub(crate) fn is_silent(&self) -> bool {
        self.side.completions.is_idle() && !self.attention && self.side.is_open()
    }

    /// The next completion, if there is one.
    pub(crate) fn poll(&mut self) -> Result<Option<Completion>, Gone> {
        if let Some(readable) = self.readable.take() {
            self.ranges.release(readable.range);
            self.attention = self.gone.is_some();
        }
        if let Some(fault) = self.result_fault.get() {
            self.lose(Gone::Protocol(fault));
        }
        if matches!(self.gone, Some(Gone::Protocol(_))) {
            return self.report_gone();
        }
        match self.side.completions.pop() {
            Ok(None) if self.gone.is_none() && self.state() != SessionState::Closed => Ok(None),
            Ok(None) => self.end_of_ring(),
            Ok(Some(record)) => self.accept_or_fail(&record),
            Err(violation) => self.fail(violation.into()),
        }
    }

    /// The ring was empty and the session is over: what came in between still counts.
    #[cold]
    fn end_of_ring(&mut self) -> Result<Option<Completion>, Gone> {
        self.lose(Gone::Closed);
        match self.side.completions.pop() {
            Ok(None) => self.report_gone(),
            Ok(Some(record)) => self.accept_or_fail(&record),
            Err(violation) => self.fail(violation.into()),
        }
    }

    fn accept_or_fail(&mut self, record: &CompletionRecord) -> Result<Option<Completion>, Gone> {
        self.side.completions.release();
        match self.accept(record) {
            Ok(completion) => Ok(Some(completion)),
            Err(fault) => self.fail(fault),
        }
    }

    /// How far the session has come, as the Manager says. One load.
    #[inline]
    pub(crate) fn state(&self) -> SessionState {
        self.side.state()
    }

    #[cold]
    fn fail(&mut self, fault: ProtocolFault) -> Result<Option<Completion>, Gone> {
        self.lose(Gone::Protocol(fault));
        self.report_gone()
    }

    /// One completion for each outstanding operation, then the cause for ever.
    #[cold]
    fn report_gone(&mut self) -> Result<Option<Completion>, Gone> {
        let gone = self.gone.unwrap_or(Gone::Closed);
        let Some((id, issued)) = self.pending.end_any() else { return Err(gone) };
        self.ranges.release(issued.range);
        Ok(Some(Completion {
            operation: Operation { tag: self.tag, id },
            kind: issued.kind,
            status: Status::Gone,
            code: Code::None,
            pages: 0,
            pages_dram: 0,
            pages_ssd: 0,
            pages_present: 0,
            pages_refused: 0,
            first_failed: None,
            bytes: 0,
            lease: None,
            times: StageTimes { observed_ns: monotonic_ns(), ..StageTimes::default() },
        }))
    }

    /// Checks a private copy of a completion against its request and ends the operation.
    fn accept(&mut self, record: &CompletionRecord) -> Result<Completion, ProtocolFault> {
        let Tag { session, epoch } = self.tag;
        record.check_addressed_to(session, epoch).map_err(ProtocolFault::BadField)?;
        let answer = record::Completion::decode(record).map_err(ProtocolFault::BadField)?;
        let operation = answer.operation;
        let unknown = ProtocolFault::UnknownOperation { operation };
        let issued = *self.pending.get(operation).ok_or(unknown)?;
        if !is_before(issued.sequence, self.side.requests.published()) {
            return Err(unknown);
        }
        check_answer(&answer, &issued)?;
        if let Some(target) = issued.cancels
            && answer.status == record::Status::Ok
            && self.pending.get(target).is_some()
        {
            return Err(ProtocolFault::CancelledTooEarly { target });
        }
        self.pending.end(operation);
        if issued.range.len > 0 {
            let Issued { range, pages, .. } = issued;
            self.readable = Some(Readable { operation, range, pages });
            self.attention = true;
        }
        Ok(self.completion(&answer))
    }

    fn completion(&self, answer: &record::Completion) -> Completion {
        let lease = answer.lease.map(|lease| {
            Lease::from_parts(LeaseParts {
                lease,
                epoch: self.tag.epoch,
                engine: self.engine,
                pages: answer.pages,
                expires_ns: answer.lease_expires_ns,
            })
        });
        Completion {
            operation: Operation { tag: self.tag, id: answer.operation },
            kind: answer.kind,
            status: answer.status.into(),
            code: answer.code,
            pages: answer.pages,
            pages_dram: answer.pages_dram,
            pages_ssd: answer.pages_ssd,
            pages_present: answer.pages_present,
            pages_refused: answer.pages_refused,
            first_failed: answer.first_failed,
            bytes: answer.bytes,
            lease,
            times: StageTimes {
                queued_ns: answer.queued_ns,
                prepared_ns: answer.prepared_ns,
                copied_ns: answer.copied_ns,
                published_ns: answer.published_ns,
                observed_ns: if answer.kind.has_stages() { monotonic_ns() } else { 0 },
            },
        }
    }

    /// Whether `operation` belongs to this session and has no completion yet.
    pub(crate) fn is_outstanding(&self, operation: &Operation) -> bool {
        operation.tag == self.tag && self.pending.get(operation.id).is_some()
    }

    /// Notes which done word tells that all of an operation is done: 0 unless told otherwise.
    pub(crate) fn set_last_word(&mut self, operation: OperationId, word: u32) {
        self.last_words[operation.index as usize] = word;
    }

    /// The done word that tells that all of an operation is done.
    pub(crate) fn last_word(&self, operation: OperationId) -> u32 {
        self.last_words.get(operation.index as usize).copied().unwrap_or(0)
    }

    /// Done word `word` of an operation index below the credits.
    pub(crate) fn done_word(&self, operation: OperationId, word: u32) -> u32 {
        self.side.done.load(operation.index, word)
    }

    /// All done words of the session.
    #[cfg(feature = "cuda")]
    pub(crate) fn done_words(&self) -> DoneWordsReader {
        self.side.done.clone()
    }

    /// Results of the completion that the last poll returned.
    pub(crate) fn results(&self, operation: OperationId) -> Results<'_> {
        let source =
            Source { table: &self.side.results, anchors: &self.anchors, fault: &self.result_fault };
        match self.readable {
            Some(readable) if readable.operation == operation => Results::new(source, readable),
            _ => Results::NONE,
        }
    }

    /// The waiting side of this session's doorbell.
    pub(crate) fn sleeper(&self) -> &Sleeper {
        &self.side.sleeper
    }

    /// Sleeps until the Manager rings, at most `timeout`.
    pub(crate) fn park(&self, timeout: Duration) {
        let seen = self.side.sleeper.begin();
        if !self.ready() {
            self.side.sleeper.wait(seen, timeout);
        }
        self.side.sleeper.end();
    }
}

/// Entries of the page table that a chain takes.
fn chain_entries<P>(chain: &Chain<'_, P>) -> usize {
    match chain.blocks.len() {
        0 => 0,
        blocks => blocks + usize::from(chain.parent.is_some()),
    }
}

/// Whether ring position `a` comes before `b`, both free-running and less than half a circle apart.
fn is_before(a: u64, b: u64) -> bool {
    (a.wrapping_sub(b) as i64) < 0
}

/// Refuses what a completion cannot say about its request. The engine indexes by these numbers.
fn check_answer(answer: &record::Completion, issued: &Issued) -> Result<(), ProtocolFault> {
    let operation = answer.operation;
    if answer.kind != issued.kind {
        return Err(ProtocolFault::WrongKind {
            operation,
            asked: issued.kind,
            answered: answer.kind,
        });
    }
    let bad = |field, value: u64| {
        Err(ProtocolFault::BadCompletion { operation, field: BadField { field, value } })
    };
    // Release, prepare and forget count pages that the request did not name one by one.
    let counts_entries =
        matches!(answer.kind, RequestKind::Save | RequestKind::Query | RequestKind::Restore);
    if counts_entries && answer.pages > issued.pages {
        return bad("pages", answer.pages.into());
    }
    if answer.pages_present > issued.pages {
        return bad("pages_present", answer.pages_present.into());
    }
    if answer.pages_refused > issued.pages {
        return bad("pages_refused", answer.pages_refused.into());
    }
    if let Some(first) = answer.first_failed
        && first >= issued.pages
    {
        return bad("first_failed", first.into());
    }
    match answer.lease {
        Some(lease) if answer.kind != RequestKind::Query => bad("lease", lease.0),
        _ => Ok(()),
    }
}

/// CLOCK_MONOTONIC, the clock of the stage times; answered by the vDSO without a system call, except the
/// first time.
fn monotonic_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}
