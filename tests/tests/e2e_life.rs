//! Ends of things: cancel, drain, forget, unregister, dead and stopped peers. Every operation ends
//! once, nothing stays held, and nobody waits for anybody else.

use std::fs::File;
use std::time::Duration;

use orbitkv_engine::{
    Block, Code, Connect, ConnectError, Deadline, Gone, Operation, PageOutcome, PageResult,
    QueryMode, RegionLayout, RequestKind, RestoreOptions, Segment, Status, SubmitError,
    engine_id_random,
};
use orbitkv_shm_protocol::telemetry::{LeaseEnd, Metric};
use orbitkv_tests::engine::{Ended, Engine, Way, blocks, hashes, namespace};
use orbitkv_tests::engine_process::{EngineProcess, Identity};
use orbitkv_tests::manager::{Manager, PATIENCE};
use orbitkv_tests::setup;
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::process::Signal;

const KIB: u64 = 1024;
const MIB: u64 = 1024 * KIB;
const PAGE: u64 = 64 * KIB;

/// Both ends of a cancelled operation, which must come in this order.
fn cancelled(engine: &mut Engine, target: Operation) -> Ended {
    let cancel = engine.client.cancel(target).unwrap();
    let first = engine.next_end();
    assert_eq!(first.operation, target, "the cancelled one ends first");
    let second = engine.next_end().ok();
    assert_eq!(second.operation, cancel);
    assert_eq!(engine.client.cancel(target), Err(SubmitError::StaleHandle), "it has ended");
    first
}

/// Goal: a cancelled save has read its device pages for the last time, and left no half page
/// (COR-03). Method: the pages are overwritten the moment the save has ended; what is found then must
/// be the old bytes. Every other cancel is taken together with its save, the others at another
/// point of the copy each round.
#[test]
fn cor_03_a_cancelled_save_leaves_the_old_bytes_or_a_miss() {
    let manager = setup!().start();
    let mut engine = Engine::attach(&manager.socket(), namespace("cor-03", MIB), 32);
    let (mut cut, mut found) = (0, 0);
    for round in 0..24 {
        let pages = hashes(round, 0..32);
        let source = blocks(&pages, 0);
        engine.fill(&source);
        let save = engine.client.save(&engine.region, &source).unwrap();
        if round % 2 == 1 {
            engine.client.submit().unwrap();
            // From "not taken yet" to "copied": so many system calls later.
            for _ in 0..round * round * 20 {
                engine.client.check_manager().unwrap();
            }
        }
        let ended = cancelled(&mut engine, save);
        let stored = ended.results.iter().filter(|p| p.outcome == PageOutcome::Stored).count();
        assert_eq!(stored, ended.pages as usize);
        cut += u32::from(ended.status != Status::Ok);
        engine.poison(&source);
        found += engine.restore_all(&pages);
    }
    assert!(cut > 0, "no save was cut short: nothing was tested");
    manager.settle_empty();
    manager.counted(Metric::SaveStoredPages, u64::from(found));
}

/// Goal: a query that waits for budget ends at its cancel, and gives its turn to the next.
#[test]
fn a_waiting_query_is_cancelled() {
    let manager = setup!().flag("--query-budget", "1MiB").start();
    let mut engine = Engine::attach(&manager.socket(), namespace("waiting", 128 * KIB), 8);
    let pages = hashes(1, 0..8);
    let _ = engine.save(&blocks(&pages, 0)).ok();
    let lease = engine.query(&pages, QueryMode::Demand).ok().leased();
    let scope = engine.scope;
    let mut ask =
        || engine.client.query(&scope, &pages[..2], QueryMode::Demand, Deadline::DEFAULT).unwrap();
    let (first, second) = (ask(), ask());
    engine.client.submit().unwrap();
    manager.settle("both wait", |seen| seen.budget.waiting_queries == 2);
    let ended = cancelled(&mut engine, first);
    assert_eq!((ended.status, ended.code, ended.lease), (Status::Error, Code::Cancelled, None));
    assert!(ended.results.iter().all(|page| page.outcome == PageOutcome::Miss));
    let _ = engine.release(lease).ok();
    let served = engine.end(second).ok();
    let _ = engine.release(served.leased()).ok();
    // One that nobody makes room for ends at its deadline.
    let lease = engine.query(&pages, QueryMode::Demand).ok().leased();
    let soon = Deadline::after(Duration::from_millis(20));
    let query = engine.client.query(&scope, &pages, QueryMode::Demand, soon).unwrap();
    let ended = engine.end(query);
    assert_eq!((ended.status, ended.code, ended.lease), (Status::Error, Code::Deadline, None));
    let _ = engine.release(lease).ok();
    manager.settle_empty();
}

