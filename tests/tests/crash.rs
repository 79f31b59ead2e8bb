//! Goal: SIGKILL at any moment, also in the middle of writes, costs nothing that was known to be on
//! SSD: every page of which the Manager had said so is hit after the restart, every byte of it
//! right, and nothing else is served in its place.
//!
//! Method. A real Manager with an SSD file of its own, killed over and over. In each life, once all
//! that is on SSD was found again, every recorded page is asked for and compared. Then some chains
//! are saved, and recorded when the counters say that all of them are written: nothing waits, none
//! was given up. Then an engine process saves, the tier writes and takes slots of older pages, and
//! at a random moment the Manager is killed. Every fourth time it is killed right after its start.
//! How many of these kills met a write or the search is printed: it is up to the machine. That
//! both happen is certain in the test on a disk that does not answer.
//!
//! What may be gone: nothing. The tier gives slots up from the cold end, one for each page that it
//! writes; a recorded page was restored or written since the start, so it is hotter than what is
//! older, and the load of a life ends before it has written as many pages as there are slots beside
//! the recorded ones. No recorded key is saved again, so none is superseded.
//!
//! Twenty kills by default, the same ones every time. More with `ORBITKV_CRASH_KILLS`, others with
//! `ORBITKV_CRASH_SEED`:
//!
//! ```text
//! ORBITKV_CRASH_KILLS=200 ORBITKV_CRASH_SEED=$RANDOM cargo test -p orbitkv-tests --test crash -- --nocapture
//! ```

use std::collections::VecDeque;
use std::str::FromStr;
use std::time::Duration;

use fastrand::Rng;
use orbitkv_engine::{PageHash, QueryMode, engine_id_random};
use orbitkv_shm_protocol::inspect::{self, Snapshot};
use orbitkv_shm_protocol::telemetry::{Metric, SpillOutcome};
use orbitkv_tests::confine::in_private_mounts;
use orbitkv_tests::engine::{Engine, Way, blocks, hashes};
use orbitkv_tests::engine_process::{EngineProcess, Identity};
use orbitkv_tests::faulty::{Effect, Fault, FaultyDisk, On, Requests};
use orbitkv_tests::manager::{Manager, Setup};
use orbitkv_tests::setup;
use rustix::process::Signal;

const KIB: u64 = 1024;
const MIB: u64 = 1024 * KIB;
/// Kills of a run, both sizes together.
const KILLS: u32 = 20;
const SEED: u64 = 4;
/// Lives of which the records are kept.
const LIVES_KEPT: usize = 6;
/// Pages of a recorded chain.
const CHAIN: u32 = 4;
/// Pages that the load saves at once.
const AT_ONCE: u64 = 8;
/// A machine that does something else for a while is no failure.
const PATIENT: [&str; 4] = ["--operation-timeout", "60s", "--lease-ttl", "120s"];

/// Pages of one size, and a tier for them.
struct Case {
    name: &'static str,
    page_bytes: u64,
    ssd: &'static str,
    /// Chains that a life records.
    chains: u64,
    /// Pages that are written before a kill at most.
    load: u64,
    /// Pages that are written beside the kill at most.
    load_more: u64,
    way: Way,
}

/// Small pages go with their footer in one write, large ones in several with the footer apart.
const SMALL: Case = Case {
    name: "small",
    page_bytes: 64 * KIB,
    ssd: "64MiB",
    chains: 8,
    load: 400,
    load_more: 64,
    way: Way::Process,
};
const LARGE: Case = Case {
    name: "large",
    page_bytes: 2 * MIB,
    ssd: "160MiB",
    chains: 1,
    load: 12,
    load_more: 8,
    way: Way::Sealed,
};

#[derive(Default, Debug)]
struct Sums {
    kills: u32,
    /// Kills while pages were being written.
    in_writes: u32,
    /// Kills right after the start.
    early: u32,
    /// Those while the file was searched.
    in_census: u32,
    recorded: u64,
    hits: u64,
    /// Pages with a wrong byte.
    mismatches: u64,
    evicted: u64,
    /// Pages of the loads before that were found and compared too.
    load_hits: u64,
}

