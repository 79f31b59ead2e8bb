//! Streams of the engine that wait for the Manager, with no CPU in between.
#![allow(unsafe_code, reason = "a stream is a number in Python: that it is alive is its promise")]

use std::sync::Mutex;

use orbitkv_engine::cuda::{CudaError, DoneWordsOnGpu};
use pyo3::prelude::*;

use super::{Gpu, Stream};
use crate::client::Client;
use crate::error;

/// The done words of a client's session, as a GPU reads them. Letting go of it waits for the GPU: do
/// so when no stream waits any more.
#[pyclass(frozen, module = "orbitkv")]
pub(crate) struct DoneWords {
    /// Taken out only when it is dropped.
    words: Mutex<Option<DoneWordsOnGpu>>,
    client: Py<Client>,
}

#[pymethods]
impl DoneWords {
    /// Registers the done words of a client's session with the driver.
    #[new]
    fn new(py: Python<'_>, client: Py<Client>, gpu: &Gpu) -> PyResult<Self> {
        let gpu = &gpu.0;
        let words = client.get().enter(py, |attached| {
            let client = &mut attached.client;
            let registered = py.detach(move || DoneWordsOnGpu::register(gpu, client));
            registered.map_err(|error| error::cuda(py, &error))
        })?;
        Ok(Self { words: Mutex::new(Some(words)), client })
    }

    /// Makes `stream` (the `CUstream` as an integer, alive) wait until a restore has ended, or a
    /// `layer` of one by layer is in place. It also passes when the operation failed: look at
    /// `Client.is_done` before anything computed from its pages is reported or saved.
    #[pyo3(signature = (stream, operation, layer = None))]
    fn wait(
        &self,
        py: Python<'_>,
        stream: usize,
        operation: u64,
        layer: Option<u32>,
    ) -> PyResult<()> {
        let find = |attached: &mut crate::client::Attached| Ok(attached.operations.find(operation));
        let found = self.client.get().enter(py, find)?;
        let Some(operation) = found else {
            let error = CudaError::NoSuchWord { layer: layer.unwrap_or(0) };
            return Err(error::cuda(py, &error));
        };
        let words = self.words.try_lock().map_err(|_| error::entered_twice(py))?;
        let Some(words) = &*words else { return Err(error::closed(py)) };
        let stream = Stream(stream);
        // SAFETY: the caller gives a stream that is alive, as the documentation says.
        let waits = py.detach(|| unsafe { words.wait(stream.raw(), &operation, layer) });
        waits.map_err(|error| error::cuda(py, &error))
    }

    /// Waits for the GPU and lets go of the words.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let words = self.words.try_lock().map_err(|_| error::entered_twice(py))?.take();
        py.detach(|| drop(words));
        Ok(())
    }
}

impl Drop for DoneWords {
    fn drop(&mut self) {
        let Some(words) = self.words.get_mut().ok().and_then(Option::take) else { return };
        // What runs on the GPU may wait for the interpreter, so nobody waits for it with that held.
        // Without an interpreter, at exit, the words are dropped all the same.
        let _ = Python::try_attach(move |py| py.detach(move || drop(words)));
    }
}
