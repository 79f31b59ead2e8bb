//! Memory of another process, through `process_vm_readv` and `process_vm_writev`.
//!
//! A process id is only a number: the process can die and the number can pass on, or the process
//! can become another program. So each batch is framed by two proofs, its pidfd and a nonce that
//! only the registered address space holds. A read fetches the nonce as the last part of the same
//! call, which the kernel serves from one address space: bytes and nonce come from the same one. A
//! write can only look right before and right after.
//!
//! Known limit: the kernel takes page faults of the other process on its behalf. A process that
//! backs its registered range by a file system of its own (FUSE) can hold such a call up for as
//! long as it lives. Only processes that the kernel lets us trace get here, which can kill the
//! Manager just as well; a sealed memfd has no such hold.
#![allow(unsafe_code, reason = "process_vm_readv and process_vm_writev take raw addresses")]

use libc::{c_void, iovec};
use rustix::io::Errno;

use super::import::{ImportError, refused_cause};
use super::memory::last_errno;
use super::peer::PeerHandle;
use crate::core::Direction;
use crate::device::CopyError;
use crate::image::DramSlice;

/// Parts of one batch: the kernel takes 1,024, and a read adds the nonce.
pub(super) const PARTS_MAX: usize = 1023;
/// Calls that one batch may take. Each of them moves something; an engine that makes the kernel
/// stop this often in a few MiB is doing it on purpose.
const CALLS_MAX: u32 = 32;

/// A range of another process's memory, proved reachable once.
#[derive(Debug)]
pub(super) struct ProcessMemory {
    peer: PeerHandle,
    address: u64,
    bytes: u64,
    nonce_address: u64,
    nonce: u64,
}

/// The two lists of a call. Empty of meaning between calls.
#[derive(Default)]
pub(super) struct Scratch {
    local: Vec<iovec>,
    remote: Vec<iovec>,
}

impl ProcessMemory {
    /// Checks the ranges, then reads the nonce and the first and last byte.
    pub(super) fn probe(
        peer: PeerHandle,
        address: u64,
        bytes: u64,
        nonce_address: u64,
        nonce: u64,
    ) -> Result<Self, ImportError> {
        let fits = |start: u64, bytes: u64| {
            bytes > 0 && start.checked_add(bytes).is_some_and(|end| usize::try_from(end).is_ok())
        };
        if !fits(address, bytes) || !fits(nonce_address, 8) {
            return Err(ImportError::BadRange);
        }
        let memory = Self { peer, address, bytes, nonce_address, nonce };
        let found = memory.read_nonce().map_err(|errno| memory.explain(nonce_address, errno))?;
        if found != nonce {
            let pid = memory.peer.pid;
            return Err(ImportError::WrongNonce { pid, address: nonce_address });
        }
        for edge in [address, address + (bytes - 1)] {
            memory.read_small::<1>(edge).map_err(|errno| memory.explain(edge, errno))?;
        }
        if !memory.peer.is_alive() {
            return Err(ImportError::Exited { pid: memory.peer.pid });
        }
        Ok(memory)
    }

    /// Address of `bytes` bytes at `offset`, or `None` outside the registered range.
    pub(super) fn address(&self, offset: u64, bytes: usize) -> Option<u64> {
        let end = offset.checked_add(bytes as u64)?;
        // No overflow: `probe` checked the whole range.
        (end <= self.bytes).then(|| self.address + offset)
    }

    /// Whether both are proved by the same nonce in the same process.
    pub(super) fn same_process(&self, other: &Self) -> bool {
        self.peer.same(&other.peer)
            && self.nonce_address == other.nonce_address
            && self.nonce == other.nonce
    }

