//! Writer and reader together, over real named segments.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::path::Path;

use orbitkv_shm_protocol::bootstrap::peer::lock_path;
use orbitkv_shm_protocol::ids::{EngineId, LeaseId, OperationId, SessionId};
use orbitkv_shm_protocol::inspect::{self, InspectError};
use orbitkv_shm_protocol::record::RequestKind;
use orbitkv_shm_protocol::telemetry::{
    FAMILIES, HeldIn, LATENCY_NAME, Latency, OperationStage, Reason, SessionState, SsdEngine,
    SsdHealth, SsdRecovery, TELEMETRY_BYTES, segment_name,
};
use rustix::fs::FlockOperation;

use super::*;

/// A socket's folder and its lock, held as a Manager holds it.
struct Place {
    folder: tempfile::TempDir,
    lock: Option<File>,
}

impl Place {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("temporary folder");
        let mut place = Self { folder, lock: None };
        place.hold();
        place
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("a.sock")
    }

    fn hold(&mut self) {
        let file = File::create(lock_path(&self.socket())).expect("lock file");
        rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).expect("free");
        self.lock = Some(file);
    }

    /// Writes like a Manager of that epoch.
    fn start(&self, epoch: u32) -> Telemetry {
        Telemetry::create(&TelemetryIdentity {
            socket: self.socket(),
            epoch: Epoch(epoch),
            version: "0.1.0".into(),
            started_ns: now_ns(),
        })
        .expect("space in /dev/shm")
    }

    fn read(&self) -> Snapshot {
        inspect::read(&self.socket()).expect("a segment")
    }

    fn segment(&self) -> PathBuf {
        let uid = rustix::process::geteuid().as_raw();
        let socket = self.folder.path().canonicalize().expect("exists").join("a.sock");
        Path::new("/dev/shm").join(&segment_name(uid, &socket)[1..])
    }
}

fn session(id: u32) -> SessionMirror {
    SessionMirror {
        id: SessionId(id),
        pid: 4242,
        uid: 1000,
        state: SessionState::Attached,
        engine: EngineId([7; 16]),
        rings: rings(),
        credits: 256,
        leased_bytes: 4096,
        regions: 1,
    }
}

fn rings() -> RingsMirror {
    RingsMirror {
        requests_submitted: 10,
        requests_taken: 8,
        completions_published: 6,
        completions_consumed: 5,
        outstanding: 2,
        last_progress_ns: 1,
    }
}

fn device(path: &Path, used_bytes: u64) -> DeviceMirror<'_> {
    DeviceMirror {
        path,
        capacity_bytes: 1 << 34,
        used_bytes,
        slots: used_bytes / 4096,
        reading: 1,
        writing: 2,
        engine: SsdEngine::Blocking,
        direct: false,
        preallocated: true,
        registered: true,
        health: SsdHealth::Healthy,
        pace: mirror::PaceMirror {
            small_read_ns: [125_000, 2_500_000],
            large_read_ns: [1_500_000_000, 0],
            ..mirror::PaceMirror::default()
        },
        recovery: SsdRecovery::Done,
        scan_slots: 9,
        scanned_slots: 9,
        scan_read_bytes: 9 * 4096,
    }
}

#[test]
fn a_device_whose_slots_are_not_known_yet_is_neither_readable_nor_writable() {
    let place = Place::new();
    let mut telemetry = place.start(5);
    telemetry.set_state(ManagerState::Ready);
    for (recovery, readable, writable) in
        [(SsdRecovery::Scanning, 0, 0), (SsdRecovery::TakingOver, 1, 0), (SsdRecovery::Done, 1, 1)]
    {
        telemetry.set_devices([DeviceMirror { recovery, ..device(Path::new("/nvme/a"), 0) }]);
        telemetry.publish(now_ns());
        let text = prometheus::render(&place.read());
        for (name, value) in [("readable", readable), ("writable", writable)] {
            let line = format!("orbitkv_ssd_device_{name}{{device=\"0\"}} {value}\n");
            assert!(text.contains(&line), "{line}");
        }
    }
}

