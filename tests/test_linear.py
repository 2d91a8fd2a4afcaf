"""Plans over rows, executed on a model of the cache that holds every cell's token."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engines.api import BlockCopy, EngineError
from engines.linear import Move, Plan, Rows, Run
from tests import steps
from tests.steps import Feed

VOCAB_SIZE = 1 << 40
"""Enough for every token of a schedule to be another one; 0 is what holes compute."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What an engine can take."""

    num_blocks: int = 8
    max_len: int = 12
    max_piece: int = 5
    max_logit_rows: int = 8
    max_batch: int = 8
    min_batch: int = 1
    batch_sizes: tuple[int, ...] | None = None

    def rows(self) -> Rows:
        return Rows(
            self.num_blocks,
            self.max_len,
            vocab_size=VOCAB_SIZE,
            max_piece=self.max_piece,
            max_logit_rows=self.max_logit_rows,
            max_batch=self.max_batch,
            min_batch=self.min_batch,
            batch_sizes=self.batch_sizes,
        )


class CacheModel:
    """A cache of tokens in place of keys and values; logits are the tokens that a token attends to."""

    def __init__(self, sizes: Sizes) -> None:
        self._sizes = sizes
        self._num_rows = sizes.num_blocks + 1
        self._cells: dict[tuple[int, int], int] = {}

    def row(self, row: int, length: int) -> list[int | None]:
        """The first tokens of a row."""
        return [self._cells.get((row, cell)) for cell in range(length)]

    def execute(self, plan: Plan, num_results: int) -> list[list[int | None]]:
        """Carry a plan out and return each result; each must come exactly once."""
        for move in plan.moves:
            self._move(move)
        results: list[list[int | None]] = [[] for _ in range(num_results)]
        for run in plan.runs:
            attended = self._run(run)
            assert len(run.results) <= len(run.logit_rows)
            for row, result in zip(run.logit_rows, run.results, strict=False):
                assert not results[result]
                results[result] = attended[row]
        assert all(results)
        return results

    def _move(self, move: Move) -> None:
        assert move.source != move.target
        assert 0 <= min(move.source, move.target) <= max(move.source, move.target) < self._num_rows
        assert 0 < move.num_cells <= self._sizes.max_len
        for cell in range(move.num_cells):
            self._cells[move.target, cell] = self._cells[move.source, cell]

    def _run(self, run: Run) -> list[list[int | None]]:
        """What each of the B * S tokens attends to."""
        sizes = self._sizes
        num_rows, num_tokens = run.token_ids.shape
        assert run.num_rows == num_rows == len(run.write_indices)
        assert 0 <= run.first_row <= run.first_row + num_rows <= self._num_rows
        assert run.is_decode == (num_tokens == 1)
        for array in (run.token_ids, run.position_ids, run.write_indices, run.logit_rows, run.results):
            assert array.dtype == np.int64
        assert 1 <= len(run.logit_rows) <= sizes.max_logit_rows
        if run.is_decode:
            assert sizes.min_batch <= num_rows <= sizes.max_batch
            if sizes.batch_sizes is not None:
                assert num_rows in sizes.batch_sizes
                assert len(run.logit_rows) == num_rows
        else:
            assert num_rows == 1
            assert num_tokens <= sizes.max_piece
        if len(run.results):
            assert len(run.logit_rows) >= sizes.min_batch
        positions = run.write_indices[:, None] + np.arange(num_tokens)
        np.testing.assert_array_equal(run.position_ids, positions)
        assert 0 <= positions.min() <= positions.max() < sizes.max_len
        attended = []
        for row in range(num_rows):
            for position, token in zip(positions[row].tolist(), run.token_ids[row].tolist(), strict=True):
                self._cells[run.first_row + row, position] = token
                attended.append(self.row(run.first_row + row, position + 1))
        return attended


class Act(Enum):
    """What becomes of a block in a step."""

    IDLE = "idle"
    GROW = "grow"
    FINISH = "finish"
    REPLACE = "replace"
    """Finish, and begin another sequence in the same step."""
    BACK = "back"
    """Forget some tokens and go on with others."""
    PREEMPT = "preempt"
    """Lose the block; the sequence begins again on the next that is free."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One block's part in a step."""

    act: Act
    num_tokens: int
    num_logits: int
    """How many of them want logits, the last ones."""


