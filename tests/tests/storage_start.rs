//! How a start meets what lies there already: another Manager, what a killed one left, a kernel
//! that refuses io_uring, a file system that cannot do everything, a file in somebody else's use.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use orbitkv_shm_protocol::telemetry::{Metric, TELEMETRY_BYTES};
use orbitkv_tests::confine::{Mount, in_private_mounts, without_calls};
use orbitkv_tests::engine::{Engine, hashes};
use orbitkv_tests::manager::{Manager, Setup, telemetry_file};
use orbitkv_tests::setup;
use rustix::io::Errno;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const PAGES: u32 = 32;

fn engine(manager: &Manager) -> Engine {
    manager.attach("start", 64 * KIB, 16)
}

/// Saves a chain and finds it again, from SSD where there is one.
fn round_trip(manager: &Manager, sequence: u64) {
    manager.round_trip(&mut engine(manager), &hashes(sequence, 0..PAGES));
}

fn state(manager: &Manager) -> &'static str {
    manager.fresh().manager.state.label()
}

fn used(folder: &Path) -> u64 {
    let stat = rustix::fs::statvfs(folder).unwrap();
    (stat.f_blocks - stat.f_bfree) * stat.f_frsize
}

/// Goal: twenty crashes in one place are followed by twenty starts, with never more than one
/// Manager's share of /dev/shm in use, and none after a clean stop (CRASH-01). Method: a tmpfs of
/// one and a half times what one Manager has there.
#[test]
fn crash_01_twenty_kills_in_a_small_dev_shm() {
    in_private_mounts(|| {
        let shm = Path::new("/dev/shm");
        let one = (TELEMETRY_BYTES as u64).next_multiple_of(4096);
        let _small = Mount::tmpfs(one * 3 / 2, shm);
        let mut setup = setup!();
        for life in 0..20 {
            let manager = setup.start();
            assert!(used(shm) <= one, "life {life}: {} bytes", used(shm));
            let mut attached = engine(&manager);
            attached.save_all(&hashes(life, 0..PAGES));
            setup = manager.kill();
            drop(attached);
        }
        let manager = setup.start();
        round_trip(&manager, 99);
        manager.stop();
        assert_eq!(used(shm), 0);
    });
}

/// Goal: what a killed Manager left never needs a hand, whatever its settings were and whatever of
/// it is gone; what was replaced is said (CRASH-05). Method: every subset of the three things that
/// it leaves is removed before a start with another ring, pool and tier size.
#[test]
fn crash_05_leftovers_of_other_settings_are_replaced() {
    // A file can grow, not shrink.
    let size = |life: u32| format!("{}MiB", 64 + life);
    let mut setup = setup!();
    for removed in 0_u32..8 {
        setup.again();
        let manager = setup.dram("64MiB").ssd(&size(2 * removed)).start();
        round_trip(&manager, u64::from(removed));
        setup = manager.kill();
        let socket = setup.socket();
        let left = [socket.clone(), socket.with_extension("sock.lock"), telemetry_file(&socket)];
        for (bit, path) in left.iter().enumerate() {
            assert!(path.symlink_metadata().is_ok(), "{} is left", path.display());
            if removed & 1 << bit != 0 {
                fs::remove_file(path).unwrap();
            }
        }
        let _old_log = fs::remove_file(setup.log_file());
        setup.again();
        let ring = if removed % 2 == 0 { 128 } else { 2048 };
        setup = setup
            .config(&format!(
                "[limits]\nring_capacity = {ring}\npage_entries = 2048\nsessions = 7\n"
            ))
            .dram(if removed % 2 == 0 { "32MiB" } else { "128MiB" })
            .ssd(&size(2 * removed + 1));
        let manager = setup.start();
        assert_eq!(state(&manager), "ready");
        let said = format!("replaced_stale_socket={}", removed & 1 == 0);
        assert!(manager.setup().log().contains(&said), "{said}: {}", manager.setup().log());
        assert!(manager.fresh().counters.get(Metric::SsdRecoveredPages) >= u64::from(PAGES));
        let limits = "sessions = 7";
        assert!(manager.fresh().config.contains(limits), "the new settings are in force");
        // The default rings of the harness are larger than this Manager's limit allows.
        let connect =
            orbitkv_engine::Connect::new(manager.socket()).ring_capacity(64).page_entries(1024);
        let client = connect.connect().unwrap();
        drop(client);
        setup = manager.stop();
        assert!(!setup.telemetry_file().exists());
    }
}