/// Goal: queries and restores are cancelled wherever they are, reading from SSD or copying: nothing
/// stays pinned or counted, and what the restore says it restored is right (LEAK-03).
#[test]
fn leak_03_cancels_of_reads_and_copies_give_everything_back() {
    let manager = setup!().ssd("128MiB").start();
    let mut engine = Engine::attach(&manager.socket(), namespace("reads", MIB), 32);
    let pages = hashes(1, 0..24);
    let _ = engine.save(&blocks(&pages, 0)).ok();
    let (scope, region) = (engine.scope, engine.region);
    let mut cut = 0;
    for round in 0..18 {
        if round % 3 != 2 {
            manager.evict();
        }
        let is_restore = round % 2 == 0;
        let target = blocks(&pages, 0);
        let operation = if is_restore {
            let lease = engine.query(&pages, QueryMode::Candidate).ok().leased();
            engine.poison(&target);
            let options = RestoreOptions::default();
            engine.client.restore(&lease, 0, &region, &target, options).unwrap()
        } else {
            engine.client.query(&scope, &pages, QueryMode::Demand, Deadline::DEFAULT).unwrap()
        };
        engine.client.submit().unwrap();
        let before = manager.get(Metric::SsdReadPages);
        if round % 4 >= 2 {
            manager.settle("a read has ended", |s| {
                s.counters.get(Metric::SsdReadPages) > before || s.operations.is_empty()
            });
        }
        let ended = cancelled(&mut engine, operation);
        cut += u32::from(ended.status != Status::Ok);
        if is_restore {
            let right = |(page, block): (&PageResult, &Block)| {
                page.outcome != PageOutcome::Restored || engine.holds(block)
            };
            assert!(ended.results.iter().zip(&target).all(right), "{ended:?}");
            let restored =
                ended.results.iter().filter(|p| p.outcome == PageOutcome::Restored).count();
            assert_eq!(restored, ended.pages as usize);
        } else if let Some(lease) = ended.lease {
            let _ = engine.release(lease).ok();
        }
        manager.settle_empty();
    }
    assert!(cut > 0, "nothing was cut short: nothing was tested");
    assert_eq!(engine.restore_all(&pages), 24);
}

/// Goal: a drain answers when the session owns nothing: not before the operations in front of it,
/// not while it holds a lease, and not for ever.
#[test]
fn a_drain_waits_for_operations_and_leases() {
    let manager = setup!().start();
    let mut engine = Engine::attach(&manager.socket(), namespace("drain", MIB), 16);
    let pages = hashes(1, 0..16);
    engine.fill(&blocks(&pages, 0));
    let save = engine.client.save(&engine.region, &blocks(&pages, 0)).unwrap();
    let drain = engine.client.drain(Deadline::DEFAULT).unwrap();
    assert_eq!(engine.next_end().ok().operation, save);
    assert_eq!(engine.next_end().ok().operation, drain);

    let lease = engine.query(&pages, QueryMode::Demand).ok().leased();
    let soon = Deadline::after(Duration::from_millis(20));
    let drain = engine.client.drain(soon).unwrap();
    let ended = engine.end(drain);
    assert_eq!((ended.status, ended.code), (Status::Error, Code::Deadline));
    let drain = engine.client.drain(Deadline::DEFAULT).unwrap();
    let release = engine.client.release(lease).unwrap();
    assert_eq!(engine.next_end().ok().operation, release);
    assert_eq!(engine.next_end().ok().operation, drain);
}

