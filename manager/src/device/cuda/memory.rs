//! Memory of an engine on a GPU.

use std::sync::Arc;

use orbitkv_shm_protocol::bootstrap::message::{GpuId, IpcHandle, Refusal};

use super::driver::{self, CudaError};
use super::gpu::{Gpu, Gpus};
use super::reaper::Remains;
use super::words::RegisteredWords;
use crate::device::{CopyError, PeerHandle};

/// Why memory or events of a GPU are refused.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum CudaImportError {
    /// The engine has a GPU that we do not see.
    #[error(
        "the Manager sees no GPU {gpu}, it sees {}: start it with a CUDA_VISIBLE_DEVICES that has it",
        listed(known)
    )]
    NoSuchGpu {
        /// As the engine named it.
        gpu: GpuId,
        /// What there is.
        known: Vec<GpuId>,
    },
    /// The handle cannot be opened.
    #[error(
        "CUDA memory of process {pid} on gpu {gpu} cannot be opened: {error}. It has to be a plain \
         cudaMalloc allocation (start PyTorch engines with \
         PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False), not yet freed, of another process"
    )]
    Memory {
        /// Of the engine.
        pid: i32,
        /// Which GPU.
        gpu: GpuId,
        /// What the driver said.
        error: CudaError,
    },
    /// An event handle cannot be opened.
    #[error(
        "event {index} of process {pid} on gpu {gpu} cannot be opened: {error}. It has to be made \
         with CU_EVENT_INTERPROCESS and CU_EVENT_DISABLE_TIMING and still be there"
    )]
    Event {
        /// Position in the message.
        index: usize,
        /// Of the engine.
        pid: i32,
        /// Which GPU.
        gpu: GpuId,
        /// What the driver said.
        error: CudaError,
    },
    /// The range leaves its allocation.
    #[error(
        "bytes {offset} to {offset} + {bytes} were registered of an allocation of {allocation_bytes} \
         bytes"
    )]
    OutOfBounds {
        /// As registered.
        offset: u64,
        /// As registered.
        bytes: u64,
        /// What the handle stands for.
        allocation_bytes: u64,
    },
    /// No memory for a context or a registration.
    #[error("gpu {gpu} has no memory left to {what}: {error}")]
    OutOfMemory {
        /// Which GPU.
        gpu: GpuId,
        /// What for.
        what: &'static str,
        /// What the driver said.
        error: CudaError,
    },
    /// The context failed for good.
    #[error(
        "gpu {gpu} is lost to this Manager: {error}. Look at nvidia-smi and the kernel log (Xid), then \
         restart the Manager: what is on SSD is found again; engines on other devices are served on"
    )]
    Lost {
        /// Which GPU.
        gpu: GpuId,
        /// What the driver said.
        error: CudaError,
    },
    /// The driver failed otherwise.
    #[error("gpu {gpu} cannot {what}: {error}")]
    Driver {
        /// Which GPU.
        gpu: GpuId,
        /// What was tried.
        what: &'static str,
        /// What the driver said.
        error: CudaError,
    },
}

fn listed(known: &[GpuId]) -> String {
    known.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

impl CudaImportError {
    /// For the client's program.
    pub fn refusal(&self) -> Refusal {
        match self {
            Self::NoSuchGpu { .. } | Self::Memory { .. } | Self::Event { .. } => {
                Refusal::UnsupportedMemory
            }
            Self::OutOfBounds { .. } => Refusal::BadMessage,
            Self::OutOfMemory { .. } | Self::Lost { .. } | Self::Driver { .. } => {
                Refusal::NoResources
            }
        }
    }

    pub(super) fn of(gpu: &Gpu, what: &'static str, error: CudaError) -> Self {
        let gpu = gpu.id();
        match error {
            error if error.is_out_of_memory() => Self::OutOfMemory { gpu, what, error },
            error if error.is_sticky() => Self::Lost { gpu, error },
            error => Self::Driver { gpu, what, error },
        }
    }

    /// What a peer's handle could not be opened for: its own fault, unless the GPU is lost.
    pub(super) fn or_lost(self, gpu: &Gpu, error: CudaError) -> Self {
        if error.is_sticky() { Self::Lost { gpu: gpu.id(), error } } else { self }
    }
}

/// Part of an allocation of an engine, mapped here until the last user lets go of it.
#[derive(Debug)]
pub struct CudaMemory {
    address: u64,
    bytes: u64,
    peer: PeerHandle,
    allocation: Allocation,
}

#[derive(Debug)]
enum Allocation {
    Ipc {
        gpus: Arc<Gpus>,
        gpu: Arc<Gpu>,
        base: u64,
        /// Stored to by this GPU for as long as the memory may be copied to.
        _words: Arc<RegisteredWords>,
    },
    /// Memory of this process, that a twin of a GPU copies.
    #[cfg(test)]
    Twin,
}

impl CudaMemory {
    /// Opens what `handle` stands for and takes `bytes` bytes from `offset` of it.
    ///
    /// # Errors
    /// See [`CudaImportError`]. Any argument may have any value.
    pub(super) fn import(
        gpus: &Arc<Gpus>,
        gpu: &Arc<Gpu>,
        handle: &IpcHandle,
        (offset, bytes): (u64, u64),
        peer: PeerHandle,
        words: Arc<RegisteredWords>,
    ) -> Result<Self, CudaImportError> {
        gpu.enter().map_err(|error| CudaImportError::of(gpu, "open a context", error))?;
        let opened = driver::open_memory(handle).map_err(|error| {
            let refused = CudaImportError::Memory { pid: peer.pid, gpu: gpu.id(), error };
            refused.or_lost(gpu, error)
        })?;
        let (gpus, gpu, base) = (Arc::clone(gpus), Arc::clone(gpu), opened.base);
        let allocation = Allocation::Ipc { gpus, gpu, base, _words: words };
        let allocation_bytes = opened.bytes;
        // Dropped, and with it closed, where the range does not fit.
        let memory = Self { address: base.wrapping_add(offset), bytes, peer, allocation };
        if offset.checked_add(bytes).is_none_or(|end| end > allocation_bytes) {
            return Err(CudaImportError::OutOfBounds { offset, bytes, allocation_bytes });
        }
        Ok(memory)
    }

    /// Bytes that were offered, from offset 0.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Number of its GPU in this process.
    pub fn gpu(&self) -> u32 {
        match &self.allocation {
            Allocation::Ipc { gpu, .. } => gpu.ordinal(),
            #[cfg(test)]
            Allocation::Twin => 0,
        }
    }

    /// Its address on the GPU, for this process.
    pub(super) fn address(&self) -> u64 {
        self.address
    }

    /// Whether the process that registered it lives.
    pub(super) fn check_peer(&self) -> Result<(), CopyError> {
        match self.peer.is_alive() {
            true => Ok(()),
            false => Err(CopyError::PeerExited { pid: self.peer.pid }),
        }
    }

    /// Memory at `address` of this process.
    #[cfg(test)]
    pub(super) fn twin(address: u64, bytes: u64, peer: PeerHandle) -> Self {
        Self { address, bytes, peer, allocation: Allocation::Twin }
    }
}

impl Drop for CudaMemory {
    fn drop(&mut self) {
        match &self.allocation {
            Allocation::Ipc { gpus, gpu, base, .. } => {
                gpus.reaper().take(Remains::Memory { gpu: Arc::clone(gpu), base: *base });
            }
            #[cfg(test)]
            Allocation::Twin => {}
        }
    }
}
