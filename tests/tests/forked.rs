//! A forked child of an engine, with a real Manager at the other end (GPU-07, on host memory).
#![allow(unsafe_code, reason = "fork")]

use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use orbitkv_engine::{Deadline, Gone, QueryMode, RegisterError, RestoreOptions, SubmitError};
use orbitkv_shm_protocol::telemetry::Metric;
use orbitkv_tests::engine::{Engine, blocks, hashes, namespace};
use orbitkv_tests::setup;
use rustix::process::{Pid, Signal};

const PAGE: u64 = 16 << 10;

/// Runs `child` in a forked child, which then ends without anything of the parent's.
fn fork(child: impl FnOnce() -> bool) -> Pid {
    // SAFETY: the child only runs `child` and leaves by `_exit`; libc makes its allocator usable
    // there even though other threads were running.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0);
    if pid == 0 {
        let agrees = std::panic::catch_unwind(std::panic::AssertUnwindSafe(child));
        // SAFETY: ends the child.
        unsafe { libc::_exit(i32::from(!matches!(agrees, Ok(true)))) };
    }
    Pid::from_raw(pid).unwrap()
}

fn must_end_well(child: Pid) {
    let waited = rustix::process::waitpid(Some(child), rustix::process::WaitOptions::empty());
    let (_, status) = waited.unwrap().unwrap();
    assert_eq!(status.exit_status(), Some(0));
}

/// Goal: a child that ends at once takes nothing from its parent, and one that calls whatever there
/// is gets `WrongProcess` and writes nothing into the rings.
#[test]
fn gpu_07_a_forked_child_touches_nothing_of_its_parent() {
    let manager = setup!().flag("--lease-ttl", "60s").start();
    let mut engine = Engine::attach(&manager.socket(), namespace("gpu-07", PAGE), 8);
    let pages = hashes(1, 0..8);
    engine.save_all(&pages);
    let lease = engine.query(&pages, QueryMode::Demand).ok().leased();
    // What is shown may lag behind, but what a child wrote would stay.
    let must_be_as_before = || {
        manager.fresh();
        manager.settle("one session with its lease", |seen| {
            let [own] = seen.sessions.as_slice() else { return false };
            let ring = (own.requests_submitted, own.completions_consumed, own.outstanding);
            ring == (2, 2, 0)
                && (own.regions, own.leased_bytes, seen.leases.len()) == (1, 8 * PAGE, 1)
        });
    };
    must_be_as_before();
    // (a) It drops its copy of everything, as a process that ends does.
    let mut kept = Some(engine);
    must_end_well(fork(|| {
        drop(kept.take());
        true
    }));
    let mut engine = kept.unwrap();
    must_be_as_before();
    // (b)
    let target = blocks(&pages, 0);
    engine.poison(&target);
    must_end_well(fork(|| {
        let (scope, region) = (engine.scope, engine.region);
        let file = engine.device.file().try_clone().unwrap();
        let client = &mut engine.client;
        let wrong = Err(SubmitError::WrongProcess);
        let options = RestoreOptions::default();
        let submits = [
            client.save(&region, &target),
            client.query(&scope, &pages, QueryMode::Demand, Deadline::DEFAULT),
            client.prepare(&scope, &pages),
            client.restore(&lease, 0, &region, &target, options),
            client.release(lease),
            client.forget(&scope),
            client.unregister(region),
            client.ping(),
            client.drain(Deadline::DEFAULT),
        ];
        let registers = [
            client.define_namespace(&namespace("child", PAGE)).map(drop),
            client.define_set(&[scope]).map(drop),
            client.register_memfd(&file, 1).map(drop),
        ];
        submits.into_iter().all(|refused| refused == wrong)
            && registers.into_iter().all(|r| matches!(r, Err(RegisterError::WrongProcess)))
            && client.submit() == Err(Gone::WrongProcess)
            && client.poll() == Err(Gone::WrongProcess)
            && client.check_manager() == Err(Gone::WrongProcess)
    }));
    must_be_as_before();
    let _ = engine.restore(&lease, 0, &target).ok();
    engine.check(&target);
    manager.settle_empty();
}

const SOCKET: &str = "ORBITKV_TEST_FORKED_SOCKET";

/// Not a test by itself: the parent that the test below kills. Its child sleeps for ever.
#[test]
fn forking_parent() {
    let Some(socket) = std::env::var_os(SOCKET).map(PathBuf::from) else { return };
    let mut engine = Engine::attach(&socket, namespace("gpu-07", PAGE), 8);
    let pages = hashes(1, 0..8);
    engine.save_all(&pages);
    let _held = engine.query(&pages, QueryMode::Demand).ok().leased();
    let child = fork(|| {
        loop {
            std::thread::park();
        }
    });
    println!("child: {}", child.as_raw_nonzero());
    std::io::stdout().flush().unwrap();
    loop {
        std::thread::park();
    }
}

/// Goal: the death of an engine is noticed although a child of it holds every descriptor that it had
/// inherited (c).
#[test]
fn gpu_07_a_child_that_lives_on_does_not_hide_its_parents_death() {
    let manager = setup!().flag("--lease-ttl", "60s").start();
    let mut parent = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "forking_parent", "--nocapture"])
        .env(SOCKET, manager.socket())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(parent.stdout.take().unwrap()).lines().map_while(Result::ok);
    let child = lines.find_map(|line| line.split_once("child: ").map(|(_, pid)| pid.to_owned()));
    let child = Pid::from_raw(child.unwrap().parse().unwrap()).unwrap();
    manager.counted(Metric::LeasesHeld, 1);
    parent.kill().unwrap();
    parent.wait().unwrap();
    manager.settle("its death is noticed", |seen| seen.sessions.is_empty());
    manager.settle_empty();
    rustix::process::test_kill_process(child).expect("the child still lives");
    rustix::process::kill_process(child, Signal::KILL).unwrap();
}
