//! What the host says about its memory: how much is left, which nodes there are, which page size
//! a mapping got. Every parser takes text, so that odd hosts can be tested anywhere.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::ops::Range;
use std::path::PathBuf;

/// Bytes of one huge page.
pub(super) const HUGE_PAGE_BYTES: u64 = 2 << 20;
/// Most NUMA nodes that are looked at.
pub(super) const NODES_MAX: usize = 64;
/// Deepest control group hierarchy that is walked.
const CGROUP_DEPTH_MAX: usize = 64;
/// Version 1 says "no limit" by the largest number of whole pages; the size of a page varies.
const CGROUP_V1_UNLIMITED: u64 = i64::MAX as u64 - (64 << 10) + 1;

/// Bytes that the host can give without swapping, or `None` when it does not say.
pub(crate) fn available_bytes() -> Option<u64> {
    kib_field(&std::fs::read_to_string("/proc/meminfo").ok()?, "MemAvailable:")
}

/// Reserved 2 MiB pages that nobody uses yet, in bytes. Zero when the default huge page has another
/// size.
pub(crate) fn hugetlb_free_bytes() -> u64 {
    std::fs::read_to_string("/proc/meminfo").ok().map_or(0, |text| hugetlb_free(&text))
}

/// Bytes that the control groups of this process still allow, of either version, or `None` without
/// a limit.
///
/// Page cache counts as free: the kernel takes it back before it kills.
pub(crate) fn cgroup_available_bytes() -> Option<u64> {
    let own = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").ok()?;
    let places = [Cgroup::V2, Cgroup::V1].map(|version| version.place(&own, &mounts));
    let lefts = places.into_iter().flatten().filter_map(|place| place.least_left());
    lefts.min()
}

/// The two versions name their files differently.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Cgroup {
    V1,
    V2,
}

/// Where the limits of this process are read: its own folder and all above it, up to the mount.
#[derive(Clone, PartialEq, Eq, Debug)]
struct CgroupPlace {
    version: Cgroup,
    mount: PathBuf,
    folder: PathBuf,
}

impl Cgroup {
    /// Names of the limit, of what is used, and of page cache in `memory.stat`. In version 1 only
    /// the `total_` fields count what lies below, as the usage does.
    const fn names(self) -> (&'static str, &'static str, [&'static str; 2]) {
        match self {
            Self::V1 => (
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                ["total_inactive_file ", "total_active_file "],
            ),
            Self::V2 => ("memory.max", "memory.current", ["inactive_file ", "active_file "]),
        }
    }

    /// From `/proc/self/cgroup` and `/proc/self/mountinfo`.
    fn place(self, own: &str, mounts: &str) -> Option<CgroupPlace> {
        // "4:memory:/path" or "0::/path"
        let path = own.lines().find_map(|line| {
            let (controllers, path) = line.split_once(':')?.1.split_once(':')?;
            let ours = match self {
                Self::V1 => controllers.split(',').any(|name| name == "memory"),
                Self::V2 => controllers.is_empty(),
            };
            ours.then_some(path)
        })?;
        // "36 25 0:31 ROOT MOUNT rw,… - cgroup SOURCE rw,memory"
        let (root, mount) = mounts.lines().find_map(|line| {
            let (place, kind) = line.split_once(" - ")?;
            let mut kind = kind.split(' ');
            let ours = match (self, kind.next()?) {
                (Self::V1, "cgroup") => kind.nth(1)?.split(',').any(|name| name == "memory"),
                (Self::V2, "cgroup2") => true,
                _ => false,
            };
            let mut place = place.split(' ').skip(3);
            ours.then_some((place.next()?, place.next()?))
        })?;
        let mount = PathBuf::from(mount);
        // In a container the mount may show only the process's own part of the tree.
        let below = path.strip_prefix(root).unwrap_or(path).trim_start_matches('/');
        Some(CgroupPlace { version: self, folder: mount.join(below), mount })
    }
}

impl CgroupPlace {
    fn least_left(self) -> Option<u64> {
        let (limit, used, cache) = self.version.names();
        let mut folder = self.folder;
        let mut least: Option<u64> = None;
        for _ in 0..CGROUP_DEPTH_MAX {
            let read = |name: &str| std::fs::read_to_string(folder.join(name)).ok();
            if let (Some(limit), Some(used)) = (read(limit), read(used))
                && let Some(left) =
                    cgroup_left(&limit, &used, &read("memory.stat").unwrap_or_default(), cache)
            {
                least = Some(least.map_or(left, |least| least.min(left)));
            }
            if folder == self.mount || !folder.pop() {
                break;
            }
        }
        least
    }
}

/// Nodes that have memory, at most [`NODES_MAX`] of them.
pub(crate) fn nodes_with_memory() -> Vec<u32> {
    std::fs::read_to_string("/sys/devices/system/node/has_memory")
        .map_or_else(|_| Vec::new(), |text| node_list(&text))
}

/// Bytes of `node` that are free or hold page cache.
pub(super) fn node_available_bytes(node: u32) -> Option<u64> {
    let text =
        std::fs::read_to_string(format!("/sys/devices/system/node/node{node}/meminfo")).ok()?;
    node_available(&text)
}

/// Bytes of `ranges` (addresses) that lie in transparent huge pages, as `/proc/self/smaps` tells.
/// Zero when it cannot be read.
pub(super) fn transparent_huge_bytes(ranges: &[Range<u64>]) -> u64 {
    let Ok(file) = File::open("/proc/self/smaps") else { return 0 };
    huge_bytes(BufReader::new(file).lines().map_while(Result::ok), ranges)
}

fn kib_field(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.trim_start().strip_prefix(name))?;
    number(line.trim().strip_suffix("kB")?)?.checked_mul(1024)
}

