//! `orbitkv inspect`, `top` and `doctor` tell the truth on any Manager (MET-09), and each number
//! that inspection shows is the one it is called.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use orbitkv_engine::{Deadline, QueryMode};
use orbitkv_shm_protocol::bootstrap::peer::lock_path;
use orbitkv_shm_protocol::inspect::LifeState;
use orbitkv_shm_protocol::telemetry::{
    LeaseEnd, Metric, TELEMETRY_BYTES, resolved_socket, segment_name,
};
use orbitkv_tests::engine::{Engine, blocks, hashes, namespace};
use orbitkv_tests::manager::{PATIENCE, Setup};
use orbitkv_tests::setup;
use rustix::process::{Signal, kill_process};
use serde_json::Value;

const KIB: u64 = 1024;
const MIB: u64 = 1024 * KIB;
const SECTIONS: [&str; 8] =
    ["sessions", "rings", "operations", "leases", "pool", "ssd", "pages", "config"];

fn inspect(setup: &Setup, more: &[&str]) -> Output {
    let socket = setup.socket();
    let mut arguments = vec!["inspect", "--socket", socket.to_str().unwrap()];
    arguments.extend(more);
    setup.orbitkv(&arguments)
}

fn json(setup: &Setup) -> Value {
    let output = inspect(setup, &["--json"]);
    let words = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(0), "{words}");
    serde_json::from_slice(&output.stdout).unwrap()
}

fn state(setup: &Setup) -> String {
    json(setup)["manager"]["state"].as_str().unwrap().to_owned()
}

