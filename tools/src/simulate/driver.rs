//! Plays requests against [`Core`]: looks the prompt up, ends the lease, saves what was missing.

use orbitkv_engine::{DependencySpec, NamespaceSpec};
use orbitkv_manager::core::{
    Core, CoreConfig, DeviceLayout, Direction, Effect, Effects, Event, Nanos, RegionGeometry,
    RegionKind, SpillPolicy, slot_bytes,
};
use orbitkv_shm_protocol::ids::{
    EngineId, LeaseId, OperationId, PageHash, RegionId, ScopeId, SessionId,
};
use orbitkv_shm_protocol::layout::{PAGES_PER_REQUEST_MAX, RING_CAPACITY_MIN};
use orbitkv_shm_protocol::record::{
    Completion, PageEntry, PageOutcome, PageRange, PageResult, QueryMode, Request as Operation,
    RequestBody,
};

use super::second_tier::SecondTier;
use super::{Policy, Row, Spill};
use crate::content::PageSpace;
use crate::trace::{Request, TraceInfo};

/// Bytes of a simulated page: the smallest, so that a pool is exactly its number of pages.
const PAGE_BYTES: u32 = 4096;
/// Bytes of a region of the SSD tier.
const REGION_BYTES: u64 = 64 << 20;
/// Most pages of one operation: a request's entries less one for the anchor.
const PART_PAGES_MAX: usize = PAGES_PER_REQUEST_MAX as usize - 1;
const SESSION: SessionId = SessionId(1);
/// One microsecond a request: no lease and no operation ever runs out of time.
const TIME_STEP_NS: Nanos = 1000;

/// One configuration under simulation.
pub struct Simulation {
    core: Core,
    scope: ScopeId,
    region: RegionId,
    space: PageSpace,
    now: Nanos,
    generation: u32,
    effects: Effects,
    spare: Effects,
    entries: Vec<PageEntry>,
    hashes: Vec<PageHash>,
    checksums: Vec<u64>,
    ended: Option<Completion>,
    results: Vec<PageResult>,
    victims: Vec<PageHash>,
    second: Option<SecondTier>,
    block_tokens: u32,
    row: Row,
}

impl Simulation {
    /// A cold cache of `dram_pages`, with an SSD tier of `ssd_pages` unless that is 0.
    pub fn new(
        info: &TraceInfo,
        dram_pages: u64,
        ssd_pages: u64,
        policy: Policy,
        spill: Spill,
    ) -> Self {
        let exclusive = policy == Policy::Lru;
        let mut config = CoreConfig {
            // Simulated engines lease one prompt at a time; budgets are no part of the question.
            query_budget_bytes: u64::MAX / 4,
            session_budget_bytes: u64::MAX / 4,
            copy_quantum_bytes: u64::MAX,
            gpu_copy_quantum_bytes: u64::MAX,
            report_drops: exclusive,
            spill_policy: match spill {
                Spill::All => SpillPolicy::All,
                Spill::Reuse => SpillPolicy::Reuse,
            },
            ..CoreConfig::with_dram(dram_pages * u64::from(PAGE_BYTES))
        };
        if ssd_pages > 0 && !exclusive {
            config.devices.push(device(ssd_pages));
        }
        let mut core = Core::new(config);
        let mut effects = Effects::default();
        let opened = Event::SessionOpened {
            session: SESSION,
            engine: EngineId([1; 16]),
            uid: 0,
            credits: RING_CAPACITY_MIN,
            page_entries: PAGES_PER_REQUEST_MAX,
        };
        core.handle(0, opened, &mut effects);
        // The Manager's own constants are in range for itself; a refusal is a bug of this file.
        let (scope, _) = core
            .define_namespace(SESSION, &namespace(info))
            .unwrap_or_else(|refusal| panic!("simulated namespace refused: {refusal}"));
        let region = core
            .register_region(SESSION, scope, PAGES_PER_REQUEST_MAX, RegionKind::Host)
            .unwrap_or_else(|refusal| panic!("simulated region refused: {refusal}"));
        Self {
            core,
            scope,
            region,
            space: PageSpace::new(&info.name, PAGE_BYTES.into(), 0),
            now: 0,
            generation: 0,
            effects,
            spare: Effects::default(),
            entries: Vec::new(),
            hashes: Vec::new(),
            checksums: Vec::new(),
            ended: None,
            results: Vec::new(),
            victims: Vec::new(),
            second: (exclusive && ssd_pages > 0).then(|| SecondTier::new(ssd_pages)),
            block_tokens: info.block_tokens,
            row: Row {
                dram_pages,
                ssd_pages,
                replacement: policy,
                spill,
                written_pages: 0,
                requests: 0,
                accesses: 0,
                hit_pages_dram: 0,
                hit_pages_ssd: 0,
                hit_tokens: 0,
                demoted_pages: None,
                promoted_pages: None,
                dropped_pages: None,
            },
        }
    }

