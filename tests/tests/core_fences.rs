//! Goal: nothing is copied before the event that it waits for, an event belongs to one operation, and
//! an engine whose events do not come holds up nobody else. Layers are copied in order. Method: events
//! that pass late or never, beside engines without any.

use orbitkv_manager::core::{CoreConfig, CoreRefusal, Direction};
use orbitkv_shm_protocol::ids::{LeaseId, OperationId, SessionId};
use orbitkv_shm_protocol::record::{Code, QueryMode, RequestBody, Status};
use orbitkv_tests::rig::{MILLISECOND, PAGE, Rig, Seat, generous};
use orbitkv_tests::world::{Fate, Work, World, chain, is_copy, pages, spec};

/// One page a copy command.
fn page_by_page(pool: u64) -> Rig {
    let config = CoreConfig {
        copy_quantum_bytes: PAGE,
        gpu_copy_quantum_bytes: PAGE,
        ..generous(pool * PAGE)
    };
    Rig::new(config, &[], spec("model", PAGE))
}

/// A save of a chain of its own that waits for `event`.
fn save_after(rig: &mut Rig, branch: u64, len: usize, event: u32) -> OperationId {
    let Seat { session, region, .. } = rig.seat;
    rig.world.save_after(session, region, &pages(&chain(branch, len)), 0, Some(event))
}

fn code_of(world: &mut World, session: SessionId, operation: OperationId) -> Code {
    world.ended(session, operation).completion.code
}

/// Events that copies in flight wait for.
fn waited_for(rig: &Rig, wanted: SessionId) -> Vec<u32> {
    let fence = |work: &Work| match work {
        Work::Copy { session, fence, .. } if *session == wanted => fence.map(|fence| fence.index),
        _ => None,
    };
    rig.world.work.iter().filter_map(fence).collect()
}

#[test]
fn a_save_from_a_fenced_region_names_a_free_event_of_its_session() {
    let mut rig = Rig::dram(16);
    let Seat { session, region, .. } = rig.seat;
    let fenced = rig.world.fenced_region(session, rig.seat.scope, 8);
    let entries = pages(&chain(1, 2));
    let body = |region, fence| RequestBody::Save { region, fence };
    let ask = |rig: &mut Rig, session, region, fence| {
        let operation = rig.world.request(session, body(region, fence), &entries, 0);
        rig.world.take_ended(session, operation).map(|ended| ended.completion.code)
    };
    assert_eq!(ask(&mut rig, session, fenced, None), Some(Code::BadFence));
    assert_eq!(ask(&mut rig, session, fenced, Some(0)), Some(Code::BadFence));
    assert_eq!((rig.world.events(session, 2), rig.world.events(session, 1)), (0, 2));
    for unknown in [3, u32::MAX] {
        assert_eq!(ask(&mut rig, session, fenced, Some(unknown)), Some(Code::BadFence));
        assert_eq!(ask(&mut rig, session, region, Some(unknown)), Some(Code::BadFence));
    }
    // Those of another session are not this one's.
    let other = rig.sit(1);
    assert_eq!(ask(&mut rig, other.session, other.region, Some(0)), Some(Code::BadFence));
    // An empty save takes none.
    let none = rig.world.request(session, body(fenced, Some(1)), &[], 0);
    assert_eq!(code_of(&mut rig.world, session, none), Code::None);

    let save = save_after(&mut rig, 1, 2, 1);
    let lease_of = |operation| RequestBody::Restore {
        region: fenced,
        lease: LeaseId(operation),
        offset: 0,
        fence: Some(1),
        keep: false,
        by_layer: false,
    };
    assert_eq!(
        ask(&mut rig, session, fenced, Some(1)),
        Some(Code::BadFence),
        "it has an operation"
    );
    let restore = rig.world.request(session, lease_of(0), &entries, 0);
    assert_eq!(code_of(&mut rig.world, session, restore), Code::BadFence);
    rig.world.settle();
    assert_eq!(code_of(&mut rig.world, session, save), Code::None);
    let again = rig.world.save_after(session, fenced, &pages(&chain(2, 2)), 0, Some(1));
    rig.world.settle();
    assert_eq!(code_of(&mut rig.world, session, again), Code::None);
    rig.assert_at_rest();
}

#[test]
fn the_pool_of_events_is_bounded() {
    let config = CoreConfig { events_per_session_max: 5, ..generous(16 * PAGE) };
    let mut rig = Rig::new(config, &[], spec("model", PAGE));
    let session = rig.seat.session;
    assert_eq!(rig.world.events(session, 3), 0);
    let refusal = CoreRefusal::LimitReached { what: "event", limit: 5 };
    assert_eq!(rig.world.core.register_events(session, 3), Err(refusal));
    assert_eq!(rig.world.events(session, 2), 3);
    rig.world.close(session);
    assert_eq!(rig.world.core.register_events(session, 1), Err(CoreRefusal::UnknownSession));
}

