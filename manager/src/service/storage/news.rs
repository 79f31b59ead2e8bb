//! What is counted and said of an SSD device as its state changes.

use std::path::Path;

use crate::core::Nanos;
use crate::endpoint::Limiter;
use crate::ssd::{Cause, Health};

/// Lines of one device in a second.
const LINES_MAX: u32 = 4;

/// What is known and was said of one device.
pub(super) struct News {
    /// Its state when it was last looked at.
    seen: Health,
    /// Its state as the log has it.
    said: Health,
    lines: Limiter,
    stops: [u64; Cause::ALL.len()],
}

impl News {
    /// Of a device that is well.
    pub(super) const fn new() -> Self {
        Self {
            seen: Health::Healthy,
            said: Health::Healthy,
            lines: Limiter::of(LINES_MAX),
            stops: [0; Cause::ALL.len()],
        }
    }

    /// Times that it ceased to take some work, by [`Cause::ALL`].
    pub(super) const fn stops(&self) -> &[u64; Cause::ALL.len()] {
        &self.stops
    }

    /// Looks at its state. Returns what the log had, when that is to be said now: what there is no
    /// room for is said at a later look, unless it is over by then.
    pub(super) fn look(
        &mut self,
        now: Nanos,
        health: Health,
        cause: Option<Cause>,
    ) -> Option<Health> {
        let before = std::mem::replace(&mut self.seen, health);
        if health > before
            && let Some(times) = cause.and_then(|cause| self.stops.get_mut(cause as usize))
        {
            *times += 1;
        }
        if health == self.said || self.lines.admit(now).is_none() {
            return None;
        }
        Some(std::mem::replace(&mut self.said, health))
    }
}

/// One line for an operator: what happened, and what it means. A state without a cause is said by
/// who found it.
pub(super) fn say(path: &Path, before: Health, health: Health, cause: Option<Cause>) {
    let path = path.display();
    let (was, now) = (before.label(), health.label());
    let Some(cause) = cause else {
        if health == Health::Healthy {
            tracing::info!(%path, before = was, "the ssd device works again");
        }
        return;
    };
    let why = match cause {
        Cause::Errors => "too many of its reads or writes failed; see the kernel's log",
        Cause::NoSpace => "its file system has no space left: free some",
        Cause::Slow => "it takes more than a second for a request",
        Cause::Hung => "the kernel has not given back a request for five seconds",
    };
    if health > before {
        tracing::warn!(
            %path, before = was, now, why, "an ssd device changed its state; it is tried again"
        );
    } else {
        tracing::info!(%path, before = was, now, why, "an ssd device gets better");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Nanos = 1_000_000_000;

    #[test]
    fn only_what_gets_worse_is_a_stop() {
        let mut news = News::new();
        let mut now = 0;
        let mut said = Vec::new();
        for (health, cause) in [
            (Health::Degraded, Some(Cause::Slow)),
            (Health::Off, Some(Cause::Hung)),
            (Health::Off, Some(Cause::Hung)),
            (Health::ReadOnly, Some(Cause::Hung)),
            (Health::Degraded, Some(Cause::Slow)),
            (Health::Healthy, None),
            (Health::ReadOnly, Some(Cause::NoSpace)),
        ] {
            now += SECOND;
            said.push(news.look(now, health, cause));
        }
        let stops = |cause: Cause| news.stops()[cause as usize];
        assert_eq!(Cause::ALL.map(stops), [0, 1, 1, 1], "errors, no space, slow, hung");
        use Health::{Degraded, Healthy, Off, ReadOnly};
        let before = [Some(Healthy), Some(Degraded), None, Some(Off), Some(ReadOnly)];
        assert_eq!(said[..5], before);
        assert_eq!(said[5..], [Some(Degraded), Some(Healthy)]);
    }

    #[test]
    fn a_device_that_flaps_is_counted_in_full_and_its_last_state_is_said() {
        let mut news = News::new();
        let mut lines = 0;
        let mut said = Health::Healthy;
        for look in 0..101 {
            let slow = look % 2 == 0;
            let health = if slow { Health::Degraded } else { Health::Healthy };
            let cause = slow.then_some(Cause::Slow);
            if let Some(before) = news.look(look, health, cause) {
                assert_eq!(before, said, "each line begins where the one before ended");
                said = health;
                lines += 1;
            }
        }
        assert_eq!((news.stops()[Cause::Slow as usize], lines), (51, LINES_MAX));
        assert_eq!(said, Health::Healthy);
        let later = news.look(SECOND, Health::Degraded, Some(Cause::Slow));
        assert_eq!(later, Some(Health::Healthy), "there is room again");
        assert_eq!(news.stops()[Cause::Slow as usize], 51, "it had been counted");
    }
}
