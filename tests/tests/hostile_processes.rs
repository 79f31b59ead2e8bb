//! Clients that come in crowds, stop, never read, or die in the middle of everything.
//!
//! Fault model: processes of the Manager's own user that connect, attach, stop and are killed at
//! any moment, with memory of their own registered.

use std::fs::File;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use orbitkv_shm_protocol::bootstrap::message::{
    ClientMessage, ManagerMessage, MemorySpec, Refusal,
};
use orbitkv_shm_protocol::bootstrap::transport::{self, TransportError};
use orbitkv_shm_protocol::ids::RegionId;
use orbitkv_shm_protocol::record::{PageRange, Request, RequestBody};
use orbitkv_shm_protocol::telemetry::{CloseReason, Metric, Reason, RefuseReason};
use orbitkv_tests::engine::namespace;
use orbitkv_tests::manager::{Manager, PATIENCE};
use orbitkv_tests::raw::{Raw, ask, connect, hello, operation};
use orbitkv_tests::setup;
use orbitkv_tests::victim::{PAGE, Traffic, Victim, sealed_memory};
use rustix::process::{Pid, Signal};

const REFUSED_BY_LIMIT: Metric = Metric::SessionsRefused(RefuseReason::LimitReached);
const REFUSED_BY_MESSAGE: Metric = Metric::SessionsRefused(RefuseReason::BadMessage);
const DETACHED: Metric = Metric::SessionsClosed(CloseReason::Detached);

fn descriptors(manager: &Manager) -> usize {
    std::fs::read_dir(format!("/proc/{}/fd", manager.pid().as_raw_nonzero())).unwrap().count()
}

fn mappings(manager: &Manager) -> usize {
    std::fs::read_to_string(format!("/proc/{}/maps", manager.pid().as_raw_nonzero()))
        .unwrap()
        .lines()
        .count()
}

/// Goal: the limit holds, says its number, and a place that becomes free is taken again.
#[test]
fn the_sixty_fifth_session_is_refused_with_the_number() {
    let manager = setup!().dram("16MiB").start();
    let mut sessions: Vec<_> = (0..64).map(|_| Raw::attach(&manager.socket())).collect();
    let one_too_many = connect(&manager.socket());
    let ManagerMessage::Refused { refusal, message } = ask(&one_too_many, &hello()) else {
        panic!("a 65th session")
    };
    assert_eq!(refusal, Refusal::LimitReached);
    assert!(message.contains("64") && message.contains("limits.sessions"), "{message}");
    manager.has_sessions(64);
    // Everybody is served with all places taken.
    for raw in &mut sessions {
        let spec = Request {
            operation: operation(0, 1),
            deadline_ms: 0,
            range: PageRange::default(),
            body: RequestBody::Ping,
        };
        let record = raw.record(&spec);
        raw.submit(&[record]);
    }
    sessions.iter().for_each(|raw| raw.must_publish(1));
    drop(one_too_many);
    manager.counted(REFUSED_BY_LIMIT, 1);
    sessions.pop();
    manager.has_sessions(63);
    let late = Raw::attach(&manager.socket());
    assert_eq!(late.welcome.session, 65, "ids are not used twice");
    drop((sessions, late));
    manager.counted(DETACHED, 65);
    manager.counted(REFUSED_BY_LIMIT, 1);
    manager.stop();
}

/// Goal: attaching and detaching by the thousand leaves no descriptor, no mapping and no count
/// behind.
#[test]
fn a_thousand_sessions_leave_nothing_behind() {
    let manager = setup!().dram("16MiB").start();
    let traffic = Traffic::start(&manager.socket());
    drop(Raw::attach(&manager.socket()));
    manager.has_sessions(1);
    let before = (descriptors(&manager), mappings(&manager));
    for round in 0..1_000 {
        let raw = Raw::attach(&manager.socket());
        if round % 100 == 0 {
            drop(raw);
            traffic.must_go_on();
        }
    }
    for _ in 0..100 {
        // Gone before the answer comes.
        transport::send(connect(&manager.socket()), &hello(), &[], PATIENCE).unwrap();
    }
    manager.has_sessions(1);
    manager.counted(Metric::SessionsOpened, 1_102);
    manager.counted(DETACHED, 1_101);
    assert_eq!(descriptors(&manager), before.0);
    let after = mappings(&manager);
    assert!(after <= before.1 + 8, "{after} mappings, {} before", before.1);
    traffic.end();
    assert_eq!(manager.stop().warnings(), [""; 0]);
}

