"""A link outlives the Manager: every operation ends once, and it attaches again by itself."""

import ctypes
import mmap
import os
import signal
import threading
import time
from collections import Counter

import orbitkv
import pytest
from orbitkv.link import Link
from rig import PAGE, PATIENCE, Manager, content, hashes, namespace, numbers



class Side:
    """An adapter of one region in memory of this process."""

    def __init__(self, socket, pages=64, **options):
        self.kv = mmap.mmap(-1, pages * PAGE)
        self.pages = pages
        self.said = []
        self.registered = 0
        self.lost = 0
        self.link = Link(
            "test",
            engine_id=orbitkv.engine_id_random(),
            socket=socket,
            register=self.register,
            on_lost=self.on_lost,
            say=self.said.append,
            **options,
        )

    def register(self, client):
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.kv))
        memory = client.register_process(address, len(self.kv))
        scope = client.define_namespace(namespace("link"))
        region = client.register_region(scope, self.pages, [(memory, 0, PAGE, PAGE, 0)])
        self.registered += 1
        return scope, region

    def on_lost(self):
        self.lost += 1

    def until(self, ready):
        end = time.monotonic() + PATIENCE
        while not ready():
            self.link.wait(0.01)
            assert time.monotonic() < end, f"not in {PATIENCE} s; said {self.said}"

    def do(self, kind, *arguments, **options):
        """Begins one operation and waits for its end."""
        ends = []
        self.link.begin(kind, *arguments, then=ends.append, **options)
        assert not ends, "told from inside begin"
        self.link.flush()
        self.until(lambda: ends)
        return ends[0]


@pytest.fixture
def side(manager):
    side = Side(manager.socket)
    assert side.link.start() and side.link.ready
    yield side
    side.link.close()


def test_a_round_trip(side):
    scope, region = side.link.held
    side.kv[: 2 * PAGE] = content(1) + content(2)
    assert side.do("save", region, hashes(1, 2), numbers(0, 1)).pages == 2
    lease = side.do("query", scope, hashes(1, 2)).lease
    assert side.do("restore", lease, 0, region, hashes(1, 2), numbers(5, 6)).status == "ok"
    assert side.kv[5 * PAGE : 7 * PAGE] == content(1) + content(2)
    assert side.link.outstanding == 0 and not side.said


def test_what_is_outstanding_when_the_manager_dies_ends_once_and_the_link_comes_back(manager, side):
    scope, region = side.link.held
    first_epoch = side.link.client.epoch
    os.kill(manager.pid, signal.SIGSTOP)
    ends = []
    for number in range(10):
        side.link.begin("save", region, hashes(100 + number, 1), numbers(number), then=lambda end, n=number: ends.append((n, end.status)))
    side.link.begin("query", scope, hashes(1, 2), then=lambda end: ends.append(("query", end.status)))
    side.link.flush()
    side.link.pump()
    assert not ends and side.link.outstanding == 11
    manager.kill()
    side.until(lambda: len(ends) == 11)
    assert Counter(status for _, status in ends) == {"gone": 11}
    assert len({name for name, _ in ends}) == 11
    assert side.link.client is None and not side.link.ready and side.lost == 1

    # While it is away an operation ends at the next pump.
    late = []
    side.link.begin("ping", then=late.append)
    assert not late
    side.link.pump()
    assert [end.status for end in late] == ["gone"]

    manager.start()
    side.until(lambda: side.link.ready)
    assert side.registered == 2 and side.link.sessions == 2
    assert side.link.client.epoch != first_epoch
    assert side.do("ping").status == "ok"
    assert side.do("save", region, hashes(1, 1), numbers(0)).status == "error", "an old region is refused"
    assert len(ends) == 11
    away = [text for text in side.said if "serving without" in text]
    back = [text for text in side.said if "cache is on" in text]
    assert len(away) == 1 and len(back) == 1, side.said


def test_without_a_manager_it_starts_at_once_and_attaches_when_one_is_there():
    manager = Manager()
    side = Side(manager.socket)
    assert not side.link.start()
    assert len(side.said) == 1 and "serving without" in side.said[0]
    manager.start()
    try:
        side.until(lambda: side.link.ready)
        assert len(side.said) == 2 and "the cache is on" in side.said[1]
        assert side.do("ping").status == "ok"
    finally:
        side.link.close()
        manager.stop()


