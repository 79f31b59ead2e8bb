//! Goal: bootstrap messages and descriptors arrive whole or not at all; whatever a peer sends is
//! refused with its cause; and no refused message leaves a descriptor behind.
//!
//! Method: a socket pair, one end of which sends raw datagrams. Tests take turns, because they
//! count the descriptors of the process.
#![cfg(not(loom))]

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use orbitkv_shm_protocol::bootstrap::message::{
    ClientMessage, DependencySpec, HexBytes, HexError, LAYOUT_SEGMENTS_MAX, MESSAGE_BYTES_MAX,
    MESSAGE_DESCRIPTORS_MAX, MESSAGE_MAGIC, ManagerMessage, MemorySpec, MessageHeader,
    NamespaceSpec, Refusal, RegionSpec, SegmentSpec, Welcome,
};
use orbitkv_shm_protocol::bootstrap::transport::{
    TransportError, receive_client, receive_manager, send,
};
use orbitkv_shm_protocol::layout::{ABI_VERSION, DONE_WORDS_MAX, LAYOUT_FINGERPRINT};
use proptest::prelude::{Just, Strategy, any, prop_assert, prop_assert_eq, prop_oneof, proptest};
use rustix::fs::MemfdFlags;
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
    sendmsg, socketpair,
};

const SOON: Duration = Duration::from_secs(20);

/// One test at a time: they count `/proc/self/fd`.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn sockets() -> (OwnedFd, OwnedFd) {
    socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap()
}

fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

fn memfd(bytes: u64) -> OwnedFd {
    let descriptor = rustix::fs::memfd_create(c"passed", MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&descriptor, bytes).unwrap();
    descriptor
}

fn hello() -> ClientMessage {
    ClientMessage::Hello {
        layout_fingerprint: LAYOUT_FINGERPRINT,
        engine_id: "00112233445566778899aabbccddeeff".to_owned(),
        ring_capacity: 256,
        page_entries: 65_536,
        done_words: 1,
    }
}

fn header(body: usize, descriptors: usize) -> MessageHeader {
    MessageHeader {
        magic: MESSAGE_MAGIC,
        abi: ABI_VERSION,
        body_bytes: body as u32,
        descriptors: descriptors as u32,
    }
}

/// Sends a datagram as no correct peer does.
fn send_raw(socket: &OwnedFd, parts: &[&[u8]], descriptors: &[BorrowedFd<'_>]) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(64))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(descriptors)));
    }
    let parts: Vec<IoSlice<'_>> = parts.iter().map(|part| IoSlice::new(part)).collect();
    sendmsg(socket, &parts, &mut control, SendFlags::NOSIGNAL).unwrap();
}

/// What the Manager makes of one raw datagram; asserts that no descriptor stays open.
fn refusal_of(parts: &[&[u8]], descriptors: usize) -> TransportError {
    let (ours, theirs) = sockets();
    let passed: Vec<OwnedFd> = (0..descriptors).map(|_| memfd(1)).collect();
    let borrowed: Vec<BorrowedFd<'_>> = passed.iter().map(AsFd::as_fd).collect();
    let before = open_descriptors();
    send_raw(&theirs, parts, &borrowed);
    let error = receive_client(&ours, SOON).unwrap_err();
    assert_eq!(open_descriptors(), before, "a descriptor of a refused message stayed open");
    error
}

#[test]
fn messages_and_descriptors_arrive_in_both_directions() {
    let _turn = turn();
    let before = open_descriptors();
    {
        let (manager, client) = sockets();
        send(&client, &hello(), &[], SOON).unwrap();
        let (message, descriptors) = receive_client(&manager, SOON).unwrap();
        assert_eq!(message, hello());
        assert!(descriptors.is_empty());

        let passed: Vec<OwnedFd> =
            (0..MESSAGE_DESCRIPTORS_MAX).map(|i| memfd(i as u64 + 1)).collect();
        let borrowed: Vec<BorrowedFd<'_>> = passed.iter().map(AsFd::as_fd).collect();
        let refused =
            ManagerMessage::Refused { refusal: Refusal::Draining, message: "stopping".to_owned() };
        send(&manager, &refused, &borrowed, SOON).unwrap();
        let (message, descriptors) = receive_manager(&client, SOON).unwrap();
        assert_eq!(message, refused);
        assert_eq!(descriptors.len(), MESSAGE_DESCRIPTORS_MAX);
        for (ours, theirs) in passed.iter().zip(&descriptors) {
            let (ours, stat) =
                (rustix::fs::fstat(ours).unwrap(), rustix::fs::fstat(theirs).unwrap());
            assert_eq!((ours.st_ino, ours.st_size), (stat.st_ino, stat.st_size));
            let flags = rustix::io::fcntl_getfd(theirs).unwrap();
            assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
        }
    }
    assert_eq!(open_descriptors(), before);
}

