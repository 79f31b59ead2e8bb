//! What the thread of a GPU does when things go wrong, on a twin that fails as told.

use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use orbitkv_shm_protocol::bootstrap::message::{MemorySpec, RegionSpec, SegmentSpec};
use orbitkv_shm_protocol::telemetry::CopyMethod;
use rustix::fs::MemfdFlags;
use rustix::process::{Pid, PidfdFlags, getpid, pidfd_open};

use super::CudaDevice;
use super::method::{Costs, Method};
use super::table::RECTS;
use super::twin::{Methods, TwinMemory, Twins};
use crate::conformance::{Bench, EngineMemory, Rig};
use crate::core::{CopyPage, Direction, RegionKind};
use crate::device::{
    CopyError, Device, DeviceEvent, DeviceMemory, DeviceRegion, Devices, Fence, HostDevice,
    HostMemory, PeerHandle, RegionError,
};

const PAGE: u64 = 4 << 20;

/// `pages` pages of 4 MiB: a batch each.
fn region(memory: &TwinMemory, pages: u32) -> Arc<DeviceRegion> {
    let segments = vec![SegmentSpec { memory: 0, offset: 0, stride: PAGE, length: PAGE, layer: 0 }];
    let spec = RegionSpec { scope: 0, pages, segments };
    Arc::new(DeviceRegion::new(&spec, PAGE, |_| Some(memory.handle())).expect("layout"))
}

fn bench(twins: &Twins) -> Bench<CudaDevice> {
    Bench::new(|images, notify| twins.start(images, notify))
}

/// Device pages from one image.
fn pages(bench: &mut Bench<CudaDevice>, device_pages: std::ops::Range<u32>) -> Vec<CopyPage> {
    let extent = bench.extent(PAGE as u32, true);
    device_pages.map(|device_page| CopyPage { device_page, extent }).collect()
}

#[test]
fn a_long_command_lets_a_short_one_pass() {
    let twins = Twins::default();
    let memory = TwinMemory::new(20 * PAGE);
    let region = region(&memory, 20);
    let mut bench = bench(&twins);
    let (long, short) = (pages(&mut bench, 0..19), pages(&mut bench, 19..20));
    twins.switches.held.store(true, Ordering::Release);
    let long = bench.command(Direction::Restore, &region, long);
    let short = bench.command(Direction::Restore, &region, short);
    let (long, short) = (bench.submit(long), bench.submit(short));
    twins.switches.held.store(false, Ordering::Release);
    assert_eq!([bench.end().ticket, bench.end().ticket], [short, long]);
}

#[test]
fn a_refused_copy_fails_its_command_alone_once_what_was_ordered_has_ended() {
    let twins = Twins::default();
    twins.switches.refuse_after.store(3, Ordering::Release);
    let memory = TwinMemory::new(8 * PAGE);
    let region = region(&memory, 8);
    let mut bench = bench(&twins);
    let all = pages(&mut bench, 0..8);
    let command = bench.command(Direction::Save, &region, all);
    let end = bench.run(command);
    assert!(matches!(end.error, Some(CopyError::GpuRefused { gpu: 0, .. })), "{:?}", end.error);
    assert_eq!(end.pages_done, 0, "pages of a chunk that is not whole do not count");
    assert_eq!(twins.switches.moved.load(Ordering::Acquire), 3 * PAGE);
    assert_eq!(end.moved.of(CopyMethod::Engine), (3, 3 * PAGE));
    assert!(!end.error.is_some_and(CopyError::ends_session));
    twins.switches.refuse_after.store(0, Ordering::Release);
    let again = pages(&mut bench, 3..4);
    let command = bench.command(Direction::Save, &region, again);
    let end = bench.run(command);
    assert_eq!((end.error, end.pages_done), (None, 1));
}

