//! Goal: a lease pins exactly its pages for exactly its group until it ends. Method: each way in
//! which a lease ends, with what may and may not be evicted before and after.

use orbitkv_manager::core::{CoreConfig, Direction};
use orbitkv_shm_protocol::bootstrap::message::NamespaceSpec;
use orbitkv_shm_protocol::ids::{LeaseId, RegionId};
use orbitkv_shm_protocol::record::{Code, QueryMode, RequestBody, Status};
use orbitkv_tests::rig::{PAGE, Rig, Seat, generous};
use orbitkv_tests::world::{World, chain, is_copy, pages, spec};

fn leased_bytes(rig: &Rig) -> u64 {
    rig.world.core.gauges().leased_bytes
}

#[test]
fn a_restore_ends_the_lease_for_the_pages_it_names_unless_it_keeps_them() {
    let mut rig = Rig::dram(16);
    let chain = chain(1, 6);
    rig.stored(&chain);
    let lease = rig.lease(&chain);
    let kept = rig.restore(rig.seat, lease, &chain[..4], true);
    rig.world.settle();
    assert_eq!(rig.world.ended(rig.seat.session, kept).completion.status, Status::Ok);
    assert_eq!(leased_bytes(&rig), 6 * PAGE);
    let ending = rig.restore(rig.seat, lease, &chain[..4], false);
    rig.world.settle();
    assert_eq!(rig.world.ended(rig.seat.session, ending).completion.status, Status::Ok);
    assert_eq!(leased_bytes(&rig), 2 * PAGE);
    let again = rig.restore(rig.seat, lease, &chain[..1], false);
    assert_eq!(rig.world.ended(rig.seat.session, again).completion.code, Code::BadRequest);
    let Seat { session, region, .. } = rig.seat;
    let rest = rig.world.restore(session, region, lease, 4, &pages(&chain[4..]), false);
    rig.world.settle();
    assert_eq!(rig.world.ended(session, rest).completion.status, Status::Ok);
    rig.assert_at_rest();
    let after = rig.restore(rig.seat, lease, &chain, false);
    assert_eq!(rig.world.ended(session, after).completion.code, Code::UnknownLease);
}

#[test]
fn a_restore_that_keeps_its_lease_survives_one_that_does_not() {
    let mut rig = Rig::dram(8);
    let held = chain(1, 8);
    rig.stored(&held);
    let lease = rig.lease(&held);
    let slow = rig.restore(rig.seat, lease, &held, true);
    let other = rig.sit(1);
    let quick = rig.restore(other, lease, &held, false);
    // The newest copies end first: the second restore overtakes the first.
    while let Some(at) = rig.world.work.iter().rposition(is_copy(Direction::Restore)) {
        rig.world.finish(at, orbitkv_tests::world::Fate::Good);
        // Somebody wants the memory of whatever is not pinned.
        let save = rig.world.save(other.session, other.region, &pages(&chain(9, 8)));
        rig.world.settle_only(is_copy(Direction::Save));
        rig.world.ended(other.session, save);
    }
    for (seat, operation) in [(other, quick), (rig.seat, slow)] {
        let ended = rig.world.ended(seat.session, operation).completion;
        assert_eq!((ended.status, ended.pages), (Status::Ok, 8), "{ended:?}");
    }
    rig.assert_at_rest();
}

/// SEC-09: to others a lease, an operation or a region that is not theirs does not exist.
#[test]
fn ids_of_another_group_are_unknown() {
    let mut rig = Rig::dram(16);
    let chain = chain(1, 4);
    rig.stored(&chain);
    let lease = rig.lease(&chain);
    let copying = rig.restore(rig.seat, lease, &chain[..1], true);
    let thief = rig.sit(2);
    let never = LeaseId(lease.0 + (1 << 40));
    for lease in [lease, never] {
        let restore = rig.restore(thief, lease, &chain, false);
        let release = rig.world.ask(thief.session, RequestBody::Release { lease });
        for operation in [restore, release] {
            let ended = rig.world.ended(thief.session, operation).completion;
            assert_eq!((ended.status, ended.code), (Status::Error, Code::UnknownLease));
        }
    }
    let cancel = rig.cancel(thief, copying);
    assert_eq!(rig.world.ended(thief.session, cancel).completion.status, Status::Ok);
    let region = RegionId(7);
    let unregister = rig.world.ask(thief.session, RequestBody::Unregister { region });
    assert_eq!(rig.world.ended(thief.session, unregister).completion.code, Code::UnknownRegion);
    rig.world.close(thief.session);
    rig.world.settle();
    let ended = rig.world.ended(rig.seat.session, copying).completion;
    assert_eq!((ended.status, ended.pages), (Status::Ok, 1), "the thief changed nothing");
    assert_eq!(leased_bytes(&rig), 4 * PAGE);
}

