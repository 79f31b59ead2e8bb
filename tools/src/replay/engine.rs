//! One replayed engine: several requests at a time over one session.
//!
//! Each request looks up its prefix, restores what hit into device pages and compares every byte,
//! computes the rest, saves it, and frees the pages. Requests larger than the device pages or than
//! one operation go in parts; a request never holds pages while it waits for more.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::time::Duration;

use orbitkv_shm_protocol::record::{Code, PageOutcome, RequestKind, Tier};
use rustix::time::{ClockId, clock_gettime};

use super::device::DevicePages;
use super::job::{Job, Step};
use super::link::{Block, EndedOf, Link, LinkError, PageEnd};
use super::tally::{self, Latencies, Tally};
use crate::content::PageSpace;

/// Why an engine stops.
#[derive(Debug, thiserror::Error)]
pub(super) enum EngineError {
    /// The session is over; [`Engine::reattach`] goes on with another.
    #[error("the session with the Manager has ended")]
    Gone,
    /// The client refuses a request of ours.
    #[error("{0}")]
    Link(LinkError),
    /// The device pages cannot be read or written.
    #[error("device pages: {0}")]
    Device(#[from] io::Error),
    /// Nothing is in flight and nothing can be started.
    #[error("no request can go on: {device_pages} device pages are too few")]
    Stuck {
        /// Pages of the region.
        device_pages: u32,
    },
}

impl From<LinkError> for EngineError {
    fn from(error: LinkError) -> Self {
        match error {
            LinkError::Gone => Self::Gone,
            other => Self::Link(other),
        }
    }
}

/// A request that ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Finished {
    /// Number in the trace.
    pub(super) index: u64,
    /// What it did.
    pub(super) tally: Tally,
}

/// Which slot waits for which operation.
type Slot = usize;

/// One engine.
pub(super) struct Engine<L: Link> {
    link: L,
    device: DevicePages,
    space: PageSpace,
    jobs: Vec<Option<Job<L>>>,
    in_flight: HashMap<L::Operation, Slot>,
    /// Slots whose next operation waits for device pages or ring space, oldest first.
    waiting: VecDeque<Slot>,
    finished: Vec<Finished>,
    ends: Vec<PageEnd>,
    buffer: Vec<u8>,
    latencies: Latencies,
    mismatches: u64,
}

impl<L: Link> Engine<L> {
    /// An engine with room for `concurrency` requests.
    pub(super) fn new(link: L, device: DevicePages, space: PageSpace, concurrency: usize) -> Self {
        let buffer = vec![0; device.page_bytes()];
        Self {
            link,
            device,
            space,
            jobs: (0..concurrency.max(1)).map(|_| None).collect(),
            in_flight: HashMap::new(),
            waiting: VecDeque::new(),
            finished: Vec::new(),
            ends: Vec::new(),
            buffer,
            latencies: Latencies::default(),
            mismatches: 0,
        }
    }

    /// Begins a request. Its number comes back in [`turn`](Self::turn) when it ended.
    ///
    /// # Errors
    /// The session is over or the device fails.
    ///
    /// # Panics
    /// When there is no room: the coordinator counts.
    pub(super) fn start(
        &mut self,
        index: u64,
        blocks: impl Iterator<Item = u64>,
    ) -> Result<(), EngineError> {
        let slot = self.jobs.iter().position(Option::is_none);
        let slot = slot.unwrap_or_else(|| panic!("request {index} exceeds the concurrency"));
        self.jobs[slot] = Some(Job::new(index, self.space.hashes(blocks).collect()));
        self.advance(slot)?;
        self.link.submit();
        Ok(())
    }

    /// Whether no request is under way.
    pub(super) fn is_idle(&self) -> bool {
        self.jobs.iter().all(Option::is_none)
    }

    /// Requests that ended since the last call.
    pub(super) fn take_finished(&mut self) -> Vec<Finished> {
        std::mem::take(&mut self.finished)
    }

    /// Latencies so far.
    pub(super) fn latencies(&self) -> &Latencies {
        &self.latencies
    }

