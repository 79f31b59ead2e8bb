//! What survives: a Manager that was stopped or killed finds on SSD exactly what is whole.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use orbitkv_engine::{
    Code, PageHash, PageOutcome, PageResult, QueryMode, Status, engine_id_random,
};
use orbitkv_shm_protocol::telemetry::{Metric, SsdFault};
use orbitkv_tests::engine::{Engine, Way, blocks, hashes, image, namespace};
use orbitkv_tests::engine_process::{EngineProcess, Identity};
use orbitkv_tests::manager::{Manager, PATIENCE, Setup};
use orbitkv_tests::setup;

const KIB: u64 = 1024;
const MIB: u64 = 1024 * KIB;

/// A page size each: small ones with their footer in one write, large ones with two.
const SIZES: [u64; 3] = [16 * KIB, 256 * KIB, 3 * MIB];

fn engine(manager: &Manager, page_bytes: u64) -> Engine {
    manager.attach("restart", page_bytes, 8)
}

/// Chains of 8 pages: their sequence numbers.
fn chains(page_bytes: u64) -> std::ops::Range<u64> {
    0..(24 * MIB / page_bytes / 8).clamp(1, 12)
}

fn save_everything(manager: &Manager) {
    for page_bytes in SIZES {
        let mut engine = engine(manager, page_bytes);
        for sequence in chains(page_bytes) {
            engine.save_all(&hashes(sequence, 0..8));
        }
    }
}

/// Restores and compares whatever is found of all chains; says how many pages that were.
fn restore_everything(manager: &Manager) -> u64 {
    let mut found = 0;
    for page_bytes in SIZES {
        let mut engine = engine(manager, page_bytes);
        for sequence in chains(page_bytes) {
            found += u64::from(engine.restore_all(&hashes(sequence, 0..8)));
        }
    }
    found
}

fn number(counts: &serde_json::Value, name: &str) -> u64 {
    counts[name].as_u64().unwrap_or_else(|| panic!("{name} is missing in {counts}"))
}

/// Goal: after a clean stop every page that had been written is found whole (CRASH-09). Method: the
/// spill set is empty when it stops, so that is every page.
#[test]
fn crash_09_a_clean_stop_keeps_every_page() {
    let manager = setup!().dram("96MiB").ssd("320MiB").start();
    save_everything(&manager);
    let total: u64 = SIZES.iter().map(|&bytes| 8 * chains(bytes).end).sum();
    manager.settle_empty();
    manager.counted(Metric::SsdWrittenPages, total);
    let setup = manager.stop();
    let counts = setup.verify();
    assert_eq!((number(&counts, "valid"), number(&counts, "torn")), (total, 0), "{counts}");
    let manager = setup.start();
    manager.counted(Metric::SsdRecoveredPages, total);
    assert_eq!(restore_everything(&manager), total);
    // Without a write in between the next life finds the same, whatever reads for it.
    let manager = manager.stop().flag("--ssd-engine", "blocking").start();
    assert_eq!(manager.fresh().ssd[0].engine, "blocking");
    assert_eq!(restore_everything(&manager), total);
}

/// Goal: SIGKILL while engines save and the tier writes and overwrites: the file verifies, and
/// whatever is found afterwards is whole (CRASH-09). Method: engine processes save sequences
/// without end into a tier that is far too small; three lives on one file.
#[test]
fn crash_09_a_kill_under_load_keeps_only_whole_pages() {
    let mut setup: Option<Setup> = Some(setup!().dram("32MiB").ssd("130MiB"));
    let identities = [(0, 16 * KIB, Way::Sealed), (1, MIB, Way::Process)].map(|(n, bytes, way)| {
        let id = engine_id_random().unwrap();
        Identity { way, ..Identity::new(id, &format!("load-{n}"), bytes, 8) }
    });
    for life in 0..3 {
        let manager = setup.take().unwrap().start();
        let recovered = manager.fresh().counters.get(Metric::SsdRecoveredPages);
        assert!(life == 0 || recovered > 0, "nothing was found again");
        let mut found = 0;
        for identity in &identities {
            let mut reader = Engine::attach(&manager.socket(), identity.spec(), 8);
            for sequence in 0..life * 1000 + 1000 {
                found += u64::from(reader.restore_all(&hashes(sequence, 0..8)));
            }
        }
        assert_eq!(found, recovered, "all that was recovered can be restored");
        let mut load: Vec<_> =
            identities.iter().map(|i| EngineProcess::start(manager.setup(), i)).collect();
        for engine in &mut load {
            engine.order(&format!("save-on {} 8", life * 1000));
        }
        manager.settle("the tier is written", |seen| {
            let of = |metric| seen.counters.get(metric);
            of(Metric::SsdWrittenPages) > 300 && of(Metric::SpillWaitingPages) > 0
        });
        let killed = manager.kill();
        let counts = killed.verify();
        let parts = ["valid", "torn", "stale", "empty"].map(|name| number(&counts, name));
        assert_eq!(parts.iter().sum::<u64>(), number(&counts, "slots"), "{counts}");
        setup = Some(killed);
    }
}

