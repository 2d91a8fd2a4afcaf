"""How log records are written: one record a line, and nothing that a caller says can look like a line."""

import json
import logging
import re
import time
from collections.abc import Mapping
from enum import Enum
from typing import Final

FIELDS: Final = "fields"
"""The record attribute with a mapping of what the line says besides its message; None is left out."""

_BARE = re.compile(r"[A-Za-z0-9_.:/@%+\-\[\]]+")
# What ends a line somewhere, moves a terminal's cursor or turns its text around.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

FieldValue = str | int | float | None


class LogFormat(Enum):
    """How a line is laid out."""

    TEXT = "text"
    JSON = "json"


def fields(values: Mapping[str, FieldValue]) -> dict[str, Mapping[str, FieldValue]]:
    """Give a log call's `extra` for a line with these values."""
    return {FIELDS: values}


def configure_logging(level: str, layout: LogFormat) -> None:
    """Write all records of the process, from `level` up, to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if layout is LogFormat.JSON else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


class TextFormatter(logging.Formatter):
    """TIME LEVEL LOGGER: message key=value key="another value"; what follows of a traceback is indented."""

    def format(self, record: logging.LogRecord) -> str:
        """Lay a record out."""
        line = f"{_time(record)} {record.levelname} {record.name}: {_escape(record.getMessage())}"
        for key, value in _fields(record).items():
            line += f" {key}={_text(value)}"
        trace = _trace(self, record)
        return line + "".join(f"\n  | {_escape(text)}" for text in trace.split("\n") if text)


class JsonFormatter(logging.Formatter):
    """One JSON object: time, level, logger, message, the record's fields, and exception if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """Lay a record out."""
        line: dict[str, FieldValue] = {
            "time": _time(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if trace := _trace(self, record):
            line["exception"] = trace
        return json.dumps(line)


def _fields(record: logging.LogRecord) -> dict[str, FieldValue]:
    values: Mapping[str, FieldValue] = getattr(record, FIELDS, {})
    return {key: value for key, value in values.items() if value is not None}


def _text(value: FieldValue) -> str:
    if not isinstance(value, str):
        return str(value)
    # JSON's escapes, so that a reader of either layout can use one parser.
    return value if _BARE.fullmatch(value) else json.dumps(value)


def _time(record: logging.LogRecord) -> str:
    seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
    return f"{seconds}.{int(record.msecs):03d}Z"


def _trace(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    parts = [formatter.formatException(record.exc_info)] if record.exc_info else []
    if record.stack_info:
        parts.append(formatter.formatStack(record.stack_info))
    return "\n".join(parts)


def _escape(text: str) -> str:
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
