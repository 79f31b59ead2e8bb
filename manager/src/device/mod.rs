//! Copies between device pages of the engines and page images in DRAM.
//!
//! A [`Device`] takes commands and gives back their ends; both directions run at once and neither
//! call ever waits. [`HostDevice`] serves engines whose KV lies in host memory.

mod cuda;
mod devices;
mod host;
mod lane;
mod region;

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use orbitkv_shm_protocol::segment::DoneWords;
use orbitkv_shm_protocol::telemetry::CopyMethod;

use crate::core::{CopyFault, CopyPage, Direction, Nanos, RegionKind, Ticket};

pub use cuda::{
    CudaDevice, CudaError, CudaImportError, CudaImporter, CudaMemory, Gpu, Gpus, NoCuda,
};
pub use devices::Devices;
pub use host::{HostDevice, HostMemory, ImportError, MemoryWay, PeerHandle};
pub use region::{DeviceRegion, PageLayout, Placement, RegionError};

/// Commands of one direction that may be submitted and not yet polled.
pub const COMMANDS_MAX: usize = 512;

/// Something that copies. One thread owns it; its work happens elsewhere.
pub trait Device: Send {
    /// Takes a command. Gives it back when [`COMMANDS_MAX`] of its direction are outstanding, or
    /// after [`stop`](Self::stop).
    ///
    /// Commands of one direction may end in any order: a long one does not hold up a short one.
    /// Until its end is polled, device pages and extents of the command belong to the device.
    #[expect(clippy::result_large_err, reason = "a refused command comes back whole")]
    fn submit(&mut self, command: CopyCommand) -> Result<(), CopyCommand>;

    /// Commands for `region` will probably come soon. A hint, for devices whose threads sleep deeply.
    fn expect(&mut self, _region: &DeviceRegion) {}

    /// The end of one command, if any is waiting. From then on the device touches neither its pages
    /// nor its DRAM.
    fn poll(&mut self) -> Option<CopyEnd>;

    /// Commands submitted whose end was not polled yet.
    fn outstanding(&self) -> usize;

    /// Takes no more commands, finishes every accepted one and returns when no thread of the device
    /// runs any more. The ends can still be polled.
    fn stop(&mut self);
}

/// Memory of an engine that a device can reach.
#[derive(Debug)]
pub enum DeviceMemory {
    /// Host memory.
    Host(HostMemory),
    /// Memory of a GPU.
    Cuda(CudaMemory),
}

impl DeviceMemory {
    /// Bytes that the engine offered, from offset 0.
    pub fn bytes(&self) -> u64 {
        match self {
            Self::Host(memory) => memory.bytes(),
            Self::Cuda(memory) => memory.bytes(),
        }
    }

    /// What it is for `core`, and which device copies from it and to it.
    pub fn kind(&self) -> RegionKind {
        match self {
            Self::Host(_) => RegionKind::Host,
            Self::Cuda(_) => RegionKind::Gpu,
        }
    }

    /// Whether one command may name both.
    fn is_beside(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Host(_), Self::Host(_)) => true,
            (Self::Cuda(memory), Self::Cuda(other)) => memory.gpu() == other.gpu(),
            _ => false,
        }
    }
}

/// An event of an engine: whether what it recorded before is done.
pub trait DeviceEvent: fmt::Debug + Send + Sync {
    /// Whether all work recorded by the event is done, without waiting for it.
    ///
    /// # Errors
    /// The event, or the device behind it, is no more.
    fn has_passed(&self) -> Result<bool, CopyError>;
}

/// What a copy waits for before it touches a byte.
#[derive(Clone, Debug)]
pub struct Fence {
    /// The event.
    pub event: Arc<dyn DeviceEvent>,
    /// Its index in the session's pool, for messages.
    pub index: u32,
    /// When it is not waited for any more: the copy ends with [`CopyError::FenceTimeout`].
    pub until: Instant,
}

impl Fence {
    /// Whether the copy may begin. Never waits.
    pub(crate) fn look(&self) -> Result<bool, CopyError> {
        let passed = self.event.has_passed().map_err(|error| match error {
            CopyError::BrokenFence { code, .. } => {
                CopyError::BrokenFence { fence: self.index, code }
            }
            CopyError::FenceGivenUp { .. } => CopyError::FenceGivenUp { fence: self.index },
            error => error,
        })?;
        if !passed && Instant::now() >= self.until {
            return Err(CopyError::FenceTimeout { fence: self.index });
        }
        Ok(passed)
    }
}

/// The done words of an operation, and what to store there.
#[derive(Clone, Debug)]
pub struct DoneWord {
    /// The session's words.
    pub words: DoneWords,
    /// Index of the operation, below the session's credits.
    pub operation_index: u32,
    /// Words of that operation: 1, or one a layer of the region.
    pub count: u32,
    /// Stored after the last byte of the operation or layer.
    pub value: u32,
}

/// One copy of whole pages.
pub struct CopyCommand {
    /// Names it in its end.
    pub ticket: Ticket,
    /// Which way.
    pub direction: Direction,
    /// Device side. Kept alive by the command.
    pub region: Arc<DeviceRegion>,
    /// What goes where, in order; each extent holds at least `image_bytes`.
    pub pages: Vec<CopyPage>,
    /// Bytes of one page image: the region's.
    pub image_bytes: u32,
    /// Event to wait for first.
    pub fence: Option<Fence>,
    /// With one word, it is stored once the last byte of the last page is in place, and only then.
    /// With one a layer, each is stored once its layer is in place on every page, in their order.
    pub done: Option<DoneWord>,
    /// Comes back in the end, filled; give a used one to save an allocation. Cleared first.
    pub checksums: Vec<u64>,
}

