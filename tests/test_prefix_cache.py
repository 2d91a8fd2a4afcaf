"""What is computed once and used again: blocks that are shared, rows that are taken over or copied."""

from collections.abc import Callable

import pytest

from streamsrv.sequence import SequenceStatus
from tests.scheduler_driver import Driver, make_sequence

STEM = tuple(range(3, 43))


def paged(*, num_blocks: int = 64, max_running: int = 8, prefix_cache: bool = True) -> Driver:
    return Driver(num_blocks, 4, max_running, 64, prefix_cache=prefix_cache)


def rows(*, num_rows: int = 4, max_running: int = 4) -> Driver:
    return Driver(num_rows, 64, max_running, 64, prefix_cache=True, whole_rows=True)


def test_a_prompt_is_not_computed_twice() -> None:
    driver = paged()
    driver.add(make_sequence(1, (*STEM, 50, 51), 3))
    assert driver.run() == 42 + 2
    driver.add(again := make_sequence(2, (*STEM, 60, 61, 62), 3))
    assert driver.run() == 3 + 2
    assert again.num_cached_tokens == 40
    assert again.token_ids[43:] == driver.replies[:3]
    counters = driver.scheduler.counters
    assert (counters.num_cache_hits, counters.num_cached_tokens) == (1, 40)


def test_what_was_generated_is_found_too() -> None:
    driver = paged()
    driver.add(first := make_sequence(1, STEM[:6], 7))
    driver.run()
    driver.add(second := make_sequence(2, (*first.token_ids, 60), 1))
    driver.run()
    assert second.num_cached_tokens == 12


def test_the_last_two_tokens_of_a_prompt_are_always_computed() -> None:
    driver = paged()
    for number, prompt in enumerate([STEM[:9], STEM[:9], STEM[:8], STEM[:10]]):
        driver.add(sequence := make_sequence(number, prompt, 1))
        driver.run()
        assert sequence.num_cached_tokens == [0, 4, 4, 8][number]


def test_another_salt_finds_nothing() -> None:
    driver = paged()
    for number, salt in enumerate(["", "a", "b", "a"]):
        driver.add(sequence := make_sequence(number, STEM, 1, salt=salt))
        driver.run()
        assert sequence.num_cached_tokens == (36 if number == 3 else 0)


@pytest.mark.parametrize("make", [paged, rows])
def test_a_request_that_does_not_share_neither_takes_nor_leaves(make: Callable[[], Driver]) -> None:
    driver = make()
    for number, shares in enumerate([False, True, False, True]):
        driver.add(sequence := make_sequence(number, STEM, 1, use_prefix_cache=shares))
        driver.run()
        assert sequence.num_cached_tokens == 0 or (shares and number == 3)
    assert sequence.num_cached_tokens > 0


def test_a_request_that_does_not_share_leaves_no_block_to_be_evicted() -> None:
    driver = paged(num_blocks=12)
    for number in range(4):
        driver.add(make_sequence(number, STEM, 1, use_prefix_cache=False))
        driver.run()
    assert driver.scheduler.counters.num_evictions == 0


def test_a_server_can_share_nothing() -> None:
    driver = paged(prefix_cache=False)
    for number in range(2):
        driver.add(sequence := make_sequence(number, STEM, 1))
        driver.run()
        assert sequence.num_cached_tokens == 0


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_the_outputs_of_a_request_share_their_prompt(prefix_cache: bool) -> None:
    driver = paged(prefix_cache=prefix_cache)
    outputs = [make_sequence(n, STEM, 4, group=1, use_prefix_cache=False) for n in range(1, 5)]
    driver.add(*outputs)
    driver.step()
    assert [s.status is SequenceStatus.RUNNING for s in outputs] == [True, False, False, False]
    driver.step()
    assert all(s.status is SequenceStatus.RUNNING for s in outputs)
    # Nine blocks in common, and two of its own for each.
    assert driver.scheduler.num_free_blocks == 64 - 9 - 4 - 1
    driver.run()
    assert [s.num_cached_tokens for s in outputs] == [0, 36, 36, 36]
    assert all(s.token_ids[40:] == driver.replies[:4] for s in outputs)


