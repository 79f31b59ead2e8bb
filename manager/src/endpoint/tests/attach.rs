//! What a session may say and when it ends.

use std::io::{BufRead, BufReader};
use std::process::Stdio;

use orbitkv_shm_protocol::ids::EngineId;
use orbitkv_shm_protocol::layout::Geometry;
use orbitkv_shm_protocol::segment::{self, Expected};

use super::super::session::{Dialogue, MEMORY_IDS_MAX, Rules};
use super::*;

#[test]
fn a_client_attaches_defines_registers_and_leaves() {
    let mut stand = Stand::start(settings());
    let client = stand.connect();
    client.say(&hello());
    let (message, descriptors) = stand.hear_with_descriptors(&client).unwrap();
    let ManagerMessage::Welcome(welcome) = message else { panic!("{message:?}") };
    assert_eq!((welcome.epoch, welcome.manager_pid), (77, std::process::id()));
    assert_eq!(welcome.query_budget_bytes, 2 << 20);
    // The segments are what the message says.
    let geometry = Geometry { ring_capacity: 64, page_entries: 1024, done_words: 3 };
    let expected = Expected::new(geometry, SessionId(welcome.session), Epoch(77));
    let [submission, completion] = <[OwnedFd; 2]>::try_from(descriptors).unwrap();
    segment::attach(submission, completion, expected).unwrap();

    let ready = &stand.sessions[0].1;
    assert_eq!(ready.engine, EngineId(0x00112233445566778899aabbccddeeff_u128.to_be_bytes()));
    assert_eq!(ready.peer.pid, std::process::id());

    let answer = stand.ask(&client, &ClientMessage::DefineNamespace(namespace("m")));
    assert_eq!(answer, ManagerMessage::Scope { scope: 1, page_bytes: 8192 });
    let answer = stand.ask(&client, &ClientMessage::DefineSet { members: vec![1, 1] });
    assert_eq!(answer, ManagerMessage::Scope { scope: 2, page_bytes: 8192 });
    let memory = ClientMessage::RegisterMemory(MemorySpec::Memfd { bytes: 1 << 20 });
    client.say_with(&memory, &[memfd().as_fd()]);
    assert_eq!(stand.hear(&client), ManagerMessage::Memory { memory: 0 });
    let answer = stand.ask(&client, &ClientMessage::RegisterRegion(region(1, 0)));
    assert_eq!(answer, ManagerMessage::Region { region: 1, page_bytes: 8192 });
    let held = &stand.regions[0].1;
    assert_eq!(held.page_bytes, 8192);
    assert_eq!(held.memories, [Arc::new(1 << 20), Arc::new(1 << 20)]);

    drop(client);
    stand.until_no_sessions();
    assert_eq!(stand.closed(CloseCause::Disconnected), 1);
}

