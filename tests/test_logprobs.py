"""Log probabilities of a row against a plain log-softmax."""

import numpy as np
import pytest
from numpy.typing import NDArray

from engines.api import FloatArray
from streamsrv.logprobs import RowLogprobs


def log_softmax(logits: FloatArray) -> NDArray[np.float64]:
    """By definition, in float64."""
    shifted = logits.astype(np.float64) - logits.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))


def name(token_id: int) -> bytes:
    return b"<%d>" % token_id


def never(token_id: int) -> bytes:
    raise AssertionError(f"the text of token {token_id} is not wanted")


@pytest.mark.parametrize("scale", [0.01, 1, 5, 50])
@pytest.mark.parametrize("size", [7, 320, 49_152])
def test_every_tokens_log_probability_is_that_of_a_plain_log_softmax(scale: float, size: int) -> None:
    random = np.random.default_rng(size)
    logits = (random.normal(size=size) * scale + random.uniform(-50, 50)).astype(np.float32)
    expected, known = log_softmax(logits), RowLogprobs(logits, 0, never)
    for token_id in (0, size - 1, int(logits.argmax()), int(logits.argmin())):
        told = known.of(token_id)
        assert told.logprob == pytest.approx(expected[token_id], abs=1e-5)
        assert told.top is None


@pytest.mark.parametrize("num_top", [1, 5, 20])
def test_the_most_probable_come_first_and_of_equal_ones_the_lower_id(num_top: int) -> None:
    logits = np.round(np.random.default_rng(0).normal(size=500) * 3).astype(np.float32)
    expected = log_softmax(logits)
    ids = np.lexsort((np.arange(500), -logits))[:num_top]
    told = RowLogprobs(logits, num_top, name).of(3)
    assert told.top is not None
    assert told.top.token_ids == tuple(ids)
    np.testing.assert_allclose(told.top.logprobs, expected[ids], atol=1e-6)
    assert told.top.texts == tuple(name(int(token_id)) for token_id in ids)


def test_more_of_the_most_probable_than_there_are_tokens_are_all() -> None:
    told = RowLogprobs(np.array([1, 3, 2], np.float32), 20, name).of(0)
    assert told.top is not None
    assert told.top.token_ids == (1, 2, 0)


def test_what_is_told_is_of_the_row_before_it_was_changed() -> None:
    logits = np.array([1, 2, 3, 4], np.float32)
    expected = log_softmax(logits)
    known = RowLogprobs(logits, 0, never)
    logits[:] = -np.inf
    assert [known.of(i).logprob for i in range(4)] == pytest.approx(expected.tolist())


def test_impossible_tokens_have_no_part_and_a_row_of_one_possible_token_has_it_surely() -> None:
    logits = np.full(50, -np.inf, np.float32)
    logits[7] = -3
    told = RowLogprobs(logits, 2, name).of(7)
    assert told.logprob == 0
    assert told.top is not None
    assert told.top.logprobs == (0, -np.inf)


@pytest.mark.parametrize("nonsense", [np.nan, np.inf, -np.inf])
def test_nonsense_is_left_to_whoever_samples_the_row(nonsense: float) -> None:
    RowLogprobs(np.full(10, nonsense, np.float32), 3, name)
