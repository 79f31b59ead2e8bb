//! `/metrics` and `/healthz` of a real Manager tell the truth (MET-01, 03, 05, 07).

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::FileExt;
use std::path::Path;

use orbitkv_engine::{
    Client, Code, Connect, Deadline, EngineId, NamespaceSpec, PageHash, QueryMode, Status,
};
use orbitkv_shm_protocol::inspect::LifeState;
use orbitkv_shm_protocol::telemetry::{Metric, PrepareOutcome, RefuseReason, families};
use orbitkv_tests::engine::{Engine, Shape, Way, blocks, hashes, image, namespace};
use orbitkv_tests::manager::{Manager, Setup};
use orbitkv_tests::prometheus::{Exposition, address, get, parse, scrape};
use orbitkv_tests::setup;
use rustix::process::{Signal, kill_process};

const KIB: u64 = 1024;
const MIB: u64 = 1024 * KIB;

fn with_http() -> Setup {
    setup!().flag("--http", "127.0.0.1:0")
}

/// Changes one byte of a page image in the file of a tier, wherever it lies.
fn damage(file: &Path, spec: &NamespaceSpec, hash: &PageHash) {
    let image = image(spec, hash);
    let file = File::options().read(true).write(true).open(file).unwrap();
    let bytes = file.metadata().unwrap().len();
    let mut head = [0; 64];
    // Slots start at multiples of 4 KiB.
    let slot = (0..bytes).step_by(4096).find(|&offset| {
        file.read_exact_at(&mut head, offset).is_ok() && head == image[..head.len()]
    });
    let middle = slot.expect("the image is in the file") + image.len() as u64 / 2;
    let mut byte = [0];
    file.read_exact_at(&mut byte, middle).unwrap();
    byte[0] ^= 1;
    file.write_all_at(&byte, middle).unwrap();
    // The tier reads around the page cache.
    file.sync_all().unwrap();
}

/// Method: as the scenario says; the ratio is that of the two counters.
#[test]
fn met_01_lookups_and_hits_are_exact() {
    let manager = with_http().start();
    let mut engine = Engine::attach(&manager.socket(), namespace("met-01", 4 * KIB), 10);
    let pages = hashes(1, 0..10);
    let _ = engine.save(&blocks(&pages[..6], 0)).ok();
    for _ in 0..3 {
        let hit = engine.query(&pages, QueryMode::Demand).ok();
        let _ = engine.release(hit.leased()).ok();
    }
    let seen = scrape(&manager);
    let asked = seen.get("orbitkv_lookup_pages_total", &[]);
    let hits = seen.sum("orbitkv_lookup_hit_pages_total");
    assert_eq!((asked, hits, hits / asked), (30.0, 18.0, 0.6));
    assert_eq!(seen.get("orbitkv_lookup_hit_pages_total", &["tier=dram"]), 18.0);
    assert_eq!(seen.get("orbitkv_lookup_missed_pages_total", &["reason=absent"]), 12.0);
    assert_eq!(asked, hits + seen.sum("orbitkv_lookup_missed_pages_total"));
}

/// Method: the scenario's numbers, its prepare as a hint.
#[test]
fn met_03_every_direction_counts_its_bytes() {
    let manager = with_http().ssd("64MiB").start();
    let mut engine = Engine::attach(&manager.socket(), namespace("met-03", MIB), 5);
    let pages = hashes(1, 0..5);
    let _ = engine.save(&blocks(&pages, 0)).ok();
    manager.evict();
    let scope = engine.scope;
    let prepare = engine.client.prepare(&scope, &pages).unwrap();
    assert_eq!(engine.end(prepare).ok().pages, 5);
    manager.counted(Metric::PreparePages(PrepareOutcome::Prepared), 5);
    for count in [5, 2] {
        let lease = engine.query(&pages[..count], QueryMode::Demand).ok();
        assert_eq!(lease.pages_dram as usize, count, "prepared");
        let _ = engine.restore(&lease.leased(), 0, &blocks(&pages[..count], 0)).ok();
    }
    let seen = scrape(&manager);
    for (name, labels, bytes) in [
        ("orbitkv_device_copied_bytes_total", &["direction=d2h"][..], 5_242_880.0),
        ("orbitkv_ssd_written_bytes_total", &[], 5_242_880.0),
        ("orbitkv_ssd_read_bytes_total", &[], 5_242_880.0),
        ("orbitkv_device_copied_bytes_total", &["direction=h2d"], 7_340_032.0),
        ("orbitkv_device_copied_pages_total", &["direction=h2d"], 7.0),
        ("orbitkv_ssd_write_queue_full_total", &[], 0.0),
        ("orbitkv_ssd_written_pages_total", &[], 5.0),
    ] {
        assert_eq!(seen.get(name, labels), bytes, "{name} {labels:?}");
    }
}

