//! Pages come back whole: over every page size, kind of memory and layout, from DRAM and from SSD.

use orbitkv_engine::{
    Block, Chain, Code, Connect, Deadline, PageHash, PageOutcome, QueryMode, RestoreOptions,
    SaveOptions, Status, SubmitError, Tier,
};
use orbitkv_shm_protocol::telemetry::{HeldIn, Metric};
use orbitkv_tests::engine::{Engine, Shape, Way, blocks, hashes, namespace};
use orbitkv_tests::manager::Manager;
use orbitkv_tests::setup;

const KIB: u64 = 1024;
const MIB: u64 = 1024 * KIB;
/// Page bytes, and pages of that size in one round.
const SIZES: [(u64, u32); 4] = [(4 * KIB, 24), (128 * KIB, 12), (9 * MIB, 2), (64 * MIB, 1)];

/// Goal: pages of every size lie side by side in one small pool and come back byte for byte, from
/// DRAM and from SSD, with nothing around them touched. Method: all sizes are saved before any is
/// restored; each round forgets its pages, so that the next one needs their memory and slots.
fn pages_of_all_sizes_come_back(way: Way) {
    let manager = setup!().dram("192MiB").ssd("640MiB").start();
    for shape in [Shape::Contiguous, Shape::Split] {
        let mut engines = SIZES.map(|(bytes, pages)| {
            let spec = namespace(&format!("{way:?}-{shape:?}"), bytes);
            let connect = Connect::new(manager.socket());
            (Engine::connect(&connect, spec, 2 * pages, way, shape), hashes(bytes, 0..pages))
        });
        for (engine, hashes) in &mut engines {
            let saved = engine.save(&blocks(hashes, 0)).ok();
            assert_eq!(saved.pages as usize, hashes.len());
            assert!(saved.results.iter().all(|page| page.outcome == PageOutcome::Stored));
        }
        for (engine, hashes) in &mut engines {
            restore_elsewhere(engine, hashes, QueryMode::Demand, Tier::Dram);
        }
        manager.evict();
        let before = manager.fresh().counters.get(Metric::SsdReadPages);
        for (engine, hashes) in &mut engines {
            restore_elsewhere(engine, hashes, QueryMode::Candidate, Tier::Ssd);
        }
        let pages: u64 = SIZES.iter().map(|&(_, pages)| u64::from(pages)).sum();
        manager.counted(Metric::SsdReadPages, before + pages);
        for (engine, _) in &mut engines {
            let scope = engine.scope;
            let forget = engine.client.forget(&scope).unwrap();
            let _ = engine.end(forget).ok();
        }
    }
    manager.settle("every page is forgotten", |seen| seen.pool.used_bytes == 0);
    manager.settle_empty();
}

/// Looks a chain up, restores it into the other half of the device pages, checks both halves.
fn restore_elsewhere(engine: &mut Engine, hashes: &[PageHash], mode: QueryMode, tier: Tier) {
    let hit = engine.query(hashes, mode).ok();
    assert_eq!(hit.pages as usize, hashes.len());
    let counts = if tier == Tier::Dram { (hit.pages, 0) } else { (0, hit.pages) };
    assert_eq!((hit.pages_dram, hit.pages_ssd), counts);
    assert!(hit.results.iter().all(|p| p.outcome == PageOutcome::Hit && p.tier == tier));
    let target = blocks(hashes, hashes.len() as u32);
    let restored = engine.restore(&hit.leased(), 0, &target).ok();
    assert_eq!(restored.pages as usize, hashes.len());
    assert_eq!(restored.bytes, engine.spec.page_bytes * hashes.len() as u64);
    assert_eq!(restored.first_failed, None);
    engine.check(&target);
    engine.check(&blocks(hashes, 0));
    assert_eq!(engine.client.is_done(&restored.operation), Some(true));
}

#[test]
fn pages_of_all_sizes_come_back_through_a_sealed_memfd() {
    pages_of_all_sizes_come_back(Way::Sealed);
}

#[test]
fn pages_of_all_sizes_come_back_through_process_memory() {
    pages_of_all_sizes_come_back(Way::Process);
}

#[test]
fn pages_of_all_sizes_come_back_through_an_unsealed_memfd() {
    pages_of_all_sizes_come_back(Way::Unsealed);
}

