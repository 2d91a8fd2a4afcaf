"""The text of an output, token by token."""

from codecs import utf_8_decode
from collections.abc import Sequence
from typing import Self

from streamsrv.stop_matcher import StopMatcher
from streamsrv.tokenizer import Tokenizer


class Detokenizer:
    """Turns tokens into text as soon as it is certain.

    Held back are the bytes of an unfinished character and an end that a stop string may begin with. What
    `push` and `flush` return, joined, is `Tokenizer.decode` of all ids, up to the first stop string; see
    `StopMatcher` for which one is the first.

    `include_stop` keeps the stop string itself in the text. `continues` is as in `Tokenizer.decode`.
    `kept` are texts of control tokens that stay even with `skip_special`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special: bool = True,
        continues: bool = False,
        kept: Sequence[str] = (),
    ) -> None:
        self.token_bytes = tokenizer.token_bytes
        """Gives the text of one token, which can be part of a character."""
        self._skipped = tokenizer.special_ids if skip_special else frozenset()
        if kept:
            self._skipped -= tokenizer.control_ids(kept)
        self._strip = tokenizer.strips_first_space and not continues
        self._unfinished = b""
        """The bytes of a character whose end has not come."""
        self._stops = StopMatcher(stop) if stop else None
        self._include_stop = include_stop
        self._state = 0
        self._held = ""
        self._matched_stop: str | None = None

    @property
    def matched_stop(self) -> str | None:
        """The stop string that ended the text, or None while none has."""
        return self._matched_stop

    def push(self, token_id: int, *, may_stop: bool = True) -> str:
        """Take the next token; return the text that became certain with it, which may be empty.

        Without `may_stop` its text passes by, and no stop string is looked for in it.
        """
        if token_id in self._skipped or self._matched_stop is not None:
            return ""
        data = self.token_bytes(token_id)
        if self._strip and data:
            self._strip = False
            data = data.removeprefix(b" ")
        text = self._decode(data)
        return self._through_stops(text) if self._stops is not None and text and may_stop else text

    def push_all(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens; return what `push` would for each, joined, in the time of a few."""
        if self._matched_stop is not None:
            return ""
        skipped = self._skipped
        if skipped and not skipped.isdisjoint(token_ids):
            token_ids = [token_id for token_id in token_ids if token_id not in skipped]
        data = b"".join(map(self.token_bytes, token_ids))
        if self._strip and data:
            self._strip = False
            data = data.removeprefix(b" ")
        text = self._decode(data)
        return self._through_stops(text) if self._stops is not None and text else text

    def copy(self) -> Self:
        """Make another one that has taken the same tokens."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other

    def flush(self) -> str:
        """Return what was held back: nothing can follow. A character left unfinished becomes U+FFFD."""
        if self._matched_stop is not None:
            return ""
        text = self._unfinished.decode(errors="replace")
        self._unfinished = b""
        if self._stops is not None and text:
            text = self._through_stops(text)
        text, self._held, self._state = text + self._held, "", 0
        return text

    def _decode(self, data: bytes) -> str:
        if self._unfinished:
            data = self._unfinished + data
        text, num_read = utf_8_decode(data, "replace", False)
        self._unfinished = data[num_read:]
        return text

    def _through_stops(self, text: str) -> str:
        assert self._stops is not None
        self._state, num_read, found = self._stops.advance(self._state, text)
        if found is None:
            text = self._held + text
            cut = len(text) - self._stops.lengths[self._state]
            self._held = text[cut:]
            return text[:cut]
        self._matched_stop = found
        text = self._held + text[:num_read]
        self._held = ""
        return text if self._include_stop else text[: len(text) - len(found)]
