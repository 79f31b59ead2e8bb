//! Goal: what comes from SSD is right or absent, read once, and holds nobody up. Method: chains
//! that are on SSD only, with each read's end and fault decided by the test.

use orbitkv_manager::core::{CoreConfig, Direction, IoFault, PrepareOutcome};
use orbitkv_shm_protocol::ids::PageHash;
use orbitkv_shm_protocol::record::{Code, PageOutcome, QueryMode, RequestBody, Status};
use orbitkv_tests::rig::{MILLISECOND, PAGE, Rig, Seat, generous};
use orbitkv_tests::world::{Fate, Work, chain, device, is_copy, is_read, is_write, pages, spec};

/// A chain on SSD and a query that waits for its reads.
fn cold(len: usize) -> (Rig, Vec<PageHash>) {
    let mut rig = Rig::ssd(64, 64);
    let chain = chain(1, len);
    rig.stored_on_ssd_only(&chain);
    (rig, chain)
}

fn slot_of(rig: &Rig, hash: PageHash) -> u64 {
    let page = rig.world.core.page_views().find(|page| page.hash == hash);
    page.and_then(|page| page.slot).expect("a page on SSD").offset
}

fn read_from(offset: u64) -> impl Fn(&Work) -> bool {
    move |work| matches!(work, Work::Read { slot, .. } if slot.offset == offset)
}

fn finish_read(rig: &mut Rig, offset: u64, fate: Fate) {
    let at = rig.world.work.iter().position(read_from(offset)).expect("a read of that slot");
    rig.world.finish(at, fate);
}

/// COR-05: a failed read is a miss from there on, counted, and the slot is used no more.
#[test]
fn a_failed_read_cuts_the_hit_and_drops_what_hangs_on_it() {
    for (fault, retires) in
        [(IoFault::Errno(5), true), (IoFault::Short, true), (IoFault::Checksum, false)]
    {
        let (mut rig, chain) = cold(8);
        let slot = slot_of(&rig, chain[3]);
        let operation = rig.query(rig.seat, &chain);
        assert_eq!(rig.in_flight(is_read), 8);
        finish_read(&mut rig, slot, Fate::Io(fault));
        rig.world.settle();
        let ended = rig.world.ended(rig.seat.session, operation);
        let completion = ended.completion;
        assert_eq!((completion.status, completion.code), (Status::Partial, Code::IoError));
        assert_eq!((completion.pages, completion.bytes), (3, 3 * PAGE));
        let outcomes = ended.outcomes();
        assert!(outcomes[..3].iter().all(|outcome| outcome.0 == PageOutcome::Hit));
        assert!(outcomes[3..].iter().all(|outcome| outcome.0 == PageOutcome::Miss));
        rig.release(rig.seat, completion.lease.expect("a lease on what is there"));
        let stats = rig.world.core.stats();
        assert_eq!(stats.ssd_read_errors[fault.index()], 1);
        assert_eq!(stats.slots_retired, u64::from(retires));
        assert_eq!(rig.world.core.gauges().pages, 3, "five pages hung on it");
        assert_eq!(rig.hits(&chain), 3);
        rig.assert_at_rest();
    }
}

/// A device that rests (breaker, shutdown) answers nothing now and has lost nothing.
#[test]
fn a_read_that_a_resting_device_refuses_cuts_the_hit_and_drops_nothing() {
    let (mut rig, chain) = cold(8);
    let slot = slot_of(&rig, chain[3]);
    let operation = rig.query(rig.seat, &chain);
    finish_read(&mut rig, slot, Fate::Io(IoFault::Off));
    rig.world.settle();
    let completion = rig.world.ended(rig.seat.session, operation).completion;
    assert_eq!((completion.code, completion.pages), (Code::IoError, 3));
    rig.release(rig.seat, completion.lease.expect("a lease on what is there"));
    rig.assert_at_rest();
    let stats = rig.world.core.stats();
    assert_eq!((stats.ssd_read_errors[IoFault::Off.index()], stats.slots_retired), (1, 0));
    assert_eq!(rig.hits(&chain), 8);
}

