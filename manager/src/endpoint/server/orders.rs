//! One message in: checked by the dialogue, then carried out here or asked of the reactor.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use orbitkv_shm_protocol::bootstrap::message::{ClientMessage, ManagerMessage, Refusal, Welcome};
use orbitkv_shm_protocol::bootstrap::transport::{self, TransportError};
use orbitkv_shm_protocol::ids::{EngineId, ScopeId, SessionId};
use orbitkv_shm_protocol::layout::{Geometry, LAYOUT_FINGERPRINT};
use orbitkv_shm_protocol::segment;

use super::super::quarantine::CloseCause;
use super::super::session::{Order, Rules};
use super::super::{EndpointEvent, Importer, QuestionId, SessionReady};
use super::{Question, QuestionKind, Server};
use crate::clock::nanos_of;

impl<I: Importer> Server<I> {
    pub(super) fn read(&mut self, index: usize) {
        let received = transport::receive_client(&self.connections[index].socket, Duration::ZERO);
        if let Some((refusal, text, cause)) = self.connections[index].barred.take() {
            self.refuse_and_close(index, refusal, text, cause);
            return;
        }
        match received {
            Ok((message, descriptors)) => self.handle(index, message, descriptors),
            Err(TransportError::TimedOut(_)) => {}
            Err(TransportError::Closed) => self.close(index, CloseCause::Disconnected),
            Err(TransportError::System { .. }) => self.close(index, CloseCause::SocketFault),
            Err(error) => {
                let refusal = match error {
                    TransportError::AbiMismatch { .. } => Refusal::AbiMismatch,
                    _ => Refusal::BadMessage,
                };
                self.refuse_and_close(index, refusal, error.to_string(), CloseCause::BadFraming);
            }
        }
    }

    fn handle(&mut self, index: usize, message: ClientMessage, descriptors: Vec<OwnedFd>) {
        let connection = &self.connections[index];
        let rules = Rules {
            limits: &self.settings.limits,
            dram_bytes: self.settings.dram_bytes,
            sessions: self.sessions.len() as u32,
            draining: self.stop_announced,
            uid: connection.peer.credentials.uid,
            is_owner: self.settings.access.is_owner(&connection.peer),
        };
        match connection.dialogue.check(message, descriptors, &rules) {
            Ok(order) => self.carry_out(index, order),
            Err(refused) => self.refuse(index, refused.refusal(), refused.to_string()),
        }
    }

    fn carry_out(&mut self, index: usize, order: Order) {
        let session = self.connections[index].dialogue.session();
        match order {
            Order::Attach { engine, geometry } => self.attach(index, engine, geometry),
            Order::Import { spec, descriptor } => {
                let connection = &mut self.connections[index];
                let Some(done) = &connection.done else { return };
                match self.importer.import(&spec, descriptor, &connection.peer, done) {
                    Ok(memory) => {
                        let memory = connection.dialogue.imported(Arc::new(memory));
                        self.send(index, &ManagerMessage::Memory { memory });
                    }
                    Err(error) => self.refuse(index, error.refusal, error.cause.to_string()),
                }
            }
            Order::Release { memory } => {
                self.connections[index].dialogue.released(memory);
                self.send(index, &ManagerMessage::MemoryReleased);
            }
            Order::LayOut { spec, page_bytes } => {
                let Some(session) = session else { return };
                let memories = self.connections[index].dialogue.memories();
                match self.importer.lay_out(memories, &spec, page_bytes) {
                    Ok(region) => {
                        self.ask(index, QuestionKind::Region { page_bytes }, |question| {
                            EndpointEvent::RegisterRegion {
                                question,
                                session,
                                scope: ScopeId(spec.scope),
                                pages: spec.pages,
                                region: Arc::new(region),
                            }
                        });
                    }
                    Err(error) => self.refuse(index, error.refusal, error.cause.to_string()),
                }
            }
            Order::ImportEvents { gpu, handles } => {
                let Some(session) = session else { return };
                match self.importer.import_events(gpu, &handles, &self.connections[index].peer) {
                    Ok(events) => {
                        let count = events.len() as u32;
                        self.ask(index, QuestionKind::Events { count }, |question| {
                            EndpointEvent::RegisterEvents { question, session, events }
                        });
                    }
                    Err(error) => self.refuse(index, error.refusal, error.cause.to_string()),
                }
            }
            Order::DefineNamespace(spec) => {
                let Some(session) = session else { return };
                self.ask(index, QuestionKind::Namespace, |question| {
                    EndpointEvent::DefineNamespace { question, session, spec }
                });
            }
            Order::DefineSet(members) => {
                let Some(session) = session else { return };
                self.ask(index, QuestionKind::Set, |question| EndpointEvent::DefineSet {
                    question,
                    session,
                    members,
                });
            }
            Order::Evict { timeout } => {
                self.ask(index, QuestionKind::Evict, |question| EndpointEvent::Evict {
                    question,
                    timeout,
                });
            }
        }
    }

