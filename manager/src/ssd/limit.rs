//! How many bytes of writes the device may hold while pages are read.
//!
//! A read waits for what is in the device already: its latency is (own bytes + write bytes in
//! flight) / bandwidth. So the bytes are limited, not the rate, and more so while small pages are
//! read, whose own bytes count for little.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Pages up to this length are small, in bytes.
pub(crate) const SMALL_PAGE_BYTES_MAX: u32 = 256 << 10;
/// Write bytes in flight while small pages are read.
pub(crate) const WRITE_BYTES_BESIDE_SMALL_READS: u64 = 512 << 10;
/// A read counts as "now" for this long, in nanoseconds.
const RECENT_NS: u64 = 1_000_000_000;

/// When small pages were last read; told by the reader, asked by the writer.
#[derive(Debug)]
pub(crate) struct ReadActivity {
    start: Instant,
    /// Nanoseconds since `start`, plus one; zero is never.
    last_small: AtomicU64,
}

impl ReadActivity {
    pub(crate) fn new() -> Self {
        Self { start: Instant::now(), last_small: AtomicU64::new(0) }
    }

    fn now_ns(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX - 1)
    }

    /// A page of `image_bytes` is being read.
    pub(crate) fn reads(&self, image_bytes: u32) {
        if image_bytes <= SMALL_PAGE_BYTES_MAX {
            self.last_small.store(self.now_ns() + 1, Ordering::Relaxed);
        }
    }

    /// Write bytes that may be in flight now, `configured` at most.
    pub(crate) fn write_bytes_max(&self, configured: u64) -> u64 {
        write_bytes_max(configured, self.now_ns(), self.last_small.load(Ordering::Relaxed))
    }
}

fn write_bytes_max(configured: u64, now_ns: u64, last_small: u64) -> u64 {
    let reads_small = last_small != 0 && now_ns.saturating_sub(last_small - 1) < RECENT_NS;
    if reads_small { configured.min(WRITE_BYTES_BESIDE_SMALL_READS) } else { configured }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn small_reads_lower_the_limit_for_a_second() {
        assert_eq!(write_bytes_max(2 * MIB, 0, 0), 2 * MIB, "never read");
        assert_eq!(write_bytes_max(2 * MIB, 500, 1), MIB / 2);
        assert_eq!(write_bytes_max(2 * MIB, RECENT_NS - 1, 1), MIB / 2);
        assert_eq!(write_bytes_max(2 * MIB, RECENT_NS, 1), 2 * MIB);
        assert_eq!(write_bytes_max(MIB / 4, 500, 1), MIB / 4, "never above what is configured");
        assert_eq!(
            write_bytes_max(2 * MIB, 0, 500),
            MIB / 2,
            "the clocks of two threads may differ"
        );
    }

    #[test]
    fn only_small_pages_count() {
        let activity = ReadActivity::new();
        activity.reads(SMALL_PAGE_BYTES_MAX + 1);
        assert_eq!(activity.write_bytes_max(2 * MIB), 2 * MIB);
        activity.reads(SMALL_PAGE_BYTES_MAX);
        assert_eq!(activity.last_small.load(Ordering::Relaxed).min(1), 1);
    }
}
