"""The time to the first token of a request that comes while many streams run."""

import asyncio
import secrets
import statistics
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise

from streamsrv.bench.load import load_client
from streamsrv.bench.prompts import PromptMaker, prompt_maker
from streamsrv.bench.suite.asked import ask
from streamsrv.bench.suite.markdown import section
from streamsrv.bench.suite.server_process import server_process
from streamsrv.client import Client, Generation, make_request
from streamsrv.v1 import inference_pb2 as pb

_NUM_PROMPT_TOKENS = 200
_NUM_RUNNING = 63
# So many that they run until they are cancelled.
_MAX_TOKENS = 1500
_SETTLING_S = 2.0


async def newcomer_section(model: str, num_newcomers: int, say: Callable[[str], None]) -> str:
    """Time newcomers on an idle server, and then beside running streams, with the steps of these."""
    async with server_process("--model", model) as server, load_client(str(server.address)) as client:
        maker = await prompt_maker(client, _NUM_PROMPT_TOKENS, secrets.randbits(32))
        await ask(client, _newcomer(maker, 0))  # warms up
        say(f"{num_newcomers} requests to an idle server")
        alone_s = [(await ask(client, _newcomer(maker, i + 1))).first_token_s for i in range(num_newcomers)]
        say(f"{num_newcomers} requests beside {_NUM_RUNNING} running streams")
        beside_s = []
        async with _running(client, maker) as arrivals_s:
            await asyncio.sleep(_SETTLING_S)
            num_before = len(arrivals_s)
            await asyncio.sleep(_SETTLING_S)
            before_s = [b - a for a, b in pairwise(arrivals_s[num_before:])]
            for i in range(num_newcomers):
                await asyncio.sleep(secrets.randbelow(100) / 1000)
                beside_s.append((await ask(client, _newcomer(maker, num_newcomers + 1 + i))).first_token_s)
    step_s, own_s = statistics.median(before_s), statistics.median(alone_s)
    allowed_s = 2 * step_s + own_s
    return section(
        "A newcomer's first token",
        f"{num_newcomers} requests with prompts of {_NUM_PROMPT_TOKENS} tokens, one after another, each at "
        f"any moment of a step, beside {_NUM_RUNNING} streams that run. Step: the gap between tokens of one "
        "of them, before the first came. Alone: the time to the first token on the idle server. Goal: less "
        "than two steps and that.",
        ("", "median, ms", "p90, ms", "most, ms"),
        [
            _row("a step of the running streams", before_s),
            _row("first token, alone", alone_s),
            _row("first token, beside them", beside_s),
            ["two steps and the time alone", f"{allowed_s * 1000:.0f}", "", ""],
        ],
    )


def _newcomer(maker: PromptMaker, index: int) -> pb.GenerateRequest:
    return make_request(maker.make(index), max_tokens=1, ignore_eos=True, temperature=0.0)


@asynccontextmanager
async def _running(client: Client, maker: PromptMaker) -> AsyncIterator[list[float]]:
    """Run streams, all past their first token, and give when one of them gets its tokens."""
    streams = [
        client.generate(
            maker.make(-1 - i), max_tokens=_MAX_TOKENS, ignore_eos=True, temperature=0.0, prompt_lookup=False
        )
        for i in range(_NUM_RUNNING)
    ]
    of_each: list[list[float]] = [[] for _ in streams]
    has_token = [asyncio.Event() for _ in streams]

    async def read(stream: Generation, arrivals_s: list[float], has_token: asyncio.Event) -> None:
        async for _ in stream:
            arrivals_s.append(time.perf_counter())
            has_token.set()

    readers = [asyncio.create_task(read(*each)) for each in zip(streams, of_each, has_token, strict=True)]
    try:
        await asyncio.gather(*(event.wait() for event in has_token))
        yield of_each[0]
        assert not any(reader.done() for reader in readers), "a stream ended too early"
    finally:
        await asyncio.gather(*(stream.cancel() for stream in streams))
        await asyncio.gather(*readers)


def _row(what: str, times_s: list[float]) -> list[str]:
    p90 = statistics.quantiles(times_s, n=10)[-1] if len(times_s) > 1 else times_s[0]
    return [what, *(f"{s * 1000:.0f}" for s in (statistics.median(times_s), p90, max(times_s)))]
