"""Guessing what an output says next, by what was said before: in its prompt, or by itself.

No model is asked. Where the newest tokens stood before, what followed them then is the guess (prompt lookup
decoding: A. Saxena, 2023). A step verifies it: each guess is kept only if the model's own token at its place,
drawn as always, is the same. So the output is that of a run without guesses, token for token.
"""

from collections.abc import Sequence as Seq

_LONGEST = 4
_SHORTEST = 3
"""Newest tokens that must have stood together before. In free text two often do, and what follows differs."""
_NUM_GUESSES = 7
"""Guesses at a time. A step of eight tokens takes hardly longer than one of a single token where reading the
weights takes most of it, and engines like steps of a steady size."""
_PAYS = 0.2
"""Part of the guesses that must be right for them to pay: their rows are computed for nothing otherwise."""
_MEMORY = 0.7
"""How much the past counts in that part: of 4 attempts in a row that fail, a quarter is left."""
_FIRST_PAUSE = 8
_LONGEST_PAUSE = 256
"""Tokens without guesses after those that did not pay; each pause is twice the one before."""


class PromptLookup:
    """The guesses for one output, which stop for a while where they do not pay.

    Costs a few dictionary entries a token, when a guess is asked for and not before.
    """

    def __init__(self, token_ids: Seq[int]) -> None:
        """`token_ids` are the prompt's and the output's: the caller's own list, as it grows."""
        self._token_ids = token_ids
        self._num_noted = 0
        # Where the tokens after an n-gram begin, for its last two places: the newest is often the end itself.
        self._places: dict[tuple[int, ...], tuple[int, int]] = {}
        self._part_right = 0.5  # of the guesses; unknown at first
        self._pause = _FIRST_PAUSE
        self._silent_until = 0
        """Tokens that there must be before the next guess."""

    def guess(self) -> Seq[int]:
        """What may follow, the next token first; empty where nothing is known, or guessing does not pay."""
        known = self._token_ids
        end = len(known)
        if end < self._silent_until:
            return ()
        self._note()
        for size in range(min(_LONGEST, end), _SHORTEST - 1, -1):
            places = self._places.get(tuple(known[end - size :]))
            place = -1 if places is None else places[1] if places[0] == end else places[0]
            if place >= 0:
                guessed = list(known[place : place + _NUM_GUESSES])
                # What repeats itself goes on so.
                while len(guessed) < _NUM_GUESSES:
                    guessed.append(guessed[len(guessed) - (end - place)])
                return guessed
        return ()

    def learn(self, num_guessed: int, num_right: int, num_tokens: int) -> None:
        """Take how many of an attempt's guesses were right, with which there are `num_tokens` tokens."""
        if not num_guessed:
            return
        self._part_right = _MEMORY * self._part_right + (1 - _MEMORY) * num_right / num_guessed
        if self._part_right >= _PAYS:
            if num_right == num_guessed:
                self._pause = _FIRST_PAUSE
            return
        self._silent_until = num_tokens + self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        self._part_right = _PAYS  # one more attempt after the pause decides

    def _note(self) -> None:
        """Take note of the tokens that have come since the last time."""
        known = self._token_ids
        for end in range(self._num_noted + 1, len(known) + 1):
            for size in range(_SHORTEST, min(_LONGEST, end) + 1):
                ngram = tuple(known[end - size : end])
                before = self._places.get(ngram)
                self._places[ngram] = end, (before[0] if before else -1)
        self._num_noted = len(known)
