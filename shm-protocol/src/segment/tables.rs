//! The arrays behind the rings: page table, page results, done words.

use crate::layout::{Geometry, PAGES_PER_REQUEST_MAX};
use crate::memory::SharedMemory;
use crate::record::{PageEntry, PageRange, PageResult};

/// The Manager's copy-out view of the page table, which the engine writes at any time.
#[derive(Debug)]
pub struct PageTable {
    pub(super) memory: SharedMemory,
    pub(super) geometry: Geometry,
}

impl PageTable {
    /// Replaces `entries` by a private copy of a range. False, and `entries` is empty, when the
    /// range does not fit the table or is longer than [`PAGES_PER_REQUEST_MAX`]. Allocates only
    /// where the vector's capacity is too small.
    pub fn read_range(&self, range: PageRange, entries: &mut Vec<PageEntry>) -> bool {
        entries.clear();
        let end = range.start.checked_add(range.len);
        if range.len > PAGES_PER_REQUEST_MAX
            || end.is_none_or(|end| end > self.geometry.page_entries)
        {
            return false;
        }
        let start = entry_offset(&self.geometry, range.start);
        self.memory.read_many(start, range.len as usize, entries);
        true
    }
}

/// The engine's writing view of the page table.
#[derive(Debug)]
pub struct PageTableWriter {
    pub(super) memory: SharedMemory,
    pub(super) geometry: Geometry,
}

impl PageTableWriter {
    /// Stores one entry. Visible to the Manager with the request that names it, once published.
    ///
    /// # Panics
    /// When `index` is not below the table's length.
    #[inline]
    pub fn write(&self, index: u32, entry: PageEntry) {
        assert!(index < self.geometry.page_entries, "page entry {index} is beyond the table");
        self.memory.write(entry_offset(&self.geometry, index), entry);
    }
}

fn entry_offset(geometry: &Geometry, index: u32) -> usize {
    geometry.page_table_offset() + index as usize * size_of::<PageEntry>()
}

/// The Manager's writing view of the result table.
#[derive(Debug)]
pub struct ResultTable {
    pub(super) memory: SharedMemory,
    pub(super) geometry: Geometry,
}

impl ResultTable {
    /// Stores one result. Visible to the engine with the completion that follows it, once
    /// published.
    ///
    /// # Panics
    /// When `index` is not below the table's length.
    #[inline]
    pub fn write(&self, index: u32, result: PageResult) {
        assert!(index < self.geometry.page_entries, "page result {index} is beyond the table");
        self.memory.write(result_offset(&self.geometry, index), result);
    }
}

/// The engine's copy-out view of the result table.
#[derive(Debug)]
pub struct ResultReader {
    pub(super) memory: SharedMemory,
    pub(super) geometry: Geometry,
}

impl ResultReader {
    /// A private copy of one result. It belongs to the operation that it names; the caller
    /// compares.
    ///
    /// # Panics
    /// When `index` is not below the table's length.
    #[inline]
    pub fn read(&self, index: u32) -> PageResult {
        assert!(index < self.geometry.page_entries, "page result {index} is beyond the table");
        self.memory.read(result_offset(&self.geometry, index))
    }
}

fn result_offset(geometry: &Geometry, index: u32) -> usize {
    geometry.results_offset() + index as usize * size_of::<PageResult>()
}

/// The Manager's done words: `done_words` of them an operation index. Device threads hold clones;
/// the segment stays mapped as long as one lives.
#[derive(Clone, Debug)]
pub struct DoneWords {
    pub(super) memory: SharedMemory,
    pub(super) geometry: Geometry,
}

impl DoneWords {
    /// Stores a done word after everything copied before it (`done-word`).
    ///
    /// # Panics
    /// When one of the indices is out of range.
    #[inline]
    pub fn store(&self, operation_index: u32, word_index: u32, value: u32) {
        let offset = self.offset(operation_index, word_index);
        self.memory.store_release(offset, value);
    }

    /// Offset of a word from [`region`](Self::region)'s start, in bytes.
    ///
    /// # Panics
    /// When one of the indices is out of range.
    pub fn region_offset(&self, operation_index: u32, word_index: u32) -> usize {
        self.offset(operation_index, word_index) - self.geometry.done_words_offset()
    }

    /// Address and length of all done words, page-aligned, for registration with a device driver.
    /// Valid while a clone of `self` lives.
    pub fn region(&self) -> (*mut u8, usize) {
        done_region(&self.memory, &self.geometry)
    }

    #[inline]
    fn offset(&self, operation_index: u32, word_index: u32) -> usize {
        done_offset(&self.geometry, operation_index, word_index)
    }
}

/// The engine's view of the done words, read-only in its page tables too.
#[derive(Clone, Debug)]
pub struct DoneWordsReader {
    pub(super) memory: SharedMemory,
    pub(super) geometry: Geometry,
}

impl DoneWordsReader {
    /// The word now; what was copied before it was stored is visible afterwards (`done-word`).
    ///
    /// # Panics
    /// When one of the indices is out of range.
    #[inline]
    pub fn load(&self, operation_index: u32, word_index: u32) -> u32 {
        self.memory.load_acquire(done_offset(&self.geometry, operation_index, word_index))
    }

    /// Offset of a word from [`region`](Self::region)'s start, in bytes.
    ///
    /// # Panics
    /// When one of the indices is out of range.
    pub fn region_offset(&self, operation_index: u32, word_index: u32) -> usize {
        done_offset(&self.geometry, operation_index, word_index) - self.geometry.done_words_offset()
    }

    /// Address and length of all done words, page-aligned, for read-only registration with a
    /// device driver. Valid while a clone of `self` lives.
    pub fn region(&self) -> (*const u8, usize) {
        let (start, bytes) = done_region(&self.memory, &self.geometry);
        (start.cast_const(), bytes)
    }
}

#[inline]
fn done_offset(geometry: &Geometry, operation_index: u32, word_index: u32) -> usize {
    assert!(
        operation_index < geometry.ring_capacity && word_index < geometry.done_words,
        "done word {word_index} of operation index {operation_index} is out of range"
    );
    geometry.done_words_offset()
        + operation_index as usize * geometry.done_stride()
        + word_index as usize * size_of::<u32>()
}

fn done_region(memory: &SharedMemory, geometry: &Geometry) -> (*mut u8, usize) {
    let start = geometry.done_words_offset();
    (memory.address(start), geometry.completion_bytes() - start)
}
