//! The endpoint as a whole: a real socket, a real thread, a stand-in for the reactor.

mod attach;
mod hostile;
mod listener;

use std::collections::HashMap;
use std::io::IoSlice;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use orbitkv_shm_protocol::bootstrap::message::{
    ClientMessage, DependencySpec, GpuId, HexBytes, IpcHandle, ManagerMessage, MemorySpec,
    NamespaceSpec, Refusal, RegionSpec, SegmentSpec, Welcome,
};
use orbitkv_shm_protocol::bootstrap::transport::{self, TransportError};
use orbitkv_shm_protocol::doorbell::ControlBell;
use orbitkv_shm_protocol::ids::{Epoch, RegionId, ScopeId, SessionId};
use orbitkv_shm_protocol::layout::LAYOUT_FINGERPRINT;
use orbitkv_shm_protocol::segment::DoneWords;
use rustix::net::{AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType};

use super::{
    Access, Answer, Claim, CloseCause, Endpoint, EndpointEvent, EndpointReply, ImportRefusal,
    Importer, Peer, Settings,
};
use crate::clock::Clock;
use crate::config::{Limits, SocketConfig};
use crate::device::{CopyError, DeviceEvent};

/// Nothing here takes this long; a test that waits for it has failed.
const PATIENCE: Duration = Duration::from_secs(20);

fn socket_config(path: &Path) -> SocketConfig {
    SocketConfig {
        path: path.to_owned(),
        path_is_default: false,
        allow_uids: Vec::new(),
        allow_gids: Vec::new(),
    }
}

fn limits() -> Limits {
    Limits {
        sessions: 4,
        ring_capacity_max: 256,
        page_entries_max: 4096,
        page_bytes_max: 1 << 20,
        scopes_per_session: 4,
        memories_per_session: 2,
        regions_per_session: 2,
        events_per_session: 300,
        bad_requests: 3,
    }
}

fn settings() -> Settings {
    Settings {
        epoch: Epoch(77),
        access: Access {
            owner_uid: rustix::process::geteuid().as_raw(),
            uids: Vec::new(),
            gids: Vec::new(),
        },
        limits: limits(),
        handshake_timeout: Duration::from_secs(60),
        operation_timeout: Duration::from_secs(5),
        lease_ttl: Duration::from_secs(30),
        query_budget_bytes: 2 << 20,
        session_budget_bytes: 1 << 20,
        spin_window: Duration::from_micros(20),
        dram_bytes: 512 << 10,
    }
}

/// Takes any memory whose size is not a multiple of 13, to have something to refuse.
struct FakeImporter;

#[derive(Debug)]
struct FakeRegion {
    page_bytes: u64,
    /// One a segment.
    memories: Vec<Arc<u64>>,
}

#[derive(Debug)]
struct FakeEvent(IpcHandle);

impl DeviceEvent for FakeEvent {
    fn has_passed(&self) -> Result<bool, CopyError> {
        Ok(self.0.0[0] > 0)
    }
}

impl Importer for FakeImporter {
    type Memory = u64;
    type Region = FakeRegion;

    fn import(
        &mut self,
        spec: &MemorySpec,
        _descriptor: Option<OwnedFd>,
        _peer: &Peer,
        done: &DoneWords,
    ) -> Result<u64, ImportRefusal> {
        assert!(done.region().1 > 0, "no done words");
        let (MemorySpec::Memfd { bytes }
        | MemorySpec::Process { bytes, .. }
        | MemorySpec::Cuda { bytes, .. }) = spec;
        if bytes.is_multiple_of(13) {
            let refusal = Refusal::UnsupportedMemory;
            return Err(ImportRefusal { refusal, cause: "an unlucky size".into() });
        }
        Ok(*bytes)
    }

