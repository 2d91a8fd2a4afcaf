"""The scripted engine against a plain loop over its tokens."""

import random

import numpy as np
import pytest

from engines.api import EngineError, StepBatch
from engines.scripted import ScriptedContext, ScriptedEngine

SIZE = 4
SCRIPT = "a b a b a c a b"


def make_context() -> tuple[ScriptedEngine, ScriptedContext]:
    engine = ScriptedEngine(SCRIPT, num_blocks=64, block_size=SIZE)
    return engine, engine.create_context()


def batch_of(parts: list[tuple[list[int], int, list[int]]]) -> StepBatch:
    """A step of sequences, each its new tokens, the number of those before, and its blocks."""
    new = [tokens for tokens, _, _ in parts]
    ends = np.cumsum([len(tokens) for tokens in new])
    return StepBatch(
        token_ids=np.array([token for tokens in new for token in tokens], np.int64),
        past_lens=np.array([past for _, past, _ in parts], np.int32),
        query_begins=np.array([0, *ends], np.int32),
        block_ids=np.array([block for _, _, blocks in parts for block in blocks], np.int32),
        block_begins=np.array([0, *np.cumsum([len(blocks) for _, _, blocks in parts])], np.int32),
        logit_rows=np.array(ends - 1, np.int64),
    )


def reply_to(engine: ScriptedEngine, tokens: list[int]) -> int:
    """What follows the longest end of the tokens that begins the script."""
    script = engine.script_ids
    longest = next(n for n in range(len(script), -1, -1) if tokens[len(tokens) - n :] == script[:n])
    return [*script, engine.eos_token_id][longest]


def test_any_mix_of_sequences_in_scattered_blocks_is_answered_as_each_alone() -> None:
    rng = random.Random(1)
    engine, context = make_context()
    choices = [*set(engine.script_ids), 3]
    free = rng.sample(range(64), 64)
    tokens: list[list[int]] = [[] for _ in range(5)]
    blocks: list[list[int]] = [[] for _ in tokens]
    for _ in range(12):
        parts, taking_part = [], rng.sample(range(5), rng.randint(1, 5))
        for i in taking_part:
            past = len(tokens[i])
            expected = reply_to(engine, tokens[i])
            new = [rng.choice([expected, *choices]) for _ in range(rng.choice((1, 1, 1, 2, 5)))]
            tokens[i] += new
            while len(blocks[i]) * SIZE < len(tokens[i]):
                blocks[i].append(free.pop())
            parts.append((new, past, blocks[i]))
        logits = context.step(batch_of(parts)).logits
        assert logits.argmax(axis=1).tolist() == [reply_to(engine, tokens[i]) for i in taking_part]


def test_a_cache_that_does_not_hold_what_it_should_is_an_error_with_the_sequence() -> None:
    _, context = make_context()
    context.step(batch_of([([3, 3, 3], 0, [0]), ([3, 3], 0, [1])]))
    with pytest.raises(EngineError, match="the cache of sequence 1 does not hold its 3 past tokens"):
        context.step(batch_of([([3], 3, [0]), ([3], 3, [1])]))
    with pytest.raises(EngineError, match="sequence 1 has cells for 4 tokens, needs 7"):
        context.step(batch_of([([3], 3, [0]), ([3] * 5, 2, [1])]))
