//! Pages that stay restorable, and how they are named to another process of the engine.

use orbitkv_engine::{EngineId, Epoch, Lease as EngineLease, LeaseId, LeaseParts};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// Pages that stay restorable until every rank has restored or released them, or the lease expires.
/// Valid for every session of the attachment group.
#[pyclass(frozen, eq, hash, module = "orbitkv")]
#[derive(PartialEq, Eq, Hash)]
pub(crate) struct Lease(pub(crate) EngineLease);

/// Bytes of [`Lease::to_bytes`]: lease, engine, expiry, epoch, pages.
const BYTES: usize = 8 + 16 + 8 + 4 + 4;

#[pymethods]
impl Lease {
    /// Pages of the leased prefix.
    #[getter]
    fn pages(&self) -> u32 {
        self.0.pages()
    }

    /// `time.monotonic_ns()` at which it expires; one clock in all processes of a host.
    #[getter]
    fn expires_ns(&self) -> u64 {
        self.0.expires_ns()
    }

    /// The lease for another process of the same engine: 40 bytes.
    fn to_bytes<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        let LeaseParts { lease, epoch, engine, pages, expires_ns } = self.0.to_parts();
        let mut bytes = [0; BYTES];
        bytes[..8].copy_from_slice(&lease.0.to_le_bytes());
        bytes[8..24].copy_from_slice(&engine.0);
        bytes[24..32].copy_from_slice(&expires_ns.to_le_bytes());
        bytes[32..36].copy_from_slice(&epoch.0.to_le_bytes());
        bytes[36..].copy_from_slice(&pages.to_le_bytes());
        PyBytes::new(py, &bytes)
    }

    /// The lease that another process of this engine was granted, from its `to_bytes`.
    #[staticmethod]
    fn from_bytes(data: &[u8]) -> PyResult<Self> {
        let read = || {
            let (lease, rest) = data.split_first_chunk()?;
            let (engine, rest) = rest.split_first_chunk()?;
            let (expires_ns, rest) = rest.split_first_chunk()?;
            let (epoch, rest) = rest.split_first_chunk()?;
            let pages = rest.try_into().ok()?;
            Some(LeaseParts {
                lease: LeaseId(u64::from_le_bytes(*lease)),
                epoch: Epoch(u32::from_le_bytes(*epoch)),
                engine: EngineId(*engine),
                pages: u32::from_le_bytes(pages),
                expires_ns: u64::from_le_bytes(*expires_ns),
            })
        };
        let parts = read().ok_or_else(|| {
            let words = format!("a lease has {BYTES} bytes, not {}", data.len());
            PyValueError::new_err(words)
        })?;
        Ok(Self(EngineLease::from_parts(parts)))
    }

    fn __repr__(&self) -> String {
        format!("<orbitkv.Lease of {} pages>", self.0.pages())
    }
}
