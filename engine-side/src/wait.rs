//! Waiting for a completion: spin while that pays, then sleep, and notice a dead Manager.

use std::time::{Duration, Instant};

use orbitkv_shm_protocol::doorbell::{self, Sleeper, WAIT_WORDS_MAX};

use crate::client::Client;
use crate::completion::Completion;
use crate::error::{Gone, WaitManyError};
use crate::session::Session;

/// Longest sleep between two looks at the Manager's life: bounds what a lost wake or a death costs.
const PARK_MAX: Duration = Duration::from_millis(100);
/// Looks at the ring between two looks at the clock.
const SPIN_LOOKS: u32 = 32;

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
    fn a_spin_ends_without_an_answer_and_sees_one() {
        assert!(!spin_until(Duration::from_micros(5), || false));
        let looks = std::cell::Cell::new(0);
        assert!(spin_until(Duration::from_secs(1), || {
            looks.set(looks.get() + 1);
            looks.get() == 3
        }));
    }
}
