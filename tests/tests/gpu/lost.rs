//! A CUDA context that is lost, the Manager's or an engine's, takes nothing with it that is not on it.

use orbitkv_engine::{Code, Gone, RestoreOptions, Status};
use orbitkv_shm_protocol::telemetry::{CloseReason, Metric};
use orbitkv_tests::broken_gpu::{BREAK_AT, tell};
use orbitkv_tests::engine::{Engine, hashes, namespace};
use orbitkv_tests::manager::Manager;
use orbitkv_tests::setup;

use crate::child::EngineChild;
use crate::engine::{GpuEngine, Shape, alone, blocks, connect, manager};

const HOST_PAGE: u64 = 1 << 20;
const SHAPE: Shape = Shape::Split(36);
/// Status, code and pages of what a lost GPU ends.
const LOST: (Status, Code, u32) = (Status::Error, Code::DeviceError, 0);

/// What an engine in host memory still gets: pages that were on SSD and in DRAM before, and new ones.
fn serves_the_host(engine: &mut Engine, manager: &Manager, new: u64) {
    for (place, seed) in [("SSD", 10), ("DRAM", 11)] {
        assert_eq!(engine.restore_all(&hashes(seed, 0..4)), 4, "pages from {place}");
    }
    manager.round_trip(engine, &hashes(new, 0..4));
}

/// Goal: a sticky error of the Manager's context ends the sessions on that GPU by name and nothing
/// else: their next operation says `device_error` before the session is closed, whether it waits for
/// a fence or not; an engine in host memory is served from DRAM and SSD; who registers memory of that
/// GPU is told what to do; a stop is in order, and the next Manager has what was on SSD. Method: a
/// kernel in the Manager's process reads an illegal address.
#[test]
fn a_lost_gpu_ends_its_sessions_by_name_and_no_others() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("break");
    let setup = setup!().dram("1GiB").ssd("256MiB").flag("--device", "cuda");
    let manager = setup.start_by(|command| {
        command.env(BREAK_AT, &file);
    });
    let mut host = Engine::attach(&manager.socket(), namespace("host", HOST_PAGE), 4);
    let mut engines =
        ["restores", "saves"].map(|model| GpuEngine::attach(&manager.socket(), model, 4, SHAPE));
    engines.iter_mut().for_each(|engine| engine.round_trip(1));
    host.save_all(&hashes(10, 0..4));
    manager.evict();
    host.save_all(&hashes(11, 0..4));
    let on_gpu = blocks(1, &[2, 3]);
    let lease = engines[0].lease(&on_gpu);

    tell(&file);
    let [restores, saves] = &mut engines;
    let options = RestoreOptions::default();
    let restore = restores.client.restore(&lease, 0, &restores.region, &on_gpu, options).unwrap();
    let restored = restores.end(restore);
    assert_eq!((restored.status, restored.code, restored.pages), LOST, "{restored:?}");
    let fence = saves.fence();
    let save = saves.begin_save(&blocks(2, &[0, 1]), Some(fence));
    let saved = saves.end(save);
    assert_eq!((saved.status, saved.code, saved.pages), LOST, "{saved:?}");
    manager.settle("the sessions of the GPU are gone", |seen| seen.sessions.len() == 1);
    manager.counted(Metric::SessionsClosed(CloseReason::DeviceLost), 2);
    manager.counted(Metric::SessionsClosed(CloseReason::PeerFault), 0);
    assert_eq!(restores.client.poll(), Err(Gone::Closed));

    serves_the_host(&mut host, &manager, 12);
    let mut late = connect(&manager.socket(), SHAPE).connect().unwrap();
    let buffer = &restores.pages.buffer;
    let spec = restores.device.gpu.export(buffer.address(), buffer.bytes()).unwrap();
    let refused = late.register_cuda(&spec).unwrap_err().to_string();
    assert!(refused.contains("restart the Manager"), "{refused}");
    drop(late);
    serves_the_host(&mut host, &manager, 13);

    drop((host, engines));
    let manager = manager.stop().start();
    let mut host = Engine::attach(&manager.socket(), namespace("host", HOST_PAGE), 4);
    assert_eq!(host.restore_all(&hashes(10, 0..4)), 4, "pages on SSD");
    GpuEngine::attach(&manager.socket(), "restores", 4, SHAPE).round_trip(3);
}

/// Goal: an engine whose own context broke takes nothing from another on the same GPU. Method: a child
/// process breaks its context and lives on; its session goes when it is killed.
#[test]
fn an_engine_that_breaks_its_context_is_alone_with_that() {
    let _alone = alone();
    let manager = manager(setup!());
    let mut other = GpuEngine::attach(&manager.socket(), "other", 4, SHAPE);
    other.round_trip(1);
    let mut engine = EngineChild::start(&manager.socket(), &[]);
    assert_eq!(engine.answer().as_deref(), Some("registered"));
    assert_eq!(engine.ask("round trip"), "the bytes are right");
    assert_eq!(engine.ask("break"), "broken");
    other.round_trip(2);
    engine.kill();
    manager.settle("its session is gone", |seen| seen.sessions.len() == 1);
    other.round_trip(3);
}