#[test]
fn a_gpu_that_dies_ends_everything_and_takes_nothing_more() {
    let twins = Twins::default();
    twins.switches.die_after.store(5, Ordering::Release);
    let memory = TwinMemory::new(8 * PAGE);
    let region = region(&memory, 8);
    let mut bench = bench(&twins);
    let all = pages(&mut bench, 0..8);
    let (save, restore) = (Direction::Save, Direction::Restore);
    for direction in [save, restore, save] {
        let command = bench.command(direction, &region, all.clone());
        bench.submit(command);
    }
    for _ in 0..3 {
        let error = bench.end().error;
        assert!(matches!(error, Some(CopyError::GpuLost { gpu: 0, .. })), "{error:?}");
        assert!(error.is_some_and(CopyError::ends_session));
    }
    let moved = twins.switches.moved.load(Ordering::Acquire);
    let command = bench.command(restore, &region, all);
    assert!(matches!(bench.run(command).error, Some(CopyError::GpuLost { .. })));
    assert_eq!(twins.switches.moved.load(Ordering::Acquire), moved);
    bench.device.stop();
    assert_eq!(bench.device.outstanding(), 0);
}

/// Rows of 64 bytes, one a layer: a page is a rectangle of `LAYERS` rows.
const LAYERS: u64 = 8;
const ROW: u64 = 64;
const SMALL: u64 = LAYERS * ROW;

/// What a page is full of.
fn byte_of(page: u32) -> u8 {
    (page % 251) as u8 + 1
}

/// A region of small rows over a memory of its own, filled with a byte for each page.
fn small_rows(pages: u32) -> (TwinMemory, Arc<DeviceRegion>) {
    let layer = u64::from(pages) * ROW;
    let memory = TwinMemory::new(LAYERS * layer);
    let segments = (0..LAYERS).map(|at| {
        let offset = at * layer;
        (0..pages).for_each(|page| {
            memory.write(offset + u64::from(page) * ROW, &[byte_of(page); ROW as usize]);
        });
        SegmentSpec { memory: 0, offset, stride: ROW, length: ROW, layer: 0 }
    });
    let spec = RegionSpec { scope: 0, pages, segments: segments.collect() };
    let region = DeviceRegion::new(&spec, SMALL, |_| Some(memory.handle())).expect("layout");
    (memory, Arc::new(region))
}

/// Images of `pages`, each at a distance of its own, so that each is a rectangle.
fn scattered(
    bench: &mut Bench<CudaDevice>,
    region: &Arc<DeviceRegion>,
    pages: u32,
) -> Vec<CopyPage> {
    let mut images = vec![];
    for page in 0..pages {
        if page % 2 == 1 {
            bench.extent(4096, true);
        }
        images.extend(bench.pages(region, &[page], true));
    }
    images
}

fn ordered(twins: &Twins) -> [u64; 2] {
    twins.switches.ordered.each_ref().map(|count| count.load(Ordering::Acquire))
}

/// Goal: long rows that cannot be joined go in one call, but for the last, which a store may follow.
#[test]
fn long_rows_go_by_the_batch() {
    const LONG: u64 = 64 << 10;
    let twins = Twins::only(Method::Orders);
    let memory = TwinMemory::new(40 * LONG);
    let segments = vec![SegmentSpec { memory: 0, offset: 0, stride: LONG, length: LONG, layer: 0 }];
    let spec = RegionSpec { scope: 0, pages: 40, segments };
    let region = DeviceRegion::new(&spec, LONG, |_| Some(memory.handle())).expect("layout");
    let region = Arc::new(region);
    let mut bench = bench(&twins);
    // Backwards on the GPU, forwards in the pool.
    let mut images = vec![];
    for page in (0..40).rev() {
        memory.write(u64::from(page) * LONG, &[byte_of(page); LONG as usize]);
        images.extend(bench.pages(&region, &[page], true));
    }
    for count in [40, 5, 4] {
        let images = &images[..count];
        images.iter().for_each(|page| bench.fill(page.extent, &[0; LONG as usize]));
        let command = bench.command(Direction::Save, &region, images.to_vec());
        let end = bench.run(command);
        assert_eq!((end.error, end.pages_done as usize), (None, count));
        let batched = if count > 4 { count as u64 - 1 } else { 0 };
        assert_eq!(end.moved.of(CopyMethod::Batch), (batched, batched * LONG));
        let single = count as u64 - batched;
        assert_eq!(end.moved.of(CopyMethod::Engine), (single, single * LONG));
        for page in images {
            let image = bench.image(page.extent, LONG as u32);
            assert!(image.iter().all(|found| *found == byte_of(page.device_page)));
        }
    }
}

