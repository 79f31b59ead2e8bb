//! `core` between fake engines, a fake device and a fake disk. Every effect is carried out, and
//! everything that crosses a boundary is checked on the way: an operation ends once, a completion
//! agrees with its results, a copy touches only pages that its operation named, bytes that reach an
//! engine or a slot are one image of their key, nothing touches what has ended.

mod effects;
mod prompts;
mod work;

use std::collections::{BTreeMap, HashMap, HashSet};

use orbitkv_manager::core::{
    CopyFault, CopyPage, Core, CoreConfig, Direction, Effects, Event, Extent, FenceWait,
    ImageIdentity, IoFault, NamespaceFingerprint, Nanos, Recovered, RegionGeometry, RegionKind,
    Slot, Ticket,
};
use orbitkv_shm_protocol::bootstrap::message::NamespaceSpec;
use orbitkv_shm_protocol::ids::{
    EngineId, LeaseId, OperationId, PageHash, RegionId, ScopeId, SessionId,
};
use orbitkv_shm_protocol::record::{PageEntry, PageRange, QueryMode, Request, RequestBody};

use crate::client::{Client, Ended, Member, Region, Signal, Submitted};
use crate::content::{Key, POISON, checksum, fold, image, is_image};
use crate::disk::{Disk, Found};
use crate::memory::Memory;
use work::summed;

pub use prompts::{
    chain, child, device, extend, is_copy, is_read, is_write, pages, pages_after, spec,
};

/// Work that `core` ordered and that has not ended.
#[derive(Clone, Debug)]
#[allow(missing_docs, reason = "fields carry the names of the effect's own")]
pub enum Work {
    Copy {
        ticket: Ticket,
        direction: Direction,
        session: SessionId,
        region: RegionId,
        pages: Vec<CopyPage>,
        fence: Option<FenceWait>,
        done: Option<OperationId>,
        by_layer: bool,
    },
    Read {
        ticket: Ticket,
        slot: Slot,
        extent: Extent,
        image_bytes: u32,
        checksum: u64,
    },
    Write {
        ticket: Ticket,
        extent: Extent,
        slot: Slot,
        image: ImageIdentity,
    },
    Forget {
        ticket: Ticket,
        namespace: NamespaceFingerprint,
        generation: u64,
    },
}

/// How a piece of work ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fate {
    /// In full.
    Good,
    /// A copy stops after some pages.
    Copy(CopyFault, u32),
    /// An SSD operation fails.
    Io(IoFault),
}

/// A lease that a query was given.
#[derive(Clone, Debug)]
pub struct Held {
    /// Its attachment group.
    pub engine: EngineId,
    /// Namespaces in the order of the scope.
    pub members: Vec<Member>,
    /// Hash of each position.
    pub hashes: Vec<PageHash>,
    /// Positions that it covers.
    pub len: usize,
    /// When it expires.
    pub expires: Nanos,
}

/// `core` and everything around it.
#[derive(Debug)]
pub struct World {
    /// Under test.
    pub core: Core,
    /// The clock.
    pub now: Nanos,
    /// Attached clients, closed ones until they have ended.
    pub clients: BTreeMap<u32, Client>,
    /// Ordered work in the order of its effects.
    pub work: Vec<Work>,
    /// The SSD tier.
    pub disk: Disk,
    /// Leases that queries were given and that may be gone by now.
    pub held: HashMap<LeaseId, Held>,
    /// Hashes of dropped pages in order, when the configuration asks for them.
    pub dropped: Vec<PageHash>,
    /// Let each event be followed by a pump; else the test calls [`pump`](Self::pump).
    pub pumps: bool,
    /// Laws are checked after every so many events; 0 = never.
    pub check_every: u32,
    /// The device sums what it saves; else whoever writes the footer does.
    pub sums: bool,
    /// Version of the images that engines compute now.
    pub version: u8,
    /// User of the clients that attach now.
    pub uid: u32,
    memory: Memory,
    config: CoreConfig,
    out: Effects,
    events: u32,
    next_session: u32,
    /// When this Manager began, and the bytes of the slots that it has written since.
    began: Nanos,
    ordered_bytes: u64,
    /// The operation that is being taken from its ring.
    asked: Option<(SessionId, OperationId)>,
    /// Pages that may be found, by namespace: saved since it was last forgotten.
    known: HashMap<NamespaceFingerprint, HashSet<PageHash>>,
    /// What was known when a forget was asked for that is not recorded yet.
    unrecorded: HashMap<(NamespaceFingerprint, u64), HashSet<PageHash>>,
    /// What the census of the disk will say when it is complete.
    census: Option<Recovered>,
}

