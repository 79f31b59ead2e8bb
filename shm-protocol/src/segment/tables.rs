//! The arrays behind the rings: page table, page results, done words.

use crate::layout::{Geometry, PAGES_PER_REQUEST_MAX};
use crate::memory::{ArrayReader, ArrayWriter, SharedMemory};
use crate::record::{PageEntry, PageRange, PageResult};

/// The Manager's copy-out view of the page table, which the engine writes at any time.
#[derive(Debug)]
pub struct PageTable {
    entries: ArrayReader<PageEntry>,
}

impl PageTable {
    pub(super) fn new(submission: &SharedMemory, geometry: &Geometry) -> Self {
        let start = geometry.page_table_offset();
        Self { entries: submission.array_reader(start, geometry.page_entries) }
    }

    /// Replaces `entries` by a private copy of a range. False, and `entries` is empty, when the
    /// range does not fit the table or is longer than [`PAGES_PER_REQUEST_MAX`]. Allocates only
    /// where the vector's capacity is too small.
    #[inline]
    pub fn read_range(&self, range: PageRange, entries: &mut Vec<PageEntry>) -> bool {
        if range.len > PAGES_PER_REQUEST_MAX {
            entries.clear();
            return false;
        }
        self.entries.read_range(range.start, range.len, entries)
    }
}

/// The engine's writing view of the page table.
#[derive(Debug)]
pub struct PageTableWriter {
    entries: ArrayWriter<PageEntry>,
}

impl PageTableWriter {
    pub(super) fn new(submission: &SharedMemory, geometry: &Geometry) -> Self {
        let start = geometry.page_table_offset();
        Self { entries: submission.array_writer(start, geometry.page_entries) }
    }

    /// Stores one entry. Visible to the Manager with the request that names it, once published.
    ///
    /// # Panics
    /// When `index` is not below the table's length.
    #[inline]
    pub fn write(&self, index: u32, entry: PageEntry) {
        self.entries.write(index, entry);
    }
}

/// The Manager's writing view of the result table.
#[derive(Debug)]
pub struct ResultTable {
    results: ArrayWriter<PageResult>,
}

impl ResultTable {
    pub(super) fn new(completion: &SharedMemory, geometry: &Geometry) -> Self {
        let start = geometry.results_offset();
        Self { results: completion.array_writer(start, geometry.page_entries) }
    }

    /// Stores one result. Visible to the engine with the completion that follows it, once
    /// published.
    ///
    /// # Panics
    /// When `index` is not below the table's length.
    #[inline]
    pub fn write(&self, index: u32, result: PageResult) {
        self.results.write(index, result);
    }
}

/// The engine's copy-out view of the result table.
#[derive(Debug)]
pub struct ResultReader {
    results: ArrayReader<PageResult>,
}

impl ResultReader {
    pub(super) fn new(completion: &SharedMemory, geometry: &Geometry) -> Self {
        let start = geometry.results_offset();
        Self { results: completion.array_reader(start, geometry.page_entries) }
    }

    /// A private copy of one result. It belongs to the operation that it names; the caller
    /// compares.
    ///
    /// # Panics
    /// When `index` is not below the table's length.
    #[inline]
    pub fn read(&self, index: u32) -> PageResult {
        self.results.read(index)
    }
}

/// Where the done words lie: computed once.
#[derive(Clone, Copy, Debug)]
struct DoneLayout {
    /// Offset in the completion segment, in bytes.
    start: usize,
    /// Bytes to the words of the next operation index.
    stride: usize,
    /// Bytes of all of them, to the end of the segment.
    bytes: usize,
    operations: u32,
    words: u32,
}

impl DoneLayout {
    fn new(geometry: &Geometry) -> Self {
        let start = geometry.done_words_offset();
        Self {
            start,
            stride: geometry.done_stride(),
            bytes: geometry.completion_bytes() - start,
            operations: geometry.ring_capacity,
            words: geometry.done_words,
        }
    }

    /// Offset of a word from the first one, in bytes.
    #[inline]
    fn offset(&self, operation_index: u32, word_index: u32) -> usize {
        assert!(
            operation_index < self.operations && word_index < self.words,
            "done word {word_index} of operation index {operation_index} is out of range"
        );
        operation_index as usize * self.stride + word_index as usize * size_of::<u32>()
    }
}

/// The Manager's done words: `done_words` of them an operation index. Device threads hold clones;
/// the segment stays mapped as long as one lives.
#[derive(Clone, Debug)]
pub struct DoneWords {
    memory: SharedMemory,
    layout: DoneLayout,
}

impl DoneWords {
    pub(super) fn new(completion: &SharedMemory, geometry: &Geometry) -> Self {
        Self { memory: completion.clone(), layout: DoneLayout::new(geometry) }
    }

    /// Stores a done word after everything copied before it (`done-word`).
    ///
    /// # Panics
    /// When one of the indices is out of range.
    #[inline]
    pub fn store(&self, operation_index: u32, word_index: u32, value: u32) {
        let offset = self.layout.offset(operation_index, word_index);
        self.memory.store_release(self.layout.start + offset, value);
    }

    /// What a word holds now, whoever stored it (`done-word`).
    ///
    /// # Panics
    /// When one of the indices is out of range.
    #[inline]
    pub fn load(&self, operation_index: u32, word_index: u32) -> u32 {
        let offset = self.layout.offset(operation_index, word_index);
        self.memory.load_acquire(self.layout.start + offset)
    }

    /// Offset of a word from [`region`](Self::region)'s start, in bytes.
    ///
    /// # Panics
    /// When one of the indices is out of range.
    pub fn region_offset(&self, operation_index: u32, word_index: u32) -> usize {
        self.layout.offset(operation_index, word_index)
    }

    /// Address and length of all done words, page-aligned, for registration with a device driver.
    /// Valid while a clone of `self` lives.
    pub fn region(&self) -> (*mut u8, usize) {
        (self.memory.address(self.layout.start), self.layout.bytes)
    }
}

/// The engine's view of the done words, read-only in its page tables too.
#[derive(Clone, Debug)]
pub struct DoneWordsReader {
    memory: SharedMemory,
    layout: DoneLayout,
}

impl DoneWordsReader {
    pub(super) fn new(completion: &SharedMemory, geometry: &Geometry) -> Self {
        Self { memory: completion.clone(), layout: DoneLayout::new(geometry) }
    }

    /// The word now; what was copied before it was stored is visible afterwards (`done-word`).
    ///
    /// # Panics
    /// When one of the indices is out of range.
    #[inline]
    pub fn load(&self, operation_index: u32, word_index: u32) -> u32 {
        let offset = self.layout.offset(operation_index, word_index);
        self.memory.load_acquire(self.layout.start + offset)
    }

    /// Offset of a word from [`region`](Self::region)'s start, in bytes.
    ///
    /// # Panics
    /// When one of the indices is out of range.
    pub fn region_offset(&self, operation_index: u32, word_index: u32) -> usize {
        self.layout.offset(operation_index, word_index)
    }

    /// Address and length of all done words, page-aligned, for read-only registration with a
    /// device driver. Valid while a clone of `self` lives.
    pub fn region(&self) -> (*const u8, usize) {
        (self.memory.address(self.layout.start).cast_const(), self.layout.bytes)
    }
}