/// A Manager with 16 saved pages of 64 KiB that are on SSD only, and who saved them.
fn sixteen_on_ssd(budget: &str) -> (Manager, Engine, Vec<PageHash>) {
    let setup = setup!().dram("32MiB").ssd("128MiB").flag("--query-budget", budget);
    let manager = setup.start();
    let mut engine = Engine::attach(&manager.socket(), namespace("sixteen", 64 * KIB), 32);
    let hashes = hashes(1, 0..16);
    let _ = engine.save(&blocks(&hashes, 0)).ok();
    manager.evict();
    (manager, engine, hashes)
}

#[test]
fn a_candidate_query_reads_nothing_and_its_restore_everything() {
    let (manager, mut engine, hashes) = sixteen_on_ssd("16MiB");
    let hit = engine.query(&hashes, QueryMode::Candidate).ok();
    assert_eq!((hit.pages, hit.pages_ssd), (16, 16));
    manager.counted(Metric::SsdReadPages, 0);
    let target = blocks(&hashes, 16);
    let restored = engine.restore(&hit.leased(), 0, &target).ok();
    assert_eq!((restored.pages_dram, restored.pages_ssd), (0, 16));
    engine.check(&target);
    manager.counted(Metric::SsdReadPages, 16);
}

#[test]
fn demand_and_speculative_queries_read_before_they_answer() {
    for mode in [QueryMode::Demand, QueryMode::Speculative] {
        let (manager, mut engine, hashes) = sixteen_on_ssd("16MiB");
        let hit = engine.query(&hashes, mode).ok();
        assert_eq!((hit.pages, hit.pages_dram, hit.pages_ssd), (16, 0, 16));
        manager.counted(Metric::SsdReadPages, 16);
        manager.counted(Metric::SsdReadBytes, 16 * 64 * KIB);
        let target = blocks(&hashes, 16);
        let restored = engine.restore(&hit.leased(), 0, &target).ok();
        assert_eq!((restored.pages_dram, restored.pages_ssd), (16, 0));
        engine.check(&target);
    }
}

/// Goal: a hint is answered at once, holds nothing once it is done, and spares the query its reads.
#[test]
fn a_prepare_brings_pages_to_dram_and_leases_nothing() {
    let (manager, mut engine, hashes) = sixteen_on_ssd("16MiB");
    let scope = engine.scope;
    let prepare = engine.client.prepare(&scope, &hashes).unwrap();
    let hint = engine.end(prepare).ok();
    assert_eq!((hint.lease, hint.pages), (None, 16));
    manager.counted(Metric::SsdReadPages, 16);
    manager.settle_empty();
    let again = engine.client.prepare(&scope, &hashes).unwrap();
    assert_eq!(engine.end(again).ok().pages, 0, "there is nothing left to do");
    let hit = engine.query(&hashes, QueryMode::Demand).ok();
    assert_eq!((hit.pages_dram, hit.pages_ssd), (16, 0));
    let target = blocks(&hashes, 16);
    let _ = engine.restore(&hit.leased(), 0, &target).ok();
    engine.check(&target);
    manager.counted(Metric::SsdReadPages, 16);
}

/// Goal: over its budget a speculative query gets nothing, a candidate query what fits, a demand
/// query waits for what another gives back. The speculative budget is a quarter of 1 MiB.
#[test]
fn over_its_budget_each_kind_of_query_does_what_it_says() {
    let (manager, mut engine, hashes) = sixteen_on_ssd("1MiB");
    let skipped = engine.query(&hashes[..4], QueryMode::Speculative).ok();
    assert_eq!(skipped.pages, 4);
    let over = engine.query(&hashes[..1], QueryMode::Speculative);
    assert_eq!((over.status, over.code), (Status::Error, Code::OverBudget));
    manager.counted(Metric::LookupSpeculativeSkipped, 1);
    let cut = engine.query(&hashes, QueryMode::Candidate);
    assert_eq!((cut.status, cut.code, cut.pages), (Status::Partial, Code::OverBudget, 12));
    let scope = engine.scope;
    let waits = engine.client.query(&scope, &hashes, QueryMode::Demand, Deadline::DEFAULT).unwrap();
    engine.client.submit().unwrap();
    manager.settle("the query waits", |s| s.budget.waiting_queries == 1);
    let _ = engine.release(cut.leased()).ok();
    let _ = engine.release(skipped.leased()).ok();
    let whole = engine.end(waits).ok();
    assert_eq!(whole.pages, 16);
    let target = blocks(&hashes, 16);
    let _ = engine.restore(&whole.leased(), 0, &target).ok();
    engine.check(&target);
    let seen = manager.settle_empty();
    assert!(seen.budget.total_peak_bytes <= 1024 * KIB, "{:?}", seen.budget);
}

