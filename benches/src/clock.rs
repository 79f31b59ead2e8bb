//! The clock that every process of a host shares.

/// CLOCK_MONOTONIC, in nanoseconds: the one that completions are stamped with.
#[inline]
pub(crate) fn now_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}
