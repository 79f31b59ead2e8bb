//! How many bytes of writes the device may hold while pages are read: decided from what the reads
//! cost, never from a clock or a counter of its own.
//!
//! A read waits for what is in the device already: its latency is (own bytes + write bytes in
//! flight) / bandwidth. So the bytes are limited, not the rate. What a read takes is divided by the
//! bytes that it had to wait for, its own and those of the reads in front, so that a deeper queue
//! of reads is not mistaken for a write in the way. Reads beside writes are held against reads
//! alone, which are learned anew all the time: a disk may change its speed within seconds. When no
//! read has been alone for a while, the writer pauses for a few of them.
//!
//! The limit rises slowly while few reads are slower than their bar allows, and is halved as soon
//! as two are. It never falls so low that writes get less than a tenth of the device.

/// Pages up to this length are small, in bytes.
pub(crate) const SMALL_PAGE_BYTES_MAX: u32 = 256 << 10;
/// Write bytes in flight beside reads at most, in bytes.
pub(crate) const BESIDE_READS_BYTES_MAX: u64 = 8 << 20;
/// Write bytes in flight beside reads that are always allowed: one request's worth that still
/// writes at a tenth of what the device can, in bytes.
pub(crate) const FLOOR_BYTES: u64 = 128 << 10;
/// Reads that the kernel holds at most, which is what the floor is measured by, in bytes.
const READ_BYTES_MAX: u64 = crate::core::limits::READS_IN_KERNEL_BYTES;
/// One byte of writes for this many of reads gives the writes a tenth of the device.
const FLOOR_SHARE: u64 = 8;
/// A read costs as much as this many bytes before its first byte.
const SETUP_BYTES: u64 = 128 << 10;
/// A read counts as "now" for this long, in nanoseconds.
pub(crate) const RECENT_NS: u64 = 1_000_000_000;
/// Reads that are looked back on.
const WINDOW: usize = 64;
/// Reads alone that make a baseline.
const BASELINE_MIN: usize = 16;
/// Reads for which a pause is meant, beyond those that began before it.
const PAUSE_READS: u64 = 16;
/// Shortest and longest pause of the writer, in nanoseconds.
const PAUSE_NS_MIN: u64 = 5_000_000;
const PAUSE_NS_MAX: u64 = 100_000_000;
/// The writer runs for this many pauses between two.
const PAUSES_APART: u64 = 9;
/// A baseline that nothing was added to for this long says nothing any more, in nanoseconds.
const BASELINE_NS: u64 = 10_000_000_000;

/// Pages of one size, as far as the limit is concerned.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ReadClass {
    /// Up to [`SMALL_PAGE_BYTES_MAX`].
    Small,
    /// All others.
    Large,
}

impl ReadClass {
    pub(crate) fn of(image_bytes: u32) -> Self {
        if image_bytes <= SMALL_PAGE_BYTES_MAX { Self::Small } else { Self::Large }
    }

    /// What a read beside writes may take, in percent of one alone: a little less than the 150 and
    /// 125 that are promised.
    const fn bar_percent(self) -> u64 {
        match self {
            Self::Small => 140,
            Self::Large => 120,
        }
    }

    /// By how much the limit rises at a time, in bytes.
    const fn step_bytes(self) -> u64 {
        match self {
            Self::Small => 32 << 10,
            Self::Large => 128 << 10,
        }
    }
}

/// One read, from its first byte asked for to its last in place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ReadSample {
    pub(crate) class: ReadClass,
    /// When it began and how long it took, in nanoseconds.
    pub(crate) begun_ns: u64,
    pub(crate) took_ns: u64,
    /// Bytes of reads that the kernel held when it began, its own included.
    pub(crate) queue_bytes: u64,
    /// No write was in flight from its begin to its end.
    pub(crate) alone: bool,
}

impl ReadSample {
    /// Nanoseconds for each MiB that it waited for.
    fn cost(&self) -> u64 {
        let bytes = self.queue_bytes + SETUP_BYTES;
        (u128::from(self.took_ns) * (1 << 20) / u128::from(bytes)) as u64
    }
}

