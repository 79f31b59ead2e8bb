//! The kernels of kernels/kernels.cu, which ship as PTX: the driver compiles them when they are
//! loaded.

use std::ffi::{CStr, CString, c_void};
use std::ptr;

use cudarc::driver::sys::{self, CUdeviceptr, CUfunction, CUmodule};
use orbitkv_engine::cuda::CudaError;

use super::ADVICE;
use super::memory::Buffer;
use super::stream::Stream;

const PTX: &str = include_str!("../../kernels/kernels.ptx");
/// Threads of a block.
const THREADS: u32 = 512;
/// Most blocks of a kernel that touches pages.
const BLOCKS_MAX: u64 = 1024;
/// Blocks of a gather or scatter: more do not copy faster.
const BLOCKS_OF_A_COPY: u32 = 64;
/// Blocks of arithmetic: no fewer than any GPU has multiprocessors.
const BLOCKS_OF_WORK: u32 = 256;

/// All kernels, loaded in the current context.
#[derive(Debug)]
pub struct Kernels {
    module: CUmodule,
    spin: CUfunction,
    spin_until: CUfunction,
    work: CUfunction,
    fill: CUfunction,
    compare: CUfunction,
    gather: CUfunction,
    scatter: CUfunction,
}

/// `Pages` of kernels.cu.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct PagesArgument {
    bases: CUdeviceptr,
    pages: CUdeviceptr,
    stride: u64,
    length: u64,
    segments: u32,
    count: u32,
}

const _: () = assert!(size_of::<PagesArgument>() == 40);

/// Pages of the GPU, as the kernels find them: part s of page p begins at `bases[s] + p * stride`.
#[derive(Debug)]
pub struct PlacedPages {
    bases: Buffer,
    pages: Buffer,
    stride: u64,
    length: u64,
    segments: u32,
    count: u32,
}

impl PlacedPages {
    /// `pages` whose parts of `length` bytes begin at `bases` for page 0 and `stride` further for
    /// each next.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    ///
    /// # Panics
    /// When parts are not whole 16 bytes.
    pub fn new(
        bases: &[CUdeviceptr],
        pages: &[u32],
        stride: u64,
        length: u64,
    ) -> Result<Self, CudaError> {
        assert!(length.is_multiple_of(16) && stride.is_multiple_of(16), "whole vectors");
        let (segments, count) = (bases.len() as u32, pages.len() as u32);
        let (bases, pages) = (Buffer::of(bases)?, Buffer::of(pages)?);
        Ok(Self { bases, pages, stride, length, segments, count })
    }

    /// Parts of a page.
    pub fn segments(&self) -> u32 {
        self.segments
    }

    fn argument(&self) -> PagesArgument {
        PagesArgument {
            bases: self.bases.address(),
            pages: self.pages.address(),
            stride: self.stride,
            length: self.length,
            segments: self.segments,
            count: self.count,
        }
    }

    fn blocks(&self) -> u32 {
        (u64::from(self.count) * u64::from(self.segments)).clamp(1, BLOCKS_MAX) as u32
    }
}

/// What the pages should hold: the first of them is page `first_page` of `seed`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Content {
    /// Of all words.
    pub seed: u64,
    /// Number of the first page.
    pub first_page: u32,
}

impl Kernels {
    pub(super) fn load() -> Result<Self, CudaError> {
        let source = CString::new(PTX).expect("PTX is text");
        let mut module = ptr::null_mut();
        // SAFETY: PTX that ends in zero; unloaded in `drop`.
        let loaded = unsafe { sys::cuModuleLoadData(&raw mut module, source.as_ptr().cast()) };
        CudaError::check(
            loaded,
            "load the kernels",
            "they need a GPU from Volta on and a driver from 535 on",
        )?;
        let find = |name: &CStr| {
            let mut function = ptr::null_mut();
            // SAFETY: the module was loaded; the name ends in zero.
            let found =
                unsafe { sys::cuModuleGetFunction(&raw mut function, module, name.as_ptr()) };
            CudaError::check(found, "find a kernel", "run .ci/kernels.py").map(|()| function)
        };
        Ok(Self {
            module,
            spin: find(c"spin")?,
            spin_until: find(c"spin_until")?,
            work: find(c"work")?,
            fill: find(c"fill")?,
            compare: find(c"compare")?,
            gather: find(c"gather")?,
            scatter: find(c"scatter")?,
        })
    }

