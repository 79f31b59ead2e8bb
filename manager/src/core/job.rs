//! Jobs: operations that did not end at once, and what each still has to do.

use orbitkv_shm_protocol::ids::{LeaseId, OperationId, PageHash, RegionId, ScopeId, SessionId};
use orbitkv_shm_protocol::record::{Code, PageOutcome, PageRange, QueryMode, RequestKind, Tier};

use super::effect::Extent;
use super::event::Nanos;
use super::index::PageId;
use super::namespace::NamespaceId;

/// Names a job; stale once the job has ended.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct JobRef {
    index: u32,
    serial: u32,
}

/// What one entry of a job's range still needs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum EntryState {
    /// A parent, not a page.
    Anchor,
    /// Not copied yet.
    Pending,
    /// Being copied.
    Copying,
    /// Copied, not committed (save).
    Copied,
    /// Ended; the outcome says how.
    Ended,
}

/// One page table entry of a job.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    pub(super) hash: PageHash,
    pub(super) device_page: u32,
    pub(super) state: EntryState,
    /// Save: the first page of a chain.
    pub(super) root: bool,
    pub(super) outcome: PageOutcome,
    pub(super) tier: Tier,
    pub(super) code: Code,
    /// Query: a restore may end after this page.
    pub(super) restorable: bool,
    /// Restore: the leased page, pinned until it is `None`.
    pub(super) page: Option<PageId>,
    /// Save: memory that the copy fills, owned by the job until the commit.
    pub(super) extent: Option<Extent>,
    pub(super) checksum: Option<u64>,
}

/// A page that a query or hint brings in from SSD.
#[derive(Clone, Copy, Debug)]
pub(super) struct FillPage {
    pub(super) page: PageId,
    /// Its position in the query.
    pub(super) position: u32,
}

/// Why a job ends before it has done everything.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Stop {
    pub(super) code: Code,
    /// First entry that was not done, where it is known.
    pub(super) at: Option<u32>,
}

/// The event that the first copy of a job waits for. While that is in flight there is no other:
/// those that follow need not wait.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Fence {
    /// In the pool of the session, which keeps it for this job.
    pub(super) index: u32,
    pub(super) passed: bool,
}

/// What a job is doing.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Stage {
    /// Nothing; the slot is free.
    Idle,
    /// Copies device → DRAM.
    Save {
        region: RegionId,
        namespace: NamespaceId,
        /// [`super::namespace::Namespace::forgets`] when it began.
        forgets: u32,
        next_issue: u32,
        next_commit: u32,
    },
    /// A demand query that waits for budget.
    Wait { scope: ScopeId },
    /// Reads from SSD for a lease, or (without one) for a hint.
    Fill {
        lease: Option<LeaseId>,
        next_issue: u32,
        pending: u32,
        /// Query positions below this are still good.
        cut: u32,
        hint_bytes: u64,
    },
    /// Copies DRAM → device.
    Restore {
        region: RegionId,
        lease: LeaseId,
        keep: bool,
        next_read: u32,
        next_issue: u32,
        /// Reads in flight that it waits for.
        reading: u32,
        /// Bytes read and not copied yet.
        window_bytes: u64,
        /// Some pages come from SSD.
        streaming: bool,
        by_layer: bool,
        waits_for_memory: bool,
        /// What one of its pages counts in the lease.
        unit_bytes: u64,
    },
    /// Waits until the namespaces are recorded as forgotten.
    Forget { pending: u32 },
    /// Waits until the region is used by nothing.
    Unregister { region: RegionId },
    /// Waits until the session owns nothing else.
    Drain,
}

/// One operation under way.
#[derive(Debug)]
pub(super) struct Job {
    serial: u32,
    pub(super) session: SessionId,
    pub(super) operation: OperationId,
    pub(super) kind: RequestKind,
    /// The client was already answered (hints).
    pub(super) silent: bool,
    /// Its session is gone: nobody hears of its end.
    pub(super) abandoned: bool,
    pub(super) range: PageRange,
    pub(super) deadline: Nanos,
    pub(super) queued_ns: Nanos,
    pub(super) prepared_ns: Nanos,
    pub(super) copied_ns: Nanos,
    pub(super) stage: Stage,
    pub(super) stop: Option<Stop>,
    pub(super) copies: u32,
    pub(super) fence: Option<Fence>,
    pub(super) queued_for_copy: bool,
    /// Its session has as many long copies in flight as it may.
    pub(super) held: bool,
    pub(super) queued_for_read: bool,
    pub(super) mode: QueryMode,
    /// Entries of the range, one to one.
    pub(super) entries: Vec<Entry>,
    pub(super) fill: Vec<FillPage>,
    /// `Cancel`s that end after it.
    pub(super) cancels: Vec<(OperationId, Nanos)>,
    pub(super) pinned: Vec<PageId>,
    pub(super) bytes: u64,
    pub(super) pages_dram: u32,
    pub(super) pages_ssd: u32,
    /// Query: pages found before anything was cut.
    pub(super) found: u32,
}

