"""One step: who takes part with how many tokens, and the batch for the engine."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate

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


def form_batch(parts: Seq[Scheduled], copies: tuple[BlockCopy, ...] = (), num_decoding: int = 0) -> StepBatch:
    """Lay the parts end to end, as they are before the step is booked.

    The first `num_decoding` are known to compute their newest token alone, and to sample the next one.
    """
    decoding = [part.sequence for part in parts[:num_decoding]]
    token_ids = [sequence.token_ids[-1] for sequence in decoding]
    past_lens = [sequence.num_computed for sequence in decoding]
    query_begins, logit_rows = list(range(num_decoding + 1)), list(range(num_decoding))
    blocks = [sequence.block_ids for sequence in decoding]
    for part in parts[num_decoding:]:
        sequence, past = part.sequence, part.sequence.num_computed
        if part.num_prompt_rows:
            first = len(token_ids) + sequence.num_prompt_logits - past
            logit_rows += range(first, first + part.num_prompt_rows)
        token_ids += sequence.token_ids[past : past + part.num_new]
        if part.samples:
            last = len(token_ids) - 1
            token_ids += part.guesses
            logit_rows += range(last, len(token_ids))
        blocks.append(sequence.block_ids)
        past_lens.append(past)
        query_begins.append(len(token_ids))
    block_begins = list(accumulate(map(len, blocks), initial=0))
    return StepBatch(
        token_ids=np.array(token_ids, np.int64),
        past_lens=np.array(past_lens, np.int32),
        query_begins=np.array(query_begins, np.int32),
        block_ids=np.frombuffer(bytearray().join(blocks), np.int32),
        block_begins=np.array(block_begins, np.int32),
        logit_rows=np.array(logit_rows, np.int64),
        copies=copies,
    )
