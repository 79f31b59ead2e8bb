//! Why a Manager does not start, or does not end well, and with which exit code.

use std::io;
use std::net::SocketAddr;

use rustix::io::Errno;

use crate::config::ConfigError;
use crate::device::{CudaImportError, NoCuda};
use crate::endpoint::ListenError;
use crate::pool::PoolError;
use crate::ssd::SsdError;
use crate::telemetry::TelemetryError;

/// The work failed.
pub const EXIT_FAILED: u8 = 1;
/// Wrong by its text alone: usage or configuration.
pub const EXIT_USAGE: u8 = 2;
/// Only the system could tell.
pub const EXIT_SYSTEM: u8 = 3;

/// Why `serve` ends with an error. One line each.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// See [`ConfigError`].
    #[error("{0}")]
    Config(#[from] ConfigError),
    /// See [`ListenError`].
    #[error("{0}")]
    Listen(#[from] ListenError),
    /// The address of `/metrics` cannot be taken.
    #[error(
        "--http {address}: {source}: choose another address, port 0, or start with --http-optional"
    )]
    Http {
        /// As asked for.
        address: SocketAddr,
        /// Why not.
        source: io::Error,
    },
    /// No telemetry segment.
    #[error("{0}")]
    Telemetry(#[from] TelemetryError),
    /// No DRAM pool.
    #[error("{0}")]
    Pool(#[from] PoolError),
    /// `--device cuda` on a machine that has none.
    #[error("--device cuda: {0}; or use --device host or auto")]
    NoCuda(NoCuda),
    /// `--device cuda` and the GPUs cannot reach the pool.
    #[error("--device cuda: {0}; or use --device host or auto")]
    Cuda(CudaImportError),
    /// The tier cannot be opened.
    #[error("--ssd: {0}")]
    Ssd(#[from] SsdError),
    /// Not one client could attach.
    #[error(
        "the limit of open descriptors is {limit}, and one session needs {needed}: raise it \
         (ulimit -n, LimitNOFILE=)"
    )]
    Descriptors {
        /// `RLIMIT_NOFILE`.
        limit: u64,
        /// What is open and one session together.
        needed: u64,
    },
    /// A thread, descriptor or signal handler could not be had.
    #[error("{what}: {source}{}", remedy(Errno::from_io_error(source)))]
    System {
        /// What was tried.
        what: &'static str,
        /// Why not.
        source: io::Error,
    },
    /// The signal handler could not be installed.
    #[error("signal handler: {}", cause(.0))]
    Signals(#[from] ctrlc::Error),
}

/// What `ctrlc` keeps to itself: the system's answer.
fn cause(error: &ctrlc::Error) -> String {
    match error {
        ctrlc::Error::System(source) => {
            format!("{source}{}", remedy(Errno::from_io_error(source)))
        }
        other => other.to_string(),
    }
}

/// What to do when the system has no more of something, to go behind its answer.
pub(crate) fn remedy(errno: Option<Errno>) -> &'static str {
    match errno {
        Some(Errno::AGAIN) => {
            ": no more threads; raise their limit (ulimit -u, TasksMax=, pids.max of the control \
             group)"
        }
        Some(Errno::MFILE) => ": no more descriptors; raise their limit (ulimit -n, LimitNOFILE=)",
        Some(Errno::FBIG) => ": raise the limit of file sizes (ulimit -f, LimitFSIZE=)",
        _ => "",
    }
}

impl ServeError {
    /// 2 for what the text alone shows, 3 for what only the system could tell.
    pub const fn exit_code(&self) -> u8 {
        match self {
            Self::Config(error) if !error.is_environment() => EXIT_USAGE,
            _ => EXIT_SYSTEM,
        }
    }

    /// For `map_err`.
    pub fn system(what: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::System { what, source }
    }
}
