"""The engine's view: each call of `KVConnectorBase_V1`, handed to the side that it is for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Iterable, Optional

from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole, SupportsHMA
from vllm.logger import init_logger

from orbitkv.vllm.events import StoredEvents
from orbitkv.vllm.layout import GroupLayout
from orbitkv.vllm.metadata import NOTHING, Handshake, StepMetadata, WorkerMetadata
from orbitkv.vllm.namespace import engine_id, namespaces, unsupported
from orbitkv.vllm.options import Options
from orbitkv.vllm.scheduler import Scheduler
from orbitkv.vllm.stats import Counters, OrbitKVPromMetrics, OrbitKVStats
from orbitkv.vllm.worker import Worker

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.orbitkv")

#: vLLM 0.32 and later fail single loads by request, earlier ones by block only.
_TransferResults = getattr(base, "KVConnectorTransferResults", None)
#: The engine only reads it.
_NO_RESULTS = _TransferResults() if _TransferResults is not None else None


class OrbitKVConnector(KVConnectorBase_V1, SupportsHMA):
    """One code path for vLLM 0.26 and later. One object a role; in single-process mode both live in one
    process and share nothing but the Manager."""

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig"):
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._config = vllm_config
        self._cache = kv_cache_config
        self._options = Options.of(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._counters = Counters()
        self._handshake: Optional[Handshake] = None
        self._metadata: StepMetadata = NOTHING
        self._worker: Optional[Worker] = None
        self._scheduler: Optional[Scheduler] = None
        self._unsupported = unsupported(vllm_config, kv_cache_config, _TransferResults is not None)
        if self._unsupported:
            logger.warning("orbitkv: serving without the cache: %s", self._unsupported)
        group = engine_id(vllm_config.kv_transfer_config.engine_id)
        if role == KVConnectorRole.WORKER:
            self._worker = Worker(self._options, group, self._counters, _TransferResults is not None)
        else:
            events = getattr(vllm_config, "kv_events_config", None)
            block = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size if kv_cache_config.kv_cache_groups else 0
            self._scheduler = Scheduler(
                self._options,
                group,
                vllm_config.parallel_config.world_size,
                kv_cache_config,
                self._counters,
                StoredEvents(bool(events and events.enable_kv_cache_events), block),
            )

    # What the engine asks of the class

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: "VllmConfig") -> Optional[str]:
        """All layers of a block together, where the engine can: then a page is one copy."""
        layout = Options.of(vllm_config.kv_transfer_config.kv_connector_extra_config).kv_layout
        if layout != "auto":
            return layout or None
        try:
            from vllm.v1 import kv_cache_layout  # noqa: F401 - vLLM 0.29 and later know such layouts
        except ImportError:
            return None
        return "BLHNC" if _is_cuda() else None

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        """The same wish, as vLLM 0.26 asks for it."""
        return self._options.kv_layout == "auto" and _is_cuda()

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """A captured graph would not wait for its layers."""
        return Options.of(extra_config).load == "layers"

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is dropped is a later miss, no more."""
        return False

    @classmethod
    def build_kv_connector_stats(cls, data: Optional[dict[str, Any]] = None) -> OrbitKVStats:
        return OrbitKVStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: "VllmConfig", metric_types: dict, labelnames: list[str], per_engine_labelvalues: dict
    ) -> OrbitKVPromMetrics:
        return OrbitKVPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # Worker

    def register_kv_caches(self, kv_caches: dict[str, "torch.Tensor"]) -> None:
        layouts = []
        for group in self._cache.kv_cache_groups:
            layout = GroupLayout(self._cache.num_blocks)
            for name in group.layer_names:
                caches = kv_caches.get(name)
                if caches is not None:
                    for cache in caches if isinstance(caches, (list, tuple)) else (caches,):
                        layout.add(name, cache)
            layouts.append(layout)
        device = next(iter(kv_caches.values()), None)
        if isinstance(device, (list, tuple)):
            device = device[0]
        self._register(layouts, device.device.type if device is not None else "cpu")

    def register_cross_layers_kv_cache(self, kv_cache: "torch.Tensor", attn_backend: Any) -> None:
        """vLLM 0.26: one tensor of all layers, in physical order."""
        order = attn_backend.get_kv_cache_stride_order(include_num_layers_dimension=True)
        layout = GroupLayout(self._cache.num_blocks)
        layout.add("all layers", kv_cache, block_dim=order.index(1), layer_dim=order.index(0))
        layout.layers = [tensor.shared_by[0] for tensor in self._cache.kv_cache_tensors]
        self._register([layout], kv_cache.device.type)

    def _register(self, layouts: list[GroupLayout], device: str) -> None:
        if self._unsupported or not all(layout.pieces for layout in layouts):
            return
        fields = namespaces(
            self._config,
            self._cache,
            layouts,
            backend=self._backend(layouts),
            device=device,
            weights_version=self._options.weights_version,
            rank=_rank(self._config),
        )
        self._handshake = Handshake(fields)
        self._worker.register(layouts, fields, device == "cuda")

    def _backend(self, layouts: list[GroupLayout]) -> str:
        """Attention backends, which decide what a page's bytes mean."""
        context = self._config.compilation_config.static_forward_context
        names = set()
        for layout in layouts:
            for name in layout.layers:
                backend = getattr(context.get(name), "attn_backend", None)
                names.add(backend.get_name() if backend is not None else "unknown")
        return "+".join(sorted(names))

    def unregister_kv_caches(self, *_: Any, **__: Any) -> None:
        """vLLM 0.33: the memory goes away, for sleep."""
        self._worker.unregister()

    def get_handshake_metadata(self) -> Optional[Handshake]:
        return self._handshake

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._metadata = connector_metadata

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        self._metadata = NOTHING

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._worker.start_loads(self._metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._worker.wait_for_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Whole blocks are saved after the step."""

    def wait_for_save(self) -> None:
        self._worker.save_step(self._metadata)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[Optional[set[str]], Optional[set[str]]]:
        received, _ = self._worker.received()
        return None, received or None

    if _TransferResults is not None:

        def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
            received, failed = self._worker.received()
            if not received:
                return _NO_RESULTS
            return _TransferResults(finished_recving=received, failed_recving=failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.invalid_blocks()

    def build_connector_worker_meta(self) -> Optional[WorkerMetadata]:
        return self._worker.report(self._metadata)

    # Scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._scheduler.bind_pool(gpu_block_pool)

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        self.set_xfer_handshake_metadata_pp_aware({(0, rank): told for rank, told in metadata.items()})

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        expected = self._config.parallel_config.world_size
        told = [metadata[rank] for rank in sorted(metadata)]
        if len(told) != expected or not all(isinstance(one, Handshake) for one in told):
            logger.warning("orbitkv: serving without the cache: %d of %d workers said what they hold", len(told), expected)
            return
        hash_block_size = getattr(self._cache, "hash_block_size", None) or getattr(
            self._config.cache_config, "hash_block_size", None
        )
        self._scheduler.start([fields for one in told for fields in one.namespaces], hash_block_size)

    def on_new_request(self, request: "Request") -> None:
        self._scheduler.new_request(request)

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[Optional[int], bool]:
        tokens = self._scheduler.matched_tokens(request, num_computed_tokens)
        if not tokens:
            return tokens, False
        return tokens, self._options.is_async

    def update_state_after_alloc(self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        self._scheduler.allocated(request, blocks, num_external_tokens)

    def get_external_cache_hit_sources(self, request: "Request", num_external_tokens: int) -> dict:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        dram, ssd = self._scheduler.tiers(request)
        sources = {CacheHitSource.HOST: dram, CacheHitSource.DISK: ssd}
        return {source: tokens for source, tokens in sources.items() if tokens}

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> StepMetadata:
        return self._scheduler.build_step(scheduler_output)

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        self._scheduler.step_done(connector_output.kv_connector_worker_meta, connector_output.finished_recving or ())

    def request_finished(self, request: "Request", block_ids: list[int]) -> tuple[bool, Optional[dict[str, Any]]]:
        """Blocks that a save still reads are held by reference, so none is kept for the request."""
        self._scheduler.finished(request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, Optional[dict[str, Any]]]:
        return self.request_finished(request, [])

    def take_events(self) -> Iterable[Any]:
        return self._scheduler.events.take()

    def has_pending_push_work(self) -> bool:
        return self._scheduler.has_work

    def reset_cache(self) -> Optional[bool]:
        return self._scheduler.forget_all()

    # Both

    def get_kv_connector_stats(self) -> Optional[OrbitKVStats]:
        return self._counters.take()

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.unregister()
        if self._scheduler is not None:
            self._scheduler.close()


def _is_cuda() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cuda())


def _rank(config: "VllmConfig") -> dict[str, int]:
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    tp, pp = get_tp_group(), get_pp_group()
    return dict(tp_rank=tp.rank_in_group, tp_size=tp.world_size, pp_rank=pp.rank_in_group, pp_size=pp.world_size)
