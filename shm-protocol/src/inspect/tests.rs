//! What a snapshot says of well-formed, half-made, damaged and hostile segments.

use std::collections::BTreeSet;
use std::fs::File;
use std::path::Path;

use proptest::prelude::*;
use serde_json::Value as Json;

use super::*;
use crate::ids::{EngineId, Epoch, OperationId};
use crate::memory::SharedMemory;
use crate::record::RequestKind;
use crate::telemetry::{
    CONFIG, DEVICES, DeviceRow, HISTOGRAM_WORDS, HTTP_WORDS, Identity, Latency, LeaseRow,
    METRIC_WORDS, ManagerState, Metric, NAMESPACES, NUMBERS, NamespaceRow, OperationRow,
    OperationStage, PAGE_MODE_WORDS, SegmentWriter, SessionRow, SessionState, SsdEngine, SsdFault,
    SsdHealth, SsdRecovery, TEXTS, bucket_of, leases_group, operations_group, session_group,
    text_words,
};

const SECOND: u64 = 1_000_000_000;
const ENGINE: [u64; 2] = [0x0706_0504_0302_0100, 0x0f0e_0d0c_0b0a_0908];

fn identity(socket: &Path) -> Identity {
    Identity {
        epoch: Epoch(9),
        pid: 77,
        uid: 1000,
        started_ns: SECOND,
        version: "0.1.0".into(),
        socket: socket.into(),
    }
}

fn heap_writer() -> SegmentWriter {
    SegmentWriter::new(SharedMemory::heap(TELEMETRY_BYTES), &identity(Path::new("/run/a.sock")))
}

fn take(writer: &SegmentWriter, alive: bool, now_ns: u64) -> Snapshot {
    Snapshot::take(&SegmentReader::new(writer.memory()).expect("valid"), alive, now_ns)
}

fn session(id: u64) -> SessionRow {
    SessionRow {
        id,
        pid: 4242,
        uid: 1000,
        state: SessionState::Attached.to_word(),
        requests_submitted: 100,
        requests_taken: 97,
        completions_published: 90,
        completions_consumed: 85,
        outstanding: 7,
        credits: 256,
        leased_bytes: 8192,
        regions: 2,
        last_progress_ns: 9 * SECOND,
        engine: ENGINE,
    }
}

fn lease(id: u64, bytes: u64) -> LeaseRow {
    LeaseRow { id, group: ENGINE, bytes, pages: bytes / 4096, expires_ns: 12 * SECOND }
}

fn operation(index: u32, taken_ns: u64) -> OperationRow {
    OperationRow {
        id: OperationId { index, generation: 5 }.to_bits(),
        kind: RequestKind::Restore as u64,
        stage: OperationStage::Copying.to_word(),
        taken_ns,
    }
}

