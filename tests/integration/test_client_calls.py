"""What the clients do besides reading: leaving, cancelling, trying again, keys, and the other calls."""

import asyncio
import gc
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engines.api import EngineError, StepBatch
from engines.scripted import ScriptedEngine
from streamsrv.api_keys import key_line, new_key
from streamsrv.client import Client, SyncClient, make_request
from streamsrv.errors import CallFailedError, StreamIncompleteError
from streamsrv.tls import channel_credentials
from tests.calls import Call
from tests.certificates import Authority
from tests.integration.test_service import WORDS, Gate
from tests.proxy import Fault, FaultyProxy
from tests.servers import TestServer, running, until

NUM_WORDS = len(WORDS.split())


class AnyClient:
    """A client of either kind, whose every method is awaited."""

    def __init__(self, kind: str, target: str, **options: Any) -> None:
        self.inner: Any = Client(target, **options) if kind == "async" else SyncClient(target, **options)

    async def __aenter__(self) -> "AnyClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await do(self.inner.close)

    def generate(self, prompt: Any = "x", **options: Any) -> Any:
        return self.inner.generate(prompt, **options)


async def do(method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Await a method of the asynchronous client, or call one of the other on a thread."""
    if asyncio.iscoroutinefunction(method):
        return await method(*arguments, **named)
    result = await asyncio.to_thread(method, *arguments, **named)
    return await result if asyncio.iscoroutine(result) else result


async def first_chunk(stream: Any) -> Any:
    return await anext(stream) if hasattr(stream, "__anext__") else await asyncio.to_thread(next, stream)


async def leave(stream: Any) -> None:
    """Enter and leave the stream's `with`."""
    if hasattr(stream, "__aenter__"):
        async with stream:
            pass
    else:
        with stream:
            await asyncio.to_thread(stream.close)


async def failure(stream: Any) -> CallFailedError:
    with pytest.raises(CallFailedError) as caught:
        await do(stream.text)
    return caught.value


both = pytest.mark.parametrize("kind", ["async", "sync"])


# ---------------------------------------------------------------------------------------------------------
# Leaving


@both
async def test_leaving_a_stream_cancels_it_at_once_and_holds_up_no_drain(kind: str) -> None:
    gate = Gate()
    async with (
        running(ScriptedEngine(WORDS, before_step=gate)) as server,
        AnyClient(kind, server.target) as client,
    ):
        stream = client.generate(ignore_eos=True)
        gate.let_through(3)
        await first_chunk(stream)
        gate.let_through(100)
        await leave(stream)
        assert server.pool.num_running == 0
        assert server.pool.num_streams == 1  # it can be resumed, for those who know its secret
        await until(lambda: not server.pool.num_read)
        assert await server.pool.drain(5)


@both
async def test_leaving_a_stream_before_its_first_message_cancels_it(kind: str) -> None:
    gate = Gate()
    async with (
        running(ScriptedEngine(WORDS, before_step=gate), max_resume_window_s=1.0) as server,
        AnyClient(kind, server.target) as client,
    ):
        running_one = client.generate()
        await do(running_one.start)
        await until(lambda: server.pool.num_steps == 0 and server.pool.num_running == 1)
        gate.let_through(1000)
        for prompt in ("x", "x" * 200_000):  # the second takes a while to be encoded
            stream = client.generate(prompt, ignore_eos=True, max_tokens=100)
            await leave(stream)
            with pytest.raises(CallFailedError, match="closed"):
                await do(stream.text)
        assert await do(running_one.text) == WORDS
        await until(lambda: not server.pool.num_running)


@both
async def test_a_client_that_is_closed_cancels_its_streams(kind: str) -> None:
    gate = Gate()
    async with running(ScriptedEngine(WORDS, before_step=gate)) as server:
        async with AnyClient(kind, server.target) as client:
            streams = [client.generate(ignore_eos=True) for _ in range(3)]
            for stream in streams:
                await do(stream.start)
            gate.let_through(100)
        assert server.pool.num_running == 0
        error = await failure(streams[0])
        assert (error.code, error.message) == ("CANCELLED", "the stream was closed before it had ended")
        for use in (client.inner.models, lambda: client.inner.generate("x")):
            with pytest.raises(CallFailedError, match="the client was closed"):
                await do(use)


@both
async def test_a_stream_that_is_dropped_ends_with_its_window(kind: str) -> None:
    gate = Gate()
    async with (
        running(ScriptedEngine(WORDS, before_step=gate), max_resume_window_s=0.2) as server,
        AnyClient(kind, server.target) as client,
    ):
        stream = client.generate(ignore_eos=True)
        gate.let_through(3)
        await first_chunk(stream)
        assert server.pool.num_read == 1
        del stream
        gc.collect()
        await until(lambda: not server.pool.num_read)
        gate.open_for_good()
        await until(lambda: not server.pool.num_streams)


@both
async def test_closing_wakes_a_reader(kind: str) -> None:
    gate = Gate()
    async with (
        running(ScriptedEngine(WORDS, before_step=gate)) as server,
        AnyClient(kind, server.target) as client,
    ):
        stream = client.generate(ignore_eos=True)
        await do(stream.start)
        reading = asyncio.ensure_future(do(stream.text))
        await asyncio.sleep(0.05)
        gate.let_through(1)
        closing = asyncio.ensure_future(do(stream.close))
        gate.let_through(100)
        await closing
        with pytest.raises(CallFailedError, match="closed"):
            await reading


# ---------------------------------------------------------------------------------------------------------
# Cancelling


@both
async def test_cancel_ends_the_stream_with_its_last_events(kind: str) -> None:
    gate = Gate()
    async with (
        running(ScriptedEngine(WORDS, before_step=gate)) as server,
        AnyClient(kind, server.target) as client,
    ):
        stream = client.generate(ignore_eos=True)
        gate.let_through(3)
        await first_chunk(stream)
        gate.let_through(100)
        assert await do(stream.cancel) == "ABORTED"
        text = await do(stream.text)
        assert stream.finish_reason == "CANCELLED"
        assert stream.usage.num_completion_tokens == stream.num_tokens == len(stream.token_ids)
        assert text == stream.received_text
        assert await do(stream.cancel) == "ALREADY_FINISHED"
        assert await do(client.inner.cancel, request_id=stream.request_id) == "ALREADY_FINISHED"
        assert await do(client.inner.cancel, stream_id="nobody-1") == "NOT_FOUND"


@both
async def test_cancel_works_before_the_first_message_and_beside_a_reader(kind: str) -> None:
    gate = Gate()
    async with (
        running(ScriptedEngine(WORDS, before_step=gate)) as server,
        AnyClient(kind, server.target) as client,
    ):
        first = client.generate(ignore_eos=True)
        cancelling = asyncio.ensure_future(do(first.cancel))
        reading = asyncio.ensure_future(do(first.text))
        await asyncio.sleep(0.05)
        gate.let_through(100)
        assert await cancelling == "ABORTED"
        await reading
        assert first.finish_reason == "CANCELLED"


async def test_a_read_that_is_given_up_loses_nothing() -> None:
    gate = Gate()
    async with running(ScriptedEngine(WORDS, before_step=gate)) as server, Client(server.target) as client:
        stream = client.generate("x")
        gate.let_through(3)
        while stream.num_tokens < 3:  # one chunk may bring several
            await anext(stream)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await anext(stream)
        gate.open_for_good()
        assert await stream.text() == WORDS
        assert stream.num_resumes == 1


async def test_a_task_that_is_cancelled_while_it_reads_cancels_its_stream() -> None:
    gate = Gate()
    async with running(ScriptedEngine(WORDS, before_step=gate)) as server, Client(server.target) as client:

        async def read() -> None:
            async with client.generate("x", ignore_eos=True) as stream:
                await stream.text()

        task = asyncio.ensure_future(read())
        gate.let_through(3)
        await until(lambda: server.pool.num_steps == 3)
        task.cancel()
        gate.let_through(100)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert server.pool.num_running == 0


# ---------------------------------------------------------------------------------------------------------
# Trying again, and what is raised


@both
async def test_a_refused_request_is_tried_again_after_the_hint(kind: str) -> None:
    gate = Gate()
    engine = ScriptedEngine(WORDS, before_step=gate)
    async with running(engine, max_running=1, max_waiting=1) as server:
        async with AnyClient(kind, server.target) as client, AnyClient(kind, server.target) as other:
            first = [client.generate() for _ in range(2)]
            for stream in first:
                await do(stream.start)
            began = time.monotonic()
            late = asyncio.ensure_future(do(other.generate().text))
            await asyncio.sleep(0.3)
            gate.open_for_good()
            assert await late == WORDS
            assert time.monotonic() - began >= 1.0, "the hint is a second"
            assert [await do(stream.text) for stream in first] == [WORDS, WORDS]
        assert server.pool.num_streams == 3


@both
async def test_a_refusal_is_raised_at_once_where_waiting_is_of_no_use(kind: str) -> None:
    gate = Gate()
    engine = ScriptedEngine(WORDS, before_step=gate)
    async with (
        running(engine, max_running=1, max_waiting=1) as server,
        AnyClient(kind, server.target) as client,
        AnyClient(kind, server.target, max_retries=0) as other,
    ):
        first = [client.generate() for _ in range(2)]
        for stream in first:
            await do(stream.start)
        for stream in (client.generate(timeout_s=0.5), other.generate()):
            error = await failure(stream)
            assert (error.code, error.server_reason) == ("RESOURCE_EXHAUSTED", "TOO_MANY_WAITING")
            assert not isinstance(error, StreamIncompleteError)
        gate.open_for_good()
        for stream in first:
            await do(stream.text)


@both
async def test_a_server_that_is_stopping_is_tried_again_and_then_said(kind: str) -> None:
    async with running(ScriptedEngine(WORDS)) as server:
        await server.pool.drain(1)
        async with AnyClient(kind, server.target, max_retries=1) as client:
            began = time.monotonic()
            error = await failure(client.generate())
            assert (error.code, error.server_reason) == ("UNAVAILABLE", "DRAINING")
            assert 1.0 <= time.monotonic() - began < 10


@both
async def test_a_request_id_in_use_is_raised_with_its_stream(kind: str) -> None:
    async with running(ScriptedEngine(WORDS)) as server, AnyClient(kind, server.target) as client:
        first = client.generate(request_id="mine")
        await do(first.text)
        error = await failure(client.generate(request_id="mine"))
        assert (error.code, error.server_reason) == ("ALREADY_EXISTS", "REQUEST_ID_IN_USE")
        assert error.metadata["stream_id"] == first.stream_id


@both
async def test_a_stream_lost_with_its_worker_is_raised_with_what_was_received(kind: str) -> None:
    gate, steps = Gate(), list[int]()

    def before_step(batch: StepBatch) -> None:
        gate(batch)
        steps.append(batch.num_tokens)
        if len(steps) > 4:
            raise EngineError("the device went away")

    async with (
        running(ScriptedEngine(WORDS, before_step=before_step), max_resume_window_s=1.0) as server,
        AnyClient(kind, server.target) as client,
    ):
        stream = client.generate()
        gate.let_through(4)
        while stream.num_tokens < 4:
            await first_chunk(stream)
        gate.open_for_good()
        error = await failure(stream)
        assert isinstance(error, StreamIncompleteError)
        assert (error.code, error.server_reason) == ("UNAVAILABLE", "WORKER_LOST")
        assert (error.text, error.position) == ("one two three four", 4)
        assert error.stream_id == stream.stream_id
        assert (await failure(stream)) is error, "it stays so"


@both
async def test_a_stream_that_another_took_over_is_raised_and_left_alone(kind: str) -> None:
    gate = Gate()
    async with (
        running(ScriptedEngine(WORDS, before_step=gate)) as server,
        AnyClient(kind, server.target) as client,
    ):
        stream = client.generate()
        start = await do(stream.start)
        taken = resume(server, stream.stream_id, start.resume_token)
        await taken.read()
        error = await failure(stream)
        assert (error.code, error.server_reason) == ("ABORTED", "READER_REPLACED")
        await do(stream.close)
        gate.open_for_good()
        assert (await taken.rest()).text == WORDS


def resume(server: TestServer, stream_id: str, resume_token: bytes) -> Call:
    from streamsrv.v1 import inference_pb2 as pb

    request = pb.ResumeRequest(stream_id=stream_id, resume_token=resume_token)
    return Call(server.client.stub.Resume(request))


# ---------------------------------------------------------------------------------------------------------
# Reading, and the other calls


@both
async def test_texts_are_the_text_in_pieces_and_the_stream_tells_the_rest(kind: str) -> None:
    async with running(ScriptedEngine(WORDS)) as server, AnyClient(kind, server.target) as client:
        stream = client.generate(max_tokens_per_chunk=1, request_id="mine")
        if kind == "async":
            pieces = [text async for text in stream.texts()]
        else:
            pieces = await asyncio.to_thread(lambda: list(stream.texts()))
        assert "".join(pieces) == WORDS == stream.received_text == await do(stream.text)
        assert len(pieces) > 5
        assert (stream.request_id, stream.finish_reason) == ("mine", "STOP")
        assert isinstance(stream.matched, int)
        assert stream.num_tokens == stream.usage.num_completion_tokens == NUM_WORDS + 1
        assert stream.position == NUM_WORDS + 3
        assert stream.num_bytes > 0
        assert stream.first_token_s > 0
        assert (stream.num_resumes, stream.num_resends) == (0, 0)


@both
async def test_a_request_made_by_hand_keeps_what_it_says(kind: str) -> None:
    async with running(ScriptedEngine(WORDS)) as server, AnyClient(kind, server.target) as client:
        request = make_request("x", request_id="mine", resume_window_s=5)
        request.resume_token = b"0123456789abcdef"
        stream = client.inner.send(request)
        start = await do(stream.start)
        assert (start.request_id, start.resume_token) == ("mine", request.resume_token)
        assert start.resume_window_ms == 5000
        await do(stream.text)
        for options, window_ms in (({"resume_window_s": 0}, 0), ({}, 30_000)):
            stream = client.generate(**options)
            assert (await do(stream.start)).resume_window_ms == window_ms
            await do(stream.text)


@both
async def test_the_other_calls_answer(kind: str) -> None:
    async with (
        running(ScriptedEngine(WORDS), model_name="demo") as server,
        AnyClient(kind, server.target) as client,
    ):
        ids = await do(client.inner.tokenize, "one two", model="demo")
        assert await do(client.inner.detokenize, ids) == "one two"
        assert [model.name for model in await do(client.inner.models)] == ["demo"]
        assert (await do(client.inner.server_info)).instance_id == server.pool.instance_id
        with pytest.raises(CallFailedError) as caught:
            await do(client.inner.tokenize, "x", model="other")
        assert (caught.value.code, caught.value.server_reason) == ("NOT_FOUND", "MODEL_NOT_FOUND")


@both
async def test_a_key_and_certificates_go_with_every_call(kind: str, tmp_path: Path) -> None:
    key, keys, authority = new_key(), tmp_path / "keys", Authority(tmp_path, "authority")
    keys.write_text(key_line("alice", key) + "\n")
    pair = authority.sign("server")
    settings = {"api_keys": keys, "tls_cert": pair.cert, "tls_key": pair.key}
    async with running(ScriptedEngine(WORDS), **settings) as server:
        credentials = channel_credentials(ca=authority.path, pair=None)
        async with AnyClient(kind, server.target, credentials=credentials, api_key=key) as client:
            stream = client.generate(ignore_eos=True)
            await do(stream.start)
            await do(stream.close)
            assert server.pool.num_running == 0
            assert await do(client.generate().text) == WORDS
            assert await do(client.inner.tokenize, "one")
        async with AnyClient(kind, server.target, credentials=credentials) as client:
            assert (await failure(client.generate())).code == "UNAUTHENTICATED"
        async with AnyClient(kind, server.target, api_key=key) as client:
            assert (await failure(client.generate())).code == "UNAVAILABLE"


# ---------------------------------------------------------------------------------------------------------
# The command line


def command(target: str, *flags: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "streamsrv", "generate", "--server", target, *flags, "x")


async def test_generate_prints_a_stream_that_broke_as_if_it_had_not_and_says_so_at_the_end() -> None:
    async with running() as server, FaultyProxy(server.target, [Fault(3000), Fault(3000)]) as proxy:
        flags = ("--max-tokens", "200", "--ignore-eos", "--max-tokens-per-chunk", "1")
        outputs = []
        for target in (server.target, proxy.target):
            process = await asyncio.create_subprocess_exec(
                *command(target, *flags), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
            )
            outputs.append(await process.communicate())
            assert process.returncode == 0
        (whole, _), (output, error) = outputs
        assert output == whole
        *_, said, summary = error.decode().splitlines()
        assert said == "[the connection broke; the stream was resumed 2 times]"
        assert "200 tokens, LENGTH" in summary


async def test_generate_that_is_interrupted_cancels_on_the_server() -> None:
    async with running(ScriptedEngine(WORDS, step_s=0.01), prompt_lookup=False) as server:
        # What a shell starts in the background ignores the signal, and so would its children.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            process = await asyncio.create_subprocess_exec(
                *command(server.target, "--ignore-eos"), stdout=asyncio.subprocess.PIPE
            )
        finally:
            signal.signal(signal.SIGINT, before)
        assert process.stdout is not None
        await process.stdout.read(10)
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 130
        assert server.pool.num_running == 0
