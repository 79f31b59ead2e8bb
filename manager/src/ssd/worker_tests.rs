//! Reader and writer over a disk that fails as told: every order ends once, with the right word,
//! and takes nobody along.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use orbitkv_shm_protocol::ids::PageHash;
use proptest::prelude::*;
use ringbuf::traits::{Consumer, Split};
use ringbuf::{HeapCons, HeapRb};

use super::activity::ReadActivity;
use super::conformance::pool;
use super::counters::DeviceCounters;
use super::fake::{Disk, FakeEngine, Fault, Gate, Log};
use super::file::{Access, SsdFile};
use super::format::{Block, FileId, Footer, Superblock, checksum, padded};
use super::io::Chunk;
use super::metadata::{self, Metadata};
use super::order::{ReadOrder, SsdEnd, WriteOrder, WriterCommand};
use super::pulse::Pulse;
use super::reader::Reader;
use super::summer::Summer;
use super::verifier::ReadResult;
use super::wake::Wake;
use super::worker::Duty;
use super::writer::{Writer, WriterParts};
use crate::core::RegionGeometry;
use crate::core::{Extent, ImageIdentity, IoFault, Slot, Ticket};
use crate::image::ImageMemory;
use crate::pool::DramPool;

/// Short, so that tests of a hung device are; longer than a busy machine keeps the others waiting.
const HUNG_AFTER: Duration = Duration::from_secs(2);
/// What the disk does with each chunk.
type Failing = Box<dyn FnMut(&Chunk) -> Option<Fault>>;

const POOL_BYTES: u64 = 32 << 20;
const CAPACITY: u64 = 48 << 20;
const DATA: u64 = 1 << 20;
const MIB: u32 = 1 << 20;

fn geometry() -> RegionGeometry {
    Superblock::new(FileId([1; 16]), CAPACITY, 0).unwrap().geometry
}

fn image_of(number: u64, bytes: u32) -> Vec<u8> {
    (0..bytes).map(|i| (i.wrapping_mul(7) ^ (i >> 9)) as u8 ^ number as u8).collect()
}

fn slot_for(offset: u64, image_bytes: u32) -> Slot {
    Slot { device: 0, offset, bytes: RegionGeometry::slot_bytes_for(image_bytes).unwrap() }
}

struct ReadBench {
    reader: Reader,
    memory: Arc<DramPool>,
    disk: Disk,
    log: Log,
    gate: Gate,
    wake: Arc<Wake>,
    pulse: Arc<Pulse>,
    counters: Arc<DeviceCounters>,
    results: Receiver<ReadResult>,
}

impl ReadBench {
    fn new(plan: impl FnMut(&Chunk) -> Option<Fault> + 'static, newest_first: bool) -> Self {
        let memory = pool(POOL_BYTES);
        let disk: Disk = Arc::new(Mutex::new(vec![0; CAPACITY as usize]));
        let wake = Arc::new(Wake::new().unwrap());
        let shared: Arc<dyn ImageMemory> = memory.clone();
        let gate: Gate = Arc::new(AtomicBool::new(true));
        let mut engine =
            FakeEngine::new(disk.clone(), shared, wake.clone(), 16).with_plan(plan).behind(&gate);
        if newest_first {
            engine = engine.newest_first();
        }
        let log = engine.log();
        let counters = Arc::new(DeviceCounters::default());
        let (tell, results) = sync_channel(4096);
        let activity = Arc::new(ReadActivity::new(2 << 20));
        let pulse = Arc::new(Pulse::hung_after(HUNG_AFTER));
        let reader = Reader::new(
            Box::new(engine),
            geometry(),
            counters.clone(),
            activity,
            pulse.clone(),
            tell,
        );
        Self { reader, memory, disk, log, gate, wake, pulse, counters, results }
    }

    /// Orders a page that lies at `offset`; its extent is at `number` megabytes.
    fn order(&mut self, number: u64, offset: u64, image_bytes: u32) -> ReadOrder {
        let image = image_of(number, image_bytes);
        let at = offset as usize;
        self.disk.lock().unwrap()[at..at + image.len()].copy_from_slice(&image);
        let bytes = padded(image_bytes.into()) as u32;
        let order = ReadOrder {
            ticket: Ticket(number),
            slot: slot_for(offset, image_bytes),
            extent: Extent { arena: 0, offset: number << 20, bytes },
            image_bytes,
            checksum: checksum(&image),
        };
        self.reader.accept(order);
        order
    }

    fn finish(&mut self) -> HashMap<Ticket, Option<IoFault>> {
        run(&mut self.reader);
        self.ended()
    }

    /// Turns the reader until the disk counts as hung.
    fn hang(&mut self) {
        while !self.pulse.is_hung() {
            self.reader.fill();
            self.reader.wait(&mut || false);
            self.reader.deliver();
        }
    }

