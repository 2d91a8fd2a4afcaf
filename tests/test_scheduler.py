"""The scheduler, driven by the scripted engine's context, which checks every block that it is given."""

from dataclasses import replace

import numpy as np
import pytest

from engines.api import CacheSpec
from streamsrv.request import StopConditions
from streamsrv.scheduler import Scheduler
from streamsrv.sequence import Sequence, SequenceStatus
from tests.scheduler_driver import Driver, make_sequence


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


def test_a_lower_priority_gives_its_blocks_back_before_a_younger_sequence() -> None:
    driver = Driver(num_blocks=4, block_size=4, max_running=2, max_step_tokens=16)
    low, high = make_sequence(1, prompt=4, output=10), make_sequence(2, prompt=4, output=10)
    low.priority = -5
    driver.scheduler.add(low, now_s=0.0)
    driver.scheduler.add(high, now_s=4.0)
    driver.run()
    assert driver.finished == [high, low]
    assert (low.num_preemptions > 0, high.num_preemptions) == (True, 0)


def test_a_lower_priority_that_is_old_enough_keeps_its_blocks() -> None:
    driver = Driver(num_blocks=4, block_size=4, max_running=2, max_step_tokens=16)
    low, high = make_sequence(1, prompt=4, output=10), make_sequence(2, prompt=4, output=10)
    low.priority = -5
    driver.scheduler.add(low, now_s=0.0)
    driver.scheduler.add(high, now_s=6.0)
    driver.run()
    assert driver.finished == [low, high]


def test_an_illegal_change_of_status_is_refused() -> None:
    sequence = make_sequence(1, 1, 1)
    sequence.move_to(SequenceStatus.FINISHED)
    with pytest.raises(AssertionError, match="cannot become"):
        sequence.move_to(SequenceStatus.RUNNING)


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


def test_guesses_are_verified_with_what_the_budget_leaves() -> None:
    driver = Driver(num_blocks=16, block_size=4, max_running=4, max_step_tokens=8)
    first, second = make_sequence(1, prompt=3, output=9), make_sequence(2, prompt=3, output=9)
    driver.add(first, second)
    driver.step()
    step = driver.scheduler.schedule({1: [8] * 5, 2: [9] * 5})
    assert step is not None
    assert [(part.num_new, part.guesses) for part in step.parts] == [(1, (8,) * 5), (1, (9,))]
    np.testing.assert_array_equal(step.batch.query_begins, [0, 6, 8])
    np.testing.assert_array_equal(step.batch.logit_rows, range(8))


def test_the_guesses_that_were_right_are_in_the_cache() -> None:
    driver = Driver(num_blocks=16, block_size=4, max_running=1, max_step_tokens=8)
    sequence = make_sequence(1, prompt=3, output=9)
    driver.add(sequence)
    driver.step()
    step = driver.scheduler.schedule({1: [5, 6, 7]})
    assert step is not None
    driver.scheduler.update(step, [[5, 6, 1]])
    assert sequence.token_ids[-3:] == [5, 6, 1]
    assert sequence.num_computed == 3 + 1 + 2
    assert (sequence.num_guessed_tokens, sequence.num_accepted_tokens) == (3, 2)
    assert driver.scheduler.counters.num_accepted_tokens == 2


def test_the_last_token_of_a_step_is_computed_though_it_was_guessed() -> None:
    driver = Driver(num_blocks=16, block_size=4, max_running=1, max_step_tokens=8)
    sequence = make_sequence(1, prompt=3, output=9)
    driver.add(sequence)
    driver.step()
    step = driver.scheduler.schedule({1: [5, 6]})
    assert step is not None
    driver.scheduler.update(step, [[5]])
    assert sequence.num_uncomputed == 1
    driver.scheduler.check_integrity()


def test_guesses_have_so_many_rows_of_logits_and_no_more() -> None:
    driver = Driver(num_blocks=64, block_size=4, max_running=2, max_step_tokens=200)
    driver.add(make_sequence(1, prompt=3, output=90), make_sequence(2, prompt=3, output=90))
    driver.step()
    step = driver.scheduler.schedule({1: [5] * 50, 2: [5] * 50})
    assert step is not None
    assert [part.num_drafts for part in step.parts] == [50, 14]


