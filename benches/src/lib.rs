//! Benchmarks of OrbitKV, each beside the floor of the same machine in the same run.
//!
//! `orbitkv bench` is the way in. A benchmark is made of *parts*: processes of their own, started
//! from this same program, each pinned where its measurement asks for it. [`control`] is the
//! coordinator of the control path, [`part::run`] what such a process does. `README.md` says what
//! every number means and how it is taken.

pub mod allocations;
pub mod control;
mod error;
mod floors;
mod lookup;
mod machine;
mod manager;
mod pages;
pub mod part;
mod poll;
mod process;
mod seccomp;
mod session;
mod shared;
mod stats;
mod throughput;
mod ticks;

pub use error::BenchError;
pub use machine::Machine;
