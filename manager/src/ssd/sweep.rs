//! Reads the footer of every slot in use, much at once: whole runs of small slots with one request
//! each, single footers of large ones.

use std::collections::VecDeque;
use std::sync::Arc;

use super::flight::{Flight, part_of};
use super::format::{Block, Footer, FooterError, Superblock};
use super::io::{Engine, Part, Transfer};
use super::recover::Found;
use crate::core::{Extent, FOOTER_BYTES, IoFault, Slot};
use crate::image::{DramSlice, ImageMemory};

/// Bytes of a run: one request.
const RUN_BYTES: u32 = 1 << 20;
/// Runs that are read at once.
const RUNS_MAX: u64 = 8;
/// Slots up to this length are read whole: a drive that gives 50,000 blocks or 2 GB a second gives
/// 40 KiB in the time of one more request.
const RUN_SLOT_BYTES_MAX: u32 = 32 << 10;

/// What is read with one request: `slots` slots of a region, from number `first` on.
#[derive(Clone, Copy)]
struct Piece {
    region: u32,
    first: u32,
    slots: u32,
    /// Slots in full, not the footer of the only one.
    whole: bool,
}

/// Image memory that holds nothing yet, cut into places for runs and for single footers.
struct Places {
    runs: Vec<Extent>,
    footers: Vec<Extent>,
}

impl Places {
    /// As much as `memory` has of it; `None` when it has none.
    fn of(memory: &dyn ImageMemory, footers_max: usize) -> Option<Self> {
        let at = |offset, bytes| {
            let extent = Extent { arena: 0, offset, bytes };
            memory.slice(extent).is_some().then_some(extent)
        };
        let footers_max = footers_max.min((RUN_BYTES / FOOTER_BYTES) as usize) as u64;
        let footers =
            (0..footers_max).map_while(|number| at(number * u64::from(FOOTER_BYTES), FOOTER_BYTES));
        let runs = (1..=RUNS_MAX).map_while(|number| at(number * u64::from(RUN_BYTES), RUN_BYTES));
        let places = Self { runs: runs.collect(), footers: footers.collect() };
        (!places.footers.is_empty()).then_some(places)
    }

    fn of_kind(&mut self, whole: bool) -> &mut Vec<Extent> {
        if whole { &mut self.runs } else { &mut self.footers }
    }
}

/// Reports what is in each slot of each region that has a slot length, each once, in no order, and
/// where its image came along, the bytes of the whole slot.
/// `memory` is used until this returns and must hold no image. False when it has no room at all;
/// then nothing was read.
pub(crate) fn scan(
    engine: Box<dyn Engine>,
    memory: &dyn ImageMemory,
    state: &Superblock,
    device: u16,
    mut found: impl FnMut(Slot, Found, Option<DramSlice<'_>>),
) -> bool {
    let Some(mut places) = Places::of(memory, engine.depth()) else { return false };
    let mut flight = Flight::new(engine, Transfer::Read, Arc::default());
    let mut pieces = pieces(state, !places.runs.is_empty());
    // Runs that found no place, and slots of runs that could not be read as a whole.
    let mut first = VecDeque::new();
    loop {
        while flight.has_room(0, u64::MAX)
            && let Some(piece) = first.pop_front().or_else(|| pieces.next())
        {
            let Some(place) = places.of_kind(piece.whole).pop() else {
                first.push_front(piece);
                break;
            };
            send(&mut flight, state, piece, place);
        }
        if flight.is_idle() {
            return true;
        }
        flight.wait(&mut || false);
        while let Some(((piece, place), fault)) = flight.take_ended() {
            if fault.is_some() && piece.whole {
                // One bad place must not take its neighbours along.
                let slots = piece.first..piece.first + piece.slots;
                let single = |first| Piece { first, slots: 1, whole: false, ..piece };
                first.extend(slots.map(single));
            } else {
                report(memory, state, device, (piece, place), fault, &mut found);
            }
            places.of_kind(piece.whole).push(place);
        }
    }
}

/// Everything there is to read, in file order.
fn pieces(state: &Superblock, with_runs: bool) -> impl Iterator<Item = Piece> + '_ {
    state.regions.iter().enumerate().flat_map(move |(region, &slot_bytes)| {
        let region = region as u32;
        let all = state.geometry.slots(region, slot_bytes);
        let whole = with_runs && slot_bytes <= RUN_SLOT_BYTES_MAX;
        let step = if whole { RUN_BYTES / slot_bytes.max(1) } else { 1 };
        let pieces = (0..all).step_by(step.max(1) as usize);
        pieces.map(move |first| Piece { region, first, slots: step.min(all - first), whole })
    })
}