impl World {
    /// An empty Manager with blank SSD devices.
    pub fn new(mut config: CoreConfig, devices: &[RegionGeometry]) -> Self {
        config.devices = Disk::layouts(devices);
        Self::over(config, Disk::new(devices))
    }

    fn over(config: CoreConfig, disk: Disk) -> Self {
        Self {
            core: Core::new(config.clone()),
            now: 1_000_000,
            clients: BTreeMap::new(),
            work: Vec::new(),
            disk,
            held: HashMap::new(),
            dropped: Vec::new(),
            pumps: true,
            check_every: 1,
            sums: true,
            version: 0,
            uid: 1000,
            memory: Memory::new(&config.arena_bytes),
            config,
            out: Effects::default(),
            events: 0,
            next_session: 0,
            began: 1_000_000,
            ordered_bytes: 0,
            asked: None,
            known: HashMap::new(),
            unrecorded: HashMap::new(),
            census: None,
        }
    }

    /// The Manager dies and another starts over the same disk and finds again what is there.
    /// `arrives` decides, for each unit of each write in flight and for each retired slot, whether
    /// it reached the disk.
    pub fn crash(self, arrives: impl FnMut() -> bool) -> Self {
        let mut world = self.crash_in_census(arrives);
        world.end_census();
        while world.core.is_recovering() {
            world.pump();
            world.core.check_laws();
        }
        world.check_bytes();
        world.check_recovered();
        world
    }

    /// [`crash`](Self::crash), and engines are served before the census of the disk is complete.
    pub fn crash_in_census(mut self, mut arrives: impl FnMut() -> bool) -> Self {
        for work in std::mem::take(&mut self.work) {
            match work {
                Work::Write { extent, slot, image, .. } => {
                    let words = self.memory.words(&extent);
                    let image = summed(&image, words);
                    self.disk.write_some(&slot, &image, words, |_| arrives());
                }
                Work::Forget { namespace, generation, .. } if arrives() => {
                    self.disk.record_forget(namespace, generation);
                    self.unrecorded.remove(&(namespace, generation));
                }
                _ => {}
            }
        }
        let Found { layouts, census } = self.disk.recover(&mut arrives);
        let config = CoreConfig { devices: layouts, ..self.config };
        let mut world = Self::over(config, self.disk);
        world.check_every = self.check_every;
        world.now = self.now;
        world.began = self.now;
        world.known = self.known;
        for ((namespace, _), hashes) in self.unrecorded {
            world.known.entry(namespace).or_default().extend(hashes);
        }
        world.census = Some(census);
        world.core.begin_recovery();
        world.core.check_laws();
        world
    }

    /// The census is complete; what it found is taken over in the turns that follow.
    pub fn end_census(&mut self) {
        let Some(census) = self.census.take() else { return };
        self.core.census_taken(census, &mut self.out);
        self.carry_out();
        self.core.check_laws();
    }

    /// Whether the census of the disk is not complete yet.
    pub fn is_in_census(&self) -> bool {
        self.census.is_some()
    }

    /// Every page that start-up kept has the parent that its footer names.
    fn check_recovered(&self) {
        for page in self.core.page_views() {
            let slot = page.slot.expect("start-up finds pages on SSD only");
            let footer = self.disk.footer(&slot).expect("a recovered slot has a footer");
            assert_eq!(page.parent, footer.parent, "parent of {page:?}");
            assert_eq!((page.namespace, page.hash), (footer.namespace, footer.hash));
        }
    }

    // Engines.

    /// A client of engine `engine` attaches.
    pub fn attach(&mut self, engine: u8) -> SessionId {
        self.attach_with(engine, 64, 65_536)
    }

    /// A client attaches with rings and a page table of its own size.
    pub fn attach_with(&mut self, engine: u8, credits: u32, page_entries: u32) -> SessionId {
        let session = SessionId(self.next_session);
        self.next_session += 1;
        let engine = EngineId([engine; 16]);
        self.clients.insert(session.0, Client::new(session, engine, credits, page_entries));
        let uid = self.uid;
        self.handle(Event::SessionOpened { session, engine, uid, credits, page_entries });
        session
    }

    /// The client of a session.
    pub fn client(&self, session: SessionId) -> &Client {
        self.clients.get(&session.0).expect("a client that is attached")
    }

