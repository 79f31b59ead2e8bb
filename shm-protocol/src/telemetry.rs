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

mod label;
mod latency;
mod metric;
mod name;

use std::mem::offset_of;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::atomic::{Ordering, fence};

use bytemuck::{Pod, Zeroable};

pub use label::{
    CloseReason, CopyDirection, DeviceFault, HeldIn, Label, LeaseEnd, ManagerState, OperationStage,
    PrepareOutcome, Reason, RefuseReason, SessionState, SpillOutcome, SsdEngine, SsdFault,
    SsdHealth,
};
pub use latency::{
    BUCKETS, HISTOGRAM_WORDS, LATENCY_HELP, LATENCY_NAME, LATENCY_WORDS, Latency, bucket_end,
    bucket_of,
};
pub use metric::{
    FAMILIES, Family, LabelSet, METRIC_WORDS, Metric, MetricKind, Unit, families, series_at,
};
pub use name::{lock_of, open_segment, owner_lives, resolved_socket, segment_name};

use crate::ids::Epoch;
use crate::layout::fnv1a;
use crate::memory::{SharedMemory, WordWriter};

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

/// Who wrote the segment. Written once; `abi` last.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
struct Header {
    magic: u64,
    abi: u64,
    fingerprint: u64,
    bytes: u64,
    epoch: u64,
    pid: u64,
    uid: u64,
    started_ns: u64,
    version: [u64; 8],
    socket: [u64; 64],
}

const _: () = {
    assert!(size_of::<Header>() <= STATE_OFFSET);
    assert!(offset_of!(Header, magic) == 0 && offset_of!(Header, abi) == 8);
    assert!(offset_of!(Header, fingerprint) == 16 && offset_of!(Header, bytes) == 24);
    assert!(offset_of!(Header, version) == 64 && offset_of!(Header, socket) == 128);
};

/// One SSD device. All numbers as the reader shows them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct DeviceRow {
    /// Path of the file, zero-padded; see [`text_words`].
    pub path: [u64; 32],
    /// Bytes that slots may take.
    pub capacity_bytes: u64,
    /// Bytes of the slots that hold a page.
    pub used_bytes: u64,
    /// Slots that hold a page.
    pub slots: u64,
    /// Page reads queued or in the kernel.
    pub reading: u64,
    /// Page writes queued or in the kernel.
    pub writing: u64,
    /// [`SsdEngine`] as a word.
    pub engine: u64,
    /// 1 when the file is open with `O_DIRECT`.
    pub direct: u64,
    /// 1 when its space was reserved.
    pub preallocated: u64,
    /// [`SsdHealth`] as a word.
    pub health: u64,
}

/// One session and its rings.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct SessionRow {
    /// Session id.
    pub id: u64,
    /// Process id of the client.
    pub pid: u64,
    /// Its uid.
    pub uid: u64,
    /// [`SessionState`] as a word; 0 = the row is empty.
    pub state: u64,
    /// Producer position of the request ring, as the Manager last saw it.
    pub requests_submitted: u64,
    /// Consumer position of the request ring.
    pub requests_taken: u64,
    /// Producer position of the completion ring.
    pub completions_published: u64,
    /// Consumer position of the completion ring, as the Manager last saw it.
    pub completions_consumed: u64,
    /// Operations taken and not yet ended.
    pub outstanding: u64,
    /// Operations that it may have outstanding.
    pub credits: u64,
    /// Bytes that its leases pin.
    pub leased_bytes: u64,
    /// Device regions that it registered.
    pub regions: u64,
    /// CLOCK_MONOTONIC nanoseconds at which an index of one of its rings last moved.
    pub last_progress_ns: u64,
    /// Engine id, the first eight bytes in the first word.
    pub engine: [u64; 2],
}

/// One operation that runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct OperationRow {
    /// [`crate::ids::OperationId::to_bits`].
    pub id: u64,
    /// [`crate::record::RequestKind`] as a number.
    pub kind: u64,
    /// [`OperationStage`] as a word.
    pub stage: u64,
    /// CLOCK_MONOTONIC nanoseconds at which it was taken from its ring.
    pub taken_ns: u64,
}

