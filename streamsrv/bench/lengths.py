"""How long prompts and outputs are: one length, or a distribution of lengths."""

import math
import random
import re
from dataclasses import dataclass
from typing import Protocol

from streamsrv.errors import SettingsError

MAX_LENGTH = 2**32 - 1
MAX_PROMPT_LENGTH = 10_000_000
"""Of prompts, which are made before they are sent; a server's messages hold no more."""
_FORMS = (
    "one number (200), a range in which all are alike probable (50-400), or lognormal:MEDIAN:SIGMA with a "
    "range of its own if need be (lognormal:200:0.6 or lognormal:200:0.6:16-2000)"
)
_NUMBER = re.compile(r"\d+")
_RANGE = re.compile(r"(\d+)-(\d+)")


class Lengths(Protocol):
    """Lengths in tokens, each at least 1."""

    @property
    def least(self) -> int:
        """None is shorter."""

    def draw(self, generator: random.Random) -> int:
        """Draw one."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always the same."""

    num_tokens: int

    @property
    def least(self) -> int:
        """The one that there is."""
        return self.num_tokens

    def draw(self, generator: random.Random) -> int:  # noqa: ARG002 (the others draw)
        """Give the one that there is."""
        return self.num_tokens

    def __str__(self) -> str:
        return str(self.num_tokens)


@dataclass(frozen=True, slots=True)
class Uniform:
    """Each whole number of a range with the same probability, both ends included."""

    least: int
    most: int

    def draw(self, generator: random.Random) -> int:
        """Draw one."""
        return generator.randint(self.least, self.most)

    def __str__(self) -> str:
        return f"{self.least}-{self.most}"


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Rounded values whose logarithm is normal: many short ones and a few long ones, as real ones are."""

    median: int
    sigma: float
    """Standard deviation of the natural logarithm."""
    least: int = 1
    most: int = MAX_LENGTH
    """What is drawn beyond `least` or `most` is taken as that bound."""

    def draw(self, generator: random.Random) -> int:
        """Draw one."""
        exponent = min(generator.gauss(0.0, self.sigma), 700.0)  # beyond it, floats have no exponential
        return min(max(round(min(self.median * math.exp(exponent), self.most)), self.least), self.most)

    def __str__(self) -> str:
        bounds = "" if (self.least, self.most) == (1, MAX_LENGTH) else f":{self.least}-{self.most}"
        return f"lognormal:{self.median}:{self.sigma:g}{bounds}"


def parse_lengths(text: str, name: str, most: int = MAX_LENGTH) -> Lengths:
    """Read what a flag called `name` says, of lengths up to `most`.

    Raises:
        SettingsError: it is of no form that is known, or a number is out of its range.
    """
    if _NUMBER.fullmatch(text):
        return Fixed(_length(text, text, name, most))
    if found := _RANGE.fullmatch(text):
        return Uniform(*_range(found, text, name, most))
    kind, *parts = text.split(":")
    if kind != "lognormal" or len(parts) not in (2, 3) or not _NUMBER.fullmatch(parts[0]):
        raise SettingsError(f"{name} is {text}; it must be {_FORMS}")
    try:
        sigma = float(parts[1])
    except ValueError:
        sigma = math.nan
    if not 0 <= sigma <= 10:
        raise SettingsError(f"{name} is {text}; its sigma must be a number from 0 to 10")
    median = _length(parts[0], text, name, most)
    if len(parts) == 2:
        return LogNormal(median, sigma, most=most)
    found = _RANGE.fullmatch(parts[2])
    if not found:
        raise SettingsError(f"{name} is {text}; its range must be as 16-2000 is")
    return LogNormal(median, sigma, *_range(found, text, name, most))


def _range(found: re.Match[str], text: str, name: str, most: int) -> tuple[int, int]:
    first, last = (_length(digits, text, name, most) for digits in found.groups())
    if first > last:
        raise SettingsError(f"{name} is {text}; the first number of a range must not be above the second")
    return first, last


def _length(digits: str, text: str, name: str, most: int) -> int:
    # Python reads no number of thousands of digits.
    number = int(digits) if len(digits) < 20 else math.inf
    if not 1 <= number <= most:
        raise SettingsError(f"{name} is {text}; a length must be a whole number from 1 to {most}")
    return int(number)
