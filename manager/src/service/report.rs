//! What `core` counted, as telemetry names it.

use std::sync::atomic::Ordering;

use orbitkv_shm_protocol::ids::{EngineId, SessionId};
use orbitkv_shm_protocol::record::Code;
use orbitkv_shm_protocol::telemetry::{
    CopyDirection, HeldIn, LeaseEnd, ManagerState, Metric, OperationStage, PrepareOutcome, Reason,
    RefuseReason, SpillOutcome, SsdFault,
};

use super::{Service, Storage, TABLES_INTERVAL_NS, TABLES_INTERVAL_NS_MAX};
use crate::core::{Gauges, LeaseView, Nanos, Stats};
use crate::telemetry::Counters;
use crate::telemetry::mirror::{LeaseMirror, NamespaceMirror, OperationMirror};

/// A query without room in its budgets, as `core` calls that.
const WAITS_FOR_BUDGET: &str = "waiting for budget";

impl Service {
    /// Publishes numbers every time, tables that cost a walk less often.
    pub(super) fn report(&mut self, now: Nanos) {
        // Counters and the gauges that they sum up with, from one and the same moment.
        count(&mut self.telemetry.counters, self.core.stats());
        measure(&mut self.telemetry.counters, &self.core.gauges());
        for (reason, refused) in RefuseReason::ALL.iter().zip(&self.counters.turned_away) {
            let refused = refused.load(Ordering::Relaxed);
            self.telemetry.counters.set(Metric::SessionsRefused(*reason), refused);
        }
        self.telemetry.counters.set(Metric::ManagerTurns, self.turns);
        if now.saturating_sub(self.tables_shown_ns) >= self.tables_interval_ns {
            self.tables_shown_ns = now;
            self.show_tables();
            // Many leases and operations make a walk long: it may take a twentieth of the time.
            let cost = self.clock.now().saturating_sub(now);
            self.tables_interval_ns =
                cost.saturating_mul(20).clamp(TABLES_INTERVAL_NS, TABLES_INTERVAL_NS_MAX);
        }
        self.telemetry.publish(now);
        self.numbers_stale = false;
    }

    /// Shows where the rings are whose positions moved in this turn.
    pub(super) fn mirror_rings(&mut self) {
        for client in &mut self.clients {
            if let Some(rings) = client.moved_rings()
                && let Some(slot) = &client.slot
            {
                self.telemetry.set_rings(slot, &rings);
            }
        }
    }

    fn show_tables(&mut self) {
        // Clients move their own words without a turn of this loop; all else moves by its turns.
        let walk = std::mem::replace(&mut self.tables_stale, false);
        if walk {
            self.session_views.clear();
            self.session_views.extend(self.core.session_views());
            let regions: u32 = self.session_views.iter().map(|view| view.regions).sum();
            let waiting = self.core.operation_views().filter(|op| op.stage == WAITS_FOR_BUDGET);
            let waiting = waiting.count() as u64;
            let counters = &mut self.telemetry.counters;
            counters.set(Metric::SessionRegions, regions.into());
            counters.set(Metric::BudgetWaitingQueries, waiting);
            counters.set(Metric::BudgetSessionLimitBytes, self.core.session_budget_bytes());
        }
        for client in &mut self.clients {
            let session = client.session;
            let view = self.session_views.iter().find(|view| view.session == session);
            let mirror = client.mirror(self.tables_shown_ns, view);
            let Some(slot) = &client.slot else { continue };
            self.telemetry.set_session(slot, &mirror);
            if walk {
                let core = &self.core;
                self.telemetry.set_operations(slot, operations_of(core, session));
                self.telemetry.set_leases(slot, leases_of(core, session, client.engine));
            }
        }
        self.cut_off_violators(self.tables_shown_ns);
        if walk {
            self.show_namespaces();
        }
        self.show_health();
        if let Some(storage) = &self.storage {
            let recovering = self.core.is_recovering();
            let devices = storage.mirrors(recovering, |device| self.core.device_usage(device));
            self.telemetry.set_devices(devices);
            self.telemetry.counters.set(Metric::SsdWriteQueueFull, storage.write_queue_full());
            for (reason, times) in storage.retries() {
                self.telemetry.counters.set(Metric::SsdRetries(reason), times);
            }
            for (reason, times) in storage.stops() {
                self.telemetry.counters.set(Metric::SsdStops(reason), times);
            }
        }
    }

