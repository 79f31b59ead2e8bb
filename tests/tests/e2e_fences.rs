//! Events that copies wait for, from the client's call to the device and back, with events that pass
//! when the test says so.

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use orbitkv_engine::{
    Chain, Client, Code, Completion, Connect, Deadline, HexBytes, IpcHandle, Operation, QueryMode,
    Region, RegionLayout, RestoreOptions, SaveOptions, Scope, Segment, Status,
};
use orbitkv_manager::clock::Clock;
use orbitkv_manager::config::{ServeArgs, WaitMode};
use orbitkv_manager::core::{Core, CoreConfig};
use orbitkv_manager::device::{CopyError, DeviceEvent, DeviceMemory, DeviceRegion, HostDevice};
use orbitkv_manager::endpoint::{
    Claim, Endpoint, ImportRefusal, Importer, MemoryImporter, Peer, Settings, Stopper,
};
use orbitkv_manager::pool::{DramPool, HugePages, PoolConfig};
use orbitkv_manager::service::{Service, ServiceParts};
use orbitkv_manager::telemetry::{Telemetry, TelemetryIdentity};
use orbitkv_shm_protocol::bootstrap::message::{GpuId, MemorySpec, RegionSpec};
use orbitkv_shm_protocol::doorbell::ControlBell;
use orbitkv_shm_protocol::ids::Epoch;
use orbitkv_shm_protocol::segment::DoneWords;
use orbitkv_tests::engine::{blocks, hashes, namespace};
use orbitkv_tests::manager::PATIENCE;
use rustix::fs::MemfdFlags;

const PAGE: u64 = 8192;
const PAGES: u32 = 64;

/// An event of the test.
#[derive(Debug, Default)]
struct Signal {
    passed: AtomicBool,
    broken: AtomicBool,
    asked: AtomicBool,
}

impl DeviceEvent for Signal {
    fn has_passed(&self) -> Result<bool, CopyError> {
        self.asked.store(true, Ordering::Release);
        if self.broken.load(Ordering::Acquire) {
            return Err(CopyError::BrokenFence { fence: 0, code: 700 });
        }
        Ok(self.passed.load(Ordering::Acquire))
    }
}

/// Every event that was imported, in order: owned by the Manager.
type Signals = Arc<Mutex<Vec<Weak<Signal>>>>;

/// Imports host memory, and events that pass when the test says so.
struct TestImporter {
    memory: MemoryImporter,
    signals: Signals,
}

impl Importer for TestImporter {
    type Memory = DeviceMemory;
    type Region = DeviceRegion;

    fn import(
        &mut self,
        spec: &MemorySpec,
        descriptor: Option<OwnedFd>,
        peer: &Peer,
        done: &DoneWords,
    ) -> Result<DeviceMemory, ImportRefusal> {
        self.memory.import(spec, descriptor, peer, done)
    }

    fn import_events(
        &mut self,
        _gpu: GpuId,
        handles: &[IpcHandle],
        _peer: &Peer,
    ) -> Result<Vec<Arc<dyn DeviceEvent>>, ImportRefusal> {
        let mut signals = self.signals.lock().unwrap();
        let event = |_| {
            let signal = Arc::new(Signal::default());
            signals.push(Arc::downgrade(&signal));
            signal as Arc<dyn DeviceEvent>
        };
        Ok(handles.iter().map(event).collect())
    }

    fn lay_out(
        &mut self,
        memories: &HashMap<u32, Arc<DeviceMemory>>,
        spec: &RegionSpec,
        page_bytes: u64,
    ) -> Result<DeviceRegion, ImportRefusal> {
        self.memory.lay_out(memories, spec, page_bytes)
    }
}

/// Everything that `serve` joins, with the reactor in a thread of this process.
struct Manager {
    socket: PathBuf,
    signals: Signals,
    stopper: Stopper,
    thread: Option<JoinHandle<bool>>,
    _folder: tempfile::TempDir,
}

