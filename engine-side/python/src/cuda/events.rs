//! Events that copies of the Manager wait for.
#![allow(unsafe_code, reason = "a stream is a number in Python: that it is alive is its promise")]

use std::sync::Mutex;

use orbitkv_engine::cuda::EventPool;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use super::{Gpu, Stream};
use crate::client::Client;
use crate::error;

/// A pool of interprocess events, registered with a client. An event belongs to one operation from
/// `take` to `give_back`, which comes after the operation's completion. Let go of it after the
/// client was closed.
#[pyclass(frozen, module = "orbitkv")]
pub(crate) struct Events(Mutex<Pool>);

struct Pool {
    events: EventPool,
    taken: Vec<u32>,
}

impl Events {
    fn enter<R>(&self, py: Python<'_>, work: impl FnOnce(&mut Pool) -> PyResult<R>) -> PyResult<R> {
        match self.0.try_lock() {
            Ok(mut pool) => work(&mut pool),
            Err(_) => Err(error::entered_twice(py)),
        }
    }
}

impl Pool {
    /// Where a taken event is noted.
    fn taken_at(&self, index: u32) -> PyResult<usize> {
        self.taken.iter().position(|taken| *taken == index).ok_or_else(|| {
            let words = format!("event {index} is not one that was taken from this pool");
            PyValueError::new_err(words)
        })
    }
}

#[pymethods]
impl Events {
    /// `count` events on `gpu`, registered with `client`.
    #[new]
    fn new(py: Python<'_>, client: &Client, gpu: &Gpu, count: u32) -> PyResult<Self> {
        let gpu = &gpu.0;
        let made = py.detach(|| EventPool::new(gpu, count));
        let mut events = made.map_err(|error| error::cuda(py, &error))?;
        client.enter(py, |attached| {
            let client = &mut attached.client;
            let registered = py.detach(|| events.register(client));
            registered.map_err(|error| error::register(py, &error))
        })?;
        Ok(Self(Mutex::new(Pool { events, taken: Vec::with_capacity(count as usize) })))
    }

    /// The index of an event that belongs to no operation, for `fence`; `None` while all do.
    fn take(&self, py: Python<'_>) -> PyResult<Option<u32>> {
        self.enter(py, |pool| {
            let taken = pool.events.take();
            pool.taken.extend(taken);
            Ok(taken)
        })
    }

    /// The operation of an event has ended, or was never staged.
    fn give_back(&self, py: Python<'_>, index: u32) -> PyResult<()> {
        self.enter(py, |pool| {
            let at = pool.taken_at(index)?;
            pool.taken.swap_remove(at);
            pool.events.give_back(index);
            Ok(())
        })
    }

    /// Records what `stream` (the `CUstream` as an integer) was given so far, on an event that was
    /// taken. The stream must be alive and not being captured.
    fn record(&self, py: Python<'_>, index: u32, stream: usize) -> PyResult<()> {
        let stream = Stream(stream);
        self.enter(py, |pool| {
            pool.taken_at(index)?;
            let events = &mut pool.events;
            // SAFETY: the caller gives a stream that is alive, as the documentation says.
            let recorded = py.detach(move || unsafe { events.record(index, stream.raw()) });
            recorded.map_err(|error| error::cuda(py, &error))
        })
    }
}