    /// What has ended and was not asked for yet.
    fn ended(&mut self) -> HashMap<Ticket, Option<IoFault>> {
        let mut ends = HashMap::new();
        for result in self.results.try_iter() {
            let order = result.order;
            if result.fault.is_none() {
                let image = Extent { bytes: order.image_bytes, ..order.extent };
                let bytes = self.memory.slice(image).unwrap().to_vec();
                assert!(bytes == image_of(order.ticket.0, order.image_bytes), "{:?}", order.ticket);
            }
            assert_eq!(ends.insert(order.ticket, result.fault), None, "each ends once");
        }
        ends
    }
}

/// Turns a duty until it has nothing more to do.
fn run(duty: &mut impl Duty) {
    let mut turns = 0;
    loop {
        duty.fill();
        duty.deliver();
        if duty.is_idle() {
            return;
        }
        duty.wait(&mut || false);
        duty.deliver();
        turns += 1;
        assert!(turns < 100_000, "no progress");
    }
}

#[test]
fn small_neighbours_are_read_with_one_request_and_a_gap_splits_them() {
    let mut bench = ReadBench::new(|_| None, false);
    for number in 0..5 {
        bench.order(number, DATA + number * 12288, 8192);
    }
    bench.order(5, DATA + 100 * 12288, 8192);
    let ends = bench.finish();
    assert!(ends.len() == 6 && ends.values().all(Option::is_none));
    let log = bench.log.lock().unwrap();
    let shape: Vec<_> =
        log.iter().map(|served| (served.offset, served.bytes, served.parts)).collect();
    assert_eq!(shape, [(DATA, 5 * 12288 - 4096, 9), (DATA + 100 * 12288, 8192, 1)]);
    assert_eq!(bench.counters.snapshot().coalesced_pages, 5);
}

#[test]
fn one_read_joins_no_more_than_it_is_allowed_to() {
    for (join_bytes, requests) in [(4096, 6), (2 * 8192, 3), (5 * 8192, 2), (1 << 20, 1)] {
        let mut bench = ReadBench::new(|_| None, false);
        bench.reader = bench.reader.joining(join_bytes);
        for number in 0..6 {
            bench.order(number, DATA + number * 12288, 8192);
        }
        let ends = bench.finish();
        assert!(ends.len() == 6 && ends.values().all(Option::is_none));
        assert_eq!(bench.log.lock().unwrap().len(), requests, "{join_bytes} bytes");
    }
}

#[test]
fn small_neighbours_join_whatever_order_they_were_ordered_in() {
    let mut bench = ReadBench::new(|_| None, false);
    for number in [3, 1, 4, 0, 2] {
        bench.order(number, DATA + number * 12288, 8192);
    }
    let ends = bench.finish();
    assert!(ends.len() == 5 && ends.values().all(Option::is_none));
    assert_eq!(bench.log.lock().unwrap().len(), 1);

    // Replaced slots come back last one first.
    let mut bench = WriteBench::new(|_| None, false);
    let slot_bytes = RegionGeometry::slot_bytes_for(8192).unwrap();
    bench.region(slot_bytes);
    let orders: Vec<WriteOrder> = (0..8)
        .map(|number| bench.order(number, nth(slot_bytes, 7 - number as u32), 8192))
        .collect();
    let ends = bench.finish();
    assert!(ends.len() == 8 && ends.values().all(Option::is_none));
    assert!(orders.iter().all(|order| bench.is_whole(order)));
    assert_eq!(bench.log.lock().unwrap().len(), 1);
}

#[test]
fn a_bad_place_fails_its_own_page_only() {
    let bad = DATA + 2 * 12288 + 4096;
    let covers_bad = move |chunk: &Chunk| {
        let end = chunk.offset + u64::from(chunk.bytes());
        (chunk.offset <= bad && bad < end).then_some(Fault::Errno(libc::EIO))
    };
    let mut bench = ReadBench::new(covers_bad, false);
    for number in 0..5 {
        bench.order(number, DATA + number * 12288, 8192);
    }
    let ends = bench.finish();
    for number in 0..5 {
        let expected = (number == 2).then_some(IoFault::Errno(libc::EIO));
        assert_eq!(ends[&Ticket(number)], expected, "page {number}");
    }
}

#[test]
fn a_short_read_is_repeated_once_and_interruptions_three_times() {
    for (fault, times, expected) in [
        (Fault::Short(4096), 1, None),
        (Fault::Short(4096), 2, Some(IoFault::Short)),
        (Fault::Short(0), 2, Some(IoFault::Short)),
        (Fault::Errno(libc::EAGAIN), 3, None),
        (Fault::Errno(libc::EAGAIN), 4, Some(IoFault::Errno(libc::EAGAIN))),
        (Fault::Errno(libc::EINTR), 3, None),
        (Fault::Errno(libc::EIO), 1, Some(IoFault::Errno(libc::EIO))),
    ] {
        let mut left = times;
        let plan = move |chunk: &Chunk| {
            let hit = chunk.offset == DATA + u64::from(MIB) && left > 0;
            left -= i32::from(hit);
            hit.then_some(fault)
        };
        let mut bench = ReadBench::new(plan, true);
        bench.order(0, DATA, 3 * MIB);
        bench.order(4, DATA + 8 * u64::from(MIB), MIB);
        let ends = bench.finish();
        assert_eq!(ends[&Ticket(0)], expected, "{fault:?} {times} times");
        assert_eq!(ends[&Ticket(4)], None);
    }
}

