//! What an operator can type wrong, and what a path can be: every slip is refused by its text alone
//! or by what the system says, in one line, and leaves nothing behind.

use std::fs;
use std::net::TcpListener;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;

use orbitkv_engine::QueryMode;
use orbitkv_shm_protocol::telemetry::Metric;
use orbitkv_tests::confine::{Mount, in_private_mounts};
use orbitkv_tests::engine::{Engine, blocks, hashes, namespace};
use orbitkv_tests::manager::Setup;
use orbitkv_tests::prometheus;
use orbitkv_tests::setup;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const TIB: u64 = 1 << 40;

/// Goal: a slip in a name ends the start with 2, and its line names file, line, what was probably
/// meant and what is accepted (CFG-01). Nothing is made, nothing is logged before.
#[test]
fn cfg_01_a_misspelt_name_is_refused_with_the_nearest_valid_one() {
    let mut setup = setup!().bare();
    for (lines, flags, parts) in [
        // A misspelt key, section and flag.
        (
            "[dram]\n\ncapcity = \"1GiB\"\n",
            &[][..],
            &["config.toml:3:", "dram.capcity", "did you mean capacity", "huge_pages"][..],
        ),
        ("[sdd]\npaths = []\n", &[], &["config.toml:1:", "sdd", "did you mean ssd", "socket"]),
        ("", &["--drma", "1GiB"], &["--drma", "did you mean --dram", "--ssd-capacity"]),
        // A wrong type of each kind.
        ("[dram]\ncapacity = true\n", &[], &["config.toml:2:", "a boolean", "\"4GiB\""]),
        ("[limits]\nsessions = \"8\"\n", &[], &["limits.sessions", "a string", "an integer"]),
        ("[ssd]\npaths = \"x\"\n", &[], &["ssd.paths", "a string", "an array of strings"]),
        ("[time]\nlease_ttl = 5\n", &[], &["time.lease_ttl", "an integer", "\"500ms\""]),
        ("[http]\noptional = 1\n", &[], &["http.optional", "an integer", "true or false"]),
        ("dram = 5\n", &[], &["config.toml:1:", "dram", "a table"]),
        // A key in the wrong section, or in none.
        ("[dram]\nspill = \"all\"\n", &[], &["dram.spill", "belongs into [ssd]", "reuse"]),
        ("engine = \"auto\"\n", &[], &["engine", "belongs into [ssd]"]),
        // A word that is none of the choices.
        ("", &["--replacement", "prefix-lur"], &["--replacement", "did you mean prefix-lru"]),
        ("", &["--replacement", "fifo"], &["--replacement", "\"fifo\"", "prefix-lru, lru"]),
        ("", &["--ssd-engine", "urnig"], &["--ssd-engine", "did you mean uring", "blocking"]),
        ("[device]\nkind = \"gpu\"\n", &[], &["device.kind", "auto, host, cuda"]),
        ("[reactor]\nwait = \"spin\"\n", &[], &["reactor.wait", "adaptive, dedicated"]),
        ("", &["--huge-pages", "yes"], &["--huge-pages", "require, prefer, off"]),
        ("", &["--ssd-direct", "no"], &["--ssd-direct", "on, off"]),
        // Numbers, durations, ids and addresses.
        ("[limits]\nsessions = 0\n", &[], &["limits.sessions", "0 is out", "1 to 127"]),
        ("[limits]\nsessions = 128\n", &[], &["limits.sessions", "128 is out", "1 to 127"]),
        ("[limits]\nring_capacity = 96\n", &[], &["limits.ring_capacity", "power of two"]),
        ("", &["--lease-ttl", "5"], &["--lease-ttl", "\"5\"", "ms, s or m", "100ms to 60m"]),
        ("", &["--lease-ttl", "-1s"], &["--lease-ttl", "\"-1s\"", "100ms to 60m"]),
        ("", &["--operation-timeout", "1h"], &["--operation-timeout", "10ms to 10m"]),
        ("", &["--operation-timeout", "9ms"], &["--operation-timeout", "9ms is out", "10ms"]),
        ("", &["--allow-uid", "-1"], &["--allow-uid", "-1 is out", "user ids"]),
        ("", &["--allow-gid", "staff"], &["--allow-gid", "\"staff\"", "group ids"]),
        ("", &["--http", "-1"], &["--http", "\"-1\"", "IP:PORT"]),
        ("", &["--http", "65536"], &["--http", "\"65536\"", "IP:PORT"]),
        // Flags that contradict each other or stand twice.
        ("", &["--ssd-capacity", "1GiB"], &["--ssd-capacity", "--ssd PATH"]),
        (
            "",
            &["--dram", "64MiB", "--query-budget", "65MiB"],
            &["--query-budget", "68157440 bytes (65MiB)", "to dram.capacity"],
        ),
        (
            "[budget]\nquery = \"1MiB\"\n",
            &["--session-budget", "2MiB"],
            &["--session-budget", "2097152 bytes (2MiB)", "to budget.query"],
        ),
        ("", &["--dram", "1GiB", "--dram", "2GiB"], &["--dram", "multiple times"]),
        ("", &["--ssd", "x", "--ssd", "x"], &["--ssd", "\"x, named twice\""]),
        ("", &["--dram"], &["--dram", "missing", "2MiB to 16TiB"]),
        ("", &["extra"], &["extra"]),
        // What is no TOML, or no text.
        ("[dram\n", &[], &["config.toml:1:", "not TOML"]),
        ("[dram]\ncapacity = 1\ncapacity = 2\n", &[], &["config.toml:3:", "not TOML"]),
    ] {
        setup = cleared(setup).config(lines).flags(flags);
        let refusal = setup.refused();
        refusal.says(2, parts);
        assert_eq!(refusal.log, "", "{lines:?} {flags:?}");
    }
    for (name, bytes, parts) in [
        ("latin1", &b"[dram]\n# \xfcbrig\n"[..], &["latin1:2:", "not UTF-8"][..]),
        ("zeros", &[0; 100], &["zeros:1:", "not TOML"]),
        ("long", &[b'#'; (1 << 20) + 1], &["long", "longer than 1048576 bytes"]),
    ] {
        let file = setup.folder().join(name);
        fs::write(&file, bytes).unwrap();
        setup = cleared(setup).flags(&["--config", name]);
        setup.refused().says(2, parts);
        fs::remove_file(file).unwrap();
    }
    // What never ends is no configuration either; what is not there only the system knows.
    setup = cleared(setup).flags(&["--config", "/dev/zero"]);
    setup.refused().says(2, &["/dev/zero", "longer than"]);
    for (path, cause) in [("absent.toml", "No such file"), (".", "Is a directory")] {
        setup = cleared(setup).flags(&["--config", path]);
        setup.refused().says(3, &[path, "cannot read the configuration", cause]);
    }
}

