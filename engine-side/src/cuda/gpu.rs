//! A GPU of this process, and its memory as another process can open it.

use std::mem::MaybeUninit;
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys::{
    self, CUcontext, CUdevice, CUdevice_attribute, CUdeviceptr, CUpointer_attribute, CUresult,
};
use orbitkv_shm_protocol::bootstrap::message::{GpuId, HexBytes, MemorySpec};

use super::driver::{self, ADVICE_GENERAL, Current};
use super::error::CudaError;

/// A GPU whose primary context this process holds. Cheap to clone; the last clone lets go of the
/// context.
#[derive(Clone, Debug)]
pub struct Gpu {
    retained: Arc<Retained>,
}

#[derive(Debug)]
struct Retained {
    device: CUdevice,
    context: CUcontext,
    id: GpuId,
}

// SAFETY: a context is a name that the driver lets any thread use.
unsafe impl Send for Retained {}
// SAFETY: as above; nothing here changes after it was made.
unsafe impl Sync for Retained {}

impl Gpu {
    /// The GPU with this number in this process, which need not be its number elsewhere.
    ///
    /// # Errors
    /// [`CudaError::NoDriver`]; [`CudaError::Driver`].
    pub fn open(ordinal: u32) -> Result<Self, CudaError> {
        driver::start()?;
        let mut device = 0;
        // A number beyond i32 is none either.
        let ordinal = i32::try_from(ordinal).unwrap_or(i32::MAX);
        // SAFETY: only writes `device`.
        let found = unsafe { sys::cuDeviceGet(&raw mut device, ordinal) };
        driver::check(
            found,
            "find a GPU by its number",
            "see nvidia-smi -L, and CUDA_VISIBLE_DEVICES of this process",
        )?;
        Self::retain(device)
    }

    /// The GPU of the context that is current on this thread, which a framework made so.
    ///
    /// # Errors
    /// [`CudaError::NoContext`]; [`CudaError::NoDriver`]; [`CudaError::Driver`].
    pub fn current() -> Result<Self, CudaError> {
        driver::start()?;
        let mut device = 0;
        // SAFETY: only writes `device`.
        match unsafe { sys::cuCtxGetDevice(&raw mut device) } {
            CUresult::CUDA_ERROR_INVALID_CONTEXT => Err(CudaError::NoContext),
            found => {
                driver::check(found, "read the current GPU", ADVICE_GENERAL)?;
                Self::retain(device)
            }
        }
    }

    /// The GPU that the device memory at `address` lies on.
    ///
    /// # Errors
    /// [`CudaError::NoDriver`]; [`CudaError::Driver`] for an address that no GPU has.
    pub fn of_address(address: CUdeviceptr) -> Result<Self, CudaError> {
        driver::start()?;
        Self::retain(home(address)?)
    }

    /// How many GPUs this process sees.
    ///
    /// # Errors
    /// [`CudaError::NoDriver`]; [`CudaError::Driver`].
    pub fn count() -> Result<u32, CudaError> {
        driver::start()?;
        let mut count = 0;
        // SAFETY: only writes `count`.
        let counted = unsafe { sys::cuDeviceGetCount(&raw mut count) };
        driver::check(counted, "count the GPUs", ADVICE_GENERAL)?;
        Ok(count.unsigned_abs())
    }

    fn retain(device: CUdevice) -> Result<Self, CudaError> {
        let mut uuid = MaybeUninit::<sys::CUuuid>::uninit();
        // SAFETY: only writes `uuid`.
        let read = unsafe { sys::cuDeviceGetUuid_v2(uuid.as_mut_ptr(), device) };
        driver::check(read, "read the UUID of a GPU", ADVICE_GENERAL)?;
        // SAFETY: success means written.
        let uuid = unsafe { uuid.assume_init() };
        let id = HexBytes(uuid.bytes.map(|byte| byte as u8));
        let mut context = ptr::null_mut();
        // SAFETY: only writes `context`; released in `drop`.
        let retained = unsafe { sys::cuDevicePrimaryCtxRetain(&raw mut context, device) };
        driver::check(
            retained,
            "use a GPU",
            "see in nvidia-smi whether its memory is full, or another process uses it exclusively",
        )?;
        Ok(Self { retained: Arc::new(Retained { device, context, id }) })
    }

    /// Its UUID, by which every process knows it.
    pub fn id(&self) -> GpuId {
        self.retained.id
    }

    /// Its primary context.
    pub fn context(&self) -> CUcontext {
        self.retained.context
    }

    /// Runs `work` with the primary context current.
    pub(super) fn enter(&self) -> Result<Current, CudaError> {
        Current::push(self.retained.context)
    }