/// Goal: no command is on its way that does not wait while the event has not passed, and afterwards
/// none waits.
#[test]
fn the_first_copy_waits_alone_and_the_others_need_not() {
    let mut rig = page_by_page(16);
    let session = rig.seat.session;
    rig.world.events(session, 1);
    let save = save_after(&mut rig, 1, 5, 0);
    assert_eq!(waited_for(&rig, session), [0]);
    assert_eq!(rig.in_flight(is_copy(Direction::Save)), 1);
    rig.world.pass(session, 0);
    rig.world.finish(0, Fate::Good);
    assert_eq!(rig.in_flight(is_copy(Direction::Save)), 2);
    assert!(waited_for(&rig, session).is_empty());
    rig.world.settle();
    assert_eq!(rig.world.ended(session, save).completion.pages, 5);
    assert_eq!(rig.hits(&chain(1, 5)), 5);
}

#[test]
fn an_engine_whose_events_do_not_come_holds_up_nobody() {
    let mut rig = page_by_page(64);
    let session = rig.seat.session;
    rig.world.events(session, 8);
    let held = chain(9, 4);
    rig.stored(&held);
    let lease = rig.lease(&held);
    let saves: Vec<_> = (0..6).map(|event| save_after(&mut rig, event.into(), 3, event)).collect();
    let Seat { session, region, .. } = rig.seat;
    let restores: Vec<_> = [6, 7]
        .map(|event| {
            let ask = (0, &pages(&held)[..]);
            rig.world.restore_after(session, region, lease, ask, true, (Some(event), false))
        })
        .to_vec();
    assert_eq!(waited_for(&rig, session), [0, 1, 6, 7]);
    // Another engine, and the same one where it does not wait.
    let other = rig.sit(2);
    for seat in [other, rig.seat] {
        let entries = pages(&chain(20 + u64::from(seat.session.0), 6));
        let save = rig.world.save(seat.session, seat.region, &entries);
        rig.world.settle_only(|work| matches!(work, Work::Copy { fence: None, .. }));
        assert_eq!(code_of(&mut rig.world, seat.session, save), Code::None);
    }
    let restore = rig.restore(rig.seat, lease, &held, true);
    rig.world.settle_only(|work| matches!(work, Work::Copy { fence: None, .. }));
    assert_eq!(code_of(&mut rig.world, session, restore), Code::None);
    assert_eq!(waited_for(&rig, session), [0, 1, 6, 7]);
    // They go on in turn.
    rig.world.pass(session, 1);
    rig.world.finish(1, Fate::Good);
    assert!(waited_for(&rig, session).contains(&2));
    rig.world.settle();
    for operation in saves.into_iter().chain(restores) {
        assert_eq!(code_of(&mut rig.world, session, operation), Code::None);
    }
    rig.release(rig.seat, lease);
    rig.assert_at_rest();
}

/// Goal: whoever is held is woken however the one before it ends. Method: two wait at the device, two
/// more are held; of those at the device and of the held one each is stopped.
#[test]
fn held_operations_are_stopped_and_woken() {
    let mut rig = page_by_page(64);
    let session = rig.seat.session;
    rig.world.events(session, 5);
    let saves: Vec<_> = (0..5).map(|event| save_after(&mut rig, event.into(), 2, event)).collect();
    rig.cancel(rig.seat, saves[2]);
    assert_eq!(code_of(&mut rig.world, session, saves[2]), Code::Cancelled, "nothing of it runs");
    rig.cancel(rig.seat, saves[0]);
    assert!(rig.world.take_ended(session, saves[0]).is_none(), "the device still has it");
    assert!(rig.world.client(session).events[0].given_up);
    rig.world.finish(0, Fate::Good);
    assert_eq!(code_of(&mut rig.world, session, saves[0]), Code::Cancelled);
    assert_eq!(waited_for(&rig, session), [1, 3]);
    // The event of one that has ended may be used at once.
    let again = save_after(&mut rig, 7, 2, 0);
    rig.world.settle();
    for operation in [saves[1], saves[3], saves[4], again] {
        assert_eq!(code_of(&mut rig.world, session, operation), Code::None);
    }
    rig.assert_at_rest();
}

#[test]
fn what_waits_too_long_ends_with_its_deadline() {
    let mut rig = Rig::dram(16);
    let Seat { session, region, .. } = rig.seat;
    rig.world.events(session, 2);
    let entries = pages(&chain(1, 2));
    let asked = rig.world.now;
    let late = rig.world.save_after(session, region, &entries, 20, Some(0));
    let Work::Copy { fence: Some(fence), .. } = rig.world.work[0] else { panic!("no fence") };
    assert_eq!(fence.until, asked + 20 * MILLISECOND);
    // The device says so, or time does: the same to the engine.
    rig.world.now += 20 * MILLISECOND;
    rig.world.finish(0, Fate::Good);
    let ended = rig.world.ended(session, late);
    assert_eq!((ended.completion.status, ended.completion.code), (Status::Error, Code::Deadline));
    assert!(ended.outcomes().iter().all(|(_, code)| *code == Code::Deadline));
    let late = rig.world.save_after(session, region, &entries, 20, Some(1));
    rig.world.advance(20 * MILLISECOND);
    assert!(rig.world.client(session).events[1].given_up);
    rig.world.finish(0, Fate::Good);
    assert_eq!(code_of(&mut rig.world, session, late), Code::Deadline);
    assert_eq!(rig.hits(&chain(1, 2)), 0);
    rig.assert_at_rest();
}

