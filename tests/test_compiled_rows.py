"""Tokens that compiled code chooses of full rows, against the plain way."""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

import streamsrv
from engines.api import FloatArray, StepResult
from streamsrv import compiled_rows
from streamsrv.candidates import UNDECIDED
from streamsrv.compiled_rows import choose_compiled, load_kernels
from streamsrv.request import SamplingParams
from streamsrv.sampling import RowSampling, choose_in_full, sample
from tests.rows import KINDS_OF_PARAMS, KINDS_OF_ROWS

_SIZES = [16_384, 16_415, 49_152]
_NUM_ROWS = 24
_MANY = 30  # times as many rows with --all
KINDS = ["as it is", "temperature", "top_k", "top_p", "min_p", "all"]
LEAST_SHARE = 0.9
"""Of peaked rows that are decided, so that this way cannot fall into disuse unnoticed."""


@pytest.fixture(scope="module")
def helpers() -> Iterator[ThreadPoolExecutor]:
    """Threads, with the kernels loaded."""
    with ThreadPoolExecutor(2) as executor:
        assert load_kernels(executor).result() is not None, "numba is not installed"
        yield executor


def _rows(kind_of_rows: str, rng: np.random.Generator, size: int) -> FloatArray:
    logits = KINDS_OF_ROWS[kind_of_rows](rng, (_NUM_ROWS, size)).astype(np.float32)
    logits[0, rng.integers(0, size, size=size - 100)] = -np.inf  # few are possible
    logits[1] = np.where(np.arange(size) < size - 7, logits[1] - 5, logits[1] + 5)  # the best are last
    logits += rng.uniform(-20, 20, size=(_NUM_ROWS, 1)).astype(np.float32)
    return logits


def _compare(kind_of_rows: str, kind: str, size: int, number: int, helpers: ThreadPoolExecutor) -> float:
    """See that all that is decided is as the plain way has it. Returns how large a part that is."""
    rng = np.random.default_rng([*kind_of_rows.encode(), *kind.encode(), size, number])
    logits = _rows(kind_of_rows, rng, size)
    params = [KINDS_OF_PARAMS[kind](rng) for _ in logits]
    points = rng.random(_NUM_ROWS)
    points[2], points[3] = 0, np.nextafter(1, 0)
    places = rng.permutation(_NUM_ROWS)
    chosen = choose_compiled(logits, places, params, points, helpers)
    for i in np.flatnonzero(chosen != UNDECIDED):
        assert chosen[i] == choose_in_full(logits[places[i]], params[i], float(points[i])), params[i]
    return float(np.count_nonzero(chosen != UNDECIDED)) / _NUM_ROWS


