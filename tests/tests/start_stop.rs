//! How a Manager begins and ends: told to stop at any moment, refused for any reason, under load,
//! with clients that hang, with nobody who reads what it says.

mod manager;

use std::io::Read;
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use manager::victim::{Traffic, Victim};
use manager::{Manager, PATIENCE, Raw, folder, names, orbitkv, refused, serve, telemetry_file};
use rustix::process::{Pid, Signal};

/// Goal: a stop signal at any moment of a start ends it with 0, and nothing stays that this start
/// made except its SSD file, which the next start takes. Method: signals after growing delays,
/// over a pool and a file that take longer to prepare than most of them.
#[test]
fn a_stop_while_starting_leaves_nothing_behind() {
    let folder = folder();
    let args = ["--socket", "m.sock", "--dram", "1GiB", "--huge-pages", "off"];
    let ssd = ["--ssd", "pages", "--ssd-capacity", "256MiB"];
    let mut before_ready = 0;
    for delay in [0, 10, 20, 40, 80, 160, 320, 640] {
        let mut child = serve(folder.path()).args(args).args(ssd).spawn().unwrap();
        // Until signals are handled nothing has been made, and the signal kills.
        let lock = folder.path().join("m.sock.lock");
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
        assert_eq!(output.status.code(), Some(0), "after {delay} ms: {output:?}");
        if output.stdout.is_empty() {
            before_ready += 1;
            assert!(!lock.exists(), "after {delay} ms");
        }
        let _served = std::fs::remove_file(&lock);
        let left: Vec<_> = names(folder.path()).into_iter().filter(|n| n != "pages").collect();
        assert!(left.is_empty(), "after {delay} ms: {left:?}");
        assert!(!telemetry_file(folder.path()).exists(), "after {delay} ms");
    }
    assert!(before_ready > 0, "no signal came while it started");
    let manager = Manager::start(folder.path(), &ssd);
    Victim::attach(&manager.socket(), "after all that").round();
    assert_eq!(manager.stop().0, Some(0));
}

/// Goal: what cannot work is refused with one clear line and the right code, and leaves nothing
/// behind that it made.
#[test]
fn a_start_that_cannot_work_makes_nothing() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().to_string();
    let folder = folder();
    let base = ["--socket", "m.sock", "--huge-pages", "off"];
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
        // The last of two equal flags would be a slip of its own.
        let base = if args.contains(&"--socket") { &base[2..] } else { &base[..] };
        let (found, text) = refused(folder.path(), &[base, args].concat());
        assert_eq!(found, code, "{args:?}: {text}");
        for part in parts {
            assert!(text.contains(part), "{args:?}: {part:?} is missing from {text:?}");
        }
        assert_eq!(names(folder.path()), [""; 0], "{args:?}");
        assert!(!telemetry_file(folder.path()).exists(), "{args:?}");
    }
    assert!(!std::path::Path::new("/dev/shm/pages").exists());
}

/// Goal: one Manager a socket; the second names the first, and harms neither it nor its telemetry.
#[test]
fn a_second_manager_names_the_first_and_leaves_it_alone() {
    let folder = folder();
    let manager = Manager::start(folder.path(), &[]);
    let traffic = Traffic::start(&manager.socket());
    let args = ["--socket", "m.sock", "--dram", "16MiB"];
    for _ in 0..3 {
        let (code, text) = refused(folder.path(), &args);
        assert_eq!(code, 3, "{text}");
        assert!(text.contains(&format!("pid {}", manager.pid())), "{text}");
    }
    traffic.must_go_on();
    assert_eq!(manager.inspect()["manager"]["pid"], manager.pid());
    traffic.end();
    assert_eq!(manager.stop().0, Some(0));
    assert_eq!(names(folder.path()), ["m.sock.lock"]);
}

