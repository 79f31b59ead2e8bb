//! What coordinator and engine processes say to each other: one JSON object a line, over the
//! engine's standard input and output.

use serde::{Deserialize, Serialize};

use super::tally::{LatencyLists, Tally};

/// What an engine is told first.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct Open {
    /// Socket of the Manager.
    pub(super) socket: std::path::PathBuf,
    /// Name of the trace.
    pub(super) name: String,
    /// Tokens of a block.
    pub(super) block_tokens: u32,
    /// Bytes of a page.
    pub(super) page_bytes: u64,
    /// Seed of the bytes.
    pub(super) seed: u64,
    /// Pages of the device region.
    pub(super) device_pages: u32,
    /// Requests at a time.
    pub(super) concurrency: u32,
    /// Longest absence of the Manager, in milliseconds.
    pub(super) reattach_ms: u64,
}

/// From the coordinator.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum ToEngine {
    /// Attach.
    Open(Open),
    /// Play a request: its number in the trace and its block ids as runs of first and length.
    Play {
        /// Number in the trace.
        index: u64,
        /// Runs of block ids.
        runs: Vec<(u64, u64)>,
    },
    /// Nothing more comes: drain, report and exit.
    Finish,
}

/// From an engine.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum FromEngine {
    /// Attached; requests may come.
    Ready,
    /// A request ended.
    Done {
        /// Number in the trace.
        index: u64,
        /// What it did.
        tally: Tally,
    },
    /// The last line: what is not counted by request.
    Report {
        /// Wrong pages, those of requests that were started again included.
        mismatches: u64,
        /// Requests that were started again.
        requests_restarted: u64,
        /// Times attached again.
        reattached: u64,
        /// Whether the session owned nothing at its end.
        drained: bool,
        /// Latencies.
        latencies: LatencyLists,
        /// Why it ended before it was told to.
        failure: Option<Failure>,
    },
}

/// Why an engine gave up.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct Failure {
    /// Exit code that the whole replay gets.
    pub(super) exit: u8,
    /// One line.
    pub(super) message: String,
}
