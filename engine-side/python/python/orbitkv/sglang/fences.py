"""Events behind everything that an engine's streams were given so far. Needs torch and a GPU."""

from __future__ import annotations

from typing import Any, Callable, Iterable, Sequence

import torch


class Fences:
    """One event of the Manager waits for several of the engine's, so they meet on a stream of their own.
    Neither of the engine's streams waits for anything."""

    def __init__(self, ready: Callable[[], Iterable[Any]]):
        """`ready` records the engine's events."""
        self._ready = ready
        self._side = torch.cuda.Stream()

    def record(self, events: Any, indices: Sequence[int]) -> None:
        """Raises CudaError, or what torch raises, where the GPU refuses."""
        for ready in self._ready():
            self._side.wait_event(ready)
        for index in indices:
            events.record(index, self._side.cuda_stream)
