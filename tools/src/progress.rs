//! How far a run is: a bar on a terminal, a line now and then elsewhere.

use std::io::{IsTerminal, stderr};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

use crate::output::complain;

const LINE_EVERY: Duration = Duration::from_secs(1);

/// What is shown.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct State {
    /// Things that are done.
    pub(crate) done: u64,
    /// What else is to be said.
    pub(crate) note: String,
}

/// Writes to standard error, so that standard output holds only results.
pub(crate) struct Progress {
    bar: Option<ProgressBar>,
    things: &'static str,
    total: u64,
    last_line: Instant,
}

impl Progress {
    /// A run over `total` things.
    pub(crate) fn new(things: &'static str, total: u64) -> Self {
        let bar = stderr().is_terminal().then(|| {
            let bar = ProgressBar::new(total).with_prefix(things);
            let style = ProgressStyle::with_template(
                "{bar:32} {pos}/{len} {prefix}  {elapsed} (about {eta} left)  {msg}",
            );
            bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
            bar
        });
        Self { bar, things, total, last_line: Instant::now() }
    }

    /// Shows a new state.
    pub(crate) fn advance(&mut self, state: &State) {
        if let Some(bar) = &self.bar {
            bar.set_position(state.done);
            bar.set_message(state.note.clone());
        } else if self.last_line.elapsed() >= LINE_EVERY {
            self.last_line = Instant::now();
            let State { done, note } = state;
            let line = format!("{done}/{} {}  {note}", self.total, self.things);
            complain(line.trim_end());
        }
    }

    /// Ends the display.
    pub(crate) fn finish(self) {
        if let Some(bar) = self.bar {
            bar.finish_and_clear();
        }
    }
}
