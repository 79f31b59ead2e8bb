//! Percentiles of samples, medians of runs.

use serde::{Deserialize, Serialize};

use crate::ticks::Ticks;

/// Samples of one measurement that are kept; later ones are not taken.
pub(crate) const SAMPLES_MAX: usize = 1 << 20;

/// Samples of one measurement, in ticks.
#[derive(Debug)]
pub(crate) struct Samples {
    ticks: Vec<u64>,
}

impl Samples {
    /// Room for all samples, so that taking one allocates nothing.
    pub(crate) fn new() -> Self {
        Self { ticks: Vec::with_capacity(SAMPLES_MAX) }
    }

    /// Adds one, if there is room.
    pub(crate) fn add(&mut self, ticks: u64) {
        if self.ticks.len() < SAMPLES_MAX {
            self.ticks.push(ticks);
        }
    }

    /// Forgets all.
    pub(crate) fn clear(&mut self) {
        self.ticks.clear();
    }

    /// Whether no further sample is kept.
    pub(crate) fn is_full(&self) -> bool {
        self.ticks.len() >= SAMPLES_MAX
    }

    /// Sorts the samples and reads the percentiles, each divided by `parts`.
    pub(crate) fn summary(&mut self, ticks: Ticks, parts: u32) -> Summary {
        self.ticks.sort_unstable();
        let samples = self.ticks.len();
        if samples == 0 {
            return Summary::default();
        }
        let p99 = self.ticks[samples * 99 / 100];
        let each = |in_ticks: f64| ticks.ns(in_ticks) / f64::from(parts);
        Summary {
            p50_ns: each(middle_of(&self.ticks)),
            p99_ns: each(p99 as f64),
            samples: samples as u64,
        }
    }
}

/// Median of sorted samples, at least one. A counter may advance in steps (10 ns on some virtual
/// machines), so that most samples of a short round trip are one of two numbers: the median is
/// then read between them, as far into the samples that look alike as it lies.
fn middle_of(sorted: &[u64]) -> f64 {
    let middle = sorted[sorted.len() / 2];
    let first = sorted.partition_point(|sample| *sample < middle);
    let end = sorted.partition_point(|sample| *sample <= middle);
    let below = if first > 0 { sorted[first - 1] } else { middle };
    let above = sorted.get(end).copied().unwrap_or(middle);
    let low = f64::midpoint(below as f64, middle as f64);
    let high = f64::midpoint(middle as f64, above as f64);
    let depth = (sorted.len() as f64 / 2.0 - first as f64) / (end - first) as f64;
    low + (high - low) * depth
}

/// What a measurement came to.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Summary {
    /// Median, in nanoseconds.
    pub(crate) p50_ns: f64,
    /// 99th percentile, in nanoseconds.
    pub(crate) p99_ns: f64,
    /// How many samples.
    pub(crate) samples: u64,
}

/// Median of some numbers: the middle one, or the mean of both middle ones. Zero of none.
pub(crate) fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => 0.0,
        odd if odd % 2 == 1 => sorted[middle],
        _ => f64::midpoint(sorted[middle - 1], sorted[middle]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians() {
        assert_eq!(median(&[]), 0.0);
        assert_eq!(median(&[3.0]), 3.0);
        assert_eq!(median(&[9.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 9.0]), 3.0);
    }

    #[test]
    fn percentiles_of_a_ramp() {
        let ticks = Ticks::calibrate();
        let mut samples = Samples::new();
        assert_eq!(samples.summary(ticks, 1), Summary::default());
        for sample in (1..=1000).rev() {
            samples.add(sample);
        }
        let summary = samples.summary(ticks, 10);
        assert_eq!(summary.samples, 1000);
        assert!((summary.p50_ns - ticks.ns(500.5) / 10.0).abs() < 1e-9);
        assert!((summary.p99_ns - ticks.ns(991.0) / 10.0).abs() < 1e-9);
    }

    #[test]
    fn a_median_lies_between_the_steps_of_the_counter() {
        assert_eq!(middle_of(&[7]), 7.0);
        assert_eq!(middle_of(&[10, 20, 30]), 20.0);
        // 60 samples of 100 and 40 of 110: the step of 100 ends at 105, 5/6 of it lie below.
        let steps: Vec<u64> = [[100; 60].as_slice(), &[110; 40]].concat();
        assert!((middle_of(&steps) - (100.0 + 5.0 * 5.0 / 6.0)).abs() < 1e-9);
    }
}
