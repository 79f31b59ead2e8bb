//! Restores layer by layer, as an engine sees them: from DRAM, from SSD, and when they fail half-way.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::Instant;

use orbitkv_engine::{
    Block, Client, Code, Completion, Connect, Deadline, HexBytes, Lease, Memory, Operation,
    QueryMode, Refusal, Region, RegionLayout, RegisterError, RestoreOptions, SaveOptions, Scope,
    Segment, Status,
};
use orbitkv_tests::engine::{blocks, hashes, namespace};
use orbitkv_tests::manager::{Manager, PATIENCE};
use orbitkv_tests::setup;
use rustix::fs::MemfdFlags;

const LAYERS: u32 = 5;
const PART: u64 = 8192;
const PAGE: u64 = LAYERS as u64 * PART;
const PAGES: u32 = 32;

/// An engine with a memfd for each layer.
struct Layered {
    client: Client,
    scope: Scope,
    region: Region,
    files: Vec<File>,
}

impl Layered {
    fn attach(manager: &Manager) -> Self {
        let mut client = Connect::new(manager.socket()).done_words(LAYERS).connect().unwrap();
        let scope = client.define_namespace(&namespace("layers", PAGE)).unwrap();
        let mut files = Vec::new();
        let mut segments = Vec::new();
        for layer in 0..LAYERS {
            let file = File::from(rustix::fs::memfd_create("layer", MemfdFlags::CLOEXEC).unwrap());
            let bytes = u64::from(PAGES) * PART;
            file.set_len(bytes).unwrap();
            let memory = client.register_memfd(&file, bytes).unwrap();
            segments.push(segment(memory, layer));
            files.push(file);
        }
        // In the image the last layer comes first.
        segments.reverse();
        let region = RegionLayout { scope, pages: PAGES, segments };
        let region = client.register_region(&region).unwrap();
        assert_eq!((region.layers(), region.page_bytes()), (LAYERS, PAGE));
        Self { client, scope, region, files }
    }

    fn next(&mut self) -> Completion {
        self.client.wait(PATIENCE).unwrap().expect("an answer in time")
    }

    /// Fills the pages of the blocks with what `byte` says of layer and page, in its own way.
    fn fill(&self, blocks: &[Block], byte: impl Fn(u32, u32) -> u8) {
        for (layer, file) in (0..).zip(&self.files) {
            for (at, block) in (0..).zip(blocks) {
                let bytes = [byte(layer, at); PART as usize];
                file.write_all_at(&bytes, u64::from(block.page) * PART).unwrap();
            }
        }
    }

    /// Whether one layer of all blocks holds what `byte` says.
    fn holds(&self, layer: u32, blocks: &[Block], byte: impl Fn(u32, u32) -> u8) -> bool {
        (0..).zip(blocks).all(|(at, block)| {
            let mut bytes = vec![0; PART as usize];
            let offset = u64::from(block.page) * PART;
            self.files[layer as usize].read_exact_at(&mut bytes, offset).unwrap();
            bytes == [byte(layer, at); PART as usize]
        })
    }

    fn lease(&mut self) -> Lease {
        let pages = hashes(1, 0..12);
        let mode = QueryMode::Candidate;
        self.client.query(&self.scope, &pages, mode, Deadline::DEFAULT).unwrap();
        let found = self.next();
        assert_eq!((found.status, found.pages), (Status::Ok, 12));
        found.lease.unwrap()
    }

    fn restore(&mut self, lease: &Lease, blocks: &[Block]) -> Operation {
        let options = RestoreOptions { by_layer: true, ..RestoreOptions::default() };
        self.client.restore(lease, 0, &self.region, blocks, options).unwrap()
    }
}

fn segment(memory: Memory, layer: u32) -> Segment {
    Segment { memory, offset: 0, stride: PART, length: PART, layer }
}

fn byte(layer: u32, at: u32) -> u8 {
    (1 + layer * 40 + at) as u8
}

