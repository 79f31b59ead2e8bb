//! The tier as the reactor sees it: opened, polled for what its files hold, told what to do, polled
//! for ends.

use std::collections::{HashMap, VecDeque};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use super::DEVICES_MAX;
use super::claim::{Claimed, MadeFiles};
use super::counters::DeviceCounters;
use super::device::{Device, DeviceInfo, DeviceStatus, Notify, Refusal, Shared};
use super::engine::{EngineChoice, Resolved, resolve};
use super::error::SsdError;
use super::format::Forgotten;
use super::health::Health;
use super::metadata::Metadata;
use super::order::{ReadOrder, SsdEnd, WriteOrder, WriterCommand};
use super::recover::all_forgotten;
use super::survey::{Recovery, ScanStatus, Survey, SurveyParts};
use super::worker::Control;
use crate::core::{IoFault, Slot, Ticket};
use crate::image::ImageMemory;

/// How long the end of a tier waits for I/O that the kernel does not give back.
const STUCK_IO_WAIT: Duration = Duration::from_secs(5);

/// How the tier is made.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SsdConfig {
    /// Files, 1 to [`DEVICES_MAX`]; a missing one is made, its folder is not.
    pub paths: Vec<PathBuf>,
    /// Bytes of all files together, split evenly: a hard bound, reserved at once.
    pub capacity_bytes: u64,
    /// `O_DIRECT`: around the page cache.
    pub direct: bool,
    /// How I/O is done.
    pub engine: EngineChoice,
    /// Image bytes of writes in flight a device beside reads, to start with: adapted to what the
    /// reads take.
    pub write_in_flight_bytes: u64,
    /// Image bytes of small neighbours that one read may join, at most 1 MiB.
    pub read_join_bytes: u64,
    /// Longest slot that will be used, in bytes; decides the region length of new files.
    pub slot_bytes_max: u32,
}

/// The files of a tier, locked and with their space reserved, before there is memory to read them
/// into. Dropped, it removes the files that it made, unless somebody took them over
/// ([`made_files`](Self::made_files)).
pub struct ClaimedTier {
    resolved: Resolved,
    files: Vec<Claimed>,
    made: MadeFiles,
    write_in_flight_bytes: u64,
    read_join_bytes: u64,
}

impl ClaimedTier {
    /// Claims, makes or grows the files: everything that can be wrong with a path or a disk shows
    /// here, and takes no time.
    ///
    /// # Errors
    ///
    /// See [`SsdError`]. Files that were made by this call are removed again.
    pub fn claim(config: &SsdConfig) -> Result<Self, SsdError> {
        let count = config.paths.len();
        if count == 0 || count > DEVICES_MAX {
            return Err(SsdError::FileCount { count });
        }
        let resolved = resolve(config.engine)?;
        let mut made = MadeFiles::default();
        let mut files: Vec<Claimed> = Vec::new();
        for path in &config.paths {
            if let Some(same) = files.iter().find(|claimed| claimed.file.is_at(path)) {
                let first = same.file.path().to_owned();
                return Err(SsdError::SameFile { path: path.clone(), first });
            }
            files.push(Claimed::open(path, config, &mut made)?);
        }
        let SsdConfig { write_in_flight_bytes, read_join_bytes, .. } = *config;
        Ok(Self { resolved, files, made, write_in_flight_bytes, read_join_bytes })
    }

    /// The files that the claim made: they go when these are dropped before all else that a start
    /// needs is there too.
    pub fn made_files(&mut self) -> MadeFiles {
        std::mem::take(&mut self.made)
    }
}

/// The queue is full: try again after the next end.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the ssd queue is full")]
pub struct QueueFull;

