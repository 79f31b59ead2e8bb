//! What a machine may lack: shared memory, DRAM, huge pages, locked memory, descriptors, threads,
//! disk. It is refused at the start with numbers, or served without and said so; never a SIGBUS, a
//! panic or an OOM kill later.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use orbitkv_engine::{Code, Connect, ConnectError, PageOutcome, QueryMode, Refusal, Status};
use orbitkv_shm_protocol::telemetry::{Metric, SsdFault, TELEMETRY_BYTES};
use orbitkv_tests::confine::{Mount, in_private_mounts, without_huge_pages};
use orbitkv_tests::engine::{Engine, Shape, Way, blocks, hashes, namespace};
use orbitkv_tests::manager::Manager;
use orbitkv_tests::program::Program;
use orbitkv_tests::prometheus;
use orbitkv_tests::setup;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// Saves, evicts and restores a few pages: whatever it runs on, the bytes are right.
fn round_trip(manager: &Manager, sequence: u64) {
    let mut engine = manager.attach("round", 64 * KIB, 16);
    manager.round_trip(&mut engine, &hashes(sequence, 0..16));
}

/// Goal: a /dev/shm that cannot hold what the Manager needs is found at the start, with path, both
/// numbers and the fix, and one that just can is enough for a pool and segments of any size: no
/// SIGBUS, ever (RES-01). Method: a small tmpfs over /dev/shm; 1 GiB of pool and a session of over
/// 65 MiB under one of 64 MiB.
#[test]
fn res_01_dev_shm_too_small_is_refused_at_start() {
    in_private_mounts(|| {
        let shm = Path::new("/dev/shm");
        let mut setup = setup!();
        {
            let _small = Mount::tmpfs(64 * KIB, shm);
            let needed = format!("needs {TELEMETRY_BYTES} bytes of /dev/shm");
            let parts = [&*needed, "65536 are free", "remount,size=", "--shm-size"];
            setup.refused().says(3, &parts);
            assert_eq!(fs::read_dir(shm).unwrap().count(), 0);
        }
        let _enough = Mount::tmpfs(64 * MIB, shm);
        setup = setup.dram("1GiB");
        let manager = setup.start();
        let connect = Connect::new(manager.socket()).ring_capacity(4096).page_entries(1 << 20);
        let spec = namespace("large", 64 * KIB);
        let mut engine = Engine::connect(&connect, spec, 64, Way::Sealed, Shape::Contiguous);
        let pages = hashes(1, 0..64);
        engine.save_all(&pages);
        assert_eq!(engine.restore_all(&pages), 64);
        // Pool and segments lie elsewhere.
        assert_eq!(fs::read_dir(shm).unwrap().count(), 1);
        drop(engine);
        manager.stop();
    });
}

/// Goal: a /dev/shm that fills up beside a Manager harms neither it nor its clients: what it needs
/// there was reserved (RES-01).
#[test]
fn res_01_a_full_dev_shm_harms_nobody_afterwards() {
    in_private_mounts(|| {
        let shm = Path::new("/dev/shm");
        let _small = Mount::tmpfs(MIB, shm);
        let manager = setup!().start();
        let mut rest = File::create(shm.join("rest")).unwrap();
        while rest.write(&[1; 4096]).is_ok_and(|bytes| bytes > 0) {}
        for sequence in 0..4 {
            round_trip(&manager, sequence);
        }
        manager.counted(Metric::SaveStoredPages, 64);
        // The next one is refused until there is room.
        let second = setup!();
        second.refused().says(3, &["/dev/shm", "0 are free"]);
        drop(rest);
        fs::remove_file(shm.join("rest")).unwrap();
        second.start().stop();
        manager.stop();
        assert_eq!(fs::read_dir(shm).unwrap().count(), 0);
    });
}

