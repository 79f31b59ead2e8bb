//! Operations as the integers that Python keeps.

use std::sync::atomic::{AtomicU64, Ordering};

use orbitkv_engine::{Operation, OperationId};

/// Bits of an operation's index: the largest ring has 4,096 records.
const INDEX_BITS: u32 = 12;
/// Bits of its generation.
const GENERATION_BITS: u32 = 31;
const SERIAL_BITS: u32 = u64::BITS - 1 - GENERATION_BITS - INDEX_BITS;

/// Clients that were made in this process: what tells the numbers of one from another's.
static CLIENTS: AtomicU64 = AtomicU64::new(0);

/// The operation last staged at each index.
///
/// A number is {client of this process: 20 bits, generation: 31, index: 12}, so one of another
/// client or of an operation whose index was used again is found to be none, unless a million
/// clients or two billion operations lie in between.
pub(crate) struct Operations {
    serial: u64,
    staged: Box<[Option<Operation>]>,
}

impl Operations {
    /// For a client with `ring_capacity` records in each ring.
    pub(crate) fn new(ring_capacity: u32) -> Self {
        let serial = CLIENTS.fetch_add(1, Ordering::Relaxed) & ((1 << SERIAL_BITS) - 1);
        Self { serial, staged: vec![None; ring_capacity as usize].into_boxed_slice() }
    }

    /// Remembers an operation that was just staged; returns its number.
    pub(crate) fn note(&mut self, operation: Operation) -> u64 {
        if let Some(slot) = self.staged.get_mut(operation.id().index as usize) {
            *slot = Some(operation);
        }
        self.number(&operation)
    }

    /// The number of an operation of this client.
    pub(crate) fn number(&self, operation: &Operation) -> u64 {
        let OperationId { index, generation } = operation.id();
        (self.serial << GENERATION_BITS | u64::from(generation)) << INDEX_BITS | u64::from(index)
    }

    /// The operation that a number stands for, as long as its index was not used again.
    pub(crate) fn find(&self, number: u64) -> Option<Operation> {
        let index = (number & ((1 << INDEX_BITS) - 1)) as usize;
        let operation = (*self.staged.get(index)?)?;
        (self.number(&operation) == number).then_some(operation)
    }
}
