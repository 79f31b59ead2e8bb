//! Reads the footer of every slot in use, much at once: whole runs of small slots with one request
//! each, single footers of large ones.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

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
/// Runs of a scan beside a Manager that serves, which has memory of its own.
const RUNS_ASIDE: u32 = 3;
/// That memory, in bytes.
pub(crate) const ASIDE_BYTES: usize = ((1 + RUNS_ASIDE) * RUN_BYTES) as usize;
/// Footers that a device may fail to give before its scan is given up, unless it has so many slots
/// that more are few.
pub(crate) const UNREAD_MAX: u64 = 64;
/// Of so many slots one may fail.
const UNREAD_SHARE: u64 = 64;
/// Footers after another that a device may fail to give.
const UNREAD_RUN_MAX: u64 = 1024;
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

/// How far a scan is, for others to see.
#[derive(Default, Debug)]
pub(crate) struct ScanProgress {
    /// Slots there are.
    pub(crate) slots: AtomicU64,
    /// Slots that were looked at.
    pub(crate) scanned: AtomicU64,
    /// Bytes that were read for that.
    pub(crate) bytes: AtomicU64,
}

/// Who looks at a scan, and when it ends early.
pub(crate) struct ScanWatch<'a> {
    /// Told as it goes.
    pub(crate) progress: &'a ScanProgress,
    /// Whether to stop.
    pub(crate) stops: &'a dyn Fn() -> bool,
    /// Footers that may be missing, of however few slots, before the scan is given up; `None` for
    /// one that looks at every slot.
    pub(crate) unread_max: Option<u64>,
}

/// Why a scan did not look at every slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ScanEnd {
    /// There is no memory to read into; nothing was read.
    NoRoom,
    /// It was told to stop.
    Stopped,
    /// Too many footers could not be read, or not one could. Retired slots do not count.
    Failed(IoFault),
}

/// Slots of all regions that have a slot length.
pub(crate) fn slots_of(state: &Superblock) -> u64 {
    let regions = state.regions.iter().enumerate();
    regions.map(|(region, bytes)| u64::from(state.geometry.slots(region as u32, *bytes))).sum()
}

/// Footers that could not be read.
struct Unread {
    all: u64,
    /// Since the last one that could.
    run: u64,
    max: Option<u64>,
    fault: Option<IoFault>,
    /// Those that could.
    read: u64,
}

impl Unread {
    fn new(slots: u64, unread_max: Option<u64>) -> Self {
        let max = unread_max.map(|max| max.min(slots).max(slots / UNREAD_SHARE));
        Self { all: 0, run: 0, max, fault: None, read: 0 }
    }

    fn count(&mut self, what: &Found) {
        match what {
            Found::Unread(fault) => {
                (self.all, self.run) = (self.all + 1, self.run + 1);
                self.fault = Some(*fault);
            }
            Found::Retired => {}
            _ => (self.run, self.read) = (0, self.read + 1),
        }
    }

    fn is_too_much(&self) -> bool {
        self.max.is_some_and(|max| self.all >= max || self.run >= UNREAD_RUN_MAX)
    }

    /// Why the device counts as one that cannot be read, after a look at every slot.
    fn verdict(&self) -> Option<ScanEnd> {
        let gives_up = self.max.is_some() && self.read == 0;
        self.fault.filter(|_| gives_up).map(ScanEnd::Failed)
    }
}