def test_a_death_is_noticed_by_the_first_operation_after_it(manager, side):
    manager.kill()
    manager.start()
    time.sleep(0.3)
    end = side.do("ping")
    assert end.status == "gone"
    side.until(lambda: side.link.ready)
    assert side.do("ping").status == "ok"


def test_polling_alone_notices_a_death_and_asks_the_kernel_nothing(manager, side):
    class Counting:
        """The client, and how often the kernel was asked about the Manager."""

        def __init__(self, client):
            self.client, self.looks = client, 0

        def __getattr__(self, name):
            return getattr(self.client, name)

        def check_manager(self):
            self.looks += 1
            self.client.check_manager()

    client = side.link.client = Counting(side.link.client)
    os.kill(manager.pid, signal.SIGSTOP)
    ends = []
    side.link.begin("ping", then=ends.append)
    side.link.flush()
    end = time.monotonic() + 0.6
    while time.monotonic() < end:
        side.link.pump()
    assert not ends and client.looks == 0
    manager.kill()
    end = time.monotonic() + PATIENCE
    while not ends and time.monotonic() < end:
        side.link.pump()
    assert [end.status for end in ends] == ["gone"] and client.looks == 1


def test_a_session_that_ends_leaves_no_thread_and_no_descriptor(manager):
    def held():
        names = [thread.name for thread in threading.enumerate() if thread.name.startswith("orbitkv-")]
        for name in os.listdir("/proc/self/fd"):
            try:
                names.append(os.readlink(f"/proc/self/fd/{name}"))
            except FileNotFoundError:
                pass  # the one that listed them
        return Counter(name for name in names if name.startswith(("orbitkv-", "anon_inode:")))

    before = held()
    for dies in (False, True):
        side = Side(manager.socket)
        assert side.link.start()
        during = held() - before
        assert during["orbitkv-test-watch"] == 1 and during["anon_inode:[eventfd]"] == 1, during
        if dies:
            manager.kill()
            side.until(lambda: side.link.client is None)
        side.link.close()
        assert held() == before


def test_more_operations_than_credits_wait_their_turn(manager):
    side = Side(manager.socket, ring_capacity=64)
    assert side.link.start()
    try:
        ends = []
        for number in range(200):
            side.link.begin("ping", then=lambda end, n=number: ends.append((n, end.status)))
        side.link.flush()
        side.until(lambda: len(ends) == 200)
        assert [number for number, _ in ends] == list(range(200))
        assert {status for _, status in ends} == {"ok"}
    finally:
        side.link.close()


def test_what_is_refused_ends_as_an_error(side):
    _, region = side.link.held
    assert side.do("save", region, b"", numbers()).status == "error"
    assert side.do("save", region, hashes(1, 1), numbers(64)).status == "error"
    assert side.link.ready


def test_a_silent_manager_is_left_alone_until_it_answers(manager, side):
    os.kill(manager.pid, signal.SIGSTOP)
    ends = []
    side.link.begin("ping", then=ends.append)
    side.link.flush()
    side.link.complain("a ping is old")
    side.link.complain("a ping is old")
    assert not side.link.ready and len(side.said) == 1
    os.kill(manager.pid, signal.SIGCONT)
    side.until(lambda: ends)
    assert side.link.ready and len(side.said) == 2


def test_a_registration_that_is_refused_is_tried_again_and_told_once(manager):
    side = Side(manager.socket)
    right, tries = side.register, []

    def register(client):
        tries.append(client)
        if len(tries) < 3:
            client.define_namespace(namespace("link", page_bytes=1))
        return right(client)

    side.link._register = register
    assert not side.link.start()
    side.until(lambda: side.link.ready)
    assert len(tries) == 3
    assert len(side.said) == 2, side.said
    side.link.close()


def test_close_ends_everything_once(manager):
    side = Side(manager.socket)
    assert side.link.start()
    os.kill(manager.pid, signal.SIGSTOP)
    ends = []
    for _ in range(3):
        side.link.begin("ping", then=ends.append)
    side.link.flush()
    side.link.close()
    os.kill(manager.pid, signal.SIGCONT)
    assert [end.status for end in ends] == ["gone"] * 3
    side.link.pump()
    assert len(ends) == 3 and side.link.outstanding == 0
