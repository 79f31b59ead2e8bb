//! Every number of a segment, of one moment.

use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};

use crate::telemetry::{
    Family, HISTOGRAM_WORDS, Latency, METRIC_WORDS, Metric, Unit, bucket_end, families,
};

const NANOS: f64 = 1e9;

/// The value of one series.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
#[serde(untagged)]
pub enum Value {
    /// A count, pages or bytes.
    Whole(u64),
    /// Seconds.
    Seconds(f64),
}

/// Every series of the metric table and every histogram, of one moment.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Numbers {
    pub(super) words: Vec<u64>,
}

impl Numbers {
    /// The word of one series; seconds are in nanoseconds.
    pub fn get(&self, metric: Metric) -> u64 {
        self.words[metric.index()]
    }

    /// Every series in table order: its family, its position in the family, its value.
    pub fn series(&self) -> impl Iterator<Item = (&'static Family, usize, Value)> + '_ {
        families().flat_map(move |(family, first)| {
            (0..family.series()).map(move |position| {
                let word = self.words[first + position];
                let value = match family.unit {
                    Unit::Seconds => Value::Seconds(word as f64 / NANOS),
                    Unit::Pages | Unit::Bytes | Unit::Count => Value::Whole(word),
                };
                (family, position, value)
            })
        })
    }

    /// Sum of the timed nanoseconds, the longest, and the bucket counts of one histogram.
    pub fn histogram(&self, latency: Latency) -> (u64, u64, &[u64]) {
        let first = METRIC_WORDS + latency as usize * HISTOGRAM_WORDS;
        let words = &self.words[first..first + HISTOGRAM_WORDS];
        (words[0], words[1], &words[2..])
    }
}

impl Serialize for Numbers {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(METRIC_WORDS))?;
        for (family, position, value) in self.series() {
            map.serialize_entry(
                &format!("{}{}", family.name, family.label_text(position)),
                &value,
            )?;
        }
        map.end()
    }
}

/// One latency histogram, summed up. Quantiles are upper ends of buckets at most a quarter wide.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct LatencyView {
    /// Kind of operation.
    pub kind: &'static str,
    /// Part of it.
    pub stage: &'static str,
    /// Operations timed.
    pub count: u64,
    /// Arithmetic mean, in microseconds.
    pub mean_us: f64,
    /// Median, in microseconds.
    pub p50_us: f64,
    /// 95th percentile, in microseconds.
    pub p95_us: f64,
    /// 99th percentile, in microseconds.
    pub p99_us: f64,
    /// Longest, in microseconds.
    pub max_us: f64,
}

impl LatencyView {
    pub(super) fn all(numbers: &Numbers) -> Vec<Self> {
        Latency::ALL.iter().map(|&latency| Self::of(numbers, latency)).collect()
    }

    fn of(numbers: &Numbers, latency: Latency) -> Self {
        let (sum_ns, max_ns, buckets) = numbers.histogram(latency);
        let count = buckets.iter().fold(0_u64, |sum, &bucket| sum.saturating_add(bucket));
        let micros = |nanos: u64| nanos as f64 / 1e3;
        let quantile = |percent| micros(quantile(buckets, count, percent).min(max_ns));
        Self {
            kind: latency.kind(),
            stage: latency.stage(),
            count,
            mean_us: if count == 0 { 0.0 } else { micros(sum_ns) / count as f64 },
            p50_us: quantile(50),
            p95_us: quantile(95),
            p99_us: quantile(99),
            max_us: micros(max_ns),
        }
    }
}

/// End of the bucket in which `percent` of `count` times are reached; `u64::MAX` past the last.
fn quantile(buckets: &[u64], count: u64, percent: u64) -> u64 {
    if count == 0 {
        return 0;
    }
    let rank = (u128::from(count) * u128::from(percent)).div_ceil(100);
    let mut below = 0_u128;
    for (bucket, &times) in buckets.iter().enumerate() {
        below += u128::from(times);
        if below >= rank {
            return bucket_end(bucket).unwrap_or(u64::MAX);
        }
    }
    u64::MAX
}
