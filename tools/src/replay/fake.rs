//! A Manager in memory, for tests of the replayed engine.
//!
//! Faults it can play: a small ring, a small cache, a page with a wrong byte, a copy that never
//! happens, a restore that stops, a session that ends. Saves of a chain end at the first refusal.

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use orbitkv_shm_protocol::ids::PageHash;
use orbitkv_shm_protocol::record::{Code, PageOutcome, RequestKind, Tier};

use super::device::DevicePages;
use super::link::{Block, Ended, Link, LinkError, PageEnd, Times};

/// What goes wrong. Pages are counted in the order in which they were first saved.
#[derive(Clone, Copy, Debug)]
pub(super) struct Faults {
    pub(super) ring: usize,
    pub(super) capacity: usize,
    pub(super) corrupt_page: Option<usize>,
    pub(super) skip_copy: Option<usize>,
    pub(super) restore_fails_at: Option<u32>,
    pub(super) gone_after: Option<u32>,
}

impl Default for Faults {
    fn default() -> Self {
        Self {
            ring: 64,
            capacity: usize::MAX,
            corrupt_page: None,
            skip_copy: None,
            restore_fails_at: None,
            gone_after: None,
        }
    }
}

struct Stored {
    bytes: Vec<u8>,
    number: usize,
}

type Done = (Ended<u64, u64>, Vec<PageEnd>);

/// The cache.
pub(super) struct Fake {
    memory: File,
    page_bytes: usize,
    faults: Faults,
    pages: HashMap<PageHash, Stored>,
    /// Leased pages and how many are left.
    leases: HashMap<u64, (Vec<PageHash>, usize)>,
    staged: Vec<Done>,
    done: VecDeque<Done>,
    next: u64,
}

impl Fake {
    pub(super) fn new(device: &DevicePages, page_bytes: usize, faults: Faults) -> Self {
        let memory = File::from(device.as_fd().try_clone_to_owned().unwrap());
        Self {
            memory,
            page_bytes,
            faults,
            pages: HashMap::new(),
            leases: HashMap::new(),
            staged: Vec::new(),
            done: VecDeque::new(),
            next: 0,
        }
    }

    pub(super) fn leases(&self) -> usize {
        self.leases.len()
    }

    fn begin(&mut self) -> Result<u64, LinkError> {
        if self.staged.len() + self.done.len() >= self.faults.ring {
            return Err(LinkError::Full);
        }
        self.next += 1;
        Ok(self.next)
    }

    fn stage(
        &mut self,
        kind: RequestKind,
        operation: u64,
        ends: Vec<PageEnd>,
    ) -> &mut Ended<u64, u64> {
        let bad = ends.iter().find(|end| end.code != Code::None).map(|end| end.code);
        let ended = Ended {
            operation,
            kind,
            code: bad.unwrap_or(Code::None),
            pages: 0,
            pages_ssd: 0,
            lease: None,
            times: Times { queued_ns: 1, prepared_ns: 2, published_ns: 3, observed_ns: 4 },
        };
        self.staged.push((ended, ends));
        &mut self.staged.last_mut().unwrap().0
    }
}

fn end(outcome: PageOutcome, code: Code) -> PageEnd {
    PageEnd { outcome, tier: Tier::None, code }
}

impl Link for Fake {
    type Operation = u64;
    type Lease = u64;

    fn query(&mut self, _: Option<PageHash>, hashes: &[PageHash]) -> Result<u64, LinkError> {
        let operation = self.begin()?;
        let hit: Vec<PageHash> =
            hashes.iter().copied().take_while(|hash| self.pages.contains_key(hash)).collect();
        let ends = (0..hashes.len())
            .map(|index| {
                let tier = if index % 3 == 2 { Tier::Ssd } else { Tier::Dram };
                if index < hit.len() {
                    PageEnd { outcome: PageOutcome::Hit, tier, code: Code::None }
                } else {
                    end(PageOutcome::Miss, Code::None)
                }
            })
            .collect();
        let pages = hit.len();
        if pages > 0 {
            self.leases.insert(operation, (hit, pages));
        }
        let ended = self.stage(RequestKind::Query, operation, ends);
        ended.pages = pages as u32;
        ended.pages_ssd = pages as u32 / 3;
        ended.lease = (pages > 0).then_some(operation);
        Ok(operation)
    }

    fn restore(&mut self, lease: u64, offset: u32, blocks: &[Block]) -> Result<u64, LinkError> {
        let operation = self.begin()?;
        let mut ends = Vec::new();
        for (index, block) in blocks.iter().enumerate() {
            let position = offset + index as u32;
            if self.faults.restore_fails_at.is_some_and(|at| position >= at) {
                ends.push(end(PageOutcome::Refused, Code::IoError));
                continue;
            }
            assert_eq!(self.leases[&lease].0[position as usize], block.hash);
            let stored = &self.pages[&block.hash];
            if self.faults.skip_copy != Some(stored.number) {
                let mut bytes = stored.bytes.clone();
                if self.faults.corrupt_page == Some(stored.number) {
                    bytes[self.page_bytes / 2] ^= 1;
                }
                let at = u64::from(block.page) * self.page_bytes as u64;
                self.memory.write_all_at(&bytes, at).unwrap();
            }
            ends.push(end(PageOutcome::Restored, Code::None));
        }
        let left = &mut self.leases.get_mut(&lease).unwrap().1;
        *left -= blocks.len();
        if *left == 0 {
            self.leases.remove(&lease);
        }
        self.stage(RequestKind::Restore, operation, ends);
        Ok(operation)
    }

    fn save(&mut self, parent: Option<PageHash>, blocks: &[Block]) -> Result<u64, LinkError> {
        let operation = self.begin()?;
        let mut before = parent;
        let ends = blocks
            .iter()
            .map(|block| {
                let orphan = before.is_some_and(|hash| !self.pages.contains_key(&hash));
                before = Some(block.hash);
                if orphan {
                    return end(PageOutcome::Refused, Code::ParentAbsent);
                }
                if self.pages.contains_key(&block.hash) {
                    return end(PageOutcome::Present, Code::None);
                }
                if self.pages.len() >= self.faults.capacity {
                    return end(PageOutcome::Refused, Code::NoMemory);
                }
                let mut bytes = vec![0; self.page_bytes];
                let at = u64::from(block.page) * self.page_bytes as u64;
                self.memory.read_exact_at(&mut bytes, at).unwrap();
                let number = self.pages.len();
                self.pages.insert(block.hash, Stored { bytes, number });
                end(PageOutcome::Stored, Code::None)
            })
            .collect();
        self.stage(RequestKind::Save, operation, ends);
        Ok(operation)
    }

    fn release(&mut self, lease: u64) -> Result<u64, LinkError> {
        let operation = self.begin()?;
        self.leases.remove(&lease);
        self.stage(RequestKind::Release, operation, Vec::new());
        Ok(operation)
    }

    fn submit(&mut self) {
        self.done.extend(self.staged.drain(..));
    }

    fn wait(
        &mut self,
        _: Duration,
        ends: &mut Vec<PageEnd>,
    ) -> Result<Option<Ended<u64, u64>>, LinkError> {
        if let Some(left) = &mut self.faults.gone_after {
            *left = left.checked_sub(1).ok_or(LinkError::Gone)?;
        }
        // The last one first: completions come in any order.
        Ok(self.done.pop_back().map(|(ended, pages)| {
            *ends = pages;
            ended
        }))
    }
}
