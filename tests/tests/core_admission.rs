//! Goal: budgets are exact, and waiting for them is fair. Method: worlds in which every byte of the
//! budget is accounted for by hand.

use orbitkv_manager::core::CoreConfig;
use orbitkv_shm_protocol::ids::{LeaseId, OperationId};
use orbitkv_shm_protocol::record::{Code, PageOutcome, QueryMode, RequestBody, Status, Tier};
use orbitkv_tests::rig::{MILLISECOND, PAGE, Rig, Seat, generous};
use orbitkv_tests::world::{Fate, chain, is_read, is_write, pages, spec};

/// A pool of 64 pages of which `total` may be leased, `session` by one session.
fn limited(total: u64, session: u64) -> Rig {
    let config = CoreConfig {
        query_budget_bytes: total * PAGE,
        session_budget_bytes: session * PAGE,
        speculative_budget_bytes: total / 2 * PAGE,
        ..generous(64 * PAGE)
    };
    Rig::new(config, &[], spec("model", PAGE))
}

fn lease_of(rig: &mut Rig, seat: Seat, operation: OperationId) -> Option<LeaseId> {
    let ended = rig.world.take_ended(seat.session, operation)?.completion;
    assert_eq!(ended.status, Status::Ok, "{ended:?}");
    ended.lease
}

#[test]
fn within_a_session_the_first_that_waits_is_served_first() {
    let mut rig = limited(16, 8);
    let (big, small) = (chain(1, 6), chain(2, 1));
    rig.stored(&big);
    rig.stored(&small);
    let seat = rig.seat;
    let held = rig.lease(&big);
    let second = rig.query(seat, &big);
    // It would fit, but another came before it.
    let third = rig.query(seat, &small);
    assert!(rig.world.take_ended(seat.session, third).is_none());
    rig.release(seat, held);
    let second = lease_of(&mut rig, seat, second).expect("served");
    let third = lease_of(&mut rig, seat, third).expect("served");
    assert!(second < third, "leases are numbered as they are given");
}

#[test]
fn sessions_take_turns_for_the_total() {
    let mut rig = limited(1, 1);
    let page = chain(1, 1);
    rig.stored(&page);
    let seats: Vec<_> = (2..5).map(|engine| rig.sit(engine)).collect();
    let mut holder = (rig.seat, rig.lease(&page));
    let mut waiting = Vec::new();
    for &seat in &seats {
        for _ in 0..3 {
            waiting.push((seat, rig.query(seat, &page)));
        }
    }
    let mut served = Vec::new();
    for _ in 0..waiting.len() {
        rig.release(holder.0, holder.1);
        let mut now = waiting
            .iter()
            .filter_map(|&(seat, operation)| Some((seat, lease_of(&mut rig, seat, operation)?)));
        holder = now.next().expect("one is served for each that lets go");
        served.push(holder.0);
    }
    let turns: Vec<_> = seats.iter().copied().cycle().take(9).collect();
    assert_eq!(served, turns);
}

#[test]
fn a_session_at_its_own_limit_holds_nobody_up() {
    let mut rig = limited(16, 4);
    let chain = chain(1, 4);
    rig.stored(&chain);
    let other = rig.sit(2);
    let held = rig.lease(&chain);
    let waits = rig.query(rig.seat, &chain);
    let served = rig.lease_for(other, &chain);
    assert!(rig.world.take_ended(rig.seat.session, waits).is_none());
    rig.release(other, served);
    assert!(rig.world.take_ended(rig.seat.session, waits).is_none(), "other budget is no use");
    rig.release(rig.seat, held);
    assert!(rig.world.take_ended(rig.seat.session, waits).is_some());
}

#[test]
fn nobody_overtakes_a_query_that_waits_for_the_total() {
    let mut rig = limited(8, 8);
    let (big, small) = (chain(1, 8), chain(2, 1));
    rig.stored(&big);
    rig.stored(&small);
    let (large, little) = (rig.sit(2), rig.sit(3));
    let held = rig.lease(&small);
    let waits = rig.query(large, &big);
    let behind: Vec<_> = (0..5).map(|_| rig.query(little, &small)).collect();
    for &operation in &behind {
        assert!(rig.world.take_ended(little.session, operation).is_none(), "overtakes");
    }
    rig.release(rig.seat, held);
    let lease = lease_of(&mut rig, large, waits).expect("served first");
    rig.release(large, lease);
    for operation in behind {
        assert!(lease_of(&mut rig, little, operation).is_some());
    }
}

