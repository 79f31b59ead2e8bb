//! Goal: a save stores what it can, names what it cannot, and never makes a half-copied page
//! findable. Method: full pools, duplicate and concurrent saves, faults and deaths in mid-copy.

use orbitkv_manager::core::{CopyFault, CoreConfig, Direction, IoFault};
use orbitkv_shm_protocol::bootstrap::message::{DependencySpec, NamespaceSpec};
use orbitkv_shm_protocol::record::{Code, PageEntry, PageOutcome, RequestBody, Status, flags};
use orbitkv_tests::rig::{MILLISECOND, PAGE, Rig, Seat, generous};
use orbitkv_tests::world::{
    Fate, Work, chain, extend, is_copy, is_read, is_write, pages, pages_after, spec,
};

const STORED: (PageOutcome, Code) = (PageOutcome::Stored, Code::None);
const PRESENT: (PageOutcome, Code) = (PageOutcome::Present, Code::None);

fn refused(code: Code) -> (PageOutcome, Code) {
    (PageOutcome::Refused, code)
}

fn root(mut entries: Vec<PageEntry>) -> Vec<PageEntry> {
    entries[0].flags = flags::ENTRY_ROOT;
    entries
}

/// One page a copy command, so that a save can be caught between two.
fn page_by_page(pool: u64) -> Rig {
    let config = CoreConfig { copy_quantum_bytes: PAGE, ..generous(pool * PAGE) };
    Rig::new(config, &[], spec("model", PAGE))
}

/// A device then moves them by few orders, on a GPU as many as one command takes.
#[test]
fn pages_of_a_save_lie_in_its_order_and_one_command_of_a_gpu_takes_them() {
    let large = 4 << 20;
    let mut rig = Rig::new(generous(16 * large), &[], spec("model", large));
    let Seat { session, scope, .. } = rig.seat;
    let on_gpu = rig.world.fenced_region(session, scope, 8);
    let event = rig.world.events(session, 1);
    for (branch, len, on_host) in [(1, 3, true), (2, 8, false)] {
        let (region, fence) = match on_host {
            true => (rig.seat.region, None),
            false => (on_gpu, Some(event)),
        };
        let entries = pages(&chain(branch, len));
        let save = rig.world.save_after(session, region, &entries, 0, fence);
        let mut offsets = vec![];
        let mut commands = 0;
        for work in &rig.world.work {
            let Work::Copy { pages, .. } = work else { continue };
            commands += 1;
            offsets.extend(pages.iter().map(|page| page.extent.offset));
        }
        let step = |pair: &[u64]| pair[1] == pair[0] + large;
        assert!(offsets.windows(2).all(step), "{offsets:?}");
        // The host's go out one by one, two at a time.
        assert_eq!(commands, if on_host { 2 } else { 1 });
        if let Some(event) = fence {
            rig.world.pass(session, event);
        }
        rig.world.settle();
        assert_eq!(rig.world.ended(session, save).completion.pages, len as u32);
    }
}

#[test]
fn a_save_without_memory_refuses_the_rest_of_that_chain_only() {
    let mut rig = Rig::dram(8);
    let held = chain(1, 5);
    rig.stored(&held);
    rig.lease(&held);
    // Three pages of memory; the long chain gets them all, a page of the held chain is present.
    let long = chain(2, 5);
    let mut entries = pages(&long);
    entries.extend(root(pages(&held[..2])));
    let Seat { session, region, .. } = rig.seat;
    let save = rig.world.save(session, region, &entries);
    rig.world.settle();
    let ended = rig.world.ended(session, save);
    let expected = [
        STORED,
        STORED,
        STORED,
        refused(Code::NoMemory),
        refused(Code::ParentAbsent),
        PRESENT,
        PRESENT,
    ];
    assert_eq!(ended.outcomes(), expected);
    assert_eq!((ended.completion.status, ended.completion.code), (Status::Partial, Code::NoMemory));
    let refusals = &rig.world.core.stats().pages_refused;
    assert_eq!(refusals[Code::NoMemory as usize], 1);
    assert_eq!(refusals[Code::ParentAbsent as usize], 1);
}

#[test]
fn other_chains_of_the_same_save_still_try() {
    let mut rig = Rig::dram(8);
    let held = chain(1, 8);
    rig.stored(&held);
    let lease = rig.lease(&held);
    // Nothing is free: both chains are refused at their own first page.
    let mut entries = pages(&chain(2, 2));
    entries.extend(root(pages(&chain(3, 2))));
    let Seat { session, region, .. } = rig.seat;
    let save = rig.world.save(session, region, &entries);
    let outcomes = rig.world.ended(session, save).outcomes();
    let (first, then) = (refused(Code::NoMemory), refused(Code::ParentAbsent));
    assert_eq!(outcomes, [first, then, first, then]);
    rig.release(rig.seat, lease);
    let save = rig.world.save(session, region, &entries);
    rig.world.settle();
    assert_eq!(rig.world.ended(session, save).outcomes(), [STORED; 4]);
}

