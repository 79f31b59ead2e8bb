//! Fixed-size records and what their numbers mean.
//!
//! The `*Record`, [`PageEntry`] and [`PageResult`] types are private copies of bytes that another
//! process wrote: plain integers in which every bit pattern is legal. [`Request::decode`] and
//! [`Completion::decode`] turn them into typed values or say which field is wrong. All numbers
//! are little-endian; nothing has padding.

use std::mem::offset_of;

use bytemuck::{Pod, Zeroable};

use crate::ids::{Epoch, LeaseId, OperationId, PageHash, RegionId, ScopeId, SessionId};
use crate::layout::fnv1a;

#[cfg(target_endian = "big")]
compile_error!("the OrbitKV wire is little-endian; big-endian hosts need a byte-swapping port");

/// A request as it lies in the request ring: 64 bytes, one cache line.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Pod, Zeroable)]
#[repr(C)]
pub struct RequestRecord {
    /// Session that the record belongs to; another value closes the session.
    pub session: u32,
    /// Epoch of the Manager that the client attached to.
    pub epoch: u32,
    /// Free-running ring position of this record.
    pub sequence: u64,
    /// [`OperationId::index`].
    pub operation_index: u32,
    /// [`OperationId::generation`].
    pub operation_generation: u32,
    /// [`RequestKind`] as a number.
    pub kind: u16,
    /// [`flags`] bits.
    pub flags: u16,
    /// Milliseconds from receipt until the operation ends with what it has; 0 is the Manager's
    /// default (`operation_timeout`).
    pub deadline_ms: u32,
    /// First entry of the request's range in the page table.
    pub range_start: u32,
    /// Entries in the range, anchors included.
    pub range_len: u32,
    /// [`LeaseId`] for `Restore` and `Release`; [`OperationId::to_bits`] of the target for
    /// `Cancel`; else 0.
    pub subject: u64,
    /// [`RegionId`] for `Save`, `Restore`, `Unregister`; [`ScopeId`] for `Query`, `Prepare`,
    /// `Forget`; else 0.
    pub target: u32,
    /// `Restore`: offset of the range's first page in the lease.
    pub offset: u32,
    /// `Save` and `Restore`: index of the fence event in the session's pool, plus one; 0 = none.
    pub fence: u32,
    /// Zero.
    pub reserved: u32,
}

/// A completion as it lies in the completion ring: 128 bytes, two cache lines.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Pod, Zeroable)]
#[repr(C)]
pub struct CompletionRecord {
    /// Session that the record belongs to.
    pub session: u32,
    /// Epoch of the Manager that wrote it.
    pub epoch: u32,
    /// Free-running ring position of this record.
    pub sequence: u64,
    /// [`OperationId::index`] of the request that ended.
    pub operation_index: u32,
    /// [`OperationId::generation`] of the request that ended.
    pub operation_generation: u32,
    /// [`RequestKind`] of the request that ended.
    pub kind: u16,
    /// [`Status`] as a number.
    pub status: u16,
    /// [`Code`] as a number: the cause when the status is not `Ok`.
    pub code: u16,
    /// Zero.
    pub reserved_flags: u16,
    /// Query: the [`LeaseId`], or 0 when nothing is leased.
    pub lease: u64,
    /// Bytes copied (save, restore), leased (query), or forgotten.
    pub bytes: u64,
    /// Save: stored. Query: hit. Prepare: pages of the prompt whose read was begun, whatever the
    /// number of ranks. Restore: restored. Forget: forgotten.
    pub pages: u32,
    /// Query: hit pages that were in DRAM when the query was taken. Restore: pages that came from
    /// DRAM.
    pub pages_dram: u32,
    /// Query, restore: pages that came from SSD.
    pub pages_ssd: u32,
    /// Save: pages that were already present.
    pub pages_present: u32,
    /// Save: pages refused; the result table says why.
    pub pages_refused: u32,
    /// Restore: index within the request's pages of the first that failed; else `u32::MAX`.
    pub first_failed: u32,
    /// CLOCK_MONOTONIC nanoseconds when the request was taken from its ring.
    pub queued_ns: u64,
    /// When its pages were resident and leased (query), or memory was there (save, restore).
    pub prepared_ns: u64,
    /// When the last byte was copied.
    pub copied_ns: u64,
    /// When this record was published.
    pub published_ns: u64,
    /// Query: CLOCK_MONOTONIC nanoseconds at which the lease expires.
    pub lease_expires_ns: u64,
    /// Zero.
    pub reserved: [u64; 2],
}

