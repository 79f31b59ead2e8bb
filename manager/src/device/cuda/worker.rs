//! The thread of one GPU: takes commands, waits for their fences, keeps the copy engine busy with
//! bounded batches, and tells their ends.
//!
//! Laws:
//!
//! 1. A command ends when every batch of it has been seen to end: the GPU stores the number of a
//!    batch behind it. No time that passes proves anything.
//! 2. Fences are asked, never put on a stream: an event of a killed engine never passes, and a stream
//!    that waits for one never goes on, nor does any call that waits for that stream.
//! 3. A stream has few batches in flight, and commands take turns, so that a long one does not hold up
//!    a short one.
//! 4. A store to a done word directly follows a copy of the same batch. Behind a copy the copy engine
//!    makes it; alone it takes its turn with the engine's kernels, which is milliseconds. Behind a
//!    kernel it is as late as the kernel was.
//! 5. A stream runs in order, whatever runs: a copy behind a kernel begins at the kernel's end.
#![allow(unsafe_code, reason = "promises the copy engine that memory stays mapped")]

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use orbitkv_shm_protocol::telemetry::CopyMethod;

use super::driver::CudaError;
use super::method::{Choice, Expected, Method, Seen, Work};
use super::plan::{Page, Plan, Rect};
use super::table::{RECTS, Table};
use crate::core::{Direction, Extent, Nanos};
use crate::device::lane::{Queues, State};
use crate::device::{CopyCommand, CopyEnd, CopyError, DeviceMemory, Moved};
use crate::image::ImageMemory;

/// Streams of a GPU: each direction has one for short commands and one for long ones, which share
/// its copy engine copy by copy.
pub(super) const STREAMS: usize = 4;
/// Commands up to this many bytes go on the stream for short ones.
const SHORT_BYTES_MAX: u64 = 2 << 20;
/// Bytes of a batch, about: 300 µs on the bus, which is what a copy on another stream may have to
/// wait for. An order costs the copy engine 2.6 µs, a mark 2 µs.
const BATCH_BYTES: u64 = 16 << 20;
/// A batch that lacks no more than this is not filled up with the beginning of what comes next.
const BATCH_REST: u64 = BATCH_BYTES / 8;
/// Most bytes of the last batch of a command: a small rest goes along, without a launch and a mark of
/// its own.
const LAST_BATCH_BYTES_MAX: u64 = BATCH_BYTES / 4 * 5;
/// Batches in flight on a stream: one that runs and one behind it. Short ones are smaller.
const BATCHES_MAX: [usize; 2] = [16, 2];
/// Fewer rectangles are ordered one by one.
const BATCHED_MIN: usize = 4;
/// Pages whose rectangles are worked out at once: as many as a batch takes, so that a rectangle across
/// pages is not cut for nothing. One of each of the fewest fills a launch.
const CHUNK_PAGES: [usize; 2] = [RECTS, 1024];
/// A restore's single row below this is cut into two: as one it would not go through the copy engine
/// but wait for the engine's kernels.
const ROW_BYTES_MIN: u64 = 64 << 10;
/// No batch ended for so long: the streams are asked whether they live.
const DOUBT: Duration = Duration::from_millis(20);
/// Pause between two looks at whether the engines behind waiting fences live.
const PEER_PAUSE: Duration = Duration::from_millis(5);
/// How long the thread spins after the last thing that happened while anything is in flight, on top of
/// twice the time that the batches in flight should take: a thread that sleeps sees an end 50 to 150 µs
/// late.
const SPIN: Duration = Duration::from_micros(200);
/// Pause between two looks after that.
const PAUSE: Duration = Duration::from_micros(50);

/// What orders copies: the streams of a GPU, or their twin.
pub(super) trait CopyEngine {
    /// Orders a copy.
    ///
    /// # Safety
    /// Both sides of `rect` are mapped and belong to this copy until a later mark of the stream is
    /// reached, or the stream is idle or dead.
    unsafe fn copy(
        &mut self,
        stream: usize,
        direction: Direction,
        rect: &Rect,
    ) -> Result<(), CudaError>;

    /// Orders copies of [`is_batched`](Rect::is_batched) rectangles, in no order among them, at less cost
    /// for each than [`copy`](Self::copy).
    ///
    /// # Safety
    /// As [`copy`](Self::copy), for each rectangle.
    unsafe fn copy_batch(
        &mut self,
        stream: usize,
        direction: Direction,
        rects: &[Rect],
    ) -> Result<(), CudaError>;

