"""The host pool of HiCache: where the bytes of its pages lie, and what the Manager reaches them by."""

from __future__ import annotations

import hashlib
import os
from array import array
from typing import Any, Iterable, Optional

from orbitkv import Client, Memory, Namespace, Region, Scope
from orbitkv.sglang.component import Piece


class HostPool:
    """Asks the pool for the buffers of single pages, so no layout is assumed but that a page index moves
    each buffer by a constant.

    Raises ValueError for a pool where it does not."""

    def __init__(self, pool: Any):
        self.page_tokens: int = pool.page_size
        self.pages: int = getattr(pool, "page_num", None) or pool.size // pool.page_size
        first = self._buffers(pool, 0)
        second = self._buffers(pool, min(1, self.pages - 1))
        last = self._buffers(pool, self.pages - 1)
        self.pieces: list[Piece] = []
        for (address, length), (next_address, _), (last_address, last_length) in zip(first, second, last):
            stride = next_address - address or length
            if last_address != address + (self.pages - 1) * stride or last_length != length or stride < length:
                raise ValueError(f"orbitkv: pages of {type(pool).__name__} in layout {pool.layout} are not evenly spaced")
            self.pieces.append(Piece(address, stride, length, 0))
        #: Descriptors of shared memory that hold it; none where it is memory of this process only.
        self.descriptors: list[int] = [
            fd for fd in getattr(getattr(pool, "allocator", None), "fds", None) or [getattr(pool, "fd", None)] if fd is not None
        ]
        self._layout = f"{type(pool).__name__} {pool.layout} {pool.dtype}".replace("torch.", "")

    @property
    def page_bytes(self) -> int:
        return sum(piece.length for piece in self.pieces)

    def layout(self) -> str:
        """Names the order of bytes in a page."""
        lengths = " ".join(str(piece.length) for piece in self.pieces)
        return f"{self._layout} {hashlib.sha256(lengths.encode()).hexdigest()[:16]}"

    def ranges(self) -> list[tuple[int, int]]:
        """Begin and end of the memory that the pages lie in, ascending, with nothing between two of them
        that is none of theirs."""
        spans = sorted((p.address, p.address + (self.pages - 1) * p.stride + p.length) for p in self.pieces)
        joined: list[tuple[int, int]] = []
        for begin, end in spans:
            if joined and begin <= joined[-1][1]:
                joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
            else:
                joined.append((begin, end))
        return joined

    def _buffers(self, pool: Any, page: int) -> list[tuple[int, int]]:
        indices = array("q", range(page * self.page_tokens, (page + 1) * self.page_tokens))
        addresses, lengths = pool.get_page_buffer_meta(indices)
        return list(zip(addresses, lengths))


class HeldPool:
    """What one session has registered of a host pool. Raises OrbitKVError where the Manager refuses."""

    def __init__(self, client: Client, pool: HostPool, namespace: dict):
        self.scope: Scope = client.define_namespace(Namespace(**namespace))
        memories: dict[int, Memory] = {}
        #: Begin, end, memory, and what to add to an address for the offset in it.
        places: list[tuple[int, int, Memory, int]] = []
        for begin, end in pool.ranges():
            found = _shared(begin, end, pool.descriptors)
            if found is None:
                places.append((begin, end, client.register_process(begin, end - begin), -begin))
                continue
            fd, shift = found
            if fd not in memories:
                memories[fd] = client.register_memfd(fd, os.fstat(fd).st_size)
            places.append((begin, end, memories[fd], shift))
        segments = []
        for piece in pool.pieces:
            memory, shift = next((memory, shift) for begin, end, memory, shift in places if begin <= piece.address < end)
            segments.append((memory, piece.address + shift, piece.stride, piece.length, piece.layer))
        self.region: Region = client.register_region(self.scope, pool.pages, segments)


def _shared(begin: int, end: int, descriptors: Iterable[int]) -> Optional[tuple[int, int]]:
    """The descriptor that this memory is mapped from, and what to add to an address for its offset."""
    files = {(os.fstat(fd).st_dev, os.fstat(fd).st_ino): fd for fd in descriptors}
    if not files:
        return None
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, _, offset, device, inode = line.split(maxsplit=5)[:5]
            low, high = (int(part, 16) for part in span.split("-"))
            if low <= begin and end <= high:
                major, minor = (int(part, 16) for part in device.split(":"))
                fd = files.get((os.makedev(major, minor), int(inode)))
                return None if fd is None else (fd, int(offset, 16) - low)
    return None
