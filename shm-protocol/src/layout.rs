//! Sizes and offsets of the two segments of a session. Numbers only.
//!
//! ```text
//! submission segment (engine writes)          completion segment (Manager writes)
//! 0x0000  header                              0x0000  header
//! 0x1000  request_tail        (128-byte block) 0x1000  request_head
//! 0x1080  completion_head                     0x1080  completion_tail
//! 0x1100  engine_sleep_generation             0x1100  manager_sleep_generation
//! 0x1180  manager_doorbell (futex, engine     0x1180  engine_doorbell (futex, Manager
//!         rings it, Manager waits on it)              rings it, engine waits on it)
//! 0x2000  request ring    capacity × 64       0x2000  completion ring  capacity × 128
//!         page table      entries × 48                page results     entries × 16
//!                                                     done words       capacity × stride
//! ```
//! Every array starts on a 4 KiB boundary. A change here is a new [`ABI_VERSION`].

use crate::record::{CompletionRecord, PageEntry, PageResult, RequestRecord};

/// First eight bytes of a submission segment: "OKVSUBM1".
pub const SUBMISSION_MAGIC: u64 = u64::from_le_bytes(*b"OKVSUBM1");
/// First eight bytes of a completion segment: "OKVCOMP1".
pub const COMPLETION_MAGIC: u64 = u64::from_le_bytes(*b"OKVCOMP1");
/// Version of everything in this crate that crosses a process boundary.
pub const ABI_VERSION: u32 = 1;

/// Alignment of every array in a segment, and of a segment's size, in bytes.
pub const SECTION_ALIGN: usize = 4096;
/// Distance between two words that different processes write, in bytes: two cache lines, because
/// adjacent-line prefetch makes neighbours contend.
pub const WORD_BLOCK: usize = 128;

/// Offset of the header in both segments.
pub const HEADER_OFFSET: usize = 0;
/// Header: [`ABI_VERSION`] (u32), stored last: zero says that the segment is half made.
pub const HEADER_VERSION: usize = HEADER_OFFSET + 8;
/// Header: [`crate::record::SessionState`] (u32), changed by the Manager in the completion segment.
pub const HEADER_STATE: usize = HEADER_OFFSET + 12;
/// Bytes of the header.
pub const HEADER_BYTES: usize = 64;
/// Offset of the first word block in both segments.
pub const WORDS_OFFSET: usize = 0x1000;
/// Submission: the engine's producer position of the request ring (u64).
pub const REQUEST_TAIL: usize = WORDS_OFFSET;
/// Submission: the engine's consumer position of the completion ring (u64).
pub const COMPLETION_HEAD: usize = WORDS_OFFSET + WORD_BLOCK;
/// Submission: the engine's sleep generation (u32, odd = asleep).
pub const ENGINE_SLEEP_GENERATION: usize = WORDS_OFFSET + 2 * WORD_BLOCK;
/// Submission: the doorbell that the engine rings and the Manager waits on (u32 futex).
pub const MANAGER_DOORBELL: usize = WORDS_OFFSET + 3 * WORD_BLOCK;
/// Completion: the Manager's consumer position of the request ring (u64).
pub const REQUEST_HEAD: usize = WORDS_OFFSET;
/// Completion: the Manager's producer position of the completion ring (u64).
pub const COMPLETION_TAIL: usize = WORDS_OFFSET + WORD_BLOCK;
/// Completion: the Manager's sleep generation (u32, odd = asleep).
pub const MANAGER_SLEEP_GENERATION: usize = WORDS_OFFSET + 2 * WORD_BLOCK;
/// Completion: the doorbell that the Manager rings and the engine waits on (u32 futex).
pub const ENGINE_DOORBELL: usize = WORDS_OFFSET + 3 * WORD_BLOCK;
/// Offset of the ring in both segments.
pub const RING_OFFSET: usize = 0x2000;

