//! One look at a whole segment.

use std::path::Path;

use serde::Serialize;

use super::numbers::{LatencyView, Numbers};
use super::view::{
    BudgetView, DeviceView, LeaseView, ManagerView, OperationView, PagesView, PoolView, RingView,
    SessionView,
};
use super::{HEARTBEAT_AGE_MAX, Patience};
use crate::telemetry::{
    CONFIG, DEVICES, Group, GroupCopy, HTTP_WORDS, LATENCY_WORDS, METRIC_WORDS, ManagerState,
    NAMESPACES, NUMBERS, PAGE_MODE_WORDS, SESSION_ROWS, SegmentReader, SessionRow, TEXTS,
    leases_group, operations_group, printable, printable_line, session_group, text_bytes,
};

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
        let text = |words: &[u64]| printable_line(&text_bytes(words));
        let http = text(&texts[PAGE_MODE_WORDS..PAGE_MODE_WORDS + HTTP_WORDS]);
        let ssd = copier.copy(DEVICES, "ssd").rows().iter().map(DeviceView::of).collect();
        let pages =
            copier.copy(NAMESPACES, "pages").rows().iter().flat_map(PagesView::of).collect();
        let config = printable(&text_bytes(&copier.copy(CONFIG, "config").words));
        let sessions = SessionTables::copy(&mut copier, as_of_ns);
        let identity = reader.identity();
        Self {
            manager: ManagerView {
                pid: identity.pid,
                epoch: identity.epoch.0,
                version: identity.version,
                uptime_seconds: as_of_ns.saturating_sub(identity.started_ns) as f64 / NANOS,
                state: LifeState::judge(alive, reader.state(), heartbeat_age_ns),
                socket: printable_line(identity.socket.as_os_str().as_encoded_bytes()),
                http: (!http.is_empty()).then_some(http),
                heartbeat_age_ms: heartbeat_age_ns / 1_000_000,
                torn: copier.torn,
                problems: Vec::new(),
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

    /// What is known of a Manager without a readable segment, which its own word would name `said`.
    pub(super) fn empty(alive: bool, said: Option<ManagerState>, socket: &Path) -> Self {
        let counters = Numbers { words: vec![0; METRIC_WORDS + LATENCY_WORDS] };
        Self {
            manager: ManagerView {
                pid: 0,
                epoch: 0,
                version: String::new(),
                uptime_seconds: 0.0,
                state: LifeState::judge(alive, said, 0),
                socket: printable_line(socket.as_os_str().as_encoded_bytes()),
                http: None,
                heartbeat_age_ms: 0,
                torn: Vec::new(),
                problems: Vec::new(),
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
