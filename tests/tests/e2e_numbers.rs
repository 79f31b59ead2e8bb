//! Exact counts, and what must not grow: hits, bytes, leases, pinned memory.

use std::time::Duration;

use orbitkv_engine::{Client, Code, Completion, Connect, Deadline, QueryMode, Status};
use orbitkv_shm_protocol::telemetry::{
    CopyDirection, CopyMethod, HeldIn, LeaseEnd, Metric, Reason,
};
use orbitkv_tests::engine::{Engine, blocks, hashes, namespace};
use orbitkv_tests::manager::PATIENCE;
use orbitkv_tests::setup;

const KIB: u64 = 1024;
const MIB: u64 = 1024 * KIB;

#[test]
fn met_01_ten_pages_asked_six_present_three_times() {
    let manager = setup!().start();
    let mut engine = Engine::attach(&manager.socket(), namespace("met-01", 4 * KIB), 10);
    let pages = hashes(1, 0..10);
    let _ = engine.save(&blocks(&pages[..6], 0)).ok();
    for _ in 0..3 {
        let hit = engine.query(&pages, QueryMode::Demand).ok();
        assert_eq!((hit.pages, hit.pages_dram, hit.pages_ssd), (6, 6, 0));
        let _ = engine.release(hit.leased()).ok();
    }
    manager.counted(Metric::LookupPages, 30);
    manager.counted(Metric::LookupHitPages(HeldIn::Dram), 18);
    manager.counted(Metric::LookupHitPages(HeldIn::Ssd), 0);
    manager.counted(Metric::LookupMissedPages(Reason::Absent), 12);
}

/// Method: the scenario's numbers, with a demand query as the prepare.
#[test]
fn met_03_every_direction_counts_its_bytes() {
    let manager = setup!().ssd("64MiB").start();
    let mut engine = Engine::attach(&manager.socket(), namespace("met-03", MIB), 5);
    let pages = hashes(1, 0..5);
    let _ = engine.save(&blocks(&pages, 0)).ok();
    manager.evict();
    let lease = engine.query(&pages, QueryMode::Demand).ok().leased();
    let _ = engine.restore(&lease, 0, &blocks(&pages, 0)).ok();
    let lease = engine.query(&pages[..2], QueryMode::Demand).ok().leased();
    let _ = engine.restore(&lease, 0, &blocks(&pages[..2], 0)).ok();
    engine.check(&blocks(&pages, 0));
    manager.counted(Metric::DeviceCopiedBytes(CopyDirection::DeviceToHost), 5_242_880);
    manager.counted(Metric::SsdWrittenBytes, 5_242_880);
    manager.counted(Metric::SsdReadBytes, 5_242_880);
    manager.counted(Metric::DeviceCopiedBytes(CopyDirection::HostToDevice), 7_340_032);
    manager.counted(Metric::DeviceMethodCopies(CopyMethod::Cpu), 12);
    manager.counted(Metric::DeviceMethodBytes(CopyMethod::Cpu), 12_582_912);
    manager.counted(Metric::SsdWriteQueueFull, 0);
}

