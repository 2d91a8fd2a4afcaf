"""What one request, one message and one connection may cost, over gRPC."""

import asyncio
from typing import Any

import grpc

from engines.scripted import ScriptedEngine
from streamsrv.client import make_request
from streamsrv.v1 import inference_pb2 as pb
from streamsrv.v1.inference_pb2_grpc import InferenceServiceStub
from tests.calls import Call
from tests.integration.test_resume import refusal
from tests.integration.test_service import WORDS, Gate
from tests.servers import running, until


async def test_the_bounds_on_stops_are_settings_and_the_server_tells_them() -> None:
    bounds = {"max_stop_strings": 1, "max_stop_bytes": 3, "max_stop_token_ids": 2}
    async with running(ScriptedEngine(WORDS), **bounds) as server:
        stub = server.client.stub
        told = (await stub.GetServerInfo(pb.GetServerInfoRequest())).limits
        assert {name: getattr(told, name) for name in bounds} == bounds
        cases: tuple[tuple[dict[str, Any], str], ...] = (
            ({"stop": ["a", "b"]}, "stop.stop"),
            ({"stop": ["four"]}, "stop.stop[0]"),
            ({"stop_token_ids": [1, 2, 3]}, "stop.stop_token_ids"),
        )
        for options, field in cases:
            error = await refusal(Call(stub.Generate(make_request("x", **options))))
            assert [violation.field for violation in error.violations] == [field]
        assert (await Call(stub.Generate(make_request("x", stop=["two"]))).rest()).text == "one "


async def test_a_message_over_the_limit_is_refused_and_the_connection_goes_on() -> None:
    async with running(ScriptedEngine(WORDS), max_message_mib=1) as server:
        stub = server.client.stub
        going_on = Call(stub.Generate(make_request("x")))
        await going_on.read()
        error = await refusal(Call(stub.Generate(make_request([1] * (2 << 20)))))
        assert error.code == "RESOURCE_EXHAUSTED"
        assert (await going_on.rest()).text == WORDS
        assert (await Call(stub.Generate(make_request("x"))).rest()).text == WORDS


async def test_calls_beyond_a_connections_streams_wait_in_the_client_and_a_refusal_comes_at_once() -> None:
    gate = Gate()
    engine = ScriptedEngine(WORDS, before_step=gate)
    bounds = {"max_running": 1, "max_waiting": 1, "max_streams_per_connection": 2}
    async with (
        running(engine, **bounds) as server,
        grpc.aio.insecure_channel(
            server.target, options=[("grpc.use_local_subchannel_pool", 1)]
        ) as another_connection,
    ):
        calls = []
        for num_waiting in range(2):
            calls.append(Call(server.client.stub.Generate(make_request("x"))))
            await calls[-1].read()
            await until(lambda n=num_waiting: server.pool.num_waiting == n)  # type: ignore[misc]
        held_back = Call(server.client.stub.Generate(make_request("x")))
        first_message = asyncio.ensure_future(held_back.read())
        another = InferenceServiceStub(another_connection)
        error = await refusal(Call(another.Generate(make_request("x"))))
        assert error.server_reason == "TOO_MANY_WAITING"
        assert not first_message.done(), "it would have been refused, too"
        gate.open_for_good()
        for call in calls:
            assert (await call.rest()).text == WORDS
        await first_message
        assert (await held_back.rest()).text == WORDS


async def test_many_calls_at_once_on_a_new_connection_wait_for_their_turn_and_none_is_reset() -> None:
    bounds = {"max_running": 2, "max_waiting": 20, "max_streams_per_connection": 22}
    async with running(ScriptedEngine(WORDS, step_s=0.002), **bounds) as server:
        for _ in range(10):
            async with grpc.aio.insecure_channel(
                server.target, options=[("grpc.use_local_subchannel_pool", 1)]
            ) as connection:
                stub = InferenceServiceStub(connection)
                calls = [Call(stub.Generate(make_request("x", max_tokens=3))) for _ in range(100)]
                outputs = await asyncio.gather(*(call.rest() for call in calls))
                assert len(outputs) == 100


async def test_by_default_a_refusal_reaches_its_client_on_a_connection_that_is_full_of_admitted_calls() -> (
    None
):
    gate = Gate()
    async with running(ScriptedEngine(WORDS, before_step=gate), max_running=1, max_waiting=1) as server:
        calls = []
        for num_waiting in range(2):
            calls.append(Call(server.client.stub.Generate(make_request("x"))))
            await calls[-1].read()
            await until(lambda n=num_waiting: server.pool.num_waiting == n)  # type: ignore[misc]
        error = await refusal(Call(server.client.stub.Generate(make_request("x"))))
        assert error.server_reason == "TOO_MANY_WAITING"
        gate.open_for_good()
        for call in calls:
            assert (await call.rest()).text == WORDS
