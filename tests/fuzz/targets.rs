//! What fuzzing runs: one module for each place where OrbitKV takes bytes from others. `run` takes
//! any bytes and panics when a promise is broken; `seeds` are inputs that get far. Included by the
//! libFuzzer entries beside it and by `tests/tests/fuzz_targets.rs`.

/// Writes `seeds` into the folder that ORBITKV_FUZZ_SEEDS names, where libFuzzer then finds them.
#[allow(dead_code, reason = "only the libFuzzer entries start from a folder")]
pub(crate) fn write_seeds(seeds: &[Vec<u8>]) {
    let Some(folder) = std::env::var_os("ORBITKV_FUZZ_SEEDS") else { return };
    for (number, seed) in seeds.iter().enumerate() {
        let path = std::path::Path::new(&folder).join(format!("seed-{number}"));
        std::fs::write(path, seed).expect("the corpus folder is writable");
    }
}

/// Bootstrap messages of both directions, through a real socket, with descriptors; a region that
/// parses is laid out over memories of the sizes that it might name.
pub(crate) mod bootstrap {
    use std::io::IoSlice;
    use std::mem::MaybeUninit;
    use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
    use std::time::Duration;

    use orbitkv_manager::device::PageLayout;
    use orbitkv_shm_protocol::bootstrap::message::{
        ClientMessage, MESSAGE_BYTES_MAX, MESSAGE_DESCRIPTORS_MAX, MESSAGE_MAGIC, ManagerMessage,
        MemorySpec, MessageHeader, Refusal, RegionSpec, SegmentSpec,
    };
    use orbitkv_shm_protocol::bootstrap::transport::{receive_client, receive_manager};
    use orbitkv_shm_protocol::layout::{ABI_VERSION, LAYOUT_FINGERPRINT};
    use rustix::net::{
        AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags,
        SocketType,
    };
    use serde_json::Value;

    /// Input: descriptors attached, direction and framing, then the datagram (or its body).
    pub(crate) fn run(data: &[u8]) {
        let [descriptors, how, rest @ ..] = data else { return };
        let attached = usize::from(descriptors % 7);
        let body = &rest[..rest.len().min(MESSAGE_BYTES_MAX + 64)];
        let header = MessageHeader {
            magic: MESSAGE_MAGIC,
            abi: ABI_VERSION,
            body_bytes: body.len() as u32,
            descriptors: attached as u32,
        };
        let is_framed = how & 1 == 0;
        let datagram =
            if is_framed { [bytemuck::bytes_of(&header), body].concat() } else { body.to_vec() };
        let (ours, theirs) = sockets();
        if !send(&theirs, &datagram, attached) {
            return;
        }
        drop(theirs);
        let received = if how & 2 == 0 {
            receive_client(&ours, Duration::ZERO).map(|(message, descriptors)| {
                if let ClientMessage::RegisterRegion(spec) = &message {
                    lay_out(spec);
                }
                (serde_json::to_value(&message).expect("plain data"), descriptors)
            })
        } else {
            receive_manager(&ours, Duration::ZERO).map(|(message, descriptors)| {
                (serde_json::to_value(&message).expect("plain data"), descriptors)
            })
        };
        if let Ok((message, descriptors)) = received {
            assert_eq!(descriptors.len(), attached);
            assert!(attached <= MESSAGE_DESCRIPTORS_MAX && datagram.len() <= MESSAGE_BYTES_MAX);
            let said: Value = serde_json::from_slice(&datagram[16..]).expect("it was parsed");
            assert!(message.is_object() && said["type"] == message["type"]);
        }
    }

    /// Any layout is refused, or every run that it answers with lies in its memory.
    fn lay_out(spec: &RegionSpec) {
        let memory = |handle: u32| (handle < 8).then(|| 4096_u64 << (handle * 7));
        let image = spec.segments.iter().fold(0_u64, |sum, s| sum.saturating_add(s.length));
        let Ok(layout) = PageLayout::new(spec, image, memory) else { return };
        let (last_page, last_byte) = (layout.pages() - 1, layout.image_bytes() - 1);
        for (page, byte) in [(0, 0), (last_page, 0), (0, last_byte), (last_page, last_byte)] {
            let place = layout.locate(page, byte).expect("inside");
            let bytes = memory(layout.memories()[usize::from(place.memory)]).expect("known");
            assert!(place.bytes > 0 && place.offset + u64::from(place.bytes) <= bytes);
        }
        assert!(layout.locate(last_page, layout.image_bytes()).is_none());
    }

