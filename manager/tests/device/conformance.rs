//! What every device promises, checked byte by byte against a model that knows only the layout.
//!
//! A device joins by a [`Rig`] and one `conformance!` line.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use orbitkv_manager::core::{CopyFault, CopyPage, Direction, Extent, Ticket};
use orbitkv_manager::device::{
    COMMANDS_MAX, CopyCommand, CopyEnd, CopyError, Device, DeviceEvent, DeviceMemory, DeviceRegion,
    DoneWord, Fence,
};
use orbitkv_manager::pool::{DramPool, HugePages, PoolConfig};
use orbitkv_shm_protocol::bootstrap::message::{RegionSpec, SegmentSpec};
use orbitkv_shm_protocol::doorbell::{ControlBell, ControlRinger};
use orbitkv_shm_protocol::ids::{Epoch, SessionId};
use orbitkv_shm_protocol::layout::Geometry;
use orbitkv_shm_protocol::segment::{self, DoneWords, DoneWordsReader, Expected};
use twox_hash::XxHash3_64;

/// A device and the engines whose memory it reaches.
pub(crate) trait Rig {
    type Device: Device;
    fn start(&self, pool: Arc<DramPool>, notify: ControlRinger) -> Self::Device;
    fn memory(&self, bytes: u64) -> Box<dyn EngineMemory>;
    /// Lets the device store these words.
    fn reach(&self, _words: &DoneWords) {}
}

/// Memory as the engine itself sees it.
pub(crate) trait EngineMemory {
    fn handle(&self) -> Arc<DeviceMemory>;
    fn write(&self, offset: u64, bytes: &[u8]);
    fn read(&self, offset: u64, bytes: usize) -> Vec<u8>;
}

/// Longest wait for an end that must come: a guard against a hang, not a measurement.
const HANG: Duration = Duration::from_secs(120);

/// Device, pool and bell of one test.
pub(crate) struct Bench<D> {
    pub(crate) device: D,
    pub(crate) pool: Arc<DramPool>,
    pub(crate) bell: ControlBell,
    free: u64,
    ticket: u64,
}

impl<D: Device> Bench<D> {
    pub(crate) fn new(start: impl FnOnce(Arc<DramPool>, ControlRinger) -> D) -> Self {
        let config =
            PoolConfig { bytes: 48 << 20, huge_pages: HugePages::Off, prefault_threads: 1 };
        let pool = Arc::new(DramPool::allocate(config).expect("pool"));
        let bell = ControlBell::new();
        let device = start(Arc::clone(&pool), bell.ringer());
        Self { device, pool, bell, free: 0, ticket: 0 }
    }

    /// A new extent; one page of 4 KiB stays unused behind each, unless `packed`.
    pub(crate) fn extent(&mut self, image_bytes: u32, packed: bool) -> Extent {
        let bytes = image_bytes.next_multiple_of(4096);
        let extent = Extent { arena: 0, offset: self.free, bytes };
        self.free += u64::from(bytes) + if packed { 0 } else { 4096 };
        assert!(self.pool.slice(extent).is_some(), "the test's pool is full");
        extent
    }

    pub(crate) fn pages(
        &mut self,
        region: &DeviceRegion,
        device_pages: &[u32],
        packed: bool,
    ) -> Vec<CopyPage> {
        let image_bytes = region.layout().image_bytes();
        let page =
            |&device_page| CopyPage { device_page, extent: self.extent(image_bytes, packed) };
        device_pages.iter().map(page).collect()
    }

    pub(crate) fn command(
        &mut self,
        direction: Direction,
        region: &Arc<DeviceRegion>,
        pages: Vec<CopyPage>,
    ) -> CopyCommand {
        self.ticket += 1;
        CopyCommand {
            ticket: Ticket(self.ticket),
            direction,
            region: Arc::clone(region),
            pages,
            image_bytes: region.layout().image_bytes(),
            fence: None,
            done: None,
            checksums: vec![7, 7],
        }
    }

