"""The sampler against each filter's definition, and its fast ways against the plain one."""

import copy
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engines.api import Candidates, FloatArray, IntArray, StepResult
from streamsrv.logit_changes import LogitChanges
from streamsrv.request import SamplingParams
from streamsrv.sampling import NOTHING_LEFT, RowSampling, choose_in_full, needs_full_row, sample
from tests.golden import sampling as golden
from tests.rows import KINDS_OF_PARAMS, KINDS_OF_ROWS


def masses_kept(logits: FloatArray, params: SamplingParams) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """Ids by falling logit, and each one's probability after all filters, by definition; the oracle."""
    order = np.argsort(-logits, kind="stable")
    p = np.exp((logits[order].astype(np.float64) - logits.max()) / params.temperature)
    p /= p.sum()
    if params.top_k:
        p[p < p[min(params.top_k, len(p)) - 1]] = 0
        p /= p.sum()
    if params.top_p < 1:
        p[np.cumsum(p) - p >= params.top_p] = 0
        p /= p.sum()
    p[p < params.min_p * p.max()] = 0
    p /= p.sum()
    if params.typical_p < 1:
        kept = p > 0
        surprise = np.where(kept, -np.log(np.where(kept, p, 1)), np.inf)
        distances = np.abs(surprise - (p * np.where(kept, surprise, 0)).sum())
        closest = np.argsort(distances, kind="stable")
        needed = int(np.count_nonzero(np.cumsum(p[closest]) < params.typical_p))
        p[distances > distances[closest[min(needed, len(p) - 1)]]] = 0
    return order, p / p.sum()


def changed(logits: FloatArray, row: RowSampling) -> FloatArray:
    """A whole row after what comes before the filters, by definition; the oracle."""
    params, logits = row.params, logits.copy()
    for token_id, bias in params.logit_bias:
        logits[token_id] += np.float32(bias)
    history = row.changes.history if row.changes is not None else None
    ids, counts = (history.ids, history.counts) if history is not None else ((), ())
    for token_id, count in zip(ids, counts, strict=True):
        x, penalty = logits[token_id], np.float32(params.repetition_penalty)
        x = x * penalty if x < 0 else x / penalty
        if count:
            x = x - np.float32(params.frequency_penalty) * count - np.float32(params.presence_penalty)
        logits[token_id] = x
    forbidden = set(row.banned) | params.banned_token_ids
    for token_id in range(len(logits)):
        masked = row.mask is not None and not row.mask[token_id // 32] >> (token_id % 32) & 1
        excluded = params.allowed_token_ids and token_id not in params.allowed_token_ids
        if masked or excluded or token_id in forbidden:
            logits[token_id] = -np.inf
    return logits


def near(logits: FloatArray, params: SamplingParams, point: float) -> set[int]:
    """The tokens that a point may mean: the sampler's masses are of float32."""
    order, p = masses_kept(logits, params)
    ends = np.searchsorted(
        np.cumsum(p), (point - 1e-5, min(point + 1e-5, p.sum() * (1 - 1e-9))), side="right"
    )
    return {int(i) for i in order[ends[0] : ends[1] + 1]}


@dataclass
class FarLogits:
    """Rows of logits of which an engine gives the best tokens, and the rest on demand."""

    rows: FloatArray
    num_candidates: int
    lse_errors: NDArray[np.float64] | None = None
    fetched: list[list[int]] = field(default_factory=list)

    def result(self, full_rows: Sequence[int] = ()) -> StepResult:
        """What a step gives, with `full_rows` in full."""
        ids = np.stack([np.lexsort((np.arange(len(r)), -r))[: self.num_candidates] for r in self.rows])
        top = self.rows.max(axis=1).astype(np.float64)
        lse = top + np.log(np.exp(self.rows - top[:, None]).sum(axis=1))
        lse += 0 if self.lse_errors is None else self.lse_errors
        best = np.take_along_axis(self.rows, ids, axis=1)
        logits = np.full_like(self.rows, np.nan)
        logits[list(full_rows)] = self.rows[list(full_rows)]

        def fetch(indices: IntArray) -> None:
            self.fetched.append(indices.tolist())
            logits[indices] = self.rows[indices]

        return StepResult(logits, Candidates(ids, best, lse.astype(np.float32)), fetch)


def plainly(logits: FloatArray, row: RowSampling) -> int:
    """Choose on the whole row alone, by the plain way."""
    logits = changed(logits, row)
    if logits.max() == -np.inf:
        row.draw_point()
        return NOTHING_LEFT
    if row.params.is_greedy:
        return int(logits.argmax())
    return choose_in_full(logits, row.params, row.generator.random())


def full(logits: FloatArray) -> StepResult:
    return StepResult(logits.copy())


params_strategy = st.builds(
    SamplingParams,
    temperature=st.floats(0.05, 5),
    top_k=st.sampled_from([0, *range(2, 60)]),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 1),
    typical_p=st.one_of(st.just(1.0), st.floats(0.01, 1)),
)


