"""grpc.health.v1 as a balancer sees it: what it says, when, and that it says so whatever happens."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from engines.api import EngineError, StepBatch
from engines.scripted import ScriptedContext, ScriptedEngine
from streamsrv.client import make_request
from streamsrv.config import Settings
from streamsrv.errors import CallFailedError
from streamsrv.health import HealthService
from streamsrv.server import SERVICE_NAME, serving
from streamsrv.v1.inference_pb2_grpc import InferenceServiceStub
from tests.calls import SMALL_WINDOW, Call
from tests.integration.test_service import WORDS, Gate
from tests.servers import TestServer, running, until

SERVING, NOT_SERVING = "SERVING", "NOT_SERVING"


def name(answer: Any) -> str:
    text: str = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return text


class Watch:
    """A call of Watch, and what it has said so far."""

    def __init__(self, target: str, service: str = SERVICE_NAME) -> None:
        self.said: list[str] = []
        self.code: grpc.StatusCode | None = None
        self._channel = grpc.aio.insecure_channel(target)
        stub: Any = health_pb2_grpc.HealthStub(self._channel)
        self._call = stub.Watch(health_pb2.HealthCheckRequest(service=service))
        self._reading = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        try:
            async for answer in self._call:
                self.said.append(name(answer))
        except grpc.aio.AioRpcError as error:
            self.code = error.code()

    async def close(self) -> None:
        self._call.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        await self._channel.close()


@asynccontextmanager
async def watching(target: str, service: str = SERVICE_NAME) -> AsyncIterator[Watch]:
    watch = Watch(target, service)
    try:
        yield watch
    finally:
        await watch.close()


async def check(target: str, service: str = "") -> str:
    async with grpc.aio.insecure_channel(target) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        return name(await stub.Check(health_pb2.HealthCheckRequest(service=service)))


def generate(server: TestServer, **options: Any) -> Call:
    return Call(server.client.stub.Generate(make_request("x", **options)))


async def failure(call: Call) -> CallFailedError:
    with pytest.raises(CallFailedError) as caught:
        await call.rest()
    return caught.value


class Trouble:
    """Makes a scripted engine's steps fail or hang, and its contexts impossible to make or to close."""

    def __init__(self) -> None:
        self.fails = threading.Event()
        self.hangs = threading.Event()
        self.closing_hangs = threading.Event()
        self.making_fails = threading.Event()
        self.over = threading.Event()

    def before_step(self, _: StepBatch) -> None:
        if self.hangs.is_set():
            self.over.wait(60)
        if self.fails.is_set():
            raise EngineError("the device went away")

    def engine(self) -> ScriptedEngine:
        trouble = self

        class Context(ScriptedContext):
            def close(self) -> None:
                if trouble.closing_hangs.is_set():
                    trouble.over.wait(60)

        class Engine(ScriptedEngine):
            def create_context(self) -> ScriptedContext:
                if trouble.making_fails.is_set():
                    raise EngineError("no device")
                made = super().create_context()
                made.__class__ = Context
                return made

        return Engine(WORDS, step_s=0.005, before_step=self.before_step)


async def test_a_server_that_has_just_begun_to_listen_says_serving() -> None:
    for _ in range(5):
        async with serving(Settings(listen="127.0.0.1:0"), ScriptedEngine()) as server:
            target = f"127.0.0.1:{server.port}"
            assert await check(target) == await check(target, SERVICE_NAME) == SERVING


async def test_a_watch_follows_a_worker_that_is_lost_and_comes_back() -> None:
    trouble = Trouble()
    async with running(trouble.engine()) as server, watching(server.target) as watch:
        await until(lambda: watch.said == [SERVING])
        call = generate(server, ignore_eos=True)
        await call.read()
        trouble.making_fails.set()
        trouble.fails.set()
        assert (await failure(call)).server_reason == "WORKER_LOST"
        assert await check(server.target) == NOT_SERVING
        await until(lambda: watch.said == [SERVING, NOT_SERVING])
        assert (await failure(generate(server))).server_reason == "WORKER_LOST"
        await until(lambda: server.pool.state().num_restarts >= 2)
        assert watch.said == [SERVING, NOT_SERVING], "trying again is not serving"
        trouble.making_fails.clear()
        trouble.fails.clear()
        await until(lambda: watch.said == [SERVING, NOT_SERVING, SERVING])
        assert (await generate(server).rest()).text == WORDS


async def test_work_that_gets_no_step_for_too_long_is_not_serving() -> None:
    trouble = Trouble()
    async with (
        running(trouble.engine(), stuck_after_s=0.3) as server,
        watching(server.target) as watch,
    ):
        await generate(server).rest()
        await asyncio.sleep(0.5)
        assert watch.said == [SERVING], "having nothing to do is not being stuck"
        trouble.hangs.set()
        began = time.monotonic()
        error = await failure(generate(server))
        assert (error.code, error.server_reason) == ("UNAVAILABLE", "WORKER_LOST")
        assert 0.3 <= time.monotonic() - began < 1.3
        await until(lambda: watch.said[:2] == [SERVING, NOT_SERVING])
        trouble.hangs.clear()
        trouble.over.set()
        await until(lambda: watch.said == [SERVING, NOT_SERVING, SERVING])


