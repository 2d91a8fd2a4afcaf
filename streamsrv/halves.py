"""Sharing work on many rows with a helper, while the engine is idle."""

from collections.abc import Callable
from concurrent.futures import Executor, wait
from typing import TypeVar

_T = TypeVar("_T")

_LEAST_SHARED = 16  # rows: with fewer, handing half of them over costs what it spares


def in_halves(work: Callable[[slice], _T], num_rows: int, helpers: Executor | None) -> list[_T]:
    """Have some rows worked on: all of them at once, or half of many by a helper, if there are any."""
    if helpers is None or num_rows < _LEAST_SHARED:
        return [work(slice(num_rows))]
    half = num_rows // 2
    second = helpers.submit(work, slice(half, num_rows))
    try:
        first = work(slice(half))
    finally:
        wait([second])
    return [first, second.result()]