#[test]
fn order_and_handles_are_checked() {
    let mut stand = Stand::start(settings());
    let early = stand.connect();
    for message in [
        ClientMessage::DefineNamespace(namespace("m")),
        ClientMessage::RegisterRegion(region(1, 0)),
    ] {
        assert_eq!(stand.refused(&early, &message).0, Refusal::OutOfOrder);
    }
    // Two faults so far; the third closes.
    let set = ClientMessage::DefineSet { members: vec![] };
    assert_eq!(stand.refused(&early, &set).0, Refusal::OutOfOrder);
    stand.hears_the_end(&early);
    assert_eq!(stand.closed(CloseCause::TooManyRefusals), 1);

    for (message, part) in [
        (hello(), "already attached"),
        (ClientMessage::DefineSet { members: vec![] }, "members of the set is 0"),
        (ClientMessage::DefineSet { members: vec![9] }, "scope 9 is not defined"),
        (ClientMessage::DefineSet { members: vec![1; 65] }, "1 to 64 is accepted"),
        (ClientMessage::RegisterRegion(region(7, 0)), "scope 7"),
        (ClientMessage::RegisterMemory(MemorySpec::Memfd { bytes: 4096 }), "0 descriptors"),
        (ClientMessage::ReleaseMemory { memory: 0 }, "memory 0 is not registered"),
        (ClientMessage::ReleaseMemory { memory: u32::MAX }, "memory 4294967295"),
        (ClientMessage::Evict { tier: "ssd\n".to_owned(), timeout_ms: 1 }, "\"ssd\\n\""),
        (ClientMessage::Evict { tier: "dram".to_owned(), timeout_ms: u64::MAX }, "timeout_ms"),
        (
            ClientMessage::DefineNamespace(NamespaceSpec {
                tp_rank: 2,
                tp_size: 2,
                ..namespace("")
            }),
            "tp_rank is 2",
        ),
        (
            ClientMessage::DefineNamespace(NamespaceSpec { pp_size: 0, ..namespace("") }),
            "pp_size is 0",
        ),
        (
            ClientMessage::DefineNamespace(NamespaceSpec {
                salt: "x".repeat(513),
                ..namespace("")
            }),
            "salt has 513 bytes",
        ),
        (
            ClientMessage::DefineNamespace(NamespaceSpec { page_bytes: 4095, ..namespace("") }),
            "page_bytes is 4095",
        ),
        (
            ClientMessage::DefineNamespace(NamespaceSpec {
                dependency: DependencySpec::Window(0),
                ..namespace("")
            }),
            "window is 0",
        ),
        (
            ClientMessage::RegisterMemory(MemorySpec::Process {
                address: u64::MAX - 5,
                bytes: 10,
                nonce_address: 4096,
                nonce: 1,
            }),
            "address is",
        ),
        (
            ClientMessage::RegisterMemory(MemorySpec::Cuda {
                gpu: HexBytes([1; 16]),
                handle: HexBytes([2; 64]),
                offset: i64::MAX as u64,
                bytes: 2,
            }),
            "bytes of the memory is 2",
        ),
        (events(0), "events of a message is 0: 1 to 256 is accepted"),
        (events(257), "events of a message is 257"),
    ] {
        let (client, _) = stand.attach();
        let (refusal, text) = stand.refused(&client, &message);
        let expected =
            if part.contains("already") { Refusal::OutOfOrder } else { Refusal::BadMessage };
        assert_eq!(refusal, expected, "{text}");
        assert!(text.contains(part), "{part:?} is missing from {text:?}");
        drop(client);
        stand.until_no_sessions();
    }
}

#[test]
fn what_core_or_the_device_refuse_is_passed_on_and_is_no_fault() {
    let mut stand = Stand::start(settings());
    let (client, _) = stand.attach();
    for _ in 0..2 * limits().bad_requests {
        let refused =
            stand.refused(&client, &ClientMessage::DefineNamespace(namespace("refuse me")));
        assert_eq!(refused, (Refusal::LayoutConflict, "as you wish".to_owned()));
        let unlucky = ClientMessage::RegisterMemory(MemorySpec::Process {
            address: 4096,
            bytes: 13,
            nonce_address: 4096,
            nonce: 1,
        });
        let refused = stand.refused(&client, &unlucky);
        assert_eq!(refused, (Refusal::UnsupportedMemory, "an unlucky size".to_owned()));
        let big = NamespaceSpec { page_bytes: 1 << 20, ..namespace("m") };
        let (refusal, text) = stand.refused(&client, &ClientMessage::DefineNamespace(big));
        assert_eq!(refusal, Refusal::TooLarge);
        assert!(text.contains("dram.capacity"), "{text}");
    }
    let answer = stand.ask(&client, &ClientMessage::DefineNamespace(namespace("m")));
    assert_eq!(answer, ManagerMessage::Scope { scope: 1, page_bytes: 8192 });
    let foreign = ClientMessage::RegisterRegion(region(1, 3));
    assert!(stand.refused(&client, &foreign).1.contains("memory 3"));
    let set = stand.ask(&client, &ClientMessage::DefineSet { members: vec![1] });
    assert_eq!(set, ManagerMessage::Scope { scope: 2, page_bytes: 4096 });
    let (_, text) = stand.refused(&client, &ClientMessage::RegisterRegion(region(2, 0)));
    assert!(text.contains("is a set"), "{text}");
}