/// Goal: a lock file is only as good as its lock (CRASH-07): one that names pid 1, or the new
/// Manager's own pid, or nothing sensible, is no obstacle.
#[test]
fn crash_07_a_pid_in_a_lock_file_means_nothing() {
    let mut setup = setup!();
    let lock = setup.socket().with_extension("sock.lock");
    for words in ["1\n", "", "4294967295\n", "not a number\n", &"9".repeat(10_000)] {
        fs::write(&lock, words).unwrap();
        let manager = setup.start();
        assert_eq!(state(&manager), "ready");
        let named = fs::read_to_string(&lock).unwrap();
        assert_eq!(named.trim(), manager.pid().as_raw_nonzero().to_string());
        round_trip(&manager, 1);
        setup = manager.stop();
    }
    let own = format!("echo $$ > {} && exec \"$@\"", lock.display());
    let manager = setup.under(&["sh", "-c", &own, "sh"]).start();
    let named = fs::read_to_string(&lock).unwrap();
    assert_eq!(named.trim(), manager.pid().as_raw_nonzero().to_string());
    manager.stop();
}

/// Goal: a second Manager on one socket is refused and names the first, which serves on with its
/// files untouched (CRASH-07 c).
#[test]
fn crash_07_a_second_manager_is_refused_and_harms_nothing() {
    let manager = setup!().ssd("64MiB").start();
    let mut attached = engine(&manager);
    attached.save_all(&hashes(1, 0..PAGES));
    let before = manager.fresh();
    let lock = manager.socket().with_extension("sock.lock");
    let pid = format!("(pid {})", manager.pid().as_raw_nonzero());
    for dram in ["16MiB", "1TiB"] {
        // Another size of everything: it must not come so far.
        let socket = manager.socket();
        let second = setup!().dram(dram).ssd("128MiB").flag("--socket", socket.to_str().unwrap());
        let parts = [socket.to_str().unwrap(), "another Manager", &pid, "--socket"];
        second.refused().says(3, &parts);
        assert!(!second.ssd_file().exists());
    }
    let after = manager.fresh();
    assert_eq!(after.manager.epoch, before.manager.epoch);
    assert_eq!(after.sessions.len(), 1);
    assert!(fs::read_to_string(lock).unwrap().trim() == manager.pid().as_raw_nonzero().to_string());
    assert_eq!(attached.restore_all(&hashes(1, 0..PAGES)), PAGES);
    round_trip(&manager, 2);
    drop(attached);
    manager.stop();
}

const SETUP: &[libc::c_long] = &[libc::SYS_io_uring_setup];
const ENTER: &[libc::c_long] = &[libc::SYS_io_uring_enter];
const REGISTER: &[libc::c_long] = &[libc::SYS_io_uring_register];

/// Goal: where io_uring is refused the tier runs on threads, one line says why and what to do, and
/// metrics and inspection show it; who demanded io_uring gets no start (SSD-05). Method: seccomp
/// filters, as container profiles are.
#[test]
fn ssd_05_io_uring_that_is_refused_is_said_once_and_shown() {
    for (calls, errno, word) in [
        (SETUP, Errno::PERM, "Operation not permitted"),
        (SETUP, Errno::NOSYS, "Function not implemented"),
        (ENTER, Errno::PERM, "Operation not permitted"),
    ] {
        without_calls(calls, errno, || {
            let setup = setup!().ssd("64MiB").flag("--ssd-engine", "uring");
            let hint = ["io_uring", word, "seccomp", "kernel.io_uring_disabled", "blocking"];
            setup.refused().says(3, &[&["--ssd"], &hint[..]].concat());
            let manager = setup!().ssd("64MiB").start();
            let said = manager.setup().warnings();
            assert_eq!(said.len(), 1, "{said:?}");
            for part in ["io_uring", word, "seccomp", "kernel.io_uring_disabled", "threads"] {
                assert!(said[0].contains(part), "{part:?} is missing from {}", said[0]);
            }
            let seen = manager.fresh();
            let file = &seen.ssd[0];
            assert_eq!((file.engine, file.direct, file.registered), ("blocking", true, false));
            assert_eq!(state(&manager), "ready");
            round_trip(&manager, 1);
            // Found again by the same engine.
            let manager = manager.stop().start();
            assert_eq!(manager.fresh().counters.get(Metric::SsdRecoveredPages), u64::from(PAGES));
            manager.stop();
            // Asked for: nothing to say.
            let manager = setup!().ssd("64MiB").flag("--ssd-engine", "blocking").start();
            assert_eq!(manager.setup().warnings(), [""; 0]);
            manager.stop();
        });
    }
}

