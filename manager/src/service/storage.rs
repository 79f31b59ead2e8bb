//! SSD orders of `core`, handed to the tier.

use crate::core::{Effect, Event};
use crate::telemetry::mirror::DeviceMirror;

/// The SSD tier behind the reactor.
pub struct Storage {}

impl Storage {
    pub(super) fn order(&mut self, effect: Effect) {
        let _ = effect;
    }

    pub(super) fn retry_refused(&mut self) -> bool {
        false
    }

    pub(super) fn poll(&mut self) -> Option<Event<'static>> {
        None
    }

    pub(super) fn stop(&mut self) {}

    pub(super) fn write_queue_full(&self) -> u64 {
        0
    }

    pub(super) fn mirrors(
        &self,
        usage: impl Fn(usize) -> (u64, u64),
    ) -> impl Iterator<Item = DeviceMirror<'_>> {
        let _ = usage;
        std::iter::empty()
    }
}
