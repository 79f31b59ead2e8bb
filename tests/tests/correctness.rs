//! Right bytes or a miss, never anything else: cancelled saves, unreadable pages, slots that are
//! used again, many sessions on one disk, requests at the edges (COR-03, COR-05, COR-07, COR-09,
//! ENG-13, ENG-17). The bytes of a page follow from its namespace and hash, so that every restore can
//! be compared. The full-length forms are in `soak.rs`.

mod churn;

use std::fs::File;
use std::time::{Duration, Instant};

use orbitkv_engine::{
    Block, Code, Connect, PageHash, PageOutcome, QueryMode, RestoreOptions, Status, SubmitError,
};
use orbitkv_shm_protocol::telemetry::{Metric, SsdFault};
use orbitkv_tests::engine::{Engine, Shape, Way, blocks, hashes, image, namespace};
use orbitkv_tests::manager::Manager;
use orbitkv_tests::setup;

const KIB: u64 = 1024;

/// Goal: a save that was cancelled has read its pages for the last time when it ends, and left the
/// old bytes or a miss. Method: the scenario in full, on host memory: 1,000 rounds of 64 pages, each
/// cancelled after up to 5 ms (mostly less, as a copy takes far less), overwritten the moment the
/// last id has ended; then every key is restored and compared.
#[test]
fn cor_03_a_thousand_cancelled_saves_hold_old_bytes_or_a_miss() {
    const PAGES: u32 = 64;
    let manager = setup!().dram("288MiB").start();
    let connect = Connect::new(manager.socket());
    let spec = namespace("cor-03", 4 * KIB);
    let mut engine = Engine::connect(&connect, spec, PAGES, Way::Process, Shape::Split);
    let mut random = fastrand::Rng::with_seed(3);
    let (mut cut, mut stored) = (0, 0);
    for round in 0..1_000 {
        let source = blocks(&hashes(round, 0..PAGES), 0);
        engine.fill(&source);
        let save = engine.client.save(&engine.region, &source).unwrap();
        engine.client.submit().unwrap();
        let longest = if round % 16 == 0 { 5_000 } else { 120 };
        let until = Instant::now() + Duration::from_micros(random.u64(..longest));
        while Instant::now() < until {
            std::hint::spin_loop();
        }
        let cancel = engine.client.cancel(save).unwrap();
        let ended = engine.end(save);
        assert_eq!(engine.end(cancel).status, Status::Ok);
        let count = |wanted| ended.results.iter().filter(|page| page.outcome == wanted).count();
        assert_eq!(count(PageOutcome::Stored), ended.pages as usize);
        assert_eq!(count(PageOutcome::Refused), ended.pages_refused as usize);
        cut += u32::from(ended.pages < PAGES);
        stored += ended.pages;
        engine.poison(&source);
    }
    let found: u32 = (0..1_000).map(|round| engine.restore_all(&hashes(round, 0..PAGES))).sum();
    assert_eq!(found, stored, "all that was said to be stored, and no more");
    assert!(cut > 0 && stored > 0, "{cut} cut, {stored} pages stored: nothing was tested");
    manager.settle_empty();
    manager.counted(Metric::SaveStoredPages, stored.into());
}

/// A chain of eight pages that is on SSD only.
fn eight_on_ssd(engine: &str) -> (Manager, Engine, Vec<PageHash>) {
    let manager = setup!().ssd("64MiB").flag("--ssd-engine", engine).start();
    let mut engine = manager.attach("cor-05", 256 * KIB, 8);
    let pages = hashes(1, 0..8);
    engine.save_all(&pages);
    manager.evict();
    (manager, engine, pages)
}

