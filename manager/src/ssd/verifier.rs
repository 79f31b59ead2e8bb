//! Checks what was read, away from the ring: a checksum costs a fifth of the read's own time.

use std::sync::Arc;
use std::sync::mpsc::Receiver;

use ringbuf::HeapProd;
use ringbuf::traits::Producer;

use super::counters::DeviceCounters;
use super::order::{ReadOrder, SsdEnd};
use crate::core::{Extent, IoFault};
use crate::image::ImageMemory;

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
            self.report(&result);
        }
    }

    fn report(&mut self, result: &ReadResult) {
        let order = &result.order;
        let fault = result.fault.or_else(|| self.check(order));
        self.counters.count_read(order.image_bytes, fault);
        let pushed = self.ends.try_push(SsdEnd::Read { ticket: order.ticket, fault });
        debug_assert!(pushed.is_ok(), "more reads out than the tier lets out");
        (self.notify)();
    }

    fn check(&self, order: &ReadOrder) -> Option<IoFault> {
        let image = Extent { bytes: order.image_bytes, ..order.extent };
        match self.memory.slice(image) {
            Some(slice) if slice.checksum() == order.checksum => None,
            Some(_) => Some(IoFault::Checksum),
            None => Some(IoFault::Errno(libc::EFAULT)),
        }
    }
}