/// Goal: bytes that changed on disk are never served (SSD-01, COR-05, MET-07). Method: one image
/// of a chain of eight is found in the file by its first bytes and changed; the chain then ends
/// before it, the failure is counted, and the page can be saved again.
#[test]
fn cor_05_wrong_bytes_on_disk_are_a_miss() {
    for page_bytes in SIZES {
        let manager = setup!().dram("96MiB").ssd("192MiB").start();
        let mut engine = engine(&manager, page_bytes);
        let pages = hashes(1, 0..8);
        engine.save_all(&pages);
        manager.settle_empty();
        drop(engine);
        let setup = manager.stop();
        spoil(&setup, &image(&namespace("restart", page_bytes), &pages[5]));
        assert_eq!(number(&setup.verify(), "torn"), 1);

        let manager = setup.start();
        let mut engine = manager.attach("restart", page_bytes, 8);
        let hit = engine.query(&pages, QueryMode::Demand);
        assert_eq!(hit.pages, 5, "{hit:?}");
        let whole = blocks(&pages[..5], 0);
        let _ = engine.restore(&hit.leased(), 0, &whole).ok();
        engine.check(&whole);
        manager.counted(Metric::SsdReadErrors(SsdFault::Checksum), 1);
        assert_eq!(engine.query(&pages, QueryMode::Candidate).ok().pages, 5, "the page is gone");
        let again = engine.save(&blocks(&pages, 0)).ok();
        assert_eq!((again.pages, again.pages_present), (3, 5));
        assert_eq!(engine.restore_all(&pages), 8);
    }
}

/// The same when nobody looked before the restore: it says which pages came, whole, and that the
/// bad one did not. Pages before the bad one come if they were copied before its read failed.
#[test]
fn cor_05_a_restore_never_claims_the_page_that_cannot_be_read() {
    let manager = setup!().ssd("128MiB").start();
    let mut engine = engine(&manager, 256 * KIB);
    let pages = hashes(1, 0..8);
    engine.save_all(&pages);
    manager.evict();
    let lease = engine.query(&pages, QueryMode::Candidate).ok().leased();
    spoil(manager.setup(), &image(&engine.spec, &pages[3]));
    let target = blocks(&pages, 0);
    let ended = engine.restore(&lease, 0, &target);
    assert_ne!(ended.status, Status::Ok);
    assert_eq!(ended.code, Code::IoError);
    let is_restored = |page: &PageResult| page.outcome == PageOutcome::Restored;
    let restored = ended.results.iter().take_while(|page| is_restored(page)).count();
    assert!(restored <= 3, "{ended:?}");
    assert_eq!(ended.first_failed, Some(restored as u32));
    assert_eq!(
        (ended.results[3].outcome, ended.results[3].code),
        (PageOutcome::Refused, Code::IoError)
    );
    for (result, block) in ended.results.iter().zip(&target) {
        assert!(!is_restored(result) || engine.holds(block), "{block:?} is not what it should be");
    }
    assert_eq!(engine.client.is_done(&ended.operation), Some(false));
    manager.counted(Metric::SsdReadErrors(SsdFault::Checksum), 1);
    manager.settle_empty();
    assert_eq!(engine.restore_all(&pages), 3);
}

/// Changes one byte in the middle of the one image in the file.
fn spoil(setup: &Setup, image: &[u8]) {
    let file = File::options().write(true).open(setup.ssd_file()).unwrap();
    let middle = setup.place_of(image) + image.len() as u64 / 2;
    file.write_all_at(&[!image[image.len() / 2]], middle).unwrap();
    file.sync_all().unwrap();
}

/// Goal: what was forgotten stays forgotten after a restart, whichever way the Manager ended, and
/// what was saved after the forget is found (ENG-11).
#[test]
fn eng_11_a_forgotten_namespace_stays_forgotten() {
    for clean in [true, false] {
        let manager = setup!().ssd("128MiB").start();
        let socket = manager.socket();
        let mut old = Engine::attach(&socket, namespace("weights-1", 64 * KIB), 8);
        let mut kept = Engine::attach(&socket, namespace("weights-2", 64 * KIB), 8);
        let (pages, newer): (Vec<PageHash>, _) = (hashes(1, 0..8), hashes(2, 0..8));
        old.save_all(&pages);
        kept.save_all(&pages);
        manager.settle_empty();
        let scope = old.scope;
        // One more save is in flight when the forget is taken.
        let flying = blocks(&newer, 0);
        old.fill(&flying);
        old.client.save(&old.region, &flying).unwrap();
        let forget = old.client.forget(&scope).unwrap();
        let forgotten = old.end(forget).ok();
        assert!(forgotten.pages >= 8);
        drop(old);
        manager.settle_empty();
        let setup = if clean { manager.stop() } else { manager.kill() };
        setup.verify();
        let manager = setup.start();
        let mut old = Engine::attach(&socket, namespace("weights-1", 64 * KIB), 8);
        let mut kept = Engine::attach(&socket, namespace("weights-2", 64 * KIB), 8);
        assert_eq!((old.restore_all(&pages), old.restore_all(&newer)), (0, 0), "clean: {clean}");
        assert_eq!(kept.restore_all(&pages), 8);
        old.save_all(&pages);
        manager.settle_empty();
        let manager = manager.stop().start();
        let mut old = Engine::attach(&socket, namespace("weights-1", 64 * KIB), 8);
        assert_eq!(old.restore_all(&pages), 8, "the new bytes are no old ones");
        drop(manager);
    }
}

/// Goal: an engine gets over the death of its Manager by attaching again (CRASH-03): what was
/// running is gone, what was written is found by the next session.
#[test]
fn crash_03_an_engine_goes_on_with_the_next_manager() {
    let mut manager = setup!().ssd("128MiB").start();
    for life in 0..3_u64 {
        let mut engine = engine(&manager, 64 * KIB);
        for earlier in 0..life {
            assert_eq!(engine.restore_all(&hashes(earlier, 0..8)), 8, "life {life}");
        }
        engine.save_all(&hashes(life, 0..8));
        manager.settle_empty();
        manager = manager.kill().start();
        engine.client.ping().unwrap();
        let ended = engine.client.wait(PATIENCE).unwrap().unwrap();
        assert_eq!(ended.status, Status::Gone);
        assert!(engine.client.wait(Duration::ZERO).is_err());
    }
}
