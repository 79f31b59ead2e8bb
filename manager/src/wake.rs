//! What it costs to wake a sleeper on this machine: measured once at start-up, because it is 2 µs
//! on bare metal and 20 to 50 µs in a virtual machine, and every spin is measured against it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use orbitkv_shm_protocol::doorbell::{ControlBell, ControlRinger};
use rustix::thread::CpuSet;

use crate::clock::{Clock, nanos_of};

/// Wakes to measure; the median counts.
const ROUNDS: usize = 15;
/// How long the sleeper sleeps before each wake: long enough for its processor to go idle.
const REST: Duration = Duration::from_micros(100);
/// A sleep without a wake ends after this, and a wake that takes longer met a busy machine and is
/// left out.
const WAKE_MAX: Duration = Duration::from_millis(5);
/// The whole measurement takes no longer, whatever else runs.
const MEASURE_MAX: Duration = Duration::from_millis(100);

/// Time from the ring of a doorbell to the first instruction of a sleeper on another processor: the
/// median of some wakes, about 5 ms in all. `None` where this process may run on one processor only,
/// or the machine was too busy for a single wake.
pub fn measure(clock: &Clock) -> Option<Duration> {
    let (ringer_cpu, sleeper_cpu) = two_processors()?;
    let bell = ControlBell::new();
    let ringer = bell.ringer();
    let handshake = Handshake::default();
    thread::scope(|scope| {
        let handshake = &handshake;
        // The bell has one sleeper, on the thread that owns it.
        let sleeper = thread::Builder::new().name("orbitkv-wake".to_owned());
        sleeper
            .spawn_scoped(scope, move || sleep_and_tell(&bell, handshake, sleeper_cpu, clock))
            .ok()?;
        let prober = thread::Builder::new().name("orbitkv-wake".to_owned());
        let wakes = prober.spawn_scoped(scope, move || {
            let wakes = bind(ringer_cpu).map(|()| wake_often(&ringer, handshake, clock));
            handshake.over.store(true, Ordering::Release);
            ringer.ring();
            wakes
        });
        let Ok(wakes) = wakes else {
            handshake.over.store(true, Ordering::Release);
            return None;
        };
        let mut wakes = wakes.join().ok()??;
        wakes.sort_unstable();
        wakes.get(wakes.len() / 2).copied()
    })
}

/// The first and the last processor that this process may use: neighbours may be one core.
fn two_processors() -> Option<(usize, usize)> {
    let allowed = rustix::thread::sched_getaffinity(None).ok()?;
    let mut allowed = (0..CpuSet::MAX_CPU).filter(|&cpu| allowed.is_set(cpu));
    Some((allowed.next()?, allowed.next_back()?))
}

/// Binds the calling thread.
fn bind(cpu: usize) -> Option<()> {
    let mut only = CpuSet::new();
    only.set(cpu);
    rustix::thread::sched_setaffinity(None, &only).ok()
}

#[derive(Default)]
struct Handshake {
    /// The sleeper is about to sleep; taken back when its time was read.
    announced: AtomicBool,
    woke_ns: AtomicU64,
    over: AtomicBool,
}

fn sleep_and_tell(bell: &ControlBell, handshake: &Handshake, cpu: usize, clock: &Clock) {
    if bind(cpu).is_none() {
        return;
    }
    while !handshake.over.load(Ordering::Acquire) {
        let seen = bell.sleeper().begin();
        handshake.announced.store(true, Ordering::Release);
        bell.sleeper().wait(seen, WAKE_MAX);
        handshake.woke_ns.store(clock.now(), Ordering::Release);
        bell.sleeper().end();
        while handshake.announced.load(Ordering::Acquire) && !handshake.over.load(Ordering::Acquire)
        {
            thread::yield_now();
        }
    }
}

fn wake_often(ringer: &ControlRinger, handshake: &Handshake, clock: &Clock) -> Vec<Duration> {
    let mut wakes = Vec::with_capacity(ROUNDS);
    let begun = clock.now();
    while wakes.len() < ROUNDS && clock.now() - begun < nanos_of(MEASURE_MAX) {
        thread::sleep(REST);
        if !handshake.announced.load(Ordering::Acquire) {
            continue;
        }
        handshake.woke_ns.store(0, Ordering::Release);
        let rung_ns = clock.now();
        if ringer.ring() {
            wakes.extend(wait_for(&handshake.woke_ns, clock, rung_ns));
        }
        handshake.announced.store(false, Ordering::Release);
    }
    wakes
}

/// How long after `rung_ns` the sleeper was awake; `None` when that took too long.
fn wait_for(woke_ns: &AtomicU64, clock: &Clock, rung_ns: u64) -> Option<Duration> {
    loop {
        let woke = woke_ns.load(Ordering::Acquire);
        if woke != 0 {
            let wake = Duration::from_nanos(woke.saturating_sub(rung_ns));
            return (wake < WAKE_MAX).then_some(wake);
        }
        if clock.now().saturating_sub(rung_ns) > nanos_of(WAKE_MAX) {
            return None;
        }
        std::hint::spin_loop();
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
