//! What each process holds of a session: one side of every ring, table, word and doorbell.

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
use crate::ring::{Consumer, Producer};

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
}

impl ManagerSide {
    pub(super) fn over(
        submission: &SharedMemory,
        completion: &SharedMemory,
        geometry: Geometry,
        session: SessionId,
        epoch: Epoch,
    ) -> Self {
        let capacity = geometry.ring_capacity;
        Self {
            requests: Consumer::new(
                submission.slot_reader(RING_OFFSET, capacity),
                submission.word_reader(REQUEST_TAIL),
                completion.word_writer(REQUEST_HEAD),
                0,
            ),
            completions: Producer::new(
                completion.slot_writer(RING_OFFSET, capacity),
                completion.word_writer(COMPLETION_TAIL),
                submission.word_reader(COMPLETION_HEAD),
                0,
            ),
            pages: PageTable::new(submission, &geometry),
            results: ResultTable::new(completion, &geometry),
            done: DoneWords::new(completion, &geometry),
            sleeper: Sleeper::new(
                completion.word_writer(MANAGER_SLEEP_GENERATION),
                submission.word_reader(MANAGER_DOORBELL),
            ),
            ringer: Ringer::new(
                completion.word_writer(ENGINE_DOORBELL),
                submission.word_reader(ENGINE_SLEEP_GENERATION),
            ),
            state: completion.word_writer(HEADER_STATE),
            geometry,
            session,
            epoch,
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
        let capacity = geometry.ring_capacity;
        Self {
            requests: Producer::new(
                submission.slot_writer(RING_OFFSET, capacity),
                submission.word_writer(REQUEST_TAIL),
                completion.word_reader(REQUEST_HEAD),
                0,
            ),
            completions: Consumer::new(
                completion.slot_reader(RING_OFFSET, capacity),
                completion.word_reader(COMPLETION_TAIL),
                submission.word_writer(COMPLETION_HEAD),
                0,
            ),
            pages: PageTableWriter::new(submission, &geometry),
            results: ResultReader::new(completion, &geometry),
            done: DoneWordsReader::new(completion, &geometry),
            sleeper: Sleeper::new(
                submission.word_writer(ENGINE_SLEEP_GENERATION),
                completion.word_reader(ENGINE_DOORBELL),
            ),
            ringer: Ringer::new(
                submission.word_writer(MANAGER_DOORBELL),
                completion.word_reader(MANAGER_SLEEP_GENERATION),
            ),
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
