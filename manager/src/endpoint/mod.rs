//! The bootstrap socket: who may attach, what a session registers, and when it ends.
//!
//! One thread owns the listening socket, the connections, the pidfds of their processes and the
//! stop signal. It does everything that may be slow (segments, memory imports, unmapping) and
//! decides nothing about pages: what needs `core` goes to the reactor as an [`EndpointEvent`] and
//! comes back as an [`EndpointReply`]. Two bounded queues join the threads; an event rings the
//! reactor's control word, a reply an eventfd.
//!
//! | | what it means | what happens |
//! | --- | --- | --- |
//! | pidfd readable | the process that connected has ended, whoever holds its socket | the session closes |
//! | hang-up, end of file | no process holds the other end (it detached, or died) | the session closes |
//! | silence | nothing, once attached: an idle engine is alive | |
//!
//! "Closes" ends the taking of requests only. What the session has in flight drains in `core`; its
//! segments and regions come back with [`EndpointReply::SessionEnded`] and are unmapped here.
//!
//! A connection asks one question at a time: while the reactor owes it an answer its socket is not
//! read. That, the limit on sessions and the one on unattached connections bound both queues.

mod import;
mod listener;
mod liveness;
mod quarantine;
mod server;
mod session;

use std::collections::HashMap;
use std::error::Error;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use orbitkv_shm_protocol::bootstrap::message::{
    GpuId, IpcHandle, MemorySpec, NamespaceSpec, Refusal, RegionSpec,
};
use orbitkv_shm_protocol::bootstrap::peer::PeerCredentials;
use orbitkv_shm_protocol::doorbell::ControlRinger;
use orbitkv_shm_protocol::ids::{EngineId, Epoch, RegionId, ScopeId, SessionId};
use orbitkv_shm_protocol::segment::{DoneWords, ManagerSide};
use ringbuf::traits::{Consumer, Producer, Split};
use ringbuf::{HeapCons, HeapProd, HeapRb};
use rustix::event::EventfdFlags;

pub use import::MemoryImporter;
pub use listener::{Claim, LOCK_RETRY_MAX, ListenError, Listener, SocketFile};
pub use liveness::{Access, Peer};
pub(crate) use quarantine::Limiter;
pub use quarantine::{CloseCause, EndpointCounters, LOG_INTERVAL, REFUSAL_LABELS, refusal_index};
pub use session::EVICT_TIMEOUT_MAX;

use crate::clock::Clock;
use crate::config::{Config, Limits, UNATTACHED_MAX};
use crate::device::DeviceEvent;
use server::Server;

/// Replies that may wait for the endpoint thread.
const REPLIES_MAX: usize = 1024;

/// How engine memory is reached: the endpoint's side of a device.
pub trait Importer: Send + 'static {
    /// Imported memory.
    type Memory: Send + Sync + 'static;
    /// A checked page layout over such memory.
    type Region: Send + Sync + 'static;

    /// Maps or probes memory of `peer`. May take long. `done` are the words of its session, for
    /// devices that store them themselves.
    ///
    /// # Errors
    /// The memory cannot be reached; the message names the cause.
    fn import(
        &mut self,
        spec: &MemorySpec,
        descriptor: Option<OwnedFd>,
        peer: &Peer,
        done: &DoneWords,
    ) -> Result<Self::Memory, ImportRefusal>;

    /// Opens events of `peer` on one GPU, all of them or none. May take long.
    ///
    /// # Errors
    /// An event cannot be opened; the message names the cause.
    fn import_events(
        &mut self,
        gpu: GpuId,
        handles: &[IpcHandle],
        peer: &Peer,
    ) -> Result<Vec<Arc<dyn DeviceEvent>>, ImportRefusal>;

    /// Checks a page layout. Every handle in it is in `memories`, already checked.
    ///
    /// # Errors
    /// A page would leave its memory, or its bytes do not add up to `page_bytes`.
    fn lay_out(
        &mut self,
        memories: &HashMap<u32, Arc<Self::Memory>>,
        spec: &RegionSpec,
        page_bytes: u64,
    ) -> Result<Self::Region, ImportRefusal>;
}

/// Why memory or a layout is refused.
#[derive(Debug)]
pub struct ImportRefusal {
    /// For the client's program.
    pub refusal: Refusal,
    /// For a person.
    pub cause: Box<dyn Error + Send + Sync>,
}

/// Names one question to the reactor. Never reused.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct QuestionId(u64);

