//! What a machine allows the tier to do, tried without a tier.

use std::fs::File;
use std::io::ErrorKind;
use std::path::Path;

use rustix::io::Errno;

use super::error::SsdError;
use super::file::{Access, SsdFile};
use super::format::{BLOCK_BYTES, Block};
use super::io::TaskRun;
use super::uring::UringEngine;

/// Bytes that a trial file reserves.
const TRIAL_BYTES: u64 = 1 << 20;

/// Asks for a ring as a worker does, and enters it once.
///
/// # Errors
/// What the kernel said: EPERM or ENOSYS where io_uring is forbidden.
pub fn probe_ring() -> Result<TaskRun, Errno> {
    UringEngine::probe()
}

/// Registers a small buffer with a ring.
///
/// # Errors
/// What the kernel said: ENOMEM where no memory may be locked.
pub fn probe_buffers() -> Result<(), Errno> {
    UringEngine::probe_buffers()
}

/// Kind of a file system, as far as it matters here.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FileSystem {
    /// A disk file system that is known to do all that is needed.
    Disk(&'static str),
    /// A container's layer.
    Overlay,
    /// Somebody else's disk.
    Network(&'static str),
    /// Its magic number.
    Other(u64),
}

impl FileSystem {
    fn of(magic: u64) -> Self {
        match magic {
            0xef53 => Self::Disk("ext4"),
            0x5846_5342 => Self::Disk("xfs"),
            0x9123_683e => Self::Disk("btrfs"),
            0xf2f5_2010 => Self::Disk("f2fs"),
            0x2fc1_2fc1 => Self::Disk("zfs"),
            0x794c_7630 => Self::Overlay,
            0x6969 => Self::Network("nfs"),
            0xff53_4d42 | 0xfe53_4d42 => Self::Network("smb"),
            0x00c3_6400 => Self::Network("ceph"),
            0x6573_5546 => Self::Network("fuse"),
            magic => Self::Other(magic),
        }
    }

    /// Its name.
    pub fn name(self) -> String {
        match self {
            Self::Disk(name) | Self::Network(name) => name.to_owned(),
            Self::Overlay => "overlayfs".to_owned(),
            Self::Other(magic) => format!("a file system of type {magic:#x}"),
        }
    }
}

/// What a folder allows.
#[derive(Clone, Copy, Debug)]
pub struct FolderProbe {
    /// What it is on.
    pub file_system: FileSystem,
    /// Bytes that are free there.
    pub free_bytes: u64,
    /// Space can be reserved.
    pub preallocated: bool,
}

/// Makes a file in `folder` as the tier would, with direct I/O, writes a block to it, reads it back
/// and removes it.
///
/// # Errors
/// Where that ended, as a start of the tier would say it.
pub fn probe_folder(folder: &Path) -> Result<FolderProbe, SsdError> {
    let path = folder.join(format!(".orbitkv-doctor-{}", std::process::id()));
    // Only what this call made is written to and removed. Whatever else hinders it, `open` names.
    if let Err(error) = File::create_new(&path)
        && error.kind() == ErrorKind::AlreadyExists
    {
        return Err(SsdError::System { operation: "making a trial file", errno: Errno::EXIST });
    }
    let probed = try_file(&path);
    let _not_made = std::fs::remove_file(&path);
    let preallocated = probed?;
    let system = |operation| move |errno| SsdError::System { operation, errno };
    let kind = rustix::fs::statfs(folder).map_err(system("statfs"))?;
    let space = rustix::fs::statvfs(folder).map_err(system("statvfs"))?;
    Ok(FolderProbe {
        file_system: FileSystem::of(kind.f_type as u64),
        free_bytes: space.f_bavail.saturating_mul(space.f_frsize),
        preallocated,
    })
}

fn try_file(path: &Path) -> Result<bool, SsdError> {
    let mut file = SsdFile::open(path, Access::Tier { direct: true })?;
    file.reserve(TRIAL_BYTES)?;
    let mut written = [Block::ZERO];
    written[0].0.fill(0x5a);
    file.write_blocks(&written, BLOCK_BYTES as u64)?;
    let mut read = [Block::ZERO];
    file.read_blocks(&mut read, BLOCK_BYTES as u64)?;
    if read[0].0 != written[0].0 {
        let errno = Errno::IO;
        return Err(SsdError::System { operation: "comparison of a written block", errno });
    }
    Ok(file.is_preallocated())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_tried_and_left_as_it_was() {
        let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        match probe_folder(folder.path()) {
            Ok(probe) => assert!(probe.free_bytes > 0, "{probe:?}"),
            Err(error) => {
                assert!(matches!(error, SsdError::NoDirectIo { .. }), "{error}");
                println!("not run: the sources are on a file system without direct I/O: {error}");
            }
        }
        assert_eq!(folder.path().read_dir().unwrap().count(), 0, "left behind");
    }

    #[test]
    fn a_file_of_somebody_else_is_left_alone() {
        let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let theirs = folder.path().join("theirs");
        std::fs::write(&theirs, "theirs").unwrap();
        let trial = folder.path().join(format!(".orbitkv-doctor-{}", std::process::id()));
        std::os::unix::fs::symlink(&theirs, &trial).unwrap();
        let refused = probe_folder(folder.path()).unwrap_err();
        assert!(refused.to_string().contains("trial file"), "{refused}");
        assert!(trial.is_symlink());
        assert_eq!(std::fs::read_to_string(theirs).unwrap(), "theirs");
    }

    #[test]
    fn known_magic_numbers_have_names() {
        assert_eq!(FileSystem::of(0xef53), FileSystem::Disk("ext4"));
        assert_eq!(FileSystem::of(0x794c_7630), FileSystem::Overlay);
        assert_eq!(FileSystem::of(7).name(), "a file system of type 0x7");
    }
}
