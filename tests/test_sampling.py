"""The fast sampler against the plain one: every filter on the whole row, as its definition says."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from streamsrv.request import SamplingParams
from streamsrv.sampling import RowSampling, draw, sample


def plain_probabilities(logits: NDArray[np.float32], params: SamplingParams) -> NDArray[np.float64]:
    """Temperature, top_k, top_p, min_p over the whole row, each by its definition; the oracle."""
    p = np.exp(logits.astype(np.float64) / params.temperature - logits.max() / params.temperature)
    p /= p.sum()
    if params.top_k:
        kth = np.sort(p)[::-1][min(params.top_k, len(p)) - 1]
        p = np.where(p >= kth, p, 0)
        p /= p.sum()
    kept, mass = np.zeros_like(p), 0.0
    for i in np.argsort(-p, kind="stable"):
        if params.top_p < 1 and mass >= params.top_p:
            break
        kept[i] = p[i]
        mass += p[i]
    p = kept / kept.sum()
    p = np.where(p >= params.min_p * p.max(), p, 0)
    p /= p.sum()
    return p


def plain_sample(logits: NDArray[np.float32], params: SamplingParams, seed: int) -> int:
    return draw(plain_probabilities(logits, params), np.random.default_rng(seed))


params_strategy = st.builds(
    SamplingParams,
    temperature=st.floats(0.05, 5),
    top_k=st.integers(0, 60),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 1),
)


@given(params=params_strategy, seed=st.integers(0, 2**32), scale=st.floats(0.1, 20))
@settings(max_examples=500, deadline=None)
def test_a_sampled_token_is_that_of_the_plain_sampler(
    params: SamplingParams, seed: int, scale: float
) -> None:
    logits = (np.random.default_rng(seed).normal(size=(1, 500)) * scale).astype(np.float32)
    expected = plain_sample(logits[0], params, seed)
    assert sample(logits, [RowSampling(params, np.random.default_rng(seed))]) == [expected]


def test_greedy_takes_the_best_and_draws_nothing() -> None:
    logits = np.array([[0, 3, 1], [5, 4, 4]], np.float32)
    generators = [np.random.default_rng(1), np.random.default_rng(2)]
    rows = [RowSampling(SamplingParams(temperature=0), g) for g in generators]
    assert sample(logits, rows) == [1, 0]
    assert generators[0].random() == np.random.default_rng(1).random()


def test_a_seed_gives_the_same_tokens_alone_and_in_a_mixed_batch() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(8, 300)).astype(np.float32) * 4
    params = [SamplingParams(temperature=0.2 + i / 4, top_k=i * 5, top_p=1 - i / 10) for i in range(8)]
    together = sample(logits.copy(), [RowSampling(p, np.random.default_rng(i)) for i, p in enumerate(params)])
    alone = [
        sample(logits[i : i + 1].copy(), [RowSampling(p, np.random.default_rng(i))])[0]
        for i, p in enumerate(params)
    ]
    assert together == alone


def test_draws_follow_the_distribution() -> None:
    params = SamplingParams(temperature=0.7, top_p=0.9)
    logits = np.array([[2.0, 1.5, 1.0, 0.0, -1.0, -3.0]], np.float32)
    generator = np.random.default_rng(5)
    counts = np.zeros(6)
    for _ in range(20_000):
        counts[sample(logits, [RowSampling(params, generator)])[0]] += 1
    expected = plain_probabilities(logits[0], params)
    # Five standard deviations of a binomial count; the seed is fixed.
    bound = 5 * np.sqrt(20_000 * expected * (1 - expected)) + 1e-9
    assert (np.abs(counts - 20_000 * expected) <= bound).all()
    assert expected[4] == counts[4] == 0


def test_a_banned_token_is_never_chosen() -> None:
    logits = np.array([[9, 1, 0], [9, 1, 0]], np.float32)
    rows = [
        RowSampling(SamplingParams(temperature=t), np.random.default_rng(0), banned=(0,)) for t in (0.0, 5.0)
    ]
    assert 0 not in sample(logits, rows)


def test_nonsense_logits_are_noticed() -> None:
    logits = np.full((1, 4), np.nan, np.float32)
    with pytest.raises(ValueError, match="finite"):
        sample(logits, [RowSampling(SamplingParams(), np.random.default_rng(0))])
