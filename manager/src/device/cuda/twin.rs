//! A GPU of threads: each stream is one, and moves bytes of this process. It keeps the laws that a
//! real one keeps (order within a stream, none between streams) and fails as told.
#![allow(unsafe_code, reason = "copies between addresses that the worker vouches for")]

use std::collections::VecDeque;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use orbitkv_shm_protocol::doorbell::ControlRinger;
use orbitkv_shm_protocol::spin::WINDOW_UNMEASURED;
use rustix::process::{PidfdFlags, getpid, pidfd_open};

use super::driver::CudaError;
use super::method::{Choice, Costs, Method};
use super::plan::Rect;
use super::table::Table;
use super::worker::{CopyEngine, STREAMS};
use super::{CudaDevice, CudaMemory};
use crate::conformance::{EngineMemory, Rig, conformance};
use crate::core::Direction;
use crate::device::{DeviceMemory, PeerHandle};
use crate::pool::DramPool;

enum Order {
    Copy(Direction, Rect),
    Rows(Box<Table>),
    Store(u64, u32),
    Mark(u32),
}

/// What a test does to a GPU.
#[derive(Debug, Default)]
pub(super) struct Switches {
    /// Nothing moves while it is set.
    pub(super) held: AtomicBool,
    /// Orders of copies, launches too, that are taken before one is refused; 0 for all.
    pub(super) refuse_after: AtomicU64,
    /// Orders of copies, launches too, that are carried out before the GPU dies; 0 for all.
    pub(super) die_after: AtomicU64,
    /// How long each kernel waits for multiprocessors.
    pub(super) kernel_wait_ms: AtomicU64,
    /// Marks are refused while it is set; the streams go on.
    pub(super) refuse_marks: AtomicBool,
    /// The GPU is dead, whether anybody knows or not.
    pub(super) dead: AtomicBool,
    copies: AtomicU64,
    /// Copies and launches that were ordered.
    pub(super) ordered: [AtomicU64; 2],
    /// Bytes of copies that were carried out.
    pub(super) moved: AtomicU64,
}

impl Switches {
    /// False from the copy on with which the GPU dies.
    fn survives(&self) -> bool {
        let copies = self.copies.fetch_add(1, Ordering::AcqRel) + 1;
        let die_after = self.die_after.load(Ordering::Acquire);
        let dies = die_after > 0 && copies > die_after;
        self.dead.fetch_or(dies, Ordering::AcqRel);
        !dies
    }
}

#[derive(Default)]
struct StreamState {
    orders: Mutex<(VecDeque<Order>, bool)>,
    wake: Condvar,
    reached: AtomicU32,
    /// Orders taken and not carried out.
    pending: AtomicU32,
}

/// The twin of a GPU's streams.
pub(super) struct Twin {
    streams: Vec<(Arc<StreamState>, Option<JoinHandle<()>>)>,
    switches: Arc<Switches>,
    methods: Methods,
}

/// How a twin copies.
#[derive(Clone, Copy, Debug)]
pub(super) enum Methods {
    Only(Method),
    Chosen(Costs),
}

impl Default for Methods {
    fn default() -> Self {
        Self::Only(Method::Orders)
    }
}

impl Twin {
    fn new(switches: &Arc<Switches>, methods: Methods) -> Self {
        let stream = |_| {
            let state = Arc::new(StreamState::default());
            let (seen, switches) = (Arc::clone(&state), Arc::clone(switches));
            (state, Some(thread::spawn(move || carry_out(&seen, &switches))))
        };
        let streams = (0..STREAMS).map(stream).collect();
        Self { streams, switches: Arc::clone(switches), methods }
    }

    /// Counts an order of a copy.
    fn count(&self, method: Method) -> Result<(), CudaError> {
        let ordered = &self.switches.ordered;
        ordered[method as usize].fetch_add(1, Ordering::AcqRel);
        let all: u64 = ordered.iter().map(|count| count.load(Ordering::Acquire)).sum();
        let refuse_after = self.switches.refuse_after.load(Ordering::Acquire);
        if refuse_after > 0 && all > refuse_after {
            return Err(CudaError::of_twin("copy"));
        }
        Ok(())
    }

    fn order(&self, stream: usize, order: Order) -> Result<(), CudaError> {
        if self.switches.dead.load(Ordering::Acquire) {
            return Err(CudaError::of_twin("order"));
        }
        let state = &self.streams[stream].0;
        state.pending.fetch_add(1, Ordering::AcqRel);
        state.orders.lock().unwrap_or_else(PoisonError::into_inner).0.push_back(order);
        state.wake.notify_one();
        Ok(())
    }
}

