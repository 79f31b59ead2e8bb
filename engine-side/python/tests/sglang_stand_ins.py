"""Stand-ins for what SGLang brings: tensors, device pools, host pools and the base class of a storage."""

import ctypes
import hashlib
import json
import math
import mmap
import os
import subprocess
import sys
import time
import types
from types import SimpleNamespace

import orbitkv
from orbitkv.sglang.component import Component

TOKENS = 4
HEADS, DIM, ITEM = 2, 64, 4
ROW = HEADS * DIM * ITEM


def leases(manager):
    """Leases, 16 at most, that the Manager showed last."""
    command = [orbitkv.binary(), "inspect", "leases", "--socket", manager.socket, "--json"]
    return len(json.loads(subprocess.run(command, check=True, capture_output=True).stdout)["leases"])


def until(true, seconds=20):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.005)


def keys_of(name, count):
    """A chain of page hashes, as SGLang writes them."""
    return [hashlib.sha256(f"{name} {at}".encode()).hexdigest() for at in range(count)]


class Tensor:
    """A dense tensor of 4-byte elements in memory of its own, zeroed."""

    dtype = "torch.float32"

    def __init__(self, *shape):
        self.shape = shape
        self.bytes = math.prod(shape) * ITEM
        self.memory = mmap.mmap(-1, self.bytes)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    def data_ptr(self):
        return self._address

    def nbytes(self):
        return self.bytes

    def untyped_storage(self):
        return self

    def element_size(self):
        return ITEM

    def stride(self):
        return tuple(math.prod(self.shape[at + 1 :]) for at in range(len(self.shape)))


class DevicePool:
    """Buffers of K and V for some layers, a row a token, as one component."""

    def __init__(self, name, pages, layers, **dependency):
        self.buffers = [(layer, Tensor(pages * TOKENS, HEADS, DIM)) for layer in layers for _ in "kv"]
        self.component = Component(name, pages, TOKENS, **dependency)
        for layer, buffer in self.buffers:
            self.component.add(buffer, layer, TOKENS)

    def fill(self, page, seed):
        for at, (_, buffer) in enumerate(self.buffers):
            begin = page * TOKENS * ROW
            buffer.memory[begin : begin + TOKENS * ROW] = _bytes(f"{seed} {at}")

    def holds(self, page, seed):
        begin = page * TOKENS * ROW
        return all(
            buffer.memory[begin : begin + TOKENS * ROW] == _bytes(f"{seed} {at}")
            for at, (_, buffer) in enumerate(self.buffers)
        )

    def wipe(self):
        for _, buffer in self.buffers:
            buffer.memory[:] = bytes(buffer.bytes)


def _bytes(seed):
    return hashlib.shake_128(seed.encode()).digest(TOKENS * ROW)


class HostPool:
    """The host pool of HiCache with K and V in one allocation, shared or of this process, in two of its
    layouts. `get_page_buffer_meta` answers as SGLang's does."""

    dtype = "torch.float32"

    def __init__(self, layout, pages=64, layers=3, shared=True):
        self.layout = layout
        self.page_size = TOKENS
        self.page_num = pages
        self.size = pages * TOKENS
        self.layers = layers
        size = 2 * layers * self.size * ROW
        if shared:
            # As SGLang makes it: nothing may be sealed.
            self.fd = os.memfd_create("stand-in", os.MFD_CLOEXEC)
            os.ftruncate(self.fd, size)
            self.memory = mmap.mmap(self.fd, size)
        else:
            self.fd = None
            self.memory = mmap.mmap(-1, size)
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    def get_page_buffer_meta(self, indices):
        assert len(indices) % TOKENS == 0
        firsts = indices.tolist()[::TOKENS]
        half = self.layers * self.size * ROW
        if self.layout == "layer_first":
            addresses = [
                self._base + kind * half + (layer * self.size + first) * ROW
                for first in firsts
                for layer in range(self.layers)
                for kind in range(2)
            ]
            return addresses, [TOKENS * ROW] * len(addresses)
        addresses = [self._base + kind * half + first * self.layers * ROW for first in firsts for kind in range(2)]
        return addresses, [TOKENS * self.layers * ROW] * len(addresses)

    def page(self, at):
        """The bytes of one page."""
        addresses, sizes = self.get_page_buffer_meta(Indices([at]))
        return b"".join(
            self.memory[address - self._base : address - self._base + size] for address, size in zip(addresses, sizes)
        )

    def fill(self, at, seed):
        addresses, sizes = self.get_page_buffer_meta(Indices([at]))
        for number, (address, size) in enumerate(zip(addresses, sizes)):
            begin = address - self._base
            self.memory[begin : begin + size] = hashlib.shake_128(f"{seed} {number}".encode()).digest(size)
        return self.page(at)


class Indices(list):
    """A tensor of token indices: all of the given pages."""

    def __init__(self, pages):
        super().__init__(page * TOKENS + at for page in pages for at in range(TOKENS))

    def tolist(self):
        return list(self)

    def __getitem__(self, at):
        found = super().__getitem__(at)
        if not isinstance(at, slice):
            return found
        part = Indices([])
        part.extend(found)
        return part


def storage_class():
    """`OrbitKVStorage` over a stand-in of the base class that SGLang has."""
    name = "sglang.srt.mem_cache.hicache_storage"
    if name not in sys.modules:
        parts = name.split(".")
        for length in range(1, len(parts) + 1):
            sys.modules.setdefault(".".join(parts[:length]), types.ModuleType(".".join(parts[:length])))

        class HiCacheStorage:
            def register_mem_pool_host(self, mem_pool_host):
                self.mem_pool_host = mem_pool_host

        sys.modules[name].HiCacheStorage = HiCacheStorage
    from orbitkv.sglang.hicache import OrbitKVStorage

    return OrbitKVStorage


def storage_config(socket, model="stand-in", **orbitkv):
    """What SGLang hands to a dynamic storage."""
    return SimpleNamespace(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        model_name=model,
        extra_config={"interface_v1": 1, "orbitkv": {"socket": socket, **orbitkv}},
    )
