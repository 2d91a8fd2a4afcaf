"""When the requests of an open loop are due: decided before the first is sent."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_FIRST_DRAWN = 1024


@dataclass(frozen=True, slots=True)
class OpenPlan:
    """A rate of arrivals, whatever becomes of them; until a number or a time, exactly one of them."""

    rate_per_s: float
    num_requests: int | None = None
    duration_s: float | None = None
    """Arrivals in the seconds from the start; those that run then are read to their end."""

    def __post_init__(self) -> None:
        """Check what the command line has checked already."""
        assert self.rate_per_s > 0
        assert (self.num_requests is None) != (self.duration_s is None)

    def due_times_s(self, seed: int) -> npt.NDArray[np.float64]:
        """Draw the times of a Poisson process: seconds from the start, rising.

        Equal seeds give equal times, a lower rate the same ones further apart, and a longer run those of a
        shorter one first. How many processes send them is of no influence.
        """
        generator = np.random.default_rng(seed)
        if self.num_requests is not None:
            return np.cumsum(generator.standard_exponential(self.num_requests)) / self.rate_per_s
        assert self.duration_s is not None
        gaps = generator.standard_exponential(_FIRST_DRAWN)
        while gaps.sum() <= self.duration_s * self.rate_per_s:
            gaps = np.concatenate([gaps, generator.standard_exponential(len(gaps))])
        due_s = np.cumsum(gaps) / self.rate_per_s
        return due_s[due_s < self.duration_s]
