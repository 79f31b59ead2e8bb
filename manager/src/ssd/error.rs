//! Why an SSD file cannot be opened or checked.

use std::path::PathBuf;

use rustix::io::Errno;

use super::format::{FORMAT, Superblock};
use crate::error::remedy;

/// A failure of the SSD tier outside the data path, by cause.
#[derive(Debug, thiserror::Error)]
pub enum SsdError {
    /// The folder of the path does not exist.
    #[error("ssd file {path}: its folder does not exist; create it or choose another path")]
    FolderMissing {
        /// The file.
        path: PathBuf,
    },
    /// Something else than a file lies there.
    #[error("ssd path {path} is not a regular file; choose a path inside a folder")]
    NotAFile {
        /// The path.
        path: PathBuf,
    },
    /// A symbolic link that leads nowhere. What it names may lie anywhere: nothing is made there.
    #[error(
        "ssd path {path} is a symbolic link to {target}, which does not exist; make that file, or \
         remove the link"
    )]
    DanglingLink {
        /// The link.
        path: PathBuf,
        /// Where it leads.
        target: PathBuf,
    },
    /// Two paths of one tier name one file.
    #[error("ssd path {path} is the same file as {first}; name each file once")]
    SameFile {
        /// The second path.
        path: PathBuf,
        /// The first one.
        first: PathBuf,
    },
    /// The file system is memory.
    #[error(
        "ssd file {path} would lie on {file_system}, which is memory and not a disk; choose a path \
         on a disk file system such as ext4 or xfs"
    )]
    MemoryFileSystem {
        /// The file.
        path: PathBuf,
        /// What it lies on.
        file_system: &'static str,
    },
    /// Another process holds it.
    #[error(
        "ssd file {path} is in use{}; stop that process or choose another path",
        .holder.map(|pid| format!(" by process {pid}")).unwrap_or_default()
    )]
    Locked {
        /// The file.
        path: PathBuf,
        /// Process that holds the lock, where /proc/locks names it.
        holder: Option<u32>,
    },
    /// The file exists and something else wrote it. It was not touched.
    #[error("{path} is not an OrbitKV SSD file and was not touched; choose another path")]
    NotOurs {
        /// The file.
        path: PathBuf,
    },
    /// Another version of this program made it.
    #[error(
        "ssd file {path} has format {found}; this program knows {FORMAT}: remove the file (a cache \
         can be lost) or use the program that made it"
    )]
    UnknownFormat {
        /// The file.
        path: PathBuf,
        /// Its format.
        found: u32,
    },
    /// Ours, but neither superblock copy is whole.
    #[error(
        "ssd file {path} is damaged: no superblock copy is whole; remove the file (a cache can be \
         lost)"
    )]
    Damaged {
        /// The file.
        path: PathBuf,
    },
    /// The file is larger than it may be now.
    #[error(
        "ssd file {path} was made with {have} bytes and cannot shrink to {want}; raise the \
         capacity or remove the file (a cache can be lost)"
    )]
    Shrink {
        /// The file.
        path: PathBuf,
        /// Its capacity in bytes.
        have: u64,
        /// Capacity asked for, in bytes.
        want: u64,
    },
    /// The file's region table has no room for so many regions.
    #[error(
        "ssd file {path} can grow to {max} bytes, not to {want}; lower the capacity or remove the \
         file (a cache can be lost)"
    )]
    GrowLimit {
        /// The file.
        path: PathBuf,
        /// Largest capacity of this file in bytes.
        max: u64,
        /// Capacity asked for, in bytes.
        want: u64,
    },
    /// A new file of this capacity makes no sense.
    #[error(
        "ssd capacity of {want} bytes for {path} is out of range: {} to {} bytes a file",
        Superblock::CAPACITY_BYTES_MIN,
        Superblock::CAPACITY_BYTES_MAX
    )]
    Capacity {
        /// The file.
        path: PathBuf,
        /// Capacity asked for, in bytes.
        want: u64,
    },
    /// The disk is too full to hold the whole file.
    #[error(
        "ssd file {path} needs {needed} bytes more of its disk, which has {free} free; free space or \
         lower --ssd-capacity"
    )]
    NoSpace {
        /// The file.
        path: PathBuf,
        /// Bytes that its capacity takes beyond what the file has already.
        needed: u64,
        /// Bytes that the file system would still give.
        free: u64,
    },
    /// This process may not write so far into a file.
    #[error(
        "ssd file {path}: no file of this process may be longer than {limit} bytes, this one would be \
         {want}; raise the limit (ulimit -f, LimitFSIZE=) or lower --ssd-capacity"
    )]
    LengthLimit {
        /// The file.
        path: PathBuf,
        /// `RLIMIT_FSIZE`, in bytes.
        limit: u64,
        /// Length that its capacity takes, in bytes.
        want: u64,
    },
    /// The file system cannot do direct I/O.
    #[error(
        "ssd file {path}: its file system refuses O_DIRECT; choose another path, or say --ssd-direct off \
         (it then goes through the page cache)"
    )]
    NoDirectIo {
        /// The file.
        path: PathBuf,
    },
    /// io_uring was demanded and is refused.
    #[error(
        "io_uring is refused ({errno}): a seccomp profile (containers) or the sysctl \
         kernel.io_uring_disabled forbids it; allow it or choose the ssd engine auto or blocking"
    )]
    NoUring {
        /// What the kernel said.
        errno: Errno,
    },
    /// No path, or more than [`DEVICES_MAX`](super::DEVICES_MAX).
    #[error("an ssd tier has 1 to {} files, not {count}", super::DEVICES_MAX)]
    FileCount {
        /// How many.
        count: usize,
    },
    /// A system call failed.
    #[error(
        "ssd file {path}: {operation}{} failed: {errno}{}",
        of_range(*offset, *bytes),
        what_to_do(*errno)
    )]
    Io {
        /// What was tried.
        operation: &'static str,
        /// The file.
        path: PathBuf,
        /// Where, in bytes.
        offset: u64,
        /// How much, in bytes; zero where the call has no length.
        bytes: u64,
        /// What the kernel said.
        errno: Errno,
    },
    /// A thread or descriptor of the tier could not be made.
    #[error("ssd tier: {operation} failed: {errno}{}", remedy(Some(*errno)))]
    System {
        /// What was tried.
        operation: &'static str,
        /// What the kernel said.
        errno: Errno,
    },
}

