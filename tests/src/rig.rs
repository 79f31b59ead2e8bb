//! A world with one engine in it, and the few sentences that most tests begin with.

use orbitkv_manager::core::{CoreConfig, Direction, RegionGeometry};
use orbitkv_shm_protocol::bootstrap::message::NamespaceSpec;
use orbitkv_shm_protocol::ids::{LeaseId, OperationId, PageHash, RegionId, ScopeId, SessionId};
use orbitkv_shm_protocol::record::{QueryMode, RequestBody, Status};

use crate::client::Ended;
use crate::world::{Fate, Work, World, device, is_copy, pages, spec};

/// Bytes of a page in most tests.
pub const PAGE: u64 = 4096;
/// One millisecond of the world's clock.
pub const MILLISECOND: u64 = 1_000_000;

/// A session with one namespace and one region of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Seat {
    /// The session.
    pub session: SessionId,
    /// Its namespace.
    pub scope: ScopeId,
    /// Its region.
    pub region: RegionId,
}

/// A world and the seat of engine 1.
#[derive(Debug)]
pub struct Rig {
    /// Everything.
    pub world: World,
    /// Of engine 1.
    pub seat: Seat,
    spec: NamespaceSpec,
}

impl Rig {
    /// Room for `pages` pages of 4 KiB, all of which may be leased; no SSD.
    pub fn dram(pages: u64) -> Self {
        Self::new(generous(pages * PAGE), &[], spec("model", PAGE))
    }

    /// Room for `dram` pages of 4 KiB and one device of `slots` slots in one region.
    pub fn ssd(dram: u64, slots: u64) -> Self {
        let devices = [device(1, slots * 2 * PAGE)];
        Self::new(generous(dram * PAGE), &devices, spec("model", PAGE))
    }

    /// A world of any kind.
    pub fn new(config: CoreConfig, devices: &[RegionGeometry], spec: NamespaceSpec) -> Self {
        let mut world = World::new(config, devices);
        let seat = take_seat(&mut world, 1, &spec);
        Self { world, seat, spec }
    }

    /// Another session with the same namespace.
    pub fn sit(&mut self, engine: u8) -> Seat {
        take_seat(&mut self.world, engine, &self.spec)
    }

    /// Saves a chain from its root; only its copies end.
    pub fn save(&mut self, hashes: &[PageHash]) -> Ended {
        let Seat { session, region, .. } = self.seat;
        let operation = self.world.save(session, region, &pages(hashes));
        self.world.settle_only(is_copy(Direction::Save));
        self.world.ended(session, operation)
    }

    /// Saves a chain that must be stored in full.
    pub fn stored(&mut self, hashes: &[PageHash]) {
        let ended = self.save(hashes).completion;
        assert_eq!((ended.status, ended.pages as usize), (Status::Ok, hashes.len()), "{ended:?}");
    }

    /// Saves a chain, writes it to SSD and drops it from DRAM.
    pub fn stored_on_ssd_only(&mut self, hashes: &[PageHash]) {
        self.stored(hashes);
        self.world.settle();
        self.world.evict_dram();
        for page in self.world.core.page_views().filter(|page| hashes.contains(&page.hash)) {
            assert!(page.slot.is_some() && page.resident.is_none(), "{page:?}");
        }
    }

    /// A demand query; nothing that it waits for ends.
    pub fn query(&mut self, seat: Seat, hashes: &[PageHash]) -> OperationId {
        self.world.query(seat.session, seat.scope, QueryMode::Demand, &pages(hashes))
    }

    /// Longest hit of a demand query, which is let go of at once. Reads end well.
    pub fn hits(&mut self, hashes: &[PageHash]) -> u32 {
        let operation = self.query(self.seat, hashes);
        self.world.settle();
        let ended = self.world.ended(self.seat.session, operation).completion;
        if let Some(lease) = ended.lease {
            self.release(self.seat, lease);
        }
        ended.pages
    }

    /// Hit of a demand query that must be answered without any work ending.
    pub fn hits_at_once(&mut self, hashes: &[PageHash]) -> u32 {
        let operation = self.query(self.seat, hashes);
        self.world.ended(self.seat.session, operation).completion.pages
    }

    /// A lease on all of `hashes`.
    pub fn lease(&mut self, hashes: &[PageHash]) -> LeaseId {
        self.lease_for(self.seat, hashes)
    }

    /// A lease on all of `hashes` for a seat.
    pub fn lease_for(&mut self, seat: Seat, hashes: &[PageHash]) -> LeaseId {
        let operation = self.query(seat, hashes);
        self.world.settle_only(crate::world::is_read);
        let ended = self.world.ended(seat.session, operation).completion;
        assert_eq!((ended.status, ended.pages as usize), (Status::Ok, hashes.len()), "{ended:?}");
        ended.lease.expect("a lease")
    }

    /// Orders the restore of a lease's first pages.
    pub fn restore(
        &mut self,
        seat: Seat,
        lease: LeaseId,
        hashes: &[PageHash],
        keep: bool,
    ) -> OperationId {
        self.world.restore(seat.session, seat.region, lease, 0, &pages(hashes), keep)
    }

    /// Releases a lease that is there.
    pub fn release(&mut self, seat: Seat, lease: LeaseId) {
        let operation = self.world.ask(seat.session, RequestBody::Release { lease });
        let ended = self.world.ended(seat.session, operation).completion;
        assert_eq!(ended.status, Status::Ok, "{ended:?}");
    }

    /// Cancels an operation.
    pub fn cancel(&mut self, seat: Seat, operation: OperationId) -> OperationId {
        self.world.ask(seat.session, RequestBody::Cancel { operation })
    }

    /// Ends the work at `at` with a fault.
    pub fn fail(&mut self, at: usize, fate: Fate) {
        self.world.finish(at, fate);
    }

    /// Work in flight of one sort.
    pub fn in_flight(&self, wanted: impl Fn(&Work) -> bool) -> usize {
        self.world.work.iter().filter(|work| wanted(work)).count()
    }

    /// Pages in DRAM.
    pub fn resident(&self) -> usize {
        self.world.core.page_views().filter(|page| page.resident.is_some()).count()
    }

    /// Nothing is leased, pinned or under way.
    pub fn assert_at_rest(&self) {
        let gauges = self.world.core.gauges();
        assert_eq!((gauges.operations, gauges.leases), (0, 0));
        assert_eq!((gauges.leased_bytes, gauges.speculative_bytes), (0, 0));
        assert_eq!((gauges.pool_pinned_bytes, gauges.pool_draining_bytes), (0, 0));
        assert!(self.world.core.is_quiet() && self.world.work.is_empty());
    }
}

fn take_seat(world: &mut World, engine: u8, spec: &NamespaceSpec) -> Seat {
    let session = world.attach(engine);
    let scope = world.namespace(session, spec);
    let region = world.region(session, scope, 512);
    Seat { session, scope, region }
}

/// A pool of which everything may be leased, with everything in flight that is asked for.
pub fn generous(bytes: u64) -> CoreConfig {
    CoreConfig {
        query_budget_bytes: bytes,
        speculative_budget_bytes: bytes / 4,
        session_budget_bytes: bytes,
        ..CoreConfig::with_dram(bytes)
    }
}
