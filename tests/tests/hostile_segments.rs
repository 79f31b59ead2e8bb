//! Clients that resize and punch the memory they share, and clients that die at the worst moments:
//! between any two system calls of attaching, and between publishing a request and waking the
//! Manager.
//!
//! Fault model: a client process can call anything on the descriptors that it was given and can
//! end by SIGKILL at any moment.
#![allow(unsafe_code, reason = "ptrace stops a client at each of its system calls")]

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::ptr;

use orbitkv_shm_protocol::ids::{RegionId, ScopeId};
use orbitkv_shm_protocol::record::{PageRange, QueryMode, Request, RequestBody};
use orbitkv_shm_protocol::telemetry::{CloseReason, Metric};
use orbitkv_tests::manager::Manager;
use orbitkv_tests::raw::{GEOMETRY, Raw, operation};
use orbitkv_tests::setup;
use orbitkv_tests::victim::{PAGE, Traffic, Victim, sealed_memory};
use rustix::fs::FallocateFlags;
use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitOptions};

const CLOSED_BY_FAULT: Metric = Metric::SessionsClosed(CloseReason::PeerFault);
const PUNCH: FallocateFlags = FallocateFlags::PUNCH_HOLE.union(FallocateFlags::KEEP_SIZE);

/// A session with one namespace and one region of sixteen pages.
struct Client {
    raw: Raw,
    memory: File,
    scope: ScopeId,
    region: RegionId,
}

impl Client {
    fn attach(manager: &std::path::Path) -> Self {
        let raw = Raw::attach(manager);
        let scope = raw.define("segments");
        let bytes = 16 * PAGE as u64;
        let memory = sealed_memory(bytes);
        let handle = raw.register_memfd(&memory, bytes);
        let region = raw.register_pages(scope, handle, 0, 16);
        Self { raw, memory, scope, region }
    }

    fn request(&self, index: u32, generation: u32, body: RequestBody) -> Request {
        let range = match body {
            RequestBody::Ping => PageRange::default(),
            _ => PageRange { start: 0, len: 16 },
        };
        Request { operation: operation(index, generation), deadline_ms: 0, range, body }
    }

    fn save(&self) -> RequestBody {
        RequestBody::Save { region: self.region, fence: None }
    }
}

/// Goal: no descriptor that a client shares with the Manager can be resized while it is in use, nor
/// holes punched into what only the Manager writes; holes in its own are its own loss.
#[test]
fn resizing_and_punching_shared_memory_harms_nobody_else() {
    let mut manager = setup!().dram("16MiB").start();
    let traffic = Traffic::start(&manager.socket());
    let mut random = fastrand::Rng::with_seed(11);
    for round in 1..40 {
        let mut client = Client::attach(&manager.socket());
        let (submission, completion) = (client.raw.submission_copy(), client.raw.completion_copy());
        for sent in 1..9_u64 {
            client.raw.fill_table(round * 9 + sent as u32);
            let record = client.raw.record(&client.request(sent as u32, 1, client.save()));
            client.raw.submit(&[record]);
            if sent == 1 {
                // From here on an index of zero is a step back.
                client.raw.must_publish(1);
            }
            for (shared, may_grow) in
                [(&submission, false), (&completion, false), (&client.memory, true)]
            {
                let bytes = shared.metadata().unwrap().len();
                for smaller in [0, bytes / 2, bytes - 4096] {
                    assert_eq!(rustix::fs::ftruncate(shared, smaller), Err(Errno::PERM));
                }
                let grown = rustix::fs::ftruncate(shared, bytes * 2);
                assert_eq!(grown, if may_grow { Ok(()) } else { Err(Errno::PERM) });
            }
            assert_eq!(rustix::fs::fallocate(&completion, PUNCH, 0, 4096), Err(Errno::PERM));
            assert_eq!(rustix::io::pwrite(&completion, &[1; 8], 0x1000), Err(Errno::PERM));
            rustix::fs::fallocate(&client.memory, PUNCH, 0, 16 * PAGE as u64).unwrap();
            let bytes = GEOMETRY.submission_bytes() as u64;
            let (offset, length) = match round % 3 {
                // The table only: its rings stay in order.
                0 => (GEOMETRY.page_table_offset() as u64, bytes),
                1 => (random.u64(..bytes) & !4095, 4096),
                _ => (0, bytes),
            };
            let length = length.min(bytes - offset);
            rustix::fs::fallocate(&submission, PUNCH, offset, length).unwrap();
        }
        match round % 3 {
            0 => client.raw.must_publish(8),
            1 => client.raw.must_be_closed_or_quiet(),
            // The index is zero, and was not.
            _ => client.raw.must_be_closed(),
        }
        assert!(manager.is_running());
    }
    traffic.must_go_on();
    manager.has_sessions(1);
    traffic.end();
    manager.has_sessions(0);
    manager.settle_empty();
    let faults = manager.get(CLOSED_BY_FAULT);
    assert!(faults >= 13, "{faults} sessions were closed for their holes");
    manager.stop();
}

