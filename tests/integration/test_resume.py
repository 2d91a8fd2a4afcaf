"""Streams that outlive their calls, over gRPC, with generated stubs alone."""

import asyncio
from typing import Any

import grpc
import pytest

from engines.scripted import ScriptedEngine
from streamsrv.client import make_request
from streamsrv.errors import CallFailedError
from streamsrv.v1 import inference_pb2 as pb
from streamsrv.v1.inference_pb2_grpc import InferenceServiceStub
from tests.calls import SMALL_WINDOW, Call
from tests.integration.test_service import WORDS, Gate
from tests.servers import TestServer, running, until

WINDOW_MS = 20_000


def generate(
    server: TestServer, window_ms: int = WINDOW_MS, *, text_lengths: bool = False, **options: Any
) -> Call:
    request = make_request("x", **options)
    request.stream.resume_window_ms = window_ms
    request.output.text_lengths = text_lengths
    return Call(server.client.stub.Generate(request))


def resume(server: TestServer, call: Call, position: int, *, zstd: bool = True, **changes: Any) -> Call:
    fields = {"stream_id": call.stream_id, "resume_token": call.start.resume_token, **changes}
    options = pb.StreamOptions(accepted_codecs=[pb.CODEC_ZSTD] if zstd else [])
    return Call(server.client.stub.Resume(pb.ResumeRequest(position=position, stream=options, **fields)))


async def refusal(call: Call) -> CallFailedError:
    with pytest.raises(CallFailedError) as caught:
        await call.rest()
    return caught.value


async def test_a_broken_stream_goes_on_from_any_position_without_repeat_or_gap() -> None:
    async with running(ScriptedEngine(WORDS)) as server:
        whole = await generate(server).rest()
        for position in range(len(whole.ids) + 3):
            call = await resume(server, whole, position, zstd=bool(position % 2)).rest()
            assert call.ids == whole.ids[position:]
            assert call.ended or position == len(whole.ids) + 2
            assert call.start.request_id == whole.start.request_id
            assert call.start.num_prompt_tokens == whole.start.num_prompt_tokens
            assert call.start.oldest_position == 0


async def test_text_that_is_made_when_it_is_sent_is_that_of_each_token_from_any_position() -> None:
    async with running(ScriptedEngine("Größe, 東京, 🙂 and 👩‍🔬-👩‍🔬-👩‍🔬.")) as server:
        each = await generate(server, text_lengths=True).rest()
        together = await generate(server, max_tokens=len(each.ids) - 4).rest()  # ends inside a character
        cut = await generate(server, text_lengths=True, max_tokens=len(each.ids) - 4).rest()
        for position in range(len(together.ids) + 1):
            expected, call = [await resume(server, c, position).rest() for c in (cut, together)]
            assert (call.ids, call.text) == (expected.ids, expected.text)
        assert together.text.endswith("\ufffd")


async def test_a_closed_call_keeps_the_generation_alive_for_its_window() -> None:
    gate = Gate()
    async with running(ScriptedEngine(WORDS, before_step=gate)) as server:
        call = generate(server, zstd=False)
        await call.read()
        gate.let_through(3)
        while len(call.ids) < 3:
            await call.read()
        call.call.cancel()
        await until(lambda: not server.pool.num_read)
        assert server.pool.num_running == 1
        gate.open_for_good()
        rest = await resume(server, call, 3).rest()
        assert call.text + rest.text == WORDS


async def test_without_a_window_a_closed_call_cancels_at_once() -> None:
    gate = Gate()
    async with running(ScriptedEngine(WORDS, before_step=gate)) as server:
        call = generate(server, window_ms=0)
        await call.read()
        assert call.start.resume_token == b""
        assert call.start.resume_window_ms == 0
        call.call.cancel()
        gate.open_for_good()
        await server.pool.wait_idle()
        assert server.pool.num_streams == 0
        error = await refusal(resume(server, call, 0))
        assert (error.code, error.server_reason) == ("NOT_FOUND", "STREAM_EXPIRED")


async def test_a_stream_is_gone_when_its_window_is_over() -> None:
    async with running(ScriptedEngine(WORDS)) as server:
        call = await generate(server, window_ms=100).rest()
        assert server.pool.num_streams == 1
        await until(lambda: not server.pool.num_streams)
        assert server.pool.log_bytes == 0
        error = await refusal(resume(server, call, 0))
        assert (error.code, error.server_reason) == ("NOT_FOUND", "STREAM_EXPIRED")


async def test_the_window_is_capped_by_the_server() -> None:
    async with running(ScriptedEngine(WORDS), max_resume_window_s=0.5) as server:
        call = await generate(server).rest()
        assert call.start.resume_window_ms == 500
        assert len(call.start.resume_token) == 16


