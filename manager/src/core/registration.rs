//! What is set up over the bootstrap socket: namespaces, sets, regions, events.

use orbitkv_shm_protocol::bootstrap::message::{
    NAMESPACE_TEXT_MAX, NamespaceSpec, Refusal, SCOPE_MEMBERS_MAX,
};
use orbitkv_shm_protocol::ids::{RegionId, ScopeId, SessionId};

use super::limits::namespaces_kept;
use super::namespace::{SpecFault, check_spec, namespace_fingerprint, namespace_label};
use super::session::{Region, Scope};
use super::slots::slot_bytes;
use super::{Core, UNIT_BYTES};

/// Smallest page image, in bytes.
pub(super) const PAGE_BYTES_MIN: u64 = UNIT_BYTES;
/// Most regions that one session may register in its life, ended ones included: their ids are not
/// used again.
const REGION_IDS_MAX: usize = 1 << 20;

/// Why a registration was refused. Nothing changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say what each field is")]
pub enum CoreRefusal {
    #[error("no such session")]
    UnknownSession,
    #[error("no scope {0} in this session")]
    UnknownScope(u32),
    #[error("a namespace text is longer than {NAMESPACE_TEXT_MAX} bytes")]
    TextTooLong,
    #[error("page_tokens is 0; accepted: 1 or more")]
    ZeroTokens,
    #[error("a rank is not below its size")]
    RankOutOfRange,
    #[error("a window of 0 pages; accepted: 1 or more")]
    EmptyWindow,
    #[error("page of {page_bytes} bytes; accepted: {PAGE_BYTES_MIN} to {max_bytes}")]
    PageSize { page_bytes: u64, max_bytes: u64 },
    #[error(
        "page of {page_bytes} bytes is larger than the {tier} tier can hold ({tier_bytes} bytes); raise its size"
    )]
    TooLargeForTier { page_bytes: u64, tier: &'static str, tier_bytes: u64 },
    #[error(
        "a set of {members} namespaces; accepted: 1 to {SCOPE_MEMBERS_MAX}, each a namespace named once"
    )]
    BadSet { members: usize },
    #[error("{what} limit of {limit} is reached")]
    LimitReached { what: &'static str, limit: usize },
    #[error(
        "user {uid} has {held} namespaces: the last {kept} of {limit} are for users with less than {share}; evict or forget some"
    )]
    NamespaceShare { uid: u32, held: usize, kept: usize, limit: usize, share: usize },
    #[error(
        "footers on SSD give pages of this namespace {found_bytes} bytes instead of {page_bytes}: the file is damaged, start with another"
    )]
    ForeignImages { page_bytes: u64, found_bytes: u32 },
    #[error("region has 0 pages")]
    NoPages,
    #[error("a region belongs to one namespace, scope {0} is a set")]
    RegionOfSet(u32),
}

/// What a region's pages lie in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RegionKind {
    /// Memory of the host: what the engine wrote is there.
    Host,
    /// Memory of a GPU, written by work that is queued there: saves need a fence. Its device moves
    /// many bytes at a time and lets commands take turns by itself.
    Gpu,
}

impl RegionKind {
    /// Whether a save has to name an event.
    pub(super) const fn needs_fence(self) -> bool {
        matches!(self, Self::Gpu)
    }
}

impl CoreRefusal {
    /// The cause as the bootstrap protocol spells it.
    pub const fn refusal(&self) -> Refusal {
        match self {
            Self::PageSize { .. } | Self::TooLargeForTier { .. } => Refusal::TooLarge,
            Self::LimitReached { .. } | Self::NamespaceShare { .. } => Refusal::LimitReached,
            Self::UnknownSession => Refusal::OutOfOrder,
            Self::ForeignImages { .. } => Refusal::LayoutConflict,
            _ => Refusal::BadMessage,
        }
    }
}

