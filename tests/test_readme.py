"""The README's tables against the code they speak of."""

import re
from enum import Enum
from pathlib import Path

from engines.api import StreamsrvError
from streamsrv.config import Settings
from streamsrv.status import STATUS_CODES

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


def shown(default: object) -> str:
    if default is None:
        return ""
    if isinstance(default, bool):
        return "yes" if default else "no"
    return str(default.value if isinstance(default, Enum) else default)
