//! See `targets::bootstrap`.
#![no_main]

#[path = "../targets.rs"]
#[allow(dead_code, reason = "each entry runs one target")]
mod targets;

libfuzzer_sys::fuzz_target!(
    init: targets::write_seeds(&targets::bootstrap::seeds()),
    |data: &[u8]| targets::bootstrap::run(data)
);
