//! Plain structs in which the reactor hands over its tables.

use std::mem::offset_of;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use bytemuck::Zeroable;
use orbitkv_shm_protocol::ids::{EngineId, LeaseId, OperationId, SessionId};
use orbitkv_shm_protocol::record::RequestKind;
use orbitkv_shm_protocol::telemetry::{
    DeviceFault, DeviceRow, LEASE_ROWS, LeaseRow, NAMESPACE_ROWS, NamespaceRow, OPERATION_ROWS,
    OperationRow, OperationStage, SessionRow, SessionState, SsdEngine, SsdFault, SsdHealth,
    SsdRecovery, text_words,
};

use crate::core::{CopyFault, IoFault};

/// Name of the row that sums up the namespaces without a row of their own.
pub const OTHER_NAMESPACES: &str = "(others)";

/// One session.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SessionMirror {
    /// Its id.
    pub id: SessionId,
    /// Process id of the client, as the socket's credentials say.
    pub pid: u32,
    /// Its uid.
    pub uid: u32,
    /// State.
    pub state: SessionState,
    /// Attachment group.
    pub engine: EngineId,
    /// Where its rings are.
    pub rings: RingsMirror,
    /// Operations that it may have outstanding.
    pub credits: u32,
    /// Bytes that its leases pin.
    pub leased_bytes: u64,
    /// Device regions that it registered.
    pub regions: u32,
}

/// Where the rings of a session are. Positions are free-running; read the consumer's before the
/// producer's, so that no difference is negative.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RingsMirror {
    /// Producer position of the request ring, as last seen.
    pub requests_submitted: u64,
    /// Consumer position of the request ring.
    pub requests_taken: u64,
    /// Producer position of the completion ring.
    pub completions_published: u64,
    /// Consumer position of the completion ring, as last seen.
    pub completions_consumed: u64,
    /// Operations taken and not yet ended.
    pub outstanding: u64,
    /// CLOCK_MONOTONIC nanoseconds at which one of the positions last moved.
    pub last_progress_ns: u64,
}

impl RingsMirror {
    /// Words of a [`SessionRow`] that [`put`](Self::put) fills.
    pub(super) const WORDS: [usize; 6] = [
        offset_of!(SessionRow, requests_submitted) / 8,
        offset_of!(SessionRow, requests_taken) / 8,
        offset_of!(SessionRow, completions_published) / 8,
        offset_of!(SessionRow, completions_consumed) / 8,
        offset_of!(SessionRow, outstanding) / 8,
        offset_of!(SessionRow, last_progress_ns) / 8,
    ];

    pub(super) fn put(&self, row: &mut SessionRow) {
        row.requests_submitted = self.requests_submitted;
        row.requests_taken = self.requests_taken;
        row.completions_published = self.completions_published;
        row.completions_consumed = self.completions_consumed;
        row.outstanding = self.outstanding;
        row.last_progress_ns = self.last_progress_ns;
    }
}

impl From<SessionMirror> for SessionRow {
    fn from(session: SessionMirror) -> Self {
        let mut row: Self = Zeroable::zeroed();
        row.id = session.id.0.into();
        row.pid = session.pid.into();
        row.uid = session.uid.into();
        row.state = session.state.to_word();
        row.credits = session.credits.into();
        row.leased_bytes = session.leased_bytes;
        row.regions = session.regions.into();
        row.engine = engine_words(session.engine);
        session.rings.put(&mut row);
        row
    }
}

/// One running operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OperationMirror {
    /// Its id in its session.
    pub id: OperationId,
    /// What it is.
    pub kind: RequestKind,
    /// How far it is.
    pub stage: OperationStage,
    /// CLOCK_MONOTONIC nanoseconds at which it was taken from its ring.
    pub taken_ns: u64,
}

impl From<OperationMirror> for OperationRow {
    fn from(operation: OperationMirror) -> Self {
        Self {
            id: operation.id.to_bits(),
            kind: operation.kind as u64,
            stage: operation.stage.to_word(),
            taken_ns: operation.taken_ns,
        }
    }
}

/// One lease.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LeaseMirror {
    /// Its id.
    pub id: LeaseId,
    /// Attachment group that holds it.
    pub group: EngineId,
    /// Bytes that it pins.
    pub bytes: u64,
    /// Pages that it pins.
    pub pages: u64,
    /// CLOCK_MONOTONIC nanoseconds at which it expires.
    pub expires_ns: u64,
}

impl From<LeaseMirror> for LeaseRow {
    fn from(lease: LeaseMirror) -> Self {
        Self {
            id: lease.id.0,
            group: engine_words(lease.group),
            bytes: lease.bytes,
            pages: lease.pages,
            expires_ns: lease.expires_ns,
        }
    }
}

