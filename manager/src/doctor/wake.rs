//! What it costs to wake a sleeping thread, and how long it pays to spin instead.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use orbitkv_shm_protocol::doorbell::{ControlBell, wait_many};
use orbitkv_shm_protocol::inspect::now_ns;

use super::Check;

/// Wakes that are measured.
const WAKES: usize = 64;
/// How long the waker lets the sleeper fall asleep.
const LULL: Duration = Duration::from_micros(300);
/// Longest time for all of it.
const TIME_MAX: Duration = Duration::from_secs(2);
/// A wake that takes longer than this makes sleeping engines slow.
const SLOW_NS: u64 = 200_000;

/// Medians of one-way wakes, in nanoseconds.
struct Wakes {
    /// From the ring to the sleeper's first instruction.
    one_way: u64,
    /// What the ringing thread itself loses.
    waker: u64,
}

pub(super) fn check(cores: u32) -> Check {
    let name = "wake";
    let Some(Wakes { one_way, waker }) = measure() else {
        return Check::warn(
            name,
            "could not be measured within 2 s",
            "the machine is very busy: try again when it is quiet",
        );
    };
    let spin = if cores > 1 {
        format!("waits spin {} to {} before they sleep", micros(one_way), micros(2 * one_way))
    } else {
        "one core: no wait spins".to_owned()
    };
    let found = format!(
        "{} from the ring to a thread that slept, {} of it lost by the waker; {spin}",
        micros(one_way),
        micros(waker)
    );
    if one_way > SLOW_NS {
        return Check::warn(
            name,
            found,
            "poll completions instead of sleeping for them, or run `serve --wait dedicated`; on a \
             virtual machine raise guest_halt_poll_ns",
        );
    }
    Check::ok(name, found)
}

fn micros(nanos: u64) -> String {
    format!("{}.{} µs", nanos / 1000, nanos % 1000 / 100)
}

/// One thread sleeps again and again, the other rings and writes down when.
fn measure() -> Option<Wakes> {
    let bell = ControlBell::new();
    let ringer = bell.ringer();
    // When the last ring was made; zero ends the sleeper, and its answer is the time it woke.
    let (rung, woken) = (AtomicU64::new(1), AtomicU64::new(1));
    let (mut one_way, mut waker) = (Vec::new(), Vec::new());
    std::thread::scope(|scope| {
        let (rung, woken) = (&rung, &woken);
        scope.spawn(move || {
            let mut seen_ring = 1;
            loop {
                let seen = bell.sleeper().begin();
                if rung.load(Ordering::Acquire) == seen_ring {
                    wait_many(&[(bell.sleeper(), seen)], Duration::from_millis(50));
                }
                let now = now_ns();
                bell.sleeper().end();
                let ring = rung.load(Ordering::Acquire);
                if ring == 0 {
                    return;
                }
                if ring != seen_ring {
                    seen_ring = ring;
                    woken.store(now, Ordering::Release);
                }
            }
        });
        let began = Instant::now();
        while one_way.len() < WAKES && began.elapsed() < TIME_MAX {
            std::thread::sleep(LULL);
            let last = woken.load(Ordering::Acquire);
            let start = now_ns();
            rung.store(start, Ordering::Release);
            let called = ringer.ring();
            let end = now_ns();
            while woken.load(Ordering::Acquire) == last && began.elapsed() < TIME_MAX {
                std::thread::yield_now();
            }
            let answer = woken.load(Ordering::Acquire);
            // One that was not asleep yet proves nothing.
            if called && answer > start {
                one_way.push(answer - start);
                waker.push(end - start);
            }
        }
        rung.store(0, Ordering::Release);
        ringer.ring();
    });
    Some(Wakes { one_way: median(one_way)?, waker: median(waker)? })
}

fn median(mut values: Vec<u64>) -> Option<u64> {
    values.sort_unstable();
    values.get(values.len() / 2).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wakes_are_measured() {
        let wakes = measure().expect("a machine that wakes a thread once in two seconds");
        assert!(wakes.one_way > 0);
        let found = check(1).found;
        assert!(found.contains("no wait spins"), "{found}");
    }

    #[test]
    fn nanoseconds_are_shown_in_microseconds() {
        assert_eq!((micros(999), micros(12_345)), ("0.9 µs".into(), "12.3 µs".into()));
        assert_eq!((median(vec![3, 1, 2]), median(vec![])), (Some(2), None));
    }
}
