//! A real Manager on a disk that fails: nobody ever gets a wrong byte, every failure is a miss that
//! is counted, DRAM is served all the time, and the tier comes back by itself.
//!
//! Each scenario runs with both I/O engines. The disk is a file system of the test (see
//! `orbitkv_tests::faulty`), so one chunk of a page is one request: pages here are longer than what
//! is read together with its neighbours.

use std::collections::HashSet;
use std::fs::{self, File};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use orbitkv_engine::{
    Code, Deadline, EngineId, NamespaceSpec, PageHash, QueryMode, RestoreOptions,
};
use orbitkv_shm_protocol::inspect::Snapshot;
use orbitkv_shm_protocol::telemetry::{Metric, Reason, SsdFault, SsdRetry, SsdStop};
use orbitkv_tests::confine::in_private_mounts;
use orbitkv_tests::engine::{Engine, blocks, hashes, image, namespace};
use orbitkv_tests::engine_process::{EngineProcess, Identity};
use orbitkv_tests::faulty::{Effect, Fault, FaultyDisk, Injected, On, Requests};
use orbitkv_tests::manager::{Manager, PATIENCE, Setup};
use orbitkv_tests::setup;
use rustix::io::Errno;
use rustix::process::Signal;
use tempfile::TempDir;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
/// Longer than 128 KiB: read alone.
const PAGE: u64 = 136 * KIB;