#[test]
fn limits_of_a_session_hold_and_ended_regions_make_room() {
    let mut stand = Stand::start(settings());
    let (client, welcome) = stand.attach();
    let session = SessionId(welcome.session);
    for scope in 1..=4 {
        let answer = stand.ask(&client, &ClientMessage::DefineNamespace(namespace("m")));
        assert_eq!(answer, ManagerMessage::Scope { scope, page_bytes: 8192 });
    }
    for message in [
        ClientMessage::DefineNamespace(namespace("m")),
        ClientMessage::DefineSet { members: vec![1] },
    ] {
        let (refusal, text) = stand.refused(&client, &message);
        assert_eq!(refusal, Refusal::LimitReached);
        assert!(text.contains("limit of 4") && text.contains("limits.scopes"), "{text}");
    }
    let memory = ClientMessage::RegisterMemory(MemorySpec::Memfd { bytes: 1 << 20 });
    for handle in 0..2 {
        client.say_with(&memory, &[memfd().as_fd()]);
        assert_eq!(stand.hear(&client), ManagerMessage::Memory { memory: handle });
    }
    client.say_with(&memory, &[memfd().as_fd()]);
    let ManagerMessage::Refused { refusal, .. } = stand.hear(&client) else { panic!() };
    assert_eq!(refusal, Refusal::LimitReached);
    for _ in 0..2 {
        stand.ask(&client, &ClientMessage::RegisterRegion(region(1, 1)));
    }
    let (refusal, _) = stand.refused(&client, &ClientMessage::RegisterRegion(region(1, 1)));
    assert_eq!(refusal, Refusal::LimitReached);
    let (_, ended) = stand.regions.remove(0);
    stand.endpoint.reply(EndpointReply::RegionEnded { session, region: ended }).unwrap();
    let answer = stand.ask(&client, &ClientMessage::RegisterRegion(region(1, 1)));
    assert!(matches!(answer, ManagerMessage::Region { .. }), "{answer:?}");
}

#[test]
fn released_memory_makes_room_and_lives_as_long_as_the_regions_over_it() {
    let mut stand = Stand::start(settings());
    let (client, welcome) = stand.attach();
    stand.ask(&client, &ClientMessage::DefineNamespace(namespace("m")));
    let memory = ClientMessage::RegisterMemory(MemorySpec::Memfd { bytes: 1 << 20 });
    let register = |stand: &mut Stand| {
        client.say_with(&memory, &[memfd().as_fd()]);
        stand.hear(&client)
    };
    for memory in 0..2 {
        assert_eq!(register(&mut stand), ManagerMessage::Memory { memory });
    }
    stand.ask(&client, &ClientMessage::RegisterRegion(region(1, 0)));
    let of_region = Arc::downgrade(&stand.regions[0].1.memories[0]);
    let release = |memory| ClientMessage::ReleaseMemory { memory };
    assert_eq!(stand.ask(&client, &release(0)), ManagerMessage::MemoryReleased);
    let (refusal, text) = stand.refused(&client, &ClientMessage::RegisterRegion(region(1, 0)));
    assert_eq!(refusal, Refusal::BadMessage);
    assert!(text.contains("memory 0 is not registered"), "{text}");

    // It counts for as long as its region has it, in a segment each.
    assert_eq!(of_region.strong_count(), 2);
    let full = register(&mut stand);
    let ManagerMessage::Refused { refusal, .. } = full else { panic!("{full:?}") };
    assert_eq!(refusal, Refusal::LimitReached);
    let (_, ended) = stand.regions.remove(0);
    let session = SessionId(welcome.session);
    stand.endpoint.reply(EndpointReply::RegionEnded { session, region: ended }).unwrap();
    stand.until(|_| (of_region.strong_count() == 0).then_some(()));
    assert_eq!(register(&mut stand), ManagerMessage::Memory { memory: 2 }, "never the same handle");
    let answer = stand.ask(&client, &ClientMessage::RegisterRegion(region(1, 2)));
    assert!(matches!(answer, ManagerMessage::Region { .. }), "{answer:?}");

    // The other way round: no region is left when the handle ends.
    let of_region = Arc::downgrade(&stand.regions[0].1.memories[0]);
    let (_, ended) = stand.regions.remove(0);
    stand.endpoint.reply(EndpointReply::RegionEnded { session, region: ended }).unwrap();
    stand.until(|_| (of_region.strong_count() == 1).then_some(()));
    assert_eq!(stand.ask(&client, &release(2)), ManagerMessage::MemoryReleased);
    assert_eq!(of_region.strong_count(), 0);
}

