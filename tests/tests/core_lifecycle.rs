//! Goal: nothing is unmapped, ended or reported as ended while a copy may still touch it. Method:
//! unregister, drain, cancel and death with copies in flight.

use orbitkv_manager::core::{CopyFault, CoreConfig, Direction};
use orbitkv_shm_protocol::record::{Code, RequestBody, Status};
use orbitkv_tests::rig::{MILLISECOND, PAGE, Rig, Seat, generous};
use orbitkv_tests::world::{Fate, chain, is_copy, pages, spec};

#[test]
fn an_unregister_waits_for_the_last_copy_and_comes_after_its_operation() {
    let mut rig = Rig::dram(16);
    let held = chain(1, 4);
    rig.stored(&held);
    let Seat { session, region, .. } = rig.seat;
    let lease = rig.lease(&held);
    let save = rig.world.save(session, region, &pages(&chain(2, 4)));
    let restore = rig.restore(rig.seat, lease, &held, false);
    let unregister = rig.world.ask(session, RequestBody::Unregister { region });
    assert!(!rig.world.core.has_region(session, region), "takes no new work");
    let late = RequestBody::Save { region, fence: None };
    let late = rig.world.request(session, late, &pages(&chain(3, 1)), 0);
    assert_eq!(rig.world.ended(session, late).completion.code, Code::UnknownRegion);
    while !rig.world.work.is_empty() {
        assert!(rig.world.take_ended(session, unregister).is_none());
        rig.world.finish(0, Fate::Good);
    }
    let order: Vec<_> =
        rig.world.client(session).ended.iter().map(|ended| ended.completion.operation).collect();
    let at = |wanted| order.iter().position(|operation| *operation == wanted).expect("ended");
    assert!(at(save) < at(unregister) && at(restore) < at(unregister));
    assert_eq!(rig.world.ended(session, restore).completion.status, Status::Ok);
    assert!(rig.world.client(session).regions[0].is_none(), "told to unmap");
    // The id is never used again.
    let region = rig.world.region(session, rig.seat.scope, 4);
    assert_eq!(region.0, 1);
}

#[test]
fn an_idle_region_ends_at_once() {
    let mut rig = Rig::dram(4);
    let Seat { session, region, .. } = rig.seat;
    for expected in [Code::None, Code::UnknownRegion] {
        let operation = rig.world.ask(session, RequestBody::Unregister { region });
        assert_eq!(rig.world.ended(session, operation).completion.code, expected);
    }
}

#[test]
fn a_drain_ends_when_the_session_owns_nothing_else() {
    let mut rig = Rig::dram(16);
    let held = chain(1, 4);
    let session = rig.seat.session;
    let drain = rig.world.ask(session, RequestBody::Drain);
    assert_eq!(rig.world.ended(session, drain).completion.status, Status::Ok);
    let save = rig.world.save(session, rig.seat.region, &pages(&held));
    let drains = [(); 2].map(|()| rig.world.ask(session, RequestBody::Drain));
    for drain in drains {
        assert!(rig.world.take_ended(session, drain).is_none());
    }
    rig.world.settle();
    assert_eq!(rig.world.ended(session, save).completion.status, Status::Ok);
    for drain in drains {
        assert_eq!(rig.world.ended(session, drain).completion.status, Status::Ok);
    }
    rig.lease(&held);
    let drain = rig.world.request(session, RequestBody::Drain, &[], 4);
    rig.world.advance(4 * MILLISECOND);
    let ended = rig.world.ended(session, drain).completion;
    assert_eq!((ended.status, ended.code), (Status::Error, Code::Deadline));
}

#[test]
fn a_cancel_ends_after_its_target_wherever_it_meets_it() {
    let config = CoreConfig { copy_quantum_bytes: PAGE, ..generous(16 * PAGE) };
    let mut rig = Rig::new(config, &[], spec("model", PAGE));
    let held = chain(1, 8);
    rig.stored(&held);
    let session = rig.seat.session;
    for finished in 0..9 {
        let lease = rig.lease(&held);
        let restore = rig.restore(rig.seat, lease, &held, false);
        for _ in 0..finished {
            rig.world.finish(0, Fate::Good);
        }
        let cancels = [rig.cancel(rig.seat, restore), rig.cancel(rig.seat, restore)];
        rig.world.settle();
        let order: Vec<_> = rig.world.client(session).ended.clone();
        let operations: Vec<_> = order.iter().map(|ended| ended.completion.operation).collect();
        assert_eq!(operations[operations.len() - 3..], [restore, cancels[0], cancels[1]]);
        let ended = rig.world.ended(session, restore).completion;
        let (status, code) = match ended.pages {
            8 => (Status::Ok, Code::None),
            0 => (Status::Error, Code::Cancelled),
            _ => (Status::Partial, Code::Cancelled),
        };
        assert_eq!((ended.status, ended.code), (status, code));
        for cancel in cancels {
            assert_eq!(rig.world.ended(session, cancel).completion.status, Status::Ok);
        }
        rig.assert_at_rest();
    }
}

