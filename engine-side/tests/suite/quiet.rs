//! Staging, polling and reading results make no system call.
//!
//! Method: a process of its own forbids them to itself (seccomp, all but its exit) and then goes on
//! using its client; the kernel kills it at the first one.
#![allow(unsafe_code, reason = "a seccomp filter is installed by pointer")]

use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, ExitStatus};

use orbitkv_engine::{Deadline, QueryMode, RequestKind};

use crate::rig::{Rig, blocks, hashes};
use crate::twin::Twin;

const SOCKET_VARIABLE: &str = "ORBITKV_TEST_QUIET_SOCKET";
const LOUD_VARIABLE: &str = "ORBITKV_TEST_QUIET_LOUD";

/// Kills this process at this thread's next system call that does not end it.
fn forbid_system_calls() {
    let step = |code: u32, jt, jf, k| libc::sock_filter { code: code as u16, jt, jf, k };
    let load_number = step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0);
    let is_exit =
        step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, libc::SYS_exit_group as u32);
    let allow = step(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW);
    let kill = step(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_KILL_PROCESS);
    let mut steps = [load_number, is_exit, allow, kill];
    let program = libc::sock_fprog { len: steps.len() as u16, filter: steps.as_mut_ptr() };
    // SAFETY: takes numbers only.
    let first = unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
    assert_eq!(first, 0);
    // SAFETY: the kernel copies the program, which lives until the call returns.
    let second = unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &program) };
    assert_eq!(second, 0);
}

#[test]
#[ignore = "the process that other tests here start"]
fn quiet_process() {
    let socket = std::env::var_os(SOCKET_VARIABLE).expect("started by another test");
    let is_loud = std::env::var_os(LOUD_VARIABLE).is_some();
    let mut rig = Rig::new(Path::new(&socket));
    let pages = blocks(1, 5, 0);
    let names = hashes(1, 5);
    for _ in 0..20 {
        rig.client.save(&rig.region, &pages).unwrap();
        rig.client.query(&rig.scope, &names, QueryMode::Demand, Deadline::DEFAULT).unwrap();
    }
    rig.client.submit().unwrap();
    forbid_system_calls();
    let (mut hits, mut results) = (0, 0);
    while rig.client.outstanding() > 0 {
        match rig.client.poll() {
            Ok(Some(done)) => {
                hits += u32::from(done.kind == RequestKind::Query && done.pages == 5);
                results += rig.client.results(&done).count();
            }
            Ok(None) => std::hint::spin_loop(),
            Err(_) => break,
        }
    }
    let staged = (0..200).filter(|_| rig.client.save(&rig.region, &pages).is_ok()).count();
    let ping = rig.client.ping().unwrap();
    let lived = rig.client.is_done(&ping).is_none();
    if is_loud {
        let _ = rig.client.check_manager();
    }
    let agrees = (hits, results, staged, lived) == (20, 200, 200, true);
    // SAFETY: ends the process; nothing else may run under the filter.
    unsafe { libc::_exit(i32::from(!agrees)) };
}

fn run(loud: bool) -> ExitStatus {
    let twin = Twin::start();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "quiet::quiet_process", "--ignored", "--quiet"])
        .env(SOCKET_VARIABLE, twin.path())
        .stdout(std::process::Stdio::null());
    if loud {
        command.env(LOUD_VARIABLE, "1");
    }
    command.status().unwrap()
}

#[test]
fn the_request_path_makes_no_system_call() {
    let status = run(false);
    assert_eq!(status.code(), Some(0), "{status}");
}

/// The filter works: the same process dies once it asks the kernel about the Manager.
#[test]
fn a_system_call_would_be_seen() {
    assert_eq!(run(true).signal(), Some(libc::SIGSYS));
}
