//! Goal: DRAM is served while the SSD tier is found again, and whatever happens meanwhile is right
//! afterwards. Method: a real Manager over a disk that gives no footer, or gives them slowly, or
//! fails, for as long as the test wants.

use std::time::Duration;

use orbitkv_engine::{PageHash, QueryMode, Status};
use orbitkv_shm_protocol::inspect::{DeviceView, LifeState};
use orbitkv_shm_protocol::telemetry::{Metric, SpillOutcome};
use orbitkv_tests::confine::in_private_mounts;
use orbitkv_tests::engine::{Engine, hashes, image, namespace};
use orbitkv_tests::faulty::{Effect, Fault, FaultyDisk, On, Requests};
use orbitkv_tests::manager::{Manager, Setup};
use orbitkv_tests::setup;
use rustix::io::Errno;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
/// Everything behind the superblock and its tables, the first slots perhaps not included.
const SLOTS: std::ops::Range<u64> = 3 * MIB..u64::MAX;

/// Runs `body` with an empty faulty disk and the setup of a Manager on it, once by each I/O engine.
fn on_a_disk(body: impl Fn(&FaultyDisk, Setup) + Send + Sync) {
    on_a_disk_of("128MiB", body);
}

fn on_a_disk_of(capacity: &str, body: impl Fn(&FaultyDisk, Setup) + Send + Sync) {
    for io in ["uring", "blocking"] {
        in_private_mounts(|| {
            let disk = FaultyDisk::below(env!("CARGO_TARGET_TMPDIR"), Requests::Parallel);
            body(&disk, setup!().flag("--ssd-engine", io).ssd_on(&disk, capacity));
        });
    }
}

fn device(manager: &Manager, number: usize) -> DeviceView {
    manager.fresh().ssd[number].clone()
}

fn spilled(manager: &Manager, outcome: SpillOutcome) -> u64 {
    manager.get(Metric::SpillPages(outcome))
}

/// A chain on SSD in each of two namespaces, and the setup of their dead Manager.
fn with_two_chains(setup: Setup, page_bytes: u64) -> Setup {
    let manager = setup.start();
    for model in ["kept", "forgotten"] {
        manager.attach(model, page_bytes, 16).save_all(&hashes(1, 0..8));
    }
    manager.settle_empty();
    manager.kill()
}

#[test]
fn dram_is_served_while_nothing_of_the_tier_is_known() {
    on_a_disk(|disk, setup| {
        let setup = with_two_chains(setup, 64 * KIB);
        let hang = disk.inject(Fault::new(On::Reads, Effect::Hang).within(SLOTS));
        // In this order: dropped the other way round, a Manager that hangs could not end.
        let (manager, hang) = (setup.start_early(), hang);
        let mut kept = manager.attach("kept", 64 * KIB, 16);
        let (old, new) = (hashes(1, 0..8), hashes(2, 0..8));
        assert_eq!(kept.query(&old, QueryMode::Demand).ok().pages, 0, "not found yet");
        kept.save_all(&new);
        kept.save_all(&old[..3]);
        assert_eq!((kept.restore_all(&new), kept.restore_all(&old)), (8, 3));
        let mut forgotten = manager.attach("forgotten", 64 * KIB, 16);
        let scope = forgotten.scope;
        let forget = forgotten.client.forget(&scope).unwrap();
        forgotten.save_all(&old[..2]);
        assert_eq!(forgotten.restore_all(&old), 2);
        let seen = manager.fresh();
        let ssd = &seen.ssd[0];
        assert_eq!((ssd.recovery, ssd.health), ("scanning", "healthy"));
        assert!(ssd.is_recovering() && ssd.scanned_slots < ssd.scan_slots, "{ssd:?}");
        assert_eq!(seen.manager.state, LifeState::Ready);
        assert_eq!(seen.counters.get(Metric::SsdWrittenPages), 0);
        assert_eq!(seen.counters.get(Metric::SpillWaitingPages), 13);
        assert_eq!(forgotten.client.poll().unwrap(), None, "a forget that is not recorded");

        drop(hang);
        let manager = manager.recovered();
        let ended = forgotten.end(forget).ok();
        assert_eq!((ended.status, ended.pages), (Status::Ok, 8));
        manager.settle_empty();
        let ssd = device(&manager, 0);
        assert_eq!((ssd.recovery, ssd.scanned_slots), ("done", ssd.scan_slots));
        assert_eq!(ssd.scan_read_bytes, ssd.scan_slots * 4096, "footers and nothing else");
        assert_eq!(spilled(&manager, SpillOutcome::AlreadyThere), 3, "they were there");
        assert_eq!(manager.get(Metric::SsdWrittenPages), 8 + 2);
        manager.evict();
        let all = |kept: &mut Engine, forgotten: &mut Engine| {
            [kept.restore_all(&old), kept.restore_all(&new), forgotten.restore_all(&old)]
        };
        assert_eq!(all(&mut kept, &mut forgotten), [8, 8, 2]);
        drop((kept, forgotten));
        // The next life finds the same.
        let manager = manager.kill().start();
        let mut kept = manager.attach("kept", 64 * KIB, 16);
        let mut forgotten = manager.attach("forgotten", 64 * KIB, 16);
        assert_eq!(all(&mut kept, &mut forgotten), [8, 8, 2]);
    });
}

