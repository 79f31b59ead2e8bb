//! Every name an operator can type: where it stands in the file, its flag, what it may be and what
//! raising it costs. The reader, the messages and `--print-config` all follow this one table.

/// A field of the configuration.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[expect(missing_docs, reason = "each is documented by its row of FIELDS")]
pub enum Key {
    SocketPath,
    SocketAllowUids,
    SocketAllowGids,
    DramCapacity,
    DramHugePages,
    DramReplacement,
    SsdPaths,
    SsdCapacity,
    SsdDirect,
    SsdEngine,
    SsdSpill,
    SsdWriteInFlight,
    SsdReadJoin,
    SsdWriteBudget,
    BudgetQuery,
    BudgetSession,
    BudgetSpeculative,
    TimeLeaseTtl,
    TimeOperation,
    TimeHandshake,
    TimeStop,
    LimitSessions,
    LimitRingCapacity,
    LimitPageEntries,
    LimitPageBytes,
    LimitScopes,
    LimitMemories,
    LimitRegions,
    LimitEvents,
    LimitBadRequests,
    HttpAddress,
    HttpOptional,
    DeviceKind,
    ReactorWait,
    ReactorPriority,
}

/// What a field holds, as far as the file's types go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    /// Bytes: an integer, or text with a unit.
    Size,
    /// Text with a unit.
    Duration,
    /// An integer.
    Count,
    /// One of some words.
    Choice(&'static [&'static str]),
    /// `true` or `false`; as a flag it takes no value.
    Switch,
    /// A path.
    Path,
    /// An array of paths; the flag is repeated.
    Paths,
    /// An array of numeric user or group ids; the flag is repeated.
    Ids,
    /// A socket address.
    Address,
}

impl Kind {
    /// What the file must hold, for messages.
    pub(crate) const fn expected(self) -> &'static str {
        match self {
            Self::Size => "a string such as \"4GiB\", or an integer in bytes",
            Self::Duration => "a string such as \"500ms\"",
            Self::Count => "an integer",
            Self::Choice(_) | Self::Path | Self::Address => "a string",
            Self::Switch => "true or false",
            Self::Paths => "an array of strings",
            Self::Ids => "an array of integers",
        }
    }
}

/// One row of the table.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Field {
    pub(crate) key: Key,
    /// Table of the file.
    pub(crate) section: &'static str,
    /// Key in that table.
    pub(crate) name: &'static str,
    /// The flag that sets the same and wins.
    pub(crate) flag: Option<&'static str>,
    pub(crate) kind: Kind,
    /// Accepted values with their unit.
    pub(crate) range: &'static str,
    /// Value when neither file nor flag say anything.
    pub(crate) default: &'static str,
    /// What it is for, then what raising it costs.
    pub(crate) cost: &'static str,
}

const ON_OFF: &[&str] = &["on", "off"];

