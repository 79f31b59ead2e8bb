//! A Manager that lost its mind: whatever it writes, the client answers with a typed end and one
//! report for each operation, and never panics or hangs.
//!
//! The fault model: the twin writes any bytes into its own segment, through its own writable
//! mapping (by `/proc/self/mem`, because its ring refuses to write nonsense), and anything through
//! its ring that the ring lets pass.

use std::collections::HashSet;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use orbitkv_engine::{
    Code, Completion, Connect, Deadline, Gone, Operation, PageOutcome, ProtocolFault, QueryMode,
    RequestKind, Status, SubmitError,
};
use orbitkv_shm_protocol::ids::OperationId;
use orbitkv_shm_protocol::layout::{COMPLETION_TAIL, REQUEST_HEAD, RING_OFFSET};
use orbitkv_shm_protocol::record::{self, CompletionRecord, PageResult, Tier};
use orbitkv_shm_protocol::ring::RingViolation;
use orbitkv_shm_protocol::segment::ManagerSide;
use proptest::prelude::*;

use crate::rig::{PATIENCE, Rig, blocks, hashes};
use crate::twin::{Seat, Twin};

/// Overwrites bytes of the completion segment.
fn scribble(side: &ManagerSide, offset: usize, bytes: &[u8]) {
    let (done_words, _) = side.done.region();
    let start = done_words.expose_provenance() - side.geometry().done_words_offset();
    let memory = File::options().write(true).open("/proc/self/mem").unwrap();
    memory.write_all_at(bytes, (start + offset) as u64).unwrap();
}

/// Publishes `record` as it is, sequence included, as the twin's first completion.
fn forge(side: &ManagerSide, record: &CompletionRecord) {
    scribble(side, RING_OFFSET, bytemuck::bytes_of(record));
    scribble(side, COMPLETION_TAIL, &1_u64.to_ne_bytes());
}

/// A session with one save of two pages and one ping outstanding, neither answered.
struct Victim {
    twin: Twin,
    rig: Rig,
    save: Operation,
    ping: Operation,
}

impl Victim {
    fn new() -> Self {
        let twin = Twin::start();
        let mut rig = Rig::over(Connect::new(twin.path()).ring_capacity(64).connect().unwrap());
        twin.hold(RequestKind::ALL);
        let save = rig.client.save(&rig.region, &blocks(1, 2, 0)).unwrap();
        let ping = rig.client.ping().unwrap();
        rig.client.submit().unwrap();
        Self { twin, rig, save, ping }
    }

    fn id(&self) -> OperationId {
        self.save.id()
    }

    /// Lets the twin do `evil`, then collects what the client says until it says it is over.
    fn suffer(mut self, evil: impl FnOnce(&mut Seat) + Send + 'static) -> (Vec<Completion>, Gone) {
        self.twin.with(|server| evil(&mut server.seats[0]));
        let mut told = Vec::new();
        let gone = loop {
            match self.rig.client.wait(PATIENCE) {
                Ok(Some(completion)) => told.push(completion),
                Ok(None) => {
                    panic!("nothing noticed; {} outstanding", self.rig.client.outstanding())
                }
                Err(gone) => break gone,
            }
        };
        let names: HashSet<_> = told.iter().map(|completion| completion.operation).collect();
        assert_eq!(names, HashSet::from([self.save, self.ping]), "each once: {told:?}");
        assert_eq!(told.len(), 2);
        let client = &mut self.rig.client;
        assert_eq!(client.poll(), Err(gone), "for ever");
        assert_eq!(client.submit(), Err(gone));
        assert_eq!(client.ping(), Err(SubmitError::ManagerGone(gone)));
        assert_eq!(client.cancel(self.save), Err(SubmitError::ManagerGone(gone)));
        assert!(client.define_namespace(&crate::rig::namespace("x")).is_err());
        assert_eq!(client.outstanding(), 0);
        (told, gone)
    }

