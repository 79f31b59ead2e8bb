//! The bounds that nobody configures, and the defaults of those that `serve` passes on. One place:
//! `core`, the SSD workers and what `--print-config` shows read the same numbers.

use super::Nanos;

/// Smallest page image, in bytes.
pub const PAGE_BYTES_MIN: u64 = 4 << 10;
/// Largest page image, in bytes.
pub const PAGE_BYTES_MAX: u64 = 64 << 20;
/// Bytes that one operation may have read ahead of its copies or its answer, at least one page.
pub const READ_WINDOW_BYTES: u64 = 4 << 20;
/// Bytes that one copy command moves, at least one page.
pub const COPY_QUANTUM_BYTES: u64 = 1 << 20;
/// Bytes that one copy command of a GPU moves, at least one page: 5 ms of its bus. The more pages a
/// command has, the fewer orders its copies take.
pub const GPU_COPY_QUANTUM_BYTES: u64 = 256 << 20;
/// Copy commands in flight a direction: with few, a cancel or a more urgent job waits for little.
pub const COPIES_IN_FLIGHT_MAX: u32 = 4;
/// Copy commands in flight of one session a direction that may take long, because they wait for a
/// fence or copy layer by layer. They do not count among the others, or an engine whose events do not
/// come would keep everybody from copying.
pub const LONG_COPIES_PER_SESSION_MAX: u32 = 2;
/// Read commands in flight of one SSD device.
pub const READS_IN_FLIGHT_MAX: u32 = 128;
/// Bytes of SSD reads that the kernel has of one device, at least one page: enough for any drive, and
/// what the kernel has cannot be taken back.
pub const READS_IN_KERNEL_BYTES: u64 = 16 << 20;
/// Bytes of reads in flight of one SSD device, at least one page: what the kernel has, and half as much that is
/// being checked meanwhile (with no more than the kernel's 16 MiB, 1 MiB pages were read at 0.84 to
/// 0.94 of a plain loop's speed, so at 0.96 and more).
pub const READS_IN_FLIGHT_BYTES: u64 = 24 << 20;
/// Write commands handed to one SSD device: enough small pages that the writer has a megabyte to sort
/// and join while as much is on its way back (1,024 instead of 256 pages of 4 KiB: 1.7 times as many
/// are written before they are evicted).
pub const WRITES_IN_FLIGHT_MAX: u32 = 1024;
/// Bytes of writes handed to all SSD devices of a small pool, at least one page each.
const WRITES_IN_FLIGHT_BYTES_MIN: u64 = 8 << 20;
/// Bytes of writes handed to one SSD device of a large pool, at least one page: the 32 MiB that a lone
/// writer has in the kernel and some on their way there and back. Beside reads most of them wait in
/// the tier.
pub const WRITES_IN_FLIGHT_BYTES_MAX: u64 = 40 << 20;
/// Time whose share of the write budget may be written at once after a rest.
pub const WRITE_BURST_NS: Nanos = 3_600_000_000_000;
/// Time whose share has to come in before writes go on once the write budget is used up.
pub const WRITE_RESUME_NS: Nanos = 1_000_000_000;
/// Keys that the `reuse` spill policy remembers of pages that are gone, at most: under 64 MiB.
pub const HISTORY_KEYS_MAX: usize = 1 << 20;
/// Namespaces at a time. One that no session names and that has no page in any tier gives its place to
/// a new one when there are so many.
pub const NAMESPACES_MAX: usize = 4096;
/// Of `most` namespaces, those that are kept for users who hold less than half as many as these: one
/// user, whose namespaces stay as long as a tier has a page of them, never shuts the others out.
pub const fn namespaces_kept(most: usize) -> usize {
    most / 8
}
/// Records of forgets that are not on SSD yet. Whoever asks for one more is refused: a device that
/// hangs keeps them, whether or not anybody still waits for them.
pub const FORGETS_UNDER_WAY_MAX: usize = 1 << 14;
/// Leases at a time: a lease id holds its slot in so many bits.
pub const LEASES_MAX: usize = 1 << LEASE_INDEX_BITS;
pub(super) const LEASE_INDEX_BITS: u32 = 20;

/// Pages that are dropped in one turn for a forget, an evict or behind a page that was lost.
pub const PAGES_DROPPED_PER_TURN: u32 = 1024;
/// Pages found on SSD at start that one turn takes over: a fraction of a millisecond.
pub const PAGES_RECOVERED_PER_TURN: u32 = 256;
/// Life of a lease unless configured.
pub const LEASE_TTL_NS: Nanos = 30_000_000_000;
/// Deadline of an operation that names none unless configured.
pub const OPERATION_TIMEOUT_NS: Nanos = 5_000_000_000;
/// Malformed requests after which a session is closed unless configured.
pub const BAD_REQUESTS_MAX: u32 = 16;
/// Namespaces and sets that one session may define unless configured.
pub const SCOPES_PER_SESSION_MAX: u32 = 1024;
/// Regions of one session at a time unless configured.
pub const REGIONS_PER_SESSION_MAX: u32 = 256;
/// Events of one session unless configured.
pub const EVENTS_PER_SESSION_MAX: u32 = 4096;

/// Query budget of a pool of `dram_bytes` unless configured.
pub const fn query_budget_bytes(dram_bytes: u64) -> u64 {
    dram_bytes / 2
}

/// Bytes of writes handed to each of some SSD devices of a pool of `dram_bytes`: nobody may evict those
/// pages meanwhile, so all devices together get more than the least only up to an eighth of it.
pub const fn writes_in_flight_bytes(dram_bytes: u64, devices: u64) -> u64 {
    let devices = if devices == 0 { 1 } else { devices };
    let eighth = dram_bytes / 8;
    let all = if eighth < WRITES_IN_FLIGHT_BYTES_MIN { WRITES_IN_FLIGHT_BYTES_MIN } else { eighth };
    match all / devices {
        many if many > WRITES_IN_FLIGHT_BYTES_MAX => WRITES_IN_FLIGHT_BYTES_MAX,
        share => share,
    }
}

/// Speculative share of a query budget unless configured.
pub const fn speculative_budget_bytes(query_budget_bytes: u64) -> u64 {
    query_budget_bytes / 4
}
