"""What the formats of JSON schemas mean, for the validator: its own checks of most want further packages."""

import datetime
import ipaddress
import re
import uuid
from collections.abc import Callable
from functools import partial

import jsonschema

_DURATION = re.compile(r"P(?!$)(\d+W|(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+S)?)?)")
_TIME = re.compile(r"\d\d:\d\d:\d\d(\.\d+)?([zZ]|[+-]\d\d:\d\d)")
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:[!-~]*")
_LABEL = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)")


def _check_time(text: str) -> None:
    """RFC 3339: an offset is required; Python's reader knows no long fractions."""
    if not _TIME.fullmatch(text):
        raise ValueError(text)
    text = re.sub(r"\.\d+", "", text)
    datetime.time.fromisoformat(text.upper())


def _date_time(text: str) -> None:
    _date(text[:10])
    if text[10:11] not in set("Tt "):
        raise ValueError(text)
    _check_time(text[11:])


def _date(text: str) -> None:
    datetime.date.fromisoformat(re.sub("^0000", "2000", text))  # Python knows no year 0
    if len(text) != 10:
        raise ValueError(text)


def _email(text: str) -> None:
    local, _, domain = text.rpartition("@")
    if not local or not domain or any(c.isspace() for c in text):
        raise ValueError(text)


def _hostname(text: str) -> None:
    if len(text) > 253 or not all(map(_LABEL.fullmatch, text.split("."))):
        raise ValueError(text)


def _uuid(text: str) -> None:
    if str(uuid.UUID(text)) != text.lower():
        raise ValueError(text)


def _matches(pattern: re.Pattern[str], text: str) -> None:
    if not pattern.fullmatch(text):
        raise ValueError(text)


_CHECKS: dict[str, Callable[[str], object]] = {
    "date-time": _date_time,
    "time": _check_time,
    "date": _date,
    "duration": partial(_matches, _DURATION),
    "email": _email,
    "hostname": _hostname,
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
    "uuid": _uuid,
    "uri": partial(_matches, _URI),
}


def _checker() -> jsonschema.FormatChecker:
    checker = jsonschema.FormatChecker(formats=())
    for name, check in _CHECKS.items():

        def allows(value: object, check: Callable[[str], object] = check) -> bool:
            if isinstance(value, str):
                check(value)
            return True

        checker.checks(name, raises=ValueError)(allows)
    return checker


FORMATS = _checker()
"""For `jsonschema`: the formats that the tests' schemas use."""
