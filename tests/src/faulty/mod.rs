//! A disk that fails as it is told, for real processes: a FUSE file system served by the test.
//!
//! Fault model. Whatever a request of a file's bytes may meet, switched on and off at run time, for
//! reads, writes or both, for a range of the file or all of it, for ever or a number of times:
//!
//! | [`Effect`] | what the process sees |
//! | --- | --- |
//! | `Errno` | the request fails: EIO, ENOSPC, EAGAIN, EINTR, …; nothing is read or written |
//! | `Short` | fewer bytes than asked are moved; the rest of a buffer is left as it was |
//! | `Flip` | one bit of what is read is wrong, not of what is stored |
//! | `Delay` | the answer comes later; bytes move at that time, not before |
//! | `Hang` | no answer until the fault is healed, at the longest for [`HANG_MAX`] |
//!
//! Besides: bits that rot where they are stored ([`FaultyDisk::rot`]), a disk that fills up
//! ([`FaultyDisk::set_space`]), a file system that cannot reserve space
//! ([`FaultyDisk::refuse_fallocate`]), and what anyone may do to a file by its name: cut it, grow it,
//! remove it, put another one there. Names, lengths and modes are always served: only bytes fail.
//!
//! What is not modelled: a write that tears (a request is served whole up to the bytes that its
//! effect lets pass), one that is reported good and is not stored, and a disk that forgets after a
//! crash: the store outlives every process but the test.
//!
//! The file system does direct I/O, so a request of a process comes here as it was made: alignment,
//! length (up to 1 MiB) and result. A process that waits for an answer cannot be killed before it
//! comes. So each fault is a guard that heals when dropped, the disk ends every request when it is
//! dropped, and the kernel does when the test's process is gone. Keep a Manager's guards below it.
//!
//! Mounted inside [`in_private_mounts`](crate::confine::in_private_mounts) only, so nothing is left
//! behind whatever happens.

mod delay;
mod plan;
mod serve;
mod store;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fuser::{BackgroundSession, Config, MountOption, Session};
use rustix::mount::UnmountFlags;
use tempfile::TempDir;

pub use self::plan::{Effect, Fault, On};
use self::serve::{Disk, Service};

/// Longest time that a request hangs: a test that forgot it must not hang its machine.
pub const HANG_MAX: Duration = Duration::from_secs(60);

/// Whether the kernel hands over many requests of one process at once.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Requests {
    /// As a drive does: all that io_uring has. A short write shows as EIO then.
    Parallel,
    /// As many as there are threads that wait for them, io_uring's own included.
    ByThread,
}

/// What the disk has served since it was mounted.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Served {
    /// Read requests answered, failed ones included.
    pub reads: u64,
    /// Bytes given to them.
    pub read_bytes: u64,
    /// Write requests answered, failed ones included.
    pub writes: u64,
    /// Bytes taken from them.
    pub written_bytes: u64,
    /// Requests that met a fault.
    pub faults: u64,
    /// Requests that wait for their answer now.
    pub waiting: u64,
}

/// The disk. Unmounted when dropped, with all its requests ended.
#[derive(Debug)]
pub struct FaultyDisk {
    disk: Arc<Disk>,
    session: Option<BackgroundSession>,
    at: PathBuf,
    /// Removed last, if it is this disk's.
    _folder: Option<TempDir>,
}

/// A fault of a disk. Healed when dropped.
#[derive(Debug)]
pub struct Injected {
    disk: Arc<Disk>,
    number: u64,
}

impl FaultyDisk {
    /// Mounts an empty disk at the folder `at`, which is made. Its bytes lie beside it.
    ///
    /// # Panics
    /// When it cannot be mounted.
    pub fn mount(at: &Path, requests: Requests) -> Self {
        std::fs::create_dir_all(at).unwrap();
        let disk = Arc::new(Disk::new(at.parent().unwrap()));
        let service = Service::new(disk.clone(), requests);
        let mut config = Config::default();
        let name = MountOption::FSName("orbitkv-faulty".into());
        config.mount_options = vec![name, MountOption::DefaultPermissions];
        config.acl = fuser::SessionACL::All;
        let session = Session::new(service, at, &config).unwrap_or_else(|error| {
            panic!("a FUSE file system at {}: {error}; needs root and /dev/fuse", at.display())
        });
        let session = Some(session.spawn().unwrap());
        Self { disk, session, at: at.to_owned(), _folder: None }
    }

    /// Mounts an empty disk in a new folder below `folder`, which goes with it.
    ///
    /// # Panics
    /// When it cannot be mounted.
    pub fn below(folder: &str, requests: Requests) -> Self {
        let folder = tempfile::tempdir_in(folder).unwrap();
        let mut disk = Self::mount(&folder.path().join("disk"), requests);
        disk._folder = Some(folder);
        disk
    }

    /// Where it is mounted.
    pub fn path(&self) -> &Path {
        &self.at
    }

    /// Every request that fits meets `fault` until the answer is dropped.
    #[must_use]
    pub fn inject(&self, fault: Fault) -> Injected {
        Injected { disk: self.disk.clone(), number: self.disk.plan().add(fault) }
    }

    /// What it has served.
    pub fn served(&self) -> Served {
        self.disk.served()
    }

    /// Waits until what it has served fulfils `is_so`.
    ///
    /// # Panics
    /// When that never comes.
    pub fn settle(&self, what: &str, is_so: impl Fn(&Served) -> bool) -> Served {
        let end = Instant::now() + crate::manager::PATIENCE;
        loop {
            let served = self.served();
            if is_so(&served) {
                return served;
            }
            assert!(Instant::now() < end, "never so: {what}; now {served:?}");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Flips one bit of a stored byte.
    ///
    /// # Panics
    /// When there is no such file or byte.
    pub fn rot(&self, name: &str, offset: u64) {
        self.disk.store().rot(name, offset);
    }

    /// The stored bytes of a file, as they are behind every fault.
    ///
    /// # Panics
    /// When there is no such file.
    pub fn stored(&self, name: &str) -> Vec<u8> {
        self.disk.store().bytes(name)
    }

    /// Leaves room for `bytes` more than are in use: then ENOSPC.
    pub fn set_space(&self, bytes: u64) {
        self.disk.store().set_space(bytes);
    }

    /// From now on the disk cannot reserve space.
    pub fn refuse_fallocate(&self) {
        self.disk.store().refuse_fallocate();
    }
}

impl Drop for FaultyDisk {
    fn drop(&mut self) {
        self.disk.end();
        // Ends every request with an error, and goes whoever still has files open there.
        let force = UnmountFlags::FORCE | UnmountFlags::DETACH;
        let _gone = rustix::mount::unmount(&self.at, force);
        if let Some(session) = self.session.take() {
            let _ended = session.join();
        }
        let _removed = std::fs::remove_dir(&self.at);
    }
}

impl Drop for Injected {
    fn drop(&mut self) {
        self.disk.heal(self.number);
    }
}
