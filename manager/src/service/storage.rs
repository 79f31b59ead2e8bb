//! SSD orders of `core`, handed to the tier.

mod news;

use std::collections::VecDeque;
use std::time::Duration;

use orbitkv_shm_protocol::telemetry::{SsdEngine, SsdHealth, SsdRecovery, SsdRetry, SsdStop};

use crate::core::{Effect, Event, Intake, Nanos, Recovered};
use crate::ssd::{
    Cause, DeviceInfo, DeviceStatus, EngineKind, Health, QueueFull, ReadOrder, ScanState, SsdEnd,
    SsdTier, WriteOrder,
};
use crate::telemetry::mirror::{DeviceMirror, PaceMirror};
use news::News;

/// How long a device whose writes fail is left alone before it is tried again.
const WRITE_REST_NS: Nanos = 2_000_000_000;

/// The SSD tier behind the reactor.
pub struct Storage {
    tier: Option<SsdTier>,
    devices: Vec<DeviceInfo>,
    /// Orders that a full queue gave back: of each device its reads, then its writes and records,
    /// and last the forgets, which every device must take. What follows of the same kind waits
    /// behind them, nothing else does. Their number is bounded by what `core` lets out.
    refused: Vec<VecDeque<Effect>>,
    /// Ends that a stop returned.
    last_ends: VecDeque<SsdEnd>,
    write_queue_full: u64,
    /// Since when each device takes no new images.
    resting_since: Vec<Option<Nanos>>,
    /// What was said of each device.
    news: Vec<News>,
}

impl Storage {
    /// Joins an open tier and what it said of its files.
    pub fn new(tier: SsdTier, devices: Vec<DeviceInfo>) -> Self {
        Self {
            resting_since: vec![None; devices.len()],
            refused: vec![VecDeque::new(); devices.len() * 2 + 1],
            news: devices.iter().map(|_| News::new()).collect(),
            tier: Some(tier),
            devices,
            last_ends: VecDeque::new(),
            write_queue_full: 0,
        }
    }

    /// Hands over one order of `core`; one that finds its queue full waits here.
    pub(super) fn order(&mut self, effect: Effect) {
        let line = self.line_of(&effect);
        let waits = self.refused.get(line).is_some_and(|orders| !orders.is_empty());
        if waits || self.submit(&effect).is_err() {
            if matches!(effect, Effect::Write { .. }) {
                self.write_queue_full += 1;
            }
            if let Some(orders) = self.refused.get_mut(line) {
                orders.push_back(effect);
            }
        }
    }

    /// Which orders it waits behind.
    fn line_of(&self, effect: &Effect) -> usize {
        let last = self.refused.len().saturating_sub(1);
        match *effect {
            Effect::Read { slot, .. } => usize::from(slot.device) * 2,
            Effect::Write { slot, .. } | Effect::RetireSlot { slot } => {
                usize::from(slot.device) * 2 + 1
            }
            Effect::RecordRegion { device, .. } => usize::from(device) * 2 + 1,
            _ => last,
        }
    }

    /// True when an order that waited was taken.
    pub(super) fn retry_refused(&mut self) -> bool {
        let mut progress = false;
        for line in 0..self.refused.len() {
            while let Some(effect) = self.refused.get_mut(line).and_then(VecDeque::pop_front) {
                if self.submit(&effect).is_err() {
                    if let Some(orders) = self.refused.get_mut(line) {
                        orders.push_front(effect);
                    }
                    break;
                }
                progress = true;
            }
        }
        progress
    }

    fn submit(&mut self, effect: &Effect) -> Result<(), QueueFull> {
        let Some(tier) = &mut self.tier else { return Ok(()) };
        match *effect {
            Effect::Read { ticket, slot, extent, image_bytes, checksum } => {
                tier.submit_read(ReadOrder { ticket, slot, extent, image_bytes, checksum })
            }
            Effect::Write { ticket, extent, slot, image } => {
                tier.submit_write(WriteOrder { ticket, extent, slot, image })
            }
            Effect::RecordRegion { device, region, slot_bytes } => {
                tier.record_region(device, region, slot_bytes)
            }
            Effect::RetireSlot { slot } => tier.retire(slot),
            Effect::RecordForget { ticket, namespace, generation } => {
                tier.record_forget(ticket, namespace, generation)
            }
            _ => Ok(()),
        }
    }