/// A segment with something in every table.
fn busy_writer() -> SegmentWriter {
    let writer = heap_writer();
    writer.set_state(ManagerState::Ready);
    writer.beat(10 * SECOND);
    writer.update(NUMBERS, |stores| {
        stores.store(Metric::PoolCapacityBytes.index(), 1 << 30);
        stores.store(Metric::PoolUsedBytes.index(), 1 << 20);
        stores.store(Metric::SsdWrittenPages.index(), 5);
        stores.store(Metric::SsdReadErrors(SsdFault::Checksum).index(), 3);
        stores.store(Metric::ManagerCpu.index(), 1_500_000_000);
        stores.store(Metric::BudgetQueryBytes.index(), 8192);
        stores.store(Metric::BudgetSessionLimitBytes.index(), 1 << 29);
        let first = METRIC_WORDS + Latency::QueryTotal as usize * HISTOGRAM_WORDS;
        stores.store(first, 100 * 1_000);
        stores.store(first + 1, 90_000);
        stores.store(first + 2 + bucket_of(1_000), 90);
        stores.store(first + 2 + bucket_of(90_000), 10);
    });
    writer.update(TEXTS, |stores| {
        stores.store_all(0, &text_words::<PAGE_MODE_WORDS>(b"huge"));
        stores.store_all(PAGE_MODE_WORDS, &text_words::<HTTP_WORDS>(b"127.0.0.1:9400"));
    });
    writer.update(CONFIG, |stores| stores.store_all(0, &text_words::<8>(b"dram = 1 GiB\n\x1b[2J")));
    writer.update_table(
        DEVICES,
        &[DeviceRow {
            path: text_words(b"/nvme/a.kv"),
            capacity_bytes: 1 << 34,
            used_bytes: 4096,
            slots: 1,
            reading: 2,
            writing: 3,
            engine: SsdEngine::Uring.to_word(),
            direct: 1,
            preallocated: 1,
            registered: 0,
            health: SsdHealth::ReadOnly.to_word(),
            write_inflight_bytes: 0,
            write_inflight_limit_bytes: 0,
            small_read_ns: [0; 2],
            large_read_ns: [0; 2],
            recovery: SsdRecovery::Scanning.to_word(),
            scan_slots: 100,
            scanned_slots: 60,
            scan_read_bytes: 60 * 4096,
        }],
    );
    writer.update_table(
        NAMESPACES,
        &[NamespaceRow {
            name: text_words(b"llama"),
            dram_pages: 2,
            dram_bytes: 8192,
            ssd_pages: 0,
            ssd_bytes: 0,
        }],
    );
    for (slot, id) in [(0, 3), (127, 2)] {
        writer.update(session_group(slot), |stores| {
            stores.store_all(0, bytemuck::cast_slice(&[session(id)]));
        });
        writer.update_table(leases_group(slot), &[lease(50, 8192), lease(51 + id, 4096 * id)]);
    }
    writer.update_table(operations_group(0), &[operation(1, 8 * SECOND), operation(2, 9 * SECOND)]);
    writer.update_table(operations_group(127), &[operation(3, 7 * SECOND)]);
    writer
}

fn keys(object: &Json) -> BTreeSet<&str> {
    object.as_object().expect("an object").keys().map(String::as_str).collect()
}

/// Every key that the command-line contract promises, in every section.
#[test]
fn json_has_the_promised_shape() {
    let json = serde_json::to_value(take(&busy_writer(), true, 10 * SECOND)).expect("plain data");
    let promised = |at: &Json, names: &str| {
        let (have, want) = (keys(at), names.split(' ').collect::<BTreeSet<_>>());
        assert!(want.is_subset(&have), "{:?} missing", want.difference(&have));
    };
    promised(&json, "manager sessions pool ssd budget counters rings operations leases pages");
    promised(&json["manager"], "pid epoch version uptime_seconds state socket http");
    promised(
        &json["sessions"][0],
        "id pid uid state requests_submitted completions_consumed outstanding leased_bytes regions",
    );
    promised(
        &json["pool"],
        "capacity_bytes used_bytes pinned_bytes draining_bytes largest_free_bytes page_mode",
    );
    promised(
        &json["ssd"][0],
        "path capacity_bytes used_bytes slots reading writing engine direct preallocated health \
         recovery scan_slots scanned_slots",
    );
    promised(&json["budget"], "total_bytes speculative_bytes limits");
    promised(
        &json["rings"][0],
        "session requests_queued completions_queued credits_used last_progress_ms",
    );
    promised(&json["operations"][0], "session id kind stage age_ms");
    promised(&json["leases"][0], "id group bytes pages ttl_ms");
    promised(&json["pages"][0], "namespace tier count bytes");
    assert_eq!(keys(&json["counters"]).len(), METRIC_WORDS);
    assert_eq!(json["counters"]["orbitkv_ssd_written_pages_total"], 5);
    assert_eq!(json["counters"]["orbitkv_ssd_write_queue_full_total"], 0);
    assert_eq!(json["counters"]["orbitkv_ssd_read_errors_total{reason=\"checksum\"}"], 3);
    assert_eq!(json["counters"]["orbitkv_manager_cpu_seconds_total"], 1.5);
}