/// Goal: rings that may be made but not given buffers work without them, and that is said once and
/// shown (SSD-05).
#[test]
fn ssd_05_a_refused_register_costs_only_the_registered_buffers() {
    for errno in [Errno::PERM, Errno::NOSYS] {
        without_calls(REGISTER, errno, || {
            for engine in ["auto", "uring"] {
                let manager = setup!().ssd("64MiB").flag("--ssd-engine", engine).start();
                let said = manager.setup().warnings();
                assert_eq!(said.len(), 1, "{said:?}");
                for part in ["not registered", "io_uring_register", "refused=2", "rings=2"] {
                    assert!(said[0].contains(part), "{part:?} is missing from {}", said[0]);
                }
                let seen = manager.fresh();
                assert_eq!((seen.ssd[0].engine, seen.ssd[0].registered), ("uring", false));
                round_trip(&manager, 1);
                manager.stop();
            }
        });
    }
}

/// Goal: memory as a disk is refused by its name; overlayfs and a file system without `fallocate`
/// work in a mode that is said and shown, and bytes round-trip in each (SSD-07).
#[test]
fn ssd_07_file_systems_that_cannot_do_everything() {
    in_private_mounts(|| {
        let mut setup = setup!();
        let folder = setup.folder().to_owned();
        let place = |name: &str| {
            let path = folder.join(name);
            fs::create_dir(&path).unwrap();
            path
        };
        let _tmpfs = Mount::tmpfs(256 * MIB, &place("tmpfs"));
        let _ramfs = Mount::new(&["-t", "ramfs", "ramfs"], &place("ramfs"));
        for memory in ["tmpfs", "ramfs"] {
            setup.again();
            setup = setup.flags(&["--ssd", &format!("{memory}/tier"), "--ssd-capacity", "64MiB"]);
            let parts = [&*format!("{memory}/tier"), memory, "memory and not a disk", "ext4"];
            setup.refused().says(3, &parts);
            assert_eq!(fs::read_dir(folder.join(memory)).unwrap().count(), 0);
            // By a link that hides it.
            symlink(format!("{memory}/file"), folder.join("hidden")).unwrap();
            fs::write(folder.join(memory).join("file"), "").unwrap();
            setup.again();
            setup = setup.flags(&["--ssd", "hidden", "--ssd-capacity", "64MiB"]);
            setup.refused().says(3, &["hidden", memory, "memory and not a disk"]);
            fs::remove_file(folder.join("hidden")).unwrap();
            assert_eq!(fs::read(folder.join(memory).join("file")).unwrap(), b"");
        }

        let (lower, upper, work) = (place("lower"), place("upper"), place("work"));
        let layers = format!(
            "lowerdir={},upperdir={},workdir={}",
            lower.display(),
            upper.display(),
            work.display()
        );
        let _overlay = Mount::new(&["-t", "overlay", "-o", &layers, "overlay"], &place("overlay"));
        let options = ["-O", "^extent,^64bit,^has_journal,^flex_bg"];
        let _sparse = Mount::disk(&folder.join("image"), 128 * MIB, &options, &place("sparse"));
        for (on, preallocated, said) in
            [("overlay", true, "overlayfs costs"), ("sparse", false, "cannot reserve space")]
        {
            for engine in ["auto", "blocking"] {
                let tier = format!("{on}/tier");
                setup.again();
                setup = setup.flags(&["--ssd", &tier, "--ssd-capacity", "64MiB"]);
                let _old_log = fs::remove_file(setup.log_file());
                let manager = setup.flag("--ssd-engine", engine).start();
                let warned = manager.setup().warnings();
                assert_eq!(warned.len(), 1, "{warned:?}");
                assert!(warned[0].contains(said) && warned[0].contains(&tier), "{warned:?}");
                let seen = manager.fresh();
                assert_eq!((seen.ssd[0].preallocated, seen.ssd[0].direct), (preallocated, true));
                round_trip(&manager, 1);
                setup = manager.kill();
                let manager = setup.start();
                let recovered = manager.fresh().counters.get(Metric::SsdRecoveredPages);
                assert_eq!(recovered, u64::from(PAGES), "{on} {engine}");
                assert_eq!(engine_restores(&manager), PAGES);
                setup = manager.stop();
                fs::remove_file(folder.join(&tier)).unwrap();
            }
        }
    });
}