/// Goal: a restore ends the lease for exactly the pages that it names, unless it keeps it.
#[test]
fn a_lease_is_restored_in_pieces_by_offset() {
    let (manager, mut engine, hashes) = sixteen_on_ssd("16MiB");
    let lease = engine.query(&hashes, QueryMode::Candidate).ok().leased();
    let keep = RestoreOptions { keep: true, ..RestoreOptions::default() };
    let target = blocks(&hashes, 16);
    for _ in 0..2 {
        let kept = engine.restore_with(&lease, 3, &target[3..9], keep).ok();
        assert_eq!(kept.pages, 6);
        engine.check(&target[3..9]);
    }
    let shifted = engine.restore(&lease, 2, &target[3..9]);
    assert_eq!((shifted.status, shifted.code), (Status::Error, Code::BadRequest));
    assert!(target[3..9].iter().all(|block| engine.is_poison(block)), "another page was copied");
    for range in [8..16, 0..5] {
        let piece = engine.restore(&lease, range.start as u32, &target[range.clone()]).ok();
        assert_eq!(piece.pages as usize, range.len());
        engine.check(&target[range]);
    }
    let twice = engine.restore(&lease, 0, &target[..5]);
    assert_eq!((twice.status, twice.code), (Status::Error, Code::BadRequest));
    let beyond = engine.restore(&lease, 15, &blocks(&hashes[14..], 0));
    assert_eq!((beyond.status, beyond.code), (Status::Error, Code::BadRequest));
    manager.settle("three pages of one lease are left", |seen| {
        seen.budget.total_bytes == 3 * 64 * KIB && seen.leases.len() == 1
    });
    let _ = engine.restore(&lease, 5, &target[5..8]).ok();
    engine.check(&target[5..8]);
    let after = engine.restore(&lease, 0, &target);
    assert_eq!((after.status, after.code), (Status::Error, Code::UnknownLease));
    let late = engine.release(lease);
    assert_eq!((late.status, late.code), (Status::Error, Code::UnknownLease));
    manager.settle_empty();
}

/// Goal: pages that the device holds already are named as a parent only: nothing before it is
/// looked up, copied or counted, and a chain whose parent is nowhere is refused.
#[test]
fn a_range_may_start_after_a_prefix_on_the_device() {
    let manager = setup!().start();
    let mut engine = Engine::attach(&manager.socket(), namespace("anchors", 8 * KIB), 32);
    let hashes = hashes(5, 0..12);
    let _ = engine.save(&blocks(&hashes[..4], 0)).ok();
    let rest = engine.save_after(Some(hashes[3]), &blocks(&hashes[4..], 4)).ok();
    assert_eq!((rest.pages, rest.results.len()), (8, 8), "the parent is no page");
    let chain = Chain { parent: Some(hashes[5]), blocks: &hashes[6..] };
    let scope = engine.scope;
    let query = engine.client.query(&scope, chain, QueryMode::Demand, Deadline::DEFAULT).unwrap();
    let hit = engine.end(query).ok();
    assert_eq!((hit.pages, hit.leased().pages()), (6, 6));
    let target = blocks(&hashes[6..], 20);
    let _ = engine.restore(&hit.leased(), 0, &target).ok();
    engine.check(&target);

    let strange = orbitkv_tests::engine::hashes(6, 0..4);
    let orphan = engine.save_after(Some(strange[0]), &blocks(&strange[1..], 0));
    assert_eq!((orphan.status, orphan.code), (Status::Error, Code::ParentAbsent));
    assert!(orphan.results.iter().all(|page| page.code == Code::ParentAbsent));
    // One chain of a save does not end the others.
    let (good, bad) = (blocks(&strange, 8), blocks(&hashes[..1], 0));
    engine.fill(&good);
    let chains = [
        Chain { parent: Some(PageHash([9; 32])), blocks: bad.as_slice() },
        Chain { parent: None, blocks: good.as_slice() },
    ];
    let region = engine.region;
    let save = engine.client.save_chains(&region, &chains, SaveOptions::default()).unwrap();
    let saved = engine.end(save);
    assert_eq!((saved.status, saved.pages, saved.pages_refused), (Status::Partial, 4, 1));
    assert_eq!(engine.restore_all(&strange), 4);
    manager.settle_empty();
}

