//! Page results: which can be read now, which entry belongs to which page, and what they may hold.

use std::cell::Cell;

use orbitkv_shm_protocol::ids::OperationId;
use orbitkv_shm_protocol::record::{self, BadField, Code, PageOutcome, PageRange, Tier};
use orbitkv_shm_protocol::segment::ResultReader;

use crate::completion::PageResult;
use crate::error::ProtocolFault;

/// One bit an entry of the page table: whether the entry is a parent, not a page.
#[derive(Debug)]
pub(crate) struct Anchors(Box<[u64]>);

impl Anchors {
    /// A table of `entries` pages.
    pub(crate) fn new(entries: u32) -> Self {
        Self(vec![0; entries.div_ceil(64) as usize].into_boxed_slice())
    }

    /// Notes what was written to `entry`.
    pub(crate) fn set(&mut self, entry: u32, is_anchor: bool) {
        let bit = 1_u64 << (entry % 64);
        let word = &mut self.0[entry as usize / 64];
        *word = if is_anchor { *word | bit } else { *word & !bit };
    }

    fn get(&self, entry: u32) -> bool {
        self.0[entry as usize / 64] >> (entry % 64) & 1 != 0
    }
}

/// The completion whose page results can still be read; its range is not free yet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Readable {
    pub(crate) operation: OperationId,
    pub(crate) range: PageRange,
    /// Pages of the range: entries without anchors.
    pub(crate) pages: u32,
}

/// Page results of one completion, one a page in the order of the request.
#[derive(Debug)]
pub struct Results<'a> {
    source: Option<Source<'a>>,
    operation: OperationId,
    next: u32,
    end: u32,
    left: u32,
}

/// Where results come from, and where a fault in them is noted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Source<'a> {
    pub(crate) table: &'a ResultReader,
    pub(crate) anchors: &'a Anchors,
    pub(crate) fault: &'a Cell<Option<ProtocolFault>>,
}

impl<'a> Results<'a> {
    /// Nothing to read.
    pub(crate) const NONE: Self = Self {
        source: None,
        operation: OperationId { index: 0, generation: 0 },
        next: 0,
        end: 0,
        left: 0,
    };

    /// The results of `readable`.
    pub(crate) fn new(source: Source<'a>, readable: Readable) -> Self {
        let Readable { operation, range, pages } = readable;
        let end = range.start + range.len;
        Self { source: Some(source), operation, next: range.start, end, left: pages }
    }
}

impl Iterator for Results<'_> {
    type Item = PageResult;

    fn next(&mut self) -> Option<PageResult> {
        let source = self.source?;
        while self.next < self.end {
            let entry = self.next;
            self.next += 1;
            if !source.anchors.get(entry) {
                self.left -= 1;
                return Some(source.read(self.operation, entry));
            }
        }
        None
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left as usize, Some(self.left as usize))
    }
}

impl ExactSizeIterator for Results<'_> {}

impl Source<'_> {
    fn read(&self, operation: OperationId, entry: u32) -> PageResult {
        let written = self.table.read(entry);
        let by = OperationId {
            index: written.operation_index,
            generation: written.operation_generation,
        };
        if by != operation {
            return PageResult::UNTOLD;
        }
        decode(&written).unwrap_or_else(|field| {
            self.fault.set(Some(ProtocolFault::BadResult { operation, field }));
            PageResult::UNTOLD
        })
    }
}

fn decode(written: &record::PageResult) -> Result<PageResult, BadField> {
    let bad = |field, value: u16| BadField { field, value: value.into() };
    Ok(PageResult {
        outcome: PageOutcome::from_raw(written.outcome).ok_or(bad("outcome", written.outcome))?,
        tier: Tier::from_raw(written.tier).ok_or(bad("tier", written.tier))?,
        code: Code::from_raw(written.code).ok_or(bad("code", written.code))?,
        restorable: match written.restorable {
            0 => false,
            1 => true,
            other => return Err(bad("restorable", other)),
        },
    })
}