/// One test for each engine.
macro_rules! with_each_engine {
    ($($name:ident,)*) => {
        mod uring {
            $(#[test] fn $name() { super::$name("uring"); })*
        }
        mod blocking {
            $(#[test] fn $name() { super::$name("blocking"); })*
        }
    };
}

with_each_engine! {
    ssd_01_a_file_cut_in_the_middle_of_a_page_gives_no_stale_tail,
    ssd_03_memory_of_slow_reads_is_nobody_elses_until_they_end,
    ssd_03_a_region_that_is_given_back_is_not_touched_by_slow_reads,
    ssd_03_a_manager_with_slow_reads_ends_in_order,
    a_manager_ends_in_order_although_its_disk_hangs,
    ssd_11_a_disk_that_fails_and_heals_comes_back_while_dram_is_served,
    hang_07_a_device_that_fails_everything_ends_every_prepare,
    perf_05_slow_reads_of_one_engine_wait_for_nobody_elses_dram_hits,
    perf_11_one_cold_prefix_for_eight_engines_is_read_once,
    res_05_space_that_runs_out_at_set_up_or_later,
    bits_that_rot_are_never_served,
    a_file_that_vanishes_costs_only_what_was_in_it,
    a_device_that_hangs_holds_up_only_its_own_pages,
    pages_of_a_device_that_hangs_are_missing_until_it_answers,
    a_file_that_hangs_holds_up_nothing_of_another,
}

/// A Manager on a faulty disk. Fields are dropped in this order.
struct Rig {
    manager: Option<Manager>,
    disk: FaultyDisk,
    _folder: TempDir,
}

impl Rig {
    /// An empty disk, and nobody on it.
    fn empty(requests: Requests) -> Self {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let disk = FaultyDisk::mount(&folder.path().join("disk"), requests);
        Self { manager: None, disk, _folder: folder }
    }

    /// The setup of a Manager on the disk: 64 MiB of DRAM, all of which may be leased.
    fn setup(&self, engine: &str) -> Setup {
        let budgets = ["--query-budget", "64MiB", "--session-budget", "64MiB"];
        self.sized(engine, "64MiB").flags(&budgets)
    }

    fn sized(&self, engine: &str, dram: &str) -> Setup {
        let tier = self.disk.path().join("tier");
        let flags = ["--ssd-engine", engine, "--ssd-capacity", "128MiB", "--http", "0"];
        setup!().dram(dram).flags(&flags).flag("--ssd", tier.to_str().unwrap())
    }

    /// A Manager on an empty disk.
    fn new(engine: &str) -> Self {
        let mut rig = Self::empty(Requests::Parallel);
        rig.manager = Some(rig.setup(engine).start());
        rig
    }

    /// A Manager on an empty disk, to whom a device that holds requests back never counts as hung:
    /// a test that takes its time meanwhile sees what it waits for.
    fn patient(engine: &str) -> Self {
        let mut rig = Self::empty(Requests::Parallel);
        let patient = |command: &mut Command| {
            command.env("ORBITKV_TEST_HUNG_AFTER_S", "3600");
        };
        rig.manager = Some(rig.setup(engine).start_by(patient));
        rig
    }

    fn manager(&self) -> &Manager {
        self.manager.as_ref().unwrap()
    }

    /// Stops the Manager and starts it again.
    fn restart(&mut self) {
        let setup = self.manager.take().unwrap().stop();
        self.manager = Some(setup.start());
    }

    fn attach(&self, model: &str, pages: u32) -> Engine {
        Engine::attach(&self.manager().socket(), namespace(model, PAGE), pages)
    }

    fn get(&self, metric: Metric) -> u64 {
        self.manager().fresh().counters.get(metric)
    }

    /// Saves a chain so that it is on SSD only.
    fn on_ssd(&self, engine: &mut Engine, pages: &[PageHash]) {
        engine.save_all(pages);
        self.manager().evict();
    }

    /// Saves pages without parents so that they are on SSD only.
    fn each_on_ssd(&self, engine: &mut Engine, roots: &[PageHash]) {
        save_each(engine, roots);
        self.manager().evict();
    }

    fn health(&self) -> &'static str {
        self.manager().inspect().ssd[0].health
    }

    /// Where the images of pages are in the file.
    fn places(&self, spec: &NamespaceSpec, hashes: &[PageHash]) -> Vec<u64> {
        let bytes = self.disk.stored("tier");
        let images = hashes.iter().map(|hash| image(spec, hash));
        let place = |image: Vec<u8>| {
            let mut blocks = bytes.chunks(4096);
            let block = blocks.position(|block| block == &image[..4096]).expect("it is on disk");
            assert!(bytes[block * 4096..].starts_with(&image), "the page is whole on disk");
            block as u64 * 4096
        };
        images.map(place).collect()
    }
}

/// Reads that hang until this is dropped.
fn hang(disk: &FaultyDisk, on: On) -> Injected {
    disk.inject(Fault::new(on, Effect::Hang))
}

fn fail(disk: &FaultyDisk, on: On) -> Injected {
    disk.inject(Fault::new(on, Effect::Errno(Errno::IO)))
}

/// The first page of each of some sequences: pages without parents.
fn roots(sequences: std::ops::Range<u64>) -> Vec<PageHash> {
    sequences.flat_map(|sequence| hashes(sequence, 0..1)).collect()
}

/// Saves each root alone.
fn save_each(engine: &mut Engine, roots: &[PageHash]) {
    for root in roots {
        let _saved = engine.save(&blocks(std::slice::from_ref(root), 0)).ok();
    }
}

/// Restores each root alone and checks its bytes: those that were there.
fn restored(engine: &mut Engine, roots: &[PageHash]) -> Vec<bool> {
    roots.iter().map(|root| engine_has(engine, root)).collect()
}

/// Brings one page into DRAM and restores it: false when that ended without the page.
fn engine_has(engine: &mut Engine, root: &PageHash) -> bool {
    let hit = engine.query(std::slice::from_ref(root), QueryMode::Demand);
    let Some(lease) = hit.lease else {
        assert_eq!(hit.pages, 0, "{hit:?}");
        return false;
    };
    let blocks = blocks(std::slice::from_ref(root), 0);
    let restored = engine.restore(&lease, 0, &blocks).ok();
    assert_eq!(restored.pages, 1);
    engine.check(&blocks);
    true
}

/// Saves pages of a chain as often as it takes, one at a time, until there is no memory.
fn fill_dram(engine: &mut Engine, sequence: u64) -> Vec<PageHash> {
    let mut saved = Vec::new();
    for index in 0.. {
        let hash = hashes(sequence, index..index + 1);
        let ended = engine.save_after(saved.last().copied(), &blocks(&hash, 0));
        if ended.pages == 0 {
            assert_eq!(ended.results[0].code, Code::NoMemory, "{ended:?}");
            return saved;
        }
        saved.extend(hash);
    }
    saved
}

/// Goal: a read that brings less than was asked is asked once more, and then the page is missing:
/// never a page with an old tail (SSD-01). Method: the file is cut in the middle of a page, while
/// the memory that it is read to holds bytes of others.
fn ssd_01_a_file_cut_in_the_middle_of_a_page_gives_no_stale_tail(engine: &str) {
    in_private_mounts(|| {
        let mut rig = Rig::new(engine);
        let mut client = rig.attach("cut", 8);
        let pages = roots(0..8);
        rig.each_on_ssd(&mut client, &pages);
        let places = rig.places(&client.spec, &pages);
        let mut in_order = places.clone();
        in_order.sort_unstable();
        let cut = in_order[5] + 4096;
        let tier = File::options().write(true).open(rig.disk.path().join("tier")).unwrap();
        tier.set_len(cut).unwrap();
        let whole: Vec<_> = places.iter().map(|place| place + PAGE <= cut).collect();
        assert_eq!(restored(&mut client, &pages), whole);
        let manager = rig.manager();
        manager.counted(Metric::SsdReadErrors(SsdFault::Short), 3);
        // Each of the three was asked for twice.
        manager.counted(Metric::SsdRetries(SsdRetry::Short), 6);
        manager.counted(Metric::SsdRetries(SsdRetry::Interrupted), 0);
        manager.counted(Metric::SsdReadPages, 5);
        manager.counted(Metric::SsdRetiredSlots, 3);
        // What is missing can be computed and saved anew, in other slots.
        rig.each_on_ssd(&mut client, &pages);
        assert_eq!(restored(&mut client, &pages), [true; 8]);
        drop((client, tier));
        rig.restart();
        let mut client = rig.attach("cut", 8);
        assert_eq!(restored(&mut client, &pages), [true; 8]);
    });
}

/// Goal: memory that the kernel still writes to belongs to nobody else, whatever becomes of those
/// who asked: it is free when its reads have ended, and not before (SSD-03 a, c). Method: 64 reads
/// of four engines hang; their queries are cancelled, or they are killed; another engine fills all
/// memory with pages; the reads bring their bytes; every page of the other engine is as it was.
fn ssd_03_memory_of_slow_reads_is_nobody_elses_until_they_end(engine: &str) {
    in_private_mounts(|| {
        let rig = Rig::patient(engine);
        let identity = Identity::new(EngineId([7; 16]), "slow", PAGE, 16);
        let slow: Vec<_> = (1..5).map(|sequence| hashes(sequence, 0..16)).collect();
        let mut client = Engine::attach(&rig.manager().socket(), identity.spec(), 16);
        for chain in &slow {
            client.save_all(chain);
        }
        for way in ["cancelled", "killed"] {
            rig.manager().evict();
            // Attached before anything hangs: they take their time to start.
            let (mut queries, mut engines) = (Vec::new(), Vec::new());
            if way == "killed" {
                for _ in &slow {
                    engines.push(EngineProcess::start(rig.manager().setup(), &identity));
                }
            }
            let mut other = rig.attach("canary", 1);
            let stuck = hang(&rig.disk, On::Reads);
            for (chain, sequence) in slow.iter().zip(1..) {
                if way == "cancelled" {
                    let scope = client.scope;
                    let deadline = Deadline::after(2 * PATIENCE);
                    let query = client.client.query(&scope, chain, QueryMode::Demand, deadline);
                    queries.push(query.unwrap());
                    client.client.submit().unwrap();
                } else {
                    engines[sequence as usize - 1].order(&format!("lease {sequence} 16"));
                }
            }
            // A ring hands all over; eight threads have eight in the kernel.
            let in_kernel = if engine == "uring" { 64 } else { 8 };
            rig.disk.settle("reads hang", |served| served.waiting == in_kernel);
            rig.manager().settle("64 pages are read", |seen| seen.ssd[0].reading == 64);
            let mut cancels = Vec::new();
            for query in &queries {
                cancels.push(client.client.cancel(*query).unwrap());
            }
            // Answered when all before it was taken.
            let ping = client.client.ping().unwrap();
            let _pong = client.end(ping).ok();
            for process in &engines {
                process.signal(Signal::KILL);
            }
            rig.manager().settle("they are gone", |seen| {
                seen.sessions.iter().filter(|session| session.state == "attached").count() == 2
            });
            let canary = fill_dram(&mut other, 9);
            assert!(canary.len() > 300, "{} pages fit beside 64", canary.len());
            assert!((canary.len() as u64 + in_kernel) * PAGE <= 64 * MIB);
            assert!(rig.manager().fresh().ssd[0].reading >= in_kernel);
            assert_eq!(client.client.poll().unwrap(), None, "ended before its reads");
            if way == "killed" {
                let closing = rig.manager().inspect().sessions.len();
                assert_eq!(closing, 2 + 4, "sessions that wait for their reads");
            }
            drop(stuck);
            for (query, cancel) in queries.into_iter().zip(cancels) {
                let ended = client.end(query);
                assert_eq!((ended.code, ended.lease), (Code::Cancelled, None), "{ended:?}");
                let _cancelled = client.end(cancel).ok();
            }
            rig.manager().settle_empty();
            rig.disk.settle("no read is left", |served| served.waiting == 0);
            let found = other.query(&canary, QueryMode::Candidate).ok();
            assert_eq!(found.pages as usize, canary.len());
            assert!(found.pages_dram > 200, "{found:?}");
            let lease = found.leased();
            for (at, page) in canary.iter().enumerate() {
                let block = blocks(std::slice::from_ref(page), 0);
                let _restored = other.restore(&lease, at as u32, &block).ok();
                other.check(&block);
            }
            drop(other);
            rig.manager().settle_empty();
        }
        // Nothing was lost by it.
        for chain in &slow {
            assert_eq!(client.restore_all(chain), 16);
        }
        assert_eq!(read_errors(&rig), 0);
    });
}

/// Reads that failed, by any cause.
fn read_errors(rig: &Rig) -> u64 {
    let counters = rig.manager().fresh().counters;
    SsdFault::ALL.iter().map(|fault| counters.get(Metric::SsdReadErrors(*fault))).sum()
}

/// Writes that failed, by any cause.
fn write_errors(rig: &Rig) -> u64 {
    let counters = rig.manager().fresh().counters;
    SsdFault::ALL.iter().map(|fault| counters.get(Metric::SsdWriteErrors(*fault))).sum()
}

/// Goal: a region is not given back while a slow restore may write to it, and nothing is written to
/// it afterwards (SSD-03 b). Method: a restore from SSD hangs while its region is unregistered; when
/// that has ended the device pages are filled with a canary.
fn ssd_03_a_region_that_is_given_back_is_not_touched_by_slow_reads(engine: &str) {
    in_private_mounts(|| {
        let rig = Rig::patient(engine);
        let mut client = rig.attach("region", 64);
        let pages = hashes(1, 0..64);
        rig.on_ssd(&mut client, &pages);
        let lease = client.query(&pages, QueryMode::Candidate).ok().leased();
        let stuck = hang(&rig.disk, On::Reads);
        let all = blocks(&pages, 0);
        client.poison(&all);
        let region = client.region;
        let options = RestoreOptions::default();
        let restore = client.client.restore(&lease, 0, &region, &all, options).unwrap();
        client.client.submit().unwrap();
        rig.disk.settle("reads hang", |served| served.waiting >= 8);
        let unregister = client.client.unregister(region).unwrap();
        client.client.submit().unwrap();
        rig.manager().settle("both are taken", |seen| seen.operations.len() == 2);
        assert_eq!(client.client.poll().unwrap(), None, "the restore waits for its reads");
        drop(stuck);
        let restored = client.end(restore).ok();
        assert_eq!(restored.pages, 64);
        client.check(&all);
        let _given_back = client.end(unregister).ok();
        client.poison(&all);
        rig.manager().settle_empty();
        rig.disk.settle("no read is left", |served| served.waiting == 0);
        assert!(all.iter().all(|block| client.is_poison(block)), "written to after its end");
        client.region = client.register_again();
        assert_eq!(client.restore_all(&pages), 64);
    });
}

/// Goal: a Manager that is told to stop while the disk is slow ends in order, with nothing left in
/// the kernel, and the next one finds every page (SSD-03 d).
fn ssd_03_a_manager_with_slow_reads_ends_in_order(engine: &str) {
    in_private_mounts(|| {
        let mut rig = Rig::new(engine);
        let mut client = rig.attach("stop", 64);
        let pages = hashes(1, 0..64);
        rig.on_ssd(&mut client, &pages);
        // Eight threads need eight turns.
        let slow = Effect::Delay(Duration::from_millis(300));
        let slow = rig.disk.inject(Fault::new(On::Reads, slow));
        let scope = client.scope;
        let deadline = Deadline::after(2 * PATIENCE);
        let _query = client.client.query(&scope, &pages, QueryMode::Demand, deadline).unwrap();
        client.client.submit().unwrap();
        rig.disk.settle("reads are slow", |served| served.waiting >= 8);
        let setup = rig.manager.take().unwrap().stop();
        assert!(!setup.log().contains("left behind"), "{}", setup.log());
        rig.disk.settle("nothing is left in the kernel", |served| served.waiting == 0);
        drop((client, slow));
        rig.manager = Some(setup.start());
        assert_eq!(rig.get(Metric::SsdRecoveredPages), 64);
        let mut client = rig.attach("stop", 64);
        assert_eq!(client.restore_all(&pages), 64);
    });
}

/// Goal: a Manager that is told to stop while its disk answers nothing does not wait for it: it says
/// what it leaves behind and ends, long before the disk answers; what was on the disk is found by
/// the next one. Method: reads, writes and a superblock hang; the process goes as soon as they are
/// let go, since the kernel keeps one that has requests out.
fn a_manager_ends_in_order_although_its_disk_hangs(engine: &str) {
    in_private_mounts(|| {
        let mut rig = Rig::patient(engine);
        let mut client = rig.attach("stuck", 16);
        let pages = roots(0..16);
        rig.each_on_ssd(&mut client, &pages);
        let (mut writer, mut forgetful) = (rig.attach("writes", 1), rig.attach("forgets", 1));
        rig.manager().settle_empty();
        let stuck = hang(&rig.disk, On::Both);
        save_each(&mut writer, &roots(100..101));
        rig.disk.settle("a write hangs", |served| served.waiting >= 1);
        let _forget = forgetful.client.forget(&forgetful.scope).unwrap();
        forgetful.client.submit().unwrap();
        rig.disk.settle("a superblock hangs", |served| served.waiting >= 2);
        let ask = |root: &PageHash| {
            let (scope, root) = (client.scope, std::slice::from_ref(root));
            let deadline = Deadline::after(2 * PATIENCE);
            client.client.query(&scope, root, QueryMode::Demand, deadline).unwrap()
        };
        let _asked: Vec<_> = pages.iter().map(ask).collect();
        client.client.submit().unwrap();
        rig.disk.settle("reads hang", |served| served.waiting >= 3);
        let manager = rig.manager.take().unwrap();
        manager.ask_to_stop();
        wait_for("it has done all that it can", || {
            let log = manager.setup().log();
            log.contains("left behind") && log.trim_end().ends_with("stopped")
        });
        assert!(rig.disk.served().waiting >= 3, "the disk has not answered");
        assert!(!manager.socket().exists(), "the next one may come");
        drop(stuck);
        let setup = manager.ended();
        drop((client, writer, forgetful));
        rig.disk.settle("nothing is left in the kernel", |served| served.waiting == 0);
        rig.manager = Some(setup.start());
        let mut client = rig.attach("stuck", 16);
        rig.manager().settle("all is found", |seen| seen.ssd[0].recovery == "done");
        assert_eq!(restored(&mut client, &pages), [true; 16]);
    });
}

fn percentile(times: &mut [Duration], hundredths: usize) -> Duration {
    times.sort_unstable();
    times[(times.len() * hundredths / 100).min(times.len() - 1)]
}

/// Goal: a disk that fails under load is given up and taken back by itself, each said once and
/// shown, with DRAM served all the time (SSD-11). Method: reads and writes fail until the tier is
/// given up and a hundred restores from DRAM longer, then the disk heals; one engine restores from DRAM meanwhile.
fn ssd_11_a_disk_that_fails_and_heals_comes_back_while_dram_is_served(engine: &str) {
    in_private_mounts(|| {
        let rig = Rig::new(engine);
        let mut hits = rig.attach("dram", 8);
        let warm = hashes(1, 0..8);
        let mut mixed = rig.attach("mixed", 16);
        let cold: Vec<_> = roots(100..300);
        rig.each_on_ssd(&mut mixed, &cold);
        hits.save_all(&warm);
        let (failing, over) = (AtomicBool::new(false), AtomicBool::new(false));
        let hit = AtomicU64::new(0);
        let mut states = Vec::new();
        let mut see = |seen: &Snapshot| {
            let now = (seen.manager.state.label(), seen.ssd[0].health);
            if states.last() != Some(&now) {
                states.push(now);
            }
        };
        let (mut before, mut meanwhile) = thread::scope(|scope| {
            let (failing, over, hit) = (&failing, &over, &hit);
            let dram = scope.spawn(move || {
                let (mut before, mut meanwhile) = (Vec::new(), Vec::new());
                while !over.load(Ordering::Relaxed) {
                    let start = Instant::now();
                    assert_eq!(hits.restore_all(&warm), 8, "DRAM is served");
                    let times =
                        if failing.load(Ordering::Relaxed) { &mut meanwhile } else { &mut before };
                    times.push(start.elapsed());
                    hit.fetch_add(1, Ordering::Relaxed);
                    thread::sleep(Duration::from_millis(2));
                }
                (before, meanwhile)
            });
            let end = OverAtEnd(over);
            let mut next = 1000;
            // What it reads is right or missing; what it saves ends well.
            let mut load = |client: &mut Engine| {
                let root = cold[next as usize % cold.len()];
                let _right_or_missing = engine_has(client, &root);
                let fresh = roots(next..next + 1);
                let _saved = client.save(&blocks(&fresh, 0)).ok();
                next += 1;
            };
            for _ in 0..50 {
                load(&mut mixed);
            }
            see(&rig.manager().fresh());
            failing.store(true, Ordering::Relaxed);
            let broken = fail(&rig.disk, On::Both);
            wait_for("it is given up", || {
                load(&mut mixed);
                see(&rig.manager().inspect());
                ["off", "read_only"].contains(&rig.health())
            });
            let hits_then = hit.load(Ordering::Relaxed);
            wait_for("DRAM is served meanwhile", || {
                load(&mut mixed);
                see(&rig.manager().inspect());
                hit.load(Ordering::Relaxed) >= hits_then + 100
            });
            drop(broken);
            wait_for("it comes back", || {
                load(&mut mixed);
                see(&rig.manager().inspect());
                rig.health() == "healthy"
            });
            failing.store(false, Ordering::Relaxed);
            drop(end);
            dram.join().unwrap()
        });
        see(&rig.manager().settle("all is well", |seen| seen.manager.state.label() == "ready"));
        assert_eq!(states.first(), Some(&("ready", "healthy")), "{states:?}");
        assert_eq!(states.last(), Some(&("ready", "healthy")), "{states:?}");
        assert!(states.iter().any(|(state, _)| *state == "degraded"), "{states:?}");
        assert!(meanwhile.len() >= 100, "{} DRAM hits meanwhile", meanwhile.len());
        let ratio = percentile(&mut meanwhile, 99).as_secs_f64()
            / percentile(&mut before, 99).as_secs_f64();
        println!("{engine}: p99 of DRAM hits beside the failing disk is {ratio:.2} of before");
        // And it works again.
        let fresh = roots(5000..5016);
        let written = rig.get(Metric::SsdWrittenPages);
        save_each(&mut mixed, &fresh);
        rig.manager().evict();
        assert!(rig.get(Metric::SsdWrittenPages) >= written + 16);
        assert_eq!(restored(&mut mixed, &fresh), [true; 16]);
        // Every change was said once: each begins where the one before ended.
        let mut stops_seen = 0;
        let mut log = String::new();
        wait_for("counters and log stay the same", || {
            let before = stopped(&rig);
            log = rig.manager().setup().log();
            stops_seen = stopped(&rig);
            before == stops_seen
                && log.lines().filter(|line| is_stop(line)).count() as u64 == before
        });
        let changes: Vec<_> = log.lines().filter_map(change).collect();
        assert_eq!(changes.first().map(|change| change.0), Some("healthy"), "{log}");
        assert_eq!(changes.last().map(|change| change.1), Some("healthy"), "{log}");
        assert!(changes.iter().all(|(before, now)| before != now), "{changes:?}");
        assert!(changes.windows(2).all(|two| two[0].1 == two[1].0), "{log}");
        // Getting better is none.
        let rank =
            |state| ["healthy", "degraded", "read-only", "off"].iter().position(|s| *s == state);
        let worse = changes.iter().filter(|change| rank(change.1) > rank(change.0)).count() as u64;
        assert_eq!(stops_seen, worse, "{changes:?}");
    });
}

fn is_stop(line: &str) -> bool {
    line.contains("WARN") && line.contains("changed its state")
}

/// The states of a device before and after a change that the Manager logged.
fn change(line: &str) -> Option<(&str, &str)> {
    let value = |name: &str| {
        let rest = line.split_once(name)?.1;
        Some(rest.split_once('"')?.0)
    };
    if line.contains("the ssd device works again") {
        return value("before=\"").map(|before| (before, "healthy"));
    }
    let changed = is_stop(line) || line.contains("an ssd device gets better");
    changed.then(|| value("before=\"").zip(value("now=\"")))?
}

/// Times that the device ceased to take some work.
fn stopped(rig: &Rig) -> u64 {
    let counters = rig.manager().fresh().counters;
    SsdStop::ALL.iter().map(|reason| counters.get(Metric::SsdStops(*reason))).sum()
}

/// Says that it is over when dropped, so also when a test fails.
struct OverAtEnd<'a>(&'a AtomicBool);

