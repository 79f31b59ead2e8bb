//! The bootstrap socket of an attached client: registrations, and whether the Manager lives.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use orbitkv_shm_protocol::bootstrap::message::{ClientMessage, ManagerMessage};
use orbitkv_shm_protocol::bootstrap::transport::{self, TransportError};
use rustix::event::{PollFd, PollFlags};
use rustix::net::Shutdown;
use rustix::process::Pid;
use rustix::time::Timespec;

use crate::error::Gone;

/// A dying process closes its sockets a moment before its end can be seen: so long a hang-up
/// waits for it, once a session.
const EXIT_GRACE: Duration = Duration::from_millis(100);

/// See the module.
#[derive(Debug)]
pub(crate) struct Control {
    socket: OwnedFd,
    /// Of the Manager; `None` where neither the kernel nor /proc names it. Then only a hang-up
    /// tells.
    pidfd: Option<OwnedFd>,
    manager_pid: Option<Pid>,
    timeout: Duration,
    /// Answers to questions that timed out: they still come, and belong to nobody.
    owed: u32,
    is_shut: bool,
}

impl Control {
    pub(crate) fn new(
        socket: OwnedFd,
        pidfd: Option<OwnedFd>,
        manager_pid: Option<Pid>,
        timeout: Duration,
    ) -> Self {
        Self { socket, pidfd, manager_pid, timeout, owed: 0, is_shut: false }
    }

    pub(crate) fn manager_pid(&self) -> Option<Pid> {
        self.manager_pid
    }

    /// The Manager's process; readable once that has exited.
    pub(crate) fn pidfd(&self) -> Option<BorrowedFd<'_>> {
        self.pidfd.as_ref().map(AsFd::as_fd)
    }

    /// Asks one question and waits for its answer. An answer that cannot be read ends the session:
    /// which question the next one belongs to is no longer known.
    pub(crate) fn ask(
        &mut self,
        question: &ClientMessage,
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<ManagerMessage, TransportError> {
        let end = Instant::now() + self.timeout;
        transport::send(&self.socket, question, descriptors, self.timeout)?;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            match transport::receive_manager(&self.socket, left) {
                // Descriptors that nobody asked for are closed here.
                Ok((answer, _)) if self.owed == 0 => return Ok(answer),
                Ok(_) => self.owed -= 1,
                Err(TransportError::TimedOut(_)) => {
                    self.owed += 1;
                    return Err(TransportError::TimedOut(self.timeout));
                }
                Err(error) => {
                    self.shut_down();
                    return Err(error);
                }
            }
        }
    }

    /// Whether the session is over, as far as the kernel knows. One system call while it is not.
    pub(crate) fn verdict(&self) -> Option<Gone> {
        let socket = PollFd::from_borrowed_fd(self.socket.as_fd(), PollFlags::RDHUP);
        let fatal = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
        let (exited, hung_up) = match &self.pidfd {
            Some(pidfd) => {
                let mut both = [PollFd::from_borrowed_fd(pidfd.as_fd(), PollFlags::IN), socket];
                poll_within(&mut both, Duration::ZERO);
                (!both[0].revents().is_empty(), both[1].revents().intersects(fatal))
            }
            None => {
                let mut one = [socket];
                poll_within(&mut one, Duration::ZERO);
                (false, one[0].revents().intersects(fatal))
            }
        };
        match (exited, hung_up) {
            (true, _) => Some(Gone::Died),
            (false, true) => Some(self.cause_of_hang_up()),
            (false, false) => None,
        }
    }

    /// What a hang-up means: the end of the process, or of this session only.
    pub(crate) fn cause_of_hang_up(&self) -> Gone {
        if self.has_manager_exited(EXIT_GRACE) { Gone::Died } else { Gone::Closed }
    }

    /// Whether the Manager's process is known to have ended, waiting for that at most `timeout`.
    pub(crate) fn has_manager_exited(&self, timeout: Duration) -> bool {
        let Some(pidfd) = &self.pidfd else { return false };
        let mut one = [PollFd::from_borrowed_fd(pidfd.as_fd(), PollFlags::IN)];
        poll_within(&mut one, timeout);
        !one[0].revents().is_empty()
    }

    /// Tells the Manager that this session is over, whatever it is still doing.
    pub(crate) fn shut_down(&mut self) {
        if !std::mem::replace(&mut self.is_shut, true) {
            // Fails only when the other end is closed already.
            let _ = rustix::net::shutdown(&self.socket, Shutdown::Both);
        }
    }
}

/// Polls; an interrupted or failed poll reports nothing, and the next one will.
fn poll_within(descriptors: &mut [PollFd<'_>], timeout: Duration) {
    let timeout =
        Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: timeout.subsec_nanos().into() };
    if rustix::event::poll(descriptors, Some(&timeout)).is_err() {
        for descriptor in descriptors {
            descriptor.clear_revents();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;

    use orbitkv_shm_protocol::bootstrap::message::MemorySpec;
    use rustix::net::{AddressFamily, SocketFlags, SocketType};

    use super::*;

    const LONG: Duration = Duration::from_secs(20);

    fn pair() -> (Control, OwnedFd) {
        let (ours, theirs) = rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .unwrap();
        (Control::new(ours, None, None, LONG), theirs)
    }

    fn question(bytes: u64) -> ClientMessage {
        ClientMessage::RegisterMemory(MemorySpec::Memfd { bytes })
    }

    fn answer(theirs: &OwnedFd, memory: u32) {
        transport::send(theirs, &ManagerMessage::Memory { memory }, &[], LONG).unwrap();
    }

    /// Goal: an answer that comes too late is not taken for the answer to a later question.
    /// Method: two questions without an answer, then all three answers at once.
    #[test]
    fn late_answers_are_dropped() {
        let (mut control, theirs) = pair();
        control.timeout = Duration::from_millis(1);
        for bytes in [1, 2] {
            let late = control.ask(&question(bytes), &[]);
            assert!(matches!(late, Err(TransportError::TimedOut(_))), "{late:?}");
        }
        control.timeout = LONG;
        for memory in 1..=4 {
            answer(&theirs, memory);
        }
        let third = control.ask(&question(3), &[]).unwrap();
        assert_eq!(third, ManagerMessage::Memory { memory: 3 });
        let fourth = control.ask(&question(4), &[]).unwrap();
        assert_eq!(fourth, ManagerMessage::Memory { memory: 4 });
    }

    /// Goal: a quiet socket is no death; a closed one is the end of the session, and without a
    /// pidfd no more than that.
    #[test]
    fn a_hang_up_without_a_pidfd_is_a_closed_session() {
        let (control, theirs) = pair();
        assert_eq!(control.verdict(), None);
        answer(&theirs, 1);
        assert_eq!(control.verdict(), None, "an unread answer is no hang-up");
        drop(theirs);
        assert_eq!(control.verdict(), Some(Gone::Closed));
        assert!(!control.has_manager_exited(Duration::ZERO));
    }
}