/// One SSD device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DeviceMirror<'a> {
    /// Its file; the first 256 bytes of the path are kept.
    pub path: &'a Path,
    /// Bytes that slots may take.
    pub capacity_bytes: u64,
    /// Bytes of the slots that hold a page.
    pub used_bytes: u64,
    /// Slots that hold a page.
    pub slots: u64,
    /// Page reads queued or in the kernel.
    pub reading: u64,
    /// Page writes queued or in the kernel.
    pub writing: u64,
    /// How it is driven.
    pub engine: SsdEngine,
    /// Whether the page cache is bypassed.
    pub direct: bool,
    /// Whether its space was reserved.
    pub preallocated: bool,
    /// Whether the DRAM arenas are registered with both its rings (memlock allowed it).
    pub registered: bool,
    /// What it still does.
    pub health: SsdHealth,
    /// How its writes make room for its reads.
    pub pace: PaceMirror,
    /// Whether its pages were found again.
    pub recovery: SsdRecovery,
    /// Slots of its regions at the start.
    pub scan_slots: u64,
    /// Those that were looked at since.
    pub scanned_slots: u64,
    /// Bytes that were read for that.
    pub scan_read_bytes: u64,
}

/// How the writes of a device make room for its reads.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct PaceMirror {
    /// Image bytes of writes in the kernel.
    pub write_inflight_bytes: u64,
    /// What these are held below.
    pub write_inflight_limit_bytes: u64,
    /// What reads of small pages take, without and with writes beside them, in nanoseconds.
    pub small_read_ns: [u64; 2],
    /// The same for larger pages.
    pub large_read_ns: [u64; 2],
}

impl From<DeviceMirror<'_>> for DeviceRow {
    fn from(device: DeviceMirror<'_>) -> Self {
        Self {
            path: text_words(device.path.as_os_str().as_bytes()),
            capacity_bytes: device.capacity_bytes,
            used_bytes: device.used_bytes,
            slots: device.slots,
            reading: device.reading,
            writing: device.writing,
            engine: device.engine.to_word(),
            direct: device.direct.into(),
            preallocated: device.preallocated.into(),
            registered: device.registered.into(),
            health: device.health.to_word(),
            write_inflight_bytes: device.pace.write_inflight_bytes,
            write_inflight_limit_bytes: device.pace.write_inflight_limit_bytes,
            small_read_ns: device.pace.small_read_ns,
            large_read_ns: device.pace.large_read_ns,
            recovery: device.recovery.to_word(),
            scan_slots: device.scan_slots,
            scanned_slots: device.scanned_slots,
            scan_read_bytes: device.scan_read_bytes,
        }
    }
}

/// What the tiers hold of one namespace.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NamespaceMirror<'a> {
    /// Name for a person; the first 128 bytes are kept. Must not contain the cache salt.
    pub name: &'a str,
    /// Pages in DRAM.
    pub dram_pages: u64,
    /// Their image bytes.
    pub dram_bytes: u64,
    /// Pages on SSD.
    pub ssd_pages: u64,
    /// Their image bytes.
    pub ssd_bytes: u64,
}

impl From<NamespaceMirror<'_>> for NamespaceRow {
    fn from(namespace: NamespaceMirror<'_>) -> Self {
        Self {
            name: text_words(namespace.name.as_bytes()),
            dram_pages: namespace.dram_pages,
            dram_bytes: namespace.dram_bytes,
            ssd_pages: namespace.ssd_pages,
            ssd_bytes: namespace.ssd_bytes,
        }
    }
}

impl From<IoFault> for SsdFault {
    fn from(fault: IoFault) -> Self {
        match fault {
            IoFault::Errno(_) | IoFault::Superblock(_) => Self::Errno,
            IoFault::Short => Self::Short,
            IoFault::Checksum => Self::Checksum,
            IoFault::Off => Self::Off,
            IoFault::NoSpace => Self::NoSpace,
        }
    }
}

impl From<CopyFault> for DeviceFault {
    fn from(fault: CopyFault) -> Self {
        match fault {
            CopyFault::Peer => Self::Peer,
            CopyFault::Device => Self::Device,
            CopyFault::Fence | CopyFault::FenceTimeout => Self::Fence,
        }
    }
}

