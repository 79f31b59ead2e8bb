"""KV events of the engine: which blocks the Manager has, for routers that listen to the engine."""

from __future__ import annotations

import inspect
from typing import Any, Optional

#: Where the engine's events say such blocks are.
MEDIUM = "CPU"


class StoredEvents:
    """One event a saved chain, told once its save has ended on every worker."""

    def __init__(self, is_on: bool, page_tokens: int):
        self._is_on = is_on
        self._page_tokens = page_tokens
        self._noted: dict[int, list[dict]] = {}
        self._ready: list[Any] = []

    def note(self, number: int, tracked: Any, first: int, end: int) -> None:
        """Pages `first` to `end` of a request go with save `number`."""
        if not self._is_on:
            return
        request = tracked.request
        lora = getattr(request, "lora_request", None)
        self._noted.setdefault(number, []).append(
            dict(
                block_hashes=list(request.block_hashes[first:end]),
                parent_block_hash=request.block_hashes[first - 1] if first else None,
                token_ids=list(request.all_token_ids[first * self._page_tokens : end * self._page_tokens]),
                block_size=self._page_tokens,
                lora_id=lora.lora_int_id if lora else None,
                lora_name=lora.lora_name if lora else None,
                medium=MEDIUM,
            )
        )

    def stored(self, number: int) -> None:
        """The save has ended."""
        noted: Optional[list[dict]] = self._noted.pop(number, None)
        if noted:
            from vllm.distributed.kv_events import BlockStored

            known = inspect.signature(BlockStored).parameters
            for fields in noted:
                self._ready.append(BlockStored(**{name: value for name, value in fields.items() if name in known}))

    def dropped(self, number: int) -> None:
        """The save never began."""
        self._noted.pop(number, None)

    def take(self) -> list[Any]:
        """Events since the last time."""
        if not self._ready:
            return _NONE
        ready, self._ready = self._ready, []
        return ready


_NONE: list[Any] = []
