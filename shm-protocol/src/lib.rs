//! The wire between an inference engine and the OrbitKV Manager on the same host.
//!
//! Nothing here starts a thread, logs, or allocates after attach.

#![warn(missing_docs)]

pub mod bootstrap;
pub mod doorbell;
pub mod ids;
pub mod inspect;
pub mod layout;
pub mod memory;
pub mod record;
pub mod ring;
pub mod segment;
pub mod telemetry;
