//! What the reader tells the writer of one device: what reads cost, and so how much it may write.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::counters::DeviceCounters;
use super::limit::{RECENT_NS, ReadClass, ReadSample, WriteLimit};

/// Write bytes in flight while nothing is read, in bytes: as many as a plain loop needs for its best.
const WITHOUT_READS_BYTES: u64 = 32 << 20;

/// Shared by the reader and the writer of a device. Both ask rarely: a page, a turn.
#[derive(Debug)]
pub(crate) struct ReadActivity {
    start: Instant,
    configured: u64,
    /// Nanoseconds since `start` at which a read last began or ended, plus one; zero is never.
    last_read: AtomicU64,
    /// As decided by the reader.
    limit: AtomicU64,
    pause_until: AtomicU64,
    /// Write chunks that the kernel has, and that it ever got.
    writes_out: AtomicU64,
    writes_sent: AtomicU64,
}

/// What the writer may do now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Allowance {
    /// Have this many bytes in flight.
    Bytes(u64),
    /// Send nothing for so long.
    Pause(Duration),
}

/// What a read found when it began.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ReadMark {
    begun_ns: u64,
    writes: Option<u64>,
    /// Bytes of reads that the kernel holds, its own included.
    queue_bytes: u64,
}

impl ReadMark {
    /// The same, once it is known how many bytes travel with it.
    pub(crate) fn waiting_for(self, queue_bytes: u64) -> Self {
        Self { queue_bytes, ..self }
    }
}

impl ReadActivity {
    /// Starts from `configured` write bytes in flight.
    pub(crate) fn new(configured: u64) -> Self {
        Self {
            start: Instant::now(),
            configured,
            last_read: AtomicU64::new(0),
            limit: AtomicU64::new(configured),
            pause_until: AtomicU64::new(0),
            writes_out: AtomicU64::new(0),
            writes_sent: AtomicU64::new(0),
        }
    }

    /// Reads never cease and allow `limit` bytes.
    #[cfg(test)]
    pub(crate) fn held_at(limit: u64) -> Self {
        let activity = Self::new(limit);
        activity.last_read.store(u64::MAX, Ordering::Relaxed);
        activity
    }

    fn now_ns(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX - 1)
    }

    fn saw_read(&self, now_ns: u64) {
        self.last_read.store(now_ns + 1, Ordering::Relaxed);
    }

    /// A read begins.
    pub(crate) fn begin(&self, queue_bytes: u64) -> ReadMark {
        let begun_ns = self.now_ns();
        self.saw_read(begun_ns);
        ReadMark { begun_ns, writes: self.quiet(), queue_bytes }
    }

    /// Writes sent so far, when none is out.
    fn quiet(&self) -> Option<u64> {
        let sent = self.writes_sent.load(Ordering::Acquire);
        (self.writes_out.load(Ordering::Acquire) == 0).then_some(sent)
    }

    /// The writer handed over a chunk or got some back; `out` are with the kernel now.
    pub(crate) fn writes(&self, sent: u64, out: u64) {
        self.writes_out.store(out, Ordering::Release);
        self.writes_sent.fetch_add(sent, Ordering::Release);
    }

    /// What the writer may do now.
    pub(crate) fn allowance(&self) -> Allowance {
        let load = |word: &AtomicU64| word.load(Ordering::Relaxed);
        let (last_read, pause_until) = (load(&self.last_read), load(&self.pause_until));
        allowance(self.now_ns(), last_read, pause_until, load(&self.limit), self.configured)
    }
}

fn allowance(
    now_ns: u64,
    last_read: u64,
    pause_until_ns: u64,
    limit: u64,
    configured: u64,
) -> Allowance {
    let reads = last_read != 0 && now_ns.saturating_sub(last_read - 1) < RECENT_NS;
    match pause_until_ns.saturating_sub(now_ns) {
        _ if !reads => Allowance::Bytes(configured.max(WITHOUT_READS_BYTES)),
        0 => Allowance::Bytes(limit),
        left => Allowance::Pause(Duration::from_nanos(left)),
    }
}