/// One lease that is held.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct LeaseRow {
    /// Lease id.
    pub id: u64,
    /// Engine id of its attachment group, the first eight bytes in the first word.
    pub group: [u64; 2],
    /// Bytes that it pins.
    pub bytes: u64,
    /// Pages that it pins.
    pub pages: u64,
    /// CLOCK_MONOTONIC nanoseconds at which it expires.
    pub expires_ns: u64,
}

/// What the tiers hold of one namespace.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct NamespaceRow {
    /// Name for a person, zero-padded; see [`text_words`].
    pub name: [u64; 16],
    /// Pages in DRAM.
    pub dram_pages: u64,
    /// Their image bytes.
    pub dram_bytes: u64,
    /// Pages on SSD.
    pub ssd_pages: u64,
    /// Their image bytes.
    pub ssd_bytes: u64,
}

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
    assert!(size_of::<DeviceRow>() == 328 && size_of::<SessionRow>() == 120);
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

/// Bytes as zero-padded words, cut to fit between two characters; a zero byte ends them.
pub fn text_words<const N: usize>(text: &[u8]) -> [u64; N] {
    let mut words = [0; N];
    let mut len = text.len().min(N * 8);
    if len < text.len() {
        // Never half a character: step back over continuation bytes.
        while len > 0 && text[len] & 0xc0 == 0x80 {
            len -= 1;
        }
    }
    for (word, chunk) in words.iter_mut().zip(text[..len].chunks(8)) {
        let mut bytes = [0; 8];
        bytes[..chunk.len()].copy_from_slice(chunk);
        *word = u64::from_le_bytes(bytes);
    }
    words
}

/// The bytes in front of the first zero byte of `words`.
pub fn text_bytes(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).take_while(|&byte| byte != 0).collect()
}

/// What the header says of its writer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Identity {
    /// Life of the Manager.
    pub epoch: Epoch,
    /// Its process id. For messages; never proof of life.
    pub pid: u32,
    /// Its effective uid.
    pub uid: u32,
    /// CLOCK_MONOTONIC nanoseconds at which it started.
    pub started_ns: u64,
    /// Version of its build; the first 64 bytes are kept.
    pub version: String,
    /// Its socket, as [`resolved_socket`] gives it; the first 512 bytes are kept.
    pub socket: PathBuf,
}

/// The segment as its one writer sees it.
///
/// Cheap: relaxed stores, and two ordered ones for each group that changes.
#[derive(Debug)]
pub struct SegmentWriter {
    memory: SharedMemory,
    state: WordWriter<u64>,
    heartbeat: WordWriter<u64>,
}

impl SegmentWriter {
    /// Fills a fresh, zeroed segment: header, state `starting`, first heartbeat, then makes it
    /// valid.
    ///
    /// # Panics
    /// When `memory` is shorter than [`TELEMETRY_BYTES`] or read-only.
    pub fn new(memory: SharedMemory, identity: &Identity) -> Self {
        assert!(memory.bytes() >= TELEMETRY_BYTES, "telemetry segment too short");
        let writer = Self {
            state: memory.word_writer(STATE_OFFSET),
            heartbeat: memory.word_writer(HEARTBEAT_OFFSET),
            memory,
        };
        writer.memory.write(
            0,
            Header {
                magic: TELEMETRY_MAGIC,
                abi: 0,
                fingerprint: LAYOUT_FINGERPRINT,
                bytes: TELEMETRY_BYTES as u64,
                epoch: identity.epoch.0.into(),
                pid: identity.pid.into(),
                uid: identity.uid.into(),
                started_ns: identity.started_ns,
                version: text_words(identity.version.as_bytes()),
                socket: text_words(identity.socket.as_os_str().as_bytes()),
            },
        );
        writer.set_state(ManagerState::Starting);
        writer.beat(identity.started_ns);
        // telemetry.valid
        writer.memory.word_writer::<u64>(offset_of!(Header, abi)).store_release(TELEMETRY_ABI);
        writer
    }

