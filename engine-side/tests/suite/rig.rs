//! What most tests start from: an attached client with one namespace and one region over a memfd.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use orbitkv_engine::{
    Block, Client, Completion, Connect, DependencySpec, Memory, NamespaceSpec, PageHash, Region,
    RegionLayout, Scope, Segment,
};
use rustix::fs::{MemfdFlags, SealFlags};

/// Device pages of a rig's region.
pub(crate) const PAGES: u32 = 32;
/// Bytes of one of the two segments of a page.
pub(crate) const HALF: u64 = 512;
/// Longest wait for something that must come.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

pub(crate) struct Rig {
    pub(crate) client: Client,
    pub(crate) scope: Scope,
    pub(crate) memory: Memory,
    pub(crate) region: Region,
    pub(crate) device: Device,
}

/// The engine's pages: all first halves, then all second halves.
pub(crate) struct Device(File);

impl Device {
    pub(crate) fn new() -> Self {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let memfd = rustix::fs::memfd_create(c"twin-test", flags).unwrap();
        rustix::fs::ftruncate(&memfd, Self::bytes()).unwrap();
        rustix::fs::fcntl_add_seals(&memfd, SealFlags::SHRINK).unwrap();
        Self(File::from(memfd))
    }

    pub(crate) fn bytes() -> u64 {
        2 * HALF * u64::from(PAGES)
    }

    pub(crate) fn file(&self) -> &File {
        &self.0
    }

    pub(crate) fn fill(&self, page: u32, byte: u8) {
        for half in 0..2 {
            self.0.write_all_at(&[byte.wrapping_add(half); HALF as usize], at(page, half)).unwrap();
        }
    }

    /// Whether both halves of a page are as [`fill`](Self::fill) left them.
    pub(crate) fn holds(&self, page: u32, byte: u8) -> bool {
        (0..2).all(|half| {
            let mut bytes = [0; HALF as usize];
            self.0.read_exact_at(&mut bytes, at(page, half)).unwrap();
            bytes == [byte.wrapping_add(half); HALF as usize]
        })
    }
}

fn at(page: u32, half: u8) -> u64 {
    u64::from(half) * HALF * u64::from(PAGES) + u64::from(page) * HALF
}

pub(crate) fn namespace(model: &str) -> NamespaceSpec {
    NamespaceSpec {
        model: model.into(),
        dtype: "bfloat16".into(),
        page_tokens: 64,
        page_bytes: 2 * HALF,
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

pub(crate) fn layout(scope: Scope, memory: Memory) -> RegionLayout {
    let half = |half| Segment {
        memory,
        offset: at(0, half),
        stride: HALF,
        length: HALF,
        layer: half.into(),
    };
    RegionLayout { scope, pages: PAGES, segments: vec![half(0), half(1)] }
}

/// `count` hashes of a sequence that no other `sequence` shares.
pub(crate) fn hashes(sequence: u8, count: usize) -> Vec<PageHash> {
    (0..count)
        .map(|i| {
            let mut hash = [sequence; 32];
            hash[0] = i as u8;
            PageHash(hash)
        })
        .collect()
}

/// The blocks of a sequence, in device pages from `first` on.
pub(crate) fn blocks(sequence: u8, count: usize, first: u32) -> Vec<Block> {
    let pages = first..;
    hashes(sequence, count)
        .into_iter()
        .zip(pages)
        .map(|(hash, page)| Block { hash, page })
        .collect()
}

impl Rig {
    pub(crate) fn new(socket: &Path) -> Self {
        Self::over(Connect::new(socket).connect().unwrap())
    }

    pub(crate) fn over(mut client: Client) -> Self {
        let device = Device::new();
        let scope = client.define_namespace(&namespace("twin")).unwrap();
        let memory = client.register_memfd(device.file(), Device::bytes()).unwrap();
        let region = client.register_region(&layout(scope, memory)).unwrap();
        Self { client, scope, memory, region, device }
    }

    /// The next completion, which must come.
    pub(crate) fn next(&mut self) -> Completion {
        next(&mut self.client)
    }
}

pub(crate) fn next(client: &mut Client) -> Completion {
    client.wait(PATIENCE).unwrap().expect("a completion in time")
}
