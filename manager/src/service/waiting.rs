//! When the reactor spins and when it sleeps.

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
    /// The end of the spin under way.
    spinning_until: Option<Nanos>,
}

impl Waiting {
    /// `window` is how long a spin may take: zero on one processor.
    pub(super) fn new(mode: WaitMode, window: Duration) -> Self {
        Self { mode, spin: Spin::new(window), spinning_until: None }
    }

    /// Whether to look again instead of sleeping.
    pub(super) fn may_spin(&mut self, now: Nanos) -> bool {
        if self.mode == WaitMode::Dedicated {
            return true;
        }
        if let Some(until) = self.spinning_until {
            return now < until;
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
        let mut waiting = Waiting::new(WaitMode::Adaptive, WINDOW);
        assert!(waiting.may_spin(1_000) && waiting.may_spin(1_099));
        assert!(!waiting.may_spin(1_100));
        waiting.slept();
        assert!(waiting.may_spin(2_000));
        waiting.worked();
        assert!(waiting.may_spin(2_099) && waiting.may_spin(2_198) && !waiting.may_spin(2_199));
    }

    #[test]
    fn dedicated_spins_for_ever_even_on_one_processor() {
        let mut waiting = Waiting::new(WaitMode::Dedicated, Duration::ZERO);
        for now in 0..1_000 {
            assert!(waiting.may_spin(now * 1_000_000));
            waiting.slept();
        }
    }

    #[test]
    fn one_processor_never_spins() {
        let mut waiting = Waiting::new(WaitMode::Adaptive, Duration::ZERO);
        assert!((0..1_000).all(|now| !waiting.may_spin(now)));
    }
}
