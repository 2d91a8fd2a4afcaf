"""From logits to tokens."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engines.api import FloatArray
from streamsrv.request import SamplingParams

# Tokens whose logit, after the temperature, lies further than this below the row's best have a joint
# probability under vocab_size * exp(-NEGLIGIBLE): for 262,144 tokens 1.1e-8, less than float32 resolves
# beside 1. Without them a row has a few hundred candidates instead of its whole vocabulary.
NEGLIGIBLE = 30.0


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How one row of logits becomes a token."""

    params: SamplingParams
    generator: np.random.Generator
    """The output's own, so that a seed means the same in any batch."""
    banned: tuple[int, ...] = ()
    """Ids that must not be chosen."""


def sample(logits: FloatArray, rows: Seq[RowSampling]) -> list[int]:
    """Choose a token for each row of `logits` [R, vocab_size], which is left as it is but for banned ids.

    Raises:
        ValueError: a row has no finite best logit; the engine computed nonsense.

    """
    assert len(logits) == len(rows)
    for i, row in enumerate(rows):
        if row.banned:
            logits[i, list(row.banned)] = -np.inf
    best = logits.argmax(axis=1)
    tops = logits[np.arange(len(rows)), best]
    if not np.isfinite(tops).all():
        raise ValueError("a row of logits has no finite maximum")
    return [
        int(best[i]) if row.params.is_greedy else _draw(logits[i], float(tops[i]), row)
        for i, row in enumerate(rows)
    ]


def _draw(logits: FloatArray, top: float, row: RowSampling) -> int:
    floor = top - NEGLIGIBLE * row.params.temperature
    ids = np.flatnonzero(logits >= floor)
    kept = filter_candidates(logits[ids], row.params)
    return int(ids[draw(kept, row.generator)])


def filter_candidates(logits: FloatArray, params: SamplingParams) -> NDArray[np.float64]:
    """Probabilities [N] of the candidates after temperature, top_k, top_p and min_p; 0 for those dropped.

    The order, and each filter on the distribution that the one before leaves, as Hugging Face transformers'
    warpers have it. Ties at the border of top_k are kept, as there; top_p keeps the first token that
    crosses the border.
    """
    scores = logits.astype(np.float64) / params.temperature
    if 0 < params.top_k < len(scores):
        scores[scores < np.partition(scores, -params.top_k)[-params.top_k]] = -np.inf
    p = _softmax(scores)
    if params.top_p < 1:
        order = np.argsort(-p, kind="stable")
        below = np.cumsum(p[order]) - p[order]  # the mass of those that are better
        p[order[below >= params.top_p]] = 0
        p /= p.sum()
    if params.min_p > 0:
        p[p < params.min_p * p.max()] = 0
        p /= p.sum()
    return p


def draw(p: NDArray[np.float64], generator: np.random.Generator) -> int:
    """An index of `p` [N], drawn with its probability by one uniform number of the generator."""
    cumulative = np.cumsum(p)
    at = np.searchsorted(cumulative, generator.random() * cumulative[-1], side="right")
    return int(min(at, np.flatnonzero(p)[-1]))


def _softmax(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    e = np.exp(scores - scores.max())
    p: NDArray[np.float64] = e / e.sum()
    return p
