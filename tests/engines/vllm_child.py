"""Scenarios inside one vLLM engine: `vllm_child.py SETUP FOLDER OUT`, in the engine's environment.

Each scenario runs once with pages in the Manager's DRAM and once with them on SSD only. "Identical" always
compares with tokens that the same engine computed without restoring anything."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable

import orbitkv
from manager import Manager
from vllm_inside import BLOCK, FINISHED_BY_ERROR, OUTPUT_TOKENS, PAGE_BYTES, Engine, prompt_of, restorable

class Scenario:
    """One row in the making: its prompts, what the first run computed, what the second restored."""

    def __init__(self, engine: Engine, name: str, tier: str):
        self.engine = engine
        self.name = f"{name}, {engine.setup}, {tier}"
        self.tier = tier
        self.problem = ""
        self._prompts = 0

    def prompts(self, *lengths: int) -> list[list[int]]:
        """Prompts with nothing in common, with each other or those before."""
        first, self._prompts = self._prompts, self._prompts + len(lengths)
        return [prompt_of(f"{self.name} {first + i}", length) for i, length in enumerate(lengths)]

    def cold(self, prompts: list[list[int]]) -> list[list[int]]:
        """Computes and saves; leaves the pages in one tier only."""
        before = self.restored()
        tokens = self.engine.generate(prompts)
        if self.restored(before):
            self.problem = f"the first run restored {self.restored(before)} tokens"
        self.leave()
        return tokens

    def leave(self) -> None:
        self.engine.forget_local()
        if self.tier == "ssd":
            self.engine.manager.evict()

    def restored(self, before: int = 0) -> int:
        return self.engine.restored_tokens() - before if self.engine.in_process else self.engine.cached

    def row(self, restored: int, expected: int, identical: bool) -> dict:
        row = {"scenario": self.name, "restored_tokens": restored, "expected_tokens": expected, "identical": identical}
        if self.problem:
            row["problem"] = self.problem
        return row

    def again(
        self, prompts: list[list[int]], base: list[list[int]], expected: int, one_by_one: bool = False
    ) -> dict:
        """The second run: its row. Bytes read from SSD must be those restored, where pages were there."""
        read = self.engine.manager.counter("orbitkv_ssd_read_bytes_total")
        before = self.restored() if self.engine.in_process else 0
        batches = [[prompt] for prompt in prompts] if one_by_one else [prompts]
        tokens = [tokens for batch in batches for tokens in self.engine.generate(batch)]
        restored = self.restored(before)
        self.engine.settle()
        read = self.engine.manager.counter("orbitkv_ssd_read_bytes_total") - read
        wanted = restored // BLOCK * PAGE_BYTES if self.tier == "ssd" else 0
        if read != wanted and restored == expected:
            self.problem = f"{read} bytes read from SSD, {wanted} restored from there"
        if restored != expected:
            self.problem = f"{self.problem} {self.evidence()}".strip()
        return self.row(restored, expected, tokens == base)

    def evidence(self) -> str:
        """What connector and Manager counted, for a row that is wrong."""
        counters = self.engine.manager.inspect()["counters"]
        told = {key: value for key, value in counters.items() if value and ("pages" in key or "spill" in key)}
        if self.engine.in_process:
            told |= {key: value for key, value in self.engine.side.counters.total.items() if value}
            told |= {key: value for key, value in self.engine.worker.counters.total.items() if value}
        return json.dumps(told)


def fails(engine: Engine) -> Any:
    """Every load fails: its lease ends between the query and the restore."""

    def make_new(old: Callable) -> Callable:
        def allocated(request: Any, blocks: Any, tokens: int) -> None:
            loads = len(engine.side._loads)
            old(request, blocks, tokens)
            link = engine.side.link
            for load in engine.side._loads[loads:]:
                over: list = []
                link.begin("release", orbitkv.Lease.from_bytes(load.lease), then=over.append)
                while not over:
                    link.wait(0.1)

        return allocated

    return engine.patched(engine.side, "allocated", make_new)


# Scenarios: each gives one row


def plain(name: str, *lengths: int) -> Callable[[Engine, str], dict]:
    def scenario(engine: Engine, tier: str) -> dict:
        it = Scenario(engine, name, tier)
        prompts = it.prompts(*lengths)
        base = it.cold(prompts)
        return it.again(prompts, base, sum(restorable(length) for length in lengths))

    return scenario


def corrupted(engine: Engine, tier: str) -> dict:
    """Proves that tokens depend on what is restored: each restored block is changed by one."""
    it = Scenario(engine, "corrupted KV", tier)
    prompts = it.prompts(200)
    base = it.cold(prompts)
    runner = engine.llm.llm_engine.model_executor.driver_worker.worker.model_runner

    def make_new(old: Callable) -> Callable:
        def restored(loading: Any, part: Any, fence: Any, end: Any) -> None:
            for cache in runner.kv_caches:
                for page in part.pages:
                    cache[page] += 1
            old(loading, part, fence, end)

        return restored

    with engine.patched(engine.worker, "_restored", make_new):
        row = it.again(prompts, base, 192)
    # What was computed from it was saved under the right names of the tokens that follow: nobody asks
    # for these again.
    return row


def asked_again(engine: Engine, tier: str) -> dict:
    it = Scenario(engine, "answer comes in a later step", tier)
    prompts = it.prompts(200)
    base = it.cold(prompts)
    answers: list = []

    def make_new(old: Callable) -> Callable:
        def matched(request: Any, computed: int) -> Any:
            answers.append(old(request, computed))
            return answers[-1]

        return matched

    with engine.patched(engine.side, "matched_tokens", make_new), engine.patched(engine.side, "_spin", lambda _: lambda _: None):
        row = it.again(prompts, base, 192)
    if None not in answers:
        row["problem"] = f"answers {answers}: none was postponed"
    return row


def load_fails_recompute(engine: Engine, tier: str) -> dict:
    it = Scenario(engine, "load fails, recompute", tier)
    prompts = it.prompts(200, 150)
    base = it.cold(prompts)
    with fails(engine):
        before = it.restored()
        steps = engine.side.counters.total["queries"]
        tokens = engine.generate(prompts)
    if engine.side.counters.total["queries"] - steps > len(prompts):
        it.problem = "a failed request was looked up again"
    it.problem = it.problem or engine.all_back()
    return it.row(it.restored(before), 0, tokens == base)


def failed_load_poisons_nothing(engine: Engine, tier: str) -> dict:
    """What a step computed from a failed load must not be in the store. The prompts go on behind the
    pages that are loaded, so that the failing step computes full blocks."""
    it = Scenario(engine, "nothing saved from a failed load", tier)
    long = it.prompts(330, 330)
    long[1][:200] = long[0][:200]
    base_long = engine.generate(long)
    it.engine.forget_local()
    if not engine.connector.reset_cache():
        it.problem = "the cache was not reset"
    head = [long[0][:200]]
    engine.generate(head)
    it.leave()
    with fails(engine):
        tokens = engine.generate(long)
    if tokens != base_long:
        it.problem = "the run whose load failed gave other tokens"
    it.leave()
    # The second request finds the common head in the engine's own cache.
    return it.again(long, base_long, 2 * restorable(330) - restorable(200), one_by_one=True)


def load_fails_fail(engine: Engine, tier: str) -> dict:
    it = Scenario(engine, "load fails, request fails", tier)
    prompts = it.prompts(200)
    base = it.cold(prompts)
    engine.scheduler.recompute_kv_load_failures = False
    try:
        with fails(engine):
            engine.generate(prompts)
            reasons = engine.reasons
    finally:
        engine.scheduler.recompute_kv_load_failures = True
    if reasons != [FINISHED_BY_ERROR]:
        it.problem = f"the request ended by {reasons}"
    # A query prepared the pages: they are in DRAM again.
    it.leave()
    return it.again(prompts, base, 192)


def abort_during_load(engine: Engine, tier: str) -> dict:
    it = Scenario(engine, "abort during a load", tier)
    prompts = it.prompts(200)
    base = it.cold(prompts)

    def make_new(old: Callable) -> Callable:
        def allocated(request: Any, blocks: Any, tokens: int) -> None:
            old(request, blocks, tokens)
            if tokens:
                engine.manager.pause()

        return allocated

    with engine.patched(engine.side, "allocated", make_new):
        engine.add("aborted", prompts[0])
        for _ in range(100_000):
            engine.step()
            if engine.worker._loading:
                break
        else:
            it.problem = "the load never began"
    for _ in range(5):
        engine.step()
    engine.llm.llm_engine.abort_request(["aborted"])
    for _ in range(5):
        engine.step()
    if engine.free_blocks() == engine.blocks:
        it.problem = it.problem or "blocks were free while the load ran"
    engine.manager.resume()
    it.problem = it.problem or engine.all_back()
    it.leave()
    return it.again(prompts, base, 192)


def load_is_silent(engine: Engine, tier: str) -> dict:
    """ENG-19: the Manager says nothing in the middle of a load, 30 s long for pages in DRAM, a twentieth of
    that for those on SSD. The request is computed in other blocks; those that the load may still write stay out
    of use until the Manager goes on."""
    it = Scenario(engine, "load is silent", tier)
    prompts = it.prompts(200)
    base = it.cold(prompts)
    other = it.prompts(150)

    def make_new(old: Callable) -> Callable:
        def allocated(request: Any, blocks: Any, tokens: int) -> None:
            old(request, blocks, tokens)
            if tokens:
                engine.manager.pause()

        return allocated

    before = it.restored()
    began = time.monotonic()
    patience = 30.0 if tier == "dram" else 1.5
    with engine.load_patience(patience), engine.patched(engine.side, "allocated", make_new):
        tokens = engine.generate(prompts)
    if time.monotonic() - began < patience:
        it.problem = "the load was given up before its time"
    during = engine.generate(other)
    if it.restored(before):
        it.problem = it.problem or f"{it.restored(before)} tokens restored from a silent Manager"
    if engine.side.link.ready:
        it.problem = it.problem or "a silent Manager is still asked"
    held = engine.blocks - engine.free_blocks()
    if held < restorable(200) // BLOCK:
        it.problem = it.problem or f"{held} blocks are held, the load may write {restorable(200) // BLOCK}"
    engine.manager.resume()
    await_attached(engine)
    it.problem = it.problem or engine.all_back()
    it.leave()
    row = it.again(prompts, base, restorable(200))
    row["identical"] = row["identical"] and tokens == base and during == engine.generate(other)
    return row


def below_a_page(engine: Engine, tier: str) -> dict:
    """ENG-17: prompts of one token, and shorter than a block, reach no store; the same prompt twice in one batch
    is stored once."""
    it = Scenario(engine, "prompts below a page, and one twice", tier)
    short = it.prompts(1, 2, BLOCK - 1, BLOCK)
    queries = engine.side.counters.total["queries"]
    base = it.cold(short)
    if engine.side.counters.total["queries"] != queries:
        it.problem = "a prompt without a full block was looked up"
    twice = it.prompts(200) * 2
    stored = engine.worker.counters.total["saved_pages"]
    base += it.cold(twice)
    stored = engine.worker.counters.total["saved_pages"] - stored
    if stored != (200 + OUTPUT_TOKENS - 1) // BLOCK:
        it.problem = it.problem or f"{stored:.0f} pages stored of one prompt that came twice"
    # The second one finds the first one's blocks in the engine's own cache.
    return it.again(short + twice, base, restorable(200), one_by_one=True)


def save_ends_late(engine: Engine, tier: str) -> dict:
    it = Scenario(engine, "save ends after its request", tier)
    prompts = it.prompts(200)

    def make_new(old: Callable) -> Callable:
        def save(save: Any) -> None:
            old(save)
            engine.worker.link.flush()
            engine.manager.pause()

        return save

    with engine.patched(engine.worker, "_save", make_new):
        base = engine.generate(prompts)
    if engine.free_blocks() == engine.blocks:
        it.problem = "blocks were free while the save ran"
    engine.manager.resume()
    it.problem = it.problem or engine.all_back()
    it.leave()
    return it.again(prompts, base, 192)


def chained_saves(engine: Engine, tier: str) -> dict:
    """The saves of a prompt's chunks are all under way at once: none is refused for want of a parent."""
    it = Scenario(engine, "saves one behind the other", tier)
    prompts = it.prompts(270)
    refused = engine.worker.counters.total["refused_pages"]

    def make_new(old: Callable) -> Callable:
        def save(save: Any) -> None:
            old(save)
            engine.worker.link.flush()
            engine.manager.pause()

        return save

    with engine.patched(engine.worker, "_save", make_new):
        base = engine.generate(prompts)
    engine.manager.resume()
    it.problem = engine.all_back()
    refused = engine.worker.counters.total["refused_pages"] - refused
    if refused:
        it.problem = it.problem or f"{refused:.0f} pages were refused"
    it.leave()
    return it.again(prompts, base, restorable(270))


