"""Choosing tokens by the beginning of each row's order, as far as that tells."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from engines.api import Candidates, FloatArray
from streamsrv.request import SamplingParams

UNDECIDED = -1
"""In place of a token id: it takes the whole row to tell."""

Masses: TypeAlias = NDArray[np.float64]
"""Sums of probabilities that are not normalised: of exp((logit - best logit) / temperature)."""

SLACK = 3e-5
"""Bounds the relative error of a mass that a sum in float32, or its logarithm, has given.

The logarithm may be wrong by 2e-5, as `Candidates` says; the rest is what float32 loses here.
"""
_WITH_SLACK = np.array([[1 - SLACK], [1 + SLACK]])
_LARGEST_EXPONENT = 700.0  # of exp in float64
LEAST_TEMPERATURE = np.float32(1e-30)
"""The best token alone has any mass long before."""


@dataclass(frozen=True, slots=True)
class Adjustment:
    """What becomes of a row's candidates, and of the tokens beyond them, before the filters."""

    change: Callable[[NDArray[np.int64], FloatArray], int]
    """Changes the logits [K] of the tokens [K] in place; tokens that are not allowed get minus infinity.

    Returns how many of `num_lowered` are among them. It makes no token better than it was.
    """
    num_lowered: int
    """Tokens of the vocabulary, at most, that may be worse than they were; `num_allowed` tells of others."""
    num_allowed: int | None = None
    """Tokens of the vocabulary, at most, that are allowed; None where nearly all are."""


def temperatures_of(params: Seq[SamplingParams]) -> FloatArray:
    """The temperatures of rows [R], none of them 0."""
    return np.maximum(np.array([p.temperature for p in params], np.float32), LEAST_TEMPERATURE)


class Beginnings:
    """The best tokens of each of R rows, by falling logit: K, or the first `counts` of K places.

    The mass of all tokens that are kept is only known between two bounds, but everything grows with it: if
    both bounds lead to the same token, so does what lies between. The masses and their sums are bit for bit
    those that the whole row has at its beginning.
    """

    def __init__(
        self,
        token_ids: NDArray[np.int64],
        logits: FloatArray,
        params: Seq[SamplingParams],
        counts: NDArray[np.int64] | None = None,
    ) -> None:
        """`token_ids` and `logits` are [R, K], of equal logits the lower id first.

        The logits of places that are not used are minus infinity.
        """
        self._counts = np.full(len(params), logits.shape[1]) if counts is None else counts
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
        # Beyond what is known, the token that crosses the border is no better than the last that is known.
        last = np.take_along_axis(each, np.maximum(self._counts - 1, 0)[:, None], axis=1)[:, 0]
        crossed = np.stack((wanted[0], wanted[1] + last))
        beyond = np.maximum(np.minimum(crossed, kept), self.known)
        kept = np.where(top_p < 1, np.where(wanted <= self.known, reached, beyond), kept)

        kept = self._keep(kept, np.count_nonzero(each >= min_p[:, None], axis=1), min_p > 0)

        # A product may be rounded up to the whole of what is kept, but its token is not beyond that.
        places = np.minimum(
            np.count_nonzero(below <= (points * kept)[..., None], axis=2),
            np.count_nonzero(below < kept[..., None], axis=2),
        )
        is_certain = (places[0] == places[1]) & (places[1] < size) & (self.known > 0)
        for i, params in enumerate(self._params):
            if params.typical_p < 1 and not params.is_greedy:
                is_certain[i] = kept[0, i] == kept[1, i] <= self.known[i] and self.known[i] > 0
                if is_certain[i]:
                    places[0, i] = place_of(points[i], kept[0, i], each[i], below[i], params)
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


def place_of(point: float, kept: float, each: FloatArray, below: Masses, params: SamplingParams) -> int:
    """Where in a row's order the token of a point stands, if the best tokens of a mass `kept` are left.

    `each` and `below` are the masses of the row's tokens, and those of each and its betters.
    """
    last = int(np.searchsorted(below, kept))
    skipped = 0.0
    if params.typical_p < 1:
        first, last = _typical(each[: last + 1], params.typical_p)
        skipped = float(below[first - 1]) if first else 0.0
        kept = float(below[last])
    # A product may be rounded up to the whole of what is kept, but its token is not beyond that.
    return min(int(np.searchsorted(below, skipped + point * (kept - skipped), side="right")), last)


def _typical(each: FloatArray, typical_p: float) -> tuple[int, int]:
    """The first and the last place of those that typical_p keeps of tokens with falling masses.

    They have the surprises that are closest to the expected one (Meister et al., arXiv 2202.00666), so they
    stand side by side. All that are as close as the last one that is needed are kept.
    """
    p = each / each.sum(dtype=np.float64)
    with np.errstate(divide="ignore"):
        surprises = -np.log(p)
    expected = (p[p > 0] * surprises[p > 0]).sum()
    distances = np.abs(surprises - expected)
    order = np.argsort(distances, kind="stable")
    num_needed = int(np.count_nonzero(np.cumsum(p[order]) < typical_p))
    kept = np.flatnonzero(distances <= distances[order[min(num_needed, len(p) - 1)]])
    return int(kept[0]), int(kept[-1])


