//! Goal: what DRAM will lose first is written first, a chain from its root, and each offer has one
//! outcome. Method: small pools over small devices, writes ended one by one.

use orbitkv_manager::core::{CoreConfig, Direction, Intake, IoFault, SpillOutcome, SpillPolicy};
use orbitkv_shm_protocol::ids::PageHash;
use orbitkv_shm_protocol::record::Status;
use orbitkv_tests::rig::{PAGE, Rig, Seat, generous};
use orbitkv_tests::world::{Fate, Work, chain, device, is_copy, is_read, is_write, pages, spec};

fn config(dram: u64) -> CoreConfig {
    generous(dram * PAGE)
}

/// Hashes of the writes in flight, in the order in which they were ordered.
fn writing(rig: &Rig) -> Vec<PageHash> {
    let hash = |work: &Work| match work {
        Work::Write { image, .. } => Some(image.hash),
        _ => None,
    };
    rig.world.work.iter().filter_map(hash).collect()
}

fn outcomes(rig: &Rig, outcome: SpillOutcome) -> u64 {
    rig.world.core.stats().spill[outcome as usize]
}

/// Goal: what nobody has summed is summed once, by whoever writes it, and read back by that. Method: a
/// save from a device that does not sum, writes of which one is refused after its sum was known.
#[test]
fn a_page_that_its_device_did_not_sum_is_summed_with_its_footer() {
    let mut rig = Rig::ssd(32, 64);
    rig.world.sums = false;
    let whole = chain(1, 3);
    rig.stored(&whole);
    let sums = |rig: &Rig| -> Vec<bool> {
        let known = |work: &Work| match work {
            Work::Write { image, .. } => Some(image.checksum.is_some()),
            _ => None,
        };
        rig.world.work.iter().filter_map(known).collect()
    };
    assert_eq!(sums(&rig), [false; 3]);
    rig.world.finish(2, Fate::Io(IoFault::Off));
    rig.world.settle();
    assert_eq!(rig.world.core.device_usage(0).1, 2);
    rig.world.core.set_device_accepts_writes(0, true);
    rig.world.pump();
    assert_eq!(sums(&rig), [true], "what was summed is summed again");
    rig.world.settle();
    rig.world.evict_dram();
    // Reads expect the sum of the footer.
    assert_eq!(rig.hits(&whole), 3);
    assert_eq!(rig.world.core.stats().ssd_read_errors, [0; 5]);
}

#[test]
fn the_coldest_chain_is_written_first_from_its_root() {
    let one_by_one = CoreConfig { writes_in_flight_max: 1, ..config(32) };
    let mut rig = Rig::new(one_by_one, &[device(1, 64 * 2 * PAGE)], spec("model", PAGE));
    let chains: Vec<_> = (0..4).map(|branch| chain(branch, 3)).collect();
    // No write begins before all is saved.
    rig.world.core.set_device_accepts_writes(0, false);
    for chain in &chains {
        rig.stored(chain);
    }
    // The first chain is used again: it is now the hottest.
    assert_eq!(rig.hits(&chains[0]), 3);
    rig.world.core.set_device_accepts_writes(0, true);
    rig.world.pump();
    let mut order = Vec::new();
    while rig.in_flight(is_write) > 0 {
        order.extend(writing(&rig));
        rig.world.finish(0, Fate::Good);
    }
    let expected = [&chains[1][..], &chains[2], &chains[3], &chains[0]].concat();
    assert_eq!(order, expected);
    assert!(rig.world.core.spill_is_drained());
}

#[test]
fn under_pressure_the_tail_of_a_chain_is_lost_and_counted() {
    let slow = CoreConfig { writes_in_flight_max: 1, ..config(8) };
    let mut rig = Rig::new(slow, &[device(1, 64 * 2 * PAGE)], spec("model", PAGE));
    let first = chain(1, 8);
    rig.stored(&first);
    // One write has ended and one is in flight when the pool is wanted for another chain.
    rig.world.finish(0, Fate::Good);
    let second = chain(2, 6);
    rig.stored(&second);
    let lost = outcomes(&rig, SpillOutcome::EvictedUnwritten);
    assert!(lost > 0);
    let left: Vec<_> =
        first.iter().map(|hash| rig.world.core.page_views().any(|p| p.hash == *hash)).collect();
    assert!(left.is_sorted_by(|a, b| a >= b), "the tail goes, never the middle: {left:?}");
    assert_eq!(left.iter().filter(|there| !**there).count() as u64, lost);
    rig.world.settle();
    assert_eq!(rig.hits(&first), 8 - lost as u32);
}

