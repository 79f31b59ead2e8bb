//! Goal: a restart finds what was whole and nothing else. Method: crashes with writes in flight,
//! every subset of whose units may have arrived, then every key asked for.

use orbitkv_manager::core::{
    Core, CoreConfig, Effects, ImageIdentity, RecoveredPage, Slot, slot_bytes,
};
use orbitkv_shm_protocol::bootstrap::message::{DependencySpec, NamespaceSpec};
use orbitkv_shm_protocol::ids::PageHash;
use orbitkv_shm_protocol::record::QueryMode;
use orbitkv_tests::rig::{PAGE, Rig, generous};
use orbitkv_tests::world::{World, chain, device, pages, spec};

/// Longest hit in a world that has just started. Restored pages are checked against their keys.
fn hits(world: &mut World, spec: &NamespaceSpec, hashes: &[PageHash]) -> u32 {
    let session = world.attach(1);
    let scope = world.namespace(session, spec);
    let region = world.region(session, scope, 64);
    let query = world.query(session, scope, QueryMode::Demand, &pages(hashes));
    world.settle();
    let found = world.ended(session, query).completion;
    if let Some(lease) = found.lease {
        let hit = pages(&hashes[..found.pages as usize]);
        let restore = world.restore(session, region, lease, 0, &hit, false);
        world.settle();
        assert_eq!(world.ended(session, restore).completion.pages, found.pages);
    }
    world.close(session);
    found.pages
}

#[test]
fn everything_that_was_written_is_found_again() {
    let mut rig = Rig::ssd(64, 64);
    for branch in 0..4 {
        rig.stored(&chain(branch, 8));
    }
    rig.world.settle();
    let mut world = rig.world.crash(|| true);
    assert_eq!(world.core.stats().recovered_pages, 32);
    for branch in 0..4 {
        assert_eq!(hits(&mut world, &spec("model", PAGE), &chain(branch, 8)), 8);
    }
}

#[test]
fn a_page_whose_write_was_torn_is_a_miss_and_so_is_what_hangs_on_it() {
    let spec = spec("model", 4 * PAGE);
    let devices = [device(1, 64 * 5 * PAGE)];
    for seed in 0..60 {
        let mut rng = fastrand::Rng::with_seed(seed);
        let mut rig = Rig::new(generous(512 * PAGE), &devices, spec.clone());
        for branch in 0..4 {
            rig.stored(&chain(branch, 8));
        }
        for _ in 0..rng.usize(..32) {
            rig.world.finish(rng.usize(..rig.world.work.len()), orbitkv_tests::world::Fate::Good);
        }
        // `crash` itself checks that no page is kept without its parent.
        let mut world = rig.world.crash(|| rng.u8(..4) > 0);
        for branch in 0..4 {
            let found = hits(&mut world, &spec, &chain(branch, 8));
            // A second look finds no more than the first: what failed is gone.
            assert!(hits(&mut world, &spec, &chain(branch, 8)) <= found);
        }
        world.check_bytes();
    }
}

#[test]
fn generations_go_on_above_the_highest_seen() {
    let mut rig = Rig::ssd(16, 16);
    rig.stored(&chain(1, 4));
    rig.world.settle();
    let mut world = rig.world.crash(|| true);
    let session = world.attach(1);
    let scope = world.namespace(session, &spec("model", PAGE));
    let region = world.region(session, scope, 64);
    world.save(session, region, &pages(&chain(2, 4)));
    world.settle();
    let mut generations: Vec<u64> = world
        .core
        .page_views()
        .map(|page| world.disk.footer(&page.slot.expect("written")).expect("a footer").generation)
        .collect();
    generations.sort_unstable();
    generations.dedup();
    assert_eq!(generations.len(), 8, "no generation twice");
}

/// SEC-07 and ENG-01: no field of the identity is lost on the way to SSD and back.
#[test]
fn salts_and_adapters_stay_apart_on_ssd() {
    let base = spec("model", PAGE);
    let variants = [
        NamespaceSpec { salt: "one".into(), ..base.clone() },
        NamespaceSpec { salt: "two".into(), ..base.clone() },
        NamespaceSpec { adapter: "one".into(), ..base.clone() },
        NamespaceSpec { tp_rank: 1, tp_size: 2, ..base.clone() },
        NamespaceSpec { dtype: "float8".into(), ..base.clone() },
    ];
    let mut world = World::new(generous(64 * PAGE), &[device(1, 64 * 2 * PAGE)]);
    let session = world.attach(1);
    let chain = chain(1, 4);
    for spec in &variants[..1] {
        let scope = world.namespace(session, spec);
        let region = world.region(session, scope, 8);
        world.save(session, region, &pages(&chain));
    }
    world.settle();
    for restart in 0..2 {
        for spec in [&base].into_iter().chain(&variants[1..]) {
            assert_eq!(hits(&mut world, spec, &chain), 0, "{spec:?}");
        }
        assert_eq!(hits(&mut world, &variants[0], &chain), 4);
        world.evict_dram();
        if restart == 0 {
            world = world.crash(|| true);
        }
    }
}

