//! Changes a second, from two looks at the counters.

use orbitkv_shm_protocol::inspect::{Numbers, Snapshot};
use orbitkv_shm_protocol::record::{RequestKind, Status};
use orbitkv_shm_protocol::telemetry::{CopyDirection, HeldIn, Metric};

/// Looks that are closer together than this give no rate.
const SPAN_MIN_NS: u64 = 10_000_000;

/// How fast things go.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Rates {
    /// Operations that ended, a second.
    pub(super) operations: f64,
    /// Of them, those that ended in an error.
    pub(super) errors: f64,
    /// Bytes from device to DRAM, a second.
    pub(super) saved_bytes: f64,
    /// Bytes from DRAM to device, a second.
    pub(super) restored_bytes: f64,
    /// Bytes from SSD, a second.
    pub(super) ssd_read_bytes: f64,
    /// Bytes to SSD, a second.
    pub(super) ssd_written_bytes: f64,
    /// Pages that were found of those asked for in between; `None` when nobody asked.
    pub(super) hit_ratio: Option<f64>,
    /// Processor time of the Manager in proportion to one core.
    pub(super) cores: f64,
}

/// Rates between two looks, each with its time in nanoseconds. `None` when they are of different
/// Managers, of a segment in disorder, or too close together.
pub(super) fn rates_between(
    (before, before_ns): (&Snapshot, u64),
    (now, now_ns): (&Snapshot, u64),
) -> Option<Rates> {
    let span_ns = now_ns.checked_sub(before_ns).filter(|&span| span >= SPAN_MIN_NS)?;
    let whole = [before, now].iter().all(|seen| seen.manager.torn.is_empty());
    if before.manager.epoch != now.manager.epoch || !whole {
        return None;
    }
    let seconds = span_ns as f64 / 1e9;
    let (old, new) = (&before.counters, &now.counters);
    let change = |metric| new.get(metric).saturating_sub(old.get(metric)) as f64;
    let ended = |statuses: &[Status]| {
        let kinds = RequestKind::ALL.iter();
        let each = kinds.flat_map(|&kind| {
            statuses.iter().map(move |&status| Metric::OperationsCompleted(kind, status))
        });
        each.map(change).sum::<f64>() / seconds
    };
    let asked = change(Metric::LookupPages);
    let hits = HeldIn::ALL.iter().map(|&tier| change(Metric::LookupHitPages(tier))).sum::<f64>();
    Some(Rates {
        operations: ended(Status::ALL),
        errors: ended(&[Status::Error]),
        saved_bytes: change(Metric::DeviceCopiedBytes(CopyDirection::DeviceToHost)) / seconds,
        restored_bytes: change(Metric::DeviceCopiedBytes(CopyDirection::HostToDevice)) / seconds,
        ssd_read_bytes: change(Metric::SsdReadBytes) / seconds,
        ssd_written_bytes: change(Metric::SsdWrittenBytes) / seconds,
        hit_ratio: (asked > 0.0).then_some((hits / asked).clamp(0.0, 1.0)),
        cores: change(Metric::ManagerCpu) / span_ns as f64,
    })
}

/// Pages that were found of those ever asked for.
pub(super) fn hit_ratio(numbers: &Numbers) -> Option<f64> {
    let asked = numbers.get(Metric::LookupPages);
    let hits = HeldIn::ALL.iter().map(|&tier| numbers.get(Metric::LookupHitPages(tier)));
    let hits = hits.fold(0, u64::saturating_add);
    (asked > 0).then(|| (hits as f64 / asked as f64).clamp(0.0, 1.0))
}
