"""An engine that answers with outputs that a model made before, in the model's own tokens."""

from collections.abc import Sequence as Seq

import numpy as np

from engines.api import CacheSpec, EngineError, StepBatch, StepResult
from engines.spec import ModelInfo

_NUM_BLOCKS = 64


class ReplayEngine:
    """Answers a prompt of one token, its id the number of an answer, with that answer's tokens."""

    name = "replay"

    def __init__(self, model: ModelInfo, answers: Seq[Seq[int]]) -> None:
        """`answers` are ids of `model`."""
        self._model = model
        self._answers = answers

    @property
    def model(self) -> ModelInfo:
        """The model that made the answers."""
        return self._model

    def create_context(self) -> "ReplayContext":
        """Make a context; a sequence takes one block of it."""
        return ReplayContext(self._model.spec.vocab_size, self._answers)

    def close(self) -> None:
        """Do nothing: there is nothing to free."""


class ReplayContext:
    """Remembers which answer each block's sequence gets."""

    num_candidates = 0

    def __init__(self, vocab_size: int, answers: Seq[Seq[int]]) -> None:
        self._vocab_size = vocab_size
        self._answers = answers
        longest = max(len(answer) for answer in answers)
        self._cache = CacheSpec(_NUM_BLOCKS, block_size=longest + 1, bytes_per_block=8)
        self._answer_of = [0] * _NUM_BLOCKS

    @property
    def cache(self) -> CacheSpec:
        """A block for each sequence."""
        return self._cache

    def step(self, batch: StepBatch) -> StepResult:
        """Choose each wanted row's next token.

        Raises:
            EngineError: a prompt is not the number of an answer, or an answer is over.
        """
        logits = np.zeros((len(batch.logit_rows), self._vocab_size), np.float32)
        for i, row in enumerate(batch.logit_rows):
            b = int(np.searchsorted(batch.query_begins, row, side="right")) - 1
            block = int(batch.block_ids[batch.block_begins[b]])
            position = int(batch.past_lens[b] + row - batch.query_begins[b])
            if position == 0:
                self._answer_of[block] = int(batch.token_ids[row])
            number = self._answer_of[block]
            if number >= len(self._answers) or position >= len(self._answers[number]):
                raise EngineError(f"answer {number} has no token {position}")
            logits[i, self._answers[number][position]] = 1.0
        return StepResult(logits)

    def close(self) -> None:
        """Do nothing: there is no memory of its own."""
