//! Load that goes on for as long as it is told to: short in the suite, long in `soak.rs`.
#![allow(dead_code, reason = "each test file uses a part of it")]

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use orbitkv_engine::QueryMode;
use orbitkv_shm_protocol::telemetry::Metric;
use orbitkv_tests::engine::{Engine, blocks, hashes, namespace};
use orbitkv_tests::manager::Setup;

const PAGE: u64 = 1 << 20;

/// One engine publishes pages without end into an SSD tier of eight, four others restore random
/// recent ones and compare every byte (COR-07). Pages are chains of their own, so that each can be
/// overwritten for itself; the pool holds few, so that hits are read from SSD.
pub(crate) fn eight_slots(setup: Setup, time: Duration) {
    let manager = setup.dram("5MiB").ssd("9MiB").start();
    let socket = manager.socket();
    let (published, ended) = (AtomicU64::new(0), AtomicBool::new(false));
    let (hits, misses, from_ssd) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
    let attach = || Engine::attach(&socket, namespace("cor-07", PAGE), 1);
    let read = |seed: u64| {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut engine = attach();
        while !ended.load(Ordering::Relaxed) {
            let newest = published.load(Ordering::Relaxed);
            let sequence = newest.saturating_sub(random.u64(..12));
            let page = hashes(sequence, 0..1);
            let hit = engine.query(&page, QueryMode::Demand);
            let Some(lease) = hit.lease else {
                misses.fetch_add(1, Ordering::Relaxed);
                continue;
            };
            from_ssd.fetch_add(hit.pages_ssd.into(), Ordering::Relaxed);
            let target = blocks(&page, 0);
            let _ = engine.restore(&lease, 0, &target).ok();
            engine.check(&target);
            hits.fetch_add(1, Ordering::Relaxed);
        }
    };
    std::thread::scope(|threads| {
        for seed in 0..4 {
            let read = &read;
            threads.spawn(move || read(seed));
        }
        let mut engine = attach();
        let until = Instant::now() + time;
        while Instant::now() < until {
            let next = published.load(Ordering::Relaxed) + 1;
            let saved = engine.save(&blocks(&hashes(next, 0..1), 0));
            assert!(saved.pages + saved.pages_refused == 1, "{saved:?}");
            published.store(next, Ordering::Relaxed);
        }
        ended.store(true, Ordering::Relaxed);
    });
    let seen = manager.settle_empty();
    assert!(seen.ssd[0].slots <= 8, "{:?}", seen.ssd);
    assert!(seen.counters.get(Metric::SsdEvictedPages) > 0, "no slot was used twice");
    let (hits, misses) = (hits.into_inner(), misses.into_inner());
    let from_ssd = from_ssd.into_inner();
    println!(
        "{} published, {hits} hits ({from_ssd} from ssd), {misses} misses",
        published.into_inner()
    );
    assert!(hits > 0 && misses > 0 && from_ssd > 0, "nothing was tested");
}
