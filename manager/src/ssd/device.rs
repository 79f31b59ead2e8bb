//! One file with its three threads: a reader, a verifier and a writer; the latter may start one more.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, Sender, channel, sync_channel};
use std::time::{Duration, Instant};

use ringbuf::traits::{Consumer, Observer, Producer, Split};
use ringbuf::{HeapCons, HeapProd, HeapRb};
use rustix::io::Errno;

use super::activity::ReadActivity;
use super::breaker::{Breaker, Cause};
use super::counters::{DeviceCounters, DeviceSnapshot};
use super::engine::{EngineSpec, Resolved};
use super::error::SsdError;
use super::file::SsdFile;
use super::health::{Health, Signs, Slowness, judge};
use super::io::{Engine, EngineMode};
use super::metadata::Metadata;
use super::order::{ReadOrder, SsdEnd, WriteOrder, WriterCommand};
use super::pulse::Pulse;
use super::reader::{READ_DEPTH, Reader};
use super::summer::Summer;
use super::verifier::Verifier;
use super::wake::Wake;
use super::worker::{self, Control, Duty};
use super::writer::{WRITE_DEPTH, Writer, WriterParts};
use crate::core::{IoFault, RegionGeometry};
use crate::image::ImageMemory;

/// Reads of one device that may be out.
pub(crate) const READ_QUEUE: usize = 4096;
/// Writes and forgets of one device that may be out.
pub(crate) const WRITE_QUEUE: usize = 4096;
/// Regions and retired slots that may wait beside them.
const RECORD_QUEUE: usize = 4096;
/// Places that are read in turn to see whether a device is good again: its begin and where it failed.
const PROBE_PLACES: u32 = 2;

/// A device whose writes hung, and for which nobody has a write to try it with for so long, is tried
/// with its superblock: nothing else says that it answers again. Where writes failed, only an image
/// says more, since its place is another.
const UNWANTED_AFTER: Duration = Duration::from_secs(5);

/// Rings the reactor.
pub type Notify = Arc<dyn Fn() + Send + Sync>;

/// A device as tools show it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DeviceStatus {
    /// Its numbers.
    pub counters: DeviceSnapshot,
    /// What it takes.
    pub health: Health,
    /// Why not everything.
    pub cause: Option<Cause>,
    /// It takes no writes, but one may be tried.
    pub tries_writes: bool,
    /// How it reads.
    pub read_mode: EngineMode,
    /// How it writes.
    pub write_mode: EngineMode,
}

/// What all devices of a tier share.
pub(crate) struct Shared {
    pub(crate) memory: Arc<dyn ImageMemory>,
    pub(crate) arenas: Arc<[u64]>,
    pub(crate) resolved: Resolved,
    /// Where the limit of write bytes in flight beside reads starts.
    pub(crate) write_bytes_in_flight: u64,
    /// Image bytes of small neighbours that one read may join.
    pub(crate) read_join_bytes: u64,
    pub(crate) control: Arc<Control>,
    pub(crate) notify: Notify,
    /// Every thread holds a clone; when the other end hears nothing more, all are gone.
    pub(crate) alive: Sender<()>,
}

/// The reactor's end of a device.
pub(crate) struct Device {
    counters: Arc<DeviceCounters>,
    read: Side<ReadOrder>,
    write: Side<WriterCommand>,
    slowness: Slowness,
    /// The last probe read a place that had failed.
    probed_bad_place: bool,
    read_mode: EngineMode,
    write_mode: EngineMode,
}

struct Side<O> {
    orders: HeapProd<O>,
    ends: HeapCons<SsdEnd>,
    wake: Arc<Wake>,
    out: usize,
    breaker: Breaker,
    pulse: Arc<Pulse>,
}

/// Why an order was not taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Refusal {
    /// The queue is full: try again after the next end.
    Full,
    /// The breaker is open: the order ends with [`IoFault::Off`].
    Off,
}

