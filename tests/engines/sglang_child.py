"""Scenarios inside one SGLang engine: `sglang_child.py SETUP FOLDER OUT`, in the engine's environment.

Each scenario runs once with pages in the Manager's DRAM and once with them on SSD only. "Identical" always
compares with tokens that the same engine computed without restoring anything."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import threading
import time
from pathlib import Path
from typing import Callable, Iterable

HERE = Path(__file__).resolve().parent
#: See `sglang_ops`. The engine's own processes find it here too.
os.environ["PYTHONPATH"] = os.pathsep.join((str(HERE / "sglang_ops"), str(HERE), os.environ.get("PYTHONPATH", "")))
sys.path.insert(0, str(HERE / "sglang_ops"))

import orbitkv  # noqa: E402
from fastapi import HTTPException  # noqa: E402
from manager import Manager  # noqa: E402
from model import make  # noqa: E402

PAGE = 16
PAGE_BYTES = 3 * 2 * 2 * 64 * PAGE * 4
OUTPUT_TOKENS = 40
#: Seconds after which the adapter counts a silent Manager as hung, here.
PATIENCE = 1.0
#: Seconds within which leases that nobody claims are given back.
LEASES_GONE = 20


def prompt_of(name: str, tokens: int) -> list[int]:
    """Token ids that no other name begins with."""
    random_ = random.Random(name)
    return [random_.randrange(2, 512) for _ in range(tokens)]


def restorable(tokens: int) -> int:
    """Tokens of a prompt that a full hit restores: whole pages, with a token left to compute."""
    return (tokens - 1) // PAGE * PAGE


class Engine:
    """One engine and its Manager. `setup` says how it is set up:

    plain      the linker as it is; the same: again
    tampered   with `sglang_tampering`
    small      prefills of 64 tokens, and too few pages for the requests that run
    window     a model with layers of sliding-window attention, with `sglang_window_linker`
    stranger   as "plain", with other weights under the same path
    """

    def __init__(self, manager: Manager, folder: Path, setup: str):
        import sglang

        self.manager = manager
        self.folder = folder
        self.setup = setup
        self.orders = folder / "orders"
        self.orders.mkdir(exist_ok=True)
        extra = {"socket": manager.socket, "lookup_timeout_us": 1_000_000, "patience": PATIENCE}
        linker, module = "OrbitKVLinker", "orbitkv.sglang.linker"
        if setup == "tampered":
            linker, module, extra["orders"] = "TamperingLinker", "sglang_tampering", str(self.orders)
        options = dict(max_total_tokens=16384)
        if setup == "small":
            options = dict(max_total_tokens=1024, chunked_prefill_size=64, max_running_requests=8)
        if setup == "window":
            linker, module, extra["orders"] = "WindowLinker", "sglang_window_linker", str(self.orders)
            from sglang_window import make as make_window

            model = make_window(folder / "model")
        else:
            model = make(folder / "model", seed=8 if setup == "stranger" else 7)
        self.engine = sglang.Engine(
            model_path=str(model),
            device="cpu",
            attention_backend="torch_native",
            sampling_backend="pytorch",
            grammar_backend="none",
            disable_cuda_graph=True,
            disable_overlap_schedule=True,
            skip_tokenizer_init=True,
            dtype="float32",
            page_size=PAGE,
            random_seed=0,
            log_level="warning",
            enable_unified_cache_external_linker=True,
            unified_cache_external_linker_backend="dynamic",
            unified_cache_external_linker_config={
                "linker": linker,
                "linker_module_path": module,
                "linker_extra_config": extra,
            },
            **options,
        )
        #: Prompt tokens of the last batch that came from the Manager, as the engine tells.
        self.restored = 0
        #: Requests that they are of.
        self.hits = 0

    def generate(self, prompts: list[list[int]], **more: object) -> list[list[int]]:
        """Greedy tokens of one batch."""
        parameters = {"temperature": 0, "max_new_tokens": OUTPUT_TOKENS, "ignore_eos": True}
        outputs = self.engine.generate(input_ids=prompts, sampling_params=parameters, **more)
        details = [output["meta_info"].get("cached_tokens_details") or {} for output in outputs]
        self.restored = sum(detail.get("host", 0) for detail in details)
        self.hits = sum(detail.get("host", 0) > 0 for detail in details)
        return [list(output["output_ids"]) for output in outputs]

    def generate_apart(self, prompts: list[list[int]]) -> list[list[int]]:
        """The same as requests of their own: an empty list for one that ended with an error, and what an
        aborted one had."""
        parameters = {"temperature": 0, "max_new_tokens": OUTPUT_TOKENS, "ignore_eos": True}

        async def one(prompt: list[int]) -> list[int]:
            try:
                output = await self.engine.async_generate(input_ids=prompt, sampling_params=parameters)
            except HTTPException:
                return []
            return list(output["output_ids"])

        async def all_of_them() -> list[list[int]]:
            return await asyncio.gather(*map(one, prompts))

        return self.engine.loop.run_until_complete(all_of_them())

    def forget_local(self) -> None:
        """Empties the engine's own cache; what it saved is saved when this returns."""
        end = time.monotonic() + 30
        while not self.engine.flush_cache().success:
            if time.monotonic() > end:
                raise RuntimeError("the engine did not come to rest")
            time.sleep(0.01)

    def bytes_of(self, tokens: int, requests: int) -> int:
        """Bytes that the restore of so many tokens takes."""
        if self.setup != "window":
            return tokens // PAGE * PAGE_BYTES
        # One page of the full layers each; of the others the pages that the window reaches only.
        from sglang_window import LAYERS, PAGE_BYTES_A_LAYER, WINDOW

        window = -(-WINDOW // PAGE)
        return (tokens // PAGE + window * requests) * PAGE_BYTES_A_LAYER * LAYERS // 2

    def abort_all(self) -> None:
        """From another thread: every request that is queued or runs."""
        self.engine.loop.call_soon_threadsafe(self.engine.tokenizer_manager.abort_request, "", True)

    def leases_left(self) -> int:
        """Leases of the engine that are not back in time."""
        end = time.monotonic() + LEASES_GONE
        while (left := len(self.manager.inspect("leases")["leases"])) and time.monotonic() < end:
            # The engine looks at its leases when it looks at anything.
            self.generate([prompt_of("short", 8)])
            time.sleep(0.1)
        return left


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

    def cold(self, prompts: list[list[int]], **more: object) -> list[list[int]]:
        """Computes and saves; leaves the pages in one tier only."""
        tokens = self.engine.generate(prompts, **more)
        if self.engine.restored:
            self.complain(f"the first run restored {self.engine.restored} tokens")
        self.leave()
        return tokens

    def leave(self) -> None:
        self.engine.forget_local()
        if self.tier == "ssd":
            self.engine.manager.evict()

    def again(self, prompts: list[list[int]], base: list[list[int]], expected: int, **more: object) -> dict:
        """The second run: its row. Bytes read from SSD must be those restored, where pages were there."""
        read = self.engine.manager.counter("orbitkv_ssd_read_bytes_total")
        tokens = self.engine.generate(prompts, **more)
        restored = self.engine.restored
        read = self.engine.manager.counter("orbitkv_ssd_read_bytes_total") - read
        wanted = self.engine.bytes_of(restored, self.engine.hits) if self.tier == "ssd" else 0
        if read != wanted:
            self.complain(f"{read} bytes read from SSD, {wanted} restored from there")
        return self.row(restored, expected, tokens == base)

    def row(self, restored: int, expected: int, identical: bool) -> dict:
        row = {"scenario": self.name, "restored_tokens": restored, "expected_tokens": expected, "identical": identical}
        if left := self.engine.leases_left():
            self.complain(f"{left} leases are left")
        if self.problem:
            row["problem"] = self.problem
        return row

    def complain(self, what: str) -> None:
        self.problem = f"{self.problem}; {what}".strip("; ")


def plain(name: str, *lengths: int) -> Callable[[Engine, str], dict]:
    """The same prompts twice, the engine's own cache emptied between."""

    def scenario(engine: Engine, tier: str) -> dict:
        it = Scenario(engine, name, tier)
        prompts = it.prompts(*lengths)
        base = it.cold(prompts)
        return it.again(prompts, base, sum(map(restorable, lengths)))

    return scenario


def local_and_restored(engine: Engine, tier: str) -> dict:
    """The engine has the first 96 tokens of each prompt itself; the Manager has the rest."""
    it = Scenario(engine, "local and restored", tier)
    prompts = it.prompts(200, 300)
    base = it.cold(prompts)
    engine.engine.generate(input_ids=[prompt[:97] for prompt in prompts], sampling_params={"max_new_tokens": 1})
    expected = sum(restorable(len(prompt)) - 96 for prompt in prompts)
    return it.again(prompts, base, expected)


def found_locally(engine: Engine, tier: str) -> dict:
    """The engine's own prefix cache gives the tokens of a computation, with nothing restored: it is fit to be
    compared with."""
    it = Scenario(engine, "engine's own cache", tier)
    prompts = it.prompts(200, 300, 100)
    base = engine.generate(prompts)
    engine.generate(it.prompts(64, 80))
    return it.again(prompts, base, 0)


def one_tail(engine: Engine, tier: str) -> dict:
    """A conversation: each turn finds what the one before it left, answers included."""
    it = Scenario(engine, "conversation", tier)
    questions = it.prompts(100, 60, 70)
    base, prompts, history = [], [], []
    for question in questions:
        history = history + question
        prompts.append(list(history))
        answer = engine.generate([history])[0]
        base.append(answer)
        engine.forget_local()
        history = history + answer
    it.leave()
    restored, expected, tokens = 0, 0, []
    for prompt, answer in zip(prompts, base):
        tokens += engine.generate([prompt])
        restored += engine.restored
        expected += restorable(len(prompt))
        engine.forget_local()
    return it.row(restored, expected, tokens == base)


def salted(engine: Engine, tier: str) -> dict:
    """SEC-07: the same tokens under another salt, or none, are nobody else's."""
    it = Scenario(engine, "salt", tier)
    prompts = it.prompts(200)
    base = it.cold(prompts, cache_salt="one")
    for foreign in ({"cache_salt": "two"}, {}):
        engine.generate(prompts, **foreign)
        if engine.restored:
            it.complain(f"{engine.restored} tokens restored under {foreign or 'no salt'}")
    it.leave()
    return it.again(prompts, base, restorable(200), cache_salt="one")


def empty(engine: Engine, tier: str) -> dict:
    """ENG-17: prompts of one token, and shorter than a page, reach no store."""
    it = Scenario(engine, "prompts below a page", tier)
    prompts = it.prompts(1, 2, 15)
    base = it.cold(prompts)
    return it.again(prompts, base, 0)


def aborted(engine: Engine, tier: str) -> dict:
    """Requests aborted at random moments, in the queue and while they load: every lease comes back, and
    what is asked next is right."""
    it = Scenario(engine, "aborts", tier)
    prompts = it.prompts(*[600] * 12)
    base = it.cold(prompts)
    cut = 0
    for attempt in range(6):
        timer = threading.Timer(random.Random(attempt).uniform(0.0, 0.1), engine.abort_all)
        timer.start()
        for answer, right in zip(engine.generate_apart(prompts), base):
            cut += answer != right
            # An aborted request may have some of its tokens already.
            if answer != right[: len(answer)]:
                it.complain("wrong tokens beside an abort")
        timer.join()
        engine.forget_local()
    if not cut:
        it.complain("no request was aborted")
    it.leave()
    return it.again(prompts, base, 12 * restorable(600))


def manager_killed(engine: Engine, tier: str) -> dict:
    """The engine computes while no Manager is there, and finds the next one by itself."""
    it = Scenario(engine, "Manager killed and restarted", tier)
    prompts = it.prompts(200, 300)
    base = it.cold(prompts)
    engine.manager.kill()
    if engine.generate(prompts) != base or engine.restored:
        it.complain(f"without a Manager: {engine.restored} tokens restored, or other tokens")
    engine.forget_local()
    engine.manager.start()
    attach(engine)
    engine.generate(prompts)
    it.leave()
    return it.again(prompts, base, restorable(200) + restorable(300))


def manager_killed_in_loads(engine: Engine, tier: str) -> dict:
    """The Manager is killed at random moments of restores and saves. A request whose load had begun ends with
    an error, as SGLang wants it; every other one has the right tokens, then and later."""
    it = Scenario(engine, "Manager killed in the middle", tier)
    prompts = it.prompts(*[600] * 8)
    base = it.cold(prompts)
    endings = []
    for attempt in range(8):
        timer = threading.Timer(random.Random(attempt).uniform(0.0, 0.06), engine.manager.kill)
        timer.start()
        for answer, right in zip(engine.generate_apart(prompts), base):
            endings.append("aborted" if not answer else "right" if answer == right else "WRONG")
        timer.join()
        engine.forget_local()
        engine.manager.start()
        attach(engine)
        if engine.generate(prompts) != base:
            it.complain(f"wrong tokens after kill {attempt}")
        it.leave()
    print("endings", {ending: endings.count(ending) for ending in set(endings)}, flush=True)
    if "WRONG" in endings:
        it.complain(f"{endings.count('WRONG')} of {len(endings)} requests have wrong tokens")
    return it.again(prompts, base, 8 * restorable(600))


def manager_hangs(engine: Engine, tier: str) -> dict:
    """A stopped Manager costs one lookup its timeout; the engine serves on, and is back when it is."""
    it = Scenario(engine, "Manager hangs", tier)
    prompts = it.prompts(200, 300)
    base = it.cold(prompts)
    engine.manager.pause()
    try:
        for _ in range(2):
            began = time.monotonic()
            if engine.generate(prompts) != base or engine.restored:
                it.complain(f"while it hung: {engine.restored} tokens restored, or other tokens")
        time.sleep(2 * PATIENCE)
        engine.generate(it.prompts(100))
        if time.monotonic() - began > 60:
            it.complain("the engine stood still")
    finally:
        engine.manager.resume()
    it.leave()
    return it.again(prompts, base, restorable(200) + restorable(300))


def corrupted(engine: Engine, tier: str) -> dict:
    """Proves that tokens depend on what is restored: each restored row is changed by one."""
    it = Scenario(engine, "corrupted KV", tier)
    prompts = it.prompts(200)
    base = it.cold(prompts)
    with Order(engine, "corrupt-kv"):
        # What was computed from it was saved under the right names of the tokens that follow: nobody
        # asks for these again.
        return it.again(prompts, base, restorable(200))


def corrupted_window(engine: Engine, tier: str) -> dict:
    """Proves that tokens depend on the restored pages of the windows alone."""
    it = Scenario(engine, "corrupted KV of the windows", tier)
    prompts = it.prompts(200)
    base = it.cold(prompts)
    with Order(engine, "corrupt-swa"):
        return it.again(prompts, base, restorable(200))


def load_fails(engine: Engine, tier: str) -> dict:
    """A load that fails ends its request with an error; nothing that it computed is found later."""
    it = Scenario(engine, "load fails", tier)
    prompts = it.prompts(200)
    base = it.cold(prompts)
    with Order(engine, "fail"):
        if engine.generate_apart(prompts) != [[]]:
            it.complain("the request of a failed load was not aborted")
    engine.forget_local()
    longer = [prompts[0] + base[0]]
    it.leave()
    row = it.again(prompts, base, restorable(200))
    # And the pages behind the restored ones are those of the first run.
    engine.forget_local()
    restored = engine.generate(longer)
    row["identical"] &= restored == computed(engine, longer)
    return row


def manager_killed_in_a_load(engine: Engine, tier: str) -> dict:
    """The Manager dies with restores outstanding: the request ends with an error, once, and the next one is
    computed; the next Manager is used."""
    it = Scenario(engine, "Manager killed in a load", tier)
    prompts = it.prompts(200)
    base = it.cold(prompts)
    (engine.orders / "kill").write_text(str(engine.manager._process.pid))
    if engine.generate_apart(prompts) != [[]]:
        it.complain("the request whose load was cut off was not aborted")
    engine.manager.kill()
    if engine.generate(prompts) != base or engine.restored:
        it.complain(f"without a Manager: {engine.restored} tokens restored, or other tokens")
    engine.forget_local()
    engine.manager.start()
    attach(engine)
    engine.generate(prompts)
    it.leave()
    return it.again(prompts, base, restorable(200))


def computed(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    """Tokens without any restored page: under a salt that nobody else uses."""
    engine.forget_local()
    tokens = engine.generate(prompts, cache_salt=f"computed {random.random()}")
    if engine.restored:
        raise RuntimeError("a new salt restored pages")
    return tokens


class Order:
    """What `sglang_tampering` is to do, for a while."""

    def __init__(self, engine: Engine, what: str):
        self._file = engine.orders / what

    def __enter__(self) -> None:
        self._file.touch()

    def __exit__(self, *_: object) -> None:
        self._file.unlink()


def absent(engine: Engine, tier: str) -> dict:
    """Started without a Manager: the engine serves, and uses the one that comes later by itself."""
    it = Scenario(engine, "Manager absent at start", tier)
    prompts = it.prompts(200, 300)
    base = engine.generate(prompts)
    if engine.restored:
        it.complain("restored tokens without a Manager")
    engine.forget_local()
    engine.manager.start()
    attach(engine)
    if it.cold(prompts) != base:
        it.complain("other tokens with a Manager than without")
    return it.again(prompts, base, restorable(200) + restorable(300))


def attach(engine: Engine) -> None:
    """Waits until the engine uses the Manager: it registers in the background."""
    engine.manager.wait_for_sessions(1)
    end = time.monotonic() + 30
    saved = engine.manager.counter("orbitkv_save_offered_pages_total")
    while engine.manager.counter("orbitkv_save_offered_pages_total") == saved:
        if time.monotonic() > end:
            raise RuntimeError("the engine saves nothing")
        engine.generate([prompt_of(f"attach {time.monotonic()}", 20)])
        time.sleep(0.1)


def kept(engine: Engine, tier: str) -> dict:
    """Leaves pages on SSD for the engines of the next setups."""
    it = Scenario(engine, "first of three engines", tier)
    base = it.cold(KEPT)
    (engine.folder / "tokens.json").write_text(json.dumps(base))
    return it.again(KEPT, base, sum(restorable(len(prompt)) for prompt in KEPT))


def stranger(engine: Engine, tier: str) -> dict:
    """ENG-03: other weights under the same path: nothing of the first engine is theirs."""
    it = Scenario(engine, "other weights, same path", tier)
    base = it.cold(KEPT)
    if base == json.loads((engine.folder / "tokens.json").read_text()):
        it.complain("other weights give the same tokens")
    return it.again(KEPT, base, sum(restorable(len(prompt)) for prompt in KEPT))


def found_again(engine: Engine, tier: str) -> dict:
    """ENG-05: a new engine and a new Manager find what the first ones left on SSD."""
    it = Scenario(engine, "found by a new engine", tier)
    base = json.loads((engine.folder / "tokens.json").read_text())
    return it.again(KEPT, base, sum(restorable(len(prompt)) for prompt in KEPT))


KEPT = [prompt_of("kept", 200), prompt_of("kept too", 150)]
EIGHT = tuple(range(100, 364, 37))
FIFTEEN = (200,) * 15
PAGE_EDGES = (16, 17, 31, 32, 33, 64, 65, 160, 161, 192, 193)

SCENARIOS: dict[str, list[Callable[[Engine, str], dict]]] = {
    "plain": [
        absent,
        plain("linker", 200),
        plain("15 requests", *FIFTEEN),
        plain("8 requests of 100 to 359 tokens", *EIGHT),
        plain("prompts at page edges", *PAGE_EDGES),
        local_and_restored,
        one_tail,
        salted,
        empty,
        aborted,
        manager_hangs,
        manager_killed,
        manager_killed_in_loads,
        kept,
    ],
    "tampered": [corrupted, load_fails, manager_killed_in_a_load],
    "small": [plain("chunked prefill of 64 tokens", 200), plain("more requests than pages", *[200] * 8)],
    "window": [
        found_locally,
        plain("sliding window", 200),
        plain("sliding window, 8 requests", *EIGHT),
        local_and_restored,
        corrupted,
        corrupted_window,
    ],
    "stranger": [stranger],
    "again": [found_again],
}


def tiers(scenario: Callable) -> Iterable[str]:
    if scenario is absent:
        return ("dram",)
    return ("ssd",) if scenario in (kept, stranger, found_again) else ("dram", "ssd")


def main() -> None:
    setup, folder, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    only = os.environ.get("ORBITKV_SCENARIO", "")
    manager = Manager(orbitkv.binary(), folder)
    if setup != "plain":
        manager.start()
    engine = None
    try:
        engine = Engine(manager, folder, setup)
        if setup == "plain" and only:
            manager.start()
            attach(engine)
        with out.open("a") as rows:
            for scenario in SCENARIOS[setup]:
                if only not in scenario.__qualname__:
                    continue
                for tier in tiers(scenario):
                    rows.write(json.dumps(scenario(engine, tier)) + "\n")
                    rows.flush()
    finally:
        if engine is not None:
            engine.engine.shutdown()
        manager.stop()


if __name__ == "__main__":
    main()