def random_aborts(engine: Engine, tier: str) -> dict:
    """Requests that come, and are aborted at any moment: nothing is left, nothing is wrong."""
    it = Scenario(engine, "200 requests, aborted at random", tier)
    prompts = it.prompts(*range(40, 340, 30))
    base = it.cold(prompts)
    random_ = random.Random(it.name)
    alive: list[str] = []
    for i in range(200):
        name = f"random-{tier}-{i}"
        engine.add(name, random_.choice(prompts))
        alive.append(name)
        for _ in range(random_.randrange(4)):
            engine.step()
        if random_.random() < 0.7:
            engine.llm.llm_engine.abort_request([alive.pop(random_.randrange(len(alive)))])
        if random_.random() < 0.05:
            engine.llm.reset_prefix_cache()
    while engine.llm.llm_engine.has_unfinished_requests():
        engine.step()
    it.problem = engine.all_back()
    it.leave()
    return it.again(prompts, base, sum(restorable(len(prompt)) for prompt in prompts))


def local_and_restored(engine: Engine, tier: str) -> dict:
    """A prefix that the engine still has is not restored again."""
    it = Scenario(engine, "behind a local prefix", tier)
    prompts = it.prompts(200)
    base = it.cold(prompts)
    engine.generate([prompts[0][:70]])
    it.problem = engine.all_back()
    if tier == "ssd":
        engine.manager.evict()
    return it.again(prompts, base, 192 - 64)


