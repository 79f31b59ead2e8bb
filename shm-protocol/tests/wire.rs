//! Goal: the bytes on the wire never change by accident, whatever a peer writes decodes or is
//! refused without a panic, and what is encoded decodes to the same value.
//!
//! Method: golden bytes made by hand from the documented offsets; property tests over arbitrary
//! bytes and arbitrary values. A change that breaks a golden test needs a new `ABI_VERSION`.
#![cfg(not(loom))]

use bytemuck::{bytes_of, pod_read_unaligned};
use orbitkv_shm_protocol::bootstrap::message::{MESSAGE_MAGIC, MessageHeader};
use orbitkv_shm_protocol::ids::{
    Epoch, LeaseId, OperationId, PageHash, RegionId, ScopeId, SessionId,
};
use orbitkv_shm_protocol::layout::{ABI_VERSION, LAYOUT_FINGERPRINT, SUBMISSION_MAGIC};
use orbitkv_shm_protocol::record::{
    Code, Completion, CompletionRecord, PageEntry, PageOutcome, PageRange, PageResult, QueryMode,
    Request, RequestBody, RequestKind, RequestRecord, Status, Tier, flags,
};
use orbitkv_shm_protocol::segment::SegmentHeader;
use proptest::prelude::{Just, Strategy, any, prop_assert, prop_assert_eq, prop_oneof, proptest};

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

const SESSION: SessionId = SessionId(0x0102_0304);
const EPOCH: Epoch = Epoch(0x1112_1314);
const SEQUENCE: u64 = 0x2122_2324_2526_2728;
const OPERATION: OperationId = OperationId { index: 0x3132_3334, generation: 0x4142_4344 };

#[test]
fn golden_request() {
    let request = Request {
        operation: OPERATION,
        deadline_ms: 0x5152_5354,
        range: PageRange { start: 0x6162_6364, len: 0x7172_7374 },
        body: RequestBody::Restore {
            region: RegionId(0x9192_9394),
            lease: LeaseId(0x8182_8384_8586_8788),
            offset: 0xa1a2_a3a4,
            fence: Some(0xb1b2_b3b3),
            keep: true,
            by_layer: true,
        },
    };
    assert_eq!(
        hex(bytes_of(&request.encode(SESSION, EPOCH, SEQUENCE))),
        "0403020114131211282726252423222134333231444342410300\
         0c0054535251646362617473727188878685848382819493929\
         1a4a3a2a1b4b3b2b100000000"
    );
}

#[test]
fn golden_completion() {
    let completion = Completion {
        operation: OPERATION,
        kind: RequestKind::Query,
        status: Status::Partial,
        code: Code::Deadline,
        lease: Some(LeaseId(0x5152_5354_5556_5758)),
        lease_expires_ns: 0x1112_1314_1516_1718,
        bytes: 0x6162_6364_6566_6768,
        pages: 0x7172_7374,
        pages_dram: 0x8182_8384,
        pages_ssd: 0x9192_9394,
        pages_present: 0xa1a2_a3a4,
        pages_refused: 0xb1b2_b3b4,
        first_failed: Some(0xc1c2_c3c4),
        queued_ns: 0xd1d2_d3d4_d5d6_d7d8,
        prepared_ns: 0xe1e2_e3e4_e5e6_e7e8,
        copied_ns: 0xf1f2_f3f4_f5f6_f7f8,
        published_ns: 0x0102_0304_0506_0708,
    };
    assert_eq!(
        hex(bytes_of(&completion.encode(SESSION, EPOCH, SEQUENCE))),
        "0403020114131211282726252423222134333231444342410200020008000000\
         5857565554535251686766656463626174737271848382819493929\
         1a4a3a2a1b4b3b2b1c4c3c2c1d8d7d6d5d4d3d2d1e8e7e6e5e4e3e2e1f8f7f6f5\
         f4f3f2f10807060504030201181716151413121100000000000000000000000000000000"
    );
}

#[test]
fn golden_page_entry() {
    let hash = PageHash(std::array::from_fn(|i| i as u8));
    let mut entry = PageEntry::page(hash, 0x0102_0304);
    entry.flags = flags::ENTRY_ANCHOR | flags::ENTRY_ROOT;
    assert_eq!(
        hex(bytes_of(&entry)),
        "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f\
         04030201030000000000000000000000"
    );
}

#[test]
fn golden_page_result() {
    let operation = OperationId { index: 0x0102_0304, generation: 0x1112_1314 };
    let mut result = PageResult::new(operation, PageOutcome::Refused, Tier::Ssd, Code::IoError);
    result.restorable = 1;
    assert_eq!(hex(bytes_of(&result)), "0403020114131211060002000a000100");
}

