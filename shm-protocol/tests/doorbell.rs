//! Goal: a waiter never sleeps over something that was published and rung, a publisher makes one
//! system call for one sleep and none otherwise, and one thread can wait for many peers.
//!
//! Method: two mappings of the same segments with a thread on each, and the in-process bell. A
//! lost wake is recognised by time stamps: the ring was complete before the waiter's timeout
//! began to be due, and the waiter timed out all the same. No test demands that anything is fast.
#![cfg(not(loom))]
#![allow(unsafe_code, reason = "forbids a system call in a forked child")]

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use orbitkv_shm_protocol::doorbell::{
    ControlBell, NAP_MAX, Ringer, Sleeper, WAIT_WORDS_MAX, WaitEnd, wait_many,
};
use orbitkv_shm_protocol::ids::{Epoch, OperationId, SessionId};
use orbitkv_shm_protocol::layout::Geometry;
use orbitkv_shm_protocol::memory::SharedMemory;
use orbitkv_shm_protocol::record::{Completion, PageRange, Request, RequestBody};
use orbitkv_shm_protocol::segment::{EngineSide, Expected, ManagerSide, attach, create};

const SESSION: SessionId = SessionId(1);
const EPOCH: Epoch = Epoch(2);
const GEOMETRY: Geometry = Geometry { ring_capacity: 64, page_entries: 1024, done_words: 1 };
/// Longer than any test should take: a wait that ends by it has failed.
const FOREVER: Duration = Duration::from_secs(60);

fn mapped_pair() -> (ManagerSide, EngineSide) {
    let (manager, descriptors) = create(GEOMETRY, SESSION, EPOCH).unwrap();
    let expected = Expected::new(GEOMETRY, SESSION, EPOCH);
    let engine = attach(descriptors.submission, descriptors.completion, expected).unwrap();
    (manager, engine)
}

fn pair() -> (Ringer, Sleeper) {
    let memory = SharedMemory::heap(256);
    let ringer = Ringer::new(memory.word_writer(0), memory.word_reader(128));
    (ringer, Sleeper::new(memory.word_writer(128), memory.word_reader(0)))
}

fn ping(index: u32) -> Request {
    Request {
        operation: OperationId { index, generation: 1 },
        deadline_ms: 0,
        range: PageRange::default(),
        body: RequestBody::Ping,
    }
}

#[test]
fn one_sleep_is_rung_once_and_no_sleep_never() {
    let (mut ringer, sleeper) = pair();
    assert!(!ringer.ring());
    let seen = sleeper.begin();
    assert!(ringer.ring());
    assert!(!ringer.ring());
    // Rung between `begin` and `wait`: the word has moved on, the wait returns at once.
    assert_eq!(sleeper.wait(seen, FOREVER), WaitEnd::Rung);
    sleeper.end();
    assert!(!ringer.ring());
    sleeper.begin();
    assert!(ringer.ring());
    sleeper.end();
}

#[test]
fn a_wait_that_nobody_rings_ends_by_its_timeout() {
    let (_ringer, sleeper) = pair();
    let seen = sleeper.begin();
    assert_eq!(sleeper.wait(seen, Duration::from_micros(200)), WaitEnd::TimedOut);
    assert_eq!(sleeper.wait(seen, Duration::ZERO), WaitEnd::TimedOut);
    sleeper.end();
    let seen = sleeper.begin();
    assert_eq!(wait_many(&[(&sleeper, seen)], Duration::from_micros(200)), WaitEnd::TimedOut);
    sleeper.end();
}

/// The peer's generation word may hold anything: one needless system call per ring at worst.
#[test]
fn a_hostile_generation_costs_a_wake_and_nothing_more() {
    let memory = SharedMemory::heap(256);
    let mut ringer = Ringer::new(memory.word_writer(0), memory.word_reader(128));
    for (generation, rings) in [(1, true), (1, false), (u32::MAX, true), (0, false), (1, true)] {
        memory.write::<u32>(128, generation);
        assert_eq!(ringer.ring(), rings, "{generation}");
    }
    // Three rings were counted; what the peer could not write, it could not change.
    assert_eq!(memory.read::<u32>(0), 3);
}

