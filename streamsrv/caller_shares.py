"""How much has been computed for whom, so that callers get equal shares."""


class CallerShares:
    """Tokens computed for each caller that has sequences, as a measure of whose turn it is.

    A caller that comes, or comes back, starts level with the one who has got least of those at work: what it
    left unused before counts for nothing, and what it has had too much stays against it for as long as
    anybody is at work.
    """

    def __init__(self) -> None:
        self._num_tokens: dict[str, int] = {}
        self._num_sequences: dict[str, int] = {}

    def __len__(self) -> int:
        """Callers that are remembered."""
        return len(self._num_tokens)

    def enter(self, caller: str) -> None:
        """Note one more sequence of a caller."""
        if caller not in self._num_sequences:
            self._num_tokens[caller] = max(self._num_tokens.get(caller, 0), self._least())
            self._num_sequences[caller] = 0
        self._num_sequences[caller] += 1

    def leave(self, caller: str) -> None:
        """Note that a sequence of a caller has ended."""
        self._num_sequences[caller] -= 1
        if self._num_sequences[caller]:
            return
        del self._num_sequences[caller]
        # Only callers who are ahead need be remembered, or names would pile up.
        if not self._num_sequences:
            self._num_tokens.clear()
        elif len(self._num_tokens) > 2 * len(self._num_sequences) + 64 or self._is_level(caller):
            least = self._least()
            self._num_tokens = {
                name: count
                for name, count in self._num_tokens.items()
                if name in self._num_sequences or count > least
            }

    def charge(self, caller: str, num_tokens: int) -> None:
        """Add tokens that were computed for a caller."""
        self._num_tokens[caller] += num_tokens

    def num_tokens(self, caller: str) -> int:
        """Tell a caller's count; the lower, the earlier is its turn."""
        return self._num_tokens[caller]

    def check_integrity(self, callers: list[str]) -> None:
        """Hold the books against the callers of all sequences.

        Raises:
            AssertionError: a sequence was not noted, or not to have ended.

        """
        assert self._num_sequences == {name: callers.count(name) for name in callers}
        assert self._num_sequences.keys() <= self._num_tokens.keys()

    def _least(self) -> int:
        return min((self._num_tokens[name] for name in self._num_sequences), default=0)

    def _is_level(self, caller: str) -> bool:
        return self._num_tokens[caller] <= self._least()