#[test]
fn a_clean_pool_evicts_without_losing_anything() {
    let mut rig = Rig::ssd(8, 256);
    for branch in 0..20 {
        rig.stored(&chain(branch, 8));
        rig.world.settle();
    }
    assert_eq!(outcomes(&rig, SpillOutcome::EvictedUnwritten), 0);
    for branch in 0..20 {
        assert_eq!(rig.hits(&chain(branch, 8)), 8);
    }
}

#[test]
fn each_offer_has_one_outcome() {
    let mut rig = Rig::ssd(32, 64);
    let pages_of = chain(1, 4);
    rig.stored(&pages_of);
    rig.world.settle();
    assert_eq!(outcomes(&rig, SpillOutcome::Written), 4);
    // Saved again while it is on SSD only: a replica for DRAM, nothing to write.
    rig.world.evict_dram();
    rig.stored(&pages_of);
    assert_eq!(outcomes(&rig, SpillOutcome::AlreadyThere), 4);
    // One fails, and the two behind it go with it.
    let failing = chain(2, 3);
    rig.stored(&failing);
    rig.world.finish(0, Fate::Io(IoFault::Errno(28)));
    rig.world.settle();
    assert_eq!(outcomes(&rig, SpillOutcome::Failed), 3);
    let stats = rig.world.core.stats();
    assert_eq!((stats.ssd_write_errors[0], stats.slots_retired), (1, 1));
    assert_eq!(stats.spill_offered, stats.spill.iter().sum::<u64>());
    assert_eq!(rig.hits(&failing), 3, "DRAM service goes on");
    rig.world.evict_dram();
    assert_eq!(rig.hits(&failing), 0, "nothing of it is on SSD without its root");
    rig.world.core.check_laws();
}

/// A page whose write failed is offered again with the next page that hangs on it.
#[test]
fn a_failed_root_is_written_with_its_next_child() {
    for fault in [IoFault::NoSpace, IoFault::Superblock(5)] {
        let mut rig = Rig::ssd(32, 64);
        let whole = chain(1, 3);
        rig.stored(&whole[..1]);
        rig.world.finish(0, Fate::Io(fault));
        assert_eq!(rig.in_flight(is_write), 0);
        assert_eq!(rig.world.core.stats().slots_retired, 0, "nothing is wrong with the slot");
        let entries = orbitkv_tests::world::pages_after(whole[0], &whole[1..]);
        rig.world.save(rig.seat.session, rig.seat.region, &entries);
        rig.world.settle();
        rig.world.evict_dram();
        assert_eq!(rig.hits(&whole), 3);
    }
}

#[test]
fn writes_that_end_before_their_parents_fail_are_taken_back() {
    let mut rig = Rig::ssd(32, 64);
    let whole = chain(1, 4);
    rig.stored(&whole);
    assert_eq!(writing(&rig), whole);
    // Children first, then the root fails, then the last child ends.
    rig.world.finish(3, Fate::Good);
    rig.world.finish(1, Fate::Good);
    rig.world.finish(0, Fate::Io(IoFault::Short));
    rig.world.settle();
    assert_eq!(rig.world.core.device_usage(0), (0, 0));
    assert_eq!(rig.hits(&whole), 4);
    let stats = rig.world.core.stats();
    assert_eq!(stats.spill_offered, stats.spill.iter().sum::<u64>());
}

