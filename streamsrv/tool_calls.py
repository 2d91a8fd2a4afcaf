"""Calls of tools, found in a model's text as it arrives.

Stop texts are looked for before, in the whole text as the model writes it: one that appears in a call ends
the output there, and the call, being unfinished, comes out as text.
"""

import json
import re
from collections.abc import Sequence
from enum import Enum
from typing import Any, TypeAlias

from streamsrv.chat import Tool, ToolCall
from streamsrv.tool_call_format import ToolCallFormat
from streamsrv.tool_call_readers import CallReader, JsonReader, MistralReader, Reading
from streamsrv.tool_call_xml import QwenXmlReader

Piece: TypeAlias = str | ToolCall

_MAX_GAP_CHARS = 64
"""White space that is held back where a call, or the end of one, may follow."""
_THOUGHT_BEGINS = "<think>"
_THOUGHT_ENDS = "</think>"
_THOUGHT_END = re.compile(_THOUGHT_ENDS)


class _Place(Enum):
    """Where in the text the parser is."""

    GAP = "gap"
    """Where a call may begin with a bracket alone: at the beginning, or after such a call."""
    TEXT = "text"
    THOUGHT = "thought"
    CALL = "call"
    AFTER = "after"
    """After a call, before the text that closes it."""


class ToolCallParser:
    """Cuts a model's text into text and calls. Purely a function of the text, not of how it was cut.

    A call is given out with its last bracket, and its text, markers with it, is in no piece. All other text
    is, in order: a broken call's, too (no valid JSON, no name, cut off by the end), unchanged. What could
    still be a call is held back until that is certain. Each character is looked at a bounded number of times.

    Calls in a thought (`<think>` to `</think>`) are text. `in_thought` says that the prompt has opened one.

    A call's id is "call" and five digits, counted from `num_earlier_calls`: those in the conversation so far.
    It has nine letters and digits since Mistral's templates take no other ids.

    `tools` are those offered; a call of another is a call all the same. Only QWEN_XML needs them, for types.
    """

    def __init__(
        self,
        format: ToolCallFormat,  # noqa: A002 (the plain word)
        tools: Sequence[Tool] = (),
        *,
        num_earlier_calls: int = 0,
        in_thought: bool = False,
    ) -> None:
        self._format = format
        self._marker_texts = [format.opening, *([_THOUGHT_BEGINS] if format.thinks else [])]
        self._markers = re.compile("|".join(map(re.escape, self._marker_texts)))
        self._schemas = _schemas(tools) if format is ToolCallFormat.QWEN_XML else {}
        self._num_calls = num_earlier_calls
        self._bare = format is ToolCallFormat.LLAMA3
        self._gap_chars = " \t\r\n"
        self._place = _Place.GAP if self._bare else _Place.TEXT
        if in_thought and format.thinks:
            self._place = _Place.THOUGHT
        self._held: list[str] = []
        self._num_held = 0
        """Characters of a gap, or of what closes a call."""
        self._before = ""
        """In a call: what came before the reader's part."""
        self._reader: CallReader = JsonReader()

    def push(self, text: str) -> list[Piece]:
        """Take the next text; return what became certain with it, which may be nothing."""
        pieces: list[Piece] = []
        i = 0
        while i < len(text):
            if self._place is _Place.CALL:
                i = self._read_call(text, i, pieces)
            elif self._place is _Place.GAP:
                i = self._read_gap(text, i, pieces)
            elif self._place is _Place.AFTER:
                i = self._read_closing(text, i, pieces)
            else:
                text, i = self._read_text(text, i, pieces)
        return _merged(pieces)

    def flush(self) -> list[Piece]:
        """Return what was held back, as text: nothing can follow."""
        text = self._before + "".join(self._held)
        self._before, self._place = "", _Place.TEXT
        self._held = []
        return [text] if text else []

    def _read_text(self, text: str, i: int, pieces: list[Piece]) -> tuple[str, int]:
        """Pass text on up to a marker. What may be the beginning of one goes in front of the next text."""
        if self._held:
            text, i = "".join(self._held) + text[i:], 0
            self._held = []
        in_thought = self._place is _Place.THOUGHT
        match = (_THOUGHT_END if in_thought else self._markers).search(text, i)
        if match is None:
            cut = len(text) - _overlap(text[i:], [_THOUGHT_ENDS] if in_thought else self._marker_texts)
            pieces.append(text[i:cut])
            self._held = [text[cut:]] if cut < len(text) else []
            return text, len(text)
        if match[0] == self._format.opening:
            pieces.append(text[i : match.start()])
            self._begin_call(match[0])
        else:
            pieces.append(text[i : match.end()])
            self._place = _Place.TEXT if in_thought else _Place.THOUGHT
        return text, match.end()

    def _read_gap(self, text: str, i: int, pieces: list[Piece]) -> int:
        """Read what may stand before a call that begins with a bracket alone."""
        while i < len(text) and text[i] in self._gap_chars and self._num_held < _MAX_GAP_CHARS:
            self._hold(text[i])
            i += 1
        if i == len(text):
            return i
        if text[i] == "{":
            self._begin_call("".join(self._held), bare=True)
        else:
            self._release(pieces)
        return i

    def _begin_call(self, before: str, *, bare: bool = False) -> None:
        self._before, self._held, self._num_held = before, [], 0
        self._place = _Place.CALL
        if self._format is ToolCallFormat.MISTRAL:
            self._reader = MistralReader()
        elif self._format is ToolCallFormat.QWEN_XML:
            self._reader = QwenXmlReader(self._schemas)
        else:
            self._reader = JsonReader(bare=bare)

    def _read_call(self, text: str, i: int, pieces: list[Piece]) -> int:
        end, reading = self._reader.read(text, i)
        self._held.append(text[i:end])
        if reading is Reading.MORE:
            return end
        calls = self._reader.calls("".join(self._held)) if reading is Reading.DONE else []
        if not calls:
            self._release(pieces)
            return end
        for name, arguments in calls:
            pieces.append(ToolCall(f"call{self._num_calls:05}", name, arguments))
            self._num_calls += 1
        self._before, self._held, self._num_held = "", [], 0
        self._place = _Place.TEXT
        if self._bare:
            self._place, self._gap_chars = _Place.GAP, " \t\r\n;"
        elif self._format.closing:
            self._place = _Place.AFTER
        return end

    def _read_closing(self, text: str, i: int, pieces: list[Piece]) -> int:
        """Pass over what closes a call, with white space before it. If it is missing, that is text."""
        while i < len(text):
            tail = "".join(self._held) + text[i]
            if self._num_held >= _MAX_GAP_CHARS or not self._format.closing.startswith(
                tail.lstrip(" \t\r\n")
            ):
                self._release(pieces)
                return i
            i += 1
            if tail.endswith(self._format.closing):
                self._held, self._num_held, self._place = [], 0, _Place.TEXT
                return i
            self._hold(text[i - 1])
        return i

    def _hold(self, char: str) -> None:
        self._held.append(char)
        self._num_held += 1

    def _release(self, pieces: list[Piece]) -> None:
        """Give out as text what was held back, but an end that a marker may begin with."""
        text = self._before + "".join(self._held)
        cut = len(text) - _overlap(text, self._marker_texts)
        pieces.append(text[:cut])
        self._before, self._held, self._num_held = "", [text[cut:]] if cut < len(text) else [], 0
        self._place = _Place.TEXT


def _overlap(text: str, markers: Sequence[str]) -> int:
    """Length of the longest end of the text that a marker begins with, but is not."""
    longest = max(map(len, markers)) - 1
    ends = (n for n in range(min(longest, len(text)), 0, -1) if text[-n:] in {m[:n] for m in markers})
    return next(ends, 0)


def _merged(pieces: list[Piece]) -> list[Piece]:
    """Join texts that stand side by side, and leave out empty ones."""
    merged: list[Piece] = []
    texts: list[str] = []
    for piece in [*pieces, None]:
        if isinstance(piece, str):
            texts.append(piece)
            continue
        if text := "".join(texts):
            merged.append(text)
        texts = []
        if piece is not None:
            merged.append(piece)
    return merged


def _schemas(tools: Sequence[Tool]) -> dict[str, Any]:
    """The tools' schemas by name. Those that are no JSON were refused when the chat was rendered."""
    return {tool.name: json.loads(tool.parameters_json_schema or "{}") for tool in tools}