#[test]
fn what_the_kernel_holds_is_limited_and_orders_are_served_in_turn() {
    let mut bench = ReadBench::new(|_| None, false);
    for number in 0..3 {
        bench.order(number * 10, DATA + number * (10 << 20), 9 * MIB);
    }
    let ends = bench.finish();
    assert!(ends.len() == 3 && ends.values().all(Option::is_none));
    let log = bench.log.lock().unwrap();
    assert!(log.iter().all(|served| served.image_bytes_in_flight <= 16 << 20));
    assert!(log.iter().all(|served| served.bytes <= MIB));
    assert!(log.is_sorted_by_key(|served| served.offset), "first come, first served");
}

#[test]
fn orders_that_make_no_sense_are_refused() {
    let mut bench = ReadBench::new(|_| None, false);
    let good = bench.order(1, DATA, 8192);
    for (number, order) in [
        (2, ReadOrder { image_bytes: 0, ..good }),
        (3, ReadOrder { image_bytes: 8193, ..good }),
        (4, ReadOrder { slot: slot_for(0, 8192), ..good }),
        (5, ReadOrder { slot: slot_for(CAPACITY - 8192, 8192), ..good }),
        (6, ReadOrder { slot: slot_for(u64::MAX - 4095, 8192), ..good }),
        (7, ReadOrder { extent: Extent { bytes: 4096, ..good.extent }, ..good }),
    ] {
        bench.reader.accept(ReadOrder { ticket: Ticket(number), ..order });
    }
    let ends = bench.finish();
    assert_eq!(ends[&Ticket(1)], None);
    for number in 2..8 {
        assert_eq!(ends[&Ticket(number)], Some(IoFault::Errno(libc::EINVAL)), "order {number}");
    }
    let outside = Extent { arena: 3, ..good.extent };
    bench.reader.accept(ReadOrder { ticket: Ticket(9), extent: outside, ..good });
    assert_eq!(bench.finish()[&Ticket(9)], Some(IoFault::Errno(libc::EFAULT)));
}

struct WriteBench {
    writer: Writer,
    memory: Arc<DramPool>,
    disk: Disk,
    log: Log,
    gate: Gate,
    pulse: Arc<Pulse>,
    counters: Arc<DeviceCounters>,
    ends: HeapCons<SsdEnd>,
    /// What the pulse said whenever the reactor was rung.
    pulses: Arc<Mutex<Vec<Duration>>>,
    file: Arc<SsdFile>,
    folder: tempfile::TempDir,
}

impl WriteBench {
    fn new(plan: impl FnMut(&Chunk) -> Option<Fault> + 'static, newest_first: bool) -> Self {
        Self::with(|_| Box::new(plan), newest_first, true, 2 << 20)
    }