/// Goal: a record whose wake never came is found all the same.
#[test]
fn a_request_that_nobody_rang_for_is_found() {
    let manager = setup!().dram("16MiB").start();
    let mut client = Client::attach(&manager.socket());
    for number in 1..6 {
        client.raw.must_find_the_manager_asleep();
        let record = client.raw.record(&client.request(0, number, RequestBody::Ping));
        client.raw.publish_silently(&[record]);
        client.raw.must_publish(number.into());
        client.raw.set_completion_head(number.into());
    }
    manager.stop();
}

const MUTE_SOCKET: &str = "ORBITKV_TEST_MUTE_SOCKET";

/// Not a test by itself: the process of the test below. It leases sixteen pages, publishes more
/// requests while the Manager sleeps, and ends before it can wake it.
#[test]
fn mute_client() {
    let Some(socket) = std::env::var_os(MUTE_SOCKET).map(PathBuf::from) else { return };
    let mut client = Client::attach(&socket);
    client.raw.fill_table(1);
    let query = RequestBody::Query { scope: client.scope, mode: QueryMode::Demand };
    for (number, body) in [(1, client.save()), (2, query)] {
        let record = client.raw.record(&client.request(0, number, body));
        client.raw.submit(&[record]);
        client.raw.must_publish(number.into());
        client.raw.set_completion_head(number.into());
    }
    let mut records = Vec::new();
    for (index, body) in (1..).zip([client.save(), query, RequestBody::Ping]) {
        let mut record = client.raw.record(&client.request(index, 1, body));
        record.sequence += u64::from(index) - 1;
        // Ranges in flight must not overlap.
        if index == 2 {
            (record.range_start, record.range_len) = (16, 1);
        }
        records.push(record);
    }
    client.raw.must_find_the_manager_asleep();
    client.raw.publish_silently(&records);
    rustix::process::kill_process(rustix::process::getpid(), Signal::KILL).unwrap();
}

/// Goal: a client that dies between publishing and waking is noticed, and all that it held comes
/// back: its lease, what its last requests began, its segments.
#[test]
fn a_client_that_dies_before_its_wake_leaves_nothing_behind() {
    let manager = setup!().dram("16MiB").start();
    for round in 1..9 {
        let ended = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "mute_client", "--nocapture"])
            .env(MUTE_SOCKET, manager.socket())
            .output()
            .unwrap();
        let signal = ended.status.signal();
        assert_eq!(signal, Some(libc::SIGKILL), "{}", String::from_utf8_lossy(&ended.stdout));
        manager.counted(Metric::SessionsOpened, round);
        manager.has_sessions(0);
        manager.settle_empty();
    }
    Victim::attach(&manager.socket(), "afterwards").round();
    manager.stop();
}

