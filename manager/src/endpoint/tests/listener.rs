//! One Manager a socket; modes that no umask changes; stale files replaced, others left alone.

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener;

use orbitkv_shm_protocol::bootstrap::peer::lock_path;
use rustix::fs::{FlockOperation, Mode};

use super::super::{ListenError, Listener, SocketFile};
use super::*;

fn listen(path: &Path) -> (SocketFile, Listener) {
    Claim::take(&socket_config(path)).unwrap().listen().unwrap()
}

fn mode(path: &Path) -> u32 {
    std::fs::symlink_metadata(path).unwrap().permissions().mode() & 0o7777
}

#[test]
fn the_socket_appears_by_publish_only_and_goes_at_the_end_while_its_lock_file_stays() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.sock");
    let (mut file, listener) = listen(&path);
    assert!(!path.exists());
    assert!(!file.publish().unwrap(), "nothing stale was there");
    let client = connect(&path).unwrap();
    assert!(listener.accept().unwrap().is_some());
    drop(client);
    drop(file);
    assert!(!path.exists());
    let pid = std::fs::read_to_string(lock_path(&path)).unwrap();
    assert_eq!(pid.trim().parse::<u32>().unwrap(), std::process::id());
    let left: Vec<_> = std::fs::read_dir(folder.path()).unwrap().collect();
    assert_eq!(left.len(), 1, "{left:?}");
    // And again, over the lock file that stayed.
    listen(&path).0.publish().unwrap();
}

#[test]
fn a_start_that_fails_before_it_is_ready_leaves_nothing_that_it_made() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.sock");
    drop(listen(&path));
    assert!(std::fs::read_dir(folder.path()).unwrap().next().is_none());
    // A lock file that was there before stays.
    listen(&path).0.publish().unwrap();
    drop(listen(&path));
    let left: Vec<_> = std::fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap()).collect();
    assert_eq!(left.len(), 1);
    assert_eq!(left[0].path(), lock_path(&path));
}

/// Goal: taking the lock file away never lets two Managers hold one socket. Method: starts that
/// fail and take it away race with starts that check that they are alone.
#[test]
fn a_lock_that_comes_and_goes_is_held_by_one_at_a_time() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.sock");
    let holders = std::sync::atomic::AtomicU32::new(0);
    let taken = std::sync::atomic::AtomicU32::new(0);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..200 {
                    let Ok(claim) = Claim::take(&socket_config(&path)) else { continue };
                    let order = std::sync::atomic::Ordering::SeqCst;
                    assert_eq!(holders.fetch_add(1, order), 0, "two hold the lock");
                    taken.fetch_add(1, order);
                    std::thread::yield_now();
                    holders.fetch_sub(1, order);
                    drop(claim);
                }
            });
        }
    });
    assert!(taken.into_inner() >= 200);
}

#[test]
fn a_second_manager_is_refused_with_the_pid_and_the_first_serves_on() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.sock");
    let (mut file, listener) = listen(&path);
    file.publish().unwrap();
    let before = std::fs::symlink_metadata(&path).unwrap().ino();
    let error = Claim::take(&socket_config(&path)).unwrap_err();
    let ours = Some(std::process::id());
    assert!(matches!(error, ListenError::AlreadyRunning { pid, .. } if pid == ours), "{error}");
    assert!(error.to_string().contains(&format!("pid {}", std::process::id())), "{error}");
    assert_eq!(std::fs::symlink_metadata(&path).unwrap().ino(), before);
    let _client = connect(&path).unwrap();
    assert!(listener.accept().unwrap().is_some());
}

#[test]
fn a_pid_in_an_unlocked_file_proves_nothing() {
    for pid in [1, std::process::id()] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.sock");
        std::fs::write(lock_path(&path), format!("{pid}\nand more than there was")).unwrap();
        listen(&path).0.publish().unwrap();
        let text = std::fs::read_to_string(lock_path(&path)).unwrap();
        assert_eq!(text, format!("{}\n", std::process::id()));
    }
}

#[test]
fn a_reader_that_probes_the_lock_for_a_moment_does_not_stop_a_start() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.sock");
    let probe = std::fs::File::create(lock_path(&path)).unwrap();
    rustix::fs::flock(&probe, FlockOperation::LockShared).unwrap();
    let releaser = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(20));
        drop(probe);
    });
    listen(&path);
    releaser.join().unwrap();
}

