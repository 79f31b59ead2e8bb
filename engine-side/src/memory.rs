//! Offering memory of this process by address.
//!
//! The law of this file: it reads and writes nothing through the address; it only passes on the
//! promise that the caller of an `unsafe` function makes. The rest of the crate has no `unsafe`.
#![allow(
    unsafe_code,
    reason = "offering memory by address is a promise that only the caller can keep"
)]

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use orbitkv_shm_protocol::bootstrap::message::MemorySpec;
use rustix::io::Errno;
use rustix::process::{PTracer, Pid};

use crate::client::Client;
use crate::error::RegisterError;
use crate::handles::Memory;

/// A word of this process's heap by which the Manager knows that a process id still means the
/// engine that registered. It keeps its address until it is dropped with the client.
#[derive(Debug)]
pub(crate) struct Nonce(Box<AtomicU64>);

impl Nonce {
    /// A nonce that holds `number`.
    pub(crate) fn new(number: u64) -> Self {
        Self(Box::new(AtomicU64::new(number)))
    }

    fn number(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    fn address(&self) -> u64 {
        self.0.as_ptr().expose_provenance() as u64
    }
}

impl Drop for Nonce {
    fn drop(&mut self) {
        // The heap may keep the word readable: a Manager that looks later must not find it.
        self.0.store(0, Ordering::Release);
    }
}

impl Client {
    /// Offers `bytes` of this process's memory from `start`, which the Manager reaches with
    /// `process_vm_readv` and `process_vm_writev`. Slower than a memfd; for memory that the engine
    /// did not allocate itself.
    ///
    /// Allows the Manager to trace this process (`PR_SET_PTRACER`) where Yama asks for that. A
    /// process has one such permission; it stays until another replaces it.
    ///
    /// # Errors
    /// [`RegisterError::Refused`] names what keeps the Manager out (Yama, uid, user namespace);
    /// [`RegisterError::Environment`] when the permission cannot be given; the others as for every
    /// registration.
    ///
    /// # Safety
    /// The range must be mapped, and must stay mapped until every region over it is unregistered
    /// or the Manager is known to have exited ([`Gone::Died`](crate::Gone::Died)). While a restore
    /// into it is outstanding nothing in this process may read or write the pages it names, and
    /// while a save is outstanding nothing may write them: the Manager does so behind the
    /// compiler's back.
    pub unsafe fn register_process_memory(
        &mut self,
        start: NonNull<u8>,
        bytes: usize,
    ) -> Result<Memory, RegisterError> {
        self.check_process()?;
        allow_tracing(self.manager_pid())?;
        let spec = MemorySpec::Process {
            address: start.as_ptr().expose_provenance() as u64,
            bytes: bytes as u64,
            nonce_address: self.nonce().address(),
            nonce: self.nonce().number(),
        };
        self.register_memory(spec, bytes as u64, None)
    }
}

/// Lets the Manager read and write this process's memory where Yama restricts that.
fn allow_tracing(manager: Option<Pid>) -> Result<(), RegisterError> {
    let Some(manager) = manager else { return Ok(()) };
    match rustix::process::set_ptracer(PTracer::ProcessID(manager)) {
        // EINVAL: a kernel without Yama, where nothing needs to be allowed.
        Ok(()) | Err(Errno::INVAL) => Ok(()),
        Err(errno) => Err(RegisterError::Environment(errno)),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    /// Goal: the Manager finds the nonce where it is told to look. Method: read it as another
    /// process would, by address.
    #[test]
    fn the_nonce_is_where_the_manager_is_told_to_look() {
        let nonce = Nonce::new(0x1234_5678_9abc_def0);
        let memory = std::fs::File::open("/proc/self/mem").unwrap();
        let mut bytes = [0; 8];
        memory.read_exact_at(&mut bytes, nonce.address()).unwrap();
        assert_eq!(u64::from_ne_bytes(bytes), 0x1234_5678_9abc_def0);
        assert_eq!(nonce.number(), 0x1234_5678_9abc_def0);
    }
}
