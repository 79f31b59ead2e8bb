//! Goal: nothing that a peer writes into its request ring hurts anyone but its own session. Method:
//! each rule of the protocol broken once, then random requests full of random numbers.

use fastrand::Rng;
use orbitkv_manager::core::{CopyFault, Direction, PeerFault};
use orbitkv_shm_protocol::ids::{LeaseId, OperationId, RegionId, ScopeId, SessionId};
use orbitkv_shm_protocol::record::{
    Code, PageEntry, PageRange, QueryMode, Request, RequestBody, Status,
};
use orbitkv_tests::rig::{Rig, Seat};
use orbitkv_tests::world::{Fate, World, chain, is_copy, pages};

fn request(index: u32, generation: u32, body: RequestBody) -> Request {
    let operation = OperationId { index, generation };
    Request { operation, deadline_ms: 0, range: PageRange::default(), body }
}

fn last_wrong(world: &World, session: SessionId) -> Code {
    world.client(session).wrong_answers.last().expect("an answer").code
}

#[test]
fn the_sixteenth_bad_request_closes_the_session() {
    let mut rig = Rig::dram(16);
    let held = chain(1, 4);
    rig.stored(&held);
    let other = rig.sit(2);
    let lease = rig.lease_for(other, &held);
    rig.lease(&held);
    for count in 1..16 {
        rig.world.malformed(rig.seat.session);
        let client = rig.world.client(rig.seat.session);
        assert_eq!((client.wrong_answers.len(), client.closed), (count, false));
    }
    rig.world.malformed(rig.seat.session);
    assert!(!rig.world.clients.contains_key(&rig.seat.session.0), "closed, drained and ended");
    assert_eq!(rig.world.core.stats().bad_requests, 16);
    assert_eq!(rig.world.core.gauges().leases, 1, "the other's lease stays");
    rig.release(other, lease);
    rig.assert_at_rest();
}

#[test]
fn each_bad_field_gets_one_error() {
    let mut rig = Rig::dram(64);
    let held = chain(1, 4);
    rig.stored(&held);
    let Seat { session, scope, region } = rig.seat;
    let busy = rig.world.save(session, region, &pages(&chain(2, 4)));
    let range = PageRange { start: busy.index * 1024, len: 4 };
    let save = RequestBody::Save { region, fence: None };
    let query = RequestBody::Query { scope, mode: QueryMode::Demand };
    let entries = pages(&held);
    let ranged = |index, generation, start, len| Request {
        range: PageRange { start, len },
        ..request(index, generation, query)
    };
    let cases: [(Request, &[PageEntry], Code); 11] = [
        (request(busy.index, 50, RequestBody::Ping), &[], Code::OperationInUse),
        (request(64, 1, RequestBody::Ping), &[], Code::BadRequest),
        (request(u32::MAX, 1, RequestBody::Ping), &[], Code::BadRequest),
        (request(9, 0, RequestBody::Ping), &[], Code::BadRequest),
        (request(9, 1 << 31, RequestBody::Ping), &[], Code::BadRequest),
        (ranged(9, 1, range.start + 3, 1), &entries[..1], Code::RangeInUse),
        (ranged(9, 1, 65_535, 2), &[], Code::BadRequest),
        (ranged(9, 1, u32::MAX, u32::MAX), &[], Code::BadRequest),
        (ranged(9, 1, 20_000, 16_385), &[], Code::BadRequest),
        // The copy of the range is not what the record said.
        (ranged(9, 1, 20_000, 3), &entries, Code::BadRequest),
        (
            Request { range: PageRange { start: 0, len: 1 }, ..request(9, 1, RequestBody::Drain) },
            &entries[..1],
            Code::BadRequest,
        ),
    ];
    for (wrong, entries, code) in cases {
        rig.world.request_wrong(session, wrong, entries);
        assert_eq!(last_wrong(&rig.world, session), code, "{wrong:?}");
    }
    assert!(!rig.world.client(session).closed);
    // Numbers that the client could know to be wrong end the operation, not the session.
    let unknown = rig.world.ask(session, RequestBody::Unregister { region: RegionId(9) });
    assert_eq!(rig.world.ended(session, unknown).completion.code, Code::UnknownRegion);
    let unknown = rig.world.ask(session, RequestBody::Forget { scope: ScopeId(9) });
    assert_eq!(rig.world.ended(session, unknown).completion.code, Code::UnknownScope);
    let body = RequestBody::Release { lease: LeaseId(0) };
    let unknown = rig.world.ask(session, body);
    assert_eq!(rig.world.ended(session, unknown).completion.code, Code::UnknownLease);
    rig.world.settle();
    assert_eq!(rig.world.ended(session, busy).completion.status, Status::Ok);
    let body = save;
    let mut outside = pages(&held);
    outside[2].device_page = 512;
    let wrong = rig.world.request(session, body, &outside, 0);
    assert_eq!(rig.world.ended(session, wrong).completion.code, Code::BadRequest);
}

