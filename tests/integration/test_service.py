"""The whole server over gRPC, with the scripted engine, whose context checks every step that it is given."""

import asyncio
import contextlib
import threading
import time
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from engines.api import EngineError, StepBatch
from engines.scripted import DEFAULT_SCRIPT, ScriptedEngine
from streamsrv.client import Client, Generation, make_request
from streamsrv.errors import CallFailedError
from streamsrv.server import SERVICE_NAME
from streamsrv.v1 import inference_pb2 as pb
from tests.servers import running, until

WORDS = "one two three four five six seven eight nine ten"


class Gate:
    """Lets a scripted engine's steps through one by one, or all."""

    def __init__(self) -> None:
        self._permits = threading.Semaphore(0)
        self.open = False

    def __call__(self, _: StepBatch) -> None:
        if not self.open:
            assert self._permits.acquire(timeout=30), "the test left the gate closed"

    def let_through(self, steps: int = 1) -> None:
        self._permits.release(steps)

    def open_for_good(self) -> None:
        self.open = True
        self._permits.release(1000)


async def refused(stream: Generation) -> CallFailedError:
    with pytest.raises(CallFailedError) as caught:
        await stream.text()
    return caught.value


@pytest.mark.parametrize("zstd", [False, True])
@pytest.mark.parametrize("most", [1, 2, 4, 8, None])
async def test_the_joined_text_is_the_whole_decoded_at_once(zstd: bool, most: int | None) -> None:
    async with running() as server:
        stream = server.client.generate("Say it.", zstd=zstd, max_tokens_per_chunk=most)
        text, ids, biggest = "", list[int](), 0
        async for chunk in stream:
            text += chunk.text
            ids += chunk.token_ids
            biggest = max(biggest, chunk.num_tokens)
        assert text == DEFAULT_SCRIPT
        assert await server.client.detokenize(ids, skip_special_tokens=True) == text
        assert biggest <= (most or biggest)
        assert stream.usage is not None
        assert stream.usage.num_completion_tokens == len(ids) == stream.num_tokens
        assert stream.usage.num_prompt_tokens == len(await server.client.tokenize("Say it."))
        assert stream.finish_reason == "STOP"
        engine = server.pool.engine
        assert isinstance(engine, ScriptedEngine)
        assert stream.matched == engine.eos_token_id
        assert (await stream.start()).codec == (pb.CODEC_ZSTD if zstd else pb.CODEC_PLAIN)


async def test_many_streams_at_once_each_get_their_own_tokens() -> None:
    async with running(max_running=16, max_step_tokens=64) as server:
        texts = await asyncio.gather(
            *(server.client.generate("p" * n, max_tokens_per_chunk=1 + n % 3).text() for n in range(1, 60))
        )
        assert set(texts) == {DEFAULT_SCRIPT}


async def test_streams_that_must_give_way_are_still_right() -> None:
    engine = ScriptedEngine(WORDS * 3, num_blocks=12, block_size=16)
    async with running(engine, max_running=8) as server:
        texts = await asyncio.gather(
            *(server.client.generate("prompt" * 3, max_tokens=24, ignore_eos=True).text() for _ in range(8))
        )
        assert len(set(texts)) == 1


@pytest.mark.parametrize(
    ("stop", "text", "include"),
    [(["three"], "one two ", False), (["three"], "one two three", True), (["e f", "w"], "one t", False)],
)
async def test_a_stop_text_ends_the_output_where_it_begins(stop: list[str], text: str, include: bool) -> None:
    async with running(ScriptedEngine(WORDS)) as server:
        stream = server.client.generate("x", stop=stop, include_stop=include)
        assert await stream.text() == text
        assert stream.finish_reason == "STOP"
        assert stream.matched in stop


async def test_max_tokens_ends_with_length_and_half_a_stop_text_is_released() -> None:
    async with running(ScriptedEngine(WORDS)) as server:
        stream = server.client.generate("x", max_tokens=3, stop=[" three four"])
        assert await stream.text() == "one two three"
        assert stream.finish_reason == "LENGTH"
        assert stream.matched is None


async def test_min_tokens_holds_back_every_stop() -> None:
    async with running(ScriptedEngine(WORDS)) as server:
        stream = server.client.generate("x", min_tokens=12, max_tokens=20)
        assert (await stream.text()).startswith(WORDS)
        assert stream.num_tokens > len(WORDS.split()) + 1
        stream = server.client.generate("x", stop=["two", "nine"], min_tokens=3)
        assert await stream.text() == "one two three four five six seven eight "


