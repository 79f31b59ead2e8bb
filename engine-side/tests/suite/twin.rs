//! A twin of the Manager for tests: real socket, real segments, a simple model behind them.
//!
//! What it leaves out: budgets, deadlines (but a drain's), SSD, expiry. Pages live in a map for
//! ever. What it adds: kinds of requests can be held back, the answer to a greeting can be
//! replaced, and a test can run any closure on its thread to see or break its state.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;

use orbitkv_shm_protocol::bootstrap::message::{
    ClientMessage, GpuId, IpcHandle, ManagerMessage, MemorySpec, NamespaceSpec, Refusal,
    RegionSpec, Welcome,
};
use orbitkv_shm_protocol::bootstrap::peer;
use orbitkv_shm_protocol::bootstrap::transport::{self, TransportError};
use orbitkv_shm_protocol::doorbell::{self, Sleeper};
use orbitkv_shm_protocol::ids::{Epoch, PageHash, SessionId};
use orbitkv_shm_protocol::layout::{Geometry, LAYOUT_FINGERPRINT};
use orbitkv_shm_protocol::record::{Completion, PageEntry, PageResult, Request, RequestKind};
use orbitkv_shm_protocol::segment::{self, ManagerSide};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

/// Longest time the twin looks away from its sockets.
const NAP: Duration = Duration::from_millis(1);
/// Longest time the twin waits for a client to read.
const SEND_TIMEOUT: Duration = Duration::from_secs(5);

type Job = Box<dyn FnOnce(&mut Server) + Send>;
/// Answers a greeting in place of the twin; false leaves it to the twin.
pub(crate) type Greeter = Box<dyn FnMut(&OwnedFd, &ClientMessage) -> bool + Send>;

/// A running twin on a thread of this process. Stopped on drop.
pub(crate) struct Twin {
    path: PathBuf,
    jobs: Option<mpsc::Sender<Job>>,
    thread: Option<JoinHandle<()>>,
    _folder: tempfile::TempDir,
}

impl Twin {
    pub(crate) fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("manager.sock");
        let mut server = Server::listen(&path);
        let (jobs, work) = mpsc::channel::<Job>();
        let thread = std::thread::spawn(move || {
            loop {
                match work.try_recv() {
                    Ok(job) => job(&mut server),
                    Err(mpsc::TryRecvError::Empty) => {}
                    Err(mpsc::TryRecvError::Disconnected) => return,
                }
                server.turn();
            }
        });
        Self { path, jobs: Some(jobs), thread: Some(thread), _folder: folder }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Runs `job` on the twin's thread and returns its answer. Between two jobs lies at least one
    /// turn.
    pub(crate) fn with<R: Send + 'static>(
        &self,
        job: impl FnOnce(&mut Server) -> R + Send + 'static,
    ) -> R {
        let (answer, result) = mpsc::channel();
        let job: Job = Box::new(move |server| {
            let _ = answer.send(job(server));
        });
        self.jobs.as_ref().unwrap().send(job).unwrap();
        result.recv().unwrap()
    }

    /// Requests of these kinds are taken, but not answered, until another call leaves them out.
    pub(crate) fn hold(&self, kinds: &[RequestKind]) {
        let kinds: HashSet<RequestKind> = kinds.iter().copied().collect();
        self.with(|server| server.hold = kinds);
    }
}

impl Drop for Twin {
    fn drop(&mut self) {
        drop(self.jobs.take());
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            assert!(ended.is_ok() || std::thread::panicking(), "the twin panicked");
        }
    }
}

/// Everything the twin knows.
pub(crate) struct Server {
    listener: OwnedFd,
    pub(crate) epoch: Epoch,
    pub(crate) seats: Vec<Seat>,
    pub(crate) store: Store,
    pub(crate) hold: HashSet<RequestKind>,
    pub(crate) greeter: Option<Greeter>,
    sessions: u32,
}

/// Pages and leases, shared by all sessions.
#[derive(Default)]
pub(crate) struct Store {
    pub(crate) pages: HashMap<(NamespaceSpec, PageHash), Vec<u8>>,
    pub(crate) leases: HashMap<u64, TwinLease>,
    pub(crate) leases_granted: u64,
}

