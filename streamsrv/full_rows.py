"""Choosing tokens of full rows of logits by their best tokens, without putting the rows in order."""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from concurrent.futures import Executor
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from engines.api import FloatArray
from streamsrv.candidates import (
    SLACK,
    UNDECIDED,
    Beginnings,
    Masses,
    masses,
    temperatures_of,
)
from streamsrv.compiled_rows import NO_FINITE_MAXIMUM, choose_compiled
from streamsrv.halves import in_halves
from streamsrv.request import SamplingParams

# How many of a row's best tokens are looked at, first and then, before all of it is put in order.
_NUMS_BEST = (64, 2048)
# Rows taken together. NumPy lets go of the interpreter for as long as a call takes, so that another thread
# can look at other rows: two threads take 0.6 of one's time with 8 rows of 50,000 logits a call, and 0.7
# with 2.
_NUM_TOGETHER = 8
_MOST_FOLDS = 64
# What the order of its parts changes in a sum in float64 is less by far.
_EXACT_SLACK = 1e-10
_LOWEST = np.finfo(np.float32).min
_SAFE_EXPONENT = 50.0  # exp of it, and the sum of a row of them, is far from the ends of float32
_BITS = np.int32(0x7FFFFFFF)
# Sorts behind all others; its logit is minus infinity.
_LAST_KEY = np.int64((~(np.float32(-np.inf).view(np.int32) ^ _BITS)).astype(np.int64) << 32 | 0xFFFFFFFF)

_Found: TypeAlias = tuple[NDArray[np.int64], NDArray[np.int64], FloatArray]
"""Tokens of rows: how many each has, their ids row by row, ascending, and their logits."""


def choose_among_best(
    logits: FloatArray,
    places: NDArray[np.int64],
    params: Seq[SamplingParams],
    points: Masses,
    helpers: Executor | None = None,
) -> NDArray[np.int64]:
    """Choose a token id for each of some rows of `logits` [N, vocab_size], none of them greedy.

    Row i is that at `places[i]`. It is `UNDECIDED` where it takes the whole row in order to tell. A helper,
    if there are any, looks at half of many rows.

    Raises:
        ValueError: a row has no finite best logit.

    """
    token_ids = choose_compiled(logits, places, params, points, helpers)
    temperatures = temperatures_of(params)
    for num_best in _NUMS_BEST:
        is_last = num_best == _NUMS_BEST[-1]
        is_open = (token_ids == UNDECIDED) & np.array([is_last or p.top_k <= num_best for p in params])
        tried = np.flatnonzero(is_open)
        if not len(tried):
            continue
        of_tried = [params[int(i)] for i in tried]
        # What the others keep does not depend on the mass of all.
        is_summed = np.array(
            [not (0 < p.top_k <= num_best or (p.min_p > 0 and p.top_p == 1)) for p in of_tried]
        )
        look = _Look(logits, places[tried], num_best, temperatures[tried], is_summed, exact=is_last)
        look.look(helpers)
        beginnings = Beginnings(*look.in_order(), of_tried)
        slack = _EXACT_SLACK if is_last else SLACK
        least = np.where(is_summed, look.sums * (1 - slack), 0)
        most = np.where(is_summed, look.sums * (1 + slack), beginnings.known + logits.shape[1])
        bounds = np.maximum(np.stack((least, most)), beginnings.known)
        token_ids[tried] = beginnings.choose(bounds, points[tried])
    return token_ids


