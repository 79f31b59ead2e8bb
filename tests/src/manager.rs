//! A real Manager in a process of its own, on a socket and SSD file that nobody else has.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use orbitkv_engine::PageHash;
use orbitkv_shm_protocol::inspect::{self, DeviceView, Snapshot};
use orbitkv_shm_protocol::telemetry::Metric;
use rustix::process::{Pid, Signal};
use tempfile::TempDir;

use crate::engine::{Engine, namespace};
use crate::faulty::FaultyDisk;

/// Longest wait for something that must come. Generous: a busy machine is no failure.
pub const PATIENCE: Duration = Duration::from_secs(30);
/// Pause between two looks at something that must come.
const PAUSE: Duration = Duration::from_millis(5);

/// The setup of a Manager of this test: its programs and folders are those of the calling crate.
#[macro_export]
macro_rules! setup {
    () => {
        $crate::manager::Setup::new(
            env!("CARGO_BIN_EXE_orbitkv-under-test"),
            env!("CARGO_TARGET_TMPDIR"),
        )
    };
}

/// How to start a Manager, and the folders that outlive it. Removed when dropped.
#[derive(Debug)]
pub struct Setup {
    program: PathBuf,
    /// Of the socket: its path must be short.
    runtime: TempDir,
    /// Of the SSD file: on a disk.
    disk: TempDir,
    dram: String,
    ssd: bool,
    arguments: Vec<OsString>,
    config: String,
    /// Command line in front of the program: what confines it.
    under: Vec<OsString>,
    /// No flag but the socket's and those of [`flag`](Self::flag).
    bare: bool,
    /// See [`at_default_socket`](Self::at_default_socket).
    default_socket: bool,
}

/// How a start was refused.
#[derive(Clone, Debug)]
pub struct Refusal {
    /// Exit code.
    pub code: i32,
    /// The one line that says why.
    pub line: String,
    /// What was logged before.
    pub log: String,
}

impl Refusal {
    /// Checks the code and that the line holds every part.
    ///
    /// # Panics
    /// When it does not.
    pub fn says(&self, code: i32, parts: &[&str]) {
        assert_eq!(self.code, code, "{self:?}");
        for part in parts {
            assert!(self.line.contains(part), "{part:?} is missing from {:?}", self.line);
        }
    }
}

impl Setup {
    /// A Manager with 64 MiB of DRAM and no SSD tier. See [`setup!`](crate::setup).
    ///
    /// # Panics
    /// When no folder can be made.
    pub fn new(program: &str, disk: &str) -> Self {
        Self {
            program: program.into(),
            runtime: tempfile::tempdir().unwrap(),
            disk: tempfile::tempdir_in(disk).unwrap(),
            dram: "64MiB".into(),
            ssd: false,
            arguments: Vec::new(),
            config: String::new(),
            under: Vec::new(),
            bare: false,
            default_socket: false,
        }
    }

    /// No flags but the socket's and those that follow: the rest is what `serve` does by itself.
    #[must_use]
    pub fn bare(mut self) -> Self {
        self.bare = true;
        self
    }

    /// Without `--socket`: where `serve` listens by itself, below a folder that is this setup's.
    #[must_use]
    pub fn at_default_socket(mut self) -> Self {
        self.default_socket = true;
        self
    }

    /// Runs the Manager by a command that confines it, such as `prlimit --nofile=16`.
    #[must_use]
    pub fn under(mut self, command: &[&str]) -> Self {
        self.under.extend(command.iter().map(OsString::from));
        self
    }

    /// More flags of `serve`. One that the setup would give itself replaces that.
    #[must_use]
    pub fn flags<A: Into<OsString> + Clone>(mut self, flags: &[A]) -> Self {
        self.arguments.extend(flags.iter().cloned().map(Into::into));
        self
    }

    /// Forgets the flags and lines of the configuration file, not the folders.
    pub fn again(&mut self) -> &mut Self {
        self.arguments.clear();
        self.config.clear();
        self.under.clear();
        self.ssd = false;
        self
    }

    /// Another pool size.
    #[must_use]
    pub fn dram(mut self, size: &str) -> Self {
        self.dram = size.into();
        self
    }

    /// An SSD tier of so many bytes.
    #[must_use]
    pub fn ssd(mut self, capacity: &str) -> Self {
        self.ssd = true;
        self.flag("--ssd-capacity", capacity)
    }

    /// An SSD tier of so many bytes on a disk that fails.
    #[must_use]
    pub fn ssd_on(self, disk: &FaultyDisk, capacity: &str) -> Self {
        let tier: [OsString; 2] = ["--ssd".into(), disk.path().join("tier").into()];
        self.flags(&tier).flag("--ssd-capacity", capacity)
    }

