//! Goal: a session's two segments carry requests, completions, tables and wakes between two
//! mappings; neither side can write the other's; and a segment that is not exactly as agreed is
//! refused with the cause.
//!
//! Method: both mappings live in this process, and in a forked child where the question is about
//! processes. Refused segments are made by hand, each with one thing wrong.
#![cfg(not(loom))]
#![allow(unsafe_code, reason = "fork and raw mappings, to act as another process would")]

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr;
use std::time::Duration;

use bytemuck::Zeroable;
use orbitkv_shm_protocol::doorbell::WaitEnd;
use orbitkv_shm_protocol::ids::{Epoch, OperationId, PageHash, SessionId};
use orbitkv_shm_protocol::layout::{
    ABI_VERSION, COMPLETION_MAGIC, Geometry, HEADER_BYTES, LAYOUT_FINGERPRINT,
    PAGES_PER_REQUEST_MAX, RING_CAPACITY_MIN, SUBMISSION_MAGIC,
};
use orbitkv_shm_protocol::record::{
    Code, Completion, PageEntry, PageOutcome, PageRange, PageResult, Request, RequestBody,
    RequestKind, SessionState, Tier,
};
use orbitkv_shm_protocol::segment::{
    AttachError, EngineSide, Expected, ManagerSide, SegmentError, SegmentHeader, SegmentKind,
    attach, create, heap_pair,
};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

const SESSION: SessionId = SessionId(7);
const EPOCH: Epoch = Epoch(0x1234_5678);
const GEOMETRY: Geometry =
    Geometry { ring_capacity: RING_CAPACITY_MIN, page_entries: 1024, done_words: 3 };
/// Longer than any test should take: a wait that ends by it has failed.
const FOREVER: Duration = Duration::from_secs(60);

fn mapped_pair(geometry: Geometry) -> (ManagerSide, EngineSide) {
    let (manager, descriptors) = create(geometry, SESSION, EPOCH).unwrap();
    let expected = Expected::new(geometry, SESSION, EPOCH);
    let engine = attach(descriptors.submission, descriptors.completion, expected).unwrap();
    (manager, engine)
}

fn ping(index: u32) -> Request {
    Request {
        operation: OperationId { index, generation: 1 },
        deadline_ms: 5,
        range: PageRange::default(),
        body: RequestBody::Ping,
    }
}

/// Every path of a session once, over mapped memory and over its heap twin.
#[test]
fn both_twins_carry_a_session() {
    for (mut manager, mut engine) in [mapped_pair(GEOMETRY), heap_pair(GEOMETRY, SESSION, EPOCH)] {
        let operation = OperationId { index: 3, generation: 9 };
        let entry = |i: u32| PageEntry::page(PageHash([i as u8; 32]), 1000 + i);
        let range = PageRange { start: 1020, len: 4 };
        for i in 0..range.len {
            engine.pages.write(range.start + i, entry(i));
        }
        let request = Request { operation, range, ..ping(3) };
        engine.requests.push(|sequence| request.encode(SESSION, EPOCH, sequence)).unwrap();
        assert_eq!(manager.requests.pop(), Ok(None));
        assert!(engine.requests.publish());

        let record = manager.requests.pop().unwrap().unwrap();
        record.check_addressed_to(manager.session(), manager.epoch()).unwrap();
        assert_eq!(Request::decode(&record), Ok(request));
        let mut entries = Vec::new();
        assert!(manager.pages.read_range(range, &mut entries));
        assert_eq!(entries, [entry(0), entry(1), entry(2), entry(3)]);
        assert!(manager.requests.release());

        let result = PageResult::new(operation, PageOutcome::Hit, Tier::Ssd, Code::None);
        manager.results.write(1023, result);
        manager.done.store(63, 2, operation.done_word());
        let completion = Completion::ok(operation, RequestKind::Ping);
        manager.completions.push(|sequence| completion.encode(SESSION, EPOCH, sequence)).unwrap();
        assert!(manager.completions.publish());

        let record = engine.completions.pop().unwrap().unwrap();
        record.check_addressed_to(engine.session(), engine.epoch()).unwrap();
        assert_eq!(Completion::decode(&record), Ok(completion));
        assert_eq!(engine.results.read(1023), result);
        assert_eq!(engine.done.load(63, 2), operation.done_word());
        assert_eq!(engine.done.load(63, 1), 0);
        assert!(engine.completions.release());

        assert_eq!(engine.state(), SessionState::Open);
        manager.set_state(SessionState::Draining);
        assert_eq!(engine.state(), SessionState::Draining);
        assert_eq!((manager.geometry(), engine.geometry()), (GEOMETRY, GEOMETRY));
        assert!(engine.is_mapped_here());
    }
}

