//! Goal: whatever a peer stores in the segment that it can write, the other side makes progress or
//! reports a violation for good: no panic, no hang, no read outside, no second use of a record.
//!
//! Fault model: the peer writes any byte of its own segment at any time, before or while the other
//! side works: indexes that jump and step back, records of other positions, records of earlier
//! laps, records that change under the reader, scribbled words and headers, punched holes. It
//! cannot write the other segment.
//!
//! Method: both sides over mapped segments. The hostile client writes through its descriptor; the
//! hostile Manager through `/proc/self/mem`, because its seal lets nothing else pass.
#![cfg(not(loom))]

use std::collections::HashSet;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytemuck::bytes_of;
use orbitkv_shm_protocol::ids::{Epoch, OperationId, ScopeId, SessionId};
use orbitkv_shm_protocol::layout::{
    COMPLETION_HEAD, COMPLETION_TAIL, ENGINE_DOORBELL, ENGINE_SLEEP_GENERATION, Geometry,
    HEADER_BYTES, MANAGER_DOORBELL, MANAGER_SLEEP_GENERATION, REQUEST_HEAD, REQUEST_TAIL,
    RING_CAPACITY_MIN, RING_OFFSET,
};
use orbitkv_shm_protocol::record::{
    Completion, CompletionRecord, PageEntry, PageRange, Request, RequestBody, RequestKind,
    RequestRecord,
};
use orbitkv_shm_protocol::ring::{PushError, RingViolation};
use orbitkv_shm_protocol::segment::{EngineSide, Expected, ManagerSide, attach, create};
use proptest::collection::vec;
use proptest::prelude::{
    Just, ProptestConfig, Strategy, any, prop_assert, prop_assert_eq, prop_oneof, proptest,
};
use proptest::test_runner::TestCaseError;
use rustix::fs::FallocateFlags;

const SESSION: SessionId = SessionId(3);
const EPOCH: Epoch = Epoch(0x00c0_ffee);
const GEOMETRY: Geometry =
    Geometry { ring_capacity: RING_CAPACITY_MIN, page_entries: 1024, done_words: 2 };
const CAPACITY: u64 = RING_CAPACITY_MIN as u64;

/// Writes any byte of one segment.
struct Pen {
    file: File,
    start: u64,
    bytes: u64,
}

impl Pen {
    fn write(&self, offset: usize, bytes: &[u8]) {
        let offset = offset as u64;
        let fit = self.bytes.saturating_sub(offset).min(bytes.len() as u64) as usize;
        self.file.write_all_at(&bytes[..fit], self.start + offset).unwrap();
    }

    fn word(&self, offset: usize, value: u64) {
        self.write(offset, &value.to_ne_bytes());
    }

    /// A hole from `offset` on; only the submission segment can have one.
    fn punch(&self, offset: u64, bytes: u64) {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let offset = offset % self.bytes;
        rustix::fs::fallocate(&self.file, flags, offset, bytes.clamp(1, self.bytes)).unwrap();
    }
}

/// A Manager and what its client can write.
fn manager_and_pen() -> (ManagerSide, Pen) {
    let (manager, descriptors) = create(GEOMETRY, SESSION, EPOCH).unwrap();
    let bytes = GEOMETRY.submission_bytes() as u64;
    (manager, Pen { file: descriptors.submission.into(), start: 0, bytes })
}

/// An engine and what its Manager can write. The Manager's side keeps the memory mapped.
fn engine_and_pen() -> (EngineSide, ManagerSide, Pen) {
    let (manager, descriptors) = create(GEOMETRY, SESSION, EPOCH).unwrap();
    let expected = Expected::new(GEOMETRY, SESSION, EPOCH);
    let engine = attach(descriptors.submission, descriptors.completion, expected).unwrap();
    let (done_words, _) = manager.done.region();
    let start = done_words.expose_provenance() - GEOMETRY.done_words_offset();
    let file = File::options().write(true).open("/proc/self/mem").unwrap();
    let bytes = GEOMETRY.completion_bytes() as u64;
    (engine, manager, Pen { file, start: start as u64, bytes })
}

fn request(position: u64, body: RequestBody) -> RequestRecord {
    let operation = OperationId { index: (position % CAPACITY) as u32, generation: 1 };
    let range =
        PageRange { start: (position.wrapping_mul(7) % 1024) as u32, len: (position % 40) as u32 };
    Request { operation, deadline_ms: 0, range, body }.encode(SESSION, EPOCH, position)
}

fn completion(position: u64) -> CompletionRecord {
    let operation = OperationId { index: (position % CAPACITY) as u32, generation: 1 };
    Completion::ok(operation, RequestKind::Ping).encode(SESSION, EPOCH, position)
}

