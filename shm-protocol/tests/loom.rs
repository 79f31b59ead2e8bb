//! Goal: no interleaving and no stale load that the memory model allows loses a record, shows one
//! half written, or lets a waiter sleep over one; and the model is sharp enough to notice when
//! either fence of the doorbell is missing.
//!
//! Method: loom runs the real ring and doorbell over loom's atomics. Waits have no timeout there,
//! so a lost wake is a deadlock, which loom reports by a panic. Run with
//! `RUSTFLAGS="--cfg loom" cargo test -p orbitkv-shm-protocol --release --test loom`.
#![cfg(loom)]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::time::Duration;

use bytemuck::{Pod, Zeroable};
use loom::thread;
use orbitkv_shm_protocol::doorbell::{ControlBell, Ringer, Sleeper};
use orbitkv_shm_protocol::memory::{FenceSide, SharedMemory, omit_fence};
use orbitkv_shm_protocol::ring::{Consumer, Producer, PushError, RingRecord};

/// The omitted fences are one setting for all models: one model at a time.
static ONE_MODEL: Mutex<()> = Mutex::new(());

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

fn ring(capacity: u32) -> (Producer<Record>, Consumer<Record>) {
    let memory = SharedMemory::heap(SLOTS + capacity as usize * size_of::<Record>());
    let producer = Producer::new(
        memory.slot_writer(SLOTS, capacity),
        memory.word_writer(TAIL),
        memory.word_reader(HEAD),
        0,
    );
    let consumer = Consumer::new(
        memory.slot_reader(SLOTS, capacity),
        memory.word_reader(TAIL),
        memory.word_writer(HEAD),
        0,
    );
    (producer, consumer)
}

fn bell() -> (Ringer, Sleeper) {
    let memory = SharedMemory::heap(8);
    let ringer = Ringer::new(memory.word_writer(0), memory.word_reader(4));
    let sleeper = Sleeper::new(memory.word_writer(4), memory.word_reader(0));
    (ringer, sleeper)
}

fn model(preemptions: Option<usize>, body: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = preemptions;
    builder.check(body);
}

#[test]
fn records_cross_the_ring_whole_and_in_order() {
    let _one = ONE_MODEL.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    for capacity in [1, 2] {
        model(None, move || {
            const RECORDS: u64 = 3;
            let (mut producer, mut consumer) = ring(capacity);
            let pushing = thread::spawn(move || {
                let mut pushed = 0;
                while pushed < RECORDS {
                    match producer.push(record) {
                        Ok(()) => {
                            pushed += 1;
                            producer.publish();
                        }
                        Err(PushError::Full) => thread::yield_now(),
                        Err(PushError::Violation(violation)) => panic!("{violation}"),
                    }
                }
            });
            let mut popped = 0;
            while popped < RECORDS {
                match consumer.pop().unwrap() {
                    Some(found) => {
                        assert_eq!(found, record(popped));
                        popped += 1;
                        consumer.release();
                    }
                    None => thread::yield_now(),
                }
            }
            pushing.join().unwrap();
        });
    }
}

/// One producer that publishes `records` with a ring after each, one consumer that sleeps
/// whenever it finds nothing.
fn sleeping_consumer(records: u64) {
    let (mut producer, mut consumer) = ring(2);
    let (mut ringer, sleeper) = bell();
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
            assert_eq!(found, record(popped));
            popped += 1;
            continue;
        }
        let seen = sleeper.begin();
        if !consumer.ready() {
            sleeper.wait(seen, Duration::MAX);
        }
        sleeper.end();
    }
    pushing.join().unwrap();
}

#[test]
fn no_wake_is_lost() {
    let _one = ONE_MODEL.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    model(None, || sleeping_consumer(1));
    // Two sleeps, of which the second must not be mistaken for the first.
    model(Some(5), || sleeping_consumer(2));
}

#[test]
fn either_fence_alone_loses_wakes() {
    let _one = ONE_MODEL.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    for omitted in [
        &[FenceSide::Waiter][..],
        &[FenceSide::Publisher],
        &[FenceSide::Waiter, FenceSide::Publisher],
    ] {
        for side in omitted {
            omit_fence(*side, true);
        }
        let outcome = catch_unwind(AssertUnwindSafe(|| model(None, || sleeping_consumer(1))));
        for side in omitted {
            omit_fence(*side, false);
        }
        let panic = outcome.expect_err("the model did not notice the missing fence");
        let message = panic
            .downcast_ref::<String>()
            .map(String::as_str)
            .or_else(|| panic.downcast_ref::<&str>().copied())
            .unwrap_or_default();
        assert!(message.contains("deadlock"), "{omitted:?} omitted: {message}");
    }
}

/// Two ringers of one in-process bell, each with its own ring.
#[test]
fn no_wake_of_several_ringers_is_lost() {
    let _one = ONE_MODEL.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    model(Some(3), || {
        let bell = ControlBell::new();
        let mut consumers = Vec::new();
        let mut threads = Vec::new();
        for _ in 0..2 {
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
        while popped < 2 {
            let mut found = false;
            for consumer in &mut consumers {
                if let Some(found_record) = consumer.pop().unwrap() {
                    assert_eq!(found_record, record(0));
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
    });
}
