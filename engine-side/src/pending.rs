//! The operations in flight: credits, operation ids and what each of them owns.

use orbitkv_shm_protocol::ids::OperationId;
use orbitkv_shm_protocol::layout::reserved_credits;
use orbitkv_shm_protocol::record::{PageRange, RequestKind};

/// What the client remembers of a request until its terminal completion.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Issued {
    /// What was asked.
    pub(crate) kind: RequestKind,
    /// Its entries of the page table.
    pub(crate) range: PageRange,
    /// Its pages: entries without anchors.
    pub(crate) pages: u32,
    /// Position of its record in the request ring.
    pub(crate) sequence: u64,
    /// `Cancel`: whom.
    pub(crate) cancels: Option<OperationId>,
}

#[derive(Clone, Copy, Default, Debug)]
struct Slot {
    generation: u32,
    issued: Option<Issued>,
}

/// A fixed table with one slot a credit. Nothing here allocates after [`new`](Self::new).
#[derive(Debug)]
pub(crate) struct Pending {
    slots: Box<[Slot]>,
    /// Free indices; the one used last is used first, its words are still in a cache.
    free: Vec<u32>,
    /// Credits that only [`may_use_reserve`] kinds may take.
    reserve: u32,
}

/// Kinds that give something back: they must get through when ordinary credits are gone.
pub(crate) const fn may_use_reserve(kind: RequestKind) -> bool {
    matches!(kind, RequestKind::Release | RequestKind::Cancel | RequestKind::Drain)
}

impl Pending {
    /// A table for `credits` operations, a power of two of at least 64.
    pub(crate) fn new(credits: u32) -> Self {
        Self {
            slots: vec![Slot::default(); credits as usize].into_boxed_slice(),
            free: (0..credits).rev().collect(),
            reserve: reserved_credits(credits),
        }
    }

    /// Operations without a terminal completion.
    pub(crate) fn outstanding(&self) -> u32 {
        self.slots.len() as u32 - self.free.len() as u32
    }

    /// Whether an operation of `kind` has a credit.
    pub(crate) fn has_credit(&self, kind: RequestKind) -> bool {
        let keep = if may_use_reserve(kind) { 0 } else { self.reserve };
        self.free.len() as u32 > keep
    }

    /// Takes a credit for `issued` and names the operation, or `None` without a credit.
    pub(crate) fn begin(&mut self, issued: Issued) -> Option<OperationId> {
        if !self.has_credit(issued.kind) {
            return None;
        }
        let index = self.free.pop()?;
        let slot = &mut self.slots[index as usize];
        slot.generation = OperationId::next_generation(slot.generation);
        slot.issued = Some(issued);
        Some(OperationId { index, generation: slot.generation })
    }

    /// The operation, while it is outstanding. `operation` may hold any numbers.
    pub(crate) fn get(&self, operation: OperationId) -> Option<&Issued> {
        let slot = self.slots.get(operation.index as usize)?;
        if slot.generation == operation.generation { slot.issued.as_ref() } else { None }
    }

    /// Ends an operation and returns its credit; `None` when it is not outstanding. `operation`
    /// may hold any numbers.
    pub(crate) fn end(&mut self, operation: OperationId) -> Option<Issued> {
        self.get(operation)?;
        self.free.push(operation.index);
        self.slots[operation.index as usize].issued.take()
    }

    /// Ends the outstanding operation with the lowest index, if there is one.
    pub(crate) fn end_any(&mut self) -> Option<(OperationId, Issued)> {
        if self.outstanding() == 0 {
            return None;
        }
        let index = self.slots.iter().position(|slot| slot.issued.is_some())?;
        let generation = self.slots[index].generation;
        let operation = OperationId { index: index as u32, generation };
        self.end(operation).map(|issued| (operation, issued))
    }