    /// One more flag of `serve`.
    #[must_use]
    pub fn flag(mut self, name: &str, value: &str) -> Self {
        self.arguments.extend([name.into(), value.into()]);
        self
    }

    /// Lines of the configuration file, for fields without a flag.
    #[must_use]
    pub fn config(mut self, lines: &str) -> Self {
        self.config.push_str(lines);
        self
    }

    /// Where the Manager listens.
    pub fn socket(&self) -> PathBuf {
        let name = if self.default_socket { "orbitkv/manager.sock" } else { "m.sock" };
        self.runtime.path().join(name)
    }

    /// The file of the SSD tier.
    pub fn ssd_file(&self) -> PathBuf {
        self.disk.path().join("tier")
    }

    /// Whether there is a tier, however it was asked for.
    fn has_ssd(&self) -> bool {
        let flag = |argument: &OsString| argument == "--ssd";
        self.ssd || self.arguments.iter().any(flag) || self.config.contains("[ssd]")
    }

    /// The program under test, for engine processes.
    pub fn program(&self) -> &Path {
        &self.program
    }

    /// Where they log.
    pub fn log_file(&self) -> PathBuf {
        self.runtime.path().join("log")
    }

    /// One call of the command line.
    ///
    /// # Panics
    /// When the program cannot be run.
    pub fn orbitkv(&self, arguments: &[&str]) -> Output {
        Command::new(&self.program).args(arguments).stdin(Stdio::null()).output().unwrap()
    }

    /// A call of the command line that must fail with `code` and one line that holds all `parts`.
    ///
    /// # Panics
    /// When it does not.
    pub fn fails(&self, arguments: &[&str], code: i32, parts: &[&str]) {
        let output = Command::new(&self.program)
            .args(arguments)
            .current_dir(self.disk.path())
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let words = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {words}");
        assert_eq!(words.trim_end().lines().count(), 1, "{arguments:?}: {words}");
        for part in parts {
            assert!(words.contains(part), "{arguments:?}: {part:?} is missing from {words:?}");
        }
    }

