"""The components of SGLang's device pools. Needs SGLang 0.5.23."""

from __future__ import annotations

from typing import Any, Iterable

from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.components import ComponentType

from orbitkv.sglang.component import Component

_NAMES = {ComponentType.FULL: PoolName.KV, ComponentType.SWA: PoolName.SWA, ComponentType.MAMBA: PoolName.MAMBA}


class Pools:
    """What there is to restore, per component of the engine's tree.

    Raises ValueError for pools whose pages are no runs of bytes, or not known."""

    def __init__(self, params: Any, wanted: set):
        self._page = params.page_size
        kvcache = params.token_to_kv_pool_allocator.get_kvcache()
        drafts = (*getattr(params, "mtp_draft_device_pools", ()), *getattr(params, "sidecar_draft_device_pools", ()))
        #: Whether every tensor-parallel rank holds the same bytes.
        self.is_replicated = False
        if type(kvcache) in (MHATokenToKVPool, MLATokenToKVPool) and wanted == {ComponentType.FULL} and not drafts:
            self.is_replicated = type(kvcache) is MLATokenToKVPool
            self.components = [self._plain(PoolName.KV, kvcache, enumerate(range(kvcache.layer_num)))]
        elif type(kvcache) is SWAKVPool and wanted == {ComponentType.FULL, ComponentType.SWA} and not drafts:
            self.components = [
                self._plain(name, pool, self._layers(kvcache, is_swa))
                for name, pool, is_swa in (
                    (PoolName.KV, kvcache.full_kv_pool, False),
                    (PoolName.SWA, kvcache.swa_kv_pool, True),
                )
            ]
        elif (
            type(kvcache) is HybridLinearKVPool
            and type(kvcache.full_kv_pool) is MHATokenToKVPool
            and wanted == {ComponentType.FULL, ComponentType.MAMBA}
            and not drafts
        ):
            self.components = [self._linear(kvcache), self._mamba(params, kvcache)]
        else:
            self.components = self._resolved(params, kvcache, wanted)
        names = {_NAMES[kind].value for kind in wanted}
        if names != {component.name for component in self.components}:
            raise ValueError(f"orbitkv: {type(kvcache).__name__} has no pages for one of {sorted(names)}")
        for component in self.components:
            if component.name == PoolName.SWA.value:
                tokens = getattr(params, "swa_retain_window", None) or params.sliding_window_size
                component.dependency, component.window = "window", -(-tokens // self._page)
            elif component.name == PoolName.MAMBA.value:
                component.dependency = "state"

    def _plain(self, name: PoolName, pool: Any, layers: Iterable[tuple[int, int]]) -> Component:
        """A pool with a buffer, or one of K and one of V, per layer. `layers`: as the engine waits for
        them, and where the pool has them."""
        if type(pool) not in (MHATokenToKVPool, MLATokenToKVPool):
            raise ValueError(f"orbitkv: pages of {type(pool).__name__} are not known")
        if any(getattr(pool, scales, None) is not None for scales in ("k_scale_buffer", "native_k_scale_buffer")):
            raise ValueError("orbitkv: a KV cache with scales is not supported")
        kinds = [pool.kv_buffer] if isinstance(pool, MLATokenToKVPool) else [pool.k_buffer, pool.v_buffer]
        # One page more than the pool has is its padding.
        slots = pool.size + pool.page_size
        component = Component(name.value, slots // self._page, self._page)
        for layer, at in layers:
            for buffers in kinds:
                # Some layouts have a row a token, some a row a page.
                component.add(buffers[at], layer, self._page * buffers[at].shape[0] // slots or 1)
        return component

    @staticmethod
    def _layers(kvcache: Any, is_swa: bool) -> list[tuple[int, int]]:
        mapping = sorted(kvcache.layers_mapping.items())
        return [(layer - kvcache.start_layer, at) for layer, (at, swa) in mapping if swa == is_swa]

    def _linear(self, kvcache: Any) -> Component:
        mapping = sorted(kvcache.full_attention_layer_id_mapping.items())
        layers = [(layer - kvcache.start_layer, at) for layer, at in mapping]
        return self._plain(PoolName.KV, kvcache.full_kv_pool, layers)

    def _mamba(self, params: Any, kvcache: Any) -> Component:
        from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import _mamba_device_pool_entry

        return self._of_entries([_mamba_device_pool_entry(params.req_to_token_pool, kvcache.start_layer)])

    def _resolved(self, params: Any, kvcache: Any, wanted: set) -> list[Component]:
        """Pools that SGLang itself describes to linkers."""
        from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import resolve_hybrid_device_pool_group

        try:
            group = resolve_hybrid_device_pool_group(
                kvcache=kvcache, page_size=self._page, params=params, components=wanted
            )
        except AssertionError as error:
            raise ValueError(f"orbitkv: {error}") from error
        self.is_replicated = group.rank_replicated
        sources: dict[Any, list] = {}
        for entry in group.entries:
            sources.setdefault(entry.indices_from_pool, []).append(entry)
        return [self._of_entries(entries) for entries in sources.values()]

    def _of_entries(self, entries: list) -> Component:
        """Pools that one page index names together."""
        first = entries[0]
        pages = min(buffer.shape[0] // entry._row_span for entry in entries for buffer in entry.kv_buffer)
        component = Component(first.indices_from_pool.value, pages, first.page_size)
        for entry in entries:
            if entry._index_mapper is not None or entry.page_size != first.page_size:
                raise ValueError(f"orbitkv: pool {entry.name.value} numbers its pages in its own way")
            for layer, mapped in sorted(entry.layer_mapping.items()):
                for at in (mapped,) if isinstance(mapped, int) else mapped:
                    for buffers in entry.components:
                        component.add(buffers[at], layer, entry._row_span)
        return component
