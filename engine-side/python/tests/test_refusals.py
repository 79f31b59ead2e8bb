"""What cannot be done is said by name, and costs nothing."""

import array
import math
import os
import subprocess
import sys

import orbitkv
import pytest
from rig import Engine, Manager, hashes, numbers


@pytest.mark.parametrize(
    "names, pages, words",
    [
        (hashes(1, 2)[:-1], numbers(0, 1), "63 bytes"),
        (hashes(1, 2), numbers(0), "2 hashes and 1 pages"),
        (hashes(1, 2), array.array("Q", [0, 1]), "format"),
        (hashes(1, 2), array.array("i", [0, 1]), "format"),
        (hashes(1, 2), bytes(8), "format"),
    ],
)
def test_wrong_buffers(engine, names, pages, words):
    with pytest.raises(ValueError, match=words):
        engine.client.save(engine.region, names, pages)
    assert engine.client.outstanding == 0


def test_no_buffers(engine):
    with pytest.raises(TypeError):
        engine.client.save(engine.region, "not bytes", numbers(0))
    with pytest.raises(TypeError):
        engine.client.save(engine.region, hashes(1, 1), [0])


@pytest.mark.parametrize(
    "count, page, reason",
    [(1, 64, "bad_page"), (0, 0, "no_pages"), (16_385, 0, "too_many_pages")],
)
def test_what_the_ring_client_refuses(engine, count, page, reason):
    with pytest.raises(orbitkv.SubmitError) as refused:
        engine.client.save(engine.region, hashes(1, count), numbers(*[page] * count))
    assert refused.value.reason == reason and str(refused.value)
    assert engine.client.outstanding == 0


def test_eng_17_no_pages_too_many_and_one_twice(engine):
    """ENG-17: every operation on pages refuses none of them, and more than a request may name, before the
    Manager hears of it; the message has the limit. A page that comes twice in one save is stored once."""
    client, limit = engine.client, 16_384
    engine.save(1, 2)
    lease = engine.query(1, 2).lease
    operations = {
        "save": lambda n: client.save(engine.region, hashes(1, n), numbers(*[0] * n)),
        "query": lambda n: client.query(engine.scope, hashes(1, n)),
        "prepare": lambda n: client.prepare(engine.scope, hashes(1, n)),
        "restore": lambda n: client.restore(lease, 0, engine.region, hashes(1, n), numbers(*[0] * n)),
    }
    for name, operation in operations.items():
        for count, reason in ((0, "no_pages"), (limit + 1, "too_many_pages")):
            with pytest.raises(orbitkv.SubmitError) as refused:
                operation(count)
            assert refused.value.reason == reason, name
            assert str(limit) in str(refused.value).replace(",", "") or count == 0, refused.value
            assert client.outstanding == 0
    assert engine.restore(lease, 1, 2, at=20).status == "ok", "the lease is as it was"

    engine.fill(7, 1, at=3)
    twice = engine.end(client.save(engine.region, hashes(7, 1) * 2, numbers(3, 3)))
    assert (twice.status, twice.pages, twice.pages_present) == ("ok", 1, 1)


def test_lengths_and_parents_must_fit(engine):
    def save(lengths, parents):
        engine.client.save_chains(engine.region, hashes(1, 3), numbers(0, 1, 2), lengths, parents)

    with pytest.raises(ValueError, match="sum to 4"):
        save(numbers(2, 2), bytes(64))
    with pytest.raises(ValueError, match="sum to 2"):
        save(numbers(1, 1), bytes(64))
    with pytest.raises(ValueError, match="2 lengths and 1 parents"):
        save(numbers(1, 2), bytes(32))
    with pytest.raises(ValueError, match="parent has 2 hashes"):
        engine.client.query(engine.scope, hashes(1, 1), parent=hashes(1, 2))


def test_times_that_are_none(engine):
    for seconds in (-1.0, math.nan):
        with pytest.raises(ValueError, match="0 or more"):
            engine.client.wait(seconds)
        with pytest.raises(ValueError, match="0 or more"):
            engine.client.drain(seconds)
    assert engine.client.wait(math.inf) is None, "nothing is outstanding"


