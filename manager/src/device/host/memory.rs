//! Engine memory in its three ways: mapped, through the process, through the descriptor.
//!
//! Whatever the engine does to its memory meanwhile ends as a [`CopyError`] or as its own wrong
//! bytes. Nothing here creates a reference to memory that an engine can write.
#![allow(unsafe_code, reason = "maps engine memory and copies to and from raw addresses")]

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::ptr::NonNull;

use orbitkv_shm_protocol::bootstrap::message::MemorySpec;
use rustix::fs::{OFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};

use super::import::ImportError;
use super::peer::PeerHandle;
use super::process::{self, ProcessMemory};
use crate::core::Direction;
use crate::device::CopyError;
use crate::image::DramSlice;

/// Superblock magic of the file system behind `memfd_create`.
const TMPFS_MAGIC: i64 = 0x0102_1994;
/// Superblock magic behind `MFD_HUGETLB`.
const HUGETLBFS_MAGIC: i64 = 0x9584_58f6;

/// Memory that one engine offered, reachable by the Manager.
#[derive(Debug)]
pub struct HostMemory {
    bytes: u64,
    reach: Reach,
}

#[derive(Debug)]
enum Reach {
    Mapped(Mapping),
    Process(ProcessMemory),
    Descriptor(OwnedFd),
}

/// How a memory is reached.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MemoryWay {
    /// A sealed memfd, mapped.
    Mapped,
    /// `process_vm_readv/writev`.
    Process,
    /// An unsealed memfd, read and written through its descriptor.
    Descriptor,
}

impl MemoryWay {
    /// As tools print it.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Mapped => "mapped",
            Self::Process => "process_vm",
            Self::Descriptor => "descriptor",
        }
    }
}

impl HostMemory {
    /// Makes the memory that `spec` describes reachable. `descriptor` is the one that travelled
    /// with the message; `peer` the process that sent it.
    ///
    /// A memfd sealed against shrinking is mapped: then no act of the engine can turn an access
    /// into SIGBUS. One without that seal is never mapped.
    ///
    /// # Errors
    ///
    /// The cause, see [`ImportError`]. Any field of `spec` may have any value.
    pub fn import(
        spec: &MemorySpec,
        descriptor: Option<OwnedFd>,
        peer: &PeerHandle,
    ) -> Result<Self, ImportError> {
        match *spec {
            MemorySpec::Memfd { bytes } => {
                let descriptor = descriptor.ok_or(ImportError::DescriptorMissing)?;
                import_memfd(descriptor, bytes)
            }
            MemorySpec::Process { address, bytes, nonce_address, nonce } => {
                let memory =
                    ProcessMemory::probe(peer.clone(), address, bytes, nonce_address, nonce)?;
                Ok(Self { bytes, reach: Reach::Process(memory) })
            }
            MemorySpec::Cuda { .. } => Err(ImportError::NoCuda),
        }
    }

    /// Bytes that were offered, from offset 0.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// How it is reached.
    pub fn way(&self) -> MemoryWay {
        match self.reach {
            Reach::Mapped(_) => MemoryWay::Mapped,
            Reach::Process(_) => MemoryWay::Process,
            Reach::Descriptor(_) => MemoryWay::Descriptor,
        }
    }

    /// Whether pieces of both may go into one [`transfer`](Self::transfer).
    pub(super) fn batches_with(&self, other: &Self) -> bool {
        match (&self.reach, &other.reach) {
            (Reach::Process(memory), Reach::Process(other)) => memory.same_process(other),
            _ => std::ptr::eq(self, other),
        }
    }

