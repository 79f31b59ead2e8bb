//! What it costs to wake a sleeper on this machine: measured once at start-up, because it is 2 µs
//! on bare metal and 20 to 50 µs in a virtual machine, and every spin is measured against it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use orbitkv_shm_protocol::doorbell::ControlBell;

use crate::clock::Clock;

/// Wakes to measure; the median counts.
const ROUNDS: usize = 15;
/// How long the sleeper sleeps before each wake: long enough for its processor to go idle.
const REST: Duration = Duration::from_micros(100);
/// A wake that takes longer met a busy machine and is left out.
const WAKE_MAX: Duration = Duration::from_millis(5);
/// The whole measurement takes no longer, whatever else runs.
const MEASURE_MAX: Duration = Duration::from_millis(100);

/// Time from the ring of a doorbell to the first instruction of the sleeper: the median of some
/// wakes, about 3 ms in all. `None` where the machine was too busy for a single one.
pub fn measure(clock: &Clock) -> Option<Duration> {
    let bell = ControlBell::new();
    let ringer = bell.ringer();
    let announced = AtomicBool::new(false);
    let woke_ns = AtomicU64::new(0);
    let over = AtomicBool::new(false);
    let mut wakes = Vec::with_capacity(ROUNDS);
    thread::scope(|scope| {
        // The bell has one sleeper, on the thread that owns it.
        let (announced, woke_ns, over) = (&announced, &woke_ns, &over);
        let sleeper = thread::Builder::new().name("orbitkv-wake".to_owned());
        let started = sleeper.spawn_scoped(scope, move || {
            while !over.load(Ordering::Acquire) {
                let seen = bell.sleeper().begin();
                announced.store(true, Ordering::Release);
                bell.sleeper().wait(seen, WAKE_MAX);
                woke_ns.store(clock.now(), Ordering::Release);
                bell.sleeper().end();
                // Until the other side has read it.
                while announced.load(Ordering::Acquire) && !over.load(Ordering::Acquire) {
                    thread::yield_now();
                }
            }
        });
        if started.is_ok() {
            let begun = Instant::now();
            while wakes.len() < ROUNDS && begun.elapsed() < MEASURE_MAX {
                thread::sleep(REST);
                if !announced.load(Ordering::Acquire) {
                    continue;
                }
                woke_ns.store(0, Ordering::Release);
                let rung_ns = clock.now();
                let rang = ringer.ring();
                let woke = wait_for(woke_ns, clock, rung_ns);
                if let Some(wake) = woke.filter(|_| rang) {
                    wakes.push(wake);
                }
                announced.store(false, Ordering::Release);
            }
        }
        over.store(true, Ordering::Release);
        ringer.ring();
    });
    wakes.sort_unstable();
    wakes.get(wakes.len() / 2).copied()
}

/// How long after `rung_ns` the sleeper was awake; `None` when that took too long.
fn wait_for(woke_ns: &AtomicU64, clock: &Clock, rung_ns: u64) -> Option<Duration> {
    loop {
        let woke = woke_ns.load(Ordering::Acquire);
        if woke != 0 {
            let wake = Duration::from_nanos(woke.saturating_sub(rung_ns));
            return (wake < WAKE_MAX).then_some(wake);
        }
        if clock.now().saturating_sub(rung_ns) > WAKE_MAX.as_nanos() as u64 {
            return None;
        }
        // On one processor the sleeper runs only when this thread does not.
        thread::yield_now();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// However busy the machine, there is an answer within the bounds or none at all.
    #[test]
    fn a_wake_is_longer_than_nothing_and_below_the_bound() {
        if let Some(wake) = measure(&Clock::monotonic()) {
            assert!(wake > Duration::ZERO && wake < WAKE_MAX, "{wake:?}");
        }
    }
}
