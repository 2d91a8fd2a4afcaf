"""Sampling on two threads."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from engines.api import StepResult
from streamsrv.request import SamplingParams
from streamsrv.sampling import RowSampling, sample
from streamsrv.step_taking import _sample_in_halves


def rows_of(count: int, seed: int) -> list[RowSampling]:
    params = SamplingParams(temperature=0.9, top_p=0.9)
    return [RowSampling(params, np.random.default_rng([seed, i])) for i in range(count)]


@pytest.mark.parametrize("count", [1, 15, 16, 17, 64])
def test_two_threads_choose_what_one_does(count: int) -> None:
    logits = np.random.default_rng(0).normal(0, 4, (2 * count, 500)).astype(np.float32)
    at = list(range(1, 2 * count, 2))
    with ThreadPoolExecutor(1) as helpers:
        halves = _sample_in_halves(StepResult(logits.copy()), rows_of(count, 7), at, helpers)
    assert halves == sample(StepResult(logits), rows_of(count, 7), at)


def test_what_goes_wrong_on_the_second_thread_is_raised() -> None:
    logits = np.zeros((32, 50), np.float32)
    logits[31] = np.nan
    with ThreadPoolExecutor(1) as helpers, pytest.raises(ValueError, match="no finite maximum"):
        _sample_in_halves(StepResult(logits), rows_of(32, 7), list(range(32)), helpers)