    fn with(
        plan: impl FnOnce(&Arc<SsdFile>) -> Failing,
        newest_first: bool,
        writable: bool,
        limit: u64,
    ) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tier");
        let state = Superblock::new(FileId([1; 16]), CAPACITY, 0).unwrap();
        let mut file = SsdFile::open(&path, Access::Tier { direct: false }).unwrap();
        file.reserve(DATA).unwrap();
        if !writable {
            drop(file);
            file = SsdFile::open(&path, Access::Inspect).unwrap();
        }
        let file = Arc::new(file);
        let memory = pool(POOL_BYTES);
        let disk: Disk = Arc::new(Mutex::new(vec![0; CAPACITY as usize]));
        let wake = Arc::new(Wake::new().unwrap());
        let shared: Arc<dyn ImageMemory> = memory.clone();
        let gate: Gate = Arc::new(AtomicBool::new(true));
        let mut engine = FakeEngine::new(disk.clone(), shared, wake.clone(), 16)
            .with_plan(plan(&file))
            .behind(&gate);
        if newest_first {
            engine = engine.newest_first();
        }
        let log = engine.log();
        let counters = Arc::new(DeviceCounters::default());
        let (tell, ends) = HeapRb::new(4096).split();
        let pulse = Arc::new(Pulse::hung_after(HUNG_AFTER));
        let pulses: Arc<Mutex<Vec<Duration>>> = Arc::default();
        let parts = WriterParts {
            metadata: Metadata::new(file.clone(), state, counters.clone()),
            summer: Summer::new(memory.clone(), wake, channel().0),
            counters: counters.clone(),
            activity: Arc::new(ReadActivity::held_at(limit)),
            pulse: pulse.clone(),
            ends: tell,
            notify: {
                let (pulse, pulses) = (pulse.clone(), pulses.clone());
                Arc::new(move || pulses.lock().unwrap().push(pulse.oldest()))
            },
        };
        let writer = Writer::new(Box::new(engine), parts);
        Self { writer, memory, disk, log, gate, pulse, counters, ends, pulses, file, folder }
    }

    fn region(&mut self, slot_bytes: u32) {
        self.writer.accept(WriterCommand::Region { region: 0, slot_bytes });
    }

    fn order(&mut self, number: u64, slot: Slot, image_bytes: u32) -> WriteOrder {
        let order = self.prepare(number, slot, image_bytes);
        self.writer.accept(WriterCommand::Write(order));
        order
    }

    /// An order that is yet to be given, with its image in memory.
    fn prepare(&self, number: u64, slot: Slot, image_bytes: u32) -> WriteOrder {
        let image = image_of(number, image_bytes);
        let bytes = padded(image_bytes.into()) as u32;
        let extent = Extent { arena: 0, offset: number % 8 * (1 << 20), bytes };
        assert!(self.memory.slice(extent).unwrap().fill_from(&image));
        WriteOrder {
            ticket: Ticket(number),
            extent,
            slot,
            image: ImageIdentity {
                namespace: [3; 32],
                hash: PageHash([number as u8; 32]),
                parent: None,
                image_bytes,
                generation: number + 1,
                checksum: Some(checksum(&image)),
            },
        }
    }

    fn finish(&mut self) -> HashMap<Ticket, Option<IoFault>> {
        run(&mut self.writer);
        self.ended()
    }

    /// Turns the writer until the disk counts as hung.
    fn hang(&mut self) {
        while !self.pulse.is_hung() {
            self.writer.fill();
            self.writer.wait(&mut || false);
            self.writer.deliver();
        }
    }

    /// What has ended and was not asked for yet.
    fn ended(&mut self) -> HashMap<Ticket, Option<IoFault>> {
        let mut ends = HashMap::new();
        for end in self.ends.pop_iter() {
            let (SsdEnd::Write { ticket, fault, .. } | SsdEnd::Forget { ticket, fault }) = end
            else {
                panic!("{end:?}")
            };
            assert_eq!(ends.insert(ticket, fault), None, "each ends once");
        }
        ends
    }

    /// What the disk says about a slot.
    fn footer(&self, slot: Slot) -> Option<Footer> {
        let mut block = Block::ZERO;
        let end = slot.offset as usize + slot.bytes as usize;
        block.0.copy_from_slice(&self.disk.lock().unwrap()[end - 4096..end]);
        Footer::decode(&block).ok().filter(|footer| footer.belongs_to(FileId([1; 16]), slot))
    }

    fn is_whole(&self, order: &WriteOrder) -> bool {
        let at = order.slot.offset as usize;
        let sum = checksum(&self.disk.lock().unwrap()[at..at + order.image.image_bytes as usize]);
        Some(sum) == order.image.checksum
            && self.footer(order.slot).is_some_and(|footer| footer.image == order.image)
    }
}

/// Goal: an image that nobody summed gets its footer, and whoever ordered it hears what that says; one
/// that was summed does not wait for it. Method: both in turn, also with a stop while they are out.
#[test]
fn images_without_a_checksum_are_summed_on_their_way() {
    for stopped in [false, true] {
        let mut bench = WriteBench::new(|_| None, false);
        bench.region(12288);
        let mut orders = HashMap::new();
        for number in 0..8 {
            let order = bench.prepare(number, nth(12288, number as u32), 8192);
            orders.insert(order.ticket, order);
            let checksum = order.image.checksum.filter(|_| number % 2 == 0);
            let image = ImageIdentity { checksum, ..order.image };
            bench.writer.accept(WriterCommand::Write(WriteOrder { image, ..order }));
        }
        if stopped {
            bench.writer.abandon();
        }
        let mut ends = HashMap::new();
        while !bench.writer.is_idle() {
            bench.writer.fill();
            bench.writer.wait(&mut || false);
            bench.writer.deliver();
            std::thread::yield_now();
        }
        while let Some(end) = bench.ends.try_pop() {
            let SsdEnd::Write { ticket, fault, checksum } = end else { panic!("{end:?}") };
            let order = &orders[&ticket];
            assert_eq!(checksum, order.image.checksum, "whoever ordered it hears of it");
            assert_eq!(fault.is_none(), bench.is_whole(order));
            assert!(stopped || fault.is_none(), "{fault:?}");
            assert!(ends.insert(ticket, fault).is_none(), "each ends once");
        }
        assert_eq!(ends.len(), orders.len());
    }
}

fn nth(slot_bytes: u32, index: u32) -> Slot {
    let offset = geometry().slot_offset(0, slot_bytes, index);
    Slot { device: 0, offset, bytes: slot_bytes }
}

