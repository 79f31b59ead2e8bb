//! Extents of the DRAM pool: two-level segregated free lists with immediate coalescing.
//!
//! Only free runs have nodes; `tags` marks the first and last unit of each free run, so that
//! freeing finds both neighbours at once. Small pages are cut from the front of a run and large
//! ones from its back, which keeps the two apart in a mixed pool.

use std::cell::Cell;

use super::effect::Extent;

/// Granularity of the pool, in bytes.
pub const UNIT_BYTES: u64 = 4096;

/// No extent crosses a multiple of this within its arena: fixed-buffer I/O registers memory in
/// pieces of at most as much.
const PIECE_BYTES: u64 = 1 << 30;
const PIECE_UNITS: u32 = (PIECE_BYTES / UNIT_BYTES) as u32;

const SUBDIVISIONS_LOG2: u32 = 4;
const SUBDIVISIONS: usize = 1 << SUBDIVISIONS_LOG2;
const LEVELS: usize = 33 - SUBDIVISIONS_LOG2 as usize;
/// Runs looked at in a bin whose smaller members may be too short.
const BIN_PROBES_MAX: usize = 16;
/// Extents of at least this many units (1 MiB) are cut from the back of a run and aligned to as
/// many, so that a 1 MiB chunk of I/O never straddles two 2 MiB pages.
const LARGE_UNITS: u32 = 256;
const NIL: u32 = u32::MAX;

#[derive(Clone, Copy, Debug)]
struct Run {
    start: u32,
    len: u32,
    prev: u32,
    next: u32,
}

/// Free space of one piece of an arena.
#[derive(Debug)]
struct Arena {
    units: u32,
    /// Node number + 1 at the first and last unit of each free run, else 0.
    tags: Vec<u32>,
    runs: Vec<Run>,
    recycled: Vec<u32>,
    heads: [[u32; SUBDIVISIONS]; LEVELS],
    level_bits: u32,
    bin_bits: [u16; LEVELS],
    free_units: u64,
    longest: Longest,
}

/// The longest free run: kept up to date as runs come and go, looked for only after the last one
/// of that length went.
#[derive(Clone, Debug, Default)]
struct Longest {
    /// Its length in units; `None`: to be looked for.
    units: Cell<Option<u32>>,
    /// Free runs of that length.
    runs: Cell<u32>,
}

impl Longest {
    fn came(&self, len: u32) {
        match self.units.get() {
            Some(longest) if len > longest => self.found(len, 1),
            Some(longest) if len == longest => self.runs.set(self.runs.get() + 1),
            _ => {}
        }
    }

    fn went(&self, len: u32) {
        if self.units.get() == Some(len) {
            self.runs.set(self.runs.get() - 1);
            if self.runs.get() == 0 {
                self.units.set(None);
            }
        }
    }

    fn found(&self, units: u32, runs: u32) {
        self.units.set(Some(units));
        self.runs.set(runs);
    }
}

/// All arenas of the pool.
#[derive(Debug)]
pub struct Extents {
    /// Arenas cut into pieces of at most [`PIECE_BYTES`].
    pieces: Vec<Arena>,
    /// First piece of each arena.
    first_piece: Vec<usize>,
    /// Arena of each piece.
    arena_of: Vec<u16>,
    /// Where the last allocation or release was: the place to look first.
    hint: usize,
    capacity: u64,
}

impl Extents {
    /// Arenas of the given sizes in bytes; a tail below [`UNIT_BYTES`] is not used.
    pub fn new(arena_bytes: &[u64]) -> Self {
        let mut extents = Self {
            pieces: Vec::new(),
            first_piece: Vec::new(),
            arena_of: Vec::new(),
            hint: 0,
            capacity: 0,
        };
        for (arena, &bytes) in arena_bytes.iter().enumerate() {
            extents.first_piece.push(extents.pieces.len());
            let mut left = bytes / UNIT_BYTES * UNIT_BYTES;
            extents.capacity += left;
            while left > 0 {
                let piece = left.min(PIECE_BYTES);
                extents.pieces.push(Arena::new(piece));
                extents.arena_of.push(arena as u16);
                left -= piece;
            }
        }
        extents
    }

    /// Bytes that all arenas together hold.
    pub fn capacity_bytes(&self) -> u64 {
        self.capacity
    }

    /// Bytes in no extent.
    pub fn free_bytes(&self) -> u64 {
        self.pieces.iter().map(|piece| piece.free_units * UNIT_BYTES).sum()
    }

