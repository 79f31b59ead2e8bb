//! An attached engine.

mod operation;
mod registration;

use std::os::fd::{IntoRawFd, RawFd};
use std::path::PathBuf;
use std::sync::{Mutex, TryLockError};
use std::time::{Duration, Instant};

use orbitkv_engine::{
    Block, Client as EngineClient, Completion as EngineCompletion, Connect, EngineId, Gone, Limits,
    PageHash, RequestKind, socket_default_path,
};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::buffer;
use crate::completion::Completion;
use crate::error;
use crate::operations::Operations;
use crate::time;

/// Longest time without a look whether a signal came in.
const SIGNALS_EVERY: Duration = Duration::from_millis(100);

/// One attached ring client, for one thread at a time: a call from another one while one is running
/// raises `UsageError`. In a forked child every call raises `Gone`.
#[pyclass(frozen, module = "orbitkv")]
pub(crate) struct Client {
    /// Only ever tried, never waited for; `None` once it is closed.
    attached: Mutex<Option<Attached>>,
    /// The process that attached.
    pid: u32,
    session: u32,
    epoch: u32,
    engine: EngineId,
    limits: Limits,
}

/// What one thread at a time works on.
pub(crate) struct Attached {
    pub(crate) client: EngineClient,
    pub(crate) operations: Operations,
    /// The completion that was returned last.
    last: Option<EngineCompletion>,
    /// Kept so that staging allocates nothing.
    blocks: Vec<Block>,
    hashes: Vec<PageHash>,
}

impl Client {
    /// Runs `work` on the client, as the only thread.
    #[inline]
    pub(crate) fn enter<R>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut Attached) -> PyResult<R>,
    ) -> PyResult<R> {
        match self.attached.try_lock() {
            Ok(mut attached) => match &mut *attached {
                Some(attached) => work(attached),
                None => Err(error::closed(py)),
            },
            Err(TryLockError::Poisoned(_)) => Err(error::closed(py)),
            Err(TryLockError::WouldBlock) => Err(self.entered_twice(py)),
        }
    }

    /// A child that was forked while a thread of its parent was inside finds the lock taken for
    /// ever.
    #[cold]
    fn entered_twice(&self, py: Python<'_>) -> PyErr {
        if std::process::id() == self.pid {
            error::entered_twice(py)
        } else {
            error::gone(py, Gone::WrongProcess)
        }
    }
}

impl Attached {
    fn returned(
        &mut self,
        py: Python<'_>,
        ended: Option<EngineCompletion>,
    ) -> PyResult<Option<Completion>> {
        let Some(ended) = ended else { return Ok(None) };
        self.last = Some(ended);
        Completion::new(py, self.operations.number(&ended.operation), &ended).map(Some)
    }
}

