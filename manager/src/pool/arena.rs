//! Allocates, pre-faults and gives out the pool's memory.
//!
//! Everything is done before the Manager is ready: afterwards no page of the pool faults, none can
//! be missing, and a copy needs an address computation only. NodePlacement inside an arena is `core`'s.
#![allow(unsafe_code, reason = "maps and unmaps the arenas, binds them to nodes, touches pages")]

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};

use super::host::{self, HUGE_PAGE_BYTES};
use super::{HugePages, NodePlacement, PageMode, PoolConfig, PoolError, ShortOf};
use crate::core::Extent;
use crate::image::{DramSlice, ImageMemory};

/// Most threads that pre-fault at once; more only contend in the kernel's page allocator.
const PREFAULT_THREADS_MAX: usize = 16;
/// Bytes that one call pre-faults.
const PREFAULT_CHUNK_BYTES: usize = 64 << 20;
/// Interrupted pre-fault calls are repeated this often.
const PREFAULT_RETRIES_MAX: u32 = 1000;
/// Bytes left to the rest of the Manager and to the host when the pool is sized.
const HEADROOM_BYTES: u64 = 64 << 20;
/// Distance between touched bytes where the kernel cannot pre-fault by itself.
const SMALL_PAGE_BYTES: usize = 4096;

/// The pool: one arena a NUMA node, mapped and touched until it is dropped.
#[derive(Debug)]
pub struct DramPool {
    arenas: Vec<Arena>,
    page_mode: PageMode,
    huge_bytes: u64,
    placement: NodePlacement,
}

impl DramPool {
    /// Maps and pre-faults the whole pool. Takes as long as the kernel needs to zero it; on a
    /// virtual machine whose host has not backed the memory yet, seconds a GiB.
    ///
    /// # Errors
    ///
    /// See [`PoolError`]; nothing stays mapped.
    pub fn allocate(config: PoolConfig) -> Result<Self, PoolError> {
        if config.bytes == 0 || config.bytes >= 1 << 46 {
            return Err(PoolError::BadSize { bytes: config.bytes });
        }
        let nodes = host::nodes_with_memory();
        let sizes = arena_sizes(config.bytes, nodes.len().max(1));
        let total: u64 = sizes.iter().sum();
        let reserved =
            config.huge_pages == HugePages::Require && host::hugetlb_free_bytes() >= total;
        if !reserved {
            check_available(total, host::available_bytes(), host::cgroup_available_bytes())?;
        }
        let mut arenas = map_arenas(&sizes, reserved)?;
        let placement = place(&mut arenas, &nodes);
        for arena in &arenas {
            arena.advise(config.huge_pages)?;
        }
        prefault(&arenas, prefault_threads(config.prefault_threads))?;
        let huge_bytes = huge_bytes(&arenas, config.huge_pages);
        if config.huge_pages == HugePages::Require && huge_bytes < total {
            // Reserved ones that do not suffice are worth knowing about too.
            let obtained_bytes = huge_bytes.max(host::hugetlb_free_bytes());
            return Err(PoolError::NoHugePages { needed_bytes: total, obtained_bytes });
        }
        let page_mode = page_mode(&arenas, huge_bytes, total);
        Ok(Self { arenas, page_mode, huge_bytes, placement })
    }

    /// Page size that was obtained.
    pub fn page_mode(&self) -> PageMode {
        self.page_mode
    }

    /// Bytes of the pool that lie in 2 MiB pages, measured once after pre-faulting.
    pub fn huge_bytes(&self) -> u64 {
        self.huge_bytes
    }

    /// How the arenas lie on NUMA nodes.
    pub fn placement(&self) -> NodePlacement {
        self.placement
    }

    /// Size of each arena in bytes, by arena number.
    pub fn arena_bytes(&self) -> Vec<u64> {
        self.arenas.iter().map(|arena| arena.bytes as u64).collect()
    }

    /// Size of the pool in bytes.
    pub fn bytes(&self) -> u64 {
        self.arenas.iter().map(|arena| arena.bytes as u64).sum()
    }