#[test]
fn the_handles_of_memories_run_out_for_one_session_alone() {
    let limits = limits();
    let rules = Rules {
        limits: &limits,
        dram_bytes: 1 << 20,
        sessions: 1,
        draining: false,
        uid: 0,
        is_owner: true,
    };
    let register = || {
        let memory = MemorySpec::Process { address: 1, bytes: 1, nonce_address: 1, nonce: 1 };
        ClientMessage::RegisterMemory(memory)
    };
    let attached = || {
        let mut dialogue = Dialogue::<()>::default();
        let geometry = Geometry { ring_capacity: 64, page_entries: 1024, done_words: 1 };
        dialogue.attached(SessionId(1), geometry);
        dialogue
    };
    let mut dialogue = attached();
    for handle in 0..MEMORY_IDS_MAX {
        assert!(dialogue.check(register(), Vec::new(), &rules).is_ok());
        assert_eq!(dialogue.imported(Arc::new(())), handle);
        dialogue.released(handle);
    }
    let refused = dialogue.check(register(), Vec::new(), &rules).unwrap_err();
    assert_eq!(refused.refusal(), Refusal::LimitReached);
    assert!(refused.to_string().contains("attach again"), "{refused}");
    assert!(attached().check(register(), Vec::new(), &rules).is_ok());
}

#[test]
fn a_layer_has_a_done_word() {
    let mut stand = Stand::start(settings());
    let (client, welcome) = stand.attach();
    assert_eq!(
        stand.ask(&client, &ClientMessage::DefineNamespace(namespace("m"))),
        ManagerMessage::Scope { scope: 1, page_bytes: 8192 }
    );
    let memory = ClientMessage::RegisterMemory(MemorySpec::Memfd { bytes: 1 << 20 });
    client.say_with(&memory, &[memfd().as_fd()]);
    assert_eq!(stand.hear(&client), ManagerMessage::Memory { memory: 0 });
    let mut spec = region(1, 0);
    spec.segments[1].layer = welcome.done_words;
    let (refusal, text) = stand.refused(&client, &ClientMessage::RegisterRegion(spec.clone()));
    assert_eq!(refusal, Refusal::BadMessage);
    let words = welcome.done_words;
    assert!(text.contains(&format!("segment 1 names layer {words}")), "{text}");
    assert!(text.contains(&format!("{words} done words")), "{text}");
    spec.segments[1].layer -= 1;
    let answer = stand.ask(&client, &ClientMessage::RegisterRegion(spec));
    assert!(matches!(answer, ManagerMessage::Region { .. }), "{answer:?}");
}

#[test]
fn events_fill_the_pool_of_a_session_and_end_with_it() {
    let mut stand = Stand::start(settings());
    let (client, _) = stand.attach();
    let (other, _) = stand.attach();
    for (count, first) in [(40, 0), (1, 40), (256, 41)] {
        assert_eq!(stand.ask(&client, &events(count)), ManagerMessage::Events { first });
    }
    // All of a message or none.
    let unlucky =
        ClientMessage::RegisterEvents { gpu: HexBytes([1; 16]), handles: vec![HexBytes([13; 64])] };
    let refused = stand.refused(&client, &unlucky);
    assert_eq!(refused, (Refusal::UnsupportedMemory, "an unlucky event".to_owned()));
    let (refusal, text) = stand.refused(&client, &events(4));
    assert_eq!(refusal, Refusal::LimitReached);
    assert!(text.contains("limit of 300") && text.contains("limits.events"), "{text}");
    assert_eq!(stand.ask(&client, &events(3)), ManagerMessage::Events { first: 297 });
    assert_eq!(stand.ask(&other, &events(2)), ManagerMessage::Events { first: 0 });
    let all: Vec<_> = stand.events.iter().map(|(_, event)| Arc::downgrade(event)).collect();
    let alive = || all.iter().filter(|event| event.strong_count() > 0).count();
    assert_eq!(alive(), 302);
    drop(client);
    stand.until(|_| (alive() == 2).then_some(()));
    drop(other);
    stand.until(|_| (alive() == 0).then_some(()));
}

