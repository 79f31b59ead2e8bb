//! The example of the crate's documentation, run.

#[path = "../../examples/first_page.rs"]
#[allow(dead_code, reason = "main is for the command line")]
mod first_page;

use crate::twin::Twin;

#[test]
fn the_example_restores_its_page() {
    let twin = Twin::start();
    let restored = first_page::run(twin.path()).unwrap();
    assert_eq!(restored, [42; 4096]);
}
