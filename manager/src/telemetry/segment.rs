//! The named segment: made, its space reserved, replaced when dead, removed at a clean stop.

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use orbitkv_shm_protocol::bootstrap::peer::lock_path;
use orbitkv_shm_protocol::memory::{Access, SharedMemory};
use orbitkv_shm_protocol::telemetry::{
    SegmentReader, TELEMETRY_BYTES, map_segment, open_segment, owner_lives, resolved_socket,
    segment_name,
};
use rustix::fs::FallocateFlags;
use rustix::io::Errno;
use shared_memory::{ShmemConf, ShmemError};

use crate::error::remedy;

/// A name that keeps reappearing after it was removed this often is somebody else's.
const REPLACE_TRIES: u32 = 4;

/// Why there is no telemetry segment.
#[derive(Debug, thiserror::Error)]
pub enum TelemetryError {
    /// The file system of shared memory is full.
    #[error(
        "telemetry segment {name} needs {needed_bytes} bytes of /dev/shm and {available_bytes} are \
         free: remove stale files there, or enlarge it (mount -o remount,size=… /dev/shm; \
         docker run --shm-size)"
    )]
    NoSpace {
        /// Its name.
        name: String,
        /// Bytes that it takes.
        needed_bytes: u64,
        /// Bytes that are free.
        available_bytes: u64,
    },
    /// Another user made something of that name.
    #[error("telemetry segment {name} belongs to uid {uid}: remove /dev/shm{name}")]
    NotOwned {
        /// Its name.
        name: String,
        /// Who made it.
        uid: u32,
    },
    /// Another socket's name has the same hash, and its Manager lives.
    #[error(
        "telemetry segment {name} is in use by the manager of {socket}: choose another --socket",
        socket = socket.display()
    )]
    Collision {
        /// Its name.
        name: String,
        /// Socket of the other Manager.
        socket: PathBuf,
    },
    /// A system call failed.
    #[error("{operation} telemetry segment {name}: {errno}{}", remedy(Some(*errno)))]
    System {
        /// What was tried.
        operation: &'static str,
        /// On which segment.
        name: String,
        /// What the kernel said.
        errno: Errno,
    },
}

/// The name of a segment that this process made; removed on drop, unless the thread panics.
#[derive(Debug)]
pub(super) struct NamedSegment {
    name: String,
    descriptor: OwnedFd,
}

impl Drop for NamedSegment {
    fn drop(&mut self) {
        // After a bug the numbers are evidence: leave them, as a SIGKILL would.
        if !std::thread::panicking() {
            self.remove();
        }
    }
}

impl NamedSegment {
    /// Owner reads and writes, the group reads, whatever the umask was.
    pub(super) fn let_group_read(&self, gid: u32) -> Result<(), TelemetryError> {
        let refused = |operation| {
            let name = self.name.clone();
            move |errno| TelemetryError::System { operation, name, errno }
        };
        let group = rustix::fs::Gid::from_raw(gid);
        rustix::fs::fchown(&self.descriptor, None, Some(group)).map_err(refused("chown"))?;
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR | rustix::fs::Mode::RGRP;
        rustix::fs::fchmod(&self.descriptor, mode).map_err(refused("chmod"))
    }

    /// Removes the name if it still is that of this segment.
    fn remove(&self) {
        let Ok(ours) = rustix::fs::fstat(&self.descriptor) else { return };
        let Ok((_, there)) = open_segment(&self.name, false) else { return };
        if (ours.st_dev, ours.st_ino) == (there.st_dev, there.st_ino) {
            // Nothing is lost when it fails: the next Manager on this socket replaces it.
            let _ = rustix::shm::unlink(self.name.as_str());
        }
    }
}

/// Makes the segment of a socket whose lock the caller holds. Returns its name, its memory (all
/// zero) and the socket's resolved path.
pub(super) fn create_segment(
    socket: &Path,
) -> Result<(NamedSegment, SharedMemory, PathBuf), TelemetryError> {
    let socket = resolved_socket(socket);
    let name = segment_name(rustix::process::geteuid().as_raw(), &socket);
    let (named, memory) = create_named(&name, &socket, TELEMETRY_BYTES)?;
    Ok((named, memory, socket))
}

fn create_named(
    name: &str,
    socket: &Path,
    bytes: usize,
) -> Result<(NamedSegment, SharedMemory), TelemetryError> {
    let system = |operation, errno| TelemetryError::System { operation, name: name.into(), errno };
    let mut tries = 0;
    let mut created = loop {
        match ShmemConf::new().os_id(name).size(bytes).create() {
            Ok(created) => break created,
            Err(ShmemError::MappingIdExists) if tries < REPLACE_TRIES => {
                tries += 1;
                remove_dead(name, socket)?;
            }
            Err(error) => return Err(system("create", errno_of(&error))),
        }
    };
    let (descriptor, _) = open_segment(name, true).map_err(|errno| system("open", errno))?;
    // The library's mapping is given up untouched: it has no space reserved behind it and ties the
    // writer to one thread. From here on the name is ours to remove.
    created.set_owner(false);
    let named = NamedSegment { name: name.to_owned(), descriptor };
    drop(created);
    reserve(&named, bytes)?;
    let memory = map_segment(named.descriptor.as_fd(), Access::ReadWrite)
        .map_err(|errno| system("map", errno))?;
    Ok((named, memory))
}

