//! Goal: no interleaving and no stale load that the memory model allows loses a record, shows one
//! half written, or lets a waiter sleep over one; and the model is sharp enough to notice when a
//! fence, an ordering or the order of the waiter's steps is missing.
//!
//! Method: loom runs the real ring and doorbell over loom's atomics. Waits have no timeout there,
//! so a lost wake is a deadlock, which loom reports by a panic. Broken variants are the same code
//! with one fence or ordering left out below it ([`omit_fence`], [`SharedMemory::relax`]), or a
//! waiter that takes the same steps in another order; each must be rejected. Run with
//! `RUSTFLAGS="--cfg loom" cargo test -p orbitkv-shm-protocol --release --test loom`.
//!
//! What loom cannot reject: it runs the loads of a thread in program order, so a relaxed
//! `ring-release` (the consumer's loads of a slot before its store of the head) passes here.
#![cfg(loom)]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use bytemuck::{Pod, Zeroable};
use loom::thread;
use orbitkv_shm_protocol::doorbell::{ControlBell, Ringer, Sleeper};
use orbitkv_shm_protocol::memory::{FenceSide, RelaxedEnd, SharedMemory, WordReader, omit_fence};
use orbitkv_shm_protocol::ring::{Consumer, Producer, PushError, RingRecord};

/// The omitted fences are one setting for all models: one model at a time.
fn one_model() -> MutexGuard<'static, ()> {
    static ONE_MODEL: Mutex<()> = Mutex::new(());
    ONE_MODEL.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Two words, so that a record can be seen half written.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Pod, Zeroable)]
#[repr(C)]
struct Record {
    sequence: u64,
    payload: u64,
}

impl RingRecord for Record {
    fn sequence(&self) -> u64 {
        self.sequence
    }
}

fn record(sequence: u64) -> Record {
    Record { sequence, payload: !sequence }
}

const TAIL: usize = 0;
const HEAD: usize = 8;
const SLOTS: usize = 16;
/// Where every model's positions start: they wrap after the first record.
const START: u64 = u64::MAX;

fn ring_over(memory: &SharedMemory, capacity: u32) -> (Producer<Record>, Consumer<Record>) {
    memory.write(TAIL, START);
    memory.write(HEAD, START);
    let producer = Producer::new(
        memory.slot_writer(SLOTS, capacity),
        memory.word_writer(TAIL),
        memory.word_reader(HEAD),
        START,
    );
    let consumer = Consumer::new(
        memory.slot_reader(SLOTS, capacity),
        memory.word_reader(TAIL),
        memory.word_writer(HEAD),
        START,
    );
    (producer, consumer)
}

fn ring(capacity: u32) -> (Producer<Record>, Consumer<Record>) {
    ring_over(&ring_memory(capacity), capacity)
}

fn ring_memory(capacity: u32) -> SharedMemory {
    SharedMemory::heap(SLOTS + capacity as usize * size_of::<Record>())
}

const DOORBELL: usize = 0;
const SLEEP_GENERATION: usize = 4;

fn bell() -> (Ringer, Sleeper, WordReader<u32>) {
    let memory = SharedMemory::heap(8);
    let doorbell = memory.word_reader(DOORBELL);
    let ringer = Ringer::new(memory.word_writer(DOORBELL), memory.word_reader(SLEEP_GENERATION));
    let sleeper = Sleeper::new(memory.word_writer(SLEEP_GENERATION), doorbell.clone());
    (ringer, sleeper, doorbell)
}

fn model(preemptions: Option<usize>, body: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = preemptions;
    builder.check(body);
}

/// Runs a broken variant and returns what loom, or an assertion of the model, said of it.
fn must_be_rejected(what: &str, body: impl Fn() + Sync + Send + 'static) -> String {
    let outcome = catch_unwind(AssertUnwindSafe(|| model(None, body)));
    let Err(panic) = outcome else { panic!("the model did not notice: {what}") };
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or_default().to_owned()
}

