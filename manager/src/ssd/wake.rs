//! How the reactor wakes a worker that sleeps in its ring: an eventfd, written only when needed.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};
use rustix::io::Errno;

/// Wakes one worker. Ringing is cheap while the worker is awake.
///
/// The worker arms, looks once more for work, then sleeps; the publisher publishes, then rings.
/// Both have a full fence between their store and their load, so one of the two sees the other.
#[derive(Debug)]
pub(crate) struct Wake {
    event: OwnedFd,
    asleep: AtomicBool,
}

impl Wake {
    /// Makes the eventfd. Blocking, so that io_uring waits for it instead of failing with EAGAIN.
    pub(crate) fn new() -> Result<Self, Errno> {
        let event = rustix::event::eventfd(0, EventfdFlags::CLOEXEC)?;
        Ok(Self { event, asleep: AtomicBool::new(false) })
    }

    /// Wakes the worker if it sleeps or is about to. Any thread, any number of times.
    pub(crate) fn ring(&self) {
        // sync-point: worker-doze. Orders what was published before against the load below.
        fence(Ordering::SeqCst);
        if self.asleep.load(Ordering::Relaxed) && self.asleep.swap(false, Ordering::Relaxed) {
            self.ring_always();
        }
    }

    /// Makes the eventfd readable whether or not anyone sleeps.
    pub(crate) fn ring_always(&self) {
        // Fails only when the counter would overflow: then it is readable already.
        let _ = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
    }

    /// The worker is about to sleep: what is published from here on rings.
    pub(crate) fn doze(&self) {
        self.asleep.store(true, Ordering::Relaxed);
        // sync-point: worker-doze. Orders the store above against the worker's last look.
        fence(Ordering::SeqCst);
    }

    /// The worker is awake.
    pub(crate) fn rise(&self) {
        self.asleep.store(false, Ordering::Relaxed);
    }

    /// Sleeps until rung or `timeout` is over; returns early on a signal.
    pub(crate) fn block(&self, timeout: Option<Duration>) {
        if let Some(timeout) = timeout {
            let timeout = Timespec::try_from(timeout).ok();
            let mut events = [PollFd::new(&self.event, PollFlags::IN)];
            if !matches!(rustix::event::poll(&mut events, timeout.as_ref()), Ok(1..)) {
                return;
            }
        }
        let mut count = [0_u8; 8];
        let _ = rustix::io::read(&self.event, &mut count);
    }

    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::AtomicU32;

    /// Goal: no wake is lost. Method: a ping-pong in which every loss would hang for ever.
    #[test]
    fn a_worker_that_arms_and_looks_again_never_sleeps_over_work() {
        const ROUNDS: u32 = 20_000;
        let wake = Arc::new(Wake::new().unwrap());
        let published = Arc::new(AtomicU32::new(0));
        let seen = Arc::new(AtomicU32::new(0));
        let worker = std::thread::spawn({
            let (wake, published, seen) = (wake.clone(), published.clone(), seen.clone());
            move || {
                for round in 1..=ROUNDS {
                    while published.load(Ordering::Acquire) < round {
                        wake.doze();
                        if published.load(Ordering::Acquire) < round {
                            wake.block((round % 2 == 0).then_some(Duration::MAX));
                        }
                        wake.rise();
                    }
                    seen.store(round, Ordering::Release);
                }
            }
        });
        for round in 1..=ROUNDS {
            published.store(round, Ordering::Release);
            wake.ring();
            while seen.load(Ordering::Acquire) < round {
                std::hint::spin_loop();
                std::thread::yield_now();
            }
        }
        worker.join().unwrap();
    }
}