/// One page of a request's range: 48 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Pod, Zeroable)]
#[repr(C)]
pub struct PageEntry {
    /// Chained block hash of the page.
    pub hash: [u8; 32],
    /// Page of the region that the bytes come from or go to.
    pub device_page: u32,
    /// [`flags::ENTRY_ANCHOR`] and [`flags::ENTRY_ROOT`].
    pub flags: u32,
    /// Zero.
    pub reserved: u64,
}

/// What happened to one page of a range: 16 bytes, entry i of a range has result i.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Pod, Zeroable)]
#[repr(C)]
pub struct PageResult {
    /// Index of the operation that this result belongs to.
    pub operation_index: u32,
    /// Generation of the operation that this result belongs to.
    pub operation_generation: u32,
    /// [`PageOutcome`] as a number.
    pub outcome: u16,
    /// [`Tier`] as a number.
    pub tier: u16,
    /// [`Code`] as a number when the page was refused or failed.
    pub code: u16,
    /// Query over several dependency kinds: 1 when a restore may end after this page.
    pub restorable: u16,
}

/// Bits of [`RequestRecord::flags`] and [`PageEntry::flags`].
pub mod flags {
    /// Query: skip instead of wait when over the speculative budget.
    pub const QUERY_SPECULATIVE: u16 = 1;
    /// Query: lease pages where they are and answer at once.
    pub const QUERY_CANDIDATE: u16 = 2;
    /// Restore: the lease stays valid for the pages it names.
    pub const RESTORE_KEEP: u16 = 4;
    /// Restore: done words one a layer, in copy order.
    pub const RESTORE_BY_LAYER: u16 = 8;
    /// Entry is no page but the parent of the next entry.
    pub const ENTRY_ANCHOR: u32 = 1;
    /// Entry is the first page of a chain (only needed after the first entry of a range).
    pub const ENTRY_ROOT: u32 = 2;
}

