//! What the Manager tells the world about itself: the one writer of the telemetry segment.
//!
//! The reactor counts in plain private memory ([`Counters`]) and hands tables over as plain structs
//! ([`mirror`]); [`Telemetry::publish`] copies what changed. Tools and `/metrics` read the segment
//! ([`TelemetryReader`]) and never ask the reactor, so a hung Manager can still be looked at.
//!
//! One turn of the reactor:
//!
//! ```text
//! telemetry.counters.add(Metric::…, n)        as things happen: one add and one bit
//! if telemetry.due(now) {                     at most every PUBLISH_INTERVAL
//!     telemetry.set_session(slot, …)          tables; unchanged ones cost a comparison
//!     telemetry.publish(now)                  changed numbers and the heartbeat
//! }
//! ```

mod counters;
pub mod mirror;
mod prometheus;
mod segment;

use std::path::PathBuf;
use std::time::Duration;

use orbitkv_shm_protocol::ids::Epoch;
use orbitkv_shm_protocol::inspect::{LifeState, Snapshot, now_ns};
use orbitkv_shm_protocol::telemetry::{
    CONFIG, CONFIG_WORDS, DEVICE_ROWS, DEVICES, DeviceRow, HTTP_WORDS, Identity, LeaseRow,
    ManagerState, Metric, NAMESPACES, NUMBERS, OperationRow, PAGE_MODE_WORDS, SESSION_ROWS,
    SegmentReader, SegmentWriter, SessionRow, TEXTS, leases_group, operations_group, session_group,
    text_words,
};
use rustix::time::{ClockId, clock_gettime};

pub use counters::Counters;
use mirror::{DeviceMirror, LeaseMirror, NamespaceMirror, OperationMirror, SessionMirror};
pub use prometheus::{DEVICE_FAMILIES, DeviceFamily, render as render_prometheus};
pub use segment::TelemetryError;
use segment::{NamedSegment, create_segment};

/// Shortest time between two publications of a busy reactor. Long against the microseconds that a
/// reader needs for a consistent copy, short against anything that a person can see.
pub const PUBLISH_INTERVAL: Duration = Duration::from_millis(1);
/// Shortest time between two readings of the processor clock, which is a system call.
const CPU_INTERVAL_NS: u64 = 100_000_000;

/// Who writes the segment.
#[derive(Clone, Debug)]
pub struct TelemetryIdentity {
    /// Socket of the Manager; its lock is held by the caller.
    pub socket: PathBuf,
    /// This life of the Manager.
    pub epoch: Epoch,
    /// Version of the build.
    pub version: String,
    /// CLOCK_MONOTONIC nanoseconds at which it started.
    pub started_ns: u64,
}

/// The writer. It belongs to the reactor's thread.
///
/// Dropping it removes the segment, unless the thread is panicking: what is left then, as after a
/// SIGKILL, is for the inspector, and the next Manager on that socket replaces it. Drop it before
/// the socket's lock is given up.
#[derive(Debug)]
pub struct Telemetry {
    /// Numbers of the metric table and the latencies; counted at any time, published together.
    pub counters: Counters,
    writer: SegmentWriter,
    reader: SegmentReader,
    state: ManagerState,
    started_ns: u64,
    published_ns: u64,
    cpu_read_ns: u64,
    devices: Vec<DeviceRow>,
    sessions: Vec<Option<SessionTables>>,
    scratch: Scratch,
    _named: NamedSegment,
}

/// Place of a session in the segment; given back with [`Telemetry::close_session`].
#[derive(Debug)]
#[must_use = "a slot that is not closed stays taken"]
pub struct SessionSlot(usize);

/// What was last written of a session.
#[derive(Debug)]
struct SessionTables {
    row: Option<SessionRow>,
    operations: Vec<OperationRow>,
    leases: Vec<LeaseRow>,
}

/// Rows in the making, kept so that a turn allocates nothing once they have grown.
#[derive(Default, Debug)]
struct Scratch {
    devices: Vec<DeviceRow>,
    operations: Vec<OperationRow>,
    leases: Vec<LeaseRow>,
}