fn wait_for_state(setup: &Setup, expected: &str) -> Value {
    let end = Instant::now() + PATIENCE;
    loop {
        let seen = json(setup);
        if seen["manager"]["state"] == expected {
            return seen;
        }
        assert!(Instant::now() < end, "never {expected}: {}", seen["manager"]);
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn segment(setup: &Setup) -> PathBuf {
    let uid = rustix::process::geteuid().as_raw();
    let name = segment_name(uid, &resolved_socket(&setup.socket()));
    PathBuf::from("/dev/shm").join(&name[1..])
}

/// Every section in both forms, whatever the Manager is in.
fn all_sections_are_served(setup: &Setup, expected: &str) {
    for section in SECTIONS {
        let output = inspect(setup, &[section]);
        assert_eq!(output.status.code(), Some(0), "{section}");
        assert!(!output.stdout.is_empty(), "{section}");
        let output = inspect(setup, &[section, "--json"]);
        let seen: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(seen["manager"]["state"], expected, "{section}");
        assert!(!seen[section].is_null(), "{section}: {seen}");
    }
    let whole = inspect(setup, &[]);
    let text = String::from_utf8(whole.stdout).unwrap();
    assert!(text.starts_with(&format!("manager {expected} ")), "{text}");
}

/// Goal: live, stopped, going on, killed and replaced: each state is told, always with the last
/// numbers, and looking changes nothing. Method: SIGSTOP, SIGCONT, SIGKILL; the segment's bytes and
/// times are compared before and after a look at a stopped Manager.
#[test]
fn met_09_every_state_is_told() {
    let setup = setup!();
    let output = inspect(&setup, &[]);
    assert_eq!(output.status.code(), Some(3), "nobody there");
    let words = String::from_utf8(output.stderr).unwrap();
    assert!(words.contains("orbitkv serve") && words.lines().count() == 1, "{words}");

    let manager = setup.start();
    let mut engine = Engine::attach(&manager.socket(), namespace("met-09", 4 * KIB), 4);
    let _ = engine.save(&blocks(&hashes(1, 0..4), 0)).ok();
    manager.counted(Metric::SaveStoredPages, 4);
    assert_eq!(state(manager.setup()), "ready");
    all_sections_are_served(manager.setup(), "ready");

    kill_process(manager.pid(), Signal::STOP).unwrap();
    wait_for_state(manager.setup(), "unresponsive");
    let looked_at = |setup: &Setup| {
        let path = segment(setup);
        let metadata = fs::metadata(&path).unwrap();
        (fs::read(&path).unwrap(), metadata.modified().unwrap(), metadata.permissions())
    };
    let before = looked_at(manager.setup());
    all_sections_are_served(manager.setup(), "unresponsive");
    let seen = json(manager.setup());
    assert_eq!(seen["counters"]["orbitkv_save_stored_pages_total"], 4);
    assert!(seen["manager"]["heartbeat_age_ms"].as_u64().unwrap() >= 1000);
    assert!(looked_at(manager.setup()) == before, "looking has changed the segment");

    kill_process(manager.pid(), Signal::CONT).unwrap();
    wait_for_state(manager.setup(), "ready");
    drop(engine);
    let setup = manager.kill();
    assert_eq!(state(&setup), "dead");
    all_sections_are_served(&setup, "dead");
    assert_eq!(json(&setup)["counters"]["orbitkv_save_stored_pages_total"], 4);

    let manager = setup.start();
    assert_eq!(state(manager.setup()), "ready");
    assert_eq!(json(manager.setup())["counters"]["orbitkv_save_stored_pages_total"], 0);
    let setup = manager.stop();
    assert_eq!(inspect(&setup, &[]).status.code(), Some(3), "a clean stop leaves nothing");
}

/// Goal: a Manager that has not come far is starting. Method: it is stopped by the kernel as soon
/// as its lock is there, at many moments.
#[test]
fn met_09_a_starting_manager_is_starting() {
    let setup = setup!();
    for _ in 0..8 {
        let mut command = Command::new(setup.program());
        command.args(["serve", "--dram", "512MiB", "--huge-pages", "off", "--socket"]);
        command.arg(setup.socket()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = Killed(command.spawn().unwrap());
        let lock = lock_path(&setup.socket());
        let end = Instant::now() + PATIENCE;
        while inspect(&setup, &[]).status.code() == Some(3) {
            assert!(Instant::now() < end && lock.parent().unwrap().exists());
        }
        kill_process(child.pid(), Signal::STOP).unwrap();
        let seen = state(&setup);
        assert!(["starting", "ready", "unresponsive"].contains(&seen.as_str()), "{seen}");
        if setup.socket().exists() {
            println!("it was ready before it could be stopped");
        } else {
            assert_eq!(seen, "starting");
        }
        child.end();
        // The next one is not to be taken for this one.
        for left in [setup.telemetry_file(), setup.socket()] {
            let _absent = fs::remove_file(left);
        }
    }
}

struct Killed(Child);

impl Killed {
    fn pid(&self) -> rustix::process::Pid {
        rustix::process::Pid::from_child(&self.0)
    }

    fn end(&mut self) {
        let _killed = self.0.kill();
        let _reaped = self.0.wait();
    }
}

impl Drop for Killed {
    fn drop(&mut self) {
        self.end();
    }
}

fn noise(bytes: usize) -> Vec<u8> {
    let mut generator = fastrand::Rng::with_seed(9);
    std::iter::repeat_with(|| generator.u8(..)).take(bytes).collect()
}

/// Goal: rubbish in the segment of a live Manager is called so, believed by nobody (it goes on
/// serving), and gone again soon; in that of a dead one it is called so for ever.
#[test]
fn met_09_rubbish_in_the_segment_is_named_and_heals() {
    let manager = setup!().flag("--http", "127.0.0.1:0").start();
    let mut engine = Engine::attach(&manager.socket(), namespace("rubbish", 4 * KIB), 8);
    let pages = hashes(1, 0..8);
    let _ = engine.save(&blocks(&pages, 0)).ok();
    manager.counted(Metric::SaveStoredPages, 8);
    // Stopped, so that the rubbish can be looked at before it heals.
    kill_process(manager.pid(), Signal::STOP).unwrap();
    let file = File::options().write(true).open(segment(manager.setup())).unwrap();
    file.write_all_at(&noise(TELEMETRY_BYTES), 0).unwrap();
    let seen = json(manager.setup());
    assert_eq!(seen["manager"]["state"], "unresponsive");
    let problem = seen["manager"]["problems"][0].as_str().unwrap();
    assert!(problem.contains("not an OrbitKV telemetry segment"), "{problem}");
    all_sections_are_served(manager.setup(), "unresponsive");
    kill_process(manager.pid(), Signal::CONT).unwrap();
    assert_eq!(engine.restore_all(&pages), 8, "it serves on");
    let healed = wait_for_state(manager.setup(), "ready");
    assert_eq!(healed["manager"]["problems"], serde_json::json!([]));
    assert_eq!(healed["counters"]["orbitkv_save_stored_pages_total"], 8);
    assert_eq!(healed["sessions"].as_array().unwrap().len(), 1);
    drop(engine);

    let setup = manager.kill();
    file.write_all_at(&noise(TELEMETRY_BYTES), 0).unwrap();
    assert_eq!(state(&setup), "dead");
    all_sections_are_served(&setup, "dead");
    // The next one replaces it.
    let manager = setup.start();
    assert_eq!(state(manager.setup()), "ready");
}

/// Goal: a runtime folder that was damaged under a Manager neither hangs the tool nor makes it lie.
#[test]
fn met_09_a_damaged_runtime_folder() {
    let manager = setup!().start();
    let setup = manager.setup();
    fs::remove_file(setup.socket()).unwrap();
    assert_eq!(state(setup), "ready", "the socket is for clients");
    fs::remove_file(lock_path(&setup.socket())).unwrap();
    let seen = json(setup);
    assert_eq!(seen["manager"]["state"], "ready");
    let problem = seen["manager"]["problems"][0].as_str().unwrap();
    assert!(problem.contains("nobody holds the lock"), "{problem}");
    // Things in the lock's place that would hold up a careless reader.
    let lock = lock_path(&setup.socket());
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &lock,
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR,
        0,
    )
    .unwrap();
    assert_eq!(state(setup), "ready");
    fs::remove_file(&lock).unwrap();
    std::os::unix::fs::symlink(&lock, &lock).unwrap();
    let seen = json(setup);
    assert_eq!(seen["manager"]["state"], "ready");
    assert!(seen["manager"]["problems"].to_string().contains("cannot be probed"), "{seen}");
    fs::remove_file(&lock).unwrap();
    fs::create_dir(&lock).unwrap();
    assert_eq!(state(setup), "ready");
    fs::remove_dir(&lock).unwrap();
    // Gone altogether.
    kill_process(manager.pid(), Signal::KILL).unwrap();
    wait_for_state(manager.setup(), "dead");
    fs::remove_file(segment(manager.setup())).unwrap();
    assert_eq!(inspect(manager.setup(), &[]).status.code(), Some(3));
}

/// Goal: every number of rings, operations, leases and budgets is exact while work is outstanding.
/// Method: a client that submits and never polls, leases what the budget allows and then waits for
/// more.
#[test]
fn outstanding_work_is_shown_exactly() {
    let manager = setup!().dram("32MiB").flag("--query-budget", "8MiB").start();
    let mut engine = Engine::attach(&manager.socket(), namespace("exact", MIB), 8);
    let pages = hashes(1, 0..8);
    let _ = engine.save(&blocks(&pages, 0)).ok();
    let scope = engine.scope;
    let ask = |engine: &mut Engine, count: usize, mode| {
        let asked = engine.client.query(&scope, &pages[..count], mode, Deadline::DEFAULT);
        asked.unwrap()
    };
    for count in [2, 3] {
        ask(&mut engine, count, QueryMode::Candidate);
    }
    let waits = ask(&mut engine, 4, QueryMode::Demand);
    for _ in 0..5 {
        engine.client.ping().unwrap();
    }
    engine.client.submit().unwrap();
    manager.settle("all is taken", |seen| {
        seen.rings[0].completions_queued == 7 && seen.budget.waiting_queries == 1
    });
    let seen = json(manager.setup());
    let session = &seen["sessions"][0];
    assert_eq!(session["requests_submitted"], 9, "the save, three queries, five pings");
    assert_eq!((&session["completions_consumed"], &session["outstanding"]), (&1.into(), &1.into()));
    assert_eq!((&session["leased_bytes"], &session["regions"]), (&(5 * MIB).into(), &1.into()));
    assert_eq!(session["pid"], std::process::id());
    assert_eq!(session["uid"], rustix::process::geteuid().as_raw());
    let ring = &seen["rings"][0];
    assert_eq!(ring["session"], session["id"]);
    assert_eq!((&ring["requests_queued"], &ring["completions_queued"]), (&0.into(), &7.into()));
    assert_eq!(ring["credits_used"], 8, "seven unread completions and one that runs");
    let operations = seen["operations"].as_array().unwrap();
    assert_eq!(operations.len(), 1, "{operations:?}");
    assert_eq!(
        (&operations[0]["kind"], &operations[0]["stage"]),
        (&"query".into(), &"waiting".into())
    );
    assert_eq!(operations[0]["session"], session["id"]);
    let leases = seen["leases"].as_array().unwrap();
    let sizes: Vec<_> =
        leases.iter().map(|lease| (lease["pages"].clone(), lease["bytes"].clone())).collect();
    assert_eq!(
        sizes,
        [(3.into(), (3 * MIB).into()), (2.into(), (2 * MIB).into())],
        "largest first"
    );
    assert!(leases.iter().all(|lease| lease["ttl_ms"].as_u64().unwrap() > 0));
    assert!(leases.iter().all(|lease| lease["group"] == engine.client.engine_id().to_string()));
    let budget = &seen["budget"];
    assert_eq!(
        (&budget["total_bytes"], &budget["waiting_queries"]),
        (&(5 * MIB).into(), &1.into())
    );
    assert_eq!(budget["limits"]["total_bytes"], 8 * MIB);
    assert_eq!(seen["pool"]["used_bytes"], 8 * MIB);
    assert_eq!(seen["pool"]["pinned_bytes"], 3 * MIB, "three pages, leased twice in part");
    assert_eq!(seen["pages"][0]["count"], 8);
    assert_eq!(
        (&seen["pages"][0]["tier"], &seen["pages"][0]["bytes"]),
        (&"dram".into(), &(8 * MIB).into())
    );

    // Polled: the ring empties without the Manager's doing.
    for _ in 0..7 {
        let _ = engine.next_end();
    }
    manager.settle("read", |seen| seen.rings[0].completions_queued == 0);
    let cancel = engine.client.cancel(waits).unwrap();
    let _ = engine.end(cancel).ok();
    manager.settle("nothing runs", |seen| seen.operations.is_empty());
}

/// Goal: what waits in the rings of a Manager that hangs is shown, though it cannot look itself.
/// Method: the client works on while the Manager is stopped; afterwards everything ends.
#[test]
fn requests_to_a_stopped_manager_are_shown_as_queued() {
    let manager = setup!().start();
    let mut engine = Engine::attach(&manager.socket(), namespace("stopped", 4 * KIB), 4);
    let mut idle = Engine::attach(&manager.socket(), namespace("idle", 4 * KIB), 4);
    for _ in 0..5 {
        engine.client.ping().unwrap();
    }
    engine.client.submit().unwrap();
    manager.settle("answered", |seen| {
        seen.rings.iter().any(|ring| ring.completions_queued == 5) && seen.sessions.len() == 2
    });
    kill_process(manager.pid(), Signal::STOP).unwrap();
    for _ in 0..2 {
        let _ = engine.next_end();
    }
    for _ in 0..7 {
        engine.client.ping().unwrap();
    }
    engine.client.submit().unwrap();
    let seen = wait_for_state(manager.setup(), "unresponsive");
    let of = |session: u32| {
        let rings = seen["rings"].as_array().unwrap();
        rings.iter().find(|ring| ring["session"] == session).unwrap()
    };
    let ring = of(engine.client.session().0);
    assert_eq!((&ring["requests_queued"], &ring["completions_queued"]), (&7.into(), &3.into()));
    assert_eq!(ring["credits_used"], 10);
    let ring = of(idle.client.session().0);
    assert_eq!((&ring["requests_queued"], &ring["credits_used"]), (&0.into(), &0.into()));
    kill_process(manager.pid(), Signal::CONT).unwrap();
    for _ in 0..10 {
        let _ = engine.next_end();
    }
    manager.settle("all is read", |seen| seen.rings.iter().all(|ring| ring.credits_used == 0));
    idle.client.ping().unwrap();
    let _ = idle.next_end();
}

/// Goal: an idle Manager shows the end of a lease that nobody asked about.
#[test]
fn an_expired_lease_leaves_the_list() {
    let manager = setup!().flag("--lease-ttl", "100ms").start();
    let mut engine = Engine::attach(&manager.socket(), namespace("list", 4 * KIB), 2);
    let pages = hashes(1, 0..2);
    let _ = engine.save(&blocks(&pages, 0)).ok();
    let _forgotten = engine.query(&pages, QueryMode::Demand).ok().leased();
    let ended = Metric::LeasesEnded(LeaseEnd::Expired);
    manager.settle("it expires", |seen| seen.counters.get(ended) == 1 && seen.leases.is_empty());
    manager.settle("no bytes", |seen| seen.sessions[0].leased_bytes == 0);
}

/// Goal: what a draining Manager does not take any more is shown as queued. Method: a query that
/// waits keeps the stop from ending while its cancels are submitted, which are not refused.
#[test]
fn requests_to_a_draining_manager_are_shown_as_queued() {
    let manager = setup!().dram("32MiB").flag("--query-budget", "4MiB").start();
    let mut engine = Engine::attach(&manager.socket(), namespace("queued", MIB), 4);
    let pages = hashes(1, 0..4);
    let _ = engine.save(&blocks(&pages, 0)).ok();
    let _held = engine.query(&pages, QueryMode::Demand).ok().leased();
    let scope = engine.scope;
    let waits = engine.client.query(&scope, &pages, QueryMode::Demand, Deadline::DEFAULT).unwrap();
    engine.client.submit().unwrap();
    manager.settle("it waits", |seen| seen.budget.waiting_queries == 1);
    kill_process(manager.pid(), Signal::TERM).unwrap();
    manager.settle("draining", |seen| seen.manager.state == LifeState::Draining);
    for _ in 0..3 {
        engine.client.cancel(waits).unwrap();
    }
    engine.client.submit().unwrap();
    let seen = manager
        .settle("queued", |seen| seen.rings.first().is_none_or(|ring| ring.requests_queued == 3));
    if seen.rings.is_empty() {
        println!("not seen: the machine was too slow, the stop had ended by then");
    }
    let _setup = manager.stop();
}

/// Goal: under load each answer comes, whole, and changes nothing. Method: many looks beside a
/// client that never rests.
#[test]
fn met_09_under_load() {
    let manager = setup!().start();
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (socket, stop) = (manager.socket(), &stop);
        scope.spawn(move || {
            let mut engine = Engine::attach(&socket, namespace("load", 4 * KIB), 8);
            let pages = hashes(1, 0..8);
            let _ = engine.save(&blocks(&pages, 0)).ok();
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                assert_eq!(engine.restore_all(&pages), 8);
            }
        });
        manager.settle("load", |seen| seen.counters.get(Metric::LookupPages) > 100);
        let mut last = 0;
        for _ in 0..30 {
            let seen = json(manager.setup());
            assert_eq!(seen["manager"]["state"], "ready");
            let pages = seen["counters"]["orbitkv_lookup_pages_total"].as_u64().unwrap();
            assert!(pages >= last, "counters never go back");
            last = pages;
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
}

/// A program on a terminal of its own.
struct OnTerminal {
    child: Killed,
    screen: File,
    shown: Vec<u8>,
    /// Before anything ran on it.
    mode_before: rustix::termios::LocalModes,
}

impl OnTerminal {
    fn start(setup: &Setup, arguments: &[&str]) -> Self {
        use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
        use rustix::termios::{Winsize, tcsetwinsize};
        let main = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        grantpt(&main).unwrap();
        unlockpt(&main).unwrap();
        let name = ptsname(&main, Vec::new()).unwrap();
        let size = Winsize { ws_row: 24, ws_col: 80, ws_xpixel: 0, ws_ypixel: 0 };
        tcsetwinsize(&main, size).unwrap();
        let path = PathBuf::from(name.into_string().unwrap());
        let end = || File::options().read(true).write(true).open(&path).unwrap();
        let mode_before = rustix::termios::tcgetattr(&main).unwrap().local_modes;
        let child = Command::new(setup.program())
            .args(arguments)
            .stdin(end())
            .stdout(end())
            .stderr(end())
            .env("TERM", "xterm-256color")
            .spawn()
            .unwrap();
        Self { child: Killed(child), screen: File::from(main), shown: Vec::new(), mode_before }
    }

    fn mode(&self) -> rustix::termios::LocalModes {
        rustix::termios::tcgetattr(&self.screen).unwrap().local_modes
    }

    fn types(&mut self, keys: &str) {
        self.screen.write_all(keys.as_bytes()).unwrap();
    }

    /// Reads until everything that was ever drawn contains `words`. Cells that did not change are
    /// not drawn again, so only whole first drawings are looked for.
    fn shows(&mut self, words: &str) {
        let end = Instant::now() + PATIENCE;
        while !String::from_utf8_lossy(&self.shown).contains(words) {
            assert!(Instant::now() < end, "never shown: {words:?} in {}", self.text());
            self.read();
        }
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.shown).into_owned()
    }

    fn read(&mut self) {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let mut polled = [PollFd::new(&self.screen, PollFlags::IN)];
        let timeout = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
        let ready = poll(&mut polled, Some(&timeout)).unwrap();
        let mut part = [0; 65_536];
        if ready > 0
            && let Ok(bytes) = self.screen.read(&mut part)
        {
            self.shown.extend_from_slice(&part[..bytes]);
        }
    }

    fn exit(&mut self) -> Option<i32> {
        let end = Instant::now() + PATIENCE;
        loop {
            self.read();
            if let Some(status) = self.child.0.try_wait().unwrap() {
                self.read();
                return status.code();
            }
            assert!(Instant::now() < end, "never ended: {}", self.text());
        }
    }
}

const ALTERNATE_ON: &str = "\u{1b}[?1049h";
const ALTERNATE_OFF: &str = "\u{1b}[?1049l";

/// Goal: `top` draws, lives through the death and return of its Manager, ends by key, by Ctrl-C and
/// by SIGTERM, and leaves the terminal as it was. Method: a terminal of the test's own.
#[test]
fn top_draws_outlives_its_manager_and_restores_the_terminal() {
    let manager = setup!().start();
    let socket = manager.socket();
    let arguments = ["top", "--socket", socket.to_str().unwrap()];
    let mut top = OnTerminal::start(manager.setup(), &arguments);
    let before = top.mode_before;
    top.shows(ALTERNATE_ON);
    top.shows("ready");
    top.shows("dram");
    top.shows("session");
    assert_ne!(top.mode(), before, "raw");
    let setup = manager.kill();
    top.shows("dead");
    let manager = setup.start();
    top.shown.clear();
    top.shows("ready");
    let setup = manager.stop();
    top.shows("gone");
    let manager = setup.start();
    top.types("q");
    assert_eq!(top.exit(), Some(0));
    assert_eq!(top.mode(), before, "as it was");
    assert!(top.text().contains(ALTERNATE_OFF));

    for end in ["control-c", "signal"] {
        let mut top = OnTerminal::start(manager.setup(), &arguments);
        let before = top.mode_before;
        top.shows("dram");
        match end {
            "signal" => kill_process(top.child.pid(), Signal::TERM).unwrap(),
            _ => top.types("\u{3}"),
        }
        assert_eq!(top.exit(), Some(0), "{end}");
        assert_eq!(top.mode(), before, "{end}");
        assert!(top.text().contains(ALTERNATE_OFF), "{end}");
    }
}

#[test]
fn top_without_a_terminal_or_a_manager_says_what_to_use() {
    let setup = setup!();
    let socket = setup.socket();
    let arguments = ["top", "--socket", socket.to_str().unwrap()];
    let output = setup.orbitkv(&arguments);
    let words = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{words}");
    assert!(words.contains("orbitkv inspect") && words.lines().count() == 1, "{words}");
    let mut top = OnTerminal::start(&setup, &arguments);
    assert_eq!(top.exit(), Some(3), "{}", top.text());
    assert!(!top.text().contains(ALTERNATE_ON), "the terminal was left alone");
}

/// The checks that must be there, whatever this machine says to them.
const CHECKS: [&str; 21] = [
    "kernel",
    "futex_waitv",
    "peer pidfd",
    "cores",
    "wake",
    "descriptors",
    "user namespace",
    "memory",
    "huge pages",
    "reserved huge pages",
    "numa",
    "memlock",
    "/dev/shm",
    "io_uring",
    "registered buffers",
    "ssd path",
    "process_vm",
    "cuda driver",
    "cuda ipc",
    "runtime folder",
    "manager",
];

fn doctor(setup: &Setup, more: &[&str]) -> (Option<i32>, Vec<Value>) {
    let socket = setup.socket();
    let mut arguments = vec!["doctor", "--json", "--socket", socket.to_str().unwrap()];
    arguments.extend(more);
    let output = setup.orbitkv(&arguments);
    let words = String::from_utf8_lossy(&output.stderr).into_owned();
    let checks = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{words}"));
    (output.status.code(), checks)
}

fn check<'a>(checks: &'a [Value], name: &str) -> &'a Value {
    checks.iter().find(|check| check["name"] == name).unwrap_or_else(|| panic!("no {name}"))
}

