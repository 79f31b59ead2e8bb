//! What engines counted, per request and in sum.

use std::collections::BTreeMap;

use orbitkv_shm_protocol::record::Code;
use serde::{Deserialize, Serialize};

use super::latency::{Latency, LatencyPairs};
use crate::progress::State;

/// Pages of one request, or of many. Hits and misses sum to the total.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct Tally {
    /// Requests that ran to their end.
    pub(super) requests: u64,
    /// Full pages of their prompts.
    pub(super) pages_total: u64,
    /// Restored pages that were in DRAM when they were looked up.
    pub(super) pages_hit_dram: u64,
    /// Restored pages that were on SSD.
    pub(super) pages_hit_ssd: u64,
    /// All others: recomputed.
    pub(super) pages_missed: u64,
    /// Restored pages that were compared, byte for byte.
    pub(super) pages_verified: u64,
    /// Their bytes.
    pub(super) bytes_verified: u64,
    /// Restored pages with a wrong byte.
    pub(super) mismatches: u64,
    /// As `mismatches`, those of requests that were started again or never ended included.
    pub(super) mismatches_seen: u64,
    /// Pages that a save stored.
    pub(super) pages_saved: u64,
    /// Pages that a save found present.
    pub(super) pages_present: u64,
    /// Pages that a save refused, by reason.
    pub(super) pages_refused: BTreeMap<String, u64>,
    /// Queries that ended in an error or early, by reason.
    pub(super) queries_cut: BTreeMap<String, u64>,
    /// Restores that did not bring every page, by reason.
    pub(super) restores_cut: BTreeMap<String, u64>,
    /// Requests that were started again because the Manager went away.
    pub(super) requests_restarted: u64,
    /// Times that an engine attached again.
    pub(super) reattached: u64,
}

impl Tally {
    /// Restored pages in proportion to all.
    pub(super) fn hit_ratio(&self) -> f64 {
        let hits = self.pages_hit_dram + self.pages_hit_ssd;
        if self.pages_total == 0 { 0.0 } else { hits as f64 / self.pages_total as f64 }
    }

    /// What the progress display shows.
    pub(super) fn progress(&self) -> State {
        let percent = (self.hit_ratio() * 100.0) as u64;
        let note = format!(
            "{percent} % hit, {} pages compared, {} wrong",
            self.pages_verified, self.mismatches
        );
        State { done: self.requests, note }
    }

    /// Adds another tally.
    pub(super) fn add(&mut self, other: &Self) {
        self.requests += other.requests;
        self.pages_total += other.pages_total;
        self.pages_hit_dram += other.pages_hit_dram;
        self.pages_hit_ssd += other.pages_hit_ssd;
        self.pages_missed += other.pages_missed;
        self.pages_verified += other.pages_verified;
        self.bytes_verified += other.bytes_verified;
        self.mismatches += other.mismatches;
        self.mismatches_seen += other.mismatches_seen;
        self.pages_saved += other.pages_saved;
        self.pages_present += other.pages_present;
        self.requests_restarted += other.requests_restarted;
        self.reattached += other.reattached;
        for (sum, add) in [
            (&mut self.pages_refused, &other.pages_refused),
            (&mut self.queries_cut, &other.queries_cut),
            (&mut self.restores_cut, &other.restores_cut),
        ] {
            for (reason, count) in add {
                *sum.entry(reason.clone()).or_default() += count;
            }
        }
    }
}

/// Counts `count` under the name of `code`.
pub(super) fn count(counts: &mut BTreeMap<String, u64>, code: Code, count: u64) {
    if count > 0 {
        *counts.entry(code.label().to_owned()).or_default() += count;
    }
}

/// The latencies that a replay reports.
#[derive(Clone, Debug, Default)]
pub(super) struct Latencies {
    /// Query, from staging to sight of its completion.
    pub(super) query: Latency,
    /// Preparation inside queries that had SSD hits: taken from the ring to resident and leased.
    pub(super) prepare: Latency,
    /// Restore, from staging to sight.
    pub(super) restore: Latency,
    /// Save, from staging to sight.
    pub(super) save: Latency,
    /// Any completion, from its publication to its sight.
    pub(super) delivery: Latency,
}

/// [`Latencies`] as they travel between processes.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
pub(super) struct LatencyLists {
    query: LatencyPairs,
    prepare: LatencyPairs,
    restore: LatencyPairs,
    save: LatencyPairs,
    delivery: LatencyPairs,
}

impl Latencies {
    /// What [`add`](Self::add) takes at the other end.
    pub(super) fn lists(&self) -> LatencyLists {
        LatencyLists {
            query: self.query.pairs(),
            prepare: self.prepare.pairs(),
            restore: self.restore.pairs(),
            save: self.save.pairs(),
            delivery: self.delivery.pairs(),
        }
    }

    /// Adds the latencies of one engine.
    pub(super) fn add(&mut self, lists: &LatencyLists) {
        self.query.add(&lists.query);
        self.prepare.add(&lists.prepare);
        self.restore.add(&lists.restore);
        self.save.add(&lists.save);
        self.delivery.add(&lists.delivery);
    }
}