    /// Keeps the stream busy for so many nanoseconds.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn spin(&self, stream: &Stream, mut ns: u64) -> Result<(), CudaError> {
        self.launch(self.spin, (1, 1), stream, &mut [(&raw mut ns).cast()])
    }

    /// Keeps the stream busy until the word at an address of pinned memory is not zero, at most so
    /// many nanoseconds.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn spin_until(
        &self,
        stream: &Stream,
        mut address: u64,
        mut ns_max: u64,
    ) -> Result<(), CudaError> {
        let arguments = &mut [(&raw mut address).cast(), (&raw mut ns_max).cast()];
        self.launch(self.spin_until, (1, 1), stream, arguments)
    }

    /// Does a fixed amount of arithmetic on every multiprocessor. Nothing is ever stored in `sink`.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn work(&self, stream: &Stream, mut loops: u64, sink: &Buffer) -> Result<(), CudaError> {
        let mut sink = sink.address();
        let arguments = &mut [(&raw mut loops).cast(), (&raw mut sink).cast()];
        self.launch(self.work, (BLOCKS_OF_WORK, THREADS), stream, arguments)
    }

    /// Writes pages.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    pub fn fill(
        &self,
        stream: &Stream,
        pages: &PlacedPages,
        content: Content,
    ) -> Result<(), CudaError> {
        let mut argument = pages.argument();
        let Content { mut seed, mut first_page } = content;
        let arguments =
            &mut [(&raw mut argument).cast(), (&raw mut seed).cast(), (&raw mut first_page).cast()];
        self.launch(self.fill, (pages.blocks(), THREADS), stream, arguments)
    }

    /// Adds to the word of eight bytes in `wrong` how many of the pages' words, in the parts of
    /// `segments`, are not as they should be.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    ///
    /// # Panics
    /// When there are not so many parts, or `wrong` is smaller.
    pub fn compare(
        &self,
        stream: &Stream,
        pages: &PlacedPages,
        content: Content,
        segments: std::ops::Range<u32>,
        wrong: &Buffer,
    ) -> Result<(), CudaError> {
        assert!(segments.end <= pages.segments && !segments.is_empty() && wrong.bytes() >= 8);
        let mut argument = pages.argument();
        let Content { mut seed, mut first_page } = content;
        let (mut first, mut end, mut counter) = (segments.start, segments.end, wrong.address());
        let arguments = &mut [
            (&raw mut argument).cast(),
            (&raw mut seed).cast(),
            (&raw mut first_page).cast(),
            (&raw mut first).cast(),
            (&raw mut end).cast(),
            (&raw mut counter).cast(),
        ];
        self.launch(self.compare, (pages.blocks(), THREADS), stream, arguments)
    }

    /// Copies pages to their images at an address of pinned memory, or back.
    ///
    /// # Errors
    /// [`CudaError::Driver`].
    ///
    /// # Safety
    /// The images lie in pinned memory that lives until it is done, and nobody else touches them or
    /// the pages before.
    pub unsafe fn copy(
        &self,
        stream: &Stream,
        pages: &PlacedPages,
        mut images: u64,
        to_device: bool,
    ) -> Result<(), CudaError> {
        let mut argument = pages.argument();
        let arguments = &mut [(&raw mut argument).cast(), (&raw mut images).cast()];
        let kernel = if to_device { self.scatter } else { self.gather };
        self.launch(kernel, (BLOCKS_OF_A_COPY, THREADS), stream, arguments)
    }

    fn launch(
        &self,
        kernel: CUfunction,
        (blocks, threads): (u32, u32),
        stream: &Stream,
        arguments: &mut [*mut c_void],
    ) -> Result<(), CudaError> {
        // SAFETY: every caller gives the arguments of its kernel in order and of its types; they
        // are read before the call returns. What they point to are buffers of the caller's types.
        let launched = unsafe {
            sys::cuLaunchKernel(
                kernel,
                blocks,
                1,
                1,
                threads,
                1,
                1,
                0,
                stream.raw(),
                arguments.as_mut_ptr(),
                ptr::null_mut(),
            )
        };
        CudaError::check(launched, "start a kernel", ADVICE)
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        // SAFETY: loaded once, unloaded once.
        let _unloaded = unsafe { sys::cuModuleUnload(self.module) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: what ships is for old drivers too, and has every kernel that is asked for.
    #[test]
    fn the_ptx_has_every_kernel() {
        assert!(CString::new(PTX).is_ok(), "the driver reads to the first zero");
        assert!(PTX.contains(".version 8.2") && PTX.contains(".target sm_70"));
        for kernel in ["spin", "spin_until", "work", "fill", "compare", "gather", "scatter"] {
            assert!(PTX.contains(&format!(".visible .entry {kernel}(")), "{kernel}");
        }
    }
}