@dataclass(slots=True)
class Driver:
    """Plays schedules on rows and on the cache's model, and checks every step."""

    sizes: Sizes
    rows: Rows = field(init=False)
    cache: CacheModel = field(init=False)
    running: dict[int, Feed] = field(default_factory=dict)
    """By block."""
    waiting: list[Feed] = field(default_factory=list)
    num_tokens_made: int = 0

    def __post_init__(self) -> None:
        self.rows = self.sizes.rows()
        self.cache = CacheModel(self.sizes)

    def step(self, turns: Sequence[Turn], *, backwards: bool = False) -> Plan | None:
        """Take one step, each block by its turn; None where no block computes."""
        parts: list[tuple[Feed, int, int]] = []
        for block, turn in enumerate(turns):
            if turn.act in (Act.FINISH, Act.REPLACE):
                self.running.pop(block, None)
            if turn.act is Act.PREEMPT and block in self.running:
                feed = self.running.pop(block)
                self.waiting.append(Feed(feed.token_ids, []))
            if turn.act is Act.BACK and block in self.running:
                feed = self.running[block]
                feed.past = max(0, feed.past - turn.num_tokens)
                feed.token_ids = feed.token_ids[: feed.past]
            if turn.act in (Act.GROW, Act.REPLACE, Act.BACK) and (part := self._grow(block, turn)):
                parts.append(part)
        if not parts:
            return None
        return self._take(parts[::-1] if backwards else parts)

    def _grow(self, block: int, turn: Turn) -> tuple[Feed, int, int] | None:
        if block not in self.running:
            self.running[block] = self.waiting.pop() if self.waiting else Feed([], [])
            self.running[block].blocks = [block]
        feed = self.running[block]
        count = min(turn.num_tokens, self.sizes.max_len - feed.past)
        if count == 0:
            return None
        while len(feed.token_ids) < feed.past + count:
            self.num_tokens_made += 1
            feed.token_ids.append(self.num_tokens_made)
        return feed, count, min(count, turn.num_logits)

    def _take(self, parts: list[tuple[Feed, int, int]]) -> Plan:
        whole = steps.batch([(feed, count) for feed, count, _ in parts])
        wanted: list[int] = []
        expected: list[list[int]] = []
        for (feed, count, num_logits), end in zip(parts, whole.query_begins[1:].tolist(), strict=True):
            wanted += range(end - num_logits, end)
            feed.past += count
            expected += [feed.token_ids[: feed.past - i] for i in reversed(range(num_logits))]
        plan = self.rows.plan(replace(whole, logit_rows=np.array(wanted, np.int64)))
        assert self.cache.execute(plan, len(wanted)) == expected
        self.check()
        return plan

    def check(self) -> None:
        """Every live sequence's row holds its tokens, whether it was in the step or not.

        But for the last of a full row: no token comes after it, and only itself would read it.
        """
        rows = [self.rows.row_of(block) for block in range(self.sizes.num_blocks)]
        assert len(set(rows)) == self.sizes.num_blocks
        for block, feed in self.running.items():
            read = min(feed.past, self.sizes.max_len - 1)
            assert self.cache.row(rows[block], read) == feed.token_ids[:read]


TURNS = st.builds(
    Turn,
    # Most blocks decode; the others come to hypothesis as it likes.
    act=st.sampled_from([Act.GROW, *Act, Act.GROW, Act.GROW]),
    num_tokens=st.sampled_from([1, 1, 1, 1, 2, 3, 6, 7, 12]),
    num_logits=st.sampled_from([1, 1, 0, 2, 12]),
)


@st.composite
def sizes_of_engines(draw: st.DrawFn) -> Sizes:
    num_blocks = draw(st.integers(1, 12))
    max_batch = draw(st.integers(1, num_blocks + 1))
    max_logit_rows = draw(st.integers(1, 14))
    widest = min(max_batch, max_logit_rows)
    return Sizes(
        num_blocks=num_blocks,
        max_len=draw(st.integers(1, 16)),
        max_piece=draw(st.integers(1, 8)),
        max_logit_rows=max_logit_rows,
        max_batch=max_batch,
        min_batch=(min_batch := draw(st.integers(1, min(3, widest)))),
        batch_sizes=draw(
            st.none()
            | st.lists(st.integers(min_batch, widest), min_size=1, max_size=4, unique=True).map(tuple)
        ),
    )


