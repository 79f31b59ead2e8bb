//! The SSD tier: one preallocated file a device, page images in fixed slots, a footer behind each.
//!
//! `core` decides which page goes into which slot and what is read back; this module executes.
//! Nothing here imports `pool` or `device`: DRAM is reached through `ImageMemory` alone.

pub mod format;