    /// Length of the longest free run, in bytes: the largest page that fits without eviction.
    pub fn largest_free_bytes(&self) -> u64 {
        let longest = self.pieces.iter().map(Arena::longest).max();
        u64::from(longest.unwrap_or(0)) * UNIT_BYTES
    }

    /// Longest extent that an empty pool could give, in bytes.
    pub fn largest_possible_bytes(&self) -> u64 {
        let largest = self.pieces.iter().map(|piece| piece.units).max();
        u64::from(largest.unwrap_or(0)) * UNIT_BYTES
    }

    /// Arena, first unit and length in units of every free run, in no order. For checks.
    pub(super) fn free_runs(&self) -> impl Iterator<Item = (u16, u32, u32)> {
        let numbered = self.pieces.iter().enumerate();
        numbered.flat_map(|(at, piece)| {
            let arena = self.arena_of[at];
            let before = (at - self.first_piece[usize::from(arena)]) as u32 * PIECE_UNITS;
            piece.free_runs().map(move |run| (arena, before + run.start, run.len))
        })
    }

    /// An extent of `bytes`, rounded up to whole units, or `None` when no free run is that long.
    pub fn allocate(&mut self, bytes: u64) -> Option<Extent> {
        let units = u32::try_from(bytes.div_ceil(UNIT_BYTES)).ok().filter(|&units| units > 0)?;
        let extent_bytes = u32::try_from(u64::from(units) * UNIT_BYTES).ok()?;
        let count = self.pieces.len();
        for step in 0..count {
            let at = (self.hint + step) % count;
            if let Some(start) = self.pieces[at].allocate(units) {
                self.hint = at;
                let arena = self.arena_of[at];
                let before = (at - self.first_piece[usize::from(arena)]) as u64 * PIECE_BYTES;
                let offset = before + u64::from(start) * UNIT_BYTES;
                return Some(Extent { arena, offset, bytes: extent_bytes });
            }
        }
        None
    }

    /// Gives an extent back.
    pub fn free(&mut self, extent: Extent) {
        let first = self.first_piece[usize::from(extent.arena)];
        let at = first + (extent.offset / PIECE_BYTES) as usize;
        let start = (extent.offset % PIECE_BYTES / UNIT_BYTES) as u32;
        self.pieces[at].free(start, extent.bytes / UNIT_BYTES as u32);
        self.hint = at;
    }
}

impl Arena {
    fn new(bytes: u64) -> Self {
        let units = u32::try_from(bytes / UNIT_BYTES).unwrap_or(u32::MAX - 2);
        let mut arena = Self {
            units,
            tags: vec![0; units as usize],
            runs: Vec::new(),
            recycled: Vec::new(),
            heads: [[NIL; SUBDIVISIONS]; LEVELS],
            level_bits: 0,
            bin_bits: [0; LEVELS],
            free_units: u64::from(units),
            longest: Longest::default(),
        };
        if units > 0 {
            arena.insert(0, units);
        }
        arena
    }

    /// Bin that holds runs of `len` units: exact below 16, then 16 steps an octave.
    fn bin(len: u32) -> (usize, usize) {
        let log = len.ilog2();
        if log < SUBDIVISIONS_LOG2 {
            return (0, len as usize);
        }
        let level = log - SUBDIVISIONS_LOG2 + 1;
        let step = (len >> (log - SUBDIVISIONS_LOG2)) as usize & (SUBDIVISIONS - 1);
        (level as usize, step)
    }

    fn allocate(&mut self, units: u32) -> Option<u32> {
        let (node, start) = self.find(units)?;
        let run = self.runs[node as usize];
        self.remove(node);
        if start > run.start {
            self.insert(run.start, start - run.start);
        }
        let (end, run_end) = (start + units, run.start + run.len);
        if end < run_end {
            self.insert(end, run_end - end);
        }
        self.free_units -= u64::from(units);
        Some(start)
    }

    /// Where in `run` an extent of `units` goes, if it fits: small ones at the front, large ones
    /// at the last aligned place.
    fn place(run: Run, units: u32) -> Option<u32> {
        let last = run.start + run.len.checked_sub(units)?;
        if units < LARGE_UNITS {
            return Some(run.start);
        }
        let aligned = last & !(LARGE_UNITS - 1);
        (aligned >= run.start).then_some(aligned)
    }

