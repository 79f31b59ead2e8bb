//! One slice of a measurement: what ended while its window was open.

use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

/// Of a slice, so much passes before anything is counted: until the device is busy.
const WARM_PART: u32 = 10;

/// What one slice came to. What ended before the window opened, or while the last orders were
/// waited for, is not in it.
#[derive(Clone, Debug, Default)]
pub(super) struct Slice {
    /// Length of the window.
    pub(super) seconds: f64,
    /// User and system time of all threads of this process in the window.
    pub(super) cpu_seconds: f64,
    /// Image bytes read.
    pub(super) read_bytes: u64,
    /// Image bytes written.
    pub(super) write_bytes: u64,
    /// Nanoseconds of each read, from its order to its end.
    pub(super) read_ns: Vec<u64>,
}

impl Slice {
    /// Bytes read a second, in units of 10^9.
    pub(super) fn read_gb_per_s(&self) -> f64 {
        self.read_bytes as f64 / self.seconds / 1e9
    }

    /// Bytes written a second, in units of 10^9.
    pub(super) fn write_gb_per_s(&self) -> f64 {
        self.write_bytes as f64 / self.seconds / 1e9
    }

    /// CPU seconds for each 2^30 bytes read or written.
    pub(super) fn cpu_seconds_per_gib(&self) -> f64 {
        self.cpu_seconds / ((self.read_bytes + self.write_bytes) as f64 / (1_u64 << 30) as f64)
    }

    /// A percentile of the reads' times in microseconds; NaN without reads.
    pub(super) fn read_us(&self, percentile: usize) -> f64 {
        percentile_us(&mut self.read_ns.clone(), percentile)
    }
}

/// A percentile of nanoseconds, in microseconds; NaN of none.
pub(super) fn percentile_us(ns: &mut [u64], percentile: usize) -> f64 {
    ns.sort_unstable();
    ns.get(ns.len() * percentile / 100).map_or(f64::NAN, |ns| *ns as f64 / 1e3)
}

/// Counts what ends in the window of a slice.
#[derive(Debug)]
pub(super) struct Meter {
    opens: Instant,
    closes: Instant,
    opened: Option<(Instant, f64)>,
    slice: Slice,
}

impl Meter {
    /// A slice of `length` begins now.
    pub(super) fn start(length: Duration) -> Self {
        let now = Instant::now();
        let opens = now + length / WARM_PART;
        Self { opens, closes: now + length, opened: None, slice: Slice::default() }
    }

    /// Opens the window in time. To be called behind what has ended by `now`: that was before.
    pub(super) fn open(&mut self, now: Instant) {
        if self.opened.is_none() && now >= self.opens {
            self.opened = Some((now, cpu_seconds()));
        }
    }

    /// Whether the slice is over: in time, unless nothing of what it does was counted by then.
    pub(super) fn is_over(&self, reads: bool, writes: bool) -> bool {
        let (has_read, has_written) = (self.slice.read_bytes > 0, self.slice.write_bytes > 0);
        (has_read || !reads) && (has_written || !writes) && Instant::now() >= self.closes
    }

    /// A page was read.
    pub(super) fn read(&mut self, bytes: u32, ordered: Instant, now: Instant) {
        if self.opened.is_some() {
            self.slice.read_bytes += u64::from(bytes);
            self.slice.read_ns.push((now - ordered).as_nanos() as u64);
        }
    }

    /// A page was written.
    pub(super) fn wrote(&mut self, bytes: u32) {
        if self.opened.is_some() {
            self.slice.write_bytes += u64::from(bytes);
        }
    }

    /// Closes the window.
    pub(super) fn close(mut self) -> Slice {
        if let Some((opened, cpu)) = self.opened {
            self.slice.seconds = opened.elapsed().as_secs_f64();
            self.slice.cpu_seconds = cpu_seconds() - cpu;
        }
        self.slice
    }
}

/// User and system time of this process so far, of all its threads.
fn cpu_seconds() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_ends_in_the_window_counts() {
        let mut meter = Meter::start(Duration::from_secs(3600));
        let ordered = Instant::now();
        meter.open(ordered);
        meter.read(4096, ordered, ordered);
        meter.open(ordered + Duration::from_secs(361));
        meter.read(4096, ordered, ordered + Duration::from_micros(5));
        meter.wrote(8192);
        assert!(!meter.is_over(true, true), "a tenth was for warming up, the rest is not over");
        let slice = meter.close();
        assert_eq!((slice.read_bytes, slice.write_bytes), (4096, 8192));
        assert_eq!(slice.read_us(99), 5.0);
        assert!(Slice::default().read_us(50).is_nan());
    }

    #[test]
    fn a_slice_without_a_single_end_is_not_over() {
        let mut meter = Meter::start(Duration::ZERO);
        meter.open(Instant::now());
        assert!(meter.is_over(false, false) && !meter.is_over(true, false));
        meter.read(4096, Instant::now(), Instant::now());
        assert!(meter.is_over(true, false) && !meter.is_over(true, true));
        meter.wrote(4096);
        assert!(meter.is_over(true, true));
    }

    #[test]
    fn percentiles_of_a_ramp() {
        let mut ramp: Vec<u64> = (0..1000).rev().map(|value| value * 1000).collect();
        assert_eq!(percentile_us(&mut ramp, 50), 500.0);
        assert_eq!(percentile_us(&mut ramp, 99), 990.0);
    }
}
