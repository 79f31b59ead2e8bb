//! What a replay reports: the JSON, the table, and whether it is a success.

use std::collections::BTreeMap;
use std::fmt;

use orbitkv_manager::units::Size;
use serde::Serialize;

use super::latency::Percentiles;
use super::observe::Spill;

/// Every number of a replay. Units stand in the names.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct Report {
    /// Name of the trace or workload.
    pub trace: String,
    /// Requests that ran to their end.
    pub requests: u64,
    /// Full pages of their prompts; hits and misses sum to it.
    pub pages_total: u64,
    /// Restored pages that were in DRAM when they were looked up.
    pub pages_hit_dram: u64,
    /// Restored pages that were on SSD.
    pub pages_hit_ssd: u64,
    /// Pages that were computed.
    pub pages_missed: u64,
    /// Hit pages in proportion to all.
    pub hit_ratio: f64,
    /// Restored pages that were compared byte for byte.
    pub pages_verified: u64,
    /// Their bytes.
    pub bytes_verified: u64,
    /// Restored pages with a wrong byte.
    pub mismatches: u64,
    /// Computed pages that a save stored.
    pub pages_saved: u64,
    /// Computed pages that were there by the time they were saved.
    pub pages_present: u64,
    /// Computed pages that a save refused, by reason.
    pub pages_refused: BTreeMap<String, u64>,
    /// Queries that ended in an error or early, by reason.
    pub queries_cut: BTreeMap<String, u64>,
    /// Restores that did not bring every page, by reason.
    pub restores_cut: BTreeMap<String, u64>,
    /// Requests that were started again because the Manager went away.
    pub requests_restarted: u64,
    /// Times that an engine attached again.
    pub reattached: u64,
    /// Pages that left the spill set, by outcome; they sum to `spill_offered`.
    pub spill: Spill,
    /// Those of `failed` that still waited in the end, when no device had taken writes for a while.
    pub spill_unwritable: u64,
    /// Pages offered to the spill set.
    pub spill_offered: u64,
    /// Image bytes written to SSD.
    pub ssd_bytes_written: u64,
    /// Image bytes read from SSD.
    pub ssd_bytes_read: u64,
    /// Page reads that failed.
    pub ssd_read_errors: u64,
    /// Writes that found the queue of their device full: 0 in normal work.
    pub ssd_write_queue_full: u64,
    /// Allocations for which no memory could be freed.
    pub alloc_failures: u64,
    /// Pages that left DRAM for others.
    pub evictions: u64,
    /// Most bytes of the query budget that were taken.
    pub query_budget_peak_bytes: u64,
    /// Most bytes of the speculative budget that were taken.
    pub speculative_budget_peak_bytes: u64,
    /// Bytes still held after every engine had drained and gone.
    pub leaked_bytes: u64,
    /// Leases still held after every engine had drained and gone.
    pub leaked_leases: u64,
    /// From the last completion to an empty spill set.
    pub drain_seconds: f64,
    /// First request to last completion.
    pub wall_seconds: f64,
    /// Processor time of the Manager in the whole run.
    pub manager_cpu_seconds: f64,
    /// Latencies as engines saw them, in microseconds.
    pub latency_us: LatencyReport,
    /// How it was run.
    pub run: RunReport,
    /// Checks that failed; empty when the replay is a success.
    pub failures: Vec<String>,
}

/// Percentiles by kind of operation.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize)]
pub struct LatencyReport {
    /// Query, from staging to sight of its completion.
    pub query: Percentiles,
    /// SSD preparation inside queries that had SSD hits.
    pub prepare: Percentiles,
    /// Restore, from staging to sight of its completion.
    pub restore: Percentiles,
    /// Save, from staging to sight of its completion.
    pub save: Percentiles,
    /// From the publication of a completion to its sight.
    pub delivery: Percentiles,
}