/// Goal: a stop and an eviction end while the tier is searched, and what waits to be written is
/// written if the search ends in time. Method: no footer comes before the stop; after it they come
/// at once, or each takes its time.
#[test]
fn a_stop_and_an_eviction_end_while_the_tier_is_searched() {
    on_a_disk(|disk, setup| {
        let mut setup = with_two_chains(setup, 64 * KIB);
        for pause in [0, 400] {
            let slow = Effect::Delay(Duration::from_millis(pause));
            let slow = disk.inject(Fault::new(On::Reads, slow).within(SLOTS));
            let hang = disk.inject(Fault::new(On::Reads, Effect::Hang).within(SLOTS));
            let (manager, hang) = (setup.start_early(), hang);
            let mut engine = manager.attach("kept", 64 * KIB, 16);
            let new: Vec<PageHash> = hashes(1000 + pause, 0..4);
            engine.save_all(&new);
            let socket = manager.socket();
            let evict = ["evict", "--tier", "dram", "--timeout", "1ms", "--socket"];
            let evict = [&evict[..], &[socket.to_str().unwrap()]].concat();
            let output = manager.setup().orbitkv(&evict);
            // It says that not all was written, and drops it all the same.
            assert_eq!(output.status.code(), Some(1), "{output:?}");
            assert!(String::from_utf8_lossy(&output.stdout).starts_with("evicted 4 pages"));
            engine.save_all(&new);
            drop(engine);
            assert!(device(&manager, 0).is_recovering());
            drop(hang);
            setup = manager.stop();
            drop(slow);
        }
        let manager = setup.start();
        let mut engine = manager.attach("kept", 64 * KIB, 16);
        assert_eq!(engine.restore_all(&hashes(1, 0..8)), 8);
        let written = engine.restore_all(&hashes(1000, 0..4));
        assert_eq!(written, 4, "there was time for it");
    });
}

