//! See `targets::completion`.
#![no_main]

#[path = "../targets.rs"]
#[allow(dead_code, reason = "each entry runs one target")]
mod targets;

libfuzzer_sys::fuzz_target!(
    init: targets::write_seeds(&targets::completion::seeds()),
    |data: &[u8]| targets::completion::run(data)
);
