//! The device of engines whose KV lies in memory of NVIDIA GPUs: one thread a GPU.
//!
//! Memory and events of an engine are opened by CUDA IPC, copies run on the copy engines (those of
//! many small rows by a kernel while no engine computes), and the GPU itself stores an operation's
//! done word behind them.

mod driver;
mod event;
mod gpu;
mod kernel;
mod memory;
mod method;
mod pins;
mod plan;
mod reaper;
mod streams;
mod table;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod twin;
mod words;
mod worker;

use std::sync::Arc;
use std::time::Duration;

use orbitkv_shm_protocol::bootstrap::message::{GpuId, IpcHandle};
use orbitkv_shm_protocol::doorbell::ControlRinger;
use orbitkv_shm_protocol::segment::DoneWords;
use orbitkv_shm_protocol::spin::Spin;

use super::lane::{Lane, Queues};
use super::{
    COMMANDS_MAX, CopyCommand, CopyEnd, CopyError, Device, DeviceEvent, DeviceMemory, DeviceRegion,
    Moved, PeerHandle,
};
use crate::clock::Clock;
use crate::image::ImageMemory;
use crate::pool::DramPool;
use event::CudaEvent;
use pins::Pins;
use streams::Streams;
use words::WordsRegistry;
use worker::{CopyEngine, Worker};

pub use driver::CudaError;
pub use gpu::{Gpu, Gpus, NoCuda};
pub use memory::{CudaImportError, CudaMemory};

/// Makes what copies for a GPU, on the thread that will use it.
type OpenEngine = dyn Fn(u32) -> Result<Box<dyn CopyEngine>, CudaError> + Send + Sync;

/// Copies between GPUs and the pool. Not `Sync`: the reactor owns it.
pub struct CudaDevice {
    open: Arc<OpenEngine>,
    images: Arc<dyn ImageMemory>,
    notify: ControlRinger,
    spin: Spin,
    /// By the number of the GPU; started with its first command.
    lanes: Vec<Option<Lane>>,
    outstanding: [usize; 2],
    /// Ends that no lane has: of GPUs that could not be started.
    ends: Vec<CopyEnd>,
    polled_last: usize,
    stopped: bool,
    /// Dropped last, when nothing copies from it or to it.
    _pins: Option<Pins>,
}

impl CudaDevice {
    /// Registers the whole pool with the driver (about 20 ms a GiB in huge pages). `notify` is rung
    /// after each end. `spin_window` is how long a thread that ran out of work may look for more
    /// before it sleeps.
    ///
    /// # Errors
    /// The pool cannot be registered.
    pub fn start(
        gpus: &Arc<Gpus>,
        pool: &Arc<DramPool>,
        notify: ControlRinger,
        spin_window: Duration,
    ) -> Result<Self, CudaImportError> {
        let pins = Pins::of(gpus, pool)?;
        let (gpus, count) = (Arc::clone(gpus), gpus.list().len());
        let open = move |gpu: u32| {
            let streams = Streams::open(&gpus.list()[gpu as usize])?;
            Ok(Box::new(streams) as Box<dyn CopyEngine>)
        };
        let images = Arc::clone(pool) as Arc<dyn ImageMemory>;
        let device = Self::with_engines(count, Arc::new(open), images, notify, spin_window);
        Ok(Self { _pins: Some(pins), ..device })
    }

    fn with_engines(
        count: usize,
        open: Arc<OpenEngine>,
        images: Arc<dyn ImageMemory>,
        notify: ControlRinger,
        spin_window: Duration,
    ) -> Self {
        Self {
            open,
            images,
            notify,
            spin: Spin::new(spin_window),
            lanes: (0..count).map(|_| None).collect(),
            outstanding: [0; 2],
            ends: Vec::new(),
            polled_last: 0,
            stopped: false,
            _pins: None,
        }
    }

    /// Number of the GPU whose memory a region has.
    fn gpu_of(region: &DeviceRegion) -> Option<usize> {
        match region.memory(0)? {
            DeviceMemory::Cuda(memory) => Some(memory.gpu() as usize),
            DeviceMemory::Host(_) => None,
        }
    }

    fn lane(&mut self, gpu: usize) -> std::io::Result<Option<&mut Lane>> {
        let Some(lane) = self.lanes.get_mut(gpu) else { return Ok(None) };
        if lane.is_none() {
            let name = format!("orbitkv-gpu{gpu}");
            let (open, images) = (Arc::clone(&self.open), Arc::clone(&self.images));
            let mut spin = self.spin.clone();
            let work = move |queues: Queues| {
                let gpu = gpu as u32;
                let rest = |queues: &Queues| queues.wait(&mut spin);
                match open(gpu) {
                    Ok(engine) => Worker::new(engine, images, gpu, queues).run(rest),
                    Err(error) => worker::refuse_all(gpu, error, queues, rest),
                }
            };
            *lane = Some(Lane::start(&name, 2 * COMMANDS_MAX, self.notify.clone(), work)?);
        }
        Ok(lane.as_mut())
    }
}

