//! The socket file: one Manager a socket, modes that no umask changes, visible only when ready.
//!
//! [`Claim::take`] makes the default folder and takes the lock; [`Claim::listen`] binds the socket
//! under a name of its own; [`SocketFile::publish`] renames it into place. The lock file of a socket
//! that was ever served is never removed: whoever removed it without holding it would let two
//! Managers hold two locks of one name. A start that fails takes away the one it made, while it
//! holds it: whoever opened it meanwhile finds that the name has another file, or none, and tries
//! again. The pid in it is for messages; only the lock says who lives.

use std::fs::File;
use std::io::{Read, Seek, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use orbitkv_shm_protocol::bootstrap::peer::lock_path;
use rustix::fs::{AtFlags, FileType, FlockOperation, Gid, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::config::SocketConfig;

/// How long a start waits for the lock: readers probe it for a moment (with a shared lock).
pub const LOCK_RETRY_MAX: Duration = Duration::from_millis(100);
/// Pause between two tries.
const LOCK_RETRY_STEP: Duration = Duration::from_millis(5);
/// Connections that the kernel may hold for us before they are accepted.
const BACKLOG: i32 = 128;
/// What the name of the socket ends with until it is published.
const UNPUBLISHED: &str = ".new";

/// Why the Manager cannot listen. Only the system could tell.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// Another Manager serves this socket.
    #[error(
        "{}: another Manager{} serves this socket: stop it, or choose another --socket",
        socket.display(),
        pid.map_or_else(String::new, |pid| format!(" (pid {pid})"))
    )]
    AlreadyRunning {
        /// The socket.
        socket: PathBuf,
        /// As it wrote it down.
        pid: Option<u32>,
    },
    /// The folder of the socket does not exist or cannot be used.
    #[error("{}: folder of the socket: {errno}: make it, or choose another --socket", folder.display())]
    Folder {
        /// The folder.
        folder: PathBuf,
        /// Why.
        errno: Errno,
    },
    /// The default folder belongs to somebody else, or is no folder.
    #[error(
        "{}: is not a folder of uid {uid}: remove it, or choose another --socket",
        folder.display()
    )]
    FolderNotOurs {
        /// The folder.
        folder: PathBuf,
        /// Whose it should be.
        uid: u32,
    },
    /// Something else has the name of the socket.
    #[error("{}: exists and is no socket: remove it, or choose another --socket", path.display())]
    NotASocket {
        /// The path.
        path: PathBuf,
    },
    /// A system call failed.
    #[error(
        "{}: {operation}: {errno}: put that right, or choose another --socket",
        path.display()
    )]
    System {
        /// What was tried.
        operation: &'static str,
        /// On what.
        path: PathBuf,
        /// Why not.
        errno: Errno,
    },
}

impl ListenError {
    fn system(operation: &'static str, path: &Path) -> impl FnOnce(Errno) -> Self {
        move |errno| Self::System { operation, path: path.to_owned(), errno }
    }
}

/// Modes and group of everything that is made: fixed by the configuration, not by a umask.
#[derive(Clone, Copy, Debug)]
struct Modes {
    folder: Mode,
    socket: Mode,
    lock: Mode,
    group: Option<Gid>,
}

impl Modes {
    fn new(config: &SocketConfig) -> Self {
        match config.allow_gids.first() {
            None => Self {
                folder: Mode::RWXU,
                socket: Mode::RUSR | Mode::WUSR,
                lock: Mode::RUSR | Mode::WUSR,
                group: None,
            },
            Some(gid) => Self {
                folder: Mode::RWXU | Mode::RGRP | Mode::XGRP,
                socket: Mode::RUSR | Mode::WUSR | Mode::RGRP | Mode::WGRP,
                // Members may probe the lock to see whether the Manager lives.
                lock: Mode::RUSR | Mode::WUSR | Mode::RGRP,
                group: Some(Gid::from_raw(*gid)),
            },
        }
    }
}

/// The right to serve one socket, held until it is dropped or the process dies.
#[derive(Debug)]
pub struct Claim {
    socket: PathBuf,
    modes: Modes,
    /// Holds the lock.
    _lock: File,
    /// We made the lock file and nobody was served yet.
    fresh: bool,
}

