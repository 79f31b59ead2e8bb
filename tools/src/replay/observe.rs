//! What the Manager itself counted, read from its telemetry segment.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use orbitkv_shm_protocol::inspect::{self, DeviceView, InspectError, LifeState, Snapshot};
use orbitkv_shm_protocol::telemetry::{Metric, SpillOutcome, SsdFault};
use serde::Serialize;

use crate::exit::ToolError;
use crate::signal;

/// Longest wait for spill set, leases and pinned pages to become empty.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(60);
/// So long no device takes writes before what waits for one is given up: an ailing device is tried
/// three times by then.
const NO_WRITES_WAIT: Duration = Duration::from_secs(20);
/// Longest wait for the next page that is found again; a device that is stuck is left out before.
const RECOVERY_PAUSE_MAX: Duration = Duration::from_secs(120);
const PAUSE: Duration = Duration::from_millis(20);

/// Pages that left the spill set, by outcome: they sum to the offered ones once it is empty.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct Spill {
    /// On SSD.
    pub written: u64,
    /// A slot held it already.
    pub already_there: u64,
    /// Forgotten, or offered again, before its write began.
    pub superseded: u64,
    /// Not wanted by the policy.
    pub skipped_by_policy: u64,
    /// DRAM turned over faster than the device wrote.
    pub evicted_unwritten: u64,
    /// The write failed, or no device took writes any more.
    pub failed: u64,
}

impl Spill {
    /// All outcomes together.
    pub fn sum(&self) -> u64 {
        self.written
            + self.already_there
            + self.superseded
            + self.skipped_by_policy
            + self.evicted_unwritten
            + self.failed
    }

    fn since(&self, before: &Self) -> Self {
        Self {
            written: self.written.saturating_sub(before.written),
            already_there: self.already_there.saturating_sub(before.already_there),
            superseded: self.superseded.saturating_sub(before.superseded),
            skipped_by_policy: self.skipped_by_policy.saturating_sub(before.skipped_by_policy),
            evicted_unwritten: self.evicted_unwritten.saturating_sub(before.evicted_unwritten),
            failed: self.failed.saturating_sub(before.failed),
        }
    }
}

/// Counters and gauges of a Manager at one moment.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(super) struct Numbers {
    pub(super) epoch: u32,
    /// It is dead: these are its last numbers, and nothing can be drained any more.
    pub(super) dead: bool,
    pub(super) spill: Spill,
    pub(super) spill_offered: u64,
    pub(super) spill_waiting: u64,
    /// No device takes writes, nor has for a while: what waits is not going to be written soon.
    pub(super) unwritable: bool,
    pub(super) ssd_bytes_written: u64,
    pub(super) ssd_bytes_read: u64,
    pub(super) ssd_read_errors: u64,
    pub(super) ssd_write_queue_full: u64,
    pub(super) alloc_failures: u64,
    pub(super) evictions: u64,
    pub(super) query_budget_peak_bytes: u64,
    pub(super) speculative_budget_peak_bytes: u64,
    /// Bytes that leases or running work hold.
    pub(super) held_bytes: u64,
    pub(super) leases: u64,
    pub(super) cpu_seconds: f64,
}

impl Numbers {
    /// Reads the numbers of the Manager at `socket`.
    pub(super) fn read(socket: &Path) -> Result<Self, InspectError> {
        inspect::read(socket).map(|snapshot| Self::of(&snapshot))
    }

    fn of(snapshot: &Snapshot) -> Self {
        let counters = &snapshot.counters;
        let get = |metric| counters.get(metric);
        let spill = |outcome| get(Metric::SpillPages(outcome));
        let pinned = get(Metric::PoolPinnedBytes) + get(Metric::PoolDrainingBytes);
        Self {
            epoch: snapshot.manager.epoch,
            dead: snapshot.manager.state == LifeState::Dead,
            spill: Spill {
                written: spill(SpillOutcome::Written),
                already_there: spill(SpillOutcome::AlreadyThere),
                superseded: spill(SpillOutcome::Superseded),
                skipped_by_policy: spill(SpillOutcome::SkippedByPolicy),
                evicted_unwritten: spill(SpillOutcome::EvictedUnwritten),
                failed: spill(SpillOutcome::Failed),
            },
            spill_offered: get(Metric::SpillOfferedPages),
            spill_waiting: get(Metric::SpillWaitingPages),
            unwritable: false,
            ssd_bytes_written: get(Metric::SsdWrittenBytes),
            ssd_bytes_read: get(Metric::SsdReadBytes),
            ssd_read_errors: SsdFault::ALL.iter().map(|f| get(Metric::SsdReadErrors(*f))).sum(),
            ssd_write_queue_full: get(Metric::SsdWriteQueueFull),
            alloc_failures: get(Metric::PoolAllocationFailures),
            evictions: get(Metric::PoolEvictedPages),
            query_budget_peak_bytes: get(Metric::BudgetQueryPeakBytes),
            speculative_budget_peak_bytes: get(Metric::BudgetSpeculativePeakBytes),
            held_bytes: pinned.max(get(Metric::LeasedBytes)),
            leases: get(Metric::LeasesHeld),
            cpu_seconds: get(Metric::ManagerCpu) as f64 / 1e9,
        }
    }