#[test]
fn a_query_larger_than_its_limit_is_cut_to_the_prefix_that_fits_and_says_so() {
    let mut rig = limited(16, 5);
    let chain = chain(1, 9);
    rig.stored(&chain);
    let operation = rig.query(rig.seat, &chain);
    let ended = rig.world.ended(rig.seat.session, operation);
    let completion = ended.completion;
    assert_eq!((completion.status, completion.code), (Status::Partial, Code::OverBudget));
    assert_eq!((completion.pages, completion.bytes), (5, 5 * PAGE));
    let expected = |at| match at {
        0..5 => (PageOutcome::Hit, Code::None),
        _ => (PageOutcome::Miss, Code::OverBudget),
    };
    assert_eq!(ended.outcomes(), (0..9).map(expected).collect::<Vec<_>>());
    assert_eq!(rig.world.core.stats().queries_cut_by_budget, 1);
}

#[test]
fn a_waiting_query_ends_at_its_deadline_with_nothing() {
    let mut rig = limited(4, 4);
    let chain = chain(1, 4);
    rig.stored(&chain);
    let other = rig.sit(2);
    rig.lease(&chain);
    let entries = pages(&chain);
    let body = RequestBody::Query { scope: other.scope, mode: QueryMode::Demand };
    let operation = rig.world.request(other.session, body, &entries, 3);
    rig.world.advance(3 * MILLISECOND - 1);
    assert!(rig.world.take_ended(other.session, operation).is_none());
    rig.world.advance(1);
    let ended = rig.world.ended(other.session, operation).completion;
    assert_eq!((ended.status, ended.code), (Status::Error, Code::Deadline));
    assert_eq!(rig.world.core.gauges().leases, 1);
}

#[test]
fn a_speculative_query_over_its_budget_is_skipped_and_counted() {
    let mut rig = limited(8, 8);
    let chain = chain(1, 4);
    rig.stored(&chain);
    let Seat { session, scope, .. } = rig.seat;
    let ask = |rig: &mut Rig, mode| {
        let operation = rig.world.query(session, scope, mode, &pages(&chain));
        rig.world.ended(session, operation).completion
    };
    let first = ask(&mut rig, QueryMode::Speculative);
    assert_eq!((first.status, first.pages), (Status::Ok, 4));
    let second = ask(&mut rig, QueryMode::Speculative);
    assert_eq!((second.status, second.code), (Status::Error, Code::OverBudget));
    assert_eq!(rig.world.core.stats().queries_skipped, 1);
    // Demand has the other half.
    let third = ask(&mut rig, QueryMode::Demand);
    assert_eq!((third.status, third.pages), (Status::Ok, 4));
    let gauges = rig.world.core.gauges();
    assert_eq!((gauges.leased_bytes, gauges.speculative_bytes), (8 * PAGE, 4 * PAGE));
}

#[test]
fn a_candidate_query_never_waits_and_leases_pages_where_they_are() {
    let config = CoreConfig { query_budget_bytes: 5 * PAGE, ..generous(16 * PAGE) };
    let devices = [orbitkv_tests::world::device(1, 4 * 2 * PAGE)];
    let mut rig = Rig::new(config, &devices, spec("model", PAGE));
    let cold = chain(1, 4);
    rig.stored_on_ssd_only(&cold);
    let Seat { session, scope, .. } = rig.seat;
    let operation = rig.world.query(session, scope, QueryMode::Candidate, &pages(&cold));
    let ended = rig.world.ended(session, operation).completion;
    assert_eq!((ended.pages_dram, ended.pages_ssd, ended.bytes), (0, 4, 4 * PAGE));
    assert_eq!((rig.in_flight(is_read), rig.resident()), (0, 0));
    // One page of budget is left: the second is cut to it, at once.
    let operation = rig.world.query(session, scope, QueryMode::Candidate, &pages(&cold));
    let cut = rig.world.ended(session, operation).completion;
    assert_eq!((cut.status, cut.code, cut.pages), (Status::Partial, Code::OverBudget, 1));
    // A pinned slot is never reused: nothing can be written while all four are leased.
    rig.stored(&chain(2, 2));
    rig.world.pump();
    assert_eq!(rig.in_flight(is_write), 0);
    let restore = rig.restore(rig.seat, ended.lease.expect("a lease"), &cold, false);
    rig.world.settle();
    let restored = rig.world.ended(session, restore).completion;
    assert_eq!((restored.pages, restored.pages_ssd), (4, 4));
    rig.release(rig.seat, cut.lease.expect("a lease"));
    rig.world.settle();
    rig.assert_at_rest();
}

