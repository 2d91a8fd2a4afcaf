"""What parameters change about rows, and the tokens that it depends on."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamsrv.logit_changes import LogitChanges, TokenHistory, changes_logits
from streamsrv.request import SamplingParams

ids_strategy = st.lists(st.integers(0, 300), max_size=400)


@given(prompt_ids=ids_strategy, output_ids=ids_strategy)
def test_a_history_has_each_token_once_and_counts_those_of_the_output(
    prompt_ids: list[int], output_ids: list[int]
) -> None:
    history = TokenHistory(prompt_ids)
    for token_id in output_ids:
        history.push(token_id)
    counts = Counter(output_ids)
    expected = {token_id: counts[token_id] for token_id in [*prompt_ids, *output_ids]}
    assert dict(zip(history.ids.tolist(), history.counts.tolist(), strict=True)) == expected
    assert len(history.ids) == len(expected)


ALL = SamplingParams(
    repetition_penalty=1.3,
    presence_penalty=0.4,
    frequency_penalty=0.2,
    logit_bias=((3, -2.0), (500, 1.5), (7, -1.0)),
    banned_token_ids=frozenset([11, 400]),
    allowed_token_ids=frozenset(range(0, 900, 3)) | {500, 7},
)


@given(output_ids=ids_strategy, seed=st.integers(0, 1000))
def test_some_tokens_are_changed_as_the_whole_row_is(output_ids: list[int], seed: int) -> None:
    random = np.random.default_rng(seed)
    row = random.normal(size=1000).astype(np.float32)
    changes = LogitChanges(ALL, range(0, 300, 7))
    for token_id in output_ids:
        changes.push(token_id)
    ids = random.permutation(1000)[:64].astype(np.int64)
    some = row[ids]
    num_lowered = changes.apply_to(ids, some)
    changes.apply(row)
    np.testing.assert_array_equal(some, row[ids])
    assert changes.history is not None
    sources = (changes.bias_ids, changes.history.ids, changes.banned_ids)
    assert num_lowered == sum(np.isin(ids, source).sum() for source in sources)
    assert changes.num_lowered == sum(map(len, sources))


@pytest.mark.parametrize("penalty", [1e-45, 1e-38, 100.0])
def test_the_largest_change_leaves_no_nonsense(penalty: float) -> None:
    row = np.array([0, 5, -5, 30, -np.inf], np.float32)
    LogitChanges(SamplingParams(repetition_penalty=penalty), range(5)).apply(row)
    assert np.isfinite(row[:4]).all()
    assert row[4] == -np.inf


@pytest.mark.parametrize(
    ("params", "changes", "may_raise"),
    [
        (SamplingParams(temperature=0.5, top_k=3, typical_p=0.5), False, False),
        (SamplingParams(repetition_penalty=1.1), True, False),
        (SamplingParams(repetition_penalty=0.9), True, True),
        (SamplingParams(presence_penalty=1), True, False),
        (SamplingParams(presence_penalty=-1), True, True),
        (SamplingParams(frequency_penalty=1), True, False),
        (SamplingParams(frequency_penalty=-1), True, True),
        (SamplingParams(logit_bias=((3, -1.0),)), True, False),
        (SamplingParams(logit_bias=((3, -1.0), (4, 1.0))), True, True),
        (SamplingParams(banned_token_ids=frozenset([1])), True, False),
        (SamplingParams(allowed_token_ids=frozenset([1])), True, False),
    ],
)
def test_parameters_tell_whether_they_change_rows_and_whether_a_token_can_rise(
    params: SamplingParams, changes: bool, may_raise: bool
) -> None:
    assert changes_logits(params) is changes
    made = LogitChanges.of(params, [1, 2])
    assert (made is not None) is changes
    assert made is None or made.may_raise is may_raise


def test_only_repetition_penalty_looks_at_the_prompt() -> None:
    for params, ids in (
        (SamplingParams(repetition_penalty=1.1, presence_penalty=1), [5, 6]),
        (SamplingParams(presence_penalty=1), []),
    ):
        history = LogitChanges(params, [5, 6]).history
        assert history is not None
        assert history.ids.tolist() == ids