/// A device that does nothing takes nothing away: what it refused waits, and it is not asked again
/// before it is said to take images.
#[test]
fn pages_that_a_device_does_not_take_wait_until_it_does() {
    let mut rig = Rig::ssd(32, 64);
    let whole = chain(1, 4);
    rig.stored(&whole);
    assert_eq!(writing(&rig), whole);
    // The last two are on SSD before the first two are refused.
    rig.world.finish(3, Fate::Good);
    rig.world.finish(2, Fate::Good);
    assert_eq!(rig.world.core.device_intake(0), Intake::All);
    rig.world.finish(1, Fate::Io(IoFault::Off));
    rig.world.finish(0, Fate::Io(IoFault::Off));
    assert_eq!(rig.world.core.device_intake(0), Intake::Nothing);
    let more = chain(2, 3);
    rig.stored(&more);
    rig.world.pump();
    assert_eq!(rig.in_flight(is_write), 0, "it is not asked again");
    assert!(!rig.world.core.spill_can_go_on());
    assert_eq!(rig.world.core.gauges().spill_pages, 2 + 3);
    assert_eq!(rig.world.core.device_usage(0).1, 2, "what is there stays there");
    let stats = rig.world.core.stats();
    assert_eq!(stats.ssd_write_errors[IoFault::Off.index()], 2);
    assert_eq!((stats.spill_offered, outcomes(&rig, SpillOutcome::Written)), (4 + 3, 2));
    rig.world.core.check_laws();

    rig.world.core.set_device_accepts_writes(0, true);
    rig.world.pump();
    assert_eq!(writing(&rig)[..2], whole[..2], "they were the coldest");
    rig.world.settle();
    let stats = rig.world.core.stats();
    assert_eq!((stats.spill_offered, outcomes(&rig, SpillOutcome::Written)), (7, 7));
    assert_eq!(outcomes(&rig, SpillOutcome::Failed), 0);
    rig.world.evict_dram();
    assert_eq!((rig.hits(&whole), rig.hits(&more)), (4, 3));
}

#[test]
fn pages_that_one_device_does_not_take_go_to_another() {
    let devices = [device(1, 64 * 2 * PAGE), device(1, 64 * 2 * PAGE)];
    let mut rig = Rig::new(config(32), &devices, spec("model", PAGE));
    rig.world.core.set_device_accepts_writes(1, false);
    let whole = chain(1, 6);
    rig.stored(&whole);
    assert_eq!(rig.in_flight(is_write), 6);
    rig.world.core.set_device_accepts_writes(1, true);
    for _ in 0..6 {
        rig.world.finish(0, Fate::Io(IoFault::Off));
    }
    assert_eq!(rig.in_flight(is_write), 6);
    rig.world.settle();
    assert_eq!((rig.world.core.device_usage(0).1, rig.world.core.device_usage(1).1), (0, 6));
    rig.world.evict_dram();
    assert_eq!(rig.hits(&whole), 6);
}

#[test]
fn a_device_that_is_tried_gets_one_page_a_try() {
    let mut rig = Rig::ssd(32, 64);
    rig.world.core.set_device_accepts_writes(0, false);
    let whole = chain(1, 6);
    rig.stored(&whole);
    for fate in [Fate::Io(IoFault::Off), Fate::Io(IoFault::Off), Fate::Good] {
        rig.world.core.set_device_intake(0, Intake::One);
        assert!(rig.world.core.spill_can_go_on());
        rig.world.pump();
        assert_eq!(writing(&rig), whole[..1]);
        assert_eq!(rig.world.core.device_intake(0), Intake::Nothing);
        rig.world.finish(0, fate);
        assert_eq!(rig.in_flight(is_write), 0);
    }
    assert_eq!(outcomes(&rig, SpillOutcome::Written), 1);
    rig.world.core.set_device_intake(0, Intake::All);
    rig.world.pump();
    assert_eq!(writing(&rig), whole[1..]);
    rig.world.settle();
    assert_eq!(outcomes(&rig, SpillOutcome::Written), 6);
}

#[test]
fn pages_that_come_back_may_be_forgotten() {
    let mut rig = Rig::ssd(32, 64);
    rig.stored(&chain(1, 4));
    for _ in 0..2 {
        rig.world.finish(0, Fate::Io(IoFault::Off));
    }
    let scope = rig.seat.scope;
    rig.world.ask(rig.seat.session, orbitkv_shm_protocol::record::RequestBody::Forget { scope });
    while let Some(at) = rig.world.work.iter().position(is_write) {
        rig.world.finish(at, Fate::Io(IoFault::Off));
    }
    rig.world.settle();
    assert_eq!(outcomes(&rig, SpillOutcome::Superseded), 4);
    assert!(rig.world.core.spill_is_drained());
}

/// Three pages a turn.
fn slow_to_drop(dram: u64) -> Rig {
    let config = CoreConfig { pages_dropped_per_turn: 3, ..config(dram) };
    Rig::new(config, &[device(1, 64 * 2 * PAGE)], spec("model", PAGE))
}

