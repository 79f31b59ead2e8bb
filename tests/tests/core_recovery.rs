//! Goal: a restart finds what was whole and nothing else. Method: crashes with writes in flight,
//! every subset of whose units may have arrived, then every key asked for; requests of every kind
//! before it is known what is on SSD.

use std::time::{Duration, Instant};

use orbitkv_manager::core::{
    Core, CoreConfig, Direction, Effect, Effects, ImageIdentity, Recovered, RecoveredPage, Slot,
    SpillOutcome, SpillPolicy, slot_bytes,
};
use orbitkv_shm_protocol::bootstrap::message::{DependencySpec, NamespaceSpec};
use orbitkv_shm_protocol::ids::{PageHash, RegionId, ScopeId, SessionId};
use orbitkv_shm_protocol::record::{QueryMode, RequestBody, Status};
use orbitkv_tests::rig::{PAGE, Rig, generous};
use orbitkv_tests::world::{World, chain, device, is_copy, pages, spec};

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
        checksum: Some(0),
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
        // In the slot of the chain's root; beyond the device; of another size; without its parent.
        page(0, footer(31, None, 0)),
        page(900, footer(41, None, 11)),
        page(9, ImageIdentity { image_bytes: 3 * PAGE as u32, ..footer(51, None, 12) }),
        page(10, footer(61, Some(60), 13)),
        // The same key twice: one of them.
        page(11, footer(71, None, 14)),
        page(12, footer(71, None, 15)),
    ];
    let config = CoreConfig { devices: vec![layout], ..generous(16 * PAGE) };
    let mut core = Core::new(config);
    core.begin_recovery();
    let mut out = Effects::default();
    core.census_taken(Recovered::new(recovered, 15, Vec::new()), &mut out);
    while core.is_recovering() {
        core.pump(0, &mut out);
        core.check_laws();
    }
    let mut left: Vec<u8> = core.page_views().map(|page| page.hash.0[0]).collect();
    left.sort_unstable();
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

/// Of two slots of one key the younger is taken over, also where a child of it leads there and the
/// older one names another parent.
#[test]
fn of_two_slots_of_a_key_the_younger_counts() {
    let page = |at: u64, image| {
        let slot = Slot { device: 0, offset: at << 13, bytes: slot_bytes(PAGE as u32) };
        RecoveredPage { slot, image }
    };
    let older = page(0, footer(2, None, 2));
    let younger = page(1, footer(2, Some(1), 6));
    let root = page(2, footer(1, None, 5));
    let child = page(3, footer(3, Some(2), 3));
    // Nothing is below this one but what is said in vain.
    let other = page(4, footer(4, None, 4));
    let in_vain = page(5, footer(3, Some(4), 1));
    let all = vec![older, younger, root, child, other, in_vain];
    let found = Recovered::new(all, 6, Vec::new());
    let hashes: Vec<_> = found.pages()[..4].iter().map(|page| page.image.hash.0[0]).collect();
    assert_eq!(hashes, [4, 1, 2, 3], "chains by the age of their last page");
    assert_eq!(found.pages()[2], younger);
    assert_eq!(found.pages()[4..], [older, in_vain]);
}

/// Under `reuse` a free slot is reason enough to write a page. Before it is known which are free, a
/// bounded number of pages may wait for one.
#[test]
fn reuse_writes_what_fits_into_the_bound_before_the_tier_is_known() {
    let config = CoreConfig {
        spill_policy: SpillPolicy::Reuse,
        writes_in_flight_bytes: 4 * PAGE,
        ..generous(64 * PAGE)
    };
    let mut world = in_census(&chain(1, 1), config);
    let (session, _, region) = seat(&mut world);
    let saved = world.save(session, region, &pages(&chain(2, 8)));
    world.settle_only(is_copy(Direction::Save));
    assert_eq!(world.ended(session, saved).completion.pages, 8);
    let stats = world.core.stats();
    assert_eq!(stats.spill[SpillOutcome::SkippedByPolicy as usize], 4);
    take_over(&mut world);
    world.settle();
    assert_eq!(world.core.stats().spill[SpillOutcome::Written as usize], 4);
}

