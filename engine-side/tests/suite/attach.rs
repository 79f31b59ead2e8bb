//! Attaching: what can be wrong with a socket, and with who answers.

use std::os::fd::AsFd;
use std::time::Duration;

use orbitkv_engine::{Connect, ConnectError, Gone, Refusal, RegisterError, RequestKind, Status};
use orbitkv_shm_protocol::bootstrap::message::{
    ClientMessage, MESSAGE_MAGIC, ManagerMessage, MessageHeader,
};
use orbitkv_shm_protocol::bootstrap::transport;
use orbitkv_shm_protocol::ids::{Epoch, SessionId};
use orbitkv_shm_protocol::layout::{ABI_VERSION, Geometry, LAYOUT_FINGERPRINT};
use orbitkv_shm_protocol::segment::AttachError;

use crate::rig::{PATIENCE, Rig, namespace};
use crate::twin::{Twin, welcome};

const SOON: Duration = Duration::from_secs(5);

/// Attaches to a twin that answers the greeting with `answer`.
fn attach_to(answer: ManagerMessage) -> ConnectError {
    let twin = Twin::start();
    twin.with(|server| {
        server.greeter = Some(Box::new(move |socket, _| {
            transport::send(socket, &answer, &[], SOON).unwrap();
            true
        }));
    });
    Connect::new(twin.path()).connect().unwrap_err()
}

/// Attaches to a twin whose welcome is changed by `change`, with the right descriptors.
fn attach_with(
    change: impl Fn(&mut orbitkv_shm_protocol::bootstrap::message::Welcome) + Send + 'static,
    swap: bool,
) -> ConnectError {
    let twin = Twin::start();
    twin.with(move |server| {
        server.greeter = Some(Box::new(move |socket, _| {
            let (answer, _, fds) = welcome(Geometry::default(), SessionId(1), Epoch(1));
            let ManagerMessage::Welcome(mut answer) = answer else { unreachable!() };
            change(&mut answer);
            let mut both = [fds.submission.as_fd(), fds.completion.as_fd()];
            if swap {
                both.reverse();
            }
            transport::send(socket, &ManagerMessage::Welcome(answer), &both, SOON).unwrap();
            true
        }));
    });
    Connect::new(twin.path()).connect().unwrap_err()
}

#[test]
fn a_missing_socket_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("none.sock");
    let error = Connect::new(&path).connect().unwrap_err();
    assert!(matches!(&error, ConnectError::NoSocket { path: named } if *named == path));
    assert!(error.to_string().contains("none.sock"), "{error}");
}

#[test]
fn a_stale_socket_is_told_from_a_missing_one() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("stale.sock");
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    let error = Connect::new(&path).connect().unwrap_err();
    // A stream socket of nobody: refused for its type or for its silence, named either way.
    let named =
        matches!(&error, ConnectError::NotListening { .. } | ConnectError::Environment { .. });
    assert!(named, "{error:?}");
    drop(crate::twin::Server::listen(&path.with_extension("left")));
    let error = Connect::new(path.with_extension("left")).connect().unwrap_err();
    assert!(matches!(error, ConnectError::NotListening { .. }), "{error:?}");
}

#[test]
fn a_path_that_no_socket_can_have_is_refused() {
    let error = Connect::new("/".repeat(200)).connect().unwrap_err();
    assert!(matches!(error, ConnectError::Environment { .. }), "{error:?}");
}

#[test]
fn sizes_out_of_range_are_refused_without_a_manager() {
    for connect in [
        Connect::new("x").ring_capacity(100),
        Connect::new("x").ring_capacity(1 << 20),
        Connect::new("x").page_entries(1),
        Connect::new("x").done_words(0),
    ] {
        assert!(matches!(connect.connect(), Err(ConnectError::BadGeometry { .. })));
    }
}

#[test]
fn a_refusal_carries_the_managers_text() {
    let refusal = Refusal::LimitReached;
    let message = "127 sessions are attached;\nraise reactors".to_owned();
    let error = attach_to(ManagerMessage::Refused { refusal, message });
    let text = error.to_string();
    assert!(text.contains("127 sessions are attached; raise reactors"), "{text}");
    assert!(matches!(error, ConnectError::Refused { refusal: Refusal::LimitReached, .. }));
}

#[test]
fn another_abi_version_is_refused_naming_both() {
    let twin = Twin::start();
    twin.with(|server| {
        server.greeter = Some(Box::new(|socket, _| {
            let header = MessageHeader {
                magic: MESSAGE_MAGIC,
                abi: ABI_VERSION + 41,
                body_bytes: 0,
                descriptors: 0,
            };
            let bytes = bytemuck::bytes_of(&header);
            rustix::net::send(socket, bytes, rustix::net::SendFlags::empty()).unwrap();
            true
        }));
    });
    let error = Connect::new(twin.path()).connect().unwrap_err();
    let (ours, theirs) = (ABI_VERSION, ABI_VERSION + 41);
    assert!(
        matches!(error, ConnectError::AbiMismatch { ours: o, theirs: t } if (o, t) == (ours, theirs))
    );
    let text = error.to_string();
    assert!(text.contains(&ours.to_string()) && text.contains(&theirs.to_string()), "{text}");
}

