"""The README's tables against the code they speak of."""

import logging
import re
from enum import Enum
from pathlib import Path

from engines.api import StreamsrvError
from streamsrv import call_log
from streamsrv.call import Call, CallKind
from streamsrv.config import Settings
from streamsrv.errors import DrainingError
from streamsrv.log_format import FIELDS
from streamsrv.metrics import Metrics
from streamsrv.observer import PoolState
from streamsrv.scheduler import SchedulerCounters
from streamsrv.status import STATUS_CODES
from streamsrv.stream import Caller

README = (Path(__file__).parent.parent / "README.md").read_text()


def rows(section: str) -> list[list[str]]:
    found = re.search(rf"<!-- {section}:.*?-->\n(.*?)<!-- end of {section} -->", README, re.DOTALL)
    assert found is not None
    lines = found[1].strip().splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_table_of_errors_is_that_of_the_code() -> None:
    documented = {(reason, status) for reason, status, _ in rows("errors")}
    assert documented == {
        (cls.reason if cls is not StreamsrvError else "INTERNAL", code.name)
        for cls, code in STATUS_CODES.items()
    }


def test_the_table_of_settings_is_that_of_the_code() -> None:
    documented = {flag.strip("`"): (default.strip("`"), text) for flag, default, text in rows("settings")}
    expected = {}
    for name, field in Settings.model_fields.items():
        flag = "--" + name.replace("_", "-")
        expected[flag] = (shown(field.default), (field.description or "").replace("|", "\\|"))
    assert documented == expected


def test_the_table_of_metrics_is_that_of_the_code() -> None:
    assert rows("metrics") == [list(row) for row in metric_rows()]


def test_the_table_of_log_fields_is_that_of_the_code() -> None:
    assert [field.strip("`") for field, _ in rows("log fields")] == logged_fields()


def metric_rows() -> list[tuple[str, str, str, str]]:
    """Name as Prometheus shows it, type, labels and meaning of each metric."""
    metrics = Metrics("1")
    metrics.model("m").state = lambda: PoolState(0, 0, 0, 0, 0, 0, 0, 0, 0, SchedulerCounters(), 0)
    metrics.call_ended(Call(CallKind.GENERATE, Caller("me"), 0.0, error=DrainingError()))
    suffix = {"counter": "_total", "info": "_info"}
    return [
        (
            f"`{family.name}{suffix.get(family.type, '')}`",
            family.type,
            ", ".join(sorted({label for sample in family.samples for label in sample.labels} - {"le"})),
            family.documentation.removesuffix("."),
        )
        for family in metrics.collect()
    ]


def logged_fields() -> list[str]:
    """What the line of a call says, in order."""
    seen: dict[str, None] = {}

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.update(dict.fromkeys(getattr(record, FIELDS)))

    logger, handler = logging.getLogger(call_log.__name__), Collect()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    for kind in CallKind:
        call_log.CallLog().call_ended(Call(kind, Caller("me"), 0.0, prompt="x"))
    logger.removeHandler(handler)
    logger.setLevel(level)
    sometimes = ("position", "prompt")  # comes last
    return [field for field in seen if field not in sometimes] + [f for f in sometimes if f in seen]


def shown(default: object) -> str:
    if default is None:
        return ""
    if isinstance(default, bool):
        return "yes" if default else "no"
    return str(default.value if isinstance(default, Enum) else default)