@st.composite
def schedules(draw: st.DrawFn) -> tuple[Sizes, list[tuple[list[Turn], bool]]]:
    sizes = draw(sizes_of_engines())
    turns = st.lists(TURNS, min_size=sizes.num_blocks, max_size=sizes.num_blocks)
    return sizes, draw(st.lists(st.tuples(turns, st.booleans()), min_size=1, max_size=25))


def play(schedule: tuple[Sizes, list[tuple[list[Turn], bool]]]) -> None:
    sizes, turns = schedule
    driver = Driver(sizes)
    for blocks, backwards in turns:
        driver.step(blocks, backwards=backwards)


_UNHURRIED = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@given(schedules())
@settings(max_examples=300, **_UNHURRIED)  # type: ignore[arg-type]
def test_any_schedule_leaves_every_sequences_tokens_in_its_row(
    schedule: tuple[Sizes, list[tuple[list[Turn], bool]]],
) -> None:
    play(schedule)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@given(schedules())
@settings(max_examples=20_000, **_UNHURRIED)  # type: ignore[arg-type]
def test_many_more_schedules_leave_every_sequences_tokens_in_its_row(
    schedule: tuple[Sizes, list[tuple[list[Turn], bool]]],
) -> None:
    play(schedule)


def grown(driver: Driver, blocks: Sequence[int], num_tokens: int = 1, act: Act = Act.GROW) -> Plan:
    """A step in which some blocks grow, or do as they are told, and the others idle."""
    turns = [
        Turn(act if block in blocks else Act.IDLE, num_tokens, 1) for block in range(driver.sizes.num_blocks)
    ]
    plan = driver.step(turns)
    assert plan is not None
    return plan


def decode_range(plan: Plan) -> tuple[int, int]:
    (run,) = plan.runs
    return run.first_row, run.num_rows


@pytest.fixture
def driver() -> Driver:
    """Eight sequences of three tokens in rows 0 to 7; the spare is row 8."""
    driver = Driver(Sizes())
    grown(driver, range(8), 3)
    return driver


def test_sequences_with_one_new_token_are_one_run_and_the_others_runs_of_their_own() -> None:
    driver = Driver(Sizes())
    grown(driver, [0, 1, 2], 3)
    plan = driver.step(
        [Turn(Act.GROW, 1, 1), Turn(Act.GROW, 4, 1), Turn(Act.GROW, 1, 1), Turn(Act.GROW, 1, 0)]
        + [Turn(Act.GROW, 2, 2)]
        + [Turn(Act.IDLE, 1, 1)] * 3
    )
    assert plan is not None
    decode, second, fifth = plan.runs
    assert (decode.first_row, decode.num_rows) == (0, 4)
    assert decode.token_ids[1].tolist() == [0]
    assert decode.write_indices.tolist() == [3, 3, 3, 0]
    assert decode.results.tolist() == [0, 2]
    assert decode.logit_rows.tolist() == [0, 2]
    assert (second.first_row, second.token_ids.shape, second.results.tolist()) == (1, (1, 4), [1])
    assert (fifth.first_row, fifth.token_ids.shape, fifth.results.tolist()) == (4, (1, 2), [3, 4])


def test_a_few_holes_are_left_alone(driver: Driver) -> None:
    plan = grown(driver, [0, 1, 2, 3, 5])
    assert plan.moves == ()
    assert decode_range(plan) == (0, 6)


def test_an_outlying_row_changes_places_with_a_hole_by_way_of_the_spare(driver: Driver) -> None:
    plan = grown(driver, [0, 1, 7])
    assert plan.moves == (Move(2, 8, 3), Move(7, 2, 3))
    assert decode_range(plan) == (0, 3)
    # Row 7 is the spare now, and block 2, in row 8, is whole.
    assert [driver.rows.row_of(block) for block in (0, 1, 7, 2)] == [0, 1, 2, 8]
    assert decode_range(grown(driver, [2, 6])) == (6, 3)


def test_the_spare_row_is_taken_first_where_it_is_a_hole(driver: Driver) -> None:
    grown(driver, [0, 1, 7])
    plan = grown(driver, [5, 6, 2, 0])
    assert plan.moves == (Move(0, 7, 3 + 1),)
    assert decode_range(plan) == (5, 4)


