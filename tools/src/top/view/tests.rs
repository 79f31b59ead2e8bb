//! Screens as text, from real telemetry.

use std::path::Path;

use orbitkv_manager::telemetry::mirror::{DeviceMirror, PaceMirror, RingsMirror, SessionMirror};
use orbitkv_manager::telemetry::{Telemetry, TelemetryIdentity};
use orbitkv_shm_protocol::ids::{EngineId, Epoch, SessionId};
use orbitkv_shm_protocol::inspect::now_ns;
use orbitkv_shm_protocol::record::{RequestKind, Status};
use orbitkv_shm_protocol::telemetry::{
    CopyDirection, HeldIn, ManagerState, Metric, SessionState, SsdEngine, SsdHealth, SsdRecovery,
};
use ratatui::Terminal;
use ratatui::backend::TestBackend;

use super::super::rates::rates_between;
use super::*;

struct Fake {
    telemetry: Telemetry,
    _folder: tempfile::TempDir,
}

impl Fake {
    /// A Manager with so many sessions and one SSD file that takes no writes.
    fn new(sessions: u32) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut telemetry = Telemetry::create(&TelemetryIdentity {
            socket: folder.path().join("a.sock"),
            epoch: Epoch(5),
            version: "9.9.9".into(),
            started_ns: now_ns(),
        })
        .unwrap();
        telemetry.set_state(ManagerState::Degraded);
        telemetry.set_devices([DeviceMirror {
            path: Path::new("/a/very/long/path/to/a/file/of/the/ssd/tier/named/nvme0.okv"),
            capacity_bytes: 64 << 30,
            used_bytes: 16 << 30,
            slots: 7,
            reading: 3,
            writing: 0,
            engine: SsdEngine::Uring,
            direct: true,
            preallocated: true,
            registered: true,
            health: SsdHealth::ReadOnly,
            pace: PaceMirror::default(),
            recovery: SsdRecovery::Done,
            scan_slots: 0,
            scanned_slots: 0,
            scan_read_bytes: 0,
        }]);
        for id in 1..=sessions {
            let _slot = telemetry.open_session(&SessionMirror {
                id: SessionId(id),
                pid: 4000 + id,
                uid: 0,
                state: SessionState::Attached,
                engine: EngineId([1; 16]),
                rings: RingsMirror {
                    requests_submitted: 12,
                    requests_taken: 10,
                    completions_published: 9,
                    completions_consumed: 5,
                    outstanding: 1,
                    last_progress_ns: 1,
                },
                credits: 64,
                leased_bytes: 3 << 20,
                regions: 1,
            });
        }
        let numbers = &mut telemetry.counters;
        numbers.set(Metric::PoolCapacityBytes, 8 << 30);
        numbers.set(Metric::PoolUsedBytes, 6 << 30);
        numbers.set(Metric::PoolPinnedBytes, 1 << 30);
        numbers.set(Metric::BudgetQueryLimitBytes, 4 << 30);
        numbers.set(Metric::BudgetQueryBytes, 1 << 30);
        telemetry.publish(now_ns());
        Self { telemetry, _folder: folder }
    }

    fn snapshot(&self) -> Snapshot {
        self.telemetry.reader().snapshot()
    }

    /// Counts a second's work.
    fn work(&mut self) {
        let numbers = &mut self.telemetry.counters;
        numbers.add(Metric::OperationsCompleted(RequestKind::Query, Status::Ok), 1_234);
        numbers.add(Metric::OperationsCompleted(RequestKind::Save, Status::Error), 6);
        numbers.add(Metric::DeviceCopiedBytes(CopyDirection::DeviceToHost), 512 << 20);
        numbers.add(Metric::DeviceCopiedBytes(CopyDirection::HostToDevice), 3 << 30);
        numbers.add(Metric::LookupPages, 10);
        numbers.add(Metric::LookupHitPages(HeldIn::Ssd), 6);
        self.telemetry.publish(now_ns());
    }
}

fn lines(width: u16, height: u16, screen: &Screen<'_>) -> Vec<String> {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| draw(frame, screen)).unwrap();
    let buffer = terminal.backend().buffer().clone();
    let cells = buffer.content().chunks(usize::from(width));
    cells.map(|row| row.iter().map(|cell| cell.symbol()).collect()).collect()
}

fn rates(fake: &mut Fake) -> (Snapshot, Rates) {
    let before = fake.snapshot();
    fake.work();
    let now = fake.snapshot();
    let rates = rates_between((&before, 0), (&now, 1_000_000_000)).expect("one Manager");
    (now, rates)
}

#[test]
fn a_common_terminal_shows_everything() {
    let mut fake = Fake::new(3);
    let (snapshot, rates) = rates(&mut fake);
    let screen = Screen { snapshot: &snapshot, rates: Some(&rates), absent: None };
    let shown = lines(80, 24, &screen);
    let all = shown.join("\n");
    assert!(shown[0].starts_with("orbitkv degraded pid "), "{all}");
    assert!(shown[0].contains("version 9.9.9, q quits"), "{all}");
    assert!(shown[1].contains("a.sock"), "{all}");
    for words in [
        "dram   6 GiB of 8 GiB, 1 GiB pinned",
        "leases 1 GiB of 4 GiB",
        "1240 operations/s, 6 errors/s, hits 60% now, 60% since the start",
        "save 512 MiB/s, restore 3 GiB/s, ssd read 0 bytes/s",
        "named/nvme0.okv",
        "16 GiB of 64 GiB",
        "read_only",
        "3 r 0 w",
        "session",
        "4003",
        "attached",
    ] {
        assert!(all.contains(words), "{words:?} is not in\n{all}");
    }
    let filled = shown[2].matches('█').count();
    let empty = shown[2].matches('░').count();
    assert!(filled > 0 && filled.abs_diff(3 * empty) <= 4, "three quarters: {}", shown[2]);
    // Requests that wait in the ring and completions that nobody has read.
    let session = shown.iter().find(|line| line.contains("4002")).expect("its row");
    let words: Vec<&str> = session.split_whitespace().collect();
    assert_eq!(words, ["2", "4002", "1", "3", "MiB", "2", "4", "12", "attached"]);
}

