//! Random engines, faults and crashes from a seed.
//!
//! Fault model. Copies, reads and writes end in any order and as late as chance has it. A copy can
//! stop at any page, because the engine is gone or the device failed; a read or write can fail with
//! an errno, come short, or find the tier off; an image on disk can rot. A device can answer nothing
//! for a while, and `core` hear of it sooner, later or never; it can be unreadable for a while though
//! it answers, or refuse every write and be tried with single ones meanwhile. An event that a copy
//! waits for passes late or never. Engines cancel at any moment, are killed at any moment, forget to
//! release, name leases of others, send records that no correct client sends. The Manager is killed
//! at any moment and starts again over what reached the disk, or serves before it knows what did.
//! Time jumps past deadlines and leases.
//!
//! What must hold is checked by [`World`] at every effect and by the laws of `core` after events;
//! at the end everything must end, and the pool must be usable to the last byte.

use std::collections::{BTreeMap, BTreeSet};

use fastrand::Rng;
use orbitkv_manager::core::{
    CopyFault, Core, CoreConfig, Direction, Intake, IoFault, RegionGeometry, SpillPolicy,
};
use orbitkv_shm_protocol::bootstrap::message::{DependencySpec, NamespaceSpec};
use orbitkv_shm_protocol::ids::{LeaseId, OperationId, PageHash, RegionId, ScopeId, SessionId};
use orbitkv_shm_protocol::record::{Code, PageEntry, QueryMode, RequestBody, Status, flags};

use crate::content::VERSIONS;
use crate::world::{Fate, Work, World, child, device, pages, pages_after, spec};

const SESSIONS_MAX: usize = 6;
/// Events of a session.
const EVENTS: usize = 12;
/// Operations that a simulated engine has outstanding at most; the rest of its credits is for
/// cancels, releases and drains.
const OUTSTANDING_MAX: usize = 40;
/// Events to a crash of the Manager, on average.
const CRASH_ONE_IN: u32 = 1500;
/// Events to the end of a census that a start leaves to the background, on average.
const CENSUS_LASTS: u32 = 60;
const MILLISECOND: u64 = 1_000_000;

/// A session that the simulation uses.
#[derive(Clone, Debug)]
struct Attached {
    id: SessionId,
    engine: u8,
    /// One a namespace, in the order of the plan, then the sets.
    scopes: Vec<ScopeId>,
    /// One a namespace.
    regions: Vec<RegionId>,
}

/// What is decided once from the seed.
#[derive(Clone, Debug)]
struct Plan {
    config: CoreConfig,
    devices: Vec<RegionGeometry>,
    namespaces: Vec<NamespaceSpec>,
    /// Namespaces that are the ranks of one model.
    ranks: usize,
    /// The first rank, a window and a state namespace.
    hybrid: Option<[usize; 3]>,
    depth_max: usize,
    branches: u64,
    /// Some of the devices do not sum what they save.
    unsummed: bool,
    /// Of a thousand pieces of work.
    faults: u32,
    /// Work that ends for each request that is made, more or less.
    speed: u32,
}