    fn free(&mut self, start: u32, units: u32) {
        let (mut first, mut len) = (start, units);
        if start > 0 && self.tags[start as usize - 1] != 0 {
            let node = self.tags[start as usize - 1] - 1;
            let run = self.runs[node as usize];
            debug_assert_eq!(run.start + run.len, start, "extent freed twice");
            self.remove(node);
            first = run.start;
            len += run.len;
        }
        let end = (start + units) as usize;
        if end < self.tags.len() && self.tags[end] != 0 {
            let node = self.tags[end] - 1;
            let run = self.runs[node as usize];
            debug_assert_eq!(run.start as usize, end, "extent freed twice");
            self.remove(node);
            len += run.len;
        }
        self.insert(first, len);
        self.free_units += u64::from(units);
    }

    /// A free run that holds `units` and where in it: from its own bin if one of the first few
    /// fits, else from the nearest larger bin that has one.
    fn find(&self, units: u32) -> Option<(u32, u32)> {
        let (own_level, own_step) = Self::bin(units);
        let mut levels = self.level_bits & (u32::MAX << own_level);
        while levels != 0 {
            let level = levels.trailing_zeros() as usize;
            levels &= levels - 1;
            let mut steps = self.bin_bits[level];
            if level == own_level {
                steps &= u16::MAX << own_step;
            }
            while steps != 0 {
                let step = steps.trailing_zeros() as usize;
                steps &= steps - 1;
                let mut node = self.heads[level][step];
                for _ in 0..BIN_PROBES_MAX {
                    if node == NIL {
                        break;
                    }
                    let run = self.runs[node as usize];
                    if let Some(start) = Self::place(run, units) {
                        return Some((node, start));
                    }
                    node = run.next;
                }
            }
        }
        None
    }

    fn insert(&mut self, start: u32, len: u32) {
        self.longest.came(len);
        let (level, step) = Self::bin(len);
        let head = self.heads[level][step];
        let run = Run { start, len, prev: NIL, next: head };
        let node = match self.recycled.pop() {
            Some(node) => {
                self.runs[node as usize] = run;
                node
            }
            None => {
                self.runs.push(run);
                self.runs.len() as u32 - 1
            }
        };
        if head != NIL {
            self.runs[head as usize].prev = node;
        }
        self.heads[level][step] = node;
        self.bin_bits[level] |= 1 << step;
        self.level_bits |= 1 << level;
        self.tags[start as usize] = node + 1;
        self.tags[(start + len - 1) as usize] = node + 1;
    }

    fn remove(&mut self, node: u32) {
        let run = self.runs[node as usize];
        self.longest.went(run.len);
        let (level, step) = Self::bin(run.len);
        if run.prev == NIL {
            self.heads[level][step] = run.next;
        } else {
            self.runs[run.prev as usize].next = run.next;
        }
        if run.next != NIL {
            self.runs[run.next as usize].prev = run.prev;
        }
        if self.heads[level][step] == NIL {
            self.bin_bits[level] &= !(1 << step);
            if self.bin_bits[level] == 0 {
                self.level_bits &= !(1 << level);
            }
        }
        self.tags[run.start as usize] = 0;
        self.tags[(run.start + run.len - 1) as usize] = 0;
        self.recycled.push(node);
    }

    fn free_runs(&self) -> impl Iterator<Item = Run> {
        let heads = self.heads.iter().flatten().copied();
        heads.flat_map(|head| {
            let next = |&node: &u32| Some(self.runs[node as usize].next).filter(|&n| n != NIL);
            std::iter::successors((head != NIL).then_some(head), next)
                .map(|node| self.runs[node as usize])
        })
    }

