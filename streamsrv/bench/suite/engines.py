"""The CPU engines' own loops against each other."""

import secrets
import statistics
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import AsyncExitStack

from tokenizers import Tokenizer

from engines.demo_model import model_path
from engines.registry import inspect_model
from streamsrv.bench.prompts import PromptMaker, shipped_text
from streamsrv.bench.suite.direct_loop import DirectTimes
from streamsrv.bench.suite.direct_process import DirectProcess, direct_process
from streamsrv.bench.suite.markdown import median_and_range, section
from streamsrv.config import load_settings

_BASE = "openvino"
"""What the others are held against."""
_ENGINES: dict[str, tuple[str, ...]] = {
    _BASE: ("--engine", "openvino"),
    "onnxruntime int8": ("--engine", "onnxruntime", "--weights", "int8"),
    "onnxruntime int4": ("--engine", "onnxruntime", "--weights", "int4"),
}
_NUM_PROMPT_TOKENS, _MAX_TOKENS = 200, 64

Runs = dict[str, list[DirectTimes]]
"""An engine's rounds, by its name."""


async def engines_section(model: str, batches: Seq[int], num_rounds: int, say: Callable[[str], None]) -> str:
    """Let the engines take turns, so that a change in the machine's pace meets all of them."""
    tokenizer = Tokenizer.from_str(inspect_model(model_path(model)).vocabulary.tokenizer_json)
    ids = tokenizer.encode(shipped_text(), add_special_tokens=False).ids
    maker = PromptMaker(ids, _NUM_PROMPT_TOKENS, secrets.randbits(32))
    runs: dict[int, Runs] = {batch: {name: [] for name in _ENGINES} for batch in batches}
    async with AsyncExitStack() as stack:
        loops: dict[str, DirectProcess] = {}
        for name, settings in _ENGINES.items():
            loops[name] = await stack.enter_async_context(direct_process(model, *settings))
        for number in range(-1, num_rounds):  # the first round warms up and is not counted
            for batch, by_engine in runs.items():
                say(f"{batch} streams on {len(loops)} engines, round {number + 1} of {num_rounds}")
                prompts = [maker.make(index) for index in range(batch)]
                names = list(loops) if number % 2 else list(reversed(loops))
                for name in names:
                    times = await loops[name].run(prompts, _MAX_TOKENS)
                    if number >= 0:
                        by_engine[name].append(times)
    return section(
        "Engines",
        "N sequences stepped directly, each engine in a process of its own, one after another: the same "
        f"prompts of {_NUM_PROMPT_TOKENS} tokens, {_MAX_TOKENS} tokens out, greedy, prefill in steps of up "
        f"to {load_settings({}).max_step_tokens} tokens, default settings but for the weights. "
        f"{num_rounds} rounds in alternating order; "
        "tokens/s of decoding, from the first token of the last sequence on, and of the prompts, medians; "
        f"the ratio to {_BASE} is the median of the rounds' ratios, with the least and the greatest.",
        _headings(),
        [
            *(
                engine_row(f"{batch}, decode", by_engine, _decode_rate(batch))
                for batch, by_engine in runs.items()
            ),
            *(
                engine_row(f"{batch}, prompts", by_engine, _prefill_rate(batch))
                for batch, by_engine in runs.items()
            ),
        ],
    )


def _headings() -> list[str]:
    headings = ["streams", _BASE]
    for name in _ENGINES:
        if name != _BASE:
            headings += [name, "ratio"]
    return headings


def engine_row(what: str, runs: Runs, rate: Callable[[DirectTimes], float]) -> list[str]:
    """Lay out each engine's median rate and the ratios of its rounds to those of the first engine."""
    rates = {name: [rate(times) for times in rounds] for name, rounds in runs.items()}
    cells = [what]
    for name, values in rates.items():
        cells.append(f"{statistics.median(values):.0f}")
        if name != _BASE:
            ratios = [value / base for value, base in zip(values, rates[_BASE], strict=True)]
            cells.append(median_and_range(ratios))
    return cells


def _decode_rate(batch: int) -> Callable[[DirectTimes], float]:
    return lambda times: batch * (_MAX_TOKENS - 1) / times.decode_s


def _prefill_rate(batch: int) -> Callable[[DirectTimes], float]:
    return lambda times: batch * _NUM_PROMPT_TOKENS / times.prefill_s
