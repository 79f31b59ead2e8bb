//! What one connection may say, and when: every message is checked against what the connection
//! has defined and against the limits, before anything is done for it.
//!
//! ```text
//! connected ── Hello ──▶ attached ── Define…, Register…, Release… ──▶ attached
//!     │                     │
//!     └──── Evict ──────────┴──── (owner's uid only; does not change the state)
//! ```
//! Pure: no sockets, no system calls. The endpoint's loop carries out the [`Order`]s.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Weak};
use std::time::Duration;

use orbitkv_shm_protocol::bootstrap::message::{
    ClientMessage, DependencySpec, EVENTS_PER_MESSAGE_MAX, GpuId, IpcHandle, LAYOUT_SEGMENTS_MAX,
    MemorySpec, NAMESPACE_TEXT_MAX, NamespaceSpec, Refusal, RegionSpec, SCOPE_MEMBERS_MAX,
};
use orbitkv_shm_protocol::ids::{EngineId, ScopeId, SessionId};
use orbitkv_shm_protocol::layout::{
    DONE_WORDS_MAX, Geometry, LAYOUT_FINGERPRINT, PAGE_ENTRIES_MIN, RING_CAPACITY_MIN,
};

use crate::config::{Limits, PAGE_BYTES_MIN};

/// Longest wait that `Evict` may ask for.
pub const EVICT_TIMEOUT_MAX: Duration = Duration::from_secs(600);
/// Most memories that one session may register in its life, released ones included: their ids are
/// not used again.
pub(super) const MEMORY_IDS_MAX: u32 = 1 << 20;

/// Why a message is refused; the text goes to the client.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub(super) enum Refused {
    #[error("layout {theirs:#018x} at the client, {ours:#018x} here: use matching builds")]
    Fingerprint { ours: u64, theirs: u64 },
    #[error("uid {uid} may not {what}: {fix}")]
    NotAllowed { uid: u32, what: &'static str, fix: &'static str },
    #[error("{what} needs an attached session: say hello first")]
    NotAttached { what: &'static str },
    #[error("already attached as session {session}: connect again for another session")]
    AlreadyAttached { session: SessionId },
    #[error("engine id is {bytes} bytes of text that are not 32 hexadecimal digits")]
    EngineId { bytes: usize },
    #[error("{field} is {value}: {range}")]
    Range { field: &'static str, value: u64, range: Bounds },
    #[error("{field} has {bytes} bytes, at most {NAMESPACE_TEXT_MAX}")]
    Text { field: &'static str, bytes: usize },
    #[error("{what} carries {found} descriptors, needs {needed}")]
    Descriptors { what: &'static str, found: usize, needed: usize },
    #[error("scope {scope} is not defined in this session")]
    UnknownScope { scope: u32 },
    #[error("scope {scope} is a set: name one of its namespaces")]
    IsASet { scope: u32 },
    #[error("memory {memory} is not registered in this session, which has {registered}")]
    UnknownMemory { memory: u32, registered: usize },
    #[error(
        "segment {segment} names layer {layer}: the session has {done_words} done words an operation"
    )]
    Layer { segment: usize, layer: u32, done_words: u32 },
    #[error("tier {tier:?} cannot be evicted: dram")]
    Tier { tier: String },
    #[error("the session has registered {MEMORY_IDS_MAX} memories in its life: attach again")]
    MemoryIds,
    #[error("{what}: the limit of {limit} is reached ({field} in the configuration)")]
    Limit { what: &'static str, limit: u64, field: &'static str },
    #[error("page of {bytes} bytes: at most {max} bytes here ({what})")]
    TooLarge { bytes: u64, max: u64, what: &'static str },
    #[error("the Manager is stopping")]
    Draining,
}

/// A range, for messages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Bounds {
    min: u64,
    max: u64,
    power_of_two: bool,
}

impl std::fmt::Display for Bounds {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let kind = if self.power_of_two { "a power of two, " } else { "" };
        write!(f, "{kind}{} to {} is accepted", self.min, self.max)
    }
}

