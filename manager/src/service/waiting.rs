//! When the reactor spins and when it sleeps.

use std::num::NonZero;
use std::time::Duration;

use orbitkv_shm_protocol::spin::Spin;

use crate::clock::nanos_of;
use crate::config::WaitMode;
use crate::core::Nanos;

/// What the reactor does without work.
#[derive(Debug)]
pub(super) struct Waiting {
    mode: WaitMode,
    spin: Spin,
    /// How long a spin may take while copies are under way; zero where processors are few.
    copy_window: Duration,
    /// The end of the spin under way.
    spinning_until: Option<Nanos>,
    /// The end of it while copies are under way.
    copying_until: Nanos,
}

/// With fewer processors the copying threads and the engines need them.
const PROCESSORS_TO_SPIN: usize = 4;
/// A page of some MiB crosses the bus of a GPU in less, and a wake costs a tenth of that.
const COPY_WINDOW: Duration = Duration::from_micros(500);

impl Waiting {
    /// `window` is how long a spin may take: zero on one processor.
    pub(super) fn new(mode: WaitMode, window: Duration) -> Self {
        let processors = std::thread::available_parallelism().map_or(1, NonZero::get);
        let copy_window = match processors {
            PROCESSORS_TO_SPIN.. if !window.is_zero() => COPY_WINDOW,
            _ => Duration::ZERO,
        };
        Self::with_windows(mode, window, copy_window)
    }

    fn with_windows(mode: WaitMode, window: Duration, copy_window: Duration) -> Self {
        let spin = Spin::new(window);
        Self { mode, spin, copy_window, spinning_until: None, copying_until: 0 }
    }

    /// Whether to look again instead of sleeping. `copying` says whether a device owes an end.
    pub(super) fn may_spin(&mut self, now: Nanos, copying: bool) -> bool {
        if self.mode == WaitMode::Dedicated {
            return true;
        }
        if let Some(until) = self.spinning_until {
            return now < until || copying && now < self.copying_until;
        }
        self.copying_until = now.saturating_add(nanos_of(self.copy_window));
        if copying && now < self.copying_until {
            self.spinning_until = Some(now);
            return true;
        }
        let due = self.spin.due();
        self.spinning_until = due.map(|window| now.saturating_add(nanos_of(window)));
        due.is_some()
    }

    /// A turn found work.
    pub(super) fn worked(&mut self) {
        if self.spinning_until.take().is_some() {
            self.spin.note(true);
        }
    }

    /// A sleep ended.
    pub(super) fn slept(&mut self) {
        if self.spinning_until.take().is_some() {
            self.spin.note(false);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WINDOW: Duration = Duration::from_nanos(100);

    #[test]
    fn a_spin_ends_with_its_window_and_starts_anew_after_work() {
        let mut waiting = Waiting::with_windows(WaitMode::Adaptive, WINDOW, Duration::ZERO);
        assert!(waiting.may_spin(1_000, false) && waiting.may_spin(1_099, false));
        assert!(!waiting.may_spin(1_100, false));
        waiting.slept();
        assert!(waiting.may_spin(2_000, false));
        waiting.worked();
        assert!(
            waiting.may_spin(2_099, false)
                && waiting.may_spin(2_198, false)
                && !waiting.may_spin(2_199, false)
        );
    }

    #[test]
    fn a_copy_is_waited_for_longer_and_no_longer_than_that() {
        let long = Duration::from_nanos(1_000);
        let mut waiting = Waiting::with_windows(WaitMode::Adaptive, WINDOW, long);
        assert!(waiting.may_spin(1_000, true) && waiting.may_spin(1_999, true));
        assert!(!waiting.may_spin(2_000, true) && !waiting.may_spin(1_101, false));
        // It ended while the reactor spun: what follows has a window of its own.
        waiting.worked();
        assert!(waiting.may_spin(1_999, false) && !waiting.may_spin(2_099, false));
    }

    #[test]
    fn dedicated_spins_for_ever_even_on_one_processor() {
        let mut waiting = Waiting::new(WaitMode::Dedicated, Duration::ZERO);
        for now in 0..1_000 {
            assert!(waiting.may_spin(now * 1_000_000, false));
            waiting.slept();
        }
    }

    #[test]
    fn one_processor_never_spins() {
        let mut waiting = Waiting::new(WaitMode::Adaptive, Duration::ZERO);
        assert!((0..1_000).all(|now| !waiting.may_spin(now, now % 2 == 0)));
    }
}
