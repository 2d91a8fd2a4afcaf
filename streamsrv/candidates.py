"""Choosing tokens by the beginning of each row's order, as far as that tells."""

from collections.abc import Sequence as Seq
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from engines.api import Candidates, FloatArray
from streamsrv.request import SamplingParams

UNDECIDED = -1
"""In place of a token id: it takes the whole row to tell."""

Masses: TypeAlias = NDArray[np.float64]
"""Sums of probabilities that are not normalised: of exp((logit - best logit) / temperature)."""

# Bounds the relative error of a mass that a sum in float32, or its logarithm, has given: the 2e-5 that
# `Candidates` may have, and what float32 loses here.
_SLACK = 3e-5
_WIDER = np.array([[1 - _SLACK], [1 + _SLACK]])
_LARGEST_EXPONENT = 700.0  # of exp in float64
_LEAST_TEMPERATURE = np.float32(1e-30)  # the best token alone has any mass long before


class Beginnings:
    """The K best tokens of each of R rows, by falling logit, without those that are banned.

    The mass of all tokens that are kept is only known between two bounds, but everything grows with it: if
    both bounds lead to the same token, so does what lies between. The masses and their sums are bit for bit
    those that the whole row has at its beginning.
    """

    def __init__(
        self,
        token_ids: NDArray[np.int64],
        logits: FloatArray,
        params: Seq[SamplingParams],
        banned: Seq[tuple[int, ...]],
    ) -> None:
        """`token_ids` and `logits` are [R, K], of equal logits the lower id first."""
        self._counts = np.full(len(params), logits.shape[1])  # how many are not banned
        restricted = [i for i, ids in enumerate(banned) if ids]
        if restricted:
            token_ids, logits = token_ids.copy(), logits.copy()
        for i in restricted:
            is_banned = np.isin(token_ids[i], banned[i])
            self._counts[i] -= np.count_nonzero(is_banned)
            order = np.argsort(is_banned, kind="stable")  # they go to the end, and have no mass there
            token_ids[i], logits[i] = token_ids[i, order], logits[i, order]
            logits[i, self._counts[i] :] = -np.inf
        self._token_ids = token_ids
        self._params = params
        self.temperatures = np.array([1.0 if p.is_greedy else p.temperature for p in params])
        """[R]"""
        self.tops = np.where(np.isfinite(logits[:, 0]), logits[:, 0], np.float32(0))
        """[R] the best logits."""
        self._each = masses(logits, self.tops[:, None], self.temperatures[:, None])
        self._below = np.cumsum(self._each.astype(np.float64), axis=1)  # of each and its betters

    @property
    def known(self) -> Masses:
        """[R] the mass of what is here."""
        return self._below[:, -1]

    def choose(self, totals: Masses, points: Masses) -> NDArray[np.int64]:
        """Choose a token id for each row, or `UNDECIDED`: top_k, top_p, min_p, then the point.

        `totals` [2, R] bound the mass of all tokens that are not banned: at least, at most.
        """
        top_k = np.array([p.top_k for p in self._params])
        top_p = np.array([p.top_p for p in self._params])
        min_p = np.array([p.min_p for p in self._params], np.float32)
        each, below, size = self._each, self._below, self._each.shape[1]

        kth = np.take_along_axis(each, np.clip(top_k - 1, 0, size - 1)[:, None], axis=1)
        num_best = np.where(top_k <= self._counts, np.count_nonzero(each >= kth, axis=1), size)
        kept = self._keep(totals, num_best, top_k > 0)

        wanted = top_p * kept
        reached = self._mass_of(np.count_nonzero(below < wanted[..., None], axis=2) + 1)
        beyond = np.stack((self.known, kept[1]))
        kept = np.where(top_p < 1, np.where(wanted <= self.known, reached, beyond), kept)

        kept = self._keep(kept, np.count_nonzero(each >= min_p[:, None], axis=1), min_p > 0)

        # A product may be rounded up to the whole of what is kept, but its token is not beyond that.
        places = np.minimum(
            np.count_nonzero(below <= (points * kept)[..., None], axis=2),
            np.count_nonzero(below < kept[..., None], axis=2),
        )
        is_certain = (places[0] == places[1]) & (places[1] < size) & (self.known > 0)
        token_ids = self._token_ids[np.arange(len(points)), np.minimum(places[0], size - 1)]
        return np.where(is_certain, token_ids, UNDECIDED)

    def _keep(self, kept: Masses, num_best: NDArray[np.intp], is_on: NDArray[np.bool_]) -> Masses:
        """Keep the `num_best` best at most; if all that are here are among them, so may be others."""
        mass = self._mass_of(num_best)
        most = np.where(num_best < self._counts, np.minimum(kept[1], mass), kept[1])
        return np.where(is_on, np.stack((np.minimum(kept[0], mass), most)), kept)

    def _mass_of(self, num_best: NDArray[np.intp]) -> Masses:
        rows, size = np.arange(len(self._counts)), self._below.shape[1]
        return self._below[rows, np.clip(num_best, 1, size) - 1]


