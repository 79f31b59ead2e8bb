//! What a device takes at the moment: decided from how its orders end and how long they take.

use std::sync::LazyLock;
use std::time::{Duration, Instant};

use super::breaker::Cause;

/// A chunk that is out for this long makes a device too slow to be written to.
pub(crate) const SLOW_AFTER: Duration = Duration::from_secs(1);
/// A chunk that is out for this long makes it hung.
pub(crate) const HUNG_AFTER: Duration = Duration::from_secs(5);
/// Seconds instead of [`HUNG_AFTER`], for tests only: a test that holds requests back for as long as
/// it needs must not race with this limit.
const HUNG_AFTER_VARIABLE: &str = "ORBITKV_TEST_HUNG_AFTER_S";
static HUNG_AFTER_NOW: LazyLock<Duration> = LazyLock::new(|| {
    let seconds = std::env::var(HUNG_AFTER_VARIABLE).ok().and_then(|value| value.parse().ok());
    seconds.map_or(HUNG_AFTER, Duration::from_secs)
});

/// [`HUNG_AFTER`], or what a test wants instead.
pub(crate) fn hung_after() -> Duration {
    *HUNG_AFTER_NOW
}

/// Mean time of a write above which no more are begun, and below which they are begun again.
const WRITES_STOP: Duration = Duration::from_secs(1);
const WRITES_RESUME: Duration = Duration::from_millis(500);
/// A device counts as slow for so long after the last sign of it: one that is slow now and then does
/// not change its state with each request.
const SLOW_HOLD: Duration = Duration::from_secs(2);

/// What a device takes at the moment, the best first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Health {
    /// Everything.
    Healthy,
    /// Reads; it answers so slowly that nothing new is written.
    Degraded,
    /// Reads; writes fail or hang, and one is tried now and then.
    ReadOnly,
    /// Nothing: reads fail or hang, and one is tried now and then.
    Off,
}

impl Health {
    /// The word that tools show.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Healthy => "healthy",
            Self::Degraded => "degraded",
            Self::ReadOnly => "read-only",
            Self::Off => "off",
        }
    }
}

/// What is known of one kind of work.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct Signs {
    /// Why its breaker is open.
    pub(crate) open: Option<Cause>,
    /// How long the oldest chunk has been out.
    pub(crate) oldest: Duration,
}

impl Signs {
    pub(crate) fn is_hung(&self) -> bool {
        self.oldest >= hung_after()
    }

    /// Why it is not done.
    pub(crate) fn refusal(&self) -> Option<Cause> {
        self.is_hung().then_some(Cause::Hung).or(self.open)
    }
}

/// The state of a device, and why.
pub(crate) fn judge(reads: Signs, writes: Signs, was_slow: bool) -> (Health, Option<Cause>) {
    let slow = reads.oldest.max(writes.oldest) >= SLOW_AFTER;
    match (reads.refusal(), writes.refusal()) {
        (Some(cause), _) => (Health::Off, Some(cause)),
        (None, Some(cause)) => (Health::ReadOnly, Some(cause)),
        (None, None) if slow || was_slow => (Health::Degraded, Some(Cause::Slow)),
        (None, None) => (Health::Healthy, None),
    }
}

/// Whether a device was slow a moment ago.
#[derive(Clone, Copy, Default, Debug)]
pub(crate) struct Slowness {
    /// Writes take too long on average.
    writes: bool,
    /// The last sign.
    at: Option<Instant>,
}

impl Slowness {
    /// Looks at the oldest chunk that is out and at the mean time of a write.
    pub(crate) fn look(&mut self, oldest: Duration, mean_write: Duration, now: Instant) {
        self.writes = mean_write > if self.writes { WRITES_RESUME } else { WRITES_STOP };
        if self.writes || oldest >= SLOW_AFTER {
            self.at = Some(now);
        }
    }

    /// Whether it counts as slow.
    pub(crate) fn holds(&self, now: Instant) -> bool {
        self.at.is_some_and(|at| now.saturating_duration_since(at) < SLOW_HOLD)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: Signs = Signs { open: None, oldest: Duration::ZERO };

    #[test]
    fn reads_decide_more_than_writes_and_errors_more_than_slowness() {
        let open = Signs { open: Some(Cause::Errors), ..NONE };
        let full = Signs { open: Some(Cause::NoSpace), ..NONE };
        let slow = Signs { oldest: SLOW_AFTER, ..NONE };
        let hung = Signs { oldest: HUNG_AFTER, ..NONE };
        for (reads, writes, expected) in [
            (NONE, NONE, (Health::Healthy, None)),
            (slow, NONE, (Health::Degraded, Some(Cause::Slow))),
            (NONE, slow, (Health::Degraded, Some(Cause::Slow))),
            (NONE, open, (Health::ReadOnly, Some(Cause::Errors))),
            (NONE, full, (Health::ReadOnly, Some(Cause::NoSpace))),
            (slow, hung, (Health::ReadOnly, Some(Cause::Hung))),
            (open, NONE, (Health::Off, Some(Cause::Errors))),
            (hung, full, (Health::Off, Some(Cause::Hung))),
        ] {
            assert_eq!(judge(reads, writes, false), expected, "{reads:?} {writes:?}");
        }
        assert_eq!(judge(NONE, NONE, true), (Health::Degraded, Some(Cause::Slow)));
        assert_eq!(judge(NONE, open, true).0, Health::ReadOnly);
    }

    #[test]
    fn writes_stop_above_a_second_and_resume_below_half_of_it() {
        let mut slow = Slowness::default();
        let mut now = Instant::now();
        for (ms, expected) in
            [(900, false), (1000, false), (1001, true), (501, true), (500, false), (900, false)]
        {
            now += SLOW_HOLD;
            slow.look(Duration::ZERO, Duration::from_millis(ms), now);
            assert_eq!(slow.holds(now), expected, "{ms} ms");
        }
    }

    #[test]
    fn it_stays_slow_for_a_while_after_the_last_sign() {
        let mut slow = Slowness::default();
        let start = Instant::now();
        assert!(!slow.holds(start));
        let mut states = Vec::new();
        // One request in two takes its time.
        for half_second in 0..12_u32 {
            let now = start + Duration::from_millis(500) * half_second;
            let oldest = if half_second % 2 == 0 { SLOW_AFTER } else { Duration::ZERO };
            slow.look(oldest, Duration::ZERO, now);
            states.push(slow.holds(now));
        }
        assert_eq!(states, [true; 12]);
        let last = start + Duration::from_secs(5);
        assert!(slow.holds(last + SLOW_HOLD - Duration::from_nanos(1)));
        assert!(!slow.holds(last + SLOW_HOLD));
    }
}