    /// What happened since `before`: counters as differences, gauges as they are. A Manager that
    /// was restarted in between counts from zero.
    pub(super) fn since(&self, before: &Self) -> Self {
        let zero = Self::default();
        let before = if before.epoch == self.epoch { before } else { &zero };
        Self {
            epoch: self.epoch,
            spill: self.spill.since(&before.spill),
            // What waited at the start ends now: it belongs to what was offered.
            spill_offered: self.spill_offered.saturating_sub(before.spill.sum()),
            ssd_bytes_written: self.ssd_bytes_written.saturating_sub(before.ssd_bytes_written),
            ssd_bytes_read: self.ssd_bytes_read.saturating_sub(before.ssd_bytes_read),
            ssd_read_errors: self.ssd_read_errors.saturating_sub(before.ssd_read_errors),
            ssd_write_queue_full: self
                .ssd_write_queue_full
                .saturating_sub(before.ssd_write_queue_full),
            alloc_failures: self.alloc_failures.saturating_sub(before.alloc_failures),
            evictions: self.evictions.saturating_sub(before.evictions),
            held_bytes: self.held_bytes.saturating_sub(before.held_bytes),
            leases: self.leases.saturating_sub(before.leases),
            cpu_seconds: (self.cpu_seconds - before.cpu_seconds).max(0.0),
            ..*self
        }
    }
}

/// Waits until the Manager has found again what was on SSD when it started, for as long as it finds
/// more.
pub(super) fn recovered(socket: &Path) -> Result<(), ToolError> {
    let (mut seen, mut since) = (None, Instant::now());
    loop {
        let snapshot = inspect::read(socket)?;
        let busy =
            !snapshot.manager.torn.is_empty() || snapshot.ssd.iter().any(DeviceView::is_recovering);
        if !busy || snapshot.manager.state == LifeState::Dead {
            return Ok(());
        }
        let scanned: u64 = snapshot.ssd.iter().map(|device| device.scanned_slots).sum();
        let now = Some((scanned, snapshot.counters.get(Metric::SsdRecoveredPages)));
        if seen != now {
            (seen, since) = (now, Instant::now());
        } else if since.elapsed() >= RECOVERY_PAUSE_MAX {
            return Err(ToolError::NotRecovered { seconds: RECOVERY_PAUSE_MAX.as_secs() });
        }
        signal::check()?;
        thread::sleep(PAUSE);
    }
}

/// Waits until nothing waits to be written and nothing is held beyond what `before` held, then
/// reads the numbers. After the longest wait, or when nothing is going to be written, they are read
/// as they are.
pub(super) fn drained(socket: &Path, before: &Numbers) -> Result<Numbers, InspectError> {
    let end = Instant::now() + DRAIN_TIMEOUT;
    let mut no_writes_since = None;
    loop {
        let snapshot = inspect::read(socket)?;
        let mut numbers = Numbers::of(&snapshot);
        let whole = snapshot.manager.torn.is_empty();
        let given_back = numbers.leases <= before.leases && numbers.held_bytes <= before.held_bytes;
        // Pages that are being written wait in no set any more, but have no outcome yet.
        let written = numbers.spill_waiting == 0 && numbers.spill.sum() >= numbers.spill_offered;
        if whole && !snapshot.ssd.iter().any(DeviceView::may_write) {
            let since = *no_writes_since.get_or_insert_with(Instant::now);
            numbers.unwritable = since.elapsed() >= NO_WRITES_WAIT;
        } else {
            no_writes_since = None;
        }
        let quiet = whole && given_back && (written || numbers.unwritable);
        if quiet || numbers.dead || Instant::now() >= end {
            return Ok(numbers);
        }
        thread::sleep(PAUSE);
    }
}
