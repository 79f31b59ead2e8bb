//! What is read and written: the slots of one page size, and the memory that both sides use.

use std::collections::VecDeque;
use std::sync::Arc;

use orbitkv_manager::core::{Extent, RegionGeometry, Slot, slot_bytes};
use orbitkv_manager::pool::{DramPool, HugePages, PoolConfig};
use orbitkv_manager::ssd::DeviceInfo;

use crate::error::BenchError;

/// Bytes of the pool: half of it is read into, half of it is written from.
const POOL_BYTES: u64 = 256 << 20;
/// Slots of one page size on a device at least: more than are ever in flight there.
const SLOTS_MIN: usize = 16;
/// Length of the part of a buffer that is overwritten before a slice, at its begin and at its end.
const SPOILT_BYTES: u32 = 4096;

/// The pool and how it is cut into pages of one size.
pub(super) struct Buffers {
    pool: Arc<DramPool>,
    /// Where pages are read to.
    pub(super) reads: Vec<Extent>,
    /// Where pages are written from; their bytes never change.
    pub(super) writes: Vec<Extent>,
    /// Checksums of the latter.
    pub(super) checksums: Vec<u64>,
}

/// The pool, as `serve` makes it.
pub(super) fn pool() -> Result<Arc<DramPool>, BenchError> {
    let config =
        PoolConfig { bytes: POOL_BYTES, huge_pages: HugePages::Prefer, prefault_threads: 0 };
    Ok(Arc::new(DramPool::allocate(config)?))
}

impl Buffers {
    /// Cuts the pool and fills what will be written with random bytes.
    pub(super) fn cut(pool: Arc<DramPool>, page_bytes: u32) -> Result<Self, BenchError> {
        let in_arena = |(arena, bytes): (usize, &u64)| {
            let offsets = (0..bytes / u64::from(page_bytes)).map(|at| at * u64::from(page_bytes));
            let extent = move |offset| Extent { arena: arena as u16, offset, bytes: page_bytes };
            offsets.map(extent).collect::<Vec<_>>()
        };
        let mut reads: Vec<Extent> =
            pool.arena_bytes().iter().enumerate().flat_map(in_arena).collect();
        let writes = reads.split_off(reads.len() / 2);
        let mut random = fastrand::Rng::with_seed(u64::from(page_bytes));
        let mut bytes = vec![0; page_bytes as usize];
        let mut checksums = Vec::new();
        for extent in &writes {
            random.fill(&mut bytes);
            let slice = pool.slice(*extent).ok_or_else(outside)?;
            slice.fill_from(&bytes);
            checksums.push(slice.checksum());
        }
        Ok(Self { pool, reads, writes, checksums })
    }

    /// Overwrites the ends of what is read to, so that old bytes cannot pass for new ones.
    pub(super) fn spoil(&self) -> Result<(), BenchError> {
        for extent in &self.reads {
            for offset in [extent.offset, extent.offset + u64::from(extent.bytes - SPOILT_BYTES)] {
                let part = Extent { offset, bytes: SPOILT_BYTES, ..*extent };
                let slice = self.pool.slice(part).ok_or_else(outside)?;
                slice.fill_from(&[0xa5; SPOILT_BYTES as usize]);
            }
        }
        Ok(())
    }

    /// All read buffers, none in use.
    ///
    /// The one that is idle longest is read to next: a page comes back from SSD into the memory of the
    /// coldest page, while a loop that reads to one buffer again and again never leaves the processor's
    /// cache.
    pub(super) fn idle(&self) -> VecDeque<usize> {
        (0..self.reads.len()).collect()
    }

    /// Checksum of what lies in a read buffer.
    fn checksum_of_read(&self, buffer: usize) -> Option<u64> {
        Some(self.pool.slice(*self.reads.get(buffer)?)?.checksum())
    }
}

fn outside() -> BenchError {
    BenchError::Wrong("a buffer lies outside the pool".into())
}

/// All slots of one page size and what they hold.
pub(super) struct Field {
    pub(super) page_bytes: u32,
    slots: Vec<Slot>,
    /// The write buffer whose bytes each slot holds.
    content: Vec<u32>,
    /// Regions that hold these slots, by device.
    pub(super) regions: Vec<(u16, u32)>,
}

impl Field {
    /// Share `part` of `parts` of the regions of every device.
    pub(super) fn new(
        devices: &[DeviceInfo],
        page_bytes: u32,
        (part, parts): (u32, u32),
    ) -> Result<Self, BenchError> {
        let bytes = slot_bytes(page_bytes);
        let (mut slots, mut regions) = (Vec::new(), Vec::new());
        for (device, info) in devices.iter().enumerate() {
            let device = device as u16;
            let geometry: RegionGeometry = info.geometry;
            let before = slots.len();
            let all = geometry.regions();
            for region in all * part / parts..all * (part + 1) / parts {
                regions.push((device, region));
                let offset = |index| geometry.slot_offset(region, bytes, index);
                let slot = |index| Slot { device, offset: offset(index), bytes };
                slots.extend((0..geometry.slots(region, bytes)).map(slot));
            }
            if slots.len() - before < SLOTS_MIN {
                let file_bytes = geometry.capacity_bytes;
                return Err(BenchError::FileTooSmall { file_bytes, page_bytes });
            }
        }
        let content = vec![0; slots.len()];
        Ok(Self { page_bytes, slots, content, regions })
    }

