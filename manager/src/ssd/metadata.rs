//! The superblock of an open file: read once, then changed in memory and written alternately.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use super::counters::{DeviceCounters, count};
use super::error::SsdError;
use super::file::SsdFile;
use super::format::{Block, SUPERBLOCK_COPIES, Superblock, SuperblockError, SuperblockHead};
use super::io::fault_of_errno;
use super::pulse::Pulse;
use crate::core::{IoFault, RegionGeometry, Slot};

/// Reads the newest whole copy.
pub(crate) fn load(file: &SsdFile) -> Result<Superblock, SsdError> {
    let mut best: Option<Superblock> = None;
    let mut ours = false;
    let mut unknown = None;
    let mut failed = None;
    for copy in 0..SUPERBLOCK_COPIES {
        match load_copy(file, copy) {
            Ok(Ok(state)) => {
                if best.as_ref().is_none_or(|best| best.sequence < state.sequence) {
                    best = Some(state);
                }
            }
            Ok(Err(SuperblockError::NotOurs)) => {}
            Ok(Err(SuperblockError::Format(found))) => unknown = Some(found),
            Ok(Err(SuperblockError::Checksum | SuperblockError::Numbers)) => ours = true,
            // One unreadable copy does not matter while the other can be read.
            Err(error) => failed = Some(error),
        }
    }
    let path = || file.path().to_owned();
    match (best, failed, unknown, ours) {
        (Some(state), ..) => Ok(state),
        (None, Some(error), ..) => Err(error),
        (None, None, Some(found), _) => Err(SsdError::UnknownFormat { path: path(), found }),
        (None, None, None, true) => Err(SsdError::Damaged { path: path() }),
        (None, None, None, false) => Err(SsdError::NotOurs { path: path() }),
    }
}

fn load_copy(file: &SsdFile, copy: u32) -> Result<Result<Superblock, SuperblockError>, SsdError> {
    let mut block = [Block::ZERO];
    match file.read_blocks(&mut block, Superblock::head_offset(copy)) {
        Ok(()) => {}
        // Too short to be ours.
        Err(SsdError::Io { errno: rustix::io::Errno::NODATA, .. }) => {
            return Ok(Err(SuperblockError::NotOurs));
        }
        Err(error) => return Err(error),
    }
    let head = match SuperblockHead::decode(&block[0]) {
        Ok(head) => head,
        Err(error) => return Ok(Err(error)),
    };
    let mut table = vec![Block::ZERO; head.table_blocks()];
    match file.read_blocks(&mut table, head.table_offset()) {
        Ok(()) => Ok(head.with_table(&table)),
        Err(SsdError::Io { errno: rustix::io::Errno::NODATA, .. }) => {
            Ok(Err(SuperblockError::Checksum))
        }
        Err(error) => Err(error),
    }
}

/// The state of an open file and how much of it is on SSD.
pub(crate) struct Metadata {
    file: Arc<SsdFile>,
    state: Superblock,
    table: Vec<Block>,
    dirty: bool,
    /// Regions whose slot length is in memory only.
    unrecorded: Vec<u32>,
    /// So is the base of the generations that are given out.
    base_unrecorded: bool,
    /// Why they could not be recorded for a page of the batch that is being written.
    refused: Option<IoFault>,
    /// A sync was waited for since this was last asked.
    waited: bool,
    pulse: Arc<Pulse>,
    counters: Arc<DeviceCounters>,
}

impl Metadata {
    pub(crate) fn new(
        file: Arc<SsdFile>,
        state: Superblock,
        counters: Arc<DeviceCounters>,
    ) -> Self {
        Self {
            file,
            state,
            table: Vec::new(),
            dirty: false,
            unrecorded: Vec::new(),
            base_unrecorded: false,
            refused: None,
            waited: false,
            pulse: Arc::new(Pulse::patient()),
            counters,
        }
    }

    /// Tells `pulse` how long each of its system calls takes.
    pub(crate) fn watched_by(mut self, pulse: Arc<Pulse>) -> Self {
        self.pulse = pulse;
        self
    }

    pub(crate) fn state(&self) -> &Superblock {
        &self.state
    }

    /// Changes the state; it is written with the next superblock.
    pub(crate) fn change(&mut self, change: impl FnOnce(&mut Superblock)) {
        change(&mut self.state);
        self.dirty = true;
    }

    /// True when memory and SSD differ.
    pub(crate) fn is_dirty(&self) -> bool {
        self.dirty
    }

    /// A generation was given out. Not a reason to write.
    pub(crate) fn saw_generation(&mut self, generation: u64) {
        self.state.generation = self.state.generation.max(generation);
    }

    /// Generations go on above `base`, which is made durable. On failure the next write tries again
    /// and fails until it works.
    pub(crate) fn record_generation(&mut self, base: u64) -> Result<(), SsdError> {
        self.note_generation(base);
        self.write_synced()
    }

    /// Generations go on above `base`: the first write makes that durable.
    pub(crate) fn note_generation(&mut self, base: u64) {
        self.change(|state| state.generation = state.generation.max(base));
        self.base_unrecorded = true;
    }

    /// Gives a region its slot length and makes that durable. On failure the region stays
    /// unrecorded: writes into it try again and fail until it works.
    pub(crate) fn record_region(&mut self, region: u32, slot_bytes: u32) -> Result<(), SsdError> {
        if self.note_region(region, slot_bytes) { self.write_synced() } else { Ok(()) }
    }

