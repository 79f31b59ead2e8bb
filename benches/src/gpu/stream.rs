//! Work in order: copies, flags for the host, waits.

use std::ptr;

use cudarc::driver::sys::{self, CUDA_MEMCPY2D, CUdeviceptr, CUmemorytype, CUresult, CUstream};
use orbitkv_engine::cuda::CudaError;

use super::ADVICE;

/// One copy between the GPU and the host: `height` rows of `width` bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Transfer {
    /// First byte on the GPU.
    pub device: CUdeviceptr,
    /// From row to row there.
    pub pitch: u64,
    /// First byte in pinned memory.
    pub host: u64,
    /// From row to row there.
    pub host_pitch: u64,
    /// Bytes of a row.
    pub width: u64,
    /// Rows.
    pub height: u64,
}

/// A stream that does not wait for the default stream. Dropping it waits for its work.
#[derive(Debug)]
pub struct Stream(CUstream);

impl Stream {
    /// A new one.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn new() -> Result<Self, CudaError> {
        let mut stream = ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: only writes `stream`; destroyed in `drop`.
        let made = unsafe { sys::cuStreamCreate(&raw mut stream, flags) };
        CudaError::check(made, "make a stream", ADVICE)?;
        Ok(Self(stream))
    }

    /// The driver's name of it, valid while `self` lives.
    pub fn raw(&self) -> CUstream {
        self.0
    }

    /// Waits until everything that it was given is done.
    ///
    /// # Errors
    /// [`CudaError::Driver`], also for what the work itself did wrong.
    pub fn wait(&self) -> Result<(), CudaError> {
        // SAFETY: the stream lives.
        let waited = unsafe { sys::cuStreamSynchronize(self.0) };
        CudaError::check(waited, "wait for a stream", ADVICE)
    }

    /// Whether everything that it was given is done.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn is_done(&self) -> Result<bool, CudaError> {
        // SAFETY: the stream lives.
        match unsafe { sys::cuStreamQuery(self.0) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            result => CudaError::check(result, "ask a stream", ADVICE).map(|()| true),
        }
    }

    /// Copies to the GPU, or from it.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    ///
    /// # Safety
    /// Both sides of the copy lie in memory that lives until it is done, and nobody else touches
    /// them before.
    pub unsafe fn copy(&self, transfer: &Transfer, to_device: bool) -> Result<(), CudaError> {
        let host = ptr::with_exposed_provenance_mut(transfer.host as usize);
        let bytes = transfer.width as usize;
        let begun = if transfer.height == 1 && to_device {
            // SAFETY: as the caller says.
            unsafe { sys::cuMemcpyHtoDAsync_v2(transfer.device, host, bytes, self.0) }
        } else if transfer.height == 1 {
            // SAFETY: as the caller says.
            unsafe { sys::cuMemcpyDtoHAsync_v2(host, transfer.device, bytes, self.0) }
        } else {
            let plan = two_dimensional(transfer, to_device);
            // SAFETY: as the caller says; the description is read before the call returns.
            unsafe { sys::cuMemcpy2DAsync_v2(&raw const plan, self.0) }
        };
        CudaError::check(begun, "begin a copy", ADVICE)
    }

    /// Stores `value` at an address of pinned memory once everything before is done and visible.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    ///
    /// # Safety
    /// The word lives until then.
    pub unsafe fn store(&self, address: u64, value: u32) -> Result<(), CudaError> {
        // SAFETY: as the caller says; 0 keeps the memory barrier.
        let begun = unsafe { sys::cuStreamWriteValue32_v2(self.0, address, value, 0) };
        CudaError::check(begun, "store a word after a copy", ADVICE)
    }
}

fn two_dimensional(transfer: &Transfer, to_device: bool) -> CUDA_MEMCPY2D {
    let device = CUmemorytype::CU_MEMORYTYPE_DEVICE;
    let host = CUmemorytype::CU_MEMORYTYPE_HOST;
    let address = ptr::with_exposed_provenance_mut(transfer.host as usize);
    let (pitch, host_pitch) = (transfer.pitch as usize, transfer.host_pitch as usize);
    CUDA_MEMCPY2D {
        srcXInBytes: 0,
        srcY: 0,
        srcMemoryType: if to_device { host } else { device },
        srcHost: address,
        srcDevice: transfer.device,
        srcArray: ptr::null_mut(),
        srcPitch: if to_device { host_pitch } else { pitch },
        dstXInBytes: 0,
        dstY: 0,
        dstMemoryType: if to_device { device } else { host },
        dstHost: address,
        dstDevice: transfer.device,
        dstArray: ptr::null_mut(),
        dstPitch: if to_device { pitch } else { host_pitch },
        WidthInBytes: transfer.width as usize,
        Height: transfer.height as usize,
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let _failed = self.wait();
        // SAFETY: made once, destroyed once; its work is done.
        let _destroyed = unsafe { sys::cuStreamDestroy_v2(self.0) };
    }
}