@pytest.mark.parametrize("size", _SIZES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kind_of_rows", KINDS_OF_ROWS)
def test_what_is_decided_is_what_the_whole_row_gives(
    kind_of_rows: str, kind: str, size: int, helpers: ThreadPoolExecutor
) -> None:
    share = _compare(kind_of_rows, kind, size, 0, helpers)
    assert kind_of_rows != "peaked" or share > LEAST_SHARE


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kind_of_rows", KINDS_OF_ROWS)
def test_of_many_rows_what_is_decided_is_what_the_whole_row_gives(
    kind_of_rows: str, kind: str, helpers: ThreadPoolExecutor
) -> None:
    shares = [_compare(kind_of_rows, kind, _SIZES[1], 1 + i, helpers) for i in range(_MANY)]
    assert kind_of_rows != "peaked" or np.mean(shares) > LEAST_SHARE


def test_typical_p_is_left_to_others(helpers: ThreadPoolExecutor) -> None:
    logits = np.random.default_rng(0).normal(0, 4, (20, 16_384)).astype(np.float32)
    params = [SamplingParams(typical_p=0.5 if i % 2 else 1) for i in range(20)]
    chosen = choose_compiled(logits, np.arange(20), params, np.full(20, 0.5), helpers)
    assert [token_id == UNDECIDED for token_id in chosen] == [bool(i % 2) for i in range(20)]


@pytest.mark.parametrize("nonsense", [np.nan, -np.nan, np.inf])
@pytest.mark.parametrize("at", [0, 8_000, 16_384, 16_414])
@pytest.mark.parametrize("row", [0, 31])
def test_nonsense_is_noticed_wherever_it_stands(
    nonsense: float, at: int, row: int, helpers: ThreadPoolExecutor
) -> None:
    logits = np.zeros((32, 16_415), np.float32)
    logits[row, at] = nonsense
    with pytest.raises(ValueError, match="no finite maximum"):
        choose_compiled(logits, np.arange(32), [SamplingParams()] * 32, np.full(32, 0.5), helpers)


def test_a_row_of_which_nothing_is_possible_is_noticed(helpers: ThreadPoolExecutor) -> None:
    logits = np.zeros((32, 16_384), np.float32)
    logits[20] = -np.inf
    with pytest.raises(ValueError, match="no finite maximum"):
        choose_compiled(logits, np.arange(32), [SamplingParams()] * 32, np.full(32, 0.5), helpers)


def _mixed(rng: np.random.Generator, logits: FloatArray) -> list[RowSampling]:
    kinds = list(KINDS_OF_PARAMS)
    params = [KINDS_OF_PARAMS[kinds[i % len(kinds)]](rng) for i in range(len(logits))]
    plain = [replace(p, repetition_penalty=1, presence_penalty=0, frequency_penalty=0) for p in params]
    banned: list[tuple[int, ...]] = [
        (int(row.argmax()),) if i % 5 == 0 else () for i, row in enumerate(logits)
    ]
    return [RowSampling(p, np.random.default_rng([7, i]), banned[i]) for i, p in enumerate(plain)]


def test_a_steps_tokens_are_the_same_with_and_without(helpers: ThreadPoolExecutor) -> None:
    rng = np.random.default_rng(0)
    logits = np.concatenate([make(rng, (24, 20_000)) for make in KINDS_OF_ROWS.values()]).astype(np.float32)
    rows, again = (_mixed(np.random.default_rng(1), logits) for _ in range(2))
    with_kernels = sample(StepResult(logits.copy()), rows, helpers=helpers)
    assert with_kernels == sample(StepResult(logits), again)


@pytest.mark.parametrize("size", _SIZES)
def test_the_sum_of_masses_is_within_its_bounds(size: int, helpers: ThreadPoolExecutor) -> None:
    kernels = load_kernels(helpers).result()
    assert kernels is not None
    rng = np.random.default_rng(size)
    worst = 0.0
    for make in KINDS_OF_ROWS.values():
        for temperature in (0.05, 0.7, 1.0, 2.0):
            row: FloatArray = make(rng, (1, size))[0].astype(np.float32)
            top, temperature32 = row.max(), np.float32(temperature)
            exact: NDArray[np.float64] = np.exp((row.astype(np.float64) - top) / temperature32)
            plain = np.exp((row - top) / temperature32).sum(dtype=np.float64)
            total = kernels._sum_masses(row, top, temperature32)
            worst = max(worst, abs(total / exact.sum() - 1), abs(total / plain - 1))
    assert worst < kernels._TOTAL_SLACK / 2


def test_nothing_is_decided_where_the_kernels_cannot_be_loaded_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiled_rows, "_loading", None)
    monkeypatch.setitem(sys.modules, "streamsrv.row_kernels", None)
    monkeypatch.delattr(streamsrv, "row_kernels", raising=False)
    logits = np.random.default_rng(0).normal(0, 4, (20, 16_384)).astype(np.float32)
    with ThreadPoolExecutor(1) as executor:
        assert load_kernels(executor).result() is None
        chosen = choose_compiled(logits, np.arange(20), [SamplingParams()] * 20, np.full(20, 0.5), executor)
    assert (chosen == UNDECIDED).all()
    assert "numba" in caplog.text