    pub(crate) fn submit(&mut self, command: CopyCommand) -> Ticket {
        let ticket = command.ticket;
        assert!(self.device.submit(command).is_ok(), "queue full");
        ticket
    }

    /// The next end; sleeps on the bell like the reactor does.
    pub(crate) fn end(&mut self) -> CopyEnd {
        let start = Instant::now();
        loop {
            if let Some(end) = self.device.poll() {
                return end;
            }
            let sleeper = self.bell.sleeper();
            let seen = sleeper.begin();
            let end = self.device.poll();
            if end.is_none() {
                sleeper.wait(seen, Duration::from_millis(100));
            }
            self.bell.sleeper().end();
            if let Some(end) = end {
                return end;
            }
            assert!(start.elapsed() < HANG, "a command never ended");
        }
    }

    pub(crate) fn run(&mut self, command: CopyCommand) -> CopyEnd {
        let ticket = self.submit(command);
        let end = self.end();
        assert_eq!(end.ticket, ticket);
        end
    }

    pub(crate) fn image(&self, extent: Extent, image_bytes: u32) -> Vec<u8> {
        self.pool.slice(Extent { bytes: image_bytes, ..extent }).expect("extent").to_vec()
    }

    pub(crate) fn fill(&self, extent: Extent, bytes: &[u8]) {
        assert!(self.pool.slice(extent).expect("extent").fill_from(bytes));
    }
}

/// Bytes that differ everywhere and by seed.
pub(crate) fn pattern(seed: u64, bytes: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut word = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    let mut pattern: Vec<u8> = (0..bytes.div_ceil(8)).flat_map(|_| word()).collect();
    pattern.truncate(bytes);
    pattern
}

/// A layout over one or more memories, with a model of their bytes.
struct Case {
    spec: RegionSpec,
    memories: Vec<Box<dyn EngineMemory>>,
    model: Vec<Vec<u8>>,
    region: Arc<DeviceRegion>,
}

impl Case {
    fn new(rig: &impl Rig, pages: u32, memory_bytes: &[u64], segments: Vec<SegmentSpec>) -> Self {
        let spec = RegionSpec { scope: 0, pages, segments };
        let memories: Vec<_> = memory_bytes.iter().map(|&bytes| rig.memory(bytes)).collect();
        let model: Vec<_> =
            (0..).zip(memory_bytes).map(|(seed, &bytes)| pattern(seed, bytes as usize)).collect();
        for (memory, bytes) in memories.iter().zip(&model) {
            memory.write(0, bytes);
        }
        let handles: Vec<_> = memories.iter().map(|memory| memory.handle()).collect();
        let image_bytes = spec.segments.iter().map(|segment| segment.length).sum();
        let region = DeviceRegion::new(&spec, image_bytes, |handle| {
            handles.get(handle as usize).map(Arc::clone)
        });
        Self { spec, memories, model, region: Arc::new(region.expect("layout")) }
    }

    /// All layers of a block contiguous: one run a page, and pages adjoin.
    fn contiguous(rig: &impl Rig) -> Self {
        let (pages, bytes) = (24, 9 * 4096);
        let segment = SegmentSpec { memory: 0, offset: 0, stride: bytes, length: bytes, layer: 0 };
        Self::new(rig, pages, &[u64::from(pages) * bytes], vec![segment])
    }

    /// K and V of 36 layers in two memories, small segments, gaps between blocks and layers.
    fn split_kv(rig: &impl Rig) -> Self {
        let (pages, layers, length, gap) = (12u32, 36u64, 512u64, 64u64);
        let layer = u64::from(pages) * (length + gap) + 128;
        let segments = (0..layers).flat_map(|number| {
            let offset = 32 + number * layer;
            [0, 1].map(|memory| SegmentSpec {
                memory,
                offset,
                stride: length + gap,
                length,
                layer: 0,
            })
        });
        Self::new(rig, pages, &[32 + layers * layer; 2], segments.collect())
    }

