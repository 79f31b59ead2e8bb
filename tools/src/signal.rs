//! SIGINT and SIGTERM as a flag that loops look at.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::exit::ToolError;

static STOP: AtomicBool = AtomicBool::new(false);

/// From now on a signal only raises the flag. Once in a process.
pub(crate) fn install() -> Result<(), ToolError> {
    ctrlc::set_handler(|| STOP.store(true, Ordering::Relaxed)).map_err(|error| ToolError::System {
        operation: "install a signal handler",
        source: io::Error::other(error),
    })
}

/// Fails once a signal came.
pub(crate) fn check() -> Result<(), ToolError> {
    if STOP.load(Ordering::Relaxed) { Err(ToolError::Interrupted) } else { Ok(()) }
}
