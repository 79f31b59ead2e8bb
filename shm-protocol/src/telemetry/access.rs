//! How the one writer and any reader get at the segment: seqlocks over relaxed words.

use std::mem::offset_of;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::atomic::{Ordering, fence};

use bytemuck::{Pod, Zeroable};

use super::row::{printable_line, text_bytes, text_words};
use super::{
    Group, HEARTBEAT_OFFSET, LAYOUT_FINGERPRINT, LINE, ManagerState, STATE_OFFSET, TELEMETRY_ABI,
    TELEMETRY_BYTES, TELEMETRY_MAGIC,
};
use crate::ids::Epoch;
use crate::memory::{SharedMemory, WordWriter};

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
    /// Its socket, as [`super::resolved_socket`] gives it; the first 512 bytes are kept.
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
        writer.write_header(identity, 0);
        writer.set_state(ManagerState::Starting);
        writer.beat(identity.started_ns);
        // `telemetry.valid`
        writer.memory.word_writer::<u64>(offset_of!(Header, abi)).store_release(TELEMETRY_ABI);
        writer
    }

    /// Writes a valid header once more: whoever may write the segment besides its owner may have
    /// damaged it. Readers of an undamaged one see no change.
    pub fn restate(&self, identity: &Identity) {
        self.write_header(identity, TELEMETRY_ABI);
    }

    fn write_header(&self, identity: &Identity, abi: u64) {
        self.memory.write(
            0,
            Header {
                magic: TELEMETRY_MAGIC,
                abi,
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
        // `telemetry.begin`
        sequence.store_relaxed(before + 1);
        fence(Ordering::Release);
        change(&GroupStores { memory: &self.memory, group });
        // `telemetry.end`
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
    /// The header names no socket.
    #[error("damaged: its header names no socket")]
    NoSocket,
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
        // `telemetry.valid`
        let abi = memory.word_reader::<u64>(offset_of!(Header, abi)).load_acquire();
        let header = memory.read::<Header>(0);
        check_start(header.magic, abi)?;
        if header.fingerprint != LAYOUT_FINGERPRINT || header.bytes != needed {
            let version = printable_line(&text_bytes(&header.version));
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
            version: printable_line(&text_bytes(&header.version)),
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
            // `telemetry.end`
            let before = sequence.load_acquire();
            for (i, word) in words.iter_mut().enumerate() {
                *word = self.memory.read(group.offset + LINE + i * 8);
            }
            // `telemetry.begin`
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

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::thread;

    use super::super::{CONFIG, DEVICES, DeviceRow, NUMBERS, SESSION_ROWS, session_group};
    use super::*;

    fn identity() -> Identity {
        Identity {
            epoch: Epoch(0x0102_0304),
            pid: 77,
            uid: 1000,
            started_ns: 5,
            version: "0.1.0".into(),
            socket: Path::new("/run/orbitkv/a.sock").into(),
        }
    }

    fn segment() -> (SegmentWriter, SegmentReader) {
        let writer = SegmentWriter::new(SharedMemory::heap(TELEMETRY_BYTES), &identity());
        let reader = SegmentReader::new(writer.memory()).expect("valid");
        (writer, reader)
    }

    /// Golden bytes of the header: readers of other builds find these whatever else changes.
    #[test]
    fn header_lies_where_it_always_will() {
        let (writer, reader) = segment();
        let memory = writer.memory();
        let bytes: Vec<u8> =
            (0..144).step_by(8).flat_map(|at| memory.read::<u64>(at).to_le_bytes()).collect();
        assert_eq!(&bytes[..8], b"OKVTELE1");
        assert_eq!(bytes[8..16], 1_u64.to_le_bytes());
        assert_eq!(bytes[16..24], LAYOUT_FINGERPRINT.to_le_bytes());
        assert_eq!(bytes[24..32], (TELEMETRY_BYTES as u64).to_le_bytes());
        assert_eq!(bytes[32..40], [4, 3, 2, 1, 0, 0, 0, 0]);
        assert_eq!(bytes[40..48], [77, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(&bytes[64..72], b"0.1.0\0\0\0");
        assert_eq!(&bytes[128..144], b"/run/orbitkv/a.s");
        assert_eq!(reader.identity(), identity());
        assert_eq!(reader.state(), Some(ManagerState::Starting));
        assert_eq!(reader.heartbeat_ns(), 5);
    }

    #[test]
    fn other_segments_are_refused_by_cause() {
        let refused = |change: &dyn Fn(&SharedMemory)| {
            let memory = SharedMemory::heap(TELEMETRY_BYTES);
            drop(SegmentWriter::new(memory.clone(), &identity()));
            change(&memory);
            SegmentReader::new(memory.read_only()).expect_err("changed")
        };
        let magic = u64::from_le_bytes(*b"GARBAGE!");
        assert_eq!(refused(&|m| m.write(0, magic)), SegmentFault::NotOurs { magic });
        assert_eq!(refused(&|m| m.write(8, 0_u64)), SegmentFault::Unfinished);
        assert_eq!(refused(&|m| m.write(8, 9_u64)), SegmentFault::OtherAbi { theirs: 9, ours: 1 });
        let version = "0.1.0".to_owned();
        assert_eq!(refused(&|m| m.write(16, 1_u64)), SegmentFault::OtherLayout { version });
        let short = SegmentReader::new(SharedMemory::heap(4096)).expect_err("short");
        assert!(matches!(short, SegmentFault::TooShort { bytes: 4096, .. }));
        let fresh = SegmentReader::new(SharedMemory::heap(TELEMETRY_BYTES)).expect_err("zero");
        assert_eq!(fresh, SegmentFault::Unfinished);
    }

    /// A writer changes all words of a group to the same number again and again; a copy that is not
    /// marked torn never holds two numbers.
    #[test]
    fn copies_are_whole_or_marked_torn() {
        let (writer, reader) = segment();
        thread::scope(|scope| {
            scope.spawn(|| {
                for value in 1..=20_000 {
                    writer.update(CONFIG, |stores| {
                        for word in 0..64 {
                            stores.store(word, value);
                        }
                    });
                }
            });
            let mut last = 0;
            while last < 20_000 {
                let copy = reader.copy(CONFIG, || {
                    thread::yield_now();
                    true
                });
                assert!(!copy.torn, "patience without end");
                let value = copy.words[0];
                assert!(copy.words[..64].iter().all(|&word| word == value), "{:?}", copy.words);
                assert!(value >= last, "never back in time");
                last = value;
            }
        });
    }

    /// A writer that died between begin and end: readers give up as told and say so.
    #[test]
    fn a_dead_writers_group_is_taken_as_it_is() {
        let (writer, reader) = segment();
        writer.update(NUMBERS, |stores| stores.store(3, 33));
        let memory = SharedMemory::heap(TELEMETRY_BYTES);
        let torn = SegmentWriter::new(memory.clone(), &identity());
        torn.update(NUMBERS, |stores| stores.store(3, 33));
        // NUMBERS is the first group: its sequence is the first word behind the header page.
        memory.write(0x1000, memory.read::<u64>(0x1000) | 1);
        let reader_of_torn = SegmentReader::new(memory.read_only()).expect("valid");
        let mut tries = 0;
        let copy = reader_of_torn.copy(NUMBERS, || {
            tries += 1;
            tries < 10
        });
        assert!(copy.torn);
        assert_eq!((tries, copy.words[3]), (10, 33));
        let copy = reader.copy(NUMBERS, || unreachable!("nothing changes"));
        assert_eq!((copy.torn, copy.words[3]), (false, 33));
        // The next writer on the same memory comes to rest again.
        torn.update(NUMBERS, |stores| stores.store(3, 34));
        let copy = reader_of_torn.copy(NUMBERS, || false);
        assert_eq!((copy.torn, copy.words[3]), (false, 34));
    }

    #[test]
    fn tables_keep_what_fits() {
        let (writer, reader) = segment();
        let mut row: DeviceRow = Zeroable::zeroed();
        let rows: Vec<DeviceRow> = (0..20)
            .map(|i| {
                row.capacity_bytes = i;
                row
            })
            .collect();
        writer.update_table(DEVICES, &rows);
        assert_eq!(reader.copy(DEVICES, || false).rows::<DeviceRow>(), rows[..16]);
        writer.update_table(DEVICES, &rows[..2]);
        assert_eq!(reader.copy(DEVICES, || false).rows::<DeviceRow>(), rows[..2]);
        let lying = GroupCopy { words: vec![u64::MAX; DEVICES.words()], torn: false };
        assert_eq!(lying.rows::<DeviceRow>().len(), 16);
    }

    #[test]
    #[should_panic(expected = "word < self.group.words")]
    fn a_store_past_the_group_is_a_bug() {
        let (writer, _) = segment();
        let group = session_group(SESSION_ROWS - 1);
        writer.update(group, |stores| stores.store(group.words(), 1));
    }
}
