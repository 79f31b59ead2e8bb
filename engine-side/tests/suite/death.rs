//! The Manager dies, or closes the session, at the worst moment.

use std::collections::HashSet;
use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use orbitkv_engine::{
    Client, Connect, ConnectError, Gone, Operation, RegisterError, RequestKind, SessionState,
    Status, SubmitError, WaitManyError, wait_many,
};

use crate::rig::{PATIENCE, Rig, blocks, hashes, namespace};
use crate::twin::{Server, Twin};

/// Where a twin that is a process of its own listens.
const SOCKET_VARIABLE: &str = "ORBITKV_TEST_TWIN_SOCKET";

/// A twin in a process of its own. It answers nothing but pings and registrations.
struct Stranger {
    process: Child,
    folder: tempfile::TempDir,
}

impl Stranger {
    fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let process = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "death::twin_process", "--ignored", "--quiet"])
            .env(SOCKET_VARIABLE, folder.path().join("manager.sock"))
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap();
        Self { process, folder }
    }

    fn connect(&self) -> Client {
        let end = Instant::now() + PATIENCE;
        loop {
            match Connect::new(self.folder.path().join("manager.sock")).connect() {
                Ok(client) => return client,
                Err(ConnectError::NoSocket { .. }) if Instant::now() < end => {
                    std::thread::sleep(Duration::from_millis(2));
                }
                Err(error) => panic!("{error}"),
            }
        }
    }

    fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
#[ignore = "the process that other tests here start and kill"]
fn twin_process() {
    let path = std::env::var_os(SOCKET_VARIABLE).expect("started by another test");
    let mut server = Server::listen(Path::new(&path));
    server.hold = RequestKind::ALL.iter().copied().filter(|k| *k != RequestKind::Ping).collect();
    // Not for ever, should the test that started it be killed.
    let end = Instant::now() + 10 * PATIENCE;
    while Instant::now() < end {
        server.turn();
    }
}

/// Everything the client still says, and why it stops.
fn last_words(client: &mut Client) -> (Vec<(Operation, Status)>, Gone) {
    let mut told = Vec::new();
    loop {
        match client.wait(PATIENCE) {
            Ok(Some(completion)) => told.push((completion.operation, completion.status)),
            Ok(None) => panic!("{} operations were never reported", client.outstanding()),
            Err(gone) => return (told, gone),
        }
    }
}

/// Goal: a waiter learns of the death, each operation is reported once, completions that were
/// published before are still delivered. Method: SIGKILL a real process while the client sleeps.
#[test]
fn a_killed_manager_ends_every_operation_once() {
    let mut stranger = Stranger::start();
    let mut rig = Rig::over(stranger.connect());
    let ping = rig.client.ping().unwrap();
    assert_eq!(rig.next().operation, ping);
    let mut names = HashSet::new();
    for sequence in 0..10 {
        names.insert(rig.client.save(&rig.region, &blocks(sequence, 3, 0)).unwrap());
    }
    // Answered in one batch: once the first was taken, the second lies in the ring.
    let taken = rig.client.ping().unwrap();
    let published = rig.client.ping().unwrap();
    assert_eq!(rig.next().operation, taken);
    let killer = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(30));
        stranger.kill();
        stranger
    });
    let (told, gone) = last_words(&mut rig.client);
    let stranger = killer.join().unwrap();
    assert_eq!(gone, Gone::Died);
    assert!(rig.client.has_manager_exited());
    assert_eq!(told[0], (published, Status::Ok));
    let lost: HashSet<_> = told[1..]
        .iter()
        .map(|(operation, status)| {
            assert_eq!(*status, Status::Gone);
            *operation
        })
        .collect();
    assert_eq!((lost, told.len()), (names, 11), "each once");
    assert_eq!(rig.client.ping(), Err(SubmitError::ManagerGone(Gone::Died)));
    let late = rig.client.define_namespace(&namespace("late"));
    assert!(matches!(late, Err(RegisterError::ManagerGone(Gone::Died))));
    drop(stranger);
}