#[test]
fn a_session_counts_until_it_has_drained() {
    let mut stand = Stand::start(settings());
    stand.drains_at_once = false;
    let clients: Vec<_> = (0..4).map(|_| stand.attach()).collect();
    let next = stand.connect();
    let (refusal, text) = stand.refused(&next, &hello());
    assert_eq!(refusal, Refusal::LimitReached);
    assert!(text.contains("limit of 4"), "{text}");
    let gone = SessionId(clients[2].1.session);
    drop(clients);
    stand.until(|stand| stand.sessions.iter().all(|row| row.2.is_some()).then_some(()));
    assert_eq!(stand.refused(&next, &hello()).0, Refusal::LimitReached);
    stand.end(gone);
    let ManagerMessage::Welcome(welcome) = stand.ask(&next, &hello()) else { panic!() };
    assert_eq!(welcome.session, 5, "ids are never used again");
}

#[test]
fn a_client_of_another_build_is_refused_by_name() {
    let mut stand = Stand::start(settings());
    let client = stand.connect();
    let ClientMessage::Hello { engine_id, ring_capacity, page_entries, done_words, .. } = hello()
    else {
        unreachable!()
    };
    let other = ClientMessage::Hello {
        layout_fingerprint: !LAYOUT_FINGERPRINT,
        engine_id,
        ring_capacity,
        page_entries,
        done_words,
    };
    assert_eq!(stand.refused(&client, &other).0, Refusal::AbiMismatch);

    let client = stand.connect();
    let header = orbitkv_shm_protocol::bootstrap::message::MessageHeader {
        magic: orbitkv_shm_protocol::bootstrap::message::MESSAGE_MAGIC,
        abi: 9999,
        body_bytes: 3,
        descriptors: 0,
    };
    client.say_bytes(&[bytemuck::bytes_of(&header), b"new"].concat());
    let ManagerMessage::Refused { refusal, message } = stand.hear(&client) else { panic!() };
    assert_eq!(refusal, Refusal::AbiMismatch);
    assert!(message.contains("9999"), "{message}");
    stand.hears_the_end(&client);
}

#[test]
fn geometry_and_engine_id_are_checked() {
    let mut stand = Stand::start(settings());
    let variants: [(&str, u32, u32, u32, &str); 8] = [
        ("00112233445566778899aabbccddeeff", 32, 1024, 1, "ring_capacity is 32"),
        ("00112233445566778899aabbccddeeff", 512, 1024, 1, "64 to 256"),
        ("00112233445566778899aabbccddeeff", 96, 1024, 1, "a power of two"),
        ("00112233445566778899aabbccddeeff", 64, 8192, 1, "page_entries is 8192"),
        ("00112233445566778899aabbccddeeff", 64, 1024, 0, "done_words is 0"),
        ("00112233445566778899aabbccddeef", 64, 1024, 1, "31 bytes"),
        ("+0112233445566778899aabbccddeeff", 64, 1024, 1, "32 hexadecimal"),
        ("", 64, 1024, 1, "0 bytes"),
    ];
    for (engine_id, ring_capacity, page_entries, done_words, part) in variants {
        let client = stand.connect();
        let (refusal, text) = stand.refused(
            &client,
            &ClientMessage::Hello {
                layout_fingerprint: LAYOUT_FINGERPRINT,
                engine_id: engine_id.to_owned(),
                ring_capacity,
                page_entries,
                done_words,
            },
        );
        assert_eq!(refusal, Refusal::BadMessage);
        assert!(text.contains(part), "{part:?} is missing from {text:?}");
    }
}

