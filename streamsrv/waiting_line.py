"""In which order the sequences that wait are to start."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from math import inf

from streamsrv.caller_shares import CallerShares
from streamsrv.sequence import Sequence

# Among the requests of one caller a deadline counts if it is nearer than this after the arrival, in seconds;
# one without is not overtaken by those that come later than that.
_PATIENCE_S = 30.0
# Of so many sequences that start, one is whoever has waited longest, whatever its caller has had.
_OLDEST_EVERY = 8


class WaitingLine:
    """Picks who starts next: by priority and age, then by the callers' shares, then by deadline and arrival.

    Sequences of one priority are a class. The class with the sequence of lowest rank comes first: a rank is
    the time of arrival less what the priority is worth, so that the lowest priority rises by waiting. In a
    class those come first that ran before and had to give their blocks back; then the caller for whom least
    has been computed, and of its sequences the one whose deadline is nearest. One start in eight goes to the
    class's oldest instead, so that no stream of new callers can hold anybody up for good.

    With one caller, one priority and no deadlines that is the order of arrival.
    """

    def __init__(self, shares: CallerShares) -> None:
        self._shares = shares
        self._classes: dict[int, _Class] = {}
        self._num_sequences = 0

    def __len__(self) -> int:
        return self._num_sequences

    def __iter__(self) -> Iterator[Sequence]:
        """All who wait, in no particular order."""
        for each in self._classes.values():
            yield from each.by_rank

    def add(self, sequence: Sequence) -> None:
        """Put a sequence in its place."""
        self._classes.setdefault(sequence.priority, _Class()).add(sequence)
        self._num_sequences += 1

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out that will not start now."""
        members = self._classes[sequence.priority]
        members.remove(sequence)
        self._num_sequences -= 1

    def start(self, sequence: Sequence) -> None:
        """Take a sequence out that starts."""
        self.remove(sequence)
        if not sequence.num_preemptions:
            self._classes[sequence.priority].num_starts += 1

    def head(self) -> Sequence | None:
        """Who is to start next."""
        waiting = [each for each in self._classes.values() if each.by_rank]
        if not waiting:
            return None
        return min(waiting, key=lambda each: each.by_rank[0].rank).head(self._shares)


class _Class:
    """The waiting sequences of one priority."""

    def __init__(self) -> None:
        self.by_rank: list[Sequence] = []
        self.resumed: list[Sequence] = []  # by rank
        self.lines: dict[str, list[Sequence]] = {}  # by caller; each by due time
        self.num_starts = 0

    def add(self, sequence: Sequence) -> None:
        insort(self.by_rank, sequence, key=_rank)
        if sequence.num_preemptions:
            insort(self.resumed, sequence, key=_rank)
        else:
            insort(self.lines.setdefault(sequence.caller, []), sequence, key=_due)

    def remove(self, sequence: Sequence) -> None:
        del self.by_rank[bisect_left(self.by_rank, sequence.rank, key=_rank)]
        if sequence.num_preemptions:
            del self.resumed[bisect_left(self.resumed, sequence.rank, key=_rank)]
            return
        line = self.lines[sequence.caller]
        del line[bisect_left(line, _due(sequence), key=_due)]
        if not line:
            del self.lines[sequence.caller]

    def head(self, shares: CallerShares) -> Sequence:
        if self.resumed:
            return self.resumed[0]
        if self.num_starts % _OLDEST_EVERY == _OLDEST_EVERY - 1:
            return self.by_rank[0]
        if len(self.lines) == 1:
            return next(iter(self.lines.values()))[0]
        heads = [line[0] for line in self.lines.values()]
        return min(heads, key=lambda s: (shares.num_tokens(s.caller), _due(s)))


def _rank(sequence: Sequence) -> tuple[float, int]:
    return sequence.rank


def _due(sequence: Sequence) -> tuple[float, tuple[float, int]]:
    deadline_s = sequence.request.deadline_s
    patience_s = sequence.arrived_s + _PATIENCE_S
    return min(patience_s, inf if deadline_s is None else deadline_s), sequence.rank
