//! From the operator's words to a checked [`Config`].
//!
//! A TOML file and the flags of `serve` name the same fields; flags win. Nothing here touches the
//! system: the caller reads the file, asks the machine what it has ([`Machine`]) and prints.
//! Unknown names, wrong types, values out of range and fields that contradict each other are
//! refused in one line that says where, what and what would be accepted. `field.rs` is the table of
//! every field with its range, default and cost.

mod args;
mod check;
mod error;
mod field;
mod print;
mod words;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use orbitkv_shm_protocol::bootstrap::message;
use orbitkv_shm_protocol::layout;

use crate::core::{FOOTER_BYTES, limits};
use crate::ssd;

pub use args::{ServeArgs, usage_line};
pub use error::ConfigError;
pub use field::Key;
pub use words::{FilePlace, Place, Words};

/// Most sessions: what one `futex_waitv` holds (128 words) less the reactor's control word.
pub const SESSIONS_MAX: u32 = 127;
/// Bounds of a page image, in bytes.
pub const PAGE_BYTES_MIN: u64 = limits::PAGE_BYTES_MIN;
/// See [`PAGE_BYTES_MIN`].
pub const PAGE_BYTES_MAX: u64 = limits::PAGE_BYTES_MAX;
/// Connections that may wait before their first accepted message; the next is closed at once.
pub const UNATTACHED_MAX: u32 = 32;
/// Longest socket path, in bytes: a socket address holds 108 with its final zero, and the socket
/// is bound under a name that is four longer before it appears.
pub const SOCKET_PATH_BYTES_MAX: usize = 103;

/// What the defaults depend on.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Machine {
    /// Bytes that the host, and the control group, still give, where they are known.
    pub memory_available_bytes: Option<u64>,
    /// Where the socket goes when nobody says.
    pub socket_path: PathBuf,
}

/// Everything the Manager was told, checked. Each field's range, default and cost stand in the
/// table that `--print-config` prints.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Config {
    /// Who may attach, and where.
    pub socket: SocketConfig,
    /// The DRAM pool.
    pub dram: DramConfig,
    /// The SSD tier; `None` without files or with capacity 0.
    pub ssd: Option<SsdConfig>,
    /// Lease budgets.
    pub budget: BudgetConfig,
    /// Waits.
    pub time: TimeConfig,
    /// Limits on what a peer may ask for.
    pub limits: Limits,
    /// `/metrics` and `/healthz`.
    pub http: HttpConfig,
    /// Where the engines' pages are.
    pub device: DeviceKind,
    /// How the reactor waits.
    pub wait: WaitMode,
    /// How the reactor competes for its core.
    pub priority: Priority,
}

/// The socket and who may use it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SocketConfig {
    /// At most [`SOCKET_PATH_BYTES_MAX`] bytes.
    pub path: PathBuf,
    /// True when nobody named a path: then its folder is made, mode 0700.
    pub path_is_default: bool,
    /// Users that may attach besides the owner.
    pub allow_uids: Vec<u32>,
    /// Groups whose members may attach. The first becomes the group of the socket.
    pub allow_gids: Vec<u32>,
}

/// The DRAM pool.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DramConfig {
    /// Bytes, a multiple of 2 MiB.
    pub capacity_bytes: u64,
    /// Whether 2 MiB pages are needed.
    pub huge_pages: HugePages,
    /// Which unleased page goes first.
    pub replacement: Replacement,
}

/// The SSD tier.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SsdConfig {
    /// At least one file.
    pub paths: Vec<PathBuf>,
    /// Bytes of all files together: a hard bound.
    pub capacity_bytes: u64,
    /// `O_DIRECT`.
    pub direct: bool,
    /// How I/O is done.
    pub engine: SsdEngine,
    /// Which pages are written.
    pub spill: SpillPolicy,
    /// Bytes that the kernel may be writing to one file at a time beside reads, to start with.
    pub write_in_flight_bytes: u64,
    /// Image bytes that one read of neighbouring small pages may join.
    pub read_join_bytes: u64,
    /// Bytes that may be written a day; `None` for no bound.
    pub write_budget_per_day_bytes: Option<u64>,
}

/// Lease budgets, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BudgetConfig {
    /// All leases together.
    pub query_bytes: u64,
    /// The leases of one session; at most `query_bytes`.
    pub session_bytes: u64,
    /// Speculative queries and prepares; at most `query_bytes`.
    pub speculative_bytes: u64,
}

/// Waits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TimeConfig {
    /// Life of a lease.
    pub lease_ttl: Duration,
    /// Deadline of an operation that names none.
    pub operation_timeout: Duration,
    /// Longest silence of a new connection.
    pub handshake_timeout: Duration,
    /// Longest drain at a stop; below the 10 s that a stop may take.
    pub stop_timeout: Duration,
}

/// Limits on what a peer may ask for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Sessions at a time, those that still drain included; at most [`SESSIONS_MAX`].
    pub sessions: u32,
    /// Records of a ring: a power of two.
    pub ring_capacity_max: u32,
    /// Entries of a page table.
    pub page_entries_max: u32,
    /// Bytes of a page image.
    pub page_bytes_max: u64,
    /// Namespaces and sets of a session.
    pub scopes_per_session: u32,
    /// Registered memories of a session.
    pub memories_per_session: u32,
    /// Regions of a session at a time.
    pub regions_per_session: u32,
    /// Events of a session.
    pub events_per_session: u32,
    /// Malformed requests, or refused bootstrap messages, that close a session.
    pub bad_requests: u32,
}

