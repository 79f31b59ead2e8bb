//! Which memory of a GPU can be registered, and whose bytes it then is.

use std::time::{Duration, Instant};

use orbitkv_benches::gpu::{Buffer, Device, PlacedPages, Stream, VirtualMemory, free_bytes};
use orbitkv_engine::cuda::{CudaError, EventPool};
use orbitkv_engine::{
    Block, Client, Connect, Deadline, QueryMode, Refusal, RegionLayout, RegisterError,
    RestoreOptions, SaveOptions, Segment, Status,
};
use orbitkv_shm_protocol::bootstrap::message::{HexBytes, MemorySpec};
use orbitkv_tests::engine::{hashes, namespace};
use orbitkv_tests::manager::PATIENCE;
use orbitkv_tests::setup;

use crate::engine::{GpuEngine, PAGE, Pages, Shape, alone, blocks, content, counter, manager};

const MIB: u64 = 1 << 20;

/// Goal: views of one allocation keep their place in it, and nothing around them is touched. Method:
/// four views at 0, 16, 32 and 48 MiB, each registered by its own address, saved and restored in
/// place; the bytes between hold a mark.
#[test]
fn gpu_01_views_come_back_in_place() {
    const VIEW: u64 = 8 * MIB;
    const MARK: u8 = 0x5c;
    let _alone = alone();
    let manager = manager(setup!());
    let device = Device::open(0).unwrap();
    let stream = Stream::new().unwrap();
    let whole = Buffer::new(64 * MIB).unwrap();
    whole.set(MARK).unwrap();
    let mut client = Connect::new(manager.socket()).timeout(PATIENCE).connect().unwrap();
    let mut events = EventPool::new(&device.gpu, 4).unwrap();
    events.register(&mut client).unwrap();
    let scope = client.define_namespace(&namespace("gpu-01", VIEW)).unwrap();
    let starts = [0, 16, 32, 48].map(|mib| whole.address() + mib * MIB);
    let views = starts.map(|start| {
        let memory = client.register_cuda(&device.gpu.export(start, VIEW).unwrap()).unwrap();
        let segment = Segment { memory, offset: 0, stride: VIEW, length: VIEW, layer: 0 };
        let layout = RegionLayout { scope, pages: 1, segments: vec![segment] };
        let region = client.register_region(&layout).unwrap();
        (region, PlacedPages::new(&[start], &[0], VIEW, VIEW).unwrap())
    });
    let hash = |at: usize| hashes(at as u64 + 1, 0..1)[0];
    for (at, (region, placed)) in views.iter().enumerate() {
        device.kernels.fill(&stream, placed, content(at as u64 + 1)).unwrap();
        let fence = events.take().unwrap();
        // SAFETY: the stream lives to the end of the test.
        unsafe { events.record(fence, stream.raw()) }.unwrap();
        let block = [Block { hash: hash(at), page: 0 }];
        let options = SaveOptions { fence: Some(fence), ..SaveOptions::default() };
        client.save_chains(region, &[(&block).into()], options).unwrap();
        assert_eq!(end(&mut client), (Status::Ok, 1));
    }
    whole.set(MARK).unwrap();
    let wrong = Buffer::new(8).unwrap();
    wrong.set(0).unwrap();
    for (at, (region, placed)) in views.iter().enumerate() {
        client.query(&scope, &[hash(at)], QueryMode::Demand, Deadline::DEFAULT).unwrap();
        let lease = client.wait(PATIENCE).unwrap().unwrap().lease.unwrap();
        let block = [Block { hash: hash(at), page: 0 }];
        client.restore(&lease, 0, region, &block, RestoreOptions::default()).unwrap();
        assert_eq!(end(&mut client), (Status::Ok, 1));
        device.kernels.compare(&stream, placed, content(at as u64 + 1), 0..1, &wrong).unwrap();
    }
    stream.wait().unwrap();
    assert_eq!(counter(&wrong), 0, "a view has another's bytes");
    let bytes = whole.read((64 * MIB) as usize).unwrap();
    for gap in bytes.chunks_exact((16 * MIB) as usize).map(|part| &part[VIEW as usize..]) {
        assert!(gap.iter().all(|byte| *byte == MARK), "a byte between two views has changed");
    }
}

fn end(client: &mut Client) -> (Status, u32) {
    let ended = client.wait(PATIENCE).unwrap().expect("an operation ends in time");
    (ended.status, ended.pages)
}

/// Goal: memory of the virtual memory API is refused by name and leaves no error behind.
#[test]
fn gpu_03_expandable_segments_are_refused_by_name() {
    let _alone = alone();
    let manager = manager(setup!());
    let mut engine = GpuEngine::attach(&manager.socket(), "gpu-03", 4, Shape::Contiguous);
    let memory = VirtualMemory::new(0, 4 * MIB).unwrap();
    let refused = engine.device.gpu.export(memory.address(), memory.bytes()).unwrap_err();
    assert!(matches!(refused, CudaError::NotExportable { .. }), "{refused:?}");
    assert!(refused.to_string().contains("expandable_segments"), "{refused}");
    engine.round_trip(1);
}

