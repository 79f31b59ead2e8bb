//! Who is at the other end of the bootstrap socket, and where the socket is.

#![allow(unsafe_code, reason = "SO_PEERPIDFD has no safe wrapper: one getsockopt")]

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags};
use rustix::time::Timespec;

/// Name of the socket inside its folder.
pub const SOCKET_NAME: &str = "manager.sock";

/// Identity of a peer when it connected (or, for a client, when the Manager began to listen).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PeerCredentials {
    /// Process id in this process's id namespace; 0 when the peer is outside of it.
    pub pid: u32,
    /// Effective user id.
    pub uid: u32,
    /// Effective group id.
    pub gid: u32,
}

/// Why a peer could not be identified.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum PeerError {
    /// The process has ended, or its id was given to another one.
    #[error("the peer process has ended")]
    Gone,
    /// The peer lives in a process-id namespace that is not visible from here, and the kernel has
    /// no `SO_PEERPIDFD` (6.5).
    #[error(
        "the peer process is outside this process-id namespace: use Linux 6.5 or share the namespace"
    )]
    Invisible,
    /// The system refused.
    #[error("{operation}: {errno}")]
    System {
        /// Name of the system call.
        operation: &'static str,
        /// What the system said.
        errno: Errno,
    },
}

/// Reads who connected to a Unix socket (`SO_PEERCRED`).
///
/// # Errors
/// The descriptor is no connected Unix socket.
pub fn peer_credentials(socket: impl AsFd) -> Result<PeerCredentials, PeerError> {
    let mut credentials = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    // Not through `socket_peercred`: its process id is never zero, but the kernel's is, for a
    // peer in a foreign process-id namespace.
    let refused = |errno| PeerError::System { operation: "getsockopt(SO_PEERCRED)", errno };
    let size = getsockopt(socket.as_fd(), libc::SO_PEERCRED, &mut credentials).map_err(refused)?;
    if size != size_of::<libc::ucred>() {
        return Err(refused(Errno::INVAL));
    }
    // What the kernel says of a socket that nobody connected to; no process has this user.
    if credentials.uid == u32::MAX {
        return Err(refused(Errno::NOTCONN));
    }
    let pid = u32::try_from(credentials.pid).unwrap_or(0);
    Ok(PeerCredentials { pid, uid: credentials.uid, gid: credentials.gid })
}

/// A descriptor that names the peer process itself, not its number: readable once it has ended.
///
/// Uses `SO_PEERPIDFD` (Linux 6.5). Before that it opens the process id of [`peer_credentials`]
/// and then checks that the number still belongs to the same user and that the socket is still
/// open: an id that was reused in between is only accepted when the same user reused it while a
/// forked child kept the socket.
///
/// # Errors
/// [`PeerError::Gone`] when the process has ended.
pub fn peer_pidfd(socket: impl AsFd) -> Result<OwnedFd, PeerError> {
    let socket = socket.as_fd();
    let mut descriptor: libc::c_int = -1;
    match getsockopt(socket, libc::SO_PEERPIDFD, &mut descriptor) {
        Ok(_) if descriptor >= 0 => {
            // SAFETY: the kernel made this descriptor for this call, and nobody else has it.
            Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
        }
        Ok(_) | Err(Errno::SRCH) => Err(PeerError::Gone),
        // Unknown to the kernel.
        Err(Errno::NOPROTOOPT) => pidfd_of_credentials(socket),
        Err(errno) => Err(PeerError::System { operation: "getsockopt(SO_PEERPIDFD)", errno }),
    }
}

fn pidfd_of_credentials(socket: BorrowedFd<'_>) -> Result<OwnedFd, PeerError> {
    let credentials = peer_credentials(socket)?;
    let raw = i32::try_from(credentials.pid).unwrap_or(0);
    let pid = Pid::from_raw(raw).ok_or(PeerError::Invisible)?;
    let pidfd = rustix::process::pidfd_open(pid, PidfdFlags::empty()).map_err(|errno| {
        if errno == Errno::SRCH {
            PeerError::Gone
        } else {
            PeerError::System { operation: "pidfd_open", errno }
        }
    })?;
    // The owner of /proc/PID is the effective user of whoever has the number now.
    let stat = rustix::fs::stat(format!("/proc/{raw}")).map_err(|errno| {
        if errno == Errno::NOENT {
            PeerError::Gone
        } else {
            PeerError::System { operation: "stat(/proc/PID)", errno }
        }
    })?;
    let ended = is_ready(pidfd.as_fd(), PollFlags::IN)?;
    let hung_up = is_ready(socket, PollFlags::empty())?;
    if stat.st_uid != credentials.uid || ended || hung_up {
        return Err(PeerError::Gone);
    }
    Ok(pidfd)
}

/// Whether `events`, or a hang-up, are pending.
fn is_ready(descriptor: BorrowedFd<'_>, events: PollFlags) -> Result<bool, PeerError> {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    let mut polled = [PollFd::from_borrowed_fd(descriptor, events)];
    rustix::io::retry_on_intr(|| rustix::event::poll(&mut polled, Some(&now)))
        .map(|ready| ready > 0)
        .map_err(|errno| PeerError::System { operation: "poll", errno })
}

/// Reads one fixed-size socket option. Returns the bytes that the kernel wrote.
fn getsockopt<T: Copy>(
    socket: BorrowedFd<'_>,
    option: libc::c_int,
    value: &mut T,
) -> Result<usize, Errno> {
    let mut size = size_of::<T>() as libc::socklen_t;
    // SAFETY: `value` is valid for writes of `size` bytes, and both options that this module
    // reads consist of integers, for which every bit pattern is valid.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            option,
            std::ptr::from_mut(value).cast(),
            &mut size,
        )
    };
    if result == 0 {
        Ok(size as usize)
    } else {
        Err(Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO))
    }
}

