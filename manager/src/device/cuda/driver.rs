//! The calls of the CUDA driver that the Manager makes, each checked. The driver is loaded when it is
//! asked for: a host without one runs the same binary.
//!
//! Every call but those of [`load`] needs a context that is current on the calling thread
//! ([`Context::enter`]).
#![allow(unsafe_code, reason = "calls the CUDA driver")]

use std::ffi::{CStr, c_char, c_void};
use std::mem::MaybeUninit;
use std::ptr::{self, NonNull};

use cudarc::driver::sys;
use orbitkv_shm_protocol::bootstrap::message::{GpuId, HexBytes, IpcHandle};

use super::plan::Rect;
use crate::core::Direction;

/// A call of the driver that failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CudaError {
    call: &'static str,
    result: sys::CUresult,
}

impl CudaError {
    /// As the driver numbers it.
    pub fn code(self) -> u32 {
        self.result as u32
    }

    /// As the driver names it, `CUDA_ERROR_…`.
    pub fn name(self) -> &'static str {
        let mut name = ptr::null();
        // SAFETY: `name` outlives the call, which stores the address of a static text, or null.
        unsafe { sys::cuGetErrorName(self.result, &raw mut name) };
        if name.is_null() {
            return "an unknown error";
        }
        // SAFETY: a static text of the driver, which is never unloaded.
        unsafe { CStr::from_ptr::<'static>(name) }.to_str().unwrap_or("an unknown error")
    }

    /// Whether it was registered before.
    pub(super) fn is_registered(self) -> bool {
        self.result == sys::CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED
    }

    /// Whether every later call of the context answers the same, until the process ends.
    pub(super) fn is_sticky(self) -> bool {
        use sys::CUresult as Known;
        matches!(
            self.result,
            Known::CUDA_ERROR_ECC_UNCORRECTABLE
                | Known::CUDA_ERROR_NVLINK_UNCORRECTABLE
                | Known::CUDA_ERROR_ILLEGAL_ADDRESS
                | Known::CUDA_ERROR_LAUNCH_TIMEOUT
                | Known::CUDA_ERROR_CONTEXT_IS_DESTROYED
                | Known::CUDA_ERROR_ASSERT
                | Known::CUDA_ERROR_HARDWARE_STACK_ERROR
                | Known::CUDA_ERROR_ILLEGAL_INSTRUCTION
                | Known::CUDA_ERROR_MISALIGNED_ADDRESS
                | Known::CUDA_ERROR_INVALID_ADDRESS_SPACE
                | Known::CUDA_ERROR_INVALID_PC
                | Known::CUDA_ERROR_LAUNCH_FAILED
        )
    }

    /// There is no kernel to launch.
    pub(super) fn no_kernel() -> Self {
        Self { call: "cuModuleGetFunction", result: sys::CUresult::CUDA_ERROR_NOT_FOUND }
    }

    /// What a twin answers.
    #[cfg(test)]
    pub(super) fn of_twin(call: &'static str) -> Self {
        Self { call, result: sys::CUresult::CUDA_ERROR_ILLEGAL_ADDRESS }
    }

    /// Whether memory ran out, on the GPU or for pinning.
    pub(super) fn is_out_of_memory(self) -> bool {
        self.result == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY
    }
}

impl std::fmt::Display for CudaError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} answered {} ({})", self.call, self.name(), self.code())
    }
}

impl std::error::Error for CudaError {}

fn check(call: &'static str, result: sys::CUresult) -> Result<(), CudaError> {
    match result {
        sys::CUresult::CUDA_SUCCESS => Ok(()),
        result => Err(CudaError { call, result }),
    }
}

/// True when it is done, false when it is not ready yet.
fn check_ready(call: &'static str, result: sys::CUresult) -> Result<bool, CudaError> {
    match result {
        sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
        result => check(call, result).map(|()| true),
    }
}

/// Whether the driver's library is on this host. Nothing else here may be called before it said so.
pub(super) fn is_present() -> bool {
    // SAFETY: loads the driver's library, which runs its initialisers only.
    unsafe { sys::is_culib_present() }
}

