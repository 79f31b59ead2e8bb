//! Why a call did not do what it was asked, one enum a boundary.

use std::path::PathBuf;

use orbitkv_shm_protocol::bootstrap::message::Refusal;
use orbitkv_shm_protocol::bootstrap::peer::PeerError;
use orbitkv_shm_protocol::bootstrap::transport::TransportError;
use orbitkv_shm_protocol::ids::OperationId;
use orbitkv_shm_protocol::layout::Geometry;
use orbitkv_shm_protocol::record::{BadField, RequestKind};
use orbitkv_shm_protocol::ring::RingViolation;
use orbitkv_shm_protocol::segment::AttachError;
use rustix::io::Errno;

use crate::process::WrongProcess;

/// The session is over; a new [`Connect::connect`](crate::Connect::connect) starts another.
///
/// Every operation that was outstanding is reported once, as a completion with
/// [`Status::Gone`](crate::Status::Gone), before a call answers with this.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Gone {
    /// The Manager's process has exited: nothing of it touches the engine's memory any more.
    #[error("the Manager process has exited; connect again once it is back")]
    Died,
    /// The Manager closed the session. Copies that it had begun may still run.
    #[error("the Manager closed the session; connect again")]
    Closed,
    /// The Manager wrote something that no correct Manager writes. Copies that it had begun may
    /// still run.
    #[error("the Manager broke the protocol: {0}")]
    Protocol(#[from] ProtocolFault),
    /// The caller is a forked child of the process that attached; the session itself may be well.
    #[error("called in a forked child of the process that attached; connect again in this one")]
    WrongProcess,
}

impl Gone {
    /// Whether copies into or out of registered memory may still run. While they may, the pages of
    /// a `Gone` operation are not free to reuse.
    pub fn copies_may_run(self) -> bool {
        self != Self::Died
    }
}

impl From<WrongProcess> for Gone {
    fn from(_: WrongProcess) -> Self {
        Self::WrongProcess
    }
}

/// What the Manager wrote that no correct Manager writes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ProtocolFault {
    /// A ring index or a record's sequence is wrong.
    #[error(transparent)]
    Ring(#[from] RingViolation),
    /// A completion of an operation that is not outstanding: never issued, not yet published, or
    /// already ended.
    #[error("a completion of operation {operation}, which is not outstanding")]
    UnknownOperation {
        /// As the record says.
        operation: OperationId,
    },
    /// A completion of another kind than its request.
    #[error("operation {operation} is a {asked}, its completion a {answered}")]
    WrongKind {
        /// The operation.
        operation: OperationId,
        /// Kind of the request.
        asked: RequestKind,
        /// Kind of the completion.
        answered: RequestKind,
    },
    /// A number in a completion that its request cannot have.
    #[error("the completion of operation {operation}: {field}")]
    BadCompletion {
        /// The operation.
        operation: OperationId,
        /// Which number.
        field: BadField,
    },
    /// A number in a completion that none can hold, or that is another session's or epoch's.
    #[error("a completion whose {0}")]
    BadField(BadField),
    /// An entry of the result table that no Manager writes.
    #[error("a page result of operation {operation}: {field}")]
    BadResult {
        /// The operation.
        operation: OperationId,
        /// Which number.
        field: BadField,
    },
    /// A cancel ended well before the operation it cancels.
    #[error("a cancel of operation {target} ended before that operation")]
    CancelledTooEarly {
        /// Whom the cancel named.
        target: OperationId,
    },
}

/// Why an operation was not staged. Nothing was written that the Manager will look at.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SubmitError {
    /// No credit or no free run of the page table: consume completions, then try again.
    #[error("no credit or page table space is free; consume completions first")]
    WouldBlock,
    /// More pages than a request may name.
    #[error("{entries} page entries in one request; at most {entries_max} are possible")]
    TooManyPages {
        /// Entries that the request needs, parents included.
        entries: usize,
        /// Most that this session takes.
        entries_max: u32,
    },
    /// A request about pages that names none.
    #[error("the request names no page")]
    NoPages,
    /// A block lies outside its region.
    #[error("device page {page} of a region of {pages} pages")]
    BadPage {
        /// The block's page.
        page: u32,
        /// Pages of the region.
        pages: u32,
    },
    /// The caller is a forked child of the process that attached.
    #[error("called in a forked child of the process that attached; connect again in this one")]
    WrongProcess,
    /// The session is over.
    #[error(transparent)]
    ManagerGone(Gone),
    /// The Manager is stopping: what it took before ends, nothing more is taken. The session closes
    /// soon; go on without it.
    #[error("the Manager is stopping and takes no new work; go on without it")]
    Draining,
    /// The handle belongs to another client, another group or another life of the Manager, or the
    /// operation has ended.
    #[error("the handle belongs to another session, or its operation has ended")]
    StaleHandle,
}

impl From<WrongProcess> for SubmitError {
    fn from(_: WrongProcess) -> Self {
        Self::WrongProcess
    }
}

impl From<Gone> for SubmitError {
    fn from(gone: Gone) -> Self {
        match gone {
            Gone::WrongProcess => Self::WrongProcess,
            gone => Self::ManagerGone(gone),
        }
    }
}