fn number(text: &str) -> Option<u64> {
    text.trim().parse().ok()
}

fn hugetlb_free(meminfo: &str) -> u64 {
    if kib_field(meminfo, "Hugepagesize:") != Some(HUGE_PAGE_BYTES) {
        return 0;
    }
    let count = |name: &str| {
        meminfo.lines().find_map(|line| line.strip_prefix(name)).and_then(number).unwrap_or(0)
    };
    count("HugePages_Free:")
        .saturating_sub(count("HugePages_Rsvd:"))
        .saturating_mul(HUGE_PAGE_BYTES)
}

fn cgroup_left(max: &str, current: &str, stat: &str, cache: [&str; 2]) -> Option<u64> {
    let field = |name: &str| {
        stat.lines().find_map(|line| line.strip_prefix(name)).and_then(number).unwrap_or(0)
    };
    let cache = field(cache[0]).saturating_add(field(cache[1]));
    // "max" is no limit, and neither is what version 1 says instead.
    let limit = number(max).filter(|limit| *limit < CGROUP_V1_UNLIMITED)?;
    Some(limit.saturating_sub(number(current)?.saturating_sub(cache)))
}

/// `0-1,3` → 0, 1, 3.
fn node_list(text: &str) -> Vec<u32> {
    let mut nodes = Vec::new();
    for part in text.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (Ok(first), Ok(last)) = (first.parse::<u32>(), last.parse::<u32>()) else { continue };
        nodes.extend((first..=last).take(NODES_MAX.saturating_sub(nodes.len())));
    }
    nodes
}

fn node_available(meminfo: &str) -> Option<u64> {
    let field = |name: &str| {
        meminfo.lines().find_map(|line| {
            let (_, value) = line.split_once(name)?;
            number(value.trim().strip_suffix("kB")?)?.checked_mul(1024)
        })
    };
    let cache = field(" Active(file):").unwrap_or(0) + field(" Inactive(file):").unwrap_or(0);
    Some(field(" MemFree:")? + cache)
}

/// Sums `AnonHugePages` over the mappings that touch a range. A mapping may be wider than the range
/// (the kernel merges neighbours), so each counts at most the bytes it shares with the ranges.
fn huge_bytes(lines: impl Iterator<Item = String>, ranges: &[Range<u64>]) -> u64 {
    let mut shared = 0;
    let mut sum = 0u64;
    for line in lines {
        if let Some(mapping) = mapping_range(&line) {
            shared = ranges
                .iter()
                .map(|range| {
                    range.end.min(mapping.end).saturating_sub(range.start.max(mapping.start))
                })
                .sum();
        } else if shared > 0
            && let Some(bytes) = kib_field(&line, "AnonHugePages:")
        {
            sum = sum.saturating_add(bytes.min(shared));
        }
    }
    sum
}

