//! Plain structs of what a segment says, in the shape of `inspect --json`.

use serde::Serialize;

use super::numbers::Numbers;
use super::snapshot::LifeState;
use crate::ids::{EngineId, OperationId};
use crate::record::RequestKind;
use crate::telemetry::{
    DeviceRow, LeaseRow, Metric, NamespaceRow, OperationRow, OperationStage, SessionRow,
    SessionState, SsdEngine, SsdHealth, SsdRecovery, printable_line, text_bytes,
};

/// Shown for a number that no Manager writes.
const UNKNOWN: &str = "unknown";
/// Identity and state of a Manager.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct ManagerView {
    /// Process id in its own namespace.
    pub pid: u32,
    /// This life of it.
    pub epoch: u32,
    /// Version of its build.
    pub version: String,
    /// From its start until now, or until its last heartbeat when it is dead.
    pub uptime_seconds: f64,
    /// State.
    pub state: LifeState,
    /// Its socket.
    pub socket: String,
    /// Address of `/metrics` and `/healthz`; none when off.
    pub http: Option<String>,
    /// Age of the numbers, in milliseconds: time since its last heartbeat.
    pub heartbeat_age_ms: u64,
    /// Parts of the snapshot that changed whenever they were looked at, or whose writer died in
    /// mid-change: their words may be of different moments. Normally empty.
    pub torn: Vec<&'static str>,
    /// What is wrong with the lock or the segment, in a line each. Normally empty.
    pub problems: Vec<String>,
}

/// One session.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct SessionView {
    /// Its id.
    pub id: u64,
    /// Process id of the client.
    pub pid: u64,
    /// Its uid.
    pub uid: u64,
    /// `attached` or `closing`.
    pub state: &'static str,
    /// Requests that it has published.
    pub requests_submitted: u64,
    /// Completions that it has consumed.
    pub completions_consumed: u64,
    /// Operations taken and not ended.
    pub outstanding: u64,
    /// Bytes that its leases pin.
    pub leased_bytes: u64,
    /// Device regions that it registered.
    pub regions: u64,
    /// Attachment group: 32 hex digits.
    pub group: String,
}

/// The DRAM pool.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct PoolView {
    /// See [`Metric::PoolCapacityBytes`].
    pub capacity_bytes: u64,
    /// See [`Metric::PoolUsedBytes`].
    pub used_bytes: u64,
    /// See [`Metric::PoolPinnedBytes`].
    pub pinned_bytes: u64,
    /// See [`Metric::PoolDrainingBytes`].
    pub draining_bytes: u64,
    /// See [`Metric::PoolLargestFreeBytes`].
    pub largest_free_bytes: u64,
    /// Page size that the kernel gave.
    pub page_mode: String,
}

/// One SSD device.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct DeviceView {
    /// Path of its file.
    pub path: String,
    /// Bytes that slots may take.
    pub capacity_bytes: u64,
    /// Bytes of the slots that hold a page.
    pub used_bytes: u64,
    /// Slots that hold a page.
    pub slots: u64,
    /// Page reads queued or running.
    pub reading: u64,
    /// Page writes queued or running.
    pub writing: u64,
    /// `uring` or `blocking`.
    pub engine: &'static str,
    /// Whether the page cache is bypassed.
    pub direct: bool,
    /// Whether its space is reserved.
    pub preallocated: bool,
    /// Whether the DRAM arenas are registered with its rings.
    pub registered: bool,
    /// `healthy`, `degraded`, `read_only` or `off`.
    pub health: &'static str,
    /// Image bytes of writes in the kernel.
    pub write_inflight_bytes: u64,
    /// What these are held below at the moment.
    pub write_inflight_limit_bytes: u64,
    /// Nanoseconds that reads of pages up to 256 KiB take, without and with writes beside them:
    /// the 98th percentile of the last 64, 0 when there were none.
    pub small_read_ns: [u64; 2],
    /// The same for larger pages.
    pub large_read_ns: [u64; 2],
    /// What became of its pages at the start: `scanning`, `taking_over`, `done`, `unreadable` or
    /// `stalled`.
    pub recovery: &'static str,
    /// Slots of its regions at the start.
    pub scan_slots: u64,
    /// Those that were looked at since.
    pub scanned_slots: u64,
    /// Bytes that were read for that.
    pub scan_read_bytes: u64,
}

