"""Steps of an engine for the tests: ragged batches out of lists, and whole sequences fed in pieces."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from engines.api import ExecutionContext, FloatArray, StepBatch


@dataclass(slots=True)
class Feed:
    """A sequence on its way through a context: its blocks, and how much is in the cache."""

    token_ids: list[int]
    blocks: list[int]
    past: int = 0
    logits: list[FloatArray] = field(default_factory=list)

    def all_logits(self) -> FloatArray:
        """`[tokens so far, vocab_size]`."""
        return np.concatenate(self.logits)


def batch(parts: Iterable[tuple[Feed, int]], *, logits: bool = True) -> StepBatch:
    """Make a step of each feed's next so many tokens; all their logits are wanted, or none."""
    tokens: list[int] = []
    past, begins, block_ids, block_begins = [], [0], [], [0]
    for feed, count in parts:
        tokens += feed.token_ids[feed.past : feed.past + count]
        past.append(feed.past)
        begins.append(len(tokens))
        block_ids += feed.blocks
        block_begins.append(len(block_ids))
    return StepBatch(
        token_ids=np.array(tokens, np.int64),
        past_lens=np.array(past, np.int32),
        query_begins=np.array(begins, np.int32),
        block_ids=np.array(block_ids, np.int32),
        block_begins=np.array(block_begins, np.int32),
        logit_rows=np.arange(len(tokens) if logits else 0, dtype=np.int64),
    )


def step(context: ExecutionContext, parts: Sequence[tuple[Feed, int]]) -> None:
    """Take one step and keep each feed's logits."""
    result = context.step(batch(parts)).logits.copy()
    row = 0
    for feed, count in parts:
        feed.logits.append(result[row : row + count])
        feed.past += count
        row += count


def logits_of(
    context: ExecutionContext, token_ids: Sequence[int], *, piece: int = 0, blocks: Sequence[int] = ()
) -> FloatArray:
    """Feed one sequence, at once or in pieces, and return `[tokens, vocab_size]`."""
    needed = -(-len(token_ids) // context.cache.block_size)
    feed = Feed(list(token_ids), list(blocks or range(needed)))
    size = piece or len(token_ids)
    while feed.past < len(token_ids):
        step(context, [(feed, min(size, len(token_ids) - feed.past))])
    return feed.all_logits()


def greedy(
    context: ExecutionContext, prompt_ids: Sequence[int], num_steps: int
) -> tuple[list[int], FloatArray]:
    """Continue a prompt; the ids and the logits `[num_steps, vocab_size]` that each is the largest of."""
    needed = -(-(len(prompt_ids) + num_steps) // context.cache.block_size)
    feed = Feed(list(prompt_ids), list(range(needed)))
    rows: list[FloatArray] = []
    while len(rows) < num_steps:
        step(context, [(feed, len(feed.token_ids) - feed.past)])
        rows.append(feed.logits[-1][-1])
        feed.token_ids.append(int(rows[-1].argmax()))
    return feed.token_ids[len(prompt_ids) :], np.stack(rows)