impl Plan {
    fn new(rng: &mut Rng) -> Self {
        let mixed = rng.u8(..3) == 0;
        let (unit, pool): (u64, u64) =
            if mixed { (1 << 20, rng.u64(20..44) << 20) } else { (4096, rng.u64(20..90) * 4096) };
        let sizes: &[u64] = if mixed {
            &[4096, 64 << 10, 1 << 20, 9 << 20, (1 << 20) + 4096]
        } else {
            &[4096, 4096, 8192, 10_000, 16_384]
        };
        let mut namespaces = Vec::new();
        let ranks = rng.usize(1..4);
        let size = *rng.choice(sizes).unwrap_or(&4096);
        let of_rank = |rank: u32| NamespaceSpec {
            tp_rank: rank,
            tp_size: ranks as u32,
            ..spec("ranked", size)
        };
        namespaces.extend((0..ranks as u32).map(of_rank));
        namespaces.push(NamespaceSpec { salt: "tenant".into(), ..of_rank(0) });
        let mut hybrid = None;
        if rng.bool() {
            let at = namespaces.len();
            let window = DependencySpec::Window(rng.u32(1..4));
            namespaces.push(NamespaceSpec { group: 1, dependency: window, ..of_rank(0) });
            let state = NamespaceSpec {
                group: 2,
                dependency: DependencySpec::State,
                page_bytes: sizes[rng.usize(..sizes.len())],
                ..of_rank(0)
            };
            namespaces.push(state);
            hybrid = Some([0, at, at + 1]);
        }
        for model in ["other", "third"] {
            if rng.bool() {
                namespaces.push(spec(model, sizes[rng.usize(..sizes.len())]));
            }
        }
        let devices: Vec<RegionGeometry> = (0..[0, 1, 2, 3][rng.usize(..4)])
            .map(|_| {
                let region = if mixed { rng.u64(19..30) << 20 } else { rng.u64(9..40) * 4096 };
                let mut device = device(rng.u64(1..5), region);
                // The last region may be shorter.
                device.capacity_bytes -= rng.u64(..region / 4096) / 2 * 4096;
                device.capacity_bytes =
                    device.capacity_bytes.max(device.data_offset + device.region_bytes);
                device
            })
            .collect();
        let mut config = CoreConfig::with_dram(pool);
        if rng.bool() {
            let first = pool / 8192 * 4096;
            config.arena_bytes = vec![first, pool - first];
        }
        if mixed {
            // Each of the arenas holds the largest page, wherever it has to be aligned.
            config.arena_bytes = config.arena_bytes.iter().map(|&b| b.max(10 << 20)).collect();
        }
        config.query_budget_bytes = pool / rng.u64(1..5);
        config.speculative_budget_bytes = config.query_budget_bytes / rng.u64(1..5);
        config.session_budget_bytes = config.query_budget_bytes / rng.u64(1..3);
        config.lease_ttl_ns = rng.u64(5..60) * MILLISECOND;
        config.operation_timeout_ns = rng.u64(5..40) * MILLISECOND;
        config.copy_quantum_bytes = unit * rng.u64(1..5);
        config.gpu_copy_quantum_bytes = unit * rng.u64(1..9);
        config.read_window_bytes = unit * rng.u64(1..5);
        config.reads_in_flight_bytes = unit * rng.u64(1..9);
        config.reads_in_flight_max = rng.u32(1..9);
        config.writes_in_flight_bytes = unit * rng.u64(1..9);
        config.writes_in_flight_max = rng.u32(1..9);
        config.pages_dropped_per_turn = if rng.bool() { rng.u32(1..6) } else { 1024 };
        config.pages_recovered_per_turn = if rng.bool() { rng.u32(1..6) } else { 256 };
        config.spill_policy = if rng.u8(..4) == 0 { SpillPolicy::Reuse } else { SpillPolicy::All };
        if rng.u8(..4) == 0 {
            // From nothing to more than is ever saved; an hour's share may go at once.
            config.write_budget_bytes_a_day = Some(rng.u64(..60) * 24 * unit);
        }
        Self {
            config,
            devices,
            namespaces,
            ranks,
            hybrid,
            depth_max: rng.usize(3..14),
            branches: rng.u64(1..5),
            unsummed: rng.bool(),
            faults: if rng.bool() { 0 } else { rng.u32(5..80) },
            speed: rng.u32(20..90),
        }
    }
}

/// One run.
#[derive(Debug)]
pub struct Simulation {
    seed: u64,
    rng: Rng,
    plan: Plan,
    world: World,
    sessions: Vec<Attached>,
    leases: Vec<LeaseId>,
    /// Positions of a lease that a restore ended, by number of the part.
    used: BTreeMap<LeaseId, BTreeSet<(usize, usize)>>,
    released: BTreeSet<LeaseId>,
    /// Which devices refuse every write.
    off: Vec<bool>,
    forgets: u32,
    /// A device that answers nothing.
    silent: Option<u16>,
    event: u32,
}

