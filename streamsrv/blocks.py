"""Who owns which block of the key/value cache, and what the free ones still hold."""

import heapq
from collections import OrderedDict
from collections.abc import Hashable, Iterable


class BlockPool:
    """The free lists, reference counts and names of `num_blocks` blocks, numbered from 0.

    A block is free (no references) or owned (one reference or more), never both. One whose content may be of
    use to others has a key, by which it is found; of blocks with the same content one has it. A free block
    with a key is kept until nothing else is left to give: the least recently used goes first. Among free
    blocks without a key the lowest are given first: engines that compute contiguous ranges of blocks then
    have few gaps to pass over.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block, got {num_blocks}")
        self._empty = list(range(num_blocks))  # free without a key; a heap
        self._kept: OrderedDict[int, None] = OrderedDict()  # free with a key, the next to be evicted first
        self._references = [0] * num_blocks
        self._keys: list[Hashable | None] = [None] * num_blocks
        self._blocks: dict[Hashable, int] = {}
        self._num_evictions = 0

    @property
    def num_blocks(self) -> int:
        """Blocks in all."""
        return len(self._references)

    @property
    def num_free(self) -> int:
        """Blocks that nobody owns, the kept ones included."""
        return len(self._empty) + len(self._kept)

    @property
    def num_kept(self) -> int:
        """Blocks that nobody owns and that can be found by their keys."""
        return len(self._kept)

    @property
    def num_evictions(self) -> int:
        """How often a kept block was given to another use, since the start."""
        return self._num_evictions

    def allocate(self, count: int) -> list[int] | None:
        """Take `count` blocks without keys, each with one reference, or none at all if fewer are free."""
        if count > self.num_free:
            return None
        blocks = []
        for _ in range(count):
            if self._empty:
                block = heapq.heappop(self._empty)
            else:
                block, _ = self._kept.popitem(last=False)
                self._drop_key(block)
                self._num_evictions += 1
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def find(self, key: Hashable) -> int | None:
        """The block with this key, owned or free."""
        return self._blocks.get(key)

    def is_free(self, block: int) -> bool:
        """Whether nobody owns a block."""
        return self._references[block] == 0

    def is_shared(self, block: int) -> bool:
        """Whether a block has several owners."""
        return self._references[block] > 1

    def take(self, blocks: Iterable[int]) -> None:
        """Add one reference to each of some blocks that were found."""
        for block in blocks:
            if self._references[block] == 0:
                del self._kept[block]
            self._references[block] += 1

    def name(self, block: int, key: Hashable) -> None:
        """Let an owned block be found by `key`, unless another is found by it, or it has a key itself."""
        assert self._references[block] > 0, f"block {block} is free"
        if self._keys[block] is None and key not in self._blocks:
            self._keys[block] = key
            self._blocks[key] = block

    def unname(self, block: int) -> None:
        """Let an owned block be found no more."""
        assert self._references[block] > 0, f"block {block} is free"
        self._drop_key(block)

    def release(self, blocks: Iterable[int], *, keep: bool = True) -> None:
        """Drop one reference of each block; those without any are free again, the first to be evicted first.

        Without `keep` they lose their keys.
        """
        for block in blocks:
            assert self._references[block] > 0, f"block {block} is free already"
            self._references[block] -= 1
            if self._references[block] == 0:
                if not keep:
                    self._drop_key(block)
                if self._keys[block] is None:
                    heapq.heappush(self._empty, block)
                else:
                    self._kept[block] = None

    def check_integrity(self, owners: Iterable[Iterable[int]]) -> None:
        """Hold the books against the owners' own lists of blocks; for tests and idle moments.

        Raises:
            AssertionError: a block is counted wrongly, is free and owned at once, or is found by a wrong key.

        """
        counted = [0] * self.num_blocks
        for blocks in owners:
            for block in blocks:
                counted[block] += 1
        assert counted == self._references, "reference counts differ from the owners' lists"
        free = sorted([*self._empty, *self._kept])
        assert free == [b for b, n in enumerate(counted) if n == 0], "the free lists are wrong"
        assert all(self._keys[block] is None for block in self._empty), "an empty block has a key"
        named = {key: block for block, key in enumerate(self._keys) if key is not None}
        assert named == self._blocks, "the keys are wrong"
        assert all(self._keys[block] is not None for block in self._kept), "a kept block has no key"

    def _drop_key(self, block: int) -> None:
        if (key := self._keys[block]) is not None:
            del self._blocks[key]
            self._keys[block] = None
