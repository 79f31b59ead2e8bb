//! Host memory in its three ways: the common suite, and what an engine can do to each.

use std::cell::Cell;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use orbitkv_manager::core::{CopyFault, Direction};
use orbitkv_manager::device::{
    CopyError, Device, DeviceMemory, DeviceRegion, DoneWord, HostDevice, HostMemory, ImportError,
    MemoryWay, PeerHandle,
};
use orbitkv_manager::pool::DramPool;
use orbitkv_shm_protocol::bootstrap::message::{MemorySpec, Refusal, RegionSpec, SegmentSpec};
use orbitkv_shm_protocol::doorbell::ControlRinger;
use orbitkv_shm_protocol::spin::WINDOW_UNMEASURED;
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::process::{PidfdFlags, getpid, pidfd_open};

use crate::child::{ChildMemory, Engine};
use crate::conformance::{Bench, EngineMemory, Rig, conformance, done_words, pattern};

fn start(pool: Arc<DramPool>, notify: ControlRinger) -> HostDevice {
    HostDevice::start(pool, notify, WINDOW_UNMEASURED).expect("threads")
}

fn this_process() -> PeerHandle {
    let pid = getpid();
    let pidfd = pidfd_open(pid, PidfdFlags::empty()).expect("pidfd");
    PeerHandle { pid: pid.as_raw_nonzero().get(), pidfd: Arc::new(pidfd) }
}

fn memfd(bytes: u64) -> OwnedFd {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let memfd = rustix::fs::memfd_create("engine", flags).expect("memfd");
    rustix::fs::ftruncate(&memfd, bytes).expect("ftruncate");
    memfd
}

fn seal(memfd: &OwnedFd, seals: SealFlags) {
    rustix::fs::fcntl_add_seals(memfd, seals).expect("seal");
}

fn copy_of(memfd: &OwnedFd) -> OwnedFd {
    memfd.try_clone().expect("dup")
}

fn import_memfd(memfd: &OwnedFd, bytes: u64) -> Result<HostMemory, ImportError> {
    HostMemory::import(&MemorySpec::Memfd { bytes }, Some(copy_of(memfd)), &this_process())
}

struct Memfds {
    sealed: bool,
}

struct MemfdMemory {
    file: std::fs::File,
    handle: Arc<DeviceMemory>,
}

impl Rig for Memfds {
    type Device = HostDevice;

    fn start(&self, pool: Arc<DramPool>, notify: ControlRinger) -> HostDevice {
        start(pool, notify)
    }

    fn memory(&self, bytes: u64) -> Box<dyn EngineMemory> {
        let memfd = memfd(bytes);
        if self.sealed {
            seal(&memfd, SealFlags::SHRINK);
        }
        let memory = import_memfd(&memfd, bytes).expect("import");
        let way = if self.sealed { MemoryWay::Mapped } else { MemoryWay::Descriptor };
        assert_eq!((memory.way(), memory.bytes()), (way, bytes));
        let handle = Arc::new(DeviceMemory::Host(memory));
        Box::new(MemfdMemory { file: memfd.into(), handle })
    }
}

impl EngineMemory for MemfdMemory {
    fn handle(&self) -> Arc<DeviceMemory> {
        Arc::clone(&self.handle)
    }

    fn write(&self, offset: u64, bytes: &[u8]) {
        self.file.write_all_at(bytes, offset).expect("write");
    }

    fn read(&self, offset: u64, bytes: usize) -> Vec<u8> {
        let mut copy = vec![0; bytes];
        self.file.read_exact_at(&mut copy, offset).expect("read");
        copy
    }
}

/// All memories lie in one child, like the layers of one engine.
struct Children {
    engine: Arc<Engine>,
    count: Cell<u64>,
}

struct ProcessMemory {
    engine: Arc<Engine>,
    memory: ChildMemory,
    handle: Arc<DeviceMemory>,
}

impl Children {
    fn new() -> Self {
        Self { engine: Arc::new(Engine::spawn()), count: Cell::new(0) }
    }
}

impl Rig for Children {
    type Device = HostDevice;

    fn start(&self, pool: Arc<DramPool>, notify: ControlRinger) -> HostDevice {
        start(pool, notify)
    }

