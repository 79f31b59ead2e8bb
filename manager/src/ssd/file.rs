//! One SSD file: claimed, preallocated, read and written in whole blocks.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::ErrorKind;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FallocateFlags, FlockOperation, OFlags};
use rustix::io::Errno;
use rustix::process::Resource;

use super::error::SsdError;
use super::format::{BLOCK_BYTES, Block};

const TMPFS: u64 = 0x0102_1994;
const RAMFS: u64 = 0x8584_58F6;
const OVERLAYFS: u64 = 0x794C_7630;
/// A killed process is gone before its last disk I/O is: only then does the kernel let go of its
/// files. So long a start waits for that.
const DEAD_HOLDER_WAIT: Duration = Duration::from_secs(15);
/// The same where the kernel's table may mean another file.
const UNSURE_HOLDER_WAIT: Duration = Duration::from_secs(5);
const DEAD_HOLDER_PAUSE: Duration = Duration::from_millis(5);

/// An open SSD file, locked against every other process until it is dropped.
#[derive(Debug)]
pub(crate) struct SsdFile {
    file: File,
    path: PathBuf,
    /// There was none before.
    made: bool,
    direct: bool,
    preallocated: bool,
}

/// How to open.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Access {
    /// Read and write, made if absent, exclusively locked; with direct I/O or without.
    Tier {
        /// `O_DIRECT`.
        direct: bool,
    },
    /// Read only: nothing is made or changed. Locked against a tier, not against other readers.
    Inspect,
}

impl SsdFile {
    /// Opens and locks the file. It may be empty afterwards, or hold anything.
    pub(crate) fn open(path: &Path, access: Access) -> Result<Self, SsdError> {
        let path = path.to_owned();
        match path.metadata() {
            Ok(metadata) if !metadata.is_file() => return Err(SsdError::NotAFile { path }),
            Err(error) if error.kind() == ErrorKind::NotFound => {
                if let Ok(target) = path.read_link() {
                    return Err(SsdError::DanglingLink { path, target });
                }
            }
            // What else is wrong shows below.
            _ => {}
        }
        if matches!(access, Access::Tier { .. }) {
            let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
            let folder = folder.unwrap_or(Path::new("."));
            if !folder.is_dir() {
                return Err(SsdError::FolderMissing { path });
            }
            // Before anything is made there.
            if let Ok(stat) = rustix::fs::statfs(folder) {
                refuse_memory(stat.f_type as u64, &path)?;
            }
        }
        let (write, lock) = match access {
            Access::Tier { .. } => (true, FlockOperation::NonBlockingLockExclusive),
            Access::Inspect => (false, FlockOperation::NonBlockingLockShared),
        };
        let absent =
            path.symlink_metadata().is_err_and(|error| error.kind() == ErrorKind::NotFound);
        let opened =
            OpenOptions::new().read(true).write(write).create(write).mode(0o600).open(&path);
        let file = match opened {
            Ok(file) => file,
            Err(error) => return Err(io_error("open", &path, 0, 0, errno_of(&error))),
        };
        let made = absent && write;
        let mut file = Self { file, path, made, direct: false, preallocated: false };
        file.take(access, lock).inspect_err(|error| {
            // One that another process has was made by that process, a moment before us.
            if made && !matches!(error, SsdError::Locked { .. }) {
                file.remove();
            }
        })?;
        Ok(file)
    }

    fn take(&mut self, access: Access, lock: FlockOperation) -> Result<(), SsdError> {
        self.check_file_system()?;
        self.lock(lock)?;
        match access {
            Access::Tier { direct: true } => {
                if !self.set_direct()? {
                    return Err(SsdError::NoDirectIo { path: self.path.clone() });
                }
            }
            // Checking a cache should not fill the page cache, but must not fail for it either.
            Access::Inspect => _ = self.set_direct()?,
            Access::Tier { direct: false } => {}
        }
        Ok(())
    }

    /// Whether this made the file.
    pub(crate) fn is_made(&self) -> bool {
        self.made
    }