/// The table, in the order in which `--print-config` shows it.
pub(crate) const FIELDS: &[Field] = &[
    Field {
        key: Key::SocketPath,
        section: "socket",
        name: "path",
        flag: Some("--socket"),
        kind: Kind::Path,
        range: "a path of at most 103 bytes whose folder exists",
        default: "$XDG_RUNTIME_DIR/orbitkv/manager.sock, else below /run or the temporary folder",
        cost: "the one file that engines and containers need; only its default folder is made",
    },
    Field {
        key: Key::SocketAllowUids,
        section: "socket",
        name: "allow_uids",
        flag: Some("--allow-uid"),
        kind: Kind::Ids,
        range: "user ids 0 to 4294967294, at most 64 of them",
        default: "none: only the owner",
        cost: "each may attach; the file's mode must let it in too (root, or a group below)",
    },
    Field {
        key: Key::SocketAllowGids,
        section: "socket",
        name: "allow_gids",
        flag: Some("--allow-gid"),
        kind: Kind::Ids,
        range: "group ids 0 to 4294967294, at most 64 of them",
        default: "none",
        cost: "their members may attach; the first becomes the group of the socket, mode 0660",
    },
    Field {
        key: Key::DramCapacity,
        section: "dram",
        name: "capacity",
        flag: Some("--dram"),
        kind: Kind::Size,
        range: "2MiB to 16TiB, rounded down to 2 MiB",
        default: "1GiB, or a quarter of the available memory when that is less",
        cost: "taken whole and touched at start",
    },
    Field {
        key: Key::DramHugePages,
        section: "dram",
        name: "huge_pages",
        flag: Some("--huge-pages"),
        kind: Kind::Choice(&["require", "prefer", "off"]),
        range: "require, prefer or off",
        default: "prefer",
        cost: "require refuses to start without 2 MiB pages; off costs SSD bandwidth",
    },
    Field {
        key: Key::DramReplacement,
        section: "dram",
        name: "replacement",
        flag: Some("--replacement"),
        kind: Kind::Choice(&["prefix-lru", "lru"]),
        range: "prefix-lru, or lru (the same here; it differs in simulate only)",
        default: "prefix-lru",
        cost: "which unleased page goes when memory is short",
    },
    Field {
        key: Key::SsdPaths,
        section: "ssd",
        name: "paths",
        flag: Some("--ssd"),
        kind: Kind::Paths,
        range: "at most 16 files whose folders exist, not on tmpfs",
        default: "none: no SSD tier",
        cost: "two threads and two rings a file",
    },
    Field {
        key: Key::SsdCapacity,
        section: "ssd",
        name: "capacity",
        flag: Some("--ssd-capacity"),
        kind: Kind::Size,
        range: "0 (tier off), or for all files together 2MiB to 64TiB a file, rounded down to 4 KiB",
        default: "16GiB",
        cost: "shared equally and preallocated; after a start one footer a slot is read, beside DRAM",
    },
    Field {
        key: Key::SsdDirect,
        section: "ssd",
        name: "direct",
        flag: Some("--ssd-direct"),
        kind: Kind::Choice(ON_OFF),
        range: "on or off",
        default: "on",
        cost: "off goes through the page cache: twice the memory, for file systems without O_DIRECT",
    },
    Field {
        key: Key::SsdEngine,
        section: "ssd",
        name: "engine",
        flag: Some("--ssd-engine"),
        kind: Kind::Choice(&["auto", "uring", "blocking"]),
        range: "auto, uring or blocking",
        default: "auto: io_uring where the kernel allows it",
        cost: "blocking costs bandwidth; uring refuses to start without io_uring",
    },
    Field {
        key: Key::SsdSpill,
        section: "ssd",
        name: "spill",
        flag: Some("--spill"),
        kind: Kind::Choice(&["all", "reuse"]),
        range: "all, or reuse (only pages with evidence of reuse)",
        default: "all",
        cost: "all writes every saved page once",
    },
    Field {
        key: Key::SsdWriteInFlight,
        section: "ssd",
        name: "write_in_flight",
        flag: None,
        kind: Kind::Size,
        range: "256KiB to 8MiB a file",
        default: "2MiB",
        cost: "where the limit beside reads starts, which then follows what the reads take; each \
               MiB more delays every read beside it by the time of writing it",
    },
    Field {
        key: Key::SsdReadJoin,
        section: "ssd",
        name: "read_join",
        flag: None,
        kind: Kind::Size,
        range: "4KiB to 1MiB",
        default: "1MiB",
        cost: "images of up to 128KiB in neighbouring slots are read with one request of so many \
               bytes: more delays the first of them, less costs a request each",
    },
    Field {
        key: Key::SsdWriteBudget,
        section: "ssd",
        name: "write_budget_per_day",
        flag: None,
        kind: Kind::Size,
        range: "0 (no bound), or for all files together 1GiB to 1024TiB a day",
        default: "0",
        cost: "what the drive lives on; pages evicted while it is used up are not on SSD. A day, and \
               each start in it, may take an hour's share more",
    },
    Field {
        key: Key::BudgetQuery,
        section: "budget",
        name: "query",
        flag: Some("--query-budget"),
        kind: Kind::Size,
        range: "4KiB to dram.capacity",
        default: "half of dram.capacity",
        cost: "bytes that all leases together pin; saves lose that memory",
    },
    Field {
        key: Key::BudgetSession,
        section: "budget",
        name: "session",
        flag: Some("--session-budget"),
        kind: Kind::Size,
        range: "4KiB to budget.query",
        default: "budget.query",
        cost: "bytes that the leases of one session pin; more lets one engine crowd out others",
    },
    Field {
        key: Key::BudgetSpeculative,
        section: "budget",
        name: "speculative",
        flag: None,
        kind: Kind::Size,
        range: "0 (no speculative work) to budget.query",
        default: "a quarter of budget.query",
        cost: "bytes that speculative queries and prepares may pin; demand loses them meanwhile",
    },
    Field {
        key: Key::TimeLeaseTtl,
        section: "time",
        name: "lease_ttl",
        flag: Some("--lease-ttl"),
        kind: Kind::Duration,
        range: "100ms to 60m",
        default: "30s",
        cost: "how long a forgotten lease pins its pages",
    },
    Field {
        key: Key::TimeOperation,
        section: "time",
        name: "operation_timeout",
        flag: Some("--operation-timeout"),
        kind: Kind::Duration,
        range: "10ms to 10m",
        default: "5s",
        cost: "deadline of an operation that names none; how long a query may wait for budget",
    },
    Field {
        key: Key::TimeHandshake,
        section: "time",
        name: "handshake_timeout",
        flag: None,
        kind: Kind::Duration,
        range: "100ms to 60s",
        default: "5s",
        cost: "how long a connection may stay silent before its first message",
    },
    Field {
        key: Key::TimeStop,
        section: "time",
        name: "stop_timeout",
        flag: None,
        kind: Kind::Duration,
        range: "100ms to 9s",
        default: "8s",
        cost: "how long a stop waits for copies and disk before it ends anyway",
    },
    Field {
        key: Key::LimitSessions,
        section: "limits",
        name: "sessions",
        flag: None,
        kind: Kind::Count,
        range: "1 to 127, what one futex_waitv holds beside the control word",
        default: "64",
        cost: "one more word to wait on each",
    },
    Field {
        key: Key::LimitRingCapacity,
        section: "limits",
        name: "ring_capacity",
        flag: None,
        kind: Kind::Count,
        range: "a power of two, 64 to 4096 records",
        default: "4096",
        cost: "largest ring that a session may ask for; 192 bytes and the done words a record",
    },
    Field {
        key: Key::LimitPageEntries,
        section: "limits",
        name: "page_entries",
        flag: None,
        kind: Kind::Count,
        range: "1024 to 1048576 entries",
        default: "1048576",
        cost: "largest page table that a session may ask for; 64 bytes an entry",
    },
    Field {
        key: Key::LimitPageBytes,
        section: "limits",
        name: "page_bytes",
        flag: None,
        kind: Kind::Size,
        range: "4KiB to 64MiB",
        default: "64MiB",
        cost: "largest page image; one page must fit the restore window and a slot",
    },
    Field {
        key: Key::LimitScopes,
        section: "limits",
        name: "scopes",
        flag: None,
        kind: Kind::Count,
        range: "1 to 65536 a session",
        default: "1024",
        cost: "namespaces and sets that a session may define; under 4 KiB each",
    },
    Field {
        key: Key::LimitMemories,
        section: "limits",
        name: "memories",
        flag: None,
        kind: Kind::Count,
        range: "1 to 4096 a session",
        default: "1024",
        cost: "memories that a session may have registered; a descriptor or a mapping each",
    },
    Field {
        key: Key::LimitRegions,
        section: "limits",
        name: "regions",
        flag: None,
        kind: Kind::Count,
        range: "1 to 4096 a session",
        default: "256",
        cost: "regions that a session may have at a time; 80 bytes a segment of its layout",
    },
    Field {
        key: Key::LimitEvents,
        section: "limits",
        name: "events",
        flag: None,
        kind: Kind::Count,
        range: "1 to 65536 a session",
        default: "4096",
        cost: "GPU events that a session may register; a handle of the driver each",
    },
    Field {
        key: Key::LimitBadRequests,
        section: "limits",
        name: "bad_requests",
        flag: None,
        kind: Kind::Count,
        range: "1 to 1000000",
        default: "16",
        cost: "malformed requests, or refused messages, after which a session is closed",
    },
    Field {
        key: Key::HttpAddress,
        section: "http",
        name: "address",
        flag: Some("--http"),
        kind: Kind::Address,
        range: "IP:PORT, a bare PORT for 127.0.0.1, or off; port 0 picks a free one",
        default: "off",
        cost: "serves /metrics and /healthz to whoever reaches the address",
    },
    Field {
        key: Key::HttpOptional,
        section: "http",
        name: "optional",
        flag: Some("--http-optional"),
        kind: Kind::Switch,
        range: "true or false",
        default: "false",
        cost: "true starts without metrics when the address is taken",
    },
    Field {
        key: Key::DeviceKind,
        section: "device",
        name: "kind",
        flag: Some("--device"),
        kind: Kind::Choice(&["auto", "host", "cuda"]),
        range: "auto, host or cuda",
        default: "auto: cuda where a driver is found, and host",
        cost: "cuda refuses to start without a driver",
    },
    Field {
        key: Key::ReactorWait,
        section: "reactor",
        name: "wait",
        flag: Some("--wait"),
        kind: Kind::Choice(&["adaptive", "dedicated"]),
        range: "adaptive or dedicated",
        default: "adaptive",
        cost: "dedicated keeps one core busy all the time",
    },
    Field {
        key: Key::ReactorPriority,
        section: "reactor",
        name: "priority",
        flag: None,
        kind: Kind::Choice(&["high", "normal"]),
        range: "high or normal",
        default: "high",
        cost: "high is nice -10 where the user may: what shares the reactor's core waits for it",
    },
];