def forgotten(engine: Engine, tier: str) -> dict:
    """After the cache is reset, as for new weights, nothing is restored; what is computed then is."""
    it = Scenario(engine, "cache reset", tier)
    prompts = it.prompts(200)
    base = it.cold(prompts)
    if not engine.scheduler.reset_connector_cache():
        it.problem = "the cache was not reset"
    before = it.restored()
    tokens = engine.generate(prompts)
    if it.restored(before):
        it.problem = f"{it.restored(before)} tokens restored after the reset"
    it.leave()
    row = it.again(prompts, base, 192)
    row["identical"] = row["identical"] and tokens == base
    return row


def manager_killed(engine: Engine, tier: str) -> dict:
    """SIGKILL in the middle of a batch, a new Manager, and the engine goes on with it by itself."""
    it = Scenario(engine, "Manager killed and restarted", tier)
    prompts = it.prompts(*range(100, 340, 30))
    base = it.cold(prompts)
    steps = 0

    def make_new(old: Callable) -> Callable:
        def allocated(request: Any, blocks: Any, tokens: int) -> None:
            nonlocal steps
            old(request, blocks, tokens)
            steps += 1
            if steps == 3:
                engine.manager.kill()

        return allocated

    with engine.patched(engine.side, "allocated", make_new):
        tokens = engine.generate(prompts)
    alone = it.prompts(90)
    during = engine.generate(alone)
    engine.manager.start()
    await_attached(engine)
    fresh = it.prompts(201, 120)
    fresh_base = engine.generate(fresh)
    it.problem = engine.all_back()
    it.leave()
    row = it.again(fresh, fresh_base, restorable(201) + restorable(120))
    row["identical"] = row["identical"] and tokens == base and during == engine.generate(alone)
    return row