impl Drop for OverAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Twice the longest pause between two tries of a device.
const RECOVERY: Duration = Duration::from_secs(60);

fn wait_for(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + RECOVERY;
    while !is_so() {
        assert!(Instant::now() < end, "never so: {what}");
        thread::sleep(Duration::from_millis(10));
    }
}

/// Goal: with a device that fails every request each prepare ends, with an I/O error, and DRAM is
/// served (HANG-07).
fn hang_07_a_device_that_fails_everything_ends_every_prepare(engine: &str) {
    in_private_mounts(|| {
        let rig = Rig::new(engine);
        let mut client = rig.attach("fails", 16);
        let pages = roots(0..100);
        rig.each_on_ssd(&mut client, &pages);
        let warm = hashes(1000, 0..16);
        client.save_all(&warm);
        let broken = fail(&rig.disk, On::Both);
        let scope = client.scope;
        let mut queries = Vec::new();
        for root in &pages {
            let deadline = Deadline::DEFAULT;
            let root = std::slice::from_ref(root);
            let query = client.client.query(&scope, root, QueryMode::Demand, deadline);
            queries.push(query.unwrap());
        }
        client.client.submit().unwrap();
        for query in queries {
            let ended = client.end(query);
            // Nothing is asked of a device that is known to fail.
            assert!([Code::IoError, Code::None].contains(&ended.code), "{ended:?}");
            assert_eq!((ended.pages, ended.lease), (0, None), "{ended:?}");
        }
        assert_eq!(client.restore_all(&warm), 16);
        client.save_all(&hashes(1001, 0..16));
        assert_eq!(client.restore_all(&hashes(1001, 0..16)), 16);
        let missed = Metric::LookupMissedPages(Reason::IoError);
        rig.manager().settle("each page failed or was missing", |seen| {
            let errors = |fault: &SsdFault| seen.counters.get(Metric::SsdReadErrors(*fault));
            let failed: u64 = SsdFault::ALL.iter().map(errors).sum();
            failed + seen.counters.get(missed) >= 100
        });
        rig.manager().settle("it shows", |seen| seen.manager.state.label() == "degraded");
        drop(broken);
        let mut next = 2000;
        wait_for("it comes back", || {
            // One page more on SSD, where there is a tier, and all of them read.
            rig.each_on_ssd(&mut client, &roots(next..next + 1));
            next += 1;
            let _tried = restored(&mut client, &roots(2000..next));
            rig.health() == "healthy"
        });
        let fresh = roots(5000..5016);
        rig.each_on_ssd(&mut client, &fresh);
        assert_eq!(restored(&mut client, &fresh), [true; 16]);
    });
}

