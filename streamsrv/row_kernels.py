"""Compiled choosing of tokens of full rows, where only temperature, top_k, top_p and min_p filter them.

Importing this takes numba: a quarter of a second, and another second or two where nothing is compiled yet.
"""

import math
from collections.abc import Callable
from typing import TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

from engines.api import FloatArray
from streamsrv.candidates import UNDECIDED

_Function = TypeVar("_Function", bound=Callable[..., object])

# Tokens in a column: every so many-th of a row is looked at to tell where the best of it are.
_NUM_FOLDS = 32
# How many of a row's best tokens are put in order, until they tell.
_NUMS_BEST = (64, 256, 1024)
_ROOM = 4096  # tokens; more than those can be as good only where many are equal
_WIDTH = 64  # tokens whose masses are taken together: what lies between stays in the nearest cache
# More than the plain way and this one can differ by, relatively: in the sum of all masses, where the series
# below, exponents of float32 and sums of it add up to 5e-6; and in that of the best, where the plain way
# takes an exponential of float32, to 3e-7, and this way one of float64.
_TOTAL_SLACK = 6e-6
_SLACK = 1e-6

_LOG2_E = np.float32(1.4426950408889634)
# The smallest power of two that is a normal float32; what is less is as good as nothing beside a best of one.
_LEAST_EXPONENT = np.float32(-126)
_ONE, _HALF = np.float32(1), np.float32(0.5)
_EXPONENT_BIAS, _EXPONENT_PLACE = np.int32(127), np.int32(23)
# The Taylor series of 2**x, which is wrong by 2e-7 of it at most where x is between -1/2 and 1/2.
_C1, _C2, _C3, _C4, _C5, _C6 = (np.float32(math.log(2) ** n / math.factorial(n)) for n in range(1, 7))
_LOWEST = np.finfo(np.float32).min
_NUM_HALVINGS = 256  # enough to go from the lowest to any other number

# Sums in any order, and products added in one step; but nonsense must stay nonsense.
_FASTMATH = {"reassoc", "contract", "nsz"}
_ROW, _ROWS = (numba.types.Array(numba.float32, num_axes, "C", readonly=True) for num_axes in (1, 2))
_INTS, _FLOATS, _DOUBLES = numba.int64[::1], numba.float32[::1], numba.float64[::1]


def _compiled(signature: object) -> Callable[[_Function], _Function]:
    """Compile a function; it lets go of the interpreter while it runs."""

    def compiled(function: _Function) -> _Function:
        options = {"nogil": True, "fastmath": _FASTMATH}
        try:
            return cast(_Function, numba.njit(signature, cache=True, **options)(function))
        except RuntimeError:  # there is no folder that it may keep what is compiled in
            return cast(_Function, numba.njit(signature, **options)(function))

    return compiled


# Ranges begin at 0 and go by 1 where it matters: others are not compiled to instructions for many numbers at
# once.


@_compiled(numba.float32(_ROW, _FLOATS))
def _find_maxima(row: FloatArray, maxima: FloatArray) -> np.float32:
    """Find the best logit of each column, and of all; NaN if any is."""
    num_columns = len(maxima)
    is_nonsense = np.int32(0)
    maxima[:] = -np.inf
    for fold in range(_NUM_FOLDS):
        for column in range(num_columns):
            logit = row[fold * num_columns + column]
            is_nonsense |= np.int32(logit != logit)
            maxima[column] = max(maxima[column], logit)
    for column in range(len(row) - _NUM_FOLDS * num_columns):
        logit = row[_NUM_FOLDS * num_columns + column]
        is_nonsense |= np.int32(logit != logit)
        maxima[column] = max(maxima[column], logit)
    top = np.float32(-np.inf)
    for column in range(num_columns):
        top = max(top, maxima[column])
    return np.float32(np.nan) if is_nonsense else top


