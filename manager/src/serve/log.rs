//! The log on stderr: never a reason to stop. Nobody has to read it, and nobody can hold the
//! Manager by not reading it.

use std::io::{self, IsTerminal, Write};

use rustix::event::{PollFd, PollFlags};
use rustix::time::Timespec;

/// Environment variable that filters the log, as in `debug` or `orbitkv_manager::endpoint=trace`.
pub const LOG_VARIABLE: &str = "ORBITKV_LOG";

/// Stderr without waiting. A pipe that can be written at all takes 4,096 bytes, and lines are
/// shorter; one that is full, like a terminal that is held, loses the line.
struct Patient;

impl Write for Patient {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let stderr = io::stderr();
        let mut polled = [PollFd::new(&stderr, PollFlags::OUT)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        match rustix::event::poll(&mut polled, Some(&now)) {
            Ok(0) => Ok(line.len()),
            _ => stderr.lock().write(line),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Logs to stderr from here on.
pub(super) fn start() {
    let filter = tracing_subscriber::EnvFilter::try_from_env(LOG_VARIABLE)
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info"));
    // Somebody who embeds `serve` may log already.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(|| Patient)
        .with_ansi(io::stderr().is_terminal())
        // It would say so on stderr, with a macro that panics when stderr is what failed.
        .log_internal_errors(false)
        .try_init();
}
