//! The Manager under measurement: with its default settings, on cores of its own.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use tempfile::TempDir;

use crate::error::BenchError;
use crate::manager::Manager;
use crate::process;

/// Fields of /proc/PID/stat after the command: user and system time, in clock ticks.
const USER_TIME: usize = 11;
const SYSTEM_TIME: usize = 12;

/// A running Manager and its folder. Dropped in this order.
#[derive(Debug)]
pub(super) struct Pinned {
    manager: Manager,
    _folder: TempDir,
}

impl Pinned {
    /// Starts a Manager that may use `cpus` from its first instruction on, and waits until it is
    /// ready.
    pub(super) fn start(cpus: &[usize], interrupted: fn() -> bool) -> Result<Self, BenchError> {
        let folder = tempfile::Builder::new().prefix("orbitkv-bench-").tempdir();
        let folder = folder.map_err(BenchError::system("make a temporary folder"))?;
        let path = |name| folder.path().join(name);
        let manager = spawn_on(cpus, || Ok(Manager::spawn(&path("socket"), &path("log"), &[])?))?;
        Ok(Self { manager: manager.until_ready(interrupted)?, _folder: folder })
    }

    /// Its socket.
    pub(super) fn socket(&self) -> PathBuf {
        self.manager.socket().to_owned()
    }

    /// CPU time of all its threads since its start.
    pub(super) fn cpu_time(&self) -> Result<Duration, BenchError> {
        let text = fs::read_to_string(format!("/proc/{}/stat", self.manager.id()));
        let text = text.map_err(BenchError::system("read /proc/PID/stat of the Manager"))?;
        let ticks = cpu_ticks(&text)
            .ok_or_else(|| BenchError::Wrong("/proc/PID/stat of the Manager".into()))?;
        Ok(Duration::from_secs_f64(ticks as f64 / rustix::param::clock_ticks_per_second() as f64))
    }

    /// Stops it in order and makes sure that nothing of it is left.
    pub(super) fn stop(self) -> Result<(), BenchError> {
        Ok(self.manager.stop()?)
    }
}

/// Starts a process whose first instruction already runs on one of `cpus`: what it measures at its
/// start is then true.
fn spawn_on(
    cpus: &[usize],
    spawn: impl FnOnce() -> Result<Manager, BenchError>,
) -> Result<Manager, BenchError> {
    let pin = |cpus: &[usize]| process::pin(cpus).map_err(BenchError::system("set CPU affinity"));
    let before = process::cpus().map_err(BenchError::system("read CPU affinity"))?;
    pin(cpus)?;
    let spawned = spawn();
    pin(&before)?;
    spawned
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
