//! A read-only, corruption-tolerant snapshot of a Manager, alive, hung or dead.
//!
//! [`read`] finds the telemetry segment of a socket, copies what is in it and closes it again. It
//! asks the Manager nothing, writes nothing, and ends within a bounded time whatever the bytes are:
//! the worst that a damaged segment gives is a typed error or nonsense numbers.
//!
//! Only the owner of the segment could shrink it under a reader (no Manager ever does); that would
//! end the reader by SIGBUS, as with any mapped file.

mod numbers;
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
    SegmentFault, SegmentReader, TELEMETRY_BYTES, check_start, map_segment, open_segment,
    owner_lives, printable_line, resolved_socket, segment_name,
};

/// A Manager that holds its lock but has not beaten for longer than this is unresponsive. An idle
/// one beats at least every 100 ms.
pub const HEARTBEAT_AGE_MAX: Duration = Duration::from_secs(1);

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
/// A Manager that is still starting, or died while starting, gives a snapshot without numbers.
///
/// # Errors
/// [`InspectError`]; a dead or hung Manager is no error.
pub fn read(socket: &Path) -> Result<Snapshot, InspectError> {
    let socket = resolved_socket(socket);
    let lock = lock_path(&socket);
    let alive = owner_lives(&lock).map_err(|errno| InspectError::System {
        operation: "probe the lock",
        path: lock.clone(),
        errno,
    })?;
    let uid = owner_uid(&socket, &lock);
    let name = segment_name(uid, &socket);
    match open_checked(&name, uid) {
        Ok(reader) => {
            let theirs = reader.identity().socket;
            if !same_text(&theirs, &socket) {
                return Err(InspectError::OtherSocket { name, theirs });
            }
            Ok(Snapshot::take(&reader, alive, now_ns()))
        }
        Err(Absent::NoSegment) if !alive => Err(InspectError::NotFound { socket, name }),
        // Between lock and segment, or between segment and header, a Manager is starting.
        Err(Absent::NoSegment | Absent::Unfinished) => Ok(Snapshot::empty(alive, &socket)),
        Err(Absent::Error(error)) => Err(error),
    }
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
