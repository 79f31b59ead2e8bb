//! The kernel and what it gives to every process: wait on many words, handles of processes, cores,
//! descriptors.

use std::time::Duration;

use orbitkv_shm_protocol::bootstrap::peer::peer_pidfd as pidfd_of;
use orbitkv_shm_protocol::doorbell::{ControlBell, wait_many};
use orbitkv_shm_protocol::memory::WaitEnd;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::process::Resource;

use super::{Check, read};
use crate::config::Limits;

/// What a common session holds: socket, pidfd, submission segment, both segments on their way, a
/// few memories.
const DESCRIPTORS_A_SESSION: u64 = 8;
/// What the Manager holds without sessions: rings, eventfds, locks, SSD files, listeners.
const DESCRIPTORS_BASE: u64 = 64;

/// Major and minor number of a kernel release.
fn parse_release(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

pub(super) fn version() -> Check {
    judge_version(&read("/proc/sys/kernel/osrelease").unwrap_or_default())
}

fn judge_version(release: &str) -> Check {
    let name = "kernel";
    let found = format!("Linux {release}");
    match parse_release(release) {
        Some(version) if version >= (6, 5) => Check::ok(name, found),
        Some(version) if version >= (5, 16) => Check::warn(
            name,
            found,
            "works; from Linux 6.1 io_uring costs less, from 6.5 a dead client is told from one \
             that reuses its process id",
        ),
        Some(_) => Check::fail(name, found, "use Linux 5.16 or later (6.5 or later is better)"),
        None => Check::warn(name, found, "the version cannot be read; 6.5 or later is meant"),
    }
}

/// Tried: a wait on two words, one of which has changed already, comes back at once.
pub(super) fn futex_waitv() -> Check {
    let name = "futex_waitv";
    let bells = [ControlBell::new(), ControlBell::new()];
    let waits = bells.each_ref().map(|bell| (bell.sleeper(), bell.sleeper().begin()));
    let changed = waits.map(|(sleeper, seen)| (sleeper, seen.wrapping_add(1)));
    let end = wait_many(&changed, Duration::from_millis(1));
    for bell in &bells {
        bell.sleeper().end();
    }
    match end {
        WaitEnd::Napped => Check::warn(
            name,
            "refused: the Manager naps between looks at its sessions",
            "use Linux 5.16 or later and allow futex_waitv in the container's seccomp profile",
        ),
        _ => Check::ok(name, "waits on many sessions at once"),
    }
}

/// Tried on a socket pair.
pub(super) fn peer_pidfd() -> Check {
    let name = "peer pidfd";
    let flags = SocketFlags::CLOEXEC;
    let pair = match socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None) {
        Ok(pair) => pair,
        Err(errno) => {
            return Check::fail(name, format!("no socket: {errno}"), "allow Unix sockets");
        }
    };
    match pidfd_of(&pair.0) {
        Ok(_) => Check::ok(name, "the death of a client is seen at once"),
        Err(error) => Check::fail(
            name,
            error,
            "use Linux 6.5 or later, or allow pidfd_open in the container's seccomp profile",
        ),
    }
}

/// Processors that this process may run on.
pub(super) fn cores() -> u32 {
    rustix::thread::sched_getaffinity(None).map_or(1, |set| set.count()).max(1)
}

pub(super) fn check_cores(cores: u32) -> Check {
    let name = "cores";
    if cores > 1 {
        return Check::ok(name, format!("{cores} in the affinity mask"));
    }
    Check::warn(
        name,
        "1 in the affinity mask: no wait ever spins, every answer costs a wake",
        "give the Manager and its engines two cores or more (taskset, cpuset.cpus, --cpus)",
    )
}

pub(super) fn descriptors(limits: &Limits) -> Check {
    let limit = rustix::process::getrlimit(Resource::Nofile);
    let needed = DESCRIPTORS_BASE + u64::from(limits.sessions) * DESCRIPTORS_A_SESSION;
    judge_descriptors(limit.current, limit.maximum, needed)
}

fn judge_descriptors(soft: Option<u64>, hard: Option<u64>, needed: u64) -> Check {
    let name = "descriptors";
    let text = |limit: Option<u64>| limit.map_or("unlimited".to_owned(), |n| n.to_string());
    let found =
        format!("soft limit {}, hard limit {}, {needed} for all sessions", text(soft), text(hard));
    match hard {
        // `serve` raises the soft limit itself.
        Some(hard) if hard < DESCRIPTORS_BASE * 2 => Check::fail(
            name,
            found,
            format!("raise the hard limit to {needed} (ulimit -Hn, LimitNOFILE=)"),
        ),
        Some(hard) if hard < needed => Check::warn(
            name,
            found,
            format!(
                "with all sessions attached some are refused: raise the hard limit to {needed} \
                 (ulimit -Hn, LimitNOFILE=)"
            ),
        ),
        _ => Check::ok(name, found),
    }
}

pub(super) fn user_namespace() -> Check {
    judge_user_namespace(read("/proc/self/uid_map").as_deref())
}

fn judge_user_namespace(map: Option<&str>) -> Check {
    let name = "user namespace";
    let Some(map) = map else {
        return Check::warn(name, "unknown: /proc/self/uid_map cannot be read", "mount /proc");
    };
    let words: Vec<&str> = map.split_whitespace().collect();
    if words == ["0", "0", "4294967295"] {
        return Check::ok(name, "the first one");
    }
    Check::warn(
        name,
        format!("inside one (uid map {})", words.join(" ")),
        "run engines in the same one: process_vm access and socket ownership end at its border; a \
         sealed memfd does not need the former",
    )
}

#[cfg(test)]
mod tests {
    use super::super::Status;
    use super::*;

    #[test]
    fn releases_are_judged_by_number() {
        for (release, status) in [
            ("6.18.44", Status::Ok),
            ("6.5.0-1023-aws", Status::Ok),
            ("10.0-rc1", Status::Ok),
            ("6.4.99", Status::Warn),
            ("5.16.0", Status::Warn),
            ("5.15.0-91-generic", Status::Fail),
            ("4.19", Status::Fail),
            ("rolling", Status::Warn),
        ] {
            let check = judge_version(release);
            assert_eq!(check.status, status, "{release}");
            assert_eq!(check.fix.is_empty(), status == Status::Ok);
        }
    }

    #[test]
    fn descriptors_are_judged_by_the_hard_limit() {
        let status = |hard| judge_descriptors(Some(64), hard, 4096).status;
        assert_eq!(status(None), Status::Ok);
        assert_eq!(status(Some(4096)), Status::Ok);
        assert_eq!(status(Some(1024)), Status::Warn);
        assert_eq!(status(Some(64)), Status::Fail);
    }

    #[test]
    fn only_the_identity_map_is_the_first_namespace() {
        assert_eq!(
            judge_user_namespace(Some("         0          0 4294967295")).status,
            Status::Ok
        );
        for map in [Some("0 1000 1"), Some("0 100000 65536\n1000 1000 1"), None] {
            assert_eq!(judge_user_namespace(map).status, Status::Warn);
        }
    }

    #[test]
    fn one_core_is_warned_about() {
        assert_eq!((check_cores(1).status, check_cores(2).status), (Status::Warn, Status::Ok));
        assert!(cores() >= 1);
    }
}