/// Goal: an engine that waits for a slow disk holds nobody up who hits DRAM (PERF-05). Method: all
/// reads of a thousand cold pages hang; another engine's operations end before them.
fn perf_05_slow_reads_of_one_engine_wait_for_nobody_elses_dram_hits(engine: &str) {
    const SMALL: u64 = 16 * KIB;
    in_private_mounts(|| {
        let rig = Rig::patient(engine);
        let socket = rig.manager().socket();
        let mut cold = Engine::attach(&socket, namespace("cold", SMALL), 250);
        let mut warm = Engine::attach(&socket, namespace("warm", SMALL), 64);
        let pages = hashes(1, 0..1000);
        rig.on_ssd(&mut cold, &pages);
        let hits = hashes(2, 0..64);
        warm.save_all(&hits);
        let rounds = |warm: &mut Engine| -> Vec<Duration> {
            let round = |_| {
                let start = Instant::now();
                assert_eq!(warm.restore_all(&hits), 64);
                start.elapsed()
            };
            (0..100).map(round).collect()
        };
        let mut alone = rounds(&mut warm);
        let slow = hang(&rig.disk, On::Reads);
        let scope = cold.scope;
        let deadline = Deadline::after(2 * PATIENCE);
        let query = cold.client.query(&scope, &pages, QueryMode::Demand, deadline).unwrap();
        cold.client.submit().unwrap();
        rig.disk.settle("reads hang", |served| served.waiting > 0);
        let mut beside = rounds(&mut warm);
        // Saves as well.
        warm.save_all(&hashes(3, 0..64));
        assert_eq!(cold.client.poll().unwrap(), None, "the disk has not answered");
        let ratio =
            percentile(&mut beside, 99).as_secs_f64() / percentile(&mut alone, 99).as_secs_f64();
        println!("{engine}: p99 of DRAM hits beside slow reads is {ratio:.2} of alone");
        drop(slow);
        let found = cold.end(query).ok();
        assert_eq!((found.pages, found.pages_ssd), (1000, 1000));
        let _released = cold.release(found.leased()).ok();
        assert_eq!(cold.restore_all(&pages), 1000);
    });
}

