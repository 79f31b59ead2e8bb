//! Registration: namespaces, sets, memory and regions. Other threads run meanwhile.
#![allow(unsafe_code, reason = "descriptors and addresses are numbers in Python: its promise")]

use std::num::NonZero;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;

use orbitkv_engine::cuda::CudaError;
use orbitkv_engine::{Client as EngineClient, RegionLayout, RegisterError, Segment};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use super::Client;
use crate::cuda::Gpu;
use crate::error;
use crate::handle::{Memory, Region, Scope};
use crate::namespace::Namespace;

/// Memory, offset, stride, length and layer, as Python spells a segment.
type SegmentTuple<'py> = (PyRef<'py, Memory>, u64, u64, u64, u32);

impl Client {
    /// Asks the Manager, with the interpreter let go of.
    fn ask<R: Send>(
        &self,
        py: Python<'_>,
        question: impl FnOnce(&mut EngineClient) -> Result<R, RegisterError> + Send,
    ) -> PyResult<R> {
        self.enter(py, |attached| {
            let client = &mut attached.client;
            py.detach(|| question(client)).map_err(|error| error::register(py, &error))
        })
    }
}

#[pymethods]
impl Client {
    /// Names the identity of page bytes. Equal fields name the same pages in every session.
    fn define_namespace(&self, py: Python<'_>, ns: &Namespace) -> PyResult<Scope> {
        self.ask(py, |client| client.define_namespace(&ns.0)).map(Scope)
    }

    /// Names an ordered set of namespaces, so that one query asks for what all of them have.
    fn define_set(&self, py: Python<'_>, members: Vec<PyRef<'_, Scope>>) -> PyResult<Scope> {
        let members: Vec<_> = members.iter().map(|member| member.0).collect();
        self.ask(py, |client| client.define_set(&members)).map(Scope)
    }

    /// Offers the first `bytes` of a memfd, which may be closed afterwards. Sealed against shrinking
    /// the Manager maps it, else it reads and writes through the descriptor.
    fn register_memfd(&self, py: Python<'_>, fd: i32, bytes: u64) -> PyResult<Memory> {
        if fd < 0 {
            return Err(PyValueError::new_err(format!("{fd} is no file descriptor")));
        }
        // SAFETY: not -1; the caller's, who keeps it open during the call. One that is not open is an
        // error of the kernel.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        self.ask(py, |client| client.register_memfd(fd, bytes)).map(Memory)
    }

    /// Offers `bytes` of this process's memory from `address`.
    ///
    /// The caller promises what nobody can check: the range is mapped, and stays so until every
    /// region over it was unregistered or the Manager has exited; while a restore into it is
    /// outstanding nothing else reads or writes its pages, while a save is, nothing writes them.
    fn register_process(&self, py: Python<'_>, address: usize, bytes: usize) -> PyResult<Memory> {
        let address =
            NonZero::new(address).ok_or_else(|| PyValueError::new_err("address 0 is no memory"))?;
        self.ask(py, |client| {
            let start = NonNull::with_exposed_provenance(address);
            // SAFETY: the caller promises it, as the documentation of this method says.
            unsafe { client.register_process_memory(start, bytes) }
        })
        .map(Memory)
    }

    /// Offers the allocation of `gpu` that `bytes` at `address` lie in. Returns its memory and the
    /// offset of `address` in it. It must live until every region over it was unregistered or the
    /// session has ended.
    fn register_cuda(
        &self,
        py: Python<'_>,
        gpu: &Gpu,
        address: u64,
        bytes: u64,
    ) -> PyResult<(Memory, u64)> {
        let gpu = &gpu.0;
        let export = || {
            let (base, allocation_bytes) = gpu.allocation(address)?;
            let spec = gpu.export(base, allocation_bytes)?;
            let offset = address - base;
            if offset.checked_add(bytes).is_none_or(|end| end > allocation_bytes) {
                return Err(CudaError::OutOfAllocation { address, bytes, base, allocation_bytes });
            }
            Ok((spec, offset))
        };
        let (spec, offset) = py.detach(export).map_err(|error| error::cuda(py, &error))?;
        Ok((self.ask(py, |client| client.register_cuda(&spec)).map(Memory)?, offset))
    }

    /// Ends the use of memory. The Manager lets go of it when the last region over it was
    /// unregistered.
    fn release_memory(&self, py: Python<'_>, memory: &Memory) -> PyResult<()> {
        self.ask(py, |client| client.release_memory(memory.0))
    }

    /// Joins a namespace, memory and the layout of a page into a region of `pages` device pages.
    ///
    /// Each segment is (memory, offset, stride, length, layer): of device page p the `length` bytes
    /// at `offset + p * stride`, in the order of the page image. `layer` is 0 where nobody restores
    /// by layer.
    fn register_region(
        &self,
        py: Python<'_>,
        scope: &Scope,
        pages: u32,
        segments: Vec<SegmentTuple<'_>>,
    ) -> PyResult<Region> {
        let segment = |(memory, offset, stride, length, layer): &SegmentTuple<'_>| Segment {
            memory: memory.0,
            offset: *offset,
            stride: *stride,
            length: *length,
            layer: *layer,
        };
        let segments = segments.iter().map(segment).collect();
        let layout = RegionLayout { scope: scope.0, pages, segments };
        self.ask(py, |client| client.register_region(&layout)).map(Region)
    }
}
