//! What the tier must know before it may trust a footer: kept twice, written alternately.

use std::fmt;

use crate::core::{GENERATIONS_END, RegionGeometry};

use super::{
    BLOCK_BYTES, Block, FORMAT, checksum, get_array, get_u32, get_u64, is_sealed, padded, put_u32,
    put_u64, seal,
};

const MAGIC: u64 = u64::from_le_bytes(*b"OKVSSDT1");
/// No file is written so often.
const SEQUENCES_END: u64 = 1 << 62;

/// Copies of the superblock in a file.
pub const SUPERBLOCK_COPIES: u32 = 2;
/// Forgotten namespaces that are remembered one by one; see [`Superblock::forget`].
pub const FORGOTTEN_MAX: usize = 4096;
/// Slots that can be recorded as retired.
pub const RETIRED_MAX: usize = 16_384;
/// Every file has room to record this many regions (1 TiB of 64 MiB regions), so that it can grow.
const REGIONS_RESERVED_MIN: u64 = 16_384;
/// No file has more regions (64 TiB of 64 MiB regions).
const REGIONS_MAX: u64 = 1 << 20;
/// Data starts at a multiple of this, in bytes.
const DATA_ALIGN_BYTES: u64 = 1 << 20;

const FORMAT_AT: usize = 8;
const FILE_ID_AT: usize = 16;
const SEQUENCE_AT: usize = 32;
const CAPACITY_AT: usize = 40;
const REGION_BYTES_AT: usize = 48;
const DATA_OFFSET_AT: usize = 56;
const TABLE_RESERVED_AT: usize = 64;
const GENERATION_AT: usize = 72;
const FLOOR_AT: usize = 80;
const REGIONS_AT: usize = 88;
const FORGOTTEN_AT: usize = 92;
const RETIRED_AT: usize = 96;
const TABLE_CHECKSUM_AT: usize = 104;

const REGION_ENTRY_BYTES: usize = 4;
const FORGOTTEN_ENTRY_BYTES: usize = 40;
const RETIRED_ENTRY_BYTES: usize = 8;

/// Random identity of one SSD file, made when it is formatted.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct FileId(pub [u8; 16]);

impl fmt::Debug for FileId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", u128::from_be_bytes(self.0))
    }
}

/// A namespace whose older pages must never be hit again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Forgotten {
    /// SHA-256 of the namespace's fields.
    pub namespace: [u8; 32],
    /// First generation that is not forgotten.
    pub generation: u64,
}

/// State of one SSD file, as its superblock and table record it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Superblock {
    /// Identity of the file.
    pub file: FileId,
    /// Raised by every write; the copy with the higher one counts. Its lowest bit names the copy.
    pub sequence: u64,
    /// How the file is cut.
    pub geometry: RegionGeometry,
    /// No generation above this was given out when this was written, as far as the file knows.
    pub generation: u64,
    /// Slots with a generation below this are not trusted at all.
    pub generation_floor: u64,
    /// Slot length of each region in bytes; zero while it has none.
    pub regions: Vec<u32>,
    /// Forgotten namespaces, no namespace twice, at most [`FORGOTTEN_MAX`].
    pub forgotten: Vec<Forgotten>,
    /// Offsets of the slots that must not be used again, ascending, at most [`RETIRED_MAX`].
    pub retired: Vec<u64>,
    table_reserved: u64,
}

/// Why bytes are no superblock.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SuperblockError {
    /// The magic number is missing.
    #[error("it does not begin as an OrbitKV SSD file")]
    NotOurs,
    /// Written by a program that knows another format.
    #[error("it has format {0}; this program knows {FORMAT}")]
    Format(u32),
    /// A checksum does not match: torn, or damaged.
    #[error("its checksum does not match")]
    Checksum,
    /// The numbers contradict each other although the checksum matches.
    #[error("its numbers contradict each other")]
    Numbers,
}