#[test]
fn a_save_never_evicts_its_own_ancestors() {
    let mut rig = Rig::dram(8);
    let trunk = chain(1, 6);
    rig.stored(&trunk);
    rig.stored(&chain(2, 2));
    // The branch needs four pages; two are the other chain's, the rest would be the trunk's.
    let branch = extend(Some(trunk[5]), 7, 4);
    let Seat { session, region, .. } = rig.seat;
    let save = rig.world.save(session, region, &pages_after(trunk[5], &branch));
    rig.world.settle();
    let no_more = [refused(Code::NoMemory), refused(Code::ParentAbsent)];
    let ended = rig.world.ended(session, save);
    assert_eq!(ended.outcomes(), [&[STORED, STORED][..], &no_more].concat());
    let whole: Vec<_> = trunk.iter().chain(&branch[..2]).copied().collect();
    assert_eq!(rig.hits(&whole), 8);
}

#[test]
fn a_branch_without_its_parent_is_refused() {
    let mut rig = Rig::dram(8);
    let trunk = chain(1, 2);
    let Seat { session, region, .. } = rig.seat;
    let branch = extend(Some(trunk[1]), 7, 2);
    let mut entries = pages_after(trunk[1], &branch);
    entries.extend(root(pages(&chain(2, 1))));
    let save = rig.world.save(session, region, &entries);
    rig.world.settle();
    let absent = refused(Code::ParentAbsent);
    assert_eq!(rig.world.ended(session, save).outcomes(), [absent, absent, STORED]);
}

#[test]
fn a_page_twice_in_one_save_is_stored_once() {
    let mut rig = Rig::dram(8);
    let page = chain(1, 1)[0];
    let Seat { session, region, .. } = rig.seat;
    let entries = [pages(&[page]), root(pages(&[page])), root(pages(&[page]))].concat();
    let save = rig.world.save(session, region, &entries);
    rig.world.settle();
    assert_eq!(rig.world.ended(session, save).outcomes(), [STORED, PRESENT, PRESENT]);
    assert_eq!(rig.resident(), 1);
    assert_eq!(rig.world.core.gauges().pool_used_bytes, PAGE);
}

#[test]
fn two_saves_of_one_key_store_it_once() {
    for first in [0, 1] {
        let mut rig = Rig::dram(8);
        let other = rig.sit(2);
        let chain = chain(1, 2);
        let one = rig.world.save(rig.seat.session, rig.seat.region, &pages(&chain));
        rig.world.version = 1;
        let two = rig.world.save(other.session, other.region, &pages(&chain));
        assert_eq!(rig.world.work.len(), 2, "both copy: neither is findable yet");
        assert_eq!(rig.world.core.page_views().count(), 0);
        rig.world.finish(first, Fate::Good);
        rig.world.settle();
        let one = rig.world.ended(rig.seat.session, one).outcomes();
        let two = rig.world.ended(other.session, two).outcomes();
        let expected = if first == 0 { (STORED, PRESENT) } else { (PRESENT, STORED) };
        assert_eq!((one, two), (vec![expected.0; 2], vec![expected.1; 2]));
        assert_eq!(rig.world.core.gauges().pool_used_bytes, 2 * PAGE);
        rig.world.check_bytes();
    }
}

/// ENG-17 and ENG-13: nothing, too much, and whole pages only.
#[test]
fn the_edges_of_a_range_are_answered() {
    let mut rig = Rig::dram(8);
    let Seat { scope, region, .. } = rig.seat;
    // A session with few credits has a large share of the table for each.
    let session = rig.world.attach_with(1, 2, 65_536);
    let scope_of = rig.world.namespace(session, &spec("model", PAGE));
    let region_of = rig.world.region(session, scope_of, 20_000);
    assert_eq!((scope_of, region_of), (scope, region));
    let empty = rig.world.save(session, region, &[]);
    assert_eq!(rig.world.ended(session, empty).completion.status, Status::Ok);
    let mode = orbitkv_shm_protocol::record::QueryMode::Demand;
    let empty = rig.world.query(session, scope, mode, &[]);
    let ended = rig.world.ended(session, empty).completion;
    assert_eq!((ended.status, ended.pages, ended.lease), (Status::Ok, 0, None));
    let empty = rig.world.request(session, RequestBody::Prepare { scope }, &[], 0);
    assert_eq!(rig.world.ended(session, empty).completion.status, Status::Ok);
    let most = chain(1, 16_384);
    let save = rig.world.save(session, region, &pages(&most));
    rig.world.settle();
    let ended = rig.world.ended(session, save).completion;
    assert_eq!((ended.pages, ended.pages_refused), (8, 16_384 - 8));
    assert_eq!(rig.world.core.stats().bad_requests, 0);
}