/// What a seed led to, for the summary.
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs, reason = "names say what is counted")]
pub struct Summary {
    pub restored: u64,
    pub written: u64,
    pub read: u64,
    pub evictions: u64,
    pub expired: u64,
    pub recovered: u64,
    pub crashes: u64,
    pub fingerprint: u64,
}

impl Drop for Simulation {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("seed {} fails at event {} with {:?}", self.seed, self.event, self.plan);
        }
    }
}

impl Simulation {
    /// The run that `seed` stands for.
    pub fn new(seed: u64) -> Self {
        let mut rng = Rng::with_seed(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x6f72_6269);
        let plan = Plan::new(&mut rng);
        let world = World::new(plan.config.clone(), &plan.devices);
        let devices = plan.devices.len();
        Self {
            seed,
            rng,
            plan,
            world,
            sessions: Vec::new(),
            leases: Vec::new(),
            used: BTreeMap::new(),
            released: BTreeSet::new(),
            off: vec![false; devices],
            forgets: 0,
            silent: None,
            event: 0,
        }
    }

    /// Check the laws after every so many events.
    pub fn check_every(mut self, events: u32) -> Self {
        self.world.check_every = events;
        self
    }

    /// Runs some events, then lets everything end and checks that it did.
    pub fn run(mut self, events: u32) -> Summary {
        let mut summary = Summary::default();
        for event in 0..events {
            self.event = event;
            self.world.pumps = self.rng.u8(..8) > 0;
            self.world.now += self.rng.u64(..50_000);
            if self.rng.u32(..CRASH_ONE_IN) == 0 {
                self.note(&mut summary);
                summary.crashes += 1;
                self.crash();
            }
            if self.world.is_in_census() && self.rng.u32(..CENSUS_LASTS) == 0 {
                self.world.end_census();
            }
            self.act();
            if event % 64 == 0 {
                self.world.check_bytes();
            }
        }
        self.world.pumps = true;
        self.note(&mut summary);
        self.wind_down();
        summary.fingerprint = self.world.fingerprint();
        self.event = events;
        summary
    }

    fn note(&self, summary: &mut Summary) {
        let stats = self.world.core.stats();
        summary.restored += stats.pages_restored;
        summary.written += stats.ssd_pages_written;
        summary.read += stats.ssd_pages_read;
        summary.evictions += stats.evictions;
        summary.expired += stats.leases_ended[orbitkv_manager::core::LeaseEnd::Expired as usize];
        summary.recovered += stats.recovered_pages;
    }

    fn act(&mut self) {
        if self.rng.u32(..100) < self.plan.speed && self.world.work.iter().any(|w| self.answers(w))
        {
            return self.finish_some();
        }
        match self.rng.u32(..1000) {
            0..20 => self.attach(),
            20..26 => self.kill(),
            26..280 => self.save(),
            280..540 => self.query(),
            540..760 => self.restore(),
            760..820 => self.release(),
            820..880 => self.cancel(),
            880..920 => self.prepare(),
            920..923 => self.forget(),
            923..930 => self.unregister(),
            930..940 => self.drain_or_ping(),
            940..944 => self.misbehave(),
            944..948 => self.world.evict_dram(),
            948..952 => self.rot(),
            952..956 => self.toggle_device(),
            956..958 => self.world.pump(),
            958..960 => self.silence(),
            960..967 => self.tend_devices(),
            // Some events never come.
            967..975 => self.pass_some(),
            975..985 => {
                let ticks = self.rng.u64(..3 * MILLISECOND);
                self.world.advance(ticks);
            }
            985..988 => {
                let ticks = self.rng.u64(..80 * MILLISECOND);
                self.world.advance(ticks);
            }
            _ => self.finish_some(),
        }
    }