/// Goal: an engine that only polls learns of the death too, when it asks. Method: as above, by
/// `check_manager`.
#[test]
fn a_polling_engine_learns_of_the_death_when_it_asks() {
    let mut stranger = Stranger::start();
    let mut rig = Rig::over(stranger.connect());
    let save = rig.client.save(&rig.region, &blocks(1, 1, 0)).unwrap();
    rig.client.submit().unwrap();
    rig.client.check_manager().unwrap();
    assert_eq!(rig.client.poll(), Ok(None));
    stranger.kill();
    assert_eq!(rig.client.check_manager(), Ok(()));
    let told = rig.client.poll().unwrap().unwrap();
    assert_eq!((told.operation, told.status), (save, Status::Gone));
    assert_eq!(rig.client.results(&told).len(), 0);
    assert_eq!(rig.client.poll(), Err(Gone::Died));
}

/// Goal: a death during registration is no timeout. Method: the process is dead before the call.
#[test]
fn registering_with_a_dead_manager_says_so() {
    let mut stranger = Stranger::start();
    let mut client = stranger.connect();
    stranger.kill();
    let error = client.define_namespace(&namespace("x")).unwrap_err();
    assert!(matches!(error, RegisterError::ManagerGone(Gone::Died)), "{error:?}");
    assert_eq!(client.wait(PATIENCE), Err(Gone::Died));
}

/// Goal: of several clients the one whose Manager died is named, the others go on. Method: two
/// Managers, one killed.
#[test]
fn waiting_on_many_names_the_client_whose_manager_died() {
    let twin = Twin::start();
    let mut stranger = Stranger::start();
    let mut alive = Rig::new(twin.path());
    let mut doomed = Rig::over(stranger.connect());
    twin.hold(RequestKind::ALL);
    let kept = alive.client.ping().unwrap();
    let names = hashes(1, 1);
    let lost = doomed.client.prepare(&doomed.scope, &names).unwrap();
    doomed.client.submit().unwrap();
    stranger.kill();
    let mut both = [&mut alive.client, &mut doomed.client];
    let (at, told) = wait_many(&mut both, PATIENCE).unwrap().unwrap();
    assert_eq!((at, told.operation, told.status), (1, lost, Status::Gone));
    let over = wait_many(&mut both, PATIENCE);
    assert_eq!(over, Err(WaitManyError::Gone { client: 1, gone: Gone::Died }));
    twin.hold(&[]);
    let (at, told) = wait_many(&mut both[..1], PATIENCE).unwrap().unwrap();
    assert_eq!((at, told.operation, told.status), (0, kept, Status::Ok));
}

/// Goal: a closed session is told from a dead Manager: memory may still be in use. Method: the
/// twin drops one seat and lives on.
#[test]
fn a_closed_session_is_no_proof_of_death() {
    let twin = Twin::start();
    let mut rig = Rig::new(twin.path());
    twin.hold(RequestKind::ALL);
    let ping = rig.client.ping().unwrap();
    rig.client.submit().unwrap();
    twin.with(|server| server.seats.clear());
    let (told, gone) = last_words(&mut rig.client);
    assert_eq!((told, gone), (vec![(ping, Status::Gone)], Gone::Closed));
    assert!(gone.copies_may_run());
    assert!(!rig.client.has_manager_exited());
    let mut again = Rig::new(twin.path());
    twin.hold(&[]);
    again.client.ping().unwrap();
    assert_eq!(again.next().status, Status::Ok, "another session is welcome");
}

/// Goal: a Manager that says goodbye in the segment is heard by a mere poll, after what it
/// published before. Method: the state word, with one answer in front of it.
#[test]
fn a_goodbye_in_the_segment_is_heard_without_a_system_call() {
    let twin = Twin::start();
    let mut rig = Rig::new(twin.path());
    twin.hold(&[RequestKind::Save]);
    let save = rig.client.save(&rig.region, &blocks(1, 1, 0)).unwrap();
    let ping = rig.client.ping().unwrap();
    rig.client.submit().unwrap();
    let end = Instant::now() + PATIENCE;
    while twin.with(|server| server.seats[0].side.completions.published()) == 0 {
        assert!(Instant::now() < end);
    }
    twin.with(|server| server.seats[0].side.set_state(SessionState::Closed));
    let told = rig.client.poll().unwrap().unwrap();
    assert_eq!((told.operation, told.status), (ping, Status::Ok));
    let told = rig.client.poll().unwrap().unwrap();
    assert_eq!((told.operation, told.status), (save, Status::Gone));
    assert_eq!(rig.client.ping(), Err(SubmitError::ManagerGone(Gone::Closed)));
    assert_eq!(rig.client.poll(), Err(Gone::Closed));
}