/// The client ends its session when a `Cancel` overtakes what it names, and that may be another.
#[test]
fn a_cancel_of_a_waiting_cancel_ends_after_it() {
    let mut rig = Rig::dram(16);
    let held = chain(1, 4);
    let session = rig.seat.session;
    let save = rig.world.save(session, rig.seat.region, &pages(&held));
    let first = rig.cancel(rig.seat, save);
    let second = rig.cancel(rig.seat, first);
    let third = rig.cancel(rig.seat, second);
    assert!(rig.world.take_ended(session, third).is_none(), "the copy still runs");
    rig.world.settle();
    let ended = &rig.world.client(session).ended;
    let order: Vec<_> = ended.iter().map(|ended| ended.completion.operation).collect();
    assert_eq!(order[order.len() - 4..], [save, first, second, third]);
    for cancel in [first, second, third] {
        assert_eq!(rig.world.ended(session, cancel).completion.status, Status::Ok);
    }
    // One that has ended is behind already.
    let late = rig.cancel(rig.seat, third);
    assert_eq!(rig.world.ended(session, late).completion.status, Status::Ok);
    rig.assert_at_rest();
}

#[test]
fn a_killed_session_ends_when_its_copies_have() {
    let mut rig = Rig::dram(16);
    let held = chain(1, 4);
    rig.stored(&held);
    let lease = rig.lease(&held);
    rig.restore(rig.seat, lease, &held, false);
    rig.world.save(rig.seat.session, rig.seat.region, &pages(&chain(2, 4)));
    rig.world.close(rig.seat.session);
    assert_eq!(rig.in_flight(is_copy(Direction::Restore)), 1);
    assert!(rig.world.clients.contains_key(&rig.seat.session.0));
    rig.world.finish(0, Fate::Copy(CopyFault::Peer, 0));
    assert!(rig.world.clients.contains_key(&rig.seat.session.0));
    rig.world.settle();
    assert!(rig.world.clients.is_empty());
    rig.assert_at_rest();
    let stats = rig.world.core.stats();
    assert_eq!((stats.sessions_opened, stats.sessions_ended), (1, 1));
    assert_eq!(stats.operations_abandoned, 2);
}

/// The device's word says "done" only when every byte is there, so it goes out with the last
/// command, alone.
#[test]
fn the_done_word_comes_with_the_last_copy() {
    let config = CoreConfig { copy_quantum_bytes: 2 * PAGE, ..generous(16 * PAGE) };
    let mut rig = Rig::new(config, &[], spec("model", PAGE));
    let held = chain(1, 7);
    rig.stored(&held);
    let session = rig.seat.session;
    let lease = rig.lease(&held);
    let restore = rig.restore(rig.seat, lease, &held, true);
    let word = |rig: &Rig| rig.world.client(session).done_words.get(&restore.index).copied();
    // The newest copy ends first.
    while !rig.world.work.is_empty() {
        assert_ne!(word(&rig), Some(restore.done_word()));
        rig.world.finish(rig.world.work.len() - 1, Fate::Good);
    }
    assert_eq!(word(&rig), Some(restore.done_word()));
    rig.world.ended(session, restore);
    // A fault anywhere: the device stores nothing, the record says what failed.
    let restore = rig.restore(rig.seat, lease, &held, true);
    rig.world.finish(0, Fate::Copy(CopyFault::Device, 1));
    rig.world.settle();
    let ended = rig.world.ended(session, restore).completion;
    assert_eq!((ended.status, ended.code), (Status::Partial, Code::DeviceError));
    assert_eq!(ended.first_failed, Some(1));
}

/// COR-09 and COR-07 in small: many sessions' pages through a tiny pool and a tier that holds all.
#[test]
fn everyone_gets_their_own_pages_back() {
    let mut rig = Rig::ssd(64, 2048);
    for session in 0..50 {
        rig.stored(&chain(session, 32));
        rig.world.settle();
    }
    let reader = rig.sit(2);
    let mut rng = fastrand::Rng::with_seed(9);
    for _ in 0..200 {
        let hashes = chain(rng.u64(..50), 32);
        let lease = rig.lease_for(reader, &hashes);
        let restore = rig.restore(reader, lease, &hashes, false);
        // Every restored page is checked against its key.
        rig.world.settle();
        assert_eq!(rig.world.ended(reader.session, restore).completion.pages, 32);
    }
    let spill = rig.world.core.stats().spill;
    assert_eq!(spill.iter().sum::<u64>(), 50 * 32);
    rig.assert_at_rest();
}