    /// Orders the copies of a table, which has at least one, in no order among them.
    ///
    /// # Safety
    /// As [`copy`](Self::copy), for each rectangle.
    unsafe fn copy_rows(&mut self, stream: usize, table: &Table) -> Result<(), CudaError>;

    /// Orders a store of `value` at `address` behind everything before it.
    ///
    /// # Safety
    /// `address` is an aligned word that stays mapped until a later mark is reached, or the stream is
    /// idle or dead.
    unsafe fn store(&mut self, stream: usize, address: u64, value: u32) -> Result<(), CudaError>;

    /// Orders that `sequence` is [reached](Self::reached) behind everything before it.
    fn mark(&mut self, stream: usize, sequence: u32) -> Result<(), CudaError>;

    /// The last mark that was reached.
    fn reached(&self, stream: usize) -> u32;

    /// Whether everything ordered is done.
    ///
    /// # Errors
    /// The stream is dead: nothing of it runs any more.
    fn is_idle(&self, stream: usize) -> Result<bool, CudaError>;

    /// Longest distance of two rows, in bytes.
    fn pitch_max(&self) -> u64;

    /// Chooses between [`copy`](Self::copy) and [`copy_rows`](Self::copy_rows).
    fn choice(&self) -> Choice;
}

/// A command on its way.
struct Running {
    command: CopyCommand,
    plan: Plan,
    pages: Vec<Page>,
    stream: usize,
    /// The layer whose rectangles come next, and its first page that has none yet.
    layer: usize,
    next_page: usize,
    rects: VecDeque<Rect>,
    /// Those that go in one call.
    batch: Vec<Rect>,
    chunk_pages: usize,
    /// Bytes that are not ordered yet.
    bytes_left: u64,
    /// Batches in flight.
    batches: u32,
    /// Nothing more is to be ordered.
    ordered: bool,
    pages_done: u32,
    error: Option<CopyError>,
    /// When its last done word was first seen.
    seen_ns: Nanos,
    moved: Moved,
}

/// What is in flight on a stream, in order.
struct Batch {
    sequence: u32,
    command: usize,
    /// Pages of the command that are in place with it.
    pages_done: u32,
    ordered_at: Instant,
    /// What it should take.
    time: Duration,
    /// What can still be learned from it.
    expected: Option<Expected>,
    /// The last batch of the direction's other stream when it was ordered, if that had ended.
    beside: Option<u32>,
}

#[derive(Default)]
struct Stream {
    /// Commands with more to order, in turn.
    waiting: VecDeque<usize>,
    in_flight: VecDeque<Batch>,
    sequence: u32,
    /// When the last batch was seen to end.
    ended_at: Option<Instant>,
}

impl Stream {
    /// Number of the last batch, if none is in flight.
    fn all_ended(&self) -> Option<u32> {
        self.in_flight.is_empty().then_some(self.sequence)
    }
}

/// The other stream of the same direction.
fn other(stream: usize) -> usize {
    stream ^ 1
}

/// State of the thread.
pub(super) struct Worker {
    engine: Box<dyn CopyEngine>,
    choice: Choice,
    table: Table,
    images: Arc<dyn ImageMemory>,
    gpu: u32,
    queues: Queues,
    /// Places of commands; free ones are named in `free`.
    commands: Vec<Option<Running>>,
    free: Vec<usize>,
    /// Commands whose fence has not passed.
    fenced: Vec<usize>,
    streams: [Stream; STREAMS],
    /// The GPU does nothing more.
    lost: Option<CopyError>,
    peers_looked_at: Instant,
    marks_looked_at: Instant,
    progress_at: Instant,
}

impl Worker {
    pub(super) fn new(
        engine: Box<dyn CopyEngine>,
        images: Arc<dyn ImageMemory>,
        gpu: u32,
        queues: Queues,
    ) -> Self {
        let now = Instant::now();
        Self {
            choice: engine.choice(),
            engine,
            table: Table::new(),
            images,
            gpu,
            queues,
            commands: Vec::new(),
            free: Vec::new(),
            fenced: Vec::new(),
            streams: Default::default(),
            lost: None,
            peers_looked_at: now,
            marks_looked_at: now,
            progress_at: now,
        }
    }