def await_attached(engine: Engine, timeout: float = 30.0) -> None:
    """Until the Manager answers both sides."""
    end = time.monotonic() + timeout
    for link in (engine.side.link, engine.worker.link):
        answers: list = []
        while not any(answer.status == "ok" for answer in answers):
            link.begin("ping", then=answers.append)
            link.wait(0.05)
            time.sleep(0.01)
            if time.monotonic() > end:
                raise RuntimeError("not attached again")


def manager_hangs(engine: Engine, tier: str) -> dict:
    """Alive, and silent: requests are served without it, and with it again when it goes on."""
    it = Scenario(engine, "Manager hangs", tier)
    prompts = it.prompts(200)
    base = it.cold(prompts)
    engine.manager.pause()
    before = it.restored()
    tokens = engine.generate(prompts)
    if it.restored(before):
        it.problem = "restored from a Manager that hangs"
    engine.manager.resume()
    await_attached(engine)
    it.problem = it.problem or engine.all_back()
    it.leave()
    row = it.again(prompts, base, 192)
    row["identical"] = row["identical"] and tokens == base
    return row


def preempted(engine: Engine, tier: str) -> dict:
    it = Scenario(engine, "40 blocks, 8 requests", tier)
    prompts = it.prompts(*range(130, 290, 20))
    base = [tokens for prompt in prompts for tokens in engine.generate([prompt])]
    it.leave()
    preemptions = 0

    def make_new(old: Callable) -> Callable:
        def preempt(*arguments: Any, **options: Any) -> Any:
            nonlocal preemptions
            preemptions += 1
            return old(*arguments, **options)

        return preempt

    with engine.patched(engine.scheduler, "_preempt_request", make_new):
        first = engine.generate(prompts)
        it.leave()
        second = engine.generate(prompts)
    if not preemptions:
        it.problem = "nothing was preempted"
    it.problem = it.problem or engine.all_back()
    it.leave()
    row = it.again(prompts[:3], base[:3], sum(restorable(len(prompt)) for prompt in prompts[:3]))
    row["identical"] = row["identical"] and first == base and second == base
    return row


