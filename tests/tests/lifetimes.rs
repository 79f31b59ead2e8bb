//! Who lives, who waits and who is told: engines in containers, prepares that are given up, wakes
//! across processes (CRASH-11, LEAK-03, HANG-03).

use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use orbitkv_engine::{
    Code, Deadline, QueryMode, RequestKind, Status, SubmitError, engine_id_random, wait_many,
};
use orbitkv_shm_protocol::telemetry::Metric;
use orbitkv_tests::engine::{Engine, Way, hashes, namespace};
use orbitkv_tests::engine_process::{EngineProcess, Identity};
use orbitkv_tests::manager::{Manager, PATIENCE};
use orbitkv_tests::setup;
use rustix::process::{Pid, Signal};

const KIB: u64 = 1024;
const MIB: u64 = 1024 * KIB;

/// What makes a container of a program: process ids, IPC and host name of its own.
const CONTAINER: [&str; 5] = ["unshare", "--pid", "--fork", "--ipc", "--uts"];

/// The engine behind a runner, as this process sees it.
fn inner(process: &EngineProcess) -> Pid {
    let outer = process.pid().as_raw_nonzero();
    let children = std::fs::read_to_string(format!("/proc/{outer}/task/{outer}/children")).unwrap();
    Pid::from_raw(children.trim().parse().unwrap()).unwrap()
}

fn kill(pid: Pid) {
    rustix::process::kill_process(pid, Signal::KILL).unwrap();
}

/// Goal: a process id says nothing: two engines that both are process 1 of their container, with the
/// same model and rank, are two instances. Method: one unregisters, the other goes on; that one is
/// killed, and takes only its own lease with it.
#[test]
fn crash_11_two_engines_with_pid_1_are_two_instances() {
    for way in [Way::Sealed, Way::Process] {
        let manager = setup!().flag("--lease-ttl", "60s").start();
        let start = || {
            let engine = engine_id_random().unwrap();
            let identity = Identity { way, ..Identity::new(engine, "crash-11", 16 * KIB, 8) };
            EngineProcess::start_under(manager.setup(), &identity, &CONTAINER)
        };
        let (mut first, mut second) = (start(), start());
        assert_eq!((first.ask("pid"), second.ask("pid")), ("1".into(), "1".into()));
        let pids = [inner(&first), inner(&second)].map(|pid| pid.as_raw_nonzero().get() as u64);
        let seen = manager.settle("both have a region", |seen| {
            seen.sessions.len() == 2 && seen.sessions.iter().all(|session| session.regions == 1)
        });
        let shown: BTreeSet<u64> = seen.sessions.iter().map(|session| session.pid).collect();
        assert_eq!(shown, BTreeSet::from(pids), "as the host sees them");
        assert_eq!(first.ask("save 1 8"), "Ok 8 0");
        assert_eq!(first.ask("lease 1 8"), "Ok 8");
        assert_eq!(second.ask("lease 1 8"), "Ok 8");
        assert_eq!(first.ask("unregister"), "Ok");
        manager.settle("one of them has no region", |seen| {
            let with = seen.sessions.iter().filter(|session| session.regions == 1);
            with.map(|session| session.pid).eq([pids[1]])
        });
        assert_eq!(second.ask("save 2 8"), "Ok 8 0", "the other works");
        manager.counted(Metric::LeasesHeld, 2);
        kill(inner(&second));
        let seen = manager.settle("its death is noticed", |seen| seen.sessions.len() == 1);
        assert_eq!(seen.sessions[0].pid, pids[0]);
        let seen = manager.settle("one lease is left", |s| s.counters.get(Metric::LeasesHeld) == 1);
        assert_eq!(seen.sessions[0].leased_bytes, 8 * 16 * KIB);
        assert_eq!(first.ask("lease 2 8"), "Ok 8", "what was saved stays");
        kill(inner(&first));
        manager.settle("nobody is left", |seen| seen.sessions.is_empty());
        manager.settle_empty();
    }
}

