"""A Manager that dies, a fork, a second thread, and what a poll costs."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import tracemalloc

import orbitkv
import pytest
from rig import PATIENCE, Engine, Manager, content, hashes, numbers


def test_each_operation_of_a_killed_manager_ends_once():
    """It is stopped, so that nothing it was asked can have ended, then killed."""
    manager = Manager().start()
    engine = Engine(manager.socket)
    engine.save(1, 4)
    lease = engine.query(1, 4).lease
    os.kill(manager.pid, signal.SIGSTOP)
    client = engine.client
    staged = [
        client.restore(lease, 0, engine.region, hashes(1, 4), numbers(8, 9, 10, 11)),
        client.save(engine.region, hashes(20, 2), numbers(0, 1)),
        client.query(engine.scope, hashes(1, 4)),
        client.ping(),
    ]
    assert client.submit() == 4
    assert client.poll() is None and not client.has_manager_exited()
    manager.kill()
    ended = [client.wait(PATIENCE) for _ in staged]
    assert sorted(one.operation for one in ended) == sorted(staged)
    assert {one.status for one in ended} == {"gone"}
    assert client.is_done(staged[0]) is None
    for call in (client.poll, client.submit, client.ping, lambda: client.wait(1.0)):
        with pytest.raises(orbitkv.Gone) as gone:
            call()
        assert (gone.value.reason, gone.value.copies_may_run) == ("died", False)
    assert client.has_manager_exited() and client.outstanding == 0
    with pytest.raises(orbitkv.RegisterError) as gone:
        client.define_set([])
    assert gone.value.reason == "died"

    manager.start()
    again = Engine(manager.socket, engine_id=client.engine_id)
    assert again.client.epoch != client.epoch
    stale = [
        lambda: again.client.save(engine.region, hashes(1, 1), numbers(0)),
        lambda: again.client.query(engine.scope, hashes(1, 1)),
        lambda: again.client.release(lease),
        lambda: again.client.cancel(staged[0]),
    ]
    for call in stale:
        with pytest.raises(orbitkv.SubmitError) as refused:
            call()
        assert refused.value.reason == "stale_handle"
    with pytest.raises(orbitkv.RegisterError) as refused:
        again.client.release_memory(engine.memory)
    assert refused.value.reason == "stale_handle"
    again.save(1, 2)
    again.poison()
    again.restore(again.query(1, 2).lease, 1, 2, at=5)
    assert again.page(6) == content(2)
    manager.stop()


def test_a_closed_client_is_refused(engine):
    engine.client.close()
    engine.client.close()
    calls = [
        engine.client.poll,
        engine.client.ping,
        engine.client.results,
        lambda: engine.client.wait(0.0),
        lambda: engine.client.define_set([]),
    ]
    for call in calls:
        with pytest.raises(orbitkv.UsageError) as closed:
            call()
        assert closed.value.reason == "closed"
    assert engine.client.session > 0


def test_a_with_block_closes(manager):
    with Engine(manager.socket).client as client:
        client.ping()
        assert client.wait(PATIENCE).kind == "ping"
    with pytest.raises(orbitkv.UsageError):
        client.poll()


def in_child(work):
    """Exit code of a forked child that ends with what `work` returns, 99 if it raises."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            code = work()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def refused_calls(engine):
    """How many calls were refused as those of another process."""
    client = engine.client
    calls = [
        client.poll,
        client.ping,
        client.submit,
        client.state,
        client.check_manager,
        lambda: client.wait(1.0),
        lambda: client.save(engine.region, hashes(1, 1), numbers(0)),
    ]
    count = 0
    for call in calls:
        try:
            call()
        except orbitkv.Gone as gone:
            count += gone.reason == "wrong_process" and gone.copies_may_run
    try:
        client.define_set([])
    except orbitkv.RegisterError as error:
        count += error.reason == "wrong_process"
    return count


def test_a_forked_child_is_refused_and_its_parent_is_not(engine):
    staged = engine.client.ping()
    assert in_child(lambda: refused_calls(engine)) == 8
    assert engine.end(staged).status == "ok"