    fn sockets() -> (OwnedFd, OwnedFd) {
        let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
        rustix::net::socketpair(family, kind, SocketFlags::CLOEXEC, None).expect("two descriptors")
    }

    fn send(socket: &OwnedFd, datagram: &[u8], descriptors: usize) -> bool {
        let attached = vec![socket.as_fd(); descriptors];
        let attached: &[BorrowedFd<'_>] = &attached;
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(7))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !attached.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(attached)));
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        rustix::net::sendmsg(socket, &[IoSlice::new(datagram)], &mut control, flags).is_ok()
    }

    /// One message of most kinds.
    pub(crate) fn seeds() -> Vec<Vec<u8>> {
        let segment = SegmentSpec { memory: 1, offset: 4096, stride: 8192, length: 4096, layer: 0 };
        let from_client = [
            ClientMessage::Hello {
                layout_fingerprint: LAYOUT_FINGERPRINT,
                engine_id: "0123456789abcdef".repeat(2),
                ring_capacity: 256,
                page_entries: 65_536,
                done_words: 1,
            },
            ClientMessage::DefineSet { members: vec![1, 2] },
            ClientMessage::RegisterMemory(MemorySpec::Memfd { bytes: 4096 }),
            ClientMessage::ReleaseMemory { memory: 1 },
            ClientMessage::RegisterRegion(RegionSpec {
                scope: 1,
                pages: 2,
                segments: vec![segment; 2],
            }),
            ClientMessage::Evict { tier: "dram".into(), timeout_ms: 5 },
        ];
        let from_manager = [
            ManagerMessage::Refused { refusal: Refusal::BadMessage, message: "no".into() },
            ManagerMessage::Scope { scope: 1, page_bytes: 2 },
            ManagerMessage::Evicted { pages: 1, bytes: 2, pages_kept: 3, spill_drained: true },
        ];
        let client = from_client.iter().map(|message| (0, serde_json::to_vec(message)));
        let manager = from_manager.iter().map(|message| (2, serde_json::to_vec(message)));
        let seed = |(how, body): (u8, Result<Vec<u8>, _>)| {
            [vec![0, how], body.expect("plain data")].concat()
        };
        client.chain(manager).map(seed).collect()
    }
}

/// The reading end of a ring of four records, both kinds of which are whole blocks of 64 bytes.
mod ring {
    use bytemuck::pod_read_unaligned;
    use orbitkv_shm_protocol::memory::SharedMemory;
    use orbitkv_shm_protocol::ring::{Consumer, RingRecord};

    const CAPACITY: u32 = 4;
    const TAIL: usize = 0;
    const HEAD: usize = 128;
    const SLOTS: usize = 256;

    /// Takes whatever the ring gives. Input: where the positions start and the producer's index
    /// lies, then slots, which are the answer.
    pub(super) fn take_all<R: RingRecord>(data: &[u8]) -> Option<&[u8]> {
        let (head, slots) = data.split_at_checked(16)?;
        let start: u64 = pod_read_unaligned(&head[..8]);
        let tail: u64 = pod_read_unaligned(&head[8..]);
        let bytes = CAPACITY as usize * size_of::<R>();
        let memory = SharedMemory::heap(SLOTS + bytes);
        for (i, block) in slots.as_chunks::<64>().0.iter().take(bytes / 64).enumerate() {
            memory.write::<[u8; 64]>(SLOTS + i * 64, *block);
        }
        memory.write(TAIL, tail);
        let mut consumer: Consumer<R> = Consumer::new(
            memory.slot_reader(SLOTS, CAPACITY),
            memory.word_reader(TAIL),
            memory.word_writer(HEAD),
            start,
        );
        let mut taken = 0;
        while let Ok(Some(record)) = consumer.pop() {
            assert_eq!(record.sequence(), start.wrapping_add(taken));
            taken += 1;
            assert!(taken <= u64::from(CAPACITY));
        }
        Some(slots)
    }
}

/// Request records, alone and through the Manager's end of a ring, with the range they name.
pub(crate) mod request {
    use bytemuck::{bytes_of, pod_read_unaligned};
    use orbitkv_shm_protocol::ids::{Epoch, LeaseId, OperationId, RegionId, ScopeId, SessionId};
    use orbitkv_shm_protocol::record::{PageRange, QueryMode, Request, RequestBody, RequestRecord};