#[test]
fn another_user_is_told_so_and_an_administrator_must_be_the_owner() {
    let us = rustix::process::geteuid().as_raw();
    let mut settings = settings();
    settings.access.owner_uid = us ^ 1;
    let mut stand = Stand::start(settings.clone());
    let client = stand.connect();
    let (refusal, text) = stand.refused(&client, &hello());
    assert_eq!(refusal, Refusal::NotAllowed);
    assert!(text.contains(&format!("--allow-uid {us}")), "{text}");
    stand.hears_the_end(&client);
    assert_eq!(stand.closed(CloseCause::NotAllowed), 1);

    let evict = ClientMessage::Evict { tier: "dram".to_owned(), timeout_ms: 10 };
    settings.access.uids = vec![us];
    let mut stand = Stand::start(settings.clone());
    let (client, _) = stand.attach();
    assert_eq!(stand.refused(&client, &evict).0, Refusal::NotAllowed);

    settings.access.uids.clear();
    settings.access.gids = vec![rustix::process::getegid().as_raw()];
    let mut stand = Stand::start(settings);
    stand.attach();

    let mut stand = Stand::start(super::settings());
    let administrator = stand.connect();
    let evicted =
        ManagerMessage::Evicted { pages: 3, bytes: 12288, pages_kept: 1, spill_drained: true };
    assert_eq!(stand.ask(&administrator, &evict), evicted);
    // An administrator holds no session, but may attach all the same.
    assert!(stand.sessions.is_empty());
    assert!(matches!(stand.ask(&administrator, &hello()), ManagerMessage::Welcome(_)));
}

#[test]
fn silence_ends_a_connection_before_its_first_message_only() {
    let mut stand = Stand::start(settings());
    let (attached, _) = stand.attach();
    let silent = stand.connect();
    // Accepted for certain, since a later one was answered.
    let (other, _) = stand.attach();
    stand.clock.advance(Duration::from_secs(61));
    stand.endpoint.shared.bell.ring();
    stand.hears_the_end(&silent);
    assert_eq!(stand.closed(CloseCause::Silent), 1);
    for client in [&attached, &other] {
        let answer = stand.ask(client, &ClientMessage::DefineNamespace(namespace("m")));
        assert!(matches!(answer, ManagerMessage::Scope { .. }));
    }
}

#[test]
fn a_crowd_of_silent_connections_is_bounded() {
    let mut stand = Stand::start(settings());
    let crowd: Vec<_> =
        (0..crate::config::UNATTACHED_MAX).map(|_| connect(&stand.path).unwrap()).collect();
    let late = stand.connect();
    let ManagerMessage::Refused { refusal, .. } = stand.hear(&late) else { panic!() };
    assert_eq!(refusal, Refusal::LimitReached);
    stand.hears_the_end(&late);
    drop(crowd);
    // The endpoint hears of one end after the other.
    let end = Instant::now() + PATIENCE;
    while !stand.may_attach() {
        assert!(Instant::now() < end, "the places of those who left stay taken");
    }
}

#[test]
fn a_question_is_answered_once_and_the_next_message_waits_for_it() {
    let mut stand = Stand::start(settings());
    let (client, _) = stand.attach();
    for model in ["a", "b", "c"] {
        client.say(&ClientMessage::DefineNamespace(namespace(model)));
    }
    for scope in 1..=3 {
        assert_eq!(stand.hear(&client), ManagerMessage::Scope { scope, page_bytes: 8192 });
    }
    // A client that leaves with a question open: its answer goes nowhere, its session ends.
    client.say(&ClientMessage::DefineNamespace(namespace("d")));
    drop(client);
    stand.until_no_sessions();
    stand.attach();
}

