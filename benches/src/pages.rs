//! Names and bytes of the pages that are saved and asked for.

use orbitkv_engine::{DependencySpec, NamespaceSpec, PageHash};

/// Bytes of a page: the smallest there is, so that many fit. A query moves none of them.
pub(crate) const PAGE_BYTES: u64 = 4096;
/// Pages of a chain: the longest query.
pub(crate) const CHAIN_PAGES: u32 = 1024;
/// Chains that are saved unless told otherwise: 100,352 pages, 392 MiB.
pub(crate) const CHAINS: u32 = 98;

/// Name of page `page` of chain `chain`: 32 bytes as uniform as a real hash.
pub(crate) fn hash(chain: u32, page: u32) -> PageHash {
    let mut state = u64::from(chain) << 32 | u64::from(page);
    let mut bytes = [0; 32];
    for word in bytes.chunks_exact_mut(8) {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        word.copy_from_slice(&mixed(state).to_le_bytes());
    }
    PageHash(bytes)
}

/// All names of a chain, in order.
pub(crate) fn chain(chain: u32) -> Vec<PageHash> {
    (0..CHAIN_PAGES).map(|page| hash(chain, page)).collect()
}

/// The bytes that a page has: its name over and over, so that no page is like another.
pub(crate) fn fill(hash: PageHash, bytes: &mut [u8]) {
    for part in bytes.chunks_mut(hash.0.len()) {
        part.copy_from_slice(&hash.0[..part.len()]);
    }
}

/// Identity of the pages.
pub(crate) fn namespace() -> NamespaceSpec {
    NamespaceSpec {
        model: "orbitkv-bench/control".to_owned(),
        dtype: "bytes".to_owned(),
        page_tokens: 64,
        page_bytes: PAGE_BYTES,
        layout: "one segment a page".to_owned(),
        group: 0,
        tp_rank: 0,
        tp_size: 1,
        pp_rank: 0,
        pp_size: 1,
        adapter: String::new(),
        salt: String::new(),
        dependency: DependencySpec::Chain,
    }
}

/// A permutation of 64-bit numbers whose outputs look random: Stafford's variant 13 of the
/// MurmurHash3 finaliser, as in SplitMix64.
pub(crate) fn mixed(mut bits: u64) -> u64 {
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn no_two_pages_have_one_name() {
        let names: HashSet<PageHash> = (0..CHAINS).flat_map(chain).collect();
        assert_eq!(names.len(), (CHAINS * CHAIN_PAGES) as usize);
        assert!(names.len() >= 100_000);
    }
}
