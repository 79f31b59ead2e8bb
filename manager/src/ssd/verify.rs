//! Checks the SSD files of a stopped Manager: every image that a start would serve is read whole.

use std::path::PathBuf;
use std::sync::Arc;

use super::DEVICES_MAX;
use super::engine::{EngineSpec, Resolved};
use super::error::SsdError;
use super::file::{Access, SsdFile};
use super::format::{BLOCK_BYTES, Block, Superblock, checksum, padded};
use super::metadata;
use super::recover::{Census, SlotCounts, all_forgotten, scan};
use super::uring::UringEngine;

/// Reads the files and changes nothing. `progress` hears how many images of how many are checked.
///
/// An image that does not match its footer counts as torn: expected after a crash, and a miss for
/// a Manager that reads it.
///
/// # Errors
///
/// [`SsdError::Locked`] while a Manager runs on a file; see [`SsdError::is_not_ours`] for files that
/// cannot be checked.
pub fn verify(
    paths: &[PathBuf],
    mut progress: impl FnMut(u64, u64),
) -> Result<SlotCounts, SsdError> {
    if paths.is_empty() || paths.len() > DEVICES_MAX {
        return Err(SsdError::FileCount { count: paths.len() });
    }
    let resolved = if UringEngine::probe().is_ok() { Resolved::Uring } else { Resolved::Blocking };
    let mut files = Vec::new();
    for path in paths {
        let file = SsdFile::open(path, Access::Inspect)?;
        let state = metadata::load(&file)?;
        files.push((Arc::new(file), state));
    }
    let forgotten = all_forgotten(files.iter().map(|(_, state)| state));
    let mut census = Census::default();
    for (device, (file, state)) in files.iter().enumerate() {
        let mut engine = EngineSpec::for_scan(resolved, file.clone())?;
        scan(&mut *engine, state, device as u16, |slot, found| {
            census.take(state, &forgotten, slot, found);
        });
    }
    let mut counts = census.counts;
    let mut pages = census.into_pages();
    pages.sort_unstable_by_key(|page| (page.slot.device, page.slot.offset));
    let total = pages.len() as u64;
    let mut buffer = Vec::new();
    for (done, page) in pages.iter().enumerate() {
        progress(done as u64, total);
        if !is_whole(&files, page, &mut buffer) {
            counts.valid -= 1;
            counts.torn += 1;
        }
    }
    progress(total, total);
    Ok(counts)
}

fn is_whole(
    files: &[(Arc<SsdFile>, Superblock)],
    page: &crate::core::RecoveredPage,
    buffer: &mut Vec<Block>,
) -> bool {
    let Some((file, _)) = files.get(usize::from(page.slot.device)) else { return false };
    let image_bytes = page.image.image_bytes as usize;
    buffer.clear();
    buffer.resize(padded(image_bytes as u64) as usize / BLOCK_BYTES, Block::ZERO);
    // What cannot be read cannot be served either.
    if file.read_blocks(buffer, page.slot.offset).is_err() {
        return false;
    }
    let bytes: &[u8] = bytemuck::cast_slice(buffer);
    checksum(&bytes[..image_bytes]) == page.image.checksum
}
