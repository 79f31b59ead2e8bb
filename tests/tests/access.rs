//! Who may attach, open and look, by the uids and gids of real processes (SEC-05).
//!
//! Fault model: another user of the host who knows every path, with and without the right to get
//! past the modes of files; members of the group that the operator named. Needs root, to be others.

use std::fs::File;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use orbitkv_shm_protocol::bootstrap::message::{ManagerMessage, Refusal};
use orbitkv_shm_protocol::bootstrap::{peer, transport};
use orbitkv_shm_protocol::telemetry::{Metric, RefuseReason};
use orbitkv_tests::manager::{Manager, PATIENCE, Setup};
use orbitkv_tests::program::Program;
use orbitkv_tests::raw::hello;
use orbitkv_tests::setup;
use orbitkv_tests::victim::Victim;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType};

/// Users and groups that no system gives to anybody.
const STRANGER: u32 = 54_321;
const GROUP: u32 = 54_322;
const REFUSED: Metric = Metric::SessionsRefused(RefuseReason::NotAllowed);

/// Says why and returns true when this test cannot run here.
fn cannot_run() -> bool {
    let is_root = rustix::process::geteuid().is_root();
    if !is_root {
        println!("not run: to become other users this test must be started by root");
    }
    !is_root
}

/// A Manager with the default socket, and where it has everything that it makes.
struct Place {
    manager: Manager,
    /// This test's program and the Manager's, where others may run them.
    test: Program,
    orbitkv: Program,
}

impl Place {
    /// Starts it in folders that everybody may look into: what protects is what the Manager makes.
    fn new(umask: &str, more: &[&str]) -> Self {
        let masked = format!("umask {umask}; exec \"$@\"");
        let setup: Setup = setup!().at_default_socket().under(&["sh", "-c", &masked, "sh"]);
        for folder in [setup.runtime(), setup.folder()] {
            open_to_all(folder);
        }
        let test = Program::copy(&std::env::current_exe().unwrap());
        let orbitkv = Program::copy(setup.program());
        let manager = setup.dram("16MiB").ssd("32MiB").flags(more).start();
        Self { manager, test, orbitkv }
    }

    fn own_folder(&self) -> PathBuf {
        self.manager.setup().runtime().join("orbitkv")
    }

    fn socket(&self) -> PathBuf {
        self.manager.socket()
    }

    /// Everything with a name, and its mode without and with a group.
    fn artefacts(&self) -> [(PathBuf, u32, u32); 5] {
        [
            (self.own_folder(), 0o700, 0o750),
            (self.socket(), 0o600, 0o660),
            (peer::lock_path(&self.socket()), 0o600, 0o640),
            (self.manager.setup().telemetry_file(), 0o600, 0o640),
            (self.manager.setup().ssd_file(), 0o600, 0o600),
        ]
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
        let mut place = Place::new(umask, &[]);
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
        place.manager.counted(REFUSED, 0);
        // Past the modes, not past the Manager.
        let past =
            ["--clear-groups", "--inh-caps", "+dac_override", "--ambient-caps", "+dac_override"];
        let said = as_other(&place, by_setpriv(&place, STRANGER, STRANGER, &past));
        assert!(said.ends_with("connect open\nhello not allowed\n"), "{said}");
        place.manager.counted(REFUSED, 1);
        place.manager.has_sessions(0);
        Victim::attach(&place.socket(), "the owner").round();
        std::fs::remove_file(place.own_folder().join("mine")).unwrap();
        assert!(place.manager.is_running());
        place.manager.stop();
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
        let place = Place::new(umask, &["--allow-gid", &group]);
        must_have_modes(&place, Some(GROUP));
        assert_eq!(as_other(&place, by_ids(&place, STRANGER, STRANGER)), NOTHING);
        place.manager.counted(Metric::SessionsOpened, 0);
        let member = "list open\nmake EACCES\nread lock open\nwrite lock EACCES\n\
            read telemetry open\nwrite telemetry EACCES\nread tier EACCES\nwrite tier EACCES\n\
            connect open\nhello served\n";
        assert_eq!(as_other(&place, by_ids(&place, STRANGER, GROUP)), member);
        let further = by_setpriv(&place, STRANGER, STRANGER, &["--groups", &group]);
        assert_eq!(as_other(&place, further), member);
        place.manager.counted(Metric::SessionsOpened, 4);
        place.manager.has_sessions(0);
        let look = tool(&place, &["inspect", "--json"], GROUP);
        assert_eq!(look.status.code(), Some(0), "{}", String::from_utf8_lossy(&look.stderr));
        let evict = tool(&place, &["evict", "--tier", "dram"], GROUP);
        let words = String::from_utf8_lossy(&evict.stderr).into_owned();
        assert!(!evict.status.success() && words.contains("may not evict"), "{words}");
        // That connection; nobody else was turned away.
        place.manager.counted(REFUSED, 1);
        place.manager.stop();
    }
}