#[test]
fn sides_can_move_to_other_threads() {
    fn assert_send<T: Send>() {}
    assert_send::<ManagerSide>();
    assert_send::<EngineSide>();
    fn assert_sync<T: Sync>() {}
    assert_sync::<orbitkv_shm_protocol::segment::DoneWords>();
    assert_sync::<orbitkv_shm_protocol::doorbell::ControlRinger>();
}

#[test]
fn ranges_beyond_the_table_are_refused() {
    let (manager, _engine) = heap_pair(Geometry::default(), SESSION, EPOCH);
    let entries_max = Geometry::default().page_entries;
    let mut entries = vec![PageEntry::zeroed(); 3];
    for (start, len) in [
        (entries_max, 1),
        (entries_max - 1, 2),
        (u32::MAX, 1),
        (1, u32::MAX),
        (u32::MAX, u32::MAX),
        (0, PAGES_PER_REQUEST_MAX + 1),
    ] {
        assert!(!manager.pages.read_range(PageRange { start, len }, &mut entries));
        assert!(entries.is_empty());
    }
    for (start, len) in [
        (0, 0),
        (entries_max, 0),
        (entries_max - 1, 1),
        (entries_max - PAGES_PER_REQUEST_MAX, PAGES_PER_REQUEST_MAX),
    ] {
        assert!(manager.pages.read_range(PageRange { start, len }, &mut entries));
        assert_eq!(entries.len(), len as usize);
    }
}

#[test]
fn done_words_lie_where_a_driver_is_told() {
    let (manager, engine) = mapped_pair(GEOMETRY);
    let (start, bytes) = manager.done.region();
    assert_eq!(start.addr() % 4096, 0);
    assert_eq!(bytes % 4096, 0);
    let (theirs, their_bytes) = engine.done.region();
    assert_ne!(start.cast_const(), theirs);
    assert_eq!(bytes, their_bytes);
    let offset = manager.done.region_offset(5, 1);
    assert_eq!(offset, engine.done.region_offset(5, 1));
    assert_eq!(offset, 5 * GEOMETRY.done_stride() + 4);
    // As a GPU would: through the address, not through this crate.
    // SAFETY: an aligned word inside the region, which `manager` keeps mapped; both sides reach
    // it by atomics.
    let word = unsafe { start.add(offset).cast::<u32>() };
    // SAFETY: as above.
    let word = unsafe { std::sync::atomic::AtomicU32::from_ptr(word) };
    word.store(77, std::sync::atomic::Ordering::Release);
    assert_eq!(engine.done.load(5, 1), 77);
    let clone = manager.done.clone();
    drop(manager);
    clone.store(5, 1, 78);
    assert_eq!(engine.done.load(5, 1), 78);
}

/// A geometry that a peer asks for is checked before anything is made of it.
#[test]
fn impossible_geometry_is_refused_by_both_sides() {
    let geometry = Geometry { ring_capacity: 65, ..GEOMETRY };
    assert_eq!(create(geometry, SESSION, EPOCH).unwrap_err(), SegmentError::Geometry(geometry));
    let (_manager, descriptors) = create(GEOMETRY, SESSION, EPOCH).unwrap();
    let expected = Expected { geometry, ..Expected::new(GEOMETRY, SESSION, EPOCH) };
    assert_eq!(
        attach(descriptors.submission, descriptors.completion, expected).unwrap_err(),
        AttachError::Geometry(geometry)
    );
}

fn map_raw(descriptor: BorrowedFd<'_>, protection: ProtFlags) -> Result<*mut u8, Errno> {
    let bytes = 4096;
    // SAFETY: a new mapping touches no existing memory. Tests leak it.
    unsafe { rustix::mm::mmap(ptr::null_mut(), bytes, protection, MapFlags::SHARED, descriptor, 0) }
        .map(|start| start.cast())
}

