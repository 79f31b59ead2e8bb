//! `core` between fake engines, a fake device and a fake disk. Every effect is carried out, and
//! everything that crosses a boundary is checked on the way: an operation ends once, a completion
//! agrees with its results, a copy touches only pages that its operation named, bytes that reach an
//! engine or a slot are one image of their key, nothing touches what has ended.

use std::collections::{BTreeMap, HashMap, HashSet};

use orbitkv_manager::core::{
    CopyFault, CopyPage, Core, CoreConfig, Direction, Effect, Effects, Event, Extent,
    ImageIdentity, IoFault, NamespaceFingerprint, Nanos, PageView, PeerFault, RegionGeometry, Slot,
    Ticket,
};
use orbitkv_shm_protocol::bootstrap::message::{DependencySpec, NamespaceSpec};
use orbitkv_shm_protocol::ids::{
    EngineId, LeaseId, OperationId, PageHash, RegionId, ScopeId, SessionId,
};
use orbitkv_shm_protocol::record::{
    Completion, PageEntry, PageOutcome, PageRange, PageResult, QueryMode, Request, RequestBody,
    RequestKind, Status,
};

use crate::client::{Client, Ended, Member, Region, Submitted, check_answer, outcome};
use crate::content::{Key, POISON, checksum, fold, image, is_image};
use crate::disk::{Disk, Found};
use crate::memory::{Memory, Use};

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
        done: Option<OperationId>,
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
    /// Version of the images that engines compute now.
    pub version: u8,
    memory: Memory,
    config: CoreConfig,
    out: Effects,
    events: u32,
    next_session: u32,
    /// The operation that is being taken from its ring.
    asked: Option<(SessionId, OperationId)>,
    /// Pages that may be found, by namespace: saved since it was last forgotten.
    known: HashMap<NamespaceFingerprint, HashSet<PageHash>>,
    /// What was known when a forget was asked for that is not recorded yet.
    unrecorded: HashMap<(NamespaceFingerprint, u64), HashSet<PageHash>>,
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
            version: 0,
            memory: Memory::new(&config.arena_bytes),
            config,
            out: Effects::default(),
            events: 0,
            next_session: 0,
            asked: None,
            known: HashMap::new(),
            unrecorded: HashMap::new(),
        }
    }

    /// The Manager dies and another starts over the same disk. `arrives` decides, for each unit of
    /// each write in flight and for each retired slot, whether it reached the disk.
    pub fn crash(mut self, mut arrives: impl FnMut() -> bool) -> Self {
        for work in std::mem::take(&mut self.work) {
            match work {
                Work::Write { extent, slot, image, .. } => {
                    let words = self.memory.words(&extent);
                    self.disk.write_some(&slot, &image, words, |_| arrives());
                }
                Work::Forget { namespace, generation, .. } if arrives() => {
                    self.disk.record_forget(namespace, generation);
                    self.unrecorded.remove(&(namespace, generation));
                }
                _ => {}
            }
        }
        let Found { layouts, pages, last_generation } = self.disk.recover(&mut arrives);
        let config = CoreConfig { devices: layouts, last_generation, ..self.config };
        let mut world = Self::over(config, self.disk);
        world.check_every = self.check_every;
        world.now = self.now;
        world.known = self.known;
        for ((namespace, _), hashes) in self.unrecorded {
            world.known.entry(namespace).or_default().extend(hashes);
        }
        world.core.recover(pages, &mut world.out);
        world.core.check_laws();
        world.check_bytes();
        world.check_recovered();
        world
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
        self.handle(Event::SessionOpened { session, engine, credits, page_entries });
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
        let region = self.core.register_region(session, scope, pages).expect("a good region");
        let client = self.client_mut(session);
        let member = client.scopes[scope.0 as usize][0];
        assert_eq!(region.0 as usize, client.regions.len());
        client.regions.push(Some(Region::new(member, pages)));
        region
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
        let version = self.version;
        let entries = self.with_device_pages(session, region, entries);
        let found = self.client_mut(session).regions[region.0 as usize].as_mut();
        let found = found.expect("a region");
        for entry in entries.iter().filter(|entry| !entry.is_anchor()) {
            let key = found.member.key(PageHash(entry.hash));
            found.pages[entry.device_page as usize] =
                image(&key, version, found.member.image_bytes);
        }
        self.request(session, RequestBody::Save { region, fence: None }, &entries, deadline_ms)
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
        let entries = self.with_device_pages(session, region, entries);
        let found = self.client_mut(session).regions[region.0 as usize].as_mut();
        let found = found.expect("a region");
        for entry in &entries {
            found.pages[entry.device_page as usize].fill(POISON);
        }
        let body =
            RequestBody::Restore { region, lease, offset, fence: None, keep, by_layer: false };
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
            .filter(|page| page.indexed)
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
                    self.unrecorded.insert((member.fingerprint, u64::MAX), known);
                }
            }
            _ => {}
        }
    }

    // Time and work.

    /// Time passes; deadlines and leases are looked at.
    pub fn advance(&mut self, nanos: Nanos) {
        self.now += nanos;
        self.handle(Event::Tick);
    }

    /// Ends one piece of work.
    pub fn finish(&mut self, at: usize, fate: Fate) {
        match self.work.remove(at) {
            Work::Copy { ticket, direction, session, region, pages, done } => {
                self.finish_copy(ticket, direction, (session, region), &pages, done, fate);
            }
            Work::Read { ticket, slot, extent, image_bytes, checksum: expected } => {
                let fault = match fate {
                    Fate::Io(fault) => Some(fault),
                    _ => {
                        let words = self.disk.read(&slot, image_bytes);
                        let fault = (checksum(words) != expected).then_some(IoFault::Checksum);
                        self.memory.fill(&extent, words);
                        fault
                    }
                };
                self.memory.end(ticket);
                self.handle(Event::ReadEnded { ticket, fault });
            }
            Work::Write { ticket, extent, slot, image } => {
                let words = self.memory.words(&extent);
                let words = &words[..crate::content::units(image.image_bytes)];
                let key = Key { namespace: image.namespace, hash: image.hash };
                assert!(is_image(words, &key), "{slot:?} gets wrong bytes for {key:?}");
                assert_eq!(checksum(words), image.checksum, "checksum of {key:?}");
                let fault = match fate {
                    Fate::Io(fault) => {
                        let mut unit = 0;
                        self.disk.write_some(&slot, &image, words, |_| {
                            unit += 1;
                            unit % 2 == 0
                        });
                        Some(fault)
                    }
                    _ => {
                        self.disk.write(&slot, &image, words);
                        None
                    }
                };
                self.memory.end(ticket);
                self.handle(Event::WriteEnded { ticket, fault });
            }
            Work::Forget { ticket, namespace, generation } => {
                let fault = match fate {
                    Fate::Io(fault) => Some(fault),
                    _ => {
                        self.disk.record_forget(namespace, generation);
                        self.unrecorded.remove(&(namespace, generation));
                        None
                    }
                };
                self.handle(Event::ForgetRecorded { ticket, fault });
            }
        }
    }

    fn finish_copy(
        &mut self,
        ticket: Ticket,
        direction: Direction,
        (session, region): (SessionId, RegionId),
        pages: &[CopyPage],
        done: Option<OperationId>,
        fate: Fate,
    ) {
        let (fault, whole) = match fate {
            Fate::Copy(fault, whole) => (Some(fault), whole.min(pages.len() as u32)),
            _ => (None, pages.len() as u32),
        };
        let client = self.clients.get_mut(&session.0).expect("a copy of a session that is there");
        let found = client.regions[region.0 as usize].as_mut().expect("a copy of a region");
        let mut checksums = Vec::new();
        for (at, page) in pages.iter().enumerate() {
            let device = &mut found.pages[page.device_page as usize];
            // The page at which a faulty copy stops is torn.
            let arrives = if at < whole as usize { device.len() } else { device.len() / 2 };
            match direction {
                Direction::Save => {
                    self.memory.fill(&page.extent, &device[..arrives]);
                    checksums.push(checksum(device));
                }
                Direction::Restore => {
                    device[..arrives].copy_from_slice(&self.memory.words(&page.extent)[..arrives]);
                }
            }
            if at >= whole as usize {
                break;
            }
        }
        checksums.truncate(whole as usize);
        self.memory.end(ticket);
        if let Some(operation) = done.filter(|_| fault.is_none()) {
            let client = self.client(session);
            let asked =
                client.in_flight.get(&operation.index).filter(|s| s.request.operation == operation);
            if let Some(asked) = asked.filter(|_| !client.closed) {
                for at in 0..asked.entries.len() {
                    self.check_restored(session, asked, at);
                }
            }
            let client = self.client_mut(session);
            client.done_words.insert(operation.index, operation.done_word());
        }
        self.handle(Event::Copied { ticket, pages_done: whole, fault, checksums: &checksums });
    }

    /// Ends all work in the order in which it was ordered, and what follows from it.
    pub fn settle(&mut self) {
        while !self.work.is_empty() {
            self.finish(0, Fate::Good);
        }
    }

    /// Ends work of one sort until there is none; other work stays.
    pub fn settle_only(&mut self, wanted: impl Fn(&Work) -> bool) {
        while let Some(at) = self.work.iter().position(&wanted) {
            self.finish(at, Fate::Good);
        }
    }

    /// Orders what may be ordered.
    pub fn pump(&mut self) {
        self.core.pump(self.now, &mut self.out);
        self.carry_out();
    }

    /// Drops what nothing holds from DRAM.
    pub fn evict_dram(&mut self) {
        self.core.evict_dram(&mut self.out);
        self.carry_out();
        self.core.check_laws();
    }

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

    // Effects.

    fn carry_out(&mut self) {
        let mut out = std::mem::take(&mut self.out);
        for effect in out.list.drain(..) {
            match effect {
                Effect::Complete { session, completion, results, results_start } => {
                    self.completed(session, completion, &out.results[results], results_start);
                }
                Effect::Copy { ticket, direction, session, region, pages, fence, done } => {
                    assert_eq!(fence, None);
                    let pages = out.copies[pages].to_vec();
                    self.copy(Work::Copy { ticket, direction, session, region, pages, done });
                }
                Effect::Read { ticket, slot, extent, image_bytes, checksum } => {
                    self.memory.begin(ticket, extent, Use::Fills);
                    if let Some(footer) = self.disk.footer(&slot) {
                        assert_eq!(footer.checksum, checksum, "reads expect what was written");
                    }
                    self.work.push(Work::Read { ticket, slot, extent, image_bytes, checksum });
                }
                Effect::Write { ticket, extent, slot, image } => {
                    self.memory.begin(ticket, extent, Use::Reads);
                    self.disk.check_writable(&slot, &image);
                    let overlaps = |work: &Work| match work {
                        Work::Read { slot: other, .. } | Work::Write { slot: other, .. } => {
                            other.device == slot.device
                                && other.offset < slot.offset + u64::from(slot.bytes)
                                && slot.offset < other.offset + u64::from(other.bytes)
                        }
                        _ => false,
                    };
                    assert!(!self.work.iter().any(overlaps), "{slot:?} is in use");
                    self.work.push(Work::Write { ticket, extent, slot, image });
                }
                Effect::RecordRegion { device, region, slot_bytes } => {
                    self.disk.record_region(device, region, slot_bytes);
                }
                Effect::RetireSlot { slot } => self.disk.retire(&slot),
                Effect::RecordForget { ticket, namespace, generation } => {
                    let hashes = self.unrecorded.remove(&(namespace, u64::MAX));
                    self.unrecorded.insert((namespace, generation), hashes.unwrap_or_default());
                    self.work.push(Work::Forget { ticket, namespace, generation });
                }
                Effect::RegionEnded { session, region } => {
                    assert!(!self.copies_touch(session, Some(region)), "region is being copied");
                    self.client_mut(session).regions[region.0 as usize] = None;
                }
                Effect::CloseSession { session, fault } => self.closed(session, fault),
                Effect::SessionEnded { session } => {
                    assert!(!self.copies_touch(session, None), "session is being copied");
                    let client = self.clients.remove(&session.0).expect("ends once");
                    assert!(client.closed, "a session ends after it was closed");
                }
                Effect::Dropped { hash } => self.dropped.push(hash),
            }
        }
        out.clear();
        self.out = out;
    }

    fn closed(&mut self, session: SessionId, fault: PeerFault) {
        let client = self.client_mut(session);
        assert_eq!(client.fault.replace(fault), None, "closed twice");
        client.closed = true;
        self.group_may_end(session);
    }

    fn copies_touch(&self, id: SessionId, only: Option<RegionId>) -> bool {
        self.work.iter().any(|work| match work {
            Work::Copy { session, region, .. } => {
                *session == id && only.is_none_or(|only| *region == only)
            }
            _ => false,
        })
    }

    fn copy(&mut self, work: Work) {
        let Work::Copy { ticket, direction, session, region, ref pages, .. } = work else { return };
        let client = self.clients.get(&session.0).expect("copy of a session that is there");
        let named = |page: &CopyPage| {
            client.in_flight.values().any(|submitted| {
                let of = match submitted.request.body {
                    RequestBody::Save { region, .. } => Some((region, Direction::Save)),
                    RequestBody::Restore { region, .. } => Some((region, Direction::Restore)),
                    _ => None,
                };
                let mut entries = submitted.entries.iter();
                of == Some((region, direction))
                    && entries.any(|e| !e.is_anchor() && e.device_page == page.device_page)
            })
        };
        assert!(!pages.is_empty() && client.regions[region.0 as usize].is_some());
        for page in pages {
            assert!(client.closed || named(page), "{direction:?} of a page that nobody named");
            let how = match direction {
                Direction::Save => Use::Fills,
                Direction::Restore => Use::Reads,
            };
            self.memory.begin(ticket, page.extent, how);
        }
        self.work.push(work);
    }

    fn completed(
        &mut self,
        session: SessionId,
        completion: Completion,
        results: &[PageResult],
        results_start: u32,
    ) {
        let client = self.clients.get_mut(&session.0).expect("completion of no session");
        assert!(!client.closed, "completion for a client that is gone: {completion:?}");
        if let Some(at) = client.wrong.iter().position(|wrong| *wrong == completion.operation) {
            client.wrong.swap_remove(at);
            assert_eq!((completion.status, results.len()), (Status::Error, 0));
            client.wrong_answers.push(completion);
            return;
        }
        let index = completion.operation.index;
        let submitted = client.in_flight.remove(&index);
        let submitted = submitted.filter(|s| s.request.operation == completion.operation);
        let submitted = submitted.unwrap_or_else(|| panic!("not asked for: {completion:?}"));
        if !results.is_empty() {
            assert_eq!(results_start, submitted.request.range.start);
        }
        let ended = Ended { submitted, completion, results: results.to_vec() };
        check_answer(&ended);
        assert!(completion.queued_ns > 0 && completion.queued_ns <= self.now);
        match completion.kind {
            RequestKind::Query => self.answered(session, &ended),
            RequestKind::Restore => self.restored(session, &ended),
            _ => {}
        }
        let region = match ended.submitted.request.body {
            RequestBody::Save { region, .. } | RequestBody::Restore { region, .. } => Some(region),
            _ => None,
        };
        let client = self.client_mut(session);
        let region = region.and_then(|region| client.regions.get_mut(region.0 as usize)?.as_mut());
        if let Some(region) = region {
            // The engine uses its pages for something else at once.
            let pages = ended.submitted.entries.iter().filter(|entry| !entry.is_anchor());
            for entry in pages {
                let Some(page) = region.pages.get_mut(entry.device_page as usize) else { continue };
                page.fill(POISON);
                region.free.push(entry.device_page);
            }
        }
        client.ended.push(ended);
    }

    fn restored(&self, session: SessionId, ended: &Ended) {
        for (at, result) in ended.results.iter().enumerate() {
            if outcome(result) == PageOutcome::Restored {
                self.check_restored(session, &ended.submitted, at);
            }
        }
        let operation = ended.completion.operation;
        let done = self.client(session).done_words.get(&operation.index);
        let said_done = done == Some(&operation.done_word());
        let pages = !ended.submitted.entries.is_empty();
        let ok = ended.completion.status == Status::Ok;
        assert_eq!(said_done, ok && pages, "done word of {ended:?}");
    }

    fn check_restored(&self, session: SessionId, submitted: &Submitted, at: usize) {
        let RequestBody::Restore { region, .. } = submitted.request.body else { return };
        let region = self.client(session).regions[region.0 as usize].as_ref().expect("a region");
        let entry = &submitted.entries[at];
        let key = region.member.key(PageHash(entry.hash));
        let words = &region.pages[entry.device_page as usize];
        assert!(is_image(words, &key), "restored wrong bytes for page {at}: {key:?}");
    }

    /// A query was answered: its hit is no longer than what is there, never forgotten, and held.
    fn answered(&mut self, session: SessionId, ended: &Ended) {
        let RequestBody::Query { scope, mode } = ended.submitted.request.body else { return };
        let client = self.client(session);
        let Some(members) = client.scopes.get(scope.0 as usize).cloned() else { return };
        let engine = client.engine;
        let pages = ended.submitted.entries.iter().filter(|entry| !entry.is_anchor());
        let hashes: Vec<_> = pages.map(|entry| PageHash(entry.hash)).collect();
        let (completion, len) = (&ended.completion, ended.completion.pages as usize);
        let at_once = self.asked == Some((session, completion.operation));
        if completion.status == Status::Ok && at_once {
            assert_eq!(len, ended.submitted.restorable, "not the longest prefix: {ended:?}");
        }
        let Some(lease) = completion.lease else { return };
        let mut pinned: HashMap<Key, Vec<PageView>> = HashMap::new();
        for page in self.core.page_views().filter(|page| page.pins > 0) {
            let key = Key { namespace: page.namespace, hash: page.hash };
            pinned.entry(key).or_default().push(page);
        }
        for member in &members {
            for at in member.needed(len) {
                let key = member.key(hashes[at]);
                let known = self.known.get(&member.fingerprint);
                let known = known.is_some_and(|known| known.contains(&hashes[at]));
                let views = pinned.get(&key).map_or(&[][..], Vec::as_slice);
                // A query that had to wait may have found a page before it was forgotten.
                let forgotten = !at_once;
                assert!(known || forgotten, "hit of a page that nobody saved: {key:?}");
                let good =
                    |page: &PageView| mode == QueryMode::Candidate || page.resident.is_some();
                assert!(views.iter().any(good), "leased and not there: {key:?} {views:?}");
            }
        }
        let expires = completion.lease_expires_ns;
        let held = Held { engine, members, hashes, len, expires };
        assert!(self.held.insert(lease, held).is_none(), "{lease} was given before");
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
                let whole = checksum(words) == footer.checksum;
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

/// A hash that stands for a prompt: its parent's hash and what follows.
pub fn child(parent: Option<PageHash>, branch: u64) -> PageHash {
    let parent = parent.map_or([0; 32], |parent| parent.0);
    let mut hash = [0; 32];
    for (number, chunk) in hash.chunks_mut(8).enumerate() {
        let parent = u64::from_le_bytes(parent[number * 8..][..8].try_into().expect("8 bytes"));
        chunk.copy_from_slice(&fold([parent, branch, number as u64]).to_le_bytes());
    }
    PageHash(hash)
}

/// `len` hashes of one chain that differs from others in `branch`, from the root.
pub fn chain(branch: u64, len: usize) -> Vec<PageHash> {
    extend(None, branch, len)
}

/// `len` hashes that follow `parent`.
pub fn extend(parent: Option<PageHash>, branch: u64, len: usize) -> Vec<PageHash> {
    let mut hashes: Vec<PageHash> = Vec::with_capacity(len);
    for at in 0..len {
        let parent = hashes.last().copied().or(parent);
        hashes.push(child(parent, if at == 0 { branch } else { 0 }));
    }
    hashes
}

/// Entries of a chain from its root.
pub fn pages(hashes: &[PageHash]) -> Vec<PageEntry> {
    hashes.iter().map(|&hash| PageEntry::page(hash, 0)).collect()
}

/// Entries of the part of a chain that follows `parent`.
pub fn pages_after(parent: PageHash, hashes: &[PageHash]) -> Vec<PageEntry> {
    let anchor = PageEntry::anchor(parent);
    std::iter::once(anchor).chain(pages(hashes)).collect()
}

/// A chain namespace of the given page size.
pub fn spec(model: &str, page_bytes: u64) -> NamespaceSpec {
    NamespaceSpec {
        model: model.into(),
        dtype: "bfloat16".into(),
        page_tokens: 64,
        page_bytes,
        layout: "page-first".into(),
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

/// One SSD device with `regions` regions of `region_bytes`.
pub fn device(regions: u64, region_bytes: u64) -> RegionGeometry {
    let data_offset = 64 << 10;
    RegionGeometry {
        data_offset,
        capacity_bytes: data_offset + regions * region_bytes,
        region_bytes,
    }
}

/// Whether work is a copy in one direction.
pub fn is_copy(wanted: Direction) -> impl Fn(&Work) -> bool {
    move |work| matches!(work, Work::Copy { direction, .. } if *direction == wanted)
}

/// Whether work is an SSD read.
pub fn is_read(work: &Work) -> bool {
    matches!(work, Work::Read { .. })
}

/// Whether work is an SSD write.
pub fn is_write(work: &Work) -> bool {
    matches!(work, Work::Write { .. })
}
