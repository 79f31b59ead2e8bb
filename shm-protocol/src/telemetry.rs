//! The telemetry segment: one named piece of shared memory that outlives its Manager.
//!
//! The Manager writes it, tools and the metrics endpoint read it; nobody asks the Manager. Every
//! byte may be read at any time, also after a SIGKILL in the middle of a write.
//!
//! ```text
//! 0x0000  header: who wrote this; `abi` is stored last and makes it valid
//! 0x0800  state, heartbeat: single words
//! 0x1000  numbers      every series of `metric::FAMILIES`, then the latency histograms
//!         devices      16 rows
//!         namespaces   256 rows
//!         texts        page mode, http address
//!         config       the resolved configuration as text
//!         sessions     128 × { row, 16 operations, 16 leases }, one group each
//! ```
//!
//! Everything is a little-endian `u64` word; text is bytes in words, padded with zeros. A group of
//! words that belong together starts with a sequence word: odd while its payload changes.
//!
//! | sync point | writer | reader |
//! |---|---|---|
//! | `telemetry.valid` | release store of `abi` after the header | acquire load of `abi` |
//! | `telemetry.begin` | sequence to odd, release fence, then the payload | payload, acquire fence, sequence again |
//! | `telemetry.end` | release store of the sequence to even, after the payload | acquire load of the sequence, then the payload |
//!
//! One process writes, from one thread. Readers map the segment read-only and believe nothing:
//! counts are cut to the tables, unknown numbers become no value, a group that never comes to rest
//! is taken as it is and reported as torn.

mod access;
mod label;
mod latency;
mod metric;
mod name;
mod row;

use std::mem::offset_of;

pub use access::{
    GroupCopy, GroupStores, Identity, SegmentFault, SegmentReader, SegmentWriter, check_start,
};
pub use label::{
    CloseReason, CopyDirection, CopyMethod, DeviceFault, HeldIn, Label, LeaseEnd, ManagerState,
    OperationStage, PrepareOutcome, Reason, RefuseReason, SessionState, SpillOutcome, SsdEngine,
    SsdFault, SsdHealth, SsdRecovery, SsdRetry, SsdStop,
};
pub use latency::{
    BUCKETS, HISTOGRAM_WORDS, LATENCY_HELP, LATENCY_NAME, LATENCY_WORDS, Latency, bucket_end,
    bucket_of,
};
pub use metric::{
    FAMILIES, Family, LabelSet, METRIC_WORDS, Metric, MetricKind, Unit, families, series_at,
};
pub use name::{map_segment, open_segment, owner_lives, resolved_socket, segment_name};
pub use row::{
    DeviceRow, LeaseRow, NamespaceRow, OperationRow, SessionRow, printable, printable_line,
    text_bytes, text_words,
};

use crate::layout::fnv1a;

/// First eight bytes of a telemetry segment: "OKVTELE1".
pub const TELEMETRY_MAGIC: u64 = u64::from_le_bytes(*b"OKVTELE1");
/// Version of the header. What follows the header is named by [`LAYOUT_FINGERPRINT`].
pub const TELEMETRY_ABI: u64 = 1;

/// Most SSD devices that are shown.
pub const DEVICE_ROWS: usize = 16;
/// Most sessions that are shown: more than one reactor can have.
pub const SESSION_ROWS: usize = 128;
/// Oldest operations of a session that are shown.
pub const OPERATION_ROWS: usize = 16;
/// Largest leases of a session that are shown.
pub const LEASE_ROWS: usize = 16;
/// Most namespaces that are shown; a writer sums up the rest in the last row.
pub const NAMESPACE_ROWS: usize = 256;
/// Words of the page mode text.
pub const PAGE_MODE_WORDS: usize = 8;
/// Words of the http address text.
pub const HTTP_WORDS: usize = 16;
/// Words of the configuration text: 16 KiB.
pub const CONFIG_WORDS: usize = 2048;

const STATE_OFFSET: usize = 0x800;
const HEARTBEAT_OFFSET: usize = 0x808;
const GROUPS_OFFSET: usize = 0x1000;
/// Distance of a group's payload from its sequence word, and alignment of groups: a cache line.
const LINE: usize = 64;

/// Words that change together, under one sequence word.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Group {
    offset: usize,
    words: usize,
}

impl Group {
    const fn at(offset: usize, words: usize) -> Self {
        Self { offset, words }
    }

    /// A table of `rows` rows of `T`, with its row count in the first payload word.
    const fn table<T>(offset: usize, rows: usize) -> Self {
        Self::at(offset, 1 + rows * (size_of::<T>() / 8))
    }

    /// Where the next group may start.
    const fn end(self) -> usize {
        (self.offset + LINE + self.words * 8).next_multiple_of(LINE)
    }

