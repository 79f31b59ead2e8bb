//! One command on its way: cut into steps of bounded size, each a list of contiguous pieces.

use std::collections::VecDeque;

use super::memory::HostMemory;
use super::process;
use crate::core::{CopyPage, Direction, Extent};
use crate::device::{CopyCommand, CopyEnd, CopyError, DeviceMemory, DeviceRegion};
use crate::image::{DramSlice, ImageMemory};

/// Image bytes that one step moves at most.
const STEP_BYTES_MAX: u64 = 4 << 20;
/// Pieces of one step: one `process_vm` call takes 1,024, of which the nonce needs one.
const STEP_PIECES_MAX: usize = process::PARTS_MAX;

pub(super) type Active = VecDeque<Running>;

/// A command and how far it is.
pub(super) struct Running {
    command: CopyCommand,
    /// Image bytes that are in place, counted over all pages in order.
    position: u64,
}

/// Buffers of a thread, reused by every step.
#[derive(Default)]
pub(super) struct Scratch {
    pieces: Vec<Piece>,
    process: process::Scratch,
}

/// What a step came to.
pub(super) enum Step {
    /// There is more to copy.
    More,
    /// Done, or stopped by an error.
    Ended(Option<CopyError>),
}

/// A part of the copy that is contiguous on both sides.
#[derive(Clone, Copy)]
struct Piece {
    memory: u16,
    offset: u64,
    image: Extent,
}

/// An error, and the bytes of the list that were in place before it.
struct Stopped {
    bytes: u64,
    error: CopyError,
}

impl Running {
    pub(super) fn new(mut command: CopyCommand) -> Self {
        command.checksums.clear();
        Self { command, position: 0 }
    }

    /// Copies the next few MiB.
    pub(super) fn step(&mut self, images: &dyn ImageMemory, scratch: &mut Scratch) -> Step {
        if self.position == 0
            && let Err(error) = self.check(images)
        {
            return Step::Ended(Some(error));
        }
        gather(&self.command, self.position, &mut scratch.pieces);
        let outcome = transfer(&self.command, images, scratch);
        let (bytes, error) = match outcome {
            Ok(()) => (scratch.pieces.iter().map(|piece| u64::from(piece.image.bytes)).sum(), None),
            Err(stopped) => (stopped.bytes, Some(stopped.error)),
        };
        self.position += bytes;
        if self.command.direction == Direction::Save {
            // While the images are still in the cache.
            self.checksum(images);
        }
        if error.is_some() {
            return Step::Ended(error);
        }
        if self.position < self.bytes() {
            return Step::More;
        }
        if let Some(done) = &self.command.done {
            done.words.store(done.operation_index, done.word_index, done.value);
        }
        Step::Ended(None)
    }

    pub(super) fn finish(self, error: Option<CopyError>) -> CopyEnd {
        let pages_done = self.pages_done() as u32;
        let CopyCommand { ticket, direction, pages, checksums, .. } = self.command;
        CopyEnd { ticket, direction, pages_done, error, checksums, pages }
    }

    fn bytes(&self) -> u64 {
        self.command.pages.len() as u64 * u64::from(self.command.image_bytes)
    }

    fn pages_done(&self) -> usize {
        match u64::from(self.command.image_bytes) {
            0 => 0,
            image_bytes => (self.position / image_bytes) as usize,
        }
    }

    /// What the caller promised. A broken promise must not become a stray copy.
    fn check(&self, images: &dyn ImageMemory) -> Result<(), CopyError> {
        if let Some(fence) = self.command.fence {
            return Err(CopyError::NoFence { fence });
        }
        let layout = self.command.region.layout();
        if self.command.image_bytes != layout.image_bytes() {
            return Err(CopyError::BadCommand { page: 0 });
        }
        for (page, copy) in (0u32..).zip(&self.command.pages) {
            let fits = copy.device_page < layout.pages()
                && copy.extent.bytes >= self.command.image_bytes
                && images.slice(copy.extent).is_some();
            if !fits {
                return Err(CopyError::BadCommand { page });
            }
        }
        Ok(())
    }

