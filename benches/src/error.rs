//! Why a benchmark has no numbers.

use std::io;
use std::path::PathBuf;

use orbitkv_engine::cuda::CudaError;
use orbitkv_manager::pool::PoolError;
use orbitkv_manager::ssd::SsdError;

use crate::manager::ManagerError;

/// Why a benchmark ended without numbers.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// An answer was not what it must be: whatever was measured is worth nothing.
    #[error("wrong answer: {0}")]
    Wrong(Box<str>),
    /// A system call failed.
    #[error("{operation}: {source}")]
    System {
        /// What was tried.
        operation: &'static str,
        /// The system's answer.
        source: io::Error,
    },
    /// The control path is measured between two cores.
    #[error("this process may use {cpus} CPU; the measurement needs 2: widen its affinity")]
    TooFewCpus {
        /// CPUs that it may use.
        cpus: usize,
    },
    /// The file would be overwritten.
    #[error("ssd file {path} holds something, which the benchmark would overwrite; remove it, or \
             choose another path", path = path.display())]
    FileExists {
        /// The file.
        path: PathBuf,
    },
    /// Too few pages fit.
    #[error(
        "a file of {file_bytes} bytes has too few slots for pages of {page_bytes} bytes; raise \
         --size, or measure fewer page sizes at a time (--page-bytes)"
    )]
    FileTooSmall {
        /// Its length.
        file_bytes: u64,
        /// The page size that does not fit.
        page_bytes: u32,
    },
    /// The SSD tier cannot be made.
    #[error(transparent)]
    Ssd(#[from] SsdError),
    /// There is no memory for the pages.
    #[error(transparent)]
    Memory(#[from] PoolError),
    /// The Manager was not ready, or did not stop, as it should.
    #[error("orbitkv serve: {message}")]
    Manager {
        /// The code it ended with; 0 when it did not end.
        exit: u8,
        /// Its own last words.
        message: Box<str>,
    },
    /// There is nothing to keep busy.
    #[error("--beside-busy keeps a GPU busy; add --device cuda")]
    NotOnGpu,
    /// The GPU, or its driver.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// A process of the benchmark gave no answer.
    #[error("the part {part} of the benchmark gave no answer: {cause}")]
    Part {
        /// Which.
        part: &'static str,
        /// What was seen instead.
        cause: &'static str,
    },
    /// A process of the benchmark could not do its work.
    #[error("{part}: {message}")]
    PartFailed {
        /// Which.
        part: &'static str,
        /// Its own last words.
        message: Box<str>,
    },
    /// A signal.
    #[error("stopped by a signal")]
    Interrupted,
}

impl BenchError {
    /// Wraps a failed call.
    pub(crate) fn system<E: Into<io::Error>>(operation: &'static str) -> impl FnOnce(E) -> Self {
        move |error| Self::System { operation, source: error.into() }
    }
}

impl From<ManagerError> for BenchError {
    fn from(error: ManagerError) -> Self {
        match error {
            ManagerError::Interrupted => Self::Interrupted,
            ManagerError::System { operation, source } => Self::System { operation, source },
            ManagerError::Failed { status, message } => {
                let code = status.and_then(|status| status.code());
                let exit = code.and_then(|code| u8::try_from(code).ok()).unwrap_or(0);
                Self::Manager { exit, message }
            }
        }
    }
}