/// What an engine process could try with the descriptors it was given.
#[test]
fn an_engine_cannot_write_the_completion_segment_nor_resize_either() {
    let (manager, descriptors) = create(GEOMETRY, SESSION, EPOCH).unwrap();
    let completion = descriptors.completion.as_fd();
    let both = ProtFlags::READ | ProtFlags::WRITE;
    assert_eq!(map_raw(completion, both), Err(Errno::PERM));
    assert_eq!(rustix::io::pwrite(completion, &[1; 8], 0), Err(Errno::PERM));
    let punch = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
    assert_eq!(rustix::fs::fallocate(completion, punch, 0, 4096), Err(Errno::PERM));
    let start = map_raw(completion, ProtFlags::READ).unwrap();
    // SAFETY: the mapping made above.
    let raised = unsafe {
        rustix::mm::mprotect(
            start.cast(),
            4096,
            rustix::mm::MprotectFlags::READ | rustix::mm::MprotectFlags::WRITE,
        )
    };
    assert_eq!(raised, Err(Errno::ACCESS));
    // A descriptor that is opened anew is another open file of the same sealed memory.
    let path = format!("/proc/self/fd/{}", completion.as_raw_fd());
    let reopened =
        rustix::fs::open(path, rustix::fs::OFlags::RDWR, rustix::fs::Mode::empty()).unwrap();
    assert_eq!(map_raw(reopened.as_fd(), both), Err(Errno::PERM));
    for descriptor in [descriptors.submission.as_fd(), completion] {
        assert_eq!(rustix::fs::ftruncate(descriptor, 0), Err(Errno::PERM));
        assert_eq!(rustix::fs::ftruncate(descriptor, 1 << 30), Err(Errno::PERM));
        assert_eq!(rustix::fs::fcntl_add_seals(descriptor, SealFlags::WRITE), Err(Errno::PERM));
        let flags = rustix::io::fcntl_getfd(descriptor).unwrap();
        assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
        // Reserved in full: no page of it can fail to appear later.
        let stat = rustix::fs::fstat(descriptor).unwrap();
        assert!(stat.st_blocks * 512 >= stat.st_size);
    }
    // The Manager's own mapping stays writable.
    manager.done.store(0, 0, 1);
}

/// A hole punched into the submission segment is the one thing that seals do not forbid there.
#[test]
fn a_punched_submission_segment_is_a_violation_not_a_crash() {
    let (mut manager, descriptors) = create(GEOMETRY, SESSION, EPOCH).unwrap();
    let submission = descriptors.submission.try_clone().unwrap();
    let expected = Expected::new(GEOMETRY, SESSION, EPOCH);
    let mut engine = attach(descriptors.submission, descriptors.completion, expected).unwrap();
    for i in 0..2 {
        engine.requests.push(|sequence| ping(i).encode(SESSION, EPOCH, sequence)).unwrap();
    }
    engine.requests.publish();
    assert!(manager.requests.pop().unwrap().is_some());
    let punch = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(&submission, punch, 0, GEOMETRY.submission_bytes() as u64).unwrap();
    assert!(manager.requests.pop().is_err());
    let mut entries = Vec::new();
    assert!(manager.pages.read_range(PageRange { start: 0, len: 1024 }, &mut entries));
    assert!(entries.iter().all(|entry| *entry == PageEntry::default()));
}

/// The Manager maps the engine's segment read-only: /proc tells.
#[test]
fn the_manager_maps_the_submission_segment_read_only() {
    let (manager, descriptors) = create(GEOMETRY, SESSION, EPOCH).unwrap();
    let inode = rustix::fs::fstat(&descriptors.submission).unwrap().st_ino;
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let permissions: Vec<&str> = maps
        .lines()
        .filter(|line| line.split_whitespace().nth(4) == Some(&inode.to_string()))
        .map(|line| line.split_whitespace().nth(1).unwrap())
        .collect();
    assert_eq!(permissions, ["r--s"]);
    drop(manager);
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    assert!(!maps.lines().any(|line| line.split_whitespace().nth(4) == Some(&inode.to_string())));
}

/// A segment made by hand, so that one thing can be wrong.
struct Forged {
    header: SegmentHeader,
    bytes: usize,
    seals: SealFlags,
}