/// Goal: a handle that opens nothing is refused with its cause, on memory and on events, and both
/// sides go on: no error is left behind.
#[test]
fn handles_that_open_nothing_are_refused() {
    let _alone = alone();
    let manager = manager(setup!());
    let mut engine = GpuEngine::attach(&manager.socket(), "handles", 4, Shape::Contiguous);
    let gpu = engine.device.gpu.clone();
    let stale = {
        let gone = Buffer::new(4 * MIB).unwrap();
        gpu.export(gone.address(), gone.bytes()).unwrap()
    };
    let junk = HexBytes([0xab; 64]);
    let junk_memory = MemorySpec::Cuda { gpu: gpu.id(), handle: junk, offset: 0, bytes: MIB };
    let no_gpu = MemorySpec::Cuda { gpu: HexBytes([7; 16]), handle: junk, offset: 0, bytes: MIB };
    let no_such_gpu = HexBytes([7; 16]).to_string();
    for (name, spec, part) in [
        ("stale", stale, "CUDA_ERROR_INVALID"),
        ("junk", junk_memory, "CUDA_ERROR_INVALID"),
        ("another GPU", no_gpu, &no_such_gpu[..8]),
    ] {
        let refused = engine.client.register_cuda(&spec).unwrap_err();
        let RegisterError::Refused { refusal, message } = refused else {
            panic!("{name}: {refused:?}")
        };
        assert_eq!(refusal, Refusal::UnsupportedMemory, "{name}: {message}");
        assert!(message.contains(part), "{name}: {message}");
        engine.round_trip(1);
    }
    let refused = engine.client.register_events(gpu.id(), &[junk]).unwrap_err();
    let RegisterError::Refused { message, .. } = refused else { panic!("{refused:?}") };
    assert!(!message.is_empty());
    engine.round_trip(1);
}

/// Goal: bytes beyond the end of an allocation cannot be offered, neither by an honest engine nor by
/// one that says what is not so.
#[test]
fn bytes_beyond_an_allocation_are_refused() {
    let _alone = alone();
    let manager = manager(setup!());
    let mut engine = GpuEngine::attach(&manager.socket(), "beyond", 4, Shape::Contiguous);
    let gpu = engine.device.gpu.clone();
    let buffer = Buffer::new(4 * MIB).unwrap();
    let refused = gpu.export(buffer.address() + MIB, 4 * MIB).unwrap_err();
    assert!(matches!(refused, CudaError::OutOfAllocation { .. }), "{refused:?}");
    let MemorySpec::Cuda { gpu, handle, .. } =
        gpu.export(buffer.address(), buffer.bytes()).unwrap()
    else {
        panic!("memory of a GPU")
    };
    let lie = MemorySpec::Cuda { gpu, handle, offset: MIB, bytes: 1 << 40 };
    let refused = engine.client.register_cuda(&lie).unwrap_err();
    assert!(matches!(refused, RegisterError::Refused { .. }), "{refused:?}");
    engine.round_trip(1);
}

/// Goal: pages of one session may be re-allocated: the new address is used, the old region is
/// refused, and nothing is leaked by ten such cycles (engine sleep and wake). Method: the old memory
/// is released with its region; the new is made before the old is freed, so that it lies elsewhere.
/// What the first cycle leaves is not looked at: the Manager's context comes with its first engine.
#[test]
fn gpu_09_new_memory_takes_the_place_of_old() {
    const PAGES: u32 = 100;
    const CYCLES: u64 = 10;
    const LEAK_MAX: u64 = 50 * MIB;
    let _alone = alone();
    let manager = manager(setup!());
    let shape = Shape::Contiguous;
    let all: Vec<u32> = (0..PAGES).collect();
    let mut engine = GpuEngine::attach(&manager.socket(), "gpu-09", PAGES, shape);
    engine.fill(&all, content(1));
    engine.save(&blocks(1, &all));
    // Each cycle but the first leaves 64 MiB if anybody keeps the old memory.
    let ballast = (64 * MIB).div_ceil(PAGE) as u32;
    let mut before = 0;
    for cycle in 0..CYCLES {
        let old = engine.region;
        engine.unregister(old);
        engine.client.release_memory(engine.memory).unwrap();
        let pages = Pages::new(PAGES + ballast, PAGE, shape);
        assert_ne!(pages.buffer.address(), engine.pages.buffer.address());
        (engine.memory, engine.region) = engine.register(&pages);
        engine.pages = pages;
        let new = std::mem::replace(&mut engine.region, old);
        let fence = engine.fence();
        let save = engine.begin_save(&blocks(2, &[0]), Some(fence));
        let refused = engine.end(save);
        assert_eq!(refused.status, Status::Error, "the old region: {refused:?}");
        engine.events.give_back(fence);
        engine.region = new;
        let _restored = engine.restore(&blocks(1, &all));
        engine.check(&all, content(1));
        if cycle == 0 {
            before = free_bytes().unwrap();
        }
        // The Manager unmaps it soon, not at once.
        let end = Instant::now() + PATIENCE;
        loop {
            let leaked = before.saturating_sub(free_bytes().unwrap());
            if leaked <= LEAK_MAX {
                break;
            }
            assert!(Instant::now() < end, "{leaked} bytes of the GPU are gone in cycle {cycle}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}
