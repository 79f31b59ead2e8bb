//! Exact counts of everything that `core` decided. Only ever raised; read by telemetry.

use orbitkv_shm_protocol::record::{Code, RequestKind, Status};

use super::event::IoFault;

/// What became of a page that was offered to SSD. The outcomes sum to the offers once the spill
/// set is empty, because each offer is counted by exactly one of them.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum SpillOutcome {
    /// Image and footer are on SSD.
    Written = 0,
    /// The page had a slot already.
    AlreadyThere = 1,
    /// Forgotten before its write began.
    Superseded = 2,
    /// The policy does not want it, or it was evicted while the write budget was used up.
    SkippedByPolicy = 3,
    /// Evicted from DRAM before its write began.
    EvictedUnwritten = 4,
    /// The write failed, or that of a page that it hangs on.
    Failed = 5,
}

impl SpillOutcome {
    /// Stable names, in wire order.
    pub const LABELS: [&'static str; 6] = [
        "written",
        "already_there",
        "superseded",
        "skipped_by_policy",
        "evicted_unwritten",
        "failed",
    ];
}

/// What became of a page that a hint named. Each page of each rank is counted by one of them.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum PrepareOutcome {
    /// Read from SSD.
    Prepared = 0,
    /// In DRAM, or on its way there.
    AlreadyThere = 1,
    /// In no tier.
    Absent = 2,
    /// No budget or memory for a hint, or a window does not need it.
    Skipped = 3,
    /// The read failed, or its device reads nothing at the moment.
    Failed = 4,
}

/// How a granted lease ended.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub enum LeaseEnd {
    /// By `Release`.
    Released = 0,
    /// Every page of it was restored.
    #[default]
    Restored = 1,
    /// Its time to live passed.
    Expired = 2,
    /// The last session of its group went.
    Orphaned = 3,
}

/// Counters. Pages are counted once a rank.
#[derive(Clone, Debug, Default)]
#[allow(missing_docs, reason = "each field says what it counts; telemetry documents the metrics")]
pub struct Stats {
    pub operations: [[u64; Status::ALL.len() + 1]; RequestKind::ALL.len() + 1],
    pub operations_abandoned: u64,
    pub lookup_pages: u64,
    pub lookup_hits_dram: u64,
    pub lookup_hits_ssd: u64,
    /// On a device that reads nothing at the moment only.
    pub lookup_unreadable: u64,
    pub queries_cut_by_budget: u64,
    pub queries_skipped: u64,
    /// By [`PrepareOutcome`].
    pub prepare: [u64; 5],
    pub pages_saved: u64,
    pub pages_present: u64,
    pub pages_refused: [u64; Code::ALL.len()],
    pub pages_restored: u64,
    pub pages_restored_dram: u64,
    pub pages_restore_failed: [u64; Code::ALL.len()],
    pub bytes_saved: u64,
    pub bytes_restored: u64,
    pub evictions: u64,
    pub ssd_evictions: u64,
    pub subtree_drops: u64,
    pub alloc_failures: u64,
    pub spill_offered: u64,
    pub spill: [u64; SpillOutcome::LABELS.len()],
    pub spill_offered_bytes: u64,
    pub ssd_bytes_written: u64,
    pub ssd_bytes_read: u64,
    pub ssd_pages_written: u64,
    pub ssd_pages_read: u64,
    pub ssd_read_errors: [u64; IoFault::LABELS.len()],
    pub ssd_write_errors: [u64; IoFault::LABELS.len()],
    pub slots_retired: u64,
    pub leases_granted: u64,
    /// By [`LeaseEnd`].
    pub leases_ended: [u64; 4],
    pub bad_requests: u64,
    pub sessions_opened: u64,
    pub sessions_ended: u64,
    pub query_budget_peak_bytes: u64,
    pub speculative_budget_peak_bytes: u64,
    pub pages_forgotten: u64,
    pub recovered_pages: u64,
    pub recovered_dropped: u64,
}

impl Stats {
    pub(super) fn spilled(&mut self, outcome: SpillOutcome) {
        self.spill[outcome as usize] += 1;
    }

    pub(super) fn prepared(&mut self, outcome: PrepareOutcome, pages: u64) {
        self.prepare[outcome as usize] += pages;
    }

    pub(super) fn refused(&mut self, code: Code) {
        self.pages_refused[code as usize] += 1;
    }
}

/// What `core` holds right now.
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs, reason = "each field says what it measures")]
pub struct Gauges {
    pub pool_capacity_bytes: u64,
    /// Extents in use: resident pages, copies, reads.
    pub pool_used_bytes: u64,
    /// DRAM of leased or otherwise pinned pages.
    pub pool_pinned_bytes: u64,
    /// DRAM of pages that are gone from the index but still touched by I/O or a lease.
    pub pool_draining_bytes: u64,
    pub pool_largest_free_bytes: u64,
    pub pages: u64,
    /// Pages with a replica in DRAM, or one on its way there.
    pub dram_pages: u64,
    /// Pages with a slot on SSD.
    pub ssd_pages: u64,
    pub leases: u64,
    pub leased_bytes: u64,
    pub speculative_bytes: u64,
    pub query_budget_bytes: u64,
    pub speculative_budget_bytes: u64,
    pub spill_pages: u64,
    pub spill_bytes: u64,
    /// Bytes that the write budget has left; 0 without one.
    pub write_budget_bytes: u64,
    /// Keys that the `reuse` policy remembers.
    pub history_keys: u64,
    /// Namespaces that can be named.
    pub namespaces: u64,
    pub operations: u64,
    pub reads_in_flight: u64,
    pub writes_in_flight: u64,
    pub writes_in_flight_bytes: u64,
    pub copies_in_flight: u64,
    pub sessions: u64,
}
