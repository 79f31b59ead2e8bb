//! Waiting for a completion: spin while that pays, then sleep, and notice a dead Manager.

use std::time::{Duration, Instant};

use orbitkv_shm_protocol::doorbell::{self, Sleeper, WAIT_WORDS_MAX};

use crate::client::Client;
use crate::completion::Completion;
use crate::error::{Gone, WaitManyError};
use crate::session::Session;

/// Longest sleep between two looks at the Manager's life: bounds what a lost wake or a death costs.
const PARK_MAX: Duration = Duration::from_millis(100);
/// Spin before a sleep unless measured otherwise: about one wake of another CPU in a virtual
/// machine. A shorter one is missed by an answer that needs no wake, a longer one only burns time.
const SPIN_WINDOW: Duration = Duration::from_micros(20);
/// Spins in vain after which spinning stops.
const SPIN_MISSES_MAX: u32 = 8;
/// Once stopped, one wait in this many spins to see whether it pays again.
const SPIN_PROBE_EVERY: u32 = 64;
/// Looks at the ring between two looks at the clock.
const SPIN_LOOKS: u32 = 32;

/// Decides whether to spin before sleeping.
#[derive(Debug)]
pub(crate) struct Spin {
    window: Duration,
    misses: u32,
    skipped: u32,
}

impl Spin {
    /// On a single CPU a spin only keeps the Manager from running, so there is none.
    pub(crate) fn new() -> Self {
        let second_cpu = rustix::thread::sched_getaffinity(None).is_ok_and(|set| set.count() > 1);
        Self::with_window(if second_cpu { SPIN_WINDOW } else { Duration::ZERO })
    }

    fn with_window(window: Duration) -> Self {
        Self { window, misses: 0, skipped: 0 }
    }

    /// How long to spin now; `None` when sleeping at once is better.
    fn due(&mut self) -> Option<Duration> {
        if self.window.is_zero() {
            return None;
        }
        if self.misses >= SPIN_MISSES_MAX {
            self.skipped += 1;
            if self.skipped < SPIN_PROBE_EVERY {
                return None;
            }
            self.skipped = 0;
        }
        Some(self.window)
    }

    fn note(&mut self, hit: bool) {
        self.misses = if hit { 0 } else { (self.misses + 1).min(SPIN_MISSES_MAX) };
    }
}

/// Spins until something is ready, at most `window`.
fn spin_until(window: Duration, ready: impl Fn() -> bool) -> bool {
    let end = Instant::now() + window;
    loop {
        for _ in 0..SPIN_LOOKS {
            std::hint::spin_loop();
            if ready() {
                return true;
            }
        }
        if Instant::now() >= end {
            return false;
        }
    }
}

/// A point in time, or none for a timeout beyond what the clock can say.
fn end_of(timeout: Duration) -> Option<Instant> {
    Instant::now().checked_add(timeout)
}

/// Time until `end`, at most [`PARK_MAX`]; zero when it has passed.
fn park_time(end: Option<Instant>) -> Duration {
    match end {
        Some(end) => end.saturating_duration_since(Instant::now()).min(PARK_MAX),
        None => PARK_MAX,
    }
}

impl Client {
    /// The next completion, waiting for it at most `timeout`; `None` after that, and at once when
    /// nothing is outstanding. Publishes what is staged first.
    ///
    /// A Manager that dies or closes the session is noticed within 1 s: each outstanding operation
    /// is then returned once, with [`Status::Gone`](crate::Status::Gone).
    ///
    /// # Errors
    /// [`Gone`] when the session is over and every operation was returned.
    pub fn wait(&mut self, timeout: Duration) -> Result<Option<Completion>, Gone> {
        let end = end_of(timeout);
        self.bound.enter()?.publish();
        loop {
            if let Some(completion) = self.poll()? {
                return Ok(Some(completion));
            }
            let session = self.bound.enter()?;
            let left = park_time(end);
            if session.outstanding() == 0 || left.is_zero() {
                return Ok(None);
            }
            if let Some(window) = self.spin.due() {
                let hit = spin_until(window.min(left), || session.ready());
                self.spin.note(hit);
                if hit {
                    continue;
                }
            }
            session.park(park_time(end));
            if !session.ready() {
                self.check_manager()?;
            }
        }
    }

