//! What a device takes at the moment: decided from how its orders end and how long they take.

use std::sync::LazyLock;
use std::time::Duration;

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

/// What a device takes at the moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
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
    fn refusal(&self) -> Option<Cause> {
        self.is_hung().then_some(Cause::Hung).or(self.open)
    }
}

/// The state of a device, and why.
pub(crate) fn judge(reads: Signs, writes: Signs, writes_slow: bool) -> (Health, Option<Cause>) {
    let slow = reads.oldest.max(writes.oldest) >= SLOW_AFTER;
    match (reads.refusal(), writes.refusal()) {
        (Some(cause), _) => (Health::Off, Some(cause)),
        (None, Some(cause)) => (Health::ReadOnly, Some(cause)),
        (None, None) if slow || writes_slow => (Health::Degraded, Some(Cause::Slow)),
        (None, None) => (Health::Healthy, None),
    }
}

/// Whether writes take too long, given whether they did and what they take now.
pub(crate) fn writes_are_slow(slow: bool, mean: Duration) -> bool {
    mean > if slow { WRITES_RESUME } else { WRITES_STOP }
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
        let mut slow = false;
        for (ms, expected) in
            [(900, false), (1000, false), (1001, true), (501, true), (500, false), (900, false)]
        {
            slow = writes_are_slow(slow, Duration::from_millis(ms));
            assert_eq!(slow, expected, "{ms} ms");
        }
    }
}
