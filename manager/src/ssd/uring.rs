//! The io_uring engine: one ring, created and used on one thread.
#![allow(unsafe_code, reason = "hands addresses of buffers to the kernel")]

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use io_uring::squeue::{Entry, Flags};
use io_uring::types::{Fd, SubmitArgs, Timespec};
use io_uring::{IoUring, opcode};
use rustix::io::Errno;

use super::file::SsdFile;
use super::io::{Chunk, Done, Engine, EngineKind, EngineMode, Part, TaskRun, Transfer};
use super::wake::Wake;
use crate::core::Extent;
use crate::image::ImageMemory;

/// Largest piece of memory that the kernel registers as one buffer, in bytes.
const PIECE_BYTES_MAX: u64 = 1 << 30;
/// Buffers that a ring registers at most.
const PIECES_MAX: usize = 16_384;
/// Marks the completion of the armed eventfd read; all other values are slot numbers.
const WAKE: u64 = u64::MAX;
/// Number of the only file that a ring registers.
const REGISTERED_FILE: RawFd = 0;
/// Pause before the kernel is asked again after it had no memory, with nothing to reap.
const BUSY_PAUSE: Duration = Duration::from_millis(1);
/// Tries to get the last chunks back from a ring that answers every call with an error.
const DRAIN_TRIES_MAX: u32 = 1000;

/// One ring and the chunks that it holds.
pub(crate) struct UringEngine {
    // Declared first, so dropped first: closing the ring comes before anything it points to goes.
    ring: IoUring,
    slots: Vec<Slot>,
    free: Vec<u32>,
    refused: Vec<Done>,
    pieces: Vec<Piece>,
    mode: EngineMode,
    wake_count: Box<AtomicU64>,
    wake_armed: bool,
    wake: Arc<Wake>,
    file: Arc<SsdFile>,
    memory: Arc<dyn ImageMemory>,
}

/// A chunk in the kernel's hands and the vector that describes its memory.
#[derive(Default)]
struct Slot {
    chunk: Option<Chunk>,
    vector: Vec<libc::iovec>,
}

/// One registered buffer.
#[derive(Clone, Copy)]
struct Piece {
    start: usize,
    bytes: usize,
}

impl UringEngine {
    /// Makes a ring on this thread for `depth` chunks in flight. `arenas` are the sizes of the
    /// pool's arenas in bytes; as much as memlock allows is registered (all or nothing).
    ///
    /// # Errors
    ///
    /// What the kernel answers to `io_uring_setup`: EPERM or ENOSYS where it is forbidden.
    pub(crate) fn new(
        file: Arc<SsdFile>,
        memory: Arc<dyn ImageMemory>,
        wake: Arc<Wake>,
        depth: u16,
        arenas: &[u64],
    ) -> io::Result<Self> {
        // One entry more, for the eventfd read.
        let (ring, task_run) = make_ring(u32::from(depth) + 1)?;
        let kind = EngineKind::Uring(task_run);
        let mut engine = Self {
            ring,
            slots: (0..depth).map(|_| Slot::default()).collect(),
            free: (0..u32::from(depth)).rev().collect(),
            refused: Vec::new(),
            pieces: Vec::new(),
            mode: EngineMode { kind, ..EngineMode::UNREGISTERED },
            wake_count: Box::new(AtomicU64::new(0)),
            wake_armed: false,
            wake,
            file,
            memory,
        };
        engine.register(arenas);
        engine.register_file();
        Ok(engine)
    }

    /// Asks whether this process may use io_uring at all: makes a small ring and enters it once.
    pub(crate) fn probe() -> Result<TaskRun, Errno> {
        let errno = |error: io::Error| Errno::from_io_error(&error).unwrap_or(Errno::NOSYS);
        let (mut ring, task_run) = make_ring(2).map_err(errno)?;
        let nop = opcode::Nop::new().build();
        // SAFETY: a NOP refers to no memory.
        let pushed = unsafe { ring.submission().push(&nop) };
        debug_assert!(pushed.is_ok(), "the ring is empty");
        loop {
            match ring.submit_and_wait(1) {
                Ok(_) => return Ok(task_run),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(errno(error)),
            }
        }
    }