    /// Odd lengths, image order unlike device order, more parts than one call of anything takes.
    fn scattered(rig: &impl Rig) -> Self {
        let (pages, segments, stride) = (5u32, 1024u64, 40u64);
        let segments = (0..segments).map(|number| {
            let place = (number * 397) % segments;
            let length = 1 + number % 37;
            SegmentSpec { memory: 0, offset: place * 200, stride, length, layer: 0 }
        });
        Self::new(rig, pages, &[1024 * 200 + 7], segments.collect())
    }

    /// Pages longer than a step.
    fn large(rig: &impl Rig) -> Self {
        let length = (5 << 20) + 4096;
        let segment =
            SegmentSpec { memory: 0, offset: 4096, stride: length + 4096, length, layer: 0 };
        Self::new(rig, 3, &[3 * (length + 4096)], vec![segment])
    }

    /// K and V of layers in two memories, in the image all K before all V; nothing is of layer 1.
    fn layered(rig: &impl Rig, pages: u32, length: u64) -> Self {
        const LAYERS: [u32; 4] = [2, 0, 4, 3];
        let layer = u64::from(pages) * length + 512;
        let segments = [0, 1].into_iter().flat_map(|memory| {
            (0..).zip(LAYERS).map(move |(place, number)| SegmentSpec {
                memory,
                offset: 64 + place * layer,
                stride: length,
                length,
                layer: number,
            })
        });
        Self::new(rig, pages, &[64 + 4 * layer; 2], segments.collect())
    }

    fn all(rig: &impl Rig) -> Vec<Self> {
        vec![
            Self::contiguous(rig),
            Self::split_kv(rig),
            Self::scattered(rig),
            Self::large(rig),
            Self::layered(rig, 7, 96),
        ]
    }

    fn image_bytes(&self) -> u32 {
        self.region.layout().image_bytes()
    }

    /// The image of a page, by the definition of a layout.
    fn gather(&self, device_page: u32) -> Vec<u8> {
        let mut image = Vec::new();
        for segment in &self.spec.segments {
            let start = (segment.offset + u64::from(device_page) * segment.stride) as usize;
            let memory = &self.model[segment.memory as usize];
            image.extend_from_slice(&memory[start..start + segment.length as usize]);
        }
        image
    }

    /// Puts an image into the model.
    fn scatter(&mut self, device_page: u32, image: &[u8]) {
        let mut rest = image;
        for segment in &self.spec.segments {
            let start = (segment.offset + u64::from(device_page) * segment.stride) as usize;
            let (bytes, after) = rest.split_at(segment.length as usize);
            self.model[segment.memory as usize][start..start + bytes.len()].copy_from_slice(bytes);
            rest = after;
        }
    }

    /// Every byte of the engine on the pages of one layer.
    fn check_layer(&self, layer: u32) {
        for segment in self.spec.segments.iter().filter(|segment| segment.layer == layer) {
            for page in 0..u64::from(self.spec.pages) {
                let start = segment.offset + page * segment.stride;
                let length = segment.length as usize;
                let model = &self.model[segment.memory as usize][start as usize..][..length];
                let bytes = self.memories[segment.memory as usize].read(start, length);
                assert!(bytes == model, "page {page} of layer {layer} came after its word");
            }
        }
    }

    /// Every byte of the engine, guards and gaps included.
    fn check_engine(&self) {
        for (memory, model) in self.memories.iter().zip(&self.model) {
            let bytes = memory.read(0, model.len());
            let wrong = bytes.iter().zip(model).position(|(byte, model)| byte != model);
            assert_eq!(wrong, None, "first wrong byte of the engine's memory");
        }
    }
}

fn check_save<D: Device>(bench: &Bench<D>, case: &Case, end: &CopyEnd, pages: &[CopyPage]) {
    assert_eq!((end.error, end.pages_done as usize), (None, pages.len()));
    assert_eq!(end.pages, pages);
    // A device either sums every image or none.
    assert!(end.checksums.is_empty() || end.checksums.len() == pages.len());
    for (at, page) in pages.iter().enumerate() {
        let image = bench.image(page.extent, case.image_bytes());
        assert!(image == case.gather(page.device_page), "image of page {}", page.device_page);
        let checksum = end.checksums.get(at);
        assert!(checksum.is_none_or(|&checksum| checksum == XxHash3_64::oneshot(&image)));
    }
}