/// Cycles of attach and detach.
const CYCLES: u32 = 10_000;
const MODELS: u32 = 100;

/// Goal: neither sessions nor engines nor models make series; afterwards there are as many as
/// before. Method: every cycle is another engine, of one of a hundred models.
#[test]
fn met_05_series_are_bounded_whoever_comes_and_goes() {
    let manager = with_http().start();
    let before = scrape(&manager);
    let socket = manager.socket();
    let connect = Connect::new(&socket).ring_capacity(64).page_entries(1024);
    for cycle in 0..CYCLES {
        let mut engine = [0; 16];
        engine[..4].copy_from_slice(&cycle.to_le_bytes());
        let attach = connect.clone().engine_id(EngineId(engine));
        let mut client: Client = attach.connect().unwrap();
        let model = format!("secret-model-{}", cycle % MODELS);
        let _scope = client.define_namespace(&namespace(&model, 4 * KIB)).unwrap();
    }
    // The last one may come and go between two looks.
    manager.settle("all came and went", |seen| {
        seen.sessions.is_empty() && seen.counters.get(Metric::SessionsOpened) == u64::from(CYCLES)
    });
    // A row goes before the counter of why it went.
    let _seen = manager.fresh();
    let text = get(&address(&manager), "/metrics").body;
    let after = parse(&text);
    assert_eq!(series_of(&after), series_of(&before));
    assert!(after.series() < 500, "{} series", after.series());
    assert_eq!(after.get("orbitkv_session_opened_total", &[]), f64::from(CYCLES));
    assert_eq!(after.sum("orbitkv_session_closed_total"), f64::from(CYCLES));
    for secret in ["secret", "tier", socket.to_str().unwrap()] {
        let as_label = format!("=\"{secret}");
        assert!(!text.contains(&as_label), "{secret} is a label value");
    }
    // Every label value is a word of a closed list, a bucket's end or a device's number.
    let closed: BTreeSet<&str> = families()
        .flat_map(|(family, _)| family.labels)
        .flat_map(|label| label.values)
        .copied()
        .collect();
    for sample in after.families.values().flat_map(|family| &family.samples) {
        for (name, value) in &sample.labels {
            let open = ["le", "device", "stage"].contains(&name.as_str());
            assert!(open || closed.contains(value.as_str()), "{sample:?}");
        }
    }
}

fn series_of(exposition: &Exposition) -> BTreeSet<String> {
    let samples = exposition.families.values().flat_map(|family| &family.samples);
    samples.map(|sample| format!("{} {:?}", sample.name, sample.labels)).collect()
}

/// Method: three images are damaged in the file, the last of a chain, so that none in front of
/// them is lost. The pages are leased where they are, so that the reads are the restore's.
#[test]
fn met_07_a_hit_that_cannot_be_loaded_is_a_failed_restore() {
    let manager = with_http().ssd("64MiB").start();
    let fresh = scrape(&manager);
    assert_eq!(fresh.get("orbitkv_restore_failed_pages_total", &["reason=io_error"]), 0.0);
    assert_eq!(fresh.get("orbitkv_ssd_read_errors_total", &["reason=checksum"]), 0.0);
    let mut engine = Engine::attach(&manager.socket(), namespace("met-07", 64 * KIB), 10);
    let pages = hashes(1, 0..10);
    let _ = engine.save(&blocks(&pages, 0)).ok();
    manager.evict();
    for hash in &pages[7..] {
        damage(&manager.setup().ssd_file(), &engine.spec, hash);
    }
    let hit = engine.query(&pages, QueryMode::Candidate).ok();
    assert_eq!((hit.pages, hit.pages_ssd), (10, 10));
    let restored = engine.restore(&hit.leased(), 0, &blocks(&pages, 0));
    assert_eq!((restored.status, restored.code), (Status::Partial, Code::IoError));
    assert_eq!((restored.pages, restored.first_failed), (7, Some(7)));
    engine.check(&blocks(&pages[..7], 0));
    let seen = scrape(&manager);
    assert_eq!(seen.sum("orbitkv_lookup_hit_pages_total"), 10.0);
    assert_eq!(seen.get("orbitkv_restore_restored_pages_total", &["tier=ssd"]), 7.0);
    assert_eq!(seen.get("orbitkv_restore_failed_pages_total", &["reason=io_error"]), 3.0);
    let requested = seen.get("orbitkv_restore_requested_pages_total", &[]);
    let restored = seen.sum("orbitkv_restore_restored_pages_total");
    assert_eq!(requested, restored + seen.sum("orbitkv_restore_failed_pages_total"));
    assert!(seen.get("orbitkv_ssd_read_errors_total", &["reason=checksum"]) >= 1.0);
}