impl Device {
    /// Starts the threads and waits until their engines are made.
    pub(crate) fn start(
        file: Arc<SsdFile>,
        metadata: Metadata,
        counters: Arc<DeviceCounters>,
        shared: &Shared,
    ) -> Result<Self, SsdError> {
        let activity = Arc::new(ReadActivity::new(shared.write_bytes_in_flight));
        let geometry = metadata.state().geometry;
        let spec = |depth: u16, wake: &Arc<Wake>| EngineSpec {
            resolved: shared.resolved,
            file: file.clone(),
            memory: shared.memory.clone(),
            wake: wake.clone(),
            depth,
            arenas: shared.arenas.clone(),
            threads: EngineSpec::THREADS,
        };

        let (read, orders, ends) = Side::new(READ_QUEUE, READ_QUEUE, PROBE_PLACES)?;
        let (results, to_check) = sync_channel(READ_QUEUE);
        let verifier = Verifier {
            memory: shared.memory.clone(),
            counters: counters.clone(),
            ends,
            notify: shared.notify.clone(),
        };
        spawn("ssd-verify", &shared.alive, move || verifier.run(&to_check))?;
        let duty = {
            let (counters, activity, pulse) =
                (counters.clone(), activity.clone(), read.pulse.clone());
            let join_bytes = shared.read_join_bytes;
            move |engine| {
                Reader::new(engine, geometry, counters, activity, pulse, results)
                    .joining(join_bytes)
            }
        };
        let read_made =
            spawn_worker("ssd-read", shared, spec(READ_DEPTH, &read.wake), orders, duty)?;

        let (write, orders, ends) = Side::new(WRITE_QUEUE + RECORD_QUEUE, WRITE_QUEUE, 1)?;
        let summer = Summer::new(shared.memory.clone(), write.wake.clone(), shared.alive.clone());
        let parts = WriterParts {
            metadata,
            summer,
            counters: counters.clone(),
            activity,
            pulse: write.pulse.clone(),
            ends,
            notify: shared.notify.clone(),
        };
        let write_made = spawn_worker(
            "ssd-write",
            shared,
            spec(WRITE_DEPTH, &write.wake),
            orders,
            move |engine| Writer::new(engine, parts),
        )?;
        let (read_mode, write_mode) = (made(&read_made)?, made(&write_made)?);
        Ok(Self {
            counters,
            read,
            write,
            slowness: Slowness::default(),
            probed_bad_place: false,
            read_mode,
            write_mode,
        })
    }

    pub(crate) fn status(&self) -> DeviceStatus {
        let (health, cause) = self.health();
        let calm = !self.write.signs().is_hung();
        let tries_writes =
            health == Health::ReadOnly && calm && self.write.breaker.would_try(Instant::now());
        DeviceStatus {
            counters: self.counters.snapshot(),
            health,
            cause,
            tries_writes,
            read_mode: self.read_mode,
            write_mode: self.write_mode,
        }
    }

    fn health(&self) -> (Health, Option<Cause>) {
        judge(self.read.signs(), self.write.signs(), self.slowness.holds(Instant::now()))
    }

    /// Looks after a device that is not well: once in a while, whether or not it has work.
    pub(crate) fn tend(&mut self) {
        let now = Instant::now();
        let oldest = self.read.pulse.oldest().max(self.write.pulse.oldest());
        self.slowness.look(oldest, self.write.pulse.mean(), now);
        if self.write.signs().is_hung() {
            self.write.breaker.trip(Cause::Hung, now);
        } else if self.write.breaker.open() == Some(Cause::Hung)
            && let Some(before) = now.checked_sub(UNWANTED_AFTER)
            && self.write.breaker.would_try(before)
        {
            let _ = self.write.submit(WriterCommand::Probe, WRITE_QUEUE);
        }
        if self.read.signs().is_hung() {
            self.read.breaker.trip(Cause::Hung, now);
        } else if self.read.breaker.would_try(now) {
            // Nobody may want to read for long: the tier finds out itself. One good place is no
            // reason to come back: the one that failed must be good as well.
            self.probed_bad_place = !self.probed_bad_place;
            let bad_place = self.counters.bad_offset.load(Ordering::Relaxed);
            let offset = if self.probed_bad_place { bad_place } else { 0 };
            // A full queue is work on its way, which is as good.
            let _ = self.read.submit(ReadOrder::probe(offset), READ_QUEUE);
        }
    }