#[pymethods]
impl Client {
    /// Attaches to the Manager that listens on `socket`. Waits `timeout` seconds for each answer of
    /// it, also in every later registration; waits for no Manager to appear.
    #[new]
    #[pyo3(signature = (
        socket = None, *, engine_id = None, ring_capacity = 256, page_entries = 65_536,
        done_words = 1, timeout = 10.0
    ))]
    fn new(
        py: Python<'_>,
        socket: Option<PathBuf>,
        engine_id: Option<&[u8]>,
        ring_capacity: u32,
        page_entries: u32,
        done_words: u32,
        timeout: f64,
    ) -> PyResult<Self> {
        let mut connect = Connect::new(socket.unwrap_or_else(socket_default_path))
            .ring_capacity(ring_capacity)
            .page_entries(page_entries)
            .done_words(done_words)
            .timeout(time::duration("timeout", timeout)?);
        if let Some(bytes) = engine_id {
            let id = bytes.try_into().map_err(|_| {
                let words = format!("an engine id has 16 bytes, not {}", bytes.len());
                PyValueError::new_err(words)
            })?;
            connect = connect.engine_id(EngineId(id));
        }
        let client = py.detach(|| connect.connect()).map_err(|error| error::connect(py, &error))?;
        Ok(Self {
            pid: std::process::id(),
            session: client.session().0,
            epoch: client.epoch().0,
            engine: client.engine_id(),
            limits: *client.limits(),
            attached: Mutex::new(Some(Attached {
                operations: Operations::new(client.limits().ring_capacity),
                client,
                last: None,
                blocks: Vec::new(),
                hashes: Vec::new(),
            })),
        })
    }

    /// This session, as the Manager numbers it.
    #[getter]
    fn session(&self) -> u32 {
        self.session
    }

    /// The life of the Manager that this session belongs to.
    #[getter]
    fn epoch(&self) -> u32 {
        self.epoch
    }

    /// The attachment group, 16 bytes.
    #[getter]
    fn engine_id<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.engine.0)
    }

    /// Operations that can be outstanding.
    #[getter]
    fn ring_capacity(&self) -> u32 {
        self.limits.ring_capacity
    }

    /// Pages that all outstanding operations together can name.
    #[getter]
    fn page_entries(&self) -> u32 {
        self.limits.page_entries
    }

    /// Done words of one operation.
    #[getter]
    fn done_words(&self) -> u32 {
        self.limits.done_words
    }

    /// Largest page image, in bytes.
    #[getter]
    fn page_bytes_max(&self) -> u64 {
        self.limits.page_bytes_max
    }

    /// Time to live of a lease, in seconds.
    #[getter]
    fn lease_ttl(&self) -> f64 {
        self.limits.lease_ttl.as_secs_f64()
    }

    /// Deadline of an operation that names none, in seconds.
    #[getter]
    fn operation_timeout(&self) -> f64 {
        self.limits.operation_timeout.as_secs_f64()
    }

    /// Bytes of leases that all sessions together may hold.
    #[getter]
    fn query_budget_bytes(&self) -> u64 {
        self.limits.query_budget_bytes
    }

    /// Bytes of leases that this session may hold.
    #[getter]
    fn session_budget_bytes(&self) -> u64 {
        self.limits.session_budget_bytes
    }

    /// Longest spin before a sleep that pays on this machine, as the Manager measured it.
    #[getter]
    fn spin_window_ns(&self) -> u64 {
        self.limits.spin_window.as_nanos() as u64
    }

    /// Operations without a completion that was returned, staged ones included.
    #[getter]
    fn outstanding(&self, py: Python<'_>) -> PyResult<u32> {
        self.enter(py, |attached| Ok(attached.client.outstanding()))
    }

    /// The next completion, or `None` when none is there. No system call.
    ///
    /// A death of the Manager is seen by `wait` and `check_manager`; from then on each outstanding
    /// operation is returned once with status "gone", and then `Gone` is raised.
    fn poll(&self, py: Python<'_>) -> PyResult<Option<Completion>> {
        self.enter(py, |attached| match attached.client.poll() {
            Ok(None) => Ok(None),
            Ok(ended) => attached.returned(py, ended),
            Err(gone) => Err(error::gone(py, gone)),
        })
    }

    /// The next completion, waiting for it at most `timeout` seconds; `None` after that, and at once
    /// when nothing is outstanding. Publishes what is staged first. Other threads run meanwhile.
    fn wait(&self, py: Python<'_>, timeout: f64) -> PyResult<Option<Completion>> {
        let end = Instant::now().checked_add(time::duration("timeout", timeout)?);
        self.enter(py, |attached| {
            loop {
                let left = end.map(|end| end.saturating_duration_since(Instant::now()));
                let slice = left.map_or(SIGNALS_EVERY, |left| left.min(SIGNALS_EVERY));
                let client = &mut attached.client;
                match py.detach(|| client.wait(slice)) {
                    Ok(None) if left.is_some_and(|left| left == slice) => return Ok(None),
                    Ok(None) if attached.client.outstanding() == 0 => return Ok(None),
                    Ok(None) => py.check_signals()?,
                    Ok(ended) => return attached.returned(py, ended),
                    Err(gone) => return Err(error::gone(py, gone)),
                }
            }
        })
    }

    /// What happened to each page of the completion returned last, in the order of the request:
    /// four bytes a page, which index `PAGE_OUTCOMES`, `TIERS` and `CODES` and say whether a restore
    /// may end after the page. `None` when there is none, or it named no page.
    fn results<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyBytes>>> {
        self.enter(py, |attached| {
            let Some(last) = &attached.last else { return Ok(None) };
            let results = attached.client.results(last);
            if results.len() == 0 {
                return Ok(None);
            }
            PyBytes::new_with(py, results.len() * 4, |bytes| {
                for (to, page) in bytes.as_chunks_mut().0.iter_mut().zip(results) {
                    let numbers = [page.outcome as u16, page.tier as u16, page.code as u16];
                    // Each enum is far below 256.
                    let [outcome, tier, code] = numbers.map(|number| number as u8);
                    *to = [outcome, tier, code, u8::from(page.restorable)];
                }
                Ok(())
            })
            .map(Some)
        })
    }

    /// Of the query returned last: each number k, ascending, such that the first k pages can be
    /// restored by themselves, as unsigned 32-bit integers. Empty for anything else.
    fn restorable_prefixes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        self.enter(py, |attached| {
            let last = attached.last.as_ref().filter(|last| last.kind == RequestKind::Query);
            let results = last.into_iter().flat_map(|last| attached.client.results(last));
            let restorable = (1..).zip(results).filter(|(_, page)| page.restorable);
            Ok(buffer::bytes_of(py, restorable.map(|(pages, _)| pages)))
        })
    }

    /// Whether every byte of a restore is in place: `True`, `False` once it has ended without, `None`
    /// before that, for any other kind, and for an operation that is too long ago or another
    /// client's.
    fn is_done(&self, py: Python<'_>, operation: u64) -> PyResult<Option<bool>> {
        self.enter(py, |attached| {
            let operation = attached.operations.find(operation);
            Ok(operation.and_then(|operation| attached.client.is_done(&operation)))
        })
    }

    /// `is_done` of one layer, and those before it, of a restore with `by_layer`.
    fn is_layer_done(&self, py: Python<'_>, operation: u64, layer: u32) -> PyResult<Option<bool>> {
        self.enter(py, |attached| {
            let operation = attached.operations.find(operation);
            Ok(operation.and_then(|operation| attached.client.is_layer_done(&operation, layer)))
        })
    }

    /// "open", "draining" (what runs ends, new work is refused) or "closed", as the Manager last
    /// said.
    fn state(&self, py: Python<'_>) -> PyResult<&'static str> {
        self.enter(py, |attached| match attached.client.state() {
            Ok(state) => Ok(state.label()),
            Err(gone) => Err(error::gone(py, gone)),
        })
    }

    /// Looks whether the Manager still serves this session: one system call. Whoever only polls
    /// calls it every 100 ms or so. A dead Manager raises nothing here: the next `poll` begins to
    /// return what was outstanding.
    fn check_manager(&self, py: Python<'_>) -> PyResult<()> {
        self.enter(py, |attached| {
            // A hang-up may wait for the end of the Manager's process.
            let client = &mut attached.client;
            py.detach(|| client.check_manager()).map_err(|gone| error::gone(py, gone))
        })
    }

    /// Whether the Manager's process is known to have exited: from then on nothing of it touches
    /// registered memory. One system call.
    fn has_manager_exited(&self, py: Python<'_>) -> PyResult<bool> {
        self.enter(py, |attached| Ok(attached.client.has_manager_exited()))
    }

    /// A descriptor that becomes readable once the Manager's process has exited, the caller's own to
    /// close: a thread that sleeps on it spares those that poll every look at the Manager. `None`
    /// where neither the kernel nor /proc names the process. `OSError` without a free descriptor.
    fn manager_pidfd(&self, py: Python<'_>) -> PyResult<Option<RawFd>> {
        self.enter(py, |attached| {
            let pidfd = attached.client.manager_pidfd();
            let own = pidfd.map(|pidfd| pidfd.try_clone_to_owned()).transpose()?;
            Ok(own.map(IntoRawFd::into_raw_fd))
        })
    }

    /// Ends the session. Operations that are outstanding end in the Manager with nobody to tell, so
    /// `drain` and `wait` first where their pages are about to be reused.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        match self.attached.try_lock() {
            Ok(mut attached) => {
                let attached = attached.take();
                py.detach(|| drop(attached));
                Ok(())
            }
            Err(TryLockError::Poisoned(_)) => Ok(()),
            Err(TryLockError::WouldBlock) => Err(self.entered_twice(py)),
        }
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_args))]
    fn __exit__(&self, py: Python<'_>, _args: &Bound<'_, PyAny>) -> PyResult<()> {
        self.close(py)
    }

    fn __repr__(&self) -> String {
        format!("<orbitkv.Client session={} epoch={}>", self.session, self.epoch)
    }
}