/// Goal: after a forget nothing of the namespace is found, saves that were in flight included;
/// other namespaces and the memory are as if it had never been (ENG-11).
#[test]
fn eng_11_forget_covers_saves_in_flight_and_leases_in_use() {
    let manager = setup!().ssd("128MiB").start();
    let socket = manager.socket();
    let mut old = Engine::attach(&socket, namespace("weights-1", MIB), 16);
    let mut kept = Engine::attach(&socket, namespace("weights-2", MIB), 4);
    let pages = hashes(1, 0..16);
    assert_eq!(kept.save(&blocks(&pages[..4], 0)).ok().pages, 4);
    let scope = old.scope;
    for round in 0..4 {
        // Half of them are there, the others are being saved.
        let _ = old.save(&blocks(&pages[..8], 0)).ok();
        let lease = old.query(&pages[..8], QueryMode::Demand).ok().leased();
        old.fill(&blocks(&pages, 0));
        let save = old.client.save(&old.region, &blocks(&pages, 0)).unwrap();
        let forget = old.client.forget(&scope).unwrap();
        let forgotten = old.end(forget).ok();
        assert!(forgotten.pages >= 8, "{forgotten:?}");
        let saved = old.end(save);
        let codes = [Code::None, Code::Forgotten, Code::ParentAbsent];
        assert!(saved.results.iter().all(|page| codes.contains(&page.code)), "{saved:?}");
        assert_eq!(old.query(&pages, QueryMode::Demand).ok().pages, 0, "round {round}");
        // What is leased stays restorable until the lease ends.
        let target = blocks(&pages[..8], 8);
        let _ = old.restore(&lease, 0, &target).ok();
        old.check(&target);
        assert_eq!(old.query(&pages, QueryMode::Demand).ok().pages, 0);
        manager.settle("only the other namespace's pages are left", |seen| {
            seen.pool.used_bytes == 4 * MIB && seen.pages.iter().all(|p| p.count == 4)
        });
    }
    assert_eq!(kept.restore_all(&pages[..4]), 4);
    // The new weights go under the same name if the engine wants that.
    let _ = old.save(&blocks(&pages, 0)).ok();
    assert_eq!(old.restore_all(&pages), 16);
}

/// Goal: an unregister ends after the last copy, and then the memory is the engine's again.
#[test]
fn gpu_09_a_region_in_use_ends_after_its_copies() {
    let manager = setup!().dram("96MiB").start();
    let mut engine = Engine::attach(&manager.socket(), namespace("gpu-09", MIB), 32);
    let pages = hashes(1, 0..32);
    let target = blocks(&pages, 0);
    let _ = engine.save(&target).ok();
    for _ in 0..10 {
        let lease = engine.query(&pages, QueryMode::Demand).ok().leased();
        let region = engine.region;
        engine.poison(&target);
        let options = RestoreOptions::default();
        let restore = engine.client.restore(&lease, 0, &region, &target, options).unwrap();
        let unregister = engine.client.unregister(region).unwrap();
        let late = engine.client.save(&region, &target).unwrap();
        engine.client.submit().unwrap();
        let order =
            [engine.next_end(), engine.next_end(), engine.next_end()].map(|ended| ended.operation);
        let place = |operation| order.iter().position(|&other| other == operation).unwrap();
        assert!(place(restore) < place(unregister), "{order:?}");
        assert!(place(late) < 3);
        engine.check(&target);
        engine.poison(&target);
        let old = engine.client.save(&region, &target).unwrap();
        let refused = engine.end(old);
        assert_eq!((refused.status, refused.code), (Status::Error, Code::UnknownRegion));
        assert!(target.iter().all(|block| engine.is_poison(block)), "a copy came late");
        engine.region = engine.register_again();
        assert_eq!(engine.restore_all(&pages), 32);
    }
    manager.counted(Metric::SessionRegions, 1);
}