    /// Pages with a wrong byte so far, those of requests that were started again included.
    pub(super) fn mismatches(&self) -> u64 {
        self.mismatches
    }

    /// Ends the session.
    pub(super) fn into_link(self) -> L {
        self.link
    }

    /// Waits at most `timeout` for completions and goes on with their requests.
    ///
    /// # Errors
    /// The session is over, the device fails, or no request can go on.
    pub(super) fn turn(&mut self, timeout: Duration) -> Result<(), EngineError> {
        if self.in_flight.is_empty() && !self.waiting.is_empty() {
            return Err(EngineError::Stuck { device_pages: self.device.pages() });
        }
        let mut wait = timeout;
        while let Some(ended) = self.link.wait(wait, &mut self.ends)? {
            wait = Duration::ZERO;
            if let Some(slot) = self.in_flight.remove(&ended.operation) {
                self.ended(slot, &ended)?;
                self.waiting.push_back(slot);
            }
            // First come, first served; who still cannot go on keeps its turn.
            for _ in 0..self.waiting.len() {
                let Some(slot) = self.waiting.pop_front() else { break };
                self.advance(slot)?;
            }
            self.link.submit();
        }
        Ok(())
    }

    /// Goes on with a new session and new device pages: every request under way starts again.
    ///
    /// # Errors
    /// As [`turn`](Self::turn).
    pub(super) fn reattach(&mut self, link: L, device: DevicePages) -> Result<u64, EngineError> {
        self.link = link;
        // The old pages may still be written by copies that had begun.
        self.device = device;
        self.in_flight.clear();
        self.waiting.clear();
        let mut restarted = 0;
        for slot in 0..self.jobs.len() {
            let Some(job) = self.jobs[slot].take() else { continue };
            self.jobs[slot] = Some(job.restarted());
            restarted += 1;
            self.advance(slot)?;
        }
        self.link.submit();
        Ok(restarted)
    }

    /// Stages the next operation of a slot, or notes that it has to wait.
    fn advance(&mut self, slot: Slot) -> Result<(), EngineError> {
        let Some(job) = self.jobs[slot].as_mut() else { return Ok(()) };
        if job.step == Step::Finish {
            let Some(job) = self.jobs[slot].take() else { return Ok(()) };
            self.finish(job);
            return Ok(());
        }
        if matches!(job.step, Step::Restore | Step::Save)
            && job.blocks.is_empty()
            && !take_pages(&mut self.device, &self.space, &mut self.buffer, job)?
        {
            self.waiting.push_back(slot);
            return Ok(());
        }
        let staged_ns = now_ns();
        let staged = match (job.step, job.lease) {
            (Step::Query, _) => self.link.query(job.parent(), job.query_part()),
            (Step::Restore, Some(lease)) => self.link.restore(lease, job.lease_offset, &job.blocks),
            (Step::Release, Some(lease)) => self.link.release(lease),
            (Step::Save, _) => self.link.save(job.parent(), &job.blocks),
            (Step::Restore | Step::Release | Step::Finish, _) => {
                unreachable!("a restore or release has a lease")
            }
        };
        match staged {
            Ok(operation) => {
                job.staged_ns = staged_ns;
                self.in_flight.insert(operation, slot);
                Ok(())
            }
            Err(LinkError::Full) => {
                self.waiting.push_back(slot);
                Ok(())
            }
            Err(error) => Err(error.into()),
        }
    }

    fn finish(&mut self, mut job: Job<L>) {
        job.tally.requests = 1;
        job.tally.pages_total = job.hashes.len() as u64;
        let hits = job.tally.pages_hit_dram + job.tally.pages_hit_ssd;
        job.tally.pages_missed = job.tally.pages_total - hits;
        self.finished.push(Finished { index: job.index, tally: job.tally });
    }