#[test]
fn a_generation_is_used_once() {
    let mut rig = Rig::dram(4);
    let session = rig.seat.session;
    let first = rig.world.ask(session, RequestBody::Ping);
    assert_eq!(rig.world.ended(session, first).completion.status, Status::Ok);
    let replay = request(first.index, first.generation, RequestBody::Ping);
    rig.world.request_wrong(session, replay, &[]);
    assert_eq!(last_wrong(&rig.world, session), Code::BadRequest);
}

#[test]
fn more_operations_than_credits_close_the_session() {
    let mut rig = Rig::ssd(16, 16);
    let session = rig.world.attach_with(3, 4, 4096);
    let scope = rig.world.namespace(session, &orbitkv_tests::world::spec("model", 4096));
    let region = rig.world.region(session, scope, 64);
    for branch in 0..4 {
        rig.world.save(session, region, &pages(&chain(branch, 2)));
    }
    let over = request(0, 77, RequestBody::Ping);
    rig.world.request_wrong(session, over, &[]);
    let client = rig.world.client(session);
    let operation = over.operation;
    assert_eq!(client.fault, Some(PeerFault::NoCredit { operation }));
    assert!(client.closed && client.wrong_answers.is_empty());
    // Its copies end before it does.
    rig.world.settle();
    assert!(!rig.world.clients.contains_key(&session.0));
    rig.stored(&chain(1, 2));
    rig.world.settle();
    rig.assert_at_rest();
}

fn some_number(rng: &mut Rng) -> u32 {
    match rng.u8(..6) {
        0 => u32::MAX,
        1 => rng.u32(..),
        2 => 1 << rng.u32(..32),
        _ => rng.u32(..6),
    }
}

/// One of three events, or none that there is.
fn some_fence(rng: &mut Rng) -> Option<u32> {
    (rng.u8(..3) == 0).then(|| rng.u32(..5))
}

fn some_request(rng: &mut Rng) -> (Request, Vec<PageEntry>) {
    let region = RegionId(some_number(rng));
    let scope = ScopeId(some_number(rng));
    let lease = LeaseId(u64::from(rng.u32(..4)) << 20 | u64::from(some_number(rng)));
    let body = match rng.u8(..12) {
        0 | 1 => RequestBody::Save { region, fence: some_fence(rng) },
        2..5 => RequestBody::Query {
            scope,
            mode: *rng
                .choice(&[QueryMode::Demand, QueryMode::Speculative, QueryMode::Candidate])
                .expect("three"),
        },
        5 | 6 => RequestBody::Restore {
            region,
            lease,
            offset: some_number(rng),
            fence: some_fence(rng),
            keep: rng.bool(),
            by_layer: rng.u8(..3) == 0,
        },
        7 => RequestBody::Release { lease },
        8 => RequestBody::Cancel {
            operation: OperationId { index: some_number(rng), generation: some_number(rng) },
        },
        9 => RequestBody::Prepare { scope },
        10 => RequestBody::Forget { scope },
        _ => *rng
            .choice(&[RequestBody::Ping, RequestBody::Drain, RequestBody::Unregister { region }])
            .expect("three"),
    };
    let len = rng.usize(..6);
    let entries: Vec<_> = (0..len)
        .map(|_| PageEntry {
            // Few hashes in any order: chains that contradict each other.
            hash: [rng.u8(..5); 32],
            device_page: some_number(rng),
            flags: if rng.bool() { 0 } else { some_number(rng) },
            reserved: u64::from(rng.u8(..20) == 0),
        })
        .collect();
    let range = PageRange {
        start: if rng.u8(..9) == 0 { some_number(rng) } else { rng.u32(..40) * 8 },
        len: if rng.u8(..9) == 0 { some_number(rng) } else { len as u32 },
    };
    let operation = OperationId {
        index: if rng.u8(..9) == 0 { some_number(rng) } else { rng.u32(..64) },
        generation: if rng.u8(..9) == 0 { some_number(rng) } else { rng.u32(1..1000) },
    };
    (Request { operation, deadline_ms: rng.u32(..5), range, body }, entries)
}

