//! Whether to spin before a sleep: the same decision for every waiter, on both sides.
//!
//! A wake of another processor costs both of them, so a short spin is worth its time when the
//! answer comes within about as long as a wake takes. Whether it does, nobody knows beforehand: a
//! waiter spins while that has been paying off, stops after [`MISSES_MAX`] spins in vain, and
//! from then on tries again at one sleep in [`PROBE_EVERY`].

use std::time::Duration;

/// Spins in vain, one after the other, after which a waiter sleeps at once.
pub const MISSES_MAX: u32 = 8;
/// Once stopped, one wait in so many spins, to see whether it pays again.
pub const PROBE_EVERY: u32 = 64;
/// Shortest window: below it an answer from a spinning peer is missed as well.
pub const WINDOW_MIN: Duration = Duration::from_micros(5);
/// Longest window, whatever was measured on a busy machine: what one vain spin may burn.
pub const WINDOW_MAX: Duration = Duration::from_micros(100);

/// Window where no wake could be measured.
pub const WINDOW_UNMEASURED: Duration = Duration::from_micros(50);

/// The longest spin that is worth its time where waking a sleeper takes `wake`: half as long
/// again, between [`WINDOW_MIN`] and [`WINDOW_MAX`].
pub fn window_of(wake: Duration) -> Duration {
    (wake.saturating_mul(3) / 2).clamp(WINDOW_MIN, WINDOW_MAX)
}

/// The window that a waiter may use of one that was measured: none on a machine with one processor,
/// where a spin only keeps the peer from running.
///
/// A waiter that is bound to one processor of several spins: its peer may run on another. Where it
/// does not, every spin is in vain, and [`Spin`] stops after a few.
pub fn window_here(window: Duration) -> Duration {
    let online = std::fs::read_to_string("/sys/devices/system/cpu/online");
    let single = online.is_ok_and(|list| list.trim() == "0");
    if single { Duration::ZERO } else { window.min(WINDOW_MAX) }
}

/// The adaptive decision of one waiter.
#[derive(Clone, Debug)]
pub struct Spin {
    window: Duration,
    misses: u32,
    skipped: u32,
}

impl Spin {
    /// A waiter that spins for `window`; never when that is zero.
    pub const fn new(window: Duration) -> Self {
        Self { window, misses: 0, skipped: 0 }
    }

    /// How long to spin now; `None` when sleeping at once is better.
    pub fn due(&mut self) -> Option<Duration> {
        if self.window.is_zero() {
            return None;
        }
        if self.misses >= MISSES_MAX {
            self.skipped += 1;
            if self.skipped < PROBE_EVERY {
                return None;
            }
            self.skipped = 0;
        }
        Some(self.window)
    }

    /// Says whether a spin that was due found something.
    pub fn note(&mut self, hit: bool) {
        self.misses = if hit { 0 } else { (self.misses + 1).min(MISSES_MAX) };
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn spinning_stops_after_misses_and_is_probed_once_in_64() {
        let mut spin = Spin::new(Duration::from_nanos(1));
        for _ in 0..MISSES_MAX {
            assert!(spin.due().is_some());
            spin.note(false);
        }
        for round in 0..3 {
            for _ in 1..PROBE_EVERY {
                assert!(spin.due().is_none(), "round {round}");
            }
            assert!(spin.due().is_some(), "the probe of round {round}");
            spin.note(false);
        }
        for _ in 1..PROBE_EVERY {
            assert!(spin.due().is_none());
        }
        assert!(spin.due().is_some());
        spin.note(true);
        assert!(spin.due().is_some(), "a probe that paid brings spinning back");
    }

    #[test]
    fn a_window_of_zero_never_spins() {
        let mut spin = Spin::new(Duration::ZERO);
        assert!((0..1000).all(|_| spin.due().is_none()));
    }

    #[test]
    fn windows_follow_the_wake_within_bounds() {
        let micros = Duration::from_micros;
        assert_eq!(window_of(micros(20)), micros(30));
        assert_eq!(window_of(Duration::ZERO), WINDOW_MIN);
        assert_eq!(window_of(micros(900)), WINDOW_MAX);
        assert_eq!(window_of(Duration::MAX), WINDOW_MAX);
        assert!(window_here(Duration::MAX) <= WINDOW_MAX);
    }
}