    fn checksum(&mut self, images: &dyn ImageMemory) {
        let done = self.pages_done();
        let CopyCommand { pages, checksums, image_bytes, .. } = &mut self.command;
        for copy in pages.iter().take(done).skip(checksums.len()) {
            let image = images.slice(Extent { bytes: *image_bytes, ..copy.extent });
            // `check` saw every slice of the command.
            checksums.push(image.map_or(0, |image| image.checksum()));
        }
    }
}

/// Fills `pieces` with what follows `position`: up to the bounds of a step or the command's end.
fn gather(command: &CopyCommand, position: u64, pieces: &mut Vec<Piece>) {
    pieces.clear();
    let layout = command.region.layout();
    let image_bytes = u64::from(command.image_bytes).max(1);
    let mut left = STEP_BYTES_MAX;
    let first_page = (position / image_bytes) as usize;
    let mut image_offset = (position % image_bytes) as u32;
    for page in command.pages.iter().skip(first_page) {
        while left > 0
            && let Some(place) = layout.locate(page.device_page, image_offset)
        {
            let bytes = u64::from(place.bytes).min(left) as u32;
            let image = part(page, image_offset, bytes);
            if !lengthen(pieces, place.memory, place.offset, image) {
                if pieces.len() == STEP_PIECES_MAX {
                    return;
                }
                pieces.push(Piece { memory: place.memory, offset: place.offset, image });
            }
            image_offset += bytes;
            left -= u64::from(bytes);
        }
        if left == 0 {
            return;
        }
        image_offset = 0;
    }
}

fn part(page: &CopyPage, image_offset: u32, bytes: u32) -> Extent {
    let offset = page.extent.offset + u64::from(image_offset);
    Extent { arena: page.extent.arena, offset, bytes }
}

/// Joins a part to the last piece where both sides continue it, across pages too.
fn lengthen(pieces: &mut [Piece], memory: u16, offset: u64, image: Extent) -> bool {
    let Some(last) = pieces.last_mut() else { return false };
    let continues = last.memory == memory
        && last.offset + u64::from(last.image.bytes) == offset
        && last.image.arena == image.arena
        && last.image.offset + u64::from(last.image.bytes) == image.offset;
    if continues {
        // A step is far below 4 GiB.
        last.image.bytes += image.bytes;
    }
    continues
}

/// Moves the pieces of `scratch` in order.
fn transfer(
    command: &CopyCommand,
    images: &dyn ImageMemory,
    scratch: &mut Scratch,
) -> Result<(), Stopped> {
    let Scratch { pieces, process } = scratch;
    let region = command.region.as_ref();
    let mut rest = pieces.as_slice();
    let mut bytes = 0;
    while let Some(first) = rest.first() {
        let memory = host_memory(region, first.memory, bytes)?;
        // Pieces of one process go together, whichever of its memories they are in.
        let count = rest
            .iter()
            .take_while(|piece| {
                host_memory(region, piece.memory, bytes)
                    .is_ok_and(|other| memory.batches_with(other))
            })
            .count()
            .max(1);
        let (batch, after) = rest.split_at(count);
        let parts = batch.iter().map_while(|piece| {
            let DeviceMemory::Host(memory) = region.memory(piece.memory)?;
            let image: DramSlice<'_> = images.slice(piece.image)?;
            Some((memory, piece.offset, image))
        });
        let wanted: u64 = batch.iter().map(|piece| u64::from(piece.image.bytes)).sum();
        let moved = memory
            .transfer(command.direction, parts, process)
            .map_err(|(moved, error)| Stopped { bytes: bytes + moved, error })?;
        bytes += moved;
        if moved != wanted {
            // `check` saw every slice, so that no piece can be missing.
            return Err(Stopped { bytes, error: CopyError::BadCommand { page: 0 } });
        }
        rest = after;
    }
    Ok(())
}

fn host_memory(region: &DeviceRegion, memory: u16, bytes: u64) -> Result<&HostMemory, Stopped> {
    match region.memory(memory) {
        Some(DeviceMemory::Host(memory)) => Ok(memory),
        None => Err(Stopped { bytes, error: CopyError::BadCommand { page: 0 } }),
    }
}
