//! Memory of engines whose KV lies in host memory.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use orbitkv_shm_protocol::bootstrap::message::{GpuId, IpcHandle, MemorySpec, Refusal, RegionSpec};
use orbitkv_shm_protocol::segment::DoneWords;

use super::{ImportRefusal, Importer, Peer};
use crate::device::{
    DeviceEvent, DeviceMemory, DeviceRegion, HostMemory, ImportError, PeerHandle, RegionError,
};

/// Imports host memory.
#[derive(Clone, Copy, Debug, Default)]
pub struct HostImporter;

impl Importer for HostImporter {
    type Memory = DeviceMemory;
    type Region = DeviceRegion;

    fn import(
        &mut self,
        spec: &MemorySpec,
        descriptor: Option<OwnedFd>,
        peer: &Peer,
        _done: &DoneWords,
    ) -> Result<DeviceMemory, ImportRefusal> {
        let handle = PeerHandle {
            // Process ids fit; 0 (a peer outside our namespace) is refused by the first access.
            pid: i32::try_from(peer.credentials.pid).unwrap_or(0),
            pidfd: peer.shared_pidfd(),
        };
        HostMemory::import(spec, descriptor, &handle)
            .map(DeviceMemory::Host)
            .map_err(ImportRefusal::from)
    }

    fn import_events(
        &mut self,
        _gpu: GpuId,
        _handles: &[IpcHandle],
        _peer: &Peer,
    ) -> Result<Vec<Arc<dyn DeviceEvent>>, ImportRefusal> {
        Err(ImportError::NoCuda.into())
    }

    fn lay_out(
        &mut self,
        memories: &[Arc<DeviceMemory>],
        spec: &RegionSpec,
        page_bytes: u64,
    ) -> Result<DeviceRegion, ImportRefusal> {
        let memory = |handle: u32| memories.get(handle as usize).cloned();
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
