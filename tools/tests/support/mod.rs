//! Shared by the tests that compare with published answers: the traces, and a model so simple
//! that reading it is checking it.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;

use orbitkv_tools::trace::{Request, TraceReader};

/// Blocks ordered from the least to the most recently used.
#[derive(Default)]
pub(crate) struct Lru {
    order: BTreeMap<u64, u64>,
    stamp_of: HashMap<u64, u64>,
    clock: u64,
}

impl Lru {
    pub(crate) fn contains(&self, id: u64) -> bool {
        self.stamp_of.contains_key(&id)
    }

    pub(crate) fn len(&self) -> usize {
        self.order.len()
    }

    /// Makes `id` the most recently used.
    pub(crate) fn touch(&mut self, id: u64) {
        self.remove(id);
        self.clock += 1;
        self.order.insert(self.clock, id);
        self.stamp_of.insert(id, self.clock);
    }

    pub(crate) fn remove(&mut self, id: u64) -> bool {
        let Some(stamp) = self.stamp_of.remove(&id) else { return false };
        self.order.remove(&stamp);
        true
    }

    pub(crate) fn pop_oldest(&mut self) -> Option<u64> {
        let (_, id) = self.order.pop_first()?;
        self.stamp_of.remove(&id);
        Some(id)
    }
}

/// What a cache did over a trace, in blocks and in tokens of the hit prefix.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Counts {
    pub(crate) accesses: u64,
    pub(crate) hits_dram: u64,
    pub(crate) hits_ssd: u64,
    pub(crate) hit_tokens: u64,
    pub(crate) demoted: u64,
    pub(crate) dropped: u64,
}

/// Request-atomic prefix LRU in DRAM; its victims go to an exclusive LRU on SSD (of capacity 0 for
/// a single tier), from where a hit moves up again.
pub(crate) struct Model {
    dram: Lru,
    ssd: Lru,
    dram_capacity: usize,
    ssd_capacity: usize,
    pub(crate) counts: Counts,
}

impl Model {
    pub(crate) fn new(dram_capacity: usize, ssd_capacity: usize) -> Self {
        Self {
            dram: Lru::default(),
            ssd: Lru::default(),
            dram_capacity,
            ssd_capacity,
            counts: Counts::default(),
        }
    }

    pub(crate) fn request(&mut self, request: &Request, block_tokens: u32) {
        let ids: Vec<u64> = request.blocks.iter().collect();
        self.counts.accesses += ids.len() as u64;
        let hit =
            ids.iter().take_while(|id| self.dram.contains(**id) || self.ssd.contains(**id)).count();
        for id in &ids[..hit] {
            if self.dram.contains(*id) {
                self.counts.hits_dram += 1;
            } else {
                self.counts.hits_ssd += 1;
            }
        }
        self.counts.hit_tokens += request.tokens_of(hit as u64, block_tokens);
        // Tail first, so that the deepest block is the oldest. What does not fit is not kept.
        let kept = &ids[..ids.len().min(self.dram_capacity)];
        for id in kept.iter().rev() {
            self.ssd.remove(*id);
            self.dram.touch(*id);
        }
        while self.dram.len() > self.dram_capacity {
            let victim = self.dram.pop_oldest().unwrap();
            if self.ssd_capacity > 0 {
                self.counts.demoted += 1;
                self.ssd.touch(victim);
            }
        }
        while self.ssd.len() > self.ssd_capacity {
            self.ssd.pop_oldest();
            self.counts.dropped += 1;
        }
    }
}

/// A published trace, or `None` after saying that the test did not run. `ORBITKV_TRACES` names its
/// folder; where `CI` is true its absence is a failure.
pub(crate) fn published_trace(name: &str) -> Option<TraceReader> {
    let folder = std::env::var_os("ORBITKV_TRACES").map_or_else(
        || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../shared/traces"),
        PathBuf::from,
    );
    let path = folder.join(format!("{name}.kvt.jsonl.zst"));
    if path.is_file() {
        return Some(TraceReader::open_path(&path).unwrap());
    }
    let ci = std::env::var("CI").is_ok_and(|value| value == "true");
    assert!(!ci, "{} is missing and CI=true: set ORBITKV_TRACES", path.display());
    eprintln!("NOT RUN: {} is missing; set ORBITKV_TRACES to the trace folder", path.display());
    None
}