    fn finish_some(&mut self) {
        let works = self.world.work.iter().enumerate();
        let able: Vec<_> = works.filter(|(_, work)| self.answers(work)).map(|(at, _)| at).collect();
        let Some(&oldest) = able.first() else { return };
        // Mostly the oldest, at times any.
        let at = if self.rng.bool() { oldest } else { able[self.rng.usize(..able.len())] };
        let fate = self.fate(at);
        self.world.sums = !self.plan.unsummed || self.rng.bool();
        self.world.finish(at, fate);
    }

    /// Whether work can end now.
    fn answers(&self, work: &Work) -> bool {
        match work {
            Work::Read { slot, .. } | Work::Write { slot, .. } => self.silent != Some(slot.device),
            // Every device records it.
            Work::Forget { .. } => self.silent.is_none(),
            Work::Copy { session, fence: Some(fence), .. } => {
                let event = &self.world.client(*session).events[fence.index as usize];
                event.passed || event.given_up || fence.until <= self.world.now
            }
            Work::Copy { .. } => true,
        }
    }

    fn fate(&mut self, at: usize) -> Fate {
        let faulty = self.rng.u32(..1000) < self.plan.faults;
        let io = [IoFault::Errno(5), IoFault::Short, IoFault::Checksum, IoFault::Off];
        match &self.world.work[at] {
            Work::Copy { session, pages, .. } => {
                let gone = self.world.clients.get(&session.0).is_none_or(|client| client.closed);
                if faulty || (gone && self.rng.bool()) {
                    let fault = *self.rng.choice(&[CopyFault::Peer, CopyFault::Device]).expect("2");
                    return Fate::Copy(fault, self.rng.u32(..pages.len() as u32));
                }
                Fate::Good
            }
            Work::Read { .. } if faulty => Fate::Io(io[self.rng.usize(..4)]),
            Work::Write { slot, .. } if self.off[usize::from(slot.device)] => {
                Fate::Io(IoFault::Off)
            }
            Work::Write { .. } if faulty => Fate::Io(io[[0, 1, 3][self.rng.usize(..3)]]),
            Work::Forget { .. } if faulty => Fate::Io(io[0]),
            _ => Fate::Good,
        }
    }

    // Engines.

    fn attach(&mut self) {
        if self.sessions.len() >= SESSIONS_MAX {
            return;
        }
        let engine = self.rng.u8(1..4);
        self.attach_as(engine);
    }

    fn attach_as(&mut self, engine: u8) -> usize {
        let id = self.world.attach(engine);
        let mut scopes = Vec::new();
        let mut regions = Vec::new();
        for spec in self.plan.namespaces.clone() {
            let scope = self.world.namespace(id, &spec);
            scopes.push(scope);
            regions.push(self.world.region(id, scope, 64));
        }
        if self.plan.ranks > 1 {
            let set: Vec<_> = scopes[..self.plan.ranks].to_vec();
            scopes.push(self.world.set(id, &set));
        }
        if let Some(hybrid) = self.plan.hybrid {
            let set = hybrid.map(|at| scopes[at]);
            scopes.push(self.world.set(id, &set));
        }
        self.world.events(id, EVENTS);
        self.sessions.push(Attached { id, engine, scopes, regions });
        self.sessions.len() - 1
    }

    fn kill(&mut self) {
        if let Some(at) = self.some_session() {
            let session = self.sessions.swap_remove(at);
            self.world.close(session.id);
        }
    }

    /// An event that no operation has.
    fn some_event(&mut self, id: SessionId) -> Option<u32> {
        let taken: Vec<_> = self.world.client(id).fences().collect();
        let free: Vec<_> = (0..EVENTS as u32).filter(|event| !taken.contains(event)).collect();
        self.rng.choice(&free).copied()
    }

