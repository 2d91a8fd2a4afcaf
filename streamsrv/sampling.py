"""From logits to tokens.

First a row is changed by what the request says of single tokens, in place. Then its tokens stand by falling
logit, of equal ones the lower id first. Every filter but the last, typical_p, keeps a beginning of that
order, and typical_p a stretch of it; a draw is a point in the mass of what is kept. `choose_in_full` does
that plainly, on a whole row. Where the beginning of the order tells what it would choose, `candidates`
chooses the same in less time, and without the whole row.
"""

import math
from collections.abc import Sequence as Seq
from concurrent.futures import Executor
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engines.api import Candidates, FloatArray, StepResult
from streamsrv.candidates import (
    UNDECIDED,
    Adjustment,
    Masses,
    choose_among,
    masses,
    place_of,
)
from streamsrv.compiled_rows import NO_FINITE_MAXIMUM
from streamsrv.constraint.mask import MaskArray, apply_mask
from streamsrv.full_rows import choose_among_best
from streamsrv.logit_changes import LogitChanges, changes_logits
from streamsrv.request import SamplingParams

NOTHING_LEFT = -2
"""In place of a token id: everything that was possible is forbidden."""

# Measured with 256 candidates of SmolLM2-135M on prose: without filters 88% of rows were decided at a
# temperature of 1, 41% at 1.1 and 24% at 1.2; the 256th logit lay 6.4 or more below the best in three rows of
# four, 7.7 in two.
_WARM = 1.1
_DEEP = 7.0


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How one row of logits becomes a token."""

    params: SamplingParams
    generator: np.random.Generator
    """The output's own, so that a seed means the same in any batch."""
    banned: tuple[int, ...] = ()
    """Ids that must not be chosen, besides those of the parameters."""
    changes: LogitChanges | None = None
    """The output's own; None only where its parameters make no changes."""
    mask: MaskArray | None = None
    """[num_mask_words(vocab_size)] what a constraint allows; None is all."""
    takes_best: bool = field(init=False)
    """It is the best token of the row as it is."""

    def __post_init__(self) -> None:
        """See that no change is forgotten."""
        object.__setattr__(self, "takes_best", self.is_unchanged and self.params.is_greedy)
        assert self.changes is not None or not changes_logits(self.params), "changes without their history"

    @property
    def is_unchanged(self) -> bool:
        """Whether the filters see the row as it is."""
        return not self.banned and self.changes is None and self.mask is None

    def draw_point(self) -> float:
        """Draw where its token lies in the mass of those kept, from 0 to 1; greedy draws nothing."""
        return 0.0 if self.params.is_greedy else self.generator.random()

    def change(self, logits: FloatArray) -> None:
        """Change a whole row [vocab_size] in place, up to the filters."""
        if self.changes is not None:
            self.changes.apply(logits)
        if self.banned:
            logits[list(self.banned)] = -np.inf
        if self.mask is not None:
            apply_mask(logits, self.mask)

    def change_candidates(self, token_ids: NDArray[np.int64], logits: FloatArray) -> int:
        """Change the `logits` [K] of some tokens [K] in place, as `change` does within the row.

        Returns how many of them may be worse than they were, or are banned, but for the mask.
        """
        num_lowered = 0 if self.changes is None else self.changes.apply_to(token_ids, logits)
        if self.banned:
            is_banned = np.isin(token_ids, self.banned)
            logits[is_banned] = -np.inf
            num_lowered += int(np.count_nonzero(is_banned))
        if self.mask is not None:
            bits = self.mask[token_ids >> 5] >> (token_ids & 31).astype(np.uint32)
            logits[bits & 1 == 0] = -np.inf
        return num_lowered

    def adjustment(self) -> Adjustment | None:
        """Tell what becomes of candidates."""
        if self.is_unchanged:
            return None
        num_lowered, nums_allowed = len(self.banned), []
        if self.mask is not None:
            nums_allowed.append(int(np.bitwise_count(self.mask).sum()))
        if self.changes is not None:
            num_lowered += self.changes.num_lowered
            if len(self.changes.allowed_ids):
                nums_allowed.append(len(self.changes.allowed_ids))
        return Adjustment(self.change_candidates, num_lowered, min(nums_allowed, default=None))


def needs_full_row(row: RowSampling, num_candidates: int, *, will_have_mask: bool = False) -> bool:
    """Whether a row's best tokens are seldom enough, as far as its parameters tell.

    A matter of time alone: a row that turns out to be needed is fetched later.
    """
    params, num_left = row.params, num_candidates - len(row.banned)
    changes = row.changes
    if changes is not None:
        if changes.may_raise:
            return True
        num_left -= len(changes.banned_ids)
    if num_left < 1:
        return True
    if params.is_greedy or 0 < params.top_k <= num_left:
        return False
    # min_p keeps what is at most this far below the best logit.
    if params.min_p > 0 and -params.temperature * math.log(params.min_p) <= _DEEP:
        return False
    # Without those the mass beyond the candidates counts, which must be known well.
    is_restricted = row.mask is not None or will_have_mask or (changes is not None and not changes.is_slight)
    return params.temperature > _WARM or is_restricted or (params.typical_p < 1 and params.top_p == 1)