def choose_among(
    candidates: Candidates,
    vocab_size: int,
    params: Seq[SamplingParams],
    banned: Seq[tuple[int, ...]],
    points: Masses,
) -> NDArray[np.int64]:
    """Choose a token id for each row of an engine's candidates, or `UNDECIDED`."""
    beginnings = Beginnings(candidates.token_ids, candidates.logits, params, banned)
    num_banned = np.array([len(ids) for ids in banned])
    return beginnings.choose(_totals(beginnings, candidates, vocab_size, num_banned), points)


@np.errstate(over="ignore")  # by a temperature that is next to nothing
def _totals(
    beginnings: Beginnings, candidates: Candidates, vocab_size: int, num_banned: NDArray[np.intp]
) -> Masses:
    """Bound the mass of all tokens that are not banned: [2, R], at least and at most.

    Let w be what each of the n tokens beyond the candidates has at temperature 1, as a part of the last
    candidate's: w <= 1, and the sum m of them follows from the logsumexp. At temperature t they have
    w ** (1 / t), and the sum of these lies between m, because no w is above 1, and n * (m / n) ** (1 / t), by
    Jensen's inequality.
    """
    num_rest = vocab_size - candidates.logits.shape[1]
    if num_rest == 0:
        return np.stack((beginnings.known, beginnings.known))
    probabilities = np.exp(candidates.logits - candidates.logsumexp[:, None])
    missing = 1 - probabilities.sum(axis=1, dtype=np.float64)
    least = np.maximum(missing - _SLACK - num_banned * probabilities[:, -1], 0)
    most = np.maximum(missing, 0) + _SLACK
    last = candidates.logits[:, -1]
    per_last = np.exp(np.minimum(candidates.logsumexp.astype(np.float64) - last, _LARGEST_EXPONENT))
    ones = np.minimum(np.stack((least, most)) * per_last, num_rest)
    others = num_rest * (ones / num_rest) ** (1 / beginnings.temperatures)
    rest = np.stack((np.minimum(ones[0], others[0]), np.maximum(ones[1], others[1])))
    rest *= masses(np.minimum(last, beginnings.tops), beginnings.tops, beginnings.temperatures)
    totals: Masses = beginnings.known + rest * _WIDER
    return totals


def choose_among_best(
    rows: Seq[FloatArray], num_best: int, params: Seq[SamplingParams], points: Masses
) -> NDArray[np.int64]:
    """Choose a token id for each full row by its `num_best` best tokens, or `UNDECIDED`.

    That spares putting the whole row in order.
    """
    ids = np.stack([_best(row, num_best) for row in rows])
    logits = np.stack([row[best] for row, best in zip(rows, ids, strict=True)])
    beginnings = Beginnings(ids, logits, params, [()] * len(rows))
    each = zip(rows, beginnings.tops, beginnings.temperatures, strict=True)
    totals = np.array([masses(row, top, temperature).sum() for row, top, temperature in each])
    return beginnings.choose(np.maximum(totals * _WIDER, beginnings.known), points)


def _best(row: FloatArray, most: int) -> NDArray[np.int64]:
    count = min(most, len(row))
    ids = np.flatnonzero(row >= np.partition(row, -count)[-count])  # every tie at the border, too
    return ids[np.argsort(-row[ids], kind="stable")[:count]]


@np.errstate(over="ignore")
def masses(logits: FloatArray, top: FloatArray | np.float32, temperature: Masses | float) -> FloatArray:
    """Masses of tokens, as parts of that of the top logit. In float32: a tenth of the time of float64."""
    exponents = logits - top
    exponents /= np.maximum(np.float32(temperature), _LEAST_TEMPERATURE)
    np.exp(exponents, out=exponents)
    return exponents
