//! Goal: a forgotten namespace is never hit again: not in DRAM, not on SSD, not through work that
//! was in flight, not after a restart. Method: a forget at each moment of a page's life.

use orbitkv_manager::core::limits::FORGETS_UNDER_WAY_MAX;
use orbitkv_manager::core::{
    CoreConfig, Direction, Effects, IoFault, RegionGeometry, SpillOutcome,
};
use orbitkv_shm_protocol::ids::OperationId;
use orbitkv_shm_protocol::record::{Code, PageOutcome, QueryMode, RequestBody, Status};
use orbitkv_tests::rig::{MILLISECOND, PAGE, Rig, Seat, generous};
use orbitkv_tests::world::{
    Fate, Work, World, chain, device, is_copy, is_read, is_write, pages, spec,
};

fn forget(rig: &mut Rig) -> OperationId {
    let Seat { session, scope, .. } = rig.seat;
    rig.world.ask(session, RequestBody::Forget { scope })
}

fn is_record(work: &Work) -> bool {
    matches!(work, Work::Forget { .. })
}

#[test]
fn a_forget_without_ssd_ends_at_once_and_counts() {
    let mut rig = Rig::dram(16);
    rig.stored(&chain(1, 3));
    rig.stored(&chain(2, 2));
    let operation = forget(&mut rig);
    let ended = rig.world.ended(rig.seat.session, operation).completion;
    assert_eq!((ended.status, ended.pages, ended.bytes), (Status::Ok, 5, 5 * PAGE));
    assert_eq!(rig.world.core.gauges().pool_used_bytes, 0, "its space is free");
    assert_eq!((rig.hits(&chain(1, 3)), rig.hits(&chain(2, 2))), (0, 0));
    rig.stored(&chain(1, 3));
    assert_eq!(rig.hits(&chain(1, 3)), 3);
}

/// ENG-11: saves in flight are refused, whoever made them, and other namespaces are untouched.
#[test]
fn saves_in_flight_are_refused() {
    let mut rig = Rig::ssd(16, 16);
    let other = rig.sit(2);
    let neighbour = rig.world.namespace(other.session, &spec("neighbour", PAGE));
    let its_region = rig.world.region(other.session, neighbour, 8);
    let page = chain(7, 1);
    rig.world.save(other.session, its_region, &pages(&page));
    rig.world.settle();
    let chain = chain(1, 4);
    let mine = rig.world.save(rig.seat.session, rig.seat.region, &pages(&chain));
    let theirs = rig.world.save(other.session, other.region, &pages(&chain[..2]));
    let operation = forget(&mut rig);
    // A save that begins afterwards is another matter.
    let later = rig.world.save(other.session, other.region, &pages(&chain[..1]));
    rig.world.settle();
    for (session, operation, pages) in [(rig.seat.session, mine, 4), (other.session, theirs, 2)] {
        let ended = rig.world.ended(session, operation);
        assert_eq!(
            (ended.completion.status, ended.completion.code),
            (Status::Error, Code::Forgotten)
        );
        assert_eq!(ended.outcomes(), vec![(PageOutcome::Refused, Code::Forgotten); pages]);
    }
    assert_eq!(rig.world.ended(rig.seat.session, operation).completion.status, Status::Ok);
    assert_eq!(rig.world.ended(other.session, later).completion.pages, 1);
    assert_eq!(rig.hits(&chain), 1);
    let query = rig.world.query(other.session, neighbour, QueryMode::Demand, &pages(&page));
    assert_eq!(rig.world.ended(other.session, query).completion.pages, 1);
}

#[test]
fn it_ends_when_every_device_has_recorded_it() {
    let mut rig = Rig::ssd(16, 16);
    let chain = chain(1, 4);
    rig.stored_on_ssd_only(&chain);
    let operation = forget(&mut rig);
    assert_eq!(rig.hits_at_once(&chain), 0, "unfindable at once");
    assert!(rig.world.take_ended(rig.seat.session, operation).is_none());
    rig.world.settle_only(is_record);
    let ended = rig.world.ended(rig.seat.session, operation).completion;
    assert_eq!((ended.status, ended.pages), (Status::Ok, 4));
    assert_eq!(rig.world.core.device_usage(0), (0, 0), "its slots are free");
}

