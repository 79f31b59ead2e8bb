"""The linker's core over a real Manager, with stand-ins for SGLang's device pools."""

import os
import signal
import time
from array import array
from types import SimpleNamespace

import pytest
from orbitkv.sglang import lookups
from orbitkv.sglang.identity import join_hashes, model_identity
from orbitkv.sglang.loads import Part
from orbitkv.sglang.options import Options
from orbitkv.sglang.pages import Ready
from orbitkv.sglang.store import Store
from sglang_stand_ins import DevicePool, Tensor, keys_of, leases, until

PATIENCE = 20.0
SECOND = 1_000_000


class Engine:
    """Device pools and a store, driven as SGLang's tree does."""

    def __init__(self, socket, *pools, model="store", rank=(0, 1), can_refuse=True, **options):
        self.pools = {pool.component.name: pool for pool in pools}
        components = [pool.component for pool in pools]
        namespaces = [
            dict(
                model=f"test/{model}",
                dtype="f32",
                page_tokens=4,
                page_bytes=component.page_bytes,
                layout=component.digest(),
                group=group,
                tp_rank=rank[0],
                tp_size=rank[1],
                dependency=component.dependency,
                window=component.window,
            )
            for group, component in enumerate(components)
        ]
        options = {"lookup_timeout_us": SECOND, **options}
        self.store = Store(Options(socket=socket, **options), components, namespaces, can_refuse=can_refuse)

    def part(self, name, keys, pages):
        return Part(name, join_hashes(keys), Ready(array("I", pages)))

    def fill(self, keys, pages, name="kv"):
        for key, page in zip(keys, pages):
            self.pools[name].fill(page, f"{name} {key}")

    def holds(self, keys, pages, name="kv"):
        return all(self.pools[name].holds(page, f"{name} {key}") for key, page in zip(keys, pages))

    def offload(self, *parts):
        self.store.offloads.queue(list(parts))

    def ended(self):
        """The oldest end of an offload, once there is one."""
        until(lambda: self.store.poll() > 0)
        return self.store.offloads.pop()

    def save(self, keys, pages, name="kv"):
        self.fill(keys, pages, name)
        self.offload(self.part(name, keys, pages))
        return self.ended()

    def lookup(self, rid, keys):
        return list(self.store.lookups.ask(rid, join_hashes(keys)))

    def load(self, rid, *parts):
        """Queues, runs and ends one: whether every byte came; `None` where it was refused."""
        if not self.store.loads.queue(rid, list(parts)):
            return None
        index = self.store.loads.start()
        for layer in range(3):
            self.store.loads.wait_for_layer(index, layer)
        return self.store.loads.finish(index)


@pytest.fixture
def plain(manager):
    engine = Engine(manager.socket, DevicePool("kv", 64, range(3)))
    yield engine
    engine.store.close()


def test_offloaded_pages_are_found_and_loaded(manager, plain):
    keys = keys_of("one", 6)
    assert plain.lookup("r", keys) == []
    assert plain.save(keys[:4], range(1, 5))
    assert plain.lookup("r", keys) == [1, 2, 3, 4], "every prefix, not just the longest"
    assert plain.load("r", plain.part("kv", keys[:4], [20, 9, 31, 8])) is True
    assert plain.holds(keys[:4], [20, 9, 31, 8])
    until(lambda: leases(manager) == 0)


def test_a_shorter_load_than_the_hit_takes_its_part(manager, plain):
    """As when another rank has less."""
    keys = keys_of("short", 5)
    plain.save(keys, range(5))
    assert plain.lookup("r", keys)[-1] == 5
    assert plain.load("r", plain.part("kv", keys[:2], [40, 41])) is True
    assert plain.holds(keys[:2], [40, 41])
    until(lambda: leases(manager) == 0)