/// Saves every page in odd order, then restores other bytes; guards stay, images too.
pub(crate) fn saves_and_restores_every_byte_of_every_layout<R: Rig>(rig: &R) {
    for packed in [false, true] {
        for mut case in Case::all(rig) {
            let mut bench = Bench::new(|images, notify| rig.start(images, notify));
            let count = case.spec.pages;
            let order: Vec<u32> = if packed {
                (0..count).collect()
            } else {
                (0..count).map(|page| (page * 7 + 3) % count).rev().collect()
            };
            let pages = bench.pages(&case.region, &order, packed);
            let guard = bench.extent(4096, true);
            bench.fill(guard, &[0x5a; 4096]);
            let command = bench.command(Direction::Save, &case.region, pages.clone());
            let end = bench.run(command);
            check_save(&bench, &case, &end, &pages);
            assert_eq!(bench.image(guard, 4096), [0x5a; 4096]);

            let image_bytes = case.image_bytes();
            for page in &pages {
                let image = pattern(u64::from(page.device_page) + 1000, image_bytes as usize);
                bench.fill(page.extent, &image);
                case.scatter(page.device_page, &image);
            }
            let command = bench.command(Direction::Restore, &case.region, pages.clone());
            let end = bench.run(command);
            assert_eq!((end.error, end.pages_done), (None, count));
            assert!(end.checksums.is_empty());
            case.check_engine();
            for page in &pages {
                let image = pattern(u64::from(page.device_page) + 1000, image_bytes as usize);
                assert!(bench.image(page.extent, image_bytes) == image, "restore changed an image");
            }
        }
    }
}

/// Saves of the even pages and restores of the odd ones, all outstanding at once.
pub(crate) fn both_directions_run_at_once<R: Rig>(rig: &R) {
    let mut bench = Bench::new(|images, notify| rig.start(images, notify));
    for mut case in [Case::contiguous(rig), Case::split_kv(rig)] {
        let image_bytes = case.image_bytes();
        let mut saves = Vec::new();
        let mut outstanding = 0;
        for round in 0..4 {
            for device_page in 0..case.spec.pages {
                let pages = bench.pages(&case.region, &[device_page], false);
                let direction = if device_page % 2 == 0 {
                    Direction::Save
                } else {
                    // Every round writes the same bytes, so that their order does not matter.
                    let image = pattern(u64::from(device_page) + 99, image_bytes as usize);
                    bench.fill(pages[0].extent, &image);
                    case.scatter(device_page, &image);
                    Direction::Restore
                };
                let command = bench.command(direction, &case.region, pages.clone());
                let ticket = bench.submit(command);
                outstanding += 1;
                if direction == Direction::Save {
                    saves.push((ticket, pages));
                }
            }
            assert!(round < 4 && bench.device.outstanding() <= outstanding);
        }
        let mut ends = std::collections::HashMap::new();
        for _ in 0..outstanding {
            let end = bench.end();
            assert_eq!(end.error, None);
            assert!(ends.insert(end.ticket, end).is_none(), "two ends for one command");
        }
        assert_eq!(bench.device.outstanding(), 0);
        assert!(bench.device.poll().is_none());
        for (ticket, pages) in &saves {
            check_save(&bench, &case, &ends[ticket], pages);
        }
        case.check_engine();
    }
}