impl Refused {
    pub(super) const fn refusal(&self) -> Refusal {
        match self {
            Self::Fingerprint { .. } => Refusal::AbiMismatch,
            Self::NotAllowed { .. } => Refusal::NotAllowed,
            Self::NotAttached { .. } | Self::AlreadyAttached { .. } => Refusal::OutOfOrder,
            Self::EngineId { .. }
            | Self::Range { .. }
            | Self::Text { .. }
            | Self::Descriptors { .. }
            | Self::UnknownScope { .. }
            | Self::IsASet { .. }
            | Self::UnknownMemory { .. }
            | Self::Layer { .. }
            | Self::Tier { .. } => Refusal::BadMessage,
            Self::MemoryIds | Self::Limit { .. } => Refusal::LimitReached,
            Self::TooLarge { .. } => Refusal::TooLarge,
            Self::Draining => Refusal::Draining,
        }
    }
}

/// What the limits of the moment are.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rules<'a> {
    pub(super) limits: &'a Limits,
    /// A page must fit the pool.
    pub(super) dram_bytes: u64,
    /// Sessions that exist, draining ones included.
    pub(super) sessions: u32,
    pub(super) draining: bool,
    pub(super) uid: u32,
    pub(super) is_owner: bool,
}

/// A message that passed every check that needs nobody else.
#[derive(Debug)]
pub(super) enum Order {
    Attach { engine: EngineId, geometry: Geometry },
    DefineNamespace(Box<NamespaceSpec>),
    DefineSet(Vec<ScopeId>),
    Import { spec: MemorySpec, descriptor: Option<OwnedFd> },
    Release { memory: u32 },
    LayOut { spec: RegionSpec, page_bytes: u64 },
    ImportEvents { gpu: GpuId, handles: Vec<IpcHandle> },
    Evict { timeout: Duration },
}

/// What one connection has said so far.
#[derive(Debug)]
pub(super) struct Dialogue<M> {
    session: Option<SessionId>,
    /// Scopes by id: the page bytes of a namespace, `None` for a set.
    scopes: HashMap<u32, Option<u64>>,
    /// Memories by handle.
    memories: HashMap<u32, Arc<M>>,
    /// Memories whose handle has ended, as long as regions hold them: they count against the limit,
    /// or regions over ever new memory would go past it.
    released: Vec<Weak<M>>,
    /// Memories that were ever registered: the next handle.
    memory_ids: u32,
    /// Regions that exist.
    regions: u32,
    /// Done words of each operation.
    done_words: u32,
    /// Events in the pool.
    events: u32,
}

impl<M> Default for Dialogue<M> {
    fn default() -> Self {
        Self {
            session: None,
            scopes: HashMap::new(),
            memories: HashMap::new(),
            released: Vec::new(),
            memory_ids: 0,
            regions: 0,
            done_words: 0,
            events: 0,
        }
    }
}

impl<M> Dialogue<M> {
    pub(super) fn session(&self) -> Option<SessionId> {
        self.session
    }

    pub(super) fn memories(&self) -> &HashMap<u32, Arc<M>> {
        &self.memories
    }

