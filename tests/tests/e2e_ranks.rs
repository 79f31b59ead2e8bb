//! Who may see which pages: ranks of one engine share a lease, engines and namespaces share nothing.

use orbitkv_engine::{
    Client, Code, Completion, Connect, Deadline, DependencySpec, EngineId, Lease, LeaseId,
    LeaseParts, NamespaceSpec, PageHash, QueryMode, Refusal, RegionLayout, RegisterError,
    RestoreOptions, Scope, Segment, Status, SubmitError, engine_id_random,
};
use orbitkv_shm_protocol::inspect::Snapshot;
use orbitkv_shm_protocol::telemetry::{LeaseEnd, Metric};
use orbitkv_tests::engine::{Engine, blocks, hashes, namespace};
use orbitkv_tests::engine_process::{EngineProcess, Identity};
use orbitkv_tests::manager::{Manager, PATIENCE};
use orbitkv_tests::setup;

const KIB: u64 = 1024;
const PAGE: u64 = 32 * KIB;
const RANKS: u32 = 4;
const PAGES: u32 = 12;

fn identity(engine: EngineId, rank: u32) -> Identity {
    Identity { rank, ranks: RANKS, ..Identity::new(engine, "ranks", PAGE, PAGES) }
}

/// An engine: a scheduler in this process, a worker a rank in others.
struct Ranks {
    scheduler: Client,
    set: Scope,
    workers: Vec<EngineProcess>,
}

impl Ranks {
    fn start(manager: &Manager) -> Self {
        let engine = engine_id_random().unwrap();
        let mut scheduler = Connect::new(manager.socket()).engine_id(engine).connect().unwrap();
        let scopes: Vec<_> = (0..RANKS)
            .map(|rank| scheduler.define_namespace(&identity(engine, rank).spec()).unwrap())
            .collect();
        let set = scheduler.define_set(&scopes).unwrap();
        assert_eq!(set.page_bytes(), u64::from(RANKS) * PAGE);
        let workers = (0..RANKS)
            .map(|rank| EngineProcess::start(manager.setup(), &identity(engine, rank)))
            .collect();
        Self { scheduler, set, workers }
    }

    /// What the scheduler finds of the first pages of a sequence.
    fn query(&mut self, sequence: u64, mode: QueryMode) -> Completion {
        let pages = hashes(sequence, 0..PAGES);
        self.scheduler.query(&self.set, &pages, mode, Deadline::DEFAULT).unwrap();
        self.scheduler.wait(PATIENCE).unwrap().expect("an answer in time")
    }
}

/// Goal: one query speaks for all ranks, its lease reaches every process of the engine, and ends
/// with the last rank. Method: rank 2 saved less than the others, so the hit is what it has; each
/// worker restores its own bytes, from DRAM, then from SSD.
#[test]
fn ranks_restore_their_own_part_of_one_lease() {
    let manager = setup!().ssd("256MiB").start();
    let mut ranks = Ranks::start(&manager);
    for (rank, worker) in ranks.workers.iter_mut().enumerate() {
        let pages = if rank == 2 { 7 } else { PAGES };
        assert_eq!(worker.ask(&format!("save 3 {pages}")), format!("Ok {pages} 0"));
    }
    for (round, mode) in [QueryMode::Demand, QueryMode::Candidate].into_iter().enumerate() {
        let hit = ranks.query(3, mode);
        assert_eq!((hit.status, hit.pages), (Status::Ok, 7), "the least that any rank has");
        assert_eq!(hit.bytes, u64::from(7 * RANKS) * PAGE, "every rank's pages are counted");
        let lease = hit.lease.unwrap();
        for (rank, worker) in ranks.workers.iter_mut().enumerate() {
            manager.settle("the lease is held", |seen| seen.leases.len() == 1);
            assert_eq!(worker.restore(&lease, 3, 7), "Ok none right=7 untouched=0", "{rank}");
        }
        manager.settle_empty();
        manager.counted(Metric::LeasesEnded(LeaseEnd::Restored), round as u64 + 1);
        let late = ranks.workers[0].restore(&lease, 3, 7);
        assert_eq!(late, "Error unknown_lease right=0 untouched=7");
        manager.evict();
    }
    // Any session of the group may end it for all.
    let lease = ranks.query(3, QueryMode::Candidate).lease.unwrap();
    assert_eq!(ranks.workers[1].release(&lease), "Ok none");
    assert_eq!(ranks.workers[3].restore(&lease, 3, 7), "Error unknown_lease right=0 untouched=7");
    manager.settle_empty();
}