impl Claim {
    /// Makes the default folder where the operator named none, and takes the lock.
    ///
    /// # Errors
    /// [`ListenError::AlreadyRunning`] after [`LOCK_RETRY_MAX`]; whatever the system refuses.
    pub fn take(config: &SocketConfig) -> Result<Self, ListenError> {
        let socket = config.path.clone();
        let modes = Modes::new(config);
        let folder = match socket.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => folder,
            _ => Path::new("."),
        };
        if config.path_is_default {
            make_folder(folder, modes)?;
        } else {
            let stat = rustix::fs::stat(folder)
                .map_err(|errno| ListenError::Folder { folder: folder.to_owned(), errno })?;
            if FileType::from_raw_mode(stat.st_mode) != FileType::Directory {
                let errno = Errno::NOTDIR;
                return Err(ListenError::Folder { folder: folder.to_owned(), errno });
            }
        }
        match rustix::fs::lstat(&socket) {
            Ok(stat) if FileType::from_raw_mode(stat.st_mode) != FileType::Socket => {
                return Err(ListenError::NotASocket { path: socket });
            }
            Ok(_) | Err(Errno::NOENT) => {}
            Err(errno) => return Err(ListenError::system("lstat", &socket)(errno)),
        }
        let absent = identity(&lock_path(&socket)) == Err(Errno::NOENT);
        let lock = take_lock(&socket, modes)?;
        Ok(Self { socket, modes, _lock: lock, fresh: absent })
    }

    /// The lock file, if this start made it.
    pub fn fresh_lock(&self) -> Option<PathBuf> {
        self.fresh.then(|| lock_path(&self.socket))
    }

    /// Binds the socket under a name of its own; clients find it after [`SocketFile::publish`].
    ///
    /// # Errors
    /// Whatever the system refuses.
    pub fn listen(self) -> Result<(SocketFile, Listener), ListenError> {
        let mut unpublished = self.socket.clone().into_os_string();
        unpublished.push(UNPUBLISHED);
        let unpublished = PathBuf::from(unpublished);
        let refused = |operation| ListenError::system(operation, &unpublished);
        let socket = rustix::net::socket_with(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
            None,
        )
        .map_err(refused("socket"))?;
        match rustix::fs::unlink(&unpublished) {
            // Left by a Manager that was killed while it started; the lock says that it is gone.
            Ok(()) | Err(Errno::NOENT) => {}
            Err(errno) => return Err(refused("unlink")(errno)),
        }
        let address = SocketAddrUnix::new(&unpublished).map_err(refused("socket address"))?;
        rustix::net::bind(&socket, &address).map_err(refused("bind"))?;
        let mut file = SocketFile { claim: self, at: unpublished.clone(), identity: None };
        // Nobody can connect before `listen`, so the mode of the umask is never in force.
        rustix::fs::chmodat(
            rustix::fs::CWD,
            &unpublished,
            file.claim.modes.socket,
            AtFlags::empty(),
        )
        .map_err(refused("chmod"))?;
        if let Some(group) = file.claim.modes.group {
            rustix::fs::chownat(
                rustix::fs::CWD,
                &unpublished,
                None,
                Some(group),
                AtFlags::SYMLINK_NOFOLLOW,
            )
            .map_err(refused("chown to the group of --allow-gid"))?;
        }
        rustix::net::listen(&socket, BACKLOG).map_err(refused("listen"))?;
        file.identity = identity(&unpublished).ok();
        Ok((file, Listener { socket }))
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if let Some(lock) = self.fresh_lock() {
            let _ = rustix::fs::unlink(lock);
        }
    }
}

/// The socket's name. Removed when dropped, if it is still ours; the lock goes with it.
#[derive(Debug)]
pub struct SocketFile {
    claim: Claim,
    /// Where it is now.
    at: PathBuf,
    /// Device and inode.
    identity: Option<(u64, u64)>,
}

impl SocketFile {
    /// Makes the socket visible under its name, in one step. Returns whether a stale socket of a
    /// dead Manager was replaced.
    ///
    /// # Errors
    /// Whatever the system refuses.
    pub fn publish(&mut self) -> Result<bool, ListenError> {
        let stale = rustix::fs::lstat(&self.claim.socket).is_ok();
        rustix::fs::rename(&self.at, &self.claim.socket)
            .map_err(ListenError::system("rename", &self.at))?;
        self.at.clone_from(&self.claim.socket);
        self.claim.fresh = false;
        Ok(stale)
    }

    /// The name that clients use.
    pub fn path(&self) -> &Path {
        &self.claim.socket
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        // Somebody may have replaced it by hand: theirs stays.
        if self.identity.is_some() && identity(&self.at).ok() == self.identity {
            let _ = rustix::fs::unlink(&self.at);
        }
    }
}