/// Goal: eight engines that ask for one cold prefix at once cost one read of it, and one that gives
/// up takes nothing from the others. Method: every request is in its ring before the last engine's
/// wakes anybody; engine 3 cancels at once, whether or not its query has ended by then.
#[test]
fn perf_11_one_cold_prefix_is_read_once_for_eight_engines() {
    const PAGE: u64 = 32 * KIB;
    let manager = setup!().dram("160MiB").ssd("128MiB").start();
    let pages = hashes(1, 0..256);
    let mut engines: Vec<Engine> = (0..8)
        .map(|_| Engine::attach(&manager.socket(), namespace("perf-11", PAGE), 256))
        .collect();
    let _ = engines[0].save(&blocks(&pages, 0)).ok();
    manager.evict();
    let queries: Vec<_> = engines
        .iter_mut()
        .map(|engine| {
            let scope = engine.scope;
            engine.client.query(&scope, &pages, QueryMode::Demand, Deadline::DEFAULT).unwrap()
        })
        .collect();
    for engine in &mut engines {
        engine.client.submit().unwrap();
    }
    let cancel = engines[3].client.cancel(queries[3]).unwrap();
    let _ = engines[3].end(cancel).ok();
    for (number, (engine, query)) in engines.iter_mut().zip(queries).enumerate() {
        let ended = engine.end(query);
        if number == 3 {
            let known = [(Status::Ok, Code::None), (Status::Error, Code::Cancelled)];
            assert!(known.contains(&(ended.status, ended.code)), "{ended:?}");
            continue;
        }
        let hit = ended.ok();
        assert_eq!(hit.pages, 256);
        let target = blocks(&pages, 0);
        let _ = engine.restore(&hit.leased(), 0, &target).ok();
        engine.check(&target);
    }
    manager.counted(Metric::SsdReadPages, 256);
    manager.counted(Metric::SsdReadBytes, 256 * PAGE);
    drop(engines);
    manager.settle_empty();
}

/// Method: without a tier below, a set of a third of what the pool turns over; every cycle must
/// give the same numbers as the first.
#[test]
fn cor_11_evicted_pages_are_no_hits_and_an_old_lease_is_unknown() {
    const PAGE: u64 = 16 * KIB;
    let manager = setup!().dram("4MiB").start();
    let mut engine = Engine::attach(&manager.socket(), namespace("cor-11", PAGE), 64);
    let mut first = None;
    for cycle in 0..20 {
        let one: Vec<_> = (0..16).map(|part| hashes(1000 * cycle + part, 0..16)).collect();
        let two: Vec<_> = (100..148).map(|part| hashes(1000 * cycle + part, 0..16)).collect();
        for chain in &one {
            engine.save_all(chain);
        }
        let lease = engine.query(&one[15], QueryMode::Demand).ok().leased();
        let _ = engine.release(lease).ok();
        for chain in &two {
            engine.save_all(chain);
        }
        let late = engine.restore(&lease, 0, &blocks(&one[15], 0));
        assert_eq!((late.status, late.code), (Status::Error, Code::UnknownLease));
        let mut hits = 0;
        for chain in one.iter().chain(&two) {
            hits += engine.restore_all(chain);
        }
        // Every page that is in the pool was found through its chain, and no other.
        let seen = manager.settle_empty();
        assert_eq!(u64::from(hits), seen.counters.get(Metric::PoolResidentPages), "{cycle}");
        assert!(hits > 200, "the pool was put to use: {hits}");
        assert!(one.iter().all(|chain| engine.restore_all(chain) == 0), "evicted in {cycle}");
        assert_eq!(*first.get_or_insert(hits), hits, "cycle {cycle} differs from the first");
    }
}

/// Method: as the scenario says, with a time to live of 1 s instead of 5 and budgets to match.
#[test]
fn leak_01_hits_that_nobody_fetches_stay_within_budget_and_expire() {
    const PAGE: u64 = 64 * KIB;
    let setup = setup!().dram("32MiB").flag("--query-budget", "8MiB").flag("--lease-ttl", "1s");
    let manager = setup.start();
    let socket = manager.socket();
    let mut forgetful = Engine::attach(&socket, namespace("leak-01", PAGE), 32);
    let mut other = Engine::attach(&socket, namespace("leak-01-other", PAGE), 32);
    let pages = hashes(1, 0..32);
    let _ = forgetful.save(&blocks(&pages, 0)).ok();
    let (mut leased, mut refused) = (0_u64, 0);
    let scope = forgetful.scope;
    for round in 0..100 {
        for _ in 0..100 {
            let mode = QueryMode::Candidate;
            forgetful.client.query(&scope, &pages, mode, Deadline::DEFAULT).unwrap();
        }
        for _ in 0..100 {
            let ended = forgetful.next_end();
            match (ended.status, ended.code) {
                (Status::Ok, Code::None) => leased += 1,
                (Status::Partial, Code::OverBudget) => refused += 1,
                _ => panic!("{ended:?}"),
            }
        }
        // Another engine is served all the time.
        let saved = other.save(&blocks(&hashes(100 + round, 0..8), 0)).ok();
        assert_eq!(saved.pages, 8);
    }
    assert_eq!(leased + refused, 10_000);
    assert!(leased >= 4 && refused > 0, "{leased} leased, {refused} refused");
    let seen = manager.settle_empty();
    assert!(seen.budget.total_peak_bytes <= 8 * MIB, "{:?}", seen.budget);
    let granted = seen.counters.get(Metric::LeasesGranted);
    assert_eq!(seen.counters.get(Metric::LeasesEnded(LeaseEnd::Expired)), granted);
    assert_eq!(forgetful.restore_all(&pages), 32, "the pages themselves are still there");
}

