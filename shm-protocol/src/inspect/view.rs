//! Plain structs of what a segment says, in the shape of `inspect --json`.

use std::path::Path;

use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};

use super::{HEARTBEAT_AGE_MAX, Patience};
use crate::ids::{EngineId, OperationId};
use crate::record::RequestKind;
use crate::telemetry::{
    BUCKETS, CONFIG, DEVICES, DeviceRow, Family, Group, GroupCopy, HISTOGRAM_WORDS, HTTP_WORDS,
    LATENCY_WORDS, Latency, LeaseRow, METRIC_WORDS, ManagerState, Metric, NAMESPACES, NUMBERS,
    NamespaceRow, OperationRow, OperationStage, PAGE_MODE_WORDS, SESSION_ROWS, SegmentReader,
    SessionRow, SessionState, SsdEngine, SsdHealth, TEXTS, Unit, bucket_end, families,
    leases_group, operations_group, printable, session_group, text_bytes,
};

/// Shown for a number that no Manager writes.
const UNKNOWN: &str = "unknown";
const NANOS: f64 = 1e9;

/// State of a Manager as a reader finds it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum LifeState {
    /// Alive, not serving yet.
    Starting,
    /// Alive and serving.
    Ready,
    /// Alive and serving, a part of it limited or off.
    Degraded,
    /// Alive and stopping.
    Draining,
    /// Holds its lock but has not beaten for longer than [`HEARTBEAT_AGE_MAX`].
    Unresponsive,
    /// Nobody holds its lock; the numbers are its last.
    Dead,
}

impl LifeState {
    /// As JSON spells it.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Ready => "ready",
            Self::Degraded => "degraded",
            Self::Draining => "draining",
            Self::Unresponsive => "unresponsive",
            Self::Dead => "dead",
        }
    }

    /// Judges what the writer said last (`None`: nothing intelligible) by the proof of life and the
    /// age of its heartbeat. Start-up may take long (it fills the pool) and does not beat.
    pub fn judge(alive: bool, said: Option<ManagerState>, heartbeat_age_ns: u64) -> Self {
        let hung = u128::from(heartbeat_age_ns) > HEARTBEAT_AGE_MAX.as_nanos();
        match said {
            _ if !alive => Self::Dead,
            Some(ManagerState::Starting) => Self::Starting,
            None => Self::Unresponsive,
            Some(_) if hung => Self::Unresponsive,
            Some(ManagerState::Ready) => Self::Ready,
            Some(ManagerState::Degraded) => Self::Degraded,
            Some(ManagerState::Draining) => Self::Draining,
        }
    }
}

/// Everything that a segment says at one moment.
#[derive(Clone, Debug, Serialize)]
pub struct Snapshot {
    /// Who and how.
    pub manager: ManagerView,
    /// Sessions, by id.
    pub sessions: Vec<SessionView>,
    /// The DRAM pool.
    pub pool: PoolView,
    /// SSD devices, in configuration order.
    pub ssd: Vec<DeviceView>,
    /// Bytes that leases and preparations hold.
    pub budget: BudgetView,
    /// Every metric.
    pub counters: Numbers,
    /// Rings of the sessions, by id.
    pub rings: Vec<RingView>,
    /// The oldest operations of each session, oldest first.
    pub operations: Vec<OperationView>,
    /// The largest leases of each session, largest first.
    pub leases: Vec<LeaseView>,
    /// Pages by namespace and tier.
    pub pages: Vec<PagesView>,
    /// Latency histograms, summed up.
    pub latency: Vec<LatencyView>,
    /// The resolved configuration, as start-up printed it.
    #[serde(skip)]
    pub config: String,
}

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
    /// `healthy`, `read_only` or `off`.
    pub health: &'static str,
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

/// One latency histogram, summed up. Quantiles are upper ends of buckets at most a quarter wide.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct LatencyView {
    /// Kind of operation.
    pub kind: &'static str,
    /// Part of it.
    pub stage: &'static str,
    /// Operations timed.
    pub count: u64,
    /// Arithmetic mean, in microseconds.
    pub mean_us: f64,
    /// Median, in microseconds.
    pub p50_us: f64,
    /// 95th percentile, in microseconds.
    pub p95_us: f64,
    /// 99th percentile, in microseconds.
    pub p99_us: f64,
    /// Longest, in microseconds.
    pub max_us: f64,
}

/// The value of one series.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
#[serde(untagged)]
pub enum Value {
    /// A count, pages or bytes.
    Whole(u64),
    /// Seconds.
    Seconds(f64),
}

/// Every series of the metric table and every histogram, of one moment.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Numbers {
    words: Vec<u64>,
}

impl Numbers {
    /// The word of one series; seconds are in nanoseconds.
    pub fn get(&self, metric: Metric) -> u64 {
        self.words[metric.index()]
    }