pub(crate) struct TwinLease {
    pub(crate) engine: String,
    pub(crate) hashes: Vec<PageHash>,
}

/// One session.
pub(crate) struct Seat {
    pub(crate) socket: OwnedFd,
    pub(crate) side: ManagerSide,
    pub(crate) engine: String,
    pub(crate) scopes: Vec<Vec<NamespaceSpec>>,
    pub(crate) memories: Vec<Reach>,
    /// Handles that have ended. Regions over them go on.
    pub(crate) released: HashSet<u32>,
    pub(crate) events: Vec<(GpuId, IpcHandle)>,
    pub(crate) regions: Vec<Option<RegionSpec>>,
    pub(crate) held: Vec<(Request, Vec<PageEntry>)>,
    /// Requests taken so far.
    pub(crate) taken: u64,
    pub(crate) is_open: bool,
    /// Slots of the request ring are not given back.
    pub(crate) hoards: bool,
}

/// How the twin reaches memory of the engine.
pub(crate) enum Reach {
    Memfd(File),
    Process {
        memory: File,
        base: u64,
        nonce_address: u64,
        nonce: u64,
    },
    /// It only notes what it was told.
    Gpu(MemorySpec),
}

impl Reach {
    pub(crate) fn read(&self, offset: u64, bytes: &mut [u8]) {
        match self {
            Self::Memfd(file) => file.read_exact_at(bytes, offset).unwrap(),
            Self::Process { memory, base, .. } => {
                memory.read_exact_at(bytes, base + offset).unwrap();
            }
            Self::Gpu(spec) => panic!("read of {spec:?}"),
        }
    }

    pub(crate) fn write(&self, offset: u64, bytes: &[u8]) {
        match self {
            Self::Memfd(file) => file.write_all_at(bytes, offset).unwrap(),
            Self::Process { memory, base, nonce_address, nonce } => {
                let mut found = [0; 8];
                memory.read_exact_at(&mut found, *nonce_address).unwrap();
                assert_eq!(u64::from_ne_bytes(found), *nonce, "not the engine that registered");
                memory.write_all_at(bytes, base + offset).unwrap();
            }
            Self::Gpu(spec) => panic!("write of {spec:?}"),
        }
    }
}

impl Server {
    pub(crate) fn listen(path: &Path) -> Self {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let listener =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
                .unwrap();
        // Bound elsewhere and renamed, as the Manager does: it appears only when it is ready.
        let unready = path.with_extension("new");
        rustix::net::bind(&listener, &SocketAddrUnix::new(&unready).unwrap()).unwrap();
        rustix::net::listen(&listener, 16).unwrap();
        std::fs::rename(&unready, path).unwrap();
        Self {
            listener,
            epoch: Epoch(std::process::id() | 1 << 31),
            seats: Vec::new(),
            store: Store::default(),
            hold: HashSet::new(),
            greeter: None,
            sessions: 0,
        }
    }

    /// Looks at every socket and ring once, then naps if there was nothing.
    pub(crate) fn turn(&mut self) {
        let mut is_busy = self.accept();
        for seat in &mut self.seats {
            is_busy |= seat.serve_socket();
            is_busy |= seat.serve_ring(&mut self.store, &self.hold);
        }
        self.seats.retain(|seat| seat.is_open);
        if !is_busy {
            self.nap();
        }
    }

    fn nap(&self) {
        let sleepers: Vec<(&Sleeper, u32)> =
            self.seats.iter().map(|seat| (&seat.side.sleeper, seat.side.sleeper.begin())).collect();
        if sleepers.is_empty() {
            std::thread::sleep(NAP);
        } else if !self.seats.iter().any(|seat| seat.side.requests.ready()) {
            doorbell::wait_many(&sleepers, NAP);
        }
        for (sleeper, _) in sleepers {
            sleeper.end();
        }
    }