/// One thing that a hostile peer does. Positions and indexes are relative to where the victim is,
/// so that most of them matter.
#[derive(Clone, Debug)]
enum Evil {
    /// Moves its producer index.
    Tail(i64),
    /// Moves its consumer index of the other ring.
    Head(i64),
    /// An index without any relation.
    Index(bool, u64),
    /// The right record, this far ahead.
    Honest(u8),
    /// A record of another lap: right but for the sequence.
    Replay(u8, i8),
    /// Any bytes in a slot, under the right sequence or not.
    Slot(u8, bool, Vec<u8>),
    /// Any bytes anywhere.
    Bytes(u32, Vec<u8>),
    /// Any value in its own doorbell words.
    Bells(u32, u32),
    /// Zeros from here on.
    Hole(u32, u32),
    /// Lets the victim work.
    Turn,
}

fn evils() -> impl Strategy<Value = Vec<Evil>> {
    let bytes = || vec(any::<u8>(), 1..160);
    let one = prop_oneof![
        4 => (-2_i64..70).prop_map(Evil::Tail),
        2 => (-70_i64..3).prop_map(Evil::Head),
        1 => (any::<bool>(), any::<u64>()).prop_map(|(tail, index)| Evil::Index(tail, index)),
        6 => (0_u8..70).prop_map(Evil::Honest),
        2 => (0_u8..4, any::<i8>()).prop_map(|(ahead, laps)| Evil::Replay(ahead, laps)),
        2 => (0_u8..4, any::<bool>(), bytes()).prop_map(|(ahead, right, bytes)| {
            Evil::Slot(ahead, right, bytes)
        }),
        1 => (any::<u32>(), bytes()).prop_map(|(offset, bytes)| Evil::Bytes(offset, bytes)),
        1 => any::<(u32, u32)>().prop_map(|(generation, doorbell)| Evil::Bells(generation, doorbell)),
        1 => any::<(u32, u32)>().prop_map(|(offset, bytes)| Evil::Hole(offset, bytes)),
        8 => Just(Evil::Turn),
    ];
    vec(one, 1..60)
}

/// Where the words of a hostile side lie.
struct Words {
    tail: usize,
    head: usize,
    sleep_generation: usize,
    doorbell: usize,
    record_bytes: usize,
}

impl Pen {
    /// Does one evil. `taken` and `sent` are the victim's positions in the two rings.
    fn act(
        &self,
        words: &Words,
        evil: &Evil,
        taken: u64,
        sent: u64,
        honest: impl Fn(u64) -> Vec<u8>,
    ) {
        let slot =
            |position: u64| RING_OFFSET + (position % CAPACITY) as usize * words.record_bytes;
        match evil {
            Evil::Tail(by) => self.word(words.tail, taken.wrapping_add_signed(*by)),
            Evil::Head(by) => self.word(words.head, sent.wrapping_add_signed(*by)),
            Evil::Index(true, index) => self.word(words.tail, *index),
            Evil::Index(false, index) => self.word(words.head, *index),
            Evil::Honest(ahead) => {
                for position in taken..taken + u64::from(*ahead) {
                    self.write(slot(position), &honest(position));
                }
                self.word(words.tail, taken + u64::from(*ahead));
            }
            Evil::Replay(ahead, laps) => {
                let position = taken + u64::from(*ahead);
                let other = position.wrapping_add_signed(i64::from(*laps) * CAPACITY as i64);
                self.write(slot(position), &honest(other));
            }
            Evil::Slot(ahead, right, bytes) => {
                let position = taken + u64::from(*ahead);
                let mut record = honest(position);
                let head = if *right { 16 } else { 0 };
                let fit = bytes.len().min(record.len() - head);
                record[head..head + fit].copy_from_slice(&bytes[..fit]);
                self.write(slot(position), &record);
            }
            Evil::Bytes(offset, bytes) => {
                self.write(*offset as usize % self.bytes as usize, bytes);
            }
            Evil::Bells(generation, doorbell) => {
                self.write(words.sleep_generation, &generation.to_ne_bytes());
                self.write(words.doorbell, &doorbell.to_ne_bytes());
            }
            Evil::Hole(..) | Evil::Turn => {}
        }
    }
}

/// The first violation of each ring; it must stay.
#[derive(Default)]
struct Seen {
    taking: Option<RingViolation>,
    giving: Option<RingViolation>,
}

fn note(seen: &mut Option<RingViolation>, now: RingViolation) -> Result<(), TestCaseError> {
    prop_assert!(seen.is_none_or(|before| before == now), "{:?}, then {}", seen, now);
    *seen = Some(now);
    Ok(())
}

