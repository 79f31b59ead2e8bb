"""Bytes that were saved come back, and nothing else changes."""

import array
import subprocess
import sys

import orbitkv
import pytest
from rig import PAGE, PATIENCE, POISON, Engine, content, hashes, namespace, numbers


@pytest.mark.parametrize("kind", ["memfd", "process"])
def test_a_round_trip_into_poisoned_pages(manager, kind):
    engine = Engine(manager.socket, kind=kind)
    saved = engine.save(1, 10)
    assert (saved.kind, saved.status, saved.code) == ("save", "ok", "none")
    assert (saved.pages, saved.pages_present, saved.bytes) == (10, 0, 10 * PAGE)
    assert 0 < saved.queued_ns <= saved.copied_ns <= saved.published_ns <= saved.observed_ns
    engine.poison()
    hit = engine.query(1, 12)
    assert (hit.kind, hit.status, hit.pages, hit.pages_dram) == ("query", "ok", 10, 10)
    assert hit.lease.pages == 10
    restored = engine.restore(hit.lease, 1, 10, at=20)
    assert (restored.status, restored.pages, restored.first_failed) == ("ok", 10, None)
    assert engine.client.is_done(restored.operation) is True
    for at in range(64):
        expected = content(at - 19) if 20 <= at < 30 else bytes([POISON]) * PAGE
        assert engine.page(at) == expected, at


def test_several_chains_and_their_parents(engine):
    """Chains at the root, behind a page that was saved before, and behind one that nobody has."""
    engine.save(1, 3)
    lengths = numbers(2, 2, 1)
    names = hashes(50, 2) + hashes(10, 2) + hashes(30, 1)
    parents = bytes(32) + hashes(2, 1) + hashes(99, 1)
    for at, number in enumerate([50, 51, 10, 11, 30]):
        engine.fill(number, 1, at)
    operation = engine.client.save_chains(
        engine.region, names, numbers(*range(5)), lengths, parents
    )
    saved = engine.end(operation)
    assert (saved.status, saved.pages, saved.pages_refused) == ("partial", 4, 1)
    last = engine.client.results()[-4:]
    assert orbitkv.PAGE_OUTCOMES[last[0]] == "refused"
    assert orbitkv.CODES[last[2]] == "parent_absent"
    branch = hashes(1, 2) + hashes(10, 2)
    hit = engine.end(engine.client.query(engine.scope, branch))
    assert hit.pages == 4
    tail = engine.end(engine.client.query(engine.scope, hashes(10, 2), parent=hashes(2, 1)))
    assert tail.pages == 2
    engine.poison()
    pages = numbers(9, 8, 7, 6)
    engine.end(engine.client.restore(hit.lease, 0, engine.region, branch, pages))
    assert [engine.page(at) for at in pages] == [content(n) for n in (1, 2, 10, 11)]


def test_a_set_is_a_hit_only_where_every_member_is(manager):
    ranks = [Engine(manager.socket, name=f"rank{n}", engine_id=b"0123456789abcdef") for n in (0, 1)]
    ranks[0].save(1, 5)
    ranks[1].save(1, 3)
    scheduler = orbitkv.Client(manager.socket, engine_id=b"0123456789abcdef")
    members = [scheduler.define_namespace(namespace(f"rank{n}")) for n in (0, 1)]
    both = scheduler.define_set(members)
    assert both.page_bytes == 2 * PAGE
    scheduler.query(both, hashes(1, 5))
    hit = scheduler.wait(PATIENCE)
    assert hit.pages == 3
    for rank in ranks:
        rank.poison()
        lease = orbitkv.Lease.from_bytes(hit.lease.to_bytes())
        assert rank.restore(lease, 1, 3, at=0).status == "ok"
        assert rank.page(2) == content(3)


def test_results_and_restorable_prefixes(manager):
    """A chain can end after each page of the hit, a window of two only where two are there."""
    engine = Engine(manager.socket)
    engine.save(1, 3)
    engine.query(1, 5)
    results = engine.client.results()
    outcomes = [orbitkv.PAGE_OUTCOMES[byte] for byte in results[::4]]
    assert outcomes == ["hit"] * 3 + ["miss"] * 2
    assert [orbitkv.TIERS[byte] for byte in results[1::4]] == ["dram"] * 3 + ["none"] * 2
    assert array.array("I", engine.client.restorable_prefixes()).tolist() == [1, 2, 3]
    windows = Engine(manager.socket, name="window", dependency="window")
    windows.save(1, 1)
    windows.save(3, 3)
    windows.query(1, 5)
    assert array.array("I", windows.client.restorable_prefixes()).tolist() == [1, 4, 5]
    windows.end(windows.client.ping())
    assert windows.client.results() is None
    assert windows.client.restorable_prefixes() == b""


@pytest.mark.parametrize("mode", ["demand", "speculative", "candidate"])
def test_every_mode_finds_what_is_there(engine, mode):
    engine.save(1, 4)
    hit = engine.query(1, 6, mode=mode, deadline=PATIENCE)
    assert (hit.pages, hit.lease.pages) == (4, 4)
    released = engine.end(engine.client.release(hit.lease))
    assert (released.kind, released.status) == ("release", "ok")
    again = engine.restore(hit.lease, 1, 4, at=0)
    assert (again.status, again.code) == ("error", "unknown_lease")


def test_a_lease_goes_to_another_process(engine, manager):
    engine.save(1, 4)
    lease = engine.query(1, 4).lease
    assert len(lease.to_bytes()) == 40
    assert orbitkv.Lease.from_bytes(lease.to_bytes()) == lease
    child = """
import sys, orbitkv
sys.path.insert(0, sys.argv[1])
from rig import Engine, content
worker = Engine(sys.argv[2], engine_id=bytes.fromhex(sys.argv[3]))
worker.poison()
ended = worker.restore(orbitkv.Lease.from_bytes(bytes.fromhex(sys.argv[4])), 1, 4, at=7)
assert ended.status == "ok", ended
assert [worker.page(7 + n) for n in range(4)] == [content(1 + n) for n in range(4)]
"""
    facts = [manager.socket, engine.client.engine_id.hex(), lease.to_bytes().hex()]
    folder = __file__.rsplit("/", 1)[0]
    subprocess.run([sys.executable, "-c", child, folder, *facts], check=True, timeout=60)
    stranger = Engine(manager.socket)
    with pytest.raises(orbitkv.SubmitError) as refused:
        stranger.client.release(lease)
    assert refused.value.reason == "stale_handle"


def test_hints_cancel_forget_unregister_and_drain(engine):
    engine.save(1, 4)
    client = engine.client
    assert engine.end(client.prepare(engine.scope, hashes(1, 4))).kind == "prepare"
    assert engine.end(client.forget(engine.scope)).pages == 4
    assert engine.query(1, 4).pages == 0
    assert engine.end(client.unregister(engine.region)).status == "ok"
    client.release_memory(engine.memory)
    with pytest.raises(orbitkv.RegisterError) as refused:
        client.release_memory(engine.memory)
    assert refused.value.reason == "refused" and refused.value.refusal == "bad_message"
    assert engine.end(client.drain(PATIENCE)).kind == "drain"


def test_buffers_of_every_kind(engine):
    names = hashes(1, 2)
    kinds = [names, bytearray(names), memoryview(names), array.array("Q", names)]
    for buffer in kinds:
        pages = memoryview(numbers(0, 1))
        saved = engine.end(engine.client.save(engine.region, buffer, pages))
        assert saved.pages + saved.pages_present == 2
    assert engine.query(1, 2).pages == 2
