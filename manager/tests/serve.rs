//! `orbitkv-manager` as a process: exit codes, the ready line, one Manager a socket, a clean stop.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::time::Duration;

use orbitkv_shm_protocol::bootstrap::message::{ClientMessage, ManagerMessage};
use orbitkv_shm_protocol::bootstrap::transport;
use orbitkv_shm_protocol::layout::LAYOUT_FINGERPRINT;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::{Pid, Signal};

const PATIENCE: Duration = Duration::from_secs(20);

fn manager(folder: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_orbitkv-manager"));
    command.current_dir(folder).env_remove("XDG_RUNTIME_DIR").env("ORBITKV_LOG", "warn");
    command
}

fn output(folder: &Path, args: &[&str]) -> Output {
    manager(folder).args(args).output().unwrap()
}

/// Exit code and the one line on stderr.
fn refused(folder: &Path, args: &[&str]) -> (i32, String) {
    let output = output(folder, args);
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(output.stdout.is_empty());
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(text.starts_with("orbitkv: "), "{text}");
    (output.status.code().unwrap(), text)
}

fn is_empty(folder: &Path) -> bool {
    std::fs::read_dir(folder).unwrap().next().is_none()
}

/// A Manager that is ready. Killed when a test fails.
struct Running {
    child: Child,
    stdout: BufReader<ChildStdout>,
    ready: String,
}

impl Running {
    fn start(folder: &Path, args: &[&str]) -> Self {
        let mut child = manager(folder)
            .args(["--dram", "16MiB", "--huge-pages", "off"])
            .args(args)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        let mut ready = String::new();
        stdout.read_line(&mut ready).unwrap();
        let running = Self { child, stdout, ready };
        assert!(running.ready.starts_with("ready socket="), "{:?}", running.ready);
        running
    }