/// Takes all there is, as a reactor does, and answers it.
fn manager_turn(manager: &mut ManagerSide, seen: &mut Seen) -> Result<(), TestCaseError> {
    let mut entries = Vec::new();
    let mut taken = 0;
    loop {
        let position = manager.requests.position();
        match manager.requests.pop() {
            Ok(None) => {
                prop_assert_eq!(seen.taking, None);
                break;
            }
            Ok(Some(record)) => {
                taken += 1;
                prop_assert!(taken <= CAPACITY, "more than a ring between two releases");
                prop_assert_eq!(record.sequence, position);
                let _ = record.check_addressed_to(SESSION, EPOCH);
                if let Ok(request) = Request::decode(&record) {
                    let fits = manager.pages.read_range(request.range, &mut entries);
                    let expected = if fits { request.range.len as usize } else { 0 };
                    prop_assert_eq!(entries.len(), expected);
                }
            }
            Err(violation) => {
                note(&mut seen.taking, violation)?;
                break;
            }
        }
    }
    manager.requests.release();
    for _ in 0..taken {
        match manager.completions.push(completion) {
            Ok(()) => {}
            Err(PushError::Full) => break,
            Err(PushError::Violation(violation)) => {
                note(&mut seen.giving, violation)?;
                break;
            }
        }
    }
    manager.completions.publish();
    if let Err(violation) = manager.completions.free() {
        note(&mut seen.giving, violation)?;
    }
    manager.ringer.ring();
    let bell = manager.sleeper.begin();
    manager.sleeper.wait(bell, Duration::ZERO);
    manager.sleeper.end();
    Ok(())
}