    pub(super) fn attribute(&self, attribute: CUdevice_attribute) -> Result<i32, CudaError> {
        let mut value = 0;
        // SAFETY: only writes `value`.
        let read =
            unsafe { sys::cuDeviceGetAttribute(&raw mut value, attribute, self.retained.device) };
        driver::check(read, "read an attribute of a GPU", ADVICE_GENERAL)?;
        Ok(value)
    }

    /// `bytes` of device memory from `address`, as the Manager can open them: offset 0 of the
    /// registered memory is `address`. The allocation must live until every region over it was
    /// unregistered or the session has ended.
    ///
    /// # Errors
    /// [`CudaError::NotExportable`] for memory without a handle, such as PyTorch's expandable
    /// segments; [`CudaError::OutOfAllocation`]; [`CudaError::OtherGpu`]; [`CudaError::Driver`].
    pub fn export(&self, address: CUdeviceptr, bytes: u64) -> Result<MemorySpec, CudaError> {
        let (base, allocation_bytes) = self.allocation(address)?;
        let _current = self.enter()?;
        let mut handle = MaybeUninit::<sys::CUipcMemHandle>::uninit();
        // SAFETY: only writes `handle`.
        let exported = unsafe { sys::cuIpcGetMemHandle(handle.as_mut_ptr(), base) };
        match exported {
            CUresult::CUDA_SUCCESS => {}
            CUresult::CUDA_ERROR_INVALID_VALUE | CUresult::CUDA_ERROR_NOT_SUPPORTED => {
                return Err(CudaError::NotExportable { address, name: driver::name(exported) });
            }
            error => driver::check(
                error,
                "make a CUDA IPC handle",
                "CUDA IPC needs Linux, a GPU that is not a MIG slice of another process, and \
                 memory that cuMemAlloc made",
            )?,
        }
        // Only now: in virtual memory the range is no allocation, and to exceed it not the cause.
        let offset = address - base;
        if offset.checked_add(bytes).is_none_or(|end| end > allocation_bytes) {
            return Err(CudaError::OutOfAllocation { address, bytes, base, allocation_bytes });
        }
        // SAFETY: success means written.
        let handle = unsafe { handle.assume_init() };
        let handle = HexBytes(handle.reserved.map(|byte| byte as u8));
        Ok(MemorySpec::Cuda { gpu: self.id(), handle, offset, bytes })
    }

    /// First address and bytes of the allocation that the device memory at `address` is part of.
    ///
    /// # Errors
    /// [`CudaError::OtherGpu`]; [`CudaError::NotExportable`] for memory that is no allocation;
    /// [`CudaError::Driver`].
    pub fn allocation(&self, address: CUdeviceptr) -> Result<(CUdeviceptr, u64), CudaError> {
        let _current = self.enter()?;
        if home(address)? != self.retained.device {
            return Err(CudaError::OtherGpu { address, gpu: self.id() });
        }
        let (mut base, mut size) = (0, 0);
        // SAFETY: writes `base` and `size` only; an address of nobody is an error.
        let found = unsafe { sys::cuMemGetAddressRange_v2(&raw mut base, &raw mut size, address) };
        match found {
            CUresult::CUDA_SUCCESS => Ok((base, size as u64)),
            // The address is one of this GPU, as was found above.
            _ => Err(CudaError::NotExportable { address, name: driver::name(found) }),
        }
    }
}

/// The device that `address` lies on.
fn home(address: CUdeviceptr) -> Result<CUdevice, CudaError> {
    let mut ordinal = 0_i32;
    // SAFETY: this attribute is an int, which is what is written.
    let read = unsafe {
        sys::cuPointerGetAttribute(
            (&raw mut ordinal).cast(),
            CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
            address,
        )
    };
    driver::check(
        read,
        "find the GPU of device memory",
        "give the address of memory that cuMemAlloc made and that was not freed",
    )?;
    Ok(ordinal)
}

impl Drop for Retained {
    fn drop(&mut self) {
        // SAFETY: retained once, released once. A driver that is shutting down says so: no matter.
        let _released = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: a machine without a driver gets an error that says what to do. Where there is one,
    /// the same calls answer with a GPU or with the driver's own words.
    #[test]
    fn a_missing_driver_is_an_error_and_no_panic() {
        for answer in [Gpu::open(0).map(drop), Gpu::current().map(drop), Gpu::count().map(drop)] {
            let Err(error) = answer else { continue };
            let text = error.to_string();
            match error {
                CudaError::NoDriver => assert!(text.contains("libcuda.so.1"), "{text}"),
                CudaError::Driver { name, .. } => assert!(text.contains(&name), "{text}"),
                error => assert_eq!(error, CudaError::NoContext),
            }
        }
    }
}
