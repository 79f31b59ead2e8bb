//! What is left of an engine that is gone: nothing, however it went.

use std::time::Instant;

use orbitkv_benches::gpu::{Device, free_bytes};
use orbitkv_engine::cuda::Gpu;
use orbitkv_tests::manager::{Manager, PATIENCE};
use orbitkv_tests::setup;
use rustix::process::{Pid, Signal};

use crate::child::EngineChild;
use crate::engine::{GpuEngine, Shape, alone, manager};

/// Memory of the GPU that may be gone for other reasons.
const SLACK: u64 = 50 << 20;

/// Waits until as much of the GPU is free as was, and the session is gone.
fn until_as_before(manager: &Manager, free_before: u64, what: &str) {
    let began = Instant::now();
    manager.settle("its session is gone", |seen| seen.sessions.is_empty());
    let seen = began.elapsed();
    loop {
        let free = free_bytes().unwrap();
        if free + SLACK >= free_before {
            break;
        }
        let gone = free_before - free;
        assert!(began.elapsed() < PATIENCE, "{what}: {gone} bytes of the GPU are not free again");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    println!("{what}: session gone after {seen:?}, memory free after {:?}", began.elapsed());
}

/// Goal: an engine that is killed leaves nothing mapped in the Manager, whatever it was doing, and
/// the next engine has all of the GPU (LEAK-05). Method: an engine process with 576 MiB of pages is
/// killed right after it registered, idle after a save, and while a save waits for a kernel that
/// nobody lets go; memory is what the driver says is free on the whole GPU.
#[test]
fn leak_05_a_killed_engine_leaves_nothing() {
    let _alone = alone();
    let manager = manager(setup!());
    // A first engine makes what the Manager keeps for good.
    let mut first = EngineChild::start(&manager.socket(), &[]);
    assert_eq!(first.answer().as_deref(), Some("registered"));
    assert_eq!(first.ask("round trip"), "the bytes are right");
    first.kill();
    manager.settle("its session is gone", |seen| seen.sessions.is_empty());
    let _device = Device::open(0).unwrap();
    let mut free = free_bytes().unwrap();
    // The Manager may still be letting go of what the first had.
    let end = Instant::now() + PATIENCE / 4;
    while Instant::now() < end {
        free = free.max(free_bytes().unwrap());
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    for (what, orders) in [
        ("right after register", &[][..]),
        ("idle", &[("round trip", "the bytes are right")]),
        ("mid-save", &[("save and hang", "saving")]),
    ] {
        let mut engine = EngineChild::start(&manager.socket(), &[]);
        assert_eq!(engine.answer().as_deref(), Some("registered"), "{what}");
        for (order, answer) in orders {
            assert_eq!(engine.ask(order), *answer, "{what}");
        }
        manager.settle("it is attached", |seen| {
            seen.sessions.len() == 1 && seen.sessions[0].regions == 1
        });
        engine.kill();
        until_as_before(&manager, free, what);
        let mut next = EngineChild::start(&manager.socket(), &[]);
        assert_eq!(next.answer().as_deref(), Some("registered"), "behind {what}");
        assert_eq!(next.ask("round trip"), "the bytes are right", "behind {what}");
        next.kill();
        until_as_before(&manager, free, what);
    }
    manager.settle_empty();
}

/// Goal: a forked child of an engine on a GPU is refused by every call, and the engine's death is
/// noticed although that child holds every descriptor (GPU-07).
#[test]
fn gpu_07_a_forked_child_is_refused_and_hides_no_death() {
    let _alone = alone();
    let manager = manager(setup!());
    let mut engine = EngineChild::start(&manager.socket(), &[]);
    assert_eq!(engine.answer().as_deref(), Some("registered"));
    let mut lines = [engine.ask("fork"), engine.answer().unwrap()];
    lines.sort();
    let [pid, refused] = lines;
    assert_eq!(refused, "the child is refused");
    let grandchild = Pid::from_raw(pid.parse().unwrap()).unwrap();
    assert_eq!(engine.ask("round trip"), "the bytes are right", "the parent goes on");
    engine.kill();
    manager.settle("its death is noticed", |seen| seen.sessions.is_empty());
    rustix::process::test_kill_process(grandchild).expect("the child still lives");
    rustix::process::kill_process(grandchild, Signal::KILL).unwrap();
    manager.settle_empty();
}

/// Goal: an engine finds a restarted Manager and its own memory can be registered again.
#[test]
fn an_engine_registers_the_same_memory_with_the_next_manager() {
    let _alone = alone();
    let manager = manager(setup!());
    let mut engine = GpuEngine::attach(&manager.socket(), "restart", 4, Shape::Split(36));
    engine.round_trip(1);
    let setup = manager.kill();
    let manager = setup.start();
    let connected = crate::engine::connect(&manager.socket(), Shape::Split(36)).connect();
    engine.client = connected.unwrap();
    engine.events.register(&mut engine.client).unwrap();
    let spec = orbitkv_tests::engine::namespace("restart", crate::engine::PAGE);
    engine.scope = engine.client.define_namespace(&spec).unwrap();
    engine.register_again();
    engine.round_trip(2);
}

/// Goal: a GPU is known by its UUID: an engine that sees only the second one as number 0 gets its
/// bytes from there, also by a Manager that counts them the other way round; a Manager that does not
/// see it names it (GPU-05). Needs two GPUs.
#[test]
fn gpu_05_a_gpu_is_its_uuid_and_not_its_number() {
    let _alone = alone();
    let count = Gpu::count().unwrap();
    if count < 2 {
        println!("not run: needs two GPUs, this machine shows {count}");
        return;
    }
    let visible = "CUDA_VISIBLE_DEVICES";
    for order in ["0,1", "1,0"] {
        let setup = setup!().dram("1GiB").flag("--device", "cuda");
        let manager = setup.start_by(|command| {
            command.env(visible, order);
        });
        let mut engine = EngineChild::start(&manager.socket(), &[(visible, "1")]);
        assert_eq!(engine.answer().as_deref(), Some("registered"), "{order}");
        assert_eq!(engine.ask("round trip"), "the bytes are right", "{order}");
    }
    let setup = setup!().dram("1GiB").flag("--device", "cuda");
    let manager = setup.start_by(|command| {
        command.env(visible, "0");
    });
    let id = Gpu::open(1).unwrap().id();
    let mut client =
        crate::engine::connect(&manager.socket(), Shape::Contiguous).connect().unwrap();
    let handle = orbitkv_shm_protocol::bootstrap::message::HexBytes([0; 64]);
    let refused = client.register_events(id, &[handle]).unwrap_err().to_string();
    let first_eight = &id.to_string()[..8];
    assert!(refused.contains(first_eight), "{refused}");
}
