//! The device of engines whose KV lies in host memory: two threads that copy, one a direction.

mod copy;
mod import;
mod memory;
mod peer;
mod process;

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use orbitkv_shm_protocol::doorbell::ControlRinger;
use orbitkv_shm_protocol::spin::Spin;

use super::lane::{Lane, Queues, State};
use super::{COMMANDS_MAX, CopyCommand, CopyEnd, Device};
use crate::core::Direction;
use crate::image::ImageMemory;

pub use import::ImportError;
pub use memory::{HostMemory, MemoryWay};
pub use peer::PeerHandle;

/// Pause between two looks at fences when there is nothing else to do.
const FENCE_PAUSE: Duration = Duration::from_micros(20);
/// Copies between host memory of engines and the pool. Not `Sync`: the reactor owns it.
///
/// Dropping it ends both threads after the step they are in (a few MiB); commands that were not
/// finished then are forgotten. [`Device::stop`] finishes them.
pub struct HostDevice {
    save: Lane,
    restore: Lane,
    polled_last: Direction,
}

impl HostDevice {
    /// Starts both threads over `images`. `notify` is rung after each end that they make available.
    /// `spin_window` is how long a thread that ran out of work may look for more before it sleeps.
    ///
    /// # Errors
    ///
    /// The system refused a thread.
    pub fn start(
        images: Arc<dyn ImageMemory>,
        notify: ControlRinger,
        spin_window: Duration,
    ) -> std::io::Result<Self> {
        let spin = Spin::new(spin_window);
        let start = |name: &str| {
            let (images, spin) = (Arc::clone(&images), spin.clone());
            Lane::start(name, COMMANDS_MAX, notify.clone(), move |queues| {
                work(queues, images.as_ref(), spin);
            })
        };
        Ok(Self {
            save: start("orbitkv-save")?,
            restore: start("orbitkv-restore")?,
            polled_last: Direction::Restore,
        })
    }
}

impl Device for HostDevice {
    fn submit(&mut self, command: CopyCommand) -> Result<(), CopyCommand> {
        match command.direction {
            Direction::Save => self.save.submit(command),
            Direction::Restore => self.restore.submit(command),
        }
    }

    fn poll(&mut self) -> Option<CopyEnd> {
        // The direction that was not served last goes first: neither starves the other.
        let (first, second) = match self.polled_last {
            Direction::Save => (&mut self.restore, &mut self.save),
            Direction::Restore => (&mut self.save, &mut self.restore),
        };
        let end = first.poll().or_else(|| second.poll())?;
        self.polled_last = end.direction;
        Some(end)
    }

    fn outstanding(&self) -> usize {
        self.save.outstanding() + self.restore.outstanding()
    }

    fn stop(&mut self) {
        self.save.drain();
        self.restore.drain();
        self.save.join();
        self.restore.join();
    }
}

/// Body of a device thread: one step of a new command, one step of an old one, and so on. So a
/// short command ends promptly whatever long ones are under way, and none of those starves.
fn work(mut queues: Queues, images: &dyn ImageMemory, mut spin: Spin) {
    // Holds at most what is outstanding, so that it never grows.
    let mut active = VecDeque::with_capacity(COMMANDS_MAX);
    let mut scratch = copy::Scratch::default();
    // Looks in a row that met a fence.
    let mut fenced = 0;
    loop {
        // Read before the queue: what was submitted before `stop` is then seen below.
        let state = queues.state();
        if state == State::Abandon {
            return;
        }
        let new = queues.take().map(copy::Running::new);
        if new.is_none() && active.is_empty() {
            if state == State::Drain {
                return;
            }
            queues.wait(&mut spin);
            continue;
        }
        let old = active.pop_front();
        let mut progress = false;
        for mut running in [new, old].into_iter().flatten() {
            let step = running.step(images, &mut scratch);
            progress |= !matches!(step, copy::Step::Fenced);
            match step {
                copy::Step::More | copy::Step::Fenced => active.push_back(running),
                copy::Step::Ended(error) => queues.end(running.finish(error)),
            }
        }
        fenced = if progress { 0 } else { fenced + 1 };
        if fenced > active.len() {
            // Every one of them waits for its fence.
            fenced = 0;
            thread::park_timeout(FENCE_PAUSE);
        }
    }
}

#[cfg(test)]
mod tests {
    use orbitkv_shm_protocol::bootstrap::message::{MemorySpec, RegionSpec, SegmentSpec};
    use orbitkv_shm_protocol::doorbell::ControlBell;
    use ringbuf::traits::{Consumer, Producer};
    use rustix::fs::MemfdFlags;
    use rustix::process::{PidfdFlags, getpid, pidfd_open};

    use super::*;
    use crate::core::{CopyPage, Extent, Ticket};
    use crate::device::{DeviceMemory, DeviceRegion, DoneWord, lane};
    use crate::image::HeapImages;