/// Goal: connections that never say hello, say nonsense, or are one of too many hold nobody who is
/// attached, and are gone when they go. Each that was refused is counted once, by its reason.
#[test]
fn a_flood_of_connections_holds_nobody_and_is_counted() {
    let manager = setup!().dram("16MiB").start();
    let traffic = Traffic::start(&manager.socket());
    let before = descriptors(&manager);
    // 32 may wait to attach.
    let crowd: Vec<_> = (0..32).map(|_| connect(&manager.socket())).collect();
    let refused: Vec<_> = (0..68).map(|_| connect(&manager.socket())).collect();
    for socket in &refused {
        let (answer, _) = transport::receive_manager(socket, PATIENCE).unwrap();
        let ManagerMessage::Refused { refusal, .. } = answer else { panic!("{answer:?}") };
        assert_eq!(refusal, Refusal::LimitReached);
    }
    traffic.must_go_on();
    manager.counted(REFUSED_BY_LIMIT, 68);
    // Those that leave by themselves were refused by nobody.
    drop((crowd, refused));
    let nonsense: Vec<_> = (0..16).map(|_| connect(&manager.socket())).collect();
    for socket in &nonsense {
        rustix::io::write(socket, b"GET / HTTP/1.1\r\n\r\n").unwrap();
        let (answer, _) = transport::receive_manager(socket, PATIENCE).unwrap();
        assert!(matches!(answer, ManagerMessage::Refused { .. }), "{answer:?}");
        let gone = transport::receive_manager(socket, PATIENCE);
        assert!(matches!(gone, Err(TransportError::Closed)), "{gone:?}");
    }
    traffic.must_go_on();
    manager.counted(REFUSED_BY_MESSAGE, 16);
    manager.counted(REFUSED_BY_LIMIT, 68);
    drop(nonsense);
    Victim::attach(&manager.socket(), "after the flood").round();
    manager.has_sessions(1);
    assert_eq!(descriptors(&manager), before);
    traffic.end();
    manager.stop();
}

/// Goal: a client that never reads its socket is closed, and holds nobody meanwhile.
#[test]
fn a_client_that_never_reads_its_socket_is_closed() {
    let manager = setup!().dram("16MiB").start();
    let traffic = Traffic::start(&manager.socket());
    let raw = Raw::attach(&manager.socket());
    let question = ClientMessage::DefineNamespace(namespace("never read", PAGE as u64));
    let mut sent = 0_u32;
    loop {
        match transport::send(&raw.socket, &question, &[], Duration::from_millis(200)) {
            Ok(()) => sent += 1,
            Err(TransportError::Closed) => break,
            Err(TransportError::TimedOut(_)) => traffic.must_go_on(),
            Err(other) => panic!("{other:?}"),
        }
        assert!(sent < 100_000, "answers are kept without bound");
    }
    traffic.must_go_on();
    manager.counted(Metric::SessionsClosed(CloseReason::PeerFault), 1);
    traffic.end();
    manager.stop();
}

