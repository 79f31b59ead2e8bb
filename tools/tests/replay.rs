//! Goal: a replay accounts for every page, finds what is wrong, and ends in order whatever happens
//! to the Manager. Method: whole processes over the public command line.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use orbitkv_tools::content::PageSpace;
use serde_json::Value;

const ORBITKV: &str = env!("CARGO_BIN_EXE_orbitkv");

struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Self {
        // Short, because a socket path has at most 103 bytes.
        Self(tempfile::Builder::new().prefix("okv").tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// A trace of `sessions` that grow by `blocks` 16-token blocks in each of `turns`, one request
    /// every `step_ms`.
    fn trace(&self, sessions: u64, turns: u64, blocks: u64, step_ms: u64) -> PathBuf {
        let mut text =
            r#"{"format":"kvtrace-1","name":"grow","block_tokens":16,"partial_tail":false}"#
                .to_owned();
        let mut number = 0;
        for turn in 1..=turns {
            for session in 1..=sessions {
                let (first, length) = (session * 1_000_000, turn * blocks);
                let (at, tokens) = (number * step_ms, length * 16);
                text += &format!("\n[{at},{session},{tokens},1,[{first},{length}]]");
                number += 1;
            }
        }
        let path = self.path("trace.jsonl");
        fs::write(&path, text).unwrap();
        path
    }
}

/// A Manager that this test may kill.
struct Manager(Child);

impl Manager {
    fn start(socket: &Path) -> Self {
        Self::start_with(socket, &[])
    }

    fn start_with(socket: &Path, flags: &[&str]) -> Self {
        let mut child = Command::new(ORBITKV)
            .args(["serve", "--dram", "64MiB", "--http", "off", "--stop-at-eof", "--socket"])
            .arg(socket)
            .args(flags)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut ready = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut ready).unwrap();
        assert!(ready.starts_with("ready socket="), "{ready:?}");
        Self(child)
    }

    fn kill(mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Manager {
    /// Stops it in order, so that it takes its telemetry segment with it.
    fn drop(&mut self) {
        self.0.stdin = None;
        let end = Instant::now() + Duration::from_secs(12);
        while matches!(self.0.try_wait(), Ok(None)) && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(5));
        }
        let _gone = self.0.kill();
        let _reaped = self.0.wait();
    }
}

struct Replay {
    child: Child,
    json: PathBuf,
}

impl Replay {
    fn start(folder: &Folder, arguments: &[&str]) -> Self {
        let json = folder.path("out.json");
        let child = Command::new(ORBITKV)
            .arg("replay")
            .args(arguments)
            .arg("--json")
            .arg(&json)
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        Self { child, json }
    }

    /// Plays a trace at its own pace against the Manager at `socket`.
    fn paced(folder: &Folder, trace: &Path, socket: &Path, reattach: &str) -> Self {
        let (trace, socket) = (trace.to_str().unwrap(), socket.to_str().unwrap());
        let place = ["--trace", trace, "--socket", socket, "--reattach", reattach];
        // More engines than there is work for: some have no request when their Manager dies.
        let pace = ["--time-scale", "1", "--page-bytes", "8KiB", "--engines", "4"];
        Self::start(folder, &[&place[..], &pace[..]].concat())
    }

    /// Waits for the end and returns exit code, JSON and what was said on standard error.
    fn end(mut self) -> (Option<i32>, Value, String) {
        let mut said = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        let status: ExitStatus = self.child.wait().unwrap();
        // What was refused before it began leaves no result.
        let json = fs::read(&self.json).unwrap_or_default();
        let json = serde_json::from_slice(&json).unwrap_or_default();
        (status.code(), json, said)
    }
}

fn number(json: &Value, key: &str) -> u64 {
    json[key].as_u64().unwrap_or_else(|| panic!("{key} in {json:#}"))
}

/// What holds for every replay that ends in order.
fn assert_sums(json: &Value) {
    let n = |key| number(json, key);
    assert_eq!(n("pages_hit_dram") + n("pages_hit_ssd") + n("pages_missed"), n("pages_total"));
    assert_eq!(n("pages_verified"), n("pages_hit_dram") + n("pages_hit_ssd"));
    let spill: u64 = json["spill"].as_object().unwrap().values().map(|v| v.as_u64().unwrap()).sum();
    assert_eq!(spill, n("spill_offered"));
    for key in ["mismatches", "leaked_bytes", "leaked_leases"] {
        assert_eq!(n(key), 0, "{key}");
    }
    let refused: u64 =
        json["pages_refused"].as_object().unwrap().values().map(|v| v.as_u64().unwrap()).sum();
    assert_eq!(n("pages_saved") + n("pages_present") + refused, n("pages_missed"));
}

