//! A real engine process: this test binary again, which serves its memory over a socket.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use orbitkv_manager::device::PeerHandle;
use orbitkv_shm_protocol::bootstrap::message::MemorySpec;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open};

/// Environment of the child: where the parent listens.
const SOCKET: &str = "ORBITKV_TEST_CHILD_SOCKET";
/// Name of the test that becomes the child.
const ENTRY: &str = "child::becomes_the_engine_when_told";

const ALLOCATE: u8 = 1;
const READ: u8 = 2;
const WRITE: u8 = 3;
const FREE: u8 = 4;
const EXEC: u8 = 5;
const UNDUMPABLE: u8 = 6;

/// Not a check: the body of the child. Without the environment it has nothing to do.
#[test]
fn becomes_the_engine_when_told() {
    let Some(path) = std::env::var_os(SOCKET) else { return };
    // The parent may be killed; a child must not outlive it.
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL)).expect("death signal");
    serve(UnixStream::connect(path).expect("parent"));
}

fn serve(mut socket: UnixStream) {
    // Atomics, because another process writes them behind the compiler's back.
    let mut memories: Vec<Option<Box<[AtomicU8]>>> = Vec::new();
    let nonce = AtomicU64::new(u64::from(std::process::id()) << 32 | 0x6f72_6269);
    let nonce_address = std::ptr::from_ref(&nonce).addr() as u64;
    loop {
        let mut verb = [0];
        if socket.read_exact(&mut verb).is_err() {
            return;
        }
        let [first, offset, bytes] = std::array::from_fn(|_| take(&mut socket));
        match verb[0] {
            ALLOCATE => {
                let memory: Box<[AtomicU8]> = (0..bytes).map(|_| AtomicU8::new(0)).collect();
                put(&mut socket, memory.as_ptr().addr() as u64);
                put(&mut socket, nonce_address);
                put(&mut socket, nonce.load(Ordering::Relaxed));
                memories.push(Some(memory));
            }
            READ => {
                let memory = memories[first as usize].as_ref().expect("memory");
                let range = offset as usize..(offset + bytes) as usize;
                let copy: Vec<u8> =
                    memory[range].iter().map(|byte| byte.load(Ordering::Relaxed)).collect();
                socket.write_all(&copy).expect("parent");
            }
            WRITE => {
                let mut copy = vec![0; bytes as usize];
                socket.read_exact(&mut copy).expect("parent");
                let memory = memories[first as usize].as_ref().expect("memory");
                for (byte, value) in memory[offset as usize..].iter().zip(copy) {
                    byte.store(value, Ordering::Relaxed);
                }
                put(&mut socket, 0);
            }
            FREE => {
                memories[first as usize] = None;
                put(&mut socket, 0);
            }
            // The socket closes on exec, which tells the parent that it happened.
            EXEC => panic!("exec: {}", Command::new("sleep").arg("600").exec()),
            UNDUMPABLE => {
                rustix::process::set_dumpable_behavior(
                    rustix::process::DumpableBehavior::NotDumpable,
                )
                .expect("dumpable");
                put(&mut socket, 0);
            }
            verb => panic!("verb {verb}"),
        }
    }
}

fn take(socket: &mut UnixStream) -> u64 {
    let mut bytes = [0; 8];
    socket.read_exact(&mut bytes).expect("number from the other side");
    u64::from_ne_bytes(bytes)
}

fn put(socket: &mut UnixStream, number: u64) {
    socket.write_all(&number.to_ne_bytes()).expect("number to the other side");
}

/// The parent's handle on a child. Kills it when dropped.
pub(crate) struct Engine {
    process: std::process::Child,
    socket: Mutex<UnixStream>,
    pub(crate) peer: PeerHandle,
}

/// Memory that a child allocated.
pub(crate) struct ChildMemory {
    number: u64,
    pub(crate) spec: MemorySpec,
}

impl Engine {
    pub(crate) fn spawn() -> Self {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("child");
        let listener = UnixListener::bind(&path).expect("socket");
        let process = Command::new(std::env::current_exe().expect("this binary"))
            .args([ENTRY, "--exact", "--nocapture", "--test-threads=1"])
            .env(SOCKET, &path)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .expect("child");
        let (socket, _) = listener.accept().expect("child connects");
        let pid = Pid::from_child(&process);
        let pidfd = Arc::new(pidfd_open(pid, PidfdFlags::empty()).expect("pidfd"));
        let peer = PeerHandle { pid: pid.as_raw_nonzero().get(), pidfd };
        Self { process, socket: Mutex::new(socket), peer }
    }

    fn ask<T>(&self, words: (u8, [u64; 3]), rest: impl FnOnce(&mut UnixStream) -> T) -> T {
        let mut socket = self.socket.lock().expect("lock");
        socket.write_all(&[words.0]).expect("child");
        for word in words.1 {
            put(&mut socket, word);
        }
        rest(&mut socket)
    }

    /// Memories are numbered in the order of their allocation, from `number` 0.
    pub(crate) fn allocate(&self, number: u64, bytes: u64) -> ChildMemory {
        let [address, nonce_address, nonce] =
            self.ask((ALLOCATE, [0, 0, bytes]), |socket| std::array::from_fn(|_| take(socket)));
        ChildMemory { number, spec: MemorySpec::Process { address, bytes, nonce_address, nonce } }
    }

    pub(crate) fn read(&self, memory: &ChildMemory, offset: u64, bytes: usize) -> Vec<u8> {
        self.ask((READ, [memory.number, offset, bytes as u64]), |socket| {
            let mut copy = vec![0; bytes];
            socket.read_exact(&mut copy).expect("child");
            copy
        })
    }

    pub(crate) fn write(&self, memory: &ChildMemory, offset: u64, bytes: &[u8]) {
        self.ask((WRITE, [memory.number, offset, bytes.len() as u64]), |socket| {
            socket.write_all(bytes).expect("child");
            take(socket);
        });
    }

    /// Unmaps one memory (the allocator returns large ones to the system at once).
    pub(crate) fn free(&self, memory: &ChildMemory) {
        self.ask((FREE, [memory.number, 0, 0]), take);
    }

    /// Makes the child another program and waits until it is.
    pub(crate) fn exec(&self) {
        self.ask((EXEC, [0; 3]), |socket| {
            assert_eq!(socket.read(&mut [0]).expect("socket closes on exec"), 0);
        });
    }

    pub(crate) fn become_undumpable(&self) {
        self.ask((UNDUMPABLE, [0; 3]), take);
    }

    /// SIGKILL, without reaping: the process is a zombie afterwards.
    pub(crate) fn kill(&mut self) {
        self.process.kill().expect("kill");
    }

    /// Waits until the process is gone for good.
    pub(crate) fn reap(&mut self) {
        self.process.wait().expect("wait");
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