    /// Works until it is told to stop. What the copy engine has is waited for in any case.
    pub(super) fn run(mut self, mut idle: impl FnMut(&Queues)) {
        loop {
            // Read before the queue: what was submitted before a stop is then seen below.
            let state = self.queues.state();
            if state == State::Abandon {
                self.abandon();
            }
            let mut progress = self.take();
            progress |= self.retire() | self.bury();
            progress |= self.look_at_fences();
            progress |= self.order();
            if progress {
                self.progress_at = Instant::now();
                continue;
            }
            if self.commands.len() == self.free.len() {
                match state {
                    State::Run => idle(&self.queues),
                    State::Drain | State::Abandon => return,
                }
                self.progress_at = Instant::now();
                continue;
            }
            self.wait();
        }
    }

    /// Takes every new command.
    fn take(&mut self) -> bool {
        let mut taken = false;
        while let Some(command) = self.queues.take() {
            taken = true;
            match self.prepare(command) {
                Ok(running) => {
                    let fenced = running.command.fence.is_some();
                    let (stream, at) = (running.stream, self.place(running));
                    if fenced {
                        self.fenced.push(at);
                    } else {
                        self.streams[stream].waiting.push_back(at);
                    }
                }
                Err((command, error)) => self.queues.end(end(command, 0, Some(error))),
            }
        }
        taken
    }

    fn place(&mut self, running: Running) -> usize {
        match self.free.pop() {
            Some(at) => {
                self.commands[at] = Some(running);
                at
            }
            None => {
                self.commands.push(Some(running));
                self.commands.len() - 1
            }
        }
    }

    /// Checks what the caller promised. A broken promise must not become a stray copy.
    #[expect(clippy::result_large_err, reason = "a refused command comes back whole")]
    fn prepare(&self, mut command: CopyCommand) -> Result<Running, (CopyCommand, CopyError)> {
        command.checksums.clear();
        if let Some(error) = self.lost {
            return Err((command, error));
        }
        let layout = command.region.layout();
        if command.image_bytes != layout.image_bytes() {
            return Err((command, CopyError::BadCommand { page: 0 }));
        }
        let mut pages = Vec::with_capacity(command.pages.len());
        for copy in &command.pages {
            let image = Extent { bytes: command.image_bytes, ..copy.extent };
            let slice = self.images.slice(image).filter(|_| {
                copy.device_page < layout.pages() && copy.extent.bytes >= command.image_bytes
            });
            let Some(slice) = slice else {
                let page = pages.len() as u32;
                return Err((command, CopyError::BadCommand { page }));
            };
            let host = slice.as_ptr().expose_provenance() as u64;
            pages.push(Page { device_page: copy.device_page, host });
        }
        let by_layer = command.done.as_ref().is_some_and(|done| done.count > 1);
        let region = &command.region;
        let address = |memory| match region.memory(memory)? {
            DeviceMemory::Cuda(memory) => Some(memory.address()),
            DeviceMemory::Host(_) => None,
        };
        let plan = Plan::new(region, by_layer, self.engine.pitch_max(), address);
        let Some(plan) = plan else {
            return Err((command, CopyError::BadCommand { page: 0 }));
        };
        let bytes = u64::from(command.image_bytes) * pages.len() as u64;
        let long = usize::from(bytes > SHORT_BYTES_MAX);
        let stream = command.direction as usize * 2 + long;
        let batch_pages = LAST_BATCH_BYTES_MAX / u64::from(command.image_bytes.max(1));
        let [least, most] = CHUNK_PAGES;
        Ok(Running {
            command,
            plan,
            pages,
            stream,
            layer: 0,
            next_page: 0,
            rects: VecDeque::new(),
            batch: Vec::new(),
            chunk_pages: (batch_pages as usize).clamp(least, most),
            bytes_left: bytes,
            batches: 0,
            ordered: false,
            pages_done: 0,
            error: None,
            seen_ns: 0,
            moved: Moved::default(),
        })
    }