macro_rules! wire_enum {
    ($(#[$meta:meta])* $name:ident : $repr:ty { $($(#[$vmeta:meta])* $variant:ident = $value:literal => $label:literal,)+ }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        #[repr($repr)]
        pub enum $name { $($(#[$vmeta])* $variant = $value,)+ }

        impl $name {
            /// Every value, in wire order.
            pub const ALL: &'static [$name] = &[$($name::$variant,)+];

            /// The value that `raw` stands for, or `None`.
            pub const fn from_raw(raw: $repr) -> Option<Self> {
                match raw { $($value => Some(Self::$variant),)+ _ => None }
            }

            /// Stable lower-case name, as metrics, JSON and messages spell it.
            pub const fn label(self) -> &'static str {
                match self { $(Self::$variant => $label,)+ }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.label())
            }
        }
    };
}

wire_enum! {
    /// What a request asks for.
    RequestKind: u16 {
        /// Device → DRAM copy of new pages.
        Save = 1 => "save",
        /// Longest restorable prefix, leased.
        Query = 2 => "query",
        /// DRAM (or SSD) → device copy of leased pages.
        Restore = 3 => "restore",
        /// End a lease.
        Release = 4 => "release",
        /// End an operation early.
        Cancel = 5 => "cancel",
        /// Hint: bring pages from SSD to DRAM.
        Prepare = 6 => "prepare",
        /// Make a namespace unfindable.
        Forget = 7 => "forget",
        /// End the use of a region.
        Unregister = 8 => "unregister",
        /// Answer at once.
        Ping = 9 => "ping",
        /// Answer when the session owns nothing.
        Drain = 10 => "drain",
    }
}

wire_enum! {
    /// How an operation ended.
    Status: u16 {
        /// Everything asked for was done.
        Ok = 1 => "ok",
        /// Part of it was done; the counts and the result table say which.
        Partial = 2 => "partial",
        /// Nothing was done; the code names the cause.
        Error = 3 => "error",
    }
}

wire_enum! {
    /// Cause of a refusal or failure.
    Code: u16 {
        /// No failure.
        None = 0 => "none",
        /// A field of the request is out of range or inconsistent.
        BadRequest = 1 => "bad_request",
        /// No such region in this session.
        UnknownRegion = 2 => "unknown_region",
        /// No such namespace or set in this session.
        UnknownScope = 3 => "unknown_scope",
        /// No such lease in this attachment group: never issued, ended, or another group's.
        UnknownLease = 4 => "unknown_lease",
        /// The lease has expired.
        ExpiredLease = 5 => "expired_lease",
        /// No DRAM could be freed for the page.
        NoMemory = 6 => "no_memory",
        /// The query or speculative budget is taken.
        OverBudget = 7 => "over_budget",
        /// The deadline passed first.
        Deadline = 8 => "deadline",
        /// Ended by a `Cancel`.
        Cancelled = 9 => "cancelled",
        /// The SSD read failed or the image did not match its checksum.
        IoError = 10 => "io_error",
        /// The copy to or from the engine's memory failed.
        DeviceError = 11 => "device_error",
        /// The page's parent is in no tier.
        ParentAbsent = 12 => "parent_absent",
        /// Larger than a limit that no waiting can lift.
        TooLarge = 13 => "too_large",
        /// The operation index is still in use.
        OperationInUse = 14 => "operation_in_use",
        /// The Manager is stopping.
        Draining = 15 => "draining",
        /// This Manager or device cannot do it.
        Unsupported = 16 => "unsupported",
        /// The namespace was forgotten while the operation ran.
        Forgotten = 17 => "forgotten",
        /// The fence is missing, unknown, broken, or that of another operation.
        BadFence = 18 => "bad_fence",
        /// The page table range is in use by another operation.
        RangeInUse = 19 => "range_in_use",
        /// The page is in no tier.
        Absent = 20 => "absent",
    }
}

wire_enum! {
    /// Where a page was found.
    Tier: u16 {
        /// In no tier.
        None = 0 => "none",
        /// In the Manager's DRAM.
        Dram = 1 => "dram",
        /// On SSD.
        Ssd = 2 => "ssd",
    }
}

wire_enum! {
    /// What happened to one page.
    PageOutcome: u16 {
        /// Not a page (anchor) or not reached.
        None = 0 => "none",
        /// Save: the DRAM replica exists now.
        Stored = 1 => "stored",
        /// Save: it existed before.
        Present = 2 => "present",
        /// Query: part of the leased prefix.
        Hit = 3 => "hit",
        /// Query: not part of it.
        Miss = 4 => "miss",
        /// Restore: every byte is in the device page.
        Restored = 5 => "restored",
        /// Refused or failed; the code says why.
        Refused = 6 => "refused",
    }
}

wire_enum! {
    /// How far a session has come, as the header of the completion segment says.
    SessionState: u32 {
        /// Requests are taken.
        Open = 1 => "open",
        /// The Manager is stopping: what runs ends, new work is refused.
        Draining = 2 => "draining",
        /// Nothing more is taken from the ring; the session is being taken apart.
        Closed = 3 => "closed",
    }
}

/// How a query treats budgets and SSD pages.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum QueryMode {
    /// Wait for budget and SSD reads up to the deadline.
    Demand,
    /// Skip when the speculative budget is taken.
    Speculative,
    /// Lease pages where they are, never wait.
    Candidate,
}

/// A range of the page table.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct PageRange {
    /// First entry.
    pub start: u32,
    /// Entries, anchors included.
    pub len: u32,
}

