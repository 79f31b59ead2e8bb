//! The bytes that a page has: words that nobody else would write there.

use crate::pages::mixed;

/// Word `word` of the image of page `page`; `pattern` in kernels/kernels.cu is the same on a GPU.
pub(crate) fn word(seed: u64, page: u32, word: u64) -> u64 {
    let page = u64::from(page).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed(seed.wrapping_add(page).wrapping_add(word.wrapping_mul(0xd1b5_4a32_d192_ed03)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_seed_page_or_place_is_another_word() {
        assert_eq!(word(0, 0, 0), 0);
        let one = word(7, 1, 2);
        for other in [word(8, 1, 2), word(7, 2, 2), word(7, 1, 3)] {
            assert_ne!(one, other);
        }
    }
}