/// Goal: a page that cannot be read ends a prefix in front of it, is counted once and is gone; what
/// is in front of it comes whole. Method: page 3 of 8 is punched out of the file, with both engines;
/// once a prepare (a demand query) finds out, once a restore of pages that nobody had read before.
#[test]
fn cor_05_page_3_of_8_cannot_be_read() {
    for engine_kind in ["blocking", "auto"] {
        for restores_first in [false, true] {
            let (manager, mut engine, pages) = eight_on_ssd(engine_kind);
            let bytes = image(&engine.spec, &pages[3]);
            let at = manager.setup().place_of(&bytes);
            let file = File::options().write(true).open(manager.setup().ssd_file()).unwrap();
            let punch =
                rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
            rustix::fs::fallocate(&file, punch, at, bytes.len() as u64).unwrap();
            if restores_first {
                let lease = engine.query(&pages, QueryMode::Candidate).ok().leased();
                let ended = engine.restore(&lease, 0, &blocks(&pages, 0));
                assert_eq!((ended.status, ended.code), (Status::Partial, Code::IoError));
                assert_eq!((ended.pages, ended.first_failed), (3, Some(3)), "{ended:?}");
                assert!(ended.results[3..].iter().all(|page| page.outcome == PageOutcome::Refused));
            } else {
                let ended = engine.query(&pages, QueryMode::Demand);
                assert_eq!((ended.status, ended.code), (Status::Partial, Code::IoError));
                assert_eq!((ended.pages, ended.pages_ssd), (3, 3), "{ended:?}");
                let miss = |page: &orbitkv_engine::PageResult| page.outcome == PageOutcome::Miss;
                assert!(ended.results[3..].iter().all(miss), "{ended:?}");
                let restored = engine.restore(&ended.leased(), 0, &blocks(&pages[..3], 0)).ok();
                assert_eq!(restored.pages, 3);
            }
            engine.check(&blocks(&pages[..3], 0));
            manager.counted(Metric::SsdReadErrors(SsdFault::Checksum), 1);
            assert_eq!(engine.query(&pages, QueryMode::Demand).ok().pages, 3, "the next query");
            manager.counted(Metric::SsdReadErrors(SsdFault::Checksum), 1);
            let again = engine.save(&blocks(&pages, 0)).ok();
            assert_eq!((again.pages, again.pages_present), (5, 3));
            assert_eq!(engine.restore_all(&pages), 8);
        }
    }
}

/// The same where the file ends too early: a short read is no page either. Method: the file is cut in
/// the middle of the image that lies last in it.
#[test]
fn cor_05_a_file_that_ends_too_early() {
    for engine_kind in ["blocking", "auto"] {
        let (manager, mut engine, pages) = eight_on_ssd(engine_kind);
        let place = |hash| manager.setup().place_of(&image(&engine.spec, hash));
        let places: Vec<u64> = pages.iter().map(place).collect();
        assert!(places.is_sorted(), "written from the root");
        let file = File::options().write(true).open(manager.setup().ssd_file()).unwrap();
        file.set_len(places[7] + 128 * KIB).unwrap();
        let ended = engine.query(&pages, QueryMode::Demand);
        assert_eq!((ended.status, ended.code, ended.pages), (Status::Partial, Code::IoError, 7));
        let _ = engine.restore(&ended.leased(), 0, &blocks(&pages[..7], 0)).ok();
        engine.check(&blocks(&pages[..7], 0));
        manager.counted(Metric::SsdReadErrors(SsdFault::Short), 1);
        assert_eq!(engine.query(&pages, QueryMode::Demand).ok().pages, 7);
    }
}

/// Goal: a slot that is written again never gives one page's bytes under another's name. Method: the
/// scenario for 3 s instead of 10 minutes (factor 200): see [`churn`].
#[test]
fn cor_07_a_tier_of_eight_pages_never_mixes_them_up() {
    churn::eight_slots(setup!(), Duration::from_secs(3));
}

/// Goal: what comes back from SSD is the asking session's own. Method: the scenario in full: 200
/// sessions of 64 pages through a pool of a tenth of that, read in random order by another engine;
/// every page that is on SSD must be found, and every byte compared.
#[test]
fn cor_09_two_hundred_sessions_read_back_their_own_pages() {
    const PAGE: u64 = 4 * KIB;
    let manager = setup!().dram("5MiB").ssd("128MiB").start();
    let spec = namespace("cor-09", PAGE);
    let mut writer = Engine::attach(&manager.socket(), spec.clone(), 64);
    let mut sessions: Vec<u64> = (0..200).collect();
    for &session in &sessions {
        writer.save_all(&hashes(session, 0..64));
        // An eighth of the pool may wait to be written.
        manager.settle("the disk keeps up", |s| s.counters.get(Metric::SpillWaitingPages) < 160);
    }
    drop(writer);
    let seen = manager.settle_empty();
    let kept = seen.counters.get(Metric::SsdResidentPages);
    assert!(seen.counters.get(Metric::PoolResidentPages) * 9 < kept, "mostly on SSD: {kept}");
    let mut reader = Engine::attach(&manager.socket(), spec, 64);
    fastrand::Rng::with_seed(9).shuffle(&mut sessions);
    // `restore_all` compares every byte with what its session's page must hold.
    let found: u32 = sessions.iter().map(|&s| reader.restore_all(&hashes(s, 0..64))).sum();
    assert_eq!(u64::from(found), kept);
    assert!(found > 12_000, "{found} of 12,800");
    manager.settle_empty();
}

