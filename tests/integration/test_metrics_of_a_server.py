"""Metrics of a whole server, as Prometheus reads them."""

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import grpc
import pytest

from engines.api import StepBatch
from engines.scripted import ScriptedEngine
from streamsrv.api_keys import key_line, new_key
from streamsrv.client import make_request
from streamsrv.config import Address, Settings
from streamsrv.errors import CallFailedError, SettingsError
from streamsrv.metrics import Metrics
from streamsrv.metrics_endpoint import metrics_endpoint
from streamsrv.server import serving
from streamsrv.v1 import inference_pb2 as pb
from streamsrv.v1.inference_pb2_grpc import InferenceServiceStub
from tests.calls import SMALL_WINDOW, Call
from tests.integration.test_service import WORDS, Gate
from tests.scrape import Scrape, http
from tests.servers import TestServer, running, until

METRICS: dict[str, Any] = {"metrics_listen": "127.0.0.1:0"}


async def scrape(server: TestServer) -> Scrape:
    return await Scrape.of(server.metrics_port)


def generate(
    server: TestServer,
    prompt: str = "x",
    *,
    window_ms: int = 0,
    timeout_s: float | None = None,
    **options: Any,
) -> Call:
    request = make_request(prompt, **options)
    request.stream.resume_window_ms = window_ms
    return Call(server.client.stub.Generate(request, timeout=timeout_s))


async def test_tokens_times_and_bytes_are_counted_exactly() -> None:
    async with running(ScriptedEngine(WORDS, step_s=0.005), **METRICS) as server:
        calls = [generate(server, "x" * n, zstd=n % 2 == 0) for n in range(1, 9)]
        await asyncio.gather(*(call.rest() for call in calls))
        usages = [call.usage for call in calls]
        num_output = sum(usage.num_completion_tokens for usage in usages if usage)
        seen = await scrape(server)
        assert seen("requests_total", reason="STOP") == 8
        assert seen("output_tokens_total") == num_output
        assert seen("prompt_tokens_total") == sum(usage.num_prompt_tokens for usage in usages if usage)
        assert seen("time_to_first_token_seconds_count") == 8
        assert seen("inter_token_latency_seconds_count") == num_output - 8
        assert seen("queue_time_seconds_count") == 8
        assert seen("request_duration_seconds_count") == 8
        assert seen("step_duration_seconds_count") == server.pool.num_steps
        assert seen("step_duration_seconds_sum") >= 0.005 * server.pool.num_steps
        assert seen("inter_token_latency_seconds_sum") >= 0.005 * (num_output - 8)
        assert seen("queue_time_seconds_sum") <= seen("time_to_first_token_seconds_sum")
        assert seen("time_to_first_token_seconds_sum") < seen("request_duration_seconds_sum")
        assert seen("messages_total") >= 8
        assert seen("event_sent_bytes_total") > 0
        assert seen("event_raw_bytes_total") > 0
        assert seen("cache_blocks") == 8192
        assert seen("workers_ready") == 1


async def test_compression_shows_in_the_bytes() -> None:
    async with running(ScriptedEngine("again and again " * 200), **METRICS) as server:
        await generate(server, zstd=True, min_chunk_interval_ms=100).rest()
        seen = await scrape(server)
        assert seen("event_sent_bytes_total") < seen("event_raw_bytes_total") / 2
        before = seen
        await generate(server, zstd=False).rest()
        seen = await scrape(server)
        sent = seen("event_sent_bytes_total") - before("event_sent_bytes_total")
        assert sent == seen("event_raw_bytes_total") - before("event_raw_bytes_total") > 0


async def test_gauges_show_what_is_there_now_and_nothing_afterwards() -> None:
    gate = Gate()
    engine = ScriptedEngine(WORDS, before_step=gate)
    async with running(engine, max_running=2, **METRICS) as server:
        calls = [generate(server) for _ in range(5)]
        await asyncio.gather(*(call.read() for call in calls))
        gate.let_through(3)
        await until(lambda: server.pool.num_steps == 3)
        seen = await scrape(server)
        assert seen("requests_running") == 2
        assert seen("requests_waiting") == 3
        assert seen("streams") == seen("readers") == 5
        assert seen("cache_blocks_used") >= 2
        gate.open_for_good()
        await asyncio.gather(*(call.rest() for call in calls))
        await server.pool.wait_idle()
        seen = await scrape(server)
        for name in (
            "requests_running",
            "requests_waiting",
            "streams",
            "readers",
            "cache_blocks_used",
            "log_bytes",
        ):
            assert seen(name) == 0, name


