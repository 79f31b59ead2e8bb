//! Memory: how much, in which pages, on which nodes, and what may be locked.

use std::fs::File;
use std::path::Path;

use orbitkv_shm_protocol::telemetry::TELEMETRY_BYTES;
use rustix::fs::FallocateFlags;
use rustix::process::Resource;

use super::{Check, has_capability, read, size};
use crate::pool::host::{
    available_bytes, cgroup_available_bytes, hugetlb_free_bytes, nodes_with_memory,
};
use crate::pool::{DramPool, HugePages, NodePlacement, PageMode, PoolConfig};

/// Number of the capability that lifts RLIMIT_MEMLOCK.
const CAP_IPC_LOCK: u32 = 14;
/// Pool that is made to see which pages it gets.
const TRIAL_BYTES: u64 = 16 << 20;
const TRANSPARENT: &str = "/sys/kernel/mm/transparent_hugepage";

pub(super) fn available(dram_bytes: u64) -> Check {
    judge_available(dram_bytes, available_bytes(), cgroup_available_bytes())
}

fn judge_available(dram_bytes: u64, host: Option<u64>, group: Option<u64>) -> Check {
    let name = "memory";
    let shown = |bytes: Option<u64>| bytes.map_or("unknown".to_owned(), size);
    let mut found = format!("{} available, the DRAM tier takes {}", shown(host), size(dram_bytes));
    if let Some(group) = group {
        found.push_str(&format!(", the control group leaves {}", size(group)));
    }
    let left = host.into_iter().chain(group).min();
    if left.is_some_and(|left| left < dram_bytes) {
        return Check::fail(name, found, "lower --dram, or raise the limit of the control group");
    }
    Check::ok(name, found)
}

/// Tried: a small pool, as `serve` makes it.
pub(super) fn huge_pages(required: bool) -> Check {
    let name = "huge pages";
    let setting = |file: &str| {
        let text = read(&format!("{TRANSPARENT}/{file}")).unwrap_or_default();
        chosen(&text).unwrap_or("absent").to_owned()
    };
    let settings = format!(
        "transparent {}, defrag {}, shmem {}",
        setting("enabled"),
        setting("defrag"),
        setting("shmem_enabled")
    );
    let config =
        PoolConfig { bytes: TRIAL_BYTES, huge_pages: HugePages::Prefer, prefault_threads: 1 };
    let fix = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled, or reserve some \
               (sysctl vm.nr_hugepages); 4 KiB pages cost a third of the SSD bandwidth and more";
    match DramPool::allocate(config) {
        Err(error) => Check::fail(name, error, "free some memory"),
        Ok(pool) if pool.page_mode() == PageMode::Small => {
            let found = format!("a trial pool got 4 KiB pages ({settings})");
            if required { Check::fail(name, found, fix) } else { Check::warn(name, found, fix) }
        }
        Ok(pool) => {
            let mode = pool.page_mode().label();
            Check::ok(name, format!("a trial pool got 2 MiB pages ({mode}; {settings})"))
        }
    }
}

/// The word in brackets: `always [madvise] never` → `madvise`.
fn chosen(text: &str) -> Option<&str> {
    Some(text.split_once('[')?.1.split_once(']')?.0)
}

/// Wanted by nobody who did not ask for them.
pub(super) fn reserved_huge_pages() -> Check {
    let free = hugetlb_free_bytes();
    let found = match free {
        0 => "none free (needed by nothing but --huge-pages require without transparent ones)"
            .to_owned(),
        free => format!("{} free in 2 MiB pages", size(free)),
    };
    Check::ok("reserved huge pages", found)
}

/// Tried with a small pool: binding may be forbidden.
pub(super) fn nodes() -> Check {
    let name = "numa";
    let nodes = nodes_with_memory();
    if nodes.len() < 2 {
        return Check::ok(name, "one node with memory");
    }
    let config = PoolConfig { bytes: TRIAL_BYTES, huge_pages: HugePages::Off, prefault_threads: 1 };
    let placement = DramPool::allocate(config).map(|pool| pool.placement());
    let found = format!("{} nodes with memory", nodes.len());
    match placement {
        Ok(NodePlacement::Bound | NodePlacement::OneNode) => {
            Check::ok(name, format!("{found}, the pool is spread over them"))
        }
        Ok(NodePlacement::Unbound) => Check::warn(
            name,
            format!("{found}, binding memory to them is refused"),
            "allow mbind in the container's seccomp profile, or start the Manager with numactl",
        ),
        Err(error) => Check::warn(name, format!("{found}: {error}"), "free some memory"),
    }
}