#[test]
fn what_was_copied_before_a_fault_is_kept_and_what_hangs_on_the_fault_is_not() {
    let mut rig = page_by_page(16);
    let chain = chain(1, 5);
    let Seat { session, region, .. } = rig.seat;
    let save = rig.world.save(session, region, &pages(&chain));
    rig.world.finish(0, Fate::Good);
    // The next two are in flight side by side; the first of them fails, the second ends well.
    assert_eq!(rig.in_flight(is_copy(Direction::Save)), 2);
    rig.world.finish(0, Fate::Copy(CopyFault::Device, 0));
    rig.world.settle();
    let ended = rig.world.ended(session, save);
    let device = refused(Code::DeviceError);
    let absent = refused(Code::ParentAbsent);
    assert_eq!(ended.outcomes(), [STORED, device, absent, device, device]);
    assert_eq!(ended.completion.status, Status::Partial);
    assert_eq!(rig.hits(&chain), 1);
    assert_eq!(rig.world.core.gauges().pool_used_bytes, PAGE);
}

/// COR-03: an engine that cancels gets its pages back only when nothing reads them any more.
#[test]
fn a_cancelled_save_ends_after_its_copies_and_stores_old_bytes_only() {
    for finished in 0..5 {
        let mut rig = page_by_page(16);
        let chain = chain(1, 5);
        let Seat { session, region, .. } = rig.seat;
        let save = rig.world.save(session, region, &pages(&chain));
        for _ in 0..finished {
            rig.world.finish(0, Fate::Good);
        }
        let cancel = rig.cancel(rig.seat, save);
        while !rig.world.work.is_empty() {
            assert!(rig.world.take_ended(session, save).is_none(), "a copy still reads its pages");
            assert!(rig.world.take_ended(session, cancel).is_none());
            rig.world.finish(0, Fate::Good);
        }
        let stored = rig.world.ended(session, save).completion.pages;
        assert_eq!(rig.world.ended(session, cancel).completion.status, Status::Ok);
        assert!(stored >= finished && stored <= finished + 2);
        // The device pages hold poison since the save ended: what is found has the old bytes.
        rig.world.check_bytes();
        assert_eq!(rig.hits(&chain), stored);
        rig.assert_at_rest();
    }
}

#[test]
fn a_save_that_passes_its_deadline_keeps_what_it_has() {
    let mut rig = page_by_page(16);
    let chain = chain(1, 5);
    let Seat { session, region, .. } = rig.seat;
    let save = rig.world.save_by(session, region, &pages(&chain), 2);
    rig.world.finish(0, Fate::Good);
    rig.world.advance(2 * MILLISECOND);
    rig.world.settle();
    let ended = rig.world.ended(session, save).completion;
    assert_eq!((ended.status, ended.code), (Status::Partial, Code::Deadline));
    assert!((1..5).contains(&ended.pages));
    assert_eq!(ended.pages + ended.pages_refused, 5);
}

/// LEAK-09: the pages of an engine that was killed in mid-save can be saved by another.
#[test]
fn a_killed_engine_leaves_no_page_behind_and_no_key_taken() {
    let mut rig = page_by_page(16);
    let chain = chain(1, 4);
    let other = rig.sit(2);
    rig.world.save(rig.seat.session, rig.seat.region, &pages(&chain));
    rig.world.close(rig.seat.session);
    let save = rig.world.save(other.session, other.region, &pages(&chain));
    let query = rig.query(other, &chain);
    assert_eq!(rig.world.ended(other.session, query).completion.pages, 0, "nothing is whole yet");
    rig.world.settle();
    let ended = rig.world.ended(other.session, save).completion;
    assert_eq!((ended.status, ended.pages), (Status::Ok, 4));
    rig.world.check_bytes();
    rig.assert_at_rest();
    assert_eq!(rig.world.core.gauges().pool_used_bytes, 4 * PAGE);
}