    /// Removes the name. The lock stays until the file is closed.
    pub(crate) fn remove(&self) {
        let _gone = std::fs::remove_file(&self.path);
    }

    /// Where it is.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Whether `path` leads to this very file, by whatever name.
    pub(crate) fn is_at(&self, path: &Path) -> bool {
        let identity = |metadata: std::fs::Metadata| (metadata.dev(), metadata.ino());
        let ours = self.file.metadata().map(identity);
        ours.is_ok_and(|ours| path.metadata().map(identity).is_ok_and(|theirs| theirs == ours))
    }

    /// True when I/O goes around the page cache.
    pub(crate) fn is_direct(&self) -> bool {
        self.direct
    }

    /// True when all its space is reserved, so that no write can run out of it.
    pub(crate) fn is_preallocated(&self) -> bool {
        self.preallocated
    }

    /// For the engines.
    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// Length in bytes.
    pub(crate) fn len(&self) -> Result<u64, SsdError> {
        let metadata = self.file.metadata().map_err(|error| self.failed("stat", 0, 0, &error))?;
        Ok(metadata.len())
    }

    /// Reserves the space of the whole file and gives it its length. A file system that cannot
    /// reserve gets the length only, and says so in the log and in
    /// [`is_preallocated`](Self::is_preallocated).
    pub(crate) fn reserve(&mut self, capacity_bytes: u64) -> Result<(), SsdError> {
        let before = self.len()?;
        let reserve = |bytes| rustix::fs::fallocate(&self.file, FallocateFlags::empty(), 0, bytes);
        // The first block is there already: this asks only whether the file system can reserve.
        let reserved = match reserve(BLOCK_BYTES as u64) {
            Ok(()) => {
                self.check_space(capacity_bytes)?;
                reserve(capacity_bytes)
            }
            cannot => cannot,
        };
        match reserved {
            Ok(()) => self.preallocated = true,
            Err(Errno::NOSPC | Errno::DQUOT | Errno::FBIG) => {
                // A part may have been reserved: what the file did not have goes back.
                let _ = self.file.set_len(before);
                let (needed, free) = self.space(capacity_bytes)?;
                return Err(SsdError::NoSpace { path: self.path.clone(), needed, free });
            }
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => {
                tracing::warn!(
                    path = %self.path.display(),
                    "the file system cannot reserve space: writes may fail when the disk is full"
                );
                if self.len()? < capacity_bytes {
                    self.file
                        .set_len(capacity_bytes)
                        .map_err(|error| self.failed("set length", 0, capacity_bytes, &error))?;
                }
            }
            Err(errno) => {
                return Err(io_error("fallocate", &self.path, 0, capacity_bytes, errno));
            }
        }
        // The file holds everybody's KV. Not ours to change is no reason to stop.
        let _ = self.file.set_permissions(std::fs::Permissions::from_mode(0o600));
        Ok(())
    }

    /// Refuses what this process may not write: the disk has the space, each write would fail.
    pub(crate) fn check_limit(&self, capacity_bytes: u64) -> Result<(), SsdError> {
        match rustix::process::getrlimit(Resource::Fsize).current {
            Some(limit) if limit < capacity_bytes => {
                let path = self.path.clone();
                Err(SsdError::LengthLimit { path, limit, want: capacity_bytes })
            }
            _ => Ok(()),
        }
    }

    /// Refuses before the disk is filled to the brim for nothing.
    pub(crate) fn check_space(&self, capacity_bytes: u64) -> Result<(), SsdError> {
        let (needed, free) = self.space(capacity_bytes)?;
        if needed > free {
            return Err(SsdError::NoSpace { path: self.path.clone(), needed, free });
        }
        Ok(())
    }