    /// Says which state the Manager is in.
    pub fn set_state(&self, state: ManagerState) {
        self.state.store_relaxed(state.to_word());
    }

    /// Says that the writer was alive at `now`, in CLOCK_MONOTONIC nanoseconds.
    pub fn beat(&self, now: u64) {
        self.heartbeat.store_relaxed(now);
    }

    /// Changes words of one group; readers see all of the changes or none.
    pub fn update(&self, group: Group, change: impl FnOnce(&GroupStores<'_>)) {
        let sequence = self.memory.word_writer::<u64>(group.offset);
        let before = self.memory.read::<u64>(group.offset) & !1;
        // telemetry.begin
        sequence.store_relaxed(before + 1);
        fence(Ordering::Release);
        change(&GroupStores { memory: &self.memory, group });
        // telemetry.end
        sequence.store_release(before.wrapping_add(2));
    }

    /// Replaces a table group: the count, then the first rows that fit.
    pub fn update_table<T: Pod>(&self, group: Group, rows: &[T]) {
        let words: &[u64] = bytemuck::cast_slice(rows);
        let row_words = size_of::<T>() / 8;
        let fit = rows.len().min((group.words - 1) / row_words);
        self.update(group, |stores| {
            stores.store(0, fit as u64);
            stores.store_all(1, &words[..fit * row_words]);
        });
    }

    /// The segment's memory, for readers in this process.
    pub fn memory(&self) -> SharedMemory {
        self.memory.read_only()
    }
}

/// Stores into the payload of a group that is being changed.
#[derive(Debug)]
pub struct GroupStores<'a> {
    memory: &'a SharedMemory,
    group: Group,
}

impl GroupStores<'_> {
    /// Stores one payload word.
    ///
    /// # Panics
    /// When `word` is not below the group's [`Group::words`].
    pub fn store(&self, word: usize, value: u64) {
        assert!(word < self.group.words);
        self.memory.write(self.group.offset + LINE + word * 8, value);
    }

    /// Stores payload words from `first` on.
    ///
    /// # Panics
    /// When they do not all lie inside the group.
    pub fn store_all(&self, first: usize, values: &[u64]) {
        for (i, &value) in values.iter().enumerate() {
            self.store(first + i, value);
        }
    }
}

/// Why a segment cannot be read.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SegmentFault {
    /// Too short for a telemetry segment.
    #[error("{bytes} bytes long, shorter than the {needed} bytes of a telemetry segment")]
    TooShort {
        /// What there is.
        bytes: u64,
        /// What there should be.
        needed: u64,
    },
    /// Another magic number.
    #[error("not an OrbitKV telemetry segment (magic {magic:#018x})")]
    NotOurs {
        /// First word.
        magic: u64,
    },
    /// Its writer has not finished the header.
    #[error("its writer has not finished it")]
    Unfinished,
    /// Header of another version.
    #[error("header version {theirs}, this program reads {ours}: use the tools of that Manager")]
    OtherAbi {
        /// What the header says.
        theirs: u64,
        /// [`TELEMETRY_ABI`].
        ours: u64,
    },
    /// Written by a build with another layout.
    #[error("written by version {version} with another layout: use the tools of that version")]
    OtherLayout {
        /// Version of its writer, made printable.
        version: String,
    },
}

/// The segment as its readers see it: any bytes may be in it, and they change.
#[derive(Clone, Debug)]
pub struct SegmentReader {
    memory: SharedMemory,
}

/// One copy of a group.
#[derive(Clone, Debug)]
pub struct GroupCopy {
    /// The payload.
    pub words: Vec<u64>,
    /// The payload was changing whenever it was looked at, or its writer died in mid-change: the
    /// words may be of different moments.
    pub torn: bool,
}