/// Goal: when the Manager is killed each outstanding operation ends once as gone, then every call
/// says so (HANG-01). Method: it is stopped first, so that nothing of the batch can end before.
#[test]
fn hang_01_a_killed_manager_ends_each_operation_once() {
    let manager = setup!().start();
    let socket = manager.socket();
    let mut engine = Engine::attach(&socket, namespace("hang-01", 4 * KIB), 8);
    let pages = hashes(1, 0..8);
    let _ = engine.save(&blocks(&pages, 0)).ok();
    let lease = engine.query(&pages, QueryMode::Demand).ok().leased();
    rustix::process::kill_process(manager.pid(), Signal::STOP).unwrap();
    let (scope, region) = (engine.scope, engine.region);
    let client = &mut engine.client;
    let mut staged = vec![
        client.save(&region, &blocks(&pages, 0)).unwrap(),
        client.query(&scope, &pages, QueryMode::Demand, Deadline::DEFAULT).unwrap(),
        client.restore(&lease, 0, &region, &blocks(&pages, 0), RestoreOptions::default()).unwrap(),
        client.drain(Deadline::DEFAULT).unwrap(),
    ];
    while let Ok(ping) = client.ping() {
        staged.push(ping);
    }
    client.submit().unwrap();
    let nothing = client.wait(Duration::from_millis(150));
    assert!(matches!(nothing, Ok(None)), "slow is not dead: {nothing:?}");
    let setup = manager.kill();
    let mut gone = Vec::new();
    let cause = loop {
        match client.wait(PATIENCE) {
            Ok(Some(ended)) => {
                assert_eq!((ended.status, ended.lease), (Status::Gone, None));
                gone.push(ended.operation);
            }
            Ok(None) => panic!("{} operations never end", client.outstanding()),
            Err(cause) => break cause,
        }
    };
    assert_eq!(cause, Gone::Died);
    assert!(!cause.copies_may_run());
    assert_eq!(gone.len(), staged.len());
    assert!(staged.iter().all(|operation| gone.contains(operation)), "each once");
    assert_eq!(client.poll(), Err(Gone::Died));
    assert_eq!(client.ping(), Err(SubmitError::ManagerGone(Gone::Died)));
    assert_eq!(client.release(lease), Err(SubmitError::ManagerGone(Gone::Died)));
    let again = Connect::new(&socket).connect();
    assert!(matches!(again, Err(ConnectError::NotListening { .. })), "{again:?}");

    // The next life knows neither the session nor the lease.
    let manager = setup.start();
    let mut next = Engine::attach(&socket, namespace("hang-01", 4 * KIB), 8);
    assert_ne!(next.client.epoch(), engine.client.epoch());
    let stale = next.client.release(lease);
    assert_eq!(stale, Err(SubmitError::StaleHandle));
    assert_eq!(next.restore_all(&pages), 0, "nothing survives without an SSD tier");
    assert_eq!(manager.fresh().sessions.len(), 1);
}

/// Goal: a clean stop with clients attached and working ends in time and tells them.
#[test]
fn a_clean_stop_tells_every_client() {
    let manager = setup!().start();
    let socket = manager.socket();
    let mut engine = Engine::attach(&socket, namespace("stop", MIB), 8);
    let pages = hashes(1, 0..8);
    let _ = engine.save(&blocks(&pages, 0)).ok();
    let _held = engine.query(&pages, QueryMode::Demand).ok().leased();
    let setup = manager.stop();
    let over = loop {
        let _refused_at_the_end = engine.client.ping();
        match engine.client.wait(PATIENCE) {
            Ok(Some(ended)) => assert_eq!(ended.kind, RequestKind::Ping),
            Ok(None) => {}
            Err(over) => break over,
        }
    };
    assert!(matches!(over, Gone::Died | Gone::Closed), "{over:?}");
    let absent = Connect::new(&socket).connect();
    assert!(matches!(absent, Err(ConnectError::NoSocket { .. })), "{absent:?}");
    drop(setup);
}

/// Goal: a writer that is killed in the middle of a save leaves its key free, its bytes returned
/// and nothing half-made (LEAK-09, LEAK-05). Method: the same keys are then saved by another engine
/// with other bytes under the same namespace; each page found is wholly one engine's or the other's.
fn a_killed_writer_leaves_nothing_half_made(way: Way) {
    let manager = setup!().dram("96MiB").start();
    for round in 0..4_u64 {
        let engine = engine_id_random().unwrap();
        let identity =
            Identity { way, ..Identity::new(engine, &format!("leak-09-{round}"), MIB, 32) };
        let mut writer = EngineProcess::start(manager.setup(), &identity);
        writer.order(&format!("save-on {} 32", 100 * round));
        manager.settle("a copy runs", |seen| {
            seen.operations.iter().any(|operation| operation.stage == "copying")
        });
        writer.kill();
        manager.settle("the writer is gone", |seen| seen.sessions.is_empty());
        manager.settle_empty();
        let mut heir = Engine::attach(&manager.socket(), identity.spec(), 32);
        for sequence in 100 * round..100 * round + 3 {
            let pages = hashes(sequence, 0..32);
            let before = heir.restore_all(&pages);
            let saved = heir.save(&blocks(&pages, 0)).ok();
            assert_eq!((saved.pages_present, saved.pages), (before, 32 - before));
            assert_eq!(heir.restore_all(&pages), 32);
        }
        drop(heir);
        manager.settle("the heir is gone", |seen| seen.sessions.is_empty());
    }
    manager.settle_empty();
}

