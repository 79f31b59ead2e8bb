"""Blocks that unfinished saves still read.

The engine's own reference counts keep them from being used again: whatever becomes of the request
meanwhile, preemption and a sliding window included, a block that is being saved is not rewritten. Nobody
waits for a save, and a Manager that hangs costs at most the blocks that are held.
"""

from __future__ import annotations

from typing import Any, Iterable


class Holds:
    """References to blocks of one pool, by the number of the save that reads them."""

    def __init__(self, pool: Any, share_max: float):
        self._pool = pool
        self._held: dict[int, list[Any]] = {}
        self._count = 0
        self._count_max = int(pool.num_gpu_blocks * share_max)

    @property
    def room(self) -> int:
        """Blocks that may be held in addition."""
        return max(0, self._count_max - self._count)

    def hold(self, number: int, block_ids: Iterable[int]) -> None:
        """Holds blocks that their requests still own."""
        blocks = [self._pool.blocks[block_id] for block_id in block_ids]
        self._pool.touch(blocks)
        self._held[number] = blocks
        self._count += len(blocks)

    def let_go(self, number: int) -> None:
        """The save has ended, or never began."""
        blocks = self._held.pop(number, None)
        if blocks is not None:
            self._count -= len(blocks)
            # The tail of a chain is evicted first.
            self._pool.free_blocks(reversed(blocks))

    def __len__(self) -> int:
        return self._count