/// A decoded request: what one operation asks for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Request {
    /// Chosen by the client.
    pub operation: OperationId,
    /// Milliseconds from receipt; 0 = the Manager's default.
    pub deadline_ms: u32,
    /// Range of the page table; empty for operations without pages.
    pub range: PageRange,
    /// The operation and its arguments.
    pub body: RequestBody,
}

/// The arguments of each kind of request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "fields carry the names of RequestRecord, documented there")]
pub enum RequestBody {
    Save {
        region: RegionId,
        fence: Option<u32>,
    },
    Query {
        scope: ScopeId,
        mode: QueryMode,
    },
    Restore {
        region: RegionId,
        lease: LeaseId,
        offset: u32,
        fence: Option<u32>,
        keep: bool,
        by_layer: bool,
    },
    Release {
        lease: LeaseId,
    },
    Cancel {
        operation: OperationId,
    },
    Prepare {
        scope: ScopeId,
    },
    Forget {
        scope: ScopeId,
    },
    Unregister {
        region: RegionId,
    },
    Ping,
    Drain,
}

/// A field of a peer's record that no correct peer writes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("field {field} holds {value}")]
pub struct BadField {
    /// Name of the field.
    pub field: &'static str,
    /// What it held.
    pub value: u64,
}

impl RequestRecord {
    /// Checks that the record was written by a client of this session and this life of the
    /// Manager.
    ///
    /// # Errors
    /// The field that differs; the session must be closed.
    #[inline]
    pub fn check_addressed_to(&self, session: SessionId, epoch: Epoch) -> Result<(), BadField> {
        check_addressed(self.session, self.epoch, session, epoch)
    }
}

impl CompletionRecord {
    /// Checks that the record was written for this session by this life of the Manager.
    ///
    /// # Errors
    /// The field that differs; the Manager cannot be trusted any more.
    #[inline]
    pub fn check_addressed_to(&self, session: SessionId, epoch: Epoch) -> Result<(), BadField> {
        check_addressed(self.session, self.epoch, session, epoch)
    }
}

#[inline]
fn check_addressed(
    found_session: u32,
    found_epoch: u32,
    session: SessionId,
    epoch: Epoch,
) -> Result<(), BadField> {
    if found_session != session.0 {
        return Err(BadField { field: "session", value: found_session.into() });
    }
    if found_epoch != epoch.0 {
        return Err(BadField { field: "epoch", value: found_epoch.into() });
    }
    Ok(())
}

impl RequestKind {
    /// Whether its time is spent in stages or in waiting: its completion then carries when each
    /// stage was passed. Ping and release end in the turn that takes them; a look at the clock would
    /// be a good part of their cost and tell nothing.
    #[inline]
    pub const fn has_stages(self) -> bool {
        !matches!(self, Self::Ping | Self::Release)
    }
}