/// Sends until it may not, takes all there is and reads everything that a completion leads to.
fn engine_turn(engine: &mut EngineSide, seen: &mut Seen) -> Result<(), TestCaseError> {
    for _ in 0..3 {
        match engine.requests.push(|position| request(position, RequestBody::Ping)) {
            Ok(()) => {}
            Err(PushError::Full) => break,
            Err(PushError::Violation(violation)) => {
                note(&mut seen.giving, violation)?;
                break;
            }
        }
    }
    engine.requests.publish();
    engine.ringer.ring();
    let mut taken = 0;
    loop {
        let position = engine.completions.position();
        match engine.completions.pop() {
            Ok(None) => {
                prop_assert_eq!(seen.taking, None);
                break;
            }
            Ok(Some(record)) => {
                taken += 1;
                prop_assert!(taken <= CAPACITY, "more than a ring between two releases");
                prop_assert_eq!(record.sequence, position);
                if let Ok(told) = Completion::decode(&record) {
                    engine.results.read(told.pages % GEOMETRY.page_entries);
                    engine.done.load(told.operation.index % GEOMETRY.ring_capacity, 1);
                }
            }
            Err(violation) => {
                note(&mut seen.taking, violation)?;
                break;
            }
        }
    }
    engine.completions.release();
    engine.state();
    let bell = engine.sleeper.begin();
    engine.sleeper.wait(bell, Duration::ZERO);
    engine.sleeper.end();
    prop_assert_eq!(engine.geometry(), GEOMETRY);
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig {
        // Fewer than usual, since each makes two segments; still as many as PROPTEST_CASES says.
        cases: ProptestConfig::default().cases / 2,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn a_hostile_client_gets_progress_or_a_violation(evils in evils()) {
        let words = Words {
            tail: REQUEST_TAIL,
            head: COMPLETION_HEAD,
            sleep_generation: ENGINE_SLEEP_GENERATION,
            doorbell: MANAGER_DOORBELL,
            record_bytes: size_of::<RequestRecord>(),
        };
        let (mut manager, pen) = manager_and_pen();
        let mut seen = Seen::default();
        for evil in &evils {
            let (taken, sent) = (manager.requests.position(), manager.completions.published());
            pen.act(&words, evil, taken, sent, |position| {
                bytes_of(&request(position, RequestBody::Prepare { scope: ScopeId(1) })).to_vec()
            });
            match evil {
                Evil::Hole(offset, bytes) => pen.punch((*offset).into(), (*bytes).into()),
                Evil::Turn => manager_turn(&mut manager, &mut seen)?,
                _ => {}
            }
        }
        manager_turn(&mut manager, &mut seen)?;
        prop_assert_eq!(manager.geometry(), GEOMETRY);
    }

    #[test]
    fn a_hostile_manager_gets_progress_or_a_violation(evils in evils()) {
        let words = Words {
            tail: COMPLETION_TAIL,
            head: REQUEST_HEAD,
            sleep_generation: MANAGER_SLEEP_GENERATION,
            doorbell: ENGINE_DOORBELL,
            record_bytes: size_of::<CompletionRecord>(),
        };
        let (mut engine, _manager, pen) = engine_and_pen();
        let mut seen = Seen::default();
        for evil in &evils {
            let (taken, sent) = (engine.completions.position(), engine.requests.published());
            pen.act(&words, evil, taken, sent, |position| bytes_of(&completion(position)).to_vec());
            if matches!(evil, Evil::Turn) {
                engine_turn(&mut engine, &mut seen)?;
            }
        }
        engine_turn(&mut engine, &mut seen)?;
    }
}

/// Goal: a record is what one copy of it says, whatever happens to the slot meanwhile. Method: a
/// thread swaps two bodies in every slot, behind the right sequence, while the Manager takes them,
/// until it was seen with either.
#[test]
fn records_that_change_under_the_reader_are_read_once() {
    /// Bytes of a record that name session, epoch and sequence.
    const HEAD: usize = 16;
    const WATCHDOG: Duration = Duration::from_secs(60);
    let (mut manager, pen) = manager_and_pen();
    let slot = |position: u64| RING_OFFSET + (position % CAPACITY) as usize * 64;
    let mut short = request(0, RequestBody::Prepare { scope: ScopeId(5) });
    (short.range_start, short.range_len) = (0, 1);
    let other = OperationId { index: u32::MAX, generation: u32::MAX };
    let mut wild = request(0, RequestBody::Cancel { operation: other });
    (wild.range_start, wild.range_len) = (u32::MAX, u32::MAX);
    let bodies = [short, wild].map(|record| bytes_of(&record)[HEAD..].to_vec());
    // No slot is ever seen empty, however late the thread begins.
    (0..CAPACITY).for_each(|at| pen.write(slot(at) + HEAD, &bodies[0]));
    let ended = AtomicBool::new(false);
    let mut kinds = HashSet::new();
    let started = std::time::Instant::now();
    std::thread::scope(|threads| {
        threads.spawn(|| {
            while !ended.load(Ordering::Relaxed) {
                for body in &bodies {
                    (0..CAPACITY).for_each(|at| pen.write(slot(at) + HEAD, body));
                }
            }
        });
        let mut entries = Vec::new();
        let mut taken = 0;
        while (taken < 100 * CAPACITY || kinds.len() < 2) && started.elapsed() < WATCHDOG {
            for at in taken..taken + CAPACITY {
                let honest = request(at, RequestBody::Ping);
                pen.write(slot(at), &bytes_of(&honest)[..HEAD]);
            }
            pen.word(REQUEST_TAIL, taken + CAPACITY);
            while let Some(record) = manager.requests.pop().unwrap() {
                assert_eq!(record.sequence, taken);
                record.check_addressed_to(SESSION, EPOCH).unwrap();
                taken += 1;
                kinds.insert(record.kind);
                let range = PageRange { start: record.range_start, len: record.range_len };
                let fits = manager.pages.read_range(range, &mut entries);
                assert_eq!(entries.len(), if fits { record.range_len as usize } else { 0 });
            }
            manager.requests.release();
        }
        ended.store(true, Ordering::Relaxed);
    });
    let both = [RequestKind::Prepare, RequestKind::Cancel].map(|kind| kind as u16);
    assert!(both.iter().all(|kind| kinds.contains(kind)), "{kinds:?}");
}

/// Goal: a range is one private copy: a page table that changes afterwards changes nothing.
#[test]
fn a_copied_range_does_not_change_any_more() {
    let (manager, pen) = manager_and_pen();
    let table = GEOMETRY.page_table_offset();
    let mut entries = Vec::new();
    assert!(manager.pages.read_range(PageRange { start: 0, len: 2 }, &mut entries));
    pen.write(table, &[0xee; 96]);
    assert!(entries.iter().all(|entry| *entry == PageEntry::default()));
    let mut again = Vec::new();
    assert!(manager.pages.read_range(PageRange { start: 0, len: 2 }, &mut again));
    assert_eq!(again[0].hash, [0xee; 32]);
}

/// Goal: what the header says is believed once, at attach: not capacity, not geometry, not session.
#[test]
fn a_header_that_changes_after_attach_changes_nothing() {
    let (mut manager, pen) = manager_and_pen();
    pen.write(0, &[0xff; HEADER_BYTES]);
    pen.write(RING_OFFSET, bytes_of(&request(0, RequestBody::Ping)));
    pen.word(REQUEST_TAIL, 1);
    assert!(manager.requests.pop().unwrap().is_some());
    assert_eq!((manager.geometry(), manager.requests.capacity()), (GEOMETRY, RING_CAPACITY_MIN));
    let (mut engine, manager, pen) = engine_and_pen();
    pen.write(0, &[0xff; HEADER_BYTES]);
    pen.write(RING_OFFSET, bytes_of(&completion(0)));
    pen.word(COMPLETION_TAIL, 1);
    assert!(engine.completions.pop().unwrap().is_some());
    assert_eq!((engine.geometry(), engine.session(), engine.epoch()), (GEOMETRY, SESSION, EPOCH));
    // An unknown state is no state to go on in.
    assert_eq!(engine.state(), orbitkv_shm_protocol::record::SessionState::Closed);
    drop(manager);
}
