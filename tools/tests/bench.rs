//! Goal: `bench` has every number of the contract, checks what it is answered, and leaves
//! nothing behind however it ends. Method: run the program for moments only.

use std::fs;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use orbitkv_shm_protocol::telemetry::{resolved_socket, segment_name};
use rustix::process::{Pid, Signal, getuid, kill_process};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde_json::{Value, json};
use tempfile::TempDir;

/// Longest wait for anything here.
const PATIENCE: Duration = Duration::from_secs(120);
/// Marks every process that a test started, through the environment that all inherit.
const MARK: &str = "ORBITKV_BENCH_TEST";

/// Held by whoever has a [`Place`]: benchmarks spin on every core, and one beside another may see no
/// answer in a whole slice.
static ALONE: Mutex<()> = Mutex::new(());

/// A temporary folder of the program under test; its path also marks its processes.
struct Place {
    folder: TempDir,
    _alone: MutexGuard<'static, ()>,
}

impl Place {
    fn new() -> Self {
        // One that failed has told why.
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        Self { folder, _alone: alone }
    }

    fn temporary(&self) -> PathBuf {
        self.folder.path().join("t")
    }

    fn command(&self, arguments: &[&str]) -> Command {
        fs::create_dir_all(self.temporary()).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_orbitkv"));
        command.args(arguments).env("TMPDIR", self.temporary()).env(MARK, self.folder.path());
        command.current_dir(self.folder.path());
        command
    }

    /// Telemetry segments of the Managers that are ready now.
    fn segments(&self) -> Vec<PathBuf> {
        let folders = fs::read_dir(self.temporary()).into_iter().flatten().flatten();
        let sockets = folders.map(|folder| folder.path().join("socket"));
        sockets.filter(|socket| socket.exists()).map(|socket| segment(&socket)).collect()
    }

    /// Waits until both Managers of a benchmark and a part of it run; returns their segments.
    fn under_way(&self, child: &mut Child) -> Vec<PathBuf> {
        let segments = wait_for("two Managers and a part", || {
            assert!(child.try_wait().unwrap().is_none(), "ended early");
            let segments = self.segments();
            (segments.len() == 2 && self.processes().len() > 3).then_some(segments)
        });
        for segment in &segments {
            assert!(segment.exists(), "{} is where no Manager has one", segment.display());
        }
        segments
    }

    /// Processes that the program started, however deep, itself included.
    fn processes(&self) -> Vec<String> {
        let mark = [MARK.as_bytes(), b"=", self.folder.path().as_os_str().as_bytes()].concat();
        let has_mark = |folder: &Path| {
            let environment = fs::read(folder.join("environ")).unwrap_or_default();
            environment.split(|byte| *byte == 0).any(|variable| variable == mark)
        };
        let all = fs::read_dir("/proc").unwrap().flatten();
        let ours = all.filter(|entry| has_mark(&entry.path()));
        ours.map(|entry| fs::read_to_string(entry.path().join("stat")).unwrap_or_default())
            // A zombie only waits to be reaped.
            .filter(|stat| !stat.is_empty() && !stat.contains(") Z "))
            .collect()
    }

    fn wait_until_no_process_is_left(&self) {
        let end = Instant::now() + PATIENCE;
        while !self.processes().is_empty() {
            assert!(Instant::now() < end, "left behind: {:?}", self.processes());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn assert_nothing_is_left(&self, segments: &[PathBuf]) {
        self.wait_until_no_process_is_left();
        let left: Vec<_> = fs::read_dir(self.temporary()).unwrap().flatten().collect();
        assert!(left.is_empty(), "{left:?}");
        assert_no_segment_is_left(segments);
    }
}

/// The telemetry segment of the Manager at `socket`, as a file.
fn segment(socket: &Path) -> PathBuf {
    let name = segment_name(getuid().as_raw(), &resolved_socket(socket));
    Path::new("/dev/shm").join(name.trim_start_matches('/'))
}

fn assert_no_segment_is_left(segments: &[PathBuf]) {
    for segment in segments {
        assert!(!segment.exists(), "{} is left", segment.display());
    }
}

fn wait_for<T>(what: &str, mut found: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = found() {
            return found;
        }
        assert!(Instant::now() < end, "{what} did not come");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn at<'a>(json: &'a Value, path: &str) -> &'a Value {
    path.split('/').fold(json, |value, key| &value[key])
}

#[test]
fn every_number_of_the_contract_is_there_and_nothing_is_left() {
    let place = Place::new();
    let out = place.folder.path().join("out.json");
    let arguments = [
        "bench", "control", "--runs", "1", "--slice", "3ms", "--idle", "200ms", "--chains", "2",
        "--json",
    ];
    let mut child = place
        .command(&arguments)
        .arg(&out)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let segments = place.under_way(&mut child);
    let output = child.wait_with_output().unwrap();
    let (said, complaints) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(0), "{complaints}");
    place.assert_nothing_is_left(&segments);