    /// Lets commands go on whose fence has passed, and ends those whose fence never will.
    fn look_at_fences(&mut self) -> bool {
        if self.fenced.is_empty() {
            return false;
        }
        let now = Instant::now();
        let look_at_peers = now.duration_since(self.peers_looked_at) >= PEER_PAUSE;
        if look_at_peers {
            self.peers_looked_at = now;
        }
        let mut progress = false;
        let mut at = 0;
        while let Some(&place) = self.fenced.get(at) {
            let verdict = match &mut self.commands[place] {
                None => Ok(true),
                Some(running) => {
                    let lost = self.lost.map_or(Ok(()), Err);
                    let look = || running.command.fence.as_ref().map_or(Ok(true), |f| f.look());
                    let passed = lost.and_then(|()| look());
                    match passed {
                        Ok(false) if look_at_peers => peer_lives(&running.command).map(|()| false),
                        passed => passed,
                    }
                }
            };
            if verdict == Ok(false) {
                at += 1;
                continue;
            }
            progress = true;
            self.fenced.swap_remove(at);
            let verdict = verdict.map_err(|error| self.cause(place, error));
            let Some(running) = &mut self.commands[place] else { continue };
            match verdict {
                Ok(_) => {
                    running.command.fence = None;
                    self.streams[running.stream].waiting.push_back(place);
                }
                Err(error) => {
                    running.error = Some(error);
                    running.ordered = true;
                    self.finish(place);
                }
            }
        }
        progress
    }

    /// Why a fence cannot be asked: a context that is lost answers so for every event.
    fn cause(&mut self, place: usize, error: CopyError) -> CopyError {
        let stream = self.commands[place].as_ref().map(|running| running.stream);
        if let (CopyError::BrokenFence { .. }, Some(stream), None) = (error, stream, self.lost)
            && let Err(error) = self.engine.is_idle(stream)
        {
            self.lose(error);
        }
        match error {
            CopyError::BrokenFence { .. } => self.lost.unwrap_or(error),
            error => error,
        }
    }

    /// Fills every stream from its commands, a batch each in turn.
    fn order(&mut self) -> bool {
        let mut progress = false;
        for stream in 0..STREAMS {
            while self.streams[stream].in_flight.len() < BATCHES_MAX[stream % 2] {
                let Some(place) = self.streams[stream].waiting.pop_front() else { break };
                progress = true;
                let error = self.lost.or_else(|| self.order_batch(stream, place).err());
                let Some(running) = &mut self.commands[place] else { continue };
                if let Some(error) = error {
                    running.error = running.error.or(Some(error));
                    running.ordered = true;
                }
                if running.ordered {
                    self.finish(place);
                } else {
                    self.streams[stream].waiting.push_back(place);
                }
            }
        }
        progress
    }

    /// Orders the next batch of a command.
    fn order_batch(&mut self, stream: usize, place: usize) -> Result<(), CopyError> {
        let Some(running) = &mut self.commands[place] else { return Ok(()) };
        let ordered_at = Instant::now();
        let mut expected = self.choice.begin(ordered_at);
        let choose = |work: &Work| self.choice.method(&mut expected, work);
        let ordered = running.order(self.engine.as_mut(), stream, &mut self.table, choose);
        self.choice.ordered(&expected, ordered.is_err(), ordered_at);
        let beside = self.streams[other(stream)].all_ended();
        // What was ordered before a refusal is in flight as well. Without a mark it is over when its
        // stream is dead or idle: see `bury`.
        let lane = &mut self.streams[stream];
        lane.sequence = lane.sequence.wrapping_add(1);
        let marked = self.engine.mark(stream, lane.sequence);
        running.batches += 1;
        lane.in_flight.push_back(Batch {
            sequence: lane.sequence,
            command: place,
            pages_done: running.pages_ordered(),
            ordered_at,
            time: expected.time(),
            expected: ordered.is_ok().then_some(expected),
            beside,
        });
        let Err(error) = ordered.and(marked) else { return Ok(()) };
        let gpu = self.gpu;
        if marked.is_err() || self.engine.is_idle(stream).is_err() {
            self.lose(error);
            return Err(CopyError::GpuLost { gpu, code: error.code() });
        }
        tracing::warn!(gpu, %error, "the driver refused a copy");
        Err(CopyError::GpuRefused { gpu, code: error.code() })
    }

