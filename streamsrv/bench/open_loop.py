"""An open loop: each request is sent when it is due, however many have not ended."""

import asyncio
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq

from streamsrv.bench.load import LoadRun, RequestRecord, send_one
from streamsrv.bench.load_stop import LoadStop
from streamsrv.client import Client
from streamsrv.v1 import inference_pb2 as pb


async def run_open_loop(
    client: Client,
    make_request: Callable[[int], pb.GenerateRequest],
    due_s: Seq[float],
    *,
    begin_s: float,
    rate_per_s: float,
    duration_s: float = 0.0,
    timeout_s: float | None = None,
    on_record: Callable[[RequestRecord], None] = lambda _record: None,
    stop: LoadStop | None = None,
) -> LoadRun:
    """Send request i at `begin_s + due_s[i]` of `time.perf_counter`, over one connection.

    Each record knows when its request was due, and all its latencies count from there: what a server or this
    sender delays is measured and not left out. A sender that is late sends at once, one after the other.
    The run lasts `duration_s` at least, though nothing may be due at its end. A request that has not ended
    `timeout_s` after it was sent fails. `stop` ends the run at once.
    """
    stop = stop or LoadStop()
    records: list[RequestRecord] = []

    async def send(request: pb.GenerateRequest, at_s: float) -> None:
        record, _ = await send_one(client, request, due_s=at_s, timeout_s=timeout_s, stop=stop)
        records.append(record)
        on_record(record)

    async with asyncio.TaskGroup() as requests:
        for number, offset_s in enumerate(due_s):
            request = make_request(number)  # before it is due
            at_s = begin_s + offset_s
            # Also where nothing is left to wait: what was created runs when this task waits.
            async with stop.cutting():
                await asyncio.sleep(max(at_s - time.perf_counter(), 0.0))
            if stop.is_set:
                break
            requests.create_task(send(request, at_s))
    end_s = begin_s + duration_s
    async with stop.cutting():
        await asyncio.sleep(max(end_s - time.perf_counter(), 0.0))
    if stop.is_set:
        end_s = min(end_s, time.perf_counter())
    ended_s = max([end_s, *(record.ended_s for record in records)])
    return LoadRun(None, begin_s, ended_s, ended_s, tuple(records), rate_per_s)
