//! How the rectangles of a batch are copied: each ordered from the copy engine, or all in one launch
//! of a kernel.
//!
//! An order costs the copy engine as long as 140 KiB take on the bus. Many orders of fewer bytes are
//! better done by a kernel, to which a rectangle costs nothing, but only while multiprocessors are
//! free: beside an engine that computes a kernel waits for its turns, many times as long as the copy
//! engine would have taken, and the engine gets half of its own. Nothing tells beforehand whether an
//! engine computes. So it is seen by how long batches take: while the kernel keeps to its time it is
//! used where it is the faster of the two, and otherwise it is left alone for a while and then tried
//! on one batch.

use std::time::{Duration, Instant};

use super::plan::Rect;
use super::table::unit_bytes;

/// The kernel is used where it saves an eighth: for less it is not worth to take multiprocessors that
/// an engine may want at any moment.
const WORTH: f64 = 1.15;
/// The kernel is left alone when it takes this much longer than it should, beside what orders do. It
/// varies by a tenth of its time; where an engine computes it takes twice its time and more.
const BUSY: f64 = 1.3;
/// A batch of this many times its time is judged before its end: others would follow it meanwhile.
const OVERDUE: f64 = 4.0;
/// What a new batch counts in what is known of a method. One bad batch among good ones has to take
/// more than twice its time before the kernel is left alone.
const WEIGHT: f64 = 0.25;
/// What ordering a batch and seeing its end may take on top, however small it is.
const SLACK: Duration = Duration::from_micros(20);
/// Orders that should take less tell nothing of the bus: what is on top of them is longer.
const TELLING_NS: u64 = 100_000;
/// First pause of the kernel. Where an engine computes a trial costs one batch some milliseconds.
const PAUSE_MIN: Duration = Duration::from_millis(100);
/// Each pause is twice the last, up to this: an engine computes for seconds on end, and trials should
/// not be seen among what its copies usually take.
const PAUSE_MAX: Duration = Duration::from_millis(1600);

/// A way to copy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Method {
    /// An order to the copy engine for each rectangle, or one for many of a single long row.
    Orders,
    /// One launch for many.
    Kernel,
}

/// What the methods cost on a GPU that is free.
#[derive(Clone, Copy, Debug)]
pub(super) struct Costs {
    /// Of an order, on top of its bytes.
    pub(super) order_ns: u64,
    /// Of a rectangle that goes with many others in one order, on top of its bytes.
    pub(super) batched_ns: u64,
    /// Of the copy engine.
    pub(super) order_bytes_per_us: u64,
    /// Of a launch, on top of its bytes: most of it is the GPU's way from the context of the engine to
    /// ours and back, which a kernel of the engine's own would not pay.
    pub(super) launch_ns: u64,
    /// Of the kernel.
    pub(super) kernel_bytes_per_us: u64,
    /// Of the kernel, for rectangles that it moves byte by byte.
    pub(super) kernel_odd_bytes_per_us: u64,
}

impl Costs {
    /// Measured on an H200 with PCIe 5 x16: 18 MiB in rows of 2 KiB, 72 rows a rectangle. Byte by byte
    /// is a guess; one that is too low leaves such bytes to the copy engine. GPUs with a slower bus
    /// are the same to both methods, which [`Choice`] sees.
    pub(super) const OF_H200: Self = Self {
        order_ns: 2600,
        batched_ns: 450,
        order_bytes_per_us: 54_000,
        launch_ns: 150_000,
        kernel_bytes_per_us: 50_000,
        kernel_odd_bytes_per_us: 10_000,
    };

    fn by_orders(&self, work: &Work) -> u64 {
        let ordered = work.rects - work.batched;
        ordered * self.order_ns
            + work.batched * self.batched_ns
            + 1000 * (work.bytes + work.odd_bytes) / self.order_bytes_per_us
    }

    fn by_kernel(&self, work: &Work) -> u64 {
        self.launch_ns
            + 1000 * work.bytes / self.kernel_bytes_per_us
            + 1000 * work.odd_bytes / self.kernel_odd_bytes_per_us
    }
}

/// Rectangles to copy.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) struct Work {
    pub(super) rects: u64,
    /// Those of them that can go with others in one order.
    batched: u64,
    /// In rectangles that the kernel moves at its speed.
    bytes: u64,
    /// In others.
    odd_bytes: u64,
}

