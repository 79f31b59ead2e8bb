//! One suite for every engine: what a worker may rely on.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::blocking::BlockingEngine;
use super::fake::FakeEngine;
use super::file::{Access, SsdFile};
use super::format::Block;
use super::io::{Chunk, Done, Engine, EngineKind, Part, Transfer};
use super::uring::UringEngine;
use super::wake::Wake;
use crate::core::Extent;
use crate::image::ImageMemory;
use crate::pool::{DramPool, HugePages, PoolConfig};

const POOL_BYTES: u64 = 8 << 20;
const FILE_BYTES: u64 = 16 << 20;
const DEPTH: u16 = 8;

/// A pool that is small enough to be everywhere.
pub(crate) fn pool(bytes: u64) -> Arc<DramPool> {
    let config = PoolConfig { bytes, huge_pages: HugePages::Off, prefault_threads: 1 };
    Arc::new(DramPool::allocate(config).expect("a few megabytes"))
}

struct Bench {
    _folder: tempfile::TempDir,
    memory: Arc<DramPool>,
    wake: Arc<Wake>,
    engine: Box<dyn Engine>,
}

fn bench(kind: &str) -> Bench {
    let folder = tempfile::tempdir().unwrap();
    let memory = pool(POOL_BYTES);
    let wake = Arc::new(Wake::new().unwrap());
    let direct = kind != "blocking through the page cache";
    let mut file = SsdFile::open(&folder.path().join("tier"), Access::Tier { direct })
        .expect("a file on disk");
    file.reserve(FILE_BYTES).unwrap();
    let file = Arc::new(file);
    let shared: Arc<dyn ImageMemory> = memory.clone();
    let engine: Box<dyn Engine> = match kind {
        "uring" => Box::new(
            UringEngine::new(file, shared, wake.clone(), DEPTH, &memory.arena_bytes()).unwrap(),
        ),
        "uring without registration" => {
            Box::new(UringEngine::new(file, shared, wake.clone(), DEPTH, &[]).unwrap())
        }
        "fake" => {
            let disk = Arc::new(std::sync::Mutex::new(vec![0; FILE_BYTES as usize]));
            Box::new(FakeEngine::new(disk, shared, wake.clone(), DEPTH).newest_first())
        }
        _ => Box::new(BlockingEngine::new(file, shared, wake.clone(), DEPTH, 3).unwrap()),
    };
    Bench { _folder: folder, memory, wake, engine }
}

fn for_every_engine(test: impl Fn(&mut Bench)) {
    let uring = UringEngine::probe().is_ok();
    for kind in [
        "uring",
        "uring without registration",
        "blocking",
        "blocking through the page cache",
        "fake",
    ] {
        if kind.starts_with("uring") && !uring {
            eprintln!("io_uring is forbidden here: {kind} not checked");
            continue;
        }
        eprintln!("engine: {kind}");
        test(&mut bench(kind));
    }
}

fn extent(offset: u64, bytes: u32) -> Extent {
    Extent { arena: 0, offset, bytes }
}

fn chunk(transfer: Transfer, offset: u64, parts: Vec<Part>) -> Chunk {
    let mut chunk = Chunk::new(transfer, offset, Vec::new(), Vec::new());
    for (page, part) in parts.into_iter().enumerate() {
        chunk.push(page as u32, part);
    }
    chunk
}

/// Waits until nothing is in flight.
fn drain(engine: &mut dyn Engine) -> Vec<Done> {
    let mut done = Vec::new();
    while engine.in_flight() > 0 {
        engine.wait(&mut || false, None, &mut done);
    }
    done
}

fn fill(memory: &DramPool, extent: Extent, seed: u8) -> Vec<u8> {
    let bytes: Vec<u8> =
        (0..extent.bytes).map(|i| (i as u8) ^ ((i >> 8) as u8).wrapping_mul(31) ^ seed).collect();
    assert!(memory.slice(extent).unwrap().fill_from(&bytes));
    bytes
}

