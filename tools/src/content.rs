//! The bytes that a page must have, derived from its key alone.
//!
//! A [`PageSpace`] is one namespace of a workload: its name, page size and seed. A block id and
//! everything before it give the page's 32-byte hash; hash and namespace give every byte of the
//! page. Whoever restores a page can therefore tell whether each byte is the page's own.

use orbitkv_shm_protocol::ids::PageHash;
use sha2::{Digest, Sha256};

/// Separates these hashes from any other use of SHA-256.
const DOMAIN: &[u8] = b"orbitkv workload page space v1";
/// Odd constants of the mixers: the golden ratio and primes without visible structure.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
const LANES: [u64; 4] =
    [0xd6e8_feb8_6659_fd93, 0xa076_1d64_78bd_642f, 0xe703_7ed1_a0b4_28db, 0x8ebc_6af0_9c88_c6e3];
const FILL: u64 = 0xbf58_476d_1ce4_e5b9;

/// One namespace of a workload: fixes the hash and the bytes of every page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PageSpace {
    root: [u64; 4],
}

impl PageSpace {
    /// The space of a named workload with pages of `page_bytes`.
    pub fn new(name: &str, page_bytes: u64, seed: u64) -> Self {
        let mut hash = Sha256::new();
        hash.update(DOMAIN);
        hash.update((name.len() as u64).to_le_bytes());
        hash.update(name.as_bytes());
        hash.update(page_bytes.to_le_bytes());
        hash.update(seed.to_le_bytes());
        Self { root: words(&hash.finalize().into()) }
    }

    /// Hashes of the pages of one prompt, from its first block on. Each depends on its own id and
    /// every id before it, so equal hash means equal prefix even where a trace repeats an id.
    pub fn hashes(&self, ids: impl Iterator<Item = u64>) -> impl Iterator<Item = PageHash> {
        ids.scan(self.root, |state, id| {
            for (lane, constant) in state.iter_mut().zip(LANES) {
                *lane = mix(*lane ^ id.wrapping_mul(constant).wrapping_add(constant));
            }
            // Each lane keeps its own history; the neighbours only make them depend on another.
            let turned = [state[3], state[0], state[1], state[2]];
            for (lane, neighbour) in state.iter_mut().zip(turned) {
                *lane = lane.wrapping_add(neighbour.rotate_left(23));
            }
            let mut hash = [0; 32];
            for (bytes, lane) in hash.chunks_exact_mut(8).zip(&*state) {
                bytes.copy_from_slice(&lane.to_le_bytes());
            }
            Some(PageHash(hash))
        })
    }

    /// Writes the bytes of the page named `hash`.
    pub fn fill_page(&self, hash: &PageHash, page: &mut [u8]) {
        let mut state = self.page_seed(hash);
        let mut chunks = page.chunks_exact_mut(8);
        for chunk in &mut chunks {
            chunk.copy_from_slice(&next_word(&mut state).to_le_bytes());
        }
        let rest = chunks.into_remainder();
        let last = next_word(&mut state).to_le_bytes();
        rest.copy_from_slice(&last[..rest.len()]);
    }

    /// Index of the first byte of `page` that is not as [`fill_page`](Self::fill_page) writes it
    /// for `hash`; `None` when every byte is right.
    pub fn first_difference(&self, hash: &PageHash, page: &[u8]) -> Option<usize> {
        let mut state = self.page_seed(hash);
        let mut chunks = page.chunks_exact(8);
        for (index, chunk) in (&mut chunks).enumerate() {
            let expected = next_word(&mut state).to_le_bytes();
            if chunk != expected {
                return different(chunk, &expected).map(|byte| index * 8 + byte);
            }
        }
        let rest = chunks.remainder();
        let last = next_word(&mut state).to_le_bytes();
        different(rest, &last).map(|byte| page.len() - rest.len() + byte)
    }

    fn page_seed(&self, hash: &PageHash) -> u64 {
        words(&hash.0)
            .iter()
            .zip(self.root)
            .fold(STEP, |seed, (word, root)| mix(seed ^ word ^ root.rotate_left(32)))
    }
}

