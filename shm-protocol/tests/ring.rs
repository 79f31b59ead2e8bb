//! Goal: the ring is a bounded queue in every history, across the wrap of its 64-bit positions,
//! and whatever a peer stores in the shared words ends in progress or a violation.
//!
//! Method: random interleavings and all short histories against a queue model; hostile peers that
//! store arbitrary indexes and slots. Everything runs on heap memory.
#![cfg(not(loom))]

use std::collections::VecDeque;

use bytemuck::{Pod, Zeroable};
use orbitkv_shm_protocol::memory::{SharedMemory, WordWriter};
use orbitkv_shm_protocol::record::{CompletionRecord, RequestRecord};
use orbitkv_shm_protocol::ring::{Consumer, Producer, PushError, RingRecord, RingViolation};
use proptest::prelude::{Strategy, any, prop_assert, prop_assert_eq, prop_oneof, proptest};
use proptest::test_runner::TestCaseError;

#[derive(Clone, Copy, PartialEq, Eq, Debug, Pod, Zeroable)]
#[repr(C)]
struct Record {
    sequence: u64,
    payload: [u64; 2],
}

impl RingRecord for Record {
    fn sequence(&self) -> u64 {
        self.sequence
    }
}

const TAIL: usize = 0;
const HEAD: usize = 128;
const SLOTS: usize = 256;

/// A ring whose two index words already hold `start`.
fn memory_at<R: RingRecord>(capacity: u32, start: u64) -> SharedMemory {
    let memory = SharedMemory::heap(SLOTS + capacity as usize * size_of::<R>());
    memory.write(TAIL, start);
    memory.write(HEAD, start);
    memory
}

fn producer<R: RingRecord>(memory: &SharedMemory, capacity: u32, start: u64) -> Producer<R> {
    Producer::new(
        memory.slot_writer(SLOTS, capacity),
        memory.word_writer(TAIL),
        memory.word_reader(HEAD),
        start,
    )
}

fn consumer<R: RingRecord>(memory: &SharedMemory, capacity: u32, start: u64) -> Consumer<R> {
    Consumer::new(
        memory.slot_reader(SLOTS, capacity),
        memory.word_reader(TAIL),
        memory.word_writer(HEAD),
        start,
    )
}

/// The ring as anyone would write it in one thread.
struct Model {
    capacity: usize,
    position: u64,
    staged: VecDeque<Record>,
    published: VecDeque<Record>,
    taken: usize,
}

impl Model {
    fn occupied(&self) -> usize {
        self.staged.len() + self.published.len() + self.taken
    }
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Push,
    Publish,
    Pop,
    Release,
}

const STEPS: [Step; 4] = [Step::Push, Step::Publish, Step::Pop, Step::Release];

/// Runs one history on a fresh ring and compares every answer with the model's.
fn check_history(
    capacity: u32,
    start: u64,
    steps: impl Iterator<Item = Step>,
) -> Result<(), TestCaseError> {
    let memory = memory_at::<Record>(capacity, start);
    let mut producer = producer::<Record>(&memory, capacity, start);
    let mut consumer = consumer::<Record>(&memory, capacity, start);
    let mut model = Model {
        capacity: capacity as usize,
        position: start,
        staged: VecDeque::new(),
        published: VecDeque::new(),
        taken: 0,
    };
    for step in steps {
        match step {
            Step::Push => {
                let sequence = model.position;
                let record = Record { sequence, payload: [!sequence, sequence ^ 0x5a] };
                let pushed = producer.push(|position| {
                    assert_eq!(position, sequence);
                    record
                });
                if model.occupied() < model.capacity {
                    prop_assert_eq!(pushed, Ok(()));
                    model.staged.push_back(record);
                    model.position = model.position.wrapping_add(1);
                } else {
                    prop_assert_eq!(pushed, Err(PushError::Full));
                }
            }
            Step::Publish => {
                prop_assert_eq!(producer.publish(), !model.staged.is_empty());
                model.published.append(&mut model.staged);
            }
            Step::Pop => {
                let popped = consumer.pop();
                let expected = model.published.pop_front();
                model.taken += usize::from(expected.is_some());
                prop_assert_eq!(popped, Ok(expected));
            }
            Step::Release => {
                prop_assert_eq!(consumer.release(), model.taken > 0);
                model.taken = 0;
            }
        }
        prop_assert_eq!(consumer.ready(), !model.published.is_empty());
        prop_assert_eq!(producer.position(), model.position);
        prop_assert_eq!(producer.free(), Ok((model.capacity - model.occupied()) as u32));
    }
    Ok(())
}

fn capacities() -> impl Strategy<Value = u32> {
    (0_u32..4).prop_map(|log| 1 << log)
}