def test_nodes_are_found_across_their_borders(plain):
    """Two nodes of a tree, saved apart and in the wrong order, are one prefix."""
    keys = keys_of("nodes", 6)
    plain.save(keys[3:], range(3))
    assert plain.lookup("r", keys) == []
    plain.save(keys[:3], range(3, 6))
    assert plain.lookup("r", keys) == [1, 2, 3, 4, 5, 6]
    assert plain.lookup("tail", keys[2:]) == [1, 2, 3, 4]


def test_a_page_offered_again_is_not_copied_again(plain):
    keys = keys_of("again", 3)
    assert plain.save(keys, range(3))
    plain.store.reset()
    assert plain.save(keys, range(3))
    assert plain.store.counters["pages_saved"] == 3
    assert plain.store.counters["pages_present"] == 3


def test_ends_are_told_in_order(plain):
    """One of many pages, then one of a single page that is there already."""
    long, short = keys_of("long", 24), keys_of("known", 1)
    plain.save(short, [63])
    plain.fill(long, range(24))
    plain.offload(plain.part("kv", long, range(24)))
    plain.offload(plain.part("kv", short, [63]))
    plain.offload(plain.part("kv", keys_of("bad", 1), [2**32 - 1]))
    assert [plain.ended() for _ in range(3)] == [True, True, False]


def test_the_same_question_keeps_its_lease(manager, plain):
    keys = keys_of("same", 3)
    plain.save(keys, range(3))
    for _ in range(5):
        assert plain.lookup("r", keys) == [1, 2, 3]
    assert plain.store.counters["lookups"] == 1
    assert plain.lookup("r", keys[:2]) == [1, 2]
    assert plain.store.counters["lookups"] == 2
    until(lambda: leases(manager) == 1)


def test_leases_of_requests_that_vanish_come_back(manager, plain, monkeypatch):
    """An abort in the queue is not told to a linker."""
    monkeypatch.setattr(lookups, "HOLD", 0.2)
    keys = keys_of("vanish", 3)
    plain.save(keys, range(3))
    for number in range(12):
        plain.lookup(f"r{number}", keys)
    until(lambda: leases(manager) == 12)

    def all_back():
        plain.store.poll()
        plain.store.link.flush()
        return leases(manager) == 0

    until(all_back)
    assert plain.store.counters["leases_abandoned"] == 12


def test_reset_gives_back_leases_and_keeps_pages(manager, plain):
    keys = keys_of("reset", 4)
    plain.save(keys, range(4))
    plain.lookup("asked", keys)
    plain.lookup("queued", keys)
    assert plain.store.loads.queue("queued", [plain.part("kv", keys, range(8, 12))])
    plain.fill(keys_of("running", 9), range(20, 29))
    plain.offload(plain.part("kv", keys_of("running", 9), range(20, 29)))
    plain.store.reset()
    assert plain.store.poll() == 0 and plain.store.link.outstanding == 0
    until(lambda: leases(manager) == 0)
    assert plain.store.loads.start() == -1
    assert len(plain.lookup("after", keys)) == 4
    assert len(plain.lookup("after too", keys_of("running", 9))) == 9


def test_a_cancelled_load_writes_nothing(manager, plain):
    keys = keys_of("cancel", 2)
    plain.save(keys, range(2))
    plain.lookup("r", keys)
    assert plain.store.loads.queue("r", [plain.part("kv", keys, [30, 31])])
    assert plain.store.loads.cancel("r")
    assert not plain.store.loads.cancel("r")
    assert plain.store.loads.start() == -1
    plain.store.link.drain(PATIENCE)
    until(lambda: leases(manager) == 0)
    assert not any(plain.pools["kv"].buffers[0][1].memory[30 * 2048 : 32 * 2048])


def test_a_load_without_its_pages_is_refused_or_fails(manager):
    """A single rank computes instead; one among others must not part from them and fails instead."""
    for can_refuse, outcome in ((True, None), (False, False)):
        engine = Engine(manager.socket, DevicePool("kv", 16, range(3)), can_refuse=can_refuse)
        keys = keys_of("nowhere", 2)
        assert engine.load("r", engine.part("kv", keys, [1, 2])) is outcome
        assert engine.load("r", engine.part("kv", keys, [1, 2])) is outcome, "the request may come again"
        engine.store.close()