/// A world whose disk holds a chain, and that serves before it knows.
fn in_census(hashes: &[PageHash], config: CoreConfig) -> World {
    let mut rig = Rig::new(config, &[device(1, 64 * 2 * PAGE)], spec("model", PAGE));
    rig.stored(hashes);
    rig.world.settle();
    rig.world.crash_in_census(|| true)
}

fn seat(world: &mut World) -> (SessionId, ScopeId, RegionId) {
    let session = world.attach(1);
    let scope = world.namespace(session, &spec("model", PAGE));
    (session, scope, world.region(session, scope, 64))
}

fn take_over(world: &mut World) {
    world.end_census();
    while world.core.is_recovering() {
        world.pump();
        world.core.check_laws();
    }
    world.check_bytes();
}

/// Goal: until all of the tier is known DRAM is served, nothing is found on SSD and nothing is
/// written there; a page that was saved again meanwhile is not written twice, and its copy on SSD,
/// of another computation, is as good.
#[test]
fn dram_is_served_before_the_tier_is_known() {
    let old = chain(1, 6);
    let mut world = in_census(&old, generous(64 * PAGE));
    let (session, _, region) = seat(&mut world);
    world.version = 1;
    assert_eq!(hits(&mut world, &spec("model", PAGE), &old), 0);
    let again = world.save(session, region, &pages(&old[..3]));
    let fresh = world.save(session, region, &pages(&chain(2, 4)));
    world.settle();
    for (operation, stored) in [(again, 3), (fresh, 4)] {
        assert_eq!(world.ended(session, operation).completion.pages, stored);
    }
    assert_eq!(hits(&mut world, &spec("model", PAGE), &old), 3);
    assert_eq!(world.core.stats().ssd_pages_written, 0);
    assert_eq!(world.core.gauges().spill_pages, 7);
    assert!(!world.core.spill_can_go_on(), "a stop need not wait for what cannot begin");
    take_over(&mut world);
    world.settle();
    let stats = world.core.stats();
    assert_eq!((stats.recovered_pages, stats.recovered_dropped), (6, 0));
    assert_eq!(stats.spill[SpillOutcome::AlreadyThere as usize], 3);
    assert_eq!(stats.ssd_pages_written, 4, "what was there is not written again");
    world.evict_dram();
    assert_eq!(hits(&mut world, &spec("model", PAGE), &old), 6);
    assert_eq!(hits(&mut world, &spec("model", PAGE), &chain(2, 4)), 4);
}

#[test]
fn pages_are_taken_over_a_few_a_turn_and_found_as_they_come() {
    let old = chain(1, 8);
    let config = CoreConfig { pages_recovered_per_turn: 3, ..generous(64 * PAGE) };
    let mut world = in_census(&old, config);
    let (session, scope, _) = seat(&mut world);
    world.pumps = false;
    world.end_census();
    for found in [0, 3, 6, 8] {
        let query = world.query(session, scope, QueryMode::Candidate, &pages(&old));
        assert_eq!(world.ended(session, query).completion.pages, found);
        assert_eq!(world.core.has_recovered_pages(), found < 8);
        world.pump();
        world.core.check_laws();
    }
    assert!(!world.core.is_recovering());
}

