//! The SSD tier: one preallocated file a device, page images in fixed slots, a footer behind each.
//!
//! `core` decides which page goes into which slot and what is read back; this module executes.
//! Nothing here imports `pool` or `device`: DRAM is reached through `ImageMemory` alone.

mod blocking;
mod error;
mod file;
pub mod format;
mod io;
mod uring;
mod wake;

#[cfg(test)]
mod conformance;
#[cfg(test)]
mod fake;

pub use error::SsdError;
pub use io::{EngineKind, EngineMode, TaskRun};

/// Files of one tier at most.
pub const DEVICES_MAX: usize = 16;