#[test]
fn the_largest_region_fits_a_message() {
    let _turn = turn();
    let segment = SegmentSpec {
        memory: u32::MAX,
        offset: u64::MAX,
        stride: u64::MAX,
        length: u64::MAX,
        layer: DONE_WORDS_MAX - 1,
    };
    let message = ClientMessage::RegisterRegion(RegionSpec {
        scope: u32::MAX,
        pages: u32::MAX,
        segments: vec![segment; LAYOUT_SEGMENTS_MAX],
    });
    let (manager, client) = sockets();
    send(&client, &message, &[], SOON).unwrap();
    assert_eq!(receive_client(&manager, SOON).unwrap().0, message);
}

#[test]
fn what_is_too_large_is_not_sent() {
    let _turn = turn();
    let (manager, client) = sockets();
    let refused = |bytes| ManagerMessage::Refused {
        refusal: Refusal::BadMessage,
        message: "x".repeat(bytes),
    };
    let error = send(&manager, &refused(MESSAGE_BYTES_MAX), &[], SOON).unwrap_err();
    assert!(matches!(error, TransportError::TooLong { max: MESSAGE_BYTES_MAX }), "{error}");
    let one = memfd(1);
    let many = [one.as_fd(); MESSAGE_DESCRIPTORS_MAX + 1];
    let error = send(&manager, &refused(1), &many, SOON).unwrap_err();
    assert!(matches!(error, TransportError::Descriptors { found: 5, .. }), "{error}");
    // Nothing went out, and the socket still works: with the longest message that fits, too.
    let rest = serde_json::to_vec(&refused(0)).unwrap().len() + size_of::<MessageHeader>();
    let longest = refused(MESSAGE_BYTES_MAX - rest);
    send(&manager, &longest, &[], SOON).unwrap();
    assert_eq!(receive_manager(&client, SOON).unwrap().0, longest);
    assert!(matches!(
        receive_manager(&client, Duration::ZERO).unwrap_err(),
        TransportError::TimedOut(_)
    ));
}

#[test]
fn an_oversized_datagram_is_refused() {
    let _turn = turn();
    let body = vec![b' '; MESSAGE_BYTES_MAX];
    let error = refusal_of(&[bytemuck::bytes_of(&header(body.len(), 2)), &body], 2);
    assert!(matches!(error, TransportError::TooLong { max: MESSAGE_BYTES_MAX }), "{error}");
}

#[test]
fn a_truncated_datagram_is_refused() {
    let _turn = turn();
    let body = serde_json::to_vec(&hello()).unwrap();
    let header = header(body.len(), 1);
    let header_bytes = bytemuck::bytes_of(&header);
    for cut in 1..header_bytes.len() {
        let error = refusal_of(&[&header_bytes[..cut]], 1);
        assert!(
            matches!(error, TransportError::Length { found, announced: 16 } if found == cut),
            "{error}"
        );
    }
    for cut in [0, 1, body.len() - 1] {
        let error = refusal_of(&[header_bytes, &body[..cut]], 1);
        assert!(
            matches!(error, TransportError::Length { found, announced }
                if found == 16 + cut && announced == 16 + body.len() as u64),
            "{error}"
        );
    }
    // Longer than announced is no better.
    let error = refusal_of(&[header_bytes, &body, b" "], 1);
    assert!(matches!(error, TransportError::Length { .. }), "{error}");
}

#[test]
fn a_wrong_magic_is_refused() {
    let _turn = turn();
    let body = serde_json::to_vec(&hello()).unwrap();
    let wrong = MessageHeader { magic: 0x1234_5678, ..header(body.len(), 1) };
    let error = refusal_of(&[bytemuck::bytes_of(&wrong), &body], 1);
    assert!(matches!(error, TransportError::Magic { found: 0x1234_5678 }), "{error}");
}

/// The header is read before anything else that another version may have changed.
#[test]
fn another_version_is_refused_by_name_whatever_its_body() {
    let _turn = turn();
    let wrong = MessageHeader { abi: 77, ..header(1 << 30, 9) };
    for body in [&b"not json"[..], b"", &[0; 3000]] {
        let error = refusal_of(&[bytemuck::bytes_of(&wrong), body], 2);
        assert!(
            matches!(error, TransportError::AbiMismatch { ours: ABI_VERSION, theirs: 77 }),
            "{error}"
        );
        let message = error.to_string();
        assert!(message.contains("77") && message.contains(&ABI_VERSION.to_string()), "{message}");
    }
}

