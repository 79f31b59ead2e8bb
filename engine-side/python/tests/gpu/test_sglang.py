"""The linker's core with pages on a GPU, torch as the engine: `pytest tests/gpu`. Needs no SGLang."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from rig import PATIENCE, Manager
from sglang_stand_ins import keys_of

from orbitkv.sglang import pages
from orbitkv.sglang.component import Component
from orbitkv.sglang.fences import Fences
from orbitkv.sglang.identity import join_hashes
from orbitkv.sglang.loads import Part
from orbitkv.sglang.options import Options
from orbitkv.sglang.store import Store

TOKENS, PAGES, LAYERS, HEADS, DIM = 16, 256, 4, 8, 128
#: Cycles that a producer is late by: some 50 ms.
LATE = 100_000_000


@pytest.fixture
def manager():
    manager = Manager().start("cuda", "512MiB")
    yield manager
    manager.stop()


class Engine:
    """Buffers of K and V for some layers, a stream that computes and one that schedules."""

    def __init__(self, socket, wait):
        shape = (PAGES * TOKENS, HEADS, DIM)
        self.buffers = [torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2 * LAYERS)]
        component = Component("kv", PAGES, TOKENS)
        for at, buffer in enumerate(self.buffers):
            component.add(buffer, at // 2, TOKENS)
        self.forward = torch.cuda.Stream()
        torch.cuda.synchronize()
        self.store = Store(
            Options(socket=socket, wait=wait, lookup_timeout_us=1_000_000),
            [component],
            [dict(model="gpu", dtype="bf16", page_tokens=TOKENS, page_bytes=component.page_bytes, layout="x")],
            record=Fences(self._ready).record,
            stream=lambda: torch.cuda.current_stream().cuda_stream,
        )
        assert self.store.link.ready

    def _ready(self):
        events = [torch.cuda.Event(), torch.cuda.Event()]
        events[0].record()
        events[1].record(self.forward)
        return events

    def part(self, keys, numbers):
        rows = torch.tensor(numbers, device="cuda")[:, None] * TOKENS + torch.arange(TOKENS, device="cuda")
        return Part("kv", join_hashes(keys), pages.of_indices(rows.flatten(), TOKENS))

    def rows(self, numbers):
        return [buffer.view(PAGES, TOKENS, HEADS, DIM)[numbers].clone() for buffer in self.buffers]

    def ended(self, count):
        ends = []
        while len(ends) < count:
            ends += [self.store.offloads.pop() for _ in range(self.store.poll())]
        return ends


@pytest.mark.parametrize("wait", ["host", "stream"])
def test_a_late_writer_is_saved_and_a_late_reader_is_not_disturbed(manager, wait):
    engine = Engine(manager.socket, wait)
    keys = keys_of(wait, 8)
    source, target = list(range(8)), list(range(100, 108))
    wanted = [torch.randn(8, TOKENS, HEADS, DIM, device="cuda").to(torch.bfloat16) for _ in engine.buffers]
    torch.cuda.synchronize()
    with torch.cuda.stream(engine.forward):
        torch.cuda._sleep(LATE)
        for buffer, rows in zip(engine.buffers, wanted):
            buffer.view(PAGES, TOKENS, HEADS, DIM)[source] = rows
    engine.store.offloads.queue([engine.part(keys, source)])
    assert engine.ended(1) == [True]

    for buffer in engine.buffers:
        buffer.fill_(7)
    torch.cuda.synchronize()
    assert engine.store.lookups.ask("r", join_hashes(keys))[-1] == 8
    with torch.cuda.stream(engine.forward):
        torch.cuda._sleep(LATE)
        before = engine.rows(target)  # the last reader of the pages that the load overwrites
    assert engine.store.loads.queue("r", [engine.part(keys, target)])
    index = engine.store.loads.start()
    consumer, seen = torch.cuda.Stream(), []
    for layer in range(LAYERS):
        with torch.cuda.stream(consumer):
            engine.store.loads.wait_for_layer(index, layer)
            seen += [buffer.view(PAGES, TOKENS, HEADS, DIM)[target] for buffer in engine.buffers[2 * layer : 2 * layer + 2]]
    assert engine.store.loads.finish(index)
    torch.cuda.synchronize()
    assert all(bool((rows == 7).all()) for rows in before)
    assert all(torch.equal(got, rows) for got, rows in zip(seen, wanted))
    assert all(bool((rows == 7).all()) for rows in engine.rows(list(range(200, 256))))
    engine.store.close()


def test_more_offloads_than_events(manager):
    engine = Engine(manager.socket, "host")
    keys = keys_of("many", 200)
    for buffer in engine.buffers:
        buffer.normal_()
    engine.store.offloads._pages_max = PAGES
    with torch.cuda.stream(engine.forward):
        torch.cuda._sleep(LATE)
    for number, key in enumerate(keys):
        engine.store.offloads.queue([engine.part([key], [number])])
    assert engine.ended(200) == [True] * 200
    engine.store.link.drain(PATIENCE)
    for at, key in enumerate(keys):
        assert len(engine.store.lookups.ask(str(at), join_hashes([key]))) == 1
    engine.store.close()


def test_indices_that_are_no_whole_pages_are_refused(manager):
    engine = Engine(manager.socket, "host")
    rows = torch.arange(3, 3 + TOKENS, device="cuda")
    engine.store.offloads.queue([Part("kv", join_hashes(keys_of("bad", 1)), pages.of_indices(rows, TOKENS))])
    assert engine.ended(1) == [False]
    engine.store.close()