def test_tokens_that_are_certain_to_follow_are_computed_together() -> None:
    driver = Driver(num_blocks=16, block_size=4, max_running=1, max_step_tokens=8)
    sequence = make_sequence(1, prompt=3, output=9)
    driver.add(sequence)
    step = driver.scheduler.schedule()
    assert step is not None
    driver.scheduler.update(step, [[5, 6, 7]])
    step = driver.scheduler.schedule()
    assert step is not None
    assert [(part.num_new, part.samples) for part in step.parts] == [(3, True)]


def test_guesses_beyond_the_last_token_allowed_are_left_out() -> None:
    driver = Driver(num_blocks=16, block_size=4, max_running=1, max_step_tokens=8)
    driver.add(make_sequence(1, prompt=3, output=3))
    driver.step()
    step = driver.scheduler.schedule({1: [5] * 6})
    assert step is not None
    assert step.parts[0].num_drafts == 1


def test_guesses_take_nobody_s_blocks() -> None:
    driver = Driver(num_blocks=3, block_size=4, max_running=2, max_step_tokens=16)
    first, second = make_sequence(1, prompt=4, output=8), make_sequence(2, prompt=3, output=1)
    driver.add(first, second)
    step = driver.scheduler.schedule()
    assert step is not None
    driver.scheduler.update(step, [1, 1])
    step = driver.scheduler.schedule({1: [5] * 7})
    assert step is not None
    assert [(part.sequence, part.num_drafts) for part in step.parts] == [(first, 3), (second, 0)]
    assert driver.scheduler.num_preemptions == 0


def test_a_prompt_s_logits_are_given_once_for_each_token_in_small_pieces() -> None:
    driver = Driver(num_blocks=64, block_size=4, max_running=2, max_step_tokens=100)
    driver.add(make_sequence(1, prompt=150, output=2, wants_prompt_logits=True))
    rows = []
    while (step := driver.step()) is not None:
        rows.append((step.batch.num_tokens, step.parts[0].num_prompt_rows, len(step.batch.logit_rows)))
    assert rows == [(64, 64, 64), (64, 64, 64), (22, 21, 22), (1, 0, 1)]


def test_a_prompt_whose_logits_are_wanted_is_computed_in_full() -> None:
    driver = Driver(num_blocks=64, block_size=4, max_running=2, max_step_tokens=100, prefix_cache=True)
    for number in range(2):
        driver.add(sequence := make_sequence(number, prompt=40, output=2, wants_prompt_logits=number == 1))
        assert driver.run() == 41
        assert sequence.num_cached_tokens == 0


def test_two_prompts_share_the_rows_of_a_step() -> None:
    driver = Driver(num_blocks=64, block_size=4, max_running=2, max_step_tokens=200)
    driver.add(*(make_sequence(n, prompt=50, output=1, wants_prompt_logits=True) for n in range(2)))
    rows = []
    while (step := driver.step()) is not None:
        rows.append([part.num_prompt_rows for part in step.parts])
    assert rows == [[49, 15], [34]]


def test_a_stream_that_needs_several_tokens_comes_before_a_prompt() -> None:
    driver = Driver(num_blocks=64, block_size=4, max_running=2, max_step_tokens=8)
    prompt, stream = make_sequence(1, prompt=60, output=1), make_sequence(2, prompt=3, output=9)
    driver.add(stream)
    step = driver.scheduler.schedule()
    assert step is not None
    driver.scheduler.update(step, [[5, 6, 7]])
    driver.add(prompt)
    step = driver.scheduler.schedule()
    assert step is not None
    assert [(part.sequence, part.num_new) for part in step.parts] == [(stream, 3), (prompt, 5)]
    driver.scheduler.update(step, [[5, 6, 7]])
    step = driver.scheduler.schedule()
    assert step is not None
    assert [(part.sequence, part.num_new) for part in step.parts] == [(stream, 3), (prompt, 5)]
