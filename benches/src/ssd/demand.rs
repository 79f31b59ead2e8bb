//! The plain loop with demand reads: one page at a time, alone or beside writes at a given speed.
//!
//! What reads cost beside writes on this device whoever sends them. The writes are as mild as they
//! come: short requests, evenly spaced, never to make up for time that was lost.

use std::io;
use std::time::{Duration, Instant};

use io_uring::types::{SubmitArgs, Timespec};
use orbitkv_manager::core::Extent;

use super::field::{Buffers, Field, LastRead, Walk};
use super::raw::{Op, Raw};
use super::slice::{Meter, Slice};
use crate::error::BenchError;

/// Length of a read request, as the tier's: the whole page is in the kernel at once.
const READ_REQUEST_BYTES: u32 = 1 << 20;
/// Length of a write request, the shortest that the tier sends beside reads.
const WRITE_REQUEST_BYTES: u32 = 128 << 10;
/// Write requests in the kernel at most.
const WRITES_MAX: u32 = 32;
/// Marks what a write gave back.
const WRITE: u64 = 1 << 63;

/// Writes beside the reads.
pub(super) struct Paced<'a> {
    pub(super) walk: &'a mut Walk,
    /// Bytes a second at most, in units of 10^9.
    pub(super) gb_per_s: f64,
}

/// The page that is being read.
struct Read {
    slot: u32,
    buffer: usize,
    back: u32,
    ordered: Instant,
}

/// The page that is being written, and the requests of this and the page before.
struct Writes<'a> {
    paced: Paced<'a>,
    apart: Duration,
    next: Instant,
    page: Option<(u32, Extent, u32)>,
    buffer: usize,
    in_kernel: u32,
}

impl<'a> Writes<'a> {
    fn new(paced: Paced<'a>) -> Self {
        let bytes_a_second = (paced.gb_per_s * 1e9).max(1.0);
        let apart = Duration::from_secs_f64(f64::from(WRITE_REQUEST_BYTES) / bytes_a_second);
        Self { paced, apart, next: Instant::now(), page: None, buffer: 0, in_kernel: 0 }
    }

    fn is_due(&self, now: Instant) -> bool {
        now >= self.next && self.in_kernel < WRITES_MAX
    }
}

impl Raw {
    /// One slice; what is still out at its end is waited for.
    pub(super) fn one_by_one(
        &mut self,
        (field, buffers): (&mut Field, &Buffers),
        reads: &mut Walk,
        writes: Option<Paced<'_>>,
        length: Duration,
    ) -> Result<Slice, BenchError> {
        buffers.spoil()?;
        let mut writes = writes.map(Writes::new);
        let mut last = LastRead::new(buffers);
        let mut meter = Meter::start(length);
        let mut read = self.read_page(field, buffers, (reads.next(), 0))?;
        loop {
            let over = meter.is_over(true, writes.is_some());
            if let Some(writes) = &mut writes {
                let now = Instant::now();
                if writes.is_due(now) && (!over || writes.page.is_some()) {
                    self.write_part(field, buffers, writes)?;
                    writes.next = (writes.next + writes.apart).max(now);
                }
            }
            let wake = writes.as_ref().filter(|writes| writes.in_kernel < WRITES_MAX);
            self.wait_until(wake.map(|writes| writes.next))?;
            let now = Instant::now();
            let mut ended = false;
            while let Some((given, result)) = self.next_completion() {
                let bytes = given as u32;
                if result != bytes as i32 {
                    let what = format!("a request of {bytes} bytes beside others: {result}");
                    return Err(BenchError::Wrong(what.into()));
                }
                match &mut writes {
                    Some(writes) if given & WRITE != 0 => {
                        writes.in_kernel -= 1;
                        meter.wrote(bytes);
                    }
                    _ => {
                        read.back += bytes;
                        ended = read.back == field.page_bytes;
                    }
                }
            }
            if ended {
                meter.read(field.page_bytes, read.ordered, now);
                last.set(read.buffer, read.slot);
                meter.open(now);
            }
            let over = over || meter.is_over(true, writes.is_some());
            if over && ended {
                break;
            }
            if ended {
                let buffer = (read.buffer + 1) % buffers.reads.len();
                read = self.read_page(field, buffers, (reads.next(), buffer))?;
            }
        }
        let slice = meter.close();
        if let Some(writes) = &mut writes {
            self.finish(field, buffers, writes)?;
        }
        self.compared += last.compare(field, buffers)?;
        Ok(slice)
    }