/// An engine process that stops at its system calls. Killed when dropped.
struct Traced {
    child: Child,
    /// Stays open until it is gone: its end would be an order.
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Traced {
    /// Starts an engine that is about to read which Manager to attach to, and tells it.
    fn start(manager: &Manager) -> Result<Self, std::io::Error> {
        let mut child = Command::new(manager.setup().program())
            .arg("engine")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()?;
        let orders = child.stdin.take().unwrap();
        let answers = BufReader::new(child.stdout.take().unwrap());
        let mut traced = Self { child, orders, answers };
        let pid = traced.pid();
        // The first stop is asked for before it can read its order.
        trace(libc::PTRACE_SEIZE, pid, libc::PTRACE_O_TRACESYSGOOD as usize)?;
        trace(libc::PTRACE_INTERRUPT, pid, 0)?;
        let _stopped = rustix::process::waitpid(Some(pid), WaitOptions::empty())?;
        writeln!(
            traced.orders,
            "{} {:032x} attach 4096 0 1 16 Sealed",
            manager.socket().display(),
            1
        )?;
        Ok(traced)
    }

    fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Lets it run to its next stop at a system call; false when it has attached and reads on.
    fn step(&mut self) -> bool {
        loop {
            trace(libc::PTRACE_SYSCALL, self.pid(), 0).unwrap();
            let status = rustix::process::waitpid(Some(self.pid()), WaitOptions::empty());
            let (_, status) = status.unwrap().expect("a stop");
            assert!(!status.exited() && !status.signaled(), "the engine ended: {status:?}");
            // Other stops are those of signals and of the first interrupt.
            if status.stopping_signal() == Some(libc::SIGTRAP | 0x80) {
                return !self.has_said_so();
            }
        }
    }

    /// Whether the engine has said that it is attached.
    fn has_said_so(&mut self) -> bool {
        let stdout = self.answers.get_ref();
        let mut polled = [rustix::event::PollFd::new(stdout, rustix::event::PollFlags::IN)];
        let now = rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 };
        rustix::event::poll(&mut polled, Some(&now)).unwrap() > 0 && {
            let mut line = String::new();
            self.answers.read_line(&mut line).unwrap();
            assert_eq!(line, "attached\n");
            true
        }
    }
}

impl Drop for Traced {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn trace(request: libc::c_uint, pid: Pid, data: usize) -> Result<(), std::io::Error> {
    let address = ptr::null_mut::<libc::c_void>();
    let data = ptr::without_provenance_mut::<libc::c_void>(data);
    // SAFETY: these requests read and write no memory of either process.
    let done = unsafe { libc::ptrace(request, pid.as_raw_nonzero().get(), address, data) };
    if done == -1 { Err(std::io::Error::last_os_error()) } else { Ok(()) }
}

/// Goal: an engine that is killed at any system call of its attach, half-made segments included,
/// holds nobody and leaves nothing. Method: one engine a step, killed there, beside two that work.
#[test]
fn an_engine_that_is_killed_at_any_step_of_attaching_holds_nobody() {
    let mut manager = setup!().dram("16MiB").start();
    match Traced::start(&manager) {
        Ok(_) => {}
        Err(error) => {
            println!("did not run: this system forbids ptrace of a child: {error}");
            return;
        }
    }
    let busy = ["one", "other"].map(|model| Traffic::of(&manager.socket(), model));
    let mut steps = 0;
    loop {
        let mut engine = Traced::start(&manager).unwrap();
        let attached = (0..=steps).any(|_| !engine.step());
        drop(engine);
        assert!(manager.is_running(), "after {steps} steps");
        steps += 1;
        if steps % 16 == 0 || attached {
            busy.iter().for_each(Traffic::must_go_on);
        }
        if attached {
            break;
        }
        assert!(steps < 2_000, "attaching never ends");
    }
    println!("killed at {steps} stops");
    assert!(steps > 30, "{steps} stops are no attach");
    Victim::attach(&manager.socket(), "afterwards").round();
    manager.has_sessions(2);
    assert!(busy.map(Traffic::end).iter().all(|rounds| *rounds > 0));
    manager.has_sessions(0);
    manager.settle_empty();
    let opened = manager.get(Metric::SessionsOpened);
    assert!(opened > 3, "some died with a session: {opened}");
    manager.stop();
}