/// The listening socket.
#[derive(Debug)]
pub struct Listener {
    socket: OwnedFd,
}

impl Listener {
    /// The next connection, if one waits.
    ///
    /// # Errors
    /// As `accept4`; connections that ended before they were accepted are skipped.
    pub fn accept(&self) -> Result<Option<OwnedFd>, Errno> {
        loop {
            match rustix::net::accept_with(
                &self.socket,
                SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
            ) {
                Ok(connection) => return Ok(Some(connection)),
                Err(Errno::AGAIN) => return Ok(None),
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(errno) => return Err(errno),
            }
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Makes the default folder, or takes one that is already ours, and gives it its mode.
fn make_folder(folder: &Path, modes: Modes) -> Result<(), ListenError> {
    match rustix::fs::mkdir(folder, Mode::RWXU) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(errno) => return Err(ListenError::Folder { folder: folder.to_owned(), errno }),
    }
    let uid = rustix::process::geteuid().as_raw();
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::RDONLY;
    let opened = rustix::fs::open(folder, flags, Mode::empty()).map_err(|errno| match errno {
        // A link or a file: somebody else put it there.
        Errno::LOOP | Errno::NOTDIR => {
            ListenError::FolderNotOurs { folder: folder.to_owned(), uid }
        }
        errno => ListenError::Folder { folder: folder.to_owned(), errno },
    })?;
    let stat = rustix::fs::fstat(&opened).map_err(ListenError::system("fstat", folder))?;
    if stat.st_uid != uid {
        return Err(ListenError::FolderNotOurs { folder: folder.to_owned(), uid });
    }
    rustix::fs::fchmod(&opened, modes.folder).map_err(ListenError::system("chmod", folder))?;
    if let Some(group) = modes.group {
        rustix::fs::fchown(&opened, None, Some(group))
            .map_err(ListenError::system("chown to the group of --allow-gid", folder))?;
    }
    Ok(())
}

/// Opens and locks the lock file, and writes our pid into it.
fn take_lock(socket: &Path, modes: Modes) -> Result<File, ListenError> {
    let path = lock_path(socket);
    let refused = |operation| ListenError::system(operation, &path);
    let started = Instant::now();
    loop {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let opened = rustix::fs::open(&path, flags, modes.lock).map_err(refused("open"))?;
        match rustix::fs::flock(&opened, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {
                let mut lock = File::from(opened);
                // Whoever removed the file meanwhile left us with a lock that nobody sees.
                let ours = lock.metadata().ok().map(|data| (data.dev(), data.ino()));
                if identity(&path).ok() != ours {
                    if started.elapsed() >= LOCK_RETRY_MAX {
                        return Err(refused("lock: the file is replaced again and again")(
                            Errno::AGAIN,
                        ));
                    }
                    continue;
                }
                rustix::fs::fchmod(&lock, modes.lock).map_err(refused("chmod"))?;
                if let Some(group) = modes.group {
                    rustix::fs::fchown(&lock, None, Some(group))
                        .map_err(refused("chown to the group of --allow-gid"))?;
                }
                write_pid(&mut lock).map_err(|error| {
                    refused("write")(Errno::from_io_error(&error).unwrap_or(Errno::IO))
                })?;
                return Ok(lock);
            }
            Err(Errno::AGAIN | Errno::INTR) if started.elapsed() < LOCK_RETRY_MAX => {
                std::thread::sleep(LOCK_RETRY_STEP);
            }
            Err(Errno::AGAIN) => {
                let pid = read_pid(&mut File::from(opened));
                return Err(ListenError::AlreadyRunning { socket: socket.to_owned(), pid });
            }
            Err(errno) => return Err(refused("flock")(errno)),
        }
    }
}

fn write_pid(lock: &mut File) -> std::io::Result<()> {
    lock.set_len(0)?;
    lock.rewind()?;
    writeln!(lock, "{}", std::process::id())
}

fn read_pid(lock: &mut File) -> Option<u32> {
    let mut text = String::new();
    lock.take(32).read_to_string(&mut text).ok()?;
    text.trim().parse().ok()
}

fn identity(path: &Path) -> Result<(u64, u64), Errno> {
    let stat = rustix::fs::lstat(path)?;
    Ok((stat.st_dev, stat.st_ino))
}