    /// Copies parts, each `(memory, offset in it, image)`, in order; returns the bytes moved. Every
    /// memory must batch with `self`. On an error, the bytes that were in place before it.
    pub(super) fn transfer<'a>(
        &self,
        direction: Direction,
        mut parts: impl Iterator<Item = (&'a HostMemory, u64, DramSlice<'a>)>,
        scratch: &mut process::Scratch,
    ) -> Result<u64, (u64, CopyError)> {
        match &self.reach {
            Reach::Mapped(mapping) => parts.try_fold(0, |moved, (_, offset, image)| {
                mapping.copy(direction, offset, image).map_err(|error| (moved, error))?;
                Ok(moved + image.bytes() as u64)
            }),
            Reach::Descriptor(file) => {
                check_size(file, self.bytes).map_err(|error| (0, error))?;
                let moved = parts.try_fold(0, |moved, (_, offset, image)| {
                    copy_file(file, self.bytes, direction, offset, image)
                        .map_err(|error| (moved, error))?;
                    Ok(moved + image.bytes() as u64)
                })?;
                // A write past a new end would have lengthened the file again: what was cut off
                // before it is lost, and nothing of this batch can be vouched for.
                check_size(file, self.bytes).map_err(|error| (0, error))?;
                Ok(moved)
            }
            Reach::Process(process) => {
                let parts = parts.map_while(|(memory, offset, image)| match &memory.reach {
                    Reach::Process(memory) => Some((memory.address(offset, image.bytes())?, image)),
                    _ => None,
                });
                process.transfer(direction, parts, scratch)
            }
        }
    }
}

fn import_memfd(descriptor: OwnedFd, bytes: u64) -> Result<HostMemory, ImportError> {
    let failed = |operation| move |errno| ImportError::System { operation, errno };
    let seals = match rustix::fs::fcntl_get_seals(&descriptor) {
        Ok(seals) => seals,
        Err(Errno::INVAL) => return Err(ImportError::NotMemfd),
        Err(errno) => return Err(ImportError::System { operation: "F_GET_SEALS", errno }),
    };
    // Reading another file system may block for ever, and huge memfds can be taken away by a hole:
    // their reserve is not the mapper's.
    let file_system = rustix::fs::fstatfs(&descriptor).map_err(failed("fstatfs"))?;
    match file_system.f_type as i64 {
        TMPFS_MAGIC => {}
        HUGETLBFS_MAGIC => return Err(ImportError::HugetlbMemfd),
        _ => return Err(ImportError::NotMemfd),
    }
    let flags = rustix::fs::fcntl_getfl(&descriptor).map_err(failed("F_GETFL"))?;
    if !flags.contains(OFlags::RDWR) {
        return Err(ImportError::ReadOnly);
    }
    if seals.intersects(SealFlags::WRITE | SealFlags::FUTURE_WRITE) {
        return Err(ImportError::WriteSealed);
    }
    // After the seals: where shrinking is sealed, this size is the least for ever.
    let status = rustix::fs::fstat(&descriptor).map_err(failed("fstat"))?;
    let size_bytes = u64::try_from(status.st_size).unwrap_or(0);
    let Some(length) = usize::try_from(bytes).ok().filter(|&length| length > 0) else {
        return Err(ImportError::BadRange);
    };
    if size_bytes < bytes {
        return Err(ImportError::TooShort { size_bytes, bytes });
    }
    let reach = if seals.contains(SealFlags::SHRINK) {
        Reach::Mapped(Mapping::map(&descriptor, length)?)
    } else {
        Reach::Descriptor(descriptor)
    };
    Ok(HostMemory { bytes, reach })
}

