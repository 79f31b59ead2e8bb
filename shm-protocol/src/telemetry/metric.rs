//! The one table of metrics: name, kind, unit, help and label sets.
//!
//! The order of the table is the order of the words in the segment. A change here changes
//! [`super::LAYOUT_FINGERPRINT`].

use super::label::{
    CloseReason, CopyDirection, CopyMethod, DeviceFault, HeldIn, Label, LeaseEnd, ManagerState,
    PrepareOutcome, Reason, RefuseReason, SpillOutcome, SsdFault, SsdRetry, SsdStop,
};
use crate::record::{Code, RequestKind, Status};

/// Whether a metric only grows.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum MetricKind {
    /// Grows during one life of the Manager.
    Counter,
    /// Goes up and down.
    Gauge,
}

impl MetricKind {
    /// The word of a Prometheus `# TYPE` line.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
        }
    }
}

/// What a metric's number counts.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Unit {
    /// Page images.
    Pages,
    /// Bytes.
    Bytes,
    /// Things without a unit of their own.
    Count,
    /// Seconds. The word holds nanoseconds; readers divide.
    Seconds,
}

/// One named metric: as many series as its labels have combinations.
#[derive(Clone, Copy, Debug)]
pub struct Family {
    /// `orbitkv_<subsystem>_<what>_<unit>`, and `_total` for a counter.
    pub name: &'static str,
    /// Counter or gauge.
    pub kind: MetricKind,
    /// Unit of the value.
    pub unit: Unit,
    /// One line for a person, with a leading blank.
    help: &'static str,
    /// Names and closed value sets of its labels, outermost first.
    pub labels: &'static [LabelSet],
}

/// The name of a label and every value it can take.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LabelSet {
    /// Name of the label.
    pub name: &'static str,
    /// Every value.
    pub values: &'static [&'static str],
}

impl LabelSet {
    const fn of<L: Label>() -> Self {
        Self { name: L::NAME, values: L::VALUES }
    }
}

impl Family {
    /// Number of series.
    pub const fn series(&self) -> usize {
        let mut count = 1;
        let mut i = 0;
        while i < self.labels.len() {
            count *= self.labels[i].values.len();
            i += 1;
        }
        count
    }

    /// What the metric says, in one line.
    pub fn help(&self) -> &'static str {
        self.help.trim_start()
    }

    /// `{name="value",…}` of the series at `position` below [`series`](Self::series), or nothing
    /// for a metric without labels.
    pub fn label_text(&self, position: usize) -> String {
        let mut rest = position;
        let mut pairs = Vec::with_capacity(self.labels.len());
        for label in self.labels.iter().rev() {
            let count = label.values.len();
            pairs.push(format!("{}=\"{}\"", label.name, label.values[rest % count]));
            rest /= count;
        }
        pairs.reverse();
        if pairs.is_empty() { String::new() } else { format!("{{{}}}", pairs.join(",")) }
    }
}