    fn expect_fault(self, evil: impl FnOnce(&mut Seat) + Send + 'static) -> ProtocolFault {
        let (told, gone) = self.suffer(evil);
        assert!(told.iter().all(|completion| completion.status == Status::Gone), "{told:?}");
        let Gone::Protocol(fault) = gone else { panic!("{gone:?}") };
        fault
    }
}

/// A correct completion of the victim's save, to be spoiled.
fn honest(operation: OperationId) -> record::Completion {
    record::Completion::ok(operation, RequestKind::Save)
}

/// Spoils one number of an otherwise correct record.
fn spoil(spoil: impl FnOnce(&mut CompletionRecord) + Send + 'static) -> ProtocolFault {
    let victim = Victim::new();
    let id = victim.id();
    victim.expect_fault(move |seat| {
        let mut record = honest(id).encode(seat.side.session(), seat.side.epoch(), 0);
        spoil(&mut record);
        forge(&seat.side, &record);
        seat.side.ringer.ring();
    })
}

#[test]
fn the_sequence_must_be_that_of_the_slot() {
    let fault = spoil(|record| record.sequence = 64);
    let expected = RingViolation::WrongSequence { position: 0, found: 64 };
    assert_eq!(fault, ProtocolFault::Ring(expected));
}

#[test]
fn the_index_must_not_jump_or_step_back() {
    for tail in [65, 1 << 40, u64::MAX, 1 << 63] {
        let fault = Victim::new().expect_fault(move |seat| {
            scribble(&seat.side, COMPLETION_TAIL, &tail.to_ne_bytes());
            seat.side.ringer.ring();
        });
        assert!(matches!(fault, ProtocolFault::Ring(_)), "{tail}: {fault:?}");
    }
}

#[test]
fn session_and_epoch_must_be_this_ones() {
    for fault in [spoil(|record| record.session += 1), spoil(|record| record.epoch ^= 1)] {
        assert!(matches!(fault, ProtocolFault::BadField(_)), "{fault:?}");
    }
}

#[test]
fn an_operation_that_is_not_outstanding_cannot_end() {
    let unknown = |fault| matches!(fault, ProtocolFault::UnknownOperation { .. });
    assert!(unknown(spoil(|record| record.operation_index = 63)));
    assert!(unknown(spoil(|record| record.operation_index = u32::MAX)));
    assert!(unknown(spoil(|record| record.operation_generation += 1)));
    assert!(unknown(spoil(|record| record.operation_generation = 0)));
}

#[test]
fn numbers_that_name_nothing_are_refused() {
    for fault in [
        spoil(|record| record.kind = 0),
        spoil(|record| record.kind = 999),
        spoil(|record| record.status = 0),
        spoil(|record| record.code = 999),
    ] {
        assert!(matches!(fault, ProtocolFault::BadField(_)), "{fault:?}");
    }
    let fault = spoil(|record| record.kind = RequestKind::Query as u16);
    assert!(matches!(fault, ProtocolFault::WrongKind { .. }), "{fault:?}");
}

#[test]
fn counts_beyond_the_request_are_refused() {
    for fault in [
        spoil(|record| record.pages = 3),
        spoil(|record| record.pages_present = u32::MAX),
        spoil(|record| record.pages_refused = 3),
        spoil(|record| record.first_failed = 2),
        spoil(|record| record.lease = 7),
    ] {
        assert!(matches!(fault, ProtocolFault::BadCompletion { .. }), "{fault:?}");
    }
}