impl Forged {
    fn honest(segment: SegmentKind) -> Self {
        let bytes = segment.bytes(&GEOMETRY);
        let mut seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        if segment == SegmentKind::Completion {
            seals |= SealFlags::FUTURE_WRITE;
        }
        let header = SegmentHeader {
            magic: segment.magic(),
            version: ABI_VERSION,
            state: SessionState::Open as u32,
            layout_fingerprint: LAYOUT_FINGERPRINT,
            total_bytes: bytes as u64,
            epoch: EPOCH.0,
            session: SESSION.0,
            ring_capacity: GEOMETRY.ring_capacity,
            page_entries: GEOMETRY.page_entries,
            done_words: GEOMETRY.done_words,
            reserved: [0; 3],
        };
        Self { header, bytes, seals }
    }

    fn make(&self) -> OwnedFd {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let descriptor = rustix::fs::memfd_create(c"forged", flags).unwrap();
        rustix::fs::ftruncate(&descriptor, self.bytes as u64).unwrap();
        let header = bytemuck::bytes_of(&self.header);
        assert_eq!(rustix::io::pwrite(&descriptor, header, 0), Ok(HEADER_BYTES));
        rustix::fs::fcntl_add_seals(&descriptor, self.seals).unwrap();
        descriptor
    }
}

/// Attaches to a pair of which one segment was changed.
fn attach_forged(
    segment: SegmentKind,
    change: impl Fn(&mut Forged),
) -> Result<EngineSide, AttachError> {
    let mut submission = Forged::honest(SegmentKind::Submission);
    let mut completion = Forged::honest(SegmentKind::Completion);
    match segment {
        SegmentKind::Submission => change(&mut submission),
        SegmentKind::Completion => change(&mut completion),
    }
    let expected = Expected::new(GEOMETRY, SESSION, EPOCH);
    attach(submission.make(), completion.make(), expected)
}

const BOTH: [SegmentKind; 2] = [SegmentKind::Submission, SegmentKind::Completion];

#[test]
fn an_honest_forgery_attaches() {
    for segment in BOTH {
        attach_forged(segment, |_| {}).unwrap();
    }
}

#[test]
fn a_missing_seal_is_refused() {
    for segment in BOTH {
        for seal in [SealFlags::SHRINK, SealFlags::GROW, SealFlags::SEAL] {
            let needed = Forged::honest(segment).seals;
            let error = attach_forged(segment, |forged| forged.seals.remove(seal)).unwrap_err();
            let found = (needed - seal).bits();
            assert_eq!(error, AttachError::Unsealed { segment, found, needed: needed.bits() });
        }
    }
    let segment = SegmentKind::Completion;
    let error =
        attach_forged(segment, |forged| forged.seals.remove(SealFlags::FUTURE_WRITE)).unwrap_err();
    assert!(matches!(error, AttachError::Unsealed { segment: SegmentKind::Completion, .. }));
}

#[test]
fn what_cannot_be_sealed_is_refused() {
    let expected = Expected::new(GEOMETRY, SESSION, EPOCH);
    let file = tempfile::tempfile_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    file.set_len(expected.submission_bytes).unwrap();
    let completion = Forged::honest(SegmentKind::Completion).make();
    let error = attach(file.into(), completion, expected).unwrap_err();
    assert!(
        matches!(error, AttachError::NotSealable { segment: SegmentKind::Submission, .. }),
        "{error}"
    );
}

#[test]
fn a_wrong_size_is_refused() {
    for segment in BOTH {
        let needed = segment.bytes(&GEOMETRY) as u64;
        for found in [0, needed - 4096, needed + 4096] {
            let error = attach_forged(segment, |forged| forged.bytes = found as usize);
            // The header lies in the file either way; an empty one grew by it.
            let found = found.max(HEADER_BYTES as u64);
            assert_eq!(error.unwrap_err(), AttachError::Size { segment, found, needed });
        }
    }
    let honest = Expected::new(GEOMETRY, SESSION, EPOCH);
    let error = attach(
        Forged::honest(SegmentKind::Submission).make(),
        Forged::honest(SegmentKind::Completion).make(),
        Expected { completion_bytes: 4096, ..honest },
    )
    .unwrap_err();
    assert_eq!(
        error,
        AttachError::Announced {
            segment: SegmentKind::Completion,
            announced: 4096,
            needed: honest.completion_bytes
        }
    );
}

type Change = fn(&mut SegmentHeader);

