"""Random schedules: no starvation, no leak, no block used twice, right tokens, progress always."""

import pytest

from tests.simulator import simulate


def test_a_few_thousand_random_schedules_end_as_they_should() -> None:
    for seed in range(2_000):
        simulate(seed)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_thousand_random_schedules_end_as_they_should() -> None:
    for seed in range(100_000):
        simulate(seed)