    fn memory(&self, bytes: u64) -> Box<dyn EngineMemory> {
        let engine = Arc::clone(&self.engine);
        let memory = engine.allocate(self.count.replace(self.count.get() + 1), bytes);
        let imported = HostMemory::import(&memory.spec, None, &engine.peer).expect("import");
        assert_eq!((imported.way(), imported.bytes()), (MemoryWay::Process, bytes));
        let handle = Arc::new(DeviceMemory::Host(imported));
        Box::new(ProcessMemory { engine, memory, handle })
    }
}

impl EngineMemory for ProcessMemory {
    fn handle(&self) -> Arc<DeviceMemory> {
        Arc::clone(&self.handle)
    }

    fn write(&self, offset: u64, bytes: &[u8]) {
        self.engine.write(&self.memory, offset, bytes);
    }

    fn read(&self, offset: u64, bytes: usize) -> Vec<u8> {
        self.engine.read(&self.memory, offset, bytes)
    }
}

conformance!(mapped, Memfds { sealed: true });
conformance!(descriptor, Memfds { sealed: false });
conformance!(process, Children::new());

const PAGE: u64 = 64 << 10;

/// `pages` adjoining pages of 64 KiB in one memory.
fn region(memory: HostMemory, pages: u32) -> Arc<DeviceRegion> {
    let segment = SegmentSpec { memory: 0, offset: 0, stride: PAGE, length: PAGE, layer: 0 };
    let spec = RegionSpec { scope: 0, pages, segments: vec![segment] };
    let memory = Arc::new(DeviceMemory::Host(memory));
    Arc::new(DeviceRegion::new(&spec, PAGE, |_| Some(Arc::clone(&memory))).expect("region"))
}

/// One copy of all pages, in either direction, and how it ended.
fn copy_all(
    bench: &mut Bench<HostDevice>,
    region: &Arc<DeviceRegion>,
    direction: Direction,
) -> (u32, Option<CopyError>) {
    let all: Vec<u32> = (0..region.layout().pages()).collect();
    let pages = bench.pages(region, &all, false);
    let command = bench.command(direction, region, pages);
    let end = bench.run(command);
    if direction == Direction::Save {
        assert_eq!(end.checksums.len(), end.pages_done as usize);
    }
    (end.pages_done, end.error)
}

const BOTH: [Direction; 2] = [Direction::Save, Direction::Restore];

#[test]
fn memfds_that_cannot_be_used_are_refused_by_cause() {
    let good = memfd(8192);
    assert_eq!(import_memfd(&good, 0).expect_err("empty"), ImportError::BadRange);
    assert_eq!(
        import_memfd(&good, 8193).expect_err("short"),
        ImportError::TooShort { size_bytes: 8192, bytes: 8193 }
    );
    assert!(import_memfd(&good, u64::MAX).is_err());
    assert_eq!(
        HostMemory::import(&MemorySpec::Memfd { bytes: 1 }, None, &this_process())
            .expect_err("no descriptor")
            .refusal(),
        Refusal::BadMessage
    );
    for seals in [SealFlags::WRITE, SealFlags::FUTURE_WRITE | SealFlags::SHRINK] {
        let sealed = memfd(8192);
        seal(&sealed, seals);
        assert_eq!(import_memfd(&sealed, 8192).expect_err("sealed"), ImportError::WriteSealed);
    }
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&good));
    let read_only = OwnedFd::from(std::fs::File::open(path).expect("reopen"));
    assert_eq!(import_memfd(&read_only, 8192).expect_err("mode"), ImportError::ReadOnly);
    let file = OwnedFd::from(tempfile::tempfile_in(env!("CARGO_TARGET_TMPDIR")).expect("file"));
    assert_eq!(import_memfd(&file, 1).expect_err("file"), ImportError::NotMemfd);
    let (pipe, _writer) = rustix::pipe::pipe().expect("pipe");
    assert_eq!(import_memfd(&pipe, 1).expect_err("pipe"), ImportError::NotMemfd);
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB;
    // A kernel without huge pages makes no such file, and then nobody can offer one.
    if let Ok(huge) = rustix::fs::memfd_create("huge", flags) {
        rustix::fs::ftruncate(&huge, 2 << 20).expect("ftruncate");
        assert_eq!(import_memfd(&huge, 4096).expect_err("huge"), ImportError::HugetlbMemfd);
    }
}