#[test]
fn a_launch_takes_many_rectangles_and_a_refused_one_none() {
    let twins = Twins::only(Method::Kernel);
    let all = RECTS as u32 + 20;
    let (_memory, region) = small_rows(all);
    let mut bench = bench(&twins);
    let images = scattered(&mut bench, &region, all);
    let command = bench.command(Direction::Save, &region, images.clone());
    let end = bench.run(command);
    assert_eq!(end.error, None);
    assert_eq!(ordered(&twins), [0, 2]);
    let moved = twins.switches.moved.load(Ordering::Acquire);
    assert_eq!(moved, u64::from(all) * SMALL);
    let told = CopyMethod::ALL.iter().map(|method| end.moved.of(*method)).collect::<Vec<_>>();
    assert_eq!(told, [(0, 0), (0, 0), (0, 0), (0, 0), (2, moved)]);

    images.iter().for_each(|page| bench.fill(page.extent, &[0; SMALL as usize]));
    twins.switches.refuse_after.store(3, Ordering::Release);
    let command = bench.command(Direction::Save, &region, images.clone());
    let end = bench.run(command);
    assert!(matches!(end.error, Some(CopyError::GpuRefused { gpu: 0, .. })), "{:?}", end.error);
    assert!(end.pages_done as usize <= RECTS, "{}", end.pages_done);
    assert_eq!(ordered(&twins), [0, 4]);
    assert_eq!(twins.switches.moved.load(Ordering::Acquire), moved + RECTS as u64 * SMALL);
    for (at, page) in images.iter().enumerate() {
        let byte = if at < RECTS { byte_of(page.device_page) } else { 0 };
        let image = bench.image(page.extent, SMALL as u32);
        assert!(image.iter().all(|found| *found == byte), "image {at}");
    }
    twins.switches.refuse_after.store(0, Ordering::Release);
    let command = bench.command(Direction::Save, &region, images);
    assert_eq!(bench.run(command).error, None);
}

#[test]
fn a_gpu_that_dies_in_a_kernel_is_lost() {
    let twins = Twins::only(Method::Kernel);
    twins.switches.die_after.store(1, Ordering::Release);
    let all = 3 * RECTS as u32;
    let (_memory, region) = small_rows(all);
    let mut bench = bench(&twins);
    let images = scattered(&mut bench, &region, all);
    let command = bench.command(Direction::Save, &region, images);
    let error = bench.run(command).error;
    assert!(matches!(error, Some(CopyError::GpuLost { gpu: 0, .. })), "{error:?}");
    assert_eq!(twins.switches.moved.load(Ordering::Acquire), RECTS as u64 * SMALL);
}

#[test]
fn a_busy_gpu_is_left_to_its_engine_until_it_is_free_again() {
    // The kernel always looks better, by times that a slow machine does not blur.
    let (order_ns, launch_ns) = (1_000_000_000, 20_000_000);
    let costs = Costs { order_ns, launch_ns, ..Costs::OF_H200 };
    let twins = Twins { methods: Methods::Chosen(costs), ..Twins::default() };
    let (_memory, region) = small_rows(16);
    let mut bench = bench(&twins);
    let images = scattered(&mut bench, &region, 16);
    let mut run_until_three_go_by = |method: Method| {
        let (start, mut in_a_row) = (Instant::now(), 0);
        while in_a_row < 3 {
            let before = ordered(&twins)[method as usize];
            let command = bench.command(Direction::Save, &region, images.clone());
            assert_eq!(bench.run(command).error, None);
            for page in &images {
                let image = bench.image(page.extent, SMALL as u32);
                assert!(image.iter().all(|found| *found == byte_of(page.device_page)));
                bench.fill(page.extent, &[0; SMALL as usize]);
            }
            in_a_row = if ordered(&twins)[method as usize] > before { in_a_row + 1 } else { 0 };
            // A guard against a hang, not a measurement.
            assert!(start.elapsed() < Duration::from_secs(120), "never by {method:?}");
        }
    };
    twins.switches.kernel_wait_ms.store(200, Ordering::Release);
    run_until_three_go_by(Method::Orders);
    twins.switches.kernel_wait_ms.store(0, Ordering::Release);
    run_until_three_go_by(Method::Kernel);
}