impl Core {
    /// Defines a namespace for a session. The same identity is the same namespace for everyone.
    /// Returns its scope and the bytes of a page image.
    ///
    /// # Errors
    /// What is out of range or over a limit.
    pub fn define_namespace(
        &mut self,
        session: SessionId,
        spec: &NamespaceSpec,
    ) -> Result<(ScopeId, u64), CoreRefusal> {
        check_spec(spec).map_err(|fault| match fault {
            SpecFault::TextTooLong => CoreRefusal::TextTooLong,
            SpecFault::ZeroTokens => CoreRefusal::ZeroTokens,
            SpecFault::RankOutOfRange => CoreRefusal::RankOutOfRange,
            SpecFault::EmptyWindow => CoreRefusal::EmptyWindow,
        })?;
        let (page_bytes, max_bytes) = (spec.page_bytes, self.config.page_bytes_max);
        let image_bytes = u32::try_from(page_bytes).ok();
        let image_bytes = image_bytes
            .filter(|_| (PAGE_BYTES_MIN..=max_bytes).contains(&page_bytes))
            .ok_or(CoreRefusal::PageSize { page_bytes, max_bytes })?;
        let pool = self.extents.largest_possible_bytes();
        if page_bytes.next_multiple_of(UNIT_BYTES) > pool {
            let tier = "DRAM";
            return Err(CoreRefusal::TooLargeForTier { page_bytes, tier, tier_bytes: pool });
        }
        let largest = self.slots.largest_slot_bytes();
        if !self.slots.is_empty() && u64::from(slot_bytes(image_bytes)) > largest {
            let tier = "SSD";
            return Err(CoreRefusal::TooLargeForTier { page_bytes, tier, tier_bytes: largest });
        }
        let found = self.sessions.get_mut(session).filter(|session| !session.closing);
        let found = found.ok_or(CoreRefusal::UnknownSession)?;
        let limit = self.config.scopes_per_session_max;
        if found.scopes.len() >= limit {
            return Err(CoreRefusal::LimitReached { what: "scope", limit });
        }
        let uid = found.uid;
        let fingerprint = namespace_fingerprint(spec);
        match self.namespaces.find(&fingerprint) {
            None => self.make_room_for_namespace(uid)?,
            Some(known) if self.namespaces.get(known).image_bytes != image_bytes => {
                let found_bytes = self.namespaces.get(known).image_bytes;
                return Err(CoreRefusal::ForeignImages { page_bytes, found_bytes });
            }
            _ => {}
        }
        let dependency = Some(spec.dependency);
        let label = namespace_label(spec);
        let id = self.namespaces.intern(fingerprint, dependency, image_bytes, label);
        let namespace = self.namespaces.get_mut(id);
        namespace.scopes += 1;
        namespace.owner.get_or_insert(uid);
        let found = self.sessions.get_mut(session).ok_or(CoreRefusal::UnknownSession)?;
        found.scopes.push(Scope::One(id));
        Ok((ScopeId(found.scopes.len() as u32 - 1), page_bytes))
    }

    /// Makes sure that a user may have one more namespace.
    fn make_room_for_namespace(&mut self, uid: u32) -> Result<(), CoreRefusal> {
        while let Err(refusal) = self.has_room_for_namespace(uid) {
            if !self.give_up_namespace() {
                return Err(refusal);
            }
        }
        Ok(())
    }

    fn has_room_for_namespace(&self, uid: u32) -> Result<(), CoreRefusal> {
        let limit = self.config.namespaces_max;
        if self.namespaces.len() >= limit {
            return Err(CoreRefusal::LimitReached { what: "namespace", limit });
        }
        let kept = namespaces_kept(limit);
        let (held, share) = (self.namespaces.held_by(uid), kept / 2);
        if self.namespaces.len() >= limit - kept && held >= share {
            return Err(CoreRefusal::NamespaceShare { uid, held, kept, limit, share });
        }
        Ok(())
    }

    /// Gives the place of a namespace up that nothing refers to: no session, no page in any tier,
    /// nothing that is still to be dropped or found on SSD. False when there is none.
    fn give_up_namespace(&mut self) -> bool {
        if self.is_recovering() {
            return false;
        }
        let (pages, doomed) = (&self.pages, &self.doomed);
        self.namespaces.give_up_one(|id, namespace| {
            namespace.scopes == 0 && pages.len_of(id) == 0 && !doomed.contains(&id)
        })
    }

