"""A linker that does to its loads what a scenario asks for: the controls of the rows."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from orbitkv.sglang.linker import OrbitKVLinker


class TamperingLinker(OrbitKVLinker):
    """Looks for files in the folder that `linker_extra_config` names as "orders":

    corrupt-kv   restored pages are changed before the forward reads them
    corrupt-swa  those of layers with a window only
    fail         leases end between load and restore, so that every restore fails
    kill         the Manager, whose process the file names, is killed with restores outstanding
    """

    def __init__(self, *arguments: Any, extra_config: dict, **options: Any):
        self._orders = Path(extra_config.pop("orders"))
        self._loading: list = []
        super().__init__(*arguments, extra_config=extra_config, **options)

    def load(self, rid: str, transfers: list) -> bool:
        queued = super().load(rid, transfers)
        if queued:
            self._loading += transfers
        return queued

    def start_layer_wise_loading(self) -> int:
        loading, self._loading = self._loading, []
        loads = self.store.loads
        if (self._orders / "fail").exists():
            for load in loads._queued.values():
                self.store.lookups.release(load.hit.lease, load.hit.held)
            self.store.link.drain(10)
        kill = self._orders / "kill"
        victim = int(kill.read_text()) if loading and kill.exists() else None
        if victim:
            os.kill(victim, signal.SIGSTOP)
        index = super().start_layer_wise_loading()
        if victim:
            os.kill(victim, signal.SIGKILL)
            kill.unlink()
        corrupted = [transfer for transfer in loading if (self._orders / f"corrupt-{transfer.name.value}").exists()]
        if corrupted and index >= 0:
            while loads._batches[index].left:
                loads.rest()
            kvcache = self._params.token_to_kv_pool_allocator.get_kvcache()
            for transfer in corrupted:
                # Two pools only where some layers have a window.
                pool = getattr(kvcache, {"kv": "full_kv_pool", "swa": "swa_kv_pool"}[transfer.name.value], kvcache)
                for buffer in (*pool.k_buffer, *pool.v_buffer):
                    buffer[transfer.device_indices] += 1
        return index
