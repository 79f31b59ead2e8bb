//! A private Manager: `orbitkv serve` in a process of its own.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::exit::{Exit, ToolError};
use crate::signal;

/// Longest start: a large pool is touched page by page.
const READY_TIMEOUT: Duration = Duration::from_secs(120);
/// A stop ends within 10 s whatever clients do; then the process is killed.
const STOP_TIMEOUT: Duration = Duration::from_secs(12);
const PAUSE: Duration = Duration::from_millis(20);

/// A running Manager. Dropping it kills the process.
pub(super) struct Manager {
    child: Child,
    socket: PathBuf,
    log: PathBuf,
}

impl Manager {
    /// Starts `orbitkv serve` with `arguments` and waits until it is ready.
    pub(super) fn start(
        socket: &Path,
        log: &Path,
        arguments: &[OsString],
    ) -> Result<Self, ToolError> {
        let system = |operation| move |source| ToolError::System { operation, source };
        let log_path = log.to_owned();
        let log = File::create(log).map_err(system("make the log of orbitkv serve"))?;
        let program = std::env::current_exe().map_err(system("find this program"))?;
        let mut child = Command::new(program)
            .arg("serve")
            .arg("--stop-at-eof")
            .arg("--socket")
            .arg(socket)
            .args(arguments)
            // Its own group: a SIGINT from the terminal must not stop it under the engines.
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // A file and not a pipe: the Manager may outlive this process for a moment.
            .stderr(log)
            .spawn()
            .map_err(system("start orbitkv serve"))?;
        let (sender, lines) = channel();
        if let Some(stdout) = child.stdout.take() {
            thread::spawn(move || {
                for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                    // Read on after "ready": a full pipe would stop the Manager.
                    let _done = sender.send(line);
                }
            });
        }
        let mut manager = Self { child, socket: socket.to_owned(), log: log_path };
        let end = Instant::now() + READY_TIMEOUT;
        loop {
            signal::check()?;
            match lines.recv_timeout(PAUSE) {
                Ok(line) if line.starts_with("ready ") => return Ok(manager),
                Ok(_) => {}
                Err(RecvTimeoutError::Timeout) if Instant::now() < end => {}
                Err(_) => return Err(manager.not_ready()),
            }
        }
    }

    /// Its socket.
    pub(super) fn socket(&self) -> &Path {
        &self.socket
    }

    /// Stops it in order. False when it had to be killed or ended with an error.
    pub(super) fn stop(mut self) -> bool {
        if let Some(pid) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw) {
            // The child is not reaped yet, so the number is still its own.
            let _gone = kill_process(pid, Signal::TERM);
        }
        self.wait(STOP_TIMEOUT).is_some_and(|status| status.success())
    }

    fn not_ready(&mut self) -> ToolError {
        let (exit, fallback) = match self.wait(Duration::from_secs(1)) {
            Some(status) => match status.code() {
                Some(code) => {
                    (Exit::from_code(code.clamp(1, 255) as u8), "ended before it was ready")
                }
                None if status.signal().is_some() => (Exit::System, "killed before it was ready"),
                None => (Exit::Failed, "ended before it was ready"),
            },
            None => (Exit::System, "not ready within 120 s"),
        };
        let log = fs::read(&self.log).unwrap_or_default();
        let log = String::from_utf8_lossy(&log);
        let last = log.lines().last().unwrap_or(fallback);
        let message = last.trim_start_matches("orbitkv: ").into();
        ToolError::ManagerStart { exit, message }
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
        if matches!(self.child.try_wait(), Ok(None)) {
            let _gone = self.child.kill();
            let _reaped = self.child.wait();
        }
    }
}