#[test]
fn a_first_read_that_fails_leaves_nothing_to_lease() {
    let (mut rig, chain) = cold(4);
    let slot = slot_of(&rig, chain[0]);
    let operation = rig.query(rig.seat, &chain);
    finish_read(&mut rig, slot, Fate::Io(IoFault::Errno(5)));
    rig.world.settle();
    let ended = rig.world.ended(rig.seat.session, operation).completion;
    assert_eq!((ended.pages, ended.lease, ended.code), (0, None, Code::IoError));
    rig.assert_at_rest();
    assert_eq!(rig.world.core.gauges().pages, 0);
}

/// MET-07: pages restored and pages that failed sum to the pages asked for.
#[test]
fn a_restore_from_ssd_ends_partial_at_the_page_that_failed() {
    let (mut rig, chain) = cold(10);
    let Seat { session, scope, .. } = rig.seat;
    let query = rig.world.query(session, scope, QueryMode::Candidate, &pages(&chain));
    let found = rig.world.ended(session, query).completion;
    let restore = rig.restore(rig.seat, found.lease.expect("a lease"), &chain, false);
    for _ in 0..7 {
        rig.world.finish(0, Fate::Good);
        rig.world.settle_only(is_copy(Direction::Restore));
    }
    rig.world.finish(0, Fate::Io(IoFault::Errno(5)));
    rig.world.settle();
    let ended = rig.world.ended(session, restore);
    let completion = ended.completion;
    assert_eq!((completion.status, completion.code), (Status::Partial, Code::IoError));
    assert_eq!((completion.pages, completion.first_failed), (7, Some(7)));
    let stats = rig.world.core.stats();
    let failed: u64 = stats.pages_restore_failed.iter().sum();
    assert_eq!((stats.lookup_hits_ssd, stats.pages_restored, failed), (10, 7, 3));
    assert_eq!(stats.pages_restore_failed[Code::IoError as usize], 3);
    rig.assert_at_rest();
}

/// PERF-11: eight engines, one cold prefix, one read of each page.
#[test]
fn queries_of_one_cold_prefix_share_its_reads() {
    let (mut rig, chain) = cold(16);
    let seats: Vec<_> = (2..10).map(|engine| rig.sit(engine)).collect();
    // Budget for four leases of sixteen pages: four share the reads, the others wait for it.
    let mut asked: Vec<_> = seats.iter().map(|&seat| (seat, rig.query(seat, &chain))).collect();
    assert_eq!(rig.in_flight(is_read), 16);
    let (quitter, operation) = asked.remove(1);
    let cancel = rig.cancel(quitter, operation);
    assert!(rig.world.take_ended(quitter.session, operation).is_none(), "reads are in flight");
    rig.world.settle();
    let ended = rig.world.ended(quitter.session, operation).completion;
    assert_eq!((ended.status, ended.code), (Status::Error, Code::Cancelled));
    assert_eq!(rig.world.ended(quitter.session, cancel).completion.status, Status::Ok);
    while let Some((seat, operation)) = (!asked.is_empty()).then(|| asked.remove(0)) {
        let ended = rig.world.ended(seat.session, operation).completion;
        assert_eq!((ended.status, ended.pages), (Status::Ok, 16), "{ended:?}");
        rig.release(seat, ended.lease.expect("a lease"));
    }
    let stats = rig.world.core.stats();
    assert_eq!((stats.ssd_pages_read, stats.ssd_bytes_read), (16, 16 * PAGE));
    rig.assert_at_rest();
}

