"""The HiCache storage over a real Manager and a stand-in host pool."""

import threading
from types import SimpleNamespace

import pytest
from sglang_stand_ins import HostPool, Indices, keys_of, leases, storage_class, storage_config, until


def open_storage(socket, pool, **options):
    storage = storage_class()(storage_config(socket, **options), {})
    storage.register_mem_pool_host(pool)
    return storage


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
@pytest.mark.parametrize("shared", [True, False], ids=["memfd", "process"])
def test_pages_come_back_byte_for_byte(manager, layout, shared):
    pool = HostPool(layout, shared=shared)
    storage = open_storage(manager.socket, pool)
    keys = keys_of("all", 20)
    wanted = [pool.fill(page, f"page {page}") for page in range(20)]
    assert storage.batch_exists(keys) == 0
    assert storage.batch_set_v1(keys, Indices(range(20))) == [True] * 20
    assert storage.batch_exists(keys) == 20
    places = list(range(40, 60))
    assert storage.batch_get_v1(keys, Indices(places)) == [True] * 20
    assert [pool.page(at) for at in places] == wanted
    assert pool.page(0) == wanted[0] and pool.page(60) == bytes(len(wanted[0])), "a neighbour changed"
    until(lambda: leases(manager) == 0)
    # A part of what was found: the rest of the lease comes back too.
    assert storage.batch_exists(keys) == 20
    until(lambda: leases(manager) == 1)
    assert storage.batch_get_v1(keys[:7], Indices(range(30, 37))) == [True] * 7
    assert [pool.page(at) for at in range(30, 37)] == wanted[:7]
    until(lambda: leases(manager) == 0)
    storage.close()


def test_exists_counts_from_the_first_page_on(manager):
    pool = HostPool("page_first")
    storage = open_storage(manager.socket, pool)
    keys = keys_of("gap", 6)
    storage.batch_set_v1(keys[:2], Indices([1, 2]))
    storage.batch_set_v1(keys[3:], Indices([3, 4, 5]))
    assert storage.batch_exists(keys) == 2
    assert storage.batch_exists(keys[2:]) == 0
    assert storage.batch_exists(keys[3:]) == 3
    assert storage.exists(keys[5])
    storage.close()


def test_what_is_not_there_is_not_got(manager):
    pool = HostPool("layer_first")
    storage = open_storage(manager.socket, pool)
    keys = keys_of("half", 8)
    wanted = [pool.fill(page, f"half {page}") for page in range(4)]
    storage.batch_set_v1(keys[:4], Indices(range(4)))
    # Without a question before.
    assert storage.batch_get_v1(keys, Indices(range(10, 18))) == [True] * 4 + [False] * 4
    assert [pool.page(at) for at in range(10, 14)] == wanted
    assert pool.page(14) == bytes(len(wanted[0]))
    storage.close()


def test_a_page_whose_parent_is_gone_is_stored(manager):
    pool = HostPool("page_first")
    storage = open_storage(manager.socket, pool)
    keys = keys_of("chain", 6)
    behind = SimpleNamespace(prefix_keys=keys[:3])
    assert storage.batch_set_v1(keys[3:], Indices([1, 2, 3]), behind) == [True] * 3
    assert storage.batch_exists(keys[3:]) == 3
    storage.close()