impl Request {
    /// Reads the operation out of a private copy of a record. Session, epoch and sequence are the
    /// ring's business and not looked at.
    ///
    /// # Errors
    /// The first field whose value no kind of request allows.
    #[inline]
    pub fn decode(record: &RequestRecord) -> Result<Self, BadField> {
        let bad = |field, value: u64| Err(BadField { field, value });
        let Some(kind) = RequestKind::from_raw(record.kind) else {
            return bad("kind", record.kind.into());
        };
        let allowed = match kind {
            RequestKind::Query => flags::QUERY_SPECULATIVE | flags::QUERY_CANDIDATE,
            RequestKind::Restore => flags::RESTORE_KEEP | flags::RESTORE_BY_LAYER,
            _ => 0,
        };
        if record.flags & !allowed != 0 {
            return bad("flags", record.flags.into());
        }
        if record.reserved != 0 {
            return bad("reserved", record.reserved.into());
        }
        let region = RegionId(record.target);
        let scope = ScopeId(record.target);
        let lease = LeaseId(record.subject);
        let fence = record.fence.checked_sub(1);
        let body = match kind {
            RequestKind::Save => RequestBody::Save { region, fence },
            RequestKind::Query => RequestBody::Query {
                scope,
                mode: match record.flags {
                    0 => QueryMode::Demand,
                    flags::QUERY_SPECULATIVE => QueryMode::Speculative,
                    flags::QUERY_CANDIDATE => QueryMode::Candidate,
                    both => return bad("flags", both.into()),
                },
            },
            RequestKind::Restore => RequestBody::Restore {
                region,
                lease,
                offset: record.offset,
                fence,
                keep: record.flags & flags::RESTORE_KEEP != 0,
                by_layer: record.flags & flags::RESTORE_BY_LAYER != 0,
            },
            RequestKind::Release => RequestBody::Release { lease },
            RequestKind::Cancel => {
                RequestBody::Cancel { operation: OperationId::from_bits(record.subject) }
            }
            RequestKind::Prepare => RequestBody::Prepare { scope },
            RequestKind::Forget => RequestBody::Forget { scope },
            RequestKind::Unregister => RequestBody::Unregister { region },
            RequestKind::Ping => RequestBody::Ping,
            RequestKind::Drain => RequestBody::Drain,
        };
        Ok(Self {
            operation: OperationId {
                index: record.operation_index,
                generation: record.operation_generation,
            },
            deadline_ms: record.deadline_ms,
            range: PageRange { start: record.range_start, len: record.range_len },
            body,
        })
    }

    /// The record that [`decode`](Self::decode) reads back as `self`, addressed to one session.
    #[inline]
    pub fn encode(&self, session: SessionId, epoch: Epoch, sequence: u64) -> RequestRecord {
        let mut record = RequestRecord {
            session: session.0,
            epoch: epoch.0,
            sequence,
            operation_index: self.operation.index,
            operation_generation: self.operation.generation,
            kind: self.kind() as u16,
            deadline_ms: self.deadline_ms,
            range_start: self.range.start,
            range_len: self.range.len,
            ..RequestRecord::default()
        };
        let wire_fence = |fence: Option<u32>| fence.map_or(0, |index| index.saturating_add(1));
        match self.body {
            RequestBody::Save { region, fence } => {
                record.target = region.0;
                record.fence = wire_fence(fence);
            }
            RequestBody::Query { scope, mode } => {
                record.target = scope.0;
                record.flags = match mode {
                    QueryMode::Demand => 0,
                    QueryMode::Speculative => flags::QUERY_SPECULATIVE,
                    QueryMode::Candidate => flags::QUERY_CANDIDATE,
                };
            }
            RequestBody::Restore { region, lease, offset, fence, keep, by_layer } => {
                record.target = region.0;
                record.subject = lease.0;
                record.offset = offset;
                record.fence = wire_fence(fence);
                record.flags = if keep { flags::RESTORE_KEEP } else { 0 }
                    | if by_layer { flags::RESTORE_BY_LAYER } else { 0 };
            }
            RequestBody::Release { lease } => record.subject = lease.0,
            RequestBody::Cancel { operation } => record.subject = operation.to_bits(),
            RequestBody::Prepare { scope } | RequestBody::Forget { scope } => {
                record.target = scope.0;
            }
            RequestBody::Unregister { region } => record.target = region.0,
            RequestBody::Ping | RequestBody::Drain => {}
        }
        record
    }

    /// Which kind of request this is.
    pub const fn kind(&self) -> RequestKind {
        match self.body {
            RequestBody::Save { .. } => RequestKind::Save,
            RequestBody::Query { .. } => RequestKind::Query,
            RequestBody::Restore { .. } => RequestKind::Restore,
            RequestBody::Release { .. } => RequestKind::Release,
            RequestBody::Cancel { .. } => RequestKind::Cancel,
            RequestBody::Prepare { .. } => RequestKind::Prepare,
            RequestBody::Forget { .. } => RequestKind::Forget,
            RequestBody::Unregister { .. } => RequestKind::Unregister,
            RequestBody::Ping => RequestKind::Ping,
            RequestBody::Drain => RequestKind::Drain,
        }
    }
}