#[test]
fn a_shared_read_that_fails_cuts_everyone() {
    let (mut rig, chain) = cold(4);
    let other = rig.sit(2);
    let slot = slot_of(&rig, chain[2]);
    let asked = [(rig.seat, rig.query(rig.seat, &chain)), (other, rig.query(other, &chain))];
    finish_read(&mut rig, slot, Fate::Io(IoFault::Short));
    rig.world.settle();
    for (seat, operation) in asked {
        let ended = rig.world.ended(seat.session, operation).completion;
        assert_eq!((ended.pages, ended.code), (2, Code::IoError));
        rig.release(seat, ended.lease.expect("a lease"));
    }
    rig.assert_at_rest();
}

/// A cancelled query lets go last of the page whose read failed.
#[test]
fn the_page_of_a_failed_read_is_buried_once() {
    let (mut rig, chain) = cold(1);
    let operation = rig.query(rig.seat, &chain);
    rig.cancel(rig.seat, operation);
    rig.world.finish(0, Fate::Io(IoFault::Errno(5)));
    rig.assert_at_rest();
    // The places of the pages that follow are their own.
    for branch in 2..6 {
        rig.stored(&orbitkv_tests::world::chain(branch, 3));
    }
    assert_eq!(rig.resident(), 12);
}

/// PERF-05: hits in DRAM do not wait for reads of others.
#[test]
fn slow_reads_do_not_delay_hits_in_dram() {
    let (mut rig, chain) = cold(32);
    let warm = orbitkv_tests::world::chain(2, 4);
    rig.stored(&warm);
    rig.world.settle();
    let other = rig.sit(2);
    let slow = rig.query(rig.seat, &chain);
    for _ in 0..20 {
        let query = rig.query(other, &warm);
        let found = rig.world.ended(other.session, query).completion;
        assert_eq!(found.pages, 4, "answered without any work ending");
        let lease = found.lease.expect("a lease");
        let restore = rig.restore(other, lease, &warm, false);
        rig.world.settle_only(is_copy(Direction::Restore));
        assert_eq!(rig.world.ended(other.session, restore).completion.status, Status::Ok);
    }
    assert!(rig.world.take_ended(rig.seat.session, slow).is_none());
    assert_eq!(rig.in_flight(is_read), 32);
}

#[test]
fn reads_in_flight_are_bounded() {
    let config = CoreConfig {
        reads_in_flight_bytes: 4 * PAGE,
        read_window_bytes: 3 * PAGE,
        ..generous(64 * PAGE)
    };
    let mut rig = Rig::new(config, &[device(1, 64 * 2 * PAGE)], spec("model", PAGE));
    let chains = [chain(1, 8), chain(2, 8)];
    for chain in &chains {
        rig.stored_on_ssd_only(chain);
    }
    let asked: Vec<_> = chains.iter().map(|chain| rig.query(rig.seat, chain)).collect();
    let mut most = 0;
    while rig.in_flight(is_read) > 0 {
        most = most.max(rig.in_flight(is_read));
        rig.world.finish(0, Fate::Good);
    }
    assert_eq!(most, 4);
    for operation in asked {
        assert_eq!(rig.world.ended(rig.seat.session, operation).completion.pages, 8);
    }
}

/// PERF-05: what somebody waits for is read before what was hinted, however much that is; a hint
/// takes half of what may be in flight, and all the rest when nobody waits any more.
#[test]
fn a_query_overtakes_hints_that_came_before_it() {
    let config = CoreConfig { reads_in_flight_bytes: 4 * PAGE, ..generous(64 * PAGE) };
    let mut rig = Rig::new(config, &[device(1, 64 * 2 * PAGE)], spec("model", PAGE));
    let (hinted, wanted) = (chain(1, 16), chain(2, 4));
    rig.stored_on_ssd_only(&hinted);
    rig.stored_on_ssd_only(&wanted);
    let Seat { session, scope, .. } = rig.seat;
    let hint = rig.world.query(session, scope, QueryMode::Speculative, &pages(&hinted));
    assert_eq!(rig.in_flight(is_read), 2, "half of what may be in flight");
    let query = rig.query(rig.seat, &wanted);
    assert_eq!(rig.in_flight(is_read), 4);
    let mut reads = 0;
    let ended = loop {
        if let Some(ended) = rig.world.take_ended(session, query) {
            break ended;
        }
        // In the order in which they were sent.
        rig.world.finish(0, Fate::Good);
        reads += 1;
    };
    assert_eq!(ended.completion.pages, 4);
    // Its own four, the two that the device had already, and one turn of a hint.
    assert!(reads <= 7, "{reads} reads");
    rig.world.settle();
    assert_eq!(rig.world.ended(session, hint).completion.pages, 16, "the hint gets on as well");
}