/// Goal: a hint over all ranks reads every rank's pages and counts each page of the prompt once.
#[test]
fn a_prepare_of_a_set_reads_every_ranks_pages() {
    let manager = setup!().ssd("128MiB").start();
    let mut ranks = Ranks::start(&manager);
    for worker in &mut ranks.workers {
        worker.ask(&format!("save 1 {PAGES}"));
    }
    manager.evict();
    ranks.scheduler.prepare(&ranks.set, &hashes(1, 0..PAGES)).unwrap();
    let hint = ranks.scheduler.wait(PATIENCE).unwrap().expect("an answer in time");
    assert_eq!((hint.status, hint.pages), (Status::Ok, PAGES));
    manager.counted(Metric::SsdReadPages, u64::from(RANKS * PAGES));
    manager.settle_empty();
    let hit = ranks.query(1, QueryMode::Demand);
    assert_eq!((hit.pages_dram, hit.pages_ssd), (PAGES, 0));
}

/// Goal: a lease outlives the session that took it while its group lives, and no longer.
#[test]
fn a_lease_belongs_to_the_group_and_ends_with_its_last_session() {
    let manager = setup!().start();
    let mut ranks = Ranks::start(&manager);
    for worker in &mut ranks.workers {
        worker.ask(&format!("save 1 {PAGES}"));
    }
    let lease = ranks.query(1, QueryMode::Demand).lease.unwrap();
    ranks.scheduler.close();
    manager.settle("the scheduler is gone", |s| s.sessions.len() == RANKS as usize);
    let first = ranks.workers[0].restore(&lease, 1, PAGES);
    assert_eq!(first, format!("Ok none right={PAGES} untouched=0"));
    manager.settle("three ranks are left", |seen| {
        seen.counters.get(Metric::LeasesHeld) == 1
            && seen.budget.total_bytes == 3 * u64::from(PAGES) * PAGE
    });
    ranks.workers.clear();
    manager.settle_empty();
    manager.counted(Metric::LeasesEnded(LeaseEnd::Orphaned), 1);
}

/// Goal: for another engine a lease does not exist, and asking for it changes nothing. Method: the
/// stranger knows every number of the lease but the group; then it claims a lease of its own group
/// with the same name.
#[test]
fn sec_09_another_engines_lease_is_unknown() {
    let manager = setup!().start();
    let socket = manager.socket();
    let mut owner = Engine::attach(&socket, namespace("sec-09", PAGE), 8);
    let mut stranger = Engine::attach(&socket, namespace("sec-09", PAGE), 8);
    let pages = hashes(1, 0..8);
    let _ = owner.save(&blocks(&pages, 0)).ok();
    let lease = owner.query(&pages, QueryMode::Demand).ok().leased();
    let before = manager.settle("the lease is held", |seen| seen.leases.len() == 1);

    let target = blocks(&pages, 0);
    let region = stranger.region;
    let options = RestoreOptions::default();
    let plain = stranger.client.restore(&lease, 0, &region, &target, options);
    assert_eq!(plain, Err(SubmitError::StaleHandle), "not even asked");
    let engine = stranger.client.engine_id();
    let forged = Lease::from_parts(LeaseParts { engine, ..lease.to_parts() });
    let invented = Lease::from_parts(LeaseParts { lease: LeaseId(u64::MAX), ..forged.to_parts() });
    for lease in [forged, invented] {
        let restored = stranger.restore(&lease, 0, &target);
        assert_eq!((restored.status, restored.code), (Status::Error, Code::UnknownLease));
        assert!(target.iter().all(|block| stranger.is_poison(block)));
        let released = stranger.release(lease);
        assert_eq!((released.status, released.code), (Status::Error, Code::UnknownLease));
    }
    let theirs = owner.region;
    let foreign = stranger.client.save(&theirs, &target);
    assert_eq!(foreign, Err(SubmitError::StaleHandle));
    drop(stranger);
    let after = manager.settle("the stranger is gone", |seen| seen.sessions.len() == 1);
    let of = |seen: &Snapshot| {
        let owner = &seen.sessions[0];
        (owner.id, owner.leased_bytes, owner.outstanding, owner.regions, seen.leases[0].id)
    };
    assert_eq!(of(&after), of(&before));
    let _ = owner.restore(&lease, 0, &target).ok();
    owner.check(&target);
}

