//! Our side: the Manager's own tier with its threads, ordered from one thread as the reactor does.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use orbitkv_manager::clock::Clock;
use orbitkv_manager::core::limits::{
    READS_IN_FLIGHT_BYTES, READS_IN_FLIGHT_MAX, WRITES_IN_FLIGHT_BYTES_MAX, WRITES_IN_FLIGHT_MAX,
};
use orbitkv_manager::core::{ImageIdentity, Ticket, slot_bytes};
use orbitkv_manager::pool::DramPool;
use orbitkv_manager::ssd::{
    ClaimedTier, DeviceInfo, EngineChoice, MadeFiles, ReadOrder, SsdConfig, SsdEnd, SsdTier,
    WriteOrder,
};
use orbitkv_manager::wake;
use orbitkv_shm_protocol::doorbell::ControlBell;
use orbitkv_shm_protocol::ids::PageHash;
use orbitkv_shm_protocol::spin::{Spin, WINDOW_UNMEASURED, window_here, window_of};

use super::field::{Buffers, Field, LastRead, Walk};
use super::slice::{Meter, Slice};
use crate::error::BenchError;

/// Write bytes in flight as `serve` configures them.
const WRITE_IN_FLIGHT_BYTES: u64 = 2 << 20;
/// The namespace of all pages here.
const NAMESPACE: [u8; 32] = [0xbe; 32];
/// Marks the tickets of writes; the rest is the number of a slot or of a buffer.
const WRITE: u64 = 1 << 63;
/// Longest sleep without an end; a wake is never lost, and this is no bound of anything.
const NAP: Duration = Duration::from_millis(100);
/// No order takes so long unless the device hangs.
const ORDER_MAX: Duration = Duration::from_secs(60);

/// How reads are ordered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Reads {
    /// As many as the Manager has in flight at most.
    Many,
    /// The next when the last has ended.
    OneByOne,
}

/// What is ordered during a slice.
#[derive(Default)]
pub(super) struct Load<'a> {
    pub(super) reads: Option<(&'a mut Walk, Reads)>,
    /// Always as many as the Manager has in flight at most: its spill set is never empty.
    pub(super) writes: Option<&'a mut Walk>,
}

/// The open tier.
pub(super) struct Ours {
    // Dropped in this order: the workers end before the files go.
    tier: SsdTier,
    _made: MadeFiles,
    bell: ControlBell,
    spin: Spin,
    generation: u64,
    /// The files.
    pub(super) devices: Vec<DeviceInfo>,
    /// Pages whose bytes were compared after a slice, beside the checksum of every single one.
    pub(super) compared: u64,
}

/// What is out of a slice.
struct Out {
    reads: usize,
    writes: usize,
    bytes_read: u64,
    bytes_written: u64,
    idle: VecDeque<usize>,
    /// By buffer: slot and time of the order.
    reading: Vec<(u32, Instant)>,
    next_write: usize,
    last: LastRead,
}

impl Out {
    fn new(buffers: &Buffers) -> Self {
        Self {
            reads: 0,
            writes: 0,
            bytes_read: 0,
            bytes_written: 0,
            idle: buffers.idle(),
            reading: vec![(0, Instant::now()); buffers.reads.len()],
            next_write: 0,
            last: LastRead::new(buffers),
        }
    }

    /// As `core` decides it.
    fn may_read(&self, reads: Reads) -> bool {
        self.reads == 0
            || (reads == Reads::Many
                && self.reads < READS_IN_FLIGHT_MAX as usize
                && self.bytes_read < READS_IN_FLIGHT_BYTES)
    }

    /// As `core` decides it.
    fn may_write(&self) -> bool {
        self.writes == 0
            || (self.writes < WRITES_IN_FLIGHT_MAX as usize
                && self.bytes_written < WRITES_IN_FLIGHT_BYTES_MAX)
    }
}

impl Ours {
    /// Makes the files and starts the workers.
    pub(super) fn open(
        paths: &[PathBuf],
        size: u64,
        page_bytes_max: u32,
        pool: &Arc<DramPool>,
    ) -> Result<Self, BenchError> {
        for path in paths {
            if path.metadata().is_ok_and(|file| file.len() > 0) {
                return Err(BenchError::FileExists { path: path.clone() });
            }
        }
        let config = SsdConfig {
            paths: paths.to_vec(),
            capacity_bytes: size,
            direct: true,
            engine: EngineChoice::Auto,
            write_in_flight_bytes: WRITE_IN_FLIGHT_BYTES,
            read_join_bytes: 1 << 20,
            slot_bytes_max: slot_bytes(page_bytes_max),
        };
        let mut claimed = ClaimedTier::claim(&config)?;
        let made = claimed.made_files();
        let bell = ControlBell::new();
        let ringer = bell.ringer();
        let notify = Arc::new(move || _ = ringer.ring());
        let (tier, devices) = SsdTier::start(claimed, &pool.arena_bytes(), pool.clone(), notify)?;
        let wake = wake::measure(&Clock::monotonic());
        let window = window_here(wake.map_or(WINDOW_UNMEASURED, window_of));
        Ok(Self {
            tier,
            _made: made,
            bell,
            spin: Spin::new(window),
            // The files are new.
            generation: 0,
            devices,
            compared: 0,
        })
    }