#[test]
fn golden_headers() {
    let header = SegmentHeader {
        magic: SUBMISSION_MAGIC,
        version: ABI_VERSION,
        state: 1,
        layout_fingerprint: 0x0102_0304_0506_0708,
        total_bytes: 0x1112_1314_1516_1718,
        epoch: 0x2122_2324,
        session: 0x3132_3334,
        ring_capacity: 256,
        page_entries: 65_536,
        done_words: 1,
        reserved: [0; 3],
    };
    assert_eq!(
        hex(bytes_of(&header)),
        "4f4b565355424d3101000000010000000807060504030201181716151413121124232221343332310001000\
         00000010001000000000000000000000000000000"
    );
    let header = MessageHeader {
        magic: MESSAGE_MAGIC,
        abi: ABI_VERSION,
        body_bytes: 0x0102_0304,
        descriptors: 2,
    };
    assert_eq!(hex(bytes_of(&header)), "4f4b5642010000000403020102000000");
}

/// Any change of a size or offset shows here, and is a new `ABI_VERSION`.
#[test]
fn golden_fingerprint() {
    assert_eq!((ABI_VERSION, LAYOUT_FINGERPRINT), (1, 0xfda6_d1a4_9d3f_3397));
}

/// The numbers behind the names are wire format too.
#[test]
fn golden_numbers() {
    let kinds: Vec<u16> = RequestKind::ALL.iter().map(|kind| *kind as u16).collect();
    assert_eq!(kinds, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]);
    let codes: Vec<u16> = Code::ALL.iter().map(|code| *code as u16).collect();
    assert_eq!(codes, (0..=20).collect::<Vec<u16>>());
    for kind in RequestKind::ALL {
        assert_eq!(RequestKind::from_raw(*kind as u16), Some(*kind));
    }
    for code in Code::ALL {
        assert_eq!(Code::from_raw(*code as u16), Some(*code));
    }
    assert_eq!(RequestKind::from_raw(0), None);
    assert_eq!(RequestKind::from_raw(11), None);
    assert_eq!(Code::from_raw(21), None);
}

#[test]
fn records_of_another_session_or_epoch_are_named() {
    let request = Request {
        operation: OPERATION,
        deadline_ms: 0,
        range: PageRange::default(),
        body: RequestBody::Ping,
    };
    let record = request.encode(SESSION, EPOCH, SEQUENCE);
    assert_eq!(record.check_addressed_to(SESSION, EPOCH), Ok(()));
    let other = record.check_addressed_to(SessionId(1), EPOCH).unwrap_err();
    assert_eq!((other.field, other.value), ("session", u64::from(SESSION.0)));
    let other = record.check_addressed_to(SESSION, Epoch(1)).unwrap_err();
    assert_eq!((other.field, other.value), ("epoch", u64::from(EPOCH.0)));
    let record = Completion::ok(OPERATION, RequestKind::Ping).encode(SESSION, EPOCH, SEQUENCE);
    assert_eq!(record.check_addressed_to(SESSION, EPOCH), Ok(()));
    assert_eq!(record.check_addressed_to(SESSION, Epoch(1)).unwrap_err().field, "epoch");
}

fn operations() -> impl Strategy<Value = OperationId> {
    any::<(u32, u32)>().prop_map(|(index, generation)| OperationId { index, generation })
}

/// Every fence index but the last, which the wire's "index plus one" has no room for.
fn fences() -> impl Strategy<Value = Option<u32>> {
    prop_oneof![Just(None), (0..u32::MAX).prop_map(Some)]
}

fn bodies() -> impl Strategy<Value = RequestBody> {
    let region = || any::<u32>().prop_map(RegionId);
    let scope = || any::<u32>().prop_map(ScopeId);
    let lease = || any::<u64>().prop_map(LeaseId);
    let mode = prop_oneof![
        Just(QueryMode::Demand),
        Just(QueryMode::Speculative),
        Just(QueryMode::Candidate)
    ];
    prop_oneof![
        (region(), fences()).prop_map(|(region, fence)| RequestBody::Save { region, fence }),
        (scope(), mode).prop_map(|(scope, mode)| RequestBody::Query { scope, mode }),
        (region(), lease(), any::<u32>(), fences(), any::<bool>(), any::<bool>()).prop_map(
            |(region, lease, offset, fence, keep, by_layer)| RequestBody::Restore {
                region,
                lease,
                offset,
                fence,
                keep,
                by_layer
            }
        ),
        lease().prop_map(|lease| RequestBody::Release { lease }),
        operations().prop_map(|operation| RequestBody::Cancel { operation }),
        scope().prop_map(|scope| RequestBody::Prepare { scope }),
        scope().prop_map(|scope| RequestBody::Forget { scope }),
        region().prop_map(|region| RequestBody::Unregister { region }),
        Just(RequestBody::Ping),
        Just(RequestBody::Drain),
    ]
}