/// RES-09: a pool that is leased in full refuses page by page, and is whole again afterwards.
#[test]
fn a_pool_that_is_leased_in_full_refuses_until_it_is_let_go() {
    let mut rig = Rig::ssd(16, 64);
    let cold = chain(9, 10);
    rig.stored_on_ssd_only(&cold);
    let held = chain(1, 16);
    rig.stored(&held);
    let lease = rig.lease(&held);
    rig.world.settle();
    for round in 0..10 {
        let ended = rig.save(&chain(100 + round, 16)).completion;
        assert_eq!((ended.status, ended.code), (Status::Error, Code::NoMemory));
        assert_eq!(ended.pages_refused, 16);
    }
    rig.release(rig.seat, lease);
    rig.stored(&chain(50, 16));
    rig.world.settle();
    assert_eq!(rig.hits(&cold), 10);
}

/// The four pages are siblings: each stands alone.
#[test]
fn a_leased_page_retains_nothing_else() {
    let mut rig = Rig::dram(16);
    let four: Vec<_> = (0..4).map(|at| chain(at, 1)[0]).collect();
    for &page in &four {
        rig.stored(&[page]);
    }
    let lease = rig.lease(&four[1..2]);
    rig.world.evict_dram();
    let gauges = rig.world.core.gauges();
    assert_eq!((gauges.pool_used_bytes, gauges.pool_pinned_bytes), (PAGE, PAGE));
    rig.release(rig.seat, lease);
    rig.world.evict_dram();
    assert_eq!(rig.world.core.gauges().pool_used_bytes, 0);
}

#[test]
fn a_leased_page_of_a_chain_on_ssd_retains_nothing_else() {
    let mut rig = Rig::ssd(16, 16);
    let chain = chain(1, 4);
    rig.stored(&chain);
    rig.world.settle();
    let Seat { session, scope, .. } = rig.seat;
    let mode = orbitkv_shm_protocol::record::QueryMode::Demand;
    let query = rig.world.query(session, scope, mode, &pages_after(chain[1], &chain[2..3]));
    let lease = rig.world.ended(session, query).completion.lease.expect("a lease");
    rig.world.evict_dram();
    assert_eq!(rig.world.core.gauges().pool_used_bytes, PAGE);
    rig.release(rig.seat, lease);
    rig.world.evict_dram();
    assert_eq!(rig.world.core.gauges().pool_used_bytes, 0);
    assert_eq!(rig.hits(&chain), 4);
}

/// RES-11 a, b: what can never fit is refused when it is named.
#[test]
fn pages_that_no_tier_can_hold_are_refused_at_definition() {
    let devices = [orbitkv_tests::world::device(1, 1 << 20)];
    let mut rig = Rig::new(generous(4 << 20), &devices, spec("model", PAGE));
    let core = &mut rig.world.core;
    for bytes in [(1 << 20) - PAGE + 1, 4 << 20, (4 << 20) + 1, 65 << 20, 0, PAGE - 1] {
        let refusal = core.define_namespace(rig.seat.session, &spec("large", bytes));
        assert!(refusal.is_err(), "{bytes}: {refusal:?}");
    }
    let largest = core.define_namespace(rig.seat.session, &spec("large", (1 << 20) - PAGE));
    assert!(largest.is_ok(), "{largest:?}");
}

#[test]
fn small_and_large_pages_share_a_pool_to_the_last_byte() {
    let config = generous(32 << 20);
    let mut rig = Rig::new(config, &[], spec("small", PAGE));
    let Seat { session, .. } = rig.seat;
    let large = rig.world.namespace(session, &spec("large", 9 << 20));
    let region = rig.world.region(session, large, 8);
    for branch in 0..64 {
        rig.stored(&chain(branch, 100));
    }
    for branch in 0..6 {
        let save = rig.world.save(session, region, &pages(&chain(1000 + branch, 1)));
        rig.world.settle();
        assert_eq!(rig.world.ended(session, save).completion.status, Status::Ok);
    }
    for branch in 0..64 {
        rig.stored(&chain(2000 + branch, 128));
    }
    assert_eq!(rig.world.core.gauges().pool_used_bytes, 32 << 20);
    assert!(!rig.world.work.iter().any(|work| matches!(work, Work::Write { .. })));
}

#[test]
fn a_state_page_needs_no_parent() {
    let spec = NamespaceSpec { dependency: DependencySpec::State, ..spec("state", PAGE) };
    let mut rig = Rig::new(generous(2 * PAGE), &[], spec);
    let chain = chain(1, 3);
    let ended = rig.save(&chain);
    let no_memory = refused(Code::NoMemory);
    assert_eq!(ended.outcomes(), [STORED, STORED, no_memory], "no chain to break");
    assert_eq!(rig.hits(&chain[..2]), 2);
    assert_eq!(rig.world.core.gauges().pages, 2);
}

