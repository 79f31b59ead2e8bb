"""One vLLM engine in the process that runs this, and its Manager: what scenarios and benchmarks drive."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import time
from pathlib import Path
from typing import Any, Callable, Iterator

from manager import Manager
from model import make

BLOCK = 32
PAGE_BYTES = 3 * 2 * 2 * 64 * BLOCK * 4
OUTPUT_TOKENS = 40
PATIENCE = 1.0
#: Time to live of a lease, as the tests' Manager is started.
LEASE_SECONDS = 30

FINISHED_BY_ERROR = "error"


def prompt_of(name: str, tokens: int) -> list[int]:
    """Token ids that no other name begins with."""
    random_ = random.Random(name)
    return [random_.randrange(2, 512) for _ in range(tokens)]


def restorable(tokens: int) -> int:
    """Tokens of a prompt that a full hit restores: whole blocks, with a token left to compute."""
    return (tokens - 1) // BLOCK * BLOCK


class Engine:
    """One LLM and its Manager. `setup` says how it is set up:

    whole      restores while the request is parked; the same: again
    small      the same, with 40 blocks and prefills of 64 tokens
    ordered    the step waits for the restore
    layers     each layer waits for its own bytes
    processes  scheduler and worker in processes of their own
    ranks      two workers in processes of their own, each with half of the heads
    stranger   as "whole", with other weights under the same path
    """

    def __init__(self, manager: Manager, folder: Path, setup: str) -> None:
        self.setup = setup
        self.folder = folder
        #: Prompt tokens of the last batch that were not computed, as the engine tells.
        self.cached = 0
        #: Whether the worker is in this process, and whether the scheduler is.
        self.in_process = setup not in ("processes", "ranks")
        self.schedules_here = setup != "processes"
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if self.schedules_here else "1"

        if setup == "ranks":
            # Without these, each worker wants a NUMA node of its own, and every core.
            os.environ.update(VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS="1")

        from vllm import LLM, SamplingParams
        from vllm.config import KVTransferConfig

        self.manager = manager
        small = dict(num_gpu_blocks_override=40, max_num_batched_tokens=64) if setup == "small" else {}
        extra = {"socket": manager.socket, "query_patience": PATIENCE}
        if setup in ("ordered", "layers"):
            extra["load"] = setup
        transfer = KVTransferConfig(
            kv_connector="OrbitKVConnector",
            kv_connector_module_path="orbitkv.vllm",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=extra,
        )
        self.llm = LLM(
            model=str(make(folder / "model", seed=8 if setup == "stranger" else 7)),
            skip_tokenizer_init=True,
            dtype="float32",
            seed=0,
            max_model_len=1024,
            max_num_seqs=8,
            enforce_eager=True,
            block_size=BLOCK,
            enable_prefix_caching=True,
            kv_transfer_config=transfer,
            disable_log_stats=True,
            tensor_parallel_size=2 if setup == "ranks" else 1,
            **small,
        )
        self.parameters = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, detokenize=False)
        if self.schedules_here:
            self.core = self.llm.llm_engine.engine_core.engine_core
            self.scheduler = self.core.scheduler
            self.connector = self.scheduler.connector
            self.side = self.connector._scheduler
            self.blocks = self.free_blocks()
            if not self.side.link.ready:
                raise RuntimeError("the engine started without the cache")
        if self.in_process:
            from vllm.distributed.kv_transfer import get_kv_transfer_group

            self.worker = get_kv_transfer_group()._worker
            if not self.worker.link.ready:
                raise RuntimeError("the engine started without the cache")

    # Work

    def generate(self, prompts: list[list[int]]) -> list[list[int]]:
        """Greedy tokens; an empty list for a request that ended with an error."""
        outputs = self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], self.parameters, use_tqdm=False)
        self.cached = sum(output.num_cached_tokens or 0 for output in outputs)
        self.reasons = [output.outputs[0].finish_reason for output in outputs]
        return [
            [] if output.outputs[0].finish_reason == FINISHED_BY_ERROR else list(output.outputs[0].token_ids)
            for output in outputs
        ]

    def add(self, name: str, prompt: list[int]) -> None:
        self.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, self.parameters)

    def step(self) -> list[Any]:
        return self.llm.llm_engine.step()

    def settle(self, timeout: float = 30.0) -> None:
        """Steps until neither requests nor saves are left."""
        if not self.schedules_here:
            return
        end = time.monotonic() + timeout
        while self.scheduler.has_requests():
            self.step()
            if time.monotonic() > end:
                raise RuntimeError("the engine did not come to rest")

    def forget_local(self) -> None:
        """Empties the engine's own prefix cache."""
        self.settle()
        end = time.monotonic() + 30
        # In other processes saves end when they end.
        while not self.llm.reset_prefix_cache():
            if time.monotonic() > end:
                raise RuntimeError("blocks are still in use")
            time.sleep(0.01)

    def free_blocks(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def restored_tokens(self) -> int:
        """Since the start, as the worker counted them."""
        return int(self.worker.counters.total["restored_pages"]) * BLOCK

    @contextlib.contextmanager
    def patched(self, target: Any, name: str, make_new: Callable[[Callable], Callable]) -> Iterator[None]:
        """One method of one object, replaced for a while."""
        old = getattr(target, name)
        setattr(target, name, make_new(old))
        try:
            yield
        finally:
            setattr(target, name, old)

    @contextlib.contextmanager
    def options(self, **changes: Any) -> Iterator[None]:
        """Other options of the scheduler's side for a while."""
        old = self.side._options
        self.side._options = dataclasses.replace(old, **changes)
        try:
            yield
        finally:
            self.side._options = old

    @contextlib.contextmanager
    def load_patience(self, seconds: float) -> Iterator[None]:
        """Other patience of the worker with its loads for a while."""
        old = self.worker._options
        self.worker._options = dataclasses.replace(old, load_patience=seconds)
        try:
            yield
        finally:
            self.worker._options = old

    def all_back(self) -> str:
        """What is wrong about blocks and leases at rest; empty if nothing is."""
        self.settle()
        if self.free_blocks() != self.blocks:
            return f"{self.blocks - self.free_blocks()} blocks are not back"
        # Long before they would expire.
        end = time.monotonic() + LEASE_SECONDS / 3
        while leases := self.manager.inspect("leases")["leases"]:
            if time.monotonic() > end:
                return f"{len(leases)} leases are left"
            time.sleep(0.05)
        return ""
