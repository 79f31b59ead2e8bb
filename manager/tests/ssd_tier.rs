//! The SSD tier on real files: what was written is found again, and what is damaged is a miss.
//!
//! Every test runs on io_uring (where it is allowed) and on threads. A crash is a tier that is
//! dropped without a stop: its workers write nothing more, as after SIGKILL.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use orbitkv_manager::core::{
    Extent, ImageIdentity, IoFault, RecoveredPage, RegionGeometry, Slot, Ticket,
};
use orbitkv_manager::image::ImageMemory;
use orbitkv_manager::pool::{DramPool, HugePages, PoolConfig};
use orbitkv_manager::ssd::format::Forgotten;
use orbitkv_manager::ssd::{
    ClaimedTier, DeviceInfo, EngineChoice, EngineKind, Health, ReadOrder, Recovery, ScanState,
    SlotCounts, SsdConfig, SsdEnd, SsdError, SsdTier, WriteOrder, verify,
};
use orbitkv_shm_protocol::ids::PageHash;

const MIB: u64 = 1 << 20;
const KIB: u32 = 1 << 10;
const NAMESPACE: [u8; 32] = [7; 32];

fn engines() -> Vec<EngineChoice> {
    vec![EngineChoice::Auto, EngineChoice::Blocking]
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn config(path: &Path, capacity_bytes: u64, engine: EngineChoice) -> SsdConfig {
    SsdConfig {
        paths: vec![path.to_owned()],
        capacity_bytes,
        direct: true,
        engine,
        write_in_flight_bytes: 2 * MIB,
        read_join_bytes: 1 << 20,
        slot_bytes_max: 0,
    }
}

/// What an open tier said of its files.
struct Found {
    devices: Vec<DeviceInfo>,
    /// By place.
    pages: Vec<RecoveredPage>,
    highest_generation: u64,
    forgotten: Vec<Forgotten>,
    needless: Vec<Forgotten>,
    counts: SlotCounts,
    ends: Vec<ScanState>,
}

/// A tier with a pool, and just enough of a core to give out slots and extents.
struct Bench {
    tier: SsdTier,
    recovery: Found,
    pool: Arc<DramPool>,
    bell: Arc<(Mutex<u64>, Condvar)>,
    regions: HashMap<u32, (u32, u32)>,
    next_region: u32,
    next_offset: u64,
    next_ticket: u64,
    generation: u64,
}

/// Waits for the census of the files.
fn recovered(tier: &mut SsdTier, devices: Vec<DeviceInfo>) -> Found {
    let end = Instant::now() + Duration::from_secs(30);
    loop {
        if let Some(recovery) = tier.poll_recovery() {
            let Recovery { found, forgotten, needless, counts, ends, .. } = recovery;
            let mut pages = found.pages().to_vec();
            pages.sort_unstable_by_key(|page| (page.slot.device, page.slot.offset));
            let highest_generation = found.last_generation();
            return Found { devices, pages, highest_generation, forgotten, needless, counts, ends };
        }
        assert!(Instant::now() < end, "the census never ends");
        std::thread::sleep(Duration::from_millis(1));
    }
}

impl Bench {
    fn open(config: &SsdConfig) -> Self {
        Self::try_open(config).unwrap_or_else(|error| panic!("{error}"))
    }

    fn try_open(config: &SsdConfig) -> Result<Self, SsdError> {
        let mut claimed = ClaimedTier::claim(config)?;
        let mut made = claimed.made_files();
        let bench = Self::start(claimed)?;
        made.keep();
        assert!(bench.recovery.ends.iter().all(|end| *end == ScanState::Complete));
        for scan in bench.tier.scans() {
            assert_eq!((scan.state, scan.scanned), (ScanState::Complete, scan.slots));
        }
        Ok(bench)
    }

    fn start(claimed: ClaimedTier) -> Result<Self, SsdError> {
        let pool_config =
            PoolConfig { bytes: 64 * MIB, huge_pages: HugePages::Prefer, prefault_threads: 1 };
        let pool = Arc::new(DramPool::allocate(pool_config).unwrap());
        let bell = Arc::new((Mutex::new(0), Condvar::new()));
        let notify = {
            let bell = bell.clone();
            Arc::new(move || {
                *bell.0.lock().unwrap() += 1;
                bell.1.notify_one();
            })
        };
        let (mut tier, devices) =
            SsdTier::start(claimed, &pool.arena_bytes(), pool.clone(), notify)?;
        let recovery = recovered(&mut tier, devices);
        let generation = recovery.highest_generation;
        Ok(Self {
            tier,
            recovery,
            pool,
            bell,
            regions: HashMap::new(),
            next_region: 0,
            next_offset: 0,
            next_ticket: 1,
            generation,
        })
    }

    fn geometry(&self) -> RegionGeometry {
        self.recovery.devices[0].geometry
    }

    fn ticket(&mut self) -> Ticket {
        self.next_ticket += 1;
        Ticket(self.next_ticket)
    }

    /// The next free slot for images of this length, in a region that is recorded when new.
    fn slot(&mut self, image_bytes: u32) -> Slot {
        let bytes = RegionGeometry::slot_bytes_for(image_bytes).unwrap();
        let geometry = self.geometry();
        let (region, used) = *self.regions.entry(bytes).or_insert((u32::MAX, 0));
        let (region, used) = if region != u32::MAX && used < geometry.slots(region, bytes) {
            (region, used)
        } else {
            let region = self.next_region;
            assert!(geometry.slots(region, bytes) > 0, "the file is full");
            self.next_region += 1;
            self.tier.record_region(0, region, bytes).unwrap();
            (region, 0)
        };
        self.regions.insert(bytes, (region, used + 1));
        Slot { device: 0, offset: geometry.slot_offset(region, bytes, used), bytes }
    }

    fn extent(&mut self, image_bytes: u32) -> Extent {
        let bytes = image_bytes.next_multiple_of(4096);
        if self.next_offset + u64::from(bytes) > 64 * MIB {
            self.next_offset = 0;
        }
        let offset = self.next_offset;
        self.next_offset += u64::from(bytes);
        Extent { arena: 0, offset, bytes }
    }

    /// Fills an extent with the page's bytes and orders the write.
    fn write_at(
        &mut self,
        slot: Slot,
        hash: PageHash,
        image_bytes: u32,
    ) -> (Ticket, ImageIdentity) {
        self.write_summed(slot, hash, image_bytes, true)
    }

    /// [`write_at`](Self::write_at), with or without the checksum of the image.
    fn write_summed(
        &mut self,
        slot: Slot,
        hash: PageHash,
        image_bytes: u32,
        is_summed: bool,
    ) -> (Ticket, ImageIdentity) {
        let extent = self.extent(image_bytes);
        self.generation += 1;
        let content = content(hash, image_bytes);
        assert!(self.pool.slice(extent).unwrap().fill_from(&content));
        let image = ImageIdentity {
            namespace: NAMESPACE,
            hash,
            parent: None,
            image_bytes,
            generation: self.generation,
            checksum: Some(checksum(&content)),
        };
        let ticket = self.ticket();
        let checksum = image.checksum.filter(|_| is_summed);
        let ordered = ImageIdentity { checksum, ..image };
        self.tier.submit_write(WriteOrder { ticket, extent, slot, image: ordered }).unwrap();
        (ticket, image)
    }

    fn write(&mut self, hash: PageHash, image_bytes: u32) -> RecoveredPage {
        let slot = self.slot(image_bytes);
        let (ticket, image) = self.write_at(slot, hash, image_bytes);
        assert_eq!(self.fault_of(ticket), None);
        RecoveredPage { slot, image }
    }

    fn order_read(&mut self, page: &RecoveredPage) -> (Ticket, Extent) {
        let extent = self.extent(page.image.image_bytes);
        let ticket = self.ticket();
        self.tier
            .submit_read(ReadOrder {
                ticket,
                slot: page.slot,
                extent,
                image_bytes: page.image.image_bytes,
                checksum: page.image.checksum.unwrap(),
            })
            .unwrap();
        (ticket, extent)
    }

    /// Reads a page and compares every byte.
    fn read(&mut self, page: &RecoveredPage) -> Option<IoFault> {
        let (ticket, extent) = self.order_read(page);
        let SsdEnd::Read { ticket: ended, fault } = self.end_of(ticket) else { panic!() };
        assert_eq!(ended, ticket);
        if fault.is_none() {
            let bytes = self.pool.slice(extent).unwrap().to_vec();
            let expected = content(page.image.hash, page.image.image_bytes);
            assert!(bytes[..expected.len()] == expected, "wrong bytes for {:?}", page.image.hash);
        }
        fault
    }

    /// The next end; sleeps on the bell, which must ring for it.
    fn end(&mut self) -> SsdEnd {
        loop {
            let heard = *self.bell.0.lock().unwrap();
            if let Some(end) = self.tier.poll() {
                return end;
            }
            let mut rung = self.bell.0.lock().unwrap();
            while *rung == heard {
                rung = self.bell.1.wait(rung).unwrap();
            }
        }
    }

    fn end_of(&mut self, ticket: Ticket) -> SsdEnd {
        let end = self.end();
        let (SsdEnd::Read { ticket: ended, .. }
        | SsdEnd::Write { ticket: ended, .. }
        | SsdEnd::Forget { ticket: ended, .. }) = end;
        assert_eq!(ended, ticket);
        end
    }

    /// How the write of a ticket, the only one that is out, ended.
    fn fault_of(&mut self, ticket: Ticket) -> Option<IoFault> {
        let SsdEnd::Write { fault, .. } = self.end_of(ticket) else { panic!("no write") };
        fault
    }

    fn forget(&mut self, namespace: [u8; 32], generation: u64) {
        let ticket = self.ticket();
        self.tier.record_forget(ticket, namespace, generation).unwrap();
        assert_eq!(self.end_of(ticket), SsdEnd::Forget { ticket, fault: None });
    }

    fn page(&self, hash: PageHash) -> Option<RecoveredPage> {
        self.recovery.pages.iter().find(|page| page.image.hash == hash).copied()
    }
}

fn hash(number: u64) -> PageHash {
    let mut hash = [0; 32];
    hash[..8].copy_from_slice(&number.to_le_bytes());
    hash[31] = 0xA5;
    PageHash(hash)
}

/// Bytes that only this page has.
fn content(hash: PageHash, bytes: u32) -> Vec<u8> {
    let mut state = u64::from_le_bytes(hash.0[..8].try_into().unwrap()).wrapping_mul(0x9E37) | 1;
    let mut content = Vec::with_capacity(bytes as usize);
    while content.len() < bytes as usize {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        content.extend_from_slice(&state.to_le_bytes());
    }
    content.truncate(bytes as usize);
    content
}

fn checksum(bytes: &[u8]) -> u64 {
    twox_hash::XxHash3_64::oneshot(bytes)
}

fn flip(path: &Path, offset: u64) {
    let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, offset).unwrap();
    file.write_all_at(&[byte[0] ^ 1], offset).unwrap();
    file.sync_all().unwrap();
}

