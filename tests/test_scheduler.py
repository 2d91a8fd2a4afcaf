"""The scheduler, driven by the scripted engine's context, which checks every block that it is given."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.api import CacheSpec
from engines.scripted import ScriptedEngine
from streamsrv.request import GenerateRequest, StopConditions
from streamsrv.scheduler import Scheduler, Step
from streamsrv.sequence import Sequence, SequenceStatus

SCRIPT = "one two three four five six seven eight nine ten"


def make_sequence(number: int, prompt: int, output: int) -> Sequence:
    request = GenerateRequest(
        f"r{number}", tuple(range(3, 3 + prompt)), stop=StopConditions(max_tokens=output)
    )
    return Sequence(number, request, max_tokens=output, eos_token_ids=frozenset())


class Driver:
    """A scheduler with a scripted context, stepped by hand."""

    def __init__(self, num_blocks: int, block_size: int, max_running: int, max_step_tokens: int) -> None:
        engine = ScriptedEngine(SCRIPT, num_blocks=num_blocks, block_size=block_size)
        self.context = engine.create_context()
        self.replies = [*engine.script_ids, engine.eos_token_id]
        self.scheduler = Scheduler(
            self.context.cache, max_running=max_running, max_step_tokens=max_step_tokens
        )
        self.finished: list[Sequence] = []

    def step(self) -> Step | None:
        step = self.scheduler.schedule()
        if step is None:
            return None
        rows = self.context.step(step.batch).logits.argmax(axis=1)
        self.scheduler.update(step, [int(row) for row in rows])
        for sequence in step.sampled:
            if sequence.num_output_tokens >= sequence.max_tokens:
                self.scheduler.finish(sequence)
                self.finished.append(sequence)
        self.scheduler.check_integrity()
        return step


def test_an_idle_scheduler_has_no_step() -> None:
    assert Driver(4, 4, 2, 8).scheduler.schedule() is None


def test_a_step_size_below_the_number_of_sequences_is_refused() -> None:
    with pytest.raises(ValueError, match="max_step_tokens"):
        Scheduler(CacheSpec(4, 4, 0), max_running=8, max_step_tokens=7)


def test_a_prompt_is_computed_in_pieces_within_the_budget() -> None:
    driver = Driver(num_blocks=16, block_size=4, max_running=2, max_step_tokens=4)
    driver.scheduler.add(make_sequence(1, prompt=10, output=2))
    sizes = []
    while (step := driver.step()) is not None:
        sizes.append((step.batch.num_tokens, len(step.batch.logit_rows)))
    assert sizes == [(4, 0), (4, 0), (2, 1), (1, 1)]


def test_a_prompt_is_not_cut_before_its_last_token() -> None:
    driver = Driver(num_blocks=16, block_size=4, max_running=2, max_step_tokens=4)
    driver.scheduler.add(make_sequence(1, prompt=9, output=1))
    sizes = []
    while (step := driver.step()) is not None:
        sizes.append(step.batch.num_tokens)
    assert sizes == [4, 3, 2]


def test_a_running_output_gets_its_token_in_every_step_while_a_long_prompt_arrives() -> None:
    driver = Driver(num_blocks=64, block_size=4, max_running=4, max_step_tokens=8)
    first = make_sequence(1, prompt=3, output=20)
    driver.scheduler.add(first)
    driver.step()
    driver.scheduler.add(make_sequence(2, prompt=51, output=1))
    for i in range(7):
        step = driver.step()
        assert step is not None
        assert step.batch.num_tokens == 8
        assert first.num_output_tokens == 2 + i
        assert first in step.sampled


def test_sequences_start_in_the_order_of_arrival() -> None:
    driver = Driver(num_blocks=64, block_size=4, max_running=2, max_step_tokens=64)
    sequences = [make_sequence(i, prompt=4, output=1 + i) for i in range(4)]
    for sequence in sequences:
        driver.scheduler.add(sequence)
    while driver.step() is not None:
        pass
    assert driver.finished == sequences


def test_blocks_are_free_as_soon_as_a_sequence_is_finished_wherever_it_stands() -> None:
    driver = Driver(num_blocks=8, block_size=4, max_running=1, max_step_tokens=4)
    running, waiting = make_sequence(1, 8, 8), make_sequence(2, 8, 8)
    driver.scheduler.add(running)
    driver.scheduler.add(waiting)
    driver.step()
    assert driver.scheduler.num_free_blocks == 6
    driver.scheduler.finish(waiting)
    driver.scheduler.finish(running)
    assert driver.scheduler.num_free_blocks == 8
    assert waiting.status is running.status is SequenceStatus.FINISHED
    assert driver.scheduler.schedule() is None


def test_the_youngest_gives_its_blocks_back_and_its_tokens_stay() -> None:
    driver = Driver(num_blocks=4, block_size=4, max_running=2, max_step_tokens=16)
    old, young = make_sequence(1, prompt=4, output=10), make_sequence(2, prompt=4, output=10)
    driver.scheduler.add(old)
    driver.scheduler.add(young)
    while driver.step() is not None:
        pass
    assert driver.scheduler.num_preemptions > 0
    assert driver.finished == [old, young]
    assert old.token_ids[4:] == young.token_ids[4:] == driver.replies[:10]


def test_an_illegal_change_of_status_is_refused() -> None:
    sequence = make_sequence(1, 1, 1)
    sequence.move_to(SequenceStatus.FINISHED)
    with pytest.raises(AssertionError, match="cannot become"):
        sequence.move_to(SequenceStatus.RUNNING)


arrival = st.tuples(st.integers(0, 6), st.integers(1, 20), st.integers(1, 11), st.integers(0, 40))


def run_schedule(
    num_blocks: int, block_size: int, max_running: int, spare: int, arrivals: list[tuple[int, int, int, int]]
) -> None:
    """Sequences come and are aborted at any step: all end with the right tokens, no block is lost."""
    driver = Driver(num_blocks, block_size, max_running, max_running + spare)
    fitting = [a for a in arrivals if a[1] + a[2] <= num_blocks * block_size]
    sequences = [make_sequence(i, prompt, output) for i, (_, prompt, output, _) in enumerate(fitting)]
    pending = list(zip(sequences, fitting, strict=True))
    aborted = set()
    for now in range(5_000):
        while pending and pending[0][1][0] <= now:
            driver.scheduler.add(pending.pop(0)[0])
        for sequence, (_, _, _, end) in zip(sequences, fitting, strict=True):
            added = all(sequence is not s for s, _ in pending)
            if end == now and added and sequence.status is not SequenceStatus.FINISHED:
                driver.scheduler.finish(sequence)
                aborted.add(sequence.sequence_id)
        if driver.step() is None and not pending:
            break
    assert not driver.scheduler.has_work, "no progress"
    assert driver.scheduler.num_free_blocks == num_blocks
    for sequence in sequences:
        output = sequence.token_ids[sequence.num_prompt_tokens :]
        assert output == driver.replies[: len(output)]
        assert sequence.sequence_id in aborted or len(output) == sequence.max_tokens


@given(
    num_blocks=st.integers(1, 12),
    block_size=st.integers(1, 5),
    max_running=st.integers(1, 5),
    spare=st.integers(0, 12),
    arrivals=st.lists(arrival, max_size=10).map(sorted),
)
@settings(max_examples=300, deadline=None)
def test_any_schedule_ends_with_right_tokens_and_all_blocks_free(
    num_blocks: int, block_size: int, max_running: int, spare: int, arrivals: list[tuple[int, int, int, int]]
) -> None:
    run_schedule(num_blocks, block_size, max_running, spare, arrivals)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@given(
    num_blocks=st.integers(1, 12),
    block_size=st.integers(1, 5),
    max_running=st.integers(1, 5),
    spare=st.integers(0, 12),
    arrivals=st.lists(arrival, max_size=10).map(sorted),
)
@settings(max_examples=10_000, deadline=None)
def test_many_schedules_end_with_right_tokens_and_all_blocks_free(
    num_blocks: int, block_size: int, max_running: int, spare: int, arrivals: list[tuple[int, int, int, int]]
) -> None:
    run_schedule(num_blocks, block_size, max_running, spare, arrivals)


def test_a_batch_lays_tokens_and_blocks_end_to_end() -> None:
    driver = Driver(num_blocks=16, block_size=4, max_running=4, max_step_tokens=7)
    driver.scheduler.add(make_sequence(1, prompt=5, output=3))
    driver.scheduler.add(make_sequence(2, prompt=6, output=3))
    step = driver.scheduler.schedule()
    assert step is not None
    batch = step.batch
    np.testing.assert_array_equal(batch.token_ids, [3, 4, 5, 6, 7, 3, 4])
    np.testing.assert_array_equal(batch.past_lens, [0, 0])
    np.testing.assert_array_equal(batch.query_begins, [0, 5, 7])
    np.testing.assert_array_equal(batch.block_begins, [0, 2, 4])
    np.testing.assert_array_equal(batch.logit_rows, [4])
    assert len(set(batch.block_ids.tolist())) == 4


def test_a_request_may_stop_only_after_its_least_number_of_tokens() -> None:
    request = replace(make_sequence(1, 1, 9).request, stop=StopConditions(max_tokens=9, min_tokens=2))
    sequence = Sequence(1, request, max_tokens=9, eos_token_ids=frozenset({7}))
    assert sequence.finish_by(7, None) is None
    sequence.token_ids += [5, 5]
    finish = sequence.finish_by(7, None)
    assert finish is not None
    assert finish.matched == 7