    /// `verify` of the stopped Manager's SSD file, which must find nothing wrong: its counts.
    ///
    /// # Panics
    /// When it fails.
    pub fn verify(&self) -> serde_json::Value {
        let (file, json) = (self.ssd_file(), self.disk.path().join("verify.json"));
        let output = Command::new(&self.program)
            .args(["verify", "--ssd"])
            .arg(file)
            .arg("--json")
            .arg(&json)
            .output()
            .unwrap();
        let words = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(0), "{words}");
        serde_json::from_slice(&fs::read(json).unwrap()).unwrap()
    }

    /// The command line of `serve`, to be run in [`folder`](Self::folder). Its log goes to a file.
    ///
    /// # Panics
    /// When the configuration file or the log cannot be written.
    pub fn command(&self) -> Command {
        let mut words = self.under.iter().map(OsString::as_os_str);
        let mut command = match words.next() {
            Some(first) => {
                let mut command = Command::new(first);
                command.args(words).arg(&self.program);
                command
            }
            None => Command::new(&self.program),
        };
        command.arg("serve");
        let mut default = |name: &str, value: &OsStr| {
            let wanted = !self.bare || ["--socket", "--config"].contains(&name);
            if wanted && !self.arguments.iter().any(|argument| argument == name) {
                command.arg(name).arg(value);
            }
        };
        default("--huge-pages", "off".as_ref());
        default("--device", "host".as_ref());
        if !self.default_socket {
            default("--socket", self.socket().as_os_str());
        }
        default("--dram", self.dram.as_ref());
        if self.ssd {
            default("--ssd", self.ssd_file().as_os_str());
        }
        if !self.config.is_empty() {
            fs::write(self.config_file(), &self.config).unwrap();
            default("--config", self.config_file().as_os_str());
        }
        // A file and not a pipe: nobody reads along.
        let log = File::options().create(true).append(true).open(self.log_file()).unwrap();
        command.args(&self.arguments).env_remove("XDG_RUNTIME_DIR");
        if self.default_socket {
            command.env("XDG_RUNTIME_DIR", self.runtime.path());
        }
        command.current_dir(self.disk.path()).stdin(Stdio::null()).stdout(Stdio::piped());
        command.stderr(log);
        command
    }

    /// A start that must be refused: one line besides the log, nothing on standard output, nothing
    /// left behind.
    ///
    /// # Panics
    /// When it starts, hangs, says more than one line or leaves something.
    pub fn refused(&self) -> Refusal {
        self.refused_by(|_| {})
    }

    /// [`refused`](Self::refused) after a last change to the command.
    ///
    /// # Panics
    /// As that.
    pub fn refused_by(&self, change: impl FnOnce(&mut Command)) -> Refusal {
        let before = self.names();
        let telemetry = self.telemetry_file().exists();
        let _new_log = fs::remove_file(self.log_file());
        let mut command = self.command();
        change(&mut command);
        let mut child = command.spawn().unwrap();
        let end = Instant::now() + PATIENCE;
        let status = loop {
            if let Some(status) = child.try_wait().unwrap() {
                break status;
            }
            if Instant::now() > end {
                let _killed = (child.kill(), child.wait());
                panic!("neither refused nor ended: {}", self.log());
            }
            thread::sleep(PAUSE);
        };
        let mut said = String::new();
        child.stdout.take().unwrap().read_to_string(&mut said).unwrap();
        assert_eq!(said, "", "a refused start has nothing to say on stdout");
        let all = self.log();
        // Lines of the log start with their time.
        let (log, lines): (Vec<_>, Vec<_>) = all.lines().partition(|line| line.starts_with("20"));
        let [line] = lines.as_slice() else { panic!("not one line: {all}") };
        assert!(line.starts_with("orbitkv: "), "{all}");
        assert_eq!(self.names(), before, "{all}");
        assert_eq!(self.telemetry_file().exists(), telemetry, "{all}");
        let code = status.code().unwrap_or_else(|| panic!("{status}: {all}"));
        Refusal { code, line: (*line).to_owned(), log: log.join("\n") }
    }

    /// Every name in the folders of this setup but the log and the configuration.
    ///
    /// # Panics
    /// When a folder cannot be read.
    pub fn names(&self) -> Vec<PathBuf> {
        let entries =
            |folder: &Path| fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        let ours = [self.log_file(), self.config_file()];
        let all = entries(self.runtime.path()).chain(entries(self.disk.path()));
        let mut names: Vec<_> = all.filter(|name| !ours.contains(name)).collect();
        names.sort();
        names
    }

    /// Where the telemetry of the socket lies while a Manager runs, and after one was killed.
    pub fn telemetry_file(&self) -> PathBuf {
        telemetry_file(&self.socket())
    }

    /// The folder of the socket, or of its folder.
    pub fn runtime(&self) -> &Path {
        self.runtime.path()
    }

    /// The folder on a disk that is the Manager's working folder.
    pub fn folder(&self) -> &Path {
        self.disk.path()
    }

    fn config_file(&self) -> PathBuf {
        self.runtime.path().join("config.toml")
    }

    /// What Managers of this setup logged so far.
    pub fn log(&self) -> String {
        fs::read_to_string(self.log_file()).unwrap_or_default()
    }

    /// Lines of that at level WARN.
    pub fn warnings(&self) -> Vec<String> {
        let log = self.log();
        let warned = log.lines().filter(|line| line.contains(" WARN "));
        // That the machine is busy is no finding here.
        warned.filter(|line| !line.contains("too busy")).map(str::to_owned).collect()
    }

    /// Where the bytes of an image, which the SSD file must hold once, begin there.
    ///
    /// # Panics
    /// When they are not there, or twice.
    pub fn place_of(&self, image: &[u8]) -> u64 {
        let file = File::open(self.ssd_file()).unwrap();
        let bytes = file.metadata().unwrap().len();
        let mut start = [0; 64];
        let mut places = (0..bytes).step_by(4096).filter(|&at| {
            file.read_exact_at(&mut start, at).unwrap();
            start == image[..64]
        });
        let at = places.next().expect("the image is on disk");
        assert_eq!(places.next(), None, "it is there once");
        at
    }

    /// Starts the Manager and waits until it is ready and has found again what is on SSD.
    ///
    /// # Panics
    /// When it does not become ready.
    pub fn start(self) -> Manager {
        self.start_by(|_| {})
    }

    /// [`start`](Self::start) after a last change to the command.
    ///
    /// # Panics
    /// When it does not become ready.
    pub fn start_by(self, change: impl FnOnce(&mut Command)) -> Manager {
        self.start_early_by(change).recovered()
    }

    /// Starts the Manager and waits until it is ready: what is on SSD may not be found yet.
    ///
    /// # Panics
    /// When it does not become ready.
    pub fn start_early(self) -> Manager {
        self.start_early_by(|_| {})
    }

    fn start_early_by(self, change: impl FnOnce(&mut Command)) -> Manager {
        let mut command = self.command();
        change(&mut command);
        command.arg("--stop-at-eof").stdin(Stdio::piped());
        let mut child = command.spawn().unwrap_or_else(|error| panic!("{command:?}: {error}"));
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        let mut ready = String::new();
        stdout.read_line(&mut ready).unwrap();
        let manager =
            Manager { child, stdout, ready: ready.trim_end().to_owned(), setup: Some(self) };
        let log = || manager.setup().log();
        assert!(ready.starts_with("ready "), "the Manager said {ready:?}: {}", log());
        manager
    }
}

