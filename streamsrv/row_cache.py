"""The cache of an engine that keeps each sequence in a row of its own."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from engines.api import BlockCopy
from streamsrv.blocks import BlockPool
from streamsrv.sequence import Sequence

# Copying a row's beginning costs a step a few percent: for fewer tokens it does not pay.
_LEAST_GAIN = 16
_TOKEN_BYTES = array("i").itemsize


@dataclass(frozen=True, slots=True)
class _Content:
    """What a row that nobody owns still holds."""

    space: bytes
    packed: bytes
    """Its tokens."""

    @property
    def num_tokens(self) -> int:
        return len(self.packed) // _TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class _Match:
    """A row and how many tokens of a sequence it begins with."""

    num_tokens: int
    row: int
    is_free: bool
    num_lost: int
    """Tokens that would be lost if the sequence took the row itself."""


class RowCache:
    """Gives each sequence one block, a row as long as the longest sequence.

    A row is written by its owner alone, so it has one at a time. What others computed is had in two ways: a
    free row that begins with the same tokens is taken over, and what follows in it is lost; or, where that
    would be much, the beginning is copied to another row. From a row at work it is always copied.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._pool = BlockPool(num_blocks)
        self._block_size = block_size
        self._contents: dict[int, _Content] = {}  # of free rows that can be found; a row is its own key
        self._owners: dict[int, Sequence] = {}
        self._copies: list[BlockCopy] = []

    @property
    def least_gain(self) -> int:
        """Tokens that are worth waiting for."""
        return _LEAST_GAIN

    @property
    def num_free_blocks(self) -> int:
        """Rows that no sequence owns."""
        return self._pool.num_free

    @property
    def num_evictions(self) -> int:
        """How often a row that could have been found was given to another use."""
        return self._pool.num_evictions

    def blocks_for(self, num_tokens: int) -> int:
        """Rows that so many tokens of one sequence take."""
        return -(-num_tokens // self._block_size)

    def prepare(self, sequence: Sequence) -> None:
        """Work out what a sequence's tokens are compared by, so that no step has to wait for that."""
        _packed(sequence)

    def num_findable(self, sequence: Sequence) -> int:
        """Count a sequence's leading tokens that need not be computed now."""
        best = self._best(sequence)
        return best.num_tokens if best is not None else 0

    def num_common(self, sequence: Sequence, other: Sequence) -> int:
        """Count a sequence's leading tokens that it need not compute once `other` has computed all of its."""
        most = min(sequence.num_reusable, other.num_tokens)
        return _num_common(_packed(sequence), _packed(other), most)

    def admit(self, sequence: Sequence) -> int | None:
        """Give a sequence a row.

        Returns how many of its leading tokens the row holds, or will hold after what is to be copied, or
        None if no row is free.
        """
        if not self._pool.num_free:
            return None
        best = self._best(sequence)
        if best is None:
            self._own(sequence, self._new_row())
            return 0
        if best.is_free and self._may_lose(best):
            self._pool.take([best.row])
            self._pool.unname(best.row)
            del self._contents[best.row]
            self._own(sequence, best.row)
            return best.num_tokens
        if best.num_tokens < _LEAST_GAIN:
            self._own(sequence, self._new_row())
            return 0
        # Taken for a moment, so that it is not given away, and counts as just used.
        if best.is_free:
            self._pool.take([best.row])
        row = self._new_row()
        if best.is_free:
            self._pool.release([best.row])
        self._copies.append(BlockCopy(best.row, row, best.num_tokens))
        self._own(sequence, row)
        return best.num_tokens

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:  # noqa: ARG002
        """Do nothing: a row is as long as any sequence."""
        return True

    def note_computed(self, sequence: Sequence, num_new: int) -> None:
        """Do nothing: a row at work is found by its owner's tokens."""

    def release(self, sequence: Sequence, *, keep: bool) -> None:
        """Take a sequence's row back; what it holds can be found from now on, with `keep`."""
        (row,) = sequence.block_ids
        del self._owners[row]
        sequence.block_ids = array("i")
        if keep and sequence.num_computed:
            self._contents[row] = _Content(
                sequence.space, bytes(_packed(sequence)[: _TOKEN_BYTES * sequence.num_computed])
            )
            self._pool.name(row, row)
        self._pool.release([row])

    def take_copies(self) -> tuple[BlockCopy, ...]:
        """What the next step has to copy first, each copy once."""
        copies, self._copies = tuple(self._copies), []
        return copies

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Hold the books against the running sequences.

        Raises:
            AssertionError: a row is lost, or has two owners.

        """
        owners = {s.block_ids[0]: s for s in sequences}
        assert owners == self._owners
        self._pool.check_integrity([row] for row in owners)
        assert len(self._contents) == self._pool.num_kept
        assert all(self._pool.find(row) == row for row in self._contents)
        assert all(self._pool.is_free(row) for row in self._contents)

    def _may_lose(self, match: _Match) -> bool:
        """Whether a free row is better taken over than kept for others."""
        if match.num_lost < _LEAST_GAIN or self._pool.num_free == 1:
            return True
        has_empty = self._pool.num_free > self._pool.num_kept
        return not has_empty and match.num_lost <= match.num_tokens

    def _new_row(self) -> int:
        blocks = self._pool.allocate(1)
        assert blocks is not None
        self._contents.pop(blocks[0], None)
        return blocks[0]

    def _own(self, sequence: Sequence, row: int) -> None:
        sequence.block_ids = array("i", [row])
        self._owners[row] = sequence

    def _best(self, sequence: Sequence) -> _Match | None:
        """The row with the longest common beginning; of equal ones the one that loses least if taken."""
        best, best_key = None, (0, 0)
        tokens, most = _packed(sequence), sequence.num_reusable
        for row, content in self._contents.items():
            if content.space == sequence.space:
                count = _num_common(tokens, content.packed, min(most, content.num_tokens))
                num_lost = content.num_tokens - count
                if count and (key := (count, -num_lost)) > best_key:
                    best, best_key = _Match(count, row, True, num_lost), key
        for row, owner in self._owners.items():
            if owner.space == sequence.space:
                count = _num_common(tokens, _packed(owner), min(most, owner.num_computed))
                if count > best_key[0]:
                    best, best_key = _Match(count, row, False, 0), (count, 0)
        return best


def _packed(sequence: Sequence) -> bytearray:
    """The tokens of a sequence as bytes."""
    packed = sequence.packed
    if len(packed) < _TOKEN_BYTES * sequence.num_tokens:
        packed += array("i", sequence.token_ids[len(packed) // _TOKEN_BYTES :]).tobytes()
    return packed


def _num_common(first: bytes | bytearray, second: bytes | bytearray, most: int) -> int:
    """How many leading tokens are the same, at most `most`, which neither has fewer than."""
    begin, width = 0, 16
    while begin < most:  # the first `begin` are the same
        end = min(begin + width, most)
        if _are_equal(first, second, begin, end):
            begin, width = end, 2 * width
            continue
        while end - begin > 1:
            middle = (begin + end) // 2
            if _are_equal(first, second, begin, middle):
                begin = middle
            else:
                end = middle
        return begin
    return begin


def _are_equal(first: bytes | bytearray, second: bytes | bytearray, begin: int, end: int) -> bool:
    begin, end = _TOKEN_BYTES * begin, _TOKEN_BYTES * end
    return first[begin:end] == second[begin:end]
