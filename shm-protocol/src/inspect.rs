//! A read-only, corruption-tolerant snapshot of a Manager, alive, hung or dead.
//!
//! [`read`] finds the telemetry segment of a socket, copies what is in it and closes it again. It
//! asks the Manager nothing, writes nothing, and ends within a bounded time whatever the bytes are:
//! the worst that a damaged segment gives is a typed error or nonsense numbers.
//!
//! Only the owner of the segment could shrink it under a reader (no Manager ever does); that would
//! end the reader by SIGBUS, as with any mapped file.

mod numbers;
mod queued;
mod snapshot;
mod view;

use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::io::Errno;

pub use numbers::{LatencyView, Numbers, Value};
pub use snapshot::{LifeState, Snapshot};
pub use view::{
    BudgetLimits, BudgetView, DeviceView, LeaseView, ManagerView, OperationView, PagesView,
    PoolView, RingView, SessionView,
};

use crate::bootstrap::peer::lock_path;
use crate::memory::Access;
use crate::telemetry::{
    ManagerState, SegmentFault, SegmentReader, TELEMETRY_BYTES, check_start, map_segment,
    open_segment, owner_lives, printable_line, resolved_socket, segment_name,
};

/// A Manager that holds its lock but has not beaten for longer than this is unresponsive. An idle
/// one beats at least every 100 ms.
pub const HEARTBEAT_AGE_MAX: Duration = Duration::from_secs(1);

/// A Manager that died a moment ago is watched for so long, in case it only lost its lock file.
/// Longer than a live one is between two heartbeats.
const BEAT_WAIT_MAX: Duration = Duration::from_millis(250);
const BEAT_PAUSE: Duration = Duration::from_millis(10);

/// Longest time that all groups together are tried again while their writer changes them.
const RETRY_TIME_MAX: Duration = Duration::from_millis(50);

/// Why there is no snapshot.
#[derive(Debug, thiserror::Error)]
pub enum InspectError {
    /// No Manager runs on the socket and none left a segment.
    #[error(
        "no manager at {socket}: its lock is free and there is no segment {name}; check --socket, \
         or start one with `orbitkv serve`", socket = socket.display()
    )]
    NotFound {
        /// The socket asked for, resolved.
        socket: PathBuf,
        /// Name that the segment would have.
        name: String,
    },
    /// A system call failed.
    #[error(
        "{operation} {path}: {errno}{}",
        if *errno == Errno::ACCESS { "; run as the user that runs the manager" } else { "" },
        path = path.display()
    )]
    System {
        /// What was tried.
        operation: &'static str,
        /// On what.
        path: PathBuf,
        /// What the kernel said.
        errno: Errno,
    },
    /// The segment belongs to another user than the socket.
    #[error("segment {name} belongs to uid {found}, the socket to uid {expected}: not trusted")]
    OtherOwner {
        /// Its name.
        name: String,
        /// Who owns it.
        found: u32,
        /// Who should.
        expected: u32,
    },
    /// The segment is another socket's: their names collide.
    #[error(
        "segment {name} is that of {theirs}: use another socket path",
        theirs = printable_line(theirs.as_os_str().as_bytes())
    )]
    OtherSocket {
        /// Its name.
        name: String,
        /// Socket in its header: any bytes, shown with control characters replaced.
        theirs: PathBuf,
    },
    /// The segment is damaged or from another build.
    #[error("segment {name}: {fault}")]
    Unreadable {
        /// Its name.
        name: String,
        /// What is wrong.
        #[source]
        fault: SegmentFault,
    },
}

/// Takes a snapshot of the Manager that serves, or last served, `socket`.
///
/// A Manager that is still starting, or died while starting, gives a snapshot without numbers; so
/// does one whose segment is damaged, with the damage in [`ManagerView::problems`].
///
/// # Errors
/// [`InspectError`]; a dead or hung Manager is no error.
pub fn read(socket: &Path) -> Result<Snapshot, InspectError> {
    let socket = resolved_socket(socket);
    let lock = lock_path(&socket);
    let held = owner_lives(&lock);
    let alive = matches!(held, Ok(true));
    let uid = owner_uid(&socket, &lock);
    let name = segment_name(uid, &socket);
    let mut snapshot = match open_checked(&name, uid) {
        Ok(reader) => {
            let theirs = reader.identity().socket;
            if same_text(&theirs, &socket) {
                judge_life(&reader, alive, &lock)
            } else if names_a_path(&theirs) {
                return Err(InspectError::OtherSocket { name, theirs });
            } else {
                let fault = SegmentFault::NoSocket;
                damaged(InspectError::Unreadable { name, fault }, alive, &socket)
            }
        }
        Err(Absent::NoSegment) if !alive => {
            return Err(match held {
                Err(errno) => {
                    InspectError::System { operation: "probe the lock", path: lock, errno }
                }
                Ok(_) => InspectError::NotFound { socket, name },
            });
        }
        // Between lock and segment, or between segment and header, a Manager is starting.
        Err(Absent::NoSegment | Absent::Unfinished) => {
            Snapshot::empty(alive, Some(ManagerState::Starting), &socket)
        }
        Err(Absent::Error(error @ InspectError::Unreadable { .. })) => {
            damaged(error, alive, &socket)
        }
        Err(Absent::Error(error)) => return Err(error),
    };
    let manager = &snapshot.manager;
    let still = manager.heartbeat_age_ms > queued::LOOK_AFTER_MS;
    if manager.pid != 0 && manager.state != LifeState::Dead && still {
        queued::look_at_clients(&mut snapshot);
    }
    if let Err(errno) = held {
        let lock = lock.display();
        snapshot.manager.problems.push(format!("the lock {lock} cannot be probed: {errno}"));
    }
    Ok(snapshot)
}