/// Goal: pages that many ask for at once are read once; one who gives up takes nothing from the
/// others (PERF-11).
fn perf_11_one_cold_prefix_for_eight_engines_is_read_once(engine: &str) {
    const PAGES: u32 = 256;
    in_private_mounts(|| {
        let mut rig = Rig::empty(Requests::Parallel);
        // Eight leases of the same pages count eight times.
        let budgets = ["--query-budget", "280MiB", "--session-budget", "280MiB"];
        let setup = rig.sized(engine, "288MiB").flags(&budgets);
        rig.manager = Some(setup.flag("--lease-ttl", "10m").start());
        let mut engines: Vec<_> = (0..8).map(|_| rig.attach("one", PAGES / 8)).collect();
        let pages = hashes(1, 0..PAGES);
        rig.on_ssd(&mut engines[0], &pages[..]);
        let (read, served) = (rig.get(Metric::SsdReadBytes), rig.disk.served());
        let slow = hang(&rig.disk, On::Reads);
        let mut queries = Vec::new();
        for engine in &mut engines {
            let scope = engine.scope;
            let deadline = Deadline::after(2 * PATIENCE);
            let prepare = engine.client.query(&scope, &pages, QueryMode::Demand, deadline);
            queries.push(prepare.unwrap());
            engine.client.submit().unwrap();
        }
        rig.disk.settle("reads hang", |served| served.waiting >= 8);
        rig.manager().settle("all ask", |seen| seen.operations.len() == 8);
        let cancel = engines[3].client.cancel(queries[3]).unwrap();
        engines[3].client.submit().unwrap();
        drop(slow);
        let gave_up = engines[3].end(queries[3]);
        let _cancelled = engines[3].end(cancel);
        if let Some(lease) = gave_up.lease {
            let _released = engines[3].release(lease).ok();
        }
        for (at, (engine, query)) in engines.iter_mut().zip(&queries).enumerate() {
            if at == 3 {
                continue;
            }
            let found = engine.end(*query).ok();
            assert_eq!(found.pages, PAGES, "{found:?}");
            let lease = found.leased();
            let some = pages.len() as u32 - engine.region.pages();
            let blocks = blocks(&pages[some as usize..], 0);
            let restored = engine.restore(&lease, some, &blocks).ok();
            assert_eq!(restored.pages_dram, engine.region.pages());
            engine.check(&blocks);
            let _released = engine.release(lease).ok();
        }
        let bytes = u64::from(PAGES) * PAGE;
        assert_eq!(rig.get(Metric::SsdReadBytes) - read, bytes);
        assert_eq!(rig.disk.served().read_bytes - served.read_bytes, bytes);
        rig.manager().settle_empty();
    });
}