    /// Asks whether this process may register buffers: one of a page, with a ring of its own.
    pub(crate) fn probe_buffers() -> Result<(), Errno> {
        let errno = |error: io::Error| Errno::from_io_error(&error).unwrap_or(Errno::NOSYS);
        let buffer = vec![0_u8; 4096];
        let (ring, _) = make_ring(2).map_err(errno)?;
        let only = libc::iovec { iov_base: buffer.as_ptr().cast_mut().cast(), iov_len: 4096 };
        // SAFETY: nothing is ever read or written through the registration, and the ring, which
        // ends it, is dropped before the buffer.
        let registered = unsafe { ring.submitter().register_buffers(&[only]) };
        drop(ring);
        drop(buffer);
        registered.map_err(errno)
    }

    /// So that the kernel need not look the file up for every chunk. Best effort: where
    /// registration is forbidden, that of the buffers has told so.
    fn register_file(&mut self) {
        let file = self.file.descriptor().as_raw_fd();
        self.mode.file_registered = self.ring.submitter().register_files(&[file]).is_ok();
    }

    fn register(&mut self, arenas: &[u64]) {
        let mut vector = Vec::new();
        for (arena, bytes) in arenas.iter().enumerate() {
            for offset in (0..*bytes).step_by(PIECE_BYTES_MAX as usize) {
                let piece = PIECE_BYTES_MAX.min(bytes - offset) as u32;
                let extent = Extent { arena: arena as u16, offset, bytes: piece };
                let Some(slice) = self.memory.slice(extent) else { return };
                vector
                    .push(libc::iovec { iov_base: slice.as_ptr().cast(), iov_len: piece as usize });
            }
        }
        if vector.is_empty() || vector.len() > PIECES_MAX {
            return;
        }
        // By address, so that `piece_of` can search; a buffer's number is its position.
        vector.sort_unstable_by_key(|entry| entry.iov_base.addr());
        // SAFETY: each entry is a piece of the pool that `memory` vouched for; the Arc in this
        // engine keeps it mapped until after the ring is closed, which ends the registration.
        let registered = unsafe { self.ring.submitter().register_buffers(&vector) };
        let bytes: u64 = arenas.iter().sum();
        match registered {
            Ok(()) => {
                let piece = |entry: &libc::iovec| Piece {
                    start: entry.iov_base.addr(),
                    bytes: entry.iov_len,
                };
                self.pieces = vector.iter().map(piece).collect();
                self.mode.registered_bytes = bytes;
            }
            // One line for all rings is written where they are all known.
            Err(error) => {
                let errno = Errno::from_io_error(&error).unwrap_or(Errno::NOMEM);
                self.mode.register_errno = Some(errno);
            }
        }
    }

    /// Describes the memory of the chunk in `slot`. False when a part is not in the pool.
    fn describe(&mut self, slot: u32) -> bool {
        let Some(Slot { chunk: Some(chunk), vector }) = self.slots.get_mut(slot as usize) else {
            return false;
        };
        vector.clear();
        for part in &mut chunk.parts {
            let (start, bytes) = match part {
                Part::Image(extent) => match self.memory.slice(*extent) {
                    Some(slice) => (slice.as_ptr(), slice.bytes()),
                    None => return false,
                },
                Part::Block(block) => (block.0.as_mut_ptr(), block.0.len()),
            };
            vector.push(libc::iovec { iov_base: start.cast(), iov_len: bytes });
        }
        !vector.is_empty()
    }