#[test]
fn a_wrong_header_is_refused_with_its_field() {
    for segment in BOTH {
        let refused = |change: Change| {
            attach_forged(segment, |forged| change(&mut forged.header)).unwrap_err()
        };
        assert_eq!(refused(|header| header.magic = 5), AttachError::Magic { segment, found: 5 });
        assert_eq!(refused(|header| header.version = 0), AttachError::Unfinished { segment });
        let error = refused(|header| header.version = 9);
        assert_eq!(error, AttachError::Version { segment, ours: ABI_VERSION, theirs: 9 });
        let message = error.to_string();
        assert!(message.contains("version 9") && message.contains(&format!("has {ABI_VERSION}")));
        assert_eq!(
            refused(|header| header.layout_fingerprint = 1),
            AttachError::Fingerprint { segment, ours: LAYOUT_FINGERPRINT, theirs: 1 }
        );
        let fields: [(&str, Change); 6] = [
            ("total_bytes", |header| header.total_bytes += 1),
            ("epoch", |header| header.epoch += 1),
            ("session", |header| header.session += 1),
            ("ring_capacity", |header| header.ring_capacity *= 2),
            ("page_entries", |header| header.page_entries += 1),
            ("done_words", |header| header.done_words += 1),
        ];
        for (name, change) in fields {
            match refused(change) {
                AttachError::Header { segment: named, field, .. } => {
                    assert_eq!((named, field), (segment, name));
                }
                other => panic!("{name}: {other}"),
            }
        }
    }
}

#[test]
fn swapped_segments_are_refused() {
    let (_manager, descriptors) = create(GEOMETRY, SESSION, EPOCH).unwrap();
    let expected = Expected::new(GEOMETRY, SESSION, EPOCH);
    assert!(attach(descriptors.completion, descriptors.submission, expected).is_err());
    for (segment, magic) in
        [(SegmentKind::Submission, COMPLETION_MAGIC), (SegmentKind::Completion, SUBMISSION_MAGIC)]
    {
        let error = attach_forged(segment, |forged| forged.header.magic = magic).unwrap_err();
        assert_eq!(error, AttachError::Magic { segment, found: magic });
    }
}

fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Runs `child` in a forked process and returns its exit code; 101 is a panic.
fn in_child(child: impl FnOnce() -> i32) -> Child {
    // SAFETY: the child only touches what it inherited, makes no threads, and leaves by _exit.
    match unsafe { libc::fork() } {
        0 => {
            let code = std::panic::catch_unwind(std::panic::AssertUnwindSafe(child)).unwrap_or(101);
            // SAFETY: ends the child without running the parent's destructors.
            unsafe { libc::_exit(code) }
        }
        pid if pid > 0 => Child(pid),
        _ => panic!("fork: {}", std::io::Error::last_os_error()),
    }
}

struct Child(libc::pid_t);

impl Child {
    fn exit_code(self) -> i32 {
        let mut status = 0;
        // SAFETY: waits for the child that `in_child` made; `status` is writable.
        let waited = unsafe { libc::waitpid(self.0, &mut status, 0) };
        assert_eq!(waited, self.0);
        assert!(libc::WIFEXITED(status), "child ended by signal {}", libc::WTERMSIG(status));
        libc::WEXITSTATUS(status)
    }
}

/// An engine in another process, attached by descriptors alone.
#[test]
fn another_process_attaches_sleeps_and_is_woken() {
    const ROUNDS: u32 = 200;
    let (mut manager, descriptors) = create(GEOMETRY, SESSION, EPOCH).unwrap();
    let child = in_child(move || {
        let expected = Expected::new(GEOMETRY, SESSION, EPOCH);
        let Ok(mut engine) = attach(descriptors.submission, descriptors.completion, expected)
        else {
            return 2;
        };
        for index in 0..ROUNDS {
            let request = ping(index);
            if engine.requests.push(|seq| request.encode(SESSION, EPOCH, seq)).is_err() {
                return 3;
            }
            engine.requests.publish();
            engine.ringer.ring();
            let completion = loop {
                match engine.completions.pop() {
                    Ok(Some(record)) => break Completion::decode(&record).unwrap(),
                    Ok(None) => {}
                    Err(_) => return 4,
                }
                let seen = engine.sleeper.begin();
                let end = (!engine.completions.ready()).then(|| engine.sleeper.wait(seen, FOREVER));
                engine.sleeper.end();
                if end == Some(WaitEnd::TimedOut) {
                    return 5;
                }
            };
            engine.completions.release();
            if completion.operation != request.operation {
                return 6;
            }
        }
        0
    });
    for index in 0..ROUNDS {
        let record = loop {
            if let Some(record) = manager.requests.pop().unwrap() {
                break record;
            }
            let seen = manager.sleeper.begin();
            if !manager.requests.ready() {
                assert_ne!(manager.sleeper.wait(seen, FOREVER), WaitEnd::TimedOut);
            }
            manager.sleeper.end();
        };
        manager.requests.release();
        let request = Request::decode(&record).unwrap();
        assert_eq!(request, ping(index));
        let completion = Completion::ok(request.operation, request.kind());
        manager.completions.push(|seq| completion.encode(SESSION, EPOCH, seq)).unwrap();
        manager.completions.publish();
        manager.ringer.ring();
    }
    assert_eq!(child.exit_code(), 0);
}