#[test]
fn another_layout_is_refused_naming_both() {
    let theirs = LAYOUT_FINGERPRINT ^ 1;
    let error = attach_with(move |welcome| welcome.layout_fingerprint = theirs, false);
    assert!(
        matches!(error, ConnectError::LayoutMismatch { ours: LAYOUT_FINGERPRINT, theirs: t } if t == theirs)
    );
    assert!(error.to_string().contains(&format!("{theirs:#018x}")), "{error}");
}

/// Goal: nothing of an answer is believed before it was compared. Method: one lie at a time.
#[test]
fn a_lying_welcome_is_refused_by_field() {
    let error = attach_with(|welcome| welcome.ring_capacity *= 2, false);
    assert!(matches!(error, ConnectError::BadAnswer { field: "ring_capacity", value: 512 }));
    let error = attach_with(|welcome| welcome.epoch = 0, false);
    assert!(matches!(error, ConnectError::BadAnswer { field: "epoch", value: 0 }));
    let error = attach_with(|welcome| welcome.session = 2, false);
    let lie =
        |error| matches!(error, ConnectError::Attach(AttachError::Header { field: "session", .. }));
    assert!(lie(error));
    let error = attach_with(|welcome| welcome.completion_bytes += 4096, false);
    assert!(matches!(error, ConnectError::Attach(AttachError::Announced { .. })));
    let error = attach_with(|_| (), true);
    assert!(matches!(error, ConnectError::Attach(_)), "swapped descriptors: {error:?}");
    let (answer, ..) = welcome(Geometry::default(), SessionId(1), Epoch(1));
    let error = attach_to(answer);
    assert!(matches!(error, ConnectError::BadAnswer { field: "descriptors", value: 0 }));
    let error = attach_to(ManagerMessage::Memory { memory: 1 });
    assert!(matches!(error, ConnectError::BadAnswer { field: "type", .. }));
}

#[test]
fn silence_ends_at_the_timeout_and_a_hang_up_at_once() {
    let twin = Twin::start();
    twin.with(|server| {
        let mut kept = Vec::new();
        server.greeter = Some(Box::new(move |socket, _| {
            kept.push(socket.try_clone().unwrap());
            true
        }));
    });
    let timeout = Duration::from_millis(30);
    let error = Connect::new(twin.path()).timeout(timeout).connect().unwrap_err();
    assert!(matches!(error, ConnectError::Timeout { timeout_ms: 30 }), "{error:?}");
    twin.with(|server| server.greeter = Some(Box::new(|_, _| true)));
    let error = Connect::new(twin.path()).connect().unwrap_err();
    assert!(matches!(error, ConnectError::Transport(_)), "{error:?}");
}

#[test]
fn a_refused_registration_changes_nothing() {
    let twin = Twin::start();
    let mut rig = Rig::new(twin.path());
    let mut spec = namespace("empty");
    spec.page_bytes = 0;
    let error = rig.client.define_namespace(&spec).unwrap_err();
    assert!(error.to_string().contains("the twin says no"), "{error}");
    assert!(matches!(error, RegisterError::Refused { refusal: Refusal::BadMessage, .. }));
    assert!(rig.client.define_namespace(&namespace("second")).is_ok());
}

#[test]
fn a_greeting_says_what_was_asked_for() {
    let twin = Twin::start();
    let (seen, hello) = std::sync::mpsc::channel();
    twin.with(move |server| {
        server.greeter = Some(Box::new(move |_, message| {
            seen.send(message.clone()).unwrap();
            false
        }));
    });
    let engine = orbitkv_engine::engine_id_random().unwrap();
    let client = Connect::new(twin.path())
        .engine_id(engine)
        .ring_capacity(128)
        .page_entries(2048)
        .done_words(9)
        .connect()
        .unwrap();
    let asked = hello.recv().unwrap();
    assert_eq!(
        asked,
        ClientMessage::Hello {
            layout_fingerprint: LAYOUT_FINGERPRINT,
            engine_id: engine.to_string(),
            ring_capacity: 128,
            page_entries: 2048,
            done_words: 9,
        }
    );
    assert_eq!(client.engine_id(), engine);
    assert_eq!(client.limits().ring_capacity, 128);
    assert_eq!(client.limits().lease_ttl, Duration::from_secs(30));
    assert_eq!(client.session(), SessionId(1));
}

/// Goal: an answer that cannot be read ends the session instead of being taken for another's.
/// Method: a datagram of nonsense in front of the answer.
#[test]
fn an_unreadable_answer_ends_the_session() {
    let twin = Twin::start();
    let mut rig = Rig::new(twin.path());
    twin.hold(RequestKind::ALL);
    let ping = rig.client.ping().unwrap();
    twin.with(|server| {
        let flags = rustix::net::SendFlags::empty();
        rustix::net::send(&server.seats[0].socket, &[0xee; 64], flags).unwrap();
    });
    let error = rig.client.define_namespace(&namespace("x")).unwrap_err();
    assert!(matches!(error, RegisterError::Transport(_)), "{error:?}");
    let told = rig.client.wait(PATIENCE).unwrap().unwrap();
    assert_eq!((told.operation, told.status), (ping, Status::Gone));
    assert_eq!(rig.client.wait(PATIENCE), Err(Gone::Closed));
    let error = rig.client.define_namespace(&namespace("y")).unwrap_err();
    assert!(matches!(error, RegisterError::ManagerGone(Gone::Closed)), "{error:?}");
}
