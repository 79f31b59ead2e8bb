//! A real GPU and an engine on it.
#![allow(unsafe_code, reason = "calls the CUDA driver")]

use std::sync::{Arc, Mutex};

use cudarc::driver::{result, sys};
use orbitkv_manager::device::{
    CudaDevice, CudaImportError, CudaImporter, CudaMemory, DeviceMemory, Gpus,
};
use orbitkv_manager::pool::DramPool;
use orbitkv_shm_protocol::bootstrap::message::{GpuId, HexBytes, IpcHandle};
use orbitkv_shm_protocol::doorbell::ControlRinger;
use orbitkv_shm_protocol::segment::DoneWords;
use orbitkv_shm_protocol::spin::WINDOW_UNMEASURED;

use crate::conformance::{EngineMemory, Rig, conformance, done_words};
use crate::engine::{Engine, enter};

struct OneGpu {
    gpus: Arc<Gpus>,
    importer: Mutex<CudaImporter>,
    engine: Mutex<Engine>,
    /// Of the words that were reached for.
    reached: Mutex<Vec<CudaMemory>>,
}

impl OneGpu {
    fn new() -> Self {
        let gpus = Arc::new(Gpus::find().expect("a GPU"));
        let importer = Mutex::new(CudaImporter::new(Arc::clone(&gpus)));
        let engine = Mutex::new(Engine::spawn());
        Self { gpus, importer, engine, reached: Mutex::new(vec![]) }
    }

    fn gpu(&self) -> GpuId {
        self.gpus.list()[0].id()
    }

    fn import(
        &self,
        handle: &IpcHandle,
        range: (u64, u64),
        words: &DoneWords,
    ) -> Result<CudaMemory, CudaImportError> {
        let peer = self.engine.lock().expect("lock").peer();
        let mut importer = self.importer.lock().expect("lock");
        importer.import_memory(self.gpu(), handle, range, peer, words)
    }

    fn allocate(&self, bytes: u64) -> IpcHandle {
        self.engine.lock().expect("lock").allocate(bytes)
    }
}

impl Rig for OneGpu {
    type Device = CudaDevice;

    fn start(&self, pool: Arc<DramPool>, notify: ControlRinger) -> CudaDevice {
        CudaDevice::start(&self.gpus, &pool, notify, WINDOW_UNMEASURED).expect("device")
    }

    fn memory(&self, bytes: u64) -> Box<dyn EngineMemory> {
        // Not from the start of the allocation, as a tensor among others.
        let offset = 512;
        let handle = self.allocate(bytes + offset);
        let (words, _) = done_words();
        let memory = self.import(&handle, (offset, bytes), &words).expect("import");
        assert_eq!(memory.bytes(), bytes);
        Box::new(GpuMemory::open(&handle, offset, memory))
    }

    fn reach(&self, words: &DoneWords) {
        let memory = self.import(&self.allocate(4096), (0, 4096), words).expect("import");
        self.reached.lock().expect("lock").push(memory);
    }
}

/// The engine's memory, opened once more by the test itself.
struct GpuMemory {
    address: u64,
    handle: Arc<DeviceMemory>,
}

impl GpuMemory {
    fn open(handle: &IpcHandle, offset: u64, memory: CudaMemory) -> Self {
        enter();
        let raw = sys::CUipcMemHandle { reserved: handle.0.map(|byte| byte as _) };
        let mut address = 0;
        // SAFETY: a handle of a live allocation of another process.
        let answer = unsafe { sys::cuIpcOpenMemHandle_v2(&raw mut address, raw, 1) };
        answer.result().expect("open");
        Self { address: address + offset, handle: Arc::new(DeviceMemory::Cuda(memory)) }
    }
}

impl EngineMemory for GpuMemory {
    fn handle(&self) -> Arc<DeviceMemory> {
        Arc::clone(&self.handle)
    }

    fn write(&self, offset: u64, bytes: &[u8]) {
        enter();
        // SAFETY: within the allocation, as the suite does; waits for its end.
        unsafe { result::memcpy_htod_sync(self.address + offset, bytes) }.expect("write");
    }

    fn read(&self, offset: u64, bytes: usize) -> Vec<u8> {
        enter();
        let mut copy = vec![0; bytes];
        // SAFETY: within the allocation, as the suite does; waits for its end.
        unsafe { result::memcpy_dtoh_sync(&mut copy, self.address + offset) }.expect("read");
        copy
    }
}

conformance!(gpu, super::OneGpu::new());

#[test]
fn what_cannot_be_opened_is_refused_by_name() {
    let rig = OneGpu::new();
    let (words, _) = done_words();
    let handle = rig.allocate(8192);
    let refused =
        |handle: &IpcHandle, range| rig.import(handle, range, &words).expect_err("refused");
    let junk = refused(&HexBytes([0x5a; 64]), (0, 4096)).to_string();
    assert!(junk.contains("CUDA_ERROR_") && junk.contains("expandable_segments"), "{junk}");
    for range in [(0, 8 << 20), (4 << 20, 4096), (u64::MAX, 2)] {
        let error = refused(&handle, range);
        assert!(matches!(error, CudaImportError::OutOfBounds { .. }), "{error}");
    }
    let elsewhere = HexBytes([7; 16]);
    let peer = rig.engine.lock().expect("lock").peer();
    let mut importer = CudaImporter::new(Arc::clone(&rig.gpus));
    let unknown = importer.import_memory(elsewhere, &handle, (0, 4096), peer.clone(), &words);
    let unknown = unknown.expect_err("no such GPU").to_string();
    assert!(unknown.contains(&elsewhere.to_string()) && unknown.contains(&rig.gpu().to_string()));
    let events = importer.import_events(rig.gpu(), &[HexBytes([1; 64])], &peer);
    let events = events.expect_err("no event").to_string();
    assert!(events.contains("event 0") && events.contains("CUDA_ERROR_"), "{events}");
    // Nothing of it is sticky.
    assert!(rig.import(&handle, (4096, 4096), &words).is_ok());
}