/// A forked child has no segments: it can tell, and dropping what it inherited harms nobody.
#[test]
fn a_forked_child_knows_that_it_has_no_segments() {
    let (mut manager, engine) = mapped_pair(GEOMETRY);
    let address = engine.done.region().0.addr();
    let mut engine = Some(engine);
    let child = in_child(|| {
        let inherited = engine.take().unwrap();
        if inherited.is_mapped_here() {
            return 2;
        }
        // Something of the child's own at the address where the parent has its segment.
        let page = address as *mut std::ffi::c_void;
        let both = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::FIXED_NOREPLACE;
        // SAFETY: FIXED_NOREPLACE only maps where nothing is.
        let own = unsafe { rustix::mm::mmap_anonymous(page, 4096, both, flags) };
        let Ok(own) = own else { return 3 };
        // SAFETY: the page was mapped just above.
        unsafe { own.cast::<u8>().write_volatile(42) };
        drop(inherited);
        // SAFETY: the page is still mapped, or this test fails by SIGSEGV.
        if unsafe { own.cast::<u8>().read_volatile() } != 42 {
            return 4;
        }
        0
    });
    assert_eq!(child.exit_code(), 0);
    let mut engine = engine.unwrap();
    assert!(engine.is_mapped_here());
    engine.requests.push(|sequence| ping(0).encode(SESSION, EPOCH, sequence)).unwrap();
    engine.requests.publish();
    assert!(manager.requests.pop().unwrap().is_some());
}

/// The engine's stores to its read-only mapping do not even reach memory.
#[test]
fn storing_through_the_engines_completion_mapping_is_a_fault() {
    let (_manager, descriptors) = create(GEOMETRY, SESSION, EPOCH).unwrap();
    let child = in_child(move || {
        let expected = Expected::new(GEOMETRY, SESSION, EPOCH);
        let engine = attach(descriptors.submission, descriptors.completion, expected).unwrap();
        let (start, _) = engine.done.region();
        let faulted: libc::sighandler_t = {
            extern "C" fn exit_on_fault(_signal: libc::c_int) {
                // SAFETY: async-signal-safe.
                unsafe { libc::_exit(77) }
            }
            exit_on_fault as *const () as libc::sighandler_t
        };
        // SAFETY: installs a handler that only calls _exit.
        unsafe { libc::signal(libc::SIGSEGV, faulted) };
        // SAFETY: not safe, and that is the question: the handler above ends the process.
        unsafe { start.cast_mut().write_volatile(1) };
        0
    });
    assert_eq!(child.exit_code(), 77);
}

#[test]
fn nothing_leaks_when_sessions_come_and_go() {
    // Counted in a child, where no other test opens descriptors.
    let child = in_child(|| {
        let before = open_descriptors();
        let maps = || std::fs::read_to_string("/proc/self/maps").unwrap().lines().count();
        let maps_before = maps();
        for round in 0..20 {
            let (manager, descriptors) = create(GEOMETRY, SESSION, EPOCH).unwrap();
            let mut expected = Expected::new(GEOMETRY, SESSION, EPOCH);
            if round % 2 == 1 {
                expected.epoch = Epoch(1);
            }
            let engine = attach(descriptors.submission, descriptors.completion, expected);
            assert_eq!(engine.is_ok(), round % 2 == 0);
            drop((manager, engine));
        }
        if open_descriptors() != before {
            return 2;
        }
        // The allocator may have made a few mappings of its own, not one a session.
        if maps() > maps_before + 10 {
            return 3;
        }
        0
    });
    assert_eq!(child.exit_code(), 0);
}
