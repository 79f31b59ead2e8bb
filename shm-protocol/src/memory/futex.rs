//! Sleeping on shared words.

#![cfg_attr(not(loom), allow(unsafe_code, reason = "hands word addresses to the kernel"))]

use std::time::Duration;

use super::{WordReader, WordWriter};

/// How a futex wait ended. None of them says anything about the ring: look at it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WaitEnd {
    /// The word differed from the value seen, or its writer woke this waiter.
    Rung,
    /// The time passed.
    TimedOut,
    /// A signal arrived.
    Interrupted,
    /// The kernel has no `futex_waitv` (before 5.16, or forbidden by a seccomp profile): this was
    /// a nap of at most [`NAP_MAX`] on the first word.
    Napped,
}

/// Longest sleep on the first word of several where the kernel cannot wait for all of them.
pub const NAP_MAX: Duration = Duration::from_millis(1);

/// Most words that one thread can wait for (`FUTEX_WAITV_MAX`).
pub const WAIT_WORDS_MAX: usize = 128;

#[cfg(not(loom))]
mod kernel {
    use rustix::io::Errno;
    use rustix::thread::futex;
    use rustix::time::{ClockId, Timespec, clock_gettime};

    use super::{Duration, NAP_MAX, WAIT_WORDS_MAX, WaitEnd, WordReader, WordWriter};

    impl WordReader<u32> {
        /// Sleeps while the word holds `seen`, at most `timeout`. Works between processes.
        pub fn futex_wait(&self, seen: u32, timeout: Duration) -> WaitEnd {
            // SAFETY: offset and alignment were checked when `self` was made.
            let word = unsafe { self.memory.words.word32(self.offset) };
            // Never PRIVATE: the waker is another process.
            match futex::wait(word, futex::Flags::empty(), seen, Some(&timespec(timeout))) {
                Ok(()) | Err(Errno::AGAIN) => WaitEnd::Rung,
                Err(Errno::INTR) => WaitEnd::Interrupted,
                // Any errno but ETIMEDOUT would be a bug of ours. Calling it a timeout is safe,
                // because the caller looks at its ring in any case.
                Err(_) => WaitEnd::TimedOut,
            }
        }
    }

    impl WordWriter<u32> {
        /// Wakes every waiter on the word. Returns how many there were.
        pub fn futex_wake(&self) -> usize {
            // SAFETY: offset and alignment were checked when `self` was made.
            let word = unsafe { self.memory.words.word32(self.offset) };
            futex::wake(word, futex::Flags::empty(), i32::MAX as u32).unwrap_or(0)
        }
    }

    /// Sleeps while every word still holds the value seen of it, at most `timeout`. One system
    /// call.
    ///
    /// # Panics
    /// When there are no words, or more than [`WAIT_WORDS_MAX`].
    pub(crate) fn wait_many<'a>(
        words: impl ExactSizeIterator<Item = (&'a WordReader<u32>, u32)>,
        timeout: Duration,
    ) -> WaitEnd {
        let count = words.len();
        assert!((1..=WAIT_WORDS_MAX).contains(&count), "{count} futex words to wait for");
        let mut waits = [futex::Wait::new(); WAIT_WORDS_MAX];
        let mut first = None;
        for (wait, (word, seen)) in waits.iter_mut().zip(words) {
            wait.val = seen.into();
            wait.uaddr = futex::WaitPtr::new(word.memory.address(word.offset).cast());
            wait.flags = futex::WaitFlags::SIZE_U32;
            first = first.or(Some((word, seen)));
        }
        let until = clock_gettime(ClockId::Monotonic).checked_add(timespec(timeout));
        let flags = futex::WaitvFlags::empty();
        match futex::waitv(&waits[..count], flags, until.as_ref(), futex::ClockId::Monotonic) {
            Ok(_) | Err(Errno::AGAIN) => WaitEnd::Rung,
            Err(Errno::INTR) => WaitEnd::Interrupted,
            Err(Errno::NOSYS | Errno::PERM) => {
                if let Some((word, seen)) = first {
                    word.futex_wait(seen, timeout.min(NAP_MAX));
                }
                WaitEnd::Napped
            }
            // As in `futex_wait`.
            Err(_) => WaitEnd::TimedOut,
        }
    }

    fn timespec(duration: Duration) -> Timespec {
        /// A century is as good as for ever, and cannot overflow when added to a clock.
        const SECONDS_MAX: u64 = 100 * 365 * 86_400;
        Timespec {
            tv_sec: duration.as_secs().min(SECONDS_MAX) as i64,
            tv_nsec: duration.subsec_nanos().into(),
        }
    }
}

#[cfg(not(loom))]
pub(crate) use kernel::wait_many;

#[cfg(loom)]
impl WordReader<u32> {
    /// Sleeps while the word holds `seen`. The twin has no timeout: a lost wake is a deadlock.
    pub fn futex_wait(&self, seen: u32, _timeout: Duration) -> WaitEnd {
        self.memory.words.futex_wait(self.offset, seen);
        WaitEnd::Rung
    }
}

#[cfg(loom)]
impl WordWriter<u32> {
    /// Wakes every waiter of the memory.
    pub fn futex_wake(&self) -> usize {
        self.memory.words.futex_wake();
        0
    }
}

#[cfg(loom)]
pub(crate) fn wait_many<'a>(
    _words: impl ExactSizeIterator<Item = (&'a WordReader<u32>, u32)>,
    _timeout: Duration,
) -> WaitEnd {
    unreachable!("models wait for one word");
}