#[test]
fn a_cut_memfd_is_a_peer_fault_not_a_signal() {
    for direction in BOTH {
        let memfd = memfd(16 * PAGE);
        let region = region(import_memfd(&memfd, 16 * PAGE).expect("import"), 16);
        let mut bench = Bench::new(start);
        assert_eq!(copy_all(&mut bench, &region, direction), (16, None));
        rustix::fs::ftruncate(&memfd, 5 * PAGE + 1).expect("ftruncate");
        let (pages_done, error) = copy_all(&mut bench, &region, direction);
        let cut = CopyError::Truncated { size_bytes: 5 * PAGE + 1, needed_bytes: 16 * PAGE };
        assert_eq!((pages_done, error), (0, Some(cut)));
        assert_eq!((cut.fault(), cut.ends_session()), (CopyFault::Peer, false));
        // And not silently made longer again.
        assert_eq!(rustix::fs::fstat(&memfd).expect("fstat").st_size as u64, 5 * PAGE + 1);
    }
}

#[test]
fn a_memfd_cut_in_the_middle_of_copies_ends_them_cleanly() {
    let memfd = Arc::new(memfd(64 * PAGE));
    let region = region(import_memfd(&memfd, 64 * PAGE).expect("import"), 64);
    let mut bench = Bench::new(start);
    let stop = Arc::new(AtomicBool::new(false));
    let cutter = std::thread::spawn({
        let (memfd, stop) = (Arc::clone(&memfd), Arc::clone(&stop));
        move || {
            while !stop.load(Ordering::Relaxed) {
                for bytes in [0, 3 * PAGE + 5, 64 * PAGE] {
                    rustix::fs::ftruncate(&memfd, bytes).expect("ftruncate");
                    std::thread::yield_now();
                }
            }
        }
    });
    let all: Vec<u32> = (0..64).collect();
    let pages = bench.pages(&region, &all, false);
    for _ in 0..50 {
        for direction in BOTH {
            let command = bench.command(direction, &region, pages.clone());
            bench.submit(command);
        }
        for _ in BOTH {
            let end = bench.end();
            match end.error {
                None => assert_eq!(end.pages_done, 64),
                Some(error) => assert_eq!(error.fault(), CopyFault::Peer, "{error}"),
            }
        }
    }
    stop.store(true, Ordering::Relaxed);
    cutter.join().expect("cutter");
    // The fault was not sticky, nor did it cost the device its threads.
    rustix::fs::ftruncate(&memfd, 64 * PAGE).expect("ftruncate");
    for direction in BOTH {
        let command = bench.command(direction, &region, pages.clone());
        assert_eq!(bench.run(command).error, None);
    }
}

#[test]
fn holes_in_a_sealed_memfd_read_as_zeros() {
    let memfd = memfd(16 * PAGE);
    seal(&memfd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL);
    let file = std::fs::File::from(copy_of(&memfd));
    file.write_all_at(&pattern(1, 16 * PAGE as usize), 0).expect("write");
    let memory = import_memfd(&memfd, 16 * PAGE).expect("import");
    assert_eq!(memory.way(), MemoryWay::Mapped);
    let region = region(memory, 16);
    assert!(rustix::fs::ftruncate(&memfd, 0).is_err(), "the seal is what makes mapping safe");
    let hole = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(memfd.as_fd(), hole, PAGE, 2 * PAGE).expect("hole");
    let mut bench = Bench::new(start);
    let pages = bench.pages(&region, &[0, 1, 2, 3], false);
    let command = bench.command(Direction::Save, &region, pages.clone());
    assert_eq!(bench.run(command).error, None);
    let whole = pattern(1, 16 * PAGE as usize);
    let page = |number: usize| &whole[number * PAGE as usize..(number + 1) * PAGE as usize];
    for (number, copy) in pages.iter().enumerate() {
        let image = bench.image(copy.extent, PAGE as u32);
        let hole = number == 1 || number == 2;
        assert!(if hole { image.iter().all(|&byte| byte == 0) } else { image == page(number) });
    }
}

