//! How many bytes the kernel holds of one direction: whichever of two amounts moves more.
//!
//! No amount is best everywhere. A drive of its own wants a deep queue, a disk that others share can
//! be a tenth faster with two requests, and a virtual disk changes its mind. So both are tried while
//! there is more to send than the kernel may have, the better one most of the time.
//!
//! A trial is a run of bytes that came back. What the kernel still held of the trial before is not
//! counted, and a trial in which the kernel ran out of orders says nothing.

use std::time::{Duration, Instant};

/// Bytes of a trial: some ten milliseconds of a fast drive.
const TRIAL_BYTES: u64 = 32 << 20;
/// A trial that takes longer ends all the same.
const TRIAL_MAX: Duration = Duration::from_millis(200);
/// Trials between two of the amount that is not in use, at least and at most: the fewer, the less often
/// it won.
const PROBE_TRIALS: std::ops::RangeInclusive<u32> = 4..=64;
/// The amount in use is left for one that is faster by more than this share of 256.
const BETTER_256THS: u64 = 8;

/// The amounts of a direction and which one is in use.
#[derive(Clone, Debug)]
pub(crate) struct Depth {
    bytes: [u64; 2],
    /// Bytes a second, smoothed; zero is unknown.
    speeds: [u64; 2],
    in_use: usize,
    trying: usize,
    trial: Option<Trial>,
    /// Trials of the amount in use until the other one is tried.
    left: u32,
    pause: u32,
}

/// What came back since a trial began.
#[derive(Clone, Copy, Debug)]
struct Trial {
    /// Bytes of the trial before that are still to come back.
    unsettled: u64,
    bytes: u64,
    begun: Instant,
}

impl Depth {
    /// Begins with the larger of two amounts of bytes.
    pub(crate) const fn new(few: u64, many: u64) -> Self {
        let pause = *PROBE_TRIALS.start();
        Self {
            bytes: [few, many],
            speeds: [0; 2],
            in_use: 1,
            trying: 1,
            trial: None,
            left: pause,
            pause,
        }
    }

    /// Bytes that the kernel may hold now.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes[self.trying]
    }

    /// The kernel holds `held` bytes and there is nothing more to send.
    pub(crate) fn ran_out(&mut self, held: u64) {
        if held < self.bytes() / 2 {
            self.trial = None;
        }
    }

    /// The kernel gave `bytes` back by `now` and holds `held`.
    pub(crate) fn ended(&mut self, bytes: u64, held: u64, now: Instant) {
        let trial = self.trial.get_or_insert(Trial { unsettled: held, bytes: 0, begun: now });
        if trial.unsettled > 0 {
            trial.unsettled = trial.unsettled.saturating_sub(bytes);
            trial.begun = now;
            return;
        }
        trial.bytes += bytes;
        let took = now.saturating_duration_since(trial.begun);
        if trial.bytes < TRIAL_BYTES && took < TRIAL_MAX {
            return;
        }
        let speed = u128::from(trial.bytes) * 1_000_000_000 / took.as_nanos().max(1);
        self.trial = None;
        self.learn(u64::try_from(speed).unwrap_or(u64::MAX));
    }

    fn learn(&mut self, speed: u64) {
        let known = &mut self.speeds[self.trying];
        *known = if *known == 0 { speed } else { *known - *known / 4 + speed / 4 };
        let other = 1 - self.in_use;
        if self.trying == other {
            let (here, there) = (self.speeds[self.in_use], self.speeds[other]);
            if there > here + here / 256 * BETTER_256THS {
                self.in_use = other;
                self.pause = *PROBE_TRIALS.start();
            } else {
                self.pause = (self.pause * 2).min(*PROBE_TRIALS.end());
            }
            self.left = self.pause;
            self.trying = self.in_use;
        } else {
            self.left = self.left.saturating_sub(1);
            if self.left == 0 {
                self.trying = other;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// A disk that moves so many bytes in a microsecond with few and with many of them in the kernel.
    struct Disk {
        depth: Depth,
        now: Instant,
        few: u64,
        many: u64,
        bytes: u64,
        took: Duration,
    }

    impl Disk {
        fn new(few: u64, many: u64) -> Self {
            let depth = Depth::new(2 * MIB, 16 * MIB);
            Self { depth, now: Instant::now(), few, many, bytes: 0, took: Duration::ZERO }
        }

        fn speed(&self, bytes: u64) -> u64 {
            if bytes == 2 * MIB { self.few } else { self.many }
        }

        /// Moves `mib` MiB with as many bytes in the kernel as are allowed.
        fn run(&mut self, mib: u64) {
            for _ in 0..mib {
                let took = Duration::from_nanos(MIB * 1000 / self.speed(self.depth.bytes()));
                self.now += took;
                self.took += took;
                self.bytes += MIB;
                self.depth.ended(MIB, self.depth.bytes(), self.now);
            }
        }

        /// What it moved of what it could have.
        fn share(&mut self) -> f64 {
            let best = self.few.max(self.many) as f64 / 1000.0;
            let share = self.bytes as f64 / self.took.as_nanos() as f64 / best;
            (self.bytes, self.took) = (0, Duration::ZERO);
            share
        }
    }

    #[test]
    fn the_faster_amount_is_found_and_probes_cost_little() {
        for (few, many) in [(3300, 2900), (2900, 3300), (1000, 3000), (3000, 3000), (200, 190)] {
            let mut disk = Disk::new(few, many);
            disk.run(2048);
            disk.share();
            disk.run(16 << 10);
            let share = disk.share();
            assert!(share > 0.95, "{few} and {many}: {share}");
        }
    }

    #[test]
    fn a_disk_that_changes_its_mind_is_followed() {
        let mut disk = Disk::new(2000, 3000);
        disk.run(8 << 10);
        (disk.few, disk.many) = (3000, 2000);
        disk.run(8 << 10);
        assert_eq!(disk.depth.bytes(), 2 * MIB);
    }

    #[test]
    fn a_kernel_without_orders_tells_nothing() {
        let mut disk = Disk::new(3000, 1000);
        for _ in 0..10_000 {
            disk.run(1);
            disk.depth.ran_out(MIB);
        }
        assert_eq!(disk.depth.speeds, [0; 2]);
        assert_eq!(disk.depth.bytes(), 16 * MIB);
    }

    /// Goal: what the kernel held of the other amount does not count for the one that is tried.
    #[test]
    fn a_trial_begins_when_the_one_before_is_back() {
        let mut depth = Depth::new(2 * MIB, 16 * MIB);
        let begun = Instant::now();
        depth.ended(MIB, 16 * MIB, begun);
        // Very slow, and not of this trial.
        let later = begun + Duration::from_secs(9);
        for _ in 0..15 {
            depth.ended(MIB, 16 * MIB, later);
        }
        for ms in 1..=32 {
            depth.ended(MIB, 16 * MIB, later + Duration::from_millis(ms));
        }
        let expected = 1000 * MIB;
        assert!(depth.speeds[1].abs_diff(expected) < expected / 20, "{:?}", depth.speeds);
    }

    #[test]
    fn a_slow_disk_does_not_stretch_a_trial() {
        let mut depth = Depth::new(2 * MIB, 16 * MIB);
        let begun = Instant::now();
        depth.ended(MIB, 0, begun);
        depth.ended(MIB, 0, begun + TRIAL_MAX);
        assert_eq!(depth.speeds[1], 2 * MIB * 5);
    }
}