    /// What it hit so far.
    pub fn row(&self) -> Row {
        let mut row = Row { written_pages: self.core.stats().ssd_pages_written, ..self.row };
        if let Some(second) = &self.second {
            row.written_pages = second.demoted;
            row.demoted_pages = Some(second.demoted);
            row.promoted_pages = Some(second.promoted);
            row.dropped_pages = Some(second.dropped);
        }
        row
    }

    /// Plays one request: the hit is looked up as a whole before anything becomes resident.
    pub fn request(&mut self, request: &Request) {
        self.now += TIME_STEP_NS;
        let mut hashes = std::mem::take(&mut self.hashes);
        hashes.clear();
        hashes.extend(self.space.hashes(request.blocks.iter()));
        let (dram, ssd) = self.look_up(&hashes);
        let in_core = (dram + ssd) as usize;
        let second = self.second.as_ref().map_or(0, |second| {
            hashes[in_core..].iter().take_while(|hash| second.contains(hash)).count() as u64
        });
        self.row.requests += 1;
        self.row.accesses += hashes.len() as u64;
        self.row.hit_pages_dram += dram;
        self.row.hit_pages_ssd += ssd + second;
        self.row.hit_tokens += request.tokens_of(dram + ssd + second, self.block_tokens);
        self.save(&hashes, in_core);
        self.hashes = hashes;
    }

    /// Leading pages that are in DRAM and on SSD, those of an exclusive second tier left out.
    fn look_up(&mut self, hashes: &[PageHash]) -> (u64, u64) {
        let (mut dram, mut ssd) = (0, 0);
        let mut leases: Vec<LeaseId> = Vec::new();
        let mut next = 0;
        while next < hashes.len() {
            let part = &hashes[next..hashes.len().min(next + PART_PAGES_MAX)];
            let body = RequestBody::Query { scope: self.scope, mode: QueryMode::Demand };
            let ended = self.operate(body, next.checked_sub(1).map(|i| hashes[i]), part);
            leases.extend(ended.lease);
            dram += u64::from(ended.pages_dram);
            ssd += u64::from(ended.pages_ssd);
            next += ended.pages as usize;
            if (ended.pages as usize) < part.len() {
                break;
            }
        }
        // Tail first, so that the head of the prompt is the hottest.
        for lease in leases.into_iter().rev() {
            self.operate(RequestBody::Release { lease }, None, &[]);
        }
        (dram, ssd)
    }

    /// Saves the pages from `first` on.
    fn save(&mut self, hashes: &[PageHash], first: usize) {
        let mut next = first;
        self.victims.clear();
        while next < hashes.len() {
            let part = &hashes[next..hashes.len().min(next + PART_PAGES_MAX)];
            let parent = next.checked_sub(1).map(|i| hashes[i]);
            self.operate(RequestBody::Save { region: self.region, fence: None }, parent, part);
            if let Some(second) = &mut self.second {
                let pages = &self.results[self.results.len() - part.len()..];
                for (hash, result) in part.iter().zip(pages) {
                    if result.outcome == PageOutcome::Stored as u16 {
                        second.promote(hash);
                    }
                }
            }
            next += part.len();
        }
        if let Some(second) = &mut self.second {
            second.demote(&self.victims);
        }
    }