    /// Those whose handle begins with 13 are refused.
    fn import_events(
        &mut self,
        _gpu: GpuId,
        handles: &[IpcHandle],
        _peer: &Peer,
    ) -> Result<Vec<Arc<dyn DeviceEvent>>, ImportRefusal> {
        if handles.iter().any(|handle| handle.0[0] == 13) {
            let refusal = Refusal::UnsupportedMemory;
            return Err(ImportRefusal { refusal, cause: "an unlucky event".into() });
        }
        let event = |handle: &IpcHandle| Arc::new(FakeEvent(*handle)) as Arc<dyn DeviceEvent>;
        Ok(handles.iter().map(event).collect())
    }

    fn lay_out(
        &mut self,
        memories: &HashMap<u32, Arc<u64>>,
        spec: &RegionSpec,
        page_bytes: u64,
    ) -> Result<FakeRegion, ImportRefusal> {
        let sum = spec.segments.iter().fold(0_u64, |sum, segment| sum.wrapping_add(segment.length));
        if sum != page_bytes {
            let refusal = Refusal::LayoutConflict;
            return Err(ImportRefusal { refusal, cause: "the sizes differ".into() });
        }
        // Panics unless the endpoint has checked every handle.
        let memory = |segment: &SegmentSpec| Arc::clone(&memories[&segment.memory]);
        let memories = spec.segments.iter().map(memory).collect();
        Ok(FakeRegion { page_bytes, memories })
    }
}

/// An endpoint and what a reactor does with its events.
struct Stand {
    endpoint: Endpoint<FakeRegion>,
    clock: Clock,
    path: PathBuf,
    _bell: ControlBell,
    _folder: tempfile::TempDir,
    /// Sessions that are open or draining here, with the cause once closed.
    sessions: Vec<(SessionId, Box<super::SessionReady>, Option<CloseCause>)>,
    regions: Vec<(SessionId, Arc<FakeRegion>)>,
    events: Vec<(SessionId, Arc<dyn DeviceEvent>)>,
    scopes: u32,
    stopped: bool,
    /// Whether closed sessions end at once, as with nothing in flight.
    drains_at_once: bool,
}