impl Work {
    pub(super) fn add(&mut self, rect: &Rect) {
        self.rects += 1;
        self.batched += u64::from(rect.is_batched());
        match unit_bytes(rect) {
            1 => self.odd_bytes += rect.bytes(),
            _ => self.bytes += rect.bytes(),
        }
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes + self.odd_bytes
    }
}

/// What a batch should take on a GPU that is free.
#[derive(Clone, Debug)]
pub(super) struct Expected {
    orders_ns: u64,
    kernel_ns: u64,
    /// Whether the kernel may be used for it, and whether to find out if it keeps to its time.
    kernel: bool,
    trial: bool,
}

impl Expected {
    /// The whole batch.
    pub(super) fn time(&self) -> Duration {
        Duration::from_nanos(self.orders_ns + self.kernel_ns)
    }
}

/// What was seen of a batch. Both times are bounds from below, so that a thread that looked late never
/// makes a batch slow.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seen {
    /// It took at least so long, or has by now.
    pub(super) at_least: Duration,
    /// It has ended.
    pub(super) ended: bool,
    /// Copies of the same direction ran beside it, with which it shared the bus.
    pub(super) shared: bool,
}

/// Chooses a method for each batch.
#[derive(Debug)]
pub(super) struct Choice {
    costs: Costs,
    /// The one method there is.
    only: Option<Method>,
    /// Times that batches take as long as they should, at least 1.
    orders: f64,
    kernel: f64,
    pause: Option<Pause>,
}

/// The kernel is not used.
#[derive(Clone, Copy, Debug)]
struct Pause {
    until: Instant,
    length: Duration,
    /// Used on one batch, whose end is awaited.
    trial: bool,
}

impl Choice {
    pub(super) fn only(method: Method) -> Self {
        Self { only: Some(method), ..Self::measured(Costs::OF_H200, Instant::now()) }
    }

    /// Begins with a trial: nothing is known of the engine.
    pub(super) fn measured(costs: Costs, now: Instant) -> Self {
        let pause = Some(Pause { until: now, length: PAUSE_MIN / 2, trial: false });
        Self { costs, only: None, orders: 1.0, kernel: 1.0, pause }
    }

    /// For a new batch.
    pub(super) fn begin(&mut self, now: Instant) -> Expected {
        let (kernel, trial) = match &mut self.pause {
            None => (true, false),
            Some(pause) => {
                let due = !pause.trial && now >= pause.until;
                pause.trial |= due;
                (due, due)
            }
        };
        Expected { orders_ns: 0, kernel_ns: 0, kernel, trial }
    }

    /// The better method for more of a batch.
    pub(super) fn method(&self, batch: &mut Expected, work: &Work) -> Method {
        let (by_orders, by_kernel) = (self.costs.by_orders(work), self.costs.by_kernel(work));
        let better = || {
            // A trial supposes that multiprocessors are free.
            let slowed = if batch.trial { self.orders } else { self.kernel };
            let worth = by_kernel as f64 * slowed * WORTH < by_orders as f64 * self.orders;
            if batch.kernel && worth { Method::Kernel } else { Method::Orders }
        };
        let method = self.only.unwrap_or_else(better);
        match method {
            Method::Kernel => batch.kernel_ns += by_kernel,
            Method::Orders => batch.orders_ns += by_orders,
        }
        method
    }

    /// A batch is ordered, or a part of it with which the driver `refused` to go on.
    pub(super) fn ordered(&mut self, batch: &Expected, refused: bool, now: Instant) {
        if batch.kernel_ns == 0 {
            if let Some(pause) = self.pause.as_mut().filter(|_| batch.trial) {
                pause.trial = false;
            }
        } else if refused {
            // Maybe the kernel: later batches do without.
            self.leave_kernel(now);
        }
    }

