//! Where a run keeps its socket and its SSD file: a folder of its own, removed at the end.

use std::env;
use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use orbitkv_manager::config::SOCKET_PATH_BYTES_MAX;
use rustix::fs::statfs;
use tempfile::TempDir;

use crate::exit::ToolError;

/// File systems that keep their files in memory.
const MEMORY_FILE_SYSTEMS: [rustix::fs::FsWord; 2] = [0x0102_1994, 0x8584_58f6];

/// A folder under the user's cache directory and a place for a socket.
#[derive(Debug)]
pub(crate) struct RunFolder {
    folder: TempDir,
    /// Only where the cache directory's path is too long for a socket address.
    socket_folder: Option<TempDir>,
}

impl RunFolder {
    /// Makes a new folder, on a disk when `on_disk` says that an SSD file goes there.
    pub(crate) fn new(on_disk: bool) -> Result<Self, ToolError> {
        let make = |source| ToolError::System { operation: "make a folder for the run", source };
        let root = root(on_disk)?;
        let folder = tempfile::Builder::new().prefix("run-").tempdir_in(root).map_err(make)?;
        let longest = folder.path().join("manager.socket");
        let too_long = longest.as_os_str().as_bytes().len() > SOCKET_PATH_BYTES_MAX;
        let socket_folder = if too_long {
            Some(tempfile::Builder::new().prefix("orbitkv-").tempdir().map_err(make)?)
        } else {
            None
        };
        Ok(Self { folder, socket_folder })
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

/// The folder that holds the runs: the cache directory, or the disk's own temporary one where that
/// is in memory.
fn root(on_disk: bool) -> Result<PathBuf, ToolError> {
    let absolute = |value: OsString| Some(PathBuf::from(value)).filter(|path| path.is_absolute());
    let cache = env::var_os("XDG_CACHE_HOME")
        .and_then(absolute)
        .or_else(|| Some(env::var_os("HOME").and_then(absolute)?.join(".cache")));
    let candidates = cache.into_iter().chain([PathBuf::from("/var/tmp")]);
    let mut last = PathBuf::new();
    for candidate in candidates {
        let folder = candidate.join("orbitkv");
        last.clone_from(&folder);
        if std::fs::create_dir_all(&folder).is_ok() && !(on_disk && in_memory(&folder)) {
            return Ok(folder);
        }
    }
    if in_memory(&last) {
        return Err(ToolError::NoDisk { folder: last });
    }
    let source = std::fs::create_dir_all(&last).err().unwrap_or_else(|| io::Error::other("denied"));
    Err(ToolError::System { operation: "make a folder in the user's cache directory", source })
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
        std::fs::write(run.ssd_file(), b"x").unwrap();
        drop(run);
        assert!(!folder.exists());
    }

    #[test]
    fn shared_memory_is_in_memory() {
        if Path::new("/dev/shm").is_dir() {
            assert!(in_memory(Path::new("/dev/shm")));
        }
    }
}