/// Goal: what hangs on a lost page holds nobody up, and is neither found nor written from the first
/// moment. Method: three pages a turn; between the turns the lost page is saved again, and another
/// prompt is served.
#[test]
fn what_hangs_on_a_lost_page_is_dropped_in_bounded_turns_and_unfindable_at_once() {
    let mut rig = slow_to_drop(64);
    let (whole, other) = (chain(1, 20), chain(2, 2));
    rig.stored_on_ssd_only(&whole);
    rig.stored(&other);
    rig.world.settle();
    let query = rig.query(rig.seat, &whole[..1]);
    let at = rig.world.work.iter().position(is_read).unwrap();
    rig.world.pumps = false;
    rig.world.finish(at, Fate::Io(IoFault::Checksum));
    assert_eq!(rig.world.ended(rig.seat.session, query).completion.pages, 0);
    let count = |rig: &Rig| rig.world.core.page_views().filter(|page| page.slot.is_some()).count();
    let found = |rig: &Rig| rig.world.core.page_views().filter(|page| page.indexed).count();
    assert_eq!((count(&rig), found(&rig)), (19 + 2, 2));
    assert!(rig.world.core.has_forgotten_pages());
    assert_eq!((rig.hits_at_once(&whole), rig.hits_at_once(&other)), (0, 2));
    let mut last = count(&rig);
    for _ in 0..3 {
        rig.world.pump();
        let now = count(&rig);
        assert!(now < last && now + 3 >= last, "{now} of {last}");
        last = now;
    }
    // The same pages begin a new life beside what is left of the first.
    rig.world.version = 1;
    let save = rig.world.save(rig.seat.session, rig.seat.region, &pages(&whole[..15]));
    rig.world.pump();
    rig.world.settle_only(is_copy(Direction::Save));
    assert_eq!(rig.world.ended(rig.seat.session, save).completion.pages, 15);
    assert_eq!(rig.hits_at_once(&whole), 15);
    rig.world.pumps = true;
    rig.world.settle();
    assert!(!rig.world.core.has_forgotten_pages());
    assert_eq!((count(&rig), rig.hits(&whole)), (15 + 2, 15));
    let mut world = rig.world.crash(|| true);
    world.core.check_laws();
    world.settle();
    assert_eq!(world.core.stats().recovered_pages, 15 + 2);
}

/// Goal: the same of what waits below a page that could not be written: it stays in DRAM, found all
/// the time, and none of it goes to SSD.
#[test]
fn what_waits_below_a_failed_write_is_given_up_in_bounded_turns_and_not_written() {
    let one_by_one =
        CoreConfig { writes_in_flight_max: 1, pages_dropped_per_turn: 3, ..config(64) };
    let mut rig = Rig::new(one_by_one, &[device(1, 64 * 2 * PAGE)], spec("model", PAGE));
    let whole = chain(1, 20);
    rig.stored(&whole);
    assert_eq!(writing(&rig), whole[..1]);
    rig.world.pumps = false;
    rig.world.finish(0, Fate::Io(IoFault::Checksum));
    assert_eq!(outcomes(&rig, SpillOutcome::Failed), 1);
    let mut last = 1;
    while rig.world.core.has_forgotten_pages() {
        rig.world.pump();
        rig.world.core.check_laws();
        let now = outcomes(&rig, SpillOutcome::Failed);
        assert!(now <= last + 3, "{now} after {last}");
        assert_eq!(rig.in_flight(is_write), 0);
        assert_eq!(rig.world.core.page_views().filter(|page| page.indexed).count(), 20);
        last = now;
    }
    assert_eq!(last, 20);
    rig.world.pumps = true;
    rig.world.settle();
    assert_eq!((rig.world.core.device_usage(0), rig.hits(&whole)), ((0, 0), 20));
}

/// A rig with the `reuse` policy whose tier of `slots` slots is full: else all is written.
fn choosy(dram: u64, slots: u64) -> Rig {
    let reuse = CoreConfig { spill_policy: SpillPolicy::Reuse, ..config(dram) };
    let mut rig = Rig::new(reuse, &[device(1, slots * 2 * PAGE)], spec("model", PAGE));
    rig.stored(&chain(0, slots as usize));
    rig.world.settle();
    assert_eq!(outcomes(&rig, SpillOutcome::Written), slots, "free slots cost nobody anything");
    rig
}