    fn longest(&self) -> u32 {
        if let Some(longest) = self.longest.units.get() {
            return longest;
        }
        if self.level_bits == 0 {
            return 0;
        }
        // The bin of the longest runs holds none that is in another bin.
        let level = self.level_bits.ilog2() as usize;
        let mut node = self.heads[level][self.bin_bits[level].ilog2() as usize];
        let (mut longest, mut runs) = (0, 0);
        while node != NIL {
            let run = self.runs[node as usize];
            if run.len > longest {
                (longest, runs) = (run.len, 0);
            }
            runs += u32::from(run.len == longest);
            node = run.next;
        }
        self.longest.found(longest, runs);
        longest
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::{any, proptest};

    use super::*;

    #[test]
    fn a_pool_of_equal_pages_fills_to_the_last_byte_and_empties_to_one_run() {
        let mut pool = Extents::new(&[96 << 20]);
        let mut held: Vec<_> = std::iter::from_fn(|| pool.allocate(4096)).collect();
        assert_eq!(held.len(), 96 << 20 >> 12);
        assert_eq!(pool.free_bytes(), 0);
        // Every second page first, so that nothing can coalesce until the second half goes.
        let odd: Vec<_> = held.iter().copied().skip(1).step_by(2).collect();
        held.retain(|extent| !odd.contains(extent) || extent.offset == u64::MAX);
        for extent in odd {
            pool.free(extent);
        }
        assert_eq!(pool.largest_free_bytes(), 4096);
        for extent in held {
            pool.free(extent);
        }
        assert_eq!(pool.largest_free_bytes(), 96 << 20);
    }

    #[test]
    fn small_and_large_pages_grow_from_opposite_ends() {
        let mut pool = Extents::new(&[64 << 20]);
        let small = pool.allocate(4096).unwrap();
        let large = pool.allocate(9 << 20).unwrap();
        assert_eq!(small.offset, 0);
        assert_eq!(large.offset + u64::from(large.bytes), 64 << 20);
    }

    #[test]
    fn no_extent_crosses_a_piece_of_one_gib() {
        let mut pool = Extents::new(&[(2 << 30) + (512 << 20), 64 << 20]);
        let mut seen = [0; 2];
        let mut held = Vec::new();
        while let Some(extent) = pool.allocate(48 << 20) {
            let last = extent.offset + u64::from(extent.bytes) - 1;
            assert_eq!(extent.offset >> 30, last >> 30, "{extent:?}");
            seen[usize::from(extent.arena)] += 1;
            held.push(extent);
        }
        assert_eq!(seen, [21 + 21 + 10, 1]);
        held.into_iter().for_each(|extent| pool.free(extent));
        assert_eq!(pool.free_bytes(), pool.capacity_bytes());
    }

    #[test]
    fn nothing_fits_in_nothing() {
        let mut pool = Extents::new(&[4095]);
        assert_eq!(pool.allocate(1), None);
        assert_eq!(pool.largest_free_bytes(), 0);
        assert_eq!(Extents::new(&[8192]).allocate(0), None);
    }

    proptest! {
        /// Random sizes allocated and freed in random order never overlap, never leave the
        /// arena, and leave one whole run behind.
        #[test]
        fn extents_never_overlap(steps in vec((any::<bool>(), 1_u64..600_000, any::<usize>()), 1..300)) {
            let sizes = [1_u64 << 20, 3 << 20];
            let mut pool = Extents::new(&sizes);
            let mut owner = [vec![false; 256], vec![false; 768]];
            let mut held: Vec<Extent> = Vec::new();
            let units = |extent: &Extent| {
                let first = (extent.offset / UNIT_BYTES) as usize;
                first..first + (u64::from(extent.bytes) / UNIT_BYTES) as usize
            };
            for (free, bytes, pick) in steps {
                if free && !held.is_empty() {
                    let extent = held.swap_remove(pick % held.len());
                    for unit in units(&extent) {
                        assert!(std::mem::replace(&mut owner[usize::from(extent.arena)][unit], false));
                    }
                    pool.free(extent);
                } else if let Some(extent) = pool.allocate(bytes) {
                    assert!(u64::from(extent.bytes) >= bytes);
                    for unit in units(&extent) {
                        assert!(!std::mem::replace(&mut owner[usize::from(extent.arena)][unit], true));
                    }
                    held.push(extent);
                } else {
                    // Alignment and the bounded probe may refuse what is barely there, never plenty.
                    assert!(pool.largest_free_bytes() < bytes * 2 + (2 << 20));
                }
                let used: u64 = held.iter().map(|extent| u64::from(extent.bytes)).sum();
                assert_eq!(pool.free_bytes(), pool.capacity_bytes() - used);
                let longest = pool.free_runs().map(|(_, _, len)| len).max().unwrap_or(0);
                assert_eq!(pool.largest_free_bytes(), u64::from(longest) * UNIT_BYTES);
            }
            for extent in held {
                pool.free(extent);
            }
            assert_eq!(pool.free_bytes(), pool.capacity_bytes());
            assert_eq!(pool.largest_free_bytes(), 3 << 20);
        }
    }
}
