//! Reads the footer of every slot in use, much at once: whole runs of small slots with one request
//! each, single footers of large ones.

use std::collections::VecDeque;
use std::sync::Arc;

use super::flight::{Flight, part_of};
use super::format::{Block, Footer, FooterError, Superblock};
use super::io::{Engine, Part, Transfer};
use super::recover::Found;
use crate::core::{Extent, FOOTER_BYTES, IoFault, Slot};
use crate::image::ImageMemory;

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

/// Reports what is in each slot of each region that has a slot length, each once, in no order.
/// `memory` is used until this returns and must hold no image. False when it has no room at all;
/// then nothing was read.
pub(crate) fn scan(
    engine: Box<dyn Engine>,
    memory: &dyn ImageMemory,
    state: &Superblock,
    device: u16,
    mut found: impl FnMut(Slot, Found),
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
    found: &mut impl FnMut(Slot, Found),
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
        found(Slot { device, offset, bytes }, what);
    }
}