/// The addresses of a mapping's first line, `7f00-7f10 rw-p …`; `None` for its other lines.
fn mapping_range(line: &str) -> Option<Range<u64>> {
    let (addresses, _) = line.split_once(' ')?;
    let (start, end) = addresses.split_once('-')?;
    Some(u64::from_str_radix(start, 16).ok()?..u64::from_str_radix(end, 16).ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meminfo_fields_are_found_by_their_whole_name() {
        let text = "MemTotal:  100 kB\nMemAvailable:   64 kB\nHugePages_Free:  5\n\
                    HugePages_Rsvd:  2\nHugepagesize:    2048 kB\n";
        assert_eq!(kib_field(text, "MemAvailable:"), Some(64 * 1024));
        assert_eq!(kib_field(text, "MemFree:"), None);
        assert_eq!(hugetlb_free(text), 3 * HUGE_PAGE_BYTES);
        // A reserve of 1 GiB pages cannot back a 2 MiB aligned arena.
        assert_eq!(hugetlb_free(&text.replace("2048", "1048576")), 0);
    }

    #[test]
    fn cgroup_limit_gives_back_page_cache_and_knows_no_limit() {
        let stat = "anon 10\ninactive_file 300\nactive_file 200\ntotal_inactive_file 7\n";
        let (.., v2) = Cgroup::V2.names();
        assert_eq!(cgroup_left("1000\n", "900\n", stat, v2), Some(600));
        assert_eq!(cgroup_left("1000\n", "1700\n", stat, v2), Some(0));
        assert_eq!(cgroup_left("max\n", "900\n", stat, v2), None);
        let (.., v1) = Cgroup::V1.names();
        assert_eq!(cgroup_left("1000\n", "900\n", stat, v1), Some(107));
        assert_eq!(cgroup_left("9223372036854771712\n", "900\n", stat, v1), None);
    }

    #[test]
    fn a_control_group_is_found_below_its_mount() {
        let mounts = "30 23 0:26 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n\
                      31 23 0:27 /docker/7 /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory\n\
                      32 23 0:28 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";
        let own = "5:cpu:/a\n4:memory,x:/docker/7/inner\n0::/user/8\n";
        let place = |version: Cgroup| {
            let place = version.place(own, mounts).expect("a place");
            (place.mount.display().to_string(), place.folder.display().to_string())
        };
        let v1 = ("/sys/fs/cgroup/memory".to_owned(), "/sys/fs/cgroup/memory/inner".to_owned());
        assert_eq!(place(Cgroup::V1), v1);
        let v2 = ("/sys/fs/cgroup/unified".to_owned(), "/sys/fs/cgroup/unified/user/8".to_owned());
        assert_eq!(place(Cgroup::V2), v2);
        assert_eq!(Cgroup::V1.place("0::/\n", mounts), None);
        assert_eq!(Cgroup::V2.place(own, "garbage"), None);
    }

    #[test]
    fn node_lists_and_node_memory() {
        assert_eq!(node_list("0-1,3\n"), [0, 1, 3]);
        assert_eq!(node_list("0\n"), [0]);
        assert!(node_list("").is_empty());
        assert_eq!(node_list("0-4294967295").len(), NODES_MAX);
        let text =
            "Node 1 MemFree:  10 kB\nNode 1 Active(file): 2 kB\nNode 1 Inactive(file): 3 kB\n";
        assert_eq!(node_available(text), Some(15 * 1024));
    }

    #[test]
    fn huge_bytes_count_only_the_mappings_of_the_ranges() {
        let smaps = "1000-3000 rw-p 0 00:00 0\nAnonHugePages:  8 kB\n\
                     5000-9000 rw-p 0 00:00 0 \nSize: 16 kB\nAnonHugePages:  12 kB\n";
        let count = |ranges: &[(u64, u64)]| {
            let ranges: Vec<Range<u64>> = ranges.iter().map(|&(start, end)| start..end).collect();
            huge_bytes(smaps.lines().map(str::to_owned), &ranges)
        };
        assert_eq!(count(&[(0x5000, 0x9000)]), 12 * 1024);
        // Wider than the range: no more than the range itself.
        assert_eq!(count(&[(0x5000, 0x6000)]), 0x1000);
        assert_eq!(count(&[(0x1000, 0x3000), (0x5000, 0x9000)]), 20 * 1024);
        assert_eq!(count(&[(0x9000, 0xa000)]), 0);
    }

    #[test]
    fn this_host_reports_memory() {
        assert!(available_bytes().is_some_and(|bytes| bytes > 0));
    }
}