#[test]
fn leak_09_a_writer_killed_in_a_save_from_a_memfd() {
    a_killed_writer_leaves_nothing_half_made(Way::Sealed);
}

#[test]
fn leak_09_a_writer_killed_in_a_save_from_process_memory() {
    a_killed_writer_leaves_nothing_half_made(Way::Process);
}

/// Goal: requests that are in the ring of a client that died before it rang are dropped or done,
/// and nothing of them stays (HANG-06). Method: the Manager is stopped while they are published.
#[test]
fn hang_06_requests_of_a_client_that_died_before_the_wake() {
    let manager = setup!().start();
    let identity = Identity::new(engine_id_random().unwrap(), "hang-06", 16 * KIB, 16);
    let mut client = EngineProcess::start(manager.setup(), &identity);
    rustix::process::kill_process(manager.pid(), Signal::STOP).unwrap();
    assert_eq!(client.ask("flood 1 16"), "224");
    client.kill();
    rustix::process::kill_process(manager.pid(), Signal::CONT).unwrap();
    manager.settle("the client is gone", |seen| seen.sessions.is_empty());
    manager.settle_empty();
    let mut heir = Engine::attach(&manager.socket(), identity.spec(), 16);
    let pages = hashes(1, 0..16);
    let found = heir.restore_all(&pages);
    assert_eq!(heir.save(&blocks(&pages, 0)).ok().pages, 16 - found);
    assert_eq!(heir.restore_all(&pages), 16);
}

/// Goal: a client that is stopped with its rings full holds nobody up, and goes on when it wakes.
#[test]
fn a_stopped_client_never_holds_another() {
    let manager = setup!().start();
    let engine = engine_id_random().unwrap();
    for way in [Way::Sealed, Way::Process] {
        let identity = Identity { way, ..Identity::new(engine, &format!("{way:?}"), 64 * KIB, 16) };
        let mut sleeper = EngineProcess::start(manager.setup(), &identity);
        assert_eq!(sleeper.ask("flood 1 16"), "224");
        sleeper.signal(Signal::STOP);
        let mut engine = Engine::attach(&manager.socket(), namespace("awake", 64 * KIB), 16);
        for round in 0..40 {
            let pages = hashes(round, 0..16);
            let saved = engine.save(&blocks(&pages, 0)).ok();
            assert_eq!(saved.pages + saved.pages_present, 16);
            assert_eq!(engine.restore_all(&pages), 16);
        }
        // Its completions lie there unread; the Manager has long finished with it.
        manager.settle("all of its saves have ended", |seen| {
            let queued: u64 = seen.rings.iter().map(|ring| ring.completions_queued).sum();
            queued == 224 && seen.operations.is_empty()
        });
        sleeper.signal(Signal::CONT);
        assert_eq!(sleeper.ask("collect"), "224");
        let answer = sleeper.ask("save 1 16");
        assert_eq!(answer, "Ok 0 16", "the pages of its flood are there");
    }
}

/// How small operations fare beside one large restore in front of them, all in one batch: the
/// order in which they end.
fn small_ones_behind_a_large_restore(manager: &Manager, mode: QueryMode) {
    let socket = manager.socket();
    let mut large = Engine::attach(&socket, namespace("large", 4 * MIB), 32);
    let mut small = Engine::attach(&socket, namespace("small", 4 * KIB), 4);
    let (long, short) = (hashes(1, 0..32), hashes(2, 0..4));
    let _ = large.save(&blocks(&long, 0)).ok();
    if mode == QueryMode::Candidate {
        manager.evict();
    }
    let _ = small.save(&blocks(&short, 0)).ok();
    let lease = large.query(&long, mode).ok().leased();
    let beside = small.query(&short, QueryMode::Demand).ok().leased();
    large.poison(&blocks(&long, 0));
    small.poison(&blocks(&short, 0));
    // Several sweeps over the same pages: far more bytes than the small restore can wait for.
    let keep = RestoreOptions { keep: true, ..RestoreOptions::default() };
    let region = large.region;
    let sweeps: Vec<_> = (0..6)
        .map(|_| large.client.restore(&lease, 0, &region, &blocks(&long, 0), keep).unwrap())
        .collect();
    let region = small.region;
    let restore = small.client.restore(&beside, 0, &region, &blocks(&short, 0), keep).unwrap();
    large.client.submit().unwrap();
    small.client.submit().unwrap();
    let quick = small.end(restore).ok();
    small.check(&blocks(&short, 0));
    let ends: Vec<_> = sweeps.into_iter().map(|sweep| large.end(sweep).ok()).collect();
    large.check(&blocks(&long, 0));
    let last = ends.iter().map(|ended| ended.times.published_ns).max().unwrap();
    assert!(quick.times.published_ns < last, "it waited for {} MiB", 6 * 32 * 4);
    let _ = large.release(lease).ok();
    let _ = small.release(beside).ok();
}

