"""What choosing tokens takes of a step, on the model's own logits."""

import asyncio
import secrets
import statistics
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from tokenizers import Tokenizer

from engines.api import Engine
from streamsrv.bench.prompts import PromptMaker, shipped_text
from streamsrv.bench.suite.direct_loop import Part, make_batch
from streamsrv.bench.suite.markdown import section
from streamsrv.compiled_rows import load_kernels
from streamsrv.config import load_settings
from streamsrv.logit_changes import LogitChanges
from streamsrv.opening import open_model
from streamsrv.request import SamplingParams
from streamsrv.sampling import RowSampling, sample

GOAL = 0.05
"""Of the step's time, with top_p."""
NUM_ROWS = 64
_NUM_PROMPT_TOKENS = 64

KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "top_p 0.9": SamplingParams(top_p=0.9),
    "temperature 0.8, top_p 0.9": SamplingParams(temperature=0.8, top_p=0.9),
    "the same and all penalties": SamplingParams(
        temperature=0.8, top_p=0.9, repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.2
    ),
}

Times = list[tuple[float, float]]
"""Of each step: the engine's seconds, and those of choosing."""


async def sampling_section(model: str, num_rounds: int, say: Callable[[str], None]) -> str:
    """Decode in this process, with each kind of sampling in turn."""
    say(f"choosing {NUM_ROWS} tokens in {len(KINDS)} ways, {num_rounds} steps each")
    times = await asyncio.to_thread(_measure, model, num_rounds)
    return section(
        "Choosing tokens",
        f"{NUM_ROWS} sequences stepped directly behind prompts of {_NUM_PROMPT_TOKENS} tokens, each step "
        f"with the next of these ways to choose its {NUM_ROWS} tokens, {num_rounds} steps a way: medians; "
        "the part is the median of the steps' parts, with the least and the greatest. A step: the engine's "
        f"time and that of choosing. Goal: top_p takes less than {GOAL * 100:.0f}% of the step.",
        ("way", "step, ms", "choosing, ms", "part of the step, %"),
        [_row(kind, each) for kind, each in times.items()],
    )


def _measure(model: str, num_rounds: int) -> dict[str, Times]:
    engine = open_model(load_settings({"model": model}))
    try:
        tokenizer = Tokenizer.from_str(engine.model.vocabulary.tokenizer_json)
        ids = tokenizer.encode(shipped_text(), add_special_tokens=False).ids
        maker = PromptMaker(ids, _NUM_PROMPT_TOKENS, secrets.randbits(32))
        return choosing_times(engine, [maker.make(i) for i in range(NUM_ROWS)], num_rounds)
    finally:
        engine.close()


def choosing_times(engine: Engine, prompts: Seq[Seq[int]], num_rounds: int) -> dict[str, Times]:
    """Decode all prompts together for `num_rounds` steps of each kind, behind one of each to warm up."""
    rows = {kind: [_row_sampling(params, prompt) for prompt in prompts] for kind, params in KINDS.items()}
    times: dict[str, Times] = {kind: [] for kind in KINDS}
    context = engine.create_context()
    helpers = ThreadPoolExecutor()  # as a worker has
    load_kernels(helpers).result()
    try:
        longest = max(map(len, prompts)) + (num_rounds + 1) * len(KINDS)
        blocks_each = -(-longest // context.cache.block_size)
        token_ids = []
        for i, prompt in enumerate(prompts):
            result = context.step(make_batch([Part(i, 0, prompt, True)], blocks_each))
            token_ids.append(int(result.logits[0].argmax()))
        num_steps = 0
        for number in range(-1, num_rounds):
            for kind in KINDS:
                parts = [
                    Part(i, len(prompt) + num_steps, [token_ids[i]], True) for i, prompt in enumerate(prompts)
                ]
                began_s = time.perf_counter()
                result = context.step(make_batch(parts, blocks_each))
                stepped_s = time.perf_counter()
                token_ids = sample(result, rows[kind], helpers=helpers)
                ended_s = time.perf_counter()
                _push(rows, token_ids)
                num_steps += 1
                if number >= 0:
                    times[kind].append((stepped_s - began_s, ended_s - stepped_s))
    finally:
        helpers.shutdown()
        context.close()
    return times


def _row_sampling(params: SamplingParams, prompt: Seq[int]) -> RowSampling:
    return RowSampling(params, np.random.default_rng(), changes=LogitChanges.of(params, prompt))


def _push(rows: dict[str, list[RowSampling]], token_ids: Seq[int]) -> None:
    for of_kind in rows.values():
        for row, token_id in zip(of_kind, token_ids, strict=True):
            if row.changes is not None:
                row.changes.push(token_id)


def _row(kind: str, times: Times) -> list[str]:
    parts = [chose_s / (stepped_s + chose_s) * 100 for stepped_s, chose_s in times]
    return [
        kind,
        f"{statistics.median(stepped_s + chose_s for stepped_s, chose_s in times) * 1000:.0f}",
        f"{statistics.median(chose_s for _, chose_s in times) * 1000:.1f}",
        f"**{statistics.median(parts):.1f}** ({min(parts):.1f}-{max(parts):.1f})",
    ]