    /// Takes note of batches that have ended.
    fn retire(&mut self) -> bool {
        let now = Instant::now();
        let mut progress = false;
        for stream in 0..STREAMS {
            if self.streams[stream].in_flight.is_empty() {
                continue;
            }
            self.look_at_done_word(stream);
            let reached = self.engine.reached(stream);
            let ended = |batch: &Batch| {
                // Far fewer than half of all numbers are in flight.
                (reached.wrapping_sub(batch.sequence) as i32) >= 0
            };
            while let Some(ended) = self.streams[stream].in_flight.front().map(ended) {
                self.learn(stream, ended, now);
                if !ended {
                    break;
                }
                let Some(batch) = self.streams[stream].in_flight.pop_front() else { break };
                self.streams[stream].ended_at = Some(now);
                self.batch_ended(batch.command, Some(batch.pages_done));
                progress = true;
            }
        }
        self.marks_looked_at = now;
        progress
    }

    /// Takes note of when the first command of a stream has its last byte in place: what an engine sees
    /// that polls, and before the mark behind it.
    fn look_at_done_word(&mut self, stream: usize) {
        let Some(batch) = self.streams[stream].in_flight.front() else { return };
        let Some(running) = &mut self.commands[batch.command] else { return };
        if running.ordered
            && running.seen_ns == 0
            && let Some(done) = &running.command.done
            && done.words.load(done.operation_index, done.count - 1) == done.value
        {
            running.seen_ns = self.queues.now();
        }
    }

    /// Looks at how long the first batch in flight of a stream took, or has been taking.
    fn learn(&mut self, stream: usize, ended: bool, now: Instant) {
        let all_ended = self.streams[other(stream)].all_ended();
        let lane = &mut self.streams[stream];
        let Some(batch) = lane.in_flight.front_mut() else { return };
        let Some(expected) = &batch.expected else { return };
        let began = lane.ended_at.map_or(batch.ordered_at, |at| at.max(batch.ordered_at));
        let until = if ended { self.marks_looked_at } else { now };
        let shared = batch.beside.is_none() || batch.beside != all_ended;
        let seen = Seen { at_least: until.saturating_duration_since(began), ended, shared };
        let pause = self.choice.pause();
        if self.choice.learn(expected, seen, now) {
            batch.expected = None;
        }
        let (gpu, now) = (self.gpu, self.choice.pause());
        if now != pause {
            tracing::debug!(gpu, pause = ?now, "copies of many small rows: by kernel, or orders for a while");
        }
    }

    fn batch_ended(&mut self, place: usize, pages_done: Option<u32>) {
        let Some(running) = &mut self.commands[place] else { return };
        running.batches -= 1;
        running.pages_done = pages_done.unwrap_or(running.pages_done);
        self.finish(place);
    }

    /// Ends a command of which nothing is left to order or in flight.
    fn finish(&mut self, place: usize) {
        let over = |running: &Running| running.ordered && running.batches == 0;
        if !self.commands[place].as_ref().is_some_and(over) {
            return;
        }
        let Some(running) = self.commands[place].take() else { return };
        self.free.push(place);
        let (ended_ns, moved) = (running.seen_ns, running.moved);
        let end = end(running.command, running.pages_done, running.error);
        self.queues.end(CopyEnd { ended_ns, moved, ..end });
    }

    /// The GPU failed for good: nothing more is ordered.
    fn lose(&mut self, error: CudaError) {
        let gpu = self.gpu;
        tracing::error!(gpu, %error, "the gpu is lost to this process: restart the Manager to use it again");
        self.lost = Some(CopyError::GpuLost { gpu, code: error.code() });
    }

    /// Of a GPU that is lost: everything in flight is over once its stream is dead or idle.
    fn bury(&mut self) -> bool {
        let Some(lost) = self.lost else { return false };
        let mut progress = false;
        for stream in 0..STREAMS {
            if self.engine.is_idle(stream) == Ok(false) {
                continue;
            }
            while let Some(batch) = self.streams[stream].in_flight.pop_front() {
                progress = true;
                if let Some(running) = &mut self.commands[batch.command] {
                    running.error = running.error.or(Some(lost));
                    running.ordered = true;
                }
                self.batch_ended(batch.command, None);
            }
        }
        progress
    }

    /// Nothing more is to be ordered; what is in flight is waited for.
    fn abandon(&mut self) {
        let gpu = self.gpu;
        self.lost.get_or_insert(CopyError::GpuLost { gpu, code: 0 });
    }

