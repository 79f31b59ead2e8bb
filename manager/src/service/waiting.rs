//! When the reactor spins and when it sleeps.

use crate::clock::Clock;
use crate::config::WaitMode;
use crate::core::Nanos;

/// Spin before a sleep: about one wake of another core, which costs the waker 10 to 20 µs on a
/// virtual machine.
const SPIN_NS: Nanos = 25_000;
/// Fruitless spins in a row after which spinning stops.
const MISSES_MAX: u32 = 8;
/// Of the sleeps after that, one in so many is preceded by a spin again.
const PROBE_EVERY: u32 = 64;

/// Adaptive spinning.
#[derive(Debug)]
pub(super) struct Waiting {
    mode: WaitMode,
    /// More than one processor is allowed: spinning does not keep the peer from running.
    several_cores: bool,
    spinning_since: Option<Nanos>,
    misses: u32,
    sleeps: u32,
}

impl Waiting {
    pub(super) fn new(mode: WaitMode) -> Self {
        let several_cores = std::thread::available_parallelism().is_ok_and(|cores| cores.get() > 1);
        Self { mode, several_cores, spinning_since: None, misses: 0, sleeps: 0 }
    }

    /// Whether to look again instead of sleeping.
    pub(super) fn may_spin(&mut self, clock: &Clock) -> bool {
        if self.mode == WaitMode::Dedicated {
            return true;
        }
        if !self.several_cores {
            return false;
        }
        let now = clock.now();
        match self.spinning_since {
            Some(since) => now.saturating_sub(since) < SPIN_NS,
            None if self.misses >= MISSES_MAX && !self.sleeps.is_multiple_of(PROBE_EVERY) => false,
            None => {
                self.spinning_since = Some(now);
                true
            }
        }
    }

    /// A turn found work.
    pub(super) fn worked(&mut self) {
        if self.spinning_since.take().is_some() {
            self.misses = 0;
        }
    }

    /// A sleep ended.
    pub(super) fn slept(&mut self) {
        if self.spinning_since.take().is_some() {
            self.misses = self.misses.saturating_add(1);
        }
        self.sleeps = self.sleeps.wrapping_add(1);
    }
}