    /// Learns from a batch; true when there is nothing more to learn from it.
    pub(super) fn learn(&mut self, batch: &Expected, seen: Seen, now: Instant) -> bool {
        if seen.ended && seen.at_least.is_zero() {
            // Seen in one look with the end of the batch before it, or ordered since the last look:
            // such a bound says nothing. A trial is still to come.
            if let Some(pause) = self.pause.as_mut().filter(|_| batch.trial) {
                pause.trial = false;
            }
            return true;
        }
        // Who shares the bus gets half of it.
        let share = if seen.shared { 2.0 } else { 1.0 };
        let took = seen.at_least.saturating_sub(SLACK).as_nanos() as f64 / share;
        if batch.kernel_ns == 0 {
            if seen.ended && batch.orders_ns >= TELLING_NS {
                blend(&mut self.orders, took / batch.orders_ns as f64);
            }
            return seen.ended;
        }
        let slowed = (took - batch.orders_ns as f64 * self.orders) / batch.kernel_ns as f64;
        if !seen.ended && slowed < OVERDUE * self.orders {
            return false;
        }
        match self.pause {
            None => blend(&mut self.kernel, slowed),
            Some(_) if batch.trial => self.kernel = slowed.max(1.0),
            // From before the pause.
            Some(_) => return true,
        }
        if self.kernel > BUSY * self.orders {
            self.leave_kernel(now);
        } else {
            self.pause = None;
        }
        true
    }

    /// How long the kernel is left alone before a trial, unless it is in use.
    pub(super) fn pause(&self) -> Option<Duration> {
        self.pause.map(|pause| pause.length)
    }

    fn leave_kernel(&mut self, now: Instant) {
        let length = self.pause.map_or(PAUSE_MIN, |last| (last.length * 2).min(PAUSE_MAX));
        self.pause = Some(Pause { until: now + length, length, trial: false });
    }
}

