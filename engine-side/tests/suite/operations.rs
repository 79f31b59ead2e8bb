//! Every operation, as an engine uses it.

use std::time::Duration;

use orbitkv_engine::{
    Block, Chain, Code, Connect, Deadline, GpuId, HexBytes, Lease, LeaseId, LeaseParts,
    PageOutcome, QueryMode, RegisterError, RequestKind, RestoreOptions, SaveOptions, SessionState,
    Status, SubmitError, Tier, engine_id_random, wait_many,
};
use orbitkv_shm_protocol::bootstrap::message::MemorySpec;
use orbitkv_shm_protocol::record::RequestBody;

use crate::rig::{HALF, PAGES, PATIENCE, Rig, blocks, hashes, layout, namespace, next};
use crate::twin::{Reach, Twin};

/// Goal: bytes survive save, query and restore, and every other operation ends once with the kind
/// that was asked. Method: one client, one of each.
#[test]
fn every_operation_ends_once_with_what_was_asked() {
    let twin = Twin::start();
    let mut rig = Rig::new(twin.path());
    let saved = blocks(1, 3, 0);
    for (block, byte) in saved.iter().zip(10..) {
        rig.device.fill(block.page, byte);
    }
    let save = rig.client.save(&rig.region, &saved).unwrap();
    let done = rig.next();
    assert_eq!((done.operation, done.kind, done.status), (save, RequestKind::Save, Status::Ok));
    assert_eq!((done.pages, done.bytes, done.lease), (3, 3 * 2 * HALF, None));
    let outcomes: Vec<_> = rig.client.results(&done).map(|r| (r.outcome, r.tier)).collect();
    assert_eq!(outcomes, [(PageOutcome::Stored, Tier::Dram); 3]);

    let asked = hashes(1, 5);
    let query = rig.client.query(&rig.scope, &asked, QueryMode::Demand, Deadline::DEFAULT).unwrap();
    let done = rig.next();
    assert_eq!((done.operation, done.status, done.pages), (query, Status::Ok, 3));
    let outcomes: Vec<_> = rig.client.results(&done).map(|r| r.outcome).collect();
    assert_eq!(outcomes[..3], [PageOutcome::Hit; 3]);
    assert_eq!(outcomes[3..], [PageOutcome::Miss; 2]);
    let lease = done.lease.unwrap();
    assert_eq!(lease.pages(), 3);
    assert_eq!(done.times.queued_ns, 1);
    assert!(done.times.observed_ns > 1);

    let restored = blocks(1, 3, 20);
    let options = RestoreOptions { keep: true, ..RestoreOptions::default() };
    let restore = rig.client.restore(&lease, 1, &rig.region, &restored[1..], options).unwrap();
    let done = rig.next();
    assert_eq!((done.operation, done.status, done.pages), (restore, Status::Ok, 2));
    assert_eq!(rig.client.is_done(&restore), Some(true));
    assert!(!rig.device.holds(20, 10));
    assert!(rig.device.holds(21, 11) && rig.device.holds(22, 12));

    let expect = |rig: &mut Rig, kind, status, code| {
        let done = rig.next();
        assert_eq!((done.kind, done.status, done.code), (kind, status, code));
        done
    };
    rig.client.release(lease).unwrap();
    expect(&mut rig, RequestKind::Release, Status::Ok, Code::None);
    rig.client.release(lease).unwrap();
    expect(&mut rig, RequestKind::Release, Status::Error, Code::UnknownLease);
    rig.client.prepare(&rig.scope, &asked).unwrap();
    expect(&mut rig, RequestKind::Prepare, Status::Ok, Code::None);
    rig.client.ping().unwrap();
    expect(&mut rig, RequestKind::Ping, Status::Ok, Code::None);
    rig.client.forget(&rig.scope).unwrap();
    assert_eq!(expect(&mut rig, RequestKind::Forget, Status::Ok, Code::None).pages, 3);
    rig.client.unregister(rig.region).unwrap();
    expect(&mut rig, RequestKind::Unregister, Status::Ok, Code::None);
    rig.client.save(&rig.region, &saved).unwrap();
    let done = expect(&mut rig, RequestKind::Save, Status::Error, Code::UnknownRegion);
    assert!(rig.client.results(&done).all(|result| result.outcome == PageOutcome::None));
    rig.client.drain(Deadline::DEFAULT).unwrap();
    expect(&mut rig, RequestKind::Drain, Status::Ok, Code::None);
    assert_eq!(rig.client.outstanding(), 0);
    assert_eq!(rig.client.poll(), Ok(None));
    rig.client.close();
}