    fn pass_some(&mut self) {
        let fences = self.world.work.iter().filter_map(|work| match work {
            Work::Copy { session, fence: Some(fence), .. } => Some((*session, fence.index)),
            _ => None,
        });
        let fences: Vec<_> = fences.collect();
        for (session, event) in fences {
            if self.rng.u8(..3) > 0 {
                self.world.pass(session, event);
            }
        }
    }

    /// A session that can make one more request.
    fn some_session(&mut self) -> Option<usize> {
        self.sessions.retain(|session| {
            self.world.clients.get(&session.id.0).is_some_and(|client| !client.closed)
        });
        if self.sessions.is_empty() {
            return Some(self.attach_as(1));
        }
        let at = self.rng.usize(..self.sessions.len());
        let outstanding = self.world.client(self.sessions[at].id).in_flight.len();
        (outstanding < OUTSTANDING_MAX).then_some(at)
    }

    /// A prompt: a walk down the trie.
    fn prompt(&mut self) -> Vec<PageHash> {
        let mut hashes = Vec::new();
        for _ in 0..self.rng.usize(1..=self.plan.depth_max) {
            // Branch 0 is as likely as all others.
            let branch = if self.rng.bool() { 0 } else { self.rng.u64(..self.plan.branches) };
            hashes.push(child(hashes.last().copied(), branch));
        }
        hashes
    }

    fn entries(&mut self, hashes: &[PageHash]) -> Vec<PageEntry> {
        if hashes.len() > 1 && self.rng.u8(..4) == 0 {
            let from = self.rng.usize(1..hashes.len());
            return pages_after(hashes[from - 1], &hashes[from..]);
        }
        pages(hashes)
    }

    fn some_deadline(&mut self) -> u32 {
        if self.rng.u8(..3) == 0 { self.rng.u32(1..30) } else { 0 }
    }

    // Operations.

    fn save(&mut self) {
        let Some(at) = self.some_session() else { return };
        let prompt = self.prompt();
        let mut entries = self.entries(&prompt);
        if self.rng.u8(..6) == 0 {
            // A second chain, which may be the same.
            let mut more = pages(&self.prompt());
            more[0].flags = flags::ENTRY_ROOT;
            entries.extend(more);
        }
        self.world.version = self.rng.u8(..VERSIONS);
        let deadline = self.some_deadline();
        let all_ranks = self.rng.u8(..3) > 0;
        let chosen = self.rng.usize(..self.plan.namespaces.len());
        let namespaces = if all_ranks { 0..self.plan.ranks } else { chosen..chosen + 1 };
        let hybrid = self.plan.hybrid.filter(|_| all_ranks);
        for namespace in namespaces.chain(hybrid.into_iter().flatten().skip(1)) {
            let Attached { id, regions, .. } = &self.sessions[at];
            let (id, region) = (*id, regions[namespace]);
            if self.world.free_device_pages(id, region) >= entries.len() {
                let fence = if self.rng.u8(..4) == 0 { self.some_event(id) } else { None };
                self.world.save_after(id, region, &entries, deadline, fence);
            }
        }
    }

    fn query(&mut self) {
        let Some(at) = self.some_session() else { return };
        let prompt = self.prompt();
        let entries = self.entries(&prompt);
        let mode = match self.rng.u8(..4) {
            0 => QueryMode::Speculative,
            1 => QueryMode::Candidate,
            _ => QueryMode::Demand,
        };
        let Attached { id, scopes, .. } = &self.sessions[at];
        let (id, scope) = (*id, scopes[self.rng.usize(..scopes.len())]);
        let deadline = self.some_deadline();
        self.world.request(id, RequestBody::Query { scope, mode }, &entries, deadline);
    }

    /// Leases that queries were given lately.
    fn some_lease(&mut self) -> Option<LeaseId> {
        self.leases.retain(|lease| self.world.held.contains_key(lease));
        let known: BTreeSet<_> = self.leases.iter().copied().collect();
        let mut fresh: Vec<_> =
            self.world.held.keys().copied().filter(|lease| !known.contains(lease)).collect();
        fresh.sort_unstable();
        self.leases.extend(fresh);
        if self.leases.len() > 40 {
            for lease in self.leases.drain(..20) {
                self.world.held.remove(&lease);
            }
        }
        self.rng.choice(&self.leases).copied()
    }

