//! The only way from here into the driver.
//!
//! The law of this folder: the driver is looked for before its first call; every result is turned
//! into a [`CudaError`] that names it; what belongs to a context is used while that context is
//! current, and the caller's context is put back.

use std::ffi::CStr;
use std::ptr;
use std::sync::OnceLock;

use cudarc::driver::sys::{self, CUcontext, CUresult};

use super::error::CudaError;

/// What to do about an error of the driver that says all there is to say.
pub(super) const ADVICE_GENERAL: &str = "see nvidia-smi and the kernel log";

/// Loads and starts the driver, once a process.
pub(super) fn start() -> Result<(), CudaError> {
    static STARTED: OnceLock<Result<(), CudaError>> = OnceLock::new();
    STARTED
        .get_or_init(|| {
            // SAFETY: runs the initialisers of the driver's library, as any use of it does.
            if !unsafe { sys::is_culib_present() } {
                return Err(CudaError::NoDriver);
            }
            // SAFETY: the library is there; 0 is the only flag.
            let started = unsafe { sys::cuInit(0) };
            check(
                started,
                "start the CUDA driver",
                "see whether nvidia-smi lists a GPU; a forked child cannot use the driver that its \
                 parent had started",
            )
        })
        .clone()
}

/// An error unless `result` is success.
pub(super) fn check(
    result: CUresult,
    action: &'static str,
    advice: &'static str,
) -> Result<(), CudaError> {
    match result {
        CUresult::CUDA_SUCCESS => Ok(()),
        error => Err(CudaError::Driver { action, name: name(error), code: error as u32, advice }),
    }
}

/// The driver's own name of an error.
pub(super) fn name(error: CUresult) -> String {
    let mut text = ptr::null();
    // SAFETY: only writes `text`, to which it gives a constant of the library.
    let found = unsafe { sys::cuGetErrorName(error, &raw mut text) };
    if found != CUresult::CUDA_SUCCESS || text.is_null() {
        return format!("{error:?}");
    }
    // SAFETY: the driver's names are constants that end in zero.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_string_lossy().into_owned()
}

/// Makes a context current for as long as it lives.
#[derive(Debug)]
pub(super) struct Current(());

impl Current {
    pub(super) fn push(context: CUcontext) -> Result<Self, CudaError> {
        // SAFETY: the context is retained by its `Gpu`.
        let pushed = unsafe { sys::cuCtxPushCurrent_v2(context) };
        check(pushed, "make the context of the GPU current", ADVICE_GENERAL)?;
        Ok(Self(()))
    }
}

impl Drop for Current {
    fn drop(&mut self) {
        let mut ours = ptr::null_mut();
        // SAFETY: takes off what `push` put on: the guard never leaves the function of its call.
        let _popped = unsafe { sys::cuCtxPopCurrent_v2(&raw mut ours) };
    }
}