/// LEAK-01: hits that are never used hold their budget until they expire, and nothing else.
#[test]
fn hits_that_nobody_uses_expire() {
    let config = CoreConfig { query_budget_bytes: 16 * PAGE, ..generous(64 * PAGE) };
    let mut rig = Rig::new(config, &[], spec("model", PAGE));
    let chain = chain(1, 4);
    rig.stored(&chain);
    let writer = rig.sit(2);
    let entries = pages(&chain);
    let Seat { session, scope, .. } = rig.seat;
    let mut over_budget = 0;
    for round in 0..10_000_u64 {
        let body = RequestBody::Query { scope, mode: QueryMode::Candidate };
        let operation = rig.world.request(session, body, &entries, 0);
        let ended = rig.world.ended(session, operation).completion;
        over_budget += u64::from(ended.code == Code::OverBudget);
        assert!(rig.world.core.gauges().leased_bytes <= 16 * PAGE);
        if round % 1000 == 0 {
            let more = orbitkv_tests::world::chain(100 + round, 8);
            let save = rig.world.save(writer.session, writer.region, &pages(&more));
            rig.world.settle();
            assert_eq!(rig.world.ended(writer.session, save).completion.status, Status::Ok);
        }
    }
    assert_eq!(over_budget, 10_000 - 4);
    rig.world.advance(rig.world.config().lease_ttl_ns);
    assert_eq!(
        rig.world.core.stats().leases_ended[orbitkv_manager::core::LeaseEnd::Expired as usize],
        4
    );
    rig.assert_at_rest();
}

/// LEAK-03: a preparation that is cancelled gives its budget back, wherever the cancel meets it.
#[test]
fn cancelled_preparations_return_their_budget() {
    let mut rig = Rig::ssd(64, 64);
    let chain = chain(1, 8);
    rig.stored_on_ssd_only(&chain);
    let Seat { session, scope, .. } = rig.seat;
    for round in 0..400 {
        let body = match round % 2 {
            0 => RequestBody::Query { scope, mode: QueryMode::Speculative },
            _ => RequestBody::Query { scope, mode: QueryMode::Demand },
        };
        rig.world.pumps = round % 8 > 1;
        let operation = rig.world.request(session, body, &pages(&chain), 0);
        if round % 8 < 6 {
            rig.cancel(rig.seat, operation);
        }
        rig.world.pumps = true;
        rig.world.pump();
        rig.world.settle();
        if round % 8 >= 6 {
            rig.cancel(rig.seat, operation);
        }
        let ended = rig.world.ended(session, operation).completion;
        match ended.lease {
            Some(lease) => rig.release(rig.seat, lease),
            None => assert_eq!((ended.status, ended.code), (Status::Error, Code::Cancelled)),
        }
        rig.assert_at_rest();
        rig.world.evict_dram();
    }
}

/// Goal: the memory of a hint's reads stays counted while the device has them, though nobody waits for
/// them any more. Method: a device that goes off with a hint's reads in flight.
#[test]
fn a_hint_of_which_nothing_comes_counts_until_its_reads_end() {
    let mut rig = Rig::ssd(64, 64);
    let chain = chain(1, 8);
    rig.stored_on_ssd_only(&chain);
    let Seat { session, scope, .. } = rig.seat;
    let speculative = |rig: &Rig| rig.world.core.gauges().speculative_bytes;
    let hint = rig.world.request(session, RequestBody::Prepare { scope }, &pages(&chain), 0);
    assert_eq!(rig.world.ended(session, hint).completion.pages, 8);
    rig.world.set_readable(0, false);
    let reads = rig.in_flight(is_read);
    assert!(reads > 1, "{reads} reads are in the device");
    assert_eq!(rig.world.core.gauges().operations, 0, "the hint is over");
    for left in (0..reads).rev() {
        assert_eq!(speculative(&rig), (left + 1) as u64 * PAGE);
        rig.world.finish(0, Fate::Good);
        assert_eq!(speculative(&rig), left as u64 * PAGE);
    }
    rig.world.set_readable(0, true);
    rig.assert_at_rest();
}

#[test]
fn a_hint_counts_as_speculative_until_its_reads_end() {
    let mut rig = Rig::ssd(64, 64);
    let chain = chain(1, 8);
    rig.stored_on_ssd_only(&chain);
    let Seat { session, scope, .. } = rig.seat;
    let hint = rig.world.request(session, RequestBody::Prepare { scope }, &pages(&chain), 0);
    let ended = rig.world.ended(session, hint).completion;
    assert_eq!((ended.status, ended.pages), (Status::Ok, 8));
    let gauges = rig.world.core.gauges();
    assert_eq!((gauges.speculative_bytes, gauges.leased_bytes), (8 * PAGE, 0));
    rig.world.settle();
    rig.assert_at_rest();
    assert_eq!(rig.resident(), 8, "ordinary pages that nobody holds");
    let query = rig.query(rig.seat, &chain);
    let found = rig.world.ended(session, query);
    assert_eq!(found.completion.pages_dram, 8);
    assert!(found.results.iter().all(|result| result.tier == Tier::Dram as u16));
}