    fn attach(&mut self, index: usize, engine: EngineId, geometry: Geometry) {
        let Some(number) = self.last_session.checked_add(1) else {
            let text = "session ids are used up: restart the Manager".to_owned();
            return self.refuse(index, Refusal::NoResources, text);
        };
        if !self.has_room() {
            return self.refuse(index, Refusal::NoResources, busy());
        }
        let session = SessionId(number);
        let (segments, descriptors) = match segment::create(geometry, session, self.settings.epoch)
        {
            Ok(created) => created,
            Err(error) => return self.refuse(index, Refusal::NoResources, error.to_string()),
        };
        self.last_session = number;
        let connection = &mut self.connections[index];
        connection.dialogue.attached(session, geometry);
        connection.done = Some(segments.done.clone());
        connection.deadline = None;
        let peer = connection.peer.credentials;
        let welcome = ManagerMessage::Welcome(Welcome {
            layout_fingerprint: LAYOUT_FINGERPRINT,
            epoch: self.settings.epoch.0,
            session: session.0,
            ring_capacity: geometry.ring_capacity,
            page_entries: geometry.page_entries,
            done_words: geometry.done_words,
            submission_bytes: geometry.submission_bytes() as u64,
            completion_bytes: geometry.completion_bytes() as u64,
            manager_pid: connection.peer.manager_pid(),
            page_bytes_max: self.settings.limits.page_bytes_max,
            operation_timeout_ms: self.settings.operation_timeout.as_millis() as u64,
            lease_ttl_ms: self.settings.lease_ttl.as_millis() as u64,
            query_budget_bytes: self.settings.query_budget_bytes,
            session_budget_bytes: self.settings.session_budget_bytes,
            spin_window_ns: nanos_of(self.settings.spin_window),
        });
        self.sessions.push(session);
        self.quarantine.attached(self.clock.now(), peer, session);
        let ready = SessionReady { session, engine, peer, segments };
        self.tell(EndpointEvent::SessionReady(Box::new(ready)));
        let sent = transport::send(
            &self.connections[index].socket,
            &welcome,
            &[descriptors.submission.as_fd(), descriptors.completion.as_fd()],
            Duration::ZERO,
        );
        self.after_send(index, sent);
    }

    /// Forwards a question, unless the reactor is far behind.
    fn ask(
        &mut self,
        index: usize,
        kind: QuestionKind,
        event: impl FnOnce(QuestionId) -> EndpointEvent<I::Region>,
    ) {
        if !self.has_room() {
            return self.refuse(index, Refusal::NoResources, busy());
        }
        self.last_question += 1;
        let id = QuestionId(self.last_question);
        self.connections[index].question = Some(Question { id, kind });
        self.connections[index].deadline = None;
        self.tell(event(id));
    }
}

fn busy() -> String {
    "the Manager is behind with its work: try again".to_owned()
}