/// The same folders without a flag.
fn cleared(mut setup: Setup) -> Setup {
    setup.again();
    setup
}

/// What `serve --print-config` says of one field, or its exit code and line.
fn effective(
    setup: &Setup,
    arguments: &[&str],
    section: &str,
    name: &str,
) -> Result<String, String> {
    let output = setup.orbitkv(&[&["serve", "--print-config"], arguments].concat());
    let (said, line) = (String::from_utf8(output.stdout), String::from_utf8(output.stderr));
    let (said, line) = (said.unwrap(), line.unwrap());
    if output.status.code() != Some(0) {
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {line}");
        assert_eq!(line.lines().count(), 1, "{arguments:?}: {line}");
        return Err(line);
    }
    assert_eq!(line, "", "{arguments:?}");
    let (_, rest) = said.split_once(&format!("[{section}]\n")).unwrap();
    let part = rest.split("\n[").next().unwrap();
    let set = part.lines().find_map(|line| line.strip_prefix(&format!("{name} = ")));
    Ok(set.map_or("unset", |value| value.split(" #").next().unwrap()).to_owned())
}

/// A size field: its flag, its place in the file, what it takes and what that is rounded down to.
struct SizeField {
    flag: Option<&'static str>,
    section: &'static str,
    name: &'static str,
    range: std::ops::RangeInclusive<u64>,
    step: u64,
    /// Flags that give it room.
    beside: &'static [&'static str],
    /// 0 is a value, shown as.
    zero: Option<&'static str>,
}

