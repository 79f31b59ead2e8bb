//! Memory of the GPU and pinned memory of the host.

use std::ffi::{c_char, c_void};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, Ordering};

use cudarc::driver::sys::{
    self, CU_MEMHOSTALLOC_DEVICEMAP, CU_MEMHOSTALLOC_PORTABLE, CUdeviceptr, CUmemAccess_flags,
    CUmemAccessDesc, CUmemAllocationGranularity_flags, CUmemAllocationHandleType,
    CUmemAllocationProp, CUmemAllocationProp_st__bindgen_ty_1, CUmemAllocationType, CUmemLocation,
    CUmemLocationType,
};
use orbitkv_engine::cuda::CudaError;
use orbitkv_shm_protocol::bootstrap::message::MemorySpec;

use super::ADVICE;

/// Where the GPU is full.
const ROOM: &str = "see in nvidia-smi who holds its memory";

/// One allocation on the GPU. Freeing it waits for work that uses it.
#[derive(Debug)]
pub struct Buffer {
    address: CUdeviceptr,
    bytes: u64,
}

impl Buffer {
    /// `bytes` of undefined content.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn new(bytes: u64) -> Result<Self, CudaError> {
        let mut address = 0;
        // SAFETY: only writes `address`; freed in `drop`.
        let made = unsafe { sys::cuMemAlloc_v2(&raw mut address, bytes as usize) };
        CudaError::check(made, "allocate memory of the GPU", ROOM)?;
        Ok(Self { address, bytes })
    }

    /// A buffer that holds `words`.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn of<T: bytemuck::Pod>(words: &[T]) -> Result<Self, CudaError> {
        let bytes: &[u8] = bytemuck::cast_slice(words);
        let buffer = Self::new(bytes.len().max(1) as u64)?;
        // SAFETY: both sides hold so many bytes; the call returns when they were read.
        let copied =
            unsafe { sys::cuMemcpyHtoD_v2(buffer.address, bytes.as_ptr().cast(), bytes.len()) };
        CudaError::check(copied, "write memory of the GPU", ADVICE)?;
        Ok(buffer)
    }

    /// Its first address.
    pub fn address(&self) -> CUdeviceptr {
        self.address
    }

    /// Its bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Stores `byte` everywhere, and waits until it is there.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn set(&self, byte: u8) -> Result<(), CudaError> {
        // SAFETY: the whole allocation.
        let set = unsafe { sys::cuMemsetD8_v2(self.address, byte, self.bytes as usize) };
        CudaError::check(set, "set memory of the GPU", ADVICE)?;
        // SAFETY: the default stream always lives. Other streams here do not wait for it, nor it for
        // them.
        let waited = unsafe { sys::cuStreamSynchronize(ptr::null_mut()) };
        CudaError::check(waited, "wait for the GPU", ADVICE)
    }

    /// The first bytes of it.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    ///
    /// # Panics
    /// When it has fewer.
    pub fn read(&self, bytes: usize) -> Result<Vec<u8>, CudaError> {
        assert!(bytes as u64 <= self.bytes);
        let mut out = vec![0; bytes];
        // SAFETY: both sides hold so many bytes; the call returns when they were written.
        let read = unsafe { sys::cuMemcpyDtoH_v2(out.as_mut_ptr().cast(), self.address, bytes) };
        CudaError::check(read, "read memory of the GPU", ADVICE)?;
        Ok(out)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: allocated once, freed once.
        let _freed = unsafe { sys::cuMemFree_v2(self.address) };
    }
}

/// Memory of another process on the GPU, opened by CUDA IPC.
#[derive(Debug)]
pub struct Imported {
    base: CUdeviceptr,
    offset: u64,
}

impl Imported {
    /// Opens what the other process exported.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    ///
    /// # Panics
    /// When it is no memory of a GPU.
    pub fn open(spec: &MemorySpec) -> Result<Self, CudaError> {
        let MemorySpec::Cuda { handle, offset, .. } = spec else { panic!("memory of a GPU") };
        let handle = sys::CUipcMemHandle { reserved: handle.0.map(|byte| byte as c_char) };
        let flags = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        let mut base = 0;
        // SAFETY: only writes `base`; the driver checks the handle. Closed in `drop`.
        let opened = unsafe { sys::cuIpcOpenMemHandle_v2(&raw mut base, handle, flags) };
        CudaError::check(opened, "open memory of another process", ADVICE)?;
        Ok(Self { base, offset: *offset })
    }

    /// First address of what was exported, for this process.
    pub fn address(&self) -> CUdeviceptr {
        self.base + self.offset
    }
}

impl Drop for Imported {
    fn drop(&mut self) {
        // SAFETY: opened once, closed once.
        let _closed = unsafe { sys::cuIpcCloseMemHandle(self.base) };
    }
}

/// Pinned memory of the host that the GPU can reach.
#[derive(Debug)]
pub struct Pinned {
    start: NonNull<c_void>,
    bytes: u64,
}

