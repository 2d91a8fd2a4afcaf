"""What people write, what a model answers, and what lets them in is in no log."""

import logging
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest

from engines.api import EngineError, StepBatch
from engines.scripted import ScriptedEngine
from streamsrv.api_keys import key_line, new_key
from streamsrv.client import make_request
from streamsrv.log_format import JsonFormatter
from streamsrv.v1 import inference_pb2 as pb
from tests.calls import Call
from tests.integration.test_resume import refusal
from tests.servers import running, until

PROMPT, ANSWER, STOP, WRONG_KEY = "pr0mpt", "answ3r", "st0p", "k3y-that-is-wrong"


async def test_prompts_outputs_and_keys_are_in_no_log_whatever_happens(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.DEBUG)
    key, keys, fail = new_key(), tmp_path / "keys", threading.Event()
    keys.write_text(key_line("alice", key))
    as_alice = (("authorization", f"Bearer {key}"),)

    def before_step(_: StepBatch) -> None:
        if fail.is_set():
            raise EngineError("the device went away")

    engine = ScriptedEngine(f"{ANSWER} " * 10, before_step=before_step, step_s=0.005)
    async with running(engine, api_keys=keys) as server:
        stub = server.client.stub
        request = make_request(f"{PROMPT} text", stop=[STOP])
        request.stream.resume_window_ms = 20_000
        chat = make_request([("user", f"{PROMPT} chat")])

        def generate(request: pb.GenerateRequest, timeout: float | None = None) -> Call:
            return Call(stub.Generate(request, timeout=timeout, metadata=as_alice))

        whole = await generate(request).rest()
        assert ANSWER in whole.text
        assert (await generate(chat).rest()).ended
        resume = pb.ResumeRequest(stream_id=whole.stream_id)
        assert ANSWER in (await Call(stub.Resume(resume, metadata=as_alice)).rest()).text
        ids = (await stub.Tokenize(pb.TokenizeRequest(prompt=request.prompt), metadata=as_alice)).token_ids
        await stub.Detokenize(pb.DetokenizeRequest(token_ids=ids), metadata=as_alice)

        wrong = (("authorization", f"Bearer {WRONG_KEY}"),)
        assert (await refusal(Call(stub.Generate(request, metadata=wrong)))).code == "UNAUTHENTICATED"
        malformed = PROMPT.encode() * 99
        async with grpc.aio.insecure_channel(server.target) as channel:
            raw: Any = channel  # its type stubs want a serializer
            method = raw.unary_stream("/streamsrv.v1.InferenceService/Generate")
            with pytest.raises(grpc.aio.AioRpcError, match="INVALID_ARGUMENT"):
                await method(malformed, metadata=as_alice).read()
        invalid = make_request(PROMPT, stop=[STOP * 999])
        assert (await refusal(generate(invalid))).code == "INVALID_ARGUMENT"
        chat.prompt.chat.messages[0].role = 99  # type: ignore[assignment]
        assert (await refusal(generate(chat))).code == "INVALID_ARGUMENT"
        endless = make_request(PROMPT, ignore_eos=True)
        assert (await refusal(generate(endless, timeout=0.1))).code == "DEADLINE_EXCEEDED"
        left = generate(endless)
        await left.read()
        left.call.cancel()
        lost = generate(endless)
        await lost.read()
        fail.set()
        assert (await refusal(lost)).server_reason == "WORKER_LOST"
        fail.clear()
        await until(lambda: server.pool.healthy)

    lines = [JsonFormatter().format(record) for record in caplog.records]
    lines += [str(record.__dict__) for record in caplog.records]
    assert any("the device went away" in line for line in lines), "records are kept, with their exceptions"
    assert any(whole.stream_id in line for line in lines)
    for secret in (PROMPT, ANSWER, STOP, WRONG_KEY, key, whole.start.resume_token.hex()):
        assert not [line for line in lines if secret in line]