#[test]
fn eng_17_duplicates_are_stored_once_and_edges_are_refused_with_their_limit() {
    let manager = setup!().start();
    let mut engine = Engine::attach(&manager.socket(), namespace("eng-17", 4 * KIB), 4);
    let one = hashes(1, 0..1)[0];
    let twice = [Block { hash: one, page: 0 }, Block { hash: one, page: 1 }];
    let saved = engine.save(&twice).ok();
    assert_eq!((saved.pages, saved.pages_present), (1, 1));
    let again = engine.save(&twice[..1]).ok();
    assert_eq!((again.pages, again.pages_present, again.bytes), (0, 1, 0));
    manager.settle("one page is stored", |seen| seen.pool.used_bytes == 4 * KIB);
    manager.counted(Metric::SaveOfferedPages, 3);
    manager.counted(Metric::SaveStoredPages, 1);

    let region = engine.region;
    let scope = engine.scope;
    assert_eq!(engine.client.save(&region, &[]), Err(SubmitError::NoPages));
    let none: [PageHash; 0] = [];
    let query = engine.client.query(&scope, &none, QueryMode::Demand, Deadline::DEFAULT);
    assert_eq!(query, Err(SubmitError::NoPages));
    assert_eq!(engine.client.prepare(&scope, &none), Err(SubmitError::NoPages));
    let over = hashes(2, 0..16_385);
    let limit = SubmitError::TooManyPages { entries: 16_385, entries_max: 16_384 };
    let query = engine.client.query(&scope, &over, QueryMode::Demand, Deadline::DEFAULT);
    assert_eq!(query, Err(limit));
    assert_eq!(limit.to_string(), "16385 page entries in one request; at most 16384 are possible");
    let outside = engine.client.save(&region, &[Block { hash: one, page: 4 }]);
    assert_eq!(outside, Err(SubmitError::BadPage { page: 4, pages: 4 }));
    assert_eq!(engine.client.outstanding(), 0, "nothing of that was staged");
    assert_eq!(engine.restore_all(&[one]), 1);
}

/// Goal: the smallest and the largest ring are used up to their last credit and round again, and
/// the largest request fills its tables. Method: more pings than there are credits, twice over.
#[test]
fn rings_of_64_and_4096_records_serve_every_credit() {
    let manager = setup!().start();
    for capacity in [64, 4096] {
        let connect = Connect::new(manager.socket()).ring_capacity(capacity);
        let spec = namespace("rings", 4 * KIB);
        let mut engine = Engine::connect(&connect, spec, 1, Way::Sealed, Shape::Contiguous);
        for _ in 0..3 {
            let mut staged = 0;
            while engine.client.ping().is_ok() {
                staged += 1;
            }
            assert_eq!(engine.client.ping(), Err(SubmitError::WouldBlock));
            assert_eq!(staged, capacity - (capacity / 8).max(8));
            // The reserve is for what gives things back.
            let _drain = engine.client.drain(Deadline::DEFAULT).unwrap();
            for _ in 0..=staged {
                let _ = engine.next_end().ok();
            }
            assert_eq!(engine.client.outstanding(), 0);
        }
    }
}

#[test]
fn page_tables_of_1024_and_1048576_entries_take_the_largest_requests() {
    let manager = setup!().dram("160MiB").start();
    for (entries, pages) in [(1024, 1024), (1 << 20, 16_384)] {
        let connect = Connect::new(manager.socket()).page_entries(entries);
        let spec = namespace(&format!("table-{entries}"), 4 * KIB);
        let mut engine = Engine::connect(&connect, spec, pages, Way::Sealed, Shape::Contiguous);
        let hashes = hashes(u64::from(entries), 0..pages);
        let saved = engine.save(&blocks(&hashes, 0)).ok();
        assert_eq!(saved.pages, pages);
        for _ in 0..2 {
            // Results stay readable until the next poll, and with them the entries taken.
            assert_eq!(engine.client.poll(), Ok(None));
            let hit = engine.query(&hashes, QueryMode::Demand).ok();
            let target = blocks(&hashes, 0);
            assert_eq!(engine.client.poll(), Ok(None));
            let restored = engine.restore(&hit.leased(), 0, &target).ok();
            assert_eq!(restored.pages, pages);
            engine.check(&target);
        }
    }
    manager.counted(Metric::RestoreRestoredPages(HeldIn::Dram), 2 * 17_408);
    manager.settle_empty();
}