#[test]
fn copies_without_a_mark_are_waited_for() {
    let twins = Twins::default();
    twins.switches.refuse_marks.store(true, Ordering::Release);
    twins.switches.held.store(true, Ordering::Release);
    let memory = TwinMemory::new(PAGE);
    let region = region(&memory, 1);
    let mut bench = bench(&twins);
    let one = pages(&mut bench, 0..1);
    let command = bench.command(Direction::Save, &region, one.clone());
    let first = bench.submit(command);
    let command = bench.command(Direction::Save, &region, one);
    let second = bench.submit(command);
    // The thread has seen the refusal once it refuses what comes behind; the copy stands still.
    let end = bench.end();
    assert_eq!((end.ticket, twins.switches.moved.load(Ordering::Acquire)), (second, 0));
    assert!(bench.device.poll().is_none(), "its copy may still move bytes");
    twins.switches.held.store(false, Ordering::Release);
    let end = bench.end();
    assert_eq!((end.ticket, end.pages_done), (first, 0));
    assert!(matches!(end.error, Some(CopyError::GpuLost { .. })), "{:?}", end.error);
    assert_eq!(twins.switches.moved.load(Ordering::Acquire), PAGE);
}

/// What a killed engine's event looks like from here, for ever.
#[derive(Debug)]
struct NeverPasses;

impl DeviceEvent for NeverPasses {
    fn has_passed(&self) -> Result<bool, CopyError> {
        Ok(false)
    }
}

#[test]
fn a_killed_engines_fence_ends_its_copy_and_nobody_elses() {
    let twins = Twins::default();
    let mut child = Command::new("sleep").arg("1000").stdin(Stdio::null()).spawn().expect("child");
    let pid = Pid::from_child(&child);
    let pidfd = Arc::new(pidfd_open(pid, PidfdFlags::empty()).expect("pidfd"));
    let peer = PeerHandle { pid: pid.as_raw_nonzero().get(), pidfd };
    let (theirs, ours) = (TwinMemory::of_peer(2 * PAGE, peer.clone()), TwinMemory::new(2 * PAGE));
    let (their_region, our_region) = (region(&theirs, 2), region(&ours, 2));
    let mut bench = bench(&twins);
    let both = pages(&mut bench, 0..2);
    let until = Instant::now() + Duration::from_secs(1000);
    let mut fenced = bench.command(Direction::Save, &their_region, both.clone());
    fenced.fence = Some(Fence { event: Arc::new(NeverPasses), index: 4, until });
    let fenced = bench.submit(fenced);
    let command = bench.command(Direction::Save, &our_region, both);
    let free = bench.submit(command);
    let end = bench.end();
    assert_eq!((end.ticket, end.error), (free, None));
    assert!(bench.device.poll().is_none(), "the engine lives, and its fence has not passed");
    child.kill().expect("kill");
    let end = bench.end();
    assert_eq!((end.ticket, end.error), (fenced, Some(CopyError::PeerExited { pid: peer.pid })));
    assert_eq!(end.pages_done, 0);
    child.wait().expect("wait");
    assert_eq!(twins.switches.moved.load(Ordering::Acquire), 2 * PAGE);
}

#[derive(Debug)]
struct Broken;