    fn signal(&self, signal: Signal) {
        rustix::process::kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Ends by `signal`; says with which code and what else came on stdout.
    fn end(mut self, signal: Signal) -> (Option<i32>, String) {
        self.signal(signal);
        let mut rest = String::new();
        self.stdout.read_to_string(&mut rest).unwrap();
        (self.child.wait().unwrap().code(), rest)
    }

    fn http(&self) -> String {
        self.ready.trim_end().split_once(" http=").unwrap().1.to_owned()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn attach(path: &Path) -> rustix::fd::OwnedFd {
    let flags = SocketFlags::CLOEXEC;
    let socket =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    rustix::net::connect(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
    let hello = ClientMessage::Hello {
        layout_fingerprint: LAYOUT_FINGERPRINT,
        engine_id: "0".repeat(32),
        ring_capacity: 64,
        page_entries: 1024,
        done_words: 1,
    };
    transport::send(&socket, &hello, &[], PATIENCE).unwrap();
    let (answer, descriptors) = transport::receive_manager(&socket, PATIENCE).unwrap();
    assert!(matches!(answer, ManagerMessage::Welcome(_)), "{answer:?}");
    assert_eq!(descriptors.len(), 2);
    socket
}

fn get(address: &str, path: &str) -> String {
    let mut connection = TcpStream::connect(address).unwrap();
    write!(connection, "GET {path} HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
    let mut answer = String::new();
    connection.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn slips_end_with_2_in_one_line_and_leave_nothing_behind() {
    let folder = tempfile::tempdir().unwrap();
    for (args, parts) in [
        (&["--drma", "1GiB"][..], &["--drma", "did you mean --dram"][..]),
        (&["--dram"], &["--dram", "missing"]),
        (&["--dram", "0"], &["--dram", "2MiB to 16TiB"]),
        (&["--spill", "al"], &["--spill", "did you mean all"]),
        (&["--socket", "m.sock", "--lease-ttl", "1h"], &["--lease-ttl", "100ms to 60m"]),
        (&["serve"], &["serve"]),
    ] {
        let (code, text) = refused(folder.path(), args);
        assert_eq!(code, 2, "{text}");
        for part in parts {
            assert!(text.contains(part), "{part:?} is missing from {text:?}");
        }
        assert!(is_empty(folder.path()), "{args:?}");
    }
    let file = folder.path().join("a.toml");
    std::fs::write(&file, "[dram]\ncapcity = 1\n").unwrap();
    let (code, text) = refused(folder.path(), &["--config", "a.toml", "--socket", "m.sock"]);
    assert_eq!(code, 2);
    assert!(text.contains("a.toml:2: dram.capcity") && text.contains("capacity"), "{text}");
    std::fs::remove_file(file).unwrap();
    assert!(is_empty(folder.path()));
}

#[test]
fn what_only_the_system_can_tell_ends_with_3() {
    let folder = tempfile::tempdir().unwrap();
    let (code, text) = refused(folder.path(), &["--config", "none.toml"]);
    assert_eq!(code, 3);
    assert!(text.contains("none.toml"), "{text}");
    let (code, text) = refused(folder.path(), &["--socket", "none/m.sock"]);
    assert_eq!(code, 3);
    assert!(text.contains("none: folder of the socket"), "{text}");
    assert!(is_empty(folder.path()));
}

#[test]
fn print_config_shows_the_whole_and_makes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let printed = output(folder.path(), &["--print-config", "--dram", "3GiB"]);
    assert!(printed.status.success());
    let text = String::from_utf8(printed.stdout).unwrap();
    assert!(text.contains("capacity = 3221225472 # 3GiB"), "{text}");
    assert!(text.contains("# pages_per_request_max (entries) = 16384"), "{text}");
    assert!(is_empty(folder.path()));
    // What it prints is a configuration.
    std::fs::write(folder.path().join("whole.toml"), &text).unwrap();
    let again = output(folder.path(), &["--print-config", "--config", "whole.toml"]);
    assert_eq!(String::from_utf8(again.stdout).unwrap(), text);
    let help = output(folder.path(), &["--help"]);
    assert!(help.status.success() && help.stderr.is_empty());
}

#[test]
fn one_manager_a_socket_until_a_signal_ends_it_cleanly() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.sock");
    for signal in [Signal::TERM, Signal::INT] {
        let first = Running::start(folder.path(), &["--socket", "m.sock"]);
        assert_eq!(first.ready, "ready socket=m.sock http=off\n");
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        let (code, text) = refused(folder.path(), &["--socket", "m.sock"]);
        assert_eq!(code, 3);
        assert!(text.contains(&format!("pid {}", first.child.id())), "{text}");
        // The first one never noticed, and a client that sits there does not hold up its end.
        let client = attach(&path);
        assert_eq!(first.end(signal), (Some(0), String::new()));
        assert!(!path.exists());
        let gone = transport::receive_manager(&client, PATIENCE);
        assert!(matches!(gone, Err(transport::TransportError::Closed)), "{gone:?}");
    }
}

#[test]
fn a_killed_manager_is_replaced_without_help() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.sock");
    for _ in 0..3 {
        let running = Running::start(folder.path(), &["--socket", "m.sock"]);
        drop(attach(&path));
        running.end(Signal::KILL);
        assert!(path.exists(), "nobody was left to remove it");
    }
    let running = Running::start(folder.path(), &["--socket", "m.sock"]);
    drop(attach(&path));
    assert_eq!(running.end(Signal::TERM).0, Some(0));
}

#[test]
fn the_default_socket_is_made_below_the_runtime_folder() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = manager(folder.path());
    command.args(["--dram", "16MiB", "--huge-pages", "off"]);
    let mut child =
        command.env("XDG_RUNTIME_DIR", folder.path()).stdout(Stdio::piped()).spawn().unwrap();
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    let mut ready = String::new();
    stdout.read_line(&mut ready).unwrap();
    let running = Running { child, stdout, ready };
    let path = folder.path().join("orbitkv/manager.sock");
    assert_eq!(running.ready, format!("ready socket={} http=off\n", path.display()));
    let mode = path.parent().unwrap().metadata().unwrap().permissions().mode() & 0o777;
    assert_eq!(mode, 0o700);
    drop(attach(&path));
    assert_eq!(running.end(Signal::TERM).0, Some(0));
}

#[test]
fn http_shows_its_port_and_a_taken_one_is_fatal_unless_optional() {
    let folder = tempfile::tempdir().unwrap();
    let running = Running::start(folder.path(), &["--socket", "m.sock", "--http", "127.0.0.1:0"]);
    let address = running.http();
    assert!(!address.ends_with(":0"), "{address}");
    assert!(get(&address, "/healthz").ends_with("\r\n\r\nready\n"));
    assert!(get(&address, "/metrics").contains("\norbitkv_"));
    assert_eq!(running.end(Signal::TERM).0, Some(0));

    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let (code, text) = refused(folder.path(), &["--socket", "m.sock", "--http", &address]);
    assert_eq!(code, 3);
    assert!(text.contains(&address) && text.contains("--http-optional"), "{text}");
    let args = ["--socket", "m.sock", "--http", &address, "--http-optional"];
    let running = Running::start(folder.path(), &args);
    assert_eq!(running.http(), "off");
    assert_eq!(running.end(Signal::TERM).0, Some(0));
}