    let json: Value = serde_json::from_slice(&fs::read(out).unwrap()).unwrap();
    let positive = [
        "floor_two_line_ns",
        "floor_futex_ns",
        "floor_unix_socket_ns",
        "ping_ns_p50",
        "query1_ns_p50",
        "query128_ns_p50",
        "query1024_ns_p50",
        "hashmap_lookup_ns",
        "hashmap_lookup_ns_128",
        "one_chain/hashmap_lookup_ns",
        "one_chain/query128_ns_p50",
        "one_chain/query1024_ns_p50",
        "poll_empty_ns",
        "one_core/floor_futex_ns",
        "one_core/ping_ns_p50",
        "one_core/query1_ns_p50",
        "eight_clients/queries_per_second",
        "eight_clients/query1_ns_p50",
        "eight_clients/query1_ns_p99",
        "eight_clients/depth_4/queries_per_second",
        "eight_clients/clients_on_one_core/queries_per_second",
    ];
    for path in positive {
        assert!(at(&json, path).as_f64().is_some_and(|value| value > 0.0), "{path}: {json}");
    }
    for path in ["poll_empty_syscalls", "poll_empty_allocations"] {
        assert_eq!(at(&json, path), &json!(0), "{path}");
    }
    let idle = json["idle_manager_cpu_ratio"].as_f64().unwrap();
    assert!((0.0..=2.0).contains(&idle), "{idle}");
    for cores in ["one_core", "two_cores"] {
        for clients in ["one_client", "eight_clients"] {
            for wait in ["spinning", "waiting", "sleeping"] {
                for ask in ["ping", "query1", "query128", "query1024"] {
                    let path = format!("round_trips/{cores}/{clients}/{wait}/{ask}_ns_p50");
                    let range = at(&json["spread"], &path);
                    let [min, median, max] = [&range["min"], at(&json, &path), &range["max"]]
                        .map(|value| value.as_f64().unwrap_or_else(|| panic!("{path}")));
                    assert!(0.0 < min && min <= median && median <= max, "{path}");
                    assert_eq!(range["rounds"], 1, "{path}");
                    assert!(said.contains(&path), "{path} is not in the table");
                }
            }
        }
    }
    assert_eq!(json["bars"].as_array().unwrap().len(), 12);
    assert!(json["machine"]["cpus"].as_u64().unwrap() >= 2);
    assert!(json["machine"]["kernel"].as_str().is_some_and(|kernel| kernel != "unknown"));
    assert!(json["commit"].as_str().is_some_and(|commit| !commit.is_empty()));
    let command = json["command"].as_str().unwrap();
    assert!(command.starts_with("orbitkv bench control --runs 1"), "{command}");
    assert_eq!(json["pages_resident"], 2048);
}

#[test]
fn a_signal_ends_everything_in_order() {
    let place = Place::new();
    let arguments = ["bench", "control", "--slice", "50ms", "--chains", "2"];
    let mut child =
        place.command(&arguments).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let segments = place.under_way(&mut child);
    signal(&child, Signal::INT);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let complaints = String::from_utf8_lossy(&output.stderr);
    assert!(complaints.contains("stopped by a signal"), "{complaints}");
    place.assert_nothing_is_left(&segments);
}

#[test]
fn a_killed_coordinator_takes_its_managers_and_parts_along() {
    let place = Place::new();
    let arguments = ["bench", "control", "--slice", "50ms", "--chains", "2"];
    let mut child =
        place.command(&arguments).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let segments = place.under_way(&mut child);
    child.kill().unwrap();
    child.wait().unwrap();
    place.wait_until_no_process_is_left();
    assert_no_segment_is_left(&segments);
}

fn signal(child: &Child, signal: Signal) {
    kill_process(Pid::from_raw(child.id() as i32).unwrap(), signal).unwrap();
}

#[test]
fn one_cpu_is_not_enough_and_says_so() {
    let place = Place::new();
    let before = sched_getaffinity(None).unwrap();
    let first = (0..CpuSet::MAX_CPU).find(|cpu| before.is_set(*cpu)).unwrap();
    let mut one = CpuSet::new();
    one.set(first);
    sched_setaffinity(None, &one).unwrap();
    let output = place.command(&["bench", "control"]).output().unwrap();
    sched_setaffinity(None, &before).unwrap();
    assert_eq!(output.status.code(), Some(3));
    let complaints = String::from_utf8_lossy(&output.stderr);
    assert!(complaints.contains("may use 1 CPU") && complaints.lines().count() == 1);
}