/// A Manager whose segment says nothing intelligible: only its lock is known. It cannot be told
/// from one that hangs, so it is called unresponsive. (A live Manager writes everything again
/// within a second.)
fn damaged(error: InspectError, alive: bool, socket: &Path) -> Snapshot {
    let mut snapshot = Snapshot::empty(alive, None, socket);
    snapshot.manager.problems.push(error.to_string());
    snapshot
}

/// The snapshot of a readable segment. Where nobody holds the lock its heart is listened to for a
/// moment: a Manager whose lock file was taken away under it is not dead while that beats.
fn judge_life(reader: &SegmentReader, alive: bool, lock: &Path) -> Snapshot {
    let beat = reader.heartbeat_ns();
    let age_ns = now_ns().saturating_sub(beat);
    if alive || age_ns > HEARTBEAT_AGE_MAX.as_nanos() as u64 {
        return Snapshot::take(reader, alive, now_ns());
    }
    let until = now_ns() + BEAT_WAIT_MAX.as_nanos() as u64;
    while reader.heartbeat_ns() == beat && now_ns() < until {
        std::thread::sleep(BEAT_PAUSE);
    }
    let beats = reader.heartbeat_ns() > beat;
    let mut snapshot = Snapshot::take(reader, beats, now_ns());
    if beats {
        let lock = lock.display();
        snapshot.manager.problems.push(format!(
            "nobody holds the lock {lock}, but a Manager goes on serving: its runtime folder was \
             changed under it; restart it"
        ));
    }
    snapshot
}

/// Why there is nothing to copy.
enum Absent {
    NoSegment,
    Unfinished,
    Error(InspectError),
}

fn open_checked(name: &str, uid: u32) -> Result<SegmentReader, Absent> {
    let system = |operation, errno| {
        let path = Path::new("/dev/shm").join(name.trim_start_matches('/'));
        Absent::Error(InspectError::System { operation, path, errno })
    };
    let unreadable = |fault| match fault {
        SegmentFault::Unfinished => Absent::Unfinished,
        fault => Absent::Error(InspectError::Unreadable { name: name.to_owned(), fault }),
    };
    let (descriptor, stat) = match open_segment(name, false) {
        Ok(opened) => opened,
        Err(Errno::NOENT) => return Err(Absent::NoSegment),
        Err(errno) => return Err(system("open", errno)),
    };
    if stat.st_uid != uid {
        let (name, found) = (name.to_owned(), stat.st_uid);
        return Err(Absent::Error(InspectError::OtherOwner { name, found, expected: uid }));
    }
    // The first words are read through the descriptor: before they are valid the space may not be
    // reserved yet, and touching a mapping of it could fail.
    let mut start = [0; 16];
    let got = rustix::io::pread(&descriptor, &mut start, 0).map_err(|e| system("read", e))?;
    if got == start.len() {
        let word = |i: usize| u64::from_le_bytes(start.as_chunks::<8>().0[i]);
        check_start(word(0), word(1)).map_err(unreadable)?;
    }
    let (bytes, needed) = (stat.st_size.max(0) as u64, TELEMETRY_BYTES as u64);
    if bytes < needed {
        return Err(unreadable(if bytes == 0 {
            SegmentFault::Unfinished
        } else {
            SegmentFault::TooShort { bytes, needed }
        }));
    }
    let memory =
        map_segment(descriptor.as_fd(), Access::Read).map_err(|errno| system("map", errno))?;
    SegmentReader::new(memory).map_err(unreadable)
}

/// Owner of the socket: that of its lock, which outlives the Manager, else that of the socket, else
/// the caller.
fn owner_uid(socket: &Path, lock: &Path) -> u32 {
    [lock, socket]
        .iter()
        .find_map(|path| rustix::fs::lstat(*path).ok())
        .map_or_else(|| rustix::process::geteuid().as_raw(), |stat| stat.st_uid)
}

/// Whether a path in a header, which may be cut, is the path asked for.
fn same_text(in_header: &Path, socket: &Path) -> bool {
    let socket: [u64; 64] = crate::telemetry::text_words(socket.as_os_str().as_bytes());
    crate::telemetry::text_bytes(&socket) == in_header.as_os_str().as_bytes()
}

/// Whether a header's path can be one that a Manager wrote.
fn names_a_path(path: &Path) -> bool {
    use std::os::unix::ffi::OsStrExt;

    let bytes = path.as_os_str().as_bytes();
    path.is_absolute() && !bytes.iter().any(|byte| byte.is_ascii_control())
}

/// CLOCK_MONOTONIC in nanoseconds: the clock of every time in the segment.
pub fn now_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    (now.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(now.tv_nsec as u64)
}

/// Says for how long a changing group is tried again.
struct Patience {
    until_ns: Option<u64>,
}

impl Patience {
    const fn new() -> Self {
        Self { until_ns: None }
    }

    /// True while there is time left; gives the processor away first, because the writer may be
    /// waiting for it.
    fn try_again(&mut self) -> bool {
        std::thread::yield_now();
        let now = now_ns();
        now < *self.until_ns.get_or_insert(now + RETRY_TIME_MAX.as_nanos() as u64)
    }
}

#[cfg(test)]
mod tests;
