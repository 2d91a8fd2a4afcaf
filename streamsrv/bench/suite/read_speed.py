"""How fast this machine reads its memory."""

import time
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice

import numpy as np
from numpy.typing import NDArray

_NUM_PARTS = 4
_DOT_LENGTH = 8192
"""Numbers of a dot product: of more than 10,000 OpenBLAS would start threads of its own."""


class ReadSpeed:
    """A buffer, a fourth of which is read at a time: the next one each time, out of memory therefore."""

    def __init__(self, num_bytes: int, num_threads: int) -> None:
        """Fill the buffer; a fourth is to be far more than the processor's caches hold.

        The size is rounded down to whole dot products of each thread.
        """
        unit = 2 * _DOT_LENGTH * num_threads
        length = max(1, num_bytes // 8 // _NUM_PARTS // unit) * unit
        self._num_threads = num_threads
        # Written to: all pages that never were are one page of zeros.
        self._parts = cycle(np.ones((_NUM_PARTS, length)))

    def best_of(self, num_passes: int) -> float:
        """Read as many fourths; the bytes/s of the fastest."""
        with ThreadPoolExecutor(self._num_threads) as threads:
            return max(self._pass(part, threads) for part in islice(self._parts, num_passes))

    def _pass(self, part: NDArray[np.float64], threads: ThreadPoolExecutor) -> float:
        began_s = time.perf_counter()
        for done in [threads.submit(_read, share) for share in np.split(part, self._num_threads)]:
            done.result()
        return part.nbytes / (time.perf_counter() - began_s)


def _read(share: NDArray[np.float64]) -> float:
    """Multiply one half by the other: without Python's lock, and faster than a sum or a maximum is taken."""
    first, second = share.reshape(2, -1, _DOT_LENGTH)
    return float(np.vecdot(first, second)[-1])