#[test]
fn a_body_that_is_no_message_is_refused() {
    let _turn = turn();
    let other_direction = serde_json::to_vec(&ManagerMessage::Memory { memory: 1 }).unwrap();
    let unknown_field =
        br#"{"type":"evict","tier":"dram","timeout_ms":1,"surprise":true}"#.as_slice();
    let deep = "[".repeat(100_000).into_bytes();
    for body in [
        b"".as_slice(),
        b"garbage",
        b"{}",
        b"\xff\xfe\x00",
        br#"{"type":"hello"}"#,
        br#"{"type":"evict","tier":"dram","timeout_ms":-1}"#,
        br#"{"type":"evict","tier":"dram","timeout_ms":1}trailing"#,
        unknown_field,
        &other_direction,
        &deep,
    ] {
        let error = refusal_of(&[bytemuck::bytes_of(&header(body.len(), 3)), body], 3);
        assert!(matches!(error, TransportError::Body(_)), "{error}");
    }
}

#[test]
fn a_wrong_number_of_descriptors_is_refused() {
    let _turn = turn();
    let body = serde_json::to_vec(&hello()).unwrap();
    for (announced, attached) in [(0, 1), (1, 0), (2, 1), (1, 2), (4, 5), (5, 5), (64, 64)] {
        let error =
            refusal_of(&[bytemuck::bytes_of(&header(body.len(), announced)), &body], attached);
        assert!(matches!(error, TransportError::Descriptors { .. }), "{announced}: {error}");
    }
}

#[test]
fn a_peer_that_is_gone_or_silent_is_told_apart() {
    let _turn = turn();
    let (ours, theirs) = sockets();
    for wait in [Duration::ZERO, Duration::from_millis(3)] {
        let error = receive_client(&ours, wait).unwrap_err();
        assert!(matches!(error, TransportError::TimedOut(said) if said == wait), "{error}");
    }
    // What was sent before the peer went is still received.
    send(&theirs, &hello(), &[], SOON).unwrap();
    drop(theirs);
    assert_eq!(receive_client(&ours, SOON).unwrap().0, hello());
    assert!(matches!(receive_client(&ours, SOON).unwrap_err(), TransportError::Closed));
    let refused = ManagerMessage::Memory { memory: 1 };
    assert!(matches!(send(&ours, &refused, &[], SOON).unwrap_err(), TransportError::Closed));
}

#[test]
fn a_peer_that_does_not_read_stops_the_sender_only_until_its_timeout() {
    let _turn = turn();
    let (ours, _theirs) = sockets();
    let message =
        ManagerMessage::Refused { refusal: Refusal::Draining, message: "x".repeat(50_000) };
    let error = (0..1000)
        .find_map(|_| send(&ours, &message, &[], Duration::from_millis(2)).err())
        .expect("a socket buffer is finite");
    assert!(matches!(error, TransportError::TimedOut(_)), "{error}");
}

#[test]
fn memory_descriptions_survive_the_journey() {
    let _turn = turn();
    let (manager, client) = sockets();
    let memory = memfd(8192);
    for spec in [
        MemorySpec::Memfd { bytes: 8192 },
        MemorySpec::Process {
            address: u64::MAX,
            bytes: 1 << 40,
            nonce_address: 0x7fff_ffff_f000,
            nonce: u64::MAX - 1,
        },
        MemorySpec::Cuda {
            gpu: HexBytes(std::array::from_fn(|at| at as u8)),
            handle: HexBytes(std::array::from_fn(|at| 255 - at as u8)),
            offset: u64::MAX,
            bytes: 1,
        },
    ] {
        let message = ClientMessage::RegisterMemory(spec);
        send(&client, &message, &[memory.as_fd()], SOON).unwrap();
        let (received, descriptors) = receive_client(&manager, SOON).unwrap();
        assert_eq!(received, message);
        assert_eq!(rustix::fs::fstat(&descriptors[0]).unwrap().st_size, 8192);
    }
}

#[test]
fn bytes_in_hex_are_read_whole_or_not_at_all() {
    let bytes = HexBytes([0x00, 0x1f, 0xa0, 0xff]);
    assert_eq!(bytes.to_string(), "001fa0ff");
    for good in ["001fa0ff", "001FA0ff"] {
        assert_eq!(good.parse(), Ok(bytes));
        assert_eq!(serde_json::from_str::<HexBytes<4>>(&format!("{good:?}")).unwrap(), bytes);
    }
    for bad in ["", "001fa0f", "001fa0fff", "001fa0fg", "+01fa0ff", "001fa0é"] {
        assert_eq!(bad.parse::<HexBytes<4>>(), Err(HexError { needed: 8 }), "{bad}");
        assert!(serde_json::from_str::<HexBytes<4>>(&format!("{bad:?}")).is_err());
    }
}