    /// Every series in table order: its family, its position in the family, its value.
    pub fn series(&self) -> impl Iterator<Item = (&'static Family, usize, Value)> + '_ {
        families().flat_map(move |(family, first)| {
            (0..family.series()).map(move |position| {
                let word = self.words[first + position];
                let value = match family.unit {
                    Unit::Seconds => Value::Seconds(word as f64 / NANOS),
                    Unit::Pages | Unit::Bytes | Unit::Count => Value::Whole(word),
                };
                (family, position, value)
            })
        })
    }

    /// Sum of the timed nanoseconds, the longest, and the bucket counts of one histogram.
    pub fn histogram(&self, latency: Latency) -> (u64, u64, &[u64]) {
        let first = METRIC_WORDS + latency as usize * HISTOGRAM_WORDS;
        let words = &self.words[first..first + HISTOGRAM_WORDS];
        (words[0], words[1], &words[2..])
    }
}

impl Serialize for Numbers {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(METRIC_WORDS))?;
        for (family, position, value) in self.series() {
            map.serialize_entry(
                &format!("{}{}", family.name, family.label_text(position)),
                &value,
            )?;
        }
        map.end()
    }
}

/// Copies groups and remembers which were torn.
struct Copier<'a> {
    reader: &'a SegmentReader,
    patience: Patience,
    torn: Vec<&'static str>,
}

impl Copier<'_> {
    fn copy(&mut self, group: Group, part: &'static str) -> GroupCopy {
        let copy = self.reader.copy(group, || self.patience.try_again());
        if copy.torn && !self.torn.contains(&part) {
            self.torn.push(part);
        }
        copy
    }
}

impl Snapshot {
    /// Copies a segment. `alive` is the proof of life from its owner's lock, `now_ns` the time of
    /// CLOCK_MONOTONIC.
    pub fn take(reader: &SegmentReader, alive: bool, now_ns: u64) -> Self {
        let heartbeat_ns = reader.heartbeat_ns();
        let heartbeat_age_ns = now_ns.saturating_sub(heartbeat_ns);
        // Ages in a dead Manager count until it was last alive.
        let as_of_ns = if alive { now_ns } else { heartbeat_ns };
        let mut copier = Copier { reader, patience: Patience::new(), torn: Vec::new() };
        let counters = Numbers { words: copier.copy(NUMBERS, "counters").words };
        let texts = copier.copy(TEXTS, "texts").words;
        let text = |words: &[u64]| printable(&text_bytes(words));
        let http = text(&texts[PAGE_MODE_WORDS..PAGE_MODE_WORDS + HTTP_WORDS]);
        let ssd = copier.copy(DEVICES, "ssd").rows().iter().map(DeviceView::of).collect();
        let pages =
            copier.copy(NAMESPACES, "pages").rows().iter().flat_map(PagesView::of).collect();
        let config = text(&copier.copy(CONFIG, "config").words);
        let sessions = SessionTables::copy(&mut copier, as_of_ns);
        let identity = reader.identity();
        Self {
            manager: ManagerView {
                pid: identity.pid,
                epoch: identity.epoch.0,
                version: identity.version,
                uptime_seconds: as_of_ns.saturating_sub(identity.started_ns) as f64 / NANOS,
                state: LifeState::judge(alive, reader.state(), heartbeat_age_ns),
                socket: printable(identity.socket.as_os_str().as_encoded_bytes()),
                http: (!http.is_empty()).then_some(http),
                heartbeat_age_ms: heartbeat_age_ns / 1_000_000,
                torn: copier.torn,
            },
            sessions: sessions.sessions,
            pool: PoolView::of(&counters, text(&texts[..PAGE_MODE_WORDS])),
            ssd,
            budget: BudgetView::of(&counters),
            rings: sessions.rings,
            operations: sessions.operations,
            leases: sessions.leases,
            pages,
            latency: LatencyView::all(&counters),
            counters,
            config,
        }
    }

    /// What is known of a Manager that holds its lock but has no valid segment yet, or died so.
    pub(super) fn empty(alive: bool, socket: &Path) -> Self {
        let counters = Numbers { words: vec![0; METRIC_WORDS + LATENCY_WORDS] };
        Self {
            manager: ManagerView {
                pid: 0,
                epoch: 0,
                version: String::new(),
                uptime_seconds: 0.0,
                state: LifeState::judge(alive, Some(ManagerState::Starting), 0),
                socket: printable(socket.as_os_str().as_encoded_bytes()),
                http: None,
                heartbeat_age_ms: 0,
                torn: Vec::new(),
            },
            sessions: Vec::new(),
            pool: PoolView::of(&counters, String::new()),
            ssd: Vec::new(),
            budget: BudgetView::of(&counters),
            rings: Vec::new(),
            operations: Vec::new(),
            leases: Vec::new(),
            pages: Vec::new(),
            latency: LatencyView::all(&counters),
            counters,
            config: String::new(),
        }
    }
}

