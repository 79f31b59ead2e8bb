//! One command on its way: cut into steps of bounded size, each a list of contiguous pieces.

use orbitkv_shm_protocol::telemetry::CopyMethod;

use super::memory::HostMemory;
use super::process;
use crate::core::{CopyPage, Direction, Extent};
use crate::device::{CopyCommand, CopyEnd, CopyError, DeviceMemory, DeviceRegion, Fence, Moved};
use crate::image::{DramSlice, ImageMemory};

/// Image bytes that one step moves at most.
const STEP_BYTES_MAX: u64 = 4 << 20;
/// Pieces of one step: one `process_vm` call takes 1,024, of which the nonce needs one.
const STEP_PIECES_MAX: usize = process::PARTS_MAX;

/// A command and how far it is.
pub(super) struct Running {
    command: CopyCommand,
    /// Layer that is being copied; 0 where layers do not matter.
    layer: u32,
    /// Bytes that are in place, of this layer or of whole images, counted over all pages in order.
    position: u64,
    /// Bytes of all layers.
    moved_bytes: u64,
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
    /// The fence has not passed yet.
    Fenced,
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
        Self { command, layer: 0, position: 0, moved_bytes: 0 }
    }

    /// Copies the next few MiB.
    pub(super) fn step(&mut self, images: &dyn ImageMemory, scratch: &mut Scratch) -> Step {
        match self.command.fence.as_ref().map(Fence::look) {
            None => {}
            Some(Ok(true)) => self.command.fence = None,
            Some(Ok(false)) => return Step::Fenced,
            Some(Err(error)) => return Step::Ended(Some(error)),
        }
        if (self.layer, self.position) == (0, 0)
            && let Err(error) = self.check(images)
        {
            return Step::Ended(Some(error));
        }
        let mut left = STEP_BYTES_MAX;
        // Small layers share a step.
        while left > 0 {
            match self.advance(left, images, scratch) {
                Ok(bytes) => left = left.saturating_sub(bytes),
                Err(error) => return Step::Ended(Some(error)),
            }
            if self.position < self.bytes() {
                return Step::More;
            }
            if let Some(done) = &self.command.done {
                done.words.store(done.operation_index, self.layer, done.value);
            }
            if self.layer + 1 >= self.layers() {
                return Step::Ended(None);
            }
            (self.layer, self.position) = (self.layer + 1, 0);
        }
        Step::More
    }

    /// Copies at most `left` bytes of the layer; returns how many it were.
    fn advance(
        &mut self,
        left: u64,
        images: &dyn ImageMemory,
        scratch: &mut Scratch,
    ) -> Result<u64, CopyError> {
        let layer = (self.layers() > 1).then_some(self.layer);
        gather(&self.command, layer, self.position, left, &mut scratch.pieces);
        let outcome = transfer(&self.command, images, scratch);
        let (bytes, error) = match outcome {
            Ok(()) => (scratch.pieces.iter().map(|piece| u64::from(piece.image.bytes)).sum(), None),
            Err(stopped) => (stopped.bytes, Some(stopped.error)),
        };
        self.position += bytes;
        self.moved_bytes += bytes;
        if self.command.direction == Direction::Save {
            // While the images are still in the cache.
            self.checksum(images);
        }
        if bytes == 0 && error.is_none() && self.position < self.bytes() {
            // `check` excludes a step without bytes; one would repeat for ever.
            return Err(CopyError::BadCommand { page: self.pages_done() as u32 });
        }
        error.map_or(Ok(bytes), Err)
    }

    pub(super) fn finish(self, error: Option<CopyError>) -> CopyEnd {
        let pages_done = self.pages_done() as u32;
        let CopyCommand { ticket, direction, pages, checksums, .. } = self.command;
        let mut moved = Moved::default();
        moved.add(CopyMethod::Cpu, pages_done.into(), self.moved_bytes);
        CopyEnd { ticket, direction, pages_done, error, ended_ns: 0, moved, checksums, pages }
    }

    /// Layers that are copied one after the other.
    fn layers(&self) -> u32 {
        self.command.done.as_ref().map_or(1, |done| done.count)
    }

    /// Bytes of a page in the layer that is being copied.
    fn page_bytes(&self) -> u64 {
        u64::from(match self.layers() {
            1 => self.command.image_bytes,
            _ => self.command.region.layout().layer_bytes(self.layer),
        })
    }

    fn bytes(&self) -> u64 {
        self.command.pages.len() as u64 * self.page_bytes()
    }

    fn pages_done(&self) -> usize {
        // Before the last layer no page is whole.
        match self.page_bytes() {
            page_bytes if page_bytes > 0 && self.layer + 1 >= self.layers() => {
                (self.position / page_bytes) as usize
            }
            _ => 0,
        }
    }

    /// What the caller promised. A broken promise must not become a stray copy.
    fn check(&self, images: &dyn ImageMemory) -> Result<(), CopyError> {
        let layout = self.command.region.layout();
        let layers = self.layers();
        if self.command.image_bytes != layout.image_bytes()
            || (layers != 1 && layers != layout.layers())
        {
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

/// Fills `pieces` with what follows `position`: up to `left` bytes, the bound of a step, or the end
/// of the layer or, without one, of the command.
fn gather(
    command: &CopyCommand,
    layer: Option<u32>,
    position: u64,
    mut left: u64,
    pieces: &mut Vec<Piece>,
) {
    pieces.clear();
    let layout = command.region.layout();
    let page_bytes = layer.map_or(command.image_bytes, |layer| layout.layer_bytes(layer)).max(1);
    let locate = |device_page, offset| match layer {
        None => Some((offset, layout.locate(device_page, offset)?)),
        Some(layer) => layout.locate_in_layer(layer, device_page, offset),
    };
    let first_page = (position / u64::from(page_bytes)) as usize;
    let mut offset = (position % u64::from(page_bytes)) as u32;
    for page in command.pages.iter().skip(first_page) {
        while left > 0
            && let Some((image_offset, place)) = locate(page.device_page, offset)
        {
            let bytes = u64::from(place.bytes).min(left) as u32;
            let image = part(page, image_offset, bytes);
            if !lengthen(pieces, place.memory, place.offset, image) {
                if pieces.len() == STEP_PIECES_MAX {
                    return;
                }
                pieces.push(Piece { memory: place.memory, offset: place.offset, image });
            }
            offset += bytes;
            left -= u64::from(bytes);
        }
        if left == 0 {
            return;
        }
        offset = 0;
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
            let DeviceMemory::Host(memory) = region.memory(piece.memory)? else { return None };
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
        Some(DeviceMemory::Cuda(_)) | None => {
            Err(Stopped { bytes, error: CopyError::BadCommand { page: 0 } })
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use orbitkv_shm_protocol::bootstrap::message::{MemorySpec, RegionSpec, SegmentSpec};
    use rustix::fs::MemfdFlags;
    use rustix::process::{PidfdFlags, getpid, pidfd_open};

    use super::*;
    use crate::core::Ticket;
    use crate::device::PeerHandle;

    /// A region over one memfd of 1 GiB, none of which is ever touched.
    fn region(pages: u32, segments: Vec<SegmentSpec>) -> Arc<DeviceRegion> {
        let memfd = rustix::fs::memfd_create("engine", MemfdFlags::CLOEXEC).expect("memfd");
        rustix::fs::ftruncate(&memfd, 1 << 30).expect("ftruncate");
        let pidfd = Arc::new(pidfd_open(getpid(), PidfdFlags::empty()).expect("pidfd"));
        let peer = PeerHandle { pid: getpid().as_raw_nonzero().get(), pidfd };
        let spec = MemorySpec::Memfd { bytes: 1 << 30 };
        let memory = HostMemory::import(&spec, Some(memfd), &peer).expect("import");
        let memory = Arc::new(DeviceMemory::Host(memory));
        let image_bytes = segments.iter().map(|segment| segment.length).sum();
        let spec = RegionSpec { scope: 0, pages, segments };
        let region = DeviceRegion::new(&spec, image_bytes, |_| Some(Arc::clone(&memory)));
        Arc::new(region.expect("region"))
    }

    fn command(region: &Arc<DeviceRegion>, pages: Vec<CopyPage>) -> CopyCommand {
        CopyCommand {
            ticket: Ticket(1),
            direction: Direction::Save,
            region: Arc::clone(region),
            pages,
            image_bytes: region.layout().image_bytes(),
            fence: None,
            done: None,
            checksums: vec![],
        }
    }

    /// Pages 0, 1, … with images one behind the other at the given distance.
    fn pages(count: u32, bytes: u32, distance: u64) -> Vec<CopyPage> {
        let extent = |page: u32| Extent { arena: 0, offset: u64::from(page) * distance, bytes };
        (0..count)
            .map(|device_page| CopyPage { device_page, extent: extent(device_page) })
            .collect()
    }

    /// Every step of a command: pieces as (device offset, image offset, bytes).
    fn steps(command: &CopyCommand) -> Vec<Vec<(u64, u64, u32)>> {
        let total = command.pages.len() as u64 * u64::from(command.image_bytes);
        let (mut position, mut steps, mut pieces) = (0, vec![], vec![]);
        while position < total {
            gather(command, None, position, STEP_BYTES_MAX, &mut pieces);
            let bytes: u64 = pieces.iter().map(|piece| u64::from(piece.image.bytes)).sum();
            assert!(bytes > 0 && bytes <= STEP_BYTES_MAX && pieces.len() <= STEP_PIECES_MAX);
            position += bytes;
            let piece = |piece: &Piece| (piece.offset, piece.image.offset, piece.image.bytes);
            steps.push(pieces.iter().map(piece).collect());
        }
        assert_eq!(position, total);
        steps
    }

    #[test]
    fn adjoining_pages_become_one_piece_where_their_images_adjoin_too() {
        let segment = SegmentSpec { memory: 0, offset: 0, stride: 8192, length: 8192, layer: 0 };
        let region = region(4, vec![segment]);
        let steps_of = |distance| steps(&command(&region, pages(4, 8192, distance)));
        assert_eq!(steps_of(8192), [[(0, 0, 4 * 8192)]]);
        let apart = [(0, 0, 8192), (8192, 12288, 8192), (16384, 24576, 8192), (24576, 36864, 8192)];
        assert_eq!(steps_of(12288), [apart]);
    }

    #[test]
    fn steps_are_bounded_in_bytes_and_in_pieces() {
        let segment =
            |offset, length| SegmentSpec { memory: 0, offset, stride: 10 << 20, length, layer: 0 };
        let large = region(2, vec![segment(0, 9 << 20)]);
        let large = steps(&command(&large, pages(2, 9 << 20, 10 << 20)));
        let mib: Vec<Vec<u32>> =
            large.iter().map(|step| step.iter().map(|piece| piece.2 >> 20).collect()).collect();
        assert_eq!(mib, [vec![4], vec![4], vec![1, 3], vec![4], vec![2]]);
        let small = region(3, (0..1000).map(|number| segment(number * 16, 8)).collect());
        let small = steps(&command(&small, pages(3, 8192, 8192)));
        let counts: Vec<usize> = small.iter().map(Vec::len).collect();
        assert_eq!(counts, [1023, 1023, 954]);
    }
}
