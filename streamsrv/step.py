"""One step: who takes part with how many tokens, and the batch for the engine."""

from dataclasses import dataclass

import numpy as np

from engines.api import BlockCopy, StepBatch
from streamsrv.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A sequence's part in a step.

    Its rows of logits are, in this order, those of the prompt's tokens, of the last token, of the guesses.
    """

    sequence: Sequence
    num_new: int
    """Tokens to compute, at least 1; guesses come on top."""
    samples: bool
    """They catch up with all of its tokens, so that a token can be sampled after the step."""
    guesses: tuple[int, ...] = ()
    """What may follow its last token, computed to be verified."""
    num_prompt_rows: int = 0
    """Leading rows of logits that are wanted for the probabilities of the prompt's next tokens."""

    @property
    def num_drafts(self) -> int:
        """How many guesses are verified."""
        return len(self.guesses)

    @property
    def num_sampled_rows(self) -> int:
        """Rows of logits to sample from: the last token's and each guess's, or none."""
        return 1 + len(self.guesses) if self.samples else 0


@dataclass(frozen=True, slots=True)
class Step:
    """One step: who takes part, and the batch for the engine."""

    parts: tuple[Scheduled, ...]
    batch: StepBatch

    @property
    def sampled(self) -> list[Sequence]:
        """The sequences that get a token, or several, in the order of the batch's logit rows."""
        return [part.sequence for part in self.parts if part.samples]


def form_batch(parts: list[Scheduled], copies: tuple[BlockCopy, ...]) -> StepBatch:
    """Lay the parts end to end, as they are before the step is booked."""
    token_ids: list[int] = []
    block_ids: list[int] = []
    logit_rows: list[int] = []
    query_begins, block_begins, past_lens = [0], [0], []
    for part in parts:
        sequence, past = part.sequence, part.sequence.num_computed
        if part.num_prompt_rows:
            first = len(token_ids) + sequence.num_prompt_logits - past
            logit_rows += range(first, first + part.num_prompt_rows)
        token_ids += sequence.token_ids[past : past + part.num_new]
        if part.samples:
            last = len(token_ids) - 1
            token_ids += part.guesses
            logit_rows += range(last, len(token_ids))
        block_ids += sequence.block_ids
        past_lens.append(past)
        query_begins.append(len(token_ids))
        block_begins.append(len(block_ids))
    return StepBatch(
        token_ids=np.array(token_ids, np.int64),
        past_lens=np.array(past_lens, np.int32),
        query_begins=np.array(query_begins, np.int32),
        block_ids=np.array(block_ids, np.int32),
        block_begins=np.array(block_begins, np.int32),
        logit_rows=np.array(logit_rows, np.int64),
        copies=copies,
    )
