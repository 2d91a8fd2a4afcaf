"""Rows of logits, and how to choose from them, for tests that compare one way with another."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from streamsrv.request import SamplingParams


def _peaked(rng: np.random.Generator, shape: tuple[int, int]) -> NDArray[np.float64]:
    return rng.gumbel(size=shape) * rng.uniform(1, 4, size=(shape[0], 1))


def _flat(rng: np.random.Generator, shape: tuple[int, int]) -> NDArray[np.float64]:
    return rng.normal(size=shape) * 0.3


def _tied(rng: np.random.Generator, shape: tuple[int, int]) -> NDArray[np.float64]:
    return np.round(rng.normal(size=shape) * 3)


def _half_impossible(rng: np.random.Generator, shape: tuple[int, int]) -> NDArray[np.float64]:
    return np.where(
        rng.random(shape) < rng.choice([0.5, 0.97], size=(shape[0], 1)), -np.inf, _peaked(rng, shape)
    )


KINDS_OF_ROWS = {"peaked": _peaked, "flat": _flat, "tied": _tied, "half impossible": _half_impossible}

KINDS_OF_PARAMS: dict[str, Callable[[np.random.Generator], SamplingParams]] = {
    "greedy": lambda _: SamplingParams(temperature=0),
    "as it is": lambda _: SamplingParams(),
    "temperature": lambda rng: SamplingParams(temperature=rng.uniform(0.05, 2)),
    "top_k": lambda rng: SamplingParams(temperature=rng.uniform(0.05, 2), top_k=int(rng.integers(1, 80))),
    "top_p": lambda rng: SamplingParams(top_p=rng.uniform(0.05, 1)),
    "min_p": lambda rng: SamplingParams(temperature=rng.uniform(0.05, 1.5), min_p=rng.uniform(0.01, 1)),
    "typical_p": lambda rng: SamplingParams(
        temperature=rng.uniform(0.05, 1.5),
        top_k=int(rng.integers(0, 80)),
        top_p=rng.uniform(0.5, 1),
        typical_p=rng.uniform(0.05, 1),
    ),
    "all": lambda rng: SamplingParams(
        rng.uniform(0.05, 3), int(rng.integers(0, 100)), rng.uniform(0.05, 1), rng.uniform(0, 0.2)
    ),
    "all, penalised": lambda rng: SamplingParams(
        rng.choice([0, rng.uniform(0.05, 2)]),
        int(rng.integers(0, 100)),
        rng.uniform(0.05, 1),
        rng.uniform(0, 0.2),
        typical_p=rng.choice([1, rng.uniform(0.3, 1)]),
        repetition_penalty=rng.choice([1, 1.1, 1.5, 0.9], p=[0.3, 0.3, 0.3, 0.1]),
        presence_penalty=rng.choice([0, 0.5, 2, -1], p=[0.3, 0.3, 0.3, 0.1]),
        frequency_penalty=rng.choice([0, 0.5, 2, -1], p=[0.3, 0.3, 0.3, 0.1]),
    ),
}