#[test]
fn the_oldest_chains_are_the_coldest_after_a_restart() {
    let config = CoreConfig { writes_in_flight_max: 1, ..generous(64 * PAGE) };
    let mut rig = Rig::new(config, &[device(1, 12 * 2 * PAGE)], spec("model", PAGE));
    for branch in 0..3 {
        rig.stored(&chain(branch, 4));
        rig.world.settle();
    }
    let mut world = rig.world.crash(|| true);
    // The tier is full: the next page takes the slot of the oldest chain's tail.
    let session = world.attach(1);
    let scope = world.namespace(session, &spec("model", PAGE));
    let region = world.region(session, scope, 8);
    world.save(session, region, &pages(&chain(9, 2)));
    world.settle();
    let expected = [(0, 2), (1, 4), (2, 4), (9, 2)];
    for (branch, len) in expected {
        let whole = chain(branch, if branch == 9 { 2 } else { 4 });
        assert_eq!(hits(&mut world, &spec("model", PAGE), &whole), len, "chain {branch}");
    }
}

#[test]
fn windows_and_states_come_back_without_parents() {
    let window = NamespaceSpec { dependency: DependencySpec::Window(2), ..spec("window", PAGE) };
    let mut rig = Rig::new(generous(64 * PAGE), &[device(1, 64 * 2 * PAGE)], window.clone());
    let whole = chain(1, 6);
    rig.stored(&whole);
    rig.world.settle();
    let mut world = rig.world.crash(|| true);
    let session = world.attach(1);
    let scope = world.namespace(session, &window);
    let query = world.query(session, scope, QueryMode::Demand, &pages(&whole));
    world.settle();
    let found = world.ended(session, query).completion;
    assert_eq!((found.pages, found.bytes), (6, 2 * PAGE));
}

fn footer(hash: u8, parent: Option<u8>, generation: u64) -> ImageIdentity {
    ImageIdentity {
        namespace: [7; 32],
        hash: PageHash([hash; 32]),
        parent: parent.map(|parent| PageHash([parent; 32])),
        image_bytes: PAGE as u32,
        generation,
        checksum: 0,
    }
}

/// Footers that contradict each other: what is left has its parents, and one owner a slot.
#[test]
fn contradicting_footers_leave_whole_chains_only() {
    let geometry = device(1, 16 * 2 * PAGE);
    let layout = orbitkv_manager::core::DeviceLayout {
        geometry,
        region_slot_bytes: vec![slot_bytes(PAGE as u32)],
        retired: vec![geometry.data_offset + 5 * 2 * PAGE],
    };
    let slot = |at: u64| Slot {
        device: 0,
        offset: geometry.data_offset + at * 2 * PAGE,
        bytes: slot_bytes(PAGE as u32),
    };
    let page = |at, image| RecoveredPage { slot: slot(at), image };
    let recovered = vec![
        // A whole chain, children first.
        page(2, footer(3, Some(2), 1)),
        page(1, footer(2, Some(1), 2)),
        page(0, footer(1, None, 3)),
        // A cycle, and a page of it.
        page(3, footer(11, Some(12), 4)),
        page(4, footer(12, Some(11), 5)),
        page(6, footer(13, Some(12), 6)),
        // In a retired slot; its child is whole but stands on nothing.
        page(5, footer(21, None, 7)),
        page(7, footer(22, Some(21), 8)),
        page(8, footer(23, Some(22), 9)),
        // In the slot of another; beyond the device; of another size; without its parent.
        page(0, footer(31, None, 10)),
        page(900, footer(41, None, 11)),
        page(9, ImageIdentity { image_bytes: 3 * PAGE as u32, ..footer(51, None, 12) }),
        page(10, footer(61, Some(60), 13)),
        // The same key twice: one of them.
        page(11, footer(71, None, 14)),
        page(12, footer(71, None, 15)),
    ];
    let config = CoreConfig { devices: vec![layout], ..generous(16 * PAGE) };
    let mut core = Core::new(config);
    core.recover(recovered, &mut Effects::default());
    core.check_laws();
    let mut left: Vec<u8> = core.page_views().map(|page| page.hash.0[0]).collect();
    left.sort_unstable();
    assert!(left == [1, 2, 3, 71] || left == [2, 3, 31, 71], "{left:?}");
    assert_eq!(left, [1, 2, 3, 71]);
    for view in core.page_views() {
        let parent = match view.hash.0[0] {
            2 | 3 => Some(PageHash([view.hash.0[0] - 1; 32])),
            _ => None,
        };
        assert_eq!(view.parent, parent);
    }
    let stats = core.stats();
    assert_eq!((stats.recovered_pages, stats.recovered_dropped), (4, 11));
}
