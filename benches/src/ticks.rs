//! The cheapest clock there is, without a system call: the time stamp counter where there is one.
#![allow(unsafe_code, reason = "the time stamp counter is read by an intrinsic")]

use std::time::{Duration, Instant};

/// How long the counter is compared with the kernel's clock.
const CALIBRATION: Duration = Duration::from_millis(10);

/// A reading of the counter; only differences mean anything.
#[cfg(target_arch = "x86_64")]
#[inline]
pub(crate) fn now() -> u64 {
    // SAFETY: the instruction exists on every x86-64 and only reads a register.
    unsafe { core::arch::x86_64::_rdtsc() }
}

/// A reading of the counter; only differences mean anything.
#[cfg(not(target_arch = "x86_64"))]
#[inline]
pub(crate) fn now() -> u64 {
    crate::clock::now_ns()
}

/// How ticks become nanoseconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ticks {
    ns_per_tick: f64,
}

impl Ticks {
    /// Compares the counter with CLOCK_MONOTONIC for 10 ms.
    pub(crate) fn calibrate() -> Self {
        let (began, first) = (Instant::now(), now());
        loop {
            let (elapsed, last) = (began.elapsed(), now());
            if elapsed >= CALIBRATION {
                let ns_per_tick = elapsed.as_nanos() as f64 / last.wrapping_sub(first) as f64;
                return Self { ns_per_tick };
            }
        }
    }

    /// A number of ticks, in nanoseconds.
    pub(crate) fn ns(self, ticks: f64) -> f64 {
        ticks * self.ns_per_tick
    }

    /// A duration, in ticks.
    pub(crate) fn of(self, duration: Duration) -> u64 {
        (duration.as_nanos() as f64 / self.ns_per_tick) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_agree_with_the_kernels_clock() {
        let ticks = Ticks::calibrate();
        let (began, first) = (Instant::now(), now());
        std::thread::sleep(Duration::from_millis(20));
        let (ours, theirs) = (ticks.ns((now() - first) as f64), began.elapsed().as_nanos() as f64);
        assert!((ours / theirs - 1.0).abs() < 0.2, "{ours} ns against {theirs} ns");
        let back = ticks.ns(ticks.of(Duration::from_millis(5)) as f64);
        assert!((back / 5e6 - 1.0).abs() < 1e-3);
    }
}