#[test]
fn the_reuse_policy_writes_what_was_hit_with_its_parents() {
    let mut rig = choosy(32, 8);
    let (once, again) = (chain(1, 3), chain(2, 6));
    rig.stored(&once);
    rig.stored(&again);
    assert_eq!(rig.in_flight(is_write), 0);
    assert_eq!(outcomes(&rig, SpillOutcome::SkippedByPolicy), 9);
    // A hit in the middle: parents are needed to find it again.
    let Seat { session, scope, .. } = rig.seat;
    let mode = orbitkv_shm_protocol::record::QueryMode::Demand;
    let middle = orbitkv_tests::world::pages_after(again[1], &again[2..4]);
    let query = rig.world.query(session, scope, mode, &middle);
    let lease = rig.world.ended(session, query).completion.lease.expect("a lease");
    rig.release(rig.seat, lease);
    rig.world.settle();
    assert_eq!(outcomes(&rig, SpillOutcome::Written), 8 + 4);
    rig.world.evict_dram();
    assert_eq!((rig.hits(&once), rig.hits(&again)), (0, 4));
}

/// What left before anybody asked for it and is computed again was wanted twice.
#[test]
fn the_reuse_policy_writes_what_is_saved_again_after_it_left() {
    let mut rig = choosy(8, 8);
    let again = chain(1, 6);
    rig.stored(&again);
    // Its tail leaves, its head stays.
    rig.stored(&chain(2, 4));
    assert_eq!(rig.world.core.gauges().history_keys, 2);
    let saved = rig.save(&again).completion;
    assert_eq!((saved.pages, saved.pages_present), (2, 4));
    rig.world.settle();
    assert_eq!(outcomes(&rig, SpillOutcome::Written), 8 + 6, "the tail, and the head it needs");
    assert_eq!(outcomes(&rig, SpillOutcome::SkippedByPolicy), 6 + 4);
    assert_eq!(rig.world.core.stats().spill_offered, 8 + 6 + 4 + 6);
    // Two of the chain between, and the six that gave up their slots.
    assert_eq!(rig.world.core.gauges().history_keys, 2 + 6);
    rig.world.evict_dram();
    assert_eq!((rig.hits(&again), rig.hits(&chain(2, 4))), (6, 0));
}

#[test]
fn a_forgotten_page_was_never_here() {
    let mut rig = choosy(8, 4);
    rig.stored(&chain(1, 6));
    rig.stored(&chain(2, 8));
    assert_eq!(rig.world.core.gauges().history_keys, 4, "as many as the tier could hold");
    let scope = rig.seat.scope;
    rig.world.ask(rig.seat.session, orbitkv_shm_protocol::record::RequestBody::Forget { scope });
    rig.world.settle();
    // Takes the slots that are free now.
    rig.stored(&chain(9, 4));
    rig.world.settle();
    rig.stored(&chain(1, 6));
    rig.world.settle();
    assert_eq!(outcomes(&rig, SpillOutcome::Written), 4 + 4);
    assert_eq!(outcomes(&rig, SpillOutcome::SkippedByPolicy), 6 + 8 + 6);
}

/// A budget of 96 slots a day: four at once, then one in a quarter of an hour.
fn on_a_budget(dram: u64) -> Rig {
    let bytes = 96 * 2 * PAGE;
    let config = CoreConfig { write_budget_bytes_a_day: Some(bytes), ..config(dram) };
    Rig::new(config, &[device(1, 64 * 2 * PAGE)], spec("model", PAGE))
}

#[test]
fn pages_over_the_write_budget_wait_for_it() {
    let mut rig = on_a_budget(32);
    let whole = chain(1, 10);
    rig.stored(&whole);
    rig.world.settle();
    assert_eq!(outcomes(&rig, SpillOutcome::Written), 4);
    let gauges = rig.world.core.gauges();
    assert_eq!((gauges.spill_pages, gauges.write_budget_bytes), (6, 0));
    assert!(!rig.world.core.spill_is_drained() && !rig.world.core.spill_can_go_on());
    let (mut written, mut early) = (4, 0);
    while !rig.world.core.spill_is_drained() {
        let next = rig.world.core.next_deadline().expect("it says when writes go on");
        assert!(next > rig.world.now);
        rig.world.advance(next - rig.world.now);
        if rig.in_flight(is_write) == 0 {
            // The deadline of the save, which has ended long since.
            early += 1;
            assert_eq!(early, 1, "writes go on when it says");
            continue;
        }
        rig.world.settle();
        written += 1;
        assert_eq!(outcomes(&rig, SpillOutcome::Written), written);
    }
    // The first needs a second's share, each other one what the one before it left owing.
    let quarter_of_an_hour = 900_000 * orbitkv_tests::rig::MILLISECOND;
    let passed = rig.world.now / quarter_of_an_hour;
    assert_eq!((written, passed), (10, 5));
    assert_eq!(rig.world.core.next_deadline(), None);
    rig.world.evict_dram();
    assert_eq!(rig.hits(&whole), 10);
}