def owned_preparation(engine: Engine, tier: str) -> dict:
    """Requests are prepared and leased while they queue; each prepared page is accounted for."""
    it = Scenario(engine, "prepared while queued", tier)
    prompts = it.prompts(*EIGHT)
    base = it.cold(prompts)
    before = dict(engine.side.counters.total)
    with engine.options(prepare=True):
        row = it.again(prompts, base, sum(restorable(length) for length in EIGHT))
        it.leave()
        for i, prompt in enumerate(prompts[:3]):
            engine.add(f"prepared-{tier}-{i}", prompt)
        while not all(tracked.lookup.is_over for tracked in engine.side._tracked.values()):
            engine.side.link.wait(0.01)
        engine.llm.llm_engine.abort_request([f"prepared-{tier}-{i}" for i in range(3)])
        left = engine.all_back()
    counts = {
        name: int(engine.side.counters.total[f"prepared_{name}pages"] - before[f"prepared_{name}pages"])
        for name in ("", "restored_", "unused_")
    }
    pending = engine.side.prepared.pending
    unused = sum(restorable(length) for length in EIGHT[:3]) // BLOCK
    if counts[""] != counts["restored_"] + counts["unused_"] + pending or pending or counts["restored_"] * BLOCK != row["expected_tokens"]:
        left = left or f"prepared {counts}, {pending} pending"
    if counts["unused_"] != unused:
        left = left or f"{counts['unused_']} prepared pages unused, {unused} expected"
    if left:
        row["problem"] = left
    return row


def queued_warming(engine: Engine, tier: str) -> dict:
    it = Scenario(engine, "warmed while queued", tier)
    prompts = it.prompts(*EIGHT)
    base = it.cold(prompts)
    with engine.options(queued_warming=True):
        return it.again(prompts, base, sum(restorable(length) for length in EIGHT))


