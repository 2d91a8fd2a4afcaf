"""The time to the first token behind a system prompt that many requests share."""

import secrets
import statistics
from collections.abc import Callable

from streamsrv.bench.load import load_client
from streamsrv.bench.prompts import PromptMaker, prompt_maker
from streamsrv.bench.suite.asked import ask_all
from streamsrv.bench.suite.markdown import median_and_range, section
from streamsrv.bench.suite.server_process import server_process
from streamsrv.client import Client, make_request

GOAL = 0.25
"""Of the time without the cache."""
_NUM_SHARED_TOKENS, _NUM_OWN_TOKENS = 400, 16
_NUM_STREAMS, _MAX_TOKENS = 8, 4

_WITHOUT = "not reused"
_NEW = "reused, and new to the server"
_KNOWN = "reused, and known to the server"


async def prefix_section(model: str, num_rounds: int, say: Callable[[str], None]) -> str:
    """Ask with the cache and without in turn, so that a change in the machine's pace meets both."""
    first_s: dict[str, list[float]] = {_WITHOUT: [], _NEW: [], _KNOWN: []}
    cached = dict.fromkeys(first_s, 0.0)
    async with server_process("--model", model) as server, load_client(str(server.address)) as client:
        maker = await prompt_maker(client, _NUM_SHARED_TOKENS, secrets.randbits(32))
        for number in range(-1, num_rounds):  # the first round warms up and is not counted
            say(f"{_NUM_STREAMS} streams behind one prompt, round {number + 1} of {num_rounds}")
            shared = maker.make(number + 1)
            kinds = (_WITHOUT, _NEW, _KNOWN) if number % 2 else (_NEW, _KNOWN, _WITHOUT)
            for kind in kinds:
                mean_s, part_cached = await _round(client, shared, maker, reuses=kind != _WITHOUT)
                if number >= 0:
                    first_s[kind].append(mean_s)
                    cached[kind] += part_cached
    return section(
        "A shared system prompt",
        f"{_NUM_STREAMS} requests at the same time over gRPC, with {_NUM_SHARED_TOKENS} tokens that they "
        f"share and {_NUM_OWN_TOKENS} of their own each: the mean time to the first token, medians of "
        f"{num_rounds} interleaved rounds; the ratio is the median of the rounds' ratios, with the least and "
        "the greatest. Cached: the part of the prompts' tokens that usage says was reused. What is new to "
        f"the server is computed by the first of the eight. Goal: at most {GOAL:.2f} where it is known.",
        ("prefix", "first token, ms", "ratio", "cached, %"),
        [_row(kind, first_s, cached[kind] / num_rounds) for kind in first_s],
    )


async def _round(
    client: Client, shared: list[int], maker: PromptMaker, *, reuses: bool
) -> tuple[float, float]:
    """Give the mean time to the first token, and the part of the prompts that was cached."""
    requests = [
        make_request(
            [*shared, *maker.make(secrets.randbelow(maker.num_distinct))[:_NUM_OWN_TOKENS]],
            max_tokens=_MAX_TOKENS,
            ignore_eos=True,
            temperature=0.0,
            use_prefix_cache=reuses,
            prompt_lookup=False,
        )
        for _ in range(_NUM_STREAMS)
    ]
    asked = await ask_all(client, requests)
    num_cached = sum(each.usage.num_cached_prompt_tokens for each in asked)
    num_tokens = sum(each.usage.num_prompt_tokens for each in asked)
    return statistics.mean(each.first_token_s for each in asked), num_cached / num_tokens


def _row(kind: str, first_s: dict[str, list[float]], part_cached: float) -> list[str]:
    ratios = [mine / base for mine, base in zip(first_s[kind], first_s[_WITHOUT], strict=True)]
    return [
        kind,
        f"{statistics.median(first_s[kind]) * 1000:.0f}",
        "1" if kind == _WITHOUT else median_and_range(ratios),
        f"{part_cached * 100:.0f}",
    ]
