import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamsrv.bench.percentiles import Distribution, percentiles

finite = st.floats(-1e6, 1e6)


def test_nearest_rank_of_ten_values() -> None:
    values = [10.0, 9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0]
    assert percentiles(values, (0, 10, 50, 90, 91, 99, 100)) == (1.0, 1.0, 5.0, 9.0, 10.0, 10.0, 10.0)


def test_a_single_value_is_every_percentile() -> None:
    assert percentiles([3.5], (0, 50, 99, 100)) == (3.5, 3.5, 3.5, 3.5)


@given(st.lists(st.tuples(finite, st.integers(1, 9)), min_size=1, max_size=40), st.integers(0, 100))
def test_a_weight_counts_like_repetition(pairs: list[tuple[float, int]], percent: int) -> None:
    repeated = [value for value, times in pairs for _ in range(times)]
    values, weights = [value for value, _ in pairs], [float(times) for _, times in pairs]
    assert percentiles(values, (percent,), weights) == percentiles(repeated, (percent,))


@given(st.lists(finite, min_size=1, max_size=40), st.integers(0, 100))
def test_a_percentile_is_the_least_value_that_enough_do_not_exceed(values: list[float], percent: int) -> None:
    (found,) = percentiles(values, (percent,))
    num_at_most = sum(value <= found for value in values)
    num_below = sum(value < found for value in values)
    assert found in values
    assert 100 * num_at_most >= percent * len(values)
    assert found == min(values) or 100 * num_below < percent * len(values)


def test_nothing_has_no_distribution() -> None:
    assert Distribution.of([]) is None


def test_a_distribution_weighs_its_mean() -> None:
    distribution = Distribution.of([1.0, 4.0], [2.0, 1.0])
    assert distribution is not None
    assert distribution.mean == pytest.approx(2.0)
    assert (distribution.p50, distribution.p90, distribution.max) == (1.0, 4.0, 4.0)


@given(
    st.lists(st.tuples(finite, st.integers(1, 9)), min_size=1, max_size=60),
    st.floats(0, 100),
)
def test_percentiles_are_those_of_numpy(pairs: list[tuple[float, int]], percent: float) -> None:
    values, weights = [value for value, _ in pairs], [float(times) for _, times in pairs]
    repeated = np.repeat(values, [times for _, times in pairs])
    # NumPy's own product is rounded, too: next to a whole rank, either neighbour is right.
    allowed = {
        float(np.percentile(repeated, min(max(percent + shift, 0), 100), method="inverted_cdf"))
        for shift in (-1e-9, 0, 1e-9)
    }
    assert percentiles(values, (percent,), weights)[0] in allowed


@given(st.lists(finite, min_size=1, max_size=60))
def test_a_distribution_is_that_of_numpy(values: list[float]) -> None:
    distribution = Distribution.of(values)
    assert distribution is not None
    assert distribution.mean == pytest.approx(float(np.mean(values)))
    assert distribution.max == max(values)
    for percent, found in ((50, distribution.p50), (90, distribution.p90), (99, distribution.p99)):
        assert found == float(np.percentile(values, percent, method="inverted_cdf"))
