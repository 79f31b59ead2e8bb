//! A process that keeps the GPU busy, as an engine does that decodes, and counts what it gets done.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::error::BenchError;
use crate::gpu::{Buffer, Device, Stream};

/// How long one kernel takes on a GPU that nobody else uses.
const KERNEL: Duration = Duration::from_micros(200);
/// Arithmetic by which the length of a kernel is found.
const TRIAL_LOOPS: u64 = 1 << 16;
/// Kernels that are waited for together: the GPU never runs dry for long.
const BATCH: u64 = 10;

/// Kernels one behind the other until this is dropped.
pub(crate) struct Busy {
    counted: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    worker: Option<JoinHandle<()>>,
    failed: Receiver<BenchError>,
    last: (Instant, u64),
}

impl Busy {
    /// Begins.
    pub(crate) fn start() -> Result<Self, BenchError> {
        let (counted, stop) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
        let (failure, failed) = channel();
        let (count, stopped) = (Arc::clone(&counted), Arc::clone(&stop));
        let worker = thread::spawn(move || {
            if let Err(error) = run(&count, &stopped) {
                let _gone = failure.send(error);
            }
        });
        let worker = Some(worker);
        let mut busy = Self { counted, stop, worker, failed, last: (Instant::now(), 0) };
        // The driver takes a while to start.
        while busy.counted.load(Ordering::Relaxed) == 0 {
            thread::sleep(KERNEL);
            busy.rate()?;
        }
        Ok(busy)
    }

    /// Kernels a second since the last call.
    pub(crate) fn rate(&mut self) -> Result<f64, BenchError> {
        if let Ok(error) = self.failed.try_recv() {
            return Err(error);
        }
        let now = (Instant::now(), self.counted.load(Ordering::Relaxed));
        let (since, before) = std::mem::replace(&mut self.last, now);
        Ok((now.1 - before) as f64 / (now.0 - since).as_secs_f64())
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(worker) = self.worker.take() {
            let _panicked = worker.join();
        }
    }
}

fn run(counted: &AtomicU64, stop: &AtomicBool) -> Result<(), BenchError> {
    let device = Device::open(0)?;
    let sink = Buffer::new(4)?;
    let stream = Stream::new()?;
    let kernels = |count: u64, loops| {
        let begin = Instant::now();
        for _ in 0..count {
            device.kernels.work(&stream, loops, &sink)?;
        }
        stream.wait()?;
        Ok::<_, BenchError>(begin.elapsed())
    };
    // The first run loads the kernel.
    kernels(1, TRIAL_LOOPS)?;
    let trial = kernels(BATCH, TRIAL_LOOPS)?;
    let each = trial.as_nanos() as u64 / BATCH;
    let loops = (TRIAL_LOOPS * KERNEL.as_nanos() as u64 / each.max(1)).max(1);
    while !stop.load(Ordering::Relaxed) {
        kernels(BATCH, loops)?;
        counted.fetch_add(BATCH, Ordering::Relaxed);
    }
    Ok(())
}
