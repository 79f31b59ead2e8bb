"""Leases that one thread takes and another one uses."""

from __future__ import annotations

import threading
from time import monotonic, monotonic_ns
from typing import Optional

from orbitkv import Lease

#: Seconds for which a lease is kept that nobody uses.
HOLD = 5.0
#: Seconds that a lease must still live when it is used.
MARGIN = 1.0


class Kept:
    """A lease for the pages with these hashes."""

    __slots__ = ("hashes", "lease", "epoch", "since")

    def __init__(self, hashes: bytes, lease: Lease, epoch: int):
        self.hashes = hashes
        self.lease = lease
        self.epoch = epoch
        self.since = monotonic()


class Leases:
    """For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: By the first hash; the oldest comes first.
        self._kept: dict[bytes, Kept] = {}

    def keep(self, kept: Kept) -> list[Kept]:
        """Keeps it; what is to be released because of that."""
        first = kept.hashes[:32]
        with self._lock:
            replaced = self._kept.pop(first, None)
            self._kept[first] = kept
            old = [other for other in self._kept.values() if kept.since - other.since > HOLD]
            for other in old:
                del self._kept[other.hashes[:32]]
        return old if replaced is None else [*old, replaced]

    def take(self, hashes: bytes, epoch: int) -> tuple[Optional[Kept], Optional[Kept]]:
        """The lease that covers these pages from its first one on, if it still does; else one that is to
        be released."""
        with self._lock:
            kept = self._kept.pop(hashes[:32], None)
        if kept is None:
            return None, None
        left = kept.lease.expires_ns - monotonic_ns()
        if kept.epoch == epoch and kept.hashes.startswith(hashes) and left > MARGIN * 1e9:
            return kept, None
        return None, kept

    def clear(self) -> list[Kept]:
        """Forgets all of them; they are to be released."""
        with self._lock:
            kept, self._kept = list(self._kept.values()), {}
        return kept
