"""Whatever a client sends, it gets a stream or a status, and never a fault of ours."""

import asyncio
import contextlib
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engines.scripted import ScriptedEngine
from streamsrv.v1 import inference_pb2 as pb
from tests.integration.test_service import WORDS
from tests.servers import TestServer, running

# What a wrong request may be answered with. UNKNOWN, INTERNAL and the like would be faults of ours.
ALLOWED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.OUT_OF_RANGE,
}
METHODS = ["Generate", "Resume", "Cancel", "Tokenize", "Detokenize", "ListModels", "GetServerInfo"]

uint32 = st.integers(0, 2**32 - 1) | st.integers(0, 40)
uint64 = st.integers(0, 2**64 - 1)
floats = st.floats(width=32) | st.sampled_from([0.0, -0.0, 1.0, float("nan"), float("inf"), -1.0])
texts = st.text(max_size=40) | st.sampled_from(["<|end|>", "<|turn|>", "�", "\0"])
booleans = st.booleans()


def message(cls: Any, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Messages with any of the fields left out."""
    return st.fixed_dictionaries({}, optional=fields).map(lambda values: cls(**values))


chats = message(
    pb.Chat,
    messages=st.lists(message(pb.ChatMessage, role=st.integers(0, 9), content=texts), max_size=3),
)
prompts = st.one_of(
    message(pb.Prompt, text=texts, add_special_tokens=booleans, parse_special_tokens=booleans),
    message(pb.Prompt, token_ids=message(pb.TokenIds, ids=st.lists(uint32, max_size=9))),
    message(pb.Prompt, chat=chats, parse_special_tokens=booleans),
)
stream_options = message(
    pb.StreamOptions,
    accepted_codecs=st.lists(st.integers(0, 9), max_size=3),
    max_tokens_per_chunk=uint32,
    min_chunk_interval_ms=st.integers(0, 5) | st.integers(9_999, 2**32 - 1).filter(lambda n: n > 10_000),
    resume_window_ms=uint32,
)
requests = message(
    pb.GenerateRequest,
    request_id=texts,
    model=st.sampled_from(["", "scripted", "other"]),
    prompt=prompts,
    sampling=message(
        pb.SamplingParams, temperature=floats, top_k=uint32, top_p=floats, min_p=floats, seed=uint64
    ),
    stop=message(
        pb.StopConditions,
        max_tokens=st.integers(0, 60) | uint32,
        min_tokens=uint32,
        stop=st.lists(texts, max_size=3),
        stop_token_ids=st.lists(uint32, max_size=3),
        ignore_eos=booleans,
        include_stop=booleans,
    ),
    output=message(
        pb.OutputOptions,
        text=booleans,
        token_ids=booleans,
        text_lengths=booleans,
        skip_special_tokens=booleans,
    ),
    stream=stream_options,
)
resumes = message(
    pb.ResumeRequest,
    stream_id=texts,
    resume_token=st.binary(max_size=20),
    position=uint32,
    stream=stream_options,
)


async def status_of(server: TestServer, method: str, data: bytes) -> grpc.StatusCode:
    """Call a method with any bytes and read what comes to its end."""
    channel: Any = server.client._channel
    streaming = method in ("Generate", "Resume")
    kind = channel.unary_stream if streaming else channel.unary_unary
    path = f"/streamsrv.v1.InferenceService/{method}"
    call = kind(path, request_serializer=lambda raw: raw)(data, timeout=30)
    with contextlib.suppress(grpc.aio.AioRpcError):  # its code is looked at below
        if streaming:
            while await call.read() is not grpc.aio.EOF:
                pass
        else:
            await call
    code: grpc.StatusCode = await call.code()
    details = await call.details()
    assert code in ALLOWED, (method, data, code, details)
    assert details or code is grpc.StatusCode.OK
    return code


async def check_all(server: TestServer, cases: list[tuple[str, bytes]]) -> None:
    for method, data in cases:
        await status_of(server, method, data)
    assert await server.client.generate("x").text() == WORDS


cases_strategy = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(METHODS), st.binary(max_size=60)),
        requests.map(lambda r: ("Generate", r.SerializeToString())),
        prompts.map(lambda p: ("Tokenize", pb.TokenizeRequest(prompt=p).SerializeToString())),
        resumes.map(lambda r: ("Resume", r.SerializeToString())),
    ),
    min_size=20,
    max_size=20,
)


async def run_cases(cases: list[tuple[str, bytes]]) -> None:
    async with running(ScriptedEngine(WORDS), max_resume_window_s=0.05) as server:
        await check_all(server, cases)


@given(cases_strategy)
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_request_gets_a_stream_or_a_status(cases: list[tuple[str, bytes]]) -> None:
    asyncio.run(run_cases(cases))


@pytest.mark.parametrize("method", METHODS)
async def test_bytes_that_are_no_message_are_an_invalid_argument(method: str) -> None:
    async with running(ScriptedEngine(WORDS)) as server:
        assert await status_of(server, method, b"\xff\xff\xff") is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_method_that_is_not_there_is_unimplemented() -> None:
    async with running(ScriptedEngine(WORDS)) as server:
        channel: Any = server.client._channel
        call = channel.unary_unary("/streamsrv.v1.InferenceService/Train")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"")
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_fault_of_ours_is_logged_here_and_not_shown_there(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(ScriptedEngine(WORDS)) as server:
        monkeypatch.setattr(server.pool, "submit", lambda *_, **__: 1 / 0)
        with pytest.raises(Exception, match="INTERNAL: the server made a fault") as caught:
            await server.client.generate("x").text()
        assert "division" not in str(caught.value)
        assert "ZeroDivisionError" in caplog.text
