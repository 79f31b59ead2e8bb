//! Newtypes for everything that is counted, named or sized on the wire.
//!
//! An index, a count and a size in bytes are different types wherever they meet.

use std::fmt;

/// One attached ring client. Assigned by the Manager, never reused within an [`Epoch`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct SessionId(pub u32);

/// One life of the Manager: random, non-zero, different after every restart.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Epoch(pub u32);

/// Random 128-bit identity of an engine; sessions that register the same one form an
/// attachment group and share leases.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct EngineId(pub [u8; 16]);

/// A namespace, or an ordered set of namespaces, as one session names it.
///
/// Handles are private to the session that obtained them over the bootstrap socket.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct ScopeId(pub u32);

/// A registered device region (memory + page layout + namespace), private to its session.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct RegionId(pub u32);

/// A lease on pages, valid within one attachment group. Never zero, never reused in an epoch.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct LeaseId(pub u64);

/// 32-byte chained block hash supplied by the engine: equal hash means equal whole prefix.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
#[repr(transparent)]
pub struct PageHash(pub [u8; 32]);

/// One request: an index below the session's credit count and a generation that the client
/// raises each time it uses the index again. Generations run from 1 to 2^31 - 1, then wrap to 1.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct OperationId {
    /// Below the completion ring's capacity.
    pub index: u32,
    /// From 1 to [`OperationId::GENERATION_MAX`].
    pub generation: u32,
}

impl OperationId {
    /// Largest generation: 31 bits, so that a done word holds it with the failure bit.
    pub const GENERATION_MAX: u32 = (1 << 31) - 1;

    /// The generation that follows `generation`, skipping zero.
    pub const fn next_generation(generation: u32) -> u32 {
        if generation >= Self::GENERATION_MAX { 1 } else { generation + 1 }
    }

    /// True when `new` may follow `last` at one index: ahead of it by less than half the circle.
    /// `last == 0` means that the index was never used.
    pub const fn generation_follows(last: u32, new: u32) -> bool {
        if new == 0 || new > Self::GENERATION_MAX {
            return false;
        }
        let ahead = new.wrapping_sub(last) & Self::GENERATION_MAX;
        last == 0 || (ahead != 0 && ahead < (1 << 30))
    }

    /// `generation << 32 | index`, as `Cancel` carries its target.
    pub const fn to_bits(self) -> u64 {
        (self.generation as u64) << 32 | self.index as u64
    }

    /// Inverse of [`to_bits`](Self::to_bits); any value decodes.
    pub const fn from_bits(bits: u64) -> Self {
        Self { index: bits as u32, generation: (bits >> 32) as u32 }
    }

    /// The done word that says "every byte is in place"; only the copying device stores it.
    pub const fn done_word(self) -> u32 {
        self.generation << 1
    }

    /// The done word that says "ended without all bytes; read the ring record".
    pub const fn failed_word(self) -> u32 {
        self.generation << 1 | 1
    }
}

impl fmt::Display for OperationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.index, self.generation)
    }
}

impl fmt::Display for SessionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for LeaseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for EngineId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", u128::from_be_bytes(self.0))
    }
}

impl fmt::Debug for PageHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for byte in &self.0[..8] {
            write!(f, "{byte:02x}")?;
        }
        f.write_str("…")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generations_wrap_past_zero_and_refuse_replays() {
        assert_eq!(OperationId::next_generation(OperationId::GENERATION_MAX), 1);
        assert!(OperationId::generation_follows(0, 1));
        assert!(OperationId::generation_follows(0, 77));
        assert!(OperationId::generation_follows(OperationId::GENERATION_MAX, 1));
        assert!(!OperationId::generation_follows(5, 5));
        assert!(!OperationId::generation_follows(5, 4));
        assert!(!OperationId::generation_follows(5, 0));
        assert!(!OperationId::generation_follows(5, 1 << 31));
    }

    #[test]
    fn done_and_failed_words_never_collide() {
        let operation = OperationId { index: 3, generation: OperationId::GENERATION_MAX };
        assert_eq!(operation.done_word(), u32::MAX - 1);
        assert_eq!(operation.failed_word(), u32::MAX);
        assert_eq!(OperationId::from_bits(operation.to_bits()), operation);
    }
}
