"""What is done ahead of demand, and how long demand waits. Off, and for ever, unless asked for.

Prepared pages are accounted for: prepared = restored + unused + pending.
"""

from __future__ import annotations

from typing import Optional

from orbitkv.vllm.options import Options
from orbitkv.vllm.stats import Counters

#: Milliseconds of a query that takes what is there.
AT_ONCE_MS = 1


def query_deadline(options: Options) -> Optional[float]:
    """Seconds that a demand query may take to prepare pages; `None` for the Manager's own limit."""
    if options.stop == "deadline":
        return max(AT_ONCE_MS, options.stop_ms) / 1e3
    if options.stop == "best_effort":
        return AT_ONCE_MS / 1e3
    return None


class Prepared:
    """The account of pages prepared ahead of demand."""

    def __init__(self, counters: Counters):
        self._counters = counters
        #: Pages leased ahead of demand whose fate is open.
        self.pending = 0

    def leased(self, pages: int) -> None:
        self.pending += pages
        self._counters.add("prepared_pages", pages)

    def settled(self, pages: int, restored: int) -> None:
        """Of `pages` that were pending, `restored` were put to use."""
        restored = min(pages, restored)
        self.pending -= pages
        self._counters.add("prepared_restored_pages", restored)
        self._counters.add("prepared_unused_pages", pages - restored)