/// Bounds of a session's rings, in records.
pub const RING_CAPACITY_MIN: u32 = 64;
/// See [`RING_CAPACITY_MIN`].
pub const RING_CAPACITY_MAX: u32 = 4096;
/// Records a ring holds unless the client asks otherwise.
pub const RING_CAPACITY_DEFAULT: u32 = 256;
/// Bounds of a session's page table, in entries.
pub const PAGE_ENTRIES_MIN: u32 = 1024;
/// See [`PAGE_ENTRIES_MIN`].
pub const PAGE_ENTRIES_MAX: u32 = 1 << 20;
/// Page entries a session has unless it asks otherwise.
pub const PAGE_ENTRIES_DEFAULT: u32 = 65_536;
/// Most page entries that one request may name, anchors included.
pub const PAGES_PER_REQUEST_MAX: u32 = 16_384;
/// Most done words of one operation: word 0 is the whole operation, the rest one a layer.
pub const DONE_WORDS_MAX: u32 = 256;

/// Credits reserved for `Release`, `Cancel` and `Drain` out of `capacity`.
pub const fn reserved_credits(capacity: u32) -> u32 {
    let eighth = capacity / 8;
    if eighth < 8 { 8 } else { eighth }
}

/// The three numbers that fix where everything lies. Each side keeps its own copy and never reads
/// it back from shared memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Geometry {
    /// Records in each ring: a power of two within `RING_CAPACITY_MIN..=RING_CAPACITY_MAX`.
    pub ring_capacity: u32,
    /// Entries of the page table and of the result table.
    pub page_entries: u32,
    /// Done words of one operation, 1 to [`DONE_WORDS_MAX`].
    pub done_words: u32,
}

impl Default for Geometry {
    fn default() -> Self {
        Self {
            ring_capacity: RING_CAPACITY_DEFAULT,
            page_entries: PAGE_ENTRIES_DEFAULT,
            done_words: 1,
        }
    }
}

impl Geometry {
    /// Whether every number lies within its documented range.
    pub const fn is_valid(&self) -> bool {
        self.ring_capacity.is_power_of_two()
            && self.ring_capacity >= RING_CAPACITY_MIN
            && self.ring_capacity <= RING_CAPACITY_MAX
            && self.page_entries >= PAGE_ENTRIES_MIN
            && self.page_entries <= PAGE_ENTRIES_MAX
            && self.done_words >= 1
            && self.done_words <= DONE_WORDS_MAX
    }

    /// Offset of the page table in the submission segment, in bytes.
    pub const fn page_table_offset(&self) -> usize {
        align_up(RING_OFFSET + self.ring_capacity as usize * size_of::<RequestRecord>())
    }

    /// Size of the submission segment, in bytes.
    pub const fn submission_bytes(&self) -> usize {
        align_up(self.page_table_offset() + self.page_entries as usize * size_of::<PageEntry>())
    }

    /// Offset of the result table in the completion segment, in bytes.
    pub const fn results_offset(&self) -> usize {
        align_up(RING_OFFSET + self.ring_capacity as usize * size_of::<CompletionRecord>())
    }

    /// Offset of the done words in the completion segment, in bytes.
    pub const fn done_words_offset(&self) -> usize {
        align_up(self.results_offset() + self.page_entries as usize * size_of::<PageResult>())
    }

    /// Bytes between the done words of neighbouring operation indices: whole cache lines.
    pub const fn done_stride(&self) -> usize {
        (self.done_words as usize * 4).next_multiple_of(64)
    }

    /// Size of the completion segment, in bytes.
    pub const fn completion_bytes(&self) -> usize {
        align_up(self.done_words_offset() + self.ring_capacity as usize * self.done_stride())
    }

    /// Operations a client may have outstanding.
    pub const fn credits(&self) -> u32 {
        self.ring_capacity
    }
}

const fn align_up(bytes: usize) -> usize {
    bytes.next_multiple_of(SECTION_ALIGN)
}