/// Goal: all failure series are there, at zero, before anything failed.
#[test]
fn every_series_is_there_from_the_start() {
    let manager = with_http().ssd("64MiB").start();
    let answer = get(&address(&manager), "/metrics");
    assert!(answer.head.contains("Content-Type: text/plain; version=0.0.4"), "{}", answer.head);
    let seen = parse(&answer.body);
    for (family, _) in families() {
        let found = &seen.families[family.name];
        assert_eq!(found.samples.len(), family.series(), "{}", family.name);
        assert_eq!(found.kind, family.kind.label());
        let failure = ["failed", "refused", "errors", "faults", "retired"];
        if failure.iter().any(|word| family.name.contains(word)) {
            assert_eq!(seen.sum(family.name), 0.0, "{}", family.name);
        }
    }
}

#[test]
fn healthz_follows_the_state() {
    let manager = with_http().start();
    let address = address(&manager);
    let healthy = get(&address, "/healthz");
    assert_eq!((healthy.status, healthy.body.as_str()), (200, "ready\n"));
    // An operation that never ends by itself keeps the stop from ending at once.
    let mut engine = Engine::attach(&manager.socket(), namespace("healthz", MIB), 48);
    let pages = hashes(1, 0..32);
    let _ = engine.save(&blocks(&pages, 0)).ok();
    let _lease = engine.query(&pages, QueryMode::Demand).ok().leased();
    let scope = engine.scope;
    let waits = engine.client.query(&scope, &pages, QueryMode::Demand, Deadline::DEFAULT);
    waits.unwrap();
    engine.client.submit().unwrap();
    manager.settle("it waits", |seen| seen.budget.waiting_queries == 1);
    kill_process(manager.pid(), Signal::TERM).unwrap();
    let seen = manager.settle("draining", |seen| seen.manager.state != LifeState::Ready);
    assert_eq!(seen.manager.state, LifeState::Draining);
    let draining = get(&address, "/healthz");
    assert_eq!(draining.status, 503, "{}", draining.body);
    assert!(draining.body.starts_with("draining: "), "{}", draining.body);
    let told = engine.client.state().unwrap();
    assert_ne!(told, orbitkv_engine::SessionState::Open, "clients are told as well");
    let _exit = manager.stop();
}

/// Goal: peers that dawdle or send rubbish keep nobody from scraping, and end nothing.
#[test]
fn hostile_scrapers_hold_nobody() {
    let manager = with_http().start();
    let address = address(&manager);
    let mut crowd: Vec<TcpStream> = Vec::new();
    for number in 0..64_u8 {
        let mut peer = TcpStream::connect(&address).unwrap();
        let rubbish = vec![number; 512];
        peer.write_all(if number % 2 == 0 { b"GET /metr" } else { &rubbish }).unwrap();
        crowd.push(peer);
    }
    let seen = scrape(&manager);
    assert_eq!(seen.get("orbitkv_manager_state", &["state=ready"]), 1.0);
    let mut endless = TcpStream::connect(&address).unwrap();
    let mut sent = 0;
    while sent < 1 << 20 {
        match endless.write(&[b'x'; 4096]) {
            Ok(bytes @ 1..) => sent += bytes,
            _ => break,
        }
    }
    let mut answer = Vec::new();
    let _reset = endless.read_to_end(&mut answer);
    assert!(sent < 1 << 20 || answer.starts_with(b"HTTP/1.1 431"), "cut off: {sent}");
    assert_eq!(get(&address, "/healthz").status, 200);
}

