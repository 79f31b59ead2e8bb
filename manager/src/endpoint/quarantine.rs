//! Who is refused or closed, and why: counted always, logged at a bounded rate.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use orbitkv_shm_protocol::bootstrap::message::Refusal;
use orbitkv_shm_protocol::bootstrap::peer::PeerCredentials;
use orbitkv_shm_protocol::ids::SessionId;
use orbitkv_shm_protocol::telemetry::RefuseReason;
use rustix::io::Errno;

use crate::clock::nanos_of;
use crate::core::Nanos;

/// Lines that peers cause are bounded in this time; the next one says how many were left out.
pub const LOG_INTERVAL: Duration = Duration::from_secs(1);
/// Sessions that come, and that go, in [`LOG_INTERVAL`] with a line of their own.
const SESSION_LINES_MAX: u32 = 16;

/// Why a connection, and with it its session, ended.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, thiserror::Error)]
pub enum CloseCause {
    /// No process holds the other end any more: the client detached, or died.
    #[error("the peer closed its socket")]
    Disconnected,
    /// The process that connected has ended.
    #[error("the peer process ended")]
    PeerDied,
    /// No first message in time.
    #[error("no message in time")]
    Silent,
    /// The user may not attach; told so, then closed.
    #[error("the user is not allowed")]
    NotAllowed,
    /// Too many connections that have not attached.
    #[error("too many connections wait to attach")]
    Crowded,
    /// A datagram that is no message, or of another ABI version.
    #[error("it sent no message of this protocol")]
    BadFraming,
    /// Refused as often as the configuration allows.
    #[error("too many of its messages were refused")]
    TooManyRefusals,
    /// It does not read our answers.
    #[error("it does not read its answers")]
    SlowReader,
    /// It broke the rules of its rings; the reactor says how.
    #[error("it broke the ring protocol")]
    RingFault,
    /// The socket failed.
    #[error("the socket failed")]
    SocketFault,
    /// Nothing reaches the memory that it registered any more; the reactor says why.
    #[error("its gpu is lost to the Manager")]
    DeviceLost,
    /// The Manager stops.
    #[error("the Manager stops")]
    Stopping,
}

impl CloseCause {
    /// Every label, in the order of [`index`](Self::index).
    pub const LABELS: [&'static str; 12] = [
        "disconnected",
        "peer_died",
        "silent",
        "not_allowed",
        "crowded",
        "bad_framing",
        "too_many_refusals",
        "slow_reader",
        "ring_fault",
        "socket_fault",
        "device_lost",
        "stopping",
    ];

    /// Position in [`LABELS`](Self::LABELS).
    pub const fn index(self) -> usize {
        self as usize
    }

    /// Why a connection that ends so was turned away, if it never became a session and none of
    /// its messages was refused before. `None`: it left by itself, or with the Manager.
    const fn turned_away(self) -> Option<RefuseReason> {
        match self {
            Self::Disconnected | Self::PeerDied | Self::DeviceLost | Self::Stopping => None,
            Self::NotAllowed => Some(RefuseReason::NotAllowed),
            Self::Crowded => Some(RefuseReason::LimitReached),
            Self::SocketFault => Some(RefuseReason::NoResources),
            _ => Some(RefuseReason::BadMessage),
        }
    }

    /// Whether the peer did what no correct client does.
    const fn is_fault(self) -> bool {
        !matches!(self, Self::Disconnected | Self::PeerDied | Self::DeviceLost | Self::Stopping)
    }
}

/// Labels of refused messages, in the order of [`refusal_index`].
pub const REFUSAL_LABELS: [&str; 10] = [
    "abi_mismatch",
    "not_allowed",
    "limit_reached",
    "bad_message",
    "out_of_order",
    "layout_conflict",
    "unsupported_memory",
    "too_large",
    "no_resources",
    "draining",
];

/// Position in [`REFUSAL_LABELS`].
pub const fn refusal_index(refusal: Refusal) -> usize {
    refusal as usize
}

/// Totals since the start, for telemetry. Written by the endpoint thread only.
#[derive(Debug, Default)]
pub struct EndpointCounters {
    /// Connections accepted from the kernel.
    pub connections: AtomicU64,
    /// Sessions made.
    pub sessions: AtomicU64,
    /// Connections ended, by [`CloseCause::LABELS`].
    pub closed: [AtomicU64; CloseCause::LABELS.len()],
    /// Messages refused, by [`REFUSAL_LABELS`].
    pub refused: [AtomicU64; REFUSAL_LABELS.len()],
    /// Connections that ended without ever having been a session, by [`RefuseReason`]. Those that
    /// left by themselves are not among them.
    pub turned_away: [AtomicU64; RefuseReason::ALL.len()],
}