/// The four tables that come from session rows.
#[derive(Default)]
struct SessionTables {
    sessions: Vec<SessionView>,
    rings: Vec<RingView>,
    operations: Vec<OperationView>,
    leases: Vec<LeaseView>,
}

impl SessionTables {
    fn copy(copier: &mut Copier<'_>, as_of_ns: u64) -> Self {
        let mut tables = Self::default();
        for slot in 0..SESSION_ROWS {
            // A free row costs one look.
            let words = copier.copy(session_group(slot), "sessions").words;
            let row: SessionRow = bytemuck::pod_read_unaligned(bytemuck::cast_slice(&words));
            if row.state == 0 {
                continue;
            }
            tables.sessions.push(SessionView::of(&row));
            tables.rings.push(RingView::of(&row, as_of_ns));
            let operations = copier.copy(operations_group(slot), "operations").rows();
            tables
                .operations
                .extend(operations.iter().map(|o| OperationView::of(&row, o, as_of_ns)));
            let leases = copier.copy(leases_group(slot), "leases").rows();
            tables.leases.extend(leases.iter().map(|lease| LeaseView::of(lease, as_of_ns)));
        }
        tables.sessions.sort_by_key(|session| session.id);
        tables.rings.sort_by_key(|ring| ring.session);
        tables.operations.sort_by_key(|operation| std::cmp::Reverse(operation.age_ms));
        // A lease that several sessions of its group list is one lease.
        tables.leases.sort_by_key(|lease| lease.id);
        tables.leases.dedup_by_key(|lease| lease.id);
        tables.leases.sort_by_key(|lease| std::cmp::Reverse(lease.bytes));
        tables
    }
}

impl SessionView {
    fn of(row: &SessionRow) -> Self {
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
    fn of(row: &SessionRow, as_of_ns: u64) -> Self {
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
    fn of(session: &SessionRow, row: &OperationRow, as_of_ns: u64) -> Self {
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
    fn of(row: &LeaseRow, as_of_ns: u64) -> Self {
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
    fn of(row: &DeviceRow) -> Self {
        Self {
            path: printable(&text_bytes(&row.path)),
            capacity_bytes: row.capacity_bytes,
            used_bytes: row.used_bytes,
            slots: row.slots,
            reading: row.reading,
            writing: row.writing,
            engine: SsdEngine::from_word(row.engine).map_or(UNKNOWN, SsdEngine::label),
            direct: row.direct != 0,
            preallocated: row.preallocated != 0,
            health: SsdHealth::from_word(row.health).map_or(UNKNOWN, SsdHealth::label),
        }
    }
}

impl PagesView {
    /// A row for each tier that holds pages of the namespace.
    fn of(row: &NamespaceRow) -> impl Iterator<Item = Self> + use<> {
        let namespace = printable(&text_bytes(&row.name));
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
    fn of(numbers: &Numbers, page_mode: String) -> Self {
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
    fn of(numbers: &Numbers) -> Self {
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

impl LatencyView {
    fn all(numbers: &Numbers) -> Vec<Self> {
        Latency::ALL.iter().map(|&latency| Self::of(numbers, latency)).collect()
    }

    fn of(numbers: &Numbers, latency: Latency) -> Self {
        let (sum_ns, max_ns, buckets) = numbers.histogram(latency);
        let count = buckets.iter().fold(0_u64, |sum, &bucket| sum.saturating_add(bucket));
        let micros = |nanos: u64| nanos as f64 / 1e3;
        let quantile = |percent| micros(quantile(buckets, count, percent).min(max_ns));
        Self {
            kind: latency.kind(),
            stage: latency.stage(),
            count,
            mean_us: if count == 0 { 0.0 } else { micros(sum_ns) / count as f64 },
            p50_us: quantile(50),
            p95_us: quantile(95),
            p99_us: quantile(99),
            max_us: micros(max_ns),
        }
    }
}

/// End of the bucket in which `percent` of `count` times are reached; `u64::MAX` past the last.
fn quantile(buckets: &[u64], count: u64, percent: u64) -> u64 {
    if count == 0 {
        return 0;
    }
    let rank = (u128::from(count) * u128::from(percent)).div_ceil(100);
    let mut below = 0_u128;
    for (bucket, &times) in buckets.iter().enumerate().take(BUCKETS) {
        below += u128::from(times);
        if below >= rank {
            return bucket_end(bucket).unwrap_or(u64::MAX);
        }
    }
    u64::MAX
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
