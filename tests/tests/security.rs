//! What a client may reach, and what becomes of one that reaches for more: hand-made records and
//! registrations, segments cut under the Manager, ids of others (SEC-01, SEC-03, SEC-09).
//!
//! Fault model: clients of the Manager's own user that write every byte of what they were given in
//! any way the kernel allows, beside an engine whose service must stay exact.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use orbitkv_shm_protocol::bootstrap::message::{
    ClientMessage, ManagerMessage, MemorySpec, Refusal, RegionSpec, SegmentSpec,
};
use orbitkv_shm_protocol::bootstrap::transport::{self, TransportError};
use orbitkv_shm_protocol::ids::{LeaseId, OperationId, PageHash, RegionId, ScopeId};
use orbitkv_shm_protocol::inspect::{LeaseView, SessionView, Snapshot};
use orbitkv_shm_protocol::record::{
    Code, Completion, CompletionRecord, PageEntry, PageRange, QueryMode, Request, RequestBody,
    RequestRecord, Status, flags,
};
use orbitkv_shm_protocol::telemetry::{CloseReason, Metric};
use orbitkv_tests::manager::{Manager, PATIENCE};
use orbitkv_tests::raw::{GEOMETRY, Raw, ask, operation};
use orbitkv_tests::setup;
use orbitkv_tests::victim::{PAGE, Traffic, sealed_memory};
use rustix::fs::{FallocateFlags, MemfdFlags};
use rustix::io::Errno;

const CLOSED_BY_FAULT: Metric = Metric::SessionsClosed(CloseReason::PeerFault);
const BAD_REQUESTS: Metric = Metric::SessionBadRequests;
/// Pages of the memory that an attacker registers; its region is the middle of it.
const MEMORY_PAGES: u32 = 16;
const REGION_FIRST: u32 = 4;
const REGION_PAGES: u32 = 4;

fn request(operation: OperationId, range: PageRange, body: RequestBody) -> Request {
    Request { operation, deadline_ms: 0, range, body }
}

fn hash(number: u8) -> PageHash {
    PageHash([number; 32])
}

/// Registers what `spec` says, with a descriptor if there is one.
fn memory(raw: &Raw, spec: MemorySpec, file: Option<&File>) -> ManagerMessage {
    let message = ClientMessage::RegisterMemory(spec);
    let borrowed: Vec<_> = file.iter().map(|file| file.as_fd()).collect();
    raw.ask_with(&message, &borrowed)
}

/// The middle pages of a memory, as the region that an honest client would register.
fn middle(scope: ScopeId, memory: u32) -> RegionSpec {
    let (stride, length) = (PAGE as u64, PAGE as u64);
    let offset = u64::from(REGION_FIRST) * stride;
    let segments = vec![SegmentSpec { memory, offset, stride, length, layer: 0 }];
    RegionSpec { scope: scope.0, pages: REGION_PAGES, segments }
}

fn region(raw: &Raw, scope: ScopeId, memory: u32) -> RegionId {
    raw.register_pages(scope, memory, u64::from(REGION_FIRST) * PAGE as u64, REGION_PAGES)
}

/// Memory whose every byte is known, with the region in its middle.
struct Ground {
    file: File,
    scope: ScopeId,
    region: RegionId,
}

impl Ground {
    fn new(raw: &Raw, model: &str) -> Self {
        let bytes = u64::from(MEMORY_PAGES) * PAGE as u64;
        let file = sealed_memory(bytes);
        file.write_all_at(&Self::pattern(), 0).unwrap();
        let scope = raw.define(model);
        let memory = raw.register_memfd(&file, bytes);
        let region = region(raw, scope, memory);
        Self { file, scope, region }
    }

    fn pattern() -> Vec<u8> {
        (0..MEMORY_PAGES as usize * PAGE).map(|at| (at * 131 + at / PAGE) as u8).collect()
    }

    fn must_be_as_before(&self, after: &str) {
        let mut bytes = vec![0; MEMORY_PAGES as usize * PAGE];
        self.file.read_exact_at(&mut bytes, 0).unwrap();
        assert!(bytes == Self::pattern(), "memory has changed: {after}");
    }
}