/// Starts the driver and lists the GPUs of this process, in its order.
pub(super) fn list() -> Result<Vec<Gpu>, CudaError> {
    // SAFETY: takes no memory.
    check("cuInit", unsafe { sys::cuInit(0) })?;
    let mut count = 0;
    // SAFETY: the result has room for what is stored.
    check("cuDeviceGetCount", unsafe { sys::cuDeviceGetCount(&raw mut count) })?;
    (0..count).map(Gpu::get).collect()
}

/// A GPU as the driver lists it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Gpu {
    pub(super) ordinal: u32,
    pub(super) id: GpuId,
    device: sys::CUdevice,
}

impl Gpu {
    fn get(ordinal: i32) -> Result<Self, CudaError> {
        let mut device = 0;
        // SAFETY: the result has room for what is stored.
        check("cuDeviceGet", unsafe { sys::cuDeviceGet(&raw mut device, ordinal) })?;
        let mut uuid = MaybeUninit::<sys::CUuuid>::zeroed();
        // SAFETY: the result has room for what is stored.
        check("cuDeviceGetUuid", unsafe { sys::cuDeviceGetUuid_v2(uuid.as_mut_ptr(), device) })?;
        // SAFETY: zeroed above, and any bytes are a value of it.
        let bytes = unsafe { uuid.assume_init() }.bytes.map(|byte| byte as u8);
        Ok(Self { ordinal: ordinal as u32, id: HexBytes(bytes), device })
    }

    pub(super) fn name(self) -> Result<String, CudaError> {
        let mut name = [0; 128];
        // SAFETY: the array and its length agree.
        let result =
            unsafe { sys::cuDeviceGetName(name.as_mut_ptr(), name.len() as i32, self.device) };
        check("cuDeviceGetName", result)?;
        let bytes = name.iter().take_while(|byte| **byte != 0).map(|byte: &c_char| *byte as u8);
        Ok(String::from_utf8_lossy(&bytes.collect::<Vec<u8>>()).into_owned())
    }

    pub(super) fn attribute(self, attribute: Attribute) -> Result<i64, CudaError> {
        use sys::CUdevice_attribute_enum as Known;
        let attribute = match attribute {
            Attribute::HostPointers => {
                Known::CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
            }
            Attribute::PitchMax => Known::CU_DEVICE_ATTRIBUTE_MAX_PITCH,
        };
        let mut value = 0;
        // SAFETY: the result has room for what is stored.
        let result = unsafe { sys::cuDeviceGetAttribute(&raw mut value, attribute, self.device) };
        check("cuDeviceGetAttribute", result)?;
        Ok(value.into())
    }
}

/// What a GPU can do.
#[derive(Clone, Copy, Debug)]
pub(super) enum Attribute {
    /// 1: memory of the host has one address for CPU and GPU once it is registered.
    HostPointers,
    /// Longest distance of two rows of a copy, in bytes.
    PitchMax,
}

/// The primary context of a GPU, kept for the life of this value.
#[derive(Debug)]
pub(super) struct Context {
    context: sys::CUcontext,
    device: sys::CUdevice,
}

// SAFETY: a context is a handle of the driver, which takes calls from every thread.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    pub(super) fn retain(gpu: Gpu) -> Result<Self, CudaError> {
        let mut context = ptr::null_mut();
        // SAFETY: the result has room for what is stored.
        let result = unsafe { sys::cuDevicePrimaryCtxRetain(&raw mut context, gpu.device) };
        check("cuDevicePrimaryCtxRetain", result)?;
        Ok(Self { context, device: gpu.device })
    }

    /// Makes it the one that calls of this thread mean.
    pub(super) fn enter(&self) -> Result<(), CudaError> {
        // SAFETY: retained as long as `self` lives.
        check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.context) })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once by `retain`. A process that ends does not ask what came of it.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

/// Pins `bytes` bytes at `start` and lets every GPU reach them.
///
/// # Safety
/// The range is mapped and stays so until [`unregister`] has returned; what the copies and stores
/// ordered later write there is governed by whoever orders them.
pub(super) unsafe fn register(start: NonNull<u8>, bytes: usize) -> Result<(), CudaError> {
    let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
    // SAFETY: the caller's promise.
    let result = unsafe { sys::cuMemHostRegister_v2(start.as_ptr().cast(), bytes, flags) };
    check("cuMemHostRegister", result)
}

