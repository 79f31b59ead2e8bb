//! Clients that break their rings, records and tables in every way that the layout allows. Each
//! costs its own session and nobody else anything.
//!
//! Fault model: a client can write any byte of its submission segment at any time, in any order,
//! and move every index. It cannot write the completion segment.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use orbitkv_shm_protocol::ids::{LeaseId, OperationId, PageHash, RegionId, ScopeId};
use orbitkv_shm_protocol::record::{
    PageEntry, PageRange, QueryMode, Request, RequestBody, RequestRecord,
};
use orbitkv_shm_protocol::telemetry::{CloseReason, Metric};
use orbitkv_tests::manager::PATIENCE;
use orbitkv_tests::raw::{GEOMETRY, Raw, operation};
use orbitkv_tests::setup;
use orbitkv_tests::victim::{PAGE, Traffic, sealed_memory};

const CLOSED_BY_FAULT: Metric = Metric::SessionsClosed(CloseReason::PeerFault);
const BAD_REQUESTS: Metric = Metric::SessionBadRequests;

fn request(operation: OperationId, body: RequestBody) -> Request {
    Request { operation, deadline_ms: 0, range: PageRange::default(), body }
}

fn ping(raw: &Raw, index: u32, generation: u32) -> RequestRecord {
    raw.record(&request(operation(index, generation), RequestBody::Ping))
}

/// One namespace and one region over sealed memory, as an honest client would register them.
fn register(raw: &Raw, model: &str) -> (ScopeId, RegionId) {
    let scope = raw.define(model);
    let bytes = 16 * PAGE as u64;
    let memory = raw.register_memfd(&sealed_memory(bytes), bytes);
    (scope, raw.register_pages(scope, memory, 0, 16))
}