/// Goal: a stop under full load, with work in flight in every part, ends well: code 0, nothing
/// left but the lock and the SSD file, and the clients told.
#[test]
fn a_stop_under_load_ends_well() {
    let folder = folder();
    let ssd = ["--ssd", "pages", "--ssd-capacity", "64MiB", "--http", "127.0.0.1:0"];
    for _ in 0..2 {
        let manager = Manager::start(folder.path(), &ssd);
        let path = manager.socket();
        let working = AtomicUsize::new(0);
        let silent = Raw::attach(&path);
        std::thread::scope(|threads| {
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
            let (code, log) = manager.stop();
            assert_eq!(code, Some(0), "{log}");
        });
        silent.must_be_closed();
        assert_eq!(names(folder.path()), ["m.sock.lock", "pages"]);
        assert!(!telemetry_file(folder.path()).exists());
    }
}

/// Goal: nobody has to read what the Manager says. Method: both ends of its output are closed
/// while clients make it log.
#[test]
fn closed_outputs_are_no_reason_to_die() {
    let folder = folder();
    let (reader, writer) = std::io::pipe().unwrap();
    let mut child = Command::new(orbitkv())
        .args(["serve", "--socket", "m.sock", "--dram", "16MiB", "--huge-pages", "off"])
        .current_dir(folder.path())
        .env("ORBITKV_LOG", "trace")
        .stdout(OwnedFd::from(writer.try_clone().unwrap()))
        .stderr(OwnedFd::from(writer))
        .spawn()
        .unwrap();
    drop(reader);
    let socket = folder.path().join("m.sock");
    let started = Instant::now();
    while !socket.exists() {
        assert!(child.try_wait().unwrap().is_none(), "it died of its closed outputs");
        assert!(started.elapsed() < PATIENCE);
        std::thread::sleep(Duration::from_millis(5));
    }
    let mut broken = Raw::attach(&socket);
    broken.set_tail(1000);
    broken.must_be_closed();
    Victim::attach(&socket, "unheard").round();
    rustix::process::kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
    // And one that has an error to tell.
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut child = Command::new(orbitkv())
        .args(["serve", "--dram", "none"])
        .stdout(Stdio::null())
        .stderr(OwnedFd::from(writer))
        .spawn()
        .unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(2));
}

/// Goal: whoever holds the other end of the log without reading it holds nobody. Method: clients
/// make the Manager log several times what a pipe takes.
#[test]
fn a_log_that_nobody_reads_holds_nobody() {
    let folder = folder();
    let (reader, writer) = std::io::pipe().unwrap();
    let mut child = Command::new(orbitkv())
        .args(["serve", "--socket", "m.sock", "--dram", "16MiB", "--huge-pages", "off"])
        .current_dir(folder.path())
        .env("ORBITKV_LOG", "trace")
        .stdout(Stdio::null())
        .stderr(OwnedFd::from(writer))
        .spawn()
        .unwrap();
    let socket = folder.path().join("m.sock");
    let started = Instant::now();
    while !socket.exists() {
        assert!(child.try_wait().unwrap().is_none());
        assert!(started.elapsed() < PATIENCE);
        std::thread::sleep(Duration::from_millis(5));
    }
    for _ in 0..100 {
        let mut raw = Raw::attach(&socket);
        for _ in 0..16 {
            // Of kind 0, which is none: one line each.
            let record = raw.empty_record();
            raw.submit(&[record]);
        }
        raw.must_be_closed();
    }
    let unread = rustix::io::ioctl_fionread(&reader).unwrap();
    assert!(unread > 60_000, "the pipe was not full: {unread} bytes");
    Victim::attach(&socket, "unread").round();
    rustix::process::kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
    drop(reader);
}

/// Goal: a reader of `/metrics` that hangs does not hold up the stop.
#[test]
fn a_hung_reader_of_metrics_does_not_hold_the_stop() {
    use std::io::Write;
    let folder = folder();
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let manager = Manager::start(folder.path(), &["--http", &port]);
    let mut hung = std::net::TcpStream::connect(&port).unwrap();
    hung.write_all(b"GET /metr").unwrap();
    assert_eq!(manager.stop().0, Some(0));
    let mut answer = String::new();
    let _cut = hung.read_to_string(&mut answer);
    assert_eq!(answer, "", "the stop waited for the whole exchange");
}
