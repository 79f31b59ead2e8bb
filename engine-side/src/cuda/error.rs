//! Why the driver did not do what it was asked.

use cudarc::driver::sys::{CUdeviceptr, CUresult};
use orbitkv_shm_protocol::bootstrap::message::GpuId;

use super::driver;

/// Why something of the GPU is not there. Nothing changed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum CudaError {
    /// There is no driver to load.
    #[error(
        "no CUDA driver: libcuda.so.1 cannot be loaded; install the NVIDIA driver, or give the \
         container its libraries (--gpus)"
    )]
    NoDriver,
    /// The driver refused.
    #[error("cannot {action}: {name} ({code}); {advice}")]
    Driver {
        /// What was tried.
        action: &'static str,
        /// The driver's name of the error.
        name: String,
        /// Its number.
        code: u32,
        /// What to do.
        advice: &'static str,
    },
    /// No context is current on this thread.
    #[error("no CUDA context is current on this thread; set the device first, or name its number")]
    NoContext,
    /// The bytes do not lie in one allocation.
    #[error(
        "{bytes} bytes at {address:#x} leave their allocation of {allocation_bytes} bytes at \
         {base:#x}; export each allocation by itself"
    )]
    OutOfAllocation {
        /// First address.
        address: CUdeviceptr,
        /// Bytes asked for.
        bytes: u64,
        /// First address of the allocation.
        base: CUdeviceptr,
        /// Its bytes.
        allocation_bytes: u64,
    },
    /// The memory was made by the virtual memory API or a memory pool, which have no such handle.
    #[error(
        "the memory at {address:#x} has no CUDA IPC handle ({name}): it comes from the virtual \
         memory API or a memory pool; with PyTorch start the engine without expandable_segments \
         (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False) or allocate the KV cache by cuMemAlloc"
    )]
    NotExportable {
        /// First address.
        address: CUdeviceptr,
        /// The driver's name of the error.
        name: String,
    },
    /// The memory lies on another GPU than was said.
    #[error("the memory at {address:#x} lies on another GPU than {gpu}; export it there")]
    OtherGpu {
        /// First address.
        address: CUdeviceptr,
        /// The GPU that was asked.
        gpu: GpuId,
    },
    /// This GPU cannot wait for a word of host memory that this process may only read.
    #[error(
        "gpu {gpu} cannot register memory that is only read; wait for done words on the CPU \
         (Client::is_layer_done) instead"
    )]
    NoReadOnlyRegistration {
        /// The GPU.
        gpu: GpuId,
    },
    /// The done word was stored so many generations ago that a comparison says nothing.
    #[error(
        "the done word of operation {operation_index} holds {word:#x}, too far from {wanted:#x} to \
         be waited for on a stream; wait for the completion instead"
    )]
    WordOutOfReach {
        /// Index of the operation.
        operation_index: u32,
        /// What it holds.
        word: u32,
        /// What the operation stores.
        wanted: u32,
    },
    /// The operation is not one of this session, or has no such layer.
    #[error("the operation is another session's, or has no done word for layer {layer}")]
    NoSuchWord {
        /// The layer.
        layer: u32,
    },
}

impl CudaError {
    /// What the driver answered to `action`, and what to do when that is no success. The driver
    /// must have been started, as every [`Gpu`](super::Gpu) has.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn check(result: CUresult, action: &'static str, advice: &'static str) -> Result<(), Self> {
        driver::check(result, action, advice)
    }
}