/// To the reactor, in the order in which things happened.
#[derive(Debug)]
pub enum EndpointEvent<R> {
    /// A client attached. Its requests may be in the ring already.
    SessionReady(Box<SessionReady>),
    /// Answer with [`Answer::Scope`].
    DefineNamespace {
        /// Of the answer.
        question: QuestionId,
        /// Whose.
        session: SessionId,
        /// Within the limits; `core` decides.
        spec: Box<NamespaceSpec>,
    },
    /// Answer with [`Answer::Scope`].
    DefineSet {
        /// Of the answer.
        question: QuestionId,
        /// Whose.
        session: SessionId,
        /// Namespaces that the session defined, 1 to `SCOPE_MEMBERS_MAX`.
        members: Vec<ScopeId>,
    },
    /// Answer with [`Answer::Region`].
    RegisterRegion {
        /// Of the answer.
        question: QuestionId,
        /// Whose.
        session: SessionId,
        /// A namespace that the session defined.
        scope: ScopeId,
        /// Device pages, at least 1.
        pages: u32,
        /// The layout. Give it back with [`EndpointReply::RegionEnded`].
        region: Arc<R>,
    },
    /// Answer with [`Answer::Events`].
    RegisterEvents {
        /// Of the answer.
        question: QuestionId,
        /// Whose.
        session: SessionId,
        /// In their order in the pool. Give them back with [`EndpointReply::SessionEnded`].
        events: Vec<Arc<dyn DeviceEvent>>,
    },
    /// Wait until the spill set is empty, at most `timeout`, then drop every unleased page of DRAM.
    /// Answer with [`Answer::Evicted`].
    Evict {
        /// Of the answer.
        question: QuestionId,
        /// At most [`EVICT_TIMEOUT_MAX`].
        timeout: Duration,
    },
    /// Nothing more comes from this session, and no answer to it is delivered any more. Sent once
    /// for every session that [`EndpointReply::Close`] did not end first.
    Closed {
        /// Which.
        session: SessionId,
        /// Why.
        cause: CloseCause,
    },
    /// A stop was asked for: drain, then drop the [`Endpoint`]. New sessions are refused meanwhile.
    Stop,
}

/// A new session.
#[derive(Debug)]
pub struct SessionReady {
    /// Never used before in this epoch.
    pub session: SessionId,
    /// Its attachment group.
    pub engine: EngineId,
    /// The process that connected.
    pub peer: PeerCredentials,
    /// Rings, tables and doorbells. Give them back with [`EndpointReply::SessionEnded`].
    pub segments: ManagerSide,
}

/// From the reactor.
#[derive(Debug)]
pub enum EndpointReply<R> {
    /// To a question of an event.
    Answer {
        /// Which question.
        question: QuestionId,
        /// What.
        answer: Answer,
    },
    /// The reactor ends a session (its peer broke the ring protocol, or the Manager stops): close
    /// its connection. No `Closed` follows; one that is on its way already is to be ignored.
    Close {
        /// Which.
        session: SessionId,
        /// For the count and the log.
        cause: CloseCause,
    },
    /// A region is used by no copy any more; it is unmapped here.
    RegionEnded {
        /// Whose.
        session: SessionId,
        /// What is left of it.
        region: Arc<R>,
    },
    /// Nothing of the session is in flight any more; its place is free for another one.
    SessionEnded {
        /// Which.
        session: SessionId,
        /// Unmapped here.
        segments: Box<ManagerSide>,
        /// Regions that were not ended one by one; unmapped here.
        regions: Vec<Arc<R>>,
        /// Events that were registered; closed here.
        events: Vec<Arc<dyn DeviceEvent>>,
    },
}

/// An answer to one question.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Answer {
    /// A namespace or set is defined.
    Scope {
        /// Its id.
        scope: ScopeId,
        /// Bytes of a page image; of a set the sum.
        page_bytes: u64,
    },
    /// A region is registered.
    Region {
        /// Its id.
        region: RegionId,
    },
    /// Events are in the session's pool.
    Events {
        /// Index of the first.
        first: u32,
    },
    /// DRAM was evicted.
    Evicted {
        /// Pages dropped.
        pages: u64,
        /// Their bytes.
        bytes: u64,
        /// Pages that stayed.
        pages_kept: u64,
        /// Whether the spill set was empty before.
        spill_drained: bool,
    },
    /// `core` refuses.
    Refused {
        /// For the client's program.
        refusal: Refusal,
        /// For a person, one line.
        message: String,
    },
}

/// What the endpoint has to know.
#[derive(Clone, Debug)]
pub struct Settings {
    /// This life of the Manager.
    pub epoch: Epoch,
    /// Who may attach.
    pub access: Access,
    /// What may be asked for.
    pub limits: Limits,
    /// Longest silence of a new connection.
    pub handshake_timeout: Duration,
    /// Told to clients.
    pub operation_timeout: Duration,
    /// Told to clients.
    pub lease_ttl: Duration,
    /// Told to clients.
    pub query_budget_bytes: u64,
    /// Told to clients.
    pub session_budget_bytes: u64,
    /// Told to clients: longest spin that pays on this machine.
    pub spin_window: Duration,
    /// A page must fit.
    pub dram_bytes: u64,
}

