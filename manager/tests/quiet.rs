//! The reactor's thread allocates nothing for a request once its buffers have grown.
#![allow(unsafe_code, reason = "a counting allocator is an unsafe impl")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use clap::Parser;
use orbitkv_manager::clock::Clock;
use orbitkv_manager::config::{Config, ServeArgs, WaitMode};
use orbitkv_manager::core::{Core, CoreConfig};
use orbitkv_manager::device::HostDevice;
use orbitkv_manager::endpoint::{Claim, Endpoint, MemoryImporter, Settings, Stopper};
use orbitkv_manager::pool::{DramPool, HugePages, PoolConfig};
use orbitkv_manager::service::{Service, ServiceParts};
use orbitkv_manager::telemetry::{Telemetry, TelemetryIdentity};
use orbitkv_shm_protocol::bootstrap::message::{
    ClientMessage, DependencySpec, ManagerMessage, MemorySpec, NamespaceSpec, RegionSpec,
    SegmentSpec,
};
use orbitkv_shm_protocol::bootstrap::transport;
use orbitkv_shm_protocol::doorbell::ControlBell;
use orbitkv_shm_protocol::ids::{Epoch, OperationId, PageHash, RegionId, ScopeId, SessionId};
use orbitkv_shm_protocol::layout::{Geometry, LAYOUT_FINGERPRINT};
use orbitkv_shm_protocol::record::{
    Completion, PageEntry, PageRange, QueryMode, Request, RequestBody, Status,
};
use orbitkv_shm_protocol::segment::{self, EngineSide, Expected};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

thread_local! {
    /// Set by the reactor's thread.
    static COUNTED: Cell<bool> = const { Cell::new(false) };
}

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

struct Counting;

