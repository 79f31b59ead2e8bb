//! The write side of a device: few bytes in the kernel at a time, neighbours together.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use ringbuf::HeapProd;
use ringbuf::traits::Producer;

use super::activity::{Allowance, ReadActivity};
use super::counters::DeviceCounters;
use super::flight::{Flight, part_of};
use super::format::{Footer, padded};
use super::halt::{Halt, Halted};
use super::io::{CHUNK_IMAGE_BYTES_MAX, CHUNK_PARTS_MAX, Chunk, Engine, Part, Transfer};
use super::metadata::{Metadata, fault_of};
use super::order::{SsdEnd, WriteOrder, WriterCommand};
use super::pulse::Pulse;
use super::summer::Summer;
use super::window::Window;
use super::worker::Duty;
use crate::core::FOOTER_BYTES;
use crate::core::IoFault;

/// Chunks of writes in the kernel at most; the bytes are what really limits.
pub(crate) const WRITE_DEPTH: u16 = 64;

/// Turns write orders into chunks, and keeps the superblock.
pub(crate) struct Writer {
    flight: Flight<WriteOrder>,
    backlog: VecDeque<WriterCommand>,
    /// Where writes are on their way to the backlog whose images were not summed.
    summer: Summer,
    /// The writes that are being sent: in the order of the disk.
    window: Window<WriteOrder>,
    open: Option<OpenPage>,
    together: Vec<u32>,
    metadata: Metadata,
    counters: Arc<DeviceCounters>,
    activity: Arc<ReadActivity>,
    pulse: Arc<Pulse>,
    halt: Halt,
    /// How long nothing is sent, so that some reads are alone.
    pause: Option<Duration>,
    ends: HeapProd<SsdEnd>,
    notify: Arc<dyn Fn() + Send + Sync>,
    /// The last superblock write failed: not tried again until there is a new reason.
    resting: bool,
    /// There is more to send than was sent.
    left_early: bool,
}

/// What a writer needs beside its engine.
pub(crate) struct WriterParts {
    pub(crate) metadata: Metadata,
    pub(crate) summer: Summer,
    pub(crate) counters: Arc<DeviceCounters>,
    pub(crate) activity: Arc<ReadActivity>,
    pub(crate) pulse: Arc<Pulse>,
    pub(crate) halted: Halted,
    pub(crate) ends: HeapProd<SsdEnd>,
    pub(crate) notify: Arc<dyn Fn() + Send + Sync>,
}

/// The page whose chunks are being sent; `sent` image bytes of it have been.
#[derive(Clone, Copy)]
struct OpenPage {
    page: u32,
    order: WriteOrder,
    sent: u32,
}

impl Writer {
    pub(crate) fn new(engine: Box<dyn Engine>, parts: WriterParts) -> Self {
        Self {
            flight: Flight::new(engine, Transfer::Write, parts.counters.clone())
                .with_pulse(parts.pulse.clone()),
            backlog: VecDeque::new(),
            summer: parts.summer,
            window: Window::new(),
            open: None,
            together: Vec::new(),
            metadata: parts.metadata.watched_by(parts.pulse.clone()),
            pulse: parts.pulse,
            halt: Halt::new(parts.halted),
            counters: parts.counters,
            activity: parts.activity,
            pause: None,
            ends: parts.ends,
            notify: parts.notify,
            resting: false,
            left_early: false,
        }
    }

    fn is_sound(order: &WriteOrder) -> bool {
        let image = padded(order.image.image_bytes.into());
        order.image.image_bytes > 0
            && u64::from(order.extent.bytes) >= image
            && u64::from(order.slot.bytes) >= image + u64::from(FOOTER_BYTES)
    }

    /// Half of the limit: so that a second request can be in the kernel while one ends.
    fn chunk_bytes_max(limit: u64) -> u32 {
        let half = (limit / 2).clamp(u64::from(FOOTER_BYTES), u64::from(CHUNK_IMAGE_BYTES_MAX));
        half as u32 / FOOTER_BYTES * FOOTER_BYTES
    }

