"""What clients do: a coroutine each, which says how it ended."""

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc

from streamsrv.client import make_request
from streamsrv.errors import CallFailedError
from streamsrv.v1 import inference_pb2 as pb
from streamsrv.v1.inference_pb2_grpc import InferenceServiceStub
from tests.calls import SMALL_WINDOW, Call
from tests.proxy import Fault, FaultyProxy

WINDOW_MS = 3_000
# A call that takes longer than this was forgotten by the server.
LIMIT_S = 120.0


class BreachError(Exception):
    """The server broke a promise."""


@dataclass(slots=True)
class Soak:
    """What the behaviours share."""

    address: str
    channel: Any
    stub: Any
    rng: random.Random
    script: str | None
    """What the scripted engine answers to everything; None for a real model."""
    max_tokens: int

    def request(self, **options: Any) -> pb.GenerateRequest:
        """A request with random options; its answer, where it is not cut short, can be checked."""
        rng = self.rng
        options = {
            "max_tokens": rng.randint(1, self.max_tokens),
            "zstd": rng.random() < 0.7,
            "max_tokens_per_chunk": rng.choice([None, None, 1, 3, 8]),
            "min_chunk_interval_ms": rng.choice([None, None, None, 5]),
            "temperature": rng.choice([0.0, 0.0, 1.0]),
            "seed": rng.randrange(1000),
            **options,
        }
        prompt = options.pop("prompt", None) or "word " * rng.choice([1, 3, 10, 100])
        request = make_request(prompt, **options)
        request.stream.resume_window_ms = rng.choice([0, 0, WINDOW_MS])
        return request

    def check(self, call: Call, *, whole: bool = True) -> str:
        """Hold what a call received against what the server promises."""
        if whole and call.usage is None:
            raise BreachError("a call ended with OK and without a StreamEnd")
        if call.usage is not None and call.usage.num_completion_tokens != call.num_tokens:
            raise BreachError(
                f"usage says {call.usage.num_completion_tokens} tokens, {call.num_tokens} were sent"
            )
        if self.script is not None and not self.script.startswith(call.text):
            raise BreachError(f"a wrong text: {call.text[:80]!r}")
        return "OK"


Behaviour = Callable[[Soak], Awaitable[str]]


async def plain(soak: Soak) -> str:
    """Read to the end."""
    return soak.check(await Call(soak.stub.Generate(soak.request())).rest())


async def stop_text(soak: Soak) -> str:
    """End by a stop text, of which nothing may leak."""
    call = await Call(soak.stub.Generate(soak.request(stop=["cursor", "zzz"]))).rest()
    if "cursor" in call.text:
        raise BreachError("a stop text leaked")
    return soak.check(call)


async def cancel_at_once(soak: Soak) -> str:
    """Close the call before anything came: mostly in the queue."""
    call = soak.stub.Generate(soak.request())
    await asyncio.sleep(soak.rng.random() * 0.02)
    call.cancel()
    return "closed"


async def cancel_in_prefill(soak: Soak) -> str:
    """Close the call while a long prompt is computed."""
    call = Call(soak.stub.Generate(soak.request(prompt="word " * 1500)))
    await call.read()
    await asyncio.sleep(soak.rng.random() * 0.01)
    call.call.cancel()
    return "closed"


async def cancel_in_decode(soak: Soak) -> str:
    """Close the call between two messages."""
    call = Call(soak.stub.Generate(soak.request()))
    for _ in range(soak.rng.randint(1, 20)):
        if not await call.read():
            return soak.check(call)
    call.call.cancel()
    return "closed"


async def cancel_by_name(soak: Soak) -> str:
    """Call Cancel, and read to the terminal events."""
    call = Call(soak.stub.Generate(soak.request(max_tokens=soak.max_tokens)))
    await call.read()
    for _ in range(soak.rng.randint(0, 5)):
        await call.read()
    response = await soak.stub.Cancel(pb.CancelRequest(stream_id=call.stream_id), timeout=LIMIT_S)
    if response.result == pb.CANCEL_RESULT_UNSPECIFIED:
        raise BreachError("Cancel answered nothing")
    soak.check(await call.rest())
    return pb.CancelResult.Name(response.result).removeprefix("CANCEL_RESULT_")