async def test_a_running_stream_whose_window_ends_is_cancelled() -> None:
    async with running(ScriptedEngine(WORDS, step_s=0.02)) as server:
        call = generate(server, window_ms=100, ignore_eos=True)
        await call.read()
        call.call.cancel()
        await until(lambda: not server.pool.num_running and not server.pool.num_streams)


async def test_a_second_reader_takes_over_and_the_first_is_told() -> None:
    gate = Gate()
    async with running(ScriptedEngine(WORDS, before_step=gate)) as server:
        first = generate(server)
        await first.read()
        second = resume(server, first, 0)
        await second.read()
        error = await refusal(first)
        assert (error.code, error.server_reason) == ("ABORTED", "READER_REPLACED")
        gate.open_for_good()
        assert (await second.rest()).text == WORDS


async def test_a_stream_can_be_resumed_by_request_id_with_its_token_only() -> None:
    async with running(ScriptedEngine(WORDS)) as server:
        call = await generate(server, request_id="mine").rest()
        found = resume(server, call, 2, request_id="mine")
        found = Call(
            server.client.stub.Resume(
                pb.ResumeRequest(request_id="mine", resume_token=call.start.resume_token, position=2)
            )
        )
        assert (await found.rest()).ids == call.ids[2:]
        for token in (b"", b"0" * 16, call.start.resume_token[:15]):
            error = await refusal(resume(server, call, 0, resume_token=token))
            assert (error.code, error.server_reason) == ("NOT_FOUND", "STREAM_NOT_FOUND")


async def test_what_cannot_be_resumed_is_refused_precisely() -> None:
    async with running(ScriptedEngine(WORDS)) as server:
        call = await generate(server).rest()
        instance_id = call.stream_id.rpartition("-")[0]
        end = len(call.ids) + 2
        cases: tuple[tuple[dict[str, Any], int, str, str], ...] = (
            ({"stream_id": f"{instance_id}-999"}, 0, "NOT_FOUND", "STREAM_NOT_FOUND"),
            ({"stream_id": "nonsense"}, 0, "NOT_FOUND", "STREAM_NOT_FOUND"),
            ({"stream_id": "abcdef-1"}, 0, "NOT_FOUND", "STREAM_OF_ANOTHER_INSTANCE"),
            ({}, end + 1, "OUT_OF_RANGE", "POSITION_IN_FUTURE"),
        )
        for changes, position, code, reason in cases:
            error = await refusal(resume(server, call, position, **changes))
            assert (error.code, error.server_reason) == (code, reason)
        assert f"goes on at {end}" in str(error)
        error = await refusal(Call(server.client.stub.Resume(pb.ResumeRequest())))
        assert [v.field for v in error.violations] == ["target"]


async def test_a_request_id_stays_taken_while_its_stream_can_be_read() -> None:
    async with running(ScriptedEngine(WORDS)) as server:
        call = await generate(server, request_id="mine").rest()
        error = await refusal(generate(server, request_id="mine"))
        assert (error.code, error.server_reason) == ("ALREADY_EXISTS", "REQUEST_ID_IN_USE")
        assert call.stream_id in str(error)


async def test_cancel_finds_a_finished_stream_that_can_still_be_read() -> None:
    async with running(ScriptedEngine(WORDS)) as server:
        call = await generate(server).rest()
        assert await server.client.cancel(stream_id=call.stream_id) == "ALREADY_FINISHED"


async def test_a_cancelled_stream_can_be_resumed_to_its_terminal_events() -> None:
    gate = Gate()
    async with running(ScriptedEngine(WORDS, before_step=gate)) as server:
        call = generate(server)
        await call.read()
        call.call.cancel()
        gate.let_through(50)
        assert await server.client.cancel(stream_id=call.stream_id) in ("ABORTED", "ALREADY_FINISHED")
        assert (await resume(server, call, 0).rest()).ended


async def test_a_cancelled_stream_without_a_reader_holds_up_no_drain() -> None:
    gate = Gate()
    async with running(ScriptedEngine(WORDS, before_step=gate)) as server:
        running_one, finished = generate(server), generate(server, max_tokens=1)
        await running_one.read()
        await finished.read()
        gate.let_through(2)
        await until(lambda: server.pool.num_running == 1)
        for call in (running_one, finished):
            call.call.cancel()
        await until(lambda: not server.pool.num_read)
        gate.let_through(50)
        assert await server.client.cancel(stream_id=running_one.stream_id) == "ABORTED"
        assert await server.client.cancel(stream_id=finished.stream_id) == "ALREADY_FINISHED"
        assert server.pool.num_streams == 2
        async with asyncio.timeout(5):
            await server.pool.wait_idle()


async def test_a_failed_stream_tells_its_status_again() -> None:
    async with running(ScriptedEngine(WORDS, step_s=0.05)) as server:
        request = make_request("x", ignore_eos=True)
        request.stream.resume_window_ms = WINDOW_MS
        call = Call(server.client.stub.Generate(request, timeout=0.3))
        assert (await refusal(call)).code == "DEADLINE_EXCEEDED"
        error = await refusal(resume(server, call, 0))
        assert (error.code, error.server_reason) == ("DEADLINE_EXCEEDED", "DEADLINE_PASSED")