#[test]
fn what_leaves_because_of_the_write_budget_is_counted_as_policy() {
    let mut rig = on_a_budget(8);
    rig.stored(&chain(1, 8));
    rig.world.settle();
    rig.stored(&chain(2, 8));
    rig.world.settle();
    assert_eq!(outcomes(&rig, SpillOutcome::Written), 4);
    assert_eq!(outcomes(&rig, SpillOutcome::SkippedByPolicy), 4);
    assert_eq!(outcomes(&rig, SpillOutcome::EvictedUnwritten), 0);
    assert_eq!(rig.hits(&chain(1, 8)), 4, "the tail went, the head is on SSD");
    // With budget again, what leaves unwritten is the device's fault again.
    rig.world.advance(3_600_000 * orbitkv_tests::rig::MILLISECOND);
    assert_eq!(rig.in_flight(is_write), 4);
    rig.stored(&chain(3, 4));
    assert_eq!(outcomes(&rig, SpillOutcome::SkippedByPolicy), 4 + 4);
    let stats = rig.world.core.stats();
    assert_eq!(stats.spill_offered, stats.spill.iter().sum::<u64>() + 4 + 4);
}

/// RES-11 c: a tier of one slot is rewritten, not thrashed.
#[test]
fn a_tier_of_one_page_writes_each_page_at_most_once() {
    let mut rig = Rig::ssd(64, 1);
    for branch in 0..100 {
        rig.stored(&chain(branch, 1));
        rig.world.settle();
    }
    let stats = rig.world.core.stats();
    assert!(stats.ssd_pages_written <= 100, "{}", stats.ssd_pages_written);
    assert_eq!(rig.world.core.device_usage(0).1, 1);
    // A chain: its root takes the slot, the rest has none that may go.
    let mut rig = Rig::ssd(64, 1);
    rig.stored(&chain(1, 50));
    rig.world.settle();
    assert_eq!(rig.world.core.stats().ssd_pages_written, 1);
    assert_eq!(rig.hits(&chain(1, 50)), 50);
}

/// COR-07: slots are reused while readers read, and nobody gets another page's bytes.
#[test]
fn a_tier_of_eight_slots_serves_right_bytes_or_misses() {
    let mut rig = Rig::ssd(16, 8);
    let mut rng = fastrand::Rng::with_seed(3);
    let readers: Vec<_> = (2..6).map(|engine| rig.sit(engine)).collect();
    let (mut hits, mut misses) = (0, 0);
    for round in 0..1500 {
        let save = rig.world.save(rig.seat.session, rig.seat.region, &pages(&chain(round, 1)));
        let reader = *rng.choice(&readers).expect("four");
        let wanted = chain(round.saturating_sub(rng.u64(1..30)), 1);
        let query = rig.query(reader, &wanted);
        for _ in 0..rng.usize(1..6) {
            if !rig.world.work.is_empty() {
                let at = rng.usize(..rig.world.work.len());
                rig.world.finish(at, Fate::Good);
            }
        }
        rig.world.settle_only(is_read);
        rig.world
            .settle_only(orbitkv_tests::world::is_copy(orbitkv_manager::core::Direction::Save));
        rig.world.ended(rig.seat.session, save);
        let found = rig.world.ended(reader.session, query).completion;
        match found.lease {
            Some(lease) => {
                let restore = rig.restore(reader, lease, &wanted, false);
                rig.world.settle_only(orbitkv_tests::world::is_copy(
                    orbitkv_manager::core::Direction::Restore,
                ));
                assert_eq!(rig.world.ended(reader.session, restore).completion.status, Status::Ok);
                hits += 1;
            }
            None => misses += 1,
        }
    }
    assert!(hits > 100 && misses > 100, "{hits} hits, {misses} misses");
    rig.world.settle();
    rig.assert_at_rest();
}

