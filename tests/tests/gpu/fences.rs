//! The order between the engine's kernels and the Manager's copies is the GPU's own.

use std::time::Duration;

use orbitkv_benches::gpu::{Buffer, Pinned};
use orbitkv_engine::{Code, Deadline, RestoreOptions, SaveOptions, Status};
use orbitkv_tests::manager::PATIENCE;
use orbitkv_tests::setup;

use crate::engine::{GpuEngine, Shape, alone, blocks, content, counter, manager};

const KERNEL: Duration = Duration::from_millis(50);
const SHAPES: [Shape; 2] = [Shape::Contiguous, Shape::Split(36)];

fn ns(time: Duration) -> u64 {
    time.as_nanos() as u64
}

/// Goal: a save takes what the kernel before its fence writes, never what was there (COR-01).
/// Method: a kernel of 50 ms and then one that rewrites the pages stand before the event; the save is
/// submitted while the first still runs, and restored elsewhere.
#[test]
fn cor_01_a_save_waits_for_the_kernel_that_writes_its_pages() {
    let _alone = alone();
    let manager = manager(setup!());
    for shape in SHAPES {
        let mut engine = GpuEngine::attach(&manager.socket(), "cor-01", 8, shape);
        let from = [0, 1, 2, 3];
        engine.fill(&from, content(1_000));
        let before = if shape == Shape::Contiguous { 0 } else { 1_000_000 };
        for round in before..before + 75 {
            let placed = engine.pages.placed(&from);
            engine.device.kernels.spin(&engine.stream, ns(KERNEL)).unwrap();
            engine.device.kernels.fill(&engine.stream, &placed, content(round)).unwrap();
            let fence = engine.fence();
            let save = engine.begin_save(&blocks(round, &from), Some(fence));
            assert!(!engine.stream.is_done().unwrap(), "submitted too late to show anything");
            let saved = engine.end(save);
            assert_eq!((saved.status, saved.pages), (Status::Ok, 4), "{saved:?}");
            engine.events.give_back(fence);
            let to = [4, 5, 6, 7];
            let _restored = engine.restore(&blocks(round, &to));
            engine.check(&to, content(round));
        }
    }
}

/// Goal: a restore does not touch pages before the last kernel that reads them is done. Method: a
/// kernel of 50 ms and then one that compares the old bytes stand before the event.
#[test]
fn a_restore_waits_for_the_kernel_that_still_reads_its_pages() {
    let _alone = alone();
    let manager = manager(setup!());
    for shape in SHAPES {
        let mut engine = GpuEngine::attach(&manager.socket(), "reader", 8, shape);
        let (from, to) = ([0, 1, 2, 3], [4, 5, 6, 7]);
        engine.fill(&from, content(1));
        engine.save(&blocks(1, &from));
        let wrong = Buffer::new(8).unwrap();
        wrong.set(0).unwrap();
        for round in 0..75 {
            let old = content(10 + round);
            engine.fill(&to, old);
            let lease = engine.lease(&blocks(1, &to));
            let placed = engine.pages.placed(&to);
            let (kernels, stream) = (&engine.device.kernels, &engine.stream);
            kernels.spin(stream, ns(KERNEL)).unwrap();
            kernels.compare(stream, &placed, old, 0..placed.segments(), &wrong).unwrap();
            let fence = engine.fence();
            let options = RestoreOptions {
                fence: Some(fence),
                deadline: Deadline::after(PATIENCE),
                ..RestoreOptions::default()
            };
            let target = blocks(1, &to);
            let restore = engine.client.restore(&lease, 0, &engine.region, &target, options);
            let restore = restore.unwrap();
            engine.client.submit().unwrap();
            assert!(!engine.stream.is_done().unwrap(), "submitted too late to show anything");
            let restored = engine.end(restore);
            assert_eq!((restored.status, restored.pages), (Status::Ok, 4), "{restored:?}");
            engine.events.give_back(fence);
            engine.stream.wait().unwrap();
            assert_eq!(counter(&wrong), 0, "the reader saw bytes of the restore");
            engine.check(&to, content(1));
        }
    }
}