    /// Something is in flight, or waits for a fence, and nothing happened.
    fn wait(&mut self) {
        let quiet = self.progress_at.elapsed();
        if quiet >= DOUBT {
            for stream in 0..STREAMS {
                if self.lost.is_none()
                    && !self.streams[stream].in_flight.is_empty()
                    && let Err(error) = self.engine.is_idle(stream)
                {
                    self.lose(error);
                }
            }
        }
        let in_flight = self.streams.iter().filter_map(|stream| stream.in_flight.front());
        let time = in_flight.map(|batch| batch.time).max().unwrap_or_default();
        if quiet < SPIN + 2 * time {
            std::hint::spin_loop();
        } else {
            // A submit wakes it.
            std::thread::park_timeout(PAUSE);
        }
    }
}

impl Running {
    /// Orders rectangles and the done words behind them, about a batch.
    fn order(
        &mut self,
        engine: &mut dyn CopyEngine,
        stream: usize,
        table: &mut Table,
        mut choose: impl FnMut(&Work) -> Method,
    ) -> Result<(), CudaError> {
        let last = self.bytes_left <= LAST_BATCH_BYTES_MAX;
        let mut left = if last { self.bytes_left + BATCH_REST + 1 } else { BATCH_BYTES };
        while left > BATCH_REST && !self.ordered {
            if self.rects.is_empty() {
                self.next_chunk();
            }
            if !self.rects.is_empty() {
                let work = self.fill(table, left);
                let bytes = match choose(&work) {
                    Method::Kernel if work.rects > 0 => {
                        // SAFETY: as in `copy_each`.
                        unsafe { engine.copy_rows(stream, table) }?;
                        self.take(work.bytes());
                        self.moved.add(CopyMethod::Kernel, 1, work.bytes());
                        work.bytes()
                    }
                    _ => self.copy_each(engine, stream, work.rects.max(1), left)?,
                };
                left = left.saturating_sub(bytes);
            }
            if self.rects.is_empty() && self.next_page == self.pages.len() {
                self.layer_ordered(engine, stream)?;
            }
        }
        Ok(())
    }

    /// Fills the table with the next rectangles, about `left` bytes of them.
    fn fill(&self, table: &mut Table, left: u64) -> Work {
        table.clear(self.command.direction);
        let mut work = Work::default();
        for rect in &self.rects {
            let Some(left) = left.checked_sub(work.bytes()).filter(|left| *left > 0) else { break };
            let (head, _) = rect.split_at(left);
            if !table.push(&head) {
                break;
            }
            work.add(&head);
        }
        work
    }

    /// Orders the next `rects` rectangles one by one, about `left` bytes of them.
    fn copy_each(
        &mut self,
        engine: &mut dyn CopyEngine,
        stream: usize,
        rects: u64,
        left: u64,
    ) -> Result<u64, CudaError> {
        let mut bytes = 0;
        for _ in 0..rects {
            bytes += self.copy_batch(engine, stream, left.saturating_sub(bytes))?;
            let Some(rect) = self.rects.front() else { break };
            let Some(left) = left.checked_sub(bytes).filter(|left| *left > 0) else { break };
            let (head, _) = rect.split_at(left);
            let copy = through_copy_engine(head, self.command.direction);
            // SAFETY: `prepare` checked that every image lies in the pool and every run in its
            // memory; the command, which the owner of both gave away with them, is kept until
            // the batch is seen to end or the stream is dead.
            unsafe { engine.copy(stream, self.command.direction, &copy) }?;
            // Only now: what was refused counts as left.
            self.take(head.bytes());
            let method = if head.rows > 1 { CopyMethod::Strided } else { CopyMethod::Engine };
            self.moved.add(method, 1, head.bytes());
            bytes += head.bytes();
        }
        Ok(bytes)
    }

    /// Orders the next rectangles in one call while they are single long rows, about `left` bytes of
    /// them. The last stays for a copy of its own, which a store may follow.
    fn copy_batch(
        &mut self,
        engine: &mut dyn CopyEngine,
        stream: usize,
        left: u64,
    ) -> Result<u64, CudaError> {
        let mut bytes = 0;
        self.batch.clear();
        for rect in &self.rects {
            let Some(left) = left.checked_sub(bytes).filter(|left| *left > 0) else { break };
            let (head, _) = rect.split_at(left);
            if !head.is_batched() {
                break;
            }
            bytes += head.bytes();
            self.batch.push(head);
        }
        let last = self.batch.pop().map_or(0, |last| last.bytes());
        if self.batch.len() < BATCHED_MIN {
            return Ok(0);
        }
        let bytes = bytes - last;
        // SAFETY: as in `copy_each`.
        unsafe { engine.copy_batch(stream, self.command.direction, &self.batch) }?;
        self.take(bytes);
        self.moved.add(CopyMethod::Batch, self.batch.len() as u64, bytes);
        Ok(bytes)
    }