/// Goal: a forget that comes before the census is complete, or before all of it is taken over, ends
/// when it is recorded under a generation that no older slot reaches, and nothing of before it is
/// ever found; what is saved after it is.
#[test]
fn a_forget_meanwhile_is_obeyed() {
    let old = chain(1, 8);
    for taken_over in [None, Some(0), Some(3)] {
        let config = CoreConfig { pages_recovered_per_turn: 3, ..generous(64 * PAGE) };
        let mut world = in_census(&old, config);
        let (session, scope, region) = seat(&mut world);
        world.pumps = false;
        if let Some(pages) = taken_over {
            world.end_census();
            (0..pages / 3).for_each(|_| world.pump());
            assert_eq!(world.core.stats().recovered_pages, pages);
        }
        let forget = world.ask(session, RequestBody::Forget { scope });
        world.pumps = true;
        let saved = world.save(session, region, &pages(&old[..2]));
        world.settle_only(is_copy(Direction::Save));
        assert_eq!(world.ended(session, saved).completion.pages, 2);
        if taken_over.is_none() {
            // However long the census takes.
            world.advance(2 * world.config().operation_timeout_ns);
        }
        assert!(world.take_ended(session, forget).is_none(), "not recorded yet: {taken_over:?}");
        take_over(&mut world);
        assert!(world.take_ended(session, forget).is_none(), "not synced yet: {taken_over:?}");
        world.settle();
        let ended = world.ended(session, forget).completion;
        assert_eq!((ended.status, ended.pages), (Status::Ok, 8), "{taken_over:?}");
        assert_eq!(ended.bytes, 8 * PAGE);
        assert_eq!(hits(&mut world, &spec("model", PAGE), &old), 2, "{taken_over:?}");
        world.evict_dram();
        assert_eq!(hits(&mut world, &spec("model", PAGE), &old), 2, "{taken_over:?}");
        let mut world = world.crash(|| true);
        assert_eq!(hits(&mut world, &spec("model", PAGE), &old), 2, "{taken_over:?}");
    }
}

/// A forget that was not recorded when the Manager died was not answered either.
#[test]
fn a_crash_in_the_census_changes_nothing() {
    let old = chain(1, 8);
    let mut world = in_census(&old, generous(64 * PAGE));
    let (session, scope, region) = seat(&mut world);
    let forget = world.ask(session, RequestBody::Forget { scope });
    world.save(session, region, &pages(&chain(2, 3)));
    world.settle();
    assert!(world.take_ended(session, forget).is_none());
    let mut world = world.crash(|| true);
    assert_eq!(hits(&mut world, &spec("model", PAGE), &old), 8);
    assert_eq!(hits(&mut world, &spec("model", PAGE), &chain(2, 3)), 0, "it was in DRAM only");
}

/// Goal: pages in DRAM that were evicted while the tier was not known are found on SSD when it is,
/// and a full pool goes on turning over.
#[test]
fn dram_turns_over_before_the_tier_is_known() {
    let old = chain(1, 6);
    let mut world = in_census(&old, generous(8 * PAGE));
    let (session, _, region) = seat(&mut world);
    for branch in [1, 2, 3] {
        let saved = world.save(session, region, &pages(&chain(branch, 6)));
        world.settle();
        assert_eq!(world.ended(session, saved).completion.pages, 6, "branch {branch}");
    }
    take_over(&mut world);
    world.settle();
    assert_eq!(hits(&mut world, &spec("model", PAGE), &old), 6);
    assert_eq!(hits(&mut world, &spec("model", PAGE), &chain(3, 6)), 6);
}

/// Goal: a device whose slots could not be read is left alone, whatever its breaker says later.
#[test]
fn a_lost_device_is_neither_read_nor_written() {
    let geometry = device(1, 16 * 2 * PAGE);
    let layout = |slot_bytes| orbitkv_manager::core::DeviceLayout {
        geometry,
        region_slot_bytes: vec![slot_bytes],
        retired: Vec::new(),
    };
    let used = slot_bytes(PAGE as u32);
    let config = CoreConfig { devices: vec![layout(used), layout(used)], ..generous(64 * PAGE) };
    let mut core = Core::new(config);
    core.begin_recovery();
    let slot = |device, at: u64| Slot {
        device,
        offset: geometry.data_offset + at * 2 * PAGE,
        bytes: used,
    };
    let found = [(0, 1), (1, 2)].map(|(device, hash)| RecoveredPage {
        slot: slot(device, 3),
        image: footer(hash, None, hash.into()),
    });
    let mut out = Effects::default();
    core.census_taken(Recovered::new(found.to_vec(), 2, vec![1]), &mut out);
    while core.is_recovering() {
        core.pump(0, &mut out);
        core.check_laws();
    }
    core.set_device_accepts_writes(1, false);
    core.set_device_accepts_writes(1, true);
    core.check_laws();
    let left: Vec<u16> = core.page_views().filter_map(|page| Some(page.slot?.device)).collect();
    assert_eq!((left, core.device_usage(1)), (vec![0], (0, 0)));
    let used_up = core.take_used_up().map(|found| found.pages().len());
    assert_eq!((used_up, core.take_used_up()), (Some(2), None), "for another thread to drop");
}

