//! Whatever bytes and descriptors come, in whatever order: the endpoint refuses or closes, its
//! reactor sees only what was checked, and a well-behaved client is served afterwards.

use std::cell::RefCell;

use orbitkv_shm_protocol::bootstrap::message::{MESSAGE_BYTES_MAX, MESSAGE_MAGIC, MessageHeader};
use orbitkv_shm_protocol::layout::ABI_VERSION;
use proptest::collection::vec;
use proptest::prelude::{Just, Strategy, any, prop_oneof, proptest};
use proptest::test_runner::Config;

use super::*;

/// One thing that a peer does.
#[derive(Clone, Debug)]
enum Move {
    /// A datagram of any bytes.
    Bytes(Vec<u8>),
    /// A right header with any body.
    Framed(Vec<u8>),
    /// A header that lies.
    Header([u32; 4], Vec<u8>),
    /// A message that parses, with some descriptors.
    Message(Box<ClientMessage>, usize),
    /// A message that parses with one byte changed.
    Bent(Box<ClientMessage>, usize, u8),
    /// A datagram at and beyond the largest size.
    Huge(usize),
    /// Read one answer.
    Read,
    /// Half of the connection.
    ShutDown,
}

fn number() -> impl Strategy<Value = u32> {
    prop_oneof![
        4 => 0_u32..5,
        1 => Just(64_u32),
        1 => Just(1024_u32),
        1 => Just(u32::MAX),
        1 => any::<u32>(),
    ]
}

fn size() -> impl Strategy<Value = u64> {
    prop_oneof![
        4 => Just(4096_u64),
        2 => Just(8192_u64),
        1 => 0_u64..3,
        1 => Just(i64::MAX as u64),
        1 => Just(u64::MAX),
        1 => any::<u64>(),
    ]
}

fn text() -> impl Strategy<Value = String> {
    prop_oneof![
        Just("m".to_owned()),
        "\\PC{0,8}",
        Just("x".repeat(600)),
        Just("\n\u{1b}[2J".into())
    ]
}

fn any_hello() -> impl Strategy<Value = ClientMessage> {
    (any::<bool>(), text(), number(), number(), number()).prop_map(
        |(right, engine_id, ring_capacity, page_entries, done_words)| {
            if right {
                return hello();
            }
            ClientMessage::Hello {
                layout_fingerprint: LAYOUT_FINGERPRINT,
                engine_id,
                ring_capacity,
                page_entries,
                done_words,
            }
        },
    )
}

fn any_namespace() -> impl Strategy<Value = ClientMessage> {
    (text(), text(), size(), number(), number(), number()).prop_map(
        |(model, salt, page_bytes, page_tokens, tp_rank, window)| {
            ClientMessage::DefineNamespace(NamespaceSpec {
                salt,
                page_bytes,
                page_tokens,
                tp_rank,
                tp_size: 2,
                dependency: DependencySpec::Window(window),
                ..namespace(&model)
            })
        },
    )
}

fn any_memory() -> impl Strategy<Value = ClientMessage> {
    (0..3, size(), size(), size()).prop_map(|(kind, bytes, address, nonce_address)| {
        ClientMessage::RegisterMemory(match kind {
            0 => MemorySpec::Memfd { bytes },
            1 => MemorySpec::Process { address, bytes, nonce_address, nonce: 1 },
            _ => MemorySpec::Cuda {
                gpu: HexBytes([1; 16]),
                handle: HexBytes([2; 64]),
                offset: address,
                bytes,
            },
        })
    })
}

fn any_region() -> impl Strategy<Value = ClientMessage> {
    let segment = (number(), size(), size(), size(), number()).prop_map(
        |(memory, offset, stride, length, layer)| SegmentSpec {
            memory,
            offset,
            stride,
            length,
            layer,
        },
    );
    (number(), number(), vec(segment, 0..4)).prop_map(|(scope, pages, segments)| {
        ClientMessage::RegisterRegion(RegionSpec { scope, pages, segments })
    })
}

