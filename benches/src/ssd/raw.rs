//! The other side: a plain io_uring loop over the same files and the same memory.
#![allow(unsafe_code, reason = "hands addresses of buffers to the kernel")]

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use io_uring::squeue::Entry;
use io_uring::types::Fd;
use io_uring::{IoUring, opcode};
use orbitkv_manager::core::Extent;
use orbitkv_manager::pool::DramPool;
use orbitkv_manager::ssd::DeviceInfo;

use super::field::{Buffers, Field, LastRead, Walk};
use super::slice::{Meter, Slice};
use crate::error::BenchError;

/// Requests in the kernel at most.
pub(super) const DEPTH_MAX: u16 = 64;
/// Arenas up to this length are registered as one buffer each.
const ARENA_BYTES_MAX: u64 = 1 << 30;

/// Which way the bytes go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Op {
    Read,
    Write,
}

/// How pages become requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Way {
    /// Length of a request, at most a page.
    pub(super) request_bytes: u32,
    /// Requests in the kernel.
    pub(super) depth: u16,
}

/// A ring, the files and the memory.
pub(super) struct Raw {
    pub(super) ring: IoUring,
    files: Vec<File>,
    /// The arenas are registered: arena and buffer have the same number.
    fixed: bool,
    pool: Arc<DramPool>,
    /// Pages whose bytes were compared after a slice.
    pub(super) compared: u64,
}

/// A page of which requests are in the kernel.
#[derive(Clone, Copy)]
struct Page {
    slot: u32,
    buffer: usize,
    extent: Extent,
    sent: u32,
    back: u32,
    ordered: Instant,
}

/// What a slice has out.
struct Out {
    pages: Vec<Page>,
    free_pages: Vec<u32>,
    idle_buffers: VecDeque<usize>,
    open: Option<u32>,
    requests: u16,
    next_write: usize,
    last: LastRead,
}

/// What a slice does.
struct Job<'a> {
    field: &'a mut Field,
    buffers: &'a Buffers,
    walk: &'a mut Walk,
    op: Op,
    way: Way,
}

impl Raw {
    /// Opens the files once more and makes a ring, in the mode of the tier's own.
    pub(super) fn open(devices: &[DeviceInfo], pool: &Arc<DramPool>) -> Result<Self, BenchError> {
        let open = |info: &DeviceInfo| open_file(&info.path, info.direct);
        let files: io::Result<Vec<File>> = devices.iter().map(open).collect();
        let files = files.map_err(BenchError::system("open of the file for the plain loop"))?;
        let ring = make_ring().map_err(BenchError::system("io_uring_setup for the plain loop"))?;
        let mut raw = Self { ring, files, fixed: false, pool: pool.clone(), compared: 0 };
        raw.fixed = raw.register();
        Ok(raw)
    }

    /// Registers the arenas where the kernel allows it.
    fn register(&self) -> bool {
        let mut vector = Vec::new();
        for arena in 0..self.pool.arena_bytes().len() {
            let Some(slice) = self.pool.arena(arena as u16) else { return false };
            if slice.bytes() as u64 > ARENA_BYTES_MAX {
                return false;
            }
            let iov_base = slice.as_ptr().cast();
            vector.push(libc::iovec { iov_base, iov_len: slice.bytes() });
        }
        // SAFETY: every entry is a whole arena; the pool outlives the ring, which ends the
        // registration (both are fields of this value, and the pool is shared).
        unsafe { self.ring.submitter().register_buffers(&vector) }.is_ok()
    }

    /// One slice in one direction; what is still out at its end is waited for.
    pub(super) fn slice(
        &mut self,
        field: &mut Field,
        buffers: &Buffers,
        (walk, op, way): (&mut Walk, Op, Way),
        length: Duration,
    ) -> Result<Slice, BenchError> {
        buffers.spoil()?;
        let mut job = Job { field, buffers, walk, op, way };
        let mut out = Out::new(&job);
        let mut meter = Meter::start(length);
        while !meter.is_over(op == Op::Read, op == Op::Write) {
            while out.requests < way.depth && self.send(&mut job, &mut out)? {}
            self.take(&job, &mut out, &mut meter)?;
        }
        let slice = meter.close();
        let mut rest = Meter::start(Duration::ZERO);
        while out.requests > 0 || out.open.is_some() {
            // A page that was begun is written whole: the next reader expects it.
            while out.open.is_some() && out.requests < way.depth && self.send(&mut job, &mut out)? {
            }
            self.take(&job, &mut out, &mut rest)?;
        }
        self.compared += out.last.compare(job.field, buffers)?;
        Ok(slice)
    }

    /// Sends the next request. False when every page that may be out is.
    fn send(&mut self, job: &mut Job<'_>, out: &mut Out) -> Result<bool, BenchError> {
        let Some(number) = out.open.take().or_else(|| out.begin(job)) else { return Ok(false) };
        let page = &mut out.pages[number as usize];
        let bytes = job.way.request_bytes.min(job.field.page_bytes - page.sent);
        let offset = page.extent.offset + u64::from(page.sent);
        let part = Extent { offset, bytes, ..page.extent };
        let slot = job.field.slot(page.slot);
        let at = slot.offset + u64::from(page.sent);
        let entry = self.entry(job.op, slot.device, at, part)?;
        page.sent += bytes;
        if page.sent < job.field.page_bytes {
            out.open = Some(number);
        }
        let entry = entry.user_data(u64::from(number) << 32 | u64::from(bytes));
        self.push(&entry)?;
        out.requests += 1;
        Ok(true)
    }

