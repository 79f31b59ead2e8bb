//! The OrbitKV Manager: one process per host that owns pinned DRAM, the SSD tier and the copies
//! between them and the engines' KV pages.

pub mod clock;
pub mod config;
pub mod core;
pub mod device;
pub mod doctor;
pub mod endpoint;
pub mod error;
pub mod http;
pub mod image;
pub mod pool;
pub mod serve;
pub mod service;
pub mod ssd;
pub mod telemetry;
pub mod units;
pub mod wake;

// The suite that every device passes is written against the library's public names.
#[cfg(test)]
extern crate self as orbitkv_manager;
#[cfg(test)]
#[path = "../tests/device/conformance.rs"]
mod conformance;
