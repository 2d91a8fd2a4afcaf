"""Readers of one call, or one list of calls, in a text that arrives in pieces."""

import json
import re
from collections.abc import Iterator
from enum import Enum
from typing import Any, Protocol

from streamsrv.chat import MAX_JSON_DEPTH

MAX_HEAD_CHARS = 256
"""Of a name with what may stand between it and its arguments."""

_STRING_RUN = re.compile(r'[^"\\\x00-\x1f]*')
SPACES = " \t\r\n"
_SPACE_RUN = re.compile(r"[ \t\r\n]*")
_PLAIN_RUN = re.compile(r"[ \t\r\n:,0-9+\-.eEtrufalsn]*")
_GAP = re.compile(r"[ \t\r\n,:]*")
_MISTRAL_RUN = re.compile(r"[\w.\-\[\] \t\r\n]*", re.ASCII)
_MISTRAL_HEAD = re.compile(r"\s*([\w.\-]+)\s*(?:\[CALL_ID\][\w-]*)?\s*(?:\[ARGS\])?\s*", re.ASCII)
_BARE_HEADS = ('{"name":"', '{"type":"function"', '{"parameters":{')

_decode = json.JSONDecoder().raw_decode


class Reading(Enum):
    """How far a reader is."""

    MORE = "more"
    """It wants more text."""
    DONE = "done"
    """It has all: `calls` tells whether it is good."""
    BROKEN = "broken"
    """What it has read is no call, however it goes on."""


class CallReader(Protocol):
    """Reads what follows a call's opening. What it finds does not depend on how the text was cut."""

    def read(self, text: str, start: int) -> tuple[int, Reading]:
        """Read on from a position. Returns the first position that was not read, and how far it is."""
        ...

    def calls(self, raw: str) -> list[tuple[str, str]]:
        """Give the names and arguments in all that was read, after `DONE`; none if it is not valid."""
        ...


class JsonReader:
    """A JSON object or list, to its last bracket. It is looked at once, character by character.

    `bare` gives up as soon as the object does not begin as a call does, since nothing has announced one.
    """

    def __init__(self, *, bare: bool = False) -> None:
        self._open: list[str] = []
        self._in_string = False
        self._escaped = False
        self._bare = bare
        self._head: str | None = "" if bare else None

    def read(self, text: str, start: int) -> tuple[int, Reading]:
        """Read on from a position."""
        i = start
        while i < len(text):
            if self._head is not None and not self._begins_a_call(text[i]):
                return i, Reading.BROKEN
            # While the beginning is looked at, one character at a time.
            end = len(text) if self._head is None else i + 1
            if self._escaped:
                self._escaped = False
                i += 1
                continue
            run = _STRING_RUN if self._in_string else _PLAIN_RUN if self._open else _SPACE_RUN
            match = run.match(text, i, end)
            assert match is not None
            if match.end() > i:
                i = match.end()
                continue
            if not self._take(text[i]):
                return i, Reading.BROKEN
            i += 1
            if not self._open:
                return i, Reading.DONE
        return i, Reading.MORE

    def calls(self, raw: str) -> list[tuple[str, str]]:
        """Give the calls in an object or a list of them."""
        try:
            json.loads(raw)
        except (ValueError, RecursionError):
            return []
        calls = [_call(_members(raw, start), self._bare) for start in _objects(raw)]
        return [call for call in calls if call is not None] if all(calls) else []

    def _take(self, char: str) -> bool:
        """Take a character that is more than a part of a run; whether it is allowed."""
        if self._in_string:
            self._in_string = char == "\\"
            self._escaped = char == "\\"
            return char in '"\\'
        if char == '"' and self._open:
            self._in_string = True
        elif char in "{[":
            self._open.append("}" if char == "{" else "]")
        elif char in "}]":
            return bool(self._open) and self._open.pop() == char
        else:
            return False
        return len(self._open) <= MAX_JSON_DEPTH

    def _begins_a_call(self, char: str) -> bool:
        assert self._head is not None
        if char in SPACES:
            return True
        self._head += char
        if self._head in _BARE_HEADS:
            self._head = None
            return True
        return any(head.startswith(self._head) for head in _BARE_HEADS)


class MistralReader:
    """What follows Mistral's marker: a list of calls, or one's name and its arguments."""

    def __init__(self) -> None:
        self._head = ""
        self._json: JsonReader | None = None

    def read(self, text: str, start: int) -> tuple[int, Reading]:
        """Read on from a position."""
        i = start
        if self._json is None:
            while i < len(text) and text[i] in SPACES and not self._head:
                i += 1
            if i == len(text):
                return i, Reading.MORE
            if self._head or text[i] not in "[{":
                match = _MISTRAL_RUN.match(text, i, i + MAX_HEAD_CHARS - len(self._head))
                assert match is not None
                self._head += match[0]
                i = match.end()
                if len(self._head) == MAX_HEAD_CHARS:
                    return i, Reading.BROKEN
                if i == len(text):
                    return i, Reading.MORE
                if text[i] != "{" or not _MISTRAL_HEAD.fullmatch(self._head):
                    return i, Reading.BROKEN
            self._json = JsonReader()
        return self._json.read(text, i)

    def calls(self, raw: str) -> list[tuple[str, str]]:
        """Give the calls of the list, or the one with its name before it."""
        match = _MISTRAL_HEAD.match(raw)
        if match is None:
            return JsonReader().calls(raw)
        arguments = raw[match.end() :]
        return [(match[1], arguments)] if _is_object(arguments) else []


def _objects(raw: str) -> Iterator[int]:
    """Where the objects begin: the one, or those of the list. Whatever else is in the list counts, too."""
    start = _skip(raw, 0)
    if raw[start] == "{":
        yield start
        return
    position = _skip(raw, start + 1)
    while raw[position] != "]":
        yield position
        position = _skip(raw, _decode(raw, position)[1])


def _members(raw: str, start: int) -> dict[str, tuple[Any, str]]:
    """An object's values, each with its text, by key; nothing for what is no object."""
    members: dict[str, tuple[Any, str]] = {}
    if raw[start] != "{":
        return members
    position = _skip(raw, start + 1)
    while raw[position] != "}":
        key, position = _decode(raw, position)
        begin = _skip(raw, position)
        value, position = _decode(raw, begin)
        members[key] = (value, raw[begin:position])
        position = _skip(raw, position)
    return members


def _skip(raw: str, position: int) -> int:
    match = _GAP.match(raw, position)
    assert match is not None
    return match.end()


def _call(members: dict[str, tuple[Any, str]], bare: bool) -> tuple[str, str] | None:
    """A call's name and the text of its arguments, which some models call parameters.

    Models leave out arguments where there are none; an object that nothing has announced must have them.
    """
    name, _ = members.get("name", (None, ""))
    missing: tuple[Any, str] = (None, "") if bare else ({}, "{}")
    arguments, text = members.get("arguments") or members.get("parameters") or missing
    if not isinstance(name, str) or not name or not isinstance(arguments, dict) or not _is_text(name):
        return None
    return name, text


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _is_text(text: str) -> bool:
    """Whether a text can be sent: an escape in JSON can be half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