    /// One whole arena, for registration with a device or ring.
    pub fn arena(&self, arena: u16) -> Option<DramSlice<'_>> {
        let arena = self.arenas.get(usize::from(arena))?;
        // SAFETY: the mapping is private to this process, zeroed by the kernel, and lives until the
        // arena is dropped, which the borrow of `self` excludes. Nothing else refers to its bytes.
        Some(unsafe { DramSlice::new(arena.start, arena.bytes) })
    }

    /// The bytes of `extent`, or `None` when it does not lie within its arena.
    pub fn slice(&self, extent: Extent) -> Option<DramSlice<'_>> {
        let arena = self.arenas.get(usize::from(extent.arena))?;
        let offset = usize::try_from(extent.offset).ok()?;
        let bytes = extent.bytes as usize;
        if offset.checked_add(bytes)? > arena.bytes {
            return None;
        }
        // SAFETY: offset + bytes is at most the arena's size, so the sum stays within the mapping.
        let start = unsafe { arena.start.add(offset) };
        // SAFETY: as in `arena`; the part lies within the mapping.
        Some(unsafe { DramSlice::new(start, bytes) })
    }
}

impl ImageMemory for DramPool {
    fn slice(&self, extent: Extent) -> Option<DramSlice<'_>> {
        self.slice(extent)
    }
}

/// One anonymous mapping, 2 MiB aligned, unmapped on drop.
#[derive(Debug)]
struct Arena {
    start: NonNull<u8>,
    bytes: usize,
    reserved: bool,
}

// SAFETY: an arena is plain memory of the process; who may touch which bytes is law 1 of `image`.
unsafe impl Send for Arena {}
// SAFETY: as above; `&Arena` gives out addresses only.
unsafe impl Sync for Arena {}

impl Arena {
    fn map(bytes: usize, reserved: bool) -> Result<Self, PoolError> {
        let align = HUGE_PAGE_BYTES as usize;
        // Reserved huge pages come aligned; other mappings are cut out of a wider one.
        let (flags, wide) = if reserved {
            (MapFlags::PRIVATE | MapFlags::HUGETLB | MapFlags::HUGE_2MB, bytes)
        } else {
            (MapFlags::PRIVATE | MapFlags::NORESERVE, bytes + align)
        };
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
        let base =
            unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), wide, protection, flags) }
                .map_err(|errno| PoolError::System {
                    operation: "mmap",
                    bytes: wide as u64,
                    errno,
                })?;
        let address = base.addr();
        let head = address.next_multiple_of(align) - address;
        let tail = wide - bytes - head.min(wide - bytes);
        if head > 0 {
            unmap(base.cast(), head);
        }
        let start: *mut u8 = base.cast::<u8>().wrapping_add(head);
        if tail > 0 {
            unmap(start.wrapping_add(bytes), tail);
        }
        let start = NonNull::new(start).ok_or(PoolError::System {
            operation: "mmap",
            bytes: wide as u64,
            errno: Errno::NOMEM,
        })?;
        Ok(Self { start, bytes, reserved })
    }

    /// Kept out of children and core dumps, in pages of the size asked for.
    fn advise(&self, huge_pages: HugePages) -> Result<(), PoolError> {
        self.madvise(Advice::LinuxDontFork)?;
        // A dump of the Manager must not carry everybody's KV, and could not be written anyway.
        self.madvise(Advice::LinuxDontDump)?;
        if self.reserved {
            return Ok(());
        }
        let page_size = match huge_pages {
            HugePages::Require | HugePages::Prefer => Advice::LinuxHugepage,
            HugePages::Off => Advice::LinuxNoHugepage,
        };
        match self.madvise(page_size) {
            // A kernel without transparent huge pages has 4 KiB pages whatever is asked.
            Err(PoolError::System { errno: Errno::INVAL, .. }) => Ok(()),
            result => result,
        }
    }

    fn madvise(&self, advice: Advice) -> Result<(), PoolError> {
        // SAFETY: the range is this mapping; the advices given here never discard its contents.
        unsafe { rustix::mm::madvise(self.start.as_ptr().cast(), self.bytes, advice) }.map_err(
            |errno| PoolError::System { operation: "madvise", bytes: self.bytes as u64, errno },
        )
    }

    /// Asks the kernel to move what it gave in small pages into huge ones, at once. Best effort:
    /// what came of it is measured.
    fn collapse(&self) {
        // SAFETY: the range is this mapping; collapsing keeps its contents.
        let _ =
            unsafe { libc::madvise(self.start.as_ptr().cast(), self.bytes, libc::MADV_COLLAPSE) };
    }

    fn bind(&self, node: u32) -> bool {
        let mut mask = [0u64; host::NODES_MAX.div_ceil(64)];
        let Some(word) = mask.get_mut(node as usize / 64) else { return false };
        *word = 1 << (node % 64);
        // SAFETY: the range is this mapping and the mask outlives the call; binding untouched pages
        // changes only where they will be taken from.
        let rc = unsafe {
            libc::syscall(
                libc::SYS_mbind,
                self.start.as_ptr(),
                self.bytes,
                libc::MPOL_BIND,
                mask.as_ptr(),
                mask.len() * 64 + 1,
                0,
            )
        };
        rc == 0
    }

    fn addresses(&self) -> Range<u64> {
        let start = self.start.as_ptr().addr() as u64;
        start..start + self.bytes as u64
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        unmap(self.start.as_ptr(), self.bytes);
    }
}

