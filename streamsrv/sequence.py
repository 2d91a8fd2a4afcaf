"""One output in the making: its tokens, its blocks, and how far it has been computed."""

from dataclasses import dataclass
from enum import Enum

from streamsrv.request import GenerateRequest


class SequenceStatus(Enum):
    """Where a sequence stands. WAITING ⇄ RUNNING → FINISHED, and WAITING → FINISHED."""

    WAITING = "waiting"
    """Owns no blocks."""
    RUNNING = "running"
    """Owns blocks and takes part in steps."""
    FINISHED = "finished"
    """Owns no blocks, and never will again."""


_ALLOWED = {
    (SequenceStatus.WAITING, SequenceStatus.RUNNING),
    (SequenceStatus.RUNNING, SequenceStatus.WAITING),
    (SequenceStatus.RUNNING, SequenceStatus.FINISHED),
    (SequenceStatus.WAITING, SequenceStatus.FINISHED),
}


class FinishReason(Enum):
    """Why an output ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Finish:
    """How an output ended."""

    reason: FinishReason
    matched: int | str | None = None
    """The token id or the stop text, for STOP."""
    text: str = ""
    """What the detokenizer still held back."""


class Sequence:
    """The tokens of one output, prompt included, and its place in the cache.

    `num_computed` tokens are in the cache; a step computes more, and when it has caught up with all
    tokens, the next one can be sampled. Preemption sets it back to 0, and the tokens stay.
    """

    def __init__(
        self, sequence_id: int, request: GenerateRequest, *, max_tokens: int, eos_token_ids: frozenset[int]
    ) -> None:
        """`max_tokens` is the request's, or what the context leaves; `eos_token_ids` are the model's."""
        self.sequence_id = sequence_id
        """Ascending in the order of arrival."""
        self.request = request
        self.max_tokens = max_tokens
        self.token_ids = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_computed = 0
        self.block_ids: list[int] = []
        self._status = SequenceStatus.WAITING
        stop = request.stop
        self.stop_token_ids = stop.stop_token_ids | (frozenset() if stop.ignore_eos else eos_token_ids)
        """Tokens that end the output, and must not be chosen before `min_tokens`."""

    @property
    def status(self) -> SequenceStatus:
        """Where it stands."""
        return self._status

    def move_to(self, status: SequenceStatus) -> None:
        """Change the status; an illegal change is a fault of ours."""
        assert (self._status, status) in _ALLOWED, f"{self._status} cannot become {status}"
        self._status = status

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed(self) -> int:
        """Tokens that are not in the cache yet; at least 1 while it is not finished."""
        return len(self.token_ids) - self.num_computed

    @property
    def may_stop_next(self) -> bool:
        """Whether the next token may end the output by a stop."""
        return self.num_output_tokens + 1 > self.request.stop.min_tokens

    def finish_by(self, token_id: int, matched_stop: str | None) -> Finish | None:
        """How the output ends with `token_id`, which completes `matched_stop`; None if it goes on."""
        if token_id in self.stop_token_ids and self.may_stop_next:
            return Finish(FinishReason.STOP, token_id)
        if matched_stop is not None:
            return Finish(FinishReason.STOP, matched_stop)
        if self.num_output_tokens + 1 >= self.max_tokens:
            return Finish(FinishReason.LENGTH)
        return None