/// Folds every size and offset of the wire into one number, so that two builds that disagree
/// about a field refuse each other even when both claim the same [`ABI_VERSION`].
pub const LAYOUT_FINGERPRINT: u64 = fingerprint();

const fn fingerprint() -> u64 {
    let facts = [
        ABI_VERSION as u64,
        size_of::<RequestRecord>() as u64,
        size_of::<CompletionRecord>() as u64,
        size_of::<PageEntry>() as u64,
        size_of::<PageResult>() as u64,
        REQUEST_TAIL as u64,
        COMPLETION_HEAD as u64,
        ENGINE_SLEEP_GENERATION as u64,
        MANAGER_DOORBELL as u64,
        REQUEST_HEAD as u64,
        COMPLETION_TAIL as u64,
        MANAGER_SLEEP_GENERATION as u64,
        ENGINE_DOORBELL as u64,
        RING_OFFSET as u64,
        HEADER_VERSION as u64,
        HEADER_STATE as u64,
        HEADER_BYTES as u64,
        crate::record::FIELD_FINGERPRINT,
    ];
    let mut hash = 0xcbf2_9ce4_8422_2325;
    let mut i = 0;
    while i < facts.len() {
        hash = fnv1a(hash, facts[i]);
        i += 1;
    }
    hash
}

/// One FNV-1a step over the eight bytes of `value`.
pub(crate) const fn fnv1a(mut hash: u64, value: u64) -> u64 {
    let bytes = value.to_le_bytes();
    let mut i = 0;
    while i < bytes.len() {
        hash = (hash ^ bytes[i] as u64).wrapping_mul(0x0000_0100_0000_01b3);
        i += 1;
    }
    hash
}

const _: () = {
    assert!(HEADER_OFFSET + HEADER_BYTES <= WORDS_OFFSET);
    assert!(MANAGER_DOORBELL + WORD_BLOCK <= RING_OFFSET);
    assert!(ENGINE_DOORBELL + WORD_BLOCK <= RING_OFFSET);
    assert!(RING_OFFSET.is_multiple_of(SECTION_ALIGN));
    assert!(reserved_credits(RING_CAPACITY_MIN) < RING_CAPACITY_MIN);
    assert!(PAGES_PER_REQUEST_MAX <= PAGE_ENTRIES_DEFAULT);
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sections_do_not_overlap_at_the_extremes() {
        for ring_capacity in [RING_CAPACITY_MIN, RING_CAPACITY_MAX] {
            for page_entries in [PAGE_ENTRIES_MIN, PAGE_ENTRIES_MAX] {
                for done_words in [1, 17, DONE_WORDS_MAX] {
                    let g = Geometry { ring_capacity, page_entries, done_words };
                    assert!(g.is_valid());
                    let ring = ring_capacity as usize;
                    assert!(g.page_table_offset() >= RING_OFFSET + ring * 64);
                    assert!(
                        g.submission_bytes() >= g.page_table_offset() + page_entries as usize * 48
                    );
                    assert!(g.results_offset() >= RING_OFFSET + ring * 128);
                    assert!(
                        g.done_words_offset() >= g.results_offset() + page_entries as usize * 16
                    );
                    assert!(g.completion_bytes() >= g.done_words_offset() + ring * g.done_stride());
                    assert!(g.done_stride() >= done_words as usize * 4);
                }
            }
        }
    }

    #[test]
    fn geometry_out_of_range_is_refused() {
        let good = Geometry::default();
        for bad in [
            Geometry { ring_capacity: 32, ..good },
            Geometry { ring_capacity: 96, ..good },
            Geometry { ring_capacity: 8192, ..good },
            Geometry { page_entries: 1023, ..good },
            Geometry { page_entries: PAGE_ENTRIES_MAX + 1, ..good },
            Geometry { done_words: 0, ..good },
            Geometry { done_words: DONE_WORDS_MAX + 1, ..good },
        ] {
            assert!(!bad.is_valid(), "{bad:?}");
        }
    }
}