#[test]
fn a_small_terminal_shows_the_most_important() {
    let mut fake = Fake::new(9);
    let (snapshot, rates) = rates(&mut fake);
    let screen = Screen { snapshot: &snapshot, rates: Some(&rates), absent: None };
    let shown = lines(40, 10, &screen);
    let all = shown.join("\n");
    for words in ["degraded", "dram", "6 GiB of 8 GiB", "1240 ops/s", "read_only", "session", "+7"]
    {
        assert!(all.contains(words), "{words:?} is not in\n{all}");
    }
    assert!(!all.contains("hints"), "no place for it\n{all}");
}

#[test]
fn a_search_for_pages_shows_how_far_it_is_unless_something_is_wrong() {
    let fake = Fake::new(0);
    let mut snapshot = fake.snapshot();
    for (state, recovery, expected) in [
        ("healthy", SsdRecovery::Scanning, "scan 12%"),
        ("healthy", SsdRecovery::TakingOver, "takes in"),
        ("healthy", SsdRecovery::Done, "healthy"),
        ("off", SsdRecovery::Scanning, "off"),
    ] {
        let device = &mut snapshot.ssd[0];
        (device.health, device.recovery) = (state, recovery.label());
        (device.scan_slots, device.scanned_slots) = (1000, 120);
        for (width, height) in [(80, 24), (40, 10)] {
            let screen = Screen { snapshot: &snapshot, rates: None, absent: None };
            let shown = lines(width, height, &screen);
            let of_ssd = shown.iter().find(|line| line.contains("16 GiB")).expect("its line");
            assert!(of_ssd.contains(expected), "{expected:?} is not in {of_ssd:?}");
        }
    }
}

/// The first second, a Manager that went away, and one that only holds its lock.
#[test]
fn states_without_fresh_numbers_are_told() {
    let fake = Fake::new(0);
    let mut snapshot = fake.snapshot();
    let absent = Some("no manager at /x".to_owned());
    let all = lines(80, 24, &Screen { snapshot: &snapshot, rates: None, absent }).join("\n");
    assert!(all.contains("gone") && all.contains("no manager at /x"), "{all}");
    assert!(all.contains("no rates yet") && all.contains("hits - since"), "{all}");
    snapshot.manager.state = LifeState::Unresponsive;
    snapshot.manager.heartbeat_age_ms = 65_000;
    let screen = Screen { snapshot: &snapshot, rates: None, absent: None };
    let all = lines(80, 24, &screen).join("\n");
    assert!(all.contains("unresponsive") && all.contains("last numbers, 1m05s old"), "{all}");
}

/// No size and no numbers make drawing panic.
#[test]
fn any_size_and_any_numbers_can_be_drawn() {
    let mut fake = Fake::new(5);
    let numbers = &mut fake.telemetry.counters;
    for metric in
        [Metric::PoolUsedBytes, Metric::BudgetQueryBytes, Metric::LookupHitPages(HeldIn::Dram)]
    {
        numbers.set(metric, u64::MAX);
    }
    numbers.set(Metric::LookupPages, 1);
    numbers.set(Metric::PoolCapacityBytes, 0);
    fake.telemetry.publish(now_ns());
    let mut snapshot = fake.snapshot();
    snapshot.manager.uptime_seconds = f64::NAN;
    for (width, height) in [(1, 1), (2, 3), (10, 5), (40, 10), (72, 16), (300, 100)] {
        let shown =
            lines(width, height, &Screen { snapshot: &snapshot, rates: None, absent: None });
        assert_eq!(shown.len(), usize::from(height));
    }
}

#[test]
fn rates_need_two_looks_at_one_manager() {
    let mut fake = Fake::new(0);
    let (now, _) = rates(&mut fake);
    let mut other = now.clone();
    other.manager.epoch = 6;
    assert_eq!(rates_between((&other, 0), (&now, 1_000_000_000)), None);
    assert_eq!(rates_between((&now, 0), (&now, 1_000)), None);
    assert_eq!(rates_between((&now, 5), (&now, 1)), None);
    let still = rates_between((&now, 0), (&now, 1_000_000_000)).expect("one Manager");
    assert_eq!((still.operations, still.hit_ratio), (0.0, None));
}

#[test]
fn long_paths_keep_their_end() {
    assert_eq!(tail("/a/b", 10), "/a/b");
    assert_eq!(tail("/a/long/path/file", 6), "…/file");
    assert_eq!(span_text(93_784.0), "1d02h");
    assert_eq!(
        (span_text(7.9), span_text(-1.0), span_text(3_661.0)),
        ("7s".into(), "0s".into(), "1h01m".into())
    );
}