/// A decoded completion: how one operation ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "fields carry the names of CompletionRecord, documented there")]
pub struct Completion {
    pub operation: OperationId,
    pub kind: RequestKind,
    pub status: Status,
    pub code: Code,
    pub lease: Option<LeaseId>,
    pub lease_expires_ns: u64,
    pub bytes: u64,
    pub pages: u32,
    pub pages_dram: u32,
    pub pages_ssd: u32,
    pub pages_present: u32,
    pub pages_refused: u32,
    pub first_failed: Option<u32>,
    pub queued_ns: u64,
    pub prepared_ns: u64,
    pub copied_ns: u64,
    pub published_ns: u64,
}

impl Completion {
    /// An `Ok` completion without counts, to be filled in.
    #[inline]
    pub const fn ok(operation: OperationId, kind: RequestKind) -> Self {
        Self {
            operation,
            kind,
            status: Status::Ok,
            code: Code::None,
            lease: None,
            lease_expires_ns: 0,
            bytes: 0,
            pages: 0,
            pages_dram: 0,
            pages_ssd: 0,
            pages_present: 0,
            pages_refused: 0,
            first_failed: None,
            queued_ns: 0,
            prepared_ns: 0,
            copied_ns: 0,
            published_ns: 0,
        }
    }

    /// Reads a private copy of a completion record.
    ///
    /// # Errors
    /// The first field whose value no Manager writes.
    #[inline]
    pub fn decode(record: &CompletionRecord) -> Result<Self, BadField> {
        let bad = |field, value: u16| BadField { field, value: value.into() };
        Ok(Self {
            operation: OperationId {
                index: record.operation_index,
                generation: record.operation_generation,
            },
            kind: RequestKind::from_raw(record.kind).ok_or(bad("kind", record.kind))?,
            status: Status::from_raw(record.status).ok_or(bad("status", record.status))?,
            code: Code::from_raw(record.code).ok_or(bad("code", record.code))?,
            lease: (record.lease != 0).then_some(LeaseId(record.lease)),
            lease_expires_ns: record.lease_expires_ns,
            bytes: record.bytes,
            pages: record.pages,
            pages_dram: record.pages_dram,
            pages_ssd: record.pages_ssd,
            pages_present: record.pages_present,
            pages_refused: record.pages_refused,
            first_failed: (record.first_failed != u32::MAX).then_some(record.first_failed),
            queued_ns: record.queued_ns,
            prepared_ns: record.prepared_ns,
            copied_ns: record.copied_ns,
            published_ns: record.published_ns,
        })
    }

    /// The record that [`decode`](Self::decode) reads back as `self`.
    #[inline]
    pub fn encode(&self, session: SessionId, epoch: Epoch, sequence: u64) -> CompletionRecord {
        CompletionRecord {
            session: session.0,
            epoch: epoch.0,
            sequence,
            operation_index: self.operation.index,
            operation_generation: self.operation.generation,
            kind: self.kind as u16,
            status: self.status as u16,
            code: self.code as u16,
            reserved_flags: 0,
            lease: self.lease.map_or(0, |lease| lease.0),
            bytes: self.bytes,
            pages: self.pages,
            pages_dram: self.pages_dram,
            pages_ssd: self.pages_ssd,
            pages_present: self.pages_present,
            pages_refused: self.pages_refused,
            first_failed: self.first_failed.unwrap_or(u32::MAX),
            queued_ns: self.queued_ns,
            prepared_ns: self.prepared_ns,
            copied_ns: self.copied_ns,
            published_ns: self.published_ns,
            lease_expires_ns: self.lease_expires_ns,
            reserved: [0; 2],
        }
    }
}

impl PageEntry {
    /// A page that starts or continues a chain.
    pub const fn page(hash: PageHash, device_page: u32) -> Self {
        Self { hash: hash.0, device_page, flags: 0, reserved: 0 }
    }

    /// The parent of the entry that follows: not a page itself.
    pub const fn anchor(hash: PageHash) -> Self {
        Self { hash: hash.0, device_page: 0, flags: flags::ENTRY_ANCHOR, reserved: 0 }
    }