/// How a replay was run.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct RunReport {
    /// Command line.
    pub command: String,
    /// Version of this program.
    pub version: String,
    /// Engine processes.
    pub engines: u64,
    /// Requests at a time in each.
    pub concurrency: u64,
    /// Bytes of a page.
    pub page_bytes: u64,
    /// Tokens of a page.
    pub page_tokens: u64,
    /// Device pages of each engine.
    pub device_pages: u64,
    /// Seed of names and bytes.
    pub seed: u64,
}

impl Report {
    /// Looks at the numbers and names every one that no correct run has.
    pub fn judge_pages(&mut self) {
        let wrong = self.mismatches;
        self.check(wrong == 0, format!("{wrong} restored pages have a wrong byte"));
        let (sum, total) =
            (self.pages_hit_dram + self.pages_hit_ssd + self.pages_missed, self.pages_total);
        self.check(sum == total, format!("hits and misses sum to {sum}, not to {total} pages"));
    }

    /// Counts what waits for devices that take no writes as failed: that is its outcome so far.
    pub fn give_up(&mut self, waiting: u64) {
        self.spill_unwritable = waiting;
        self.spill.failed += waiting;
    }

    /// Notes what a Manager that drained may not show: something held, or a page that was offered
    /// and has no outcome.
    pub fn judge_drain(&mut self) {
        let (bytes, leases) = (self.leaked_bytes, self.leaked_leases);
        self.check(bytes == 0, format!("{bytes} bytes are still held"));
        self.check(leases == 0, format!("{leases} leases are still held"));
        let (spilled, offered) = (self.spill.sum(), self.spill_offered);
        self.check(
            spilled == offered,
            format!("spill outcomes sum to {spilled}, not to the {offered} offered pages"),
        );
    }

    fn check(&mut self, good: bool, text: String) {
        if !good {
            self.failures.push(text);
        }
    }

