//! What the tests of this crate share.

pub mod engine;
pub mod engine_process;
pub mod manager;