/// Goal: more DRAM than the host or the control group has is refused with both numbers before a
/// page is touched, instead of an OOM kill; the default fits the control group.
#[test]
fn more_dram_than_there_is_is_refused_instead_of_an_oom_kill() {
    let setup = setup!().dram("1TiB");
    let needed = (1_u64 << 40) + 64 * MIB;
    let parts = ["pool needs", &needed.to_string(), "the host has", "available", "lower --dram"];
    setup.refused().says(3, &parts);
    // One that the address space could not even hold is out of range by its text.
    setup!().dram("17TiB").refused().says(2, &["--dram", "2MiB to 16TiB"]);

    let Some(group) = MemoryGroup::new(256 * MIB) else { return };
    let inside = group.entry();
    let inside: Vec<_> = inside.iter().map(String::as_str).collect();
    let setup = setup!().dram("512MiB").under(&inside);
    let needed = (512 + 64) * MIB;
    let parts = ["pool needs", &needed.to_string(), "the control group has", "lower --dram"];
    let refusal = setup.refused();
    refusal.says(3, &parts);
    let has = refusal.line.split(" has ").nth(1).and_then(|rest| rest.split(' ').next());
    let has: u64 = has.and_then(|word| word.parse().ok()).unwrap_or_else(|| panic!("{refusal:?}"));
    assert!((128 * MIB..=256 * MIB).contains(&has), "{refusal:?}");
    let manager = setup!().dram("64MiB").under(&inside).start();
    round_trip(&manager, 1);
    manager.stop();
    // Without --dram: a quarter of what the group has, not of what the host has.
    let manager = setup!().bare().under(&inside).start();
    let capacity = manager.fresh().counters.get(Metric::PoolCapacityBytes);
    assert!((32 * MIB..=64 * MIB).contains(&capacity), "{capacity}");
    manager.stop();
}

/// A control group of version 1 or 2 with a memory limit. Removed when dropped.
struct MemoryGroup(PathBuf);

impl MemoryGroup {
    fn new(bytes: u64) -> Option<Self> {
        let name = format!("orbitkv-test-{}", std::process::id());
        let v1 = Path::new("/sys/fs/cgroup/memory");
        let (folder, limit) = if v1.is_dir() {
            (v1.join(name), "memory.limit_in_bytes")
        } else {
            (Path::new("/sys/fs/cgroup").join(name), "memory.max")
        };
        let made = fs::create_dir(&folder);
        let group = Self(folder);
        if made.is_err() || fs::write(group.0.join(limit), bytes.to_string()).is_err() {
            eprintln!("not run: no control group with a memory limit can be made here");
            return None;
        }
        Some(group)
    }

    /// The command that runs another one inside.
    fn entry(&self) -> [String; 4] {
        let enter = format!("echo $$ > {}/cgroup.procs && exec \"$@\"", self.0.display());
        ["sh".into(), "-c".into(), enter, "sh".into()]
    }
}