#[test]
fn every_session_of_the_group_may_use_and_end_a_lease() {
    let mut rig = Rig::dram(16);
    let chain = chain(1, 4);
    rig.stored(&chain);
    let worker = rig.sit(1);
    let lease = rig.lease(&chain);
    let restore = rig.restore(worker, lease, &chain[..2], false);
    rig.world.settle();
    assert_eq!(rig.world.ended(worker.session, restore).completion.status, Status::Ok);
    // The scheduler goes; its worker stays, and the lease with it.
    rig.world.close(rig.seat.session);
    assert_eq!(leased_bytes(&rig), 2 * PAGE);
    let body = RequestBody::Release { lease };
    let release = rig.world.ask(worker.session, body);
    assert_eq!(rig.world.ended(worker.session, release).completion.status, Status::Ok);
    rig.assert_at_rest();
}

#[test]
fn a_lease_ends_with_the_last_session_of_its_group() {
    let mut rig = Rig::dram(16);
    let chain = chain(1, 4);
    rig.stored(&chain);
    let worker = rig.sit(1);
    let waiting = rig.sit(2);
    let lease = rig.lease(&chain);
    let restore = rig.restore(worker, lease, &chain[..1], true);
    let queued = rig.query(waiting, &chain);
    assert!(rig.world.take_ended(waiting.session, queued).is_some(), "shared pages count twice");
    rig.world.close(rig.seat.session);
    rig.world.close(worker.session);
    assert!(rig.world.take_ended(worker.session, restore).is_none());
    let gauges = rig.world.core.gauges();
    assert_eq!(gauges.leases, 2, "a running copy holds its pages");
    rig.world.settle();
    assert_eq!(rig.world.core.gauges().leases, 1);
    assert_eq!(rig.world.core.gauges().sessions, 1);
}

/// A session with one operation that can end at once ended before its leases were looked for.
#[test]
fn a_killed_session_leaves_no_lease_whatever_it_was_doing() {
    for operations in 0..3 {
        let config = CoreConfig { query_budget_bytes: 4 * PAGE, ..generous(16 * PAGE) };
        let mut rig = Rig::new(config, &[], spec("model", PAGE));
        let chain = chain(1, 4);
        rig.stored(&chain);
        rig.lease(&chain);
        for _ in 0..operations {
            rig.query(rig.seat, &chain);
        }
        rig.world.close(rig.seat.session);
        rig.assert_at_rest();
        assert_eq!(rig.world.core.gauges().sessions, 0);
    }
}

#[test]
fn an_expired_lease_is_refused_to_new_work_while_its_copies_end() {
    let mut rig = Rig::dram(4);
    let held = chain(1, 4);
    rig.stored(&held);
    let lease = rig.lease(&held);
    let running = rig.restore(rig.seat, lease, &held, true);
    rig.world.advance(rig.world.config().lease_ttl_ns);
    let late = rig.restore(rig.seat, lease, &held, false);
    assert_eq!(rig.world.ended(rig.seat.session, late).completion.code, Code::ExpiredLease);
    let release = rig.world.ask(rig.seat.session, RequestBody::Release { lease });
    assert_eq!(rig.world.ended(rig.seat.session, release).completion.code, Code::ExpiredLease);
    // The pages are still being read by the device: nobody gets their memory.
    let refused = rig.save(&chain(2, 1)).completion;
    assert_eq!((refused.code, refused.pages_refused), (Code::NoMemory, 1));
    rig.world.settle();
    let ended = rig.world.ended(rig.seat.session, running).completion;
    assert_eq!((ended.status, ended.pages), (Status::Ok, 4));
    rig.assert_at_rest();
    rig.stored(&chain(2, 1));
}

#[test]
fn a_lease_that_has_run_out_is_refused_before_the_tick() {
    let mut rig = Rig::dram(4);
    let chain = chain(1, 2);
    rig.stored(&chain);
    let lease = rig.lease(&chain);
    rig.world.now += rig.world.config().lease_ttl_ns;
    let late = rig.restore(rig.seat, lease, &chain, false);
    assert_eq!(rig.world.ended(rig.seat.session, late).completion.code, Code::ExpiredLease);
}

#[test]
fn a_restore_must_name_what_was_leased() {
    let mut rig = Rig::dram(16);
    let (held, other) = (chain(1, 4), chain(2, 4));
    rig.stored(&held);
    rig.stored(&other);
    let lease = rig.lease(&held);
    let Seat { session, region, .. } = rig.seat;
    for (offset, hashes) in [(0, &other[..1]), (1, &held[..1]), (4, &held[..1]), (2, &held[..3])] {
        let wrong = rig.world.restore(session, region, lease, offset, &pages(hashes), false);
        assert_eq!(rig.world.ended(session, wrong).completion.code, Code::BadRequest);
    }
    let huge = rig.world.restore(session, region, lease, u32::MAX, &pages(&held[..1]), false);
    assert_eq!(rig.world.ended(session, huge).completion.code, Code::BadRequest);
    assert_eq!(leased_bytes(&rig), 4 * PAGE, "a refused restore ends nothing");
}

