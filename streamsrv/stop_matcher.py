"""Stop strings, looked for in a text that arrives in pieces."""

from collections import deque
from collections.abc import Sequence


class StopMatcher:
    """Finds the stop string that is completed first, by the automaton of Aho and Corasick.

    What it finds depends on the text alone, not on how the text was cut: the stop whose last character
    comes first, and of several that end there the longest. A state is the longest end of the text so far
    that a stop begins with; its length is what may not be given out yet.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        self._next: list[dict[str, int]] = [{}]
        self._found: list[str | None] = [None]
        self.lengths = [0]
        """[state] Characters of the text's end that may belong to a stop."""
        for stop in stops:
            state = 0
            for char in stop:
                state = self._next[state].setdefault(char, len(self._next))
                if state == len(self._next):
                    self._next.append({})
                    self._found.append(None)
                    self.lengths.append(0)
            self._found[state] = stop
        self._fail = [0] * len(self._next)
        self._link()

    def _link(self) -> None:
        """Set lengths, and where each state goes on when no stop has the next character there."""
        queue = deque([0])
        while queue:
            state = queue.popleft()
            for char, child in self._next[state].items():
                self.lengths[child] = self.lengths[state] + 1
                self._fail[child] = self._step(self._fail[state], char) if state else 0
                if self._found[child] is None:
                    self._found[child] = self._found[self._fail[child]]
                queue.append(child)

    def _step(self, state: int, char: str) -> int:
        while char not in self._next[state]:
            if not state:
                return 0
            state = self._fail[state]
        return self._next[state][char]

    def advance(self, state: int, text: str) -> tuple[int, int, str | None]:
        """Read on from a state.

        Returns the new state, how many characters of `text` were read, and the stop that ended there or
        None. After a stop the rest of the text is not read.
        """
        root = self._next[0]
        if not state and root.keys().isdisjoint(text):
            return 0, len(text), None
        for i, char in enumerate(text):
            state = self._step(state, char)
            found = self._found[state]
            if found is not None:
                return state, i + 1, found
        return state, len(text), None