impl Device for CudaDevice {
    fn submit(&mut self, command: CopyCommand) -> Result<(), CopyCommand> {
        let direction = command.direction as usize;
        if self.stopped || self.outstanding[direction] >= COMMANDS_MAX {
            return Err(command);
        }
        let lane = Self::gpu_of(&command.region).map_or(Ok(None), |gpu| self.lane(gpu));
        match lane {
            Ok(Some(lane)) => lane.submit(command)?,
            Ok(None) | Err(_) => {
                let error = Some(CopyError::BadCommand { page: 0 });
                let CopyCommand { ticket, direction, pages, mut checksums, .. } = command;
                checksums.clear();
                self.ends.push(CopyEnd {
                    ticket,
                    direction,
                    pages_done: 0,
                    error,
                    ended_ns: Clock::monotonic().now(),
                    moved: Moved::default(),
                    checksums,
                    pages,
                });
                self.notify.ring();
            }
        }
        self.outstanding[direction] += 1;
        Ok(())
    }

    fn expect(&mut self, region: &DeviceRegion) {
        let lane = Self::gpu_of(region).and_then(|gpu| self.lanes.get(gpu));
        if let Some(Some(lane)) = lane {
            lane.expect();
        }
    }

    fn poll(&mut self) -> Option<CopyEnd> {
        let count = self.lanes.len();
        // In turn: no GPU starves another.
        let next = |step: usize| (self.polled_last + step) % count;
        let mut order = (1..=count).map(next);
        let lanes = &mut self.lanes;
        let polled = order.find_map(|at| Some((at, lanes[at].as_mut()?.poll()?)));
        let end = match polled {
            Some((at, end)) => {
                self.polled_last = at;
                end
            }
            None => self.ends.pop()?,
        };
        self.outstanding[end.direction as usize] -= 1;
        Some(end)
    }

    fn outstanding(&self) -> usize {
        self.outstanding.iter().sum()
    }

    fn stop(&mut self) {
        self.stopped = true;
        self.lanes.iter().flatten().for_each(Lane::drain);
        self.lanes.iter_mut().flatten().for_each(Lane::join);
    }
}

/// Opens memory and events of engines, for the endpoint thread.
#[derive(Debug)]
pub struct CudaImporter {
    gpus: Arc<Gpus>,
    words: WordsRegistry,
}

impl CudaImporter {
    /// For the GPUs of this process.
    pub fn new(gpus: Arc<Gpus>) -> Self {
        Self { gpus, words: WordsRegistry::default() }
    }

    /// Opens `bytes` bytes from `offset` of an allocation of `peer`, whose session has `words`.
    ///
    /// # Errors
    /// See [`CudaImportError`]. Every argument that came from the peer may have any value.
    pub fn import_memory(
        &mut self,
        gpu: GpuId,
        handle: &IpcHandle,
        range: (u64, u64),
        peer: PeerHandle,
        words: &DoneWords,
    ) -> Result<CudaMemory, CudaImportError> {
        let gpu = Arc::clone(self.gpu(gpu)?);
        let words = self
            .words
            .of_session(&self.gpus, &gpu, words)
            .map_err(|error| CudaImportError::of(&gpu, "register done words", error))?;
        CudaMemory::import(&self.gpus, &gpu, handle, range, peer, words)
    }

    /// Opens events of `peer`, all of them or none.
    ///
    /// # Errors
    /// See [`CudaImportError`]. Every argument that came from the peer may have any value.
    pub fn import_events(
        &mut self,
        gpu: GpuId,
        handles: &[IpcHandle],
        peer: &PeerHandle,
    ) -> Result<Vec<Arc<dyn DeviceEvent>>, CudaImportError> {
        let gpu = Arc::clone(self.gpu(gpu)?);
        gpu.enter().map_err(|error| CudaImportError::of(&gpu, "open a context", error))?;
        let open = |(index, handle)| {
            let event = CudaEvent::import(&self.gpus, &gpu, handle, index, peer.pid)?;
            Ok(Arc::new(event) as Arc<dyn DeviceEvent>)
        };
        handles.iter().enumerate().map(open).collect()
    }

    fn gpu(&self, gpu: GpuId) -> Result<&Arc<Gpu>, CudaImportError> {
        self.gpus.by_id(gpu).ok_or_else(|| {
            let known = self.gpus.list().iter().map(|known| known.id()).collect();
            CudaImportError::NoSuchGpu { gpu, known }
        })
    }
}
