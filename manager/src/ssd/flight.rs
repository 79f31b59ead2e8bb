//! Pages in flight: which chunks of a page are still out, and how the page ends.
//!
//! A page ends exactly once, when it is sealed (no more chunks will come) and its last chunk is
//! back: until then its buffers are the kernel's, whatever became of the other chunks.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::counters::{DeviceCounters, count};
use super::format::Block;
use super::io::{Chunk, Done, Engine, Member, Part, Transfer, Verdict};
use super::pulse::Pulse;
use crate::core::{Extent, IoFault};

/// Blocks that are kept for the next footers.
const SPARE_BLOCKS_MAX: usize = 256;

/// The pages of one worker. `C` is what was ordered for a page.
pub(crate) struct Flight<C> {
    engine: Box<dyn Engine>,
    transfer: Transfer,
    counters: Arc<DeviceCounters>,
    pages: Vec<Option<Page<C>>>,
    free: Vec<u32>,
    retry: VecDeque<Chunk>,
    /// What did not go through at once is not sent again.
    gives_up: bool,
    done: Vec<Done>,
    ended: VecDeque<(C, Option<IoFault>)>,
    image_bytes: u64,
    sent: u64,
    /// When the chunks that are out went out, by their number.
    out: Vec<Option<u64>>,
    pulse: Option<Arc<Pulse>>,
    spare_vectors: Vec<(Vec<Part>, Vec<Member>)>,
    spare_blocks: Vec<Box<Block>>,
}

struct Page<C> {
    command: C,
    chunks_out: u32,
    sealed: bool,
    fault: Option<IoFault>,
}

impl<C> Flight<C> {
    pub(crate) fn new(
        engine: Box<dyn Engine>,
        transfer: Transfer,
        counters: Arc<DeviceCounters>,
    ) -> Self {
        Self {
            engine,
            transfer,
            counters,
            pages: Vec::new(),
            free: Vec::new(),
            retry: VecDeque::new(),
            gives_up: false,
            done: Vec::new(),
            ended: VecDeque::new(),
            image_bytes: 0,
            sent: 0,
            out: Vec::new(),
            pulse: None,
            spare_vectors: Vec::new(),
            spare_blocks: Vec::new(),
        }
    }

    /// Tells `pulse` how long its chunks are out, and wakes up when that is too long.
    pub(crate) fn with_pulse(mut self, pulse: Arc<Pulse>) -> Self {
        self.out = vec![None; self.engine.depth()];
        self.pulse = Some(pulse);
        self
    }

    /// True when the kernel holds nothing and nothing waits to be sent again.
    pub(crate) fn is_idle(&self) -> bool {
        self.engine.in_flight() == 0 && self.retry.is_empty()
    }

    /// Image bytes in the kernel's hands.
    pub(crate) fn image_bytes(&self) -> u64 {
        self.image_bytes
    }

    /// True when a chunk with `image_bytes` may be sent now: within `limit_bytes`, or alone.
    pub(crate) fn has_room(&self, image_bytes: u32, limit_bytes: u64) -> bool {
        self.retry.is_empty()
            && self.engine.in_flight() < self.engine.depth()
            && (self.engine.in_flight() == 0
                || self.image_bytes + u64::from(image_bytes) <= limit_bytes)
    }

    /// Chunks in the kernel's hands.
    pub(crate) fn chunks_out(&self) -> u64 {
        self.engine.in_flight() as u64
    }

    /// Chunks that were sent since this was last asked.
    pub(crate) fn take_sent(&mut self) -> u64 {
        std::mem::take(&mut self.sent)
    }

    /// What was ordered for a page.
    pub(crate) fn command_mut(&mut self, page: u32) -> Option<&mut C> {
        self.page_mut(page).map(|page| &mut page.command)
    }

    /// A page begins; returns its number.
    pub(crate) fn begin(&mut self, command: C) -> u32 {
        let page = Page { command, chunks_out: 0, sealed: false, fault: None };
        match self.free.pop() {
            Some(number) => {
                if let Some(place) = self.pages.get_mut(number as usize) {
                    *place = Some(page);
                }
                number
            }
            None => {
                self.pages.push(Some(page));
                self.pages.len() as u32 - 1
            }
        }
    }

    /// True when a chunk of the page failed: the rest need not be sent.
    pub(crate) fn has_failed(&self, page: u32) -> bool {
        self.page(page).is_some_and(|page| page.fault.is_some())
    }

    /// The page will end with `fault`, unless it already has one.
    pub(crate) fn fail(&mut self, page: u32, fault: IoFault) {
        if let Some(open) = self.page_mut(page) {
            open.fault = open.fault.or(Some(fault));
        }
    }