async def test_a_stop_token_ends_the_output_and_ignore_eos_goes_on() -> None:
    async with running(engine := ScriptedEngine(WORDS)) as server:
        stream = server.client.generate("x", stop_token_ids=[engine.script_ids[4]])
        assert await stream.text() == "one two three four five"
        assert stream.matched == engine.script_ids[4]
        stream = server.client.generate("x", ignore_eos=True, max_tokens=30)
        await stream.text()
        assert (stream.finish_reason, stream.num_tokens) == ("LENGTH", 30)


async def test_a_seed_repeats_an_output() -> None:
    async with running() as server:
        texts = [await server.client.generate("x", seed=7, temperature=100.0).text() for _ in range(2)]
        assert texts[0] == texts[1]


# ---------------------------------------------------------------------------------------------------------
# Ends that are not the output's own


async def test_closing_the_call_frees_everything_and_disturbs_nobody() -> None:
    gate = Gate()
    async with running(ScriptedEngine(before_step=gate)) as server:
        neighbour = server.client.generate("neighbour")
        stream = server.client.generate("leaver")
        await asyncio.gather(stream.start(), neighbour.start())
        gate.let_through(3)
        async for _ in stream:
            break
        await stream.close()
        gate.open_for_good()
        assert await neighbour.text() == DEFAULT_SCRIPT
        await server.pool.wait_idle()
        assert server.pool.num_streams == 0


async def test_a_client_that_vanishes_frees_everything() -> None:
    gate = Gate()
    async with running(ScriptedEngine(before_step=gate)) as server:
        async with Client(server.target) as other:
            await other.generate("x").start()
            assert server.pool.num_streams == 1
        gate.open_for_good()
        await server.pool.wait_idle()


@pytest.mark.parametrize("by", ["stream_id", "request_id"])
async def test_cancel_ends_a_running_stream_with_its_events(by: str) -> None:
    gate = Gate()
    async with running(ScriptedEngine(before_step=gate)) as server:
        stream = server.client.generate("x", request_id="mine")
        start = await stream.start()
        gate.let_through(5)
        name = stream.stream_id if by == "stream_id" else start.request_id
        cancel = None
        async for _ in stream:
            if cancel is None and stream.num_tokens >= 3:  # one chunk may bring several
                cancel = asyncio.ensure_future(server.client.cancel(**{by: name}))
                gate.let_through(100)
        assert cancel is not None
        assert await cancel == "ABORTED"
        assert stream.finish_reason == "CANCELLED"
        assert stream.usage is not None
        assert stream.usage.num_completion_tokens == stream.num_tokens
        assert await server.client.cancel(**{by: name}) == "NOT_FOUND"


async def test_a_waiting_request_that_is_cancelled_never_runs() -> None:
    gate, seen = Gate(), list[int]()

    def before_step(batch: StepBatch) -> None:
        seen.append(batch.num_sequences)
        gate(batch)

    async with running(ScriptedEngine(WORDS, before_step=before_step), max_running=1) as server:
        first = server.client.generate("first")
        await first.start()
        second = server.client.generate("second")
        await second.start()
        assert await server.client.cancel(stream_id=second.stream_id) == "ABORTED"
        assert await second.text() == ""
        assert second.finish_reason == "CANCELLED"
        gate.open_for_good()
        assert await first.text() == WORDS
        assert len(seen) == len(WORDS.split()) + 1


async def test_an_unknown_stream_is_not_found() -> None:
    async with running() as server:
        assert await server.client.cancel(stream_id="nobody-1") == "NOT_FOUND"
        with pytest.raises(grpc.aio.AioRpcError, match="target"):
            await server.client.stub.Cancel(pb.CancelRequest())


async def test_a_deadline_ends_a_running_stream() -> None:
    async with running(ScriptedEngine(step_s=0.05)) as server:
        error = await refused(server.client.generate("x", timeout_s=0.5, ignore_eos=True))
        assert error.code == "DEADLINE_EXCEEDED"
        await server.pool.wait_idle()


async def test_a_request_whose_deadline_passes_in_the_queue_never_runs() -> None:
    gate, seen = Gate(), list[int]()

    def before_step(batch: StepBatch) -> None:
        seen.append(batch.num_tokens)
        gate(batch)

    async with running(ScriptedEngine(WORDS, before_step=before_step), max_running=1) as server:
        first = server.client.generate("first")
        await first.start()
        late = server.client.generate("a prompt of another length", timeout_s=0.2)
        assert (await refused(late)).code == "DEADLINE_EXCEEDED"
        gate.open_for_good()
        await first.text()
        assert seen[0] == len(await server.client.tokenize("first"))
        assert set(seen[1:]) == {1}


