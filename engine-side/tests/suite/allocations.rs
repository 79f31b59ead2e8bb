//! Staging and polling allocate nothing once a session runs.
#![allow(unsafe_code, reason = "a counting allocator is an unsafe impl")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use orbitkv_engine::{
    Chain, Connect, Deadline, QueryMode, RestoreOptions, SaveOptions, SubmitError,
};

use crate::rig::{PATIENCE, Rig, blocks, hashes};
use crate::twin::Twin;

thread_local! {
    /// Allocations of this thread alone: the twin's do not count.
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
        // SAFETY: by the caller's contract, which is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: by the caller's contract, which is the same.
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
        // SAFETY: by the caller's contract, which is the same.
        unsafe { System.realloc(memory, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn allocations() -> u64 {
    ALLOCATIONS.with(Cell::get)
}

/// Goal: the request path allocates nothing, refusals and fragmented tables included. Method: count
/// this thread's allocations over many rounds of every operation.
#[test]
fn the_request_path_allocates_nothing() {
    let before = allocations();
    drop(std::hint::black_box(Box::new(1)));
    assert!(allocations() > before, "the counter does not count");

    let twin = Twin::start();
    let connect = Connect::new(twin.path()).ring_capacity(64).page_entries(1024);
    let mut rig = Rig::over(connect.connect().unwrap());
    let pages = blocks(1, 8, 0);
    let names = hashes(1, 40);
    let chains =
        [Chain::from(&pages[..4]), Chain { parent: Some(pages[3].hash), blocks: &pages[4..] }];
    let before = allocations();
    for round in 0..200 {
        let client = &mut rig.client;
        client.save_chains(&rig.region, &chains, SaveOptions::default()).unwrap();
        client.query(&rig.scope, &names, QueryMode::Demand, Deadline::DEFAULT).unwrap();
        client.ping().unwrap();
        client.submit().unwrap();
        let mut left = 3;
        while left > 0 {
            let Some(done) = client.poll().unwrap() else { continue };
            left -= 1;
            std::hint::black_box(client.results(&done).count());
            if let Some(lease) = done.lease {
                let options = RestoreOptions { keep: true, ..RestoreOptions::default() };
                let target = &pages[..lease.pages() as usize];
                let restore = client.restore(&lease, 0, &rig.region, target, options).unwrap();
                client.release(lease).unwrap();
                client.submit().unwrap();
                std::hint::black_box(client.is_done(&restore));
                left += 2;
            }
        }
        // As many ranges of as many sizes as the table takes, so that it breaks into pieces.
        let mut staged = 0;
        while staged < 40 {
            match client.prepare(&rig.scope, &names[..1 + (round + staged * 7) % 40]) {
                Ok(_) => staged += 1,
                Err(error) => {
                    assert_eq!(error, SubmitError::WouldBlock);
                    break;
                }
            }
        }
        while client.outstanding() > 0 {
            client.wait(PATIENCE).unwrap().unwrap();
        }
    }
    assert_eq!(allocations() - before, 0);
}