/// A Manager that runs. Killed when dropped, so also when a test fails.
#[derive(Debug)]
pub struct Manager {
    child: Child,
    stdout: BufReader<ChildStdout>,
    ready: String,
    /// Taken by what ends the Manager in order.
    setup: Option<Setup>,
}

impl Manager {
    /// How it was started.
    ///
    /// # Panics
    /// Never: only the end of the Manager takes the setup.
    pub fn setup(&self) -> &Setup {
        self.setup.as_ref().expect("a running Manager has its setup")
    }

    /// The line that it printed when it was ready.
    pub fn ready(&self) -> &str {
        &self.ready
    }

    /// Where it listens.
    pub fn socket(&self) -> PathBuf {
        self.setup().socket()
    }

    /// An engine with pages of `model`, as many of its own as `pages`.
    ///
    /// # Panics
    /// When it is refused.
    pub fn attach(&self, model: &str, page_bytes: u64, pages: u32) -> Engine {
        Engine::attach(&self.socket(), namespace(model, page_bytes), pages)
    }

    /// Saves a chain and finds it again, from SSD where there is one, byte for byte.
    ///
    /// # Panics
    /// When a page is missing or wrong.
    pub fn round_trip(&self, engine: &mut Engine, chain: &[PageHash]) {
        engine.save_all(chain);
        if !self.inspect().ssd.is_empty() {
            self.evict();
        }
        assert_eq!(engine.restore_all(chain) as usize, chain.len());
    }

    /// What the inspection tool sees now.
    ///
    /// # Panics
    /// When nothing can be read.
    pub fn inspect(&self) -> Snapshot {
        inspect::read(&self.socket()).unwrap()
    }

    /// One series of the Manager's metrics.
    pub fn get(&self, metric: Metric) -> u64 {
        self.inspect().counters.get(metric)
    }

    /// Waits until what the inspection tool sees fulfils `is_so`.
    ///
    /// # Panics
    /// When that never comes.
    pub fn settle(&self, what: &str, is_so: impl Fn(&Snapshot) -> bool) -> Snapshot {
        self.look_until(what, |seen, _| is_so(seen))
    }

    /// [`settle`](Self::settle) by numbers that are younger than this call: a completion may be
    /// seen a moment before what it counts.
    fn settle_from_now(&self, what: &str, is_so: impl Fn(&Snapshot) -> bool) -> Snapshot {
        let called = Instant::now();
        self.look_until(what, |seen, looked| {
            // The age is rounded down.
            let age = Duration::from_millis(seen.manager.heartbeat_age_ms + 1);
            age < looked.duration_since(called) && is_so(seen)
        })
    }

    /// `is_so` also hears when the look at the numbers began.
    fn look_until(&self, what: &str, is_so: impl Fn(&Snapshot, Instant) -> bool) -> Snapshot {
        let end = Instant::now() + PATIENCE;
        loop {
            let looked = Instant::now();
            let seen = self.inspect();
            if is_so(&seen, looked) && seen.manager.torn.is_empty() {
                return seen;
            }
            assert!(Instant::now() < end, "never so: {what}; now {}", summary(&seen));
            thread::sleep(PAUSE);
        }
    }

    /// Waits until what is on SSD was found again, or could not be.
    ///
    /// # Panics
    /// When that never ends.
    #[must_use]
    pub fn recovered(self) -> Self {
        if !self.setup().has_ssd() {
            return self;
        }
        self.settle("nothing more is found on SSD", |seen| {
            !seen.ssd.iter().any(DeviceView::is_recovering)
        });
        self
    }

    /// What the inspection tool sees from now on: nothing of before this call.
    pub fn fresh(&self) -> Snapshot {
        self.settle_from_now("a heartbeat", |_| true)
    }

    /// Waits until a counter has come to `expected`, which it must never pass.
    ///
    /// # Panics
    /// When it passes or never comes.
    pub fn counted(&self, metric: Metric, expected: u64) {
        let seen =
            self.settle_from_now("the counter", |seen| seen.counters.get(metric) >= expected);
        assert_eq!(seen.counters.get(metric), expected, "{metric:?}");
    }