    /// Bytes that a capacity takes beyond what the file has, and bytes that the disk has.
    fn space(&self, capacity_bytes: u64) -> Result<(u64, u64), SsdError> {
        let metadata = self.file.metadata().map_err(|error| self.failed("stat", 0, 0, &error))?;
        let free = rustix::fs::fstatvfs(&self.file)
            .map(|stat| match stat.f_blocks {
                // Some file systems do not know how large they are.
                0 => u64::MAX,
                _ => stat.f_bavail.saturating_mul(stat.f_frsize),
            })
            .map_err(|errno| io_error("statvfs", &self.path, 0, 0, errno))?;
        Ok((capacity_bytes.saturating_sub(metadata.blocks().saturating_mul(512)), free))
    }

    /// Fills `blocks` from `offset`. A file that ends before is an error (`Errno::NODATA`).
    pub(crate) fn read_blocks(&self, blocks: &mut [Block], offset: u64) -> Result<(), SsdError> {
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(blocks);
        let len = bytes.len() as u64;
        let failed = |errno| io_error("read", &self.path, offset, len, errno);
        let mut done = 0;
        while done < bytes.len() {
            match rustix::io::pread(&self.file, &mut bytes[done..], offset + done as u64) {
                // The rest after a part of a block would not be aligned; only the end of the file
                // gives one.
                Ok(moved) if moved == 0 || !moved.is_multiple_of(BLOCK_BYTES) => {
                    return Err(failed(Errno::NODATA));
                }
                Ok(moved) => done += moved,
                Err(Errno::INTR) => {}
                Err(errno) => return Err(failed(errno)),
            }
        }
        Ok(())
    }

    /// Writes all of `blocks` at `offset`.
    pub(crate) fn write_blocks(&self, blocks: &[Block], offset: u64) -> Result<(), SsdError> {
        let bytes: &[u8] = bytemuck::cast_slice(blocks);
        let len = bytes.len() as u64;
        self.file
            .write_all_at(bytes, offset)
            .map_err(|error| self.failed("write", offset, len, &error))
    }

    /// Returns when everything written so far survives a power failure.
    pub(crate) fn sync(&self) -> Result<(), SsdError> {
        self.file.sync_data().map_err(|error| self.failed("fdatasync", 0, 0, &error))
    }