fn words(bytes: &[u8; 32]) -> [u64; 4] {
    let mut words = [0; 4];
    for (word, chunk) in words.iter_mut().zip(bytes.chunks_exact(8)) {
        *word = u64::from_le_bytes(chunk.try_into().unwrap_or_default());
    }
    words
}

/// A bijection in which every input bit reaches every output bit.
fn mix(mut x: u64) -> u64 {
    x ^= x >> 32;
    x = x.wrapping_mul(LANES[0]);
    x ^= x >> 29;
    x = x.wrapping_mul(FILL);
    x ^ (x >> 32)
}

/// One multiplication a word: filling must not be slower than copying.
fn next_word(state: &mut u64) -> u64 {
    *state = state.wrapping_add(STEP);
    let x = (*state ^ (*state >> 30)).wrapping_mul(FILL);
    x ^ (x >> 31)
}

fn different(bytes: &[u8], expected: &[u8]) -> Option<usize> {
    bytes.iter().zip(expected).position(|(a, b)| a != b)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn hashes(space: PageSpace, ids: &[u64]) -> Vec<PageHash> {
        space.hashes(ids.iter().copied()).collect()
    }

    #[test]
    fn equal_prefix_equal_hash_and_nothing_else() {
        let space = PageSpace::new("t", 4096, 1);
        let a = hashes(space, &[0, 1, 2, 3]);
        assert_eq!(a[..2], hashes(space, &[0, 1, 9])[..2]);
        let mut seen: HashSet<PageHash> = a.iter().copied().collect();
        for other in [
            hashes(space, &[1, 1, 2, 3]),
            hashes(space, &[5, 5, 5, 5]),
            hashes(PageSpace::new("u", 4096, 1), &[0, 1, 2, 3]),
            hashes(PageSpace::new("t", 8192, 1), &[0, 1, 2, 3]),
            hashes(PageSpace::new("t", 4096, 2), &[0, 1, 2, 3]),
            hashes(space, &[u64::MAX, u64::MAX - 1]),
        ] {
            assert!(other.iter().all(|hash| seen.insert(*hash)));
        }
    }

    #[test]
    fn every_byte_of_a_page_is_checked() {
        let space = PageSpace::new("t", 61, 7);
        let [one, two] = hashes(space, &[0, 1])[..] else { unreachable!() };
        for bytes in [0, 1, 7, 8, 9, 61, 4096] {
            let mut page = vec![0; bytes];
            space.fill_page(&one, &mut page);
            assert_eq!(space.first_difference(&one, &page), None);
            for index in 0..bytes {
                page[index] ^= 1 << (index % 8);
                assert_eq!(space.first_difference(&one, &page), Some(index));
                page[index] ^= 1 << (index % 8);
            }
            if bytes > 8 {
                assert!(space.first_difference(&two, &page).unwrap() < 8);
            }
        }
    }

    #[test]
    fn pages_share_no_words() {
        // Goal: no shifted, zeroed or swapped page passes for another. Method: all words of many
        // pages differ.
        let space = PageSpace::new("t", 4096, 7);
        let mut words = HashSet::new();
        for hash in space.hashes(0..64) {
            let mut page = vec![0; 4096];
            space.fill_page(&hash, &mut page);
            for word in page.chunks_exact(8) {
                assert!(words.insert(word.to_vec()));
            }
        }
    }

    #[test]
    fn hashes_and_bytes_never_change() {
        // A replay against pages that an earlier version saved must still verify.
        let space = PageSpace::new("golden", 4096, 0);
        let hash = hashes(space, &[0, 1, 2])[2];
        let mut page = [0; 8];
        space.fill_page(&hash, &mut page);
        assert_eq!(format!("{hash:?}"), "dc1541a6e7c55ff8…");
        assert_eq!(u64::from_le_bytes(page), 1_077_517_118_525_991_530);
    }
}