async def test_every_other_end_is_counted_by_its_reason() -> None:
    gate = Gate()
    engine = ScriptedEngine(WORDS, before_step=gate)
    async with running(engine, max_running=1, max_waiting=1, **METRICS) as server:
        first = generate(server)
        await first.read()
        await until(lambda: not server.pool.num_waiting)
        second = generate(server)
        await second.read()
        for call in (generate(server), generate(server, model="gpt-17"), generate(server, temperature=-1.0)):
            with pytest.raises(CallFailedError):
                await call.rest()
        assert await server.client.cancel(stream_id=second.stream_id) == "ABORTED"
        first.call.cancel()
        await until(lambda: not server.pool.num_read)
        gate.open_for_good()
        await server.pool.wait_idle()
        gate.open = False
        with pytest.raises(CallFailedError, match="DEADLINE"):
            await generate(server, timeout_s=0.05, ignore_eos=True).rest()
        gate.open_for_good()
        await server.pool.wait_idle()
        seen = await scrape(server)
        assert seen("refusals_total", reason="TOO_MANY_WAITING") == 1
        assert seen("refusals_total", reason="MODEL_NOT_FOUND") == 1
        assert seen("refusals_total", reason="INVALID_REQUEST") == 1
        ended = ("CANCELLED", "DEADLINE_PASSED")
        assert sum(seen("requests_total", reason=reason) for reason in ended) == 3
        assert seen("requests_total", reason="CANCELLED") >= 2
        assert seen("disconnects_total") == 1
        assert seen("requests_total", reason="STOP") == 0


async def test_calls_that_never_reach_the_service_are_counted(tmp_path: Path) -> None:
    key, keys = new_key(), tmp_path / "keys"
    keys.write_text(key_line("alice", key) + "\n")
    async with running(ScriptedEngine(WORDS), api_keys=keys, **METRICS) as server:
        with pytest.raises(CallFailedError, match="UNAUTHENTICATED"):
            await generate(server).rest()
        async with grpc.aio.insecure_channel(server.target) as channel:
            raw: Any = channel  # its type stubs want a serializer
            call = raw.unary_stream("/streamsrv.v1.InferenceService/Generate")
            with pytest.raises(grpc.aio.AioRpcError, match="INVALID_ARGUMENT"):
                await call(b"\xff\xff", metadata=(("authorization", f"Bearer {key}"),)).read()
        seen = await scrape(server)
        assert seen("refusals_total", reason="UNAUTHENTICATED") == 1
        assert seen("refusals_total", reason="MALFORMED_REQUEST") == 1


async def test_a_client_that_takes_nothing_is_counted() -> None:
    async with (
        running(ScriptedEngine(WORDS), stall_limit_s=0.2, **METRICS) as server,
        grpc.aio.insecure_channel(server.target, options=SMALL_WINDOW) as channel,
    ):
        request = make_request("x", ignore_eos=True, max_tokens=5000, max_tokens_per_chunk=1)
        call = InferenceServiceStub(channel).Generate(request)
        await until(lambda: server.pool.num_streams == 1)
        await until(lambda: server.pool.num_streams == 0)
        seen = await scrape(server)
        assert seen("stalls_total") == 1
        call.cancel()


async def test_two_calls_that_read_one_request_are_counted_as_that() -> None:
    async with running(ScriptedEngine(WORDS), **METRICS) as server:
        call = generate(server, window_ms=20_000)
        await call.read()
        call.call.cancel()
        resumed = pb.ResumeRequest(stream_id=call.stream_id, resume_token=call.start.resume_token)
        assert (await Call(server.client.stub.Resume(resumed)).rest()).text == WORDS
        seen = await scrape(server)
        assert seen("resumes_total") == 1
        assert seen("requests_total", reason="STOP") == 1