/// What io_uring needs to keep the pool registered.
pub(super) fn locked(dram_bytes: u64) -> Check {
    let limit = rustix::process::getrlimit(Resource::Memlock);
    judge_locked(dram_bytes, limit.current, limit.maximum, has_capability(CAP_IPC_LOCK))
}

fn judge_locked(needed: u64, soft: Option<u64>, hard: Option<u64>, exempt: bool) -> Check {
    let name = "memlock";
    let shown = |limit: Option<u64>| limit.map_or("unlimited".to_owned(), size);
    let limits = format!(
        "soft limit {}, hard limit {}, registered buffers need that of DRAM, {}",
        shown(soft),
        shown(hard),
        size(needed)
    );
    if exempt {
        return Check::ok(name, format!("{limits}; CAP_IPC_LOCK lifts the limit"));
    }
    if soft.is_none_or(|soft| soft >= needed) {
        return Check::ok(name, limits);
    }
    let soft_only = hard.is_none_or(|hard| hard >= needed);
    let how = if soft_only {
        "ulimit -l unlimited"
    } else {
        "LimitMEMLOCK=infinity, docker run \
         --ulimit memlock=-1, /etc/security/limits.conf"
    };
    Check::warn(
        name,
        limits,
        format!(
            "SSD I/O works without registered buffers, at a little more CPU; to have them raise it \
             to {needed} bytes ({how}) or grant CAP_IPC_LOCK"
        ),
    )
}

/// Tried: space for a telemetry segment is reserved and given back.
pub(super) fn shared_memory() -> Check {
    let name = "/dev/shm";
    let folder = Path::new("/dev/shm");
    let fix = "mount a tmpfs there (docker run --shm-size, medium: Memory in Kubernetes); only the \
               telemetry segment is kept in it";
    let space = match rustix::fs::statvfs(folder) {
        Ok(space) => space,
        Err(errno) => return Check::fail(name, format!("not there: {errno}"), fix),
    };
    let bytes = |blocks: u64| blocks.saturating_mul(space.f_frsize);
    let found = format!(
        "{} of {} free, {} needed for telemetry and nothing else",
        size(bytes(space.f_bavail)),
        size(bytes(space.f_blocks)),
        size(TELEMETRY_BYTES as u64)
    );
    let trial = folder.join(format!("orbitkv-doctor-{}", std::process::id()));
    let made = File::create_new(&trial).map_err(|error| error.to_string()).and_then(|file| {
        let end = TELEMETRY_BYTES as u64;
        let reserved = rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, end);
        let _removed = std::fs::remove_file(&trial);
        reserved.map_err(|errno| errno.to_string())
    });
    match made {
        Ok(()) => Check::ok(name, found),
        Err(error) => Check::fail(name, format!("{found}; reserving it failed: {error}"), fix),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Status;
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn the_tighter_of_host_and_control_group_counts() {
        let status = |host, group| judge_available(GIB, host, group).status;
        assert_eq!(status(Some(2 * GIB), None), Status::Ok);
        assert_eq!(status(Some(2 * GIB), Some(GIB / 2)), Status::Fail);
        assert_eq!(status(Some(GIB / 2), Some(2 * GIB)), Status::Fail);
        assert_eq!(status(None, None), Status::Ok);
    }

    #[test]
    fn memlock_names_the_bytes_both_limits_and_the_ways_out() {
        let check = judge_locked(GIB, Some(64 << 10), Some(64 << 10), false);
        assert_eq!(check.status, Status::Warn);
        for words in ["64 KiB", "1 GiB"] {
            assert!(check.found.contains(words), "{}", check.found);
        }
        for words in ["1073741824", "LimitMEMLOCK", "CAP_IPC_LOCK"] {
            assert!(check.fix.contains(words), "{}", check.fix);
        }
        let check = judge_locked(GIB, Some(64 << 10), None, false);
        assert!(check.fix.contains("ulimit -l"), "{}", check.fix);
        assert_eq!(judge_locked(GIB, Some(64 << 10), Some(64 << 10), true).status, Status::Ok);
        assert_eq!(judge_locked(GIB, None, None, false).status, Status::Ok);
        assert_eq!(judge_locked(GIB, Some(GIB), Some(GIB), false).status, Status::Ok);
    }

    #[test]
    fn the_chosen_word_is_the_one_in_brackets() {
        assert_eq!(chosen("always [madvise] never"), Some("madvise"));
        assert_eq!((chosen("never"), chosen("")), (None, None));
    }

    #[test]
    fn this_machine_has_memory_and_shared_memory() {
        assert_ne!(available(1 << 20).status, Status::Fail);
        assert_eq!(shared_memory().status, Status::Ok);
        assert_ne!(huge_pages(false).status, Status::Fail);
    }
}