/// The reader's side: learns from every read.
pub(crate) struct ReadMeter {
    limit: WriteLimit,
    activity: Arc<ReadActivity>,
    counters: Arc<DeviceCounters>,
}

impl ReadMeter {
    pub(crate) fn new(activity: Arc<ReadActivity>, counters: Arc<DeviceCounters>) -> Self {
        Self { limit: WriteLimit::new(activity.configured), activity, counters }
    }

    /// A read begins; the kernel will hold `queue_bytes` of reads with it.
    pub(crate) fn begin(&self, queue_bytes: u64) -> ReadMark {
        self.activity.begin(queue_bytes)
    }

    /// A page of `image_bytes` is in place.
    pub(crate) fn end(&mut self, image_bytes: u32, mark: ReadMark) {
        let now_ns = self.activity.now_ns();
        self.activity.saw_read(now_ns);
        let alone = mark.writes.is_some() && mark.writes == self.activity.quiet();
        let class = ReadClass::of(image_bytes);
        self.limit.record(&ReadSample {
            class,
            begun_ns: mark.begun_ns,
            took_ns: now_ns.saturating_sub(mark.begun_ns),
            queue_bytes: mark.queue_bytes,
            alone,
        });
        self.activity.limit.store(self.limit.bytes(now_ns), Ordering::Relaxed);
        self.activity.pause_until.store(self.limit.pause_until_ns(), Ordering::Relaxed);
    }

    /// Shows what was learned.
    pub(crate) fn show(&self) {
        let (small, large) =
            (self.limit.times(ReadClass::Small), self.limit.times(ReadClass::Large));
        for (gauge, ns) in [
            (&self.counters.small_read_alone_ns, small.alone_ns),
            (&self.counters.small_read_beside_ns, small.beside_ns),
            (&self.counters.large_read_alone_ns, large.alone_ns),
            (&self.counters.large_read_beside_ns, large.beside_ns),
        ] {
            gauge.store(ns, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn the_decision_holds_for_a_second_after_the_last_read() {
        let at = |now_ns, last_read, pause| allowance(now_ns, last_read, pause, MIB, 2 * MIB);
        let free = Allowance::Bytes(WITHOUT_READS_BYTES);
        assert_eq!(at(500, 0, 0), free, "never read");
        assert_eq!(at(500, 1, 0), Allowance::Bytes(MIB));
        assert_eq!(at(RECENT_NS - 1, 1, 0), Allowance::Bytes(MIB));
        assert_eq!(at(RECENT_NS, 1, 0), free);
        assert_eq!(at(0, 500, 0), Allowance::Bytes(MIB), "the clocks of two threads may differ");
        assert_eq!(at(500, 1, 600), Allowance::Pause(Duration::from_nanos(100)));
        assert_eq!(at(RECENT_NS, 1, RECENT_NS + 9), free, "nobody to pause for");
        let configured = 2 * WITHOUT_READS_BYTES;
        assert_eq!(allowance(0, 0, 0, MIB, configured), Allowance::Bytes(configured));
    }

    #[test]
    fn a_read_is_alone_when_no_write_was_out_from_its_begin_to_its_end() {
        let activity = Arc::new(ReadActivity::new(2 * MIB));
        let alone = |mark: ReadMark| mark.writes.is_some() && mark.writes == activity.quiet();
        let mark = activity.begin(MIB);
        assert!(alone(mark));
        activity.writes(1, 1);
        assert!(!alone(mark), "one came");
        let beside = activity.begin(MIB);
        activity.writes(0, 0);
        assert!(!alone(mark), "one came and went");
        assert!(!alone(beside), "one was there");
        assert!(alone(activity.begin(MIB)));
    }
}