impl DeviceEvent for Broken {
    fn has_passed(&self) -> Result<bool, CopyError> {
        Err(CopyError::BrokenFence { fence: 0, code: 700 })
    }
}

/// Goal: a lost GPU is not taken for an engine's bad event. Method: the same event that cannot be
/// asked, with a GPU that lives and with one that is dead.
#[test]
fn a_fence_that_breaks_with_the_gpu_is_no_fault_of_the_engine() {
    for dead in [false, true] {
        let twins = Twins::default();
        let memory = TwinMemory::new(PAGE);
        let region = region(&memory, 1);
        let mut bench = bench(&twins);
        let page = pages(&mut bench, 0..1);
        let mut fenced = bench.command(Direction::Save, &region, page);
        let until = Instant::now() + Duration::from_secs(1000);
        fenced.fence = Some(Fence { event: Arc::new(Broken), index: 4, until });
        twins.switches.dead.store(dead, Ordering::Release);
        let error = bench.run(fenced).error;
        let expected = match dead {
            false => matches!(error, Some(CopyError::BrokenFence { fence: 4, code: 700 })),
            true => matches!(error, Some(CopyError::GpuLost { gpu: 0, .. })),
        };
        assert!(expected, "dead: {dead}, {error:?}");
    }
}

fn host_memory(bytes: u64) -> DeviceMemory {
    let memfd = rustix::fs::memfd_create("engine", MemfdFlags::CLOEXEC).expect("memfd");
    rustix::fs::ftruncate(&memfd, bytes).expect("ftruncate");
    let pidfd = Arc::new(pidfd_open(getpid(), PidfdFlags::empty()).expect("pidfd"));
    let peer = PeerHandle { pid: getpid().as_raw_nonzero().get(), pidfd };
    let memory = HostMemory::import(&MemorySpec::Memfd { bytes }, Some(memfd), &peer);
    DeviceMemory::Host(memory.expect("import"))
}

fn two_memories(
    first: Arc<DeviceMemory>,
    second: Arc<DeviceMemory>,
) -> Result<DeviceRegion, RegionError> {
    let half = |memory| SegmentSpec { memory, offset: 0, stride: 4096, length: 4096, layer: 0 };
    let spec = RegionSpec { scope: 0, pages: 1, segments: vec![half(0), half(1)] };
    let memories = [first, second];
    DeviceRegion::new(&spec, 8192, |memory| memories.get(memory as usize).cloned())
}

#[test]
fn a_region_lies_on_one_device_and_its_commands_go_there() {
    let twins = Twins::default();
    let (gpu, host) = (TwinMemory::new(8192), Arc::new(host_memory(8192)));
    let mixed = two_memories(gpu.handle(), Arc::clone(&host)).expect_err("two devices");
    assert_eq!(mixed, RegionError::MixedDevices { first: 0, second: 1 });
    assert!(mixed.to_string().contains("memories 0 and 1"), "{mixed}");
    let on_gpu = Arc::new(two_memories(gpu.handle(), gpu.handle()).expect("one device"));
    let on_host = Arc::new(two_memories(Arc::clone(&host), host).expect("one device"));
    assert_eq!((on_gpu.kind(), on_host.kind()), (RegionKind::Gpu, RegionKind::Host));
    gpu.write(0, &[7; 8192]);
    let mut bench = Bench::new(|pool, notify| {
        let host = HostDevice::start(pool.clone(), notify.clone(), Duration::ZERO).expect("host");
        Devices::new(host, Some(twins.start(pool, notify)))
    });
    for region in [&on_gpu, &on_host] {
        let pages = bench.pages(region, &[0], true);
        let command = bench.command(Direction::Save, region, pages.clone());
        assert_eq!((bench.run(command).error, bench.device.outstanding()), (None, 0));
        let byte = if Arc::ptr_eq(region, &on_gpu) { 7 } else { 0 };
        assert!(bench.image(pages[0].extent, 8192).iter().all(|found| *found == byte));
    }
    assert_eq!(twins.switches.moved.load(Ordering::Acquire), 8192);
    bench.device.stop();
}