    /// What the files hold, once, when all of it is known.
    pub(super) fn poll_recovery(&mut self) -> Option<Recovered> {
        let recovery = self.tier.as_mut()?.poll_recovery()?;
        Some(recovery.found)
    }

    /// How long the search of the files will take yet, after `elapsed`; `None` before there is any
    /// sign of that.
    pub(super) fn scan_left(&self, elapsed: Nanos) -> Option<Nanos> {
        let scans = self.tier.iter().flat_map(SsdTier::scans);
        let running = scans.filter(|scan| scan.state == ScanState::Running);
        let left = running.map(|scan| time_left(elapsed, scan.scanned, scan.slots));
        left.collect::<Option<Vec<_>>>().map(|left| left.into_iter().max().unwrap_or(0))
    }

    /// The end of one order.
    pub(super) fn poll(&mut self) -> Option<Event<'static>> {
        let end = match &mut self.tier {
            Some(tier) => tier.poll()?,
            None => self.last_ends.pop_front()?,
        };
        Some(match end {
            SsdEnd::Read { ticket, fault } => Event::ReadEnded { ticket, fault },
            SsdEnd::Write { ticket, fault, checksum } => {
                Event::WriteEnded { ticket, fault, checksum }
            }
            SsdEnd::Forget { ticket, fault } => Event::ForgetRecorded { ticket, fault },
        })
    }

    /// Does what is still ordered, for `timeout` at most, and ends the workers, which takes `all` at
    /// most; the last ends can still be polled.
    pub(super) fn stop(&mut self, timeout: Duration, all: Duration) {
        if let Some(tier) = self.tier.take() {
            self.last_ends.extend(tier.stop_within(timeout, all));
        }
    }

    /// Writes that found the queue of their device full.
    pub(super) fn write_queue_full(&self) -> u64 {
        self.write_queue_full
    }

    /// Transfers of all devices that were not over at once. Nothing once the tier has stopped.
    pub(super) fn retries(&self) -> impl Iterator<Item = (SsdRetry, u64)> + '_ {
        let of = |counted: fn(&SsdTier) -> u64| self.tier.as_ref().map(counted);
        let short = of(|tier| tier.status().map(|device| device.counters.short_transfers).sum());
        let interrupted =
            of(|tier| tier.status().map(|device| device.counters.interrupted_transfers).sum());
        let counts = [(SsdRetry::Short, short), (SsdRetry::Interrupted, interrupted)];
        counts.into_iter().filter_map(|(reason, times)| Some((reason, times?)))
    }

    /// Times that a device ceased to take some work.
    pub(super) fn stops(&self) -> impl Iterator<Item = (SsdStop, u64)> + '_ {
        let times = |cause: Cause| self.news.iter().map(|news| news.stops()[cause as usize]).sum();
        Cause::ALL.iter().map(move |&cause| (reason_of(cause), times(cause)))
    }

    /// Looks after the devices, says once what changed, and returns what those take of new images
    /// that begin or cease to take some, given what each was last told, or found out: one whose
    /// writes fail rests, and is tried again with one image after each [`WRITE_REST_NS`].
    pub(super) fn intake_changes(
        &mut self,
        now: Nanos,
        intake: impl Fn(u16) -> Intake,
    ) -> Vec<(u16, Intake)> {
        let mut changes = Vec::new();
        let Some(tier) = &mut self.tier else { return changes };
        tier.tend();
        let known = self.devices.iter().zip(&mut self.news).zip(&mut self.resting_since);
        for (number, (status, ((info, news), resting))) in tier.status().zip(known).enumerate() {
            if let Some(before) = news.look(now, status.health, status.cause) {
                news::say(&info.path, before, status.health, status.cause);
            }
            let number = number as u16;
            let was = intake(number);
            let since = match was {
                Intake::Nothing => *resting.get_or_insert(now),
                _ => now,
            };
            let rested = now.saturating_sub(since) >= WRITE_REST_NS;
            let takes = intake_of(&status, was, rested);
            if takes != Intake::Nothing {
                *resting = None;
            }
            if takes != was {
                changes.push((number, takes));
            }
        }
        changes
    }

    /// Whether pages can be read from each device. Nothing once the tier has stopped.
    pub(super) fn readable(&self) -> impl Iterator<Item = (u16, bool)> + '_ {
        let status = self.tier.iter().flat_map(SsdTier::status).enumerate();
        status.map(|(number, status)| (number as u16, status.health != Health::Off))
    }

    /// Whether every device reads and writes.
    pub(super) fn is_healthy(&self) -> bool {
        let Some(tier) = &self.tier else { return true };
        tier.status().all(|status| status.health == Health::Healthy)
    }

    /// What telemetry shows of each device. `recovering` says that not all that was found on them
    /// is taken over.
    pub(super) fn mirrors(
        &self,
        recovering: bool,
        usage: impl Fn(usize) -> (u64, u64),
    ) -> impl Iterator<Item = DeviceMirror<'_>> {
        let status = self.tier.iter().flat_map(SsdTier::status);
        let scans = self.tier.iter().flat_map(SsdTier::scans);
        let all = self.devices.iter().zip(status.zip(scans));
        all.enumerate().map(move |(number, (info, (status, scan)))| {
            let (used_bytes, slots) = usage(number);
            DeviceMirror {
                path: &info.path,
                capacity_bytes: info.geometry.capacity_bytes,
                used_bytes,
                slots,
                reading: status.counters.reading,
                writing: status.counters.writing,
                engine: match status.read_mode.kind {
                    EngineKind::Uring(_) => SsdEngine::Uring,
                    _ => SsdEngine::Blocking,
                },
                direct: info.direct,
                preallocated: info.preallocated,
                registered: status.read_mode.registered_bytes > 0
                    && status.write_mode.registered_bytes > 0,
                health: match status.health {
                    Health::Healthy => SsdHealth::Healthy,
                    Health::Degraded => SsdHealth::Degraded,
                    Health::ReadOnly => SsdHealth::ReadOnly,
                    Health::Off => SsdHealth::Off,
                },
                pace: PaceMirror {
                    write_inflight_bytes: status.counters.write_inflight_bytes,
                    write_inflight_limit_bytes: status.counters.write_inflight_limit_bytes,
                    small_read_ns: [
                        status.counters.small_read_alone_ns,
                        status.counters.small_read_beside_ns,
                    ],
                    large_read_ns: [
                        status.counters.large_read_alone_ns,
                        status.counters.large_read_beside_ns,
                    ],
                },
                recovery: match scan.state {
                    ScanState::Running => SsdRecovery::Scanning,
                    ScanState::Complete if recovering => SsdRecovery::TakingOver,
                    ScanState::Complete => SsdRecovery::Done,
                    ScanState::Failed => SsdRecovery::Unreadable,
                    ScanState::Stalled => SsdRecovery::Stalled,
                },
                scan_slots: scan.slots,
                scanned_slots: scan.scanned,
                scan_read_bytes: scan.read_bytes,
            }
        })
    }
}

/// What a device takes from now on.
fn intake_of(status: &DeviceStatus, was: Intake, rested: bool) -> Intake {
    match was {
        _ if status.health == Health::Healthy => Intake::All,
        Intake::One if status.tries_writes => Intake::One,
        Intake::Nothing if status.tries_writes && rested => Intake::One,
        _ => Intake::Nothing,
    }
}

/// How long the rest of `all` takes when `done` have taken `elapsed`.
fn time_left(elapsed: Nanos, done: u64, all: u64) -> Option<Nanos> {
    let left = u128::from(elapsed) * u128::from(all.saturating_sub(done));
    match done {
        _ if all == 0 => Some(0),
        0 => None,
        _ => Some(Nanos::try_from(left / u128::from(done)).unwrap_or(Nanos::MAX)),
    }
}

fn reason_of(cause: Cause) -> SsdStop {
    match cause {
        Cause::Errors => SsdStop::Errors,
        Cause::NoSpace => SsdStop::NoSpace,
        Cause::Slow => SsdStop::Slow,
        Cause::Hung => SsdStop::Hung,
    }
}

#[cfg(test)]
mod tests;
