//! What the two sides say over the bootstrap socket: everything that is not per request.
//!
//! One `SOCK_SEQPACKET` datagram is one message: a [`MessageHeader`] of 16 bytes, then a JSON body
//! of one [`ClientMessage`] or [`ManagerMessage`]. The header keeps its shape for ever, so that two
//! builds with different ABI versions can still refuse each other by name.

use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;

use bytemuck::{Pod, Zeroable};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// "OKVB" in little-endian byte order.
pub const MESSAGE_MAGIC: u32 = u32::from_le_bytes(*b"OKVB");
/// Largest message, header included, in bytes. A longer datagram is refused unread.
pub const MESSAGE_BYTES_MAX: usize = 128 * 1024;
/// Most descriptors that one message may carry.
pub const MESSAGE_DESCRIPTORS_MAX: usize = 4;
/// Most segments of one page layout (layers × K/V).
pub const LAYOUT_SEGMENTS_MAX: usize = 1024;
/// Most events that one `RegisterEvents` may carry.
pub const EVENTS_PER_MESSAGE_MAX: usize = 256;
/// Longest text field of a [`NamespaceSpec`], in bytes.
pub const NAMESPACE_TEXT_MAX: usize = 512;
/// Most namespaces in one set.
pub const SCOPE_MEMBERS_MAX: usize = 64;

/// First 16 bytes of every message.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct MessageHeader {
    /// [`MESSAGE_MAGIC`].
    pub magic: u32,
    /// [`crate::layout::ABI_VERSION`] of the sender.
    pub abi: u32,
    /// Bytes of the JSON body that follows.
    pub body_bytes: u32,
    /// Descriptors attached to the datagram.
    pub descriptors: u32,
}

/// From an engine (or an administrator) to the Manager.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub enum ClientMessage {
    /// First message of an engine; answered by `Welcome` with two descriptors or by `Refused`.
    Hello {
        /// [`crate::layout::LAYOUT_FINGERPRINT`] of the client.
        layout_fingerprint: u64,
        /// 32 hex digits; sessions with the same id form an attachment group.
        engine_id: String,
        /// Records in each ring.
        ring_capacity: u32,
        /// Entries of the page table.
        page_entries: u32,
        /// Done words of one operation.
        done_words: u32,
    },
    /// Answered by `Scope`.
    DefineNamespace(NamespaceSpec),
    /// A query over several ranks or groups names their set; answered by `Scope`.
    DefineSet {
        /// Scope ids of namespaces that this session defined.
        members: Vec<u32>,
    },
    /// Answered by `Memory`. `Memfd` travels with one descriptor.
    RegisterMemory(MemorySpec),
    /// Ends a handle at once, answered by `MemoryReleased`. The memory itself is let go of when no
    /// region over it exists any more; its handle is never used again in the session.
    ReleaseMemory {
        /// As `Memory` named it.
        memory: u32,
    },
    /// Answered by `Region`.
    RegisterRegion(RegionSpec),
    /// Events of the engine that its copies may wait for: appended to the session's pool. Answered
    /// by `Events`.
    RegisterEvents {
        /// The GPU that they belong to.
        gpu: GpuId,
        /// What `cuIpcGetEventHandle` gave for each, 1 to [`EVENTS_PER_MESSAGE_MAX`].
        handles: Vec<IpcHandle>,
    },
    /// Administration, for the owner's uid: wait until the spill set is empty, then drop every
    /// unleased page of the tier. Answered by `Evicted`.
    Evict {
        /// `"dram"`.
        tier: String,
        /// Longest wait for the spill set, in milliseconds.
        timeout_ms: u64,
    },
}

