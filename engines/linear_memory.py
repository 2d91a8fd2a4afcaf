"""How many rows a cache with a row for each sequence has, and how long they are."""

import logging

from engines.api import CacheSpec, OutOfMemoryError
from engines.memory import GIB
from engines.options import EngineOptions
from engines.spec import ModelSpec

_LOG = logging.getLogger(__name__)

_SHARE = 0.5
"""Part of the memory left to the process that a cache may take unasked: the rest is for the step's own
buffers, for the server, and for what else runs on the machine."""
_MAX_LEN = 4096
"""Tokens of a sequence where the settings say nothing: each row is reserved for as many."""


def row_length(spec: ModelSpec, options: EngineOptions) -> int:
    """Choose the tokens of a row, and so the most of one sequence; say where the model could have more."""
    max_len = min(options.max_context or _MAX_LEN, spec.context_length)
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
    left = f"{available_bytes / GIB:.2f} GiB of memory are left to this process"
    if options.cache_gib is not None:
        allowed = int(options.cache_gib * GIB)
        if allowed > available_bytes:
            raise OutOfMemoryError(
                f"a cache of {options.cache_gib:g} GiB was asked for, but only {left}; ask for less or leave "
                "the setting out"
            )
        given = f"the cache's setting of {options.cache_gib:g} GiB"
    else:
        share = _SHARE * options.memory_share
        allowed = int(available_bytes * share)
        given = f"{left}, and the {share:.0%} of it that are the cache's"
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
