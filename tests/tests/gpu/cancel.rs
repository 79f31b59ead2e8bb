//! A save that was cancelled stores what its pages held, or nothing.

use std::time::Duration;

use orbitkv_engine::{Deadline, QueryMode, RequestKind, RestoreOptions, Status};
use orbitkv_tests::manager::PATIENCE;
use orbitkv_tests::setup;

use crate::engine::{GpuEngine, Shape, alone, blocks, content, manager};

const PAGES: u32 = 64;
const ROUNDS: u64 = 1000;
/// Longer than a save of all pages takes.
const CANCEL_AFTER_MAX: Duration = Duration::from_millis(1);

/// Goal: once a save and its cancel have ended, the pages belong to their next owner: no key ever
/// brings the next owner's bytes (COR-03). Method: a save of 64 pages is cancelled after a random
/// time; when both have ended the pages are written over; what a query finds is restored elsewhere.
#[test]
fn cor_03_a_cancelled_save_never_stores_the_next_owners_bytes() {
    let _alone = alone();
    let manager = manager(setup!());
    let mut random = fastrand::Rng::with_seed(3);
    let shape = Shape::Split(36);
    let mut engine = GpuEngine::attach(&manager.socket(), "cor-03", 2 * PAGES, shape);
    let (from, to): (Vec<u32>, Vec<u32>) = ((0..PAGES).collect(), (PAGES..2 * PAGES).collect());
    let (mut whole, mut none) = (0, 0);
    for round in 0..ROUNDS {
        engine.fill(&from, content(round));
        let fence = engine.fence();
        let save = engine.begin_save(&blocks(round, &from), Some(fence));
        std::thread::sleep(CANCEL_AFTER_MAX.mul_f64(random.f64()));
        let cancel = engine.client.cancel(save).unwrap();
        engine.client.submit().unwrap();
        let saved = engine.end(save);
        let cancelled = engine.end(cancel);
        assert_eq!((saved.kind, cancelled.kind), (RequestKind::Save, RequestKind::Cancel));
        engine.events.give_back(fence);
        engine.fill(&from, content(ROUNDS + round));
        let chain: Vec<_> = blocks(round, &to).iter().map(|block| block.hash).collect();
        let (scope, mode) = (engine.scope, QueryMode::Demand);
        let query = engine.client.query(&scope, &chain, mode, Deadline::after(PATIENCE)).unwrap();
        let hit = engine.end(query);
        whole += u32::from(hit.pages == PAGES);
        none += u32::from(hit.pages == 0);
        let Some(lease) = hit.lease else { continue };
        let target = blocks(round, &to[..hit.pages as usize]);
        engine.poison(&to);
        let options = RestoreOptions::default();
        let restore = engine.client.restore(&lease, 0, &engine.region, &target, options).unwrap();
        assert_eq!(engine.end(restore).status, Status::Ok);
        engine.check(&to[..target.len()], content(round));
    }
    println!("of {ROUNDS} saves {whole} were whole, {none} stored nothing");
    manager.settle_empty();
}