/// What moved how much: copies and bytes by [`CopyMethod`].
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Moved([(u64, u64); CopyMethod::ALL.len()]);

impl Moved {
    /// Adds copies of so many bytes together.
    pub fn add(&mut self, method: CopyMethod, copies: u64, bytes: u64) {
        let (known_copies, known_bytes) = &mut self.0[method as usize];
        *known_copies += copies;
        *known_bytes += bytes;
    }

    /// Copies and bytes of one method.
    pub fn of(&self, method: CopyMethod) -> (u64, u64) {
        self.0[method as usize]
    }
}

/// How a command ended.
pub struct CopyEnd {
    /// Of the command.
    pub ticket: Ticket,
    /// Of the command.
    pub direction: Direction,
    /// Pages from the first on whose bytes are all in place.
    pub pages_done: u32,
    /// Why not all of them are.
    pub error: Option<CopyError>,
    /// When the device first saw the last byte in place, or the end where that never came.
    pub ended_ns: Nanos,
    /// What was ordered for it.
    pub moved: Moved,
    /// Saves: xxh3-64 of the first `pages_done` images. Restores: empty.
    pub checksums: Vec<u64>,
    /// Of the command, for reuse.
    pub pages: Vec<CopyPage>,
}

impl CopyEnd {
    /// The fault as `core` is told.
    pub fn fault(&self) -> Option<CopyFault> {
        self.error.map(|error| error.fault())
    }
}

/// Why a copy stopped, with what a log line needs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum CopyError {
    /// The process that registered the memory is dead.
    #[error("engine process {pid} exited")]
    PeerExited {
        /// Its id while it lived.
        pid: i32,
    },
    /// Its nonce is gone: it is another program now, or it unmapped what it registered.
    #[error("engine process {pid} no longer holds its nonce: it called exec or unmapped it")]
    NonceLost {
        /// Its id.
        pid: i32,
    },
    /// A part of the registered memory cannot be accessed.
    #[error("memory of engine process {pid} at {address:#x}: errno {errno}")]
    Unreachable {
        /// Its id.
        pid: i32,
        /// First address that failed.
        address: u64,
        /// Positive errno; 0 when the kernel transferred nothing without saying why.
        errno: i32,
    },
    /// A memfd is shorter than when it was registered.
    #[error("engine memfd was cut to {size_bytes} bytes, {needed_bytes} were registered")]
    Truncated {
        /// Now.
        size_bytes: u64,
        /// Registered.
        needed_bytes: u64,
    },
    /// Reading or writing a memfd failed.
    #[error("engine memfd at offset {offset}: errno {errno}")]
    Descriptor {
        /// Offset of the failed part.
        offset: u64,
        /// Positive errno.
        errno: i32,
    },
    /// The event of the fence cannot be asked.
    #[error("fence {fence} cannot be waited for: CUDA error {code}")]
    BrokenFence {
        /// Its index in the session's pool.
        fence: u32,
        /// As the driver numbers it.
        code: u32,
    },
    /// What the fence was recorded after did not end in time.
    #[error("fence {fence} did not pass before the deadline of its operation")]
    FenceTimeout {
        /// Its index in the session's pool.
        fence: u32,
    },
    /// The operation was stopped before its fence had passed.
    #[error("the operation that waited for fence {fence} was stopped")]
    FenceGivenUp {
        /// Its index in the session's pool.
        fence: u32,
    },
    /// The driver did not take the order for a copy; the GPU works on.
    #[error("gpu {gpu} refused a copy: CUDA error {code}")]
    GpuRefused {
        /// Its number in this process.
        gpu: u32,
        /// As the driver numbers it.
        code: u32,
    },
    /// The GPU, or our context on it, is lost: it copies nothing any more.
    #[error("gpu {gpu} is lost: CUDA error {code}")]
    GpuLost {
        /// Its number in this process.
        gpu: u32,
        /// As the driver numbers it.
        code: u32,
    },
    /// The command does not fit its region or the image memory: a bug of the caller.
    #[error("page {page} of the command does not fit its region or image memory")]
    BadCommand {
        /// Position in the command.
        page: u32,
    },
}

impl CopyError {
    /// The fault as `core` is told.
    pub const fn fault(self) -> CopyFault {
        match self {
            Self::PeerExited { .. }
            | Self::NonceLost { .. }
            | Self::Unreachable { .. }
            | Self::Truncated { .. } => CopyFault::Peer,
            Self::Descriptor { errno, .. } => match errno {
                libc::ENOMEM | libc::ENOSPC | libc::EIO => CopyFault::Device,
                _ => CopyFault::Peer,
            },
            Self::BrokenFence { .. } => CopyFault::Fence,
            Self::FenceTimeout { .. } | Self::FenceGivenUp { .. } => CopyFault::FenceTimeout,
            Self::GpuRefused { .. } | Self::GpuLost { .. } | Self::BadCommand { .. } => {
                CopyFault::Device
            }
        }
    }

    /// Whether the session must end: the peer behind the memory is not the one that registered it
    /// any more, or nothing can reach that memory again.
    pub const fn ends_session(self) -> bool {
        matches!(self, Self::PeerExited { .. } | Self::NonceLost { .. } | Self::GpuLost { .. })
    }
}