    /// Their rows cost a sort: only when one of them changed.
    fn show_namespaces(&mut self) {
        let pages = || self.core.namespace_views().map(|view| (view.dram_pages, view.ssd_pages));
        if pages().eq(self.namespaces_shown.iter().copied()) {
            return;
        }
        self.namespaces_shown.clear();
        self.namespaces_shown.extend(pages());
        let namespaces = self.core.namespace_views().map(|view| NamespaceMirror {
            name: view.label,
            dram_pages: view.dram_pages,
            dram_bytes: view.dram_pages * view.page_bytes,
            ssd_pages: view.ssd_pages,
            ssd_bytes: view.ssd_pages * view.page_bytes,
        });
        self.telemetry.set_namespaces(namespaces);
    }
}

impl Service {
    /// Ready or degraded, as the SSD devices are; new images go to those that take them, and nobody
    /// waits for those that do not read.
    fn show_health(&mut self) {
        let now = self.tables_shown_ns;
        if let Some(storage) = &mut self.storage {
            let intake = |device| self.core.device_intake(device);
            for (device, intake) in storage.intake_changes(now, intake) {
                self.core.set_device_intake(device, intake);
            }
            for (device, readable) in storage.readable() {
                if self.core.device_is_readable(device) != readable {
                    self.core.set_device_readable(now, device, readable, &mut self.effects);
                    self.core.pump(now, &mut self.effects);
                }
            }
        }
        let healthy = self.storage.as_ref().is_none_or(Storage::is_healthy);
        let said = self.telemetry.state();
        let state = if healthy { ManagerState::Ready } else { ManagerState::Degraded };
        if matches!(said, ManagerState::Ready | ManagerState::Degraded) && said != state {
            tracing::warn!(%state, "the state of the SSD tier changed");
            self.telemetry.set_state(state);
        }
    }
}

fn operations_of(
    core: &crate::core::Core,
    session: SessionId,
) -> impl Iterator<Item = OperationMirror> + '_ {
    core.operation_views().filter(move |view| view.session == session).map(|view| OperationMirror {
        id: view.operation,
        kind: view.kind,
        stage: match view.stage {
            WAITS_FOR_BUDGET
            | "waiting for memory"
            | "waiting for others"
            | "waiting for its fence" => OperationStage::Waiting,
            "reading" => OperationStage::Preparing,
            "copying" => OperationStage::Copying,
            _ => OperationStage::Ending,
        },
        taken_ns: view.queued_ns,
    })
}

/// Leases that count against a session, and those of its group whose own session has closed.
fn leases_of(
    core: &crate::core::Core,
    session: SessionId,
    engine: EngineId,
) -> impl Iterator<Item = LeaseMirror> + '_ {
    let shown = move |view: &LeaseView| match view.session {
        Some(owner) => owner == session,
        None => view.group == Some(engine),
    };
    core.lease_views().filter(shown).filter_map(|view| {
        Some(LeaseMirror {
            id: view.lease,
            group: view.group?,
            bytes: view.bytes,
            pages: view.pages.into(),
            expires_ns: view.expires_ns,
        })
    })
}

