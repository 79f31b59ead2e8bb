//! The single-producer single-consumer ring: free-running positions over [`crate::memory`].
//!
//! Each side keeps its capacity, its own position and the last valid position of its peer in
//! private memory; of its own index word it is the only writer and never a reader. A position is
//! the number of records that ever passed, modulo 2^64; the slot is its low bits. An index that a
//! correct peer could not have stored is a [`RingViolation`], after which the handle stays
//! poisoned: the session ends, nothing is skipped and nothing is read out of bounds.

use bytemuck::Pod;

use crate::memory::{RecordPlace, SlotReader, SlotWriter, WordReader, WordWriter};
use crate::record::{CompletionRecord, RequestRecord};

/// A record that carries the ring position it was written for.
pub trait RingRecord: Pod {
    /// Free-running ring position, as the producer wrote it.
    fn sequence(&self) -> u64;
}

impl RingRecord for RequestRecord {
    #[inline]
    fn sequence(&self) -> u64 {
        self.sequence
    }
}

impl RingRecord for CompletionRecord {
    #[inline]
    fn sequence(&self) -> u64 {
        self.sequence
    }
}

/// What a peer did that no correct peer does. The session it belongs to must be closed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum RingViolation {
    /// The producer claims more records than the ring holds.
    #[error("producer index jumped from {from} to {to}, beyond a ring of {capacity} records")]
    ProducerJump {
        /// Last valid value.
        from: u64,
        /// Value found.
        to: u64,
        /// Records in the ring.
        capacity: u32,
    },
    /// The producer took records back.
    #[error("producer index went backwards from {from} to {to}")]
    ProducerBackwards {
        /// Last valid value.
        from: u64,
        /// Value found.
        to: u64,
    },
    /// The consumer claims to have taken records that were never published.
    #[error("consumer index jumped from {from} to {to}, beyond the {published} records published")]
    ConsumerJump {
        /// Last valid value.
        from: u64,
        /// Value found.
        to: u64,
        /// Position up to which records were published.
        published: u64,
    },
    /// The consumer gave records back.
    #[error("consumer index went backwards from {from} to {to}")]
    ConsumerBackwards {
        /// Last valid value.
        from: u64,
        /// Value found.
        to: u64,
    },
    /// A record is not the one that belongs at its position.
    #[error("record at position {position} carries sequence {found}")]
    WrongSequence {
        /// Position that was read.
        position: u64,
        /// Sequence that the record carried.
        found: u64,
    },
}

/// Why a record was not staged.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum PushError {
    /// Every slot is taken; nothing was written. Publish what is staged and let the peer consume.
    #[error("ring is full")]
    Full,
    /// The peer's index is impossible.
    #[error(transparent)]
    Violation(#[from] RingViolation),
}

/// The writing end of a ring.
///
/// Records are staged by [`push`](Self::push) and become visible to the consumer together, with
/// the next [`publish`](Self::publish).
#[derive(Debug)]
pub struct Producer<R> {
    slots: SlotWriter<R>,
    tail: WordWriter<u64>,
    head: WordReader<u64>,
    /// Next position to stage.
    position: u64,
    /// Up to here the consumer may see.
    published: u64,
    /// Last valid value of the consumer's index.
    consumed: u64,
    violation: Option<RingViolation>,
}

impl<R: RingRecord> Producer<R> {
    /// Joins slots and index words into the writing end. Both index words hold `start`.
    pub fn new(
        slots: SlotWriter<R>,
        tail: WordWriter<u64>,
        head: WordReader<u64>,
        start: u64,
    ) -> Self {
        Self {
            slots,
            tail,
            head,
            position: start,
            published: start,
            consumed: start,
            violation: None,
        }
    }

    /// Records in the ring.
    pub fn capacity(&self) -> u32 {
        self.slots.capacity()
    }

    /// Position of the next record to be staged: how many were staged since the start.
    #[inline]
    pub fn position(&self) -> u64 {
        self.position
    }

    /// Position up to which records are published.
    #[inline]
    pub fn published(&self) -> u64 {
        self.published
    }

    /// Slots that were free when the consumer's index was last read; there may be more by now. No
    /// access to shared memory.
    #[inline]
    pub fn free_seen(&self) -> u32 {
        // Below the capacity: `push` never stages further.
        self.slots.capacity() - self.position.wrapping_sub(self.consumed) as u32
    }

    /// Slots free now; the consumer can only raise it.
    ///
    /// # Errors
    /// The consumer's index is impossible.
    pub fn free(&mut self) -> Result<u32, RingViolation> {
        self.refresh()?;
        Ok(self.free_seen())
    }

    /// Writes the record that `record` makes for the next position. Not visible to the consumer
    /// before [`publish`](Self::publish).
    ///
    /// # Errors
    /// [`PushError::Full`], without calling `record`, or a violation of the peer.
    #[inline]
    pub fn push(&mut self, record: impl FnOnce(u64) -> R) -> Result<(), PushError> {
        if self.position.wrapping_sub(self.consumed) >= u64::from(self.slots.capacity()) {
            self.refresh()?;
            if self.position.wrapping_sub(self.consumed) >= u64::from(self.slots.capacity()) {
                return Err(PushError::Full);
            }
        }
        let record = record(self.position);
        debug_assert_eq!(record.sequence(), self.position);
        self.slots.write(self.position, record);
        self.position = self.position.wrapping_add(1);
        Ok(())
    }