#[test]
fn values_come_back_as_they_were_written() {
    let snapshot = take(&busy_writer(), true, 10 * SECOND);
    let manager = &snapshot.manager;
    assert_eq!((manager.pid, manager.epoch, manager.state), (77, 9, LifeState::Ready));
    assert_eq!(
        (manager.socket.as_str(), manager.http.as_deref()),
        ("/run/a.sock", Some("127.0.0.1:9400"))
    );
    assert_eq!((manager.uptime_seconds, manager.heartbeat_age_ms), (9.0, 0));
    assert!(manager.torn.is_empty());
    assert_eq!((snapshot.pool.used_bytes, snapshot.pool.page_mode.as_str()), (1 << 20, "huge"));
    assert_eq!(snapshot.config, "dram = 1 GiB\n\u{fffd}[2J");
    let ids: Vec<u64> = snapshot.sessions.iter().map(|session| session.id).collect();
    assert_eq!(ids, [2, 3]);
    assert_eq!(snapshot.sessions[0].group, "000102030405060708090a0b0c0d0e0f");
    assert_eq!(snapshot.sessions[0].group, EngineId(std::array::from_fn(|i| i as u8)).to_string());
    let ring = &snapshot.rings[0];
    assert_eq!((ring.requests_queued, ring.completions_queued, ring.credits_used), (3, 5, 15));
    assert_eq!(ring.last_progress_ms, 1_000);
    // Oldest first, over all sessions.
    let ages: Vec<_> = snapshot.operations.iter().map(|o| (o.session, o.age_ms)).collect();
    assert_eq!(ages, [(2, 3_000), (3, 2_000), (3, 1_000)]);
    let first = &snapshot.operations[0];
    assert_eq!((first.id.as_str(), first.kind, first.stage), ("3.5", "restore", "copying"));
    // Largest first; the lease that both sessions list is one.
    let leases: Vec<_> = snapshot.leases.iter().map(|l| (l.id, l.bytes, l.ttl_ms)).collect();
    assert_eq!(leases, [(54, 12_288, 2_000), (50, 8192, 2_000), (53, 8192, 2_000)]);
    assert_eq!((snapshot.ssd[0].engine, snapshot.ssd[0].health), ("uring", "read_only"));
    let pages = PagesView { namespace: "llama".into(), tier: "dram", count: 2, bytes: 8192 };
    assert_eq!(snapshot.pages, [pages]);
}

/// A client names its namespaces: no name may add lines to what an operator reads.
#[test]
fn names_stay_on_their_line() {
    let writer = busy_writer();
    let name = text_words(b"llama\nforged\tssd 1\x1b[2J");
    let row = NamespaceRow { name, dram_pages: 1, dram_bytes: 1, ssd_pages: 0, ssd_bytes: 0 };
    writer.update_table(NAMESPACES, &[row]);
    let snapshot = take(&writer, true, 10 * SECOND);
    assert_eq!(snapshot.pages[0].namespace, "llama\u{fffd}forged\u{fffd}ssd 1\u{fffd}[2J");
    // The configuration is the one text of several lines.
    assert!(snapshot.config.contains('\n'));
}

/// Quantiles are ends of buckets and never beyond the maximum.
#[test]
fn latencies_are_summed_up() {
    let snapshot = take(&busy_writer(), true, 10 * SECOND);
    let query = snapshot.latency.iter().find(|l| (l.kind, l.stage) == ("query", "total"));
    let query = query.expect("in the table");
    assert_eq!(query.count, 100);
    assert!((1.0..=1.25).contains(&query.p50_us), "{query:?}");
    assert_eq!((query.p95_us, query.p99_us, query.max_us), (90.0, 90.0, 90.0));
    assert_eq!(query.mean_us, 1.0);
    let untouched = snapshot.latency.iter().find(|l| l.kind == "save").expect("in the table");
    assert_eq!((untouched.count, untouched.p99_us, untouched.mean_us), (0, 0.0, 0.0));
}