fn unmap(start: *mut u8, bytes: usize) {
    // SAFETY: the caller passes (a part of) a mapping of its own that nothing refers to any more.
    let unmapped = unsafe { rustix::mm::munmap(start.cast(), bytes) };
    debug_assert!(unmapped.is_ok(), "munmap of {bytes} bytes: {unmapped:?}");
}

/// Splits `bytes` over `count` arenas, each a whole number of huge pages and at least one.
fn arena_sizes(bytes: u64, count: usize) -> Vec<u64> {
    let share = bytes.div_ceil(count as u64).next_multiple_of(HUGE_PAGE_BYTES);
    let mut left = bytes.next_multiple_of(HUGE_PAGE_BYTES);
    let mut sizes = Vec::new();
    while left > 0 {
        sizes.push(share.min(left));
        left -= share.min(left);
    }
    sizes
}

fn check_available(
    total: u64,
    host: Option<u64>,
    control_group: Option<u64>,
) -> Result<(), PoolError> {
    let needed_bytes = total.saturating_add(HEADROOM_BYTES);
    for (available, short_of) in [(host, ShortOf::Host), (control_group, ShortOf::ControlGroup)] {
        if let Some(available_bytes) = available
            && available_bytes < needed_bytes
        {
            return Err(PoolError::NoMemory { needed_bytes, available_bytes, short_of });
        }
    }
    Ok(())
}

fn map_arenas(sizes: &[u64], reserved: bool) -> Result<Vec<Arena>, PoolError> {
    let map = |&bytes: &u64| {
        let length = usize::try_from(bytes).map_err(|_| PoolError::BadSize { bytes })?;
        Arena::map(length, reserved)
    };
    sizes.iter().map(map).collect()
}

/// Binds each arena to its node, all or none: a node that is too full would kill the Manager.
fn place(arenas: &mut [Arena], nodes: &[u32]) -> NodePlacement {
    if nodes.len() <= 1 {
        return NodePlacement::OneNode;
    }
    let room = |(arena, &node): (&Arena, &u32)| {
        host::node_available_bytes(node)
            .is_some_and(|bytes| bytes >= arena.bytes as u64 + HEADROOM_BYTES)
    };
    if !arenas.iter().zip(nodes).all(room) {
        return NodePlacement::Unbound;
    }
    // A refused bind after an accepted one leaves a mixture, which is reported as unbound.
    if arenas.iter().zip(nodes).all(|(arena, &node)| arena.bind(node)) {
        NodePlacement::Bound
    } else {
        NodePlacement::Unbound
    }
}

fn prefault_threads(asked: usize) -> usize {
    let wanted = match asked {
        0 => thread::available_parallelism().map_or(1, std::num::NonZero::get),
        asked => asked,
    };
    wanted.min(PREFAULT_THREADS_MAX)
}