#[test]
fn a_restore_streams_a_chain_larger_than_the_pool() {
    let config = CoreConfig {
        query_budget_bytes: 64 * PAGE,
        session_budget_bytes: 64 * PAGE,
        read_window_bytes: 2 * PAGE,
        copy_quantum_bytes: PAGE,
        ..generous(4 * PAGE)
    };
    let mut rig = Rig::new(config, &[device(1, 64 * 2 * PAGE)], spec("model", PAGE));
    let whole = chain(1, 20);
    let Seat { session, scope, region } = rig.seat;
    for at in 0..20 {
        let entries = match at {
            0 => pages(&whole[..1]),
            _ => orbitkv_tests::world::pages_after(whole[at - 1], &whole[at..=at]),
        };
        let save = rig.world.save(session, region, &entries);
        rig.world.settle();
        assert_eq!(rig.world.ended(session, save).completion.pages, 1, "page {at}");
        // A save never evicts its own ancestors, not even those that are on SSD too.
        rig.world.evict_dram();
    }
    let query = rig.world.query(session, scope, QueryMode::Candidate, &pages(&whole));
    let found = rig.world.ended(session, query).completion;
    assert_eq!(found.pages, 20);
    let restore = rig.restore(rig.seat, found.lease.expect("a lease"), &whole, false);
    rig.world.settle();
    let ended = rig.world.ended(session, restore).completion;
    assert_eq!((ended.status, ended.pages), (Status::Ok, 20), "{ended:?}");
    rig.assert_at_rest();
}

#[test]
fn a_restore_without_memory_waits_until_there_is_some() {
    for freed_by in 0..3 {
        let config = CoreConfig {
            query_budget_bytes: 8 * PAGE,
            lease_ttl_ns: MILLISECOND,
            ..generous(4 * PAGE)
        };
        let mut rig = Rig::new(config, &[device(1, 64 * 2 * PAGE)], spec("model", PAGE));
        let cold = chain(1, 2);
        rig.stored_on_ssd_only(&cold);
        let Seat { session, scope, .. } = rig.seat;
        let query = rig.world.query(session, scope, QueryMode::Candidate, &pages(&cold));
        let lease = rig.world.ended(session, query).completion.lease.expect("a lease");
        // Another namespace's pages fill the pool, leased.
        let other = rig.world.attach(2);
        let scope = rig.world.namespace(other, &spec("other", PAGE));
        let region = rig.world.region(other, scope, 8);
        let hot = chain(2, 2);
        let save = rig.world.save(other, region, &pages(&chain(3, 2)));
        rig.world.settle();
        rig.world.ended(other, save);
        let save = rig.world.save(other, region, &pages(&hot));
        rig.world.settle();
        rig.world.ended(other, save);
        let mut leases = Vec::new();
        for branch in [2, 3] {
            let query = rig.world.query(other, scope, QueryMode::Demand, &pages(&chain(branch, 2)));
            leases.extend(rig.world.ended(other, query).completion.lease);
        }
        assert_eq!(leases.len(), 2);
        let restore = rig.restore(rig.seat, lease, &cold, false);
        rig.world.pump();
        assert_eq!(rig.in_flight(is_read), 0);
        assert!(rig.world.take_ended(session, restore).is_none(), "it waits");
        match freed_by {
            0 => drop(rig.world.ask(other, RequestBody::Release { lease: leases[1] })),
            1 => rig.world.close(other),
            // Before the restore's deadline and after the lease of the others.
            _ => rig.world.advance(rig.world.config().lease_ttl_ns),
        }
        rig.world.settle();
        let ended = rig.world.ended(session, restore).completion;
        assert_eq!((ended.status, ended.pages), (Status::Ok, 2), "{ended:?}");
    }
}

