//! How long the chunks of a worker have been out: told by the worker, read by the reactor even
//! while the worker is stuck.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::health::hung_after;

/// A mean that nothing is added to halves in this time, so that a device is tried again.
const MEAN_HALVES_NS: u64 = 2_000_000_000;
/// One chunk counts for an eighth of the mean.
const MEAN_SHARE: u64 = 8;

/// The pulse of one worker.
#[derive(Debug)]
pub(crate) struct Pulse {
    start: Instant,
    hung_after: Duration,
    /// Nanoseconds since `start` at which the oldest chunk went out, plus one; zero is none.
    oldest: AtomicU64,
    /// The same for a call that the worker itself waits in.
    call: AtomicU64,
    /// Mean time of a chunk in nanoseconds, and when it was last changed.
    mean_ns: AtomicU64,
    mean_at_ns: AtomicU64,
}

impl Pulse {
    pub(crate) fn new() -> Self {
        Self::hung_after(hung_after())
    }

    /// For work that nobody waits for.
    pub(crate) fn patient() -> Self {
        Self::hung_after(Duration::from_secs(u32::MAX.into()))
    }

    /// A chunk that is out for `hung_after` makes the worker give up what the kernel does not have.
    pub(crate) fn hung_after(hung_after: Duration) -> Self {
        Self {
            start: Instant::now(),
            hung_after,
            oldest: AtomicU64::new(0),
            call: AtomicU64::new(0),
            mean_ns: AtomicU64::new(0),
            mean_at_ns: AtomicU64::new(0),
        }
    }

    /// Nanoseconds since the start of the device.
    pub(crate) fn now_ns(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX - 1)
    }

    /// The oldest chunk that is out went out at this time.
    pub(crate) fn set_oldest(&self, sent_ns: Option<u64>) {
        self.oldest.store(sent_ns.map_or(0, |sent| sent + 1), Ordering::Relaxed);
    }

    /// The worker waits in `body` itself.
    pub(crate) fn in_call<T>(&self, body: impl FnOnce() -> T) -> T {
        self.call.store(self.now_ns() + 1, Ordering::Relaxed);
        let result = body();
        self.call.store(0, Ordering::Relaxed);
        result
    }

    /// A chunk took so long.
    pub(crate) fn add(&self, took_ns: u64, now_ns: u64) {
        let mean = mean_now(
            self.mean_ns.load(Ordering::Relaxed),
            self.mean_at_ns.load(Ordering::Relaxed),
            now_ns,
        );
        let mean = mean - mean / MEAN_SHARE + took_ns / MEAN_SHARE;
        self.mean_at_ns.store(now_ns, Ordering::Relaxed);
        self.mean_ns.store(mean, Ordering::Relaxed);
    }

    /// Mean time of a chunk.
    pub(crate) fn mean(&self) -> Duration {
        let (mean, at) =
            (self.mean_ns.load(Ordering::Relaxed), self.mean_at_ns.load(Ordering::Relaxed));
        Duration::from_nanos(mean_now(mean, at, self.now_ns()))
    }

    /// How long the oldest chunk, or call, has been out.
    pub(crate) fn oldest(&self) -> Duration {
        let now_ns = self.now_ns();
        let age = |word: &AtomicU64| match word.load(Ordering::Relaxed) {
            0 => 0,
            since => now_ns.saturating_sub(since - 1),
        };
        Duration::from_nanos(age(&self.oldest).max(age(&self.call)))
    }

    /// True when the kernel keeps something for too long.
    pub(crate) fn is_hung(&self) -> bool {
        self.oldest() >= self.hung_after
    }

    /// Time until it will be, unless something comes back; none when nothing is out or it is.
    pub(crate) fn until_hung(&self) -> Option<Duration> {
        if self.oldest.load(Ordering::Relaxed) == 0 {
            return None;
        }
        self.hung_after.checked_sub(self.oldest()).filter(|left| !left.is_zero())
    }
}

/// What is left of a mean after a time without chunks.
fn mean_now(mean_ns: u64, at_ns: u64, now_ns: u64) -> u64 {
    let halvings = now_ns.saturating_sub(at_ns) / MEAN_HALVES_NS;
    u32::try_from(halvings).ok().and_then(|halvings| mean_ns.checked_shr(halvings)).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mean_follows_the_chunks_and_fades_without_them() {
        let pulse = Pulse::new();
        for _ in 0..64 {
            pulse.add(1_000_000_000, 5);
        }
        let mean = pulse.mean_ns.load(Ordering::Relaxed);
        assert!((990_000_000..=1_000_000_000).contains(&mean), "{mean}");
        assert_eq!(mean_now(mean, 5, MEAN_HALVES_NS), mean);
        assert_eq!(mean_now(mean, 5, MEAN_HALVES_NS * 2 + 5), mean / 4);
        assert_eq!(mean_now(mean, 5, u64::MAX), 0);
        assert_eq!(mean_now(mean, 5, 0), mean, "the clocks of two threads may differ");
    }

    #[test]
    fn it_knows_what_is_out_and_when_that_is_too_long() {
        let pulse = Pulse::hung_after(Duration::from_nanos(1));
        assert_eq!((pulse.oldest(), pulse.until_hung()), (Duration::ZERO, None));
        assert!(!pulse.is_hung());
        pulse.set_oldest(Some(0));
        while !pulse.is_hung() {
            std::hint::spin_loop();
        }
        assert_eq!(pulse.until_hung(), None);
        pulse.set_oldest(None);
        assert!(!pulse.is_hung());
        pulse.in_call(|| while !pulse.is_hung() {});
        assert!(!pulse.is_hung());
        let patient = Pulse::new();
        patient.set_oldest(Some(patient.now_ns()));
        assert!(patient.until_hung().is_some_and(|left| left <= hung_after()));
    }
}
