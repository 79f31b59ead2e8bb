//! An attached engine with device pages in real memory, whose bytes follow from page keys.
#![allow(unsafe_code, reason = "process memory is registered by a promise about its address")]

use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::{Deref, Range};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use orbitkv_engine::{
    Block, Chain, Client, Completion, Connect, Deadline, DependencySpec, Lease, Memory,
    NamespaceSpec, Operation, PageHash, PageResult, QueryMode, Region, RegionLayout,
    RestoreOptions, SaveOptions, Scope, Segment, Status,
};
use rustix::fs::{MemfdFlags, SealFlags};

use crate::manager::PATIENCE;

/// Bytes between two declared stretches of device memory, and at both ends.
const GUARD: u64 = 104;
/// What guard bytes hold; nobody may change them.
const GUARD_BYTE: u8 = 0x5c;
/// What a device page holds before a restore.
const POISON: u8 = 0xa5;

/// How the Manager reaches the device pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Way {
    /// A memfd that cannot shrink: the Manager maps it.
    Sealed,
    /// Memory of this process, by address.
    Process,
    /// A memfd that can shrink: only read and written through its descriptor.
    Unsealed,
}

/// Where the bytes of a page lie.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Shape {
    /// One segment.
    Contiguous,
    /// Keys and values of two layers, each an array of its own.
    Split,
}

impl Shape {
    /// Segments of a page.
    fn parts(self) -> u64 {
        match self {
            Self::Contiguous => 1,
            Self::Split => 4,
        }
    }
}

/// A namespace of rank 0 of 1 with pages of `page_bytes`.
pub fn namespace(model: &str, page_bytes: u64) -> NamespaceSpec {
    NamespaceSpec {
        model: model.into(),
        dtype: "bfloat16".into(),
        page_tokens: 64,
        page_bytes,
        layout: "test".into(),
        group: 0,
        tp_rank: 0,
        tp_size: 1,
        pp_rank: 0,
        pp_size: 1,
        adapter: String::new(),
        salt: String::new(),
        dependency: DependencySpec::Chain,
    }
}

/// Hashes of pages `range` of a sequence that shares none with another.
pub fn hashes(sequence: u64, range: Range<u32>) -> Vec<PageHash> {
    range
        .map(|index| {
            let mut hash = [0xee; 32];
            hash[..8].copy_from_slice(&sequence.to_le_bytes());
            hash[8..12].copy_from_slice(&index.to_le_bytes());
            PageHash(hash)
        })
        .collect()
}

/// `hashes` in device pages from `first` on.
pub fn blocks(hashes: &[PageHash], first: u32) -> Vec<Block> {
    hashes.iter().zip(first..).map(|(&hash, page)| Block { hash, page }).collect()
}

/// The bytes of a page as its namespace and hash demand them.
pub fn image(spec: &NamespaceSpec, hash: &PageHash) -> Vec<u8> {
    let mut seed = DefaultHasher::new();
    spec.hash(&mut seed);
    hash.hash(&mut seed);
    let mut state = seed.finish();
    let mut bytes = Vec::with_capacity(spec.page_bytes as usize);
    while bytes.len() < spec.page_bytes as usize {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (state ^ state >> 31).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bytes.extend_from_slice(&(mixed ^ mixed >> 29).to_le_bytes());
    }
    bytes.truncate(spec.page_bytes as usize);
    bytes
}

/// An operation that ended, with its page results.
#[derive(Clone, Debug)]
pub struct Ended {
    /// Its completion.
    pub completion: Completion,
    /// One a page.
    pub results: Vec<PageResult>,
}

impl Deref for Ended {
    type Target = Completion;

    fn deref(&self) -> &Completion {
        &self.completion
    }
}

impl Ended {
    /// The lease of a hit.
    ///
    /// # Panics
    /// When nothing is leased.
    pub fn leased(&self) -> Lease {
        self.lease.unwrap_or_else(|| panic!("no lease: {self:?}"))
    }