    /// Moves one batch of `(remote address, image)`; returns its bytes. On an error, the bytes that
    /// are certainly in place.
    pub(super) fn transfer<'a>(
        &self,
        direction: Direction,
        parts: impl Iterator<Item = (u64, DramSlice<'a>)>,
        scratch: &mut Scratch,
    ) -> Result<u64, (u64, CopyError)> {
        scratch.local.clear();
        scratch.remote.clear();
        let mut bytes = 0;
        for (address, image) in parts.take(PARTS_MAX) {
            scratch.push(address, image.as_ptr(), image.bytes());
            bytes += image.bytes() as u64;
        }
        self.alive().map_err(|error| (0, error))?;
        let outcome = match direction {
            Direction::Save => self.read(scratch),
            Direction::Restore => {
                self.check_nonce().map_err(|error| (0, error))?;
                self.run(direction, scratch)
            }
        };
        // Whatever was moved counts only if the peer is still the one that registered.
        self.alive().map_err(|error| (0, error))?;
        match outcome {
            Ok(()) if direction == Direction::Save => Ok(bytes),
            Ok(()) => self.check_nonce().map(|()| bytes).map_err(|error| (0, error)),
            Err((moved, error)) => {
                self.check_nonce().map_err(|error| (0, error))?;
                Err((moved.min(bytes), error))
            }
        }
    }

    fn read(&self, scratch: &mut Scratch) -> Result<(), (u64, CopyError)> {
        let mut found = [0u8; 8];
        scratch.push(self.nonce_address, found.as_mut_ptr(), found.len());
        self.run(Direction::Save, scratch)?;
        scratch.local.clear();
        if u64::from_ne_bytes(found) == self.nonce {
            Ok(())
        } else {
            Err((0, CopyError::NonceLost { pid: self.peer.pid }))
        }
    }

    /// Calls until the lists are used up. A partial result continues where it stopped, so that the
    /// next call either gets further or says why not.
    fn run(&self, direction: Direction, scratch: &mut Scratch) -> Result<(), (u64, CopyError)> {
        let Scratch { local, remote } = scratch;
        let mut first = 0;
        let mut moved = 0u64;
        for _ in 0..CALLS_MAX {
            let (Some(local), Some(remote)) = (local.get_mut(first..), remote.get_mut(first..))
            else {
                return Ok(());
            };
            if local.is_empty() {
                return Ok(());
            }
            let stopped_at = remote.first().map_or(0, |part| part.iov_base.addr() as u64);
            match self.call(direction, local, remote) {
                Ok(0) => return Err((moved, self.unreachable(stopped_at, 0))),
                Ok(bytes) => {
                    moved += bytes as u64;
                    first += advance(local, remote, bytes);
                }
                Err(Errno::INTR) => {}
                Err(Errno::SRCH) => {
                    return Err((moved, CopyError::PeerExited { pid: self.peer.pid }));
                }
                Err(errno) => {
                    return Err((moved, self.unreachable(stopped_at, errno.raw_os_error())));
                }
            }
        }
        let stopped_at = remote.get(first).map_or(0, |part| part.iov_base.addr() as u64);
        match local.get(first) {
            None => Ok(()),
            Some(_) => Err((moved, self.unreachable(stopped_at, 0))),
        }
    }

    fn call(
        &self,
        direction: Direction,
        local: &[iovec],
        remote: &[iovec],
    ) -> Result<usize, Errno> {
        let (local_count, remote_count) = (local.len() as u64, remote.len() as u64);
        let moved = match direction {
            // SAFETY: every local part was pushed from a live slice or buffer, valid for writes for
            // its length and borrowed until the batch ends; remote addresses are only numbers here,
            // which the kernel checks against the other process.
            Direction::Save => unsafe {
                libc::process_vm_readv(
                    self.peer.pid,
                    local.as_ptr(),
                    local_count,
                    remote.as_ptr(),
                    remote_count,
                    0,
                )
            },
            // SAFETY: as above, valid for reads.
            Direction::Restore => unsafe {
                libc::process_vm_writev(
                    self.peer.pid,
                    local.as_ptr(),
                    local_count,
                    remote.as_ptr(),
                    remote_count,
                    0,
                )
            },
        };
        usize::try_from(moved).map_err(|_| Errno::from_raw_os_error(last_errno()))
    }

