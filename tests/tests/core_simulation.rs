//! Goal: no sequence of requests, faults, deaths and crashes makes `core` lose a byte, end an
//! operation twice or never, or hand out wrong bytes. Method: seeded random runs against fakes; the
//! fault model heads `simulator.rs`. `ORBITKV_SEEDS` sets how many seeds run, `ORBITKV_SEED` runs
//! one of them with the laws checked after every event.

use orbitkv_tests::simulator::{Simulation, Summary};

const EVENTS: u32 = 3000;

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok().and_then(|text| text.parse().ok())
}

fn run(seeds: impl Iterator<Item = u64>, check_every: u32, events: u32) -> Summary {
    let mut all = Summary::default();
    let mut failed = Vec::new();
    for seed in seeds {
        let one = || Simulation::new(seed).check_every(check_every).run(events);
        let Ok(one) = std::panic::catch_unwind(one) else {
            failed.push(seed);
            continue;
        };
        all.restored += one.restored;
        all.written += one.written;
        all.read += one.read;
        all.evictions += one.evictions;
        all.expired += one.expired;
        all.recovered += one.recovered;
        all.crashes += one.crashes;
    }
    assert_eq!(failed, [0_u64; 0], "seeds that fail");
    all
}

/// Runs that do nothing would pass: everything that can happen has to have happened.
fn check_covers(all: &Summary) {
    let counts = [
        all.restored,
        all.written,
        all.read,
        all.evictions,
        all.expired,
        all.recovered,
        all.crashes,
    ];
    assert!(counts.iter().all(|&count| count > 0), "{all:?}");
    println!("{all:?}");
}

#[test]
fn random_runs_end_everything_once_with_the_right_bytes() {
    if let Some(seed) = number("ORBITKV_SEED") {
        run(seed..=seed, 1, EVENTS);
        return;
    }
    let seeds = number("ORBITKV_SEEDS").unwrap_or(220);
    // Two threads: as many as the smallest machine has.
    let half = seeds / 2;
    let (first, second) = std::thread::scope(|scope| {
        let first = scope.spawn(|| run(0..half, 16, EVENTS));
        let second = scope.spawn(|| run(half..seeds, 16, EVENTS));
        (first.join(), second.join())
    });
    for half in [first, second] {
        match half {
            Ok(all) => check_covers(&all),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }
}

#[test]
fn every_event_keeps_the_laws() {
    let all = run(10_000..10_020, 1, 1000);
    assert!(all.restored > 0 && all.written > 0);
}

#[test]
fn a_seed_stands_for_one_run() {
    for seed in 0..4 {
        let fingerprint = || Simulation::new(seed).check_every(0).run(800).fingerprint;
        assert_eq!(fingerprint(), fingerprint(), "seed {seed}");
    }
}