def hybrid(socket, **options):
    return Engine(
        socket,
        DevicePool("kv", 64, [0, 2]),
        DevicePool("swa", 32, [1], dependency="window", window=2),
        DevicePool("mamba", 8, [3], dependency="state"),
        **options,
    )


def test_a_hit_needs_every_component(manager):
    """Full pages all the way, the window behind, the state at the end: nothing else is restorable."""
    engine = hybrid(manager.socket)
    keys = keys_of("hybrid", 8)
    engine.save(keys, range(8))
    assert engine.lookup("r", keys) == []
    engine.save(keys[2:6], range(4), "swa")
    assert engine.lookup("r", keys) == []
    # A window reaches two pages back, so it is whole from page 4 on; states are at 3, 4 and 6.
    for page, at in ((0, 2), (1, 3), (2, 5)):
        engine.save([keys[at]], [page], "mamba")
    assert engine.lookup("r", keys) == [4, 6]
    loaded = engine.load(
        "r",
        engine.part("kv", keys[:6], range(40, 46)),
        engine.part("swa", keys[4:6], [20, 21]),
        engine.part("mamba", [keys[5]], [7]),
    )
    assert loaded is True
    assert engine.holds(keys[:6], range(40, 46))
    assert engine.holds(keys[4:6], [20, 21], "swa")
    assert engine.holds([keys[5]], [7], "mamba")
    until(lambda: leases(manager) == 0)
    engine.store.close()


def test_a_shorter_length_has_its_own_window(manager):
    """The lease of the longest has not the window and state of a shorter one: it is asked for again."""
    engine = hybrid(manager.socket)
    keys = keys_of("shorter", 6)
    engine.save(keys, range(6))
    engine.save(keys, range(6), "swa")
    for page, at in ((0, 3), (1, 5)):
        engine.save([keys[at]], [page], "mamba")
    assert engine.lookup("r", keys) == [4, 6]
    loaded = engine.load(
        "r",
        engine.part("kv", keys[:4], range(40, 44)),
        engine.part("swa", keys[2:4], [20, 21]),
        engine.part("mamba", [keys[3]], [7]),
    )
    assert loaded is True
    assert engine.holds(keys[2:4], [20, 21], "swa") and engine.holds([keys[3]], [7], "mamba")
    until(lambda: leases(manager) == 0)
    engine.store.close()


def test_an_offload_is_saved_when_all_its_parts_are(manager):
    engine = hybrid(manager.socket)
    keys = keys_of("parts", 3)
    engine.fill(keys, range(3))
    engine.fill(keys[1:], [1, 2], "swa")
    engine.offload(engine.part("kv", keys, range(3)), engine.part("swa", keys[1:], [1, 2]))
    assert engine.ended() is True
    engine.offload(engine.part("kv", keys, range(3)), engine.part("mamba", keys[2:], [2**32 - 1]))
    assert engine.ended() is False
    engine.store.close()


def test_without_a_manager_everything_ends_at_once(tmp_path):
    engine = Engine(str(tmp_path / "nobody"), DevicePool("kv", 16, range(3)))
    keys = keys_of("nobody", 2)
    assert engine.lookup("r", keys) == []
    assert engine.load("r", engine.part("kv", keys, [1, 2])) is None
    engine.offload(engine.part("kv", keys, [1, 2]))
    assert engine.store.poll() == 1 and engine.store.offloads.pop() is False
    engine.store.reset()
    engine.store.close()


