//! Which faults a request meets.

use std::ops::Range;
use std::time::Duration;

use rustix::io::Errno;

/// Which requests a fault is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum On {
    /// Reads.
    Reads,
    /// Writes.
    Writes,
    /// Both.
    Both,
}

/// What a request meets.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Effect {
    /// It fails.
    Errno(Errno),
    /// It moves so many bytes, and always fewer than asked.
    Short(u32),
    /// One bit of what it reads is wrong: in the middle of what it has of the fault's range.
    Flip,
    /// Its answer comes so much later.
    Delay(Duration),
    /// Its answer comes when the fault is healed.
    Hang,
}

/// One thing that is wrong.
#[derive(Clone, Debug)]
pub struct Fault {
    on: On,
    effect: Effect,
    range: Range<u64>,
    times: u64,
}

impl Fault {
    /// Of every request of that kind, until it is healed.
    pub fn new(on: On, effect: Effect) -> Self {
        Self { on, effect, range: 0..u64::MAX, times: u64::MAX }
    }

    /// Only of requests that touch `range` of a file.
    #[must_use]
    pub fn within(mut self, range: Range<u64>) -> Self {
        self.range = range;
        self
    }

    /// Only of the first `times` requests.
    #[must_use]
    pub fn times(mut self, times: u64) -> Self {
        self.times = times;
        self
    }

    fn takes(&mut self, is_write: bool, request: &Range<u64>) -> bool {
        let kind = match self.on {
            On::Reads => !is_write,
            On::Writes => is_write,
            On::Both => true,
        };
        let touches = self.range.start < request.end && request.start < self.range.end;
        if !kind || !touches || self.times == 0 {
            return false;
        }
        self.times -= 1;
        true
    }
}

/// All that is wrong with a disk now.
#[derive(Default, Debug)]
pub(super) struct Plan {
    faults: Vec<(u64, Fault)>,
    next: u64,
}

/// All that one request meets.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub(super) struct Met {
    pub(super) errno: Option<Errno>,
    pub(super) bytes_max: Option<u32>,
    /// Bytes of the request with a wrong bit.
    pub(super) flips: Vec<u64>,
    pub(super) delay: Duration,
    /// Number of the fault that it waits for.
    pub(super) hangs: Option<u64>,
}

impl Plan {
    pub(super) fn add(&mut self, fault: Fault) -> u64 {
        let number = self.next;
        self.next += 1;
        self.faults.push((number, fault));
        number
    }

    pub(super) fn remove(&mut self, number: u64) {
        self.faults.retain(|(other, _)| *other != number);
    }

    /// What a request for these bytes of a file meets; of each effect but a flip the oldest.
    pub(super) fn meet(&mut self, is_write: bool, request: &Range<u64>) -> Met {
        let mut met = Met::default();
        for (number, fault) in &mut self.faults {
            if !fault.takes(is_write, request) {
                continue;
            }
            match fault.effect {
                Effect::Errno(errno) => met.errno = met.errno.or(Some(errno)),
                Effect::Short(bytes) => {
                    let fewer = (request.end - request.start).saturating_sub(1) as u32;
                    met.bytes_max = met.bytes_max.or(Some(bytes.min(fewer)));
                }
                Effect::Flip => {
                    let start = fault.range.start.max(request.start);
                    let end = fault.range.end.min(request.end);
                    met.flips.push(start + (end - start) / 2 - request.start);
                }
                Effect::Delay(delay) => met.delay = met.delay.max(delay),
                Effect::Hang => met.hangs = met.hangs.or(Some(*number)),
            }
        }
        met
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_takes_its_kind_its_range_and_its_times() {
        let mut plan = Plan::default();
        let fault = Fault::new(On::Reads, Effect::Errno(Errno::IO)).within(4096..8192).times(2);
        let number = plan.add(fault);
        assert_eq!(plan.meet(true, &(4096..8192)), Met::default(), "a write");
        assert_eq!(plan.meet(false, &(0..4096)), Met::default(), "in front");
        assert_eq!(plan.meet(false, &(8192..9000)), Met::default(), "behind");
        assert_eq!(plan.meet(false, &(0..4097)).errno, Some(Errno::IO));
        assert_eq!(plan.meet(false, &(8191..8192)).errno, Some(Errno::IO));
        assert_eq!(plan.meet(false, &(4096..8192)), Met::default(), "twice only");
        plan.add(Fault::new(On::Both, Effect::Short(1 << 20)));
        let _flip = plan.add(Fault::new(On::Reads, Effect::Flip).within(10..20));
        let met = plan.meet(false, &(0..4096));
        assert_eq!((met.bytes_max, met.flips), (Some(4095), vec![15]));
        plan.remove(number);
        assert_eq!(plan.faults.len(), 2);
    }
}
