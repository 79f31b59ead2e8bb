//! How bootstrap messages travel: one `SOCK_SEQPACKET` datagram a message, descriptors attached
//! by `SCM_RIGHTS`, every length bounded before it is believed.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::message::{
    ClientMessage, MESSAGE_BYTES_MAX, MESSAGE_DESCRIPTORS_MAX, MESSAGE_MAGIC, ManagerMessage,
    MessageHeader,
};
use crate::layout::ABI_VERSION;

const HEADER_BYTES: usize = size_of::<MessageHeader>();
const CONTROL_BYTES: usize = rustix::cmsg_space!(ScmRights(MESSAGE_DESCRIPTORS_MAX));

/// Why a message did not travel. Descriptors that came with a refused message are closed.
#[derive(Debug, thiserror::Error)]
pub enum TransportError {
    /// The peer closed its end, or died.
    #[error("the peer closed the socket")]
    Closed,
    /// The time passed before a message could be sent or came.
    #[error("no message within {} ms", .0.as_millis())]
    TimedOut(Duration),
    /// The peer was built for another version; both are named.
    #[error("ABI version {theirs} at the other end, {ours} here: use matching releases")]
    AbiMismatch {
        /// [`ABI_VERSION`] of this build.
        ours: u32,
        /// As the peer's header says.
        theirs: u32,
    },
    /// The datagram does not start with [`MESSAGE_MAGIC`]: something else talks to the socket.
    #[error("message starts with {found:#010x}, not with its magic")]
    Magic {
        /// First four bytes.
        found: u32,
    },
    /// Longer than [`MESSAGE_BYTES_MAX`].
    #[error("message is longer than {max} bytes")]
    TooLong {
        /// [`MESSAGE_BYTES_MAX`].
        max: usize,
    },
    /// The datagram ends before its header or body does, or goes on after it.
    #[error("message has {found} bytes, its header announces {announced}")]
    Length {
        /// Bytes received.
        found: usize,
        /// Bytes announced, header included.
        announced: u64,
    },
    /// More or fewer descriptors than announced, or more than [`MESSAGE_DESCRIPTORS_MAX`].
    #[error("message carries {found} descriptors, {announced} announced, at most {max} allowed")]
    Descriptors {
        /// Descriptors attached.
        found: usize,
        /// Descriptors announced.
        announced: u32,
        /// [`MESSAGE_DESCRIPTORS_MAX`].
        max: usize,
    },
    /// The body is no message of the expected direction.
    #[error("message body: {0}")]
    Body(#[from] serde_json::Error),
    /// The system refused.
    #[error("{operation} on the bootstrap socket: {errno}")]
    System {
        /// `sendmsg`, `recvmsg` or `poll`.
        operation: &'static str,
        /// What the system said.
        errno: Errno,
    },
}

mod sealed {
    use super::{ClientMessage, ManagerMessage};

