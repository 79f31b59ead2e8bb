//! The inspector's promise: it works on a Manager that runs, hangs, or was killed.
//!
//! The writer is a process of its own: this test binary again, running only [`writer`].

use std::fs::File;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use orbitkv_manager::telemetry::{Telemetry, TelemetryIdentity};
use orbitkv_shm_protocol::bootstrap::peer::lock_path;
use orbitkv_shm_protocol::ids::Epoch;
use orbitkv_shm_protocol::inspect::{self, InspectError, LifeState, Snapshot, now_ns};
use orbitkv_shm_protocol::telemetry::{ManagerState, Metric, resolved_socket, segment_name};
use rustix::process::{Pid, Signal, kill_process, set_parent_process_death_signal};

/// Tells the child which socket to write for.
const SOCKET_VARIABLE: &str = "ORBITKV_TEST_TELEMETRY_SOCKET";
/// Longest wait for a child to reach a state: the test fails after it, however slow the machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// The child: holds the lock, counts two numbers that are always equal, and beats, until killed.
#[test]
#[ignore = "the other process of this file's tests, which start it"]
fn writer() {
    let Some(socket) = std::env::var_os(SOCKET_VARIABLE).map(PathBuf::from) else { return };
    // Whatever becomes of the parent, also while stopped.
    set_parent_process_death_signal(Some(Signal::KILL)).expect("a valid signal");
    let lock = File::create(lock_path(&socket)).expect("lock file");
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive).expect("free");
    let mut telemetry = Telemetry::create(&TelemetryIdentity {
        socket,
        epoch: Epoch(std::process::id()),
        version: "0.1.0".into(),
        started_ns: now_ns(),
    })
    .expect("space in /dev/shm");
    loop {
        telemetry.counters.add(Metric::SpillOfferedPages, 1);
        telemetry.counters.add(Metric::SsdWrittenPages, 1);
        if !telemetry.due(now_ns()) {
            continue;
        }
        telemetry.publish(now_ns());
        // Only now, so that whoever waits for it finds numbers.
        if telemetry.state() != ManagerState::Ready {
            telemetry.set_state(ManagerState::Ready);
        }
    }
}

struct Writer {
    child: Child,
    socket: PathBuf,
    _folder: tempfile::TempDir,
}

impl Writer {
    fn start() -> Self {
        let folder = tempfile::tempdir().expect("temporary folder");
        let socket = folder.path().join("a.sock");
        let child = Command::new(std::env::current_exe().expect("this binary"))
            .args(["--ignored", "--exact", "writer"])
            .env(SOCKET_VARIABLE, &socket)
            .stdout(Stdio::null())
            .spawn()
            .expect("started");
        let writer = Self { child, socket, _folder: folder };
        writer.wait_for(LifeState::Ready);
        writer
    }

    fn send(&self, signal: Signal) {
        let pid = Pid::from_child(&self.child);
        kill_process(pid, signal).expect("our child");
    }

    fn wait_for(&self, state: LifeState) -> Snapshot {
        let until = now_ns() + PATIENCE.as_nanos() as u64;
        loop {
            match inspect::read(&self.socket) {
                Ok(snapshot) if snapshot.manager.state == state => return snapshot,
                Ok(_) | Err(InspectError::NotFound { .. }) => {}
                Err(error) => panic!("{error}"),
            }
            assert!(now_ns() < until, "never {state:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let socket = resolved_socket(&self.socket);
        let name = segment_name(rustix::process::geteuid().as_raw(), &socket);
        let _ = rustix::shm::unlink(name.as_str());
    }
}

/// Snapshots of a busy writer are whole: numbers that change together agree. (One that was taken
/// while the writer lost the processor in mid-change says so and proves nothing.)
#[test]
fn a_running_writer_is_read_whole() {
    let writer = Writer::start();
    let until = now_ns() + PATIENCE.as_nanos() as u64;
    let (mut last, mut whole) = (0, 0);
    while whole < 200 {
        assert!(now_ns() < until, "only {whole} whole snapshots");
        let snapshot = inspect::read(&writer.socket).expect("running");
        assert_eq!(snapshot.manager.pid, writer.child.id());
        if !snapshot.manager.torn.is_empty() {
            continue;
        }
        let offered = snapshot.counters.get(Metric::SpillOfferedPages);
        assert_eq!(offered, snapshot.counters.get(Metric::SsdWrittenPages));
        assert!(offered >= last, "counters never go back");
        (last, whole) = (offered, whole + 1);
    }
    assert!(last > 0);
}

/// SIGSTOP: wherever it hit the writer, its last numbers are there and it is called unresponsive;
/// when it goes on, it is ready again. Looking changed nothing.
#[test]
fn a_stopped_writer_is_unresponsive_and_recovers() {
    let writer = Writer::start();
    writer.send(Signal::STOP);
    let first = writer.wait_for(LifeState::Unresponsive);
    assert!(first.manager.heartbeat_age_ms >= 1_000);
    assert!(first.counters.get(Metric::SpillOfferedPages) > 0);
    let second = inspect::read(&writer.socket).expect("stopped");
    assert_eq!(second.counters, first.counters);
    writer.send(Signal::CONT);
    writer.wait_for(LifeState::Ready);
}

/// SIGKILL, at many moments: the segment stays and says dead. A group that the kill tore is named.
#[test]
fn a_killed_writer_is_read_post_mortem() {
    for _ in 0..10 {
        let mut writer = Writer::start();
        writer.send(Signal::KILL);
        writer.child.wait().expect("our child");
        let snapshot = inspect::read(&writer.socket).expect("left behind");
        assert_eq!(snapshot.manager.state, LifeState::Dead);
        assert_eq!(snapshot.manager.pid, writer.child.id());
        let offered = snapshot.counters.get(Metric::SpillOfferedPages);
        let written = snapshot.counters.get(Metric::SsdWrittenPages);
        assert!(offered > 0 && written > 0);
        if snapshot.manager.torn.is_empty() {
            assert_eq!(offered, written);
        } else {
            assert_eq!(snapshot.manager.torn, ["counters"]);
        }
    }
}
