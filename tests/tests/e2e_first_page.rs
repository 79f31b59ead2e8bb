//! The example of the client's documentation, run against a real Manager.

use orbitkv_tests::setup;

#[path = "../../engine-side/examples/first_page.rs"]
#[allow(dead_code, reason = "main is for the command line")]
mod first_page;

#[test]
fn the_example_restores_its_page() {
    let manager = setup!().start();
    assert_eq!(first_page::run(&manager.socket()).unwrap(), [42; 4096]);
}
