//! Who may attach, open and look, by the uids and gids of real processes (SEC-05).
//!
//! Fault model: another user of the host who knows every path, with and without the right to get
//! past the modes of files; members of the group that the operator named. Needs root, to be others.

mod manager;

use std::fs::File;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use manager::victim::Victim;
use manager::{Manager, PATIENCE, folder, hello, orbitkv};
use orbitkv_shm_protocol::bootstrap::message::{ManagerMessage, Refusal};
use orbitkv_shm_protocol::bootstrap::{peer, transport};
use orbitkv_shm_protocol::telemetry::{resolved_socket, segment_name};
use orbitkv_tests::program::Program;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType};

/// Users and groups that no system gives to anybody.
const STRANGER: u32 = 54_321;
const GROUP: u32 = 54_322;
const REFUSED: &str = "orbitkv_session_refused_total{reason=\"not_allowed\"}";

/// Says why and returns true when this test cannot run here.
fn cannot_run() -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        println!("not run: to become other users this test must be started by root");
    }
    !is_root
}

/// Where a Manager with the default socket has everything that it makes.
struct Place {
    runtime: tempfile::TempDir,
    disk: tempfile::TempDir,
    /// This test's program and the Manager's, where others may run them.
    test: Program,
    orbitkv: Program,
}

impl Place {
    /// Folders that everybody may look into: what protects is what the Manager makes.
    fn new() -> Self {
        let place = Self {
            runtime: tempfile::tempdir().unwrap(),
            disk: folder(),
            test: Program::copy(&std::env::current_exe().unwrap()),
            orbitkv: Program::copy(orbitkv()),
        };
        for folder in [place.runtime.path(), place.disk.path()] {
            open_to_all(folder);
        }
        place
    }

    fn own_folder(&self) -> PathBuf {
        self.runtime.path().join("orbitkv")
    }

    fn socket(&self) -> PathBuf {
        self.own_folder().join("manager.sock")
    }

    fn tier(&self) -> PathBuf {
        self.disk.path().join("tier")
    }

    /// Of the telemetry segment.
    fn telemetry(&self) -> PathBuf {
        let name = segment_name(0, &resolved_socket(&self.socket()));
        Path::new("/dev/shm").join(&name[1..])
    }

    /// Everything with a name, and its mode without and with a group.
    fn artefacts(&self) -> [(PathBuf, u32, u32); 5] {
        [
            (self.own_folder(), 0o700, 0o750),
            (self.socket(), 0o600, 0o660),
            (peer::lock_path(&self.socket()), 0o600, 0o640),
            (self.telemetry(), 0o600, 0o640),
            (self.tier(), 0o600, 0o600),
        ]
    }

    fn start(&self, umask: &str, more: &[&str]) -> Manager {
        let mut command = Command::new("sh");
        command.arg("-c").arg(format!("umask {umask}; exec \"$0\" \"$@\"")).arg(orbitkv());
        command.args(["serve", "--dram", "16MiB", "--huge-pages", "off", "--ssd"]).arg(self.tier());
        command.args(["--ssd-capacity", "32MiB"]).args(more);
        command.env("XDG_RUNTIME_DIR", self.runtime.path()).env("ORBITKV_LOG", "warn");
        command.current_dir(self.runtime.path());
        Manager::start_as(command, self.socket())
    }
}

fn open_to_all(folder: &Path) {
    std::fs::set_permissions(folder, PermissionsExt::from_mode(0o755)).unwrap();
}

/// Name of the variable that makes [`other_user`] do something: the folders of the place.
const PLACE: &str = "ORBITKV_TEST_ACCESS_PLACE";

