//! The floor of demand reads beside writes: the plain loop reads one page after the other while
//! plain writes leave at a given rate.
#![allow(unsafe_code, reason = "hands requests on buffers to the kernel")]

use std::time::{Duration, Instant};

use io_uring::squeue::Entry;
use io_uring::types::{SubmitArgs, Timespec};
use orbitkv_manager::core::Extent;

use super::field::{Buffers, Field, LastRead, Walk};
use super::raw::{Op, Raw, Way, wrong};
use super::slice::{Meter, Slice};
use crate::error::BenchError;

/// Requests of paced writes are at most this long: a read in front of which one got waits no longer
/// than that, where one of the length that writes fastest would double it.
pub(super) const WRITE_REQUEST_BYTES_MAX: u32 = 128 << 10;
/// Marks the completions of writes; the rest is the length.
const WRITE: u64 = 1 << 63;
/// Longest sleep without a completion or a write that is due.
const NAP: Duration = Duration::from_millis(100);

/// Writes at a rate.
pub(super) struct Paced<'a> {
    pub(super) walk: &'a mut Walk,
    pub(super) way: Way,
    pub(super) gb_per_s: f64,
}

/// When the next write is due. Time that was lost is made up for, but not more of it than fits in
/// the kernel at once.
#[derive(Clone, Copy, Debug)]
struct Pace {
    due: Instant,
    bytes_per_second: f64,
    behind_max: Duration,
}

impl Pace {
    fn new(now: Instant, gb_per_s: f64, bytes_at_once: u64) -> Self {
        // Nothing to be paced by: as slow as one page in a long time.
        let bytes_per_second = (gb_per_s * 1e9).max(1.0);
        let behind_max = Duration::from_secs_f64(bytes_at_once as f64 / bytes_per_second);
        Self { due: now, bytes_per_second, behind_max }
    }

    fn is_due(&self, now: Instant) -> bool {
        now >= self.due
    }

    fn sent(&mut self, bytes: u32, now: Instant) {
        self.due += Duration::from_secs_f64(f64::from(bytes) / self.bytes_per_second);
        if let Some(earliest) = now.checked_sub(self.behind_max) {
            self.due = self.due.max(earliest);
        }
    }
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
struct Out<'a> {
    field: &'a mut Field,
    buffers: &'a Buffers,
    read: Option<Page>,
    reads: u16,
    next_read: usize,
    /// The page whose requests are being sent.
    written: Option<Page>,
    writes: u16,
    next_write: usize,
    last: LastRead,
}

impl Raw {
    /// One slice of demand reads, alone or beside paced writes; what is still out at its end is
    /// waited for.
    pub(super) fn demand(
        &mut self,
        (field, buffers): (&mut Field, &Buffers),
        (walk, way): (&mut Walk, Way),
        mut paced: Option<Paced<'_>>,
        length: Duration,
    ) -> Result<Slice, BenchError> {
        buffers.spoil()?;
        let mut out = Out::new(field, buffers);
        let mut meter = Meter::start(length);
        let mut pace = paced.as_ref().map(Paced::begin);
        while !meter.is_over(true, paced.is_some()) {
            if out.read.is_none() {
                out.begin_read(walk);
            }
            while out.reads < way.depth && self.send_read(&mut out, way)? {}
            if let (Some(paced), Some(pace)) = (&mut paced, &mut pace) {
                self.send_due(&mut out, paced, pace)?;
            }
            let full = paced.as_ref().is_some_and(|paced| out.writes >= paced.depth());
            let until = pace.filter(|_| !full).map(|pace| pace.due);
            self.take_both(&mut out, &mut meter, until)?;
        }
        let slice = meter.close();
        let mut rest = Meter::start(Duration::ZERO);
        while out.reads + out.writes > 0 || out.written.is_some() {
            while out.reads < way.depth && self.send_read(&mut out, way)? {}
            // A page that was begun is written whole: the next reader expects it.
            if let Some(paced) = &paced {
                while out.written.is_some() && out.writes < paced.depth() {
                    self.send_write(&mut out, paced.way)?;
                }
            }
            self.take_both(&mut out, &mut rest, None)?;
        }
        self.compared += out.last.compare(out.field, buffers)?;
        Ok(slice)
    }

    /// Sends the writes whose time has come.
    fn send_due(
        &mut self,
        out: &mut Out<'_>,
        paced: &mut Paced<'_>,
        pace: &mut Pace,
    ) -> Result<(), BenchError> {
        let now = Instant::now();
        while pace.is_due(now) && out.writes < paced.depth() {
            if out.written.is_none() {
                out.begin_write(paced.walk);
            }
            pace.sent(self.send_write(out, paced.way)?, now);
        }
        Ok(())
    }

    /// Sends the next request of the page that is read. False when all of them are sent.
    fn send_read(&mut self, out: &mut Out<'_>, way: Way) -> Result<bool, BenchError> {
        let Some(mut page) = out.read.filter(|page| page.sent < out.field.page_bytes) else {
            return Ok(false);
        };
        let (entry, bytes) = self.next_entry(Op::Read, out.field, &mut page, way)?;
        out.read = Some(page);
        self.push(&entry.user_data(bytes.into()))?;
        out.reads += 1;
        Ok(true)
    }