const SIZE_FIELDS: [SizeField; 9] = [
    SizeField {
        flag: Some("--dram"),
        section: "dram",
        name: "capacity",
        range: 2 * MIB..=16 * TIB,
        step: 2 * MIB,
        beside: &[],
        zero: None,
    },
    SizeField {
        flag: Some("--ssd-capacity"),
        section: "ssd",
        name: "capacity",
        range: 2 * MIB..=64 * TIB,
        step: 4 * KIB,
        beside: &["--ssd", "p"],
        zero: Some("unset"),
    },
    SizeField {
        flag: None,
        section: "ssd",
        name: "write_in_flight",
        range: 256 * KIB..=8 * MIB,
        step: 1,
        beside: &["--ssd", "p"],
        zero: None,
    },
    SizeField {
        flag: None,
        section: "ssd",
        name: "read_join",
        range: 4 * KIB..=MIB,
        step: 1,
        beside: &["--ssd", "p"],
        zero: None,
    },
    SizeField {
        flag: None,
        section: "ssd",
        name: "write_budget_per_day",
        range: GIB..=1024 * TIB,
        step: 1,
        beside: &["--ssd", "p"],
        zero: Some("0"),
    },
    SizeField {
        flag: Some("--query-budget"),
        section: "budget",
        name: "query",
        range: 4 * KIB..=16 * GIB,
        step: 1,
        beside: &["--dram", "16GiB"],
        zero: None,
    },
    SizeField {
        flag: Some("--session-budget"),
        section: "budget",
        name: "session",
        range: 4 * KIB..=8 * GIB,
        step: 1,
        beside: &["--dram", "16GiB"],
        zero: None,
    },
    SizeField {
        flag: None,
        section: "budget",
        name: "speculative",
        range: 0..=8 * GIB,
        step: 1,
        beside: &["--dram", "16GiB"],
        zero: Some("0"),
    },
    SizeField {
        flag: None,
        section: "limits",
        name: "page_bytes",
        range: 4 * KIB..=64 * MIB,
        step: 1,
        beside: &[],
        zero: None,
    },
];

/// Texts and the bytes that they mean: `None` is no size at all.
const SIZES: [(&str, Option<u64>); 20] = [
    ("0", Some(0)),
    ("-1", None),
    ("1", Some(1)),
    ("10", Some(10)),
    ("10G", None),
    ("10GB", Some(10_000_000_000)),
    ("10gb", Some(10_000_000_000)),
    ("10GiB", Some(10 * GIB)),
    ("10 GiB", Some(10 * GIB)),
    ("1e30", None),
    ("1.5GiB", None),
    ("", None),
    ("4095", Some(4095)),
    ("4097", Some(4097)),
    ("2097151", Some(2 * MIB - 1)),
    ("2097153", Some(2 * MIB + 1)),
    ("5MiB", Some(5 * MIB)),
    ("5000001", Some(5_000_001)),
    ("18446744073709551615", Some(u64::MAX)),
    ("18446744073709551616", None),
];

