//! When a device is not asked any more, and when it is tried again.

use std::time::{Duration, Instant};

use super::health::HUNG_AFTER;

/// Outcomes that are looked back on.
const WINDOW: u32 = u32::BITS;
/// Failures among them that open the breaker.
const FAULTS_MAX: u32 = 8;
/// First pause before one order is let through; doubled up to [`PAUSE_MAX`].
const PAUSE_MIN: Duration = Duration::from_secs(2);
/// Longest pause.
const PAUSE_MAX: Duration = Duration::from_secs(30);
/// A try that takes longer than this is none. A device that is merely slow, or is asked to write a
/// large page beside many reads, works: how long its chunks take says what it is given.
const TRY_MAX: Duration = HUNG_AFTER;

/// Why one kind of work was stopped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Cause {
    /// Too many orders failed.
    Errors,
    /// The file system has no space: nothing is wrong with the place that was to be written.
    NoSpace,
    /// It takes seconds.
    Slow,
    /// The kernel does not give back what it was handed.
    Hung,
}

impl Cause {
    /// Every value.
    pub const ALL: [Self; 4] = [Self::Errors, Self::NoSpace, Self::Slow, Self::Hung];
}

/// Stops one kind of work of one device after too many failures, and lets single orders through
/// until as many as it takes succeed one after the other.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Breaker {
    /// One bit an outcome, newest lowest: set for a failure.
    history: u32,
    /// Tries that must succeed.
    tries: u32,
    open: Option<Open>,
}

#[derive(Clone, Copy, Debug)]
struct Open {
    try_at: Instant,
    pause: Duration,
    trying: Option<Instant>,
    /// Tries that have succeeded since the last one that did not.
    good: u32,
    cause: Cause,
}

/// What an outcome changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Change {
    None,
    Opened,
    Closed,
}

impl Breaker {
    /// Closed; once open, it closes after `tries` good ones.
    pub(crate) const fn closing_after(tries: u32) -> Self {
        Self { history: 0, tries, open: None }
    }

    /// Why work is refused.
    pub(crate) fn open(&self) -> Option<Cause> {
        self.open.map(|open| open.cause)
    }

    /// True when work is refused, but a try would be let through.
    pub(crate) fn would_try(&self, now: Instant) -> bool {
        self.open.is_some_and(|open| open.trying.is_none() && now >= open.try_at)
    }

    /// Opens it, whatever was seen before. One that is open already stays as it is.
    pub(crate) fn trip(&mut self, cause: Cause, now: Instant) -> Change {
        if self.open.is_some() {
            return Change::None;
        }
        let (try_at, pause) = (now + PAUSE_MIN, PAUSE_MIN);
        self.open = Some(Open { try_at, pause, trying: None, good: 0, cause });
        Change::Opened
    }

    /// Whether an order may go to the device. While open: one after each pause, and after each that
    /// succeeds.
    pub(crate) fn admits(&mut self, now: impl FnOnce() -> Instant) -> bool {
        match &mut self.open {
            None => true,
            Some(open) if open.trying.is_some() => false,
            Some(open) => {
                let now = now();
                if now < open.try_at {
                    return false;
                }
                open.trying = Some(now);
                true
            }
        }
    }

    /// An order that went to the device ended.
    pub(crate) fn record(&mut self, failed: bool, now: impl FnOnce() -> Instant) -> Change {
        self.history = self.history << 1 | u32::from(failed);
        debug_assert_eq!(WINDOW, 32);
        let Some(open) = &mut self.open else {
            if self.history.count_ones() < FAULTS_MAX {
                return Change::None;
            }
            return self.trip(Cause::Errors, now());
        };
        // Orders from before it opened may still end; only the one let through decides.
        let Some(since) = open.trying else { return Change::None };
        let now = now();
        open.trying = None;
        if failed || now.saturating_duration_since(since) > TRY_MAX {
            open.good = 0;
            open.pause = (open.pause * 2).min(PAUSE_MAX);
            open.try_at = now + open.pause;
            return Change::None;
        }
        open.good += 1;
        // What fails for so long may do so for ever: the rest of the device is worth having.
        if open.good < self.tries && open.pause < PAUSE_MAX {
            return Change::None;
        }
        *self = Self::closing_after(self.tries);
        Change::Closed
    }
}