/// Goal: a failed restore is never taken for done. Method: a lease that does not exist.
#[test]
fn a_failed_restore_says_so_in_its_done_word() {
    let twin = Twin::start();
    let mut rig = Rig::new(twin.path());
    let pages = blocks(1, 2, 0);
    rig.client.save(&rig.region, &pages).unwrap();
    rig.next();
    let hashes = hashes(1, 2);
    rig.client.query(&rig.scope, &hashes, QueryMode::Demand, Deadline::DEFAULT).unwrap();
    let lease = rig.next().lease.unwrap();
    twin.with(|server| server.store.leases.clear());
    let operation =
        rig.client.restore(&lease, 0, &rig.region, &pages, RestoreOptions::default()).unwrap();
    assert_eq!(rig.client.is_done(&operation), None);
    let done = rig.next();
    assert_eq!((done.status, done.code), (Status::Error, Code::UnknownLease));
    assert_eq!(done.first_failed, Some(0));
    assert_eq!(rig.client.is_done(&operation), Some(false));
    assert_eq!(rig.client.is_layer_done(&operation, 0), Some(false));
    for none in [1, 256, u32::MAX] {
        assert_eq!(rig.client.is_layer_done(&operation, none), None, "a layer that there is not");
    }
}

/// Goal: each layer has a done word, and the last tells of the whole, at the index of an operation
/// without layers too. Method: the words are stored one by one before the operation ends.
#[test]
fn layers_have_done_words_of_their_own() {
    let twin = Twin::start();
    let client = Connect::new(twin.path()).done_words(2).connect().unwrap();
    let mut rig = Rig::over(client);
    assert_eq!(rig.region.layers(), 2);
    let pages = blocks(1, 1, 0);
    rig.client.save(&rig.region, &pages).unwrap();
    rig.next();
    let hashes = hashes(1, 1);
    rig.client.query(&rig.scope, &hashes, QueryMode::Demand, Deadline::DEFAULT).unwrap();
    let lease = rig.next().lease.unwrap();
    twin.hold(&[RequestKind::Restore]);
    for by_layer in [true, false, true] {
        let options = RestoreOptions { by_layer, keep: true, ..RestoreOptions::default() };
        let operation = rig.client.restore(&lease, 0, &rig.region, &pages, options).unwrap();
        let seen = |rig: &Rig| {
            let layer = |layer| rig.client.is_layer_done(&operation, layer);
            (layer(0), layer(1), rig.client.is_done(&operation))
        };
        assert_eq!(seen(&rig), (None, None, None));
        rig.client.submit().unwrap();
        let id = operation.id();
        let store = |word: u32, value: u32| {
            twin.with(move |server| server.seats[0].side.done.store(id.index, word, value));
        };
        store(0, id.done_word());
        if by_layer {
            assert_eq!(seen(&rig), (Some(true), None, None));
            // The rest fails: what is in place stays.
            store(1, id.failed_word());
            assert_eq!(seen(&rig), (Some(true), Some(false), Some(false)));
        } else {
            assert_eq!(seen(&rig), (Some(true), None, Some(true)));
        }
        twin.hold(&[]);
        rig.next();
        twin.hold(&[RequestKind::Restore]);
        let layer = by_layer.then_some(true);
        assert_eq!(seen(&rig), (Some(true), layer, Some(true)));
        assert_eq!(rig.client.is_layer_done(&operation, 2), None);
    }
}

/// Goal: what a GPU's memory and events are called arrives as it was said, and events are numbered
/// through.
#[test]
fn memory_and_events_of_a_gpu_are_registered_by_their_handles() {
    let twin = Twin::start();
    let mut rig = Rig::new(twin.path());
    let gpu: GpuId = "00112233445566778899aabbccddeeff".parse().unwrap();
    let handle = |number: u8| HexBytes([number; 64]);
    let of_gpu = |bytes| MemorySpec::Cuda { gpu, handle: handle(1), offset: 512, bytes };
    let memory = rig.client.register_cuda(&of_gpu(8192)).unwrap();
    assert_eq!(memory.bytes(), 8192);
    let nothing = rig.client.register_cuda(&of_gpu(0));
    assert!(matches!(nothing, Err(RegisterError::Refused { .. })), "{nothing:?}");
    assert_eq!(rig.client.register_events(gpu, &[handle(2), handle(3)]).unwrap(), 0);
    let none = rig.client.register_events(gpu, &[]);
    assert!(matches!(none, Err(RegisterError::Refused { .. })), "{none:?}");
    assert_eq!(rig.client.register_events(gpu, &[handle(4)]).unwrap(), 2);
    let (spec, events) = twin.with(|server| {
        let seat = &server.seats[0];
        let Reach::Gpu(spec) = &seat.memories[1] else { panic!("another memory") };
        (spec.clone(), seat.events.clone())
    });
    assert_eq!(spec, of_gpu(8192));
    assert_eq!(events, [2, 3, 4].map(|number| (gpu, handle(number))));
}

