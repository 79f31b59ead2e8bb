//! Short names for what tests ask for: chains of hashes, entries, namespaces, devices.

use orbitkv_manager::core::{Direction, RegionGeometry};
use orbitkv_shm_protocol::bootstrap::message::NamespaceSpec;
use orbitkv_shm_protocol::ids::PageHash;
use orbitkv_shm_protocol::record::PageEntry;

use super::Work;
use crate::content::fold;
use crate::engine::namespace;

/// A hash that stands for a prompt: its parent's hash and what follows.
pub fn child(parent: Option<PageHash>, branch: u64) -> PageHash {
    let parent = parent.map_or([0; 32], |parent| parent.0);
    let mut hash = [0; 32];
    for (number, chunk) in hash.chunks_mut(8).enumerate() {
        let parent = u64::from_le_bytes(parent[number * 8..][..8].try_into().expect("8 bytes"));
        chunk.copy_from_slice(&fold([parent, branch, number as u64]).to_le_bytes());
    }
    PageHash(hash)
}

/// `len` hashes of one chain that differs from others in `branch`, from the root.
pub fn chain(branch: u64, len: usize) -> Vec<PageHash> {
    extend(None, branch, len)
}

/// `len` hashes that follow `parent`.
pub fn extend(parent: Option<PageHash>, branch: u64, len: usize) -> Vec<PageHash> {
    let mut hashes: Vec<PageHash> = Vec::with_capacity(len);
    for at in 0..len {
        let parent = hashes.last().copied().or(parent);
        hashes.push(child(parent, if at == 0 { branch } else { 0 }));
    }
    hashes
}

/// Entries of a chain from its root.
pub fn pages(hashes: &[PageHash]) -> Vec<PageEntry> {
    hashes.iter().map(|&hash| PageEntry::page(hash, 0)).collect()
}

/// Entries of the part of a chain that follows `parent`.
pub fn pages_after(parent: PageHash, hashes: &[PageHash]) -> Vec<PageEntry> {
    let anchor = PageEntry::anchor(parent);
    std::iter::once(anchor).chain(pages(hashes)).collect()
}

/// A chain namespace of the given page size.
pub fn spec(model: &str, page_bytes: u64) -> NamespaceSpec {
    NamespaceSpec { layout: "page-first".into(), ..namespace(model, page_bytes) }
}

/// One SSD device with `regions` regions of `region_bytes`.
pub fn device(regions: u64, region_bytes: u64) -> RegionGeometry {
    let data_offset = 64 << 10;
    RegionGeometry {
        data_offset,
        capacity_bytes: data_offset + regions * region_bytes,
        region_bytes,
    }
}

/// Whether work is a copy in one direction.
pub fn is_copy(wanted: Direction) -> impl Fn(&Work) -> bool {
    move |work| matches!(work, Work::Copy { direction, .. } if *direction == wanted)
}

/// Whether work is an SSD read.
pub fn is_read(work: &Work) -> bool {
    matches!(work, Work::Read { .. })
}

/// Whether work is an SSD write.
pub fn is_write(work: &Work) -> bool {
    matches!(work, Work::Write { .. })
}