    /// Sends the next chunk of a page whose image and footer travel apart. False when there is no
    /// room for it.
    fn send_next(&mut self, open: OpenPage, limit: u64) -> bool {
        let OpenPage { page, order, sent } = open;
        let image = padded_image(&order);
        if !self.flight.has_failed(page) {
            let bytes = Self::chunk_bytes_max(limit).min(image - sent);
            if !self.flight.has_room(bytes, limit) {
                return false;
            }
            if bytes > 0 {
                let mut chunk = self.flight.chunk(order.slot.offset + u64::from(sent));
                chunk.push(page, Part::Image(part_of(order.extent, sent, bytes)));
                self.flight.send(chunk);
                self.open = Some(OpenPage { sent: sent + bytes, ..open });
                return true;
            }
            let footer_at = order.slot.offset + u64::from(order.slot.bytes - FOOTER_BYTES);
            let mut chunk = self.flight.chunk(footer_at);
            self.push_footer(&mut chunk, page, &order);
            self.flight.send(chunk);
        }
        self.open = None;
        self.flight.seal(page);
        true
    }

    /// Sends a page whose footer lies right behind its image as one request, together with those
    /// that follow it on the device.
    fn send_together(&mut self, first: WriteOrder, limit: u64) {
        let mut chunk = self.flight.chunk(first.slot.offset);
        self.push_whole(&mut chunk, &first);
        let mut last = first;
        while let Some(next) = self.window.front()
            && next.slot.offset == last.slot.offset + u64::from(last.slot.bytes)
            && Self::is_sound(&next)
            && is_compact(&next)
        {
            let total = chunk.image_bytes() + padded_image(&next);
            if total > Self::chunk_bytes_max(limit)
                || chunk.parts.len() + 2 > CHUNK_PARTS_MAX
                || !self.flight.has_room(total, limit)
                || self.metadata.admit(next.slot).is_err()
            {
                break;
            }
            self.window.pop();
            self.push_whole(&mut chunk, &next);
            last = next;
        }
        self.flight.send(chunk);
        for page in self.together.drain(..) {
            self.flight.seal(page);
        }
    }

    fn push_whole(&mut self, chunk: &mut Chunk, order: &WriteOrder) {
        let page = self.begin(order);
        chunk.push(page, Part::Image(part_of(order.extent, 0, padded_image(order))));
        self.push_footer(chunk, page, order);
        self.together.push(page);
    }

    fn push_footer(&mut self, chunk: &mut Chunk, page: u32, order: &WriteOrder) {
        let footer = Footer {
            file: self.metadata.state().file,
            slot_offset: order.slot.offset,
            slot_bytes: order.slot.bytes,
            image: order.image,
        };
        let mut block = self.flight.block();
        footer.encode(&mut block);
        chunk.push(page, Part::Block(block));
    }

    fn begin(&mut self, order: &WriteOrder) -> u32 {
        self.metadata.saw_generation(order.image.generation);
        self.flight.begin(*order)
    }

    /// Begins the next write of the window. False when there is no room for it.
    fn start(&mut self, order: WriteOrder, limit: u64) -> bool {
        if !Self::is_sound(&order) {
            self.window.pop();
            self.flight.refuse(order, IoFault::Errno(libc::EINVAL));
            return true;
        }
        let together = is_compact(&order) && u64::from(padded_image(&order)) <= limit;
        if together && !self.flight.has_room(padded_image(&order), limit) {
            return false;
        }
        self.window.pop();
        if let Err(fault) = self.metadata.admit(order.slot) {
            self.flight.refuse(order, fault);
            // The others would be refused as well: whether they are asked for is seen first.
            self.left_early = true;
            return false;
        } else if together {
            self.send_together(order, limit);
        } else {
            let page = self.begin(&order);
            self.open = Some(OpenPage { page, order, sent: 0 });
        }
        true
    }