    /// A session of the lease's engine, mostly.
    fn session_for(&mut self, lease: LeaseId) -> Option<usize> {
        let at = self.some_session()?;
        let engine = self.world.held.get(&lease)?.engine.0[0];
        let of_group: Vec<_> = self
            .sessions
            .iter()
            .enumerate()
            .filter(|(_, session)| session.engine == engine)
            .map(|(at, _)| at)
            .collect();
        if self.rng.u8(..20) == 0 { Some(at) } else { self.rng.choice(&of_group).copied() }
    }

    fn restore(&mut self) {
        let Some(lease) = self.some_lease() else { return };
        let Some(at) = self.session_for(lease) else { return };
        let held = self.world.held[&lease].clone();
        let part = self.rng.usize(..held.members.len());
        let member = held.members[part];
        let needed = member.needed(held.len);
        let (first, len) = if self.rng.bool() {
            (needed.start, needed.len())
        } else {
            let first = self.rng.usize(needed.clone());
            (first, self.rng.usize(1..=needed.end - first))
        };
        let Attached { id, engine, regions, .. } = self.sessions[at].clone();
        let wanted = self
            .world
            .client(id)
            .regions
            .iter()
            .position(|region| region.as_ref().is_some_and(|region| region.member == member));
        let Some(region) = wanted.map(|at| RegionId(at as u32)) else { return };
        // A region that is being unregistered is known to the client still.
        let known = regions.contains(&region);
        let outstanding = self.world.client(id).in_flight.len() >= OUTSTANDING_MAX;
        if outstanding || self.world.free_device_pages(id, region) < len {
            return;
        }
        let keep = self.rng.u8(..4) == 0;
        let used = self.used.entry(lease).or_default();
        let positions = first..first + len;
        let clean = known
            && engine == held.engine.0[0]
            && self.world.now < held.expires
            && !self.released.contains(&lease)
            && !positions.clone().any(|position| used.contains(&(part, position)));
        if !keep && engine == held.engine.0[0] {
            used.extend(positions.clone().map(|position| (part, position)));
        }
        let entries = pages(&held.hashes[positions.clone()]);
        let fence = if self.rng.u8(..6) == 0 { self.some_event(id) } else { None };
        let by_layer = self.rng.u8(..3) == 0;
        let pages = (first as u32, &entries[..]);
        let operation = self.world.restore_after(id, region, lease, pages, keep, (fence, by_layer));
        let refused = [Code::UnknownLease, Code::ExpiredLease, Code::BadRequest];
        if let Some(ended) = self.world.take_ended(id, operation) {
            let code = ended.completion.code;
            assert!(!clean || !refused.contains(&code), "{lease} was good: {ended:?}");
            let expired = self.world.now >= held.expires && engine == held.engine.0[0];
            assert!(expired || code != Code::ExpiredLease, "{lease} lives: {ended:?}");
            if engine != held.engine.0[0] {
                let unknown = [Code::UnknownLease, Code::UnknownRegion];
                assert!(unknown.contains(&code), "a lease of another group: {ended:?}");
            }
        }
    }

    fn release(&mut self) {
        let Some(lease) = self.some_lease() else { return };
        let Some(at) = self.session_for(lease) else { return };
        let id = self.sessions[at].id;
        if self.world.held[&lease].engine.0[0] == self.sessions[at].engine {
            self.released.insert(lease);
        }
        self.ask(id, RequestBody::Release { lease });
    }

    /// Asks with whatever credit is left.
    fn ask(&mut self, id: SessionId, body: RequestBody) -> Option<OperationId> {
        let client = self.world.client(id);
        let room = client.in_flight.len() < client.credits as usize - 1;
        room.then(|| self.world.ask(id, body))
    }