impl Counting {
    fn count() {
        if COUNTED.try_with(Cell::get).unwrap_or(false) {
            ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        }
    }
}

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        Self::count();
        // SAFETY: by the caller's contract, which is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: by the caller's contract, which is the same.
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        Self::count();
        // SAFETY: by the caller's contract, which is the same.
        unsafe { System.realloc(memory, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const PATIENCE: Duration = Duration::from_secs(20);
const GEOMETRY: Geometry = Geometry { ring_capacity: 64, page_entries: 1024, done_words: 1 };
const PAGE: u64 = 4096;
/// Requests whose allocations are counted.
const REQUESTS: u32 = 50_000;
/// Buffers that may grow meanwhile: the tables of telemetry meet an operation or a lease in flight
/// for the first time by chance.
const GROWTH_MAX: u64 = 16;

#[derive(Parser)]
struct Command {
    #[command(flatten)]
    serve: ServeArgs,
}

/// Everything that `serve` joins, with the reactor in a thread of this process.
fn reactor(socket: &Path) -> (std::thread::JoinHandle<bool>, Stopper) {
    let socket_text = socket.to_str().unwrap();
    let args = ["x", "--socket", socket_text, "--dram", "16MiB", "--huge-pages", "off"];
    let config: Config = orbitkv_manager::serve::load(&Command::parse_from(args).serve).unwrap();
    let (clock, bell, epoch) = (Clock::monotonic(), ControlBell::new(), Epoch(7));
    let pool = Arc::new(
        DramPool::allocate(PoolConfig {
            bytes: config.dram.capacity_bytes,
            huge_pages: HugePages::Off,
            prefault_threads: 0,
        })
        .unwrap(),
    );
    let claim = Claim::take(&config.socket).unwrap();
    let telemetry = Telemetry::create(&TelemetryIdentity {
        socket: socket.to_owned(),
        epoch,
        version: "test".to_owned(),
        started_ns: clock.now(),
    })
    .unwrap();
    let mut endpoint = Endpoint::start(
        Settings::new(&config, epoch, Duration::ZERO),
        claim.listen().unwrap(),
        MemoryImporter::default(),
        clock.clone(),
        bell.ringer(),
    )
    .unwrap();
    endpoint.publish().unwrap();
    let stopper = endpoint.stopper();
    let core = Core::new(CoreConfig {
        arena_bytes: pool.arena_bytes(),
        ..CoreConfig::with_dram(config.dram.capacity_bytes)
    });
    let parts = ServiceParts {
        core,
        device: Box::new(HostDevice::start(pool, bell.ringer(), Duration::ZERO).unwrap()),
        storage: None,
        endpoint,
        telemetry,
        bell,
        clock,
        // Never asleep: each request is taken by a turn that does nothing else.
        wait: WaitMode::Dedicated,
        spin_window: Duration::ZERO,
        stop_timeout: Duration::from_secs(5),
    };
    let thread = std::thread::spawn(move || {
        COUNTED.set(true);
        Service::new(parts).run()
    });
    (thread, stopper)
}

struct Engine {
    socket: OwnedFd,
    side: EngineSide,
    generation: u32,
}

impl Engine {
    fn attach(path: &Path) -> Self {
        let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
        let socket = rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None).unwrap();
        rustix::net::connect(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
        let hello = ClientMessage::Hello {
            layout_fingerprint: LAYOUT_FINGERPRINT,
            engine_id: "0".repeat(32),
            ring_capacity: GEOMETRY.ring_capacity,
            page_entries: GEOMETRY.page_entries,
            done_words: GEOMETRY.done_words,
        };
        transport::send(&socket, &hello, &[], PATIENCE).unwrap();
        let (answer, descriptors) = transport::receive_manager(&socket, PATIENCE).unwrap();
        let ManagerMessage::Welcome(welcome) = answer else { panic!("{answer:?}") };
        let [submission, completion] = <[OwnedFd; 2]>::try_from(descriptors).unwrap();
        let (session, epoch) = (SessionId(welcome.session), Epoch(welcome.epoch));
        let expected = Expected::new(GEOMETRY, session, epoch);
        let side = segment::attach(submission, completion, expected).unwrap();
        Self { socket, side, generation: 0 }
    }

    fn ask(&self, message: &ClientMessage, descriptors: &[std::os::fd::BorrowedFd<'_>]) -> u32 {
        transport::send(&self.socket, message, descriptors, PATIENCE).unwrap();
        match transport::receive_manager(&self.socket, PATIENCE).unwrap().0 {
            ManagerMessage::Scope { scope, .. } => scope,
            ManagerMessage::Memory { memory } => memory,
            ManagerMessage::Region { region, .. } => region,
            other => panic!("{other:?}"),
        }
    }

    /// One request, and its completion.
    fn round_trip(&mut self, range: PageRange, body: RequestBody) -> Completion {
        self.generation = OperationId::next_generation(self.generation);
        let operation = OperationId { index: 0, generation: self.generation };
        let request = Request { operation, deadline_ms: 0, range, body };
        let (session, epoch) = (self.side.session(), self.side.epoch());
        self.side.requests.push(|sequence| request.encode(session, epoch, sequence)).unwrap();
        self.side.requests.publish();
        self.side.ringer.ring();
        loop {
            if let Some(record) = self.side.completions.pop().unwrap() {
                self.side.completions.release();
                let done = Completion::decode(&record).unwrap();
                assert_eq!(done.status, Status::Ok, "{done:?}");
                return done;
            }
            std::thread::yield_now();
        }
    }
}

/// Goal: neither a `Ping` nor a query of one page in DRAM, its lease and its release allocate
/// anything in the reactor, its telemetry included. Method: count the allocations of its thread over
/// many of each.
#[test]
fn a_request_allocates_nothing_in_the_reactor() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.sock");
    let (thread, stopper) = reactor(&path);
    let mut engine = Engine::attach(&path);
    let scope = engine.ask(
        &ClientMessage::DefineNamespace(NamespaceSpec {
            model: "quiet".into(),
            dtype: "bfloat16".into(),
            page_tokens: 64,
            page_bytes: PAGE,
            layout: "test".into(),
            group: 0,
            tp_rank: 0,
            tp_size: 1,
            pp_rank: 0,
            pp_size: 1,
            adapter: String::new(),
            salt: String::new(),
            dependency: DependencySpec::Chain,
        }),
        &[],
    );
    let memfd = rustix::fs::memfd_create(c"quiet", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&memfd, PAGE).unwrap();
    let spec = MemorySpec::Memfd { bytes: PAGE };
    let memory = engine.ask(&ClientMessage::RegisterMemory(spec), &[memfd.as_fd()]);
    let segments = vec![SegmentSpec { memory, offset: 0, stride: PAGE, length: PAGE, layer: 0 }];
    let spec = RegionSpec { scope, pages: 1, segments };
    let region = RegionId(engine.ask(&ClientMessage::RegisterRegion(spec), &[]));
    let (one, none) = (PageRange { start: 0, len: 1 }, PageRange::default());
    engine.side.pages.write(0, PageEntry::page(PageHash([1; 32]), 0));
    let saved = engine.round_trip(one, RequestBody::Save { region, fence: None });
    assert_eq!(saved.pages, 1);
    let query = RequestBody::Query { scope: ScopeId(scope), mode: QueryMode::Demand };
    for count_from in [1_000, 0] {
        // The first pass grows the buffers.
        let requests = if count_from > 0 { count_from } else { REQUESTS };
        let before = ALLOCATIONS.load(Ordering::Relaxed);
        for _ in 0..requests {
            engine.round_trip(none, RequestBody::Ping);
        }
        let pings = ALLOCATIONS.load(Ordering::Relaxed) - before;
        for _ in 0..requests / 2 {
            let found = engine.round_trip(one, query);
            let lease = found.lease.expect("a hit");
            engine.round_trip(none, RequestBody::Release { lease });
        }
        let queries = ALLOCATIONS.load(Ordering::Relaxed) - before - pings;
        println!("{requests} pings: {pings} allocations; as many queries and releases: {queries}");
        if count_from == 0 {
            assert!(pings <= GROWTH_MAX, "{pings} allocations for {requests} pings");
            assert!(queries <= GROWTH_MAX, "{queries} allocations for {requests} requests");
        }
    }
    assert!(ALLOCATIONS.load(Ordering::Relaxed) > 0, "the counter does not count");
    stopper.stop();
    assert!(thread.join().unwrap(), "nothing was to be written");
}
