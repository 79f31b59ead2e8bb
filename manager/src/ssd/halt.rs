//! A writer that ceases by itself when too much of what it writes fails: what waits behind that would
//! fail as well, each page with a slot of its own.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::breaker::History;
use crate::core::IoFault;

/// Whether the writer of a device has ceased, as the reactor sees it.
#[derive(Clone, Default, Debug)]
pub(crate) struct Halted(Arc<AtomicBool>);

impl Halted {
    /// No image is written before a superblock could be. Whoever has seen the end of a write sees
    /// what it led to.
    pub(crate) fn holds(&self) -> bool {
        // Told before the end goes into its ring, which orders the two.
        self.0.load(Ordering::Relaxed)
    }
}

/// The writer's end.
#[derive(Default, Debug)]
pub(crate) struct Halt {
    halted: Halted,
    history: History,
    /// It goes on, but no image was written since.
    on_trial: bool,
}

impl Halt {
    pub(crate) fn new(halted: Halted) -> Self {
        Self { halted, ..Self::default() }
    }

    pub(crate) fn holds(&self) -> bool {
        self.halted.holds()
    }

    /// A write ended. What is not the fault of its place costs no slot, and is no reason.
    pub(crate) fn record(&mut self, fault: Option<IoFault>) {
        let failed = match fault {
            Some(IoFault::Errno(_) | IoFault::Superblock(_) | IoFault::Short) => true,
            Some(IoFault::NoSpace | IoFault::Checksum | IoFault::Off) => return,
            None => false,
        };
        let too_many = self.history.record(failed);
        if too_many || (failed && self.on_trial) {
            self.halted.0.store(true, Ordering::Relaxed);
        }
        self.on_trial &= failed;
    }

    /// The superblock was written to see whether anything can be.
    pub(crate) fn passed(&mut self) {
        if self.halted.0.swap(false, Ordering::Relaxed) {
            (self.history, self.on_trial) = (History::default(), true);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FAILED: Option<IoFault> = Some(IoFault::Errno(libc::EROFS));

    #[test]
    fn it_ceases_after_many_failures_and_goes_on_with_one_write_after_a_superblock() {
        let mut halt = Halt::default();
        for order in 0..1000 {
            halt.record(FAILED.filter(|_| order % 8 == 0));
            halt.record(Some(IoFault::NoSpace));
            halt.record(Some(IoFault::Off));
        }
        assert!(!halt.holds(), "single failures");
        let failures = (1..).find(|_| {
            halt.record(FAILED);
            halt.holds()
        });
        assert!(failures.is_some_and(|failures| failures <= 8), "{failures:?}");
        halt.record(None);
        assert!(halt.holds(), "what was on its way does not change it");
        for _ in 0..3 {
            halt.passed();
            assert!(!halt.holds());
            halt.record(Some(IoFault::NoSpace));
            assert!(!halt.holds());
            halt.record(FAILED);
            assert!(halt.holds(), "one is enough");
        }
        halt.passed();
        halt.record(None);
        halt.record(FAILED);
        assert!(!halt.holds(), "one that was written is enough as well");
    }

    #[test]
    fn a_superblock_is_no_trial_for_a_writer_that_did_not_cease() {
        let mut halt = Halt::default();
        halt.passed();
        halt.record(FAILED);
        assert!(!halt.holds());
    }
}
