import numpy as np
import pytest

from streamsrv.bench.load_messages import Share
from streamsrv.bench.schedule import OpenPlan


def test_gaps_are_those_of_a_poisson_process() -> None:
    due_s = OpenPlan(25.0, num_requests=20_000).due_times_s(1)
    gaps = np.diff(due_s, prepend=0.0)
    assert np.all(gaps >= 0)
    # An exponential's mean and standard deviation are equal, and 1/e of it lies above the mean.
    assert gaps.mean() == pytest.approx(1 / 25, rel=0.03)
    assert gaps.std() == pytest.approx(1 / 25, rel=0.03)
    assert (gaps > 1 / 25).mean() == pytest.approx(np.exp(-1), abs=0.015)
    # Arrivals in a second: as spread as they are many.
    in_a_second = np.bincount(due_s.astype(int))[:-1]
    assert in_a_second.var() / in_a_second.mean() == pytest.approx(1.0, abs=0.2)
    assert abs(np.corrcoef(gaps[1:], gaps[:-1])[0, 1]) < 0.03


def test_a_time_holds_the_arrivals_before_its_end_and_a_longer_one_begins_with_them() -> None:
    short, long = (OpenPlan(300.0, duration_s=s).due_times_s(1) for s in (2.0, 20.0))
    assert short.max() < 2.0
    assert np.array_equal(long[: len(short)], short)
    assert long[len(short)] >= 2.0
    assert np.array_equal(OpenPlan(300.0, num_requests=len(long)).due_times_s(1), long)


def test_a_seed_gives_the_same_times_again_and_another_one_others() -> None:
    plan = OpenPlan(10.0, num_requests=50)
    assert np.array_equal(plan.due_times_s(1), plan.due_times_s(1))
    assert not np.array_equal(plan.due_times_s(1), plan.due_times_s(2))
    assert np.allclose(OpenPlan(5.0, num_requests=50).due_times_s(1), 2 * plan.due_times_s(1))


@pytest.mark.parametrize("num_shares", [1, 3, 7])
def test_the_shares_of_processes_are_together_the_whole_schedule(num_shares: int) -> None:
    whole = OpenPlan(10.0, num_requests=20).due_times_s(1)
    pairs = []
    for number in range(num_shares):
        share = Share(number, num_shares)
        own = whole[number::num_shares]
        assert len(own) == share.of(20)
        pairs += [(share.index(i), float(due_s)) for i, due_s in enumerate(own)]
    assert sorted(pairs) == list(enumerate(whole.tolist()))


def test_a_rate_too_low_for_its_time_has_no_arrivals() -> None:
    assert len(OpenPlan(1e-9, duration_s=1.0).due_times_s(1)) == 0