def test_numbers_of_others(engine, manager):
    """An operation is known to its own client, until its index is used again."""
    other = Engine(manager.socket)
    theirs = other.client.ping()
    for number in (theirs, 0, 2**64 - 1, 2**63):
        assert engine.client.is_done(number) is None
        with pytest.raises(orbitkv.SubmitError) as refused:
            engine.client.cancel(number)
        assert refused.value.reason == "stale_handle"
    with pytest.raises(OverflowError):
        engine.client.cancel(-1)
    other.end(theirs)
    engine.save(1, 1)
    lease = engine.query(1, 1).lease
    done = engine.restore(lease, 1, 1, at=3).operation
    assert engine.client.is_done(done) is True
    assert engine.client.is_layer_done(done, 0) is True
    assert engine.client.is_layer_done(done, 1) is None
    seen = {done}
    for _ in range(3):
        again = engine.end(engine.client.ping()).operation
        assert again not in seen
        seen.add(again)
    assert engine.client.is_done(done) is None
    with pytest.raises(orbitkv.UsageError):
        other.client.close()
        other.client.cancel(theirs)


def test_credits_run_out_and_come_back(manager):
    engine = Engine(manager.socket, ring_capacity=64)
    staged = []
    with pytest.raises(orbitkv.WouldBlock) as full:
        for _ in range(65):
            staged.append(engine.client.ping())
    assert full.value.reason == "would_block" and isinstance(full.value, orbitkv.SubmitError)
    assert engine.client.outstanding == len(staged) == 56
    for operation in staged:
        engine.end(operation)
    engine.end(engine.client.ping())


def test_no_manager():
    with pytest.raises(orbitkv.ConnectError) as absent:
        orbitkv.Client("/nowhere/orbitkv.sock")
    assert absent.value.reason == "no_socket" and "orbitkv serve" in str(absent.value)
    with pytest.raises(orbitkv.ConnectError) as bad:
        orbitkv.Client("/nowhere/orbitkv.sock", ring_capacity=63)
    assert bad.value.reason == "bad_geometry"
    with pytest.raises(ValueError, match="16 bytes"):
        orbitkv.Client("/nowhere/orbitkv.sock", engine_id=b"short")
    manager = Manager().start()
    manager.kill()
    with pytest.raises(orbitkv.ConnectError) as dead:
        orbitkv.Client(manager.socket)
    assert dead.value.reason == "not_listening"
    manager.start().stop()


def test_a_refused_registration_says_why(engine):
    with pytest.raises(orbitkv.RegisterError) as refused:
        engine.client.register_region(engine.scope, 65, [(engine.memory, 0, 4096, 4096, 0)])
    assert refused.value.reason == "refused"
    assert refused.value.refusal in ("layout_conflict", "bad_message")
    with pytest.raises(orbitkv.RegisterError) as closed:
        engine.client.register_memfd(10_000, 4096)
    assert closed.value.reason == "transport"
    for fields in ({"dependency": "window"}, {"window": 3}, {"dependency": "tree"}):
        with pytest.raises(ValueError, match="dependency"):
            orbitkv.Namespace(
                model="m", dtype="d", page_tokens=1, page_bytes=4096, layout="l", **fields
            )


def test_without_a_driver_only_the_gpu_is_missing():
    names = ("Gpu", "Events", "DoneWords")
    assert all(isinstance(getattr(orbitkv, name), type) for name in names)
    if os.path.exists("/proc/driver/nvidia"):
        assert len(orbitkv.Gpu.open(0).uuid) == 32
        return
    with pytest.raises(orbitkv.CudaError) as missing:
        orbitkv.Gpu.open(0)
    assert missing.value.reason == "no_driver" and "libcuda.so.1" in str(missing.value)
    with pytest.raises(orbitkv.CudaError):
        orbitkv.Gpu.of_address(1 << 40)


def test_the_import_needs_nothing():
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['numpy', 'torch', 'vllm', 'sglang']));"
        "import orbitkv; print(len(orbitkv.engine_id_random()), orbitkv.socket_default_path())"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.startswith("16 /")


def test_the_console_script_is_the_binary():
    script = os.path.join(os.path.dirname(sys.executable), "orbitkv")
    said = [
        subprocess.run([path, "--version"], check=True, capture_output=True, text=True).stdout
        for path in (script, orbitkv.binary())
    ]
    assert said[0] == said[1] == f"orbitkv {orbitkv.__version__}\n"
    wrong = subprocess.run([script, "no-such-verb"], capture_output=True)
    assert wrong.returncode == 2