impl Manager {
    fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("m.sock");
        let args = ServeArgs {
            socket: Some(socket.clone()),
            dram: Some("16MiB".into()),
            huge_pages: Some("off".into()),
            ..ServeArgs::default()
        };
        let config = orbitkv_manager::serve::load(&args).unwrap();
        let (clock, bell, epoch) = (Clock::monotonic(), ControlBell::new(), Epoch(7));
        let bytes = config.dram.capacity_bytes;
        let pool = PoolConfig { bytes, huge_pages: HugePages::Off, prefault_threads: 0 };
        let pool = Arc::new(DramPool::allocate(pool).unwrap());
        let claim = Claim::take(&config.socket).unwrap();
        let telemetry = Telemetry::create(&TelemetryIdentity {
            socket: socket.clone(),
            epoch,
            version: "test".to_owned(),
            started_ns: clock.now(),
        });
        let signals = Signals::default();
        let importer =
            TestImporter { memory: MemoryImporter::default(), signals: Arc::clone(&signals) };
        let mut endpoint = Endpoint::start(
            Settings::new(&config, epoch, Duration::ZERO),
            claim.listen().unwrap(),
            importer,
            clock.clone(),
            bell.ringer(),
        )
        .unwrap();
        endpoint.publish().unwrap();
        let stopper = endpoint.stopper();
        let arena_bytes = pool.arena_bytes();
        let parts = ServiceParts {
            core: Core::new(CoreConfig { arena_bytes, ..CoreConfig::with_dram(bytes) }),
            device: Box::new(HostDevice::start(pool, bell.ringer(), Duration::ZERO).unwrap()),
            storage: None,
            endpoint,
            telemetry: telemetry.unwrap(),
            bell,
            clock,
            wait: WaitMode::Adaptive,
            spin_window: Duration::ZERO,
            stop_timeout: Duration::from_secs(5),
        };
        let thread = Some(std::thread::spawn(move || Service::new(parts).run()));
        Self { socket, signals, stopper, thread, _folder: folder }
    }

    /// An event while its session lives.
    fn signal(&self, number: usize) -> Arc<Signal> {
        self.signals.lock().unwrap()[number].upgrade().expect("an event that is open")
    }

    fn open_events(&self) -> usize {
        let signals = self.signals.lock().unwrap();
        signals.iter().filter(|signal| signal.strong_count() > 0).count()
    }
}

impl Drop for Manager {
    fn drop(&mut self) {
        self.stopper.stop();
        let ended = self.thread.take().map(JoinHandle::join);
        let clean = matches!(ended, Some(Ok(true)));
        assert!(clean || std::thread::panicking(), "the Manager did not stop in order");
    }
}

