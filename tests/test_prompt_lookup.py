"""Guesses by what was said before."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from streamsrv.prompt_lookup import PromptLookup


def test_what_followed_the_newest_tokens_before_is_the_guess() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 50]
    lookup = PromptLookup(tokens)
    assert list(lookup.guess()) == []
    tokens += [2, 3, 4]
    assert list(lookup.guess()) == [5, 6, 7, 8, 9, 10, 11]


def test_the_newest_of_several_places_counts() -> None:
    lookup = PromptLookup([1, 2, 3, 70, 71, 72, 73, 74, 75, 76, 1, 2, 3, 80, 81, 82, 83, 84, 85, 86, 1, 2, 3])
    assert list(lookup.guess()) == [80, 81, 82, 83, 84, 85, 86]


def test_longer_agreement_counts_more_than_a_newer_place() -> None:
    lookup = PromptLookup([9, 1, 2, 3, 70, 0, 0, 0, 0, 0, 0, 8, 1, 2, 3, 80, 0, 0, 0, 9, 1, 2, 3])
    assert lookup.guess()[0] == 70


def test_what_repeats_itself_is_guessed_to_go_on() -> None:
    assert list(PromptLookup([7, 8, 9, 7, 8, 9]).guess()) == [7, 8, 9, 7, 8, 9, 7]
    assert list(PromptLookup([4, 4, 4, 4]).guess()) == [4] * 7


def test_nothing_is_guessed_of_what_was_never_said() -> None:
    assert list(PromptLookup(range(100)).guess()) == []
    assert list(PromptLookup([1, 2]).guess()) == []


def test_guesses_that_are_wrong_pause_for_longer_and_longer() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    lookup = PromptLookup(tokens)
    attempts = []
    for i in range(400):
        tokens += [1, 2, 3] if i % 3 == 0 else [100 + i]
        if lookup.guess():
            attempts.append(i)
            lookup.learn(7, 0, len(tokens))
    gaps = np.diff(attempts)
    assert len(attempts) < 12
    assert gaps[-1] > gaps[2]


def test_guesses_that_are_right_go_on() -> None:
    text = list(range(500))
    tokens = [*text, *text[:3]]
    lookup = PromptLookup(tokens)
    done, attempts = 3, 0
    while done < 400:
        guesses = list(lookup.guess())
        assert guesses == text[done : done + 7]
        tokens += text[done : done + 8]
        lookup.learn(7, 7, len(tokens))
        done, attempts = done + 8, attempts + 1
    assert attempts == 50


@given(st.lists(st.integers(0, 3), max_size=60))
def test_a_guess_is_what_the_plain_search_finds(token_ids: list[int]) -> None:
    guesses = list(PromptLookup(token_ids).guess())
    end = len(token_ids)
    for size in (4, 3):
        newest = token_ids[end - size :] if end >= size else None
        places = [p for p in range(size, end) if token_ids[p - size : p] == newest]
        if places:
            expected = token_ids[places[-1] :]
            assert guesses[: len(expected)] == expected[:7]
            assert len(guesses) == 7
            return
    assert guesses == []