def while_waiting(engine, work):
    """Runs `work` while another thread waits for a Manager that is stopped."""
    waited = []
    staged = engine.client.ping()
    engine.client.submit()
    waiter = threading.Thread(target=lambda: waited.append(engine.client.wait(PATIENCE)))
    waiter.start()
    try:
        while True:
            try:
                engine.client.poll()
            except orbitkv.UsageError:
                break
        return work()
    finally:
        os.kill(engine.manager_pid, signal.SIGCONT)
        waiter.join()
        assert [ended.operation for ended in waited] == [staged]


@pytest.fixture
def stopped(manager):
    engine = Engine(manager.socket)
    engine.manager_pid = manager.pid
    os.kill(manager.pid, signal.SIGSTOP)
    yield engine


def test_a_second_thread_is_refused_and_runs_meanwhile(stopped):
    """The interpreter is free while one waits: this thread runs as long as it likes."""

    def work():
        refused = 0
        for _ in range(100_000):
            try:
                stopped.client.poll()
            except orbitkv.UsageError as error:
                refused += error.reason == "entered_twice"
        with pytest.raises(orbitkv.UsageError):
            stopped.client.close()
        return refused

    assert while_waiting(stopped, work) == 100_000


def test_a_child_forked_while_another_thread_waits_is_refused(stopped):
    assert while_waiting(stopped, lambda: in_child(lambda: refused_calls_held(stopped))) == 2


def refused_calls_held(engine):
    count = 0
    for call in (engine.client.poll, engine.client.ping):
        try:
            call()
        except orbitkv.Gone as gone:
            count += gone.reason == "wrong_process"
    return count


def test_registering_lets_other_threads_run(stopped):
    """The Manager that must answer is continued by another thread, which counts first."""
    counted = []

    def count_then_continue():
        for number in range(100_000):
            if number % 1000 == 0:
                counted.append(number)
        os.kill(stopped.manager_pid, signal.SIGCONT)

    other = threading.Thread(target=count_then_continue)
    other.start()
    stopped.client.define_set([stopped.scope])
    other.join()
    assert len(counted) == 100


def test_a_signal_ends_a_wait(stopped):
    """The handler raises in the middle of a wait; afterwards the client goes on."""

    class Rang(Exception):
        pass

    def ring(_number, _frame):
        raise Rang

    before = signal.signal(signal.SIGALRM, ring)
    staged = stopped.client.ping()
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        with pytest.raises(Rang):
            stopped.client.wait(PATIENCE)
    finally:
        signal.signal(signal.SIGALRM, before)
        os.kill(stopped.manager_pid, signal.SIGCONT)
    assert stopped.end(staged).status == "ok"


QUIET = """
import ctypes, itertools, sys
sys.path.insert(0, sys.argv[1])
import orbitkv
from rig import Engine, forbid_system_calls, hashes, numbers

engine = Engine(sys.argv[2])
engine.save(1, 4)
done = engine.restore(engine.query(1, 4).lease, 1, 4, at=8).operation
poll, is_done, client = engine.client.poll, engine.client.is_done, engine.client
names, pages, leave = hashes(1, 4), numbers(0, 1, 2, 3), ctypes.CDLL(None)._exit
rounds = itertools.repeat(None, 100_000)
other = Engine(sys.argv[2])
saves = [other.client.save(other.region, names, pages) for _ in range(20)]
loud = client.check_manager if sys.argv[3] == "loud" else client.state
forbid_system_calls()
for _ in rounds:
    if poll() is not None or is_done(done) is not True:
        leave(3)
for at in range(20):
    saves[at] = other.client.save(other.region, names, pages)
loud()
leave(0)
"""


def quiet(socket, mode):
    folder = os.path.dirname(__file__)
    command = [sys.executable, "-c", QUIET, folder, socket, mode]
    return subprocess.run(command, timeout=60).returncode


def test_polling_and_staging_make_no_system_call(manager):
    """The kernel kills the process at its first one, but not before its end."""
    assert quiet(manager.socket, "quiet") == 0


def test_a_system_call_would_be_seen(manager):
    assert quiet(manager.socket, "loud") == -signal.SIGSYS


def test_an_empty_poll_makes_no_object(engine):
    poll = engine.client.poll
    engine.client.ping()
    tracemalloc.start()
    try:
        poll()
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()
        poll(), poll(), poll()
        after = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # The first reading itself is a tuple of two integers.
    own = sys.getsizeof(before) + sum(sys.getsizeof(number) for number in before) + 64
    assert after[1] - before[0] <= own