/// Undoes [`register`]. Waits for copies in flight anywhere on the GPU.
pub(super) fn unregister(start: NonNull<u8>) -> Result<(), CudaError> {
    // SAFETY: the driver knows its registrations and refuses anything else.
    check("cuMemHostUnregister", unsafe { sys::cuMemHostUnregister(start.as_ptr().cast()) })
}

/// Memory of the driver's own, pinned and reached by every GPU, for words that they store.
#[derive(Debug)]
pub(super) struct PinnedWords {
    start: NonNull<u8>,
}

// SAFETY: plain memory; accessed through atomics and by the GPU only.
unsafe impl Send for PinnedWords {}

impl PinnedWords {
    /// Bytes from one word to the next: no two in a pair of cache lines.
    const STRIDE: usize = 128;

    pub(super) fn allocate(words: usize) -> Result<Self, CudaError> {
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        let (mut start, bytes) = (ptr::null_mut(), words * Self::STRIDE);
        // SAFETY: the result has room for what is stored.
        let result = unsafe { sys::cuMemHostAlloc(&raw mut start, bytes, flags) };
        check("cuMemHostAlloc", result)?;
        let error =
            CudaError { call: "cuMemHostAlloc", result: sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY };
        let start = NonNull::new(start.cast::<u8>()).ok_or(error)?;
        // SAFETY: so many bytes were just allocated, and nothing else refers to them.
        unsafe { start.as_ptr().write_bytes(0, bytes) };
        Ok(Self { start })
    }

    /// Address of a word below the number allocated.
    pub(super) fn address(&self, word: usize) -> u64 {
        self.start.as_ptr().addr() as u64 + (word * Self::STRIDE) as u64
    }

    /// What the GPU stored last.
    pub(super) fn load(&self, word: usize) -> u32 {
        // SAFETY: within the allocation for every word below the number allocated.
        let at = unsafe { self.start.as_ptr().add(word * Self::STRIDE) };
        // SAFETY: aligned, alive as long as `self`, and stored to by the GPU only.
        let word = unsafe { std::sync::atomic::AtomicU32::from_ptr(at.cast()) };
        word.load(std::sync::atomic::Ordering::Acquire)
    }
}

impl Drop for PinnedWords {
    fn drop(&mut self) {
        // SAFETY: allocated by `allocate`; whoever ordered stores to it waited for them.
        let _ = unsafe { sys::cuMemFreeHost(self.start.as_ptr().cast()) };
    }
}

/// An allocation of another process, mapped here until it is closed.
#[derive(Debug)]
pub(super) struct OpenMemory {
    pub(super) base: u64,
    pub(super) bytes: u64,
}

pub(super) fn open_memory(handle: &IpcHandle) -> Result<OpenMemory, CudaError> {
    let handle = sys::CUipcMemHandle { reserved: handle.0.map(|byte| byte as c_char) };
    let flags = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
    let mut address = 0;
    // SAFETY: the driver checks the handle, whatever bytes it holds.
    let result = unsafe { sys::cuIpcOpenMemHandle_v2(&raw mut address, handle, flags) };
    check("cuIpcOpenMemHandle", result)?;
    let (mut base, mut bytes) = (0, 0);
    // SAFETY: the results have room for what is stored.
    let result = unsafe { sys::cuMemGetAddressRange_v2(&raw mut base, &raw mut bytes, address) };
    if let Err(error) = check("cuMemGetAddressRange", result) {
        // The first error is the one to tell.
        let _ = close_memory(address);
        return Err(error);
    }
    Ok(OpenMemory { base, bytes: bytes as u64 })
}

/// Undoes [`open_memory`]. May wait for work in flight on the GPU.
pub(super) fn close_memory(base: u64) -> Result<(), CudaError> {
    // SAFETY: the driver knows what it has opened and refuses anything else.
    check("cuIpcCloseMemHandle", unsafe { sys::cuIpcCloseMemHandle(base) })
}

/// An event of another process.
#[derive(Debug)]
pub(super) struct OpenEvent(sys::CUevent);

// SAFETY: an event is a handle of the driver, which takes calls from every thread.
unsafe impl Send for OpenEvent {}
// SAFETY: as above.
unsafe impl Sync for OpenEvent {}

