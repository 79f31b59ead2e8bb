//! What only a GPU can show: real Managers, real engines, real memory of the device.
//!
//! ```bash
//! cargo test --release -p orbitkv-tests --features gpu --test gpu -- --test-threads=1
//! ```
//!
//! Engines are this process, or children of it where a test kills them. Kernels of known length, or
//! that wait for a word of the host, stand for the engine's own. Where a scenario needs two GPUs and
//! there is one, the test says so and passes.
#![allow(unsafe_code, reason = "streams are given to the driver by address, and a child forks")]

mod cancel;
mod child;
mod engine;
mod fences;
mod layers;
mod lifetimes;
mod lost;
mod memory;
mod retained;