fn engine_restores(manager: &Manager) -> u32 {
    engine(manager).restore_all(&hashes(1, 0..PAGES))
}

/// Goal: a file system that refuses direct I/O is refused by that name, and taken without it; the
/// mode is shown (SSD-07). Method: overlayfs whose upper layer is ramfs.
#[test]
fn ssd_07_a_file_system_without_direct_io() {
    in_private_mounts(|| {
        let mut setup = setup!();
        let folder = setup.folder().to_owned();
        for name in ["memory", "lower", "overlay"] {
            fs::create_dir(folder.join(name)).unwrap();
        }
        let memory = folder.join("memory");
        let _memory = Mount::new(&["-t", "ramfs", "ramfs"], &memory);
        for name in ["upper", "work"] {
            fs::create_dir(memory.join(name)).unwrap();
        }
        let layers = format!(
            "lowerdir={0}/lower,upperdir={0}/memory/upper,workdir={0}/memory/work",
            folder.display()
        );
        let overlay = folder.join("overlay");
        let _overlay = Mount::new(&["-t", "overlay", "-o", &layers, "overlay"], &overlay);
        if can_do_direct_io(&overlay) {
            eprintln!("not run: overlayfs over ramfs does direct I/O on this kernel");
            return;
        }
        setup = setup.flags(&["--ssd", "overlay/tier", "--ssd-capacity", "64MiB"]);
        let parts = ["overlay/tier", "refuses O_DIRECT", "--ssd-direct off"];
        setup.refused().says(3, &parts);
        let manager = setup.flag("--ssd-direct", "off").start();
        assert!(!manager.fresh().ssd[0].direct);
        round_trip(&manager, 1);
        manager.stop();
    });
}

fn can_do_direct_io(folder: &Path) -> bool {
    use rustix::fs::{Mode, OFlags};
    let path = folder.join("probe");
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::DIRECT;
    let opened = rustix::fs::open(&path, flags, Mode::RUSR).is_ok();
    let _probe = fs::remove_file(path);
    opened
}

/// Goal: a file in one Manager's use is refused to every other, by whatever name, naming file and
/// holder; its pages stay whole (SSD-09). Method: the same path, a symbolic link, a hard link and a
/// bind mount, from another socket; a reader (`verify`) is refused as well.
#[test]
fn ssd_09_a_file_in_use_is_refused_by_any_name() {
    in_private_mounts(|| {
        let manager = setup!().ssd("64MiB").start();
        let mut attached = engine(&manager);
        attached.save_all(&hashes(1, 0..PAGES));
        manager.settle_empty();
        let tier = manager.setup().ssd_file();
        let second: Setup = setup!();
        let folder = second.folder().to_owned();
        symlink(&tier, folder.join("symbolic")).unwrap();
        fs::hard_link(&tier, folder.join("hard")).unwrap();
        fs::write(folder.join("bound"), "").unwrap();
        let _bound = Mount::new(&["--bind", tier.to_str().unwrap()], &folder.join("bound"));
        let bytes = fs::read(&tier).unwrap();
        let holder = format!("in use by process {}", manager.pid().as_raw_nonzero());
        let mut second = Some(second);
        for name in [tier.to_str().unwrap(), "symbolic", "hard", "bound"] {
            for capacity in ["64MiB", "128MiB"] {
                let mut other = second.take().unwrap();
                other.again();
                let other = other.flags(&["--ssd", name, "--ssd-capacity", capacity]);
                other.refused().says(3, &["--ssd", name, &holder, "choose another path"]);
                other.fails(&["verify", "--ssd", name], 3, &[name, &holder]);
                second = Some(other);
            }
        }
        assert!(fs::read(&tier).unwrap() == bytes, "the file was touched");
        manager.evict();
        assert_eq!(attached.restore_all(&hashes(1, 0..PAGES)), PAGES);
        drop(attached);
        manager.stop();
        // Free again, and by any name the same tier.
        let mut other = second.take().unwrap();
        other.again();
        let manager = other.flags(&["--ssd", "hard", "--ssd-capacity", "64MiB"]).start();
        assert_eq!(manager.fresh().counters.get(Metric::SsdRecoveredPages), u64::from(PAGES));
        manager.stop();
    });
}
