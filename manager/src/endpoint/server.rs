//! The endpoint thread's loop: poll, accept, read one message of each ready connection, answer.

mod answers;
mod orders;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use orbitkv_shm_protocol::bootstrap::message::Refusal;
use orbitkv_shm_protocol::bootstrap::peer::PeerError;
use orbitkv_shm_protocol::doorbell::ControlRinger;
use orbitkv_shm_protocol::ids::SessionId;
use orbitkv_shm_protocol::segment::DoneWords;
use ringbuf::traits::{Consumer, Observer, Producer};
use ringbuf::{HeapCons, HeapProd};
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::time::Timespec;

use super::listener::Listener;
use super::liveness::Peer;
use super::quarantine::{CloseCause, EndpointCounters, Quarantine};
use super::session::Dialogue;
use super::{EndpointEvent, EndpointReply, Importer, QuestionId, Settings, Shared};
use crate::clock::{Clock, nanos_of};
use crate::config::UNATTACHED_MAX;
use crate::core::Nanos;
use answers::send_refusal;

/// Connections accepted in one turn, so that a storm of them does not starve those that exist.
const ACCEPTS_PER_TURN: usize = 16;
/// How long accepting pauses when descriptors or memory ran out.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// What joins the thread with the rest.
pub(super) struct Links<R> {
    pub(super) events: HeapProd<EndpointEvent<R>>,
    pub(super) replies: HeapCons<EndpointReply<R>>,
    pub(super) reactor: ControlRinger,
    pub(super) shared: Arc<Shared>,
    pub(super) counters: Arc<EndpointCounters>,
}

struct Connection<M> {
    socket: OwnedFd,
    peer: Peer,
    dialogue: Dialogue<M>,
    /// Those of its session.
    done: Option<DoneWords>,
    /// What the reactor owes it. Meanwhile its socket is not read.
    question: Option<Question>,
    /// Refused whatever it says, then closed.
    barred: Option<(Refusal, String, CloseCause)>,
    /// When it must have spoken.
    deadline: Option<Nanos>,
    /// Messages that no correct client sends.
    faults: u32,
    /// Why its last message was refused, until one is accepted.
    refused: Option<Refusal>,
}

#[derive(Clone, Copy)]
struct Question {
    id: QuestionId,
    kind: QuestionKind,
}

#[derive(Clone, Copy)]
enum QuestionKind {
    Namespace,
    Set,
    Region { page_bytes: u64 },
    Events { count: u32 },
    Evict,
}

/// What a poll found on one connection.
#[derive(Clone, Copy)]
struct Ready {
    died: bool,
    readable: bool,
    hung_up: bool,
}

pub(super) struct Server<I: Importer> {
    settings: Settings,
    listener: Listener,
    importer: I,
    clock: Clock,
    links: Links<I::Region>,
    connections: Vec<Connection<I::Memory>>,
    /// Every session that the reactor has not ended, closed ones included.
    sessions: Vec<SessionId>,
    last_session: u32,
    last_question: u64,
    quarantine: Quarantine,
    stop_announced: bool,
    accept_again: Nanos,
}

impl<I: Importer> Server<I> {
    pub(super) fn new(
        settings: Settings,
        listener: Listener,
        importer: I,
        clock: Clock,
        links: Links<I::Region>,
    ) -> Self {
        let quarantine = Quarantine::new(Arc::clone(&links.counters));
        Self {
            settings,
            listener,
            importer,
            clock,
            links,
            connections: Vec::new(),
            sessions: Vec::new(),
            last_session: 0,
            last_question: 0,
            quarantine,
            stop_announced: false,
            accept_again: 0,
        }
    }

    /// Until the reactor's end is dropped.
    pub(super) fn run(mut self) {
        while !self.links.shared.ended.load(Ordering::Acquire) {
            let (ready, accept) = self.poll();
            self.links.shared.bell.drain();
            self.announce_stop();
            self.take_replies();
            self.serve(&ready);
            self.expire();
            if accept {
                self.accept();
            }
        }
        while !self.connections.is_empty() {
            self.close(0, CloseCause::Stopping);
        }
        // Segments and regions that came back last are unmapped here too.
        while self.links.replies.try_pop().is_some() {}
    }

