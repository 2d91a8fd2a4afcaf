"""How often values of which size were seen."""

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate


class Histogram:
    """Counts values by bucket. For one thread, without a lock; a value seen many times costs no more."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        """`bounds` are the buckets' upper ends, ascending; one without an end is added."""
        assert bounds == tuple(sorted(set(bounds))), "bounds must ascend"
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    @property
    def total(self) -> float:
        """Sum of all values."""
        return self._total

    @property
    def count(self) -> int:
        """Values seen."""
        return sum(self._counts)

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value that was seen so many times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._total += value * times

    def cumulative(self) -> Iterator[tuple[float, int]]:
        """Give each bucket's upper end with the number of values up to it; the last end is infinite."""
        return zip((*self._bounds, float("inf")), accumulate(self._counts), strict=True)
