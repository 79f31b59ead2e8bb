//! The engine's memory of one shape, on either device, and raw copies over it.

use orbitkv_engine::{Client, Memory};
use serde::{Deserialize, Serialize};

use crate::error::BenchError;

/// Which pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Side {
    /// Those that are saved.
    From,
    /// Those that are restored into.
    To,
}

/// A raw copy of all pages of one side, in one of the [`Field::ways`], from or to the pinned images
/// of a slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct Raw {
    /// Position among the ways.
    pub(super) way: usize,
    /// 0 or 1.
    pub(super) slot: usize,
}

/// Images that raw copies go to and come from.
pub(super) const SLOTS: usize = 2;

/// Memory of the engine with the pages of one shape.
pub(super) trait Field {
    /// Offers every allocation, in order.
    fn register(&mut self, client: &mut Client) -> Result<Vec<Memory>, BenchError>;

    /// An event behind everything that was done to the pages, which it has passed; none where nothing
    /// needs one. It belongs to one operation until [`end_fence`](Self::end_fence).
    fn fence(&mut self) -> Result<Option<u32>, BenchError>;

    /// The operation has ended.
    fn end_fence(&mut self, fence: Option<u32>);

    /// Writes all pages of one side, as `seed` says.
    fn fill(&mut self, side: Side, seed: u64) -> Result<(), BenchError>;

    /// Overwrites the pages that are restored into with what no seed in use says.
    fn poison(&mut self) -> Result<(), BenchError>;

    /// How many words of eight bytes of the restored pages are not what `seed` says.
    fn wrong_words(&mut self, seed: u64) -> Result<u64, BenchError>;

    /// Names of the ways to copy the pages of one side.
    fn ways(&self, side: Side) -> Vec<&'static str>;

    /// Copies both ways at once, as far as asked for: from the pages that are saved, and to those
    /// that are restored. Returns the nanoseconds from the call to seeing the end of all.
    fn raw(&mut self, save: Option<Raw>, restore: Option<Raw>) -> Result<u64, BenchError>;

    /// The same by another process with images of its own, of slot 0, while this one waits. None where
    /// it makes no difference who copies.
    fn elsewhere(
        &mut self,
        save: Option<Raw>,
        restore: Option<Raw>,
    ) -> Result<Option<u64>, BenchError>;
}