/// Touches every page. Each thread takes the next chunk until none is left; this one helps, so that
/// a system that gives no threads only makes it slower.
fn prefault(arenas: &[Arena], threads: usize) -> Result<(), PoolError> {
    let chunks: Vec<_> = arenas
        .iter()
        .flat_map(|arena| {
            (0..arena.bytes)
                .step_by(PREFAULT_CHUNK_BYTES)
                .map(move |offset| (arena, offset, PREFAULT_CHUNK_BYTES.min(arena.bytes - offset)))
        })
        .collect();
    let next = AtomicUsize::new(0);
    let work = || {
        while let Some((arena, offset, bytes)) = chunks.get(next.fetch_add(1, Ordering::Relaxed)) {
            prefault_chunk(arena, *offset, *bytes)?;
        }
        Ok(())
    };
    thread::scope(|scope| {
        let helper = || thread::Builder::new().name("orbitkv-prefault".to_owned());
        let helpers: Vec<_> =
            (1..threads).map_while(|_| helper().spawn_scoped(scope, work).ok()).collect();
        let own = work();
        let join = |helper: thread::ScopedJoinHandle<'_, _>| match helper.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        };
        helpers.into_iter().map(join).fold(own, Result::and)
    })
}

fn prefault_chunk(arena: &Arena, offset: usize, bytes: usize) -> Result<(), PoolError> {
    let start = arena.start.as_ptr().wrapping_add(offset);
    for _ in 0..PREFAULT_RETRIES_MAX {
        // SAFETY: the chunk lies within the arena; populating keeps contents.
        match unsafe { rustix::mm::madvise(start.cast(), bytes, Advice::LinuxPopulateWrite) } {
            Ok(()) => return Ok(()),
            Err(Errno::INTR | Errno::AGAIN) => {}
            // Before Linux 5.14.
            Err(Errno::INVAL) => {
                touch(start, bytes);
                return Ok(());
            }
            // The reserve was promised and is not given: a limit of a control group on huge pages.
            Err(Errno::FAULT) if arena.reserved => {
                return Err(PoolError::NoHugePages {
                    needed_bytes: arena.bytes as u64,
                    obtained_bytes: offset as u64,
                });
            }
            Err(errno) => {
                return Err(PoolError::System {
                    operation: "pre-fault",
                    bytes: bytes as u64,
                    errno,
                });
            }
        }
    }
    Err(PoolError::System { operation: "pre-fault", bytes: bytes as u64, errno: Errno::AGAIN })
}

fn touch(start: *mut u8, bytes: usize) {
    for offset in (0..bytes).step_by(SMALL_PAGE_BYTES) {
        // SAFETY: within the chunk of `prefault_chunk`; nobody else uses the pool yet.
        unsafe { start.wrapping_add(offset).write_volatile(0) };
    }
}

fn huge_bytes(arenas: &[Arena], huge_pages: HugePages) -> u64 {
    let total: u64 = arenas.iter().map(|arena| arena.bytes as u64).sum();
    if arenas.iter().all(|arena| arena.reserved) {
        return total;
    }
    let addresses: Vec<Range<u64>> = arenas.iter().map(Arena::addresses).collect();
    let obtained = host::transparent_huge_bytes(&addresses);
    if obtained < total && huge_pages == HugePages::Require {
        arenas.iter().for_each(Arena::collapse);
        return host::transparent_huge_bytes(&addresses);
    }
    obtained
}