fn from_environment<T: FromStr>(name: &str) -> Option<T> {
    let value = std::env::var(name).ok()?;
    let parsed = value.parse().ok();
    Some(parsed.unwrap_or_else(|| panic!("{name}={value:?} is no number")))
}

#[test]
fn small_pages_survive_every_kill() {
    run(&SMALL);
}

#[test]
fn large_pages_survive_every_kill() {
    run(&LARGE);
}

fn run(case: &Case) {
    let kills = from_environment("ORBITKV_CRASH_KILLS").unwrap_or(KILLS) / 2;
    let seed = from_environment("ORBITKV_CRASH_SEED").unwrap_or(SEED);
    eprintln!("{} pages: ORBITKV_CRASH_KILLS={} ORBITKV_CRASH_SEED={seed}", case.name, 2 * kills);
    let mut life = Life::new(case, seed);
    for _ in 0..kills {
        life.once();
    }
    // What the last kill left.
    drop(life.check());
    let sums = &life.sums;
    eprintln!(
        "{} pages: {} kills ({} in writes, {} of {} early ones in the search), {} recorded pages \
         asked for, {} hit ({:.2} %), {} mismatches; {} older pages were evicted; {} pages of the \
         load compared too; seed {seed}",
        case.name,
        sums.kills,
        sums.in_writes,
        sums.in_census,
        sums.early,
        sums.recorded,
        sums.hits,
        100.0 * sums.hits as f64 / sums.recorded.max(1) as f64,
        sums.mismatches,
        sums.evicted,
        sums.load_hits,
    );
    assert_eq!(sums.kills, kills);
    assert!(sums.evicted > 0 || kills < KILLS / 2, "no slot was taken again: {sums:?}");
}

/// The lives of the Managers of one file.
struct Life<'a> {
    case: &'a Case,
    rng: Rng,
    setup: Option<Setup>,
    identity: Identity,
    load: Identity,
    /// First numbers of the chains that earlier lives recorded, and of what was saved beside them.
    records: VecDeque<u64>,
    next: u64,
    sums: Sums,
}

impl<'a> Life<'a> {
    fn new(case: &'a Case, seed: u64) -> Self {
        let who = |model: &str| {
            let id = engine_id_random().unwrap();
            let name = format!("{model}-{}", case.name);
            Identity { way: case.way, ..Identity::new(id, &name, case.page_bytes, 8) }
        };
        Self {
            case,
            rng: Rng::with_seed(seed ^ case.page_bytes),
            setup: Some(setup!().dram("48MiB").ssd(case.ssd).flags(&PATIENT)),
            identity: who("recorded"),
            load: who("load"),
            records: VecDeque::new(),
            next: 0,
            sums: Sums::default(),
        }
    }

    /// One life, from the start to the kill.
    fn once(&mut self) {
        if self.sums.kills % 4 == 3 {
            return self.kill_early();
        }
        let manager = self.check();
        let first = self.next;
        self.next += 1_000_000;
        let before = self.record(&manager, first);
        let (dead, last) = self.kill_under_load(manager, first + 1000);
        let after = inspect::read(&dead.socket()).unwrap();
        self.sums.kills += 1;
        self.sums.in_writes += u32::from(after.ssd[0].writing > 0);
        let evicted = |seen: &Snapshot| seen.counters.get(Metric::SsdEvictedPages);
        self.sums.evicted += evicted(&last) - evicted(&before);
        let counts = dead.verify();
        let number = |name: &str| counts[name].as_u64().unwrap();
        let parts = ["valid", "torn", "stale", "empty"].map(number);
        assert_eq!(parts.iter().sum::<u64>(), number("slots"), "{counts}");
        // What the method relies on: the load found other slots.
        let taken = self.recorded() + self.case.load + self.case.load_more + AT_ONCE;
        assert!(evicted(&last) == 0 || taken <= number("slots"), "{taken} of {counts}");
        self.setup = Some(dead);
    }