#[test]
fn bad_flags_are_2_and_a_bad_path_is_3_before_anything_starts() {
    let place = Place::new();
    for (arguments, exit, word) in [
        (&["bench", "control", "--runs", "0"][..], 2, "1 to 100"),
        (&["bench", "control", "--slice", "5"], 2, "ms"),
        (&["bench", "control", "--json", "/no/such/folder/out"], 3, "--json"),
        (&["bench", "ssd"], 2, "--ssd"),
        (&["bench", "ssd", "--ssd", "F", "--slice", "3s"], 2, "must be 1ms to 2s"),
        (&["bench", "ssd", "--ssd", "F", "--page-bytes", "5000"], 2, "a multiple of 4KiB"),
        (&["bench", "ssd", "--ssd", "F", "--size", "64MiB"], 2, "raise --size"),
        (&["bench", "ssd", "--ssd", "/no/such/folder/F"], 3, "its folder does not exist"),
        (&["bench", "device", "--shape", "5k"], 2, "must be one of 4k, "),
        (&["bench", "device", "--beside-busy"], 2, "add --device cuda"),
        (
            &["bench", "everything"],
            2,
            "unknown bench kind \"everything\"; accepted: control, device, ssd",
        ),
        (&["bench"], 2, "no bench kind; accepted: control, device, ssd"),
    ] {
        let Output { status, stderr, .. } = place.command(arguments).output().unwrap();
        let complaint = String::from_utf8_lossy(&stderr);
        assert_eq!(status.code(), Some(exit), "{arguments:?}: {complaint}");
        assert_eq!(complaint.lines().count(), 1, "{complaint}");
        assert!(complaint.contains(word), "{arguments:?}: {complaint}");
    }
}