@given(params=params_strategy, seed=st.integers(0, 2**32), scale=st.floats(0.1, 20))
@settings(max_examples=500, deadline=None)
def test_a_sampled_token_is_what_the_filters_definitions_say(
    params: SamplingParams, seed: int, scale: float
) -> None:
    logits = (np.random.default_rng(seed).normal(size=(1, 500)) * scale).astype(np.float32)
    expected = near(logits[0], params, np.random.default_rng(seed).random())
    assert sample(full(logits), [RowSampling(params, np.random.default_rng(seed))])[0] in expected


# ---------------------------------------------------------------------------------------------------------
# The filters and changes against Hugging Face transformers'


class Fixed(np.random.Generator):
    """Draws one number, always."""

    def __init__(self, number: float) -> None:
        super().__init__(np.random.PCG64())
        self._number = number

    def random(self, *_args: object, **_kwargs: object) -> float:  # type: ignore[override]
        return self._number


def changes_after(params: SamplingParams, past: golden.Past) -> LogitChanges | None:
    """What an output changes that has these tokens."""
    changes = LogitChanges.of(params, past.prompt_ids)
    if changes is not None:
        for token_id in past.output_ids:
            changes.push(token_id)
    return changes


@pytest.mark.parametrize("name", golden.CASES)
@pytest.mark.parametrize("num_candidates", [0, 64])
def test_each_token_has_the_part_of_the_draws_that_transformers_gives_it(
    name: str, num_candidates: int
) -> None:
    params = golden.CASES[name]
    with np.load(golden.GOLDEN_SAMPLING) as file:
        expected = file[name]
    for logits, p in zip(golden.rows(), expected, strict=True):
        changes = changes_after(params, golden.past(logits))
        order = np.argsort(-p, kind="stable")[: np.count_nonzero(p)]
        ends = np.cumsum(p[order].astype(np.float64))
        tolerance = 1e-6
        told = np.flatnonzero(p[order] > 3 * tolerance)  # at both of a token's ends it is this token
        points = np.concatenate([ends[told] - p[order[told]] + tolerance, ends[told] - tolerance])
        rows = [RowSampling(params, Fixed(float(point)), (), changes) for point in points]
        tiled = np.repeat(logits[None], len(points), axis=0)
        result = FarLogits(tiled, num_candidates).result() if num_candidates else full(tiled)
        assert sample(result, rows) == [*order[told], *order[told]]