    /// True when the first `bytes` bytes, or all there are, were never written.
    pub(crate) fn is_blank(&self, bytes: u64) -> Result<bool, SsdError> {
        let mut block = [Block::ZERO];
        for offset in (0..bytes.min(self.len()?)).step_by(BLOCK_BYTES) {
            match self.read_blocks(&mut block, offset) {
                Ok(()) if block[0].is_zero() => {}
                Ok(()) => return Ok(false),
                // The file ends inside the block: nothing that we made.
                Err(SsdError::Io { errno: Errno::NODATA, .. }) => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    /// Turns direct I/O on where the file system can do it; says whether.
    fn set_direct(&mut self) -> Result<bool, SsdError> {
        let failed = |errno| io_error("fcntl", &self.path, 0, 0, errno);
        let flags = rustix::fs::fcntl_getfl(&self.file).map_err(failed)?;
        match rustix::fs::fcntl_setfl(&self.file, flags | OFlags::DIRECT) {
            Ok(()) => {}
            Err(Errno::INVAL) => return Ok(false),
            Err(errno) => return Err(failed(errno)),
        }
        // A layered file system takes the flag and learns only from the one below that it cannot.
        let mut block = [Block::ZERO];
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut block);
        self.direct = rustix::io::pread(&self.file, bytes, 0) != Err(Errno::INVAL);
        if !self.direct {
            rustix::fs::fcntl_setfl(&self.file, flags).map_err(failed)?;
        }
        Ok(self.direct)
    }

    fn check_file_system(&self) -> Result<(), SsdError> {
        let stat = rustix::fs::fstatfs(&self.file)
            .map_err(|errno| io_error("statfs", &self.path, 0, 0, errno))?;
        refuse_memory(stat.f_type as u64, &self.path)?;
        if stat.f_type as u64 == OVERLAYFS {
            // The layer that is written may be memory. In a container its folder is seldom seen.
            if let Some(upper) = self.upper_folder()
                && let Ok(stat) = rustix::fs::statfs(&upper)
            {
                refuse_memory(stat.f_type as u64, &self.path)?;
            }
            tracing::warn!(
                path = %self.path.display(),
                "overlayfs costs up to a quarter of the bandwidth with small pages, and a \
                 container's layer goes with it; mount a volume for the SSD file"
            );
        }
        Ok(())
    }

    /// The folder that has what is written to this file's overlay, as the kernel's table has it.
    fn upper_folder(&self) -> Option<PathBuf> {
        let mounts = std::fs::read("/proc/self/mountinfo").ok()?;
        upper_folder_in(&mounts, self.file.metadata().ok()?.dev())
    }

    /// Locks the file, or says who has it. Waits only for a process that is dead already.
    fn lock(&self, operation: FlockOperation) -> Result<(), SsdError> {
        let begun = Instant::now();
        loop {
            match rustix::fs::flock(&self.file, operation) {
                Ok(()) => return Ok(()),
                Err(Errno::WOULDBLOCK) => {}
                Err(errno) => return Err(io_error("flock", &self.path, 0, 0, errno)),
            }
            let holder = self.lock_holder();
            // The table hides a holder that is dead and gone (a ring of it may have the file yet),
            // and one whose line is not surely this file's may be anybody.
            let lives = holder.is_some_and(|of| of.certain && !is_dead(of.process));
            let patience = match holder {
                Some(holder) if !holder.certain => UNSURE_HOLDER_WAIT,
                _ => DEAD_HOLDER_WAIT,
            };
            if lives || begun.elapsed() >= patience {
                let holder = holder.map(|holder| holder.process);
                return Err(SsdError::Locked { path: self.path.clone(), holder });
            }
            std::thread::sleep(DEAD_HOLDER_PAUSE);
        }
    }

    /// Who holds the lock, as the kernel's table has it.
    fn lock_holder(&self) -> Option<Holder> {
        let metadata = self.file.metadata().ok()?;
        let table = std::fs::read_to_string("/proc/locks").ok()?;
        lock_holder_in(&table, metadata.dev(), metadata.ino())
    }

    fn failed(
        &self,
        operation: &'static str,
        offset: u64,
        bytes: u64,
        error: &std::io::Error,
    ) -> SsdError {
        io_error(operation, &self.path, offset, bytes, errno_of(error))
    }
}

fn refuse_memory(file_system: u64, path: &Path) -> Result<(), SsdError> {
    let file_system = match file_system {
        TMPFS => "tmpfs",
        RAMFS => "ramfs",
        _ => return Ok(()),
    };
    Err(SsdError::MemoryFileSystem { path: path.to_owned(), file_system })
}

/// The `upperdir` of the overlay with this device number in /proc/self/mountinfo.
fn upper_folder_in(mounts: &[u8], device: u64) -> Option<PathBuf> {
    let device = format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
    mounts.split(|byte| *byte == b'\n').find_map(|line| {
        // "36 35 0:45 / /data rw,relatime shared:1 - overlay overlay rw,lowerdir=/a,upperdir=/b"
        let mut words = line.split(|byte| *byte == b' ');
        let of_device = words.nth(2)? == device.as_bytes();
        let options = words.next_back().filter(|_| of_device)?;
        let mut options = options.split(|byte| *byte == b',');
        let upper = options.find_map(|option| option.strip_prefix(b"upperdir="))?;
        Some(PathBuf::from(OsString::from_vec(unescaped(upper))))
    })
}

/// Bytes of the kernel's table of mounts, where spaces and the like stand as "\\040".
fn unescaped(mut bytes: &[u8]) -> Vec<u8> {
    let mut plain = Vec::new();
    while let [first, rest @ ..] = bytes {
        let octal = match bytes {
            [b'\\', digits @ ..] => digits.get(..3).and_then(|digits| str::from_utf8(digits).ok()),
            _ => None,
        };
        match octal.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) => {
                plain.push(byte);
                bytes = &bytes[4..];
            }
            None => {
                plain.push(*first);
                bytes = rest;
            }
        }
    }
    plain
}