/// Goal: the word of a restore that fails half-way stays as it was. Method: K lies in a good memfd,
/// V in one that was cut, so that every page gets its K before its V fails.
#[test]
fn a_restore_that_fails_half_way_leaves_its_done_word_alone() {
    let (keys, values) = (memfd(4 * PAGE), memfd(4 * PAGE));
    let memories = [&keys, &values]
        .map(|memfd| Arc::new(DeviceMemory::Host(import_memfd(memfd, 4 * PAGE).expect("import"))));
    let segment = |memory| SegmentSpec { memory, offset: 0, stride: PAGE, length: PAGE, layer: 0 };
    let spec = RegionSpec { scope: 0, pages: 4, segments: vec![segment(0), segment(1)] };
    let region =
        DeviceRegion::new(&spec, 2 * PAGE, |memory| memories.get(memory as usize).map(Arc::clone));
    let region = Arc::new(region.expect("region"));
    rustix::fs::ftruncate(&values, PAGE).expect("ftruncate");
    let (words, reader) = done_words();
    let mut bench = Bench::new(start);
    let pages = bench.pages(&region, &[2], false);
    let image = pattern(4, 2 * PAGE as usize);
    bench.fill(pages[0].extent, &image);
    let mut command = bench.command(Direction::Restore, &region, pages);
    command.done = Some(DoneWord { words, operation_index: 3, count: 1, value: 6 });
    let end = bench.run(command);
    assert_eq!((end.fault(), end.pages_done), (Some(CopyFault::Peer), 0));
    assert_eq!(reader.load(3, 0), 0);
    let mut half = vec![0; PAGE as usize];
    std::fs::File::from(keys).read_exact_at(&mut half, 2 * PAGE).expect("read");
    assert!(half == image[..PAGE as usize], "the copy did not even begin");
}

/// Goal: the words of layers that are in place stay, the others are left alone. Method: the second of
/// three layers lies in a memfd that was cut.
#[test]
fn a_restore_by_layer_that_fails_tells_how_far_it_came() {
    let files = [4 * PAGE, 4 * PAGE, 4 * PAGE].map(memfd);
    let memories = files
        .each_ref()
        .map(|memfd| Arc::new(DeviceMemory::Host(import_memfd(memfd, 4 * PAGE).expect("import"))));
    let segment =
        |layer| SegmentSpec { memory: layer, offset: 0, stride: PAGE, length: PAGE, layer };
    let spec =
        RegionSpec { scope: 0, pages: 4, segments: vec![segment(0), segment(1), segment(2)] };
    let region =
        DeviceRegion::new(&spec, 3 * PAGE, |memory| memories.get(memory as usize).map(Arc::clone));
    let region = Arc::new(region.expect("region"));
    rustix::fs::ftruncate(&files[1], PAGE).expect("ftruncate");
    let (words, reader) = done_words();
    let mut bench = Bench::new(start);
    let pages = bench.pages(&region, &[0, 2], false);
    let mut command = bench.command(Direction::Restore, &region, pages.clone());
    command.done = Some(DoneWord { words: words.clone(), operation_index: 3, count: 3, value: 6 });
    let end = bench.run(command);
    assert_eq!((end.fault(), end.pages_done), (Some(CopyFault::Peer), 0));
    assert_eq!([0, 1, 2].map(|layer| reader.load(3, layer)), [6, 0, 0]);
    // Words that are not the region's layers are no order.
    let mut command = bench.command(Direction::Restore, &region, pages);
    command.done = Some(DoneWord { words, operation_index: 4, count: 2, value: 6 });
    assert_eq!(bench.run(command).error, Some(CopyError::BadCommand { page: 0 }));
    assert_eq!(reader.load(4, 0), 0);
}

/// A child with 16 pages, imported.
fn child_region() -> (Engine, ChildMemory, Arc<DeviceRegion>) {
    let engine = Engine::spawn();
    let memory = engine.allocate(0, 16 * PAGE);
    engine.write(&memory, 0, &pattern(3, 16 * PAGE as usize));
    let imported = HostMemory::import(&memory.spec, None, &engine.peer).expect("import");
    (engine, memory, region(imported, 16))
}

