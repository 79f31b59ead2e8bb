//! Leases: lists of pinned pages under a byte budget, with an expiry.

use orbitkv_shm_protocol::ids::{EngineId, LeaseId, SessionId};

use super::event::Nanos;
use super::index::PageId;
use super::limits::{LEASE_INDEX_BITS as INDEX_BITS, LEASES_MAX};
use super::namespace::NamespaceId;
use super::stats::LeaseEnd;

const NIL: u32 = u32::MAX;

/// One page of a lease.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct LeasedPage {
    pub(super) page: PageId,
    /// A restore named it and did not keep it: no longer pinned by this lease.
    pub(super) ended: bool,
}

/// The pages of one rank or group.
#[derive(Clone, Debug)]
pub(super) struct LeasePart {
    pub(super) namespace: NamespaceId,
    pub(super) image_bytes: u32,
    /// Position of the first leased page within the query.
    pub(super) first: u32,
    /// Range of [`Lease::pages`].
    pub(super) start: u32,
    pub(super) len: u32,
}

/// One lease.
#[derive(Debug, Default)]
pub(super) struct Lease {
    serial: u64,
    pub(super) group: Option<EngineId>,
    /// Whose budget it counts against.
    pub(super) session: Option<SessionId>,
    pub(super) speculative: bool,
    pub(super) bytes: u64,
    pub(super) expires: Nanos,
    pub(super) parts: Vec<LeasePart>,
    pub(super) pages: Vec<LeasedPage>,
    /// Pages that are not `ended`.
    pub(super) live_pages: u32,
    /// Restores that use it now.
    pub(super) users: u32,
    /// Released, expired, or without a group: refused to new work, ended when `users` is 0.
    pub(super) closed: bool,
    /// How it ends, or ended.
    pub(super) end: LeaseEnd,
    /// Its query has been answered. Until then only the query may end it.
    pub(super) granted: bool,
    /// Serial and group of the last lease in this place that expired, to tell who still names it.
    expired: Option<(u64, EngineId)>,
    older: u32,
    newer: u32,
}

/// All leases, oldest expiry first.
#[derive(Debug)]
pub(super) struct Leases {
    table: Vec<Lease>,
    free: Vec<u32>,
    next_serial: u64,
    oldest: u32,
    newest: u32,
    live: usize,
}

impl Leases {
    pub(super) fn new() -> Self {
        Self {
            table: Vec::new(),
            free: Vec::new(),
            next_serial: 1,
            oldest: NIL,
            newest: NIL,
            live: 0,
        }
    }

    pub(super) const fn len(&self) -> usize {
        self.live
    }

    pub(super) const fn is_full(&self) -> bool {
        self.live >= LEASES_MAX
    }

    /// An empty lease. The caller fills it, then [`start_clock`](Self::start_clock)s it.
    pub(super) fn open(
        &mut self,
        group: EngineId,
        session: SessionId,
        speculative: bool,
    ) -> LeaseId {
        let index = self.free.pop().unwrap_or_else(|| {
            self.table.push(Lease::default());
            self.table.len() as u32 - 1
        });
        let serial = self.next_serial;
        self.next_serial += 1;
        self.live += 1;
        let lease = &mut self.table[index as usize];
        lease.serial = serial;
        lease.group = Some(group);
        lease.session = Some(session);
        lease.speculative = speculative;
        lease.bytes = 0;
        lease.expires = Nanos::MAX;
        lease.parts.clear();
        lease.pages.clear();
        lease.live_pages = 0;
        lease.users = 0;
        lease.closed = false;
        lease.end = LeaseEnd::Restored;
        lease.granted = false;
        lease.older = NIL;
        lease.newer = NIL;
        LeaseId(serial << INDEX_BITS | u64::from(index))
    }

    fn slot(&self, id: LeaseId) -> Option<usize> {
        let index = (id.0 & ((1 << INDEX_BITS) - 1)) as usize;
        let lease = self.table.get(index)?;
        (lease.serial == id.0 >> INDEX_BITS && lease.serial != 0).then_some(index)
    }

