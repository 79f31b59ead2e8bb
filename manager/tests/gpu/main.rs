//! The device of GPUs under the suite of all devices, on the first GPU of this host.

#[path = "../device/conformance.rs"]
mod conformance;
mod engine;
mod rig;
