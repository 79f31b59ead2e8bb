//! Clients that write whatever they like into their segment, and what they say before they have one.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use orbitkv_shm_protocol::bootstrap::message::{
    ClientMessage, ManagerMessage, MemorySpec, RegionSpec, SegmentSpec, Welcome,
};
use orbitkv_shm_protocol::bootstrap::transport::{self, TransportError};
use orbitkv_shm_protocol::ids::{Epoch, OperationId, PageHash, RegionId, ScopeId, SessionId};
use orbitkv_shm_protocol::layout::{
    COMPLETION_HEAD, COMPLETION_TAIL, Geometry, LAYOUT_FINGERPRINT, MANAGER_DOORBELL,
    MANAGER_SLEEP_GENERATION, REQUEST_HEAD, REQUEST_TAIL, RING_OFFSET,
};
use orbitkv_shm_protocol::record::{CompletionRecord, PageEntry, Request, RequestRecord};
use orbitkv_shm_protocol::segment::{self, EngineSide, Expected};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::engine::namespace;
use crate::manager::PATIENCE;
use crate::victim::PAGE;

/// What every raw client asks for.
pub const GEOMETRY: Geometry = Geometry { ring_capacity: 64, page_entries: 1024, done_words: 1 };

/// A connection to the Manager at `path`.
///
/// # Panics
/// When nobody listens.
pub fn connect(path: &Path) -> OwnedFd {
    let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
    let socket = rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None).unwrap();
    rustix::net::connect(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
    socket
}

/// The greeting of a client that means well.
pub fn hello() -> ClientMessage {
    ClientMessage::Hello {
        layout_fingerprint: LAYOUT_FINGERPRINT,
        engine_id: "0123456789abcdef".repeat(2),
        ring_capacity: GEOMETRY.ring_capacity,
        page_entries: GEOMETRY.page_entries,
        done_words: GEOMETRY.done_words,
    }
}

/// Says something and hears the answer.
///
/// # Panics
/// When there is none.
pub fn ask(socket: &OwnedFd, message: &ClientMessage) -> ManagerMessage {
    transport::send(socket, message, &[], PATIENCE).unwrap();
    transport::receive_manager(socket, PATIENCE).unwrap().0
}

/// A client that has attached and may write any byte of its segment at any time.
#[derive(Debug)]
pub struct Raw {
    /// Its connection.
    pub socket: OwnedFd,
    /// What the Manager answered.
    pub welcome: Welcome,
    /// Its rings and tables, as an honest client has them.
    pub side: EngineSide,
    submission: File,
    completion: File,
    /// Position of the next honest record.
    pub position: u64,
}

impl Raw {
    /// Attaches to the Manager at `path`.
    ///
    /// # Panics
    /// When that is refused.
    pub fn attach(path: &Path) -> Self {
        Self::attach_as(path, "0123456789abcdef".repeat(2))
    }

    /// A client of an attachment group of its own.
    ///
    /// # Panics
    /// When that is refused.
    pub fn attach_as(path: &Path, group: String) -> Self {
        let socket = connect(path);
        let mut greeting = hello();
        if let ClientMessage::Hello { engine_id, .. } = &mut greeting {
            *engine_id = group;
        }
        transport::send(&socket, &greeting, &[], PATIENCE).unwrap();
        let (answer, descriptors) = transport::receive_manager(&socket, PATIENCE).unwrap();
        let ManagerMessage::Welcome(welcome) = answer else { panic!("{answer:?}") };
        let [submission, completion] = <[OwnedFd; 2]>::try_from(descriptors).unwrap();
        let (session, epoch) = (SessionId(welcome.session), Epoch(welcome.epoch));
        let expected = Expected::new(GEOMETRY, session, epoch);
        let copies = (submission.try_clone().unwrap(), completion.try_clone().unwrap());
        let side = segment::attach(copies.0, copies.1, expected).unwrap();
        let (submission, completion) = (File::from(submission), File::from(completion));
        Self { socket, welcome, side, submission, completion, position: 0 }
    }

