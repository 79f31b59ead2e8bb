//! Where a run keeps its socket and its SSD file: a folder of its own, removed at the end.

use std::env;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::builder::{PathBufValueParser, TypedValueParser};
use orbitkv_manager::config::SOCKET_PATH_BYTES_MAX;
use rustix::fs::{FlockOperation, flock, statfs};
use tempfile::TempDir;

use crate::exit::ToolError;

/// File systems that keep their files in memory.
const MEMORY_FILE_SYSTEMS: [rustix::fs::FsWord; 2] = [0x0102_1994, 0x8584_58f6];

/// Names of the folders.
const PREFIX: &str = "run-";
/// File in a folder whose lock says that the run is still going.
const OWNER: &str = "owner.lock";
/// A folder without that file is left alone until it is this old: its run may just begin.
const BEGINNING_MAX: Duration = Duration::from_secs(60);
/// Folders of dead runs that one start removes.
const LEFTOVERS_MAX: usize = 64;

/// Takes a path that fits the address of a socket.
pub(crate) fn socket_path_parser() -> impl TypedValueParser<Value = PathBuf> {
    PathBufValueParser::new().try_map(|path| match path.as_os_str().len() {
        0..=SOCKET_PATH_BYTES_MAX => Ok(path),
        bytes => Err(format!("{bytes} bytes, a socket's path has at most {SOCKET_PATH_BYTES_MAX}")),
    })
}

/// A folder under the user's cache directory and a place for a socket.
#[derive(Debug)]
pub(crate) struct RunFolder {
    folder: TempDir,
    /// Locked as long as the run lives.
    _owner: File,
    /// Only where the cache directory's path is too long for a socket address.
    socket_folder: Option<TempDir>,
}

impl RunFolder {
    /// Makes a new folder, on a disk when `on_disk` says that an SSD file goes there.
    pub(crate) fn new(on_disk: bool) -> Result<Self, ToolError> {
        let make = |source| ToolError::System { operation: "make a folder for the run", source };
        let root = root(on_disk)?;
        remove_leftovers(&root);
        let folder = tempfile::Builder::new().prefix(PREFIX).tempdir_in(root).map_err(make)?;
        // Locked before it has its name: nobody may find it unlocked.
        let unnamed = folder.path().join("owner.new");
        let owner = File::create(&unnamed).map_err(make)?;
        flock(&owner, FlockOperation::NonBlockingLockExclusive).map_err(|e| make(e.into()))?;
        fs::rename(&unnamed, folder.path().join(OWNER)).map_err(make)?;
        let longest = folder.path().join("manager.socket");
        let too_long = longest.as_os_str().as_bytes().len() > SOCKET_PATH_BYTES_MAX;
        let socket_folder = if too_long {
            Some(tempfile::Builder::new().prefix("orbitkv-").tempdir().map_err(make)?)
        } else {
            None
        };
        Ok(Self { folder, _owner: owner, socket_folder })
    }

    /// Path of the Manager's socket.
    pub(crate) fn socket(&self) -> PathBuf {
        self.socket_folder.as_ref().unwrap_or(&self.folder).path().join("manager.socket")
    }

    /// Path of the Manager's log.
    pub(crate) fn log(&self) -> PathBuf {
        self.folder.path().join("manager.log")
    }

    /// Path of a file of the SSD tier.
    pub(crate) fn ssd_file(&self) -> PathBuf {
        self.folder.path().join("ssd.okv")
    }
}

/// Where the runs' folder may be, the best place first.
pub(crate) fn cache_folders() -> impl Iterator<Item = PathBuf> {
    let absolute = |value: OsString| Some(PathBuf::from(value)).filter(|path| path.is_absolute());
    let cache = env::var_os("XDG_CACHE_HOME")
        .and_then(absolute)
        .or_else(|| Some(env::var_os("HOME").and_then(absolute)?.join(".cache")));
    cache.into_iter().chain([PathBuf::from("/var/tmp")]).map(|folder| folder.join("orbitkv"))
}

/// The folder that holds the runs: the cache directory, or the disk's own temporary one where that
/// is in memory.
fn root(on_disk: bool) -> Result<PathBuf, ToolError> {
    let mut last = PathBuf::new();
    for folder in cache_folders() {
        last.clone_from(&folder);
        if fs::create_dir_all(&folder).is_ok() && !(on_disk && in_memory(&folder)) {
            return Ok(folder);
        }
    }
    if in_memory(&last) {
        return Err(ToolError::NoDisk { folder: last });
    }
    let source = fs::create_dir_all(&last).err().unwrap_or_else(|| io::Error::other("denied"));
    Err(ToolError::System { operation: "make a folder in the user's cache directory", source })
}

/// Removes the folders of runs that were killed: an SSD file in one may be large.
fn remove_leftovers(root: &Path) {
    let entries = fs::read_dir(root).into_iter().flatten().map_while(Result::ok);
    let folders =
        entries.filter(|entry| entry.file_name().as_bytes().starts_with(PREFIX.as_bytes()));
    for folder in folders.take(LEFTOVERS_MAX).map(|entry| entry.path()) {
        let dead = match File::open(folder.join(OWNER)) {
            Ok(owner) => flock(&owner, FlockOperation::NonBlockingLockExclusive).is_ok(),
            Err(_) => fs::metadata(&folder)
                .and_then(|metadata| metadata.modified())
                .is_ok_and(|made| made.elapsed().is_ok_and(|age| age > BEGINNING_MAX)),
        };
        if dead {
            // Two starts may find the same one; what is left then is found by the next.
            let _gone = fs::remove_dir_all(&folder);
        }
    }
}

fn in_memory(folder: &Path) -> bool {
    statfs(folder).is_ok_and(|stat| MEMORY_FILE_SYSTEMS.contains(&stat.f_type))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_folder_is_on_disk_fits_a_socket_and_goes_away() {
        let run = RunFolder::new(true).unwrap();
        let folder = run.folder.path().to_owned();
        assert!(folder.is_dir() && !in_memory(&folder));
        assert!(run.socket().as_os_str().as_bytes().len() <= SOCKET_PATH_BYTES_MAX);
        fs::write(run.ssd_file(), b"x").unwrap();
        drop(run);
        assert!(!folder.exists());
    }

    #[test]
    fn only_dead_runs_are_removed() {
        let root = tempfile::tempdir().unwrap();
        let make = |name: &str| {
            let folder = root.path().join(name);
            fs::create_dir(&folder).unwrap();
            folder
        };
        let (dead, live, beginning, other) =
            (make("run-dead"), make("run-live"), make("run-new"), make("notes"));
        File::create(dead.join(OWNER)).unwrap();
        File::create(other.join(OWNER)).unwrap();
        let owner = File::create(live.join(OWNER)).unwrap();
        flock(&owner, FlockOperation::NonBlockingLockExclusive).unwrap();
        remove_leftovers(root.path());
        assert!(!dead.exists());
        assert!(live.exists() && beginning.exists() && other.exists());
    }

    #[test]
    fn shared_memory_is_in_memory() {
        if Path::new("/dev/shm").is_dir() {
            assert!(in_memory(Path::new("/dev/shm")));
        }
    }
}