    /// The same, when it ended well.
    ///
    /// # Panics
    /// When it did not.
    #[must_use]
    pub fn ok(self) -> Self {
        assert_eq!(self.status, Status::Ok, "{self:?}");
        self
    }
}

/// Device pages in memory of this process.
#[derive(Debug)]
pub struct Device {
    store: Store,
    bytes: u64,
    pages: u32,
    page_bytes: u64,
    shape: Shape,
}

#[derive(Debug)]
enum Store {
    File(File),
    /// Atomic words: the Manager changes them behind the compiler's back.
    Words(Box<[AtomicU64]>),
}

impl Device {
    /// `pages` pages of `page_bytes`, between guard bytes.
    ///
    /// # Panics
    /// When there is no memory, or the shape does not divide the page.
    pub fn new(way: Way, shape: Shape, pages: u32, page_bytes: u64) -> Self {
        let parts = shape.parts();
        assert!(page_bytes.is_multiple_of(parts * 8));
        let array = GUARD + u64::from(pages) * (page_bytes / parts + GUARD);
        let bytes = parts * array;
        let guard = [GUARD_BYTE; 1 << 16];
        let store = match way {
            Way::Process => {
                let word = u64::from_ne_bytes([GUARD_BYTE; 8]);
                Store::Words((0..bytes / 8).map(|_| AtomicU64::new(word)).collect())
            }
            Way::Sealed | Way::Unsealed => {
                let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
                let file = File::from(rustix::fs::memfd_create("device", flags).unwrap());
                file.set_len(bytes).unwrap();
                for at in (0..bytes).step_by(guard.len()) {
                    let len = (bytes - at).min(guard.len() as u64) as usize;
                    file.write_all_at(&guard[..len], at).unwrap();
                }
                if way == Way::Sealed {
                    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
                }
                Store::File(file)
            }
        };
        Self { store, bytes, pages, page_bytes, shape }
    }

    /// Offers the memory to the Manager and lays the pages out in it.
    fn register(&self, client: &mut Client, scope: Scope) -> Region {
        let memory = match &self.store {
            Store::File(file) => client.register_memfd(file, self.bytes).unwrap(),
            Store::Words(words) => self.register_words(client, words),
        };
        let part = self.page_bytes / self.shape.parts();
        let segment = |number| Segment {
            memory,
            offset: self.offset(number, 0),
            stride: part + GUARD,
            length: part,
            layer: 0,
        };
        let segments = (0..self.shape.parts()).map(segment).collect();
        client.register_region(&RegionLayout { scope, pages: self.pages, segments }).unwrap()
    }

    fn register_words(&self, client: &mut Client, words: &[AtomicU64]) -> Memory {
        let start = NonNull::from(words).cast::<u8>();
        // SAFETY: the words live as long as the device, which an engine drops after its client;
        // a Manager that is asked to end that session stops copying by the client's nonce. They
        // are only ever accessed as atomics.
        unsafe { client.register_process_memory(start, self.bytes as usize) }.unwrap()
    }

    /// Where a part of a page starts.
    fn offset(&self, part: u64, page: u32) -> u64 {
        let bytes = self.page_bytes / self.shape.parts();
        let array = GUARD + u64::from(self.pages) * (bytes + GUARD);
        part * array + GUARD + u64::from(page) * (bytes + GUARD)
    }

    fn write_at(&self, bytes: &[u8], at: u64) {
        match &self.store {
            Store::File(file) => file.write_all_at(bytes, at).unwrap(),
            Store::Words(words) => {
                let words = &words[(at / 8) as usize..];
                for (chunk, word) in bytes.as_chunks::<8>().0.iter().zip(words) {
                    word.store(u64::from_ne_bytes(*chunk), Ordering::Relaxed);
                }
            }
        }
    }

    fn read_at(&self, bytes: &mut [u8], at: u64) {
        match &self.store {
            Store::File(file) => file.read_exact_at(bytes, at).unwrap(),
            Store::Words(words) => {
                let words = &words[(at / 8) as usize..];
                for (chunk, word) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(words) {
                    *chunk = word.load(Ordering::Relaxed).to_ne_bytes();
                }
            }
        }
    }