/// Goal: what a release lets go of, and what a prepare begins over the namespaces of a set, are no
/// pages of the request, and end no session.
#[test]
fn counts_about_other_pages_than_the_requests_are_believed() {
    let twin = Twin::start();
    let mut rig = Rig::new(twin.path());
    let save = rig.client.save(&rig.region, &blocks(1, 2, 0)).unwrap();
    assert_eq!(rig.next().operation, save);
    let hit = {
        rig.client.query(&rig.scope, &hashes(1, 2), QueryMode::Demand, Deadline::DEFAULT).unwrap();
        rig.next()
    };
    twin.hold(RequestKind::ALL);
    let release = rig.client.release(hit.lease.unwrap()).unwrap();
    let prepare = rig.client.prepare(&rig.scope, &hashes(1, 2)).unwrap();
    rig.client.submit().unwrap();
    twin.with(move |server| {
        let seat = &mut server.seats[0];
        for (operation, pages) in [(release, 2), (prepare, 8)] {
            let kind = if pages == 2 { RequestKind::Release } else { RequestKind::Prepare };
            let told = record::Completion { pages, ..record::Completion::ok(operation.id(), kind) };
            seat.complete(0, &[], told);
        }
        seat.side.completions.publish();
        seat.side.ringer.ring();
    });
    let told = [rig.next(), rig.next()];
    assert_eq!(told.map(|done| (done.status, done.pages)), [(Status::Ok, 2), (Status::Ok, 8)]);
}

/// Goal: one operation ends once. Method: the same correct record twice, then a replay of an
/// earlier generation of a reused index.
#[test]
fn a_duplicate_or_replayed_completion_is_refused() {
    let victim = Victim::new();
    let id = victim.id();
    let (told, gone) = victim.suffer(move |seat| {
        seat.complete(0, &[], honest(id));
        seat.complete(0, &[], honest(id));
        seat.side.completions.publish();
        seat.side.ringer.ring();
    });
    assert_eq!((told[0].operation.id(), told[0].status), (id, Status::Ok), "the first counts");
    assert_eq!(told[1].status, Status::Gone);
    assert_eq!(gone, Gone::Protocol(ProtocolFault::UnknownOperation { operation: id }));

    let twin = Twin::start();
    let mut rig = Rig::new(twin.path());
    let old = rig.client.ping().unwrap();
    rig.next();
    twin.hold(RequestKind::ALL);
    let new = rig.client.ping().unwrap();
    rig.client.submit().unwrap();
    assert_eq!(old.id().index, new.id().index, "the index is used again");
    let id = old.id();
    twin.with(move |server| {
        let completion = record::Completion::ok(id, RequestKind::Ping);
        server.seats[0].complete(0, &[], completion);
        server.seats[0].side.completions.publish();
    });
    let told = rig.client.wait(PATIENCE).unwrap().unwrap();
    assert_eq!((told.operation, told.status), (new, Status::Gone));
    let fault = ProtocolFault::UnknownOperation { operation: id };
    assert_eq!(rig.client.poll(), Err(Gone::Protocol(fault)));
}

/// Goal: an operation that was never published cannot have ended. Method: the twin guesses its id.
#[test]
fn a_completion_of_a_staged_operation_is_refused() {
    let twin = Twin::start();
    let mut rig = Rig::new(twin.path());
    let staged = rig.client.ping().unwrap();
    let id = staged.id();
    twin.with(move |server| {
        let completion = record::Completion::ok(id, RequestKind::Ping);
        server.seats[0].complete(0, &[], completion);
        server.seats[0].side.completions.publish();
    });
    let told = rig.client.poll().unwrap().unwrap();
    assert_eq!((told.operation, told.status), (staged, Status::Gone));
    assert!(matches!(rig.client.poll(), Err(Gone::Protocol(_))));
}

#[test]
fn a_cancel_must_not_overtake_its_target() {
    let twin = Twin::start();
    let mut rig = Rig::new(twin.path());
    twin.hold(RequestKind::ALL);
    let target = rig.client.ping().unwrap();
    let cancel = rig.client.cancel(target).unwrap();
    rig.client.submit().unwrap();
    let id = cancel.id();
    twin.with(move |server| {
        let completion = record::Completion::ok(id, RequestKind::Cancel);
        server.seats[0].complete(0, &[], completion);
        server.seats[0].side.completions.publish();
    });
    while rig.client.wait(PATIENCE).is_ok_and(|told| told.is_some()) {}
    let fault = ProtocolFault::CancelledTooEarly { target: target.id() };
    assert_eq!(rig.client.poll(), Err(Gone::Protocol(fault)));
}