/// The last costs of a kind.
#[derive(Clone, Copy, Debug)]
struct Costs {
    values: [u64; WINDOW],
    next: usize,
    len: usize,
}

impl Costs {
    const NONE: Self = Self { values: [0; WINDOW], next: 0, len: 0 };

    fn push(&mut self, cost: u64) {
        if let Some(place) = self.values.get_mut(self.next) {
            *place = cost;
        }
        self.next = (self.next + 1) % WINDOW;
        self.len = (self.len + 1).min(WINDOW);
    }

    /// The second largest: the 98th percentile of a full window, and no single hiccup.
    fn high(&self) -> u64 {
        let (mut first, mut second) = (0, 0);
        for &cost in self.values.iter().take(self.len) {
            if cost >= first {
                (first, second) = (cost, first);
            } else if cost > second {
                second = cost;
            }
        }
        second
    }
}

/// What is known of the reads of one class.
#[derive(Clone, Copy, Debug)]
struct Share {
    class: ReadClass,
    alone: Costs,
    beside: Costs,
    /// When the last read, and the last alone, ended.
    last_ns: Option<u64>,
    alone_ns: u64,
    /// Mean of what reads wait for, reads in front included, in bytes.
    queue_bytes: u64,
    /// Mean time between two reads and mean time of a read, in nanoseconds.
    apart_ns: u64,
    took_ns: u64,
    limit: u64,
    /// Reads from before this saw another limit.
    changed_ns: u64,
    seen: u32,
    over: u32,
}

impl Share {
    const fn new(class: ReadClass) -> Self {
        Self {
            class,
            alone: Costs::NONE,
            beside: Costs::NONE,
            last_ns: None,
            alone_ns: 0,
            queue_bytes: 0,
            apart_ns: PAUSE_NS_MAX,
            took_ns: 0,
            limit: FLOOR_BYTES,
            changed_ns: 0,
            seen: 0,
            over: 0,
        }
    }

    fn is_recent(&self, now_ns: u64) -> bool {
        self.last_ns.is_some_and(|last| now_ns.saturating_sub(last) < RECENT_NS)
    }

    /// Writes get a tenth of the device beside reads that never cease.
    fn floor(&self) -> u64 {
        (self.queue_bytes.min(READ_BYTES_MAX) / FLOOR_SHARE).max(FLOOR_BYTES)
    }

    /// What the rule of the device allows before anything was measured.
    fn start(&self, configured: u64) -> u64 {
        let beyond = self.queue_bytes * (self.class.bar_percent() - 100) / 100;
        beyond.min(configured)
    }

    fn record(&mut self, sample: &ReadSample, configured: u64) {
        let now_ns = sample.begun_ns + sample.took_ns;
        if self.is_recent(now_ns) {
            let apart = now_ns.saturating_sub(self.last_ns.unwrap_or(now_ns));
            self.queue_bytes = (self.queue_bytes * 15 + sample.queue_bytes) / 16;
            self.apart_ns = (self.apart_ns * 15 + apart) / 16;
            self.took_ns = (self.took_ns * 15 + sample.took_ns) / 16;
        } else {
            self.queue_bytes = sample.queue_bytes;
            (self.apart_ns, self.took_ns) = (PAUSE_NS_MAX, sample.took_ns);
            self.change(self.start(configured), now_ns);
        }
        self.last_ns = Some(self.last_ns.map_or(now_ns, |last| last.max(now_ns)));
        if sample.alone {
            if now_ns.saturating_sub(self.alone_ns) >= BASELINE_NS {
                self.alone = Costs::NONE;
            }
            self.alone.push(sample.cost());
            self.alone_ns = now_ns;
        } else {
            self.beside.push(sample.cost());
            self.judge(sample, now_ns);
        }
        self.limit = self.limit.clamp(self.floor(), BESIDE_READS_BYTES_MAX);
    }