/// Goal: a small restore never waits for a large one's bytes. Method: by the order of their ends,
/// with the large one from DRAM, then from SSD.
#[test]
fn perf_05_a_large_restore_never_convoys_a_small_one() {
    let manager = setup!().dram("320MiB").ssd("384MiB").start();
    for mode in [QueryMode::Demand, QueryMode::Candidate] {
        small_ones_behind_a_large_restore(&manager, mode);
    }
    manager.settle_empty();
    manager.counted(Metric::LeasesEnded(LeaseEnd::Released), 4);
}

/// The same within one session: the small operation is behind the large one in one ring.
#[test]
fn a_session_does_not_convoy_itself() {
    let manager = setup!().dram("160MiB").start();
    let mut engine = Engine::attach(&manager.socket(), namespace("convoy", 4 * MIB), 16);
    let long = hashes(1, 0..16);
    let _ = engine.save(&blocks(&long, 0)).ok();
    let lease = engine.query(&long, QueryMode::Demand).ok().leased();
    let keep = RestoreOptions { keep: true, ..RestoreOptions::default() };
    let region = engine.region;
    let client = &mut engine.client;
    let large = client.restore(&lease, 0, &region, &blocks(&long, 0), keep).unwrap();
    let one = client.restore(&lease, 15, &region, &blocks(&long[15..], 15), keep);
    let ping = client.ping().unwrap();
    client.submit().unwrap();
    // Both write the same bytes to device page 15.
    let one = one.unwrap();
    let order: Vec<_> = (0..3).map(|_| engine.next_end().ok().operation).collect();
    assert_eq!(order, [ping, one, large], "ping, one page, sixteen pages");
    engine.check(&blocks(&long, 0));
}

/// Whether the Manager has mapped a memfd of this name.
fn maps(manager: &Manager, name: &str) -> bool {
    let maps = format!("/proc/{}/maps", manager.pid().as_raw_nonzero());
    std::fs::read_to_string(maps).unwrap().contains(&format!("/memfd:{name} "))
}

/// Goal: an engine that allocates its pages anew in one session gets the old memory back (GPU-09).
/// Method: the Manager's mappings. Whichever comes first, the release of the memory or the end of
/// its region, the mapping is there until both have come, and the region works until its own end.
#[test]
fn released_memory_is_unmapped_with_its_last_region() {
    let manager = setup!().start();
    let mut client = Connect::new(manager.socket()).timeout(PATIENCE).connect().unwrap();
    let scope = client.define_namespace(&namespace("release", PAGE)).unwrap();
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    for (sequence, name, is_released_first) in [(1, "first-kv", true), (2, "second-kv", false)] {
        let file = File::from(rustix::fs::memfd_create(name, flags).unwrap());
        file.set_len(PAGE).unwrap();
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
        let memory = client.register_memfd(&file, PAGE).unwrap();
        drop(file);
        let segment = Segment { memory, offset: 0, stride: PAGE, length: PAGE, layer: 0 };
        let layout = RegionLayout { scope, pages: 1, segments: vec![segment] };
        let region = client.register_region(&layout).unwrap();
        assert!(maps(&manager, name));
        if is_released_first {
            client.release_memory(memory).unwrap();
            assert!(maps(&manager, name), "its region is still there");
        }
        client.save(&region, &blocks(&hashes(sequence, 0..1), 0)).unwrap();
        let saved = client.wait(PATIENCE).unwrap().expect("an end");
        assert_eq!((saved.status, saved.pages), (Status::Ok, 1));
        client.unregister(region).unwrap();
        let ended = client.wait(PATIENCE).unwrap().expect("an end");
        assert_eq!(ended.status, Status::Ok);
        if !is_released_first {
            // Its answer comes after whatever the end of the region set off.
            client.define_namespace(&namespace("another", PAGE)).unwrap();
            assert!(maps(&manager, name), "nobody has released it");
            client.release_memory(memory).unwrap();
        }
        manager.settle("it is unmapped", |_| !maps(&manager, name));
    }
}
