"""A reader of calls that are written in tags."""

import json
import re
from collections.abc import Mapping
from typing import Any

from streamsrv.tool_call_readers import MAX_HEAD_CHARS, SPACES, Reading

_FUNCTION = re.compile(r"\s*<function=([^<>\n]+)>")
_PARAMETER = re.compile(r"<parameter=([^<>\n]+)>(.*?)</parameter>", re.DOTALL)


class QwenXmlReader:
    """Qwen3-Coder's tags. A value goes on to the next `</parameter>`, whatever it holds.

    `schemas` are the tools' parameters by the tools' names: values are written without quotation marks, and
    only the schema says which are strings.
    """

    def __init__(self, schemas: Mapping[str, Any]) -> None:
        self._schemas = schemas
        self._tag = ""
        self._allowed: tuple[str, ...] = ("<function=",)
        self._in_value = False
        self._last = ""

    def read(self, text: str, start: int) -> tuple[int, Reading]:
        """Read on from a position."""
        i = start
        while i < len(text):
            if self._in_value:
                i = self._read_value(text, i)
                continue
            char = text[i]
            if self._tag or char not in SPACES:
                if not self._fits(self._tag + char):
                    return i, Reading.BROKEN
                self._tag += char
                if char == ">":
                    if self._tag == "</function>":
                        return i + 1, Reading.DONE
                    self._in_value = self._tag.startswith("<parameter=")
                    self._tag, self._last = "", ""
                    self._allowed = ("<parameter=", "</function>")
            i += 1
        return i, Reading.MORE

    def calls(self, raw: str) -> list[tuple[str, str]]:
        """Give the one call; its arguments are made into JSON."""
        function = _FUNCTION.match(raw)
        if function is None:
            return []
        name = function[1]
        schema = self._schemas.get(name)
        properties = schema.get("properties") if isinstance(schema, dict) else None
        values = {
            match[1]: _json_text(
                match[2].removeprefix("\n").removesuffix("\n"),
                properties.get(match[1]) if isinstance(properties, dict) else None,
            )
            for match in _PARAMETER.finditer(raw, function.end())
        }
        pairs = (f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in values.items())
        return [(name, "{" + ", ".join(pairs) + "}")]

    def _fits(self, tag: str) -> bool:
        if any(allowed.startswith(tag) for allowed in self._allowed):
            return True
        named = [allowed for allowed in self._allowed if allowed.endswith("=") and tag.startswith(allowed)]
        rest = tag[len(named[0]) :] if named else ""
        return bool(named) and rest[-1] not in "<\n" and rest != ">" and len(tag) <= MAX_HEAD_CHARS

    def _read_value(self, text: str, i: int) -> int:
        end = "</parameter>"
        # The end may have begun in an earlier piece.
        window = self._last + text[i : i + len(end)]
        found = window.find(end)
        if found >= 0:
            position = i + found + len(end) - len(self._last)
        else:
            found = text.find(end, i)
            position = found + len(end)
        if found < 0:
            self._last = (self._last + text[max(i, len(text) - len(end)) :])[1 - len(end) :]
            return len(text)
        self._in_value = False
        return position


def _json_text(value: str, schema: object) -> str:
    """A value without quotation marks as JSON: a string, unless its schema says something else and it is."""
    if isinstance(schema, dict):
        kinds = schema.get("type")
        kinds = kinds if isinstance(kinds, list) else [kinds]
        if kinds == ["boolean"]:
            value = value.lower()
        try:
            read = json.loads(value, parse_constant=_no_constant)
        except (ValueError, RecursionError):
            read = value
        if not isinstance(read, str) and ("string" not in kinds or (read is None and "null" in kinds)):
            return value
    return json.dumps(value, ensure_ascii=False)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