/// One correct message of each kind and direction, as JSON.
fn bodies() -> Vec<Vec<u8>> {
    let segment = SegmentSpec { memory: 1, offset: 4096, stride: 8192, length: 4096, layer: 0 };
    let namespace = NamespaceSpec {
        model: "m".into(),
        dtype: "bfloat16".into(),
        page_tokens: 64,
        page_bytes: 4096,
        layout: "l".into(),
        group: 0,
        tp_rank: 1,
        tp_size: 2,
        pp_rank: 0,
        pp_size: 1,
        adapter: String::new(),
        salt: "s".into(),
        dependency: DependencySpec::Window(4),
    };
    let process = MemorySpec::Process { address: 1, bytes: 2, nonce_address: 3, nonce: 4 };
    let region = RegionSpec { scope: 1, pages: 2, segments: vec![segment; 2] };
    let from_client = [
        hello(),
        ClientMessage::DefineNamespace(namespace),
        ClientMessage::DefineSet { members: vec![1, 2] },
        ClientMessage::RegisterMemory(MemorySpec::Memfd { bytes: 4096 }),
        ClientMessage::RegisterMemory(process),
        ClientMessage::ReleaseMemory { memory: 1 },
        ClientMessage::RegisterRegion(region),
        ClientMessage::RegisterMemory(MemorySpec::Cuda {
            gpu: HexBytes([1; 16]),
            handle: HexBytes([2; 64]),
            offset: 3,
            bytes: 4,
        }),
        ClientMessage::RegisterEvents {
            gpu: HexBytes([1; 16]),
            handles: vec![HexBytes([2; 64]); 2],
        },
        ClientMessage::Evict { tier: "dram".into(), timeout_ms: 5 },
    ];
    let welcome = Welcome {
        layout_fingerprint: LAYOUT_FINGERPRINT,
        epoch: 1,
        session: 2,
        ring_capacity: 256,
        page_entries: 65_536,
        done_words: 1,
        submission_bytes: 1 << 22,
        completion_bytes: 1 << 21,
        manager_pid: 3,
        page_bytes_max: 1 << 26,
        operation_timeout_ms: 5000,
        lease_ttl_ms: 30_000,
        spin_window_ns: 50_000,
        query_budget_bytes: 1 << 30,
        session_budget_bytes: 1 << 29,
    };
    let from_manager = [
        ManagerMessage::Welcome(welcome),
        ManagerMessage::Refused { refusal: Refusal::BadMessage, message: "no".into() },
        ManagerMessage::Scope { scope: 1, page_bytes: 2 },
        ManagerMessage::Memory { memory: 1 },
        ManagerMessage::MemoryReleased,
        ManagerMessage::Region { region: 1, page_bytes: 2 },
        ManagerMessage::Events { first: 1 },
        ManagerMessage::Evicted { pages: 1, bytes: 2, pages_kept: 3, spill_drained: true },
    ];
    let client = from_client.iter().map(|message| serde_json::to_vec(message).unwrap());
    client.chain(from_manager.iter().map(|message| serde_json::to_vec(message).unwrap())).collect()
}

/// How a correct datagram is spoiled.
#[derive(Clone, Debug)]
enum Spoil {
    Nothing,
    /// One byte of header or body.
    Byte(usize, u8),
    /// Only the first bytes arrive.
    Cut(usize),
    /// More bytes than announced.
    Tail(Vec<u8>),
    /// A word of the header.
    Word(usize, u32),
    /// A number in the body becomes this one.
    Number(usize, i128),
}

fn spoils() -> impl Strategy<Value = Spoil> {
    prop_oneof![
        Just(Spoil::Nothing),
        any::<(usize, u8)>().prop_map(|(at, byte)| Spoil::Byte(at, byte)),
        any::<usize>().prop_map(Spoil::Cut),
        proptest::collection::vec(any::<u8>(), 1..9).prop_map(Spoil::Tail),
        (0_usize..4, any::<u32>()).prop_map(|(word, value)| Spoil::Word(word, value)),
        (any::<usize>(), any::<i128>()).prop_map(|(which, value)| Spoil::Number(which, value)),
    ]
}

