//! Sessions: credits, scopes, regions and what each session still owns.

use std::collections::{BTreeMap, VecDeque};

use orbitkv_shm_protocol::ids::{EngineId, OperationId, RegionId, ScopeId, SessionId};
use orbitkv_shm_protocol::record::PageRange;

use super::job::JobRef;
use super::namespace::NamespaceId;
use super::registration::RegionKind;

/// Namespaces that one name stands for, in the order of the set.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Scope {
    One(NamespaceId),
    Set(Vec<NamespaceId>),
}

impl Scope {
    pub(super) fn members(&self) -> &[NamespaceId] {
        match self {
            Self::One(one) => std::slice::from_ref(one),
            Self::Set(set) => set,
        }
    }
}

/// A registered region, as far as decisions need it.
#[derive(Debug)]
pub(super) struct Region {
    pub(super) namespace: NamespaceId,
    pub(super) device_pages: u32,
    pub(super) kind: RegionKind,
    /// Saves and restores that name it.
    pub(super) users: u32,
    /// The `Unregister` that waits for them.
    pub(super) ending: Option<JobRef>,
}

/// One operation index of a session.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Credit {
    /// Generation that last used the index; 0 = never.
    pub(super) last_generation: u32,
    pub(super) job: Option<JobRef>,
}

/// One attached client.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) engine: EngineId,
    pub(super) uid: u32,
    pub(super) page_entries: u32,
    pub(super) credits: Vec<Credit>,
    pub(super) outstanding: u32,
    pub(super) scopes: Vec<Scope>,
    pub(super) regions: Vec<Option<Region>>,
    /// The pool of events, by index: whether an operation under way has it as its fence.
    pub(super) events: Vec<bool>,
    pub(super) leased_bytes: u64,
    /// Demand queries that wait for budget, first come first.
    pub(super) waiting: VecDeque<JobRef>,
    /// `Drain`s that wait until nothing else is outstanding.
    pub(super) drains: Vec<JobRef>,
    /// Page table ranges of outstanding operations.
    pub(super) ranges: Vec<PageRange>,
    pub(super) bad_requests: u32,
    /// Copies in flight that touch its memory.
    pub(super) copies: u32,
    /// Those of them that may take long, by direction.
    pub(super) long_copies: [u32; 2],
    /// Operations that wait for one of those to end, by direction.
    pub(super) held: [VecDeque<JobRef>; 2],
    /// Nothing more is taken from it.
    pub(super) closing: bool,
}

impl Session {
    pub(super) fn new(engine: EngineId, uid: u32, credits: u32, page_entries: u32) -> Self {
        Self {
            engine,
            uid,
            page_entries,
            credits: vec![Credit::default(); credits as usize],
            outstanding: 0,
            scopes: Vec::new(),
            regions: Vec::new(),
            events: Vec::new(),
            leased_bytes: 0,
            waiting: VecDeque::new(),
            drains: Vec::new(),
            ranges: Vec::new(),
            bad_requests: 0,
            copies: 0,
            long_copies: [0; 2],
            held: Default::default(),
            closing: false,
        }
    }

    pub(super) fn region(&self, id: RegionId) -> Option<&Region> {
        self.regions.get(id.0 as usize)?.as_ref().filter(|region| region.ending.is_none())
    }

    pub(super) fn region_mut(&mut self, id: RegionId) -> Option<&mut Region> {
        self.regions.get_mut(id.0 as usize)?.as_mut()
    }

    /// Whether another operation may have this event as its fence.
    pub(super) fn event_is_free(&self, index: u32) -> bool {
        self.events.get(index as usize) == Some(&false)
    }

    pub(super) fn scope(&self, id: ScopeId) -> Option<&Scope> {
        self.scopes.get(id.0 as usize)
    }

    /// Whether `range` lies in the table and touches no range in use.
    pub(super) fn range_is_free(&self, range: PageRange) -> bool {
        let end = |r: &PageRange| u64::from(r.start) + u64::from(r.len);
        let apart = |other: &PageRange| {
            end(other) <= range.start.into() || end(&range) <= other.start.into()
        };
        self.ranges.iter().all(apart)
    }

    pub(super) fn take_range(&mut self, range: PageRange) {
        if range.len > 0 {
            self.ranges.push(range);
        }
    }

    pub(super) fn give_range(&mut self, range: PageRange) {
        if range.len > 0
            && let Some(at) = self.ranges.iter().position(|other| *other == range)
        {
            self.ranges.swap_remove(at);
        }
    }

    pub(super) fn credit(&self, operation: OperationId) -> Option<&Credit> {
        self.credits.get(operation.index as usize)
    }
}

/// All sessions of this epoch, by number.
#[derive(Debug, Default)]
pub(super) struct Sessions {
    /// In the order of their numbers, which are never used again.
    table: BTreeMap<u32, Session>,
    /// Sessions with waiting queries, in the order in which they are served next.
    pub(super) turn: VecDeque<SessionId>,
    /// The first in turn waits for bytes of the total: nobody overtakes it.
    pub(super) total_is_short: bool,
}

impl Sessions {
    pub(super) fn open(&mut self, id: SessionId, session: Session) {
        let before = self.table.insert(id.0, session);
        debug_assert!(before.is_none());
    }

    pub(super) fn close(&mut self, id: SessionId) {
        self.table.remove(&id.0);
    }

    pub(super) fn get(&self, id: SessionId) -> Option<&Session> {
        self.table.get(&id.0)
    }

    pub(super) fn get_mut(&mut self, id: SessionId) -> Option<&mut Session> {
        self.table.get_mut(&id.0)
    }

    pub(super) fn len(&self) -> usize {
        self.table.len()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (SessionId, &Session)> {
        self.table.iter().map(|(id, session)| (SessionId(*id), session))
    }

    /// Whether a session of `engine` other than closing ones is attached.
    pub(super) fn group_lives(&self, engine: EngineId) -> bool {
        self.iter().any(|(_, session)| session.engine == engine && !session.closing)
    }
}
