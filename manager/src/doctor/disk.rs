//! The SSD tier: how I/O may be done, and whether the folder is one for it.

use std::path::Path;

use rustix::io::Errno;

use super::{Check, read, size, status_field};
use crate::ssd::probe::{FileSystem, probe_buffers, probe_folder, probe_ring};
use crate::ssd::{SsdError, TaskRun};

const DISABLED: &str = "/proc/sys/kernel/io_uring_disabled";

/// Tried: a ring is made, as a worker makes it, and entered once.
pub(super) fn io_uring() -> Check {
    judge_ring(probe_ring(), &Refuser::look())
}

/// Tried with a small buffer. The size of the pool is judged by the limit of locked memory.
pub(super) fn registered_buffers() -> Check {
    judge_buffers(probe_buffers(), &Refuser::look())
}

/// Who may have refused io_uring.
#[derive(Clone, Copy, Debug)]
struct Refuser {
    /// `kernel.io_uring_disabled`, where the kernel has it (Linux 6.6).
    disabled: Option<u32>,
    /// This process runs under a seccomp filter.
    filtered: bool,
}

impl Refuser {
    fn look() -> Self {
        let status = read("/proc/self/status").unwrap_or_default();
        Self {
            disabled: read(DISABLED).and_then(|text| text.parse().ok()),
            filtered: status_field(&status, "Seccomp") == Some("2"),
        }
    }

    /// What refused, and what to do about it.
    fn name(&self, errno: Errno) -> (String, &'static str) {
        let seccomp = "allow io_uring_setup, io_uring_enter and io_uring_register in the seccomp \
                       profile (docker run --security-opt seccomp=FILE; SystemCallFilter= of a \
                       unit); until then preadv/pwritev threads serve the tier";
        match self.disabled {
            Some(2) => (
                format!("{errno}: kernel.io_uring_disabled is 2, which forbids it to everybody"),
                "sysctl -w kernel.io_uring_disabled=0; until then preadv/pwritev threads serve the \
                 tier",
            ),
            Some(1) if errno == Errno::PERM => (
                format!("{errno}: kernel.io_uring_disabled is 1, which allows it to few"),
                "sysctl -w kernel.io_uring_disabled=0, or join the group of \
                 kernel.io_uring_group; until then preadv/pwritev threads serve the tier",
            ),
            _ if self.filtered => {
                (format!("{errno}: the seccomp filter of this process refuses it"), seccomp)
            }
            _ if errno == Errno::NOSYS => (
                format!("{errno}: this kernel has no io_uring"),
                "use a kernel with CONFIG_IO_URING; until then preadv/pwritev threads serve the \
                 tier",
            ),
            _ => (format!("{errno}: a security module or another limit refuses it"), seccomp),
        }
    }
}

fn judge_ring(probed: Result<TaskRun, Errno>, refuser: &Refuser) -> Check {
    let name = "io_uring";
    match probed {
        Ok(TaskRun::Deferred) => Check::ok(name, "allowed, SINGLE_ISSUER with DEFER_TASKRUN"),
        Ok(TaskRun::Cooperative) => Check::warn(
            name,
            "allowed, with COOP_TASKRUN only",
            "works; Linux 6.1 and later need less CPU for it",
        ),
        Ok(TaskRun::Plain) => Check::warn(
            name,
            "allowed, without COOP_TASKRUN",
            "works; Linux 5.19 and later need less CPU for it, 6.1 and later even less",
        ),
        Err(errno) => {
            let (found, fix) = refuser.name(errno);
            Check::warn(name, found, fix)
        }
    }
}

fn judge_buffers(probed: Result<(), Errno>, refuser: &Refuser) -> Check {
    let name = "registered buffers";
    let fix = "SSD I/O works without them, at a little more CPU; raise RLIMIT_MEMLOCK (ulimit -l) \
               or grant CAP_IPC_LOCK";
    match probed {
        Ok(()) => Check::ok(name, "a small buffer is taken by the kernel"),
        Err(Errno::NOMEM) => Check::warn(name, "no memory may be locked", fix),
        Err(errno) => {
            let (found, fix) = refuser.name(errno);
            Check::warn(name, found, fix)
        }
    }
}