impl Stand {
    fn start(settings: Settings) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.sock");
        let claim = Claim::take(&socket_config(&path)).unwrap();
        let clock = Clock::manual(1);
        let bell = ControlBell::new();
        let mut endpoint = Endpoint::start(
            settings,
            claim.listen().unwrap(),
            FakeImporter,
            clock.clone(),
            bell.ringer(),
        )
        .unwrap();
        assert!(!path.exists(), "nobody may find a socket that is not ready");
        assert!(!endpoint.publish().unwrap());
        Self {
            endpoint,
            clock,
            path,
            _bell: bell,
            _folder: folder,
            sessions: Vec::new(),
            regions: Vec::new(),
            events: Vec::new(),
            scopes: 0,
            stopped: false,
            drains_at_once: true,
        }
    }

    /// Does what the reactor does, with every event that waits.
    fn pump(&mut self) {
        while let Some(event) = self.endpoint.poll() {
            match event {
                EndpointEvent::SessionReady(ready) => {
                    assert!(self.sessions.iter().all(|(session, ..)| *session != ready.session));
                    self.sessions.push((ready.session, ready, None));
                }
                EndpointEvent::DefineNamespace { question, session, spec } => {
                    self.assert_open(session);
                    let answer = if spec.model == "refuse me" {
                        let refusal = Refusal::LayoutConflict;
                        Answer::Refused { refusal, message: "as you wish".to_owned() }
                    } else {
                        self.scopes += 1;
                        Answer::Scope { scope: ScopeId(self.scopes), page_bytes: spec.page_bytes }
                    };
                    self.answer(question, answer);
                }
                EndpointEvent::DefineSet { question, session, members } => {
                    self.assert_open(session);
                    self.scopes += 1;
                    let page_bytes = 4096 * members.len() as u64;
                    self.answer(
                        question,
                        Answer::Scope { scope: ScopeId(self.scopes), page_bytes },
                    );
                }
                EndpointEvent::RegisterRegion { question, session, pages, region, .. } => {
                    self.assert_open(session);
                    assert!(pages > 0);
                    self.regions.push((session, region));
                    let region = RegionId(self.regions.len() as u32);
                    self.answer(question, Answer::Region { region });
                }
                EndpointEvent::RegisterEvents { question, session, events } => {
                    self.assert_open(session);
                    let of_session = self.events.iter().filter(|(owner, _)| *owner == session);
                    let first = of_session.count() as u32;
                    self.events.extend(events.into_iter().map(|event| (session, event)));
                    self.answer(question, Answer::Events { first });
                }
                EndpointEvent::Evict { question, timeout } => {
                    assert!(timeout <= super::EVICT_TIMEOUT_MAX);
                    let answer = Answer::Evicted {
                        pages: 3,
                        bytes: 12288,
                        pages_kept: 1,
                        spill_drained: true,
                    };
                    self.answer(question, answer);
                }
                EndpointEvent::Closed { session, cause } => {
                    self.assert_open(session);
                    let row = self.sessions.iter_mut().find(|row| row.0 == session).unwrap();
                    row.2 = Some(cause);
                    if self.drains_at_once {
                        self.end(session);
                    }
                }
                EndpointEvent::Stop => {
                    assert!(!self.stopped, "a stop is announced once");
                    self.stopped = true;
                }
            }
        }
    }

    fn assert_open(&self, session: SessionId) {
        let row = self.sessions.iter().find(|row| row.0 == session);
        let row = row.expect("events name sessions that were announced");
        assert_eq!(row.2, None, "nothing comes from a closed session");
    }

    fn answer(&mut self, question: super::QuestionId, answer: Answer) {
        self.endpoint.reply(EndpointReply::Answer { question, answer }).unwrap();
    }

    /// Nothing of a closed session is in flight any more.
    fn end(&mut self, session: SessionId) {
        let index = self.sessions.iter().position(|row| row.0 == session).unwrap();
        let (_, ready, _) = self.sessions.remove(index);
        let (ours, others) = std::mem::take(&mut self.regions)
            .into_iter()
            .partition(|(owner, _): &(SessionId, Arc<FakeRegion>)| *owner == session);
        self.regions = others;
        let of_session = |(owner, _): &mut (SessionId, _)| *owner == session;
        let events = self.events.extract_if(.., of_session).map(|(_, event)| event).collect();
        self.endpoint
            .reply(EndpointReply::SessionEnded {
                session,
                segments: Box::new(ready.segments),
                regions: Vec::into_iter(ours).map(|(_, region)| region).collect(),
                events,
            })
            .unwrap();
    }

    /// Pumps until `done` says so.
    fn until<T>(&mut self, mut done: impl FnMut(&mut Self) -> Option<T>) -> T {
        let start = Instant::now();
        loop {
            self.pump();
            if let Some(found) = done(self) {
                return found;
            }
            assert!(start.elapsed() < PATIENCE, "it never happened");
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    fn until_no_sessions(&mut self) {
        self.until(|stand| stand.sessions.is_empty().then_some(()));
    }

    fn connect(&self) -> Client {
        Client { socket: connect(&self.path).unwrap() }
    }

    /// A well-behaved client that is attached.
    fn attach(&mut self) -> (Client, Welcome) {
        let client = self.connect();
        client.say(&hello());
        let ManagerMessage::Welcome(welcome) = self.hear(&client) else {
            panic!("no welcome");
        };
        (client, welcome)
    }

    /// Whether a newcomer is attached, and not turned away at the door.
    fn may_attach(&mut self) -> bool {
        let client = self.connect();
        let said = transport::send(&client.socket, &hello(), &[], PATIENCE);
        said.is_ok()
            && matches!(self.hear_with_descriptors(&client), Ok((ManagerMessage::Welcome(_), _)))
    }

    /// The next message for `client`.
    fn hear(&mut self, client: &Client) -> ManagerMessage {
        self.hear_with_descriptors(client).expect("an answer").0
    }

    fn hear_with_descriptors(
        &mut self,
        client: &Client,
    ) -> Result<(ManagerMessage, Vec<OwnedFd>), TransportError> {
        self.until(|_| match transport::receive_manager(&client.socket, Duration::ZERO) {
            Err(TransportError::TimedOut(_)) => None,
            other => Some(other),
        })
    }

    fn ask(&mut self, client: &Client, message: &ClientMessage) -> ManagerMessage {
        client.say(message);
        self.hear(client)
    }

    fn refused(&mut self, client: &Client, message: &ClientMessage) -> (Refusal, String) {
        match self.ask(client, message) {
            ManagerMessage::Refused { refusal, message } => (refusal, message),
            other => panic!("{other:?} instead of a refusal"),
        }
    }

    /// The endpoint has closed this connection, after whatever it said last.
    fn hears_the_end(&mut self, client: &Client) {
        loop {
            match self.hear_with_descriptors(client) {
                Ok(_) => {}
                Err(TransportError::Closed) => return,
                Err(error) => panic!("{error}"),
            }
        }
    }

    fn closed(&self, cause: CloseCause) -> u64 {
        self.endpoint.counters.closed[cause.index()].load(std::sync::atomic::Ordering::Relaxed)
    }
}

struct Client {
    socket: OwnedFd,
}

impl Client {
    fn say(&self, message: &ClientMessage) {
        self.say_with(message, &[]);
    }

    fn say_with(&self, message: &ClientMessage, descriptors: &[BorrowedFd<'_>]) {
        transport::send(&self.socket, message, descriptors, PATIENCE).unwrap();
    }

    /// Any bytes; whether the endpoint still takes them is its business.
    fn say_bytes(&self, bytes: &[u8]) {
        let mut control = rustix::net::SendAncillaryBuffer::new(&mut []);
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let _ = rustix::net::sendmsg(&self.socket, &[IoSlice::new(bytes)], &mut control, flags);
    }
}

fn events(count: usize) -> ClientMessage {
    ClientMessage::RegisterEvents {
        gpu: HexBytes([1; 16]),
        handles: vec![HexBytes([1; 64]); count],
    }
}

fn connect(path: &Path) -> Result<OwnedFd, rustix::io::Errno> {
    let socket = rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

fn hello() -> ClientMessage {
    ClientMessage::Hello {
        layout_fingerprint: LAYOUT_FINGERPRINT,
        engine_id: "00112233445566778899aabbccddeeff".to_owned(),
        ring_capacity: 64,
        page_entries: 1024,
        done_words: 3,
    }
}

fn namespace(model: &str) -> NamespaceSpec {
    NamespaceSpec {
        model: model.to_owned(),
        dtype: "bfloat16".to_owned(),
        page_tokens: 64,
        page_bytes: 8192,
        layout: "plain".to_owned(),
        group: 0,
        tp_rank: 0,
        tp_size: 1,
        pp_rank: 0,
        pp_size: 1,
        adapter: String::new(),
        salt: String::new(),
        dependency: DependencySpec::Chain,
    }
}

fn region(scope: u32, memory: u32) -> RegionSpec {
    let segment = SegmentSpec { memory, offset: 0, stride: 8192, length: 4096, layer: 0 };
    RegionSpec { scope, pages: 8, segments: vec![segment, segment] }
}

fn memfd() -> OwnedFd {
    rustix::fs::memfd_create(c"test", rustix::fs::MemfdFlags::CLOEXEC).unwrap()
}

/// Runs one test of this binary in a process of its own, for what a whole process has one of.
fn rerun(test: &str, variable: &str, value: &str) -> std::process::Command {
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    command.args([test, "--exact", "--nocapture", "--test-threads=1"]).env(variable, value);
    command
}