async def test_a_scheduler_that_forms_no_step_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(ScriptedEngine(WORDS)) as server, watching(server.target) as watch:
        await until(lambda: watch.said == [SERVING])
        monkeypatch.setattr("streamsrv.scheduler.Scheduler.schedule", lambda *_: None)
        error = await failure(generate(server))
        assert error.server_reason == "WORKER_LOST"
        assert "a step that never comes" in str(error)
        monkeypatch.undo()
        await until(lambda: watch.said == [SERVING, NOT_SERVING, SERVING])


async def test_streams_of_a_lost_worker_end_at_once_even_if_closing_it_never_does() -> None:
    trouble = Trouble()
    async with running(trouble.engine()) as server, watching(server.target) as watch:
        call = generate(server, ignore_eos=True)
        await call.read()
        trouble.closing_hangs.set()
        trouble.fails.set()
        began = time.monotonic()
        assert (await failure(call)).server_reason == "WORKER_LOST"
        await until(lambda: watch.said == [SERVING, NOT_SERVING])
        assert time.monotonic() - began < 1
        assert (await failure(generate(server))).server_reason == "WORKER_LOST"
        trouble.fails.clear()
        trouble.closing_hangs.clear()
        trouble.over.set()


async def test_one_worker_of_two_is_enough_to_serve() -> None:
    trouble = Trouble()
    async with running(trouble.engine(), workers=2) as server, watching(server.target) as watch:
        await until(lambda: watch.said == [SERVING])
        call = generate(server, ignore_eos=True)
        await call.read()
        trouble.making_fails.set()
        trouble.fails.set()
        await failure(call)
        trouble.fails.clear()
        assert await check(server.target) == SERVING
        assert server.pool.state().num_ready_workers == 1
        assert (await generate(server).rest()).text == WORDS
        assert watch.said == [SERVING]


async def test_draining_says_so_before_it_refuses_and_ends_the_watch_when_it_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("streamsrv.server._FLUSH_S", 10.0)  # what an open call would hold the server up for
    gate = Gate()
    stopping = serving(Settings(listen="127.0.0.1:0", drain_grace_s=20), ScriptedEngine(before_step=gate))
    server = await stopping.__aenter__()
    target = f"127.0.0.1:{server.port}"
    async with grpc.aio.insecure_channel(target) as channel, watching(target) as watch:
        stub = InferenceServiceStub(channel)
        call = Call(stub.Generate(make_request("x")))
        await call.read()
        await until(lambda: watch.said == [SERVING])
        stop = asyncio.ensure_future(stopping.__aexit__(None, None, None))
        await until(lambda: watch.said == [SERVING, NOT_SERVING])
        assert await check(target) == NOT_SERVING
        error = await failure(Call(stub.Generate(make_request("late"))))
        assert (error.code, error.server_reason) == ("UNAVAILABLE", "DRAINING")
        assert error.retry_after_s is not None
        assert watch.code is None, "it stays open while streams finish"
        gate.open_for_good()
        assert (await call.rest()).ended
        began = time.monotonic()
        await stop
        assert time.monotonic() - began < 5, "an open watch does not hold the server up"
        await until(lambda: watch.code is not None)
        assert watch.said == [SERVING, NOT_SERVING]
        assert watch.code is grpc.StatusCode.UNAVAILABLE


async def test_services_that_are_not_there_are_unknown() -> None:
    async with running() as server, watching(server.target, "no.such.Service") as watch:
        await until(lambda: watch.said == ["SERVICE_UNKNOWN"])
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await check(server.target, "no.such.Service")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        async with grpc.aio.insecure_channel(server.target) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            request: Any = health_pb2
            listed = await stub.List(request.HealthListRequest())
            assert {key: name(answer) for key, answer in listed.statuses.items()} == {
                "": SERVING,
                SERVICE_NAME: SERVING,
            }


async def test_a_watcher_that_takes_nothing_holds_up_nobody() -> None:
    health = HealthService(["x"])
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with (
        grpc.aio.insecure_channel(target, options=SMALL_WINDOW) as channel,
        watching(target, "x") as watch,
    ):
        stub: Any = health_pb2_grpc.HealthStub(channel)
        stalled = stub.Watch(health_pb2.HealthCheckRequest(service="x"))
        await until(lambda: health.num_watchers == 2 and watch.said == [NOT_SERVING])
        # Until the transport takes no more for the one who does not read.
        for i in range(3000):
            health.set(serving=i % 2 == 0)
            await asyncio.sleep(0)
        began = time.monotonic()
        for serving_now in (True, False, True):
            health.set(serving=serving_now)
            await until(lambda: watch.said[-1] == (SERVING if health.serving else NOT_SERVING))
        assert await check(target, "x") == SERVING
        assert time.monotonic() - began < 1
        stalled.cancel()
        health.close()
        await server.stop(5)
    assert health.num_watchers == 0