impl Settings {
    /// As configured, with the spin window that was measured.
    pub fn new(config: &Config, epoch: Epoch, spin_window: Duration) -> Self {
        Self {
            epoch,
            access: Access::new(&config.socket),
            limits: config.limits,
            handshake_timeout: config.time.handshake_timeout,
            operation_timeout: config.time.operation_timeout,
            lease_ttl: config.time.lease_ttl,
            query_budget_bytes: config.budget.query_bytes,
            session_budget_bytes: config.budget.session_bytes,
            spin_window,
            dram_bytes: config.dram.capacity_bytes,
        }
    }
}

/// What wakes the endpoint thread: an eventfd in its poll set.
#[derive(Debug)]
struct Bell(OwnedFd);

impl Bell {
    fn new() -> io::Result<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(Self(rustix::event::eventfd(0, flags)?))
    }

    fn ring(&self) {
        // Fails only when the counter is full: then the thread is about to wake anyway.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    fn drain(&self) {
        let _ = rustix::io::read(&self.0, &mut [0_u8; 8]);
    }

    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// What both threads, and whoever asks for a stop, share.
#[derive(Debug)]
struct Shared {
    bell: Bell,
    stop_asked: AtomicBool,
    ended: AtomicBool,
}

/// Asks for a stop, from any thread. Asking twice changes nothing.
#[derive(Clone, Debug)]
pub struct Stopper(Arc<Shared>);

impl Stopper {
    /// The reactor gets [`EndpointEvent::Stop`]; it decides when the endpoint ends.
    pub fn stop(&self) {
        self.0.stop_asked.store(true, Ordering::Release);
        self.0.bell.ring();
    }
}

/// The reactor's end. Dropping it ends the endpoint thread, closes every connection, removes the
/// socket and frees its lock.
pub struct Endpoint<R> {
    events: HeapCons<EndpointEvent<R>>,
    replies: HeapProd<EndpointReply<R>>,
    shared: Arc<Shared>,
    counters: Arc<EndpointCounters>,
    thread: Option<JoinHandle<()>>,
    file: SocketFile,
}

impl<R: Send + Sync + 'static> Endpoint<R> {
    /// Starts the thread. Nobody can connect before [`publish`](Self::publish).
    ///
    /// # Errors
    /// No eventfd, or no thread.
    pub fn start<I: Importer<Region = R>>(
        settings: Settings,
        (file, listener): (SocketFile, Listener),
        importer: I,
        clock: Clock,
        reactor: ControlRinger,
    ) -> io::Result<Self> {
        let (events, events_out) = HeapRb::new(events_max(&settings.limits)).split();
        let (replies_in, replies) = HeapRb::new(REPLIES_MAX).split();
        let shared = Arc::new(Shared {
            bell: Bell::new()?,
            stop_asked: AtomicBool::new(false),
            ended: AtomicBool::new(false),
        });
        let counters = Arc::new(EndpointCounters::default());
        let server = Server::new(
            settings,
            listener,
            importer,
            clock,
            server::Links {
                events,
                replies,
                reactor,
                shared: Arc::clone(&shared),
                counters: Arc::clone(&counters),
            },
        );
        let thread = std::thread::Builder::new()
            .name("orbitkv-endpoint".to_owned())
            .spawn(move || server.run())?;
        Ok(Self {
            events: events_out,
            replies: replies_in,
            shared,
            counters,
            thread: Some(thread),
            file,
        })
    }

    /// Lets clients find the socket. Returns whether a stale one was replaced.
    ///
    /// # Errors
    /// The socket cannot be renamed.
    pub fn publish(&mut self) -> Result<bool, ListenError> {
        self.file.publish()
    }

    /// The next event, if one waits.
    pub fn poll(&mut self) -> Option<EndpointEvent<R>> {
        self.events.try_pop()
    }

    /// Hands over a reply.
    ///
    /// # Errors
    /// Gives it back when 1,024 are waiting: try again next turn.
    pub fn reply(&mut self, reply: EndpointReply<R>) -> Result<(), EndpointReply<R>> {
        self.replies.try_push(reply)?;
        self.shared.bell.ring();
        Ok(())
    }

    /// For signal handlers and tests.
    pub fn stopper(&self) -> Stopper {
        Stopper(Arc::clone(&self.shared))
    }

    /// Totals, for telemetry.
    pub fn counters(&self) -> Arc<EndpointCounters> {
        Arc::clone(&self.counters)
    }
}

impl<R> Drop for Endpoint<R> {
    fn drop(&mut self) {
        self.shared.ended.store(true, Ordering::Release);
        self.shared.bell.ring();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the endpoint thread panicked");
        }
    }
}

/// Slots of the event queue. A session has at most its `SessionReady`, one question and its
/// `Closed` in it, an unattached connection one question.
fn events_max(limits: &Limits) -> usize {
    3 * limits.sessions as usize + UNATTACHED_MAX as usize + 8
}

#[cfg(test)]
mod tests;