    /// Sends the next request of the page that is written; returns its length.
    fn send_write(&mut self, out: &mut Out<'_>, way: Way) -> Result<u32, BenchError> {
        let Some(mut page) = out.written.take() else { return Ok(0) };
        let (entry, bytes) = self.next_entry(Op::Write, out.field, &mut page, way)?;
        out.written = Some(page).filter(|page| page.sent < out.field.page_bytes);
        self.push(&entry.user_data(WRITE | u64::from(bytes)))?;
        out.writes += 1;
        Ok(bytes)
    }

    fn next_entry(
        &self,
        op: Op,
        field: &Field,
        page: &mut Page,
        way: Way,
    ) -> Result<(Entry, u32), BenchError> {
        let bytes = way.request_bytes.min(field.page_bytes - page.sent);
        let offset = page.extent.offset + u64::from(page.sent);
        let part = Extent { offset, bytes, ..page.extent };
        let slot = field.slot(page.slot);
        let entry = self.entry(op, slot.device, slot.offset + u64::from(page.sent), part)?;
        page.sent += bytes;
        Ok((entry, bytes))
    }

    /// Waits for a request, at most until the next write is due, and takes all that are back.
    fn take_both(
        &mut self,
        out: &mut Out<'_>,
        meter: &mut Meter,
        until: Option<Instant>,
    ) -> Result<(), BenchError> {
        let nap = until.map_or(NAP, |due| due.saturating_duration_since(Instant::now()).min(NAP));
        let nap = Timespec::from(nap);
        match self.ring.submitter().submit_with_args(1, &SubmitArgs::new().timespec(&nap)) {
            Err(error) if !matches!(error.raw_os_error(), Some(libc::ETIME | libc::EINTR)) => {
                return Err(BenchError::System { operation: "io_uring_enter", source: error });
            }
            _ => {}
        }
        let now = Instant::now();
        for completion in self.ring.completion() {
            let bytes = completion.user_data() as u32;
            if completion.result() != bytes as i32 {
                let result = completion.result();
                return Err(wrong(&format!("a request of {bytes} bytes: {result}")));
            }
            if completion.user_data() & WRITE != 0 {
                out.writes -= 1;
                meter.wrote(bytes);
            } else {
                out.read_back(bytes, meter, now);
            }
        }
        meter.open(now);
        Ok(())
    }
}

impl Paced<'_> {
    /// Requests in the kernel at most: fewer than slots, so that one comes again only when it has
    /// long been back.
    fn depth(&self) -> u16 {
        let slots = u16::try_from(self.walk.len() - 1).unwrap_or(u16::MAX);
        self.way.depth.min(slots)
    }

    fn begin(&self) -> Pace {
        let bytes_at_once = u64::from(self.depth()) * u64::from(self.way.request_bytes);
        Pace::new(Instant::now(), self.gb_per_s, bytes_at_once)
    }
}

impl<'a> Out<'a> {
    fn new(field: &'a mut Field, buffers: &'a Buffers) -> Self {
        let last = LastRead::new(buffers);
        let (read, written) = (None, None);
        Self {
            field,
            buffers,
            read,
            reads: 0,
            next_read: 0,
            written,
            writes: 0,
            next_write: 0,
            last,
        }
    }

    fn begin_read(&mut self, walk: &mut Walk) {
        let buffer = self.next_read % self.buffers.reads.len();
        self.next_read += 1;
        self.read = Some(Page::new(walk.next(), buffer, self.buffers.reads[buffer]));
    }

    fn begin_write(&mut self, walk: &mut Walk) {
        let buffer = self.next_write % self.buffers.writes.len();
        self.next_write += 1;
        let slot = walk.next();
        self.field.set_content(slot, buffer);
        self.written = Some(Page::new(slot, buffer, self.buffers.writes[buffer]));
    }

    fn read_back(&mut self, bytes: u32, meter: &mut Meter, now: Instant) {
        self.reads -= 1;
        let Some(page) = &mut self.read else { return };
        page.back += bytes;
        if page.back == self.field.page_bytes {
            meter.read(page.back, page.ordered, now);
            self.last.set(page.buffer, page.slot);
            self.read = None;
        }
    }
}

impl Page {
    fn new(slot: u32, buffer: usize, extent: Extent) -> Self {
        Self { slot, buffer, extent, sent: 0, back: 0, ordered: Instant::now() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pace_keeps_its_rate_and_makes_up_for_little() {
        let begun = Instant::now();
        let mut pace = Pace::new(begun, 1e-3, 4000);
        for request in 0..5 {
            let due = begun + Duration::from_millis(request);
            assert!(pace.is_due(due) && !pace.is_due(due - Duration::from_micros(1)));
            pace.sent(1000, due);
        }
        // A second too late: four requests are sent at once, not a thousand.
        let late = begun + Duration::from_secs(1);
        let mut at_once = 0;
        while pace.is_due(late) {
            pace.sent(1000, late);
            at_once += 1;
        }
        assert!((4..=6).contains(&at_once), "{at_once}");
    }
}
