//! A GPU as the engine of a benchmark or test uses it: memory, streams, kernels.
//!
//! The law of this folder: a [`Device`] makes its context current on the thread that opened it and
//! nothing here leaves that thread; memory is freed when its owner is dropped, after the work that
//! was given to it has ended.
#![allow(unsafe_code, reason = "the driver is a C library")]

mod kernels;
mod memory;
mod stream;

use orbitkv_engine::cuda::{CudaError, Gpu};

pub use kernels::{Content, Kernels, PlacedPages};
pub use memory::{Buffer, Imported, Pinned, VirtualMemory, free_bytes};
pub use stream::{Stream, Transfer};

/// What to do where the driver's own name of an error says all there is.
const ADVICE: &str = "see nvidia-smi and the kernel log";

/// A GPU whose primary context is current on this thread.
#[derive(Debug)]
pub struct Device {
    /// The GPU.
    pub gpu: Gpu,
    /// What runs on it.
    pub kernels: Kernels,
}

impl Device {
    /// Opens a GPU by its number and makes its context current on this thread for good.
    ///
    /// # Errors
    /// See [`CudaError`].
    pub fn open(ordinal: u32) -> Result<Self, CudaError> {
        let gpu = Gpu::open(ordinal)?;
        // SAFETY: the context is retained by `gpu`, which everything here outlives.
        let set = unsafe { cudarc::driver::sys::cuCtxSetCurrent(gpu.context()) };
        CudaError::check(set, "make the context of the GPU current", ADVICE)?;
        Ok(Self { kernels: Kernels::load()?, gpu })
    }
}