/// Goal: an expired lease is refused by name and restores nothing.
#[test]
fn an_expired_lease_says_so() {
    let manager = setup!().flag("--lease-ttl", "100ms").start();
    let mut engine = Engine::attach(&manager.socket(), namespace("expiry", 4 * KIB), 4);
    let pages = hashes(1, 0..4);
    let _ = engine.save(&blocks(&pages, 0)).ok();
    let lease = engine.query(&pages, QueryMode::Demand).ok().leased();
    manager.counted(Metric::LeasesEnded(LeaseEnd::Expired), 1);
    let late = engine.restore(&lease, 0, &blocks(&pages, 0));
    assert_eq!((late.status, late.code), (Status::Error, Code::ExpiredLease));
    let release = engine.release(lease);
    assert_eq!((release.status, release.code), (Status::Error, Code::ExpiredLease));
    assert!(blocks(&pages, 0).iter().all(|block| engine.is_poison(block)));
    manager.settle_empty();
}

/// Goal: as many sessions as a Manager takes are all served at once, and the next is told the
/// number. Method: all requests are in their rings before any answer is read.
#[test]
fn sixty_four_sessions_are_all_served_and_the_next_is_refused() {
    let manager = setup!().start();
    let socket = manager.socket();
    let connect = Connect::new(&socket).ring_capacity(64).page_entries(1024);
    let attach = |number: u64| {
        let spec = namespace(&format!("session-{number}"), 4 * KIB);
        let (way, shape) =
            (orbitkv_tests::engine::Way::Sealed, orbitkv_tests::engine::Shape::Split);
        Engine::connect(&connect, spec, 8, way, shape)
    };
    let mut engines: Vec<Engine> = (0..64).map(attach).collect();
    let refused = connect.connect().map(|client: Client| client.session());
    let words = refused.unwrap_err().to_string();
    assert!(words.contains("LimitReached") && words.contains("64"), "{words}");
    for round in 0..5_u64 {
        for (number, engine) in engines.iter_mut().enumerate() {
            let blocks = blocks(&hashes(100 * round + number as u64, 0..4), 0);
            engine.fill(&blocks);
            engine.client.save(&engine.region, &blocks).unwrap();
            engine.client.submit().unwrap();
        }
        let done: Vec<Completion> =
            engines.iter_mut().map(|engine| engine.next_end().ok().completion).collect();
        assert!(done.iter().all(|saved| saved.pages == 4));
    }
    for (number, engine) in engines.iter_mut().enumerate() {
        assert_eq!(engine.restore_all(&hashes(400 + number as u64, 0..4)), 4);
    }
    // A place that becomes free is given to the next.
    engines.pop();
    manager.settle("a session is gone", |seen| seen.sessions.len() == 63);
    let mut next = attach(64);
    next.client.ping().unwrap();
    assert!(next.client.wait(PATIENCE).unwrap().is_some());
    let idle = next.client.wait(Duration::ZERO);
    assert!(matches!(idle, Ok(None)), "{idle:?}");
}
