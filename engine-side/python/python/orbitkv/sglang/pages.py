"""Page numbers that an engine names: at hand, or still on their way from a GPU."""

from __future__ import annotations

from typing import Any

#: Where the engine's indices are no whole pages. No region has it, so the Manager refuses it.
NO_PAGE = 0xFFFFFFFF


class Ready:
    """Page numbers that are at hand: a buffer of native unsigned 32-bit integers."""

    __slots__ = ("numbers",)

    def __init__(self, numbers: Any):
        self.numbers = numbers

    def is_ready(self) -> bool:
        return True

    def wait(self) -> Any:
        return self.numbers


class Staged:
    """Page numbers on their way from a GPU; the engine's thread does not wait for them."""

    __slots__ = ("_host", "_event")

    def __init__(self, host: Any, event: Any):
        self._host = host
        self._event = event

    def is_ready(self) -> bool:
        return self._event.query()

    def wait(self) -> Any:
        self._event.synchronize()
        return _unsigned(self._host)


def of_indices(indices: Any, per_page: int) -> Any:
    """The pages of a tensor of indices, `per_page` consecutive ones each, the first a multiple of it."""
    import torch

    rows = indices.reshape(-1, per_page)
    first = rows[:, 0]
    whole = (rows == first[:, None] + torch.arange(per_page, device=rows.device)).all(1) & (first % per_page == 0)
    pages = torch.where(whole, first // per_page, -1).to(torch.int32)
    if not pages.is_cuda:
        return Ready(_unsigned(pages))
    host = torch.empty(pages.shape, dtype=torch.int32, pin_memory=True)
    host.copy_(pages, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return Staged(host, event)


def _unsigned(pages: Any) -> Any:
    return pages.contiguous().numpy().view("uint32")