/// Namespaces that differ from the first, one in each field of the identity.
fn neighbours() -> Vec<(&'static str, NamespaceSpec)> {
    let base = || namespace("weights-1", PAGE);
    vec![
        ("base", base()),
        ("another model", NamespaceSpec { model: "weights-2".into(), ..base() }),
        ("dtype", NamespaceSpec { dtype: "fp8".into(), ..base() }),
        ("page tokens", NamespaceSpec { page_tokens: 16, ..base() }),
        ("page bytes", NamespaceSpec { page_bytes: 2 * PAGE, ..base() }),
        ("layout", NamespaceSpec { layout: "HND".into(), ..base() }),
        ("group", NamespaceSpec { group: 1, ..base() }),
        ("rank", NamespaceSpec { tp_rank: 1, tp_size: 2, ..base() }),
        ("rank 0 of 2", NamespaceSpec { tp_size: 2, ..base() }),
        ("stage", NamespaceSpec { pp_rank: 1, pp_size: 2, ..base() }),
        ("adapter A", NamespaceSpec { adapter: "A@1".into(), ..base() }),
        ("adapter B", NamespaceSpec { adapter: "B@1".into(), ..base() }),
        ("adapter A, new weights", NamespaceSpec { adapter: "A@2".into(), ..base() }),
        ("salt 1", NamespaceSpec { salt: "1".into(), ..base() }),
        ("salt 2", NamespaceSpec { salt: "2".into(), ..base() }),
        ("a salt like an adapter", NamespaceSpec { salt: "A@1".into(), ..base() }),
        ("dependency", NamespaceSpec { dependency: DependencySpec::Window(4), ..base() }),
    ]
}

/// Goal: the same tokens under another salt, adapter, dtype, weights, layout or rank are other
/// pages, in DRAM, on SSD and after a restart (SEC-07, ENG-01, ENG-03, ENG-15). Method: the
/// namespaces save the same hashes one after the other; each must miss before its own save and
/// then find its own bytes whatever the others did.
#[test]
fn sec_07_eng_01_eng_03_namespaces_never_share_a_page() {
    let mut manager = setup!().ssd("256MiB").start();
    let pages: Vec<PageHash> = hashes(7, 0..4);
    let all = neighbours();
    for (name, spec) in &all {
        let mut engine = Engine::attach(&manager.socket(), spec.clone(), 4);
        assert_eq!(engine.query(&pages, QueryMode::Demand).ok().pages, 0, "{name}");
        assert_eq!(engine.save(&blocks(&pages, 0)).ok().pages, 4, "{name}");
    }
    for place in ["DRAM", "SSD", "SSD after a restart"] {
        for (name, spec) in &all {
            let mut engine = Engine::attach(&manager.socket(), spec.clone(), 4);
            assert_eq!(engine.restore_all(&pages), 4, "{name} in {place}");
        }
        // Never saved under it: nothing of the others is found.
        let stranger = NamespaceSpec { salt: "3".into(), ..namespace("weights-1", PAGE) };
        let mut engine = Engine::attach(&manager.socket(), stranger, 4);
        assert_eq!(engine.restore_all(&pages), 0, "another salt in {place}");
        match place {
            "DRAM" => manager.evict(),
            _ => manager = manager.stop().start(),
        }
    }
}

/// Goal: a layout whose bytes do not add up to the namespace's page is refused by name (ENG-15).
#[test]
fn eng_15_a_layout_of_another_size_is_a_conflict() {
    let manager = setup!().start();
    let mut engine = Engine::attach(&manager.socket(), namespace("eng-15", PAGE), 4);
    let file = engine.device.file();
    let memory = engine.client.register_memfd(file, 4 * PAGE).unwrap();
    let segment = |length| Segment { memory, offset: 0, stride: PAGE, length, layer: 0 };
    let scope = engine.scope;
    for segments in [vec![segment(PAGE / 2)], vec![segment(PAGE); 2]] {
        let layout = RegionLayout { scope, pages: 2, segments };
        let refused = engine.client.register_region(&layout);
        let Err(RegisterError::Refused { refusal, .. }) = refused else { panic!("{refused:?}") };
        assert_eq!(refusal, Refusal::LayoutConflict);
    }
}