#[test]
fn a_killed_engine_is_a_peer_fault() {
    let (mut engine, _, region) = child_region();
    let mut bench = Bench::new(start);
    for direction in BOTH {
        assert_eq!(copy_all(&mut bench, &region, direction), (16, None));
    }
    let pid = engine.peer.pid;
    engine.kill();
    engine.reap();
    for direction in BOTH {
        let exited = CopyError::PeerExited { pid };
        assert_eq!(copy_all(&mut bench, &region, direction), (0, Some(exited)));
        assert_eq!((exited.fault(), exited.ends_session()), (CopyFault::Peer, true));
    }
}

#[test]
fn an_engine_killed_in_the_middle_of_copies_ends_each_exactly_once() {
    let (mut engine, _, region) = child_region();
    let mut bench = Bench::new(start);
    let pid = engine.peer.pid;
    let all: Vec<u32> = (0..16).collect();
    let mut extents = Vec::new();
    for direction in BOTH {
        extents.push((direction, bench.pages(&region, &all, false)));
    }
    for _ in 0..100 {
        for (direction, pages) in &extents {
            let command = bench.command(*direction, &region, pages.clone());
            bench.submit(command);
        }
    }
    assert_eq!(bench.end().error, None);
    engine.kill();
    for _ in 1..200 {
        let end = bench.end();
        match end.error {
            None => assert_eq!(end.pages_done, 16),
            Some(error) => assert_eq!(error, CopyError::PeerExited { pid }),
        }
    }
    assert!(bench.device.poll().is_none());
    for direction in BOTH {
        let (_, error) = copy_all(&mut bench, &region, direction);
        engine.reap();
        let again = copy_all(&mut bench, &region, direction);
        assert!(matches!(error, None | Some(CopyError::PeerExited { .. })), "{error:?}");
        assert_eq!(again, (0, Some(CopyError::PeerExited { pid })));
    }
}

#[test]
fn an_engine_that_became_another_program_ends_its_session() {
    let (engine, _, region) = child_region();
    let mut bench = Bench::new(start);
    assert_eq!(copy_all(&mut bench, &region, Direction::Save), (16, None));
    engine.exec();
    let pid = engine.peer.pid;
    assert!(engine.peer.is_alive());
    for direction in BOTH {
        let lost = CopyError::NonceLost { pid };
        assert_eq!(copy_all(&mut bench, &region, direction), (0, Some(lost)));
        assert_eq!((lost.fault(), lost.ends_session()), (CopyFault::Peer, true));
    }
}

#[test]
fn memory_that_the_engine_unmapped_is_a_peer_fault_of_a_living_session() {
    let engine = Engine::spawn();
    // Far above the size from which the allocator maps and unmaps each allocation by itself.
    let pages = 64;
    let memory = engine.allocate(0, pages * PAGE);
    let imported = HostMemory::import(&memory.spec, None, &engine.peer).expect("import");
    let region = region(imported, pages as u32);
    engine.free(&memory);
    let mut bench = Bench::new(start);
    for direction in BOTH {
        let (pages_done, error) = copy_all(&mut bench, &region, direction);
        let error = error.expect("unmapped");
        assert_eq!(pages_done, 0);
        assert!(matches!(error, CopyError::Unreachable { errno: libc::EFAULT, .. }), "{error}");
        assert_eq!((error.fault(), error.ends_session()), (CopyFault::Peer, false));
    }
}