    /// Sends all requests of a page.
    fn read_page(
        &mut self,
        field: &Field,
        buffers: &Buffers,
        (index, buffer): (u32, usize),
    ) -> Result<Read, BenchError> {
        let (slot, extent) = (field.slot(index), buffers.reads[buffer]);
        let ordered = Instant::now();
        let mut sent = 0;
        while sent < field.page_bytes {
            let bytes = READ_REQUEST_BYTES.min(field.page_bytes - sent);
            let part = Extent { offset: extent.offset + u64::from(sent), bytes, ..extent };
            self.push(Op::Read, (slot, sent), part, u64::from(bytes))?;
            sent += bytes;
        }
        Ok(Read { slot: index, buffer, back: 0, ordered })
    }

    /// Sends the next request of the page that is being written, or the first of the next one.
    fn write_part(
        &mut self,
        field: &mut Field,
        buffers: &Buffers,
        writes: &mut Writes<'_>,
    ) -> Result<(), BenchError> {
        let (index, extent, sent) = writes.page.take().unwrap_or_else(|| {
            let index = writes.paced.walk.next();
            let buffer = writes.buffer % buffers.writes.len();
            writes.buffer += 1;
            field.set_content(index, buffer);
            (index, buffers.writes[buffer], 0)
        });
        let bytes = WRITE_REQUEST_BYTES.min(field.page_bytes - sent);
        let part = Extent { offset: extent.offset + u64::from(sent), bytes, ..extent };
        self.push(Op::Write, (field.slot(index), sent), part, WRITE | u64::from(bytes))?;
        writes.in_kernel += 1;
        if sent + bytes < field.page_bytes {
            writes.page = Some((index, extent, sent + bytes));
        }
        Ok(())
    }

    /// A page that was begun is written whole: the next reader expects it.
    fn finish(
        &mut self,
        field: &mut Field,
        buffers: &Buffers,
        writes: &mut Writes<'_>,
    ) -> Result<(), BenchError> {
        while writes.page.is_some() || writes.in_kernel > 0 {
            while writes.page.is_some() && writes.in_kernel < WRITES_MAX {
                self.write_part(field, buffers, writes)?;
            }
            self.wait_until(None)?;
            while let Some((given, result)) = self.next_completion() {
                if result != given as u32 as i32 {
                    let what = format!("a write of {} bytes: {result}", given as u32);
                    return Err(BenchError::Wrong(what.into()));
                }
                writes.in_kernel -= 1;
            }
        }
        Ok(())
    }

    /// Waits for a completion, at most until `until`.
    fn wait_until(&mut self, until: Option<Instant>) -> Result<(), BenchError> {
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        let timeout = left.map(Timespec::from);
        let args = timeout.iter().fold(SubmitArgs::new(), |args, left| args.timespec(left));
        match self.ring.submitter().submit_with_args(1, &args) {
            Ok(_) => Ok(()),
            Err(error)
                if error.kind() == io::ErrorKind::Interrupted
                    || error.raw_os_error() == Some(libc::ETIME) =>
            {
                Ok(())
            }
            Err(source) => Err(BenchError::System { operation: "io_uring_enter", source }),
        }
    }

    /// What a request said and what it came to.
    fn next_completion(&mut self) -> Option<(u64, i32)> {
        let completion = self.ring.completion().next()?;
        Some((completion.user_data(), completion.result()))
    }
}