/// Goal: every size that an operator may think of has its documented result, wherever it is typed:
/// the effective bytes, or a refusal that lists the accepted forms (CFG-03). Method: each text for
/// each field, by flag and by file, against the rules written down here.
#[test]
fn cfg_03_every_size_means_what_is_documented_or_is_refused_with_the_forms() {
    let setup = setup!();
    let file = setup.folder().join("sizes.toml");
    let mut checked = 0;
    for field in &SIZE_FIELDS {
        for (text, bytes) in SIZES {
            let expected = match bytes {
                Some(0) if field.zero.is_some() => field.zero.map(str::to_owned),
                Some(bytes) if field.range.contains(&bytes) => {
                    Some((bytes / field.step * field.step).to_string())
                }
                _ => None,
            };
            let mut ways =
                vec![("file", format!("[{}]\n{} = {text:?}\n", field.section, field.name))];
            if let Some(bytes) = bytes.filter(|bytes| i64::try_from(*bytes).is_ok()) {
                ways.push(("file", format!("[{}]\n{} = {bytes}\n", field.section, field.name)));
            }
            ways.extend(field.flag.map(|flag| (flag, String::new())));
            for (way, lines) in ways {
                fs::write(&file, &lines).unwrap();
                let typed = match way {
                    "file" => ["--config", file.to_str().unwrap()],
                    flag => [flag, text],
                };
                let arguments = [field.beside, &typed].concat();
                let found = effective(&setup, &arguments, field.section, field.name);
                checked += 1;
                match (&expected, found) {
                    (Some(expected), Ok(found)) => {
                        assert_eq!(&found, expected, "{arguments:?} {lines}")
                    }
                    (None, Err(line)) => {
                        let place = match way {
                            "file" => format!("{}.{}", field.section, field.name),
                            flag => flag.to_owned(),
                        };
                        assert!(line.contains(&place), "{line}");
                        assert!(line.contains("accepted: "), "{line}");
                        match bytes {
                            Some(bytes) => {
                                assert!(line.contains(&format!("{bytes} bytes")), "{line}");
                            }
                            None => assert!(line.contains("KiB, MiB, GiB, TiB"), "{line}"),
                        }
                    }
                    (expected, found) => {
                        panic!("{arguments:?} {lines}: {found:?}, not {expected:?}")
                    }
                }
            }
        }
    }
    assert_eq!(checked, 9 * 20 + 9 * 13 + 4 * 20, "every text in every way");
    // Several files share the capacity; each must have its part.
    let two = ["--ssd", "p", "--ssd", "q", "--ssd-capacity"];
    let tier = |text: &str| effective(&setup, &[&two[..], &[text]].concat(), "ssd", "capacity");
    assert_eq!(tier("10000001").unwrap(), (10_000_001 / 8192 * 8192).to_string());
    let line = tier("3MiB").unwrap_err();
    assert!(line.contains("3145728 bytes (3MiB) for 2 files"), "{line}");
    assert!(line.contains("2MiB to 64TiB a file"), "{line}");
}

/// Goal: what `--print-config` says is what runs (CFG-03). Method: odd sizes, and the Manager's own
/// gauges.
#[test]
fn cfg_03_the_effective_bytes_are_those_that_run() {
    let manager = setup!()
        .dram("67108865")
        .flag("--query-budget", "5000001")
        .ssd("20000001")
        .config("[budget]\nspeculative = 1000001\n")
        .start();
    let seen = manager.fresh();
    assert_eq!(seen.counters.get(Metric::PoolCapacityBytes), 64 * MIB);
    assert_eq!(seen.counters.get(Metric::BudgetQueryLimitBytes), 5_000_001);
    assert_eq!(seen.counters.get(Metric::BudgetSpeculativeLimitBytes), 1_000_001);
    assert_eq!(seen.ssd[0].capacity_bytes, 20_000_001 / 4096 * 4096);
    let file = manager.setup().ssd_file().metadata().unwrap();
    assert_eq!(file.len(), 20_000_001 / 4096 * 4096);
    for line in ["capacity = 67108864 # 64MiB", "query = 5000001", "capacity = 19996672 "] {
        assert!(seen.config.contains(line), "{line:?} is missing from {}", seen.config);
    }
    manager.stop();
}

/// Names below a folder, with what links say.
fn tree(folder: &Path) -> Vec<String> {
    let mut names = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(next) = folders.pop() {
        for entry in fs::read_dir(next).unwrap() {
            let path = entry.unwrap().path();
            names.push(path.display().to_string());
            if path.symlink_metadata().unwrap().is_dir() {
                folders.push(path);
            }
        }
    }
    names.sort();
    names
}

