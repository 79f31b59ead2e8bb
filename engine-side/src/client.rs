//! An attached engine: polling, results, and how a session ends.

use std::cell::Cell;
use std::marker::PhantomData;
use std::os::fd::BorrowedFd;
use std::time::Duration;

use orbitkv_shm_protocol::ids::{EngineId, Epoch, SessionId};
use orbitkv_shm_protocol::layout::Geometry;
use orbitkv_shm_protocol::record::SessionState;
use orbitkv_shm_protocol::spin::{self, Spin};
use rustix::process::Pid;

use crate::completion::{Completion, Status};
use crate::control::Control;
use crate::error::{Gone, SubmitError};
use crate::handles::{Lease, Operation, Tag};
use crate::memory::Nonce;
use crate::process::{ProcessBound, WrongProcess};
use crate::results::Results;
use crate::session::Session;

/// What the Manager grants this session.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Operations that can be outstanding: records in each ring.
    pub ring_capacity: u32,
    /// Entries of the page table.
    pub page_entries: u32,
    /// Done words of one operation.
    pub done_words: u32,
    /// Largest page image, in bytes.
    pub page_bytes_max: u64,
    /// Deadline of an operation that names none.
    pub operation_timeout: Duration,
    /// Time to live of a lease.
    pub lease_ttl: Duration,
    /// Bytes of leases that all sessions together may hold.
    pub query_budget_bytes: u64,
    /// Bytes of leases that this session may hold.
    pub session_budget_bytes: u64,
    /// Longest spin before a sleep that pays on this machine, as the Manager measured it.
    pub spin_window: Duration,
}

impl Limits {
    pub(crate) fn geometry(&self) -> Geometry {
        Geometry {
            ring_capacity: self.ring_capacity,
            page_entries: self.page_entries,
            done_words: self.done_words,
        }
    }
}

/// One attached ring client.
///
/// For one thread at a time: it may move to another thread, but not be shared. In a forked child
/// every call is refused as `WrongProcess`. Dropping it ends the session; operations that are
/// outstanding then end in the Manager with nobody to tell, so [`drain`](Self::drain) and wait
/// first where memory is about to be reused.
///
/// ```compile_fail
/// fn share<T: Sync>() {}
/// share::<orbitkv_engine::Client>();
/// ```
/// ```
/// fn send<T: Send>() {}
/// send::<orbitkv_engine::Client>();
/// ```
#[derive(Debug)]
pub struct Client {
    pub(crate) bound: ProcessBound<Session>,
    pub(crate) control: Control,
    pub(crate) spin: Spin,
    limits: Limits,
    tag: Tag,
    engine: EngineId,
    nonce: Nonce,
    /// A shared client would have two producers on one ring.
    _not_sync: PhantomData<Cell<()>>,
}

/// What [`Connect`](crate::Connect) puts together.
pub(crate) struct Parts {
    pub(crate) bound: ProcessBound<Session>,
    pub(crate) control: Control,
    pub(crate) limits: Limits,
    pub(crate) tag: Tag,
    pub(crate) engine: EngineId,
    pub(crate) nonce: Nonce,
}

impl Client {
    pub(crate) fn new(parts: Parts) -> Self {
        let Parts { bound, control, limits, tag, engine, nonce } = parts;
        let spin = Spin::new(spin::window_here(limits.spin_window));
        Self { bound, control, spin, limits, tag, engine, nonce, _not_sync: PhantomData }
    }

    /// This session, as the Manager numbers it.
    pub fn session(&self) -> SessionId {
        self.tag.session
    }

    /// The life of the Manager that this session belongs to.
    pub fn epoch(&self) -> Epoch {
        self.tag.epoch
    }

    /// The attachment group that this session belongs to.
    pub fn engine_id(&self) -> EngineId {
        self.engine
    }

    /// What the Manager grants.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Operations without a completion that was returned, staged ones included. Zero in a forked
    /// child.
    pub fn outstanding(&self) -> u32 {
        self.bound.look().map_or(0, Session::outstanding)
    }

    /// How far the session has come, as the Manager last said. `Draining`: what runs ends, new
    /// work is refused.
    ///
    /// # Errors
    /// [`Gone::WrongProcess`].
    pub fn state(&self) -> Result<SessionState, Gone> {
        Ok(self.bound.look()?.state())
    }

    /// The next completion, if one is there. No system call and no allocation: an engine may call
    /// it as often as it likes.
    ///
    /// A death of the Manager is not seen here but by [`wait`](Self::wait) and
    /// [`check_manager`](Self::check_manager). Once it was seen, each outstanding operation is
    /// returned once, with [`Status::Gone`].
    ///
    /// Page results of the completion returned before are not readable any more.
    ///
    /// # Errors
    /// [`Gone`] when the session is over and every operation was returned.
    #[inline]
    pub fn poll(&mut self) -> Result<Option<Completion>, Gone> {
        if self.bound.enter()?.is_silent() {
            return Ok(None);
        }
        self.take()
    }

