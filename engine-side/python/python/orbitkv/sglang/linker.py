"""OrbitKV as the external cache linker of SGLang 0.5.23 and later."""

from __future__ import annotations

import logging
from typing import Any, Optional, Sequence

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker

from orbitkv.fingerprint import fit
from orbitkv.sglang import pages
from orbitkv.sglang.fences import Fences
from orbitkv.sglang.identity import join_hashes, model_identity
from orbitkv.sglang.loads import Part
from orbitkv.sglang.options import Options
from orbitkv.sglang.pools import Pools
from orbitkv.sglang.store import Store

_log = logging.getLogger("orbitkv")


class LayerCounter:
    """What a forward asks before it reads a layer."""

    def __init__(self, linker: "OrbitKVLinker", layers: int):
        self._linker = linker
        self.num_layers = layers
        self.consumer_index = -1

    def set_consumer(self, index: int) -> None:
        """The batch whose loads the next forward reads; -1 for none."""
        self.consumer_index = index

    def wait_until(self, layer: int) -> None:
        """Returns when this layer is in place. One that fails is told by the end of the batch, whose
        requests the engine then aborts."""
        if self.consumer_index >= 0:
            self._linker.store.loads.wait_for_layer(self.consumer_index, layer)


class OrbitKVLinker(UnifiedCacheLinker):
    """One a rank, on the scheduler's main thread. Every rank has pages of its own, and its own lease on
    them; the engine's tree takes what all ranks can restore."""

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: set,
        extra_config: Optional[dict] = None,
        forward_stream: Optional[Any] = None,
    ):
        self.forward_stream = forward_stream
        self._server_args = server_args
        self._params = params
        self._options = Options.of(extra_config)
        known = Pools(params, components)
        self._components = known.components
        self.pools = {PoolName(component.name): component for component in known.components}
        self._indices = {component.name: component.page_indices for component in known.components}
        self._rank, self._ranks = _tensor_rank(params)
        self._is_replicated = known.is_replicated
        on_gpu = torch.device(params.token_to_kv_pool_allocator.get_kvcache().device).type == "cuda"
        self._fences = Fences(self.record_offload_ready) if on_gpu else None
        self.layer_done_counter = LayerCounter(
            self, 1 + max(layer for component in known.components for layer in component.layers)
        )
        if PoolName.MAMBA in self.pools:
            params.req_to_token_pool.register_layer_transfer_counter(self.layer_done_counter)
        self._weights = _weights_version()
        self.store = self._open()

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> Sequence[int]:
        keys = next((transfer.keys for transfer in transfers if transfer.name == PoolName.KV), None)
        return self.store.lookups.ask(rid, join_hashes(keys)) if keys else []

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        return self.store.loads.queue(rid, self._parts(transfers))

    def start_layer_wise_loading(self) -> int:
        return self.store.loads.start()

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        return self.store.loads.finish(counter_index)

    def cancel_queued_load(self, rid: str) -> bool:
        return self.store.loads.cancel(rid)

    def offload(self, transfers: list[PoolTransfer], session_id: Optional[str] = None) -> bool:
        parts = self._parts(transfers)
        # Of equal pages rank 0 saves the only copy.
        self.store.offloads.queue([] if self._is_replicated and self._rank else parts)
        return True

    def num_completed_offloads(self) -> int:
        return self.store.poll()

    def pop_completed_offload(self) -> bool:
        return self.store.offloads.pop()

    def reset(self) -> None:
        self.store.reset()
        self.layer_done_counter.set_consumer(-1)
        weights = _weights_version()
        if weights != self._weights:
            # The engine flushes its cache after new weights: their pages are others.
            self._weights = weights
            self.store.close()
            self.store = self._open()

    def close(self) -> None:
        _log.info("orbitkv linker: %s", self.store.counters)
        self.store.close()

    def _open(self) -> Store:
        return Store(
            self._options,
            self._components,
            self._namespaces(),
            # Ranks queue the same loads, or the engine's collectives part company.
            can_refuse=self._ranks * self._params.pp_size * self._params.attn_cp_size == 1,
            record=None if self._fences is None else self._fences.record,
            stream=lambda: torch.cuda.current_stream().cuda_stream,
        )

    def _parts(self, transfers: list[PoolTransfer]) -> list[Part]:
        return [
            Part(
                transfer.name.value,
                join_hashes(transfer.keys),
                pages.of_indices(transfer.device_indices, self._indices[transfer.name.value]),
            )
            for transfer in transfers
            if transfer.keys
        ]

    def _namespaces(self) -> list[dict]:
        import sglang

        args, params = self._server_args, self._params
        kvcache = params.token_to_kv_pool_allocator.get_kvcache()
        model = model_identity(args, f"{self._options.weights_version} {self._weights}")
        rank, ranks = (0, 1) if self._is_replicated else (self._rank, self._ranks)
        place = (
            f"sglang {sglang.__version__} {torch.device(kvcache.device).type} {args.attention_backend}"
            f" {type(kvcache).__name__} cp {params.attn_cp_rank}/{params.attn_cp_size}"
        )
        return [
            dict(
                model=model,
                dtype=f"{args.kv_cache_dtype}/{kvcache.dtype}".replace("torch.", ""),
                page_tokens=params.page_size,
                page_bytes=component.page_bytes,
                layout=fit(f"{place} {component.name} {component.digest()}"),
                group=group,
                tp_rank=rank,
                tp_size=ranks,
                pp_rank=params.pp_rank,
                pp_size=params.pp_size,
                dependency=component.dependency,
                window=component.window,
            )
            for group, component in enumerate(self._components)
        ]


def _tensor_rank(params: Any) -> tuple[int, int]:
    """Rank and ranks among those that share attention heads."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 0, 1
    group = params.attn_tp_cache_group or params.tp_cache_group
    return torch.distributed.get_rank(group=group), torch.distributed.get_world_size(group=group)


def _weights_version() -> str:
    """As the engine was told with its last weights."""
    from sglang.srt.runtime_context import get_serving

    return str(getattr(get_serving(), "weight_version", ""))