    /// Says something with descriptors and hears the answer.
    ///
    /// # Panics
    /// When there is none.
    pub fn ask_with(&self, message: &ClientMessage, files: &[BorrowedFd<'_>]) -> ManagerMessage {
        transport::send(&self.socket, message, files, PATIENCE).unwrap();
        transport::receive_manager(&self.socket, PATIENCE).unwrap().0
    }

    /// Defines a namespace of pages of [`PAGE`] bytes.
    ///
    /// # Panics
    /// When that is refused.
    pub fn define(&self, model: &str) -> ScopeId {
        let spec = namespace(model, PAGE as u64);
        let answer = self.ask_with(&ClientMessage::DefineNamespace(spec), &[]);
        let ManagerMessage::Scope { scope, .. } = answer else { panic!("{answer:?}") };
        ScopeId(scope)
    }

    /// Registers a memfd of so many bytes.
    ///
    /// # Panics
    /// When that is refused.
    pub fn register_memfd(&self, file: &File, bytes: u64) -> u32 {
        let message = ClientMessage::RegisterMemory(MemorySpec::Memfd { bytes });
        let answer = self.ask_with(&message, &[file.as_fd()]);
        let ManagerMessage::Memory { memory } = answer else { panic!("{answer:?}") };
        memory
    }

    /// Registers `pages` pages of [`PAGE`] bytes that lie side by side from `offset` on.
    ///
    /// # Panics
    /// When that is refused.
    pub fn register_pages(&self, scope: ScopeId, memory: u32, offset: u64, pages: u32) -> RegionId {
        let (stride, length) = (PAGE as u64, PAGE as u64);
        let segments = vec![SegmentSpec { memory, offset, stride, length, layer: 0 }];
        let spec = RegionSpec { scope: scope.0, pages, segments };
        let answer = self.ask_with(&ClientMessage::RegisterRegion(spec), &[]);
        let ManagerMessage::Region { region, .. } = answer else { panic!("{answer:?}") };
        RegionId(region)
    }

    /// Writes sixteen page entries of a round, which no other session or round has.
    pub fn fill_table(&self, round: u32) {
        for index in 0..16 {
            let mut hash = [index as u8; 32];
            hash[1..5].copy_from_slice(&round.to_le_bytes());
            hash[5..9].copy_from_slice(&self.welcome.session.to_le_bytes());
            self.side.pages.write(index, PageEntry::page(PageHash(hash), index));
        }
    }

    /// Writes bytes of the submission segment.
    ///
    /// # Panics
    /// When they do not fit.
    pub fn poke(&self, offset: usize, bytes: &[u8]) {
        self.submission.write_all_at(bytes, offset as u64).unwrap();
    }

    /// Reads a word of the completion segment.
    ///
    /// # Panics
    /// When there is none.
    pub fn peek(&self, offset: usize) -> u64 {
        let mut word = [0; 8];
        self.completion.read_exact_at(&mut word, offset as u64).unwrap();
        u64::from_le_bytes(word)
    }

    /// Writes a record into the slot of a position.
    pub fn put(&self, position: u64, record: &RequestRecord) {
        let slot = position % u64::from(GEOMETRY.ring_capacity);
        self.poke(RING_OFFSET + slot as usize * 64, bytemuck::bytes_of(record));
    }

    /// Moves the request ring's producer index and wakes the Manager.
    pub fn set_tail(&mut self, tail: u64) {
        self.poke(REQUEST_TAIL, &tail.to_le_bytes());
        self.side.ringer.ring();
    }

    /// Moves the completion ring's consumer index.
    pub fn set_completion_head(&mut self, head: u64) {
        self.poke(COMPLETION_HEAD, &head.to_le_bytes());
    }

    /// Writes the word by which it wakes the Manager.
    pub fn set_doorbell(&mut self, value: u32) {
        self.poke(MANAGER_DOORBELL, &value.to_le_bytes());
    }

    /// Completions that the Manager has published.
    pub fn published(&self) -> u64 {
        self.peek(COMPLETION_TAIL)
    }

    /// The record that an honest client would write for `request` now.
    pub fn record(&self, request: &Request) -> RequestRecord {
        let (session, epoch) = (SessionId(self.welcome.session), Epoch(self.welcome.epoch));
        request.encode(session, epoch, self.position)
    }

    /// A record of no kind, at the right place.
    pub fn empty_record(&self) -> RequestRecord {
        RequestRecord {
            session: self.welcome.session,
            epoch: self.welcome.epoch,
            sequence: self.position,
            ..RequestRecord::default()
        }
    }

    /// Publishes records one after the other at their positions, whatever they say.
    pub fn submit(&mut self, records: &[RequestRecord]) {
        for record in records {
            self.put(self.position, record);
            self.position += 1;
        }
        self.set_tail(self.position);
    }

    /// Waits until the Manager has published so many completions.
    ///
    /// # Panics
    /// When it never does.
    pub fn must_publish(&self, completions: u64) {
        let started = Instant::now();
        while self.published() < completions {
            assert!(started.elapsed() < PATIENCE, "{} completions", self.published());
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Whether the Manager has closed the socket, waiting up to `patience` for it.
    ///
    /// # Panics
    /// When it says something.
    pub fn is_closed(&self, patience: Duration) -> bool {
        match transport::receive_manager(&self.socket, patience) {
            Err(TransportError::Closed) => true,
            Err(TransportError::TimedOut(_)) => false,
            other => panic!("{other:?}"),
        }
    }

    /// Another handle to the segment that the Manager writes.
    ///
    /// # Panics
    /// When there is no descriptor left.
    pub fn completion_copy(&self) -> File {
        self.completion.try_clone().unwrap()
    }

    /// The completion record at a position, as its bytes are now.
    ///
    /// # Panics
    /// When it is not the record of that position.
    pub fn completion(&self, position: u64) -> CompletionRecord {
        let mut record = CompletionRecord::default();
        let slot = position % u64::from(GEOMETRY.ring_capacity);
        let offset = RING_OFFSET as u64 + slot * size_of::<CompletionRecord>() as u64;
        self.completion.read_exact_at(bytemuck::bytes_of_mut(&mut record), offset).unwrap();
        assert_eq!(record.sequence, position, "not published");
        record
    }

    /// Another handle to the segment that it writes.
    ///
    /// # Panics
    /// When there is no descriptor left.
    pub fn submission_copy(&self) -> File {
        self.submission.try_clone().unwrap()
    }

    /// Waits until the Manager's reactor sleeps.
    ///
    /// # Panics
    /// When it never does.
    pub fn must_find_the_manager_asleep(&self) {
        let started = Instant::now();
        while self.peek(MANAGER_SLEEP_GENERATION) as u32 & 1 == 0 {
            assert!(started.elapsed() < PATIENCE, "the Manager never sleeps");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Publishes records as a client that ends before it can wake the Manager.
    pub fn publish_silently(&mut self, records: &[RequestRecord]) {
        for record in records {
            self.put(self.position, record);
            self.position += 1;
        }
        self.poke(REQUEST_TAIL, &self.position.to_le_bytes());
    }

    /// Waits until the Manager has closed the session or taken everything.
    ///
    /// # Panics
    /// When it does neither.
    pub fn must_be_closed_or_quiet(&self) {
        let started = Instant::now();
        while self.peek(REQUEST_HEAD) < self.position {
            if self.is_closed(Duration::from_millis(1)) {
                return;
            }
            assert!(started.elapsed() < PATIENCE, "neither closed nor taken");
        }
    }

    /// Waits until the Manager has closed the session.
    ///
    /// # Panics
    /// When it never does.
    pub fn must_be_closed(&self) {
        assert!(self.is_closed(PATIENCE), "the Manager kept the session");
    }
}

/// An operation id.
pub fn operation(index: u32, generation: u32) -> OperationId {
    OperationId { index, generation }
}