impl Pinned {
    /// `bytes`, all zero.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn new(bytes: u64) -> Result<Self, CudaError> {
        let mut start = ptr::null_mut();
        let flags = CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: only writes `start`; freed in `drop`.
        let made = unsafe { sys::cuMemHostAlloc(&raw mut start, bytes as usize, flags) };
        CudaError::check(made, "allocate pinned memory", "free some memory of the host")?;
        let start = NonNull::new(start).expect("success gives an address");
        // SAFETY: so many bytes were allocated.
        unsafe { start.cast::<u8>().write_bytes(0, bytes as usize) };
        Ok(Self { start, bytes })
    }

    /// First address on the host, which is its address on the GPU too.
    pub fn address(&self) -> u64 {
        self.start.as_ptr().expose_provenance() as u64
    }

    /// Its bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// A word of it, which the GPU may store or read at any time.
    ///
    /// # Panics
    /// Beyond the end.
    pub fn word(&self, at: usize) -> &AtomicU32 {
        assert!((at as u64 + 1) * 4 <= self.bytes, "beyond the end");
        // SAFETY: within the allocation, as was checked.
        let word = unsafe { self.start.cast::<u32>().add(at) };
        // SAFETY: aligned, alive while `self` is, and only ever accessed as an atomic here.
        unsafe { AtomicU32::from_ptr(word.as_ptr()) }
    }

    /// Stores a word for the GPU to see.
    pub fn store(&self, at: usize, value: u32) {
        self.word(at).store(value, Ordering::Release);
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: allocated once, freed once.
        let _freed = unsafe { sys::cuMemFreeHost(self.start.as_ptr()) };
    }
}

/// Memory of the virtual memory API, as PyTorch's expandable segments are made of.
#[derive(Debug)]
pub struct VirtualMemory {
    address: CUdeviceptr,
    bytes: usize,
    handle: sys::CUmemGenericAllocationHandle,
}

impl VirtualMemory {
    /// At least `bytes` on the GPU with this number.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn new(ordinal: i32, bytes: u64) -> Result<Self, CudaError> {
        let location =
            CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: ordinal };
        let properties = CUmemAllocationProp {
            type_: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            requestedHandleTypes: CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE,
            location,
            win32HandleMetaData: ptr::null_mut(),
            allocFlags: CUmemAllocationProp_st__bindgen_ty_1 {
                compressionType: 0,
                gpuDirectRDMACapable: 0,
                usage: 0,
                reserved: [0; 4],
            },
        };
        let mut unit = 0;
        let minimum = CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        // SAFETY: reads `properties`, writes `unit`.
        let found = unsafe {
            sys::cuMemGetAllocationGranularity(&raw mut unit, &raw const properties, minimum)
        };
        CudaError::check(found, "read the unit of virtual memory", ADVICE)?;
        let bytes = (bytes as usize).next_multiple_of(unit.max(1));
        let mut handle = 0;
        // SAFETY: reads `properties`, writes `handle`.
        let made = unsafe { sys::cuMemCreate(&raw mut handle, bytes, &raw const properties, 0) };
        CudaError::check(made, "make virtual memory", ROOM)?;
        let mut address = 0;
        // SAFETY: only writes `address`.
        let reserved = unsafe { sys::cuMemAddressReserve(&raw mut address, bytes, 0, 0, 0) };
        CudaError::check(reserved, "reserve addresses", ADVICE)?;
        // SAFETY: the range was reserved and the handle made just now.
        let mapped = unsafe { sys::cuMemMap(address, bytes, 0, handle, 0) };
        CudaError::check(mapped, "map virtual memory", ADVICE)?;
        let access = CUmemAccessDesc {
            location,
            flags: CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: one descriptor for the range that was mapped just now.
        let allowed = unsafe { sys::cuMemSetAccess(address, bytes, &raw const access, 1) };
        CudaError::check(allowed, "allow access to virtual memory", ADVICE)?;
        Ok(Self { address, bytes, handle })
    }

    /// Its first address.
    pub fn address(&self) -> CUdeviceptr {
        self.address
    }

    /// Its bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes as u64
    }
}

impl Drop for VirtualMemory {
    fn drop(&mut self) {
        // SAFETY: mapped once, unmapped once.
        let _unmapped = unsafe { sys::cuMemUnmap(self.address, self.bytes) };
        // SAFETY: reserved once, freed once.
        let _freed = unsafe { sys::cuMemAddressFree(self.address, self.bytes) };
        // SAFETY: made once, released once.
        let _released = unsafe { sys::cuMemRelease(self.handle) };
    }
}

/// Free memory of the current GPU.
///
/// # Errors
/// [`CudaError::Driver`].
pub fn free_bytes() -> Result<u64, CudaError> {
    let (mut free, mut total) = (0, 0);
    // SAFETY: writes `free` and `total` only.
    let read = unsafe { sys::cuMemGetInfo_v2(&raw mut free, &raw mut total) };
    CudaError::check(read, "read the free memory of the GPU", ADVICE)?;
    Ok(free as u64)
}