/// `/metrics` and `/healthz`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HttpConfig {
    /// `None` is off.
    pub address: Option<SocketAddr>,
    /// Start without it when the address is taken.
    pub optional: bool,
}

/// One of a closed list of words.
macro_rules! choice {
    ($(#[$doc:meta])* $name:ident { $($(#[$variant_doc:meta])* $variant:ident = $word:literal,)+ }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub enum $name { $($(#[$variant_doc])* $variant,)+ }

        impl $name {
            /// Every value, in the order in which messages list them.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)+];

            /// As typed and printed.
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $word,)+ }
            }

            fn from_word(word: &str) -> Option<Self> {
                Self::ALL.iter().copied().find(|value| value.as_str() == word)
            }
        }
    };
}

choice! {
    /// Whether the DRAM pool needs 2 MiB pages.
    HugePages {
        /// Refuse to start without them.
        Require = "require",
        /// Take them where they are.
        Prefer = "prefer",
        /// 4 KiB pages.
        Off = "off",
    }
}

choice! {
    /// Which unleased page goes first.
    Replacement {
        /// Never a page before its descendants.
        PrefixLru = "prefix-lru",
        /// The same decisions under the name that `simulate` compares with.
        Lru = "lru",
    }
}

choice! {
    /// How SSD I/O is done.
    SsdEngine {
        /// io_uring where the kernel allows it.
        Auto = "auto",
        /// io_uring, or no start.
        Uring = "uring",
        /// `preadv` and `pwritev` on threads.
        Blocking = "blocking",
    }
}

choice! {
    /// Which saved pages are written to SSD.
    SpillPolicy {
        /// Every one.
        All = "all",
        /// Those with evidence of reuse.
        Reuse = "reuse",
    }
}

choice! {
    /// Where the engines' pages are.
    DeviceKind {
        /// CUDA where a driver is found, and host memory.
        Auto = "auto",
        /// Host memory only.
        Host = "host",
        /// CUDA, or no start.
        Cuda = "cuda",
    }
}

choice! {
    /// How the reactor waits for work.
    WaitMode {
        /// Spin while that pays, then sleep.
        Adaptive = "adaptive",
        /// Spin always: one core is busy.
        Dedicated = "dedicated",
    }
}

choice! {
    /// How the reactor competes for its core.
    Priority {
        /// Nice -10, where the user may.
        High = "high",
        /// As it was started.
        Normal = "normal",
    }
}

/// Limits that are part of the wire or of the design: shown with the rest, set by nobody.
pub const FIXED_LIMITS: &[(&str, u64)] = &[
    ("ring_capacity_min (records)", layout::RING_CAPACITY_MIN as u64),
    ("ring_capacity_default (records)", layout::RING_CAPACITY_DEFAULT as u64),
    ("page_entries_min (entries)", layout::PAGE_ENTRIES_MIN as u64),
    ("page_entries_default (entries)", layout::PAGE_ENTRIES_DEFAULT as u64),
    ("pages_per_request_max (entries)", layout::PAGES_PER_REQUEST_MAX as u64),
    ("done_words_max (an operation)", layout::DONE_WORDS_MAX as u64),
    ("page_bytes_min (bytes)", PAGE_BYTES_MIN),
    ("restore_window (bytes, at least one page)", limits::READ_WINDOW_BYTES),
    ("leases_max", limits::LEASES_MAX as u64),
    ("namespaces_max (an epoch)", limits::NAMESPACES_MAX as u64),
    ("forgets_under_way (records that are not on ssd yet)", limits::FORGETS_UNDER_WAY_MAX as u64),
    ("copy_quantum (bytes, at least one page)", limits::COPY_QUANTUM_BYTES),
    ("gpu_copy_quantum (bytes, at least one page)", limits::GPU_COPY_QUANTUM_BYTES),
    ("copies_in_flight (commands a direction)", limits::COPIES_IN_FLIGHT_MAX as u64),
    (
        "long_copies_in_flight (commands of a session a direction, beside the others)",
        limits::LONG_COPIES_PER_SESSION_MAX as u64,
    ),
    ("pages_dropped (a turn, for forget and evict)", limits::PAGES_DROPPED_PER_TURN as u64),
    ("ssd_reads_in_flight (commands a device)", limits::READS_IN_FLIGHT_MAX as u64),
    ("ssd_reads_in_flight (bytes a device, at least one page)", limits::READS_IN_FLIGHT_BYTES),
    ("ssd_writes_in_flight (commands a device)", limits::WRITES_IN_FLIGHT_MAX as u64),
    (
        "ssd_writes_in_flight (bytes a device, at least one page, all beyond 8MiB an eighth of dram)",
        limits::WRITES_IN_FLIGHT_BYTES_MAX,
    ),
    (
        "ssd_history (keys of pages that are gone, for spill = reuse)",
        limits::HISTORY_KEYS_MAX as u64,
    ),
    ("ssd_chunk (bytes)", ssd::CHUNK_IMAGE_BYTES_MAX as u64),
    ("ssd_footer (bytes a slot)", FOOTER_BYTES as u64),
    ("message_bytes_max (bytes)", message::MESSAGE_BYTES_MAX as u64),
    ("layout_segments_max (a page)", message::LAYOUT_SEGMENTS_MAX as u64),
    ("scope_members_max (a set)", message::SCOPE_MEMBERS_MAX as u64),
    ("connections_unattached_max", UNATTACHED_MAX as u64),
    ("socket_path_max (bytes)", SOCKET_PATH_BYTES_MAX as u64),
];

#[cfg(test)]
mod tests;