/// What is published is what another process reads, and nothing before it is published.
#[test]
fn published_numbers_are_read_back() {
    let place = Place::new();
    let mut telemetry = place.start(5);
    assert_eq!(place.read().manager.state, LifeState::Starting);
    telemetry.set_state(ManagerState::Ready);
    telemetry.set_texts("2 MiB", Some("127.0.0.1:9400"));
    telemetry.set_config("dram = 1 GiB\n");
    telemetry.set_devices([device(Path::new("/nvme/a"), 8192)]);
    telemetry.counters.add(Metric::LookupPages, 30);
    telemetry.counters.add(Metric::LookupHitPages(HeldIn::Dram), 18);
    telemetry.counters.time(Latency::SaveTotal, 1_000);
    assert_eq!(place.read().counters.get(Metric::LookupPages), 0);
    telemetry.publish(now_ns());

    let snapshot = place.read();
    assert_eq!(snapshot.manager.state, LifeState::Ready);
    assert_eq!((snapshot.manager.pid, snapshot.manager.epoch), (std::process::id(), 5));
    assert_eq!(snapshot.manager.http.as_deref(), Some("127.0.0.1:9400"));
    assert_eq!(snapshot.pool.page_mode, "2 MiB");
    assert_eq!(snapshot.config, "dram = 1 GiB\n");
    assert_eq!(snapshot.ssd[0].used_bytes, 8192);
    assert_eq!(snapshot.counters.get(Metric::LookupPages), 30);
    assert_eq!(snapshot.counters.get(Metric::LookupHitPages(HeldIn::Dram)), 18);
    assert_eq!(snapshot.counters.get(Metric::ManagerStates(ManagerState::Ready)), 1);
    assert_eq!(snapshot.counters.get(Metric::ManagerStates(ManagerState::Starting)), 0);
    assert!(snapshot.counters.get(Metric::ManagerCpu) > 0, "processor time was used");
    assert_eq!(snapshot.latency.iter().map(|latency| latency.count).sum::<u64>(), 1);
    // The same numbers inside the process, through the same reader.
    let inside = telemetry.reader().snapshot();
    assert_eq!(inside.counters, snapshot.counters);
    assert_eq!(telemetry.reader().life(), LifeState::Ready);
}

#[test]
fn sessions_come_and_go() {
    let place = Place::new();
    let mut telemetry = place.start(5);
    let first = telemetry.open_session(&session(11)).expect("free row");
    let second = telemetry.open_session(&session(12)).expect("free row");
    let operation = |index, taken_ns| OperationMirror {
        id: OperationId { index, generation: 1 },
        kind: RequestKind::Query,
        stage: OperationStage::Waiting,
        taken_ns,
    };
    let lease = |id, bytes| LeaseMirror {
        id: LeaseId(id),
        group: EngineId([7; 16]),
        bytes,
        pages: 1,
        expires_ns: u64::MAX,
    };
    // More than fit: the oldest 16 and the largest 16 stay.
    telemetry.set_operations(&first, (0..40).map(|i| operation(i, 1_000 - u64::from(i))));
    telemetry.set_leases(&second, (1..40).map(|i| lease(i, i * 4096)));
    telemetry.set_session(
        &second,
        &SessionMirror { rings: RingsMirror { outstanding: 9, ..rings() }, ..session(12) },
    );

    let snapshot = place.read();
    let sessions: Vec<_> = snapshot.sessions.iter().map(|s| (s.id, s.outstanding)).collect();
    assert_eq!(sessions, [(11, 2), (12, 9)]);
    assert_eq!(snapshot.operations.len(), 16);
    let ids: BTreeSet<_> = snapshot.operations.iter().map(|o| o.id.clone()).collect();
    assert_eq!(ids, (24..40).map(|index| format!("{index}.1")).collect());
    let leases: Vec<_> = snapshot.leases.iter().map(|lease| lease.id).collect();
    assert_eq!(leases, (24..40).rev().collect::<Vec<u64>>());

    telemetry.close_session(first);
    let snapshot = place.read();
    assert_eq!(snapshot.sessions.iter().map(|s| s.id).collect::<Vec<_>>(), [12]);
    assert!(snapshot.operations.is_empty(), "gone with their session");
    // The row is free again, and what its last owner left is not shown under the new one.
    let third = telemetry.open_session(&session(13)).expect("free row");
    assert_eq!(third.index(), 0);
    assert!(place.read().operations.is_empty());
    telemetry.close_session(second);
    telemetry.close_session(third);
    assert!(place.read().sessions.is_empty());
}

#[test]
fn rows_for_sessions_are_bounded() {
    let place = Place::new();
    let mut telemetry = place.start(5);
    let slots: Vec<_> = (0..).map_while(|id| telemetry.open_session(&session(id))).collect();
    assert_eq!(slots.len(), SESSION_ROWS);
    assert_eq!(place.read().sessions.len(), SESSION_ROWS);
    for slot in slots {
        telemetry.close_session(slot);
    }
    assert!(telemetry.open_session(&session(1)).is_some());
}