/// Goal: what a save brings is there at once, whatever the device does, and a read that is on its way
/// keeps its memory and its slot (COR-05). Method: four pages are saved while a query's reads of them
/// are out; the first of those ends in each way.
#[test]
fn a_page_that_is_saved_while_it_is_read_is_the_saved_one() {
    let ways = [
        (Fate::Good, 0),
        (Fate::Io(IoFault::Off), 0),
        (Fate::Io(IoFault::Checksum), 1),
        (Fate::Io(IoFault::Errno(5)), 1),
        (Fate::Io(IoFault::Short), 1),
    ];
    for (fate, writes) in ways {
        let mut rig = Rig::ssd(16, 16);
        let held = chain(1, 4);
        rig.stored_on_ssd_only(&held);
        let query = rig.query(rig.seat, &held);
        assert_eq!(rig.in_flight(is_read), 4);
        rig.world.version = 1;
        assert_eq!(rig.save(&held).outcomes(), [STORED; 4]);
        let found = rig.world.ended(rig.seat.session, query).completion;
        assert_eq!((found.status, found.pages), (Status::Ok, 4), "it waits for no read");
        rig.release(rig.seat, found.lease.expect("a lease"));
        assert_eq!(rig.hits_at_once(&held), 4, "{fate:?}");
        let gauges = rig.world.core.gauges();
        assert_eq!((gauges.pool_used_bytes, gauges.pool_draining_bytes), (8 * PAGE, 4 * PAGE));
        rig.world.evict_dram();
        assert_eq!(rig.resident(), 4, "what is being read is not evicted");

        rig.fail(0, fate);
        assert_eq!(rig.in_flight(is_write), writes, "it goes there again: {fate:?}");
        rig.world.settle();
        assert_eq!(rig.world.core.gauges().ssd_pages, 4, "{fate:?}");
        let gauges = rig.world.core.gauges();
        assert_eq!((gauges.pool_used_bytes, gauges.pool_draining_bytes), (4 * PAGE, 0));
        assert_eq!(rig.hits_at_once(&held), 4, "{fate:?}");
        rig.world.core.check_laws();
    }
}

/// A slot that is being read is nobody else's, even when its page cannot stay on SSD.
#[test]
fn a_page_that_was_saved_while_it_is_read_keeps_the_slot_until_the_end() {
    let mut rig = Rig::ssd(16, 16);
    let held = chain(1, 2);
    rig.stored_on_ssd_only(&held);
    let query = rig.query(rig.seat, &held);
    assert_eq!(rig.save(&held).outcomes(), [STORED; 2]);
    let lease = rig.world.ended(rig.seat.session, query).completion.lease.expect("a lease");
    rig.release(rig.seat, lease);
    // The first page loses its slot, and does not get another.
    rig.fail(0, Fate::Io(IoFault::Errno(5)));
    let write = rig.world.work.iter().position(is_write).expect("it goes there again");
    rig.fail(write, Fate::Io(IoFault::Errno(5)));
    assert_eq!((rig.in_flight(is_read), rig.in_flight(is_write)), (1, 0));
    assert_eq!(rig.world.core.device_usage(0).1, 1, "the slot that is being read");
    assert_eq!(rig.hits_at_once(&held[..1]), 1);
    rig.world.settle();
    assert_eq!(rig.world.core.device_usage(0).1, 0);
    assert_eq!(rig.world.core.gauges().pool_draining_bytes, 0);
}

/// The memory of a read is nobody's until it ends, whatever becomes of its page.
#[test]
fn a_page_that_was_saved_while_it_is_read_can_be_forgotten() {
    let mut rig = Rig::ssd(16, 16);
    let held = chain(1, 4);
    rig.stored_on_ssd_only(&held);
    let hint = rig.world.request(
        rig.seat.session,
        RequestBody::Prepare { scope: rig.seat.scope },
        &pages(&held),
        0,
    );
    let _accepted = rig.world.ended(rig.seat.session, hint);
    assert_eq!(rig.save(&held).outcomes(), [STORED; 4]);
    let scope = rig.seat.scope;
    rig.world.ask(rig.seat.session, RequestBody::Forget { scope });
    rig.world.settle_only(|work| matches!(work, Work::Forget { .. }));
    while rig.world.core.has_forgotten_pages() {
        rig.world.pump();
    }
    assert_eq!(rig.hits_at_once(&held), 0);
    assert_eq!(rig.world.core.gauges().pool_used_bytes, 8 * PAGE);
    rig.fail(0, Fate::Io(IoFault::Errno(5)));
    rig.world.settle();
    rig.assert_at_rest();
    assert_eq!(rig.world.core.gauges().pool_used_bytes, 0);
}
