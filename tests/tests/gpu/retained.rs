//! A page that is held holds nothing but itself, as in `retained_page.rs` on host memory.

use orbitkv_engine::{Block, Chain, Deadline, QueryMode, RestoreOptions, SaveOptions, Status};
use orbitkv_tests::engine::hashes;
use orbitkv_tests::manager::Manager;
use orbitkv_tests::setup;

use crate::engine::{GpuEngine, PAGE, Shape, alone, content, manager};

const HELD: usize = 2;

/// Goal: of four pages that were saved together and one of which is leased, an eviction frees three,
/// and the fourth is restored byte for byte; those on SSD come back from there.
fn one_of_four(manager: &Manager, shape: Shape, with_ssd: bool) {
    let mut engine = GpuEngine::attach(&manager.socket(), "retained", 8, shape);
    engine.fill(&[0, 1, 2, 3], content(1));
    let page = |sequence: u32| Block { hash: hashes(sequence.into(), 0..1)[0], page: sequence };
    let pages: Vec<Block> = (0..4).map(page).collect();
    let chains: Vec<Chain<'_, Block>> = pages.chunks(1).map(Chain::from).collect();
    let fence = engine.fence();
    let options = SaveOptions { fence: Some(fence), ..SaveOptions::default() };
    let save = engine.client.save_chains(&engine.region, &chains, options).unwrap();
    let saved = engine.end(save);
    assert_eq!((saved.status, saved.pages), (Status::Ok, 4), "{saved:?}");
    engine.events.give_back(fence);
    let lease = engine.lease(&pages[HELD..=HELD]);
    manager.evict();
    manager.settle("one page is left", |seen| seen.pool.used_bytes == PAGE);
    for at in [HELD, 0, 1, 3] {
        let target = Block { page: pages[at].page + 4, ..pages[at] };
        engine.poison(&[target.page]);
        let lease = if at == HELD {
            Some(lease)
        } else {
            let (scope, mode) = (engine.scope, QueryMode::Candidate);
            let query =
                engine.client.query(&scope, &[target.hash], mode, Deadline::DEFAULT).unwrap();
            let hit = engine.end(query);
            assert_eq!((hit.status, hit.pages), (Status::Ok, u32::from(with_ssd)), "page {at}");
            hit.lease
        };
        let Some(lease) = lease else { continue };
        let options = RestoreOptions::default();
        let restore = engine.client.restore(&lease, 0, &engine.region, &[target], options).unwrap();
        let restored = engine.end(restore);
        let tiers = if at == HELD { (1, 0) } else { (0, 1) };
        assert_eq!(restored.status, Status::Ok, "{restored:?}");
        assert_eq!((restored.pages_dram, restored.pages_ssd), tiers, "{restored:?}");
        let mut wanted = content(1);
        wanted.first_page = at as u32;
        engine.check(&[target.page], wanted);
    }
    manager.settle_empty();
}

#[test]
fn a_held_page_lets_its_siblings_go() {
    let _alone = alone();
    for shape in [Shape::Contiguous, Shape::Split(36)] {
        one_of_four(&manager(setup!()), shape, false);
    }
}

#[test]
fn a_held_page_lets_its_siblings_go_to_ssd_and_they_come_back() {
    let _alone = alone();
    for shape in [Shape::Contiguous, Shape::Split(36)] {
        one_of_four(&manager(setup!().ssd("256MiB")), shape, true);
    }
}