/// SEC-01: any numbers give an answer or a closed session, and leave the others alone.
#[test]
fn random_requests_neither_panic_nor_leak() {
    use orbitkv_manager::core::{Core, CoreConfig, Effect, Effects, Event, RegionKind};
    for seed in 0..300 {
        let mut rng = Rng::with_seed(seed);
        let devices = [orbitkv_tests::world::device(2, 8 * 4096)];
        let config = CoreConfig {
            devices: orbitkv_tests::disk::Disk::layouts(&devices),
            bad_requests_max: 200,
            ..orbitkv_tests::rig::generous(12 * 4096)
        };
        let mut core = Core::new(config);
        let mut out = Effects::default();
        let mut now = 1;
        let engine = orbitkv_shm_protocol::ids::EngineId([1; 16]);
        let session = SessionId(0);
        let event =
            Event::SessionOpened { session, engine, uid: 0, credits: 64, page_entries: 1024 };
        core.handle(now, event, &mut out);
        for model in ["a", "b"] {
            let spec = orbitkv_tests::world::spec(model, 4096);
            let (scope, _) = core.define_namespace(session, &spec).expect("a good namespace");
            core.register_region(session, scope, 4, RegionKind::Host).expect("a good region");
        }
        core.register_events(session, 3).expect("room for events");
        let mut tickets = Vec::new();
        for _ in 0..400 {
            now += rng.u64(..100_000);
            match rng.u8(..3) {
                0 if !tickets.is_empty() => {
                    let ticket: Effect = tickets.swap_remove(rng.usize(..tickets.len()));
                    let fault = rng.u8(..8) == 0;
                    end(&mut core, now, &ticket, fault, &mut out);
                }
                1 if rng.u8(..9) == 0 => core.handle(now, Event::Tick, &mut out),
                _ => {
                    let (request, entries) = some_request(&mut rng);
                    let pages = if request.range.len as usize == entries.len() {
                        &entries[..]
                    } else {
                        &[]
                    };
                    core.handle(now, Event::Requested { session, request, pages }, &mut out);
                }
            }
            core.pump(now, &mut out);
            tickets.extend(out.list.drain(..).filter(|effect| {
                matches!(
                    effect,
                    Effect::Copy { .. }
                        | Effect::Read { .. }
                        | Effect::Write { .. }
                        | Effect::RecordForget { .. }
                )
            }));
            out.clear();
        }
        core.handle(now, Event::SessionClosed { session }, &mut out);
        loop {
            core.pump(now, &mut out);
            tickets.append(&mut out.list);
            out.clear();
            let Some(effect) = tickets.pop() else { break };
            end(&mut core, now, &effect, false, &mut out);
        }
        let gauges = core.gauges();
        assert_eq!((gauges.sessions, gauges.leases, gauges.operations), (0, 0, 0), "seed {seed}");
        assert_eq!((gauges.pool_pinned_bytes, gauges.pool_draining_bytes), (0, 0), "seed {seed}");
        core.check_laws();
    }
}