async def test_full_log_memory_drops_finished_streams_first_and_then_what_was_read() -> None:
    async with running(ScriptedEngine(WORDS), log_memory_mib=1) as server:
        # With the lengths of their texts tokens take four times the memory of ids alone.
        old = await generate(server, text_lengths=True, max_tokens=3000, ignore_eos=True).rest()
        reading = generate(server, text_lengths=True, max_tokens=7000, ignore_eos=True)
        for _ in range(20):
            await reading.read()
        await until(lambda: server.pool.num_streams == 1 or not server.pool.num_running)
        error = await refusal(resume(server, old, 0))
        assert error.server_reason == "STREAM_EXPIRED"
        assert (await reading.rest()).ended
        assert len(reading.ids) == 7000


async def test_full_log_memory_refuses_new_requests_and_evicted_positions() -> None:
    async with running(ScriptedEngine("word " * 2000), log_memory_mib=1) as server:
        async with grpc.aio.insecure_channel(server.target, options=SMALL_WINDOW) as channel:
            stub = InferenceServiceStub(channel)
            request = make_request("x", max_tokens=8000, ignore_eos=True, max_tokens_per_chunk=1)
            request.stream.resume_window_ms = WINDOW_MS
            request.output.text_lengths = True
            slow = Call(stub.Generate(request))
            await slow.read()
            await until(lambda: not server.pool.num_running)
            assert server.pool.log_bytes >= 1 << 20
            error = await refusal(generate(server))
            assert (error.code, error.server_reason) == ("RESOURCE_EXHAUSTED", "LOG_MEMORY_FULL")
            taken = len(slow.ids)
            assert (await slow.rest()).ended
            assert len(slow.ids) == 8000 > taken
        assert (await generate(server).rest()).ended
        error = await refusal(resume(server, slow, 0))
        assert error.server_reason in ("POSITION_EVICTED", "STREAM_EXPIRED")


async def test_a_reader_that_takes_nothing_is_cut_off_and_can_resume() -> None:
    async with (
        running(ScriptedEngine("word " * 400), stall_limit_s=0.3) as server,
        grpc.aio.insecure_channel(server.target, options=SMALL_WINDOW) as channel,
    ):
        stub = InferenceServiceStub(channel)
        request = make_request("x", max_tokens=2000, ignore_eos=True, max_tokens_per_chunk=1)
        request.stream.resume_window_ms = WINDOW_MS
        slow = Call(stub.Generate(request))
        await slow.read()
        others = await asyncio.gather(*(generate(server, max_tokens=50).rest() for _ in range(5)))
        assert all(other.ended for other in others)
        await until(lambda: not server.pool.num_read)
        error = await refusal(slow)
        assert (error.code, error.server_reason) == ("ABORTED", "CONSUMER_STALLED")
        rest = await resume(server, slow, len(slow.ids)).rest()
        assert len(slow.ids) + len(rest.ids) == 2000
        assert rest.ended


async def test_a_slow_reader_gets_fewer_and_bigger_messages() -> None:
    async with (
        running(ScriptedEngine("word " * 400)) as server,
        grpc.aio.insecure_channel(server.target, options=SMALL_WINDOW) as channel,
    ):
        request = make_request("x", max_tokens=2000, ignore_eos=True)
        call = Call(InferenceServiceStub(channel).Generate(request))
        await call.read()
        await until(lambda: not server.pool.num_running)
        num_messages = 0
        while await call.read():
            num_messages += 1
        assert len(call.ids) == 2000
        assert num_messages < 1000


async def test_a_token_of_the_clients_own_finds_a_stream_of_which_nothing_was_received() -> None:
    async with running(ScriptedEngine(WORDS)) as server:
        token = b"0123456789abcdef"
        request = make_request("x", request_id="mine")
        request.stream.resume_window_ms = WINDOW_MS
        request.resume_token = token
        call = server.client.stub.Generate(request)
        await until(lambda: server.pool.num_streams == 1)
        call.cancel()
        await until(lambda: not server.pool.num_read)
        found = pb.ResumeRequest(request_id="mine", resume_token=token)
        again = await Call(server.client.stub.Resume(found)).rest()
        assert again.text == WORDS
        assert again.start.resume_token == token


async def test_a_token_of_the_clients_own_must_have_its_length() -> None:
    async with running(ScriptedEngine(WORDS)) as server:
        for token in (b"short", b"0" * 17):
            request = make_request("x")
            request.resume_token = token
            error = await refusal(Call(server.client.stub.Generate(request)))
            assert error.code == "INVALID_ARGUMENT"
            assert [v.field for v in error.violations] == ["resume_token"]