/// A mapped memfd that can neither shrink nor be sealed against this mapping. Unmapped on drop.
#[derive(Debug)]
struct Mapping {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping belongs to the process; all access goes through `copy`, by raw address.
unsafe impl Send for Mapping {}
// SAFETY: as above; concurrent copies race no worse than the engine itself does.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn map(descriptor: &OwnedFd, bytes: usize) -> Result<Self, ImportError> {
        let failed = |operation| move |errno| ImportError::System { operation, errno };
        // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
        let start = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                descriptor.as_fd(),
                0,
            )
        }
        .map_err(failed("mmap"))?;
        let start = NonNull::new(start.cast()).ok_or(ImportError::BadRange)?;
        let mapping = Self { start, bytes };
        for advice in [Advice::LinuxDontFork, Advice::LinuxDontDump] {
            // SAFETY: the range is the new mapping; neither advice touches its contents.
            unsafe { rustix::mm::madvise(start.as_ptr().cast(), bytes, advice) }
                .map_err(failed("madvise"))?;
        }
        Ok(mapping)
    }

    fn copy(
        &self,
        direction: Direction,
        offset: u64,
        image: DramSlice<'_>,
    ) -> Result<(), CopyError> {
        let outside = CopyError::BadCommand { page: 0 };
        let offset = usize::try_from(offset).map_err(|_| outside)?;
        if offset.checked_add(image.bytes()).is_none_or(|end| end > self.bytes) {
            return Err(outside);
        }
        // SAFETY: offset + length is at most the mapping's length (checked just above).
        let engine = unsafe { self.start.as_ptr().add(offset) };
        let (to, from) = match direction {
            Direction::Save => (image.as_ptr(), engine.cast_const()),
            Direction::Restore => (engine, image.as_ptr().cast_const()),
        };
        // SAFETY: both sides are valid for `image.bytes()` bytes (checked; promised to
        // `DramSlice::new`) and distinct mappings, so they do not overlap. The mapping cannot
        // shrink (seal checked at import). The engine may write at the same time: the bytes are
        // opaque, no reference to them exists, and the C function is not inlined into code that
        // could rely on their value. A torn page is the engine's own doing.
        unsafe { libc::memcpy(to.cast(), from.cast(), image.bytes()) };
        Ok(())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range is this mapping; copies borrow it, so none runs any more.
        let unmapped = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.bytes) };
        debug_assert!(unmapped.is_ok(), "munmap of engine memory: {unmapped:?}");
    }
}

/// Fails when a memfd is shorter than what was registered.
fn check_size(file: &OwnedFd, needed_bytes: u64) -> Result<(), CopyError> {
    let status = rustix::fs::fstat(file)
        .map_err(|errno| CopyError::Descriptor { offset: 0, errno: errno.raw_os_error() })?;
    let size_bytes = u64::try_from(status.st_size).unwrap_or(0);
    if size_bytes < needed_bytes {
        return Err(CopyError::Truncated { size_bytes, needed_bytes });
    }
    Ok(())
}

/// Copies one part through the descriptor, short transfers continued.
fn copy_file(
    file: &OwnedFd,
    capacity: u64,
    direction: Direction,
    offset: u64,
    image: DramSlice<'_>,
) -> Result<(), CopyError> {
    let outside = CopyError::BadCommand { page: 0 };
    let end = offset.checked_add(image.bytes() as u64).filter(|&end| end <= capacity);
    if end.is_none_or(|end| i64::try_from(end).is_err()) {
        return Err(outside);
    }
    let mut done = 0;
    while done < image.bytes() {
        let at = offset + done as u64;
        let start = image.as_ptr().wrapping_add(done);
        let left = image.bytes() - done;
        let moved = match direction {
            // SAFETY: `left` bytes from `start` lie within the slice, which is valid for writes.
            Direction::Save => unsafe {
                libc::pread(file.as_raw_fd(), start.cast(), left, at as libc::off_t)
            },
            // SAFETY: `left` bytes from `start` lie within the slice, which is valid for reads.
            Direction::Restore => unsafe {
                libc::pwrite(file.as_raw_fd(), start.cast(), left, at as libc::off_t)
            },
        };
        match usize::try_from(moved) {
            Ok(0) => {
                return Err(CopyError::Truncated { size_bytes: at, needed_bytes: capacity });
            }
            Ok(moved) => done += moved,
            Err(_) => match last_errno() {
                libc::EINTR => {}
                errno => return Err(CopyError::Descriptor { offset: at, errno }),
            },
        }
    }
    Ok(())
}

/// The calling thread's errno, positive.
pub(super) fn last_errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}
