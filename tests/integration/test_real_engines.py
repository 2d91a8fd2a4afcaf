"""The engines that compute, behind gRPC on a tiny model: crowded, cancelled, preempted, and shared out."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from engines.api import Engine
from engines.checkpoint import open_checkpoint
from engines.options import CacheType, EngineOptions, Precision, WeightFormat
from engines.registry import open_engine
from streamsrv.client import Client
from tests import tiny
from tests.conftest import TinyPaths
from tests.oracle import OracleDecoder
from tests.servers import TestServer, running, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

EXACT = EngineOptions(WeightFormat.FLOAT32, Precision.F32, CacheType.F32, max_batch=8, cache_gib=0.01)
PROMPTS = ["a", "The capital of France is", "once upon a time", "x y z " * 9, "def f(n):", "1, 2, 3,"]
MAX_TOKENS = 40

Open = Callable[..., Engine]


@pytest.fixture(scope="module", params=["openvino", "onnxruntime"])
def open_tiny(
    request: pytest.FixtureRequest,
    tiny_models: dict[str, TinyPaths],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Open]:
    """Open the tiny model on an engine, with changes of its options; all are closed at the end."""
    pytest.importorskip(request.param)
    cache, opened = tmp_path_factory.mktemp("cache"), []

    def get(**changes: Any) -> Engine:
        options = replace(EXACT, cache_folder=cache, **changes)
        opened.append(open_engine(request.param, tiny_models[tiny.LLAMA_TIED.name].gguf, options))
        return opened[-1]

    yield get
    for engine in opened:
        engine.close()


@pytest.fixture(scope="module")
def engine(open_tiny: Open) -> Engine:
    """One for all tests that change none of its options."""
    return open_tiny()


@asynccontextmanager
async def serving(engine: Engine, **settings: Any) -> AsyncIterator[TestServer]:
    async with running(engine, **{"max_running": 8, "max_step_tokens": 64, **settings}) as server:
        yield server


async def ids_of(client: Client, prompt: str, **options: Any) -> list[int]:
    options = {"temperature": 0, "max_tokens": MAX_TOKENS, "ignore_eos": True, **options}
    stream = client.generate(prompt, **options)
    return [token_id async for chunk in stream for token_id in chunk.token_ids]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def expected(engine: Engine, tiny_models: dict[str, TinyPaths]) -> list[list[int]]:
    """What the oracle gives for each prompt."""
    async with serving(engine) as server:
        prompts = [await server.client.tokenize(prompt) for prompt in PROMPTS]
    with open_checkpoint(tiny_models[tiny.LLAMA_TIED.name].gguf) as checkpoint:
        decoder = OracleDecoder(checkpoint.tensor, checkpoint.info.spec)
        return [decoder.greedy(ids, MAX_TOKENS).ids for ids in prompts]


@pytest.mark.parametrize("workers", [1, 2])
async def test_each_of_a_crowd_gets_the_oracles_tokens(
    open_tiny: Open, expected: list[list[int]], workers: int
) -> None:
    """More streams than run together, and prompts longer than what a step computes."""
    engine = open_tiny(num_contexts=workers)
    async with serving(engine, workers=workers, max_running=4, max_step_tokens=16) as server:
        together = await asyncio.gather(*(ids_of(server.client, prompt) for prompt in PROMPTS * 4))
    assert together == expected * 4


async def test_those_that_leave_change_nothing_for_those_that_stay(
    engine: Engine, expected: list[list[int]]
) -> None:
    async with serving(engine) as server:

        async def leave(prompt: str, after: int) -> None:
            stream = server.client.generate(prompt, temperature=1, max_tokens=150, ignore_eos=True)
            async for _ in stream:
                if stream.num_tokens >= after:
                    break
            await stream.cancel()

        *_, together = await asyncio.gather(
            *(leave(prompt, 3 * i) for i, prompt in enumerate(PROMPTS)),
            asyncio.gather(*(ids_of(server.client, prompt) for prompt in PROMPTS)),
        )
        assert together == expected
        await until(lambda: server.pool.state().num_used_blocks == 0)


async def test_a_seed_draws_the_same_alone_and_in_company(engine: Engine) -> None:
    draws: list[dict[str, Any]] = [
        {"seed": 1, "temperature": 1.0},
        {"seed": 2, "temperature": 0.7, "top_p": 0.9},
        {"seed": 3, "temperature": 2.0, "top_k": 20},
        {"seed": 4, "temperature": 1.5, "min_p": 0.05},
    ]
    async with serving(engine) as server:
        alone = [await ids_of(server.client, "Say", **draw) for draw in draws]
        together = await asyncio.gather(*(ids_of(server.client, "Say", **draw) for draw in draws * 2))
    assert together == alone * 2


async def test_a_cache_that_is_too_small_for_all_at_once_costs_nobody_a_token(
    open_tiny: Open, expected: list[list[int]]
) -> None:
    engine = open_tiny(cache_gib=0.0002, max_context=128)
    async with serving(engine) as server:
        together = await asyncio.gather(*(ids_of(server.client, prompt) for prompt in PROMPTS * 2))
        state = server.pool.state()
    assert together == expected * 2
    # Eight small blocks, which they take from each other, or one row, for which they wait.
    assert state.counters.num_preemptions > 0 if state.num_blocks == 8 else state.num_blocks == 1