    /// Whether what does not go through at once is sent again, or ends with [`IoFault::Off`].
    pub(crate) fn set_gives_up(&mut self, gives_up: bool) {
        self.gives_up = gives_up;
        if gives_up {
            while let Some(chunk) = self.retry.pop_front() {
                self.chunk_over(chunk, Some(IoFault::Off));
            }
        }
    }

    /// No more chunks of this page will come.
    pub(crate) fn seal(&mut self, page: u32) {
        if let Some(open) = self.page_mut(page) {
            open.sealed = true;
        }
        self.end_if_over(page);
    }

    /// An empty chunk at `offset`.
    pub(crate) fn chunk(&mut self, offset: u64) -> Chunk {
        let (parts, members) = self.spare_vectors.pop().unwrap_or_default();
        Chunk::new(self.transfer, offset, parts, members)
    }

    /// A block with any contents.
    pub(crate) fn block(&mut self) -> Box<Block> {
        self.spare_blocks.pop().unwrap_or_else(|| Box::new(Block::ZERO))
    }

    /// Sends a chunk. The caller has asked [`has_room`](Self::has_room).
    pub(crate) fn send(&mut self, chunk: Chunk) {
        for index in 0..chunk.members.len() {
            let page = chunk.members[index].page;
            if let Some(open) = self.page_mut(page) {
                open.chunks_out += 1;
            }
        }
        if chunk.members.len() > 1 {
            let pages = chunk.members.len() as u64;
            self.counters.coalesced_pages.fetch_add(pages, Ordering::Relaxed);
        }
        self.submit(chunk);
    }

    /// Sleeps until something is back or the worker is woken, then settles it.
    pub(crate) fn wait(&mut self, ready: &mut dyn FnMut() -> bool) {
        self.wait_at_most(ready, None);
    }

    /// [`wait`](Self::wait), but not longer than `timeout`.
    pub(crate) fn wait_at_most(
        &mut self,
        ready: &mut dyn FnMut() -> bool,
        timeout: Option<Duration>,
    ) {
        let mut done = std::mem::take(&mut self.done);
        let until_hung = self.pulse.as_ref().and_then(|pulse| pulse.until_hung());
        let timeout = match (timeout, until_hung) {
            (Some(one), Some(other)) => Some(one.min(other)),
            (one, other) => one.or(other),
        };
        self.engine.wait(ready, timeout, &mut done);
        self.take_times(&done);
        for Done { chunk, result } in done.drain(..) {
            self.image_bytes -= u64::from(chunk.image_bytes());
            self.settle(chunk, result);
        }
        self.done = done;
        while self.engine.in_flight() < self.engine.depth() {
            let Some(chunk) = self.retry.pop_front() else { break };
            self.submit(chunk);
        }
    }

    /// The next page that ended, with its fault.
    pub(crate) fn take_ended(&mut self) -> Option<(C, Option<IoFault>)> {
        self.ended.pop_front()
    }

    /// Ends a page that was never begun.
    pub(crate) fn refuse(&mut self, command: C, fault: IoFault) {
        self.ended.push_back((command, Some(fault)));
    }

    fn submit(&mut self, mut chunk: Chunk) {
        let image_bytes = u64::from(chunk.image_bytes());
        let alone = self.engine.in_flight() == 0;
        let free = self.out.iter().position(Option::is_none);
        chunk.number = free.unwrap_or(0);
        // Only what the kernel has is out.
        if let Err(chunk) = self.engine.submit(chunk) {
            self.retry.push_back(chunk);
            return;
        }
        self.image_bytes += image_bytes;
        self.sent += 1;
        if let (Some(pulse), Some(number)) = (&self.pulse, free) {
            let now_ns = pulse.now_ns();
            if alone {
                pulse.set_oldest(Some(now_ns));
            }
            self.out[number] = Some(now_ns);
        }
    }

    fn take_times(&mut self, done: &[Done]) {
        let Some(pulse) = self.pulse.as_ref().filter(|_| !done.is_empty()) else { return };
        let now_ns = pulse.now_ns();
        for Done { chunk, .. } in done {
            if let Some(sent_ns) = self.out.get_mut(chunk.number).and_then(Option::take) {
                pulse.add(now_ns.saturating_sub(sent_ns), now_ns);
            }
        }
        pulse.set_oldest(self.out.iter().flatten().min().copied());
    }

