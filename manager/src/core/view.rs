//! What inspection sees: plain copies, made once a turn at most.

use orbitkv_shm_protocol::ids::{EngineId, LeaseId, OperationId, PageHash, RegionId, SessionId};
use orbitkv_shm_protocol::record::RequestKind;

use super::Core;
use super::effect::Effects;
use super::event::Nanos;
use super::in_flight::InFlight;
use super::index::PageId;
use super::job::Stage;
use super::slots::Intake;
use super::stats::{Gauges, Stats};

/// A session as inspection shows it.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "names and units say it")]
pub struct SessionView {
    pub session: SessionId,
    pub engine: EngineId,
    pub outstanding: u32,
    pub leased_bytes: u64,
    pub regions: u32,
    pub closing: bool,
}

/// An operation under way.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "names and units say it")]
pub struct OperationView {
    pub session: SessionId,
    pub operation: OperationId,
    pub kind: RequestKind,
    pub stage: &'static str,
    pub queued_ns: Nanos,
}

/// A lease.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "names and units say it")]
pub struct LeaseView {
    pub lease: LeaseId,
    pub group: Option<EngineId>,
    pub session: Option<SessionId>,
    pub bytes: u64,
    pub pages: u32,
    pub expires_ns: Nanos,
}

/// A namespace and where its pages are.
#[derive(Clone, Debug)]
#[allow(missing_docs, reason = "names and units say it")]
pub struct NamespaceView<'a> {
    pub label: &'a str,
    pub page_bytes: u64,
    pub dram_pages: u64,
    pub ssd_pages: u64,
}

/// What an administrative eviction did.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Evicted {
    /// Pages that left DRAM.
    pub pages: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Pages that stay: leased, or touched by a copy, read or write.
    pub pages_kept: u64,
}

/// An administrative eviction under way.
#[derive(Clone, Copy, Debug, Default)]
pub struct Eviction {
    /// Pages that became the hottest after so many touches are not looked at.
    before: u64,
    /// Everything up to this page stays.
    passed: Option<(PageId, PageHash)>,
    /// Something went since the coldest page was looked at.
    moved: bool,
    evicted: Evicted,
}

impl Core {
    /// Counters since start.
    pub fn stats(&self) -> &Stats {
        &self.stats
    }

    /// What is held now.
    pub fn gauges(&self) -> Gauges {
        let in_flight = self.flow.ssd.total();
        Gauges {
            pool_capacity_bytes: self.extents.capacity_bytes(),
            pool_used_bytes: self.extents.capacity_bytes() - self.extents.free_bytes(),
            pool_pinned_bytes: self.pinned_bytes,
            pool_draining_bytes: self.draining_bytes,
            pool_largest_free_bytes: self.extents.largest_free_bytes(),
            pages: self.pages.len() as u64,
            dram_pages: self.dram_pages,
            ssd_pages: self.ssd_pages,
            leases: self.leases.len() as u64,
            leased_bytes: self.budget.total.used(),
            speculative_bytes: self.budget.speculative.used(),
            query_budget_bytes: self.budget.total.limit(),
            speculative_budget_bytes: self.budget.speculative.limit(),
            spill_pages: self.spill.len() as u64,
            spill_bytes: self.spill_bytes,
            write_budget_bytes: self.write_budget.map_or(0, |budget| budget.left_bytes()),
            history_keys: self.history.len() as u64,
            namespaces: self.namespaces.len() as u64,
            operations: self.jobs.len() as u64,
            reads_in_flight: in_flight.reads.into(),
            writes_in_flight: in_flight.writes.into(),
            writes_in_flight_bytes: in_flight.write_bytes,
            copies_in_flight: self.flow.copies_in_flight().into(),
            sessions: self.sessions.len() as u64,
        }
    }

    /// Bytes that the leases of one session may hold.
    pub fn session_budget_bytes(&self) -> u64 {
        self.budget.session_limit
    }

    /// `(used_bytes, used_slots)` of one SSD device.
    pub fn device_usage(&self, device: usize) -> (u64, u64) {
        self.slots.usage(device)
    }

    /// Stops or resumes the use of one SSD device for new images.
    pub fn set_device_accepts_writes(&mut self, device: u16, accepts: bool) {
        self.set_device_intake(device, if accepts { Intake::All } else { Intake::Nothing });
    }

    /// What one SSD device takes of new images: nothing after a write that ended with
    /// [`IoFault::Off`](super::IoFault::Off), or the one that was let through.
    pub fn device_intake(&self, device: u16) -> Intake {
        self.slots.intake(device)
    }

    /// Says what one SSD device takes of new images.
    pub fn set_device_intake(&mut self, device: u16, intake: Intake) {
        self.slots.set_intake(device, intake);
    }

    /// Whether pages can be read from one SSD device, as far as `core` was told.
    pub fn device_is_readable(&self, device: u16) -> bool {
        self.flow.ssd.is_readable(device)
    }

    /// Whether every offered page has its outcome and no write is in flight.
    pub fn spill_is_drained(&self) -> bool {
        self.spill.is_empty() && self.flow.ssd.total().writes == 0
    }