/// The rows to show: all, or the largest and the sum of the rest.
pub(super) fn namespace_rows<'a>(
    namespaces: impl IntoIterator<Item = NamespaceMirror<'a>>,
) -> Vec<NamespaceRow> {
    let mut all: Vec<NamespaceMirror<'_>> = namespaces.into_iter().collect();
    if all.len() > NAMESPACE_ROWS {
        let bytes = |n: &NamespaceMirror<'_>| n.dram_bytes.saturating_add(n.ssd_bytes);
        all.sort_by_key(|namespace| std::cmp::Reverse(bytes(namespace)));
        let others = all.drain(NAMESPACE_ROWS - 1..).reduce(|sum, each| NamespaceMirror {
            name: OTHER_NAMESPACES,
            dram_pages: sum.dram_pages + each.dram_pages,
            dram_bytes: sum.dram_bytes + each.dram_bytes,
            ssd_pages: sum.ssd_pages + each.ssd_pages,
            ssd_bytes: sum.ssd_bytes + each.ssd_bytes,
        });
        all.extend(others);
    }
    all.into_iter().map(NamespaceRow::from).collect()
}

/// Fills `rows` with the oldest operations, oldest first.
pub(super) fn oldest_operations(
    rows: &mut Vec<OperationRow>,
    operations: impl IntoIterator<Item = OperationMirror>,
) {
    let operations = operations.into_iter().map(OperationRow::from);
    first_by_key(rows, operations, OPERATION_ROWS, |operation| operation.taken_ns);
}

/// Fills `rows` with the largest leases, largest first.
pub(super) fn largest_leases(
    rows: &mut Vec<LeaseRow>,
    leases: impl IntoIterator<Item = LeaseMirror>,
) {
    let leases = leases.into_iter().map(LeaseRow::from);
    first_by_key(rows, leases, LEASE_ROWS, |lease| std::cmp::Reverse(lease.bytes));
}

/// Fills `first` with the first `count` items in the order of `key`, equal ones in the order given:
/// insertion into a short list, one comparison for an item that does not make it.
fn first_by_key<T, K: Ord>(
    first: &mut Vec<T>,
    items: impl Iterator<Item = T>,
    count: usize,
    key: impl Fn(&T) -> K,
) {
    first.clear();
    for item in items {
        if first.len() == count {
            if first.last().is_some_and(|last| key(&item) >= key(last)) {
                continue;
            }
            first.pop();
        }
        let at = first.partition_point(|kept| key(kept) <= key(&item));
        first.insert(at, item);
    }
}

fn engine_words(engine: EngineId) -> [u64; 2] {
    let (words, []) = engine.0.as_chunks::<8>() else { unreachable!("16 bytes are two words") };
    [u64::from_le_bytes(words[0]), u64::from_le_bytes(words[1])]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// The short list is what sorting everything would give.
        #[test]
        fn the_oldest_are_those_of_a_full_sort(times in proptest::collection::vec(0_u64..40, 0..80)) {
            let operations: Vec<OperationMirror> = (0..)
                .zip(&times)
                .map(|(index, &taken_ns)| OperationMirror {
                    id: OperationId { index, generation: 1 },
                    kind: RequestKind::Save,
                    stage: OperationStage::Queued,
                    taken_ns,
                })
                .collect();
            let mut sorted = operations.clone();
            sorted.sort_by_key(|operation| operation.taken_ns);
            sorted.truncate(OPERATION_ROWS);
            let sorted: Vec<OperationRow> = sorted.into_iter().map(OperationRow::from).collect();
            let mut oldest = Vec::new();
            oldest_operations(&mut oldest, operations);
            prop_assert_eq!(oldest, sorted);
        }

        /// However many namespaces there are, the rows fit and sum to the whole.
        #[test]
        fn namespace_rows_sum_to_the_whole(sizes in proptest::collection::vec(0_u64..1000, 0..600)) {
            let rows = namespace_rows(sizes.iter().map(|&pages| NamespaceMirror {
                name: "model",
                dram_pages: pages,
                dram_bytes: pages * 4096,
                ssd_pages: pages * 2,
                ssd_bytes: pages * 8192,
            }));
            prop_assert_eq!(rows.len(), sizes.len().min(NAMESPACE_ROWS));
            let whole: u64 = sizes.iter().sum();
            prop_assert_eq!(rows.iter().map(|row| row.dram_pages).sum::<u64>(), whole);
            prop_assert_eq!(rows.iter().map(|row| row.dram_bytes).sum::<u64>(), whole * 4096);
            prop_assert_eq!(rows.iter().map(|row| row.ssd_pages).sum::<u64>(), whole * 2);
            prop_assert_eq!(rows.iter().map(|row| row.ssd_bytes).sum::<u64>(), whole * 8192);
        }
    }
}