impl Telemetry {
    /// Creates the named segment, in state `starting`. The caller holds the socket's lock: that
    /// makes a segment that is already there a dead Manager's, which is replaced.
    ///
    /// # Errors
    /// [`TelemetryError`]: no space in shared memory, or the name is taken.
    pub fn create(identity: &TelemetryIdentity) -> Result<Self, TelemetryError> {
        let (named, memory, resolved) = create_segment(&identity.socket)?;
        let header = Identity {
            epoch: identity.epoch,
            pid: std::process::id(),
            uid: rustix::process::geteuid().as_raw(),
            started_ns: identity.started_ns,
            version: identity.version.clone(),
            socket: resolved,
        };
        let writer = SegmentWriter::new(memory, &header);
        let reader = SegmentReader::new(writer.memory())
            .expect("the segment was written by this build just above");
        let mut telemetry = Self {
            counters: Counters::new(),
            writer,
            reader,
            state: ManagerState::Starting,
            started_ns: identity.started_ns,
            published_ns: 0,
            cpu_read_ns: 0,
            devices: Vec::new(),
            sessions: (0..SESSION_ROWS).map(|_| None).collect(),
            scratch: Scratch::default(),
            _named: named,
        };
        telemetry.set_state(ManagerState::Starting);
        telemetry.publish(now_ns());
        Ok(telemetry)
    }

    /// A handle for `/metrics` and `/healthz`, usable from any thread. It stays readable after the
    /// writer is gone.
    pub fn reader(&self) -> TelemetryReader {
        TelemetryReader { reader: self.reader.clone() }
    }

    /// Says which state the Manager is in, at once.
    pub fn set_state(&mut self, state: ManagerState) {
        self.state = state;
        self.writer.set_state(state);
        for &each in ManagerState::ALL {
            self.counters.set(Metric::ManagerStates(each), (each == state).into());
        }
    }

    /// State last said.
    pub const fn state(&self) -> ManagerState {
        self.state
    }

    /// Says what page size the pool got, and where metrics are served (`None`: off).
    pub fn set_texts(&mut self, page_mode: &str, http: Option<&str>) {
        let page_mode = text_words::<PAGE_MODE_WORDS>(page_mode.as_bytes());
        let http = text_words::<HTTP_WORDS>(http.unwrap_or_default().as_bytes());
        self.writer.update(TEXTS, |stores| {
            stores.store_all(0, &page_mode);
            stores.store_all(PAGE_MODE_WORDS, &http);
        });
    }

    /// Shows the resolved configuration; the first 16 KiB of it are kept.
    pub fn set_config(&mut self, text: &str) {
        let words = text_words::<CONFIG_WORDS>(text.as_bytes());
        self.writer.update(CONFIG, |stores| stores.store_all(0, &words));
    }