    /// Input: a ring and what else is in its slots.
    pub(crate) fn run(data: &[u8]) {
        let Some(slots) = super::ring::take_all::<RequestRecord>(data) else { return };
        for slot in slots.as_chunks::<64>().0 {
            check(&pod_read_unaligned(slot));
        }
    }

    fn check(record: &RequestRecord) {
        let (session, epoch) = (SessionId(record.session), Epoch(record.epoch));
        assert_eq!(record.check_addressed_to(session, epoch), Ok(()));
        if let Ok(request) = Request::decode(record) {
            let again = request.encode(session, epoch, record.sequence);
            assert_eq!(Request::decode(&again), Ok(request));
            let _ = (request.kind(), request.operation.done_word());
        }
    }

    /// Each body once, in one ring from position 0.
    pub(crate) fn seeds() -> Vec<Vec<u8>> {
        let operation = OperationId { index: 1, generation: 2 };
        let (scope, region, lease) = (ScopeId(1), RegionId(2), LeaseId(3));
        let bodies = [
            RequestBody::Save { region, fence: Some(1) },
            RequestBody::Query { scope, mode: QueryMode::Speculative },
            RequestBody::Restore {
                region,
                lease,
                offset: 1,
                fence: None,
                keep: true,
                by_layer: true,
            },
            RequestBody::Release { lease },
            RequestBody::Cancel { operation },
            RequestBody::Prepare { scope },
            RequestBody::Forget { scope },
            RequestBody::Unregister { region },
            RequestBody::Ping,
            RequestBody::Drain,
        ];
        let record = |(sequence, body): (u64, RequestBody)| {
            let range = PageRange { start: 4, len: 8 };
            let request = Request { operation, deadline_ms: 9, range, body };
            request.encode(SessionId(1), Epoch(2), sequence)
        };
        let records: Vec<u8> =
            (0..).zip(bodies).flat_map(|body| bytes_of(&record(body)).to_vec()).collect();
        vec![[&0_u64.to_le_bytes()[..], &4_u64.to_le_bytes(), &records].concat()]
    }
}

/// Completion records, as a client reads them from a ring of a Manager that lost its mind.
pub(crate) mod completion {
    use bytemuck::{bytes_of, pod_read_unaligned};
    use orbitkv_shm_protocol::ids::{Epoch, LeaseId, OperationId, SessionId};
    use orbitkv_shm_protocol::record::{
        Code, Completion, CompletionRecord, PageOutcome, PageResult, RequestKind, Status, Tier,
    };

    /// Input: a ring and what else is in its slots.
    pub(crate) fn run(data: &[u8]) {
        let Some(slots) = super::ring::take_all::<CompletionRecord>(data) else { return };
        for slot in slots.as_chunks::<128>().0 {
            let record: CompletionRecord = pod_read_unaligned(slot);
            if let Ok(completion) = Completion::decode(&record) {
                let (session, epoch) = (SessionId(record.session), Epoch(record.epoch));
                let again = completion.encode(session, epoch, record.sequence);
                assert_eq!(Completion::decode(&again), Ok(completion));
            }
        }
        for result in slots.as_chunks::<16>().0 {
            let result: PageResult = pod_read_unaligned(result);
            let _ = PageOutcome::from_raw(result.outcome);
            let _ = (Tier::from_raw(result.tier), Code::from_raw(result.code));
        }
    }

    /// One ring of answers.
    pub(crate) fn seeds() -> Vec<Vec<u8>> {
        let record = |sequence: u64, kind| {
            let operation = OperationId { index: sequence as u32, generation: 1 };
            let completion = Completion {
                status: Status::Partial,
                code: Code::Deadline,
                lease: Some(LeaseId(7)),
                first_failed: Some(3),
                pages: 4,
                ..Completion::ok(operation, kind)
            };
            completion.encode(SessionId(1), Epoch(2), sequence)
        };
        let kinds =
            [RequestKind::Save, RequestKind::Query, RequestKind::Restore, RequestKind::Ping];
        let records: Vec<u8> = (0..)
            .zip(kinds)
            .flat_map(|(sequence, kind)| bytes_of(&record(sequence, kind)).to_vec())
            .collect();
        vec![[&0_u64.to_le_bytes()[..], &4_u64.to_le_bytes(), &records].concat()]
    }
}