/// Goal: a disk without room refuses the start with both numbers and is left as it was; one that
/// cannot reserve and fills up later costs writes, which are counted, and the tier comes back when
/// there is room; nobody gets a page that is not whole (RES-05).
fn res_05_space_that_runs_out_at_set_up_or_later(engine: &str) {
    in_private_mounts(|| {
        let mut rig = Rig::empty(Requests::Parallel);
        for reserves in [true, false] {
            if !reserves {
                rig.disk.refuse_fallocate();
            }
            rig.disk.set_space(64 * MIB);
            let parts = [&*(128 * MIB).to_string(), &*(64 * MIB).to_string(), "--ssd-capacity"];
            rig.setup(engine).refused().says(3, &parts);
            assert_eq!(fs::read_dir(rig.disk.path()).unwrap().count(), 0, "left behind");
        }
        rig.disk.set_space(256 * MIB);
        rig.manager = Some(rig.setup(engine).start());
        assert!(!rig.manager().fresh().ssd[0].preallocated);
        let mut client = rig.attach("space", 16);
        let early = roots(0..16);
        save_each(&mut client, &early);
        rig.manager().evict();
        rig.disk.set_space(4 * KIB);
        let mut next = 100;
        let mut save = |client: &mut Engine| {
            let _saved = client.save(&blocks(&roots(next..next + 1), 0)).ok();
            next += 1;
        };
        wait_for("it shows", || {
            save(&mut client);
            let seen = rig.manager().inspect();
            let stops = seen.counters.get(Metric::SsdStops(SsdStop::NoSpace));
            let state = seen.manager.state.label();
            (state, seen.ssd[0].health, stops) == ("degraded", "read_only", 1)
        });
        assert!(write_errors(&rig) >= 1);
        assert_eq!(rig.get(Metric::SsdStops(SsdStop::NoSpace)), 1);
        assert_eq!(rig.get(Metric::SsdRetiredSlots), 0, "nothing is wrong with the place");
        assert_eq!(restored(&mut client, &early), [true; 16], "it still reads");
        rig.disk.set_space(256 * MIB);
        wait_for("it comes back", || {
            save(&mut client);
            rig.health() == "healthy"
        });
        let late = roots(5000..5016);
        save_each(&mut client, &late);
        rig.manager().evict();
        assert_eq!(restored(&mut client, &late), [true; 16]);
        assert_eq!(read_errors(&rig), 0);
        let mut found = 0;
        for page in 100..next {
            found += usize::from(engine_has(&mut client, &roots(page..page + 1)[0]));
        }
        println!("{engine}: {found} of {} pages saved on the full disk are there", next - 100);
    });
}

/// Goal: a wrong bit in an image is a miss that is counted, one in a footer is a page that the next
/// start does not find, and neither is ever served (flipped bits).
fn bits_that_rot_are_never_served(engine: &str) {
    in_private_mounts(|| {
        let mut rig = Rig::new(engine);
        let mut client = rig.attach("rot", 8);
        let pages = roots(0..12);
        rig.each_on_ssd(&mut client, &pages);
        let places = rig.places(&client.spec, &pages);
        // First, middle and last bit of an image, and one in a footer.
        for (page, at) in [(0, 0), (1, PAGE / 2), (2, PAGE - 1), (3, PAGE + 100)] {
            rig.disk.rot("tier", places[page] + at);
        }
        // One that is wrong only on the way.
        let on_the_way = Fault::new(On::Reads, Effect::Flip).within(places[4]..places[4] + PAGE);
        let on_the_way = rig.disk.inject(on_the_way);
        let mut there = [true; 12];
        for page in [0, 1, 2, 4] {
            there[page] = false;
        }
        assert_eq!(restored(&mut client, &pages), there);
        drop(on_the_way);
        let manager = rig.manager();
        manager.counted(Metric::SsdReadErrors(SsdFault::Checksum), 4);
        manager.counted(Metric::SsdReadPages, 8);
        assert_eq!(rig.health(), "healthy", "wrong bits are not the device's failure");
        assert_eq!(restored(&mut client, &pages), there, "a miss stays one");
        manager.counted(Metric::SsdReadErrors(SsdFault::Checksum), 4);
        drop(client);
        rig.restart();
        // Without the one with the wrong footer; images are not looked at before they are read.
        let recovered = rig.get(Metric::SsdRecoveredPages);
        assert!((8..=11).contains(&recovered), "{recovered} pages");
        let mut client = rig.attach("rot", 8);
        let mut after = there;
        (after[3], after[4]) = (false, true);
        let found = restored(&mut client, &pages);
        // The page that was wrong on the way only may have been given up for good.
        after[4] = found[4];
        assert_eq!(found, after);
        // All can be saved anew.
        rig.each_on_ssd(&mut client, &pages);
        assert_eq!(restored(&mut client, &pages), [true; 12]);
    });
}