impl OpenEvent {
    pub(super) fn open(handle: &IpcHandle) -> Result<Self, CudaError> {
        let handle = sys::CUipcEventHandle { reserved: handle.0.map(|byte| byte as c_char) };
        let mut event = ptr::null_mut();
        // SAFETY: the driver checks the handle, whatever bytes it holds.
        let result = unsafe { sys::cuIpcOpenEventHandle(&raw mut event, handle) };
        check("cuIpcOpenEventHandle", result)?;
        Ok(Self(event))
    }

    /// Whether all that the event recorded is done.
    pub(super) fn has_passed(&self) -> Result<bool, CudaError> {
        // SAFETY: open as long as `self` lives.
        check_ready("cuEventQuery", unsafe { sys::cuEventQuery(self.0) })
    }

    /// Needs the context in which it was opened.
    pub(super) fn close(self) -> Result<(), CudaError> {
        // SAFETY: opened by `open`, used by nobody after this.
        check("cuEventDestroy", unsafe { sys::cuEventDestroy_v2(self.0) })
    }
}

/// A kernel. Unloaded by the driver with the context.
#[derive(Debug)]
pub(super) struct Function(sys::CUfunction);

impl Function {
    /// Compiles `ptx` for the current GPU and finds the kernel of that name in it.
    pub(super) fn load(ptx: &CStr, name: &CStr) -> Result<Self, CudaError> {
        let mut module = ptr::null_mut();
        // SAFETY: a text that ends in zero; the result has room for what is stored.
        let result = unsafe { sys::cuModuleLoadData(&raw mut module, ptx.as_ptr().cast()) };
        check("cuModuleLoadData", result)?;
        let mut function = ptr::null_mut();
        // SAFETY: the module was loaded; the name ends in zero.
        let result = unsafe { sys::cuModuleGetFunction(&raw mut function, module, name.as_ptr()) };
        check("cuModuleGetFunction", result)?;
        Ok(Self(function))
    }
}

/// What the driver is told of copies that it takes in one call, kept so that it is not allocated for
/// each.
#[derive(Debug)]
pub(super) struct Batch {
    to: Vec<sys::CUdeviceptr>,
    from: Vec<sys::CUdeviceptr>,
    bytes: Vec<usize>,
}

impl Batch {
    /// `None` with a driver before 12.8.
    pub(super) fn new() -> Option<Self> {
        // SAFETY: the driver is on this host: it was asked for GPUs before.
        let library = unsafe { sys::culib() };
        // SAFETY: the symbol is looked for, not used.
        let symbol = unsafe { library.get::<*const c_void>(b"cuMemcpyBatchAsync\0") };
        symbol.ok().map(|_| Self { to: Vec::new(), from: Vec::new(), bytes: Vec::new() })
    }
}

/// A queue of copies, kernels and stores that run in their order. Destroyed by the driver with the context.
#[derive(Debug)]
pub(super) struct Stream(sys::CUstream);

// SAFETY: a stream is a handle of the driver, which takes calls from every thread.
unsafe impl Send for Stream {}

impl Stream {
    pub(super) fn create() -> Result<Self, CudaError> {
        let mut stream = ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the result has room for what is stored.
        check("cuStreamCreate", unsafe { sys::cuStreamCreate(&raw mut stream, flags) })?;
        Ok(Self(stream))
    }

    /// Whether everything ordered is done.
    pub(super) fn is_idle(&self) -> Result<bool, CudaError> {
        // SAFETY: alive as long as `self`.
        check_ready("cuStreamQuery", unsafe { sys::cuStreamQuery(self.0) })
    }

