"""The TensorRT engines behind gRPC, over the stand-ins: tokens, and which streams a fault ends and how."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from engines.api import Engine, OutOfMemoryError
from engines.ort import open_onnxruntime
from engines.trt_library import LIBRARY_NAMES, TENSORRT
from streamsrv.client import Client
from streamsrv.errors import CallFailedError
from tests.servers import TestServer, running, until
from tests.standins.cuda import Call, Failure
from tests.trt_rig import Rig, in_cache, make_rig

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPTS = ["a", "The capital of France is", "once upon a time", "x y z " * 9, "def f(n):", "1, 2, 3,"]
MAX_TOKENS = 48


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepared models and plans."""
    return tmp_path_factory.mktemp("prepared")


Open = Callable[..., tuple[Rig, Engine]]


@pytest.fixture
def open_trt(llama: Path, cache: Path) -> Iterator[Open]:
    """Open an engine; at the end it is closed, and nothing may be left of it."""
    opened: list[tuple[Rig, Engine]] = []

    def get(name: str = TENSORRT, *, workers: int, **options: Any) -> tuple[Rig, Engine]:
        rig = make_rig(name)
        opened.append((rig, rig.open(llama, in_cache(cache, num_contexts=workers, **options))))
        return opened[-1]

    yield get
    for rig, engine in opened:
        engine.close()
        rig.assert_all_released()


@asynccontextmanager
async def serving(engine: Engine, workers: int) -> AsyncIterator[TestServer]:
    async with running(engine, workers=workers, max_running=8, max_step_tokens=64) as server:
        yield server


async def ids_of(client: Client, prompt: str, **options: Any) -> list[int]:
    options = {"temperature": 0, "max_tokens": MAX_TOKENS, "ignore_eos": True, **options}
    stream = client.generate(prompt, **options)
    return [token_id async for chunk in stream for token_id in chunk.token_ids]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def expected(llama: Path, cache: Path) -> list[list[int]]:
    """What the onnxruntime engine gives for each prompt."""
    engine = open_onnxruntime(llama, in_cache(cache), lambda _phase, _done: None)
    async with serving(engine, 1) as server:
        ids = [await ids_of(server.client, prompt) for prompt in PROMPTS]
    engine.close()
    return ids


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize(("name", "graphs"), [(name, g) for name in LIBRARY_NAMES for g in (False, True)])
async def test_tokens_are_the_onnxruntime_engines(
    name: str, graphs: bool, workers: int, open_trt: Open, expected: list[list[int]]
) -> None:
    _, engine = open_trt(name, workers=workers, cuda_graphs=graphs)
    async with serving(engine, workers) as server:
        together = await asyncio.gather(*(ids_of(server.client, prompt) for prompt in PROMPTS * 2))
    assert together == expected * 2


async def test_drawn_tokens_are_those_of_full_rows(open_trt: Open, llama: Path, cache: Path) -> None:
    draws = [
        {"temperature": t, "seed": n, "top_p": p} for n, (t, p) in enumerate([(1, 0.9), (0.7, 1), (2, 1)])
    ]
    other = open_onnxruntime(llama, in_cache(cache), lambda _phase, _done: None)
    async with serving(other, 1) as server:
        wanted = [await ids_of(server.client, "Say", **draw) for draw in draws]
    other.close()
    _, engine = open_trt(workers=1)
    async with serving(engine, 1) as server:
        assert [await ids_of(server.client, "Say", **draw) for draw in draws] == wanted


class Outcome:
    """How a stream ended: its ids, or the status that it got."""

    def __init__(self, ids: list[int], error: CallFailedError | None) -> None:
        self.ids = ids
        self.error = error


async def follow(client: Client, prompt: str, begun: asyncio.Event) -> Outcome:
    ids: list[int] = []
    stream = client.generate(
        prompt, temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, max_tokens_per_chunk=1
    )
    try:
        async for chunk in stream:
            ids += chunk.token_ids
            begun.set()
    except CallFailedError as error:
        return Outcome(ids, error)
    return Outcome(ids, None)


async def outcomes(server: TestServer, rig: Rig, count: int, fault: Callable[[], None]) -> list[Outcome]:
    """Run streams, cause a fault when all of them have begun, and see how they end."""
    rig.trt.behaviour.execution_s = 0.01  # so that none of them ends before
    begun = [asyncio.Event() for _ in range(count)]
    streams = [
        asyncio.create_task(follow(server.client, prompt, event))
        for prompt, event in zip(PROMPTS, begun, strict=False)
    ]
    for event in begun:
        await event.wait()
    fault()
    rig.trt.behaviour.execution_s = 0.0
    return await asyncio.gather(*streams)


async def is_serving(server: TestServer) -> bool:
    async with grpc.aio.insecure_channel(server.target) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        response = await stub.Check(health_pb2.HealthCheckRequest())
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


@pytest.mark.parametrize("workers", [1, 3])
async def test_memory_that_runs_out_ends_one_workers_streams_and_no_others(
    workers: int, open_trt: Open, expected: list[list[int]]
) -> None:
    rig, engine = open_trt(workers=workers)

    def fault() -> None:
        rig.trt.behaviour.refuse_execution = rig.trt.behaviour.num_executions + 1

    async with serving(engine, workers) as server:
        ended = await outcomes(server, rig, workers, fault)
        failed = [outcome for outcome in ended if outcome.error is not None]
        assert len(failed) == 1
        error = failed[0].error
        assert error is not None
        assert (error.code, error.server_reason) == ("UNAVAILABLE", "WORKER_LOST")
        assert "execute_async_v3" in error.message
        assert "out of memory" in error.message
        for outcome, ids in zip(ended, expected, strict=False):
            assert outcome.ids == ids[: len(outcome.ids)]
            assert outcome.error is not None or len(outcome.ids) == MAX_TOKENS
        # The worker makes a new context and goes on.
        await until(lambda: server.pool.healthy)
        assert await ids_of(server.client, PROMPTS[0]) == expected[0]


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("how", ["a kernel crashes", "a copy fails", "the device falls off the bus"])
async def test_a_lost_device_ends_every_stream_on_it_and_health_says_so(
    how: str, workers: int, open_trt: Open
) -> None:
    rig, engine = open_trt(workers=workers)

    def fault() -> None:
        if how == "a kernel crashes":
            rig.trt.behaviour.crash_execution = rig.trt.behaviour.num_executions + 1
            return
        with rig.device() as device:
            if how == "a copy fails":
                device.fail(Call.COPY_OUT, Failure.LAUNCH_FAILED)
            else:
                device.lose()

    async with serving(engine, workers) as server:
        assert await is_serving(server)
        for outcome in await outcomes(server, rig, workers, fault):
            assert outcome.error is not None
            assert (outcome.error.code, outcome.error.server_reason) == ("UNAVAILABLE", "WORKER_LOST")
            assert len(outcome.ids) < MAX_TOKENS
        # CUDA's error stays for the life of the process: no worker can start again.
        await until(lambda: not server.pool.healthy)
        assert not await is_serving(server)
        with pytest.raises(CallFailedError, match="UNAVAILABLE"):
            await ids_of(server.client, PROMPTS[0])


@pytest.mark.parametrize("workers", [1, 3])
async def test_a_context_that_cannot_be_made_ends_the_start(workers: int, open_trt: Open) -> None:
    rig, engine = open_trt(workers=workers)
    with rig.device() as device:
        device.fail(Call.ALLOCATE, Failure.OUT_OF_MEMORY, 4)
    with pytest.raises(OutOfMemoryError, match="out of memory"):
        async with serving(engine, workers):
            raise AssertionError("it has started")
