//! The read side of a device: a few megabytes in the kernel at a time, large pages in turn, small
//! ones that wait together in the order of the disk.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;

use super::activity::{ReadActivity, ReadMark, ReadMeter};
use super::counters::DeviceCounters;
use super::flight::{Flight, part_of};
use super::format::padded;
use super::io::{CHUNK_IMAGE_BYTES_MAX, Engine, Part, Transfer};
use super::order::ReadOrder;
use super::pulse::Pulse;
use super::verifier::ReadResult;
use super::window::Window;
use super::worker::Duty;
use crate::core::limits::READS_IN_KERNEL_BYTES;
use crate::core::{FOOTER_BYTES, RegionGeometry};
use crate::core::{IoFault, Slot};

/// Chunks of reads in the kernel at most.
pub(crate) const READ_DEPTH: u16 = 64;
/// Images up to this length in neighbouring slots are read with one request.
const COALESCE_IMAGE_BYTES_MAX: u32 = 128 << 10;

/// Turns read orders into chunks.
pub(crate) struct Reader {
    flight: Flight<Reading>,
    backlog: VecDeque<ReadOrder>,
    /// The small pages that are being sent.
    window: Window<ReadOrder>,
    open: Option<OpenPage>,
    together: Vec<u32>,
    /// Image bytes that one request joins at most.
    join_bytes: u32,
    geometry: RegionGeometry,
    meter: ReadMeter,
    pulse: Arc<Pulse>,
    results: SyncSender<ReadResult>,
}

/// A page that is being read. Of those that travel together, the first one tells what it took.
#[derive(Clone, Copy)]
struct Reading {
    order: ReadOrder,
    mark: Option<ReadMark>,
}

/// The page whose chunks are being sent.
#[derive(Clone, Copy)]
struct OpenPage {
    page: u32,
    order: ReadOrder,
    sent: u32,
}

impl Reader {
    pub(crate) fn new(
        engine: Box<dyn Engine>,
        geometry: RegionGeometry,
        counters: Arc<DeviceCounters>,
        activity: Arc<ReadActivity>,
        pulse: Arc<Pulse>,
        results: SyncSender<ReadResult>,
    ) -> Self {
        Self {
            flight: Flight::new(engine, Transfer::Read, counters.clone()).with_pulse(pulse.clone()),
            pulse,
            backlog: VecDeque::new(),
            window: Window::new(),
            open: None,
            together: Vec::new(),
            join_bytes: CHUNK_IMAGE_BYTES_MAX,
            geometry,
            meter: ReadMeter::new(activity, counters),
            results,
        }
    }

    /// Joins small neighbours up to `bytes` of images.
    pub(crate) fn joining(mut self, bytes: u64) -> Self {
        self.join_bytes = bytes.min(CHUNK_IMAGE_BYTES_MAX.into()) as u32;
        self
    }

    fn is_sound(&self, order: &ReadOrder) -> bool {
        let image = padded(order.image_bytes.into());
        let Slot { offset, bytes, .. } = order.slot;
        order.image_bytes > 0
            && u64::from(order.extent.bytes) >= image
            && u64::from(bytes) >= image + u64::from(FOOTER_BYTES)
            && self.geometry.region_of(offset).is_some()
            && offset + u64::from(bytes) <= self.geometry.capacity_bytes
    }

    /// Sends the next chunk of a page. False when there is no room for it.
    fn send_next(&mut self, open: OpenPage) -> bool {
        let OpenPage { page, order, sent } = open;
        let image = padded_image(&order);
        let bytes = CHUNK_IMAGE_BYTES_MAX.min(image - sent);
        if !self.flight.has_failed(page) {
            if !self.flight.has_room(bytes, READS_IN_KERNEL_BYTES) {
                return false;
            }
            let mut chunk = self.flight.chunk(order.slot.offset + u64::from(sent));
            chunk.push(page, Part::Image(part_of(order.extent, sent, bytes)));
            self.flight.send(chunk);
            if sent + bytes < image {
                self.open = Some(OpenPage { sent: sent + bytes, ..open });
                return true;
            }
        }
        self.open = None;
        self.flight.seal(page);
        true
    }