/// The `which`th run of digits replaced by another number.
fn with_number(body: &[u8], which: usize, value: i128) -> Vec<u8> {
    let text = String::from_utf8(body.to_vec()).unwrap();
    let starts: Vec<usize> = text
        .char_indices()
        .filter(|(at, c)| {
            c.is_ascii_digit() && !text[..*at].ends_with(|c: char| c.is_ascii_digit())
        })
        .map(|(at, _)| at)
        .collect();
    let Some(start) = starts.get(which % starts.len().max(1)) else { return body.to_vec() };
    let end = text[*start..].find(|c: char| !c.is_ascii_digit()).map_or(text.len(), |n| start + n);
    format!("{}{value}{}", &text[..*start], &text[end..]).into_bytes()
}

proptest! {
    /// Goal: a spoiled message of either direction is refused or is a message that could have been
    /// sent, with exactly the descriptors that it announced; nothing stays open.
    #[test]
    fn spoiled_messages_are_refused_or_whole(
        which in 0_usize..18,
        spoil in spoils(),
        attached in 0_usize..7,
        announced in prop_oneof![3 => Just(None), 1 => (0_usize..7).prop_map(Some)],
    ) {
        let _turn = turn();
        let mut body = bodies()[which].clone();
        if let Spoil::Number(at, value) = spoil {
            body = with_number(&body, at, value);
        }
        let announced = announced.unwrap_or(attached);
        let mut datagram = [bytemuck::bytes_of(&header(body.len(), announced)), &body].concat();
        match &spoil {
            Spoil::Byte(at, byte) => {
                let at = at % datagram.len();
                datagram[at] = *byte;
            }
            Spoil::Cut(bytes) => datagram.truncate(1 + bytes % (datagram.len() - 1)),
            Spoil::Tail(bytes) => datagram.extend(bytes),
            Spoil::Word(word, value) => {
                datagram[word * 4..][..4].copy_from_slice(&value.to_le_bytes());
            }
            Spoil::Nothing | Spoil::Number(..) => {}
        }
        let from_client = which < 10;
        let passed: Vec<OwnedFd> = (0..attached).map(|_| memfd(1)).collect();
        let borrowed: Vec<BorrowedFd<'_>> = passed.iter().map(AsFd::as_fd).collect();
        let (ours, theirs) = sockets();
        let before = open_descriptors();
        send_raw(&theirs, &[&datagram], &borrowed);
        let received = if from_client {
            receive_client(&ours, SOON).map(|(message, descriptors)| {
                (serde_json::to_vec(&message).unwrap(), descriptors)
            })
        } else {
            receive_manager(&ours, SOON).map(|(message, descriptors)| {
                (serde_json::to_vec(&message).unwrap(), descriptors)
            })
        };
        match received {
            Ok((again, descriptors)) => {
                let said: u32 = bytemuck::pod_read_unaligned(&datagram[12..16]);
                prop_assert_eq!(descriptors.len(), said as usize);
                prop_assert_eq!(descriptors.len(), attached);
                prop_assert!(descriptors.len() <= MESSAGE_DESCRIPTORS_MAX);
                let said: serde_json::Value = serde_json::from_slice(&datagram[16..]).unwrap();
                let again: serde_json::Value = serde_json::from_slice(&again).unwrap();
                // Hex digits may be sent in either case.
                let text = |value: serde_json::Value| value.to_string().to_lowercase();
                prop_assert_eq!(text(said), text(again));
            }
            Err(error) => {
                let is_correct = matches!(spoil, Spoil::Nothing)
                    && announced == attached
                    && attached <= MESSAGE_DESCRIPTORS_MAX;
                prop_assert!(!is_correct, "{}", error);
            }
        }
        prop_assert_eq!(open_descriptors(), before);
    }

    /// Whatever a datagram holds, it is a message or an error, and leaves no descriptor.
    #[test]
    fn arbitrary_datagrams_are_refused_cleanly(
        bytes in proptest::collection::vec(any::<u8>(), 1..300),
        plausible_header: bool,
        descriptors in 0_usize..8,
    ) {
        let _turn = turn();
        let (ours, theirs) = sockets();
        let passed: Vec<OwnedFd> = (0..descriptors).map(|_| memfd(1)).collect();
        let borrowed: Vec<BorrowedFd<'_>> = passed.iter().map(AsFd::as_fd).collect();
        let before = open_descriptors();
        let header = header(bytes.len(), descriptors);
        if plausible_header {
            send_raw(&theirs, &[bytemuck::bytes_of(&header), &bytes], &borrowed);
        } else {
            send_raw(&theirs, &[&bytes], &borrowed);
        }
        drop(receive_client(&ours, SOON));
        prop_assert_eq!(open_descriptors(), before);
    }
}