/// One lap of the request ring, so that the next request needs a slot back.
fn lap(rig: &mut Rig) {
    for _ in 0..rig.client.limits().ring_capacity {
        rig.client.ping().unwrap();
        rig.next();
    }
}

/// Goal: a Manager that keeps the slots of the request ring blocks its client, and costs it no
/// credit and no range. Method: one lap, then more refusals than the table has ranges.
#[test]
fn a_request_ring_that_stays_full_blocks_and_keeps_nothing() {
    let twin = Twin::start();
    let connect = Connect::new(twin.path()).ring_capacity(64).page_entries(1024);
    let mut rig = Rig::over(connect.connect().unwrap());
    twin.with(|server| server.seats[0].hoards = true);
    lap(&mut rig);
    let names = hashes(1, 100);
    for _ in 0..100 {
        assert_eq!(rig.client.prepare(&rig.scope, &names), Err(SubmitError::WouldBlock));
    }
    assert_eq!(rig.client.outstanding(), 0);
    twin.with(|server| server.seats[0].hoards = false);
    twin.with(|_| ());
    assert!(rig.client.prepare(&rig.scope, &names).is_ok());
    assert_eq!(rig.next().kind, RequestKind::Prepare);
}

/// Goal: an impossible index of the request ring ends the session too. Method: after one lap the
/// next request looks at it.
#[test]
fn the_request_index_must_not_jump_or_step_back() {
    for head in [65, u64::MAX, 1 << 63] {
        let twin = Twin::start();
        let mut rig = Rig::over(Connect::new(twin.path()).ring_capacity(64).connect().unwrap());
        lap(&mut rig);
        twin.with(move |server| {
            scribble(&server.seats[0].side, REQUEST_HEAD, &head.to_ne_bytes());
        });
        let Err(SubmitError::ManagerGone(gone)) = rig.client.ping() else { panic!("{head}") };
        assert!(matches!(gone, Gone::Protocol(ProtocolFault::Ring(_))), "{gone:?}");
        assert_eq!(rig.client.outstanding(), 0, "the ping was not staged");
        assert_eq!(rig.client.poll(), Err(gone));
    }
}

/// Goal: page results are checked before an engine acts on them. Method: results of another
/// operation count as unwritten; nonsense under the right name ends the session.
#[test]
fn page_results_are_checked_too() {
    let twin = Twin::start();
    let mut rig = Rig::new(twin.path());
    twin.hold(RequestKind::ALL);
    let wait_for = |rig: &mut Rig, results: Vec<PageResult>, id| {
        rig.client.submit().unwrap();
        twin.with(move |server| {
            server.seats[0].complete(0, &results, honest(id));
            server.seats[0].side.completions.publish();
            server.seats[0].side.ringer.ring();
        });
        rig.next()
    };
    let save = rig.client.save(&rig.region, &blocks(1, 2, 0)).unwrap();
    let other = OperationId { index: save.id().index, generation: save.id().generation + 9 };
    let stored = |id| PageResult::new(id, PageOutcome::Stored, Tier::Dram, Code::None);
    let done = wait_for(&mut rig, vec![stored(save.id()), stored(other)], save.id());
    let outcomes: Vec<_> = rig.client.results(&done).map(|r| r.outcome).collect();
    assert_eq!(outcomes, [PageOutcome::Stored, PageOutcome::None]);
    assert_eq!(rig.client.poll(), Ok(None));

    for field in 0..4 {
        let twin = Twin::start();
        let mut rig = Rig::new(twin.path());
        twin.hold(RequestKind::ALL);
        let save = rig.client.save(&rig.region, &blocks(1, 1, 0)).unwrap();
        let ping = rig.client.ping().unwrap();
        rig.client.submit().unwrap();
        let id = save.id();
        twin.with(move |server| {
            let mut result = stored(id);
            *[&mut result.outcome, &mut result.tier, &mut result.code, &mut result.restorable]
                [field] = 999;
            server.seats[0].complete(0, &[result], honest(id));
            server.seats[0].side.completions.publish();
        });
        let done = rig.next();
        assert_eq!(done.operation, save);
        let outcomes: Vec<_> = rig.client.results(&done).map(|r| r.outcome).collect();
        assert_eq!(outcomes, [PageOutcome::None], "field {field} is not believed");
        let told = rig.client.poll().unwrap().unwrap();
        assert_eq!((told.operation, told.status), (ping, Status::Gone));
        let over = rig.client.poll();
        assert!(matches!(over, Err(Gone::Protocol(ProtocolFault::BadResult { .. }))), "{over:?}");
    }
}