/// Ages in a dead Manager are those at its last heartbeat; the age of the numbers is that of now.
#[test]
fn a_dead_manager_keeps_its_last_numbers() {
    let snapshot = take(&busy_writer(), false, 1_000 * SECOND);
    assert_eq!(snapshot.manager.state, LifeState::Dead);
    assert_eq!(snapshot.manager.heartbeat_age_ms, 990_000);
    assert_eq!(snapshot.manager.uptime_seconds, 9.0);
    assert_eq!(snapshot.operations[0].age_ms, 3_000);
    assert_eq!(snapshot.leases[0].ttl_ms, 2_000);
    assert_eq!(snapshot.counters.get(Metric::SsdWrittenPages), 5);
}

#[test]
fn states_are_judged_by_lock_word_and_heartbeat() {
    use ManagerState::{Degraded, Draining, Ready, Starting};
    let judge = LifeState::judge;
    let fresh = HEARTBEAT_AGE_MAX.as_nanos() as u64;
    for (said, expected) in [
        (Ready, LifeState::Ready),
        (Degraded, LifeState::Degraded),
        (Draining, LifeState::Draining),
    ] {
        assert_eq!(judge(true, Some(said), fresh), expected);
        assert_eq!(judge(true, Some(said), fresh + 1), LifeState::Unresponsive);
        assert_eq!(judge(false, Some(said), 0), LifeState::Dead);
    }
    assert_eq!(judge(true, Some(Starting), u64::MAX), LifeState::Starting);
    assert_eq!(judge(false, Some(Starting), 0), LifeState::Dead);
    assert_eq!(judge(true, None, 0), LifeState::Unresponsive);
    assert_eq!(judge(false, None, 0), LifeState::Dead);
}

/// A group that its dead writer left in mid-change is shown and named.
#[test]
fn torn_parts_are_named() {
    let memory = SharedMemory::heap(TELEMETRY_BYTES);
    let writer = SegmentWriter::new(memory.clone(), &identity(Path::new("/run/a.sock")));
    writer.update(NUMBERS, |stores| stores.store(Metric::LookupPages.index(), 30));
    let sequence = 0x1000;
    memory.write(sequence, memory.read::<u64>(sequence) | 1);
    let snapshot = take(&writer, false, SECOND);
    assert_eq!(snapshot.manager.torn, ["counters"]);
    assert_eq!(snapshot.counters.get(Metric::LookupPages), 30);
}