/// Goal: memory that is not what it was said to be fails its own copies only. Method: a memfd that
/// cannot be sealed is cut to nothing while pages are saved from it.
#[test]
fn a_memfd_that_shrinks_fails_its_own_copies_only() {
    let mut manager = setup!().dram("16MiB").start();
    let traffic = Traffic::start(&manager.socket());
    let mut raw = Raw::attach(&manager.socket());
    let bytes = 16 * PAGE as u64;
    let memfd = rustix::fs::memfd_create(c"cut", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let memfd = File::from(memfd);
    // Shorter than offered: refused.
    let message = ClientMessage::RegisterMemory(MemorySpec::Memfd { bytes });
    let answer = raw.ask_with(&message, &[memfd.as_fd()]);
    assert!(matches!(answer, ManagerMessage::Refused { .. }), "{answer:?}");
    // Something that is no memory: refused.
    let null = std::fs::File::open("/dev/null").unwrap();
    let answer = raw.ask_with(&message, &[null.as_fd()]);
    assert!(matches!(answer, ManagerMessage::Refused { .. }), "{answer:?}");
    rustix::fs::ftruncate(&memfd, bytes).unwrap();
    let memory = raw.register_memfd(&memfd, bytes);
    let region = region_over(&raw, memory);
    rustix::fs::ftruncate(&memfd, 0).unwrap();
    save_all(&mut raw, region, 1);
    raw.must_publish(1);
    assert!(!raw.is_closed(Duration::ZERO), "its rings are in order");
    manager.counted(Metric::SaveRefusedPages(Reason::DeviceError), 16);
    traffic.must_go_on();
    assert!(manager.is_running());
    traffic.end();
    drop(raw);
    manager.stop();
}

fn region_over(raw: &Raw, memory: u32) -> RegionId {
    raw.register_pages(raw.define("hostile"), memory, 0, 16)
}

/// Submits one save of sixteen new pages.
fn save_all(raw: &mut Raw, region: RegionId, generation: u32) {
    raw.fill_table(generation);
    let record = raw.record(&Request {
        operation: operation(0, generation),
        deadline_ms: 0,
        range: PageRange { start: 0, len: 16 },
        body: RequestBody::Save { region, fence: None },
    });
    raw.submit(&[record]);
}

const DYING_SOCKET: &str = "ORBITKV_TEST_DYING_SOCKET";

/// Not a test by itself: the process that the tests below stop and kill. It registers memory of its
/// own and saves from it for ever.
#[test]
fn dying_client() {
    let Some(socket) = std::env::var_os(DYING_SOCKET).map(PathBuf::from) else { return };
    let mut raw = Raw::attach(&socket);
    if let Some(manager) = Pid::from_raw(raw.welcome.manager_pid.cast_signed()) {
        let _ = rustix::process::set_ptracer(rustix::process::PTracer::ProcessID(manager));
    }
    let memory = vec![7_u8; 16 * PAGE];
    let nonce = Box::new(0x6f72_6269_746b_7631_u64);
    let message = ClientMessage::RegisterMemory(MemorySpec::Process {
        address: memory.as_ptr() as u64,
        bytes: memory.len() as u64,
        nonce_address: std::ptr::from_ref(&*nonce) as u64,
        nonce: *nonce,
    });
    let memory = match ask(&raw.socket, &message) {
        ManagerMessage::Memory { memory } => memory,
        // Where one process may not read another, sealed memory does as well.
        ManagerMessage::Refused { .. } => {
            let bytes = 16 * PAGE as u64;
            raw.register_memfd(&sealed_memory(bytes), bytes)
        }
        other => panic!("{other:?}"),
    };
    let region = region_over(&raw, memory);
    println!("saving");
    for generation in 1.. {
        save_all(&mut raw, region, generation);
        raw.must_publish(generation.into());
        raw.set_completion_head(generation.into());
    }
}

struct Dying(Child);

impl Dying {
    fn start(socket: &Path) -> Self {
        use std::io::{BufRead, BufReader};
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "dying_client", "--nocapture"])
            .env(DYING_SOCKET, socket)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(lines.any(|line| line.unwrap().contains("saving")));
        Self(child)
    }

    fn signal(&self, signal: Signal) {
        rustix::process::kill_process(Pid::from_child(&self.0), signal).unwrap();
    }
}

impl Drop for Dying {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Goal: a process that is killed while its memory is read costs nobody anything, and all that it
/// held comes back.
#[test]
fn a_process_that_dies_in_the_middle_of_a_copy_costs_nobody_anything() {
    let mut manager = setup!().dram("16MiB").start();
    let traffic = Traffic::start(&manager.socket());
    for round in 0..8 {
        let dying = Dying::start(&manager.socket());
        std::thread::sleep(Duration::from_millis(round * 3));
        drop(dying);
        traffic.must_go_on();
    }
    manager.has_sessions(1);
    assert!(manager.is_running());
    traffic.end();
    manager.has_sessions(0);
    let shown = manager.fresh();
    // A hang-up may be seen before the death, and a copy may see it first.
    let reasons = [CloseReason::Detached, CloseReason::PeerDied, CloseReason::PeerFault];
    let closed = reasons.map(|reason| shown.counters.get(Metric::SessionsClosed(reason)));
    assert_eq!(closed.iter().sum::<u64>(), 9, "{closed:?}");
    assert_eq!((shown.pool.pinned_bytes, shown.pool.draining_bytes), (0, 0));
    manager.stop();
}

/// Goal: stopped processes hold neither the others nor the end of the Manager.
#[test]
fn stopped_clients_hold_neither_others_nor_the_stop() {
    let manager = setup!().dram("16MiB").start();
    let traffic = Traffic::start(&manager.socket());
    let stopped: Vec<_> = (0..3).map(|_| Dying::start(&manager.socket())).collect();
    stopped.iter().for_each(|client| client.signal(Signal::STOP));
    for _ in 0..20 {
        traffic.must_go_on();
    }
    manager.has_sessions(4);
    traffic.end();
    // A stop that does not end in time is cut off, with another code.
    manager.stop();
}
