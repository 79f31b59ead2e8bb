//! The GPUs of this process: found when the Manager starts, each opened when its first engine comes
//! (a context takes hundreds of MiB of its memory).

use std::sync::{Arc, OnceLock};

use orbitkv_shm_protocol::bootstrap::message::GpuId;

use super::driver::{self, Attribute, Context, CudaError};
use super::reaper::Reaper;

/// Why there is no CUDA device.
#[derive(Clone, Debug, thiserror::Error)]
pub enum NoCuda {
    /// No library.
    #[error(
        "no CUDA driver on this host (libcuda.so.1 is not found): install it, or pass the GPUs into \
         the container (docker run --gpus all)"
    )]
    NoDriver,
    /// The driver does not start.
    #[error("the CUDA driver does not start: {0}")]
    Driver(CudaError),
    /// No GPU is visible.
    #[error("the CUDA driver sees no GPU: look at CUDA_VISIBLE_DEVICES and nvidia-smi")]
    NoGpu,
    /// One address for both is what everything here is built on.
    #[error("gpu {ordinal} does not take addresses of registered host memory as they are")]
    NoHostPointers {
        /// Its number in this process.
        ordinal: u32,
    },
    /// No thread that unmaps.
    #[error("no thread to unmap memory: {0}")]
    NoThread(Arc<std::io::Error>),
}

impl From<CudaError> for NoCuda {
    fn from(error: CudaError) -> Self {
        Self::Driver(error)
    }
}

/// Every GPU that this process sees.
#[derive(Debug)]
pub struct Gpus {
    list: Vec<Arc<Gpu>>,
    reaper: Reaper,
}

impl Gpus {
    /// Loads and starts the driver.
    ///
    /// # Errors
    /// See [`NoCuda`].
    pub fn find() -> Result<Self, NoCuda> {
        if !driver::is_present() {
            return Err(NoCuda::NoDriver);
        }
        let found = driver::list()?;
        if found.is_empty() {
            return Err(NoCuda::NoGpu);
        }
        let mut list = Vec::with_capacity(found.len());
        for gpu in found {
            if gpu.attribute(Attribute::HostPointers)? == 0 {
                return Err(NoCuda::NoHostPointers { ordinal: gpu.ordinal });
            }
            let pitch_max = gpu.attribute(Attribute::PitchMax)?.max(0) as u64;
            let name = gpu.name()?;
            list.push(Arc::new(Gpu { gpu, name, pitch_max, context: OnceLock::new() }));
        }
        let reaper = Reaper::start().map_err(|error| NoCuda::NoThread(Arc::new(error)))?;
        Ok(Self { list, reaper })
    }

    /// The GPUs, by their numbers in this process.
    pub fn list(&self) -> &[Arc<Gpu>] {
        &self.list
    }

    /// One of them.
    pub fn by_id(&self, id: GpuId) -> Option<&Arc<Gpu>> {
        self.list.iter().find(|gpu| gpu.gpu.id == id)
    }

    /// Unmaps what engines leave behind.
    pub(super) fn reaper(&self) -> &Reaper {
        &self.reaper
    }
}

/// One GPU.
#[derive(Debug)]
pub struct Gpu {
    gpu: driver::Gpu,
    name: String,
    pitch_max: u64,
    context: OnceLock<Result<Context, CudaError>>,
}

impl Gpu {
    /// Its number in this process.
    pub fn ordinal(&self) -> u32 {
        self.gpu.ordinal
    }

    /// The same in every process.
    pub fn id(&self) -> GpuId {
        self.gpu.id
    }

    /// As the driver calls it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Longest distance of two rows of one copy, in bytes.
    pub(super) fn pitch_max(&self) -> u64 {
        self.pitch_max
    }

    /// Makes its context, opened if it was not, the one that calls of this thread mean.
    pub(super) fn enter(&self) -> Result<(), CudaError> {
        match self.context.get_or_init(|| Context::retain(self.gpu)) {
            Ok(context) => context.enter(),
            Err(error) => Err(*error),
        }
    }
}
