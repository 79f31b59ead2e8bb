//! How a Manager begins and ends: told to stop at any moment, refused for any reason, under load,
//! with clients that hang, with nobody who reads what it says.

use std::io::Read;
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use orbitkv_shm_protocol::bootstrap::peer::lock_path;
use orbitkv_tests::manager::{PATIENCE, Setup};
use orbitkv_tests::raw::Raw;
use orbitkv_tests::setup;
use orbitkv_tests::victim::{Traffic, Victim};
use rustix::process::{Pid, Signal};

/// Goal: a stop signal at any moment of a start ends it with 0, and nothing stays that this start
/// made except its SSD file, which the next start takes. Method: signals after growing delays,
/// over a pool and a file that take longer to prepare than most of them.
#[test]
fn a_stop_while_starting_leaves_nothing_behind() {
    let setup = setup!().dram("1GiB").ssd("256MiB");
    let lock = lock_path(&setup.socket());
    let mut before_ready = 0;
    for delay in [0, 10, 20, 40, 80, 160, 320, 640] {
        let mut child = setup.command().spawn().unwrap();
        // Until signals are handled nothing has been made, and the signal kills.
        let started = Instant::now();
        while !lock.exists() {
            assert!(started.elapsed() < PATIENCE, "it never starts");
            assert!(child.try_wait().unwrap().is_none());
            std::thread::yield_now();
        }
        std::thread::sleep(Duration::from_millis(delay));
        let signal = if delay % 20 == 0 { Signal::TERM } else { Signal::INT };
        rustix::process::kill_process(Pid::from_child(&child), signal).unwrap();
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(0), "after {delay} ms: {}", setup.log());
        if output.stdout.is_empty() {
            before_ready += 1;
            assert!(!lock.exists(), "after {delay} ms");
        }
        let _served = std::fs::remove_file(&lock);
        let tier = setup.ssd_file();
        let left: Vec<_> = setup.names().into_iter().filter(|name| *name != tier).collect();
        assert!(left.is_empty(), "after {delay} ms: {left:?}");
        assert!(!setup.telemetry_file().exists(), "after {delay} ms");
    }
    assert!(before_ready > 0, "no signal came while it started");
    let manager = setup.dram("16MiB").start();
    Victim::attach(&manager.socket(), "after all that").round();
    manager.stop();
}

/// Goal: what cannot work is refused with one clear line and the right code, and leaves nothing
/// behind that it made.
#[test]
fn a_start_that_cannot_work_makes_nothing() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().to_string();
    let mut setup = setup!().bare();
    for (code, args, parts) in [
        (2, &["--drma", "1GiB"][..], &["--drma", "--dram"][..]),
        (2, &["--dram", "none"], &["--dram", "none"]),
        (2, &["--spill", "most", "--ssd", "p"], &["--spill", "all"]),
        (3, &["--socket", "none/m.sock"], &["none", "folder of the socket"]),
        (3, &["--http", &port, "--dram", "16MiB"], &[&port, "--http-optional"]),
        (3, &["--dram", "8TiB"], &["pool needs", "the host has", "available: lower --dram"]),
        (3, &["--dram", "16MiB", "--ssd", "/dev/shm/pages"], &["/dev/shm/pages", "tmpfs"]),
        (3, &["--dram", "16MiB", "--ssd", "none/pages"], &["none"]),
        (3, &["--dram", "16MiB", "--device", "cuda"], &["--device", "cuda"]),
        (3, &["--config", "none.toml"], &["none.toml"]),
    ] {
        setup.again();
        setup = setup.flag("--huge-pages", "off").flags(args);
        setup.refused().says(code, parts);
        assert!(setup.names().is_empty() && !setup.telemetry_file().exists(), "{args:?}");
    }
    assert!(!std::path::Path::new("/dev/shm/pages").exists());
}

/// Goal: one Manager a socket; the second names the first, and harms neither it nor its telemetry.
#[test]
fn a_second_manager_names_the_first_and_leaves_it_alone() {
    let manager = setup!().dram("16MiB").start();
    let traffic = Traffic::start(&manager.socket());
    let (socket, pid) = (manager.socket(), manager.pid().as_raw_nonzero());
    let second = setup!().dram("16MiB").flag("--socket", socket.to_str().unwrap());
    for _ in 0..3 {
        second.refused().says(3, &[&format!("pid {pid}")]);
    }
    traffic.must_go_on();
    assert_eq!(manager.inspect().manager.pid, pid.get().cast_unsigned());
    traffic.end();
    assert_eq!(manager.stop().names(), [lock_path(&socket)]);
}