/// Metrics that no test here can move, and why.
const UNMOVED: [(&str, &str); 18] = [
    ("orbitkv_ssd_device_recovering", "for the time of a search of the file; see restart"),
    ("orbitkv_ssd_device_reading_pages", "for the time of one disk access"),
    (
        "orbitkv_session_bad_requests_total",
        "takes a client that breaks the protocol; see hostile_rings",
    ),
    ("orbitkv_ssd_write_queue_full_total", "stays at zero in normal work"),
    ("orbitkv_ssd_write_errors_total", "needs a disk that fails writes"),
    ("orbitkv_ssd_retired_slots_total", "needs a disk that fails reads with an error number"),
    ("orbitkv_pool_draining_bytes", "for the time of one disk access; see core_forget"),
    ("orbitkv_spill_waiting_pages", "for the time of one disk access; see core_spill"),
    ("orbitkv_spill_waiting_bytes", "for the time of one disk access; see core_spill"),
    ("orbitkv_ssd_device_writing_pages", "for the time of one disk access"),
    ("orbitkv_ssd_device_write_inflight_bytes", "for the time of one disk access"),
    ("orbitkv_ssd_device_small_read_alone_seconds", "takes many reads of small pages"),
    ("orbitkv_ssd_device_small_read_beside_seconds", "takes many reads of small pages"),
    ("orbitkv_ssd_device_large_read_beside_seconds", "takes many reads while pages are written"),
    ("orbitkv_ssd_retries_total", "needs a disk that moves less than asked; see ssd_faults"),
    ("orbitkv_ssd_stops_total", "needs a disk that fails; see ssd_faults"),
    ("orbitkv_ssd_write_budget_bytes", "needs a write budget; see core_spill"),
    ("orbitkv_spill_history_pages", "takes the policy reuse; see core_spill"),
];

/// Names of metrics of which some series was above zero in a scrape.
fn moved(seen: &Exposition, names: &mut BTreeSet<String>) {
    for (name, family) in &seen.families {
        if family.samples.iter().any(|sample| sample.value > 0.0) {
            names.insert(name.clone());
        }
    }
}

/// Goal: no metric is declared and never counted. Method: provoke each.
#[test]
fn every_metric_moves() {
    let mut names = BTreeSet::new();
    let small = |setup: Setup| setup.dram("8MiB").ssd("64MiB").flag("--http", "127.0.0.1:0");
    let manager = small(setup!()).start();
    let mut engine = Engine::attach(&manager.socket(), namespace("moves", MIB), 16);
    let pages = hashes(1, 0..6);
    let _ = engine.save(&blocks(&pages, 0)).ok();
    let _present = engine.save(&blocks(&pages, 0)).ok();
    manager.evict();
    hints_and_hits(&manager, &mut engine, &pages, &mut names);
    full_pool_and_waiting_query(&manager, &mut engine, &pages, &mut names);
    evictions_on_both_tiers(&manager, &mut engine);
    failures(&manager, &mut engine, &pages, &mut names);
    drop(engine);
    manager.settle("gone", |seen| seen.sessions.is_empty());
    moved(&scrape(&manager), &mut names);

    let manager = manager.stop().start();
    moved(&scrape(&manager), &mut names);
    let all: BTreeSet<String> = scrape(&manager).families.into_keys().collect();
    let unmoved: BTreeSet<&str> = all.difference(&names).map(String::as_str).collect();
    let excused: BTreeSet<&str> = UNMOVED.iter().map(|(name, _)| *name).collect();
    let forgotten: Vec<_> = unmoved.difference(&excused).collect();
    assert!(forgotten.is_empty(), "never moved: {forgotten:?}");
}

fn hints_and_hits(
    manager: &Manager,
    engine: &mut Engine,
    pages: &[PageHash],
    names: &mut BTreeSet<String>,
) {
    let scope = engine.scope;
    let prepare = engine.client.prepare(&scope, &pages[..1]).unwrap();
    let _ = engine.end(prepare).ok();
    // A hint takes budget until its read has ended.
    manager.counted(Metric::PreparePages(PrepareOutcome::Prepared), 1);
    // Held speculatively: both budgets are taken, pages are pinned, a lease is held.
    let held = engine.query(&pages[..1], QueryMode::Speculative).ok().leased();
    moved(&scrape(manager), names);
    let skipped = engine.query(&pages[1..], QueryMode::Speculative);
    assert_eq!(skipped.pages, 0, "{skipped:?}");
    let _ = engine.restore(&held, 0, &blocks(&pages[..1], 0)).ok();
    let _absent = engine.query(&hashes(77, 0..2), QueryMode::Demand);
    let lease = engine.query(pages, QueryMode::Candidate).leased();
    let _ = engine.release(lease).ok();
}

