//! What each process holds of a session: one side of every ring, table, word and doorbell.

use std::os::fd::OwnedFd;

use super::tables::{
    DoneWords, DoneWordsReader, PageTable, PageTableWriter, ResultReader, ResultTable,
};
use crate::doorbell::{Ringer, Sleeper};
use crate::ids::{Epoch, SessionId};
use crate::layout::{
    COMPLETION_HEAD, COMPLETION_TAIL, ENGINE_DOORBELL, ENGINE_SLEEP_GENERATION, Geometry,
    HEADER_STATE, MANAGER_DOORBELL, MANAGER_SLEEP_GENERATION, REQUEST_HEAD, REQUEST_TAIL,
    RING_OFFSET,
};
use crate::memory::{SharedMemory, WordReader, WordWriter};
use crate::record::{CompletionRecord, RequestRecord, SessionState};
use crate::ring::{Consumer, Producer, RingRecord};

/// The Manager's view of a session. Every number that comes out of it is the client's word.
///
/// Fields are public so that a reactor can borrow them apart. Dropping the last of them (clones
/// of [`DoneWords`] included) unmaps the segments.
#[derive(Debug)]
pub struct ManagerSide {
    /// Takes requests.
    pub requests: Consumer<RequestRecord>,
    /// Publishes completions.
    pub completions: Producer<CompletionRecord>,
    /// Copies page entries out.
    pub pages: PageTable,
    /// Writes page results.
    pub results: ResultTable,
    /// Stores done words.
    pub done: DoneWords,
    /// Waits for requests.
    pub sleeper: Sleeper,
    /// Wakes the engine.
    pub ringer: Ringer,
    state: WordWriter<u32>,
    geometry: Geometry,
    session: SessionId,
    epoch: Epoch,
    /// Of the submission segment: held so that the inspection tool finds the client's words when
    /// this process does not look at them. None over heap memory.
    _submission: Option<OwnedFd>,
}

impl ManagerSide {
    /// Holds the submission segment's descriptor for as long as the session lasts.
    pub(super) fn keep(&mut self, submission: OwnedFd) {
        self._submission = Some(submission);
    }

    pub(super) fn over(
        submission: &SharedMemory,
        completion: &SharedMemory,
        geometry: Geometry,
        session: SessionId,
        epoch: Epoch,
    ) -> Self {
        let ring_capacity = geometry.ring_capacity;
        let segments = Segments { own: completion, peer: submission, ring_capacity };
        Self {
            requests: segments.consumer(REQUEST_TAIL, REQUEST_HEAD),
            completions: segments.producer(COMPLETION_TAIL, COMPLETION_HEAD),
            pages: PageTable::new(submission, &geometry),
            results: ResultTable::new(completion, &geometry),
            done: DoneWords::new(completion, &geometry),
            sleeper: segments.sleeper(MANAGER_SLEEP_GENERATION, MANAGER_DOORBELL),
            ringer: segments.ringer(ENGINE_DOORBELL, ENGINE_SLEEP_GENERATION),
            state: completion.word_writer(HEADER_STATE),
            geometry,
            session,
            epoch,
            _submission: None,
        }
    }

    /// Tells the engine how far the session has come (`session-state`).
    pub fn set_state(&self, state: SessionState) {
        self.state.store_release(state as u32);
    }

    /// The geometry that the segments were made with.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// The session that the segments belong to.
    pub fn session(&self) -> SessionId {
        self.session
    }

    /// The epoch that the segments were made in.
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }
}

/// The engine's view of a session.
///
/// Fields are public so that a client can borrow them apart. After a fork the child must not
/// touch any of them: it asks [`is_mapped_here`](Self::is_mapped_here) first.
#[derive(Debug)]
pub struct EngineSide {
    /// Publishes requests.
    pub requests: Producer<RequestRecord>,
    /// Takes completions.
    pub completions: Consumer<CompletionRecord>,
    /// Writes page entries.
    pub pages: PageTableWriter,
    /// Copies page results out.
    pub results: ResultReader,
    /// Reads done words.
    pub done: DoneWordsReader,
    /// Waits for completions.
    pub sleeper: Sleeper,
    /// Wakes the Manager.
    pub ringer: Ringer,
    submission: SharedMemory,
    state: WordReader<u32>,
    geometry: Geometry,
    session: SessionId,
    epoch: Epoch,
}

impl EngineSide {
    pub(super) fn over(
        submission: &SharedMemory,
        completion: &SharedMemory,
        geometry: Geometry,
        session: SessionId,
        epoch: Epoch,
    ) -> Self {
        let ring_capacity = geometry.ring_capacity;
        let segments = Segments { own: submission, peer: completion, ring_capacity };
        Self {
            requests: segments.producer(REQUEST_TAIL, REQUEST_HEAD),
            completions: segments.consumer(COMPLETION_TAIL, COMPLETION_HEAD),
            pages: PageTableWriter::new(submission, &geometry),
            results: ResultReader::new(completion, &geometry),
            done: DoneWordsReader::new(completion, &geometry),
            sleeper: segments.sleeper(ENGINE_SLEEP_GENERATION, ENGINE_DOORBELL),
            ringer: segments.ringer(MANAGER_DOORBELL, MANAGER_SLEEP_GENERATION),
            submission: submission.clone(),
            state: completion.word_reader(HEADER_STATE),
            geometry,
            session,
            epoch,
        }
    }

    /// How far the Manager says the session has come (`session-state`). A number that no Manager
    /// stores counts as closed.
    pub fn state(&self) -> SessionState {
        SessionState::from_raw(self.state.load_acquire()).unwrap_or(SessionState::Closed)
    }

    /// Whether the Manager serves the session (`session-state`): the common case of
    /// [`state`](Self::state) for the price of one load.
    #[inline]
    pub fn is_open(&self) -> bool {
        self.state.load_acquire() == SessionState::Open as u32
    }

    /// False in a forked child, where the segments are not mapped. One private load.
    #[inline]
    pub fn is_mapped_here(&self) -> bool {
        self.submission.is_mapped_here()
    }

    /// The geometry that the segments were made with.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// The session that the segments belong to.
    pub fn session(&self) -> SessionId {
        self.session
    }

    /// The epoch that the segments were made in.
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }
}

/// The two segments as one process holds them. Whatever is made of them writes only what is its own
/// and reads only what is its peer's.
#[derive(Clone, Copy)]
struct Segments<'a> {
    own: &'a SharedMemory,
    peer: &'a SharedMemory,
    ring_capacity: u32,
}

impl Segments<'_> {
    /// The writing end of the ring in the own segment.
    fn producer<R: RingRecord>(self, tail: usize, head: usize) -> Producer<R> {
        let slots = self.own.slot_writer(RING_OFFSET, self.ring_capacity);
        Producer::new(slots, self.own.word_writer(tail), self.peer.word_reader(head), 0)
    }

    /// The reading end of the ring in the peer's segment.
    fn consumer<R: RingRecord>(self, tail: usize, head: usize) -> Consumer<R> {
        let slots = self.peer.slot_reader(RING_OFFSET, self.ring_capacity);
        Consumer::new(slots, self.peer.word_reader(tail), self.own.word_writer(head), 0)
    }

    fn sleeper(self, generation: usize, doorbell: usize) -> Sleeper {
        Sleeper::new(self.own.word_writer(generation), self.peer.word_reader(doorbell))
    }

    fn ringer(self, doorbell: usize, generation: usize) -> Ringer {
        Ringer::new(self.own.word_writer(doorbell), self.peer.word_reader(generation))
    }
}
