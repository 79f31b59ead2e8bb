//! The start of one file: claimed, made or grown, its space reserved.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::io::Errno;

use super::error::SsdError;
use super::file::{Access, SsdFile};
use super::format::{BLOCK_BYTES, FileId, SUPERBLOCK_COPIES, Superblock};
use super::metadata;
use super::tier::SsdConfig;

/// A blank file up to this length is taken for a new one.
const BLANK_BYTES_MAX: u64 = 1 << 20;

/// Files that a failing start removes again: those that it made, when this is dropped.
#[derive(Default, Debug)]
pub struct MadeFiles(Vec<PathBuf>);

impl MadeFiles {
    /// The start has succeeded.
    pub fn keep(&mut self) {
        self.0.clear();
    }
}

impl Drop for MadeFiles {
    fn drop(&mut self) {
        for path in &self.0 {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// A claimed file and its state, before its workers.
pub(crate) struct Claimed {
    pub(crate) file: Arc<SsdFile>,
    pub(crate) state: Superblock,
    /// The state is not what the file says.
    pub(crate) changed: bool,
}

impl Claimed {
    /// Opens `path` as one of the files of `config`; a file that this makes is added to `made`.
    pub(crate) fn open(
        path: &Path,
        config: &SsdConfig,
        made: &mut MadeFiles,
    ) -> Result<Self, SsdError> {
        let is_new =
            path.symlink_metadata().is_err_and(|error| error.kind() == ErrorKind::NotFound);
        let opened = SsdFile::open(path, Access::Tier { direct: config.direct });
        let mut file = opened.inspect_err(|error| {
            // One that another process has was made by that process, a moment before us.
            if is_new && !matches!(error, SsdError::Locked { .. }) {
                let _ = std::fs::remove_file(path);
            }
        })?;
        if is_new {
            made.0.push(path.to_owned());
        }
        let files = config.paths.len() as u64;
        let want = config.capacity_bytes / files / BLOCK_BYTES as u64 * BLOCK_BYTES as u64;
        // Nothing but zeros and no longer than our tables: made by nobody, or by a start of ours
        // that was cut off.
        let mut state = if file.len()? <= BLANK_BYTES_MAX && file.is_blank(BLANK_BYTES_MAX)? {
            file.check_space(want)?;
            format(&file, want, config.slot_bytes_max)?
        } else {
            metadata::load(&file)?
        };
        let changed = fit(&mut state, want, path)?;
        file.reserve(state.geometry.capacity_bytes)?;
        Ok(Self { file: Arc::new(file), state, changed })
    }
}

/// Writes both superblocks of a new file. The space is reserved afterwards: a start that is cut
/// off in between leaves a file that is ours.
fn format(file: &SsdFile, want: u64, slot_bytes_max: u32) -> Result<Superblock, SsdError> {
    let id = random_id()?;
    let Some(mut state) = Superblock::new(id, want, slot_bytes_max) else {
        return Err(SsdError::Capacity { path: file.path().to_owned(), want });
    };
    let mut table = Vec::new();
    for copy in 0..SUPERBLOCK_COPIES {
        state.sequence = copy.into();
        let head = state.encode(&mut table);
        file.write_blocks(&table, state.table_offset())?;
        file.write_blocks(&[head], Superblock::head_offset(copy))?;
    }
    file.sync()?;
    Ok(state)
}

/// Grows the file's state to `want` bytes; says whether it changed.
fn fit(state: &mut Superblock, want: u64, path: &Path) -> Result<bool, SsdError> {
    let have = state.geometry.capacity_bytes;
    if want < have {
        return Err(SsdError::Shrink { path: path.to_owned(), have, want });
    }
    if want > have && !state.grow(want) {
        let max = state.capacity_bytes_max();
        return Err(SsdError::GrowLimit { path: path.to_owned(), max, want });
    }
    Ok(want > have)
}

fn random_id() -> Result<FileId, SsdError> {
    let mut id = [0; 16];
    File::open("/dev/urandom").and_then(|mut random| random.read_exact(&mut id)).map_err(
        |error| SsdError::System {
            operation: "read of /dev/urandom",
            errno: Errno::from_io_error(&error).unwrap_or(Errno::IO),
        },
    )?;
    Ok(FileId(id))
}