    fn settle(&mut self, mut chunk: Chunk, result: i32) {
        match chunk.attempts.judge(chunk.bytes(), result) {
            Verdict::Good => self.chunk_over(chunk, None),
            Verdict::Again => {
                let counters = &self.counters;
                count(if result < 0 {
                    &counters.interrupted_transfers
                } else {
                    &counters.short_transfers
                });
                self.send_again([chunk]);
            }
            Verdict::Failed(fault) => {
                if fault == IoFault::Short {
                    count(&self.counters.short_transfers);
                }
                if chunk.members.len() > 1 {
                    // Any of them may be to blame, or none.
                    self.send_again(chunk.split());
                } else {
                    self.chunk_over(chunk, Some(fault));
                }
            }
        }
    }

    fn send_again(&mut self, chunks: impl IntoIterator<Item = Chunk>) {
        for chunk in chunks {
            if self.gives_up {
                self.chunk_over(chunk, Some(IoFault::Off));
            } else {
                self.retry.push_back(chunk);
            }
        }
    }

    fn chunk_over(&mut self, mut chunk: Chunk, fault: Option<IoFault>) {
        for part in chunk.parts.drain(..) {
            if let Part::Block(block) = part
                && self.spare_blocks.len() < SPARE_BLOCKS_MAX
            {
                self.spare_blocks.push(block);
            }
        }
        for member in chunk.members.drain(..) {
            if let Some(page) = self.page_mut(member.page) {
                page.chunks_out -= 1;
                page.fault = page.fault.or(fault);
            }
            self.end_if_over(member.page);
        }
        if self.spare_vectors.len() < self.engine.depth() {
            self.spare_vectors.push((chunk.parts, chunk.members));
        }
    }

    fn end_if_over(&mut self, number: u32) {
        let Some(place) = self.pages.get_mut(number as usize) else { return };
        if let Some(Page { command, fault, .. }) =
            place.take_if(|page| page.sealed && page.chunks_out == 0)
        {
            self.free.push(number);
            self.ended.push_back((command, fault));
        }
    }

    fn page(&self, number: u32) -> Option<&Page<C>> {
        self.pages.get(number as usize)?.as_ref()
    }

    fn page_mut(&mut self, number: u32) -> Option<&mut Page<C>> {
        self.pages.get_mut(number as usize)?.as_mut()
    }
}

/// The part of an extent that begins `start` bytes in.
pub(crate) fn part_of(extent: Extent, start: u32, bytes: u32) -> Extent {
    Extent { offset: extent.offset + u64::from(start), bytes, ..extent }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ssd::io::EngineMode;

    /// Takes one chunk at a time.
    #[derive(Default)]
    struct OneAtATime(Option<Chunk>);

    impl Engine for OneAtATime {
        fn mode(&self) -> EngineMode {
            EngineMode::UNREGISTERED
        }

        fn depth(&self) -> usize {
            1
        }

        fn in_flight(&self) -> usize {
            usize::from(self.0.is_some())
        }

        fn submit(&mut self, chunk: Chunk) -> Result<(), Chunk> {
            match self.0 {
                Some(_) => Err(chunk),
                None => {
                    self.0 = Some(chunk);
                    Ok(())
                }
            }
        }

        fn wait(
            &mut self,
            _ready: &mut dyn FnMut() -> bool,
            _timeout: Option<Duration>,
            done: &mut Vec<Done>,
        ) {
            done.extend(self.0.take().map(|chunk| Done { result: chunk.bytes() as i32, chunk }));
        }
    }

    #[test]
    fn a_chunk_that_the_engine_gave_back_is_neither_out_nor_sent() {
        let pulse = Arc::new(Pulse::new());
        let counters = Arc::new(DeviceCounters::default());
        let mut flight = Flight::new(Box::new(OneAtATime::default()), Transfer::Write, counters)
            .with_pulse(pulse.clone());
        for number in 0..3_u64 {
            let page = flight.begin(number);
            let mut chunk = flight.chunk(number << 12);
            chunk.push(page, Part::Block(flight.block()));
            flight.send(chunk);
            flight.seal(page);
        }
        assert_eq!((flight.take_sent(), flight.out.iter().flatten().count()), (1, 1));
        while !flight.is_idle() {
            flight.wait(&mut || false);
        }
        let ends: Vec<_> = std::iter::from_fn(|| flight.take_ended()).collect();
        assert_eq!(ends, [(0, None), (1, None), (2, None)]);
        assert_eq!((flight.take_sent(), flight.image_bytes()), (2, 0));
        assert_eq!((flight.out.iter().flatten().count(), pulse.oldest()), (0, Duration::ZERO));
    }
}