/// Publishes one record and takes its one answer.
fn answer(raw: &mut Raw, record: RequestRecord) -> CompletionRecord {
    let before = raw.published();
    raw.submit(&[record]);
    raw.must_publish(before + 1);
    let answered = raw.completion(before);
    raw.set_completion_head(before + 1);
    let of = (answered.operation_index, answered.operation_generation);
    assert_eq!(of, (record.operation_index, record.operation_generation), "an answer to another");
    answered
}

fn status(record: &CompletionRecord) -> (Status, Code) {
    let Completion { status, code, .. } = Completion::decode(record).unwrap();
    (status, code)
}

/// A save of one entry that no correct client writes.
fn save_of(raw: &Raw, ground: &Ground, id: OperationId, entry: PageEntry) -> RequestRecord {
    raw.side.pages.write(0, entry);
    let body = RequestBody::Save { region: ground.region, fence: None };
    raw.record(&request(id, PageRange { start: 0, len: 1 }, body))
}

fn restore_of(
    raw: &Raw,
    ground: &Ground,
    lease: LeaseId,
    id: OperationId,
    entry: PageEntry,
) -> RequestRecord {
    raw.side.pages.write(0, entry);
    let body = restore_body(ground.region, lease, 0);
    raw.record(&request(id, PageRange { start: 0, len: 1 }, body))
}

fn restore_body(region: RegionId, lease: LeaseId, offset: u32) -> RequestBody {
    RequestBody::Restore { region, lease, offset, fence: None, keep: true, by_layer: false }
}

fn query_of(raw: &Raw, ground: &Ground, id: OperationId, start: u32, len: u32) -> RequestRecord {
    let body = RequestBody::Query { scope: ground.scope, mode: QueryMode::Demand };
    raw.record(&request(id, PageRange { start, len }, body))
}

