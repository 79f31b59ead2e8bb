use std::sync::Arc;
use std::time::{Duration, Instant};

use orbitkv_shm_protocol::ids::PageHash;

use super::*;
use crate::core::limits::{READS_IN_FLIGHT_MAX, WRITES_IN_FLIGHT_MAX};
use crate::core::{Extent, ImageIdentity, RegionGeometry, Slot, Ticket};
use crate::pool::{DramPool, HugePages, PoolConfig};
use crate::ssd::{EngineChoice, QUEUE_ORDERS, SsdConfig};

const MIB: u64 = 1 << 20;
/// Waits are for things that come; a hang is a failure of the test, after this.
const PATIENCE: Duration = Duration::from_secs(120);

/// Two devices whose queues nobody empties until they are polled.
struct Bench {
    storage: Storage,
    geometry: RegionGeometry,
    extent: Extent,
    _folder: tempfile::TempDir,
}

impl Bench {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let config = PoolConfig { bytes: 2 * MIB, huge_pages: HugePages::Off, prefault_threads: 1 };
        let pool = Arc::new(DramPool::allocate(config).unwrap());
        let config = SsdConfig {
            paths: vec![folder.path().join("a"), folder.path().join("b")],
            capacity_bytes: 128 * MIB,
            direct: true,
            engine: EngineChoice::Auto,
            write_in_flight_bytes: 2 * MIB,
            read_join_bytes: 1 << 20,
            slot_bytes_max: 0,
        };
        let (tier, devices) = SsdTier::open(&config, &[], pool, Arc::new(|| {})).unwrap();
        let geometry = devices[0].geometry;
        let storage = Storage::new(tier, devices);
        let extent = Extent { arena: 0, offset: 0, bytes: 4096 };
        let mut bench = Self { storage, geometry, extent, _folder: folder };
        for device in 0..2 {
            let slot_bytes = bench.slot(device, 0).bytes;
            bench.storage.order(Effect::RecordRegion { device, region: 0, slot_bytes });
        }
        bench
    }

    fn slot(&self, device: u16, index: u32) -> Slot {
        let bytes = RegionGeometry::slot_bytes_for(4096).unwrap();
        Slot { device, offset: self.geometry.slot_offset(0, bytes, index), bytes }
    }

    fn read(&mut self, ticket: u64, device: u16) {
        let slot = self.slot(device, 0);
        let (extent, ticket) = (self.extent, Ticket(ticket));
        self.storage.order(Effect::Read { ticket, slot, extent, image_bytes: 4096, checksum: 0 });
    }

    fn write(&mut self, ticket: u64, device: u16) {
        let slot = self.slot(device, (ticket % 1000) as u32);
        let image = ImageIdentity {
            namespace: [3; 32],
            hash: PageHash([1; 32]),
            parent: None,
            image_bytes: 4096,
            generation: ticket + 1,
            checksum: Some(0),
        };
        let (extent, ticket) = (self.extent, Ticket(ticket));
        self.storage.order(Effect::Write { ticket, extent, slot, image });
    }

    /// Polls until `count` orders have ended; returns their tickets, sorted.
    fn ends(&mut self, count: usize) -> Vec<u64> {
        let begin = Instant::now();
        let mut tickets = Vec::new();
        while tickets.len() < count {
            match self.storage.poll() {
                Some(Event::ReadEnded { ticket, .. } | Event::WriteEnded { ticket, .. }) => {
                    tickets.push(ticket.0);
                }
                Some(other) => panic!("{other:?}"),
                None => {
                    self.storage.retry_refused();
                    assert!(begin.elapsed() < PATIENCE, "{} of {count} ended", tickets.len());
                    std::thread::yield_now();
                }
            }
        }
        tickets.sort_unstable();
        tickets
    }
}

/// The queue of one device and kind holds up nothing but what is of the same kind there.
#[test]
fn a_full_queue_holds_up_its_own_kind_and_device_only() {
    let mut bench = Bench::new();
    let reads = QUEUE_ORDERS as u64 + 5;
    for ticket in 0..reads {
        bench.read(ticket, 0);
    }
    let waiting = |bench: &Bench| bench.storage.refused.iter().map(VecDeque::len).sum::<usize>();
    assert_eq!(waiting(&bench), 5);
    bench.read(reads, 1);
    bench.write(reads + 1, 0);
    bench.write(reads + 2, 1);
    assert_eq!(waiting(&bench), 5, "nothing else waits");
    assert_eq!(bench.storage.write_queue_full(), 0, "reads are not writes");
    assert_eq!(bench.ends(reads as usize + 3), (0..reads + 3).collect::<Vec<_>>());
    assert_eq!(waiting(&bench), 0);
}

#[test]
fn each_write_that_finds_its_queue_full_is_counted_once_and_ends_all_the_same() {
    let mut bench = Bench::new();
    let writes = QUEUE_ORDERS as u64 + 7;
    for ticket in 0..writes {
        bench.write(ticket, 0);
    }
    assert_eq!(bench.storage.write_queue_full(), 7);
    assert!(!bench.storage.retry_refused(), "no room: nothing was polled");
    assert_eq!(bench.ends(writes as usize), (0..writes).collect::<Vec<_>>());
    assert_eq!(bench.storage.write_queue_full(), 7, "waiting longer is not another refusal");
}

/// Why `orbitkv_ssd_write_queue_full_total` is 0 in normal work: `core` never lets out as many.
#[test]
fn a_queue_holds_more_than_core_ever_has_out() {
    assert!(WRITES_IN_FLIGHT_MAX as usize * 2 <= QUEUE_ORDERS);
    assert!(READS_IN_FLIGHT_MAX as usize * 2 <= QUEUE_ORDERS);
    let mut bench = Bench::new();
    for ticket in 0..u64::from(WRITES_IN_FLIGHT_MAX) {
        bench.write(ticket, 0);
    }
    assert_eq!(bench.storage.write_queue_full(), 0);
    bench.ends(WRITES_IN_FLIGHT_MAX as usize);
}

#[test]
fn the_rest_of_a_search_takes_what_its_begin_says() {
    assert_eq!(time_left(1_000, 25, 100), Some(3_000));
    assert_eq!(time_left(1_000, 100, 100), Some(0));
    assert_eq!(time_left(1_000, 0, 0), Some(0), "nothing to search");
    assert_eq!(time_left(1_000, 0, 100), None, "nobody knows yet");
    assert_eq!(time_left(u64::MAX, 1, u64::MAX), Some(u64::MAX));
}