    /// Sends as much as fits below `limit` bytes in flight. Leaves after one sync, since meanwhile
    /// nobody takes what the kernel gives back, which would look as if it kept that.
    fn send(&mut self, limit: u64) {
        loop {
            if self.metadata.take_waited() {
                self.left_early = true;
                break;
            }
            if let Some(open) = self.open {
                if !self.send_next(open, limit) {
                    break;
                }
                continue;
            }
            // Nothing overtakes a region or a forget: the window ends in front of it.
            let writes = |command| match command {
                WriterCommand::Write(order) => Some(order),
                _ => None,
            };
            if self.window.is_empty() {
                self.metadata.begin_batch();
            }
            self.window.refill(&mut self.backlog, writes, |order| order.slot.offset);
            if let Some(order) = self.window.front() {
                if !self.start(order, limit) {
                    break;
                }
                continue;
            }
            match self.backlog.front().copied() {
                Some(command) => {
                    self.backlog.pop_front();
                    self.keep(command);
                }
                None => {
                    // Nothing better to do: what is not urgent goes out now, so that a crash loses
                    // little of it.
                    if self.metadata.is_dirty() && !self.resting && self.flight.is_idle() {
                        self.resting = self.metadata.write().is_err();
                    }
                    break;
                }
            }
        }
    }

    fn take_summed(&mut self) {
        while let Some(order) = self.summer.take() {
            self.backlog.push_back(WriterCommand::Write(order));
        }
    }

    /// Tells telemetry, and the reader, what the kernel has.
    fn tell(&mut self) {
        self.counters.write_inflight_bytes.store(self.flight.image_bytes(), Ordering::Relaxed);
        self.activity.writes(self.flight.take_sent(), self.flight.chunks_out());
    }

    /// Everything behind a region or a forget waits for it, since this thread does.
    fn keep(&mut self, command: WriterCommand) {
        self.resting = false;
        match command {
            WriterCommand::Write(_) => {}
            WriterCommand::Probe => {
                let fault = self.metadata.write_synced().err().map(|error| fault_of(&error));
                if fault.is_none() {
                    self.halt.passed();
                    self.flight.set_gives_up(false);
                }
                self.end_now(SsdEnd::of_write_probe(fault));
            }
            WriterCommand::Region { region, slot_bytes } => {
                // Counted and logged there; the writes into the region report it.
                let _ = self.metadata.record_region(region, slot_bytes);
            }
            WriterCommand::Generation { base } => {
                // Likewise: no write begins before it is on SSD.
                let _ = self.metadata.record_generation(base);
            }
            WriterCommand::Retire { offset } => self.metadata.retire(offset),
            WriterCommand::Unforget { namespace, generation } => {
                self.metadata.unforget(namespace, generation);
            }
            WriterCommand::Forget { ticket, namespace, generation } => {
                let recorded = self.metadata.record_forget(namespace, generation);
                let fault = recorded.err().map(|error| fault_of(&error));
                self.end_now(SsdEnd::Forget { ticket, fault });
            }
        }
    }

    /// Ends the writes that the kernel does not have. All else waits as before.
    fn refuse_writes(&mut self) {
        if let Some(open) = self.open.take() {
            self.flight.fail(open.page, IoFault::Off);
            self.flight.seal(open.page);
        }
        while let Some(order) = self.window.pop() {
            self.flight.refuse(order, IoFault::Off);
        }
        let flight = &mut self.flight;
        self.backlog.retain(|command| match command {
            WriterCommand::Write(order) => {
                flight.refuse(*order, IoFault::Off);
                false
            }
            _ => true,
        });
    }

    fn end_now(&mut self, end: SsdEnd) {
        self.end(end);
        (self.notify)();
    }

    fn end(&mut self, end: SsdEnd) {
        let pushed = self.ends.try_push(end);
        debug_assert!(pushed.is_ok(), "more orders out than the tier lets out");
    }
}

impl Duty for Writer {
    type Command = WriterCommand;

