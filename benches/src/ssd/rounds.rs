//! The rounds of one page size: ours and the plain loop in turn.

use std::time::Duration;

use super::Options;
use super::field::{Buffers, Field, Walk};
use super::floor::{choose, speed};
use super::ours::{Load, Ours, Reads};
use super::paced::{Paced, WRITE_REQUEST_BYTES_MAX};
use super::raw::{Op, Raw, Way};
use super::slice::{Slice, percentile_us};
use crate::error::BenchError;
use crate::series::Series;

/// Longer than a read counts as recent for the tier.
const REST_BEFORE_WRITES: Duration = Duration::from_millis(1_100);

/// Everything that the rounds of one page size need.
pub(super) struct Rounds<'a> {
    pub(super) options: &'a Options,
    pub(super) ours: &'a mut Ours,
    pub(super) raw: &'a mut Raw,
    pub(super) field: Field,
    pub(super) buffers: Buffers,
    pub(super) series: &'a mut Series,
    pub(super) step: &'a mut dyn FnMut(),
}

/// The slots of one measurement and how the plain loop goes over them.
struct Course {
    reads: Walk,
    writes: Walk,
    read_way: Way,
    write_way: Way,
}

impl Rounds<'_> {
    /// Fills the slots, chooses the floor, measures.
    pub(super) fn run(mut self) -> Result<(), BenchError> {
        self.ours.fill(&mut self.field, &self.buffers)?;
        self.done()?;
        let mut course = self.course(1)?;
        let mut mixed = Mixed::new(&self.field);
        for round in 0..self.options.pairs {
            self.pairs(&mut course, round, "")?;
            self.mixed(&mut mixed, &course, round)?;
        }
        for (side, name) in [(&mut mixed.ours, ""), (&mut mixed.raw, "raw_")] {
            let (alone, under_write) = (side.alone.len() as f64, side.under_write.len() as f64);
            let p99_alone = percentile_us(&mut side.alone, 99);
            let p99_under_write = percentile_us(&mut side.under_write, 99);
            self.note(&format!("{name}read_p99_alone_pooled_us"), p99_alone);
            self.note(&format!("{name}read_p99_under_write_pooled_us"), p99_under_write);
            self.note(&format!("{name}read_samples_alone"), alone);
            self.note(&format!("{name}read_samples_under_write"), under_write);
        }
        if self.ours.devices.len() > 1 {
            self.scaling(&mut course)?;
        }
        Ok(())
    }

    /// How the plain loop is fastest on the first `devices` devices.
    fn course(&mut self, devices: u16) -> Result<Course, BenchError> {
        let walk = self.field.walk(devices);
        let (mut reads, mut writes) = (walk.clone(), walk);
        let (raw, field, buffers) = (&mut *self.raw, &mut self.field, &self.buffers);
        let read_way = choose(raw, (field, buffers), (&mut reads, Op::Read), self.options)?;
        self.done()?;
        let (raw, field, buffers) = (&mut *self.raw, &mut self.field, &self.buffers);
        let write_way = choose(raw, (field, buffers), (&mut writes, Op::Write), self.options)?;
        self.done()?;
        let place = if devices == 1 { "" } else { "all_devices/" };
        for (op, way) in [("read", read_way), ("write", write_way)] {
            self.note(&format!("{place}raw_{op}_depth"), way.depth.into());
            self.note(&format!("{place}raw_{op}_request_bytes"), way.request_bytes.into());
        }
        Ok(Course { reads, writes, read_way, write_way })
    }

    /// A slice of each side in each direction; who begins changes from round to round.
    fn pairs(&mut self, course: &mut Course, round: u32, place: &str) -> Result<(), BenchError> {
        for (op, name) in [(Op::Read, "read"), (Op::Write, "write")] {
            let (ours, raw) = if round.is_multiple_of(2) {
                let ours = self.ours(course, op)?;
                (ours, self.raw(course, op)?)
            } else {
                let raw = self.raw(course, op)?;
                (self.ours(course, op)?, raw)
            };
            let (our_speed, raw_speed) = (speed(&ours, op), speed(&raw, op));
            self.add(&format!("{place}ours_{name}_gb_per_s"), our_speed);
            self.add(&format!("{place}raw_{name}_gb_per_s"), raw_speed);
            self.add(&format!("{place}{name}_ratio"), our_speed / raw_speed);
            let cpu = ours.cpu_seconds_per_gib();
            self.add(&format!("{place}ours_{name}_cpu_seconds_per_gib"), cpu);
            let cpu = raw.cpu_seconds_per_gib();
            self.add(&format!("{place}raw_{name}_cpu_seconds_per_gib"), cpu);
        }
        Ok(())
    }

    fn ours(&mut self, course: &mut Course, op: Op) -> Result<Slice, BenchError> {
        let load = match op {
            Op::Read => Load { reads: Some((&mut course.reads, Reads::Many)), writes: None },
            Op::Write => Load { reads: None, writes: Some(&mut course.writes) },
        };
        self.rest(op);
        let slice = self.ours.slice(&mut self.field, &self.buffers, load, self.options.slice)?;
        self.done()?;
        Ok(slice)
    }

    fn raw(&mut self, course: &mut Course, op: Op) -> Result<Slice, BenchError> {
        let job = match op {
            Op::Read => (&mut course.reads, op, course.read_way),
            Op::Write => (&mut course.writes, op, course.write_way),
        };
        self.rest(op);
        let slice = self.raw.slice(&mut self.field, &self.buffers, job, self.options.slice)?;
        self.done()?;
        Ok(slice)
    }

    /// Before a slice of writes: a lone writer of ours is not held back for reads that are over, and
    /// the drive has had as long to rest on either side.
    fn rest(&self, op: Op) {
        if op == Op::Write {
            std::thread::sleep(REST_BEFORE_WRITES);
        }
    }

    /// Demand reads one by one, alone and beside writes, ours and plain ones; who begins changes
    /// from round to round. The plain writes go at the rate that ours had in the slice before.
    fn mixed(&mut self, mixed: &mut Mixed, course: &Course, round: u32) -> Result<(), BenchError> {
        let (ours, raw) = if round.is_multiple_of(2) {
            let under_write = self.ours_demand(mixed, true)?;
            let raw_under_write = self.raw_demand(mixed, course, Some(&under_write))?;
            let raw_alone = self.raw_demand(mixed, course, None)?;
            let alone = self.ours_demand(mixed, false)?;
            ([alone, under_write], [raw_alone, raw_under_write])
        } else {
            let raw_alone = self.raw_demand(mixed, course, None)?;
            let alone = self.ours_demand(mixed, false)?;
            let under_write = self.ours_demand(mixed, true)?;
            let raw_under_write = self.raw_demand(mixed, course, Some(&under_write))?;
            ([alone, under_write], [raw_alone, raw_under_write])
        };
        let ratio = self.demand_numbers("", "read_p99_ratio", &ours);
        let raw_ratio = self.demand_numbers("raw_", "raw_p99_ratio", &raw);
        self.add("p99_ratio_over_raw", ratio / raw_ratio);
        let writes = self.last("write_under_read_gb_per_s");
        self.add("write_under_read_ratio", writes / self.last("ours_write_gb_per_s"));
        mixed.ours.add(ours);
        mixed.raw.add(raw);
        Ok(())
    }

    fn ours_demand(&mut self, mixed: &mut Mixed, writes: bool) -> Result<Slice, BenchError> {
        let load = Load {
            reads: Some((&mut mixed.reads, Reads::OneByOne)),
            writes: writes.then_some(&mut mixed.writes),
        };
        let slice = self.ours.slice(&mut self.field, &self.buffers, load, self.options.slice)?;
        self.done()?;
        Ok(slice)
    }

    /// Beside writes as fast as those of `paced_by`, or alone.
    fn raw_demand(
        &mut self,
        mixed: &mut Mixed,
        course: &Course,
        paced_by: Option<&Slice>,
    ) -> Result<Slice, BenchError> {
        let Way { request_bytes, depth } = course.write_way;
        let way = Way { request_bytes: request_bytes.min(WRITE_REQUEST_BYTES_MAX), depth };
        let walk = &mut mixed.writes;
        let writes = paced_by.map(|slice| Paced { walk, way, gb_per_s: slice.write_gb_per_s() });
        let reads = (&mut mixed.reads, course.read_way);
        let memory = (&mut self.field, &self.buffers);
        let slice = self.raw.demand(memory, reads, writes, self.options.slice)?;
        self.done()?;
        Ok(slice)
    }

    /// Adds what a side's reads `[alone, under write]` took; returns the ratio of their p99.
    fn demand_numbers(&mut self, side: &str, ratio: &str, slices: &[Slice; 2]) -> f64 {
        let [alone, under_write] = slices;
        for percentile in [50, 99] {
            let named = |what| format!("{side}read_p{percentile}_{what}_us");
            self.add(&named("alone"), alone.read_us(percentile));
            self.add(&named("under_write"), under_write.read_us(percentile));
        }
        let value = under_write.read_us(99) / alone.read_us(99);
        self.add(ratio, value);
        self.add(&format!("{side}read_alone_gb_per_s"), alone.read_gb_per_s());
        self.add(&format!("{side}read_under_write_gb_per_s"), under_write.read_gb_per_s());
        self.add(&format!("{side}write_under_read_gb_per_s"), under_write.write_gb_per_s());
        value
    }

    /// All devices together beside the first one alone.
    fn scaling(&mut self, one: &mut Course) -> Result<(), BenchError> {
        let devices = self.ours.devices.len() as u16;
        let mut all = self.course(devices)?;
        for round in 0..self.options.pairs {
            self.pairs(one, round, "one_device/")?;
            self.pairs(&mut all, round, "all_devices/")?;
            for name in ["ours_read", "raw_read", "ours_write", "raw_write"] {
                let of = |place| self.last(&format!("{place}/{name}_gb_per_s"));
                let ratio = of("all_devices") / of("one_device");
                self.add(&format!("all_devices/{name}_scaling"), ratio);
            }
        }
        Ok(())
    }

    fn add(&mut self, name: &str, value: f64) {
        self.series.add(format!("{}/{name}", self.field.page_bytes), value);
    }

    /// A number that no round repeats.
    fn note(&mut self, name: &str, value: f64) {
        self.add(name, value);
    }

    fn last(&self, name: &str) -> f64 {
        self.series.last(&format!("{}/{name}", self.field.page_bytes))
    }

    fn done(&mut self) -> Result<(), BenchError> {
        (self.step)();
        if (self.options.interrupted)() { Err(BenchError::Interrupted) } else { Ok(()) }
    }
}

/// The slots of the mixed slices, of the first device: those that are read are never written.
struct Mixed {
    reads: Walk,
    writes: Walk,
    ours: Pooled,
    raw: Pooled,
}

/// The times of one side's reads of all rounds, in nanoseconds.
#[derive(Default)]
struct Pooled {
    alone: Vec<u64>,
    under_write: Vec<u64>,
}

impl Mixed {
    fn new(field: &Field) -> Self {
        let (reads, writes) = field.walk(1).split();
        Self { reads, writes, ours: Pooled::default(), raw: Pooled::default() }
    }
}

impl Pooled {
    fn add(&mut self, [alone, under_write]: [Slice; 2]) {
        self.alone.extend(alone.read_ns);
        self.under_write.extend(under_write.read_ns);
    }
}