/// From the Manager.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub enum ManagerMessage {
    /// The session exists; descriptors: submission segment, completion segment.
    Welcome(Welcome),
    /// The request was refused; nothing changed.
    Refused {
        /// Stable cause, see [`Refusal`].
        refusal: Refusal,
        /// One line for a person: what, values with units, what to do.
        message: String,
    },
    /// A namespace or set was defined.
    Scope {
        /// Handle for `Query`, `Prepare`, `Forget` and `RegisterRegion`.
        scope: u32,
        /// Bytes of one page image of it; for a set the sum over its members.
        page_bytes: u64,
    },
    /// Memory was mapped or probed.
    Memory {
        /// Handle for [`SegmentSpec::memory`] and `ReleaseMemory`.
        memory: u32,
    },
    /// The handle of a memory has ended.
    MemoryReleased,
    /// A region was registered.
    Region {
        /// Handle for `Save`, `Restore` and `Unregister`.
        region: u32,
        /// Bytes of one page image, as the Manager added them up.
        page_bytes: u64,
    },
    /// Events were opened.
    Events {
        /// Index of the first in the session's pool; the others follow.
        first: u32,
    },
    /// What `Evict` dropped.
    Evicted {
        /// Pages dropped from the tier.
        pages: u64,
        /// Their bytes.
        bytes: u64,
        /// Pages that stayed because they are leased or in use.
        pages_kept: u64,
        /// Whether the spill set was empty before the drop.
        spill_drained: bool,
    },
}

/// Limits and identity of a new session.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Welcome {
    /// [`crate::layout::LAYOUT_FINGERPRINT`] of the Manager.
    pub layout_fingerprint: u64,
    /// This life of the Manager.
    pub epoch: u32,
    /// This session.
    pub session: u32,
    /// As granted; equal to what was asked for.
    pub ring_capacity: u32,
    /// As granted.
    pub page_entries: u32,
    /// As granted.
    pub done_words: u32,
    /// Size of the submission segment, in bytes.
    pub submission_bytes: u64,
    /// Size of the completion segment, in bytes.
    pub completion_bytes: u64,
    /// Process id of the Manager in the client's own process-id namespace view, for
    /// `PR_SET_PTRACER`; 0 when unknown.
    pub manager_pid: u32,
    /// Largest page image, in bytes.
    pub page_bytes_max: u64,
    /// Default deadline of an operation, in milliseconds.
    pub operation_timeout_ms: u64,
    /// Time to live of a lease, in milliseconds.
    pub lease_ttl_ms: u64,
    /// Bytes of leases that all sessions together may hold.
    pub query_budget_bytes: u64,
    /// Bytes of leases that this session may hold.
    pub session_budget_bytes: u64,
    /// How long a waiter on this machine should spin before it sleeps, in nanoseconds: what
    /// [`crate::spin::window_of`] makes of the wake that the Manager measured.
    pub spin_window_ns: u64,
}

/// Identity of the bytes. Two namespaces that differ in any field never share a page.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NamespaceSpec {
    /// Model and revision.
    pub model: String,
    /// Element type of the KV, for example `bfloat16`.
    pub dtype: String,
    /// Tokens in a page.
    pub page_tokens: u32,
    /// Bytes of one page image of one rank.
    pub page_bytes: u64,
    /// Name of the KV layout and everything that fixes the byte order inside a page.
    pub layout: String,
    /// KV cache group.
    pub group: u32,
    /// Tensor-parallel rank.
    pub tp_rank: u32,
    /// Tensor-parallel size.
    pub tp_size: u32,
    /// Pipeline-parallel rank.
    pub pp_rank: u32,
    /// Pipeline-parallel size.
    pub pp_size: u32,
    /// LoRA or other adapter identity; empty for the base model.
    pub adapter: String,
    /// Cache salt; empty when unsalted.
    pub salt: String,
    /// What a hit at page k needs besides page k.
    pub dependency: DependencySpec,
}

/// Dependency kind of a namespace.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DependencySpec {
    /// Pages 0 to k.
    #[default]
    Chain,
    /// Pages k-n+1 to k.
    Window(u32),
    /// Only page k.
    State,
}

