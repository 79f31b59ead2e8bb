//! The Manager under measurement: `orbitkv serve` with its default settings and a private socket,
//! in a process of its own.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::error::BenchError;
use crate::process;

/// Longest start: the pool is touched page by page.
const READY_TIMEOUT: Duration = Duration::from_secs(120);
/// A stop ends within 10 s whatever clients do; then the process is killed.
const STOP_TIMEOUT: Duration = Duration::from_secs(12);
const PAUSE: Duration = Duration::from_millis(20);
/// Fields of /proc/PID/stat after the command: user and system time, in clock ticks.
const USER_TIME: usize = 11;
const SYSTEM_TIME: usize = 12;

/// A running Manager. Dropping it kills the process and removes its folder.
#[derive(Debug)]
pub(crate) struct Manager {
    child: Child,
    folder: TempDir,
}

impl Manager {
    /// Starts a Manager that may use `cpus` from its first instruction on, and waits until it is
    /// ready.
    pub(crate) fn start(cpus: &[usize], interrupted: fn() -> bool) -> Result<Self, BenchError> {
        let folder = tempfile::Builder::new().prefix("orbitkv-bench-").tempdir();
        let folder = folder.map_err(BenchError::system("make a temporary folder"))?;
        let log = File::create(folder.path().join("log"));
        let log = log.map_err(BenchError::system("make the log of orbitkv serve"))?;
        let program = std::env::current_exe();
        let mut command = Command::new(program.map_err(BenchError::system("find this program"))?);
        command
            .args(["serve", "--stop-at-eof", "--socket"])
            .arg(folder.path().join("socket"))
            // Its own group: a SIGINT from the terminal must not stop it under the clients.
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(log);
        let mut child = spawn_on(cpus, &mut command)?;
        let (sender, lines) = channel();
        if let Some(stdout) = child.stdout.take() {
            thread::spawn(move || {
                for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                    // Read on after "ready": a full pipe would stop the Manager.
                    let _done = sender.send(line);
                }
            });
        }
        let mut manager = Self { child, folder };
        let end = Instant::now() + READY_TIMEOUT;
        loop {
            if interrupted() {
                return Err(BenchError::Interrupted);
            }
            match lines.recv_timeout(PAUSE) {
                Ok(line) if line.starts_with("ready ") => return Ok(manager),
                Ok(_) => {}
                Err(RecvTimeoutError::Timeout) if Instant::now() < end => {}
                Err(_) => return Err(manager.not_ready()),
            }
        }
    }

    /// Its socket.
    pub(crate) fn socket(&self) -> PathBuf {
        self.folder.path().join("socket")
    }

    /// CPU time of all its threads since its start.
    pub(crate) fn cpu_time(&self) -> Result<Duration, BenchError> {
        let text = fs::read_to_string(format!("/proc/{}/stat", self.child.id()));
        let text = text.map_err(BenchError::system("read /proc/PID/stat of the Manager"))?;
        let ticks = cpu_ticks(&text)
            .ok_or_else(|| BenchError::Wrong("/proc/PID/stat of the Manager".into()))?;
        Ok(Duration::from_secs_f64(ticks as f64 / rustix::param::clock_ticks_per_second() as f64))
    }

    /// Stops it in order and makes sure that nothing of it is left.
    pub(crate) fn stop(mut self) -> Result<(), BenchError> {
        if let Some(pid) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw) {
            // The child is not reaped yet, so the number is still its own.
            let _gone = kill_process(pid, Signal::TERM);
        }
        match self.wait(STOP_TIMEOUT) {
            Some(status) if status.success() => Ok(()),
            Some(status) => Err(self.complaint(status.code(), "did not stop in order")),
            None => Err(self.complaint(None, "did not stop within 12 s and was killed")),
        }
    }

    fn not_ready(&mut self) -> BenchError {
        let status = self.wait(Duration::from_secs(1));
        self.complaint(status.and_then(|status| status.code()), "not ready within 120 s")
    }

    fn complaint(&self, code: Option<i32>, fallback: &str) -> BenchError {
        let log = fs::read(self.log()).unwrap_or_default();
        let log = String::from_utf8_lossy(&log);
        let last = log.lines().last().unwrap_or(fallback);
        let exit = code.and_then(|code| u8::try_from(code).ok()).unwrap_or(0);
        BenchError::Manager { exit, message: last.trim_start_matches("orbitkv: ").into() }
    }

    fn log(&self) -> PathBuf {
        Path::new(self.folder.path()).join("log")
    }

    fn wait(&mut self, timeout: Duration) -> Option<ExitStatus> {
        let end = Instant::now() + timeout;
        loop {
            match self.child.try_wait() {
                Ok(Some(status)) => return Some(status),
                Ok(None) if Instant::now() < end => thread::sleep(PAUSE),
                _ => return None,
            }
        }
    }
}

impl Drop for Manager {
    fn drop(&mut self) {
        if !matches!(self.child.try_wait(), Ok(None)) {
            return;
        }
        // In order first, so that its telemetry segment does not outlive it.
        if let Some(pid) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw) {
            let _gone = kill_process(pid, Signal::TERM);
        }
        if self.wait(STOP_TIMEOUT).is_none() {
            let _gone = self.child.kill();
            let _reaped = self.child.wait();
        }
    }
}

/// Starts a process whose first instruction already runs on one of `cpus`: what it measures at its
/// start is then true.
fn spawn_on(cpus: &[usize], command: &mut Command) -> Result<Child, BenchError> {
    let pin = |cpus: &[usize]| process::pin(cpus).map_err(BenchError::system("set CPU affinity"));
    let before = process::cpus().map_err(BenchError::system("read CPU affinity"))?;
    pin(cpus)?;
    let child = command.spawn().map_err(BenchError::system("start orbitkv serve"));
    pin(&before)?;
    child
}

/// User and system time in the text of /proc/PID/stat. The command in it may hold anything.
fn cpu_ticks(stat: &str) -> Option<u64> {
    let (_, fields) = stat.rsplit_once(')')?;
    let fields: Vec<&str> = fields.split_whitespace().collect();
    let field = |at: usize| fields.get(at)?.parse::<u64>().ok();
    Some(field(USER_TIME)? + field(SYSTEM_TIME)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_ticks_stand_where_proc_says() {
        let stat = "7 (a) b) S 1 7 7 0 -1 4194560 9 0 0 0 30 12 0 0 20 0 3 0 55 1 2";
        assert_eq!(cpu_ticks(stat), Some(42));
        assert_eq!(cpu_ticks("7 (a) S 1"), None);
        let own = std::fs::read_to_string("/proc/self/stat").unwrap();
        assert!(cpu_ticks(&own).is_some());
    }
}