/// Telemetry segments: a valid one with any words changed.
pub(crate) mod telemetry {
    use bytemuck::pod_read_unaligned;
    use orbitkv_shm_protocol::ids::Epoch;
    use orbitkv_shm_protocol::inspect::Snapshot;
    use orbitkv_shm_protocol::memory::SharedMemory;
    use orbitkv_shm_protocol::telemetry::{
        Identity, SegmentReader, SegmentWriter, TELEMETRY_BYTES,
    };

    /// Input: time, then changes {word u16, repeat u16, value u64}.
    pub(crate) fn run(data: &[u8]) {
        let Some((now, changes)) = data.split_at_checked(8) else { return };
        let now: u64 = pod_read_unaligned(now);
        let memory = SharedMemory::heap(TELEMETRY_BYTES);
        let identity = Identity {
            epoch: Epoch(1),
            pid: 2,
            uid: 3,
            started_ns: 4,
            version: "0.1.0".into(),
            socket: "/run/a.sock".into(),
        };
        drop(SegmentWriter::new(memory.clone(), &identity));
        let words = TELEMETRY_BYTES / 8;
        for change in changes.as_chunks::<12>().0.iter().take(1000) {
            let at: u16 = pod_read_unaligned(&change[..2]);
            let repeat: u16 = pod_read_unaligned(&change[2..4]);
            let value: u64 = pod_read_unaligned(&change[4..]);
            for word in 0..=usize::from(repeat % 64) {
                let word = (usize::from(at) + word) % words;
                // An odd sequence word is waited for: few inputs may pay for that.
                let may_tear = word * 8 < 0x1000 || repeat & 0x8000 != 0;
                memory.write(word * 8, if may_tear { value } else { value & !1 });
            }
        }
        let Ok(reader) = SegmentReader::new(memory.read_only()) else { return };
        let snapshot = Snapshot::take(&reader, now & 1 == 0, now);
        assert!(snapshot.sessions.len() <= 128 && snapshot.ssd.len() <= 16);
        assert!(snapshot.leases.len() <= 2048 && snapshot.operations.len() <= 2048);
        let json = serde_json::to_string(&snapshot).expect("any numbers serialise");
        assert!(!json.bytes().any(|byte| byte < 0x20));
        assert!(!snapshot.manager.socket.contains(char::is_control));
        assert!(snapshot.pages.iter().all(|page| !page.namespace.contains(char::is_control)));
    }

    /// Counts and states here and there.
    pub(crate) fn seeds() -> Vec<Vec<u8>> {
        let change = |at: u16, repeat: u16, value: u64| {
            [&at.to_le_bytes()[..], &repeat.to_le_bytes(), &value.to_le_bytes()].concat()
        };
        let first_group = 0x1000 / 8;
        vec![
            10_000_000_000_u64.to_le_bytes().to_vec(),
            [
                10_000_000_000_u64.to_le_bytes().to_vec(),
                change(0x800 / 8, 0, 2),
                change(first_group + 8, 63, 5),
                change(12_000, 63, u64::MAX),
                change(20_000, 63, 3),
            ]
            .concat(),
        ]
    }
}

/// Blocks of an SSD file: footers, superblocks and their tables, with and without good checksums.
pub(crate) mod ssd {
    use bytemuck::pod_read_unaligned;
    use orbitkv_manager::core::{ImageIdentity, RegionGeometry, Slot};
    use orbitkv_manager::ssd::format::{
        BLOCK_BYTES, Block, FileId, Footer, Superblock, SuperblockHead, checksum,
    };
    use orbitkv_shm_protocol::ids::PageHash;

    const CHECKSUM_AT: usize = BLOCK_BYTES - 8;
    /// Where a head names the checksum of its table.
    const TABLE_CHECKSUM_AT: usize = 104;

