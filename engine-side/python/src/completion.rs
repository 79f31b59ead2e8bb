//! How an operation ended.

use orbitkv_engine::{Completion as EngineCompletion, Status};
use pyo3::prelude::*;

use crate::lease::Lease;

/// The one terminal answer to an operation. Counts are pages.
#[pyclass(frozen, get_all, module = "orbitkv")]
pub(crate) struct Completion {
    /// What the call that staged it returned.
    operation: u64,
    /// What was asked: "save", "query", "restore", "release", "cancel", "prepare", "forget",
    /// "unregister", "ping" or "drain".
    kind: &'static str,
    /// "ok", "partial", "error", or "gone" when the session ended first.
    status: &'static str,
    /// Cause when the status is "partial" or "error", else "none".
    code: &'static str,
    /// Save: stored. Query: hit. Restore: restored. Prepare: begun to read.
    /// Forget: forgotten.
    pages: u32,
    /// Query, restore: from DRAM.
    pages_dram: u32,
    /// Query, restore: from SSD.
    pages_ssd: u32,
    /// Save: already there.
    pages_present: u32,
    /// Save: refused; `Client.results` says why.
    pages_refused: u32,
    /// Restore: index of the first page that failed.
    first_failed: Option<u32>,
    /// Bytes copied (save, restore), leased (query) or forgotten.
    bytes: u64,
    /// Query: what to restore from, and to release.
    lease: Option<Py<Lease>>,
    /// When the Manager took it, in nanoseconds of `time.monotonic_ns()`, as all that follow; zero
    /// where it never came.
    queued_ns: u64,
    /// When its pages or its memory were there.
    prepared_ns: u64,
    /// When the last byte was copied.
    copied_ns: u64,
    /// When the Manager published the completion.
    published_ns: u64,
    /// When this client took it from the ring.
    observed_ns: u64,
}

impl Completion {
    /// `operation` is the number that Python knows it by.
    pub(crate) fn new(py: Python<'_>, operation: u64, ended: &EngineCompletion) -> PyResult<Self> {
        let status = match ended.status {
            Status::Ok => "ok",
            Status::Partial => "partial",
            Status::Error => "error",
            Status::Gone => "gone",
        };
        let times = ended.times;
        Ok(Self {
            operation,
            kind: ended.kind.label(),
            status,
            code: ended.code.label(),
            pages: ended.pages,
            pages_dram: ended.pages_dram,
            pages_ssd: ended.pages_ssd,
            pages_present: ended.pages_present,
            pages_refused: ended.pages_refused,
            first_failed: ended.first_failed,
            bytes: ended.bytes,
            lease: ended.lease.map(|lease| Py::new(py, Lease(lease))).transpose()?,
            queued_ns: times.queued_ns,
            prepared_ns: times.prepared_ns,
            copied_ns: times.copied_ns,
            published_ns: times.published_ns,
            observed_ns: times.observed_ns,
        })
    }
}

#[pymethods]
impl Completion {
    fn __repr__(&self) -> String {
        let Self { kind, status, code, pages, bytes, .. } = self;
        format!("<orbitkv.Completion {kind} {status} code={code} pages={pages} bytes={bytes}>")
    }
}
