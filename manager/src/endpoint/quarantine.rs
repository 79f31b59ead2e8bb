//! Who is refused or closed, and why: counted always, logged at a bounded rate.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use orbitkv_shm_protocol::bootstrap::message::Refusal;
use orbitkv_shm_protocol::bootstrap::peer::PeerCredentials;
use orbitkv_shm_protocol::ids::SessionId;

use crate::clock::nanos_of;
use crate::core::Nanos;

/// One line of each cause in this time; the next one says how many were left out.
pub const LOG_INTERVAL: Duration = Duration::from_secs(1);

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
    /// The Manager stops.
    #[error("the Manager stops")]
    Stopping,
}

impl CloseCause {
    /// Every label, in the order of [`index`](Self::index).
    pub const LABELS: [&'static str; 11] = [
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
        "stopping",
    ];

    /// Position in [`LABELS`](Self::LABELS).
    pub const fn index(self) -> usize {
        self as usize
    }

    /// Whether the peer did what no correct client does.
    const fn is_fault(self) -> bool {
        !matches!(self, Self::Disconnected | Self::PeerDied | Self::Stopping)
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
}

/// Counts, and logs without letting a peer fill the disk.
#[derive(Debug)]
pub(super) struct Quarantine {
    counters: Arc<EndpointCounters>,
    closed: [Limiter; CloseCause::LABELS.len()],
    refused: [Limiter; REFUSAL_LABELS.len()],
}

impl Quarantine {
    pub(super) fn new(counters: Arc<EndpointCounters>) -> Self {
        Self { counters, closed: Default::default(), refused: Default::default() }
    }

    pub(super) fn counters(&self) -> &EndpointCounters {
        &self.counters
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

    /// A connection ended.
    pub(super) fn closed(
        &mut self,
        now: Nanos,
        peer: Option<PeerCredentials>,
        session: Option<SessionId>,
        cause: CloseCause,
    ) {
        let index = cause.index();
        self.counters.closed[index].fetch_add(1, Ordering::Relaxed);
        if session.is_none() && !cause.is_fault() {
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

/// One line in [`LOG_INTERVAL`].
#[derive(Clone, Copy, Debug, Default)]
struct Limiter {
    /// When the next line may be written.
    next: Nanos,
    suppressed: u64,
}

impl Limiter {
    /// `Some(lines left out since the last one)` when this one may be written.
    fn admit(&mut self, now: Nanos) -> Option<u64> {
        if now < self.next {
            self.suppressed += 1;
            return None;
        }
        self.next = now.saturating_add(nanos_of(LOG_INTERVAL));
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
}