#[test]
fn small_neighbours_are_written_with_one_request_up_to_the_limit() {
    let mut bench = WriteBench::new(|_| None, false);
    let slot_bytes = RegionGeometry::slot_bytes_for(64 << 10).unwrap();
    bench.region(slot_bytes);
    let orders: Vec<WriteOrder> = (0..40)
        .map(|number| bench.order(number, nth(slot_bytes, number as u32), 64 << 10))
        .collect();
    // Images share eight extents, so only the last writer of each is whole; the shape counts here.
    let ends = bench.finish();
    assert!(ends.len() == 40 && ends.values().all(Option::is_none));
    let log = bench.log.lock().unwrap();
    assert!(log[0].parts == 32 && log[0].bytes == 16 * slot_bytes, "{:?}", log[0]);
    assert!(log.iter().all(|served| served.image_bytes_in_flight <= 2 << 20));
    assert_eq!(log.iter().map(|served| served.parts).sum::<usize>(), 80);
    assert_eq!(bench.footer(orders[39].slot).unwrap().image, orders[39].image);
}

#[test]
fn a_large_page_goes_in_chunks_within_the_limit_and_its_footer_alone() {
    for (limit, chunk) in [(2 << 20, MIB), (512 << 10, 256 << 10)] {
        let mut bench = WriteBench::with(|_| Box::new(|_| None), true, true, limit);
        let slot_bytes = RegionGeometry::slot_bytes_for(5 * MIB).unwrap();
        bench.region(slot_bytes);
        let order = bench.order(1, nth(slot_bytes, 1), 5 * MIB);
        assert_eq!(bench.finish()[&Ticket(1)], None);
        assert!(bench.is_whole(&order));
        let log = bench.log.lock().unwrap();
        assert_eq!(log.len() as u32, 5 * MIB / chunk + 1);
        assert!(log.iter().all(|served| served.image_bytes_in_flight <= limit));
        assert!(log.iter().all(|served| served.bytes <= chunk));
    }
}

#[test]
fn a_page_larger_than_the_limit_is_written_all_the_same() {
    let mut bench = WriteBench::with(|_| Box::new(|_| None), false, true, 256 << 10);
    let slot_bytes = RegionGeometry::slot_bytes_for(MIB).unwrap();
    bench.region(slot_bytes);
    let order = bench.order(1, nth(slot_bytes, 0), MIB);
    assert_eq!(bench.finish()[&Ticket(1)], None);
    assert!(bench.is_whole(&order));
    assert!(bench.log.lock().unwrap().iter().all(|s| s.image_bytes_in_flight <= 256 << 10));
}

#[test]
fn a_bad_slot_fails_its_own_page_and_a_failed_image_gets_no_footer() {
    let slot_bytes = RegionGeometry::slot_bytes_for(64 << 10).unwrap();
    let bad = nth(slot_bytes, 3).offset + 8192;
    let covers_bad = move |chunk: &Chunk| {
        let end = chunk.offset + u64::from(chunk.bytes());
        (chunk.offset <= bad && bad < end).then_some(Fault::Errno(libc::EIO))
    };
    let mut bench = WriteBench::new(covers_bad, false);
    bench.region(slot_bytes);
    let orders: Vec<WriteOrder> = (0..8)
        .map(|number| bench.order(number, nth(slot_bytes, number as u32), 64 << 10))
        .collect();
    let ends = bench.finish();
    for order in &orders {
        let expected = (order.ticket.0 == 3).then_some(IoFault::Errno(libc::EIO));
        assert_eq!(ends[&order.ticket], expected);
        assert_eq!(bench.is_whole(order), expected.is_none());
    }

    // Large: the first chunk fails while others are out.
    let slot_bytes = RegionGeometry::slot_bytes_for(4 * MIB).unwrap();
    let slot = nth(slot_bytes, 0);
    let plan = move |chunk: &Chunk| (chunk.offset == slot.offset).then_some(Fault::Errno(5));
    let mut bench = WriteBench::new(plan, false);
    bench.region(slot_bytes);
    bench.order(1, slot, 4 * MIB);
    assert_eq!(bench.finish()[&Ticket(1)], Some(IoFault::Errno(5)));
    assert_eq!(bench.footer(slot), None);
}

#[test]
fn a_region_is_on_ssd_before_the_first_write_into_it() {
    let slot_bytes = RegionGeometry::slot_bytes_for(64 << 10).unwrap();
    let looked = Arc::new(Mutex::new(0));
    let mut bench = WriteBench::with(
        |file| {
            let (file, looked) = (file.clone(), looked.clone());
            Box::new(move |_| {
                let state = metadata::load(&file).expect("a superblock is there");
                assert_eq!(state.regions[0], slot_bytes);
                *looked.lock().unwrap() += 1;
                None
            })
        },
        false,
        true,
        2 << 20,
    );
    bench.region(slot_bytes);
    bench.order(1, nth(slot_bytes, 0), 64 << 10);
    assert_eq!(bench.finish()[&Ticket(1)], None);
    assert_eq!(*looked.lock().unwrap(), 1);
}

