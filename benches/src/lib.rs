//! Benchmarks of OrbitKV, each beside the floor of the same machine in the same run.
//!
//! `orbitkv bench` is the way in. A benchmark is made of *parts*: processes of their own, started
//! from this same program, each pinned where its measurement asks for it. [`control`] is the
//! coordinator of the control path, [`device`] that of the copies, [`part::run`] what such a process
//! does. [`ssd`] runs in one process, with the threads of the tier. `README.md` says what
//! every number means and how it is taken.

pub mod allocations;
mod bar;
mod clock;
pub mod control;
mod crew;
pub mod device;
mod error;
mod floors;
pub mod gpu;
mod lookup;
mod machine;
pub mod manager;
mod pages;
pub mod part;
mod poll;
mod process;
mod report;
mod seccomp;
mod series;
mod session;
mod shared;
pub mod ssd;
mod stats;
mod throughput;
mod ticks;

pub use bar::Bar;
pub use error::BenchError;
pub use machine::Machine;
pub use report::Report;
pub use series::Row;
