"""Having tokens of many long rows of logits chosen by `row_kernels`, once that is loaded."""

import logging
from collections.abc import Sequence as Seq
from concurrent.futures import Executor, Future
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from engines.api import FloatArray
from streamsrv.candidates import UNDECIDED, Masses, temperatures_of
from streamsrv.halves import in_halves
from streamsrv.request import SamplingParams

NO_FINITE_MAXIMUM = "a row of logits has no finite maximum"
"""Says that the engine has computed nonsense."""

log = logging.getLogger(__name__)

# With fewer rows, or shorter ones, there is little to gain: a third of a millisecond with 16 of 50,000.
_LEAST_ROWS = 16
_LEAST_LOGITS = 16_384

_loading: Future[ModuleType | None] | None = None


def load_kernels(helpers: Executor) -> Future[ModuleType | None]:
    """Have the kernels loaded beside other work, once; None where numba is not there, or of no use."""
    global _loading
    if _loading is None:
        _loading = helpers.submit(_load)
    return _loading


def _load() -> ModuleType | None:
    try:
        from streamsrv import row_kernels
    except Exception as error:  # it may not know this Python, NumPy or processor
        log.warning(
            "tokens of many full rows are chosen more slowly than need be: numba cannot be used (%s); "
            "install a version that knows this Python and NumPy: pip install -U numba",
            error,
        )
        return None
    return row_kernels


def choose_compiled(
    logits: FloatArray,
    places: NDArray[np.int64],
    params: Seq[SamplingParams],
    points: Masses,
    helpers: Executor | None,
) -> NDArray[np.int64]:
    """Choose a token id for each of R rows of `logits` [N, vocab_size], none of them greedy, or `UNDECIDED`.

    A helper takes half of them. Nothing is decided while the kernels are being loaded.

    Raises:
        ValueError: a row has no finite best logit.

    """
    token_ids = np.full(len(places), UNDECIDED, np.int64)
    if helpers is None or len(places) < _LEAST_ROWS or logits.shape[1] < _LEAST_LOGITS:
        return token_ids
    loading = load_kernels(helpers)
    kernels = loading.result() if loading.done() else None
    if kernels is None or not logits.flags.c_contiguous:
        return token_ids
    plain = np.array([i for i, p in enumerate(params) if p.typical_p == 1], np.int64)
    of_plain = [params[i] for i in plain.tolist()]
    chosen = np.empty(len(plain), np.int64)
    rows = (
        places[plain],
        temperatures_of(of_plain),
        np.array([p.top_k for p in of_plain], np.int64),
        np.array([p.top_p for p in of_plain], np.float64),
        np.array([p.min_p for p in of_plain], np.float64),
        points[plain],
        chosen,
    )

    def choose(part: slice) -> None:
        if not kernels.choose(logits, *(each[part] for each in rows)):
            raise ValueError(NO_FINITE_MAXIMUM)

    in_halves(choose, len(plain), helpers)
    token_ids[plain] = chosen
    return token_ids