#[test]
fn a_clean_stop_removes_the_segment() {
    let place = Place::new();
    let telemetry = place.start(5);
    let reader = telemetry.reader();
    assert!(place.segment().exists());
    drop(telemetry);
    assert!(!place.segment().exists());
    // A scrape that is under way when the writer goes still ends well.
    assert_eq!(reader.snapshot().manager.epoch, 5);
}

/// A segment whose owner died without removing it is read as dead, then replaced by the next one.
#[test]
fn a_dead_owners_segment_is_read_then_replaced() {
    let mut place = Place::new();
    let mut telemetry = place.start(5);
    telemetry.counters.add(Metric::SaveOfferedPages, 3);
    telemetry.publish(now_ns());
    // As after a SIGKILL: no destructor runs, the kernel drops the lock.
    std::mem::forget(telemetry);
    place.lock = None;
    let dead = place.read();
    assert_eq!((dead.manager.state, dead.manager.epoch), (LifeState::Dead, 5));
    assert_eq!(dead.counters.get(Metric::SaveOfferedPages), 3);

    place.hold();
    let next = place.start(6);
    let snapshot = place.read();
    assert_eq!((snapshot.manager.state, snapshot.manager.epoch), (LifeState::Starting, 6));
    assert_eq!(snapshot.counters.get(Metric::SaveOfferedPages), 0);
    drop(next);
    place.lock = None;
    assert!(matches!(inspect::read(&place.socket()), Err(InspectError::NotFound { .. })));
}

/// Garbage under our name, of any size, is no obstacle.
#[test]
fn garbage_is_replaced() {
    let place = Place::new();
    for bytes in [0, 5, TELEMETRY_BYTES] {
        std::fs::write(place.segment(), vec![0xff; bytes]).expect("/dev/shm");
        assert_eq!(place.start(7).reader().snapshot().manager.epoch, 7);
    }
}

/// A Manager that panics leaves its numbers for the inspector.
#[test]
fn a_panic_keeps_the_evidence() {
    let mut place = Place::new();
    let telemetry = place.start(8);
    let end = std::thread::spawn(move || {
        let _telemetry = telemetry;
        panic!("a bug (this panic is part of the test)");
    })
    .join();
    assert!(end.is_err());
    place.lock = None;
    assert_eq!(place.read().manager.state, LifeState::Dead);
    std::fs::remove_file(place.segment()).expect("left by the panic");
}

/// Every name has one owner: another uid or another socket never gives the same one, and a hash
/// collision with a living Manager is refused.
#[test]
fn a_living_managers_segment_is_never_taken() {
    let (mine, theirs) = (Place::new(), Place::new());
    assert_ne!(mine.segment(), theirs.segment());
    let _theirs = theirs.start(1);
    // Stage the collision: their segment under the name that mine will want.
    std::fs::rename(theirs.segment(), mine.segment()).expect("one file system");
    let identity = TelemetryIdentity {
        socket: mine.socket(),
        epoch: Epoch(2),
        version: "0.1.0".into(),
        started_ns: 0,
    };
    match Telemetry::create(&identity) {
        Err(TelemetryError::Collision { socket, .. }) => {
            assert_eq!(socket.file_name(), theirs.socket().file_name());
        }
        other => panic!("{other:?}"),
    }
    assert!(matches!(inspect::read(&mine.socket()), Err(InspectError::OtherSocket { .. })));
    std::fs::rename(mine.segment(), theirs.segment()).expect("one file system");
}

