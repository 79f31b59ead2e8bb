//! Attaching: find the socket, agree on sizes, check and map the segments.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use orbitkv_shm_protocol::bootstrap::message::{ClientMessage, ManagerMessage, Welcome};
use orbitkv_shm_protocol::bootstrap::peer::{self, PeerError};
use orbitkv_shm_protocol::bootstrap::transport::{self, TransportError};
use orbitkv_shm_protocol::ids::{EngineId, Epoch, SessionId};
use orbitkv_shm_protocol::layout::{Geometry, LAYOUT_FINGERPRINT};
use orbitkv_shm_protocol::memory::ForkGuard;
use orbitkv_shm_protocol::segment::{self, Expected};
use rustix::io::Errno;
use rustix::net::sockopt::{self, Timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::Pid;
use rustix::rand::GetRandomFlags;

use crate::client::{Client, Limits, Parts};
use crate::control::Control;
use crate::error::{ConnectError, message_of};
use crate::handles::Tag;
use crate::memory::Nonce;
use crate::process::ProcessBound;
use crate::session::Session;

/// Longest wait for an answer on the bootstrap socket unless the engine asks otherwise.
const TIMEOUT_DEFAULT: Duration = Duration::from_secs(10);
/// Shortest timeout that the kernel's connect can be given.
const TIMEOUT_MIN: Duration = Duration::from_millis(1);
/// Longest timeout: a day. More would not fit every kernel interface.
const TIMEOUT_MAX: Duration = Duration::from_secs(86_400);

/// How to attach: a builder that [`connect`](Self::connect) ends.
#[derive(Clone, Debug)]
#[must_use]
pub struct Connect {
    socket: PathBuf,
    engine: Option<EngineId>,
    geometry: Geometry,
    timeout: Duration,
}

impl Connect {
    /// Attach to the Manager that listens on `socket`;
    /// [`socket_default_path`](crate::socket_default_path) is where it does unless told otherwise.
    pub fn new(socket: impl Into<PathBuf>) -> Self {
        Self {
            socket: socket.into(),
            engine: None,
            geometry: Geometry::default(),
            timeout: TIMEOUT_DEFAULT,
        }
    }

    /// Joins the attachment group of `engine`: its sessions share leases. Without it the session
    /// is a group of its own.
    pub fn engine_id(mut self, engine: EngineId) -> Self {
        self.engine = Some(engine);
        self
    }

    /// Operations that can be outstanding: a power of two, 64 to 4096; 256 unless set. Each costs
    /// 192 bytes of shared memory and its done words.
    pub fn ring_capacity(mut self, records: u32) -> Self {
        self.geometry.ring_capacity = records;
        self
    }

    /// Pages that all outstanding operations together can name: 1,024 to 1,048,576; 65,536 unless
    /// set. Each costs 64 bytes of shared memory.
    pub fn page_entries(mut self, entries: u32) -> Self {
        self.geometry.page_entries = entries;
        self
    }

    /// Done words of one operation: 1 to 256; 1 unless set. Restores by layer need one for each
    /// layer.
    pub fn done_words(mut self, words: u32) -> Self {
        self.geometry.done_words = words;
        self
    }

    /// Longest wait for each answer on the bootstrap socket, while connecting and for every later
    /// registration: 1 ms to one day; 10 s unless set.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout.clamp(TIMEOUT_MIN, TIMEOUT_MAX);
        self
    }

    /// Attaches. Waits for the Manager's answer, not for a Manager to appear.
    ///
    /// # Errors
    /// See [`ConnectError`]; nothing stays open or mapped.
    pub fn connect(&self) -> Result<Client, ConnectError> {
        if !self.geometry.is_valid() {
            return Err(ConnectError::BadGeometry { geometry: self.geometry });
        }
        let end = Instant::now() + self.timeout;
        let engine = self.engine.map_or_else(engine_id_random, Ok)?;
        let nonce = u64::from_ne_bytes(random()?).max(1);
        let guard = ForkGuard::new().map_err(ConnectError::System)?;
        let socket = self.open_socket()?;
        let pid = peer::peer_credentials(&socket)?.pid;
        let pidfd = match peer::peer_pidfd(&socket) {
            Ok(pidfd) => Some(pidfd),
            // Another process-id namespace on an old kernel: a hang-up has to do.
            Err(PeerError::Invisible) => None,
            Err(error) => return Err(error.into()),
        };
        let left = || end.saturating_duration_since(Instant::now());
        transport::send(&socket, &self.hello(engine), &[], left())
            .map_err(|error| self.refine(error))?;
        let (answer, descriptors) =
            transport::receive_manager(&socket, left()).map_err(|error| self.refine(error))?;
        let welcome = match answer {
            ManagerMessage::Welcome(welcome) => welcome,
            ManagerMessage::Refused { refusal, message } => {
                return Err(ConnectError::Refused { refusal, message: message_of(&message) });
            }
            _ => return Err(bad_answer("type", 0)),
        };
        let expected = self.check_welcome(&welcome)?;
        let side = match <[OwnedFd; 2]>::try_from(descriptors) {
            Ok([submission, completion]) => segment::attach(submission, completion, expected)?,
            Err(others) => return Err(bad_answer("descriptors", others.len() as u64)),
        };
        let tag = Tag { session: expected.session, epoch: expected.epoch };
        let limits = limits(&welcome);
        let session = Session::new(tag, engine, limits.geometry(), side);
        let pid = if pid == 0 { welcome.manager_pid } else { pid };
        let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
        Ok(Client::new(Parts {
            bound: ProcessBound::new(guard, session),
            control: Control::new(socket, pidfd, pid, self.timeout),
            limits,
            tag,
            engine,
            nonce: Nonce::new(nonce),
        }))
    }

    fn open_socket(&self) -> Result<OwnedFd, ConnectError> {
        let path = &self.socket;
        let refused =
            |action| move |errno| ConnectError::Environment { action, path: path.clone(), errno };
        let address = SocketAddrUnix::new(path.as_path()).map_err(refused("name a socket"))?;
        let socket = rustix::net::socket_with(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )
        .map_err(refused("make a socket for"))?;
        // A full backlog makes connect wait: this bounds it.
        sockopt::set_socket_timeout(&socket, Timeout::Send, Some(self.timeout))
            .map_err(refused("set a timeout for"))?;
        match rustix::io::retry_on_intr(|| rustix::net::connect(&socket, &address)) {
            Ok(()) => Ok(socket),
            Err(errno) => Err(connect_error(path, errno, self.timeout)),
        }
    }

    fn hello(&self, engine: EngineId) -> ClientMessage {
        ClientMessage::Hello {
            layout_fingerprint: LAYOUT_FINGERPRINT,
            engine_id: engine.to_string(),
            ring_capacity: self.geometry.ring_capacity,
            page_entries: self.geometry.page_entries,
            done_words: self.geometry.done_words,
        }
    }

    fn refine(&self, error: TransportError) -> ConnectError {
        match error {
            TransportError::AbiMismatch { ours, theirs } => {
                ConnectError::AbiMismatch { ours, theirs }
            }
            TransportError::TimedOut(_) => {
                ConnectError::Timeout { timeout_ms: self.timeout.as_millis() as u64 }
            }
            error => ConnectError::Transport(error),
        }
    }

    /// Compares the answer with what was asked for; the segments are compared with it next.
    fn check_welcome(&self, welcome: &Welcome) -> Result<Expected, ConnectError> {
        if welcome.layout_fingerprint != LAYOUT_FINGERPRINT {
            return Err(ConnectError::LayoutMismatch {
                ours: LAYOUT_FINGERPRINT,
                theirs: welcome.layout_fingerprint,
            });
        }
        let asked = &self.geometry;
        for (field, granted, asked) in [
            ("ring_capacity", welcome.ring_capacity, asked.ring_capacity),
            ("page_entries", welcome.page_entries, asked.page_entries),
            ("done_words", welcome.done_words, asked.done_words),
        ] {
            if granted != asked {
                return Err(bad_answer(field, granted.into()));
            }
        }
        if welcome.epoch == 0 {
            return Err(bad_answer("epoch", 0));
        }
        Ok(Expected {
            geometry: self.geometry,
            session: SessionId(welcome.session),
            epoch: Epoch(welcome.epoch),
            submission_bytes: welcome.submission_bytes,
            completion_bytes: welcome.completion_bytes,
        })
    }
}