    /// Runs one operation to its end.
    fn operate(
        &mut self,
        body: RequestBody,
        parent: Option<PageHash>,
        pages: &[PageHash],
    ) -> Completion {
        self.entries.clear();
        self.entries.extend(parent.map(PageEntry::anchor));
        let entry = |(page, hash): (usize, &PageHash)| PageEntry::page(*hash, page as u32);
        self.entries.extend(pages.iter().enumerate().map(entry));
        self.generation = OperationId::next_generation(self.generation);
        let operation = OperationId { index: 0, generation: self.generation };
        let range = PageRange { start: 0, len: self.entries.len() as u32 };
        let request = Operation { operation, deadline_ms: 0, range, body };
        self.ended = None;
        let entries = std::mem::take(&mut self.entries);
        let event = Event::Requested { session: SESSION, request, pages: &entries };
        self.core.handle(self.now, event, &mut self.effects);
        self.entries = entries;
        self.settle();
        while self.ended.is_none() {
            // It waits for memory that nobody will free: its deadline ends it with what it has.
            self.now = self.core.next_deadline().unwrap_or(Nanos::MAX).max(self.now + 1);
            self.core.handle(self.now, Event::Tick, &mut self.effects);
            self.settle();
            assert!(self.now != Nanos::MAX, "an operation without deadline hangs");
        }
        self.ended.take().unwrap_or_else(|| unreachable!("the loop ends with a completion"))
    }

    /// Ends everything that was ordered, and what follows from that, until nothing is left.
    fn settle(&mut self) {
        loop {
            self.core.pump(self.now, &mut self.effects);
            if self.effects.list.is_empty() {
                return;
            }
            std::mem::swap(&mut self.effects, &mut self.spare);
            let done = std::mem::take(&mut self.spare);
            for effect in &done.list {
                self.end(effect, &done);
            }
            self.spare = done;
            self.spare.clear();
        }
    }

    fn end(&mut self, effect: &Effect, tables: &Effects) {
        let event = match effect {
            Effect::Complete { completion, results, .. } => {
                self.ended = Some(*completion);
                self.results.clear();
                self.results.extend_from_slice(&tables.results[results.clone()]);
                return;
            }
            Effect::Dropped { hash } => {
                self.victims.push(*hash);
                return;
            }
            Effect::Copy { ticket, direction, pages, .. } => {
                let wanted = if *direction == Direction::Save { pages.len() } else { 0 };
                self.checksums.resize(wanted, 0);
                let (ticket, pages_done) = (*ticket, pages.len() as u32);
                let checksums = &self.checksums;
                Event::Copied { ticket, pages_done, fault: None, ended_ns: self.now, checksums }
            }
            Effect::Read { ticket, .. } => Event::ReadEnded { ticket: *ticket, fault: None },
            Effect::Write { ticket, .. } => {
                Event::WriteEnded { ticket: *ticket, fault: None, checksum: None }
            }
            Effect::RecordForget { ticket, .. } => {
                Event::ForgetRecorded { ticket: *ticket, fault: None }
            }
            _ => return,
        };
        self.core.handle(self.now, event, &mut self.effects);
    }
}

/// One file of exactly `pages` slots.
fn device(pages: u64) -> DeviceLayout {
    let capacity_bytes = pages * u64::from(slot_bytes(PAGE_BYTES));
    let geometry = RegionGeometry { data_offset: 0, capacity_bytes, region_bytes: REGION_BYTES };
    let region_slot_bytes = vec![0; geometry.regions() as usize];
    DeviceLayout { geometry, region_slot_bytes, retired: Vec::new() }
}

fn namespace(info: &TraceInfo) -> NamespaceSpec {
    NamespaceSpec {
        model: "orbitkv-simulate".to_owned(),
        dtype: "none".to_owned(),
        page_tokens: info.block_tokens,
        page_bytes: PAGE_BYTES.into(),
        layout: "none".to_owned(),
        group: 0,
        tp_rank: 0,
        tp_size: 1,
        pp_rank: 0,
        pp_size: 1,
        adapter: String::new(),
        salt: String::new(),
        dependency: DependencySpec::Chain,
    }
}