    /// Orders a copy between memory of the GPU and registered host memory.
    ///
    /// # Safety
    /// Both sides of `rect` are mapped, and stay so and belong to this copy until a later store on
    /// this stream is seen, or the stream is idle or dead.
    pub(super) unsafe fn copy(&self, direction: Direction, rect: &Rect) -> Result<(), CudaError> {
        use sys::CUmemorytype_enum::{CU_MEMORYTYPE_DEVICE as DEVICE, CU_MEMORYTYPE_HOST as HOST};
        let host = ptr::with_exposed_provenance_mut::<c_void>(rect.host as usize);
        let device_pitch = rect.device_pitch as usize;
        let host_pitch = rect.host_pitch as usize;
        // SAFETY: all of its fields are numbers, addresses and enumerations that have a zero.
        let mut copy: sys::CUDA_MEMCPY2D = unsafe { MaybeUninit::zeroed().assume_init() };
        copy.WidthInBytes = rect.width as usize;
        copy.Height = rect.rows as usize;
        match direction {
            Direction::Restore => {
                (copy.srcMemoryType, copy.srcHost, copy.srcPitch) = (HOST, host, host_pitch);
                (copy.dstMemoryType, copy.dstDevice) = (DEVICE, rect.device);
                copy.dstPitch = device_pitch;
            }
            Direction::Save => {
                (copy.srcMemoryType, copy.srcDevice) = (DEVICE, rect.device);
                copy.srcPitch = device_pitch;
                (copy.dstMemoryType, copy.dstHost, copy.dstPitch) = (HOST, host, host_pitch);
            }
        }
        // SAFETY: the caller's promise; the driver copies the description before it returns.
        check("cuMemcpy2DAsync", unsafe { sys::cuMemcpy2DAsync_v2(&raw const copy, self.0) })
    }

    /// Orders copies of single rows between memory of the GPU and registered host memory, in no order
    /// among them. What is refused may have been ordered in part.
    ///
    /// # Safety
    /// As [`copy`](Self::copy), for each of `rects`.
    pub(super) unsafe fn copy_batch(
        &self,
        batch: &mut Batch,
        direction: Direction,
        rects: &[Rect],
    ) -> Result<(), CudaError> {
        let Batch { to, from, bytes } = batch;
        let (device, host) = match direction {
            Direction::Restore => (&mut *to, &mut *from),
            Direction::Save => (&mut *from, &mut *to),
        };
        device.clear();
        device.extend(rects.iter().map(|rect| rect.device));
        host.clear();
        host.extend(rects.iter().map(|rect| rect.host));
        bytes.clear();
        bytes.extend(rects.iter().map(|rect| rect.width as usize));
        // SAFETY: all of its fields are numbers and enumerations that have a zero.
        let mut attributes: sys::CUmemcpyAttributes =
            unsafe { MaybeUninit::zeroed().assume_init() };
        attributes.srcAccessOrder = sys::CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
        // The copy engine, not the multiprocessors of an engine that computes.
        attributes.flags = sys::CUmemcpyFlags::CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE as u32;
        let (mut all_from, mut failed) = (0, 0);
        // SAFETY: the caller's promise; the arrays have one length, and the driver reads them before it
        // returns.
        let result = unsafe {
            sys::cuMemcpyBatchAsync(
                to.as_mut_ptr(),
                from.as_mut_ptr(),
                bytes.as_mut_ptr(),
                rects.len(),
                &raw mut attributes,
                &raw mut all_from,
                1,
                &raw mut failed,
                self.0,
            )
        };
        check("cuMemcpyBatchAsync", result)
    }

    /// Orders a kernel of one parameter in `blocks` blocks of `threads` threads.
    ///
    /// # Safety
    /// `parameter` is what the kernel takes. What it then touches is mapped, and stays so and belongs
    /// to it until a later store on this stream is seen, or the stream is idle or dead.
    pub(super) unsafe fn launch(
        &self,
        function: &Function,
        (blocks, threads): (u32, u32),
        parameter: *const c_void,
    ) -> Result<(), CudaError> {
        let mut parameters = [parameter.cast_mut()];
        let (parameters, extra) = (parameters.as_mut_ptr(), ptr::null_mut());
        // SAFETY: the caller's promise; the driver copies the parameter before it returns.
        let result = unsafe {
            let (kernel, stream) = (function.0, self.0);
            sys::cuLaunchKernel(kernel, blocks, 1, 1, threads, 1, 1, 0, stream, parameters, extra)
        };
        check("cuLaunchKernel", result)
    }

    /// Orders a store of `value` after everything before it, with all that this wrote visible.
    ///
    /// # Safety
    /// `address` is an aligned word of registered host memory that stays mapped until the store is
    /// seen, or the stream is idle or dead.
    pub(super) unsafe fn store(&self, address: u64, value: u32) -> Result<(), CudaError> {
        // SAFETY: the caller's promise. No flag: with the memory barrier.
        let result = unsafe { sys::cuStreamWriteValue32_v2(self.0, address, value, 0) };
        check("cuStreamWriteValue32", result)
    }
}