/// The open tier. Used by one thread; may be moved to another.
///
/// Dropping it ends the workers without writing anything more, as a crash would, after the kernel
/// has let go of all memory; [`stop`](Self::stop) is the clean way.
pub struct SsdTier {
    devices: Vec<Device>,
    control: Arc<Control>,
    gone: Receiver<()>,
    forgets: HashMap<Ticket, (usize, Option<IoFault>)>,
    /// Ends that no worker reports.
    ended: VecDeque<SsdEnd>,
    next: usize,
    /// The search of the files for pages, once the workers run.
    survey: Option<Survey>,
    /// The workers have ended, or were left behind.
    is_over: bool,
}

impl SsdTier {
    /// [`ClaimedTier::claim`] and [`start`](Self::start) in one.
    ///
    /// # Errors
    ///
    /// See [`SsdError`]. Files that were made by this call are removed again.
    pub fn open(
        config: &SsdConfig,
        arena_bytes: &[u64],
        memory: Arc<dyn ImageMemory>,
        notify: Notify,
    ) -> Result<(Self, Vec<DeviceInfo>), SsdError> {
        let mut claimed = ClaimedTier::claim(config)?;
        let mut made = claimed.made_files();
        let opened = Self::start(claimed, arena_bytes, memory, notify)?;
        made.keep();
        Ok(opened)
    }

    /// Starts the workers, and the search of the files for pages beside them. Until
    /// [`poll_recovery`](Self::poll_recovery) tells what was found nothing may be written, since
    /// it is not known which slots hold something and which generations are given. `arena_bytes`
    /// are the sizes of the DRAM arenas, by number, to be registered with the rings; empty for
    /// none.
    ///
    /// `notify` is called after an end is ready for [`poll`](Self::poll), or a recovery, from other
    /// threads.
    ///
    /// # Errors
    ///
    /// See [`SsdError`].
    pub fn start(
        claimed: ClaimedTier,
        arena_bytes: &[u64],
        memory: Arc<dyn ImageMemory>,
        notify: Notify,
    ) -> Result<(Self, Vec<DeviceInfo>), SsdError> {
        let ClaimedTier { resolved, files, write_in_flight_bytes, read_join_bytes, .. } = claimed;
        // A file that was away while another forgot follows it, before anything of it is found.
        let forgotten = all_forgotten(files.iter().map(|claimed| &claimed.state));
        let (alive, gone) = channel();
        // Before what is shared, so that it is dropped after it and sees every thread go.
        let mut tier = Self {
            devices: Vec::new(),
            control: Arc::new(Control::default()),
            gone,
            forgets: HashMap::new(),
            ended: VecDeque::new(),
            next: 0,
            survey: None,
            is_over: false,
        };
        let shared = Shared {
            memory,
            arenas: arena_bytes.into(),
            resolved,
            write_bytes_in_flight: write_in_flight_bytes,
            read_join_bytes,
            control: tier.control.clone(),
            notify: notify.clone(),
            alive,
        };
        let mut infos = Vec::new();
        let mut searched = Vec::new();
        for claimed in files {
            searched.push((claimed.file.clone(), claimed.state.clone()));
            infos.push(start(claimed, &shared, &forgotten, &mut tier.devices)?);
        }
        let parts = SurveyParts {
            files: searched,
            forgotten,
            resolved,
            control: tier.control.clone(),
            notify,
            alive: shared.alive,
        };
        tier.survey = Some(Survey::start(parts)?);
        Ok((tier, infos))
    }

    /// What was on the files, once, when all of it is known.
    pub fn poll_recovery(&mut self) -> Option<Recovery> {
        let recovery = self.survey.as_mut()?.poll()?;
        for device in &mut self.devices {
            if recovery.has_jumped {
                let base = recovery.found.last_generation();
                let told = device.record(WriterCommand::Generation { base });
                debug_assert!(told, "nothing is ordered before the files are known");
            }
            for &Forgotten { namespace, generation } in &recovery.needless {
                if !device.record(WriterCommand::Unforget { namespace, generation }) {
                    // Kept until the next start, which costs nothing but its place.
                    break;
                }
            }
        }
        Some(recovery)
    }