/// Whether a process has ended. One that /proc does not show at all has.
fn is_dead(process: u32) -> bool {
    match std::fs::read_to_string(format!("/proc/{process}/stat")) {
        Ok(stat) => has_ended(&stat),
        // Gone before it was opened, or between that and the read.
        Err(error) => {
            error.kind() == std::io::ErrorKind::NotFound
                || error.raw_os_error() == Some(libc::ESRCH)
        }
    }
}

/// Whether a line of /proc/PID/stat tells of a zombie: "4711 (any name) Z 1 ...".
fn has_ended(stat: &str) -> bool {
    let state = stat.rsplit_once(')').and_then(|(_, rest)| rest.trim_start().chars().next());
    matches!(state, Some('Z' | 'X'))
}

/// Who holds a lock.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Holder {
    process: u32,
    /// The table names this file's device too. Layered file systems have one of their own there.
    certain: bool,
}

/// The process of the FLOCK line of /proc/locks that names `inode` on `device`, else of the first
/// that names such an inode at all.
fn lock_holder_in(table: &str, device: u64, inode: u64) -> Option<Holder> {
    let (number, device) = (
        format!(":{inode}"),
        format!("{:02x}:{:02x}:{inode}", rustix::fs::major(device), rustix::fs::minor(device)),
    );
    let holders = table.lines().filter_map(|line| {
        // "12: FLOCK  ADVISORY  WRITE 4711 fe:00:1234 0 EOF"
        let mut words = line.split_whitespace().skip(1);
        let kind = words.next()?;
        let process = words.nth(2)?.parse().ok()?;
        let file = words.next()?;
        let certain = file == device;
        (kind == "FLOCK" && file.ends_with(&number)).then_some(Holder { process, certain })
    });
    holders.reduce(|first, next| if next.certain && !first.certain { next } else { first })
}

/// The errno in `error`. The standard library has errors of its own for a transfer that ends
/// early: those become `NODATA`.
fn errno_of(error: &std::io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::NODATA)
}

