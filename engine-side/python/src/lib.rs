//! The ring client as a Python module: `orbitkv._native`, which the package `orbitkv` re-exports.
//!
//! Laws of this crate:
//! - No Python object per page: hashes and page numbers come as buffers and go back as bytes.
//! - The interpreter is let go of wherever something may block: attaching, registering, waiting,
//!   and every call of the CUDA driver.
//! - `poll` with nothing ready makes no system call and allocates nothing.
//! - No panic reaches Python for anything that a caller can pass.

mod buffer;
mod client;
mod completion;
mod cuda;
mod error;
mod handle;
mod lease;
mod namespace;
mod operations;
mod time;

use orbitkv_engine::{Code, PageOutcome, Tier};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};

/// Path of the Manager's socket unless it is told otherwise.
#[pyfunction]
fn socket_default_path() -> std::ffi::OsString {
    orbitkv_engine::socket_default_path().into_os_string()
}

/// A new random attachment group, 16 bytes: the scheduler of an engine draws one and hands it to its
/// workers.
#[pyfunction]
fn engine_id_random(py: Python<'_>) -> PyResult<Bound<'_, PyBytes>> {
    match orbitkv_engine::engine_id_random() {
        Ok(id) => Ok(PyBytes::new(py, &id.0)),
        Err(error) => Err(error::connect(py, &error)),
    }
}

/// What the bytes of `Client.results` index.
fn names(
    labels: impl Iterator<Item = &'static str>,
    py: Python<'_>,
) -> PyResult<Bound<'_, PyTuple>> {
    PyTuple::new(py, labels.collect::<Vec<_>>())
}

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("PAGE_OUTCOMES", names(PageOutcome::ALL.iter().map(|it| it.label()), py)?)?;
    module.add("TIERS", names(Tier::ALL.iter().map(|it| it.label()), py)?)?;
    module.add("CODES", names(Code::ALL.iter().map(|it| it.label()), py)?)?;
    module.add_function(wrap_pyfunction!(socket_default_path, module)?)?;
    module.add_function(wrap_pyfunction!(engine_id_random, module)?)?;
    module.add_class::<client::Client>()?;
    module.add_class::<completion::Completion>()?;
    module.add_class::<handle::Memory>()?;
    module.add_class::<handle::Region>()?;
    module.add_class::<handle::Scope>()?;
    module.add_class::<lease::Lease>()?;
    module.add_class::<namespace::Namespace>()?;
    cuda::add_to(module)?;
    error::add_to(module)
}