/// Goal: whatever is impossible in a ring closes that session, at once or at the next look, and is
/// counted once. Method: one session for each kind of violation beside a session that works.
#[test]
fn a_broken_ring_costs_its_own_session_only() {
    let mut manager = setup!().dram("16MiB").start();
    let traffic = Traffic::start(&manager.socket());
    type Attack = (&'static str, fn(&mut Raw));
    let attacks: [Attack; 11] = [
        ("tail beyond the ring", |raw| raw.set_tail(65)),
        ("tail at the far end", |raw| raw.set_tail(u64::MAX)),
        ("tail half way round", |raw| raw.set_tail(1 << 63)),
        ("tail goes backwards", |raw| {
            let records: Vec<_> = (0..3).map(|index| ping(raw, index, 1)).collect();
            for (offset, mut record) in (0..).zip(records) {
                record.sequence = offset;
                raw.submit(&[record]);
            }
            raw.must_publish(3);
            raw.set_tail(1);
        }),
        ("records that were never written", |raw| raw.set_tail(3)),
        ("sequence of another position", |raw| {
            let mut record = ping(raw, 0, 1);
            record.sequence = 64;
            raw.submit(&[record]);
        }),
        ("session of somebody else", |raw| {
            let mut record = ping(raw, 0, 1);
            record.session = 1;
            raw.submit(&[record]);
        }),
        ("epoch of another life", |raw| {
            let mut record = ping(raw, 0, 1);
            record.epoch ^= 1;
            raw.submit(&[record]);
        }),
        ("completions taken that were never there, then a request", |raw| {
            raw.set_completion_head(7);
            let record = ping(raw, 0, 1);
            raw.submit(&[record]);
        }),
        ("completions taken that were never there, and silence", |raw| raw.set_completion_head(7)),
        ("completions given back", |raw| {
            // The Manager looks at the index when it knows of no free record: once a ring.
            for number in 0..u64::from(2 * GEOMETRY.ring_capacity) {
                let record = ping(raw, (number % 8) as u32, 1 + (number / 8) as u32);
                raw.submit(&[record]);
                raw.must_publish(number + 1);
                raw.set_completion_head(number + 1);
            }
            raw.set_completion_head(2);
        }),
    ];
    for (number, (what, attack)) in (1..).zip(attacks) {
        let mut raw = Raw::attach(&manager.socket());
        attack(&mut raw);
        assert!(raw.is_closed(PATIENCE), "{what}: the session lives on");
        traffic.must_go_on();
        assert!(manager.is_running(), "{what}");
        manager.counted(CLOSED_BY_FAULT, number);
    }
    manager.counted(Metric::SessionsOpened, 12);
    manager.has_sessions(1);
    assert!(traffic.end() > 0);
    manager.has_sessions(0);
    manager.counted(Metric::SessionsClosed(CloseReason::Detached), 1);
    manager.counted(CLOSED_BY_FAULT, 11);
    manager.stop();
}

/// Goal: a completion ring that nobody reads stops its owner when its credits are used up, and
/// nobody else; a ring that is read again after that is of no use any more.
#[test]
fn a_client_that_never_consumes_runs_out_of_credits() {
    let manager = setup!().dram("16MiB").start();
    let traffic = Traffic::start(&manager.socket());
    let mut raw = Raw::attach(&manager.socket());
    for index in 0..GEOMETRY.ring_capacity {
        let record = ping(&raw, index, 1);
        raw.submit(&[record]);
    }
    raw.must_publish(64);
    assert!(!raw.is_closed(Duration::ZERO), "64 are its right");
    traffic.must_go_on();
    let record = ping(&raw, 0, 2);
    raw.submit(&[record]);
    raw.must_be_closed();
    assert_eq!(raw.published(), 64);
    traffic.must_go_on();
    traffic.end();
    manager.counted(CLOSED_BY_FAULT, 1);
    manager.stop();
}

/// Goal: each field that no correct client writes gets one error completion, the fifteenth leaves
/// the session alive and the sixteenth closes it.
#[test]
fn fifteen_bad_fields_are_answered_and_the_sixteenth_closes() {
    let manager = setup!().dram("16MiB").start();
    let mut raw = Raw::attach(&manager.socket());
    let (scope, region) = register(&raw, "fields");
    let query = |raw: &Raw, index, start, len| {
        let body = RequestBody::Query { scope, mode: QueryMode::Demand };
        let range = PageRange { start, len };
        raw.record(&Request { range, ..request(operation(index, 1), body) })
    };
    type Spoil<'a> = &'a dyn Fn(&Raw) -> RequestRecord;
    let with = |raw: &Raw, change: &dyn Fn(&mut RequestRecord)| {
        let mut record = ping(raw, 9, 1);
        change(&mut record);
        record
    };
    let bad: [Spoil<'_>; 15] = [
        &|raw| with(raw, &|record| record.kind = 0),
        &|raw| with(raw, &|record| record.kind = 4711),
        &|raw| with(raw, &|record| record.kind = u16::MAX),
        &|raw| with(raw, &|record| record.flags = u16::MAX),
        &|raw| with(raw, &|record| record.reserved = 1),
        &|raw| with(raw, &|record| record.operation_index = 64),
        &|raw| with(raw, &|record| record.operation_index = u32::MAX),
        &|raw| with(raw, &|record| record.range_len = 1),
        // The generation of operation 0 was used by the first honest ping below.
        &|raw| ping(raw, 0, 1),
        &|raw| query(raw, 1, 1024, 1),
        &|raw| query(raw, 1, 1000, 25),
        &|raw| query(raw, 1, u32::MAX, 2),
        &|raw| query(raw, 1, 0, u32::MAX),
        &|raw| query(raw, 1, 0, 16_385),
        &|raw| {
            let body = RequestBody::Save { region, fence: None };
            let mut record = raw.record(&request(operation(1, 1), body));
            (record.range_start, record.range_len) = (u32::MAX, u32::MAX);
            record
        },
    ];
    let record = ping(&raw, 0, 1);
    raw.submit(&[record]);
    for (number, spoil) in (2..).zip(bad) {
        let record = spoil(&raw);
        raw.submit(&[record]);
        raw.must_publish(number);
        raw.set_completion_head(number);
        manager.counted(BAD_REQUESTS, number - 1);
        assert!(!raw.is_closed(Duration::ZERO), "closed by {record:?}");
    }
    // Handles of others and of nobody are refusals, no faults.
    for (number, body) in (17..).zip([
        RequestBody::Release { lease: LeaseId(u64::MAX) },
        RequestBody::Unregister { region: RegionId(u32::MAX) },
        RequestBody::Forget { scope: ScopeId(u32::MAX) },
        RequestBody::Cancel { operation: operation(u32::MAX, u32::MAX) },
    ]) {
        let record = raw.record(&request(operation(number as u32, 1), body));
        raw.submit(&[record]);
        raw.must_publish(number);
        raw.set_completion_head(number);
    }
    manager.counted(BAD_REQUESTS, 15);
    assert!(!raw.is_closed(Duration::ZERO));
    let record = with(&raw, &|record| record.kind = 99);
    raw.submit(&[record]);
    raw.must_be_closed();
    manager.counted(BAD_REQUESTS, 16);
    manager.counted(CLOSED_BY_FAULT, 1);
    manager.stop();
}

/// Goal: no record can panic, hang or over-read the Manager. Method: records of random bytes, some
/// with an honest head so that they are looked into, in batches to the end of each session; the
/// seed is printed.
#[test]
fn random_records_harm_nobody() {
    let seed = 0x0b17_c0de;
    println!("seed {seed:#x}");
    let mut random = fastrand::Rng::with_seed(seed);
    let mut manager = setup!().dram("16MiB").start();
    let traffic = Traffic::start(&manager.socket());
    for round in 0..40 {
        let mut raw = Raw::attach(&manager.socket());
        let (scope, region) = register(&raw, "fuzz");
        for index in 0..GEOMETRY.page_entries {
            if round % 2 == 0 {
                let mut bytes = [0; 48];
                random.fill(&mut bytes);
                let offset = GEOMETRY.page_table_offset() + index as usize * 48;
                raw.poke(offset, &bytes);
            } else {
                let hash = PageHash([random.u8(..4); 32]);
                raw.side.pages.write(index, PageEntry::page(hash, random.u32(..32)));
            }
        }
        for _ in 0..24 {
            let mut record = RequestRecord::default();
            random.fill(bytemuck::bytes_of_mut(&mut record));
            if round % 4 != 0 {
                // Everything but the arguments is right, and most arguments are near it.
                let kind = 1 + random.u16(..10);
                let index = random.u32(..70);
                record.session = raw.welcome.session;
                record.epoch = raw.welcome.epoch;
                record.sequence = raw.position;
                record.operation_index = index;
                record.operation_generation = 1 + random.u32(..3);
                record.kind = kind;
                record.flags = if random.bool() { 0 } else { random.u16(..8) };
                record.deadline_ms = random.u32(..50);
                record.range_start = random.u32(..1030);
                record.range_len = random.u32(..40);
                record.subject = random.u64(..5);
                record.target = if random.bool() { scope.0 } else { region.0 };
                record.offset = random.u32(..4);
                record.fence = u32::from(random.u8(..8) == 0);
                record.reserved = 0;
            }
            raw.submit(&[record]);
            if random.u8(..4) == 0 {
                raw.set_completion_head(raw.published());
            }
        }
        traffic.must_go_on();
        if round % 3 == 0 {
            raw.must_be_closed_or_quiet();
        }
    }
    assert!(manager.is_running());
    traffic.must_go_on();
    manager.has_sessions(1);
    traffic.end();
    manager.has_sessions(0);
    manager.settle_empty();
    manager.stop();
}

/// Goal: the page table is copied once, so what changes under the reader is garbage of that client
/// alone; overlapping ranges are refused while the first is in use.
#[test]
fn a_page_table_that_changes_under_the_reader_harms_nobody() {
    let mut manager = setup!().dram("16MiB").start();
    let traffic = Traffic::start(&manager.socket());
    let mut raw = Raw::attach(&manager.socket());
    let (scope, region) = register(&raw, "changing");
    let ended = AtomicBool::new(false);
    let table = raw.submission_copy();
    std::thread::scope(|threads| {
        threads.spawn(|| {
            let mut random = fastrand::Rng::with_seed(3);
            let mut bytes = [0; 64 * 48];
            while !ended.load(Ordering::Relaxed) {
                random.fill(&mut bytes);
                let offset = GEOMETRY.page_table_offset() as u64;
                std::os::unix::fs::FileExt::write_all_at(&table, &bytes, offset).unwrap();
            }
        });
        let mut sent = 0;
        'sessions: for generation in 1..40 {
            for index in 0..8 {
                let body = match index % 3 {
                    0 => RequestBody::Save { region, fence: None },
                    1 => RequestBody::Query { scope, mode: QueryMode::Demand },
                    _ => RequestBody::Prepare { scope },
                };
                // Neighbours overlap.
                let range = PageRange { start: index * 4, len: 6 };
                let spec = Request { range, ..request(operation(index, generation), body) };
                let record = raw.record(&spec);
                raw.submit(&[record]);
                sent += 1;
            }
            let started = std::time::Instant::now();
            while raw.published() < sent {
                if raw.is_closed(Duration::from_millis(1)) {
                    break 'sessions;
                }
                assert!(started.elapsed() < PATIENCE);
            }
            raw.set_completion_head(raw.published());
        }
        ended.store(true, Ordering::Relaxed);
    });
    traffic.must_go_on();
    assert!(manager.is_running());
    drop(raw);
    manager.has_sessions(1);
    traffic.end();
    manager.stop();
}

/// Goal: a doorbell that never holds still keeps nobody from being served.
#[test]
fn a_doorbell_that_never_holds_still_holds_nobody() {
    let manager = setup!().dram("16MiB").start();
    let traffic = Traffic::start(&manager.socket());
    let mut raw = Raw::attach(&manager.socket());
    for value in 0..20_000 {
        raw.set_doorbell(value);
    }
    traffic.must_go_on();
    assert!(!raw.is_closed(Duration::ZERO));
    traffic.end();
    manager.stop();
}
