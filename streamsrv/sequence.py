"""One output in the making: its tokens, its blocks, and how far it has been computed."""

from dataclasses import dataclass
from enum import Enum

import numpy as np

from streamsrv.detokenizer import Detokenizer
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
        self,
        sequence_id: int,
        request: GenerateRequest,
        *,
        max_tokens: int,
        eos_token_ids: frozenset[int],
        detokenizer: Detokenizer,
        generator: np.random.Generator,
    ) -> None:
        self.sequence_id = sequence_id
        self.request = request
        self.max_tokens = max_tokens
        self.detokenizer = detokenizer
        self.generator = generator
        self.token_ids = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_computed = 0
        self.block_ids: list[int] = []
        self._status = SequenceStatus.WAITING
        stop = request.stop
        self.stop_token_ids = stop.stop_token_ids | (frozenset() if stop.ignore_eos else eos_token_ids)
        """Tokens that end the output, and that must not be chosen before `min_tokens`."""

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
        """Tokens that are not in the cache yet; at least 1 while it runs."""
        return len(self.token_ids) - self.num_computed

    @property
    def may_stop(self) -> bool:
        """Whether the next token may be one that ends the output."""
        return self.num_output_tokens + 1 > self.request.stop.min_tokens
