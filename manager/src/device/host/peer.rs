//! The process behind a session, as its copies know it.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::time::Timespec;

/// A process by id and pidfd: the id addresses it, the pidfd proves that the id is still its own.
#[derive(Clone, Debug)]
pub struct PeerHandle {
    /// Process id in the Manager's process-id namespace.
    pub pid: i32,
    /// Of the same process.
    pub pidfd: Arc<OwnedFd>,
}

impl PeerHandle {
    /// Whether the process has not exited. Once false it stays false.
    pub fn is_alive(&self) -> bool {
        let mut descriptors = [PollFd::from_borrowed_fd(self.pidfd.as_fd(), PollFlags::IN)];
        loop {
            match poll(&mut descriptors, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })) {
                Ok(ready) => return ready == 0,
                Err(rustix::io::Errno::INTR) => {}
                // A pidfd that cannot be asked proves nothing.
                Err(_) => return false,
            }
        }
    }

    /// Whether both name one process through one descriptor.
    pub(super) fn same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.pidfd, &other.pidfd)
    }
}
