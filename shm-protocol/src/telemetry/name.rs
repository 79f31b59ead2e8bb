//! How the segment of a socket is found, opened and mapped, and whether its owner lives.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{FileType, FlockOperation, Mode, OFlags, Stat};
use rustix::io::Errno;
use rustix::shm;

use super::TELEMETRY_BYTES;
use crate::layout::fnv1a;
use crate::memory::{Access, ForkGuard, SharedMemory};

/// The path under which a socket is known: absolute, its folder resolved. The socket itself need
/// not exist.
pub fn resolved_socket(socket: &Path) -> PathBuf {
    let absolute = std::path::absolute(socket).unwrap_or_else(|_| socket.to_owned());
    match (absolute.parent().map(Path::canonicalize), absolute.file_name()) {
        (Some(Ok(folder)), Some(name)) => folder.join(name),
        _ => absolute,
    }
}

/// Name of the segment of a Manager: of its owner, and of its socket as [`resolved_socket`] gives
/// it. Two sockets of one owner can share a name only by a 64-bit hash collision; the header has
/// the socket's path, which both sides compare.
pub fn segment_name(uid: u32, resolved_socket: &Path) -> String {
    let mut hash = 0xcbf2_9ce4_8422_2325;
    let path = resolved_socket.as_os_str().as_bytes();
    for chunk in path.chunks(8) {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        hash = fnv1a(hash, u64::from_le_bytes(word));
    }
    format!("/orbitkv-{uid}-{:016x}", fnv1a(hash, path.len() as u64))
}

/// Opens the segment of that name, without following a link or waiting for anything that another
/// user may have put in its place.
///
/// # Errors
/// `ENOENT` when there is none, `EACCES` for a stranger, `EINVAL` when the name is taken by
/// something that is no regular file.
pub fn open_segment(name: &str, writable: bool) -> Result<(OwnedFd, Stat), Errno> {
    let access = if writable { shm::OFlags::RDWR } else { shm::OFlags::RDONLY };
    let careful = shm::OFlags::from_bits_retain((OFlags::NOFOLLOW | OFlags::NONBLOCK).bits());
    let descriptor = shm::open(name, access | careful, Mode::empty())?;
    let stat = rustix::fs::fstat(&descriptor)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(Errno::INVAL);
    }
    Ok((descriptor, stat))
}

/// Maps an open segment of at least [`TELEMETRY_BYTES`], shared with whoever else has it.
///
/// It cannot be sealed, being no memfd: whoever owns it could shrink it, and a later access would
/// end in SIGBUS. Managers never do.
///
/// # Errors
/// What `mmap` or `madvise` said.
pub fn map_segment(descriptor: BorrowedFd<'_>, access: Access) -> Result<SharedMemory, Errno> {
    let fork = Arc::new(ForkGuard::new()?);
    SharedMemory::map(descriptor, TELEMETRY_BYTES, access, &fork)
}

/// Whether some process holds the lock file (see [`crate::bootstrap::peer::lock_path`]): probed
/// with a shared lock that is given back at once, never waiting. A Manager that starts in this very
/// moment tries again.
///
/// # Errors
/// What opening the lock file said, other than that it is absent (then nobody holds it).
pub fn owner_lives(lock: &Path) -> Result<bool, Errno> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let descriptor = match rustix::fs::open(lock, flags, Mode::empty()) {
        Ok(descriptor) => descriptor,
        Err(Errno::NOENT | Errno::NOTDIR) => return Ok(false),
        Err(errno) => return Err(errno),
    };
    match rustix::fs::flock(&descriptor, FlockOperation::NonBlockingLockShared) {
        Ok(()) => Ok(false),
        Err(Errno::WOULDBLOCK) => Ok(true),
        Err(errno) => Err(errno),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_differ_by_owner_and_by_socket() {
        let one = segment_name(1000, Path::new("/run/a.sock"));
        assert!(one.starts_with("/orbitkv-1000-") && one.len() == "/orbitkv-1000-".len() + 16);
        assert_ne!(one, segment_name(1001, Path::new("/run/a.sock")));
        assert_ne!(one, segment_name(1000, Path::new("/run/b.sock")));
        assert_eq!(one, segment_name(1000, Path::new("/run/a.sock")));
    }

    #[test]
    fn a_socket_is_known_under_one_path() {
        let folder = std::env::temp_dir().canonicalize().expect("temporary folder");
        let plain = folder.join("orbitkv-name.sock");
        assert_eq!(resolved_socket(&folder.join("./orbitkv-name.sock")), plain);
        assert_eq!(resolved_socket(&folder.join("../").join(&plain)), plain);
        // A folder that is not there still gives a name.
        assert_eq!(resolved_socket(Path::new("/nowhere/x")), Path::new("/nowhere/x"));
    }

    #[test]
    fn nobody_holds_a_lock_that_is_absent_or_free() {
        let lock = std::env::temp_dir().join(format!("orbitkv-free-{}.lock", std::process::id()));
        assert_eq!(owner_lives(&lock), Ok(false));
        let file = std::fs::File::create(&lock).expect("lock file");
        assert_eq!(owner_lives(&lock), Ok(false));
        rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).expect("free");
        assert_eq!(owner_lives(&lock), Ok(true));
        drop(file);
        assert_eq!(owner_lives(&lock), Ok(false));
        std::fs::remove_file(&lock).expect("made above");
    }
}