    /// How far the search of each file is, in configuration order.
    pub fn scans(&self) -> impl Iterator<Item = ScanStatus> + '_ {
        self.survey.iter().flat_map(Survey::status)
    }

    /// Orders a read.
    ///
    /// # Errors
    ///
    /// When the device's queue is full; the order was not taken.
    pub fn submit_read(&mut self, order: ReadOrder) -> Result<(), QueueFull> {
        let device = self.devices.get_mut(usize::from(order.slot.device));
        match device.map_or(Err(Refusal::Off), |device| device.submit_read(order)) {
            Ok(()) => Ok(()),
            Err(Refusal::Full) => Err(QueueFull),
            Err(Refusal::Off) => {
                let fault = Some(IoFault::Off);
                self.ended.push_back(SsdEnd::Read { ticket: order.ticket, fault });
                Ok(())
            }
        }
    }

    /// Orders a write.
    ///
    /// # Errors
    ///
    /// When the device's queue is full; the order was not taken.
    pub fn submit_write(&mut self, order: WriteOrder) -> Result<(), QueueFull> {
        let device = self.devices.get_mut(usize::from(order.slot.device));
        match device.map_or(Err(Refusal::Off), |device| device.submit_write(order)) {
            Ok(()) => Ok(()),
            Err(Refusal::Full) => Err(QueueFull),
            Err(Refusal::Off) => {
                let fault = Some(IoFault::Off);
                let (ticket, checksum) = (order.ticket, order.image.checksum);
                self.ended.push_back(SsdEnd::Write { ticket, fault, checksum });
                Ok(())
            }
        }
    }

    /// Gives a region its slot length: durable before any later write into it begins. When it
    /// cannot be made durable, those writes fail.
    ///
    /// # Errors
    ///
    /// When the device's queue is full.
    pub fn record_region(
        &mut self,
        device: u16,
        region: u32,
        slot_bytes: u32,
    ) -> Result<(), QueueFull> {
        self.record(device, WriterCommand::Region { region, slot_bytes })
    }

    /// Records that a slot is not to be used again, soon.
    ///
    /// # Errors
    ///
    /// When the device's queue is full.
    pub fn retire(&mut self, slot: Slot) -> Result<(), QueueFull> {
        self.record(slot.device, WriterCommand::Retire { offset: slot.offset })
    }

    fn record(&mut self, device: u16, command: WriterCommand) -> Result<(), QueueFull> {
        let device = self.devices.get_mut(usize::from(device));
        match device.is_none_or(|device| device.record(command)) {
            true => Ok(()),
            false => Err(QueueFull),
        }
    }

    /// Records on every device that pages of `namespace` with a generation below `generation` are
    /// forgotten, and syncs it. Ends once, with [`SsdEnd::Forget`].
    ///
    /// # Errors
    ///
    /// When the queue of a device is full; then no device was told.
    pub fn record_forget(
        &mut self,
        ticket: Ticket,
        namespace: [u8; 32],
        generation: u64,
    ) -> Result<(), QueueFull> {
        if !self.devices.iter().all(Device::has_room_for_forget) {
            return Err(QueueFull);
        }
        for device in &mut self.devices {
            device.record_forget(WriterCommand::Forget { ticket, namespace, generation });
        }
        self.forgets.insert(ticket, (self.devices.len(), None));
        Ok(())
    }

    /// The next end, if any; round-robin over the devices.
    pub fn poll(&mut self) -> Option<SsdEnd> {
        if let Some(end) = self.ended.pop_front() {
            return Some(end);
        }
        let mut idle = 0;
        while idle < self.devices.len() {
            self.next = (self.next + 1) % self.devices.len();
            match self.devices.get_mut(self.next).and_then(Device::poll) {
                None => idle += 1,
                Some(SsdEnd::Forget { ticket, fault }) => {
                    if let Some(end) = self.one_more_forgot(ticket, fault) {
                        return Some(end);
                    }
                }
                Some(end) => return Some(end),
            }
        }
        None
    }

    fn one_more_forgot(&mut self, ticket: Ticket, fault: Option<IoFault>) -> Option<SsdEnd> {
        let (left, first) = self.forgets.get_mut(&ticket)?;
        *left -= 1;
        *first = first.or(fault);
        let (left, fault) = (*left, *first);
        (left == 0).then(|| {
            self.forgets.remove(&ticket);
            SsdEnd::Forget { ticket, fault }
        })
    }

    /// Looks after devices that are not well. To be called several times a second, also without
    /// work.
    pub fn tend(&mut self) {
        self.devices.iter_mut().for_each(Device::tend);
    }

    /// Every device, in configuration order.
    pub fn status(&self) -> impl Iterator<Item = DeviceStatus> + '_ {
        let lost = self.scans().map(|scan| scan.state.is_lost()).chain(std::iter::repeat(false));
        self.devices.iter().zip(lost).map(|(device, lost)| {
            let status = device.status();
            DeviceStatus { health: if lost { Health::Off } else { status.health }, ..status }
        })
    }

    /// Does what is still ordered, for `timeout` at most, writes the superblocks and ends the
    /// workers. Returns the ends that were not polled; every order has had one by then, unless the
    /// kernel keeps I/O for longer than five seconds more.
    pub fn stop(self, timeout: Duration) -> Vec<SsdEnd> {
        self.stop_within(timeout, timeout + STUCK_IO_WAIT)
    }

    /// The same, and what the kernel keeps for longer than `all` is left to it.
    pub fn stop_within(mut self, timeout: Duration, all: Duration) -> Vec<SsdEnd> {
        self.control.drain(Instant::now() + timeout.min(all));
        self.wait_for_workers(all);
        std::iter::from_fn(|| self.poll()).collect()
    }

    /// Should the kernel keep something for ever, the threads are left behind: they own all that
    /// the kernel may touch.
    fn wait_for_workers(&mut self, timeout: Duration) {
        if std::mem::replace(&mut self.is_over, true) {
            return;
        }
        for device in &self.devices {
            device.wake();
        }
        if self.gone.recv_timeout(timeout) == Err(RecvTimeoutError::Timeout) {
            tracing::error!("ssd I/O does not come back from the kernel; left behind");
        }
    }
}