/// Goal: a record that points anywhere else gets one `bad_request` and moves no byte; the sixteenth
/// closes that session as a protocol fault. Method: the scenario's list by hand over a region in the
/// middle of known memory with a lease to abuse, beside an engine that checks every byte of its own;
/// what an honest client may get wrong (an unknown id, an empty list) is answered and not counted.
#[test]
fn sec_01_records_that_point_elsewhere_move_no_byte_and_the_sixteenth_closes() {
    let mut manager = setup!().dram("16MiB").start();
    let traffic = Traffic::start(&manager.socket());
    let mut raw = Raw::attach(&manager.socket());
    let ground = Ground::new(&raw, "sec-01");
    raw.side.pages.write(0, PageEntry::page(hash(1), 0));
    let body = RequestBody::Save { region: ground.region, fence: None };
    let save = raw.record(&request(operation(0, 1), PageRange { start: 0, len: 1 }, body));
    assert_eq!(status(&answer(&mut raw, save)), (Status::Ok, Code::None));
    let query = query_of(&raw, &ground, operation(0, 2), 0, 1);
    let found = answer(&mut raw, query);
    assert_eq!((status(&found), found.pages), ((Status::Ok, Code::None), 1));
    let lease = LeaseId(found.lease);

    // What an honest client may get wrong.
    let none = PageRange::default();
    let one = PageRange { start: 0, len: 1 };
    let nobody = RegionId(u32::MAX);
    let mistakes = [
        (one, RequestBody::Save { region: nobody, fence: None }, Code::UnknownRegion),
        (one, restore_body(nobody, lease, 0), Code::UnknownRegion),
        (one, restore_body(ground.region, LeaseId(0), 0), Code::UnknownLease),
        (one, restore_body(ground.region, LeaseId(u64::MAX), 0), Code::UnknownLease),
        (one, restore_body(ground.region, lease, 1), Code::BadRequest),
        (one, restore_body(ground.region, lease, u32::MAX), Code::BadRequest),
        (one, RequestBody::Save { region: ground.region, fence: Some(7) }, Code::BadFence),
        (
            one,
            RequestBody::Query { scope: ScopeId(u32::MAX), mode: QueryMode::Demand },
            Code::UnknownScope,
        ),
        (one, RequestBody::Prepare { scope: ScopeId(u32::MAX) }, Code::UnknownScope),
        (none, RequestBody::Forget { scope: ScopeId(u32::MAX) }, Code::UnknownScope),
        (none, RequestBody::Unregister { region: nobody }, Code::UnknownRegion),
    ];
    for (generation, (range, body, code)) in (3..).zip(mistakes) {
        raw.side.pages.write(0, PageEntry::page(hash(1), 0));
        let record = raw.record(&request(operation(0, generation), range, body));
        assert_eq!(status(&answer(&mut raw, record)), (Status::Error, code), "{body:?}");
    }
    manager.counted(BAD_REQUESTS, 0);

    type Spoil<'a> = &'a dyn Fn(&Raw, OperationId) -> RequestRecord;
    let plain = |raw: &Raw, id| raw.record(&request(id, none, RequestBody::Ping));
    let entry = |device_page| PageEntry::page(hash(2), device_page);
    let bad: [(&str, Spoil<'_>); 16] = [
        ("opcode 0", &|raw, id| RequestRecord { kind: 0, ..plain(raw, id) }),
        ("opcode after the last", &|raw, id| RequestRecord { kind: 11, ..plain(raw, id) }),
        ("opcode -1", &|raw, id| RequestRecord { kind: u16::MAX, ..plain(raw, id) }),
        ("id 0", &|raw, id| RequestRecord { operation_generation: 0, ..plain(raw, id) }),
        ("index = count", &|raw, id| RequestRecord { operation_index: 64, ..plain(raw, id) }),
        ("offset = size - 1", &|raw, id| query_of(raw, &ground, id, 1023, 2)),
        ("offset + length wraps", &|raw, id| query_of(raw, &ground, id, u32::MAX, u32::MAX)),
        ("length 2^32 - 1", &|raw, id| query_of(raw, &ground, id, 0, u32::MAX)),
        ("over the limit", &|raw, id| query_of(raw, &ground, id, 0, 16_385)),
        ("saved page = count", &|raw, id| save_of(raw, &ground, id, entry(REGION_PAGES))),
        ("saved page -1", &|raw, id| save_of(raw, &ground, id, entry(u32::MAX))),
        ("saved page -2^31", &|raw, id| save_of(raw, &ground, id, entry(1 << 31))),
        ("restored page = count", &|raw, id| {
            restore_of(raw, &ground, lease, id, PageEntry::page(hash(1), REGION_PAGES))
        }),
        ("restored page -1", &|raw, id| {
            restore_of(raw, &ground, lease, id, PageEntry::page(hash(1), u32::MAX))
        }),
        ("unknown entry flag", &|raw, id| {
            save_of(raw, &ground, id, PageEntry { flags: 1 << 31, ..entry(0) })
        }),
        ("an anchor that nothing follows", &|raw, id| {
            save_of(raw, &ground, id, PageEntry { flags: flags::ENTRY_ANCHOR, ..entry(0) })
        }),
    ];
    for (number, (what, spoil)) in (1..).zip(bad) {
        assert!(!raw.is_closed(Duration::ZERO), "closed before: {what}");
        let record = spoil(&raw, operation(number as u32, 1));
        assert_eq!(status(&answer(&mut raw, record)), (Status::Error, Code::BadRequest), "{what}");
        manager.counted(BAD_REQUESTS, number);
        ground.must_be_as_before(what);
    }
    raw.must_be_closed();
    manager.counted(CLOSED_BY_FAULT, 1);
    traffic.must_go_on();
    ground.must_be_as_before("the end");
    manager.has_sessions(1);
    traffic.end();
    assert!(manager.is_running());
    manager.rests_at(Metric::OperationsRunning, 0);
    manager.stop();
}

/// Goal: no geometry of a region reaches outside of the memory that was offered, and no memory is
/// taken for larger than it is. Method: each field at its edges and beyond, over memory in which only
/// the middle was offered before; then messages that name what is not there, to the sixteenth.
#[test]
fn sec_01_registrations_that_reach_elsewhere_are_refused() {
    let manager = setup!().dram("16MiB").start();
    let traffic = Traffic::start(&manager.socket());
    let raw = Raw::attach(&manager.socket());
    let ground = Ground::new(&raw, "sec-01");
    let size = u64::from(MEMORY_PAGES) * PAGE as u64;
    let page = PAGE as u64;
    let spec = |change: &dyn Fn(&mut RegionSpec)| {
        let mut spec = middle(ground.scope, 0);
        change(&mut spec);
        spec
    };
    let specs = [
        spec(&|spec| spec.segments[0].offset = size - 1),
        spec(&|spec| spec.segments[0].offset = size),
        spec(&|spec| spec.segments[0].offset = u64::MAX),
        spec(&|spec| spec.segments[0].offset = u64::MAX - page + 1),
        spec(&|spec| spec.segments[0].offset = i64::MIN as u64),
        spec(&|spec| spec.segments[0].offset = size - 4 * page + 1),
        spec(&|spec| spec.segments[0].length = 0),
        spec(&|spec| spec.segments[0].length = u64::from(u32::MAX)),
        spec(&|spec| spec.segments[0].length = u64::MAX),
        spec(&|spec| spec.segments[0].stride = 0),
        spec(&|spec| spec.segments[0].stride = page - 1),
        spec(&|spec| spec.segments[0].stride = u64::MAX),
        spec(&|spec| spec.segments[0].stride = u64::MAX / 3 + 1),
        spec(&|spec| spec.pages = 0),
        spec(&|spec| spec.pages = 13),
        spec(&|spec| spec.pages = u32::MAX),
        spec(&|spec| spec.segments.clear()),
        spec(&|spec| spec.segments = vec![spec.segments[0]; 1025]),
        spec(&|spec| {
            let half = SegmentSpec { length: page / 2, ..spec.segments[0] };
            spec.segments = vec![half, half];
        }),
    ];
    // Some of these are counted as faults: a session for each few of them.
    for specs in specs.chunks(10) {
        let raw = Raw::attach(&manager.socket());
        let ground = Ground::new(&raw, "sec-01");
        for spec in specs {
            let answer = ask(&raw.socket, &ClientMessage::RegisterRegion(spec.clone()));
            let ManagerMessage::Refused { message, .. } = answer else {
                panic!("{answer:?} of {spec:?}")
            };
            assert!(!message.is_empty(), "{spec:?}");
        }
        // What was refused left nothing behind, and what was there before serves.
        let save = save_of(&raw, &ground, operation(0, 1), PageEntry::page(hash(1), 3));
        let mut raw = raw;
        assert_eq!(status(&answer(&mut raw, save)).0, Status::Ok);
        ground.must_be_as_before("geometries");
    }
    manager.has_sessions(2);
    let mut refused = 0;
    // Memory that is not what it is said to be.
    let cut = File::from(rustix::fs::memfd_create(c"cut", MemfdFlags::CLOEXEC).unwrap());
    rustix::fs::ftruncate(&cut, page).unwrap();
    let offers = [
        (MemorySpec::Memfd { bytes: page + 1 }, Some(&cut)),
        (MemorySpec::Memfd { bytes: i64::MAX as u64 }, Some(&ground.file)),
        (process(0, page), None),
        (process(u64::MAX - page + 1, page), None),
        (process(0xffff_8000_0000_0000, page), None),
        (process(1 << 46, u64::MAX), None),
    ];
    for (offer, file) in offers {
        let answer = memory(&raw, offer.clone(), file);
        let ManagerMessage::Refused { refusal, .. } = answer else { panic!("{answer:?}") };
        refused += u32::from(refusal == Refusal::BadMessage);
        assert!(refused < 16, "{offer:?}");
    }
    assert!(!raw.is_closed(Duration::ZERO));
    let unknown = |number: u32| {
        ClientMessage::RegisterRegion(match number % 3 {
            0 => spec(&|spec| spec.scope = u32::MAX - number),
            1 => spec(&|spec| spec.segments[0].memory = 1 + number),
            _ => spec(&|spec| spec.segments[0].memory = u32::MAX),
        })
    };
    while refused < 16 {
        let answer = ask(&raw.socket, &unknown(refused));
        let ManagerMessage::Refused { refusal, .. } = answer else { panic!("{answer:?}") };
        assert_eq!(refusal, Refusal::BadMessage);
        refused += 1;
    }
    let over = transport::receive_manager(&raw.socket, PATIENCE);
    assert!(matches!(over, Err(TransportError::Closed)), "{over:?}");
    ground.must_be_as_before("the end");
    traffic.must_go_on();
    manager.counted(CLOSED_BY_FAULT, 1);
    manager.has_sessions(1);
    traffic.end();
    manager.stop();
}

fn process(address: u64, bytes: u64) -> MemorySpec {
    MemorySpec::Process { address, bytes, nonce_address: address, nonce: 1 }
}

/// What a client may do to the size of a file that it shares.
fn maul(file: &File, bytes: u64) -> Vec<(&'static str, Result<(), Errno>)> {
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    vec![
        ("cut to nothing", rustix::fs::ftruncate(file, 0)),
        ("cut to half", rustix::fs::ftruncate(file, bytes / 2)),
        ("double", rustix::fs::ftruncate(file, bytes * 2)),
        ("punch a hole", rustix::fs::fallocate(file, punch, 0, bytes)),
        ("set back", rustix::fs::ftruncate(file, bytes)),
    ]
}

fn saves(raw: &mut Raw, regions: &[RegionId], round: u32) {
    let records: Vec<_> = regions
        .iter()
        .enumerate()
        .map(|(number, &region)| {
            let start = number as u32 * REGION_PAGES;
            for page in 0..REGION_PAGES {
                let mut hash = [number as u8; 32];
                hash[..4].copy_from_slice(&round.to_le_bytes());
                hash[4] = page as u8;
                raw.side.pages.write(start + page, PageEntry::page(PageHash(hash), page));
            }
            let range = PageRange { start, len: REGION_PAGES };
            let body = RequestBody::Save { region, fence: None };
            let mut record = raw.record(&request(operation(number as u32, round), range, body));
            record.sequence += number as u64;
            record
        })
        .collect();
    raw.submit(&records);
}

/// Goal: no change of the size of a shared file is a fault of anybody but its maker. Method: every
/// descriptor that a client holds (both segments, a sealed and an unsealed memory) is cut, doubled
/// and punched while the Manager copies from the memories and serves the rings; what the seals
/// forbid fails with its errno, what they allow ends that session at most.
#[test]
fn sec_03_files_that_are_cut_and_punched_harm_their_owner_only() {
    let mut manager = setup!().dram("16MiB").start();
    let traffic = Traffic::start(&manager.socket());
    let bytes = u64::from(MEMORY_PAGES) * PAGE as u64;
    for target in ["completion", "sealed memory", "unsealed memory", "submission"] {
        let mut raw = Raw::attach(&manager.socket());
        let scope = raw.define("sec-03");
        let sealed = sealed_memory(bytes);
        let unsealed = rustix::fs::memfd_create(c"unsealed", MemfdFlags::CLOEXEC).unwrap();
        let unsealed = File::from(unsealed);
        rustix::fs::ftruncate(&unsealed, bytes).unwrap();
        let memories = [&sealed, &unsealed].map(|file| raw.register_memfd(file, bytes));
        let regions = memories.map(|memory| region(&raw, scope, memory));
        let (submission, completion) = (raw.submission_copy(), raw.completion_copy());
        for round in 1..=8 {
            saves(&mut raw, &regions, round);
            let (file, size) = match target {
                "completion" => (&completion, GEOMETRY.completion_bytes() as u64),
                "submission" => (&submission, GEOMETRY.submission_bytes() as u64),
                "sealed memory" => (&sealed, bytes),
                _ => (&unsealed, bytes),
            };
            let done: Vec<_> = maul(file, size).into_iter().map(|(_, done)| done).collect();
            let sealed = Err(Errno::PERM);
            // Setting a sealed file to the size that it has is no change.
            let expected = match target {
                "completion" => [sealed, sealed, sealed, sealed, Ok(())],
                // It may zero what it may write.
                "submission" => [sealed, sealed, sealed, Ok(()), Ok(())],
                // It may grow, and then not shrink again.
                "sealed memory" if round == 1 => [sealed, sealed, Ok(()), Ok(()), sealed],
                "sealed memory" => [sealed, sealed, Ok(()), Ok(()), sealed],
                _ => [Ok(()); 5],
            };
            assert_eq!(done, expected, "{target} in round {round}");
            if target == "submission" {
                break;
            }
            raw.must_publish(u64::from(round) * 2);
            raw.set_completion_head(u64::from(round) * 2);
        }
        traffic.must_go_on();
        assert!(manager.is_running(), "{target}");
        if target == "submission" {
            // Both indices are zero again: records are given back, which no correct client does.
            let ping =
                raw.record(&request(operation(9, 1), PageRange::default(), RequestBody::Ping));
            raw.submit(&[ping]);
            raw.must_be_closed_or_quiet();
        } else {
            assert!(!raw.is_closed(Duration::ZERO), "{target}: its rings are in order");
        }
        drop(raw);
        manager.has_sessions(1);
    }
    traffic.must_go_on();
    traffic.end();
    manager.has_sessions(0);
    manager.settle_empty();
    manager.stop();
}

/// Waits until inspection, which may lag behind, says of a session and the leases what it should.
fn must_show(
    manager: &Manager,
    session: u32,
    what: &str,
    is_so: impl Fn(&SessionView, &[LeaseView]) -> bool,
) -> (SessionView, Vec<LeaseView>) {
    view(
        &manager.settle(what, |seen| {
            let (own, leases) = view(seen, session);
            is_so(&own, &leases)
        }),
        session,
    )
}

/// What inspection says of the session with this id, and of the leases but for their age.
fn view(seen: &Snapshot, session: u32) -> (SessionView, Vec<LeaseView>) {
    let own = seen.sessions.iter().find(|row| row.id == u64::from(session)).unwrap();
    let ageless = |lease: &LeaseView| LeaseView { ttl_ms: 0, ..lease.clone() };
    (own.clone(), seen.leases.iter().map(ageless).collect())
}

/// Goal: ids of another engine do not exist: every use of them is answered exactly as that of an id
/// that never was, and changes nothing of their owner, whose numbers in inspection stay the same and
/// whose operations go on. Method: an owner with a lease, a waiting operation and handles that nobody
/// else has; a stranger who knows all of them tries each in every place, and is then killed.
#[test]
fn sec_09_ids_of_another_engine_do_not_exist() {
    let manager = setup!().dram("16MiB").flag("--lease-ttl", "60s").start();
    let mut owner = Raw::attach_as(&manager.socket(), "a".repeat(32));
    // Handles whose numbers the stranger has not got himself.
    for model in ["one", "two", "three"] {
        owner.define(model);
    }
    let bytes = u64::from(MEMORY_PAGES) * PAGE as u64;
    let file = sealed_memory(bytes);
    for _ in 0..3 {
        owner.register_memfd(&file, bytes);
    }
    let spaces: Vec<_> = (0..3).map(|_| region(&owner, ScopeId(2), 2)).collect();
    let ground = Ground { file, scope: ScopeId(2), region: spaces[2] };
    let save = save_of(&owner, &ground, operation(0, 1), PageEntry::page(hash(1), 0));
    assert_eq!(status(&answer(&mut owner, save)), (Status::Ok, Code::None));
    let query = query_of(&owner, &ground, operation(0, 2), 0, 1);
    let lease = LeaseId(answer(&mut owner, query).lease);
    // Outstanding until the lease ends.
    let drain = operation(7, 1);
    let record = request(drain, PageRange::default(), RequestBody::Drain);
    let record = Request { deadline_ms: 60_000, ..record };
    let record = owner.record(&record);
    owner.submit(&[record]);
    let mut stranger = Raw::attach_as(&manager.socket(), "b".repeat(32));
    let own = Ground::new(&stranger, "three");
    manager.has_sessions(2);
    manager.rests_at(Metric::OperationsRunning, 1);
    let session = owner.welcome.session;
    let before = must_show(&manager, session, "a lease and a drain", |own, leases| {
        let row = [own.outstanding, own.completions_consumed, own.regions];
        row == [1, 2, 3] && leases.len() == 1
    });
    let must_be_as_before = || {
        manager.rests_at(Metric::OperationsRunning, 1);
        must_show(&manager, session, "as before", |own, leases| {
            (own, leases) == (&before.0, before.1.as_slice())
        });
    };

    let one = PageRange { start: 0, len: 1 };
    let none = PageRange::default();
    let tries: [(&str, PageRange, [RequestBody; 2]); 8] = [
        (
            "release",
            none,
            [lease, LeaseId(lease.0 + (9 << 20))].map(|lease| RequestBody::Release { lease }),
        ),
        (
            "restore",
            one,
            [lease, LeaseId(u64::MAX)].map(|lease| restore_body(own.region, lease, 0)),
        ),
        (
            "cancel",
            none,
            [drain, operation(63, 9)].map(|operation| RequestBody::Cancel { operation }),
        ),
        (
            "save",
            one,
            [ground.region, RegionId(99)].map(|region| RequestBody::Save { region, fence: None }),
        ),
        (
            "unregister",
            none,
            [ground.region, RegionId(99)].map(|region| RequestBody::Unregister { region }),
        ),
        (
            "query",
            one,
            [ground.scope, ScopeId(99)]
                .map(|scope| RequestBody::Query { scope, mode: QueryMode::Demand }),
        ),
        ("prepare", one, [ground.scope, ScopeId(99)].map(|scope| RequestBody::Prepare { scope })),
        ("forget", none, [ground.scope, ScopeId(99)].map(|scope| RequestBody::Forget { scope })),
    ];
    let mut generation = 0;
    for (what, range, bodies) in tries {
        let [theirs, nobodys] = bodies.map(|body| {
            generation += 1;
            stranger.side.pages.write(0, PageEntry::page(hash(1), 0));
            let record = stranger.record(&request(operation(1, generation), range, body));
            let mut answered = answer(&mut stranger, record);
            // Its own place and time.
            (answered.sequence, answered.operation_generation) = (0, 0);
            (answered.queued_ns, answered.published_ns) = (0, 0);
            (answered.prepared_ns, answered.copied_ns) = (0, 0);
            answered
        });
        assert_eq!(theirs, nobodys, "{what}");
        // The end of an operation that has ended is nobody's loss.
        let refused = what != "cancel";
        assert_eq!(status(&theirs).0 == Status::Error, refused, "{what}");
        own.must_be_as_before(what);
    }
    for spec in [middle(ScopeId(2), 0), middle(own.scope, 2)] {
        let answer = ask(&stranger.socket, &ClientMessage::RegisterRegion(spec));
        assert!(matches!(answer, ManagerMessage::Refused { .. }), "{answer:?}");
    }
    let answer_set = ask(&stranger.socket, &ClientMessage::DefineSet { members: vec![1, 2] });
    assert!(matches!(answer_set, ManagerMessage::Refused { .. }), "{answer_set:?}");
    must_be_as_before();
    drop(stranger);
    manager.has_sessions(1);
    must_be_as_before();

    // The owner's lease and operation work as if nobody had been there.
    let restore = restore_of(&owner, &ground, lease, operation(0, 3), PageEntry::page(hash(1), 1));
    let restored = answer(&mut owner, restore);
    assert_eq!((status(&restored), restored.pages), ((Status::Ok, Code::None), 1));
    let release = RequestBody::Release { lease };
    let release = owner.record(&request(operation(0, 4), none, release));
    let published = owner.published();
    owner.submit(&[release]);
    owner.must_publish(published + 2);
    let ends = [0, 1].map(|at| owner.completion(published + at));
    assert!(ends.iter().all(|end| status(end) == (Status::Ok, Code::None)), "{ends:?}");
    assert!(ends.iter().any(|end| end.operation_index == drain.index));
    manager.stop();
}

/// Goal: a stream of the engine that waits for the done word of a restore passes however the session
/// ends: the odd word is stored for one that was under way, for one that was refused in the same
/// batch, and for one that was still in the ring. Method: one batch of two restores, a record that
/// breaks the protocol, and another restore.
#[test]
fn a_session_that_is_cut_off_leaves_no_restore_without_its_done_word() {
    let manager = setup!().dram("16MiB").start();
    for round in 0..20 {
        let mut raw = Raw::attach(&manager.socket());
        let ground = Ground::new(&raw, "done");
        let save = save_of(&raw, &ground, operation(0, 1), PageEntry::page(hash(1), 0));
        assert_eq!(status(&answer(&mut raw, save)).0, Status::Ok, "{round}");
        let query = query_of(&raw, &ground, operation(0, 2), 0, 1);
        let lease = LeaseId(answer(&mut raw, query).lease);
        let taken = restore_of(&raw, &ground, lease, operation(5, 1), PageEntry::page(hash(1), 1));
        raw.side.pages.write(1, PageEntry::page(hash(1), 1));
        let nobodys = restore_body(ground.region, LeaseId(!lease.0), 0);
        let mut refused =
            raw.record(&request(operation(4, 1), PageRange { start: 1, len: 1 }, nobodys));
        let mut broken =
            raw.record(&request(operation(6, 1), PageRange::default(), RequestBody::Ping));
        broken.epoch ^= 1;
        let mut left =
            restore_of(&raw, &ground, lease, operation(7, 9), PageEntry::page(hash(1), 1));
        for (record, place) in [&mut refused, &mut broken, &mut left].into_iter().zip(1..) {
            record.sequence = raw.position + place;
        }
        raw.submit(&[taken, refused, broken, left]);
        raw.must_be_closed();
        let word = |index| raw.side.done.load(index, 0);
        let started = std::time::Instant::now();
        while word(7) != operation(7, 9).failed_word() {
            assert!(started.elapsed() < PATIENCE, "a stream would wait for ever");
        }
        let ends = [operation(5, 1).done_word(), operation(5, 1).failed_word()];
        assert!(ends.contains(&word(5)), "{:#x}", word(5));
        assert_eq!(word(4), operation(4, 1).failed_word(), "refused, and its answer not published");
        assert_eq!(word(6), 0, "nobody waits for a ping");
    }
    manager.has_sessions(0);
    manager.stop();
}

/// Goal: a record without pages is done at once and changes nothing (ENG-17). Method: by hand, since
/// the client library does not send them.
#[test]
fn eng_17_records_without_pages_change_nothing() {
    let manager = setup!().dram("16MiB").start();
    let mut raw = Raw::attach(&manager.socket());
    let ground = Ground::new(&raw, "eng-17");
    let save = save_of(&raw, &ground, operation(0, 1), PageEntry::page(hash(1), 0));
    assert_eq!(status(&answer(&mut raw, save)).0, Status::Ok);
    let query = query_of(&raw, &ground, operation(0, 2), 0, 1);
    let lease = LeaseId(answer(&mut raw, query).lease);
    let session = raw.welcome.session;
    let (_, before) = must_show(&manager, session, "a lease", |_, leases| leases.len() == 1);
    let Ground { scope, region, .. } = ground;
    let restore = |keep| match restore_body(region, lease, 0) {
        RequestBody::Restore { region, lease, offset, fence, by_layer, .. } => {
            RequestBody::Restore { region, lease, offset, fence, keep, by_layer }
        }
        other => other,
    };
    let bodies = [
        RequestBody::Save { region, fence: None },
        RequestBody::Query { scope, mode: QueryMode::Demand },
        RequestBody::Query { scope, mode: QueryMode::Speculative },
        RequestBody::Query { scope, mode: QueryMode::Candidate },
        RequestBody::Prepare { scope },
        restore(true),
        restore(false),
    ];
    for (generation, body) in (3..).zip(bodies) {
        for start in [0, 1024] {
            let id = operation(1 + start / 1024, generation);
            let record = raw.record(&request(id, PageRange { start, len: 0 }, body));
            let ended = answer(&mut raw, record);
            assert_eq!(status(&ended), (Status::Ok, Code::None), "{body:?}");
            assert_eq!((ended.pages, ended.bytes, ended.lease), (0, 0, 0), "{body:?}");
        }
    }
    must_show(&manager, session, "the lease is as it was", |_, leases| leases == before);
    manager.counted(BAD_REQUESTS, 0);
    let restore = restore_of(&raw, &ground, lease, operation(0, 3), PageEntry::page(hash(1), 1));
    assert_eq!(status(&answer(&mut raw, restore)), (Status::Ok, Code::None));
    manager.stop();
}