#[test]
fn a_deadline_grants_what_is_there() {
    let (mut rig, chain) = cold(6);
    let Seat { session, scope, .. } = rig.seat;
    let body = RequestBody::Query { scope, mode: QueryMode::Demand };
    let operation = rig.world.request(session, body, &pages(&chain), 5);
    for at in [0, 1, 4] {
        let slot = slot_of(&rig, chain[at]);
        finish_read(&mut rig, slot, Fate::Good);
    }
    rig.world.advance(5 * MILLISECOND);
    let ended = rig.world.ended(session, operation).completion;
    assert_eq!((ended.status, ended.code, ended.pages), (Status::Partial, Code::Deadline, 2));
    // Reads in flight belong to their pages and end when they end.
    assert_eq!(rig.in_flight(is_read), 3);
    rig.world.settle();
    assert_eq!(rig.resident(), 6);
    rig.release(rig.seat, ended.lease.expect("a lease"));
    rig.assert_at_rest();
}

#[test]
fn a_page_saved_again_with_other_bits_is_as_good() {
    let (mut rig, chain) = cold(3);
    rig.world.version = 1;
    rig.stored(&chain);
    rig.world.evict_dram();
    assert_eq!(rig.hits(&chain), 3, "each replica has the checksum of its own bytes");
    assert_eq!(rig.world.core.stats().ssd_read_errors.iter().sum::<u64>(), 0);
}

fn on(device: u16) -> impl Fn(&Work) -> bool {
    move |work| matches!(work, Work::Read { slot, .. } if slot.device == device)
}

/// A device that does not answer keeps the reads that it has; those of another go on, and
/// whoever waited for it is told as soon as it answers.
#[test]
fn reads_of_a_silent_device_hold_up_nobody_who_reads_from_another() {
    let config = CoreConfig { reads_in_flight_bytes: 4 * PAGE, ..generous(64 * PAGE) };
    let mut rig = Rig::new(config, &[device(1, 64 * 2 * PAGE); 2], spec("model", PAGE));
    let place = |rig: &mut Rig, at: u16, hashes: &[PageHash]| {
        rig.world.core.set_device_accepts_writes(1 - at, false);
        rig.stored_on_ssd_only(hashes);
        rig.world.core.set_device_accepts_writes(1 - at, true);
        let views = rig.world.core.page_views();
        let mut slots = views.filter(|page| hashes.contains(&page.hash)).map(|page| page.slot);
        assert!(slots.all(|slot| slot.is_some_and(|slot| slot.device == at)));
    };
    let stuck = [chain(1, 8), chain(2, 8), chain(3, 8)];
    let (free, also_free) = (chain(4, 8), chain(5, 8));
    for hashes in &stuck {
        place(&mut rig, 0, hashes);
    }
    place(&mut rig, 1, &free);
    place(&mut rig, 1, &also_free);
    let Seat { session, scope, .. } = rig.seat;
    let mut waiting: Vec<_> = stuck[..2].iter().map(|hashes| rig.query(rig.seat, hashes)).collect();
    let hint = rig.world.query(session, scope, QueryMode::Speculative, &pages(&stuck[2]));
    assert_eq!(rig.in_flight(on(0)), 4);
    for hashes in [&free, &also_free] {
        let query = rig.query(rig.seat, hashes);
        assert_eq!(rig.in_flight(on(0)), 4, "it has all that it may have");
        rig.world.settle_only(on(1));
        let ended = rig.world.ended(session, query).completion;
        assert_eq!((ended.status, ended.pages), (Status::Ok, 8), "{ended:?}");
        rig.release(rig.seat, ended.lease.expect("a lease"));
    }
    // One that gives up leaves the queue.
    let cancelled = waiting.remove(1);
    rig.cancel(rig.seat, cancelled);
    let ended = rig.world.ended(session, cancelled).completion;
    assert_eq!(ended.code, Code::Cancelled, "{ended:?}");
    let again = rig.query(rig.seat, &stuck[1]);
    waiting.extend([again, hint]);
    rig.world.settle();
    for operation in waiting {
        let ended = rig.world.ended(session, operation).completion;
        assert_eq!((ended.status, ended.pages), (Status::Ok, 8), "{ended:?}");
        rig.release(rig.seat, ended.lease.expect("a lease"));
    }
    rig.assert_at_rest();
}

