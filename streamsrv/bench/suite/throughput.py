"""A server's tokens/s against those of its engine's own loop."""

import secrets
import statistics
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from streamsrv.bench.cpu_time import CpuClock
from streamsrv.bench.load import LoadPlan, load_client, run_closed_loop
from streamsrv.bench.measure import RequestShape
from streamsrv.bench.prompts import PromptMaker, prompt_maker
from streamsrv.bench.report import LoadReport
from streamsrv.bench.suite.direct_process import DirectProcess, direct_process
from streamsrv.bench.suite.markdown import median_and_range, section
from streamsrv.bench.suite.server_process import server_process
from streamsrv.client import Client
from streamsrv.config import load_settings

GOAL = 0.80
"""Of the engine's own tokens/s, at 32 streams."""
# What the engine's own loop does not have either.
_SHAPE = RequestShape(num_prompt_tokens=200, max_tokens=64, prompt_lookup=False, use_prefix_cache=False)


@dataclass(frozen=True, slots=True)
class _Round:
    """Output tokens/s of the server and of the engine's own loop with the same prompts."""

    served: float
    direct: float
    served_decode: float
    """While all streams had their first token and none had ended."""
    direct_decode: float
    client_cpu: float
    """Processors' worth of time that the load generator took."""


async def throughput_section(
    model: str, batches: Seq[int], num_rounds: int, say: Callable[[str], None]
) -> str:
    """Measure both in turn, so that a change in the machine's pace meets both."""
    rounds: dict[int, list[_Round]] = {batch: [] for batch in batches}
    async with (
        server_process("--model", model) as server,
        direct_process(model) as direct,
        load_client(str(server.address)) as client,
    ):
        maker = await prompt_maker(client, _SHAPE.num_prompt_tokens, secrets.randbits(32))
        index = 0
        for number in range(-1, num_rounds):  # the first round warms up and is not counted
            for batch in batches:
                say(f"{batch} streams, round {number + 1} of {num_rounds}")
                result = await _round(client, direct, maker, batch, index, served_first=number % 2 == 0)
                index += batch
                if number >= 0:
                    rounds[batch].append(result)
    return section(
        "Served against the engine's own loop",
        "N concurrent streams over gRPC (zstd, as many tokens a message as are ready, one Python client "
        "on the same machine) against N sequences stepped directly in a process of their own: the same "
        f"prompts of {_SHAPE.num_prompt_tokens} tokens, {_SHAPE.max_tokens} tokens out, greedy, prefill in "
        f"steps of up to {load_settings({}).max_step_tokens} tokens, default settings. "
        f"{num_rounds} rounds, alternating; output tokens/s, "
        "medians; the ratio is the median of the rounds' ratios, with the least and the greatest. Whole "
        "run: from the first request to the last token. Decode: while all streams were decoding. Goal: at "
        f"least {GOAL:.2f} of the whole run at 32 streams.",
        (
            "streams",
            "direct",
            "served",
            "ratio",
            "direct decode",
            "served decode",
            "decode ratio",
            "client CPU",
        ),
        [_row(batch, list_) for batch, list_ in rounds.items()],
    )


async def _round(
    client: Client, direct: DirectProcess, maker: PromptMaker, batch: int, first: int, *, served_first: bool
) -> _Round:
    prompts = [maker.make(first + i) for i in range(batch)]
    num_tokens = batch * _SHAPE.max_tokens
    report = await _serve(client, prompts) if served_first else None
    times = await direct.run(prompts, _SHAPE.max_tokens)
    report = report or await _serve(client, prompts)
    steady = report.steady or report.whole
    return _Round(
        served=num_tokens / report.whole.seconds,
        direct=num_tokens / (times.prefill_s + times.decode_s),
        served_decode=steady.output_tokens_per_s,
        direct_decode=batch * (_SHAPE.max_tokens - 1) / times.decode_s,
        client_cpu=report.client_cpu_s / report.whole.seconds,
    )


async def _serve(client: Client, prompts: Seq[Seq[int]]) -> LoadReport:
    cpu = CpuClock()
    before_s = cpu.seconds()
    plan = LoadPlan(len(prompts), num_requests=len(prompts))
    run = await run_closed_loop(client, lambda index: _SHAPE.request(prompts[index]), plan)
    return LoadReport.of(run, client_cpu_s=cpu.seconds() - before_s)


def _row(batch: int, rounds: Seq[_Round]) -> list[str]:
    ratios = [r.served / r.direct for r in rounds]
    decode_ratios = [r.served_decode / r.direct_decode for r in rounds]
    return [
        str(batch),
        f"{statistics.median(r.direct for r in rounds):.0f}",
        f"{statistics.median(r.served for r in rounds):.0f}",
        median_and_range(ratios),
        f"{statistics.median(r.direct_decode for r in rounds):.0f}",
        f"{statistics.median(r.served_decode for r in rounds):.0f}",
        median_and_range(decode_ratios),
        f"{statistics.median(r.client_cpu for r in rounds):.2f}",
    ]
