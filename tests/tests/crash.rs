//! Goal: SIGKILL at any moment, also in the middle of writes, costs nothing that was known to be on
//! SSD: every page of which the Manager had said so is hit after the restart, every byte of it
//! right, and nothing else is served in its place.
//!
//! Method. A real Manager with an SSD file of its own, killed over and over. In each life, once all
//! that is on SSD was found again, every recorded page is asked for and compared. Then some chains
//! are saved, and recorded when the counters say that all of them are written: nothing waits, none
//! was given up. Then engine processes save without end, the tier writes and takes slots of older
//! pages, and at a random moment the Manager is killed. At times it is killed while it still
//! searches the file.
//!
//! What is subtracted. The tier gives slots up from the cold end. A page that was recorded is
//! hotter than everything older, so the first evictions take pages of earlier loads, which are
//! counted at the moment of the record; only evictions beyond those can have taken a recorded page.
//! The dead Manager's own counter says how many there were, and the writes that its last look at
//! the counter may have missed are added. No recorded key is saved again, so none is superseded.
//!
//! Twenty kills by default. More with `ORBITKV_CRASH_KILLS`, the same again with
//! `ORBITKV_CRASH_SEED`:
//!
//! ```text
//! ORBITKV_CRASH_KILLS=200 cargo test -p orbitkv-tests --test crash -- --nocapture
//! ```

use std::collections::VecDeque;
use std::str::FromStr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fastrand::Rng;
use orbitkv_engine::engine_id_random;
use orbitkv_shm_protocol::inspect::{self, Snapshot};
use orbitkv_shm_protocol::telemetry::{Metric, SpillOutcome};
use orbitkv_tests::engine::{Engine, Way, hashes};
use orbitkv_tests::engine_process::{EngineProcess, Identity};
use orbitkv_tests::manager::{Manager, Setup};
use orbitkv_tests::setup;

const KIB: u64 = 1024;
const MIB: u64 = 1024 * KIB;
/// Kills of a run, both sizes together.
const KILLS: u32 = 20;
/// Lives of which the records are kept.
const LIVES_KEPT: usize = 6;
/// Pages of a recorded chain.
const CHAIN: u32 = 4;
/// A machine that does something else for a while is no failure.
const PATIENT: [&str; 4] = ["--operation-timeout", "60s", "--lease-ttl", "120s"];
/// Bytes of evictions that the last numbers of a dead Manager may have missed.
const UNSEEN_BYTES: u64 = 32 * MIB;

/// Pages of one size, and a tier for them.
struct Case {
    name: &'static str,
    page_bytes: u64,
    /// Chains that a life records.
    chains: u64,
    /// Pages that are written before a kill at most.
    load: u64,
    way: Way,
}

/// Small pages go with their footer in one write, large ones in several with the footer apart.
const SMALL: Case =
    Case { name: "small", page_bytes: 64 * KIB, chains: 8, load: 400, way: Way::Process };
const LARGE: Case =
    Case { name: "large", page_bytes: 2 * MIB, chains: 1, load: 12, way: Way::Sealed };

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
    evicted: u64,
    hits: u64,
    /// Pages of the loads before that were found and compared too.
    load_hits: u64,
}

fn from_environment<T: FromStr>(name: &str) -> Option<T> {
    let value = std::env::var(name).ok()?;
    let parsed = value.parse().ok();
    Some(parsed.unwrap_or_else(|| panic!("{name}={value:?} is no number")))
}