    fn judge(&mut self, sample: &ReadSample, now_ns: u64) {
        let stale = now_ns.saturating_sub(self.alone_ns) >= BASELINE_NS;
        if self.alone.len < BASELINE_MIN || stale || sample.begun_ns < self.changed_ns {
            return;
        }
        self.seen += 1;
        if sample.cost() * 100 > self.alone.high() * self.class.bar_percent() {
            self.over += 1;
        }
        if self.over >= 2 {
            self.change(self.limit / 2, now_ns);
        } else if self.seen >= WINDOW as u32 {
            self.change(self.limit + self.class.step_bytes(), now_ns);
        }
    }

    fn change(&mut self, limit: u64, now_ns: u64) {
        self.limit = limit.clamp(self.floor(), BESIDE_READS_BYTES_MAX);
        (self.changed_ns, self.seen, self.over) = (now_ns, 0, 0);
    }

    /// The cost in time, for reads that wait for the usual number of bytes.
    fn usual_ns(&self, cost: u64) -> u64 {
        ((u128::from(cost) * u128::from(self.queue_bytes + SETUP_BYTES)) >> 20) as u64
    }
}

/// What reads of a class take, in nanoseconds; zero is unknown.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct ReadTimes {
    /// 98th percentile without writes.
    pub(crate) alone_ns: u64,
    /// 98th percentile with them.
    pub(crate) beside_ns: u64,
}

/// The decision for one device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WriteLimit {
    configured: u64,
    shares: [Share; 2],
    /// The writer sends nothing before this.
    pause_until_ns: u64,
}

impl WriteLimit {
    /// Starts from `configured` bytes.
    pub(crate) const fn new(configured: u64) -> Self {
        let shares = [Share::new(ReadClass::Small), Share::new(ReadClass::Large)];
        Self { configured, shares, pause_until_ns: 0 }
    }

    /// A read ended.
    pub(crate) fn record(&mut self, sample: &ReadSample) {
        let configured = self.configured;
        let Some(share) = self.shares.get_mut(sample.class as usize) else { return };
        share.record(sample, configured);
        let pause =
            (share.took_ns * 2 + share.apart_ns * PAUSE_READS).clamp(PAUSE_NS_MIN, PAUSE_NS_MAX);
        let now_ns = sample.begun_ns + sample.took_ns;
        let since = share.alone_ns.max(self.pause_until_ns);
        if !sample.alone && now_ns.saturating_sub(since) >= pause * PAUSES_APART {
            self.pause_until_ns = now_ns + pause;
        }
    }

    /// Write bytes that may be in flight beside the reads of the last second.
    pub(crate) fn bytes(&self, now_ns: u64) -> u64 {
        let recent = self.shares.iter().filter(|share| share.is_recent(now_ns));
        recent.map(|share| share.limit).min().unwrap_or(BESIDE_READS_BYTES_MAX)
    }

    /// Until when the writer sends nothing, so that some reads are alone.
    pub(crate) fn pause_until_ns(&self) -> u64 {
        self.pause_until_ns
    }

