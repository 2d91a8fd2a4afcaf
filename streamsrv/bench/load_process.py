"""A process that puts load on a server: `python -m streamsrv.bench.load_process`.

It reads messages of `load_messages` from standard input, does one after the other, and ends with its input.
"""

import asyncio
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import uvloop

from engines.api import StreamsrvError
from streamsrv.bench.cpu_time import CpuClock
from streamsrv.bench.load import LoadPlan, LoadRun, RequestRecord, run_closed_loop
from streamsrv.bench.load_messages import (
    HEADER_BYTES,
    Done,
    Failed,
    Job,
    Progress,
    Ready,
    Run,
    Stop,
    body_length,
    decode,
    encode,
)
from streamsrv.bench.load_stop import LoadStop
from streamsrv.bench.open_loop import run_open_loop
from streamsrv.bench.schedule import OpenPlan
from streamsrv.bench.socket_bytes import SocketBytes
from streamsrv.client import Client
from streamsrv.v1 import inference_pb2 as pb

_PROGRESS_S = 0.2


def main() -> None:
    """Serve the process that started this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the one that started this ends it
    # What is printed by mistake must not stand between messages.
    output = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def write(message: Any) -> None:
        output.write(encode(message))
        output.flush()

    uvloop.run(_serve(write))


async def _serve(write: Callable[[Any], None]) -> None:
    messages: asyncio.Queue[Any] = asyncio.Queue(1)
    stop = LoadStop()
    _read_messages(messages, stop)
    try:
        job: Job = await messages.get()
        async with job.endpoint.connect() as client:
            await client.server_info()  # connecting is done once, and not measured
            requests = await job.workload.requests(client, job.seed)
            write(Ready())
            while True:
                write(await _run(client, job, requests, await messages.get(), write, stop))
    except StreamsrvError as error:
        write(Failed(str(error)))


def _read_messages(messages: asyncio.Queue[Any], stop: LoadStop) -> None:
    """Read on a thread, which ends the process when whoever started it is gone, even in a run."""
    loop = asyncio.get_running_loop()

    def read() -> None:
        while len(header := sys.stdin.buffer.read(HEADER_BYTES)) == HEADER_BYTES:
            message = decode(sys.stdin.buffer.read(body_length(header)))
            if isinstance(message, Stop):
                loop.call_soon_threadsafe(stop.set)
            else:
                asyncio.run_coroutine_threadsafe(messages.put(message), loop)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()


async def _run(
    client: Client,
    job: Job,
    requests: Callable[[int], pb.GenerateRequest],
    command: Run,
    write: Callable[[Any], None],
    stop: LoadStop,
) -> Done:
    share, plan = command.share, command.plan
    port, timeout_s = job.endpoint.address.port, job.workload.timeout_s
    reporter = _Reporter(write)

    def make_request(own_index: int) -> pb.GenerateRequest:
        return requests(command.first_index + share.index(own_index))

    own_due_s: list[float] = []
    if isinstance(plan, OpenPlan):
        own_due_s = plan.due_times_s(job.seed)[share.number :: share.num_shares].tolist()
    cpu = CpuClock()
    cpu_before_s, wire_before = cpu.seconds(), SocketBytes.now(port)
    run: LoadRun
    if isinstance(plan, LoadPlan):
        own_plan = LoadPlan(
            share.of(plan.concurrency),
            None if plan.num_requests is None else share.of(plan.num_requests),
            plan.duration_s,
        )
        await asyncio.sleep(max(command.begin_s - time.perf_counter(), 0.0))
        run = await run_closed_loop(
            client, make_request, own_plan, timeout_s=timeout_s, on_record=reporter.add, stop=stop
        )
    else:
        run = await run_open_loop(
            client,
            make_request,
            own_due_s,
            begin_s=command.begin_s,
            rate_per_s=plan.rate_per_s,
            duration_s=plan.duration_s or 0.0,
            timeout_s=timeout_s,
            on_record=reporter.add,
            stop=stop,
        )
    cpu_s, wire = cpu.seconds() - cpu_before_s, SocketBytes.now(port).since(wire_before)
    reporter.flush()
    gc.unfreeze()
    return Done(run, cpu_s, wire)


class _Reporter:
    """Tells a few times a second what has ended: a message for each request would be load of its own."""

    def __init__(self, write: Callable[[Any], None]) -> None:
        self._write = write
        self._counts = (0, 0, 0, 0)
        self._told_s = time.perf_counter()

    def add(self, record: RequestRecord) -> None:
        if record.was_cut:
            return
        num_requests, num_tokens, num_failed, num_unavailable = self._counts
        code = None if record.failure is None else record.failure.code
        self._counts = (
            num_requests + 1,
            num_tokens + record.num_tokens,
            num_failed + (code is not None),
            num_unavailable + (code == "UNAVAILABLE"),
        )
        if time.perf_counter() - self._told_s >= _PROGRESS_S:
            self.flush()

    def flush(self) -> None:
        # What is kept for the report must not be looked through by the collector again and again: with
        # 10,000 requests of 64 tokens it stood still for 200 ms, and so did every stream.
        gc.freeze()
        self._write(Progress(*self._counts))
        self._counts = (0, 0, 0, 0)
        self._told_s = time.perf_counter()


if __name__ == "__main__":
    main()