    pub(crate) fn modes(&self) -> (EngineMode, EngineMode) {
        (self.read_mode, self.write_mode)
    }

    pub(crate) fn submit_read(&mut self, order: ReadOrder) -> Result<(), Refusal> {
        // Before the worker can count it down.
        self.counters.reading.fetch_add(1, Ordering::Relaxed);
        // While the breaker is open, probes alone are let through.
        let refused = self.read.signs().refusal().is_some();
        let submitted =
            if refused { Err(Refusal::Off) } else { self.read.submit(order, READ_QUEUE) };
        match submitted {
            Ok(()) => {}
            Err(Refusal::Full) => _ = self.counters.reading.fetch_sub(1, Ordering::Relaxed),
            Err(Refusal::Off) => self.counters.count_read(order.image_bytes, Some(IoFault::Off)),
        }
        submitted
    }

    pub(crate) fn submit_write(&mut self, order: WriteOrder) -> Result<(), Refusal> {
        self.counters.writing.fetch_add(1, Ordering::Relaxed);
        let submitted = match self.health().0 {
            // The breaker lets single writes through.
            Health::Healthy | Health::ReadOnly if !self.write.signs().is_hung() => {
                self.write.submit(WriterCommand::Write(order), WRITE_QUEUE)
            }
            _ => Err(Refusal::Off),
        };
        match submitted {
            Ok(()) => {}
            Err(Refusal::Full) => _ = self.counters.writing.fetch_sub(1, Ordering::Relaxed),
            Err(Refusal::Off) => {
                self.counters.count_write(order.image.image_bytes, Some(IoFault::Off));
            }
        }
        submitted
    }

    /// A command of the writer that has no end. False when the queue is full.
    pub(crate) fn record(&mut self, command: WriterCommand) -> bool {
        let pushed = self.write.orders.try_push(command).is_ok();
        self.write.wake.ring();
        pushed
    }

    /// True when [`record_forget`](Self::record_forget) would be taken.
    pub(crate) fn has_room_for_forget(&self) -> bool {
        self.write.out < WRITE_QUEUE && !self.write.orders.is_full()
    }

    /// A forget, which the breaker does not stop.
    pub(crate) fn record_forget(&mut self, command: WriterCommand) {
        let pushed = self.record(command);
        debug_assert!(pushed, "asked before");
        self.write.out += 1;
    }

    /// The next end of this device.
    pub(crate) fn poll(&mut self) -> Option<SsdEnd> {
        while let Some(end) = self.read.ends.try_pop() {
            self.read.out -= 1;
            // What was out when the breaker opened may still end: then only a probe says something.
            if let SsdEnd::Read { fault, .. } = end
                && (end.is_probe() || self.read.breaker.open().is_none())
            {
                self.read.record(fault);
            }
            if !end.is_probe() {
                return Some(end);
            }
        }
        while let Some(end) = self.write.ends.try_pop() {
            self.write.out -= 1;
            if let SsdEnd::Write { fault, .. } = end {
                self.write.record(fault);
                if fault == Some(IoFault::NoSpace) {
                    // Every other write would fail as well.
                    self.write.breaker.trip(Cause::NoSpace, Instant::now());
                }
            }
            if !end.is_probe() {
                return Some(end);
            }
        }
        None
    }

    /// Wakes the workers to look at the control word.
    pub(crate) fn wake(&self) {
        self.read.wake.ring_always();
        self.write.wake.ring_always();
    }
}

