//! The file system: what the kernel asks, answered from the store as the plan says.

use std::ffi::OsStr;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use fuser::{
    BsdFileFlags, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo,
    InitFlags, KernelConfig, LockOwner, OpenFlags, ReplyAttr, ReplyCreate, ReplyData,
    ReplyDirectory, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyStatfs, ReplyWrite, Request, TimeOrNow,
    WriteFlags,
};
use rustix::io::Errno;

use super::delay::{Answer, Later};
use super::plan::{Met, Plan};
use super::store::{BLOCK, Node, Store};
use super::{Requests, Served};

/// Nothing is remembered by the kernel.
const TTL: Duration = Duration::ZERO;
/// Bytes of one request at most: as much as the kernel hands over at once.
const REQUEST_BYTES_MAX: u32 = 1 << 20;
/// Requests that the kernel hands over at once.
const REQUESTS_MAX: u16 = 512;
/// What `FUSE_SUPER_MAGIC` file systems call their root.
const ROOT: u64 = 1;
/// Every name is served as `0o7777` of its mode.
const MODE_MASK: u32 = 0o7777;

/// The disk behind its file system.
#[derive(Debug)]
pub(super) struct Disk {
    store: Mutex<Store>,
    plan: Mutex<Plan>,
    later: Later,
    counts: Counts,
}

#[derive(Default, Debug)]
struct Counts {
    reads: AtomicU64,
    read_bytes: AtomicU64,
    writes: AtomicU64,
    written_bytes: AtomicU64,
    faults: AtomicU64,
}

impl Disk {
    pub(super) fn new(folder: &Path) -> Self {
        Self {
            store: Mutex::new(Store::new(folder)),
            plan: Mutex::default(),
            later: Later::default(),
            counts: Counts::default(),
        }
    }

    pub(super) fn store(&self) -> MutexGuard<'_, Store> {
        self.store.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn plan(&self) -> MutexGuard<'_, Plan> {
        self.plan.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn heal(&self, fault: u64) {
        self.plan().remove(fault);
        self.later.release(fault);
    }

    /// Nothing is answered any more.
    pub(super) fn end(&self) {
        self.later.end();
    }

    pub(super) fn served(&self) -> Served {
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let counts = &self.counts;
        Served {
            reads: load(&counts.reads),
            read_bytes: load(&counts.read_bytes),
            writes: load(&counts.writes),
            written_bytes: load(&counts.written_bytes),
            faults: load(&counts.faults),
            waiting: self.later.len() as u64,
        }
    }

    fn meet(&self, is_write: bool, offset: u64, bytes: u32) -> Met {
        let met = self.plan().meet(is_write, &(offset..offset + u64::from(bytes)));
        if met != Met::default() {
            self.counts.faults.fetch_add(1, Ordering::Relaxed);
        }
        met
    }

    /// Gives an answer now, or when the request has met its delay.
    fn answer(&self, met: &Met, answer: Answer) {
        if met.delay.is_zero() && met.hangs.is_none() {
            answer();
        } else {
            self.later.give(Instant::now() + met.delay, met.hangs, answer);
        }
    }

    fn read(&self, file: u64, offset: u64, bytes: u32, met: &Met) -> Result<Vec<u8>, Errno> {
        self.counts.reads.fetch_add(1, Ordering::Relaxed);
        if let Some(errno) = met.errno {
            return Err(errno);
        }
        let mut data = vec![0; met.bytes_max.unwrap_or(bytes).min(bytes) as usize];
        let there = self.store().read(file, &mut data, offset)?;
        data.truncate(there);
        for &flip in &met.flips {
            if let Some(byte) = data.get_mut(flip as usize) {
                *byte ^= 1;
            }
        }
        self.counts.read_bytes.fetch_add(there as u64, Ordering::Relaxed);
        Ok(data)
    }

