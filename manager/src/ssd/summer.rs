//! Sums images that came without a checksum, away from the ring: the devices of GPUs copy faster than a
//! core can sum.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use ringbuf::traits::{Consumer, Observer, Producer, Split};
use ringbuf::{HeapCons, HeapProd, HeapRb};

use super::device::{WRITE_QUEUE, spawn};
use super::order::WriteOrder;
use super::wake::Wake;
use crate::core::Extent;
use crate::image::ImageMemory;

/// The writer's end. Its thread starts with the first image, and ends with it.
pub(crate) struct Summer {
    memory: Arc<dyn ImageMemory>,
    /// Of the writer.
    wake: Arc<Wake>,
    alive: Sender<()>,
    running: Option<Running>,
    out: usize,
}

struct Running {
    orders: Sender<WriteOrder>,
    summed: HeapCons<WriteOrder>,
}

impl Summer {
    /// `wake` is rung when an image is summed; the thread holds a clone of `alive`.
    pub(crate) fn new(memory: Arc<dyn ImageMemory>, wake: Arc<Wake>, alive: Sender<()>) -> Self {
        Self { memory, wake, alive, running: None, out: 0 }
    }

    /// Takes an order whose image is to be summed, to be had back from [`take`](Self::take). Gives it
    /// back at once, summed, when there can be no thread.
    pub(crate) fn sum(&mut self, order: WriteOrder) -> Option<WriteOrder> {
        if self.running.is_none() {
            self.running = self.start();
        }
        let sent = self.running.as_ref().is_some_and(|running| running.orders.send(order).is_ok());
        if sent {
            self.out += 1;
            return None;
        }
        Some(summed(&*self.memory, order))
    }

    fn start(&self) -> Option<Running> {
        let (orders, to_sum) = channel();
        // Room for every write that the tier lets out.
        let (done, summed) = HeapRb::new(WRITE_QUEUE).split();
        let (memory, wake) = (self.memory.clone(), self.wake.clone());
        spawn("ssd-sum", &self.alive, move || work(&*memory, &wake, &to_sum, done)).ok()?;
        Some(Running { orders, summed })
    }

    /// An order whose image is summed.
    pub(crate) fn take(&mut self) -> Option<WriteOrder> {
        let order = self.running.as_mut()?.summed.try_pop()?;
        self.out -= 1;
        Some(order)
    }

    /// Whether [`take`](Self::take) has something.
    pub(crate) fn has_summed(&self) -> bool {
        self.running.as_ref().is_some_and(|running| !running.summed.is_empty())
    }

    /// Whether it has nothing, summed or not.
    pub(crate) fn is_idle(&self) -> bool {
        self.out == 0
    }
}

/// Until the writer is gone.
fn work(
    memory: &dyn ImageMemory,
    wake: &Wake,
    orders: &Receiver<WriteOrder>,
    mut done: HeapProd<WriteOrder>,
) {
    while let Ok(order) = orders.recv() {
        let pushed = done.try_push(summed(memory, order));
        debug_assert!(pushed.is_ok(), "more writes out than the tier lets out");
        wake.ring();
    }
}

/// The order with the checksum of its image. One that has none in memory is refused by the writer.
fn summed(memory: &dyn ImageMemory, mut order: WriteOrder) -> WriteOrder {
    let image = Extent { bytes: order.image.image_bytes, ..order.extent };
    let checksum = memory.slice(image).map(|image| image.checksum());
    order.image.checksum = Some(checksum.unwrap_or_default());
    order
}