fn seed() -> u64 {
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64;
    from_environment("ORBITKV_CRASH_SEED").unwrap_or_else(now)
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
    let (kills, seed) = (from_environment("ORBITKV_CRASH_KILLS").unwrap_or(KILLS) / 2, seed());
    eprintln!("{} pages: ORBITKV_CRASH_KILLS={} ORBITKV_CRASH_SEED={seed}", case.name, 2 * kills);
    let mut life = Life::new(case, seed);
    for _ in 0..kills {
        life.once();
    }
    // What the last kill left.
    drop(life.check());
    let sums = &life.sums;
    let expected = sums.recorded - sums.evicted;
    eprintln!(
        "{} pages: {} kills ({} in writes, {} of {} early ones in the search), {} recorded pages asked for, {} may \
         have been evicted, {} hit ({:.2} % of the rest), 0 mismatches; {} pages of the load \
         compared too; seed {seed}",
        case.name,
        sums.kills,
        sums.in_writes,
        sums.in_census,
        sums.early,
        sums.recorded,
        sums.evicted,
        sums.hits,
        100.0 * sums.hits.min(expected) as f64 / expected.max(1) as f64,
        sums.load_hits,
    );
    assert_eq!(sums.kills, kills);
    assert!(
        sums.in_writes * 2 >= sums.kills - sums.early,
        "most kills found nothing in flight: {sums:?}"
    );
    assert!(expected * 10 >= sums.recorded * 9, "too little was left to ask for: {sums:?}");
    assert!(sums.hits * 100 >= expected * 99, "seed {seed}: {sums:?}");
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
    /// Recorded pages that may be gone.
    evicted: u64,
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
            setup: Some(setup!().dram("48MiB").ssd("160MiB").flags(&PATIENT)),
            identity: who("recorded"),
            load: who("load"),
            records: VecDeque::new(),
            next: 0,
            evicted: 0,
            sums: Sums::default(),
        }
    }

    /// One life, from the start to the kill.
    fn once(&mut self) {
        if self.rng.u8(..4) == 0 && !self.records.is_empty() {
            return self.kill_early();
        }
        let manager = self.check();
        let first = self.next;
        self.next += 1_000_000;
        let before = self.record(&manager, first);
        let dead = self.kill_under_load(manager, first + 1000);
        let after = inspect::read(&dead.socket()).unwrap();
        self.sums.kills += 1;
        let count = |seen: &Snapshot, metric| seen.counters.get(metric);
        self.sums.in_writes += u32::from(after.ssd[0].writing > 0);
        // Everything on SSD that is older than the records goes first.
        let recorded = self.recorded();
        let older = count(&before, Metric::SsdResidentPages).saturating_sub(recorded);
        let evictions = count(&after, Metric::SsdEvictedPages);
        let evictions = evictions - count(&before, Metric::SsdEvictedPages);
        let unseen = if evictions == 0 { 0 } else { UNSEEN_BYTES / self.case.page_bytes };
        self.evicted = (evictions + unseen).saturating_sub(older).min(recorded);
        let counts = dead.verify();
        let number = |name: &str| counts[name].as_u64().unwrap();
        let parts = ["valid", "torn", "stale", "empty"].map(number);
        assert_eq!(parts.iter().sum::<u64>(), number("slots"), "{counts}");
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
        let mut reader = Engine::attach(&manager.socket(), self.load.spec(), 8);
        if let Some(&first) = self.records.back() {
            for sequence in first + 1000..first + 1400 {
                let sequence = hashes(sequence, 0..8);
                self.sums.load_hits += u64::from(reader.restore_all(&sequence));
            }
        }
        let mut engine = Engine::attach(&manager.socket(), self.identity.spec(), 8);
        let mut hits = 0;
        for first in self.records.iter().copied() {
            for chain in first..first + self.case.chains {
                // Compares every byte of what it restores.
                hits += u64::from(engine.restore_all(&hashes(chain, 0..CHAIN)));
            }
        }
        self.sums.recorded += self.recorded();
        self.sums.evicted += self.evicted;
        self.sums.hits += hits;
        assert!(hits <= found, "{hits} hits of {found} pages");
        // Until a kill under the next load nothing of it goes.
        self.evicted = 0;
        if hits < self.recorded() {
            // What is gone is gone: it is not asked for again.
            self.records.clear();
        }
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

    /// Engines save without end; after some writes and a moment more the Manager is killed.
    fn kill_under_load(&mut self, manager: Manager, first: u64) -> Setup {
        let of = |seen: &Snapshot| seen.counters.get(Metric::SsdWrittenPages);
        let before = of(&manager.inspect());
        let mut load = EngineProcess::start(manager.setup(), &self.load);
        load.order(&format!("save-on {first} 8"));
        let pages = self.rng.u64(1..=self.case.load);
        manager.settle("the load is written", |seen| of(seen) - before >= pages);
        std::thread::sleep(Duration::from_micros(self.rng.u64(..20_000)));
        manager.kill()
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