fn page_mode(arenas: &[Arena], huge_bytes: u64, total: u64) -> PageMode {
    if arenas.iter().all(|arena| arena.reserved) {
        PageMode::Hugetlb
    } else if huge_bytes >= total - total / 16 {
        PageMode::Transparent
    } else {
        PageMode::Small
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn pool(bytes: u64, huge_pages: HugePages) -> DramPool {
        DramPool::allocate(PoolConfig { bytes, huge_pages, prefault_threads: 2 }).expect("pool")
    }

    #[test]
    fn arenas_are_aligned_whole_huge_pages_and_hold_what_is_written() {
        let pool = pool(5 * MIB, HugePages::Off);
        assert_eq!(pool.bytes(), 6 * MIB);
        assert_eq!(pool.page_mode(), PageMode::Small);
        for (number, bytes) in (0u16..).zip(pool.arena_bytes()) {
            let arena = pool.arena(number).expect("arena");
            assert_eq!(arena.bytes() as u64, bytes);
            assert_eq!(arena.as_ptr().addr() as u64 % HUGE_PAGE_BYTES, 0);
            let last = Extent { arena: number, offset: bytes - 4096, bytes: 4096 };
            let last = pool.slice(last).expect("last page");
            assert!(last.fill_from(&[0xa5; 4096]));
            assert_eq!(last.to_vec(), [0xa5; 4096]);
            assert_eq!(last.checksum(), twox_hash::XxHash3_64::oneshot(&[0xa5; 4096]));
            assert!(!last.fill_from(&[0; 4097]));
        }
        assert!(pool.arena(pool.arena_bytes().len() as u16).is_none());
    }

    #[test]
    fn extents_outside_an_arena_have_no_address() {
        let pool = pool(2 * MIB, HugePages::Off);
        let extent = |arena, offset, bytes| Extent { arena, offset, bytes };
        assert!(pool.slice(extent(0, 2 * MIB, 0)).is_some());
        for outside in [
            extent(9, 0, 4096),
            extent(0, 2 * MIB, 1),
            extent(0, 2 * MIB - 4096, 4097),
            extent(0, u64::MAX, 1),
            extent(0, u64::MAX - 4095, 4096),
        ] {
            assert!(pool.slice(outside).is_none(), "{outside:?}");
        }
    }

    #[test]
    fn every_page_is_resident_before_first_use() {
        let pool = pool(8 * MIB, HugePages::Off);
        let range = pool.arenas[0].addresses();
        let smaps = std::fs::read_to_string("/proc/self/smaps").expect("smaps");
        let mut inside = false;
        let mut resident = 0;
        for line in smaps.lines() {
            if let Some((addresses, _)) = line.split_once(' ')
                && let Some((start, _)) = addresses.split_once('-')
                && let Ok(start) = u64::from_str_radix(start, 16)
            {
                inside = range.contains(&start);
            } else if let Some(kib) = line.strip_prefix("Rss:").filter(|_| inside) {
                resident += kib.trim().trim_end_matches(" kB").parse::<u64>().expect("kB") * 1024;
            }
        }
        assert!(resident >= pool.arenas[0].bytes as u64, "{resident} bytes resident");
    }

    #[test]
    fn page_mode_agrees_with_the_bytes_measured() {
        let pool = pool(8 * MIB, HugePages::Prefer);
        let mostly = pool.huge_bytes() >= 8 * MIB - MIB / 2;
        assert_eq!(pool.page_mode() == PageMode::Transparent, mostly);
        match DramPool::allocate(PoolConfig {
            bytes: 4 * MIB,
            huge_pages: HugePages::Require,
            prefault_threads: 1,
        }) {
            Ok(pool) => {
                assert_eq!(pool.huge_bytes(), pool.bytes());
                assert_ne!(pool.page_mode(), PageMode::Small);
            }
            // A host without huge pages: the refusal must carry both numbers.
            Err(PoolError::NoHugePages { needed_bytes, obtained_bytes }) => {
                assert!(obtained_bytes < needed_bytes);
            }
            Err(other) => panic!("{other}"),
        }
    }

    #[test]
    fn more_than_the_host_has_is_refused_with_numbers_before_touching() {
        let error = DramPool::allocate(PoolConfig {
            bytes: 1 << 45,
            huge_pages: HugePages::Prefer,
            prefault_threads: 0,
        })
        .expect_err("32 TiB");
        let PoolError::NoMemory { needed_bytes, available_bytes, .. } = error else {
            panic!("{error}")
        };
        assert!(available_bytes < needed_bytes && needed_bytes > 1 << 45);
        assert!(error.to_string().contains(&available_bytes.to_string()));
    }

    #[test]
    fn the_tighter_limit_is_named() {
        assert_eq!(check_available(100, Some(u64::MAX), None), Ok(()));
        assert_eq!(
            check_available(100, Some(u64::MAX), Some(5)),
            Err(PoolError::NoMemory {
                needed_bytes: 100 + HEADROOM_BYTES,
                available_bytes: 5,
                short_of: ShortOf::ControlGroup
            })
        );
        for bytes in [0, 1 << 46, u64::MAX] {
            let config = PoolConfig { bytes, huge_pages: HugePages::Off, prefault_threads: 1 };
            assert_eq!(DramPool::allocate(config).err(), Some(PoolError::BadSize { bytes }));
        }
    }

    #[test]
    fn arenas_share_the_pool_in_whole_huge_pages() {
        assert_eq!(arena_sizes(1, 1), [2 * MIB]);
        assert_eq!(arena_sizes(10 * MIB, 2), [6 * MIB, 4 * MIB]);
        // Fewer huge pages than nodes: fewer arenas.
        assert_eq!(arena_sizes(2 * MIB, 4), [2 * MIB]);
    }
}