    /// Waits until a gauge has come to rest at `expected`.
    ///
    /// # Panics
    /// When it never does.
    pub fn rests_at(&self, metric: Metric, expected: u64) {
        self.settle_from_now(&format!("{metric:?} is {expected}"), |seen| {
            seen.counters.get(metric) == expected
        });
    }

    /// Waits until so many sessions are attached.
    ///
    /// # Panics
    /// When that never comes.
    pub fn has_sessions(&self, expected: u64) {
        self.rests_at(Metric::SessionsAttached, expected);
    }

    /// Waits until nobody holds or waits for anything: no lease, no operation, no budget, no pin.
    ///
    /// # Panics
    /// When that never comes.
    pub fn settle_empty(&self) -> Snapshot {
        self.settle_from_now("nothing is held", |seen| {
            let zero = [
                Metric::LeasesHeld,
                Metric::LeasedBytes,
                Metric::OperationsRunning,
                Metric::BudgetQueryBytes,
                Metric::BudgetSpeculativeBytes,
                Metric::BudgetWaitingQueries,
                Metric::PoolPinnedBytes,
                Metric::PoolDrainingBytes,
                Metric::SpillWaitingPages,
            ];
            zero.iter().all(|&metric| seen.counters.get(metric) == 0)
        })
    }

    /// `orbitkv evict --tier dram`: what is not leased is on SSD only, or gone without a tier.
    ///
    /// # Panics
    /// When it fails.
    pub fn evict(&self) {
        let socket = self.socket();
        let socket = socket.to_str().unwrap();
        let output = self.setup().orbitkv(&["evict", "--tier", "dram", "--socket", socket]);
        let words = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(0), "{words}");
    }

    /// Whether it has not ended.
    ///
    /// # Panics
    /// When the system cannot say.
    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// Its process.
    pub fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Ends it by SIGTERM, which must succeed; the setup can start the next one.
    ///
    /// # Panics
    /// When it does not end in order.
    pub fn stop(self) -> Setup {
        self.ask_to_stop();
        self.ended()
    }

    /// Sends SIGTERM.
    ///
    /// # Panics
    /// When it cannot be signalled.
    pub fn ask_to_stop(&self) {
        rustix::process::kill_process(self.pid(), Signal::TERM).unwrap();
    }

    /// Waits until one that was asked to stop has ended; the setup can start the next one.
    ///
    /// # Panics
    /// When it does not end in order.
    pub fn ended(mut self) -> Setup {
        let mut rest = String::new();
        self.stdout.read_to_string(&mut rest).unwrap();
        let status = self.child.wait().unwrap();
        let setup = self.setup.take().expect("a running Manager has its setup");
        let log = setup.log();
        assert_eq!(status.code(), Some(0), "{log}");
        assert_eq!(rest, "", "one line on standard output");
        setup
    }

    /// Ends it by SIGKILL; the setup can start the next one.
    ///
    /// # Panics
    /// When it cannot be killed.
    pub fn kill(mut self) -> Setup {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        self.setup.take().expect("a running Manager has its setup")
    }
}

/// What a failure needs to know of a snapshot: everything but the latencies, the configuration
/// and the many zeros.
fn summary(seen: &Snapshot) -> String {
    let counters = serde_json::to_value(&seen.counters).unwrap_or_default();
    let counters = counters.as_object().into_iter().flatten();
    let moved = counters.filter(|(_, value)| value.as_f64() != Some(0.0));
    let moved: Vec<_> = moved.map(|(name, value)| format!("{name}={value}")).collect();
    let Snapshot { manager, sessions, budget, operations, leases, pages, .. } = seen;
    format!(
        "{manager:?}\n{sessions:?}\n{budget:?}\n{operations:?}\n{leases:?}\n{pages:?}\n{}",
        moved.join("\n")
    )
}

impl Drop for Manager {
    fn drop(&mut self) {
        let Some(setup) = self.setup.take() else { return };
        let ended = self.child.try_wait();
        let _killed = self.child.kill();
        let _reaped = self.child.wait();
        if thread::panicking() {
            let log = setup.log();
            eprintln!("the Manager ({ended:?}) logged:\n{log}");
        }
    }
}

impl Drop for Setup {
    fn drop(&mut self) {
        // A killed Manager leaves it for the inspection tool; nobody starts here again.
        let _absent = fs::remove_file(self.telemetry_file());
    }
}

/// Where the telemetry of a socket lies.
pub fn telemetry_file(socket: &Path) -> PathBuf {
    use orbitkv_shm_protocol::telemetry::{resolved_socket, segment_name};
    let uid = rustix::process::geteuid().as_raw();
    let name = segment_name(uid, &resolved_socket(socket));
    Path::new("/dev/shm").join(&name[1..])
}