fn must_deadlock(what: &str, body: impl Fn() + Sync + Send + 'static) {
    let said = must_be_rejected(what, body);
    assert!(said.contains("deadlock"), "{what}: {said}");
}

/// A fence that is left out of every model until dropped.
struct Omitted(FenceSide);

impl Omitted {
    fn new(side: FenceSide) -> Self {
        omit_fence(side, true);
        Self(side)
    }
}

impl Drop for Omitted {
    fn drop(&mut self) {
        omit_fence(self.0, false);
    }
}

/// Pushes `records` through a ring, publishing `batch` at a time, and checks what comes out.
fn stream(memory: &SharedMemory, capacity: u32, records: u64, batch: u64) {
    let (mut producer, mut consumer) = ring_over(memory, capacity);
    let pushing = thread::spawn(move || {
        let mut pushed = 0;
        while pushed < records {
            match producer.push(record) {
                Ok(()) => {
                    pushed += 1;
                    if pushed % batch == 0 || pushed == records {
                        producer.publish();
                    }
                }
                Err(PushError::Full) => thread::yield_now(),
                Err(PushError::Violation(violation)) => panic!("{violation}"),
            }
        }
    });
    let mut popped = 0;
    while popped < records {
        match consumer.pop().unwrap() {
            Some(found) => {
                assert_eq!(found, record(START.wrapping_add(popped)));
                popped += 1;
                consumer.release();
            }
            None => thread::yield_now(),
        }
    }
    pushing.join().unwrap();
}

#[test]
fn records_cross_the_ring_whole_and_in_order() {
    let _one = one_model();
    for (capacity, batch) in [(1, 1), (2, 1), (2, 2)] {
        model(None, move || stream(&ring_memory(capacity), capacity, 3, batch));
    }
}

/// Either end of `ring-publish` alone shows slots that were not written yet.
#[test]
fn a_relaxed_publish_is_rejected() {
    let _one = one_model();
    for end in [RelaxedEnd::Stores, RelaxedEnd::Loads] {
        let said = must_be_rejected("relaxed tail", move || {
            let memory = ring_memory(2);
            memory.relax(TAIL, end);
            stream(&memory, 2, 1, 1);
        });
        // The stale slot carries another sequence, or the right one with another payload.
        let is_stale = said.contains("WrongSequence") || said.contains("left == right");
        assert!(is_stale, "{end:?}: {said}");
    }
}

/// How the waiter of a model uses its bell.
#[derive(Clone, Copy)]
enum Waiter {
    /// As documented.
    Correct,
    /// Reads the doorbell after it looked at the ring again, not before.
    LateDoorbell,
    /// Does not look at the ring again.
    NoRecheck,
}

/// One producer that publishes `records` with a ring after each, one consumer that sleeps
/// whenever it finds nothing.
fn sleeping_consumer(records: u64, waiter: Waiter) {
    let (mut producer, mut consumer) = ring(2);
    let (mut ringer, sleeper, doorbell) = bell();
    let pushing = thread::spawn(move || {
        for _ in 0..records {
            producer.push(record).unwrap();
            producer.publish();
            ringer.ring();
        }
    });
    let mut popped = 0;
    while popped < records {
        if let Some(found) = consumer.pop().unwrap() {
            assert_eq!(found, record(START.wrapping_add(popped)));
            popped += 1;
            continue;
        }
        let seen = sleeper.begin();
        if matches!(waiter, Waiter::NoRecheck) || !consumer.ready() {
            let seen = match waiter {
                Waiter::Correct | Waiter::NoRecheck => seen,
                Waiter::LateDoorbell => doorbell.load_acquire(),
            };
            sleeper.wait(seen, Duration::MAX);
        }
        sleeper.end();
    }
    pushing.join().unwrap();
}

#[test]
fn no_wake_is_lost() {
    let _one = one_model();
    model(None, || sleeping_consumer(1, Waiter::Correct));
    // Two sleeps, of which the second must not be mistaken for the first.
    model(Some(5), || sleeping_consumer(2, Waiter::Correct));
}