def stop_policy(stop: str, stop_ms: int) -> Callable[[Engine, str], dict]:
    """Takes what has come when it stops waiting; exactly that is restored."""

    def scenario(engine: Engine, tier: str) -> dict:
        it = Scenario(engine, f"stop policy {stop}", tier)
        prompts = it.prompts(200, 300)
        base = it.cold(prompts)
        hits = engine.side.counters.total
        before = hits["hit_pages_dram"] + hits["hit_pages_ssd"]
        restored = it.restored()
        with engine.options(stop=stop, stop_ms=stop_ms):
            tokens = engine.generate(prompts)
        expected = int(hits["hit_pages_dram"] + hits["hit_pages_ssd"] - before) * BLOCK
        if tier == "dram" and expected != restorable(200) + restorable(300):
            it.problem = f"{expected} tokens hit in DRAM"
        return it.row(it.restored(restored), expected, tokens == base)

    return scenario


def rank_without_pages(engine: Engine, tier: str) -> dict:
    """A page is a hit only where every rank has it: one rank's pages are forgotten, the other's are there."""
    it = Scenario(engine, "one of two ranks has no pages", tier)
    prompts = it.prompts(200)
    base = it.cold(prompts)
    link = engine.side.link
    members = link.held.members()
    if len(members) != 2:
        it.problem = f"{len(members)} namespaces of 2 ranks"
    ends: list = []
    link.begin("forget", members[1], then=ends.append)
    while not ends:
        link.wait(0.1)
    if ends[0].pages < restorable(200) // BLOCK:
        it.problem = it.problem or f"{ends[0].pages} pages of the second rank forgotten"
    row = it.again(prompts, base, 0)
    it.leave()
    # What was missing was saved again.
    complete = it.again(prompts, base, restorable(200))
    row["restored_tokens"] += complete["restored_tokens"]
    row["expected_tokens"] += complete["expected_tokens"]
    row["identical"] = row["identical"] and complete["identical"]
    return row


def kept(engine: Engine, tier: str) -> dict:
    """The first of three engines over one SSD file."""
    it = Scenario(engine, "first of three engines", tier)
    base = it.cold(KEPT)
    it.leave()
    (engine.folder / "tokens.json").write_text(json.dumps(base))
    return it.again(KEPT, base, sum(restorable(len(prompt)) for prompt in KEPT))


def stranger(engine: Engine, tier: str) -> dict:
    """Other weights under the same path: nothing of the first engine is theirs."""
    it = Scenario(engine, "other weights, same path", tier)
    base = it.cold(KEPT)
    if base == json.loads((engine.folder / "tokens.json").read_text()):
        it.problem = "other weights give the same tokens"
    return it.again(KEPT, base, sum(restorable(len(prompt)) for prompt in KEPT))


def found_again(engine: Engine, tier: str) -> dict:
    """A new engine and a new Manager find what the first ones left on SSD."""
    it = Scenario(engine, "found by a new engine", tier)
    it.leave()
    before = it.restored()
    tokens = engine.generate(KEPT)
    expected = sum(restorable(len(prompt)) for prompt in KEPT)
    base = json.loads((engine.folder / "tokens.json").read_text())
    return it.row(it.restored(before), expected, tokens == base)


