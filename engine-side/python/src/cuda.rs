//! What an engine on a GPU needs beside the client. The driver is loaded when the first GPU is
//! opened; without one that raises `CudaError`.

mod done_words;
mod events;
mod gpu;

pub(crate) use gpu::Gpu;

use orbitkv_engine::cuda::CUstream;
use pyo3::prelude::*;

/// Adds the classes to the module.
pub(crate) fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<Gpu>()?;
    module.add_class::<events::Events>()?;
    module.add_class::<done_words::DoneWords>()
}

/// A stream as Python names it: the driver's `CUstream` as an integer, 0 for the default stream.
#[derive(Clone, Copy)]
struct Stream(usize);

impl Stream {
    fn raw(self) -> CUstream {
        std::ptr::with_exposed_provenance_mut(self.0)
    }
}