#[test]
fn without_a_superblock_on_ssd_nothing_is_written_and_forgets_report_it() {
    let mut bench = WriteBench::with(|_| Box::new(|_| None), false, false, 2 << 20);
    let slot_bytes = RegionGeometry::slot_bytes_for(64 << 10).unwrap();
    bench.region(slot_bytes);
    for number in 0..5 {
        bench.order(number, nth(slot_bytes, number as u32), 64 << 10);
    }
    let forget = WriterCommand::Forget { ticket: Ticket(7), namespace: [3; 32], generation: 1 };
    bench.writer.accept(forget);
    let ends = bench.finish();
    let unrecorded = Some(IoFault::Superblock(libc::EBADF));
    assert!((0..5).all(|number| ends[&Ticket(number)] == unrecorded), "{ends:?}");
    assert_eq!(ends[&Ticket(7)], Some(IoFault::Errno(libc::EBADF)));
    assert!(bench.log.lock().unwrap().is_empty());
    let tried = |bench: &WriteBench| bench.counters.snapshot().superblock_faults;
    let before = tried(&bench);
    assert!(before <= 4, "for the region, the pages, the forget and at rest, not for each page");
    for number in 0..5 {
        bench.order(number, nth(slot_bytes, number as u32), 64 << 10);
    }
    let ends = bench.finish();
    assert!(ends.len() == 5 && ends.values().all(|fault| *fault == unrecorded), "{ends:?}");
    assert!(tried(&bench) - before <= 2, "once for all of them, once at rest");
}

/// Goal: a superblock that takes its time does not make the device look hung: the clock runs for
/// one system call, and between two syncs what is back is taken.
#[test]
fn each_sync_is_a_call_of_its_own_and_what_is_back_is_taken_in_between() {
    let mut bench = WriteBench::new(|_| None, false);
    let slot_bytes = RegionGeometry::slot_bytes_for(64 << 10).unwrap();
    bench.region(slot_bytes);
    bench.finish();
    for ticket in 1..4 {
        let namespace = [ticket as u8; 32];
        let ticket = Ticket(ticket);
        bench.writer.accept(WriterCommand::Forget { ticket, namespace, generation: 9 });
    }
    for ticket in 1..4 {
        bench.writer.fill();
        assert_eq!(bench.ended(), HashMap::from([(Ticket(ticket), None)]), "one a turn");
        // What the pulse said behind each forget.
        assert_eq!(*bench.pulses.lock().unwrap(), vec![Duration::ZERO; ticket as usize]);
        bench.writer.wait(&mut || false);
    }
    assert!(bench.finish().is_empty());
}

#[test]
fn both_superblocks_say_forgotten_before_it_is_reported() {
    let mut bench = WriteBench::new(|_| None, false);
    let forget = WriterCommand::Forget { ticket: Ticket(2), namespace: [3; 32], generation: 9 };
    bench.writer.accept(forget);
    assert_eq!(bench.finish()[&Ticket(2)], None);
    let path = bench.folder.path().join("tier");
    let whole = std::fs::read(&path).unwrap();
    for copy in 0..2 {
        let mut damaged = whole.clone();
        damaged[copy * 4096 + 40] ^= 1;
        std::fs::write(&path, damaged).unwrap();
        assert!(metadata::load(&bench.file).unwrap().is_forgotten(&[3; 32], 8), "copy {copy}");
    }
}

/// A failed superblock write must never be followed by one over the only whole copy.
#[test]
fn a_failed_superblock_write_is_tried_again_at_the_same_place() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tier");
    let state = Superblock::new(FileId([1; 16]), CAPACITY, 0).unwrap();
    let counters = Arc::new(DeviceCounters::default());
    let open = |access| Arc::new(SsdFile::open(&path, access).unwrap());
    let file = open(Access::Tier { direct: false });
    let mut good = Metadata::new(file.clone(), state, counters.clone());
    good.write_both().unwrap();
    let before = metadata::load(&file).unwrap().sequence;
    drop((good, file));
    let file = open(Access::Inspect);
    let mut failing = Metadata::new(file.clone(), metadata::load(&file).unwrap(), counters);
    for _ in 0..3 {
        assert!(failing.record_forget([1; 32], 5).is_err());
        assert_eq!(failing.state().sequence, before);
        assert!(failing.is_dirty());
    }
}

#[test]
fn abandoned_orders_end_and_what_the_kernel_has_is_waited_for() {
    let mut bench = WriteBench::new(|_| None, false);
    let slot_bytes = RegionGeometry::slot_bytes_for(4 * MIB).unwrap();
    bench.region(slot_bytes);
    run(&mut bench.writer);
    for number in 0..3 {
        bench.order(number, nth(slot_bytes, number as u32), 4 * MIB);
    }
    bench.writer.fill();
    assert!(!bench.writer.is_idle());
    bench.writer.abandon();
    let ends = bench.finish();
    assert_eq!(ends.len(), 3);
    assert!(ends.values().all(|fault| *fault == Some(IoFault::Off)));
    assert_eq!(bench.log.lock().unwrap().len(), 2, "the chunks that were out came back");
}