/// One process of a benchmark against a Manager of ours: its exit code and its last line.
fn part(place: &Place, work: &Value) -> (Option<i32>, Value) {
    let first = sched_getaffinity(None).unwrap();
    let cpus: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|cpu| first.is_set(*cpu)).collect();
    let mut child = place
        .command(&["bench-part"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let job = json!({ "cpus": cpus, "work": work });
    child.stdin.take().unwrap().write_all(format!("{job}\n\n").as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let last = output.stdout.split(|byte| *byte == b'\n').rfind(|line| !line.is_empty());
    (output.status.code(), serde_json::from_slice(last.unwrap()).unwrap())
}

/// Goal: a benchmark of wrong answers has no numbers. Method: ask about pages of which half was
/// never saved.
#[test]
fn an_answer_that_is_no_hit_fails_the_part() {
    let place = Place::new();
    fs::create_dir_all(place.temporary()).unwrap();
    let socket = place.temporary().join("socket");
    let mut manager = place
        .command(&["serve", "--stop-at-eof", "--dram", "64MiB", "--socket"])
        .arg(&socket)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    wait_for("the Manager", || socket.exists().then_some(()));
    let save = json!({ "Save": { "socket": &socket, "chains": 1 } });
    assert_eq!(part(&place, &save), (Some(0), json!({ "Saved": { "pages": 1024 } })));
    let asks = |chains: u32| {
        json!({ "RoundTrips": {
            "socket": &socket,
            "chains": chains,
            "asks": [{ "Query": { "pages": 128, "one_chain": false } }],
            "wait": "Park",
            "length": { "slice_ns": 60_000_000_000_u64, "count_max": 10 },
        }})
    };
    let (exit, answer) = part(&place, &asks(1));
    assert_eq!(exit, Some(0), "{answer}");
    assert!(answer["Times"].is_object());
    let (exit, answer) = part(&place, &asks(2));
    assert_eq!(exit, Some(1), "{answer}");
    assert_eq!(answer["Failed"]["is_wrong"], true);
    let message = answer["Failed"]["message"].as_str().unwrap();
    assert!(message.contains("query: ") && message.contains("0 pages"), "{message}");
    signal(&manager, Signal::TERM);
    assert!(manager.wait().unwrap().success());
    assert_eq!(fs::read_dir(place.temporary()).unwrap().count(), 1, "only the lock file is left");
    assert!(place.temporary().join("socket.lock").exists());
}

/// The numbers of the contract in each result of `bench ssd`.
const SSD_KEYS: [&str; 14] = [
    "ours_read_gb_per_s",
    "raw_read_gb_per_s",
    "read_ratio",
    "ours_write_gb_per_s",
    "raw_write_gb_per_s",
    "write_ratio",
    "read_p99_alone_us",
    "read_p99_under_write_us",
    "write_under_read_ratio",
    "raw_read_p99_alone_us",
    "raw_read_p99_under_write_us",
    "raw_p99_ratio",
    "p99_ratio_over_raw",
    "raw_write_under_read_gb_per_s",
];

/// Goal: `bench device` has the numbers of the contract for every operation of a shape. Its own
/// compares would have ended it. Method: the small shapes once, in host memory.
#[test]
fn copies_are_measured_beside_raw_ones() {
    let place = Place::new();
    let out = place.folder.path().join("out.json");
    let arguments = ["bench", "device", "--runs", "1", "--shape", "4k", "--shape", "18m_split"];
    let output = place.command(&arguments).arg("--json").arg(&out).output().unwrap();
    let (said, complaints) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(0), "{complaints}");
    place.assert_nothing_is_left(&[]);
    let json: Value = serde_json::from_slice(&fs::read(out).unwrap()).unwrap();
    let results = json["results"].as_array().unwrap();
    let name = |one: &Value| format!("{} {}", one["shape"], one["op"]).replace('"', "");
    assert_eq!(
        results.iter().map(name).collect::<Vec<_>>(),
        [
            "4k save",
            "4k restore",
            "18m_split save",
            "18m_split restore",
            "18m_split both",
            "4k_again restore"
        ]
    );
    for one in results {
        for key in ["ours_us_p50", "ours_us_p99", "raw_us_p50", "ratio", "gb_per_s"] {
            assert!(one[key].as_f64().is_some_and(|value| value > 0.0), "{key}: {one}");
        }
        assert_eq!(one["mismatches"], 0);
        let (bytes, segments) = match one["shape"].as_str() {
            Some("4k" | "4k_again") => (4096, 1),
            _ => (18 << 20, 9216),
        };
        let times = if one["op"] == "both" { 2 } else { 1 };
        assert_eq!(
            (&one["bytes"], &one["segments"]),
            (&json!(times * bytes), &json!(times * segments))
        );
        let path =
            format!("{}/{}/ours_us", one["shape"].as_str().unwrap(), one["op"].as_str().unwrap());
        assert!(said.contains(&path), "{path} is not in the table");
    }
    assert!(json["delivery_ns"]["p50"].is_number() && json["delivery_ns"]["p99"].is_number());
    assert_eq!(json["device"], "host");
}

/// Goal: `bench ssd` moves and checks pages on one file and on two, and has every number. Method:
/// files as small as they may be.
#[test]
fn the_ssd_tier_is_measured_beside_a_plain_loop_and_its_files_go() {
    let place = Place::new();
    for files in [1, 2] {
        let out = place.folder.path().join("out.json");
        let mut command = place.command(&["bench", "ssd", "--pairs", "1", "--slice", "20ms"]);
        command.args(["--page-bytes", "128KiB", "--page-bytes", "1MiB", "--json"]).arg(&out);
        command.args(["--size", if files == 1 { "192MiB" } else { "384MiB" }]);
        for file in 0..files {
            command.arg("--ssd").arg(format!("tier{file}"));
        }
        let output = command.output().unwrap();
        let complaints = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{complaints}");
        for file in 0..files {
            assert!(!place.folder.path().join(format!("tier{file}")).exists(), "the file is left");
        }
        let json: Value = serde_json::from_slice(&fs::read(out).unwrap()).unwrap();
        assert!(["uring", "blocking"].contains(&json["engine"].as_str().unwrap()));
        // A page that came back wrong would have ended it with an error.
        assert!(json["pages_compared"].as_u64().unwrap() > 0);
        assert_eq!(json["bars"].as_array().unwrap().len(), 8);
        let results = json["results"].as_array().unwrap();
        let sizes: Vec<_> = results.iter().map(|result| &result["page_bytes"]).collect();
        assert_eq!(sizes, [&json!(131_072), &json!(1_048_576)]);
        for result in results {
            for key in SSD_KEYS {
                let value = result[key].as_f64();
                assert!(value.is_some_and(|value| value > 0.0), "{key}: {result}");
            }
            let scaling = at(result, "all_devices/ours_read_scaling");
            assert_eq!(scaling.is_null(), files == 1, "{result}");
        }
    }
}

/// Goal: what a file holds is never overwritten.
#[test]
fn a_file_that_holds_something_is_not_touched() {
    let place = Place::new();
    let path = place.folder.path().join("precious");
    fs::write(&path, b"precious").unwrap();
    let output = place.command(&["bench", "ssd", "--ssd", "precious"]).output().unwrap();
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{complaint}");
    assert!(complaint.contains("holds something") && complaint.lines().count() == 1, "{complaint}");
    assert_eq!(fs::read(&path).unwrap(), b"precious");
}

/// Goal: a signal ends the benchmark of the tier in order, too.
#[test]
fn a_signal_removes_the_file() {
    let place = Place::new();
    let arguments = ["bench", "ssd", "--ssd", "tier", "--size", "64MiB", "--page-bytes", "128KiB"];
    let child =
        place.command(&arguments).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let path = place.folder.path().join("tier");
    wait_for("the file", || path.exists().then_some(()));
    signal(&child, Signal::INT);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(!path.exists());
}
