//! What the end-to-end tests start: `orbitkv` itself, or with the verb `engine` one that obeys.

use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args_os().collect();
    if arguments.get(1).is_some_and(|verb| verb == "engine") {
        orbitkv_tests::engine_process::obey()
    } else {
        #[cfg(feature = "gpu")]
        orbitkv_tests::broken_gpu::break_when_told();
        orbitkv_tools::cli::run(arguments)
    }
}
