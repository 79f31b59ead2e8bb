//! The `orbitkv` command line.

use std::process::ExitCode;

use orbitkv_benches::allocations::CountingAllocator;

/// Counts only in the process of `bench` that proves that polling allocates nothing.
#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

fn main() -> ExitCode {
    orbitkv_tools::cli::run(std::env::args_os())
}