/// `verify` with memory of its own.
fn look_at(paths: &[PathBuf]) -> Result<SlotCounts, SsdError> {
    let config = PoolConfig { bytes: 16 * MIB, huge_pages: HugePages::Off, prefault_threads: 1 };
    let memory: Arc<dyn ImageMemory> = Arc::new(DramPool::allocate(config).unwrap());
    let mut last = (0, 0);
    let counts = verify(paths, &memory, |done, total| {
        assert!(done >= last.0 && done <= total);
        last = (done, total);
    })?;
    assert_eq!(last.0, last.1, "everything was looked at");
    Ok(counts)
}

fn check(path: &Path) -> SlotCounts {
    look_at(&[path.to_owned()]).unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn pages_of_all_lengths_side_by_side_come_back_whole() {
    for engine in engines() {
        let folder = folder();
        let path = folder.path().join("tier");
        let mut bench = Bench::open(&config(&path, 400 * MIB, engine));
        let lengths = [4 * KIB, 128 * KIB, 9 * 1024 * KIB, 5000, 1024 * KIB, 64 * KIB + 1];
        let mut pages = Vec::new();
        for round in 0..4 {
            // Ordered together, so that neighbours can travel together.
            let mut out = HashMap::new();
            for (index, image_bytes) in lengths.into_iter().enumerate() {
                let count = if image_bytes > MIB as u32 { 1 } else { 5 };
                for number in 0..count {
                    let hash = hash(round * 1000 + index as u64 * 100 + number);
                    let slot = bench.slot(image_bytes);
                    let (ticket, image) = bench.write_at(slot, hash, image_bytes);
                    out.insert(ticket, RecoveredPage { slot, image });
                }
            }
            while !out.is_empty() {
                let SsdEnd::Write { ticket, fault, .. } = bench.end() else { panic!() };
                assert_eq!(fault, None);
                pages.push(out.remove(&ticket).expect("each ends once"));
            }
        }
        assert_eq!(bench.tier.poll(), None);

        for chunk in pages.chunks(4) {
            let mut out = HashMap::new();
            for page in chunk {
                let (ticket, extent) = bench.order_read(page);
                out.insert(ticket, (page, extent));
            }
            while !out.is_empty() {
                let SsdEnd::Read { ticket, fault } = bench.end() else { panic!() };
                assert_eq!(fault, None);
                let (page, extent) = out.remove(&ticket).expect("each ends once");
                let bytes = bench.pool.slice(extent).unwrap().to_vec();
                let expected = content(page.image.hash, page.image.image_bytes);
                assert!(bytes[..expected.len()] == expected);
            }
        }
        let counters = bench.tier.status().next().unwrap().counters;
        let image_bytes: u64 = pages.iter().map(|page| u64::from(page.image.image_bytes)).sum();
        assert_eq!(counters.written_pages, pages.len() as u64);
        assert_eq!((counters.written_bytes, counters.read_bytes), (image_bytes, image_bytes));
        assert_eq!((counters.reading, counters.writing, counters.write_inflight_bytes), (0, 0, 0));
        assert!(bench.tier.stop(Duration::from_secs(30)).is_empty());
        let counts = check(&path);
        assert_eq!((counts.valid, counts.torn, counts.stale), (pages.len() as u64, 0, 0));
        assert_eq!(counts.slots, counts.valid + counts.empty);
    }
}

/// Goal: the tier sums what came without a checksum and tells what it was, also what was ordered last
/// before a stop. Method: one at a time, so that a writer that sleeps has to hear of it; then many.
#[test]
fn images_without_a_checksum_are_summed_on_their_way() {
    for engine in engines() {
        let folder = folder();
        let config = config(&folder.path().join("tier"), 200 * MIB, engine);
        let mut bench = Bench::open(&config);
        let length = |number: u64| if number.is_multiple_of(3) { 2048 * KIB } else { 64 * KIB };
        let mut pages = Vec::new();
        for number in 0..6 {
            let slot = bench.slot(length(number));
            let (ticket, image) = bench.write_summed(slot, hash(number), length(number), false);
            let checksum = image.checksum;
            assert_eq!(bench.end_of(ticket), SsdEnd::Write { ticket, fault: None, checksum });
            pages.push(RecoveredPage { slot, image });
        }
        for number in 6..18 {
            let slot = bench.slot(length(number));
            let is_summed = number.is_multiple_of(2);
            let (_, image) = bench.write_summed(slot, hash(number), length(number), is_summed);
            pages.push(RecoveredPage { slot, image });
        }
        let ends = bench.tier.stop(Duration::from_secs(30));
        assert_eq!(ends.len(), 12);
        assert!(ends.iter().all(|end| matches!(end, SsdEnd::Write { fault: None, .. })));
        let mut again = Bench::open(&config);
        for page in pages {
            assert_eq!(again.page(page.image.hash), Some(page));
            assert_eq!(again.read(&page), None);
        }
    }
}

#[test]
fn after_a_crash_every_completed_write_is_found_with_its_identity() {
    for engine in engines() {
        let folder = folder();
        let path = folder.path().join("tier");
        let config = config(&path, 300 * MIB, engine);
        let mut bench = Bench::open(&config);
        assert_eq!(bench.recovery.pages, []);
        let mut written = Vec::new();
        for number in 0..60 {
            let image_bytes = [4 * KIB, 128 * KIB, 2048 * KIB][number as usize % 3];
            written.push(bench.write(hash(number), image_bytes));
        }
        drop(bench.tier);

        let mut again = Bench::open(&config);
        let mut found = again.recovery.pages.clone();
        let by_place = |page: &RecoveredPage| page.slot.offset;
        found.sort_by_key(by_place);
        written.sort_by_key(by_place);
        assert_eq!(found, written);
        let highest = written.iter().map(|page| page.image.generation).max().unwrap();
        assert_eq!(again.recovery.highest_generation, highest);
        assert_eq!(again.recovery.counts.valid, 60);
        for page in &written {
            assert_eq!(again.read(page), None);
        }
    }
}

#[test]
fn a_crash_in_the_middle_of_writes_loses_no_more_than_those() {
    for engine in engines() {
        let folder = folder();
        let path = folder.path().join("tier");
        let config = config(&path, 300 * MIB, engine);
        let mut bench = Bench::open(&config);
        let safe: Vec<RecoveredPage> =
            (0..20).map(|number| bench.write(hash(number), 128 * KIB)).collect();
        for number in 100..130 {
            let slot = bench.slot(1024 * KIB);
            bench.write_at(slot, hash(number), 1024 * KIB);
        }
        drop(bench.tier);

        let mut again = Bench::open(&config);
        for page in &safe {
            assert_eq!(again.read(page), None);
        }
        for page in again.recovery.pages.clone() {
            // Torn ones may be among them; then the checksum says so.
            let fault = again.read(&page);
            assert!(fault.is_none() || fault == Some(IoFault::Checksum), "{fault:?}");
        }
        drop(again.tier);
        let counts = check(&path);
        assert!(counts.valid >= 20);
        assert_eq!(counts.slots, counts.valid + counts.torn + counts.stale + counts.empty);
    }
}

#[test]
fn a_flipped_bit_in_an_image_is_a_checksum_fault_and_torn_for_verify() {
    for engine in engines() {
        let folder = folder();
        let path = folder.path().join("tier");
        let config = config(&path, 200 * MIB, engine);
        let mut bench = Bench::open(&config);
        let pages: Vec<RecoveredPage> =
            (0..3).map(|number| bench.write(hash(number), 2048 * KIB)).collect();
        drop(bench.tier);
        flip(&path, pages[1].slot.offset + 1_500_000);

        let mut again = Bench::open(&config);
        assert_eq!(again.read(&pages[0]), None);
        assert_eq!(again.read(&pages[1]), Some(IoFault::Checksum));
        assert_eq!(again.read(&pages[2]), None);
        let status = again.tier.status().next().unwrap();
        assert_eq!(status.counters.read_faults[IoFault::Checksum.index()], 1);
        assert_eq!(status.health, Health::Healthy, "damage is no reason to leave a device");
        drop(again.tier);
        let counts = check(&path);
        assert_eq!((counts.valid, counts.torn), (2, 1));
    }
}

#[test]
fn a_flipped_bit_in_a_footer_is_a_miss() {
    let folder = folder();
    let path = folder.path().join("tier");
    let config = config(&path, 200 * MIB, EngineChoice::Auto);
    let mut bench = Bench::open(&config);
    let pages: Vec<RecoveredPage> =
        (0..3).map(|number| bench.write(hash(number), 64 * KIB)).collect();
    drop(bench.tier);
    flip(&path, pages[1].slot.offset + u64::from(pages[1].slot.bytes) - 4096 + 100);
    let again = Bench::open(&config);
    assert!(again.page(hash(1)).is_none());
    assert_eq!((again.recovery.counts.valid, again.recovery.counts.torn), (2, 1));
}

#[test]
fn a_file_cut_under_a_running_tier_is_short_not_stale_bytes() {
    for engine in engines() {
        let folder = folder();
        let path = folder.path().join("tier");
        let mut bench = Bench::open(&config(&path, 200 * MIB, engine));
        let first = bench.write(hash(1), 3072 * KIB);
        let second = bench.write(hash(2), 3072 * KIB);
        let cut = second.slot.offset + 4096;
        OpenOptions::new().write(true).open(&path).unwrap().set_len(cut).unwrap();
        assert_eq!(bench.read(&first), None);
        assert_eq!(bench.read(&second), Some(IoFault::Short));
        assert!(bench.tier.status().next().unwrap().counters.short_transfers >= 1);
    }
}

/// Goal: a slot that was being reused at the crash is never served with mixed bytes. Method: put
/// half of a new image in front of the old footer, then the new footer behind half of the image.
#[test]
fn a_file_of_which_nothing_can_be_read_is_all_torn_for_verify() {
    let folder = folder();
    let path = folder.path().join("tier");
    let mut bench = Bench::open(&config(&path, 100 * MIB, EngineChoice::Auto));
    let page = bench.write(hash(1), 64 * KIB);
    let geometry = bench.geometry();
    bench.tier.stop(Duration::from_secs(30));
    OpenOptions::new().write(true).open(&path).unwrap().set_len(geometry.data_offset).unwrap();
    let counts = check(&path);
    let slots = u64::from(geometry.slots(0, page.slot.bytes));
    assert_eq!((counts.slots, counts.torn), (slots, slots));
}

#[test]
fn a_torn_slot_is_a_miss_whichever_part_is_new() {
    let folder = folder();
    let path = folder.path().join("tier");
    let config = config(&path, 200 * MIB, EngineChoice::Auto);
    let mut bench = Bench::open(&config);
    let old = bench.write(hash(1), 2048 * KIB);
    let other = bench.write(hash(2), 2048 * KIB);
    drop(bench.tier);
    let half = content(hash(3), 2048 * KIB);
    let file = OpenOptions::new().write(true).open(&path).unwrap();
    file.write_all_at(&half[..1 << 20], old.slot.offset).unwrap();
    file.sync_all().unwrap();

    let mut again = Bench::open(&config);
    assert_eq!(again.page(hash(1)), Some(old), "start-up reads footers only");
    assert_eq!(again.read(&old), Some(IoFault::Checksum));
    // The same slot anew: footer and image belong together again.
    let (ticket, image) = again.write_at(old.slot, hash(4), 2048 * KIB);
    assert_eq!(again.fault_of(ticket), None);
    drop(again.tier);
    // New footer, old second half.
    file.write_all_at(&half[1 << 20..], old.slot.offset + MIB).unwrap();
    file.sync_all().unwrap();
    let mut third = Bench::open(&config);
    let torn = RecoveredPage { slot: old.slot, image };
    assert_eq!(third.page(hash(4)), Some(torn));
    assert_eq!(third.page(hash(1)), None);
    assert_eq!(third.read(&torn), Some(IoFault::Checksum));
    assert_eq!(third.read(&other), None);
}

#[test]
fn the_highest_generation_of_a_page_wins() {
    let folder = folder();
    let path = folder.path().join("tier");
    let config = config(&path, 200 * MIB, EngineChoice::Auto);
    let mut bench = Bench::open(&config);
    bench.write(hash(1), 64 * KIB);
    bench.write(hash(1), 64 * KIB);
    let newest = bench.write(hash(1), 128 * KIB);
    drop(bench.tier);
    let again = Bench::open(&config);
    assert_eq!(again.recovery.pages, [newest]);
    assert_eq!((again.recovery.counts.valid, again.recovery.counts.stale), (1, 2));
}

#[test]
fn retired_slots_stay_retired() {
    let folder = folder();
    let path = folder.path().join("tier");
    let config = config(&path, 200 * MIB, EngineChoice::Auto);
    let mut bench = Bench::open(&config);
    let bad = bench.write(hash(1), 64 * KIB);
    let good = bench.write(hash(2), 64 * KIB);
    bench.tier.retire(bad.slot).unwrap();
    bench.tier.stop(Duration::from_secs(30));
    for _ in 0..2 {
        let again = Bench::open(&config);
        assert_eq!(again.recovery.devices[0].retired, [bad.slot.offset]);
        assert_eq!(again.recovery.pages, [good]);
        assert_eq!(again.recovery.highest_generation, 2, "its generation is not used again");
        again.tier.stop(Duration::from_secs(30));
    }
    assert_eq!(check(&path).stale, 1);
}

#[test]
fn a_retired_slot_is_recorded_without_a_stop_once_the_writer_rests() {
    let folder = folder();
    let path = folder.path().join("tier");
    let config = config(&path, 200 * MIB, EngineChoice::Auto);
    let mut bench = Bench::open(&config);
    let bad = bench.write(hash(1), 64 * KIB);
    let before = bench.tier.status().next().unwrap().counters.superblock_writes;
    bench.tier.retire(bad.slot).unwrap();
    while bench.tier.status().next().unwrap().counters.superblock_writes == before {
        std::thread::yield_now();
    }
    drop(bench.tier);
    assert_eq!(Bench::open(&config).recovery.devices[0].retired, [bad.slot.offset]);
}

#[test]
fn forgotten_namespaces_stay_forgotten_until_no_slot_needs_the_entry() {
    for engine in engines() {
        let folder = folder();
        let path = folder.path().join("tier");
        let config = config(&path, 200 * MIB, engine);
        let mut bench = Bench::open(&config);
        let old = bench.write(hash(1), 64 * KIB);
        let mark = bench.generation + 1;
        bench.forget(NAMESPACE, mark);
        let young = bench.write(hash(2), 64 * KIB);
        assert_eq!(young.image.generation, mark, "the first that is not forgotten");
        drop(bench.tier);

        let mut again = Bench::open(&config);
        assert_eq!(again.recovery.pages, [young]);
        assert_eq!(again.recovery.forgotten.len(), 1);
        assert!(again.recovery.highest_generation >= mark);
        // The old slot is used anew: nothing needs the entry any more.
        let (ticket, _) = again.write_at(old.slot, hash(3), 64 * KIB);
        assert_eq!(again.fault_of(ticket), None);
        drop(again.tier);
        let third = Bench::open(&config);
        assert_eq!((third.recovery.forgotten.len(), third.recovery.needless.len()), (0, 1));
        assert_eq!(third.recovery.pages.len(), 2);
        third.tier.stop(Duration::from_secs(5));
        let last = Bench::open(&config).recovery;
        assert_eq!((last.forgotten.len(), last.needless.len()), (0, 0), "it is gone from the file");
    }
}

#[test]
fn a_forgotten_namespace_survives_the_loss_of_either_superblock() {
    for copy in 0..2 {
        let folder = folder();
        let path = folder.path().join("tier");
        let config = config(&path, 200 * MIB, EngineChoice::Auto);
        let mut bench = Bench::open(&config);
        bench.write(hash(1), 64 * KIB);
        let mark = bench.generation + 1;
        bench.forget(NAMESPACE, mark);
        drop(bench.tier);
        flip(&path, copy * 4096 + 50);
        assert_eq!(Bench::open(&config).recovery.pages, [], "copy {copy}");
    }
}

#[test]
fn pages_whose_ancestor_is_gone_are_dropped_and_parents_come_first() {
    let folder = folder();
    let path = folder.path().join("tier");
    let config = config(&path, 200 * MIB, EngineChoice::Auto);
    let mut bench = Bench::open(&config);
    // Two chains of four; written leaf first, so that the order on SSD is not the order of chains.
    let mut chain = |base: u64| -> Vec<RecoveredPage> {
        (0..4)
            .rev()
            .map(|level| {
                let slot = bench.slot(16 * KIB);
                let extent = bench.extent(16 * KIB);
                let content = content(hash(base + level), 16 * KIB);
                assert!(bench.pool.slice(extent).unwrap().fill_from(&content));
                bench.generation += 1;
                let image = ImageIdentity {
                    namespace: NAMESPACE,
                    hash: hash(base + level),
                    parent: (level > 0).then(|| hash(base + level - 1)),
                    image_bytes: 16 * KIB,
                    generation: bench.generation,
                    checksum: Some(checksum(&content)),
                };
                let ticket = bench.ticket();
                bench.tier.submit_write(WriteOrder { ticket, extent, slot, image }).unwrap();
                assert_eq!(bench.fault_of(ticket), None);
                RecoveredPage { slot, image }
            })
            .collect()
    };
    let whole = chain(10);
    let holed = chain(20);
    drop(bench.tier);
    // The page at level 1 of the second chain is torn.
    let hole = holed[2].slot;
    flip(&path, hole.offset + u64::from(hole.bytes) - 4096);

    let again = Bench::open(&config);
    let places: Vec<u64> = again.recovery.pages.iter().map(|page| page.slot.offset).collect();
    assert!(places.is_sorted());
    let hashes: Vec<PageHash> = again.recovery.pages.iter().map(|page| page.image.hash).collect();
    let mut expected: Vec<PageHash> = whole.iter().map(|page| page.image.hash).collect();
    // Those below the hole too: what hangs on nothing is for `core` to drop.
    expected.extend([20, 22, 23].map(hash));
    assert_eq!(hashes.len(), expected.len());
    assert!(expected.iter().all(|hash| hashes.contains(hash)));
}

#[test]
fn a_write_into_a_region_that_was_never_recorded_is_refused() {
    let folder = folder();
    let path = folder.path().join("tier");
    let config = config(&path, 200 * MIB, EngineChoice::Auto);
    let mut bench = Bench::open(&config);
    let recorded = bench.slot(64 * KIB);
    let geometry = bench.geometry();
    for slot in [
        Slot { offset: geometry.region_offset(1), ..recorded },
        Slot { offset: recorded.offset + 4096, ..recorded },
        Slot { offset: geometry.capacity_bytes, ..recorded },
        Slot { offset: 0, ..recorded },
    ] {
        let (ticket, _) = bench.write_at(slot, hash(1), 64 * KIB);
        let fault = Some(IoFault::Errno(22));
        assert_eq!(bench.fault_of(ticket), fault);
    }
    bench.tier.stop(Duration::from_secs(30));
    assert_eq!(check(&path).valid, 0);
}

#[test]
fn a_file_grows_keeps_its_pages_and_never_shrinks() {
    let folder = folder();
    let path = folder.path().join("tier");
    let mut bench = Bench::open(&config(&path, 100 * MIB, EngineChoice::Auto));
    let page = bench.write(hash(1), 2048 * KIB);
    drop(bench.tier);
    match Bench::try_open(&config(&path, 90 * MIB, EngineChoice::Auto)) {
        Err(SsdError::Shrink { have, want, .. }) => {
            assert_eq!((have, want), (100 * MIB, 90 * MIB));
        }
        other => panic!("{:?}", other.err()),
    }
    let mut grown = Bench::open(&config(&path, 300 * MIB, EngineChoice::Auto));
    assert_eq!(path.metadata().unwrap().len(), 300 * MIB);
    assert_eq!(grown.recovery.pages, [page]);
    assert_eq!(grown.read(&page), None);
    let geometry = grown.geometry();
    assert_eq!(geometry.regions(), 5);
    // The new end of the file is usable.
    grown.next_region = geometry.regions() - 1;
    let last = grown.write(hash(2), 1024 * KIB);
    drop(grown.tier);
    let again = Bench::open(&config(&path, 300 * MIB, EngineChoice::Auto));
    assert_eq!(again.recovery.pages, [page, last]);
    assert!(matches!(
        Bench::try_open(&config(&path, 1 << 60, EngineChoice::Auto)).map(drop),
        Err(SsdError::Locked { .. })
    ));
    drop(again.tier);
    assert!(matches!(
        Bench::try_open(&config(&path, 1 << 60, EngineChoice::Auto)).map(drop),
        Err(SsdError::GrowLimit { .. })
    ));
}

#[test]
fn files_of_others_are_refused_and_not_touched() {
    let folder = folder();
    let path = folder.path().join("theirs");
    let contents: Vec<u8> = (0..3_000_000_u32).map(|i| (i % 251) as u8).collect();
    for contents in [&contents[..], &contents[..100], &[0; 2 << 20]] {
        std::fs::write(&path, contents).unwrap();
        let error = Bench::try_open(&config(&path, 100 * MIB, EngineChoice::Auto)).err().unwrap();
        assert!(matches!(error, SsdError::NotOurs { .. }), "{error}");
        assert!(error.is_not_ours() && error.to_string().contains("theirs"));
        assert!(std::fs::read(&path).unwrap() == contents, "not a byte has changed");
        let error = look_at(std::slice::from_ref(&path)).unwrap_err();
        assert!(error.is_not_ours(), "{error}");
    }
}

#[test]
fn a_damaged_or_foreign_version_of_ours_is_told_apart() {
    let folder = folder();
    let path = folder.path().join("tier");
    let config = config(&path, 100 * MIB, EngineChoice::Auto);
    drop(Bench::open(&config).tier);
    flip(&path, 60);
    drop(Bench::open(&config).tier);
    flip(&path, 4096 + 60);
    let error = Bench::try_open(&config).err().unwrap();
    assert!(matches!(error, SsdError::Damaged { .. }), "{error}");
}

#[test]
fn a_start_that_was_cut_off_is_taken_up_again() {
    let folder = folder();
    let path = folder.path().join("tier");
    let config = config(&path, 100 * MIB, EngineChoice::Auto);
    for length in [0, 4096, 12_288] {
        File::create(&path).unwrap().set_len(length).unwrap();
        let mut bench = Bench::open(&config);
        bench.write(hash(1), 64 * KIB);
        drop(bench.tier);
        assert_eq!(path.metadata().unwrap().len(), 100 * MIB);
        std::fs::remove_file(&path).unwrap();
    }
}

#[test]
fn a_failing_start_leaves_no_file_behind() {
    let folder = folder();
    let path = folder.path().join("tier");
    let too_small = Bench::try_open(&config(&path, MIB, EngineChoice::Auto)).err().unwrap();
    assert!(matches!(too_small, SsdError::Capacity { .. }), "{too_small}");
    assert!(!path.exists());
    let below_nothing = folder.path().join("missing").join("tier");
    let error = Bench::try_open(&config(&below_nothing, 100 * MIB, EngineChoice::Auto));
    assert!(matches!(error.map(drop), Err(SsdError::FolderMissing { .. })));
    let too_large = Bench::try_open(&config(&path, 32 << 40, EngineChoice::Auto)).err().unwrap();
    match too_large {
        SsdError::NoSpace { needed, free, .. } => assert!(0 < free && free < needed),
        other => panic!("{other}"),
    }
    assert!(!path.exists());
}

#[test]
fn one_file_has_one_holder_whatever_it_is_called() {
    let folder = folder();
    let path = folder.path().join("tier");
    let bench = Bench::open(&config(&path, 100 * MIB, EngineChoice::Auto));
    let link = folder.path().join("symbolic");
    std::os::unix::fs::symlink(&path, &link).unwrap();
    let hard = folder.path().join("hard");
    std::fs::hard_link(&path, &hard).unwrap();
    for alias in [&path, &link, &hard] {
        let error = Bench::try_open(&config(alias, 100 * MIB, EngineChoice::Auto)).err().unwrap();
        assert!(matches!(error, SsdError::Locked { .. }), "{error}");
        let error = look_at(std::slice::from_ref(alias)).unwrap_err();
        assert!(matches!(error, SsdError::Locked { .. }) && !error.is_not_ours(), "{error}");
    }
    drop(bench.tier);
    drop(Bench::open(&config(&link, 100 * MIB, EngineChoice::Auto)).tier);
}

#[test]
fn several_files_share_the_capacity_and_a_forget() {
    let folder = folder();
    let paths: Vec<PathBuf> = ["a", "b"].iter().map(|name| folder.path().join(name)).collect();
    let config =
        SsdConfig { paths: paths.clone(), ..config(&paths[0], 200 * MIB, EngineChoice::Auto) };
    let mut bench = Bench::open(&config);
    assert_eq!(paths[1].metadata().unwrap().len(), 100 * MIB);
    let slot = bench.slot(64 * KIB);
    bench.tier.record_region(1, 0, slot.bytes).unwrap();
    for device in 0..2 {
        let slot = Slot { device, ..slot };
        let (ticket, _) = bench.write_at(slot, hash(device.into()), 64 * KIB);
        assert_eq!(bench.fault_of(ticket), None);
    }
    drop(bench.tier);
    let mut again = Bench::open(&config);
    assert_eq!(again.recovery.pages.len(), 2);
    for page in again.recovery.pages.clone() {
        assert_eq!(again.read(&page), None);
    }
    let mark = again.generation + 1;
    again.forget(NAMESPACE, mark);
    drop(again.tier);
    for path in &paths {
        assert_eq!(check(path).stale, 1, "{}", path.display());
    }
    let twice = SsdConfig { paths: vec![paths[0].clone(), paths[0].clone()], ..config };
    assert!(matches!(Bench::try_open(&twice).map(drop), Err(SsdError::SameFile { .. })));
}

/// Goal: a generation is given out once, whichever files can be searched. Method: one file is lost
/// in one life, the other, which then took a write, in the next.
#[test]
fn generations_go_on_above_those_of_a_life_that_had_lost_a_file() {
    let folder = folder();
    let paths = vec![folder.path().join("a"), folder.path().join("b")];
    let config = SsdConfig {
        paths: paths.clone(),
        capacity_bytes: 400 * MIB,
        ..config(&paths[0], 0, EngineChoice::Auto)
    };
    let mut bench = Bench::open(&config);
    let (slot_bytes, geometry) =
        (RegionGeometry::slot_bytes_for(64 * KIB).unwrap(), bench.geometry());
    let slot = |device, index| Slot {
        device,
        offset: geometry.slot_offset(0, slot_bytes, index),
        bytes: slot_bytes,
    };
    for device in 0..2 {
        bench.tier.record_region(device, 0, slot_bytes).unwrap();
        let (ticket, _) = bench.write_at(slot(device, 0), hash(device.into()), 64 * KIB);
        assert_eq!(bench.fault_of(ticket), None);
    }
    let mut given = bench.generation;
    drop(bench.tier);
    // In the last life both can be searched again.
    for (lost, takes) in [(Some(1), 0), (Some(0), 1), (None, 0)] {
        let claimed = ClaimedTier::claim(&config).unwrap();
        let file = lost.map(|lost: usize| {
            let file = OpenOptions::new().write(true).open(&paths[lost]).unwrap();
            let length = file.metadata().unwrap().len();
            file.set_len(geometry.data_offset).unwrap();
            (file, length)
        });
        let mut bench = Bench::start(claimed).unwrap();
        assert_eq!(bench.recovery.ends.iter().position(|end| *end == ScanState::Failed), lost);
        let base = bench.recovery.highest_generation;
        assert!(base >= given, "{base} after {given}");
        let (ticket, image) = bench.write_at(slot(takes, 1), hash(7), 64 * KIB);
        assert_eq!(bench.fault_of(ticket), None);
        given = image.generation;
        drop(bench.tier);
        if let Some((file, length)) = file {
            file.set_len(length).unwrap();
        }
    }
}

#[test]
fn a_stop_does_what_was_ordered_and_a_stop_without_time_ends_it_all_the_same() {
    for engine in engines() {
        let folder = folder();
        let path = folder.path().join("tier");
        let config = config(&path, 300 * MIB, engine);
        let mut bench = Bench::open(&config);
        for number in 0..40 {
            let slot = bench.slot(1024 * KIB);
            bench.write_at(slot, hash(number), 1024 * KIB);
        }
        let ends = bench.tier.stop(Duration::from_secs(60));
        assert_eq!(ends.len(), 40);
        assert!(ends.iter().all(|end| matches!(end, SsdEnd::Write { fault: None, .. })));

        let mut again = Bench::open(&config);
        assert_eq!(again.recovery.pages.len(), 40);
        let pages = again.recovery.pages.clone();
        for page in &pages {
            again.order_read(page);
        }
        let ends = again.tier.stop(Duration::ZERO);
        assert_eq!(ends.len(), 40, "every order ends");
        for end in ends {
            let SsdEnd::Read { fault, .. } = end else { panic!("{end:?}") };
            assert!(fault.is_none() || fault == Some(IoFault::Off), "{fault:?}");
        }
    }
}

#[test]
fn a_device_that_fails_is_left_alone_and_comes_back() {
    let folder = folder();
    let path = folder.path().join("tier");
    let mut bench = Bench::open(&config(&path, 200 * MIB, EngineChoice::Auto));
    let page = bench.write(hash(1), 64 * KIB);
    let length = path.metadata().unwrap().len();
    let file = OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(page.slot.offset).unwrap();
    let mut failures = 0;
    loop {
        match bench.read(&page) {
            Some(IoFault::Short) => failures += 1,
            Some(IoFault::Off) => break,
            other => panic!("nothing is there: {other:?}"),
        }
    }
    assert!(failures >= 8, "{failures} failures are no reason");
    let counters = bench.tier.status().next().unwrap().counters;
    assert_eq!(counters.read_faults[IoFault::Short.index()], failures);
    assert_eq!((counters.read_faults[IoFault::Off.index()], counters.reading), (1, 0));
    assert_eq!(bench.tier.status().next().unwrap().health, Health::Off);
    // It heals. Zeros are there now, not the page, which is no fault of the device.
    file.set_len(length).unwrap();
    let healed = loop {
        // As the reactor does, which also takes the end of a probe by that.
        bench.tier.tend();
        assert_eq!(bench.tier.poll(), None);
        match bench.read(&page) {
            Some(IoFault::Off) => std::thread::sleep(Duration::from_millis(50)),
            other => break other,
        }
    };
    assert_eq!(healed, Some(IoFault::Checksum));
    assert_eq!(bench.tier.status().next().unwrap().health, Health::Healthy);
}

#[test]
fn a_full_queue_says_so_and_what_it_took_still_ends() {
    fn is_send<T: Send>(_: &T) {}
    let folder = folder();
    let path = folder.path().join("tier");
    let mut bench = Bench::open(&config(&path, 100 * MIB, EngineChoice::Auto));
    is_send(&bench.tier);
    let page = bench.write(hash(1), 4 * KIB);
    let extent = bench.extent(4 * KIB);
    let mut taken = 0_u64;
    // Unpolled ends count as out, so that they can never be lost.
    let refused = loop {
        let order = ReadOrder {
            ticket: Ticket(1000 + taken),
            slot: page.slot,
            extent,
            image_bytes: 4 * KIB,
            checksum: page.image.checksum.unwrap(),
        };
        match bench.tier.submit_read(order) {
            Ok(()) => taken += 1,
            Err(full) => break full,
        }
        assert!(taken < 1_000_000, "the queue has no end");
    };
    assert_eq!(refused, orbitkv_manager::ssd::QueueFull);
    for _ in 0..taken {
        let SsdEnd::Read { fault, .. } = bench.end() else { panic!() };
        assert_eq!(fault, None);
    }
    assert_eq!(bench.tier.poll(), None);
    assert_eq!(bench.read(&page), None, "there is room again");
}

#[test]
fn the_engine_that_runs_is_reported() {
    let folder = folder();
    let path = folder.path().join("tier");
    let bench = Bench::open(&config(&path, 100 * MIB, EngineChoice::Blocking));
    let device = &bench.recovery.devices[0];
    assert_eq!(device.read_mode.kind, EngineKind::Blocking(8));
    assert_eq!((device.read_mode.label(), device.direct), ("blocking", true));
    drop(bench.tier);
    let buffered = SsdConfig { direct: false, ..config(&path, 100 * MIB, EngineChoice::Auto) };
    let mut bench = Bench::open(&buffered);
    assert!(!bench.recovery.devices[0].direct);
    let page = bench.write(hash(1), 9 * 1024 * KIB);
    assert_eq!(bench.read(&page), None);
}

/// Goal: a tier of 100,000 slots is found by its footers alone. Method: every region has its slot
/// length, a few slots have a page; the rest was never written. Prints how long it takes.
#[test]
#[ignore = "reserves 4 GiB of disk: for measurements"]
fn a_hundred_thousand_slots_are_found_by_their_footers() {
    const IMAGE: u32 = 32 * KIB;
    let folder = folder();
    let path = folder.path().join("tier");
    for engine in engines() {
        let config = config(&path, 4096 * MIB, engine);
        let mut bench = Bench::open(&config);
        let bytes = RegionGeometry::slot_bytes_for(IMAGE).unwrap();
        let pages: Vec<RecoveredPage> =
            (0..100).map(|number| bench.write(hash(number), IMAGE)).collect();
        for region in 0..bench.geometry().regions() {
            bench.tier.record_region(0, region, bytes).unwrap();
        }
        bench.tier.stop(Duration::from_secs(30));
        let started = Instant::now();
        let again = Bench::open(&config);
        let opened = started.elapsed();
        let scan = again.tier.scans().next().unwrap();
        assert!(scan.slots >= 100_000 && scan.scanned == scan.slots, "{scan:?}");
        assert_eq!(scan.read_bytes, scan.slots * 4096, "footers and nothing else");
        assert_eq!(again.recovery.pages.len(), pages.len());
        let mode = again.recovery.devices[0].read_mode;
        println!("{} slots, {} bytes, {mode}: {opened:?}", scan.slots, scan.read_bytes);
        std::fs::remove_file(&path).unwrap();
    }
}
