//! The kernel that moves the rectangles of a table: kernel/copy_rows.cu, which ships as PTX and is
//! compiled by the driver when it is loaded.
#![allow(unsafe_code, reason = "passes on what its caller promises")]

use std::ffi::CStr;
use std::ptr;

use super::driver::{CudaError, Function, Stream};
use super::table::Table;

const PTX: &CStr = {
    match CStr::from_bytes_with_nul(concat!(include_str!("kernel/copy_rows.ptx"), "\0").as_bytes())
    {
        Ok(text) => text,
        Err(_) => panic!("PTX is text"),
    }
};
/// Threads of a block.
const THREADS: u32 = 512;
/// Most blocks: more do not copy faster, and multiprocessors are the engine's.
const BLOCKS_MAX: u32 = 64;

/// Loaded in the context that was current.
#[derive(Debug)]
pub(super) struct Kernel(Function);

impl Kernel {
    /// # Errors
    /// The driver or the GPU is too old for the PTX.
    pub(super) fn load() -> Result<Self, CudaError> {
        Function::load(PTX, c"copy_rows").map(Self)
    }

    /// Orders the copies of all rectangles of `table`.
    ///
    /// # Safety
    /// As [`Stream::copy`], for each of the rectangles.
    pub(super) unsafe fn launch(&self, stream: &Stream, table: &Table) -> Result<(), CudaError> {
        let blocks = table.pieces().div_ceil(THREADS / 32).min(BLOCKS_MAX);
        // SAFETY: the kernel's one parameter is a `Table`; it touches the bytes of its rectangles
        // and no others, for which the caller vouches.
        unsafe { stream.launch(&self.0, (blocks, THREADS), ptr::from_ref(table).cast()) }
    }
}