macro_rules! metrics {
    ($($(#[doc = $help:literal])+ $variant:ident $(($($field:ident : $label:ty),+))? => $kind:ident $unit:ident $name:literal;)+) => {
        /// One number of the segment: a metric and its label values.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        pub enum Metric { $($(#[doc = $help])+ $variant $(($($label),+))?,)+ }

        #[derive(Clone, Copy)]
        enum Row { $($variant,)+ }

        /// The table, in segment order.
        pub const FAMILIES: &[Family] = &[$(Family {
            name: $name,
            kind: MetricKind::$kind,
            unit: Unit::$unit,
            help: concat!($($help),+),
            labels: &[$($(LabelSet::of::<$label>()),+)?],
        },)+];

        impl Metric {
            /// Number of its word, below [`METRIC_WORDS`].
            #[inline]
            pub fn index(self) -> usize {
                match self {
                    $(Self::$variant $(($($field),+))? => {
                        let position = 0;
                        $($(let position =
                            position * <$label as Label>::VALUES.len() + $field.position();)+)?
                        FIRST_WORDS[Row::$variant as usize] + position
                    })+
                }
            }
        }
    };
}

metrics! {
    /// Pages that queries asked for.
    LookupPages => Counter Pages "orbitkv_lookup_pages_total";
    /// Pages that queries found, by the tier they were in when the query was taken.
    LookupHitPages(tier: HeldIn) => Counter Pages "orbitkv_lookup_hit_pages_total";
    /// Pages that queries asked for and did not get; with the hits they sum to all.
    LookupMissedPages(reason: Reason) => Counter Pages "orbitkv_lookup_missed_pages_total";
    /// Speculative queries answered with nothing because their budget was taken.
    LookupSpeculativeSkipped => Counter Count "orbitkv_lookup_speculative_skipped_total";

    /// Pages that restores named.
    RestoreRequestedPages => Counter Pages "orbitkv_restore_requested_pages_total";
    /// Pages whose every byte reached the device, by the tier they came from.
    RestoreRestoredPages(tier: HeldIn) => Counter Pages "orbitkv_restore_restored_pages_total";
    /// Pages that a restore named and did not bring; with the restored they sum to the requested.
    RestoreFailedPages(reason: Reason) => Counter Pages "orbitkv_restore_failed_pages_total";

    /// Pages that saves offered.
    SaveOfferedPages => Counter Pages "orbitkv_save_offered_pages_total";
    /// Offered pages that have a new DRAM replica.
    SaveStoredPages => Counter Pages "orbitkv_save_stored_pages_total";
    /// Offered pages that a tier held already.
    SavePresentPages => Counter Pages "orbitkv_save_present_pages_total";
    /// Offered pages that were not taken; with stored and present they sum to the offered.
    SaveRefusedPages(reason: Reason) => Counter Pages "orbitkv_save_refused_pages_total";

    /// Pages that prepares named, by what became of them.
    PreparePages(outcome: PrepareOutcome) => Counter Pages "orbitkv_prepare_pages_total";
    /// Pages dropped because their namespace was forgotten.
    ForgetForgottenPages => Counter Pages "orbitkv_forget_forgotten_pages_total";

    /// Size of the DRAM pool.
    PoolCapacityBytes => Gauge Bytes "orbitkv_pool_capacity_bytes";
    /// Bytes of the pool that hold page images.
    PoolUsedBytes => Gauge Bytes "orbitkv_pool_used_bytes";
    /// Bytes of the pool that leases or running work keep from replacement.
    PoolPinnedBytes => Gauge Bytes "orbitkv_pool_pinned_bytes";
    /// Bytes of the pool that belong to nothing any more but wait for submitted I/O or copies.
    PoolDrainingBytes => Gauge Bytes "orbitkv_pool_draining_bytes";
    /// Largest page image that would fit without replacing another.
    PoolLargestFreeBytes => Gauge Bytes "orbitkv_pool_largest_free_bytes";
    /// Pages that have an image in the pool.
    PoolResidentPages => Gauge Pages "orbitkv_pool_resident_pages";
    /// Pages whose DRAM replica was given up for another page.
    PoolEvictedPages => Counter Pages "orbitkv_pool_evicted_pages_total";
    /// Allocations for which no memory could be freed.
    PoolAllocationFailures => Counter Count "orbitkv_pool_allocation_failures_total";

    /// Pages offered to the spill set.
    SpillOfferedPages => Counter Pages "orbitkv_spill_offered_pages_total";
    /// Pages that left the spill set, by outcome; with the waiting they sum to the offered.
    SpillPages(outcome: SpillOutcome) => Counter Pages "orbitkv_spill_pages_total";
    /// Pages that wait in the spill set or are being written.
    SpillWaitingPages => Gauge Pages "orbitkv_spill_waiting_pages";
    /// Bytes that wait in the spill set or are being written.
    SpillWaitingBytes => Gauge Bytes "orbitkv_spill_waiting_bytes";
    /// Pages that are gone and whose keys the spill policy `reuse` remembers.
    SpillHistoryPages => Gauge Pages "orbitkv_spill_history_pages";

    /// Pages that have a slot on SSD.
    SsdResidentPages => Gauge Pages "orbitkv_ssd_resident_pages";
    /// Pages found on SSD at start.
    SsdRecoveredPages => Counter Pages "orbitkv_ssd_recovered_pages_total";
    /// Pages read from SSD, whole and with the right checksum.
    SsdReadPages => Counter Pages "orbitkv_ssd_read_pages_total";
    /// Image bytes of these pages.
    SsdReadBytes => Counter Bytes "orbitkv_ssd_read_bytes_total";
    /// Page reads that failed.
    SsdReadErrors(reason: SsdFault) => Counter Count "orbitkv_ssd_read_errors_total";
    /// Pages written to SSD, footer included.
    SsdWrittenPages => Counter Pages "orbitkv_ssd_written_pages_total";
    /// Image bytes of these pages; footers (4 KiB a page) are not counted.
    SsdWrittenBytes => Counter Bytes "orbitkv_ssd_written_bytes_total";
    /// Page writes that failed.
    SsdWriteErrors(reason: SsdFault) => Counter Count "orbitkv_ssd_write_errors_total";
    /// Transfers that moved fewer bytes than asked, or that the kernel broke off and were sent again.
    SsdRetries(reason: SsdRetry) => Counter Count "orbitkv_ssd_retries_total";
    /// Times that a device ceased to take some work, by reason.
    SsdStops(reason: SsdStop) => Counter Count "orbitkv_ssd_stops_total";
    /// Writes that found the bounded queue of their device full; zero in normal work.
    SsdWriteQueueFull => Counter Count "orbitkv_ssd_write_queue_full_total";
    /// Bytes that the daily write budget lets be written at once; 0 also without a budget.
    SsdWriteBudgetBytes => Gauge Bytes "orbitkv_ssd_write_budget_bytes";
    /// Pages whose slot was given up for another page.
    SsdEvictedPages => Counter Pages "orbitkv_ssd_evicted_pages_total";
    /// Slots that are never used again because their bytes could not be read or written.
    SsdRetiredSlots => Counter Count "orbitkv_ssd_retired_slots_total";

    /// Bytes copied between engine memory and DRAM.
    DeviceCopiedBytes(direction: CopyDirection) => Counter Bytes "orbitkv_device_copied_bytes_total";
    /// Pages copied between engine memory and DRAM.
    DeviceCopiedPages(direction: CopyDirection) => Counter Pages "orbitkv_device_copied_pages_total";
    /// Copies that were ordered, as they were ordered: a page may be many and many pages one.
    DeviceMethodCopies(method: CopyMethod) => Counter Count "orbitkv_device_method_copies_total";
    /// Bytes of these copies, those of operations that failed or were cancelled too.
    DeviceMethodBytes(method: CopyMethod) => Counter Bytes "orbitkv_device_method_bytes_total";
    /// Copies that stopped before their last page.
    DeviceFaults(reason: DeviceFault) => Counter Count "orbitkv_device_faults_total";

    /// Operations that ended, by kind and status.
    OperationsCompleted(kind: RequestKind, status: Status) => Counter Count "orbitkv_operation_completed_total";
    /// Operations that ended, by the code of their completion.
    OperationCodes(code: Code) => Counter Count "orbitkv_operation_codes_total";
    /// Operations taken and not yet ended.
    OperationsRunning => Gauge Count "orbitkv_operation_running";

    /// Sessions opened.
    SessionsOpened => Counter Count "orbitkv_session_opened_total";
    /// Sessions closed.
    SessionsClosed(reason: CloseReason) => Counter Count "orbitkv_session_closed_total";
    /// Connections that never became a session.
    SessionsRefused(reason: RefuseReason) => Counter Count "orbitkv_session_refused_total";
    /// Requests with a field that no correct client writes.
    SessionBadRequests => Counter Count "orbitkv_session_bad_requests_total";
    /// Sessions that are attached.
    SessionsAttached => Gauge Count "orbitkv_session_attached";
    /// Device regions that are registered.
    SessionRegions => Gauge Count "orbitkv_session_regions";

    /// Namespaces in the table; one that nothing refers to gives its place up when it is full.
    NamespacesKnown => Gauge Count "orbitkv_namespace_known";

    /// Leases granted.
    LeasesGranted => Counter Count "orbitkv_lease_granted_total";
    /// Leases ended; with the held they sum to the granted.
    LeasesEnded(cause: LeaseEnd) => Counter Count "orbitkv_lease_ended_total";
    /// Leases that are held.
    LeasesHeld => Gauge Count "orbitkv_lease_held";
    /// Bytes that the held leases pin, shared pages counted by each.
    LeasedBytes => Gauge Bytes "orbitkv_lease_held_bytes";

    /// Bytes of the query budget that are taken.
    BudgetQueryBytes => Gauge Bytes "orbitkv_budget_query_used_bytes";
    /// Most bytes of the query budget that were ever taken.
    BudgetQueryPeakBytes => Gauge Bytes "orbitkv_budget_query_peak_bytes";
    /// Bytes that all leases together may hold.
    BudgetQueryLimitBytes => Gauge Bytes "orbitkv_budget_query_limit_bytes";
    /// Bytes of the speculative budget that are taken.
    BudgetSpeculativeBytes => Gauge Bytes "orbitkv_budget_speculative_used_bytes";
    /// Most bytes of the speculative budget that were ever taken.
    BudgetSpeculativePeakBytes => Gauge Bytes "orbitkv_budget_speculative_peak_bytes";
    /// Bytes that speculative queries and prepares together may hold.
    BudgetSpeculativeLimitBytes => Gauge Bytes "orbitkv_budget_speculative_limit_bytes";
    /// Bytes that the leases of one session may hold.
    BudgetSessionLimitBytes => Gauge Bytes "orbitkv_budget_session_limit_bytes";
    /// Queries that wait for budget.
    BudgetWaitingQueries => Gauge Count "orbitkv_budget_waiting_queries";

    /// 1 for the state that the Manager is in, 0 for the others.
    ManagerStates(state: ManagerState) => Gauge Count "orbitkv_manager_state";
    /// Time since the Manager started.
    ManagerUptime => Gauge Seconds "orbitkv_manager_uptime_seconds";
    /// Processor time of the Manager, user and system.
    ManagerCpu => Counter Seconds "orbitkv_manager_cpu_seconds_total";
    /// Turns of the reactor loop.
    ManagerTurns => Counter Count "orbitkv_manager_turns_total";
}

/// Words of all series of the table.
pub const METRIC_WORDS: usize = FIRST_WORDS[FAMILIES.len()];

/// First word of each family, and the number of words at the end.
const FIRST_WORDS: [usize; FAMILIES.len() + 1] = {
    let mut first = [0; FAMILIES.len() + 1];
    let mut i = 0;
    while i < FAMILIES.len() {
        first[i + 1] = first[i] + FAMILIES[i].series();
        i += 1;
    }
    first
};

/// Every family with the number of its first word; its series follow one another.
pub fn families() -> impl Iterator<Item = (&'static Family, usize)> {
    FAMILIES.iter().zip(FIRST_WORDS)
}

/// The series whose word is `index`: its family and its position in it; `None` past the table.
pub fn series_at(index: usize) -> Option<(&'static Family, usize)> {
    let after = FIRST_WORDS.partition_point(|&first| first <= index);
    let family = FAMILIES.get(after.checked_sub(1)?)?;
    Some((family, index - FIRST_WORDS[after - 1]))
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    /// The naming rules of the table hold for every row: subsystem first, unit last, `_total` on
    /// counters only, base units, one help line.
    #[test]
    fn names_follow_the_rules() {
        let mut names = HashSet::new();
        for family in FAMILIES {
            let name = family.name;
            assert!(names.insert(name), "{name} twice");
            let rest = name.strip_prefix("orbitkv_").expect(name);
            assert!(rest.split('_').count() >= 2, "{name}: subsystem and what");
            assert!(rest.bytes().all(|b| b.is_ascii_lowercase() || b == b'_'), "{name}");
            assert_eq!(family.kind == MetricKind::Counter, name.ends_with("_total"), "{name}");
            let stem = name.trim_end_matches("_total");
            let unit = match family.unit {
                Unit::Pages => "pages",
                Unit::Bytes => "bytes",
                Unit::Seconds => "seconds",
                Unit::Count => "",
            };
            assert!(stem.ends_with(unit), "{name}: {unit} last");
            assert!(family.help().ends_with('.') && !family.help().contains('\n'), "{name}");
            assert!(family.help.starts_with(' '), "{name}");
        }
    }

    #[test]
    fn labels_are_closed_and_disjoint() {
        for family in FAMILIES {
            for label in family.labels {
                let values: HashSet<_> = label.values.iter().collect();
                assert_eq!(values.len(), label.values.len(), "{}", family.name);
                assert!(!label.values.is_empty());
                for value in label.values {
                    assert!(
                        value
                            .bytes()
                            .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_')
                    );
                }
            }
        }
    }

    #[test]
    fn every_series_has_its_own_word_and_text() {
        let mut texts = HashSet::new();
        let mut next = 0;
        for (family, first) in families() {
            assert_eq!(first, next);
            for position in 0..family.series() {
                let text = format!("{}{}", family.name, family.label_text(position));
                assert!(texts.insert(text.clone()), "{text} twice");
                let (found, at) = series_at(first + position).expect("in the table");
                assert_eq!((found.name, at), (family.name, position));
            }
            next += family.series();
        }
        assert_eq!(next, METRIC_WORDS);
        assert!(series_at(METRIC_WORDS).is_none());
        assert!(series_at(usize::MAX).is_none());
    }

    #[test]
    fn index_and_label_text_agree() {
        for &kind in RequestKind::ALL {
            for &status in Status::ALL {
                let index = Metric::OperationsCompleted(kind, status).index();
                let (family, position) = series_at(index).expect("in the table");
                assert_eq!(
                    format!("{}{}", family.name, family.label_text(position)),
                    format!(
                        "orbitkv_operation_completed_total{{kind=\"{kind}\",status=\"{status}\"}}"
                    )
                );
            }
        }
        for &outcome in SpillOutcome::ALL {
            let (family, position) =
                series_at(Metric::SpillPages(outcome).index()).expect("in the table");
            assert_eq!(
                format!("{}{}", family.name, family.label_text(position)),
                format!("orbitkv_spill_pages_total{{outcome=\"{outcome}\"}}")
            );
        }
        let (full, 0) = series_at(Metric::SsdWriteQueueFull.index()).expect("in the table") else {
            panic!("no labels")
        };
        assert_eq!(full.name, "orbitkv_ssd_write_queue_full_total");
    }
}
