"""Blocks that unfinished saves still read, or restores that were given up may still write.

The engine's own reference counts keep them from being used again: whatever becomes of the request
meanwhile, preemption and a sliding window included, such a block is not used for anything else. Nobody
waits for a save, and a Manager that hangs costs at most the blocks that are held.
"""

from __future__ import annotations

from typing import Any, Iterable, Union

#: Number of a save, or the request of a restore.
Key = Union[int, str]


class Holds:
    """References to blocks of one pool, by what still uses them."""

    def __init__(self, pool: Any, share_max: float):
        self._pool = pool
        self._held: dict[Key, list[Any]] = {}
        self._count = 0
        self._count_max = int(pool.num_gpu_blocks * share_max)

    @property
    def room(self) -> int:
        """Blocks that may be held in addition."""
        return max(0, self._count_max - self._count)

    def hold(self, key: Key, block_ids: Iterable[int]) -> None:
        """Holds blocks that their requests still own."""
        blocks = [self._pool.blocks[block_id] for block_id in block_ids]
        self._pool.touch(blocks)
        self._held.setdefault(key, []).extend(blocks)
        self._count += len(blocks)

    def let_go(self, key: Key) -> None:
        """The copy has ended, or never began."""
        blocks = self._held.pop(key, None)
        if blocks is not None:
            self._count -= len(blocks)
            # The tail of a chain is evicted first.
            self._pool.free_blocks(reversed(blocks))

    def __len__(self) -> int:
        return self._count
