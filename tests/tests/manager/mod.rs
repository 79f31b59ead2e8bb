//! A real Manager in a process of its own, looked at with `orbitkv inspect --json`, and clients
//! that write whatever they like into their segment.
#![allow(dead_code, reason = "each test file uses a part of it")]

pub(crate) mod victim;

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, ChildStdout, Command, Output, Stdio};
use std::time::{Duration, Instant};

use orbitkv_shm_protocol::bootstrap::message::{ClientMessage, ManagerMessage, Welcome};
use orbitkv_shm_protocol::bootstrap::transport::{self, TransportError};
use orbitkv_shm_protocol::ids::{Epoch, OperationId, SessionId};
use orbitkv_shm_protocol::layout::{
    COMPLETION_HEAD, COMPLETION_TAIL, Geometry, LAYOUT_FINGERPRINT, MANAGER_DOORBELL,
    MANAGER_SLEEP_GENERATION, REQUEST_TAIL, RING_OFFSET,
};
use orbitkv_shm_protocol::record::{CompletionRecord, Request, RequestRecord};
use orbitkv_shm_protocol::segment::{self, EngineSide, Expected};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::{Pid, Signal};
use serde_json::Value;

/// Longest wait for something that must come.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);
/// What every raw client asks for.
pub(crate) const GEOMETRY: Geometry =
    Geometry { ring_capacity: 64, page_entries: 1024, done_words: 1 };

/// The `orbitkv` command line of this build.
pub(crate) fn orbitkv() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_orbitkv-under-test"))
}