#[test]
fn a_device_that_takes_no_writes_keeps_what_it_has() {
    let mut rig = Rig::ssd(8, 8);
    let kept = chain(1, 8);
    rig.stored(&kept);
    rig.world.settle();
    rig.world.core.set_device_accepts_writes(0, false);
    for branch in 2..10 {
        rig.stored(&chain(branch, 8));
        assert_eq!(rig.in_flight(is_write), 0);
    }
    assert_eq!(rig.world.core.device_usage(0).1, 8, "no slot was given up for nothing");
    rig.world.core.set_device_accepts_writes(0, true);
    rig.world.pump();
    assert!(rig.in_flight(is_write) > 0);
}

/// A chain that is longer than the tier keeps every slot for what waits below: its end is given up,
/// so that every page has an outcome and the slots serve others.
#[test]
fn the_end_of_a_chain_that_the_tier_cannot_hold_does_not_wait_for_ever() {
    let mut rig = Rig::ssd(64, 16);
    rig.stored(&chain(1, 20));
    rig.world.settle();
    assert_eq!(rig.world.core.gauges().spill_pages, 0, "nothing waits for ever");
    assert_eq!(outcomes(&rig, SpillOutcome::Written), 16);
    assert_eq!(outcomes(&rig, SpillOutcome::EvictedUnwritten), 4);
    assert_eq!(rig.world.core.device_usage(0).1, 16, "no slot was given up for nothing");
    rig.stored(&chain(2, 4));
    rig.world.settle();
    assert_eq!(outcomes(&rig, SpillOutcome::Written), 20);
}

/// A full tier of one page size does not shut out another for ever.
#[test]
fn a_new_page_size_takes_the_coldest_region() {
    let mut rig = Rig::new(config(64), &[device(2, 16 * 2 * PAGE)], spec("model", PAGE));
    for branch in 0..8 {
        rig.stored(&chain(branch, 4));
        rig.world.settle();
    }
    assert_eq!(rig.world.core.device_usage(0).1, 32, "every slot is used, by whole chains");
    rig.world.evict_dram();
    let session = rig.seat.session;
    let large = rig.world.namespace(session, &spec("large", 3 * PAGE));
    let region = rig.world.region(session, large, 16);
    let save = rig.world.save(session, region, &pages(&chain(100, 3)));
    rig.world.settle();
    assert_eq!(rig.world.ended(session, save).completion.pages, 3);
    assert!(rig.world.core.spill_is_drained());
    rig.world.evict_dram();
    let mode = orbitkv_shm_protocol::record::QueryMode::Demand;
    let query = rig.world.query(session, large, mode, &pages(&chain(100, 3)));
    rig.world.settle();
    assert_eq!(rig.world.ended(session, query).completion.pages_ssd, 3);
    let hits: u32 = (0..8).map(|branch| rig.hits(&chain(branch, 4))).sum();
    assert!((8..32).contains(&hits), "one region's pages went: {hits}");
}

/// After a change of model the whole tier belongs to the new one, but for what is still used.
#[test]
fn a_new_page_size_takes_every_colder_region_and_no_hotter_one() {
    let mut rig = Rig::new(config(256), &[device(4, 16 * 2 * PAGE)], spec("model", PAGE));
    for branch in 0..16 {
        rig.stored(&chain(branch, 4));
        rig.world.settle();
    }
    assert_eq!(rig.world.core.device_usage(0).1, 64);
    let session = rig.seat.session;
    let large = rig.world.namespace(session, &spec("large", 3 * PAGE));
    let region = rig.world.region(session, large, 64);
    for branch in 0..40 {
        // The last region's chains stay in use.
        for used in 12..16 {
            assert_eq!(rig.hits(&chain(used, 4)), 4);
        }
        rig.world.evict_dram();
        rig.world.save(session, region, &pages(&chain(100 + branch, 1)));
        rig.world.settle();
    }
    // Three regions of eight slots; sixteen slots of the last region.
    assert_eq!(rig.world.core.device_usage(0).1, 3 * 8 + 16);
    let kept: u32 = (0..16).map(|branch| rig.hits(&chain(branch, 4))).sum();
    assert_eq!(kept, 16);
}

/// A page size that cannot get a slot holds up no other.
#[test]
fn a_size_without_slots_does_not_block_the_others() {
    let mut rig = Rig::new(config(64), &[device(1, 16 * 2 * PAGE)], spec("model", PAGE));
    let first = chain(1, 4);
    rig.stored(&first);
    rig.world.settle();
    // The only region's pages are leased where they are: no other size can have it.
    rig.lease(&first);
    let session = rig.seat.session;
    let large = rig.world.namespace(session, &spec("large", 3 * PAGE));
    let region = rig.world.region(session, large, 16);
    rig.world.save(session, region, &pages(&chain(100, 3)));
    rig.world.settle();
    assert!(!rig.world.core.spill_is_drained());
    rig.stored(&chain(2, 4));
    rig.world.settle();
    assert_eq!(outcomes(&rig, SpillOutcome::Written), 8);
}