    /// Writes a whole page.
    pub fn write(&self, page: u32, bytes: &[u8]) {
        let part = bytes.len() / self.shape.parts() as usize;
        for (number, bytes) in bytes.chunks_exact(part).enumerate() {
            self.write_at(bytes, self.offset(number as u64, page));
        }
    }

    /// Reads a whole page.
    pub fn read(&self, page: u32) -> Vec<u8> {
        let mut bytes = vec![0; self.page_bytes as usize];
        let part = bytes.len() / self.shape.parts() as usize;
        for (number, bytes) in bytes.chunks_exact_mut(part).enumerate() {
            self.read_at(bytes, self.offset(number as u64, page));
        }
        bytes
    }

    /// Whether every byte outside of the declared ones is as it was.
    pub fn guards_are_intact(&self) -> bool {
        let part = self.page_bytes / self.shape.parts();
        let mut guard = [0; GUARD as usize];
        let mut is_intact = |at| {
            self.read_at(&mut guard, at);
            guard == [GUARD_BYTE; GUARD as usize]
        };
        (0..self.shape.parts()).all(|number| {
            let before_first = is_intact(self.offset(number, 0) - GUARD);
            before_first && (0..self.pages).all(|page| is_intact(self.offset(number, page) + part))
        })
    }

    /// The descriptor of a memfd.
    ///
    /// # Panics
    /// For process memory.
    pub fn file(&self) -> &File {
        match &self.store {
            Store::File(file) => file,
            Store::Words(_) => panic!("process memory has no descriptor"),
        }
    }
}

/// A session with one namespace and one region over its own device pages.
#[derive(Debug)]
pub struct Engine {
    /// Its session.
    pub client: Client,
    /// Its namespace.
    pub scope: Scope,
    /// Its device pages, as registered.
    pub region: Region,
    /// Its device pages.
    pub device: Device,
    /// Whose bytes they are.
    pub spec: NamespaceSpec,
    /// Ended operations that nobody asked for yet.
    ended: Vec<Ended>,
}

impl Engine {
    /// Attaches with `pages` device pages in one sealed memfd.
    ///
    /// # Panics
    /// When that is refused.
    pub fn attach(socket: &Path, spec: NamespaceSpec, pages: u32) -> Self {
        Self::connect(&Connect::new(socket), spec, pages, Way::Sealed, Shape::Contiguous)
    }

    /// Attaches as `connect` says, with device pages in any memory.
    ///
    /// # Panics
    /// When that is refused.
    pub fn connect(
        connect: &Connect,
        spec: NamespaceSpec,
        pages: u32,
        way: Way,
        shape: Shape,
    ) -> Self {
        let mut client = connect.connect().unwrap();
        let scope = client.define_namespace(&spec).unwrap();
        let device = Device::new(way, shape, pages, spec.page_bytes);
        let region = device.register(&mut client, scope);
        Self { client, scope, region, device, spec, ended: Vec::new() }
    }

    /// Registers the same device pages once more.
    pub fn register_again(&mut self) -> Region {
        self.device.register(&mut self.client, self.scope)
    }

    /// Puts into each device page what its hash demands.
    pub fn fill(&self, blocks: &[Block]) {
        for block in blocks {
            self.device.write(block.page, &image(&self.spec, &block.hash));
        }
    }

    /// Makes sure that no device page holds what a restore should bring.
    pub fn poison(&self, blocks: &[Block]) {
        let bytes = vec![POISON; self.spec.page_bytes as usize];
        for block in blocks {
            self.device.write(block.page, &bytes);
        }
    }

    /// Checks every byte of the device pages, and every guard byte.
    ///
    /// # Panics
    /// When one is wrong.
    pub fn check(&self, blocks: &[Block]) {
        for block in blocks {
            assert!(self.holds(block), "wrong bytes: {block:?} of {:?}", self.spec);
        }
        assert!(self.device.guards_are_intact(), "a byte outside of the pages has changed");
    }