class _Look:
    """A look at R rows: their best tokens, and how much mass there is in all."""

    def __init__(
        self,
        logits: FloatArray,
        places: NDArray[np.int64],
        num_best: int,
        temperatures: FloatArray,
        is_summed: NDArray[np.bool_],
        *,
        exact: bool,
    ) -> None:
        """`is_summed` [R] says of which rows the mass is asked for, and `exact` that a bound will not do."""
        self._logits = logits
        self._places = places
        self._num_best = num_best
        self._temperatures = temperatures
        self._is_summed = is_summed
        self._exact = exact
        self.sums = np.full(len(places), np.nan)
        """[R] the masses that were asked for."""

    def look(self, helpers: Executor | None) -> None:
        """Look at the rows."""
        halves = in_halves(self._look_at, len(self._places), helpers)
        found = [part for half in halves for part in half]
        self._counts = np.concatenate([counts for counts, _, _ in found])
        self._ids = np.concatenate([ids for _, ids, _ in found])
        self._best = np.concatenate([logits for _, _, logits in found])

    def in_order(self) -> tuple[NDArray[np.int64], FloatArray]:
        """Put each row's best in order: [R, K] by falling logit, of equal ones the lower id first.

        Where fewer than K are possible, impossible ones follow.
        """
        # The bits of a float, if it is not negative, or else their complement but for the sign, are in order.
        bits = (self._best + np.float32(0)).view(np.int32)  # no negative zero
        in_order = ~(bits ^ (bits >> 31 & _BITS)).astype(np.int64)
        keys = np.full((len(self._counts), max(self._num_best, int(self._counts.max()))), _LAST_KEY)
        keys[np.arange(keys.shape[1]) < self._counts[:, None]] = in_order << 32 | self._ids
        keys.sort(axis=1)
        keys = keys[:, : self._num_best]
        bits = (~(keys >> 32)).astype(np.int32)
        return keys & 0xFFFFFFFF, (bits ^ (bits >> 31 & _BITS)).view(np.float32)

    def _look_at(self, part: slice) -> list[_Found]:
        scratch = np.empty((_NUM_TOGETHER, self._logits.shape[1]), np.float32)
        found = []
        for first, end in _runs(self._places, part):
            rows = self._logits[self._places[first] : self._places[first] + (end - first)]
            tops, least = _least_of_best(rows, self._num_best)
            found.append(_find(rows, least))
            if self._is_summed[first:end].any():
                temperatures = self._temperatures[first:end]
                if self._exact:
                    each = masses(rows, tops[:, None], temperatures[:, None])
                    self.sums[first:end] = each.sum(axis=1, dtype=np.float64)
                else:
                    self.sums[first:end] = _sums_of_masses(rows, tops, temperatures, scratch[: end - first])
        return found


def _least_of_best(rows: FloatArray, num_best: int) -> tuple[FloatArray, FloatArray]:
    """Each row's best logit, and one that at least `num_best` of its tokens reach; but few more do."""
    size = rows.shape[1]
    if num_best * 4 > size:
        tops, last = rows.max(axis=1), max(0, size - num_best)
        least = np.partition(rows, last, axis=1)[:, last]
    else:
        # So many columns have a token that is at least as good.
        num_folds = min(_MOST_FOLDS, size // (4 * num_best))
        columns = rows[:, : size // num_folds * num_folds].reshape(len(rows), num_folds, -1)
        bests = columns.max(axis=1)
        tops = np.maximum(bests.max(axis=1), rows[:, columns[0].size :].max(axis=1, initial=-np.inf))
        least = np.partition(bests, -num_best, axis=1)[:, -num_best]
    if not np.isfinite(tops).all():
        raise ValueError(NO_FINITE_MAXIMUM)
    return tops, least


def _find(rows: FloatArray, least: FloatArray) -> _Found:
    """Find each row's tokens that are possible and reach its `least`."""
    found = np.flatnonzero(rows >= np.maximum(least, _LOWEST)[:, None])
    size = rows.shape[1]
    of_row = found // size
    return np.bincount(of_row, minlength=len(rows)), found - of_row * size, rows.reshape(-1)[found]


def _runs(places: NDArray[np.int64], part: slice) -> Iterator[tuple[int, int]]:
    """Part some `places` into those that lie side by side, few together: the first, and the one behind."""
    first, stop, _ = part.indices(len(places))
    for i in range(first + 1, stop + 1):
        if i == stop or places[i] != places[i - 1] + 1 or i - first == _NUM_TOGETHER:
            yield first, i
            first = i


def _sums_of_masses(
    rows: FloatArray, tops: FloatArray, temperatures: FloatArray, scratch: FloatArray
) -> Masses:
    """Sum the masses of each row's tokens, to one part in `1 / SLACK`; all of [R] and [R, vocab_size]."""
    exponents = tops / temperatures
    if np.abs(exponents).max() < _SAFE_EXPONENT:
        # Nothing that matters leaves float32 where the best is not brought to zero first: a pass less.
        np.multiply(rows, 1 / temperatures[:, None], out=scratch)
        np.exp(scratch, out=scratch)
        sums: Masses = _sums(scratch) * np.exp(-exponents.astype(np.float64))
        return sums
    return _sums(masses(rows, tops[:, None], temperatures[:, None]))


def _sums(values: FloatArray) -> Masses:
    """Sum each row [R, N]: in columns first, which is faster than along the row, and as exact."""
    size = values.shape[1] // _MOST_FOLDS * _MOST_FOLDS
    columns = values[:, :size].reshape(len(values), _MOST_FOLDS, -1).sum(axis=1)
    sums = columns.sum(axis=1, dtype=np.float64) + values[:, size:].sum(axis=1, dtype=np.float64)
    return np.asarray(sums, np.float64)