/// A superblock without its table: says where the table is and how long.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SuperblockHead {
    file: FileId,
    sequence: u64,
    geometry: RegionGeometry,
    table_reserved: u64,
    generation: u64,
    generation_floor: u64,
    regions: u32,
    forgotten: u32,
    retired: u32,
    table_checksum: u64,
}

/// Bytes that one table takes at most for a file of `regions` regions.
const fn table_reserved_for(regions: u64) -> u64 {
    let regions = if regions < REGIONS_RESERVED_MIN { REGIONS_RESERVED_MIN } else { regions };
    padded(
        regions * REGION_ENTRY_BYTES as u64
            + (FORGOTTEN_MAX * FORGOTTEN_ENTRY_BYTES) as u64
            + (RETIRED_MAX * RETIRED_ENTRY_BYTES) as u64,
    )
}

/// Where the data starts behind two tables of `table_reserved` bytes.
const fn data_offset_for(table_reserved: u64) -> u64 {
    let tables = SUPERBLOCK_COPIES as u64 * (BLOCK_BYTES as u64 + table_reserved);
    tables.next_multiple_of(DATA_ALIGN_BYTES)
}

impl Superblock {
    /// Smallest capacity of a file in bytes: superblocks, tables and one slot of two blocks.
    pub const CAPACITY_BYTES_MIN: u64 =
        data_offset_for(table_reserved_for(0)) + 2 * BLOCK_BYTES as u64;

    /// Largest capacity of a file in bytes: its table would not fit behind more regions.
    pub const CAPACITY_BYTES_MAX: u64 = REGIONS_MAX * RegionGeometry::REGION_BYTES_MIN;

    /// The state of a new file of `capacity_bytes` (rounded down to 4 KiB) for slots of up to
    /// `slot_bytes_max`. `None` when that is below [`CAPACITY_BYTES_MIN`](Self::CAPACITY_BYTES_MIN) or
    /// has more than a million regions.
    pub fn new(file: FileId, capacity_bytes: u64, slot_bytes_max: u32) -> Option<Self> {
        let capacity_bytes = capacity_bytes / BLOCK_BYTES as u64 * BLOCK_BYTES as u64;
        let region_bytes = RegionGeometry::region_bytes_for(slot_bytes_max);
        let regions = capacity_bytes.div_ceil(region_bytes);
        if capacity_bytes < Self::CAPACITY_BYTES_MIN || regions > REGIONS_MAX {
            return None;
        }
        let table_reserved = table_reserved_for(regions);
        let data_offset = data_offset_for(table_reserved);
        let geometry = RegionGeometry { data_offset, capacity_bytes, region_bytes };
        Some(Self {
            file,
            sequence: 0,
            geometry,
            generation: 0,
            generation_floor: 0,
            regions: vec![0; geometry.regions() as usize],
            forgotten: Vec::new(),
            retired: Vec::new(),
            table_reserved,
        })
    }

    /// Largest capacity in bytes that this file can grow to: its table has room for no more regions.
    pub fn capacity_bytes_max(&self) -> u64 {
        let fixed = FORGOTTEN_MAX * FORGOTTEN_ENTRY_BYTES + RETIRED_MAX * RETIRED_ENTRY_BYTES;
        let regions = (self.table_reserved - fixed as u64) / REGION_ENTRY_BYTES as u64;
        self.geometry.data_offset + regions.min(REGIONS_MAX) * self.geometry.region_bytes
    }

    /// Makes the file larger. No slot moves; false (and no change) when `capacity_bytes` is below
    /// the present capacity or above [`capacity_bytes_max`](Self::capacity_bytes_max).
    pub fn grow(&mut self, capacity_bytes: u64) -> bool {
        let capacity_bytes = capacity_bytes / BLOCK_BYTES as u64 * BLOCK_BYTES as u64;
        if capacity_bytes < self.geometry.capacity_bytes
            || capacity_bytes > self.capacity_bytes_max()
        {
            return false;
        }
        self.geometry.capacity_bytes = capacity_bytes;
        self.regions.resize(self.geometry.regions() as usize, 0);
        true
    }