    fn ended(&mut self, slot: Slot, ended: &EndedOf<L>) -> Result<(), EngineError> {
        let Some(mut job) = self.jobs[slot].take() else { return Ok(()) };
        self.record_latencies(job.staged_ns, ended);
        match ended.kind {
            RequestKind::Query => self.query_ended(&mut job, ended),
            RequestKind::Restore => self.restore_ended(&mut job, ended)?,
            RequestKind::Save => self.save_ended(&mut job, ended),
            _ => {
                job.lease = None;
                job.step = job.after_lease();
            }
        }
        self.jobs[slot] = Some(job);
        Ok(())
    }

    fn query_ended(&self, job: &mut Job<L>, ended: &EndedOf<L>) {
        let named = job.query_part().len();
        let hit = (ended.pages as usize).min(named);
        if ended.code != Code::None {
            tally::count(&mut job.tally.queries_cut, ended.code, 1);
        }
        job.queried_to_end = hit < named || job.next + named == job.hashes.len();
        job.lease = ended.lease;
        job.lease_offset = 0;
        job.tiers.clear();
        if ended.lease.is_some() && hit > 0 {
            let tiers = self.ends.iter().filter(|end| end.outcome == PageOutcome::Hit);
            job.tiers.extend(tiers.map(|end| end.tier).take(hit));
            job.tiers.resize(hit, Tier::Dram);
            job.step = Step::Restore;
        } else if ended.lease.is_some() {
            job.step = Step::Release;
        } else {
            job.step = Step::Save;
        }
    }

    /// Compares what came and counts the prefix that came whole as hits.
    fn restore_ended(&mut self, job: &mut Job<L>, ended: &EndedOf<L>) -> Result<(), EngineError> {
        let restored = |ends: &[PageEnd], index: usize| {
            ends.get(index).is_some_and(|end| end.outcome == PageOutcome::Restored)
        };
        let whole = (0..job.blocks.len()).take_while(|index| restored(&self.ends, *index)).count();
        for block in &job.blocks[..whole] {
            self.device.read(block.page, &mut self.buffer)?;
            job.tally.pages_verified += 1;
            job.tally.bytes_verified += self.buffer.len() as u64;
            if self.space.first_difference(&block.hash, &self.buffer).is_some() {
                job.tally.mismatches += 1;
                self.mismatches += 1;
            }
            match job.tiers.pop_front() {
                Some(Tier::Ssd) => job.tally.pages_hit_ssd += 1,
                _ => job.tally.pages_hit_dram += 1,
            }
        }
        let complete = whole == job.blocks.len();
        job.next += whole;
        job.lease_offset += job.blocks.len() as u32;
        for block in job.blocks.drain(..) {
            self.device.give(block.page);
        }
        if complete && !job.tiers.is_empty() {
            return Ok(());
        }
        if complete {
            // Its last page ended the lease.
            job.lease = None;
            job.step = job.after_lease();
            return Ok(());
        }
        // Without this page the later ones are of no use: compute from here on.
        tally::count(&mut job.tally.restores_cut, ended.code, 1);
        job.queried_to_end = true;
        job.tiers.clear();
        let lease_ended = matches!(ended.code, Code::ExpiredLease | Code::UnknownLease);
        job.step = if lease_ended { job.after_lease() } else { Step::Release };
        Ok(())
    }

    fn save_ended(&mut self, job: &mut Job<L>, ended: &EndedOf<L>) {
        for (index, block) in job.blocks.iter().enumerate() {
            match self.ends.get(index).map(|end| (end.outcome, end.code)) {
                Some((PageOutcome::Stored, _)) => job.tally.pages_saved += 1,
                Some((PageOutcome::Present, _)) => job.tally.pages_present += 1,
                Some((PageOutcome::Refused, code)) => {
                    tally::count(&mut job.tally.pages_refused, code, 1);
                }
                _ => tally::count(&mut job.tally.pages_refused, ended.code, 1),
            }
            self.device.give(block.page);
        }
        job.next += job.blocks.len();
        job.blocks.clear();
        job.step = if job.next == job.hashes.len() { Step::Finish } else { Step::Save };
    }