    fn recorded(&self) -> u64 {
        self.records.len() as u64 * self.case.chains * u64::from(CHAIN)
    }

    /// Starts on what the last life left and asks for all that was recorded.
    fn check(&mut self) -> Manager {
        let manager = self.setup.take().unwrap().start();
        let found = manager.fresh().counters.get(Metric::SsdRecoveredPages);
        // First, so that what was recorded is the hottest.
        let mut reader = Engine::attach(&manager.socket(), self.load.spec(), AT_ONCE as u32);
        let mut mismatches = 0;
        if let Some(&first) = self.records.back() {
            for sequence in first + 1000..first + 1400 {
                let (right, wrong) = compared(&mut reader, &hashes(sequence, 0..AT_ONCE as u32));
                self.sums.load_hits += right;
                mismatches += wrong;
            }
        }
        let mut engine = Engine::attach(&manager.socket(), self.identity.spec(), 8);
        let mut hits = 0;
        for first in self.records.iter().copied() {
            for chain in first..first + self.case.chains {
                let (right, wrong) = compared(&mut engine, &hashes(chain, 0..CHAIN));
                hits += right;
                mismatches += wrong;
            }
        }
        self.sums.recorded += self.recorded();
        self.sums.hits += hits;
        self.sums.mismatches += mismatches;
        assert!(hits <= found, "{hits} hits of {found} pages");
        let what = format!("hits, mismatches in life {}: {:?}", self.sums.kills, self.sums);
        assert_eq!((hits, mismatches), (self.recorded(), 0), "{what}");
        manager
    }

    /// Saves chains and records them once they are written.
    fn record(&mut self, manager: &Manager, first: u64) -> Snapshot {
        let mut engine = Engine::attach(&manager.socket(), self.identity.spec(), 8);
        let given_up = |seen: &Snapshot| {
            [SpillOutcome::EvictedUnwritten, SpillOutcome::Failed, SpillOutcome::Superseded]
                .map(|outcome| seen.counters.get(Metric::SpillPages(outcome)))
        };
        let before = manager.settle_empty();
        for chain in first..first + self.case.chains {
            engine.save_all(&hashes(chain, 0..CHAIN));
        }
        let after = manager.settle_empty();
        assert_eq!(given_up(&before), given_up(&after), "with nothing else to do all is written");
        let of = |seen: &Snapshot| seen.counters.get(Metric::SsdWrittenPages);
        assert_eq!(of(&after) - of(&before), self.case.chains * u64::from(CHAIN));
        self.records.push_back(first);
        if self.records.len() > LIVES_KEPT {
            self.records.pop_front();
        }
        after
    }

    /// An engine saves; after some writes and a moment more the Manager is killed. Also returns
    /// what was seen before.
    fn kill_under_load(&mut self, manager: Manager, first: u64) -> (Setup, Snapshot) {
        // Pages that are written, or never will be.
        let of = |seen: &Snapshot| {
            [SpillOutcome::EvictedUnwritten, SpillOutcome::Failed]
                .map(|outcome| seen.counters.get(Metric::SpillPages(outcome)))
                .iter()
                .sum::<u64>()
                + seen.counters.get(Metric::SsdWrittenPages)
        };
        let before = of(&manager.inspect());
        let mut load = EngineProcess::start(manager.setup(), &self.load);
        let pages = self.rng.u64(self.case.load / 2..=self.case.load);
        load.order(&format!("save-on {first} {AT_ONCE} {}", pages + self.case.load_more));
        let seen = manager.settle("the load is written", |seen| of(seen) - before >= pages);
        std::thread::sleep(Duration::from_micros(self.rng.u64(..20_000)));
        (manager.kill(), seen)
    }