    /// Records that pages of `namespace` below `generation` are forgotten.
    ///
    /// When the list is full, the entry with the lowest generation makes room: from then on *every*
    /// slot below its generation is distrusted after a restart. That forgets too much, never too
    /// little.
    pub fn forget(&mut self, namespace: [u8; 32], generation: u64) {
        if let Some(entry) = self.forgotten.iter_mut().find(|entry| entry.namespace == namespace) {
            entry.generation = entry.generation.max(generation);
            return;
        }
        if self.forgotten.len() >= FORGOTTEN_MAX {
            let lowest =
                self.forgotten.iter().enumerate().min_by_key(|(_, entry)| entry.generation);
            if let Some((index, entry)) = lowest {
                self.generation_floor = self.generation_floor.max(entry.generation);
                self.forgotten.swap_remove(index);
            }
        }
        self.forgotten.push(Forgotten { namespace, generation });
    }

    /// Drops the record of a forget that no slot needs any more, unless a later one took its place.
    /// True when there was one.
    pub fn unforget(&mut self, namespace: [u8; 32], generation: u64) -> bool {
        let before = self.forgotten.len();
        self.forgotten.retain(|e| e.namespace != namespace || e.generation > generation);
        self.forgotten.len() != before
    }

    /// True when a page of `namespace` with `generation` must not be hit again.
    pub fn is_forgotten(&self, namespace: &[u8; 32], generation: u64) -> bool {
        generation < self.generation_floor
            || self
                .forgotten
                .iter()
                .any(|entry| entry.namespace == *namespace && generation < entry.generation)
    }

    /// Records that the slot at `offset` is not to be used again. False when the list is full.
    pub fn retire(&mut self, offset: u64) -> bool {
        match self.retired.binary_search(&offset) {
            Ok(_) => true,
            Err(_) if self.retired.len() >= RETIRED_MAX => false,
            Err(at) => {
                self.retired.insert(at, offset);
                true
            }
        }
    }

    /// True when the slot at `offset` is not to be used again.
    pub fn is_retired(&self, offset: u64) -> bool {
        self.retired.binary_search(&offset).is_ok()
    }

    /// Where copy `copy` of the superblock lies, in bytes.
    pub const fn head_offset(copy: u32) -> u64 {
        copy as u64 * BLOCK_BYTES as u64
    }

    /// Where this state's table lies, in bytes: that of the copy which its sequence names.
    pub fn table_offset(&self) -> u64 {
        table_offset(self.sequence, self.table_reserved)
    }

    /// Encodes the table into `table` (emptied first) and returns the superblock for it. Generations
    /// end at [`GENERATIONS_END`]: no slot is from there.
    pub fn encode(&self, table: &mut Vec<Block>) -> Block {
        let (regions, forgotten, retired) =
            (self.regions.len(), self.forgotten.len(), self.retired.len());
        table.clear();
        table.resize(table_bytes(regions, forgotten, retired) / BLOCK_BYTES, Block::ZERO);
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(table);
        let mut at = 0;
        for slot_bytes in &self.regions {
            put_u32(bytes, at, *slot_bytes);
            at += REGION_ENTRY_BYTES;
        }
        for entry in &self.forgotten {
            bytes[at..at + 32].copy_from_slice(&entry.namespace);
            put_u64(bytes, at + 32, entry.generation.min(GENERATIONS_END));
            at += FORGOTTEN_ENTRY_BYTES;
        }
        for offset in &self.retired {
            put_u64(bytes, at, *offset);
            at += RETIRED_ENTRY_BYTES;
        }

        let mut block = Block::ZERO;
        let head = &mut block.0;
        put_u64(head, 0, MAGIC);
        put_u32(head, FORMAT_AT, FORMAT);
        head[FILE_ID_AT..FILE_ID_AT + 16].copy_from_slice(&self.file.0);
        put_u64(head, SEQUENCE_AT, self.sequence);
        put_u64(head, CAPACITY_AT, self.geometry.capacity_bytes);
        put_u64(head, REGION_BYTES_AT, self.geometry.region_bytes);
        put_u64(head, DATA_OFFSET_AT, self.geometry.data_offset);
        put_u64(head, TABLE_RESERVED_AT, self.table_reserved);
        put_u64(head, GENERATION_AT, self.generation.min(GENERATIONS_END));
        put_u64(head, FLOOR_AT, self.generation_floor.min(GENERATIONS_END));
        put_u32(head, REGIONS_AT, regions as u32);
        put_u32(head, FORGOTTEN_AT, forgotten as u32);
        put_u32(head, RETIRED_AT, retired as u32);
        put_u64(head, TABLE_CHECKSUM_AT, checksum(bytes));
        seal(&mut block);
        block
    }
}