def test_the_outputs_of_two_requests_do_not_share_unless_allowed() -> None:
    driver = paged()
    outputs = [make_sequence(n, STEM, 4, group=n // 2, use_prefix_cache=False) for n in range(4)]
    driver.add(*outputs)
    driver.run()
    assert [s.num_cached_tokens for s in outputs] == [0, 36, 0, 36]


@pytest.mark.parametrize("make", [paged, rows])
def test_outputs_go_on_when_the_one_they_wait_for_is_aborted(make: Callable[[], Driver]) -> None:
    driver = make()
    prompt = tuple(range(3, 63))
    outputs = [make_sequence(n, prompt * (1 + (make is paged)), 2, group=0) for n in range(4)]
    driver.add(*outputs)
    driver.step()
    if make is paged:
        assert outputs[0].is_in_prompt
    driver.scheduler.finish(outputs[0])
    driver.run()
    assert driver.finished == outputs[1:]


def test_one_that_waits_can_be_aborted() -> None:
    driver = paged()
    first, second = (make_sequence(n, STEM, 2, group=0) for n in range(2))
    driver.add(first, second)
    driver.step()
    assert driver.scheduler.num_waiting == 1
    assert list(driver.scheduler.waiting) == [second]
    driver.scheduler.finish(second)
    driver.scheduler.check_integrity()
    assert driver.scheduler.num_waiting == 0


def test_a_burst_computes_what_it_has_in_common_once() -> None:
    driver = paged(num_blocks=128)
    burst = [make_sequence(n, (*STEM, 50 + n, 51, 52), 1) for n in range(8)]
    driver.add(*burst)
    assert driver.run() == 43 + 7 * 3
    assert driver.finished == burst


def test_a_request_waits_for_none_that_ranks_behind_it() -> None:
    driver = Driver(64, 4, 8, 30, prefix_cache=True)
    late, early = make_sequence(2, STEM, 1), make_sequence(1, STEM, 1)
    driver.scheduler.add(late, now_s=2.0)
    driver.step()
    driver.scheduler.add(early, now_s=1.0)
    driver.step()
    assert early.num_waits == 0


def test_the_least_recently_used_is_evicted_first_from_its_end() -> None:
    driver = Driver(16, 4, 1, 64, prefix_cache=True)
    prompts = [(100 + n, *range(7)) * 3 for n in range(3)]  # six blocks each
    for number, prompt in enumerate(prompts):
        driver.add(make_sequence(number, prompt, 1))
        driver.run()
    # The third needed two blocks more than were empty: the first's last ones went.
    assert driver.scheduler.counters.num_evictions == 2
    driver.add(sequence := make_sequence(3, prompts[0], 1))
    driver.run()
    assert sequence.num_cached_tokens == 16


def test_a_block_at_work_is_not_evicted() -> None:
    driver = Driver(13, 4, 4, 64, prefix_cache=True)
    driver.add(make_sequence(1, STEM, 9), make_sequence(2, STEM, 9))
    driver.run()
    assert [s.token_ids[40:] for s in driver.finished] == [driver.replies[:9]] * 2


def test_one_that_gave_its_blocks_back_finds_them_again_and_counts_them_not_as_cached() -> None:
    driver = Driver(8, 4, 2, 32, prefix_cache=True)
    old, young = make_sequence(1, STEM[:9], 10), make_sequence(2, (1, *STEM[:11]), 10)
    driver.add(old, young)
    num_tokens = driver.run()
    assert driver.scheduler.num_preemptions > 0
    assert young.token_ids[12:] == driver.replies[:10]
    assert young.num_cached_tokens == 0
    assert num_tokens < 9 + 12 + 9 + 9 + 12


def test_a_row_that_begins_the_same_is_taken_over() -> None:
    driver = rows()
    driver.add(make_sequence(1, (*STEM, 50, 51), 3))
    assert driver.run() == 42 + 2
    driver.add(again := make_sequence(2, (*STEM, 60), 3))
    step = driver.step()
    assert step is not None
    assert (step.batch.num_tokens, step.batch.copies) == (2, ())
    assert again.num_cached_tokens == 39
    driver.run()
    assert again.token_ids[41:] == driver.replies[:3]


def test_the_row_with_the_longest_common_beginning_is_taken() -> None:
    driver = rows()
    for number, count in enumerate([10, 40, 20]):
        driver.add(make_sequence(number, (*STEM[:count], 50 + number), 1))
    driver.run()
    driver.add(sequence := make_sequence(4, (*STEM[:25], 60, 61), 1))
    driver.run()
    assert sequence.num_cached_tokens == 25


def test_a_burst_copies_what_it_has_in_common() -> None:
    driver = rows()
    burst = [make_sequence(n, (*STEM, 50 + n, 51), 2) for n in range(4)]
    driver.add(*burst)
    assert driver.run() == 42 + 3 * 2 + 4
    assert [s.num_cached_tokens for s in burst] == [0, 40, 40, 40]
    assert all(s.token_ids[42:] == driver.replies[:2] for s in burst)


def test_the_beginning_of_a_long_row_is_copied_rather_than_the_rest_lost() -> None:
    driver = rows()
    driver.add(make_sequence(1, (*STEM, *range(100, 120)), 1))
    driver.run()
    for number in range(2, 4):
        driver.add(sequence := make_sequence(number, (*STEM[:18], 50 + number), 1))
        driver.run()
        assert sequence.num_cached_tokens == 17
    driver.add(sequence := make_sequence(4, (*STEM, *range(100, 120)), 1))
    driver.run()
    assert sequence.num_cached_tokens == 58


def test_the_only_free_row_is_taken_over_even_if_much_is_lost() -> None:
    driver = rows(num_rows=1, max_running=1)
    driver.add(make_sequence(1, (*STEM, *range(100, 120)), 1))
    driver.run()
    driver.add(sequence := make_sequence(2, (*STEM[:18], 50, 51), 1))
    driver.run()
    assert sequence.num_cached_tokens == 18