/// Where a Manager listens and a client looks unless told otherwise:
/// `$XDG_RUNTIME_DIR/orbitkv/manager.sock`; without that variable `/run/orbitkv/manager.sock` for
/// root or where that folder belongs to the caller, else `orbitkv-UID/manager.sock` in the
/// temporary directory.
pub fn socket_default_path() -> PathBuf {
    let uid = rustix::process::geteuid().as_raw();
    let run = Path::new("/run/orbitkv");
    let owns_run = uid == 0 || rustix::fs::stat(run).is_ok_and(|stat| stat.st_uid == uid);
    default_path(std::env::var_os("XDG_RUNTIME_DIR"), owns_run, uid, std::env::temp_dir())
}

fn default_path(
    runtime: Option<OsString>,
    owns_run: bool,
    uid: u32,
    temporary: PathBuf,
) -> PathBuf {
    // The specification of the variable demands an absolute path and says to ignore others.
    let runtime = runtime.map(PathBuf::from).filter(|path| path.is_absolute());
    let folder = match runtime {
        Some(runtime) => runtime.join("orbitkv"),
        None if owns_run => PathBuf::from("/run/orbitkv"),
        None => temporary.join(format!("orbitkv-{uid}")),
    };
    folder.join(SOCKET_NAME)
}

/// The lock file of a socket: a Manager holds `flock` on it for as long as it lives.
pub fn lock_path(socket: &Path) -> PathBuf {
    let mut path = socket.as_os_str().to_owned();
    path.push(".lock");
    PathBuf::from(path)
}

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

    use super::*;

    fn sockets() -> (OwnedFd, OwnedFd) {
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap()
    }

    #[test]
    fn a_peer_is_named_by_process_and_user() {
        let (ours, _theirs) = sockets();
        let credentials = peer_credentials(&ours).unwrap();
        assert_eq!(credentials.pid, std::process::id());
        assert_eq!(credentials.uid, rustix::process::geteuid().as_raw());
        assert_eq!(credentials.gid, rustix::process::getegid().as_raw());
    }

    #[test]
    fn what_is_no_socket_has_no_peer() {
        let unconnected =
            rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
        assert!(matches!(
            peer_credentials(&unconnected),
            Err(PeerError::System { errno: Errno::NOTCONN, .. })
        ));
        assert!(peer_pidfd(&unconnected).is_err());
        let file = std::fs::File::open("/dev/null").unwrap();
        assert!(matches!(
            peer_credentials(&file),
            Err(PeerError::System { errno: Errno::NOTSOCK, .. })
        ));
        assert!(matches!(peer_pidfd(&file), Err(PeerError::System { errno: Errno::NOTSOCK, .. })));
    }

    /// Both ways to a pidfd, on a peer that lives and then ends.
    #[test]
    fn a_pidfd_tells_that_its_process_has_ended() {
        let direct = |socket: BorrowedFd<'_>| peer_pidfd(socket);
        for pidfd_of in [direct, pidfd_of_credentials] {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("socket");
            let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
            // SAFETY: the child makes two system calls on what it inherited and never returns.
            let child = unsafe { libc::fork() };
            if child == 0 {
                let connected = std::os::unix::net::UnixStream::connect(&path);
                while connected.is_ok() {
                    // SAFETY: sleeps until the parent's signal, which ends the process.
                    unsafe { libc::pause() };
                }
                // SAFETY: ends the child without running the parent's destructors.
                unsafe { libc::_exit(1) };
            }
            assert!(child > 0);
            let (socket, _) = listener.accept().unwrap();
            let credentials = peer_credentials(&socket).unwrap();
            assert_eq!(credentials.pid, child as u32);
            let pidfd = pidfd_of(socket.as_fd()).unwrap();
            assert!(!is_ready(pidfd.as_fd(), PollFlags::IN).unwrap());
            let flags = rustix::io::fcntl_getfd(&pidfd).unwrap();
            assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));

            let pid = Pid::from_raw(child).unwrap();
            rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
            let mut polled = [PollFd::new(&pidfd, PollFlags::IN)];
            assert_eq!(rustix::event::poll(&mut polled, None), Ok(1));
            rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::empty()).unwrap();
            // Its number means nothing now; the descriptor still does.
            assert!(is_ready(pidfd.as_fd(), PollFlags::IN).unwrap());
            assert!(matches!(pidfd_of_credentials(socket.as_fd()), Err(PeerError::Gone)));
        }
    }

    #[test]
    fn the_socket_lies_where_its_user_may_write() {
        let path = |runtime: Option<&str>, owns_run| {
            default_path(runtime.map(OsString::from), owns_run, 1000, PathBuf::from("/tmp"))
        };
        assert_eq!(
            path(Some("/run/user/1000"), true),
            Path::new("/run/user/1000/orbitkv/manager.sock")
        );
        assert_eq!(path(None, true), Path::new("/run/orbitkv/manager.sock"));
        assert_eq!(path(None, false), Path::new("/tmp/orbitkv-1000/manager.sock"));
        assert_eq!(path(Some(""), false), Path::new("/tmp/orbitkv-1000/manager.sock"));
        assert_eq!(path(Some("relative"), true), Path::new("/run/orbitkv/manager.sock"));
        assert_eq!(lock_path(Path::new("/a/b.sock")), Path::new("/a/b.sock.lock"));
    }
}