    fn client_mut(&mut self, session: SessionId) -> &mut Client {
        self.clients.get_mut(&session.0).expect("a client that is attached")
    }

    /// A session defines a namespace.
    pub fn namespace(&mut self, session: SessionId, spec: &NamespaceSpec) -> ScopeId {
        let (scope, bytes) = self.core.define_namespace(session, spec).expect("a good namespace");
        assert_eq!(bytes, spec.page_bytes);
        self.named(session, scope, vec![Member::new(spec)]);
        scope
    }

    /// A session names a set of namespaces.
    pub fn set(&mut self, session: SessionId, scopes: &[ScopeId]) -> ScopeId {
        let (scope, _) = self.core.define_set(session, scopes).expect("a good set");
        let of = &self.client(session).scopes;
        let members = scopes.iter().flat_map(|scope| of[scope.0 as usize].clone()).collect();
        self.named(session, scope, members);
        scope
    }

    fn named(&mut self, session: SessionId, scope: ScopeId, members: Vec<Member>) {
        let client = self.client_mut(session);
        assert_eq!(scope.0 as usize, client.scopes.len());
        client.scopes.push(members);
    }

    /// A session registers a region.
    pub fn region(&mut self, session: SessionId, scope: ScopeId, pages: u32) -> RegionId {
        self.region_of(session, scope, pages, RegionKind::Host)
    }

    /// A session registers a region whose saves need a fence.
    pub fn fenced_region(&mut self, session: SessionId, scope: ScopeId, pages: u32) -> RegionId {
        self.region_of(session, scope, pages, RegionKind::Gpu)
    }

    fn region_of(
        &mut self,
        session: SessionId,
        scope: ScopeId,
        pages: u32,
        kind: RegionKind,
    ) -> RegionId {
        let region = self.core.register_region(session, scope, pages, kind);
        let region = region.expect("a good region");
        let client = self.client_mut(session);
        let member = client.scopes[scope.0 as usize][0];
        assert_eq!(region.0 as usize, client.regions.len());
        client.regions.push(Some(Region::new(member, pages)));
        region
    }

    /// A session registers events. Returns the index of the first.
    pub fn events(&mut self, session: SessionId, count: usize) -> u32 {
        let first = self.core.register_events(session, count).expect("room for events");
        let client = self.client_mut(session);
        assert_eq!(first as usize, client.events.len());
        client.events.resize_with(first as usize + count, Signal::default);
        first
    }

    /// An event passes.
    pub fn pass(&mut self, session: SessionId, event: u32) {
        self.client_mut(session).pass(event);
    }

    /// The client is killed. What its device pages held is somebody else's now.
    pub fn close(&mut self, session: SessionId) {
        let client = self.client_mut(session);
        client.closed = true;
        for region in client.regions.iter_mut().flatten() {
            region.pages.iter_mut().flatten().for_each(|word| *word = POISON);
        }
        self.group_may_end(session);
        self.handle(Event::SessionClosed { session });
    }

    /// Leases end with the last session of their group.
    fn group_may_end(&mut self, session: SessionId) {
        let engine = self.client(session).engine;
        if self.clients.values().all(|client| client.engine != engine || client.closed) {
            self.held.retain(|_, held| held.engine != engine);
        }
    }

    // Operations.

    /// Puts a request into the session's ring. Panics without a free operation index.
    pub fn request(
        &mut self,
        session: SessionId,
        body: RequestBody,
        entries: &[PageEntry],
        deadline_ms: u32,
    ) -> OperationId {
        let client = self.client_mut(session);
        let operation = client.next_operation().expect("a free operation index");
        let span = client.range_span();
        assert!(entries.len() <= span as usize, "more entries than the test's share of the table");
        let range = if entries.is_empty() {
            PageRange::default()
        } else {
            PageRange { start: operation.index * span, len: entries.len() as u32 }
        };
        let request = Request { operation, deadline_ms, range, body };
        let restorable = self.restorable(session, &body, entries);
        self.learn(session, &body, entries);
        let submitted = Submitted { request, entries: entries.to_vec(), restorable };
        self.client_mut(session).in_flight.insert(operation.index, submitted);
        self.asked = Some((session, operation));
        self.handle(Event::Requested { session, request, pages: entries });
        self.asked = None;
        operation
    }

    /// Puts a request into the ring that no correct client would send, to be answered by one error.
    pub fn request_wrong(&mut self, session: SessionId, request: Request, entries: &[PageEntry]) {
        self.client_mut(session).wrong.push(request.operation);
        self.handle(Event::Requested { session, request, pages: entries });
    }