    /// Shows the SSD devices, in configuration order; the first [`DEVICE_ROWS`] of them.
    pub fn set_devices<'a>(&mut self, devices: impl IntoIterator<Item = DeviceMirror<'a>>) {
        let scratch = &mut self.scratch.devices;
        scratch.clear();
        scratch.extend(devices.into_iter().take(DEVICE_ROWS).map(DeviceRow::from));
        if *scratch != self.devices {
            self.writer.update_table(DEVICES, scratch);
            std::mem::swap(scratch, &mut self.devices);
        }
    }

    /// Shows what the tiers hold of each namespace. Where there are more than
    /// [`orbitkv_shm_protocol::telemetry::NAMESPACE_ROWS`], the smallest are summed up in one row,
    /// so that the rows sum to the whole. Costs an allocation and a sort: not for every turn.
    pub fn set_namespaces<'a>(
        &mut self,
        namespaces: impl IntoIterator<Item = NamespaceMirror<'a>>,
    ) {
        self.writer.update_table(NAMESPACES, &mirror::namespace_rows(namespaces));
    }

    /// Takes a row for a session; `None` when all are taken, and the session is not shown.
    pub fn open_session(&mut self, session: &SessionMirror) -> Option<SessionSlot> {
        let slot = self.sessions.iter().position(Option::is_none)?;
        self.sessions[slot] =
            Some(SessionTables { row: None, operations: Vec::new(), leases: Vec::new() });
        let slot = SessionSlot(slot);
        self.set_session(&slot, session);
        Some(slot)
    }

    /// Shows a session and its rings.
    pub fn set_session(&mut self, slot: &SessionSlot, session: &SessionMirror) {
        let Some(tables) = &mut self.sessions[slot.0] else { return };
        let row = SessionRow::from(*session);
        if tables.row != Some(row) {
            tables.row = Some(row);
            let group = session_group(slot.0);
            self.writer.update(group, |stores| stores.store_all(0, bytemuck::cast_slice(&[row])));
        }
    }

    /// Shows the oldest of a session's running operations, which may come in any order.
    pub fn set_operations(
        &mut self,
        slot: &SessionSlot,
        operations: impl IntoIterator<Item = OperationMirror>,
    ) {
        let Some(tables) = &mut self.sessions[slot.0] else { return };
        let scratch = &mut self.scratch.operations;
        mirror::oldest_operations(scratch, operations);
        if *scratch != tables.operations {
            self.writer.update_table(operations_group(slot.0), scratch);
            std::mem::swap(scratch, &mut tables.operations);
        }
    }

    /// Shows the largest of a session's leases, which may come in any order. A lease of a group may
    /// be shown under one session or under each.
    pub fn set_leases(
        &mut self,
        slot: &SessionSlot,
        leases: impl IntoIterator<Item = LeaseMirror>,
    ) {
        let Some(tables) = &mut self.sessions[slot.0] else { return };
        let scratch = &mut self.scratch.leases;
        mirror::largest_leases(scratch, leases);
        if *scratch != tables.leases {
            self.writer.update_table(leases_group(slot.0), scratch);
            std::mem::swap(scratch, &mut tables.leases);
        }
    }

    /// Gives the row of an ended session back.
    pub fn close_session(&mut self, slot: SessionSlot) {
        self.sessions[slot.0] = None;
        let group = session_group(slot.0);
        self.writer.update(group, |stores| {
            (0..group.words()).for_each(|word| stores.store(word, 0));
        });
        self.writer.update_table::<OperationRow>(operations_group(slot.0), &[]);
        self.writer.update_table::<LeaseRow>(leases_group(slot.0), &[]);
    }

    /// Whether [`PUBLISH_INTERVAL`] has passed since the last publication.
    pub const fn due(&self, now: u64) -> bool {
        now.saturating_sub(self.published_ns) >= PUBLISH_INTERVAL.as_nanos() as u64
    }

    /// Copies every number that changed, and beats. `now` is CLOCK_MONOTONIC in nanoseconds. An
    /// idle reactor calls this at least every 100 ms, else it looks hung.
    pub fn publish(&mut self, now: u64) {
        if now.saturating_sub(self.cpu_read_ns) >= CPU_INTERVAL_NS {
            self.cpu_read_ns = now;
            let cpu = clock_gettime(ClockId::ProcessCPUTime);
            self.counters
                .set(Metric::ManagerCpu, cpu.tv_sec as u64 * 1_000_000_000 + cpu.tv_nsec as u64);
            self.counters.set(Metric::ManagerUptime, now.saturating_sub(self.started_ns));
        }
        if self.counters.is_changed() {
            let counters = &mut self.counters;
            self.writer.update(NUMBERS, |stores| {
                counters.take_changed(|word, value| stores.store(word, value));
            });
        }
        self.writer.beat(now);
        self.published_ns = now;
    }
}

/// Reads the segment inside the Manager's process, from any thread, without the reactor.
#[derive(Clone, Debug)]
pub struct TelemetryReader {
    reader: SegmentReader,
}

impl TelemetryReader {
    /// What the segment says now.
    pub fn snapshot(&self) -> Snapshot {
        Snapshot::take(&self.reader, true, now_ns())
    }

    /// The text of `/metrics`.
    pub fn prometheus(&self) -> String {
        render_prometheus(&self.snapshot())
    }

    /// The state for `/healthz`: healthy when `Ready` or `Degraded`.
    pub fn life(&self) -> LifeState {
        LifeState::judge(
            true,
            self.reader.state(),
            now_ns().saturating_sub(self.reader.heartbeat_ns()),
        )
    }
}

impl SessionSlot {
    /// Number of the row.
    pub const fn index(&self) -> usize {
        self.0
    }
}

#[cfg(test)]
mod tests;