/// Publishes in bursts with pauses of all lengths around the waiter's timeout, and looks for a
/// wait that timed out although the record it missed had been rung before.
#[test]
fn no_wake_is_lost_across_two_mappings() {
    const RECORDS: usize = 20_000;
    const TIMEOUT: Duration = Duration::from_micros(100);
    let (mut manager, mut engine) = mapped_pair();
    let start = Instant::now();
    let nanos = move || start.elapsed().as_nanos() as u64 + 1;
    let rung_at: Vec<AtomicU64> = (0..RECORDS).map(|_| AtomicU64::new(0)).collect();
    let (mut rung, mut timed_out, mut lost) = (0, 0, 0);
    thread::scope(|scope| {
        let rung_at = &rung_at;
        scope.spawn(move || {
            let mut random = 0x9e37_79b9_7f4a_7c15_u64;
            for (i, rung_at) in rung_at.iter().enumerate() {
                while engine.requests.free().unwrap() == 0 {
                    thread::yield_now();
                }
                let request = ping(i as u32);
                engine.requests.push(|seq| request.encode(SESSION, EPOCH, seq)).unwrap();
                engine.requests.publish();
                engine.ringer.ring();
                rung_at.store(nanos(), Ordering::Release);
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                match random % 64 {
                    0 => thread::sleep(Duration::from_micros(random >> 32 & 0xff)),
                    1..20 => (0..random >> 40 & 0x3ff).for_each(|_| std::hint::spin_loop()),
                    _ => {}
                }
            }
        });
        let mut taken = 0;
        while taken < RECORDS {
            if let Some(record) = manager.requests.pop().unwrap() {
                assert_eq!(record.operation_index as usize, taken);
                taken += 1;
                manager.requests.release();
                continue;
            }
            let seen = manager.sleeper.begin();
            if !manager.requests.ready() {
                let due = nanos() + TIMEOUT.as_nanos() as u64;
                match manager.sleeper.wait(seen, TIMEOUT) {
                    WaitEnd::Rung => rung += 1,
                    WaitEnd::TimedOut => {
                        timed_out += 1;
                        let rung_at = rung_at[taken].load(Ordering::Acquire);
                        lost += usize::from(rung_at != 0 && rung_at < due);
                    }
                    WaitEnd::Interrupted | WaitEnd::Napped => {}
                }
            }
            manager.sleeper.end();
        }
    });
    assert_eq!(lost, 0, "of {timed_out} timeouts");
    assert!(rung > 0, "the waiter was never woken: nothing was tested");
}

/// Sends pings one at a time and sleeps until each is answered.
fn run_engine(mut engine: EngineSide, rounds: u32) {
    for index in 0..rounds {
        let request = ping(index);
        engine.requests.push(|seq| request.encode(SESSION, EPOCH, seq)).unwrap();
        engine.requests.publish();
        engine.ringer.ring();
        while engine.completions.pop().unwrap().is_none() {
            let seen = engine.sleeper.begin();
            if !engine.completions.ready() {
                assert_ne!(engine.sleeper.wait(seen, FOREVER), WaitEnd::TimedOut);
            }
            engine.sleeper.end();
        }
        engine.completions.release();
    }
}

/// Answers everything that is queued now. Returns how much it was.
fn answer(manager: &mut ManagerSide) -> usize {
    let mut answered = 0;
    while let Some(record) = manager.requests.pop().unwrap() {
        let request = Request::decode(&record).unwrap();
        let completion = Completion::ok(request.operation, request.kind());
        manager.completions.push(|seq| completion.encode(SESSION, EPOCH, seq)).unwrap();
        answered += 1;
    }
    manager.requests.release();
    if manager.completions.publish() {
        manager.ringer.ring();
    }
    answered
}

/// Waits without a timeout that matters, so that a single lost wake would show, in either
/// direction and for the in-process bell that says when to stop.
#[test]
fn one_thread_waits_for_many_engines() {
    const ENGINES: usize = 5;
    const ROUNDS: u32 = 300;
    let (mut managers, engines): (Vec<ManagerSide>, Vec<EngineSide>) =
        (0..ENGINES).map(|_| mapped_pair()).unzip();
    let control = ControlBell::new();
    let stopping = AtomicBool::new(false);
    thread::scope(|scope| {
        let (ringer, stopping) = (control.ringer(), &stopping);
        scope.spawn(move || {
            thread::scope(|scope| {
                for engine in engines {
                    scope.spawn(move || run_engine(engine, ROUNDS));
                }
            });
            stopping.store(true, Ordering::Release);
            ringer.ring();
        });
        let mut answered = 0;
        while !stopping.load(Ordering::Acquire) {
            let found: usize = managers.iter_mut().map(answer).sum();
            answered += found;
            if found > 0 {
                continue;
            }
            let sleepers: Vec<(&Sleeper, u32)> = managers
                .iter()
                .map(|manager| &manager.sleeper)
                .chain([control.sleeper()])
                .map(|sleeper| (sleeper, sleeper.begin()))
                .collect();
            let ready = managers.iter().any(|manager| manager.requests.ready())
                || stopping.load(Ordering::Acquire);
            if !ready {
                assert_ne!(wait_many(&sleepers, FOREVER), WaitEnd::TimedOut);
            }
            sleepers.iter().for_each(|(sleeper, _)| sleeper.end());
        }
        assert_eq!(answered, ENGINES * ROUNDS as usize);
    });
}

