//! Pure decisions: who may save, what is hit, who waits, which page goes, what is written where.
//!
//! No threads, clocks, system calls or `unsafe`. [`Event`]s with a timestamp go in, [`Effect`]s come
//! out; the same code runs in the Manager, under the seeded simulator and in `orbitkv simulate`.

mod effect;
mod event;

pub use effect::{CopyPage, Direction, Effect, Effects, Extent, ImageIdentity, PeerFault, Slot};
pub use event::{CopyFault, Event, IoFault, Nanos, Ticket};
