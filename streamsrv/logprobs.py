"""Log probabilities of tokens, by the model's own distribution: before anything that sampling changes."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from engines.api import FloatArray


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """The most probable tokens at one place, the most probable first; of equal ones the lower id."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    texts: tuple[bytes, ...] = ()
    """A token can be part of a character."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """What is known of the probabilities at a token's place."""

    logprob: float
    """Of the token itself."""
    top: TopLogprobs | None = None
    """None where no others were asked for."""


class RowLogprobs:
    """One row of logits, read before sampling may change it."""

    def __init__(self, logits: FloatArray, num_top: int, token_bytes: Callable[[int], bytes]) -> None:
        """`logits` is [vocab_size]; it is copied. `num_top` most probable tokens are wanted, too."""
        self._logits = logits.copy()
        top = logits.max()
        with np.errstate(invalid="ignore"):  # a row that is nonsense; whoever samples it will say so
            # In float32, whose errors are far below what the sum may have: a fifth of the time.
            sum_of_parts = np.exp(logits - top).sum(dtype=np.float64)
            self._log_sum = float(top + np.log(sum_of_parts))
        self._top = self._find_top(min(num_top, len(logits)), token_bytes) if num_top else None

    def of(self, token_id: int) -> TokenLogprobs:
        """Tell of the token that was chosen."""
        return TokenLogprobs(float(self._logits[token_id]) - self._log_sum, self._top)

    def _find_top(self, num_top: int, token_bytes: Callable[[int], bytes]) -> TopLogprobs:
        logits = self._logits
        ids = np.flatnonzero(logits >= np.partition(logits, -num_top)[-num_top])  # with ties at the border
        ids = ids[np.argsort(-logits[ids], kind="stable")[:num_top]]
        return TopLogprobs(
            tuple(ids.tolist()),
            tuple((logits[ids].astype(np.float64) - self._log_sum).tolist()),
            tuple(map(token_bytes, ids.tolist())),
        )