    fn record_latencies(&mut self, staged_ns: u64, ended: &EndedOf<L>) {
        let times = ended.times;
        if times.observed_ns == 0 || times.published_ns == 0 {
            return;
        }
        let whole = times.observed_ns.saturating_sub(staged_ns);
        match ended.kind {
            RequestKind::Query => {
                self.latencies.query.record(whole);
                if ended.pages_ssd > 0 {
                    let prepare = times.prepared_ns.saturating_sub(times.queued_ns);
                    self.latencies.prepare.record(prepare);
                }
            }
            RequestKind::Restore => self.latencies.restore.record(whole),
            RequestKind::Save => self.latencies.save.record(whole),
            _ => {}
        }
        let delivery = times.observed_ns.saturating_sub(times.published_ns);
        self.latencies.delivery.record(delivery);
    }
}

/// What a device page holds before a restore, so that bytes left by an earlier request cannot pass
/// for restored ones.
const POISON: u8 = 0xa5;

/// Takes device pages for the next part of a job, at least one, and fills them: with the page's
/// bytes for a save, with poison for a restore. False when none is free.
fn take_pages<L: Link>(
    device: &mut DevicePages,
    space: &PageSpace,
    buffer: &mut [u8],
    job: &mut Job<L>,
) -> Result<bool, EngineError> {
    let count = job.wanted().min(device.free());
    for index in job.next..job.next + count {
        let Some(page) = device.take() else { break };
        let hash = job.hashes[index];
        job.blocks.push(Block { hash, page });
        if job.step == Step::Save {
            space.fill_page(&hash, buffer);
        } else if index == job.next {
            buffer.fill(POISON);
        }
        device.write(page, buffer)?;
    }
    Ok(count > 0)
}

/// The clock of the stage times.
fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

#[cfg(test)]
mod tests {
    use super::super::fake::{Fake, Faults};
    use super::*;

    const PAGE_BYTES: u64 = 256;

    fn engine(device_pages: u32, concurrency: usize, faults: Faults) -> Engine<Fake> {
        let space = PageSpace::new("test", PAGE_BYTES, 3);
        let device = DevicePages::reserve(device_pages, PAGE_BYTES).unwrap();
        let link = Fake::new(&device, PAGE_BYTES as usize, faults);
        Engine::new(link, device, space, concurrency)
    }

    fn run(engine: &mut Engine<Fake>, requests: &[std::ops::Range<u64>]) -> Vec<Finished> {
        let room = engine.jobs.len();
        let mut finished = Vec::new();
        let mut started = 0;
        while finished.len() < requests.len() {
            while started < requests.len() && started - finished.len() < room {
                engine.start(started as u64, requests[started].clone()).unwrap();
                started += 1;
            }
            engine.turn(Duration::ZERO).unwrap();
            finished.append(&mut engine.take_finished());
        }
        assert!(engine.is_idle());
        assert_eq!(engine.device.free(), engine.device.pages() as usize);
        assert_eq!(engine.link.leases(), 0);
        finished
    }

    fn total(finished: &[Finished]) -> Tally {
        let mut total = Tally::default();
        for request in finished {
            let t = &request.tally;
            assert_eq!(t.pages_hit_dram + t.pages_hit_ssd + t.pages_missed, t.pages_total);
            assert_eq!(t.pages_verified, t.pages_hit_dram + t.pages_hit_ssd);
            total.add(t);
        }
        total
    }

    #[test]
    fn a_second_request_restores_what_the_first_saved() {
        let mut engine = engine(64, 1, Faults::default());
        let finished = run(&mut engine, &[0..20, 0..30, 0..30, 0..0]);
        let total = total(&finished);
        assert_eq!(total.requests, 4);
        assert_eq!((total.pages_total, total.pages_missed), (80, 30));
        assert_eq!((total.pages_saved, total.pages_verified), (30, 50));
        assert_eq!(total.bytes_verified, 50 * PAGE_BYTES);
        assert_eq!(total.mismatches, 0);
        assert!(total.pages_hit_ssd > 0, "the fake calls every third page an SSD page");
    }