#[test]
fn a_fence_in_the_publisher_alone_is_rejected() {
    let _one = one_model();
    let _omitted = Omitted::new(FenceSide::Waiter);
    must_deadlock("no fence in the waiter", || sleeping_consumer(1, Waiter::Correct));
}

#[test]
fn a_fence_in_the_waiter_alone_is_rejected() {
    let _one = one_model();
    let _omitted = Omitted::new(FenceSide::Publisher);
    must_deadlock("no fence in the publisher", || sleeping_consumer(1, Waiter::Correct));
}

#[test]
fn a_doorbell_without_fences_is_rejected() {
    let _one = one_model();
    let _omitted = [Omitted::new(FenceSide::Waiter), Omitted::new(FenceSide::Publisher)];
    must_deadlock("no fence", || sleeping_consumer(1, Waiter::Correct));
}

#[test]
fn a_doorbell_read_after_the_second_look_at_the_ring_is_rejected() {
    let _one = one_model();
    must_deadlock("late doorbell", || sleeping_consumer(1, Waiter::LateDoorbell));
}

#[test]
fn a_waiter_that_does_not_look_again_is_rejected() {
    let _one = one_model();
    must_deadlock("no second look", || sleeping_consumer(1, Waiter::NoRecheck));
}

/// Both sides of a session sleep: a request one way, its answer the other way.
#[test]
fn no_wake_is_lost_in_a_round_trip() {
    let _one = one_model();
    model(Some(3), || {
        let (mut requests, mut taken) = ring(1);
        let (mut answers, mut answered) = ring(1);
        let (mut manager_bell, manager_sleeper, _) = bell();
        let (mut engine_bell, engine_sleeper, _) = bell();
        let manager = thread::spawn(move || {
            assert_eq!(sleep_until(&mut taken, &manager_sleeper), record(START));
            answers.push(record).unwrap();
            answers.publish();
            engine_bell.ring();
        });
        requests.push(record).unwrap();
        requests.publish();
        manager_bell.ring();
        assert_eq!(sleep_until(&mut answered, &engine_sleeper), record(START));
        manager.join().unwrap();
    });
}

fn sleep_until(consumer: &mut Consumer<Record>, sleeper: &Sleeper) -> Record {
    loop {
        if let Some(found) = consumer.pop().unwrap() {
            return found;
        }
        let seen = sleeper.begin();
        if !consumer.ready() {
            sleeper.wait(seen, Duration::MAX);
        }
        sleeper.end();
    }
}

/// `ringers` of one in-process bell, each with its own ring.
fn many_ringers(ringers: usize) {
    let bell = ControlBell::new();
    let mut consumers = Vec::new();
    let mut threads = Vec::new();
    for _ in 0..ringers {
        let (mut producer, consumer) = ring(1);
        let ringer = bell.ringer();
        consumers.push(consumer);
        threads.push(thread::spawn(move || {
            producer.push(record).unwrap();
            producer.publish();
            ringer.ring();
        }));
    }
    let mut popped = 0;
    while popped < ringers {
        let mut found = false;
        for consumer in &mut consumers {
            if let Some(found_record) = consumer.pop().unwrap() {
                assert_eq!(found_record, record(START));
                popped += 1;
                found = true;
            }
        }
        if found {
            continue;
        }
        let seen = bell.sleeper().begin();
        if !consumers.iter().any(Consumer::ready) {
            bell.sleeper().wait(seen, Duration::MAX);
        }
        bell.sleeper().end();
    }
    for thread in threads {
        thread.join().unwrap();
    }
}

#[test]
fn no_wake_of_several_ringers_is_lost() {
    let _one = one_model();
    model(None, || many_ringers(1));
    model(Some(3), || many_ringers(2));
}

#[test]
fn a_control_bell_that_lacks_a_fence_is_rejected() {
    let _one = one_model();
    for side in [FenceSide::Waiter, FenceSide::Publisher] {
        let _omitted = Omitted::new(side);
        must_deadlock("control bell without a fence", || many_ringers(1));
    }
}
