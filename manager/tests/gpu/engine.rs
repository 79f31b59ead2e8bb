//! An engine with memory on a GPU: this test binary again, since no process opens its own memory.
#![allow(unsafe_code, reason = "calls the CUDA driver")]

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;

use cudarc::driver::{result, sys};
use orbitkv_manager::device::PeerHandle;
use orbitkv_shm_protocol::bootstrap::message::{HexBytes, IpcHandle};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open};

/// Environment of the child.
const CHILD: &str = "ORBITKV_TEST_GPU_CHILD";
/// Name of the test that becomes the child.
const ENTRY: &str = "engine::becomes_the_engine_when_told";
/// What the test harness prints on the same pipe does not begin so.
const MARK: &str = "handle ";

/// Makes the first GPU's context the one of this thread.
pub(crate) fn enter() {
    result::init().expect("driver");
    let device = result::device::get(0).expect("a GPU");
    // SAFETY: the device was just given out.
    let context = unsafe { result::primary_ctx::retain(device) }.expect("context");
    // SAFETY: retained above and never released.
    unsafe { result::ctx::set_current(context) }.expect("context");
}

/// Not a check: the body of the child. Each line asks for so many bytes.
#[test]
fn becomes_the_engine_when_told() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL)).expect("death signal");
    enter();
    for line in std::io::stdin().lines() {
        let bytes: usize = line.expect("line").parse().expect("bytes");
        // SAFETY: a new allocation, never freed.
        let address = unsafe { result::malloc_sync(bytes) }.expect("memory");
        let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
        // SAFETY: the result has room for what is stored.
        let answer = unsafe { sys::cuIpcGetMemHandle(&raw mut handle, address) };
        answer.result().expect("handle");
        println!("\n{MARK}{}", HexBytes(handle.reserved.map(|byte| byte as u8)));
    }
}

/// The parent's end of it. Killed when dropped.
pub(crate) struct Engine {
    process: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Engine {
    pub(crate) fn spawn() -> Self {
        let mut process = Command::new(std::env::current_exe().expect("this binary"))
            .args([ENTRY, "--exact", "--nocapture", "--test-threads=1"])
            .env(CHILD, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("child");
        let orders = process.stdin.take().expect("pipe");
        let answers = BufReader::new(process.stdout.take().expect("pipe"));
        Self { process, orders, answers }
    }

    pub(crate) fn peer(&self) -> PeerHandle {
        let pid = Pid::from_child(&self.process);
        let pidfd = pidfd_open(pid, PidfdFlags::empty()).expect("pidfd");
        PeerHandle { pid: pid.as_raw_nonzero().get(), pidfd: Arc::new(pidfd) }
    }

    /// A new allocation of `bytes` bytes.
    pub(crate) fn allocate(&mut self, bytes: u64) -> IpcHandle {
        writeln!(self.orders, "{bytes}").expect("child");
        let mut line = String::new();
        loop {
            line.clear();
            assert!(self.answers.read_line(&mut line).expect("child") > 0, "the child ended");
            if let Some(handle) = line.trim().strip_prefix(MARK) {
                return handle.parse().expect("handle");
            }
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