    /// Gives the regions of `field` their slot length and writes every slot once.
    pub(super) fn fill(&mut self, field: &mut Field, buffers: &Buffers) -> Result<(), BenchError> {
        for &(device, region) in &field.regions {
            while self.tier.record_region(device, region, slot_bytes(field.page_bytes)).is_err() {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        let mut out = Out::new(buffers);
        let mut meter = Meter::start(Duration::ZERO);
        for slot in 0..field.len() as u32 {
            while !out.may_write() {
                self.take(field, &mut out, &mut meter)?;
            }
            self.write(field, buffers, slot, &mut out)?;
        }
        while out.writes > 0 {
            self.take(field, &mut out, &mut meter)?;
        }
        Ok(())
    }

    /// One slice of a load; what is still out at its end is waited for.
    pub(super) fn slice(
        &mut self,
        field: &mut Field,
        buffers: &Buffers,
        mut load: Load<'_>,
        length: Duration,
    ) -> Result<Slice, BenchError> {
        buffers.spoil()?;
        let mut out = Out::new(buffers);
        let mut meter = Meter::start(length);
        while !meter.is_over(load.reads.is_some(), load.writes.is_some()) {
            self.order(field, buffers, &mut load, &mut out)?;
            self.take(field, &mut out, &mut meter)?;
        }
        let slice = meter.close();
        let mut rest = Meter::start(Duration::ZERO);
        while out.reads + out.writes > 0 {
            self.take(field, &mut out, &mut rest)?;
        }
        self.compared += out.last.compare(field, buffers)?;
        Ok(slice)
    }

    fn order(
        &mut self,
        field: &mut Field,
        buffers: &Buffers,
        load: &mut Load<'_>,
        out: &mut Out,
    ) -> Result<(), BenchError> {
        if let Some((walk, reads)) = &mut load.reads {
            while out.may_read(*reads) && !out.idle.is_empty() {
                self.read(field, buffers, walk.next(), out)?;
            }
        }
        if let Some(walk) = &mut load.writes {
            while out.may_write() {
                self.write(field, buffers, walk.next(), out)?;
            }
        }
        Ok(())
    }

    fn read(
        &mut self,
        field: &Field,
        buffers: &Buffers,
        index: u32,
        out: &mut Out,
    ) -> Result<(), BenchError> {
        let Some(buffer) = out.idle.pop_front() else { return Err(full()) };
        let order = ReadOrder {
            ticket: Ticket(buffer as u64),
            slot: field.slot(index),
            extent: buffers.reads[buffer],
            image_bytes: field.page_bytes,
            checksum: buffers.checksums[field.content(index)],
        };
        out.reading[buffer] = (index, Instant::now());
        self.tier.submit_read(order).map_err(|_| full())?;
        out.reads += 1;
        out.bytes_read += u64::from(field.page_bytes);
        Ok(())
    }

    fn write(
        &mut self,
        field: &mut Field,
        buffers: &Buffers,
        index: u32,
        out: &mut Out,
    ) -> Result<(), BenchError> {
        let buffer = out.next_write % buffers.writes.len();
        out.next_write += 1;
        self.generation += 1;
        let mut hash = [0; 32];
        hash[..4].copy_from_slice(&index.to_le_bytes());
        let image = ImageIdentity {
            namespace: NAMESPACE,
            hash: PageHash(hash),
            parent: None,
            image_bytes: field.page_bytes,
            generation: self.generation,
            checksum: Some(buffers.checksums[buffer]),
        };
        let ticket = Ticket(WRITE | u64::from(index));
        let (extent, slot) = (buffers.writes[buffer], field.slot(index));
        field.set_content(index, buffer);
        self.tier.submit_write(WriteOrder { ticket, extent, slot, image }).map_err(|_| full())?;
        out.writes += 1;
        out.bytes_written += u64::from(field.page_bytes);
        Ok(())
    }

    /// Waits for an end and takes all there are.
    fn take(&mut self, field: &Field, out: &mut Out, meter: &mut Meter) -> Result<(), BenchError> {
        let mut next = Some(self.wait()?);
        let now = Instant::now();
        while let Some(end) = next {
            let bytes = u64::from(field.page_bytes);
            let fault = match end {
                SsdEnd::Read { ticket, fault } => {
                    let buffer = ticket.0 as usize;
                    let (slot, ordered) = out.reading[buffer];
                    meter.read(field.page_bytes, ordered, now);
                    out.last.set(buffer, slot);
                    out.idle.push_back(buffer);
                    out.reads -= 1;
                    out.bytes_read -= bytes;
                    fault
                }
                SsdEnd::Write { fault, .. } => {
                    meter.wrote(field.page_bytes);
                    out.writes -= 1;
                    out.bytes_written -= bytes;
                    fault
                }
                SsdEnd::Forget { fault, .. } => fault,
            };
            if let Some(fault) = fault {
                return Err(BenchError::Wrong(format!("{end:?} failed: {fault:?}").into()));
            }
            next = self.tier.poll();
        }
        meter.open(now);
        Ok(())
    }

    /// The next end: spins while that pays, then sleeps, as the reactor does.
    fn wait(&mut self) -> Result<SsdEnd, BenchError> {
        let begun = Instant::now();
        loop {
            if let Some(end) = self.tier.poll() {
                return Ok(end);
            }
            if let Some(window) = self.spin.due() {
                let until = Instant::now() + window;
                while Instant::now() < until {
                    if let Some(end) = self.tier.poll() {
                        self.spin.note(true);
                        return Ok(end);
                    }
                    std::hint::spin_loop();
                }
                self.spin.note(false);
            }
            let sleeper = self.bell.sleeper();
            let seen = sleeper.begin();
            let end = self.tier.poll();
            if end.is_none() {
                sleeper.wait(seen, NAP);
            }
            sleeper.end();
            if let Some(end) = end {
                return Ok(end);
            }
            if begun.elapsed() > ORDER_MAX {
                return Err(BenchError::Wrong("the device holds an order for a minute".into()));
            }
        }
    }

    /// Ends the workers; the files that were made go.
    pub(super) fn stop(self) {
        self.tier.stop(ORDER_MAX);
    }
}

fn full() -> BenchError {
    BenchError::Wrong("the tier did not take what the Manager may order".into())
}
