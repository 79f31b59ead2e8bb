//! SSD orders of `core`, handed to the tier.

use std::collections::VecDeque;
use std::time::Duration;

use orbitkv_shm_protocol::telemetry::{SsdEngine, SsdHealth, SsdRecovery};

use crate::core::{Effect, Event, Nanos, Recovered};
use crate::ssd::{
    DeviceInfo, EngineKind, Health, QueueFull, ReadOrder, ScanState, SsdEnd, SsdTier, WriteOrder,
};
use crate::telemetry::mirror::DeviceMirror;

/// How long a device whose writes fail is left alone before it is tried again.
const WRITE_REST_NS: Nanos = 2_000_000_000;

/// The SSD tier behind the reactor.
pub struct Storage {
    tier: Option<SsdTier>,
    devices: Vec<DeviceInfo>,
    /// Orders that a full queue gave back, in order: what follows waits behind them.
    refused: VecDeque<Effect>,
    /// Ends that a stop returned.
    last_ends: VecDeque<SsdEnd>,
    write_queue_full: u64,
    /// Since when each device takes no new images.
    resting_since: Vec<Option<Nanos>>,
}

impl Storage {
    /// Joins an open tier and what it said of its files.
    pub fn new(tier: SsdTier, devices: Vec<DeviceInfo>) -> Self {
        Self {
            resting_since: vec![None; devices.len()],
            tier: Some(tier),
            devices,
            refused: VecDeque::new(),
            last_ends: VecDeque::new(),
            write_queue_full: 0,
        }
    }

    /// Hands over one order of `core`; one that finds its queue full waits here.
    pub(super) fn order(&mut self, effect: Effect) {
        if !self.refused.is_empty() || self.submit(&effect).is_err() {
            if matches!(effect, Effect::Write { .. }) {
                self.write_queue_full += 1;
            }
            self.refused.push_back(effect);
        }
    }

    /// True when an order that waited was taken.
    pub(super) fn retry_refused(&mut self) -> bool {
        let mut progress = false;
        while let Some(effect) = self.refused.pop_front() {
            if self.submit(&effect).is_err() {
                self.refused.push_front(effect);
                break;
            }
            progress = true;
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

    /// The end of one order.
    pub(super) fn poll(&mut self) -> Option<Event<'static>> {
        let end = match &mut self.tier {
            Some(tier) => tier.poll()?,
            None => self.last_ends.pop_front()?,
        };
        Some(match end {
            SsdEnd::Read { ticket, fault } => Event::ReadEnded { ticket, fault },
            SsdEnd::Write { ticket, fault } => Event::WriteEnded { ticket, fault },
            SsdEnd::Forget { ticket, fault } => Event::ForgetRecorded { ticket, fault },
        })
    }

    /// Does what is still ordered and ends the workers; the last ends can still be polled.
    pub(super) fn stop(&mut self, timeout: Duration) {
        if let Some(tier) = self.tier.take() {
            self.last_ends.extend(tier.stop(timeout));
        }
    }

    /// Writes that found the queue of their device full.
    pub(super) fn write_queue_full(&self) -> u64 {
        self.write_queue_full
    }

    /// Devices that begin or cease to take new images, as `(number, takes)`: one whose writes fail
    /// rests, and is tried again for a moment after each [`WRITE_REST_NS`].
    pub(super) fn write_changes(&mut self, now: Nanos) -> impl Iterator<Item = (u16, bool)> {
        let status = self.tier.iter().flat_map(SsdTier::status);
        let fit = status.map(|status| matches!(status.health, Health::Healthy | Health::WriteOnly));
        let doors = self.resting_since.iter_mut().zip(fit).enumerate();
        let changes = doors.filter_map(move |(number, (resting, fit))| {
            let takes = match *resting {
                None if !fit => {
                    *resting = Some(now);
                    false
                }
                Some(since) if fit || now.saturating_sub(since) >= WRITE_REST_NS => {
                    *resting = None;
                    true
                }
                _ => return None,
            };
            Some((number as u16, takes))
        });
        changes.collect::<Vec<_>>().into_iter()
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
                    Health::ReadOnly => SsdHealth::ReadOnly,
                    Health::WriteOnly | Health::Off => SsdHealth::Off,
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