    /// Closes [`super::Message`].
    pub trait Sealed {}
    impl Sealed for ClientMessage {}
    impl Sealed for ManagerMessage {}
}

/// A message of either direction.
pub trait Message: Serialize + DeserializeOwned + sealed::Sealed {}

impl Message for ClientMessage {}
impl Message for ManagerMessage {}

/// Sends one message with its descriptors, whole or not at all.
///
/// # Errors
/// [`TransportError::TooLong`] or [`TransportError::Descriptors`] before anything is sent;
/// [`TransportError::TimedOut`] when the peer does not read; [`TransportError::Closed`].
pub fn send<M: Message>(
    socket: impl AsFd,
    message: &M,
    descriptors: &[BorrowedFd<'_>],
    timeout: Duration,
) -> Result<(), TransportError> {
    let body = serde_json::to_vec(message)?;
    if body.len() > MESSAGE_BYTES_MAX - HEADER_BYTES {
        return Err(TransportError::TooLong { max: MESSAGE_BYTES_MAX });
    }
    // Bounded by the check above and below.
    let header = MessageHeader {
        magic: MESSAGE_MAGIC,
        abi: ABI_VERSION,
        body_bytes: body.len() as u32,
        descriptors: descriptors.len() as u32,
    };
    send_raw(socket.as_fd(), &header, &body, descriptors, timeout)
}

fn send_raw(
    socket: BorrowedFd<'_>,
    header: &MessageHeader,
    body: &[u8],
    descriptors: &[BorrowedFd<'_>],
    timeout: Duration,
) -> Result<(), TransportError> {
    if descriptors.len() > MESSAGE_DESCRIPTORS_MAX {
        return Err(TransportError::Descriptors {
            found: descriptors.len(),
            announced: header.descriptors,
            max: MESSAGE_DESCRIPTORS_MAX,
        });
    }
    let deadline = Deadline::after(timeout);
    loop {
        let mut space = [MaybeUninit::uninit(); CONTROL_BYTES];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() {
            let fits = control.push(SendAncillaryMessage::ScmRights(descriptors));
            debug_assert!(fits, "control buffer holds MESSAGE_DESCRIPTORS_MAX descriptors");
        }
        let parts = [IoSlice::new(bytemuck::bytes_of(header)), IoSlice::new(body)];
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        match rustix::net::sendmsg(socket, &parts, &mut control, flags) {
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => deadline.wait(socket, PollFlags::OUT)?,
            Err(Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN) => {
                return Err(TransportError::Closed);
            }
            Err(Errno::MSGSIZE) => {
                return Err(TransportError::TooLong { max: MESSAGE_BYTES_MAX });
            }
            Err(errno) => return Err(TransportError::System { operation: "sendmsg", errno }),
        }
    }
}

/// Receives one message of a client, as the Manager does. A timeout of zero only looks.
///
/// # Errors
/// See [`TransportError`]. After anything but [`TransportError::TimedOut`] the connection is of no
/// further use.
pub fn receive_client(
    socket: impl AsFd,
    timeout: Duration,
) -> Result<(ClientMessage, Vec<OwnedFd>), TransportError> {
    receive(socket.as_fd(), timeout)
}

/// Receives one message of the Manager, as a client does. A timeout of zero only looks.
///
/// # Errors
/// As [`receive_client`].
pub fn receive_manager(
    socket: impl AsFd,
    timeout: Duration,
) -> Result<(ManagerMessage, Vec<OwnedFd>), TransportError> {
    receive(socket.as_fd(), timeout)
}

fn receive<M: Message>(
    socket: BorrowedFd<'_>,
    timeout: Duration,
) -> Result<(M, Vec<OwnedFd>), TransportError> {
    let mut datagram = vec![0; MESSAGE_BYTES_MAX];
    let (bytes, flags, descriptors) = receive_datagram(socket, &mut datagram, timeout)?;
    // From here on an early return drops, and so closes, what was received.
    if bytes == 0 && descriptors.is_empty() {
        return Err(TransportError::Closed);
    }
    let Some((header, body)) = datagram[..bytes].split_at_checked(HEADER_BYTES) else {
        return Err(TransportError::Length { found: bytes, announced: HEADER_BYTES as u64 });
    };
    let header: MessageHeader = bytemuck::pod_read_unaligned(header);
    if header.magic != MESSAGE_MAGIC {
        return Err(TransportError::Magic { found: header.magic });
    }
    if header.abi != ABI_VERSION {
        return Err(TransportError::AbiMismatch { ours: ABI_VERSION, theirs: header.abi });
    }
    if flags.contains(ReturnFlags::TRUNC) {
        return Err(TransportError::TooLong { max: MESSAGE_BYTES_MAX });
    }
    if header.body_bytes as usize != body.len() {
        let announced = HEADER_BYTES as u64 + u64::from(header.body_bytes);
        return Err(TransportError::Length { found: bytes, announced });
    }
    // The control buffer has room for alignment, in which one descriptor more may have come.
    if flags.contains(ReturnFlags::CTRUNC)
        || descriptors.len() > MESSAGE_DESCRIPTORS_MAX
        || header.descriptors as usize != descriptors.len()
    {
        return Err(TransportError::Descriptors {
            found: descriptors.len(),
            announced: header.descriptors,
            max: MESSAGE_DESCRIPTORS_MAX,
        });
    }
    Ok((serde_json::from_slice(body)?, descriptors))
}

fn receive_datagram(
    socket: BorrowedFd<'_>,
    datagram: &mut [u8],
    timeout: Duration,
) -> Result<(usize, ReturnFlags, Vec<OwnedFd>), TransportError> {
    let deadline = Deadline::after(timeout);
    loop {
        let mut space = [MaybeUninit::uninit(); CONTROL_BYTES];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let mut parts = [IoSliceMut::new(datagram)];
        match rustix::net::recvmsg(socket, &mut parts, &mut control, flags) {
            Ok(received) => {
                let mut descriptors = Vec::with_capacity(MESSAGE_DESCRIPTORS_MAX);
                for message in control.drain() {
                    if let RecvAncillaryMessage::ScmRights(rights) = message {
                        descriptors.extend(rights);
                    }
                }
                return Ok((received.bytes, received.flags, descriptors));
            }
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => deadline.wait(socket, PollFlags::IN)?,
            Err(Errno::CONNRESET | Errno::NOTCONN) => return Err(TransportError::Closed),
            Err(errno) => return Err(TransportError::System { operation: "recvmsg", errno }),
        }
    }
}

/// A point in time after which waiting ends.
struct Deadline {
    timeout: Duration,
    end: Option<Instant>,
}

impl Deadline {
    fn after(timeout: Duration) -> Self {
        // Only a duration beyond the clock's range has no end.
        Self { timeout, end: Instant::now().checked_add(timeout) }
    }

    /// Waits until the socket is ready for `events`, or hung up.
    fn wait(&self, socket: BorrowedFd<'_>, events: PollFlags) -> Result<(), TransportError> {
        let left = match self.end {
            Some(end) => end.saturating_duration_since(Instant::now()),
            None => Duration::from_secs(3600),
        };
        if left.is_zero() {
            return Err(TransportError::TimedOut(self.timeout));
        }
        let left = rustix::time::Timespec {
            tv_sec: left.as_secs() as i64,
            tv_nsec: left.subsec_nanos().into(),
        };
        match rustix::event::poll(&mut [PollFd::from_borrowed_fd(socket, events)], Some(&left)) {
            // Nothing ready: the caller tries once more and comes back to the check above.
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(TransportError::System { operation: "poll", errno }),
        }
    }
}
