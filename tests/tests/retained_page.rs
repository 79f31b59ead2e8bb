//! A page that is held holds nothing but itself: its siblings' bytes are free however they lay beside
//! it on the device. The same on a GPU is in `gpu/`.

use orbitkv_engine::{Block, Chain, Connect, QueryMode, SaveOptions, Status};
use orbitkv_tests::engine::{Engine, Shape, Way, blocks, hashes, namespace};
use orbitkv_tests::manager::Manager;
use orbitkv_tests::setup;

const PAGE: u64 = 144 << 10;
const HELD: usize = 2;

/// Goal: of four pages that were saved together and one of which is leased, an eviction frees three,
/// and the fourth is restored byte for byte, from DRAM. With a tier the three come back from there.
/// Method: four sequences of one page each in one save.
fn one_of_four(manager: &Manager, shape: Shape, with_ssd: bool) {
    let connect = Connect::new(manager.socket());
    let spec = namespace(&format!("retained-{shape:?}"), PAGE);
    let mut engine = Engine::connect(&connect, spec, 8, Way::Sealed, shape);
    let pages: Vec<Block> =
        (0..4).flat_map(|sequence| blocks(&hashes(sequence, 0..1), sequence as u32)).collect();
    engine.fill(&pages);
    let chains: Vec<Chain<'_, Block>> = pages.chunks(1).map(Chain::from).collect();
    let save = engine.client.save_chains(&engine.region, &chains, SaveOptions::default()).unwrap();
    assert_eq!(engine.end(save).ok().pages, 4);
    let lease = engine.query(&[pages[HELD].hash], QueryMode::Demand).ok().leased();
    manager.evict();
    manager.settle("one page is left", |seen| seen.pool.used_bytes == PAGE);
    let target = |page: &Block| Block { page: page.page + 4, ..*page };
    let restored = engine.restore(&lease, 0, &[target(&pages[HELD])]).ok();
    assert_eq!((restored.pages_dram, restored.pages_ssd), (1, 0));
    engine.check(&[target(&pages[HELD])]);
    for (at, page) in pages.iter().enumerate().filter(|(at, _)| *at != HELD) {
        let hit = engine.query(&[page.hash], QueryMode::Candidate);
        assert_eq!((hit.status, hit.pages), (Status::Ok, u32::from(with_ssd)), "page {at}");
        if let Some(lease) = hit.lease {
            let restored = engine.restore(&lease, 0, &[target(page)]).ok();
            assert_eq!((restored.pages_dram, restored.pages_ssd), (0, 1));
            engine.check(&[target(page)]);
        }
    }
    manager.settle_empty();
}

#[test]
fn a_held_page_lets_its_siblings_go() {
    for shape in [Shape::Contiguous, Shape::Split] {
        one_of_four(&setup!().dram("32MiB").start(), shape, false);
    }
}

#[test]
fn a_held_page_lets_its_siblings_go_to_ssd_and_they_come_back() {
    for shape in [Shape::Contiguous, Shape::Split] {
        one_of_four(&setup!().dram("32MiB").ssd("128MiB").start(), shape, true);
    }
}
