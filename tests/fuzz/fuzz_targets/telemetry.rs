//! See `targets::telemetry`.
#![no_main]

#[path = "../targets.rs"]
#[allow(dead_code, reason = "each entry runs one target")]
mod targets;

libfuzzer_sys::fuzz_target!(
    init: targets::write_seeds(&targets::telemetry::seeds()),
    |data: &[u8]| targets::telemetry::run(data)
);