impl Drop for Twin {
    fn drop(&mut self) {
        for (state, thread) in &mut self.streams {
            state.orders.lock().unwrap_or_else(PoisonError::into_inner).1 = true;
            state.wake.notify_one();
            if let Some(thread) = thread.take() {
                assert!(thread.join().is_ok(), "a stream panicked");
            }
        }
    }
}

fn carry_out(state: &StreamState, switches: &Switches) {
    loop {
        let order = {
            let mut orders = state.orders.lock().unwrap_or_else(PoisonError::into_inner);
            loop {
                if switches.held.load(Ordering::Acquire) {
                    drop(orders);
                    thread::yield_now();
                    orders = state.orders.lock().unwrap_or_else(PoisonError::into_inner);
                    continue;
                }
                if let Some(order) = orders.0.pop_front() {
                    break order;
                }
                if orders.1 {
                    return;
                }
                orders = state.wake.wait(orders).unwrap_or_else(PoisonError::into_inner);
            }
        };
        if !switches.dead.load(Ordering::Acquire) {
            match order {
                Order::Copy(direction, rect) if switches.survives() => {
                    move_rect(direction, &rect);
                    switches.moved.fetch_add(rect.bytes(), Ordering::AcqRel);
                }
                Order::Rows(table) if switches.survives() => {
                    let wait = switches.kernel_wait_ms.load(Ordering::Acquire);
                    thread::sleep(Duration::from_millis(wait));
                    let mut moved = 0;
                    for piece in 0..table.pieces() {
                        table.each_unit(piece, |device, host, bytes| {
                            move_bytes(table.direction(), device, host, bytes);
                            moved += bytes;
                        });
                    }
                    switches.moved.fetch_add(moved, Ordering::AcqRel);
                }
                Order::Copy(..) | Order::Rows(_) => {}
                Order::Store(address, value) => {
                    let word = ptr::with_exposed_provenance_mut::<u32>(address as usize);
                    // SAFETY: the worker's promise: an aligned word that stays mapped.
                    unsafe { AtomicU32::from_ptr(word) }.store(value, Ordering::Release);
                }
                Order::Mark(sequence) => state.reached.store(sequence, Ordering::Release),
            }
        }
        state.pending.fetch_sub(1, Ordering::AcqRel);
    }
}

fn move_rect(direction: Direction, rect: &Rect) {
    // As strict as the driver.
    for pitch in [rect.device_pitch, rect.host_pitch] {
        assert!(pitch >= rect.width || rect.rows == 1 && pitch == 0, "{rect:?}");
    }
    for row in 0..rect.rows {
        let device = rect.device + row * rect.device_pitch;
        move_bytes(direction, device, rect.host + row * rect.host_pitch, rect.width);
    }
}

fn move_bytes(direction: Direction, device: u64, host: u64, bytes: u64) {
    let device = ptr::with_exposed_provenance_mut::<u8>(device as usize);
    let host = ptr::with_exposed_provenance_mut::<u8>(host as usize);
    let (from, to) = match direction {
        Direction::Save => (device, host),
        Direction::Restore => (host, device),
    };
    // SAFETY: the worker's promise: both sides are mapped and belong to this copy.
    unsafe { ptr::copy_nonoverlapping(from, to, bytes as usize) };
}

impl CopyEngine for Twin {
    unsafe fn copy(
        &mut self,
        stream: usize,
        direction: Direction,
        rect: &Rect,
    ) -> Result<(), CudaError> {
        self.count(Method::Orders)?;
        self.order(stream, Order::Copy(direction, *rect))
    }

    unsafe fn copy_batch(
        &mut self,
        stream: usize,
        direction: Direction,
        rects: &[Rect],
    ) -> Result<(), CudaError> {
        for rect in rects {
            self.count(Method::Orders)?;
            self.order(stream, Order::Copy(direction, *rect))?;
        }
        Ok(())
    }

    unsafe fn copy_rows(&mut self, stream: usize, table: &Table) -> Result<(), CudaError> {
        self.count(Method::Kernel)?;
        self.order(stream, Order::Rows(Box::new(table.clone())))
    }

    unsafe fn store(&mut self, stream: usize, address: u64, value: u32) -> Result<(), CudaError> {
        self.order(stream, Order::Store(address, value))
    }

    fn mark(&mut self, stream: usize, sequence: u32) -> Result<(), CudaError> {
        if self.switches.refuse_marks.load(Ordering::Acquire) {
            return Err(CudaError::of_twin("mark"));
        }
        self.order(stream, Order::Mark(sequence))
    }

