//! Budgets: two exact counters, changed only where admission decides.

/// Bytes leased in total and speculatively, with their limits and peaks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Budget {
    pub(super) total: Counter,
    pub(super) speculative: Counter,
    /// Most bytes that one session may lease.
    pub(super) session_limit: u64,
}

/// One exact counter.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Counter {
    used: u64,
    limit: u64,
    peak: u64,
}

impl Counter {
    const fn new(limit: u64) -> Self {
        Self { used: 0, limit, peak: 0 }
    }

    pub(super) const fn used(&self) -> u64 {
        self.used
    }

    pub(super) const fn limit(&self) -> u64 {
        self.limit
    }

    pub(super) const fn peak(&self) -> u64 {
        self.peak
    }

    pub(super) const fn available(&self) -> u64 {
        self.limit - self.used
    }

    fn take(&mut self, bytes: u64) {
        debug_assert!(bytes <= self.available(), "admission over the limit");
        self.used += bytes;
        self.peak = self.peak.max(self.used);
    }

    fn give(&mut self, bytes: u64) {
        debug_assert!(bytes <= self.used, "more bytes given back than taken");
        self.used -= bytes;
    }
}

impl Budget {
    pub(super) const fn new(total: u64, speculative: u64, session_limit: u64) -> Self {
        Self { total: Counter::new(total), speculative: Counter::new(speculative), session_limit }
    }

    /// Bytes that a session holding `session_used` could lease with everything else released.
    pub(super) fn ceiling(&self, speculative: bool) -> u64 {
        let limit = self.total.limit.min(self.session_limit);
        if speculative { limit.min(self.speculative.limit) } else { limit }
    }

    /// Bytes that a session holding `session_used` could lease now.
    pub(super) fn available(&self, session_used: u64, speculative: bool) -> u64 {
        let session = self.session_limit.saturating_sub(session_used);
        let available = self.total.available().min(session);
        if speculative { available.min(self.speculative.available()) } else { available }
    }

    pub(super) fn take(&mut self, bytes: u64, speculative: bool) {
        self.total.take(bytes);
        if speculative {
            self.speculative.take(bytes);
        }
    }

    pub(super) fn give(&mut self, bytes: u64, speculative: bool) {
        self.total.give(bytes);
        if speculative {
            self.speculative.give(bytes);
        }
    }

    /// Bytes of a hint, which counts only as speculative.
    pub(super) fn take_hint(&mut self, bytes: u64) {
        self.speculative.take(bytes);
    }

    pub(super) fn give_hint(&mut self, bytes: u64) {
        self.speculative.give(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_limit_binds_before_the_total() {
        let mut budget = Budget::new(100, 25, 60);
        budget.take(50, false);
        assert_eq!(budget.available(50, false), 10);
        assert_eq!(budget.available(0, false), 50);
        assert_eq!(budget.available(0, true), 25);
        assert_eq!(budget.ceiling(false), 60);
        assert_eq!(budget.ceiling(true), 25);
        budget.take(20, true);
        budget.give(50, false);
        assert_eq!((budget.total.used(), budget.speculative.used()), (20, 20));
        assert_eq!((budget.total.peak(), budget.speculative.peak()), (70, 20));
    }
}
