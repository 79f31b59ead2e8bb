//! Time: nanoseconds of `CLOCK_MONOTONIC`, the one clock of Manager and engines on a host.
//!
//! Everything that waits or expires takes its time from a [`Clock`], so that tests move it by hand.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::time::ClockId;

use crate::core::Nanos;

/// Tells the time. Clones tell the same.
#[derive(Clone, Debug, Default)]
pub struct Clock {
    /// `None` asks the kernel.
    manual: Option<Arc<AtomicU64>>,
}

impl Clock {
    /// The kernel's monotonic clock: no step of the wall clock moves it.
    pub const fn monotonic() -> Self {
        Self { manual: None }
    }

    /// A clock that stands at `start` until [`advance`](Self::advance) moves it.
    pub fn manual(start: Nanos) -> Self {
        Self { manual: Some(Arc::new(AtomicU64::new(start))) }
    }

    /// Now.
    pub fn now(&self) -> Nanos {
        match &self.manual {
            Some(nanos) => nanos.load(Ordering::Relaxed),
            None => {
                let now = rustix::time::clock_gettime(ClockId::Monotonic);
                // Both parts of this clock are never negative.
                now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
            }
        }
    }

    /// Moves a manual clock on; the kernel's moves by itself.
    pub fn advance(&self, by: Duration) {
        if let Some(nanos) = &self.manual {
            nanos.fetch_add(nanos_of(by), Ordering::Relaxed);
        }
    }
}

/// A duration in nanoseconds; longer than 584 years counts as that.
pub fn nanos_of(duration: Duration) -> Nanos {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_manual_clock_stands_and_its_clones_agree() {
        let clock = Clock::manual(7);
        let other = clock.clone();
        assert_eq!(clock.now(), 7);
        other.advance(Duration::from_micros(1));
        assert_eq!(clock.now(), 1007);
    }

    #[test]
    fn the_kernel_clock_never_steps_back() {
        let clock = Clock::monotonic();
        let mut last = 0;
        for _ in 0..1000 {
            let now = clock.now();
            assert!(now >= last && now > 0);
            last = now;
        }
    }
}