    /// Hands over a request from [`entry`](Self::entry), whose part of the pool is used for nothing
    /// else until its completion.
    pub(super) fn push(&mut self, entry: &Entry) -> Result<(), BenchError> {
        // SAFETY: the entry points into the pool, which stays mapped for as long as `self`, and
        // its caller uses that part for nothing else until the completion, as said above.
        let pushed = unsafe { self.ring.submission().push(entry) };
        pushed.map_err(|_| wrong("the ring has fewer entries than asked for"))
    }

    /// A request between `part` of the pool and place `at` of a device.
    pub(super) fn entry(
        &self,
        op: Op,
        device: u16,
        at: u64,
        part: Extent,
    ) -> Result<Entry, BenchError> {
        let file = &self.files[usize::from(device)];
        let slice = self.pool.slice(part).ok_or_else(|| wrong("a buffer outside the pool"))?;
        let (file, start, bytes) = (Fd(file.as_raw_fd()), slice.as_ptr(), part.bytes);
        Ok(match (op, self.fixed) {
            (Op::Read, true) => {
                opcode::ReadFixed::new(file, start, bytes, part.arena).offset(at).build()
            }
            (Op::Read, false) => opcode::Read::new(file, start, bytes).offset(at).build(),
            (Op::Write, true) => {
                opcode::WriteFixed::new(file, start, bytes, part.arena).offset(at).build()
            }
            (Op::Write, false) => opcode::Write::new(file, start, bytes).offset(at).build(),
        })
    }

    /// Waits for a request and takes all that are back.
    fn take(&mut self, job: &Job<'_>, out: &mut Out, meter: &mut Meter) -> Result<(), BenchError> {
        match self.ring.submit_and_wait(1) {
            Err(error) if error.kind() != io::ErrorKind::Interrupted => {
                return Err(BenchError::System { operation: "io_uring_enter", source: error });
            }
            _ => {}
        }
        let now = Instant::now();
        for completion in self.ring.completion() {
            let bytes = completion.user_data() as u32;
            if completion.result() != bytes as i32 {
                let result = completion.result();
                return Err(wrong(&format!("{:?} of {bytes} bytes: {result}", job.op)));
            }
            out.requests -= 1;
            let number = (completion.user_data() >> 32) as u32;
            let page = &mut out.pages[number as usize];
            page.back += bytes;
            if page.back < job.field.page_bytes {
                continue;
            }
            match job.op {
                Op::Read => {
                    meter.read(job.field.page_bytes, page.ordered, now);
                    out.last.set(page.buffer, page.slot);
                    out.idle_buffers.push_back(page.buffer);
                }
                Op::Write => meter.wrote(job.field.page_bytes),
            }
            out.free_pages.push(number);
        }
        meter.open(now);
        Ok(())
    }
}

impl Out {
    fn new(job: &Job<'_>) -> Self {
        // Fewer pages than slots: a slot comes again when it has long been back.
        let pages = job.buffers.reads.len().min(job.walk.len() - 1) as u32;
        let extent = Extent { arena: 0, offset: 0, bytes: 0 };
        let page = Page { slot: 0, buffer: 0, extent, sent: 0, back: 0, ordered: Instant::now() };
        Self {
            pages: vec![page; pages as usize],
            free_pages: (0..pages).rev().collect(),
            idle_buffers: job.buffers.idle(),
            open: None,
            requests: 0,
            next_write: 0,
            last: LastRead::new(job.buffers),
        }
    }

    /// Begins a page.
    fn begin(&mut self, job: &mut Job<'_>) -> Option<u32> {
        let number = self.free_pages.pop()?;
        let slot = job.walk.next();
        let (buffer, extent) = match job.op {
            Op::Read => {
                let buffer = self.idle_buffers.pop_front()?;
                (buffer, job.buffers.reads[buffer])
            }
            Op::Write => {
                let buffer = self.next_write % job.buffers.writes.len();
                self.next_write += 1;
                job.field.set_content(slot, buffer);
                (buffer, job.buffers.writes[buffer])
            }
        };
        let ordered = Instant::now();
        self.pages[number as usize] = Page { slot, buffer, extent, sent: 0, back: 0, ordered };
        Some(number)
    }
}

fn open_file(path: &Path, direct: bool) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true);
    if direct {
        options.custom_flags(libc::O_DIRECT);
    }
    options.open(path)
}

fn make_ring() -> io::Result<IoUring> {
    let mut newest = IoUring::builder();
    newest.dontfork().setup_single_issuer().setup_defer_taskrun();
    match newest.build(DEPTH_MAX.into()) {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
            IoUring::builder().dontfork().build(DEPTH_MAX.into())
        }
        made => made,
    }
}

pub(super) fn wrong(message: &str) -> BenchError {
    BenchError::Wrong(message.into())
}
