//! The binary `orbitkv-manager`.

use std::process::ExitCode;

fn main() -> ExitCode {
    orbitkv_manager::serve::main()
}