async def test_a_preemption_and_a_restart_are_counted() -> None:
    failing: list[bool] = []

    def before_step(_: StepBatch) -> None:
        if failing:
            failing.clear()
            raise RuntimeError("gone")

    engine = ScriptedEngine(WORDS * 3, num_blocks=12, block_size=16, before_step=before_step)
    async with running(engine, max_running=8, **METRICS) as server:
        await asyncio.gather(*(generate(server, "x" * 30).rest() for _ in range(6)))
        before = await scrape(server)
        assert before("preemptions_total") > 0
        failing.append(True)
        with pytest.raises(CallFailedError, match="gone") as caught:
            await generate(server).rest()
        assert caught.value.server_reason == "WORKER_LOST"
        await until(lambda: server.pool.healthy)
        seen = await scrape(server)
        assert seen("worker_restarts_total") == 1
        assert seen("requests_total", reason="WORKER_LOST") == 1
        assert seen("preemptions_total") == before("preemptions_total"), "a counter never goes back"


async def test_two_servers_in_one_process_do_not_share_counts() -> None:
    async with running(ScriptedEngine(WORDS), **METRICS) as first, running(**METRICS) as second:
        await generate(second).rest()
        assert (await scrape(first))("requests_total", reason="STOP") == 0
        assert (await scrape(second))("requests_total", reason="STOP") == 1


# ---------------------------------------------------------------------------------------------------------
# The endpoint


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /metrics HTTP/1.1\r\n\r\n", b"200"),
        (b"GET /metrics?name[]=x HTTP/1.0\r\nAccept: */*\r\n\r\n", b"200"),
        (b"GET / HTTP/1.1\r\n\r\n", b"404"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", b"405"),
        (b"\x16\x03\x01\x02\x00\r\n\r\n", b"400"),
        (b"GET /metrics\r\n\r\n", b"400"),
        (b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 9000 + b"\r\n\r\n", b"400"),
    ],
)
async def test_the_endpoint_answers_anything_with_a_status(request_bytes: bytes, status: bytes) -> None:
    async with metrics_endpoint(Metrics("1").registry, Address("127.0.0.1", 0)) as port:
        head, body = await http(port, request_bytes)
        assert head.split(b" ")[1] == status
        assert body


async def test_the_endpoint_speaks_openmetrics_where_it_is_asked_to() -> None:
    async with metrics_endpoint(Metrics("1").registry, Address("127.0.0.1", 0)) as port:
        request = b"GET /metrics HTTP/1.1\r\nAccept: application/openmetrics-text; version=1.0.0\r\n\r\n"
        head, body = await http(port, request)
        assert b"Content-Type: application/openmetrics-text" in head
        assert body.endswith(b"# EOF\n")
        head, body = await http(port, b"HEAD /metrics HTTP/1.1\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert not body


async def test_whoever_sends_nothing_is_cut_off_when_the_server_stops_and_others_are_answered() -> None:
    async with metrics_endpoint(Metrics("1").registry, Address("127.0.0.1", 0)) as port:
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(10)]
        head, _ = await http(port, b"GET /metrics HTTP/1.1\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
    for reader, writer in idle:
        assert await reader.read() == b""
        writer.close()


async def test_connections_to_the_endpoint_are_bounded() -> None:
    async with metrics_endpoint(Metrics("1").registry, Address("127.0.0.1", 0)) as port:
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(16)]
        with contextlib.suppress(ConnectionResetError):
            head, _ = await http(port, b"GET /metrics HTTP/1.1\r\n\r\n")
            assert head == b""
        for _, writer in idle:
            writer.close()


async def test_a_metrics_port_in_use_is_a_sentence() -> None:
    async with metrics_endpoint(Metrics("1").registry, Address("127.0.0.1", 0)) as port:
        settings = Settings(listen="127.0.0.1:0", metrics_listen=f"127.0.0.1:{port}")
        with pytest.raises(SettingsError, match=f"cannot listen on 127.0.0.1:{port} for metrics"):
            async with serving(settings, ScriptedEngine()):
                pass
