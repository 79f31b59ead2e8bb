//! A GPU that is lost to a Manager: a kernel in the Manager's own process that reads where nothing is.
//!
//! The driver has one primary context for each GPU and process, which the Manager uses; after an illegal
//! address every call in it answers the same error until the process ends.

use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use orbitkv_benches::gpu::{Device, Stream};

/// Names the file whose appearance breaks the GPU; it is removed when that is done.
pub const BREAK_AT: &str = "ORBITKV_TEST_BREAK_GPU";
/// Never mapped.
const NOWHERE: u64 = 16;
const PAUSE: Duration = Duration::from_millis(5);

/// Watches for the file, if the environment names one, on a thread of its own.
pub fn break_when_told() {
    let Some(file) = std::env::var_os(BREAK_AT).map(PathBuf::from) else { return };
    thread::spawn(move || {
        while !file.exists() {
            thread::sleep(PAUSE);
        }
        break_gpu();
        std::fs::remove_file(&file).expect("the file that was there");
    });
}

/// Breaks the primary context of GPU 0 in this process.
///
/// # Panics
/// When it still works afterwards.
pub fn break_gpu() {
    let device = Device::open(0).expect("a GPU");
    let stream = Stream::new().expect("a stream");
    device.kernels.spin_until(&stream, NOWHERE, 1).expect("a launch");
    stream.wait().expect_err("an illegal address");
}

/// Has the Manager that was started with this file break its GPU, and waits until it has.
///
/// # Panics
/// When the file cannot be made, or nobody acts on it.
pub fn tell(file: &Path) {
    std::fs::write(file, []).expect("a file");
    let end = std::time::Instant::now() + crate::manager::PATIENCE;
    while file.exists() {
        assert!(std::time::Instant::now() < end, "nobody broke the GPU");
        thread::sleep(PAUSE);
    }
}
