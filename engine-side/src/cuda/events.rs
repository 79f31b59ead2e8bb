//! Events of this engine that copies of the Manager wait for.

use std::mem::MaybeUninit;
use std::ptr;

use cudarc::driver::sys::{self, CUevent, CUevent_flags, CUstream};
use orbitkv_shm_protocol::bootstrap::message::{
    EVENTS_PER_MESSAGE_MAX, GpuId, HexBytes, IpcHandle,
};

use super::driver::{self, ADVICE_GENERAL};
use super::error::CudaError;
use super::gpu::Gpu;
use crate::client::Client;
use crate::error::RegisterError;

/// Events that other processes can open, each for one operation at a time.
///
/// An event says "everything recorded before on that stream is done". It belongs to one operation
/// from submit to terminal: recorded again earlier, the copy would wait for something else. So an
/// index is [taken](Self::take) before the request is staged and [given
/// back](Self::give_back) when its completion was returned.
///
/// Events of a pool that is dropped can no longer be recorded; a copy that waits for one of them
/// then may wait until its deadline. Drop it after the session.
#[derive(Debug)]
pub struct EventPool {
    gpu: Gpu,
    events: Vec<CUevent>,
    handles: Vec<IpcHandle>,
    free: Vec<u32>,
    /// Index in the session's pool of the first.
    first: u32,
}

// SAFETY: an event is a name that the driver lets any thread use; one thread has the pool.
unsafe impl Send for EventPool {}

impl EventPool {
    /// `count` events on `gpu`, all free. [`register`](Self::register) them before the first is taken.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn new(gpu: &Gpu, count: u32) -> Result<Self, CudaError> {
        let _current = gpu.enter()?;
        let mut pool = Self {
            gpu: gpu.clone(),
            events: Vec::with_capacity(count as usize),
            handles: Vec::with_capacity(count as usize),
            free: (0..count).rev().collect(),
            first: 0,
        };
        for _ in 0..count {
            let flags = CUevent_flags::CU_EVENT_DISABLE_TIMING as u32
                | CUevent_flags::CU_EVENT_INTERPROCESS as u32;
            let mut event = ptr::null_mut();
            // SAFETY: only writes `event`; destroyed when the pool is dropped.
            let made = unsafe { sys::cuEventCreate(&raw mut event, flags) };
            driver::check(made, "make an interprocess event", ADVICE_GENERAL)?;
            pool.events.push(event);
            let mut handle = MaybeUninit::<sys::CUipcEventHandle>::uninit();
            // SAFETY: only writes `handle`; the event was made just now.
            let exported = unsafe { sys::cuIpcGetEventHandle(handle.as_mut_ptr(), event) };
            driver::check(
                exported,
                "make a CUDA IPC handle of an event",
                "CUDA IPC needs Linux and a GPU that is not a MIG slice of another process",
            )?;
            // SAFETY: success means written.
            let handle = unsafe { handle.assume_init() };
            pool.handles.push(HexBytes(handle.reserved.map(|byte| byte as u8)));
        }
        Ok(pool)
    }

    /// The GPU that the events belong to.
    pub fn gpu(&self) -> GpuId {
        self.gpu.id()
    }

    /// Appends the events to the pool of a client's session, from where on the indices are those of
    /// the session. No index may be taken.
    ///
    /// # Errors
    /// See [`RegisterError`]; after one the session may have some of the events.
    ///
    /// # Panics
    /// While an index is taken.
    pub fn register(&mut self, client: &mut Client) -> Result<(), RegisterError> {
        assert_eq!(self.free.len(), self.events.len(), "an index is taken");
        let mut first = None;
        for handles in self.handles.chunks(EVENTS_PER_MESSAGE_MAX) {
            let next = client.register_events(self.gpu.id(), handles)?;
            first.get_or_insert(next);
        }
        self.first = first.unwrap_or(0);
        let count = self.events.len() as u32;
        self.free = (self.first..self.first + count).rev().collect();
        Ok(())
    }

    /// An event that belongs to no operation; `None` while all do.
    pub fn take(&mut self) -> Option<u32> {
        self.free.pop()
    }

    /// The operation of an event has ended, or was never staged.
    ///
    /// # Panics
    /// For an index that was not taken.
    pub fn give_back(&mut self, index: u32) {
        assert!(self.event(index).is_some(), "event {index} is not of this pool");
        assert!(!self.free.contains(&index), "event {index} was not taken");
        self.free.push(index);
    }

    /// Records what `stream` was given so far. A fence that is not recorded has passed: record
    /// before the request is submitted.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    ///
    /// # Panics
    /// For an index that is not of this pool.
    ///
    /// # Safety
    /// `stream` is null, which is the default stream, or was made and not destroyed.
    pub unsafe fn record(&self, index: u32, stream: CUstream) -> Result<(), CudaError> {
        let event = self.event(index).expect("an index of this pool");
        let _current = self.gpu.enter()?;
        // SAFETY: the event lives as long as the pool; the stream is alive as the caller says.
        let recorded = unsafe { sys::cuEventRecord(event, stream) };
        driver::check(
            recorded,
            "record an event",
            "give a stream of the GPU and context of this pool, outside of a graph capture",
        )
    }

    fn event(&self, index: u32) -> Option<CUevent> {
        self.events.get(index.checked_sub(self.first)? as usize).copied()
    }
}

impl Drop for EventPool {
    fn drop(&mut self) {
        let Ok(_current) = self.gpu.enter() else { return };
        for event in self.events.drain(..) {
            // SAFETY: made by this pool, destroyed once.
            let _destroyed = unsafe { sys::cuEventDestroy_v2(event) };
        }
    }
}
