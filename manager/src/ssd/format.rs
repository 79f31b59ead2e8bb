//! What lies where in an SSD file. Pure: bytes in, values out.
//!
//! ```text
//! 0            superblock copy 0 (4 KiB)      written alternately: the one with the higher
//! 4 KiB        superblock copy 1 (4 KiB)      sequence and good checksums counts
//! 8 KiB        table of copy 0                slot length of each region, forgotten
//! 8 KiB + T    table of copy 1                namespaces, retired slots
//! data_offset  region 0, region 1, …          region = slots of one length
//!              slot = page image, padded to 4 KiB, then in the last 4 KiB its footer
//! ```
//!
//! All numbers are little-endian. Every block carries an xxh3-64 of its other bytes, and a
//! superblock also that of its table, so a torn write or a flipped bit is a miss, never a hit.

mod footer;
mod geometry;
mod superblock;

pub use footer::{Footer, FooterError};
pub use geometry::RegionGeometry;
pub use superblock::{
    FORGOTTEN_MAX, FileId, Forgotten, RETIRED_MAX, SUPERBLOCK_COPIES, Superblock, SuperblockError,
    SuperblockHead,
};

use bytemuck::{Pod, Zeroable};
use twox_hash::XxHash3_64;

/// Unit of all offsets and lengths on SSD, in bytes: the largest logical block of today's drives,
/// so direct I/O works on all of them.
pub const BLOCK_BYTES: usize = 4096;

/// Version of everything in this module. Another version is refused, never converted in place.
pub const FORMAT: u32 = 1;

/// Bytes of a slot's footer.
pub const FOOTER_BYTES: u32 = BLOCK_BYTES as u32;

/// One block, aligned in memory as direct I/O wants it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Pod, Zeroable)]
#[repr(C, align(4096))]
pub struct Block(pub [u8; BLOCK_BYTES]);

impl Block {
    /// A block of zeros.
    pub const ZERO: Self = Self([0; BLOCK_BYTES]);

    /// True when every byte is zero: a block that nobody ever wrote.
    pub fn is_zero(&self) -> bool {
        self.0.iter().all(|byte| *byte == 0)
    }
}

/// The checksum of everything on SSD.
pub fn checksum(bytes: &[u8]) -> u64 {
    XxHash3_64::oneshot(bytes)
}

/// `bytes` rounded up to whole blocks.
pub const fn padded(bytes: u64) -> u64 {
    bytes.next_multiple_of(BLOCK_BYTES as u64)
}

/// Position of the checksum in a block: its last eight bytes.
const CHECKSUM_AT: usize = BLOCK_BYTES - 8;

/// Stores the checksum of all other bytes in the block's last eight.
fn seal(block: &mut Block) {
    let sum = checksum(&block.0[..CHECKSUM_AT]);
    put_u64(&mut block.0, CHECKSUM_AT, sum);
}

/// True when [`seal`] made this block and no bit has changed since.
fn is_sealed(block: &Block) -> bool {
    get_u64(&block.0, CHECKSUM_AT) == checksum(&block.0[..CHECKSUM_AT])
}

fn put_u32(bytes: &mut [u8], at: usize, value: u32) {
    bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
}

fn put_u64(bytes: &mut [u8], at: usize, value: u64) {
    bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
}

fn get_u32(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(get_array(bytes, at))
}

fn get_u64(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(get_array(bytes, at))
}

fn get_array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut array = [0; N];
    array.copy_from_slice(&bytes[at..at + N]);
    array
}