#[test]
fn a_stale_socket_is_replaced_and_said_so() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.sock");
    drop(UnixListener::bind(&path).unwrap());
    // And one that was killed while it started.
    drop(UnixListener::bind(folder.path().join("m.sock.new")).unwrap());
    assert!(connect(&path).is_err());
    let (mut file, listener) = listen(&path);
    assert!(connect(&path).is_err(), "not before it is ready");
    assert!(file.publish().unwrap(), "the stale one is reported");
    let _client = connect(&path).unwrap();
    assert!(listener.accept().unwrap().is_some());
}

#[test]
fn a_file_that_is_no_socket_is_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.sock");
    std::fs::write(&path, "precious").unwrap();
    let error = Claim::take(&socket_config(&path)).unwrap_err();
    assert!(matches!(error, ListenError::NotASocket { .. }), "{error}");
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
    assert!(!lock_path(&path).exists());
}

#[test]
fn a_socket_that_somebody_put_in_place_of_ours_stays() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.sock");
    let (mut file, _listener) = listen(&path);
    file.publish().unwrap();
    std::fs::remove_file(&path).unwrap();
    let _theirs = UnixListener::bind(&path).unwrap();
    drop(file);
    assert!(path.exists());
}

#[test]
fn a_lock_file_that_was_removed_under_us_locks_nobody_out_of_the_new_one() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("m.sock");
    let first = listen(&path);
    std::fs::remove_file(lock_path(&path)).unwrap();
    // The operator removed the proof that the first one lives: a second one starts.
    let second = listen(&path);
    drop((first, second));
}

#[test]
fn a_missing_folder_is_named_and_not_made() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("none").join("m.sock");
    let error = Claim::take(&socket_config(&path)).unwrap_err();
    assert!(matches!(error, ListenError::Folder { .. }), "{error}");
    assert!(error.to_string().contains(&folder.path().join("none").display().to_string()));
    let file = folder.path().join("file");
    std::fs::write(&file, "").unwrap();
    let error = Claim::take(&socket_config(&file.join("m.sock"))).unwrap_err();
    assert!(matches!(error, ListenError::Folder { .. }), "{error}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn the_default_folder_must_be_ours_and_real() {
    let folder = tempfile::tempdir().unwrap();
    let elsewhere = folder.path().join("elsewhere");
    std::fs::create_dir(&elsewhere).unwrap();
    let link = folder.path().join("orbitkv");
    std::os::unix::fs::symlink(&elsewhere, &link).unwrap();
    let config =
        SocketConfig { path_is_default: true, ..socket_config(&link.join("manager.sock")) };
    let error = Claim::take(&config).unwrap_err();
    assert!(matches!(error, ListenError::FolderNotOurs { .. }), "{error}");
    assert_eq!(std::fs::read_dir(&elsewhere).unwrap().count(), 0);
}

const UMASK: &str = "ORBITKV_TEST_UMASK";

/// The body of the next test, in a process that has the umask for itself.
#[test]
fn modes_under_the_umask_of_the_environment() {
    let Ok(umask) = std::env::var(UMASK) else { return };
    let umask = u32::from_str_radix(&umask, 8).unwrap();
    // The folder of the test must be usable whatever the umask.
    let root = tempfile::tempdir().unwrap();
    rustix::process::umask(Mode::from_raw_mode(umask));
    let gid = rustix::process::getegid().as_raw();
    for (gids, folder_mode, socket_mode, lock_mode) in
        [(vec![], 0o700, 0o600, 0o600), (vec![gid], 0o750, 0o660, 0o640)]
    {
        let folder = root.path().join(format!("orbitkv-{socket_mode:o}"));
        let path = folder.join("manager.sock");
        let config =
            SocketConfig { path_is_default: true, allow_gids: gids, ..socket_config(&path) };
        // The second time over what the first one left, the third over modes that somebody spoilt.
        for spoil in [false, false, true] {
            if spoil {
                for (path, mode) in [(&folder, 0o755), (&lock_path(&path), 0o644)] {
                    std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
                }
            }
            let (mut file, _listener) = Claim::take(&config).unwrap().listen().unwrap();
            file.publish().unwrap();
            assert_eq!(mode(&folder), folder_mode);
            assert_eq!(mode(&path), socket_mode);
            assert_eq!(mode(&lock_path(&path)), lock_mode);
        }
    }
    println!("modes checked");
}

#[test]
fn modes_do_not_follow_the_umask() {
    for umask in ["000", "077", "022"] {
        let test = "endpoint::tests::listener::modes_under_the_umask_of_the_environment";
        let output = rerun(test, UMASK, umask).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains("modes checked"), "{umask}: {text}");
    }
}