fn slot_bytes(state: &Superblock, region: u32) -> u32 {
    state.regions.get(region as usize).copied().unwrap_or(0)
}

fn send(flight: &mut Flight<(Piece, Extent)>, state: &Superblock, piece: Piece, place: Extent) {
    let slot_bytes = slot_bytes(state, piece.region);
    let start = state.geometry.slot_offset(piece.region, slot_bytes, piece.first);
    let (offset, bytes) = if piece.whole {
        (start, piece.slots * slot_bytes)
    } else {
        (start + u64::from(slot_bytes - FOOTER_BYTES), FOOTER_BYTES)
    };
    let page = flight.begin((piece, place));
    let mut chunk = flight.chunk(offset);
    chunk.push(page, Part::Image(part_of(place, 0, bytes)));
    flight.send(chunk);
    flight.seal(page);
}

fn report(
    memory: &dyn ImageMemory,
    state: &Superblock,
    device: u16,
    (piece, place): (Piece, Extent),
    fault: Option<IoFault>,
    found: &mut impl FnMut(Slot, Found, Option<DramSlice<'_>>),
) {
    let bytes = slot_bytes(state, piece.region);
    let mut block = Block::ZERO;
    for number in 0..piece.slots {
        let offset = state.geometry.slot_offset(piece.region, bytes, piece.first + number);
        let end = if piece.whole { (number + 1) * bytes } else { FOOTER_BYTES };
        let footer = memory.slice(part_of(place, end - FOOTER_BYTES, FOOTER_BYTES));
        let what = match (fault, footer) {
            (Some(fault), _) => Found::Unread(fault),
            (None, Some(footer)) if footer.copy_to(&mut block.0) => match Footer::decode(&block) {
                Ok(footer) => Found::Footer(footer),
                Err(FooterError::Empty) => Found::Empty,
                Err(FooterError::Torn | FooterError::Format(_)) => Found::Torn,
            },
            (None, _) => Found::Unread(IoFault::Errno(libc::EFAULT)),
        };
        let whole = piece.whole && fault.is_none();
        let slot = whole.then(|| part_of(place, end - bytes, bytes));
        let slot = slot.and_then(|slot| memory.slice(slot));
        found(Slot { device, offset, bytes }, what, slot);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::sync::{Arc, Mutex};

    use orbitkv_shm_protocol::ids::PageHash;

    use super::*;
    use crate::core::ImageIdentity;
    use crate::image::HeapImages;
    use crate::ssd::fake::{Disk, FakeEngine, Fault, Served};
    use crate::ssd::format::FileId;
    use crate::ssd::io::Chunk;
    use crate::ssd::wake::Wake;

    const CAPACITY: u64 = 200 << 20;
    const SMALL: u32 = 8 << 10;
    const LARGE: u32 = 1 << 20;

    /// Small slots in region 0, large ones in region 2.
    fn state() -> Superblock {
        let mut state = Superblock::new(FileId([1; 16]), CAPACITY, 0).unwrap();
        (state.regions[0], state.regions[2]) = (SMALL, LARGE);
        state
    }

    fn slot(state: &Superblock, region: u32, index: u32) -> Slot {
        let bytes = slot_bytes(state, region);
        Slot { device: 4, offset: state.geometry.slot_offset(region, bytes, index), bytes }
    }

    fn write(disk: &Disk, state: &Superblock, slot: Slot, number: u64) {
        let image = ImageIdentity {
            namespace: [3; 32],
            hash: PageHash([number as u8; 32]),
            parent: None,
            image_bytes: 4096,
            generation: number,
            checksum: 0,
        };
        let footer =
            Footer { file: state.file, slot_offset: slot.offset, slot_bytes: slot.bytes, image };
        let mut block = Block::ZERO;
        footer.encode(&mut block);
        let end = (slot.offset + u64::from(slot.bytes)) as usize;
        disk.lock().unwrap()[end - block.0.len()..end].copy_from_slice(&block.0);
    }

    /// Scans and checks that every slot is told once.
    fn scanned(
        disk: &Disk,
        memory_bytes: usize,
        plan: impl FnMut(&Chunk) -> Option<Fault> + 'static,
    ) -> (HashMap<u64, Found>, Vec<Served>) {
        let (memory, state) = (Arc::new(HeapImages::new(memory_bytes)), state());
        let wake = Arc::new(Wake::new().unwrap());
        let engine = FakeEngine::new(disk.clone(), memory.clone(), wake, 16).with_plan(plan);
        let log = engine.log();
        let mut all = HashMap::new();
        assert!(scan(Box::new(engine), &*memory, &state, 4, |slot, found, whole| {
            assert_eq!(slot.device, 4);
            assert_eq!(whole.is_some_and(|slice| slice.bytes() == SMALL as usize), whole.is_some());
            assert_eq!(all.insert(slot.offset, found), None, "told twice");
        }));
        for region in 0..state.regions.len() as u32 {
            for index in 0..state.geometry.slots(region, slot_bytes(&state, region)) {
                assert!(all.contains_key(&slot(&state, region, index).offset), "{region} {index}");
            }
        }
        let log = log.lock().unwrap().clone();
        (all, log)
    }

    #[test]
    fn small_slots_come_in_runs_and_large_ones_by_their_footers() {
        let state = state();
        let disk: Disk = Arc::new(Mutex::new(vec![0; CAPACITY as usize]));
        let last = state.geometry.slots(0, SMALL) - 1;
        let places = [(0, 0), (0, 127), (0, 128), (0, last), (2, 0), (2, 5)];
        for (number, (region, index)) in places.into_iter().enumerate() {
            write(&disk, &state, slot(&state, region, index), number as u64);
        }
        let torn = slot(&state, 0, 7).offset as usize + SMALL as usize - 100;
        disk.lock().unwrap()[torn] = 1;
        let (all, log) = scanned(&disk, 16 << 20, |_| None);
        for (number, (region, index)) in places.into_iter().enumerate() {
            let found = all[&slot(&state, region, index).offset];
            assert!(
                matches!(found, Found::Footer(footer) if footer.image.generation == number as u64),
                "{found:?}"
            );
        }
        assert_eq!(all[&slot(&state, 0, 7).offset], Found::Torn);
        assert_eq!(all[&slot(&state, 0, 8).offset], Found::Empty);
        let large = state.geometry.slots(2, LARGE) as usize;
        assert_eq!(log.iter().filter(|served| served.bytes == FOOTER_BYTES).count(), large);
        assert_eq!(log.len(), large + (last as usize + 1).div_ceil(128));
        assert!(log.iter().all(|served| served.bytes <= RUN_BYTES));
    }

    #[test]
    fn a_bad_place_costs_its_own_slot_and_little_memory_costs_the_runs_only() {
        let state = state();
        let disk: Disk = Arc::new(Mutex::new(vec![0; CAPACITY as usize]));
        for index in 0..200 {
            write(&disk, &state, slot(&state, 0, index), index.into());
        }
        let bad = slot(&state, 0, 60).offset + u64::from(SMALL) - 512;
        let covers_bad = move |chunk: &Chunk| {
            let end = chunk.offset + u64::from(chunk.bytes());
            (chunk.offset <= bad && bad < end).then_some(Fault::Errno(libc::EIO))
        };
        for memory_bytes in [16 << 20, 16 << 10] {
            let (all, log) = scanned(&disk, memory_bytes, covers_bad);
            for index in 0..200 {
                let found = all[&slot(&state, 0, index).offset];
                if index == 60 {
                    assert_eq!(found, Found::Unread(IoFault::Errno(libc::EIO)));
                } else {
                    assert!(matches!(found, Found::Footer(_)), "{index}: {found:?}");
                }
            }
            let singles = memory_bytes < 1 << 20;
            assert_eq!(log.iter().all(|served| served.bytes == FOOTER_BYTES), singles);
        }
    }

    #[test]
    fn without_memory_nothing_is_claimed_to_be_read() {
        let (memory, disk) = (Arc::new(HeapImages::new(0)), Disk::default());
        let wake = Arc::new(Wake::new().unwrap());
        let engine = FakeEngine::new(disk, memory.clone(), wake, 16);
        assert!(!scan(Box::new(engine), &*memory, &state(), 0, |slot, _, _| panic!("{slot:?}")));
    }
}