    fn accept(&mut self, command: WriterCommand) {
        match command {
            // What is ordered meanwhile may overtake it: nothing that must come before it, since
            // that was ordered before.
            WriterCommand::Write(order) if order.image.checksum.is_none() => {
                if let Some(summed) = self.summer.sum(order) {
                    self.backlog.push_back(WriterCommand::Write(summed));
                }
            }
            command => self.backlog.push_back(command),
        }
    }

    fn fill(&mut self) {
        (self.pause, self.left_early) = (None, false);
        self.take_summed();
        if self.pulse.is_hung() {
            // What the kernel does not have yet need not wait for what it keeps.
            self.abandon();
            return;
        }
        if self.halt.holds() {
            self.refuse_writes();
        }
        match self.activity.allowance() {
            Allowance::Bytes(limit) => {
                self.counters.write_inflight_limit_bytes.store(limit, Ordering::Relaxed);
                self.send(limit);
            }
            Allowance::Pause(left) => self.pause = Some(left),
        }
        self.tell();
    }

    fn wait(&mut self, ready: &mut dyn FnMut() -> bool) {
        // With nothing to send there is nothing to wake up for.
        let waits = !self.backlog.is_empty() || !self.window.is_empty() || self.open.is_some();
        let pause = self.pause.filter(|_| waits);
        let pause = if self.left_early { Some(Duration::ZERO) } else { pause };
        let Self { flight, summer, .. } = self;
        flight.wait_at_most(&mut || ready() || summer.has_summed(), pause);
        self.tell();
    }

    fn deliver(&mut self) {
        let mut any = false;
        while let Some((order, fault)) = self.flight.take_ended() {
            self.counters.count_write(order.image.image_bytes, fault);
            self.halt.record(fault);
            if self.halt.holds() {
                self.flight.set_gives_up(true);
            }
            let (ticket, checksum) = (order.ticket, order.image.checksum);
            self.end(SsdEnd::Write { ticket, fault, checksum });
            any = true;
        }
        // Once for all: the reactor takes what ended together in one turn.
        if any {
            (self.notify)();
        }
    }

    fn is_idle(&self) -> bool {
        self.flight.is_idle()
            && self.summer.is_idle()
            && self.backlog.is_empty()
            && self.window.is_empty()
            && self.open.is_none()
    }

    fn abandon(&mut self) {
        self.take_summed();
        self.refuse_writes();
        while let Some(command) = self.backlog.pop_front() {
            match command {
                // There is none any more.
                WriterCommand::Write(_) => {}
                WriterCommand::Forget { ticket, namespace, generation } => {
                    // Not told as done, but done as soon as there is a superblock again.
                    self.metadata.note_forget(namespace, generation);
                    self.resting = false;
                    self.end_now(SsdEnd::Forget { ticket, fault: Some(IoFault::Off) });
                }
                WriterCommand::Probe => {
                    self.end_now(SsdEnd::of_write_probe(Some(IoFault::Off)));
                }
                WriterCommand::Retire { offset } => {
                    self.metadata.retire(offset);
                    self.resting = false;
                }
                // The first write makes it durable.
                WriterCommand::Generation { base } => self.metadata.note_generation(base),
                // The first write into it makes it durable.
                WriterCommand::Region { region, slot_bytes } => {
                    _ = self.metadata.note_region(region, slot_bytes);
                }
                // One too many does no harm.
                WriterCommand::Unforget { .. } => {}
            }
        }
    }

    fn finish(&mut self) {
        // Also for the generation, which alone is no reason to write. A failure is logged there.
        let _ = self.metadata.write_synced();
    }
}

fn padded_image(order: &WriteOrder) -> u32 {
    padded(order.image.image_bytes.into()) as u32
}

/// True when image and footer are one run of bytes that may go as one request.
fn is_compact(order: &WriteOrder) -> bool {
    let image = padded_image(order);
    image <= CHUNK_IMAGE_BYTES_MAX && image + FOOTER_BYTES == order.slot.bytes
}