/// MET-03 and MET-01: every byte and every lookup is counted, exactly.
#[test]
fn bytes_and_lookups_are_counted_exactly() {
    const MIB: u64 = 1 << 20;
    let mut rig = Rig::new(generous(32 * MIB), &[device(1, 16 * MIB)], spec("model", MIB));
    let chain = chain(1, 5);
    rig.stored_on_ssd_only(&chain);
    let lease = rig.lease(&chain);
    let first = rig.restore(rig.seat, lease, &chain, true);
    let again = rig.restore(rig.seat, lease, &chain[..2], false);
    rig.world.settle();
    rig.world.ended(rig.seat.session, first);
    rig.world.ended(rig.seat.session, again);
    let stats = rig.world.core.stats();
    assert_eq!((stats.bytes_saved, stats.ssd_bytes_written), (5_242_880, 5_242_880));
    assert_eq!((stats.ssd_bytes_read, stats.bytes_restored), (5_242_880, 7_340_032));
    assert_eq!((stats.pages_restored, stats.pages_saved), (7, 5));
    // An image that does not fill its last 4 KiB counts its own bytes.
    let mut rig = Rig::new(generous(16 * PAGE), &[], spec("model", 5000));
    let chain = orbitkv_tests::world::chain(1, 1);
    rig.stored(&chain);
    let lease = rig.lease(&chain);
    rig.restore(rig.seat, lease, &chain, false);
    rig.world.settle();
    let stats = rig.world.core.stats();
    assert_eq!((stats.bytes_saved, stats.bytes_restored), (5000, 5000));
    let mut rig = Rig::dram(16);
    let chain = orbitkv_tests::world::chain(1, 10);
    rig.stored(&chain[..6]);
    for _ in 0..3 {
        assert_eq!(rig.hits(&chain), 6);
    }
    let stats = rig.world.core.stats();
    assert_eq!((stats.lookup_pages, stats.lookup_hits_dram), (30, 18));
}

#[test]
fn a_page_that_is_being_written_stays_in_dram() {
    let mut rig = Rig::ssd(4, 16);
    let first = chain(1, 4);
    rig.stored(&first);
    assert_eq!(rig.in_flight(is_write), 4);
    let refused = rig.save(&chain(2, 1)).completion;
    assert_eq!((refused.status, refused.pages_refused), (Status::Error, 1));
    rig.world.settle();
    assert_eq!(rig.hits(&first), 4);
    rig.stored(&chain(2, 1));
}

/// A device that does not answer keeps the writes that it has, and the others are given all
/// the rest. Nothing is evicted while it still has free slots; when it takes no more, the others go on
/// with their own.
#[test]
fn writes_to_a_silent_device_hold_up_nobody() {
    let config = CoreConfig { writes_in_flight_max: 4, ..config(64) };
    let mut rig = Rig::new(config, &[device(1, 16 * 2 * PAGE); 2], spec("model", PAGE));
    let on = |device: u16| move |work: &Work| matches!(work, Work::Write { slot, .. } if slot.device == device);
    for branch in 0..40 {
        rig.stored(&chain(branch, 1));
        rig.world.settle_only(on(1));
    }
    assert_eq!(rig.in_flight(on(0)), 4);
    assert_eq!(outcomes(&rig, SpillOutcome::Written), 16, "all slots of the other device");
    let stats = rig.world.core.stats();
    assert_eq!((stats.ssd_evictions, rig.world.core.gauges().spill_pages), (0, 20));
    // It is known now that it does not answer.
    rig.world.core.set_device_accepts_writes(0, false);
    rig.world.pump();
    rig.world.settle_only(on(1));
    assert_eq!(outcomes(&rig, SpillOutcome::Written), 36);
    assert_eq!(rig.world.core.stats().ssd_evictions, 20);
    assert_eq!(rig.in_flight(on(0)), 4);
    // And it answers after all.
    rig.world.core.set_device_accepts_writes(0, true);
    rig.world.settle();
    assert_eq!(outcomes(&rig, SpillOutcome::Written), 40);
    assert!(rig.world.core.spill_is_drained());
}
