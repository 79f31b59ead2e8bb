//! The DRAM pool: anonymous memory in large pages that holds the page images.

mod arena;
mod host;

pub use arena::{DramPool, HugePages, PageMode, Placement, PoolConfig, PoolError, ShortOf};