    /// Whether the entry names a parent instead of a page.
    pub const fn is_anchor(&self) -> bool {
        self.flags & flags::ENTRY_ANCHOR != 0
    }

    /// Whether the entry starts a chain of its own.
    pub const fn is_root(&self) -> bool {
        self.flags & flags::ENTRY_ROOT != 0
    }
}

impl PageResult {
    /// A result of `operation`.
    pub const fn new(operation: OperationId, outcome: PageOutcome, tier: Tier, code: Code) -> Self {
        Self {
            operation_index: operation.index,
            operation_generation: operation.generation,
            outcome: outcome as u16,
            tier: tier as u16,
            code: code as u16,
            restorable: 0,
        }
    }
}

macro_rules! assert_layout {
    ($type:ty, $size:literal, $align:literal, { $($field:ident @ $offset:literal),+ $(,)? }) => {
        const _: () = {
            assert!(size_of::<$type>() == $size);
            assert!(align_of::<$type>() == $align);
            $(assert!(offset_of!($type, $field) == $offset);)+
        };
    };
}

assert_layout!(RequestRecord, 64, 8, {
    session @ 0, epoch @ 4, sequence @ 8, operation_index @ 16, operation_generation @ 20,
    kind @ 24, flags @ 26, deadline_ms @ 28, range_start @ 32, range_len @ 36, subject @ 40,
    target @ 48, offset @ 52, fence @ 56, reserved @ 60,
});
assert_layout!(CompletionRecord, 128, 8, {
    session @ 0, epoch @ 4, sequence @ 8, operation_index @ 16, operation_generation @ 20,
    kind @ 24, status @ 26, code @ 28, reserved_flags @ 30, lease @ 32, bytes @ 40, pages @ 48,
    pages_dram @ 52, pages_ssd @ 56, pages_present @ 60, pages_refused @ 64, first_failed @ 68,
    queued_ns @ 72, prepared_ns @ 80, copied_ns @ 88, published_ns @ 96, lease_expires_ns @ 104,
    reserved @ 112,
});
assert_layout!(PageEntry, 48, 8, { hash @ 0, device_page @ 32, flags @ 36, reserved @ 40 });
assert_layout!(PageResult, 16, 4, {
    operation_index @ 0, operation_generation @ 4, outcome @ 8, tier @ 10, code @ 12,
    restorable @ 14,
});

/// Folds every field offset, so that a reorder of equal-sized fields changes the layout
/// fingerprint too.
pub(crate) const FIELD_FINGERPRINT: u64 = {
    let offsets = [
        offset_of!(RequestRecord, sequence),
        offset_of!(RequestRecord, kind),
        offset_of!(RequestRecord, deadline_ms),
        offset_of!(RequestRecord, range_start),
        offset_of!(RequestRecord, range_len),
        offset_of!(RequestRecord, subject),
        offset_of!(RequestRecord, target),
        offset_of!(RequestRecord, offset),
        offset_of!(RequestRecord, fence),
        offset_of!(CompletionRecord, status),
        offset_of!(CompletionRecord, code),
        offset_of!(CompletionRecord, lease),
        offset_of!(CompletionRecord, bytes),
        offset_of!(CompletionRecord, pages),
        offset_of!(CompletionRecord, pages_refused),
        offset_of!(CompletionRecord, queued_ns),
        offset_of!(CompletionRecord, published_ns),
        offset_of!(CompletionRecord, lease_expires_ns),
        offset_of!(PageEntry, device_page),
        offset_of!(PageEntry, flags),
        offset_of!(PageResult, outcome),
        offset_of!(PageResult, tier),
        offset_of!(PageResult, code),
        offset_of!(PageResult, restorable),
    ];
    let mut hash = 0xcbf2_9ce4_8422_2325;
    let mut i = 0;
    while i < offsets.len() {
        hash = fnv1a(hash, offsets[i] as u64);
        i += 1;
    }
    hash
};