fn requests() -> impl Strategy<Value = Request> {
    (operations(), any::<u32>(), any::<(u32, u32)>(), bodies()).prop_map(
        |(operation, deadline_ms, (start, len), body)| Request {
            operation,
            deadline_ms,
            range: PageRange { start, len },
            body,
        },
    )
}

fn completions() -> impl Strategy<Value = Completion> {
    let named = (
        0..RequestKind::ALL.len(),
        0..Status::ALL.len(),
        0..Code::ALL.len(),
        prop_oneof![Just(None), (1..=u64::MAX).prop_map(|lease| Some(LeaseId(lease)))],
        prop_oneof![Just(None), (0..u32::MAX).prop_map(Some)],
    );
    (operations(), named, any::<[u32; 5]>(), any::<[u64; 6]>()).prop_map(
        |(operation, (kind, status, code, lease, first_failed), counts, times)| Completion {
            operation,
            kind: RequestKind::ALL[kind],
            status: Status::ALL[status],
            code: Code::ALL[code],
            lease,
            lease_expires_ns: times[0],
            bytes: times[1],
            pages: counts[0],
            pages_dram: counts[1],
            pages_ssd: counts[2],
            pages_present: counts[3],
            pages_refused: counts[4],
            first_failed,
            queued_ns: times[2],
            prepared_ns: times[3],
            copied_ns: times[4],
            published_ns: times[5],
        },
    )
}

proptest! {
    #[test]
    fn a_request_decodes_to_what_was_encoded(request in requests(), sequence: u64) {
        let record = request.encode(SESSION, EPOCH, sequence);
        prop_assert_eq!(record.sequence, sequence);
        prop_assert_eq!(Request::decode(&record), Ok(request));
    }

    #[test]
    fn a_completion_decodes_to_what_was_encoded(completion in completions(), sequence: u64) {
        let record = completion.encode(SESSION, EPOCH, sequence);
        prop_assert_eq!(record.sequence, sequence);
        prop_assert_eq!(Completion::decode(&record), Ok(completion));
    }

    /// Half of the cases get a plausible kind and flags, so that decoding goes deep.
    #[test]
    fn any_request_bytes_decode_or_name_a_field(
        bytes: [u8; 64],
        plausible: bool,
        kind in 0_u16..12,
        flags in 0_u16..17,
    ) {
        let mut record: RequestRecord = pod_read_unaligned(&bytes);
        if plausible {
            (record.kind, record.flags, record.reserved) = (kind, flags, 0);
        }
        match Request::decode(&record) {
            Ok(request) => {
                let again = request.encode(SESSION, EPOCH, record.sequence);
                prop_assert_eq!(Request::decode(&again), Ok(request));
            }
            Err(bad) => prop_assert!(["kind", "flags", "reserved"].contains(&bad.field)),
        }
    }

    #[test]
    fn any_completion_bytes_decode_or_name_a_field(
        bytes: [[u8; 32]; 4],
        plausible: bool,
        kind in 0_u16..12,
        status in 0_u16..5,
        code in 0_u16..23,
    ) {
        let mut record: CompletionRecord = pod_read_unaligned(bytes.as_flattened());
        if plausible {
            (record.kind, record.status, record.code) = (kind, status, code);
        }
        match Completion::decode(&record) {
            Ok(completion) => {
                let again = completion.encode(SESSION, EPOCH, record.sequence);
                prop_assert_eq!(Completion::decode(&again), Ok(completion));
            }
            Err(bad) => prop_assert!(["kind", "status", "code"].contains(&bad.field)),
        }
    }

    #[test]
    fn any_numbers_have_a_name_or_none(raw: u16) {
        prop_assert_eq!(Code::from_raw(raw).map(|code| code as u16), (raw <= 20).then_some(raw));
        prop_assert_eq!(
            Status::from_raw(raw).map(|status| status as u16),
            (1..=3).contains(&raw).then_some(raw)
        );
        prop_assert_eq!(
            PageOutcome::from_raw(raw).map(|outcome| outcome as u16),
            (raw <= 6).then_some(raw)
        );
        prop_assert_eq!(Tier::from_raw(raw).map(|tier| tier as u16), (raw <= 2).then_some(raw));
    }
}
