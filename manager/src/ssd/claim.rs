//! The start of one file: claimed, made or grown, its space reserved.

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;

use rustix::io::Errno;

use super::error::SsdError;
use super::file::{Access, SsdFile};
use super::format::{BLOCK_BYTES, FileId, SUPERBLOCK_COPIES, Superblock};
use super::metadata;
use super::tier::SsdConfig;

/// A blank file up to this length is taken for a new one.
const BLANK_BYTES_MAX: u64 = 1 << 20;

/// Files that a failing start removes again: those that it made, when this is dropped. Each stays
/// locked until it is gone, so that nobody else takes it over in between.
#[derive(Default, Debug)]
pub struct MadeFiles(Vec<Arc<SsdFile>>);

impl MadeFiles {
    /// The start has succeeded.
    pub fn keep(&mut self) {
        self.0.clear();
    }
}

impl Drop for MadeFiles {
    fn drop(&mut self) {
        for file in &self.0 {
            file.remove();
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
        let mut file = SsdFile::open(path, Access::Tier { direct: config.direct })?;
        let prepared = prepare(&mut file, config);
        let file = Arc::new(file);
        if file.is_made() {
            made.0.push(file.clone());
        }
        let (state, changed) = prepared?;
        Ok(Self { file, state, changed })
    }
}

/// Reads the state of a file, or formats it, and reserves its space. Says whether the state is
/// another than the file's.
fn prepare(file: &mut SsdFile, config: &SsdConfig) -> Result<(Superblock, bool), SsdError> {
    let files = config.paths.len() as u64;
    let want = config.capacity_bytes / files / BLOCK_BYTES as u64 * BLOCK_BYTES as u64;
    file.check_limit(want)?;
    // Nothing but zeros and no longer than our tables: made by nobody, or by a start of ours
    // that was cut off.
    let mut state = if file.len()? <= BLANK_BYTES_MAX && file.is_blank(BLANK_BYTES_MAX)? {
        file.check_space(want)?;
        format(file, want, config.slot_bytes_max)?
    } else {
        metadata::load(file)?
    };
    let changed = fit(&mut state, want, file.path())?;
    file.reserve(state.geometry.capacity_bytes)?;
    Ok((state, changed))
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ssd::EngineChoice;

    /// Goal: between a failed start and the end of its files nobody else gets them.
    #[test]
    fn a_file_that_was_made_is_locked_until_it_is_gone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tier");
        let config = SsdConfig {
            paths: vec![path.clone()],
            capacity_bytes: 2 << 20,
            direct: false,
            engine: EngineChoice::Blocking,
            write_in_flight_bytes: 1 << 20,
            read_join_bytes: 1 << 20,
            slot_bytes_max: 0,
        };
        let mut made = MadeFiles::default();
        let claimed = Claimed::open(&path, &config, &mut made).unwrap();
        let locked = |path| SsdFile::open(path, Access::Tier { direct: false });
        drop(claimed);
        assert!(matches!(locked(&path), Err(SsdError::Locked { .. })), "its maker goes last");
        drop(made);
        assert!(!path.exists());
        // One that was there is let go of and stays.
        std::fs::write(&path, "").unwrap();
        let mut made = MadeFiles::default();
        drop(Claimed::open(&path, &config, &mut made).unwrap());
        drop(made);
        assert!(locked(&path).is_ok());
    }
}