/// Goal: whoever sees the word of a layer finds its bytes, and the last word stands for the whole.
#[test]
fn layers_come_in_order_from_dram_and_from_ssd() {
    let manager = setup!().ssd("256MiB").start();
    let mut engine = Layered::attach(&manager);
    let saved = blocks(&hashes(1, 0..12), 0);
    engine.fill(&saved, byte);
    engine.client.save(&engine.region, &saved).unwrap();
    assert_eq!(engine.next().pages, 12);
    let restored = blocks(&hashes(1, 0..12), 16);
    for tier in ["DRAM", "SSD"] {
        if tier == "SSD" {
            manager.evict();
        }
        engine.fill(&restored, |_, _| 0);
        let lease = engine.lease();
        let operation = engine.restore(&lease, &restored);
        engine.client.submit().unwrap();
        let start = Instant::now();
        for layer in 0..LAYERS {
            while engine.client.is_layer_done(&operation, layer).is_none() {
                assert!(start.elapsed() < PATIENCE, "no word of layer {layer}");
                std::thread::yield_now();
            }
            assert_eq!(engine.client.is_layer_done(&operation, layer), Some(true), "{tier}");
            assert!((0..=layer).all(|layer| engine.holds(layer, &restored, byte)), "{tier}");
        }
        assert_eq!(engine.client.is_done(&operation), Some(true));
        let done = engine.next();
        assert_eq!((done.operation, done.status, done.pages), (operation, Status::Ok, 12));
        let from_ssd = if tier == "SSD" { 12 } else { 0 };
        assert_eq!(done.pages_ssd, from_ssd, "{tier}");
    }
}

/// Goal: a failure tells which layers are good. Method: the memory of layer 2 is cut while all pages
/// are in DRAM.
#[test]
fn a_layer_that_cannot_be_written_ends_it_and_those_before_are_good() {
    let manager = setup!().start();
    let mut engine = Layered::attach(&manager);
    let saved = blocks(&hashes(1, 0..12), 0);
    engine.fill(&saved, byte);
    engine.client.save(&engine.region, &saved).unwrap();
    engine.next();
    engine.files[2].set_len(PART).unwrap();
    let restored = blocks(&hashes(1, 0..12), 16);
    let lease = engine.lease();
    let operation = engine.restore(&lease, &restored);
    let done = engine.next();
    assert_eq!((done.status, done.code, done.pages), (Status::Error, Code::DeviceError, 0));
    let words: Vec<_> =
        (0..LAYERS).map(|layer| engine.client.is_layer_done(&operation, layer)).collect();
    let (good, bad) = (Some(true), Some(false));
    assert_eq!(words, [good, good, bad, bad, bad]);
    assert_eq!(engine.client.is_done(&operation), bad);
    assert!(engine.holds(0, &restored, byte) && engine.holds(1, &restored, byte));
    // Of a lease that is gone no layer is good.
    let operation = engine.restore(&lease, &restored);
    assert_eq!(engine.next().code, Code::UnknownLease);
    for layer in 0..LAYERS {
        assert_eq!(engine.client.is_layer_done(&operation, layer), bad);
    }
}

/// Goal: what this Manager cannot do is refused by name.
#[test]
fn layers_without_words_and_gpus_without_cuda_are_refused() {
    let manager = setup!().flag("--device", "host").start();
    let mut engine = Layered::attach(&manager);
    let file = &engine.files[0];
    let memory = engine.client.register_memfd(file, PAGE).unwrap();
    let whole = Segment { length: PAGE, stride: PAGE, ..segment(memory, LAYERS) };
    let layout = RegionLayout { scope: engine.scope, pages: 1, segments: vec![whole] };
    let refused = engine.client.register_region(&layout);
    let Err(RegisterError::Refused { refusal, message }) = refused else { panic!("{refused:?}") };
    assert_eq!(refusal, Refusal::BadMessage);
    assert!(message.contains("layer 5") && message.contains("5 done words"), "{message}");

    let (gpu, handle) = (HexBytes([1; 16]), HexBytes([2; 64]));
    let memory = engine.client.register_cuda_memory(gpu, handle, 0, PAGE).map(drop);
    let events = engine.client.register_events(gpu, &[handle]).map(drop);
    for refused in [memory, events] {
        let Err(RegisterError::Refused { refusal, message }) = refused else { panic!() };
        assert_eq!(refusal, Refusal::UnsupportedMemory);
        assert!(message.contains("without CUDA") && message.contains("--device"), "{message}");
    }
    let fence = SaveOptions { fence: Some(0), ..SaveOptions::default() };
    let saved = blocks(&hashes(1, 0..1), 0);
    engine.client.save_chains(&engine.region, &[(&saved).into()], fence).unwrap();
    assert_eq!(engine.next().code, Code::BadFence);
}
