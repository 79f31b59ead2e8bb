//! What goes back: answers of the reactor, and refusals.

use std::os::fd::OwnedFd;
use std::time::Duration;

use orbitkv_shm_protocol::bootstrap::message::{ManagerMessage, Refusal};
use orbitkv_shm_protocol::bootstrap::transport::{self, TransportError};
use ringbuf::traits::Consumer;

use super::super::quarantine::CloseCause;
use super::super::{Answer, EndpointReply, Importer, QuestionId};
use super::{QuestionKind, Server};
use crate::clock::nanos_of;

/// Longest text of a refusal, in characters: it may quote the peer.
const REFUSAL_CHARS_MAX: usize = 400;
/// Unread messages of a connection that is being closed: were they left, the kernel would drop
/// our last answer in favour of an error.
const UNREAD_MAX: usize = 4;

impl<I: Importer> Server<I> {
    pub(super) fn take_replies(&mut self) {
        while let Some(reply) = self.links.replies.try_pop() {
            match reply {
                EndpointReply::Answer { question, answer } => self.answer(question, answer),
                EndpointReply::Close { session, cause } => {
                    if let Some(index) = self.position(session) {
                        self.remove(index, cause);
                    }
                }
                EndpointReply::RegionEnded { session, region } => {
                    drop(region);
                    if let Some(index) = self.position(session) {
                        self.connections[index].dialogue.region_ended();
                    }
                }
                EndpointReply::SessionEnded { session, segments, regions, events } => {
                    drop((segments, regions, events));
                    self.sessions.retain(|open| *open != session);
                    // Only a session that was closed before ends; a connection left here would
                    // belong to nothing.
                    if let Some(index) = self.position(session) {
                        self.remove(index, CloseCause::RingFault);
                    }
                }
            }
        }
    }

    fn answer(&mut self, id: QuestionId, answer: Answer) {
        let asked = self
            .connections
            .iter()
            .position(|connection| connection.question.is_some_and(|question| question.id == id));
        // Nobody waits any more: the connection has closed, and the reactor was told.
        let Some(index) = asked else { return };
        let connection = &mut self.connections[index];
        let Some(question) = connection.question.take() else { return };
        if connection.dialogue.session().is_none() {
            let timeout = nanos_of(self.settings.handshake_timeout);
            connection.deadline = Some(self.clock.now().saturating_add(timeout));
        }
        let message = match (question.kind, answer) {
            (QuestionKind::Namespace, Answer::Scope { scope, page_bytes }) => {
                connection.dialogue.defined(scope, Some(page_bytes));
                ManagerMessage::Scope { scope: scope.0, page_bytes }
            }
            (QuestionKind::Set, Answer::Scope { scope, page_bytes }) => {
                connection.dialogue.defined(scope, None);
                ManagerMessage::Scope { scope: scope.0, page_bytes }
            }
            (QuestionKind::Region { page_bytes }, Answer::Region { region }) => {
                connection.dialogue.region_began();
                ManagerMessage::Region { region: region.0, page_bytes }
            }
            (QuestionKind::Events { count }, Answer::Events { first }) => {
                connection.dialogue.events_added(count);
                ManagerMessage::Events { first }
            }
            (QuestionKind::Evict, Answer::Evicted { pages, bytes, pages_kept, spill_drained }) => {
                ManagerMessage::Evicted { pages, bytes, pages_kept, spill_drained }
            }
            (_, Answer::Refused { refusal, message }) => {
                return self.refuse(index, refusal, message);
            }
            (_, answer) => {
                debug_assert!(false, "{answer:?} answers another question");
                tracing::error!("bug: an answer of the reactor does not fit its question");
                let text = "internal error: see the Manager's log".to_owned();
                return self.refuse(index, Refusal::NoResources, text);
            }
        };
        self.send(index, &message);
    }

    pub(super) fn send(&mut self, index: usize, message: &ManagerMessage) {
        self.connections[index].refused = None;
        let sent = transport::send(&self.connections[index].socket, message, &[], Duration::ZERO);
        self.after_send(index, sent);
    }

    pub(super) fn after_send(&mut self, index: usize, sent: Result<(), TransportError>) {
        match sent {
            Ok(()) => {}
            Err(TransportError::TimedOut(_)) => self.close(index, CloseCause::SlowReader),
            Err(TransportError::Closed) => self.close(index, CloseCause::Disconnected),
            Err(error) => {
                tracing::warn!("cannot answer a client: {error}");
                self.close(index, CloseCause::SocketFault);
            }
        }
    }

    /// Refuses one message. A peer that keeps sending what no correct client sends is closed.
    pub(super) fn refuse(&mut self, index: usize, refusal: Refusal, text: String) {
        let connection = &mut self.connections[index];
        if matches!(refusal, Refusal::BadMessage | Refusal::OutOfOrder) {
            connection.faults += 1;
        }
        if connection.faults >= self.settings.limits.bad_requests {
            return self.refuse_and_close(index, refusal, text, CloseCause::TooManyRefusals);
        }
        let sent = self.send_refusal(index, refusal, text);
        self.after_send(index, sent);
    }

    pub(super) fn refuse_and_close(
        &mut self,
        index: usize,
        refusal: Refusal,
        text: String,
        cause: CloseCause,
    ) {
        // The peer may be gone already: there is nothing to do about it.
        drop(self.send_refusal(index, refusal, text));
        let socket = &self.connections[index].socket;
        for _ in 0..UNREAD_MAX {
            let unread = transport::receive_client(socket, Duration::ZERO);
            if let Err(TransportError::TimedOut(_) | TransportError::Closed) = unread {
                break;
            }
        }
        self.close(index, cause);
    }

    fn send_refusal(
        &mut self,
        index: usize,
        refusal: Refusal,
        text: String,
    ) -> Result<(), TransportError> {
        let text = one_line(&text);
        self.connections[index].refused = Some(refusal);
        let connection = &self.connections[index];
        self.quarantine.refused(
            self.clock.now(),
            Some(connection.peer.credentials),
            connection.dialogue.session(),
            refusal,
            &text,
        );
        send_refusal(&connection.socket, refusal, text)
    }
}

pub(super) fn send_refusal(
    socket: &OwnedFd,
    refusal: Refusal,
    message: String,
) -> Result<(), TransportError> {
    transport::send(socket, &ManagerMessage::Refused { refusal, message }, &[], Duration::ZERO)
}

/// A text that may quote the peer, short and without control characters.
fn one_line(text: &str) -> String {
    let clean = |c: char| if c.is_control() { '\u{fffd}' } else { c };
    let mut line: String = text.chars().take(REFUSAL_CHARS_MAX).map(clean).collect();
    if text.chars().nth(REFUSAL_CHARS_MAX).is_some() {
        line.push('…');
    }
    line
}
