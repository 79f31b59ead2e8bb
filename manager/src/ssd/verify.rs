//! Checks the SSD files of a stopped Manager: every image that a start would serve is read whole,
//! small ones in the runs that their footers come in, the others by the reader of the tier itself.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};

use super::DEVICES_MAX;
use super::activity::ReadActivity;
use super::engine::{EngineSpec, Resolved};
use super::error::SsdError;
use super::file::{Access, SsdFile};
use super::format::{Superblock, padded};
use super::metadata;
use super::order::ReadOrder;
use super::pulse::Pulse;
use super::reader::Reader;
use super::recover::{Census, Found, SlotCounts, all_forgotten};
use super::sweep::{ScanEnd, ScanProgress, ScanWatch, scan, slots_of};
use super::uring::UringEngine;
use super::verifier::{ReadResult, fault_of_image};
use super::worker::Duty;
use crate::core::{Extent, RecoveredPage, Slot, Ticket};
use crate::image::{DramSlice, ImageMemory};

/// Images in memory at most.
const IMAGES_MAX: usize = 4096;
/// Bytes of images in memory at most, unless one alone is longer: enough to keep a drive busy while
/// what has arrived is checked.
const IMAGE_BYTES_MAX: u64 = 64 << 20;
/// Slots of runs between two reports.
const PROGRESS_SLOTS: u64 = 128;

/// Reads the files and changes nothing. `progress` hears now and then how many slots of how many are
/// dealt with, and the whole number at the end.
///
/// An image that does not match its footer counts as torn: expected after a crash, and a miss for
/// a Manager that reads it. `memory` is where images are read to, arena 0 only: at most 64 MiB of
/// it, unless one image is longer. It holds no image before and none afterwards.
///
/// # Errors
///
/// [`SsdError::Locked`] while a Manager runs on a file; see [`SsdError::is_not_ours`] for files that
/// cannot be checked; [`SsdError::System`] when an image is longer than arena 0.
pub fn verify(
    paths: &[PathBuf],
    memory: &Arc<dyn ImageMemory>,
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
    // Whether the image in a slot is whole, where it came with its footer.
    let mut checked = HashMap::new();
    let total: u64 = files.iter().map(|(_, state)| slots_of(state)).sum();
    let mut done = 0;
    let scanned = ScanProgress::default();
    for (device, (file, state)) in files.iter().enumerate() {
        let engine = EngineSpec::for_scan(resolved, file.clone(), memory.clone())?;
        let watch = ScanWatch { progress: &scanned, stops: &|| false, unread_max: None };
        let found = |slot: Slot, found, bytes: Option<DramSlice<'_>>| {
            if let (Found::Footer(footer), Some(bytes)) = (found, bytes) {
                let image = bytes.prefix(footer.image.image_bytes as usize);
                let is_whole = image.is_some_and(|i| Some(i.checksum()) == footer.image.checksum);
                checked.insert((slot.device, slot.offset), is_whole);
            }
            // What has no image, or came with it, is dealt with; other images are read afterwards.
            done += u64::from(bytes.is_some() || !matches!(found, Found::Footer(_)));
            if done % PROGRESS_SLOTS == 0 {
                progress(done, total);
            }
            census.take(state, &forgotten, slot, found);
        };
        scan(engine, &**memory, state, device as u16, &watch, found)
            .or_else(|end| if end == ScanEnd::NoRoom { Err(SsdError::NO_ROOM) } else { Ok(()) })?;
    }
    let mut counts = census.counts;
    let mut pages = census.into_parts().1;
    let mut broken = 0;
    pages.retain(|page| match checked.get(&(page.slot.device, page.slot.offset)) {
        None => true,
        Some(is_whole) => {
            broken += u64::from(!is_whole);
            false
        }
    });
    // The rest needs no more than its footer.
    done = total - pages.len() as u64;
    read_whole(&files, resolved, memory, &mut pages, |is_whole| {
        broken += u64::from(!is_whole);
        done += 1;
        progress(done, total);
    })?;
    counts.valid -= broken;
    counts.torn += broken;
    progress(total, total);
    Ok(counts)
}

/// Reads the images of `pages` and tells of each whether it is whole.
fn read_whole(
    files: &[(Arc<SsdFile>, Superblock)],
    resolved: Resolved,
    memory: &Arc<dyn ImageMemory>,
    pages: &mut [RecoveredPage],
    mut tell: impl FnMut(bool),
) -> Result<(), SsdError> {
    let group = |page: &RecoveredPage| (page.slot.device, padded(page.image.image_bytes.into()));
    pages.sort_unstable_by_key(|page| (group(page), page.slot.offset));
    for alike in pages.chunk_by(|one, next| group(one) == group(next)) {
        let (device, image_bytes) = group(&alike[0]);
        let Some((file, state)) = files.get(usize::from(device)) else { continue };
        let engine = EngineSpec::for_scan(resolved, file.clone(), memory.clone())?;
        let places = places(&**memory, image_bytes);
        if places.is_empty() {
            return Err(SsdError::NO_ROOM);
        }
        let (send, results) = sync_channel(IMAGES_MAX);
        let activity = Arc::new(ReadActivity::new(0));
        let pulse = Arc::new(Pulse::patient());
        let reader = Reader::new(engine, state.geometry, Arc::default(), activity, pulse, send);
        Check { reader, results, memory, places }.run(alike, &mut tell);
    }
    Ok(())
}

/// Memory for images of one length.
fn places(memory: &dyn ImageMemory, image_bytes: u64) -> Vec<Extent> {
    let bytes = u32::try_from(image_bytes).unwrap_or(u32::MAX);
    let count = (IMAGE_BYTES_MAX / image_bytes.max(1)).clamp(1, IMAGES_MAX as u64);
    let place = |number| Extent { arena: 0, offset: number * image_bytes, bytes };
    // From the end, so that images which lie side by side on SSD do so here.
    let places = (0..count).rev().map(place);
    places.filter(|place| memory.slice(*place).is_some()).collect()
}

/// A reader of images of one length.
struct Check<'a> {
    reader: Reader,
    results: Receiver<ReadResult>,
    memory: &'a Arc<dyn ImageMemory>,
    places: Vec<Extent>,
}

impl Check<'_> {
    /// Reads every image and tells whether it is whole.
    fn run(&mut self, pages: &[RecoveredPage], mut tell: impl FnMut(bool)) {
        let mut pages = pages.iter();
        let all = self.places.len();
        loop {
            // What cannot be read cannot be served either.
            for ReadResult { order, fault } in self.results.try_iter() {
                tell(fault.or_else(|| fault_of_image(&**self.memory, &order)).is_none());
                self.places.push(order.extent);
            }
            while let Some(extent) = self.places.pop() {
                let Some(page) = pages.next() else {
                    self.places.push(extent);
                    break;
                };
                self.reader.accept(ReadOrder {
                    ticket: Ticket(0),
                    slot: page.slot,
                    extent,
                    image_bytes: page.image.image_bytes,
                    checksum: page.image.checksum.unwrap_or_default(),
                });
            }
            self.reader.fill();
            self.reader.deliver();
            if !self.reader.is_idle() {
                self.reader.wait(&mut || false);
                self.reader.deliver();
            } else if pages.len() == 0 && self.places.len() == all {
                return;
            }
        }
    }
}