def adapters(engine: Engine, tier: str) -> dict:
    """ENG-01: the same block hashes under the base model, two adapters, and one of them with new weights
    under its old name. Requests and adapters are stand-ins, the rest is real: nothing crosses over, and
    each finds its own."""
    from orbitkv.vllm.metadata import Chains, Save

    it = Scenario(engine, "adapters", tier)
    it.cold(it.prompts(200))
    folder = engine.folder / f"adapters-{tier}"
    hashes = [bytes([i, len(tier)]) * 16 for i in range(6)]

    def adapter(name: str, weights: bytes) -> SimpleNamespace:
        path = folder / name
        path.mkdir(parents=True, exist_ok=True)
        (path / "adapter_model.safetensors").write_bytes(weights)
        return SimpleNamespace(lora_name=name, lora_int_id=1, lora_path=str(path))

    def hit(lora: Any) -> int:
        name = f"adapters-{tier}-{random.random()}"
        request = SimpleNamespace(request_id=name, num_tokens=200, block_hashes=hashes, lora_request=lora)
        end = time.monotonic() + 10
        while (tokens := engine.side.matched_tokens(request, 0)) is None and time.monotonic() < end:
            time.sleep(0.001)
        engine.side.finished(name)
        return tokens or 0

    def save(lora: Any, number: int) -> None:
        chains = Chains(0, bytearray(b"".join(hashes)), array("I", range(1, 7)), array("I", [6]), bytearray(32))
        engine.worker._save(Save(number, engine.side._adapters.identity(lora), [chains]))
        engine.worker.link.drain(10)

    everyone = [None, adapter("a", b"one" * 1000), adapter("b", b"two" * 1000)]
    crossed, own = [], 0
    for number, lora in enumerate(everyone):
        crossed.append(hit(lora))
        save(lora, -1 - number)
        it.leave()
        own += hit(lora)
    adapter("a", b"new" * 1000)
    crossed.append(hit(everyone[1]))
    row = it.row(own, 3 * restorable(200), not any(crossed))
    if any(crossed):
        row["problem"] = f"foreign hits: {crossed}"
    return row


KEPT = [prompt_of("kept", 200), prompt_of("kept too", 150)]
EIGHT = tuple(range(100, 364, 37))
FIFTEEN = (200,) * 15
PAGE_EDGES = (1, 31, 32, 33, 64, 65, 160, 161, 192, 193)

SCENARIOS: dict[str, list[Callable[[Engine, str], dict]]] = {
    "whole": [
        plain("async load", 200),
        plain("15 requests", *FIFTEEN),
        plain("8 requests of 100 to 359 tokens", *EIGHT),
        plain("prompts at page edges", *PAGE_EDGES),
        corrupted,
        asked_again,
        local_and_restored,
        load_fails_recompute,
        failed_load_poisons_nothing,
        load_fails_fail,
        abort_during_load,
        load_is_silent,
        below_a_page,
        save_ends_late,
        random_aborts,
        forgotten,
        owned_preparation,
        queued_warming,
        stop_policy("wait_all", 0),
        stop_policy("deadline", 50),
        stop_policy("best_effort", 0),
        adapters,
        manager_hangs,
        manager_killed,
        kept,
    ],
    "small": [plain("chunked prefill of 64 tokens", 200), plain("chunked prefill, 3 requests", 200, 300, 170), chained_saves, preempted],
    "ordered": [
        plain("sync load", 200),
        plain("sync load, 8 requests", *EIGHT),
        corrupted,
        local_and_restored,
        load_fails_recompute,
        failed_load_poisons_nothing,
        load_fails_fail,
        manager_killed,
    ],
    "layers": [
        plain("layer by layer", 200),
        plain("layer by layer, 8 requests", *EIGHT),
        load_fails_recompute,
        failed_load_poisons_nothing,
        manager_killed,
    ],
    "stranger": [stranger],
    "again": [found_again],
    "ranks": [rank_without_pages],
    "processes": [plain("async load, three processes", 200), plain("15 requests, three processes", *FIFTEEN)],
}


def main() -> None:
    setup, folder, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    only = os.environ.get("ORBITKV_SCENARIO", "")
    manager = Manager(orbitkv.binary(), folder)
    manager.start()
    try:
        engine = Engine(manager, folder, setup)
        with out.open("a") as rows:
            for scenario in SCENARIOS[setup]:
                if only not in scenario.__name__:
                    continue
                for tier in ("ssd",) if scenario in (kept, stranger, found_again) else ("dram", "ssd"):
                    row = scenario(engine, tier)
                    rows.write(json.dumps(row) + "\n")
                    rows.flush()
        engine.llm.llm_engine.engine_core.shutdown()
    finally:
        manager.stop()


if __name__ == "__main__":
    main()