/// Anywhere, but mostly where 64-bit positions wrap.
fn starts() -> impl Strategy<Value = u64> {
    prop_oneof![
        1 => any::<u64>(),
        1 => 0_u64..3,
        4 => (0_u64..40).prop_map(|back| u64::MAX - back),
    ]
}

proptest! {
    #[test]
    fn random_histories_match_a_queue(
        capacity in capacities(),
        start in starts(),
        steps in proptest::collection::vec((0_usize..4).prop_map(|i| STEPS[i]), 0..200),
    ) {
        check_history(capacity, start, steps.into_iter())?;
    }
}

#[test]
fn all_short_histories_match_a_queue() {
    const LENGTH: u32 = 8;
    for capacity in [1, 2, 4] {
        // Positions wrap in the middle of the longer histories.
        for start in [0, u64::MAX - 1] {
            for history in 0..4_u32.pow(LENGTH) {
                let steps = (0..LENGTH).map(|i| STEPS[(history >> (2 * i) & 3) as usize]);
                check_history(capacity, start, steps)
                    .unwrap_or_else(|error| panic!("{capacity} {start} {history:x}: {error}"));
            }
        }
    }
}

/// A batch becomes visible at once, and its slots return at once.
#[test]
fn batches_publish_and_release_with_one_store() {
    let memory = memory_at::<Record>(4, 0);
    let mut producer = producer::<Record>(&memory, 4, 0);
    let mut consumer = consumer::<Record>(&memory, 4, 0);
    for _ in 0..3 {
        producer.push(|sequence| Record { sequence, payload: [0; 2] }).unwrap();
        assert_eq!(memory.read::<u64>(TAIL), 0);
    }
    assert!(producer.publish());
    assert_eq!(memory.read::<u64>(TAIL), 3);
    for _ in 0..3 {
        assert!(consumer.pop().unwrap().is_some());
        assert_eq!(memory.read::<u64>(HEAD), 0);
    }
    assert!(consumer.release());
    assert_eq!(memory.read::<u64>(HEAD), 3);
}

/// A producer that stores whatever it likes.
struct HostileProducer {
    memory: SharedMemory,
    tail: WordWriter<u64>,
}

impl HostileProducer {
    fn new(memory: &SharedMemory) -> Self {
        Self { memory: memory.clone(), tail: memory.word_writer(TAIL) }
    }

    fn fill(&self, capacity: u32, position: u64, sequence: u64) {
        let slot = (position % u64::from(capacity)) as usize;
        let record = Record { sequence, payload: [0; 2] };
        self.memory.write(SLOTS + slot * size_of::<Record>(), record);
    }
}

#[test]
fn producer_index_beyond_the_ring_is_a_violation() {
    let memory = memory_at::<Record>(4, 10);
    let hostile = HostileProducer::new(&memory);
    let mut consumer = consumer::<Record>(&memory, 4, 10);
    hostile.tail.store_release(15);
    let violation = RingViolation::ProducerJump { from: 10, to: 15, capacity: 4 };
    assert!(consumer.ready());
    assert_eq!(consumer.pop(), Err(violation));
    // Taking it back does not heal the session.
    hostile.tail.store_release(10);
    assert_eq!(consumer.pop(), Err(violation));
    hostile.tail.store_release(11);
    assert_eq!(consumer.pop(), Err(violation));
    assert_eq!(consumer.position(), 10);
}

#[test]
fn producer_may_fill_only_what_was_released() {
    let memory = memory_at::<Record>(2, 0);
    let hostile = HostileProducer::new(&memory);
    let mut consumer = consumer::<Record>(&memory, 2, 0);
    hostile.fill(2, 0, 0);
    hostile.fill(2, 1, 1);
    hostile.tail.store_release(2);
    assert!(consumer.pop().unwrap().is_some());
    assert!(consumer.pop().unwrap().is_some());
    // Both slots are taken but not released.
    hostile.tail.store_release(3);
    assert_eq!(consumer.pop(), Err(RingViolation::ProducerJump { from: 2, to: 3, capacity: 2 }));
}

#[test]
fn producer_index_that_goes_back_is_a_violation() {
    let memory = memory_at::<Record>(4, 0);
    let hostile = HostileProducer::new(&memory);
    let mut consumer = consumer::<Record>(&memory, 4, 0);
    hostile.fill(4, 0, 0);
    hostile.fill(4, 1, 1);
    hostile.tail.store_release(2);
    assert!(consumer.pop().unwrap().is_some());
    assert!(consumer.pop().unwrap().is_some());
    assert!(consumer.release());
    hostile.tail.store_release(1);
    assert_eq!(consumer.pop(), Err(RingViolation::ProducerBackwards { from: 2, to: 1 }));
}

