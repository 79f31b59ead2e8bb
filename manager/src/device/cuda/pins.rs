//! The pool's arenas, registered with the driver.

use std::ptr::NonNull;
use std::sync::Arc;

use super::driver::{self, CudaError};
use super::gpu::{Gpu, Gpus};
use super::memory::CudaImportError;
use crate::pool::DramPool;

/// Bytes that are registered at once. One registration of 512 GiB or more fails; no extent crosses a
/// multiple of 1 GiB, so none lies in two of these.
const PIECE_BYTES: usize = 16 << 30;

/// Registrations, undone when dropped.
#[derive(Debug)]
pub(super) struct Pins {
    gpu: Arc<Gpu>,
    pieces: Vec<NonNull<u8>>,
    /// Mapped as long as it is registered.
    _pool: Arc<DramPool>,
}

// SAFETY: the addresses are used to undo the registrations only.
#[allow(unsafe_code, reason = "addresses of the pool")]
unsafe impl Send for Pins {}

impl Pins {
    /// Registers every arena, once for all GPUs.
    pub(super) fn of(gpus: &Gpus, pool: &Arc<DramPool>) -> Result<Self, CudaImportError> {
        let gpu = Arc::clone(&gpus.list()[0]);
        gpu.enter().map_err(|error| CudaImportError::of(&gpu, "open a context", error))?;
        let (pieces, pool) = (vec![], Arc::clone(pool));
        let mut pins = Self { gpu, pieces, _pool: Arc::clone(&pool) };
        for arena in (0..).map_while(|arena| pool.arena(arena)) {
            for offset in (0..arena.bytes()).step_by(PIECE_BYTES) {
                let bytes = PIECE_BYTES.min(arena.bytes() - offset);
                let start = NonNull::new(arena.as_ptr().wrapping_add(offset));
                let Some(start) = start else { continue };
                pin(start, bytes)
                    .map_err(|error| CudaImportError::of(&pins.gpu, "pin the pool", error))?;
                pins.pieces.push(start);
            }
        }
        Ok(pins)
    }
}

#[allow(unsafe_code, reason = "promises the driver that memory stays mapped")]
fn pin(start: NonNull<u8>, bytes: usize) -> Result<(), CudaError> {
    // SAFETY: a part of an arena, mapped as long as the pool, which `Pins` keeps until it has undone
    // the registration. Copies belong to the holders of their extents.
    unsafe { driver::register(start, bytes) }
}

impl Drop for Pins {
    fn drop(&mut self) {
        if self.gpu.enter().is_err() {
            return;
        }
        for piece in self.pieces.drain(..) {
            // The process ends, or the GPU is lost: nobody can do anything about it.
            let _ = driver::unregister(piece);
        }
    }
}
