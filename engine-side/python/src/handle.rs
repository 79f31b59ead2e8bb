//! What registration returns: names that are valid in one session.

use pyo3::prelude::*;

/// A namespace, or a set of them, as one client knows it.
#[pyclass(frozen, eq, hash, module = "orbitkv")]
#[derive(PartialEq, Eq, Hash)]
pub(crate) struct Scope(pub(crate) orbitkv_engine::Scope);

#[pymethods]
impl Scope {
    /// Bytes of one page image; of a set the sum over its members.
    #[getter]
    fn page_bytes(&self) -> u64 {
        self.0.page_bytes()
    }

    fn __repr__(&self) -> String {
        format!("<orbitkv.Scope of {} bytes a page>", self.0.page_bytes())
    }
}

/// Memory of the engine that the Manager can reach.
#[pyclass(frozen, eq, hash, module = "orbitkv")]
#[derive(PartialEq, Eq, Hash)]
pub(crate) struct Memory(pub(crate) orbitkv_engine::Memory);

#[pymethods]
impl Memory {
    /// Bytes offered, from offset 0.
    #[getter]
    fn bytes(&self) -> u64 {
        self.0.bytes()
    }

    fn __repr__(&self) -> String {
        format!("<orbitkv.Memory of {} bytes>", self.0.bytes())
    }
}

/// Device pages of one namespace: where a save reads and a restore writes.
#[pyclass(frozen, eq, hash, module = "orbitkv")]
#[derive(PartialEq, Eq, Hash)]
pub(crate) struct Region(pub(crate) orbitkv_engine::Region);

#[pymethods]
impl Region {
    /// Device pages.
    #[getter]
    fn pages(&self) -> u32 {
        self.0.pages()
    }

    /// Bytes of one page image.
    #[getter]
    fn page_bytes(&self) -> u64 {
        self.0.page_bytes()
    }

    /// Layers: one more than the highest that a segment names.
    #[getter]
    fn layers(&self) -> u32 {
        self.0.layers()
    }

    fn __repr__(&self) -> String {
        let (pages, bytes) = (self.0.pages(), self.0.page_bytes());
        format!("<orbitkv.Region of {pages} pages of {bytes} bytes>")
    }
}