    #[cfg(test)]
    fn set_generation(&mut self, index: u32, generation: u32) {
        self.slots[index as usize].generation = generation;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    fn issued(kind: RequestKind, sequence: u64) -> Issued {
        Issued { kind, range: PageRange::default(), pages: 0, sequence, cancels: None }
    }

    #[test]
    fn the_reserve_serves_only_kinds_that_give_back() {
        let mut pending = Pending::new(64);
        let mut taken = 0;
        while pending.begin(issued(RequestKind::Ping, 0)).is_some() {
            taken += 1;
        }
        assert_eq!(taken, 64 - reserved_credits(64));
        let returning = [RequestKind::Release, RequestKind::Cancel, RequestKind::Drain];
        for i in 0..reserved_credits(64) {
            let kind = returning[i as usize % 3];
            assert!(pending.begin(issued(kind, 0)).is_some(), "{kind} {i}");
        }
        for kind in RequestKind::ALL {
            assert!(pending.begin(issued(*kind, 0)).is_none(), "{kind} beyond the last credit");
        }
        assert_eq!(pending.outstanding(), 64);
    }

    #[test]
    fn a_generation_wraps_past_zero() {
        let mut pending = Pending::new(64);
        pending.set_generation(0, OperationId::GENERATION_MAX);
        let operation = pending.begin(issued(RequestKind::Ping, 0)).unwrap();
        assert_eq!(operation, OperationId { index: 0, generation: 1 });
        assert!(pending.end(OperationId { index: 0, generation: 0 }).is_none());
        assert!(pending.end(operation).is_some());
        assert!(pending.end(operation).is_none(), "a second completion");
    }

    /// A table smaller than any session's, with a reserve of one where there is room.
    fn tiny(credits: u32, generation: u32) -> Pending {
        Pending {
            slots: vec![Slot { generation, issued: None }; credits as usize].into_boxed_slice(),
            free: (0..credits).rev().collect(),
            reserve: u32::from(credits > 1),
        }
    }

    /// Goal: in every history of a tiny table, around the wrap of the generation: credits and the
    /// reserve are exact, an id is never given out twice, an ended or never begun id never ends.
    #[test]
    fn all_short_histories_match_a_list() {
        const LENGTH: u32 = 7;
        for credits in [1, 2, 4] {
            for first in [0, OperationId::GENERATION_MAX - 1] {
                for history in 0..6_u32.pow(LENGTH) {
                    check_history(credits, first, history, LENGTH);
                }
            }
        }
    }

    fn check_history(credits: u32, generation: u32, mut history: u32, length: u32) {
        let mut pending = tiny(credits, generation);
        let mut live: Vec<(OperationId, Issued)> = Vec::new();
        let mut given: Vec<OperationId> = Vec::new();
        let mut ended: Option<OperationId> = None;
        for sequence in 0..length {
            match history % 6 {
                act @ (0 | 1) => {
                    let kind = if act == 0 { RequestKind::Ping } else { RequestKind::Release };
                    let keep = if act == 0 { u32::from(credits > 1) } else { 0 };
                    let entry = issued(kind, sequence.into());
                    let operation = pending.begin(entry);
                    assert_eq!(operation.is_some(), (live.len() as u32) < credits - keep);
                    if let Some(operation) = operation {
                        assert!(operation.index < credits && operation.generation > 0);
                        assert!(!given.contains(&operation), "{operation} names two");
                        given.push(operation);
                        live.push((operation, entry));
                    }
                }
                act @ (2 | 3) if !live.is_empty() => {
                    let at = if act == 2 { 0 } else { live.len() - 1 };
                    let (operation, entry) = live.remove(at);
                    assert_eq!(pending.end(operation), Some(entry));
                    ended = Some(operation);
                }
                4 => assert_eq!(ended.and_then(|operation| pending.end(operation)), None),
                5 => {
                    // One generation ahead of what is there, and an index that is not.
                    let generation = OperationId::next_generation(pending.slots[0].generation);
                    assert_eq!(pending.end(OperationId { index: 0, generation }), None);
                    assert_eq!(pending.end(OperationId { index: credits, generation: 1 }), None);
                }
                _ => return,
            }
            history /= 6;
            assert_eq!(pending.outstanding() as usize, live.len());
            assert!(live.iter().all(|(operation, entry)| pending.get(*operation) == Some(entry)));
        }
    }

    proptest! {
        /// Goal: an id names one operation for ever, credits are exact, any forged id is refused.
        /// Method: the table against a map from id to what was issued.
        #[test]
        fn agrees_with_a_map(
            steps in proptest::collection::vec((0_u8..8, any::<u32>(), any::<u32>()), 1..400),
        ) {
            let mut pending = Pending::new(64);
            let mut model: HashMap<OperationId, Issued> = HashMap::new();
            let mut last_generation: HashMap<u32, u32> = HashMap::new();
            let mut ended: Vec<OperationId> = Vec::new();
            for (sequence, (act, a, b)) in steps.into_iter().enumerate() {
                match act {
                    0..=3 => {
                        let kind = RequestKind::ALL[a as usize % RequestKind::ALL.len()];
                        let keep = if may_use_reserve(kind) { 0 } else { reserved_credits(64) };
                        let room = (model.len() as u32) < 64 - keep;
                        let entry = issued(kind, sequence as u64);
                        let got = pending.begin(entry);
                        prop_assert_eq!(got.is_some(), room);
                        if let Some(operation) = got {
                            let last = last_generation.insert(operation.index, operation.generation);
                            prop_assert!(OperationId::generation_follows(
                                last.unwrap_or(0), operation.generation));
                            prop_assert!(operation.index < 64);
                            prop_assert!(model.insert(operation, entry).is_none());
                        }
                    }
                    4 | 5 => {
                        let Some(operation) = model.keys().min_by_key(|o| o.to_bits() ^ u64::from(a))
                            .copied() else { continue };
                        let expected = model.remove(&operation);
                        prop_assert_eq!(pending.end(operation), expected);
                        ended.push(operation);
                    }
                    6 => {
                        let forged = OperationId { index: a % 80, generation: b % 4 };
                        prop_assert_eq!(pending.get(forged), model.get(&forged));
                        prop_assert_eq!(pending.end(forged), model.remove(&forged));
                    }
                    _ => {
                        let Some(replayed) = ended.get(a as usize % ended.len().max(1)) else {
                            continue;
                        };
                        prop_assert_eq!(pending.end(*replayed), None);
                    }
                }
                prop_assert_eq!(pending.outstanding() as usize, model.len());
            }
            let mut reported = 0;
            while let Some((operation, entry)) = pending.end_any() {
                prop_assert_eq!(model.remove(&operation), Some(entry));
                reported += 1;
                prop_assert!(reported <= 64);
            }
            prop_assert!(model.is_empty());
        }
    }
}