fn blend(known: &mut f64, new: f64) {
    *known = (*known + (new - *known) * WEIGHT).max(1.0);
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn now() -> Instant {
        Instant::now()
    }

    /// `count` rectangles of `rows` rows of 2 KiB.
    fn work(count: u64, rows: u64) -> Work {
        let mut work = Work::default();
        for at in 0..count {
            let device = at << 20;
            let (device_pitch, host_pitch) = (1 << 24, 2048);
            work.add(&Rect { device, host: 0, width: 2048, rows, device_pitch, host_pitch });
        }
        work
    }

    fn many_small() -> Work {
        work(112, 16)
    }

    /// Has a batch run that takes as many times its time as told.
    fn run(choice: &mut Choice, work: &Work, times: f64, now: Instant) -> Method {
        let mut batch = choice.begin(now);
        let method = choice.method(&mut batch, work);
        choice.ordered(&batch, false, now);
        let at_least = SLACK
            + Duration::from_nanos(((batch.orders_ns + batch.kernel_ns) as f64 * times) as u64);
        assert!(choice.learn(&batch, Seen { at_least, ended: true, shared: false }, now));
        method
    }

    fn measured(now: Instant) -> Choice {
        Choice::measured(Costs::OF_H200, now)
    }

    #[test]
    fn costs_are_those_that_were_measured() {
        // 128 pages of 72 rows of 2 KiB took 700 µs by orders and 520 to 535 by the kernel of a second
        // process.
        let (costs, work) = (Costs::OF_H200, work(128, 72));
        assert!((650_000..720_000).contains(&costs.by_orders(&work)), "{}", costs.by_orders(&work));
        assert!((510_000..540_000).contains(&costs.by_kernel(&work)), "{}", costs.by_kernel(&work));
    }

    #[test]
    fn few_or_large_rectangles_are_ordered() {
        let now = now();
        let mut choice = measured(now);
        for work in [work(8, 72), work(72, 112), work(2, 4096), work(14, 576), Work::default()] {
            assert_eq!(run(&mut choice, &work, 1.0, now), Method::Orders, "{work:?}");
        }
        for work in [work(112, 72), work(80, 16), work(100, 1)] {
            assert_eq!(run(&mut choice, &work, 1.0, now), Method::Kernel, "{work:?}");
        }
    }

    #[test]
    fn bytes_that_move_one_by_one_need_more_orders_to_be_worth_it() {
        let rect = |width| Rect {
            device: 0,
            host: 0,
            width,
            rows: 40,
            device_pitch: 4096,
            host_pitch: 4096,
        };
        let (mut even, mut odd) = (Work::default(), Work::default());
        (0..100).for_each(|_| even.add(&rect(1024)));
        (0..100).for_each(|_| odd.add(&rect(1023)));
        let now = now();
        let mut choice = measured(now);
        assert_eq!(run(&mut choice, &even, 1.0, now), Method::Kernel);
        assert_eq!(run(&mut choice, &odd, 1.0, now), Method::Orders);
        let few = |width| Rect { rows: 1, ..rect(width) };
        let mut odd = Work::default();
        (0..100).for_each(|_| odd.add(&few(1023)));
        assert_eq!(run(&mut choice, &odd, 1.0, now), Method::Kernel);
    }

    #[test]
    fn the_first_kernel_is_a_trial_and_nothing_follows_it_before_its_end() {
        let now = now();
        let mut choice = measured(now);
        let mut first = choice.begin(now);
        assert_eq!(choice.method(&mut first, &many_small()), Method::Kernel);
        // The rest of the same batch too.
        assert_eq!(choice.method(&mut first, &many_small()), Method::Kernel);
        choice.ordered(&first, false, now);
        assert_eq!(run(&mut choice, &many_small(), 1.0, now), Method::Orders);
        let seen = |us| Seen { at_least: Duration::from_micros(us), ended: false, shared: false };
        assert!(!choice.learn(&first, seen(400), now), "two launches of 223 µs");
        assert!(choice.learn(&first, Seen { ended: true, ..seen(450) }, now));
        for _ in 0..3 {
            assert_eq!(run(&mut choice, &many_small(), 1.0, now), Method::Kernel);
        }
    }

    #[test]
    fn a_trial_that_no_rectangle_used_is_still_to_come() {
        let now = now();
        let mut choice = measured(now);
        assert_eq!(run(&mut choice, &work(1, 72), 1.0, now), Method::Orders);
        assert_eq!(run(&mut choice, &many_small(), 1.0, now), Method::Kernel);
    }

    /// Goal: a batch of which nothing is known but that it has ended changes nothing. Method: such
    /// batches among slow ones, and as a trial.
    #[test]
    fn a_batch_seen_with_the_end_of_the_one_before_teaches_nothing() {
        let start = now();
        let unknown = Seen { at_least: Duration::ZERO, ended: true, shared: false };
        let mut choice = measured(start);
        let unseen = |choice: &mut Choice, now| {
            let mut batch = choice.begin(now);
            let method = choice.method(&mut batch, &many_small());
            choice.ordered(&batch, false, now);
            assert!(choice.learn(&batch, unknown, now));
            method
        };
        // As a trial: the pause goes on, and the next batch is the trial.
        assert_eq!(unseen(&mut choice, start), Method::Kernel);
        assert!(choice.pause().is_some(), "the kernel was not seen to keep to its time");
        assert_eq!(run(&mut choice, &many_small(), 1.0, start), Method::Kernel);
        assert_eq!(choice.pause(), None);
        // Between batches that take twice their time.
        let mut methods = vec![];
        for _ in 0..3 {
            methods.push(run(&mut choice, &many_small(), 2.0, start));
            methods.push(unseen(&mut choice, start));
        }
        let (kernel, orders) = (Method::Kernel, Method::Orders);
        assert_eq!(methods, [kernel, kernel, kernel, orders, orders, orders]);
    }

    /// Goal: small copies that are seen late do not make the copy engine look slow, and the kernel good
    /// beside an engine that computes.
    #[test]
    fn short_orders_teach_nothing_of_the_bus() {
        let now = now();
        let mut choice = measured(now);
        for _ in 0..100 {
            let mut batch = choice.begin(now);
            assert_eq!(choice.method(&mut batch, &work(1, 2)), Method::Orders);
            choice.ordered(&batch, false, now);
            let at_least = Duration::from_micros(300);
            assert!(choice.learn(&batch, Seen { at_least, ended: true, shared: false }, now));
        }
        assert_eq!(run(&mut choice, &many_small(), 8.0, now), Method::Kernel);
        assert_eq!(run(&mut choice, &many_small(), 1.0, now), Method::Orders);
    }

    #[test]
    fn a_busy_gpu_gets_orders_and_trials_that_grow_rare() {
        let start = now();
        let mut choice = measured(start);
        let mut trials = vec![];
        for ms in 0..10_000 {
            let now = start + ms * MS;
            if run(&mut choice, &many_small(), 8.0, now) == Method::Kernel {
                trials.push(ms);
            }
            // Orders take their time whatever computes.
            choice.orders = 1.0;
        }
        assert_eq!(trials, [0, 100, 300, 700, 1500, 3100, 4700, 6300, 7900, 9500]);
        // Free again: the next trial shows it, and from then on pauses are short again.
        let later = start + 20_000 * MS;
        assert_eq!(run(&mut choice, &many_small(), 1.0, later), Method::Kernel);
        assert_eq!(run(&mut choice, &many_small(), 8.0, later), Method::Kernel);
        assert_eq!(run(&mut choice, &many_small(), 1.0, later + 99 * MS), Method::Orders);
        assert_eq!(run(&mut choice, &many_small(), 1.0, later + 100 * MS), Method::Kernel);
    }

    #[test]
    fn a_single_slow_batch_is_forgiven_and_several_are_not() {
        let now = now();
        let mut choice = measured(now);
        let mut methods = |times: &[f64]| {
            times
                .iter()
                .map(|times| run(&mut choice, &many_small(), *times, now))
                .collect::<Vec<_>>()
        };
        let (kernel, orders) = (Method::Kernel, Method::Orders);
        assert_eq!(methods(&[1.0, 2.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]), [kernel; 8]);
        assert_eq!(methods(&[2.0, 2.0, 1.0]), [kernel, kernel, orders]);
    }

    #[test]
    fn a_batch_that_hangs_is_judged_before_its_end_and_once() {
        let now = now();
        let mut choice = measured(now);
        run(&mut choice, &many_small(), 1.0, now);
        let begin = |choice: &mut Choice| {
            let mut batch = choice.begin(now);
            assert_eq!(choice.method(&mut batch, &many_small()), Method::Kernel);
            choice.ordered(&batch, false, now);
            batch
        };
        let (one, two) = (begin(&mut choice), begin(&mut choice));
        let seen = |us| Seen { at_least: Duration::from_micros(us), ended: false, shared: false };
        assert!(!choice.learn(&one, seen(800), now));
        assert!(choice.learn(&one, seen(1000), now));
        assert_eq!(run(&mut choice, &many_small(), 1.0, now + 99 * MS), Method::Orders);
        // What was in flight when the pause began does not make it longer.
        assert!(choice.learn(&two, Seen { ended: true, ..seen(90_000) }, now + 90 * MS));
        assert_eq!(run(&mut choice, &many_small(), 1.0, now + 100 * MS), Method::Kernel);
    }

    #[test]
    fn half_of_the_bus_is_not_a_busy_gpu() {
        let now = now();
        let mut choice = measured(now);
        for _ in 0..10 {
            let mut batch = choice.begin(now);
            assert_eq!(choice.method(&mut batch, &many_small()), Method::Kernel);
            let at_least = Duration::from_nanos(batch.kernel_ns * 2);
            choice.learn(&batch, Seen { at_least, ended: true, shared: true }, now);
        }
    }

    #[test]
    fn a_slower_bus_is_slower_to_both() {
        let start = now();
        let mut choice = measured(start);
        // Every batch takes twice what it would on an H200: the trial speaks against the kernel only
        // until that is known of orders too.
        assert_eq!(run(&mut choice, &many_small(), 2.0, start), Method::Kernel);
        for _ in 0..20 {
            assert_eq!(run(&mut choice, &many_small(), 2.0, start), Method::Orders);
        }
        let later = start + 100 * MS;
        for _ in 0..20 {
            assert_eq!(run(&mut choice, &many_small(), 2.0, later), Method::Kernel);
        }
        // A busy GPU is still told from it.
        assert_eq!(run(&mut choice, &many_small(), 8.0, later), Method::Kernel);
        assert_eq!(run(&mut choice, &many_small(), 2.0, later), Method::Orders);
    }

    #[test]
    fn a_refused_launch_is_not_tried_again_at_once() {
        let now = now();
        let mut choice = measured(now);
        run(&mut choice, &many_small(), 1.0, now);
        let mut batch = choice.begin(now);
        choice.method(&mut batch, &many_small());
        choice.ordered(&batch, true, now);
        assert_eq!(run(&mut choice, &many_small(), 1.0, now), Method::Orders);
        assert_eq!(run(&mut choice, &many_small(), 1.0, now + 100 * MS), Method::Kernel);
    }

    #[test]
    fn with_one_method_there_is_no_choice() {
        for method in [Method::Orders, Method::Kernel] {
            let mut choice = Choice::only(method);
            for times in [1.0, 100.0, 100.0] {
                assert_eq!(run(&mut choice, &many_small(), times, now()), method);
                assert_eq!(run(&mut choice, &work(1, 1), times, now()), method);
            }
        }
    }
}
