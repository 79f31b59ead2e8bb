//! Memory of engines, wherever their KV lies.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use orbitkv_shm_protocol::bootstrap::message::{GpuId, IpcHandle, MemorySpec, Refusal, RegionSpec};
use orbitkv_shm_protocol::segment::DoneWords;

use super::{ImportRefusal, Importer, Peer};
use crate::device::{
    CudaImportError, CudaImporter, DeviceEvent, DeviceMemory, DeviceRegion, HostMemory,
    ImportError, PeerHandle, RegionError,
};

/// Imports host memory, and memory of GPUs where there is a driver.
#[derive(Debug, Default)]
pub struct MemoryImporter {
    cuda: Option<CudaImporter>,
}

impl MemoryImporter {
    /// `cuda` is `None` where the Manager runs without a driver.
    pub fn new(cuda: Option<CudaImporter>) -> Self {
        Self { cuda }
    }

    fn cuda(&mut self) -> Result<&mut CudaImporter, ImportError> {
        self.cuda.as_mut().ok_or(ImportError::NoCuda)
    }
}

impl Importer for MemoryImporter {
    type Memory = DeviceMemory;
    type Region = DeviceRegion;

    fn import(
        &mut self,
        spec: &MemorySpec,
        descriptor: Option<OwnedFd>,
        peer: &Peer,
        done: &DoneWords,
    ) -> Result<DeviceMemory, ImportRefusal> {
        let handle = handle_of(peer);
        if let MemorySpec::Cuda { gpu, handle: memory, offset, bytes } = spec {
            let range = (*offset, *bytes);
            let memory = self.cuda()?.import_memory(*gpu, memory, range, handle, done)?;
            return Ok(DeviceMemory::Cuda(memory));
        }
        let memory = HostMemory::import(spec, descriptor, &handle)?;
        Ok(DeviceMemory::Host(memory))
    }

    fn import_events(
        &mut self,
        gpu: GpuId,
        handles: &[IpcHandle],
        peer: &Peer,
    ) -> Result<Vec<Arc<dyn DeviceEvent>>, ImportRefusal> {
        Ok(self.cuda()?.import_events(gpu, handles, &handle_of(peer))?)
    }

    fn lay_out(
        &mut self,
        memories: &HashMap<u32, Arc<DeviceMemory>>,
        spec: &RegionSpec,
        page_bytes: u64,
    ) -> Result<DeviceRegion, ImportRefusal> {
        let memory = |handle: u32| memories.get(&handle).cloned();
        DeviceRegion::new(spec, page_bytes, memory).map_err(|error| {
            let refusal = match error {
                RegionError::SizeMismatch { .. } => Refusal::LayoutConflict,
                RegionError::ImageTooLarge { .. } => Refusal::TooLarge,
                _ => Refusal::BadMessage,
            };
            ImportRefusal { refusal, cause: Box::new(error) }
        })
    }
}

impl From<ImportError> for ImportRefusal {
    fn from(error: ImportError) -> Self {
        Self { refusal: error.refusal(), cause: Box::new(error) }
    }
}

impl From<CudaImportError> for ImportRefusal {
    fn from(error: CudaImportError) -> Self {
        Self { refusal: error.refusal(), cause: Box::new(error) }
    }
}

fn handle_of(peer: &Peer) -> PeerHandle {
    PeerHandle {
        // Process ids fit; 0 (a peer outside our namespace) is refused by the first access.
        pid: i32::try_from(peer.credentials.pid).unwrap_or(0),
        pidfd: peer.shared_pidfd(),
    }
}