/// Counts lines by series and checks the text against the table: each metric is rendered once, with
/// its HELP and TYPE, with exactly the label values of its closed sets.
#[test]
fn prometheus_text_is_the_table() {
    let place = Place::new();
    let mut telemetry = place.start(5);
    let paths: Vec<PathBuf> = (0..DEVICE_ROWS).map(|i| format!("/nvme/{i}").into()).collect();
    telemetry.set_devices(paths.iter().map(|path| device(path, 4096)));
    telemetry.counters.add(Metric::LookupMissedPages(Reason::Absent), 12);
    telemetry.counters.set(Metric::ManagerCpu, 2_500_000_000);
    telemetry.counters.time(Latency::QueryTotal, 5_000);
    telemetry.counters.time(Latency::QueryTotal, u64::MAX / 2);
    telemetry.published_ns = 0;
    telemetry.cpu_read_ns = u64::MAX;
    telemetry.publish(now_ns());
    let _slot = telemetry.open_session(&session(77_777)).expect("free row");
    let text = telemetry.reader().prometheus();

    let mut series = BTreeMap::new();
    let (mut helped, mut typed) = (BTreeSet::new(), BTreeMap::new());
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            let (name, help) = rest.split_once(' ').expect("name and help");
            assert!(helped.insert(name.to_owned()) && !help.is_empty(), "{line}");
        } else if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').expect("name and type");
            assert!(typed.insert(name.to_owned(), kind.to_owned()).is_none(), "{line}");
        } else {
            let (name, value) = line.rsplit_once(' ').expect("series and value");
            let value: f64 = value.parse().expect("a number");
            assert!(series.insert(name.to_owned(), value).is_none(), "{name} twice");
        }
    }
    for family in FAMILIES {
        assert!(helped.contains(family.name), "{}", family.name);
        assert_eq!(typed[family.name], family.kind.label());
        for position in 0..family.series() {
            let name = format!("{}{}", family.name, family.label_text(position));
            assert!(series.contains_key(&name), "{name}");
        }
    }
    let of_table: usize = FAMILIES.iter().map(|family| family.series()).sum();
    let of_latency = Latency::ALL.len() * (12 + 3);
    let of_devices = DEVICE_FAMILIES.len() * DEVICE_ROWS;
    assert_eq!(series.len(), of_table + of_latency + of_devices, "no series outside the tables");
    assert_eq!(helped.len(), FAMILIES.len() + 1 + DEVICE_FAMILIES.len());
    assert_eq!(typed.len(), helped.len());
    assert!(series.len() < 700, "{} series with all devices", series.len());
    assert!(!text.contains("77777") && !text.contains("/nvme"), "no id or path is a label");

    assert_eq!(series["orbitkv_ssd_write_queue_full_total"], 0.0);
    assert_eq!(series["orbitkv_lookup_missed_pages_total{reason=\"absent\"}"], 12.0);
    assert_eq!(series["orbitkv_manager_cpu_seconds_total"], 2.5);
    assert_eq!(series["orbitkv_ssd_device_used_bytes{device=\"15\"}"], 4096.0);
    for (name, seconds) in [
        ("small_read_alone", 0.000_125),
        ("small_read_beside", 0.002_5),
        ("large_read_alone", 1.5),
        ("large_read_beside", 0.0),
    ] {
        let name = format!("orbitkv_ssd_device_{name}_seconds{{device=\"3\"}}");
        assert_eq!(series[&name], seconds, "{name}");
    }
    let bucket = |le: &str| {
        series[&format!("{LATENCY_NAME}_bucket{{kind=\"query\",stage=\"total\",le=\"{le}\"}}")]
    };
    assert_eq!((bucket("0.000004096"), bucket("0.000016384")), (0.0, 1.0));
    assert_eq!((bucket("17.179869184"), bucket("+Inf")), (1.0, 2.0));
    assert_eq!(series[&format!("{LATENCY_NAME}_count{{kind=\"query\",stage=\"total\"}}")], 2.0);
}

/// The buckets of the text add up exactly: every time lies on the same side of every boundary as
/// its fine bucket.
#[test]
fn text_buckets_count_what_lies_below_them() {
    let place = Place::new();
    let mut telemetry = place.start(5);
    let times: Vec<u64> = (8..38).flat_map(|bits| [(1 << bits) - 1, 1 << bits]).collect();
    for &time in &times {
        telemetry.counters.time(Latency::RestoreCopy, time);
    }
    telemetry.publish(now_ns());
    let text = telemetry.reader().prometheus();
    let start = format!("{LATENCY_NAME}_bucket{{kind=\"restore\",stage=\"copy\",le=\"");
    let mut checked = 0;
    for line in text.lines().filter_map(|line| line.strip_prefix(&start)) {
        let (le, below) = line.split_once("\"} ").expect("bound and count");
        let expected = match le {
            "+Inf" => times.len(),
            le => {
                let end = (le.parse::<f64>().expect("seconds") * 1e9).round() as u64;
                times.iter().filter(|&&time| time < end).count()
            }
        };
        assert_eq!(below, expected.to_string(), "le {le}");
        checked += 1;
    }
    assert_eq!(checked, 13);
}

/// Publication is due after the interval, not before; a sleeping reactor's publication counts.
#[test]
fn publication_is_paced() {
    let place = Place::new();
    let mut telemetry = place.start(5);
    let now = now_ns();
    telemetry.publish(now);
    let interval = PUBLISH_INTERVAL.as_nanos() as u64;
    assert!(!telemetry.due(now + interval - 1));
    assert!(telemetry.due(now + interval));
    assert!(!telemetry.due(0), "a clock that stands still is no reason to write");
    assert_eq!(telemetry.reader().reader.heartbeat_ns(), now);
}