def choose_among(
    candidates: Candidates,
    vocab_size: int,
    params: Seq[SamplingParams],
    adjustments: Seq[Adjustment | None],
    points: Masses,
) -> NDArray[np.int64]:
    """Choose a token id for each row of an engine's candidates, or `UNDECIDED`."""
    token_ids, logits = candidates.token_ids, candidates.logits
    num_rows, num_candidates = logits.shape
    counts = np.full(num_rows, num_candidates)
    rest = _Rest(candidates, vocab_size)
    if any(adjustments):
        token_ids, logits = token_ids.copy(), logits.copy()
    sunk: list[tuple[int, FloatArray]] = []
    for i, adjustment in enumerate(adjustments):
        if adjustment is None:
            continue
        old, new = candidates.logits[i], logits[i]
        num_lowered = adjustment.num_lowered - adjustment.change(token_ids[i], new)
        is_allowed = np.isfinite(new)
        rest.lower(i, num_lowered)
        if adjustment.num_allowed is not None:
            rest.restrict(i, adjustment.num_allowed - int(np.count_nonzero(is_allowed)))
        # A token that became worse than the last candidate may be worse than others that are not here.
        is_placed = is_allowed
        if rest.nums[i]:
            is_placed = is_allowed & ((new > old[-1]) | ((new == old[-1]) & (old == old[-1])))
            if is_placed.any():  # else it is undecided
                sunk.append((i, new[is_allowed & ~is_placed]))
        order = np.lexsort((token_ids[i], -new, ~is_placed))
        token_ids[i], logits[i] = token_ids[i, order], new[order]
        counts[i] = np.count_nonzero(is_placed)
        logits[i, counts[i] :] = -np.inf
    beginnings = Beginnings(token_ids, logits, params, counts)
    others = rest.masses(beginnings.tops, beginnings.temperatures)
    for i, values in sunk:
        others[:, i] += masses(values, beginnings.tops[i], beginnings.temperatures[i]).sum(dtype=np.float64)
    return beginnings.choose(beginnings.known + others * _WITH_SLACK, points)


class _Rest:
    """The tokens beyond the candidates of each row: how many may be chosen, and bounds of their mass.

    Let w be what each of n tokens has at temperature 1, as a part of the last candidate's: w <= 1, and the
    sum m of them follows from the logsumexp. At temperature t they have w ** (1 / t), and the sum of these
    lies between m, because no w is above 1, and n * (m / n) ** (1 / t), by Jensen's inequality.
    """

    def __init__(self, candidates: Candidates, vocab_size: int) -> None:
        self._last = candidates.logits[:, -1]
        probabilities = np.exp(candidates.logits - candidates.logsumexp[:, None])
        missing = 1 - probabilities.sum(axis=1, dtype=np.float64)
        self._sums = np.stack((missing - SLACK, np.maximum(missing, 0) + SLACK))  # at least, at most
        self._of_last = probabilities[:, -1]
        self._per_last = np.exp(
            np.minimum(candidates.logsumexp.astype(np.float64) - self._last, _LARGEST_EXPONENT)
        )
        self.nums = np.full(len(self._last), vocab_size - candidates.logits.shape[1])
        """[R] how many there are at most."""

    def lower(self, i: int, count: int) -> None:
        """Take account of as many tokens of row `i` at most that may be worse than they were."""
        self._sums[0, i] -= count * self._of_last[i]

    def restrict(self, i: int, count: int) -> None:
        """Take account of all others being forbidden in row `i`."""
        self._sums[0, i] = 0
        self.nums[i] = min(self.nums[i], max(0, count))

    @np.errstate(over="ignore")  # by a temperature that is next to nothing
    def masses(self, tops: FloatArray, temperatures: Masses) -> Masses:
        """Bound the mass of each row's: [2, R], at least and at most, as parts of that of the best token."""
        most = np.maximum(self.nums, 1)
        ones = np.minimum(np.maximum(self._sums, 0) * self._per_last, self.nums)
        others = most * (ones / most) ** (1 / temperatures)
        rest: Masses = np.stack((np.minimum(ones[0], others[0]), np.maximum(ones[1], others[1])))
        rest *= masses(np.minimum(self._last, tops), tops, temperatures)
        return rest


@np.errstate(over="ignore")
def masses(
    logits: FloatArray, top: FloatArray | np.float32, temperature: Masses | FloatArray | float
) -> FloatArray:
    """Masses of tokens, as parts of that of the top logit. In float32: a tenth of the time of float64."""
    exponents = logits - top
    exponents /= np.maximum(np.float32(temperature), LEAST_TEMPERATURE)
    np.exp(exponents, out=exponents)
    return exponents