    /// Slots.
    pub(super) fn len(&self) -> usize {
        self.slots.len()
    }

    pub(super) fn slot(&self, index: u32) -> Slot {
        self.slots[index as usize]
    }

    /// The write buffer whose bytes the slot holds.
    pub(super) fn content(&self, index: u32) -> usize {
        self.content[index as usize] as usize
    }

    /// The slot will hold the bytes of a write buffer.
    pub(super) fn set_content(&mut self, index: u32, buffer: usize) {
        self.content[index as usize] = buffer as u32;
    }

    /// The slots of the first `devices` devices in random order.
    pub(super) fn walk(&self, devices: u16) -> Walk {
        let on_them = |index: &u32| self.slot(*index).device < devices;
        let mut order: Vec<u32> = (0..self.slots.len() as u32).filter(on_them).collect();
        fastrand::Rng::with_seed(u64::from(devices)).shuffle(&mut order);
        Walk { order, next: 0 }
    }
}

/// Slots in an order that repeats for ever.
#[derive(Clone, Debug)]
pub(super) struct Walk {
    order: Vec<u32>,
    next: usize,
}

impl Walk {
    /// The next slot.
    pub(super) fn next(&mut self) -> u32 {
        let slot = self.order[self.next];
        self.next = (self.next + 1) % self.order.len();
        slot
    }

    /// Slots before one comes again.
    pub(super) fn len(&self) -> usize {
        self.order.len()
    }

    /// Two walks that share no slot.
    pub(super) fn split(&self) -> (Self, Self) {
        let (one, other) = self.order.split_at(self.order.len() / 2);
        let walk = |order: &[u32]| Self { order: order.to_vec(), next: 0 };
        (walk(one), walk(other))
    }
}

/// Reads whose buffers have not been used again: compared after a slice.
#[derive(Debug)]
pub(super) struct LastRead(Vec<Option<u32>>);

impl LastRead {
    pub(super) fn new(buffers: &Buffers) -> Self {
        Self(vec![None; buffers.reads.len()])
    }

    /// The buffer holds what the slot holds.
    pub(super) fn set(&mut self, buffer: usize, slot: u32) {
        if let Some(last) = self.0.get_mut(buffer) {
            *last = Some(slot);
        }
    }

    /// Compares every buffer with what its slot holds; returns how many were compared.
    pub(super) fn compare(&self, field: &Field, buffers: &Buffers) -> Result<u64, BenchError> {
        let mut compared = 0;
        for (buffer, slot) in self.0.iter().enumerate() {
            let Some(slot) = slot else { continue };
            let expected = buffers.checksums.get(field.content(*slot)).copied();
            if buffers.checksum_of_read(buffer) != expected {
                let offset = field.slot(*slot).offset;
                let message = format!("the page at {offset} was read, but not its bytes");
                return Err(BenchError::Wrong(message.into()));
            }
            compared += 1;
        }
        Ok(compared)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_walks_share_no_slot_and_repeat() {
        let walk = Walk { order: (0..7).collect(), next: 0 };
        let (mut one, mut other) = walk.split();
        let mut seen: Vec<u32> = (0..one.len()).map(|_| one.next()).collect();
        let first = seen[0];
        seen.extend((0..other.len()).map(|_| other.next()));
        seen.sort_unstable();
        assert_eq!(seen, (0..7).collect::<Vec<_>>());
        assert_eq!(one.next(), first);
    }

    /// Goal: a read that brought nothing is found. Method: buffers that nobody reads to.
    #[test]
    fn old_bytes_do_not_pass_for_new_ones() {
        let small = PoolConfig { bytes: 4 << 20, huge_pages: HugePages::Off, prefault_threads: 1 };
        let pool = Arc::new(DramPool::allocate(small).unwrap());
        let buffers = Buffers::cut(pool.clone(), 1 << 20).unwrap();
        let slot = Slot { device: 0, offset: 0, bytes: slot_bytes(1 << 20) };
        let field =
            Field { page_bytes: 1 << 20, slots: vec![slot], content: vec![1], regions: Vec::new() };
        let mut last = LastRead::new(&buffers);
        assert_eq!(last.compare(&field, &buffers).unwrap(), 0);
        last.set(0, 0);
        let bytes = pool.slice(buffers.writes[1]).unwrap().to_vec();
        pool.slice(buffers.reads[0]).unwrap().fill_from(&bytes);
        assert_eq!(last.compare(&field, &buffers).unwrap(), 1);
        buffers.spoil().unwrap();
        assert!(matches!(last.compare(&field, &buffers), Err(BenchError::Wrong(_))));
    }
}