async def test_a_worker_that_fails_says_so_and_comes_back() -> None:
    fail = threading.Event()

    def before_step(_: StepBatch) -> None:
        if fail.is_set():
            raise EngineError("the device went away")

    async with running(ScriptedEngine(WORDS, before_step=before_step, step_s=0.01)) as server:
        stream = server.client.generate("x", ignore_eos=True)
        await stream.start()
        fail.set()
        error = await refused(stream)
        assert (error.code, error.server_reason) == ("UNAVAILABLE", "WORKER_LOST")
        assert "the device went away" in str(error)
        fail.clear()
        await until(lambda: server.pool.healthy)
        assert await server.client.generate("x").text() == WORDS


async def test_too_many_waiting_requests_are_refused_with_a_hint() -> None:
    gate = Gate()
    async with running(ScriptedEngine(WORDS, before_step=gate), max_running=1, max_waiting=1) as server:
        first = server.client.generate("1")
        await first.start()
        await until(lambda: not server.pool.num_waiting)
        second = server.client.generate("2")
        await second.start()
        error = await refused(server.client.generate("3"))
        assert (error.code, error.server_reason) == ("RESOURCE_EXHAUSTED", "TOO_MANY_WAITING")
        assert error.retry_after_s == 1.0
        third = server.client.stub.Generate(make_request("3"))
        assert ("grpc-retry-pushback-ms", "1000") in tuple(await third.trailing_metadata())
        gate.open_for_good()
        assert await first.text() == await second.text() == WORDS


async def test_a_request_id_in_use_is_refused_and_free_again_afterwards() -> None:
    gate = Gate()
    async with running(ScriptedEngine(WORDS, before_step=gate)) as server:
        first = server.client.generate("x", request_id="mine")
        await first.start()
        error = await refused(server.client.generate("x", request_id="mine"))
        assert (error.code, error.server_reason) == ("ALREADY_EXISTS", "REQUEST_ID_IN_USE")
        assert first.stream_id in str(error)
        gate.open_for_good()
        assert await first.text() == WORDS
        await server.pool.wait_idle()
        assert await server.client.generate("x", request_id="mine").text() == WORDS


# ---------------------------------------------------------------------------------------------------------
# Bad requests


bad_requests: list[tuple[str, dict[str, Any]]] = [
    ("prompt.text", {"prompt": ""}),
    ("prompt.token_ids.ids", {"prompt": []}),
    ("prompt.token_ids.ids[1]", {"prompt": [5, 10_000_000]}),
    ("prompt.chat.messages[0].role", {"prompt": pb.Prompt(chat=pb.Chat(messages=[pb.ChatMessage()]))}),
    ("prompt.chat.messages", {"prompt": pb.Prompt(chat=pb.Chat())}),
    ("prompt", {"prompt": pb.Prompt()}),
    ("sampling.temperature", {"temperature": float("nan")}),
    ("sampling.temperature", {"temperature": -1.0}),
    ("sampling.top_p", {"top_p": 0.0}),
    ("sampling.min_p", {"min_p": 1.5}),
    ("stop.max_tokens", {"max_tokens": 0}),
    ("stop.max_tokens", {"max_tokens": 100_000}),
    ("stop.min_tokens", {"min_tokens": 5, "max_tokens": 4}),
    ("stop.min_tokens", {"min_tokens": 100_000}),
    ("stop.stop[0]", {"stop": [""]}),
    ("stop.stop_token_ids[0]", {"stop_token_ids": [10_000_000]}),
    ("stream.max_tokens_per_chunk", {"max_tokens_per_chunk": 0}),
    ("stream.min_chunk_interval_ms", {"min_chunk_interval_ms": 20_000}),
    ("request_id", {"request_id": "x" * 200}),
]


async def test_a_bad_field_is_refused_by_name_and_the_next_request_works() -> None:
    async with running(ScriptedEngine(WORDS)) as server:
        for field, options in bad_requests:
            error = await refused(server.client.generate(**{"prompt": "x", **options}))
            assert error.code == "INVALID_ARGUMENT", options
            assert [v.field for v in error.violations] == [field]
            assert error.violations[0].description
            assert await server.client.generate("x").text() == WORDS


async def test_a_prompt_beyond_the_context_is_refused_with_both_lengths() -> None:
    async with running(ScriptedEngine(WORDS), max_context=100) as server:
        error = await refused(server.client.generate([5] * 100))
        assert (error.code, error.server_reason) == ("INVALID_ARGUMENT", "PROMPT_TOO_LONG")
        assert "100 tokens" in str(error)
        stream = server.client.generate([5] * 99)
        await stream.text()
        assert stream.finish_reason == "LENGTH"
        assert stream.num_tokens == 1


async def test_an_unknown_model_is_refused_with_the_list() -> None:
    async with running() as server:
        error = await refused(server.client.generate("x", model="gpt-17"))
        assert (error.code, error.server_reason) == ("NOT_FOUND", "MODEL_NOT_FOUND")
        assert "served: scripted" in str(error)


