//! The copy engine of a real GPU.
#![allow(unsafe_code, reason = "passes on what its caller promises")]

use super::driver::{CudaError, PinnedWords, Stream};
use super::gpu::Gpu;
use super::plan::Rect;
use super::worker::{CopyEngine, STREAMS};
use crate::core::Direction;

/// Streams, and for each the word that it stores its marks to.
pub(super) struct Streams {
    streams: Vec<Stream>,
    marks: PinnedWords,
    pitch_max: u64,
}

impl Streams {
    /// Enters the context of `gpu` on this thread.
    pub(super) fn open(gpu: &Gpu) -> Result<Self, CudaError> {
        gpu.enter()?;
        let streams = (0..STREAMS).map(|_| Stream::create()).collect::<Result<_, _>>()?;
        let marks = PinnedWords::allocate(STREAMS)?;
        Ok(Self { streams, marks, pitch_max: gpu.pitch_max() })
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
}