    fn read_nonce(&self) -> Result<u64, Errno> {
        self.read_small::<8>(self.nonce_address).map(u64::from_ne_bytes)
    }

    fn read_small<const BYTES: usize>(&self, address: u64) -> Result<[u8; BYTES], Errno> {
        let mut found = [0u8; BYTES];
        let local = [iovec { iov_base: found.as_mut_ptr().cast(), iov_len: BYTES }];
        let remote = [iovec { iov_base: remote_address(address), iov_len: BYTES }];
        loop {
            match self.call(Direction::Save, &local, &remote) {
                Ok(moved) if moved == BYTES => return Ok(found),
                Ok(_) => return Err(Errno::FAULT),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno),
            }
        }
    }

    fn alive(&self) -> Result<(), CopyError> {
        let pid = self.peer.pid;
        if self.peer.is_alive() { Ok(()) } else { Err(CopyError::PeerExited { pid }) }
    }

    fn check_nonce(&self) -> Result<(), CopyError> {
        let pid = self.peer.pid;
        match self.read_nonce() {
            Ok(found) if found == self.nonce => Ok(()),
            Err(Errno::SRCH) => Err(CopyError::PeerExited { pid }),
            // A process that is exiting has lost its memory before its pidfd tells.
            _ if !self.peer.is_alive() => Err(CopyError::PeerExited { pid }),
            _ => Err(CopyError::NonceLost { pid }),
        }
    }

    fn unreachable(&self, address: u64, errno: i32) -> CopyError {
        CopyError::Unreachable { pid: self.peer.pid, address, errno }
    }

    fn explain(&self, address: u64, errno: Errno) -> ImportError {
        let pid = self.peer.pid;
        if errno == Errno::SRCH || !self.peer.is_alive() {
            ImportError::Exited { pid }
        } else if errno == Errno::PERM || errno == Errno::NOSYS {
            refused_cause(pid, errno)
        } else {
            ImportError::Unmapped { pid, address, errno }
        }
    }
}

impl Scratch {
    fn push(&mut self, address: u64, local: *mut u8, bytes: usize) {
        self.local.push(iovec { iov_base: local.cast(), iov_len: bytes });
        self.remote.push(iovec { iov_base: remote_address(address), iov_len: bytes });
    }
}

/// An address of the other process. Never dereferenced here.
fn remote_address(address: u64) -> *mut c_void {
    std::ptr::without_provenance_mut(address as usize)
}