async def test_an_oversize_message_is_refused_and_the_connection_stays() -> None:
    async with running(ScriptedEngine(WORDS), max_message_mib=1) as server:
        error = await refused(server.client.generate("x" * (2 << 20)))
        assert error.code == "RESOURCE_EXHAUSTED"
        assert await server.client.generate("x").text() == WORDS


# ---------------------------------------------------------------------------------------------------------
# The other calls


async def test_a_prompt_is_tokenized_as_generate_reads_it() -> None:
    async with running() as server:
        for prompt in ("Größe 🙂", [5, 6, 7], [("system", "be brief"), ("user", "hello")]):
            stream = server.client.generate(prompt)
            start = await stream.start()
            await stream.close()
            assert start.num_prompt_tokens == len(await server.client.tokenize(prompt))


async def test_models_and_server_are_described() -> None:
    async with running(model_name="demo-model", max_running=7, max_waiting=9) as server:
        (model,) = await server.client.models()
        assert (model.name, model.engine, model.family) == ("demo-model", "scripted", "llama")
        assert model.revision == server.pool.engine.model.revision
        assert model.has_chat_template
        info = await server.client.server_info()
        assert info.limits.max_running_sequences == 7
        assert info.limits.max_waiting_requests == 9
        assert info.limits.max_prompt_tokens == model.context_length - 1
        stream = server.client.generate("x")
        start = await stream.start()
        await stream.close()
        assert (start.model, start.model_revision) == (model.name, model.revision)
        assert stream.stream_id.startswith(info.instance_id + "-")


async def test_health_and_reflection_are_served() -> None:
    async with running() as server, grpc.aio.insecure_channel(server.target) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        for service in ("", SERVICE_NAME):
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING

        def services() -> list[str]:
            with grpc.insecure_channel(server.target) as blocking:
                return list(ProtoReflectionDescriptorDatabase(blocking).get_services())

        assert SERVICE_NAME in await asyncio.to_thread(services)


async def test_draining_finishes_live_streams_and_refuses_new_ones() -> None:
    gate = Gate()
    stream: Generation | None = None
    async with running(ScriptedEngine(WORDS, before_step=gate)) as server:
        stream = server.client.generate("x")
        await stream.start()
        drain = asyncio.ensure_future(server.pool.drain(10))
        await asyncio.sleep(0)
        error = await refused(server.client.generate("late"))
        assert (error.code, error.server_reason) == ("UNAVAILABLE", "DRAINING")
        assert error.retry_after_s is not None
        gate.open_for_good()
        assert await stream.text() == WORDS
        assert await drain


async def test_a_stream_that_outlives_the_grace_ends_with_a_status() -> None:
    async with running(ScriptedEngine(WORDS, step_s=0.02), drain_grace_s=0.1) as server:
        stream = server.client.generate("x", ignore_eos=True)
        await stream.start()
        await server.pool.drain(0.1)
        error = await refused(stream)
        assert (error.code, error.server_reason) == ("UNAVAILABLE", "SERVER_STOPPED")


async def test_least_time_between_chunks_gathers_tokens_and_the_end_does_not_wait() -> None:
    async with running(ScriptedEngine(WORDS, step_s=0.01)) as server:
        began = time.monotonic()
        stream = server.client.generate("x", min_chunk_interval_ms=10_000)
        sizes = [chunk.num_tokens async for chunk in stream]
        assert sizes[0] == 1
        assert len(sizes) == 2
        assert time.monotonic() - began < 5


async def test_the_servers_least_time_between_chunks_is_for_requests_that_do_not_say_theirs() -> None:
    async with running(ScriptedEngine(WORDS, step_s=0.01), min_chunk_interval_ms=10_000) as server:
        silent = [chunk.num_tokens async for chunk in server.client.generate("x")]
        spoken = [chunk.num_tokens async for chunk in server.client.generate("x", min_chunk_interval_ms=0)]
    assert len(silent) == 2
    assert len(spoken) > 2
    assert sum(silent) == sum(spoken)


async def test_deadlines_that_race_with_the_servers_own_are_not_logged_as_faults(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The server's status and the transport's deadline come in either order, a thousand times."""
    async with running(ScriptedEngine(step_s=0.001), max_running=8, max_waiting=200) as server:

        async def call(number: int) -> None:
            with contextlib.suppress(CallFailedError):
                stream = server.client.generate("word " * (1 + 99 * (number % 2)), timeout_s=number / 1500)
                await stream.text()

        for _ in range(15):
            await asyncio.gather(*(call(number) for number in range(1, 101)))
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []
