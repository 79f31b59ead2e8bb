"""Where the bytes of a page lie in the engine's KV memory.

Nothing is assumed about shapes but which dimension counts blocks: address and strides of each tensor
say the rest, whatever memory the tensors share.
"""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass, field
from typing import Any, Iterable, Optional


@dataclass(frozen=True)
class Piece:
    """One run of bytes that every block has: `length` bytes at `address + block * stride`."""

    address: int
    stride: int
    length: int
    layer: int


@dataclass(frozen=True)
class Storage:
    """One allocation of the engine."""

    address: int
    bytes: int


@dataclass
class GroupLayout:
    """The pages of one KV cache group."""

    blocks: int
    pieces: list[Piece] = field(default_factory=list)
    storages: dict[int, Storage] = field(default_factory=dict)
    layers: list[str] = field(default_factory=list)
    _shape: list[str] = field(default_factory=list)

    @property
    def page_bytes(self) -> int:
        return sum(piece.length for piece in self.pieces)

    def storage_of(self, piece: Piece) -> Storage:
        """The allocation that a piece lies in."""
        for storage in self.storages.values():
            if storage.address <= piece.address < storage.address + storage.bytes:
                return storage
        raise ValueError(f"no storage holds address {piece.address:#x}")

    def digest(self) -> str:
        """Names the order of bytes in a page: layers, shapes and strides within a block."""
        return hashlib.sha256("\n".join(self._shape).encode()).hexdigest()[:24]

    def add(self, name: str, tensor: Any, block_dim: Optional[int] = None, layer_dim: Optional[int] = None) -> None:
        """Adds the tensor of one layer, or of all layers where `layer_dim` counts them.

        Raises ValueError when no dimension counts the blocks."""
        item = tensor.element_size()
        dims = list(zip(tensor.shape, (stride * item for stride in tensor.stride())))
        at = self._block_dim([size for size, _ in dims]) if block_dim is None else block_dim
        size, stride = dims[at]
        split = size // self.blocks
        if split * self.blocks != size or split == 0:
            raise ValueError(f"{name}: {size} in dimension {at} is no multiple of {self.blocks} blocks")
        inner = [dim for i, dim in enumerate(dims) if i not in (at, layer_dim)]
        if split > 1:  # the kernel's blocks are smaller than the engine's
            inner.append((split, stride))
        runs, length = _runs(inner, item)
        storage = tensor.untyped_storage()
        self.storages.setdefault(storage.data_ptr(), Storage(storage.data_ptr(), storage.nbytes()))
        count, layer_stride = (1, 0) if layer_dim is None else dims[layer_dim]
        for layer in range(count):
            base = tensor.data_ptr() + layer * layer_stride
            for offset in runs:
                piece = Piece(base + offset, stride * split, length, len(self.layers))
                if not any((p.address, p.length) == (piece.address, piece.length) for p in self.pieces):
                    self.pieces.append(piece)
            label = name if layer_dim is None else f"{name}.{layer}"
            self.layers.append(label)
            self._shape.append(f"{label} {tensor.dtype} {sorted(inner, key=lambda dim: -dim[1])}")

    def _block_dim(self, sizes: list[int]) -> int:
        for at, size in enumerate(sizes):
            if size == self.blocks:
                return at
        for at, size in enumerate(sizes):
            if size and size % self.blocks == 0:
                return at
        raise ValueError(f"no dimension of {sizes} counts {self.blocks} blocks")


def _runs(dims: Iterable[tuple[int, int]], item: int) -> tuple[list[int], int]:
    """Contiguous runs of an array of (size, stride in bytes): their offsets, ascending, and their length."""
    length = item
    outer = []
    for size, stride in sorted((dim for dim in dims if dim[0] > 1), key=lambda dim: dim[1]):
        if not outer and stride == length:
            length *= size
        else:
            outer.append((size, stride))
    steps = [[i * stride for i in range(size)] for size, stride in reversed(outer)]
    return sorted(sum(offsets) for offsets in itertools.product(*steps)), length
