//! Goal: without SSD and with one operation at a time, `core` is prefix-aware LRU to the page:
//! same hits, same refusals, same victims in the same order. Method: random tries of prompts against
//! the reference model, for many pool sizes; the order of the whole pool is compared after each
//! operation.

use fastrand::Rng;
use orbitkv_manager::core::CoreConfig;
use orbitkv_shm_protocol::ids::{PageHash, RegionId, ScopeId, SessionId};
use orbitkv_shm_protocol::record::{QueryMode, RequestBody};
use orbitkv_tests::reference::{Reference, Saved};
use orbitkv_tests::world::{World, child, pages, pages_after, spec};

const PAGE: u64 = 4096;

struct Pair {
    world: World,
    model: Reference,
    session: SessionId,
    scope: ScopeId,
    region: RegionId,
}

impl Pair {
    fn new(capacity: usize) -> Self {
        let bytes = capacity as u64 * PAGE;
        let config = CoreConfig {
            query_budget_bytes: bytes,
            session_budget_bytes: bytes,
            report_drops: true,
            ..CoreConfig::with_dram(bytes)
        };
        let mut world = World::new(config, &[]);
        world.check_every = 7;
        let session = world.attach(1);
        let scope = world.namespace(session, &spec("model", PAGE));
        let region = world.region(session, scope, 256);
        Self { world, model: Reference::new(capacity), session, scope, region }
    }

    fn compare(&mut self) {
        assert_eq!(self.world.core.eviction_order(), self.model.order(), "order of the pool");
        let dropped = std::mem::take(&mut self.world.dropped);
        assert_eq!(dropped, self.model.take_dropped(), "victims");
    }

    fn save(&mut self, chain: &[PageHash], from: usize) {
        let entries = match from {
            0 => pages(chain),
            _ => pages_after(chain[from - 1], &chain[from..]),
        };
        let operation = self.world.save(self.session, self.region, &entries);
        self.world.settle();
        let ended = self.world.ended(self.session, operation).completion;
        let (stored, present, refused) = (ended.pages, ended.pages_present, ended.pages_refused);
        assert_eq!(self.model.save(chain, from), Saved { stored, present, refused });
        self.compare();
    }

    /// A query whose hit is restored, in whole or page by page, or let go of.
    fn query(&mut self, chain: &[PageHash], rng: &mut Rng) {
        let (session, region) = (self.session, self.region);
        let query = self.world.query(session, self.scope, QueryMode::Demand, &pages(chain));
        let ended = self.world.ended(session, query).completion;
        let hits = self.model.query(chain);
        assert_eq!(ended.pages as usize, hits, "hits");
        if let Some(lease) = ended.lease {
            match rng.u8(..3) {
                0 => drop(self.world.ask(session, RequestBody::Release { lease })),
                1 => {
                    let hit = pages(&chain[..hits]);
                    self.world.restore(session, region, lease, 0, &hit, false);
                }
                _ => {
                    let hit = pages(&chain[..hits]);
                    self.world.restore(session, region, lease, 0, &hit, true);
                    self.world.settle();
                    self.world.ask(session, RequestBody::Release { lease });
                }
            }
            self.world.settle();
        }
        self.compare();
    }
}

/// A walk down a trie in which some branches are taken more often than others.
fn prompt(rng: &mut Rng, depth_max: usize, branches: u64) -> Vec<PageHash> {
    let mut hashes = Vec::new();
    for _ in 0..rng.usize(1..=depth_max) {
        let branch = if rng.bool() { 0 } else { rng.u64(..branches) };
        hashes.push(child(hashes.last().copied(), branch));
    }
    hashes
}

#[test]
fn every_pool_size_evicts_like_the_model() {
    for capacity in (1..40).chain([64, 100, 180]) {
        let mut rng = Rng::with_seed(capacity as u64);
        // Enough prompts to overflow the pool, few enough to meet again.
        let depth_max = rng.usize(2..16);
        let branches = 2 + capacity as u64 / 4;
        let mut pair = Pair::new(capacity);
        let mut hits = 0;
        for step in 0..400 {
            let chain = prompt(&mut rng, depth_max, branches);
            println!("capacity {capacity} step {step}: {} pages", chain.len());
            match rng.u8(..5) {
                0 | 1 => pair.save(&chain, 0),
                2 => {
                    let from = rng.usize(..chain.len());
                    pair.save(&chain, from);
                }
                _ => {
                    hits += pair.model.hits(&chain);
                    pair.query(&chain, &mut rng);
                }
            }
        }
        assert!(hits > 0 && pair.world.core.stats().evictions > 0, "nothing was put to the test");
        assert_eq!(pair.world.core.gauges().leases, 0);
    }
}

/// The model itself: what a person can check by hand.
#[test]
fn the_model_evicts_the_deepest_of_the_coldest_chain() {
    let mut model = Reference::new(4);
    let a = orbitkv_tests::world::chain(1, 3);
    let b = orbitkv_tests::world::chain(2, 2);
    assert_eq!(model.save(&a, 0).stored, 3);
    assert_eq!(model.save(&b, 0), Saved { stored: 2, present: 0, refused: 0 });
    assert_eq!(model.take_dropped(), [a[2]]);
    assert_eq!(model.order(), [a[1], a[0], b[1], b[0]]);
    // A chain longer than the pool keeps its head.
    let long = orbitkv_tests::world::chain(3, 6);
    assert_eq!(model.save(&long, 0), Saved { stored: 4, present: 0, refused: 2 });
    assert_eq!(model.take_dropped(), [a[1], a[0], b[1], b[0]]);
    assert_eq!(model.query(&a), 0);
}