@_compiled(numba.float64(_ROW, numba.float32, numba.float32))
def _sum_masses(row: FloatArray, top: np.float32, temperature: np.float32) -> float:
    """Sum exp((logit - top) / temperature)."""
    fractions, bits = np.empty(_WIDTH, np.float32), np.empty(_WIDTH, np.int32)
    powers = bits.view(np.float32)
    factor, total = _LOG2_E / temperature, 0.0
    for part in range(len(row) // _WIDTH):
        for j in range(_WIDTH):
            exponent = max((row[part * _WIDTH + j] - top) * factor, _LEAST_EXPONENT)
            whole = np.floor(exponent + _HALF)
            x = exponent - whole
            fractions[j] = _ONE + x * (_C1 + x * (_C2 + x * (_C3 + x * (_C4 + x * (_C5 + x * _C6)))))
            bits[j] = (np.int32(whole) + _EXPONENT_BIAS) << _EXPONENT_PLACE
        of_part = np.float32(0)
        for j in range(_WIDTH):
            of_part += fractions[j] * powers[j]
        total += np.float64(of_part)
    for j in range(len(row) % _WIDTH):
        total += np.exp(np.float64((row[len(row) - 1 - j] - top) / temperature))
    return total


@_compiled(numba.float32(_FLOATS, numba.float32, numba.int64))
def _least_of_best(maxima: FloatArray, top: np.float32, num_best: int) -> np.float32:
    """Find a logit that at least `num_best` columns reach, and few more."""
    least, above = top, top
    for column in range(len(maxima)):
        least = min(least, maxima[column])
    least = max(least, _LOWEST)
    for _ in range(_NUM_HALVINGS):
        middle = least * _HALF + above * _HALF
        num_reaching = 0
        for column in range(len(maxima)):
            num_reaching += maxima[column] >= middle
        if num_reaching < num_best:
            above = middle
        else:
            least = middle
            if num_reaching <= num_best + num_best // 8:
                break
    return least


@_compiled(numba.int64(_ROW, _FLOATS, numba.float32, _INTS, _FLOATS))
def _gather(
    row: FloatArray, maxima: FloatArray, least: np.float32, token_ids: NDArray[np.int64], logits: FloatArray
) -> int:
    """Find the tokens that reach `least`. Returns how many; those that there is no room for are left out."""
    count = 0
    for column in range(len(maxima)):
        if maxima[column] < least:
            continue
        for token_id in range(column, len(row), len(maxima)):
            if row[token_id] >= least:
                if count < len(logits):
                    token_ids[count] = token_id
                    logits[count] = row[token_id]
                count += 1
    return count


@_compiled(numba.void(_INTS, _FLOATS, numba.int64))
def _put_in_order(token_ids: NDArray[np.int64], logits: FloatArray, count: int) -> None:
    """Put the first `count` in order: by falling logit, of equal ones the lower id first. A comb sort."""
    gap, is_ordered = count, False
    while not is_ordered:
        gap = max(1, gap * 10 // 13)
        is_ordered = gap == 1
        for i in range(count - gap):
            j = i + gap
            if logits[i] < logits[j] or (logits[i] == logits[j] and token_ids[i] > token_ids[j]):
                logits[i], logits[j] = logits[j], logits[i]
                token_ids[i], token_ids[j] = token_ids[j], token_ids[i]
                is_ordered = False


@_compiled(numba.int64(_DOUBLES, numba.int64, numba.float64))
def _first_reaching(below: NDArray[np.float64], count: int, mass: float) -> int:
    """Find the first place by which there is that mass, or `count`."""
    first, end = 0, count
    while first < end:
        middle = (first + end) // 2
        if below[middle] < mass:
            first = middle + 1
        else:
            end = middle
    return first


@_compiled(
    numba.int64(
        *(_FLOATS, numba.int64, numba.float64, numba.float32),
        *(numba.int64, numba.float64, numba.float64, numba.float64, _DOUBLES),
    )
)
def _place(
    logits: FloatArray,
    count: int,
    total: float,
    temperature: np.float32,
    top_k: int,
    top_p: float,
    min_p: float,
    point: float,
    below: NDArray[np.float64],
) -> int:
    """Tell where the token of a point stands among the best `count` of a row, or `UNDECIDED`.

    As `Beginnings.choose` does: bounds of the mass that is kept become bounds of what the filters keep.
    """
    mass, each, num_possible = 0.0, 0.0, 0
    kth, num_of_k = np.float32(0), 0
    for i in range(count):
        exponent = (logits[i] - logits[0]) / temperature
        before, each = each, np.exp(np.float64(exponent))
        mass += each
        below[i] = mass
        if i < top_k or exponent == kth:  # ties at the border are kept
            kth, num_of_k = exponent, i + 1
        elif i == num_of_k and each > before * (1 - _SLACK) and top_k > 0:
            return UNDECIDED  # it may be a tie when it is rounded
        if each >= min_p * (1 + _SLACK):
            num_possible = i + 1
        elif each > min_p * (1 - _SLACK):
            return UNDECIDED
    least, most = total * (1 - _TOTAL_SLACK), total * (1 + _TOTAL_SLACK)
    if top_k > 0:
        if num_of_k == count:
            return UNDECIDED  # others may belong to them
        least = most = below[num_of_k - 1]
    if top_p < 1:
        wanted_least, wanted_most = top_p * least * (1 - _SLACK), top_p * most * (1 + _SLACK)
        place = _first_reaching(below, count, wanted_least)
        least = below[place] if place < count else wanted_least
        place = _first_reaching(below, count, wanted_most)
        # Beyond what is known, the token that crosses the border is no better than the last that is known.
        most = below[place] if place < count else min(most, wanted_most + each)
    if num_possible < count:
        most = min(most, below[num_possible - 1])
        least = min(least, most)
    elif min_p > 0:
        least = min(least, mass)
    place = _first_reaching(below, count, point * least * (1 - _SLACK))
    if place == count or place != _first_reaching(below, count, point * most * (1 + _SLACK)):
        return UNDECIDED
    return place


@_compiled(
    numba.boolean(
        *(_ROWS, _INTS, _FLOATS, _INTS, _DOUBLES, _DOUBLES, _DOUBLES, _INTS),
    )
)
def choose(
    logits: FloatArray,
    places: NDArray[np.int64],
    temperatures: FloatArray,
    top_k: NDArray[np.int64],
    top_p: NDArray[np.float64],
    min_p: NDArray[np.float64],
    points: NDArray[np.float64],
    chosen: NDArray[np.int64],
) -> bool:
    """Choose a token id, or `UNDECIDED`, for R rows, those of `logits` [N, vocab_size] at `places`.

    All else is [R]: what filters them, none of the temperatures 0, where in the mass of what is kept the
    token lies, and `chosen`, which is filled in. Returns whether all rows have a finite best logit.
    """
    size = logits.shape[1]
    maxima = np.empty(size // _NUM_FOLDS, np.float32)
    token_ids, bests, below = np.empty(_ROOM, np.int64), np.empty(_ROOM, np.float32), np.empty(_ROOM)
    for i in range(len(places)):
        row = logits[places[i]]
        top = _find_maxima(row, maxima)
        if not np.isfinite(top):
            return False
        # What top_k keeps does not depend on the mass of all.
        total = 0.0 if 0 < top_k[i] < _NUMS_BEST[-1] else _sum_masses(row, top, temperatures[i])
        chosen[i] = UNDECIDED
        for num_best in _NUMS_BEST:
            if top_k[i] >= num_best:
                continue
            count = _gather(row, maxima, _least_of_best(maxima, top, num_best), token_ids, bests)
            if count > _ROOM:
                break
            _put_in_order(token_ids, bests, count)
            place = _place(
                bests, count, total, temperatures[i], top_k[i], top_p[i], min_p[i], points[i], below
            )
            if place != UNDECIDED:
                chosen[i] = token_ids[place]
                break
    return True