/// `orbitkv serve` with a folder of its own as working directory.
pub(crate) fn serve(folder: &Path) -> Command {
    let mut command = Command::new(orbitkv());
    command.arg("serve").current_dir(folder).env_remove("XDG_RUNTIME_DIR");
    command.env("ORBITKV_LOG", "warn").stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// A folder on a file system that SSD files may lie on.
pub(crate) fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// Names in a folder.
pub(crate) fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// Name of the telemetry segment of `m.sock` in a folder, below `/dev/shm`.
pub(crate) fn telemetry_file(folder: &Path) -> PathBuf {
    use orbitkv_shm_protocol::telemetry::{resolved_socket, segment_name};
    let uid = rustix::process::geteuid().as_raw();
    let name = segment_name(uid, &resolved_socket(&folder.join("m.sock")));
    Path::new("/dev/shm").join(&name[1..])
}

/// A Manager that is ready on `m.sock`. Killed when a test fails.
pub(crate) struct Manager {
    child: Child,
    stdout: BufReader<ChildStdout>,
    stderr: Option<ChildStderr>,
    socket: PathBuf,
}

impl Manager {
    pub(crate) fn start(folder: &Path, args: &[&str]) -> Self {
        let mut command = serve(folder);
        command.args(["--socket", "m.sock", "--huge-pages", "off"]);
        if !args.contains(&"--dram") {
            command.args(["--dram", "16MiB"]);
        }
        command.args(args);
        Self::start_as(command, folder.join("m.sock"))
    }

    /// A Manager that `command` starts on `socket`.
    pub(crate) fn start_as(mut command: Command, socket: PathBuf) -> Self {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        let stderr = child.stderr.take();
        let mut ready = String::new();
        stdout.read_line(&mut ready).unwrap();
        let mut manager = Self { child, stdout, stderr, socket };
        if !ready.starts_with("ready socket=") {
            let mut log = String::new();
            manager.stderr.take().unwrap().read_to_string(&mut log).unwrap();
            panic!("{ready:?} {log}");
        }
        manager
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.socket.clone()
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        rustix::process::kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    pub(crate) fn is_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// Closes the end of its stderr that somebody could read.
    pub(crate) fn close_stderr(&mut self) {
        self.stderr = None;
    }

    /// Asks it to stop. Says with which code it ended and what it had logged.
    pub(crate) fn stop(mut self) -> (Option<i32>, String) {
        self.signal(Signal::TERM);
        let code = self.child.wait().unwrap().code();
        let mut log = String::new();
        if let Some(mut stderr) = self.stderr.take() {
            stderr.read_to_string(&mut log).unwrap();
        }
        let mut rest = String::new();
        self.stdout.read_to_string(&mut rest).unwrap();
        assert_eq!(rest, "", "one line on stdout");
        (code, log)
    }

    pub(crate) fn inspect(&self) -> Value {
        let output = Command::new(orbitkv())
            .args(["inspect", "--json", "--socket"])
            .arg(&self.socket)
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// Waits until what is on SSD was found again, or could not be.
    pub(crate) fn must_recover(&self) {
        let started = Instant::now();
        loop {
            let inspected = self.inspect();
            let devices = inspected["ssd"].as_array().unwrap();
            let is_recovering = |device: &Value| {
                matches!(device["recovery"].as_str(), Some("scanning" | "taking_over"))
            };
            if !devices.iter().any(is_recovering) {
                return;
            }
            assert!(started.elapsed() < PATIENCE, "never recovered: {devices:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// A counter, once `inspect` shows the value that it must reach; it may not pass it.
    pub(crate) fn must_count(&self, name: &str, expected: u64) {
        let started = Instant::now();
        loop {
            let shown = self.shown(name);
            if shown == expected {
                return;
            }
            let late = started.elapsed() > PATIENCE;
            assert!(shown < expected && !late, "{name} is {shown}, not {expected}");
        }
    }

    /// A gauge, once `inspect` shows the value that it must come to rest at.
    pub(crate) fn must_settle(&self, name: &str, expected: u64) {
        let started = Instant::now();
        loop {
            let shown = self.shown(name);
            if shown == expected {
                return;
            }
            assert!(started.elapsed() < PATIENCE, "{name} is {shown}, not {expected}");
        }
    }

    fn shown(&self, name: &str) -> u64 {
        let shown = self.inspect()["counters"][name].as_u64();
        shown.unwrap_or_else(|| panic!("no counter {name}"))
    }

    /// Waits until so many sessions are attached.
    pub(crate) fn must_have_sessions(&self, expected: u64) {
        self.must_settle("orbitkv_session_attached", expected);
    }
}

impl Drop for Manager {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Exit code and the one line on stderr of a `serve` that refuses to start.
pub(crate) fn refused(folder: &Path, args: &[&str]) -> (i32, String) {
    let Output { status, stdout, stderr } = serve(folder).args(args).output().unwrap();
    let log = String::from_utf8(stderr).unwrap();
    assert!(stdout.is_empty());
    // Log lines start with their time.
    let lines: Vec<_> = log.lines().filter(|line| !line.starts_with("20")).collect();
    assert_eq!(lines.len(), 1, "{log}");
    assert!(lines[0].starts_with("orbitkv: "), "{log}");
    (status.code().unwrap(), lines[0].to_owned())
}

pub(crate) fn connect(path: &Path) -> OwnedFd {
    let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
    let socket = rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None).unwrap();
    rustix::net::connect(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
    socket
}

pub(crate) fn hello() -> ClientMessage {
    ClientMessage::Hello {
        layout_fingerprint: LAYOUT_FINGERPRINT,
        engine_id: "0123456789abcdef".repeat(2),
        ring_capacity: GEOMETRY.ring_capacity,
        page_entries: GEOMETRY.page_entries,
        done_words: GEOMETRY.done_words,
    }
}

pub(crate) fn ask(socket: &OwnedFd, message: &ClientMessage) -> ManagerMessage {
    transport::send(socket, message, &[], PATIENCE).unwrap();
    transport::receive_manager(socket, PATIENCE).unwrap().0
}

/// A client that has attached and may write any byte of its segment at any time.
pub(crate) struct Raw {
    pub(crate) socket: OwnedFd,
    pub(crate) welcome: Welcome,
    pub(crate) side: EngineSide,
    submission: File,
    completion: File,
    /// Position of the next honest record.
    pub(crate) position: u64,
}

impl Raw {
    pub(crate) fn attach(path: &Path) -> Self {
        Self::attach_as(path, "0123456789abcdef".repeat(2))
    }

    /// A client of an attachment group of its own.
    pub(crate) fn attach_as(path: &Path, group: String) -> Self {
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

    /// Writes bytes of the submission segment.
    pub(crate) fn poke(&self, offset: usize, bytes: &[u8]) {
        self.submission.write_all_at(bytes, offset as u64).unwrap();
    }

    /// Reads a word of the completion segment.
    pub(crate) fn peek(&self, offset: usize) -> u64 {
        let mut word = [0; 8];
        self.completion.read_exact_at(&mut word, offset as u64).unwrap();
        u64::from_le_bytes(word)
    }

    pub(crate) fn put(&self, position: u64, record: &RequestRecord) {
        let slot = position % u64::from(GEOMETRY.ring_capacity);
        self.poke(RING_OFFSET + slot as usize * 64, bytemuck::bytes_of(record));
    }

    /// Moves the request ring's producer index and wakes the Manager.
    pub(crate) fn set_tail(&mut self, tail: u64) {
        self.poke(REQUEST_TAIL, &tail.to_le_bytes());
        self.side.ringer.ring();
    }

    pub(crate) fn set_completion_head(&mut self, head: u64) {
        self.poke(COMPLETION_HEAD, &head.to_le_bytes());
    }

    pub(crate) fn set_doorbell(&mut self, value: u32) {
        self.poke(MANAGER_DOORBELL, &value.to_le_bytes());
    }

    /// Completions that the Manager has published.
    pub(crate) fn published(&self) -> u64 {
        self.peek(COMPLETION_TAIL)
    }

    /// The record that an honest client would write for `request` now.
    pub(crate) fn record(&self, request: &Request) -> RequestRecord {
        let (session, epoch) = (SessionId(self.welcome.session), Epoch(self.welcome.epoch));
        request.encode(session, epoch, self.position)
    }

    /// A record of no kind, at the right place.
    pub(crate) fn empty_record(&self) -> RequestRecord {
        RequestRecord {
            session: self.welcome.session,
            epoch: self.welcome.epoch,
            sequence: self.position,
            ..RequestRecord::default()
        }
    }

    /// Publishes records one after the other at their positions, whatever they say.
    pub(crate) fn submit(&mut self, records: &[RequestRecord]) {
        for record in records {
            self.put(self.position, record);
            self.position += 1;
        }
        self.set_tail(self.position);
    }

    /// Waits until the Manager has published so many completions.
    pub(crate) fn must_publish(&self, completions: u64) {
        let started = Instant::now();
        while self.published() < completions {
            assert!(started.elapsed() < PATIENCE, "{} completions", self.published());
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Whether the Manager has closed the socket, waiting up to `patience` for it.
    pub(crate) fn is_closed(&self, patience: Duration) -> bool {
        match transport::receive_manager(&self.socket, patience) {
            Err(TransportError::Closed) => true,
            Err(TransportError::TimedOut(_)) => false,
            other => panic!("{other:?}"),
        }
    }

    /// Another handle to the segment that the Manager writes.
    pub(crate) fn completion_copy(&self) -> File {
        self.completion.try_clone().unwrap()
    }

    /// The completion record at a position, as its bytes are now.
    pub(crate) fn completion(&self, position: u64) -> CompletionRecord {
        let mut record = CompletionRecord::default();
        let slot = position % u64::from(GEOMETRY.ring_capacity);
        let offset = RING_OFFSET as u64 + slot * size_of::<CompletionRecord>() as u64;
        self.completion.read_exact_at(bytemuck::bytes_of_mut(&mut record), offset).unwrap();
        assert_eq!(record.sequence, position, "not published");
        record
    }

    /// Another handle to the segment that it writes.
    pub(crate) fn submission_copy(&self) -> File {
        self.submission.try_clone().unwrap()
    }

    /// Waits until the Manager's reactor sleeps.
    pub(crate) fn must_find_the_manager_asleep(&self) {
        let started = Instant::now();
        while self.peek(MANAGER_SLEEP_GENERATION) as u32 & 1 == 0 {
            assert!(started.elapsed() < PATIENCE, "the Manager never sleeps");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Publishes records as a client that ends before it can wake the Manager.
    pub(crate) fn publish_silently(&mut self, records: &[RequestRecord]) {
        for record in records {
            self.put(self.position, record);
            self.position += 1;
        }
        self.poke(REQUEST_TAIL, &self.position.to_le_bytes());
    }

    /// Waits until the Manager has closed the session or taken everything.
    pub(crate) fn must_be_closed_or_quiet(&self) {
        let started = Instant::now();
        while self.peek(orbitkv_shm_protocol::layout::REQUEST_HEAD) < self.position {
            if self.is_closed(Duration::from_millis(1)) {
                return;
            }
            assert!(started.elapsed() < PATIENCE, "neither closed nor taken");
        }
    }

    pub(crate) fn must_be_closed(&self) {
        assert!(self.is_closed(PATIENCE), "the Manager kept the session");
    }
}

pub(crate) fn operation(index: u32, generation: u32) -> OperationId {
    OperationId { index, generation }
}