impl SsdError {
    /// The image memory has not even room for a block.
    pub(crate) const NO_ROOM: Self =
        Self::System { operation: "reading slots without image memory", errno: Errno::NOMEM };

    /// True when the file is someone else's (or damaged, or of another format): wrong input, not a
    /// failing system.
    pub fn is_not_ours(&self) -> bool {
        matches!(self, Self::NotOurs { .. } | Self::UnknownFormat { .. } | Self::Damaged { .. })
    }
}

/// To go behind what the kernel said of a file.
fn what_to_do(errno: Errno) -> &'static str {
    match errno {
        Errno::NOENT => "; name a file that exists: that of a Manager's --ssd",
        Errno::ROFS => {
            "; its file system is mounted read-only: remount it for writing or choose another path"
        }
        Errno::ACCESS | Errno::PERM => {
            "; this user may not: change owner or mode of the file and its folder, or choose \
             another path"
        }
        Errno::IO => "; the disk fails: see the kernel's log, and choose another path",
        errno => remedy(Some(errno)),
    }
}

fn of_range(offset: u64, bytes: u64) -> String {
    match bytes {
        0 => String::new(),
        bytes => format!(" of {bytes} bytes at offset {offset}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_kernel_says_of_a_file_goes_with_its_path_and_what_to_do() {
        let said = |errno| {
            let path = PathBuf::from("/cache/tier");
            SsdError::Io { operation: "open", path, offset: 0, bytes: 0, errno }.to_string()
        };
        for (errno, what_to_do) in [
            (Errno::NOENT, "name a file that exists"),
            (Errno::ROFS, "remount it for writing or choose another path"),
            (Errno::ACCESS, "change owner or mode"),
            (Errno::IO, "see the kernel's log"),
            (Errno::MFILE, "ulimit -n"),
        ] {
            let message = said(errno);
            assert!(message.starts_with("ssd file /cache/tier: open failed: "), "{message}");
            assert!(message.contains(what_to_do) && message.lines().count() == 1, "{message}");
        }
    }
}
