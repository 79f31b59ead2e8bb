"""OrbitKV as the storage of SGLang's HiCache, 0.5.20 and later, with `interface_v1`."""

from __future__ import annotations

import hashlib
import threading
from array import array
from types import SimpleNamespace
from typing import Any, List, Optional

import orbitkv
from orbitkv import PAGE_OUTCOMES, Client
from orbitkv.link import End
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

from orbitkv.fingerprint import fit
from orbitkv.sglang.host_pool import HeldPool, HostPool
from orbitkv.sglang.identity import join_hashes, model_identity
from orbitkv.sglang.lane import Lane
from orbitkv.sglang.leases import Kept, Leases
from orbitkv.sglang.options import Options

HASH = 32
_SAVED = {PAGE_OUTCOMES.index("stored"), PAGE_OUTCOMES.index("present")}


class OrbitKVStorage(HiCacheStorage):
    """Called from HiCache's threads of prefetch and backup; each has its own session with the Manager, all
    of them in one attachment group. Without a Manager nothing is found and nothing is stored."""

    def __init__(self, storage_config: Any, kwargs: Optional[dict] = None):
        extra = dict(storage_config.extra_config or {})
        if extra.get("interface_v1") != 1:
            raise ValueError('orbitkv: give "interface_v1": 1 in --hicache-storage-backend-extra-config')
        self._options = Options.of(extra.get("orbitkv"))
        self._config = storage_config
        self._engine_id = orbitkv.engine_id_random()
        self._leases = Leases()
        self._pool: Optional[HostPool] = None
        self._namespace: dict = {}
        self._local = threading.local()
        self._lanes: list[Lane] = []
        self._lock = threading.Lock()

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._pool = HostPool(mem_pool_host)
        self._namespace = self._identity()

    def batch_exists(self, keys: List[str], extra_info: Optional[Any] = None) -> int:
        """Pages from the first one on that can be had; they stay so for a while."""
        lane = self._lane()
        if not keys or not lane.is_ready():
            return 0
        hashes = _hashes(keys)
        end = self._query(lane, hashes)
        if end is None or end.lease is None:
            return 0
        self._keep(lane, Kept(hashes[: end.pages * HASH], end.lease, lane.epoch))
        return end.pages

    def batch_get_v1(self, keys: List[str], host_indices: Any, extra_info: Optional[Any] = None) -> List[bool]:
        """Brings pages into the host pool: one operation where `batch_exists` has found them."""
        lane = self._lane()
        if not keys or not lane.is_ready():
            return [False] * len(keys)
        hashes = _hashes(keys)
        kept, stale = self._leases.take(hashes, lane.epoch)
        if stale is not None:
            self._release(lane, stale)
        if kept is None:
            end = self._query(lane, hashes)
            if end is None or end.lease is None:
                return [False] * len(keys)
            kept = Kept(hashes[: end.pages * HASH], end.lease, lane.epoch)
        count = min(len(hashes), len(kept.hashes)) // HASH
        # A restore that names every page of a lease ends it.
        names_all = count * HASH == len(kept.hashes)
        held = lane.link.held
        if held is None:
            return [False] * len(keys)
        end, _ = lane.copy(
            "restore",
            kept.lease,
            0,
            held.region,
            hashes[: count * HASH],
            self._pages(host_indices)[:count],
            keep=not names_all,
        )
        if not names_all:
            self._release(lane, kept)
        if end.status == "ok":
            good = count
        else:
            good = (end.first_failed or 0) if end.status == "partial" else 0
        return [True] * good + [False] * (len(keys) - good)

    def batch_set_v1(self, keys: List[str], host_indices: Any, extra_info: Optional[Any] = None) -> List[bool]:
        """Stores pages of the host pool: one operation."""
        lane = self._lane()
        held = lane.link.held if lane.is_ready() else None
        if not keys or held is None or not self._options.save:
            return [False] * len(keys)
        hashes, pages = _hashes(keys), self._pages(host_indices)
        before = getattr(extra_info, "prefix_keys", None)
        end, results = lane.copy("save", held.region, hashes, pages, parent=_hashes(before[-1:]) if before else None)
        if before and end.code == "parent_absent" and not end.pages + end.pages_present and lane.link.held is held:
            # What comes before was dropped: they are of use to whoever has that elsewhere.
            end, results = lane.copy("save", held.region, hashes, pages)
        if end.status == "ok":
            return [True] * len(keys)
        outcomes = results[::4]
        return [at < len(outcomes) and outcomes[at] in _SAVED for at in range(len(keys))]

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def clear(self) -> None:
        """Makes the Manager forget the pages of this namespace, for everyone who shares it."""
        lane = self._lane()
        for kept in self._leases.clear():
            self._release(lane, kept)
        if lane.is_ready() and lane.link.held is not None:
            lane.ask("forget", lane.link.held.scope, late=_ignore)

    def close(self) -> None:
        """After HiCache's threads have ended."""
        with self._lock:
            lanes, self._lanes = self._lanes, []
        for lane in lanes:
            lane.close()

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        raise NotImplementedError(_ONLY_V1)

    def batch_get(self, keys: List[str], target_locations: Any = None, target_sizes: Any = None) -> Any:
        raise NotImplementedError(_ONLY_V1)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        raise NotImplementedError(_ONLY_V1)

    def batch_set(
        self, keys: List[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        raise NotImplementedError(_ONLY_V1)

    def _lane(self) -> Lane:
        """This thread's own."""
        lane = getattr(self._local, "lane", None)
        if lane is None:
            pool, namespace = self._pool, self._namespace
            if pool is None:
                raise RuntimeError("orbitkv: no host pool was registered")

            def register(client: Client) -> HeldPool:
                return HeldPool(client, pool, namespace)

            name = f"hicache {threading.current_thread().name}"
            lane = Lane(name, self._options.socket, self._engine_id, self._options.patience, register)
            self._local.lane = lane
            with self._lock:
                self._lanes.append(lane)
        return lane

    def _query(self, lane: Lane, hashes: bytes) -> Optional[End]:
        held = lane.link.held
        if held is None:
            return None

        def late(end: End) -> None:
            if end.lease is not None:
                lane.tell("release", end.lease)

        return lane.ask("query", held.scope, hashes, mode="candidate", late=late)

    def _keep(self, lane: Lane, kept: Kept) -> None:
        for other in self._leases.keep(kept):
            self._release(lane, other)

    def _release(self, lane: Lane, kept: Kept) -> None:
        if kept.epoch == lane.epoch:
            lane.tell("release", kept.lease)
            lane.link.flush()

    def _pages(self, host_indices: Any) -> array:
        tokens = self._pool.page_tokens
        return array("I", (index // tokens for index in host_indices[::tokens].tolist()))

    def _identity(self) -> dict:
        config, pool = self._config, self._pool
        # Of models with latent attention every tensor-parallel rank has the same bytes.
        rank, ranks = (0, 1) if config.is_mla_model else (config.tp_rank, config.tp_size)
        place = f"sglang hicache cp {config.attn_cp_rank}/{config.attn_cp_size}"
        if getattr(config, "dcp_size", 1) > 1:
            place += f" dcp {config.dcp_rank}/{config.dcp_size}"
        return dict(
            model=model_identity(_server_args(config), self._options.weights_version),
            dtype=str(self.mem_pool_host.dtype).replace("torch.", ""),
            page_tokens=pool.page_tokens,
            page_bytes=pool.page_bytes,
            layout=fit(f"{place} {pool.layout()}"),
            tp_rank=rank,
            tp_size=ranks,
            pp_rank=config.pp_rank,
            pp_size=config.pp_size,
        )


_ONLY_V1 = "orbitkv stores pages by interface_v1 only"


def _hashes(keys: List[str]) -> bytes:
    try:
        return join_hashes(keys)
    except ValueError:
        # Names that are no hashes of 64 digits, as other key schemes make them.
        return b"".join(hashlib.sha256(key.encode()).digest() for key in keys)


def _server_args(config: Any) -> Any:
    """Those of the engine; in their absence what the storage was told."""
    try:
        from sglang.srt.runtime_context import get_server_args

        return get_server_args()
    except Exception:  # noqa: BLE001 - whatever an engine without it, or without an engine, does
        return SimpleNamespace(model_path=config.model_name or "")


def _ignore(_: End) -> None:
    pass
