//! Where the socket goes, and who is there already.

use std::path::Path;

use orbitkv_shm_protocol::inspect::{self, InspectError, LifeState};
use rustix::fs::{FileType, Stat};
use rustix::io::Errno;

use super::Check;
use crate::config::SocketConfig;

pub(super) fn folder(socket: &SocketConfig) -> Check {
    let name = "runtime folder";
    let folder = socket.path.parent().unwrap_or(Path::new("/"));
    let elsewhere = "choose another --socket, or set XDG_RUNTIME_DIR";
    let shown = folder.display();
    match rustix::fs::stat(folder) {
        Ok(stat) => {
            let uid = rustix::process::geteuid().as_raw();
            let writable = rustix::fs::access(folder, rustix::fs::Access::WRITE_OK).is_ok();
            judge_folder(&shown, &stat, uid, writable)
        }
        Err(Errno::NOENT) if socket.path_is_default => {
            let parent = folder.ancestors().skip(1).find(|parent| parent.exists());
            let parent = parent.unwrap_or(Path::new("/"));
            if rustix::fs::access(parent, rustix::fs::Access::WRITE_OK).is_ok() {
                Check::ok(name, format!("{shown} is not there; a start makes it, mode 0700"))
            } else {
                let found = format!("{shown} is not there and {} not ours", parent.display());
                Check::fail(name, found, elsewhere)
            }
        }
        Err(errno) => {
            Check::fail(name, format!("{shown}: {errno}"), format!("make it, or {elsewhere}"))
        }
    }
}

fn judge_folder(shown: &dyn std::fmt::Display, stat: &Stat, uid: u32, writable: bool) -> Check {
    let name = "runtime folder";
    let mode = stat.st_mode & 0o7777;
    let found = format!("{shown}, mode {mode:04o}, uid {}", stat.st_uid);
    if FileType::from_raw_mode(stat.st_mode) != FileType::Directory {
        return Check::fail(name, format!("{shown} is no folder"), "choose another --socket");
    }
    if !writable {
        let fix = format!("make it writable for uid {uid}, or choose another --socket");
        return Check::fail(name, format!("{found}: cannot be written"), fix);
    }
    // With the sticky bit only owners rename and remove.
    if mode & 0o022 != 0 && mode & 0o1000 == 0 {
        return Check::warn(
            name,
            format!("{found}: others may replace the socket"),
            format!("chmod go-w {shown}"),
        );
    }
    Check::ok(name, found)
}

/// Looked at as `inspect` looks: nobody is asked.
pub(super) fn manager(socket: &Path) -> Check {
    let stat = rustix::fs::lstat(socket);
    let is_socket = stat.map(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Socket).ok();
    let life = match inspect::read(socket) {
        Ok(seen) => Ok(Some((seen.manager.state, seen.manager.pid, seen.manager.problems))),
        Err(InspectError::NotFound { .. }) => Ok(None),
        Err(error) => Err(error.to_string()),
    };
    judge_manager(&socket.display(), is_socket, &life)
}

type Life = Result<Option<(LifeState, u32, Vec<String>)>, String>;

/// `is_socket`: what lies at the path, if anything.
fn judge_manager(shown: &dyn std::fmt::Display, is_socket: Option<bool>, life: &Life) -> Check {
    let name = "manager";
    let replaced = "its socket is replaced by the next start";
    match (life, is_socket) {
        (_, Some(false)) => Check::fail(
            name,
            format!("{shown} is there and no socket"),
            "remove it, or choose another --socket",
        ),
        (Err(error), _) => Check::warn(name, error, "see orbitkv inspect"),
        (Ok(Some((LifeState::Dead, pid, _))), _) => {
            let left = if is_socket.is_some() { replaced } else { "nothing hinders a start" };
            Check::ok(name, format!("none; process {pid} has died on {shown}, {left}"))
        }
        (Ok(Some((_, pid, problems))), _) if !problems.is_empty() => {
            let problems = problems.join("; ");
            Check::warn(name, format!("process {pid} on {shown}: {problems}"), "restart it")
        }
        (Ok(Some((LifeState::Unresponsive, pid, _))), _) => Check::warn(
            name,
            format!("process {pid} holds {shown} and does not move"),
            "see orbitkv inspect; continue it (SIGCONT) or end it",
        ),
        (Ok(Some((state, pid, _))), _) => {
            Check::ok(name, format!("process {pid} serves {shown}, {}", state.label()))
        }
        (Ok(None), Some(true)) => {
            Check::ok(name, format!("none; {shown} was left behind, {replaced}"))
        }
        (Ok(None), None) => Check::ok(name, format!("none on {shown}")),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Status;
    use super::*;

    #[test]
    fn who_is_there_is_told() {
        let judge = |socket, life: Life| judge_manager(&"/run/a", socket, &life);
        let life = |state| Ok(Some((state, 7, Vec::new())));
        for (socket, life, status, words) in [
            (None, Ok(None), Status::Ok, "none on"),
            (Some(true), Ok(None), Status::Ok, "left behind"),
            (Some(false), Ok(None), Status::Fail, "no socket"),
            (Some(true), life(LifeState::Dead), Status::Ok, "replaced"),
            (Some(true), life(LifeState::Ready), Status::Ok, "process 7 serves"),
            (Some(true), life(LifeState::Unresponsive), Status::Warn, "does not move"),
            (None, Err("EACCES".to_owned()), Status::Warn, "EACCES"),
        ] {
            let check = judge(socket, life);
            assert!(check.status == status && check.found.contains(words), "{words}: {check:?}");
        }
    }

    #[test]
    fn folders_are_judged_by_mode_and_kind() {
        let folder = tempfile::tempdir().unwrap();
        let judge = |mode: u32, writable| {
            use std::os::unix::fs::PermissionsExt;
            std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(mode)).unwrap();
            let stat = rustix::fs::stat(folder.path()).unwrap();
            judge_folder(&"x", &stat, 1, writable).status
        };
        assert_eq!(judge(0o700, true), Status::Ok);
        assert_eq!(judge(0o1777, true), Status::Ok);
        assert_eq!(judge(0o770, true), Status::Warn);
        assert_eq!(judge(0o700, false), Status::Fail);
        let file = tempfile::NamedTempFile::new().unwrap();
        let stat = rustix::fs::fstat(&file).unwrap();
        assert_eq!(judge_folder(&"x", &stat, 1, true).status, Status::Fail);
    }
}