/// Fills memory with a reproducible pattern: noise, all ones, or mostly zero.
fn fill(memory: &SharedMemory, from: usize, seed: u64, style: u8) {
    let mut state = seed | 1;
    for offset in (from..memory.bytes()).step_by(8) {
        // xorshift64
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let word = match style {
            0 => state,
            1 => u64::MAX,
            _ if state.is_multiple_of(7) => state >> (state % 61),
            _ => 0,
        };
        memory.write(offset, word);
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        // A megabyte each; still as many as PROPTEST_CASES says.
        cases: ProptestConfig::default().cases / 10,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    /// Any bytes give a snapshot of bounded size, or a typed error: with a random header, and with
    /// a valid header before random tables.
    #[test]
    fn any_bytes_give_a_snapshot_or_an_error(seed: u64, style in 0_u8..3, valid: bool, alive: bool, now: u64) {
        let memory = SharedMemory::heap(TELEMETRY_BYTES);
        if valid {
            drop(SegmentWriter::new(memory.clone(), &identity(Path::new("/run/a.sock"))));
        }
        fill(&memory, if valid { 32 } else { 0 }, seed, style);
        match SegmentReader::new(memory.read_only()) {
            Ok(reader) => {
                prop_assert!(valid);
                let snapshot = Snapshot::take(&reader, alive, now);
                prop_assert!(snapshot.sessions.len() <= 128);
                prop_assert!(snapshot.operations.len() <= 128 * 16);
                prop_assert!(snapshot.leases.len() <= 128 * 16);
                prop_assert!(snapshot.ssd.len() <= 16);
                prop_assert!(snapshot.pages.len() <= 2 * 256);
                let json = serde_json::to_string(&snapshot).expect("any numbers serialise");
                prop_assert!(json.len() < 8 << 20);
                prop_assert!(!json.bytes().any(|byte| byte == 0x1b));
            }
            Err(fault) => {
                prop_assert!(!valid, "{}", fault);
                prop_assert!(!fault.to_string().is_empty());
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: ProptestConfig::default().cases / 10,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    /// Whatever file lies where the segment would be, of whatever length: a snapshot of a starting,
    /// dead or living Manager, or a typed error. Half-written headers are cut at any word, with and
    /// without the version that is written last, and may be stale.
    #[test]
    fn any_file_gives_a_snapshot_or_an_error(
        seed: u64,
        style in 0_u8..3,
        header_bytes in 0_usize..0x300,
        versioned: bool,
        length in prop_oneof![
            4 => Just(TELEMETRY_BYTES),
            1 => 0_usize..4096,
            1 => TELEMETRY_BYTES - 9..TELEMETRY_BYTES + 9,
        ],
        locked: bool,
    ) {
        let place = Place::new("any-file");
        let _lock = locked.then(|| place.lock());
        let valid = SharedMemory::heap(TELEMETRY_BYTES);
        drop(SegmentWriter::new(valid.clone(), &identity(&place.socket)));
        let noise = SharedMemory::heap(TELEMETRY_BYTES + 128);
        fill(&noise, 0, seed, style);
        let bytes: Vec<u8> = (0..length)
            .map(|at| {
                let memory = if at < header_bytes { &valid } else { &noise };
                let word = memory.read::<u64>(at / 8 * 8).to_le_bytes()[at % 8];
                if (8..16).contains(&at) && !versioned { 0 } else { word }
            })
            .collect();
        place.put(&bytes);
        let started = std::time::Instant::now();
        match read(&place.socket) {
            Ok(snapshot) => {
                let finished = snapshot.manager.pid == 77;
                prop_assert!(!finished || (versioned && length >= TELEMETRY_BYTES));
                prop_assert!(locked || snapshot.manager.state == LifeState::Dead);
                prop_assert!(serde_json::to_string(&snapshot).is_ok());
            }
            Err(error) => prop_assert!(!error.to_string().contains(char::is_control)),
        }
        prop_assert!(started.elapsed() < Duration::from_secs(30));
    }
}

/// A folder of its own for a socket; removed on drop, with the segment that was named after it.
struct Place {
    folder: PathBuf,
    socket: PathBuf,
}

impl Place {
    fn new(name: &str) -> Self {
        let folder = std::env::temp_dir()
            .canonicalize()
            .expect("temporary folder")
            .join(format!("orbitkv-inspect-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("temporary folder is writable");
        let socket = folder.join("a.sock");
        Self { folder, socket }
    }

    fn name(&self) -> String {
        segment_name(rustix::process::geteuid().as_raw(), &self.socket)
    }

    fn lock(&self) -> File {
        let file = File::create(lock_path(&self.socket)).expect("lock file");
        rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive)
            .expect("nobody else has it");
        file
    }

    /// Puts bytes where the segment would be.
    fn put(&self, bytes: &[u8]) {
        std::fs::write(Path::new("/dev/shm").join(&self.name()[1..]), bytes).expect("/dev/shm");
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = rustix::shm::unlink(self.name().as_str());
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

#[test]
fn no_manager_is_an_error_and_a_starting_one_is_not() {
    let place = Place::new("starting");
    let error = read(&place.socket).expect_err("nothing there");
    assert!(matches!(&error, InspectError::NotFound { socket, .. } if *socket == place.socket));
    assert!(error.to_string().contains("orbitkv serve"), "{error}");

    let lock = place.lock();
    assert_eq!(read(&place.socket).expect("starting").manager.state, LifeState::Starting);
    // Created and empty, then sized and zero: still starting; the same without owner: dead.
    for bytes in [0, TELEMETRY_BYTES] {
        place.put(&vec![0; bytes]);
        assert_eq!(read(&place.socket).expect("starting").manager.state, LifeState::Starting);
    }
    drop(lock);
    assert_eq!(read(&place.socket).expect("dead").manager.state, LifeState::Dead);
    // A folder that is not there is the same as no Manager.
    let error = read(&place.folder.join("gone/a.sock")).expect_err("nothing there");
    assert!(matches!(error, InspectError::NotFound { .. }), "{error}");
}

#[test]
fn damaged_files_are_named_and_dangerous_ones_refused() {
    let place = Place::new("damaged");
    let lock = place.lock();
    let problem = |words: &str| {
        let seen = read(&place.socket).expect("only its numbers are lost");
        assert_eq!(seen.manager.state, LifeState::Unresponsive);
        assert!(seen.sessions.is_empty() && seen.manager.problems.len() == 1);
        let found = &seen.manager.problems[0];
        assert!(found.contains(words) && found.contains(&place.name()), "{found}");
    };
    place.put(b"short");
    problem("5 bytes long");
    place.put(&[0xa5; 4096]);
    problem("not an OrbitKV telemetry segment");
    place.put(&vec![0xa5; TELEMETRY_BYTES]);
    problem("not an OrbitKV telemetry segment");

    // Something that would block a reader which is not careful.
    let path = Path::new("/dev/shm").join(&place.name()[1..]);
    std::fs::remove_file(&path).expect("put above");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &path,
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RUSR,
        0,
    )
    .expect("a FIFO needs no rights");
    let error = read(&place.socket).expect_err("not a segment");
    assert!(matches!(error, InspectError::System { errno: Errno::INVAL, .. }), "{error}");

    // The same bytes with nobody at the lock.
    std::fs::remove_file(&path).expect("made above");
    place.put(&vec![0xa5; TELEMETRY_BYTES]);
    drop(lock);
    assert_eq!(read(&place.socket).expect("dead").manager.state, LifeState::Dead);
}

/// A live Manager whose lock file was removed is not called dead while its heartbeat moves, and one
/// that stopped beating is.
#[test]
fn a_lost_lock_is_no_death_while_the_heart_beats() {
    let place = Place::new("lost-lock");
    place.put(&vec![0; TELEMETRY_BYTES]);
    let (descriptor, _) = open_segment(&place.name(), true).expect("put above");
    let memory = map_segment(descriptor.as_fd(), Access::ReadWrite).expect("mapped");
    let writer = SegmentWriter::new(memory, &identity(&place.socket));
    writer.set_state(ManagerState::Ready);
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                writer.beat(now_ns());
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
        });
        let seen = loop {
            // The first beat may not have come.
            let seen = read(&place.socket).expect("there");
            if seen.manager.state != LifeState::Dead {
                break seen;
            }
        };
        assert!(seen.manager.problems[0].contains("nobody holds the lock"));
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    let seen = read(&place.socket).expect("there");
    assert_eq!(seen.manager.state, LifeState::Dead);
    assert!(seen.manager.problems.is_empty());
}

#[test]
fn a_segment_of_another_socket_is_not_shown() {
    let place = Place::new("collision");
    let _lock = place.lock();
    place.put(&vec![0; TELEMETRY_BYTES]);
    let (descriptor, _) = open_segment(&place.name(), true).expect("put above");
    let memory = map_segment(descriptor.as_fd(), Access::ReadWrite).expect("mapped");
    drop(SegmentWriter::new(memory.clone(), &identity(Path::new("/run/other.sock"))));
    let error = read(&place.socket).expect_err("another socket's");
    assert!(
        matches!(&error, InspectError::OtherSocket { theirs, .. } if theirs == Path::new("/run/other.sock")),
        "{error}"
    );
    drop(SegmentWriter::new(memory, &identity(&place.socket)));
    assert_eq!(read(&place.socket).expect("ours").manager.pid, 77);
}
