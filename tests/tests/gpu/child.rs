//! An engine in a process of its own, which a test kills: this test binary again.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use orbitkv_benches::gpu::Pinned;
use orbitkv_engine::{Gone, SubmitError};
use orbitkv_tests::manager::PATIENCE;
use rustix::process::Signal;

use crate::engine::{GpuEngine, PAGE, Shape, blocks, content};

const SOCKET: &str = "ORBITKV_TEST_GPU_SOCKET";
const ENTRY: &str = "child::becomes_the_engine_when_told";
/// Marks the lines that are for the test, among those of the harness.
const MARK: &str = "engine: ";
/// Device pages of the child: 576 MiB, so that whoever keeps them is seen.
const PAGES: u32 = ((576 << 20) / PAGE) as u32;

/// Not a check: the body of the child. Without the environment it has nothing to do.
#[test]
fn becomes_the_engine_when_told() {
    let Some(socket) = std::env::var_os(SOCKET).map(PathBuf::from) else { return };
    // The test may be killed; a child must not outlive it.
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL)).expect("death signal");
    let mut engine = GpuEngine::attach(&socket, "child", PAGES, Shape::Split(36));
    say("registered");
    for line in std::io::stdin().lines().map_while(Result::ok) {
        match line.as_str() {
            "round trip" => {
                engine.round_trip(1);
                say("the bytes are right");
            }
            "save and hang" => save_and_hang(&mut engine),
            "fork" => fork(&mut engine),
            "break" => {
                orbitkv_tests::broken_gpu::break_gpu();
                say("broken");
            }
            _ => panic!("unknown order {line:?}"),
        }
    }
}

/// Submits a save whose event stands behind a kernel that nobody lets go.
fn save_and_hang(engine: &mut GpuEngine) {
    let flag = Pinned::new(8).unwrap();
    let from: Vec<u32> = (0..64).collect();
    engine.fill(&from, content(2));
    let longest = (4 * PATIENCE).as_nanos() as u64;
    engine.device.kernels.spin_until(&engine.stream, flag.address(), longest).unwrap();
    let fence = engine.fence();
    let _save = engine.begin_save(&blocks(2, &from), Some(fence));
    say("saving");
    loop {
        std::thread::park();
    }
}

/// Forks a child that finds every call of the client refused and then lives on.
fn fork(engine: &mut GpuEngine) {
    // SAFETY: the child only calls the client, which refuses, writes a line and sleeps; it calls
    // nothing of the driver and never returns from here.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0);
    if pid == 0 {
        let client = &mut engine.client;
        let refused = client.ping() == Err(SubmitError::WrongProcess)
            && client.poll() == Err(Gone::WrongProcess)
            && client.submit() == Err(Gone::WrongProcess);
        say(if refused { "the child is refused" } else { "the child is served" });
        // As long as any test could need it, should that test fail.
        std::thread::sleep(4 * PATIENCE);
        // SAFETY: ends the child without the parent's exit handlers.
        unsafe { libc::_exit(0) };
    }
    say(&pid.to_string());
}

fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{MARK}{line}").and_then(|()| out.flush()).expect("the test reads along");
}

/// The test's end of the child. Killed when dropped.
#[derive(Debug)]
pub(crate) struct EngineChild {
    child: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl EngineChild {
    /// Starts it for the Manager at `socket`, with these variables in its environment.
    pub(crate) fn start(socket: &Path, environment: &[(&str, &str)]) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", ENTRY, "--nocapture"])
            .env(SOCKET, socket)
            .envs(environment.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (orders, answers) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        Self { child, orders, answers: BufReader::new(answers) }
    }

    /// The next line that is for the test; none once the child has ended.
    pub(crate) fn answer(&mut self) -> Option<String> {
        let mut line = String::new();
        loop {
            line.clear();
            if self.answers.read_line(&mut line).unwrap() == 0 {
                return None;
            }
            // The harness does not end its own line before the body of a test.
            if let Some((_, said)) = line.trim_end().split_once(MARK) {
                return Some(said.to_owned());
            }
        }
    }

    /// Gives an order and waits for its answer.
    pub(crate) fn ask(&mut self, order: &str) -> String {
        writeln!(self.orders, "{order}").unwrap();
        self.answer().expect("an answer")
    }

    /// Kills it and waits for its end.
    pub(crate) fn kill(self) {}
}

impl Drop for EngineChild {
    fn drop(&mut self) {
        let _killed = self.child.kill();
        let _reaped = self.child.wait();
    }
}