    fn accept(&mut self) -> bool {
        let Ok(socket) = rustix::net::accept_with(&self.listener, SocketFlags::CLOEXEC) else {
            return false;
        };
        let hello = match transport::receive_client(&socket, SEND_TIMEOUT) {
            Ok((hello, _)) => hello,
            Err(TransportError::Closed) => return true,
            Err(error) => panic!("greeting: {error}"),
        };
        if self.greeter.as_mut().is_some_and(|greeter| greeter(&socket, &hello)) {
            return true;
        }
        let ClientMessage::Hello { engine_id, ring_capacity, page_entries, done_words, .. } = hello
        else {
            panic!("not a greeting: {hello:?}");
        };
        self.sessions += 1;
        let geometry = Geometry { ring_capacity, page_entries, done_words };
        let (welcome, side, descriptors) = welcome(geometry, SessionId(self.sessions), self.epoch);
        let descriptors = [descriptors.submission.as_fd(), descriptors.completion.as_fd()];
        match transport::send(&socket, &welcome, &descriptors, SEND_TIMEOUT) {
            Ok(()) => {}
            Err(TransportError::Closed) => return true,
            Err(error) => panic!("welcome: {error}"),
        }
        self.seats.push(Seat {
            socket,
            side,
            engine: engine_id,
            scopes: Vec::new(),
            memories: Vec::new(),
            released: HashSet::new(),
            events: Vec::new(),
            regions: Vec::new(),
            held: Vec::new(),
            taken: 0,
            is_open: true,
            hoards: false,
        });
        true
    }
}

/// A correct answer to a greeting.
pub(crate) fn welcome(
    geometry: Geometry,
    session: SessionId,
    epoch: Epoch,
) -> (ManagerMessage, ManagerSide, segment::SegmentDescriptors) {
    let (side, descriptors) = segment::create(geometry, session, epoch).unwrap();
    let welcome = Welcome {
        layout_fingerprint: LAYOUT_FINGERPRINT,
        epoch: epoch.0,
        session: session.0,
        ring_capacity: geometry.ring_capacity,
        page_entries: geometry.page_entries,
        done_words: geometry.done_words,
        submission_bytes: geometry.submission_bytes() as u64,
        completion_bytes: geometry.completion_bytes() as u64,
        manager_pid: 0,
        page_bytes_max: 1 << 26,
        operation_timeout_ms: 5000,
        lease_ttl_ms: 30_000,
        query_budget_bytes: 1 << 30,
        session_budget_bytes: 1 << 29,
        spin_window_ns: 20_000,
    };
    (ManagerMessage::Welcome(welcome), side, descriptors)
}

impl Seat {
    fn serve_socket(&mut self) -> bool {
        let (question, descriptors) = match transport::receive_client(&self.socket, Duration::ZERO)
        {
            Ok(message) => message,
            Err(TransportError::TimedOut(_)) => return false,
            Err(TransportError::Closed) => {
                self.is_open = false;
                return true;
            }
            Err(error) => panic!("registration: {error}"),
        };
        let answer = self.register(question, descriptors).unwrap_or_else(|refusal| {
            ManagerMessage::Refused { refusal, message: "the twin says no".into() }
        });
        match transport::send(&self.socket, &answer, &[], SEND_TIMEOUT) {
            Ok(()) | Err(TransportError::Closed) => {}
            Err(error) => panic!("answer: {error}"),
        }
        true
    }

