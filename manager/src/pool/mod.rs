//! The DRAM pool: anonymous memory in large pages that holds the page images.

mod arena;
pub(crate) mod host;

use rustix::io::Errno;

pub use arena::DramPool;

/// Bytes that this process may still take without swapping or being killed: what the host can give
/// and what its control groups allow, where they say so.
pub fn available_bytes() -> Option<u64> {
    [host::available_bytes(), host::cgroup_available_bytes()].into_iter().flatten().min()
}

/// Whether the pool insists on 2 MiB pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum HugePages {
    /// Reserved huge pages when enough are free, else transparent ones; refuses to start when any
    /// byte of the pool lies in a small page.
    Require,
    /// Transparent huge pages as far as the kernel has them.
    #[default]
    Prefer,
    /// 4 KiB pages.
    Off,
}

/// What [`DramPool::allocate`] makes.
#[derive(Clone, Copy, Debug)]
pub struct PoolConfig {
    /// Size of the pool in bytes, rounded up to 2 MiB an arena.
    pub bytes: u64,
    /// Page size policy.
    pub huge_pages: HugePages,
    /// Threads that pre-fault; 0 takes one a CPU. At most 16.
    pub prefault_threads: usize,
}

/// Page size that the pool got.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PageMode {
    /// Reserved 2 MiB pages.
    Hugetlb,
    /// Transparent 2 MiB pages, for at least 15/16 of the pool.
    Transparent,
    /// 4 KiB pages.
    Small,
}

impl PageMode {
    /// As tools print it.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Hugetlb => "hugetlb",
            Self::Transparent => "thp",
            Self::Small => "4k",
        }
    }
}

/// How the arenas are spread over NUMA nodes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NodePlacement {
    /// The host has one node.
    OneNode,
    /// One arena a node, bound to it.
    Bound,
    /// Several nodes, but binding was refused by the kernel (container profile, cpuset) or a node
    /// is too full for its share: the kernel places the pages.
    Unbound,
}

/// Whose memory is short.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ShortOf {
    /// `MemAvailable` of the host.
    Host,
    /// The limit of a control group.
    ControlGroup,
}

/// Why there is no pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum PoolError {
    /// Zero bytes, or more than can be addressed.
    #[error("pool of {bytes} bytes: give at least 1 byte and less than 2^46")]
    BadSize {
        /// As asked for.
        bytes: u64,
    },
    /// Checked before any page is touched.
    #[error(
        "pool needs {needed_bytes} bytes (headroom included), {} has {available_bytes} available: \
         lower --dram",
        match short_of { ShortOf::Host => "the host", ShortOf::ControlGroup => "the control group" }
    )]
    NoMemory {
        /// Pool and headroom.
        needed_bytes: u64,
        /// Left.
        available_bytes: u64,
        /// Where.
        short_of: ShortOf,
    },
    /// `HugePages::Require` and the kernel had too few.
    #[error(
        "pool needs {} pages of 2 MiB ({needed_bytes} bytes), got {}: reserve them \
         (vm.nr_hugepages, and the hugetlb limit of the control group), allow transparent ones, or \
         use --huge-pages prefer",
        needed_bytes >> 21,
        obtained_bytes >> 21
    )]
    NoHugePages {
        /// The whole pool.
        needed_bytes: u64,
        /// What lies in huge pages.
        obtained_bytes: u64,
    },
    /// A call failed.
    #[error("{operation} of {bytes} bytes for the pool: {errno}")]
    System {
        /// Name of the call.
        operation: &'static str,
        /// Its length.
        bytes: u64,
        /// Its error.
        errno: Errno,
    },
}
