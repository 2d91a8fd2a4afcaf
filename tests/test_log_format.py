import json
import logging
import re
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamsrv.log_format import JsonFormatter, LogFormat, TextFormatter, configure_logging, fields

FORGED = 'x" reason=STOP\n2026-01-01T00:00:00.000Z INFO streamsrv.calls: Generate caller=root'
LINE = re.compile(r"(?m)^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z ")
VALUE = re.compile(r' (\w+)=("(?:[^"\\]|\\.)*"|[^ "]+)')


def record(message: str, *arguments: Any, exc_info: Any = None, **values: Any) -> logging.LogRecord:
    made = logging.LogRecord("streamsrv.x", logging.INFO, "", 0, message, arguments, exc_info)
    made.__dict__.update(fields(values))
    return made


def test_a_line_has_time_level_logger_message_and_values() -> None:
    line = TextFormatter().format(record("Generate", model="m", tokens=3, queue_s=0.25, nothing=None))
    assert LINE.match(line)
    assert line.split(" ", 1)[1] == "INFO streamsrv.x: Generate model=m tokens=3 queue_s=0.25"


def test_a_value_with_a_space_a_quote_or_nothing_in_it_is_quoted() -> None:
    line = TextFormatter().format(record("x", a="b c", d='"', e="", f="ipv6:[::1]", g="a=b"))
    assert line.endswith(r'''x a="b c" d="\"" e="" f=ipv6:[::1] g="a=b"''')


def test_no_value_and_no_message_can_look_like_another_line() -> None:
    for made in (record("x", name=FORGED), record(FORGED), record("%s", FORGED)):
        line = TextFormatter().format(made)
        assert len(line.splitlines()) == 1
        assert len(LINE.findall(line)) == 1
        assert json.loads(JsonFormatter().format(made))
        assert len(JsonFormatter().format(made).splitlines()) == 1


@given(st.text(), st.text())
def test_any_value_comes_back_as_it_was(first: str, second: str) -> None:
    made = record("x", a=first, b=second)
    line = TextFormatter().format(made)
    assert len(line.splitlines()) == 1
    assert line.isprintable()
    found = {key: json.loads(text) if text[0] == '"' else text for key, text in VALUE.findall(line)}
    assert found == {"a": first, "b": second}
    loaded = json.loads(JsonFormatter().format(made))
    assert (loaded["a"], loaded["b"]) == (first, second)


def test_a_traceback_is_indented_whatever_it_says() -> None:
    def fail() -> None:
        raise ValueError(FORGED)

    try:
        fail()
    except ValueError:
        made = record("failed", exc_info=sys.exc_info())
    text = TextFormatter().format(made)
    first, *rest = text.split("\n")
    assert first.endswith("failed")
    assert all(line.startswith("  | ") for line in rest)
    assert any("ValueError" in line for line in rest)
    assert len(LINE.findall(text)) == 1
    loaded = json.loads(JsonFormatter().format(made))
    assert FORGED in loaded["exception"]
    assert loaded["level"] == "INFO"


@pytest.mark.parametrize("layout", LogFormat)
def test_the_whole_process_logs_in_one_layout(layout: LogFormat, capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        configure_logging("info", layout)
        logging.getLogger("somebody.else").info("a %s", "word", extra=fields({"n": 1}))
        logging.getLogger("somebody.else").debug("not this")
    finally:
        root.handlers[:], root.level = handlers, level
    (line,) = capsys.readouterr().err.splitlines()
    if layout is LogFormat.JSON:
        loaded = json.loads(line)
        assert (loaded["logger"], loaded["message"], loaded["n"]) == ("somebody.else", "a word", 1)
    else:
        assert line.endswith("INFO somebody.else: a word n=1")
