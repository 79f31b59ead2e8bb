//! What each SSD device has in flight, and who waits to read from it.
//!
//! The bounds are those of one device: one that does not answer keeps what it has, and the others have
//! all that is theirs. An operation whose next page lies on a device without room waits for that
//! device, and out of the way of those whose pages lie elsewhere. Nobody waits for a device that is
//! known not to read: what lies there only is missing for as long.

use std::collections::VecDeque;

use super::CoreConfig;
use super::job::JobRef;

/// Of so many turns to read, one goes to a hint even while others wait.
const HINT_TURN: u32 = 8;
/// Ended operations that a queue holds before they are swept out.
const STALE_MAX: usize = 1024;

/// Who reads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Urgency {
    /// Somebody waits for the pages.
    Demand,
    /// A hint or a speculative query: it reads when nobody waits.
    Hint,
}

/// Commands and bytes of one device that have not ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct InFlight {
    pub(super) reads: u32,
    pub(super) read_bytes: u64,
    pub(super) writes: u32,
    pub(super) write_bytes: u64,
}

#[derive(Debug, Default)]
struct Device {
    now: InFlight,
    /// It reads nothing at the moment.
    unreadable: bool,
    /// A page came to DRAM that somebody waits to read from it.
    stirred: bool,
    /// Operations that found no room for their next read, by urgency.
    waiting: [VecDeque<JobRef>; 2],
}

/// All devices, and the operations that have something to read.
#[derive(Debug)]
pub(super) struct Devices {
    table: Vec<Device>,
    /// What one device may have.
    most: InFlight,
    /// Operations whose next page was not looked at yet, by urgency.
    readers: [VecDeque<JobRef>; 2],
    turns: u32,
}

impl Devices {
    pub(super) fn new(config: &CoreConfig) -> Self {
        Self {
            table: config.devices.iter().map(|_| Device::default()).collect(),
            most: InFlight {
                reads: config.reads_in_flight_max,
                read_bytes: config.reads_in_flight_bytes,
                writes: config.writes_in_flight_max,
                write_bytes: config.writes_in_flight_bytes,
            },
            readers: Default::default(),
            turns: 0,
        }
    }

    /// Of all devices together.
    pub(super) fn total(&self) -> InFlight {
        self.table.iter().fold(InFlight::default(), |sum, device| InFlight {
            reads: sum.reads + device.now.reads,
            read_bytes: sum.read_bytes + device.now.read_bytes,
            writes: sum.writes + device.now.writes,
            write_bytes: sum.write_bytes + device.now.write_bytes,
        })
    }

    pub(super) fn start_read(&mut self, device: u16, bytes: u64) {
        let now = &mut self.table[usize::from(device)].now;
        now.reads += 1;
        now.read_bytes += bytes;
    }

    pub(super) fn end_read(&mut self, device: u16, bytes: u64) {
        let now = &mut self.table[usize::from(device)].now;
        now.reads -= 1;
        now.read_bytes -= bytes;
    }

    pub(super) fn start_write(&mut self, device: u16, bytes: u64) {
        let now = &mut self.table[usize::from(device)].now;
        now.writes += 1;
        now.write_bytes += bytes;
    }

    pub(super) fn end_write(&mut self, device: u16, bytes: u64) {
        let now = &mut self.table[usize::from(device)].now;
        now.writes -= 1;
        now.write_bytes -= bytes;
    }

    /// Whether pages can be read from a device.
    pub(super) fn is_readable(&self, device: u16) -> bool {
        self.table.get(usize::from(device)).is_some_and(|device| !device.unreadable)
    }

    pub(super) fn set_readable(&mut self, device: u16, readable: bool) {
        if let Some(device) = self.table.get_mut(usize::from(device)) {
            device.unreadable = !readable;
        }
    }

    /// Whether one who wants to read from a device has its turn now. Hints leave half of what may be
    /// in flight to those who wait: what the kernel has cannot be overtaken. From a device that
    /// reads nothing the answer comes at once.
    pub(super) fn has_read_room(&self, device: u16, urgency: Urgency) -> bool {
        let (commands, bytes) = match urgency {
            Urgency::Demand => (self.most.reads, self.most.read_bytes),
            Urgency::Hint => (self.most.reads.div_ceil(2), self.most.read_bytes / 2),
        };
        self.table.get(usize::from(device)).is_some_and(|device| {
            let now = &device.now;
            let room = now.reads == 0 || (now.reads < commands && now.read_bytes < bytes);
            room || device.unreadable
        })
    }

    /// Whether a device may be given another write.
    pub(super) fn has_write_room(&self, device: u16) -> bool {
        self.table.get(usize::from(device)).is_some_and(|device| {
            let (now, most) = (&device.now, &self.most);
            now.writes == 0 || (now.writes < most.writes && now.write_bytes < most.write_bytes)
        })
    }