    /// A record that does not decode.
    pub fn malformed(&mut self, session: SessionId) {
        let operation = OperationId { index: 7, generation: 9 };
        self.client_mut(session).wrong.push(operation);
        self.handle(Event::Malformed { session, operation });
    }

    /// Saves pages whose images the engine has computed just now.
    pub fn save(
        &mut self,
        session: SessionId,
        region: RegionId,
        entries: &[PageEntry],
    ) -> OperationId {
        self.save_by(session, region, entries, 0)
    }

    /// [`save`](Self::save) with a deadline.
    pub fn save_by(
        &mut self,
        session: SessionId,
        region: RegionId,
        entries: &[PageEntry],
        deadline_ms: u32,
    ) -> OperationId {
        self.save_after(session, region, entries, deadline_ms, None)
    }

    /// [`save_by`](Self::save_by); what the engine has yet to compute is there when the event `fence`
    /// passes.
    pub fn save_after(
        &mut self,
        session: SessionId,
        region: RegionId,
        entries: &[PageEntry],
        deadline_ms: u32,
        fence: Option<u32>,
    ) -> OperationId {
        let version = self.version;
        let entries = self.with_device_pages(session, region, entries);
        let client = self.client_mut(session);
        let found = client.regions[region.0 as usize].as_mut().expect("a region");
        let mut writes = Vec::new();
        for entry in entries.iter().filter(|entry| !entry.is_anchor()) {
            let key = found.member.key(PageHash(entry.hash));
            let words = image(&key, version, found.member.image_bytes);
            match fence {
                Some(_) => writes.push((region, entry.device_page, words)),
                None => found.pages[entry.device_page as usize] = words,
            }
        }
        if let Some(fence) = fence {
            client.events[fence as usize] = Signal { writes, ..Signal::default() };
        }
        self.request(session, RequestBody::Save { region, fence }, &entries, deadline_ms)
    }

    /// Looks a prefix up.
    pub fn query(
        &mut self,
        session: SessionId,
        scope: ScopeId,
        mode: QueryMode,
        entries: &[PageEntry],
    ) -> OperationId {
        self.request(session, RequestBody::Query { scope, mode }, entries, 0)
    }

    /// Restores pages of a lease from `offset` on.
    pub fn restore(
        &mut self,
        session: SessionId,
        region: RegionId,
        lease: LeaseId,
        offset: u32,
        entries: &[PageEntry],
        keep: bool,
    ) -> OperationId {
        self.restore_after(session, region, lease, (offset, entries), keep, (None, false))
    }

    /// [`restore`](Self::restore) when an event has passed, or layer by layer.
    pub fn restore_after(
        &mut self,
        session: SessionId,
        region: RegionId,
        lease: LeaseId,
        (offset, entries): (u32, &[PageEntry]),
        keep: bool,
        (fence, by_layer): (Option<u32>, bool),
    ) -> OperationId {
        if let Some(fence) = fence {
            self.client_mut(session).events[fence as usize] = Signal::default();
        }
        let entries = self.with_device_pages(session, region, entries);
        let found = self.client_mut(session).regions[region.0 as usize].as_mut();
        let found = found.expect("a region");
        for entry in &entries {
            found.pages[entry.device_page as usize].fill(POISON);
        }
        let body = RequestBody::Restore { region, lease, offset, fence, keep, by_layer };
        self.request(session, body, &entries, 0)
    }

    /// Any operation without pages.
    pub fn ask(&mut self, session: SessionId, body: RequestBody) -> OperationId {
        self.request(session, body, &[], 0)
    }

    /// Takes the end of an operation, if it has ended.
    pub fn take_ended(&mut self, session: SessionId, operation: OperationId) -> Option<Ended> {
        let ended = &mut self.clients.get_mut(&session.0)?.ended;
        let at = ended.iter().position(|ended| ended.completion.operation == operation)?;
        Some(ended.remove(at))
    }

    /// Takes the end of an operation that must have ended.
    pub fn ended(&mut self, session: SessionId, operation: OperationId) -> Ended {
        let ended = self.take_ended(session, operation);
        ended.unwrap_or_else(|| panic!("operation {operation} has not ended"))
    }

    /// Device pages that a save or restore may name now.
    pub fn free_device_pages(&self, session: SessionId, region: RegionId) -> usize {
        let region = self.client(session).regions[region.0 as usize].as_ref();
        region.map_or(0, |region| region.free.len())
    }