@pytest.mark.parametrize(
    "name",
    [name for name, params in golden.CASES.items() if params.typical_p == 1],  # it may drop the best
)
def test_the_best_of_what_transformers_keeps_is_the_greedy_choice(name: str) -> None:
    with np.load(golden.GOLDEN_SAMPLING) as file:
        expected = file[name]
    params = replace(golden.CASES[name], temperature=0, top_k=0, top_p=1, min_p=0, typical_p=1)
    for logits, p in zip(golden.rows(), expected, strict=True):
        changes = changes_after(params, golden.past(logits))
        row = RowSampling(params, np.random.default_rng(0), (), changes)
        assert sample(full(logits[None]), [row]) == sample(FarLogits(logits[None], 64).result(), [row])
        assert sample(full(logits[None]), [row]) == [p.argmax()]


# ---------------------------------------------------------------------------------------------------------
# The fast ways against the plain one


_VOCAB, _NUM_ROWS = 2000, 120
SHARES = {
    "greedy": 1.0,
    "as it is": 0.95,
    "temperature": 0.5,
    "top_k": 0.99,
    "top_p": 0.95,
    "min_p": 0.99,
    "typical_p": 0.8,
    "all": 0.95,
    "all, penalised": 0.3,
}
"""Of rows decided by 256 candidates, at least, so that these cannot fall into disuse unnoticed."""