    fn entry(&self, slot: u32) -> Option<Entry> {
        let Slot { chunk: Some(chunk), vector } = self.slots.get(slot as usize)? else {
            return None;
        };
        let file = match self.mode.file_registered {
            true => Fd(REGISTERED_FILE),
            false => Fd(self.file.descriptor().as_raw_fd()),
        };
        let offset = chunk.offset;
        let entry = match (chunk.transfer, vector.as_slice()) {
            (transfer, [only]) => {
                let (start, bytes) = (only.iov_base.cast::<u8>(), only.iov_len as u32);
                match (transfer, self.piece_of(start.addr(), only.iov_len)) {
                    (Transfer::Read, Some(piece)) => {
                        opcode::ReadFixed::new(file, start, bytes, piece).offset(offset).build()
                    }
                    (Transfer::Read, None) => {
                        opcode::Read::new(file, start, bytes).offset(offset).build()
                    }
                    (Transfer::Write, Some(piece)) => {
                        opcode::WriteFixed::new(file, start, bytes, piece).offset(offset).build()
                    }
                    (Transfer::Write, None) => {
                        opcode::Write::new(file, start, bytes).offset(offset).build()
                    }
                }
            }
            (Transfer::Read, many) => {
                opcode::Readv::new(file, many.as_ptr(), many.len() as u32).offset(offset).build()
            }
            (Transfer::Write, many) => {
                opcode::Writev::new(file, many.as_ptr(), many.len() as u32).offset(offset).build()
            }
        };
        let entry = match self.mode.file_registered {
            true => entry.flags(Flags::FIXED_FILE),
            false => entry,
        };
        Some(entry.user_data(u64::from(slot)))
    }

    /// Number of the registered buffer that holds the whole range.
    fn piece_of(&self, start: usize, bytes: usize) -> Option<u16> {
        let after = self.pieces.partition_point(|piece| piece.start <= start);
        let index = after.checked_sub(1)?;
        let piece = self.pieces.get(index)?;
        (start - piece.start + bytes <= piece.bytes).then_some(index as u16)
    }

    fn arm_wake(&mut self) {
        if self.wake_armed {
            return;
        }
        let event: RawFd = self.wake.descriptor().as_raw_fd();
        let count = self.wake_count.as_ptr().cast::<u8>();
        let entry = opcode::Read::new(Fd(event), count, 8).build().user_data(WAKE);
        // SAFETY: the eight bytes are a heap allocation of this engine, which `drop` keeps until
        // the read has completed.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        self.wake_armed = pushed.is_ok();
        debug_assert!(self.wake_armed, "the ring has an entry for the wake");
    }

    /// Moves everything that is back to `done`; says whether there was anything, wakes included.
    fn reap(&mut self, done: &mut Vec<Done>) -> bool {
        let mut any = !self.refused.is_empty();
        done.append(&mut self.refused);
        for completion in self.ring.completion() {
            any = true;
            if completion.user_data() == WAKE {
                self.wake_armed = false;
                continue;
            }
            let slot = completion.user_data() as u32;
            let chunk = self.slots.get_mut(slot as usize).and_then(|slot| slot.chunk.take());
            debug_assert!(chunk.is_some(), "a completion for slot {slot}, which holds no chunk");
            if let Some(chunk) = chunk {
                self.free.push(slot);
                done.push(Done { chunk, result: completion.result() });
            }
        }
        any
    }
}

impl Engine for UringEngine {
    fn mode(&self) -> EngineMode {
        self.mode
    }

    fn depth(&self) -> usize {
        self.slots.len()
    }

    fn in_flight(&self) -> usize {
        self.slots.len() - self.free.len() + self.refused.len()
    }

    fn submit(&mut self, chunk: Chunk) -> Result<(), Chunk> {
        let Some(number) = self.free.pop() else { return Err(chunk) };
        if let Some(slot) = self.slots.get_mut(number as usize) {
            slot.chunk = Some(chunk);
        }
        let entry = if self.describe(number) { self.entry(number) } else { None };
        // SAFETY: the entry points into the pool, which the Arc in this engine keeps mapped, and
        // into the slot: its chunk and vector stay until the completion, and `drop` waits for that.
        let pushed =
            entry.is_some_and(|entry| unsafe { self.ring.submission().push(&entry) }.is_ok());
        if !pushed
            && let Some(chunk) = self.slots.get_mut(number as usize).and_then(|s| s.chunk.take())
        {
            self.free.push(number);
            self.refused.push(Done { chunk, result: -libc::EFAULT });
        }
        Ok(())
    }