/// The reactor may be made on one thread and run on another, metrics are served from a third.
const _: () = {
    const fn sent<T: Send>() {}
    const fn shared<T: Sync>() {}
    sent::<Telemetry>();
    sent::<TelemetryReader>();
    shared::<TelemetryReader>();
};

/// Positions alone are told without a publication, and nothing else of the session changes.
#[test]
fn rings_are_shown_at_once() {
    let place = Place::new();
    let mut telemetry = place.start(5);
    let slot = telemetry.open_session(&session(11)).expect("free row");
    let moved = RingsMirror {
        requests_submitted: 21,
        requests_taken: 20,
        completions_published: 17,
        completions_consumed: 12,
        outstanding: 3,
        last_progress_ns: 2,
    };
    telemetry.set_rings(&slot, &moved);
    let seen = place.read();
    let ring = &seen.rings[0];
    assert_eq!((ring.requests_queued, ring.completions_queued, ring.credits_used), (1, 5, 9));
    let shown = &seen.sessions[0];
    assert_eq!((shown.id, shown.pid, shown.outstanding, shown.leased_bytes), (11, 4242, 3, 4096));
    telemetry.close_session(slot);
    assert!(place.read().sessions.is_empty());
}

/// Goal: what another program writes into the segment is neither believed nor left standing.
/// Method: every byte is overwritten; a second later by the clock that is handed in, all is back.
#[test]
fn a_damaged_segment_is_written_anew() {
    let place = Place::new();
    let mut telemetry = place.start(5);
    let slot = telemetry.open_session(&session(11)).expect("free row");
    telemetry.set_state(ManagerState::Ready);
    telemetry.set_texts("thp", Some("127.0.0.1:9400"));
    telemetry.set_config("dram = 1 GiB\n");
    telemetry.set_devices([device(Path::new("/nvme/a"), 8192)]);
    let name = "llama";
    let namespace =
        NamespaceMirror { name, dram_pages: 3, dram_bytes: 12_288, ssd_pages: 0, ssd_bytes: 0 };
    telemetry.set_namespaces([namespace]);
    telemetry.counters.set(Metric::LookupPages, 30);
    telemetry.publish(now_ns());
    let before = place.read();

    let mut noise = 0x9e37_79b9_u32;
    let bytes: Vec<u8> = std::iter::repeat_with(|| {
        noise ^= noise << 13;
        noise ^= noise >> 17;
        noise ^= noise << 5;
        noise as u8
    })
    .take(TELEMETRY_BYTES)
    .collect();
    std::fs::write(place.segment(), bytes).expect("ours to damage");
    assert!(!place.read().manager.problems.is_empty(), "damage is named");
    telemetry.publish(now_ns() + RESTATE_INTERVAL_NS);

    let after = place.read();
    assert!(after.manager.problems.is_empty(), "{:?}", after.manager.problems);
    assert_eq!((after.manager.epoch, after.manager.state), (5, LifeState::Ready));
    assert_eq!(after.manager.http, before.manager.http);
    assert_eq!(
        (&after.config, &after.ssd, &after.pages),
        (&before.config, &before.ssd, &before.pages)
    );
    assert_eq!((&after.sessions, &after.leases), (&before.sessions, &before.leases));
    assert_eq!(after.counters.get(Metric::LookupPages), 30);
    telemetry.close_session(slot);
}

/// The documentation lists every metric, with its kind and its help, and no other.
#[test]
fn the_documentation_lists_every_metric() {
    let text = include_str!("../../../docs/observing.md");
    let listed: BTreeMap<&str, &str> = text
        .lines()
        .filter_map(|line| {
            line.strip_prefix("| `orbitkv_").and(line.split('`').nth(1)).zip(Some(line))
        })
        .collect();
    let devices = DEVICE_FAMILIES.iter().map(|family| (family.name, "gauge", family.help));
    let all = FAMILIES.iter().map(|family| (family.name, family.kind.label(), family.help()));
    let mut known = 0;
    for (name, kind, help) in all.chain(devices).chain([(LATENCY_NAME, "histogram", "")]) {
        let row = listed.get(name).unwrap_or_else(|| panic!("{name} is not in docs/observing.md"));
        assert!(row.contains(&format!("| {kind} |")) && row.contains(help), "{row}");
        known += 1;
    }
    assert_eq!(listed.len(), known, "a metric that is gone");
}