/// The done word appears after the last byte, and never for a command that was refused.
pub(crate) fn done_word_follows_the_last_byte_and_only_success<R: Rig>(rig: &R) {
    let (words, reader) = done_words();
    rig.reach(&words);
    let mut bench = Bench::new(|images, notify| rig.start(images, notify));
    let mut case = Case::split_kv(rig);
    let done = |operation_index| DoneWord {
        words: words.clone(),
        operation_index,
        count: 1,
        value: 2 * operation_index + 2,
    };
    let image_bytes = case.image_bytes() as usize;
    for (operation_index, device_page) in (0..case.spec.pages).enumerate() {
        let operation_index = operation_index as u32;
        let pages = bench.pages(&case.region, &[device_page], false);
        let image = pattern(u64::from(device_page) + 5, image_bytes);
        bench.fill(pages[0].extent, &image);
        case.scatter(device_page, &image);
        let mut command = bench.command(Direction::Restore, &case.region, pages);
        command.done = Some(done(operation_index));
        bench.submit(command);
        // As an engine does: the word alone says that the bytes are there.
        let start = Instant::now();
        while reader.load(operation_index, 0) != 2 * operation_index + 2 {
            assert!(start.elapsed() < HANG, "no done word");
            std::hint::spin_loop();
        }
        case.check_engine();
        assert_eq!(bench.end().error, None);
        assert_eq!(reader.load(operation_index, 1), 0, "a word that no command named");
    }
    // Copies of several milliseconds, looked at where they end as soon as the word is there.
    let large = Case::large(rig);
    let (last_page, large_bytes) = (large.spec.pages - 1, large.image_bytes() as usize);
    let all: Vec<u32> = (0..large.spec.pages).collect();
    let pages = bench.pages(&large.region, &all, false);
    let segment = large.spec.segments[0];
    let tail = segment.offset + u64::from(last_page) * segment.stride + segment.length - 64;
    for operation_index in 42..50 {
        let image = pattern(u64::from(operation_index), large_bytes);
        bench.fill(pages[last_page as usize].extent, &image);
        let mut command = bench.command(Direction::Restore, &large.region, pages.clone());
        command.done = Some(done(operation_index));
        bench.submit(command);
        let start = Instant::now();
        while reader.load(operation_index, 0) != 2 * operation_index + 2 {
            assert!(start.elapsed() < HANG, "no done word");
            std::hint::spin_loop();
        }
        assert_eq!(large.memories[0].read(tail, 64), image[large_bytes - 64..]);
        assert_eq!(bench.end().error, None);
    }
    // The last page of the command is outside the region.
    let mut pages = bench.pages(&case.region, &[0, case.spec.pages], false);
    let image = case.gather(0);
    bench.fill(pages[0].extent, &image);
    let mut command = bench.command(Direction::Restore, &case.region, pages.clone());
    command.done = Some(done(40));
    assert_eq!(bench.run(command).fault(), Some(CopyFault::Device));
    assert_eq!(reader.load(40, 0), 0);
    // No pages: nothing to wait for.
    pages.clear();
    let mut command = bench.command(Direction::Restore, &case.region, pages);
    command.done = Some(done(41));
    assert_eq!(bench.run(command).error, None);
    assert_eq!(reader.load(41, 0), 84);
    case.check_engine();
}

pub(crate) fn done_words() -> (DoneWords, DoneWordsReader) {
    let geometry = Geometry { ring_capacity: 64, page_entries: 1024, done_words: 5 };
    let (session, epoch) = (SessionId(1), Epoch(1));
    let (manager, descriptors) = segment::create(geometry, session, epoch).expect("segments");
    let expected = Expected::new(geometry, session, epoch);
    let engine = segment::attach(descriptors.submission, descriptors.completion, expected);
    (manager.done.clone(), engine.expect("attach").done.clone())
}

