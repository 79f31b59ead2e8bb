//! Layers are used while later ones are still copied.

use orbitkv_benches::gpu::{Buffer, Stream};
use orbitkv_engine::cuda::DoneWordsOnGpu;
use orbitkv_engine::{RestoreOptions, Status};
use orbitkv_tests::engine::namespace;
use orbitkv_tests::setup;

use crate::engine::{GpuEngine, Shape, alone, blocks, content, counter, manager};

const LAYERS: u32 = 36;
/// Large enough that the copy is under way while its first layers are looked at: 288 MiB.
const PAGES: u32 = 32;
const PAGE: u64 = 36 * (256 << 10);

/// Goal: a layer whose done word lets a stream pass is in place on every page, with no CPU in
/// between. Method: before the restore is submitted, a stream is given for each layer a wait for its
/// word and a kernel that compares the layer; the pages hold something else before.
#[test]
fn a_stream_waits_for_each_layer_by_itself() {
    let _alone = alone();
    let manager = manager(setup!());
    let spec = namespace("layers", PAGE);
    let shape = Shape::Split(LAYERS);
    let mut engine = GpuEngine::attach_with(&manager.socket(), &spec, 2 * PAGES, shape);
    let words = DoneWordsOnGpu::register(&engine.device.gpu, &engine.client).unwrap();
    let (from, to): (Vec<u32>, Vec<u32>) = ((0..PAGES).collect(), (PAGES..2 * PAGES).collect());
    engine.fill(&from, content(1));
    engine.save(&blocks(1, &from));
    let consumer = Stream::new().unwrap();
    let placed = engine.pages.placed(&to);
    let wrong: Vec<Buffer> = (0..LAYERS).map(|_| Buffer::new(8).unwrap()).collect();
    for round in 0..10 {
        engine.poison(&to);
        wrong.iter().for_each(|counter| counter.set(0).unwrap());
        let target = blocks(1, &to);
        let lease = engine.lease(&target);
        let options = RestoreOptions { by_layer: true, ..RestoreOptions::default() };
        let restore = engine.client.restore(&lease, 0, &engine.region, &target, options).unwrap();
        for layer in 0..LAYERS {
            // SAFETY: the stream lives to the end of the test.
            unsafe { words.wait(consumer.raw(), &restore, Some(layer)) }.unwrap();
            let (part, counter) = (layer..layer + 1, &wrong[layer as usize]);
            engine.device.kernels.compare(&consumer, &placed, content(1), part, counter).unwrap();
        }
        let restored = engine.end(restore);
        assert_eq!((restored.status, restored.pages), (Status::Ok, PAGES), "{restored:?}");
        consumer.wait().unwrap();
        for layer in 0..LAYERS {
            let done = engine.client.is_layer_done(&restore, layer);
            assert_eq!(done, Some(true), "layer {layer} of round {round}");
            let wrong = counter(&wrong[layer as usize]);
            assert_eq!(wrong, 0, "words of layer {layer} in round {round}");
        }
        engine.check(&to, content(1));
    }
}

/// Goal: a stream that waits for a restore that fails passes too, and the word says so.
#[test]
fn a_stream_passes_when_a_restore_fails() {
    let _alone = alone();
    let manager = manager(setup!());
    let mut engine = GpuEngine::attach(&manager.socket(), "failing", 4, Shape::Contiguous);
    let words = DoneWordsOnGpu::register(&engine.device.gpu, &engine.client).unwrap();
    engine.fill(&[0], content(1));
    engine.save(&blocks(1, &[0]));
    let lease = engine.lease(&blocks(1, &[0]));
    let consumer = Stream::new().unwrap();
    // Another page than the lease has.
    let target = blocks(2, &[1]);
    let options = RestoreOptions::default();
    let restore = engine.client.restore(&lease, 0, &engine.region, &target, options).unwrap();
    // SAFETY: the stream lives to the end of the test.
    unsafe { words.wait(consumer.raw(), &restore, None) }.unwrap();
    assert_eq!(engine.end(restore).status, Status::Error);
    consumer.wait().unwrap();
    assert_eq!(engine.client.is_done(&restore), Some(false));
    engine.round_trip(3);
}