    fn with_device_pages(
        &mut self,
        session: SessionId,
        region: RegionId,
        entries: &[PageEntry],
    ) -> Vec<PageEntry> {
        let region = self.client_mut(session).regions[region.0 as usize].as_mut();
        let region = region.expect("a region");
        let mut entries = entries.to_vec();
        for entry in entries.iter_mut().filter(|entry| !entry.is_anchor()) {
            entry.device_page = region.free.pop().expect("a free device page");
        }
        entries
    }

    /// Longest length that a restore could use now, found without `core`'s help.
    fn restorable(&self, session: SessionId, body: &RequestBody, entries: &[PageEntry]) -> usize {
        let RequestBody::Query { scope, .. } = body else { return 0 };
        let Some(members) = self.client(session).scopes.get(scope.0 as usize) else { return 0 };
        let there: HashSet<Key> = self
            .core
            .page_views()
            .filter(|page| page.indexed && (page.resident.is_some() || self.reads(page.slot)))
            .map(|page| Key { namespace: page.namespace, hash: page.hash })
            .collect();
        let pages: Vec<_> = entries.iter().filter(|entry| !entry.is_anchor()).collect();
        let present =
            |member: &Member, at: usize| there.contains(&member.key(PageHash(pages[at].hash)));
        let whole = |len: usize| {
            members.iter().all(|member| member.needed(len).all(|at| present(member, at)))
        };
        (0..=pages.len()).rev().find(|&len| whole(len)).unwrap_or(0)
    }

    /// Whether the device of a slot reads, as far as `core` knows.
    fn reads(&self, slot: Option<Slot>) -> bool {
        slot.is_some_and(|slot| self.core.device_is_readable(slot.device))
    }

    /// Notes which pages may be found from now on.
    fn learn(&mut self, session: SessionId, body: &RequestBody, entries: &[PageEntry]) {
        let client = &self.clients[&session.0];
        match body {
            RequestBody::Save { region, .. } => {
                let region = client.regions.get(region.0 as usize).and_then(Option::as_ref);
                let Some(namespace) = region.map(|region| region.member.fingerprint) else {
                    return;
                };
                let pages = entries.iter().filter(|entry| !entry.is_anchor());
                let known = self.known.entry(namespace).or_default();
                known.extend(pages.map(|entry| PageHash(entry.hash)));
            }
            RequestBody::Forget { scope } => {
                for member in client.scopes.get(scope.0 as usize).into_iter().flatten() {
                    let known = self.known.remove(&member.fingerprint).unwrap_or_default();
                    // The effect says under which generation.
                    let unrecorded = self.unrecorded.entry((member.fingerprint, u64::MAX));
                    unrecorded.or_default().extend(known);
                }
            }
            _ => {}
        }
    }

    // Events.

    fn handle(&mut self, event: Event<'_>) {
        self.core.handle(self.now, event, &mut self.out);
        self.carry_out();
        if self.pumps {
            self.pump();
        }
        self.events += 1;
        if self.check_every > 0 && self.events.is_multiple_of(self.check_every) {
            self.core.check_laws();
        }
    }

    /// Every page's bytes, in DRAM and on disk, are an image of its key. A slot may hold less than
    /// its footer says (torn, rotten), but then its checksum tells.
    pub fn check_bytes(&self) {
        for page in self.core.page_views() {
            let key = Key { namespace: page.namespace, hash: page.hash };
            let units = crate::content::units(page.image_bytes);
            if let Some(extent) = &page.resident {
                assert!(is_image(&self.memory.words(extent)[..units], &key), "{page:?}");
            }
            if let Some(slot) = &page.slot {
                let footer = self.disk.footer(slot);
                let footer = footer.unwrap_or_else(|| panic!("no footer for {page:?}"));
                assert_eq!((footer.namespace, footer.hash), (page.namespace, page.hash));
                let words = self.disk.read(slot, page.image_bytes);
                let whole = Some(checksum(words)) == footer.checksum;
                assert!(!whole || is_image(words, &key), "{page:?} has wrong bytes on SSD");
            }
        }
    }

    /// Folds what can be seen of the state, to compare two runs.
    pub fn fingerprint(&self) -> u64 {
        let order = self.core.eviction_order();
        let words = order.iter().flat_map(|hash| hash.0.chunks(8).map(|c| u64::from(c[0])));
        fold(words.chain([self.now, self.work.len() as u64, self.core.stats().bytes_saved]))
    }

    /// The configuration.
    pub fn config(&self) -> &CoreConfig {
        &self.config
    }
}