impl SuperblockHead {
    /// Reads a superblock that may hold anything. Every number is checked against the others.
    pub fn decode(block: &Block) -> Result<Self, SuperblockError> {
        let head = &block.0;
        if get_u64(head, 0) != MAGIC {
            return Err(SuperblockError::NotOurs);
        }
        if !is_sealed(block) {
            return Err(SuperblockError::Checksum);
        }
        let format = get_u32(head, FORMAT_AT);
        if format != FORMAT {
            return Err(SuperblockError::Format(format));
        }
        let decoded = Self {
            file: FileId(get_array(head, FILE_ID_AT)),
            sequence: get_u64(head, SEQUENCE_AT),
            geometry: RegionGeometry {
                data_offset: get_u64(head, DATA_OFFSET_AT),
                capacity_bytes: get_u64(head, CAPACITY_AT),
                region_bytes: get_u64(head, REGION_BYTES_AT),
            },
            table_reserved: get_u64(head, TABLE_RESERVED_AT),
            generation: get_u64(head, GENERATION_AT),
            generation_floor: get_u64(head, FLOOR_AT),
            regions: get_u32(head, REGIONS_AT),
            forgotten: get_u32(head, FORGOTTEN_AT),
            retired: get_u32(head, RETIRED_AT),
            table_checksum: get_u64(head, TABLE_CHECKSUM_AT),
        };
        if decoded.is_consistent() { Ok(decoded) } else { Err(SuperblockError::Numbers) }
    }

    /// The higher one is newer.
    pub fn sequence(&self) -> u64 {
        self.sequence
    }

    /// Where the table lies, in bytes.
    pub fn table_offset(&self) -> u64 {
        table_offset(self.sequence, self.table_reserved)
    }

    /// Length of the table in blocks; at most what its file reserves.
    pub fn table_blocks(&self) -> usize {
        table_bytes(self.regions as usize, self.forgotten as usize, self.retired as usize)
            / BLOCK_BYTES
    }

    /// The whole state, from the [`table_blocks`](Self::table_blocks) blocks at
    /// [`table_offset`](Self::table_offset).
    pub fn with_table(&self, table: &[Block]) -> Result<Superblock, SuperblockError> {
        let bytes: &[u8] = bytemuck::cast_slice(table);
        if table.len() != self.table_blocks() || checksum(bytes) != self.table_checksum {
            return Err(SuperblockError::Checksum);
        }
        let (regions, rest) = bytes.split_at(self.regions as usize * REGION_ENTRY_BYTES);
        let (forgotten, rest) = rest.split_at(self.forgotten as usize * FORGOTTEN_ENTRY_BYTES);
        let retired = &rest[..self.retired as usize * RETIRED_ENTRY_BYTES];
        let decoded = Superblock {
            file: self.file,
            sequence: self.sequence,
            geometry: self.geometry,
            generation: self.generation,
            generation_floor: self.generation_floor,
            regions: regions.chunks_exact(REGION_ENTRY_BYTES).map(|b| get_u32(b, 0)).collect(),
            forgotten: forgotten
                .chunks_exact(FORGOTTEN_ENTRY_BYTES)
                .map(|b| Forgotten { namespace: get_array(b, 0), generation: get_u64(b, 32) })
                .collect(),
            retired: retired.chunks_exact(RETIRED_ENTRY_BYTES).map(|b| get_u64(b, 0)).collect(),
            table_reserved: self.table_reserved,
        };
        let slots_fit = decoded.regions.iter().all(|slot_bytes| {
            *slot_bytes == 0
                || (RegionGeometry::is_slot_length(*slot_bytes)
                    && u64::from(*slot_bytes) <= self.geometry.region_bytes)
        });
        let are_given = decoded.forgotten.iter().all(|entry| entry.generation <= GENERATIONS_END);
        if slots_fit && are_given && decoded.retired.is_sorted() {
            Ok(decoded)
        } else {
            Err(SuperblockError::Numbers)
        }
    }