    /// Sends a small page and those that follow it on the device.
    fn send_together(&mut self, first: ReadOrder) {
        let mark = self.meter.begin(self.flight.image_bytes());
        let mut page = self.flight.begin(Reading { order: first, mark: None });
        let mut chunk = self.flight.chunk(first.slot.offset);
        chunk.push(page, Part::Image(part_of(first.extent, 0, padded_image(&first))));
        self.together.push(page);
        let mut last = first;
        while let Some(next) = self.window.front()
            && follows(&last, &next)
            && self.is_sound(&next)
        {
            let image = padded_image(&next);
            let total = chunk.image_bytes() + image;
            if total > self.join_bytes || !self.flight.has_room(total, READS_IN_KERNEL_BYTES) {
                break;
            }
            self.window.pop();
            // What lies between two images, the footer, is read with the page in front of it.
            chunk.push(page, Part::Block(self.flight.block()));
            page = self.flight.begin(Reading { order: next, mark: None });
            chunk.push(page, Part::Image(part_of(next.extent, 0, image)));
            self.together.push(page);
            last = next;
        }
        let queue_bytes = self.flight.image_bytes() + u64::from(chunk.image_bytes());
        if let Some(&first) = self.together.first()
            && let Some(reading) = self.flight.command_mut(first)
        {
            reading.mark = Some(mark.waiting_for(queue_bytes));
        }
        self.flight.send(chunk);
        for page in self.together.drain(..) {
            self.flight.seal(page);
        }
    }

    fn send_probe(&mut self, order: ReadOrder) {
        let page = self.flight.begin(Reading { order, mark: None });
        let mut chunk = self.flight.chunk(order.slot.offset);
        chunk.push(page, Part::Block(self.flight.block()));
        self.flight.send(chunk);
        self.flight.seal(page);
    }

    fn refuse(&mut self, order: ReadOrder, fault: IoFault) {
        self.flight.refuse(Reading { order, mark: None }, fault);
    }
}

impl Duty for Reader {
    type Command = ReadOrder;

    fn accept(&mut self, order: ReadOrder) {
        self.backlog.push_back(order);
    }

    fn fill(&mut self) {
        if self.pulse.is_hung() {
            // What the kernel does not have yet need not wait for what it keeps.
            self.abandon();
            return;
        }
        loop {
            if let Some(open) = self.open {
                if !self.send_next(open) {
                    return;
                }
                continue;
            }
            if self.backlog.front().is_some_and(ReadOrder::is_probe) {
                if !self.flight.has_room(0, READS_IN_KERNEL_BYTES) {
                    return;
                }
                if let Some(order) = self.backlog.pop_front() {
                    self.send_probe(order);
                }
                continue;
            }
            let small = |order| is_small(&order).then_some(order);
            self.window.refill(&mut self.backlog, small, |order| order.slot.offset);
            if let Some(order) = self.window.front() {
                if !self.flight.has_room(padded_image(&order), READS_IN_KERNEL_BYTES) {
                    return;
                }
                self.window.pop();
                if self.is_sound(&order) {
                    self.send_together(order);
                } else {
                    self.refuse(order, IoFault::Errno(libc::EINVAL));
                }
            } else {
                let Some(order) = self.backlog.pop_front() else { return };
                if !self.is_sound(&order) {
                    self.refuse(order, IoFault::Errno(libc::EINVAL));
                    continue;
                }
                let queue_bytes = self.flight.image_bytes() + u64::from(padded_image(&order));
                let mark = Some(self.meter.begin(queue_bytes));
                let page = self.flight.begin(Reading { order, mark });
                self.open = Some(OpenPage { page, order, sent: 0 });
            }
        }
    }

    fn wait(&mut self, ready: &mut dyn FnMut() -> bool) {
        self.flight.wait(ready);
    }

    fn deliver(&mut self) {
        let mut measured = false;
        while let Some((Reading { order, mark }, fault)) = self.flight.take_ended() {
            if let (Some(mark), None) = (mark, fault) {
                self.meter.end(order.image_bytes, mark);
                measured = true;
            }
            // Never blocks: there is room for every order that the tier lets out. Fails only when
            // the verifier is gone, and with it everyone who could want the result.
            let _ = self.results.send(ReadResult { order, fault });
        }
        if measured {
            self.meter.show();
        }
    }

    fn is_idle(&self) -> bool {
        self.flight.is_idle()
            && self.backlog.is_empty()
            && self.window.is_empty()
            && self.open.is_none()
    }

    fn abandon(&mut self) {
        while let Some(order) = self.window.pop() {
            self.refuse(order, IoFault::Off);
        }
        while let Some(order) = self.backlog.pop_front() {
            self.refuse(order, IoFault::Off);
        }
        if let Some(open) = self.open.take() {
            self.flight.fail(open.page, IoFault::Off);
            self.flight.seal(open.page);
        }
    }

    fn finish(&mut self) {}
}

fn padded_image(order: &ReadOrder) -> u32 {
    padded(order.image_bytes.into()) as u32
}

fn is_small(order: &ReadOrder) -> bool {
    order.image_bytes <= COALESCE_IMAGE_BYTES_MAX && !order.is_probe()
}

/// True when `next` is small and its image begins one footer behind that of `last`.
fn follows(last: &ReadOrder, next: &ReadOrder) -> bool {
    let behind = u64::from(padded_image(last)) + u64::from(FOOTER_BYTES);
    is_small(next) && next.slot.offset == last.slot.offset + behind
}