impl Drop for SsdTier {
    fn drop(&mut self) {
        self.control.abort();
        self.wait_for_workers(STUCK_IO_WAIT);
    }
}

/// Brings the list of forgotten namespaces up to date and starts the workers.
fn start(
    claimed: Claimed,
    shared: &Shared,
    forgotten: &[Forgotten],
    devices: &mut Vec<Device>,
) -> Result<DeviceInfo, SsdError> {
    let file = claimed.file;
    let counters = Arc::new(DeviceCounters::default());
    let mut metadata = Metadata::new(file.clone(), claimed.state, counters.clone());
    if metadata.state().forgotten != forgotten {
        metadata.change(|state| {
            state.forgotten.clear();
            for entry in forgotten {
                state.forget(entry.namespace, entry.generation);
            }
        });
    }
    if claimed.changed || metadata.is_dirty() {
        metadata.write_synced()?;
    }
    let state = metadata.state().clone();
    let device = Device::start(file.clone(), metadata, counters, shared)?;
    let (read_mode, write_mode) = device.modes();
    devices.push(device);
    let length = |slot_bytes: u32| (slot_bytes != 0).then_some(slot_bytes);
    Ok(DeviceInfo {
        path: file.path().to_owned(),
        geometry: state.geometry,
        regions: state.regions.into_iter().map(length).collect(),
        retired: state.retired,
        direct: file.is_direct(),
        preallocated: file.is_preallocated(),
        read_mode,
        write_mode,
    })
}
