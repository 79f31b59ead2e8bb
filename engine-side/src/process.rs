//! What belongs to this process and not to a forked child of it.

use orbitkv_shm_protocol::memory::ForkGuard;

/// The caller is a forked child of the process that attached.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct WrongProcess;

/// A value that only the process which made it may touch.
///
/// It is reachable through [`enter`](Self::enter) and [`look`](Self::look) alone, so no call can
/// forget to ask. Dropping it in a child is harmless: mappings are unmapped by their owner only.
#[derive(Debug)]
pub(crate) struct ProcessBound<T> {
    guard: ForkGuard,
    value: T,
}

impl<T> ProcessBound<T> {
    /// Binds `value` to the process that made `guard`.
    pub(crate) fn new(guard: ForkGuard, value: T) -> Self {
        Self { guard, value }
    }

    /// The value, in the process that made it.
    #[inline]
    pub(crate) fn enter(&mut self) -> Result<&mut T, WrongProcess> {
        if self.guard.is_owner() { Ok(&mut self.value) } else { Err(WrongProcess) }
    }

    /// The value, in the process that made it.
    #[inline]
    pub(crate) fn look(&self) -> Result<&T, WrongProcess> {
        if self.guard.is_owner() { Ok(&self.value) } else { Err(WrongProcess) }
    }
}