    /// Kills a Manager that has just begun to search its file.
    fn kill_early(&mut self) {
        let manager = self.setup.take().unwrap().start_early();
        std::thread::sleep(Duration::from_micros(self.rng.u64(..5_000)));
        let seen = manager.inspect();
        self.sums.in_census += u32::from(seen.ssd[0].is_recovering());
        self.setup = Some(manager.kill());
        self.sums.kills += 1;
        self.sums.early += 1;
    }
}

/// Restores what is there of a chain: pages whose every byte is right, and others.
fn compared(engine: &mut Engine, chain: &[PageHash]) -> (u64, u64) {
    let hit = engine.query(chain, QueryMode::Demand);
    let Some(lease) = hit.lease else { return (0, 0) };
    let blocks = blocks(&chain[..hit.pages as usize], 0);
    let restored = engine.restore(&lease, 0, &blocks).ok();
    assert_eq!(restored.pages, hit.pages);
    let right = blocks.iter().filter(|block| engine.holds(block)).count() as u64;
    (right, u64::from(hit.pages) - right)
}

/// Goal: the same for kills that certainly fall into the search and into writes. Method: a disk
/// that does not answer; it does when the signal is on its way, so that the process can end.
#[test]
fn a_kill_in_the_search_or_in_writes_costs_nothing_that_was_recorded() {
    const PAGE: u64 = 64 * KIB;
    const ALL: std::ops::Range<u64> = 0..u64::MAX;
    /// Behind the superblock and its tables, the first slots perhaps not included.
    const SLOTS: std::ops::Range<u64> = 3 * MIB..u64::MAX;
    /// Somewhere in the middle of what is searched.
    const LATER_SLOTS: std::ops::Range<u64> = 40 * MIB..u64::MAX;
    for io in ["uring", "blocking"] {
        in_private_mounts(|| {
            let disk = FaultyDisk::below(env!("CARGO_TARGET_TMPDIR"), Requests::Parallel);
            let setup = setup!().flag("--ssd-engine", io).flags(&PATIENT);
            let mut setup = setup.ssd_on(&disk, "128MiB");
            let attach = |manager: &Manager| manager.attach("recorded", PAGE, 8);
            let mut recorded = 0;
            for (on, place) in
                [(On::Writes, ALL), (On::Reads, SLOTS), (On::Reads, LATER_SLOTS), (On::Writes, ALL)]
            {
                let manager = setup.start();
                let mut engine = attach(&manager);
                for sequence in 0..recorded {
                    let found = compared(&mut engine, &hashes(sequence, 0..8));
                    assert_eq!(found, (8, 0), "{sequence} after {recorded} kills");
                }
                engine.save_all(&hashes(recorded, 0..8));
                manager.settle_empty();
                recorded += 1;
                let is_read = on == On::Reads;
                let (manager, hang) = if is_read {
                    drop(engine);
                    let setup = manager.kill();
                    let hang = disk.inject(Fault::new(on, Effect::Hang).within(place));
                    (setup.start_early(), hang)
                } else {
                    (manager, disk.inject(Fault::new(on, Effect::Hang).within(place)))
                };
                let mut engine = attach(&manager);
                engine.save_all(&hashes(1000 + recorded, 0..8));
                disk.settle("a request hangs", |served| served.waiting > 0);
                let seen = manager.settle("the kill has its moment", |seen| {
                    let ssd = &seen.ssd[0];
                    if is_read { ssd.is_recovering() } else { ssd.writing > 0 }
                });
                assert_eq!(seen.ssd[0].is_recovering(), is_read);
                rustix::process::kill_process(manager.pid(), Signal::KILL).unwrap();
                drop((engine, hang));
                setup = manager.kill();
            }
            // What was being written is right or missing.
            let manager = setup.start();
            let mut engine = attach(&manager);
            for sequence in (0..recorded).chain(1000..1000 + 2 * recorded) {
                let (right, wrong) = compared(&mut engine, &hashes(sequence, 0..8));
                assert_eq!(wrong, 0, "{sequence}");
                assert!(right == 8 || sequence >= 1000, "{sequence}: {right} of 8");
            }
        });
    }
}