/// A new random attachment group: an engine's scheduler draws one and hands it to its workers.
///
/// # Errors
/// [`ConnectError::System`] when the kernel has no random numbers.
pub fn engine_id_random() -> Result<EngineId, ConnectError> {
    random().map(EngineId)
}

fn random<const N: usize>() -> Result<[u8; N], ConnectError> {
    let mut bytes = [0; N];
    let got = rustix::io::retry_on_intr(|| {
        rustix::rand::getrandom(&mut bytes[..], GetRandomFlags::empty())
    })
    .map_err(ConnectError::System)?;
    if got == N { Ok(bytes) } else { Err(ConnectError::System(Errno::IO)) }
}

fn connect_error(path: &Path, errno: Errno, timeout: Duration) -> ConnectError {
    let path = path.to_owned();
    match errno {
        Errno::NOENT | Errno::NOTDIR => ConnectError::NoSocket { path },
        Errno::CONNREFUSED => ConnectError::NotListening { path },
        Errno::ACCESS | Errno::PERM => ConnectError::NotPermitted { path },
        Errno::AGAIN => ConnectError::Timeout { timeout_ms: timeout.as_millis() as u64 },
        errno => ConnectError::Environment { action: "connect to", path, errno },
    }
}

fn bad_answer(field: &'static str, value: u64) -> ConnectError {
    ConnectError::BadAnswer { field, value }
}

fn limits(welcome: &Welcome) -> Limits {
    Limits {
        ring_capacity: welcome.ring_capacity,
        page_entries: welcome.page_entries,
        done_words: welcome.done_words,
        page_bytes_max: welcome.page_bytes_max,
        operation_timeout: Duration::from_millis(welcome.operation_timeout_ms),
        lease_ttl: Duration::from_millis(welcome.lease_ttl_ms),
        query_budget_bytes: welcome.query_budget_bytes,
        session_budget_bytes: welcome.session_budget_bytes,
        spin_window: Duration::from_nanos(welcome.spin_window_ns),
    }
}
