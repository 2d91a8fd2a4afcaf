"""Percentiles of weighted values."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Distribution:
    """A set of values in short."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Seq[float], weights: Seq[float] | None = None) -> "Distribution | None":
        """Describe `values`, each counted `weights` times (once by default); None if there are none."""
        if not len(values):
            return None
        p50, p90, p99 = percentiles(values, (50, 90, 99), weights)
        return cls(float(np.average(values, weights=weights)), p50, p90, p99, float(max(values)))


def percentiles(
    values: Seq[float], percents: Seq[float], weights: Seq[float] | None = None
) -> tuple[float, ...]:
    """For each p of `percents`, the least value that at least p% of the weight does not exceed.

    Always one of `values`, never a mean of two: the nearest-rank definition. `weights` are above 0.
    """
    array = np.asarray(values, np.float64)
    order = np.argsort(array, kind="stable")
    reached = np.cumsum(np.ones(len(array)) if weights is None else np.asarray(weights, np.float64)[order])
    # What rounding adds to the product must not push a rank over a whole number.
    wanted = reached[-1] * np.asarray(percents, np.float64) / 100 * (1 - 1e-12)
    ranks = np.minimum(np.searchsorted(reached, wanted), len(array) - 1)
    return tuple(float(array[order[rank]]) for rank in ranks)