#[test]
fn a_record_that_fails_is_told() {
    let mut rig = Rig::ssd(16, 16);
    rig.stored_on_ssd_only(&chain(1, 4));
    let operation = forget(&mut rig);
    rig.world.finish(0, Fate::Io(IoFault::Errno(5)));
    let ended = rig.world.ended(rig.seat.session, operation).completion;
    assert_eq!((ended.status, ended.code, ended.pages), (Status::Partial, Code::IoError, 4));
}

/// Goal: who forgets waits no longer than he said for a device that does not answer, and a closed
/// session not at all; the record is made all the same. Method: the record stays under way.
#[test]
fn a_device_that_does_not_answer_holds_a_forget_up_to_its_deadline() {
    let mut rig = Rig::ssd(16, 16);
    rig.stored_on_ssd_only(&chain(1, 4));
    let Seat { session, scope, .. } = rig.seat;
    let operation = rig.world.request(session, RequestBody::Forget { scope }, &[], 5);
    rig.world.advance(4 * MILLISECOND);
    assert!(rig.world.take_ended(session, operation).is_none());
    rig.world.advance(MILLISECOND);
    let ended = rig.world.ended(session, operation).completion;
    assert_eq!((ended.status, ended.code, ended.pages), (Status::Partial, Code::Deadline, 4));
    let other = rig.sit(2);
    rig.world.ask(other.session, RequestBody::Forget { scope: other.scope });
    rig.world.close(other.session);
    assert_eq!((rig.in_flight(is_record), rig.world.core.gauges().sessions), (2, 1));
    rig.world.settle();
    rig.assert_at_rest();
    let mut world = rig.world.crash(|| true);
    assert_eq!(hits_after_restart(&mut world, &chain(1, 4)), 0);
}

/// What a device keeps of them is bounded, however soon those who asked give up.
#[test]
fn forgets_that_nobody_waits_for_any_more_are_bounded() {
    let mut rig = Rig::ssd(16, 16);
    rig.stored_on_ssd_only(&chain(1, 4));
    rig.world.check_every = 0;
    let Seat { session, scope, .. } = rig.seat;
    for _ in 0..FORGETS_UNDER_WAY_MAX {
        let operation = rig.world.request(session, RequestBody::Forget { scope }, &[], 1);
        rig.world.advance(MILLISECOND);
        assert_eq!(rig.world.ended(session, operation).completion.code, Code::Deadline);
    }
    let refused = forget(&mut rig);
    let ended = rig.world.ended(session, refused).completion;
    assert_eq!((ended.status, ended.code), (Status::Error, Code::OverBudget));
    assert_eq!(rig.in_flight(is_record), FORGETS_UNDER_WAY_MAX);
    assert!(!rig.world.core.is_quiet(), "a stop waits for them");
    rig.world.finish(0, Fate::Good);
    let operation = forget(&mut rig);
    assert!(rig.world.take_ended(session, operation).is_none(), "there is room again");
    while rig.in_flight(is_record) > 0 {
        let last = rig.world.work.len() - 1;
        rig.world.finish(last, Fate::Good);
    }
    assert_eq!(rig.world.ended(session, operation).completion.status, Status::Ok);
    rig.assert_at_rest();
    assert!(rig.world.core.is_quiet());
}

#[test]
fn writes_and_reads_in_flight_end_without_bringing_it_back() {
    let mut rig = Rig::ssd(16, 16);
    let (cold, hot) = (chain(1, 3), chain(2, 3));
    rig.stored_on_ssd_only(&cold);
    let query = rig.query(rig.seat, &cold);
    rig.stored(&hot);
    assert_eq!((rig.in_flight(is_read), rig.in_flight(is_write)), (3, 3));
    let operation = forget(&mut rig);
    assert!(rig.world.core.gauges().pool_draining_bytes > 0, "I/O still touches its memory");
    rig.world.settle();
    assert_eq!(rig.world.ended(rig.seat.session, operation).completion.pages, 6);
    // The query was asked before: its lease may be used to the end.
    let found = rig.world.ended(rig.seat.session, query).completion;
    let restore = rig.restore(rig.seat, found.lease.expect("a lease"), &cold, false);
    rig.world.settle();
    assert_eq!(rig.world.ended(rig.seat.session, restore).completion.pages, 3);
    assert_eq!((rig.hits(&cold), rig.hits(&hot)), (0, 0));
    rig.assert_at_rest();
    assert_eq!(rig.world.core.gauges().pages, 0);
    assert_eq!(rig.world.core.device_usage(0), (0, 0));
}

