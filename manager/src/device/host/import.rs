//! Why engine memory cannot be reached, by cause, so that the refusal says what to change.

use std::os::unix::fs::MetadataExt;

use orbitkv_shm_protocol::bootstrap::message::Refusal;
use rustix::io::Errno;

/// Why a memory was refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ImportError {
    /// Zero bytes, or a range that wraps around.
    #[error("memory range is empty or wraps around the address space")]
    BadRange,
    /// A memfd was announced and no descriptor came along.
    #[error("memfd registered without its descriptor")]
    DescriptorMissing,
    /// Some other file.
    #[error("descriptor is not a memfd: create it with memfd_create")]
    NotMemfd,
    /// Holes in such a file can take its pages away from a mapping.
    #[error("memfd with MFD_HUGETLB is not supported: create it without that flag")]
    HugetlbMemfd,
    /// Opened without write access.
    #[error("memfd descriptor is read-only: restores need write access")]
    ReadOnly,
    /// Sealed against writing.
    #[error("memfd is sealed against writing: restores need write access")]
    WriteSealed,
    /// Shorter than announced.
    #[error("memfd has {size_bytes} bytes, {bytes} were registered")]
    TooShort {
        /// Its size.
        size_bytes: u64,
        /// As registered.
        bytes: u64,
    },
    /// The process is gone.
    #[error("engine process {pid} exited")]
    Exited {
        /// Its id.
        pid: i32,
    },
    /// It runs under another uid.
    #[error(
        "process_vm access to process {pid} of uid {theirs} refused to uid {ours}: run both as one user, or register a sealed memfd"
    )]
    OtherUser {
        /// Its id.
        pid: i32,
        /// Its uid.
        theirs: u32,
        /// The Manager's uid.
        ours: u32,
    },
    /// It runs in another user namespace.
    #[error(
        "process_vm access to process {pid} refused: it is in another user namespace; register a sealed memfd"
    )]
    UserNamespace {
        /// Its id.
        pid: i32,
    },
    /// Yama forbids it.
    #[error(
        "process_vm access to process {pid} refused by Yama (kernel.yama.ptrace_scope = {scope}): call prctl(PR_SET_PTRACER, Manager) in the engine (scope 1 only), lower the scope, or register a sealed memfd"
    )]
    Yama {
        /// Its id.
        pid: i32,
        /// `kernel.yama.ptrace_scope`.
        scope: u32,
    },
    /// It made itself undumpable, for example by changing its uid.
    #[error(
        "process_vm access to process {pid} refused: it is not dumpable; call prctl(PR_SET_DUMPABLE, 1) or register a sealed memfd"
    )]
    NotDumpable {
        /// Its id.
        pid: i32,
    },
    /// Refused for a reason that is not visible: a security module, or a container profile.
    #[error(
        "process_vm access to process {pid} refused ({errno}): a seccomp profile or security module forbids it; register a sealed memfd"
    )]
    Forbidden {
        /// Its id.
        pid: i32,
        /// The kernel's answer.
        errno: Errno,
    },
    /// Nothing is mapped there.
    #[error("memory of process {pid} at {address:#x} cannot be accessed ({errno})")]
    Unmapped {
        /// Its id.
        pid: i32,
        /// Where the probe failed.
        address: u64,
        /// The kernel's answer.
        errno: Errno,
    },
    /// The eight bytes are not the nonce that was announced.
    #[error("process {pid} does not hold the registered nonce at {address:#x}")]
    WrongNonce {
        /// Its id.
        pid: i32,
        /// Of the nonce.
        address: u64,
    },
    /// Memory or events of a GPU.
    #[error(
        "this Manager runs without CUDA: start it with --device cuda or --device auto on a machine with a driver"
    )]
    NoCuda,
    /// A call failed.
    #[error("{operation} for engine memory: {errno}")]
    System {
        /// Name of the call.
        operation: &'static str,
        /// Its error.
        errno: Errno,
    },
}