    fn reached(&self, stream: usize) -> u32 {
        self.streams[stream].0.reached.load(Ordering::Acquire)
    }

    fn is_idle(&self, stream: usize) -> Result<bool, CudaError> {
        // Orders that are left when it dies are dropped one by one; the one that runs is waited for.
        let idle = self.streams[stream].0.pending.load(Ordering::Acquire) == 0;
        if idle && self.switches.dead.load(Ordering::Acquire) {
            return Err(CudaError::of_twin("is_idle"));
        }
        Ok(idle)
    }

    fn pitch_max(&self) -> u64 {
        (1 << 31) - 1
    }

    fn choice(&self) -> Choice {
        match self.methods {
            Methods::Only(method) => Choice::only(method),
            Methods::Chosen(costs) => Choice::measured(costs, Instant::now()),
        }
    }
}

/// Twins for tests.
#[derive(Default)]
pub(super) struct Twins {
    pub(super) switches: Arc<Switches>,
    pub(super) methods: Methods,
}

impl Twins {
    /// That know one method.
    pub(super) fn only(method: Method) -> Self {
        Self { methods: Methods::Only(method), ..Self::default() }
    }
}

impl Rig for Twins {
    type Device = CudaDevice;

    fn start(&self, pool: Arc<DramPool>, notify: ControlRinger) -> CudaDevice {
        let (switches, methods) = (Arc::clone(&self.switches), self.methods);
        let open = move |_| Ok(Box::new(Twin::new(&switches, methods)) as Box<dyn CopyEngine>);
        CudaDevice::with_engines(1, Arc::new(open), pool, notify, WINDOW_UNMEASURED)
    }

    fn memory(&self, bytes: u64) -> Box<dyn EngineMemory> {
        Box::new(TwinMemory::new(bytes))
    }
}

/// Memory of the twin, in words so that it is aligned.
pub(super) struct TwinMemory {
    /// Exposed; reached by address only.
    start: *mut u64,
    words: usize,
    handle: Arc<DeviceMemory>,
}

fn this_process() -> PeerHandle {
    let pidfd = pidfd_open(getpid(), PidfdFlags::empty()).expect("pidfd");
    PeerHandle { pid: getpid().as_raw_nonzero().get(), pidfd: Arc::new(pidfd) }
}

impl TwinMemory {
    /// Memory of an engine that may be another process.
    pub(super) fn of_peer(bytes: u64, peer: PeerHandle) -> Self {
        let words = vec![0_u64; bytes.div_ceil(8) as usize].into_boxed_slice();
        let count = words.len();
        let start = Box::into_raw(words).cast::<u64>();
        let memory = CudaMemory::twin(start.expose_provenance() as u64, bytes, peer);
        Self { start, words: count, handle: Arc::new(DeviceMemory::Cuda(memory)) }
    }

    /// Memory that no copy may touch.
    pub(super) fn made_up(bytes: u64) -> DeviceMemory {
        DeviceMemory::Cuda(CudaMemory::twin(0, bytes, this_process()))
    }

    pub(super) fn new(bytes: u64) -> Self {
        Self::of_peer(bytes, this_process())
    }
}

impl Drop for TwinMemory {
    fn drop(&mut self) {
        let slice = ptr::slice_from_raw_parts_mut(self.start, self.words);
        // SAFETY: made by `Box::into_raw` in `new`; no copy of it is in flight when a test ends.
        drop(unsafe { Box::from_raw(slice) });
    }
}

impl EngineMemory for TwinMemory {
    fn handle(&self) -> Arc<DeviceMemory> {
        Arc::clone(&self.handle)
    }

    fn write(&self, offset: u64, bytes: &[u8]) {
        assert!(offset as usize + bytes.len() <= self.words * 8);
        // SAFETY: within the allocation, checked above; the test copies nothing meanwhile.
        let to = unsafe { self.start.cast::<u8>().add(offset as usize) };
        // SAFETY: as above.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
    }

    fn read(&self, offset: u64, bytes: usize) -> Vec<u8> {
        assert!(offset as usize + bytes <= self.words * 8);
        let mut copy = vec![0; bytes];
        // SAFETY: within the allocation, checked above; the test copies nothing meanwhile.
        let from = unsafe { self.start.cast::<u8>().add(offset as usize) };
        // SAFETY: as above.
        unsafe { ptr::copy_nonoverlapping(from, copy.as_mut_ptr(), bytes) };
        copy
    }
}

conformance!(by_orders, Twins::only(Method::Orders));
conformance!(by_kernel, Twins::only(Method::Kernel));
