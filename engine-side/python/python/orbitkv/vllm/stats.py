"""What the connector counts, in the engine's own statistics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from orbitkv.link import End

#: Counters by name: what they count.
COUNTERS = {
    "queries": "Queries asked.",
    "queried_pages": "Pages asked for.",
    "hit_pages_dram": "Pages of hits that were in DRAM.",
    "hit_pages_ssd": "Pages of hits that came from SSD.",
    "missed_pages": "Pages asked for and not hit.",
    "queries_given_up": "Queries without an answer in time.",
    "restored_pages": "Pages restored into the engine.",
    "restored_bytes": "Bytes restored into the engine.",
    "failed_pages": "Pages whose restore failed; recomputed, or their request failed.",
    "saved_pages": "Pages saved.",
    "saved_bytes": "Bytes saved.",
    "present_pages": "Pages offered that the Manager had already.",
    "refused_pages": "Pages offered that were not saved.",
    "held_back_pages": "Pages not offered because too many saves were unfinished.",
    "prepared_pages": "Pages prepared ahead of demand.",
    "prepared_restored_pages": "Prepared pages that were then restored.",
    "prepared_unused_pages": "Prepared pages that were let go of unused.",
    "sessions_lost": "Sessions with the Manager that ended while the engine ran.",
}
#: Durations by name: what they are the sum of.
SECONDS = {
    "restore_seconds": "Time from the Manager's receipt of a restore to its sight by the engine.",
    "save_seconds": "Time from the Manager's receipt of a save to its sight by the engine.",
}
_NAMES = (*COUNTERS, *SECONDS)


class Counters:
    """Counts since the engine last asked."""

    __slots__ = ("data", "total")

    def __init__(self) -> None:
        self.data: dict[str, float] = {}
        #: Since the start.
        self.total: dict[str, float] = dict.fromkeys(_NAMES, 0)

    def add(self, name: str, count: float = 1) -> None:
        if count:
            self.data[name] = self.data.get(name, 0) + count
            self.total[name] += count

    def observe(self, name: str, end: End) -> None:
        """How long an operation took."""
        if end.observed_ns and end.queued_ns:
            self.add(name, (end.observed_ns - end.queued_ns) / 1e9)

    def take(self) -> "OrbitKVStats | None":
        """Counts since the last time, if there are any."""
        if not self.data:
            return None
        data, self.data = self.data, {}
        return OrbitKVStats(data=data)


@dataclass
class OrbitKVStats(KVConnectorStats):
    """Sums by name, of one process or several."""

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        return {name: round(self.data[name], 6) for name in _NAMES if name in self.data}

    def is_empty(self) -> bool:
        return not self.data


class OrbitKVPromMetrics(KVConnectorPromMetrics):
    """The same sums as Prometheus counters of the engine: `vllm:orbitkv_*`."""

    def __init__(self, vllm_config: Any, metric_types: dict, labelnames: list[str], per_engine_labelvalues: dict):
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics = {}
        for name, text in {**COUNTERS, **SECONDS}.items():
            metric = self._counter_cls(name=f"vllm:orbitkv_{name}", documentation=text, labelnames=labelnames)
            self._metrics[name] = {
                engine: metric.labels(*values) for engine, values in per_engine_labelvalues.items()
            }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, count in transfer_stats_data.items():
            if name in self._metrics:
                self._metrics[name][engine_idx].inc(count)
