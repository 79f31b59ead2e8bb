//! Running out of credits and of page table, and getting out of it.

use orbitkv_engine::{Connect, Deadline, QueryMode, RequestKind, Status, SubmitError};

use crate::rig::{Rig, blocks, hashes};
use crate::twin::Twin;

/// Goal: without credits ordinary operations block, those that give something back do not, and
/// credits return one a completion. Method: everything held until the table is full.
#[test]
fn the_reserve_gets_through_when_credits_are_gone() {
    let twin = Twin::start();
    let mut rig = Rig::over(Connect::new(twin.path()).ring_capacity(64).connect().unwrap());
    rig.client.save(&rig.region, &blocks(1, 1, 0)).unwrap();
    rig.next();
    let one = hashes(1, 1);
    rig.client.query(&rig.scope, &one, QueryMode::Demand, Deadline::DEFAULT).unwrap();
    let lease = rig.next().lease.unwrap();
    twin.hold(&[RequestKind::Ping, RequestKind::Drain]);
    let mut pings = Vec::new();
    let refused = loop {
        match rig.client.ping() {
            Ok(operation) => pings.push(operation),
            Err(error) => break error,
        }
    };
    assert_eq!((refused, pings.len()), (SubmitError::WouldBlock, 64 - 8));
    assert_eq!(rig.client.save(&rig.region, &blocks(1, 1, 0)), Err(SubmitError::WouldBlock));
    assert_eq!(rig.client.prepare(&rig.scope, &one), Err(SubmitError::WouldBlock));

    let release = rig.client.release(lease).unwrap();
    assert_eq!(rig.next().operation, release);
    let cancel = rig.client.cancel(pings[0]).unwrap();
    assert_eq!(rig.next().operation, pings[0]);
    assert_eq!(rig.next().operation, cancel);
    assert!(rig.client.ping().is_ok(), "one credit came back");
    assert_eq!(rig.client.ping(), Err(SubmitError::WouldBlock));

    for _ in 0..8 {
        rig.client.drain(Deadline::DEFAULT).unwrap();
    }
    assert_eq!(rig.client.drain(Deadline::DEFAULT), Err(SubmitError::WouldBlock));
    assert_eq!(rig.client.cancel(pings[1]), Err(SubmitError::WouldBlock));
    twin.hold(&[]);
    for _ in 0..64 {
        assert_eq!(rig.next().status, Status::Ok);
    }
    assert_eq!(rig.client.outstanding(), 0);
    assert!(rig.client.ping().is_ok());
    assert_eq!(rig.next().kind, RequestKind::Ping);
}

/// Goal: a full page table blocks without losing credits, and a range is free once its completion
/// was consumed and the next asked for. Method: two requests of half the table each.
#[test]
fn a_full_page_table_blocks_until_a_range_returns() {
    let twin = Twin::start();
    let mut rig = Rig::over(Connect::new(twin.path()).page_entries(1024).connect().unwrap());
    twin.hold(&[RequestKind::Prepare]);
    let half = hashes(1, 512);
    let more = hashes(1, 1025);
    let too_many = SubmitError::TooManyPages { entries: 1025, entries_max: 1024 };
    assert_eq!(rig.client.prepare(&rig.scope, &more), Err(too_many));
    rig.client.prepare(&rig.scope, &half).unwrap();
    rig.client.prepare(&rig.scope, &half).unwrap();
    for _ in 0..1000 {
        assert_eq!(rig.client.prepare(&rig.scope, &half[..1]), Err(SubmitError::WouldBlock));
    }
    assert_eq!(rig.client.outstanding(), 2, "a refusal keeps nothing");
    assert!(rig.client.ping().is_ok(), "no pages, no range");
    assert_eq!(rig.next().kind, RequestKind::Ping);

    twin.hold(&[]);
    let first = rig.next();
    assert_eq!(rig.client.results(&first).len(), 512);
    assert_eq!(
        rig.client.prepare(&rig.scope, &half[..1]),
        Err(SubmitError::WouldBlock),
        "the results of the last completion may still be read"
    );
    rig.next();
    assert!(rig.client.prepare(&rig.scope, &half).is_ok());
    rig.next();
    assert_eq!(rig.client.poll(), Ok(None));
    assert!(rig.client.prepare(&rig.scope, &more[..1024]).is_ok(), "the table is whole again");
    assert_eq!(rig.next().status, Status::Ok);
}

/// Goal: indices, generations and ranges survive many laps of both rings. Method: far more
/// operations than credits, a few in flight at a time, sizes that do not divide the table.
#[test]
fn many_laps_leave_nothing_behind() {
    let twin = Twin::start();
    let connect = Connect::new(twin.path()).ring_capacity(64).page_entries(1024);
    let mut rig = Rig::over(connect.connect().unwrap());
    let names = hashes(1, 300);
    let mut staged = 0_usize;
    let mut ended = 0;
    while ended < 2000 {
        if staged < 2000 {
            match rig.client.prepare(&rig.scope, &names[..1 + staged * 7 % 300]) {
                Ok(_) => {
                    staged += 1;
                    continue;
                }
                Err(error) => assert_eq!(error, SubmitError::WouldBlock),
            }
        }
        assert_eq!(rig.next().status, Status::Ok);
        ended += 1;
    }
    assert_eq!((staged, rig.client.outstanding()), (2000, 0));
}