/// Goal: a Manager that hears of its own fault lets go. Method: the twin sees the socket close.
#[test]
fn a_broken_session_is_closed_at_once() {
    let twin = Twin::start();
    let mut rig = Rig::new(twin.path());
    twin.hold(RequestKind::ALL);
    rig.client.ping().unwrap();
    rig.client.submit().unwrap();
    twin.with(|server| {
        scribble(&server.seats[0].side, COMPLETION_TAIL, &u64::MAX.to_ne_bytes());
    });
    while rig.client.wait(PATIENCE).is_ok_and(|told| told.is_some()) {}
    let end = std::time::Instant::now() + PATIENCE;
    while twin.with(|server| !server.seats.is_empty()) {
        assert!(std::time::Instant::now() < end, "the socket is still open");
    }
    assert!(!rig.client.has_manager_exited(), "only the session is over");
}

/// Goal: bytes that change while the client reads them end the session or are completions that fit
/// their requests, each operation reported once. Method: honest answers, while a thread keeps
/// writing over the bodies of all records and over the results.
#[test]
fn bytes_that_change_while_they_are_read_give_an_end_or_progress() {
    for seed in 1..16_u64 {
        let twin = Twin::start();
        let connect = Connect::new(twin.path()).ring_capacity(64).page_entries(1024);
        let mut rig = Rig::over(connect.connect().unwrap());
        twin.hold(RequestKind::ALL);
        let mut names: HashSet<_> = (0..40).map(|_| rig.client.ping().unwrap()).collect();
        names.insert(rig.client.save(&rig.region, &blocks(1, 8, 0)).unwrap());
        rig.client.submit().unwrap();
        while twin.with(|server| server.seats[0].held.len()) < names.len() {}
        let ended = Arc::new(AtomicBool::new(false));
        let end = ended.clone();
        let scribbler = twin.with(move |server| {
            let seat = &mut server.seats[0];
            let scribbler = scribble_until(&end, &seat.side, seed);
            for (request, _) in std::mem::take(&mut seat.held) {
                let told = record::Completion::ok(request.operation, request.kind());
                seat.complete(request.range.start, &[], told);
                seat.side.completions.publish();
                seat.side.ringer.ring();
            }
            scribbler
        });
        loop {
            match rig.client.wait(PATIENCE) {
                Ok(Some(told)) => {
                    assert!(names.remove(&told.operation), "a second report: {told:?}");
                    rig.client.results(&told).for_each(drop);
                    let _ = rig.client.is_done(&told.operation);
                }
                Ok(None) => break,
                Err(gone) => {
                    assert!(matches!(gone, Gone::Protocol(_)), "{gone:?}");
                    break;
                }
            }
        }
        ended.store(true, Ordering::Relaxed);
        scribbler.join().unwrap();
        assert!(names.is_empty(), "not reported: {names:?}");
    }
}

