//! An engine of this process with its pages on a GPU.

use std::path::Path;
use std::rc::Rc;
use std::sync::{Mutex, MutexGuard, PoisonError};

use orbitkv_benches::gpu::{Buffer, Content, Device, PlacedPages, Stream};
use orbitkv_engine::cuda::EventPool;
use orbitkv_engine::{
    Block, Chain, Client, Completion, Connect, Deadline, Lease, Memory, NamespaceSpec, Operation,
    QueryMode, Region, RegionLayout, RestoreOptions, SaveOptions, Scope, Segment, Status,
};
use orbitkv_tests::engine::{hashes, namespace};
use orbitkv_tests::manager::{Manager, PATIENCE, Setup};

/// Bytes of a page of most tests: 36 layers of 4 KiB.
pub(crate) const PAGE: u64 = 36 * PART;
/// Bytes of a layer of it.
pub(crate) const PART: u64 = 4096;
/// Events of a session.
const EVENTS: u32 = 64;

/// Lets one test at a time have the GPU: what another does would count as this one's.
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    static GPU: Mutex<()> = Mutex::new(());
    GPU.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A Manager on the GPU.
pub(crate) fn manager(setup: Setup) -> Manager {
    setup.dram("1GiB").flag("--device", "cuda").start()
}

/// Where the parts of the pages lie.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Shape {
    /// A page is one part.
    Contiguous,
    /// Layer-outermost, keys and values apart: so many parts, all in one allocation.
    Split(u32),
}

impl Shape {
    fn parts(self) -> u32 {
        match self {
            Self::Contiguous => 1,
            Self::Split(parts) => parts,
        }
    }
}

/// Pages in one allocation.
#[derive(Debug)]
pub(crate) struct Pages {
    pub(crate) buffer: Buffer,
    pub(crate) count: u32,
    page_bytes: u64,
    shape: Shape,
}

impl Pages {
    pub(crate) fn new(count: u32, page_bytes: u64, shape: Shape) -> Self {
        let buffer = Buffer::new(u64::from(count) * page_bytes).unwrap();
        Self { buffer, count, page_bytes, shape }
    }

    fn length(&self) -> u64 {
        self.page_bytes / u64::from(self.shape.parts())
    }

    /// Where page 0's part begins in the allocation.
    fn offset(&self, part: u32) -> u64 {
        u64::from(part) * u64::from(self.count) * self.length()
    }

    /// Some of the pages, for a kernel.
    pub(crate) fn placed(&self, pages: &[u32]) -> PlacedPages {
        let bases: Vec<_> =
            (0..self.shape.parts()).map(|part| self.buffer.address() + self.offset(part)).collect();
        PlacedPages::new(&bases, pages, self.length(), self.length()).unwrap()
    }

    fn segments(&self, memory: Memory) -> Vec<Segment> {
        let segment = |part| Segment {
            memory,
            offset: self.offset(part),
            stride: self.length(),
            length: self.length(),
            layer: part,
        };
        (0..self.shape.parts()).map(segment).collect()
    }
}

/// A session with one namespace and one region.
#[derive(Debug)]
pub(crate) struct GpuEngine {
    // The session ends before its events and memory go.
    pub(crate) client: Client,
    pub(crate) stream: Stream,
    pub(crate) events: EventPool,
    pub(crate) scope: Scope,
    pub(crate) memory: Memory,
    pub(crate) region: Region,
    pub(crate) pages: Pages,
    pub(crate) device: Rc<Device>,
    wrong: Buffer,
}

/// How to attach, for pages of a shape.
pub(crate) fn connect(socket: &Path, shape: Shape) -> Connect {
    Connect::new(socket).timeout(PATIENCE).done_words(shape.parts())
}

impl GpuEngine {
    /// Attaches with `count` pages on GPU 0.
    pub(crate) fn attach(socket: &Path, model: &str, count: u32, shape: Shape) -> Self {
        Self::attach_with(socket, &namespace(model, PAGE), count, shape)
    }

    pub(crate) fn attach_with(
        socket: &Path,
        spec: &NamespaceSpec,
        count: u32,
        shape: Shape,
    ) -> Self {
        let device = Rc::new(Device::open(0).unwrap());
        let mut client = connect(socket, shape).connect().unwrap();
        let mut events = EventPool::new(&device.gpu, EVENTS).unwrap();
        events.register(&mut client).unwrap();
        let scope = client.define_namespace(spec).unwrap();
        let pages = Pages::new(count, spec.page_bytes, shape);
        let (memory, region) = register(&mut client, &device, scope, &pages);
        let (stream, wrong) = (Stream::new().unwrap(), Buffer::new(8).unwrap());
        Self { client, stream, events, scope, memory, region, pages, device, wrong }
    }

    /// Registers other pages of the same namespace.
    pub(crate) fn register(&mut self, pages: &Pages) -> (Memory, Region) {
        register(&mut self.client, &self.device, self.scope, pages)
    }

    /// Registers its pages once more, with a client that is new.
    pub(crate) fn register_again(&mut self) {
        (self.memory, self.region) =
            register(&mut self.client, &self.device, self.scope, &self.pages);
    }