def sample(
    result: StepResult,
    rows: Seq[RowSampling],
    at: Seq[int] | None = None,
    helpers: Executor | None = None,
) -> list[int]:
    """Choose a token for each of `rows`: from its candidates, if there are any and they are enough.

    Row i is that of `result` at index `at[i]`, each at most once; without `at`, they are all of them. Rows of
    `result.logits` that are looked at are changed in place. Where everything is forbidden that the model
    holds for possible, the token is `NOTHING_LEFT`. A helper, if there are any, shares the work on many full
    rows: the engine is idle meanwhile.

    Raises:
        ValueError: a row has no finite best logit; the engine computed nonsense.

    """
    points = np.array([0.0 if row.takes_best else row.draw_point() for row in rows])
    places = np.arange(len(rows)) if at is None else np.asarray(at, np.int64)
    if result.candidates is None:
        chosen: list[int] = _choose_in_full_rows(result.logits, places, rows, points, helpers).tolist()
        return chosen
    candidates = result.candidates
    if at is not None:
        candidates = Candidates(
            candidates.token_ids[places], candidates.logits[places], candidates.logsumexp[places]
        )
    _check_finite(candidates.logits[:, 0])
    _check_finite(candidates.logsumexp)  # not finite if any logit of the row is nonsense
    token_ids = np.full(len(rows), UNDECIDED, np.int64)
    told = [i for i, row in enumerate(rows) if row.changes is None or not row.changes.may_raise]
    if told:
        of_told = Candidates(candidates.token_ids, candidates.logits, candidates.logsumexp)
        if len(told) < len(rows):
            of_told = Candidates(
                candidates.token_ids[told], candidates.logits[told], candidates.logsumexp[told]
            )
        token_ids[told] = choose_among(
            of_told,
            result.logits.shape[1],
            [rows[i].params for i in told],
            [rows[i].adjustment() for i in told],
            points[told],
        )
    missing = np.flatnonzero(token_ids == UNDECIDED)
    if len(missing):
        assert result.fetch is not None, "whoever gives candidates gives full rows, too"
        result.fetch(places[missing].astype(np.int32))
        token_ids[missing] = _choose_in_full_rows(
            result.logits, places[missing], [rows[int(i)] for i in missing], points[missing], helpers
        )
    return [int(token_id) for token_id in token_ids]


def _choose_in_full_rows(
    logits: FloatArray,
    places: NDArray[np.int64],
    rows: Seq[RowSampling],
    points: Masses,
    helpers: Executor | None,
) -> NDArray[np.int64]:
    if len(rows) == len(logits) and all(row.takes_best for row in rows):
        # All at once: of short rows a call for each takes longer than the look at it.
        bests: NDArray[np.int64] = logits.argmax(axis=1)[places]
        _check_finite(logits[places, bests])
        return bests
    token_ids = np.full(len(rows), UNDECIDED, np.int64)
    for i, row in enumerate(rows):
        each = logits[places[i]]
        if row.is_unchanged and not row.params.is_greedy:
            continue  # its best is looked at below
        best = each.argmax()
        if not np.isfinite(each[best]):
            raise ValueError(NO_FINITE_MAXIMUM)
        if not row.is_unchanged:
            row.change(each)
            best = each.argmax()
        if each[best] == -np.inf:
            token_ids[i] = NOTHING_LEFT
        elif row.params.is_greedy:
            token_ids[i] = best
    drawn = np.flatnonzero(token_ids == UNDECIDED)
    if len(drawn):
        params = [rows[int(i)].params for i in drawn]
        token_ids[drawn] = choose_among_best(logits, places[drawn], params, points[drawn], helpers)
    for i in map(int, np.flatnonzero(token_ids == UNDECIDED)):
        token_ids[i] = choose_in_full(logits[places[i]], rows[i].params, float(points[i]))
    return token_ids


def choose_in_full(logits: FloatArray, params: SamplingParams, point: float) -> int:
    """Choose a token of a whole row [vocab_size] that is not greedy: temperature, the filters, the point.

    The filters and their order are those of Hugging Face transformers' warpers, each on the distribution
    that the one before leaves. Ties at the border of top_k are kept, as there; top_p keeps the first token
    that crosses the border.
    """
    negated = np.sort(-logits)
    each = masses(-negated, -negated[0], params.temperature)
    below = np.cumsum(each.astype(np.float64))  # of each and its betters
    kept = below[-1]
    if 0 < params.top_k < len(each):
        kept = below[np.count_nonzero(each >= each[params.top_k - 1]) - 1]
    if params.top_p < 1:
        kept = below[np.searchsorted(below, params.top_p * kept)]
    kept = min(kept, below[np.count_nonzero(each >= np.float32(params.min_p)) - 1])
    place = place_of(point, float(kept), each, below, params)
    num_equal_before = place - np.searchsorted(negated, negated[place])
    return int(np.flatnonzero(logits == -negated[place])[num_equal_before])


def _check_finite(values: FloatArray) -> None:
    if not np.isfinite(values).all():
        raise ValueError(NO_FINITE_MAXIMUM)