#[test]
fn a_lease_over_ranks_ends_when_every_rank_is_done() {
    let mut world = World::new(generous(64 * PAGE), &[]);
    let ranks: Vec<_> = (0..3)
        .map(|rank| NamespaceSpec { tp_rank: rank, tp_size: 3, ..spec("ranked", PAGE) })
        .collect();
    let scheduler = world.attach(1);
    let scopes: Vec<_> = ranks.iter().map(|rank| world.namespace(scheduler, rank)).collect();
    let set = world.set(scheduler, &scopes);
    let chain = chain(1, 5);
    let workers: Vec<_> = ranks
        .iter()
        .enumerate()
        .map(|(rank, spec)| {
            let session = world.attach(1);
            let scope = world.namespace(session, spec);
            let region = world.region(session, scope, 32);
            // The last rank has saved less: the hit is the minimum.
            let len = if rank == 2 { 3 } else { 5 };
            world.save(session, region, &pages(&chain[..len]));
            (session, region)
        })
        .collect();
    world.settle();
    let query = world.query(scheduler, set, QueryMode::Demand, &pages(&chain));
    let found = world.ended(scheduler, query).completion;
    assert_eq!((found.pages, found.bytes), (3, 3 * 3 * PAGE), "every rank is counted in full");
    let lease = found.lease.expect("a lease");
    for (done, &(session, region)) in workers.iter().enumerate() {
        assert_eq!(world.core.gauges().leased_bytes, (3 - done as u64) * 3 * PAGE);
        let restore = world.restore(session, region, lease, 0, &pages(&chain[..3]), false);
        world.settle();
        assert_eq!(world.ended(session, restore).completion.pages, 3);
    }
    assert_eq!(world.core.gauges().leases, 0);
}

#[test]
fn a_drain_waits_for_leases_whoever_ends_them() {
    for by_restore in [false, true] {
        let mut rig = Rig::dram(16);
        let chain = chain(1, 2);
        rig.stored(&chain);
        let worker = rig.sit(1);
        let lease = rig.lease(&chain);
        let drain = rig.world.ask(rig.seat.session, RequestBody::Drain);
        assert!(rig.world.take_ended(rig.seat.session, drain).is_none());
        if by_restore {
            rig.restore(worker, lease, &chain, false);
            rig.world.settle();
        } else {
            rig.release(worker, lease);
        }
        assert_eq!(rig.world.ended(rig.seat.session, drain).completion.status, Status::Ok);
    }
}

/// COR-11: what was evicted is not hit, and an old lease stays gone.
#[test]
fn churn_leaves_neither_hits_nor_leases_behind() {
    let mut rig = Rig::dram(32);
    let mut seen = Vec::new();
    for round in 0..20 {
        let first: Vec<_> = (0..4).map(|at| chain(round * 100 + at, 8)).collect();
        for chain in &first {
            rig.stored(chain);
        }
        let lease = rig.lease(&first[0]);
        rig.release(rig.seat, lease);
        for at in 0..12 {
            rig.stored(&chain(round * 100 + 50 + at, 8));
        }
        let hits: u32 = first.iter().map(|chain| rig.hits(chain)).sum();
        let old = rig.restore(rig.seat, lease, &first[0], false);
        assert_eq!(rig.world.ended(rig.seat.session, old).completion.code, Code::UnknownLease);
        seen.push(hits);
    }
    assert_eq!(seen, [0; 20]);
    rig.assert_at_rest();
}

/// Goal: who names an expired lease is told so, and nobody else learns that it was ever there.
/// Method: after the tick that ended it, restore and release by its own group, by another and of a
/// lease that ended otherwise; then its place in the table serves other leases.
#[test]
fn an_expired_lease_stays_expired_for_its_own_group() {
    let mut rig = Rig::dram(16);
    let held = chain(1, 4);
    rig.stored(&held);
    let stranger = rig.sit(2);
    let released = rig.lease(&held);
    let lease = rig.lease(&held);
    rig.release(rig.seat, released);
    rig.world.advance(31_000 * 1_000_000);
    rig.assert_at_rest();
    let told = |rig: &mut Rig, seat: Seat, lease| {
        let restore = rig.restore(seat, lease, &held, false);
        let restore = rig.world.ended(seat.session, restore).completion;
        let release = rig.world.ask(seat.session, RequestBody::Release { lease });
        let release = rig.world.ended(seat.session, release).completion;
        assert_eq!((restore.status, release.status), (Status::Error, Status::Error));
        assert_eq!(restore.code, release.code);
        restore.code
    };
    let mate = rig.sit(1);
    for _ in 0..3 {
        assert_eq!(
            {
                let seat = rig.seat;
                told(&mut rig, seat, lease)
            },
            Code::ExpiredLease
        );
        assert_eq!(told(&mut rig, mate, lease), Code::ExpiredLease);
        assert_eq!(told(&mut rig, stranger, lease), Code::UnknownLease);
        assert_eq!(
            {
                let seat = rig.seat;
                told(&mut rig, seat, released)
            },
            Code::UnknownLease
        );
        assert_eq!(
            {
                let seat = rig.seat;
                told(&mut rig, seat, LeaseId(lease.0 + (1 << 20)))
            },
            Code::UnknownLease
        );
        // Leases that end in order do not erase the memory of it.
        let (first, second) = (rig.lease(&held), rig.lease(&held));
        rig.release(rig.seat, first);
        rig.release(rig.seat, second);
    }
}