    fn cancel(&mut self) {
        let Some(at) = self.some_session() else { return };
        let id = self.sessions[at].id;
        let in_flight: Vec<_> =
            self.world.client(id).in_flight.values().map(|s| s.request.operation).collect();
        let old = OperationId { index: self.rng.u32(..70), generation: 1 };
        let operation = self.rng.choice(&in_flight).copied().unwrap_or(old);
        self.ask(id, RequestBody::Cancel { operation });
    }

    fn prepare(&mut self) {
        let Some(at) = self.some_session() else { return };
        let prompt = self.prompt();
        let entries = self.entries(&prompt);
        let Attached { id, scopes, .. } = &self.sessions[at];
        let (id, scope) = (*id, scopes[self.rng.usize(..scopes.len())]);
        self.world.request(id, RequestBody::Prepare { scope }, &entries, 0);
    }

    fn forget(&mut self) {
        let Some(at) = self.some_session() else { return };
        let Attached { id, scopes, .. } = &self.sessions[at];
        let (id, scope) = (*id, scopes[self.rng.usize(..scopes.len())]);
        self.forgets += 1;
        self.ask(id, RequestBody::Forget { scope });
    }

    fn unregister(&mut self) {
        let Some(at) = self.some_session() else { return };
        let id = self.sessions[at].id;
        let namespace = self.rng.usize(..self.plan.namespaces.len());
        let region = self.sessions[at].regions[namespace];
        if self.ask(id, RequestBody::Unregister { region }).is_some() {
            let scope = self.sessions[at].scopes[namespace];
            self.sessions[at].regions[namespace] = self.world.region(id, scope, 64);
        }
    }

    fn drain_or_ping(&mut self) {
        let Some(at) = self.some_session() else { return };
        let id = self.sessions[at].id;
        let body = if self.rng.bool() { RequestBody::Drain } else { RequestBody::Ping };
        self.ask(id, body);
    }

    fn misbehave(&mut self) {
        if let Some(at) = self.some_session() {
            self.world.malformed(self.sessions[at].id);
        }
    }

    // The tier and the Manager.

    fn rot(&mut self) {
        if self.plan.faults == 0 {
            return;
        }
        let slots: Vec<_> = self
            .world
            .core
            .page_views()
            .filter_map(|page| Some((page.slot?, crate::content::units(page.image_bytes))))
            .collect();
        if let Some(&(slot, units)) = self.rng.choice(&slots) {
            self.world.disk.rot(&slot, self.rng.usize(..units));
        }
    }

    fn toggle_device(&mut self) {
        if !self.plan.devices.is_empty() && self.plan.faults > 0 {
            let device = self.rng.u16(..self.plan.devices.len() as u16);
            self.world.core.set_device_accepts_writes(device, self.rng.bool());
        }
    }

    /// A device begins or ceases to refuse every write; one that takes none is tried, or used again.
    fn tend_devices(&mut self) {
        if self.plan.faults == 0 {
            return;
        }
        for device in 0..self.plan.devices.len() {
            if self.rng.u8(..4) == 0 {
                let reads = self.world.core.device_is_readable(device as u16);
                self.world.set_readable(device as u16, !reads);
            }
            let takes_none = self.world.core.device_intake(device as u16) == Intake::Nothing;
            let intake = match self.rng.u8(..4) {
                0 => {
                    self.off[device] ^= true;
                    continue;
                }
                1 if takes_none => Intake::One,
                2 if takes_none => Intake::All,
                _ => continue,
            };
            self.world.core.set_device_intake(device as u16, intake);
        }
    }

    /// A device falls silent, or the one that is answers again.
    fn silence(&mut self) {
        let devices = self.plan.devices.len() as u16;
        self.silent = match self.silent {
            None if devices > 0 => Some(self.rng.u16(..devices)),
            _ => None,
        };
    }

