//! Latencies of a replay: recorded in nanoseconds, reported in microseconds.

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

/// Longest latency kept apart, in nanoseconds: ten minutes. Longer ones count as this.
const LATENCY_NS_MAX: u64 = 600_000_000_000;
/// Kept significant digits.
const DIGITS: u8 = 3;

/// One histogram.
#[derive(Clone, Debug)]
pub(super) struct Latency(Histogram<u64>);

impl Default for Latency {
    fn default() -> Self {
        // Constant bounds that the type accepts; a histogram that grows stands in otherwise.
        Self(
            Histogram::new_with_bounds(1, LATENCY_NS_MAX, DIGITS)
                .unwrap_or_else(|_| unreachable!("bounds are constants in range")),
        )
    }
}

/// What a histogram holds, as it travels between processes: pairs of nanoseconds and count.
pub(super) type LatencyPairs = Vec<(u64, u64)>;

/// Percentiles, in microseconds.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Percentiles {
    /// Median.
    pub p50: f64,
    /// 95th.
    pub p95: f64,
    /// 99th.
    pub p99: f64,
    /// Largest.
    pub max: f64,
    /// Number of values.
    pub count: u64,
}

impl Latency {
    /// Records one latency.
    pub(super) fn record(&mut self, ns: u64) {
        self.0.saturating_record(ns);
    }

    /// Everything recorded.
    pub(super) fn pairs(&self) -> LatencyPairs {
        self.0.iter_recorded().map(|v| (v.value_iterated_to(), v.count_at_value())).collect()
    }

    /// Adds what another process recorded.
    pub(super) fn add(&mut self, pairs: &[(u64, u64)]) {
        for (ns, count) in pairs {
            self.0.saturating_record_n(*ns, *count);
        }
    }

    /// Percentiles; zeros when nothing was recorded.
    pub(super) fn percentiles(&self) -> Percentiles {
        if self.0.is_empty() {
            return Percentiles::default();
        }
        let us = |ns: u64| ns as f64 / 1000.0;
        let at = |quantile| us(self.0.value_at_quantile(quantile));
        Percentiles {
            p50: at(0.50),
            p95: at(0.95),
            p99: at(0.99),
            max: us(self.0.max()),
            count: self.0.len(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_survive_the_way_between_processes() {
        let mut one = Latency::default();
        for ns in 1..=1000 {
            one.record(ns * 1000);
        }
        let mut sum = Latency::default();
        sum.add(&one.pairs());
        sum.add(&Latency::default().pairs());
        let p = sum.percentiles();
        assert_eq!(p.count, 1000);
        assert!((p.p50 - 500.0).abs() < 1.0 && (p.p99 - 990.0).abs() < 2.0, "{p:?}");
        assert!((p.max - 1000.0).abs() < 1.0, "{p:?}");
        assert_eq!(Latency::default().percentiles(), Percentiles::default());
    }
}