/// How the Manager reaches memory of the engine.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum MemorySpec {
    /// The attached descriptor. Sealed against shrinking it is mapped; unsealed it is only ever
    /// read and written through the descriptor.
    Memfd {
        /// Bytes of it that are offered, from offset 0.
        bytes: u64,
    },
    /// Memory of the calling process, reached by `process_vm_readv/writev`.
    Process {
        /// First address.
        address: u64,
        /// Bytes.
        bytes: u64,
        /// Address of eight bytes that hold `nonce` for as long as the memory is registered.
        nonce_address: u64,
        /// Random per attach.
        nonce: u64,
    },
    /// Memory of a GPU, opened by CUDA IPC.
    Cuda {
        /// The GPU. Not its number, which means another one in another process.
        gpu: GpuId,
        /// What `cuIpcGetMemHandle` gave. It stands for the whole allocation, whatever address in
        /// it was asked for.
        handle: IpcHandle,
        /// Where the offered bytes begin in the allocation.
        offset: u64,
        /// Bytes.
        bytes: u64,
    },
}

/// UUID of a GPU, on the wire in hex digits.
pub type GpuId = HexBytes<16>;
/// A CUDA IPC handle, on the wire in hex digits.
pub type IpcHandle = HexBytes<64>;

/// A fixed number of bytes, on the wire two hex digits each.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct HexBytes<const N: usize>(pub [u8; N]);

impl<const N: usize> fmt::Display for HexBytes<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl<const N: usize> fmt::Debug for HexBytes<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl<const N: usize> FromStr for HexBytes<N> {
    type Err = HexError;

    fn from_str(text: &str) -> Result<Self, HexError> {
        let digits = text.as_bytes();
        if digits.len() != 2 * N {
            return Err(HexError { needed: 2 * N });
        }
        let digit = |at: usize| char::from(digits[at]).to_digit(16);
        let mut bytes = [0; N];
        for (at, byte) in bytes.iter_mut().enumerate() {
            let pair = digit(2 * at).zip(digit(2 * at + 1));
            let (high, low) = pair.ok_or(HexError { needed: 2 * N })?;
            *byte = (high << 4 | low) as u8;
        }
        Ok(Self(bytes))
    }
}

/// A text that is not so many hex digits.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("not {needed} hex digits")]
pub struct HexError {
    /// How many are expected.
    pub needed: usize,
}

impl<const N: usize> Serialize for HexBytes<N> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de, const N: usize> Deserialize<'de> for HexBytes<N> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = Cow::<'de, str>::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

/// Where the pages of a region lie: segment s of device page p is
/// `length` bytes at `offset + p * stride` of `memory`; a page image is its segments in order.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RegionSpec {
    /// Scope id of the namespace that the pages belong to.
    pub scope: u32,
    /// Device pages, 1 to `u32::MAX`.
    pub pages: u32,
    /// Segments of one page, in image order.
    pub segments: Vec<SegmentSpec>,
}

/// One segment of a page layout.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SegmentSpec {
    /// Memory handle.
    pub memory: u32,
    /// Offset of device page 0's segment, in bytes.
    pub offset: u64,
    /// Distance to the same segment of the next device page, in bytes.
    pub stride: u64,
    /// Length, in bytes.
    pub length: u64,
    /// Layer that it belongs to, for restores layer by layer: below the session's done words. 0
    /// where nobody asks for such.
    #[serde(default)]
    pub layer: u32,
}

/// Why the Manager refused a message.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Refusal {
    /// Different [`crate::layout::ABI_VERSION`] or layout fingerprint.
    AbiMismatch,
    /// The caller's uid is not allowed.
    NotAllowed,
    /// A limit of the Manager is reached (sessions, scopes, regions); the message has the number.
    LimitReached,
    /// A field is out of range or inconsistent.
    BadMessage,
    /// The message is not allowed in this state.
    OutOfOrder,
    /// Page size, segment bytes or alignment do not fit the namespace.
    LayoutConflict,
    /// The memory cannot be reached; the message names the cause (Yama, uid, seals, …).
    UnsupportedMemory,
    /// A page is larger than the DRAM pool or than the largest page size.
    TooLarge,
    /// The Manager has no memory or descriptors left for a session.
    NoResources,
    /// The Manager is stopping.
    Draining,
}
