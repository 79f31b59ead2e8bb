//! The last block of a slot: which page lies in front of it, and whether it is whole.

use orbitkv_shm_protocol::ids::PageHash;

use super::{
    Block, FORMAT, FileId, get_array, get_u32, get_u64, is_sealed, put_u32, put_u64, seal,
};
use crate::core::{GENERATIONS_END, ImageIdentity, Slot};

const MAGIC: u64 = u64::from_le_bytes(*b"OKVFOOT1");
const HAS_PARENT: u32 = 1;

const FORMAT_AT: usize = 8;
const FLAGS_AT: usize = 12;
const FILE_ID_AT: usize = 16;
const NAMESPACE_AT: usize = 32;
const HASH_AT: usize = 64;
const PARENT_AT: usize = 96;
const SLOT_OFFSET_AT: usize = 128;
const SLOT_BYTES_AT: usize = 136;
const IMAGE_BYTES_AT: usize = 140;
const GENERATION_AT: usize = 144;
const IMAGE_CHECKSUM_AT: usize = 152;

/// A footer. It names its own place, so that one which lies elsewhere (an older slot length, a
/// copied file) is never taken for this slot's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Footer {
    /// File that it was written for.
    pub file: FileId,
    /// First byte of the slot in that file.
    pub slot_offset: u64,
    /// Length of the slot in bytes.
    pub slot_bytes: u32,
    /// The page image at the start of the slot, with its checksum.
    pub image: ImageIdentity,
}

/// Why a block is no footer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum FooterError {
    /// All zeros: nothing was ever written here.
    #[error("the slot was never written")]
    Empty,
    /// Not a footer, or one whose checksum does not match or whose generation cannot be.
    #[error("the footer is torn")]
    Torn,
    /// A footer of another version.
    #[error("the footer has format {0}; this program knows {FORMAT}")]
    Format(u32),
}

impl Footer {
    /// Writes the footer over `block`.
    pub fn encode(&self, block: &mut Block) {
        *block = Block::ZERO;
        let bytes = &mut block.0;
        put_u64(bytes, 0, MAGIC);
        put_u32(bytes, FORMAT_AT, FORMAT);
        put_u32(bytes, FLAGS_AT, if self.image.parent.is_some() { HAS_PARENT } else { 0 });
        bytes[FILE_ID_AT..FILE_ID_AT + 16].copy_from_slice(&self.file.0);
        bytes[NAMESPACE_AT..NAMESPACE_AT + 32].copy_from_slice(&self.image.namespace);
        bytes[HASH_AT..HASH_AT + 32].copy_from_slice(&self.image.hash.0);
        if let Some(parent) = self.image.parent {
            bytes[PARENT_AT..PARENT_AT + 32].copy_from_slice(&parent.0);
        }
        put_u64(bytes, SLOT_OFFSET_AT, self.slot_offset);
        put_u32(bytes, SLOT_BYTES_AT, self.slot_bytes);
        put_u32(bytes, IMAGE_BYTES_AT, self.image.image_bytes);
        put_u64(bytes, GENERATION_AT, self.image.generation);
        debug_assert!(self.image.checksum.is_some(), "nobody summed the image");
        put_u64(bytes, IMAGE_CHECKSUM_AT, self.image.checksum.unwrap_or_default());
        seal(block);
    }

    /// Reads a block that may hold anything.
    pub fn decode(block: &Block) -> Result<Self, FooterError> {
        let bytes = &block.0;
        if get_u64(bytes, 0) != MAGIC || !is_sealed(block) {
            return Err(if block.is_zero() { FooterError::Empty } else { FooterError::Torn });
        }
        let format = get_u32(bytes, FORMAT_AT);
        if format != FORMAT {
            return Err(FooterError::Format(format));
        }
        let generation = get_u64(bytes, GENERATION_AT);
        if generation >= GENERATIONS_END {
            return Err(FooterError::Torn);
        }
        let has_parent = get_u32(bytes, FLAGS_AT) & HAS_PARENT != 0;
        Ok(Self {
            file: FileId(get_array(bytes, FILE_ID_AT)),
            slot_offset: get_u64(bytes, SLOT_OFFSET_AT),
            slot_bytes: get_u32(bytes, SLOT_BYTES_AT),
            image: ImageIdentity {
                namespace: get_array(bytes, NAMESPACE_AT),
                hash: PageHash(get_array(bytes, HASH_AT)),
                parent: has_parent.then(|| PageHash(get_array(bytes, PARENT_AT))),
                image_bytes: get_u32(bytes, IMAGE_BYTES_AT),
                generation,
                checksum: Some(get_u64(bytes, IMAGE_CHECKSUM_AT)),
            },
        })
    }