impl ImportError {
    /// The cause as the engine is told.
    pub const fn refusal(self) -> Refusal {
        match self {
            Self::BadRange | Self::DescriptorMissing => Refusal::BadMessage,
            Self::System { .. } => Refusal::NoResources,
            _ => Refusal::UnsupportedMemory,
        }
    }
}

/// What can be seen from outside about a process that refused access.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Seen {
    pid: i32,
    ours: u32,
    theirs: Option<u32>,
    /// Owner of `/proc/PID/environ`: root for an undumpable process (the folder itself keeps the
    /// process's uid).
    file_owner: Option<u32>,
    other_user_namespace: bool,
    yama_scope: u32,
}

/// Turns EPERM into its cause.
pub(super) fn refused_cause(pid: i32, errno: Errno) -> ImportError {
    if errno != Errno::PERM {
        return ImportError::Forbidden { pid, errno };
    }
    let namespace = |who: &str| std::fs::read_link(format!("/proc/{who}/ns/user")).ok();
    let theirs_namespace = namespace(&pid.to_string());
    cause(Seen {
        pid,
        ours: rustix::process::geteuid().as_raw(),
        theirs: std::fs::read_to_string(format!("/proc/{pid}/status"))
            .ok()
            .and_then(|status| real_uid(&status)),
        file_owner: std::fs::metadata(format!("/proc/{pid}/environ")).ok().map(|file| file.uid()),
        other_user_namespace: theirs_namespace.is_some() && theirs_namespace != namespace("self"),
        yama_scope: std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope")
            .ok()
            .and_then(|scope| scope.trim().parse().ok())
            .unwrap_or(0),
    })
}

fn real_uid(status: &str) -> Option<u32> {
    let line = status.lines().find_map(|line| line.strip_prefix("Uid:"))?;
    line.split_whitespace().next()?.parse().ok()
}

/// The most specific cause first: what an operator would have to change before anything else helps.
fn cause(seen: Seen) -> ImportError {
    let pid = seen.pid;
    match seen.theirs {
        None => return ImportError::Exited { pid },
        Some(theirs) if theirs != seen.ours => {
            return ImportError::OtherUser { pid, theirs, ours: seen.ours };
        }
        Some(_) => {}
    }
    if seen.other_user_namespace {
        ImportError::UserNamespace { pid }
    } else if seen.file_owner != seen.theirs {
        ImportError::NotDumpable { pid }
    } else if seen.yama_scope > 0 {
        ImportError::Yama { pid, scope: seen.yama_scope }
    } else {
        ImportError::Forbidden { pid, errno: Errno::PERM }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_refusal_is_explained_by_what_is_seen() {
        let pid = 7;
        let seen = Seen {
            pid,
            ours: 1000,
            theirs: Some(1000),
            file_owner: Some(1000),
            other_user_namespace: false,
            yama_scope: 0,
        };
        assert_eq!(cause(seen), ImportError::Forbidden { pid, errno: Errno::PERM });
        assert_eq!(cause(Seen { yama_scope: 1, ..seen }), ImportError::Yama { pid, scope: 1 });
        assert_eq!(
            cause(Seen { file_owner: Some(0), yama_scope: 1, ..seen }),
            ImportError::NotDumpable { pid }
        );
        assert_eq!(
            cause(Seen { other_user_namespace: true, yama_scope: 1, ..seen }),
            ImportError::UserNamespace { pid }
        );
        assert_eq!(
            cause(Seen { theirs: Some(5), file_owner: Some(5), yama_scope: 1, ..seen }),
            ImportError::OtherUser { pid, theirs: 5, ours: 1000 }
        );
        assert_eq!(cause(Seen { theirs: None, ..seen }), ImportError::Exited { pid });
    }

    #[test]
    fn uid_is_read_from_a_status_file() {
        assert_eq!(real_uid("Name:\tx\nUid:\t12\t13\t14\t15\n"), Some(12));
        assert_eq!(real_uid("Name:\tx\n"), None);
    }
}