/// Goal: a save waits for its event and for nothing that was given to the GPU later. Method: a kernel
/// that runs until the host lets it go stands behind the event; the save ends while it runs.
#[test]
fn later_work_of_the_gpu_holds_no_save_up() {
    let _alone = alone();
    let manager = manager(setup!());
    let mut engine = GpuEngine::attach(&manager.socket(), "later", 4, Shape::Split(36));
    let flag = Pinned::new(8).unwrap();
    let from = [0, 1];
    engine.fill(&from, content(7));
    let fence = engine.fence();
    engine.device.kernels.spin_until(&engine.stream, flag.address(), ns(2 * PATIENCE)).unwrap();
    let save = engine.begin_save(&blocks(7, &from), Some(fence));
    let saved = engine.end(save);
    assert_eq!((saved.status, saved.pages), (Status::Ok, 2), "{saved:?}");
    assert!(!engine.stream.is_done().unwrap(), "the later kernel has ended: nothing was shown");
    flag.store(0, 1);
    engine.stream.wait().unwrap();
    engine.events.give_back(fence);
    let _restored = engine.restore(&blocks(7, &[2, 3]));
    engine.check(&[2, 3], content(7));
}

/// Goal: a save without an event, with one that does not exist, or with one that another operation
/// has, is refused before a byte moves.
#[test]
fn a_save_needs_an_event_of_its_own() {
    let _alone = alone();
    let manager = manager(setup!());
    let mut engine = GpuEngine::attach(&manager.socket(), "no-fence", 4, Shape::Contiguous);
    engine.fill(&[0, 1], content(3));
    for fence in [None, Some(1_000_000)] {
        let save = engine.begin_save(&blocks(3, &[0]), fence);
        let refused = engine.end(save);
        assert_eq!((refused.status, refused.code), (Status::Error, Code::BadFence), "{fence:?}");
    }
    let flag = Pinned::new(8).unwrap();
    engine.device.kernels.spin_until(&engine.stream, flag.address(), ns(2 * PATIENCE)).unwrap();
    let fence = engine.fence();
    let first = engine.begin_save(&blocks(3, &[0]), Some(fence));
    let second = engine.begin_save(&blocks(4, &[1]), Some(fence));
    let refused = engine.end(second);
    assert_eq!((refused.status, refused.code), (Status::Error, Code::BadFence));
    flag.store(0, 1);
    assert_eq!(engine.end(first).status, Status::Ok);
    engine.events.give_back(fence);
    engine.round_trip(5);
}

/// Goal: a fence that never passes ends its save at the deadline and harms nobody else.
#[test]
fn a_fence_that_does_not_pass_ends_at_the_deadline() {
    let _alone = alone();
    let manager = manager(setup!());
    let mut engine = GpuEngine::attach(&manager.socket(), "stuck", 4, Shape::Contiguous);
    let mut other = GpuEngine::attach(&manager.socket(), "free", 4, Shape::Contiguous);
    let flag = Pinned::new(8).unwrap();
    engine.fill(&[0], content(1));
    other.fill(&[0, 1], content(2));
    // From here to its end no memory of the GPU is made or freed: that would wait for the kernel.
    engine.device.kernels.spin_until(&engine.stream, flag.address(), ns(2 * PATIENCE)).unwrap();
    let fence = engine.fence();
    let options =
        SaveOptions { fence: Some(fence), deadline: Deadline::after(Duration::from_millis(300)) };
    let chain = blocks(1, &[0]);
    let save = engine.client.save_chains(&engine.region, &[(&chain).into()], options).unwrap();
    engine.client.submit().unwrap();
    other.save(&blocks(2, &[0, 1]));
    let ended = engine.end(save);
    assert_eq!((ended.status, ended.code), (Status::Error, Code::Deadline), "{ended:?}");
    assert!(!engine.stream.is_done().unwrap(), "the kernel has ended: nothing was shown");
    flag.store(0, 1);
    engine.stream.wait().unwrap();
    engine.events.give_back(fence);
    let _restored = other.restore(&blocks(2, &[2, 3]));
    other.check(&[2, 3], content(2));
    engine.round_trip(3);
}
