//! Scenarios in their full length, which the suite runs shortened. They are ignored unless asked
//! for: `cargo test -p orbitkv-tests --release --test soak -- --ignored`; `ORBITKV_SOAK_SECONDS`
//! sets another length.

mod churn;

use std::time::Duration;

use orbitkv_tests::setup;

fn length(default: u64) -> Duration {
    let asked = std::env::var("ORBITKV_SOAK_SECONDS").ok().and_then(|text| text.parse().ok());
    Duration::from_secs(asked.unwrap_or(default))
}

#[test]
#[ignore = "takes ten minutes; correctness.rs runs it for 3 s"]
fn cor_07_a_tier_of_eight_pages_never_mixes_them_up() {
    churn::eight_slots(setup!(), length(600));
}