def _rows(rng: np.random.Generator, kind: str, logits: FloatArray) -> list[RowSampling]:
    """Samplings of rows: some with banned tokens, or changed by what the kinds of parameters have not."""
    rows = []
    for i in range(len(logits)):
        worst_first = np.argsort(logits[i])

        def often_best(most: int, worst_first: NDArray[np.intp] = worst_first) -> list[int]:
            places = _VOCAB - 1 - rng.integers(0, rng.choice([4, _VOCAB]), size=rng.integers(1, most))
            return sorted({int(token_id) for token_id in worst_first[places]})

        banned = tuple(often_best(5)) if rng.random() < 0.2 else ()
        params = KINDS_OF_PARAMS[kind](rng)
        mask = None
        if "penalised" in kind:
            biases = rng.normal(size=50) * rng.choice([0.5, 5]) - rng.choice([0, 20])
            params = replace(
                params,
                logit_bias=tuple(zip(often_best(50), biases.tolist(), strict=False)) * (rng.random() < 0.4),
                banned_token_ids=frozenset(often_best(50)) if rng.random() < 0.3 else frozenset(),
            )
            if rng.random() < 0.2:
                allowed = frozenset(often_best(100))
                params = replace(
                    params, allowed_token_ids=allowed, banned_token_ids=params.banned_token_ids - allowed
                )
            if rng.random() < 0.4:
                share = rng.choice([0.001, 0.1, 0.5, 0.99])
                mask = np.packbits(rng.random((_VOCAB + 31) // 32 * 32) < share, bitorder="little").view(
                    np.uint32
                )
        changes = LogitChanges.of(params, often_best(200)) if "penalised" in kind else None
        if changes is not None:
            for token_id in often_best(100) * 2:
                changes.push(token_id)
        generator = np.random.default_rng(int(rng.integers(2**32)))
        rows.append(RowSampling(params, generator, banned, changes, mask))
    return rows


def _again(rows: list[RowSampling]) -> list[RowSampling]:
    """The same with generators that stand where those stand."""
    return [replace(r, generator=copy.deepcopy(r.generator)) for r in rows]


@pytest.mark.parametrize("num_candidates", [8, 64, 256])
@pytest.mark.parametrize("kind", KINDS_OF_PARAMS)
@pytest.mark.parametrize("kind_of_rows", KINDS_OF_ROWS)
def test_candidates_and_full_rows_give_the_token_that_the_whole_row_gives(
    kind_of_rows: str, kind: str, num_candidates: int
) -> None:
    rng = np.random.default_rng([*kind_of_rows.encode(), *kind.encode(), num_candidates])
    logits = KINDS_OF_ROWS[kind_of_rows](rng, (_NUM_ROWS, _VOCAB)).astype(np.float32)
    logits += rng.uniform(-20, 20, size=(_NUM_ROWS, 1)).astype(np.float32)
    # The errors that `Candidates` allow, and a little less for their rounding to float32.
    far = FarLogits(logits, num_candidates, rng.uniform(-1.8e-5, 1.8e-5, size=_NUM_ROWS))
    rows = _rows(rng, kind, logits)
    plain, by_candidates, by_full_rows = _again(rows), _again(rows), _again(rows)
    expected = [plainly(logits[i], row) for i, row in enumerate(plain)]
    assert sample(far.result(), by_candidates) == expected
    assert sample(full(logits), by_full_rows) == expected
    nexts = [[row.generator.random() for row in rows] for rows in (plain, by_candidates, by_full_rows)]
    assert nexts[0] == nexts[1] == nexts[2]
    if num_candidates == 256:
        share = 1 - sum(map(len, far.fetched)) / _NUM_ROWS
        assert share >= SHARES[kind] * (kind_of_rows != "flat" or kind in ("greedy", "top_k", "all"))


@pytest.mark.parametrize("size", [16_383, 16_384, 20_011])
@pytest.mark.parametrize("kind_of_rows", KINDS_OF_ROWS)
def test_rows_too_long_to_look_at_each_tokens_mass_give_the_same(kind_of_rows: str, size: int) -> None:
    rng = np.random.default_rng([*kind_of_rows.encode(), size])
    for kind in KINDS_OF_PARAMS:
        logits = KINDS_OF_ROWS[kind_of_rows](rng, (12, size)).astype(np.float32)
        logits[0, rng.integers(0, size, size=size - 100)] = -np.inf  # few are possible
        logits[1] = np.where(np.arange(size) < size - 7, logits[1] - 5, logits[1] + 5)  # the best are last
        logits += rng.uniform(-20, 20, size=(12, 1)).astype(np.float32)
        rows = [
            RowSampling(
                replace(params, repetition_penalty=1, presence_penalty=0, frequency_penalty=0), generator
            )
            for params, generator in (
                (KINDS_OF_PARAMS[kind](rng), np.random.default_rng(int(rng.integers(2**32)))) for _ in logits
            )
        ]
        expected = [plainly(each, row) for each, row in zip(logits, _again(rows), strict=True)]
        assert sample(full(logits), rows) == expected


def test_all_candidates_are_enough_for_every_row() -> None:
    rng = np.random.default_rng(0)
    for kind_of_rows in KINDS_OF_ROWS.values():
        for kind in KINDS_OF_PARAMS:
            if kind == "all, penalised":  # what raises tokens reads whole rows
                continue
            logits = kind_of_rows(rng, (8, _VOCAB)).astype(np.float32)
            far, rows = FarLogits(logits, _VOCAB), _rows(rng, kind, logits)
            expected = [plainly(logits[i], row) for i, row in enumerate(_again(rows))]
            assert sample(far.result(), rows) == expected
            assert not far.fetched


def test_tokens_of_no_mass_beyond_the_candidates_leave_nothing_open() -> None:
    logits = np.full((1, 1000), -60, np.float32)
    logits[0, 100:150] = np.linspace(0, 1, 50)
    for seed in range(50):
        far, rows = FarLogits(logits, 64), [RowSampling(SamplingParams(), np.random.default_rng(seed))]
        expected = plainly(logits[0], _again(rows)[0])
        assert sample(far.result(), rows) == [expected]
        assert not far.fetched


def test_rows_whose_candidates_are_not_enough_are_fetched_in_one_call_and_the_others_never_read() -> None:
    rng = np.random.default_rng(1)
    far = FarLogits(rng.normal(size=(6, 500)).astype(np.float32), 16)
    params = [SamplingParams(temperature=3.0 * (i % 2)) for i in range(6)]
    result = far.result()
    sample(result, [RowSampling(p, np.random.default_rng(0)) for p in params])
    assert far.fetched == [[1, 3, 5]]
    assert np.isnan(result.logits[::2]).all()


def test_a_tie_at_the_border_of_top_k_that_may_go_on_beyond_the_candidates_needs_the_full_row() -> None:
    logits = np.zeros((1, 100), np.float32)
    logits[0, 50] = 1
    row = RowSampling(SamplingParams(top_k=10), np.random.default_rng(3))  # keeps all, as they are equal
    far, expected = FarLogits(logits, 20), plainly(logits[0], _again([row])[0])
    assert sample(far.result(), [row]) == [expected]
    assert far.fetched == [[0]]


def test_the_lower_id_is_the_better_of_equals() -> None:
    logits = np.array([[1, 5, 5, 5, -0.0, 0.0]], np.float32)
    greedy = [RowSampling(SamplingParams(temperature=0), np.random.default_rng(0))]
    assert sample(FarLogits(logits, 2).result(), greedy) == sample(full(logits), greedy) == [1]
    for first, second in ((1, 2), (4, 5)):
        seen = [
            choose_in_full(logits[0], SamplingParams(temperature=100), u) for u in np.linspace(0, 0.999, 500)
        ]
        assert seen.index(first) < seen.index(second)


def test_a_row_with_every_candidate_banned_is_fetched() -> None:
    logits = np.arange(50, dtype=np.float32)[None]
    for temperature in (0.0, 0.01):
        far = FarLogits(logits, 3)
        banned = (49, 48, 47)
        row = RowSampling(SamplingParams(temperature=temperature), np.random.default_rng(0), banned)
        assert sample(far.result(), [row]) == [46]
        assert far.fetched == [[0]]


def test_bans_leave_the_engines_candidates_as_they_were() -> None:
    logits = np.arange(50, dtype=np.float32)[None]
    result = FarLogits(logits, 8).result()
    assert result.candidates is not None
    ids, best = result.candidates.token_ids.copy(), result.candidates.logits.copy()
    row = RowSampling(SamplingParams(temperature=0), np.random.default_rng(0), banned=(49,))
    assert sample(result, [row]) == [48]
    np.testing.assert_array_equal(result.candidates.token_ids, ids)
    np.testing.assert_array_equal(result.candidates.logits, best)


@pytest.mark.parametrize("temperature", [5e-324, 1e-310, 1e-40, 1e-8])
def test_a_temperature_next_to_nothing_takes_the_best(temperature: float) -> None:
    logits = np.random.default_rng(0).normal(size=(1, 300)).astype(np.float32)
    logits[0, 7:20] = -np.inf
    params = SamplingParams(temperature=temperature)
    for result in (full(logits), FarLogits(logits, 32).result()):
        assert sample(result, [RowSampling(params, np.random.default_rng(0))]) == [logits.argmax()]


def test_a_point_at_the_very_end_means_the_last_token_that_is_kept() -> None:
    class Last(np.random.Generator):
        def random(self, *_args: object, **_kwargs: object) -> float:  # type: ignore[override]
            return float(np.nextafter(1, 0))

    logits = np.log(np.array([[0.5, 0.3, 0.2, 1e-30, 1e-30]])).astype(np.float32)
    for params in (SamplingParams(top_k=3), SamplingParams(top_p=0.9), SamplingParams(min_p=0.3)):
        row = RowSampling(params, Last(np.random.PCG64()))
        assert sample(full(logits), [row]) == sample(FarLogits(logits, 4).result(), [row]) == [2]


@pytest.mark.parametrize(
    ("params", "num_banned", "needed"),
    [
        (SamplingParams(temperature=0), 0, False),
        (SamplingParams(temperature=0), 64, True),  # all of them may be banned
        (SamplingParams(), 3, False),
        (SamplingParams(temperature=0.7, top_p=0.95), 0, False),
        (SamplingParams(temperature=2), 0, True),
        (SamplingParams(temperature=2, top_p=0.9), 0, True),
        (SamplingParams(temperature=2, top_k=60), 4, False),
        (SamplingParams(temperature=2, top_k=60), 5, True),
        (SamplingParams(temperature=2, min_p=0.1), 0, False),
        (SamplingParams(temperature=2, min_p=0.001), 0, True),
    ],
)
def test_a_full_row_is_asked_for_where_the_best_tokens_are_seldom_enough(
    params: SamplingParams, num_banned: int, needed: bool
) -> None:
    row = RowSampling(params, np.random.default_rng(0), tuple(range(num_banned)))
    assert needs_full_row(row, 64) is needed


@pytest.mark.parametrize(
    ("params", "will_have_mask", "needed"),
    [
        (SamplingParams(temperature=0, repetition_penalty=1.2), False, False),
        (SamplingParams(temperature=0, repetition_penalty=0.9), False, True),  # others may rise
        (SamplingParams(temperature=0.5, logit_bias=((3, 0.1),)), False, True),
        (SamplingParams(temperature=0.5, logit_bias=((3, -0.1),)), False, False),
        (SamplingParams(temperature=0.5, repetition_penalty=1.2), False, True),  # much may have become less
        (SamplingParams(temperature=0.5, top_k=5, repetition_penalty=1.2), False, False),
        (SamplingParams(temperature=0.5), True, True),
        (SamplingParams(temperature=0), True, False),
        (SamplingParams(temperature=0, allowed_token_ids=frozenset([4])), False, False),
        (SamplingParams(temperature=0.5, typical_p=0.9), False, True),
        (SamplingParams(temperature=0.5, top_p=0.9, typical_p=0.9), False, False),
    ],
)
def test_a_full_row_is_asked_for_where_changes_reach_beyond_the_best_tokens(
    params: SamplingParams, will_have_mask: bool, needed: bool
) -> None:
    row = RowSampling(params, np.random.default_rng(0), changes=LogitChanges.of(params, range(100, 120)))
    assert needs_full_row(row, 64, will_have_mask=will_have_mask) is needed


# ---------------------------------------------------------------------------------------------------------


def test_some_rows_of_a_step_can_be_sampled_by_their_index() -> None:
    rng = np.random.default_rng(0)
    logits = (rng.normal(size=(6, 400)) * 3).astype(np.float32)
    for kind in ("greedy", "as it is", "all"):
        rows = [RowSampling(KINDS_OF_PARAMS[kind](rng), np.random.default_rng(i)) for i in range(6)]
        whole = sample(full(logits), _again(rows))
        some = [4, 1, 5]
        for result in (full(logits), FarLogits(logits, 32).result()):
            assert sample(result, _again([rows[i] for i in some]), some) == [whole[i] for i in some], kind


def test_greedy_takes_the_best_and_draws_nothing() -> None:
    logits = np.array([[0, 3, 1], [5, 4, 4]], np.float32)
    generators = [np.random.default_rng(1), np.random.default_rng(2)]
    rows = [RowSampling(SamplingParams(temperature=0), g) for g in generators]
    assert sample(full(logits), rows) == [1, 0]
    assert generators[0].random() == np.random.default_rng(1).random()


def test_a_seed_gives_the_same_tokens_alone_and_in_a_mixed_batch() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(8, 300)).astype(np.float32) * 4
    params = [SamplingParams(temperature=0.2 + i / 4, top_k=i * 5, top_p=1 - i / 10) for i in range(8)]
    together = sample(full(logits), [RowSampling(p, np.random.default_rng(i)) for i, p in enumerate(params)])
    alone = [
        sample(full(logits[i : i + 1]), [RowSampling(p, np.random.default_rng(i))])[0]
        for i, p in enumerate(params)
    ]
    assert together == alone