    /// Writes pages by a kernel: page `i` of them is page `content.first_page + i` of its seed.
    pub(crate) fn fill(&self, pages: &[u32], content: Content) {
        let placed = self.pages.placed(pages);
        self.device.kernels.fill(&self.stream, &placed, content).unwrap();
        self.stream.wait().unwrap();
    }

    /// Makes sure that the pages hold nothing that a restore should bring.
    pub(crate) fn poison(&self, pages: &[u32]) {
        self.fill(pages, content(u64::MAX));
    }

    /// Words of the pages that are not as `content` says.
    pub(crate) fn wrong_words(&self, pages: &[u32], content: Content) -> u64 {
        let placed = self.pages.placed(pages);
        self.wrong.set(0).unwrap();
        let all = 0..placed.segments();
        self.device.kernels.compare(&self.stream, &placed, content, all, &self.wrong).unwrap();
        self.stream.wait().unwrap();
        counter(&self.wrong)
    }

    pub(crate) fn check(&self, pages: &[u32], content: Content) {
        assert_eq!(self.wrong_words(pages, content), 0, "pages {pages:?} of {content:?}");
    }

    /// Takes an event and records it behind what the stream was given.
    pub(crate) fn fence(&mut self) -> u32 {
        let event = self.events.take().expect("a free event");
        // SAFETY: the stream lives as long as `self`.
        unsafe { self.events.record(event, self.stream.raw()) }.unwrap();
        event
    }

    /// Stages and submits a save behind an event.
    pub(crate) fn begin_save(&mut self, blocks: &[Block], fence: Option<u32>) -> Operation {
        let options = SaveOptions { fence, deadline: Deadline::after(PATIENCE) };
        let chains = [Chain::from(blocks)];
        let save = self.client.save_chains(&self.region, &chains, options).unwrap();
        self.client.submit().unwrap();
        save
    }

    /// Saves pages that are written.
    pub(crate) fn save(&mut self, blocks: &[Block]) {
        let fence = self.fence();
        let save = self.begin_save(blocks, Some(fence));
        let saved = self.end(save);
        self.events.give_back(fence);
        let all = saved.pages + saved.pages_present;
        assert_eq!((saved.status, all as usize), (Status::Ok, blocks.len()), "{saved:?}");
    }

    /// A lease of a whole chain.
    pub(crate) fn lease(&mut self, blocks: &[Block]) -> Lease {
        let chain: Vec<_> = blocks.iter().map(|block| block.hash).collect();
        let mode = QueryMode::Demand;
        let query = self.client.query(&self.scope, &chain, mode, Deadline::DEFAULT).unwrap();
        let hit = self.end(query);
        assert_eq!(hit.pages as usize, blocks.len(), "{hit:?}");
        hit.lease.unwrap()
    }

    /// Looks a chain up and restores it into its device pages.
    pub(crate) fn restore(&mut self, blocks: &[Block]) -> Completion {
        let lease = self.lease(blocks);
        let pages: Vec<_> = blocks.iter().map(|block| block.page).collect();
        self.poison(&pages);
        let options = RestoreOptions::default();
        let restore = self.client.restore(&lease, 0, &self.region, blocks, options).unwrap();
        let restored = self.end(restore);
        let all = restored.pages as usize;
        assert_eq!((restored.status, all), (Status::Ok, blocks.len()), "{restored:?}");
        restored
    }

    /// Saves pages, restores them into others and compares.
    pub(crate) fn round_trip(&mut self, seed: u64) {
        let content = content(seed);
        self.fill(&[0, 1], content);
        self.save(&blocks(seed, &[0, 1]));
        let _restored = self.restore(&blocks(seed, &[2, 3]));
        self.check(&[2, 3], content);
    }

    /// Waits for the only operation that is outstanding.
    pub(crate) fn end(&mut self, operation: Operation) -> Completion {
        let ended = self.client.wait(PATIENCE).unwrap().expect("an operation ends in time");
        assert_eq!(ended.operation, operation, "{ended:?}");
        ended
    }

    /// Ends the use of a region.
    pub(crate) fn unregister(&mut self, region: Region) {
        let unregister = self.client.unregister(region).unwrap();
        assert_eq!(self.end(unregister).status, Status::Ok);
    }
}

fn register(client: &mut Client, device: &Device, scope: Scope, pages: &Pages) -> (Memory, Region) {
    let spec = device.gpu.export(pages.buffer.address(), pages.buffer.bytes()).unwrap();
    let memory = client.register_cuda(&spec).unwrap();
    let segments = pages.segments(memory);
    let layout = RegionLayout { scope, pages: pages.count, segments };
    (memory, client.register_region(&layout).unwrap())
}

/// What a counter of a kernel holds.
pub(crate) fn counter(buffer: &Buffer) -> u64 {
    u64::from_le_bytes(buffer.read(8).unwrap().try_into().unwrap())
}

/// The first pages of a seed.
pub(crate) fn content(seed: u64) -> Content {
    Content { seed, first_page: 0 }
}

/// The chain of a seed in device pages.
pub(crate) fn blocks(seed: u64, pages: &[u32]) -> Vec<Block> {
    let names = hashes(seed, 0..pages.len() as u32).into_iter();
    names.zip(pages).map(|(hash, page)| Block { hash, page: *page }).collect()
}