/// Counts, and logs without letting a peer fill the disk.
#[derive(Debug)]
pub(super) struct Quarantine {
    counters: Arc<EndpointCounters>,
    closed: [Limiter; CloseCause::LABELS.len()],
    refused: [Limiter; REFUSAL_LABELS.len()],
    attached: Limiter,
    not_accepted: Limiter,
}

impl Quarantine {
    pub(super) fn new(counters: Arc<EndpointCounters>) -> Self {
        let mut closed: [Limiter; CloseCause::LABELS.len()] = Default::default();
        for cause in [CloseCause::Disconnected, CloseCause::PeerDied, CloseCause::Stopping] {
            closed[cause.index()] = Limiter::of(SESSION_LINES_MAX);
        }
        let attached = Limiter::of(SESSION_LINES_MAX);
        let not_accepted = Limiter::default();
        Self { counters, closed, refused: Default::default(), attached, not_accepted }
    }

    pub(super) fn counters(&self) -> &EndpointCounters {
        &self.counters
    }

    /// The kernel gives no more connections for now.
    pub(super) fn cannot_accept(&mut self, now: Nanos, errno: Errno) {
        if let Some(suppressed) = self.not_accepted.admit(now) {
            tracing::warn!(
                %errno,
                suppressed,
                "cannot accept connections for a moment: they wait; the limit of open descriptors \
                 (ulimit -n, LimitNOFILE=) may be too low"
            );
        }
    }

    /// A connection became a session.
    pub(super) fn attached(&mut self, now: Nanos, peer: PeerCredentials, session: SessionId) {
        self.counters.sessions.fetch_add(1, Ordering::Relaxed);
        if let Some(suppressed) = self.attached.admit(now) {
            let (pid, uid) = (peer.pid, peer.uid);
            tracing::info!(session = session.0, pid, uid, suppressed, "session attached");
        }
    }

    /// A message was refused; the connection may go on.
    pub(super) fn refused(
        &mut self,
        now: Nanos,
        peer: Option<PeerCredentials>,
        session: Option<SessionId>,
        refusal: Refusal,
        message: &str,
    ) {
        let index = refusal_index(refusal);
        self.counters.refused[index].fetch_add(1, Ordering::Relaxed);
        if let Some(suppressed) = self.refused[index].admit(now) {
            let (pid, uid) = who(peer);
            let session = session.map(|session| session.0);
            let cause = REFUSAL_LABELS[index];
            tracing::warn!(pid, uid, session, cause, suppressed, "refused a message: {message}");
        }
    }

    /// A connection ended; `refused` is why its last message was, if it was.
    pub(super) fn closed(
        &mut self,
        now: Nanos,
        peer: Option<PeerCredentials>,
        session: Option<SessionId>,
        refused: Option<Refusal>,
        cause: CloseCause,
    ) {
        let index = cause.index();
        self.counters.closed[index].fetch_add(1, Ordering::Relaxed);
        if session.is_none() {
            let reason = refused.map(RefuseReason::of).or_else(|| cause.turned_away());
            if let Some(reason) = reason {
                self.counters.turned_away[reason as usize].fetch_add(1, Ordering::Relaxed);
            }
            if !cause.is_fault() {
                return;
            }
        }
        // What a peer did to its rings the reactor has said already.
        if cause == CloseCause::RingFault {
            return;
        }
        let Some(suppressed) = self.closed[index].admit(now) else { return };
        let (pid, uid) = who(peer);
        let session = session.map(|session| session.0);
        if cause.is_fault() {
            tracing::warn!(pid, uid, session, suppressed, "closed a connection: {cause}");
        } else {
            tracing::info!(pid, uid, session, suppressed, "session ended: {cause}");
        }
    }
}

fn who(peer: Option<PeerCredentials>) -> (Option<u32>, Option<u32>) {
    (peer.map(|peer| peer.pid), peer.map(|peer| peer.uid))
}