    /// Checks one message. Nothing changes yet: the `attached`, `defined` … calls below record
    /// what came of it.
    pub(super) fn check(
        &self,
        message: ClientMessage,
        descriptors: Vec<OwnedFd>,
        rules: &Rules<'_>,
    ) -> Result<Order, Refused> {
        let what = name_of(&message);
        let needed = match &message {
            ClientMessage::RegisterMemory(MemorySpec::Memfd { .. }) => 1,
            _ => 0,
        };
        if descriptors.len() != needed {
            return Err(Refused::Descriptors { what, found: descriptors.len(), needed });
        }
        match &message {
            ClientMessage::Hello { .. } | ClientMessage::Evict { .. } => {}
            _ if self.session.is_none() => return Err(Refused::NotAttached { what }),
            _ => {}
        }
        match message {
            ClientMessage::Hello {
                layout_fingerprint,
                engine_id,
                ring_capacity,
                page_entries,
                done_words,
            } => {
                let geometry = Geometry { ring_capacity, page_entries, done_words };
                self.check_hello(layout_fingerprint, &engine_id, geometry, rules)
            }
            ClientMessage::DefineNamespace(spec) => {
                self.check_room_for_scope(rules)?;
                check_namespace(&spec, rules)?;
                Ok(Order::DefineNamespace(Box::new(spec)))
            }
            ClientMessage::DefineSet { members } => self.check_set(&members, rules),
            ClientMessage::RegisterMemory(spec) => {
                let limit = rules.limits.memories_per_session;
                if self.memories_held() >= limit as usize {
                    let field = "limits.memories";
                    return Err(Refused::Limit { what, limit: limit.into(), field });
                }
                if self.memory_ids >= MEMORY_IDS_MAX {
                    return Err(Refused::MemoryIds);
                }
                check_memory(&spec)?;
                Ok(Order::Import { spec, descriptor: descriptors.into_iter().next() })
            }
            ClientMessage::ReleaseMemory { memory } => {
                self.check_memory_is_live(memory)?;
                Ok(Order::Release { memory })
            }
            ClientMessage::RegisterRegion(spec) => self.check_region(spec, rules),
            ClientMessage::RegisterEvents { gpu, handles } => {
                let count = handles.len() as u64;
                in_range("events of a message", count, 1, EVENTS_PER_MESSAGE_MAX as u64)?;
                let limit = rules.limits.events_per_session.into();
                if u64::from(self.events) + count > limit {
                    return Err(Refused::Limit { what, limit, field: "limits.events" });
                }
                Ok(Order::ImportEvents { gpu, handles })
            }
            ClientMessage::Evict { tier, timeout_ms } => {
                if !rules.is_owner {
                    return Err(Refused::NotAllowed {
                        uid: rules.uid,
                        what: "evict",
                        fix: "run it as the Manager's user",
                    });
                }
                if tier != "dram" {
                    let tier = tier.chars().take(32).collect();
                    return Err(Refused::Tier { tier });
                }
                let max = EVICT_TIMEOUT_MAX.as_millis() as u64;
                in_range("timeout_ms", timeout_ms, 0, max)?;
                Ok(Order::Evict { timeout: Duration::from_millis(timeout_ms) })
            }
        }
    }

    fn check_hello(
        &self,
        theirs: u64,
        engine_id: &str,
        geometry: Geometry,
        rules: &Rules<'_>,
    ) -> Result<Order, Refused> {
        if let Some(session) = self.session {
            return Err(Refused::AlreadyAttached { session });
        }
        if theirs != LAYOUT_FINGERPRINT {
            return Err(Refused::Fingerprint { ours: LAYOUT_FINGERPRINT, theirs });
        }
        let engine = engine_id_of(engine_id)?;
        let limits = rules.limits;
        let (ring_min, ring_max) = (RING_CAPACITY_MIN.into(), limits.ring_capacity_max.into());
        let ring = u64::from(geometry.ring_capacity);
        if !ring.is_power_of_two() || ring < ring_min || ring > ring_max {
            let range = Bounds { min: ring_min, max: ring_max, power_of_two: true };
            return Err(Refused::Range { field: "ring_capacity", value: ring, range });
        }
        in_range(
            "page_entries",
            geometry.page_entries.into(),
            PAGE_ENTRIES_MIN.into(),
            limits.page_entries_max.into(),
        )?;
        in_range("done_words", geometry.done_words.into(), 1, DONE_WORDS_MAX.into())?;
        if rules.draining {
            return Err(Refused::Draining);
        }
        if rules.sessions >= limits.sessions {
            let limit = limits.sessions.into();
            return Err(Refused::Limit { what: "sessions", limit, field: "limits.sessions" });
        }
        Ok(Order::Attach { engine, geometry })
    }

