//! Goal: engines that turn DRAM over several times lose nothing, as long as the device keeps up.
//! Method: it keeps up by construction and not by its speed. An engine saves its next batch only once
//! less waits to be written than the tier takes at a time, so that what all of them may have unwritten
//! is a fraction of the pool.

use std::thread;
use std::time::Instant;

use orbitkv_shm_protocol::telemetry::{HeldIn, Metric, SpillOutcome};
use orbitkv_tests::engine::{Engine, blocks, hashes};
use orbitkv_tests::manager::{Manager, PATIENCE};
use orbitkv_tests::setup;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const PAGE: u64 = 64 * KIB;
const DRAM_PAGES: u64 = 32 * MIB / PAGE;
const ENGINES: u64 = 4;
const CHAINS: u64 = 16;
const CHAIN_PAGES: u32 = 32;
/// Of one save.
const BATCH: usize = 16;
/// What may wait or be written before a save: half of what the tier takes at a time, so that all of
/// it is being written.
const WATERMARK: u64 = 4 * MIB;
const SAVED: u64 = ENGINES * CHAINS * CHAIN_PAGES as u64;

/// Waits until the tier has caught up.
fn caught_up(manager: &Manager) {
    let end = Instant::now() + PATIENCE;
    while manager.fresh().counters.get(Metric::SpillWaitingPages) * PAGE > WATERMARK {
        assert!(Instant::now() < end, "nothing is written any more");
    }
}

/// Saves chains, and reads each back while the others go on saving.
fn work(manager: &Manager, engine: &mut Engine, of: u64) {
    for chain in 0..CHAINS {
        let pages = hashes(of * CHAINS + chain, 0..CHAIN_PAGES);
        let mut parent = None;
        for batch in pages.chunks(BATCH) {
            caught_up(manager);
            let saved = engine.save_after(parent, &blocks(batch, 0)).ok();
            assert_eq!(saved.pages as usize, batch.len(), "{saved:?}");
            parent = batch.last().copied();
        }
        let earlier = hashes(of * CHAINS + chain / 2, 0..CHAIN_PAGES);
        assert_eq!(engine.restore_all(&earlier), CHAIN_PAGES, "chain {} of {of}", chain / 2);
    }
}

fn nothing_is_lost(engine: &str) {
    let flags = ["--ssd-engine", engine];
    let manager = &setup!().dram("32MiB").ssd("192MiB").flags(&flags).start();
    let attach = |of: u64| (of, manager.attach(&format!("turnover-{of}"), PAGE, CHAIN_PAGES));
    let mut engines: Vec<_> = (0..ENGINES).map(attach).collect();
    thread::scope(|scope| {
        for (of, engine) in &mut engines {
            scope.spawn(|| work(manager, engine, *of));
        }
    });
    let seen = manager.settle_empty();
    let get = |metric| seen.counters.get(metric);
    assert_eq!(get(Metric::SpillOfferedPages), SAVED);
    for outcome in SpillOutcome::ALL {
        let expected = if *outcome == SpillOutcome::Written { SAVED } else { 0 };
        assert_eq!(get(Metric::SpillPages(*outcome)), expected, "{outcome:?}");
    }
    assert_eq!(get(Metric::SsdWriteQueueFull), 0);
    assert!(SAVED >= 4 * DRAM_PAGES && get(Metric::PoolEvictedPages) >= SAVED - DRAM_PAGES);
    for (of, engine) in &mut engines {
        for chain in 0..CHAINS {
            let pages = hashes(*of * CHAINS + chain, 0..CHAIN_PAGES);
            assert_eq!(engine.restore_all(&pages), CHAIN_PAGES, "chain {chain} of {of}");
        }
    }
    let from_ssd = manager.fresh().counters.get(Metric::LookupHitPages(HeldIn::Ssd));
    assert!(from_ssd >= SAVED - DRAM_PAGES, "{from_ssd} pages came back from SSD");
}

#[test]
fn nothing_is_lost_while_io_uring_keeps_up() {
    nothing_is_lost("uring");
}

#[test]
fn nothing_is_lost_while_threads_keep_up() {
    nothing_is_lost("blocking");
}
