//! The OrbitKV Manager: one process per host that owns pinned DRAM, the SSD tier and the copies
//! between them and the engines' KV pages.

pub mod config;
pub mod core;
pub mod telemetry;
pub mod units;
