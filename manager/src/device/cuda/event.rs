//! Events of engines on a GPU.

use std::sync::Arc;

use orbitkv_shm_protocol::bootstrap::message::IpcHandle;

use super::driver::OpenEvent;
use super::gpu::{Gpu, Gpus};
use super::memory::CudaImportError;
use super::reaper::Remains;
use crate::device::{CopyError, DeviceEvent};

/// An event of another process, open until it is dropped.
#[derive(Debug)]
pub(super) struct CudaEvent {
    gpus: Arc<Gpus>,
    gpu: Arc<Gpu>,
    /// Taken when it is dropped.
    event: Option<OpenEvent>,
}

impl CudaEvent {
    /// `index` and `pid` are for the message.
    pub(super) fn import(
        gpus: &Arc<Gpus>,
        gpu: &Arc<Gpu>,
        handle: &IpcHandle,
        index: usize,
        pid: i32,
    ) -> Result<Self, CudaImportError> {
        let refused =
            |error| CudaImportError::Event { index, pid, gpu: gpu.id(), error }.or_lost(gpu, error);
        let event = OpenEvent::open(handle).map_err(refused)?;
        Ok(Self { gpus: Arc::clone(gpus), gpu: Arc::clone(gpu), event: Some(event) })
    }
}

impl DeviceEvent for CudaEvent {
    fn has_passed(&self) -> Result<bool, CopyError> {
        let Some(event) = &self.event else { return Ok(true) };
        event.has_passed().map_err(|error| CopyError::BrokenFence { fence: 0, code: error.code() })
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        if let Some(event) = self.event.take() {
            self.gpus.reaper().take(Remains::Event { gpu: Arc::clone(&self.gpu), event });
        }
    }
}
