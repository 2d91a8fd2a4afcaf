"""An engine's own loop, without a server around it: what the server's throughput is held against.

Run as a process of its own: it reads one JSON object a line, {"prompts": [[ids], ...], "max_tokens": N},
and answers each with {"prefill_s": ..., "decode_s": ...}.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from engines.api import ExecutionContext, StepBatch
from streamsrv.config import load_settings
from streamsrv.opening import open_model


@dataclass(frozen=True, slots=True)
class Part:
    """New tokens of one sequence."""

    sequence: int
    past: int
    token_ids: Seq[int]
    samples: bool


@dataclass(frozen=True, slots=True)
class DirectTimes:
    """How long a batch took."""

    prefill_s: float
    """Until every sequence has its first token."""
    decode_s: float
    """From there to the last token."""


class DirectLoop:
    """Prefills all prompts in full steps, then decodes all sequences together; greedy."""

    def __init__(self, context: ExecutionContext, max_step_tokens: int) -> None:
        """`max_step_tokens` are computed in a prefill step at most."""
        self._context = context
        self._max_step_tokens = max_step_tokens

    def run(self, prompts: Seq[Seq[int]], max_tokens: int) -> DirectTimes:
        """Generate `max_tokens` for each prompt."""
        longest = max(len(prompt) for prompt in prompts) + max_tokens
        blocks_each = -(-longest // self._context.cache.block_size)
        assert blocks_each * len(prompts) <= self._context.cache.num_blocks, "the batch does not fit"
        began_s = time.perf_counter()
        tokens = [0] * len(prompts)
        for parts in self._prefill_steps(prompts):
            sampled = self._step(parts, blocks_each)
            for part, token in zip([part for part in parts if part.samples], sampled, strict=True):
                tokens[part.sequence] = token
        prefilled_s = time.perf_counter()
        for i in range(max_tokens - 1):
            parts = [Part(b, len(prompts[b]) + i, [token], True) for b, token in enumerate(tokens)]
            tokens = self._step(parts, blocks_each)
        return DirectTimes(prefilled_s - began_s, time.perf_counter() - prefilled_s)

    def _prefill_steps(self, prompts: Seq[Seq[int]]) -> list[list[Part]]:
        steps: list[list[Part]] = [[]]
        room = self._max_step_tokens
        for b, prompt in enumerate(prompts):
            past = 0
            while past < len(prompt):
                if room == 0:
                    steps.append([])
                    room = self._max_step_tokens
                ids = prompt[past : past + room]
                steps[-1].append(Part(b, past, ids, past + len(ids) == len(prompt)))
                past += len(ids)
                room -= len(ids)
        return steps

    def _step(self, parts: Seq[Part], blocks_each: int) -> list[int]:
        batch = make_batch(parts, blocks_each)
        logits = self._context.step(batch).logits
        return [int(token) for token in logits.argmax(axis=1)] if len(batch.logit_rows) else []


def make_batch(parts: Seq[Part], blocks_each: int) -> StepBatch:
    """Lay out a step in which each sequence has blocks of its own, as many as each other."""
    lengths = [len(part.token_ids) for part in parts]
    ends = np.cumsum(lengths)
    blocks = [range(part.sequence * blocks_each, (part.sequence + 1) * blocks_each) for part in parts]
    return StepBatch(
        token_ids=np.concatenate([np.asarray(part.token_ids, np.int64) for part in parts]),
        past_lens=np.array([part.past for part in parts], np.int32),
        query_begins=np.concatenate([[0], ends]).astype(np.int32),
        block_ids=np.concatenate(blocks).astype(np.int32),
        block_begins=np.arange(len(parts) + 1, dtype=np.int32) * blocks_each,
        logit_rows=np.array(
            [end - 1 for part, end in zip(parts, ends, strict=True) if part.samples], np.int64
        ),
    )


def main() -> None:
    """Answer commands until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--weights", default="auto")
    settings = load_settings(vars(parser.parse_args()))
    engine = open_model(settings)
    context = engine.create_context()
    loop = DirectLoop(context, settings.max_step_tokens)
    print("ready", flush=True)
    try:
        for line in sys.stdin:
            command = json.loads(line)
            times = loop.run(command["prompts"], command["max_tokens"])
            print(json.dumps({"prefill_s": times.prefill_s, "decode_s": times.decode_s}), flush=True)
    finally:
        context.close()
        engine.close()


if __name__ == "__main__":
    main()
