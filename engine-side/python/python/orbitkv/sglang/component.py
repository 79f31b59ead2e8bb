"""A component of the engine's cache: the bytes that one page index names, in every buffer it has."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Piece:
    """One run of bytes that every page has: `length` bytes at `address + page * stride`."""

    address: int
    stride: int
    length: int
    layer: int


@dataclass
class Component:
    """The pages of one of FULL, SWA and MAMBA. A page holds its bytes of all layers of the component."""

    #: As the engine's transfers name it: "kv", "swa", "mamba".
    name: str
    #: Pages that an index can name.
    pages: int
    #: Indices of the engine that make one page: its page size, or 1 where an index is a page.
    page_indices: int
    #: Which pages a hit needs: "chain", "window" or "state".
    dependency: str = "chain"
    #: Pages of "window".
    window: int = 0
    pieces: list[Piece] = field(default_factory=list)
    #: Allocations that the pieces lie in: address to bytes.
    storages: dict[int, int] = field(default_factory=dict)
    #: Layers with bytes of this component.
    layers: set[int] = field(default_factory=set)
    _shape: list[str] = field(default_factory=list)

    @property
    def page_bytes(self) -> int:
        return sum(piece.length for piece in self.pieces)

    def digest(self) -> str:
        """Names the order of bytes in a page: layers, shapes and element types."""
        return hashlib.sha256("\n".join(self._shape).encode()).hexdigest()[:24]

    def storage_of(self, piece: Piece) -> int:
        """Address of the allocation that a piece lies in."""
        for address, size in self.storages.items():
            if address <= piece.address < address + size:
                return address
        raise ValueError(f"no storage holds address {piece.address:#x}")

    def add(self, tensor: Any, layer: int, rows: int) -> None:
        """Adds the buffer of one layer: a page is `rows` of its rows, one behind the other.

        Raises ValueError where a page of it is no single run of bytes, or has pages too few."""
        item = tensor.element_size()
        row = item
        for size in tensor.shape[1:]:
            row *= size
        stride = tensor.stride()[0] * item
        inner = item
        for size, step in zip(reversed(tensor.shape[1:]), reversed(tensor.stride()[1:])):
            if size > 1 and step * item != inner:
                raise ValueError(f"{self.name}: a row of layer {layer} is no single run of bytes")
            inner *= size
        if rows > 1 and stride != row:
            raise ValueError(f"{self.name}: rows of layer {layer} are {stride} bytes apart and {row} long")
        if tensor.shape[0] // rows < self.pages:
            raise ValueError(f"{self.name}: layer {layer} has {tensor.shape[0]} rows for {self.pages} pages of {rows}")
        storage = tensor.untyped_storage()
        self.storages.setdefault(storage.data_ptr(), storage.nbytes())
        self.pieces.append(Piece(tensor.data_ptr(), stride * rows, row * rows, layer))
        self.layers.add(layer)
        self._shape.append(f"{layer} {tensor.dtype} {rows} {tuple(tensor.shape[1:])}")