/// Goal: memory that was released is no use for a new region, nor to another client, while the region
/// over it works on. Method: a round trip through the old region, after the release.
#[test]
fn released_memory_serves_the_regions_over_it() {
    let twin = Twin::start();
    let mut rig = Rig::new(twin.path());
    let mut other = Rig::new(twin.path());
    let foreign = other.client.release_memory(rig.memory);
    assert!(matches!(foreign, Err(RegisterError::StaleHandle)), "{foreign:?}");
    rig.client.release_memory(rig.memory).unwrap();
    let twice = rig.client.release_memory(rig.memory);
    assert!(matches!(twice, Err(RegisterError::Refused { .. })), "{twice:?}");
    let over_it = rig.client.register_region(&layout(rig.scope, rig.memory));
    assert!(matches!(over_it, Err(RegisterError::Refused { .. })), "{over_it:?}");
    rig.client.save(&rig.region, &blocks(1, 2, 0)).unwrap();
    let saved = rig.next();
    assert_eq!((saved.status, saved.pages), (Status::Ok, 2));
    // Only its own handle has ended.
    let again = rig.client.register_memfd(rig.device.file(), rig.memory.bytes()).unwrap();
    assert_ne!(again, rig.memory);
    rig.client.register_region(&layout(rig.scope, again)).unwrap();
    other.client.register_region(&layout(other.scope, other.memory)).unwrap();
}

/// Goal: the Manager learns which event a copy waits for. Method: what it takes from the ring.
#[test]
fn fences_and_layers_travel_with_their_requests() {
    let twin = Twin::start();
    let mut rig = Rig::new(twin.path());
    twin.hold(&[RequestKind::Save, RequestKind::Restore]);
    let pages = blocks(1, 1, 0);
    let save = SaveOptions { fence: Some(7), ..SaveOptions::default() };
    rig.client.save_chains(&rig.region, &[Chain::from(&pages)], save).unwrap();
    rig.client.submit().unwrap();
    let taken = |count: usize| loop {
        let held = twin.with(|server| server.seats[0].held.clone());
        if held.len() == count {
            return held[count - 1].0.body;
        }
    };
    let RequestBody::Save { fence, .. } = taken(1) else { panic!("another request") };
    assert_eq!(fence, Some(7));
    let lease = Lease::from_parts(LeaseParts {
        lease: LeaseId(1),
        epoch: rig.client.epoch(),
        engine: rig.client.engine_id(),
        pages: 1,
        expires_ns: u64::MAX,
    });
    let restore = RestoreOptions { fence: Some(0), by_layer: true, ..RestoreOptions::default() };
    rig.client.restore(&lease, 0, &rig.region, &blocks(1, 1, 1), restore).unwrap();
    rig.client.submit().unwrap();
    let RequestBody::Restore { fence, by_layer, .. } = taken(2) else { panic!("another request") };
    assert_eq!((fence, by_layer), (Some(0), true));
}