#[test]
fn every_page_is_accounted_for() {
    let folder = Folder::new();
    let trace = folder.trace(6, 5, 40, 0);
    let trace = trace.to_str().unwrap();
    let html = folder.path("out.html");
    let arguments = [
        "--trace",
        trace,
        "--engines",
        "3",
        "--concurrency",
        "2",
        "--page-bytes",
        "8KiB",
        "--dram",
        "64MiB",
        "--html",
        html.to_str().unwrap(),
    ];
    let (exit, json, said) = Replay::start(&folder, &arguments).end();
    assert_eq!(exit, Some(0), "{said}");
    assert_sums(&json);
    // Turns of a session follow each other, so each restores everything of the one before.
    assert_eq!(number(&json, "requests"), 30);
    assert_eq!(number(&json, "pages_total"), 6 * 40 * (1 + 2 + 3 + 4 + 5));
    assert_eq!(number(&json, "pages_missed"), 6 * 40 * 5);
    assert_eq!(number(&json, "bytes_verified"), number(&json, "pages_verified") * 8192);
    for kind in ["query", "restore", "save"] {
        assert!(json["latency_us"][kind]["count"].as_u64().unwrap() >= 24, "{kind}");
    }
    assert!(fs::read_to_string(html).unwrap().contains("grow"));
}

#[test]
fn one_engine_hits_what_is_simulated() {
    let folder = Folder::new();
    let trace = folder.trace(9, 6, 50, 0);
    let trace = trace.to_str().unwrap();
    // 8 MiB of 8 KiB pages: 1,024 pages for a working set of 2,700.
    let arguments = [
        "--trace",
        trace,
        "--engines",
        "1",
        "--concurrency",
        "1",
        "--page-bytes",
        "8KiB",
        "--dram",
        "8MiB",
        "--query-budget",
        "8MiB",
        "--device-pages",
        "64",
    ];
    let (exit, json, said) = Replay::start(&folder, &arguments).end();
    assert_eq!(exit, Some(0), "{said}");
    assert_sums(&json);
    let out = folder.path("sim.json");
    let simulated = Command::new(ORBITKV)
        .args(["simulate", "--trace", trace, "--dram-pages", "1024", "--json"])
        .arg(&out)
        .output()
        .unwrap();
    assert!(simulated.status.success());
    let rows: Value = serde_json::from_slice(&fs::read(out).unwrap()).unwrap();
    assert_eq!(rows[0]["hit_pages_dram"], json["pages_hit_dram"]);
    assert_eq!(rows[0]["accesses"], json["pages_total"]);
}

#[test]
fn pages_go_to_ssd_come_back_and_survive_the_manager() {
    let folder = Folder::new();
    let (socket, ssd) = (folder.path("s"), folder.path("ssd.okv"));
    let (socket_text, ssd_text) = (socket.to_str().unwrap(), ssd.to_str().unwrap());
    let flags = ["--ssd", ssd_text, "--ssd-capacity", "128MiB"];
    let manager = Manager::start_with(&socket, &flags);
    let trace = folder.trace(6, 4, 20, 0);
    let arguments =
        ["--trace", trace.to_str().unwrap(), "--socket", socket_text, "--page-bytes", "16KiB"];
    let replay = || {
        let (exit, json, said) = Replay::start(&folder, &arguments).end();
        assert_eq!(exit, Some(0), "{said}{json:#}");
        assert_sums(&json);
        json
    };
    let first = replay();
    assert_eq!(number(&first, "pages_saved"), 480);
    assert_eq!(number(&first["spill"], "written"), 480);
    assert_eq!(number(&first, "ssd_bytes_written"), 480 * 16_384);

    let evicted = Command::new(ORBITKV)
        .args(["evict", "--tier", "dram", "--socket", socket_text])
        .output()
        .unwrap();
    let said = String::from_utf8(evicted.stdout).unwrap();
    assert!(
        evicted.status.success() && said.starts_with("evicted 480 pages (7864320 bytes)"),
        "{said}"
    );
    let second = replay();
    assert_eq!(number(&second, "pages_missed"), 0);
    assert_eq!(number(&second, "pages_hit_ssd"), 480, "each page is read once, by its first use");
    assert!(second["latency_us"]["prepare"]["count"].as_u64().unwrap() > 0);

    drop(manager);
    let counts = folder.path("verify.json");
    let verified = Command::new(ORBITKV)
        .args(["verify", "--ssd", ssd_text, "--json"])
        .arg(&counts)
        .output()
        .unwrap();
    assert!(verified.status.success());
    let counts: Value = serde_json::from_slice(&fs::read(counts).unwrap()).unwrap();
    assert_eq!((number(&counts, "valid"), number(&counts, "torn")), (480, 0));
    let n = |key| number(&counts, key);
    assert_eq!(n("slots"), n("valid") + n("torn") + n("stale") + n("empty"));

    let manager = Manager::start_with(&socket, &flags);
    let third = replay();
    assert_eq!(number(&third, "pages_hit_ssd"), 480);
    assert_eq!(number(&third, "pages_missed"), 0);
    drop(manager);
}