    fn wait(
        &mut self,
        ready: &mut dyn FnMut() -> bool,
        timeout: Option<Duration>,
        done: &mut Vec<Done>,
    ) {
        self.arm_wake();
        self.wake.doze();
        let sleep = self.refused.is_empty() && !ready();
        let entered = match timeout {
            Some(timeout) if sleep => {
                let timeout = Timespec::from(timeout);
                self.ring.submitter().submit_with_args(1, &SubmitArgs::new().timespec(&timeout))
            }
            _ => self.ring.submit_and_wait(usize::from(sleep)),
        };
        match entered {
            Ok(_) => _ = self.reap(done),
            Err(error) => {
                let reaped = self.reap(done);
                // A signal or the timeout is no reason to pause; anything else clears up when
                // something is reaped, or with time.
                let expected =
                    [Some(libc::EINTR), Some(libc::ETIME)].contains(&error.raw_os_error());
                if !reaped && !expected {
                    std::thread::sleep(BUSY_PAUSE);
                }
            }
        }
        self.wake.rise();
    }
}

impl Drop for UringEngine {
    /// Waits until the kernel has let go of all memory. Should the ring refuse to say so, the
    /// memory is leaked rather than freed under the kernel's hands.
    fn drop(&mut self) {
        let mut done = Vec::new();
        let mut tries = 0;
        self.wake.ring_always();
        while self.free.len() < self.slots.len() || self.wake_armed {
            let entered = self.ring.submit_and_wait(1);
            let reaped = self.reap(&mut done);
            done.clear();
            match entered {
                Err(error) if !reaped && error.kind() != io::ErrorKind::Interrupted => {
                    tries += 1;
                    std::thread::sleep(BUSY_PAUSE);
                }
                _ => tries = 0,
            }
            if tries >= DRAIN_TRIES_MAX {
                tracing::error!("the ring does not give its buffers back; they are leaked");
                std::mem::forget(Arc::clone(&self.memory));
                std::mem::forget(std::mem::take(&mut self.slots));
                std::mem::forget(std::mem::take(&mut self.wake_count));
                return;
            }
        }
        if self.mode.file_registered {
            // The kernel takes a closed ring apart later: the file would stay open, and locked,
            // until then.
            let _ = self.ring.submitter().unregister_files();
        }
    }
}