/// A device of which `core` hears that it reads nothing has lost nothing: what lies there only is
/// missing, without a read or a wait, until it reads again.
#[test]
fn pages_of_a_device_that_reads_nothing_are_missing_for_as_long() {
    let (mut rig, whole) = cold(8);
    // The first three are in DRAM too.
    rig.stored(&whole[..3]);
    rig.world.set_readable(0, false);
    assert_eq!((rig.hits_at_once(&whole), rig.in_flight(is_read)), (3, 0));
    let Seat { session, scope, .. } = rig.seat;
    let hint = rig.world.request(session, RequestBody::Prepare { scope }, &pages(&whole), 0);
    assert_eq!(rig.world.ended(session, hint).completion.pages, 0);
    let stats = rig.world.core.stats();
    assert_eq!((stats.lookup_pages, stats.lookup_hits_dram, stats.lookup_unreadable), (8, 3, 1));
    assert_eq!(stats.prepare[PrepareOutcome::Failed as usize], 1);
    assert_eq!(stats.prepare.iter().sum::<u64>(), 8, "each page has one outcome");
    assert_eq!(rig.world.core.gauges().ssd_pages, 8, "all are where they were");
    // What hangs on them can be saved.
    let more = orbitkv_tests::world::extend(Some(whole[7]), 0, 2);
    let entries = orbitkv_tests::world::pages_after(whole[7], &more);
    let save = rig.world.save(session, rig.seat.region, &entries);
    rig.world.settle_only(is_copy(Direction::Save));
    assert_eq!(rig.world.ended(session, save).completion.pages, 2);
    rig.world.set_readable(0, true);
    rig.world.settle();
    assert_eq!(rig.hits(&[whole, more].concat()), 10);
    assert_eq!(rig.world.core.stats().ssd_read_errors.iter().sum::<u64>(), 0);
}

