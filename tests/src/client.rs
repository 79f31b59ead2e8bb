//! The fake engines: their sessions, regions and operations, and what they may expect of an answer.

use std::collections::BTreeMap;

use orbitkv_manager::core::{NamespaceFingerprint, PeerFault, namespace_fingerprint};
use orbitkv_shm_protocol::bootstrap::message::{DependencySpec, NamespaceSpec};
use orbitkv_shm_protocol::ids::{EngineId, OperationId, PageHash, RegionId, SessionId};
use orbitkv_shm_protocol::record::{
    Code, Completion, PageEntry, PageOutcome, PageResult, Request, RequestBody, RequestKind, Status,
};

use crate::content::{Key, POISON, Word, units};

/// A namespace, as far as tests need it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Member {
    /// Its identity.
    pub fingerprint: NamespaceFingerprint,
    /// What a hit needs.
    pub dependency: DependencySpec,
    /// Bytes of one page image.
    pub image_bytes: u32,
}

impl Member {
    /// Of a spec.
    pub fn new(spec: &NamespaceSpec) -> Self {
        Self {
            fingerprint: namespace_fingerprint(spec),
            dependency: spec.dependency,
            image_bytes: spec.page_bytes as u32,
        }
    }

    /// Key of a page of it.
    pub fn key(&self, hash: PageHash) -> Key {
        Key { namespace: self.fingerprint, hash }
    }

    /// Positions that a restore which ends after `len` pages needs.
    pub fn needed(&self, len: usize) -> std::ops::Range<usize> {
        match self.dependency {
            DependencySpec::Chain => 0..len,
            DependencySpec::Window(pages) => len.saturating_sub(pages as usize)..len,
            DependencySpec::State => len.saturating_sub(1)..len,
        }
    }
}

/// Memory of an engine.
#[derive(Clone, Debug)]
pub struct Region {
    /// Whose pages it holds.
    pub member: Member,
    /// Device pages.
    pub pages: Vec<Vec<Word>>,
    /// Device pages that no operation uses.
    pub free: Vec<u32>,
}

impl Region {
    /// Of `pages` device pages.
    pub fn new(member: Member, pages: u32) -> Self {
        let page = vec![POISON; units(member.image_bytes)];
        Self { member, pages: vec![page; pages as usize], free: (0..pages).rev().collect() }
    }
}

/// An event of an engine.
#[derive(Clone, Debug, Default)]
pub struct Signal {
    /// What was recorded before it is done.
    pub passed: bool,
    /// Nobody waits for it any more.
    pub given_up: bool,
    /// Device pages that the engine has yet to write: what it recorded before the event.
    pub writes: Vec<(RegionId, u32, Vec<Word>)>,
}

/// An operation that was asked for.
#[derive(Clone, Debug)]
pub struct Submitted {
    /// The request.
    pub request: Request,
    /// Its range.
    pub entries: Vec<PageEntry>,
    /// Query: longest restorable length when it was asked.
    pub restorable: usize,
}

/// An operation that has ended.
#[derive(Clone, Debug)]
pub struct Ended {
    /// What was asked for.
    pub submitted: Submitted,
    /// How it ended.
    pub completion: Completion,
    /// One a page entry, or none.
    pub results: Vec<PageResult>,
}

impl Ended {
    /// Outcome and code of each page that is no anchor.
    pub fn outcomes(&self) -> Vec<(PageOutcome, Code)> {
        let pages = self.submitted.entries.iter().zip(&self.results);
        pages
            .filter(|(entry, _)| !entry.is_anchor())
            .map(|(_, result)| (outcome(result), code(result)))
            .collect()
    }
}

/// Outcome of a result.
pub fn outcome(result: &PageResult) -> PageOutcome {
    PageOutcome::from_raw(result.outcome).expect("a known outcome")
}

/// Code of a result.
pub fn code(result: &PageResult) -> Code {
    Code::from_raw(result.code).expect("a known code")
}

/// One attached client.
#[derive(Debug)]
pub struct Client {
    /// Its session.
    pub session: SessionId,
    /// Its attachment group.
    pub engine: EngineId,
    /// Operations that it may have outstanding.
    pub credits: u32,
    /// Entries of its page table.
    pub page_entries: u32,
    /// Namespaces of each scope.
    pub scopes: Vec<Vec<Member>>,
    /// Regions, `None` once they have ended.
    pub regions: Vec<Option<Region>>,
    /// Its pool of events.
    pub events: Vec<Signal>,
    /// Operations under way by index.
    pub in_flight: BTreeMap<u32, Submitted>,
    /// Operations that ended and were not looked at.
    pub ended: Vec<Ended>,
    /// Requests that no correct client sends: each gets one error.
    pub wrong: Vec<OperationId>,
    /// Answers to those.
    pub wrong_answers: Vec<Completion>,
    /// Done words that the device stored, by operation index.
    pub done_words: BTreeMap<u32, u32>,
    /// Nothing more comes from it or goes to it.
    pub closed: bool,
    /// What it was closed for.
    pub fault: Option<PeerFault>,
    generations: Vec<u32>,
}