/// Why a client could not attach.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// Nothing exists at the path.
    #[error("no Manager socket at {}: start one with `orbitkv serve`, or name its --socket", path.display())]
    NoSocket {
        /// Path asked for.
        path: PathBuf,
    },
    /// A socket exists, but no process listens on it.
    #[error("nobody listens on {}; the Manager that made it has stopped", path.display())]
    NotListening {
        /// Path asked for.
        path: PathBuf,
    },
    /// The file system does not let this user connect.
    #[error("no permission to connect to {}; run as the Manager's user", path.display())]
    NotPermitted {
        /// Path asked for.
        path: PathBuf,
    },
    /// Any other answer of the kernel.
    #[error("cannot {action} {}: {errno}", path.display())]
    Environment {
        /// What was tried.
        action: &'static str,
        /// Path asked for.
        path: PathBuf,
        /// The kernel's answer.
        errno: Errno,
    },
    /// The Manager refused the session.
    #[error("the Manager refused the session ({refusal:?}): {message}")]
    Refused {
        /// Stable cause.
        refusal: Refusal,
        /// The Manager's words.
        message: Box<str>,
    },
    /// Client and Manager were built for different versions of the wire.
    #[error(
        "this client speaks ABI version {ours}, the Manager {theirs}; install matching versions"
    )]
    AbiMismatch {
        /// Of this client.
        ours: u32,
        /// Of the Manager.
        theirs: u32,
    },
    /// Same ABI version, different layout: one side was changed without a new version.
    #[error(
        "this client lays the wire out as {ours:#018x}, the Manager as {theirs:#018x}; install matching builds"
    )]
    LayoutMismatch {
        /// Fingerprint of this client.
        ours: u64,
        /// Fingerprint of the Manager.
        theirs: u64,
    },
    /// The rings, page table or done words asked for are out of range.
    #[error("{geometry:?} is out of range; see Connect for the ranges")]
    BadGeometry {
        /// As asked for.
        geometry: Geometry,
    },
    /// No answer in time.
    #[error("the Manager did not answer within {timeout_ms} ms")]
    Timeout {
        /// The limit, in milliseconds.
        timeout_ms: u64,
    },
    /// An answer that does not fit the question.
    #[error("the Manager answered with {field} = {value}, which was not asked for")]
    BadAnswer {
        /// Which part of the answer.
        field: &'static str,
        /// What it held.
        value: u64,
    },
    /// The socket failed.
    #[error("bootstrap socket: {0}")]
    Transport(TransportError),
    /// The Manager's process cannot be identified.
    #[error("the Manager behind the socket: {0}")]
    Peer(#[from] PeerError),
    /// The segments are not what the Manager said.
    #[error("session segments: {0}")]
    Attach(#[from] AttachError),
    /// The kernel gave no random number or no memory for the client's own page.
    #[error("cannot set up the client: {0}")]
    System(Errno),
}

/// Why something was not registered. Nothing changed, except as [`Timeout`](Self::Timeout) says.
#[derive(Debug, thiserror::Error)]
pub enum RegisterError {
    /// The Manager refused.
    #[error("the Manager refused ({refusal:?}): {message}")]
    Refused {
        /// Stable cause.
        refusal: Refusal,
        /// The Manager's words.
        message: Box<str>,
    },
    /// A handle of another client or of another life of the Manager.
    #[error("the handle belongs to another session")]
    StaleHandle,
    /// No answer in time. The Manager may still do what was asked; its answer will be dropped.
    #[error("the Manager did not answer within {timeout_ms} ms")]
    Timeout {
        /// The limit, in milliseconds.
        timeout_ms: u64,
    },
    /// An answer to another question; it ends the session.
    #[error("the Manager answered with another message than {expected}")]
    BadAnswer {
        /// Message that would have been right.
        expected: &'static str,
    },
    /// The caller is a forked child of the process that attached.
    #[error("called in a forked child of the process that attached; connect again in this one")]
    WrongProcess,
    /// The session is over.
    #[error(transparent)]
    ManagerGone(Gone),
    /// The kernel refused something on this side.
    #[error("cannot offer the memory: {0}")]
    Environment(Errno),
    /// The question could not be sent, or an answer not be read; the latter ends the session.
    #[error("bootstrap socket: {0}")]
    Transport(TransportError),
}

impl From<WrongProcess> for RegisterError {
    fn from(_: WrongProcess) -> Self {
        Self::WrongProcess
    }
}

impl From<Gone> for RegisterError {
    fn from(gone: Gone) -> Self {
        match gone {
            Gone::WrongProcess => Self::WrongProcess,
            gone => Self::ManagerGone(gone),
        }
    }
}

/// Why [`wait_many`](crate::wait_many) ended without a completion.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum WaitManyError {
    /// One client's session is over.
    #[error("client {client}: {gone}")]
    Gone {
        /// Position of the client in the slice.
        client: usize,
        /// Why.
        gone: Gone,
    },
    /// More clients than the kernel waits on at once.
    #[error("{clients} clients; at most {clients_max} can be waited on together")]
    TooMany {
        /// Clients in the slice.
        clients: usize,
        /// Most that are possible.
        clients_max: usize,
    },
}

/// Longest text of the Manager that an error carries, in characters.
const MESSAGE_CHARS_MAX: usize = 512;

/// The Manager's words, made fit to be printed: one line, bounded.
pub(crate) fn message_of(text: &str) -> Box<str> {
    let printable = |c: char| if c.is_control() { ' ' } else { c };
    text.chars().take(MESSAGE_CHARS_MAX).map(printable).collect::<String>().into_boxed_str()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_managers_text_becomes_one_bounded_line() {
        assert_eq!(&*message_of("a\nb\u{1b}[0m"), "a b [0m");
        assert_eq!(message_of(&"é".repeat(10_000)).chars().count(), MESSAGE_CHARS_MAX);
    }

    #[test]
    fn only_a_dead_manager_surely_copies_nothing() {
        assert!(!Gone::Died.copies_may_run());
        assert!(Gone::Closed.copies_may_run());
        assert!(Gone::WrongProcess.copies_may_run());
    }
}