#[test]
fn what_is_written_is_read_back_whole_and_in_vectors() {
    for_every_engine(|bench| {
        let (source, target) = (extent(0, 1 << 20), extent(4 << 20, 1 << 20));
        let image = fill(&bench.memory, source, 3);
        let engine = &mut *bench.engine;
        engine.submit(chunk(Transfer::Write, 4096, vec![Part::Image(source)])).unwrap();
        let done = drain(engine);
        assert_eq!((done.len(), done[0].result), (1, 1 << 20));
        assert_eq!((done[0].chunk.offset, engine.in_flight()), (4096, 0), "the chunk comes back");

        engine.submit(chunk(Transfer::Read, 4096, vec![Part::Image(target)])).unwrap();
        assert_eq!(drain(engine)[0].result, 1 << 20);
        assert_eq!(bench.memory.slice(target).unwrap().to_vec(), image);

        // A vector of images and blocks, at another place.
        let footer = Box::new(Block([0xEE; 4096]));
        let parts = vec![
            Part::Image(extent(0, 8192)),
            Part::Block(footer),
            Part::Image(extent(1 << 19, 4096)),
        ];
        engine.submit(chunk(Transfer::Write, 8 << 20, parts)).unwrap();
        assert_eq!(drain(engine)[0].result, 16384);
        let parts = vec![
            Part::Image(extent(5 << 20, 8192)),
            Part::Block(Box::new(Block::ZERO)),
            Part::Image(extent(6 << 20, 4096)),
        ];
        engine.submit(chunk(Transfer::Read, 8 << 20, parts)).unwrap();
        let mut done = drain(engine);
        assert_eq!(done[0].result, 16384);
        let parts = done.remove(0).chunk.parts;
        assert!(matches!(&parts[1], Part::Block(block) if **block == Block([0xEE; 4096])));
        assert_eq!(bench.memory.slice(extent(5 << 20, 8192)).unwrap().to_vec(), image[..8192]);
        assert_eq!(
            bench.memory.slice(extent(6 << 20, 4096)).unwrap().to_vec(),
            image[1 << 19..(1 << 19) + 4096]
        );
    });
}

#[test]
fn many_chunks_run_at_once_up_to_the_depth_and_each_comes_back_once() {
    for_every_engine(|bench| {
        let engine = &mut *bench.engine;
        let mut next = 0_u64;
        let mut done = Vec::new();
        let mut offsets = Vec::new();
        while offsets.len() < 100 {
            while next < 100 {
                let part = Part::Image(extent(next % 64 * 8192, 8192));
                match engine.submit(chunk(Transfer::Write, next * 8192, vec![part])) {
                    Ok(()) => next += 1,
                    Err(refused) => {
                        assert_eq!(refused.offset, next * 8192);
                        assert_eq!(engine.in_flight(), engine.depth());
                        break;
                    }
                }
            }
            engine.wait(&mut || false, None, &mut done);
            for Done { chunk, result } in done.drain(..) {
                assert_eq!(result, 8192);
                offsets.push(chunk.offset);
            }
        }
        assert_eq!(engine.in_flight(), 0);
        offsets.sort_unstable();
        assert_eq!(offsets, (0..100).map(|i| i * 8192).collect::<Vec<_>>());
    });
}

#[test]
fn the_end_of_the_file_is_a_short_read_and_zero_bytes_behind_it() {
    for_every_engine(|bench| {
        let engine = &mut *bench.engine;
        let part = Part::Image(extent(0, 1 << 20));
        engine.submit(chunk(Transfer::Read, FILE_BYTES - 4096, vec![part])).unwrap();
        assert_eq!(drain(engine)[0].result, 4096);
        let part = Part::Image(extent(0, 4096));
        engine.submit(chunk(Transfer::Read, FILE_BYTES, vec![part])).unwrap();
        assert_eq!(drain(engine)[0].result, 0);
    });
}