    /// Makes everything staged visible with one store (`ring-publish`). False when nothing was
    /// staged.
    #[inline]
    pub fn publish(&mut self) -> bool {
        if self.published == self.position {
            return false;
        }
        self.published = self.position;
        self.tail.store_release(self.position);
        true
    }

    /// Reads the consumer's index (`ring-release`) and checks it against what it can be.
    #[cold]
    fn refresh(&mut self) -> Result<(), RingViolation> {
        if let Some(violation) = self.violation {
            return Err(violation);
        }
        // `ring-release`
        let to = self.head.load_acquire();
        let from = self.consumed;
        let outstanding = self.published.wrapping_sub(from);
        let ahead = to.wrapping_sub(from);
        if ahead <= outstanding {
            self.consumed = to;
            return Ok(());
        }
        let violation = if is_behind(ahead) {
            RingViolation::ConsumerBackwards { from, to }
        } else {
            RingViolation::ConsumerJump { from, to, published: self.published }
        };
        self.violation = Some(violation);
        Err(violation)
    }
}

/// The reading end of a ring.
///
/// Records are copied out by [`pop`](Self::pop); their slots return to the producer together,
/// with the next [`release`](Self::release).
#[derive(Debug)]
pub struct Consumer<R> {
    slots: SlotReader<R>,
    tail: WordReader<u64>,
    head: WordWriter<u64>,
    /// Next position to take.
    position: u64,
    /// Up to here the producer may overwrite.
    released: u64,
    /// Last valid value of the producer's index.
    available: u64,
    /// Where the record at `position` is.
    next: RecordPlace<R>,
    violation: Option<RingViolation>,
}

impl<R: RingRecord> Consumer<R> {
    /// Joins slots and index words into the reading end. Both index words hold `start`.
    pub fn new(
        slots: SlotReader<R>,
        tail: WordReader<u64>,
        head: WordWriter<u64>,
        start: u64,
    ) -> Self {
        Self {
            next: slots.place(start),
            slots,
            tail,
            head,
            position: start,
            released: start,
            available: start,
            violation: None,
        }
    }

    /// Records in the ring.
    pub fn capacity(&self) -> u32 {
        self.slots.capacity()
    }

    /// Position of the next record to be taken: how many were taken since the start.
    #[inline]
    pub fn position(&self) -> u64 {
        self.position
    }

    /// Position up to which slots were returned to the producer.
    #[inline]
    pub fn released(&self) -> u64 {
        self.released
    }

    /// The producer's index as last found valid.
    #[inline]
    pub fn seen(&self) -> u64 {
        self.available
    }

    /// Whether [`pop`](Self::pop) has something to say: a record or a violation. One load.
    #[inline]
    pub fn ready(&self) -> bool {
        self.position != self.available || self.position != self.tail.load_acquire()
    }

    /// Whether the producer published nothing that was not taken: what a spinning consumer asks.
    /// One load, and a hint that the next record is about to be read, so that it waits for both
    /// lines of its peer's cache at once and not for one after the other.
    #[inline]
    pub fn is_idle(&self) -> bool {
        self.next.prefetch();
        self.tail.load_acquire() == self.position
    }

    /// Takes a copy of the next record, or `None` when the producer published no more.
    ///
    /// # Errors
    /// The producer's index is impossible, or the record is not the one of its position. The
    /// handle keeps answering so.
    #[inline]
    pub fn pop(&mut self) -> Result<Option<R>, RingViolation> {
        if self.position == self.available {
            // `ring-publish`
            let tail = self.tail.load_acquire();
            if tail == self.position && self.violation.is_none() {
                return Ok(None);
            }
            self.advance(tail)?;
        }
        let record = self.slots.read(self.position);
        if record.sequence() != self.position {
            return Err(self.wrong_sequence(record.sequence()));
        }
        self.position = self.position.wrapping_add(1);
        self.next = self.slots.place(self.position);
        Ok(Some(record))
    }

    /// Returns the slots of everything taken with one store (`ring-release`). False when nothing
    /// was taken since the last time.
    #[inline]
    pub fn release(&mut self) -> bool {
        if self.released == self.position {
            return false;
        }
        self.released = self.position;
        self.head.store_release(self.position);
        true
    }

    /// Checks an index of the producer (`ring-publish`) against what it can be, and adopts it.
    fn advance(&mut self, to: u64) -> Result<(), RingViolation> {
        if let Some(violation) = self.violation {
            return Err(violation);
        }
        let from = self.available;
        // The producer knows only what was released: it may fill the ring from there.
        let room = u64::from(self.slots.capacity()) - from.wrapping_sub(self.released);
        let ahead = to.wrapping_sub(from);
        if ahead <= room {
            self.available = to;
            return Ok(());
        }
        let violation = if is_behind(ahead) {
            RingViolation::ProducerBackwards { from, to }
        } else {
            RingViolation::ProducerJump { from, to, capacity: self.slots.capacity() }
        };
        self.violation = Some(violation);
        Err(violation)
    }

    #[cold]
    fn wrong_sequence(&mut self, found: u64) -> RingViolation {
        let violation = RingViolation::WrongSequence { position: self.position, found };
        self.violation = Some(violation);
        // Sends every later `pop` to `advance`, which knows about the violation.
        self.available = self.position;
        violation
    }
}

/// Whether a free-running distance is better explained by a step back than by a step forward.
const fn is_behind(ahead: u64) -> bool {
    (ahead as i64) < 0
}
