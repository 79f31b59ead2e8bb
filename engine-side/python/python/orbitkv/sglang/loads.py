"""Loads: leased pages restored into the engine's memory, layer by layer."""

from __future__ import annotations

import time
from functools import partial
from typing import Any, Callable, Optional, Sequence

from orbitkv import CudaError
from orbitkv.link import End, Link, Operation
from orbitkv.sglang.component import Component
from orbitkv.sglang.held import Held
from orbitkv.sglang.lookups import HASH, Hit, Lookups

#: Looks at a done word between two looks at everything else.
LOOKS = 256
#: Seconds between two looks while no Manager is there whose end of copies is waited for.
PAUSE = 0.001

#: Records events, by index, behind everything that the engine's streams were given so far.
Record = Callable[[Any, Sequence[int]], None]


class Part:
    """The pages of one component in a load or an offload."""

    __slots__ = ("component", "hashes", "pages")

    def __init__(self, component: str, hashes: bytes, pages: Any):
        self.component = component
        self.hashes = hashes
        #: `pages.Ready` or `pages.Staged`.
        self.pages = pages


class Load:
    """What one request loads: queued, or running in a batch."""

    __slots__ = ("hit", "parts", "pages", "left")

    def __init__(self, hit: Optional[Hit], parts: list[Part], pages: int):
        #: `None` for one that is known to fail.
        self.hit = hit
        self.parts = parts
        #: Length of the prefix that it restores.
        self.pages = pages
        self.left = len(parts)


class Batch:
    """The loads that one forward waits for."""

    __slots__ = ("left", "failed", "operations")

    def __init__(self) -> None:
        self.left = 0
        self.failed = False
        self.operations: list[tuple[Component, Operation]] = []


class Loads:
    """For the engine's main thread."""

    def __init__(
        self,
        link: Link,
        lookups: Lookups,
        components: Sequence[Component],
        *,
        record: Optional[Record],
        stream: Optional[Callable[[], int]],
        can_refuse: bool,
    ):
        self._link = link
        self._lookups = lookups
        self._components = {component.name: component for component in components}
        self._record = record
        #: The stream that waits for layers; `None` where the host waits.
        self._stream = stream
        self._can_refuse = can_refuse
        self._queued: dict[str, Load] = {}
        self._batches: dict[int, Batch] = {}
        self._next = 0
        self.counters = {"pages_restored": 0, "pages_failed": 0}

    def queue(self, rid: str, parts: list[Part]) -> bool:
        """Whether the load will run. Where ranks must agree it always says so, and `finish` tells."""
        longest = max(parts, key=lambda part: len(part.hashes), default=None)
        if longest is None or not longest.hashes or rid in self._queued:
            return False
        hit = self._lookups.claim(rid, longest.hashes)
        if hit is None and self._can_refuse:
            return False
        self._queued[rid] = Load(hit, parts, len(longest.hashes) // HASH)
        return True

    def cancel(self, rid: str) -> bool:
        """Whether it was queued and now is not."""
        load = self._queued.pop(rid, None)
        if load is None:
            return False
        self._release(load)
        return True

    def start(self) -> int:
        """Begins what is queued; the number of the batch, or -1 without any."""
        if not self._queued:
            return -1
        queued, self._queued = self._queued, {}
        index, self._next = self._next, self._next + 1
        batch = self._batches[index] = Batch()
        for load in queued.values():
            self._begin(batch, load)
        self._link.flush()
        return index

    def wait_for_layer(self, index: int, layer: int) -> None:
        """Returns when the bytes of this layer are in place, or known not to come."""
        batch = self._batches.get(index)
        if batch is None:
            return
        for component, operation in batch.operations:
            if layer in component.layers and not operation.is_over:
                self._wait(operation, layer)

    def finish(self, index: int) -> bool:
        """Returns when nothing writes for this batch any more: whether every byte is in place. As long
        as copies of a Manager that does not answer may run, it does not return."""
        batch = self._batches.get(index)
        if batch is None:
            return index < 0
        while batch.left:
            self.rest()
        del self._batches[index]
        return not batch.failed

    def clear(self) -> None:
        """Drops what is queued and waits for what runs."""
        for rid in list(self._queued):
            self.cancel(rid)
        for index in list(self._batches):
            self.finish(index)

    def rest(self) -> None:
        """Waits a little for the next end."""
        self._link.wait(0.05)
        if self._link.client is None:
            time.sleep(PAUSE)

    def _begin(self, batch: Batch, load: Load) -> None:
        hit = load.hit
        held: Optional[Held] = self._link.held
        if hit is None or held is None or hit.held is not held:
            batch.failed = True
            self._release(load)
            return
        fences = self._fences(held, len(load.parts))
        if fences is None:
            batch.failed = True
            self._release(load)
            return
        for part, fence in zip(load.parts, fences):
            count = len(part.hashes) // HASH
            batch.left += 1
            operation = self._link.begin(
                "restore",
                hit.lease,
                load.pages - count,
                held.regions[part.component],
                part.hashes,
                part.pages.wait(),
                # So that the rest of the lease and this part of it end in one way.
                keep=True,
                by_layer=True,
                fence=fence,
                then=partial(self._ended, batch, load, held, count, fence),
            )
            batch.operations.append((self._components[part.component], operation))

    def _fences(self, held: Held, count: int) -> Optional[list[Optional[int]]]:
        """An event for each operation, behind the last readers of the pages that it overwrites; `None`
        when the session is lost meanwhile, or the GPU is."""
        if self._record is None:
            return [None] * count
        taken: list[int] = []
        while len(taken) < count:
            index = held.events.take()
            if index is not None:
                taken.append(index)
                continue
            self._link.flush()
            self.rest()
            if self._link.held is not held:
                return None
        try:
            self._record(held.events, taken)
        except (CudaError, RuntimeError):
            for index in taken:
                held.events.give_back(index)
            return None
        return taken

    def _ended(self, batch: Batch, load: Load, held: Held, pages: int, fence: Optional[int], end: End) -> None:
        if fence is not None:
            held.events.give_back(fence)
        if end.status == "ok":
            self.counters["pages_restored"] += pages
        else:
            self.counters["pages_failed"] += pages
            batch.failed = True
        batch.left -= 1
        load.left -= 1
        if not load.left:
            self._release(load)

    def _release(self, load: Load) -> None:
        if load.hit is not None:
            self._lookups.release(load.hit.lease, load.hit.held)

    def _wait(self, operation: Operation, layer: int) -> None:
        link = self._link
        if self._stream is not None and operation.number is not None and link.held is not None:
            try:
                link.held.done_words.wait(self._stream(), operation.number, layer)
                return
            except CudaError:
                pass
        while not operation.is_over:
            client = link.client
            if client is None or operation.number is None:
                self.rest()
                continue
            for _ in range(LOOKS):
                if client.is_layer_done(operation.number, layer) is not None:
                    return
            link.pump()