impl<O> Side<O> {
    fn new(
        orders_max: usize,
        ends_max: usize,
        tries: u32,
    ) -> Result<(Self, HeapCons<O>, HeapProd<SsdEnd>), SsdError> {
        let wake = Wake::new().map_err(|errno| SsdError::System { operation: "eventfd", errno })?;
        let (orders, to_do) = HeapRb::new(orders_max).split();
        let (ended, ends) = HeapRb::new(ends_max).split();
        let side = Self {
            orders,
            ends,
            wake: Arc::new(wake),
            out: 0,
            breaker: Breaker::closing_after(tries),
            pulse: Arc::new(Pulse::new()),
        };
        Ok((side, to_do, ended))
    }

    fn record(&mut self, fault: Option<IoFault>) {
        let failed = match fault {
            // The device was not asked, which shows nothing; of a try it shows nothing good.
            Some(IoFault::Off) if self.breaker.open().is_none() => return,
            Some(IoFault::Off) => true,
            fault => is_device_fault(fault),
        };
        self.breaker.record(failed, Instant::now);
    }

    fn signs(&self) -> Signs {
        Signs { open: self.breaker.open(), oldest: self.pulse.oldest() }
    }

    fn submit(&mut self, order: O, out_max: usize) -> Result<(), Refusal> {
        if self.out >= out_max || self.orders.is_full() {
            return Err(Refusal::Full);
        }
        if !self.breaker.admits(Instant::now) {
            return Err(Refusal::Off);
        }
        let pushed = self.orders.try_push(order).is_ok();
        debug_assert!(pushed, "not full a moment ago, and this thread alone pushes");
        self.out += 1;
        self.wake.ring();
        Ok(())
    }
}

/// A damaged image or a stop says nothing about the device.
fn is_device_fault(fault: Option<IoFault>) -> bool {
    match fault {
        Some(IoFault::Errno(_) | IoFault::Superblock(_) | IoFault::Short | IoFault::NoSpace) => {
            true
        }
        Some(IoFault::Checksum | IoFault::Off) | None => false,
    }
}

type Made = Receiver<Result<EngineMode, Errno>>;

fn spawn_worker<D: Duty>(
    name: &'static str,
    shared: &Shared,
    spec: EngineSpec,
    mut orders: HeapCons<D::Command>,
    duty: impl FnOnce(Box<dyn Engine>) -> D + Send + 'static,
) -> Result<Made, SsdError>
where
    D::Command: Send + 'static,
{
    let (tell, made) = channel();
    let control = shared.control.clone();
    spawn(name, &shared.alive, move || {
        // On this thread: a ring belongs to the thread that made it.
        match spec.build() {
            Ok(engine) => {
                let _ = tell.send(Ok(engine.mode()));
                worker::run(&mut duty(engine), &mut orders, &control);
            }
            Err(errno) => _ = tell.send(Err(errno)),
        }
    })?;
    Ok(made)
}

fn made(made: &Made) -> Result<EngineMode, SsdError> {
    let answer = made.recv().unwrap_or(Err(Errno::CANCELED));
    answer.map_err(|errno| SsdError::System { operation: "start of the I/O engine", errno })
}

/// Starts a thread that holds a clone of `alive` until its end.
pub(crate) fn spawn(
    name: &'static str,
    alive: &Sender<()>,
    body: impl FnOnce() + Send + 'static,
) -> Result<(), SsdError> {
    let alive = alive.clone();
    std::thread::Builder::new()
        .name(name.to_owned())
        .spawn(move || {
            body();
            drop(alive);
        })
        .map(drop)
        .map_err(|error| SsdError::System {
            operation: "start of a thread",
            errno: Errno::from_io_error(&error).unwrap_or(Errno::AGAIN),
        })
}

