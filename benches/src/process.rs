//! Forked children, and where a process may run.
#![allow(unsafe_code, reason = "fork and _exit have no safe form")]

use std::panic::{AssertUnwindSafe, catch_unwind};

use rustix::io::Errno;
use rustix::process::{
    Pid, Signal, WaitOptions, WaitStatus, kill_process, set_parent_process_death_signal, waitpid,
};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// A child of this process that runs a closure. Dropping it kills and reaps it.
#[derive(Debug)]
pub(crate) struct Forked {
    pid: Pid,
    reaped: bool,
}

impl Forked {
    /// Runs `work` in a child and ends that child with the code that it returns. The child dies
    /// with its parent.
    ///
    /// For a process with a single thread: a lock that another thread holds would stay locked in
    /// the child for ever.
    pub(crate) fn spawn(work: impl FnOnce() -> u8) -> Result<Self, Errno> {
        // SAFETY: the child runs on a copy of everything and never returns from here.
        let forked = unsafe { libc::fork() };
        match forked {
            -1 => {
                Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::AGAIN))
            }
            0 => {
                let _asked = set_parent_process_death_signal(Some(Signal::KILL));
                let code = catch_unwind(AssertUnwindSafe(work)).unwrap_or(101);
                // SAFETY: ends the child without the parent's exit handlers.
                unsafe { libc::_exit(code.into()) }
            }
            pid => Pid::from_raw(pid).map(|pid| Self { pid, reaped: false }).ok_or(Errno::SRCH),
        }
    }

    /// How the child ended, if it has.
    pub(crate) fn ended(&mut self) -> Result<Option<WaitStatus>, Errno> {
        self.reap(WaitOptions::NOHANG)
    }

    /// Waits until the child ends.
    pub(crate) fn wait(&mut self) -> Result<Option<WaitStatus>, Errno> {
        self.reap(WaitOptions::empty())
    }

    fn reap(&mut self, options: WaitOptions) -> Result<Option<WaitStatus>, Errno> {
        loop {
            match waitpid(Some(self.pid), options) {
                Err(Errno::INTR) => {}
                Ok(None) => return Ok(None),
                Ok(Some((_, status))) => {
                    self.reaped = true;
                    return Ok(Some(status));
                }
                Err(errno) => return Err(errno),
            }
        }
    }
}

impl Drop for Forked {
    fn drop(&mut self) {
        if !self.reaped {
            let _gone = kill_process(self.pid, Signal::KILL);
            let _reaped = self.reap(WaitOptions::empty());
        }
    }
}

/// CPUs that this thread may use, in order.
pub(crate) fn cpus() -> Result<Vec<usize>, Errno> {
    let set = sched_getaffinity(None)?;
    Ok((0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect())
}

/// Keeps this thread, and what it starts from now on, on `cpus`.
pub(crate) fn pin(cpus: &[usize]) -> Result<(), Errno> {
    let mut set = CpuSet::new();
    for cpu in cpus {
        set.set(*cpu);
    }
    sched_setaffinity(None, &set)
}