/// Goal: a path that cannot hold the SSD file is refused with the path and the cause, and nothing is
/// placed anywhere else (CFG-05).
#[test]
fn cfg_05_a_path_that_cannot_hold_the_tier_is_refused_and_nothing_is_placed_elsewhere() {
    in_private_mounts(|| {
        let mut setup = setup!();
        let folder = setup.folder().to_owned();
        fs::write(folder.join("file"), "somebody's notes").unwrap();
        fs::create_dir(folder.join("folder")).unwrap();
        fs::create_dir(folder.join("target")).unwrap();
        symlink("target/absent", folder.join("dangling")).unwrap();
        symlink("loop", folder.join("loop")).unwrap();
        fs::create_dir(folder.join("fixed")).unwrap();
        let _fixed = Mount::read_only(&folder.join("fixed"));
        fs::create_dir(folder.join("memory")).unwrap();
        let _memory = Mount::tmpfs(1 << 30, &folder.join("memory"));
        rustix::fs::mkfifoat(rustix::fs::CWD, folder.join("pipe"), rustix::fs::Mode::RUSR).unwrap();
        fs::write(folder.join("short"), [0; 5000]).unwrap();
        let before = tree(&folder);
        for (path, parts) in [
            ("missing/tier", &["missing/tier", "folder does not exist", "create it"][..]),
            ("file/tier", &["file/tier", "folder does not exist"]),
            ("fixed/tier", &["fixed/tier", "open", "Read-only file system"]),
            ("dangling", &["dangling", "symbolic link to target/absent", "does not exist"]),
            ("loop", &["loop", "Too many levels of symbolic links"]),
            ("folder", &["folder", "not a regular file"]),
            ("folder/", &["folder", "not a regular file"]),
            ("pipe", &["pipe", "not a regular file"]),
            ("/dev/null", &["/dev/null", "not a regular file"]),
            ("memory/tier", &["memory/tier", "tmpfs", "ext4"]),
            ("file", &["file", "not an OrbitKV SSD file", "not touched"]),
            ("short", &["short", "not an OrbitKV SSD file", "not touched"]),
            (&"x".repeat(256), &["File name too long"]),
        ] {
            setup.again();
            setup = setup.flags(&["--ssd", path, "--ssd-capacity", "64MiB"]);
            setup.refused().says(3, &[&["--ssd"], parts].concat());
            assert_eq!(tree(&folder), before, "{path}");
        }
        assert_eq!(fs::read_to_string(folder.join("file")).unwrap(), "somebody's notes");
        assert_eq!(fs::read(folder.join("short")).unwrap(), [0; 5000]);
        // The same file twice, under names that only the system can tell to be one.
        symlink("tier", folder.join("link")).unwrap();
        for twice in [["tier", "./tier"], ["./tier", "target/../tier"]] {
            setup.again();
            setup = setup.flags(&["--ssd", twice[0], "--ssd", twice[1], "--ssd-capacity", "64MiB"]);
            let parts = [twice[1], "same file as", twice[0], "name each file once"];
            setup.refused().says(3, &parts);
            assert!(!folder.join("tier").exists());
        }
        // One good file and one wrong one: the good one goes again.
        setup.again();
        setup = setup.flags(&["--ssd", "good", "--ssd", "file", "--ssd-capacity", "64MiB"]);
        setup.refused().says(3, &["file", "not an OrbitKV SSD file"]);
        assert!(!folder.join("good").exists());
    });
}

/// Goal: an SSD path that is relative, has spaces and letters beyond ASCII, or is a link to a file
/// works, mode 0600 whatever the umask, and lies there and nowhere else (CFG-05).
#[test]
fn cfg_05_odd_paths_that_can_hold_the_tier_do() {
    let mut setup = setup!();
    let folder = setup.folder().to_owned();
    fs::create_dir(folder.join("a b")).unwrap();
    fs::write(folder.join("empty"), "").unwrap();
    symlink("empty", folder.join("link")).unwrap();
    for (path, lies_at) in
        [("plain", "plain"), ("./a b/tier ü 層", "a b/tier ü 層"), ("link", "empty")]
    {
        setup.again();
        let expected = {
            let mut names = tree(&folder);
            names.push(folder.join(lies_at).display().to_string());
            names.sort();
            names.dedup();
            names
        };
        let manager = setup.flags(&["--ssd", path, "--ssd-capacity", "8MiB"]).start();
        assert_eq!(tree(&folder), expected);
        let metadata = folder.join(lies_at).metadata().unwrap();
        assert_eq!(metadata.len(), 8 * MIB);
        assert_eq!(metadata.permissions().mode() & 0o777, 0o600, "{path}");
        assert_eq!(manager.fresh().ssd[0].path, path);
        let mut engine = Engine::attach(&manager.socket(), namespace("odd", 16 * KIB), 8);
        engine.save_all(&hashes(1, 0..8));
        manager.evict();
        assert_eq!(engine.restore_all(&hashes(1, 0..8)), 8);
        drop(engine);
        setup = manager.stop();
    }
    // Another size on the next start: it grows and keeps its pages, and never shrinks.
    setup.again();
    let manager = setup.flags(&["--ssd", "plain", "--ssd-capacity", "16MiB"]).start();
    assert_eq!(folder.join("plain").metadata().unwrap().len(), 16 * MIB);
    assert_eq!(manager.fresh().counters.get(Metric::SsdRecoveredPages), 8);
    let mut setup = manager.stop();
    setup.again();
    let setup = setup.flags(&["--ssd", "plain", "--ssd-capacity", "8MiB"]);
    setup
        .refused()
        .says(3, &["plain", "16777216", "8388608", "cannot shrink", "raise the capacity"]);
    assert_eq!(folder.join("plain").metadata().unwrap().len(), 16 * MIB);
}

