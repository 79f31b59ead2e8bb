//! When a device is not asked any more, and when it is tried again.

use std::time::{Duration, Instant};

/// Outcomes that are looked back on.
const WINDOW: u32 = u32::BITS;
/// Failures among them that open the breaker.
const FAULTS_MAX: u32 = 8;
/// First pause before one order is let through; doubled up to [`PAUSE_MAX`].
const PAUSE_MIN: Duration = Duration::from_secs(2);
/// Longest pause.
const PAUSE_MAX: Duration = Duration::from_secs(30);

/// Stops one kind of work of one device after too many failures, and lets single orders through
/// until one succeeds.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Breaker {
    /// One bit an outcome, newest lowest: set for a failure.
    history: u32,
    open: Option<Open>,
}

#[derive(Clone, Copy, Debug)]
struct Open {
    try_at: Instant,
    pause: Duration,
    trying: bool,
}

/// What an outcome changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Change {
    None,
    Opened,
    Closed,
}

impl Breaker {
    /// True when work is refused.
    pub(crate) fn is_open(&self) -> bool {
        self.open.is_some()
    }

    /// Whether an order may go to the device. While open: one after each pause.
    pub(crate) fn admits(&mut self, now: impl FnOnce() -> Instant) -> bool {
        match &mut self.open {
            None => true,
            Some(open) if open.trying || now() < open.try_at => false,
            Some(open) => {
                open.trying = true;
                true
            }
        }
    }

    /// An order that went to the device ended.
    pub(crate) fn record(&mut self, failed: bool, now: impl FnOnce() -> Instant) -> Change {
        self.history = self.history << 1 | u32::from(failed);
        debug_assert_eq!(WINDOW, 32);
        match &mut self.open {
            // Orders from before it opened may still end; only the one let through decides.
            Some(open) if open.trying && failed => {
                open.trying = false;
                open.pause = (open.pause * 2).min(PAUSE_MAX);
                open.try_at = now() + open.pause;
                Change::None
            }
            Some(open) if open.trying => {
                *self = Self::default();
                Change::Closed
            }
            Some(_) => Change::None,
            None if self.history.count_ones() >= FAULTS_MAX => {
                self.open =
                    Some(Open { try_at: now() + PAUSE_MIN, pause: PAUSE_MIN, trying: false });
                Change::Opened
            }
            None => Change::None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn single_failures_among_good_orders_do_not_open_it() {
        let now = Instant::now();
        let mut breaker = Breaker::default();
        for order in 0..1000 {
            assert!(breaker.admits(|| now));
            assert_eq!(breaker.record(order % 8 == 0, || now), Change::None);
        }
    }

    #[test]
    fn it_opens_after_many_failures_tries_one_order_a_pause_and_closes_on_success() {
        let start = Instant::now();
        let mut breaker = Breaker::default();
        for order in 1..=FAULTS_MAX {
            let expected = if order == FAULTS_MAX { Change::Opened } else { Change::None };
            assert_eq!(breaker.record(true, || start), expected);
        }
        assert!(breaker.is_open());
        assert!(!breaker.admits(|| start));
        let later = start + PAUSE_MIN;
        assert!(breaker.admits(|| later));
        assert!(!breaker.admits(|| later), "one at a time");
        assert_eq!(breaker.record(true, || later), Change::None);
        assert!(!breaker.admits(|| later + PAUSE_MIN), "the pause has doubled");
        let mut now = later + PAUSE_MIN * 2;
        assert!(breaker.admits(|| now));
        for _ in 0..10 {
            assert_eq!(breaker.record(true, || now), Change::None);
            now += PAUSE_MAX;
            assert!(breaker.admits(|| now), "never longer than the longest pause");
        }
        assert_eq!(breaker.record(false, || now), Change::Closed);
        assert!(!breaker.is_open() && breaker.admits(|| now));
        assert_eq!(breaker.record(true, || now), Change::None, "old failures are forgotten");
    }

    #[test]
    fn orders_from_before_it_opened_do_not_close_it() {
        let now = Instant::now();
        let mut breaker = Breaker::default();
        for _ in 0..FAULTS_MAX {
            breaker.record(true, || now);
        }
        assert_eq!(breaker.record(false, || now), Change::None);
        assert!(breaker.is_open());
    }
}