/// Goal: a prepare that is given up gives everything back, wherever it is (LEAK-03). Method: 100
/// loops (the scenario has 10,000) at each place: in the queue, while its pages are read, ended and
/// not looked at, looked at. Two sets of pages that do not fit the pool together make each one read.
#[test]
fn leak_03_prepares_that_are_given_up_give_their_budget_back() {
    let manager = setup!().dram("10MiB").ssd("64MiB").flag("--query-budget", "8MiB").start();
    let mut engine = Engine::attach(&manager.socket(), namespace("leak-03", 256 * KIB), 24);
    let sets = [hashes(1, 0..24), hashes(2, 0..24)];
    for set in &sets {
        engine.save_all(set);
        manager.settle("written", |seen| seen.counters.get(Metric::SpillWaitingPages) == 0);
    }
    let scope = engine.scope;
    let (mut cut, mut reads) = (0, 0);
    for round in 0..400_usize {
        let set = &sets[round / 4 % 2];
        let before = manager.get(Metric::SsdReadPages);
        let query = engine.client.query(&scope, set, QueryMode::Demand, Deadline::DEFAULT).unwrap();
        match round % 4 {
            0 => {}
            1 => {
                engine.client.submit().unwrap();
                for _ in 0..round * 4 {
                    engine.client.check_manager().unwrap();
                }
            }
            _ => {
                engine.client.submit().unwrap();
            }
        }
        if round % 4 == 2 {
            manager.settle("it has ended", |seen| {
                seen.rings.iter().any(|ring| ring.completions_queued == 1)
            });
        }
        let ended = if round % 4 == 3 {
            let ended = engine.end(query);
            assert_eq!(engine.client.cancel(query), Err(SubmitError::StaleHandle));
            ended
        } else {
            let cancel = engine.client.cancel(query).unwrap();
            let ended = engine.end(query);
            assert_eq!(engine.end(cancel).status, Status::Ok);
            ended
        };
        match (ended.status, ended.code) {
            (Status::Ok, Code::None) => assert_eq!(ended.pages, 24),
            (_, Code::Cancelled) => cut += 1,
            _ => panic!("{ended:?}"),
        }
        if let Some(lease) = ended.lease {
            let _ = engine.release(lease).ok();
        }
        reads += u32::from(manager.get(Metric::SsdReadPages) > before);
    }
    assert!(cut >= 100 && reads > 0, "{cut} cut, {reads} rounds read");
    let seen = manager.settle_empty();
    assert_eq!(seen.ssd[0].reading, 0);
    for set in &sets {
        assert_eq!(engine.restore_all(set), 24, "the next prepare is served in full");
    }
}

/// `strace` on one process, to a file.
struct Tracer(Child);

impl Tracer {
    /// `None`, having said so, where processes cannot be traced.
    fn on(pid: Pid, file: &Path) -> Option<Self> {
        let mut command = Command::new("strace");
        command.args(["-f", "-e", "trace=futex,futex_waitv", "-o"]).arg(file);
        command.args(["-p", &pid.as_raw_nonzero().to_string()]);
        let spawned = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        let tracer = Self(spawned.inspect_err(|e| println!("not run: strace: {e}")).ok()?);
        let started = Instant::now();
        let status = format!("/proc/{}/status", pid.as_raw_nonzero());
        while std::fs::read_to_string(&status).unwrap().contains("TracerPid:\t0\n") {
            if started.elapsed() > PATIENCE {
                println!("not run: strace may not trace other processes here");
                return None;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Some(tracer)
    }

    /// Everything that it has seen.
    fn end(mut self, file: &Path) -> String {
        rustix::process::kill_process(Pid::from_child(&self.0), Signal::TERM).unwrap();
        self.0.wait().unwrap();
        whole_calls(&std::fs::read_to_string(file).unwrap())
    }
}

/// A trace with the two halves of each interrupted call on one line.
fn whole_calls(trace: &str) -> String {
    let mut begun: HashMap<&str, &str> = HashMap::new();
    let mut calls = String::new();
    for line in trace.lines() {
        let (thread, call) = line.split_once(' ').unwrap_or((line, ""));
        if let Some(first) = call.strip_suffix(" <unfinished ...>") {
            begun.insert(thread, first);
        } else if let Some((_, second)) = call.split_once(" resumed>") {
            calls.push_str(begun.remove(thread).unwrap_or(""));
            calls.push_str(second);
            calls.push('\n');
        } else {
            calls.push_str(call);
            calls.push('\n');
        }
    }
    calls
}

impl Drop for Tracer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Where a process has mapped the segments of sessions.
fn shared_words(pid: Pid) -> Vec<Range<u64>> {
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", pid.as_raw_nonzero())).unwrap();
    let of_segments = maps.lines().filter(|line| line.contains("/memfd:orbitkv-"));
    let number = |text: &str| u64::from_str_radix(text, 16).unwrap();
    let range = |line: &str| {
        let (start, end) = line.split(' ').next().unwrap().split_once('-').unwrap();
        number(start)..number(end)
    };
    of_segments.map(range).collect()
}

/// Futex calls of a trace on words in `shared`, each with the rest of its line. A `futex_waitv` is
/// split into its words.
fn calls_on<'a>(trace: &'a str, shared: &[Range<u64>]) -> Vec<&'a str> {
    let words = trace.lines().filter(|line| line.contains("futex")).flat_map(|line| {
        let starts = line.match_indices("0x").map(|(at, _)| at);
        starts.map(move |at| &line[at..])
    });
    words
        .filter(|word| {
            let digits = word[2..].split(|c: char| !c.is_ascii_hexdigit()).next().unwrap_or("");
            let address = u64::from_str_radix(digits, 16).unwrap_or(0);
            shared.iter().any(|range| range.contains(&address))
        })
        .collect()
}