#[test]
fn a_dead_engines_events_are_waited_for_no_longer() {
    let mut rig = page_by_page(64);
    let session = rig.seat.session;
    rig.world.events(session, 4);
    for event in 0..4 {
        save_after(&mut rig, event.into(), 2, event);
    }
    rig.world.close(session);
    assert_eq!(waited_for(&rig, session), [0, 1]);
    let events = &rig.world.client(session).events;
    assert!(events[0].given_up && events[1].given_up);
    rig.world.settle();
    assert!(!rig.world.clients.contains_key(&session.0), "its session has not ended");
    rig.assert_at_rest();
}

/// Copies of restores in flight: pages, whether by layer, whether the done words come with it.
fn restores(rig: &Rig) -> Vec<(usize, bool, bool)> {
    let of = |work: &Work| match work {
        Work::Copy { direction: Direction::Restore, pages, by_layer, done, .. } => {
            Some((pages.len(), *by_layer, done.is_some()))
        }
        _ => None,
    };
    rig.world.work.iter().filter_map(of).collect()
}

fn by_layer(rig: &mut Rig, lease: LeaseId, branch: u64) -> OperationId {
    let Seat { session, region, .. } = rig.seat;
    let entries = pages(&chain(branch, 12));
    rig.world.restore_after(session, region, lease, (0, &entries), true, (None, true))
}

#[test]
fn what_is_in_dram_goes_out_by_layer_in_one_copy_beside_all_others() {
    let mut rig = page_by_page(64);
    let session = rig.seat.session;
    rig.stored(&chain(1, 12));
    let lease = rig.lease(&chain(1, 12));
    let operations: Vec<_> = (0..4).map(|_| by_layer(&mut rig, lease, 1)).collect();
    let usual = rig.restore(rig.seat, lease, &chain(1, 12), true);
    // Two of a session at a time; they count among no others.
    assert_eq!(restores(&rig)[..2], [(12, true, true); 2]);
    assert_eq!(restores(&rig)[2..], [(1, false, false); 2]);
    rig.world.settle_only(|work| matches!(work, Work::Copy { by_layer: false, .. }));
    assert_eq!(code_of(&mut rig.world, session, usual), Code::None);
    rig.world.settle();
    for operation in operations {
        assert_eq!(rig.world.ended(session, operation).completion.pages, 12);
    }
    rig.release(rig.seat, lease);
    rig.assert_at_rest();
}

#[test]
fn what_comes_from_ssd_streams_and_its_last_copy_brings_the_done_words() {
    let mut rig = Rig::ssd(64, 64);
    let session = rig.seat.session;
    let hashes = chain(1, 12);
    rig.stored_on_ssd_only(&hashes);
    let query = rig.world.query(session, rig.seat.scope, QueryMode::Candidate, &pages(&hashes));
    let lease = rig.world.ended(session, query).completion.lease.expect("a lease");
    let restore = by_layer(&mut rig, lease, 1);
    let mut copies = Vec::new();
    while let Some(at) = rig.world.work.iter().position(|_| true) {
        if let Work::Copy { pages, by_layer, done, .. } = &rig.world.work[at] {
            copies.push((pages.len(), *by_layer, done.is_some()));
        }
        rig.world.finish(at, Fate::Good);
    }
    assert!(copies.len() > 1 && copies.iter().all(|copy| copy.1), "{copies:?}");
    let last: Vec<_> = copies.iter().map(|copy| copy.2).collect();
    assert!(last.is_sorted() && last.iter().filter(|last| **last).count() == 1, "{copies:?}");
    assert_eq!(rig.world.ended(session, restore).completion.pages, 12);
}

/// Only what the engine did before the event is seen, by way of the layers too.
#[test]
fn a_restore_by_layer_waits_for_its_event() {
    let mut rig = page_by_page(64);
    let Seat { session, region, .. } = rig.seat;
    rig.world.events(session, 1);
    rig.stored(&chain(1, 12));
    let lease = rig.lease(&chain(1, 12));
    let ask = (0, &pages(&chain(1, 12))[..]);
    let restore = rig.world.restore_after(session, region, lease, ask, false, (Some(0), true));
    assert_eq!((restores(&rig), waited_for(&rig, session)), (vec![(12, true, true)], vec![0]));
    rig.world.settle();
    assert_eq!(rig.world.ended(session, restore).completion.pages, 12);
    rig.assert_at_rest();
}