/// Goal: parents travel as anchors, chains stay apart, and results come one a block. Method: one
/// save of four chains, one of them without its parent.
#[test]
fn chains_carry_their_parents_and_results_skip_them() {
    let twin = Twin::start();
    let mut rig = Rig::new(twin.path());
    let a = blocks(1, 4, 0);
    let b = blocks(2, 2, 8);
    let orphan = blocks(3, 3, 12);
    rig.client.save(&rig.region, &a[..2]).unwrap();
    rig.next();
    let chains = [
        Chain { parent: Some(a[1].hash), blocks: &a[2..] },
        Chain { parent: Some(orphan[0].hash), blocks: &orphan[1..] },
        Chain { parent: Some(orphan[0].hash), blocks: &[] },
        Chain::from(&b),
    ];
    rig.client.save_chains(&rig.region, &chains, SaveOptions::default()).unwrap();
    let done = rig.next();
    assert_eq!((done.status, done.pages, done.pages_refused), (Status::Partial, 4, 2));
    let results = rig.client.results(&done);
    assert_eq!(results.len(), 6);
    let outcomes: Vec<_> = results.map(|r| (r.outcome, r.code)).collect();
    let stored = (PageOutcome::Stored, Code::None);
    let refused = (PageOutcome::Refused, Code::ParentAbsent);
    assert_eq!(outcomes, [stored, stored, refused, refused, stored, stored]);

    let rest = &hashes(1, 4)[2..];
    let chain = Chain { parent: Some(a[1].hash), blocks: rest };
    rig.client.query(&rig.scope, chain, QueryMode::Candidate, Deadline::DEFAULT).unwrap();
    let done = rig.next();
    assert_eq!(done.pages, 2);
    assert_eq!(rig.client.results(&done).len(), 2);
}

#[test]
fn a_set_hits_only_what_every_member_has() {
    let twin = Twin::start();
    let mut rig = Rig::new(twin.path());
    let other = rig.client.define_namespace(&namespace("other")).unwrap();
    let other_region = rig.client.register_region(&layout(other, rig.memory)).unwrap();
    let set = rig.client.define_set(&[rig.scope, other]).unwrap();
    assert_eq!(set.page_bytes(), 2 * rig.scope.page_bytes());
    rig.client.save(&rig.region, &blocks(1, 3, 0)).unwrap();
    rig.next();
    rig.client.save(&other_region, &blocks(1, 2, 0)).unwrap();
    rig.next();
    rig.client.query(&set, &hashes(1, 3), QueryMode::Demand, Deadline::DEFAULT).unwrap();
    assert_eq!(rig.next().pages, 2);
}

/// Goal: a lease crosses sessions of one engine, and no further. Method: three clients, two of
/// one engine; the lease travels as numbers.
#[test]
fn a_lease_serves_its_attachment_group_and_nobody_else() {
    let twin = Twin::start();
    let engine = engine_id_random().unwrap();
    let connect = Connect::new(twin.path()).engine_id(engine);
    let mut scheduler = Rig::over(connect.connect().unwrap());
    let mut worker = Rig::over(connect.connect().unwrap());
    let mut stranger = Rig::new(twin.path());
    let pages = blocks(1, 2, 0);
    worker.device.fill(0, 77);
    worker.client.save(&worker.region, &pages).unwrap();
    worker.next();
    let hashes = hashes(1, 2);
    scheduler
        .client
        .query(&scheduler.scope, &hashes, QueryMode::Demand, Deadline::DEFAULT)
        .unwrap();
    let parts = scheduler.next().lease.unwrap().to_parts();
    let lease = Lease::from_parts(parts);

    let target = blocks(1, 2, 9);
    let options = RestoreOptions { keep: true, ..RestoreOptions::default() };
    worker.client.restore(&lease, 0, &worker.region, &target, options).unwrap();
    assert_eq!(worker.next().status, Status::Ok);
    assert!(worker.device.holds(9, 77));
    let refused = stranger.client.restore(&lease, 0, &stranger.region, &target, options);
    assert_eq!(refused, Err(SubmitError::StaleHandle));
    assert_eq!(stranger.client.release(lease), Err(SubmitError::StaleHandle));
    worker.client.release(lease).unwrap();
    assert_eq!(worker.next().status, Status::Ok);
}

/// Goal: a handle of another session never reaches the ring. Method: every call that takes one,
/// with the handles of a second client.
#[test]
fn handles_of_another_session_are_stale() {
    let twin = Twin::start();
    let mut rig = Rig::new(twin.path());
    let mut other = Rig::new(twin.path());
    twin.hold(&[RequestKind::Ping]);
    let ping = other.client.ping().unwrap();
    let pages = blocks(1, 1, 0);
    let hashes = hashes(1, 1);
    let stale = Err(SubmitError::StaleHandle);
    assert_eq!(rig.client.save(&other.region, &pages), stale);
    let demand = (QueryMode::Demand, Deadline::DEFAULT);
    assert_eq!(rig.client.query(&other.scope, &hashes, demand.0, demand.1), stale);
    assert_eq!(rig.client.prepare(&other.scope, &hashes), stale);
    assert_eq!(rig.client.forget(&other.scope), stale);
    assert_eq!(rig.client.unregister(other.region), stale);
    assert_eq!(rig.client.cancel(ping), stale);
    assert!(rig.client.define_set(&[other.scope]).is_err());
    assert!(rig.client.register_region(&layout(other.scope, rig.memory)).is_err());
    assert!(rig.client.register_region(&layout(rig.scope, other.memory)).is_err());
    assert_eq!(rig.client.outstanding(), 0);
    assert_eq!(rig.client.submit(), Ok(0));
    assert_eq!(rig.client.is_done(&ping), None);
}