fn io_error(
    operation: &'static str,
    path: &Path,
    offset: u64,
    bytes: u64,
    errno: Errno,
) -> SsdError {
    SsdError::Io { operation, path: path.to_owned(), offset, bytes, errno }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_holder_of_a_lock_is_found_in_the_kernels_table() {
        let table = "1: POSIX  ADVISORY  WRITE 10 fe:00:77 0 EOF\n\
                     2: FLOCK  ADVISORY  WRITE 4711 fe:00:77 0 EOF\n\
                     3: FLOCK  ADVISORY  WRITE 12 fe:00:177 0 EOF\n";
        let (disk, other) = (rustix::fs::makedev(0xfe, 0), rustix::fs::makedev(0, 0x2a));
        let holder = |process, certain| Some(Holder { process, certain });
        assert_eq!(lock_holder_in(table, disk, 77), holder(4711, true));
        assert_eq!(lock_holder_in(table, other, 77), holder(4711, false));
        assert_eq!(lock_holder_in(table, disk, 7), None);
        assert_eq!(lock_holder_in("garbage", disk, 7), None);
        let twice = format!("{table}4: FLOCK  ADVISORY  WRITE 13 00:2a:77 0 EOF\n");
        assert_eq!(lock_holder_in(&twice, other, 77), holder(13, true));
    }

    #[test]
    fn the_layer_that_an_overlay_writes_is_found_in_the_kernels_table() {
        let mounts = b"22 1 254:0 / / rw - ext4 /dev/vda rw,upperdir=/no\n\
            36 22 0:45 / /other rw,relatime - overlay overlay rw,upperdir=/other/up\n\
            37 22 0:46 / /data rw shared:1 - overlay overlay rw,lowerdir=/a,upperdir=/with\\040a\\134,workdir=/w\n\
            38 22 0:47 / /read ro - overlay overlay ro,lowerdir=/a:/b\n";
        let upper = |minor| upper_folder_in(mounts, rustix::fs::makedev(0, minor));
        assert_eq!(upper(45), Some(PathBuf::from("/other/up")));
        assert_eq!(upper(46), Some(PathBuf::from("/with a\\")));
        assert_eq!((upper(47), upper(4)), (None, None));
        assert_eq!(upper_folder_in(b"garbage\n\n", 0), None);
    }

    #[test]
    fn only_a_dead_holder_is_worth_waiting_for() {
        assert!(!is_dead(std::process::id()));
        assert!(is_dead(u32::MAX));
        assert!(has_ended("12 (a) R) Z 1 12"));
        assert!(!has_ended("12 (Z) S 1 12"));
        assert!(!has_ended(""));
    }

    #[test]
    fn a_file_is_claimed_once_and_its_holder_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tier");
        let held = SsdFile::open(&path, Access::Tier { direct: false }).unwrap();
        for access in [Access::Tier { direct: true }, Access::Inspect] {
            match SsdFile::open(&path, access) {
                Err(SsdError::Locked { holder, .. }) => {
                    assert!(holder.is_none_or(|pid| pid == std::process::id()), "{holder:?}");
                }
                other => panic!("{other:?}"),
            }
        }
        drop(held);
        let _reader = SsdFile::open(&path, Access::Inspect).unwrap();
        let _other_reader = SsdFile::open(&path, Access::Inspect).unwrap();
    }

    #[test]
    fn a_new_file_is_private_and_keeps_its_length() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("with space ü");
        let mut file = SsdFile::open(&path, Access::Tier { direct: true }).unwrap();
        assert!(file.is_blank(1 << 20).unwrap());
        file.reserve(3 << 20).unwrap();
        let metadata = path.metadata().unwrap();
        assert_eq!(metadata.len(), 3 << 20);
        assert_eq!(metadata.permissions().mode() & 0o777, 0o600);
        if file.is_preallocated() {
            assert!(metadata.blocks() * 512 >= 3 << 20);
        }
    }

    #[test]
    fn paths_that_cannot_hold_a_tier_are_refused_by_cause() {
        let folder = tempfile::tempdir().unwrap();
        let tier = Access::Tier { direct: false };
        let missing = folder.path().join("no").join("tier");
        assert!(matches!(SsdFile::open(&missing, tier), Err(SsdError::FolderMissing { .. })));
        assert!(matches!(SsdFile::open(folder.path(), tier), Err(SsdError::NotAFile { .. })));
        assert!(!missing.exists());
        let absent = folder.path().join("absent");
        let error = SsdFile::open(&absent, Access::Inspect).unwrap_err();
        assert!(matches!(error, SsdError::Io { errno: Errno::NOENT, .. }), "{error}");
        assert!(!absent.exists(), "looking makes nothing");
        if Path::new("/dev/shm").is_dir() {
            let path = PathBuf::from(format!("/dev/shm/orbitkv-ssd-test-{}", std::process::id()));
            let refused = SsdFile::open(&path, tier);
            assert!(!path.exists(), "nothing is left behind");
            assert!(matches!(refused, Err(SsdError::MemoryFileSystem { .. })), "{refused:?}");
        }
    }

    #[test]
    fn reading_past_the_end_is_an_error_that_says_where() {
        let folder = tempfile::tempdir().unwrap();
        let file =
            SsdFile::open(&folder.path().join("tier"), Access::Tier { direct: false }).unwrap();
        file.write_blocks(&[Block([7; 4096])], 4096).unwrap();
        let mut blocks = [Block::ZERO; 2];
        file.read_blocks(&mut blocks, 0).unwrap();
        assert_eq!((blocks[0].is_zero(), blocks[1].0[0]), (true, 7));
        let error = file.read_blocks(&mut blocks, 4096).unwrap_err();
        assert!(
            matches!(error, SsdError::Io { offset: 4096, bytes: 8192, errno: Errno::NODATA, .. }),
            "{error}"
        );
    }
}