fn a_wake_reaches(manager: &Manager, runner: &[&str]) {
    let model = format!("hang-03-{}", runner.len());
    let identity = Identity::new(engine_id_random().unwrap(), &model, 4 * KIB, 4);
    let mut engine = EngineProcess::start_under(manager.setup(), &identity, runner);
    let pid = if runner.is_empty() { engine.pid() } else { inner(&engine) };
    let folder = tempfile::tempdir().unwrap();
    let files = [folder.path().join("engine"), folder.path().join("manager")];
    let Some(of_engine) = Tracer::on(pid, &files[0]) else { return };
    let Some(of_manager) = Tracer::on(manager.pid(), &files[1]) else { return };
    assert_eq!(engine.ask("save 1 4"), "Ok 4 0");
    for _ in 0..3 {
        assert_eq!(engine.ask("lease 1 4"), "Ok 4");
        // Nothing ends until the lease expires: the engine sleeps on an empty ring.
        assert_eq!(engine.ask("drain"), "waiting");
        assert_eq!(engine.answer(), "Ok");
    }
    let shared = [shared_words(pid), shared_words(manager.pid())];
    let traces = [of_engine.end(&files[0]), of_manager.end(&files[1])];
    for (trace, shared) in traces.iter().zip(&shared) {
        let calls = calls_on(trace, shared);
        assert!(!calls.is_empty(), "{shared:x?}\n{trace}");
        let private: Vec<_> = calls
            .iter()
            .filter(|call| {
                // Up to the next word of the same call.
                let own = call[2..].split("0x").next().unwrap_or("");
                own.contains("PRIVATE")
            })
            .collect();
        assert!(private.is_empty(), "{private:?}");
    }
    let woken = |call: &&str| call.contains("FUTEX_WAKE") && call.trim_end().ends_with("= 1");
    let wakes = calls_on(&traces[1], &shared[1]);
    assert!(wakes.iter().any(woken), "the Manager's wake found nobody asleep: {wakes:?}");
}

/// Goal: the wake for the one completion that an engine sleeps for reaches it in another process, and
/// in another container. Method: an engine waits three times 1 s (10 in the scenario) on an empty
/// ring; both sides are traced: a wake of the Manager wakes one sleeper, and no call on a shared
/// word is private.
#[test]
fn hang_03_a_wake_reaches_another_process_and_container() {
    let manager = setup!().flag("--lease-ttl", "1s").start();
    a_wake_reaches(&manager, &[]);
    a_wake_reaches(&manager, &CONTAINER);
    manager.settle("both engines are gone", |seen| seen.sessions.is_empty());
}

/// Goal: a client that stays outstanding over the death of its Manager in every kind of wait hears of
/// it once an operation, also when many wait together. The rest of the scenario is
/// `hang_01_a_killed_manager_ends_each_operation_once`.
#[test]
fn hang_01_waiting_together_ends_with_the_manager() {
    let manager = setup!().start();
    let socket = manager.socket();
    let mut engines: Vec<Engine> =
        (0..3).map(|_| Engine::attach(&socket, namespace("hang-01", 4 * KIB), 4)).collect();
    let pages = hashes(1, 0..4);
    engines[0].save_all(&pages);
    for engine in &mut engines {
        let _held = engine.query(&pages, QueryMode::Demand).ok().leased();
        engine.client.drain(Deadline::after(2 * PATIENCE)).unwrap();
        engine.client.submit().unwrap();
    }
    let killer = std::thread::spawn({
        let pid = manager.pid();
        move || {
            std::thread::sleep(Duration::from_millis(200));
            kill(pid);
        }
    });
    let mut told = Vec::new();
    while told.len() < 3 {
        let waiting = engines.iter_mut().filter(|e| !told.contains(&e.client.session()));
        let mut clients: Vec<_> = waiting.map(|engine| &mut engine.client).collect();
        let (at, ended) = wait_many(&mut clients, PATIENCE).unwrap().expect("it ends in time");
        assert_eq!((ended.status, ended.kind), (Status::Gone, RequestKind::Drain));
        told.push(clients[at].session());
    }
    killer.join().unwrap();
    for Engine { client, .. } in &mut engines {
        assert!(client.poll().is_err() && client.ping().is_err(), "later calls fail at once");
    }
}

/// Goal: what a lookup pinned and nobody fetched comes back although its engine only sleeps
/// (LEAK-01). The rest of the scenario is `leak_01_hits_that_nobody_fetches_stay_within_budget…`.
#[test]
fn leak_01_leases_of_a_stopped_engine_expire() {
    let manager = setup!().flag("--lease-ttl", "1s").start();
    let identity = Identity::new(engine_id_random().unwrap(), "leak-01", MIB, 8);
    let mut engine = EngineProcess::start(manager.setup(), &identity);
    assert_eq!(engine.ask("save 1 8"), "Ok 8 0");
    for _ in 0..3 {
        assert_eq!(engine.ask("lease 1 8"), "Ok 8");
    }
    engine.signal(Signal::STOP);
    let seen = manager.settle_empty();
    assert_eq!(seen.sessions.len(), 1, "it is attached all the same");
    assert_eq!(seen.counters.get(Metric::PoolPinnedBytes), 0);
}