    /// Whether a page that waits to be written can be: it is known what is on SSD, some device takes
    /// writes, and the write budget is not used up.
    pub fn spill_can_go_on(&self) -> bool {
        self.flow.ssd.total().writes > 0
            || (!self.spill.is_empty()
                && !self.is_in_census()
                && !self.is_over_write_budget()
                && self.slots.take_writes())
    }

    /// Whether nothing is in flight: no copy, read or write, nor the record of a forget.
    pub fn is_quiet(&self) -> bool {
        let on_ssd = self.flow.forgets() == 0 && self.flow.ssd.total() == InFlight::default();
        self.flow.copies_in_flight() == 0 && on_ssd
    }

    /// Operations and hints under way: those that did not end with the event that began them.
    pub fn jobs(&self) -> usize {
        self.jobs.len()
    }

    /// When [`super::Event::Tick`] and a [`pump`](Self::pump) next have something to do.
    pub fn next_deadline(&self) -> Option<Nanos> {
        let expiry = self.leases.next_expiry().map(|(expires, _)| expires);
        let job = (self.next_deadline != Nanos::MAX).then_some(self.next_deadline);
        // Pages wait for more of the write budget.
        let budget = self.write_budget.as_ref().filter(|_| !self.spill.is_empty());
        let writes = budget.and_then(|budget| budget.resumes());
        expiry.into_iter().chain(job).chain(writes).min()
    }

    /// Begins to drop every page from DRAM that nothing holds. Pages that are on SSD stay there.
    pub fn begin_eviction(&self) -> Eviction {
        Eviction { before: self.touches, ..Eviction::default() }
    }

    /// Looks at a bounded number of pages and drops those that may go. The counts once nothing is
    /// left to drop. Pages that are saved or used after the begin stay.
    pub fn evict_some(&mut self, eviction: &mut Eviction, out: &mut Effects) -> Option<Evicted> {
        for _ in 0..self.config.pages_dropped_per_turn {
            // Somebody else may have evicted the page up to which all was looked at: once more.
            let passed = eviction.passed.filter(|&(page, hash)| {
                self.dram.contains(&self.pages, page) && self.pages[page].hash == hash
            });
            let next = match passed {
                Some((page, _)) => self.dram.hotter(&self.pages, page),
                None => self.dram.coldest(),
            };
            let Some(page) = next else {
                // A parent becomes free to go when its last child went.
                if std::mem::take(&mut eviction.moved) {
                    eviction.passed = None;
                    continue;
                }
                eviction.evicted.pages_kept = self.namespaces.iter().map(|of| of.dram_pages).sum();
                return Some(eviction.evicted);
            };
            let found = &self.pages[page];
            let leaf = self.pages.first_child(page).is_none();
            let stays = found.io > 0 || (found.slot.is_none() && !leaf);
            if stays || found.touched > eviction.before {
                eviction.passed = Some((page, found.hash));
                continue;
            }
            eviction.passed = passed;
            eviction.moved = true;
            eviction.evicted.pages += 1;
            eviction.evicted.bytes += found.extent.map_or(0, |extent| u64::from(extent.bytes));
            self.evict(page, out);
        }
        None
    }

    /// Every session.
    pub fn session_views(&self) -> impl Iterator<Item = SessionView> {
        self.sessions.iter().map(|(session, found)| SessionView {
            session,
            engine: found.engine,
            outstanding: found.outstanding,
            leased_bytes: found.leased_bytes,
            regions: found.regions.iter().flatten().count() as u32,
            closing: found.closing,
        })
    }

    /// Every operation under way.
    pub fn operation_views(&self) -> impl Iterator<Item = OperationView> {
        self.jobs.iter().map(|(_, job)| OperationView {
            session: job.session,
            operation: job.operation,
            kind: job.kind,
            stage: match job.stage {
                Stage::Idle => "idle",
                _ if job.fence_ahead().is_some() && job.copies > 0 => "waiting for its fence",
                Stage::Save { .. } => "copying",
                Stage::Wait { .. } => "waiting for budget",
                Stage::Fill { .. } => "reading",
                Stage::Restore { waits_for_memory: true, .. } => "waiting for memory",
                Stage::Restore { reading: 1.., .. } => "reading",
                Stage::Restore { .. } => "copying",
                Stage::Forget { .. } => "recording",
                Stage::Unregister { .. } | Stage::Drain => "waiting for others",
            },
            queued_ns: job.queued_ns,
        })
    }

    /// Every lease.
    pub fn lease_views(&self) -> impl Iterator<Item = LeaseView> {
        self.leases.iter().map(|(lease, found)| LeaseView {
            lease,
            group: found.group,
            session: found.session,
            bytes: found.bytes,
            pages: found.live_pages,
            expires_ns: found.expires,
        })
    }

    /// Every namespace.
    pub fn namespace_views(&self) -> impl Iterator<Item = NamespaceView<'_>> {
        self.namespaces.iter().map(|namespace| NamespaceView {
            label: &namespace.label,
            page_bytes: namespace.image_bytes.into(),
            dram_pages: namespace.dram_pages,
            ssd_pages: namespace.ssd_pages,
        })
    }

    /// Whether a session still has the region and may use it.
    pub fn has_region(&self, session: SessionId, region: RegionId) -> bool {
        self.sessions.get(session).is_some_and(|session| session.region(region).is_some())
    }
}