/// Counters: whole values, so that nothing is counted twice.
fn count(counters: &mut Counters, stats: &Stats) {
    let hits = stats.lookup_hits_dram + stats.lookup_hits_ssd;
    counters.set(Metric::LookupPages, stats.lookup_pages);
    counters.set(Metric::LookupHitPages(HeldIn::Dram), stats.lookup_hits_dram);
    counters.set(Metric::LookupHitPages(HeldIn::Ssd), stats.lookup_hits_ssd);
    let missed = stats.lookup_pages - hits;
    counters.set(Metric::LookupMissedPages(Reason::IoError), stats.lookup_unreadable);
    counters.set(Metric::LookupMissedPages(Reason::Absent), missed - stats.lookup_unreadable);
    counters.set(Metric::LookupSpeculativeSkipped, stats.queries_skipped);
    let failed: u64 = stats.pages_restore_failed.iter().sum();
    counters.set(Metric::RestoreRequestedPages, stats.pages_restored + failed);
    counters.set(Metric::RestoreRestoredPages(HeldIn::Dram), stats.pages_restored_dram);
    counters.set(
        Metric::RestoreRestoredPages(HeldIn::Ssd),
        stats.pages_restored - stats.pages_restored_dram,
    );
    by_reason(counters, &stats.pages_restore_failed, Metric::RestoreFailedPages);
    let refused: u64 = stats.pages_refused.iter().sum();
    counters.set(Metric::SaveOfferedPages, stats.pages_saved + stats.pages_present + refused);
    counters.set(Metric::SaveStoredPages, stats.pages_saved);
    counters.set(Metric::SavePresentPages, stats.pages_present);
    by_reason(counters, &stats.pages_refused, Metric::SaveRefusedPages);
    for (outcome, pages) in PrepareOutcome::ALL.iter().zip(stats.prepare) {
        counters.set(Metric::PreparePages(*outcome), pages);
    }
    counters.set(Metric::ForgetForgottenPages, stats.pages_forgotten);
    counters.set(Metric::PoolEvictedPages, stats.evictions);
    counters.set(Metric::PoolAllocationFailures, stats.alloc_failures);
    counters.set(Metric::SpillOfferedPages, stats.spill_offered);
    for (outcome, pages) in SpillOutcome::ALL.iter().zip(stats.spill) {
        counters.set(Metric::SpillPages(*outcome), pages);
    }
    counters.set(Metric::SsdRecoveredPages, stats.recovered_pages);
    counters.set(Metric::SsdReadPages, stats.ssd_pages_read);
    counters.set(Metric::SsdReadBytes, stats.ssd_bytes_read);
    counters.set(Metric::SsdWrittenPages, stats.ssd_pages_written);
    counters.set(Metric::SsdWrittenBytes, stats.ssd_bytes_written);
    for (at, fault) in SsdFault::ALL.iter().enumerate() {
        counters.set(Metric::SsdReadErrors(*fault), stats.ssd_read_errors[at]);
        counters.set(Metric::SsdWriteErrors(*fault), stats.ssd_write_errors[at]);
    }
    counters.set(Metric::SsdEvictedPages, stats.ssd_evictions);
    counters.set(Metric::SsdRetiredSlots, stats.slots_retired);
    counters.set(Metric::DeviceCopiedBytes(CopyDirection::DeviceToHost), stats.bytes_saved);
    counters.set(Metric::DeviceCopiedBytes(CopyDirection::HostToDevice), stats.bytes_restored);
    counters.set(Metric::DeviceCopiedPages(CopyDirection::DeviceToHost), stats.pages_saved);
    counters.set(Metric::DeviceCopiedPages(CopyDirection::HostToDevice), stats.pages_restored);
    counters.set(Metric::SessionsOpened, stats.sessions_opened);
    counters.set(Metric::SessionBadRequests, stats.bad_requests);
    counters.set(Metric::LeasesGranted, stats.leases_granted);
    for (cause, leases) in LeaseEnd::ALL.iter().zip(stats.leases_ended) {
        counters.set(Metric::LeasesEnded(*cause), leases);
    }
    counters.set(Metric::BudgetQueryPeakBytes, stats.query_budget_peak_bytes);
    counters.set(Metric::BudgetSpeculativePeakBytes, stats.speculative_budget_peak_bytes);
}

fn by_reason(
    counters: &mut Counters,
    pages: &[u64; Code::ALL.len()],
    metric: fn(Reason) -> Metric,
) {
    // Several codes may fold into one reason.
    let mut sums = [0; Reason::ALL.len()];
    for (code, pages) in Code::ALL.iter().zip(pages) {
        sums[Reason::of(*code) as usize] += pages;
    }
    for (reason, pages) in Reason::ALL.iter().zip(sums) {
        counters.set(metric(*reason), pages);
    }
}

fn measure(counters: &mut Counters, gauges: &Gauges) {
    counters.set(Metric::PoolCapacityBytes, gauges.pool_capacity_bytes);
    counters.set(Metric::PoolUsedBytes, gauges.pool_used_bytes);
    counters.set(Metric::PoolPinnedBytes, gauges.pool_pinned_bytes);
    counters.set(Metric::PoolDrainingBytes, gauges.pool_draining_bytes);
    counters.set(Metric::PoolLargestFreeBytes, gauges.pool_largest_free_bytes);
    counters.set(Metric::PoolResidentPages, gauges.dram_pages);
    counters.set(Metric::SsdResidentPages, gauges.ssd_pages);
    counters.set(Metric::SpillWaitingPages, gauges.spill_pages + gauges.writes_in_flight);
    counters.set(Metric::SpillWaitingBytes, gauges.spill_bytes + gauges.writes_in_flight_bytes);
    counters.set(Metric::NamespacesKnown, gauges.namespaces);
    counters.set(Metric::SpillHistoryPages, gauges.history_keys);
    counters.set(Metric::SsdWriteBudgetBytes, gauges.write_budget_bytes);
    counters.set(Metric::OperationsRunning, gauges.operations);
    counters.set(Metric::SessionsAttached, gauges.sessions);
    counters.set(Metric::LeasesHeld, gauges.leases);
    counters.set(Metric::LeasedBytes, gauges.leased_bytes);
    counters.set(Metric::BudgetQueryBytes, gauges.leased_bytes);
    counters.set(Metric::BudgetQueryLimitBytes, gauges.query_budget_bytes);
    counters.set(Metric::BudgetSpeculativeBytes, gauges.speculative_bytes);
    counters.set(Metric::BudgetSpeculativeLimitBytes, gauges.speculative_budget_bytes);
}
