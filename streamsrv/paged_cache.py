"""The cache of an engine whose sequences take block after block, and may share them."""

from array import array
from collections.abc import Iterable
from hashlib import blake2b

from engines.api import BlockCopy
from streamsrv.blocks import BlockPool
from streamsrv.sequence import Sequence


class PagedCache:
    """Gives sequences their blocks, those that hold the beginning of their tokens already first.

    A full block is found by a digest of its tokens and of all before them, begun with the sequence's space:
    equal digests mean equal tokens at equal positions, among sequences that may share. Only computed blocks
    are found, and a full block is never written again, so that any number of sequences can read it.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._pool = BlockPool(num_blocks)
        self._block_size = block_size

    @property
    def least_gain(self) -> int:
        """Tokens that are worth waiting for: a block."""
        return self._block_size

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence owns."""
        return self._pool.num_free

    @property
    def num_evictions(self) -> int:
        """How often a block that could have been found was given to another use."""
        return self._pool.num_evictions

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that so many tokens of one sequence take."""
        return -(-num_tokens // self._block_size)

    def prepare(self, sequence: Sequence) -> None:
        """Work out what a sequence's blocks are found by, so that no step has to wait for that."""
        if num_full := sequence.num_tokens // self._block_size:
            self._key(sequence, num_full - 1)

    def num_findable(self, sequence: Sequence) -> int:
        """Count a sequence's leading tokens that need not be computed now."""
        return len(self._find(sequence)) * self._block_size

    def num_common(self, sequence: Sequence, other: Sequence) -> int:
        """Count a sequence's leading tokens that it need not compute once `other` has computed all of its."""
        most = min(sequence.num_reusable, other.num_tokens) // self._block_size
        count = 0
        while count < most and self._key(sequence, count) == self._key(other, count):
            count += 1
        return count * self._block_size

    def admit(self, sequence: Sequence) -> int | None:
        """Give a sequence the blocks for its tokens.

        Returns how many of its leading tokens they hold, or None, without a change, if not enough are free.
        """
        found = self._find(sequence)
        missing = self.blocks_for(sequence.num_tokens) - len(found)
        if missing > self._pool.num_free - sum(map(self._pool.is_free, found)):
            return None
        self._pool.take(found)
        blocks = self._pool.allocate(missing)
        assert blocks is not None
        sequence.block_ids = array("i", found + blocks)
        return len(found) * self._block_size

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Give a sequence what it lacks to hold `num_tokens`; False, and nothing, if too few are free."""
        blocks = self._pool.allocate(max(0, self.blocks_for(num_tokens) - len(sequence.block_ids)))
        if blocks is None:
            return False
        sequence.block_ids.extend(blocks)
        return True

    def note_computed(self, sequence: Sequence, num_new: int) -> None:
        """Let others find the blocks that a sequence's last `num_new` computed tokens have filled."""
        size, end = self._block_size, sequence.num_computed
        if end % size >= num_new:
            return  # no block is full now that was not before
        for index in range((end - num_new) // size, end // size):
            self._pool.name(sequence.block_ids[index], self._key(sequence, index))

    def release(self, sequence: Sequence, *, keep: bool) -> None:
        """Take a sequence's blocks back; its computed ones can be found from now on, with `keep`."""
        if keep:
            # Those whose like was found in another block until it was evicted.
            self.note_computed(sequence, sequence.num_computed)
        # A block is of no use without those before it, so the last goes first.
        self._pool.release(reversed(sequence.block_ids), keep=keep)
        sequence.block_ids = array("i")

    def take_copies(self) -> tuple[BlockCopy, ...]:
        """Nothing is ever copied: blocks are shared."""
        return ()

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Hold the books against the running sequences.

        Raises:
            AssertionError: a block is lost, owned by nobody who knows of it, or found by a wrong key.

        """
        sequences = list(sequences)
        self._pool.check_integrity(s.block_ids for s in sequences)
        places: dict[int, tuple[int, bytes]] = {}
        for sequence in sequences:
            assert len(sequence.block_ids) >= self.blocks_for(sequence.num_computed)
            assert len(set(sequence.block_ids)) == len(sequence.block_ids)
            for index, block in enumerate(sequence.block_ids):
                if not self._pool.is_shared(block):
                    continue
                assert (index + 1) * self._block_size <= sequence.num_computed, (
                    "an unfinished block is shared"
                )
                place = index, self._key(sequence, index)
                assert places.setdefault(block, place) == place, "a block is shared by what differs"

    def _find(self, sequence: Sequence) -> list[int]:
        blocks: list[int] = []
        for index in range(sequence.num_reusable // self._block_size):
            block = self._pool.find(self._key(sequence, index))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _key(self, sequence: Sequence, index: int) -> bytes:
        keys, size = sequence.block_keys, self._block_size
        while len(keys) <= index:
            tokens = array("q", sequence.token_ids[len(keys) * size : (len(keys) + 1) * size])
            digest = blake2b(keys[-1] if keys else sequence.space, digest_size=16)
            digest.update(tokens)
            keys.append(digest.digest())
        return keys[index]
