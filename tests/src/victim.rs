//! An honest engine whose service must stay exact whatever others do.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;

use orbitkv_engine::{
    Block, Client, Completion, Connect, Deadline, PageHash, QueryMode, Region, RegionLayout,
    RestoreOptions, Scope, Segment, Status,
};
use rustix::fs::{MemfdFlags, SealFlags};

use crate::engine::namespace;
use crate::manager::PATIENCE;

/// Bytes of a page.
pub const PAGE: usize = 4096;
/// Pages of a chain.
const CHAIN: u32 = 4;

/// Memory of an engine that a Manager maps.
///
/// # Panics
/// When there is none.
pub fn sealed_memory(bytes: u64) -> File {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let memfd = rustix::fs::memfd_create(c"engine", flags).unwrap();
    rustix::fs::ftruncate(&memfd, bytes).unwrap();
    rustix::fs::fcntl_add_seals(&memfd, SealFlags::SHRINK).unwrap();
    File::from(memfd)
}

/// The engine.
#[derive(Debug)]
pub struct Victim {
    client: Client,
    scope: Scope,
    region: Region,
    memory: File,
    rounds: u64,
}

impl Victim {
    /// Attaches with pages of `model`.
    ///
    /// # Panics
    /// When that is refused.
    pub fn attach(path: &Path, model: &str) -> Self {
        let mut client = Connect::new(path).connect().unwrap();
        let bytes = 2 * u64::from(CHAIN) * PAGE as u64;
        let memory = sealed_memory(bytes);
        let scope = client.define_namespace(&namespace(model, PAGE as u64)).unwrap();
        let handle = client.register_memfd(&memory, bytes).unwrap();
        let (stride, length) = (PAGE as u64, PAGE as u64);
        let segments = vec![Segment { memory: handle, offset: 0, stride, length, layer: 0 }];
        let layout = RegionLayout { scope, pages: 2 * CHAIN, segments };
        let region = client.register_region(&layout).unwrap();
        Self { client, scope, region, memory, rounds: 0 }
    }

    fn next(&mut self) -> Result<Completion, ServiceEnded> {
        let done = self.client.wait(PATIENCE).map_err(|_| ServiceEnded)?;
        let done = done.expect("a completion in time");
        match done.status {
            Status::Ok => Ok(done),
            Status::Gone => Err(ServiceEnded),
            _ => panic!("{done:?}"),
        }
    }

    /// Saves a new chain, finds it, restores it elsewhere and compares every byte.
    ///
    /// # Panics
    /// When a byte is wrong or the Manager does not serve.
    pub fn round(&mut self) {
        self.try_round().expect("the Manager serves");
    }

    /// [`round`](Self::round) with a Manager that may end meanwhile.
    ///
    /// # Errors
    /// It did.
    ///
    /// # Panics
    /// When a byte is wrong.
    pub fn try_round(&mut self) -> Result<(), ServiceEnded> {
        self.rounds += 1;
        let block = |page: u32, device_page| {
            let mut hash = [0; 32];
            hash[..8].copy_from_slice(&self.rounds.to_le_bytes());
            hash[8] = page as u8;
            Block { hash: PageHash(hash), page: device_page }
        };
        let saved: Vec<_> = (0..CHAIN).map(|page| block(page, page)).collect();
        let restored: Vec<_> = (0..CHAIN).map(|page| block(page, CHAIN + page)).collect();
        let hashes: Vec<_> = saved.iter().map(|block| block.hash).collect();
        let bytes: Vec<u8> = (0..CHAIN as usize * PAGE)
            .map(|at| (self.rounds as usize * 31 + at * 7 + at / PAGE) as u8)
            .collect();
        self.memory.write_all_at(&bytes, 0).unwrap();
        self.client.save(&self.region, saved.as_slice()).map_err(|_| ServiceEnded)?;
        self.client.submit().map_err(|_| ServiceEnded)?;
        assert_eq!(self.next()?.pages, CHAIN);
        let (mode, deadline) = (QueryMode::Demand, Deadline::DEFAULT);
        let query = self.client.query(&self.scope, hashes.as_slice(), mode, deadline);
        query.map_err(|_| ServiceEnded)?;
        self.client.submit().map_err(|_| ServiceEnded)?;
        let found = self.next()?;
        assert_eq!(found.pages, CHAIN);
        let lease = found.lease.unwrap();
        let options = RestoreOptions::default();
        let restore = self.client.restore(&lease, 0, &self.region, &restored, options);
        restore.map_err(|_| ServiceEnded)?;
        self.client.submit().map_err(|_| ServiceEnded)?;
        assert_eq!(self.next()?.pages, CHAIN);
        let mut back = vec![0; bytes.len()];
        self.memory.read_exact_at(&mut back, bytes.len() as u64).unwrap();
        assert!(back == bytes, "round {} came back wrong", self.rounds);
        Ok(())
    }
}

/// The Manager, or the session with it, is over.
#[derive(Clone, Copy, Debug)]
pub struct ServiceEnded;

/// A victim in a thread of its own that goes round until it is told to end.
#[derive(Debug)]
pub struct Traffic {
    ended: Arc<AtomicBool>,
    rounds: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
}

impl Traffic {
    /// Over pages that nobody else saves.
    pub fn start(path: &Path) -> Self {
        Self::of(path, "traffic")
    }

    /// Over pages of `model`, which nobody else saves.
    pub fn of(path: &Path, model: &str) -> Self {
        let mut victim = Victim::attach(path, model);
        let (ended, rounds) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (stop, count) = (Arc::clone(&ended), Arc::clone(&rounds));
        let thread = std::thread::spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                victim.round();
                count.fetch_add(1, Ordering::Release);
            }
        });
        Self { ended, rounds, thread: Some(thread) }
    }

    /// Waits until a whole round began and ended after this call.
    ///
    /// # Panics
    /// When none does.
    pub fn must_go_on(&self) {
        let until = self.rounds.load(Ordering::Acquire) + 2;
        let started = std::time::Instant::now();
        while self.rounds.load(Ordering::Acquire) < until {
            let alive = self.thread.as_ref().is_some_and(|thread| !thread.is_finished());
            assert!(alive, "the other session was harmed");
            assert!(started.elapsed() < PATIENCE, "the other session is held");
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }

    /// Ends it and says how many rounds it went.
    ///
    /// # Panics
    /// When one was not exact.
    pub fn end(mut self) -> u64 {
        self.ended.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().expect("every round was exact");
        self.rounds.load(Ordering::Acquire)
    }
}