def test_draws_follow_the_distribution() -> None:
    params = SamplingParams(temperature=0.7, top_p=0.9)
    logits = np.array([[2.0, 1.5, 1.0, 0.0, -1.0, -3.0]], np.float32)
    generator = np.random.default_rng(5)
    counts = np.zeros(6)
    for _ in range(20_000):
        counts[sample(full(logits), [RowSampling(params, generator)])[0]] += 1
    expected = masses_kept(logits[0], params)[1]
    # Five standard deviations of a binomial count; the seed is fixed.
    bound = 5 * np.sqrt(20_000 * expected * (1 - expected)) + 1e-9
    assert (np.abs(counts - 20_000 * expected) <= bound).all()
    assert expected[4] == counts[4] == 0


def test_a_banned_token_is_never_chosen() -> None:
    logits = np.array([[9, 1, 0], [9, 1, 0]], np.float32)
    rows = [
        RowSampling(SamplingParams(temperature=t), np.random.default_rng(0), banned=(0,)) for t in (0.0, 5.0)
    ]
    assert 0 not in sample(full(logits), rows)


@pytest.mark.parametrize("nonsense", [np.nan, -np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0, 1])
def test_nonsense_logits_are_noticed(nonsense: float, temperature: float) -> None:
    logits = np.zeros((1, 40), np.float32)
    logits[0, 20] = nonsense
    rows = [RowSampling(SamplingParams(temperature=temperature), np.random.default_rng(0))]
    with pytest.raises(ValueError, match="finite"):
        sample(full(logits), rows)
    with np.errstate(invalid="ignore"):
        far = FarLogits(logits, 8).result()
    with pytest.raises(ValueError, match="finite"):
        sample(far, rows)