    pub(super) fn get(&self, id: LeaseId) -> Option<&Lease> {
        self.slot(id).map(|index| &self.table[index])
    }

    /// Whether a lease of this group expired, as far as is still known: its place in the table
    /// remembers the last one. Others learn nothing.
    pub(super) fn has_expired(&self, id: LeaseId, group: EngineId) -> bool {
        let index = (id.0 & ((1 << INDEX_BITS) - 1)) as usize;
        self.table.get(index).is_some_and(|l| l.expired == Some((id.0 >> INDEX_BITS, group)))
    }

    pub(super) fn get_mut(&mut self, id: LeaseId) -> Option<&mut Lease> {
        self.slot(id).map(|index| &mut self.table[index])
    }

    /// Sets the expiry. All leases live equally long, so appending keeps the list in order.
    pub(super) fn start_clock(&mut self, id: LeaseId, expires: Nanos) {
        let Some(index) = self.slot(id) else { return };
        let newest = self.newest;
        let lease = &mut self.table[index];
        lease.expires = expires;
        lease.granted = true;
        lease.older = newest;
        lease.newer = NIL;
        match newest {
            NIL => self.oldest = index as u32,
            at => self.table[at as usize].newer = index as u32,
        }
        self.newest = index as u32;
    }

    /// Stops the clock of a lease that ends or has expired.
    pub(super) fn stop_clock(&mut self, id: LeaseId) {
        let Some(index) = self.slot(id) else { return };
        let (older, newer) = (self.table[index].older, self.table[index].newer);
        let index = index as u32;
        if older == NIL && newer == NIL && self.oldest != index {
            return;
        }
        match older {
            NIL => self.oldest = newer,
            at => self.table[at as usize].newer = newer,
        }
        match newer {
            NIL => self.newest = older,
            at => self.table[at as usize].older = older,
        }
        let lease = &mut self.table[index as usize];
        lease.older = NIL;
        lease.newer = NIL;
    }

    /// Forgets an ended lease and returns its buffers to the slot for reuse. Its id is never
    /// valid again.
    pub(super) fn close(&mut self, id: LeaseId) {
        let Some(index) = self.slot(id) else { return };
        self.stop_clock(id);
        let lease = &mut self.table[index];
        if lease.granted && lease.end == LeaseEnd::Expired {
            lease.expired = lease.group.map(|group| (lease.serial, group));
        }
        lease.serial = 0;
        lease.group = None;
        lease.session = None;
        lease.parts.clear();
        lease.pages.clear();
        self.live -= 1;
        self.free.push(index as u32);
    }

    /// The lease that expires next.
    pub(super) fn next_expiry(&self) -> Option<(Nanos, LeaseId)> {
        let lease = self.table.get(self.oldest as usize)?;
        Some((lease.expires, LeaseId(lease.serial << INDEX_BITS | u64::from(self.oldest))))
    }

    /// Leases whose clock runs, oldest first. For checks.
    pub(super) fn clocked(&self) -> Vec<LeaseId> {
        let mut listed = Vec::new();
        let (mut next, mut older, mut last) = (self.oldest, NIL, 0);
        while let Some(lease) = self.table.get(next as usize) {
            assert!(lease.older == older && lease.expires >= last, "clock list out of order");
            listed.push(LeaseId(lease.serial << INDEX_BITS | u64::from(next)));
            (older, last, next) = (next, lease.expires, lease.newer);
        }
        assert_eq!(self.newest, older);
        listed
    }

    /// Every live lease.
    pub(super) fn iter(&self) -> impl Iterator<Item = (LeaseId, &Lease)> {
        let live = self.table.iter().enumerate().filter(|(_, lease)| lease.serial != 0);
        live.map(|(index, lease)| (LeaseId(lease.serial << INDEX_BITS | index as u64), lease))
    }
}

impl Lease {
    /// The part of `namespace`, with its position.
    pub(super) fn part(&self, namespace: NamespaceId) -> Option<&LeasePart> {
        self.parts.iter().find(|part| part.namespace == namespace)
    }
}