/// Goal: when a device falls silent nobody waits out his deadline for it, and its reads keep their
/// memory until they end. Method: queries, a hint and a restore, each with some of its reads in the
/// device and more queued for it.
#[test]
fn whoever_waits_for_a_device_that_ceases_to_read_is_told_at_once() {
    let config = CoreConfig { reads_in_flight_bytes: 8 * PAGE, ..generous(64 * PAGE) };
    let mut rig = Rig::new(config, &[device(1, 256 * PAGE)], spec("model", PAGE));
    let chains: Vec<_> = (1..6).map(|branch| chain(branch, 6)).collect();
    for whole in &chains {
        rig.stored_on_ssd_only(whole);
    }
    let Seat { session, scope, .. } = rig.seat;
    let hint = rig.world.request(session, RequestBody::Prepare { scope }, &pages(&chains[4]), 0);
    assert_eq!(rig.world.ended(session, hint).completion.pages, 6);
    let candidate = rig.world.query(session, scope, QueryMode::Candidate, &pages(&chains[3]));
    let lease = rig.world.ended(session, candidate).completion.lease.expect("a lease");
    let restore = rig.restore(rig.seat, lease, &chains[3], false);
    let queries: Vec<_> = chains[..3].iter().map(|whole| rig.query(rig.seat, whole)).collect();
    assert_eq!(rig.in_flight(is_read), 8, "all that it may have");

    rig.world.set_readable(0, false);
    for query in queries {
        let ended = rig.world.ended(session, query).completion;
        assert_eq!((ended.code, ended.pages, ended.lease), (Code::IoError, 0, None), "{ended:?}");
    }
    let ended = rig.world.ended(session, restore).completion;
    assert_eq!((ended.code, ended.pages, ended.pages_refused), (Code::IoError, 0, 6), "{ended:?}");
    let (stats, gauges) = (rig.world.core.stats(), rig.world.core.gauges());
    assert_eq!(stats.prepare[PrepareOutcome::Failed as usize], 6);
    assert_eq!((gauges.operations, gauges.leases), (0, 0));
    let of_hint = gauges.speculative_bytes;
    assert!(0 < of_hint && of_hint < 6 * PAGE, "{of_hint} bytes of the hint's reads in the device");
    assert!(stats.ssd_read_errors[IoFault::Off.index()] > 0, "those that were queued");
    assert_eq!((gauges.reads_in_flight, gauges.pool_used_bytes), (8, 8 * PAGE));
    // Somebody else's pages get the rest of the pool, and no more.
    let others: Vec<_> = (10..70).map(|branch| chain(branch, 1)).collect();
    for other in &others[..56] {
        rig.stored(other);
    }
    rig.world.settle_only(is_write);
    for other in &others[56..] {
        rig.stored(other);
    }
    assert_eq!(rig.world.core.gauges().pool_used_bytes, 64 * PAGE);
    assert_eq!(rig.in_flight(is_read), 8);

    // It answers before `core` is told that it does.
    rig.world.settle();
    rig.world.set_readable(0, true);
    for whole in &chains {
        assert_eq!(rig.hits(whole), 6, "nothing was lost");
    }
    rig.assert_at_rest();
}

/// Nor does anybody who could not even begin to read from it. Method: a restore without memory for its
/// first page and a query without budget for pages of a device, when that ceases to read.
#[test]
fn nobody_waits_for_room_to_read_from_a_device_that_ceases_to_read() {
    let config = CoreConfig { query_budget_bytes: 6 * PAGE, ..generous(4 * PAGE) };
    let mut rig = Rig::new(config, &[device(1, 128 * PAGE)], spec("model", PAGE));
    let (cold, hot) = (chain(1, 4), chain(2, 4));
    rig.stored_on_ssd_only(&cold);
    let Seat { session, scope, .. } = rig.seat;
    let candidate = rig.world.query(session, scope, QueryMode::Candidate, &pages(&cold[..2]));
    let lease = rig.world.ended(session, candidate).completion.lease.expect("a lease");
    rig.stored(&hot);
    let other = rig.sit(2);
    let held = rig.lease_for(other, &hot);
    let query = rig.query(other, &cold);
    let restore = rig.restore(rig.seat, lease, &cold[..2], false);
    rig.world.settle_only(is_write);
    assert_eq!(rig.in_flight(is_read), 0);
    assert!(rig.world.take_ended(session, restore).is_none(), "it waits for memory");
    assert!(rig.world.take_ended(other.session, query).is_none(), "it waits for budget");
    rig.world.set_readable(0, false);
    let ended = rig.world.ended(session, restore).completion;
    assert_eq!((ended.code, ended.pages, ended.pages_refused), (Code::IoError, 0, 2), "{ended:?}");
    let ended = rig.world.ended(other.session, query).completion;
    assert_eq!((ended.status, ended.pages, ended.lease), (Status::Ok, 0, None), "{ended:?}");
    rig.world.set_readable(0, true);
    rig.release(other, held);
    assert_eq!(rig.hits(&cold), 4);
    rig.assert_at_rest();
}