/// Runs [`other_user`] by `command`, which gets this test's program and its arguments.
fn as_other(place: &Place, mut command: Command) -> String {
    let names: Vec<_> = place.artefacts().map(|(path, ..)| path.display().to_string()).into();
    let output = command
        .args(["--exact", "other_user", "--nocapture"])
        .env(PLACE, names.join(":"))
        .current_dir("/")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let words = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{words} {}", String::from_utf8_lossy(&output.stderr));
    let said = words.lines().filter_map(|line| line.split_once("other: "));
    said.map(|(_, said)| said.to_owned() + "\n").collect()
}

fn by_ids(place: &Place, uid: u32, gid: u32) -> Command {
    let mut command = Command::new(place.test.path());
    command.uid(uid).gid(gid);
    command
}

/// As [`by_ids`], through `setpriv` with more of its flags.
fn by_setpriv(place: &Place, uid: u32, gid: u32, flags: &[&str]) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--reuid", &uid.to_string(), "--regid", &gid.to_string()]).args(flags);
    command.arg(place.test.path());
    command
}

fn errno<T>(done: std::io::Result<T>) -> String {
    match done {
        Ok(_) => "open".into(),
        Err(error) if error.raw_os_error() == Some(13) => "EACCES".into(),
        Err(error) => format!("{error}"),
    }
}

/// Not a test by itself: what another user tries. One line for each thing, with what became of it.
#[test]
fn other_user() {
    let Ok(place) = std::env::var(PLACE) else { return };
    let names: Vec<_> = place.split(':').map(PathBuf::from).collect();
    let [folder, socket, lock, telemetry, tier] = names.as_slice() else { panic!("{names:?}") };
    println!("other: list {}", errno(std::fs::read_dir(folder)));
    println!("other: make {}", errno(File::create_new(folder.join("mine"))));
    for (name, path) in [("lock", lock), ("telemetry", telemetry), ("tier", tier)] {
        println!("other: read {name} {}", errno(File::open(path)));
        println!("other: write {name} {}", errno(File::options().write(true).open(path)));
    }
    let connection = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
    let address = SocketAddrUnix::new(socket).unwrap();
    let connected = rustix::net::connect(&connection, &address);
    let refused = connected.is_err();
    println!("other: connect {}", errno(connected.map_err(std::io::Error::from)));
    if refused {
        return;
    }
    let asked = transport::send(&connection, &hello(), &[], PATIENCE);
    let answer = asked.and_then(|()| transport::receive_manager(&connection, PATIENCE));
    match answer.unwrap().0 {
        ManagerMessage::Welcome(_) => {
            Victim::attach(socket, &format!("process {}", std::process::id())).round();
            println!("other: hello served");
        }
        ManagerMessage::Refused { refusal: Refusal::NotAllowed, message } => {
            assert!(message.contains("--allow-uid"), "{message}");
            println!("other: hello not allowed");
        }
        answer => println!("other: hello {answer:?}"),
    }
}

const NOTHING: &str = "list EACCES\nmake EACCES\nread lock EACCES\nwrite lock EACCES\n\
    read telemetry EACCES\nwrite telemetry EACCES\nread tier EACCES\nwrite tier EACCES\n\
    connect EACCES\n";

/// A tool of the command line as somebody else.
fn tool(place: &Place, arguments: &[&str], gid: u32) -> Output {
    let mut command = Command::new(place.orbitkv.path());
    command.args(arguments).arg("--socket").arg(place.socket()).uid(STRANGER).gid(gid);
    command.current_dir("/").output().unwrap()
}

fn must_have_modes(place: &Place, group: Option<u32>) {
    for (path, plain, grouped) in place.artefacts() {
        let found = std::fs::symlink_metadata(&path).unwrap_or_else(|e| panic!("{path:?}: {e}"));
        let mode = if group.is_some() { grouped } else { plain };
        assert_eq!(found.mode() & 0o7777, mode, "{path:?} has mode {:o}", found.mode());
        let gid = group.filter(|_| mode & 0o070 != 0).unwrap_or(0);
        assert_eq!((found.uid(), found.gid()), (0, gid), "{path:?}");
    }
}