    fn is_consistent(&self) -> bool {
        let block = BLOCK_BYTES as u64;
        let RegionGeometry { data_offset, capacity_bytes, region_bytes } = self.geometry;
        let aligned = [data_offset, capacity_bytes, region_bytes, self.table_reserved]
            .iter()
            .all(|bytes| bytes.is_multiple_of(block));
        aligned
            && region_bytes >= RegionGeometry::REGION_BYTES_MIN
            // So that no place in the file overflows.
            && region_bytes <= RegionGeometry::region_bytes_for(u32::MAX)
            && self.table_reserved >= table_reserved_for(0)
            && self.table_reserved <= table_reserved_for(REGIONS_MAX)
            && data_offset >= data_offset_for(self.table_reserved)
            && capacity_bytes > data_offset
            && capacity_bytes.div_ceil(region_bytes) <= REGIONS_MAX
            && self.regions == self.geometry.regions()
            && self.sequence < SEQUENCES_END
            && self.generation.max(self.generation_floor) <= GENERATIONS_END
            && self.forgotten as usize <= FORGOTTEN_MAX
            && self.retired as usize <= RETIRED_MAX
            && (self.table_blocks() * BLOCK_BYTES) as u64 <= self.table_reserved
    }
}

fn table_bytes(regions: usize, forgotten: usize, retired: usize) -> usize {
    let bytes = regions * REGION_ENTRY_BYTES
        + forgotten * FORGOTTEN_ENTRY_BYTES
        + retired * RETIRED_ENTRY_BYTES;
    bytes.next_multiple_of(BLOCK_BYTES)
}