fn end(
    core: &mut orbitkv_manager::core::Core,
    now: u64,
    effect: &orbitkv_manager::core::Effect,
    fault: bool,
    out: &mut orbitkv_manager::core::Effects,
) {
    use orbitkv_manager::core::{CopyFault, Effect, Event, IoFault};
    let io = fault.then_some(IoFault::Errno(5));
    match effect {
        Effect::Copy { ticket, pages, .. } => {
            let pages_done = if fault { 0 } else { pages.len() as u32 };
            let fault = fault.then_some(CopyFault::Peer);
            let checksums = vec![7; pages_done as usize];
            let ticket = *ticket;
            core.handle(
                now,
                Event::Copied { ticket, pages_done, fault, ended_ns: now, checksums: &checksums },
                out,
            );
        }
        Effect::Read { ticket, .. } => {
            core.handle(now, Event::ReadEnded { ticket: *ticket, fault: io }, out);
        }
        Effect::Write { ticket, .. } => {
            core.handle(
                now,
                Event::WriteEnded { ticket: *ticket, fault: io, checksum: Some(7) },
                out,
            );
        }
        Effect::RecordForget { ticket, .. } => {
            core.handle(now, Event::ForgetRecorded { ticket: *ticket, fault: io }, out);
        }
        _ => {}
    }
}

/// A ticket that was ended already, or never given, ends nothing.
#[test]
fn unknown_tickets_are_ignored() {
    use orbitkv_manager::core::{Core, Effects, Event, Ticket};
    let mut core = Core::new(orbitkv_tests::rig::generous(1 << 20));
    let mut out = Effects::default();
    for number in [0, 1, u64::MAX, 1 << 32] {
        let ticket = Ticket(number);
        core.handle(1, Event::ReadEnded { ticket, fault: None }, &mut out);
        core.handle(1, Event::WriteEnded { ticket, fault: None, checksum: None }, &mut out);
        core.handle(1, Event::ForgetRecorded { ticket, fault: None }, &mut out);
        let event =
            Event::Copied { ticket, pages_done: 1, fault: None, ended_ns: 1, checksums: &[1] };
        core.handle(1, event, &mut out);
    }
    assert!(out.list.is_empty());
    core.check_laws();
}

/// Goal: a stream of the engine that waits for a done word passes although nobody hears of the end:
/// the odd word comes once nothing of the restore runs any more, and never over an even one.
/// Method: the client goes before, in the middle of and after the copies of its restores.
#[test]
fn an_abandoned_restore_gets_its_odd_done_word_after_its_copies() {
    let mut rig = Rig::ssd(16, 16);
    let held = chain(1, 4);
    rig.stored(&held);
    let (lease, other) = (rig.lease(&held), rig.lease(&held));
    let whole = rig.restore(rig.seat, lease, &held, true);
    rig.world.settle_only(is_copy(Direction::Restore));
    assert_eq!(rig.world.ended(rig.seat.session, whole).completion.status, Status::Ok);
    let cut = rig.restore(rig.seat, lease, &held, true);
    let waits = rig.restore(rig.seat, other, &held, true);
    let copies = rig.in_flight(is_copy(Direction::Restore));
    assert!(copies >= 2);
    rig.world.close(rig.seat.session);
    let words = |rig: &Rig| {
        let words = &rig.world.client(rig.seat.session).done_words;
        [cut, waits].map(|operation| {
            let own = [operation.done_word(), operation.failed_word()];
            words.get(&operation.index).copied().filter(|word| own.contains(word))
        })
    };
    assert_eq!(words(&rig), [None; 2], "copies run");
    let first = rig.world.work.iter().position(is_copy(Direction::Restore)).expect("a copy");
    rig.world.finish(first, Fate::Copy(CopyFault::Peer, 0));
    assert_eq!(words(&rig), [Some(cut.failed_word()), None]);
    // The other's copies end well: the device has stored the even word, which stays.
    while rig.in_flight(is_copy(Direction::Restore)) > 1 {
        let at = rig.world.work.iter().position(is_copy(Direction::Restore)).expect("a copy");
        rig.world.finish(at, Fate::Good);
    }
    rig.world.settle();
    assert!(!rig.world.clients.contains_key(&rig.seat.session.0), "closed, drained and ended");
    rig.assert_at_rest();
}
