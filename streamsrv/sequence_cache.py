"""The seam between a scheduler and what knows which block holds what."""

from collections.abc import Iterable
from typing import Protocol

from engines.api import BlockCopy
from streamsrv.sequence import Sequence


class SequenceCache(Protocol):
    """Who has which block, in pages or in rows, and who may find what others computed."""

    @property
    def least_gain(self) -> int:
        """Tokens that are worth waiting for until another sequence has computed them."""
        ...

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence owns."""
        ...

    @property
    def num_evictions(self) -> int:
        """How often what could have been found was given up."""
        ...

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that so many tokens of one sequence take."""
        ...

    def prepare(self, sequence: Sequence) -> None:
        """Work out what a sequence is found by, so that no step has to wait for that."""
        ...

    def num_findable(self, sequence: Sequence) -> int:
        """Count a sequence's leading tokens that need not be computed now."""
        ...

    def num_common(self, sequence: Sequence, other: Sequence) -> int:
        """Count a sequence's leading tokens that it need not compute once `other` has computed all of its."""
        ...

    def admit(self, sequence: Sequence) -> int | None:
        """Give a sequence blocks for its tokens; how many they hold already, or None if too few are free."""
        ...

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Give a sequence what it lacks to hold `num_tokens`; False, and nothing, if too few are free."""
        ...

    def note_computed(self, sequence: Sequence, num_new: int) -> None:
        """Book a sequence's last `num_new` computed tokens."""
        ...

    def release(self, sequence: Sequence, *, keep: bool) -> None:
        """Take a sequence's blocks back; with `keep` what they hold can be found."""
        ...

    def take_copies(self) -> tuple[BlockCopy, ...]:
        """What the next step has to copy first, each copy once."""
        ...

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Hold the books against the running sequences."""
        ...