/// Reserves the space before anything touches it: afterwards no store can end in SIGBUS.
fn reserve(named: &NamedSegment, bytes: usize) -> Result<(), TelemetryError> {
    let name = || named.name.clone();
    loop {
        let flags = FallocateFlags::empty();
        match rustix::fs::fallocate(&named.descriptor, flags, 0, bytes as u64) {
            Ok(()) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(Errno::NOSPC) => {
                let space = rustix::fs::fstatvfs(&named.descriptor)
                    .map(|stat| stat.f_bavail.saturating_mul(stat.f_frsize));
                return Err(TelemetryError::NoSpace {
                    name: name(),
                    needed_bytes: bytes as u64,
                    available_bytes: space.unwrap_or(0),
                });
            }
            Err(errno) => {
                return Err(TelemetryError::System {
                    operation: "reserve the space of",
                    name: name(),
                    errno,
                });
            }
        }
    }
}

/// Removes what is there under our name: a dead Manager's segment, because the caller holds the
/// socket's lock; unless its header names another socket whose Manager lives.
fn remove_dead(name: &str, socket: &Path) -> Result<(), TelemetryError> {
    let mut uid = None;
    if let Ok((descriptor, stat)) = open_segment(name, false) {
        uid = Some(stat.st_uid);
        if let Some(theirs) = socket_of(&descriptor, stat.st_size)
            && theirs != socket
            && owner_lives(&lock_path(&theirs)).unwrap_or(false)
        {
            return Err(TelemetryError::Collision { name: name.into(), socket: theirs });
        }
    }
    match rustix::shm::unlink(name) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(errno) => match uid {
            Some(uid) if uid != rustix::process::geteuid().as_raw() => {
                Err(TelemetryError::NotOwned { name: name.into(), uid })
            }
            _ => Err(TelemetryError::System { operation: "remove", name: name.into(), errno }),
        },
    }
}

/// Socket in the header of a segment, if it has a valid one.
fn socket_of(descriptor: &OwnedFd, size: i64) -> Option<PathBuf> {
    if size < TELEMETRY_BYTES as i64 {
        return None;
    }
    let memory = map_segment(descriptor.as_fd(), Access::Read).ok()?;
    Some(SegmentReader::new(memory).ok()?.identity().socket)
}

fn errno_of(error: &ShmemError) -> Errno {
    match error {
        ShmemError::MapCreateFailed(errno)
        | ShmemError::MapOpenFailed(errno)
        | ShmemError::UnknownOsError(errno) => Errno::from_raw_os_error(errno.cast_signed()),
        ShmemError::MappingIdExists => Errno::EXIST,
        _ => Errno::INVAL,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A segment larger than the whole file system of shared memory: refused before first touch,
    /// with both numbers and the fix, and nothing is left behind.
    #[test]
    fn no_space_names_the_numbers_and_the_fix() {
        let name = format!("/orbitkv-test-{}-nospace", std::process::id());
        let needed = 1 << 42;
        let error = create_named(&name, Path::new("/nowhere/a.sock"), needed)
            .expect_err("no /dev/shm has 4 TiB");
        let TelemetryError::NoSpace { needed_bytes, available_bytes, .. } = &error else {
            panic!("{error}");
        };
        assert_eq!(*needed_bytes, 1 << 42);
        assert!((1..1 << 42).contains(available_bytes), "{available_bytes}");
        let text = error.to_string();
        assert!(text.contains("4398046511104") && text.contains("--shm-size"), "{text}");
        assert_eq!(open_segment(&name, false).err(), Some(Errno::NOENT));
    }

    /// The space behind a new segment is there before anything is written.
    #[test]
    fn the_whole_segment_is_reserved() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let (named, memory, _) = create_segment(&folder.path().join("a.sock")).expect("space");
        let stat = rustix::fs::fstat(&named.descriptor).expect("open");
        assert_eq!(stat.st_size, TELEMETRY_BYTES as i64);
        assert!(stat.st_blocks * 512 >= TELEMETRY_BYTES as i64, "{} blocks", stat.st_blocks);
        assert_eq!(stat.st_mode & 0o777, 0o600);
        assert_eq!(memory.bytes(), TELEMETRY_BYTES);
    }
}