/// Takes `bytes` off the front of both lists, whose parts have equal lengths; returns how many
/// parts are used up.
fn advance(local: &mut [iovec], remote: &mut [iovec], mut bytes: usize) -> usize {
    let mut used = 0;
    for (local, remote) in local.iter_mut().zip(remote) {
        if bytes < local.iov_len {
            local.iov_base = local.iov_base.wrapping_byte_add(bytes);
            remote.iov_base = remote.iov_base.wrapping_byte_add(bytes);
            local.iov_len -= bytes;
            remote.iov_len -= bytes;
            break;
        }
        bytes -= local.iov_len;
        used += 1;
    }
    used
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use rustix::mm::{MapFlags, MprotectFlags, ProtFlags};
    use rustix::process::{PidfdFlags, getpid, pidfd_open};

    use super::*;
    use crate::core::Extent;
    use crate::image::{HeapImages, ImageMemory};

    const PAGE: usize = 4096;

    /// Four pages of this process with a hole in place of the third, registered as a whole.
    fn holed() -> (ProcessMemory, *mut u8, Box<u64>) {
        let nonce = Box::new(0x6e6f_6e63_6531_3233_u64);
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice; leaked by the test.
        let start = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                4 * PAGE,
                protection,
                MapFlags::PRIVATE,
            )
        }
        .expect("mmap");
        let pid = getpid();
        let pidfd = Arc::new(pidfd_open(pid, PidfdFlags::empty()).expect("pidfd"));
        let peer = PeerHandle { pid: pid.as_raw_nonzero().get(), pidfd };
        let nonce_address = std::ptr::from_ref(&*nonce).addr() as u64;
        let address = start.addr() as u64;
        let memory = ProcessMemory::probe(peer, address, 4 * PAGE as u64, nonce_address, *nonce)
            .expect("own memory");
        let third = start.wrapping_byte_add(2 * PAGE);
        // SAFETY: the page belongs to the mapping above and nothing refers to it.
        unsafe { rustix::mm::mprotect(third, PAGE, MprotectFlags::empty()) }.expect("mprotect");
        (memory, start.cast(), nonce)
    }

    #[test]
    fn bytes_before_a_hole_count_and_the_hole_is_named() {
        let (memory, start, _nonce) = holed();
        let images = HeapImages::new(4 * PAGE);
        let part = |number: u64| {
            let offset = number * PAGE as u64;
            let extent = Extent { arena: 0, offset, bytes: PAGE as u32 };
            let address = memory.address(offset, PAGE).expect("inside");
            (address, images.slice(extent).expect("extent"))
        };
        let mut scratch = Scratch::default();
        let hole = start.addr() as u64 + 2 * PAGE as u64;
        let two_pages = 2 * PAGE as u64;
        for direction in [Direction::Restore, Direction::Save] {
            for (_, image) in (0..4).map(part) {
                assert!(image.fill_from(&[9; PAGE]));
            }
            let stopped = memory.transfer(direction, (0..4).map(part), &mut scratch);
            let unreachable =
                CopyError::Unreachable { pid: memory.peer.pid, address: hole, errno: libc::EFAULT };
            assert_eq!(stopped, Err((two_pages, unreachable)));
            assert_eq!(memory.transfer(direction, (0..2).map(part), &mut scratch), Ok(two_pages));
        }
        // SAFETY: the second page is mapped and this thread is the only one that uses it.
        assert_eq!(unsafe { start.wrapping_add(2 * PAGE - 1).read_volatile() }, 9);
        assert_eq!(memory.address(4 * PAGE as u64 - 1, 1), Some(hole + two_pages - 1));
        assert_eq!(memory.address(4 * PAGE as u64, 1), None);
        assert_eq!(memory.address(u64::MAX, 2), None);
    }

    #[test]
    fn a_changed_nonce_voids_a_read_and_forbids_a_write() {
        let (memory, start, mut nonce) = holed();
        let images = HeapImages::new(4 * PAGE);
        let image =
            images.slice(Extent { arena: 0, offset: 0, bytes: PAGE as u32 }).expect("extent");
        assert!(image.fill_from(&[5; PAGE]));
        *std::hint::black_box(&mut *nonce) += 1;
        let lost = CopyError::NonceLost { pid: memory.peer.pid };
        for direction in [Direction::Restore, Direction::Save] {
            let part = std::iter::once((memory.address, image));
            let stopped = memory.transfer(direction, part, &mut Scratch::default());
            assert_eq!(stopped, Err((0, lost)));
        }
        // SAFETY: the first page is mapped and this thread is the only one that uses it.
        assert_eq!(unsafe { start.read_volatile() }, 0, "written without the nonce");
        std::hint::black_box(&nonce);
    }

    #[test]
    fn a_partial_result_continues_inside_its_part() {
        let mut bytes = [0u8; 30];
        let base = bytes.as_mut_ptr();
        let mut scratch = Scratch::default();
        for part in 0..3u64 {
            scratch.push(1000 + 100 * part, base.wrapping_add(10 * part as usize), 10);
        }
        let Scratch { local, remote } = &mut scratch;
        assert_eq!(advance(local, remote, 13), 1);
        assert_eq!((remote[1].iov_base.addr(), remote[1].iov_len), (1103, 7));
        assert_eq!((local[1].iov_base.addr(), local[1].iov_len), (base.addr() + 13, 7));
        assert_eq!(advance(&mut local[1..], &mut remote[1..], 7), 1);
        assert_eq!(advance(&mut local[2..], &mut remote[2..], 10), 1);
    }
}