#[test]
fn a_flipped_byte_on_ssd_is_a_miss_and_never_a_page() {
    let folder = Folder::new();
    let (socket, ssd) = (folder.path("s"), folder.path("ssd.okv"));
    let (socket_text, ssd_text) = (socket.to_str().unwrap(), ssd.to_str().unwrap());
    let flags = ["--ssd", ssd_text, "--ssd-capacity", "128MiB"];
    let trace = folder.trace(1, 1, 50, 0);
    let arguments =
        ["--trace", trace.to_str().unwrap(), "--socket", socket_text, "--page-bytes", "16KiB"];
    let manager = Manager::start_with(&socket, &flags);
    assert_eq!(Replay::start(&folder, &arguments).end().0, Some(0));
    drop(manager);
    // The page of block 20 holds bytes that only its key explains: find and spoil them.
    let space = PageSpace::new("grow", 16_384, 0);
    let hash = space.hashes(1_000_000..1_000_021).last().unwrap();
    let mut page = vec![0; 16_384];
    space.fill_page(&hash, &mut page);
    let mut file = fs::read(&ssd).unwrap();
    let at = file.chunks_exact(4096).position(|block| *block == page[..4096]).unwrap() * 4096;
    file[at + 5000] ^= 4;
    fs::write(&ssd, file).unwrap();
    let manager = Manager::start_with(&socket, &flags);
    let (exit, json, said) = Replay::start(&folder, &arguments).end();
    assert_eq!(exit, Some(0), "{said}{json:#}");
    assert_sums(&json);
    assert_eq!((number(&json, "pages_hit_ssd"), number(&json, "pages_missed")), (20, 30));
    assert_eq!(number(&json, "ssd_read_errors"), 1);
    drop(manager);
}

#[test]
fn another_seed_never_hits() {
    let folder = Folder::new();
    let manager = Manager::start(&folder.path("s"));
    let trace = folder.trace(4, 2, 20, 0);
    let socket = folder.path("s");
    let common = ["--trace", trace.to_str().unwrap(), "--socket", socket.to_str().unwrap()];
    let missed = |seed: &str, page: &str| {
        let arguments = [&common[..], &["--seed", seed, "--page-bytes", page]].concat();
        let (exit, json, said) = Replay::start(&folder, &arguments).end();
        assert_eq!(exit, Some(0), "{said}");
        assert_sums(&json);
        number(&json, "pages_missed")
    };
    assert_eq!(missed("1", "8KiB"), 160);
    assert_eq!(missed("1", "8KiB"), 0, "the same names hit what the first run saved");
    assert_eq!(missed("2", "8KiB"), 160);
    assert_eq!(missed("1", "4KiB"), 160);
    drop(manager);
}

/// A replay whose Manager was killed in the middle of the trace.
fn orphaned(folder: &Folder, trace: &Path, reattach: &str) -> Replay {
    let socket = folder.path("s");
    let manager = Manager::start(&socket);
    let replay = Replay::paced(folder, trace, &socket, reattach);
    std::thread::sleep(Duration::from_millis(1500));
    manager.kill();
    replay
}

#[test]
fn engines_attach_again_when_the_manager_comes_back() {
    let folder = Folder::new();
    // Three seconds of trace, so that the kill falls into it.
    let replay = orphaned(&folder, &folder.trace(5, 20, 10, 30), "30s");
    let manager = Manager::start(&folder.path("s"));
    let (exit, json, said) = replay.end();
    assert_eq!(exit, Some(0), "{said}{json:#}");
    assert_sums(&json);
    assert_eq!(number(&json, "requests"), 100);
    assert!(number(&json, "reattached") >= 1);
    drop(manager);
}

