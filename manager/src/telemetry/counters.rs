//! Numbers in private memory, and which of them changed since they were last published.

use orbitkv_shm_protocol::record::{Completion, RequestKind};
use orbitkv_shm_protocol::telemetry::{
    HISTOGRAM_WORDS, LATENCY_WORDS, Latency, METRIC_WORDS, Metric, bucket_of,
};

const WORDS: usize = METRIC_WORDS + LATENCY_WORDS;
const MASKS: usize = WORDS.div_ceil(64);

/// Every number of the metric table and of the latency histograms.
///
/// Plain memory of one thread: an update is an add and a bit. Counters wrap after 2^64, which none
/// reaches.
#[derive(Clone, Debug)]
pub struct Counters {
    words: Box<[u64]>,
    changed: [u64; MASKS],
}

impl Default for Counters {
    fn default() -> Self {
        Self::new()
    }
}

impl Counters {
    /// All zero.
    pub fn new() -> Self {
        Self { words: vec![0; WORDS].into_boxed_slice(), changed: [0; MASKS] }
    }

    /// Adds to a counter (or a gauge).
    #[inline]
    pub fn add(&mut self, metric: Metric, amount: u64) {
        if amount != 0 {
            self.add_word(metric.index(), amount);
        }
    }

    /// Sets a gauge, or a counter that is counted elsewhere, to its whole value. Seconds are in
    /// nanoseconds.
    #[inline]
    pub fn set(&mut self, metric: Metric, value: u64) {
        self.set_word(metric.index(), value);
    }

    /// The value now.
    pub fn get(&self, metric: Metric) -> u64 {
        self.words[metric.index()]
    }

    /// Puts one time into a histogram.
    pub fn time(&mut self, latency: Latency, nanos: u64) {
        let first = METRIC_WORDS + latency as usize * HISTOGRAM_WORDS;
        self.add_word(first, nanos);
        self.set_word(first + 1, self.words[first + 1].max(nanos));
        self.add_word(first + 2 + bucket_of(nanos), 1);
    }

    /// Counts an operation that ends: kind, status, code and the time of each stage that it has
    /// reached (stages it never reached are zero in the record).
    pub fn completed(&mut self, completion: &Completion) {
        self.add(Metric::OperationsCompleted(completion.kind, completion.status), 1);
        self.add(Metric::OperationCodes(completion.code), 1);
        let (queued, prepared) = (completion.queued_ns, completion.prepared_ns);
        let (copied, published) = (completion.copied_ns, completion.published_ns);
        let mut span = |latency, from: u64, to: u64| {
            if from != 0 && to >= from {
                self.time(latency, to - from);
            }
        };
        match completion.kind {
            RequestKind::Query => {
                span(Latency::QueryPrepare, queued, prepared);
                span(Latency::QueryTotal, queued, published);
            }
            RequestKind::Prepare => span(Latency::PrepareTotal, queued, published),
            RequestKind::Restore => {
                span(Latency::RestorePrepare, queued, prepared);
                span(Latency::RestoreCopy, prepared, copied);
                span(Latency::RestorePublish, copied, published);
                span(Latency::RestoreTotal, queued, published);
            }
            RequestKind::Save => {
                span(Latency::SavePrepare, queued, prepared);
                span(Latency::SaveCopy, prepared, copied);
                span(Latency::SavePublish, copied, published);
                span(Latency::SaveTotal, queued, published);
            }
            RequestKind::Release
            | RequestKind::Cancel
            | RequestKind::Forget
            | RequestKind::Unregister
            | RequestKind::Ping
            | RequestKind::Drain => {}
        }
    }

    /// Whether anything changed since [`take_changed`](Self::take_changed).
    pub(super) fn is_changed(&self) -> bool {
        self.changed.iter().any(|&mask| mask != 0)
    }

    /// Hands every word out again, changed or not.
    pub(super) fn mark_all(&mut self) {
        for (block, mask) in self.changed.iter_mut().enumerate() {
            let words = (WORDS - block * 64).min(64);
            *mask = u64::MAX >> (64 - words);
        }
    }

    /// Hands out every changed word once.
    pub(super) fn take_changed(&mut self, mut store: impl FnMut(usize, u64)) {
        for (block, mask) in self.changed.iter_mut().enumerate() {
            while *mask != 0 {
                let word = block * 64 + mask.trailing_zeros() as usize;
                *mask &= *mask - 1;
                store(word, self.words[word]);
            }
        }
    }

