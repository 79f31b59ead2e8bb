//! What it costs to wake a sleeping thread, and how long it pays to spin instead.

use std::time::Duration;

use orbitkv_shm_protocol::spin::{WINDOW_UNMEASURED, window_of};

use super::Check;
use crate::clock::Clock;
use crate::wake;

/// A wake that takes longer than this makes engines that sleep slow.
const SLOW: Duration = Duration::from_micros(200);

/// Measured as `serve` measures it at start-up.
pub(super) fn check(cores: u32) -> Check {
    judge(cores, wake::measure(&Clock::monotonic()))
}

fn judge(cores: u32, wake: Option<Duration>) -> Check {
    let name = "wake";
    let spin = |window: Duration| match cores {
        0 | 1 => "one core: no wait spins".to_owned(),
        _ => format!("waits spin for {} before they sleep", micros(window)),
    };
    let Some(wake) = wake else {
        return Check::warn(
            name,
            format!("could not be measured; {}", spin(WINDOW_UNMEASURED)),
            "the machine is very busy: try again when it is quiet",
        );
    };
    let found =
        format!("{} from the ring to a thread that slept; {}", micros(wake), spin(window_of(wake)));
    if wake > SLOW {
        return Check::warn(
            name,
            found,
            "poll completions instead of sleeping for them, or run `serve --wait dedicated`; on a \
             virtual machine raise guest_halt_poll_ns",
        );
    }
    Check::ok(name, found)
}

fn micros(time: Duration) -> String {
    format!("{:.1} µs", time.as_nanos() as f64 / 1e3)
}

#[cfg(test)]
mod tests {
    use super::super::Status;
    use super::*;

    #[test]
    fn wakes_are_judged_and_the_window_is_told() {
        let fast = judge(2, Some(Duration::from_micros(20)));
        assert_eq!(fast.status, Status::Ok);
        let window = micros(window_of(Duration::from_micros(20)));
        assert!(fast.found.contains("20.0 µs") && fast.found.contains(&window), "{fast:?}");
        assert!(judge(1, Some(SLOW)).found.contains("no wait spins"));
        assert_eq!(judge(2, Some(SLOW * 2)).status, Status::Warn);
        assert_eq!(judge(2, None).status, Status::Warn);
    }
}