/// Goal: a stop under full load, with work in flight in every part, ends well: code 0, nothing
/// left but the lock and the SSD file, and the clients told.
#[test]
fn a_stop_under_load_ends_well() {
    let mut setup = setup!().dram("16MiB").ssd("64MiB").flag("--http", "127.0.0.1:0");
    for _ in 0..2 {
        let manager = setup.start();
        let path = manager.socket();
        let working = AtomicUsize::new(0);
        let silent = Raw::attach(&path);
        setup = std::thread::scope(|threads| {
            for number in 0..3 {
                let (path, working) = (&path, &working);
                threads.spawn(move || {
                    let mut victim = Victim::attach(path, &format!("load {number}"));
                    victim.round();
                    working.fetch_add(1, Ordering::Relaxed);
                    // Ends when the Manager does; until then every byte is right.
                    while victim.try_round().is_ok() {}
                });
            }
            while working.load(Ordering::Relaxed) < 3 {
                std::thread::yield_now();
            }
            manager.stop()
        });
        silent.must_be_closed();
        let mut left = [lock_path(&path), setup.ssd_file()];
        left.sort();
        assert_eq!(setup.names(), left);
        assert!(!setup.telemetry_file().exists());
    }
}

/// Starts a Manager that says all it can to these ends, and waits until it listens.
fn talkative(setup: &Setup, stdout: Stdio, stderr: Stdio) -> Child {
    let mut command = setup.command();
    command.env("ORBITKV_LOG", "trace").stdout(stdout).stderr(stderr);
    let mut child = command.spawn().unwrap();
    let started = Instant::now();
    while !setup.socket().exists() {
        assert!(child.try_wait().unwrap().is_none(), "it died of what nobody reads");
        assert!(started.elapsed() < PATIENCE, "it never listens");
        std::thread::sleep(Duration::from_millis(5));
    }
    child
}

/// Goal: nobody has to read what the Manager says. Method: both ends of its output are closed
/// while clients make it log.
#[test]
fn closed_outputs_are_no_reason_to_die() {
    let setup = setup!().dram("16MiB");
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let [stdout, stderr] = [writer.try_clone().unwrap(), writer].map(OwnedFd::from);
    let mut child = talkative(&setup, stdout.into(), stderr.into());
    let mut broken = Raw::attach(&setup.socket());
    broken.set_tail(1000);
    broken.must_be_closed();
    Victim::attach(&setup.socket(), "unheard").round();
    rustix::process::kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
    // And one that has an error to tell.
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let setup = setup.dram("none");
    let mut command = setup.command();
    command.stdout(Stdio::null()).stderr(OwnedFd::from(writer));
    assert_eq!(command.status().unwrap().code(), Some(2));
}

/// Goal: whoever holds the other end of the log without reading it holds nobody. Method: clients
/// make the Manager log several times what a pipe takes.
#[test]
fn a_log_that_nobody_reads_holds_nobody() {
    let setup = setup!().dram("16MiB");
    let (reader, writer) = std::io::pipe().unwrap();
    let mut child = talkative(&setup, Stdio::null(), OwnedFd::from(writer).into());
    for _ in 0..100 {
        let mut raw = Raw::attach(&setup.socket());
        for _ in 0..16 {
            // Of kind 0, which is none: one line each.
            let record = raw.empty_record();
            raw.submit(&[record]);
        }
        raw.must_be_closed();
    }
    let unread = rustix::io::ioctl_fionread(&reader).unwrap();
    assert!(unread > 60_000, "the pipe was not full: {unread} bytes");
    Victim::attach(&setup.socket(), "unread").round();
    rustix::process::kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
    drop(reader);
}

/// Goal: a reader of `/metrics` that hangs does not hold up the stop.
#[test]
fn a_hung_reader_of_metrics_does_not_hold_the_stop() {
    use std::io::Write;
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let manager = setup!().dram("16MiB").flag("--http", &port).start();
    let mut hung = std::net::TcpStream::connect(&port).unwrap();
    hung.write_all(b"GET /metr").unwrap();
    manager.stop();
    let mut answer = String::new();
    let _cut = hung.read_to_string(&mut answer);
    assert_eq!(answer, "", "the stop waited for the whole exchange");
}