/// The most words a kernel takes, the last of which is rung.
#[test]
fn the_last_of_all_words_wakes() {
    let mut pairs: Vec<(Ringer, Sleeper)> = (0..WAIT_WORDS_MAX).map(|_| pair()).collect();
    let (mut last, sleeper) = pairs.pop().unwrap();
    let (sleeping, asleep) = mpsc::channel();
    thread::scope(|scope| {
        scope.spawn(move || {
            asleep.recv().unwrap();
            assert!(last.ring());
        });
        let sleepers: Vec<(&Sleeper, u32)> = pairs
            .iter()
            .map(|(_, sleeper)| sleeper)
            .chain([&sleeper])
            .map(|sleeper| (sleeper, sleeper.begin()))
            .collect();
        sleeping.send(()).unwrap();
        assert_eq!(wait_many(&sleepers, FOREVER), WaitEnd::Rung);
        sleepers.iter().for_each(|(sleeper, _)| sleeper.end());
    });
}

#[test]
fn many_ringers_of_one_bell_lose_nothing() {
    const RINGERS: usize = 4;
    const RECORDS: usize = 5_000;
    let bell = ControlBell::new();
    let (sender, receiver) = mpsc::channel();
    thread::scope(|scope| {
        for _ in 0..RINGERS {
            let (sender, ringer) = (sender.clone(), bell.ringer());
            scope.spawn(move || {
                for i in 0..RECORDS {
                    sender.send(i).unwrap();
                    ringer.ring();
                    if i % 50 == 0 {
                        thread::sleep(Duration::from_micros(50));
                    }
                }
            });
        }
        let mut received = 0;
        while received < RINGERS * RECORDS {
            if receiver.try_recv().is_ok() {
                received += 1;
                continue;
            }
            let seen = bell.sleeper().begin();
            match receiver.try_recv() {
                Ok(_) => received += 1,
                Err(_) => assert_ne!(bell.sleeper().wait(seen, FOREVER), WaitEnd::TimedOut),
            }
            bell.sleeper().end();
        }
    });
}

/// In a container whose seccomp profile does not know `futex_waitv`, waiting is napping.
#[test]
fn where_futex_waitv_is_forbidden_the_wait_is_a_nap() {
    // SAFETY: the child makes system calls on memory that it inherited and leaves by _exit.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let ends = forbid_futex_waitv().map(|()| {
            let (_first_ringer, first) = pair();
            let (_second_ringer, second) = pair();
            let sleepers = [(&first, first.begin()), (&second, second.begin())];
            let end = wait_many(&sleepers, NAP_MAX * 3);
            // And a first word that has moved on ends it as well.
            let stale = [(&first, sleepers[0].1.wrapping_sub(1)), sleepers[1]];
            (end, wait_many(&stale, FOREVER))
        });
        let code = match ends {
            Some((WaitEnd::Napped, WaitEnd::Napped)) => 0,
            Some(_) => 2,
            None => 3,
        };
        // SAFETY: ends the child without running the parent's destructors.
        unsafe { libc::_exit(code) };
    }
    assert!(pid > 0);
    let mut status = 0;
    // SAFETY: waits for the child made above; `status` is writable.
    assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
    assert_eq!((libc::WIFEXITED(status), libc::WEXITSTATUS(status)), (true, 0));
}

/// Makes the kernel answer `ENOSYS` to `futex_waitv` in this process from now on.
fn forbid_futex_waitv() -> Option<()> {
    let step =
        |code: u32, value: u32, jt, jf| libc::sock_filter { code: code as u16, jt, jf, k: value };
    let filter = [
        // Offset 0 of the data is the system call's number.
        step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, libc::SYS_futex_waitv as u32, 0, 1),
        step(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32, 0, 0),
        step(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW, 0, 0),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_ptr().cast_mut() };
    // SAFETY: a flag of this process.
    let privileges = unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
    // SAFETY: `program` and the filter it points to outlive the call.
    let filtered =
        unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) };
    (privileges == 0 && filtered == 0).then_some(())
}
