//! What the thread of a GPU does when things go wrong, on a twin that fails as told.

use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use orbitkv_shm_protocol::bootstrap::message::{MemorySpec, RegionSpec, SegmentSpec};
use rustix::fs::MemfdFlags;
use rustix::process::{Pid, PidfdFlags, getpid, pidfd_open};

use super::CudaDevice;
use super::twin::{TwinMemory, Twins};
use crate::conformance::{Bench, EngineMemory, Rig};
use crate::core::{CopyPage, Direction};
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
    assert!(on_gpu.needs_fence() && !on_host.needs_fence());
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