#[test]
fn a_manager_that_stays_away_is_1_with_the_json_written() {
    let folder = Folder::new();
    let replay = orphaned(&folder, &folder.trace(5, 40, 10, 50), "200ms");
    let (exit, json, said) = replay.end();
    assert_eq!(exit, Some(1), "{said}");
    let failures = json["failures"].to_string();
    assert!(failures.contains("200 ms") && failures.contains("dead"), "{failures}");
    assert!(!failures.contains("still held"), "the dead leak nothing: {failures}");
    let n = |key| number(&json, key);
    assert_eq!(n("pages_hit_dram") + n("pages_hit_ssd") + n("pages_missed"), n("pages_total"));
    assert!(n("requests") > 0 && n("requests") < 200);
    // The next one at this socket takes what the killed one left in shared memory.
    drop(Manager::start(&folder.path("s")));
}

#[test]
fn without_a_manager_it_is_3_at_once() {
    let folder = Folder::new();
    let trace = folder.trace(1, 1, 1, 0);
    let socket = folder.path("none");
    let arguments = ["--trace", trace.to_str().unwrap(), "--socket", socket.to_str().unwrap()];
    let (exit, _, said) = Replay::start(&folder, &arguments).end();
    assert_eq!(exit, Some(3), "{said}");
    assert!(said.contains("none"), "{said}");
}

#[test]
fn a_managers_refusal_to_start_keeps_its_exit_code() {
    let folder = Folder::new();
    let trace = folder.trace(1, 1, 1, 0);
    let arguments = ["--trace", trace.to_str().unwrap(), "--dram", "lots"];
    let (exit, _, said) = Replay::start(&folder, &arguments).end();
    assert_eq!(exit, Some(2), "{said}");
    assert!(said.contains("--dram") && said.contains("lots"), "{said}");
    assert_eq!(said.trim_end().lines().count(), 1, "{said}");
}

#[test]
fn a_private_manager_does_not_outlive_its_replay() {
    let folder = Folder::new();
    let cache = folder.path("cache");
    let trace = folder.trace(5, 100, 10, 100);
    let mut child = Command::new(ORBITKV)
        .args(["replay", "--dram", "16MiB", "--time-scale", "1", "--trace"])
        .arg(&trace)
        .env("XDG_CACHE_HOME", &cache)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let socket = wait_for(|| {
        let run = fs::read_dir(cache.join("orbitkv")).ok()?.next()?.ok()?.path();
        Some(run.join("manager.socket")).filter(|socket| socket.exists())
    });
    // SIGKILL: nobody is left to stop it but the end of its standard input.
    child.kill().unwrap();
    child.wait().unwrap();
    wait_for(|| {
        let output = Command::new(ORBITKV)
            .args(["inspect", "--json", "--socket"])
            .arg(&socket)
            .output()
            .unwrap();
        let json: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        let state = json["manager"]["state"].as_str().unwrap_or("none").to_owned();
        (state == "none" || state == "dead").then_some(())
    });
}

#[test]
fn a_stop_signal_ends_everything_in_order() {
    let folder = Folder::new();
    let cache = folder.path("cache");
    let trace = folder.trace(5, 100, 10, 100);
    let json = folder.path("out.json");
    let mut child = Command::new(ORBITKV)
        .args(["replay", "--dram", "16MiB", "--time-scale", "1", "--json"])
        .arg(&json)
        .arg("--trace")
        .arg(&trace)
        .env("XDG_CACHE_HOME", &cache)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    wait_for(|| {
        let run = fs::read_dir(cache.join("orbitkv")).ok()?.next()?.ok()?.path();
        Some(run.join("manager.socket")).filter(|socket| socket.exists())
    });
    std::thread::sleep(Duration::from_millis(500));
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(1));
    let left = fs::read_dir(cache.join("orbitkv")).unwrap().count();
    assert_eq!(left, 0, "the run's folder is gone");
    let report: Value = serde_json::from_slice(&fs::read(json).unwrap()).unwrap();
    assert!(report["failures"].to_string().contains("signal"), "{report:#}");
    assert_sums(&report);
}

/// Waits long for something that normally comes soon.
fn wait_for<T>(mut look: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + Duration::from_secs(60);
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < end, "it never came");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn an_engine_process_ends_with_its_coordinator() {
    let mut child = Command::new(ORBITKV)
        .arg("replay-engine")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    writeln!(stdin, "nonsense").unwrap();
    drop(stdin);
    assert_eq!(child.wait().unwrap().code(), Some(2));
}