#[test]
fn a_restart_does_not_remember_what_was_recorded_as_forgotten() {
    let mut rig = Rig::ssd(16, 16);
    let (old, new) = (chain(1, 3), chain(2, 3));
    rig.stored_on_ssd_only(&old);
    let operation = forget(&mut rig);
    rig.world.settle();
    assert_eq!(rig.world.ended(rig.seat.session, operation).completion.status, Status::Ok);
    rig.stored_on_ssd_only(&new);
    let mut world = rig.world.crash(|| true);
    assert_eq!(hits_after_restart(&mut world, &old), 0);
    assert_eq!(hits_after_restart(&mut world, &new), 3);
}

fn hits_after_restart(world: &mut World, hashes: &[orbitkv_shm_protocol::ids::PageHash]) -> u32 {
    let session = world.attach(1);
    let scope = world.namespace(session, &spec("model", PAGE));
    let query = world.query(session, scope, QueryMode::Demand, &pages(hashes));
    world.settle();
    world.ended(session, query).completion.pages
}

/// Each forget took a place of the limited number of namespaces.
#[test]
fn forgetting_again_and_again_uses_nothing_up() {
    let mut rig = Rig::dram(16);
    for round in 0..5000 {
        if round % 100 == 0 {
            rig.stored(&chain(1, 2));
        }
        let operation = forget(&mut rig);
        let pages = if round % 100 == 0 { 2 } else { 0 };
        assert_eq!(rig.world.ended(rig.seat.session, operation).completion.pages, pages);
    }
    let session = rig.seat.session;
    rig.world.core.define_namespace(session, &spec("another", PAGE)).expect("room for one more");
    assert!(rig.world.core.namespace_views().count() <= 2);
}

#[test]
fn a_save_is_stopped_at_the_page_that_comes_after_the_forget() {
    let mut rig = Rig::dram(16);
    let first = chain(1, 2);
    rig.stored(&first);
    // The branch's parent goes with its namespace.
    let branch = orbitkv_tests::world::extend(Some(first[1]), 3, 2);
    let entries = orbitkv_tests::world::pages_after(first[1], &branch);
    let save = rig.world.save(rig.seat.session, rig.seat.region, &entries);
    forget(&mut rig);
    rig.stored(&first);
    rig.world.settle_only(is_copy(Direction::Save));
    let ended = rig.world.ended(rig.seat.session, save);
    assert_eq!(ended.completion.code, Code::Forgotten);
    assert_eq!(rig.world.core.gauges().pages, 2);
    rig.assert_at_rest();
}

/// A rig that drops two pages a turn, with turns only when the test asks for them.
fn slow_to_drop(devices: &[RegionGeometry]) -> Rig {
    let config = CoreConfig { pages_dropped_per_turn: 2, ..generous(64 * PAGE) };
    Rig::new(config, devices, spec("model", PAGE))
}