    fn crash(&mut self) {
        self.silent = None;
        let blank = World::new(CoreConfig::with_dram(4096), &[]);
        let world = std::mem::replace(&mut self.world, blank);
        let rng = &mut self.rng;
        self.world = if rng.bool() {
            world.crash(|| rng.bool())
        } else {
            world.crash_in_census(|| rng.bool())
        };
        self.sessions.clear();
        self.leases.clear();
        self.used.clear();
        self.released.clear();
    }

    // The end.

    /// Lets everything end, checks that nothing is left, then that the pool is as good as new.
    fn wind_down(&mut self) {
        self.plan.faults = 0;
        self.off.fill(false);
        self.silent = None;
        self.world.end_census();
        for device in 0..self.plan.devices.len() {
            self.world.core.set_device_accepts_writes(device as u16, true);
            self.world.set_readable(device as u16, true);
        }
        for _ in 0..4 {
            self.settle();
            let past = self.plan.config.lease_ttl_ns + 100 * MILLISECOND;
            self.world.advance(past);
        }
        self.settle();
        for client in self.world.clients.values() {
            assert!(!client.closed, "session {} has not ended", client.session);
            assert!(client.in_flight.is_empty(), "never ended: {:?}", client.in_flight);
            assert!(client.wrong.is_empty());
        }
        let gauges = self.world.core.gauges();
        assert_eq!((gauges.operations, gauges.leases), (0, 0));
        assert_eq!((gauges.leased_bytes, gauges.speculative_bytes), (0, 0));
        assert_eq!((gauges.pool_pinned_bytes, gauges.pool_draining_bytes), (0, 0));
        assert!(self.world.core.is_quiet());
        self.world.core.check_laws();
        self.world.check_bytes();
        for namespace in 0..self.plan.namespaces.len() {
            self.use_once(namespace);
        }
        for session in self.world.clients.keys().copied().collect::<Vec<_>>() {
            self.world.close(SessionId(session));
        }
        self.settle();
        assert!(self.world.clients.is_empty());
        assert_eq!(self.world.core.gauges().sessions, 0);
        if self.plan.devices.is_empty() {
            assert_eq!(self.world.core.gauges().spill_pages, 0);
        }
        self.world.core.check_laws();
        self.world.check_bytes();
    }

    fn settle(&mut self) {
        self.world.pump();
        let waits = |core: &Core| core.has_forgotten_pages() || core.has_recovered_pages();
        while !self.world.work.is_empty() || waits(&self.world.core) {
            if self.world.work.is_empty() {
                self.world.pump();
            } else {
                let at = self.rng.usize(..self.world.work.len());
                self.world.finish(at, Fate::Good);
            }
        }
    }

    /// Saves, finds and restores one page of a namespace.
    fn use_once(&mut self, namespace: usize) {
        let at = self.attach_as(9);
        let Attached { id, scopes, regions, .. } = self.sessions[at].clone();
        let entries = pages(&[child(None, 1000 + namespace as u64)]);
        let save = self.world.save(id, regions[namespace], &entries);
        self.settle();
        let saved = self.world.ended(id, save).completion;
        assert_eq!((saved.status, saved.pages), (Status::Ok, 1), "pool is stuck: {saved:?}");
        let bytes = self.plan.namespaces[namespace].page_bytes.next_multiple_of(4096);
        let limit = self.plan.config.session_budget_bytes.min(self.plan.config.query_budget_bytes);
        if bytes > limit {
            return;
        }
        let query = self.world.query(id, scopes[namespace], QueryMode::Demand, &entries);
        self.settle();
        let found = self.world.ended(id, query).completion;
        let lease = found.lease.unwrap_or_else(|| panic!("no hit: {found:?}"));
        let restore = self.world.restore(id, regions[namespace], lease, 0, &entries, false);
        self.world.settle_only(crate::world::is_copy(Direction::Restore));
        let restored = self.world.ended(id, restore).completion;
        assert_eq!((restored.status, restored.pages), (Status::Ok, 1));
    }
}
