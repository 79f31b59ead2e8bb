"""Pages on a GPU, with torch as the engine: `pytest tests/gpu` on a machine that has both.

Left out of `check`, which runs without a GPU.
"""

import sys
from pathlib import Path

import pytest
import torch

import orbitkv

sys.path.insert(0, str(Path(__file__).parents[1]))
from rig import PATIENCE, Manager, hashes, namespace, numbers

PAGE = 1 << 20
PAGES = 16
LAYERS = 4


@pytest.fixture
def manager():
    manager = Manager()
    manager.start("cuda", "256MiB")
    yield manager
    manager.stop()


def end(client, operation):
    ended = client.wait(PATIENCE)
    assert ended is not None and ended.operation == operation
    assert ended.status == "ok", ended
    return ended


def test_a_round_trip_by_layer_with_streams_that_wait(manager):
    """Two tensors of one allocation: pages of the second. The consumer's stream reads each layer
    behind its done word, with no wait of the CPU in between."""
    whole = torch.zeros((2, PAGES, PAGE), dtype=torch.uint8, device="cuda")
    kv = whole[1]
    address = kv.data_ptr()
    gpu = orbitkv.Gpu.of_address(address)
    assert gpu.uuid == orbitkv.Gpu.open(torch.cuda.current_device()).uuid
    client = orbitkv.Client(manager.socket, done_words=LAYERS, timeout=PATIENCE)
    scope = client.define_namespace(namespace("gpu", page_bytes=PAGE))
    memory, offset = client.register_cuda(gpu, address, kv.numel())
    assert memory.bytes >= offset + kv.numel() and offset >= kv.numel()
    part = PAGE // LAYERS
    segments = [(memory, offset + n * part, PAGE, part, n) for n in range(LAYERS)]
    region = client.register_region(scope, PAGES, segments)
    assert region.layers == LAYERS
    events = orbitkv.Events(client, gpu, 2)
    words = orbitkv.DoneWords(client, gpu)

    producer = torch.cuda.Stream()
    wanted = torch.randint(0, 256, (4, PAGE), dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    fence = events.take()
    with torch.cuda.stream(producer):
        torch.cuda._sleep(50_000_000)
        kv[:4].copy_(wanted)
    events.record(fence, producer.cuda_stream)
    end(client, client.save(region, hashes(1, 4), numbers(0, 1, 2, 3), fence=fence))
    events.give_back(fence)
    with pytest.raises(ValueError, match="not one that was taken"):
        events.give_back(fence)
    kv.fill_(0xEE)
    torch.cuda.synchronize()

    lease = end(client, client.query(scope, hashes(1, 4))).lease
    restore = client.restore(
        lease, 0, region, hashes(1, 4), numbers(8, 9, 10, 11), by_layer=True
    )
    client.submit()
    consumer = torch.cuda.Stream()
    seen = torch.empty((4, PAGE), dtype=torch.uint8, device="cuda")
    for layer in range(LAYERS):
        words.wait(consumer.cuda_stream, restore, layer)
        with torch.cuda.stream(consumer):
            columns = slice(layer * part, (layer + 1) * part)
            seen[:, columns].copy_(kv[8:12, columns])
    end(client, restore)
    consumer.synchronize()
    assert client.is_done(restore) is True
    assert torch.equal(seen, wanted)
    assert bool((kv[:8] == 0xEE).all()) and bool((kv[12:] == 0xEE).all())
    assert bool((whole[0] == 0).all()), "the other tensor of the allocation"
    with pytest.raises(orbitkv.CudaError) as none:
        words.wait(0, restore, LAYERS)
    assert none.value.reason == "no_such_word"
    words.close()
    client.close()