def test_three_threads_at_once(manager):
    """Prefetch asks, another thread gets what was found, backup stores: each page is right."""
    pool = HostPool("page_first", pages=256)
    storage = open_storage(manager.socket, pool)
    rounds, wrong = 30, []

    def back_up():
        for number in range(rounds):
            for page in range(4):
                pool.fill(page, f"{number} {page}")
            if storage.batch_set_v1(keys_of(number, 4), Indices(range(4))) != [True] * 4:
                wrong.append(f"set {number}")
            saved[number].set()

    def ask():
        for number in range(rounds):
            saved[number].wait(20)
            if storage.batch_exists(keys_of(number, 4)) != 4:
                wrong.append(f"exists {number}")
            asked[number].set()

    def get():
        for number in range(rounds):
            asked[number].wait(20)
            places = range(8 + 4 * number, 12 + 4 * number)
            if storage.batch_get_v1(keys_of(number, 4), Indices(places)) != [True] * 4:
                wrong.append(f"get {number}")

    saved = [threading.Event() for _ in range(rounds)]
    asked = [threading.Event() for _ in range(rounds)]
    threads = [threading.Thread(target=work) for work in (back_up, ask, get)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not wrong
    got = [pool.page(8 + 4 * number + page) for number in range(rounds) for page in range(4)]
    assert got == [pool.fill(0, f"{number} {page}") for number in range(rounds) for page in range(4)]
    storage.close()


def test_absent_and_restarted_manager(manager):
    pool = HostPool("page_first")
    keys = keys_of("restart", 3)
    storage = open_storage(manager.socket, pool)
    pool.fill(0, "a")
    assert storage.batch_set_v1(keys, Indices([0, 1, 2])) == [True] * 3
    manager.kill()
    assert storage.batch_exists(keys) == 0
    assert storage.batch_get_v1(keys, Indices([4, 5, 6])) == [False] * 3
    assert storage.batch_set_v1(keys, Indices([0, 1, 2])) == [False] * 3
    manager.start()
    until(lambda: storage.batch_set_v1(keys, Indices([0, 1, 2])) == [True] * 3)
    assert storage.batch_exists(keys) == 3
    assert storage.batch_get_v1(keys, Indices([4, 5, 6])) == [True] * 3
    assert pool.page(4) == pool.page(0)
    storage.close()


def test_another_model_finds_nothing(manager):
    pool = HostPool("page_first")
    keys = keys_of("model", 3)
    storage = open_storage(manager.socket, pool)
    storage.batch_set_v1(keys, Indices([0, 1, 2]))
    for other in (
        open_storage(manager.socket, pool, model="other"),
        open_storage(manager.socket, pool, weights_version="2"),
        open_storage(manager.socket, HostPool("layer_first")),
        open_storage(manager.socket, HostPool("page_first", layers=4)),
    ):
        assert other.batch_exists(keys) == 0
        other.close()
    same = open_storage(manager.socket, HostPool("page_first"))
    assert same.batch_exists(keys) == 3
    same.clear()
    assert storage.batch_exists(keys) == 0
    same.close()
    storage.close()


def test_only_with_interface_v1():
    config = storage_config("nowhere")
    del config.extra_config["interface_v1"]
    with pytest.raises(ValueError, match="interface_v1"):
        storage_class()(config, {})


def test_uneven_pages_are_refused():
    pool = HostPool("page_first")
    plain = pool.get_page_buffer_meta

    def uneven(indices):
        addresses, sizes = plain(indices)
        return [address + 64 * (indices[0] > 100) for address in addresses], sizes

    pool.get_page_buffer_meta = uneven
    with pytest.raises(ValueError, match="not evenly spaced"):
        open_storage("nowhere", pool)


def test_a_shared_pool_goes_by_its_descriptor():
    """Not by the memory of this process, whatever else is mapped."""
    from orbitkv.sglang import host_pool

    pool = HostPool("layer_first")
    layout = host_pool.HostPool(pool)
    ((begin, end),) = layout.ranges()
    assert end - begin == len(pool.memory)
    assert layout.descriptors == [pool.fd]
    assert host_pool._shared(begin, end, layout.descriptors) == (pool.fd, -begin)
    assert host_pool._shared(begin, end, []) is None
    ours = HostPool("layer_first", shared=False)
    assert host_pool.HostPool(ours).descriptors == []
    ((begin, end),) = host_pool.HostPool(ours).ranges()
    assert host_pool._shared(begin, end, [pool.fd]) is None