def test_killed_in_the_middle(manager, plain):
    """Leases and operations of the old Manager end; the next one is used without a restart of ours."""
    keys = keys_of("killed", 8)
    plain.save(keys, range(8))
    assert plain.lookup("looked up", keys)[-1] == 8
    assert plain.lookup("queued", keys)[-1] == 8
    assert plain.store.loads.queue("queued", [plain.part("kv", keys, range(20, 28))])
    plain.fill(keys_of("running", 8), range(30, 38))
    plain.offload(plain.part("kv", keys_of("running", 8), range(30, 38)))
    manager.kill()
    index = plain.store.loads.start()
    plain.store.loads.wait_for_layer(index, 2)
    assert plain.store.loads.finish(index) is False
    plain.ended()
    assert plain.lookup("looked up", keys) == []
    assert plain.load("looked up", plain.part("kv", keys, range(20, 28))) is None
    manager.start()

    def attached():
        plain.store.poll()
        return plain.store.link.ready

    until(attached)
    assert plain.lookup("looked up", keys) == [], "a lease of the old Manager counts for nothing"
    assert plain.save(keys, range(8))
    assert plain.lookup("looked up", keys)[-1] == 8
    assert plain.load("looked up", plain.part("kv", keys, range(50, 58))) is True
    assert plain.holds(keys, range(50, 58))


def test_a_silent_manager_costs_one_lookup_its_timeout(manager):
    engine = Engine(manager.socket, DevicePool("kv", 16, range(3)), lookup_timeout_us=20_000, patience=0.2)
    keys = keys_of("silent", 2)
    engine.save(keys, range(2))
    os.kill(manager.pid, signal.SIGSTOP)
    try:
        assert engine.lookup("first", keys) == []
        for number in range(50):
            assert engine.lookup(f"r{number}", keys) == []
        assert engine.store.counters["lookups_late"] == 1, "the others waited for nothing"
        time.sleep(0.3)
        engine.store.poll()
        assert not engine.store.link.ready
        engine.offload(engine.part("kv", keys_of("more", 1), [3]))
        assert engine.ended() is False
    finally:
        os.kill(manager.pid, signal.SIGCONT)

    def answers():
        engine.store.poll()
        return engine.store.link.ready

    until(answers)
    assert engine.store.counters["lookups"] == 1
    assert engine.lookup("first", keys) == [1, 2]
    assert engine.store.counters["lookups"] == 1, "the late answer is the answer"
    engine.store.reset()
    until(lambda: leases(manager) == 0)
    engine.store.close()


def test_an_answer_after_a_reset_is_given_back(manager):
    engine = Engine(manager.socket, DevicePool("kv", 16, range(3)), lookup_timeout_us=20_000)
    keys = keys_of("void", 2)
    engine.save(keys, range(2))
    os.kill(manager.pid, signal.SIGSTOP)
    try:
        assert engine.lookup("r", keys) == []
        engine.store.lookups.clear()
    finally:
        os.kill(manager.pid, signal.SIGCONT)
    engine.store.reset()
    until(lambda: leases(manager) == 0)
    assert engine.store.counters["leases_abandoned"] == 0
    assert engine.lookup("r", keys) == [1, 2]
    assert engine.store.counters["lookups"] == 2, "what was given back is not answered with"
    engine.store.close()


def test_held_pages_are_bounded(manager):
    """While the Manager is silent, offloads hold no more than their part of the pool."""
    engine = Engine(manager.socket, DevicePool("kv", 16, range(3)), held_pages_max=0.25)
    os.kill(manager.pid, signal.SIGSTOP)
    try:
        for number in range(6):
            engine.offload(engine.part("kv", keys_of(f"held {number}", 2), [number, number + 1]))
        assert engine.store.counters["pages_refused"] == 8
        assert engine.store.poll() == 0, "what was refused at once comes after what was queued before it"
    finally:
        os.kill(manager.pid, signal.SIGCONT)
    assert [engine.ended() for _ in range(6)] == [True, True, False, False, False, False]
    engine.store.close()