    /// True when this footer was written for `slot` of `file` and its image fits in front of it.
    pub fn belongs_to(&self, file: FileId, slot: Slot) -> bool {
        self.file == file
            && self.slot_offset == slot.offset
            && self.slot_bytes == slot.bytes
            && self.image.image_bytes > 0
            && crate::core::RegionGeometry::slot_bytes_for(self.image.image_bytes)
                .is_some_and(|bytes| bytes <= slot.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn example() -> Footer {
        Footer {
            file: FileId([0xF1; 16]),
            slot_offset: 0x0102_0304_0506_0708,
            slot_bytes: 0x0090_1000,
            image: ImageIdentity {
                namespace: [0xAA; 32],
                hash: PageHash([0xBB; 32]),
                parent: Some(PageHash([0xCC; 32])),
                image_bytes: 0x0090_0000,
                generation: 0x1112_1314_1516_1718,
                checksum: Some(0x2122_2324_2526_2728),
            },
        }
    }

    /// Goal: files written by one build are read by every other of the same format.
    /// Method: all non-zero bytes, spelled out.
    #[test]
    fn golden_bytes() {
        let mut block = Block([0x55; 4096]);
        example().encode(&mut block);
        let mut golden = Vec::new();
        golden.extend_from_slice(b"OKVFOOT1");
        golden.extend_from_slice(&[1, 0, 0, 0, 1, 0, 0, 0]);
        golden.extend_from_slice(&[0xF1; 16]);
        golden.extend_from_slice(&[0xAA; 32]);
        golden.extend_from_slice(&[0xBB; 32]);
        golden.extend_from_slice(&[0xCC; 32]);
        golden.extend_from_slice(&[8, 7, 6, 5, 4, 3, 2, 1]);
        golden.extend_from_slice(&[0, 0x10, 0x90, 0, 0, 0, 0x90, 0]);
        golden.extend_from_slice(&[0x18, 0x17, 0x16, 0x15, 0x14, 0x13, 0x12, 0x11]);
        golden.extend_from_slice(&[0x28, 0x27, 0x26, 0x25, 0x24, 0x23, 0x22, 0x21]);
        assert_eq!(block.0[..160], golden[..]);
        assert!(block.0[160..4088].iter().all(|byte| *byte == 0));
        assert_eq!(block.0[4088..], GOLDEN_CHECKSUM.to_le_bytes());
    }

    /// From an independent implementation of xxh3-64.
    const GOLDEN_CHECKSUM: u64 = 0xDA57_4EED_D5E9_D7F3;

    #[test]
    fn a_block_of_zeros_is_empty_and_noise_is_torn() {
        assert_eq!(Footer::decode(&Block::ZERO), Err(FooterError::Empty));
        assert_eq!(Footer::decode(&Block([7; 4096])), Err(FooterError::Torn));
    }

    #[test]
    fn another_format_is_named() {
        let mut block = Block::ZERO;
        example().encode(&mut block);
        put_u32(&mut block.0, FORMAT_AT, 9);
        seal(&mut block);
        assert_eq!(Footer::decode(&block), Err(FooterError::Format(9)));
    }

    #[test]
    fn a_generation_that_cannot_be_is_torn() {
        for generation in [GENERATIONS_END, u64::MAX] {
            let image = ImageIdentity { generation, ..example().image };
            let mut block = Block::ZERO;
            Footer { image, ..example() }.encode(&mut block);
            assert_eq!(Footer::decode(&block), Err(FooterError::Torn));
        }
    }

    #[test]
    fn a_footer_belongs_to_its_own_slot_only() {
        let footer = example();
        let slot = Slot { device: 3, offset: footer.slot_offset, bytes: footer.slot_bytes };
        assert!(footer.belongs_to(footer.file, slot));
        assert!(!footer.belongs_to(FileId([0; 16]), slot));
        assert!(!footer.belongs_to(footer.file, Slot { offset: slot.offset + 4096, ..slot }));
        assert!(!footer.belongs_to(footer.file, Slot { bytes: slot.bytes + 4096, ..slot }));
        let too_long = Footer {
            image: ImageIdentity { image_bytes: footer.slot_bytes, ..footer.image },
            ..footer
        };
        assert!(!too_long.belongs_to(footer.file, slot));
    }

    proptest! {
        #[test]
        fn every_footer_is_read_back(
            offset: u64, slot_bytes: u32, namespace: [u8; 32], hash: [u8; 32],
            parent: Option<[u8; 32]>, image_bytes: u32, generation in ..GENERATIONS_END,
            checksum: u64,
        ) {
            let footer = Footer {
                file: FileId([9; 16]),
                slot_offset: offset,
                slot_bytes,
                image: ImageIdentity {
                    namespace,
                    hash: PageHash(hash),
                    parent: parent.map(PageHash),
                    image_bytes,
                    generation,
                    checksum: Some(checksum),
                },
            };
            let mut block = Block::ZERO;
            footer.encode(&mut block);
            prop_assert_eq!(Footer::decode(&block), Ok(footer));
        }

        #[test]
        fn any_changed_byte_is_detected(at in 0_usize..4096, change in 1_u8..) {
            let mut block = Block::ZERO;
            example().encode(&mut block);
            block.0[at] ^= change;
            prop_assert_eq!(Footer::decode(&block), Err(FooterError::Torn));
        }

        #[test]
        fn a_torn_mix_of_two_footers_is_detected(cut in 1_usize..8) {
            let (mut old, mut new) = (Block::ZERO, Block::ZERO);
            example().encode(&mut old);
            Footer {
                image: ImageIdentity { generation: 5, checksum: Some(6), ..example().image },
                ..example()
            }.encode(&mut new);
            let cut = cut * 512;
            new.0[cut..].copy_from_slice(&old.0[cut..]);
            prop_assert_eq!(Footer::decode(&new), Err(FooterError::Torn));
        }
    }
}