impl DeviceView {
    /// Whether its pages are still being found again.
    pub fn is_recovering(&self) -> bool {
        [SsdRecovery::Scanning, SsdRecovery::TakingOver]
            .map(SsdRecovery::label)
            .contains(&self.recovery)
    }

    /// Whether pages are written to it, or will be when those that were there are found again.
    pub fn may_write(&self) -> bool {
        self.is_recovering() || self.health == SsdHealth::Healthy.label()
    }
}

/// Bytes that leases and preparations hold.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct BudgetView {
    /// Taken of the query budget.
    pub total_bytes: u64,
    /// Most that was ever taken.
    pub total_peak_bytes: u64,
    /// Taken of the speculative budget.
    pub speculative_bytes: u64,
    /// Most that was ever taken.
    pub speculative_peak_bytes: u64,
    /// Queries that wait for budget.
    pub waiting_queries: u64,
    /// Limits.
    pub limits: BudgetLimits,
}

/// Limits of the budgets.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct BudgetLimits {
    /// All leases together.
    pub total_bytes: u64,
    /// Speculative queries and prepares together.
    pub speculative_bytes: u64,
    /// The leases of one session.
    pub session_bytes: u64,
}

/// Rings of one session.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct RingView {
    /// Session id.
    pub session: u64,
    /// Requests published and not taken.
    pub requests_queued: u64,
    /// Completions published and not consumed.
    pub completions_queued: u64,
    /// Requests published whose completion is not consumed.
    pub credits_used: u64,
    /// Operations that it may have outstanding.
    pub credits: u64,
    /// Since an index of its rings last moved.
    pub last_progress_ms: u64,
}

/// One running operation.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct OperationView {
    /// Session id.
    pub session: u64,
    /// `index.generation`.
    pub id: String,
    /// Kind of request.
    pub kind: &'static str,
    /// How far it is.
    pub stage: &'static str,
    /// Since it was taken.
    pub age_ms: u64,
}

/// One lease.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct LeaseView {
    /// Its id.
    pub id: u64,
    /// Attachment group: 32 hex digits.
    pub group: String,
    /// Bytes that it pins.
    pub bytes: u64,
    /// Pages that it pins.
    pub pages: u64,
    /// Until it expires; 0 when it has.
    pub ttl_ms: u64,
}

/// Pages of one namespace in one tier.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct PagesView {
    /// Its name.
    pub namespace: String,
    /// `dram` or `ssd`.
    pub tier: &'static str,
    /// Pages.
    pub count: u64,
    /// Their image bytes.
    pub bytes: u64,
}

impl SessionView {
    pub(super) fn of(row: &SessionRow) -> Self {
        Self {
            id: row.id,
            pid: row.pid,
            uid: row.uid,
            state: SessionState::from_word(row.state).map_or(UNKNOWN, SessionState::label),
            requests_submitted: row.requests_submitted,
            completions_consumed: row.completions_consumed,
            outstanding: row.outstanding,
            leased_bytes: row.leased_bytes,
            regions: row.regions,
            group: group_text(&row.engine),
        }
    }
}

impl RingView {
    pub(super) fn of(row: &SessionRow, as_of_ns: u64) -> Self {
        Self {
            session: row.id,
            requests_queued: row.requests_submitted.saturating_sub(row.requests_taken),
            completions_queued: row.completions_published.saturating_sub(row.completions_consumed),
            credits_used: row.requests_submitted.saturating_sub(row.completions_consumed),
            credits: row.credits,
            last_progress_ms: millis_since(row.last_progress_ns, as_of_ns),
        }
    }
}

impl OperationView {
    pub(super) fn of(session: &SessionRow, row: &OperationRow, as_of_ns: u64) -> Self {
        let kind = u16::try_from(row.kind).ok().and_then(RequestKind::from_raw);
        Self {
            session: session.id,
            id: OperationId::from_bits(row.id).to_string(),
            kind: kind.map_or(UNKNOWN, RequestKind::label),
            stage: OperationStage::from_word(row.stage).map_or(UNKNOWN, OperationStage::label),
            age_ms: millis_since(row.taken_ns, as_of_ns),
        }
    }
}

