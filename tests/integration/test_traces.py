"""Traces of a whole server, sent to a collector over gRPC."""

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from engines.scripted import ScriptedEngine
from streamsrv.client import make_request
from streamsrv.errors import CallFailedError
from tests.calls import Call
from tests.integration.test_service import WORDS
from tests.servers import TestServer, running

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
METADATA = (("traceparent", f"00-{TRACE_ID}-{PARENT_ID}-01"), ("tracestate", "vendor=1"))


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps the spans that it is sent, with their resources' attributes."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resources: list[dict[str, Any]] = []

    async def Export(self, request: Any, context: Any) -> Any:
        del context
        for resource in request.resource_spans:
            self.resources.append(attributes(resource.resource))
            for scope in resource.scope_spans:
                self.spans += scope.spans
        return trace_service_pb2.ExportTraceServiceResponse()


def attributes(of: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in of.attributes}


@asynccontextmanager
async def collecting() -> AsyncIterator[tuple[Collector, str]]:
    """A collector, and its URL."""
    collector, server = Collector(), grpc.aio.server()
    add: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
    add(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield collector, f"http://127.0.0.1:{port}"
    finally:
        await server.stop(None)


def generate(server: TestServer, prompt: Any = "x", **options: Any) -> Call:
    return Call(server.client.stub.Generate(make_request(prompt, **options), metadata=METADATA))


async def test_each_call_is_a_span_of_its_callers_trace() -> None:
    async with collecting() as (collector, url):
        async with running(ScriptedEngine(WORDS), otlp_endpoint=url) as server:
            call = await generate(server, [("user", "hello")], temperature=0.5).rest()
            with pytest.raises(CallFailedError):
                await generate(server, top_p=0.0).rest()
        # What was waiting to be sent is sent before the server has stopped.
        assert call.usage is not None
        good, bad = sorted(collector.spans, key=lambda span: len(span.name), reverse=False)
        for span in (good, bad):
            assert span.trace_id.hex() == TRACE_ID
            assert span.parent_span_id.hex() == PARENT_ID
            assert span.trace_state == "vendor=1"
            assert abs(span.end_time_unix_nano - time.time_ns()) < 60e9
        assert good.name == "chat scripted"
        said = attributes(good)
        assert said["gen_ai.response.id"] == call.stream_id
        assert said["gen_ai.usage.input_tokens"] == call.usage.num_prompt_tokens
        assert said["gen_ai.usage.output_tokens"] == call.usage.num_completion_tokens
        assert said["gen_ai.request.temperature"] == 0.5
        assert [event.name for event in good.events] == ["first_token"]
        assert good.start_time_unix_nano < good.events[0].time_unix_nano < good.end_time_unix_nano
        assert attributes(bad)["error.type"] == "INVALID_REQUEST"
        assert collector.resources[0]["service.instance.id"] == server.pool.instance_id
        text = str(collector.spans)
        assert "hello" not in text
        assert "three" not in text, "neither prompts nor outputs are sent"


@pytest.mark.parametrize("takes_connections", [False, True])
async def test_a_collector_that_does_not_answer_holds_up_nobody(
    takes_connections: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if takes_connections:
            silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with caplog.at_level(logging.CRITICAL):
            async with running(ScriptedEngine(WORDS), otlp_endpoint=url) as server:
                began = time.monotonic()
                calls = await asyncio.gather(*(generate(server).rest() for _ in range(50)))
                assert {call.text for call in calls} == {WORDS}
                took_s = time.monotonic() - began
            stopping_s = time.monotonic() - began - took_s
            assert took_s < 5
            assert stopping_s < 5