/// SSD-03: what the kernel has keeps its memory; what it does not have ends although it hangs.
#[test]
fn a_hung_read_keeps_its_buffers_and_holds_nobody_else() {
    let mut bench = ReadBench::new(|_| None, false);
    bench.gate.store(false, Ordering::Release);
    for number in 0..3 {
        bench.order(number * 9, DATA + number * (10 << 20), 9 * MIB);
    }
    bench.hang();
    bench.reader.fill();
    bench.reader.deliver();
    let ends = bench.ended();
    // The fake takes sixteen chunks: the first page and the beginning of the second.
    assert_eq!(ends, HashMap::from([(Ticket(18), Some(IoFault::Off))]));
    assert!(!bench.reader.is_idle(), "the kernel still has the others");
    // What comes now ends at once as well.
    let elsewhere = DATA + (40 << 20);
    bench.order(5, elsewhere, 8192);
    bench.reader.fill();
    bench.reader.deliver();
    assert_eq!(bench.ended(), HashMap::from([(Ticket(5), Some(IoFault::Off))]));

    bench.gate.store(true, Ordering::Release);
    bench.wake.ring_always();
    let ends = bench.finish();
    let expected = [(Ticket(0), None), (Ticket(9), Some(IoFault::Off))];
    assert_eq!(ends, HashMap::from(expected), "the page that was sent whole is good");
    assert!(!bench.pulse.is_hung());
    bench.order(6, elsewhere, 8192);
    assert_eq!(bench.finish()[&Ticket(6)], None, "it works again");
}

#[test]
fn a_hung_write_holds_nobody_else() {
    let mut bench = WriteBench::new(|_| None, false);
    let slot_bytes = RegionGeometry::slot_bytes_for(4 * MIB).unwrap();
    bench.region(slot_bytes);
    bench.gate.store(false, Ordering::Release);
    for number in 0..2 {
        bench.order(number, nth(slot_bytes, number as u32), 4 * MIB);
    }
    bench.hang();
    let forget = WriterCommand::Forget { ticket: Ticket(7), namespace: [3; 32], generation: 9 };
    bench.writer.accept(forget);
    bench.writer.fill();
    bench.writer.deliver();
    let off = Some(IoFault::Off);
    assert_eq!(bench.ended(), HashMap::from([(Ticket(1), off), (Ticket(7), off)]));
    assert!(!bench.writer.is_idle(), "the kernel still has two chunks of the first page");

    bench.gate.store(true, Ordering::Release);
    assert_eq!(bench.finish(), HashMap::from([(Ticket(0), off)]), "it was not sent whole");
    let order = bench.order(8, nth(slot_bytes, 2), 4 * MIB);
    assert_eq!(bench.finish()[&Ticket(8)], None, "it works again");
    assert!(bench.is_whole(&order));
}

#[test]
fn a_region_that_came_while_the_disk_hung_is_recorded_by_the_first_write_into_it() {
    let mut bench = WriteBench::new(|_| None, false);
    let slot_bytes = RegionGeometry::slot_bytes_for(64 << 10).unwrap();
    bench.pulse.set_oldest(Some(0));
    bench.hang();
    bench.region(slot_bytes);
    bench.order(1, nth(slot_bytes, 0), 64 << 10);
    bench.writer.fill();
    bench.writer.deliver();
    assert_eq!(bench.ended()[&Ticket(1)], Some(IoFault::Off));
    bench.pulse.set_oldest(None);
    let order = bench.order(2, nth(slot_bytes, 0), 64 << 10);
    assert_eq!(bench.finish()[&Ticket(2)], None);
    assert!(bench.is_whole(&order));
    assert_eq!(metadata::load(&bench.file).unwrap().regions[0], slot_bytes);
}

#[test]
fn a_forget_that_came_while_the_disk_hung_is_kept_for_the_next_superblock() {
    let mut bench = WriteBench::new(|_| None, false);
    bench.pulse.set_oldest(Some(0));
    bench.hang();
    let forget = WriterCommand::Forget { ticket: Ticket(2), namespace: [3; 32], generation: 9 };
    bench.writer.accept(forget);
    bench.writer.fill();
    bench.writer.deliver();
    assert_eq!(bench.ended(), HashMap::from([(Ticket(2), Some(IoFault::Off))]));
    assert!(metadata::load(&bench.file).is_err(), "nothing is written to a disk that hangs");
    bench.pulse.set_oldest(None);
    run(&mut bench.writer);
    assert!(metadata::load(&bench.file).unwrap().is_forgotten(&[3; 32], 8));
}

#[test]
fn no_write_begins_before_the_base_of_its_generation_is_on_ssd() {
    let slot_bytes = RegionGeometry::slot_bytes_for(64 << 10).unwrap();
    let seen = |file: &SsdFile| metadata::load(file).unwrap().generation;
    let plan = |file: &Arc<SsdFile>| -> Failing {
        let file = file.clone();
        Box::new(move |_| {
            assert!(seen(&file) >= 1 << 40);
            None
        })
    };
    for comes_while_hung in [false, true] {
        let mut bench = WriteBench::with(plan, false, true, 2 << 20);
        bench.region(slot_bytes);
        run(&mut bench.writer);
        assert_eq!(seen(&bench.file), 0);
        if comes_while_hung {
            bench.pulse.set_oldest(Some(0));
            bench.hang();
        }
        bench.writer.accept(WriterCommand::Generation { base: 1 << 40 });
        if comes_while_hung {
            bench.writer.fill();
            bench.pulse.set_oldest(None);
        }
        bench.order(1, nth(slot_bytes, 0), 64 << 10);
        assert_eq!(bench.finish()[&Ticket(1)], None);
        assert_eq!(bench.log.lock().unwrap().len(), 1);
    }
}