/// Goal: who removes the file of a running Manager takes nothing from it; the next start makes a new
/// one. A file that was cut meanwhile grows again, and what is still whole in it is served.
fn a_file_that_vanishes_costs_only_what_was_in_it(engine: &str) {
    in_private_mounts(|| {
        let mut rig = Rig::new(engine);
        let mut client = rig.attach("gone", 8);
        let pages = roots(0..8);
        rig.each_on_ssd(&mut client, &pages);
        let place = rig.places(&client.spec, &pages[4..5])[0];
        drop(client);
        let setup = rig.manager.take().unwrap().stop();
        let path = rig.disk.path().join("tier");
        File::options().write(true).open(&path).unwrap().set_len(place + 4096).unwrap();
        rig.manager = Some(setup.start());
        assert_eq!(path.metadata().unwrap().len(), 128 * MIB);
        let mut client = rig.attach("gone", 8);
        let found = restored(&mut client, &pages);
        let count = found.iter().filter(|has| **has).count() as u64;
        assert!(!found[4] && (1..8).contains(&count), "{found:?}");
        assert_eq!(rig.get(Metric::SsdRecoveredPages), count);
        assert_eq!(read_errors(&rig), 0);

        fs::remove_file(&path).unwrap();
        rig.manager().evict();
        assert_eq!(restored(&mut client, &pages), found);
        let more = roots(100..116);
        save_each(&mut client, &more);
        rig.manager().evict();
        assert_eq!(restored(&mut client, &more), [true; 16]);
        assert_eq!(read_errors(&rig) + write_errors(&rig), 0);
        drop(client);
        rig.restart();
        assert_eq!(rig.get(Metric::SsdRecoveredPages), 0);
        let mut client = rig.attach("gone", 8);
        assert_eq!(restored(&mut client, &more), [false; 16]);
        rig.each_on_ssd(&mut client, &pages);
        assert_eq!(restored(&mut client, &pages), [true; 8]);
    });
}

/// Goal: a device that does not answer costs those who ask for its pages an answer in time, and
/// nobody else anything; it shows, and it is over when the device answers again.
fn a_device_that_hangs_holds_up_only_its_own_pages(engine: &str) {
    in_private_mounts(|| {
        let rig = Rig::new(engine);
        let mut client = rig.attach("hangs", 16);
        let pages = roots(0..16);
        rig.each_on_ssd(&mut client, &pages);
        let warm = hashes(1000, 0..16);
        client.save_all(&warm);
        rig.manager().settle_empty();
        let stuck = hang(&rig.disk, On::Both);
        let ask = |root: &PageHash| {
            let scope = client.scope;
            let root = std::slice::from_ref(root);
            let deadline = Deadline::after(Duration::from_secs(1));
            client.client.query(&scope, root, QueryMode::Demand, deadline).unwrap()
        };
        let asked: Vec<_> = pages.iter().map(ask).collect();
        client.client.submit().unwrap();
        for query in asked {
            let ended = client.end(query);
            assert_eq!((ended.pages, ended.lease), (0, None), "the device has not answered");
            assert!([Code::Deadline, Code::IoError].contains(&ended.code), "{ended:?}");
        }
        assert!(rig.disk.served().waiting > 0);
        assert_eq!(client.restore_all(&warm), 16);
        let seen = rig.manager().fresh();
        assert!(seen.ssd[0].reading > 0, "{:?}", seen.ssd);
        for sequence in 2000..2008 {
            client.save_all(&hashes(sequence, 0..16));
            assert_eq!(client.restore_all(&hashes(sequence, 0..16)), 16);
        }
        let seen = rig.manager().settle("it shows", |seen| {
            let stops = Metric::SsdStops(SsdStop::Hung);
            seen.ssd[0].health == "off" && seen.counters.get(stops) > 0
        });
        assert_eq!(seen.manager.state.label(), "degraded");
        // Refused at once now.
        assert!(!engine_has(&mut client, &pages[0]));
        assert_eq!(client.restore_all(&warm), 16);
        drop(stuck);
        wait_for("it comes back", || {
            // Nothing was lost.
            let there = restored(&mut client, &pages) == [true; 16];
            let seen = rig.manager().inspect();
            there && (seen.manager.state.label(), seen.ssd[0].health) == ("ready", "healthy")
        });
        rig.manager().settle_empty();
        rig.manager().evict();
        assert_eq!(client.restore_all(&hashes(2000, 0..16)), 16);
        assert_eq!(rig.get(Metric::PoolDrainingBytes), 0);
    });
}

/// Goal: who waits for a device that hangs is answered when that is known, whatever his deadline; from
/// then on its pages are missing at once, until it answers. Method: more queries than one device may
/// read for, with deadlines longer than the test; what a save brings meanwhile is there.
fn pages_of_a_device_that_hangs_are_missing_until_it_answers(engine: &str) {
    in_private_mounts(|| {
        let rig = Rig::new(engine);
        let mut client = rig.attach("silent", 16);
        let pages = roots(0..200);
        rig.each_on_ssd(&mut client, &pages);
        let stuck = hang(&rig.disk, On::Reads);
        let scope = client.scope;
        let ask = |client: &mut Engine, root: &PageHash| {
            let root = std::slice::from_ref(root);
            let deadline = Deadline::after(10 * PATIENCE);
            client.client.query(&scope, root, QueryMode::Demand, deadline).unwrap()
        };
        let asked: Vec<_> = pages.iter().map(|root| ask(&mut client, root)).collect();
        client.client.submit().unwrap();
        for query in asked {
            let ended = client.end(query);
            assert_eq!((ended.code, ended.pages), (Code::IoError, 0), "{ended:?}");
        }
        // What the I/O engine has stays with it; all others were not done.
        let in_engine = 64;
        rig.manager().counted(Metric::SsdReadErrors(SsdFault::Off), 200 - in_engine);
        assert_eq!(restored(&mut client, &pages), [false; 200]);
        rig.manager().counted(Metric::LookupMissedPages(Reason::IoError), 200);
        rig.manager().counted(Metric::SsdReadErrors(SsdFault::Off), 200 - in_engine);
        let seen = rig.manager().fresh();
        assert_eq!((seen.ssd[0].health, seen.ssd[0].reading), ("off", in_engine));
        assert_eq!(seen.counters.get(Metric::PoolUsedBytes), in_engine * PAGE, "{:?}", seen.ssd);
        // A save brings them all the same, those that are being read too.
        save_each(&mut client, &pages);
        assert_eq!(restored(&mut client, &pages), [true; 200]);
        let filled = in_engine * PAGE;
        assert_eq!(rig.get(Metric::PoolDrainingBytes), filled, "what those reads still fill");
        drop(stuck);
        wait_for("it comes back", || rig.health() == "healthy");
        rig.manager().settle_empty();
        rig.manager().evict();
        assert_eq!(rig.get(Metric::PoolResidentPages), 0);
        wait_for("nothing was lost", || restored(&mut client, &pages) == [true; 200]);
        rig.manager().settle_empty();
        assert_eq!(rig.get(Metric::PoolDrainingBytes), 0);
    });
}