#[cfg(test)]
mod tests {
    use super::super::health::SLOW_AFTER;
    use super::*;

    #[test]
    fn single_failures_among_good_orders_do_not_open_it() {
        let now = Instant::now();
        let mut breaker = Breaker::closing_after(1);
        for order in 0..1000 {
            assert!(breaker.admits(|| now));
            assert_eq!(breaker.record(order % 8 == 0, || now), Change::None);
        }
    }

    #[test]
    fn it_opens_after_many_failures_tries_one_order_a_pause_and_closes_on_success() {
        let start = Instant::now();
        let mut breaker = Breaker::closing_after(1);
        for order in 1..=FAULTS_MAX {
            let expected = if order == FAULTS_MAX { Change::Opened } else { Change::None };
            assert_eq!(breaker.record(true, || start), expected);
        }
        assert_eq!(breaker.open(), Some(Cause::Errors));
        assert!(!breaker.admits(|| start) && !breaker.would_try(start));
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
        assert!(breaker.open().is_none() && breaker.admits(|| now));
        assert_eq!(breaker.record(true, || now), Change::None, "old failures are forgotten");
    }

    #[test]
    fn it_can_be_tripped_and_a_try_that_takes_too_long_is_a_failure() {
        let start = Instant::now();
        let mut breaker = Breaker::closing_after(1);
        assert_eq!(breaker.trip(Cause::Hung, start), Change::Opened);
        assert_eq!(breaker.trip(Cause::Errors, start), Change::None);
        assert_eq!(breaker.open(), Some(Cause::Hung));
        let later = start + PAUSE_MIN;
        assert!(breaker.would_try(later) && breaker.admits(|| later));
        let mut slow = breaker;
        assert_eq!(slow.record(false, || later + SLOW_AFTER * 2), Change::Closed, "slow, not bad");
        assert!(!breaker.would_try(later));
        let late = later + TRY_MAX * 2;
        assert_eq!(breaker.record(false, || late), Change::None);
        assert!(!breaker.admits(|| late + PAUSE_MIN), "the pause has doubled");
        let again = late + PAUSE_MIN * 2;
        assert!(breaker.admits(|| again));
        assert_eq!(breaker.record(false, || again + TRY_MAX), Change::Closed);
    }

    #[test]
    fn it_closes_when_two_tries_in_a_row_succeed_where_two_are_asked_for() {
        let mut now = Instant::now();
        let mut breaker = Breaker::closing_after(2);
        breaker.trip(Cause::Errors, now);
        now += PAUSE_MIN;
        let none = Change::None;
        for (failed, change) in
            [(false, none), (true, none), (false, none), (false, Change::Closed)]
        {
            assert!(breaker.admits(|| now), "the pause is over");
            assert!(!breaker.admits(|| now), "one at a time");
            assert_eq!(breaker.record(failed, || now), change);
            if failed {
                assert!(!breaker.would_try(now), "the next pause");
                now += PAUSE_MAX;
            }
        }
        // One place that never gets better keeps it open for a while, not for ever.
        breaker.trip(Cause::Errors, now);
        now += PAUSE_MIN;
        let closes_after = (0..20).find(|order| {
            now += PAUSE_MAX;
            assert!(breaker.admits(|| now));
            breaker.record(order % 2 == 0, || now) == Change::Closed
        });
        assert_eq!(closes_after, Some(7));
    }

    #[test]
    fn orders_from_before_it_opened_do_not_close_it() {
        let now = Instant::now();
        let mut breaker = Breaker::closing_after(1);
        for _ in 0..FAULTS_MAX {
            breaker.record(true, || now);
        }
        assert_eq!(breaker.record(false, || now), Change::None);
        assert!(breaker.open().is_some());
    }
}
