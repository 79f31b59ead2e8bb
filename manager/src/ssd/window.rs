//! Orders in the order of the disk: what waits together is sorted by place, so that neighbours
//! travel together whatever order they came in.

use std::collections::VecDeque;

/// Orders that are sorted together at most: an order is overtaken by fewer than this.
const WINDOW_ORDERS_MAX: usize = 1024;

/// A batch of orders, sorted. A new batch begins when the last one is used up, never earlier, so
/// nobody waits longer than the batch before and his own.
pub(crate) struct Window<O>(VecDeque<O>);

impl<O: Copy> Window<O> {
    pub(crate) fn new() -> Self {
        Self(VecDeque::new())
    }

    /// Fills an empty window from the front of `backlog`, up to the first that is not `taken` as
    /// an order of this window.
    pub(crate) fn refill<C: Copy>(
        &mut self,
        backlog: &mut VecDeque<C>,
        taken: impl Fn(C) -> Option<O>,
        place: impl Fn(&O) -> u64,
    ) {
        if !self.0.is_empty() {
            return;
        }
        while self.0.len() < WINDOW_ORDERS_MAX
            && let Some(order) = backlog.front().copied().and_then(&taken)
        {
            backlog.pop_front();
            self.0.push_back(order);
        }
        self.0.make_contiguous().sort_by_key(place);
    }

    /// The next order.
    pub(crate) fn front(&self) -> Option<O> {
        self.0.front().copied()
    }

    /// Takes the next order.
    pub(crate) fn pop(&mut self) -> Option<O> {
        self.0.pop_front()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_is_sorted_ends_at_a_stranger_and_is_not_overtaken_by_the_next() {
        let mut backlog: VecDeque<i64> = [5, 3, 4, -1, 1].into();
        let mut window = Window::new();
        let taken = |value: i64| u64::try_from(value).ok();
        window.refill(&mut backlog, taken, |place| *place);
        assert_eq!(window.pop(), Some(3));
        backlog.push_front(0);
        window.refill(&mut backlog, taken, |place| *place);
        assert_eq!((window.pop(), window.pop(), window.pop()), (Some(4), Some(5), None));
        window.refill(&mut backlog, taken, |place| *place);
        assert_eq!((window.pop(), backlog.front()), (Some(0), Some(&-1)));
        window.refill(&mut backlog, taken, |place| *place);
        assert!(window.is_empty(), "what is not an order is not skipped");
    }

    #[test]
    fn a_batch_is_bounded() {
        let mut backlog: VecDeque<u64> = (0..3000).rev().collect();
        let mut window = Window::new();
        window.refill(&mut backlog, Some, |place| *place);
        assert_eq!(window.front(), Some(3000 - WINDOW_ORDERS_MAX as u64));
        assert_eq!(backlog.len(), 3000 - WINDOW_ORDERS_MAX);
    }
}