    /// Names a set of namespaces, for queries over several ranks or groups. Returns its scope and
    /// the bytes of one page of every member.
    ///
    /// # Errors
    /// An unknown or repeated member, or a limit.
    pub fn define_set(
        &mut self,
        session: SessionId,
        members: &[ScopeId],
    ) -> Result<(ScopeId, u64), CoreRefusal> {
        let found = self.sessions.get_mut(session).filter(|session| !session.closing);
        let found = found.ok_or(CoreRefusal::UnknownSession)?;
        let bad = CoreRefusal::BadSet { members: members.len() };
        if members.is_empty() || members.len() > SCOPE_MEMBERS_MAX {
            return Err(bad);
        }
        let limit = self.config.scopes_per_session_max;
        if found.scopes.len() >= limit {
            return Err(CoreRefusal::LimitReached { what: "scope", limit });
        }
        let mut set = Vec::with_capacity(members.len());
        let mut page_bytes = 0;
        for member in members {
            match found.scope(*member) {
                Some(Scope::One(namespace)) if !set.contains(namespace) => {
                    page_bytes += u64::from(self.namespaces.get(*namespace).image_bytes);
                    set.push(*namespace);
                }
                Some(_) => return Err(bad),
                None => return Err(CoreRefusal::UnknownScope(member.0)),
            }
        }
        found.scopes.push(Scope::Set(set));
        Ok((ScopeId(found.scopes.len() as u32 - 1), page_bytes))
    }

    /// Registers a region of `device_pages` pages of a namespace.
    ///
    /// # Errors
    /// An unknown scope, a set, no pages, or a limit.
    pub fn register_region(
        &mut self,
        session: SessionId,
        scope: ScopeId,
        device_pages: u32,
        kind: RegionKind,
    ) -> Result<RegionId, CoreRefusal> {
        let found = self.sessions.get_mut(session).filter(|session| !session.closing);
        let found = found.ok_or(CoreRefusal::UnknownSession)?;
        if device_pages == 0 {
            return Err(CoreRefusal::NoPages);
        }
        let namespace = match found.scope(scope) {
            Some(Scope::One(namespace)) => *namespace,
            Some(Scope::Set(_)) => return Err(CoreRefusal::RegionOfSet(scope.0)),
            None => return Err(CoreRefusal::UnknownScope(scope.0)),
        };
        let limit = self.config.regions_per_session_max;
        let live = found.regions.iter().flatten().count();
        if live >= limit || found.regions.len() >= REGION_IDS_MAX {
            return Err(CoreRefusal::LimitReached { what: "region", limit });
        }
        let region = Region { namespace, device_pages, kind, users: 0, ending: None };
        found.regions.push(Some(region));
        Ok(RegionId(found.regions.len() as u32 - 1))
    }

    /// Appends events to the pool of a session. Returns the index of the first.
    ///
    /// # Errors
    /// An unknown session, or a limit.
    pub fn register_events(
        &mut self,
        session: SessionId,
        count: usize,
    ) -> Result<u32, CoreRefusal> {
        let found = self.sessions.get_mut(session).filter(|session| !session.closing);
        let found = found.ok_or(CoreRefusal::UnknownSession)?;
        let limit = self.config.events_per_session_max;
        let first = found.events.len();
        if count > limit - first {
            return Err(CoreRefusal::LimitReached { what: "event", limit });
        }
        found.events.resize(first + count, false);
        Ok(first as u32)
    }

    /// Bytes of a page image of a namespace that a session defined; `None` for sets and unknown
    /// scopes.
    pub fn image_bytes(&self, session: SessionId, scope: ScopeId) -> Option<u32> {
        match self.sessions.get(session)?.scope(scope)? {
            Scope::One(namespace) => Some(self.namespaces.get(*namespace).image_bytes),
            Scope::Set(_) => None,
        }
    }
}
