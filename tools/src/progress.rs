//! How far a run is: a bar on a terminal, a line now and then elsewhere.

use std::io::{IsTerminal, stderr};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

const LINE_EVERY: Duration = Duration::from_secs(5);

/// What is shown.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct State {
    /// Requests that ended.
    pub(crate) requests: u64,
    /// Pages that were compared.
    pub(crate) verified: u64,
    /// Hit pages in percent of all.
    pub(crate) hit_percent: u64,
    /// Wrong pages.
    pub(crate) mismatches: u64,
}

/// Writes to standard error, so that standard output holds only results.
pub(crate) struct Progress {
    bar: Option<ProgressBar>,
    total: u64,
    last_line: Instant,
}

impl Progress {
    /// A run of `total` requests.
    pub(crate) fn new(total: u64) -> Self {
        let bar = stderr().is_terminal().then(|| {
            let bar = ProgressBar::new(total);
            let style = ProgressStyle::with_template(
                "{bar:32} {pos}/{len} requests  {msg}  {elapsed} (about {eta} left)",
            );
            bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
            bar
        });
        Self { bar, total, last_line: Instant::now() }
    }

    /// Shows a new state.
    pub(crate) fn advance(&mut self, state: &State) {
        let text = || {
            format!(
                "{} pages compared, {} % hit, {} wrong",
                state.verified, state.hit_percent, state.mismatches
            )
        };
        if let Some(bar) = &self.bar {
            bar.set_position(state.requests);
            bar.set_message(text());
        } else if self.last_line.elapsed() >= LINE_EVERY {
            self.last_line = Instant::now();
            eprintln!("{}/{} requests, {}", state.requests, self.total, text());
        }
    }

    /// Ends the display.
    pub(crate) fn finish(self) {
        if let Some(bar) = self.bar {
            bar.finish_and_clear();
        }
    }
}
