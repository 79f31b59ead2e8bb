//! What a stop signal does: while the Manager starts, everything it has made is removed and the
//! process ends at once, because memory is touched and files are scanned for longer than anybody
//! waits; once it serves, the reactor is asked to stop.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use orbitkv_shm_protocol::telemetry::{open_segment, resolved_socket, segment_name};
use rustix::fs::Stat;

use crate::endpoint::Stopper;
use crate::error::EXIT_FAILED;

/// After a stop signal the process ends within this time, whatever hangs: below the 10 s that are
/// promised.
const STOP_MAX: Duration = Duration::from_millis(9_500);

/// How far the Manager has come, shared with the signal thread.
#[derive(Clone, Debug)]
pub(super) struct Start(Arc<Mutex<Stage>>);

#[derive(Debug)]
enum Stage {
    /// What has been made.
    Starting(Vec<Leftover>),
    /// Whom to ask.
    Serving { stopper: Stopper, asked: bool },
}

/// A name that outlives the process unless it is removed.
#[derive(Debug)]
struct Leftover {
    name: Name,
    /// Device and inode: a name that somebody else has taken meanwhile is theirs.
    identity: (u64, u64),
}

#[derive(Debug)]
enum Name {
    File(PathBuf),
    Segment(String),
}

impl Name {
    fn identity(&self) -> Option<(u64, u64)> {
        let of = |stat: Stat| (stat.st_dev, stat.st_ino);
        match self {
            Self::File(path) => rustix::fs::lstat(path).ok().map(of),
            Self::Segment(name) => open_segment(name, false).ok().map(|(_, stat)| of(stat)),
        }
    }
}

/// Takes note of what a step of the start has made.
pub(super) struct Made<'a>(&'a mut Vec<Leftover>);

impl Made<'_> {
    /// A file, socket or lock.
    pub(super) fn file(&mut self, path: &Path) {
        self.note(Name::File(path.to_owned()));
    }

    /// The telemetry segment of a socket.
    pub(super) fn telemetry_of(&mut self, socket: &Path) {
        let uid = rustix::process::geteuid().as_raw();
        self.note(Name::Segment(segment_name(uid, &resolved_socket(socket))));
    }

    fn note(&mut self, name: Name) {
        if let Some(identity) = name.identity() {
            self.0.push(Leftover { name, identity });
        }
    }
}

impl Start {
    /// From here on SIGINT, SIGTERM and SIGHUP are handled. Once in a process.
    pub(super) fn watch() -> Result<Self, ctrlc::Error> {
        let start = Self(Arc::new(Mutex::new(Stage::Starting(Vec::new()))));
        let seen = start.clone();
        ctrlc::set_handler(move || seen.stop())?;
        Ok(start)
    }

    /// Runs a short step that makes something with a name; no stop comes between the two.
    pub(super) fn make<T, E>(
        &self,
        step: impl FnOnce(&mut Made<'_>) -> Result<T, E>,
    ) -> Result<T, E> {
        match &mut *self.0.lock().unwrap_or_else(PoisonError::into_inner) {
            Stage::Starting(leftovers) => step(&mut Made(leftovers)),
            // What is made from now on is removed by whoever owns it.
            Stage::Serving { .. } => step(&mut Made(&mut Vec::new())),
        }
    }

    /// Runs the last step of the start; from then on its stopper is asked to stop.
    pub(super) fn serve<T, E>(
        &self,
        step: impl FnOnce() -> Result<(T, Stopper), E>,
    ) -> Result<T, E> {
        let mut stage = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (made, stopper) = step()?;
        *stage = Stage::Serving { stopper, asked: false };
        Ok(made)
    }

    /// Whether a stop was asked for.
    pub(super) fn is_stopping(&self) -> bool {
        let stage = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        matches!(&*stage, Stage::Serving { asked: true, .. })
    }

    fn stop(&self) {
        let mut stage = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match &mut *stage {
            Stage::Starting(leftovers) => {
                // Latest first; the lock that keeps a second Manager away goes last.
                for leftover in leftovers.iter().rev() {
                    leftover.remove();
                }
                tracing::info!("stopped while starting");
                // With the stage still locked, so that nothing more is made.
                std::process::exit(0);
            }
            Stage::Serving { stopper, asked } => {
                stopper.stop();
                if !std::mem::replace(asked, true) {
                    watch_over_stop();
                }
            }
        }
    }
}

impl Leftover {
    fn remove(&self) {
        if self.name.identity() != Some(self.identity) {
            return;
        }
        let _gone = match &self.name {
            Name::File(path) => rustix::fs::unlink(path),
            Name::Segment(name) => rustix::shm::unlink(name.as_str()),
        };
    }
}

/// Cuts off what still runs after [`STOP_MAX`].
fn watch_over_stop() {
    let watchdog = std::thread::Builder::new().name("orbitkv-watchdog".to_owned());
    let watched = watchdog.spawn(|| {
        std::thread::sleep(STOP_MAX);
        tracing::error!("the stop did not end in time: leaving at once");
        std::process::exit(i32::from(EXIT_FAILED));
    });
    if watched.is_err() {
        tracing::warn!("no thread to watch over the stop");
    }
}