impl SegmentReader {
    /// Checks the header.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn new(memory: SharedMemory) -> Result<Self, SegmentFault> {
        let bytes = memory.bytes() as u64;
        let needed = TELEMETRY_BYTES as u64;
        if bytes < needed {
            return Err(SegmentFault::TooShort { bytes, needed });
        }
        // telemetry.valid
        let abi = memory.word_reader::<u64>(offset_of!(Header, abi)).load_acquire();
        let header = memory.read::<Header>(0);
        check_start(header.magic, abi)?;
        if header.fingerprint != LAYOUT_FINGERPRINT || header.bytes != needed {
            let version = printable(&text_bytes(&header.version));
            return Err(SegmentFault::OtherLayout { version });
        }
        Ok(Self { memory })
    }

    /// What the header says of its writer; numbers that do not fit are cut.
    pub fn identity(&self) -> Identity {
        let header = self.memory.read::<Header>(0);
        let socket = text_bytes(&header.socket);
        Identity {
            epoch: Epoch(header.epoch as u32),
            pid: header.pid as u32,
            uid: header.uid as u32,
            started_ns: header.started_ns,
            version: printable(&text_bytes(&header.version)),
            socket: std::ffi::OsStr::from_bytes(&socket).into(),
        }
    }

    /// State that the writer last said; `None` for an unknown number.
    pub fn state(&self) -> Option<ManagerState> {
        ManagerState::from_word(self.memory.read(STATE_OFFSET))
    }

    /// CLOCK_MONOTONIC nanoseconds at which the writer was last alive.
    pub fn heartbeat_ns(&self) -> u64 {
        self.memory.read(HEARTBEAT_OFFSET)
    }

    /// Copies a group, trying again while it changes for as long as `patience` says so. One copy is
    /// always made, so the time is bounded by the caller.
    pub fn copy(&self, group: Group, mut patience: impl FnMut() -> bool) -> GroupCopy {
        let sequence = self.memory.word_reader::<u64>(group.offset);
        let mut words = vec![0; group.words];
        loop {
            // telemetry.end
            let before = sequence.load_acquire();
            for (i, word) in words.iter_mut().enumerate() {
                *word = self.memory.read(group.offset + LINE + i * 8);
            }
            // telemetry.begin
            fence(Ordering::Acquire);
            let torn = before & 1 != 0 || sequence.load_relaxed() != before;
            if !torn || !patience() {
                return GroupCopy { words, torn };
            }
        }
    }
}

/// Judges the first two words of a segment.
///
/// # Errors
/// Anything but a finished header of this version.
pub fn check_start(magic: u64, abi: u64) -> Result<(), SegmentFault> {
    match (magic, abi) {
        // A fresh segment is all zero until its writer gets to it.
        (0 | TELEMETRY_MAGIC, 0) => Err(SegmentFault::Unfinished),
        (TELEMETRY_MAGIC, TELEMETRY_ABI) => Ok(()),
        (TELEMETRY_MAGIC, theirs) => Err(SegmentFault::OtherAbi { theirs, ours: TELEMETRY_ABI }),
        (magic, _) => Err(SegmentFault::NotOurs { magic }),
    }
}

impl GroupCopy {
    /// The rows of a table group, as many as its count says and the table can hold.
    pub fn rows<T: Pod>(&self) -> Vec<T> {
        let row_words = size_of::<T>() / 8;
        let Some((&count, words)) = self.words.split_first() else { return Vec::new() };
        let count = usize::try_from(count).unwrap_or(usize::MAX);
        words
            .chunks_exact(row_words)
            .take(count)
            .map(|row| bytemuck::pod_read_unaligned(bytemuck::cast_slice(row)))
            .collect()
    }
}

/// Text for a terminal: invalid bytes and control characters (which could steer it) replaced, line
/// feeds and tabs kept.
pub fn printable(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes)
        .chars()
        .map(|c| if c.is_control() && c != '\n' && c != '\t' { '\u{fffd}' } else { c })
        .collect()
}