/// Goal: whoever sees the word of a layer finds every byte of that layer and of those before it.
/// Method: a reader beside the copy, over layers of many pages a step and of many steps a page.
pub(crate) fn words_of_layers_follow_their_bytes_in_order<R: Rig>(rig: &R) {
    let (words, reader) = done_words();
    rig.reach(&words);
    let sizes = [(600, 96), (3, 512 << 10), (9, 4096)];
    for (operation_index, (pages, length)) in (0..).zip(sizes) {
        let mut bench = Bench::new(|images, notify| rig.start(images, notify));
        let mut case = Case::layered(rig, pages, length);
        assert_eq!(case.region.layout().layers(), 5);
        let order: Vec<u32> = (0..pages).rev().collect();
        let pages = bench.pages(&case.region, &order, true);
        for page in &pages {
            let seed = u64::from(page.device_page) + length;
            let image = pattern(seed, case.image_bytes() as usize);
            bench.fill(page.extent, &image);
            case.scatter(page.device_page, &image);
        }
        let value = 2 * operation_index + 2;
        let mut command = bench.command(Direction::Restore, &case.region, pages);
        command.done = Some(DoneWord { words: words.clone(), operation_index, count: 5, value });
        bench.submit(command);
        let start = Instant::now();
        for layer in 0..5 {
            while reader.load(operation_index, layer) != value {
                assert!(start.elapsed() < HANG, "no word of layer {layer}");
                std::hint::spin_loop();
            }
            (0..=layer).for_each(|layer| case.check_layer(layer));
        }
        let end = bench.end();
        assert_eq!((end.error, end.pages_done), (None, case.spec.pages));
        case.check_engine();
    }
}

/// An event that passes when the test says so.
#[derive(Debug, Default)]
pub(crate) struct Signal {
    passed: AtomicBool,
    broken: AtomicBool,
}

impl DeviceEvent for Signal {
    fn has_passed(&self) -> Result<bool, CopyError> {
        if self.broken.load(Ordering::Acquire) {
            return Err(CopyError::BrokenFence { fence: 0, code: 700 });
        }
        Ok(self.passed.load(Ordering::Acquire))
    }
}

/// A fence on an event, at number 9 of its pool.
fn fence(event: &Arc<Signal>, until: Instant) -> Option<Fence> {
    Some(Fence { event: Arc::clone(event) as Arc<dyn DeviceEvent>, index: 9, until })
}

/// Goal: nothing moves before the event has passed, and nobody else waits. Method: a copy of each
/// direction with a fence, then others that end while it waits.
pub(crate) fn a_fence_holds_its_own_copy_and_no_other<R: Rig>(rig: &R) {
    for direction in [Direction::Save, Direction::Restore] {
        let mut bench = Bench::new(|images, notify| rig.start(images, notify));
        let mut case = Case::split_kv(rig);
        let image_bytes = case.image_bytes();
        let pages = bench.pages(&case.region, &[3, 4, 5], false);
        for page in &pages {
            bench.fill(
                page.extent,
                &pattern(70 + u64::from(page.device_page), image_bytes as usize),
            );
        }
        let held: Vec<_> = pages.iter().map(|page| bench.image(page.extent, image_bytes)).collect();
        let event = Arc::new(Signal::default());
        let mut fenced = bench.command(direction, &case.region, pages.clone());
        fenced.fence = fence(&event, Instant::now() + HANG);
        let fenced = bench.submit(fenced);
        for device_page in [0, 1, 2, 6, 7] {
            for other in [Direction::Save, Direction::Restore] {
                let own = bench.pages(&case.region, &[device_page], false);
                bench.fill(own[0].extent, &case.gather(device_page));
                let command = bench.command(other, &case.region, own);
                let end = bench.run(command);
                assert_eq!(end.error, None);
            }
        }
        assert!(bench.device.poll().is_none() && bench.device.outstanding() == 1);
        case.check_engine();
        for (page, image) in pages.iter().zip(&held) {
            assert!(bench.image(page.extent, image_bytes) == *image, "it did not wait");
        }
        event.passed.store(true, Ordering::Release);
        let end = bench.end();
        assert_eq!(end.ticket, fenced);
        match direction {
            Direction::Save => check_save(&bench, &case, &end, &pages),
            Direction::Restore => {
                assert_eq!((end.error, end.pages_done), (None, 3));
                for (page, image) in pages.iter().zip(&held) {
                    case.scatter(page.device_page, image);
                }
            }
        }
        case.check_engine();
    }
}