    /// Payload words.
    pub const fn words(self) -> usize {
        self.words
    }
}

/// Every series of the metric table, then the histograms.
pub const NUMBERS: Group = Group::at(GROUPS_OFFSET, METRIC_WORDS + LATENCY_WORDS);
/// SSD devices: a count, then [`DeviceRow`]s.
pub const DEVICES: Group = Group::table::<DeviceRow>(NUMBERS.end(), DEVICE_ROWS);
/// Namespaces: a count, then [`NamespaceRow`]s.
pub const NAMESPACES: Group = Group::table::<NamespaceRow>(DEVICES.end(), NAMESPACE_ROWS);
/// Page mode, then the http address.
pub const TEXTS: Group = Group::at(NAMESPACES.end(), PAGE_MODE_WORDS + HTTP_WORDS);
/// The resolved configuration.
pub const CONFIG: Group = Group::at(TEXTS.end(), CONFIG_WORDS);

const SESSION_FIRST: Group = Group::at(CONFIG.end(), size_of::<SessionRow>() / 8);
const OPERATIONS_FIRST: Group = Group::table::<OperationRow>(SESSION_FIRST.end(), OPERATION_ROWS);
const LEASES_FIRST: Group = Group::table::<LeaseRow>(OPERATIONS_FIRST.end(), LEASE_ROWS);
const SESSION_STRIDE: usize = LEASES_FIRST.end() - SESSION_FIRST.offset;

/// Size of the segment, in bytes.
pub const TELEMETRY_BYTES: usize =
    (SESSION_FIRST.offset + SESSION_ROWS * SESSION_STRIDE).next_multiple_of(4096);

const _: () = {
    assert!(size_of::<DeviceRow>() == 416 && size_of::<SessionRow>() == 120);
    assert!(size_of::<OperationRow>() == 32 && size_of::<LeaseRow>() == 48);
    assert!(size_of::<NamespaceRow>() == 160);
    assert!(TELEMETRY_BYTES < 1 << 20);
};

const fn of_session(first: Group, slot: usize) -> Group {
    assert!(slot < SESSION_ROWS);
    Group::at(first.offset + slot * SESSION_STRIDE, first.words)
}

/// The [`SessionRow`] of session slot `slot`.
///
/// # Panics
/// When `slot` is not below [`SESSION_ROWS`].
pub const fn session_group(slot: usize) -> Group {
    of_session(SESSION_FIRST, slot)
}

/// The operations of session slot `slot`: a count, then [`OperationRow`]s.
///
/// # Panics
/// When `slot` is not below [`SESSION_ROWS`].
pub const fn operations_group(slot: usize) -> Group {
    of_session(OPERATIONS_FIRST, slot)
}

/// The leases of session slot `slot`: a count, then [`LeaseRow`]s.
///
/// # Panics
/// When `slot` is not below [`SESSION_ROWS`].
pub const fn leases_group(slot: usize) -> Group {
    of_session(LEASES_FIRST, slot)
}

/// Folds the table of metrics and every offset, so that a reader of another build refuses by name
/// instead of showing numbers under wrong names.
pub const LAYOUT_FINGERPRINT: u64 = {
    let mut hash = 0xcbf2_9ce4_8422_2325;
    let mut i = 0;
    while i < FAMILIES.len() {
        hash = fold_text(hash, FAMILIES[i].name);
        hash = fnv1a(hash, FAMILIES[i].unit as u64);
        let mut j = 0;
        while j < FAMILIES[i].labels.len() {
            let mut k = 0;
            while k < FAMILIES[i].labels[j].values.len() {
                hash = fold_text(hash, FAMILIES[i].labels[j].values[k]);
                k += 1;
            }
            j += 1;
        }
        i += 1;
    }
    let facts = [
        HISTOGRAM_WORDS,
        LATENCY_WORDS,
        NUMBERS.offset,
        DEVICES.offset,
        NAMESPACES.offset,
        TEXTS.offset,
        CONFIG.offset,
        SESSION_FIRST.offset,
        SESSION_STRIDE,
        TELEMETRY_BYTES,
        offset_of!(DeviceRow, health),
        offset_of!(SessionRow, last_progress_ns),
        offset_of!(LeaseRow, expires_ns),
    ];
    i = 0;
    while i < facts.len() {
        hash = fnv1a(hash, facts[i] as u64);
        i += 1;
    }
    hash
};

const fn fold_text(mut hash: u64, text: &str) -> u64 {
    let bytes = text.as_bytes();
    let mut i = 0;
    while i < bytes.len() {
        hash = fnv1a(hash, bytes[i] as u64);
        i += 1;
    }
    fnv1a(hash, bytes.len() as u64)
}