/// All jobs; ended ones keep their buffers for the next.
#[derive(Debug, Default)]
pub(super) struct Jobs {
    table: Vec<Job>,
    free: Vec<u32>,
}

impl Jobs {
    /// A job with empty buffers.
    pub(super) fn open(&mut self) -> JobRef {
        let index = self.free.pop().unwrap_or_else(|| {
            self.table.push(Job::idle());
            self.table.len() as u32 - 1
        });
        JobRef { index, serial: self.table[index as usize].serial }
    }

    pub(super) fn get(&self, job: JobRef) -> Option<&Job> {
        self.table.get(job.index as usize).filter(|found| found.serial == job.serial)
    }

    pub(super) fn get_mut(&mut self, job: JobRef) -> Option<&mut Job> {
        self.table.get_mut(job.index as usize).filter(|found| found.serial == job.serial)
    }

    /// Ends a job; its reference is stale from now on.
    pub(super) fn close(&mut self, job: JobRef) {
        let Some(found) = self.get_mut(job) else { return };
        found.serial = found.serial.wrapping_add(1);
        found.reset();
        self.free.push(job.index);
    }

    pub(super) fn len(&self) -> usize {
        self.table.len() - self.free.len()
    }

    /// Every job under way.
    pub(super) fn iter(&self) -> impl Iterator<Item = (JobRef, &Job)> {
        let numbered = self.table.iter().enumerate();
        numbered
            .filter(|(_, job)| job.stage != Stage::Idle)
            .map(|(index, job)| (JobRef { index: index as u32, serial: job.serial }, job))
    }
}

impl Job {
    const fn idle() -> Self {
        Self {
            serial: 1,
            session: SessionId(0),
            operation: OperationId { index: 0, generation: 0 },
            kind: RequestKind::Ping,
            silent: false,
            abandoned: false,
            range: PageRange { start: 0, len: 0 },
            deadline: Nanos::MAX,
            queued_ns: 0,
            prepared_ns: 0,
            copied_ns: 0,
            stage: Stage::Idle,
            stop: None,
            copies: 0,
            fence: None,
            queued_for_copy: false,
            held: false,
            queued_for_read: false,
            mode: QueryMode::Demand,
            entries: Vec::new(),
            fill: Vec::new(),
            cancels: Vec::new(),
            pinned: Vec::new(),
            bytes: 0,
            pages_dram: 0,
            pages_ssd: 0,
            found: 0,
        }
    }

    /// Everything to its first value but the buffers' capacity and the serial.
    fn reset(&mut self) {
        let serial = self.serial;
        let mut entries = std::mem::take(&mut self.entries);
        let mut fill = std::mem::take(&mut self.fill);
        let mut cancels = std::mem::take(&mut self.cancels);
        let mut pinned = std::mem::take(&mut self.pinned);
        entries.clear();
        fill.clear();
        cancels.clear();
        pinned.clear();
        *self = Self { serial, entries, fill, cancels, pinned, ..Self::idle() };
    }

    /// The fence that it waits for, or has yet to wait for.
    pub(super) fn fence_ahead(&self) -> Option<u32> {
        self.fence.filter(|fence| !fence.passed).map(|fence| fence.index)
    }

    /// The page that its next turn to read is for.
    pub(super) fn next_page(&self) -> Option<PageId> {
        match self.stage {
            Stage::Fill { next_issue, .. } => {
                self.fill.get(next_issue as usize).map(|fill| fill.page)
            }
            Stage::Restore { next_read, .. } => {
                self.entries.get(next_read as usize).and_then(|entry| entry.page)
            }
            _ => None,
        }
    }

    /// Stops with `code` unless it is stopping already. The earliest position wins.
    pub(super) fn stop_at(&mut self, code: Code, at: Option<u32>) {
        match &mut self.stop {
            None => self.stop = Some(Stop { code, at }),
            Some(stop) => {
                if let Some(at) = at
                    && stop.at.is_none_or(|known| at < known)
                {
                    stop.at = Some(at);
                }
            }
        }
    }
}

impl Entry {
    pub(super) const fn new(hash: PageHash, device_page: u32, state: EntryState) -> Self {
        Self {
            hash,
            device_page,
            state,
            root: false,
            outcome: PageOutcome::None,
            tier: Tier::None,
            code: Code::None,
            restorable: false,
            page: None,
            extent: None,
            checksum: None,
        }
    }

    pub(super) fn end(&mut self, outcome: PageOutcome, code: Code) {
        self.state = EntryState::Ended;
        self.outcome = outcome;
        self.code = code;
    }
}
