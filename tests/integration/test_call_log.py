"""The log of a whole server."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from engines.scripted import ScriptedEngine
from streamsrv.client import make_request
from streamsrv.errors import CallFailedError
from streamsrv.log_format import FIELDS
from streamsrv.v1 import inference_pb2 as pb
from tests.calls import Call
from tests.integration.test_service import WORDS, Gate
from tests.servers import TestServer, running, until


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[list[dict[str, Any]]]:
    """The fields of each line of the call log so far."""
    found: list[dict[str, Any]] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append({"message": record.getMessage(), **getattr(record, FIELDS)})

    logger, handler = logging.getLogger("streamsrv.call_log"), Collect()
    logger.addHandler(handler)
    with caplog.at_level(logging.INFO):
        yield found
    logger.removeHandler(handler)


def generate(
    server: TestServer, prompt: Any = "x y", *, timeout_s: float | None = None, **options: Any
) -> Call:
    request = make_request(prompt, **options)
    request.stream.resume_window_ms = 20_000 if timeout_s is None else 0
    return Call(server.client.stub.Generate(request, timeout=timeout_s))


async def test_a_request_is_one_line(lines: list[dict[str, Any]]) -> None:
    async with running(ScriptedEngine(WORDS)) as server:
        call = await generate(server, request_id="mine").rest()
        await until(lambda: bool(lines))
    (line,) = lines
    assert call.usage is not None
    assert line["message"] == "Generate"
    assert line["stream_id"] == call.stream_id
    assert line["request_id"] == "mine"
    assert line["model"] == "scripted"
    assert "127.0.0.1" in line["caller"]
    assert line["prompt_tokens"] == call.usage.num_prompt_tokens
    assert line["output_tokens"] == call.usage.num_completion_tokens
    assert line["reason"] == "STOP"
    assert 0 < line["queue_time_s"] < line["time_to_first_token_s"] < line["duration_s"] < 30
    assert "prompt" not in line


async def test_calls_that_end_otherwise_say_why(lines: list[dict[str, Any]]) -> None:
    gate = Gate()
    async with running(ScriptedEngine(WORDS, before_step=gate), max_running=1) as server:
        with pytest.raises(CallFailedError):
            await generate(server, model="gpt-17", request_id="r" * 200).rest()
        late, gone = generate(server, timeout_s=1.0), generate(server)
        await late.read()
        await gone.read()
        gone.call.cancel()
        await until(lambda: len(lines) == 2)
        with pytest.raises(CallFailedError, match="DEADLINE_EXCEEDED"):
            await late.rest()
        await until(lambda: len(lines) == 3)
        gate.open_for_good()
        await server.client.cancel(stream_id=gone.stream_id)
        await Call(
            server.client.stub.Resume(
                pb.ResumeRequest(stream_id=gone.stream_id, resume_token=gone.start.resume_token)
            )
        ).rest()
    assert [line["reason"] for line in lines[:3]] == ["MODEL_NOT_FOUND", "DISCONNECTED", "DEADLINE_PASSED"]
    assert lines[0]["stream_id"] is None
    assert lines[0]["request_id"] == "r" * 128 + "..."
    assert lines[1]["queue_time_s"] is None, "it never ran"


async def test_a_resumed_stream_says_where_its_call_began(lines: list[dict[str, Any]]) -> None:
    async with running(ScriptedEngine(WORDS)) as server:
        call = await generate(server).rest()
        request = pb.ResumeRequest(stream_id=call.stream_id, resume_token=call.start.resume_token, position=4)
        await Call(server.client.stub.Resume(request)).rest()
        await until(lambda: len(lines) == 2)
    assert [line["message"] for line in lines] == ["Generate", "Resume"]
    assert lines[1]["position"] == 4
    assert lines[0]["stream_id"] == lines[1]["stream_id"]
    assert lines[0]["output_tokens"] == lines[1]["output_tokens"]


SECRET = "a secret that nobody may read in a log"


@pytest.mark.parametrize("level", [logging.INFO, logging.DEBUG])
async def test_nothing_that_is_said_is_logged(level: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(level):
        async with running(ScriptedEngine(SECRET)) as server:
            call = await generate(server, "tell me the secret").rest()
            assert call.text == SECRET
            for options in ({"temperature": -1.0}, {"stop": [SECRET] * 1000}):
                with pytest.raises(CallFailedError):
                    await generate(server, SECRET, **options).rest()
    said = [record.getMessage() + str(getattr(record, FIELDS, "")) for record in caplog.records]
    assert not [text for text in said if "secret" in text or call.start.resume_token.hex() in text]
    assert any(text.startswith("Generate") for text in said)
    assert any(text.startswith("chunk") for text in said) == (level == logging.DEBUG)


@pytest.mark.parametrize(
    ("prompt", "shown"),
    [
        (SECRET, SECRET),
        ([5, 6, 7], "[5, 6, 7]"),
        ([("system", "Größe"), ("user", "b")], '[["system", "Gr\\u00f6\\u00dfe"], ["user", "b"]]'),
    ],
)
async def test_prompts_are_logged_where_that_is_asked_for(
    prompt: Any, shown: str, lines: list[dict[str, Any]]
) -> None:
    async with running(ScriptedEngine(WORDS), log_prompts=True) as server:
        await generate(server, prompt).rest()
        await until(lambda: bool(lines))
    assert lines[0]["prompt"] == shown