/// A fence that cannot pass any more ends its copy, in both directions, before a byte moves.
pub(crate) fn a_fence_that_breaks_or_is_late_copies_nothing<R: Rig>(rig: &R) {
    let (words, reader) = done_words();
    rig.reach(&words);
    let mut bench = Bench::new(|images, notify| rig.start(images, notify));
    let case = Case::split_kv(rig);
    let image_bytes = case.image_bytes();
    for direction in [Direction::Save, Direction::Restore] {
        let pages = bench.pages(&case.region, &[1, 2], false);
        let image = pattern(5, image_bytes as usize);
        pages.iter().for_each(|page| bench.fill(page.extent, &image));
        let (broken, late) = (Arc::new(Signal::default()), Arc::new(Signal::default()));
        broken.broken.store(true, Ordering::Release);
        let (now, soon) = (Instant::now(), Instant::now() + HANG);
        for (fence, error) in [
            (fence(&broken, soon), CopyError::BrokenFence { fence: 9, code: 700 }),
            (fence(&late, now), CopyError::FenceTimeout { fence: 9 }),
        ] {
            let mut command = bench.command(direction, &case.region, pages.clone());
            command.fence = fence;
            let (words, operation_index) = (words.clone(), 6);
            command.done = (direction == Direction::Restore).then_some(DoneWord {
                words,
                operation_index,
                count: 1,
                value: 8,
            });
            let end = bench.run(command);
            assert_eq!((end.error, end.pages_done), (Some(error), 0));
            assert!(end.checksums.is_empty());
        }
        assert!(pages.iter().all(|page| bench.image(page.extent, image_bytes) == image));
        case.check_engine();
    }
    assert_eq!(reader.load(6, 0), 0);
    assert_eq!(CopyError::BrokenFence { fence: 9, code: 700 }.fault(), CopyFault::Fence);
    assert_eq!(CopyError::FenceTimeout { fence: 9 }.fault(), CopyFault::FenceTimeout);
    // What has passed in time is not late when it is looked at late.
    let event = Arc::new(Signal::default());
    event.passed.store(true, Ordering::Release);
    let pages = bench.pages(&case.region, &[1, 2], false);
    let mut command = bench.command(Direction::Save, &case.region, pages.clone());
    command.fence = fence(&event, Instant::now());
    let end = bench.run(command);
    check_save(&bench, &case, &end, &pages);
}

/// Spoils one field of a command.
type Defect<'a> = &'a dyn Fn(&mut CopyCommand);

/// What the caller got wrong is refused before a byte moves.
pub(crate) fn bad_commands_copy_nothing<R: Rig>(rig: &R) {
    let mut bench = Bench::new(|images, notify| rig.start(images, notify));
    let case = Case::contiguous(rig);
    let good = bench.pages(&case.region, &[1, 2], false);
    let spoil = |change: Defect<'_>| {
        let mut command = CopyCommand {
            ticket: Ticket(900),
            direction: Direction::Restore,
            region: Arc::clone(&case.region),
            pages: good.clone(),
            image_bytes: case.image_bytes(),
            fence: None,
            done: None,
            checksums: vec![],
        };
        change(&mut command);
        command
    };
    let bad_page = CopyError::BadCommand { page: 1 };
    let defects: [(Defect<'_>, CopyError); 7] = [
        (&|command| command.pages[1].device_page = 24, bad_page),
        (&|command| command.pages[1].device_page = u32::MAX, bad_page),
        (&|command| command.pages[1].extent.arena = 9, bad_page),
        (&|command| command.pages[1].extent.offset = u64::MAX, bad_page),
        (&|command| command.pages[1].extent.offset = (48 << 20) - 4096, bad_page),
        (&|command| command.pages[1].extent.bytes -= 1, bad_page),
        (&|command| command.image_bytes -= 1, CopyError::BadCommand { page: 0 }),
    ];
    for (change, error) in defects {
        let end = bench.run(spoil(change));
        assert_eq!((end.error, end.pages_done), (Some(error), 0));
        assert!(end.checksums.is_empty());
    }
    case.check_engine();
}