    /// What the reads of a class take.
    pub(crate) fn times(&self, class: ReadClass) -> ReadTimes {
        let Some(share) = self.shares.get(class as usize) else { return ReadTimes::default() };
        ReadTimes {
            alone_ns: share.usual_ns(share.alone.high()),
            beside_ns: share.usual_ns(share.beside.high()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::VecDeque;

    use proptest::prelude::*;

    const MIB: u64 = 1 << 20;

    /// A disk as measured: it works through what it holds in turn, at a speed that changes.
    struct Disk {
        limit: WriteLimit,
        now_ns: u64,
        bytes_per_ns: f64,
        /// Adds up to this share to single reads.
        noise: f64,
        random: u64,
        page_bytes: u64,
        depth: u64,
        written: u64,
        paused_ns: u64,
        running: VecDeque<ReadSample>,
        wrote_ns: Option<u64>,
    }

    impl Disk {
        fn new(configured: u64, page_bytes: u64, depth: u64) -> Self {
            Self {
                limit: WriteLimit::new(configured),
                now_ns: 0,
                bytes_per_ns: 2.6,
                noise: 0.1,
                random: 1,
                page_bytes,
                depth,
                written: 0,
                paused_ns: 0,
                running: VecDeque::new(),
                wrote_ns: None,
            }
        }

        fn chance(&mut self) -> f64 {
            self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (self.random >> 40) as f64 / (1_u64 << 24) as f64
        }

        /// One read beside as many writes as are allowed; the writer always has work.
        fn read(&mut self, writes: bool) {
            let paused = self.now_ns < self.limit.pause_until_ns();
            let beside = if writes && !paused { self.limit.bytes(self.now_ns) } else { 0 };
            let queue_bytes = self.page_bytes * self.depth;
            let noise = 1.0 + self.noise * self.chance();
            let work = (queue_bytes + beside + SETUP_BYTES) as f64 / self.bytes_per_ns;
            let took_ns = (work * noise) as u64;
            let sample = ReadSample {
                class: ReadClass::of(self.page_bytes as u32),
                begun_ns: self.now_ns,
                took_ns,
                queue_bytes,
                alone: beside == 0,
            };
            if beside > 0 {
                self.wrote_ns = Some(self.now_ns);
            }
            self.running.push_back(sample);
            // The others of the queue end in between.
            self.now_ns += took_ns / self.depth;
            self.written += beside / self.depth;
            self.paused_ns += if paused { took_ns / self.depth } else { 0 };
            while self.running.len() as u64 >= self.depth
                && let Some(mut sample) = self.running.pop_front()
            {
                sample.alone &= self.wrote_ns.is_none_or(|wrote| wrote < sample.begun_ns);
                self.limit.record(&sample);
            }
        }

        fn run(&mut self, seconds: f64, writes: bool) {
            let end = self.now_ns + (seconds * 1e9) as u64;
            while self.now_ns < end {
                self.read(writes);
            }
        }

        /// How much slower reads are than alone, by the rule of the device.
        fn slowdown(&self) -> f64 {
            let queue = (self.page_bytes * self.depth + SETUP_BYTES) as f64;
            (queue + self.limit.bytes(self.now_ns) as f64) / queue
        }
    }

    #[test]
    fn the_limit_settles_where_reads_keep_their_bar_and_writes_their_tenth() {
        for (page_bytes, depth, bar) in
            [(128 << 10, 16, 1.5), (MIB, 4, 1.25), (MIB, 16, 1.25), (9 * MIB, 1, 1.25)]
        {
            let mut disk = Disk::new(2 * MIB, page_bytes, depth);
            disk.run(10.0, true);
            for _ in 0..20 {
                disk.run(0.5, true);
                assert!(disk.slowdown() <= bar, "{page_bytes} × {depth}: {}", disk.slowdown());
            }
            let share = disk.written as f64 / (disk.now_ns as f64 * disk.bytes_per_ns);
            assert!(share >= 0.09, "{page_bytes} × {depth}: writes get {share}");
            assert!((disk.paused_ns as f64) < disk.now_ns as f64 * 0.15, "{page_bytes} × {depth}");
        }
    }

    #[test]
    fn a_disk_that_becomes_slower_or_faster_is_learned_anew() {
        let mut disk = Disk::new(2 * MIB, 9 * MIB, 1);
        disk.run(10.0, true);
        for speed in [1.3, 2.6, 1.3, 5.2] {
            disk.bytes_per_ns = speed;
            disk.run(10.0, true);
            assert!(disk.slowdown() > 1.1, "at {speed}: {} bytes", disk.limit.bytes(disk.now_ns));
            assert!(disk.slowdown() <= 1.25, "at {speed}: {} bytes", disk.limit.bytes(disk.now_ns));
            let expected = (9.0 * MIB as f64 + SETUP_BYTES as f64) / speed;
            let known = disk.limit.times(ReadClass::Large).alone_ns as f64;
            assert!((0.9..1.25).contains(&(known / expected)), "at {speed}: {known} {expected}");
        }
    }

    #[test]
    fn it_recovers_after_a_burst_of_slow_reads() {
        let mut disk = Disk::new(2 * MIB, 9 * MIB, 1);
        disk.run(10.0, true);
        let before = disk.limit.bytes(disk.now_ns);
        disk.noise = 20.0;
        disk.run(0.5, true);
        assert!(disk.limit.bytes(disk.now_ns) < before);
        disk.noise = 0.1;
        disk.run(20.0, true);
        assert!(disk.limit.bytes(disk.now_ns) * 10 >= before * 7);
    }

    #[test]
    fn small_reads_hold_the_limit_down_for_a_second() {
        let mut disk = Disk::new(2 * MIB, 9 * MIB, 1);
        disk.run(5.0, true);
        let large = disk.limit.bytes(disk.now_ns);
        disk.page_bytes = 128 << 10;
        disk.run(0.5, true);
        let small = disk.limit.bytes(disk.now_ns);
        assert!(small < large && small <= MIB / 2, "{small} {large}");
        disk.page_bytes = 9 * MIB;
        disk.run(1.1, true);
        assert!(disk.limit.bytes(disk.now_ns) > small);
        assert_eq!(disk.limit.bytes(disk.now_ns + RECENT_NS), BESIDE_READS_BYTES_MAX);
    }

    #[test]
    fn the_writer_never_pauses_for_reads_that_are_alone_anyway() {
        let mut disk = Disk::new(2 * MIB, MIB, 1);
        disk.run(5.0, false);
        assert_eq!(disk.paused_ns, 0);
        assert_eq!(disk.limit.pause_until_ns(), 0);
    }

    #[test]
    fn the_rule_of_the_device_bounds_the_start_and_the_configured_value_too() {
        for (page_bytes, configured, expected) in
            [(9 * MIB, 2 * MIB, 9 * MIB / 5), (9 * MIB, MIB, 9 * MIB / 8), (MIB, 2 * MIB, MIB / 5)]
        {
            let mut disk = Disk::new(configured, page_bytes, 1);
            disk.read(true);
            assert_eq!(disk.limit.bytes(disk.now_ns), expected, "{page_bytes} {configured}");
        }
    }

    #[test]
    fn one_hiccup_is_not_the_98th_percentile() {
        let mut costs = Costs::NONE;
        assert_eq!(costs.high(), 0);
        for cost in 1..=200 {
            costs.push(cost);
        }
        costs.push(9999);
        assert_eq!(costs.high(), 200);
        costs.push(9999);
        assert_eq!(costs.high(), 9999);
    }

    proptest! {
        /// Whatever is measured, the limit stays between its bounds and pauses stay rare.
        #[test]
        fn the_limit_keeps_its_bounds_under_any_samples(
            configured in 256_u64 << 10..=8 << 20,
            samples in proptest::collection::vec(
                (any::<bool>(), 0_u64..2_000_000_000, 0_u64..1_000_000_000, 0_u64..64 << 20, any::<bool>()),
                1..400,
            ),
        ) {
            let mut limit = WriteLimit::new(configured);
            let (mut now_ns, mut last_ns) = (0, 0);
            for (small, later_ns, took_ns, queue_bytes, alone) in samples {
                let class = if small { ReadClass::Small } else { ReadClass::Large };
                now_ns += later_ns / 100;
                last_ns = last_ns.max(now_ns + took_ns);
                limit.record(&ReadSample { class, begun_ns: now_ns, took_ns, queue_bytes, alone });
                now_ns += took_ns / 4;
                let bytes = limit.bytes(now_ns);
                prop_assert!((FLOOR_BYTES..=BESIDE_READS_BYTES_MAX).contains(&bytes));
                prop_assert!(limit.pause_until_ns() <= last_ns + PAUSE_NS_MAX);
                for class in [ReadClass::Small, ReadClass::Large] {
                    limit.times(class);
                }
            }
        }
    }
}