/// Goal: whole pages only, and nothing that the engine holds is written. Method: prompts of 63, 64,
/// 65 and 130 tokens with pages of 64, as the engine's blocks of 16 tokens fill them; then an engine
/// with 72 tokens of its own takes 128 from the Manager.
#[test]
fn eng_13_only_whole_pages_are_stored_and_held_blocks_stay() {
    const PAGE: u64 = 64 * KIB;
    let manager = setup!().start();
    let mut engine = manager.attach("eng-13", PAGE, 4);
    for (prompt, tokens) in [63_u32, 64, 65, 130].into_iter().enumerate() {
        let hashes = hashes(prompt as u64, 0..tokens.div_ceil(64));
        let whole = (tokens / 64) as usize;
        if whole == 0 {
            assert_eq!(engine.client.save(&engine.region, &[]), Err(SubmitError::NoPages));
        } else {
            assert_eq!(engine.save(&blocks(&hashes[..whole], 0)).ok().pages as usize, whole);
        }
        let hit = engine.query(&hashes, QueryMode::Demand).ok();
        assert_eq!(hit.pages * 64, [0, 64, 64, 128][prompt], "{tokens} tokens");
        if let Some(lease) = hit.lease {
            let _ = engine.release(lease).ok();
        }
    }
    manager.counted(Metric::SaveStoredPages, 4);
    // 72 tokens at home are one page and a half-filled block: the hit of 128 brings page 1 only.
    let pages = hashes(3, 0..2);
    let held = [Block { hash: pages[0], page: 0 }];
    engine.poison(&held);
    let lease = engine.query(&pages, QueryMode::Demand).ok().leased();
    let target = [Block { hash: pages[1], page: 1 }];
    let restored = engine.restore(&lease, 1, &target).ok();
    assert_eq!((restored.pages, restored.bytes), (1, PAGE));
    engine.check(&target);
    assert!(engine.is_poison(&held[0]), "a block that the engine holds was written");
    let _ = engine.release(lease).ok();
    manager.settle_empty();
}

/// Goal: a lease that was released is gone for every use, under a name of its own. The rest of the
/// scenario is `cor_11_evicted_pages_are_no_hits_and_an_old_lease_is_unknown`.
#[test]
fn cor_11_a_released_lease_is_gone_for_every_use() {
    let manager = setup!().start();
    let mut engine = manager.attach("cor-11", 4 * KIB, 4);
    let pages = hashes(1, 0..4);
    engine.save_all(&pages);
    let lease = engine.query(&pages, QueryMode::Demand).ok().leased();
    let _ = engine.release(lease).ok();
    let keep = RestoreOptions { keep: true, ..RestoreOptions::default() };
    for late in [
        engine.restore_with(&lease, 0, &blocks(&pages, 0), keep),
        engine.restore(&lease, 0, &blocks(&pages, 0)),
        engine.release(lease),
    ] {
        assert_eq!((late.status, late.code), (Status::Error, Code::UnknownLease));
    }
    assert!(blocks(&pages, 0).iter().all(|block| engine.is_poison(block)));
}

/// Goal: a release counts what the lease still held, not what restores have taken from it.
#[test]
fn a_release_counts_the_pages_that_it_lets_go_of() {
    let manager = setup!().start();
    let mut engine = manager.attach("release", 4 * KIB, 4);
    let pages = hashes(1, 0..4);
    engine.save_all(&pages);
    let lease = engine.query(&pages, QueryMode::Demand).ok().leased();
    assert_eq!(engine.restore(&lease, 0, &blocks(&pages[..1], 0)).ok().pages, 1);
    assert_eq!(engine.release(lease).ok().pages, 3);
}