fn make_ring(entries: u32) -> io::Result<(IoUring, TaskRun)> {
    let mut newest = IoUring::builder();
    newest.dontfork().setup_single_issuer().setup_defer_taskrun().setup_taskrun_flag();
    let deferred = newest.clone();
    newest.setup_no_sqarray();
    let mut cooperative = IoUring::builder();
    cooperative.dontfork().setup_coop_taskrun().setup_taskrun_flag();
    let mut plain = IoUring::builder();
    plain.dontfork();
    let modes = [
        (newest, TaskRun::Deferred),
        (deferred, TaskRun::Deferred),
        (cooperative, TaskRun::Cooperative),
        (plain, TaskRun::Plain),
    ];
    let mut last = io::Error::from_raw_os_error(libc::EINVAL);
    for (builder, task_run) in modes {
        match builder.build(entries) {
            // Sleeping for a limited time came with Linux 5.11.
            Ok(ring) if !ring.params().is_feature_ext_arg() => {
                return Err(io::Error::from_raw_os_error(libc::ENOSYS));
            }
            Ok(ring) => return Ok((ring, task_run)),
            // Only "I do not know this flag" is a reason to ask for less.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => last = error,
            Err(error) => return Err(error),
        }
    }
    Err(last)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::{DramPool, HugePages, PoolConfig};
    use crate::ssd::engine::{EngineChoice, Resolved, resolve};
    use crate::ssd::error::SsdError;
    use crate::ssd::file::Access;

    /// Runs `body` on a thread of its own where the system call `number` is answered with `errno`,
    /// as a container's seccomp profile does. Threads that it starts are bound as well.
    fn without<T: Send>(number: libc::c_long, errno: i32, body: impl FnOnce() -> T + Send) -> T {
        let load = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
        let jump_equal = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
        let ret = (libc::BPF_RET | libc::BPF_K) as u16;
        let step = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
        let mut filter = [
            // The system call's number is the first word of what the filter sees.
            step(load, 0, 0, 0),
            step(jump_equal, 0, 1, number as u32),
            step(ret, 0, 0, libc::SECCOMP_RET_ERRNO | errno as u32),
            step(ret, 0, 0, libc::SECCOMP_RET_ALLOW),
        ];
        let mut install = move || {
            let program =
                libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
            // SAFETY: sets a flag of this thread; no memory is involved.
            let no_new = unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
            assert_eq!(no_new, 0);
            let mode = libc::SECCOMP_MODE_FILTER;
            // SAFETY: the program and its filter outlive the call, which copies them; only this
            // thread and those that it starts are affected.
            let set = unsafe { libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const program, 0, 0) };
            assert_eq!(set, 0, "{}", io::Error::last_os_error());
        };
        std::thread::scope(|scope| {
            let thread = scope.spawn(move || {
                install();
                body()
            });
            thread.join().expect("the thread under the filter")
        })
    }

    #[test]
    fn a_refusal_of_the_ring_is_seen_by_the_probe_with_its_errno() {
        for (errno, expected) in [(libc::EPERM, Errno::PERM), (libc::ENOSYS, Errno::NOSYS)] {
            // Allowed to make a ring but not to enter it is as useless.
            for number in [libc::SYS_io_uring_setup, libc::SYS_io_uring_enter] {
                let probed = without(number, errno, UringEngine::probe);
                assert_eq!(probed, Err(expected), "system call {number}");
            }
            let resolved = without(libc::SYS_io_uring_setup, errno, || resolve(EngineChoice::Auto));
            assert_eq!(resolved.unwrap(), Resolved::Blocking);
            let refused = without(libc::SYS_io_uring_setup, errno, || resolve(EngineChoice::Uring));
            assert!(matches!(refused, Err(SsdError::NoUring { errno }) if errno == expected));
        }
    }

    #[test]
    fn a_refused_registration_costs_nothing_but_the_registration() {
        if UringEngine::probe().is_err() {
            return;
        }
        let config = PoolConfig { bytes: 2 << 20, huge_pages: HugePages::Off, prefault_threads: 1 };
        let memory = Arc::new(DramPool::allocate(config).unwrap());
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tier");
        let mut file = SsdFile::open(&path, Access::Tier { direct: true }).unwrap();
        file.reserve(2 << 20).unwrap();
        let file = Arc::new(file);
        without(libc::SYS_io_uring_register, libc::EPERM, || {
            let wake = Arc::new(Wake::new().unwrap());
            let mut engine =
                UringEngine::new(file, memory.clone(), wake, 4, &memory.arena_bytes()).unwrap();
            assert_eq!((engine.mode().registered_bytes, engine.mode().file_registered), (0, false));
            let mut chunk = Chunk::new(Transfer::Read, 4096, Vec::new(), Vec::new());
            chunk.push(0, Part::Image(Extent { arena: 0, offset: 0, bytes: 8192 }));
            engine.submit(chunk).unwrap();
            let mut done = Vec::new();
            while engine.in_flight() > 0 {
                engine.wait(&mut || false, None, &mut done);
            }
            assert_eq!(done[0].result, 8192);
        });
    }
}
