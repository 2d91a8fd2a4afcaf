"""What many streams, cancels and stalled readers cost."""

import asyncio
import statistics
import time
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np

from streamsrv.bench.errors import BenchError
from streamsrv.bench.percentiles import percentiles
from streamsrv.bench.suite.markdown import section
from streamsrv.bench.suite.server_process import server_process
from streamsrv.client import make_request
from streamsrv.v1 import inference_pb2 as pb
from streamsrv.v1.inference_pb2_grpc import InferenceServiceStub

NUM_STREAMS = 1_000
NUM_CHUNKS = 50
LIMIT_KIB = 96.0
STEP_MS = 20.0
# A client with these takes few small messages before its flow control stops the server.
_SMALL_WINDOW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 4096)]
_KIB = 1024


def _request(max_tokens: int = 8_000) -> pb.GenerateRequest:
    # Without a resume window, and long enough not to end while it is measured.
    return make_request("x", max_tokens=max_tokens, ignore_eos=True, temperature=0.0, max_tokens_per_chunk=1)


async def _take(call: Any, num_messages: int) -> None:
    for _ in range(num_messages):
        if not isinstance(await call.read(), pb.GenerateResponse):
            raise BenchError("a stream ended while it was measured")


async def streams_section(say: Callable[[str], None]) -> str:
    """Measure what a stream holds: one that has sent compressed chunks, and one that waits."""
    rows = []
    for what, max_running, num_messages in (
        (f"has sent {NUM_CHUNKS} compressed chunks", NUM_STREAMS + 100, NUM_CHUNKS + 1),
        ("waits in the queue", 1, 1),
    ):
        say(f"holding {NUM_STREAMS} streams, each of which {what}")
        bound = NUM_STREAMS + 100
        flags = (
            f"--engine scripted --max-running {min(max_running, bound)} --max-waiting {bound} "
            f"--max-waiting-per-caller {bound} --max-step-tokens {bound} --script-step-ms 50 "
            "--drain-grace-s 0"
        )
        async with (
            server_process(*flags.split()) as server,
            grpc.aio.insecure_channel(str(server.address)) as channel,
        ):
            stub: Any = InferenceServiceStub(channel)
            warm = [stub.Generate(_request()) for _ in range(20)]
            await asyncio.gather(*(_take(call, 1) for call in warm))
            before = server.resident_bytes()
            calls = [stub.Generate(_request()) for _ in range(NUM_STREAMS)]
            await asyncio.gather(*(_take(call, num_messages) for call in calls))
            held = (server.resident_bytes() - before) / NUM_STREAMS / _KIB
            for call in (*warm, *calls):
                call.cancel()
        rows.append([what, f"{held:.1f}"])
    return section(
        "Memory of a stream",
        f"{NUM_STREAMS:,} streams on the scripted engine, one token a chunk, over one connection: what the "
        f"server's resident memory grew by, divided by them. The goal is less than {LIMIT_KIB:.0f} KiB for "
        "one that runs; one that waits has no zstd context.",
        ("a stream that", "KiB"),
        rows,
    )


async def cancel_section(num_cancels: int, say: Callable[[str], None]) -> str:
    """Measure Cancel, which answers when the blocks are free."""
    say(f"cancelling {num_cancels} of 32 streams, one after the other")
    rng = np.random.default_rng(1)
    latencies_s: list[float] = []
    flags = ("--engine", "scripted", "--script-step-ms", str(STEP_MS), "--drain-grace-s", "0")
    async with (
        server_process(*flags) as server,
        grpc.aio.insecure_channel(str(server.address)) as channel,
    ):
        stub: Any = InferenceServiceStub(channel)
        calls = [stub.Generate(_request()) for _ in range(32)]
        for _ in range(num_cancels):
            call = calls.pop(0)
            start = await call.read()
            await asyncio.sleep(rng.random() * STEP_MS / 1000)
            began_s = time.perf_counter()
            await stub.Cancel(pb.CancelRequest(stream_id=start.stream_id))
            latencies_s.append(time.perf_counter() - began_s)
            call.cancel()
            calls.append(stub.Generate(_request()))
        for call in calls:
            call.cancel()
    p50, p99 = (value * 1000 for value in percentiles(latencies_s, (50, 99)))
    return section(
        "Cancel until the blocks are free",
        f"{num_cancels} calls of Cancel at random moments, 32 streams running, a step of {STEP_MS:g} ms and "
        "the client's round trip included. The goal is less than two steps at the 99th percentile.",
        ("", "p50", "p99"),
        [["ms", f"{p50:.1f}", f"{p99:.1f}"], ["steps", f"{p50 / STEP_MS:.2f}", f"{p99 / STEP_MS:.2f}"]],
    )


async def stall_section(num_rounds: int, say: Callable[[str], None]) -> str:
    """Measure the gaps of streams that are read, with and without others that are not."""
    gaps_ms: dict[int, list[float]] = {0: [], 8: []}
    async with server_process(
        "--engine", "scripted", "--script-step-ms", "5", "--stall-limit-s", "600", "--drain-grace-s", "0"
    ) as server:
        for round_ in range(num_rounds):
            for num_stalled in sorted(gaps_ms, reverse=bool(round_ % 2)):
                say(f"round {round_ + 1} of {num_rounds}: 16 readers, {num_stalled} that take nothing")
                gaps_ms[num_stalled].append(await _mean_gap_ms(str(server.address), num_stalled))
    alone, beside = (statistics.median(gaps_ms[n]) for n in (0, 8))
    return section(
        "What a stalled reader costs others",
        f"16 streams that are read, a step of 5 ms; the mean gap between their tokens, the median of "
        f"{num_rounds} interleaved rounds. Stalled ones are computed, and sent to until their transport is "
        "full. The goal is less than 5% more.",
        ("beside", "mean gap, ms"),
        [
            ["nobody", f"{alone:.2f}"],
            ["8 readers that take nothing", f"{beside:.2f} ({(beside / alone - 1) * 100:+.1f}%)"],
        ],
    )


async def _mean_gap_ms(address: str, num_stalled: int) -> float:
    stalled_channels = [grpc.aio.insecure_channel(address, options=_SMALL_WINDOW) for _ in range(num_stalled)]
    async with grpc.aio.insecure_channel(address) as channel:
        stalled: list[Any] = [InferenceServiceStub(c).Generate(_request()) for c in stalled_channels]
        await asyncio.gather(*(_take(call, 1) for call in stalled))
        # Their transports take some hundred messages first.
        await asyncio.sleep(1.0)
        stub: Any = InferenceServiceStub(channel)
        readers = [stub.Generate(_request()) for _ in range(16)]
        await asyncio.gather(*(_take(call, 10) for call in readers))
        began_s = time.perf_counter()
        await asyncio.gather(*(_take(call, 200) for call in readers))
        gap_ms = (time.perf_counter() - began_s) / 200 * 1000
        for call in (*stalled, *readers):
            call.cancel()
    for stalled_channel in stalled_channels:
        await stalled_channel.close()
    return gap_ms