/// Goal: nothing is visible before `submit`, everything after it. Method: the twin counts.
#[test]
fn a_batch_becomes_visible_as_a_whole() {
    let twin = Twin::start();
    let mut rig = Rig::new(twin.path());
    for _ in 0..5 {
        rig.client.ping().unwrap();
    }
    // Between two jobs the twin has looked at the ring.
    twin.with(|_| ());
    assert_eq!(twin.with(|server| server.seats[0].taken), 0);
    assert_eq!(rig.client.submit(), Ok(5));
    assert_eq!(rig.client.submit(), Ok(0));
    for _ in 0..5 {
        assert_eq!(rig.next().kind, RequestKind::Ping);
    }
    assert_eq!(twin.with(|server| server.seats[0].taken), 5);
}

#[test]
fn operations_end_in_any_order() {
    let twin = Twin::start();
    let mut rig = Rig::new(twin.path());
    twin.hold(&[RequestKind::Query]);
    let hashes = hashes(1, 1);
    let query =
        rig.client.query(&rig.scope, &hashes, QueryMode::Demand, Deadline::DEFAULT).unwrap();
    let ping = rig.client.ping().unwrap();
    assert_eq!(rig.next().operation, ping);
    assert_eq!(rig.client.wait(Duration::from_millis(5)), Ok(None));
    twin.hold(&[]);
    assert_eq!(rig.next().operation, query);
}

#[test]
fn a_cancelled_operation_ends_before_its_cancel() {
    let twin = Twin::start();
    let mut rig = Rig::new(twin.path());
    twin.hold(&[RequestKind::Query]);
    let hashes = hashes(1, 1);
    let query =
        rig.client.query(&rig.scope, &hashes, QueryMode::Demand, Deadline::DEFAULT).unwrap();
    let cancel = rig.client.cancel(query).unwrap();
    let first = rig.next();
    assert_eq!((first.operation, first.code), (query, Code::Cancelled));
    let second = rig.next();
    assert_eq!((second.operation, second.status), (cancel, Status::Ok));
    assert_eq!(rig.client.cancel(query), Err(SubmitError::StaleHandle), "it has ended");
}

#[test]
fn results_are_readable_until_the_next_poll_only() {
    let twin = Twin::start();
    let mut rig = Rig::new(twin.path());
    rig.client.save(&rig.region, &blocks(1, 2, 0)).unwrap();
    let done = rig.next();
    assert_eq!(rig.client.results(&done).len(), 2);
    assert_eq!(rig.client.results(&done).count(), 2, "as often as one likes");
    assert_eq!(rig.client.poll(), Ok(None));
    assert_eq!(rig.client.results(&done).len(), 0);
    rig.client.ping().unwrap();
    let done = rig.next();
    assert_eq!(rig.client.results(&done).len(), 0, "a ping has no pages");
}

#[test]
fn what_cannot_be_right_is_refused_before_the_ring() {
    let twin = Twin::start();
    let mut rig = Rig::new(twin.path());
    let bad_page = Block { hash: hashes(1, 1)[0], page: PAGES };
    let refused = SubmitError::BadPage { page: PAGES, pages: PAGES };
    assert_eq!(rig.client.save(&rig.region, &[bad_page]), Err(refused));
    assert_eq!(rig.client.save(&rig.region, &[]), Err(SubmitError::NoPages));
    assert_eq!(rig.client.prepare(&rig.scope, &[]), Err(SubmitError::NoPages));
    let many = hashes(1, 16_385);
    let too_many = SubmitError::TooManyPages { entries: 16_385, entries_max: 16_384 };
    assert_eq!(rig.client.prepare(&rig.scope, &many), Err(too_many));
    let chain = Chain { parent: Some(many[0]), blocks: &many[..16_384] };
    assert_eq!(rig.client.prepare(&rig.scope, chain), Err(too_many), "a parent counts");
    assert!(rig.client.prepare(&rig.scope, &many[..16_384]).is_ok());
    assert_eq!(rig.next().kind, RequestKind::Prepare);
}