/// Goal: a file whose footers cannot be read is off, and says so, while the others work; what it
/// holds comes back with the next start that can read it, but nothing that was forgotten meanwhile.
#[test]
fn a_file_that_cannot_be_read_is_left_out() {
    on_a_disk_of("256MiB", |disk, setup| {
        let plain = setup.folder().join("plain");
        let setup = setup.flag("--ssd", plain.to_str().unwrap());
        let manager = setup.start();
        // Pages without parents: those of one file need none of the other. Two sizes take a region
        // each, one on either file.
        let sizes = [64 * KIB, 256 * KIB];
        let models = ["kept", "forgotten"];
        let roots: Vec<PageHash> = (0..8).flat_map(|root| hashes(root, 0..1)).collect();
        for (size, model) in sizes.into_iter().flat_map(|size| models.map(|model| (size, model))) {
            let mut engine = manager.attach(model, size, 16);
            roots.iter().for_each(|root| engine.save_all(&[*root]));
        }
        manager.settle_empty();
        let on_plain = device(&manager, 1).slots;
        assert!((1..32).contains(&on_plain), "{:?}", manager.fresh().ssd);
        let setup = manager.kill();
        let found = |manager: &Manager, model: &str, size: u64| -> u64 {
            let mut engine = manager.attach(model, size, 16);
            roots.iter().map(|root| u64::from(engine.restore_all(&[*root]))).sum()
        };

        let bad = disk.inject(Fault::new(On::Reads, Effect::Errno(Errno::IO)).within(SLOTS));
        let manager = setup.start();
        let seen = manager.settle("degraded", |seen| seen.manager.state == LifeState::Degraded);
        let [off, fine] = &seen.ssd[..] else { panic!("{:?}", seen.ssd) };
        assert_eq!((off.recovery, off.health), ("unreadable", "off"));
        assert_eq!((fine.recovery, fine.health), ("done", "healthy"));
        let log = manager.setup().log();
        for part in ["cannot be found", "off until the next start", "Input/output error"] {
            assert!(log.contains(part), "{part:?} is missing from {log}");
        }
        let left = sizes.map(|size| models.iter().map(|model| found(&manager, model, size)).sum());
        assert_eq!(left.iter().sum::<u64>(), on_plain);
        let writes = disk.served().writes;
        // Of a size that has its region on the other file.
        let size = sizes[usize::from(left[0] == 0)];
        let mut engine = manager.attach("kept", size, 16);
        engine.save_all(&hashes(100, 0..8));
        manager.settle_empty();
        manager.evict();
        assert_eq!(engine.restore_all(&hashes(100, 0..8)), 8);
        assert_eq!(disk.served().writes, writes, "nothing is written there");
        for size in sizes {
            let mut engine = manager.attach("forgotten", size, 16);
            let scope = engine.scope;
            let forget = engine.client.forget(&scope).unwrap();
            let _recorded = engine.end(forget).ok();
        }
        drop((engine, bad));
        let setup = manager.kill();

        let manager = setup.start();
        assert!(manager.fresh().ssd.iter().all(|ssd| ssd.recovery == "done"));
        for size in sizes {
            assert_eq!(found(&manager, "kept", size), 8, "{size}");
            assert_eq!(found(&manager, "forgotten", size), 0, "{size}");
        }
    });
}

/// Goal: one bad footer costs its page, not the file. Method: that of the last page of a chain, on
/// which no other hangs.
#[test]
fn a_footer_that_cannot_be_read_costs_its_page_only() {
    on_a_disk(|disk, setup| {
        const PAGE: u64 = 64 * KIB;
        let setup = with_two_chains(setup, PAGE);
        let lost = image(&namespace("kept", PAGE), &hashes(1, 7..8)[0]);
        let stored = disk.stored("tier");
        let mut places = (0..stored.len() - lost.len()).step_by(4096);
        let place = places.find(|&at| stored[at..].starts_with(&lost)).expect("it is on disk");
        // Right behind the image.
        let footer = place as u64 + PAGE..place as u64 + PAGE + 4096;
        let bad = disk.inject(Fault::new(On::Reads, Effect::Errno(Errno::IO)).within(footer));
        let faults = disk.served().faults;
        let manager = setup.start();
        assert_eq!((device(&manager, 0).recovery, device(&manager, 0).health), ("done", "healthy"));
        assert!(disk.served().faults > faults, "the footer was not asked for");
        drop(bad);
        assert_eq!(manager.fresh().counters.get(Metric::SsdRecoveredPages), 15);
        for (model, pages) in [("kept", 7), ("forgotten", 8)] {
            let mut engine = manager.attach(model, PAGE, 16);
            assert_eq!(engine.restore_all(&hashes(1, 0..8)), pages, "{model}");
        }
    });
}