    const PAGE: u32 = 5 << 20;

    /// A whole memory as pages of one segment.
    fn region(pages: u32) -> Arc<DeviceRegion> {
        layered(pages, 1)
    }

    /// A whole memory as pages of a segment a layer.
    fn layered(pages: u32, layers: u32) -> Arc<DeviceRegion> {
        let bytes = u64::from(PAGE);
        let memfd = rustix::fs::memfd_create("engine", MemfdFlags::CLOEXEC).expect("memfd");
        rustix::fs::ftruncate(&memfd, bytes).expect("ftruncate");
        let pidfd = Arc::new(pidfd_open(getpid(), PidfdFlags::empty()).expect("pidfd"));
        let peer = PeerHandle { pid: getpid().as_raw_nonzero().get(), pidfd };
        let memory = HostMemory::import(&MemorySpec::Memfd { bytes }, Some(memfd), &peer);
        let memory = Arc::new(DeviceMemory::Host(memory.expect("import")));
        let length = bytes / u64::from(pages * layers);
        let segment = |layer| {
            let offset = u64::from(layer * pages) * length;
            SegmentSpec { memory: 0, offset, stride: length, length, layer }
        };
        let spec = RegionSpec { scope: 0, pages, segments: (0..layers).map(segment).collect() };
        let image_bytes = length * u64::from(layers);
        let region = DeviceRegion::new(&spec, image_bytes, |_| Some(Arc::clone(&memory)));
        Arc::new(region.expect("region"))
    }

    fn command(number: u64, region: &Arc<DeviceRegion>, pages: u32) -> CopyCommand {
        let image_bytes = region.layout().image_bytes();
        let extent = Extent { arena: 0, offset: 0, bytes: image_bytes };
        CopyCommand {
            ticket: Ticket(number),
            direction: Direction::Restore,
            region: Arc::clone(region),
            pages: vec![CopyPage { device_page: 0, extent }; pages as usize],
            image_bytes,
            fence: None,
            done: None,
            checksums: vec![],
        }
    }

    /// Goal: no convoy. Method: the whole queue is known beforehand and one thread works it off.
    #[test]
    fn short_commands_end_before_long_ones_that_came_first() {
        let images = HeapImages::new(PAGE as usize);
        let bell = ControlBell::new();
        let (mut commands, mut ends, queues) = lane::queues(State::Drain, bell.ringer());
        let (long, short) = (region(1), region(1280));
        for number in [0, 1] {
            assert!(commands.try_push(command(number, &long, 20)).is_ok());
        }
        for number in 2..12 {
            assert!(commands.try_push(command(number, &short, 1)).is_ok());
        }
        work(queues, &images, Spin::new(Duration::ZERO));
        let order: Vec<u64> = std::iter::from_fn(|| ends.try_pop())
            .inspect(|end| assert!(end.error.is_none()))
            .map(|end| end.ticket.0)
            .collect();
        assert_eq!(order, [2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 0, 1]);
    }

    /// Goal: as above. Method: the most pages of one request, in layers of a few bytes.
    #[test]
    fn short_commands_end_before_the_longest_by_layer() {
        let images = HeapImages::new(PAGE as usize);
        let bell = ControlBell::new();
        let (mut commands, mut ends, queues) = lane::queues(State::Drain, bell.ringer());
        let (words, reader) = crate::conformance::done_words();
        let (layered, short) = (layered(16_384, 5), region(1280));
        let mut long = command(0, &layered, 0);
        let extent = Extent { arena: 0, offset: 0, bytes: long.image_bytes };
        long.pages = (0..16_384).map(|device_page| CopyPage { device_page, extent }).collect();
        long.done = Some(DoneWord { words, operation_index: 0, count: 5, value: 2 });
        assert!(commands.try_push(long).is_ok());
        for number in 1..12 {
            assert!(commands.try_push(command(number, &short, 1)).is_ok());
        }
        work(queues, &images, Spin::new(Duration::ZERO));
        let order: Vec<u64> = std::iter::from_fn(|| ends.try_pop())
            .inspect(|end| assert!(end.error.is_none()))
            .map(|end| end.ticket.0)
            .collect();
        assert_eq!(order, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 0]);
        assert!((0..5).all(|layer| reader.load(0, layer) == 2));
    }

    #[test]
    fn abandoned_work_reports_nothing() {
        let images = HeapImages::new(PAGE as usize);
        let notify = ControlBell::new().ringer();
        let (mut commands, mut ends, queues) = lane::queues(State::Abandon, notify);
        let region = region(1);
        assert!(commands.try_push(command(0, &region, 1)).is_ok());
        work(queues, &images, Spin::new(Duration::ZERO));
        assert!(ends.try_pop().is_none());
        drop(commands);
        assert_eq!(Arc::strong_count(&region), 1, "an abandoned command was kept");
    }
}
