//! Which runs of the page table belong to an operation in flight.

use orbitkv_shm_protocol::record::PageRange;

/// First-fit allocator over the entries of one page table.
///
/// Lowest address first, because the entries last used are the ones still in a cache. Free runs are
/// kept sorted and joined, so there is at most one more of them than there are live ranges: the
/// list is sized once and never grows. Ranges do not wrap.
#[derive(Debug)]
pub(crate) struct RangeAllocator {
    free: Vec<PageRange>,
}

impl RangeAllocator {
    /// An empty table of `entries` that at most `ranges_max` live ranges share.
    pub(crate) fn new(entries: u32, ranges_max: u32) -> Self {
        let mut free = Vec::with_capacity(ranges_max as usize + 1);
        free.push(PageRange { start: 0, len: entries });
        Self { free }
    }

    /// `len` entries that no live range overlaps, or `None` when no free run is that long. An
    /// empty range takes nothing.
    pub(crate) fn allocate(&mut self, len: u32) -> Option<PageRange> {
        if len == 0 {
            return Some(PageRange::default());
        }
        let at = self.free.iter().position(|run| run.len >= len)?;
        let run = &mut self.free[at];
        let range = PageRange { start: run.start, len };
        run.start += len;
        run.len -= len;
        if run.len == 0 {
            self.free.remove(at);
        }
        Some(range)
    }

    /// Gives back a range that [`allocate`](Self::allocate) returned, exactly once.
    pub(crate) fn release(&mut self, range: PageRange) {
        if range.len == 0 {
            return;
        }
        let end = range.start + range.len;
        let at = self.free.partition_point(|run| run.start < range.start);
        let joins_next = self.free.get(at).is_some_and(|next| next.start == end);
        let joins_previous =
            at.checked_sub(1).is_some_and(|p| self.free[p].start + self.free[p].len == range.start);
        debug_assert!(self.free.get(at).is_none_or(|next| next.start >= end), "double release");
        match (joins_previous, joins_next) {
            (true, true) => {
                self.free[at - 1].len += range.len + self.free[at].len;
                self.free.remove(at);
            }
            (true, false) => self.free[at - 1].len += range.len,
            (false, true) => {
                self.free[at].start = range.start;
                self.free[at].len += range.len;
            }
            (false, false) => self.free.insert(at, range),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The obvious model: one flag an entry.
    struct Model {
        taken: Vec<bool>,
        live: Vec<PageRange>,
    }

    impl Model {
        fn fits(&self, len: u32) -> bool {
            let mut run = 0;
            self.taken.iter().any(|&taken| {
                run = if taken { 0 } else { run + 1 };
                run >= len
            })
        }

        fn mark(&mut self, range: PageRange, taken: bool) {
            for entry in &mut self.taken[range.start as usize..][..range.len as usize] {
                assert_ne!(*entry, taken, "{range:?} overlaps another live range");
                *entry = taken;
            }
        }
    }

    /// Goal: as below, for every history of a tiny table. Method: a step allocates one of the
    /// lengths or releases one of the live ranges.
    #[test]
    fn all_short_histories_match_a_flag_per_entry() {
        const LENGTH: u32 = 6;
        for entries in [1_u32, 2, 4] {
            let choices = 2 * entries + 1;
            for mut history in 0..choices.pow(LENGTH) {
                let mut ranges = RangeAllocator::new(entries, entries);
                let mut model = Model { taken: vec![false; entries as usize], live: Vec::new() };
                for _ in 0..LENGTH {
                    let step = history % choices;
                    history /= choices;
                    if step <= entries {
                        let len = step + 1;
                        let range = ranges.allocate(len);
                        assert_eq!(range.is_some(), model.fits(len), "{len} of {ranges:?}");
                        let Some(range) = range else { continue };
                        assert_eq!(range.len, len);
                        model.mark(range, true);
                        model.live.push(range);
                    } else {
                        let at = (step - entries - 1) as usize;
                        if at >= model.live.len() {
                            break;
                        }
                        let range = model.live.remove(at);
                        ranges.release(range);
                        model.mark(range, false);
                    }
                    let free: u32 = ranges.free.iter().map(|run| run.len).sum();
                    let taken = model.taken.iter().filter(|taken| **taken).count() as u32;
                    assert_eq!(free, entries - taken);
                }
            }
        }
    }

    proptest! {
        /// Goal: ranges never overlap or wrap, a fitting request is never refused, and releasing
        /// everything makes the table whole again. Method: every step against a flag per entry.
        #[test]
        fn agrees_with_a_flag_per_entry(
            entries in 1_u32..64,
            steps in proptest::collection::vec((any::<bool>(), 0_u32..80), 1..200),
        ) {
            let ranges_max = entries;
            let mut ranges = RangeAllocator::new(entries, ranges_max);
            let storage = ranges.free.capacity();
            let mut model = Model { taken: vec![false; entries as usize], live: Vec::new() };
            for (allocate, number) in steps {
                if allocate || model.live.is_empty() {
                    match ranges.allocate(number) {
                        Some(range) if number > 0 => {
                            prop_assert_eq!(range.len, number);
                            prop_assert!(range.start + range.len <= entries);
                            model.mark(range, true);
                            model.live.push(range);
                        }
                        Some(range) => prop_assert_eq!(range, PageRange::default()),
                        None => prop_assert!(!model.fits(number)),
                    }
                } else {
                    let at = number as usize % model.live.len();
                    let range = model.live.swap_remove(at);
                    ranges.release(range);
                    model.mark(range, false);
                }
                prop_assert!(ranges.free.windows(2).all(|w| w[0].start + w[0].len < w[1].start));
                prop_assert!(ranges.free.len() <= model.live.len() + 1);
            }
            for range in model.live.drain(..) {
                ranges.release(range);
            }
            prop_assert_eq!(&ranges.free[..], &[PageRange { start: 0, len: entries }][..]);
            prop_assert_eq!(ranges.free.capacity(), storage, "the list grew");
        }
    }
}