    /// Waits for anything. Returns what each connection, by position, has, and whether somebody
    /// connects.
    fn poll(&self) -> (Vec<Ready>, bool) {
        let timeout = self.timeout();
        let accepting = self.clock.now() >= self.accept_again;
        let listen = if accepting { PollFlags::IN } else { PollFlags::empty() };
        let mut polled = vec![
            PollFd::from_borrowed_fd(self.links.shared.bell.as_fd(), PollFlags::IN),
            PollFd::new(&self.listener, listen),
        ];
        for connection in &self.connections {
            let events =
                if connection.question.is_some() { PollFlags::empty() } else { PollFlags::IN };
            polled.push(PollFd::from_borrowed_fd(connection.peer.pidfd(), PollFlags::IN));
            polled.push(PollFd::new(&connection.socket, events));
        }
        let timeout = timeout.map(|timeout| Timespec {
            tv_sec: timeout.as_secs().min(3600) as i64,
            tv_nsec: timeout.subsec_nanos().into(),
        });
        if let Err(errno) = rustix::event::poll(&mut polled, timeout.as_ref()) {
            if errno != Errno::INTR {
                tracing::error!(%errno, "poll of the endpoint failed");
                std::thread::sleep(ACCEPT_PAUSE);
            }
            let nothing = Ready { died: false, readable: false, hung_up: false };
            return (vec![nothing; self.connections.len()], false);
        }
        let gone = PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL;
        let ready = polled[2..]
            .chunks_exact(2)
            .map(|pair| Ready {
                died: !pair[0].revents().is_empty(),
                readable: pair[1].revents().contains(PollFlags::IN),
                hung_up: pair[1].revents().intersects(gone),
            })
            .collect();
        (ready, polled[1].revents().contains(PollFlags::IN))
    }

    /// Time to the next deadline; `None` without one.
    fn timeout(&self) -> Option<Duration> {
        let now = self.clock.now();
        let paused = (now < self.accept_again).then_some(self.accept_again);
        let next = self.connections.iter().filter_map(|connection| connection.deadline);
        let next = next.chain(paused).min()?;
        // One more millisecond: the kernel's timer must not fire just before the deadline.
        Some(Duration::from_nanos(next.saturating_sub(now)) + Duration::from_millis(1))
    }

    fn announce_stop(&mut self) {
        if !self.stop_announced && self.links.shared.stop_asked.load(Ordering::Acquire) {
            self.stop_announced = true;
            self.tell(EndpointEvent::Stop);
        }
    }

    fn serve(&mut self, ready: &[Ready]) {
        // From the back, so that a removal moves none that is still to come. Replies may have
        // closed connections since the poll: those that moved are looked at next time.
        let polled = ready.len().min(self.connections.len());
        for index in (0..polled).rev() {
            let Ready { died, readable, hung_up } = ready[index];
            if died && self.connections[index].peer.is_dead() {
                self.close(index, CloseCause::PeerDied);
            } else if readable && self.connections[index].question.is_none() {
                self.read(index);
            } else if hung_up && self.is_hung_up(index) {
                self.close(index, CloseCause::Disconnected);
            }
        }
    }

