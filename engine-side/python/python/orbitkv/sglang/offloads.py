"""Offloads: pages of the engine saved, told of in the order in which they were queued."""

from __future__ import annotations

from collections import deque
from functools import partial
from time import monotonic
from typing import Optional, Sequence

from orbitkv import CudaError
from orbitkv.link import End, Link
from orbitkv.sglang.component import Component
from orbitkv.sglang.held import Held
from orbitkv.sglang.lookups import HASH
from orbitkv.sglang.loads import Part, Record


class Offload:
    """One node of the engine's tree. It is saved when all of its parts are."""

    __slots__ = ("parts", "pages", "left", "failed", "queued_at", "held", "fences")

    def __init__(self, parts: list[Part]):
        self.parts = parts
        self.pages = sum(len(part.hashes) // HASH for part in parts)
        self.left = len(parts)
        self.failed = False
        self.queued_at = monotonic()
        #: The session and the events of its operations; `None` until it has them.
        self.held: Optional[Held] = None
        self.fences: Optional[list[Optional[int]]] = None

    def refuse(self) -> None:
        self.left = 0
        self.failed = True


class Offloads:
    """For the engine's main thread. Nothing here raises, or waits."""

    def __init__(
        self,
        link: Link,
        components: Sequence[Component],
        *,
        record: Optional[Record],
        held_pages_max: float,
        patience: float,
        save: bool,
    ):
        self._link = link
        self._record = record
        self._pages_max = held_pages_max * sum(component.pages for component in components)
        self._patience = patience
        self._save = save
        #: In order: those whose end has not been told.
        self._queue: deque[Offload] = deque()
        #: Those of them that wait for an event, or for their page numbers.
        self._waiting: deque[Offload] = deque()
        self._pages = 0
        self._results: deque[bool] = deque()
        self.counters = {"pages_saved": 0, "pages_present": 0, "pages_refused": 0}

    def queue(self, parts: list[Part]) -> None:
        """Its end is told in any case: ranks must agree on what was queued. Pages that the Manager has
        are not copied again."""
        offload = Offload(parts)
        self._queue.append(offload)
        if self._pages + offload.pages > self._pages_max:
            self._link.pump()
        # One alone may be larger than that: it would never be saved.
        is_full = self._pages and self._pages + offload.pages > self._pages_max
        if not self._save or not self._link.ready or is_full:
            self.counters["pages_refused"] += offload.pages
            offload.refuse()
            return
        self._pages += offload.pages
        self._take_fences(offload)
        self._waiting.append(offload)
        self.advance()

    def completed(self) -> int:
        """How many ends can be told now."""
        if self._queue:
            self.advance()
            while self._queue and not self._queue[0].left:
                self._results.append(not self._queue.popleft().failed)
            if self._queue and monotonic() - self._queue[0].queued_at > self._patience:
                self._link.complain("an offload has not ended")
        return len(self._results)

    def pop(self) -> bool:
        """The oldest end: whether everything is saved."""
        return self._results.popleft()

    def advance(self) -> None:
        """Begins what can begin, in order."""
        while self._waiting:
            offload = self._waiting[0]
            if offload.fences is None and self._link.held is not None:
                self._take_fences(offload)
            if self._link.held is None or offload.held not in (None, self._link.held):
                self._waiting.popleft()
                self._drop(offload)
                continue
            if offload.fences is None or not all(part.pages.is_ready() for part in offload.parts):
                break
            self._waiting.popleft()
            self._begin(offload)
        self._link.flush()

    def clear(self) -> None:
        """Forgets what has ended and what has not begun; what runs has been waited for."""
        for offload in self._waiting:
            self._drop(offload)
        self._waiting.clear()
        self._queue.clear()
        self._results.clear()

    def _take_fences(self, offload: Offload) -> None:
        """Events behind the kernels that wrote the pages; without them it waits."""
        held = self._link.held
        if held is None:
            return
        if self._record is None:
            offload.held, offload.fences = held, [None] * len(offload.parts)
            return
        taken = []
        while len(taken) < len(offload.parts) and (index := held.events.take()) is not None:
            taken.append(index)
        if len(taken) == len(offload.parts):
            try:
                self._record(held.events, taken)
                offload.held, offload.fences = held, taken
                return
            except (CudaError, RuntimeError):
                pass
        for index in taken:
            held.events.give_back(index)

    def _begin(self, offload: Offload) -> None:
        for part, fence in zip(offload.parts, offload.fences):
            # SGLang does not tell whose child a node is: its first page is the root of a chain.
            self._link.begin(
                "save",
                offload.held.regions[part.component],
                part.hashes,
                part.pages.wait(),
                fence=fence,
                then=partial(self._ended, offload, fence, len(part.hashes) // HASH),
            )

    def _ended(self, offload: Offload, fence: Optional[int], pages: int, end: End) -> None:
        if fence is not None:
            offload.held.events.give_back(fence)
        self.counters["pages_saved"] += end.pages
        self.counters["pages_present"] += end.pages_present
        self.counters["pages_refused"] += pages - end.pages - end.pages_present
        if end.status != "ok":
            offload.failed = True
        offload.left -= 1
        if not offload.left:
            self._pages -= offload.pages

    def _drop(self, offload: Offload) -> None:
        """One that has not begun."""
        for fence in offload.fences or ():
            if fence is not None:
                offload.held.events.give_back(fence)
        self._pages -= offload.pages
        self.counters["pages_refused"] += offload.pages
        offload.refuse()