/// The queue is bounded, gives back what it does not take, and frees a place with each end.
pub(crate) fn a_full_queue_gives_the_command_back<R: Rig>(rig: &R) {
    let mut bench = Bench::new(|images, notify| rig.start(images, notify));
    let case = Case::contiguous(rig);
    let pages = bench.pages(&case.region, &[5], false);
    for _ in 0..COMMANDS_MAX {
        let command = bench.command(Direction::Save, &case.region, pages.clone());
        bench.submit(command);
    }
    let command = bench.command(Direction::Save, &case.region, pages.clone());
    let ticket = command.ticket;
    let Err(command) = bench.device.submit(command) else { panic!("took more than its bound") };
    assert_eq!((command.ticket, &command.pages), (ticket, &pages));
    // The other direction has a queue of its own.
    let other = bench.command(Direction::Restore, &case.region, vec![]);
    bench.submit(other);
    assert_eq!(bench.device.outstanding(), COMMANDS_MAX + 1);
    let mut saves = 0;
    while saves == 0 {
        saves += u32::from(bench.end().direction == Direction::Save);
    }
    bench.submit(command);
    while bench.device.outstanding() > 0 {
        assert_eq!(bench.end().error, None);
    }
}

/// Stopping finishes what was accepted, keeps its ends and takes nothing more.
pub(crate) fn stop_finishes_what_was_accepted<R: Rig>(rig: &R) {
    let mut bench = Bench::new(|images, notify| rig.start(images, notify));
    let case = Case::large(rig);
    let mut saves = Vec::new();
    for device_page in [0, 1, 2] {
        let pages = bench.pages(&case.region, &[device_page], false);
        let command = bench.command(Direction::Save, &case.region, pages.clone());
        saves.push((bench.submit(command), pages));
    }
    bench.device.stop();
    let command = bench.command(Direction::Save, &case.region, vec![]);
    assert!(bench.device.submit(command).is_err());
    for _ in 0..saves.len() {
        let end = bench.device.poll().expect("an end for every accepted command");
        let (_, pages) = saves.iter().find(|(ticket, _)| *ticket == end.ticket).expect("ours");
        check_save(&bench, &case, &end, pages);
    }
    assert!(bench.device.poll().is_none());
    bench.device.stop();
}

/// After a drop nothing touches engine or pool: both are freed at once, under way or not.
pub(crate) fn drop_leaves_no_thread_behind<R: Rig>(rig: &R) {
    for commands in [0, 1, 20] {
        let mut bench = Bench::new(|images, notify| rig.start(images, notify));
        let case = Case::large(rig);
        let pages = bench.pages(&case.region, &[0, 1, 2], false);
        for number in 0..commands {
            let direction = if number % 2 == 0 { Direction::Save } else { Direction::Restore };
            let command = bench.command(direction, &case.region, pages.clone());
            bench.submit(command);
        }
        let Bench { device, pool, .. } = bench;
        drop(device);
        assert_eq!(Arc::strong_count(&case.region), 1, "a command outlived its device");
        assert_eq!(Arc::strong_count(&pool), 1, "a thread outlived its device");
    }
}

/// One test for each promise of this file, over one rig.
macro_rules! conformance {
    ($name:ident, $rig:expr) => {
        mod $name {
            use super::*;

            conformance!(@tests $rig;
                saves_and_restores_every_byte_of_every_layout,
                both_directions_run_at_once,
                done_word_follows_the_last_byte_and_only_success,
                words_of_layers_follow_their_bytes_in_order,
                a_fence_holds_its_own_copy_and_no_other,
                a_fence_that_breaks_or_is_late_copies_nothing,
                bad_commands_copy_nothing,
                a_full_queue_gives_the_command_back,
                stop_finishes_what_was_accepted,
                drop_leaves_no_thread_behind,
            );
        }
    };
    (@tests $rig:expr; $($test:ident,)*) => {
        $(#[test]
        fn $test() {
            crate::conformance::$test(&$rig);
        })*
    };
}
pub(crate) use conformance;