#[test]
fn record_of_another_position_is_a_violation() {
    let memory = memory_at::<Record>(4, 0);
    let hostile = HostileProducer::new(&memory);
    let mut consumer = consumer::<Record>(&memory, 4, 0);
    hostile.fill(4, 0, 0);
    hostile.fill(4, 1, 5);
    hostile.tail.store_release(2);
    assert!(consumer.pop().unwrap().is_some());
    let violation = RingViolation::WrongSequence { position: 1, found: 5 };
    assert_eq!(consumer.pop(), Err(violation));
    hostile.fill(4, 1, 1);
    assert_eq!(consumer.pop(), Err(violation));
    assert_eq!(consumer.position(), 1);
}

/// A hole punched into the segment reads as zeros: sequence zero is wrong everywhere but at 0.
#[test]
fn zeroed_slots_are_a_violation() {
    let memory = memory_at::<Record>(4, 8);
    let mut consumer = consumer::<Record>(&memory, 4, 8);
    HostileProducer::new(&memory).tail.store_release(9);
    assert_eq!(consumer.pop(), Err(RingViolation::WrongSequence { position: 8, found: 0 }));
}

#[test]
fn consumer_index_beyond_what_was_published_is_a_violation() {
    let memory = memory_at::<Record>(2, u64::MAX);
    let mut producer = producer::<Record>(&memory, 2, u64::MAX);
    let head: WordWriter<u64> = memory.word_writer(HEAD);
    let record = |sequence| Record { sequence, payload: [0; 2] };
    producer.push(record).unwrap();
    producer.publish();
    producer.push(record).unwrap();
    // Position 0 is staged, not published: nobody can have consumed it.
    head.store_release(1);
    let violation = RingViolation::ConsumerJump { from: u64::MAX, to: 1, published: 0 };
    assert_eq!(producer.push(record), Err(PushError::Violation(violation)));
    head.store_release(0);
    assert_eq!(producer.free(), Err(violation));
    assert_eq!(producer.push(record), Err(PushError::Violation(violation)));
}

#[test]
fn consumer_index_that_goes_back_is_a_violation() {
    let memory = memory_at::<Record>(1, 5);
    let mut producer = producer::<Record>(&memory, 1, 5);
    let head: WordWriter<u64> = memory.word_writer(HEAD);
    let record = |sequence| Record { sequence, payload: [0; 2] };
    producer.push(record).unwrap();
    producer.publish();
    head.store_release(6);
    assert_eq!(producer.free(), Ok(1));
    head.store_release(5);
    let violation = RingViolation::ConsumerBackwards { from: 6, to: 5 };
    assert_eq!(producer.free(), Err(violation));
}

#[derive(Clone, Copy, Debug)]
enum Attack {
    /// Stores this index.
    Index(u64),
    /// Stores an index a little off the last one.
    Near(i8),
    /// Stores this sequence in the slot of the position this far ahead.
    Slot(u8, u64),
    /// Stores the right sequence there.
    Honest(u8),
    /// Lets the other side work.
    Poll,
    /// Lets it release, or publish.
    Hand,
}

fn attacks() -> impl Strategy<Value = Attack> {
    prop_oneof![
        any::<u64>().prop_map(Attack::Index),
        (-10_i8..10).prop_map(Attack::Near),
        (0_u8..9, any::<u64>()).prop_map(|(ahead, sequence)| Attack::Slot(ahead, sequence)),
        (0_u8..9).prop_map(Attack::Honest),
        (0_u8..1).prop_map(|_| Attack::Poll),
        (0_u8..1).prop_map(|_| Attack::Hand),
    ]
}

