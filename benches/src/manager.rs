//! A private Manager: `orbitkv serve` of this same program in a process of its own.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// Longest start: a large pool is touched page by page.
const READY_TIMEOUT: Duration = Duration::from_secs(120);
/// A stop ends within 10 s whatever clients do; then the process is killed.
const STOP_TIMEOUT: Duration = Duration::from_secs(12);
const PAUSE: Duration = Duration::from_millis(20);

/// Why there is no private Manager, or how it did not stop.
#[derive(Debug, thiserror::Error)]
pub enum ManagerError {
    /// The caller was told to end before the Manager was ready.
    #[error("stopped by a signal")]
    Interrupted,
    /// A system call failed.
    #[error("{operation}: {source}")]
    System {
        /// What was tried.
        operation: &'static str,
        /// The system's answer.
        source: io::Error,
    },
    /// It was not ready, or did not stop, as it should.
    #[error("orbitkv serve: {message}")]
    Failed {
        /// How it ended; none when it did not end.
        status: Option<ExitStatus>,
        /// Its own last words.
        message: Box<str>,
    },
}

/// A running Manager. Dropping it stops the process, or kills it.
#[derive(Debug)]
pub struct Manager {
    child: Child,
    socket: PathBuf,
    log: PathBuf,
}

impl Manager {
    /// Starts `orbitkv serve` with `arguments`. Nobody can attach before it
    /// [is ready](Self::until_ready).
    ///
    /// # Errors
    /// [`ManagerError::System`].
    pub fn spawn(socket: &Path, log: &Path, arguments: &[OsString]) -> Result<Self, ManagerError> {
        let system = |operation| move |source| ManagerError::System { operation, source };
        let file = File::create(log).map_err(system("make the log of orbitkv serve"))?;
        let program = std::env::current_exe().map_err(system("find this program"))?;
        let child = Command::new(program)
            .args(["serve", "--stop-at-eof", "--socket"])
            .arg(socket)
            .args(arguments)
            // Its own group: a SIGINT from the terminal must not stop it under its clients.
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // A file and not a pipe: the Manager may outlive this process for a moment.
            .stderr(file)
            .spawn()
            .map_err(system("start orbitkv serve"))?;
        Ok(Self { child, socket: socket.to_owned(), log: log.to_owned() })
    }

    /// Waits until it serves. `interrupted` is asked again and again; once true the wait ends.
    ///
    /// # Errors
    /// [`ManagerError::Interrupted`], or [`ManagerError::Failed`] when it ended or took too long.
    pub fn until_ready(mut self, interrupted: fn() -> bool) -> Result<Self, ManagerError> {
        let (sender, lines) = channel();
        if let Some(stdout) = self.child.stdout.take() {
            thread::spawn(move || {
                for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                    // Read on after "ready": a full pipe would stop the Manager.
                    let _done = sender.send(line);
                }
            });
        }
        let end = Instant::now() + READY_TIMEOUT;
        loop {
            if interrupted() {
                return Err(ManagerError::Interrupted);
            }
            match lines.recv_timeout(PAUSE) {
                Ok(line) if line.starts_with("ready ") => return Ok(self),
                Ok(_) => {}
                Err(RecvTimeoutError::Timeout) if Instant::now() < end => {}
                Err(_) => return Err(self.not_ready()),
            }
        }
    }

    /// Its socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Its process, which is there until this is dropped.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Stops it in order and makes sure that nothing of it is left.
    ///
    /// # Errors
    /// [`ManagerError::Failed`] when it ended otherwise or had to be killed.
    pub fn stop(mut self) -> Result<(), ManagerError> {
        match self.end() {
            Some(status) if status.success() => Ok(()),
            status @ Some(_) => Err(self.complaint(status, "did not stop in order")),
            None => Err(self.complaint(None, "did not stop within 12 s and was killed")),
        }
    }

    fn not_ready(&mut self) -> ManagerError {
        let status = self.wait(Duration::from_secs(1));
        let fallback = match status {
            Some(status) if status.code().is_none() => "killed before it was ready",
            Some(_) => "ended before it was ready",
            None => "not ready within 120 s",
        };
        self.complaint(status, fallback)
    }

    fn complaint(&self, status: Option<ExitStatus>, fallback: &str) -> ManagerError {
        let log = fs::read(&self.log).unwrap_or_default();
        let log = String::from_utf8_lossy(&log);
        let last = log.lines().last().unwrap_or(fallback);
        ManagerError::Failed { status, message: last.trim_start_matches("orbitkv: ").into() }
    }

    fn end(&mut self) -> Option<ExitStatus> {
        if let Some(pid) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw) {
            // The child is not reaped yet, so the number is still its own.
            let _gone = kill_process(pid, Signal::TERM);
        }
        self.wait(STOP_TIMEOUT)
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
        if self.end().is_none() {
            let _gone = self.child.kill();
            let _reaped = self.child.wait();
        }
    }
}
