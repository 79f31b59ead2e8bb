//! The ring client that inference engines use to talk to the OrbitKV Manager.
#![warn(missing_docs)]

mod client;
mod completion;
mod connect;
mod control;
mod error;
mod handles;
mod memory;
mod pending;
mod process;
mod ranges;
mod register;
mod session;
mod submit;
mod wait;

pub use client::{Client, Limits};
pub use completion::{Completion, PageResult, StageTimes, Status};
pub use connect::{Connect, engine_id_random};
pub use error::{ConnectError, Gone, ProtocolFault, RegisterError, SubmitError, WaitManyError};
pub use handles::{Block, Chain, Lease, LeaseParts, Memory, Operation, Region, Scope};
pub use orbitkv_shm_protocol::bootstrap::message::{DependencySpec, NamespaceSpec, Refusal};
pub use orbitkv_shm_protocol::bootstrap::peer::socket_default_path;
pub use orbitkv_shm_protocol::ids::{EngineId, Epoch, LeaseId, OperationId, PageHash, SessionId};
pub use orbitkv_shm_protocol::record::{
    Code, PageOutcome, QueryMode, RequestKind, SessionState, Tier,
};
pub use register::{RegionLayout, Segment};
pub use session::Results;
pub use submit::{Deadline, RestoreOptions, SaveOptions};
pub use wait::wait_many;
