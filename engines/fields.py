"""Typed access to a checkpoint's settings, which other programs wrote."""

from collections.abc import Mapping
from math import isfinite
from pathlib import Path

from engines.api import CheckpointError

MAX_INTEGER = 2**31 - 1
"""Largest count or id that a setting may hold; engines index with 32 bits."""
MAX_LAYERS = 10_000
"""More than any model has; of a damaged file's billions each would be listed before one was missed."""


class Fields:
    """A mapping of settings whose values are checked as they are read.

    A value of None counts as absent, as it does in the config.json files that Hugging Face writes.
    """

    def __init__(self, values: Mapping[str, object], path: Path, prefix: str = "") -> None:
        """Take the settings of `path`; `prefix` goes before each key that is asked for."""
        self._values = values
        self._path = path
        self._prefix = prefix

    def integer(
        self, key: str, default: int | None = None, *, least: int = 1, most: int = MAX_INTEGER
    ) -> int:
        """Read a whole number from `least` to `most`."""
        value = self._get(key, default)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]  # GGUF gives some counts once per layer
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self._wrong(key, value, f"a whole number from {least} to {most}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Read a positive finite number."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, value, "a positive number")
        try:
            number = float(value)
        except OverflowError:  # an integer of hundreds of digits
            number = float("inf")
        if not isfinite(number) or number <= 0:
            raise self._wrong(key, value, "a positive number")
        return number

    def flag(self, key: str, default: bool) -> bool:
        """Read true or false."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """Read a text."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "a text")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """Read a list of texts; empty where absent."""
        value = self._get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong(key, value, "a list of texts")
        return tuple(value)

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """Read a list of so many positive finite numbers."""
        value = self._get(key, None)
        if not isinstance(value, list) or len(value) != count:
            raise self._wrong(key, value, f"a list of {count} positive numbers")
        return tuple(Fields({key: item}, self._path).number(key) for item in value)

    def flags(self, key: str) -> tuple[bool, ...]:
        """Read a list of true or false; empty where there is no list."""
        value = self._values.get(self._prefix + key)
        if not isinstance(value, list):
            return ()
        if not all(isinstance(item, bool) for item in value):
            raise self._wrong(key, value, "a list of true or false")
        return tuple(value)

    def section(self, key: str) -> "Fields | None":
        """Read nested settings; None where absent."""
        value = self._values.get(self._prefix + key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._wrong(key, value, "a group of settings")
        return Fields(value, self._path)

    def has(self, key: str) -> bool:
        """Tell whether a setting is there."""
        return self._values.get(self._prefix + key) is not None

    def _get(self, key: str, default: object) -> object:
        value = self._values.get(self._prefix + key)
        value = default if value is None else value
        if value is None:
            raise CheckpointError(f"{self._path}: has no {self._prefix}{key}, which the model needs")
        return value

    def _wrong(self, key: str, value: object, allowed: str) -> CheckpointError:
        shown = repr(value)
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        return CheckpointError(f"{self._path}: {self._prefix}{key} is {shown}; it must be {allowed}")
