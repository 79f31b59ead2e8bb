//! Where regions and slots begin and how many there are.

use super::{BLOCK_BYTES, FOOTER_BYTES, padded};

/// How the data part of one SSD file is cut into regions, and a region into slots.
///
/// Region `r` starts at `data_offset + r * region_bytes`; the last one may be shorter, and a file
/// smaller than one region is one region. A region holds slots of one length, back to back from its
/// start. Growing a file makes its last region longer and adds regions; no slot moves.
///
/// Slots are 4 KiB aligned and no more: on SSD a coarser alignment would only cost capacity (half of
/// it for 1 MiB images). The 1 MiB alignment of large *extents* is about DRAM huge pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RegionGeometry {
    /// Bytes in front of region 0, a multiple of 4 KiB.
    pub data_offset: u64,
    /// Length of the file in bytes, a multiple of 4 KiB; no slot ends behind it.
    pub capacity_bytes: u64,
    /// Length of every region but the last in bytes, a multiple of 4 KiB, not zero.
    pub region_bytes: u64,
}

impl RegionGeometry {
    /// A region is at least this long, in bytes.
    pub const REGION_BYTES_MIN: u64 = 64 << 20;

    /// Length of every region for tiers whose longest slot has `slot_bytes_max` bytes: two of
    /// them, at least [`REGION_BYTES_MIN`](Self::REGION_BYTES_MIN).
    pub const fn region_bytes_for(slot_bytes_max: u32) -> u64 {
        let two = padded(slot_bytes_max as u64 * 2);
        if two > Self::REGION_BYTES_MIN { two } else { Self::REGION_BYTES_MIN }
    }

    /// Shortest slot, in bytes, that takes an image of `image_bytes`: the padded image and its footer.
    /// `None` when that does not fit a `u32`.
    pub const fn slot_bytes_for(image_bytes: u32) -> Option<u32> {
        let bytes = padded(image_bytes as u64) + FOOTER_BYTES as u64;
        if bytes > u32::MAX as u64 { None } else { Some(bytes as u32) }
    }

    /// True when `slot_bytes` can be the slot length of a region: whole blocks, at least one
    /// for the image and one for the footer.
    pub const fn is_slot_length(slot_bytes: u32) -> bool {
        slot_bytes as usize >= 2 * BLOCK_BYTES && (slot_bytes as usize).is_multiple_of(BLOCK_BYTES)
    }

    /// How many regions there are, the short one at the end included.
    pub const fn regions(&self) -> u32 {
        let data = self.capacity_bytes.saturating_sub(self.data_offset);
        data.div_ceil(self.region_bytes) as u32
    }

    /// First byte of a region in the file.
    pub const fn region_offset(&self, region: u32) -> u64 {
        self.data_offset + region as u64 * self.region_bytes
    }

    /// Length of a region in bytes; zero behind the last.
    pub const fn region_len(&self, region: u32) -> u64 {
        let rest = self.capacity_bytes.saturating_sub(self.region_offset(region));
        if rest < self.region_bytes { rest } else { self.region_bytes }
    }

    /// How many slots of `slot_bytes` a region holds.
    pub const fn slots(&self, region: u32, slot_bytes: u32) -> u32 {
        if slot_bytes == 0 { 0 } else { (self.region_len(region) / slot_bytes as u64) as u32 }
    }

    /// First byte in the file of slot `index` of a region with slots of `slot_bytes`.
    ///
    /// Meaningful below [`slots`](Self::slots) only.
    pub const fn slot_offset(&self, region: u32, slot_bytes: u32, index: u32) -> u64 {
        self.region_offset(region) + index as u64 * slot_bytes as u64
    }

    /// The region that holds the byte at `offset`; `None` outside the data part.
    pub const fn region_of(&self, offset: u64) -> Option<u32> {
        if offset < self.data_offset || offset >= self.capacity_bytes {
            return None;
        }
        Some(((offset - self.data_offset) / self.region_bytes) as u32)
    }

