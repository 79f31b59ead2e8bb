//! Streams of this engine that wait for the Manager's done words, with no CPU in between.

use std::ffi::c_void;

use cudarc::driver::sys::{
    self, CU_MEMHOSTREGISTER_DEVICEMAP, CU_MEMHOSTREGISTER_PORTABLE, CU_MEMHOSTREGISTER_READ_ONLY,
    CUdevice_attribute, CUdeviceptr, CUstream, CUstreamWaitValue_flags,
};
use orbitkv_shm_protocol::segment::DoneWordsReader;

use super::driver::{self, ADVICE_GENERAL};
use super::error::CudaError;
use super::gpu::Gpu;
use crate::client::Client;
use crate::handles::{Operation, Tag};

/// The done words of a session, as the GPU reads them. Keeps their memory mapped; outlives the
/// client if it must. Drop it when no stream waits any more: that waits for the GPU.
#[derive(Debug)]
pub struct DoneWordsOnGpu {
    gpu: Gpu,
    words: DoneWordsReader,
    on_gpu: CUdeviceptr,
    tag: Tag,
}

impl DoneWordsOnGpu {
    /// Registers the done words of a client's session with the driver.
    ///
    /// # Errors
    /// [`CudaError::NoReadOnlyRegistration`] where the GPU cannot read memory that this process
    /// may only read; [`CudaError::Driver`]; [`CudaError::NoSuchWord`] in a forked child.
    pub fn register(gpu: &Gpu, client: &Client) -> Result<Self, CudaError> {
        let words = client.done_words().ok_or(CudaError::NoSuchWord { layer: 0 })?;
        let supported = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED;
        if gpu.attribute(supported)? == 0 {
            return Err(CudaError::NoReadOnlyRegistration { gpu: gpu.id() });
        }
        let _current = gpu.enter()?;
        let (start, bytes) = words.region();
        let start = start.cast::<c_void>().cast_mut();
        let flags = CU_MEMHOSTREGISTER_READ_ONLY
            | CU_MEMHOSTREGISTER_DEVICEMAP
            | CU_MEMHOSTREGISTER_PORTABLE;
        // SAFETY: `words` keeps the whole pages of the region mapped until they are unregistered
        // in `drop`; the driver only reads them.
        let registered = unsafe { sys::cuMemHostRegister_v2(start, bytes, flags) };
        driver::check(
            registered,
            "register the done words with the GPU",
            "raise the locked-memory limit (ulimit -l) of this process",
        )?;
        let mut on_gpu = 0;
        // SAFETY: only writes `on_gpu`; the address was registered just now.
        let found = unsafe { sys::cuMemHostGetDevicePointer_v2(&raw mut on_gpu, start, 0) };
        // From here on `drop` unregisters.
        let here = Self { gpu: gpu.clone(), words, on_gpu, tag: client.tag() };
        driver::check(found, "find the done words on the GPU", ADVICE_GENERAL)?;
        Ok(here)
    }

    /// Makes `stream` wait until a restore of `client`, whose words these are, has ended, or until a
    /// `layer` of one by layer is in place.
    ///
    /// A stream also passes when the operation failed: read
    /// [`is_done`](crate::Client::is_done) before anything that was computed from its pages is
    /// reported or saved.
    ///
    /// # Errors
    /// [`CudaError::NoSuchWord`]; [`CudaError::WordOutOfReach`]; [`CudaError::Driver`].
    ///
    /// # Safety
    /// `stream` is null, which is the default stream, or was made and not destroyed.
    pub unsafe fn wait(
        &self,
        stream: CUstream,
        client: &Client,
        operation: &Operation,
        layer: Option<u32>,
    ) -> Result<(), CudaError> {
        let word = client.word_of(operation, layer).filter(|_| operation.tag == self.tag);
        let word = word.ok_or(CudaError::NoSuchWord { layer: layer.unwrap_or(0) })?;
        let (index, wanted) = (operation.id.index, operation.id.done_word());
        let found = self.words.load(index, word);
        if !can_be_compared(found, wanted) {
            return Err(CudaError::WordOutOfReach { operation_index: index, word: found, wanted });
        }
        let address = self.on_gpu + self.words.region_offset(index, word) as u64;
        let _current = self.gpu.enter()?;
        let at_least = CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_GEQ as u32;
        // SAFETY: the word lies in what was registered, which lives until the streams have passed:
        // unregistering waits for the GPU. The stream is alive as the caller says.
        let waits = unsafe { sys::cuStreamWaitValue32_v2(stream, address, wanted, at_least) };
        driver::check(
            waits,
            "make a stream wait for a done word",
            "give a stream of the GPU and context that the words were registered with",
        )
    }
}

/// Whether the GPU's comparison tells an operation's words from what stood there before.
///
/// It is cyclic: `(found - wanted) as i32 >= 0`. Generations only grow, and begin again at 1 behind
/// the largest, so what was stored by an earlier use of the index is below, unless 2^30 uses without
/// a done word lie in between.
fn can_be_compared(found: u32, wanted: u32) -> bool {
    let is_there = found == wanted || found == wanted | 1;
    is_there || (found.wrapping_sub(wanted) as i32) < 0
}

impl Drop for DoneWordsOnGpu {
    fn drop(&mut self) {
        let Ok(_current) = self.gpu.enter() else { return };
        let (start, _) = self.words.region();
        // SAFETY: registered once, unregistered once, still mapped.
        let _unregistered = unsafe { sys::cuMemHostUnregister(start.cast_mut().cast()) };
    }
}

#[cfg(test)]
mod tests {
    use orbitkv_shm_protocol::ids::OperationId;

    use super::*;

    /// Goal: a stream waits for the word of its own operation and never passes for an older one.
    /// Method: the GPU's comparison against what every kind of earlier use leaves behind.
    #[test]
    fn an_earlier_use_of_an_index_lets_no_stream_pass() {
        let passes = |found: u32, wanted: u32| (found.wrapping_sub(wanted) as i32) >= 0;
        let last = OperationId::GENERATION_MAX;
        for generation in [1, 2, 3, 1 << 29, 1 << 30, last - 1, last] {
            let operation = OperationId { index: 0, generation };
            let wanted = operation.done_word();
            for word in [wanted, operation.failed_word()] {
                assert!(can_be_compared(word, wanted) && passes(word, wanted), "{generation}");
            }
            let mut earlier = generation;
            for back in 1..=3 {
                if earlier == 1 && generation <= 3 {
                    // Nobody used it before: the word of a new session.
                    assert!(can_be_compared(0, wanted) && !passes(0, wanted));
                    break;
                }
                earlier = if earlier == 1 { last } else { earlier - 1 };
                let before = OperationId { index: 0, generation: earlier };
                for word in [before.done_word(), before.failed_word()] {
                    let comparable = can_be_compared(word, wanted);
                    assert!(comparable && !passes(word, wanted), "{back} before {generation}");
                }
            }
        }
    }

    #[test]
    fn behind_the_largest_generation_comes_the_first() {
        let last = OperationId { index: 0, generation: OperationId::GENERATION_MAX };
        let next = OperationId::next_generation(last.generation);
        let wanted = OperationId { index: 0, generation: next }.done_word();
        for word in [last.done_word(), last.failed_word()] {
            assert!(can_be_compared(word, wanted));
        }
    }

    #[test]
    fn a_word_from_half_the_generations_ago_is_refused() {
        let wanted = OperationId { index: 0, generation: (1 << 30) + 5 }.done_word();
        assert!(!can_be_compared(2, wanted));
        assert!(!can_be_compared(wanted + 2, wanted));
    }
}