impl Drop for MemoryGroup {
    fn drop(&mut self) {
        let end = Instant::now() + Duration::from_secs(5);
        while fs::remove_dir(&self.0).is_err() && self.0.exists() && Instant::now() < end {
            thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Goal: with a memlock limit far below the pool the Manager runs without registered buffers and
/// says so in log, metrics and inspection (RES-03). Method: 64 KiB of memlock and no CAP_IPC_LOCK.
#[test]
fn res_03_too_little_memlock_is_said_once_and_shown_everywhere() {
    let confined = [
        "setpriv",
        "--bounding-set",
        "-ipc_lock",
        "--inh-caps",
        "-ipc_lock",
        "prlimit",
        "--memlock=65536",
    ];
    let setup = setup!().dram("1GiB").ssd("64MiB").flag("--http", "0").under(&confined);
    let manager = setup.start();
    let said = manager.setup().warnings();
    assert_eq!(said.len(), 1, "{said:?}");
    for part in [
        "not registered",
        "needed_bytes=2147483648",
        "memlock_soft_bytes=\"65536\"",
        "memlock_hard_bytes=\"65536\"",
        "ulimit -l",
        "CAP_IPC_LOCK",
    ] {
        assert!(said[0].contains(part), "{part:?} is missing from {}", said[0]);
    }
    let seen = manager.fresh();
    assert_eq!((seen.ssd[0].engine, seen.ssd[0].registered), ("uring", false));
    let metrics = prometheus::get(&seen.manager.http.unwrap(), "/metrics").body;
    let line = metrics.lines().find(|line| line.starts_with("orbitkv_ssd_device_registered{"));
    assert!(line.is_some_and(|line| line.ends_with(" 0")), "{line:?}");
    round_trip(&manager, 3);
    manager.stop();
    // Whom no memlock binds (root), it says nothing.
    let manager = setup!().ssd("64MiB").start();
    assert!(manager.fresh().ssd[0].registered);
    assert_eq!(manager.setup().warnings(), [""; 0]);
    manager.stop();
}

/// Goal: a limit of descriptors without room for one session is refused, one with room for a few is
/// warned about, with the numbers.
#[test]
fn too_few_descriptors_are_refused_or_warned_of() {
    for limit in [6, 8, 11, 14] {
        let confine = format!("--nofile={limit}");
        let setup = setup!().under(&["prlimit", &confine]);
        let refusal = setup.refused();
        assert_eq!(refusal.code, 3, "{refusal:?}");
        let told = refusal.line.contains("limit of open descriptors")
            || refusal.line.contains("os error 24");
        assert!(told && !refusal.line.contains("panicked"), "{refusal:?}");
        let setup = setup.ssd("64MiB");
        assert_eq!(setup.refused().code, 3);
    }
    let setup = setup!().under(&["prlimit", "--nofile=14"]);
    setup
        .refused()
        .says(3, &["limit of open descriptors is 14", "needs", "ulimit -n", "LimitNOFILE"]);
    let manager = setup!().under(&["prlimit", "--nofile=64"]).start();
    let said = manager.setup().warnings();
    assert_eq!(said.len(), 1, "{said:?}");
    for part in ["limit=64", "sessions_max=64", "ulimit -n", "LimitNOFILE"] {
        assert!(said[0].contains(part), "{part:?} is missing from {}", said[0]);
    }
    round_trip(&manager, 1);
    manager.stop();
    // A soft limit is raised to the hard one.
    let manager = setup!().under(&["prlimit", "--nofile=16:1024"]).start();
    assert_eq!(manager.setup().warnings(), [""; 0]);
    manager.stop();
}

/// Goal: a limit of file sizes never ends the Manager by a signal. A tier that is longer is refused
/// at the start, with both numbers and the fix, a file that was there included; a client whose
/// segments are longer is refused, and those that fit are served. Method: limits of half the tier,
/// and of a third of the segments that a client asks for by default.
#[test]
fn a_limit_of_file_sizes_is_an_error_and_not_the_end() {
    let confine = ["prlimit", "--fsize=33554432"];
    let refused = ["longer than 33554432 bytes", "67108864", "ulimit -f", "--ssd-capacity"];
    let mut setup = setup!().ssd("64MiB").under(&confine);
    setup.refused().says(3, &refused);
    assert!(!setup.ssd_file().exists());
    setup.again();
    let setup = setup.ssd("64MiB").start().stop().under(&confine);
    setup.refused().says(3, &refused);
    assert!(setup.ssd_file().exists());
    let mut manager = setup!().under(&["prlimit", "--fsize=1048576"]).start();
    let large = Connect::new(manager.socket()).page_entries(65_536);
    large.connect().expect_err("3 MiB of page entries in a file of 1 MiB");
    assert!(manager.is_running());
    let small = Connect::new(manager.socket()).ring_capacity(64).page_entries(1024);
    drop(small.connect().unwrap());
    manager.stop();
}

/// Goal: clients that use up all descriptors of the Manager harm only those that come later: no
/// session is lost, nothing spins, few lines are logged, and it goes on when they leave. Method: a
/// limit of 64 and as many connections as fit and more.
#[test]
fn descriptors_used_up_by_clients_harm_no_session() {
    let limits = "[limits]\nsessions = 127\n[time]\nhandshake_timeout = \"60s\"\n";
    let manager = setup!().under(&["prlimit", "--nofile=64"]).config(limits).start();
    let mut engine = manager.attach("first", 16 * KIB, 8);
    let mut round = 0;
    let mut goes_on = |engine: &mut Engine| {
        round += 1;
        let pages = hashes(round, 0..8);
        engine.save_all(&pages);
        assert_eq!(engine.restore_all(&pages), 8);
    };
    goes_on(&mut engine);
    // Sessions that stay, until the Manager has no descriptor for another.
    let mut sessions = Vec::new();
    let refused = loop {
        let connect = Connect::new(manager.socket()).timeout(Duration::from_millis(500));
        match connect.connect() {
            Ok(client) => sessions.push(client),
            Err(refused) => break refused,
        }
        assert!(sessions.len() < 64, "64 descriptors do not hold 64 sessions");
    };
    let named = match &refused {
        ConnectError::Refused { refusal: Refusal::NoResources, .. } => true,
        ConnectError::Refused { .. } => false,
        _ => true,
    };
    assert!(named, "{refused:?}");
    // Connections that say nothing, more than fit.
    let crowd: Vec<_> = (0..40).map_while(|_| connect_silently(&manager.socket())).collect();
    goes_on(&mut engine);
    let ticks = cpu_ticks(&manager);
    thread::sleep(Duration::from_secs(2));
    let busy = cpu_ticks(&manager) - ticks;
    // A hundred ticks are a second of one core.
    assert!(busy < 100, "{busy} ticks in two seconds: it spins");
    for _ in 0..10 {
        goes_on(&mut engine);
    }
    let lines = manager.setup().log().lines().count();
    assert!(lines < 200, "{lines} lines");
    drop((crowd, sessions));
    manager.settle("the others have left", |seen| seen.sessions.len() == 1);
    goes_on(&mut engine);
    let mut late = manager.attach("late", 16 * KIB, 8);
    late.save_all(&hashes(99, 0..8));
    drop((engine, late));
    manager.stop();
}

fn connect_silently(path: &Path) -> Option<rustix::fd::OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    // A full backlog is as good as no descriptor.
    rustix::net::connect(&socket, &SocketAddrUnix::new(path).unwrap()).ok()?;
    Some(socket)
}

/// Processor time of the Manager so far, in ticks.
fn cpu_ticks(manager: &Manager) -> u64 {
    let stat =
        fs::read_to_string(format!("/proc/{}/stat", manager.pid().as_raw_nonzero())).unwrap();
    let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

/// Goal: a system that gives no threads refuses the start in one line: no panic, nothing left.
/// Method: another user, who may have so many threads, until there are enough.
#[test]
fn too_few_threads_are_refused() {
    let program = Program::copy(setup!().program());
    // The scan of a blocking engine alone has 64.
    for (refused, threads) in (1..24).chain([32, 64, 80, 400]).enumerate() {
        let setup = setup!();
        // A user that runs nothing else; its telemetry has another name than the harness knows.
        let owner = Some(rustix::fs::Uid::from_raw(UNUSED_UID));
        rustix::fs::chown(setup.folder(), owner, None).unwrap();
        let mut command = Command::new("setpriv");
        command.args(["--reuid", &UNUSED_UID.to_string(), "--clear-groups", "prlimit"]);
        command.arg(format!("--nproc={threads}")).arg(program.path());
        command.args(["serve", "--dram", "64MiB", "--huge-pages", "off", "--socket", "m.sock"]);
        command.args(["--ssd", "tier", "--ssd-capacity", "64MiB", "--ssd-engine", "blocking"]);
        command.args(["--http", "0", "--stop-at-eof"]).current_dir(setup.folder());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.env_remove("XDG_RUNTIME_DIR").spawn().unwrap();
        let mut said = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut said).unwrap();
        // The end of its input stops the one that serves.
        let output = child.wait_with_output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!text.contains("panicked"), "{threads} threads: {text}");
        if said.starts_with("ready ") {
            assert_eq!(output.status.code(), Some(0), "{threads} threads: {text}");
            assert!(refused > 0, "one thread was enough");
            return;
        }
        assert_eq!(output.status.code(), Some(3), "{threads} threads: {text}");
        let lines: Vec<_> = text.lines().filter(|line| line.starts_with("orbitkv: ")).collect();
        assert_eq!(lines.len(), 1, "{threads} threads: {text}");
        let named = ["Resource temporarily unavailable", "ulimit -u"];
        assert!(named.iter().all(|part| lines[0].contains(part)), "{text}");
        assert_eq!(fs::read_dir(setup.folder()).unwrap().count(), 0, "{threads} threads: {text}");
    }
    panic!("never enough threads");
}

const UNUSED_UID: u32 = 64_123;

/// Bytes that a file system has free.
fn free(folder: &Path) -> u64 {
    let stat = rustix::fs::statvfs(folder).unwrap();
    stat.f_bavail * stat.f_frsize
}

/// Fills a file system to the last byte.
fn fill(folder: &Path) -> PathBuf {
    let path = folder.join("rest");
    let mut rest = File::create(&path).unwrap();
    for bytes in [MIB, 4 * KIB, 1] {
        let block = vec![1; bytes as usize];
        loop {
            match rest.write(&block) {
                Ok(written) if written > 0 => {}
                Ok(_) => break,
                Err(error) if error.kind() == ErrorKind::StorageFull => break,
                Err(error) => panic!("{error}"),
            }
        }
        rest.sync_all().unwrap();
    }
    path
}

/// Goal: a disk too small for the file refuses the start with both numbers, and is not filled for
/// nothing; what is preallocated can meet no full disk later (RES-05). A tenth of the sizes of the
/// scenario.
#[test]
fn res_05_a_full_disk_is_refused_at_start_or_of_no_concern() {
    in_private_mounts(|| {
        let mut setup = setup!();
        let disk = setup.folder().join("disk");
        fs::create_dir(&disk).unwrap();
        let _disk = Mount::disk(&setup.folder().join("image"), 100 * MIB, &[], &disk);
        let before = free(&disk);
        setup = setup.flags(&["--ssd", "disk/tier", "--ssd-capacity", "200MiB"]);
        let needed = (200 * MIB).to_string();
        let parts = ["disk/tier", &needed, &before.to_string(), "free space", "--ssd-capacity"];
        setup.refused().says(3, &parts);
        assert_eq!(free(&disk), before);
        // Two files of which only the first fits.
        setup.again();
        setup = setup.flags(&["--ssd", "disk/a", "--ssd", "disk/b", "--ssd-capacity", "120MiB"]);
        setup.refused().says(3, &["disk/b", &(60 * MIB).to_string(), "free"]);
        assert_eq!(free(&disk), before);

        setup.again();
        setup = setup.flags(&["--ssd", "disk/tier", "--ssd-capacity", "60MiB"]);
        let manager = setup.dram("32MiB").start();
        assert!(manager.fresh().ssd[0].preallocated);
        fill(&disk);
        let mut engine = manager.attach("full", 256 * KIB, 32);
        for sequence in 0..20 {
            engine.save_all(&hashes(sequence, 0..64));
        }
        manager.evict();
        assert_eq!(errors(&manager), 0);
        let seen = manager.fresh();
        assert_eq!((seen.manager.state.label(), seen.ssd[0].health), ("ready", "healthy"));
        assert!(seen.counters.get(Metric::SsdWrittenPages) > 240, "the file was written over");
        assert!(
            (0..20).map(|sequence| engine.restore_all(&hashes(sequence, 0..64))).sum::<u32>() > 150
        );
        drop(engine);
        // Growing on the full disk is refused, and the file keeps its length.
        let mut setup = manager.stop();
        setup.again();
        setup = setup.flags(&["--ssd", "disk/tier", "--ssd-capacity", "80MiB"]);
        setup.refused().says(3, &["disk/tier", "0 free"]);
        assert_eq!(disk.join("tier").metadata().unwrap().len(), 60 * MIB);
        setup.again();
        let manager = setup.flags(&["--ssd", "disk/tier", "--ssd-capacity", "60MiB"]).start();
        assert!(manager.fresh().counters.get(Metric::SsdRecoveredPages) > 150);
        manager.stop();
    });
}

/// Writes that failed, by any cause.
fn errors(manager: &Manager) -> u64 {
    let counters = manager.fresh().counters;
    SsdFault::ALL.iter().map(|fault| counters.get(Metric::SsdWriteErrors(*fault))).sum()
}

/// Goal: where nothing can be preallocated a disk that fills up costs the tier, not the saves: they
/// end well, every failed write is counted, the tier shows that it is degraded, comes back when
/// there is room, and nobody ever gets a page that is not whole (RES-05). Method: ext4 without
/// extents, which knows no `fallocate`; a tenth of the sizes of the scenario.
#[test]
fn res_05_a_disk_that_fills_up_degrades_the_tier_and_it_comes_back() {
    in_private_mounts(|| {
        let mut setup = setup!();
        let disk = setup.folder().join("disk");
        fs::create_dir(&disk).unwrap();
        let options = ["-O", "^extent,^64bit,^has_journal,^flex_bg"];
        let _disk = Mount::disk(&setup.folder().join("image"), 100 * MIB, &options, &disk);
        setup = setup.flags(&["--ssd", "disk/tier", "--ssd-capacity", "80MiB"]);
        let manager = setup.dram("32MiB").start();
        let seen = manager.fresh();
        assert_eq!((seen.ssd[0].preallocated, seen.ssd[0].health), (false, "healthy"));
        let said = manager.setup().warnings();
        assert_eq!(said.len(), 1, "{said:?}");
        assert!(said[0].contains("cannot reserve space") && said[0].contains("disk/tier"));
        let mut engine = manager.attach("full", 256 * KIB, 32);
        for sequence in 0..2 {
            engine.save_all(&hashes(sequence, 0..32));
        }
        manager.settle_empty();
        let rest = fill(&disk);
        // Ten times what the pool holds: every save ends well.
        for sequence in 2..42 {
            engine.save_all(&hashes(sequence, 0..32));
        }
        manager.counted(Metric::SaveStoredPages, 42 * 32);
        let seen =
            manager.settle("the tier is degraded", |seen| seen.manager.state.label() == "degraded");
        assert_eq!(seen.ssd[0].health, "read_only");
        assert!(errors(&manager) >= 8);
        let mut found = 0;
        for sequence in 0..42 {
            found += engine.restore_all(&hashes(sequence, 0..32));
        }
        assert!(found >= 64, "{found} pages");
        fs::remove_file(rest).unwrap();
        // One write is tried every 2 to 30 s while there is something to write.
        let end = Instant::now() + Duration::from_secs(90);
        let mut sequence = 100;
        while manager.inspect().manager.state.label() != "ready" {
            assert!(Instant::now() < end, "it never came back: {:?}", manager.inspect().ssd);
            engine.save_all(&hashes(sequence, 0..8));
            sequence += 1;
            thread::sleep(Duration::from_millis(200));
        }
        assert_eq!(manager.fresh().ssd[0].health, "healthy");
        let written = manager.get(Metric::SsdWrittenPages);
        engine.save_all(&hashes(7777, 0..32));
        manager.settle("it writes again", |seen| {
            seen.counters.get(Metric::SsdWrittenPages) >= written + 32
        });
        assert_eq!(engine.restore_all(&hashes(7777, 0..32)), 32);
        drop(engine);
        manager.stop();
    });
}

/// The system's reserve of 2 MiB pages, set for a test and put back.
struct Reserve(String);

const RESERVE: &str = "/proc/sys/vm/nr_hugepages";

impl Reserve {
    fn set(pages: u64) -> Self {
        let before = fs::read_to_string(RESERVE).unwrap();
        fs::write(RESERVE, pages.to_string()).unwrap();
        assert_eq!(fs::read_to_string(RESERVE).unwrap().trim(), pages.to_string());
        Self(before)
    }
}

impl Drop for Reserve {
    fn drop(&mut self) {
        let _kept = fs::write(RESERVE, self.0.trim());
    }
}

/// Goal: huge pages that are not there refuse the start with page counts, or 4 KiB pages are taken
/// with a warning and shown, as configured; never SIGBUS (RES-07). Method: no transparent huge pages
/// for the process, a reserve of none, half and all of the need, and a control group that allows
/// none of the reserve.
#[test]
fn res_07_huge_pages_that_are_not_there_are_refused_or_shown() {
    let require = || setup!().dram("32MiB").flag("--huge-pages", "require");
    let hint = ["vm.nr_hugepages", "--huge-pages prefer"];
    let none = Reserve::set(0);
    let refusal = require().refused_by(without_huge_pages);
    refusal.says(3, &[&["needs 16 pages of 2 MiB (33554432 bytes)", "got 0:"], &hint[..]].concat());
    let manager =
        setup!().dram("32MiB").flag("--huge-pages", "prefer").start_by(without_huge_pages);
    assert_eq!(manager.fresh().pool.page_mode, "4k");
    let said = manager.setup().warnings();
    assert!(said.len() == 1 && said[0].contains("4 KiB pages"), "{said:?}");
    round_trip(&manager, 1);
    manager.stop();
    // Asked for: nothing to warn of.
    let manager = setup!().dram("32MiB").start_by(without_huge_pages);
    assert_eq!(
        (manager.fresh().pool.page_mode.as_str(), manager.setup().warnings().len()),
        ("4k", 0)
    );
    manager.stop();
    drop(none);
    let half = Reserve::set(8);
    let refusal = require().refused_by(without_huge_pages);
    refusal.says(3, &[&["needs 16 pages of 2 MiB (33554432 bytes)", "got 8:"], &hint[..]].concat());
    drop(half);
    let all = Reserve::set(16);
    let manager = require().start_by(without_huge_pages);
    assert_eq!(manager.fresh().pool.page_mode, "hugetlb");
    round_trip(&manager, 2);
    manager.stop();
    if let Some(group) = HugetlbGroup::new() {
        let enter = format!("echo $$ > {}/cgroup.procs && exec \"$@\"", group.0.display());
        let setup = require().under(&["sh", "-c", &enter, "sh"]);
        let refusal = setup.refused_by(without_huge_pages);
        refusal.says(3, &["needs 16 pages of 2 MiB", "hugetlb limit of the control group"]);
    }
    drop(all);
}

/// A control group of version 2 that allows no huge page. Removed when dropped.
struct HugetlbGroup(PathBuf);

impl HugetlbGroup {
    fn new() -> Option<Self> {
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
        let mount = mounts.lines().find(|line| line.contains(" cgroup2 "))?.split(' ').nth(1)?;
        let folder = Path::new(mount).join(format!("orbitkv-hugetlb-{}", std::process::id()));
        let _perhaps_on = fs::write(Path::new(mount).join("cgroup.subtree_control"), "+hugetlb");
        let made = fs::create_dir(&folder);
        let group = Self(folder);
        let set = fs::write(group.0.join("hugetlb.2MB.max"), "0");
        if made.is_err() || set.is_err() {
            eprintln!("not run: no control group with a limit of huge pages can be made here");
            return None;
        }
        Some(group)
    }
}

impl Drop for HugetlbGroup {
    fn drop(&mut self) {
        let _gone = fs::remove_dir(&self.0);
    }
}

/// Goal: with every byte of the pool leased, saves are refused page by page and queries of pages on
/// SSD end by their deadline; nobody crashes, and once the leases are gone the same calls end well
/// (RES-09).
#[test]
fn res_09_a_pool_that_is_leased_whole_refuses_and_recovers() {
    let flags = ["--query-budget", "16MiB", "--operation-timeout", "300ms", "--lease-ttl", "10m"];
    let manager = setup!().dram("16MiB").ssd("256MiB").flags(&flags).start();
    let spec = namespace("res-09", 64 * KIB);
    let mut engine = Engine::attach(&manager.socket(), spec.clone(), 256);
    let on_ssd = hashes(1, 0..100);
    engine.save_all(&on_ssd);
    manager.evict();
    let leased = hashes(2, 0..256);
    engine.save_all(&leased);
    let lease = engine.query(&leased, QueryMode::Demand).ok().leased();
    manager.settle("all is leased", |seen| seen.pool.pinned_bytes == 16 * MIB);

    for sequence in 10..20 {
        let saved = engine.save(&blocks(&hashes(sequence, 0..256), 0));
        assert_eq!((saved.status, saved.pages), (Status::Error, 0), "{saved:?}");
        assert_eq!(saved.pages_refused, 256);
        let codes: Vec<_> = saved.results.iter().map(|page| (page.outcome, page.code)).collect();
        assert_eq!(codes[0], (PageOutcome::Refused, Code::NoMemory));
        assert!(codes[1..].iter().all(|code| *code == (PageOutcome::Refused, Code::ParentAbsent)));
    }
    // Another session has a budget of its own and no memory either.
    let mut other = Engine::attach(&manager.socket(), spec, 128);
    for asks in [&mut engine, &mut other] {
        let found = asks.query(&on_ssd, QueryMode::Demand);
        assert_eq!((found.pages, found.lease), (0, None), "{found:?}");
        let guessed = asks.query(&on_ssd, QueryMode::Speculative);
        assert_eq!((guessed.pages, guessed.lease), (0, None), "{guessed:?}");
    }
    assert_eq!(manager.fresh().pool.pinned_bytes, 16 * MIB);
    let _released = engine.release(lease).ok();
    manager.settle_empty();
    assert_eq!(other.restore_all(&on_ssd), 100);
    let saved = engine.save(&blocks(&hashes(30, 0..256), 0)).ok();
    assert_eq!(saved.pages, 256);
    drop((engine, other));
    manager.settle_empty();
    manager.stop();
}

/// Goal: a page that no tier can hold is refused when its namespace is defined, and nothing is
/// written for it (RES-11 a, b).
#[test]
fn res_11_a_page_larger_than_a_tier_is_refused_when_defined() {
    for (dram, ssd, tier) in [("32MiB", "4MiB", "SSD"), ("4MiB", "64MiB", "dram")] {
        let manager = setup!().dram(dram).ssd(ssd).start();
        let mut client = Connect::new(manager.socket()).connect().unwrap();
        let refused = client.define_namespace(&namespace("large", 8 * MIB)).unwrap_err();
        let text = refused.to_string();
        assert!(text.contains("8388608") && text.contains(tier), "{text}");
        assert!(format!("{refused:?}").contains("TooLarge"), "{refused:?}");
        let seen = manager.fresh();
        assert_eq!(seen.counters.get(Metric::SsdWrittenBytes), 0);
        assert_eq!(seen.counters.get(Metric::PoolUsedBytes), 0);
        // Others are served on the same session.
        client.define_namespace(&namespace("small", 64 * KIB)).unwrap();
        drop(client);
        round_trip(&manager, 5);
        manager.stop();
    }
}

/// Goal: a tier of exactly one page is written once a page and never in circles (RES-11 c). Method:
/// a file whose one slot takes one page, and 100 pages of 100 chains.
#[test]
fn res_11_a_tier_of_one_page_is_written_at_most_once_a_page() {
    const PAGE: u64 = MIB - 4 * KIB;
    let manager = setup!().dram("32MiB").ssd("2MiB").start();
    let mut engine = manager.attach("one", PAGE, 4);
    for sequence in 0..100 {
        engine.save_all(&hashes(sequence, 0..1));
    }
    let seen = manager.settle_empty();
    assert_eq!(seen.ssd[0].slots, 1, "one slot");
    let (pages, bytes) = [Metric::SsdWrittenPages, Metric::SsdWrittenBytes]
        .map(|metric| seen.counters.get(metric))
        .into();
    assert!((1..=100).contains(&pages), "{pages} pages written");
    assert!(bytes <= 100 * MIB, "{bytes} bytes written");
    manager.evict();
    let found: u32 = (0..100).map(|sequence| engine.restore_all(&hashes(sequence, 0..1))).sum();
    assert_eq!(found, 1, "one page is on SSD, none is in DRAM");
    drop(engine);
    let setup = manager.stop();
    assert_eq!(setup.ssd_file().metadata().unwrap().size(), 2 * MIB);
    assert_eq!(setup.verify()["valid"], 1);
}
