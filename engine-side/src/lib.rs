//! The ring client that inference engines use to talk to the OrbitKV Manager.
//!
//! An engine attaches over a socket, says once whose bytes its pages hold and where they lie, and
//! from then on talks through shared memory only: a request is a store into a ring, an answer a
//! load from one.
//!
//! `examples/first_page.rs` is a whole engine for one page:
//!
//! ```no_run
#![doc = include_str!("../examples/first_page.rs")]
//! ```
//!
//! # What an engine can rely on
//!
//! - Every operation ends once. When the Manager dies, closes the session or breaks the protocol,
//!   each operation that is left ends with [`Status::Gone`], and then every call says why
//!   ([`Gone`]). Connecting again starts a new session; old handles are refused by it.
//! - Staging, [`Client::poll`] and [`Client::results`] make no system call and allocate nothing.
//!   [`Client::submit`] makes one if the Manager sleeps.
//! - Nothing blocks but [`Client::wait`], [`wait_many`] and registration, each at most its timeout.
//!   Without a credit or page table space a request is refused as [`SubmitError::WouldBlock`].
//! - The Manager's bytes are not trusted: they are copied, checked against the request, and only
//!   then used.
//! - On a GPU the feature `cuda` has what an engine needs beside this (module `cuda`).
//! - In a forked child every call is refused; the parent's session is untouched.
//! - Pages of a save must not change, and pages of a restore must not be used, before the operation
//!   has ended, or [`Client::is_done`] says `Some(true)`. A timeout is never evidence of an end,
//!   nor is [`Status::Gone`] while [`Gone::copies_may_run`].

mod client;
mod completion;
mod connect;
mod control;
#[cfg(feature = "cuda")]
#[allow(unsafe_code, reason = "the driver is a C library")]
pub mod cuda;
mod error;
mod handles;
mod memory;
mod pending;
mod process;
mod ranges;
mod register;
mod results;
mod session;
mod submit;
mod wait;

pub use client::{Client, Limits};
pub use completion::{Completion, PageResult, StageTimes, Status};
pub use connect::{Connect, engine_id_random};
pub use error::{ConnectError, Gone, ProtocolFault, RegisterError, SubmitError, WaitManyError};
pub use handles::{Block, Chain, Lease, LeaseParts, Memory, Operation, Region, Scope};
pub use orbitkv_shm_protocol::bootstrap::message::{
    DependencySpec, GpuId, HexBytes, HexError, IpcHandle, NamespaceSpec, Refusal,
};
pub use orbitkv_shm_protocol::bootstrap::peer::socket_default_path;
pub use orbitkv_shm_protocol::ids::{EngineId, Epoch, LeaseId, OperationId, PageHash, SessionId};
pub use orbitkv_shm_protocol::record::{
    Code, PageOutcome, QueryMode, RequestKind, SessionState, Tier,
};
pub use register::{RegionLayout, Segment};
pub use results::Results;
pub use submit::{Deadline, RestoreOptions, SaveOptions};
pub use wait::wait_many;