/// Until it is so.
fn settle(what: &str, is_so: impl Fn() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < PATIENCE, "never: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

struct Engine {
    client: Client,
    scope: Scope,
    region: Region,
    file: File,
}

impl Engine {
    fn attach(socket: &Path) -> Self {
        let mut client = Connect::new(socket).connect().unwrap();
        let scope = client.define_namespace(&namespace("fences", PAGE)).unwrap();
        let file = File::from(rustix::fs::memfd_create("engine", MemfdFlags::CLOEXEC).unwrap());
        let bytes = u64::from(PAGES) * PAGE;
        file.set_len(bytes).unwrap();
        let memory = client.register_memfd(&file, bytes).unwrap();
        let segment = Segment { memory, offset: 0, stride: PAGE, length: PAGE, layer: 0 };
        let region = RegionLayout { scope, pages: PAGES, segments: vec![segment] };
        let region = client.register_region(&region).unwrap();
        Self { client, scope, region, file }
    }

    fn events(&mut self, count: usize) -> u32 {
        self.client.register_events(HexBytes([1; 16]), &vec![HexBytes([2; 64]); count]).unwrap()
    }

    fn fill(&self, byte: u8) {
        self.file.write_all_at(&vec![byte; (4 * PAGE) as usize], 0).unwrap();
    }

    /// Saves four pages of a sequence when an event has passed.
    fn save(&mut self, sequence: u64, fence: Option<u32>, deadline: Deadline) -> Operation {
        let pages = blocks(&hashes(sequence, 0..4), 0);
        let options = SaveOptions { fence, deadline };
        let saved = self.client.save_chains(&self.region, &[Chain::from(&pages)], options);
        self.client.submit().unwrap();
        saved.unwrap()
    }

    fn next(&mut self) -> Completion {
        self.client.wait(PATIENCE).unwrap().expect("an answer in time")
    }

    fn is_silent(&mut self) -> bool {
        self.client.poll().unwrap().is_none()
    }

    /// What a restore of four pages brings.
    fn restored(&mut self, sequence: u64, fence: Option<u32>) -> Vec<u8> {
        let pages = hashes(sequence, 0..4);
        self.client.query(&self.scope, &pages, QueryMode::Demand, Deadline::DEFAULT).unwrap();
        let lease = self.next().lease.expect("a hit");
        let to = blocks(&pages, 8);
        let options = RestoreOptions { fence, ..RestoreOptions::default() };
        self.client.restore(&lease, 0, &self.region, &to, options).unwrap();
        assert_eq!(self.next().status, Status::Ok);
        let mut bytes = vec![0; (4 * PAGE) as usize];
        self.file.read_exact_at(&mut bytes, 8 * PAGE).unwrap();
        bytes
    }
}

/// Goal: a save reads what the engine has written when its event passes, not before, and others go
/// on meanwhile.
#[test]
fn a_save_reads_what_is_there_when_its_event_passes() {
    let manager = Manager::start();
    let mut engine = Engine::attach(&manager.socket);
    let mut other = Engine::attach(&manager.socket);
    assert_eq!((engine.events(2), engine.events(1)), (0, 2));
    engine.fill(1);
    let save = engine.save(1, Some(1), Deadline::DEFAULT);
    let signal = manager.signal(1);
    settle("the device asks", || signal.asked.load(Ordering::Acquire));
    other.fill(9);
    other.save(2, None, Deadline::DEFAULT);
    assert_eq!(other.next().status, Status::Ok);
    assert!(engine.is_silent());
    // One event, one operation.
    engine.save(3, Some(1), Deadline::DEFAULT);
    assert_eq!(engine.next().code, Code::BadFence);
    engine.fill(2);
    signal.passed.store(true, Ordering::Release);
    let done = engine.next();
    assert_eq!((done.operation, done.status, done.pages), (save, Status::Ok, 4));
    let used_again = engine.restored(1, Some(1));
    assert!(used_again.iter().all(|&byte| byte == 2), "saved too early");
}

/// Goal: whoever gives up on an event that never comes is answered. Method: by deadline, by cancel, by
/// an event that breaks; then the event serves another operation.
#[test]
fn an_event_that_never_comes_holds_nobody_for_ever() {
    let manager = Manager::start();
    let mut engine = Engine::attach(&manager.socket);
    engine.events(1);
    let signal = manager.signal(0);
    engine.save(1, Some(0), Deadline::after(Duration::from_millis(20)));
    let late = engine.next();
    assert_eq!((late.status, late.code, late.pages), (Status::Error, Code::Deadline, 0));
    let save = engine.save(1, Some(0), Deadline::after(Duration::from_secs(100_000)));
    engine.client.cancel(save).unwrap();
    let cancelled = engine.next();
    assert_eq!((cancelled.operation, cancelled.code), (save, Code::Cancelled));
    assert_eq!(engine.next().status, Status::Ok);
    signal.broken.store(true, Ordering::Release);
    engine.save(1, Some(0), Deadline::DEFAULT);
    assert_eq!(engine.next().code, Code::BadFence);
    signal.broken.store(false, Ordering::Release);
    signal.passed.store(true, Ordering::Release);
    engine.save(1, Some(0), Deadline::DEFAULT);
    assert_eq!(engine.next().status, Status::Ok);
}

/// Goal: a session ends although its events do not come, and its events are closed with it.
#[test]
fn the_events_of_a_session_end_with_it() {
    let manager = Manager::start();
    let mut engine = Engine::attach(&manager.socket);
    let mut other = Engine::attach(&manager.socket);
    engine.events(5);
    other.events(1);
    for event in 0..4 {
        engine.save(event.into(), Some(event), Deadline::after(Duration::from_secs(100_000)));
    }
    let signal = manager.signal(0);
    settle("the device asks", || signal.asked.load(Ordering::Acquire));
    drop(signal);
    assert_eq!(manager.open_events(), 6);
    drop(engine);
    settle("its events are closed", || manager.open_events() == 1);
    other.fill(3);
    other.save(1, Some(0), Deadline::DEFAULT);
    manager.signal(5).passed.store(true, Ordering::Release);
    assert_eq!(other.next().status, Status::Ok);
}