#[test]
fn no_space_is_told_apart_from_a_bad_slot() {
    let slot_bytes = RegionGeometry::slot_bytes_for(64 << 10).unwrap();
    let mut bench = WriteBench::new(|_| Some(Fault::Errno(libc::ENOSPC)), false);
    bench.region(slot_bytes);
    bench.order(1, nth(slot_bytes, 0), 64 << 10);
    assert_eq!(bench.finish()[&Ticket(1)], Some(IoFault::NoSpace));
    let counters = bench.counters.snapshot();
    assert_eq!(counters.write_faults[IoFault::NoSpace.index()], 1);
}

#[test]
fn a_probe_reads_a_block_and_reports_what_became_of_it() {
    for (fault, expected) in
        [(None, None), (Some(Fault::Errno(libc::EIO)), Some(IoFault::Errno(libc::EIO)))]
    {
        let mut bench = ReadBench::new(move |_| fault, false);
        bench.reader.accept(ReadOrder::probe(DATA));
        run(&mut bench.reader);
        let result = bench.results.try_recv().unwrap();
        assert!(result.order.is_probe() && result.fault == expected, "{:?}", result.fault);
    }
}

#[derive(Clone, Copy, Debug)]
struct Plan {
    kind: u8,
    every: usize,
    phase: usize,
}

fn faults(plan: Plan) -> impl FnMut(&Chunk) -> Option<Fault> {
    let mut served = 0;
    move |_| {
        served += 1;
        (plan.every > 0 && served % plan.every == plan.phase % plan.every).then_some(
            match plan.kind {
                0 => Fault::Errno(libc::EIO),
                1 => Fault::Short(4096),
                2 => Fault::Errno(libc::EAGAIN),
                _ => Fault::Short(0),
            },
        )
    }
}

fn plans() -> impl Strategy<Value = Plan> {
    (0_u8..4, 0_usize..6, 0_usize..6).prop_map(|(kind, every, phase)| Plan { kind, every, phase })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// Any faults, any order of completion: every read ends once, and one that ends well has every
    /// byte (checked in `finish`).
    #[test]
    fn reads_end_once_and_never_well_with_wrong_bytes(
        plan in plans(), newest_first: bool,
        sizes in proptest::collection::vec(
            prop_oneof![Just(4096_u32), Just(8192), Just(65_536), Just(1_300_000), Just(2 << 20)],
            1..12,
        ),
    ) {
        let mut bench = ReadBench::new(faults(plan), newest_first);
        let mut offset = DATA;
        for (number, image_bytes) in sizes.iter().enumerate() {
            // Two megabytes of pool each.
            bench.order(number as u64 * 2, offset, *image_bytes);
            offset += u64::from(RegionGeometry::slot_bytes_for(*image_bytes).unwrap());
        }
        let ends = bench.finish();
        prop_assert_eq!(ends.len(), sizes.len());
        if plan.every == 0 {
            prop_assert!(ends.values().all(Option::is_none));
        }
    }

    /// The same for writes: one that ends well is whole on the disk, footer included.
    #[test]
    fn writes_end_once_and_never_well_when_the_disk_lacks_a_byte(
        plan in plans(), newest_first: bool, limit in prop_oneof![Just(256 << 10), Just(2_u64 << 20)],
        image_bytes in prop_oneof![Just(4096_u32), Just(8192), Just(65_536), Just(1 << 20), Just(2 << 20)],
        skips in proptest::collection::vec(1_u32..3, 1..8),
    ) {
        let mut bench = WriteBench::with(|_| Box::new(faults(plan)), newest_first, true, limit);
        let slot_bytes = RegionGeometry::slot_bytes_for(image_bytes).unwrap();
        bench.region(slot_bytes);
        let mut orders = Vec::new();
        let mut index = 0;
        for (number, skip) in skips.iter().enumerate() {
            index += skip;
            let order = bench.order(number as u64, nth(slot_bytes, index), image_bytes);
            orders.push(order);
            // Extents are a megabyte apart: longer images go one at a time.
            if image_bytes > MIB {
                break;
            }
        }
        let ends = bench.finish();
        prop_assert_eq!(ends.len(), orders.len());
        for order in &orders {
            if ends[&order.ticket].is_none() {
                prop_assert!(bench.is_whole(order));
            }
        }
        if plan.every == 0 {
            prop_assert!(ends.values().all(Option::is_none));
        }
        let counters = bench.counters.snapshot();
        let well = ends.values().filter(|fault| fault.is_none()).count() as u64;
        prop_assert_eq!(counters.written_pages, well);
        prop_assert_eq!(counters.write_faults.iter().sum::<u64>(), ends.len() as u64 - well);
    }
}