    /// Asks again: positions may have moved since the poll.
    fn is_hung_up(&self, index: usize) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut polled = [PollFd::new(&self.connections[index].socket, PollFlags::empty())];
        rustix::event::poll(&mut polled, Some(&now)).is_ok_and(|ready| ready > 0)
    }

    fn expire(&mut self) {
        let now = self.clock.now();
        for index in (0..self.connections.len()).rev() {
            if self.connections[index].deadline.is_some_and(|deadline| deadline <= now) {
                self.close(index, CloseCause::Silent);
            }
        }
    }

    fn accept(&mut self) {
        for _ in 0..ACCEPTS_PER_TURN {
            match self.listener.accept() {
                Ok(Some(socket)) => self.welcome_in(socket),
                Ok(None) => return,
                Err(errno) => {
                    // Without a pause a full descriptor table would make this loop spin.
                    let now = self.clock.now();
                    self.quarantine.cannot_accept(now, errno);
                    self.accept_again = now.saturating_add(nanos_of(ACCEPT_PAUSE));
                    return;
                }
            }
        }
    }

    fn welcome_in(&mut self, socket: OwnedFd) {
        self.quarantine.counters().connections.fetch_add(1, Ordering::Relaxed);
        let now = self.clock.now();
        let peer = match Peer::of(&socket) {
            Ok(peer) => peer,
            Err(error) => {
                let (refusal, cause) = match error {
                    // Ours to have: not a word about who it is.
                    PeerError::System {
                        errno: Errno::MFILE | Errno::NFILE | Errno::NOMEM, ..
                    } => (Refusal::NoResources, CloseCause::SocketFault),
                    _ => (Refusal::NotAllowed, CloseCause::NotAllowed),
                };
                let text = error.to_string();
                self.quarantine.refused(now, None, None, refusal, &text);
                self.quarantine.closed(now, None, None, None, cause);
                drop(send_refusal(&socket, refusal, text));
                return;
            }
        };
        let credentials = Some(peer.credentials);
        let unattached = self.connections.iter().filter(|c| c.dialogue.session().is_none()).count();
        if unattached >= UNATTACHED_MAX as usize {
            let text = format!("{UNATTACHED_MAX} connections wait to attach: try again");
            self.quarantine.refused(now, credentials, None, Refusal::LimitReached, &text);
            self.quarantine.closed(now, credentials, None, None, CloseCause::Crowded);
            drop(send_refusal(&socket, Refusal::LimitReached, text));
            return;
        }
        let barred = (!self.settings.access.allows(&peer)).then(|| {
            let (uid, gid) = (peer.credentials.uid, peer.credentials.gid);
            let text = format!(
                "uid {uid} (gid {gid}) may not attach: start the Manager with --allow-uid {uid} or \
                 --allow-gid {gid}"
            );
            (Refusal::NotAllowed, text, CloseCause::NotAllowed)
        });
        self.connections.push(Connection {
            socket,
            peer,
            dialogue: Dialogue::default(),
            done: None,
            question: None,
            barred,
            deadline: Some(now.saturating_add(nanos_of(self.settings.handshake_timeout))),
            faults: 0,
            refused: None,
        });
    }

    /// Room for one more event beside the `Closed` of every session (the next one included) and
    /// the `Stop`.
    fn has_room(&self) -> bool {
        self.links.events.vacant_len() > self.sessions.len() + 2
    }

    fn tell(&mut self, event: EndpointEvent<I::Region>) {
        if self.links.events.try_push(event).is_err() {
            // `has_room` keeps a slot for every event that cannot be refused.
            debug_assert!(false, "the event queue overflowed");
            tracing::error!("bug: an event for the reactor was lost");
        }
        self.links.reactor.ring();
    }

    /// Closes a connection and tells the reactor when it was a session.
    fn close(&mut self, index: usize, cause: CloseCause) {
        if let Some(session) = self.remove(index, cause) {
            self.tell(EndpointEvent::Closed { session, cause });
        }
    }

    fn remove(&mut self, index: usize, cause: CloseCause) -> Option<SessionId> {
        let connection = self.connections.remove(index);
        let session = connection.dialogue.session();
        let peer = Some(connection.peer.credentials);
        let refused = connection.refused;
        self.quarantine.closed(self.clock.now(), peer, session, refused, cause);
        session
    }

    fn position(&self, session: SessionId) -> Option<usize> {
        self.connections
            .iter()
            .position(|connection| connection.dialogue.session() == Some(session))
    }
}
