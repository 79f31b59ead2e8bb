//! Keys of pages that were here and left every tier: a bounded, exact memory.
//!
//! The `reuse` spill policy asks it whether a page that is saved now was saved before. Whole keys
//! are kept, so that an answer is never wrong; the oldest key goes first.

use std::collections::VecDeque;

use hashbrown::HashTable;
use orbitkv_shm_protocol::ids::PageHash;

use super::index::key_hash;
use super::limits::HISTORY_KEYS_MAX;
use super::namespace::NamespaceId;

/// The smallest slot: an image of 4 KiB and its footer.
const SLOT_BYTES_MIN: u64 = 8 << 10;

/// A page that left.
#[derive(Clone, Copy, Debug)]
struct Gone {
    hash: PageHash,
    namespace: NamespaceId,
    era: u32,
    slot_bytes: u32,
    /// In the table: not taken back and not left again since.
    live: bool,
}

impl Gone {
    fn is(&self, namespace: NamespaceId, era: u32, hash: &PageHash) -> bool {
        self.hash == *hash && self.namespace == namespace && self.era == era
    }
}

/// As many keys as the tier could hold pages of the same sizes, at most [`HISTORY_KEYS_MAX`].
#[derive(Debug)]
pub(super) struct History {
    /// Oldest first; number `first + i` is at `i`.
    gone: VecDeque<Gone>,
    first: u32,
    /// Numbers of the live ones.
    table: HashTable<u32>,
    seed: u64,
    keys_max: usize,
    /// Slots that the pages of all entries would need.
    bytes: u64,
    bytes_max: u64,
}

impl History {
    /// Room for the pages of `tier_bytes` of slots, taken at once.
    pub(super) fn new(tier_bytes: u64, seed: u64) -> Self {
        let keys = usize::try_from(tier_bytes / SLOT_BYTES_MIN).unwrap_or(usize::MAX);
        let keys_max = keys.min(HISTORY_KEYS_MAX);
        Self {
            gone: VecDeque::with_capacity(keys_max),
            first: 0,
            table: HashTable::with_capacity(keys_max),
            seed: seed | 1,
            keys_max,
            bytes: 0,
            bytes_max: tier_bytes,
        }
    }

    /// Keys that are remembered.
    pub(super) fn len(&self) -> usize {
        self.table.len()
    }

    /// Remembers a page that left as the youngest.
    pub(super) fn add(
        &mut self,
        namespace: NamespaceId,
        era: u32,
        hash: PageHash,
        slot_bytes: u32,
    ) {
        self.take(namespace, era, &hash);
        if self.keys_max == 0 || u64::from(slot_bytes) > self.bytes_max {
            return;
        }
        while self.gone.len() >= self.keys_max
            || self.bytes + u64::from(slot_bytes) > self.bytes_max
        {
            self.drop_oldest();
        }
        let number = self.first.wrapping_add(self.gone.len() as u32);
        self.gone.push_back(Gone { hash, namespace, era, slot_bytes, live: true });
        self.bytes += u64::from(slot_bytes);
        let Self { gone, first, table, seed, .. } = self;
        table.insert_unique(key_hash(*seed, namespace, &hash), number, |&other| {
            let other = &gone[other.wrapping_sub(*first) as usize];
            key_hash(*seed, other.namespace, &other.hash)
        });
    }

    /// Whether the page was here. It is not remembered any more then.
    pub(super) fn take(&mut self, namespace: NamespaceId, era: u32, hash: &PageHash) -> bool {
        let Self { gone, first, table, seed, .. } = self;
        let matches =
            |number: &u32| gone[number.wrapping_sub(*first) as usize].is(namespace, era, hash);
        let Ok(entry) = table.find_entry(key_hash(*seed, namespace, hash), matches) else {
            return false;
        };
        let (number, _) = entry.remove();
        gone[number.wrapping_sub(*first) as usize].live = false;
        true
    }

    fn drop_oldest(&mut self) {
        let Some(oldest) = self.gone.pop_front() else { return };
        let number = self.first;
        self.first = self.first.wrapping_add(1);
        self.bytes -= u64::from(oldest.slot_bytes);
        if !oldest.live {
            return;
        }
        let key = key_hash(self.seed, oldest.namespace, &oldest.hash);
        if let Ok(entry) = self.table.find_entry(key, |&other| other == number) {
            entry.remove();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    const SLOT: u32 = SLOT_BYTES_MIN as u32;

    fn hash(number: u64) -> PageHash {
        let mut bytes = [0; 32];
        bytes[..8].copy_from_slice(&number.to_le_bytes());
        PageHash(bytes)
    }

    const SPACE: NamespaceId = NamespaceId(3);

    #[test]
    fn a_key_is_found_once_and_only_as_it_was() {
        let mut history = History::new(1 << 20, 7);
        history.add(SPACE, 1, hash(5), SLOT);
        assert!(!history.take(NamespaceId(4), 1, &hash(5)));
        assert!(!history.take(SPACE, 2, &hash(5)), "of before a forget");
        assert!(!history.take(SPACE, 1, &hash(6)));
        assert!(history.take(SPACE, 1, &hash(5)));
        assert!(!history.take(SPACE, 1, &hash(5)));
        assert_eq!(history.len(), 0);
    }

    #[test]
    fn the_oldest_of_what_the_tier_could_hold_go_first() {
        let mut history = History::new(10 * SLOT_BYTES_MIN, 7);
        (0..14).for_each(|number| history.add(SPACE, 0, hash(number), SLOT));
        assert_eq!(history.len(), 10);
        // A page of four slots' bytes takes the place of four.
        history.add(SPACE, 0, hash(100), 4 * SLOT);
        let left: Vec<_> = (0..14).filter(|&n| history.take(SPACE, 0, &hash(n))).collect();
        assert_eq!(left, [8, 9, 10, 11, 12, 13]);
        assert!(history.take(SPACE, 0, &hash(100)));
        // One that the tier could not hold is not worth remembering.
        history.add(SPACE, 0, hash(101), 11 * SLOT);
        assert_eq!(history.len(), 0);
    }

    #[test]
    fn memory_is_bounded_whatever_the_tier() {
        let history = History::new(u64::MAX, 7);
        assert_eq!(history.keys_max, HISTORY_KEYS_MAX);
        assert!(size_of::<Gone>() <= 48);
        let mut none = History::new(0, 7);
        none.add(SPACE, 0, hash(1), SLOT);
        assert_eq!(none.len(), 0);
    }

    /// Goal: exact. Method: random keys beside a map that numbers each entry.
    #[test]
    fn it_agrees_with_a_plain_list() {
        let mut rng = 1_u64;
        let mut next = |below: u64| {
            rng = rng.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (rng >> 33) % below
        };
        let mut history = History::new(20 * SLOT_BYTES_MIN, 9);
        history.first = u32::MAX - 40;
        let mut added = 0_u64;
        let mut model: BTreeMap<u64, u64> = BTreeMap::new();
        let mut hits = 0;
        for _ in 0..4000 {
            let key = next(40);
            if next(3) == 0 {
                let expected = model.remove(&key).is_some_and(|at| at + 20 >= added);
                assert_eq!(history.take(SPACE, 0, &hash(key)), expected);
                hits += u32::from(expected);
            } else {
                history.add(SPACE, 0, hash(key), SLOT);
                model.insert(key, added);
                added += 1;
            }
            assert!(history.gone.len() <= 20);
        }
        assert!(hits > 100, "{hits}");
    }
}
