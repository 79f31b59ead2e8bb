//! The wire between an inference engine and the OrbitKV Manager on the same host: this page is
//! its specification, the modules are its only implementation, used by both sides.
//!
//! Nothing here starts a thread or logs. After attach nothing allocates, and the only system calls
//! are the two of the doorbell.
//!
//! # Byte map
//!
//! A session is two memfds, split by writer. Neither process can write the other's: the Manager
//! maps the submission segment read-only, and the completion segment is sealed against any
//! writable mapping but the Manager's.
//!
//! ```text
//! submission segment: the engine writes          completion segment: the Manager writes
//! ┌────────┬──────────────────────────────┐      ┌────────┬──────────────────────────────┐
//! │ 0x0000 │ header                       │      │ 0x0000 │ header (state changes)       │
//! │ 0x1000 │ request_tail             u64 │◀────▶│ 0x1000 │ request_head             u64 │
//! │ 0x1080 │ completion_head          u64 │◀────▶│ 0x1080 │ completion_tail          u64 │
//! │ 0x1100 │ engine sleep generation  u32 │◀────▶│ 0x1100 │ manager sleep generation u32 │
//! │ 0x1180 │ manager doorbell         u32 │◀────▶│ 0x1180 │ engine doorbell          u32 │
//! │ 0x2000 │ request ring    capacity × 64│      │ 0x2000 │ completion ring capacity×128 │
//! │      … │ page table      entries × 48 │      │      … │ page results    entries × 16 │
//! │        │                              │      │      … │ done words  capacity × stride│
//! └────────┴──────────────────────────────┘      └────────┴──────────────────────────────┘
//! header: magic u64 · version u32 · state u32 · layout_fingerprint u64 · total_bytes u64 ·
//!         epoch u32 · session u32 · ring_capacity u32 · page_entries u32 · done_words u32
//! ```
//!
//! Every word lies in a 128-byte block of its own, every array on a 4 KiB boundary; a stride is
//! `done_words × 4` rounded up to 64 bytes. All numbers are little-endian integers without
//! padding ([`record`], [`layout`]); every bit pattern of a record is legal to read, and only
//! [`record::Request::decode`] and [`record::Completion::decode`] give it meaning. Capacity, masks
//! and own positions are private to each side: shared memory is never asked for them.
//!
//! Any change to a size, an offset or a number's meaning is a new [`layout::ABI_VERSION`]; sizes
//! and offsets are also folded into [`layout::LAYOUT_FINGERPRINT`], so that two builds which claim
//! the same version but differ refuse each other too.
//!
//! # Life of a session
//!
//! ```text
//! engine                                              Manager
//!   connect ───────────── SOCK_SEQPACKET ───────────▶   accept, SO_PEERCRED, pidfd
//!   Hello {fingerprint, engine id, geometry} ────────▶  check; create, fill and seal two memfds
//!   ◀────────── Welcome {session, epoch, sizes} + 2 fds  state Open
//!   check seals, size, magic, version, fingerprint,
//!   geometry; map                                       (any mismatch: refused by name)
//!   Define…, Register… ◀─────────────────────────────▶  everything that is not per request
//!   ┌──────────────────── no message per request from here on ────────────────────────┐
//!   │ push, publish, ring ──── request ring ─────────▶  pop, check, copy the range, release  │
//!   │ pop, results, release ◀─ completion ring ───────  results, push, publish, ring  │
//!   └──────────────────────────────────────────────────────────────────────────────────┘
//!   exit or death: pidfd readable ───────────────────▶  state Closed; copies drain; unmap
//!                                    Manager stopping:  state Draining, then Closed
//! ```
//!
//! As the Manager sees its peer, who may be buggy or hostile:
//!
//! | state | what the peer did | what happens |
//! | --- | --- | --- |
//! | connected | a message that is too long, cut short, of another magic or no message ([`bootstrap::transport::TransportError`]) | the socket is closed, its descriptors too |
//! | connected | `Hello` of another version or fingerprint | refused, both versions named |
//! | open | ring index ahead of what can be, or backwards; record of another position ([`ring::RingViolation`]) | the session closes; the handle stays poisoned |
//! | open | record of another session or epoch ([`record::RequestRecord::check_addressed_to`]) | the session closes |
//! | open | a field with no meaning ([`record::BadField`]), a range beyond the table | one error completion; the sixteenth closes the session |
//! | open | holes punched into its own segment | zeros: a wrong sequence, or fields with no meaning |
//! | open | sleep generation or doorbell scribbled over | one needless or missing wake, bounded by the timeout |
//! | any | death, exec, exit | the pidfd says so; a closed socket is only a hint |
//!
//! The engine checks the Manager's words in the same way; a violation there means that nothing
//! the Manager says can be relied on any more.
//!
//! # Credits
//!
//! A session has at most `ring_capacity` operations outstanding, counted from publishing the
//! request to consuming its completion, so that the completion ring is never full and the Manager
//! never waits for a client. [`layout::reserved_credits`] of them are for `Release`, `Cancel` and
//! `Drain`.
//!
//! # Ordering
//!
//! Everything is relaxed but the accesses below. Each has a name, which the code uses at both
//! ends (`tests/ordering.rs` compares the two).
//!
//! | sync point | stored by | seen by | what it orders |
//! | --- | --- | --- | --- |
//! | `header-version` | Manager: release store of the version, last | engine: `pread` after receiving the descriptor | a finished header |
//! | `ring-publish` | producer: release store of its tail ([`ring::Producer::publish`]) | consumer: acquire load ([`ring::Consumer::pop`], [`ring::Consumer::ready`]) | slots up to the tail; page entries of a request; page results and the done word of a completion |
//! | `ring-release` | consumer: release store of its head ([`ring::Consumer::release`]) | producer: acquire load ([`ring::Producer::free`], `push` when full) | the consumer's reads of slots before the producer's next writes to them |
//! | `wake-fence` | waiter: sleep generation, full fence, re-check of the ring ([`doorbell::Sleeper::begin`]) | publisher: ring, full fence, look at the generation ([`doorbell::Ringer::ring`]) | either the re-check sees what was published or the publisher sees the sleep |
//! | `bell` | publisher: release store of the doorbell, futex wake | waiter: acquire load before it announces its sleep; the kernel compares | a ring between announcing and sleeping is not slept over |
//! | `bell-gate` | one of several ringers in a process: swap of the generation last woken ([`doorbell::ControlRinger::ring`]) | the other ringers | exactly one of them owes the wake of a sleep |
//! | `done-word` | device: store after the last byte ([`segment::DoneWords::store`], or the GPU with its memory barrier) | engine: acquire load ([`segment::DoneWordsReader::load`]); Manager, before it stores a failure ([`segment::DoneWords::load`]) | the bytes of the copied pages |
//! | `session-state` | Manager: release store ([`segment::ManagerSide::set_state`]) | engine: acquire load ([`segment::EngineSide::state`]) | nothing but itself |
//!
//! Page entries need no word of their own: the engine does not touch a range between publishing
//! its request and consuming its completion; if it does, the Manager has one copy of whatever was
//! there, and uses only the copy.
//!
//! `tests/loom.rs` runs the real ring and doorbell over loom's memory model: every interleaving
//! and stale load of one producer and one consumer, and up to a few preemptions where they sleep
//! repeatedly or two ringers share a [`doorbell::ControlBell`]. It also checks that the model
//! rejects either fence left out, the doorbell read after the re-check, and a relaxed
//! `ring-publish`.
//!
//! # Fork
//!
//! A forked child inherits handles without mappings (`MADV_DONTFORK`) and must not use them;
//! [`segment::EngineSide::is_mapped_here`] tells it so by one private load
//! ([`memory::ForkGuard`]). Dropping what it inherited is harmless.

#![warn(missing_docs)]

pub mod bootstrap;
pub mod doorbell;
pub mod ids;
pub mod inspect;
pub mod layout;
pub mod memory;
pub mod record;
pub mod ring;
pub mod segment;
pub mod spin;
pub mod telemetry;