    fn write(&self, file: u64, offset: u64, data: &[u8], met: &Met) -> Result<u32, Errno> {
        self.counts.writes.fetch_add(1, Ordering::Relaxed);
        if let Some(errno) = met.errno {
            return Err(errno);
        }
        let bytes = met.bytes_max.map_or(data.len(), |max| data.len().min(max as usize));
        self.store().write(file, &data[..bytes], offset)?;
        self.counts.written_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        Ok(bytes as u32)
    }
}

/// What the kernel talks to.
#[derive(Debug)]
pub(super) struct Service {
    disk: Arc<Disk>,
    requests: Requests,
}

impl Service {
    pub(super) fn new(disk: Arc<Disk>, requests: Requests) -> Self {
        Self { disk, requests }
    }
}

fn errno(errno: Errno) -> fuser::Errno {
    fuser::Errno::from_i32(errno.raw_os_error())
}

fn attributes(number: u64, node: &Node) -> FileAttr {
    FileAttr {
        ino: INodeNo(number),
        size: node.len,
        blocks: node.blocks() * (BLOCK / 512),
        atime: SystemTime::UNIX_EPOCH,
        mtime: SystemTime::UNIX_EPOCH,
        ctime: SystemTime::UNIX_EPOCH,
        crtime: SystemTime::UNIX_EPOCH,
        kind: FileType::RegularFile,
        perm: node.mode,
        nlink: 1,
        uid: node.owner.0,
        gid: node.owner.1,
        rdev: 0,
        blksize: BLOCK as u32,
        flags: 0,
    }
}

fn root() -> FileAttr {
    FileAttr {
        ino: INodeNo(ROOT),
        size: 0,
        blocks: 0,
        atime: SystemTime::UNIX_EPOCH,
        mtime: SystemTime::UNIX_EPOCH,
        ctime: SystemTime::UNIX_EPOCH,
        crtime: SystemTime::UNIX_EPOCH,
        kind: FileType::Directory,
        perm: 0o755,
        nlink: 2,
        uid: 0,
        gid: 0,
        rdev: 0,
        blksize: BLOCK as u32,
        flags: 0,
    }
}

const OPENED: FopenFlags =
    FopenFlags::FOPEN_DIRECT_IO.union(FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES);