fn table_offset(sequence: u64, table_reserved: u64) -> u64 {
    let first = u64::from(SUPERBLOCK_COPIES) * BLOCK_BYTES as u64;
    first + sequence % u64::from(SUPERBLOCK_COPIES) * table_reserved
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn example() -> Superblock {
        let mut state = Superblock::new(FileId([0xF1; 16]), 300 << 20, 9 << 20).unwrap();
        state.sequence = 7;
        state.generation = 99;
        state.regions[1] = 8192;
        state.regions[2] = (9 << 20) + 4096;
        state.forget([0xAB; 32], 55);
        assert!(state.retire(0x0300_0000));
        assert!(state.retire(0x0200_0000));
        state
    }

    fn read(head: &Block, table: &[Block]) -> Result<Superblock, SuperblockError> {
        SuperblockHead::decode(head)?.with_table(table)
    }

    /// Goal: files written by one build are read by every other of the same format.
    #[test]
    fn golden_bytes() {
        let mut table = Vec::new();
        let head = example().encode(&mut table);
        let mut golden = Vec::new();
        golden.extend_from_slice(b"OKVSSDT1");
        golden.extend_from_slice(&[1, 0, 0, 0, 0, 0, 0, 0]);
        golden.extend_from_slice(&[0xF1; 16]);
        golden.extend_from_slice(&7_u64.to_le_bytes());
        golden.extend_from_slice(&(300_u64 << 20).to_le_bytes());
        golden.extend_from_slice(&(64_u64 << 20).to_le_bytes());
        golden.extend_from_slice(&(1_u64 << 20).to_le_bytes());
        golden.extend_from_slice(&360_448_u64.to_le_bytes());
        golden.extend_from_slice(&99_u64.to_le_bytes());
        golden.extend_from_slice(&0_u64.to_le_bytes());
        for count in [5_u32, 1, 2, 0] {
            golden.extend_from_slice(&count.to_le_bytes());
        }
        assert_eq!(head.0[..104], golden[..]);
        assert_eq!(head.0[104..112], GOLDEN_TABLE_CHECKSUM.to_le_bytes());
        assert!(head.0[112..4088].iter().all(|byte| *byte == 0));
        assert_eq!(head.0[4088..], GOLDEN_CHECKSUM.to_le_bytes());

        let mut golden = Vec::new();
        for slot_bytes in [0_u32, 8192, (9 << 20) + 4096, 0, 0] {
            golden.extend_from_slice(&slot_bytes.to_le_bytes());
        }
        golden.extend_from_slice(&[0xAB; 32]);
        for number in [55_u64, 0x0200_0000, 0x0300_0000] {
            golden.extend_from_slice(&number.to_le_bytes());
        }
        assert_eq!(table.len(), 1);
        assert_eq!(table[0].0[..golden.len()], golden[..]);
        assert!(table[0].0[golden.len()..].iter().all(|byte| *byte == 0));
    }

    /// Both from an independent implementation of xxh3-64.
    const GOLDEN_TABLE_CHECKSUM: u64 = 0xC396_ACE0_1AC0_9E70;
    const GOLDEN_CHECKSUM: u64 = 0xED17_D16F_D6BA_41E3;

    #[test]
    fn the_two_copies_and_their_tables_do_not_overlap() {
        let mut state = example();
        let mut table = Vec::new();
        let mut ranges = Vec::new();
        for sequence in [6, 7] {
            state.sequence = sequence;
            let head = SuperblockHead::decode(&state.encode(&mut table)).unwrap();
            let copy = (sequence % 2) as u32;
            ranges.push((Superblock::head_offset(copy), BLOCK_BYTES as u64));
            ranges.push((head.table_offset(), state.table_reserved));
        }
        ranges.push((state.geometry.data_offset, 1));
        ranges.sort_unstable();
        assert!(ranges.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0), "{ranges:?}");
    }

    #[test]
    fn capacities_that_cannot_hold_one_slot_are_refused() {
        let file = FileId([1; 16]);
        assert!(Superblock::new(file, Superblock::CAPACITY_BYTES_MIN - 1, 8192).is_none());
        let least = Superblock::new(file, Superblock::CAPACITY_BYTES_MIN, 8192).unwrap();
        assert_eq!(least.geometry.slots(0, 8192), 1);
        assert!(Superblock::new(file, u64::MAX, 8192).is_none());
    }

    #[test]
    fn growing_keeps_what_is_recorded_and_stops_where_the_table_ends() {
        let mut state = example();
        assert!(!state.grow(200 << 20), "shrinking is refused");
        assert!(state.grow(1 << 40));
        assert_eq!((state.regions[1], state.regions.len()), (8192, 16_384));
        let mut table = Vec::new();
        let head = state.encode(&mut table);
        assert_eq!(read(&head, &table), Ok(state.clone()));
        assert!(!state.grow(state.capacity_bytes_max() + 4096));
        let max = state.capacity_bytes_max();
        assert!(state.grow(max));
    }

    #[test]
    fn a_full_list_of_forgotten_namespaces_forgets_more_not_less() {
        let mut state = example();
        state.forgotten.clear();
        for index in 0..FORGOTTEN_MAX as u64 + 1 {
            let mut namespace = [0; 32];
            namespace[..8].copy_from_slice(&index.to_le_bytes());
            state.forget(namespace, 100 + index);
        }
        assert_eq!(state.forgotten.len(), FORGOTTEN_MAX);
        assert!(state.is_forgotten(&[0; 32], 99), "the entry that made room still holds");
        assert!(!state.is_forgotten(&[0; 32], 100));
        let mut table = Vec::new();
        let head = state.encode(&mut table);
        assert_eq!(read(&head, &table), Ok(state));
    }

    #[test]
    fn forgetting_again_never_lowers_the_generation() {
        let mut state = example();
        state.forget([0xAB; 32], 20);
        assert!(state.is_forgotten(&[0xAB; 32], 54));
        state.forget([0xAB; 32], 80);
        assert!(state.is_forgotten(&[0xAB; 32], 79) && !state.is_forgotten(&[0xAB; 32], 80));
        assert_eq!(state.forgotten.len(), 1);
    }

    #[test]
    fn a_full_list_of_retired_slots_says_so() {
        let mut state = example();
        for index in 0..RETIRED_MAX as u64 {
            state.retire(index * 8192);
        }
        assert_eq!(state.retired.len(), RETIRED_MAX);
        assert!(!state.retire(1 << 60));
        assert!(state.retire(0), "already there");
    }

    #[test]
    fn numbers_that_contradict_each_other_are_refused_in_spite_of_a_good_checksum() {
        let mut table = Vec::new();
        let good = example().encode(&mut table);
        for (at, value) in [
            (CAPACITY_AT, 1 << 40),
            (REGION_BYTES_AT, 0),
            (DATA_OFFSET_AT, 4096),
            (TABLE_RESERVED_AT, u64::MAX - 4095),
            (REGIONS_AT, u64::MAX),
            (RETIRED_AT, u64::MAX),
            (SEQUENCE_AT, u64::MAX),
            (GENERATION_AT, GENERATIONS_END + 1),
            (FLOOR_AT, u64::MAX),
        ] {
            let mut head = good;
            put_u64(&mut head.0, at, value);
            seal(&mut head);
            assert_eq!(SuperblockHead::decode(&head), Err(SuperblockError::Numbers), "at {at}");
        }
    }

    #[test]
    fn a_forget_of_a_generation_that_cannot_be_is_refused_and_never_written() {
        let mut state = example();
        state.forget([0xCD; 32], u64::MAX);
        (state.generation, state.generation_floor) = (u64::MAX, u64::MAX);
        let mut table = Vec::new();
        let mut head = state.encode(&mut table);
        let read_back = read(&head, &table).unwrap();
        assert!(read_back.is_forgotten(&[0xCD; 32], GENERATIONS_END - 1));
        assert_eq!(read_back.generation, GENERATIONS_END);

        let at = 5 * REGION_ENTRY_BYTES + FORGOTTEN_ENTRY_BYTES + 32;
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut table);
        put_u64(bytes, at, GENERATIONS_END + 1);
        put_u64(&mut head.0, TABLE_CHECKSUM_AT, checksum(bytes));
        seal(&mut head);
        assert_eq!(read(&head, &table), Err(SuperblockError::Numbers));
    }

    /// A number that a head may hold: often one that is nearly right.
    fn numbers() -> impl Strategy<Value = u64> {
        prop_oneof![
            any::<u64>(),
            (0_u32..64, -1_i64..2).prop_map(|(bit, by)| (1_u64 << bit).wrapping_add_signed(by)),
            (0_u64..1 << 40).prop_map(|blocks| blocks << 12),
            0_u64..40,
        ]
    }

    proptest! {
        /// Goal: a checksum is no proof of sense. Whatever numbers lie under good checksums, they
        /// are refused, or every place that they lead to lies in the file.
        #[test]
        fn any_numbers_under_good_checksums_are_refused_or_consistent(
            changes in proptest::collection::vec((0_usize..12, numbers()), 0..4),
            noise in proptest::collection::vec((0_usize..512, numbers()), 0..6),
            counts_regions: bool,
        ) {
            const PLACES: [usize; 12] = [
                FORMAT_AT, SEQUENCE_AT, CAPACITY_AT, REGION_BYTES_AT, DATA_OFFSET_AT,
                TABLE_RESERVED_AT, GENERATION_AT, FLOOR_AT, REGIONS_AT, FORGOTTEN_AT, RETIRED_AT,
                CAPACITY_AT,
            ];
            let mut table = Vec::new();
            let mut head = example().encode(&mut table);
            for (place, number) in changes {
                match PLACES[place] {
                    at @ (FORMAT_AT | REGIONS_AT | FORGOTTEN_AT | RETIRED_AT) => {
                        put_u32(&mut head.0, at, number as u32);
                    }
                    at => put_u64(&mut head.0, at, number),
                }
            }
            let region_bytes = get_u64(&head.0, REGION_BYTES_AT);
            if counts_regions && region_bytes > 0 {
                let capacity_bytes = get_u64(&head.0, CAPACITY_AT);
                let data_offset = get_u64(&head.0, DATA_OFFSET_AT);
                let geometry = RegionGeometry { data_offset, capacity_bytes, region_bytes };
                put_u32(&mut head.0, REGIONS_AT, geometry.regions());
            }
            seal(&mut head);
            let Ok(decoded) = SuperblockHead::decode(&head) else { return Ok(()) };
            prop_assert!(decoded.table_offset() + decoded.table_reserved
                <= decoded.geometry.data_offset);
            table.resize(decoded.table_blocks(), Block::ZERO);
            let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut table);
            for (word, number) in noise {
                put_u64(bytes, word * 8 % (bytes.len() - 7), number);
            }
            put_u64(&mut head.0, TABLE_CHECKSUM_AT, checksum(bytes));
            seal(&mut head);
            let Ok(mut state) = read(&head, &table) else { return Ok(()) };
            let geometry = state.geometry;
            prop_assert_eq!(state.regions.len(), geometry.regions() as usize);
            for (region, slot_bytes) in (0..).zip(&state.regions) {
                let slots = geometry.slots(region, *slot_bytes);
                if let Some(last) = slots.checked_sub(1) {
                    let offset = geometry.slot_offset(region, *slot_bytes, last);
                    prop_assert!(offset + u64::from(*slot_bytes) <= geometry.capacity_bytes);
                    prop_assert_eq!(geometry.slot_at(offset, *slot_bytes), Some((region, last)));
                }
            }
            prop_assert!(state.capacity_bytes_max() >= geometry.data_offset);
            prop_assert!(!state.grow(u64::MAX));
            state.retire(geometry.capacity_bytes);
            state.forget([1; 32], 5);
            prop_assert!(state.is_forgotten(&[1; 32], 4));
            let again = state.encode(&mut table);
            prop_assert!(SuperblockHead::decode(&again).is_ok());
        }

        #[test]
        fn any_changed_byte_of_head_or_table_is_detected(
            in_table: bool, at in 0_usize..4096, change in 1_u8..,
        ) {
            let mut table = Vec::new();
            let mut head = example().encode(&mut table);
            let block = if in_table { &mut table[0] } else { &mut head };
            block.0[at] ^= change;
            prop_assert!(read(&head, &table).is_err());
        }

        #[test]
        fn every_state_is_read_back(
            capacity in (2_u64 << 20)..(1 << 40), slot_max in 8192_u32..(64 << 20),
            sequence in ..SEQUENCES_END, generation in ..=GENERATIONS_END,
            floor in ..=GENERATIONS_END,
            forgotten in
                proptest::collection::vec((any::<[u8; 32]>(), ..=GENERATIONS_END), 0..20),
            retired in proptest::collection::vec(any::<u64>(), 0..600),
        ) {
            let mut state = Superblock::new(FileId([3; 16]), capacity, slot_max).unwrap();
            state.sequence = sequence;
            state.generation = generation;
            state.generation_floor = floor;
            for (namespace, generation) in forgotten { state.forget(namespace, generation); }
            for offset in retired { state.retire(offset); }
            for (index, slot_bytes) in state.regions.iter_mut().enumerate() {
                if index % 3 == 1 { *slot_bytes = 8192; }
            }
            let mut table = Vec::new();
            let head = state.encode(&mut table);
            prop_assert_eq!(read(&head, &table), Ok(state));
        }

        #[test]
        fn noise_is_never_a_superblock(noise in proptest::collection::vec(any::<u8>(), 4096)) {
            let mut block = Block::ZERO;
            block.0.copy_from_slice(&noise);
            prop_assert!(SuperblockHead::decode(&block).is_err());
        }
    }
}