    /// Input: what is changed and whether checksums are made good, then changes {at u16, value u64}.
    pub(crate) fn run(data: &[u8]) {
        let [how, changes @ ..] = data else { return };
        let changes = || changes.as_chunks::<10>().0.iter().take(64);
        let is_sealed = how & 1 == 1;
        if how & 2 == 0 {
            let mut block = Block::ZERO;
            footer().encode(&mut block);
            changes().for_each(|change| apply(&mut block.0, change));
            let is_changed = !is_good(&block);
            if is_sealed {
                seal(&mut block);
            }
            match Footer::decode(&block) {
                Ok(found) => {
                    assert!(is_sealed || !is_changed, "a flipped bit was not noticed");
                    let slot =
                        Slot { device: 0, offset: found.slot_offset, bytes: found.slot_bytes };
                    if found.belongs_to(found.file, slot) {
                        let image = found.image.image_bytes;
                        assert!(image > 0 && image < found.slot_bytes);
                    }
                }
                Err(error) => assert!(!error.to_string().is_empty()),
            }
            return;
        }
        let mut table = Vec::new();
        let mut head = state().encode(&mut table);
        changes().for_each(|change| apply(&mut head.0, change));
        if how & 4 != 0 {
            count_regions(&mut head.0);
        }
        if is_sealed {
            seal(&mut head);
        }
        let Ok(decoded) = SuperblockHead::decode(&head) else { return };
        table.resize(decoded.table_blocks(), Block::ZERO);
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut table);
        changes().for_each(|change| apply(bytes, change));
        if is_sealed {
            let sum = checksum(bytes).to_le_bytes();
            head.0[TABLE_CHECKSUM_AT..TABLE_CHECKSUM_AT + 8].copy_from_slice(&sum);
            seal(&mut head);
        }
        let Ok(decoded) = SuperblockHead::decode(&head) else { return };
        let Ok(mut found) = decoded.with_table(&table) else { return };
        let geometry = found.geometry;
        for (region, slot_bytes) in (0..).zip(&found.regions) {
            if let Some(last) = geometry.slots(region, *slot_bytes).checked_sub(1) {
                let offset = geometry.slot_offset(region, *slot_bytes, last);
                assert!(offset + u64::from(*slot_bytes) <= geometry.capacity_bytes);
            }
        }
        assert!(found.capacity_bytes_max() >= geometry.data_offset);
        found.retire(geometry.capacity_bytes);
        found.forget([1; 32], 5);
        let again = found.encode(&mut table);
        assert!(SuperblockHead::decode(&again).is_ok());
    }

    fn apply(bytes: &mut [u8], change: &[u8; 10]) {
        let at: u16 = pod_read_unaligned(&change[..2]);
        let value: [u8; 8] = pod_read_unaligned(&change[2..]);
        if let Some(range) = bytes.len().checked_sub(7) {
            bytes[usize::from(at) % range..][..8].copy_from_slice(&value);
        }
    }

    /// Makes the number of regions fit the sizes, which chance rarely does.
    fn count_regions(head: &mut [u8; BLOCK_BYTES]) {
        let number = |at: usize| pod_read_unaligned::<u64>(&head[at..at + 8]);
        let (capacity_bytes, region_bytes, data_offset) = (number(40), number(48), number(56));
        if region_bytes > 0 {
            let geometry = RegionGeometry { data_offset, capacity_bytes, region_bytes };
            head[88..92].copy_from_slice(&geometry.regions().to_le_bytes());
        }
    }

    fn is_good(block: &Block) -> bool {
        block.0[CHECKSUM_AT..] == checksum(&block.0[..CHECKSUM_AT]).to_le_bytes()
    }

    fn seal(block: &mut Block) {
        let sum = checksum(&block.0[..CHECKSUM_AT]).to_le_bytes();
        block.0[CHECKSUM_AT..].copy_from_slice(&sum);
    }

    fn footer() -> Footer {
        Footer {
            file: FileId([1; 16]),
            slot_offset: 1 << 20,
            slot_bytes: 8192,
            image: ImageIdentity {
                namespace: [2; 32],
                hash: PageHash([3; 32]),
                parent: Some(PageHash([4; 32])),
                image_bytes: 4096,
                generation: 5,
                checksum: Some(6),
            },
        }
    }

    fn state() -> Superblock {
        let mut state = Superblock::new(FileId([1; 16]), 300 << 20, 9 << 20).expect("in range");
        state.sequence = 7;
        state.regions[1] = 8192;
        state.forget([9; 32], 55);
        state.retire(3 << 20);
        state
    }

    /// Both kinds of block, good and bad.
    pub(crate) fn seeds() -> Vec<Vec<u8>> {
        let change = |at: u16, value: u64| [&at.to_le_bytes()[..], &value.to_le_bytes()].concat();
        (0..8)
            .flat_map(|how| {
                let numbers = [change(40, 600 << 20), change(48, 1 << 40), change(88, 9)];
                [vec![how], [vec![how], numbers.concat()].concat()]
            })
            .collect()
    }
}
