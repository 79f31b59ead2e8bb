//! A GPU of this process.

use orbitkv_engine::cuda::Gpu as EngineGpu;
use pyo3::prelude::*;

use crate::error;

/// A GPU whose primary context, the one that frameworks work in, this process holds.
#[pyclass(frozen, module = "orbitkv")]
pub(crate) struct Gpu(pub(crate) EngineGpu);

#[pymethods]
impl Gpu {
    /// The GPU with this number in this process.
    #[staticmethod]
    fn open(py: Python<'_>, ordinal: u32) -> PyResult<Self> {
        let opened = py.detach(|| EngineGpu::open(ordinal));
        opened.map(Self).map_err(|error| error::cuda(py, &error))
    }

    /// The GPU that device memory lies on.
    #[staticmethod]
    fn of_address(py: Python<'_>, address: u64) -> PyResult<Self> {
        let opened = py.detach(|| EngineGpu::of_address(address));
        opened.map(Self).map_err(|error| error::cuda(py, &error))
    }

    /// Its UUID in hex digits, by which every process knows it.
    #[getter]
    fn uuid(&self) -> String {
        self.0.id().to_string()
    }

    fn __repr__(&self) -> String {
        format!("<orbitkv.Gpu {}>", self.0.id())
    }
}
