"""Tells a chat template's own control tokens from what looks like one inside a caller's text."""

import re
from collections.abc import Iterable, Sequence

_PRIVATE_USE = range(0xF0000, 0xFFFFE)


class Placeholders:
    """Stand-ins, one character each, for characters that a control token could be made of.

    They are private-use characters that occur nowhere in `texts`.
    """

    def __init__(self, chars: Iterable[str], texts: Iterable[str]) -> None:
        used = {char for text in texts for char in set(text) if ord(char) >= _PRIVATE_USE.start}
        free = (chr(i) for i in _PRIVATE_USE if chr(i) not in used)
        self._by_char = {char: next(free) for char in chars}
        self._restore = {ord(stand_in): char for char, stand_in in self._by_char.items()}

    def put(self, text: str, positions: Iterable[int]) -> str:
        """Replace the characters at these positions."""
        chars = list(text)
        for i in positions:
            chars[i] = self._by_char[chars[i]]
        return "".join(chars)

    def restore(self, text: str) -> str:
        """Give the text as it was; every character stays at its position."""
        return text.translate(self._restore)


class ContentMask:
    """Finds in a caller's texts what could become a control token: a part of one, or a whole one.

    `control_texts` are the control tokens' texts, none empty.
    """

    def __init__(self, control_texts: Iterable[str]) -> None:
        self._texts = tuple(sorted(control_texts, key=len, reverse=True))
        # Without any, a pattern that matches nowhere.
        self._pattern = re.compile("|".join(map(re.escape, self._texts)) or "(?!)")
        self._firsts = frozenset(text[0] for text in self._texts)
        self._tails = frozenset(text[i:] for text in self._texts for i in range(1, len(text)))
        self._joined = "\0".join(self._texts)
        self._longest = max(map(len, self._texts), default=0)

    def touches(self, content: str) -> bool:
        """Whether a control token could begin in the content, or go on into it from before."""
        return any(char in content for char in self._firsts) or bool(self._continuation(content))

    def found(self, text: str) -> list[str]:
        """List the control tokens' texts in a text, in order; the longest where several begin."""
        return self._pattern.findall(text)

    def every_start(self, content: str) -> set[int]:
        """Positions of each character that a control token begins with, and of a possible continuation."""
        starts = {i for i, char in enumerate(content) if char in self._firsts}
        return starts | self._continuation(content)

    def whole_tokens(self, content: str) -> set[int]:
        """Positions where the content has a whole control token's text."""
        starts = set()
        for text in self._texts:
            i = content.find(text)
            while i >= 0:
                starts.add(i)
                i = content.find(text, i + 1)
        return starts

    def tokens_and_continuation(self, content: str) -> set[int]:
        """Positions where the content has a whole control token's text, and of a possible continuation."""
        return self.whole_tokens(content) | self._continuation(content)

    def placeholders(self, contents: Sequence[str], template: str) -> Placeholders:
        """Make stand-ins for every character that the functions above may name."""
        chars = set(self._firsts)
        for content in contents:
            chars.update(content[i] for i in self._continuation(content))
        return Placeholders(sorted(chars), [*contents, template])

    def _continuation(self, content: str) -> set[int]:
        """Where a control token goes on that the template's text has begun: the first character, or nowhere.

        Templates may strip white space around a content, so the first one that is none.
        """
        body = content.lstrip()
        start = len(content) - len(body)
        if any(body[:n] in self._tails for n in range(1, min(self._longest, len(body) + 1))):
            return {start}
        word = body.rstrip()
        if word and len(word) < self._longest and word in self._joined:
            return {start}
        return set()