/// The row of `key`.
pub(crate) fn field(key: Key) -> &'static Field {
    FIELDS.iter().find(|field| field.key == key).expect("every key has a row")
}

/// The tables of the file, in order.
pub(crate) fn sections() -> impl Iterator<Item = &'static str> {
    let mut last = "";
    FIELDS.iter().map(|field| field.section).filter(move |section| {
        let new = *section != last;
        last = section;
        new
    })
}

/// The candidate that was most probably meant, if any is close.
pub(crate) fn nearest<'a>(
    typed: &str,
    candidates: impl Iterator<Item = &'a str>,
) -> Option<&'a str> {
    candidates
        .map(|candidate| (strsim::jaro_winkler(typed, candidate), candidate))
        .filter(|(likeness, _)| *likeness > 0.7)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, candidate)| candidate)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_name_or_flag_stands_twice_and_sections_are_contiguous() {
        let mut seen = Vec::new();
        for field in FIELDS {
            assert!(!seen.contains(&(field.section, field.name)), "{field:?}");
            seen.push((field.section, field.name));
        }
        let flags: Vec<_> = FIELDS.iter().filter_map(|field| field.flag).collect();
        for (i, flag) in flags.iter().enumerate() {
            assert!(!flags[..i].contains(flag), "{flag}");
        }
        let all: Vec<_> = sections().collect();
        for (i, section) in all.iter().enumerate() {
            assert!(!all[..i].contains(section), "{section} stands apart");
        }
    }

    #[test]
    fn nearest_name_finds_slips_and_leaves_strangers() {
        let names = || ["capacity", "huge_pages", "replacement"].into_iter();
        assert_eq!(nearest("capcity", names()), Some("capacity"));
        assert_eq!(nearest("hugepages", names()), Some("huge_pages"));
        assert_eq!(nearest("zzz", names()), None);
    }
}