def test_a_row_of_which_nothing_that_is_possible_is_allowed_has_no_token_and_the_others_have_theirs() -> None:
    logits = np.full((3, 40), -np.inf, np.float32)
    logits[:, 3] = 1
    generators = [np.random.default_rng(i) for i in range(3)]
    params = SamplingParams(allowed_token_ids=frozenset([5]))
    rows = [
        RowSampling(SamplingParams(), generators[0], banned=(3,)),
        RowSampling(SamplingParams(), generators[1]),
        RowSampling(params, generators[2], changes=LogitChanges.of(params, ())),
    ]
    for result in (full(logits), FarLogits(logits, 8).result()):
        assert sample(result, rows) == [NOTHING_LEFT, 3, NOTHING_LEFT]


def test_a_row_of_which_nothing_is_possible_is_noticed() -> None:
    logits = np.full((1, 40), -np.inf, np.float32)
    row = RowSampling(SamplingParams(), np.random.default_rng(0))
    with np.errstate(invalid="ignore"):
        far = FarLogits(logits, 8).result()
    for result in (full(logits), far):
        with pytest.raises(ValueError, match="finite"):
            sample(result, [row])


@pytest.mark.parametrize("count", [1, 15, 16, 17, 64])
def test_two_threads_choose_what_one_does(count: int) -> None:
    params = SamplingParams(temperature=0.9, top_p=0.9)
    logits = np.random.default_rng(0).normal(0, 4, (2 * count, 500)).astype(np.float32)
    at = list(range(1, 2 * count, 2)) if count % 2 else list(range(count))

    def rows() -> list[RowSampling]:
        return [RowSampling(params, np.random.default_rng([7, i])) for i in range(count)]

    with ThreadPoolExecutor(1) as helpers:
        shared = sample(StepResult(logits.copy()), rows(), at, helpers)
    assert shared == sample(StepResult(logits), rows(), at)


def test_what_goes_wrong_on_the_second_thread_is_raised() -> None:
    logits = np.zeros((32, 50), np.float32)
    logits[31] = np.nan
    rows = [RowSampling(SamplingParams(), np.random.default_rng(i)) for i in range(32)]
    with ThreadPoolExecutor(1) as helpers, pytest.raises(ValueError, match="no finite maximum"):
        sample(StepResult(logits), rows, helpers=helpers)