/// Goal: millions of forgotten pages hold nobody up, and are unfindable from the first moment.
/// Method: two pages a turn; between the turns the same pages are saved and found again.
#[test]
fn a_large_forget_is_dropped_in_bounded_turns_and_unfindable_at_once() {
    let mut rig = slow_to_drop(&[]);
    let (old, branch) = (chain(1, 9), chain(2, 4));
    rig.stored(&old);
    rig.stored(&branch);
    rig.world.pumps = false;
    let operation = forget(&mut rig);
    let ended = rig.world.ended(rig.seat.session, operation).completion;
    assert_eq!((ended.status, ended.pages, ended.bytes), (Status::Ok, 13, 13 * PAGE));
    assert!(rig.world.core.has_forgotten_pages());
    assert_eq!((rig.hits_at_once(&old), rig.hits_at_once(&branch)), (0, 0));
    let count = |rig: &Rig| rig.world.core.page_views().count();
    for left in [11, 9, 7] {
        rig.world.pump();
        assert_eq!(count(&rig), left);
    }
    // The next life of the same pages begins beside what is left of the first.
    rig.world.version = 1;
    let save = rig.world.save(rig.seat.session, rig.seat.region, &pages(&old[..5]));
    rig.world.pump();
    rig.world.settle_only(is_copy(Direction::Save));
    assert_eq!(rig.world.ended(rig.seat.session, save).completion.pages, 5);
    assert_eq!(count(&rig), 5 + 5);
    assert_eq!(rig.hits_at_once(&old), 5);
    // Forgotten again before the first are gone.
    let operation = forget(&mut rig);
    assert_eq!(rig.world.ended(rig.seat.session, operation).completion.pages, 5);
    assert_eq!(rig.hits_at_once(&old), 0);
    let mut turns = 0;
    while rig.world.core.has_forgotten_pages() {
        rig.world.pump();
        turns += 1;
        assert!(turns <= 6, "{} pages are left", count(&rig));
    }
    rig.world.pumps = true;
    rig.world.advance(60_000_000_000);
    rig.assert_at_rest();
    assert_eq!((count(&rig), rig.world.core.gauges().pool_used_bytes), (0, 0));
}

/// Goal: what waits to be dropped never gets to SSD, where a restart would find it under a younger
/// generation than the forget's. Method: one write in flight, the rest of the chain waits for it.
#[test]
fn forgotten_pages_are_not_written_any_more() {
    let config =
        CoreConfig { pages_dropped_per_turn: 1, writes_in_flight_max: 1, ..generous(64 * PAGE) };
    let mut rig = Rig::new(config, &[device(1, 64 * PAGE)], spec("model", PAGE));
    let old = chain(1, 9);
    rig.stored(&old);
    assert_eq!(rig.in_flight(is_write), 1);
    let operation = forget(&mut rig);
    while let Some(at) = rig.world.work.iter().position(is_write) {
        assert!(rig.world.core.has_forgotten_pages());
        rig.world.finish(at, Fate::Good);
    }
    assert_eq!(rig.world.core.stats().ssd_pages_written, 1, "only what was under way");
    rig.world.settle();
    assert_eq!(rig.world.ended(rig.seat.session, operation).completion.status, Status::Ok);
    assert_eq!(rig.world.core.stats().spill[SpillOutcome::Superseded as usize], 8);
    assert_eq!(rig.world.core.device_usage(0), (0, 0));
    let mut world = rig.world.crash(|| true);
    assert_eq!(hits_after_restart(&mut world, &old), 0);
}

/// Goal: to evict everything looks at a bounded number of pages a turn, and ends although engines
/// go on saving. Method: a leased chain that stays, a new page after each turn.
#[test]
fn an_eviction_of_everything_goes_in_bounded_turns_and_ends() {
    let mut rig = slow_to_drop(&[]);
    let held = chain(1, 3);
    rig.stored(&held);
    rig.stored(&chain(2, 11));
    rig.lease(&held);
    let mut eviction = rig.world.core.begin_eviction();
    let mut turns = 0;
    let evicted = loop {
        let mut out = Effects::default();
        let before = rig.world.core.page_views().count();
        let evicted = rig.world.core.evict_some(&mut eviction, &mut out);
        assert!(out.list.is_empty() && rig.world.core.page_views().count() + 2 >= before);
        turns += 1;
        match evicted {
            Some(evicted) => break evicted,
            None if turns < 20 => rig.stored(&chain(100 + turns, 1)),
            None => assert!(turns < 60, "it never ends"),
        }
    };
    assert_eq!((evicted.pages, evicted.bytes), (11, 11 * PAGE));
    assert_eq!(evicted.pages_kept as usize, rig.resident());
    assert_eq!((rig.hits(&held), rig.hits(&chain(2, 11)), rig.hits(&chain(101, 1))), (3, 0, 1));
}