#[test]
fn waiting_ends_at_once_when_nothing_is_outstanding() {
    let twin = Twin::start();
    let mut rig = Rig::new(twin.path());
    assert_eq!(rig.client.wait(PATIENCE * 1000), Ok(None));
    assert_eq!(wait_many(&mut [&mut rig.client], PATIENCE * 1000), Ok(None));
    assert_eq!(wait_many(&mut [], Duration::MAX), Ok(None));
}

/// Goal: a completion of any client ends the wait, whichever client it is. Method: three
/// clients, answers let through one at a time, the waiter asleep in between.
#[test]
fn waiting_on_many_clients_sees_each() {
    let twin = Twin::start();
    let mut rigs: Vec<Rig> = (0..3).map(|_| Rig::new(twin.path())).collect();
    twin.hold(&[RequestKind::Ping, RequestKind::Prepare, RequestKind::Drain]);
    let hashes = hashes(1, 1);
    let scope = rigs[0].scope;
    let first = rigs[0].client.prepare(&scope, &hashes).unwrap();
    let second = rigs[1].client.ping().unwrap();
    let third = rigs[2].client.drain(Deadline::DEFAULT).unwrap();
    let mut clients: Vec<_> = rigs.iter_mut().map(|rig| &mut rig.client).collect();
    assert_eq!(wait_many(&mut clients, Duration::from_millis(5)), Ok(None));
    for (held, client, operation) in [
        (&[RequestKind::Ping, RequestKind::Prepare][..], 2, third),
        (&[RequestKind::Prepare][..], 1, second),
        (&[][..], 0, first),
    ] {
        twin.hold(held);
        let (at, done) = wait_many(&mut clients, PATIENCE).unwrap().unwrap();
        assert_eq!((at, done.operation), (client, operation));
    }
    assert_eq!(wait_many(&mut clients, PATIENCE), Ok(None));
}

#[test]
fn the_session_state_is_the_managers_word() {
    let twin = Twin::start();
    let mut rig = Rig::new(twin.path());
    assert_eq!(rig.client.state(), Ok(SessionState::Open));
    rig.client.ping().unwrap();
    twin.with(|server| server.seats[0].side.set_state(SessionState::Draining));
    assert_eq!(rig.client.state(), Ok(SessionState::Draining));
    assert_eq!(rig.client.ping(), Err(SubmitError::Draining), "nothing new");
    assert_eq!(next(&mut rig.client).status, Status::Ok);
}

/// Goal: memory offered by address is the memory that is saved and restored. Method: a boxed
/// buffer that only the twin writes between the assertions.
#[test]
fn process_memory_is_reached_by_address() {
    let twin = Twin::start();
    let mut rig = Rig::new(twin.path());
    let bytes = HALF as usize * 2 * PAGES as usize;
    let memory = crate::fork::register_leaked(&mut rig.client, bytes);
    let region = rig.client.register_region(&layout(rig.scope, memory)).unwrap();
    let pages = blocks(4, 2, 0);
    rig.device.fill(0, 5);
    rig.device.fill(1, 6);
    rig.client.save(&rig.region, &pages).unwrap();
    rig.next();
    let hashes = hashes(4, 2);
    rig.client.query(&rig.scope, &hashes, QueryMode::Demand, Deadline::DEFAULT).unwrap();
    let lease = rig.next().lease.unwrap();
    let options = RestoreOptions { keep: true, ..RestoreOptions::default() };
    rig.client.restore(&lease, 0, &region, &pages, options).unwrap();
    assert_eq!(rig.next().status, Status::Ok);
    // Back out of the process's memory under other names, and into the memfd.
    let copies = blocks(5, 2, 0);
    rig.client.save(&region, &copies).unwrap();
    assert_eq!(rig.next().pages, 2);
    let hashes = crate::rig::hashes(5, 2);
    rig.client.query(&rig.scope, &hashes, QueryMode::Demand, Deadline::DEFAULT).unwrap();
    let lease = rig.next().lease.unwrap();
    let target = blocks(5, 2, 16);
    rig.client.restore(&lease, 0, &rig.region, &target, RestoreOptions::default()).unwrap();
    assert_eq!(rig.next().status, Status::Ok);
    assert!(rig.device.holds(16, 5) && rig.device.holds(17, 6));
}