    /// So many of the next bytes are ordered. They end where `split_at` cut, which cuts there again.
    fn take(&mut self, mut bytes: u64) {
        self.bytes_left = self.bytes_left.saturating_sub(bytes);
        while let Some(rect) = self.rects.front_mut().filter(|_| bytes > 0) {
            let (head, tail) = rect.split_at(bytes);
            bytes = bytes.saturating_sub(head.bytes());
            match tail {
                Some(tail) => *rect = tail,
                None => drop(self.rects.pop_front()),
            }
        }
    }

    fn next_chunk(&mut self) {
        let last = self.pages.len().min(self.next_page + self.chunk_pages);
        self.plan.rects(self.layer, &self.pages[self.next_page..last], &mut self.rects);
        self.next_page = last;
    }

    /// Every byte of a layer is ordered: its word comes behind.
    fn layer_ordered(
        &mut self,
        engine: &mut dyn CopyEngine,
        stream: usize,
    ) -> Result<(), CudaError> {
        let layer = self.layer as u32;
        self.layer += 1;
        self.next_page = 0;
        self.ordered = self.layer >= self.plan.layers();
        let Some(done) = &self.command.done else { return Ok(()) };
        let words = if self.ordered { layer..done.count } else { layer..layer + 1 };
        let (start, _) = done.words.region();
        for word in words {
            let offset = done.words.region_offset(done.operation_index, word);
            let address = start.expose_provenance() as u64 + offset as u64;
            // SAFETY: a word of the session's done words, registered with the driver for as long as
            // the memory of the region is imported, which the command keeps alive.
            unsafe { engine.store(stream, address, done.value) }?;
        }
        Ok(())
    }

    /// Pages of which every byte has been ordered.
    fn pages_ordered(&self) -> u32 {
        if self.ordered && self.error.is_none() {
            return self.pages.len() as u32;
        }
        if self.layer + 1 < self.plan.layers() {
            return 0;
        }
        // The pages of the chunk under way count when it is over.
        let under_way = if self.rects.is_empty() { 0 } else { self.chunk_pages };
        self.next_page.saturating_sub(under_way) as u32
    }
}

/// The same bytes in a form that the copy engine takes.
fn through_copy_engine(rect: Rect, direction: Direction) -> Rect {
    let small = rect.rows == 1 && rect.width < ROW_BYTES_MIN && rect.width.is_multiple_of(2);
    if direction == Direction::Save || !small {
        return rect;
    }
    let width = rect.width / 2;
    Rect { width, rows: 2, device_pitch: width, host_pitch: width, ..rect }
}

/// Serves in place of a worker for a GPU whose streams could not be made.
pub(super) fn refuse_all(
    gpu: u32,
    error: CudaError,
    mut queues: Queues,
    mut idle: impl FnMut(&Queues),
) {
    tracing::error!(gpu, %error, "no streams on a gpu: its copies are refused");
    let error = CopyError::GpuRefused { gpu, code: error.code() };
    loop {
        let state = queues.state();
        while let Some(mut command) = queues.take() {
            command.checksums.clear();
            queues.end(end(command, 0, Some(error)));
        }
        if state != State::Run {
            return;
        }
        idle(&queues);
    }
}

/// Whether the engine whose memory the command names still runs.
fn peer_lives(command: &CopyCommand) -> Result<(), CopyError> {
    match command.region.memory(0) {
        Some(DeviceMemory::Cuda(memory)) => memory.check_peer(),
        _ => Ok(()),
    }
}

fn end(command: CopyCommand, pages_done: u32, error: Option<CopyError>) -> CopyEnd {
    let CopyCommand { ticket, direction, pages, checksums, .. } = command;
    let moved = Moved::default();
    CopyEnd { ticket, direction, pages_done, error, ended_ns: 0, moved, checksums, pages }
}