/// Goal: of two files that share the tier, one that does not answer takes nothing from the other: that
/// serves hits and takes writes, more of each than may be in flight. Method: all requests of
/// one disk hang; those who ask for its pages are answered in time.
fn a_file_that_hangs_holds_up_nothing_of_another(engine: &str) {
    in_private_mounts(|| {
        // Dropped after the Manager.
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let other = FaultyDisk::mount(&folder.path().join("disk"), Requests::Parallel);
        let mut rig = Rig::empty(Requests::Parallel);
        let setup = rig.setup(engine).flag("--ssd", other.path().join("tier").to_str().unwrap());
        rig.manager = Some(setup.flag("--operation-timeout", "1s").start());
        let mut client = rig.attach("two", 16);
        let pages = roots(0..480);
        for half in pages.chunks(240) {
            rig.each_on_ssd(&mut client, half);
        }
        let lies_on = |disk: &FaultyDisk| -> Vec<PageHash> {
            let bytes = disk.stored("tier");
            let blocks: HashSet<&[u8]> = bytes.chunks_exact(4096).collect();
            let holds = |page: &&PageHash| blocks.contains(&image(&client.spec, page)[..4096]);
            pages.iter().filter(holds).copied().collect()
        };
        let (stuck, served) = (lies_on(&rig.disk), lies_on(&other));
        assert_eq!(stuck.len() + served.len(), pages.len());
        assert!(stuck.len() >= 140 && served.len() >= 100, "{} {}", stuck.len(), served.len());
        let hung = hang(&rig.disk, On::Both);
        // More than the 128 reads that one device may have in flight.
        let scope = client.scope;
        let ask = |client: &mut Engine, root: &PageHash| {
            let root = std::slice::from_ref(root);
            client.client.query(&scope, root, QueryMode::Demand, Deadline::DEFAULT).unwrap()
        };
        let asked: Vec<_> = stuck[..140].iter().map(|root| ask(&mut client, root)).collect();
        client.client.submit().unwrap();
        rig.disk.settle("it hangs", |seen| seen.waiting > 0);
        let before = rig.get(Metric::SsdReadPages);
        let mut engine = rig.attach("two", 16);
        assert!(restored(&mut engine, &served[..100]).iter().all(|there| *there));
        assert_eq!(rig.get(Metric::SsdReadPages) - before, 100);
        for query in asked {
            let ended = client.end(query);
            assert_eq!((ended.pages, ended.lease), (0, None), "the device has not answered");
        }
        // Half of them would have gone to the other file.
        let written = rig.get(Metric::SsdWrittenPages);
        save_each(&mut engine, &roots(1000..1200));
        wait_for("the other file takes them", || rig.get(Metric::SsdWrittenPages) - written >= 100);
        drop(hung);
        wait_for("it comes back", || {
            // Nothing was lost.
            let there = restored(&mut engine, &stuck).iter().all(|there| *there);
            let seen = rig.manager().inspect();
            there && seen.ssd.iter().all(|device| device.health == "healthy")
        });
        rig.manager().settle_empty();
    });
}

/// Goal: what no device takes has an outcome too: a replay on a disk that takes no writes ends well,
/// with every page that it offered accounted for. Method: a device that is read-only before the
/// replay, so that what it saves waits.
#[test]
fn a_replay_on_a_disk_that_takes_no_writes_accounts_for_every_page() {
    in_private_mounts(|| {
        let rig = Rig::new("uring");
        let _broken = fail(&rig.disk, On::Writes);
        let mut engine = rig.attach("before", 64);
        save_each(&mut engine, &roots(0..64));
        rig.manager().settle("read-only", |seen| seen.ssd[0].health == "read_only");
        drop(engine);
        let folder = tempfile::tempdir().unwrap();
        let (trace, json) = (folder.path().join("trace.jsonl"), folder.path().join("report.json"));
        let head = r#"{"format":"kvtrace-1","name":"wait","block_tokens":16,"partial_tail":false}"#;
        let line = |session: u64| format!("\n[0,{session},64,1,[{},4]]", session * 1000);
        fs::write(&trace, head.to_owned() + &(1..=16).map(line).collect::<String>()).unwrap();
        let socket = rig.manager().socket();
        let [trace, report, socket] = [&trace, &json, &socket].map(|path| path.to_str().unwrap());
        let output = rig.manager().setup().orbitkv(&[
            "replay",
            "--trace",
            trace,
            "--socket",
            socket,
            "--json",
            report,
            "--engines",
            "1",
        ]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        let report: serde_json::Value = serde_json::from_slice(&fs::read(&json).unwrap()).unwrap();
        let spill = report["spill"].as_object().unwrap();
        let sum: u64 = spill.values().map(|pages| pages.as_u64().unwrap()).sum();
        assert_eq!(Some(sum), report["spill_offered"].as_u64(), "{report}");
        assert_eq!(report["spill"]["written"], 0, "{report}");
        let waiting = report["spill_unwritable"].as_u64().unwrap();
        assert!(waiting > 0, "{report}");
        assert!(report["spill"]["failed"].as_u64().unwrap() >= waiting, "{report}");
        assert_eq!(report["pages_saved"], 64, "{report}");
    });
}
