//! See `targets::request`.
#![no_main]

#[path = "../targets.rs"]
#[allow(dead_code, reason = "each entry runs one target")]
mod targets;

libfuzzer_sys::fuzz_target!(
    init: targets::write_seeds(&targets::request::seeds()),
    |data: &[u8]| targets::request::run(data)
);
