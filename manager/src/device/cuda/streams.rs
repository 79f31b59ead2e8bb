//! The copy engine of a real GPU, and the kernel that copies many small rows in its place.
#![allow(unsafe_code, reason = "passes on what its caller promises")]

use std::time::Instant;

use super::driver::{Batch, CudaError, PinnedWords, Stream};
use super::gpu::Gpu;
use super::kernel::Kernel;
use super::method::{Choice, Costs, Method};
use super::plan::Rect;
use super::table::Table;
use super::worker::{CopyEngine, STREAMS};
use crate::core::Direction;

/// Streams, and for each the word that it stores its marks to.
pub(super) struct Streams {
    streams: Vec<Stream>,
    marks: PinnedWords,
    /// Unless the driver does not take it.
    kernel: Option<Kernel>,
    /// Unless the driver takes no batches.
    batch: Option<Batch>,
    pitch_max: u64,
}

impl Streams {
    /// Enters the context of `gpu` on this thread.
    pub(super) fn open(gpu: &Gpu) -> Result<Self, CudaError> {
        gpu.enter()?;
        let streams = (0..STREAMS).map(|_| Stream::create()).collect::<Result<_, _>>()?;
        let marks = PinnedWords::allocate(STREAMS)?;
        let too_old = |error: &CudaError| {
            let gpu = gpu.ordinal();
            tracing::warn!(
                gpu,
                %error,
                "no kernel for copies of many small rows, they take longer: it needs a driver from \
                 535 on and a GPU from Volta on"
            );
        };
        let kernel = Kernel::load().inspect_err(too_old).ok();
        let batch = Batch::new();
        Ok(Self { streams, marks, kernel, batch, pitch_max: gpu.pitch_max() })
    }
}

impl CopyEngine for Streams {
    unsafe fn copy(
        &mut self,
        stream: usize,
        direction: Direction,
        rect: &Rect,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        unsafe { self.streams[stream].copy(direction, rect) }
    }

    unsafe fn copy_batch(
        &mut self,
        stream: usize,
        direction: Direction,
        rects: &[Rect],
    ) -> Result<(), CudaError> {
        if let Some(batch) = &mut self.batch {
            // SAFETY: the caller's promise.
            let Err(error) = (unsafe { self.streams[stream].copy_batch(batch, direction, rects) })
            else {
                return Ok(());
            };
            tracing::warn!(%error, "the driver takes no copies by the batch, from now on one by one");
            self.batch = None;
        }
        // What a batch that failed may have ordered is copied once more, behind it.
        for rect in rects {
            // SAFETY: the caller's promise.
            unsafe { self.streams[stream].copy(direction, rect) }?;
        }
        Ok(())
    }

    unsafe fn copy_rows(&mut self, stream: usize, table: &Table) -> Result<(), CudaError> {
        let Some(kernel) = &self.kernel else { return Err(CudaError::no_kernel()) };
        // SAFETY: the caller's promise.
        unsafe { kernel.launch(&self.streams[stream], table) }
    }

    unsafe fn store(&mut self, stream: usize, address: u64, value: u32) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        unsafe { self.streams[stream].store(address, value) }
    }

    fn mark(&mut self, stream: usize, sequence: u32) -> Result<(), CudaError> {
        // SAFETY: a word of `marks`, which lives as long as the streams: the worker drops both
        // after everything in flight was seen to end.
        unsafe { self.streams[stream].store(self.marks.address(stream), sequence) }
    }

    fn reached(&self, stream: usize) -> u32 {
        self.marks.load(stream)
    }

    fn is_idle(&self, stream: usize) -> Result<bool, CudaError> {
        self.streams[stream].is_idle()
    }

    fn pitch_max(&self) -> u64 {
        self.pitch_max
    }

    fn choice(&self) -> Choice {
        let mut costs = Costs::OF_H200;
        if self.batch.is_none() {
            costs.batched_ns = costs.order_ns;
        }
        match self.kernel {
            Some(_) => Choice::measured(costs, Instant::now()),
            None => Choice::only(Method::Orders),
        }
    }
}