impl LeaseView {
    pub(super) fn of(row: &LeaseRow, as_of_ns: u64) -> Self {
        Self {
            id: row.id,
            group: group_text(&row.group),
            bytes: row.bytes,
            pages: row.pages,
            ttl_ms: millis_since(as_of_ns, row.expires_ns),
        }
    }
}

impl DeviceView {
    pub(super) fn of(row: &DeviceRow) -> Self {
        Self {
            path: printable_line(&text_bytes(&row.path)),
            capacity_bytes: row.capacity_bytes,
            used_bytes: row.used_bytes,
            slots: row.slots,
            reading: row.reading,
            writing: row.writing,
            engine: SsdEngine::from_word(row.engine).map_or(UNKNOWN, SsdEngine::label),
            direct: row.direct != 0,
            preallocated: row.preallocated != 0,
            registered: row.registered != 0,
            health: SsdHealth::from_word(row.health).map_or(UNKNOWN, SsdHealth::label),
            write_inflight_bytes: row.write_inflight_bytes,
            write_inflight_limit_bytes: row.write_inflight_limit_bytes,
            small_read_ns: row.small_read_ns,
            large_read_ns: row.large_read_ns,
            recovery: SsdRecovery::from_word(row.recovery).map_or(UNKNOWN, SsdRecovery::label),
            scan_slots: row.scan_slots,
            scanned_slots: row.scanned_slots,
            scan_read_bytes: row.scan_read_bytes,
        }
    }
}

impl PagesView {
    /// A row for each tier that holds pages of the namespace.
    pub(super) fn of(row: &NamespaceRow) -> impl Iterator<Item = Self> + use<> {
        let namespace = printable_line(&text_bytes(&row.name));
        [("dram", row.dram_pages, row.dram_bytes), ("ssd", row.ssd_pages, row.ssd_bytes)]
            .into_iter()
            .filter(|&(_, count, _)| count != 0)
            .map(move |(tier, count, bytes)| Self {
                namespace: namespace.clone(),
                tier,
                count,
                bytes,
            })
    }
}

impl PoolView {
    pub(super) fn of(numbers: &Numbers, page_mode: String) -> Self {
        Self {
            capacity_bytes: numbers.get(Metric::PoolCapacityBytes),
            used_bytes: numbers.get(Metric::PoolUsedBytes),
            pinned_bytes: numbers.get(Metric::PoolPinnedBytes),
            draining_bytes: numbers.get(Metric::PoolDrainingBytes),
            largest_free_bytes: numbers.get(Metric::PoolLargestFreeBytes),
            page_mode,
        }
    }
}

impl BudgetView {
    pub(super) fn of(numbers: &Numbers) -> Self {
        Self {
            total_bytes: numbers.get(Metric::BudgetQueryBytes),
            total_peak_bytes: numbers.get(Metric::BudgetQueryPeakBytes),
            speculative_bytes: numbers.get(Metric::BudgetSpeculativeBytes),
            speculative_peak_bytes: numbers.get(Metric::BudgetSpeculativePeakBytes),
            waiting_queries: numbers.get(Metric::BudgetWaitingQueries),
            limits: BudgetLimits {
                total_bytes: numbers.get(Metric::BudgetQueryLimitBytes),
                speculative_bytes: numbers.get(Metric::BudgetSpeculativeLimitBytes),
                session_bytes: numbers.get(Metric::BudgetSessionLimitBytes),
            },
        }
    }
}

fn millis_since(earlier_ns: u64, later_ns: u64) -> u64 {
    later_ns.saturating_sub(earlier_ns) / 1_000_000
}

/// 32 hex digits, as an engine id is written everywhere.
fn group_text(words: &[u64; 2]) -> String {
    let mut id = [0; 16];
    for (bytes, word) in id.chunks_exact_mut(8).zip(words) {
        bytes.copy_from_slice(&word.to_le_bytes());
    }
    EngineId(id).to_string()
}