/// Goal: the same for the socket (CFG-05): refused with the path and the cause, or made there and
/// nowhere else; tmpfs is fine for it.
#[test]
fn cfg_05_socket_paths() {
    in_private_mounts(|| {
        let mut setup = setup!();
        let folder = setup.folder().to_owned();
        fs::write(folder.join("file"), "x").unwrap();
        fs::create_dir(folder.join("folder")).unwrap();
        fs::create_dir(folder.join("fixed")).unwrap();
        symlink("absent", folder.join("dangling")).unwrap();
        symlink("absent.lock", folder.join("guarded.lock")).unwrap();
        fs::create_dir(folder.join("taken.lock")).unwrap();
        let _fixed = Mount::read_only(&folder.join("fixed"));
        let before = tree(&folder);
        let long = "s".repeat(104);
        for (path, code, parts) in [
            (
                "missing/m.sock",
                3,
                &["missing: folder of the socket", "No such file", "make it"][..],
            ),
            ("file/m.sock", 3, &["file: folder of the socket", "Not a directory"]),
            ("fixed/m.sock", 3, &["fixed/m.sock.lock: open", "Read-only file system", "--socket"]),
            ("file", 3, &["file: exists and is no socket", "--socket"]),
            ("folder", 3, &["folder: exists and is no socket"]),
            ("dangling", 3, &["dangling: exists and is no socket"]),
            ("guarded", 3, &["guarded.lock: open", "symbolic links", "--socket"]),
            ("taken", 3, &["taken.lock: open", "Is a directory", "--socket"]),
            ("folder/", 2, &["--socket", "\"folder/\"", "at most 103 bytes"]),
            ("", 2, &["--socket"]),
            (&long, 2, &["--socket", "104 bytes", "at most 103 bytes"]),
        ] {
            setup.again();
            setup = setup.flags(&["--socket", path]);
            setup.refused().says(code, parts);
            assert_eq!(tree(&folder), before, "{path:?}");
        }
        let memory = folder.join("memory");
        fs::create_dir(&memory).unwrap();
        let _memory = Mount::tmpfs(MIB, &memory);
        for path in ["memory/m.sock", "folder/with space ü 層", &long[1..]] {
            setup.again();
            setup = setup.flags(&["--socket", path]);
            let manager = setup.start();
            let listens = folder.join(path);
            assert_eq!(manager.ready(), format!("ready socket={path} http=off"));
            assert_eq!(listens.symlink_metadata().unwrap().mode() & 0o777, 0o600);
            let lock = folder.join(format!("{path}.lock"));
            // The path of the folder may be too long for an address: by its short name.
            let inspected = Command::new(manager.setup().program())
                .args(["inspect", "--json", "--socket", path])
                .current_dir(&folder)
                .output()
                .unwrap();
            let shown: serde_json::Value = serde_json::from_slice(&inspected.stdout).unwrap();
            assert_eq!(shown["manager"]["state"], "ready");
            setup = manager.stop();
            assert!(!listens.exists());
            fs::remove_file(lock).unwrap();
        }
        fs::remove_dir(folder.join("memory")).unwrap_err();
    });
}

