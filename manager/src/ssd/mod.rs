//! The SSD tier: one preallocated file a device, page images in fixed slots, a footer behind each.
//!
//! `core` decides which page goes into which slot and what is read back; this module executes.
//! Nothing here imports `pool` or `device`: DRAM is reached through `ImageMemory` alone.
//!
//! ```text
//!  reactor ── SsdTier ──▶ reader ──▶ verifier ──▶ ends     one of each for every file
//!                    └──▶ writer ───────────────▶ ends     reader and writer own an I/O engine
//!                          │  ▲
//!                          ▼  │
//!                         summer                           with the first image nobody has summed
//!               ◀── recovery ◀── census ◀── scan           at a start: a scan for every file
//! ```
//!
//! Laws: memory that an order names is the tier's from `submit_*` until the order's end is polled.
//! Every order ends exactly once. A page counts as written when image and footer were accepted in
//! full, and is trusted when its bytes match the checksum in its footer, never earlier.

mod activity;
mod blocking;
mod breaker;
mod claim;
mod counters;
mod device;
mod engine;
mod error;
mod file;
mod flight;
pub mod format;
mod halt;
mod health;
mod io;
mod limit;
mod metadata;
mod order;
pub mod probe;
mod pulse;
mod reader;
mod recover;
mod summer;
mod survey;
mod sweep;
mod tier;
mod uring;
mod verifier;
mod verify;
mod wake;
mod window;
mod worker;
mod writer;

#[cfg(test)]
mod conformance;
#[cfg(test)]
mod fake;
#[cfg(test)]
mod worker_tests;

pub use breaker::Cause;
pub use claim::MadeFiles;
pub use counters::DeviceSnapshot;
pub use device::{DeviceInfo, DeviceStatus, Notify};
pub use engine::EngineChoice;
pub use error::SsdError;
pub use health::Health;
pub(crate) use io::CHUNK_IMAGE_BYTES_MAX;
pub use io::{EngineKind, EngineMode, TaskRun};
pub use order::{ReadOrder, SsdEnd, WriteOrder};
pub use recover::SlotCounts;
pub use survey::{Recovery, ScanState, ScanStatus};
pub use tier::{ClaimedTier, QueueFull, SsdConfig, SsdTier};
pub use verify::verify;

/// Reads, and writes with forgets, of one device that may be out; one more finds the queue full.
pub const QUEUE_ORDERS: usize = device::WRITE_QUEUE;

/// Files of one tier at most.
pub const DEVICES_MAX: usize = 16;