def test_two_engines_share_pages_and_two_models_do_not(manager, plain):
    keys = keys_of("shared", 3)
    plain.save(keys, range(3))
    same = Engine(manager.socket, DevicePool("kv", 32, range(3)))
    assert same.lookup("r", keys) == [1, 2, 3]
    assert same.load("r", same.part("kv", keys, [7, 8, 9])) is True
    assert same.holds(keys, [7, 8, 9])
    other = Engine(manager.socket, DevicePool("kv", 32, range(3)), model="other")
    assert other.lookup("r", keys) == []
    same.store.close()
    other.store.close()


def test_ranks_have_pages_of_their_own(manager):
    """Under the same keys. What both can restore is a hit: the tree takes the least, each rank loads that."""
    keys = keys_of("ranks", 4)
    ranks = [Engine(manager.socket, DevicePool("kv", 32, range(3)), rank=(at, 2), can_refuse=False) for at in range(2)]
    for at, rank in enumerate(ranks):
        for number, key in enumerate(keys):
            rank.pools["kv"].fill(number, f"kv {key} of {at}")
        rank.offload(rank.part("kv", keys[: 4 - at], range(4 - at)))
        assert rank.ended()
    common = set.intersection(*(set(rank.lookup("r", keys)) for rank in ranks))
    assert max(common) == 3
    for at, rank in enumerate(ranks):
        assert rank.load("r", rank.part("kv", keys[:3], [10, 11, 12])) is True
        assert all(rank.pools["kv"].holds(10 + number, f"kv {keys[number]} of {at}") for number in range(3))
        rank.store.link.drain(PATIENCE)
    until(lambda: leases(manager) == 0)
    for rank in ranks:
        rank.store.close()


def test_hashes_are_checked():
    with pytest.raises(ValueError):
        join_hashes(["ab" * 31])
    with pytest.raises(ValueError):
        join_hashes(["a" * 63, "b" * 65])
    assert join_hashes(keys_of("x", 2)) == bytes.fromhex("".join(keys_of("x", 2)))


def test_buffers_that_are_no_runs_of_bytes_are_refused():
    pool = DevicePool("kv", 4, [0])
    crossed = Tensor(16, 2, 64)
    crossed.stride = lambda: (128, 1, 2)
    with pytest.raises(ValueError, match="no single run"):
        pool.component.add(crossed, 1, 4)
    apart = Tensor(16, 2, 64)
    apart.stride = lambda: (256, 64, 1)
    with pytest.raises(ValueError, match="bytes apart"):
        pool.component.add(apart, 1, 4)
    with pytest.raises(ValueError, match="rows for"):
        pool.component.add(Tensor(8, 2, 64), 1, 4)


def test_options_name_what_is_wrong():
    with pytest.raises(ValueError, match="did you mean 'socket'"):
        Options.of({"sokcet": "x"})
    with pytest.raises(ValueError, match="patience"):
        Options.of({"patience": "long"})
    with pytest.raises(ValueError, match="host, stream"):
        Options.of({"wait": "gpu"})
    assert Options.of(None) == Options()


def test_whose_pages_they_are(tmp_path):
    """Everything about model and adapters that page hashes do not tell gives another name."""
    model, adapter = tmp_path / "model", tmp_path / "adapter"
    for folder in (model, adapter):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "weights.safetensors").write_bytes(bytes(100_000))

    def name(version="", **more):
        adapters = [SimpleNamespace(lora_name="a", lora_path=str(adapter))]
        given = {"model_path": str(model), "revision": None, "quantization": None, "lora_paths": adapters, **more}
        return model_identity(SimpleNamespace(**given), version)

    first = name()
    assert name() == first
    others = [name("2"), name(revision="x"), name(quantization="fp8"), name(load_format="dummy"), name(lora_paths=None)]
    (adapter / "weights.safetensors").write_bytes(b"\1" + bytes(99_999))
    others.append(name())
    (model / "weights.safetensors").write_bytes(bytes(99_999) + b"\1")
    others.append(name())
    (model / "config.json").write_text('{"rope_theta": 1}')
    others.append(name())
    assert len({first, *others}) == 1 + len(others)
    assert len(model_identity(SimpleNamespace(model_path="x" * 5000), "").encode()) <= 512
