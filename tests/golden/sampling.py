"""What the golden distributions are of: rows of logits, parameters, and the tokens so far."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from streamsrv.request import SamplingParams

GOLDEN_SAMPLING = Path(__file__).with_name("sampling.npz")
"""`[ROWS_EACH, VOCAB_SIZE]` float32 by a case's name: what is left of each token's probability; made by
make_sampling.py."""

VOCAB_SIZE = 600
ROWS_EACH = 4


@dataclass(frozen=True, slots=True)
class Past:
    """The tokens before a row."""

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]


@cache
def rows() -> NDArray[np.float32]:
    """`[ROWS_EACH, VOCAB_SIZE]` from peaked to flat."""
    random = np.random.default_rng(2024)
    spreads = np.array([[1.6], [1.3], [1.0], [0.5]])
    return np.asarray(random.gumbel(size=(ROWS_EACH, VOCAB_SIZE)) * spreads - 3, np.float32)


def past(row: NDArray[np.float32]) -> Past:
    """Draw the tokens before a row, many of them among its best."""
    random = np.random.default_rng(int(row.view(np.uint32)[0]))
    best = np.argsort(-row)
    prompt, output = random.integers(0, 200, size=60), np.minimum(random.geometric(0.05, size=40), 500)
    return Past(tuple(best[prompt].tolist()), tuple(best[output].tolist()))


def _biases(num: int) -> tuple[tuple[int, float], ...]:
    best = np.argsort(-rows()[0])[:num]
    return tuple((int(token_id), (-1.0) ** i * (1 + i % 4)) for i, token_id in enumerate(best))


def _best_of_each(num: int) -> frozenset[int]:
    return frozenset(int(token_id) for row in rows() for token_id in np.argsort(-row)[:num])


CASES = {
    "none": SamplingParams(),
    "temperature": SamplingParams(temperature=0.6),
    "hot": SamplingParams(temperature=1.7),
    "top_k": SamplingParams(top_k=17),
    "top_p": SamplingParams(top_p=0.83),
    "min_p": SamplingParams(min_p=0.07),
    "typical_p": SamplingParams(typical_p=0.6),
    "little typical_p": SamplingParams(typical_p=0.2),
    "repetition": SamplingParams(repetition_penalty=1.3),
    "wanted repetition": SamplingParams(repetition_penalty=0.8),
    "presence": SamplingParams(presence_penalty=0.7),
    "frequency": SamplingParams(frequency_penalty=0.4),
    "wanted presence": SamplingParams(presence_penalty=-0.5, frequency_penalty=-0.1),
    "bias": SamplingParams(logit_bias=_biases(50)),
    "banned": SamplingParams(banned_token_ids=_best_of_each(9)),
    "allowed": SamplingParams(allowed_token_ids=_best_of_each(20)),
    "filters": SamplingParams(temperature=0.9, top_k=60, top_p=0.95, min_p=0.01),
    "all filters": SamplingParams(temperature=0.9, top_k=60, top_p=0.95, min_p=0.01, typical_p=0.7),
    "typical of few": SamplingParams(temperature=1.2, top_k=30, typical_p=0.9),
    "penalties": SamplingParams(repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2),
    "penalties and filters": SamplingParams(
        temperature=0.8, top_k=40, top_p=0.9, repetition_penalty=1.15, frequency_penalty=0.3
    ),
    "bias and repetition": SamplingParams(logit_bias=_biases(30), repetition_penalty=1.4, top_p=0.9),
    "everything": SamplingParams(
        temperature=0.75,
        top_k=80,
        top_p=0.97,
        min_p=0.002,
        typical_p=0.9,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.1,
        logit_bias=_biases(20),
        banned_token_ids=_best_of_each(2),
        allowed_token_ids=_best_of_each(90),
    ),
}