    fn take(&mut self) -> Result<Option<Completion>, Gone> {
        let polled = self.bound.enter()?.poll();
        match polled {
            Ok(None) => Ok(None),
            Ok(Some(completion)) if completion.status != Status::Gone => Ok(Some(completion)),
            over => self.end_session(over),
        }
    }

    #[cold]
    fn end_session(
        &mut self,
        over: Result<Option<Completion>, Gone>,
    ) -> Result<Option<Completion>, Gone> {
        // The Manager lets go of a session when its socket closes, even if it lost its mind here.
        self.control.shut_down();
        over
    }

    /// What happened to each page of the request, in its order: those of the completion that the
    /// last [`poll`](Self::poll) or [`wait`](Self::wait) returned. Empty for any other completion,
    /// for one without pages, and in a forked child.
    ///
    /// A page that the Manager wrote nothing about has outcome `None`; an entry that no Manager
    /// writes reads the same and ends the session at the next poll.
    pub fn results(&self, completion: &Completion) -> Results<'_> {
        if completion.operation.tag != self.tag {
            return Results::NONE;
        }
        self.bound.look().map_or(Results::NONE, |session| session.results(completion.operation.id))
    }

    /// Reads the done word of a restore: `Some(true)` once every byte is in place, `Some(false)` once
    /// it has ended without, `None` before that and for every other kind. One load from shared memory. Of a
    /// restore by layer it is the first layer: ask for the last by
    /// [`is_layer_done`](Self::is_layer_done).
    ///
    /// Valid until the index of the operation is used again, some time after its completion was
    /// returned; `None` from then on, for a handle of another client, and in a forked child.
    #[inline]
    pub fn is_done(&self, operation: &Operation) -> Option<bool> {
        self.done_word(operation, operation.last_word)
    }

    /// Reads the done word of one layer of a restore with
    /// [`RestoreOptions::by_layer`](crate::RestoreOptions::by_layer): `Some(true)` once every byte of
    /// this layer and of those before it is in place, `Some(false)` once the restore has ended
    /// without, `None` before that and for a layer that the region does not have. What is done stays
    /// so when the rest fails.
    #[inline]
    pub fn is_layer_done(&self, operation: &Operation, layer: u32) -> Option<bool> {
        (layer <= operation.last_word).then(|| self.done_word(operation, layer))?
    }

    /// All done words of the session; none in a forked child.
    #[cfg(feature = "cuda")]
    pub(crate) fn done_words(&self) -> Option<orbitkv_shm_protocol::segment::DoneWordsReader> {
        self.bound.look().ok().map(Session::done_words)
    }

    #[inline]
    fn done_word(&self, operation: &Operation, word: u32) -> Option<bool> {
        let session = self.bound.look().ok()?;
        if operation.tag != self.tag || word >= self.limits.done_words {
            return None;
        }
        let found = session.done_word(operation.id, word);
        if found == operation.id.done_word() {
            Some(true)
        } else {
            (found == operation.id.failed_word()).then_some(false)
        }
    }

    /// Whether the Manager's process is known to have exited: from then on nothing of it touches
    /// registered memory. After [`Gone::Closed`] or [`Gone::Protocol`] this tells when the pages
    /// of lost operations are free. One system call.
    pub fn has_manager_exited(&self) -> bool {
        self.control.has_manager_exited(Duration::ZERO)
    }

    /// A descriptor of the Manager's process, which becomes readable once that has exited: another
    /// thread may sleep on a duplicate of it, and whoever polls the rings then needs no
    /// [`check_manager`](Self::check_manager) before. `None` where neither the kernel nor /proc
    /// names the process.
    pub fn manager_pidfd(&self) -> Option<BorrowedFd<'_>> {
        self.control.pidfd()
    }

    /// Ends the session. The same as dropping the client.
    pub fn close(self) {}

    pub(crate) fn check_process(&self) -> Result<(), WrongProcess> {
        self.bound.look().map(drop)
    }

    /// The session, for a handle that must belong to it.
    pub(crate) fn session_of(&mut self, tag: Tag) -> Result<&mut Session, SubmitError> {
        let session = self.bound.enter()?;
        if tag == self.tag { Ok(session) } else { Err(SubmitError::StaleHandle) }
    }

    /// Refuses a lease of another attachment group or another life of the Manager.
    pub(crate) fn check_lease(&self, lease: &Lease) -> Result<(), SubmitError> {
        self.check_process()?;
        let parts = lease.to_parts();
        if parts.epoch == self.tag.epoch && parts.engine == self.engine {
            Ok(())
        } else {
            Err(SubmitError::StaleHandle)
        }
    }

    pub(crate) fn tag(&self) -> Tag {
        self.tag
    }

    pub(crate) fn manager_pid(&self) -> Option<Pid> {
        self.control.manager_pid()
    }

    pub(crate) fn nonce(&self) -> &Nonce {
        &self.nonce
    }
}