    /// Whether a device page holds what its hash demands.
    pub fn holds(&self, block: &Block) -> bool {
        self.device.read(block.page) == image(&self.spec, &block.hash)
    }

    /// Whether a device page is as [`poison`](Self::poison) left it.
    pub fn is_poison(&self, block: &Block) -> bool {
        self.device.read(block.page).iter().all(|&byte| byte == POISON)
    }

    /// Waits for one operation to end; the others keep.
    ///
    /// # Panics
    /// When it does not end, or the session does.
    pub fn end(&mut self, operation: Operation) -> Ended {
        loop {
            if let Some(at) = self.ended.iter().position(|ended| ended.operation == operation) {
                return self.ended.swap_remove(at);
            }
            let next = self.next_end();
            self.ended.push(next);
        }
    }

    /// The next operation that ends.
    ///
    /// # Panics
    /// When none does, or the session has ended.
    pub fn next_end(&mut self) -> Ended {
        let waited = self.client.wait(PATIENCE).unwrap();
        let completion = waited.expect("an operation ends in time");
        if completion.status == Status::Gone {
            while self.client.poll().is_ok_and(|next| next.is_some()) {}
            panic!("{completion:?} because {:?}", self.client.poll());
        }
        let results = self.client.results(&completion).collect();
        Ended { completion, results }
    }

    /// Fills and saves device pages as one chain from the root.
    pub fn save(&mut self, blocks: &[Block]) -> Ended {
        self.save_after(None, blocks)
    }

    /// Fills and saves device pages as one chain after `parent`.
    pub fn save_after(&mut self, parent: Option<PageHash>, blocks: &[Block]) -> Ended {
        self.fill(blocks);
        let chain = Chain { parent, blocks };
        let options = SaveOptions::default();
        let save = self.client.save_chains(&self.region, &[chain], options).unwrap();
        self.end(save)
    }

    /// Saves `hashes` through the device pages, as many at a time as there are.
    pub fn save_all(&mut self, hashes: &[PageHash]) {
        let mut parent = None;
        for part in hashes.chunks(self.region.pages() as usize) {
            let saved = self.save_after(parent, &blocks(part, 0)).ok();
            assert_eq!((saved.pages + saved.pages_present) as usize, part.len(), "{saved:?}");
            parent = part.last().copied();
        }
    }

    /// Looks a chain from the root up.
    pub fn query(&mut self, hashes: &[PageHash], mode: QueryMode) -> Ended {
        let scope = self.scope;
        let query = self.client.query(&scope, hashes, mode, Deadline::DEFAULT).unwrap();
        self.end(query)
    }

    /// Restores leased pages; what is in their place before is certainly not right.
    pub fn restore(&mut self, lease: &Lease, offset: u32, blocks: &[Block]) -> Ended {
        self.restore_with(lease, offset, blocks, RestoreOptions::default())
    }

    /// [`restore`](Self::restore) with options.
    pub fn restore_with(
        &mut self,
        lease: &Lease,
        offset: u32,
        blocks: &[Block],
        options: RestoreOptions,
    ) -> Ended {
        self.poison(blocks);
        let region = self.region;
        let restore = self.client.restore(lease, offset, &region, blocks, options).unwrap();
        self.end(restore)
    }

    /// Releases a lease.
    pub fn release(&mut self, lease: Lease) -> Ended {
        let release = self.client.release(lease).unwrap();
        self.end(release)
    }

    /// Looks a chain up, restores all that hit, checks every byte; says how many pages that were.
    /// The device pages are used over and over, as many at a time as there are.
    pub fn restore_all(&mut self, hashes: &[PageHash]) -> u32 {
        let hit = self.query(hashes, QueryMode::Candidate);
        let Some(lease) = hit.lease else { return 0 };
        let mut offset = 0;
        for part in hashes[..hit.pages as usize].chunks(self.region.pages() as usize) {
            let blocks = blocks(part, 0);
            let restored = self.restore(&lease, offset, &blocks).ok();
            assert_eq!(restored.pages as usize, part.len());
            self.check(&blocks);
            offset += restored.pages;
        }
        hit.pages
    }
}
