//! `top`: what a Manager holds and does, once a second, on a terminal. Reads the telemetry segment
//! and asks the Manager nothing, so that it lives through its hangs, deaths and restarts.

mod rates;
mod view;

use std::io::{IsTerminal, stdin, stdout};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args;
use orbitkv_shm_protocol::bootstrap::peer::socket_default_path;
use orbitkv_shm_protocol::inspect::{self, InspectError, Snapshot};
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};

use crate::exit::{Exit, ToolError};
use crate::signal;
use rates::{Rates, rates_between};
use view::{Screen, draw};

/// How often the numbers are read.
const INTERVAL: Duration = Duration::from_secs(1);
/// Longest wait for a key: a signal is seen after it.
const KEY_WAIT_MAX: Duration = Duration::from_millis(100);

/// Flags of `top`.
#[derive(Clone, PartialEq, Eq, Debug, Args)]
pub(crate) struct TopArgs {
    /// Socket of the Manager
    #[arg(long, value_name = "PATH", value_parser = crate::place::socket_path_parser())]
    socket: Option<PathBuf>,
}

/// Runs the verb until somebody quits.
pub(crate) fn run(args: &TopArgs) -> Result<Exit, ToolError> {
    for (stream, is_terminal) in
        [("standard input", stdin().is_terminal()), ("standard output", stdout().is_terminal())]
    {
        if !is_terminal {
            return Err(ToolError::NoTerminal { stream });
        }
    }
    let socket = args.socket.clone().unwrap_or_else(socket_default_path);
    // A wrong path is an error now; once something was seen there, its absence is only shown.
    let first = inspect::read(&socket)?;
    signal::install()?;
    // Also restores the terminal when this process panics.
    let mut terminal = ratatui::try_init().map_err(terminal_failed)?;
    let ended = watch(&mut terminal, &socket, first);
    let restored = ratatui::try_restore().map_err(terminal_failed);
    ended.and(restored)?;
    Ok(Exit::Ok)
}

fn terminal_failed(source: std::io::Error) -> ToolError {
    ToolError::System { operation: "draw on the terminal", source }
}

fn watch(terminal: &mut DefaultTerminal, socket: &Path, first: Snapshot) -> Result<(), ToolError> {
    let mut history = History::new(first);
    let mut next = Instant::now() + INTERVAL;
    loop {
        let screen = history.screen();
        terminal.draw(|frame| draw(frame, &screen)).map_err(terminal_failed)?;
        match wait_for(next)? {
            Told::Quit => return Ok(()),
            Told::Resized => {}
            Told::Nothing => {
                next = Instant::now() + INTERVAL;
                history.look(socket);
            }
        }
    }
}

/// What was seen last, and how fast it changes.
struct History {
    last: Snapshot,
    seen_ns: u64,
    rates: Option<Rates>,
    /// Why there is nothing newer.
    absent: Option<InspectError>,
}

impl History {
    fn new(first: Snapshot) -> Self {
        Self { last: first, seen_ns: inspect::now_ns(), rates: None, absent: None }
    }

    fn look(&mut self, socket: &Path) {
        match inspect::read(socket) {
            Ok(seen) => {
                let now = inspect::now_ns();
                self.rates = rates_between((&self.last, self.seen_ns), (&seen, now));
                (self.last, self.seen_ns, self.absent) = (seen, now, None);
            }
            Err(error) => (self.rates, self.absent) = (None, Some(error)),
        }
    }

    fn screen(&self) -> Screen<'_> {
        Screen {
            snapshot: &self.last,
            rates: self.rates.as_ref(),
            absent: self.absent.as_ref().map(ToString::to_string),
        }
    }
}

/// What the terminal or a signal said.
enum Told {
    Nothing,
    Resized,
    Quit,
}

fn wait_for(until: Instant) -> Result<Told, ToolError> {
    loop {
        if signal::check().is_err() {
            return Ok(Told::Quit);
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(Told::Nothing);
        }
        if !event::poll(left.min(KEY_WAIT_MAX)).map_err(terminal_failed)? {
            continue;
        }
        match event::read().map_err(terminal_failed)? {
            Event::Resize(..) => return Ok(Told::Resized),
            Event::Key(key) if key.kind == KeyEventKind::Press => {
                let control = key.modifiers.contains(KeyModifiers::CONTROL);
                match key.code {
                    KeyCode::Char('q' | 'Q') | KeyCode::Esc => return Ok(Told::Quit),
                    KeyCode::Char('c') if control => return Ok(Told::Quit),
                    _ => {}
                }
            }
            _ => {}
        }
    }
}