/// Reports what is in each slot of each region that has a slot length, each once, in no order, and
/// where its image came along, the bytes of the whole slot.
/// `memory` is used until this returns and must hold no image. After an error some slots were not
/// reported.
pub(crate) fn scan(
    engine: Box<dyn Engine>,
    memory: &dyn ImageMemory,
    state: &Superblock,
    device: u16,
    watch: &ScanWatch<'_>,
    mut found: impl FnMut(Slot, Found, Option<DramSlice<'_>>),
) -> Result<(), ScanEnd> {
    let mut places = Places::of(memory, engine.depth()).ok_or(ScanEnd::NoRoom)?;
    let mut unread = Unread::new(slots_of(state), watch.unread_max);
    let mut found = |slot: Slot, what: Found, bytes: Option<DramSlice<'_>>| {
        unread.count(&what);
        watch.progress.scanned.fetch_add(1, Ordering::Relaxed);
        found(slot, what, bytes);
        unread.is_too_much()
    };
    let mut given_up = None;
    let mut flight = Flight::new(engine, Transfer::Read, Arc::default());
    let mut pieces = pieces(state, !places.runs.is_empty());
    // Runs that found no place, and slots of runs that could not be read as a whole.
    let mut first = VecDeque::new();
    loop {
        given_up = given_up.or_else(|| (watch.stops)().then_some(ScanEnd::Stopped));
        while given_up.is_none()
            && flight.has_room(0, u64::MAX)
            && let Some(piece) = first.pop_front().or_else(|| pieces.next())
        {
            if let Some(slot) = retired(state, device, piece) {
                found(slot, Found::Retired, None);
                continue;
            }
            let Some(place) = places.of_kind(piece.whole).pop() else {
                first.push_front(piece);
                break;
            };
            let bytes = send(&mut flight, state, piece, place);
            watch.progress.bytes.fetch_add(bytes, Ordering::Relaxed);
        }
        if flight.is_idle() {
            break;
        }
        flight.wait(&mut || false);
        while let Some(((piece, place), fault)) = flight.take_ended() {
            if fault.is_some() && piece.whole {
                // One bad place must not take its neighbours along.
                let slots = piece.first..piece.first + piece.slots;
                let single = |first| Piece { first, slots: 1, whole: false, ..piece };
                first.extend(slots.map(single));
            } else {
                let too_much = report(memory, state, device, (piece, place), fault, &mut found);
                if let Some(fault) = fault.filter(|_| too_much) {
                    given_up = given_up.or(Some(ScanEnd::Failed(fault)));
                }
            }
            places.of_kind(piece.whole).push(place);
        }
    }
    given_up.or_else(|| unread.verdict()).map_or(Ok(()), Err)
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

/// The slot of a piece that is read alone, when it is retired: reading it again, which may have been
/// what failed, would take as long as then.
fn retired(state: &Superblock, device: u16, piece: Piece) -> Option<Slot> {
    let bytes = slot_bytes(state, piece.region);
    let offset = state.geometry.slot_offset(piece.region, bytes, piece.first);
    (!piece.whole && state.is_retired(offset)).then_some(Slot { device, offset, bytes })
}

/// Returns how many bytes it reads.
fn send(
    flight: &mut Flight<(Piece, Extent)>,
    state: &Superblock,
    piece: Piece,
    place: Extent,
) -> u64 {
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
    bytes.into()
}

/// True when too much could not be read.
fn report(
    memory: &dyn ImageMemory,
    state: &Superblock,
    device: u16,
    (piece, place): (Piece, Extent),
    fault: Option<IoFault>,
    found: &mut impl FnMut(Slot, Found, Option<DramSlice<'_>>) -> bool,
) -> bool {
    let mut too_much = false;
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
        too_much = found(Slot { device, offset, bytes }, what, slot);
    }
    too_much
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
    const WATCH: ScanWatch<'static> =
        ScanWatch { progress: &NOBODY, stops: &|| false, unread_max: Some(UNREAD_MAX) };
    static NOBODY: ScanProgress = ScanProgress {
        slots: AtomicU64::new(0),
        scanned: AtomicU64::new(0),
        bytes: AtomicU64::new(0),
    };

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
            checksum: Some(0),
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
        let progress = ScanProgress::default();
        let watch = ScanWatch { progress: &progress, ..WATCH };
        let end = scan(Box::new(engine), &*memory, &state, 4, &watch, |slot, found, whole| {
            assert_eq!(slot.device, 4);
            assert_eq!(whole.is_some_and(|slice| slice.bytes() == SMALL as usize), whole.is_some());
            assert_eq!(all.insert(slot.offset, found), None, "told twice");
        });
        assert_eq!(end, Ok(()));
        assert_eq!(progress.scanned.load(Ordering::Relaxed), slots_of(&state));
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
        let found = |slot, _: Found, _: Option<DramSlice<'_>>| panic!("{slot:?}");
        let end = scan(Box::new(engine), &*memory, &state(), 0, &WATCH, found);
        assert_eq!(end, Err(ScanEnd::NoRoom));
    }

    /// Scans a disk of large slots; ends early as `watch` says.
    fn ended(
        plan: impl FnMut(&Chunk) -> Option<Fault> + 'static,
        watch: &ScanWatch<'_>,
    ) -> (Result<(), ScanEnd>, usize) {
        let mut state = state();
        state.regions[0] = 0;
        let (memory, disk) = (Arc::new(HeapImages::new(ASIDE_BYTES)), vec![0; CAPACITY as usize]);
        let wake = Arc::new(Wake::new().unwrap());
        let disk = Arc::new(Mutex::new(disk));
        let engine = FakeEngine::new(disk, memory.clone(), wake, 16).with_plan(plan);
        let mut told = 0;
        let end = scan(Box::new(engine), &*memory, &state, 0, watch, |_, _, _| told += 1);
        (end, told)
    }

    /// A file none of whose footers can be read is given up, and so is one with too many that
    /// cannot; fewer cost their slots only. Nothing is in flight afterwards.
    #[test]
    fn a_file_that_cannot_be_read_is_given_up() {
        let eio = || Some(Fault::Errno(libc::EIO));
        let failed = Err(ScanEnd::Failed(IoFault::Errno(libc::EIO)));
        let mut large = state();
        large.regions[0] = 0;
        let slots = slots_of(&large) as usize;
        let watch = ScanWatch { unread_max: Some(10), ..WATCH };
        assert_eq!(ended(move |_| eio(), &WATCH).0, failed, "{slots} slots, none of them");
        let first = |bad| {
            let mut reads = 0;
            move |_: &Chunk| {
                reads += 1;
                (reads <= bad).then(eio).flatten()
            }
        };
        assert_eq!(ended(first(9), &watch), (Ok(()), slots));
        let (end, told) = ended(first(10), &watch);
        assert_eq!(end, failed);
        assert!((10..slots).contains(&told), "{told} of {slots}");
    }

    #[test]
    fn few_bad_places_of_many_are_left_out_and_a_long_run_of_them_is_not() {
        let mut state = state();
        state.regions.fill(SMALL);
        let slots = slots_of(&state);
        let few = slots / UNREAD_SHARE;
        assert!(few > UNREAD_MAX && few < UNREAD_RUN_MAX, "{few} of {slots}");
        let unread = Found::Unread(IoFault::Errno(libc::EIO));
        let mut seen = Unread::new(slots, Some(UNREAD_MAX));
        let mut tell = |what: &Found, times: u64| {
            (0..times).for_each(|_| seen.count(what));
            seen.is_too_much()
        };
        assert!(!tell(&unread, few - 1));
        assert!(!tell(&Found::Retired, slots), "nobody looked at these");
        assert!(tell(&unread, 1));
        let mut seen = Unread::new(slots * 64, Some(UNREAD_MAX));
        for (what, times, too_much) in [
            (&unread, UNREAD_RUN_MAX - 1, false),
            (&Found::Torn, 1, false),
            (&unread, UNREAD_RUN_MAX - 1, false),
            (&Found::Retired, 1, false),
            (&unread, 1, true),
        ] {
            (0..times).for_each(|_| seen.count(what));
            assert_eq!(seen.is_too_much(), too_much);
        }
    }

    /// Also where every slot is retired: there is nothing that fails.
    #[test]
    fn retired_slots_are_told_and_not_read_alone() {
        let disk: Disk = Arc::new(Mutex::new(vec![0; CAPACITY as usize]));
        let mut state = state();
        state.regions[0] = 0;
        let slots = slots_of(&state);
        for index in 0..slots as u32 {
            assert!(state.retire(slot(&state, 2, index).offset));
        }
        let memory = Arc::new(HeapImages::new(ASIDE_BYTES));
        let engine = FakeEngine::new(disk, memory.clone(), Arc::new(Wake::new().unwrap()), 16)
            .with_plan(|_| Some(Fault::Errno(libc::EIO)));
        let log = engine.log();
        let mut told = 0;
        let end = scan(Box::new(engine), &*memory, &state, 4, &WATCH, |_, found, _| {
            assert_eq!(found, Found::Retired);
            told += 1;
        });
        assert_eq!((end, told), (Ok(()), slots));
        assert!(log.lock().unwrap().is_empty());
    }

    #[test]
    fn a_file_of_which_all_but_the_retired_slots_fail_is_given_up() {
        let eio = IoFault::Errno(libc::EIO);
        for (what, end) in [(Found::Retired, Some(ScanEnd::Failed(eio))), (Found::Empty, None)] {
            let mut seen = Unread::new(20, Some(UNREAD_MAX));
            for _ in 0..10 {
                seen.count(&what);
                seen.count(&Found::Unread(eio));
            }
            assert!(!seen.is_too_much());
            assert_eq!(seen.verdict(), end);
        }
    }

    #[test]
    fn a_look_at_every_slot_is_never_given_up() {
        let mut large = state();
        large.regions[0] = 0;
        let slots = slots_of(&large) as usize;
        let watch = ScanWatch { unread_max: None, ..WATCH };
        assert_eq!(ended(|_| Some(Fault::Errno(libc::EIO)), &watch), (Ok(()), slots));
    }

    #[test]
    fn a_scan_that_is_told_to_stop_takes_what_is_in_flight_back() {
        let calls = std::cell::Cell::new(0);
        let stops = || calls.replace(calls.get() + 1) == 2;
        let (end, told) = ended(|_| None, &ScanWatch { stops: &stops, ..WATCH });
        assert_eq!(end, Err(ScanEnd::Stopped));
        assert!(told > 0);
    }

    /// A hundred thousand slots are found by their footers alone, at depth.
    #[test]
    fn a_hundred_thousand_slots_cost_a_footer_each() {
        const SLOT: u32 = 36 << 10;
        const SLOTS: u64 = 100_000;
        let mut state = Superblock::new(FileId([1; 16]), 3600 << 20, 0).unwrap();
        state.regions.fill(SLOT);
        let all = slots_of(&state);
        assert!(all >= SLOTS, "{all}");
        // Zeros that nobody touches take no memory.
        let disk: Disk = Arc::new(Mutex::new(vec![0; state.geometry.capacity_bytes as usize]));
        for region in (0..state.regions.len() as u32).step_by(7) {
            let slot = Slot {
                device: 0,
                offset: state.geometry.slot_offset(region, SLOT, 3),
                bytes: SLOT,
            };
            write(&disk, &state, slot, region.into());
        }
        let memory = Arc::new(HeapImages::new(ASIDE_BYTES));
        let engine = FakeEngine::new(disk, memory.clone(), Arc::new(Wake::new().unwrap()), 128);
        let log = engine.log();
        let progress = ScanProgress::default();
        let watch = ScanWatch { progress: &progress, ..WATCH };
        let mut footers = 0;
        let end = scan(Box::new(engine), &*memory, &state, 0, &watch, |_, found, whole| {
            assert!(whole.is_none());
            footers += usize::from(matches!(found, Found::Footer(_)));
        });
        assert_eq!((end, footers), (Ok(()), state.regions.len().div_ceil(7)));
        assert_eq!(progress.scanned.load(Ordering::Relaxed), all);
        assert_eq!(progress.bytes.load(Ordering::Relaxed), all * u64::from(FOOTER_BYTES));
        let log = log.lock().unwrap();
        assert_eq!(log.len() as u64, all);
        assert!(log.iter().all(|served| served.bytes == FOOTER_BYTES));
    }
}
