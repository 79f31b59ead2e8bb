//! `serve`: the Manager itself, in this process.

use std::io::Read;
use std::process::ExitCode;
use std::thread;

use clap::Args;
use orbitkv_manager::config::ServeArgs;
use orbitkv_manager::error::ServeError;
use rustix::process::{Signal, getpid, kill_process};

use crate::output::complain;

/// Flags of `serve`.
#[derive(Clone, PartialEq, Eq, Debug, Args)]
pub(crate) struct ServeVerb {
    #[command(flatten)]
    args: ServeArgs,
    /// Stop when standard input ends, so that a private Manager never outlives who started it
    #[arg(long, hide = true)]
    stop_at_eof: bool,
}

/// Runs the verb. The Manager prints its own errors.
pub(crate) fn run(verb: &ServeVerb) -> ExitCode {
    if verb.stop_at_eof {
        let watched = thread::Builder::new().name("orbitkv-stdin".to_owned()).spawn(|| {
            let mut byte = [0];
            while std::io::stdin().read(&mut byte).is_ok_and(|bytes| bytes > 0) {}
            let _asked = kill_process(getpid(), Signal::TERM);
        });
        if let Err(source) = watched {
            let error = ServeError::System { what: "thread that watches standard input", source };
            complain(format_args!("orbitkv: {error}"));
            return error.exit_code().into();
        }
    }
    orbitkv_manager::serve::serve(&verb.args)
}