impl Filesystem for Service {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let _at_most = config.set_max_write(REQUEST_BYTES_MAX);
        let _old = config.set_max_background(REQUESTS_MAX);
        if self.requests == Requests::Parallel {
            let added = config.add_capabilities(InitFlags::FUSE_ASYNC_DIO);
            added.map_err(|_| io::Error::from(io::ErrorKind::Unsupported))?;
        }
        let disk = self.disk.clone();
        thread::Builder::new().name("faulty-later".into()).spawn(move || disk.later.run())?;
        Ok(())
    }

    fn destroy(&mut self) {
        self.disk.end();
    }

    fn lookup(&self, _request: &Request, _parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let mut store = self.disk.store();
        match store.look_up(&name.to_string_lossy()) {
            Ok((number, node)) => reply.entry(&TTL, &attributes(number, node), Generation(0)),
            Err(error) => reply.error(errno(error)),
        }
    }

    fn forget(&self, _request: &Request, file: INodeNo, times: u64) {
        self.disk.store().forget(file.0, times);
    }

    fn getattr(
        &self,
        _request: &Request,
        file: INodeNo,
        _handle: Option<FileHandle>,
        reply: ReplyAttr,
    ) {
        match (file.0, self.disk.store().node(file.0)) {
            (ROOT, _) => reply.attr(&TTL, &root()),
            (number, Ok(node)) => reply.attr(&TTL, &attributes(number, node)),
            (_, Err(error)) => reply.error(errno(error)),
        }
    }

    fn setattr(
        &self,
        _request: &Request,
        file: INodeNo,
        mode: Option<u32>,
        user: Option<u32>,
        group: Option<u32>,
        size: Option<u64>,
        _accessed: Option<TimeOrNow>,
        _modified: Option<TimeOrNow>,
        _changed: Option<SystemTime>,
        _handle: Option<FileHandle>,
        _created: Option<SystemTime>,
        _type_changed: Option<SystemTime>,
        _backed_up: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let mut store = self.disk.store();
        let cut = size.map_or(Ok(()), |size| store.set_len(file.0, size));
        match cut.and_then(|()| store.node_mut(file.0)) {
            Ok(node) => {
                node.mode = mode.map_or(node.mode, |mode| (mode & MODE_MASK) as u16);
                node.owner = (user.unwrap_or(node.owner.0), group.unwrap_or(node.owner.1));
                reply.attr(&TTL, &attributes(file.0, node));
            }
            Err(error) => reply.error(errno(error)),
        }
    }

    fn create(
        &self,
        request: &Request,
        _parent: INodeNo,
        name: &OsStr,
        mode: u32,
        umask: u32,
        _flags: i32,
        reply: ReplyCreate,
    ) {
        let mut store = self.disk.store();
        let name = name.to_string_lossy();
        let mode = (mode & MODE_MASK & !umask) as u16;
        let made = store.create(&name, mode, (request.uid(), request.gid()));
        match made.and_then(|_| store.look_up(&name)) {
            Ok((number, node)) => {
                let attributes = attributes(number, node);
                reply.created(&TTL, &attributes, Generation(0), FileHandle(0), OPENED);
            }
            Err(error) => reply.error(errno(error)),
        }
    }

    fn unlink(&self, _request: &Request, _parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        match self.disk.store().unlink(&name.to_string_lossy()) {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(errno(error)),
        }
    }

    fn open(&self, _request: &Request, _file: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        reply.opened(FileHandle(0), OPENED);
    }

    fn read(
        &self,
        _request: &Request,
        file: INodeNo,
        _handle: FileHandle,
        offset: u64,
        bytes: u32,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let met = self.disk.meet(false, offset, bytes);
        let (disk, meets) = (self.disk.clone(), met.clone());
        self.disk.answer(
            &met,
            Box::new(move || match disk.read(file.0, offset, bytes, &meets) {
                Ok(data) => reply.data(&data),
                Err(error) => reply.error(errno(error)),
            }),
        );
    }

    fn write(
        &self,
        _request: &Request,
        file: INodeNo,
        _handle: FileHandle,
        offset: u64,
        data: &[u8],
        _write_flags: WriteFlags,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        let met = self.disk.meet(true, offset, data.len() as u32);
        let (disk, data, meets) = (self.disk.clone(), data.to_vec(), met.clone());
        self.disk.answer(
            &met,
            Box::new(move || match disk.write(file.0, offset, &data, &meets) {
                Ok(bytes) => reply.written(bytes),
                Err(error) => reply.error(errno(error)),
            }),
        );
    }

    fn fallocate(
        &self,
        _request: &Request,
        file: INodeNo,
        _handle: FileHandle,
        offset: u64,
        bytes: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let plain = if mode == 0 { Ok(()) } else { Err(Errno::OPNOTSUPP) };
        match plain.and_then(|()| self.disk.store().reserve(file.0, offset, bytes)) {
            Ok(()) => reply.ok(),
            Err(error) => reply.error(errno(error)),
        }
    }

    fn flush(
        &self,
        _request: &Request,
        _file: INodeNo,
        _handle: FileHandle,
        _owner: LockOwner,
        reply: ReplyEmpty,
    ) {
        reply.ok();
    }

    fn fsync(
        &self,
        _request: &Request,
        _file: INodeNo,
        _handle: FileHandle,
        _data_only: bool,
        reply: ReplyEmpty,
    ) {
        reply.ok();
    }

    fn statfs(&self, _request: &Request, _file: INodeNo, reply: ReplyStatfs) {
        let (blocks, free) = self.disk.store().space();
        reply.statfs(blocks, free, free, 1 << 20, 1 << 20, BLOCK as u32, 255, BLOCK as u32);
    }

    fn readdir(
        &self,
        _request: &Request,
        _folder: INodeNo,
        _handle: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let store = self.disk.store();
        for (at, (name, number)) in store.names().enumerate().skip(offset as usize) {
            if reply.add(INodeNo(number), at as u64 + 1, FileType::RegularFile, name) {
                break;
            }
        }
        reply.ok();
    }
}