    fn register(
        &mut self,
        question: ClientMessage,
        descriptors: Vec<OwnedFd>,
    ) -> Result<ManagerMessage, Refusal> {
        match question {
            ClientMessage::DefineNamespace(spec) => {
                if spec.page_bytes == 0 {
                    return Err(Refusal::BadMessage);
                }
                Ok(self.add_scope(vec![spec]))
            }
            ClientMessage::DefineSet { members } => {
                let one = |member: &u32| self.scopes.get(*member as usize)?.first().cloned();
                let specs = members.iter().map(one).collect::<Option<Vec<_>>>();
                Ok(self.add_scope(specs.ok_or(Refusal::BadMessage)?))
            }
            ClientMessage::RegisterMemory(spec) => {
                let reach = match spec {
                    MemorySpec::Memfd { .. } => {
                        let [memfd] = <[OwnedFd; 1]>::try_from(descriptors)
                            .map_err(|_| Refusal::BadMessage)?;
                        Reach::Memfd(File::from(memfd))
                    }
                    MemorySpec::Process { address, nonce_address, nonce, .. } => {
                        let pid = peer::peer_credentials(&self.socket).unwrap().pid;
                        let memory = File::options()
                            .read(true)
                            .write(true)
                            .open(format!("/proc/{pid}/mem"))
                            .map_err(|_| Refusal::UnsupportedMemory)?;
                        Reach::Process { memory, base: address, nonce_address, nonce }
                    }
                    MemorySpec::Cuda { bytes: 0, .. } => return Err(Refusal::BadMessage),
                    MemorySpec::Cuda { .. } => Reach::Gpu(spec),
                };
                self.memories.push(reach);
                Ok(ManagerMessage::Memory { memory: self.memories.len() as u32 - 1 })
            }
            ClientMessage::ReleaseMemory { memory } => {
                if !self.is_live(memory) {
                    return Err(Refusal::BadMessage);
                }
                self.released.insert(memory);
                Ok(ManagerMessage::MemoryReleased)
            }
            ClientMessage::RegisterRegion(spec) => {
                if !spec.segments.iter().all(|segment| self.is_live(segment.memory)) {
                    return Err(Refusal::BadMessage);
                }
                let page_bytes = spec.segments.iter().map(|segment| segment.length).sum();
                let namespace = self.scopes.get(spec.scope as usize).ok_or(Refusal::BadMessage)?;
                if namespace.len() != 1 || namespace[0].page_bytes != page_bytes {
                    return Err(Refusal::LayoutConflict);
                }
                self.regions.push(Some(spec));
                let region = self.regions.len() as u32 - 1;
                Ok(ManagerMessage::Region { region, page_bytes })
            }
            ClientMessage::RegisterEvents { gpu, handles } => {
                if handles.is_empty() {
                    return Err(Refusal::BadMessage);
                }
                let first = self.events.len() as u32;
                self.events.extend(handles.into_iter().map(|handle| (gpu, handle)));
                Ok(ManagerMessage::Events { first })
            }
            ClientMessage::Hello { .. } | ClientMessage::Evict { .. } => Err(Refusal::OutOfOrder),
        }
    }

    fn is_live(&self, memory: u32) -> bool {
        (memory as usize) < self.memories.len() && !self.released.contains(&memory)
    }

    fn add_scope(&mut self, members: Vec<NamespaceSpec>) -> ManagerMessage {
        let page_bytes = members.iter().map(|member| member.page_bytes).sum();
        self.scopes.push(members);
        ManagerMessage::Scope { scope: self.scopes.len() as u32 - 1, page_bytes }
    }

    fn serve_ring(&mut self, store: &mut Store, hold: &HashSet<RequestKind>) -> bool {
        let mut is_busy = false;
        while let Some(record) = self.side.requests.pop().expect("the client broke the ring") {
            record.check_addressed_to(self.side.session(), self.side.epoch()).unwrap();
            let request = Request::decode(&record).expect("the client sent a bad request");
            let mut entries = Vec::new();
            assert!(self.side.pages.read_range(request.range, &mut entries));
            self.taken += 1;
            self.held.push((request, entries));
            is_busy = true;
        }
        if !self.hoards {
            self.side.requests.release();
        }
        let mut at = 0;
        while at < self.held.len() {
            if hold.contains(&self.held[at].0.kind()) || !self.may_end(at, store) {
                at += 1;
                continue;
            }
            let (request, entries) = self.held.remove(at);
            self.answer(request, &entries, store);
            // A cancel may have ended an earlier one.
            at = 0;
            is_busy = true;
        }
        if self.side.completions.publish() {
            self.side.ringer.ring();
        }
        is_busy
    }

    /// A drain waits for everything before it and for the leases of the group.
    fn may_end(&self, at: usize, store: &Store) -> bool {
        let (request, _) = &self.held[at];
        request.kind() != RequestKind::Drain
            || request.deadline_ms > 0
            || (at == 0 && !store.leases.values().any(|lease| lease.engine == self.engine))
    }

    /// Stages results, then the record that makes them visible.
    pub(crate) fn complete(
        &mut self,
        range_start: u32,
        results: &[PageResult],
        completion: Completion,
    ) {
        for (i, result) in results.iter().enumerate() {
            self.side.results.write(range_start + i as u32, *result);
        }
        let (session, epoch) = (self.side.session(), self.side.epoch());
        self.side
            .completions
            .push(|sequence| completion.encode(session, epoch, sequence))
            .expect("credits keep the completion ring from filling");
    }
}