/// Where a file is and how it is cut, for `core` and for tools.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DeviceInfo {
    /// The file.
    pub path: std::path::PathBuf,
    /// How it is cut into regions.
    pub geometry: RegionGeometry,
    /// Slot length of each region, where it has one.
    pub regions: Vec<Option<u32>>,
    /// Offsets of slots that must not be used again, ascending.
    pub retired: Vec<u64>,
    /// `O_DIRECT`.
    pub direct: bool,
    /// All space is reserved.
    pub preallocated: bool,
    /// How it reads.
    pub read_mode: EngineMode,
    /// How it writes.
    pub write_mode: EngineMode,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ssd::claim::{Claimed, MadeFiles};
    use crate::ssd::conformance::pool;
    use crate::ssd::engine::{EngineChoice, resolve};
    use crate::ssd::tier::SsdConfig;

    /// What the workers of one device share, and who hears of their ends.
    fn shared(config: &SsdConfig, notify: Notify) -> (Shared, Receiver<()>) {
        let (alive, gone) = channel();
        let shared = Shared {
            memory: pool(2 << 20),
            arenas: [].into(),
            resolved: resolve(config.engine).unwrap(),
            write_bytes_in_flight: config.write_in_flight_bytes,
            read_join_bytes: config.read_join_bytes,
            control: Arc::new(Control::default()),
            notify,
            alive,
        };
        (shared, gone)
    }

    /// Goal: a device whose writes hung is well again although nobody has anything to write. Method: its
    /// breaker opened so long ago that the first try may be made, which is for an image, then that
    /// nobody wants it.
    #[test]
    fn a_device_that_nobody_writes_to_finds_out_itself_that_it_works_again() {
        let folder = tempfile::tempdir().unwrap();
        let config = SsdConfig {
            paths: vec![folder.path().join("tier")],
            capacity_bytes: 64 << 20,
            direct: false,
            engine: EngineChoice::Auto,
            write_in_flight_bytes: 2 << 20,
            read_join_bytes: 1 << 20,
            slot_bytes_max: 0,
        };
        let mut made = MadeFiles::default();
        let claimed = Claimed::open(&config.paths[0], &config, &mut made).unwrap();
        let (tell, told) = channel();
        let (shared, gone) = shared(&config, Arc::new(move || tell.send(()).unwrap()));
        let counters = Arc::new(DeviceCounters::default());
        let metadata = Metadata::new(claimed.file.clone(), claimed.state, counters.clone());
        let mut device = Device::start(claimed.file, metadata, counters, &shared).unwrap();
        let open_for = |cause, time: Duration| {
            let mut breaker = Breaker::closing_after(1);
            breaker.trip(cause, Instant::now().checked_sub(time).unwrap());
            breaker
        };
        let first_pause = Duration::from_secs(2);
        let unwanted = first_pause + UNWANTED_AFTER;
        for (cause, time) in
            [(Cause::Hung, first_pause), (Cause::Errors, unwanted), (Cause::NoSpace, unwanted)]
        {
            device.write.breaker = open_for(cause, time);
            device.tend();
            assert_eq!((device.write.out, device.status().tries_writes), (0, true), "{cause:?}");
        }
        while device.status().health != Health::Healthy {
            // Again where the machine is so busy that a try takes too long.
            device.write.breaker = open_for(Cause::Hung, unwanted);
            device.tend();
            assert_eq!((device.write.out, device.status().tries_writes), (1, false));
            told.recv_timeout(Duration::from_secs(120)).unwrap();
            assert_eq!(device.poll(), None);
        }
        assert!(device.status().counters.superblock_writes > 0);
        shared.control.abort();
        device.wake();
        drop(shared);
        assert!(gone.recv().is_err(), "the workers end");
    }

    #[test]
    fn orders_that_the_device_was_not_asked_for_hide_no_failures() {
        let (mut side, _to_do, _ended) = Side::<ReadOrder>::new(8, 8, 1).unwrap();
        let failed = Some(IoFault::Errno(libc::EIO));
        for _ in 0..7 {
            side.record(failed);
            for _ in 0..8 {
                side.record(Some(IoFault::Off));
            }
        }
        assert_eq!(side.breaker.open(), None);
        side.record(failed);
        assert_eq!(side.breaker.open(), Some(Cause::Errors));
    }
}