/// Writes over everything in the records behind their sequence, and over the page results.
fn scribble_until(ended: &Arc<AtomicBool>, side: &ManagerSide, seed: u64) -> JoinHandle<()> {
    // Keeps the segment mapped until the thread has ended.
    let (ended, mapped) = (ended.clone(), side.done.clone());
    let geometry = side.geometry();
    std::thread::spawn(move || {
        let start = mapped.region().0.expose_provenance() - geometry.done_words_offset();
        let memory = File::options().write(true).open("/proc/self/mem").unwrap();
        let mut random = seed;
        while !ended.load(Ordering::Relaxed) {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let number = random >> 33;
            let offset = if number.is_multiple_of(4) {
                geometry.results_offset() + number as usize % 128
            } else {
                RING_OFFSET + number as usize % 64 * 128 + 16 + (number >> 8) as usize % 104
            };
            memory.write_all_at(&[(number >> 16) as u8], (start + offset) as u64).unwrap();
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig {
        // Each starts a twin; still as many as PROPTEST_CASES says.
        cases: ProptestConfig::default().cases / 5,
        ..ProptestConfig::default()
    })]

    /// Goal: arbitrary bytes in the Manager's segment end the session or are completions that fit
    /// their requests; never a panic, a hang or a second report. Method: random ring, results,
    /// words and tail under a client with operations outstanding.
    #[test]
    fn arbitrary_bytes_give_an_end_or_progress(
        records in proptest::collection::vec(
            (any::<u64>(), 0_u32..4, 0_u32..3, 0_u16..12, 0_u16..5, 0_u16..24, any::<[u32; 4]>()),
            1..6,
        ),
        is_numbered in proptest::collection::vec(any::<bool>(), 6),
        tail in prop_oneof![0_u64..8, any::<u64>()],
        noise in proptest::collection::vec(any::<u8>(), 256),
    ) {
        let twin = Twin::start();
        let connect = Connect::new(twin.path()).ring_capacity(64).page_entries(1024);
        let mut rig = Rig::over(connect.connect().unwrap());
        twin.hold(RequestKind::ALL);
        let mut names = HashSet::from([
            rig.client.save(&rig.region, &blocks(1, 2, 0)).unwrap(),
            rig.client.ping().unwrap(),
            rig.client.prepare(&rig.scope, &hashes(1, 3)).unwrap(),
        ]);
        rig.client.submit().unwrap();
        twin.with(move |server| {
            let side = &server.seats[0].side;
            let (session, epoch) = (side.session(), side.epoch());
            for (i, (sequence, index, generation, kind, status, code, counts)) in
                records.into_iter().enumerate()
            {
                let operation = OperationId { index, generation };
                let mut record = record::Completion::ok(operation, RequestKind::Ping)
                    .encode(session, epoch, if is_numbered[i] { i as u64 } else { sequence });
                (record.kind, record.status, record.code) = (kind, status, code);
                [record.pages, record.pages_present, record.pages_refused, record.first_failed] =
                    counts;
                if counts[0] % 2 == 0 {
                    record.pages %= 3;
                    (record.pages_present, record.pages_refused) = (0, 0);
                    record.first_failed = u32::MAX;
                }
                scribble(side, RING_OFFSET + i * 128, bytemuck::bytes_of(&record));
            }
            scribble(side, side.geometry().results_offset(), &noise);
            scribble(side, COMPLETION_TAIL, &tail.to_ne_bytes());
        });
        loop {
            match rig.client.poll() {
                Ok(Some(told)) => {
                    prop_assert!(names.remove(&told.operation), "a second report: {:?}", told);
                    prop_assert!(rig.client.results(&told).len() <= 3);
                    rig.client.results(&told).for_each(drop);
                    let _ = rig.client.is_done(&told.operation);
                }
                Ok(None) => {
                    prop_assert_eq!(rig.client.outstanding() as usize, names.len());
                    break;
                }
                Err(gone) => {
                    prop_assert!(matches!(gone, Gone::Protocol(_)));
                    prop_assert!(names.is_empty(), "not reported: {:?}", names);
                    break;
                }
            }
        }
    }
}