def test_a_row_whose_sequence_begins_in_the_step_is_moved_without_its_cells(driver: Driver) -> None:
    driver.running.pop(7)
    plan = grown(driver, [0, 1, 7])
    assert plan.moves == (Move(2, 7, 3),)
    assert decode_range(plan) == (0, 3)


def test_a_hole_whose_sequence_begins_in_the_step_is_not_copied(driver: Driver) -> None:
    turns = [Turn(Act.IDLE, 1, 1)] * 8
    turns[0] = turns[1] = turns[7] = Turn(Act.GROW, 1, 1)
    turns[2] = Turn(Act.REPLACE, 4, 1)
    plan = driver.step(turns)
    assert plan is not None
    assert plan.moves == (Move(7, 2, 3),)
    assert plan.runs[1].first_row == 7


def test_a_new_sequence_takes_the_spare_row_where_it_is_lower(driver: Driver) -> None:
    grown(driver, [0, 1, 7])
    assert driver.rows.row_of(2) == 8
    driver.running.pop(2)
    assert grown(driver, [2], 2).moves == ()
    assert driver.rows.row_of(2) == 7
    driver.running.pop(6)
    grown(driver, [6], 2)
    assert driver.rows.row_of(6) == 6, "the spare, row 8, is higher"


def test_rows_stay_dense_as_sequences_end() -> None:
    sizes = Sizes(num_blocks=40, max_len=200, max_batch=40, max_logit_rows=40)
    driver = Driver(sizes)
    grown(driver, range(40), 3)
    left = np.random.default_rng(0).permutation(40).tolist()
    num_copies = 0
    while left:
        plan = grown(driver, left)
        assert decode_range(plan)[1] <= len(left) + max(1, len(left) // 4)
        num_copies += len(plan.moves)
        left.pop()
    assert num_copies <= 2 * 40, "at most one exchange for each sequence that ends"


def test_more_rows_than_a_run_takes_are_as_few_runs_as_can_be() -> None:
    driver = Driver(Sizes(num_blocks=12, max_batch=4))
    grown(driver, range(12), 2)
    for blocks, num_runs in (
        (range(12), 3),
        (range(0, 12, 2), 2),
        ([0, 3, 7, 11], 1),
        (range(1, 9), 2),
        ([0, 5, 6, 11, 10], 2),
    ):
        assert len(grown(driver, blocks).runs) == num_runs


def test_a_run_is_widened_to_a_listed_size() -> None:
    driver = Driver(Sizes(num_blocks=8, batch_sizes=(1, 4, 8)))
    plan = grown(driver, [6, 7])
    (run,) = plan.runs
    assert (run.first_row, run.num_rows) == (5, 4)
    assert run.logit_rows.tolist() == [1, 2, 2, 2]
    assert run.results.tolist() == [0, 1]


def test_a_run_without_wanted_logits_has_one_all_the_same(driver: Driver) -> None:
    plan = driver.step([Turn(Act.GROW, 1, 0), Turn(Act.GROW, 2, 0)] + [Turn(Act.IDLE, 1, 1)] * 6)
    assert plan is not None
    assert [(run.logit_rows.tolist(), run.results.tolist()) for run in plan.runs] == [([0], [])] * 2


def test_a_piece_ends_before_it_wants_too_many_logits() -> None:
    driver = Driver(Sizes(max_len=40, max_piece=20, max_logit_rows=8))
    plan = driver.step([Turn(Act.GROW, 30, 15)] + [Turn(Act.IDLE, 1, 1)] * 7)
    assert plan is not None
    assert [run.token_ids.shape[1] for run in plan.runs] == [20, 8, 2]
    assert [len(run.results) for run in plan.runs] == [5, 8, 2]


def test_a_single_row_is_widened_and_so_are_its_logits() -> None:
    driver = Driver(Sizes(min_batch=2))
    for num_tokens in (3, 1):
        (run,) = grown(driver, [7], num_tokens).runs
        assert run.num_rows * run.token_ids.shape[1] >= 2
        assert len(run.logit_rows) == 2
        assert run.results.tolist() == [0]


def test_bounds_that_leave_no_way_to_run_a_step_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Sizes(num_blocks=0).rows()
    with pytest.raises(ValueError, match="at least 1"):
        Sizes(min_batch=3, max_batch=2).rows()
    with pytest.raises(ValueError, match=r"no batch size of \[16, 32\] is in 1 \.\. 8"):
        Sizes(batch_sizes=(16, 32)).rows()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": np.array([1, -1, 2], np.int64)}, r"token id .* 0 \.\. 319"),
        ({"token_ids": np.array([1, 320, 2], np.int64)}, r"token id .* 0 \.\. 319"),
        ({"block_ids": np.array([-1], np.int32)}, r"block of the step is not in 0 \.\. 7"),
        ({"block_ids": np.array([8], np.int32)}, r"block of the step is not in 0 \.\. 7"),
        ({"logit_rows": np.array([3], np.int64)}, r"logit row .* 0 \.\. 2"),
        ({"logit_rows": np.array([1, 1], np.int64)}, "must ascend"),
        ({"past_lens": np.array([10], np.int32)}, "13 tokens .* context of 12"),
        ({"past_lens": np.array([-1], np.int32)}, "does not fit"),
        ({"past_lens": np.array([5], np.int32)}, "does not hold"),
        ({"query_begins": np.array([0, 2], np.int32)}, "each of them new tokens"),
        (
            {"block_ids": np.array([0, 1], np.int32), "block_begins": np.array([0, 2], np.int32)},
            "needs one block",
        ),
        (
            {
                "past_lens": np.zeros(2, np.int32),
                "query_begins": np.array([0, 1, 3], np.int32),
                "block_ids": np.array([2, 2], np.int32),
                "block_begins": np.array([0, 1, 2], np.int32),
            },
            "the same block",
        ),
    ],
)
def test_a_step_that_makes_no_sense_is_refused_and_changes_nothing(
    change: dict[str, object], message: str
) -> None:
    rows = Rows(8, 12, vocab_size=320, max_piece=5, max_logit_rows=8, max_batch=8)
    batch = steps.batch([(Feed([7] * 12, [0]), 3)])
    rows.plan(batch)
    before = repr(rows.plan(batch))
    with pytest.raises(EngineError, match=message):
        rows.plan(replace(batch, **change))  # type: ignore[arg-type]
    assert repr(rows.plan(batch)) == before