/// Goal: without a group everything is the owner's alone, under any umask; a stranger is kept out by
/// the modes, and by the Manager where the modes do not keep him out, which counts it.
#[test]
fn sec_05_a_stranger_reaches_nothing_under_any_umask() {
    if cannot_run() {
        return;
    }
    for umask in ["000", "077"] {
        let place = Place::new();
        let mut manager = place.start(umask, &[]);
        must_have_modes(&place, None);
        assert_eq!(as_other(&place, by_ids(&place, STRANGER, STRANGER)), NOTHING);
        // The tools say so; they do not crash.
        for arguments in [&["inspect", "--json"][..], &["evict", "--tier", "dram"]] {
            let output = tool(&place, arguments, STRANGER);
            let words = String::from_utf8_lossy(&output.stderr).into_owned();
            assert_eq!(output.status.code(), Some(3), "{arguments:?}: {words}");
            assert!(words.to_lowercase().contains("denied"), "{arguments:?}: {words}");
        }
        // Each protects itself: with the folder open to all, only its list is to be had.
        open_to_all(&place.own_folder());
        let listed = NOTHING.replace("list EACCES", "list open");
        assert_eq!(as_other(&place, by_ids(&place, STRANGER, STRANGER)), listed);
        assert_eq!(
            as_other(&place, by_ids(&place, STRANGER, 0)),
            listed,
            "the owner's group is nobody"
        );
        manager.must_count(REFUSED, 0);
        // Past the modes, not past the Manager.
        let past =
            ["--clear-groups", "--inh-caps", "+dac_override", "--ambient-caps", "+dac_override"];
        let said = as_other(&place, by_setpriv(&place, STRANGER, STRANGER, &past));
        assert!(said.ends_with("connect open\nhello not allowed\n"), "{said}");
        manager.must_count(REFUSED, 1);
        manager.must_have_sessions(0);
        Victim::attach(&place.socket(), "the owner").round();
        std::fs::remove_file(place.own_folder().join("mine")).unwrap();
        assert!(manager.is_running());
        assert_eq!(manager.stop().0, Some(0));
    }
}

/// Goal: a member of the group that the operator named is served and may look, whether it is his
/// first group or a further one; he may not write what is not his, nor administrate. Everybody else
/// is where he was.
#[test]
fn sec_05_members_of_the_group_are_served() {
    if cannot_run() {
        return;
    }
    let group = GROUP.to_string();
    for umask in ["000", "077"] {
        let place = Place::new();
        let manager = place.start(umask, &["--allow-gid", &group]);
        must_have_modes(&place, Some(GROUP));
        assert_eq!(as_other(&place, by_ids(&place, STRANGER, STRANGER)), NOTHING);
        manager.must_count("orbitkv_session_opened_total", 0);
        let member = "list open\nmake EACCES\nread lock open\nwrite lock EACCES\n\
            read telemetry open\nwrite telemetry EACCES\nread tier EACCES\nwrite tier EACCES\n\
            connect open\nhello served\n";
        assert_eq!(as_other(&place, by_ids(&place, STRANGER, GROUP)), member);
        let further = by_setpriv(&place, STRANGER, STRANGER, &["--groups", &group]);
        assert_eq!(as_other(&place, further), member);
        manager.must_count("orbitkv_session_opened_total", 4);
        manager.must_have_sessions(0);
        let look = tool(&place, &["inspect", "--json"], GROUP);
        assert_eq!(look.status.code(), Some(0), "{}", String::from_utf8_lossy(&look.stderr));
        let evict = tool(&place, &["evict", "--tier", "dram"], GROUP);
        let words = String::from_utf8_lossy(&evict.stderr).into_owned();
        assert!(!evict.status.success() && words.contains("may not evict"), "{words}");
        // That connection; nobody else was turned away.
        manager.must_count(REFUSED, 1);
        assert_eq!(manager.stop().0, Some(0));
    }
}