    #[test]
    fn requests_larger_than_the_device_go_in_parts() {
        let mut engine = engine(7, 3, Faults::default());
        let requests = [0..40, 0..50, 100..110, 0..60, 100..140, 0..60];
        let total = total(&run(&mut engine, &requests));
        assert_eq!(total.pages_total, 260);
        assert_eq!(total.pages_saved, 100);
        assert_eq!(total.mismatches, 0);
    }

    #[test]
    fn requests_larger_than_one_operation_go_in_parts() {
        let mut engine = engine(20_000, 1, Faults::default());
        let pages = 40_000;
        let total = total(&run(&mut engine, &[0..pages, 0..pages]));
        assert_eq!((total.pages_missed, total.pages_verified), (pages, pages));
    }

    #[test]
    fn a_full_ring_only_delays() {
        let faults = Faults { ring: 2, ..Faults::default() };
        let mut engine = engine(64, 8, faults);
        let requests: Vec<_> = (0..40).map(|i| i * 3..i * 3 + 9).collect();
        assert_eq!(total(&run(&mut engine, &requests)).requests, 40);
    }

    #[test]
    fn a_wrong_byte_is_found() {
        let faults = Faults { corrupt_page: Some(12), ..Faults::default() };
        let mut engine = engine(64, 1, faults);
        let total = total(&run(&mut engine, &[0..20, 0..20]));
        assert_eq!((total.mismatches, total.pages_verified), (1, 20));
        assert_eq!(engine.mismatches(), 1);
    }

    #[test]
    fn a_page_that_was_not_copied_is_found() {
        let faults = Faults { skip_copy: Some(5), ..Faults::default() };
        let mut engine = engine(64, 1, faults);
        // The second and third request may get the very device pages of the one before.
        let total = total(&run(&mut engine, &[0..20, 0..20, 0..20]));
        assert_eq!(total.mismatches, 2);
    }

    #[test]
    fn a_failed_restore_counts_its_prefix_and_computes_the_rest() {
        let faults = Faults { restore_fails_at: Some(6), ..Faults::default() };
        let mut engine = engine(64, 1, faults);
        let total = total(&run(&mut engine, &[0..20, 0..20]));
        assert_eq!((total.pages_verified, total.pages_missed), (6, 34));
        assert_eq!(total.pages_present, 14);
        assert_eq!(total.restores_cut["io_error"], 1);
    }

    #[test]
    fn refused_pages_are_counted_by_reason() {
        let faults = Faults { capacity: 15, ..Faults::default() };
        let mut engine = engine(64, 1, faults);
        let total = total(&run(&mut engine, &[0..20, 0..20]));
        assert_eq!((total.pages_saved, total.pages_verified), (15, 15));
        assert_eq!(total.pages_refused["no_memory"], 2);
        assert_eq!(total.pages_refused["parent_absent"], 8);
    }

    #[test]
    fn after_a_loss_every_request_starts_again() {
        let faults = Faults { gone_after: Some(5), ..Faults::default() };
        let mut first = engine(64, 2, faults);
        first.start(0, 0..20).unwrap();
        first.start(1, 50..60).unwrap();
        let error = loop {
            match first.turn(Duration::ZERO) {
                Ok(()) if first.is_idle() => first.start(2, 0..20).unwrap(),
                Ok(()) => {}
                Err(error) => break error,
            }
        };
        assert!(matches!(error, EngineError::Gone));
        let finished = first.take_finished().len();
        let device = DevicePages::reserve(64, PAGE_BYTES).unwrap();
        let link = Fake::new(&device, PAGE_BYTES as usize, Faults::default());
        let restarted = first.reattach(link, device).unwrap();
        assert!(restarted > 0);
        while !first.is_idle() {
            first.turn(Duration::ZERO).unwrap();
        }
        let again = first.take_finished();
        assert_eq!(again.len() as u64, restarted);
        assert!(finished + again.len() >= 2);
        assert_eq!(total(&again).mismatches, 0);
    }
}
