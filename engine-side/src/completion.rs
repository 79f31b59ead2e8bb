//! How an operation ended, as the engine sees it.

use orbitkv_shm_protocol::record::{self, Code, PageOutcome, RequestKind, Tier};

use crate::handles::{Lease, Operation};

/// How an operation ended.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Status {
    /// Everything asked for was done.
    Ok,
    /// Part of it was done; the counts and the page results say which.
    Partial,
    /// Nothing was done; the code names the cause.
    Error,
    /// The session ended first. What was done is unknown; treat a query as a miss and every page
    /// of a restore as not restored.
    Gone,
}

impl From<record::Status> for Status {
    fn from(status: record::Status) -> Self {
        match status {
            record::Status::Ok => Self::Ok,
            record::Status::Partial => Self::Partial,
            record::Status::Error => Self::Error,
        }
    }
}

/// When an operation passed its stages, in nanoseconds of CLOCK_MONOTONIC, one clock for both
/// processes. Zero where it never came.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct StageTimes {
    /// The Manager took the request from its ring.
    pub queued_ns: u64,
    /// Its pages were resident and leased (query), or memory was there (save, restore).
    pub prepared_ns: u64,
    /// The last byte was copied.
    pub copied_ns: u64,
    /// The Manager published the completion. Of a kind without
    /// [stages](orbitkv_shm_protocol::record::RequestKind::has_stages): at the earliest the begin of
    /// the Manager's turn that ended it.
    pub published_ns: u64,
    /// This client took the completion from its ring; zero for a kind without stages.
    pub observed_ns: u64,
}

/// The one terminal answer to an [`Operation`].
///
/// Counts of a save, query or restore never exceed the pages of the request. `Release`, `Prepare`
/// and `Forget` count pages of every rank that they let go of, began to read, or dropped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Completion {
    /// Which operation ended.
    pub operation: Operation,
    /// What it had asked for.
    pub kind: RequestKind,
    /// How it ended.
    pub status: Status,
    /// Cause when the status is not `Ok`; `None` for `Gone`.
    pub code: Code,
    /// Save: stored. Query: hit. Restore: restored. Release: let go of. Prepare: begun to read.
    /// Forget: forgotten.
    pub pages: u32,
    /// Query: hit pages that were in DRAM when the query was taken. Restore: pages that came from
    /// DRAM.
    pub pages_dram: u32,
    /// Query, restore: pages that came from SSD.
    pub pages_ssd: u32,
    /// Save: pages that were already present.
    pub pages_present: u32,
    /// Save: pages refused; the page results say why.
    pub pages_refused: u32,
    /// Restore: index among the request's pages of the first that failed.
    pub first_failed: Option<u32>,
    /// Bytes copied (save, restore), leased (query) or forgotten.
    pub bytes: u64,
    /// Query: what to restore from, and to release.
    pub lease: Option<Lease>,
    /// When it passed its stages.
    pub times: StageTimes,
}

/// What happened to one page of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PageResult {
    /// What happened; `None` when the operation ended before it reached the page.
    pub outcome: PageOutcome,
    /// Where the page was found.
    pub tier: Tier,
    /// Why it was refused or failed.
    pub code: Code,
    /// Query over several dependency kinds: a restore may end after this page.
    pub restorable: bool,
}

impl PageResult {
    /// The result of a page that the Manager wrote nothing about.
    pub(crate) const UNTOLD: Self =
        Self { outcome: PageOutcome::None, tier: Tier::None, code: Code::None, restorable: false };
}