    /// Looks whether the Manager still serves this session: one system call. For an engine that
    /// only polls, every 100 ms or so; [`wait`](Self::wait) does it by itself.
    ///
    /// # Errors
    /// [`Gone::WrongProcess`] in a forked child. A dead Manager is no error here: the next
    /// [`poll`](Self::poll) begins to report what was outstanding.
    pub fn check_manager(&mut self) -> Result<(), Gone> {
        let session = self.bound.enter()?;
        if session.gone().is_none()
            && let Some(gone) = self.control.verdict()
        {
            session.lose(gone);
        }
        Ok(())
    }
}

/// The next completion of any client and the position of that client, waiting at most `timeout`;
/// `None` after that, and at once when no client has anything outstanding. Publishes what is
/// staged first. Of several ready clients the first in the slice is served.
///
/// # Errors
/// [`WaitManyError::Gone`] when a client's session is over and all of its operations were
/// returned: leave it out from then on. [`WaitManyError::TooMany`] beyond 128 clients.
pub fn wait_many(
    clients: &mut [&mut Client],
    timeout: Duration,
) -> Result<Option<(usize, Completion)>, WaitManyError> {
    if clients.len() > WAIT_WORDS_MAX {
        return Err(WaitManyError::TooMany { clients: clients.len(), clients_max: WAIT_WORDS_MAX });
    }
    let at = |client| move |gone: Gone| WaitManyError::Gone { client, gone };
    let end = end_of(timeout);
    for (i, client) in clients.iter_mut().enumerate() {
        client.bound.enter().map_err(|wrong| at(i)(wrong.into()))?.publish();
    }
    loop {
        let mut outstanding = 0;
        for (i, client) in clients.iter_mut().enumerate() {
            if let Some(completion) = client.poll().map_err(at(i))? {
                return Ok(Some((i, completion)));
            }
            outstanding += client.outstanding();
        }
        let left = park_time(end);
        if outstanding == 0 || left.is_zero() {
            return Ok(None);
        }
        if let Some(window) = clients.first_mut().and_then(|client| client.spin.due()) {
            let hit = spin_until(window.min(left), || any_ready(clients));
            clients[0].spin.note(hit);
            if hit {
                continue;
            }
        }
        park_many(clients, park_time(end));
        if !any_ready(clients) {
            for (i, client) in clients.iter_mut().enumerate() {
                client.check_manager().map_err(at(i))?;
            }
        }
    }
}

fn sessions<'a>(clients: &'a [&mut Client]) -> impl Iterator<Item = &'a Session> {
    clients.iter().filter_map(|client| client.bound.look().ok())
}

fn any_ready(clients: &[&mut Client]) -> bool {
    sessions(clients).any(Session::ready)
}

/// Sleeps until one of the Managers rings.
fn park_many(clients: &[&mut Client], timeout: Duration) {
    let Some(first) = sessions(clients).next() else { return };
    let mut sleepers: [(&Sleeper, u32); WAIT_WORDS_MAX] = [(first.sleeper(), 0); WAIT_WORDS_MAX];
    let mut count = 0;
    for (slot, session) in sleepers.iter_mut().zip(sessions(clients)) {
        *slot = (session.sleeper(), session.sleeper().begin());
        count += 1;
    }
    if !any_ready(clients) {
        doorbell::wait_many(&sleepers[..count], timeout);
    }
    for (sleeper, _) in &sleepers[..count] {
        sleeper.end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spinning_stops_after_misses_and_is_probed_once_in_64() {
        let mut spin = Spin::with_window(Duration::from_nanos(1));
        for _ in 0..SPIN_MISSES_MAX {
            assert!(spin.due().is_some());
            spin.note(false);
        }
        for round in 0..3 {
            for _ in 1..SPIN_PROBE_EVERY {
                assert!(spin.due().is_none(), "round {round}");
            }
            assert!(spin.due().is_some(), "the probe of round {round}");
            spin.note(false);
        }
        for _ in 1..SPIN_PROBE_EVERY {
            assert!(spin.due().is_none());
        }
        assert!(spin.due().is_some());
        spin.note(true);
        assert!(spin.due().is_some(), "a probe that paid brings spinning back");
    }

    #[test]
    fn one_cpu_never_spins() {
        let mut spin = Spin::with_window(Duration::ZERO);
        for _ in 0..1000 {
            assert!(spin.due().is_none());
        }
    }

    #[test]
    fn a_spin_ends_without_an_answer_and_sees_one() {
        assert!(!spin_until(Duration::from_micros(5), || false));
        let looks = std::cell::Cell::new(0);
        assert!(spin_until(Duration::from_secs(1), || {
            looks.set(looks.get() + 1);
            looks.get() == 3
        }));
    }
}
