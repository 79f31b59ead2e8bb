//! The write budget: bytes that may be written to SSD a day, for the life of the drive.

use super::event::Nanos;
use super::limits::{WRITE_BURST_NS, WRITE_RESUME_NS};

const DAY_NS: u64 = 24 * 3600 * 1_000_000_000;

/// A bucket that fills with time and holds an hour's share. A write takes its whole slot from it,
/// image and footer, whether it succeeds or not. The last one may take more than there is: what is
/// owed comes off what follows, so that no page is larger than the budget. An empty bucket holds
/// writes back until a second's share is there.
#[derive(Clone, Copy, Debug)]
pub(super) struct WriteBudget {
    bytes_a_day: u64,
    /// In bytes × [`DAY_NS`]: exact at any rate. At most an hour's share, below 0 when owed.
    level: i128,
    at: Option<Nanos>,
    held: bool,
}

impl WriteBudget {
    /// A full bucket: what was written before a restart is not known, so each start may write an
    /// hour's share.
    pub(super) fn new(bytes_a_day: u64) -> Self {
        let full = share(bytes_a_day, WRITE_BURST_NS);
        Self { bytes_a_day, level: full, at: None, held: bytes_a_day == 0 }
    }

    /// Adds what has come in since the last time.
    pub(super) fn refill(&mut self, now: Nanos) {
        let passed = now.saturating_sub(self.at.unwrap_or(now));
        self.at = Some(self.at.unwrap_or(now).max(now));
        let full = share(self.bytes_a_day, WRITE_BURST_NS);
        self.level = self.level.saturating_add(share(self.bytes_a_day, passed)).min(full);
        if self.held && self.bytes_a_day > 0 {
            self.held = self.level < share(self.bytes_a_day, WRITE_RESUME_NS);
        }
    }

    /// Whether writes are held back.
    pub(super) fn is_held(&self) -> bool {
        self.held
    }

    /// Takes what a write needs.
    pub(super) fn take(&mut self, bytes: u64) {
        self.level -= i128::from(bytes) * i128::from(DAY_NS);
        self.held = self.level <= 0;
    }

    /// When writes may go on, if they are held back.
    pub(super) fn resumes(&self) -> Option<Nanos> {
        let missing = share(self.bytes_a_day, WRITE_RESUME_NS) - self.level;
        let wait = missing.max(0) as u128;
        let wait = wait.checked_div(u128::from(self.bytes_a_day))?;
        let wait = u64::try_from(wait).unwrap_or(u64::MAX).saturating_add(1);
        self.held.then(|| self.at.unwrap_or(0).saturating_add(wait))
    }

    /// Bytes that may be written at once.
    pub(super) fn left_bytes(&self) -> u64 {
        u64::try_from(self.level / i128::from(DAY_NS)).unwrap_or(0)
    }
}

/// What comes in during `time`.
fn share(bytes_a_day: u64, time: Nanos) -> i128 {
    i128::from(bytes_a_day).saturating_mul(i128::from(time))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;
    const HOUR: u64 = 3600 * SECOND;

    #[test]
    fn a_day_of_writing_takes_the_budget_and_an_hour_more() {
        let (budget, page) = (24_000_u64 << 20, 9 << 20);
        let mut bucket = WriteBudget::new(budget);
        let (mut now, mut written) = (5 * HOUR, 0);
        bucket.refill(now);
        assert_eq!(bucket.left_bytes(), budget / 24);
        let end = now + 24 * HOUR;
        while now < end {
            while !bucket.is_held() {
                bucket.take(page);
                written += page;
            }
            let then = bucket.resumes().expect("it fills again");
            assert!(then > now);
            now = then;
            bucket.refill(now);
            assert!(!bucket.is_held(), "it comes when it says");
        }
        let most = budget + budget / 24;
        assert!((most - 2 * page..=most + 2 * page).contains(&written), "{written} of {most}");
    }

    #[test]
    fn rest_saves_an_hour_and_no_more() {
        let mut bucket = WriteBudget::new(2400);
        bucket.refill(0);
        bucket.take(150);
        assert_eq!((bucket.left_bytes(), bucket.is_held()), (0, true));
        bucket.refill(100 * HOUR);
        assert_eq!((bucket.left_bytes(), bucket.is_held(), bucket.resumes()), (100, false, None));
        // Time never goes back; if it does, nothing comes of it.
        bucket.refill(HOUR);
        assert_eq!(bucket.left_bytes(), 100);
    }

    #[test]
    fn extremes_do_not_overflow() {
        let mut all = WriteBudget::new(u64::MAX);
        all.refill(0);
        all.refill(u64::MAX);
        all.take(u64::MAX);
        assert!(all.is_held() && all.resumes().is_some());
        let mut none = WriteBudget::new(0);
        none.refill(u64::MAX);
        assert_eq!((none.is_held(), none.resumes(), none.left_bytes()), (true, None, 0));
    }
}