fn full_pool_and_waiting_query(
    manager: &Manager,
    engine: &mut Engine,
    pages: &[PageHash],
    names: &mut BTreeSet<String>,
) {
    let held = engine.query(&pages[..3], QueryMode::Demand).ok().leased();
    let scope = engine.scope;
    let waits = engine.client.query(&scope, &pages[..3], QueryMode::Demand, Deadline::DEFAULT);
    let waits = waits.unwrap();
    engine.client.submit().unwrap();
    manager.settle("it waits", |seen| seen.budget.waiting_queries == 1);
    moved(&scrape(manager), names);
    // More than the pool can hold beside what is leased, in one save.
    let large = hashes(2, 0..12);
    let refused = engine.save(&blocks(&large, 0));
    assert!(refused.pages_refused > 0, "{refused:?}");
    let _ = engine.release(held).ok();
    let served = engine.end(waits).ok().leased();
    let _ = engine.release(served).ok();
}

fn evictions_on_both_tiers(manager: &Manager, engine: &mut Engine) {
    // What is being written keeps its memory.
    manager.settle_empty();
    // Twice what the SSD tier holds.
    for sequence in 100..132 {
        engine.save_all(&hashes(sequence, 0..4));
        // By numbers that are younger than the save.
        manager.settle_empty();
    }
}

fn failures(
    manager: &Manager,
    engine: &mut Engine,
    pages: &[PageHash],
    names: &mut BTreeSet<String>,
) {
    // The last of the evictions is still there; its image is damaged.
    let chain = hashes(131, 0..4);
    manager.evict();
    damage(&manager.setup().ssd_file(), &engine.spec, &chain[3]);
    let lease = engine.query(&chain, QueryMode::Candidate).leased();
    let failed = engine.restore(&lease, 0, &blocks(&chain, 0));
    assert_eq!(failed.status, Status::Partial, "{failed:?}");
    // Memory that the engine takes away under the Manager.
    let socket = manager.socket();
    let spec = namespace("moves-away", 64 * KIB);
    let connect = Connect::new(&socket);
    let mut thief = Engine::connect(&connect, spec, 4, Way::Unsealed, Shape::Contiguous);
    thief.fill(&blocks(&pages[..4], 0));
    thief.device.file().set_len(0).unwrap();
    let region = thief.region;
    let save = thief.client.save(&region, &blocks(&pages[..4], 0)).unwrap();
    let ended = thief.end(save);
    assert_ne!(ended.status, Status::Ok, "{ended:?}");
    let forget = engine.client.forget(&engine.scope).unwrap();
    let _ = engine.end(forget).ok();
    // For the next start to find.
    let mut keeper = Engine::attach(&socket, namespace("kept", MIB), 2);
    let _ = keeper.save(&blocks(&hashes(9, 0..2), 0)).ok();
    manager.evict();
    drop((thief, keeper));
    turned_away(&socket);
    manager.settle("a refusal", |seen| {
        let refusals = RefuseReason::ALL.iter().map(|&reason| Metric::SessionsRefused(reason));
        refusals.map(|metric| seen.counters.get(metric)).sum::<u64>() > 0
    });
    moved(&scrape(manager), names);
}

/// A connection whose first message is none.
fn turned_away(socket: &Path) {
    use rustix::net::{
        AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, send,
        socket_with,
    };
    let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
    let connection = socket_with(family, kind, SocketFlags::CLOEXEC, None).unwrap();
    connect(&connection, &SocketAddrUnix::new(socket).unwrap()).unwrap();
    send(&connection, b"rubbish", SendFlags::empty()).unwrap();
    // Until the Manager closes.
    let mut answer = [0; 4096];
    while rustix::io::read(&connection, &mut answer).is_ok_and(|bytes| bytes > 0) {}
}
