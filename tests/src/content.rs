//! What the bytes of a page are: a function of its key, so that every copy can be checked.
//!
//! Memory is scaled down: one 8-byte word stands for a unit of 4 KiB. Two computations of one page
//! need not agree in every bit, so a key has a few equally good images, its versions; half of one
//! and half of another is a wrong page.

use orbitkv_manager::core::{NamespaceFingerprint, UNIT_BYTES};
use orbitkv_shm_protocol::ids::PageHash;

/// Stands for 4 KiB.
pub type Word = u64;

/// Memory that nobody has filled.
pub const POISON: Word = 0xdead_dead_dead_dead;

/// Different images that one key may have.
pub const VERSIONS: u8 = 3;

/// Identity of a page's bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct Key {
    /// Namespace of the page.
    pub namespace: NamespaceFingerprint,
    /// Hash of the page.
    pub hash: PageHash,
}

/// Words that an image of `image_bytes` has.
pub fn units(image_bytes: u32) -> usize {
    u64::from(image_bytes).div_ceil(UNIT_BYTES) as usize
}

fn mix(word: u64) -> u64 {
    let word = (word ^ (word >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    let word = (word ^ (word >> 29)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    word ^ (word >> 32)
}

/// Folds words into one.
pub fn fold(words: impl IntoIterator<Item = Word>) -> u64 {
    words.into_iter().fold(0x6f72_6269_7400, |sum, word| mix(sum ^ word).rotate_left(17))
}

fn seed(key: &Key) -> u64 {
    let bytes = key.namespace.chunks(8).chain(key.hash.0.chunks(8));
    fold(bytes.map(|chunk| chunk.iter().fold(0, |word, &byte| word << 8 | u64::from(byte))))
}

fn word(seed: u64, version: u8, unit: usize) -> Word {
    mix(seed ^ mix(unit as u64 + 1) ^ u64::from(version) << 56)
}

/// The image of a key.
pub fn image(key: &Key, version: u8, image_bytes: u32) -> Vec<Word> {
    let seed = seed(key);
    (0..units(image_bytes)).map(|unit| word(seed, version, unit)).collect()
}

/// Whether `words` are one whole image of `key`.
pub fn is_image(words: &[Word], key: &Key) -> bool {
    let seed = seed(key);
    let whole = |version| words.iter().enumerate().all(|(unit, &w)| w == word(seed, version, unit));
    !words.is_empty() && (0..VERSIONS).any(whole)
}

/// Checksum of an image, where the Manager has xxh3-64.
pub fn checksum(words: &[Word]) -> u64 {
    fold(words.iter().copied())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_is_whole_and_of_one_key_and_version() {
        let key = Key { namespace: [1; 32], hash: PageHash([2; 32]) };
        let other = Key { namespace: [3; 32], ..key };
        let mut words = image(&key, 1, 20_000);
        assert_eq!(words.len(), 5);
        assert!(is_image(&words, &key) && !is_image(&words, &other));
        words[4] = image(&key, 2, 20_000)[4];
        assert!(!is_image(&words, &key), "torn between two versions");
        words[4] = POISON;
        assert!(!is_image(&words, &key) && !is_image(&[], &key));
    }
}