fn message() -> impl Strategy<Value = Box<ClientMessage>> {
    prop_oneof![
        3 => any_hello(),
        3 => any_namespace(),
        1 => vec(number(), 0..70).prop_map(|members| ClientMessage::DefineSet { members }),
        3 => any_memory(),
        1 => number().prop_map(|memory| ClientMessage::ReleaseMemory { memory }),
        3 => any_region(),
        1 => (0..300_usize).prop_map(events),
        1 => (text(), size()).prop_map(|(tier, timeout_ms)| ClientMessage::Evict {
            tier: if timeout_ms.is_multiple_of(2) { "dram".to_owned() } else { tier },
            timeout_ms,
        }),
    ]
    .prop_map(Box::new)
}

fn moves() -> impl Strategy<Value = Vec<Move>> {
    let one = prop_oneof![
        1 => vec(any::<u8>(), 0..80).prop_map(Move::Bytes),
        1 => vec(any::<u8>(), 0..80).prop_map(Move::Framed),
        1 => (any::<[u32; 4]>(), any::<[bool; 4]>(), vec(any::<u8>(), 0..20)).prop_map(
            |(mut words, keep, body)| {
                let right = [MESSAGE_MAGIC, ABI_VERSION, body.len() as u32, 0];
                for (word, (right, keep)) in words.iter_mut().zip(right.into_iter().zip(keep)) {
                    if keep {
                        *word = right;
                    }
                }
                Move::Header(words, body)
            }
        ),
        12 => (message(), prop_oneof![5 => Just(0_usize), 3 => Just(1), 1 => Just(4)])
            .prop_map(|(message, descriptors)| Move::Message(message, descriptors)),
        1 => (message(), any::<usize>(), any::<u8>())
            .prop_map(|(message, at, byte)| Move::Bent(message, at, byte)),
        1 => (MESSAGE_BYTES_MAX - 1..MESSAGE_BYTES_MAX + 2).prop_map(Move::Huge),
        2 => Just(Move::Read),
        1 => Just(Move::ShutDown),
    ];
    // Most histories get past the greeting, the rest try without.
    (prop_oneof![3 => Just(true), 1 => Just(false)], vec(one, 1..24)).prop_map(
        |(greet, mut list)| {
            if greet {
                list.insert(0, Move::Message(Box::new(hello()), 0));
            }
            list
        },
    )
}

fn framed(message: &ClientMessage) -> Vec<u8> {
    frame(&serde_json::to_vec(message).unwrap())
}

fn frame(body: &[u8]) -> Vec<u8> {
    let header = MessageHeader {
        magic: MESSAGE_MAGIC,
        abi: ABI_VERSION,
        body_bytes: body.len() as u32,
        descriptors: 0,
    };
    [bytemuck::bytes_of(&header), body].concat()
}

fn play(stand: &mut Stand, client: &Client, step: &Move) {
    match step {
        Move::Bytes(bytes) => client.say_bytes(bytes),
        Move::Framed(body) => client.say_bytes(&frame(body)),
        Move::Header(words, body) => {
            client.say_bytes(&[bytemuck::bytes_of(words), body.as_slice()].concat());
        }
        Move::Message(message, descriptors) => {
            let files: Vec<_> = (0..*descriptors).map(|_| memfd()).collect();
            let files: Vec<_> = files.iter().map(AsFd::as_fd).collect();
            // Closed at the other end by now, perhaps.
            let _ = transport::send(&client.socket, message.as_ref(), &files, Duration::ZERO);
        }
        Move::Bent(message, at, byte) => {
            let mut bytes = framed(message);
            let at = at % bytes.len();
            bytes[at] = *byte;
            client.say_bytes(&bytes);
        }
        Move::Huge(bytes) => client.say_bytes(&vec![b' '; *bytes]),
        Move::Read => {
            let _ = transport::receive_manager(&client.socket, Duration::from_millis(1));
        }
        Move::ShutDown => {
            let _ = rustix::net::shutdown(&client.socket, rustix::net::Shutdown::Write);
        }
    }
    stand.pump();
}

