//! Checks what was read, away from the ring: a checksum costs a fifth of the read's own time.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::Receiver;

use ringbuf::HeapProd;
use ringbuf::traits::Producer;

use super::counters::DeviceCounters;
use super::order::{ReadOrder, SsdEnd};
use crate::core::{Extent, IoFault};
use crate::image::ImageMemory;

/// Bytes that are checked before the reactor hears of them, while more small pages wait.
const UNTOLD_BYTES_MAX: u32 = 256 << 10;

/// A read whose buffers are no longer the kernel's.
pub(crate) struct ReadResult {
    pub(crate) order: ReadOrder,
    pub(crate) fault: Option<IoFault>,
}

/// The checking side of a device.
pub(crate) struct Verifier {
    pub(crate) memory: Arc<dyn ImageMemory>,
    pub(crate) counters: Arc<DeviceCounters>,
    pub(crate) ends: HeapProd<SsdEnd>,
    pub(crate) notify: Arc<dyn Fn() + Send + Sync>,
}

impl Verifier {
    /// Reports every result until the reader is gone.
    pub(crate) fn run(mut self, results: &Receiver<ReadResult>) {
        while let Ok(result) = results.recv() {
            let mut untold = self.report(&result);
            // What was read together is taken in one turn of the reactor.
            while untold < UNTOLD_BYTES_MAX
                && let Ok(next) = results.try_recv()
            {
                untold = untold.saturating_add(self.report(&next));
            }
            (self.notify)();
        }
    }

    /// Checks an image and reports it; returns its length.
    fn report(&mut self, result: &ReadResult) -> u32 {
        let order = &result.order;
        if order.is_probe() {
            let end = SsdEnd::Read { ticket: order.ticket, fault: result.fault };
            let pushed = self.ends.try_push(end);
            debug_assert!(pushed.is_ok(), "more reads out than the tier lets out");
            return 0;
        }
        if matches!(result.fault, Some(IoFault::Errno(_) | IoFault::Short)) {
            self.counters.bad_offset.store(order.slot.offset, Ordering::Relaxed);
        }
        let fault = result.fault.or_else(|| fault_of_image(&*self.memory, order));
        self.counters.count_read(order.image_bytes, fault);
        let pushed = self.ends.try_push(SsdEnd::Read { ticket: order.ticket, fault });
        debug_assert!(pushed.is_ok(), "more reads out than the tier lets out");
        order.image_bytes
    }
}

/// Whether the image that was read is the one that the footer promised.
pub(crate) fn fault_of_image(memory: &dyn ImageMemory, order: &ReadOrder) -> Option<IoFault> {
    let image = Extent { bytes: order.image_bytes, ..order.extent };
    match memory.slice(image) {
        Some(slice) if slice.checksum() == order.checksum => None,
        Some(_) => Some(IoFault::Checksum),
        None => Some(IoFault::Errno(libc::EFAULT)),
    }
}