/// Tried: a file is made in the folder, written and read with `O_DIRECT` and removed.
pub(super) fn folder(folder: &Path) -> Vec<Check> {
    let name = "ssd path";
    let elsewhere = "choose a folder on a local disk with --ssd, for example on ext4 or xfs";
    let shown = folder.display();
    match probe_folder(folder) {
        Err(error @ SsdError::NoDirectIo { .. }) => {
            vec![
                Check::ok(name, format!("{shown} can be written")),
                Check::fail("O_DIRECT", error, "choose another path, or --ssd-direct off"),
            ]
        }
        Err(error) => vec![Check::fail(name, error, elsewhere)],
        Ok(probe) => {
            let kind = probe.file_system.name();
            let free = size(probe.free_bytes);
            let found = format!("{shown} is on {kind}, {free} free");
            let path = match probe.file_system {
                FileSystem::Overlay => Check::warn(
                    name,
                    found,
                    "mount a volume: overlayfs costs up to a quarter of the bandwidth with small \
                     pages, and what is on it goes with the container",
                ),
                FileSystem::Network(_) => {
                    Check::warn(name, found, "choose a local disk: a network is slower than DRAM")
                }
                _ => Check::ok(name, found),
            };
            let space = if probe.preallocated {
                Check::ok("fallocate", "space can be reserved")
            } else {
                Check::warn(
                    "fallocate",
                    "the file system cannot reserve space",
                    "choose ext4 or xfs: writes fail when the disk gets full",
                )
            };
            let direct = Check::ok("O_DIRECT", "4 KiB written around the page cache and read back");
            vec![path, direct, space]
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Status;
    use super::*;

    const FREE: Refuser = Refuser { disabled: Some(0), filtered: false };

    /// The four who refuse are told apart.
    #[test]
    fn the_refuser_is_named() {
        let named = |errno, disabled, filtered| {
            let check = judge_ring(Err(errno), &Refuser { disabled, filtered });
            assert_eq!(check.status, Status::Warn);
            assert!(check.fix.contains("preadv"), "{}", check.fix);
            check.found
        };
        for (found, words) in [
            (named(Errno::PERM, Some(2), true), "io_uring_disabled is 2"),
            (named(Errno::PERM, Some(1), false), "io_uring_disabled is 1"),
            (named(Errno::PERM, Some(0), true), "seccomp filter"),
            (named(Errno::NOSYS, Some(0), true), "seccomp filter"),
            (named(Errno::NOSYS, None, false), "no io_uring"),
            (named(Errno::ACCESS, Some(0), false), "security module"),
        ] {
            assert!(found.contains(words), "{words}: {found}");
        }
    }

    #[test]
    fn lesser_rings_are_warned_about() {
        assert_eq!(judge_ring(Ok(TaskRun::Deferred), &FREE).status, Status::Ok);
        assert_eq!(judge_ring(Ok(TaskRun::Cooperative), &FREE).status, Status::Warn);
        assert_eq!(judge_ring(Ok(TaskRun::Plain), &FREE).status, Status::Warn);
        assert_eq!(judge_buffers(Ok(()), &FREE).status, Status::Ok);
        let locked = judge_buffers(Err(Errno::NOMEM), &FREE);
        assert!(locked.status == Status::Warn && locked.fix.contains("MEMLOCK"), "{locked:?}");
    }

    #[test]
    fn memory_is_no_disk_and_a_missing_folder_is_named() {
        let memory = folder(Path::new("/dev/shm"));
        assert!(memory.len() == 1 && memory[0].status == Status::Fail, "{memory:?}");
        assert!(memory[0].found.contains("tmpfs"), "{memory:?}");
        let missing = folder(Path::new("/nowhere/at/all"));
        assert!(missing[0].status == Status::Fail, "{missing:?}");
        assert!(missing[0].found.contains("does not exist"), "{missing:?}");
    }
}
