//! Exit codes and the errors behind them.

use std::io;
use std::path::PathBuf;

use orbitkv_benches::BenchError;
use orbitkv_benches::manager::ManagerError;
use orbitkv_manager::pool::PoolError;
use orbitkv_manager::ssd::SsdError;
use orbitkv_shm_protocol::bootstrap::transport::TransportError;

use crate::trace::TraceError;

/// How a verb ended.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Exit {
    /// Everything was done.
    Ok,
    /// The work failed: a mismatch, a failed check, a Manager that went away.
    Failed,
    /// Wrong by its text alone: usage, configuration, content of a file.
    Usage,
    /// Only the system could tell: a missing folder, no memory, no such Manager.
    System,
}

impl Exit {
    /// The number that the process ends with.
    pub(crate) fn code(self) -> u8 {
        match self {
            Self::Ok => 0,
            Self::Failed => 1,
            Self::Usage => 2,
            Self::System => 3,
        }
    }

    /// The exit of a child; unknown codes mean that its work failed.
    pub(crate) fn from_code(code: u8) -> Self {
        match code {
            0 => Self::Ok,
            2 => Self::Usage,
            3 => Self::System,
            _ => Self::Failed,
        }
    }
}

/// Why a verb could not do its work. One line each: what, which value, what to do.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ToolError {
    /// A trace cannot be read.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// An output file cannot be made or written.
    #[error("--{flag} {path}: {source}", path = path.display())]
    Output {
        /// Name without dashes.
        flag: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// A system call failed.
    #[error("{operation}: {source}")]
    System {
        /// What was tried.
        operation: &'static str,
        /// The system's answer.
        source: io::Error,
    },
    /// There is no place on a disk for a file of the SSD tier.
    #[error(
        "no folder for the SSD file on a disk: {folder} is on tmpfs; set XDG_CACHE_HOME to one",
        folder = folder.display()
    )]
    NoDisk {
        /// The folder that was tried last.
        folder: PathBuf,
    },
    /// The Manager that was started ended before it was ready.
    #[error("orbitkv serve: {message}")]
    ManagerStart {
        /// What its exit code means.
        exit: Exit,
        /// Its own last words.
        message: Box<str>,
    },
    /// An engine process gave up.
    #[error("engine {engine}: {message}")]
    Engine {
        /// Its number.
        engine: usize,
        /// What its exit code means.
        exit: Exit,
        /// Its own last words.
        message: Box<str>,
    },
    /// A benchmark has no numbers.
    #[error(transparent)]
    Bench(BenchError),
    /// SIGINT or SIGTERM.
    #[error("stopped by a signal")]
    Interrupted,
    /// No Manager listens.
    #[error(
        "no Manager at {socket}: {source}; check --socket, or start one with `orbitkv serve`",
        socket = socket.display()
    )]
    NoManager {
        /// Where.
        socket: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// The bootstrap socket failed.
    #[error(
        "{socket}: {source}; `orbitkv inspect` shows whether the Manager hangs",
        socket = socket.display()
    )]
    Talk {
        /// Where.
        socket: PathBuf,
        /// What went wrong.
        source: TransportError,
    },
    /// The Manager refused.
    #[error("the Manager refused: {message}")]
    Refused {
        /// Its own words.
        message: Box<str>,
    },
    /// The files of an SSD tier cannot be checked.
    #[error(transparent)]
    Ssd(#[from] SsdError),
    /// There is no memory to read images to.
    #[error(transparent)]
    Memory(#[from] PoolError),
    /// What `serve` would say to the same flags.
    #[error(transparent)]
    Config(#[from] orbitkv_manager::config::ConfigError),
    /// Standard input or output is no terminal.
    #[error(
        "top: {stream} is not a terminal; for a script use `orbitkv inspect --json`, for one look \
         `orbitkv inspect`"
    )]
    NoTerminal {
        /// Which.
        stream: &'static str,
    },
    /// The Manager does not come to the end of what was on SSD.
    #[error(
        "the Manager is still finding again what is on SSD, but has found nothing for {seconds} s; \
         see its log"
    )]
    NotRecovered {
        /// How long.
        seconds: u64,
    },
    /// The Manager's state cannot be read.
    #[error(transparent)]
    Inspect(#[from] orbitkv_shm_protocol::inspect::InspectError),
}

impl ToolError {
    /// The exit that the error asks for.
    pub(crate) fn exit(&self) -> Exit {
        match self {
            Self::Trace(error) if error.is_content() => Exit::Usage,
            Self::Ssd(error) if error.is_not_ours() => Exit::Usage,
            Self::Config(error) if !error.is_environment() => Exit::Usage,
            Self::NoTerminal { .. } => Exit::Usage,
            Self::Trace(_)
            | Self::Ssd(_)
            | Self::Config(_)
            | Self::Output { .. }
            | Self::System { .. }
            | Self::NoDisk { .. }
            | Self::NoManager { .. }
            | Self::Talk { .. }
            | Self::Memory(_)
            | Self::NotRecovered { .. }
            | Self::Inspect(_) => Exit::System,
            Self::ManagerStart { exit, .. } | Self::Engine { exit, .. } => *exit,
            Self::Bench(error) => exit_of_bench(error),
            Self::Interrupted | Self::Refused { .. } => Exit::Failed,
        }
    }
}

impl From<ManagerError> for ToolError {
    fn from(error: ManagerError) -> Self {
        match error {
            ManagerError::Interrupted => Self::Interrupted,
            ManagerError::System { operation, source } => Self::System { operation, source },
            ManagerError::Failed { status, message } => {
                let exit = match status.and_then(|status| status.code()) {
                    Some(code) => Exit::from_code(code.clamp(1, 255) as u8),
                    // Killed, or not ready in time.
                    None => Exit::System,
                };
                Self::ManagerStart { exit, message }
            }
        }
    }
}

fn exit_of_bench(error: &BenchError) -> Exit {
    match error {
        BenchError::Ssd(error) if error.is_not_ours() => Exit::Usage,
        BenchError::FileTooSmall { .. } | BenchError::NotOnGpu => Exit::Usage,
        BenchError::System { .. }
        | BenchError::Ssd(_)
        | BenchError::Memory(_)
        | BenchError::FileExists { .. }
        | BenchError::TooFewCpus { .. }
        | BenchError::Cuda(_)
        | BenchError::PartFailed { .. } => Exit::System,
        BenchError::Manager { exit, .. } if *exit > 0 => Exit::from_code(*exit),
        _ => Exit::Failed,
    }
}