def test_an_empty_step_is_refused() -> None:
    with pytest.raises(EngineError, match="needs sequences"):
        Sizes().rows().plan(steps.batch([]))


def test_a_step_may_go_back_in_a_sequence(driver: Driver) -> None:
    feed = driver.running[4]
    feed.past, feed.token_ids = 1, feed.token_ids[:1]
    grown(driver, [4], 2)
    grown(driver, range(8))


def test_what_a_step_copies_is_moved_before_anything_else(driver: Driver) -> None:
    grow, idle = Turn(Act.GROW, 4, 1), Turn(Act.IDLE, 0, 0)
    driver.step([grow])
    source = driver.running[0]
    target = Feed([*source.token_ids[:3], 77], [5], past=3)
    driver.running[5] = target
    batch = replace(steps.batch([(target, 1)]), copies=(BlockCopy(0, 5, 3),))
    plan = driver.rows.plan(batch)
    assert plan.moves[0] == Move(driver.rows.row_of(0), driver.rows.row_of(5), 3)
    assert driver.cache.execute(plan, 1) == [target.token_ids]
    target.past = 4
    driver.step([grow, idle, idle, idle, idle, grow])


def test_a_row_that_was_copied_can_begin_another_sequence_in_the_same_step(driver: Driver) -> None:
    driver.step([Turn(Act.GROW, 4, 1)])
    target = Feed([*driver.running[0].token_ids[:3], 77], [5], past=3)
    other = Feed([88, 89], [0])
    batch = replace(steps.batch([(target, 1), (other, 2)]), copies=(BlockCopy(0, 5, 3),))
    results = driver.cache.execute(driver.rows.plan(batch), 3)
    assert results == [target.token_ids, [88], [88, 89]]


@pytest.mark.parametrize(
    "copy",
    [BlockCopy(0, 8, 1), BlockCopy(-1, 1, 1), BlockCopy(0, 0, 1), BlockCopy(0, 1, 9), BlockCopy(0, 1, 0)],
)
def test_a_copy_that_makes_no_sense_is_refused(driver: Driver, copy: BlockCopy) -> None:
    driver.step([Turn(Act.GROW, 4, 1)])
    batch = replace(steps.batch([(Feed([7, 8], [2]), 1)]), copies=(copy,))
    with pytest.raises(EngineError, match="cop"):
        driver.rows.plan(batch)