/// Reads of another device go on for an operation that one device has let down: it gets all that is
/// in front of the first page there.
#[test]
fn a_hit_ends_at_the_first_page_of_a_device_that_ceases_to_read() {
    let mut rig = Rig::new(generous(64 * PAGE), &[device(1, 64 * PAGE); 2], spec("model", PAGE));
    let whole = chain(1, 6);
    rig.world.core.set_device_accepts_writes(1, false);
    rig.stored(&whole[..4]);
    rig.world.settle();
    rig.world.core.set_device_accepts_writes(1, true);
    rig.world.core.set_device_accepts_writes(0, false);
    let entries = orbitkv_tests::world::pages_after(whole[3], &whole[4..]);
    rig.world.save(rig.seat.session, rig.seat.region, &entries);
    rig.world.settle();
    rig.world.evict_dram();
    let query = rig.query(rig.seat, &whole);
    assert_eq!((rig.in_flight(on(0)), rig.in_flight(on(1))), (4, 2));
    rig.world.set_readable(1, false);
    assert!(rig.world.take_ended(rig.seat.session, query).is_none(), "four are on their way");
    rig.world.settle_only(on(0));
    let ended = rig.world.ended(rig.seat.session, query).completion;
    assert_eq!((ended.status, ended.pages), (Status::Partial, 4), "{ended:?}");
    rig.release(rig.seat, ended.lease.expect("a lease"));
    assert_eq!(rig.hits(&whole), 4);
    rig.world.set_readable(1, true);
    assert_eq!(rig.hits(&whole), 6);
    rig.assert_at_rest();
}

/// Goal: what waits for room to be read and comes by a save meanwhile is used at once. Method: a device
/// that has all the reads it may have and answers none; a query, a restore and a hint wait for it.
#[test]
fn pages_that_a_save_brings_are_used_by_those_who_wait_to_read_them() {
    let config = CoreConfig { reads_in_flight_bytes: 4 * PAGE, ..generous(64 * PAGE) };
    let mut rig = Rig::new(config, &[device(1, 128 * PAGE)], spec("model", PAGE));
    let chains: Vec<_> = (1..5).map(|branch| chain(branch, 4)).collect();
    for whole in &chains {
        rig.stored_on_ssd_only(whole);
    }
    let Seat { session, scope, .. } = rig.seat;
    let candidate = rig.world.query(session, scope, QueryMode::Candidate, &pages(&chains[1]));
    let lease = rig.world.ended(session, candidate).completion.lease.expect("a lease");
    let stuck = rig.query(rig.seat, &chains[0]);
    assert_eq!(rig.in_flight(is_read), 4, "all that it may have");
    let restore = rig.restore(rig.seat, lease, &chains[1], false);
    let query = rig.query(rig.seat, &chains[2]);
    let hint = rig.world.request(session, RequestBody::Prepare { scope }, &pages(&chains[3]), 0);
    assert_eq!(rig.world.ended(session, hint).completion.pages, 4);
    for whole in &chains[1..] {
        rig.stored(whole);
    }
    rig.world.settle_only(is_copy(Direction::Restore));
    let ended = rig.world.ended(session, restore).completion;
    assert_eq!((ended.status, ended.pages), (Status::Ok, 4), "{ended:?}");
    let ended = rig.world.ended(session, query).completion;
    assert_eq!((ended.status, ended.pages), (Status::Ok, 4), "{ended:?}");
    rig.release(rig.seat, ended.lease.expect("a lease"));
    let stats = rig.world.core.stats();
    assert_eq!(stats.prepare[PrepareOutcome::Prepared as usize], 4);
    assert_eq!(stats.ssd_pages_read, 0);
    assert_eq!((rig.in_flight(is_read), rig.world.core.gauges().operations), (4, 1));
    rig.cancel(rig.seat, stuck);
    rig.world.settle();
    rig.assert_at_rest();
}