    /// Inverse of [`slot_offset`](Self::slot_offset): region and index of the slot of `slot_bytes`
    /// that starts at `offset`; `None` when no such slot starts there.
    pub const fn slot_at(&self, offset: u64, slot_bytes: u32) -> Option<(u32, u32)> {
        let Some(region) = self.region_of(offset) else { return None };
        let within = offset - self.region_offset(region);
        if slot_bytes == 0 || !within.is_multiple_of(slot_bytes as u64) {
            return None;
        }
        let index = (within / slot_bytes as u64) as u32;
        if index < self.slots(region, slot_bytes) { Some((region, index)) } else { None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MIB: u64 = 1 << 20;

    fn geometry(capacity_bytes: u64) -> RegionGeometry {
        RegionGeometry { data_offset: MIB, capacity_bytes, region_bytes: 64 * MIB }
    }

    #[test]
    fn the_last_region_is_shorter_and_a_small_file_is_one_region() {
        let two = geometry(MIB + 64 * MIB + 10 * MIB);
        assert_eq!(two.regions(), 2);
        assert_eq!(
            (two.region_len(0), two.region_len(1), two.region_len(2)),
            (64 * MIB, 10 * MIB, 0)
        );
        let small = geometry(20 * MIB);
        assert_eq!((small.regions(), small.region_len(0)), (1, 19 * MIB));
        assert_eq!(geometry(MIB).regions(), 0);
    }

    #[test]
    fn a_region_takes_two_of_the_longest_slots() {
        assert_eq!(RegionGeometry::region_bytes_for(8192), 64 * MIB);
        let longest = RegionGeometry::slot_bytes_for(64 << 20).unwrap();
        let geometry = RegionGeometry {
            region_bytes: RegionGeometry::region_bytes_for(longest),
            ..geometry(1024 * MIB)
        };
        assert_eq!(geometry.slots(0, longest), 2);
        assert_eq!(RegionGeometry::slot_bytes_for(u32::MAX), None);
    }

    #[test]
    fn slots_of_a_page_lose_no_more_than_the_footer() {
        let slot = RegionGeometry::slot_bytes_for(1 << 20).unwrap();
        assert_eq!(slot, (1 << 20) + 4096);
        assert_eq!(geometry(65 * MIB).slots(0, slot), 63);
    }

    #[test]
    fn growing_moves_no_slot() {
        let (before, after) = (geometry(80 * MIB), geometry(500 * MIB));
        for index in 0..before.slots(1, 8192) {
            assert_eq!(before.slot_offset(1, 8192, index), after.slot_offset(1, 8192, index));
        }
        assert!(after.slots(1, 8192) > before.slots(1, 8192));
    }

    proptest! {
        /// Every slot lies inside its region and the file, overlaps no other, and is found again.
        #[test]
        fn slots_are_disjoint_inside_the_file_and_found_by_offset(
            blocks in 256_u64..200_000, slot_blocks in 2_u32..3_000, region_blocks in 1_u64..40_000,
        ) {
            let geometry = RegionGeometry {
                data_offset: MIB,
                capacity_bytes: blocks * 4096,
                region_bytes: region_blocks * 4096,
            };
            let slot_bytes = slot_blocks * 4096;
            for region in [0, geometry.regions() / 2, geometry.regions().saturating_sub(1)] {
                let end = geometry.region_offset(region) + geometry.region_len(region);
                prop_assert!(end <= geometry.capacity_bytes.max(MIB));
                let slots = geometry.slots(region, slot_bytes);
                for index in [0, slots / 2, slots.saturating_sub(1)] {
                    if index >= slots { continue; }
                    let offset = geometry.slot_offset(region, slot_bytes, index);
                    prop_assert!(offset >= geometry.region_offset(region));
                    prop_assert!(offset + u64::from(slot_bytes) <= end);
                    prop_assert_eq!(geometry.slot_at(offset, slot_bytes), Some((region, index)));
                    prop_assert_eq!(geometry.slot_at(offset + 4096, slot_bytes), None);
                }
                prop_assert_eq!(
                    geometry.slot_at(geometry.slot_offset(region, slot_bytes, slots), slot_bytes)
                        .filter(|(found, _)| *found == region),
                    None
                );
            }
        }
    }
}
