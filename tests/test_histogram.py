from bisect import bisect_left

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamsrv.histogram import Histogram

BOUNDS = (1.0, 2.0, 5.0)


def test_a_value_falls_into_the_first_bucket_that_is_not_below_it() -> None:
    histogram = Histogram(BOUNDS)
    for value in (0.0, 1.0, 1.5, 5.0, 5.1, 1e9):
        histogram.observe(value)
    assert list(histogram.cumulative()) == [(1.0, 2), (2.0, 3), (5.0, 4), (float("inf"), 6)]
    assert histogram.total == pytest.approx(1e9 + 12.6)
    assert histogram.count == 6


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(1, 100))))
def test_many_times_is_as_often_one_by_one(seen: list[tuple[float, int]]) -> None:
    at_once, one_by_one = Histogram(BOUNDS), Histogram(BOUNDS)
    for value, times in seen:
        at_once.observe(value, times)
        for _ in range(times):
            one_by_one.observe(value)
    assert list(at_once.cumulative()) == list(one_by_one.cumulative())
    assert at_once.total == pytest.approx(one_by_one.total)
    assert at_once.count == sum(times for _, times in seen)
    assert bisect_left(BOUNDS, 1.0) == 0, "a bound belongs to its own bucket, as Prometheus has it"


def test_bounds_must_ascend() -> None:
    for bounds in ((2.0, 1.0), (1.0, 1.0)):
        with pytest.raises(AssertionError, match="ascend"):
            Histogram(bounds)
