//! Done words of a session that the GPUs may store.

use std::collections::HashMap;
use std::ptr::NonNull;
use std::sync::{Arc, Weak};

use orbitkv_shm_protocol::segment::DoneWords;

use super::driver::{self, CudaError};
use super::gpu::{Gpu, Gpus};
use super::reaper::Remains;

/// Registered with the driver until it is dropped.
#[derive(Debug)]
pub(super) struct RegisteredWords {
    gpus: Arc<Gpus>,
    gpu: Arc<Gpu>,
    words: DoneWords,
}

impl RegisteredWords {
    fn register(gpus: &Arc<Gpus>, gpu: &Arc<Gpu>, words: &DoneWords) -> Result<Self, CudaError> {
        gpu.enter()?;
        let (start, bytes) = words.region();
        if let Some(start) = NonNull::new(start) {
            match words_stay_mapped(start, bytes) {
                // By memory of this session that was refused or released a moment ago.
                Err(error) if error.is_registered() => {
                    gpus.reaper().wait();
                    words_stay_mapped(start, bytes)?;
                }
                registered => registered?,
            }
        }
        Ok(Self { gpus: Arc::clone(gpus), gpu: Arc::clone(gpu), words: words.clone() })
    }
}

#[allow(unsafe_code, reason = "promises the driver that memory stays mapped")]
fn words_stay_mapped(start: NonNull<u8>, bytes: usize) -> Result<(), CudaError> {
    // SAFETY: mapped as long as a clone of the words lives; the one that `RegisteredWords` keeps goes
    // to the reaper, which drops it after the registration.
    unsafe { driver::register(start, bytes) }
}

impl Drop for RegisteredWords {
    fn drop(&mut self) {
        let (gpu, words) = (Arc::clone(&self.gpu), self.words.clone());
        self.gpus.reaper().take(Remains::Words { gpu, words });
    }
}

/// Which words are registered: once a session, however much memory it registers.
#[derive(Debug, Default)]
pub(super) struct WordsRegistry {
    by_address: HashMap<usize, Weak<RegisteredWords>>,
}

impl WordsRegistry {
    pub(super) fn of_session(
        &mut self,
        gpus: &Arc<Gpus>,
        gpu: &Arc<Gpu>,
        words: &DoneWords,
    ) -> Result<Arc<RegisteredWords>, CudaError> {
        self.by_address.retain(|_, known| known.strong_count() > 0);
        let address = words.region().0.addr();
        if let Some(known) = self.by_address.get(&address).and_then(Weak::upgrade) {
            return Ok(known);
        }
        let registered = Arc::new(RegisteredWords::register(gpus, gpu, words)?);
        self.by_address.insert(address, Arc::downgrade(&registered));
        Ok(registered)
    }
}