#[test]
fn no_history_of_a_hostile_peer_harms_anybody_else() {
    let mut settings = settings();
    settings.limits.bad_requests = 6;
    let stand = RefCell::new(Stand::start(settings));
    let bystander = stand.borrow_mut().attach();
    // One in several gets to its point; still as many as PROPTEST_CASES says.
    let cases = Config::default().cases * 3 / 2;
    proptest!(Config { failure_persistence: None, cases, ..Config::default() }, |(list in moves())| {
        let mut stand = stand.borrow_mut();
        let client = stand.connect();
        for step in &list {
            play(&mut stand, &client, step);
        }
        drop(client);
        // Its session, if it got one, ends; the bystander's does not.
        stand.until(|stand| (stand.sessions.len() == 1).then_some(()));
        let (_, text) = stand.refused(&bystander.0, &ClientMessage::DefineNamespace(NamespaceSpec {
            page_bytes: u64::MAX,
            ..namespace("m")
        }));
        proptest::prop_assert!(text.contains("18446744073709551615"));
        let (client, _) = stand.attach();
        drop(client);
        stand.until(|stand| (stand.sessions.len() == 1).then_some(()));
        proptest::prop_assert!(stand.regions.is_empty());
    });
    let mut stand = stand.into_inner();
    get_somewhere_then_break(&mut stand);
    drop(bystander);
    stand.until_no_sessions();
    // The histories did get somewhere: that chance alone defines anything is not certain.
    assert!(stand.scopes > 0);
    assert!(stand.closed(CloseCause::BadFraming) > 0);
    assert!(stand.closed(CloseCause::TooManyRefusals) > 0);
}

/// A history by hand that gets further than chance mostly does: it defines a namespace, registers
/// memory and a region over it, then lies in a header. All of it ends with the session.
fn get_somewhere_then_break(stand: &mut Stand) {
    let before = stand.scopes;
    let client = stand.connect();
    let bytes = 1 << 20;
    for (message, descriptors) in [
        (hello(), 0),
        (ClientMessage::DefineNamespace(namespace("m")), 0),
        (ClientMessage::RegisterMemory(MemorySpec::Memfd { bytes }), 1),
        (ClientMessage::RegisterRegion(region(before + 1, 0)), 0),
        (events(5), 0),
    ] {
        play(stand, &client, &Move::Message(Box::new(message), descriptors));
        let answer = stand.hear(&client);
        assert!(!matches!(answer, ManagerMessage::Refused { .. }), "{answer:?}");
    }
    assert_eq!((stand.scopes, stand.regions.len(), stand.events.len()), (before + 1, 1, 5));
    // Twice, and then a region over it: the region that is there keeps the memory.
    let memory = Arc::downgrade(&stand.regions[0].1.memories[0]);
    let release = ClientMessage::ReleaseMemory { memory: 0 };
    assert_eq!(stand.ask(&client, &release), ManagerMessage::MemoryReleased);
    for late in [release, ClientMessage::RegisterRegion(region(before + 1, 0))] {
        let (refusal, text) = stand.refused(&client, &late);
        assert_eq!(refusal, Refusal::BadMessage);
        assert!(text.contains("memory 0 is not registered"), "{text}");
    }
    assert_eq!(stand.regions.len(), 1);
    assert!(memory.strong_count() > 0);
    play(stand, &client, &Move::Header([MESSAGE_MAGIC, ABI_VERSION, 7, 0], vec![0; 3]));
    stand.hears_the_end(&client);
    stand.until(|stand| (stand.sessions.len() == 1).then_some(()));
    assert!(stand.regions.is_empty() && stand.events.is_empty());
    stand.until(|_| (memory.strong_count() == 0).then_some(()));
}

#[test]
fn a_refusal_quotes_little_of_the_peer_on_one_line() {
    let mut stand = Stand::start(settings());
    let client = stand.connect();
    let name = format!("\\n\\u001b[2J{}", "x".repeat(60_000));
    client.say_bytes(&frame(format!("{{\"type\":\"{name}\"}}").as_bytes()));
    let ManagerMessage::Refused { refusal, message } = stand.hear(&client) else { panic!() };
    assert_eq!(refusal, Refusal::BadMessage);
    assert!(message.chars().count() <= 401 && !message.chars().any(char::is_control), "{message}");
    stand.hears_the_end(&client);
}
