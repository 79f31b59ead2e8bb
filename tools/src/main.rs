//! The `orbitkv` command line.

use std::process::ExitCode;

fn main() -> ExitCode {
    orbitkv_tools::cli::run(std::env::args_os())
}