/// Goal: a port that is taken refuses the start and names port and setting; with `--http-optional`
/// the Manager starts, warns, and shows that it has none; port 0 takes a free one and shows it
/// (CFG-07).
#[test]
fn cfg_07_a_taken_port_is_refused_or_optional_and_port_0_is_shown() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let mut setup = setup!().flag("--http", &address);
    let parts = ["--http", &address, "Address already in use", "port 0", "--http-optional"];
    setup.refused().says(3, &parts);
    setup = setup.flags(&["--http-optional"]);
    let manager = setup.start();
    assert!(manager.ready().ends_with(" http=off"), "{}", manager.ready());
    assert_eq!(manager.fresh().manager.http, None);
    let text = inspect_text(manager.setup());
    assert!(text.contains("http   off"), "{text}");
    let warned = manager.setup().warnings();
    assert_eq!(warned.len(), 1, "{warned:?}");
    assert!(warned[0].contains(&address) && warned[0].contains("/metrics"), "{warned:?}");
    let mut setup = manager.stop();
    setup.again();
    let manager = setup.flag("--http", "0").start();
    let http = manager.fresh().manager.http.expect("an address");
    assert!(manager.ready().ends_with(&format!(" http={http}")), "{}", manager.ready());
    assert!(!http.ends_with(":0") && http.starts_with("127.0.0.1:"), "{http}");
    assert_eq!(prometheus::get(&http, "/healthz").status, 200);
    manager.stop();
    drop(taken);
    // An address that no machine has, and one that is none of ours.
    let setup = setup!().flag("--http", "203.0.113.9:9464");
    setup.refused().says(3, &["--http 203.0.113.9:9464", "Cannot assign requested address"]);
}

fn inspect_text(setup: &Setup) -> String {
    let socket = setup.socket();
    let output = setup.orbitkv(&["inspect", "--socket", socket.to_str().unwrap()]);
    String::from_utf8(output.stdout).unwrap()
}

/// Blocks of 4 KiB of a file that the page cache holds, and all of them. Asks the kernel: a read
/// that must not wait would start a read-ahead.
fn resident(path: &Path) -> (u64, u64) {
    let fincore = Command::new("fincore")
        .args(["--bytes", "--raw", "--noheadings", "--output", "RES"])
        .arg(path)
        .output()
        .unwrap();
    let bytes: u64 = String::from_utf8(fincore.stdout).unwrap().trim().parse().unwrap();
    (bytes / 4096, path.metadata().unwrap().len() / 4096)
}

/// Goal: the effective mode of I/O is the configured one (CFG-09): with direct I/O under 1 % of the
/// file is in the page cache after 96 MiB went out and came back, without it most of it is and
/// nobody speaks of direct I/O. A tenth of the GiB of the scenario.
#[test]
fn cfg_09_direct_io_leaves_the_page_cache_alone() {
    const PAGES: u32 = 96;
    let mut setup = setup!().dram("128MiB");
    for (mode, engine) in [("on", "auto"), ("on", "blocking"), ("off", "auto"), ("off", "blocking")]
    {
        setup.again();
        let flags = ["--ssd-direct", mode, "--ssd-engine", engine, "--query-budget", "128MiB"];
        let manager = setup.ssd("112MiB").flags(&flags).start();
        let mut engine = Engine::attach(&manager.socket(), namespace("cfg-09", MIB), 16);
        let pages = hashes(9, 0..PAGES);
        engine.save_all(&pages);
        manager.evict();
        let hit = engine.query(&pages[..32], QueryMode::Candidate).ok();
        assert_eq!((hit.pages_dram, hit.pages_ssd), (0, 32));
        let _released = engine.release(hit.leased()).ok();
        assert_eq!(engine.restore_all(&pages), PAGES);
        engine.check(&blocks(&pages[80..], 0));
        drop(engine);
        let seen = manager.fresh();
        assert_eq!(seen.counters.get(Metric::SsdWrittenPages), u64::from(PAGES));
        assert_eq!(seen.ssd[0].direct, mode == "on");
        let (held, all) = resident(&manager.setup().ssd_file());
        if mode == "on" {
            assert!(held * 100 < all, "{held} of {all} blocks are in the page cache");
        } else {
            assert!(held * 2 > all, "{held} of {all} blocks are in the page cache");
            let log = manager.setup().log();
            let said = log.lines().filter(|line| line.contains("WARN") || line.contains("ERROR"));
            assert_eq!(said.filter(|line| !line.contains("too busy")).count(), 0, "{log}");
            assert!(!log.contains("O_DIRECT"), "{log}");
        }
        setup = manager.stop();
        fs::remove_file(setup.ssd_file()).unwrap();
        let _fresh_log = fs::remove_file(setup.log_file());
    }
}
