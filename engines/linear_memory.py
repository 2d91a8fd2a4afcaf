"""How many rows a cache with a row for each sequence has, and how long they are."""

import logging

from engines.api import CacheSpec, OutOfMemoryError
from engines.cachesize import allowed_bytes
from engines.memory import GIB
from engines.options import EngineOptions
from engines.spec import ModelSpec

_LOG = logging.getLogger(__name__)

_MAX_LEN = 4096
"""Tokens of a sequence where the settings say nothing: each row is reserved for as many."""


def context_length(spec: ModelSpec, options: EngineOptions) -> int:
    """Most tokens of a sequence: the settings', within what the model knows."""
    return min(options.max_context or _MAX_LEN, spec.context_length)


def row_length(spec: ModelSpec, options: EngineOptions) -> int:
    """Choose the tokens of a row, and so the most of one sequence; say where the model could have more."""
    max_len = context_length(spec, options)
    if max_len < spec.context_length:
        _LOG.info(
            "sequences may have %d of the model's %d tokens: the cache reserves a row for each",
            max_len,
            spec.context_length,
        )
    return max_len


def size_rows(options: EngineOptions, max_len: int, bytes_per_row: int, available_bytes: int) -> CacheSpec:
    """Choose the rows: as many as there can be sequences in a step, or as many as fit.

    Beside those that the result counts there is one more, the spare row of `engines.linear.Rows`.

    Args:
        options: the settings.
        max_len: tokens of a row.
        bytes_per_row: their memory over all layers.
        available_bytes: memory left to this process.

    Raises:
        OutOfMemoryError: not one row and the spare one fit, or the setting is more than there is.

    """
    allowed, given = allowed_bytes(options, available_bytes)
    num_rows = allowed // bytes_per_row - 1
    if num_rows < 1:
        raise OutOfMemoryError(
            f"{given} does not hold one sequence: a row of {max_len} tokens takes {bytes_per_row} bytes "
            f"({bytes_per_row / GIB:.4f} GiB), and there is a spare one; allow more memory or less context"
        )
    if num_rows < options.max_batch:
        _LOG.info(
            "%s holds %d sequences of %d tokens, fewer than the %d of the largest batch",
            given,
            num_rows,
            max_len,
            options.max_batch,
        )
    return CacheSpec(min(num_rows, options.max_batch), max_len, bytes_per_row)