proptest! {
    /// A consumer hands out at most a ring's worth between two releases, each record with the
    /// sequence of its position, and after a violation nothing more.
    #[test]
    fn a_hostile_producer_gets_progress_or_a_violation(
        capacity in capacities(),
        start in starts(),
        attacks in proptest::collection::vec(attacks(), 0..100),
    ) {
        let memory = memory_at::<Record>(capacity, start);
        let hostile = HostileProducer::new(&memory);
        let mut consumer = consumer::<Record>(&memory, capacity, start);
        let mut violated = None;
        for attack in attacks {
            let position = consumer.position();
            match attack {
                Attack::Index(index) => hostile.tail.store_release(index),
                Attack::Near(by) => {
                    hostile.tail.store_release(position.wrapping_add_signed(by.into()));
                }
                Attack::Slot(ahead, sequence) => {
                    hostile.fill(capacity, position.wrapping_add(ahead.into()), sequence);
                }
                Attack::Honest(ahead) => {
                    let target = position.wrapping_add(ahead.into());
                    hostile.fill(capacity, target, target);
                }
                Attack::Poll => match consumer.pop() {
                    Ok(record) => {
                        prop_assert_eq!(violated, None);
                        if let Some(record) = record {
                            prop_assert_eq!(record.sequence, position);
                            prop_assert_eq!(consumer.position(), position.wrapping_add(1));
                        }
                    }
                    Err(violation) => {
                        prop_assert!(violated.is_none_or(|before| before == violation));
                        violated = Some(violation);
                    }
                },
                Attack::Hand => {
                    consumer.release();
                }
            }
            let held = consumer.position().wrapping_sub(consumer.released());
            prop_assert!(held <= u64::from(capacity));
        }
    }

    /// A producer never stages more than a ring's worth beyond what the peer could have consumed,
    /// and after a violation nothing more than what it already knew to be free.
    #[test]
    fn a_hostile_consumer_gets_progress_or_a_violation(
        capacity in capacities(),
        start in starts(),
        attacks in proptest::collection::vec(attacks(), 0..100),
    ) {
        let memory = memory_at::<Record>(capacity, start);
        let head: WordWriter<u64> = memory.word_writer(HEAD);
        let mut producer = producer::<Record>(&memory, capacity, start);
        let mut violated = None;
        for attack in attacks {
            match attack {
                Attack::Index(index) => head.store_release(index),
                Attack::Near(by) => {
                    head.store_release(producer.position().wrapping_add_signed(by.into()));
                }
                Attack::Slot(..) | Attack::Honest(_) | Attack::Poll => {
                    let before = producer.position();
                    match producer.push(|sequence| Record { sequence, payload: [0; 2] }) {
                        Ok(()) => prop_assert_eq!(producer.position(), before.wrapping_add(1)),
                        Err(PushError::Full) => prop_assert_eq!(violated, None),
                        Err(PushError::Violation(violation)) => {
                            prop_assert!(violated.is_none_or(|before| before == violation));
                            violated = Some(violation);
                        }
                    }
                }
                Attack::Hand => {
                    producer.publish();
                }
            }
            let staged = producer.position().wrapping_sub(producer.published());
            prop_assert!(staged <= u64::from(capacity));
        }
    }

    /// The real records, over memory full of arbitrary bytes.
    #[test]
    fn arbitrary_segment_bytes_never_panic_a_ring(
        words in proptest::collection::vec(any::<u64>(), 4 * 16),
        tail in prop_oneof![any::<u64>(), 0_u64..8],
    ) {
        fn drain<R: RingRecord>(words: &[u64], tail: u64) -> usize {
            let memory = memory_at::<R>(4, 0);
            for (i, word) in words.iter().take(4 * size_of::<R>() / 8).enumerate() {
                memory.write(SLOTS + 8 * i, *word);
            }
            memory.write(TAIL, tail);
            let mut consumer = consumer::<R>(&memory, 4, 0);
            let mut popped = 0;
            while let Ok(Some(_)) = consumer.pop() {
                popped += 1;
            }
            popped
        }
        prop_assert!(drain::<RequestRecord>(&words, tail) <= 4);
        prop_assert!(drain::<CompletionRecord>(&words, tail) <= 4);
    }
}

/// Two threads, no sleeping: every record arrives once, whole and in order.
#[test]
fn records_cross_threads_whole_and_in_order() {
    const RECORDS: u64 = 200_000;
    let start = u64::MAX - RECORDS / 2;
    let memory = memory_at::<Record>(8, start);
    let mut producer = producer::<Record>(&memory, 8, start);
    let mut consumer = consumer::<Record>(&memory, 8, start);
    let record = |sequence: u64| Record { sequence, payload: [!sequence, sequence.rotate_left(7)] };
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let mut pushed = 0;
            while pushed < RECORDS {
                match producer.push(record) {
                    Ok(()) => {
                        pushed += 1;
                        if pushed % 3 == 0 {
                            producer.publish();
                        }
                    }
                    Err(PushError::Full) => {
                        producer.publish();
                        std::thread::yield_now();
                    }
                    Err(PushError::Violation(violation)) => panic!("{violation}"),
                }
            }
            producer.publish();
        });
        let mut popped = 0;
        while popped < RECORDS {
            match consumer.pop().unwrap() {
                Some(found) => {
                    assert_eq!(found, record(start.wrapping_add(popped)));
                    popped += 1;
                    if popped % 5 == 0 {
                        consumer.release();
                    }
                }
                None => {
                    consumer.release();
                    std::thread::yield_now();
                }
            }
        }
    });
}