    #[inline]
    fn add_word(&mut self, word: usize, amount: u64) {
        self.words[word] = self.words[word].wrapping_add(amount);
        self.changed[word / 64] |= 1 << (word % 64);
    }

    #[inline]
    fn set_word(&mut self, word: usize, value: u64) {
        if self.words[word] != value {
            self.words[word] = value;
            self.changed[word / 64] |= 1 << (word % 64);
        }
    }
}

#[cfg(test)]
mod tests {
    use orbitkv_shm_protocol::ids::OperationId;
    use orbitkv_shm_protocol::record::{Code, Status};

    use super::*;

    fn changed(counters: &mut Counters) -> Vec<(usize, u64)> {
        let mut words = Vec::new();
        counters.take_changed(|word, value| words.push((word, value)));
        words
    }

    /// Exactly the words that changed are handed out, once, with their latest value.
    #[test]
    fn only_changes_are_published() {
        let mut counters = Counters::new();
        assert!(!counters.is_changed());
        counters.add(Metric::LookupPages, 10);
        counters.add(Metric::LookupPages, 20);
        counters.add(Metric::SsdWriteQueueFull, 0);
        counters.set(Metric::PoolUsedBytes, 4096);
        counters.set(Metric::PoolPinnedBytes, 0);
        assert!(counters.is_changed());
        let mut expected =
            vec![(Metric::LookupPages.index(), 30), (Metric::PoolUsedBytes.index(), 4096)];
        expected.sort_unstable();
        assert_eq!(changed(&mut counters), expected);
        assert!(!counters.is_changed());
        counters.set(Metric::PoolUsedBytes, 4096);
        assert_eq!(changed(&mut counters), []);
        counters.set(Metric::PoolUsedBytes, 0);
        assert_eq!(changed(&mut counters), [(Metric::PoolUsedBytes.index(), 0)]);
    }

    #[test]
    fn marked_words_are_handed_out_once_each() {
        let mut counters = Counters::new();
        counters.mark_all();
        let words: Vec<usize> = changed(&mut counters).iter().map(|&(word, _)| word).collect();
        assert!(words.into_iter().eq(0..WORDS));
        assert!(!counters.is_changed());
    }

    /// The last word of the last mask is reachable: the longest time of the last histogram.
    #[test]
    fn last_bucket_of_last_histogram_is_the_last_word() {
        let mut counters = Counters::new();
        counters.time(*Latency::ALL.last().expect("some"), u64::MAX);
        assert_eq!(changed(&mut counters).last(), Some(&(WORDS - 1, 1)));
    }

    #[test]
    fn completions_are_counted_and_their_reached_stages_timed() {
        let operation = OperationId { index: 0, generation: 1 };
        let mut counters = Counters::new();
        let mut restore = Completion::ok(operation, RequestKind::Restore);
        restore.queued_ns = 1_000;
        restore.prepared_ns = 3_000;
        restore.copied_ns = 9_000;
        restore.published_ns = 10_000;
        counters.completed(&restore);
        let mut cut = Completion::ok(operation, RequestKind::Query);
        (cut.status, cut.code) = (Status::Error, Code::Deadline);
        (cut.queued_ns, cut.published_ns) = (1_000, 2_000);
        counters.completed(&cut);

        assert_eq!(counters.get(Metric::OperationsCompleted(RequestKind::Restore, Status::Ok)), 1);
        assert_eq!(counters.get(Metric::OperationsCompleted(RequestKind::Query, Status::Error)), 1);
        assert_eq!(counters.get(Metric::OperationCodes(Code::None)), 1);
        assert_eq!(counters.get(Metric::OperationCodes(Code::Deadline)), 1);
        let sums: Vec<u64> = Latency::ALL
            .iter()
            .map(|&latency| counters.words[METRIC_WORDS + latency as usize * HISTOGRAM_WORDS])
            .collect();
        // QueryPrepare, QueryTotal, PrepareTotal, Restore*, Save*
        assert_eq!(sums, [0, 1_000, 0, 2_000, 6_000, 1_000, 9_000, 0, 0, 0, 0]);
    }
}