#[test]
fn memory_outside_the_pool_is_refused_and_comes_back() {
    for_every_engine(|bench| {
        let engine = &mut *bench.engine;
        for outside in [extent(POOL_BYTES, 4096), extent(POOL_BYTES - 4096, 8192)] {
            engine.submit(chunk(Transfer::Read, 0, vec![Part::Image(outside)])).unwrap();
            let done = drain(engine);
            assert_eq!((done.len(), done[0].result), (1, -libc::EFAULT));
        }
        assert_eq!(engine.in_flight(), 0);
    });
}

#[test]
fn a_sleeping_engine_is_woken_from_another_thread() {
    for_every_engine(|bench| {
        let rung = Arc::new(AtomicBool::new(false));
        let ringer = std::thread::spawn({
            let (rung, wake) = (rung.clone(), bench.wake.clone());
            move || {
                std::thread::sleep(std::time::Duration::from_millis(20));
                rung.store(true, Ordering::Release);
                wake.ring();
            }
        });
        // Would hang for ever if the wake were lost. Early returns are allowed.
        let mut done = Vec::new();
        while !rung.load(Ordering::Acquire) {
            bench.engine.wait(&mut || rung.load(Ordering::Acquire), None, &mut done);
        }
        ringer.join().unwrap();
        bench.engine.wait(&mut || true, None, &mut done);
        assert!(done.is_empty());
    });
}

#[test]
fn a_sleep_ends_when_its_time_is_over_and_what_is_out_stays_out() {
    for_every_engine(|bench| {
        let mut done = Vec::new();
        let short = Some(std::time::Duration::from_millis(5));
        // Would hang for ever without the limit.
        bench.engine.wait(&mut || false, short, &mut done);
        assert!(done.is_empty());
        let part = Part::Image(extent(0, 8192));
        bench.engine.submit(chunk(Transfer::Read, 0, vec![part])).unwrap();
        while bench.engine.in_flight() > 0 {
            bench.engine.wait(&mut || false, short, &mut done);
        }
        assert_eq!((done.len(), done[0].result), (1, 8192));
    });
}

/// Goal: no buffer is let go while the kernel may still use it. Method: drop with reads in
/// flight, then reuse their memory: the canary stays.
#[test]
fn dropping_an_engine_waits_for_what_is_in_flight() {
    for_every_engine(|bench| {
        for round in 0..20_u64 {
            for i in 0..u64::from(DEPTH) {
                let part = Part::Image(extent(i << 19, 1 << 19));
                // Refused only when the engine is full, which is as good.
                let _ = bench.engine.submit(chunk(Transfer::Read, i << 19, vec![part]));
            }
            if round % 2 == 0 {
                bench.engine.wait(&mut || true, None, &mut Vec::new());
            }
        }
        let fresh = pool(2 << 20);
        let disk = Arc::new(std::sync::Mutex::new(Vec::new()));
        let stub = FakeEngine::new(disk, fresh, bench.wake.clone(), 1);
        bench.engine = Box::new(stub);
        let canary = fill(&bench.memory, extent(0, 4 << 20), 0x5C);
        std::thread::sleep(std::time::Duration::from_millis(20));
        assert_eq!(bench.memory.slice(extent(0, 4 << 20)).unwrap().to_vec(), canary);
    });
}

#[test]
fn a_ring_says_which_mode_it_got_and_what_it_registered() {
    if UringEngine::probe().is_err() {
        return;
    }
    let engine = bench("uring").engine;
    let mode = engine.mode();
    assert!(matches!(mode.kind, EngineKind::Uring(_)));
    assert!(mode.registered_bytes == 0 || mode.registered_bytes == POOL_BYTES, "all or nothing");
    assert_eq!(mode.label(), "uring");
    // What may register buffers may register files; some hosts forbid the call.
    assert!(mode.registered_bytes == 0 || mode.file_registered, "{mode}");
    assert_eq!(mode.file_registered, mode.to_string().ends_with(", file registered"), "{mode}");
    let text = bench("uring without registration").engine.mode().to_string();
    assert!(!text.contains("DRAM registered"), "{text}");
}
