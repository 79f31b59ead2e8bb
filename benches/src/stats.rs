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
        let at = |share: f64| {
            let index = ((self.ticks.len() as f64 * share) as usize).min(self.ticks.len() - 1);
            ticks.ns(self.ticks[index]) / f64::from(parts)
        };
        if self.ticks.is_empty() {
            return Summary::default();
        }
        Summary { p50_ns: at(0.5), p99_ns: at(0.99), samples: self.ticks.len() as u64 }
    }
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
        assert!((summary.p50_ns - ticks.ns(501) / 10.0).abs() < 1e-9);
        assert!((summary.p99_ns - ticks.ns(991) / 10.0).abs() < 1e-9);
    }
}