    /// Gives a region its slot length in memory: the first write into it makes that durable. False
    /// when it is recorded already.
    pub(crate) fn note_region(&mut self, region: u32, slot_bytes: u32) -> bool {
        let sound = RegionGeometry::is_slot_length(slot_bytes)
            && self.state.geometry.slots(region, slot_bytes) > 0;
        let Some(place) = self.state.regions.get_mut(region as usize).filter(|_| sound) else {
            debug_assert!(false, "region {region} cannot have slots of {slot_bytes} bytes");
            return false;
        };
        if *place == slot_bytes && !self.unrecorded.contains(&region) {
            return false;
        }
        *place = slot_bytes;
        self.dirty = true;
        if !self.unrecorded.contains(&region) {
            self.unrecorded.push(region);
        }
        true
    }

    /// Records a slot that is not to be used again, with the next superblock.
    pub(crate) fn retire(&mut self, offset: u64) {
        if self.state.is_retired(offset) {
            return;
        }
        if self.state.retire(offset) {
            self.dirty = true;
        } else {
            count(&self.counters.retired_unrecorded);
        }
    }

    /// Drops the record of a forget that no slot needs, with the next superblock.
    pub(crate) fn unforget(&mut self, namespace: [u8; 32], generation: u64) {
        self.dirty |= self.state.unforget(namespace, generation);
    }

    /// Forgets a namespace in both copies, synced: whichever copy a crash leaves, it says so.
    pub(crate) fn record_forget(
        &mut self,
        namespace: [u8; 32],
        generation: u64,
    ) -> Result<(), SsdError> {
        self.note_forget(namespace, generation);
        self.write_both()
    }

    /// Forgets a namespace with the next superblock.
    pub(crate) fn note_forget(&mut self, namespace: [u8; 32], generation: u64) {
        self.change(|state| state.forget(namespace, generation));
    }

    /// A new batch of pages begins: what could not be recorded for the last one is tried again.
    pub(crate) fn begin_batch(&mut self) {
        self.refused = None;
    }

    /// Whether a sync was waited for since this was last asked.
    pub(crate) fn take_waited(&mut self) -> bool {
        std::mem::take(&mut self.waited)
    }

    /// Whether a page may be written to `slot`: its region must be on SSD with that slot length, and
    /// that generations go on from where they do. What cannot be recorded is tried once a batch.
    pub(crate) fn admit(&mut self, slot: Slot) -> Result<(), IoFault> {
        let Some((region, _)) = self.state.geometry.slot_at(slot.offset, slot.bytes) else {
            return Err(IoFault::Errno(libc::EINVAL));
        };
        if self.state.regions.get(region as usize) != Some(&slot.bytes) {
            return Err(IoFault::Errno(libc::EINVAL));
        }
        if !self.base_unrecorded && !self.unrecorded.contains(&region) {
            return Ok(());
        }
        if let Some(fault) = self.refused {
            return Err(fault);
        }
        self.write_synced().map_err(|error| {
            let fault = match fault_of(&error) {
                IoFault::Errno(errno) => IoFault::Superblock(errno),
                fault => fault,
            };
            self.refused = Some(fault);
            fault
        })
    }

    /// Writes one copy.
    pub(crate) fn write(&mut self) -> Result<(), SsdError> {
        // The copy that this sequence names is the older one. It stays so when the write fails:
        // the next try goes there again, and the whole copy is never touched.
        let sequence = self.state.sequence;
        self.state.sequence = sequence + 1;
        let head = self.state.encode(&mut self.table);
        let copy = (self.state.sequence % u64::from(SUPERBLOCK_COPIES)) as u32;
        let (table_at, head_at) = (self.state.table_offset(), Superblock::head_offset(copy));
        let (file, pulse) = (&self.file, &self.pulse);
        let written = pulse
            .in_call(|| file.write_blocks(&self.table, table_at))
            .and_then(|()| pulse.in_call(|| file.write_blocks(&[head], head_at)));
        match written {
            Ok(()) => {
                self.dirty = false;
                count(&self.counters.superblock_writes);
                Ok(())
            }
            Err(error) => {
                self.state.sequence = sequence;
                Err(self.failed(error))
            }
        }
    }

    /// Writes one copy and waits until it survives a power failure.
    pub(crate) fn write_synced(&mut self) -> Result<(), SsdError> {
        self.waited = true;
        self.write()?;
        if let Err(error) = self.pulse.in_call(|| self.file.sync()) {
            self.dirty = true;
            return Err(self.failed(error));
        }
        self.unrecorded.clear();
        self.base_unrecorded = false;
        self.refused = None;
        Ok(())
    }

    /// Writes and syncs one copy, then the other.
    pub(crate) fn write_both(&mut self) -> Result<(), SsdError> {
        for _ in 0..SUPERBLOCK_COPIES {
            self.write_synced()?;
        }
        Ok(())
    }

    fn failed(&self, error: SsdError) -> SsdError {
        let counter: &AtomicU64 = &self.counters.superblock_faults;
        count(counter);
        tracing::warn!(%error, "the superblock could not be written");
        error
    }
}

/// The part of an error that `core` can use.
pub(crate) fn fault_of(error: &SsdError) -> IoFault {
    match error {
        SsdError::Io { errno, .. } | SsdError::System { errno, .. } => {
            fault_of_errno(errno.raw_os_error())
        }
        _ => IoFault::Errno(libc::EIO),
    }
}
