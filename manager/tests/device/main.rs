//! The devices under one suite, and what only host memory can do to its device.

mod child;
mod conformance;
mod host;