    fn check_room_for_scope(&self, rules: &Rules<'_>) -> Result<(), Refused> {
        let limit = rules.limits.scopes_per_session;
        if self.scopes.len() >= limit as usize {
            let field = "limits.scopes";
            return Err(Refused::Limit { what: "scopes", limit: limit.into(), field });
        }
        Ok(())
    }

    fn check_set(&self, members: &[u32], rules: &Rules<'_>) -> Result<Order, Refused> {
        self.check_room_for_scope(rules)?;
        in_range("members of the set", members.len() as u64, 1, SCOPE_MEMBERS_MAX as u64)?;
        for scope in members {
            self.page_bytes_of(*scope)?;
        }
        Ok(Order::DefineSet(members.iter().copied().map(ScopeId).collect()))
    }

    fn check_region(&self, spec: RegionSpec, rules: &Rules<'_>) -> Result<Order, Refused> {
        let limit = rules.limits.regions_per_session;
        if self.regions >= limit {
            let field = "limits.regions";
            return Err(Refused::Limit { what: "regions", limit: limit.into(), field });
        }
        let page_bytes = self.page_bytes_of(spec.scope)?;
        in_range("pages of the region", spec.pages.into(), 1, u32::MAX.into())?;
        in_range("segments of a page", spec.segments.len() as u64, 1, LAYOUT_SEGMENTS_MAX as u64)?;
        for (number, segment) in spec.segments.iter().enumerate() {
            self.check_memory_is_live(segment.memory)?;
            if segment.layer >= self.done_words {
                let (layer, done_words) = (segment.layer, self.done_words);
                return Err(Refused::Layer { segment: number, layer, done_words });
            }
        }
        Ok(Order::LayOut { spec, page_bytes })
    }

    /// Memories that have not been let go of.
    fn memories_held(&self) -> usize {
        let released = self.released.iter().filter(|held| held.strong_count() > 0);
        self.memories.len() + released.count()
    }

    fn check_memory_is_live(&self, memory: u32) -> Result<(), Refused> {
        match self.memories.contains_key(&memory) {
            true => Ok(()),
            false => Err(Refused::UnknownMemory { memory, registered: self.memories.len() }),
        }
    }

    fn page_bytes_of(&self, scope: u32) -> Result<u64, Refused> {
        match self.scopes.get(&scope) {
            None => Err(Refused::UnknownScope { scope }),
            Some(None) => Err(Refused::IsASet { scope }),
            Some(Some(page_bytes)) => Ok(*page_bytes),
        }
    }

    pub(super) fn attached(&mut self, session: SessionId, geometry: Geometry) {
        self.session = Some(session);
        self.done_words = geometry.done_words;
    }

    /// A namespace (with its page bytes) or a set got its id.
    pub(super) fn defined(&mut self, scope: ScopeId, page_bytes: Option<u64>) {
        self.scopes.insert(scope.0, page_bytes);
    }

    /// Returns the handle of the memory.
    pub(super) fn imported(&mut self, memory: Arc<M>) -> u32 {
        let handle = self.memory_ids;
        self.memories.insert(handle, memory);
        // Bounded by `MEMORY_IDS_MAX`.
        self.memory_ids += 1;
        handle
    }

    /// A handle has ended. The memory lives on in the regions over it.
    pub(super) fn released(&mut self, memory: u32) {
        self.released.retain(|held| held.strong_count() > 0);
        self.released.extend(self.memories.remove(&memory).map(|held| Arc::downgrade(&held)));
    }

    pub(super) fn region_began(&mut self) {
        self.regions += 1;
    }

    pub(super) fn region_ended(&mut self) {
        self.regions = self.regions.saturating_sub(1);
    }