#[test]
fn process_memory_that_cannot_be_reached_is_refused_by_cause() {
    let mut engine = Engine::spawn();
    let memory = engine.allocate(0, 8192);
    let MemorySpec::Process { address, nonce_address, nonce, .. } = memory.spec else {
        panic!("not process memory")
    };
    let pid = engine.peer.pid;
    let import = |address, bytes, nonce_address, nonce| {
        let spec = MemorySpec::Process { address, bytes, nonce_address, nonce };
        HostMemory::import(&spec, None, &engine.peer).map(|memory| memory.bytes())
    };
    assert_eq!(import(address, 8192, nonce_address, nonce), Ok(8192));
    assert_eq!(import(address, 0, nonce_address, nonce), Err(ImportError::BadRange));
    assert_eq!(import(u64::MAX, 2, nonce_address, nonce), Err(ImportError::BadRange));
    assert_eq!(import(address, u64::MAX, nonce_address, nonce), Err(ImportError::BadRange));
    assert_eq!(import(address, 1, u64::MAX - 6, nonce), Err(ImportError::BadRange));
    assert_eq!(
        import(address, 8192, nonce_address, nonce ^ 1),
        Err(ImportError::WrongNonce { pid, address: nonce_address })
    );
    let unmapped = |result| matches!(result, Err(ImportError::Unmapped { .. }));
    assert!(unmapped(import(8, 8192, nonce_address, nonce)));
    assert!(unmapped(import(address, 1 << 46, nonce_address, nonce)), "the last byte is probed");
    assert!(unmapped(import(address, 8192, 8, nonce)));
    engine.kill();
    engine.reap();
    let gone = HostMemory::import(&memory.spec, None, &engine.peer).expect_err("dead");
    assert_eq!(gone, ImportError::Exited { pid });
    assert_eq!(gone.refusal(), Refusal::UnsupportedMemory);
}

/// Environment of a Manager under another uid: what to import.
const OTHER_USER: &str = "ORBITKV_TEST_OTHER_USER";
/// Any uid that owns nothing.
const NOBODY: u32 = 65534;

/// Goal: EPERM is explained. Method: as root, a Manager without root's rights is this binary again
/// under another uid, which runs this test's first half; otherwise the engine gives up its own.
#[test]
fn a_refusal_of_the_kernel_names_what_stands_in_the_way() {
    if let Ok(words) = std::env::var(OTHER_USER) {
        let numbers: Vec<u64> =
            words.split(' ').map(|word| word.parse().expect("number")).collect();
        let [pid, address, bytes, nonce_address, nonce] = numbers[..] else { panic!("{words}") };
        let raw = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw);
        let pidfd = pidfd_open(raw.expect("pid"), PidfdFlags::empty()).expect("pidfd");
        let peer = PeerHandle { pid: pid as i32, pidfd: Arc::new(pidfd) };
        let spec = MemorySpec::Process { address, bytes, nonce_address, nonce };
        let error = HostMemory::import(&spec, None, &peer).expect_err("another user's memory");
        let expected = ImportError::OtherUser { pid: pid as i32, theirs: 0, ours: NOBODY };
        assert_eq!(error, expected);
        return;
    }
    let engine = Engine::spawn();
    let memory = engine.allocate(0, 8192);
    let pid = engine.peer.pid;
    let MemorySpec::Process { address, bytes, nonce_address, nonce } = memory.spec else {
        panic!("not process memory")
    };
    if rustix::process::geteuid().is_root() {
        // The binary's own folder may be closed to other users.
        let folder = tempfile::tempdir().expect("folder");
        let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(folder.path(), open).expect("mode");
        let binary = folder.path().join("manager");
        std::fs::copy(std::env::current_exe().expect("this binary"), &binary).expect("copy");
        let status = Command::new(binary)
            .args(["host::a_refusal_of_the_kernel_names_what_stands_in_the_way", "--exact"])
            .env(OTHER_USER, format!("{pid} {address} {bytes} {nonce_address} {nonce}"))
            .stdout(std::process::Stdio::null())
            .uid(NOBODY)
            .gid(NOBODY)
            .current_dir("/")
            .status()
            .expect("manager under another uid");
        assert!(status.success());
    } else {
        engine.become_undumpable();
        let error = HostMemory::import(&memory.spec, None, &engine.peer).expect_err("undumpable");
        assert_eq!(error, ImportError::NotDumpable { pid });
    }
}

#[test]
fn a_peer_that_is_alive_is_not_called_dead() {
    let peer = this_process();
    assert!(peer.is_alive());
    let mut engine = Engine::spawn();
    let copy = engine.peer.clone();
    assert!(copy.is_alive());
    engine.kill();
    engine.reap();
    assert!(!copy.is_alive());
}
