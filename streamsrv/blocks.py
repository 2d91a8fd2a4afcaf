"""Who owns which block of the key/value cache."""

import heapq
from collections.abc import Iterable


class BlockPool:
    """The free list and the reference counts of `num_blocks` blocks, numbered from 0.

    A block is free (no references) or owned (one reference or more), never both. The lowest free blocks
    are given first: engines that compute contiguous ranges of blocks then have few gaps to pass over.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block, got {num_blocks}")
        self._free = list(range(num_blocks))  # a heap
        self._references = [0] * num_blocks

    @property
    def num_blocks(self) -> int:
        """Blocks in all."""
        return len(self._references)

    @property
    def num_free(self) -> int:
        """Blocks that nobody owns."""
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` blocks, each with one reference, or none at all if fewer are free."""
        if count > len(self._free):
            return None
        blocks = [heapq.heappop(self._free) for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference of each block; those without any are free again."""
        for block in blocks:
            assert self._references[block] > 0, f"block {block} is free already"
            self._references[block] -= 1
            if self._references[block] == 0:
                heapq.heappush(self._free, block)

    def check_integrity(self, owners: Iterable[Iterable[int]]) -> None:
        """Hold the books against the owners' own lists of blocks; for tests and idle moments.

        Raises:
            AssertionError: a block is counted wrongly, or is free and owned at once.

        """
        counted = [0] * self.num_blocks
        for blocks in owners:
            for block in blocks:
                counted[block] += 1
        assert counted == self._references, "reference counts differ from the owners' lists"
        free = sorted(self._free)
        assert free == [b for b, n in enumerate(counted) if n == 0], "the free list is wrong"