/// So many lines in [`LOG_INTERVAL`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limiter {
    lines_max: u32,
    /// Lines in the interval that runs.
    lines: u32,
    /// When it ends.
    next: Nanos,
    suppressed: u64,
}

impl Default for Limiter {
    /// One line.
    fn default() -> Self {
        Self::of(1)
    }
}

impl Limiter {
    /// At most `lines_max` lines.
    pub(crate) const fn of(lines_max: u32) -> Self {
        Self { lines_max, lines: 0, next: 0, suppressed: 0 }
    }

    /// `Some(lines left out since the last one)` when this one may be written.
    pub(crate) fn admit(&mut self, now: Nanos) -> Option<u64> {
        if now >= self.next {
            self.next = now.saturating_add(nanos_of(LOG_INTERVAL));
            self.lines = 0;
        }
        if self.lines >= self.lines_max {
            self.suppressed += 1;
            return None;
        }
        self.lines += 1;
        Some(std::mem::take(&mut self.suppressed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_in_the_order_of_their_causes() {
        assert_eq!(CloseCause::LABELS[CloseCause::Disconnected.index()], "disconnected");
        assert_eq!(CloseCause::LABELS[CloseCause::RingFault.index()], "ring_fault");
        assert_eq!(CloseCause::Stopping.index() + 1, CloseCause::LABELS.len());
        // The wire's own names, so that metrics and messages speak of the same thing.
        for refusal in [
            Refusal::AbiMismatch,
            Refusal::NotAllowed,
            Refusal::LimitReached,
            Refusal::BadMessage,
            Refusal::OutOfOrder,
            Refusal::LayoutConflict,
            Refusal::UnsupportedMemory,
            Refusal::TooLarge,
            Refusal::NoResources,
            Refusal::Draining,
        ] {
            let wire = serde_json::to_string(&refusal).unwrap();
            assert_eq!(wire, format!("{:?}", REFUSAL_LABELS[refusal_index(refusal)]));
        }
    }

    #[test]
    fn a_flood_is_counted_in_full_and_logged_once_an_interval() {
        let counters = Arc::new(EndpointCounters::default());
        let mut quarantine = Quarantine::new(Arc::clone(&counters));
        for _ in 0..1000 {
            quarantine.refused(5, None, None, Refusal::BadMessage, "");
        }
        let index = refusal_index(Refusal::BadMessage);
        assert_eq!(counters.refused[index].load(Ordering::Relaxed), 1000);
        assert_eq!(quarantine.refused[index].suppressed, 999);
        let later = 5 + nanos_of(LOG_INTERVAL);
        assert_eq!(quarantine.refused[index].admit(later - 1), None);
        assert_eq!(quarantine.refused[index].admit(later), Some(1000));
        assert_eq!(quarantine.refused[index].admit(2 * later), Some(0));
    }

    #[test]
    fn a_burst_is_logged_up_to_its_bound() {
        let mut limiter = Limiter::of(3);
        let admitted: Vec<_> = (0..5).map(|now| limiter.admit(now)).collect();
        assert_eq!(admitted, [Some(0), Some(0), Some(0), None, None]);
        assert_eq!(limiter.admit(nanos_of(LOG_INTERVAL)), Some(2));
    }

    /// Goal: a connection that never became a session is counted by what it was told last, else by
    /// why it was closed, and not at all when it left by itself.
    #[test]
    fn who_is_turned_away_is_counted_once() {
        let counters = Arc::new(EndpointCounters::default());
        let mut quarantine = Quarantine::new(Arc::clone(&counters));
        let session = Some(SessionId(1));
        for (session, refused, cause) in [
            (None, Some(Refusal::LimitReached), CloseCause::Disconnected),
            (None, None, CloseCause::Disconnected),
            (None, None, CloseCause::Silent),
            (None, Some(Refusal::OutOfOrder), CloseCause::TooManyRefusals),
            (session, Some(Refusal::BadMessage), CloseCause::TooManyRefusals),
            (session, None, CloseCause::SlowReader),
        ] {
            quarantine.closed(5, None, session, refused, cause);
        }
        let counted: Vec<_> =
            counters.turned_away.iter().map(|count| count.load(Ordering::Relaxed)).collect();
        let mut expected = vec![0; RefuseReason::ALL.len()];
        expected[RefuseReason::LimitReached as usize] = 1;
        expected[RefuseReason::BadMessage as usize] = 2;
        assert_eq!(counted, expected);
    }
}