async def deadline(soak: Soak) -> str:
    """Give too little time, of which some passes in the queue."""
    timeout_s = soak.rng.random() * 0.1
    return soak.check(await Call(soak.stub.Generate(soak.request(), timeout=timeout_s)).rest())


async def resume(soak: Soak) -> str:
    """Lose the call at any message and pick the stream up again, twice."""
    request = soak.request()
    request.stream.resume_window_ms = WINDOW_MS
    calls = [Call(soak.stub.Generate(request))]
    while True:
        call = calls[-1]
        lost = len(calls) < 3
        for _ in range(soak.rng.randint(1, 10) if lost else 10**9):
            if not await call.read():
                break
        else:
            call.call.cancel()
            position = call.decoder.next_position or 0
            again = pb.ResumeRequest(
                stream_id=call.stream_id, resume_token=call.start.resume_token, position=position,
                stream=request.stream,
            )  # fmt: skip
            calls.append(Call(soak.stub.Resume(again)))
            continue
        break
    # The end itself may have come before the call was lost.
    usage = next((call.usage for call in calls if call.usage is not None), None)
    if usage is None:
        raise BreachError("a resumed call ended with OK and without a StreamEnd")
    received = sum(call.num_tokens for call in calls)
    if received != usage.num_completion_tokens:
        raise BreachError(f"{received} tokens over all calls, usage says {usage.num_completion_tokens}")
    text = "".join(call.text for call in calls)
    if soak.script is not None and not soak.script.startswith(text):
        raise BreachError(f"a wrong text over all calls: {text[:80]!r}")
    return f"resumed x{len(calls) - 1}"


async def stall(soak: Soak) -> str:
    """Take nothing for longer than the server allows."""
    async with grpc.aio.insecure_channel(soak.address, options=SMALL_WINDOW) as channel:
        request = soak.request(max_tokens=soak.max_tokens, max_tokens_per_chunk=1)
        call = Call(InferenceServiceStub(channel).Generate(request))
        await call.read()
        await asyncio.sleep(4)
        return soak.check(await call.rest())


async def killed(soak: Soak) -> str:
    """Lose the connection by a reset, as when a client's process is killed."""
    fault = Fault(cut_after=soak.rng.randint(100, 3000), reset=True)
    async with (
        FaultyProxy(soak.address, [fault]) as proxy,
        grpc.aio.insecure_channel(proxy.target) as channel,
    ):
        with contextlib.suppress(CallFailedError):
            soak.check(await Call(InferenceServiceStub(channel).Generate(soak.request())).rest())
    return "killed"


async def malformed(soak: Soak) -> str:
    """Send what is no request, or one with fields out of range."""
    rng = soak.rng
    if rng.random() < 0.5:
        method = soak.channel.unary_stream("/streamsrv.v1.InferenceService/Generate")
        call = method(rng.randbytes(rng.randint(1, 60)), timeout=LIMIT_S)
        with contextlib.suppress(grpc.aio.AioRpcError):
            while await call.read() is not grpc.aio.EOF:
                pass
        code = await call.code()
        if code not in (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND):
            raise BreachError(f"random bytes were answered with {code.name}: {await call.details()}")
        return str(code.name)
    wrong: dict[str, Any] = rng.choice(
        [
            {"temperature": float("nan")}, {"top_p": 0.0}, {"max_tokens": 0}, {"max_tokens": 4_000_000_000},
            {"stop": [""]}, {"prompt": [4_000_000_000]}, {"model": "nobody"}, {"request_id": "x" * 999},
            {"min_p": -1.0}, {"prompt": "word " * 40_000},
        ]
    )  # fmt: skip
    try:
        await Call(soak.stub.Generate(soak.request(**wrong))).rest()
    except CallFailedError as error:
        if error.code in ("INVALID_ARGUMENT", "NOT_FOUND"):
            return error.code
        raise
    raise BreachError(f"{wrong} was accepted")


BEHAVIOURS: dict[Behaviour, int] = {
    plain: 30,
    stop_text: 5,
    cancel_at_once: 10,
    cancel_in_prefill: 8,
    cancel_in_decode: 10,
    cancel_by_name: 8,
    deadline: 8,
    resume: 12,
    stall: 1,
    killed: 4,
    malformed: 8,
}
"""Each with its weight."""