#[test]
fn doctor_examines_everything_and_its_exit_follows() {
    let manager = setup!().dram("16MiB").start();
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let disk = folder.path().to_str().unwrap();
    let (exit, checks) = doctor(manager.setup(), &["--ssd", disk, "--dram", "16MiB"]);
    for name in CHECKS {
        let check = check(&checks, name);
        let status = check["status"].as_str().unwrap();
        assert!(["ok", "warn", "fail"].contains(&status), "{check}");
        assert!(!check["found"].as_str().unwrap().is_empty(), "{check}");
        assert_eq!(check["fix"].as_str().unwrap().is_empty(), status == "ok", "{check}");
    }
    let failed = checks.iter().any(|check| check["status"] == "fail");
    assert_eq!(exit, Some(i32::from(failed)), "{checks:?}");
    assert_eq!(check(&checks, "process_vm")["status"], "ok");
    let there = check(&checks, "manager");
    assert!(there["found"].as_str().unwrap().contains("serves"), "{there}");
    assert_eq!(folder.path().read_dir().unwrap().count(), 0, "nothing is left behind");

    let (exit, checks) = doctor(manager.setup(), &["--ssd", "/dev/shm", "--dram", "16MiB"]);
    assert_eq!(exit, Some(1));
    let path = check(&checks, "ssd path");
    assert!(path["status"] == "fail" && path["found"].to_string().contains("tmpfs"), "{path}");
    let (exit, checks) = doctor(manager.setup(), &["--ssd", disk, "--dram", "16TiB"]);
    assert_eq!((exit, &check(&checks, "memory")["status"]), (Some(1), &"fail".into()));
    let setup = manager.stop();
    let text = setup.orbitkv(&["doctor", "--ssd", disk, "--dram", "16MiB"]);
    let text = String::from_utf8(text.stdout).unwrap();
    assert!(text.contains("O_DIRECT") && text.contains("kernel"), "{text}");
}

/// Goal: limits of the process are named with both numbers and the way out (RES-03). Method: the
/// limit of locked memory is lowered for the program alone, by the shell, and the capability that
/// would lift it is dropped.
#[test]
fn res_03_doctor_names_the_limit_of_locked_memory() {
    let setup = setup!();
    let output = Command::new("setpriv")
        .args(["--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock", "prlimit", "--memlock=65536"])
        .arg(setup.program())
        .args(["doctor", "--json", "--dram", "1GiB", "--socket"])
        .arg(setup.socket())
        .output();
    let Ok(output) = output else {
        println!("not run: setpriv or prlimit is not installed");
        return;
    };
    let words = String::from_utf8_lossy(&output.stderr).into_owned();
    let checks: Vec<Value> =
        serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{words}"));
    let memlock = check(&checks, "memlock");
    assert_eq!(memlock["status"], "warn", "{memlock}");
    assert!(memlock["found"].as_str().unwrap().contains("64 KiB"), "{memlock}");
    let fix = memlock["fix"].as_str().unwrap();
    assert!(fix.contains("1073741824") && fix.contains("CAP_IPC_LOCK"), "{fix}");
}