    pub(super) fn events_added(&mut self, count: u32) {
        self.events += count;
    }
}

fn name_of(message: &ClientMessage) -> &'static str {
    match message {
        ClientMessage::Hello { .. } => "hello",
        ClientMessage::DefineNamespace(_) => "define_namespace",
        ClientMessage::DefineSet { .. } => "define_set",
        ClientMessage::RegisterMemory(_) => "register_memory",
        ClientMessage::ReleaseMemory { .. } => "release_memory",
        ClientMessage::RegisterRegion(_) => "register_region",
        ClientMessage::RegisterEvents { .. } => "register_events",
        ClientMessage::Evict { .. } => "evict",
    }
}

fn in_range(field: &'static str, value: u64, min: u64, max: u64) -> Result<(), Refused> {
    if value < min || value > max {
        let range = Bounds { min, max, power_of_two: false };
        return Err(Refused::Range { field, value, range });
    }
    Ok(())
}

fn engine_id_of(text: &str) -> Result<EngineId, Refused> {
    let refused = Refused::EngineId { bytes: text.len() };
    if text.len() != 32 || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Err(refused);
    }
    let value = u128::from_str_radix(text, 16).map_err(|_| refused)?;
    Ok(EngineId(value.to_be_bytes()))
}

fn check_namespace(spec: &NamespaceSpec, rules: &Rules<'_>) -> Result<(), Refused> {
    for (field, text) in [
        ("model", &spec.model),
        ("dtype", &spec.dtype),
        ("layout", &spec.layout),
        ("adapter", &spec.adapter),
        ("salt", &spec.salt),
    ] {
        if text.len() > NAMESPACE_TEXT_MAX {
            return Err(Refused::Text { field, bytes: text.len() });
        }
    }
    in_range("page_tokens", spec.page_tokens.into(), 1, u32::MAX.into())?;
    for (field, rank, size) in
        [("tp_rank", spec.tp_rank, spec.tp_size), ("pp_rank", spec.pp_rank, spec.pp_size)]
    {
        let sizes = if field == "tp_rank" { "tp_size" } else { "pp_size" };
        in_range(sizes, size.into(), 1, u32::MAX.into())?;
        in_range(field, rank.into(), 0, u64::from(size) - 1)?;
    }
    if let DependencySpec::Window(pages) = spec.dependency {
        in_range("window", pages.into(), 1, u32::MAX.into())?;
    }
    if spec.page_bytes > rules.limits.page_bytes_max {
        let (bytes, max) = (spec.page_bytes, rules.limits.page_bytes_max);
        return Err(Refused::TooLarge { bytes, max, what: "limits.page_bytes" });
    }
    if spec.page_bytes > rules.dram_bytes {
        let (bytes, max) = (spec.page_bytes, rules.dram_bytes);
        return Err(Refused::TooLarge { bytes, max, what: "dram.capacity" });
    }
    in_range("page_bytes", spec.page_bytes, PAGE_BYTES_MIN, rules.limits.page_bytes_max)
}

fn check_memory(spec: &MemorySpec) -> Result<(), Refused> {
    // An address range must not wrap; what lies behind it is found out by importing it.
    let (bytes, max) = match spec {
        MemorySpec::Memfd { bytes } => (*bytes, i64::MAX as u64),
        MemorySpec::Process { address, bytes, nonce_address, .. } => {
            in_range("nonce_address", *nonce_address, 1, i64::MAX as u64 - 8)?;
            in_range("address", *address, 1, i64::MAX as u64)?;
            (*bytes, i64::MAX as u64 - *address)
        }
        MemorySpec::Cuda { offset, bytes, .. } => {
            in_range("offset", *offset, 0, i64::MAX as u64)?;
            (*bytes, i64::MAX as u64 - *offset)
        }
    };
    in_range("bytes of the memory", bytes, 1, max.max(1))
}