/// Goal: a slot whose footer could not be read is out of use, and told so to its device once.
#[test]
fn slots_that_could_not_be_read_are_retired() {
    const SLOTS: u32 = 16;
    let geometry = device(1, u64::from(SLOTS) * 2 * PAGE);
    let used = slot_bytes(PAGE as u32);
    let layout = orbitkv_manager::core::DeviceLayout {
        geometry,
        region_slot_bytes: vec![used],
        retired: Vec::new(),
    };
    let config =
        CoreConfig { devices: vec![layout], pages_recovered_per_turn: 2, ..generous(64 * PAGE) };
    let mut core = Core::new(config);
    core.begin_recovery();
    let slot =
        |index| Slot { device: 0, offset: geometry.slot_offset(0, used, index), bytes: used };
    let found = RecoveredPage { slot: slot(3), image: footer(1, None, 1) };
    let unread: Vec<Slot> = (5..10).map(slot).collect();
    let mut out = Effects::default();
    let census = Recovered::new(vec![found], 1, Vec::new()).with_unread(unread.clone());
    core.census_taken(census, &mut out);
    let mut turns = 0;
    while core.is_recovering() {
        core.pump(0, &mut out);
        core.check_laws();
        turns += 1;
    }
    assert!(turns > 2, "{turns} turns");
    let retired = out.list.iter().filter_map(|effect| match effect {
        Effect::RetireSlot { slot } => Some(*slot),
        _ => None,
    });
    assert_eq!(retired.collect::<Vec<_>>(), unread);
    assert_eq!((core.stats().slots_retired, core.stats().recovered_pages), (5, 1));
}

/// Prints how long the reactor is away at most while 100,000 pages are taken over.
#[test]
#[ignore = "for measurements"]
fn a_turn_of_a_take_over_is_short() {
    const REGIONS: u64 = 13;
    const SLOTS: u64 = 8192;
    let geometry = device(REGIONS, SLOTS * 2 * PAGE);
    let used = slot_bytes(PAGE as u32);
    let layout = orbitkv_manager::core::DeviceLayout {
        geometry,
        region_slot_bytes: vec![used; REGIONS as usize],
        retired: Vec::new(),
    };
    let mut core = Core::new(CoreConfig { devices: vec![layout], ..generous(64 * PAGE) });
    core.begin_recovery();
    let page = |at: u64| {
        let hash = |at: u64| {
            let mut hash = [0; 32];
            hash[..8].copy_from_slice(&at.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
            PageHash(hash)
        };
        let (region, index) = ((at / SLOTS) as u32, (at % SLOTS) as u32);
        let offset = geometry.slot_offset(region, used, index);
        let parent = (!at.is_multiple_of(32)).then(|| hash(at - 1));
        let image = ImageIdentity { hash: hash(at), parent, ..footer(0, None, at + 1) };
        RecoveredPage { slot: Slot { device: 0, offset, bytes: used }, image }
    };
    let pages: Vec<RecoveredPage> = (0..100_000).map(page).collect();
    let mut out = Effects::default();
    let timed = |what: &mut dyn FnMut()| {
        let started = Instant::now();
        what();
        started.elapsed()
    };
    let mut found = None;
    let sorted = timed(&mut || found = Some(Recovered::new(pages.clone(), 100_000, Vec::new())));
    let told = timed(&mut || core.census_taken(found.take().unwrap(), &mut out));
    let (mut turns, mut longest, mut all) = (0, Duration::ZERO, Duration::ZERO);
    while core.is_recovering() {
        let turn = timed(&mut || core.pump(0, &mut out));
        (turns, longest, all) = (turns + 1, longest.max(turn), all + turn);
    }
    assert_eq!(core.stats().recovered_pages, 100_000);
    println!("sorted {sorted:?}, told {told:?}, {turns} turns: longest {longest:?}, all {all:?}");
}