    /// Rows of the summary: what, and how much.
    pub fn rows(&self) -> Vec<(&'static str, String)> {
        let latency = |p: &Percentiles| {
            format!(
                "p50 {:.0} µs, p95 {:.0} µs, p99 {:.0} µs ({} times)",
                p.p50, p.p95, p.p99, p.count
            )
        };
        let refused: u64 = self.pages_refused.values().sum();
        let l = &self.latency_us;
        vec![
            ("requests", self.requests.to_string()),
            ("pages", format!("{} of {}", self.pages_total, Size(self.run.page_bytes))),
            (
                "hit",
                format!(
                    "{:.1} % ({} from DRAM, {} from SSD)",
                    self.hit_ratio * 100.0,
                    self.pages_hit_dram,
                    self.pages_hit_ssd
                ),
            ),
            ("computed", self.pages_missed.to_string()),
            (
                "compared",
                format!(
                    "{} pages, {} MiB, {} wrong",
                    self.pages_verified,
                    self.bytes_verified >> 20,
                    self.mismatches
                ),
            ),
            (
                "saved",
                format!("{} ({} present, {refused} refused)", self.pages_saved, self.pages_present),
            ),
            (
                "written to SSD",
                format!(
                    "{} pages of {} offered, {} MiB{}",
                    self.spill.written,
                    self.spill_offered,
                    self.ssd_bytes_written >> 20,
                    match self.spill_unwritable {
                        0 => String::new(),
                        pages => format!("; {pages} wait for a device that takes no writes"),
                    }
                ),
            ),
            ("read from SSD", format!("{} MiB", self.ssd_bytes_read >> 20)),
            ("evicted", self.evictions.to_string()),
            ("query", latency(&l.query)),
            ("prepare", latency(&l.prepare)),
            ("restore", latency(&l.restore)),
            ("save", latency(&l.save)),
            ("delivery", latency(&l.delivery)),
            (
                "time",
                format!(
                    "{:.2} s and {:.2} s to drain; Manager {:.2} s of processor",
                    self.wall_seconds, self.drain_seconds, self.manager_cpu_seconds
                ),
            ),
            ("leaked", format!("{} bytes, {} leases", self.leaked_bytes, self.leaked_leases)),
        ]
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.trace)?;
        for (name, value) in self.rows() {
            writeln!(f, "  {name:<15} {value}")?;
        }
        for failure in &self.failures {
            writeln!(f, "  FAILED          {failure}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn good() -> Report {
        Report {
            pages_total: 10,
            pages_hit_dram: 3,
            pages_hit_ssd: 2,
            pages_missed: 5,
            spill: Spill { written: 4, superseded: 1, ..Spill::default() },
            spill_offered: 5,
            ..Report::default()
        }
    }

    #[test]
    fn only_a_consistent_run_is_a_success() {
        let mut report = good();
        report.judge_pages();
        report.judge_drain();
        assert!(report.failures.is_empty(), "{:?}", report.failures);
        for (spoil, word) in [
            (Report { mismatches: 1, ..good() }, "wrong byte"),
            (Report { pages_missed: 6, ..good() }, "sum to 11"),
            (Report { leaked_bytes: 1, ..good() }, "bytes are still held"),
            (Report { leaked_leases: 1, ..good() }, "leases are still held"),
            (Report { spill_offered: 6, ..good() }, "6 offered"),
        ] {
            let mut report = spoil;
            report.judge_pages();
            report.judge_drain();
            assert_eq!(report.failures.len(), 1);
            assert!(report.failures[0].contains(word), "{:?}", report.failures);
            assert!(report.to_string().contains("FAILED"));
        }
    }

    #[test]
    fn what_waits_for_a_device_that_takes_no_writes_has_failed() {
        let mut report = Report { spill_offered: 12, ..good() };
        report.give_up(7);
        report.judge_drain();
        assert!(report.failures.is_empty(), "{:?}", report.failures);
        assert_eq!((report.spill.failed, report.spill_unwritable), (7, 7));
        assert!(report.to_string().contains("7 wait for a device that takes no writes"));
        // What is neither written nor waits is nowhere.
        let mut report = Report { spill_offered: 12, ..good() };
        report.give_up(6);
        report.judge_drain();
        assert_eq!(report.failures.len(), 1);
    }

    #[test]
    fn the_keys_that_others_read_are_there() {
        let json = serde_json::to_value(good()).unwrap();
        for key in [
            "requests",
            "pages_total",
            "pages_hit_dram",
            "pages_hit_ssd",
            "pages_missed",
            "pages_verified",
            "bytes_verified",
            "mismatches",
            "pages_saved",
            "pages_refused",
            "spill",
            "spill_offered",
            "ssd_bytes_written",
            "ssd_bytes_read",
            "ssd_read_errors",
            "ssd_write_queue_full",
            "alloc_failures",
            "evictions",
            "query_budget_peak_bytes",
            "speculative_budget_peak_bytes",
            "leaked_bytes",
            "leaked_leases",
            "drain_seconds",
            "wall_seconds",
            "manager_cpu_seconds",
            "latency_us",
            "hit_ratio",
        ] {
            assert!(json.get(key).is_some(), "{key}");
        }
        let names = |value: &serde_json::Value| {
            value.as_object().unwrap().keys().cloned().collect::<std::collections::BTreeSet<_>>()
        };
        let spill = [
            "written",
            "already_there",
            "superseded",
            "skipped_by_policy",
            "evicted_unwritten",
            "failed",
        ];
        assert_eq!(names(&json["spill"]), spill.map(str::to_owned).into());
        let kinds = ["query", "prepare", "restore", "save", "delivery"];
        assert_eq!(names(&json["latency_us"]), kinds.map(str::to_owned).into());
        let percentiles = ["p50", "p95", "p99", "max", "count"];
        assert_eq!(names(&json["latency_us"]["query"]), percentiles.map(str::to_owned).into());
    }
}