impl Client {
    /// Nothing is asked for yet.
    pub fn new(session: SessionId, engine: EngineId, credits: u32, page_entries: u32) -> Self {
        Self {
            session,
            engine,
            credits,
            page_entries,
            scopes: Vec::new(),
            regions: Vec::new(),
            events: Vec::new(),
            in_flight: BTreeMap::new(),
            ended: Vec::new(),
            wrong: Vec::new(),
            wrong_answers: Vec::new(),
            done_words: BTreeMap::new(),
            closed: false,
            fault: None,
            generations: vec![0; credits as usize],
        }
    }

    /// A free operation index with its next generation.
    pub fn next_operation(&mut self) -> Option<OperationId> {
        let index = (0..self.credits).find(|index| !self.in_flight.contains_key(index))?;
        let generation = &mut self.generations[index as usize];
        *generation = OperationId::next_generation(*generation);
        Some(OperationId { index, generation: *generation })
    }

    /// An event passes: the engine has written what it was to write before.
    pub fn pass(&mut self, event: u32) {
        let event = &mut self.events[event as usize];
        event.passed = true;
        for (region, page, words) in event.writes.drain(..) {
            if let Some(region) = self.regions[region.0 as usize].as_mut() {
                region.pages[page as usize] = words;
            }
        }
    }

    /// The fences of operations under way.
    pub fn fences(&self) -> impl Iterator<Item = u32> {
        self.in_flight.values().filter_map(|submitted| fence_of(&submitted.request))
    }

    /// Page table entries that belong to one operation index.
    pub fn range_span(&self) -> u32 {
        self.page_entries / self.credits
    }
}

/// The fence of a request.
pub fn fence_of(request: &Request) -> Option<u32> {
    match request.body {
        RequestBody::Save { fence, .. } | RequestBody::Restore { fence, .. } => fence,
        _ => None,
    }
}

/// Panics when a completion contradicts itself, its results or its request.
pub fn check_answer(ended: &Ended) {
    let (completion, results) = (&ended.completion, &ended.results);
    let entries = &ended.submitted.entries;
    let context = || format!("{ended:?}");
    assert_eq!(completion.kind, ended.submitted.request.kind(), "{}", context());
    assert_eq!(completion.status == Status::Ok, completion.code == Code::None, "{}", context());
    assert!(results.is_empty() || results.len() == entries.len(), "{}", context());
    for (result, entry) in results.iter().zip(entries) {
        let of =
            OperationId { index: result.operation_index, generation: result.operation_generation };
        assert_eq!(of, completion.operation, "{}", context());
        let none = outcome(result) == PageOutcome::None;
        assert_eq!(none, entry.is_anchor(), "{}", context());
    }
    let count = |wanted| results.iter().filter(|result| outcome(result) == wanted).count() as u32;
    match completion.kind {
        RequestKind::Save if !results.is_empty() => {
            assert_eq!(completion.pages, count(PageOutcome::Stored), "{}", context());
            assert_eq!(completion.pages_present, count(PageOutcome::Present), "{}", context());
            assert_eq!(completion.pages_refused, count(PageOutcome::Refused), "{}", context());
            if completion.status == Status::Ok {
                assert_eq!(completion.pages_refused, 0, "{}", context());
            }
            if completion.status == Status::Error {
                assert_eq!(completion.pages + completion.pages_present, 0, "{}", context());
            }
        }
        RequestKind::Query => {
            if !results.is_empty() {
                assert_eq!(completion.pages, count(PageOutcome::Hit), "{}", context());
                let pages = results.iter().zip(entries).filter(|(_, entry)| !entry.is_anchor());
                let hits = pages.map(|(result, _)| outcome(result) == PageOutcome::Hit);
                assert!(hits.is_sorted_by(|a, b| a >= b), "{}", context());
            }
            let by_tier = completion.pages_dram + completion.pages_ssd;
            assert_eq!(by_tier, completion.pages, "{}", context());
            assert_eq!(completion.lease.is_some(), completion.pages > 0, "{}", context());
            assert_eq!(completion.lease.is_some(), completion.lease_expires_ns > 0);
        }
        RequestKind::Restore if !results.is_empty() => {
            assert_eq!(completion.pages, count(PageOutcome::Restored), "{}", context());
            assert_eq!(completion.pages_refused, count(PageOutcome::Refused), "{}", context());
            let by_tier = completion.pages_dram + completion.pages_ssd;
            assert_eq!(by_tier, completion.pages, "{}", context());
            let failed = results.iter().position(|r| outcome(r) != PageOutcome::Restored);
            assert_eq!(completion.first_failed, failed.map(|at| at as u32), "{}", context());
            if completion.status == Status::Ok {
                assert_eq!(failed, None, "{}", context());
            }
        }
        _ => {}
    }
}
