"""What a request changes about a row of logits before it is filtered."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from engines.api import FloatArray
from streamsrv.errors import FieldViolation, InvalidRequestError
from streamsrv.request import SamplingParams

_LARGEST = np.finfo(np.float32).max
_FEW = 4
_LEAST_PENALTY = np.finfo(np.float32).tiny


class NothingAllowedError(InvalidRequestError):
    """At some place of an output, every token that the model holds for possible is forbidden."""

    reason = "NOTHING_ALLOWED"

    def __init__(self, num_output_tokens: int) -> None:
        super().__init__(
            FieldViolation(
                "sampling",
                f"after {num_output_tokens} tokens of an output nothing may follow: every token is banned, "
                "not allowed, excluded by the constraint, or would end the output before stop.min_tokens; "
                "allow at least one that goes on",
            )
        )
        self.num_output_tokens = num_output_tokens


class TokenHistory:
    """The tokens of one output that penalties look at: each id once, and how often it is in the output.

    A token costs the same however many came before it.
    """

    def __init__(self, prompt_ids: Iterable[int] = ()) -> None:
        """`prompt_ids` are there without being in the output."""
        distinct = dict.fromkeys(prompt_ids)
        self._places = {token_id: place for place, token_id in enumerate(distinct)}
        self._ids = np.fromiter(distinct, np.int64, len(distinct))
        self._counts = np.zeros(len(distinct), np.float32)

    @property
    def ids(self) -> NDArray[np.int64]:
        """[N] distinct ids."""
        return self._ids[: len(self._places)]

    @property
    def counts(self) -> FloatArray:
        """[N] how often each is in the output."""
        return self._counts[: len(self._places)]

    def push(self, token_id: int) -> None:
        """Add a token of the output."""
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._ids):
            size = max(64, 2 * place)
            self._ids = np.resize(self._ids, size) if place else np.empty(size, np.int64)
            counts = np.zeros(size, np.float32)
            counts[:place] = self._counts
            self._counts = counts
        self._ids[place] = token_id
        self._counts[place] += 1


class LogitChanges:
    """The changes that one output's parameters make to each of its rows, in the order of `SamplingParams`.

    Each touches only the tokens that it is about. logit_bias and repetition_penalty are those of Hugging Face
    transformers' processors, the presence and frequency penalties those of OpenAI's API.
    """

    def __init__(self, params: SamplingParams, prompt_ids: Iterable[int]) -> None:
        """`prompt_ids` are what repetition_penalty begins with."""
        self.bias_ids = np.array([token_id for token_id, _ in params.logit_bias], np.int64)
        self._biases = np.array([bias for _, bias in params.logit_bias], np.float32)
        repetition = params.repetition_penalty != 1
        self.history: TokenHistory | None = None
        """None where nothing depends on it."""
        if repetition or params.presence_penalty or params.frequency_penalty:
            self.history = TokenHistory(prompt_ids if repetition else ())
        self._repetition = np.maximum(np.float32(params.repetition_penalty), _LEAST_PENALTY)
        self._presence = np.float32(params.presence_penalty)
        self._frequency = np.float32(params.frequency_penalty)
        self.banned_ids = np.array(sorted(params.banned_token_ids), np.int64)
        self.allowed_ids = np.array(sorted(params.allowed_token_ids), np.int64)
        """Empty allows all."""
        self.may_raise = bool(
            (self._biases > 0).any()
            or params.repetition_penalty < 1
            or params.presence_penalty < 0
            or params.frequency_penalty < 0
        )
        """Whether a token can become better than it was."""

    @classmethod
    def of(cls, params: SamplingParams, prompt_ids: Iterable[int]) -> "LogitChanges | None":
        """Make the changes of an output; None if its parameters make none."""
        return cls(params, prompt_ids) if changes_logits(params) else None

    def push(self, token_id: int) -> None:
        """Take note of a token of the output."""
        if self.history is not None:
            self.history.push(token_id)

    def apply(self, logits: FloatArray) -> None:
        """Change a whole row [vocab_size] in place."""
        if len(self.bias_ids):
            logits[self.bias_ids] += self._biases
        if self.history is not None:
            ids = self.history.ids
            logits[ids] = self._penalised(logits[ids], self.history.counts)
        if len(self.banned_ids):
            logits[self.banned_ids] = -np.inf
        if len(self.allowed_ids):
            kept = logits[self.allowed_ids]
            logits.fill(-np.inf)
            logits[self.allowed_ids] = kept

    def apply_to(self, token_ids: NDArray[np.int64], logits: FloatArray) -> int:
        """Change the `logits` [K] of some tokens [K] in place, as `apply` would within the row.

        Returns how many of `num_lowered` were among them.
        """
        num_here = 0
        order = np.argsort(token_ids)
        ascending = token_ids[order]

        def find(ids: NDArray[np.int64]) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
            places = np.minimum(np.searchsorted(ascending, ids), len(order) - 1)
            is_here = ascending[places] == ids
            return order[places[is_here]], is_here

        if len(self.bias_ids):
            places, is_here = find(self.bias_ids)
            logits[places] = logits[places] + self._biases[is_here]
            num_here += len(places)
        if self.history is not None:
            places, is_here = find(self.history.ids)
            logits[places] = self._penalised(logits[places], self.history.counts[is_here])
            num_here += len(places)
        if len(self.banned_ids):
            places = find(self.banned_ids)[0]
            logits[places] = -np.inf
            num_here += len(places)
        if len(self.allowed_ids):
            logits[~np.isin(token_ids, self.allowed_ids)] = -np.inf
        return num_here

    @property
    def is_slight(self) -> bool:
        """Whether no more than a few tokens are changed."""
        return self.num_lowered <= _FEW and not len(self.allowed_ids)

    @property
    def num_lowered(self) -> int:
        """Tokens that may be worse than they were, or are banned, at most; without those not in the list."""
        num_penalised = 0 if self.history is None else len(self.history.ids)
        return len(self.bias_ids) + num_penalised + len(self.banned_ids)

    @np.errstate(over="ignore")
    def _penalised(self, logits: FloatArray, counts: FloatArray) -> FloatArray:
        if self._repetition != 1:
            logits = np.where(logits < 0, logits * self._repetition, logits / self._repetition)
        if self._frequency:
            logits = logits - self._frequency * counts
        if self._presence:
            logits = logits - self._presence * (counts > 0).astype(np.float32)
        # What a penalty drives out of float32 is as good or as bad as can be, but not nonsense.
        return np.minimum(logits, _LARGEST)


def changes_logits(params: SamplingParams) -> bool:
    """Whether parameters change logits before the filters."""
    return bool(
        params.logit_bias
        or params.banned_token_ids
        or params.allowed_token_ids
        or params.repetition_penalty != 1
        or params.presence_penalty
        or params.frequency_penalty
    )
