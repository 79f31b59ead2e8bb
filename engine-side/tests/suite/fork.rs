//! A forked child of an engine.
#![allow(unsafe_code, reason = "fork, and the promise that offering memory by address needs")]

use std::ptr::NonNull;

use orbitkv_engine::{
    Client, Deadline, Gone, Lease, LeaseParts, Memory, QueryMode, RegisterError, RequestKind,
    RestoreOptions, SubmitError, WaitManyError, wait_many,
};
use orbitkv_shm_protocol::ids::LeaseId;

use crate::rig::{PATIENCE, Rig, blocks, hashes, layout, namespace};
use crate::twin::Twin;

/// Registers `bytes` of fresh memory that nothing in this process looks at or ever frees.
pub(crate) fn register_leaked(client: &mut Client, bytes: usize) -> Memory {
    let memory = NonNull::from(Box::leak(vec![0_u8; bytes].into_boxed_slice())).cast::<u8>();
    // SAFETY: leaked, so mapped for ever; the reference to it ended on the line above.
    unsafe { client.register_process_memory(memory, bytes) }.unwrap()
}

/// Runs `child` in a forked child; true when it returned true there.
fn in_child(child: impl FnOnce() -> bool) -> bool {
    // SAFETY: the child only runs `child` and leaves by `_exit`; libc makes its allocator usable
    // there even though other threads were running.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0);
    if pid == 0 {
        let agrees = std::panic::catch_unwind(std::panic::AssertUnwindSafe(child));
        let code = i32::from(!matches!(agrees, Ok(true)));
        // SAFETY: ends the child without running anything of the parent's.
        unsafe { libc::_exit(code) };
    }
    let mut status = 0;
    // SAFETY: a child of this process and a valid place for its status.
    let waited = unsafe { libc::waitpid(pid, &mut status, 0) };
    assert_eq!(waited, pid);
    status == 0
}

/// Goal: every call in a child is refused and writes nothing; the parent goes on. Method: all of
/// them in a child, also after the child dropped its copy; the twin counts what it took.
#[test]
fn a_forked_child_is_refused_everywhere() {
    let twin = Twin::start();
    let mut rig = Rig::new(twin.path());
    twin.hold(&[RequestKind::Ping]);
    let ping = rig.client.ping().unwrap();
    rig.client.submit().unwrap();
    let pages = blocks(1, 1, 0);
    let names = hashes(1, 1);
    let lease = Lease::from_parts(LeaseParts {
        lease: LeaseId(1),
        epoch: rig.client.epoch(),
        engine: rig.client.engine_id(),
        pages: 1,
        expires_ns: 0,
    });
    let agreed = in_child(|| {
        let client = &mut rig.client;
        let wrong = Err(SubmitError::WrongProcess);
        let demand = (QueryMode::Demand, Deadline::DEFAULT);
        let options = RestoreOptions::default();
        let submits = [
            client.save(&rig.region, &pages),
            client.query(&rig.scope, &names, demand.0, demand.1),
            client.prepare(&rig.scope, &names),
            client.restore(&lease, 0, &rig.region, &pages, options),
            client.release(lease),
            client.cancel(ping),
            client.forget(&rig.scope),
            client.unregister(rig.region),
            client.ping(),
            client.drain(Deadline::DEFAULT),
        ];
        let memory = NonNull::<u8>::dangling();
        // SAFETY: refused before anything looks at the address.
        let by_address = unsafe { client.register_process_memory(memory, 1) };
        let registers = [
            client.define_namespace(&namespace("child")).map(drop),
            client.define_set(&[rig.scope]).map(drop),
            client.register_memfd(rig.device.file(), 1).map(drop),
            client.register_region(&layout(rig.scope, rig.memory)).map(drop),
            by_address.map(drop),
        ];
        let many = wait_many(&mut [client], PATIENCE);
        submits.into_iter().all(|refused| refused == wrong)
            && registers.into_iter().all(|r| matches!(r, Err(RegisterError::WrongProcess)))
            && client.submit() == Err(Gone::WrongProcess)
            && client.poll() == Err(Gone::WrongProcess)
            && client.wait(PATIENCE) == Err(Gone::WrongProcess)
            && client.check_manager() == Err(Gone::WrongProcess)
            && client.state() == Err(Gone::WrongProcess)
            && many == Err(WaitManyError::Gone { client: 0, gone: Gone::WrongProcess })
            && client.is_done(&ping).is_none()
            && client.outstanding() == 0
    });
    assert!(agreed, "a call in the child was not refused");
    // Between two jobs the twin has looked at the ring and the socket.
    twin.with(|_| ());
    let (taken, scopes) = twin.with(|server| (server.seats[0].taken, server.seats[0].scopes.len()));
    assert_eq!((taken, scopes), (1, 1), "the child wrote something");
    twin.hold(&[]);
    assert_eq!(rig.next().operation, ping, "the parent goes on");
}

/// Goal: dropping the client in a child takes nothing away. Method: the child drops its copy,
/// after it mapped something where the segments were.
#[test]
fn a_forked_child_may_drop_its_copy() {
    let twin = Twin::start();
    let rig = Rig::new(twin.path());
    let mut parent = Some(rig);
    let agreed = in_child(|| {
        let filler = vec![7_u8; 8 << 20];
        drop(parent.take());
        filler.iter().all(|byte| *byte == 7)
    });
    assert!(agreed, "the child lost memory of its own");
    let mut rig = parent.unwrap();
    rig.client.ping().unwrap();
    assert_eq!(rig.next().kind, RequestKind::Ping);
}