#[test]
fn a_session_that_broke_its_ring_is_closed_without_an_event() {
    let mut stand = Stand::start(settings());
    let (client, welcome) = stand.attach();
    let session = SessionId(welcome.session);
    stand.endpoint.reply(EndpointReply::Close { session, cause: CloseCause::RingFault }).unwrap();
    stand.hears_the_end(&client);
    assert_eq!(stand.sessions[0].2, None, "no event");
    assert_eq!(stand.closed(CloseCause::RingFault), 1);
    stand.end(session);
    stand.attach();
}

#[test]
fn a_stop_is_announced_once_refuses_newcomers_and_keeps_the_rest() {
    let mut stand = Stand::start(settings());
    let (client, _) = stand.attach();
    let stopper = stand.endpoint.stopper();
    stopper.stop();
    stopper.stop();
    stand.until(|stand| stand.stopped.then_some(()));
    stopper.stop();
    let late = stand.connect();
    assert_eq!(stand.refused(&late, &hello()).0, Refusal::Draining);
    let answer = stand.ask(&client, &ClientMessage::DefineNamespace(namespace("m")));
    assert!(matches!(answer, ManagerMessage::Scope { .. }));
    let path = stand.path.clone();
    drop(stand);
    assert!(!path.exists());
    assert!(matches!(
        transport::receive_manager(&client.socket, PATIENCE),
        Err(TransportError::Closed)
    ));
}

#[test]
fn a_client_that_never_reads_is_closed() {
    let mut stand = Stand::start(settings());
    let (client, _) = stand.attach();
    // Refusals that are no fault, until the answers fill the socket.
    let big =
        ClientMessage::DefineNamespace(NamespaceSpec { page_bytes: 1 << 20, ..namespace("m") });
    let start = Instant::now();
    while transport::send(&client.socket, &big, &[], Duration::from_millis(1)).is_ok()
        || stand.closed(CloseCause::SlowReader) == 0
    {
        stand.pump();
        assert!(start.elapsed() < PATIENCE);
    }
    stand.until_no_sessions();
    assert_eq!(stand.closed(CloseCause::SlowReader), 1);
}

const SOCKET: &str = "ORBITKV_TEST_SOCKET";

/// The client of the next test: attaches, leaves its socket to a grandchild, waits to be killed.
#[test]
fn client_with_a_grandchild() {
    let Some(path) = std::env::var_os(SOCKET) else { return };
    let socket = connect(Path::new(&path)).unwrap();
    rustix::io::fcntl_setfd(&socket, rustix::io::FdFlags::empty()).unwrap();
    transport::send(&socket, &hello(), &[], PATIENCE).unwrap();
    let (message, _) = transport::receive_manager(&socket, PATIENCE).unwrap();
    assert!(matches!(message, ManagerMessage::Welcome(_)));
    let mut grandchild = std::process::Command::new("sleep")
        .arg("120")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    println!("\ngrandchild {}", grandchild.id());
    grandchild.wait().unwrap();
}

#[test]
fn a_killed_client_is_noticed_although_a_grandchild_holds_its_socket() {
    let mut stand = Stand::start(settings());
    let mut client = rerun("endpoint::tests::attach::client_with_a_grandchild", SOCKET, "")
        .env(SOCKET, &stand.path)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    stand.until(|stand| (!stand.sessions.is_empty()).then_some(()));
    let grandchild = BufReader::new(client.stdout.take().unwrap())
        .lines()
        .find_map(|line| line.unwrap().strip_prefix("grandchild ")?.parse().ok())
        .unwrap();
    assert_eq!(stand.sessions[0].1.peer.pid, client.id());

    client.kill().unwrap();
    client.wait().unwrap();
    stand.until_no_sessions();
    assert_eq!(stand.closed(CloseCause::PeerDied), 1);
    assert_eq!(stand.closed(CloseCause::Disconnected), 0);

    let grandchild = rustix::process::Pid::from_raw(grandchild).unwrap();
    // It lived all the time, so the socket was open all the time.
    rustix::process::test_kill_process(grandchild).unwrap();
    rustix::process::kill_process(grandchild, rustix::process::Signal::KILL).unwrap();
}