    /// Device numbers.
    pub(super) fn numbers(&self) -> impl Iterator<Item = u16> + use<> {
        0..self.table.len() as u16
    }

    /// An operation has a page to read. `lives` says which operations have not ended.
    pub(super) fn queue(
        &mut self,
        reader: JobRef,
        urgency: Urgency,
        lives: impl Fn(JobRef) -> bool,
    ) {
        push(&mut self.readers[urgency as usize], reader, lives);
    }

    /// The next page of an operation lies on a device without room: its turn comes when there is some.
    pub(super) fn wait_for(
        &mut self,
        device: u16,
        reader: JobRef,
        urgency: Urgency,
        lives: impl Fn(JobRef) -> bool,
    ) {
        debug_assert!(!self.has_read_room(device, urgency), "waits for nothing");
        push(&mut self.table[usize::from(device)].waiting[urgency as usize], reader, lives);
    }

    /// Whose turn it is: someone who waits, and now and then a hint, so that it gets on as well.
    pub(super) fn next_reader(&mut self) -> Option<(JobRef, Urgency)> {
        self.turns = (self.turns + 1) % HINT_TURN;
        let order = match self.turns {
            0 => [Urgency::Hint, Urgency::Demand],
            _ => [Urgency::Demand, Urgency::Hint],
        };
        order.into_iter().find_map(|urgency| Some((self.next_of(urgency)?, urgency)))
    }

    /// A page that somebody waits to read from this device is in DRAM now.
    pub(super) fn stir(&mut self, device: u16) {
        self.table[usize::from(device)].stirred = true;
    }

    /// Of those who wait for a device of which that was said, the ones whose page `is_here` have
    /// their turn as if they had not waited.
    pub(super) fn look_again(&mut self, is_here: impl Fn(JobRef) -> bool) {
        let Self { table, readers, .. } = self;
        for device in table.iter_mut().filter(|device| device.stirred) {
            device.stirred = false;
            for (waiting, readers) in device.waiting.iter_mut().zip(readers.iter_mut()) {
                waiting.retain(|&reader| {
                    let here = is_here(reader);
                    if here {
                        readers.push_back(reader);
                    }
                    !here
                });
            }
        }
    }

    /// Those who waited for a device that has room now come first: they came before the others.
    fn next_of(&mut self, urgency: Urgency) -> Option<JobRef> {
        let waits = |&device: &u16| {
            let waiting = &self.table[usize::from(device)].waiting[urgency as usize];
            !waiting.is_empty() && self.has_read_room(device, urgency)
        };
        if let Some(device) = self.numbers().find(waits) {
            return self.table[usize::from(device)].waiting[urgency as usize].pop_front();
        }
        self.readers[urgency as usize].pop_front()
    }

    /// In how many queues an operation stands. For checks.
    pub(super) fn stands(&self, reader: JobRef) -> usize {
        let waiting = self.table.iter().flat_map(|device| &device.waiting);
        let queues = waiting.chain(&self.readers);
        queues.flatten().filter(|&&other| other == reader).count()
    }

    /// Panics unless the counters of each device are what was counted. For tests.
    pub(super) fn check(&self, counted: impl Fn(u16) -> InFlight) {
        for device in self.numbers() {
            assert_eq!(self.table[usize::from(device)].now, counted(device), "device {device}");
        }
    }

    /// Panics when an operation waits although it could read, or although its next page `is_here`.
    /// For tests, after a pump.
    pub(super) fn check_awake(
        &self,
        lives: impl Fn(JobRef) -> bool,
        is_here: impl Fn(JobRef) -> bool,
    ) {
        let mut waiting = self.table.iter().flat_map(|device| device.waiting.iter().flatten());
        assert!(!waiting.any(|&job| is_here(job)), "waits to read what is in DRAM");
        for urgency in [Urgency::Demand, Urgency::Hint] {
            let at = urgency as usize;
            for device in self.numbers().filter(|&device| self.has_read_room(device, urgency)) {
                let waiting = &self.table[usize::from(device)].waiting[at];
                assert!(!waiting.iter().any(|&job| lives(job)), "device {device} wakes nobody");
            }
            let stays = self.readers[at].iter().any(|&job| lives(job));
            assert!(!stays, "nobody looks at those who read");
        }
    }
}

/// Appends to a queue; one that is long loses those that have ended, so that a device that never
/// answers gathers no more of them than there are others.
fn push(queue: &mut VecDeque<JobRef>, reader: JobRef, lives: impl Fn(JobRef) -> bool) {
    if queue.len() >= STALE_MAX && queue.len() == queue.capacity() {
        queue.retain(|&other| lives(other));
    }
    queue.push_back(reader);
}
